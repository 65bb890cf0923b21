//! A vocabulary as plain data, and the table of what each id stands for.

use crate::error::{Result, TextError};

pub(crate) const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";

/// A vocabulary as GGUF metadata gives it (`tokenizer.ggml.*`); field names follow the keys.
///
/// Texts borrow from the file. Absent keys stay `None` or empty; the defaults are those of llama.cpp and are applied
/// by [`crate::Tokenizer::from_vocab`].
#[derive(Debug, Clone, Default)]
pub struct VocabSpec<'a> {
    /// `tokenizer.ggml.model`: `gpt2` (byte-level BPE) or `llama` (SentencePiece with scores and byte fallback).
    pub model: &'a str,
    /// `tokenizer.ggml.pre`: how `gpt2` vocabularies split text before merging.
    pub pre: Option<&'a str>,
    /// `general.name`: only looked at for Phi-3, whose special tokens swallow the white space after them.
    pub name: Option<&'a str>,
    /// Token texts by id; not necessarily UTF-8.
    pub tokens: Vec<&'a [u8]>,
    /// 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte; one for each token.
    pub token_type: Option<Vec<i32>>,
    /// Merge priority of `llama` vocabularies, the highest first; one for each token.
    pub scores: Option<Vec<f32>>,
    /// Merges of `gpt2` vocabularies as `left right`, the most important first.
    pub merges: Vec<&'a [u8]>,
    /// `bos_token_id`
    pub bos: Option<u32>,
    /// `eos_token_id`
    pub eos: Option<u32>,
    /// `eot_token_id`
    pub eot: Option<u32>,
    /// `eom_token_id`
    pub eom: Option<u32>,
    /// `unknown_token_id`
    pub unk: Option<u32>,
    /// `seperator_token_id` (spelled so in the format)
    pub sep: Option<u32>,
    /// `padding_token_id`
    pub pad: Option<u32>,
    /// More ids that end a generation, with the full key that named each: `tokenizer.ggml.fim_pad_token_id` ..
    pub eog: Vec<(&'a str, u32)>,
    /// More ids that are only checked, with the full key that named each.
    pub other_ids: Vec<(&'a str, u32)>,
    /// `add_bos_token`
    pub add_bos: Option<bool>,
    /// `add_eos_token`
    pub add_eos: Option<bool>,
    /// `add_space_prefix`
    pub add_space_prefix: Option<bool>,
    /// `remove_extra_whitespaces`
    pub remove_extra_whitespaces: Option<bool>,
}

impl VocabSpec<'_> {
    /// Checks that the lists agree with each other and that every id is a token's.
    ///
    /// # Errors
    /// Names the key at fault, with what was expected and found. `tokenizer.ggml.model` itself and the merges are
    /// checked when the tokenizer is built.
    pub fn validate(&self) -> Result<()> {
        let vocab = self.tokens.len();
        if vocab == 0 {
            return Err(TextError::EmptyVocab(TOKENS));
        }
        check_length(TOKEN_TYPE, self.token_type.as_deref(), vocab)?;
        check_length(SCORES, self.scores.as_deref(), vocab)?;
        if let Some(index) = self.scores.iter().flatten().position(|s| s.is_nan()) {
            return Err(TextError::Score { index, found: f32::NAN });
        }
        for (key, id) in self.ids() {
            if id as usize >= vocab {
                return Err(TextError::TokenId { key: key.to_string(), id: id.into(), vocab });
            }
        }
        Ok(())
    }

    fn ids(&self) -> impl Iterator<Item = (&str, u32)> {
        let named = [
            ("tokenizer.ggml.bos_token_id", self.bos),
            ("tokenizer.ggml.eos_token_id", self.eos),
            ("tokenizer.ggml.eot_token_id", self.eot),
            ("tokenizer.ggml.eom_token_id", self.eom),
            ("tokenizer.ggml.unknown_token_id", self.unk),
            ("tokenizer.ggml.seperator_token_id", self.sep),
            ("tokenizer.ggml.padding_token_id", self.pad),
        ];
        let more = self.eog.iter().chain(&self.other_ids).map(|&(key, id)| (key, id));
        named.into_iter().filter_map(|(key, id)| Some((key, id?))).chain(more)
    }

    /// What kind of token `id` is; without a list of types, `<0xNN>` in a `llama` vocabulary is a byte.
    pub(crate) fn kind(&self, id: usize) -> TokenKind {
        match &self.token_type {
            Some(types) => TokenKind::from_gguf(types[id]),
            None if self.model == "llama" && byte_token(self.tokens[id]).is_some() => TokenKind::Byte,
            None if self.unk == Some(id as u32) => TokenKind::Unknown,
            None => TokenKind::Normal,
        }
    }
}

fn check_length<T>(key: &'static str, list: Option<&[T]>, expected: usize) -> Result<()> {
    match list {
        Some(list) if list.len() != expected => Err(TextError::Length { key, expected, found: list.len() }),
        _ => Ok(()),
    }
}

/// Token types of GGUF and SentencePiece (the numbers are the same).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum TokenKind {
    #[default]
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl TokenKind {
    /// Numbers outside 1..=6 count as unused, as in llama.cpp: such a token is neither matched nor shown.
    pub(crate) fn from_gguf(number: i32) -> TokenKind {
        match number {
            1 => TokenKind::Normal,
            2 => TokenKind::Unknown,
            3 => TokenKind::Control,
            4 => TokenKind::UserDefined,
            6 => TokenKind::Byte,
            _ => TokenKind::Unused,
        }
    }

    /// Found in text only where control tokens are looked for, and left out of text meant for people.
    pub(crate) fn is_control(self) -> bool {
        matches!(self, TokenKind::Control | TokenKind::Unknown)
    }
}

/// The byte that a token text of the form `<0x0A>` stands for.
pub(crate) fn byte_token(text: &[u8]) -> Option<u8> {
    let hex = text.strip_prefix(b"<0x")?.strip_suffix(b">")?;
    match hex {
        [high, low] => Some(((*high as char).to_digit(16)? * 16 + (*low as char).to_digit(16)?) as u8),
        _ => None,
    }
}

/// What each id contributes to decoded text, in one block of memory, and its kind.
#[derive(Debug, Default)]
pub(crate) struct TokenTable {
    bytes: Vec<u8>,
    entries: Vec<Entry>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Entry {
    start: usize,
    len: u32,
    kind: TokenKind,
}

impl TokenTable {
    /// Sets what `id` stands for; ids below it that have nothing yet stand for nothing.
    pub(crate) fn set(&mut self, id: u32, bytes: &[u8], kind: TokenKind) {
        let id = id as usize;
        if self.entries.len() <= id {
            self.entries.resize(id + 1, Entry { kind: TokenKind::Unused, ..Entry::default() });
        }
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        self.entries[id] = Entry { start: self.bytes.len(), len, kind };
        self.bytes.extend_from_slice(&bytes[..len as usize]);
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Empty for ids without a token: embeddings are often padded beyond the vocabulary.
    pub(crate) fn bytes(&self, id: u32) -> &[u8] {
        match self.entries.get(id as usize) {
            Some(entry) => &self.bytes[entry.start..entry.start + entry.len as usize],
            None => &[],
        }
    }

    pub(crate) fn kind(&self, id: u32) -> TokenKind {
        self.entries.get(id as usize).map_or(TokenKind::Unused, |entry| entry.kind)
    }
}

/// The byte-level alphabet of GPT-2: every byte as a printable character. Bytes that print in Latin-1 are
/// themselves, the others follow from U+0100 in order.
pub(crate) mod byte_level {
    use std::sync::LazyLock;

    fn prints(byte: u8) -> bool {
        matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
    }

    static CHARS: LazyLock<[char; 256]> = LazyLock::new(|| {
        let mut next = 0x100;
        std::array::from_fn(|b| {
            if prints(b as u8) {
                return b as u8 as char;
            }
            let c = char::from_u32(next).unwrap_or(char::REPLACEMENT_CHARACTER);
            next += 1;
            c
        })
    });

    /// Bytes of the characters below U+0144, the end of the alphabet.
    static BYTES: LazyLock<[Option<u8>; 0x144]> = LazyLock::new(|| {
        let mut table = [None; 0x144];
        for (b, &c) in CHARS.iter().enumerate() {
            if let Some(slot) = table.get_mut(c as usize) {
                *slot = Some(b as u8);
            }
        }
        table
    });

    pub(crate) fn char_of(byte: u8) -> char {
        CHARS[byte as usize]
    }

    /// The bytes that `text` spells, or None if a character is not in the alphabet.
    pub(crate) fn decode(text: &str) -> Option<Vec<u8>> {
        text.chars().map(|c| BYTES.get(c as usize).copied().flatten()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> VocabSpec<'static> {
        VocabSpec { model: "gpt2", tokens: vec![b"a", b"b", b"c"], ..VocabSpec::default() }
    }

    #[test]
    fn lists_must_have_one_entry_for_each_token() {
        assert_eq!(spec().validate(), Ok(()));
        let empty = VocabSpec { model: "gpt2", ..VocabSpec::default() };
        assert!(empty.validate().unwrap_err().to_string().contains("tokenizer.ggml.tokens"));
        let short = VocabSpec { token_type: Some(vec![1, 1]), ..spec() };
        let message = short.validate().unwrap_err().to_string();
        assert_eq!(message, "tokenizer.ggml.token_type has 2 entries, expected 3, one for each token");
        let long = VocabSpec { scores: Some(vec![0.0; 4]), ..spec() };
        assert!(long.validate().unwrap_err().to_string().contains("tokenizer.ggml.scores has 4"));
        let nan = VocabSpec { scores: Some(vec![0.0, f32::NAN, 0.0]), ..spec() };
        assert!(nan.validate().unwrap_err().to_string().contains("scores[1]"));
    }

    #[test]
    fn every_given_id_must_be_a_token() {
        let ids: [fn(u32) -> VocabSpec<'static>; 9] = [
            |id| VocabSpec { bos: Some(id), ..spec() },
            |id| VocabSpec { eos: Some(id), ..spec() },
            |id| VocabSpec { eot: Some(id), ..spec() },
            |id| VocabSpec { eom: Some(id), ..spec() },
            |id| VocabSpec { unk: Some(id), ..spec() },
            |id| VocabSpec { sep: Some(id), ..spec() },
            |id| VocabSpec { pad: Some(id), ..spec() },
            |id| VocabSpec { eog: vec![("some.key", id)], ..spec() },
            |id| VocabSpec { other_ids: vec![("some.key", id)], ..spec() },
        ];
        for make in ids {
            assert_eq!(make(2).validate(), Ok(()));
            for id in [3, u32::MAX] {
                let message = make(id).validate().unwrap_err().to_string();
                assert!(message.contains(&format!(" is {id}, out of range: the vocabulary has 3 tokens")), "{message}");
            }
        }
    }

    #[test]
    fn byte_tokens() {
        assert_eq!(byte_token(b"<0x0A>"), Some(10));
        assert_eq!(byte_token(b"<0xfF>"), Some(255));
        for no in [&b"<0x0>"[..], b"<0x0AB>", b"<0xGG>", b"0x0A", b"<0x0A", b""] {
            assert_eq!(byte_token(no), None);
        }
    }

    #[test]
    fn byte_level_alphabet_is_a_bijection() {
        let text: String = (0..=255).map(byte_level::char_of).collect();
        assert_eq!(byte_level::decode(&text), Some((0..=255).collect()));
        assert_eq!(byte_level::char_of(b' '), 'Ġ');
        assert_eq!(byte_level::char_of(b'\n'), 'Ċ');
        assert_eq!(byte_level::decode("a b"), None);
        assert_eq!(byte_level::decode("｜"), None);
    }

    #[test]
    fn table_has_nothing_for_padded_ids() {
        let mut table = TokenTable::default();
        table.set(0, b"ab", TokenKind::Normal);
        table.set(2, b"x", TokenKind::Normal);
        table.set(2, b"c", TokenKind::Control);
        assert_eq!((table.bytes(0), table.bytes(1), table.bytes(2)), (&b"ab"[..], &b""[..], &b"c"[..]));
        assert_eq!((table.bytes(3), table.bytes(u32::MAX)), (&b""[..], &b""[..]));
        assert_eq!(
            (table.kind(1), table.kind(2), table.kind(3)),
            (TokenKind::Unused, TokenKind::Control, TokenKind::Unused)
        );
    }
}
