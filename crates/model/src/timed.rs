//! A backend that keeps time: each operation is a lap of a [`Stopwatch`], beside what it computes.
//!
//! The forward pass is compiled once with it and once without, so that who does not ask for times has no instruction
//! more.

use crate::backend::{Backend, Job};
use crate::batch::Batch;
use crate::kv::KvCache;
use crate::timings::{Phase, Stopwatch};
use crate::weights::Norm;
use puna_kernels::ops::{Activation, RopeTable, Routing};
use puna_kernels::{Acts, Attention, DType, MatrixSource};

/// A backend with a stopwatch.
pub struct Timed<'a, B> {
    /// What computes.
    pub inner: &'a B,
    /// What measures.
    pub watch: &'a Stopwatch,
}

impl<B: Backend> Timed<'_, B> {
    /// Where an operation belongs to the phase before it.
    fn again(&self, f: impl FnOnce(&B)) {
        f(self.inner);
        self.watch.lap_again();
    }

    fn time(&self, phase: Phase, f: impl FnOnce(&B)) {
        f(self.inner);
        self.watch.lap(phase);
    }
}

impl<B: Backend> Backend for Timed<'_, B> {
    type Matrix = B::Matrix;

    fn matrix(&self, source: MatrixSource) -> B::Matrix {
        self.inner.matrix(source)
    }
    fn table(&self, source: MatrixSource) -> B::Matrix {
        self.inner.table(source)
    }
    fn owned(&self, dtype: DType, shape: [usize; 2], bytes: Vec<u8>) -> B::Matrix {
        self.inner.owned(dtype, shape, bytes)
    }
    fn waited_for_experts(&self, bytes: u64) {
        self.watch.lap(Phase::ExpertReads);
        self.watch.read(Phase::ExpertReads, bytes);
    }
    fn disown(&self, matrix: B::Matrix) -> Vec<u8> {
        self.inner.disown(matrix)
    }
    fn copies(&self, matrix: &B::Matrix) -> bool {
        self.inner.copies(matrix)
    }
    fn describe(&self, matrix: &B::Matrix) -> (usize, usize, usize) {
        self.inner.describe(matrix)
    }
    fn read_bandwidth(&self) -> Option<f64> {
        self.inner.read_bandwidth()
    }
    fn embed(&self, table: &B::Matrix, batch: &Batch, scale: f32, out: &mut Acts) {
        self.time(Phase::Embed, |b| b.embed(table, batch, scale, out));
        let (rows, _, bytes) = self.inner.describe(table);
        self.watch.read(Phase::Embed, (bytes / rows.max(1) * batch.rows.len()) as u64);
    }
    fn add_deepstack(&self, x: &mut Acts, batch: &Batch, layer: usize) {
        self.time(Phase::Embed, |b| b.add_deepstack(x, batch, layer));
    }
    fn rms_norm(&self, x: &Acts, norm: &Norm, out: &mut Acts) {
        self.time(Phase::Norm, |b| b.rms_norm(x, norm, out));
    }
    fn rms_norm_in_place(&self, x: &mut Acts, norm: &Norm) {
        self.time(Phase::Norm, |b| b.rms_norm_in_place(x, norm));
    }
    fn linear(&self, x: &mut Acts, jobs: &mut [Job<B::Matrix>]) {
        let Some(phase) = jobs.first().map(|job| job.linear.phase) else { return };
        self.time(phase, |b| b.linear(x, jobs));
        let read = jobs.iter().filter(|job| !job.out.is_empty());
        self.watch.read(phase, read.map(|job| self.inner.describe(&job.linear.weight).2 as u64).sum());
    }
    fn rope(&self, x: &mut Acts, n_heads: usize, table: &RopeTable) {
        self.time(Phase::Rope, |b| b.rope(x, n_heads, table));
    }
    fn kv_store(&self, kv: &mut KvCache, layer: usize, k: &Acts, v: &Acts) {
        self.time(Phase::Attention, |b| b.kv_store(kv, layer, k, v));
    }
    fn attention(&self, op: &Attention, kv: &mut KvCache, layer: usize, q: &mut Acts, out: &mut Acts) {
        self.time(Phase::Attention, |b| b.attention(op, kv, layer, q, out));
    }
    fn glu(&self, activation: Activation, gate: &[f32], up: &[f32], out: &mut Acts) {
        self.time(Phase::Ffn, |b| b.glu(activation, gate, up, out));
    }
    fn add(&self, x: &mut Acts, h: &Acts, scale: f32) {
        self.again(|b| b.add(x, h, scale));
    }
    fn route(
        &self,
        routing: &Routing,
        logits: &mut [f32],
        correction: Option<&[f32]>,
        ids: &mut [u32],
        weights: &mut [f32],
    ) {
        self.time(Phase::Router, |b| b.route(routing, logits, correction, ids, weights));
    }
    fn weighted_sum(&self, y: &[f32], slots: &[u32], weights: &[f32], out: &mut Acts) {
        self.time(Phase::Ffn, |b| b.weighted_sum(y, slots, weights, out));
    }
    fn add_gated(&self, out: &mut Acts, h: &Acts, gate: Option<&[f32]>) {
        self.time(Phase::Ffn, |b| b.add_gated(out, h, gate));
    }
    fn select(&self, x: &Acts, rows: &[u32], out: &mut Acts) {
        self.again(|b| b.select(x, rows, out));
    }
    fn finish_logits(&self, x: &mut Acts, scale: f32, cap: Option<f32>) {
        self.time(Phase::Head, |b| b.finish_logits(x, scale, cap));
    }
}
