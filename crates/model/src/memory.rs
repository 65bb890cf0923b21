//! A model whose configuration and tensors are in memory already.

use crate::arch::{self, Arch};
use crate::checkpoint::{Checkpoint, Data, Tensor};
use crate::config::Config;
use crate::error::Error;
use bytes::Bytes;
use indexmap::IndexMap;
use puna_kernels::DType;
use std::path::Path;

/// A configuration, and tensors under GGUF's names (`blk.0.attn_q.weight`, `token_embd.weight`, ..), which
/// docs/architecture.md lists. The model is loaded from it as from a file; weights that are not packed stay shared.
///
/// ```
/// use puna_model::{Config, LoadOptions, MemoryCheckpoint, Model};
///
/// fn build(config: Config, weights: Vec<(String, Vec<usize>, Vec<f32>)>) -> Result<Model, puna_model::Error> {
///     let mut checkpoint = MemoryCheckpoint::new(config);
///     for (name, shape, values) in weights {
///         checkpoint.insert_f32(&name, &shape, &values)?;
///     }
///     Model::load(&checkpoint, &LoadOptions::default(), &mut |_, _| {})
/// }
/// ```
pub struct MemoryCheckpoint {
    config: Config,
    /// Rows of q and k are in the order that GGUF files of the architecture have; otherwise, the default, halves pair,
    /// as in every Hugging Face checkpoint. They differ for `llama` and what is derived from it.
    pub gguf_order: bool,
    tensors: IndexMap<String, Stored>,
}

struct Stored {
    dtype: DType,
    shape: Vec<usize>,
    bytes: Bytes,
}

impl MemoryCheckpoint {
    /// A model without tensors.
    pub fn new(config: Config) -> MemoryCheckpoint {
        MemoryCheckpoint { config, gguf_order: false, tensors: IndexMap::new() }
    }

    /// Adds a tensor, or replaces the one of that name. `shape`: outermost dimension first; `bytes`: rows of whole
    /// blocks, one after the other.
    ///
    /// # Errors
    /// [`Error::Tensor`] when rows are no whole blocks of the format, or the bytes are not those of the shape.
    pub fn insert(&mut self, name: &str, dtype: DType, shape: &[usize], bytes: Bytes) -> Result<(), Error> {
        let error = |what: String| Err(Error::tensor(Path::new(MEMORY), name, what));
        let [rows @ .., cols] = shape else { return error("expected at least one dimension, found none".into()) };
        let Some(row_bytes) = dtype.row_bytes(*cols) else {
            return error(format!("row length {cols} is not a whole number of {} blocks", dtype.name()));
        };
        let expected = rows.iter().try_fold(row_bytes, |n, &rows| n.checked_mul(rows));
        if expected != Some(bytes.len()) || bytes.is_empty() {
            let (found, name) = (bytes.len(), dtype.name());
            let expected = expected.map_or("more than there can be".into(), |n| n.to_string());
            return error(format!("expected {expected} bytes for shape {shape:?} of {name}, found {found}"));
        }
        self.tensors.insert(name.to_owned(), Stored { dtype, shape: shape.to_vec(), bytes });
        Ok(())
    }

    /// Adds a tensor in single precision.
    ///
    /// # Errors
    /// As [`MemoryCheckpoint::insert`].
    pub fn insert_f32(&mut self, name: &str, shape: &[usize], values: &[f32]) -> Result<(), Error> {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.insert(name, DType::F32, shape, bytes.into())
    }
}

/// Stands for the file in messages.
const MEMORY: &str = "model in memory";

impl Checkpoint for MemoryCheckpoint {
    fn config(&self) -> Result<(&'static Arch, Config), Error> {
        let arch = arch::find(self.config.arch)
            .ok_or_else(|| Error::Config { what: format!("architecture '{}' is not supported", self.config.arch) })?;
        self.config.check()?;
        Ok((arch, self.config.clone()))
    }

    fn is_gguf(&self) -> bool {
        self.gguf_order
    }

    fn check(&self) -> Result<(), Error> {
        Ok(())
    }

    fn names(&self) -> Vec<String> {
        self.tensors.keys().cloned().collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        Some(self.tensors.get(name)?.shape.clone())
    }

    fn tensor(&self, name: &str) -> Result<Tensor, Error> {
        let stored = self.tensors.get(name).ok_or_else(|| self.missing(name))?;
        Ok(Tensor { dtype: stored.dtype, data: Data::Stored(stored.bytes.clone()), place: None })
    }

    fn error(&self, name: &str, what: String) -> Error {
        Error::tensor(Path::new(MEMORY), name, what)
    }

    fn missing(&self, name: &str) -> Error {
        Error::tensor(Path::new(MEMORY), name, "missing: no such tensor was inserted")
    }
}
