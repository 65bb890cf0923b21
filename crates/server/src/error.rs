//! Why a server does not start, or does not go on.

use std::path::PathBuf;

/// An error of the server as a whole; what is wrong with one request is an [`ApiError`](crate::openai::ApiError).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A model cannot be loaded.
    #[error(transparent)]
    Model(#[from] puna::Error),
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// The address.
        address: String,
        /// The system's words.
        source: std::io::Error,
    },
    /// Two models or aliases of one name.
    #[error("two models are called {name:?}: give one of them as --alias NAME=PATH in place of its path")]
    Name {
        /// The name.
        name: String,
    },
    /// An alias of nothing.
    #[error("alias {alias:?}: {target:?} is no loaded model (there are: {known}) and no file")]
    Alias {
        /// The alias.
        alias: String,
        /// What it should stand for.
        target: String,
        /// Names of models.
        known: String,
    },
    /// No model at all.
    #[error("there is no model to serve")]
    NoModel,
    /// A file of keys that cannot be used.
    #[error("{}: {what}", path.display())]
    Keys {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// An origin that is none.
    #[error("{origin:?} is no origin: expected * or one like https://example.com")]
    Origin {
        /// What was given.
        origin: String,
    },
    /// The system does not give a thread, or no signals.
    #[error("{what}: {source}")]
    System {
        /// What was asked of the system.
        what: &'static str,
        /// Its words.
        source: std::io::Error,
    },
}
