//! Steering, residuals and phases from the command line.

#![allow(clippy::unwrap_used)]

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn testdata(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/models").join(name);
    path.to_str().unwrap().to_owned()
}

fn puna(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_puna")).args(args).output().unwrap()
}

#[track_caller]
fn good(args: &[&str]) -> Output {
    let out = puna(args);
    assert!(out.status.success(), "{args:?}: {out:?}");
    out
}

#[track_caller]
fn refused(args: &[&str], words: &[&str]) {
    let out = puna(args);
    let error = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(1), "{args:?}: {error}");
    assert!(words.iter().all(|word| error.contains(word)) && error.lines().count() == 1, "{args:?}: {error}");
}

/// Shape and numbers of a tensor.
fn tensor(bytes: &[u8], name: &str) -> (Vec<usize>, Vec<f32>) {
    let file = SafeTensors::deserialize(bytes).unwrap();
    let tensor = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert_eq!(tensor.dtype(), Dtype::F32);
    let values = tensor.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    (tensor.shape().to_vec(), values)
}

fn i64s(bytes: &[u8], name: &str) -> Vec<i64> {
    let file = SafeTensors::deserialize(bytes).unwrap();
    file.tensor(name).unwrap().data().as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect()
}

/// A folder for a test's files, empty at first.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("inside").join(name);
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }

    fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap()
    }
}

#[test]
fn eval_steers_and_captures() {
    let (folder, model) = (Folder::new("eval"), testdata("llama-gqa/model-f32.gguf"));
    let (vector, golden) =
        (testdata("llama-gqa/control-vector.gguf"), testdata("llama-gqa/control-vector-golden.safetensors"));
    let reference = std::fs::read(&golden).unwrap();
    let others = folder.path("others.json");
    std::fs::write(&others, "[[5, 6, 7], [9, 9, 9, 9, 9, 9]]").unwrap();
    let out = folder.path("out.safetensors");
    let eval = ["eval", &model, "--input", &golden, "--out", &out, "--kv", "f32"];
    for strength in ["1.0", "-0.5"] {
        let (shape, expected) = tensor(&reference, &format!("logits_scale_{strength}"));
        let steered = [&eval[..], &["--control-vector", &vector, "--control-strength", strength]].concat();
        good(&steered);
        let got = tensor(&folder.read("out.safetensors"), "logits");
        assert_eq!(got.0, shape);
        assert!(got.1.iter().zip(&expected).all(|(got, expected)| (got - expected).abs() < 1e-4), "{strength}");
        // Companions are not steered, and the strength may stand with the file.
        let mut beside = [&eval[..], &["--batch-with", &others, "--chunk", "5", "--control-vector"]].concat();
        let with_strength = format!("{vector}:{strength}");
        beside.push(&with_strength);
        good(&beside);
        assert_eq!(tensor(&folder.read("out.safetensors"), "logits").1, got.1, "{strength}");
    }
    good(
        &[&eval[..], &["--hidden-states", "--capture", "0-1", "--capture-positions", "prompt", "--greedy", "3"]]
            .concat(),
    );
    let bytes = folder.read("out.safetensors");
    let ((shape, states), (rows, residual)) = (tensor(&bytes, "hidden_states"), tensor(&bytes, "layer.0"));
    assert_eq!(rows, shape[1..]);
    assert_eq!(residual, states[residual.len()..2 * residual.len()]);
    good(&[&eval[..], &["--capture", "1", "--capture-positions", "all", "--greedy", "3"]].concat());
    assert_eq!(tensor(&folder.read("out.safetensors"), "layer.1").0, [shape[1] + 2, shape[2]]);
}

#[test]
fn run_tells_what_happened_inside() {
    let (folder, model) = (Folder::new("run"), testdata("mixtral-moe/model-f32.gguf"));
    let [rows, trace] = ["rows.safetensors", "trace.json"].map(|name| folder.path(name));
    let run = ["run", &model, "--raw", "-p", "llamas graze on the puna", "-n", "6", "--temp", "0", "--ignore-eos"];
    let more =
        ["--capture", "all", "--capture-positions", "all", "--capture-file", &rows, "--trace", &trace, "--profile"];
    let out = good(&[&run[..], &more].concat());
    let table = String::from_utf8(out.stderr).unwrap();
    for word in ["attention", "router", "sampling", "write", "total", "of machine", "most chosen"] {
        assert!(table.contains(word), "{word}: {table}");
    }
    // Phases, and the time that passed: the same, unless the machine stops the program just between two of them.
    let adds_up = |table: &str| {
        let total = table.lines().find_map(|line| line.trim_start().strip_prefix("total")).unwrap();
        let total: Vec<f64> = total.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        (total[0] - total[1]).abs() <= 0.02 * total[1] + 1.0
    };
    let again = || String::from_utf8(good(&[&run[..], &["--profile"]].concat()).stderr).unwrap();
    assert!(adds_up(&table) || (0..4).any(|_| adds_up(&again())), "{table}");
    let plain = good(&run);
    assert_eq!(plain.stdout, out.stdout, "looking changes nothing");
    let bytes = folder.read("rows.safetensors");
    let (positions, tokens) = (i64s(&bytes, "positions"), i64s(&bytes, "tokens"));
    assert_eq!(positions, (0..positions.len() as i64).collect::<Vec<_>>());
    assert!(tokens.len() == positions.len() && tokens.iter().all(|&id| id >= 0));
    let layers = SafeTensors::deserialize(&bytes).unwrap().len() - 2;
    for layer in 0..layers {
        assert_eq!(tensor(&bytes, &format!("layer.{layer}")).0[0], positions.len());
    }
    let trace: Value = serde_json::from_slice(&folder.read("trace.json")).unwrap();
    assert!(trace["traceEvents"].as_array().unwrap().len() > 50);
    let report = good(&[&run[..], &["--json", "--profile"]].concat());
    let report: Value = serde_json::from_slice(&report.stdout).unwrap();
    let phases = report["profile"]["phases"].as_object().unwrap();
    let sum: f64 = phases.values().map(|phase| phase["ms"].as_f64().unwrap()).sum();
    assert!((sum - report["profile"]["wall_ms"].as_f64().unwrap()).abs() < 0.01);
    assert!(phases["head"]["bandwidth_share"].as_f64().unwrap() > 0.0);
    assert_eq!(report["experts"].as_array().unwrap().len(), layers);
    assert!(report["expert_memory"].is_null());
    let streamed = good(&[&run[..], &["--json", "--profile", "--expert-memory", "200K"]].concat());
    let streamed: Value = serde_json::from_slice(&streamed.stdout).unwrap();
    assert_eq!((&streamed["text"], &streamed["experts"]), (&report["text"], &report["experts"]));
    let memory = &streamed["expert_memory"];
    assert!(memory["slots"] == 2 && memory["misses"].as_u64().unwrap() > 2, "{memory}");
    let read = &streamed["profile"]["phases"]["expert_reads"];
    let told = (read["mb"].as_f64().unwrap() * 1e6 - memory["bytes_read"].as_f64().unwrap()).abs();
    // A step's bytes are given to requests as whole numbers.
    assert!(told <= 6.0 && read["gb_s"].is_null(), "{read} {memory}");
    let table =
        String::from_utf8(good(&[&run[..], &["--profile", "--expert-memory", "200K"]].concat()).stderr).unwrap();
    assert!(table.contains("expert_reads") && table.contains("[experts: 2 of 8 in memory at once; "), "{table}");
}

#[test]
fn a_trained_vector_steers() {
    let (folder, model) = (Folder::new("train"), testdata("llama-gqa/model-f32.gguf"));
    let [positive, negative, vector] = ["positive.txt", "negative.txt", "v.gguf"].map(|name| folder.path(name));
    std::fs::write(&positive, "a good day\nall is well\n").unwrap();
    std::fs::write(&negative, "a bad day\nnothing is well\n").unwrap();
    let train = ["steer-train", &model, &positive, &negative, &vector];
    good(&train);
    refused(&train, &["v.gguf", "already"]);
    good(&[&train[..], &["--force", "--normalize", "--layers", "1"]].concat());
    let run = ["run", &model, "--raw", "-p", "the day", "-n", "8", "--temp", "0", "--ignore-eos"];
    let plain = good(&run).stdout;
    let strong = format!("{vector}:40");
    assert_ne!(good(&[&run[..], &["--control-vector", &strong]].concat()).stdout, plain);
    assert_eq!(good(&[&run[..], &["--control-vector", &vector, "--control-strength", "0"]].concat()).stdout, plain);
    let text = folder.path("text.txt");
    std::fs::write(&text, "llamas graze on the puna ".repeat(9)).unwrap();
    let perplexity = ["perplexity", &model, "-f", &text];
    let steered = good(&[&perplexity[..], &["--control-vector", &strong]].concat());
    assert_ne!(good(&perplexity).stdout, steered.stdout);
    let embed = ["embed", &model, "-f", &text];
    assert_ne!(good(&embed).stdout, good(&[&embed[..], &["--control-vector", &strong]].concat()).stdout);

    std::fs::write(&negative, "one line\n").unwrap();
    refused(&train, &["negative.txt", "1 prompts beside 2"]);
    std::fs::write(&positive, "").unwrap();
    std::fs::write(&negative, "").unwrap();
    refused(&train, &["no pairs"]);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let (folder, model) = (Folder::new("refused"), testdata("llama-gqa/model-f32.gguf"));
    let vector = testdata("llama-gqa/control-vector.gguf");
    let run = ["run", &model, "--raw", "-p", "a", "-n", "1"];
    let with = |more: &[&str], words: &[&str]| refused(&[&run[..], more].concat(), words);
    with(&["--control-vector", &vector, "--control-layers", "0-1"], &["layer 0"]);
    with(&["--control-vector", &vector, "--control-layers", "1-2"], &["layers 1 to 2"]);
    with(&["--control-vector", &vector, "--control-strength", "nan"], &["strength", "not finite"]);
    with(&["--control-vector", &model], &["general.architecture", "controlvector"]);
    with(&["--control-vector", &folder.path("none.gguf")], &["none.gguf", "no such file"]);
    with(&["--capture", "0,2"], &["layer 2", "the model has 2"]);
    let missing = folder.path("no/where.safetensors");
    with(&["--capture", "0", "--capture-file", &missing], &["where.safetensors", "no such folder"]);
    with(&["--trace", &missing], &["where.safetensors", "no such folder"]);
    let other = testdata("olmoe-small/model-f32.gguf");
    refused(&["run", &other, "--raw", "-p", "a", "--control-vector", &vector], &["direction.1", "expected"]);
    for wrong in
        [&["--control-layers", "1"][..], &["--capture", "x"], &["--control-vector", &vector, "--control-layers", "2-1"]]
    {
        assert_eq!(puna(&[&run[..], wrong].concat()).status.code(), Some(2), "{wrong:?}");
    }
}

/// Names of a folder's files.
fn names(folder: &Folder) -> Vec<String> {
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut names: Vec<String> = std::fs::read_dir(&folder.0).unwrap().map(name).collect();
    names.sort();
    names
}

#[cfg(unix)]
#[test]
fn what_cannot_be_written_whole_is_not_written() {
    let (folder, model) = (Folder::new("full"), testdata("llama-gqa/model-f32.gguf"));
    let [old, new] = ["old", "new"].map(|name| folder.path(name));
    std::fs::write(&old, "what was there").unwrap();
    let run = ["run", &model, "--raw", "-p", "llamas graze on the puna", "-n", "40", "--temp", "0", "--ignore-eos"];
    let eval = ["eval", &model, "--tokens", "1,2,3,4,5,6,7,8"];
    let bench = ["bench", &model, "-p", "32", "-n", "1", "-r", "1"];
    for (command, flag) in
        [(&run[..], "--trace"), (&run, "--save-state"), (&run, "--capture-file"), (&eval, "--out"), (&bench, "--trace")]
    {
        for path in [&old, &new] {
            // Files may have one block: what is written then is cut off, as on a disk that is full.
            let mut limited = Command::new("sh");
            limited.args(["-c", "trap '' XFSZ; ulimit -f 1; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_puna")]);
            let capture = if flag == "--capture-file" { &["--capture", "all"][..] } else { &[] };
            let out = limited.args(command).args([flag, path]).args(capture).output().unwrap();
            let error = String::from_utf8(out.stderr).unwrap();
            assert_eq!(out.status.code(), Some(1), "{flag}: {error}");
            let last = error.lines().last().unwrap();
            assert!(last.contains(path.as_str()) && last.contains("too large"), "{flag}: {error}");
            assert_eq!((names(&folder), folder.read("old")), (vec!["old".to_owned()], b"what was there".to_vec()));
        }
    }
    // Where nothing can be, that is told before the work.
    let folders = [folder.path("no/where"), folder.path("old/where"), testdata("llama-gqa")];
    for (command, flag) in [(&run[..], "--trace"), (&run, "--save-state"), (&eval, "--out"), (&bench, "--trace")] {
        for path in &folders {
            let out = puna(&[command, &[flag, path]].concat());
            let error = String::from_utf8(out.stderr).unwrap();
            assert!(out.status.code() == Some(1) && out.stdout.is_empty(), "{flag} {path}: {error}");
            assert!(error.contains(path.as_str()) && error.lines().count() == 1, "{flag} {path}: {error}");
        }
    }
    // Devices and pipes are what they are.
    let out = good(&[&run[..], &["--trace", "/dev/stdout"]].concat());
    assert!(String::from_utf8(out.stdout).unwrap().contains("traceEvents"));
}
