//! puna: an engine for Llama-family language models on CPUs.
//!
//! The same request gives the same answer, bit for bit, whatever else runs beside it, on any number of threads.
//!
//! ```no_run
//! use puna::{Engine, EngineOptions, Request, sampler::PartialSampling};
//! use serde_json::json;
//!
//! fn main() -> Result<(), puna::Error> {
//!     let mut engine = Engine::load("model.gguf", &EngineOptions::default(), &mut |_, _| {})?;
//!     let prompt = engine.chat_prompt(&[json!({ "role": "user", "content": "What is a puna?" })], None)?;
//!     let request = Request::new(prompt, engine.sampling(&PartialSampling::default()));
//!     engine.generate(request, |event| { print!("{}", event.text); true })?;
//!     Ok(())
//! }
//! ```

#![forbid(unsafe_code)]

pub mod chat;
pub mod convert;
pub mod draft;
pub mod embed;
pub mod engine;
pub mod error;
pub mod files;
pub mod grammar;
pub mod inside;
mod pace;
pub mod pooling;
pub mod request;
pub mod sampler;
mod scheduler;
mod sequence;
pub mod states;
mod train;

pub use chat::{Chat, ChatEnd, Conversation};
pub use convert::{Conversion, ConvertOptions};
pub use draft::{DraftBy, DraftOptions, DraftStats, Drafter};
pub use embed::{EmbedOptions, Embedding};
pub use engine::{Engine, EngineOptions, Loaded, Status, free_memory};
pub use error::Error;
pub use files::ModelFiles;
pub use grammar::{Grammar, Grammars, ToolChoice, ToolGrammar};
pub use inside::{Capture, Captured, ExpertCounts, Positions};
pub use pooling::{Declared, Pooling};
pub use request::{Event, Finish, FinishReason, Logprobs, Request, RequestId, Stats};
pub use states::StateFolder;

pub use puna_kernels::{Isa, KvType, Pool};
pub use puna_model::{
    BackendKind, ControlVector, ExpertStats, LoadOptions, Loading, Phase, Prompt, Row, Saving, State, StateKey,
    StateReader, StateWriter, Steering, Timings, Trace, steering,
};
