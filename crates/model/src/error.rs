//! What can go wrong between a file and its logits.

use std::{
    fmt::{self, Display, Write},
    io,
    path::{Path, PathBuf},
};

/// An error of this crate: one line that names the file, the key or tensor, what was expected and what was found.
///
/// Text that comes from a file is escaped and cut before it gets here (see [`escape`]), so that a message can go to
/// a terminal or a log as it is. There is no [`source`](std::error::Error::source): the line is complete.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system does not give the file.
    #[error("{}: {what}", shown(path))]
    Io {
        /// The file.
        path: PathBuf,
        /// The kind of failure, to act on.
        kind: io::ErrorKind,
        /// The failure in words.
        what: String,
    },
    /// Weights cannot be quantized to the format.
    #[error("weights cannot be quantized to {}: it is only read", dtype.name())]
    Quantize {
        /// The format.
        dtype: puna_kernels::DType,
    },
    /// The file is something else than a GGUF file.
    #[error("{}: not a GGUF file: {what}", shown(path))]
    NotGguf {
        /// The file.
        path: PathBuf,
        /// What it is instead.
        what: String,
    },
    /// The file begins as GGUF does and then breaks the format.
    #[error("{}: at byte {at}: {what}", shown(path))]
    Gguf {
        /// The file.
        path: PathBuf,
        /// How far the file was read.
        at: u64,
        /// The field, what was expected and what was found.
        what: String,
    },
    /// The file is no safetensors file, or its header breaks the format.
    #[error("{}: safetensors {what}", shown(path))]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// The part of the header, what was expected and what was found.
        what: String,
    },
    /// A JSON file cannot be read.
    #[error("{}: expected a JSON object: {what}", shown(path))]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        what: String,
    },
    /// A folder does not have the files of a model.
    #[error("{}: {what}", shown(path))]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What was looked for and what was found.
        what: String,
    },
    /// A configuration that was made by hand is none of a model.
    #[error("configuration: {what}")]
    Config {
        /// The field, and what was expected of it.
        what: String,
    },
    /// A metadata key is missing or has an unusable value.
    #[error("{}: key \"{}\": {what}", shown(path), escape(key))]
    Key {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// What was expected and what was found.
        what: String,
    },
    /// A tensor is missing, damaged or not what the model needs.
    #[error("{}: tensor \"{}\": {what}", shown(path), escape(tensor))]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// What was expected and what was found.
        what: String,
    },
    /// The file ends before the weights do.
    #[error("{}: the file is truncated: {what}", shown(path))]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The tensor that is cut off, the size expected and the size found.
        what: String,
    },
    /// The files of a split model do not make one model.
    #[error("{}: split model: {what}", shown(path))]
    Split {
        /// The shard at fault.
        path: PathBuf,
        /// What was expected and what was found.
        what: String,
    },
    /// A model cannot be written in the form that was asked for.
    #[error("{}: cannot be converted: {what}", shown(path))]
    Convert {
        /// The model's file or folder.
        path: PathBuf,
        /// What keeps it from being written.
        what: String,
    },
    /// A file cannot be written.
    #[error("{}: cannot be written: {what}", shown(path))]
    Write {
        /// The file.
        path: PathBuf,
        /// Why not.
        what: String,
    },
    /// Who asked for a file stopped its making.
    #[error("{}: stopped before the file was complete; nothing was written", shown(path))]
    Stopped {
        /// The file.
        path: PathBuf,
    },
    /// A note that is too long to be kept with a state.
    #[error("a note of {bytes} bytes: at most {most} are kept with a state")]
    StateNote {
        /// Its bytes.
        bytes: usize,
        /// Most bytes.
        most: usize,
    },
    /// A state on its way gave its blocks back before it was whole.
    #[error("the blocks of a state were needed for something else before all of it was there")]
    BlocksTaken,
    /// A saved state cannot be used.
    #[error("{}: the saved state cannot be used: {what}", shown(path))]
    State {
        /// The file.
        path: PathBuf,
        /// What was expected and what was found.
        what: String,
    },
    /// A file that experts are read from is no longer what it was.
    #[error("{}: the file has changed since the model was loaded: {what}", shown(path))]
    Changed {
        /// The file.
        path: PathBuf,
        /// What was expected and what was found.
        what: String,
    },
    /// Memory for experts that does not hold two.
    #[error("expert memory of {bytes} bytes is too small: two experts take {needed}")]
    ExpertMemory {
        /// Bytes they may take.
        bytes: u64,
        /// Bytes of two experts.
        needed: u64,
    },
    /// Experts cannot be read when they are wanted.
    #[error("experts cannot be read as they are needed: {what}")]
    Experts {
        /// Why not.
        what: String,
    },
    /// The batch does not fit the model or the cache.
    #[error("the batch cannot be computed: {what}")]
    Batch {
        /// The row or span, what was expected and what was found.
        what: String,
    },
    /// A control vector cannot be applied as it was asked for.
    #[error("control vector {}: {what}", shown(path))]
    Steering {
        /// The vector's file.
        path: PathBuf,
        /// What was expected and what was found.
        what: String,
    },
    /// Logits are asked of a model that was loaded without its output projection.
    #[error("the model was loaded without its output projection: it has hidden states, but no logits")]
    NoHead,
    /// The processor lacks the instructions that were asked for.
    #[error("instruction level {isa} is not available on this processor")]
    Isa {
        /// The level.
        isa: puna_kernels::Isa,
    },
    /// The system gives no more memory.
    #[error("out of memory for {what}")]
    OutOfMemory {
        /// What needed it.
        what: &'static str,
    },
}

impl Error {
    /// What `cause` says about `path`, in fewer words where that is possible.
    pub fn io(path: &Path, cause: &io::Error) -> Error {
        let what = match cause.kind() {
            io::ErrorKind::NotFound => "no such file".to_owned(),
            io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
            _ => cause.to_string(),
        };
        Error::Io { path: path.to_owned(), kind: cause.kind(), what }
    }

    /// An [`Error::Key`].
    pub fn key(path: &Path, key: &str, what: impl Into<String>) -> Error {
        Error::Key { path: path.to_owned(), key: key.to_owned(), what: what.into() }
    }

    /// An [`Error::Tensor`].
    pub fn tensor(path: &Path, tensor: &str, what: impl Into<String>) -> Error {
        Error::Tensor { path: path.to_owned(), tensor: tensor.to_owned(), what: what.into() }
    }
}

/// Longest text from a file that is shown, in characters: a whole tensor name, the beginning of a chat template.
const SHOWN_CHARS: usize = 100;

/// `text` made fit for a terminal or a log: control, format and unprintable characters, double quotes and
/// backslashes escaped as Rust does, bytes that are no UTF-8 as `\xNN`, and a `…` after 100 characters.
pub fn escape<T: AsRef<[u8]> + ?Sized>(text: &T) -> impl Display {
    Escaped { bytes: text.as_ref(), max: SHOWN_CHARS }
}

/// `path` escaped like [`escape`], but whole.
pub fn shown(path: &Path) -> impl Display {
    Escaped { bytes: path.as_os_str().as_encoded_bytes(), max: usize::MAX }
}

struct Escaped<'a> {
    bytes: &'a [u8],
    max: usize,
}

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut left = self.max;
        for chunk in self.bytes.utf8_chunks() {
            let valid = chunk.valid();
            let end = valid.char_indices().nth(left).map_or(valid.len(), |(i, _)| i);
            for (i, part) in valid[..end].split('\'').enumerate() {
                if i > 0 {
                    f.write_char('\'')?;
                }
                write!(f, "{}", part.escape_debug())?;
            }
            if end < valid.len() {
                return f.write_char('…');
            }
            left -= valid.chars().count();
            for byte in chunk.invalid() {
                if left == 0 {
                    return f.write_char('…');
                }
                write!(f, "\\x{byte:02x}")?;
                left -= 1;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_what_a_terminal_would_obey() {
        let text = b"a\x1b[31m\n\0\"\\ it's \xff\xc3\xa9 \xe2\x80\xae";
        assert_eq!(escape(&text).to_string(), r#"a\u{1b}[31m\n\0\"\\ it's \xffé \u{202e}"#);
        assert_eq!(shown(Path::new("a\tb")).to_string(), r"a\tb");
    }

    #[test]
    fn cuts_long_text() {
        let full = "é".repeat(SHOWN_CHARS);
        assert_eq!(escape(&full).to_string(), full);
        assert_eq!(escape(&format!("{full}x")).to_string(), format!("{full}…"));
        assert_eq!(escape(&[0xff; 1000]).to_string().len(), 4 * SHOWN_CHARS + '…'.len_utf8());
    }
}
