//! A model, whichever files it is in.

use crate::arch::Arch;
use crate::checkpoint::{Checkpoint, Tensor};
use crate::config::Config;
use crate::error::Error;
use crate::gguf::Gguf;
use crate::hf::Folder;
use std::path::Path;

/// A GGUF file or a folder.
pub enum Source {
    /// One file, or all files of a split model.
    Gguf(Gguf),
    /// config.json, safetensors and the tokenizer's files.
    Folder(Folder),
}

impl Source {
    /// Opens a model: a folder, a file of one (a safetensors or JSON file), or a GGUF file.
    ///
    /// # Errors
    /// Those of [`Folder::open`] or [`Gguf::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<Source, Error> {
        let path = path.as_ref();
        if path.is_dir() {
            return Folder::open(path).map(Source::Folder);
        }
        let is_of_folder = path.extension().is_some_and(|end| end == "safetensors" || end == "json");
        match path.parent().filter(|_| is_of_folder && path.is_file()) {
            Some(folder) if folder.as_os_str().is_empty() => Folder::open(".").map(Source::Folder),
            Some(folder) => Folder::open(folder).map(Source::Folder),
            None => Gguf::open(path).map(Source::Gguf),
        }
    }

    /// The folder, or the (first) file.
    pub fn path(&self) -> &Path {
        match self {
            Source::Gguf(gguf) => gguf.path(),
            Source::Folder(folder) => folder.path(),
        }
    }

    /// The GGUF file, where it is one.
    pub fn gguf(&self) -> Option<&Gguf> {
        match self {
            Source::Gguf(gguf) => Some(gguf),
            Source::Folder(_) => None,
        }
    }

    /// The folder, where it is one.
    pub fn folder(&self) -> Option<&Folder> {
        match self {
            Source::Gguf(_) => None,
            Source::Folder(folder) => Some(folder),
        }
    }

    /// Its configuration and tensors.
    pub fn checkpoint(&self) -> &dyn Checkpoint {
        match self {
            Source::Gguf(gguf) => gguf,
            Source::Folder(folder) => folder,
        }
    }
}

impl From<Gguf> for Source {
    fn from(gguf: Gguf) -> Source {
        Source::Gguf(gguf)
    }
}

impl From<Folder> for Source {
    fn from(folder: Folder) -> Source {
        Source::Folder(folder)
    }
}

impl Checkpoint for Source {
    fn config(&self) -> Result<(&'static Arch, Config), Error> {
        self.checkpoint().config()
    }

    fn is_gguf(&self) -> bool {
        self.checkpoint().is_gguf()
    }

    fn check(&self) -> Result<(), Error> {
        self.checkpoint().check()
    }

    fn missing_head(&self) -> Option<Error> {
        self.checkpoint().missing_head()
    }

    fn names(&self) -> Vec<String> {
        self.checkpoint().names()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.checkpoint().shape(name)
    }

    fn tensor(&self, name: &str) -> Result<Tensor, Error> {
        self.checkpoint().tensor(name)
    }

    fn error(&self, name: &str, what: String) -> Error {
        self.checkpoint().error(name, what)
    }

    fn missing(&self, name: &str) -> Error {
        self.checkpoint().missing(name)
    }
}
