//! A backend that keeps time: how long each operation took, beside what it computes.

use crate::backend::{Backend, Job};
use crate::batch::Batch;
use crate::kv::KvCache;
use crate::weights::Norm;
use puna_kernels::ops::{Activation, RopeTable, Routing};
use puna_kernels::{Acts, Attention, DType, MatrixSource};
use std::cell::RefCell;
use std::time::{Duration, Instant};

/// Time and calls of each kind of operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Profile(Vec<(&'static str, Duration, u64)>);

impl Profile {
    /// Operation, time, calls; the longest first.
    pub fn phases(&self) -> Vec<(&'static str, Duration, u64)> {
        let mut phases = self.0.clone();
        phases.sort_by_key(|p| std::cmp::Reverse(p.1));
        phases
    }

    fn add(&mut self, name: &'static str, time: Duration) {
        match self.0.iter_mut().find(|p| p.0 == name) {
            Some(phase) => {
                phase.1 += time;
                phase.2 += 1;
            }
            None => self.0.push((name, time, 1)),
        }
    }
}

/// A backend with a clock.
pub struct Timed<B> {
    inner: B,
    profile: RefCell<Profile>,
}

impl<B> Timed<B> {
    /// With a clock at zero.
    pub fn new(inner: B) -> Timed<B> {
        Timed { inner, profile: RefCell::default() }
    }

    /// What was measured since the last call.
    pub fn take(&self) -> Profile {
        self.profile.take()
    }

    fn time<T>(&self, name: &'static str, f: impl FnOnce(&B) -> T) -> T {
        let start = Instant::now();
        let result = f(&self.inner);
        self.profile.borrow_mut().add(name, start.elapsed());
        result
    }
}

impl<B: Backend> Backend for Timed<B> {
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
    fn disown(&self, matrix: B::Matrix) -> Vec<u8> {
        self.inner.disown(matrix)
    }
    fn copies(&self, matrix: &B::Matrix) -> bool {
        self.inner.copies(matrix)
    }
    fn describe(&self, matrix: &B::Matrix) -> (usize, usize, usize) {
        self.inner.describe(matrix)
    }
    fn embed(&self, table: &B::Matrix, batch: &Batch, scale: f32, out: &mut Acts) {
        self.time("embed", |b| b.embed(table, batch, scale, out));
    }
    fn add_deepstack(&self, x: &mut Acts, batch: &Batch, layer: usize) {
        self.time("embed", |b| b.add_deepstack(x, batch, layer));
    }
    fn rms_norm(&self, x: &Acts, norm: &Norm, out: &mut Acts) {
        self.time("norm", |b| b.rms_norm(x, norm, out));
    }
    fn rms_norm_in_place(&self, x: &mut Acts, norm: &Norm) {
        self.time("norm", |b| b.rms_norm_in_place(x, norm));
    }
    fn linear(&self, x: &mut Acts, jobs: &mut [Job<B::Matrix>]) {
        self.time("linear", |b| b.linear(x, jobs));
    }
    fn rope(&self, x: &mut Acts, n_heads: usize, table: &RopeTable) {
        self.time("rope", |b| b.rope(x, n_heads, table));
    }
    fn kv_store(&self, kv: &mut KvCache, layer: usize, k: &Acts, v: &Acts) {
        self.time("kv store", |b| b.kv_store(kv, layer, k, v));
    }
    fn attention(&self, op: &Attention, kv: &mut KvCache, layer: usize, q: &mut Acts, out: &mut Acts) {
        self.time("attention", |b| b.attention(op, kv, layer, q, out));
    }
    fn glu(&self, activation: Activation, gate: &[f32], up: &[f32], out: &mut Acts) {
        self.time("gate", |b| b.glu(activation, gate, up, out));
    }
    fn add(&self, x: &mut Acts, h: &Acts, scale: f32) {
        self.time("add", |b| b.add(x, h, scale));
    }
    fn route(
        &self,
        routing: &Routing,
        logits: &mut [f32],
        correction: Option<&[f32]>,
        ids: &mut [u32],
        weights: &mut [f32],
    ) {
        self.time("route", |b| b.route(routing, logits, correction, ids, weights));
    }
    fn weighted_sum(&self, y: &[f32], slots: &[u32], weights: &[f32], out: &mut Acts) {
        self.time("experts' sum", |b| b.weighted_sum(y, slots, weights, out));
    }
    fn add_gated(&self, out: &mut Acts, h: &Acts, gate: Option<&[f32]>) {
        self.time("add", |b| b.add_gated(out, h, gate));
    }
    fn select(&self, x: &Acts, rows: &[u32], out: &mut Acts) {
        self.time("select", |b| b.select(x, rows, out));
    }
    fn finish_logits(&self, x: &mut Acts, scale: f32, cap: Option<f32>) {
        self.time("logits", |b| b.finish_logits(x, scale, cap));
    }
}
