//! What the program fails with: one line on standard error, exit status 1.

use std::path::{Path, PathBuf};

/// A failure of the program.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A model file is not usable.
    #[error(transparent)]
    Model(#[from] puna_model::Error),
    /// The engine cannot do what was asked.
    #[error(transparent)]
    Engine(#[from] puna::Error),
    /// The server does not start, or does not go on.
    #[error(transparent)]
    Server(#[from] puna_server::Error),
    /// A file that is no model could not be read or written.
    #[error("{}: {what}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// The request makes no sense for this model or this input.
    #[error("{0}")]
    Input(String),
    /// Standard output is closed or full.
    #[error("standard output: {0}")]
    Stdout(#[from] std::io::Error),
}

impl Error {
    /// A file's own failure.
    pub fn file(path: &Path, cause: impl std::fmt::Display) -> Error {
        Error::File { path: path.to_owned(), what: cause.to_string() }
    }

    /// Whether the reader of standard output went away: no failure of ours.
    pub fn is_closed_stdout(&self) -> bool {
        matches!(self, Error::Stdout(e) if e.kind() == std::io::ErrorKind::BrokenPipe)
    }
}
