//! OpenAI's interface: what requests may say, and what answers look like.
//!
//! A request is read from JSON field by field ([`Fields`]): fields that nobody knows are ignored, `null` is the same as
//! absence, and everything else of a wrong type or out of range is an [`ApiError`] that names the field. What was read
//! becomes requests of the engine for one model ([`Card`]), and what the engine says becomes the answer ([`Assemble`]).
//! Nothing here knows HTTP, threads or channels.

mod answer;
pub mod chat;
mod chat_answer;
pub mod completions;
mod constraint;
pub mod embeddings;
mod error;
mod fields;
mod generation;
pub mod inside;
mod logprobs;
mod messages;
mod model;
pub mod prefixes;
mod reply;
pub mod tokens;
mod tool_text;

pub use answer::{Answer, Assemble, Job, Stream, Usage};
pub(crate) use answer::{finish_reason, unique};
pub use constraint::Constraint;
pub use error::{ApiError, Kind};
pub use fields::Fields;
pub use generation::{Generation, StreamOptions};
pub use inside::Vectors;
pub use model::Card;
