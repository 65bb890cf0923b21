//! The GGUF container: metadata and tensors of a model in one file or several.
//!
//! The format is the one of ggml's `docs/gguf.md`, versions 2 and 3, little-endian. A file is mapped and its header
//! is read once; metadata values and tensor bytes are slices of the map. Every count, length, offset and name is
//! checked before it is used, so that what a hostile file can cost is bounded by its own size.
//!
//! ```no_run
//! use puna_model::gguf::{Gguf, Strings};
//!
//! let gguf = Gguf::open("model.gguf")?;
//! gguf.check()?;
//! let arch: &str = gguf.meta().require("general.architecture")?;
//! let layers: usize = gguf.meta().require(&format!("{arch}.block_count"))?;
//! let eps: Option<f32> = gguf.meta().get(&format!("{arch}.attention.layer_norm_rms_epsilon"))?;
//! let tokens: Option<Strings> = gguf.meta().get("tokenizer.ggml.tokens")?;
//! let embd = gguf.tensor("token_embd.weight")?;
//! let (dtype, bytes) = gguf.weight(embd)?;
//! # Ok::<(), puna_model::Error>(())
//! ```

mod container;
mod cursor;
mod meta;
mod split;
mod tensor;
mod value;
mod write;

use std::path::{Path, PathBuf};

use bytes::Bytes;
use puna_kernels::DType;

use self::{container::Container, tensor::TensorTable};
use crate::{
    Error,
    error::escape,
    map::{Access, Map},
};

pub(crate) use container::lookalike;
pub use meta::Metadata;
pub use tensor::{OtherType, TensorInfo, TensorType};
pub use value::{Array, Elements, FromValue, Strings, Value, ValueType};
pub use write::{Element, Field, Header, Writer};

/// A model in GGUF: one file, or all files of a split one.
#[derive(Debug)]
pub struct Gguf {
    shards: Vec<Shard>,
    meta: Metadata,
    tensors: TensorTable,
    problems: Vec<Error>,
}

/// One file of a model.
#[derive(Clone, Debug)]
pub struct Shard {
    /// Where it is.
    pub path: PathBuf,
    /// GGUF's version, 2 or 3.
    pub version: u32,
    /// Its bytes.
    pub map: Map,
}

impl Gguf {
    /// Opens `path`. Any shard of a split model (`NAME-00001-of-00003.gguf`) opens the whole model.
    ///
    /// Faults that leave metadata and tensor table readable do not fail here, so that the file can be inspected:
    /// weights behind the end of the file, shards that are missing or do not fit. They are in [`Gguf::problems`], and
    /// [`Gguf::check`] turns them into an error.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::NotGguf`], [`Error::Gguf`], [`Error::Key`] or [`Error::Tensor`] when the file cannot
    /// be read, is no GGUF file, or breaks the format; [`Error::Split`] when the first shard is missing.
    pub fn open(path: impl AsRef<Path>) -> Result<Gguf, Error> {
        split::open(path.as_ref())
    }

    /// Reads a file that is already in memory; `path` only names it in messages. A shard stays alone.
    ///
    /// # Errors
    /// Like [`Gguf::open`].
    pub fn parse(path: impl AsRef<Path>, bytes: Bytes) -> Result<Gguf, Error> {
        let container = Container::parse(path.as_ref(), bytes.into(), 0)?;
        let shards = split::shard_count(&container.meta)?;
        let gguf = Gguf::new(container);
        Ok(match shards {
            None => gguf,
            Some(n) => gguf.with_problem(split::fault(path.as_ref(), format!("only one shard of {n} is in memory"))),
        })
    }

    fn new(file: Container) -> Gguf {
        let problems = file.truncated().into_iter().collect();
        let Container { map, version, meta, tensors } = file;
        let shards = vec![Shard { path: meta.path().to_owned(), version, map }];
        Gguf { shards, meta, tensors, problems }
    }

    fn with_problem(mut self, problem: Error) -> Gguf {
        self.problems.push(problem);
        self
    }

    /// Adds the next shard.
    fn add(&mut self, file: Container) -> Result<(), Error> {
        let path = file.meta.path();
        if let Some(name) = file.tensors.keys().find(|name| self.tensors.contains_key(*name)) {
            let what = format!("duplicate tensor \"{}\": an earlier shard has it too", escape(&**name));
            return Err(split::fault(path, what));
        }
        self.problems.extend(file.truncated());
        self.shards.push(Shard { path: path.to_owned(), version: file.version, map: file.map });
        self.tensors.extend(file.tensors);
        Ok(())
    }

    /// The first file.
    pub fn path(&self) -> &Path {
        self.meta.path()
    }

    /// The metadata; that of the first file when there are several.
    pub fn meta(&self) -> &Metadata {
        &self.meta
    }

    /// The files, in order.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// All tensors in the order of the files.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.tensors.values()
    }

    /// The tensor called `name`, if there is one.
    pub fn find(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// The tensor called `name`.
    ///
    /// # Errors
    /// [`Error::Tensor`] when there is none.
    pub fn tensor(&self, name: &str) -> Result<&TensorInfo, Error> {
        self.find(name).ok_or_else(|| Error::tensor(self.path(), name, "missing"))
    }

    /// The bytes of a tensor: rows one after the other, a slice of the map.
    ///
    /// # Errors
    /// [`Error::Truncated`] when the file ends before they do.
    pub fn data(&self, tensor: &TensorInfo) -> Result<Bytes, Error> {
        let shard = self.shard(tensor)?;
        match tensor.range().filter(|range| range.end <= shard.map.len()) {
            Some(range) => Ok(shard.map.bytes().slice(range)),
            None => Err(container::truncated(&shard.path, &shard.map, &[tensor], tensor.end())),
        }
    }

    /// Format and bytes of a tensor that is to be multiplied with or looked up in.
    ///
    /// # Errors
    /// [`Error::Tensor`] when its elements are no weights, and the errors of [`Gguf::data`].
    pub fn weight(&self, tensor: &TensorInfo) -> Result<(DType, Bytes), Error> {
        match tensor.ty {
            TensorType::Weight(dtype) => Ok((dtype, self.data(tensor)?)),
            TensorType::Other(ty) => Err(self.error(tensor, format!("type {} is not a weight format", ty.name))),
        }
    }

    /// Tells the operating system how the bytes of a tensor will be used.
    pub fn advise(&self, tensor: &TensorInfo, access: Access) {
        if let (Ok(shard), Some(range)) = (self.shard(tensor), tensor.range()) {
            shard.map.advise(range, access);
        }
    }

    /// Gives the memory of a tensor's bytes back; they stay readable. See [`Map::release`].
    pub fn release(&self, tensor: &TensorInfo) {
        if let (Ok(shard), Some(range)) = (self.shard(tensor), tensor.range()) {
            shard.map.release(range);
        }
    }

    /// What keeps the model from being loaded although its first file can be read.
    pub fn problems(&self) -> &[Error] {
        &self.problems
    }

    /// # Errors
    /// The first of [`Gguf::problems`].
    pub fn check(&self) -> Result<(), Error> {
        self.problems.first().map_or(Ok(()), |problem| Err(problem.clone()))
    }

    /// An [`Error::Tensor`] that names the file `tensor` is in.
    pub fn error(&self, tensor: &TensorInfo, what: impl Into<String>) -> Error {
        let path = self.shards.get(tensor.shard).map_or(self.path(), |shard| &shard.path);
        Error::tensor(path, &tensor.name, what)
    }

    fn shard(&self, tensor: &TensorInfo) -> Result<&Shard, Error> {
        self.shards.get(tensor.shard).ok_or_else(|| self.error(tensor, format!("there is no shard {}", tensor.shard)))
    }
}
