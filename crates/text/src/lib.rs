//! Text in and out of token ids, and chat templates.
//!
//! - [`Tokenizer`]: from the vocabulary inside a GGUF file ([`VocabSpec`]) or from the files of a Hugging Face folder
//!   ([`HfFiles`]), with the exact ids of llama.cpp and `transformers`;
//! - [`TokenStream`]: ids to text as they are generated, never splitting a character;
//! - [`StopMatcher`]: stop strings in streamed text, wherever tokens cut it;
//! - [`ChatTemplate`]: a conversation to a prompt, and which parts of it the conversation cannot forge;
//! - [`reply`]: an answer taken apart into reasoning, text and tool calls, as it comes.
//!
//! Nothing here knows models or file containers. All input is taken to be hostile: files are checked before they are
//! used, and templates run within bounds of work, memory and depth. There is no panic on any input.
//!
//! # Libraries
//!
//! Byte-pair merging, normalizing and splitting are the `tokenizers` crate's, for GGUF and tokenizer.json alike;
//! SentencePiece merging by score is our own ([`Tokenizer`] says why), and so is everything that depends on trust
//! or on streaming. Templates run in `minijinja`, behind checks of our own where it has none.
//!
//! ```
//! use puna_text::{ChatInput, ChatTemplate};
//!
//! let template = ChatTemplate::new("{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{% endfor %}")?;
//! let messages = serde_json::json!([{"role": "user", "content": " Hello "}]);
//! let prompt = template.render(&ChatInput { messages: Some(&messages), ..ChatInput::default() })?;
//! assert_eq!(prompt, "<|user|>Hello");
//! # Ok::<(), puna_text::TextError>(())
//! ```
#![forbid(unsafe_code)]

mod added;
mod bpe;
mod config;
mod cover;
mod error;
mod export;
mod hf;
mod pretokenize;
pub mod reply;
mod sentencepiece;
mod spm;
mod stop;
mod stream;
mod template;
mod tokenizer;
mod tokenizer_json;
mod vocab;

pub use error::TextError;
pub use export::{ExportOptions, Vocab};
pub use hf::HfFiles;
pub use reply::{CallBegin, CallDelta, Delta, ReplyFormat, ReplyOptions, ReplyParser};
pub use stop::{StopMatcher, StopStep};
pub use stream::TokenStream;
pub use template::{ChatInput, ChatTemplate};
pub use tokenizer::{AddBos, EOG_TEXTS, EncodeOptions, Segment, Tokenizer};
pub use vocab::VocabSpec;
