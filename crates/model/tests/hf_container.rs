//! The safetensors container: what breaks the format is refused, whatever else is in the file.

#![allow(clippy::unwrap_used)]

mod hf_maker;

use bytes::Bytes;
use hf_maker::{Made, Small, Tensor, assert_same, container, safetensors, tokens};
use proptest::prelude::*;
use puna_model::Error;
use puna_model::hf::safetensors::Container;
use serde_json::{Value, json};
use std::path::Path;

fn parse(bytes: &[u8]) -> Result<Container, Error> {
    Container::parse(Path::new("made.safetensors"), Bytes::copy_from_slice(bytes).into())
}

/// Two tensors, of 4 and 6 numbers.
fn header() -> Value {
    json!({
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "F16", "shape": [6], "data_offsets": [16, 28]},
    })
}

const DATA: usize = 28;

#[track_caller]
fn refused(bytes: &[u8], words: &[&str]) {
    let message = match parse(bytes) {
        Ok(_) => panic!("it opens; expected {words:?}"),
        Err(e) => e.to_string(),
    };
    assert!(message.starts_with("made.safetensors: "), "{message}");
    assert!(!message.contains('\n') && message.chars().count() < 500, "{message}");
    for word in words {
        assert!(message.contains(word), "expected {word:?} in: {message}");
    }
}

/// The file with part of its header replaced.
fn with(pointer: &str, value: Value) -> Vec<u8> {
    let mut header = header();
    *header.pointer_mut(pointer).unwrap() = value;
    container(&header.to_string(), &[0; DATA])
}

#[test]
fn the_header_of_another_file() {
    let good = container(&header().to_string(), &[0; DATA]);
    assert_eq!(parse(&good).unwrap().tensors.len(), 2);
    refused(b"", &["header", "empty"]);
    refused(&good[..4], &["header", "too short", "4"]);
    for len in [0, u64::MAX, 1 << 40, 100_000_001, good.len() as u64 - 7] {
        let bytes = [&len.to_le_bytes(), &good[8..]].concat();
        refused(&bytes, &["header length", &len.to_string()]);
    }
    let lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n";
    refused(lfs, &["header", "Git LFS"]);
    refused(b"<!doctype html><html>Not found</html>", &["header", "web page"]);
    refused(b"{\"error\": \"not found, or no access\"}", &["header", "JSON file"]);
    refused(b"PK\x03\x04aaaaaaaaaaaaaaaa", &["header", "zip"]);
    refused(&container("hello", &[]), &["header", "JSON object"]);
    refused(&container("{\"a\": ", &[]), &["header"]);
    refused(&container("{} x", &[]), &["header"]);
    refused(&container("[]", &[]), &["header", "JSON object"]);
    refused(&container(&"[".repeat(20_000), &[]), &["header"]);
    refused(&container(&"{\"a\":".repeat(20_000), &[]), &["header"]);
    let mut bytes = container("{\"ab\": {}}", &[]);
    bytes[10] = 0xff;
    refused(&bytes, &["header", "UTF-8"]);
}

#[test]
fn tensors_that_do_not_fit() {
    refused(&with("/a/data_offsets", json!([16, 0])), &["\"a\"", "data_offsets", "behind"]);
    refused(&with("/a/data_offsets", json!([0, 16, 16])), &["\"a\"", "data_offsets"]);
    refused(&with("/a/data_offsets", json!([0])), &["\"a\"", "data_offsets"]);
    refused(&with("/a/data_offsets", json!("0")), &["\"a\"", "data_offsets"]);
    refused(&with("/a/data_offsets", json!([0, -16])), &["\"a\""]);
    refused(&with("/a/data_offsets", json!([0, u64::MAX])), &["\"a\"", "data_offsets"]);
    refused(&with("/a", json!({"dtype": "F32", "shape": [4]})), &["\"a\"", "data_offsets"]);
    refused(&with("/a/shape", json!([2, 3])), &["\"a\"", "shape [2, 3]", "24 bytes"]);
    refused(&with("/a/shape", json!([1000, 1000])), &["\"a\"", "shape", "4000000 bytes"]);
    refused(&with("/a/shape", json!([1u64 << 32, 1u64 << 32])), &["\"a\"", "shape", "overflows"]);
    refused(&with("/a/shape", json!([-2, -2])), &["\"a\"", "shape"]);
    refused(&with("/a/shape", json!([2.5, 2])), &["\"a\"", "shape"]);
    refused(&with("/a/shape", json!([1, 1, 1, 1, 1, 1, 1, 2, 2])), &["\"a\"", "shape"]);
    refused(&with("/a/dtype", json!("F33")), &["\"a\"", "unknown dtype F33"]);
    refused(&with("/a/dtype", json!(1)), &["\"a\""]);
    refused(&with("/a/dtype", json!("\u{1b}[31m".repeat(1000))), &["unknown dtype \\u{1b}[31m"]);
    // Ranges that leave bytes out, share them, or end before the file does.
    refused(&with("/b/data_offsets", json!([17, 29])), &["\"b\"", "data_offsets", "belong to no tensor"]);
    refused(&with("/b/data_offsets", json!([14, 26])), &["\"b\"", "data_offsets", "overlap"]);
    refused(&container(&header().to_string(), &[0; DATA + 1]), &["1 bytes at the end", "no tensor"]);
    refused(&container("{}", &[0]), &["1 bytes at the end"]);
    let text = header().to_string();
    let twice = text.replacen("\"b\"", "\"a\"", 1);
    refused(&container(&twice, &[0; DATA]), &["\"a\"", "duplicate"]);
    let twice = text.replacen("\"dtype\"", "\"dtype\":\"F32\",\"dtype\"", 1);
    refused(&container(&twice, &[0; DATA]), &["\"a\"", "duplicate"]);
}

#[test]
fn what_the_format_allows() {
    let empty = json!({"dtype": "F32", "shape": [0, 1u64 << 40], "data_offsets": [16, 16]});
    let metadata = json!({"format": "pt", "dtype": "none", "shape": "none", "data_offsets": "none"});
    let files = [
        json!({"__metadata__": metadata, "b": header()["b"], "a": header()["a"]}),
        json!({"a": header()["a"], "e": empty, "b": header()["b"]}),
        json!({"e": empty, "b": header()["b"], "a": header()["a"]}),
    ];
    for header in files {
        let text = header.to_string();
        let file = parse(&container(&text, &[7; DATA])).unwrap();
        assert!(file.truncated().is_none());
        let (bytes, range) = file.data(&file.tensors["b"]).unwrap();
        assert_eq!((bytes.len(), range), (12, 8 + text.len() + 16..8 + text.len() + DATA));
        // A header may end in spaces.
        parse(&container(&format!("{text}   "), &[7; DATA])).unwrap();
    }
    assert_eq!(parse(&container("{}", &[])).unwrap().tensors.len(), 0);
    let one = json!({"x": {"dtype": "BF16", "shape": [], "data_offsets": [0, 2]}});
    assert_eq!(parse(&container(&one.to_string(), &[0; 2])).unwrap().tensors["x"].shape, [0; 0]);
}

#[test]
fn truncated_files_open_and_do_not_load() {
    let small = Small::dense("llama");
    let whole = safetensors(&small.tensors);
    let header_end = 8 + u64::from_le_bytes(*whole.first_chunk().unwrap()) as usize;
    let made = small.made();
    for len in (0..whole.len()).step_by(97) {
        made.write("model.safetensors", &whole[..len]);
        if len < header_end {
            let e = puna_model::hf::Folder::open(made.path()).err().unwrap().to_string();
            assert!(e.contains("header"), "{len}: {e}");
            continue;
        }
        let words = format!("the file is truncated: the header's data_offsets need {} bytes, found {len}", whole.len());
        let folder = made.folder();
        assert!(folder.problems()[0].to_string().contains(&words), "{}", folder.problems()[0]);
        assert_eq!(folder.tensors().len(), small.tensors.len());
        assert!(made.refusal().contains(&words));
    }
}

#[test]
fn data_may_begin_anywhere() {
    let small = Small::dense("llama");
    let made = small.made();
    let expected = made.logits(&tokens(12));
    let whole = safetensors(&small.tensors);
    let header_len = u64::from_le_bytes(*whole.first_chunk().unwrap()) as usize;
    for spaces in 1..8 {
        let header = std::str::from_utf8(&whole[8..8 + header_len]).unwrap();
        let header = format!("{header}{}", " ".repeat(spaces));
        made.write("model.safetensors", container(&header, &whole[8 + header_len..]));
        assert_same(&made.logits(&tokens(12)), &expected, &format!("{spaces} spaces"));
    }
    // The order of tensors in the file means nothing.
    let backwards = Small { tensors: small.tensors.iter().rev().cloned().collect(), ..small };
    assert_same(&backwards.made().logits(&tokens(12)), &expected, "backwards");
}

#[test]
fn folders_without_a_model() {
    let empty = tempfile::tempdir().unwrap();
    let refusal = |path: &Path| hf_maker::load(path).err().unwrap().to_string();
    assert!(refusal(empty.path()).contains("config.json"));
    assert!(refusal(Path::new("/no/such/folder")).contains("no such file"));
    let small = Small::dense("llama");
    let made = small.made();
    made.remove("model.safetensors");
    assert!(made.refusal().contains("looked for model.safetensors.index.json, model.safetensors"));
    made.write("pytorch_model.bin", b"PK");
    assert!(made.refusal().contains("convert it to safetensors"));
    made.write("consolidated.safetensors", safetensors(&small.tensors));
    assert!(made.refusal().contains("no weights in safetensors"));
    made.write("model.safetensors", safetensors(&small.tensors));
    made.remove("config.json");
    let refusal = made.refusal();
    assert!(refusal.contains("config.json: missing"), "{refusal}");
    assert!(made.folder().tensors().len() > 0, "the weights can be looked at");
    made.write("config.json", "[".repeat(30_000));
    assert!(made.refusal().contains("config.json: expected a JSON object"));
    made.write("config.json", "[]");
    assert!(made.refusal().contains("config.json: expected a JSON object"));
    made.write("config.json", vec![b' '; 5 << 20]);
    assert!(made.refusal().contains("at most 4194304 are read"));
    made.write("config.json", "{}");
    assert!(made.refusal().contains("key \"model_type\": missing"));
}

#[test]
fn other_files_of_a_folder() {
    let made = Small::dense("llama").made();
    let folder = made.folder();
    assert_eq!(folder.file("tokenizer.json").unwrap(), None);
    assert!(folder.generation_config().unwrap().is_empty());
    made.write("tokenizer.json", "{\"version\": 1}");
    made.write("generation_config.json", "{\"eos_token_id\": [2, 3], \"temperature\": 0.6}");
    assert_eq!(folder.file("tokenizer.json").unwrap().unwrap(), "{\"version\": 1}");
    assert_eq!(folder.generation_config().unwrap()["eos_token_id"], json!([2, 3]));
    made.write("generation_config.json", "{");
    assert!(folder.generation_config().unwrap_err().to_string().contains("generation_config.json"));
    // A tokenizer is of use alone.
    made.remove("model.safetensors");
    made.remove("config.json");
    assert!(made.folder().file("tokenizer.json").unwrap().is_some());
}

#[test]
#[cfg(unix)]
fn links_are_followed() {
    let made = Small::dense("llama").made();
    let expected = made.logits(&tokens(12));
    let elsewhere = tempfile::tempdir().unwrap();
    std::fs::rename(made.path().join("model.safetensors"), elsewhere.path().join("blob")).unwrap();
    std::os::unix::fs::symlink(elsewhere.path().join("blob"), made.path().join("model.safetensors")).unwrap();
    assert_same(&made.logits(&tokens(12)), &expected, "a link");
}

fn small_file() -> Vec<u8> {
    let tensors: Vec<Tensor> = (0..6).map(|i| Tensor::f32(format!("t{i}"), &[i, 2], &vec![0.5; 2 * i])).collect();
    safetensors(&tensors)
}

proptest! {
    #[test]
    fn any_change_is_an_error_or_a_file(at in 0..200usize, byte in any::<u8>(), len in 0..700usize) {
        let mut bytes = small_file();
        let at = at % bytes.len();
        bytes[at] = byte;
        bytes.truncate(len.max(1));
        if let Ok(file) = parse(&bytes) {
            for info in file.tensors.values() {
                let data = file.data(info);
                prop_assert!(data.is_err() || info.range.end <= bytes.len() as u64);
            }
        }
    }

    #[test]
    fn any_header_is_an_error_or_a_file(text in "[\\[\\]{}:,\" 0-9a-z-]{0,60}", data in 0..40usize) {
        let _ = parse(&container(&text, &vec![0; data]));
    }
}

/// The folder's files as they are, with one byte changed: nothing panics, whatever it is.
#[test]
fn any_byte_of_a_folder() {
    let small = Small::dense("llama");
    let (config, whole) = (small.config.to_string(), safetensors(&small.tensors));
    let header_end = 8 + u64::from_le_bytes(*whole.first_chunk().unwrap()) as usize;
    let made: Made = small.made();
    for at in (0..config.len()).step_by(7) {
        for byte in *b"0\"-]" {
            let mut bytes = config.clone().into_bytes();
            bytes[at] = byte;
            made.write("config.json", bytes);
            let _ = hf_maker::load(&made.path());
        }
    }
    made.write("config.json", &config);
    for at in (0..header_end).step_by(61) {
        let mut bytes = whole.clone();
        bytes[at] ^= 4;
        made.write("model.safetensors", bytes);
        let _ = hf_maker::load(&made.path());
    }
}
