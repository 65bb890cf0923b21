//! How a server is set up.

use crate::error::Error;
use crate::openai::Vectors;
use puna::EngineOptions;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What is served, and within which limits.
#[derive(Clone, Debug)]
pub struct Options {
    /// Models, each known by the name of its file or folder.
    pub models: Vec<PathBuf>,
    /// More names: of a model that is served, or of one to be loaded from a path.
    pub aliases: Vec<(String, String)>,
    /// How models are loaded and run; the same for all.
    pub engine: EngineOptions,
    /// A chat template in place of the models' own.
    pub template: Option<String>,
    /// The address to listen on.
    pub host: IpAddr,
    /// The port; 0 takes a free one.
    pub port: u16,
    /// Who may ask; nobody in particular where it is empty.
    pub keys: Keys,
    /// Origins whose pages may read answers: none, some, or `*`.
    pub cors: Vec<String>,
    /// Names of this server beside localhost and addresses. Other names are refused where this is not empty, or where
    /// only this machine can ask and nobody needs a key; `*` is every name.
    pub allowed_hosts: Vec<String>,
    /// Control vectors that requests may name.
    pub vectors: Vectors,
    /// Whether clients may add control vectors.
    pub uploads: bool,
    /// Where prefixes are kept that clients name; `None`: nowhere.
    pub state_dir: Option<PathBuf>,
    /// Whether what memory gives at best is measured when a model is loaded, so that timings tell their part of it.
    pub profile: bool,
    /// Limits.
    pub limits: Limits,
}

impl Options {
    /// A server for these models on a port of this machine, with limits that suit it.
    pub fn new(models: Vec<PathBuf>) -> Options {
        Options {
            models,
            aliases: Vec::new(),
            engine: EngineOptions::default(),
            template: None,
            host: Ipv4Addr::LOCALHOST.into(),
            port: 8080,
            keys: Keys::default(),
            cors: Vec::new(),
            allowed_hosts: Vec::new(),
            vectors: Vectors::default(),
            uploads: false,
            state_dir: None,
            profile: false,
            limits: Limits::default(),
        }
    }
}

/// Bounds on what clients can make the server do.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most tokens of an answer.
    pub max_tokens: Option<usize>,
    /// Most answers that wait for their turn, beside those that are worked on ([`EngineOptions::max_running`]).
    pub queue: usize,
    /// Most connections.
    pub connections: usize,
    /// Most bytes of a request's body. Bodies that are being read take four times that together.
    pub body: usize,
    /// Most prefixes that are kept.
    pub prefixes: usize,
    /// Most bytes of their files together.
    pub prefix_bytes: u64,
    /// Longest time from a request to the end of its answer.
    pub request: Duration,
    /// How long a connection may be silent while something is expected of the client: a request, the rest of one, or
    /// that it reads.
    pub idle: Duration,
    /// A stream that has nothing to say says so after this time.
    pub keep_alive: Duration,
    /// How long running requests may go on after the server was told to end.
    pub grace: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            max_tokens: None,
            queue: 256,
            connections: 1024,
            body: 16 << 20,
            prefixes: 256,
            prefix_bytes: 4 << 30,
            request: Duration::from_secs(3600),
            idle: Duration::from_secs(60),
            keep_alive: Duration::from_secs(10),
            grace: Duration::from_secs(30),
        }
    }
}

/// Keys, as hashes: what a client sends is hashed too, and hashes are compared in constant time.
#[derive(Clone, Default)]
pub struct Keys(Vec<blake3::Hash>);

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} keys", self.0.len())
    }
}

impl Keys {
    /// Keys from text, one a line; empty lines and those that begin with `#` are none.
    pub fn parse(text: &str) -> Keys {
        // Some editors begin a file with a mark of its encoding.
        let lines = text
            .trim_start_matches('\u{feff}')
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty() && !line.starts_with('#'));
        Keys(lines.map(|line| blake3::hash(line.as_bytes())).collect())
    }

    /// Keys from a file.
    ///
    /// # Errors
    /// If it cannot be read, or has no key: it would let everybody in.
    pub fn read(path: &Path) -> Result<Keys, Error> {
        let fault = |what: String| Error::Keys { path: path.to_owned(), what };
        let text = std::fs::read_to_string(path).map_err(|e| fault(e.to_string()))?;
        let keys = Keys::parse(&text);
        if keys.0.is_empty() { Err(fault("expected a key a line, found none".into())) } else { Ok(keys) }
    }

    /// These keys and others.
    pub fn and(mut self, others: Keys) -> Keys {
        self.0.extend(others.0);
        self
    }

    /// Whether anybody may ask.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether this is one of them. All are compared, so that time does not tell which.
    pub fn contain(&self, key: &[u8]) -> bool {
        let hash = blake3::hash(key);
        self.0.iter().fold(false, |found, key| found | (*key == hash))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn keys_are_lines() {
        let keys = Keys::parse("\u{feff}# ours\nalpha\n\n  beta  \r\n#gamma");
        assert!(keys.contain(b"alpha") && keys.contain(b"beta"));
        assert!(!keys.contain(b"gamma") && !keys.contain(b"") && !keys.contain(b"alph"));
        assert_eq!(format!("{keys:?}"), "2 keys");
        assert!(Keys::parse("\u{feff}alpha\n").contain(b"alpha"));
    }

    #[test]
    fn a_file_without_keys_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "# none\n").unwrap();
        assert!(Keys::read(file.path()).unwrap_err().to_string().ends_with("expected a key a line, found none"));
    }
}
