//! What is written, read again, beside what was meant.

use super::{NORMAL, Vocab};
use crate::error::{Result, TextError, one_line};
use crate::tokenizer::{EncodeOptions, Tokenizer};

pub(super) struct Comparison<'a> {
    pub(super) vocab: &'a Vocab,
    /// The folder's.
    pub(super) meant: &'a Tokenizer,
    /// What a reader makes of the vocabulary.
    pub(super) read: Tokenizer,
}

impl Comparison<'_> {
    fn both(&self, text: &str) -> Result<[Vec<u32>; 2]> {
        let options = EncodeOptions::default();
        Ok([self.meant.encode(text, options)?, self.read.encode(text, options)?])
    }

    fn differs(&self, text: &str) -> Result<bool> {
        let [meant, got] = self.both(text)?;
        Ok(meant != got)
    }

    /// Ordinary texts, which must give the same ids; but who `named` the pre-tokenizer is only told.
    pub(super) fn texts(&self, named: bool, notices: &mut Vec<String>) -> Result<()> {
        for text in TEXTS {
            let [meant, got] = self.both(text)?;
            if meant == got {
                continue;
            }
            let what = one_line(format!("read from there, {text:?} would be {got:?}, and is {meant:?}"));
            if !named {
                return Err(TextError::Unsaid(what));
            }
            notices.push(format!("with the pre-tokenizer {}, {what}", self.vocab.pre));
            return Ok(());
        }
        if self.differs(DECOMPOSED)? {
            notices.push("text whose accents are characters of their own becomes other ids than in the folder".into());
        }
        Ok(())
    }

    /// What each token does, as far as it differs.
    pub(super) fn tokens(&self, notices: &mut Vec<String>) -> Result<()> {
        for token in self.meant.added.iter() {
            let token = &token.content;
            if self.differs(&format!("a{token} b {token}\n{token}{token}c"))? {
                notices.push(format!("text around tokens like {token:?} becomes other ids than in the folder"));
                break;
            }
        }
        let (mut others, mut first) = (0, "");
        for (id, _) in (0..).zip(&self.vocab.token_type).filter(|(_, kind)| **kind == NORMAL) {
            let text = std::str::from_utf8(self.meant.token_bytes(id)).unwrap_or_default();
            if self.differs(text)? {
                first = if others == 0 { text } else { first };
                others += 1;
            }
        }
        if others > 0 {
            notices.push(format!("the texts of {others} tokens, like {first:?}, become other ids than in the folder"));
        }
        let shows = |id: &u32| self.meant.token_bytes(*id) == self.read.token_bytes(*id);
        if let Some(id) = (0..self.meant.vocab_size() as u32).find(|id| !shows(id)) {
            let [meant, got] = [self.meant, &self.read].map(|t| t.token_text(id).into_owned());
            notices.push(format!("token {id} shows as {got:?}, in the folder as {meant:?}"));
        }
        let (meant, got) = (self.meant.eog_ids(), self.read.eog_ids());
        if meant != got {
            notices.push(format!("answers end with one of the tokens {got:?}, in the folder of {meant:?}"));
        }
        Ok(())
    }
}

/// An accent as a character of its own, which some tokenizers put together with its letter first. GGUF has no such
/// step, and whoever writes such text is rare.
const DECOMPOSED: &str = "cafe\u{301} n\u{303}";

/// Texts in which tokenizers differ: numbers, contractions, runs of white space and of line ends, scripts, signs,
/// capitals within words, code.
const TEXTS: &[&str] = &[
    "",
    " ",
    "Hello world",
    " Hello  world ",
    "I'm, you'RE; they'll've it's 'quoted' I'LL",
    "0 1 12 123 1234 12345 123456 1,234.56 3½ ٣٤٥ 一二三 ²",
    "x=1;y=22;z333+4444",
    "a\nb\n\nc\n\n\nd \n e\r\nf\r\n\r\ng\t\th\t \ti   \n   j",
    "    indented\n        more {\n\t}\n",
    "for (int i = 0; i < 10; ++i) { a[i] += b->c(\"%d\\n\", !x && ~y | z); } // done",
    "HelloWorld helloWorld ABCdef XMLHttpRequest éCOLE Ünder_score __init__ snake_case kebab-case",
    "https://example.org/a?b=c&d=%20e#f user@example.org",
    "¿Qué? ¡Olé! «guillemets» “quotes” … — – ‘x’ €5 £6 №7 §8",
    "Ελληνικά русский עברית العربية हिन्दी ไทย 日本語 中文字符 한국어 አማርኛ",
    "naïve Zażółć İstanbul ǆ ﬁ",
    "🙂 👩‍👩‍👧‍👦 🇵🇪 ✊🏽 a🙂b \u{200b}x\u{200d}y\u{feff}z \u{a0}n\u{a0}\u{3000}w\u{2028}l",
    "!!! ??? ... ,,, --- ___ *** ### $$$ @@@ ((( ))) <<>> [x] {y} `z` ~ ^ | \\ /",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa                    bbbb\n\n\n\n\n\n\n\n",
    "the of and to in is that for it as was with be by on not he his are at from this have",
    "unfathomably antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "/path/to/file.rs:12:34: error[E0308]: mismatched types\n  --> expected `u32`, found `&str`",
    "<b>bold</b> <!-- no --> &amp; <x|y> <|z <w|>",
];
