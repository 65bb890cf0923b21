//! Where weights come from. Whatever the files call them, here tensors have GGUF's names, and shapes are outermost
//! dimension first.

use crate::arch::{self, Arch};
use crate::config::Config;
use crate::error::Error;
use crate::gguf::{Gguf, TensorInfo};
use crate::map::Map;
use bytes::Bytes;
use puna_kernels::DType;
use std::ops::Range;
use std::sync::Arc;

/// A model's configuration, and its tensors by name.
pub trait Checkpoint {
    /// The row of its architecture, and what the model is.
    ///
    /// # Errors
    /// Names the key that is missing, of another type, out of range, or asks for what puna cannot do.
    fn config(&self) -> Result<(&'static Arch, Config), Error>;
    /// Whether q and k rows are in the order that GGUF files of their architecture have.
    fn is_gguf(&self) -> bool;
    /// # Errors
    /// What keeps the checkpoint from being loaded, although it can be inspected.
    fn check(&self) -> Result<(), Error>;
    /// The error that the output projection is missing; `None` where there is one, or the embedding serves.
    fn missing_head(&self) -> Option<Error> {
        None
    }
    /// All tensors that belong to the text model; those that GGUF has no name for, too.
    fn names(&self) -> Vec<String>;
    /// The shape of a tensor; `None` where there is none.
    fn shape(&self, name: &str) -> Option<Vec<usize>>;
    /// A tensor that is there.
    ///
    /// # Errors
    /// Where it is no weight, or its bytes are not in the file.
    fn tensor(&self, name: &str) -> Result<Tensor, Error>;
    /// An error about a tensor.
    fn error(&self, name: &str, what: String) -> Error;
    /// The error that a tensor is missing, with the names that were tried.
    fn missing(&self, name: &str) -> Error;
}

/// A tensor's elements.
pub struct Tensor {
    /// Their format.
    pub dtype: DType,
    /// The elements themselves.
    pub data: Data,
    /// What is read of a file to get them; `None` where they are in memory of their own.
    pub place: Option<Place>,
}

/// Rows of a tensor, counted over all its outer dimensions.
#[derive(Clone)]
pub enum Data {
    /// One after the other, as they are multiplied with.
    Stored(Bytes),
    /// Some of the rows of a tensor that is stored in another form.
    Made(Arc<dyn MakeRows>, Range<usize>),
}

/// Rows that are made when they are wanted, so that a model is never in memory in two forms.
pub trait MakeRows: Send + Sync {
    /// Bytes of a row.
    fn row_bytes(&self) -> usize;
    /// The bytes that rows are made of: all that [`Tensor::place`] says.
    fn stored(&self) -> &[u8];
    /// Makes the rows of `range` from `stored`, which is [`MakeRows::stored`] or the same read from the file again.
    fn make(&self, stored: &[u8], range: Range<usize>, out: &mut [u8]);
    /// The rows of `range`, one after the other.
    fn rows(&self, range: Range<usize>) -> Bytes {
        let mut out = vec![0; range.len() * self.row_bytes()];
        self.make(self.stored(), range, &mut out);
        out.into()
    }
}

impl Data {
    /// The elements, one row after the other.
    pub fn read(&self) -> Bytes {
        match self {
            Data::Stored(bytes) => bytes.clone(),
            Data::Made(rows, range) => rows.rows(range.clone()),
        }
    }

    /// Rows `rows` of it, of `row_bytes` each where they are stored.
    pub fn slice(&self, rows: Range<usize>, row_bytes: usize) -> Data {
        match self {
            Data::Stored(bytes) => Data::Stored(bytes.slice(rows.start * row_bytes..rows.end * row_bytes)),
            Data::Made(all, range) => Data::Made(all.clone(), range.start + rows.start..range.start + rows.end),
        }
    }
}

/// A range of a mapped file.
#[derive(Clone)]
pub struct Place {
    /// The file.
    pub map: Map,
    /// The range.
    pub range: Range<usize>,
}

impl Checkpoint for Gguf {
    fn config(&self) -> Result<(&'static Arch, Config), Error> {
        arch::from_gguf(self)
    }

    fn is_gguf(&self) -> bool {
        true
    }

    fn check(&self) -> Result<(), Error> {
        Gguf::check(self)
    }

    fn names(&self) -> Vec<String> {
        self.tensors().map(|info| info.name.to_string()).collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        Some(self.find(name)?.shape.iter().map(|&n| n as usize).collect())
    }

    fn tensor(&self, name: &str) -> Result<Tensor, Error> {
        let info: &TensorInfo = Gguf::tensor(self, name)?;
        let (dtype, bytes) = self.weight(info)?;
        let start = info.offset as usize;
        let map = self.shards()[info.shard].map.clone();
        let place = Place { map, range: start..start + bytes.len() };
        Ok(Tensor { dtype, data: Data::Stored(bytes), place: Some(place) })
    }

    fn error(&self, name: &str, what: String) -> Error {
        match self.find(name) {
            Some(info) => Gguf::error(self, info, what),
            None => Error::tensor(self.path(), name, what),
        }
    }

    fn missing(&self, name: &str) -> Error {
        Error::tensor(self.path(), name, "missing: no such tensor in the file")
    }
}
