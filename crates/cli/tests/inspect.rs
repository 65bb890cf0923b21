//! `puna inspect` as a program: what it says of good files, of damaged ones and of files that are no models.

#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

const LLAMA: &str = "llama-gqa/model-f32.gguf";
const MIXTRAL: &str = "mixtral-moe/model-f32.gguf";
const WINDOWED: &str = "mistral-swa/model-f32.gguf";

fn model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/models").join(name)
}

fn puna() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_puna"));
    command.arg("inspect");
    command
}

fn inspect(model: &Path, args: &[&str]) -> Output {
    puna().arg(model).args(args).output().unwrap()
}

/// What it writes for people; it must succeed.
fn text(model: &Path, args: &[&str]) -> String {
    let out = inspect(model, args);
    assert!(out.status.success() && out.stderr.is_empty(), "{out:?}");
    String::from_utf8(out.stdout).unwrap()
}

fn json(model: &Path, args: &[&str]) -> Value {
    serde_json::from_str(&text(model, &[&["--json"], args].concat())).unwrap()
}

/// The one line that it fails with.
fn failure(model: &Path) -> String {
    for args in [&[][..], &["--json"]] {
        let out = inspect(model, args);
        assert_eq!(out.status.code(), Some(1), "{out:?}");
        assert!(out.stdout.is_empty(), "{out:?}");
    }
    let line = String::from_utf8(inspect(model, &[]).stderr).unwrap();
    assert_eq!(line.matches('\n').count(), 1, "{line}");
    line
}

/// A file for one test, which gives it a name of its own.
fn temporary(name: &str, bytes: &[u8]) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// A folder with these files, for one test.
fn folder(name: &str, files: &[(&str, &[u8])]) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir(&path).unwrap();
    files.iter().for_each(|(name, bytes)| std::fs::write(path.join(name), bytes).unwrap());
    path
}

/// A copy of `bytes` in which every `from` is overwritten.
fn patched(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let mut bytes = bytes.to_vec();
    let places: Vec<usize> = (0..bytes.len() - from.len()).filter(|&i| bytes[i..].starts_with(from)).collect();
    assert!(!places.is_empty());
    places.into_iter().for_each(|i| bytes[i..i + to.len()].copy_from_slice(to));
    bytes
}

// Numbers of value types in the format.
const U32: u32 = 4;
const F32: u32 = 6;
const STR: u32 = 8;
const ARRAY: u32 = 9;
const F64: u32 = 12;

/// A GGUF file without tensors.
fn gguf(keys: &[(&str, u32, Vec<u8>)]) -> Vec<u8> {
    let mut file = [b"GGUF".as_slice(), &3u32.to_le_bytes(), &0u64.to_le_bytes()].concat();
    file.extend((keys.len() as u64).to_le_bytes());
    for (key, ty, value) in keys {
        file.extend(string(key.as_bytes()));
        file.extend(ty.to_le_bytes());
        file.extend(value);
    }
    file
}

fn string(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

fn array(ty: u32, elements: &[Vec<u8>]) -> Vec<u8> {
    [&ty.to_le_bytes()[..], &(elements.len() as u64).to_le_bytes(), &elements.concat()].concat()
}

#[test]
fn describes_a_dense_model() {
    let report = json(&model(LLAMA), &["--kv", "f32", "--ctx", "100"]);
    let s = &report["summary"];
    assert_eq!(report["runs"], true);
    assert_eq!(report["reasons"], Value::Array(vec![]));
    assert_eq!((&s["architecture"], &s["name"]), (&"llama".into(), &"Hf".into()));
    for (field, n) in [
        ("parameters", 151_872),
        ("active_parameters", 151_872),
        ("dim", 64),
        ("n_layers", 2),
        ("n_heads", 4),
        ("n_kv_heads", 2),
        ("head_dim", 16),
        ("ffn_dim", 160),
        ("vocab_size", 512),
        ("context_length", 256),
    ] {
        assert_eq!(s[field], n, "{field}");
    }
    assert_eq!(s["rope"]["kind"], "none");
    assert_eq!((s["rope"]["theta"].as_f64(), s["rope"]["width"].as_u64()), (Some(10_000.0), Some(16)));
    assert_eq!(s["windows"], Value::Array(vec![]));
    assert_eq!(s["experts"], Value::Null);
    assert_eq!(s["types"][0]["type"], "F32");
    assert_eq!(s["types"][0]["bytes"], 4 * 151_872);
    assert_eq!(s["tokenizer"]["special"][0]["text"], "<s>");
    // Keys and values of 4 blocks of 32 positions: 2 layers, 2 heads, 16 dimensions, in single precision.
    let kv_bytes = 2 * 4 * 32 * 2 * 2 * 16 * 4;
    assert_eq!(s["memory"]["kv_bytes"], kv_bytes);
    assert_eq!(s["memory"]["total_bytes"], 4 * 151_872 + kv_bytes);
}

#[test]
fn lists_metadata_and_tensors() {
    let report = json(&model(LLAMA), &[]);
    let meta = &report["metadata"];
    assert_eq!(meta["llama.attention.layer_norm_rms_epsilon"].as_f64(), Some(1e-5));
    assert_eq!(meta["tokenizer.ggml.tokens"]["type"], "string");
    assert_eq!(meta["tokenizer.ggml.tokens"]["len"], 512);
    let tensors = report["tensors"].as_array().unwrap();
    assert_eq!(tensors.len(), 21);
    let down = tensors.iter().find(|t| t["name"] == "blk.1.ffn_down.weight").unwrap();
    assert_eq!((&down["type"], &down["shape"]), (&"F32".into(), &vec![64, 160].into()));
    let end = tensors.iter().map(|t| t["offset"].as_u64().unwrap() + t["bytes"].as_u64().unwrap()).max();
    assert_eq!(end, report["files"][0]["bytes"].as_u64());
}

#[test]
fn counts_only_the_experts_of_a_token_as_active() {
    let report = json(&model(MIXTRAL), &[]);
    let s = &report["summary"];
    assert_eq!(s["parameters"], 238_400);
    // 2 layers leave out 2 of their 4 experts, each 3 matrices of 96 x 64.
    assert_eq!(s["active_parameters"], 238_400 - 2 * 2 * 3 * 96 * 64);
    assert_eq!((&s["experts"]["n_experts"], &s["experts"]["used"]), (&4.into(), &2.into()));
    assert_eq!((&s["experts"]["ffn_dim"], &s["experts"]["routing"]), (&96.into(), &"softmax".into()));
    let text = text(&model(MIXTRAL), &[]);
    assert!(text.contains("238,400, active 164,672\n"), "{text}");
    assert!(text.contains("experts       4, 2 used, feed-forward 96, softmax, weights normalized\n"), "{text}");
}

#[test]
fn writes_a_summary_for_people() {
    let text = text(&model(LLAMA), &[]);
    for line in [
        "architecture  llama\n",
        "parameters    151,872\n",
        "heads         4 of 16 dimensions, 2 for keys and values\n",
        "rope          scaling none, theta 10000, 16 of 16 dimensions\n",
        "window        none\n",
        "type          F32 607 kB, 100.0 %, 32 bits a weight\n",
        "memory        673 kB at 256 positions: weights 607 kB, f16 KV 65.5 kB\n",
        "\nruns: yes\n",
        "  llama.block_count = 2\n",
        "  blk.0.ffn_down.weight     [64, 160]  F32      41.0 kB\n",
        "  like blk.0: blk.1\n",
    ] {
        assert!(text.contains(line), "{line}{text}");
    }
    assert!(!text.contains("blk.1.ffn_down"), "{text}");
}

#[test]
fn lists_all_tensors_on_request() {
    let text = text(&model(LLAMA), &["--tensors"]);
    assert_eq!(text.matches("blk.1.").count(), 9, "{text}");
    assert!(!text.contains("like"), "{text}");
}

#[test]
fn says_what_a_context_takes() {
    let kv_bytes = |args: &[&str]| json(&model(LLAMA), args)["summary"]["memory"]["kv_bytes"].as_u64().unwrap();
    assert_eq!(kv_bytes(&["--ctx", "512"]), 2 * kv_bytes(&["--ctx", "256"]));
    assert_eq!(kv_bytes(&["--kv", "f32"]), 2 * kv_bytes(&["--kv", "f16"]));
    assert_eq!(kv_bytes(&[]), kv_bytes(&["--ctx", "256"]));
    assert_eq!(kv_bytes(&["--ctx", "18446744073709551615"]), u64::MAX);
    let text = text(&model(LLAMA), &["--ctx", "257"]);
    assert!(text.contains(" at 257 positions, beyond the model's context: "), "{text}");
}

#[test]
fn a_window_bounds_what_a_context_takes() {
    let summary = |ctx| json(&model(WINDOWED), &["--ctx", ctx])["summary"].clone();
    assert_eq!(summary("100"), {
        let mut other = summary("240");
        other["memory"]["ctx"] = 100.into();
        other
    });
    let s = summary("100");
    assert_eq!((&s["windows"][0]["positions"], &s["windows"][0]["layers"]), (&16.into(), &vec![0, 1].into()));
    // 16 positions lie in 2 blocks of 32 at most: 2 layers, 1 head, 16 dimensions, in half precision.
    assert_eq!(s["memory"]["kv_bytes"], 2 * 2 * 32 * 2 * 16 * 2);
    assert_eq!(summary("32")["memory"]["kv_bytes"], 2 * 32 * 2 * 16 * 2);
    assert!(text(&model(WINDOWED), &[]).contains("window        16 positions, all layers\n"));
}

#[test]
fn says_why_a_truncated_model_does_not_run() {
    let file = std::fs::read(model(LLAMA)).unwrap();
    let path = temporary("truncated.gguf", &file[..file.len() - 1]);
    let report = json(&path, &[]);
    assert_eq!(report["runs"], false);
    assert_eq!(report["summary"]["parameters"], 151_872);
    assert_eq!(report["reasons"].as_array().unwrap().len(), 1, "{report}");
    let text = text(&path, &[]);
    assert!(text.contains("\nruns: no: ") && text.contains("truncated"), "{text}");
}

#[test]
fn says_which_tensor_keeps_a_model_from_running() {
    let file = std::fs::read(model(LLAMA)).unwrap();
    let path = temporary("renamed.gguf", &patched(&file, b"blk.1.ffn_down.weight", b"blk.1.ffn_dawn.weight"));
    let report = json(&path, &[]);
    assert_eq!(report["runs"], false);
    assert!(report["reasons"][0].as_str().unwrap().contains("\"blk.1.ffn_down.weight\": missing"), "{report}");
    // The layers differ now, so both are listed.
    let text = text(&path, &[]);
    assert!(text.contains("  blk.1.ffn_dawn.weight "), "{text}");
}

#[test]
fn describes_an_architecture_that_is_not_supported() {
    let file = std::fs::read(model(LLAMA)).unwrap();
    // The value and all keys that begin with it.
    let path = temporary("unsupported.gguf", &patched(&file, b"llama", b"llamb"));
    let report = json(&path, &[]);
    assert_eq!(report["runs"], false);
    assert!(report["reasons"][0].as_str().unwrap().contains("architecture 'llamb' is not supported"), "{report}");
    let s = &report["summary"];
    assert_eq!((&s["parameters"], &s["n_layers"], &s["head_dim"]), (&151_872.into(), &2.into(), &16.into()));
    assert_eq!(s["memory"]["kv_bytes"], Value::Null);
    assert!(text(&path, &[]).contains("memory        weights 607 kB, keys and values unknown\n"));
}

#[test]
fn describes_a_file_that_is_a_vocabulary_only() {
    let tokens: Vec<Vec<u8>> = (0..100).map(|i| string(format!("token {i}").as_bytes())).collect();
    let file = gguf(&[
        ("general.architecture", STR, string(b"llama")),
        ("llama.block_count", U32, 32u32.to_le_bytes().to_vec()),
        ("tokenizer.ggml.model", STR, string(b"gpt2")),
        ("tokenizer.ggml.tokens", ARRAY, array(STR, &tokens)),
        ("tokenizer.ggml.bos_token_id", U32, 7u32.to_le_bytes().to_vec()),
        ("tokenizer.ggml.eos_token_id", U32, u32::MAX.to_le_bytes().to_vec()),
    ]);
    let path = temporary("vocabulary.gguf", &file);
    let report = json(&path, &[]);
    assert_eq!(report["runs"], false);
    assert_eq!((&report["summary"]["n_layers"], &report["summary"]["vocab_size"]), (&32.into(), &100.into()));
    let text = text(&path, &[]);
    assert!(text.contains("parameters    none: the file has no tensors, only metadata\n"), "{text}");
    assert!(text.contains("bos 7 \"token 7\", eos 4294967295 (not in the vocabulary)\n"), "{text}");
    assert!(text.contains("\nruns: no: "), "{text}");
}

#[test]
fn nothing_in_a_file_reaches_the_terminal_as_a_command() {
    let nasty = b"\x1b[31m\x9b \xc2\x9b31m\x07\r\n\xe2\x80\xae\xff end";
    let file = gguf(&[
        ("general.architecture", STR, string(nasty)),
        ("general.name", STR, string(nasty)),
        ("nasty\u{1b}\u{9b}\u{202e}key", ARRAY, array(STR, &[string(nasty), string(nasty)])),
        ("tokenizer.ggml.model", STR, string(nasty)),
        ("tokenizer.ggml.pre", STR, string(nasty)),
        ("tokenizer.ggml.tokens", ARRAY, array(STR, &[string(nasty)])),
        ("tokenizer.ggml.a\u{1b}b_token_id", U32, vec![0; 4]),
        ("general.a", F32, f32::NAN.to_le_bytes().to_vec()),
        ("general.b", F64, f64::NEG_INFINITY.to_le_bytes().to_vec()),
        ("general.c", F32, 0.1f32.to_le_bytes().to_vec()),
    ]);
    let path = temporary("nasty\u{9b}.gguf", &file);
    for out in [text(&path, &[]), text(&path, &["--json"])] {
        let bad = |c: &char| (c.is_control() && *c != '\n') || *c == '\u{202e}';
        assert_eq!(out.chars().find(bad), None, "{out}");
    }
    assert_eq!(text(&path, &["--json"]).matches('\n').count(), 1);
    nothing_harmful_in_reasons();
    let report = json(&path, &[]);
    let lossy = String::from_utf8_lossy(nasty);
    assert_eq!(report["summary"]["name"], *lossy);
    assert_eq!(report["metadata"]["nasty\u{1b}\u{9b}\u{202e}key"][1], *lossy);
    assert_eq!((&report["metadata"]["general.a"], &report["metadata"]["general.b"]), (&"NaN".into(), &"-inf".into()));
    assert_eq!(report["metadata"]["general.c"].as_f64(), Some(0.1));
}

/// Messages about a tokenizer quote what is valid text and still harmful.
fn nothing_harmful_in_reasons() {
    for (i, (model, pre)) in [("a\u{1b}[31m\u{9b}\n", "default"), ("gpt2", "a\u{1b}[31m\u{9b}\n")].iter().enumerate() {
        let file = gguf(&[
            ("general.architecture", STR, string(b"llama")),
            ("tokenizer.ggml.model", STR, string(model.as_bytes())),
            ("tokenizer.ggml.pre", STR, string(pre.as_bytes())),
            ("tokenizer.ggml.tokens", ARRAY, array(STR, &[string(b"a")])),
        ]);
        let text = text(&temporary(&format!("reason{i}.gguf"), &file), &[]);
        assert_eq!(text.lines().filter(|line| line.starts_with("runs: no: ")).count(), 2, "{text}");
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text}");
    }
}

#[test]
fn fails_only_when_the_container_cannot_be_read() {
    let file = std::fs::read(model(LLAMA)).unwrap();
    assert!(failure(&temporary("empty.gguf", b"")).contains("empty"));
    assert!(failure(&temporary("text.gguf", b"<html>")).contains("web page"));
    assert!(failure(&temporary("header.gguf", &file[..1000])).contains("end of file"));
    assert!(failure(Path::new("/nowhere/model.gguf")).contains("no such file"));
    let empty = folder("empty", &[]);
    assert!(failure(&empty).contains("no model"));
    std::fs::write(empty.join("inside.gguf"), b"").unwrap();
    assert!(failure(&empty).contains("inside.gguf"));
    assert!(failure(&folder("header", &[("model.safetensors", b"\xff")])).contains("header"));
}

#[test]
fn wrong_usage_is_status_2() {
    for args in [&["--ctx", "0"][..], &["--kv", "q1"], &["--json", "extra"]] {
        assert_eq!(inspect(&model(LLAMA), args).status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn a_reader_that_goes_away_ends_it_quietly() {
    // More than a pipe holds, so that writing fails.
    let texts: Vec<Vec<u8>> = (0..60).map(|_| string(&[b'x'; 10_000])).collect();
    let path = temporary("long.gguf", &gguf(&[("general.tags", ARRAY, array(STR, &texts))]));
    let mut child = puna().arg(path).arg("--json").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdout.take().unwrap().read_exact(&mut [0; 10]).unwrap();
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success() && out.stderr.is_empty(), "{out:?}");
}

/// The tensors of a mixture of one layer, without numbers that mean anything.
fn mixture() -> Vec<u8> {
    let mut shapes =
        vec![("model.embed_tokens.weight".to_owned(), vec![10, 4]), ("model.norm.weight".to_owned(), vec![4])];
    let mut layer =
        |name: &str, shape: &[usize]| shapes.push((format!("model.layers.0.{name}.weight"), shape.to_vec()));
    layer("input_layernorm", &[4]);
    layer("post_attention_layernorm", &[4]);
    ["q", "k", "v", "o"].iter().for_each(|part| layer(&format!("self_attn.{part}_proj"), &[4, 4]));
    layer("block_sparse_moe.gate", &[4, 4]);
    for expert in 0..4 {
        for (part, shape) in [("w1", [6, 4]), ("w2", [4, 6]), ("w3", [6, 4])] {
            layer(&format!("block_sparse_moe.experts.{expert}.{part}"), &shape);
        }
    }
    let numbers = [0u8; 4 * 40];
    let view = |(name, shape): &(String, Vec<usize>)| {
        let bytes = &numbers[..4 * shape.iter().product::<usize>()];
        (name.clone(), safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes).unwrap())
    };
    safetensors::serialize(shapes.iter().map(view), None).unwrap()
}

#[test]
fn describes_a_folder() {
    let config = serde_json::json!({
        "model_type": "mixtral", "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 10, "num_local_experts": 4,
        "tie_word_embeddings": true, "max_position_embeddings": 64,
        "rope_scaling": {"type": "linear", "factor": 2.0}
    });
    let path = folder("mixture", &[("config.json", config.to_string().as_bytes()), ("model.safetensors", &mixture())]);
    let report = json(&path, &[]);
    assert_eq!((&report["runs"], &report["reasons"]), (&Value::Bool(true), &serde_json::json!([])));
    let summary = &report["summary"];
    let expected =
        serde_json::json!({"architecture": "llama", "dim": 4, "n_layers": 1, "head_dim": 2, "vocab_size": 10});
    expected.as_object().unwrap().iter().for_each(|(key, value)| assert_eq!(&summary[key], value, "{key}"));
    let shared = 10 * 4 + 4 + 2 * 4 + 4 * 16 + 16;
    assert_eq!(
        (&summary["parameters"], &summary["active_parameters"]),
        (&(shared + 4 * 72).into(), &(shared + 2 * 72).into())
    );
    assert_eq!((&summary["rope"]["kind"], &summary["rope"]["factor"]), (&"linear".into(), &2.0.into()));
    assert_eq!(report["metadata"]["rope_scaling.factor"], 2.0);
    assert_eq!(report["files"][0]["format"], "safetensors");
    assert!(text(&path, &[]).contains("runs: yes"));
    // Why not, where it does not.
    std::fs::write(path.join("config.json"), config.to_string().replace("mixtral", "llama9")).unwrap();
    let report = json(&path, &[]);
    assert_eq!((&report["runs"], &report["summary"]["architecture"]), (&Value::Bool(false), &"llama9".into()));
    assert!(report["reasons"][0].as_str().unwrap().contains("not supported"), "{report}");
}
