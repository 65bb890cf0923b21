//! What an answer's text says: to whom, and which tools it calls.

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    /// For the reader.
    Content(String),
}

/// Reads an answer as it comes.
#[derive(Debug, Default)]
pub(crate) enum Reply {
    /// All of it is for the reader.
    #[default]
    Plain,
}

impl Reply {
    /// What the next piece of text makes.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        match self {
            Reply::Plain if text.is_empty() => Vec::new(),
            Reply::Plain => vec![Piece::Content(text.to_owned())],
        }
    }
}
