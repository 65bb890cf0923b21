//! From model files to logits.
//!
//! [`gguf`] reads files, [`arch`] turns their metadata into a [`Config`], [`bind`] finds the weights, and
//! [`Model::forward`] computes a ragged [`Batch`] over a [`KvCache`].

#![deny(unsafe_code)]

pub mod arch;
pub mod backend;
pub mod batch;
pub mod bind;
pub mod checkpoint;
pub mod config;
pub mod convert;
pub mod cpu;
pub mod error;
mod experts;
mod fingerprint;
pub mod forward;
pub mod gguf;
pub mod hf;
pub mod kv;
pub mod map;
mod memory;
mod model;
mod moe;
mod new_file;
mod paging;
pub mod prefix;
pub mod quantize;
pub mod reference;
pub mod rope;
mod source;
mod state;
pub mod steering;
mod timed;
pub mod timings;
mod trace;
pub mod weights;

pub use batch::{Batch, Grown, Outputs, Prompt, Row, Span};
pub use checkpoint::Checkpoint;
pub use config::{Config, MoeConfig};
pub use error::Error;
pub use experts::ExpertStats;
pub use forward::Tap;
pub use gguf::Gguf;
pub use kv::{KvCache, SeqId};
pub use memory::MemoryCheckpoint;
pub use model::{BackendKind, LoadOptions, Model};
pub use new_file::NewFile;
pub use prefix::Chain;
pub use source::Source;
pub use state::{Loading, Saving, State, StateKey, StateReader, StateWriter};
pub use steering::{ControlVector, Steering};
pub use timings::{Phase, Stopwatch, Timings};
pub use trace::Trace;
