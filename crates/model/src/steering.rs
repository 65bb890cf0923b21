//! Steering: directions that are added to the residual after a layer, in the form of llama.cpp and repeng.
//!
//! A control vector is a GGUF file of `general.architecture` "controlvector" with a tensor `direction.N`, `[dim]` in single
//! precision, for some layers N from 1 on; layer 0 has none. A [`Steering`] is what several of them come to, each with
//! its strength and its layers: it is added to the rows of the sequences that ask for it ([`Batch::steer`]) after layer
//! N, before deepstack rows, and is part of what blocks of the cache are known by. Other rows are not touched.

use crate::batch::Batch;
use crate::config::Config;
use crate::error::Error;
use crate::gguf::{Gguf, Header, TensorInfo, TensorType};
use puna_kernels::{Acts, DType};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

/// What a control vector's file says it is.
const ARCHITECTURE: &str = "controlvector";

/// Directions of some layers.
#[derive(Clone, Debug, PartialEq)]
pub struct ControlVector {
    path: PathBuf,
    dim: usize,
    /// By layer, from 1 on; each has `dim` finite numbers. At least one.
    directions: BTreeMap<usize, Vec<f32>>,
}

impl ControlVector {
    /// Reads a file.
    ///
    /// # Errors
    /// As [`Gguf::open`]; [`Error::Key`] if it is no control vector, [`Error::Tensor`] for a tensor that is no direction,
    /// one of layer 0, of another type or width than the first, or with a number that is not finite.
    pub fn open(path: impl AsRef<Path>) -> Result<ControlVector, Error> {
        ControlVector::from_gguf(&Gguf::open(path)?)
    }

    /// Reads a file that is open.
    ///
    /// # Errors
    /// As [`ControlVector::open`].
    pub fn from_gguf(gguf: &Gguf) -> Result<ControlVector, Error> {
        gguf.check()?;
        let arch: &str = gguf.meta().require("general.architecture")?;
        if arch != ARCHITECTURE {
            let what = format!("expected \"{ARCHITECTURE}\", found \"{}\"", crate::error::escape(arch));
            return Err(gguf.meta().error("general.architecture", what));
        }
        let mut directions = BTreeMap::new();
        for tensor in gguf.tensors() {
            let layer = layer_of(&tensor.name).map_err(|what| gguf.error(tensor, what))?;
            // 'direction.1' and 'direction.01' would be the same.
            if directions.insert(layer, direction(gguf, tensor)?).is_some() {
                return Err(gguf.error(tensor, format!("there are two directions of layer {layer}")));
            }
        }
        ControlVector::new(gguf.path(), directions)
    }

    /// Directions by layer. `path` names them in messages.
    ///
    /// # Errors
    /// [`Error::Tensor`] as [`ControlVector::open`], and when there is none.
    pub fn new(path: impl AsRef<Path>, directions: BTreeMap<usize, Vec<f32>>) -> Result<ControlVector, Error> {
        let path = path.as_ref().to_owned();
        let dim = directions.values().next().map_or(0, Vec::len);
        for (layer, values) in &directions {
            let fault = |what: String| Err(Error::tensor(&path, &name(*layer), what));
            if *layer == 0 {
                return fault(LAYER_0.into());
            }
            if values.is_empty() || values.len() != dim {
                return fault(format!(
                    "expected {} numbers as the first direction has, found {}",
                    dim.max(1),
                    values.len()
                ));
            }
            if let Some(i) = values.iter().position(|x| !x.is_finite()) {
                return fault(format!("number {i} is {}, expected a finite one", values[i]));
            }
        }
        if directions.is_empty() {
            return Err(Error::tensor(&path, "direction.1", "missing: a control vector has at least one direction"));
        }
        Ok(ControlVector { path, dim, directions })
    }

    /// Where it is from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Numbers of a direction.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Directions by layer, from 1 on.
    pub fn directions(&self) -> &BTreeMap<usize, Vec<f32>> {
        &self.directions
    }

    /// Whether it fits a model.
    ///
    /// # Errors
    /// [`Error::Tensor`] for a direction of another width than the model's, or of a layer that it does not have.
    pub fn check(&self, config: &Config) -> Result<(), Error> {
        let (dim, n_layers) = (config.dim, config.n_layers);
        for (layer, values) in &self.directions {
            let fault = |what: String| Err(Error::tensor(&self.path, &name(*layer), what));
            if values.len() != dim {
                return fault(format!("expected {dim} numbers, the width of the model, found {}", values.len()));
            }
            if *layer >= n_layers {
                return fault(format!(
                    "the model has {n_layers} layers, of which 1 to {} have directions",
                    n_layers - 1
                ));
            }
        }
        Ok(())
    }

    /// Writes it as a GGUF file that llama.cpp and others read. `model`: the architecture that it was made for.
    ///
    /// # Errors
    /// As [`Header::create`] and [`Writer`](crate::gguf::Writer).
    pub fn write(&self, path: impl AsRef<Path>, model: &str, replace: bool) -> Result<(), Error> {
        let mut header = Header::new(path);
        header.set("general.architecture", ARCHITECTURE);
        header.set("controlvector.model_hint", model);
        header.set("controlvector.layer_count", self.directions.len() as u32);
        for (layer, values) in &self.directions {
            header.tensor(&name(*layer), &[values.len()], TensorType::Weight(DType::F32))?;
        }
        let mut writer = header.create(replace)?;
        for values in self.directions.values() {
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            writer.write(&bytes)?;
        }
        writer.finish().map(|_| ())
    }
}

const LAYER_0: &str = "layer 0 has no direction: they are added after layers 1, 2, ..";

fn name(layer: usize) -> String {
    format!("direction.{layer}")
}

fn layer_of(name: &str) -> Result<usize, String> {
    match name.strip_prefix("direction.").map(str::parse) {
        Some(Ok(0)) => Err(LAYER_0.into()),
        Some(Ok(layer)) => Ok(layer),
        _ => Err("expected direction.N with the number of a layer, which is all that a control vector has".into()),
    }
}

fn direction(gguf: &Gguf, tensor: &TensorInfo) -> Result<Vec<f32>, Error> {
    if tensor.shape.len() != 1 || tensor.ty != TensorType::Weight(DType::F32) {
        let what = format!("expected one dimension of type F32, found shape {:?} of {}", tensor.shape, tensor.ty);
        return Err(gguf.error(tensor, what));
    }
    Ok(gguf.data(tensor)?.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
}

/// A control vector, and how it is applied.
#[derive(Clone, Debug)]
pub struct Part<'a> {
    /// The vector.
    pub vector: &'a ControlVector,
    /// What its directions are multiplied by; negative numbers turn them round.
    pub strength: f32,
    /// Layers whose directions count, from 1 on; `None`: all.
    pub layers: Option<RangeInclusive<usize>>,
}

/// What is added to a sequence's residual after each layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Steering {
    dim: usize,
    /// What is added after each layer, `[n_layers]`; where it is zero, nothing is.
    layers: Vec<Option<Box<[f32]>>>,
    key: Option<[u8; 32]>,
}

impl Steering {
    /// The sum of the parts, in their order: `sum = sum + strength * direction`, product and sum rounded to single
    /// precision each, from zero.
    ///
    /// # Errors
    /// [`ControlVector::check`]; [`Error::Steering`] for layers that the model does not have or the vector has no
    /// directions for, and where a strength or the sum is not finite.
    pub fn new(config: &Config, parts: &[Part]) -> Result<Steering, Error> {
        let mut sums: Vec<Option<Box<[f32]>>> = vec![None; config.n_layers];
        for part in parts {
            part.vector.check(config)?;
            let layers = part.range(config)?;
            let mut applied = part.vector.directions.range(layers.clone()).peekable();
            if applied.peek().is_none() {
                let (first, last) = layers.into_inner();
                return Err(part.error(format!("it has no direction of layers {first} to {last}")));
            }
            for (&layer, direction) in applied {
                let sum = sums[layer].get_or_insert_with(|| vec![0.0; config.dim].into());
                for (sum, x) in sum.iter_mut().zip(direction) {
                    *sum += part.strength * x;
                }
                if sum.iter().any(|x| !x.is_finite()) {
                    return Err(
                        part.error(format!("with strength {} the sum of layer {layer} is not finite", part.strength))
                    );
                }
            }
        }
        for sum in &mut sums {
            *sum = sum.take().filter(|sum| sum.iter().any(|&x| x != 0.0));
        }
        let key = key(&sums);
        Ok(Steering { dim: config.dim, layers: sums, key })
    }

    /// Whether nothing is added anywhere.
    pub fn is_empty(&self) -> bool {
        self.key.is_none()
    }

    /// What is added after a layer, `[dim]`.
    pub fn layer(&self, layer: usize) -> Option<&[f32]> {
        self.layers.get(layer)?.as_deref()
    }

    /// The hash of all that is added; `None` if nothing is.
    pub fn key(&self) -> Option<[u8; 32]> {
        self.key
    }

    /// Layers and width of the model that it was made for.
    pub fn shape(&self) -> (usize, usize) {
        (self.layers.len(), self.dim)
    }
}

impl Part<'_> {
    /// The layers that count.
    fn range(&self, config: &Config) -> Result<RangeInclusive<usize>, Error> {
        let last = config.n_layers - 1;
        if !self.strength.is_finite() {
            return Err(self.error(format!("strength {} is not finite", self.strength)));
        }
        match &self.layers {
            None => Ok(1..=last.max(1)),
            Some(layers) if *layers.start() == 0 => Err(self.error(LAYER_0.into())),
            Some(layers) if layers.is_empty() || *layers.end() > last => {
                let (first, end) = (layers.start(), layers.end());
                Err(self.error(format!("layers {first} to {end}: expected a range within 1 to {last}")))
            }
            Some(layers) => Ok(layers.clone()),
        }
    }

    fn error(&self, what: String) -> Error {
        Error::Steering { path: self.vector.path.clone(), what }
    }
}

fn key(layers: &[Option<Box<[f32]>>]) -> Option<[u8; 32]> {
    let mut hasher = blake3::Hasher::new();
    let mut is_empty = true;
    for (layer, sum) in layers.iter().enumerate() {
        let Some(sum) = sum else { continue };
        is_empty = false;
        hasher.update(&(layer as u64).to_le_bytes());
        for x in sum {
            hasher.update(&x.to_bits().to_le_bytes());
        }
    }
    (!is_empty).then(|| *hasher.finalize().as_bytes())
}

/// Adds to the rows of a batch what they are steered by after a layer. `x`: all rows, or only those that get logits.
pub(crate) fn apply(batch: &Batch, layer: usize, x: &mut Acts) {
    if batch.steering.is_empty() {
        return;
    }
    let dim = x.cols();
    let mut steered = batch.steering.iter().peekable();
    for (i, (_, rows)) in batch.spans_of(x.rows()).enumerate() {
        let Some((_, steering)) = steered.next_if(|(span, _)| *span == i) else { continue };
        let Some(direction) = steering.layer(layer) else { continue };
        for (row, _) in rows {
            let x = &mut x.values_mut()[row * dim..][..dim];
            x.iter_mut().zip(direction).for_each(|(x, d)| *x += d);
        }
    }
}
