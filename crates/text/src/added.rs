//! Tokens found in the text itself, before anything splits or merges it: control and user-defined tokens.
//!
//! Control tokens are looked for only in text that may hold them ([`Trust`]), so that a user who types `<|im_end|>`
//! gets those ten characters and not the end of a turn. User-defined tokens are found everywhere.

use std::ops::Range;

use aho_corasick::{AhoCorasick, Input, MatchKind};

use crate::error::{Result, TextError};

/// A token that is matched as text, with the flags of tokenizer.json.
#[derive(Debug, Clone, Default)]
pub(crate) struct AddedToken {
    pub(crate) id: u32,
    pub(crate) content: String,
    /// Matched in trusted text only.
    pub(crate) control: bool,
    /// Swallows white space on the left, on the right.
    pub(crate) lstrip: bool,
    pub(crate) rstrip: bool,
    /// Not matched inside a word.
    pub(crate) single_word: bool,
}

/// Where control tokens may be found.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Trust<'a> {
    Everywhere,
    Nowhere,
    /// Inside one of these byte ranges, which are in order and do not touch.
    Ranges(&'a [Range<usize>]),
}

impl Trust<'_> {
    fn covers(&self, at: Range<usize>) -> bool {
        match self {
            Trust::Everywhere => true,
            Trust::Nowhere => false,
            Trust::Ranges(ranges) => {
                let next = ranges.partition_point(|r| r.end < at.end);
                ranges.get(next).is_some_and(|r| r.start <= at.start && at.end <= r.end)
            }
        }
    }
}

/// A stretch of text, or a token found in it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Piece {
    Text(Range<usize>),
    Token(u32),
}

/// Finds added tokens: the leftmost, and of those the longest.
#[derive(Debug, Default)]
pub(crate) struct AddedTokens {
    tokens: Vec<AddedToken>,
    search: Option<AhoCorasick>,
}

impl AddedTokens {
    /// Tokens without text are left out: they cannot be found.
    pub(crate) fn new(mut tokens: Vec<AddedToken>) -> Result<AddedTokens> {
        tokens.retain(|t| !t.content.is_empty());
        if tokens.is_empty() {
            return Ok(AddedTokens::default());
        }
        let search = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(tokens.iter().map(|t| &t.content))
            .map_err(|e| TextError::Encode(e.to_string()))?;
        Ok(AddedTokens { tokens, search: Some(search) })
    }

    /// Whether one of them swallows white space.
    pub(crate) fn strips(&self) -> bool {
        self.tokens.iter().any(|token| token.lstrip || token.rstrip)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &AddedToken> {
        self.tokens.iter()
    }

    /// `text` as pieces in order. White space that a token swallows is in none of them.
    pub(crate) fn split(&self, text: &str, trust: Trust) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut done = 0; // everything before is in `pieces`
        let mut from = 0; // matches start here or later
        while let Some((token, at)) = self.find(text, from) {
            if (token.control && !trust.covers(at.clone())) || (token.single_word && !stands_alone(text, &at)) {
                // Another token may begin inside this one.
                from = at.start + text[at.start..].chars().next().map_or(1, char::len_utf8);
                continue;
            }
            let left = &text[done..at.start];
            let left = if token.lstrip { left.trim_end() } else { left };
            if !left.is_empty() {
                pieces.push(Piece::Text(done..done + left.len()));
            }
            pieces.push(Piece::Token(token.id));
            let right = &text[at.end..];
            done = if token.rstrip { text.len() - right.trim_start().len() } else { at.end };
            from = done;
        }
        if done < text.len() {
            pieces.push(Piece::Text(done..text.len()));
        }
        pieces
    }

    fn find(&self, text: &str, from: usize) -> Option<(&AddedToken, Range<usize>)> {
        let found = self.search.as_ref()?.find(Input::new(text).span(from..text.len()))?;
        Some((&self.tokens[found.pattern().as_usize()], found.range()))
    }
}

fn stands_alone(text: &str, at: &Range<usize>) -> bool {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    !text[..at.start].chars().next_back().is_some_and(word) && !text[at.end..].chars().next().is_some_and(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(list: &[(u32, &str, bool)]) -> AddedTokens {
        let token = |&(id, content, control): &(u32, &str, bool)| AddedToken {
            id,
            content: content.to_string(),
            control,
            ..AddedToken::default()
        };
        AddedTokens::new(list.iter().map(token).collect()).unwrap()
    }

    fn show(added: &AddedTokens, text: &str, trust: Trust) -> String {
        let show = |p: &Piece| match p {
            Piece::Text(r) => format!("'{}'", &text[r.clone()]),
            Piece::Token(id) => id.to_string(),
        };
        added.split(text, trust).iter().map(show).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn leftmost_longest() {
        let added = tokens(&[(1, "<a>", true), (2, "<a>b", true), (3, "b<c>", true)]);
        assert_eq!(show(&added, "x<a>b<c>", Trust::Everywhere), "'x' 2 '<c>'");
        assert_eq!(show(&added, "", Trust::Everywhere), "");
        assert_eq!(show(&added, "<a><a>", Trust::Everywhere), "1 1");
    }

    #[test]
    fn control_tokens_need_trust_and_user_defined_ones_do_not() {
        let added = tokens(&[(1, "<|end|>", true), (2, "|end", false)]);
        assert_eq!(show(&added, "a<|end|>b", Trust::Everywhere), "'a' 1 'b'");
        assert_eq!(show(&added, "a<|end|>b", Trust::Nowhere), "'a<' 2 '|>b'");
        let text = "<|end|><|end|>";
        assert_eq!(show(&added, text, Trust::Ranges(std::slice::from_ref(&(0..7)))), "1 '<' 2 '|>'");
        // A match that is only partly inside a trusted range does not count.
        assert_eq!(show(&added, text, Trust::Ranges(&[0..6, 7..14])), "'<' 2 '|>' 1");
        assert_eq!(show(&added, text, Trust::Ranges(&[])), "'<' 2 '|><' 2 '|>'");
    }

    #[test]
    fn strip_and_single_word() {
        let token = AddedToken { id: 1, content: "<m>".into(), lstrip: true, rstrip: true, ..AddedToken::default() };
        let added = AddedTokens::new(vec![token]).unwrap();
        assert_eq!(show(&added, "a \u{a0}<m> \n b", Trust::Nowhere), "'a' 1 'b'");
        assert_eq!(show(&added, " <m> <m> ", Trust::Nowhere), "1 1");
        let word = AddedToken { id: 1, content: "py".into(), single_word: true, ..AddedToken::default() };
        let added = AddedTokens::new(vec![word]).unwrap();
        assert_eq!(show(&added, "py pypy (py)", Trust::Nowhere), "1 ' pypy (' 1 ')'");
    }
}
