//! Text in and out of token ids, and chat templates.
#![forbid(unsafe_code)]

mod added;
mod bpe;
mod config;
mod error;
mod hf;
mod pretokenize;
mod sentencepiece;
mod spm;
mod stop;
mod stream;
mod template;
mod tokenizer;
mod tokenizer_json;
mod vocab;

pub use error::{Result, TextError};
pub use hf::HfFiles;
pub use stop::{StopMatcher, StopStep};
pub use stream::TokenStream;
pub use template::{ChatInput, ChatTemplate};
pub use tokenizer::{AddBos, EOG_TEXTS, EncodeOptions, Segment, Tokenizer};
pub use vocab::VocabSpec;
