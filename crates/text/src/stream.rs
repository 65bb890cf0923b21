use std::ops::Deref;

use crate::tokenizer::Tokenizer;

/// Turns ids into text as they come, never splitting a character: bytes of a character that is not complete are held
/// back, at most three. The pieces joined are what [`Tokenizer::decode`] gives for all ids.
///
/// `T` is `&Tokenizer` or `Arc<Tokenizer>`.
#[derive(Debug, Clone)]
pub struct TokenStream<T: Deref<Target = Tokenizer>> {
    tokenizer: T,
    skip_special: bool,
    shown: Vec<u32>,
    strip_spaces: usize,
    held: Vec<u8>,
}

impl<T: Deref<Target = Tokenizer>> TokenStream<T> {
    /// A stream of a whole text: the space that encoding puts before a SentencePiece text is dropped.
    pub fn new(tokenizer: T) -> TokenStream<T> {
        let strip_spaces = tokenizer.strip_spaces;
        TokenStream { tokenizer, skip_special: false, shown: Vec::new(), strip_spaces, held: Vec::new() }
    }

    /// A stream of ids that continue a text: a space at its start belongs to it.
    pub fn continuing(tokenizer: T) -> TokenStream<T> {
        TokenStream { strip_spaces: 0, ..TokenStream::new(tokenizer) }
    }

    /// Whether control tokens give no text. They do unless told otherwise.
    pub fn skip_special(mut self, skip: bool) -> TokenStream<T> {
        self.skip_special = skip;
        self
    }

    /// Control tokens that give their text all the same, by what is written in the vocabulary; others are ignored.
    pub fn show<S: AsRef<str>>(mut self, texts: &[S]) -> TokenStream<T> {
        self.shown = texts.iter().filter_map(|text| self.tokenizer.token_to_id(text.as_ref())).collect();
        self
    }

    /// The text that `id` completes, if any.
    pub fn push(&mut self, id: u32) -> Option<String> {
        if self.skip_special && self.tokenizer.is_control(id) && !self.shown.contains(&id) {
            return None;
        }
        let mut bytes = self.tokenizer.token_bytes(id);
        while let (1.., Some((b' ', rest))) = (self.strip_spaces, bytes.split_first()) {
            bytes = rest;
            self.strip_spaces -= 1;
        }
        if bytes.is_empty() {
            return None;
        }
        self.strip_spaces = 0;
        self.held.extend_from_slice(bytes);
        let text = take_text(&mut self.held);
        (!text.is_empty()).then_some(text)
    }

    /// Ends the stream: a character still incomplete becomes one U+FFFD.
    pub fn finish(&mut self) -> Option<String> {
        let incomplete = !std::mem::take(&mut self.held).is_empty();
        incomplete.then(|| char::REPLACEMENT_CHARACTER.to_string())
    }
}

/// Takes all but an incomplete character at the end; invalid bytes become U+FFFD as in [`String::from_utf8_lossy`].
fn take_text(bytes: &mut Vec<u8>) -> String {
    let mut text = String::with_capacity(bytes.len());
    let mut rest = bytes.as_slice();
    loop {
        match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                bytes.clear();
                return text;
            }
            Err(error) => {
                let (valid, tail) = rest.split_at(error.valid_up_to());
                text.push_str(&String::from_utf8_lossy(valid));
                let Some(invalid) = error.error_len() else {
                    let tail = tail.len();
                    bytes.drain(..bytes.len() - tail);
                    return text;
                };
                text.push(char::REPLACEMENT_CHARACTER);
                rest = &tail[invalid..];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn chunks_join_to_the_lossy_text(chunks in proptest::collection::vec(
            proptest::collection::vec(prop_oneof![Just(0xE2u8), Just(0x82), Just(0xAC), Just(0xF0), Just(0x9F), Just(0x41),
                Just(0x80), Just(0xFF), any::<u8>()], 0..6), 0..12))
        {
            let (mut held, mut text) = (Vec::new(), String::new());
            for chunk in &chunks {
                held.extend_from_slice(chunk);
                text.push_str(&take_text(&mut held));
                prop_assert!(held.len() <= 3);
            }
            if !held.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
            prop_assert_eq!(text, String::from_utf8_lossy(&chunks.concat()).into_owned());
        }
    }
}
