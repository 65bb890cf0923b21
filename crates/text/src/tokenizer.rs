//! Text to token ids and back.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::OnceLock;

use tokenizers::Model;

use crate::added::{AddedToken, AddedTokens, Piece, Trust};
use crate::bpe::Bpe;
use crate::cover::Cover;
use crate::error::{Result, TextError};
use crate::hf::{self, HfFiles};
use crate::spm::{SPACE, Spm};
use crate::stream::TokenStream;
use crate::vocab::{TokenKind, TokenTable, VocabSpec, byte_level, byte_token};

/// Texts of control tokens that end a generation (the list of llama.cpp for the model families served here). In a GGUF
/// file, a token with one of these texts that begins with `<|` counts as a control token even if the file says
/// otherwise; the other texts may be ordinary ones (`</s>` is in Qwen2's vocabulary for HTML's sake).
pub const EOG_TEXTS: &[&str] = &[
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<end_of_turn>",
    "<eos>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|return|>",
    "<|call|>",
    "<end_of_utterance>",
    "[e~[",
    "<｜end▁of▁sentence｜>",
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
];

/// Whether the ids begin with the token that marks the beginning of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AddBos {
    /// As the model's files say.
    #[default]
    Auto,
    /// Yes, if the files name such a token at all.
    Yes,
    /// No, and no other token either, at neither end.
    No,
}

/// How [`Tokenizer::encode`] treats a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Control tokens written out in the text become those tokens; otherwise they are ordinary characters.
    /// User-defined tokens are found either way.
    pub special: bool,
    /// Tokens added at both ends.
    pub bos: AddBos,
}

impl Default for EncodeOptions {
    /// Control tokens are found and the files decide what is added: raw completion, as in llama.cpp and transformers.
    fn default() -> EncodeOptions {
        EncodeOptions { special: true, bos: AddBos::Auto }
    }
}

/// A stretch of a rendered prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// The characters, exactly as rendered.
    pub text: String,
    /// Written by the chat template: control tokens may be found here.
    pub trusted: bool,
}

impl Segment {
    /// Text in which control tokens are found.
    pub fn trusted(text: impl Into<String>) -> Segment {
        Segment { text: text.into(), trusted: true }
    }

    /// Text that cannot produce a control token.
    pub fn untrusted(text: impl Into<String>) -> Segment {
        Segment { text: text.into(), trusted: false }
    }
}

pub(crate) enum Encoder {
    Bpe(Box<Bpe>),
    Spm(Box<Spm>),
}

/// Ids that have a role.
#[derive(Debug, Clone, Default)]
pub(crate) struct Roles {
    pub(crate) bos: Option<u32>,
    pub(crate) eos: Option<u32>,
    pub(crate) unk: Option<u32>,
    pub(crate) pad: Option<u32>,
    /// What [`AddBos::Auto`] puts before and after a text.
    pub(crate) prefix: Vec<u32>,
    pub(crate) suffix: Vec<u32>,
    pub(crate) eog: BTreeSet<u32>,
}

/// A model's tokenizer. Cheap to share between threads behind an `Arc`; nothing in it changes while encoding.
///
/// One pipeline serves every kind of file. The text is cut at the added tokens it holds (control tokens only where
/// they are trusted); what lies between goes through the `tokenizers` crate (byte-level BPE from GGUF, any BPE from
/// tokenizer.json) or through [SentencePiece merging by score](crate::VocabSpec) for `llama` vocabularies, whose
/// result depends on scores that merge lists cannot express exactly. Decoding is a table of bytes by id.
pub struct Tokenizer {
    pub(crate) encoder: Encoder,
    pub(crate) added: AddedTokens,
    pub(crate) table: TokenTable,
    pub(crate) roles: Roles,
    /// Spaces dropped at the start of decoded text: what encoding puts there.
    pub(crate) strip_spaces: usize,
    /// Made when a long text asks for it.
    pub(crate) cover: OnceLock<Option<Cover>>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).field("roles", &self.roles).finish()
    }
}

impl Tokenizer {
    /// From the vocabulary inside a GGUF file. Where a key is absent: `add_bos` is true for `llama` vocabularies and
    /// for the pre-tokenizers `llama-bpe` (and its other names) and `tekken`, false for other `gpt2` vocabularies;
    /// `add_eos` is false; `add_space_prefix` is true for `llama` and has no meaning for `gpt2`. A bos or eos that
    /// the file does not name is never added.
    ///
    /// # Errors
    /// Names the metadata key, with what was expected and found.
    pub fn from_vocab(spec: &VocabSpec) -> Result<Tokenizer> {
        spec.validate()?;
        let (encoder, add_bos) = match spec.model {
            "gpt2" => (Encoder::Bpe(Box::new(Bpe::from_vocab(spec)?)), crate::pretokenize::find(spec)?.add_bos),
            "llama" => (Encoder::Spm(Box::new(Spm::from_vocab(spec)?)), true),
            other => {
                let (key, supported) = ("tokenizer.ggml.model", "gpt2, llama");
                return Err(TextError::UnsupportedKind { key, found: other.to_string(), supported });
            }
        };
        let strip_spaces = match &encoder {
            Encoder::Spm(spm) => usize::from(spm.has_space_prefix()),
            Encoder::Bpe(_) => 0,
        };
        let mut table = TokenTable::default();
        let mut added = Vec::new();
        let mut roles = Roles { bos: spec.bos, eos: spec.eos, unk: spec.unk, pad: spec.pad, ..Roles::default() };
        let phi3 = spec.name.is_some_and(|n| ["phi-3", "phi3"].iter().any(|p| n.to_ascii_lowercase().contains(p)));
        for (id, &token) in spec.tokens.iter().enumerate() {
            let (mut kind, text) = (spec.kind(id), std::str::from_utf8(token).ok());
            if let Some(text) = text.filter(|t| EOG_TEXTS.contains(t)) {
                if text.starts_with("<|") && kind != TokenKind::Unused {
                    kind = TokenKind::Control;
                }
                roles.eog.extend((kind == TokenKind::Control).then_some(id as u32));
            }
            table.set(id as u32, &shown(token, kind, spec.model), kind);
            if let (TokenKind::Control | TokenKind::Unknown | TokenKind::UserDefined, Some(text)) = (kind, text) {
                let rstrip = phi3 && !["<unk>", "<s>", "<|endoftext|>"].contains(&text);
                let control = kind.is_control();
                added.push(AddedToken {
                    id: id as u32,
                    content: text.into(),
                    control,
                    rstrip,
                    ..AddedToken::default()
                });
            }
        }
        let ends = [spec.eos, spec.eot, spec.eom].into_iter().flatten();
        roles.eog.extend(ends.chain(spec.eog.iter().map(|&(_, id)| id)));
        roles.prefix.extend(spec.bos.filter(|_| spec.add_bos.unwrap_or(add_bos)));
        roles.suffix.extend(spec.eos.filter(|_| spec.add_eos.unwrap_or(false)));
        Ok(Tokenizer { encoder, added: AddedTokens::new(added)?, table, roles, strip_spaces, cover: OnceLock::new() })
    }

    /// From the tokenizer files of a Hugging Face folder: tokenizer.json, or tokenizer.model where there is none.
    ///
    /// # Errors
    /// Names the file and the part at fault.
    pub fn from_hf(files: &HfFiles) -> Result<Tokenizer> {
        hf::build(files)
    }

    /// The ids of `text`.
    ///
    /// # Errors
    /// [`TextError::Encode`] if the tokenizer library refuses the text; a vocabulary that could be loaded does not
    /// lead there.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Result<Vec<u32>> {
        let mut ids = match options.bos {
            AddBos::Auto => self.roles.prefix.clone(),
            AddBos::Yes => self.prefix_with_bos(),
            AddBos::No => Vec::new(),
        };
        let trust = if options.special { Trust::Everywhere } else { Trust::Nowhere };
        self.encode_text(text, trust, &mut ids)?;
        if options.bos != AddBos::No {
            ids.extend(&self.roles.suffix);
        }
        Ok(ids)
    }

    /// What [`AddBos::Auto`] puts after a text: the end token of models made for embeddings, mostly nothing.
    pub fn suffix(&self) -> &[u32] {
        &self.roles.suffix
    }

    /// The ids of a rendered chat: as if the segments were one text, except that control tokens are found only
    /// within trusted segments (neighbouring trusted segments are one). A beginning-of-text token is added only if
    /// the template did not write it, and nothing is added at the end.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_segments(&self, segments: &[Segment], bos: AddBos) -> Result<Vec<u32>> {
        let mut text = String::with_capacity(segments.iter().map(|s| s.text.len()).sum());
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for segment in segments {
            let range = text.len()..text.len() + segment.text.len();
            text.push_str(&segment.text);
            match ranges.last_mut() {
                Some(last) if segment.trusted && last.end == range.start => last.end = range.end,
                _ if segment.trusted => ranges.push(range),
                _ => {}
            }
        }
        let mut ids = Vec::new();
        self.encode_text(&text, Trust::Ranges(&ranges), &mut ids)?;
        let prefix = match bos {
            AddBos::Auto => self.roles.prefix.clone(),
            AddBos::Yes => self.prefix_with_bos(),
            AddBos::No => Vec::new(),
        };
        if !prefix.is_empty() && ids.first() != prefix.first() {
            ids.splice(0..0, prefix);
        }
        Ok(ids)
    }

    /// How many tokens a text has at least, whatever the options, where these are more than `most`: told in one pass over
    /// its bytes, so that a text that is far too long need not be tokenized. The number is mostly a tenth of the true
    /// one; `None` says nothing about the text. `parts`: the text, whole or in parts.
    pub fn least_tokens_over<'t>(
        &self,
        most: usize,
        parts: impl IntoIterator<Item = &'t str> + Clone,
    ) -> Option<usize> {
        // No token is empty.
        if parts.clone().into_iter().map(str::len).sum::<usize>() <= most {
            return None;
        }
        let cover = self.cover.get_or_init(|| Cover::new(self)).as_ref()?;
        Some(cover.least(parts)).filter(|least| *least > most)
    }

    fn prefix_with_bos(&self) -> Vec<u32> {
        let missing = self.roles.bos.filter(|bos| !self.roles.prefix.contains(bos));
        missing.into_iter().chain(self.roles.prefix.iter().copied()).collect()
    }

    fn encode_text(&self, text: &str, trust: Trust, ids: &mut Vec<u32>) -> Result<()> {
        for (i, piece) in self.added.split(text, trust).into_iter().enumerate() {
            match piece {
                Piece::Token(id) => ids.push(id),
                Piece::Text(range) => {
                    let from = ids.len();
                    match &self.encoder {
                        Encoder::Bpe(bpe) => bpe.encode(&text[range.clone()], range.start == 0, ids)?,
                        Encoder::Spm(spm) => spm.encode(&text[range], i == 0, ids),
                    }
                    self.spell_control_tokens(ids, from);
                }
            }
        }
        Ok(())
    }

    /// Merging can produce a control token where the vocabulary has a merge for its text; the text between added
    /// tokens must not, so such a token is spelled in smaller ones. The unknown token is no such case.
    fn spell_control_tokens(&self, ids: &mut Vec<u32>, from: usize) {
        if !ids[from..].iter().any(|&id| self.table.kind(id) == TokenKind::Control) {
            return;
        }
        for id in ids.split_off(from) {
            if self.table.kind(id) == TokenKind::Control {
                self.spell(&String::from_utf8_lossy(self.table.bytes(id)), ids);
            } else {
                ids.push(id);
            }
        }
    }

    fn spell(&self, text: &str, ids: &mut Vec<u32>) {
        match &self.encoder {
            Encoder::Spm(spm) => spm.spell(text, ids),
            Encoder::Bpe(bpe) => {
                let id = |text: &str| bpe.model.token_to_id(text);
                for c in text.chars() {
                    if let Some(id) = id(c.encode_utf8(&mut [0; 4])).filter(|_| c.is_ascii_graphic()) {
                        ids.push(id);
                        continue;
                    }
                    for byte in c.encode_utf8(&mut [0; 4]).bytes() {
                        let fallback = id(&format!("<0x{byte:02X}>"));
                        ids.extend(fallback.or_else(|| id(byte_level::char_of(byte).encode_utf8(&mut [0; 4]))));
                    }
                }
            }
        }
    }

    /// The text of `ids`, control tokens as they are written. Bytes that are not UTF-8 become U+FFFD, one for each
    /// longest invalid stretch; ids without a token give nothing. The one space that encoding puts before a
    /// SentencePiece text is left out.
    pub fn decode(&self, ids: &[u32]) -> String {
        self.decode_stream(TokenStream::new(self), ids)
    }

    /// As [`Tokenizer::decode`], without control tokens.
    pub fn decode_skip_special(&self, ids: &[u32]) -> String {
        self.decode_stream(TokenStream::new(self).skip_special(true), ids)
    }

    fn decode_stream(&self, mut stream: TokenStream<&Tokenizer>, ids: &[u32]) -> String {
        let mut text: String = ids.iter().filter_map(|&id| stream.push(id)).collect();
        text.extend(stream.finish());
        text
    }

    /// The bytes that `id` adds to decoded text (for control tokens their written form); empty if there is no such
    /// token.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.table.bytes(id)
    }

    /// Whether `id` is a control token (or the unknown token): not shown to people.
    pub fn is_control(&self, id: u32) -> bool {
        self.table.kind(id).is_control()
    }

    /// Number of token ids, added tokens included: one more than the largest.
    pub fn vocab_size(&self) -> usize {
        self.table.len()
    }

    /// The id of the token whose text in the vocabulary is exactly `text`: `Ġthe`, `▁the`, `<0x0A>`, `<|im_end|>`.
    pub fn token_to_id(&self, text: &str) -> Option<u32> {
        let added = self.added.iter().find(|t| t.content == text).map(|t| t.id);
        added.or_else(|| match &self.encoder {
            Encoder::Bpe(bpe) => bpe.model.token_to_id(text),
            Encoder::Spm(spm) => spm.id(text).or_else(|| spm.byte(byte_token(text.as_bytes())?)),
        })
    }

    /// The token that marks the beginning of a text, if the files name one.
    pub fn bos_id(&self) -> Option<u32> {
        self.roles.bos
    }

    /// The token that marks the end of a text, if the files name one.
    pub fn eos_id(&self) -> Option<u32> {
        self.roles.eos
    }

    /// The token for what the vocabulary cannot spell.
    pub fn unk_id(&self) -> Option<u32> {
        self.roles.unk
    }

    /// The token that fills up batches.
    pub fn pad_id(&self) -> Option<u32> {
        self.roles.pad
    }

    /// The written form of a token, for a template's `bos_token` and `eos_token`.
    pub fn token_text(&self, id: u32) -> std::borrow::Cow<'_, str> {
        String::from_utf8_lossy(self.table.bytes(id))
    }

    /// Every token that ends a generation: those the files name (eos, eot, eom and further lists) and control tokens
    /// with one of the [`EOG_TEXTS`].
    pub fn eog_ids(&self) -> &BTreeSet<u32> {
        &self.roles.eog
    }

    /// Adds a token that ends a generation, as named by `key` in a file the tokenizer has not seen.
    ///
    /// # Errors
    /// [`TextError::TokenId`] if there is no such token.
    pub fn add_eog(&mut self, key: &str, id: u32) -> Result<()> {
        if id as usize >= self.vocab_size() {
            return Err(TextError::TokenId { key: key.to_string(), id: id.into(), vocab: self.vocab_size() });
        }
        self.roles.eog.insert(id);
        Ok(())
    }

    /// Whether [`AddBos::Auto`] begins a text with [`Tokenizer::bos_id`].
    pub fn adds_bos(&self) -> bool {
        self.roles.bos.is_some_and(|bos| self.roles.prefix.contains(&bos))
    }

    /// Whether [`AddBos::Auto`] ends a text with [`Tokenizer::eos_id`].
    pub fn adds_eos(&self) -> bool {
        self.roles.eos.is_some_and(|eos| self.roles.suffix.contains(&eos))
    }

    /// Texts of the control tokens: what [`Segment::untrusted`] text cannot produce.
    pub fn control_texts(&self) -> impl Iterator<Item = &str> {
        self.added.iter().filter(|t| t.control).map(|t| t.content.as_str())
    }
}

/// What a token of a GGUF vocabulary looks like in decoded text. Unused tokens show nothing, as in llama.cpp.
fn shown(token: &[u8], kind: TokenKind, model: &str) -> Vec<u8> {
    let text = std::str::from_utf8(token).ok();
    match (kind, text) {
        (TokenKind::Unused, _) => Vec::new(),
        (TokenKind::Control | TokenKind::Unknown | TokenKind::UserDefined, _) | (_, None) => token.to_vec(),
        (TokenKind::Byte, Some(_)) => byte_token(token).map_or_else(|| token.to_vec(), |byte| vec![byte]),
        (TokenKind::Normal, Some(text)) if model == "llama" => text.replace(SPACE, " ").into_bytes(),
        (TokenKind::Normal, Some(text)) => byte_level::decode(text).unwrap_or_else(|| token.to_vec()),
    }
}
