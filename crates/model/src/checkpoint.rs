//! Where weights come from. Whatever the files call them, here tensors have GGUF's names, and shapes are outermost
//! dimension first.

use crate::error::Error;
use crate::gguf::{Gguf, TensorInfo};
use crate::map::Map;
use bytes::Bytes;
use puna_kernels::DType;
use std::ops::Range;

/// A model's tensors by name.
pub trait Checkpoint {
    /// Whether q and k rows are in the order that GGUF files of their architecture have.
    fn is_gguf(&self) -> bool;
    /// # Errors
    /// What keeps the checkpoint from being loaded, although it can be inspected.
    fn check(&self) -> Result<(), Error>;
    /// All tensors that belong to the model.
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
    /// Rows one after the other.
    pub bytes: Bytes,
    /// Where the bytes are in a file; `None` where they are in memory of their own.
    pub place: Option<Place>,
}

/// A range of a mapped file.
pub struct Place {
    /// The file.
    pub map: Map,
    /// The range.
    pub range: Range<usize>,
}

impl Checkpoint for Gguf {
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
        Ok(Tensor { dtype, place: Some(Place { map, range: start..start + bytes.len() }), bytes })
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
