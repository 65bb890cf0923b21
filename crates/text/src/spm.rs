//! SentencePiece BPE over a vocabulary with scores, as llama.cpp and SentencePiece do it: of all adjacent pairs whose
//! text is a token, the one with the best score is merged, the leftmost on ties, until none is left. What is no token
//! then is spelled in byte tokens, or is the unknown token in a vocabulary without them.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::ops::Range;

use ahash::AHashMap;

use crate::error::{Result, TextError};
use crate::vocab::{TokenKind, VocabSpec, byte_token};

/// SentencePiece's visible space, U+2581.
pub(crate) const SPACE: char = '▁';

/// Text that holds no control token to ids.
#[derive(Debug)]
pub(crate) struct Spm {
    /// Token texts that merging may produce. Control and byte tokens are not among them.
    ids: AHashMap<Box<str>, u32>,
    scores: Vec<f32>,
    bytes: [Option<u32>; 256],
    unk: Option<u32>,
    longest: usize,
    /// No token holds a space after something else, so words can be merged one by one.
    by_word: bool,
    /// A space is put before the text, and before text that follows a control or user-defined token.
    space_prefix: bool,
    /// Whether that goes for text after a token too.
    pub(crate) prefix_after_token: bool,
    /// Runs of spaces count as one, and those at both ends are dropped.
    collapse_spaces: bool,
}

impl Spm {
    /// A `llama` vocabulary.
    pub(crate) fn from_vocab(spec: &VocabSpec) -> Result<Spm> {
        let need = "a `llama` vocabulary merges by score";
        let scores = spec.scores.clone().ok_or(TextError::Missing { key: "tokenizer.ggml.scores", need })?;
        let mut spm = Spm {
            ids: AHashMap::with_capacity(spec.tokens.len()),
            scores,
            bytes: [None; 256],
            unk: spec.unk,
            longest: 0,
            by_word: true,
            space_prefix: spec.add_space_prefix.unwrap_or(true),
            prefix_after_token: true,
            collapse_spaces: spec.remove_extra_whitespaces.unwrap_or(false),
        };
        for (id, token) in spec.tokens.iter().enumerate() {
            match spec.kind(id) {
                TokenKind::Byte => {
                    if let Some(byte) = byte_token(token) {
                        spm.bytes[byte as usize].get_or_insert(id as u32);
                    }
                }
                TokenKind::Unknown => spm.unk = spm.unk.or(Some(id as u32)),
                TokenKind::Control => {}
                TokenKind::Normal | TokenKind::UserDefined | TokenKind::Unused => spm.add(token, id as u32),
            }
        }
        Ok(spm)
    }

    /// A text that is not UTF-8 can be decoded but not encoded. Of two equal texts the first is used.
    fn add(&mut self, token: &[u8], id: u32) {
        let Ok(text) = std::str::from_utf8(token) else { return };
        if text.is_empty() {
            return;
        }
        self.ids.entry(text.into()).or_insert(id);
        self.longest = self.longest.max(text.len());
        let word = text.trim_start_matches(SPACE);
        self.by_word &= !word.contains(SPACE);
    }

    pub(crate) fn id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    /// Texts that merging may produce.
    pub(crate) fn texts(&self) -> impl Iterator<Item = &str> {
        self.ids.keys().map(|text| &**text)
    }

    /// Whether spaces may be dropped.
    pub(crate) fn collapses_spaces(&self) -> bool {
        self.collapse_spaces
    }

    /// The token of a single byte.
    pub(crate) fn byte(&self, byte: u8) -> Option<u32> {
        self.bytes[byte as usize]
    }

    pub(crate) fn has_space_prefix(&self) -> bool {
        self.space_prefix
    }

    /// Appends the ids of `text`. `first`: nothing comes before it; else it follows a token found in the text.
    pub(crate) fn encode(&self, text: &str, first: bool, out: &mut Vec<u32>) {
        let mut spaced = String::with_capacity(text.len() + 8);
        if self.space_prefix && (first || self.prefix_after_token) {
            spaced.push(SPACE);
        }
        let text = if self.collapse_spaces { collapse(text) } else { Cow::Borrowed(text) };
        spaced.extend(text.chars().map(|c| if c == ' ' { SPACE } else { c }));
        let mut merger = Merger { spm: self, symbols: Vec::new(), queue: BinaryHeap::new() };
        for word in self.words(&spaced) {
            merger.encode(word, out);
        }
    }

    /// `text` cut where no merge can reach across: before a space that follows something else.
    fn words<'t>(&self, text: &'t str) -> impl Iterator<Item = &'t str> {
        let by_word = self.by_word;
        let mut rest = text;
        std::iter::from_fn(move || {
            if rest.is_empty() {
                return None;
            }
            let spaces = rest.len() - rest.trim_start_matches(SPACE).len();
            let end = if by_word { rest[spaces..].find(SPACE) } else { None };
            let (word, tail) = rest.split_at(end.map_or(rest.len(), |end| spaces + end));
            rest = tail;
            Some(word)
        })
    }

    /// The ids that spell `text` byte by byte; the unknown token where a byte has none.
    pub(crate) fn spell(&self, text: &str, out: &mut Vec<u32>) {
        let bytes: Option<Vec<u32>> = text.bytes().map(|b| self.bytes[b as usize]).collect();
        match (bytes, self.unk) {
            (Some(bytes), _) => out.extend(bytes),
            // A run of unknown characters is one unknown token.
            (None, Some(unk)) if out.last() != Some(&unk) => out.push(unk),
            (None, _) => {}
        }
    }
}

fn collapse(text: &str) -> Cow<'_, str> {
    Cow::Owned(text.split(' ').filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" "))
}

/// A piece of the text that is a token or a single character; merged away when empty.
struct Symbol {
    start: usize,
    len: usize,
    prev: Option<usize>,
    next: Option<usize>,
}

/// Two neighbours whose joined text is a token.
struct Pair {
    score: f32,
    left: usize,
    right: usize,
    len: usize,
}

impl Ord for Pair {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then_with(|| other.left.cmp(&self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Pair {}

/// The working memory of merging: a linked list of symbols and a queue of pairs, O(n log n) for n characters.
struct Merger<'s> {
    spm: &'s Spm,
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Pair>,
}

impl Merger<'_> {
    fn encode(&mut self, word: &str, out: &mut Vec<u32>) {
        self.symbols.clear();
        for (start, c) in word.char_indices() {
            let at = self.symbols.len();
            self.symbols.push(Symbol { start, len: c.len_utf8(), prev: at.checked_sub(1), next: Some(at + 1) });
        }
        if let Some(last) = self.symbols.last_mut() {
            last.next = None;
        }
        for right in 1..self.symbols.len() {
            self.consider(word, right - 1, right);
        }
        while let Some(pair) = self.queue.pop() {
            self.merge(word, &pair);
        }
        let mut at = (!self.symbols.is_empty()).then_some(0);
        while let Some(i) = at {
            let text = &word[self.range(i)];
            match self.spm.id(text) {
                Some(id) => out.push(id),
                None => self.spm.spell(text, out),
            }
            at = self.symbols[i].next;
        }
    }

    fn range(&self, i: usize) -> Range<usize> {
        self.symbols[i].start..self.symbols[i].start + self.symbols[i].len
    }

    /// Queues the pair if its text is a token.
    fn consider(&mut self, word: &str, left: usize, right: usize) {
        let range = self.range(left).start..self.range(right).end;
        let len = range.len();
        if len > self.spm.longest {
            return;
        }
        if let Some(id) = self.spm.id(&word[range]) {
            self.queue.push(Pair { score: self.spm.scores[id as usize], left, right, len });
        }
    }

    fn merge(&mut self, word: &str, pair: &Pair) {
        let (left, right) = (&self.symbols[pair.left], &self.symbols[pair.right]);
        if left.len == 0 || right.len == 0 || left.len + right.len != pair.len {
            return; // one of the two has been merged with another neighbour since
        }
        let next = right.next;
        self.symbols[pair.right].len = 0;
        self.symbols[pair.left].len = pair.len;
        self.symbols[pair.left].next = next;
        if let Some(next) = next {
            self.symbols[next].prev = Some(pair.left);
            self.consider(word, pair.left, next);
        }
        if let Some(prev) = self.symbols[pair.left].prev {
            self.consider(word, prev, pair.left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn spec(tokens: &[(&'static str, f32, i32)]) -> VocabSpec<'static> {
        VocabSpec {
            model: "llama",
            tokens: tokens.iter().map(|t| t.0.as_bytes()).collect(),
            scores: Some(tokens.iter().map(|t| t.1).collect()),
            token_type: Some(tokens.iter().map(|t| t.2).collect()),
            ..VocabSpec::default()
        }
    }

    fn letters() -> VocabSpec<'static> {
        spec(&[
            ("<unk>", 0.0, 2),
            ("<s>", 0.0, 3),
            ("▁", -9.0, 1),
            ("a", -9.0, 1),
            ("b", -9.0, 1),
            ("c", -9.0, 1),
            ("ab", -1.0, 1),
            ("bc", -1.0, 1),
            ("abc", -3.0, 1),
            ("▁a", -2.0, 1),
            ("▁▁", -2.0, 1),
            ("aa", -1.0, 1),
            ("aaaa", -4.0, 1),
        ])
    }

    fn encode(spm: &Spm, text: &str) -> Vec<u32> {
        let mut out = Vec::new();
        spm.encode(text, true, &mut out);
        out
    }

    #[test]
    fn best_score_first_and_leftmost_on_ties() {
        let spm = Spm::from_vocab(&letters()).unwrap();
        // `ab` and `bc` score the same: the left one wins, then `abc`.
        assert_eq!(encode(&spm, "abc"), [2, 8]);
        assert_eq!(encode(&spm, "aab"), [2, 11, 4]);
        assert_eq!(encode(&spm, "aaaaa"), [2, 12, 3]);
        assert_eq!(encode(&spm, " a"), [10, 3]);
        assert_eq!(encode(&spm, "a a"), [9, 9]);
    }

    #[test]
    fn unknown_characters_are_one_unknown_token_or_bytes() {
        let spm = Spm::from_vocab(&letters()).unwrap();
        assert_eq!(encode(&spm, "xyza"), [2, 0, 3]);
        let mut bytes = letters();
        let names: Vec<String> = (0..256).map(|b| format!("<0x{b:02X}>")).collect();
        bytes.tokens.extend(names.iter().map(|n| n.as_bytes()));
        bytes.scores.as_mut().unwrap().extend([0.0; 256]);
        bytes.token_type.as_mut().unwrap().extend([6; 256]);
        let spm = Spm::from_vocab(&bytes).unwrap();
        assert_eq!(encode(&spm, "é"), [2, 13 + 0xC3, 13 + 0xA9]);
        // The text of a byte token is not that byte.
        assert!(!encode(&spm, "<0x41>").contains(&(13 + 0x41)));
    }

    #[test]
    fn control_tokens_do_not_come_from_merging() {
        let mut with_parts = letters();
        with_parts.tokens.extend([&b"<"[..], b"s", b">", b"<s"]);
        with_parts.scores.as_mut().unwrap().extend([0.0; 4]);
        with_parts.token_type.as_mut().unwrap().extend([1; 4]);
        let spm = Spm::from_vocab(&with_parts).unwrap();
        assert_eq!(encode(&spm, "<s>"), [2, 16, 15]);
    }

    #[test]
    fn scores_are_needed() {
        let without = VocabSpec { scores: None, ..letters() };
        assert!(Spm::from_vocab(&without).unwrap_err().to_string().contains("tokenizer.ggml.scores"));
    }

    #[test]
    fn spaces_can_be_collapsed_and_the_prefix_left_out() {
        let spm = Spm::from_vocab(&VocabSpec { remove_extra_whitespaces: Some(true), ..letters() }).unwrap();
        assert_eq!(encode(&spm, "  a   a "), encode(&spm, "a a"));
        let spm = Spm::from_vocab(&VocabSpec { add_space_prefix: Some(false), ..letters() }).unwrap();
        assert_eq!(encode(&spm, "a a"), [3, 9]);
    }

    /// Merging by definition: look at every pair, merge the best, again.
    fn naive(spm: &Spm, text: &str) -> Vec<u32> {
        let text = format!("▁{}", text.replace(' ', "▁"));
        let mut parts: Vec<String> = text.chars().map(String::from).collect();
        loop {
            let joined = |i: usize| format!("{}{}", parts[i], parts[i + 1]);
            let pairs = (0..parts.len().saturating_sub(1)).filter_map(|i| Some((i, spm.id(&joined(i))?)));
            let best = pairs.rev().max_by(|a, b| spm.scores[a.1 as usize].total_cmp(&spm.scores[b.1 as usize]));
            let Some((i, _)) = best else { break };
            parts[i] = joined(i);
            parts.remove(i + 1);
        }
        let mut out = Vec::new();
        for part in parts {
            match spm.id(&part) {
                Some(id) => out.push(id),
                None => spm.spell(&part, &mut out),
            }
        }
        out
    }

    proptest! {
        #[test]
        fn equals_the_definition(text in "[abcx ]{0,24}") {
            let spm = Spm::from_vocab(&letters()).unwrap();
            prop_assert_eq!(encode(&spm, &text), naive(&spm, &text));
        }

        #[test]
        fn words_do_not_change_the_result(text in "[abc ]{0,40}") {
            let mut spm = Spm::from_vocab(&letters()).unwrap();
            prop_assert!(spm.by_word);
            let by_word = encode(&spm, &text);
            spm.by_word = false;
            prop_assert_eq!(by_word, encode(&spm, &text));
        }
    }
}
