//! Where experts are in their files, found when a model is loaded.

use super::ExpertStats;
use super::reader::{Part, Piece};
use crate::bind::Found;
use crate::checkpoint::Data;
use crate::config::Config;
use crate::error::Error;
use crate::map::Opened;
use crate::weights::{Dense, Ffn, Linear, Weights};
use arrayvec::ArrayVec;
use puna_kernels::{DType, packed_bytes};
use std::sync::Arc;

/// What an [`ExpertStream`](super::ExpertStream) is made from.
pub struct Plan {
    /// Files and their lengths.
    pub files: Vec<(Arc<Opened>, u64)>,
    /// By layer; none where a layer is dense.
    pub experts: Vec<Vec<Expert>>,
    /// Most bytes of a gate, an up and a down matrix.
    pub sizes: [usize; 3],
    /// Experts in memory.
    pub n_slots: usize,
    /// Experts that a row chooses.
    pub used: usize,
    /// Whether matrices are packed.
    pub pack: bool,
    /// Counts, at zero.
    pub stats: ExpertStats,
}

/// An expert in its files.
pub struct Expert {
    /// What is read.
    pub pieces: ArrayVec<Arc<Piece>, 3>,
    /// Gate, up and down as they are in memory.
    pub matrices: [Matrix; 3],
}

/// One of an expert's matrices.
pub struct Matrix {
    pub dtype: DType,
    pub shape: [usize; 2],
    pub bytes: usize,
    pub bias: Option<Vec<f32>>,
}

/// How experts are to be loaded.
#[derive(Clone, Copy)]
pub struct Wishes {
    /// Bytes that they may take.
    pub budget: u64,
    /// What projections that are stored as floats become.
    pub quantize: Option<DType>,
    /// Whether matrices are packed.
    pub pack: bool,
}

impl Expert {
    /// Bytes in memory.
    pub fn bytes(&self) -> usize {
        self.matrices.iter().map(|m| m.bytes).sum()
    }
}

fn matrices<M>(dense: &Dense<M>) -> [&Linear<M>; 3] {
    [&dense.gate, &dense.up, &dense.down]
}

impl Plan {
    /// Takes the experts out of bound weights, if there are any and they do not fit in the budget together.
    ///
    /// # Errors
    /// [`Error::ExpertMemory`] where two of the largest experts do not fit; [`Error::Experts`] where they cannot be read
    /// as they are needed.
    pub fn take(
        weights: &mut Weights<Found>,
        config: &Config,
        Wishes { budget, quantize, pack }: Wishes,
    ) -> Result<Option<Plan>, Error> {
        let Some(moe) = config.moe else { return Ok(None) };
        let (mut sizes, mut total) = ([0; 3], 0);
        for dense in weights.layers.iter().filter_map(|layer| layer.ffn.moe()).flat_map(|moe| &moe.experts) {
            for (size, linear) in sizes.iter_mut().zip(matrices(dense)) {
                let found = &linear.weight;
                *size = packed_bytes(found.rows, found.row_bytes).max(*size);
                total += found.bytes();
            }
        }
        if total <= budget {
            return Ok(None);
        }
        let slot = sizes.iter().map(|&size| size as u64).sum::<u64>().max(1);
        if budget / slot < 2 {
            return Err(Error::ExpertMemory { bytes: budget, needed: 2 * slot });
        }
        let mut files = Vec::new();
        let mut experts = Vec::new();
        for layer in &mut weights.layers {
            experts.push(match &mut layer.ffn {
                Ffn::Moe(moe) => {
                    let all = std::mem::take(&mut moe.experts).into_iter();
                    all.map(|dense| expert(dense, quantize, &mut files)).collect::<Result<_, _>>()?
                }
                Ffn::Dense(_) => Vec::new(),
            });
        }
        let n: usize = experts.iter().map(Vec::len).sum();
        let n_slots = usize::try_from(budget / slot).unwrap_or(usize::MAX).min(n);
        let stats = ExpertStats { budget, slots: n_slots, experts: n, experts_bytes: total, ..ExpertStats::default() };
        Ok(Some(Plan { files, experts, sizes, n_slots, used: moe.routing.used, pack, stats }))
    }
}

fn expert(dense: Dense<Found>, quantize: Option<DType>, files: &mut Vec<(Arc<Opened>, u64)>) -> Result<Expert, Error> {
    let mut pieces = ArrayVec::<Piece, 3>::new();
    let mut matrix = |linear: Linear<Found>, matrix: usize| {
        let error = |what: &str| Err(Error::Experts { what: what.into() });
        let found = linear.weight;
        if quantize.is_some_and(|wish| found.target(wish).is_some()) {
            return error(
                "they would have to be quantized each time they are read; convert the model in place of that",
            );
        }
        let Found { dtype, rows, cols, row_bytes, data, place, .. } = found;
        let Some((file, place)) = place.as_ref().and_then(|place| Some((place.map.file()?, place))) else {
            return error("the model is in memory and not in files");
        };
        let at_file = files.iter().position(|(known, _)| Arc::ptr_eq(known, file)).unwrap_or_else(|| {
            files.push((file.clone(), place.map.len() as u64));
            files.len() - 1
        });
        let made = match data {
            Data::Stored(_) => None,
            Data::Made(rows, range) => Some((rows, range)),
        };
        let part = Part { matrix, dtype, rows, row_bytes, made };
        let (at, len) = (place.range.start as u64, place.range.len());
        match pieces.iter_mut().find(|p| (p.file, p.at, p.bytes) == (at_file, at, len)) {
            Some(piece) => piece.parts.push(part),
            None => {
                let (map, parts) = (place.map.clone(), ArrayVec::from_iter([part]));
                pieces.push(Piece { file: at_file, map, at, bytes: len, parts });
            }
        }
        Ok(Matrix { dtype, shape: [rows, cols], bytes: rows * row_bytes, bias: linear.bias })
    };
    let matrices = [matrix(dense.gate, 0)?, matrix(dense.up, 1)?, matrix(dense.down, 2)?];
    Ok(Expert { pieces: pieces.into_iter().map(Arc::new).collect(), matrices })
}
