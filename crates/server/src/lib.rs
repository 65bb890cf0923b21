//! An HTTP server with OpenAI's interface for models that puna runs.
//!
//! The way of a request: [`server`] takes a connection; `http` names the request, looks for a key and reads the body
//! (`browser` keeps other people's pages out); `routes` says what is where; [`openai`] reads the request field by field
//! and makes work for the engine of it; `models` finds the model, which `loading` has brought into memory, and `room` has
//! a place for it or not; `prefixes` and `transfers` bring its beginning into the cache, if it names one that is on disk;
//! `worker`, a thread for each model, steps the engine and tells every request what came of it; `answering` sends that as
//! one object or as a stream of events. Where a client goes away, its receiver is dropped, and the engine's thread ends
//! the request before its next step.
//!
//! ```no_run
//! let options = puna_server::Options::new(vec!["model.gguf".into()]);
//! puna_server::serve(&options, |address| println!("http://{address}"))?;
//! # Ok::<(), puna_server::Error>(())
//! ```

#![forbid(unsafe_code)]

mod answering;
mod app;
mod browser;
mod connections;
mod error;
mod http;
mod loading;
mod metrics;
mod models;
pub mod openai;
mod options;
mod page;
mod prefixes;
mod room;
mod routes;
pub mod server;
mod signal;
mod transfers;
mod worker;

pub use error::Error;
pub use models::model_name;
pub use options::{Keys, Limits, Options};
pub use server::{Server, serve};
