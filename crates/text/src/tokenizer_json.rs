//! tokenizer.json as data. Normalizers and pre-tokenizers stay JSON until the `tokenizers` crate reads them.

use std::fmt;

use ahash::AHashMap;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use crate::added::AddedToken;
use crate::error::{Result, TextError};
use crate::spm::SPACE;

pub(crate) const FILE: &str = "tokenizer.json";
const MERGES: &str = "tokenizer.json: model.merges";

#[derive(Deserialize)]
pub(crate) struct TokenizerJson {
    #[serde(default)]
    pub(crate) added_tokens: Vec<AddedTokenJson>,
    #[serde(default)]
    pub(crate) normalizer: Value,
    #[serde(default)]
    pub(crate) pre_tokenizer: Value,
    #[serde(default)]
    pub(crate) post_processor: Value,
    #[serde(default)]
    pub(crate) decoder: Value,
    pub(crate) model: ModelJson,
}

/// An added token, in tokenizer.json and in tokenizer_config.json's `added_tokens_decoder`.
#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct AddedTokenJson {
    #[serde(default)]
    pub(crate) id: u32,
    pub(crate) content: String,
    #[serde(default)]
    pub(crate) single_word: bool,
    #[serde(default)]
    pub(crate) lstrip: bool,
    #[serde(default)]
    pub(crate) rstrip: bool,
    #[serde(default)]
    pub(crate) normalized: bool,
    #[serde(default)]
    pub(crate) special: bool,
}

impl AddedTokenJson {
    /// A token without flags.
    pub(crate) fn plain(content: &str) -> AddedTokenJson {
        AddedTokenJson { content: content.to_string(), ..AddedTokenJson::default() }
    }

    pub(crate) fn token(&self) -> AddedToken {
        AddedToken {
            id: self.id,
            content: self.content.clone(),
            control: self.special,
            lstrip: self.lstrip,
            rstrip: self.rstrip,
            single_word: self.single_word,
        }
    }
}

#[derive(Deserialize)]
pub(crate) struct ModelJson {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    pub(crate) vocab: VocabJson,
    #[serde(default)]
    merges: Option<Vec<MergeJson>>,
    pub(crate) unk_token: Option<String>,
    #[serde(default)]
    pub(crate) fuse_unk: Option<bool>,
    #[serde(default)]
    pub(crate) byte_fallback: Option<bool>,
    #[serde(default)]
    pub(crate) ignore_merges: Option<bool>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
}

impl ModelJson {
    /// Only BPE, and that without the markers that some of its users put into words.
    pub(crate) fn check(&self) -> Result<()> {
        let kind = self.kind.as_deref().unwrap_or(if self.merges.is_some() { "BPE" } else { "none" });
        if kind != "BPE" {
            let key = "tokenizer.json: model.type";
            return Err(TextError::UnsupportedKind { key, found: kind.to_string(), supported: "BPE" });
        }
        for (part, text) in [
            ("model.continuing_subword_prefix", &self.continuing_subword_prefix),
            ("model.end_of_word_suffix", &self.end_of_word_suffix),
        ] {
            if let Some(found) = text.as_ref().filter(|text| !text.is_empty()) {
                return Err(TextError::UnsupportedPart { file: FILE, part, found: found.clone() });
            }
        }
        match self.vocab.0.is_empty() {
            true => Err(TextError::EmptyVocab("tokenizer.json: model.vocab")),
            false => Ok(()),
        }
    }

    /// Both ways of writing a merge: `"a b"` and `["a", "b"]`.
    pub(crate) fn take_merges(&mut self) -> Result<Vec<(String, String)>> {
        let merges = self.merges.take().unwrap_or_default().into_iter().enumerate();
        // Old files kept the first line of merges.txt.
        let merges = merges.filter(|(_, m)| !matches!(m, MergeJson::Text(text) if text.starts_with("#version")));
        merges
            .map(|(index, merge)| match merge {
                MergeJson::Pair(left, right) => Ok((left, right)),
                MergeJson::Text(found) => match found.split_once(' ') {
                    Some((left, right)) if !left.is_empty() && !right.is_empty() && !right.contains(' ') => {
                        Ok((left.to_string(), right.to_string()))
                    }
                    _ => {
                        let problem = "expected two tokens separated by one space";
                        Err(TextError::Merge { key: MERGES, index, found, problem })
                    }
                },
                MergeJson::Other(found) => {
                    Err(TextError::Merge { key: MERGES, index, found, problem: "expected two tokens" })
                }
            })
            .collect()
    }

    pub(crate) const MERGES: &'static str = MERGES;
}

/// Text to id. Other shapes (a list of pairs, for a unigram model) are read as empty; the type tells them apart.
#[derive(Default)]
pub(crate) struct VocabJson(pub(crate) AHashMap<String, u32>);

impl<'de> Deserialize<'de> for VocabJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<VocabJson, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = VocabJson;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of token ids")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<VocabJson, A::Error> {
                let mut vocab = AHashMap::new();
                while let Some((text, id)) = map.next_entry()? {
                    vocab.insert(text, id);
                }
                Ok(VocabJson(vocab))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<VocabJson, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(VocabJson::default())
            }
        }
        deserializer.deserialize_any(Read)
    }
}

enum MergeJson {
    Text(String),
    Pair(String, String),
    Other(String),
}

impl<'de> Deserialize<'de> for MergeJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<MergeJson, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = MergeJson;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a merge: \"a b\" or [\"a\", \"b\"]")
            }

            fn visit_str<E>(self, text: &str) -> std::result::Result<MergeJson, E> {
                Ok(MergeJson::Text(text.to_string()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<MergeJson, A::Error> {
                let mut parts: Vec<String> = Vec::with_capacity(2);
                while let Some(part) = seq.next_element()? {
                    parts.push(part);
                }
                Ok(match <[String; 2]>::try_from(parts) {
                    Ok([left, right]) if !left.is_empty() && !right.is_empty() => MergeJson::Pair(left, right),
                    Ok(parts) => MergeJson::Other(format!("{parts:?}")),
                    Err(parts) => MergeJson::Other(format!("{parts:?}")),
                })
            }
        }
        deserializer.deserialize_any(Read)
    }
}

/// How tokens become text, from the `decoder` section.
pub(crate) struct Decoder {
    /// Token texts are in the byte-level alphabet of GPT-2.
    pub(crate) byte_level: bool,
    /// `▁` is a space.
    pub(crate) spaces: bool,
    /// `<0xNN>` is a byte.
    pub(crate) bytes: bool,
    /// Spaces dropped at the start of the text.
    pub(crate) strip: usize,
}

impl Decoder {
    /// A file without a decoder is read by its pre-tokenizer: byte-level if that is.
    pub(crate) fn read(decoder: &Value, pre_tokenizer: &Value) -> Result<Decoder> {
        let mut read = Decoder { byte_level: false, spaces: false, bytes: false, strip: 0 };
        match decoder {
            Value::Null => read.byte_level = types(pre_tokenizer).contains(&"ByteLevel"),
            decoder => read.add(decoder)?,
        }
        Ok(read)
    }

    fn add(&mut self, decoder: &Value) -> Result<()> {
        let kind = decoder["type"].as_str().unwrap_or_default();
        let text = |key: &str| decoder[key].as_str().unwrap_or_default();
        let number = |key: &str| decoder[key].as_u64().unwrap_or(0);
        let space = SPACE.to_string();
        match kind {
            "Sequence" => return decoder["decoders"].as_array().into_iter().flatten().try_for_each(|d| self.add(d)),
            "ByteLevel" => self.byte_level = true,
            "ByteFallback" => self.bytes = true,
            "Fuse" => {}
            "Replace" if decoder["pattern"]["String"] == *space && text("content") == " " => self.spaces = true,
            "Strip" if text("content") == " " && number("stop") == 0 => {
                self.strip = usize::try_from(number("start")).unwrap_or(usize::MAX);
            }
            "Metaspace" if text("replacement") == space => {
                self.spaces = true;
                let never = decoder["prepend_scheme"] == "never" || decoder["add_prefix_space"] == false;
                self.strip = usize::from(!never);
            }
            _ => {
                let found = if kind.is_empty() { decoder.to_string() } else { kind.to_string() };
                return Err(TextError::UnsupportedPart { file: FILE, part: "decoder", found });
            }
        }
        Ok(())
    }
}

/// Ids put before and after a text by the `post_processor` section.
pub(crate) fn affixes(processor: &Value) -> Result<(Vec<u32>, Vec<u32>)> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    let (mut before, mut after) = (Vec::new(), Vec::new());
    match processor["type"].as_str() {
        None | Some("ByteLevel") => {}
        Some("Sequence") => {
            for part in processor["processors"].as_array().into_iter().flatten() {
                let (mut outer, inner_after) = affixes(part)?;
                outer.append(&mut before);
                before = outer;
                after.extend(inner_after);
            }
        }
        Some("TemplateProcessing") => {
            let mut seen_text = false;
            for part in processor["single"].as_array().into_iter().flatten() {
                if !part["Sequence"].is_null() {
                    seen_text = true;
                } else if let Some(name) = part["SpecialToken"]["id"].as_str() {
                    let ids = processor["special_tokens"][name]["ids"].as_array().into_iter().flatten();
                    let side = if seen_text { &mut after } else { &mut before };
                    side.extend(ids.filter_map(id));
                }
            }
        }
        Some("BertProcessing" | "RobertaProcessing") => {
            before.extend(id(&processor["cls"][1]));
            after.extend(id(&processor["sep"][1]));
        }
        Some(other) => {
            let (part, found) = ("post_processor", other.to_string());
            return Err(TextError::UnsupportedPart { file: FILE, part, found });
        }
    }
    Ok((before, after))
}

/// The `type` of a component, or of the components inside a sequence.
pub(crate) fn types(component: &Value) -> Vec<&str> {
    let inner = ["normalizers", "pretokenizers"].iter().filter_map(|key| component[*key].as_array()).flatten();
    component["type"].as_str().into_iter().chain(inner.flat_map(types)).collect()
}

/// A pre-tokenizer for text that does not start the whole text: a space is put before the first word only.
pub(crate) fn without_first_prefix(mut component: Value) -> Value {
    if component["type"] == "Metaspace" && component["prepend_scheme"] == "first" {
        component["prepend_scheme"] = "never".into();
    }
    if let Some(inner) = component.get_mut("pretokenizers").and_then(Value::as_array_mut) {
        inner.iter_mut().for_each(|part| *part = without_first_prefix(part.take()));
    }
    component
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn model(json: Value) -> ModelJson {
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn merges_as_text_and_as_pairs() {
        let mut read =
            model(json!({"type": "BPE", "vocab": {"a": 0}, "merges": ["#version: 0.2", "a b", ["c d", "e"]]}));
        let pair = |l: &str, r: &str| (l.to_string(), r.to_string());
        assert_eq!(read.take_merges().unwrap(), [pair("a", "b"), pair("c d", "e")]);
        for bad in [json!("ab"), json!("a b c"), json!(" b"), json!(["a"]), json!(["a", "b", "c"]), json!(["", "b"])] {
            let mut read = model(json!({"vocab": {"a": 0}, "merges": ["a b", bad]}));
            let message = read.take_merges().unwrap_err().to_string();
            assert!(message.starts_with("tokenizer.json: model.merges[1] is "), "{message}");
        }
        assert!(serde_json::from_value::<ModelJson>(json!({"vocab": {}, "merges": [3]})).is_err());
    }

    #[test]
    fn other_models_are_refused_by_name() {
        let unigram = model(json!({"type": "Unigram", "vocab": [["a", -1.0]]}));
        assert!(unigram.check().unwrap_err().to_string().contains("`Unigram`"));
        assert!(model(json!({"type": "BPE", "vocab": {}})).check().unwrap_err().to_string().contains("empty"));
        let suffix = model(json!({"type": "BPE", "vocab": {"a": 0}, "end_of_word_suffix": "</w>"}));
        assert!(suffix.check().unwrap_err().to_string().contains("`</w>`"));
    }

    #[test]
    fn decoders() {
        let llama = json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
        let read = Decoder::read(&llama, &Value::Null).unwrap();
        assert!(read.spaces && read.bytes && !read.byte_level && read.strip == 1);
        let byte_level = json!({"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}]});
        assert!(Decoder::read(&Value::Null, &byte_level).unwrap().byte_level);
        let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"});
        assert_eq!(Decoder::read(&metaspace, &Value::Null).unwrap().strip, 0);
        let error = Decoder::read(&json!({"type": "WordPiece"}), &Value::Null).err().unwrap();
        assert!(error.to_string().contains("`WordPiece`"));
    }

    #[test]
    fn what_is_put_around_a_text() {
        let template = json!({"type": "Sequence", "processors": [{"type": "ByteLevel"}, {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}, {"SpecialToken": {"id": "</s>"}}],
            "special_tokens": {"<s>": {"ids": [1]}, "</s>": {"ids": [2, 3]}}}]});
        assert_eq!(affixes(&template).unwrap(), (vec![1], vec![2, 3]));
        assert_eq!(affixes(&Value::Null).unwrap(), (vec![], vec![]));
        let roberta = json!({"type": "RobertaProcessing", "cls": ["<s>", 0], "sep": ["</s>", 2]});
        assert_eq!(affixes(&roberta).unwrap(), (vec![0], vec![2]));
        assert!(affixes(&json!({"type": "New"})).unwrap_err().to_string().contains("`New`"));
    }
}
