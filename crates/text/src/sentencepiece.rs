//! Reads `tokenizer.model`, a SentencePiece `ModelProto` (sentencepiece_model.proto), into a [`VocabSpec`].

use prost::Message;

use crate::error::{Result, TextError};
use crate::vocab::VocabSpec;

pub(crate) const FILE: &str = "tokenizer.model";

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ModelProto {
    #[prost(message, repeated, tag = "1")]
    pieces: Vec<Piece>,
    #[prost(message, optional, tag = "2")]
    trainer: Option<TrainerSpec>,
    #[prost(message, optional, tag = "3")]
    normalizer: Option<NormalizerSpec>,
}

#[derive(Clone, PartialEq, Message)]
struct Piece {
    #[prost(bytes = "vec", optional, tag = "1")]
    piece: Option<Vec<u8>>,
    #[prost(float, optional, tag = "2")]
    score: Option<f32>,
    #[prost(int32, optional, tag = "3")]
    kind: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
struct TrainerSpec {
    /// 1 unigram (the default), 2 BPE, 3 word, 4 char.
    #[prost(int32, optional, tag = "3")]
    model_type: Option<i32>,
    #[prost(bool, optional, tag = "24")]
    treat_whitespace_as_suffix: Option<bool>,
    #[prost(int32, optional, tag = "40")]
    unk_id: Option<i32>,
    #[prost(int32, optional, tag = "41")]
    bos_id: Option<i32>,
    #[prost(int32, optional, tag = "42")]
    eos_id: Option<i32>,
    #[prost(int32, optional, tag = "43")]
    pad_id: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
struct NormalizerSpec {
    #[prost(string, optional, tag = "1")]
    name: Option<String>,
    #[prost(bytes = "vec", optional, tag = "2")]
    precompiled_charsmap: Option<Vec<u8>>,
    #[prost(bool, optional, tag = "3")]
    add_dummy_prefix: Option<bool>,
    #[prost(bool, optional, tag = "4")]
    remove_extra_whitespaces: Option<bool>,
    #[prost(bool, optional, tag = "5")]
    escape_whitespaces: Option<bool>,
}

impl ModelProto {
    pub(crate) fn read(file: &[u8]) -> Result<ModelProto> {
        let model = ModelProto::decode(file)
            .map_err(|e| TextError::File { file: FILE, problem: format!("not a SentencePiece model: {e}") })?;
        let trainer = model.trainer.clone().unwrap_or_default();
        let unsupported = |part, found: &str| TextError::UnsupportedPart { file: FILE, part, found: found.to_string() };
        match trainer.model_type.unwrap_or(1) {
            2 => {}
            1 => return Err(unsupported("trainer_spec.model_type", "unigram")),
            other => return Err(unsupported("trainer_spec.model_type", &other.to_string())),
        }
        if trainer.treat_whitespace_as_suffix == Some(true) {
            return Err(unsupported("trainer_spec", "treat_whitespace_as_suffix"));
        }
        let normalizer = model.normalizer.clone().unwrap_or_default();
        if normalizer.precompiled_charsmap.is_some_and(|map| !map.is_empty()) {
            return Err(unsupported("normalizer_spec", normalizer.name.as_deref().unwrap_or("precompiled_charsmap")));
        }
        if normalizer.escape_whitespaces == Some(false) {
            return Err(unsupported("normalizer_spec", "escape_whitespaces = false"));
        }
        if model.pieces.is_empty() {
            return Err(TextError::EmptyVocab(FILE));
        }
        Ok(model)
    }

    /// The pieces as a vocabulary. SentencePiece gives the ids of bos and eos even where the model was trained
    /// without (-1), and its own defaults (unk 0, bos 1, eos 2) where the file is silent.
    pub(crate) fn spec(&self) -> VocabSpec<'_> {
        let trainer = self.trainer.clone().unwrap_or_default();
        let normalizer = self.normalizer.clone().unwrap_or_default();
        let id = |given: Option<i32>, default: i32| {
            let id = u32::try_from(given.unwrap_or(default)).ok()?;
            (given.is_some() || (id as usize) < self.pieces.len()).then_some(id)
        };
        VocabSpec {
            model: "llama",
            tokens: self.pieces.iter().map(|p| p.piece.as_deref().unwrap_or_default()).collect(),
            token_type: Some(self.pieces.iter().map(|p| p.kind.unwrap_or(1)).collect()),
            scores: Some(self.pieces.iter().map(|p| p.score.unwrap_or(0.0)).collect()),
            unk: id(trainer.unk_id, 0),
            bos: id(trainer.bos_id, 1),
            eos: id(trainer.eos_id, 2),
            pad: id(trainer.pad_id, -1),
            add_space_prefix: Some(normalizer.add_dummy_prefix.unwrap_or(true)),
            remove_extra_whitespaces: Some(normalizer.remove_extra_whitespaces.unwrap_or(true)),
            ..VocabSpec::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn model(kind: Option<i32>) -> ModelProto {
        let piece = |text: &str, kind| Piece { piece: Some(text.into()), score: Some(-1.0), kind };
        ModelProto {
            pieces: vec![piece("<unk>", Some(2)), piece("<s>", Some(3)), piece("</s>", Some(3)), piece("▁a", None)],
            trainer: Some(TrainerSpec { model_type: kind, ..TrainerSpec::default() }),
            normalizer: None,
        }
    }

    #[test]
    fn pieces_become_a_vocabulary() {
        let read = ModelProto::read(&model(Some(2)).encode_to_vec()).unwrap();
        let spec = read.spec();
        assert_eq!(spec.tokens[3], "▁a".as_bytes());
        assert_eq!(spec.token_type, Some(vec![2, 3, 3, 1]));
        assert_eq!((spec.unk, spec.bos, spec.eos, spec.pad), (Some(0), Some(1), Some(2), None));
        assert_eq!(spec.validate(), Ok(()));
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let error = |model: &ModelProto| ModelProto::read(&model.encode_to_vec()).unwrap_err().to_string();
        assert!(error(&model(None)).contains("`unigram`"));
        assert!(error(&model(Some(4))).contains("`4`"));
        let mut suffix = model(Some(2));
        suffix.trainer.as_mut().unwrap().treat_whitespace_as_suffix = Some(true);
        assert!(error(&suffix).contains("treat_whitespace_as_suffix"));
        let charsmap = NormalizerSpec {
            name: Some("nmt_nfkc".into()),
            precompiled_charsmap: Some(vec![1]),
            ..NormalizerSpec::default()
        };
        assert!(error(&ModelProto { normalizer: Some(charsmap), ..model(Some(2)) }).contains("`nmt_nfkc`"));
        assert!(error(&ModelProto { pieces: vec![], ..model(Some(2)) }).contains("empty"));
    }

    #[test]
    fn ids_outside_the_pieces_are_refused() {
        let mut bad = model(Some(2));
        bad.trainer.as_mut().unwrap().eos_id = Some(99);
        let message = ModelProto::read(&bad.encode_to_vec()).unwrap().spec().validate().unwrap_err().to_string();
        assert!(message.contains("eos_token_id is 99"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = ModelProto::read(&bytes);
        }

        #[test]
        fn a_cut_file_is_read_or_refused(cut in 0usize..60) {
            let bytes = model(Some(2)).encode_to_vec();
            let _ = ModelProto::read(&bytes[..cut.min(bytes.len())]);
        }
    }
}
