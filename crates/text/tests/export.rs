//! A folder's tokenizer, written as GGUF has it and read again, gives the same ids; what GGUF cannot hold is refused.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use puna_text::{AddBos, EncodeOptions, ExportOptions, HfFiles, TextError, Tokenizer, Vocab};
use serde_json::{Value, json};

/// The files of a tokenizer, by name.
#[derive(Clone)]
struct Folder(BTreeMap<&'static str, Vec<u8>>);

impl Folder {
    fn read(path: &Path) -> Folder {
        let names = ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"];
        Folder(names.into_iter().filter_map(|name| Some((name, std::fs::read(path.join(name)).ok()?))).collect())
    }

    fn of(model: &str) -> Folder {
        Folder::read(&models().join(model).join("hf"))
    }

    fn files(&self) -> HfFiles<'_> {
        let file = |name: &str| self.0.get(name).map(Vec::as_slice);
        HfFiles {
            tokenizer_json: file("tokenizer.json"),
            tokenizer_model: file("tokenizer.model"),
            tokenizer_config: file("tokenizer_config.json"),
            generation_config: file("generation_config.json"),
            ..HfFiles::default()
        }
    }

    fn without(mut self, name: &str) -> Folder {
        assert!(self.0.remove(name).is_some(), "no {name}");
        self
    }

    /// With a JSON file changed.
    fn with(mut self, name: &'static str, change: impl FnOnce(&mut Value)) -> Folder {
        let bytes = self.0.get(name).map_or(&b"{}"[..], Vec::as_slice);
        let mut json: Value = serde_json::from_slice(bytes).expect("testdata is JSON");
        change(&mut json);
        self.0.insert(name, json.to_string().into_bytes());
        self
    }

    fn tokenizer(&self) -> Tokenizer {
        Tokenizer::from_hf(&self.files()).expect("testdata is a tokenizer")
    }

    fn export(&self, options: ExportOptions) -> (Vocab, Vec<String>) {
        Vocab::from_hf(&self.files(), &options).unwrap_or_else(|e| panic!("{e}"))
    }

    /// Written and read again, without a notice.
    fn again(&self) -> Tokenizer {
        let (vocab, notices) = self.export(ExportOptions::default());
        assert!(notices.is_empty(), "{notices:?}");
        Tokenizer::from_vocab(&vocab.spec()).unwrap_or_else(|e| panic!("{e}"))
    }

    fn refusal(&self) -> TextError {
        Vocab::from_hf(&self.files(), &ExportOptions::default()).expect_err("it is written")
    }
}

fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/models")
}

const BYTES: &str = "qwen3-qknorm";
const PIECES: &str = "llama-gqa";

fn folders() -> Vec<Folder> {
    let mut all: Vec<PathBuf> = std::fs::read_dir(models())
        .expect("testdata is there")
        .filter_map(|entry| Some(entry.ok()?.path().join("hf")))
        .filter(|path| path.join("tokenizer.json").exists())
        .collect();
    all.sort();
    assert!(all.len() >= 6, "{all:?}");
    let mut folders: Vec<Folder> = all.iter().map(|path| Folder::read(path)).collect();
    // SentencePiece, whichever file it comes in.
    folders.push(Folder::of(PIECES).without("tokenizer.model"));
    folders.push(Folder::of(PIECES).without("tokenizer.json"));
    folders
}

#[test]
fn roles_and_tokens_are_the_same() {
    for folder in folders() {
        let (meant, read) = (folder.tokenizer(), folder.again());
        assert_eq!(meant.vocab_size(), read.vocab_size());
        for id in 0..meant.vocab_size() as u32 {
            assert_eq!(meant.token_bytes(id), read.token_bytes(id), "token {id}");
            assert_eq!(meant.is_control(id), read.is_control(id), "token {id}");
        }
        let roles = |t: &Tokenizer| (t.bos_id(), t.eos_id(), t.unk_id(), t.pad_id(), t.adds_bos(), t.adds_eos());
        assert_eq!(roles(&meant), roles(&read));
        assert_eq!(meant.eog_ids(), read.eog_ids());
    }
}

#[test]
fn scores_of_merges_are_those_of_the_model_in_order() {
    let (with, _) = Folder::of(PIECES).export(ExportOptions::default());
    let (without, _) = Folder::of(PIECES).without("tokenizer.model").export(ExportOptions::default());
    assert_eq!((&with.tokens, &with.token_type), (&without.tokens, &without.token_type));
    assert_eq!(with.model, "llama");
    let order = |vocab: &Vocab| {
        let scores = vocab.scores.clone().expect("pieces have scores");
        let chars = |id: &usize| String::from_utf8_lossy(&vocab.tokens[*id]).chars().count();
        let mut merged: Vec<usize> =
            (0..scores.len()).filter(|id| vocab.token_type[*id] == 1 && chars(id) > 1).collect();
        merged.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        merged
    };
    assert_eq!(order(&with), order(&without));
}

fn texts() -> impl Strategy<Value = String> {
    const WORDS: &[&str] =
        &["the", "llama", "I'm", "THEY'LL", "123", "4567", "é", "日本", "🙂", "<s>", "</s>", "<|im_end|>", "a=b;"];
    const GAPS: &[&str] = &[" ", "  ", "\n", "\n\n ", "\t", "\r\n", "", ".", ", "];
    let part = prop_oneof![
        prop::sample::select(WORDS).prop_map(str::to_owned),
        prop::sample::select(GAPS).prop_map(str::to_owned),
        "\\PC{0,6}",
    ];
    prop::collection::vec(part, 0..30).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn ids_are_the_same(texts in prop::collection::vec(texts(), 8)) {
        for folder in [BYTES, "llama3-rope-tied", PIECES] {
            let folder = Folder::of(folder);
            let (meant, read) = (folder.tokenizer(), folder.again());
            for text in &texts {
                for special in [true, false] {
                    let options = EncodeOptions { special, bos: AddBos::Auto };
                    prop_assert_eq!(meant.encode(text, options), read.encode(text, options), "{:?}", text);
                }
            }
        }
    }
}

#[test]
fn pre_tokenizers_have_names() {
    let pre = |folder: &Folder| folder.export(ExportOptions::default()).0.pre;
    assert_eq!(pre(&Folder::of(BYTES)), "qwen2");
    assert_eq!(pre(&Folder::of("llama3-rope-tied")), "llama-bpe");
    assert_eq!(pre(&Folder::of(PIECES)), "default");
    let with = |steps: Value| {
        Folder::of(BYTES).with("tokenizer.json", |json| {
            json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": steps});
        })
    };
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    assert_eq!(pre(&with(json!([bytes]))), "gpt-2");
    assert_eq!(pre(&with(json!([{"type": "Digits", "individual_digits": true}, bytes]))), "smollm");
    // Line ends written as they are, and a way to cut that leaves the same pieces.
    let split = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let split = split.replace(r"\r", "\r").replace(r"\n", "\n");
    let plain = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let split = json!({"type": "Split", "pattern": {"Regex": split}, "behavior": "Removed", "invert": true});
    assert_eq!(pre(&with(json!([split, plain]))), "qwen2");
    for unknown in [
        json!([{"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Isolated", "invert": false}, plain]),
        json!([{"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated", "invert": false}, plain]),
        json!([{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true}]),
        json!([plain]),
        json!([]),
    ] {
        let error = with(unknown).refusal();
        assert!(matches!(error, TextError::UnnamedPreTokenizer(_)), "{error}");
        assert!(error.to_string().contains("--pre"), "{error}");
    }
}

#[test]
fn a_name_that_is_given_is_taken_and_compared() {
    let folder = Folder::of(BYTES);
    let options = |pre| ExportOptions { pre: Some(pre), ..ExportOptions::default() };
    let (vocab, notices) = folder.export(options("qwen2"));
    assert!(notices.is_empty() && vocab.pre == "qwen2");
    let (vocab, notices) = folder.export(options("superbpe"));
    assert_eq!(vocab.pre, "superbpe");
    assert!(notices[0].starts_with("with the pre-tokenizer superbpe, read from there, "), "{notices:?}");
    let error = Vocab::from_hf(&folder.files(), &options("frob")).expect_err("there is no such name");
    assert!(error.to_string().contains("`frob`"), "{error}");
}

#[test]
fn tokenizers_that_do_more_are_refused() {
    let lower = Folder::of(BYTES).with("tokenizer.json", |json| json["normalizer"] = json!({"type": "Lowercase"}));
    let error = lower.refusal().to_string();
    assert!(
        error.starts_with("GGUF cannot hold this tokenizer: read from there, \"Hello world\" would be ["),
        "{error}"
    );
    let words = Folder::of(BYTES).with("tokenizer.json", |json| {
        json["decoder"] = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"});
    });
    assert!(words.refusal().to_string().contains("neither byte-level BPE nor"), "{}", words.refusal());
    // A vocabulary with scores merges what the list of merges does not have.
    let fewer = Folder::of(PIECES).without("tokenizer.model").with("tokenizer.json", |json| {
        json["model"]["merges"].as_array_mut().expect("a list").remove(3);
    });
    assert!(fewer.refusal().to_string().contains("it never merges"), "{}", fewer.refusal());
    // What comes before a text must be its bos.
    let before = Folder::of(PIECES).with("tokenizer.json", |json| {
        let twice = json!({"SpecialToken": {"id": "<s>", "type_id": 0}});
        json["post_processor"]["single"].as_array_mut().expect("a list").insert(0, twice);
    });
    assert!(before.refusal().to_string().contains("\"\" would be [1], and is [1, 1]"), "{}", before.refusal());
}

#[test]
fn what_readers_do_otherwise_is_told() {
    let notices = |folder: Folder| folder.export(ExportOptions::default()).1.join("; ");
    let nfc = Folder::of(BYTES).with("tokenizer.json", |json| json["normalizer"] = json!({"type": "NFC"}));
    assert!(notices(nfc).starts_with("text whose accents are"));
    let strips = Folder::of(BYTES).with("tokenizer.json", |json| json["added_tokens"][1]["rstrip"] = json!(true));
    assert!(notices(strips).contains("\"<|im_start|>\""));
    let ends = |ids: Value| Folder::of(BYTES).with("generation_config.json", |json| json["eos_token_id"] = ids);
    let (vocab, told) = ends(json!([2, 0, 7, 9])).export(ExportOptions::default());
    assert_eq!((vocab.eos, vocab.eot, vocab.eom), (Some(2), Some(7), Some(9)));
    assert!(told.is_empty(), "{told:?}");
    assert!(notices(ends(json!([2, 7, 9, 11]))).contains("the tokens [11] end an answer too"));
}

#[test]
fn a_token_that_ends_every_text_is_the_eos() {
    let folder = Folder::of(BYTES).with("tokenizer.json", |json| {
        json["post_processor"] = json!({"type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}],
            "pair": [], "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}});
    });
    let (vocab, _) = folder.export(ExportOptions::default());
    assert_eq!((vocab.eos, vocab.add_eos), (Some(0), true));
    let read = folder.again();
    assert_eq!(read.encode("a", EncodeOptions::default()), folder.tokenizer().encode("a", EncodeOptions::default()));
}

#[test]
fn rows_without_a_token_are_filled() {
    for model in [BYTES, PIECES] {
        let options = ExportOptions { rows: Some(520), ..ExportOptions::default() };
        let (vocab, notices) = Folder::of(model).export(options);
        assert!(notices.is_empty(), "{notices:?}");
        assert_eq!((vocab.tokens.len(), vocab.token_type.len()), (520, 520));
        assert!(vocab.scores.is_none_or(|scores| scores.len() == 520));
        assert_eq!((&vocab.tokens[519][..], vocab.token_type[519]), (&b"[PAD519]"[..], 5));
    }
}
