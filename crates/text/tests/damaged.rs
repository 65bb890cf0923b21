//! Damaged tokenizer files are refused or work, but never panic.
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use proptest::prelude::*;
use puna_text::{AddBos, ChatTemplate, EncodeOptions, HfFiles, TextError, Tokenizer, VocabSpec};
use serde_json::{Value, json};

fn read(model: &str, file: &str) -> Vec<u8> {
    let path = [env!("CARGO_MANIFEST_DIR"), "../../testdata/models", model, "hf", file].iter().collect::<PathBuf>();
    std::fs::read(path).unwrap()
}

fn json(model: &str, file: &str) -> Value {
    serde_json::from_slice(&read(model, file)).unwrap()
}

/// Loads a tokenizer and uses it.
fn try_out(files: &HfFiles) -> Result<(), TextError> {
    use_it(&Tokenizer::from_hf(files)?)
}

fn use_it(tokenizer: &Tokenizer) -> Result<(), TextError> {
    for text in ["", "Hello  wörld\n<s><|im_end|> 🦙", "▁<0x41>"] {
        for special in [true, false] {
            let ids = tokenizer.encode(text, EncodeOptions { special, bos: AddBos::Auto })?;
            tokenizer.decode(&ids);
        }
    }
    tokenizer.decode(&(0..600).collect::<Vec<u32>>());
    Ok(())
}

fn from_json(json: &Value, config: &Value) -> Result<(), TextError> {
    let (json, config) = (json.to_string(), config.to_string());
    let files = HfFiles {
        tokenizer_json: Some(json.as_bytes()),
        tokenizer_config: Some(config.as_bytes()),
        ..HfFiles::default()
    };
    try_out(&files)
}

/// Paths of all values in `json`, but of only a few inside long lists and objects.
fn paths(json: &Value, at: &str, found: &mut Vec<String>) {
    found.push(at.to_string());
    match json {
        Value::Array(list) => list.iter().enumerate().take(4).for_each(|(i, v)| paths(v, &format!("{at}/{i}"), found)),
        Value::Object(map) => map.iter().take(12).for_each(|(key, v)| {
            paths(v, &format!("{at}/{}", key.replace('~', "~0").replace('/', "~1")), found);
        }),
        _ => {}
    }
}

fn odd_values() -> Vec<Value> {
    let numbers = [json!(0), json!(-1), json!(511), json!(512), json!(4294967295u64), json!(1e300)];
    let texts = ["", "a", "▁", "ĠĠ", "<s>", "(", "\\p{Foo}", "(?=(a+)+$)", "BPE", "Sequence", "Metaspace", "ByteLevel"];
    let mut values: Vec<Value> = numbers.into_iter().chain(texts.map(|t| json!(t))).collect();
    values.extend([json!(null), json!(true), json!(false), json!([]), json!({}), json!([["a", "b", "c"]])]);
    values.extend([
        json!({"type": "Strip"}),
        json!({"type": "NFKC"}),
        json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    ]);
    values.extend([json!({"type": "Digits", "individual_digits": true}), json!({"String": ""}), json!({"Regex": ""})]);
    values
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_changed_value(model in prop::sample::select(vec!["llama-gqa", "qwen3-qknorm"]), in_config: bool,
        place in any::<prop::sample::Index>(), value in prop::sample::select(odd_values()))
    {
        let (mut file, mut config) = (json(model, "tokenizer.json"), json(model, "tokenizer_config.json"));
        let changed = if in_config { &mut config } else { &mut file };
        let mut all = Vec::new();
        paths(changed, "", &mut all);
        *changed.pointer_mut(&all[place.index(all.len())]).unwrap() = value;
        if let Err(error) = from_json(&file, &config) {
            prop_assert!(!error.to_string().contains('\n'), "{}", error);
        }
    }

    #[test]
    fn a_cut_file(model in prop::sample::select(vec!["llama-gqa", "qwen3-qknorm"]), at in any::<prop::sample::Index>()) {
        let file = read(model, "tokenizer.json");
        let cut = at.index(file.len() - 2);
        let files = HfFiles { tokenizer_json: Some(&file[..cut]), ..HfFiles::default() };
        prop_assert!(Tokenizer::from_hf(&files).unwrap_err().to_string().starts_with("tokenizer.json: "));
        let file = read("llama-gqa", "tokenizer.model");
        let files = HfFiles { tokenizer_model: Some(&file[..cut.min(file.len())]), ..HfFiles::default() };
        let _ = try_out(&files);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_vocabulary(
        model in prop::sample::select(vec!["gpt2", "llama"]),
        pre in prop::sample::select(vec!["default", "llama-bpe", "qwen2"]),
        tokens in prop::collection::vec((prop::sample::select(TEXTS.to_vec()), -1..8i32, -9f32..9.0), 1..20),
        with_types: bool,
        merges in prop::collection::vec(prop::sample::select(vec!["a b", "a a", "< s", "<s >", "ab a"]), 0..3),
        ids in prop::collection::vec(prop::option::of(0..20u32), 7),
        flags in prop::collection::vec(prop::option::of(any::<bool>()), 4),
    ) {
        let id = |i: usize| ids[i].map(|id| id % tokens.len() as u32);
        let spec = VocabSpec {
            model, pre: Some(pre), name: Some("Phi-3"),
            tokens: tokens.iter().map(|t| t.0).collect(),
            token_type: with_types.then(|| tokens.iter().map(|t| t.1).collect()),
            scores: Some(tokens.iter().map(|t| t.2).collect()),
            merges: merges.iter().map(|m| m.as_bytes()).collect(),
            bos: id(0), eos: id(1), eot: id(2), eom: id(3), unk: id(4), sep: id(5), pad: id(6),
            add_bos: flags[0], add_eos: flags[1], add_space_prefix: flags[2], remove_extra_whitespaces: flags[3],
            ..VocabSpec::default()
        };
        match Tokenizer::from_vocab(&spec).and_then(|tokenizer| use_it(&tokenizer)) {
            Ok(()) => {}
            // A merge of what is not in the vocabulary.
            Err(error) => prop_assert!(error.to_string().starts_with("tokenizer.ggml.merges"), "{}", error),
        }
    }
}

/// Token texts of every sort.
const TEXTS: [&[u8]; 16] = [
    b"a",
    b"b",
    b"ab",
    b"aa",
    b"<",
    b"s",
    b"<s",
    b">",
    b"<s>",
    b"<0x41>",
    b"<0xZZ>",
    b"",
    b"\xff\xfe",
    b"<|im_end|>",
    "▁".as_bytes(),
    "Ġ".as_bytes(),
];

#[test]
fn vocabularies_that_are_refused_name_the_key() {
    let spec =
        || VocabSpec { model: "gpt2", pre: Some("gpt-2"), tokens: vec![b"a", b"b", b"ab"], ..VocabSpec::default() };
    let error = |spec: VocabSpec| Tokenizer::from_vocab(&spec).err().map(|e| e.to_string()).unwrap_or_default();
    assert_eq!(error(spec()), "");
    assert_eq!(
        error(VocabSpec { model: "bert", ..spec() }),
        "tokenizer.ggml.model: `bert` is not supported (supported: gpt2, llama)"
    );
    assert_eq!(
        error(VocabSpec { pre: Some("frob-bpe"), ..spec() }),
        "tokenizer.ggml.pre: `frob-bpe` is not a known pre-tokenizer"
    );
    assert!(error(VocabSpec { pre: None, ..spec() }).starts_with("tokenizer.ggml.pre is missing"));
    assert!(error(VocabSpec { tokens: vec![], ..spec() }).starts_with("tokenizer.ggml.tokens: "));
    assert!(error(VocabSpec { model: "llama", ..spec() }).starts_with("tokenizer.ggml.scores is missing"));
    assert_eq!(
        error(VocabSpec { merges: vec![b"a b", b"ab"], ..spec() }),
        "tokenizer.ggml.merges[1] is \"ab\": expected two tokens separated by one space"
    );
    assert!(error(VocabSpec { merges: vec![b"a z"], ..spec() }).starts_with("tokenizer.ggml.merges"));
    assert!(error(VocabSpec { merges: vec![b"b a"], ..spec() }).starts_with("tokenizer.ggml.merges"));
    assert!(error(VocabSpec { merges: vec![b"ab ab"], ..spec() }).contains("not in the vocabulary"));
    // A text that is not UTF-8, or occurs twice, is no reason to refuse a file.
    let odd = VocabSpec { tokens: vec![b"a", b"\xff\xfe", b"a"], ..spec() };
    let tokenizer = Tokenizer::from_vocab(&odd).unwrap();
    assert_eq!(tokenizer.encode("a", EncodeOptions::default()).unwrap(), [0]);
    assert_eq!((tokenizer.token_bytes(1), tokenizer.decode(&[2, 1])), (&b"\xff\xfe"[..], "a\u{FFFD}\u{FFFD}".into()));
}

#[test]
fn merges_that_the_library_would_not_survive() {
    let mut file = json("qwen3-qknorm", "tokenizer.json");
    let longest = file["model"]["vocab"].as_object().unwrap().keys().max_by_key(|k| k.len()).unwrap().clone();
    file["model"]["merges"].as_array_mut().unwrap().push(json!([longest, longest]));
    let error = from_json(&file, &json!({})).unwrap_err().to_string();
    assert!(error.starts_with("tokenizer.json: model.merges[253] is "), "{error}");
}

#[test]
fn ids_outside_the_vocabulary_are_named() {
    let file = read("qwen3-qknorm", "tokenizer.json");
    let error = |generation: Value, config: Value| {
        let (generation, config) = (generation.to_string(), config.to_string());
        let files = HfFiles {
            tokenizer_json: Some(&file),
            generation_config: Some(generation.as_bytes()),
            config: Some(config.as_bytes()),
            ..HfFiles::default()
        };
        Tokenizer::from_hf(&files).err().map(|e| e.to_string()).unwrap_or_default()
    };
    let message = error(json!({"eos_token_id": [2, 512]}), json!({}));
    assert_eq!(message, "generation_config.json: eos_token_id is 512, out of range: the vocabulary has 512 tokens");
    let message = error(json!({}), json!({"text_config": {"bos_token_id": 4294967296u64}}));
    assert!(message.starts_with("config.json: text_config.bos_token_id is 4294967296"), "{message}");
    assert!(error(json!({"eos_token_id": "x"}), json!({})).contains("expected a token id"));
    assert_eq!(error(json!({"eos_token_id": null}), json!({"eos_token_id": [0, 2], "bos_token_id": 0})), "");
}

#[test]
fn all_end_tokens_are_united() {
    let file = read("qwen3-qknorm", "tokenizer.json");
    let files = HfFiles { tokenizer_json: Some(&file), ..HfFiles::default() };
    let mut tokenizer = Tokenizer::from_hf(&files).unwrap();
    // <|endoftext|> and <|im_end|> by their texts.
    assert_eq!(tokenizer.eog_ids().iter().copied().collect::<Vec<_>>(), [0, 2]);
    let files = HfFiles { generation_config: Some(br#"{"eos_token_id": [7, 9]}"#), ..files };
    assert_eq!(Tokenizer::from_hf(&files).unwrap().eog_ids().iter().copied().collect::<Vec<_>>(), [0, 2, 7, 9]);
    tokenizer.add_eog("tokenizer.ggml.eot_token_id", 5).unwrap();
    assert!(tokenizer.eog_ids().contains(&5));
    let error = tokenizer.add_eog("tokenizer.ggml.eot_token_id", 512).unwrap_err().to_string();
    assert!(error.starts_with("tokenizer.ggml.eot_token_id is 512"));
}

#[test]
fn special_tokens_as_objects_and_in_the_map() {
    let file = read("llama-gqa", "tokenizer.json");
    let files = HfFiles { tokenizer_json: Some(&file), ..HfFiles::default() };
    let config =
        br#"{"bos_token": {"content": "<s>", "lstrip": false}, "add_bos_token": false, "add_eos_token": true}"#;
    let map = br#"{"bos_token": "</s>", "eos_token": "</s>"}"#;
    let files = HfFiles { tokenizer_config: Some(config), special_tokens_map: Some(map), ..files };
    let tokenizer = Tokenizer::from_hf(&files).unwrap();
    assert_eq!((tokenizer.bos_id(), tokenizer.eos_id()), (Some(1), Some(2)));
    assert!(!tokenizer.adds_bos() && tokenizer.adds_eos());
    let ids = tokenizer.encode("a", EncodeOptions::default()).unwrap();
    assert_eq!((ids.first() == Some(&1), ids.last()), (false, Some(&2)));
}

#[test]
fn templates_by_name() {
    let list = json!([{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]);
    assert_eq!(ChatTemplate::source_from_config(&list).unwrap(), Some("D"));
    assert_eq!(ChatTemplate::source_from_config(&json!("S")).unwrap(), Some("S"));
    assert_eq!(ChatTemplate::source_from_config(&Value::Null).unwrap(), None);
    let error = ChatTemplate::source_from_config(&json!([{"name": "rag", "template": "R"}])).unwrap_err();
    assert!(error.to_string().contains("rag"));
    assert!(ChatTemplate::source_from_config(&json!(3)).is_err());
}
