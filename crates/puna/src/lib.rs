//! puna: an engine for Llama-family language models on CPUs.
//!
//! The same request gives the same answer, bit for bit, whatever else runs beside it, on any number of threads.

#![forbid(unsafe_code)]

mod chat;
pub mod engine;
pub mod error;
pub mod files;
pub mod request;
pub mod sampler;
mod sequence;

pub use engine::{Engine, EngineOptions};
pub use error::Error;
pub use files::ModelFiles;
pub use request::{Event, Finish, FinishReason, Request, RequestId, Stats};

pub use puna_kernels::{Isa, KvType, Pool};
pub use puna_model::{BackendKind, LoadOptions};
