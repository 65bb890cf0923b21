//! What a forward pass asks of a device: a few coarse operations on rows of activations.
//!
//! There are two: [`Cpu`](crate::cpu::Cpu), and [`Reference`](crate::reference::Reference), which computes the same
//! from f32 weights with plain loops and is what the other is compared with.

use crate::batch::{Batch, Row};
use crate::kv::KvCache;
use crate::weights::{Linear, Norm};
use bytes::Bytes;
use puna_kernels::ops::{Activation, RopeTable, Routing};
use puna_kernels::{Acts, Attention, DType, MatrixSource};

/// Rows (or some of them) by one matrix.
pub struct Job<'a, M> {
    /// Weight and bias.
    pub linear: &'a Linear<M>,
    /// Rows of the input, one for each row of the output; `None`: all of them.
    pub gather: Option<&'a [u32]>,
    /// `[rows, weight rows]`.
    pub out: &'a mut [f32],
}

/// At most so many jobs in one call of [`Backend::linear`].
pub const MAX_JOBS: usize = 32;

/// Operations on rows of activations.
pub trait Backend {
    /// A weight matrix in the device's form.
    type Matrix: Send + Sync;

    /// Takes a matrix as the file stores it.
    fn matrix(&self, source: MatrixSource) -> Self::Matrix;
    /// Takes a matrix of which only some rows are read, and which is never multiplied with.
    fn table(&self, source: MatrixSource) -> Self::Matrix {
        self.matrix(source)
    }
    /// Takes a matrix `[rows, cols]` in memory that [`Backend::disown`] gives back, where the device computes from
    /// it. It has room for whole panels ([`puna_kernels::packed_bytes`]), and is packed where the device packs.
    fn owned(&self, dtype: DType, [rows, cols]: [usize; 2], bytes: Vec<u8>) -> Self::Matrix {
        let stored = rows * dtype.row_bytes(cols).unwrap_or(0);
        self.matrix(MatrixSource { dtype, rows, cols, bytes: Bytes::from(bytes).slice(..stored), order: None })
    }
    /// The memory of a matrix that it owned.
    fn disown(&self, _matrix: Self::Matrix) -> Vec<u8> {
        Vec::new()
    }
    /// Says that experts were waited for until now, and how many bytes of them came since the last time: for those who
    /// measure.
    fn waited_for_experts(&self, _bytes: u64) {}
    /// Whether the matrix no longer reads the bytes it was made from.
    fn copies(&self, matrix: &Self::Matrix) -> bool;
    /// Shape and bytes of a matrix: rows, columns, bytes that a product reads.
    fn describe(&self, matrix: &Self::Matrix) -> (usize, usize, usize);
    /// Bytes a second that it reads from memory at best, measured, which takes a third of a second; `None` where nobody
    /// asks how fast it is.
    fn read_bandwidth(&self) -> Option<f64> {
        None
    }

    /// `out[i]` = the embedding of row i: a row of `table` times `scale`, or one of the batch's own embeddings.
    fn embed(&self, table: &Self::Matrix, batch: &Batch, scale: f32, out: &mut Acts);
    /// Adds the batch's deepstack rows of layer `layer` to the rows of their embeddings.
    fn add_deepstack(&self, x: &mut Acts, batch: &Batch, layer: usize) {
        let dim = x.cols();
        let n = batch.embeds.len() / dim;
        for (row, x) in batch.rows.iter().zip(x.values_mut().chunks_exact_mut(dim)) {
            if let Row::Embed(i) = *row {
                let more = &batch.deepstack[(layer * n + i as usize) * dim..][..dim];
                x.iter_mut().zip(more).for_each(|(x, m)| *x += m);
            }
        }
    }
    /// `out` = the norm of each row.
    fn rms_norm(&self, x: &Acts, norm: &Norm, out: &mut Acts);
    /// The norm of each run of `norm.weight.len()` elements, in place.
    fn rms_norm_in_place(&self, x: &mut Acts, norm: &Norm);
    /// Each job's `out = x W^T + b`; the input may get an inner form that jobs share.
    fn linear(&self, x: &mut Acts, jobs: &mut [Job<Self::Matrix>]);
    /// Rotates every head of every row.
    fn rope(&self, x: &mut Acts, n_heads: usize, table: &RopeTable);
    /// Keeps the keys and values of the batch's rows.
    fn kv_store(&self, kv: &mut KvCache, layer: usize, k: &Acts, v: &Acts);
    /// Attention of the batch's rows over their sequences.
    fn attention(&self, op: &Attention, kv: &mut KvCache, layer: usize, q: &mut Acts, out: &mut Acts);
    /// `out = activation(gate) * up`.
    fn glu(&self, activation: Activation, gate: &[f32], up: &[f32], out: &mut Acts);
    /// `x += h * scale`.
    fn add(&self, x: &mut Acts, h: &Acts, scale: f32);
    /// Chooses experts: see [`puna_kernels::ops::route`].
    fn route(
        &self,
        routing: &Routing,
        logits: &mut [f32],
        correction: Option<&[f32]>,
        ids: &mut [u32],
        weights: &mut [f32],
    );
    /// `out[row]` = the sum of `weights[row, k] * y[slots[row, k]]` in the order of k.
    fn weighted_sum(&self, y: &[f32], slots: &[u32], weights: &[f32], out: &mut Acts);
    /// `out[row] += h[row] * sigmoid(gate[row])`, or plainly added without gates.
    fn add_gated(&self, out: &mut Acts, h: &Acts, gate: Option<&[f32]>);
    /// `out` = the given rows of `x`.
    fn select(&self, x: &Acts, rows: &[u32], out: &mut Acts);
    /// `x = cap * tanh(x * scale / cap)`, or `x * scale` without a cap.
    fn finish_logits(&self, x: &mut Acts, scale: f32, cap: Option<f32>);
}
