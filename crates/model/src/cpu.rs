//! The CPU: packed weights, quantized activations, every core.

use crate::backend::{Backend, Job, MAX_JOBS};
use crate::batch::{Batch, Row};
use crate::kv::KvCache;
use crate::weights::Norm;
use arrayvec::ArrayVec;
use puna_kernels::ops::{self, Activation, RopeTable, Routing};
use puna_kernels::{
    Acts, Attention, DType, Exec, Isa, KvType, Matrix, MatrixSource, Product, attention, kv_store, matmul, roof,
};

/// The processor's cores.
pub struct Cpu {
    exec: Exec,
    pack: bool,
}

impl Cpu {
    /// Threads of the given level. `pack`: rearrange weights for speed as they are loaded.
    pub fn new(isa: Isa, threads: usize, pack: bool) -> Cpu {
        Cpu { exec: Exec::new(isa, threads), pack }
    }

    /// What it runs on.
    pub fn exec(&self) -> &Exec {
        &self.exec
    }
}

impl Backend for Cpu {
    type Matrix = Matrix;

    fn matrix(&self, source: MatrixSource) -> Matrix {
        Matrix::new(&self.exec, source, self.pack)
    }

    fn table(&self, source: MatrixSource) -> Matrix {
        Matrix::new(&self.exec, source, false)
    }

    fn owned(&self, dtype: DType, shape: [usize; 2], bytes: Vec<u8>) -> Matrix {
        Matrix::owned(dtype, shape, bytes, self.pack)
    }

    fn disown(&self, matrix: Matrix) -> Vec<u8> {
        matrix.into_bytes()
    }

    fn copies(&self, matrix: &Matrix) -> bool {
        matrix.is_packed()
    }

    fn describe(&self, matrix: &Matrix) -> (usize, usize, usize) {
        (matrix.rows(), matrix.cols(), matrix.bytes())
    }

    fn read_bandwidth(&self) -> Option<f64> {
        Some(roof::read_bandwidth(&self.exec))
    }

    fn embed(&self, table: &Matrix, batch: &Batch, scale: f32, out: &mut Acts) {
        let dim = table.cols();
        out.resize(batch.rows.len(), dim);
        for (row, out) in batch.rows.iter().zip(out.values_mut().chunks_exact_mut(dim)) {
            match *row {
                Row::Token(id) => {
                    table.row(id as usize, out);
                    ops::scale(&self.exec, out, scale);
                }
                Row::Embed(i) => out.copy_from_slice(&batch.embeds[i as usize * dim..][..dim]),
            }
        }
    }

    fn rms_norm(&self, x: &Acts, norm: &Norm, out: &mut Acts) {
        out.resize(x.rows(), x.cols());
        ops::rms_norm(&self.exec, x.values(), &norm.weight, norm.eps, out.values_mut());
    }

    fn rms_norm_in_place(&self, x: &mut Acts, norm: &Norm) {
        ops::rms_norm_in_place(&self.exec, x.values_mut(), &norm.weight, norm.eps);
    }

    fn linear(&self, x: &mut Acts, jobs: &mut [Job<Matrix>]) {
        if jobs.iter().any(|job| job.linear.weight.dtype().format().arith.is_integer()) {
            x.quantize(&self.exec);
        }
        let acts = &*x;
        let mut products: ArrayVec<Product, MAX_JOBS> = jobs
            .iter_mut()
            .map(|job| Product {
                weight: &job.linear.weight,
                bias: job.linear.bias.as_deref(),
                acts,
                gather: job.gather,
                out: job.out,
            })
            .collect();
        matmul(&self.exec, &mut products);
    }

    fn rope(&self, x: &mut Acts, n_heads: usize, table: &RopeTable) {
        let head_dim = x.cols() / n_heads;
        ops::rope(&self.exec, x.values_mut(), n_heads, head_dim, table);
    }

    fn kv_store(&self, kv: &mut KvCache, layer: usize, k: &Acts, v: &Acts) {
        let (blocks, layer, plan) = kv.layer(layer);
        kv_store(&self.exec, blocks, layer, plan, k.values(), v.values());
    }

    fn attention(&self, op: &Attention, kv: &mut KvCache, layer: usize, q: &mut Acts, out: &mut Acts) {
        out.resize(q.rows(), q.cols());
        if kv.kind() == KvType::Q8_0 {
            q.quantize(&self.exec);
        }
        let (view, scratch) = kv.view(layer);
        attention(&self.exec, op, view, q, out.values_mut(), scratch);
    }

    fn glu(&self, activation: Activation, gate: &[f32], up: &[f32], out: &mut Acts) {
        ops::glu(&self.exec, activation, gate, up, out.values_mut());
    }

    fn add(&self, x: &mut Acts, h: &Acts, scale: f32) {
        ops::add_scaled(&self.exec, x.values_mut(), h.values(), scale);
    }

    fn route(
        &self,
        routing: &Routing,
        logits: &mut [f32],
        correction: Option<&[f32]>,
        ids: &mut [u32],
        weights: &mut [f32],
    ) {
        ops::route(&self.exec, routing, logits, correction, ids, weights);
    }

    fn weighted_sum(&self, y: &[f32], slots: &[u32], weights: &[f32], out: &mut Acts) {
        ops::weighted_sum(&self.exec, y, out.cols(), slots, weights, out.values_mut());
    }

    fn add_gated(&self, out: &mut Acts, h: &Acts, gate: Option<&[f32]>) {
        ops::add_gated(&self.exec, out.values_mut(), h.values(), gate);
    }

    fn select(&self, x: &Acts, rows: &[u32], out: &mut Acts) {
        let dim = x.cols();
        out.resize(rows.len(), dim);
        for (row, out) in rows.iter().zip(out.values_mut().chunks_exact_mut(dim)) {
            out.copy_from_slice(&x.values()[*row as usize * dim..][..dim]);
        }
    }

    fn finish_logits(&self, x: &mut Acts, scale: f32, cap: Option<f32>) {
        ops::scale(&self.exec, x.values_mut(), scale);
        if let Some(cap) = cap {
            ops::softcap(&self.exec, x.values_mut(), cap);
        }
    }
}
