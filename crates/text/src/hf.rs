//! The tokenizer files of a Hugging Face folder: tokenizer.json, or tokenizer.model, with what the configs add.

use std::sync::OnceLock;

use ahash::AHashMap;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::{NormalizedString, Normalizer};

use crate::added::{AddedToken, AddedTokens};
use crate::bpe::{Bpe, BpeParts, build_model};
use crate::config::Config;
use crate::error::{Result, TextError, one_line};
use crate::sentencepiece::{self, ModelProto};
use crate::spm::SPACE;
use crate::tokenizer::{EOG_TEXTS, Encoder, Roles, Tokenizer};
use crate::tokenizer_json::{
    AddedTokenJson, Decoder, FILE, ModelJson, TokenizerJson, affixes, types, without_first_prefix,
};
use crate::vocab::{TokenKind, TokenTable, byte_level, byte_token};

/// Largest id accepted: tables are as long as the largest id, and no real vocabulary comes near.
const MAX_ID: u32 = 1 << 22;

/// Contents of the files that describe a tokenizer; absent files are `None`. One of the first two is needed.
#[derive(Debug, Clone, Copy, Default)]
pub struct HfFiles<'a> {
    /// tokenizer.json
    pub tokenizer_json: Option<&'a [u8]>,
    /// tokenizer.model (SentencePiece), read only where there is no tokenizer.json.
    pub tokenizer_model: Option<&'a [u8]>,
    /// tokenizer_config.json: special tokens, added tokens, `add_bos_token`, `add_eos_token`, `legacy`.
    pub tokenizer_config: Option<&'a [u8]>,
    /// special_tokens_map.json: special tokens that tokenizer_config.json does not name.
    pub special_tokens_map: Option<&'a [u8]>,
    /// added_tokens.json: text to id, in old folders.
    pub added_tokens: Option<&'a [u8]>,
    /// generation_config.json: ids that end a generation.
    pub generation_config: Option<&'a [u8]>,
    /// config.json: more of them, also inside `text_config`.
    pub config: Option<&'a [u8]>,
}

pub(crate) fn build(files: &HfFiles) -> Result<Tokenizer> {
    let config = Config::read(files)?;
    let mut tokenizer = match (files.tokenizer_json, files.tokenizer_model) {
        (Some(json), _) => from_json(json, &config)?,
        (None, Some(model)) => from_sentencepiece(model, &config)?,
        (None, None) => {
            let need = "a folder needs it, or tokenizer.model, to turn text into tokens";
            return Err(TextError::Missing { key: FILE, need });
        }
    };
    config.apply_roles(&mut tokenizer)?;
    let ends = tokenizer.added.iter().filter(|t| t.control && EOG_TEXTS.contains(&t.content.as_str())).map(|t| t.id);
    tokenizer.roles.eog.extend(ends);
    Ok(tokenizer)
}

fn from_sentencepiece(file: &[u8], config: &Config) -> Result<Tokenizer> {
    let model = ModelProto::read(file)?;
    let mut tokenizer = Tokenizer::from_vocab(&model.spec())?;
    if let (Encoder::Spm(spm), Some(false)) = (&mut tokenizer.encoder, config.legacy) {
        spm.prefix_after_token = false;
    }
    let mut added: Vec<AddedToken> = tokenizer.added.iter().cloned().collect();
    for token in config.added_tokens(|text| tokenizer.token_to_id(text)) {
        check_id(&token.content, token.id, sentencepiece::FILE)?;
        tokenizer.table.set(token.id, token.content.as_bytes(), added_kind(&token));
        added.retain(|t| t.id != token.id);
        added.push(token.token());
    }
    tokenizer.added = AddedTokens::new(added)?;
    Ok(tokenizer)
}

fn from_json(file: &[u8], config: &Config) -> Result<Tokenizer> {
    let json: TokenizerJson = serde_json::from_slice(file).map_err(|e| file_error("", e))?;
    json.model.check()?;
    let added = all_added(&json, config);
    let decoder = Decoder::read(&json.decoder, &json.pre_tokenizer)?;
    let normalizer: Option<NormalizerWrapper> = component("normalizer", json.normalizer)?;
    let table = table(&json.model.vocab.0, &added, &decoder, normalizer.as_ref())?;
    let (prefix, suffix) = affixes(&json.post_processor)?;
    for &id in prefix.iter().chain(&suffix) {
        if id as usize >= table.len() {
            let key = format!("{FILE}: post_processor");
            return Err(TextError::TokenId { key, id: id.into(), vocab: table.len() });
        }
    }
    let unk = json.model.unk_token.as_ref().and_then(|text| json.model.vocab.0.get(text)).copied();
    // Tokens that are matched after normalizing are looked for in what the others leave.
    let (raw, normalized): (Vec<_>, Vec<_>) = added.into_iter().partition(|t| t.special || !t.normalized);
    let bpe = Bpe {
        normalized: normalized_tokens(&normalized, normalizer.as_ref())?,
        normalizer,
        first: component("pre_tokenizer", json.pre_tokenizer.clone())?,
        rest: component("pre_tokenizer", without_first_prefix(json.pre_tokenizer))?,
        model: build_model(parts(json.model)?)?,
    };
    Ok(Tokenizer {
        encoder: Encoder::Bpe(Box::new(bpe)),
        added: AddedTokens::new(raw.iter().map(AddedTokenJson::token).collect())?,
        table,
        roles: Roles { unk, prefix, suffix, ..Roles::default() },
        strip_spaces: decoder.strip,
        cover: OnceLock::new(),
    })
}

/// The file's added tokens, then the configs', which overrule it. A token that the model's vocabulary has keeps its
/// id there, as in the `tokenizers` crate.
pub(crate) fn all_added(json: &TokenizerJson, config: &Config) -> Vec<AddedTokenJson> {
    let vocab = &json.model.vocab.0;
    let mut added: Vec<AddedTokenJson> = Vec::new();
    for token in &json.added_tokens {
        let id = vocab.get(&token.content).copied().unwrap_or(token.id);
        added.retain(|t| t.content != token.content);
        added.push(AddedTokenJson { id, ..token.clone() });
    }
    let known: AHashMap<String, u32> = added.iter().map(|t| (t.content.clone(), t.id)).collect();
    for token in config.added_tokens(|text| known.get(text).or_else(|| vocab.get(text)).copied()) {
        match added.iter_mut().find(|t| t.content == token.content) {
            Some(same) if config.gives_flags(&token.content) => *same = token,
            Some(same) => same.special = true,
            None => added.push(token),
        }
    }
    added
}

fn table(
    vocab: &AHashMap<String, u32>,
    added: &[AddedTokenJson],
    decoder: &Decoder,
    normalizer: Option<&NormalizerWrapper>,
) -> Result<TokenTable> {
    let mut texts: Vec<(u32, &str, Option<&AddedTokenJson>)> =
        vocab.iter().map(|(text, &id)| (id, text.as_str(), None)).collect();
    texts.extend(added.iter().map(|t| (t.id, t.content.as_str(), Some(t))));
    // An added token comes after the vocabulary's entry with its id and replaces it.
    texts.sort_by_key(|&(id, _, added)| (id, added.is_some()));
    let mut table = TokenTable::default();
    for (i, &(id, text, added)) in texts.iter().enumerate() {
        if texts.get(i + 1).is_some_and(|next| next.0 == id) {
            continue;
        }
        check_id(text, id, FILE)?;
        match added {
            // The `tokenizers` crate shows a normalized token as the normalizer left it, run through the decoder.
            Some(token) => match normalized(token, normalizer)? {
                Some(text) => table.set(id, &decoded(&text, decoder).0, added_kind(token)),
                None => table.set(id, text.as_bytes(), added_kind(token)),
            },
            None => {
                let (bytes, kind) = decoded(text, decoder);
                table.set(id, &bytes, kind);
            }
        }
    }
    Ok(table)
}

/// What a token of the model's vocabulary looks like in text.
fn decoded(text: &str, decoder: &Decoder) -> (Vec<u8>, TokenKind) {
    if decoder.byte_level {
        return (byte_level::decode(text).unwrap_or_else(|| text.as_bytes().to_vec()), TokenKind::Normal);
    }
    if let Some(byte) = byte_token(text.as_bytes()).filter(|_| decoder.bytes) {
        return (vec![byte], TokenKind::Byte);
    }
    let text = if decoder.spaces { text.replace(SPACE, " ") } else { text.to_string() };
    (text.into_bytes(), TokenKind::Normal)
}

fn normalized_tokens(tokens: &[AddedTokenJson], normalizer: Option<&NormalizerWrapper>) -> Result<AddedTokens> {
    let tokens = tokens.iter().map(|token| {
        let content = normalized(token, normalizer)?.unwrap_or_else(|| token.content.clone());
        Ok(AddedToken { content, ..token.token() })
    });
    AddedTokens::new(tokens.collect::<Result<_>>()?)
}

/// The text of a token that is matched after normalizing, if normalizing changes it.
fn normalized(token: &AddedTokenJson, normalizer: Option<&NormalizerWrapper>) -> Result<Option<String>> {
    let (true, Some(normalizer)) = (token.normalized, normalizer) else { return Ok(None) };
    let mut content = NormalizedString::from(token.content.as_str());
    normalizer.normalize(&mut content).map_err(|e| file_error("added_tokens: ", e))?;
    Ok(Some(content.get().to_string()).filter(|text| *text != token.content))
}

fn parts(mut model: ModelJson) -> Result<BpeParts> {
    Ok(BpeParts {
        merges_key: ModelJson::MERGES,
        merges: model.take_merges()?,
        unk_token: model.unk_token.filter(|unk| model.vocab.0.contains_key(unk)),
        vocab: model.vocab.0,
        fuse_unk: model.fuse_unk.unwrap_or(false),
        byte_fallback: model.byte_fallback.unwrap_or(false),
        ignore_merges: model.ignore_merges.unwrap_or(false),
    })
}

/// A normalizer or pre-tokenizer as the `tokenizers` crate reads it; null is none.
fn component<T: DeserializeOwned>(part: &'static str, json: Value) -> Result<Option<T>> {
    if json.is_null() {
        return Ok(None);
    }
    // A table of character replacements in binary, which the crate trusts more than a file deserves.
    if types(&json).contains(&"Precompiled") {
        return Err(TextError::UnsupportedPart { file: FILE, part, found: "Precompiled".into() });
    }
    serde_json::from_value(json).map(Some).map_err(|e| file_error(&format!("{part}: "), e))
}

fn added_kind(token: &AddedTokenJson) -> TokenKind {
    if token.special { TokenKind::Control } else { TokenKind::UserDefined }
}

fn check_id(text: &str, id: u32, file: &'static str) -> Result<()> {
    if id < MAX_ID {
        return Ok(());
    }
    Err(TextError::File { file, problem: format!("token {text:?} has the id {id}, expected less than {MAX_ID}") })
}

fn file_error(part: &str, error: impl std::fmt::Display) -> TextError {
    TextError::File { file: FILE, problem: format!("{part}{}", one_line(error)) }
}
