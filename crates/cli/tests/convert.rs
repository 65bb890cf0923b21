//! `puna convert` as a program: the file does what the folder does, and nothing goes wrong without a word.

#![allow(clippy::unwrap_used)]

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const VOCAB: usize = 530;
const DIM: usize = 64;
const FFN: usize = 96;
const TEXT: &str = "I'm 1234 llamas\n\n on the  puna. <s>é</s> 🙂";

/// A place for one test, which gives it a name of its own.
fn place(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("convert").join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

/// A folder with a random model of one layer and, where it is named, the tokenizer of a model of testdata.
fn folder(name: &str, tokenizer: Option<&str>) -> PathBuf {
    let path = place(name);
    let attn = "model.layers.0.self_attn";
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = [
        ("model.embed_tokens".into(), vec![VOCAB, DIM]),
        ("model.layers.0.input_layernorm".into(), vec![DIM]),
        (format!("{attn}.q_proj"), vec![DIM, DIM]),
        (format!("{attn}.k_proj"), vec![DIM / 2, DIM]),
        (format!("{attn}.v_proj"), vec![DIM / 2, DIM]),
        (format!("{attn}.o_proj"), vec![DIM, DIM]),
        ("model.layers.0.post_attention_layernorm".into(), vec![DIM]),
        ("model.layers.0.mlp.gate_proj".into(), vec![FFN, DIM]),
        ("model.layers.0.mlp.up_proj".into(), vec![FFN, DIM]),
        ("model.layers.0.mlp.down_proj".into(), vec![DIM, FFN]),
        ("model.norm".into(), vec![DIM]),
    ]
    .into_iter()
    .map(|(name, shape): (String, Vec<usize>)| {
        let n = shape.iter().product::<usize>() as u32;
        let numbers = (0..n).map(|i| (i.wrapping_mul(2_654_435_761) >> 20) as f32 / 2048.0 - 1.0);
        (format!("{name}.weight"), shape, numbers.flat_map(f32::to_le_bytes).collect())
    })
    .collect();
    let views = tensors
        .iter()
        .map(|(name, shape, bytes)| (name.as_str(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap()));
    fs::write(path.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    let config = json!({
        "model_type": "llama", "hidden_size": DIM, "intermediate_size": FFN, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB, "tie_word_embeddings": true,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5
    });
    fs::write(path.join("config.json"), config.to_string()).unwrap();
    let sampling = json!({"temperature": 0.25, "top_k": 7, "top_p": 0.5, "repetition_penalty": 1.5});
    fs::write(path.join("generation_config.json"), sampling.to_string()).unwrap();
    fs::create_dir(path.join("1_Pooling")).unwrap();
    fs::write(path.join("1_Pooling/config.json"), json!({"pooling_mode_lasttoken": true}).to_string()).unwrap();
    if let Some(model) = tokenizer {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/models").join(model).join("hf");
        for name in ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"] {
            if from.join(name).exists() {
                fs::copy(from.join(name), path.join(name)).unwrap();
            }
        }
    }
    path
}

fn puna(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_puna")).args(args).output().unwrap()
}

/// What it writes to standard output; it must succeed.
fn output(args: &[&str]) -> String {
    let out = puna(args);
    assert!(out.status.success(), "{out:?}");
    String::from_utf8(out.stdout).unwrap()
}

/// The one line that it fails with.
fn failure(args: &[&str]) -> String {
    let out = puna(args);
    assert_eq!(out.status.code(), Some(1), "{out:?}");
    let line = String::from_utf8(out.stderr).unwrap();
    assert!(line.starts_with("puna: ") && line.matches('\n').count() == 1, "{line}");
    line
}

/// Logits of some ids.
fn eval(model: &str, out: &Path) -> Vec<u8> {
    let ids: Vec<String> = (0..30).map(|i| (i * 17 % VOCAB).to_string()).collect();
    output(&["eval", model, "--tokens", &ids.join(","), "--kv", "f32", "--out", out.to_str().unwrap()]);
    let bytes = fs::read(out).unwrap();
    safetensors::SafeTensors::deserialize(&bytes).unwrap().tensor("logits").unwrap().data().to_vec()
}

#[test]
fn a_file_does_what_its_folder_does() {
    for tokenizer in ["llama-gqa", "qwen3-qknorm"] {
        let model = folder(tokenizer, Some(tokenizer));
        let (model, out) = (model.to_str().unwrap(), place(&format!("{tokenizer}-out")));
        let file = out.join("model.gguf");
        let file = file.to_str().unwrap();
        let said = output(&["convert", model, file]);
        assert!(said.starts_with(file) && said.ends_with("11 tensors: 11 F32 (259 kB)\n"), "{said}");
        assert_eq!(eval(file, &out.join("a")), eval(model, &out.join("b")));

        for more in [&[][..], &["--no-special"], &["--add-bos", "yes"], &["--add-bos", "no"]] {
            let ids = |model| output(&[&["tokenize", model, "--text", TEXT], more].concat());
            assert_eq!(ids(file), ids(model), "{more:?}");
        }
        let messages = out.join("messages.json");
        fs::write(&messages, json!([{"role": "user", "content": TEXT}]).to_string()).unwrap();
        let prompt = |model| output(&["template", model, "--messages", messages.to_str().unwrap()]);
        assert_eq!(prompt(file), prompt(model));

        let inspected: Value = serde_json::from_str(&output(&["inspect", file, "--json"])).unwrap();
        let metadata = inspected["metadata"].to_string();
        for (key, value) in [("temp", "0.25"), ("top_k", "7"), ("top_p", "0.5"), ("penalty_repeat", "1.5")] {
            let at = metadata.find(&format!("general.sampling.{key}\"")).unwrap_or_else(|| panic!("{metadata}"));
            let until = (at + 100).min(metadata.len());
            assert!(metadata.get(at..until).unwrap_or(&metadata[at..]).contains(value), "{key} in {metadata}");
        }
        assert!(metadata.contains(tokenizer), "{metadata}");
        // The pooling goes along.
        let embed = |model| output(&["embed", model, "--file", messages.to_str().unwrap()]);
        assert!(metadata.contains("llama.pooling_type"), "{metadata}");
        assert_eq!(embed(file), embed(model));
    }
}

#[test]
fn a_folder_without_a_tokenizer() {
    let (model, out) = (folder("no-tokenizer", None), place("no-tokenizer-out").join("model.gguf"));
    let done = puna(&["convert", model.to_str().unwrap(), out.to_str().unwrap(), "--type", "q8_0"]);
    assert!(done.status.success(), "{done:?}");
    assert!(String::from_utf8(done.stderr).unwrap().contains("the folder has no tokenizer"));
    assert!(String::from_utf8(done.stdout).unwrap().contains("8 Q8_0"));
    assert!(failure(&["tokenize", out.to_str().unwrap(), "--text", "a"]).contains("no tokenizer"));
}

#[test]
fn files_are_replaced_only_when_asked_to() {
    let (model, out) = (folder("replaced", Some("llama-gqa")), place("replaced-out").join("model.gguf"));
    let (model, file) = (model.to_str().unwrap(), out.to_str().unwrap());
    fs::write(&out, "old").unwrap();
    assert!(failure(&["convert", model, file]).contains("there is a file of this name already"));
    assert_eq!(fs::read(&out).unwrap(), b"old");
    output(&["convert", model, file, "--force", "--name", "A name"]);
    assert!(output(&["inspect", file]).contains("A name"));
    // A model may take its own place.
    output(&["convert", file, file, "--force", "--type", "bf16"]);
    assert!(output(&["inspect", file]).contains("BF16"));
    assert_eq!(fs::read_dir(out.parent().unwrap()).unwrap().count(), 1);
}

#[test]
fn what_cannot_be_done_is_said() {
    let (model, out) = (folder("refused", Some("llama-gqa")), place("refused-out"));
    let (model, folder) = (model.to_str().unwrap(), out.to_str().unwrap());
    assert!(failure(&["convert", model, folder]).contains("it is a directory"));
    assert!(failure(&["convert", model, &format!("{folder}/none/x.gguf")]).contains("there is no such folder"));
    assert!(failure(&["convert", "/does/not/exist", &format!("{folder}/x.gguf")]).contains("/does/not/exist"));
    let wrong = puna(&["convert", model, &format!("{folder}/x.gguf"), "--type", "iq1_s"]);
    assert_eq!(wrong.status.code(), Some(2), "{wrong:?}");
    assert!(String::from_utf8(wrong.stderr).unwrap().contains("expected auto or one of f32, f16, bf16, q4_0"));
    let bytes = self::folder("refused-pre", Some("qwen3-qknorm"));
    let unknown = failure(&["convert", bytes.to_str().unwrap(), &format!("{folder}/x.gguf"), "--pre", "x"]);
    assert!(unknown.contains("`x` is not a known pre-tokenizer"), "{unknown}");
    assert_eq!(fs::read_dir(&out).unwrap().count(), 0);
}
