//! How few tokens a text can have, told without tokenizing it.
//!
//! A token stands for bytes of the text, and for no more of each value than its own text has. So a text with a million
//! letters `e` has at least a million tokens divided by the most `e` that any token has. This holds where every byte of
//! a text ends up in some token: where a vocabulary has them all, and nothing is dropped before it comes to them.

use std::collections::BTreeSet;

use serde::Serialize;
use serde_json::{Value, json};

use crate::bpe::Bpe;
use crate::spm::{SPACE, Spm};
use crate::tokenizer::{Encoder, Tokenizer};
use crate::tokenizer_json::types;
use crate::vocab::byte_level;

/// What one token stands for at most.
#[derive(Debug, Clone)]
pub(crate) struct Cover {
    /// Bytes of each value; `None` where white space is dropped and the value may be part of it.
    most: [Option<u64>; 256],
    /// Bytes in all.
    longest: Option<u64>,
    /// Characters change before they are tokenized, but for ASCII before ASCII.
    ascii: bool,
}

impl Cover {
    /// What the tokens of a vocabulary cover; `None` where a text may have bytes that no token stands for.
    pub(crate) fn new(tokenizer: &Tokenizer) -> Option<Cover> {
        let mut cover = Cover { most: [Some(1); 256], longest: Some(1), ascii: false };
        let mut drops_spaces = tokenizer.added.strips();
        tokenizer.added.iter().for_each(|token| cover.add(token.content.as_bytes()));
        match &tokenizer.encoder {
            Encoder::Spm(spm) => {
                cover.spm(spm)?;
                drops_spaces |= spm.collapses_spaces();
            }
            Encoder::Bpe(bpe) => {
                cover.bpe(bpe)?;
                drops_spaces |= bpe.normalized.strips();
            }
        }
        if drops_spaces {
            cover.longest = None;
            let spaces = (0..=u32::from(char::MAX)).filter_map(char::from_u32).filter(|c| c.is_whitespace());
            let bytes: BTreeSet<u8> = spaces.flat_map(|c| c.encode_utf8(&mut [0; 4]).as_bytes().to_vec()).collect();
            bytes.into_iter().for_each(|byte| cover.most[usize::from(byte)] = None);
        }
        Some(cover)
    }

    fn spm(&mut self, spm: &Spm) -> Option<()> {
        spm.texts().for_each(|text| self.add(text.as_bytes()));
        (0..=255).all(|byte| spm.byte(byte).is_some()).then_some(())
    }

    fn bpe(&mut self, bpe: &Bpe) -> Option<()> {
        let (normalizer, first) = (component(&bpe.normalizer)?, component(&bpe.first)?);
        let is_known = |kind: &&str| ["Sequence", "Split", "ByteLevel", "Digits", "Metaspace"].contains(kind);
        let kinds = types(&first);
        // Splits may leave out what they split at.
        if !kinds.iter().all(is_known) || first.to_string().contains("\"Removed\"") {
            return None;
        }
        self.ascii = changes_characters(&normalizer)?;
        bpe.normalized.iter().for_each(|token| self.add(token.content.as_bytes()));
        let vocab = bpe.model.get_vocab();
        if kinds.contains(&"ByteLevel") {
            vocab.keys().for_each(|text| self.add(&byte_level::decode(text).unwrap_or_default()));
            let has = |byte| vocab.contains_key(byte_level::char_of(byte).encode_utf8(&mut [0; 4]) as &str);
            return (0..=255).all(has).then_some(());
        }
        vocab.keys().for_each(|text| self.add(text.as_bytes()));
        let has = |byte: u8| vocab.contains_key(&format!("<0x{byte:02X}>"));
        (bpe.model.byte_fallback && (0..=255).all(has)).then_some(())
    }

    /// Takes note of a token. A visible space stands for itself or for a space.
    fn add(&mut self, token: &[u8]) {
        let mut counts = [0; 256];
        token.iter().for_each(|&byte| counts[usize::from(byte)] += 1);
        let visible = SPACE.encode_utf8(&mut [0; 4]).as_bytes().to_vec();
        counts[usize::from(b' ')] += token.windows(visible.len()).filter(|window| *window == visible).count() as u64;
        for (most, count) in self.most.iter_mut().zip(counts) {
            *most = (*most).max(Some(count));
        }
        self.longest = self.longest.max(Some(token.len() as u64));
    }

    /// A number of tokens that a text has at least, in parts as it may be.
    pub(crate) fn least<'t>(&self, parts: impl IntoIterator<Item = &'t str>) -> usize {
        let mut counts = [0u64; 256];
        for part in parts {
            let bytes = part.as_bytes();
            let stays = |at: usize| !self.ascii || bytes[at..].get(..2).is_some_and(<[u8]>::is_ascii);
            let stay = bytes.iter().enumerate().filter(|(at, _)| stays(*at));
            stay.for_each(|(_, &byte)| counts[usize::from(byte)] += 1);
        }
        let all = self.longest.map_or(0, |longest| counts.iter().sum::<u64>().div_ceil(longest));
        let each = counts.iter().zip(&self.most).map(|(count, most)| most.map_or(0, |most| count.div_ceil(most)));
        usize::try_from(each.fold(all, u64::max)).unwrap_or(usize::MAX)
    }
}

/// A part of a tokenizer as tokenizer.json has it; null where there is none.
fn component(part: &Option<impl Serialize>) -> Option<Value> {
    serde_json::to_value(part).ok()
}

/// Whether a normalizer changes characters that are not ASCII, or one that comes before such; `None` where it may do
/// more.
fn changes_characters(normalizer: &Value) -> Option<bool> {
    let spaces = json!({ "type": "Replace", "pattern": { "String": " " }, "content": SPACE });
    match normalizer["type"].as_str() {
        None if normalizer.is_null() => Some(false),
        Some("Sequence") => normalizer["normalizers"]
            .as_array()?
            .iter()
            .try_fold(false, |changes, inner| Some(changes | changes_characters(inner)?)),
        Some("Prepend") => Some(false),
        Some("Replace") if *normalizer == spaces => Some(false),
        Some("NFC" | "NFD" | "NFKC" | "NFKD") => Some(true),
        _ => None,
    }
}
