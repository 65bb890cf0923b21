//! The reference: every operation as its definition says, one number after the other, weights in single precision,
//! sums in double. Slow on purpose.

use crate::backend::{Backend, Job};
use crate::batch::{Batch, Row};
use crate::kv::KvCache;
use crate::weights::Norm;
use puna_kernels::ops::{Activation, RopeTable, Routing};
use puna_kernels::{Acts, Attention, KV_BLOCK, MatrixSource, kv_store};
use puna_kernels::{Exec, Isa};

/// Plain loops.
pub struct Reference;

/// A matrix in single precision, `[rows, cols]`.
pub struct Plain {
    rows: usize,
    cols: usize,
    w: Vec<f32>,
}

fn norm(x: &[f32], norm: &Norm, out: &mut [f32]) {
    let width = norm.weight.len();
    for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
        let sum: f64 = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
        let scale = 1.0 / (sum / width as f64 + f64::from(norm.eps)).sqrt();
        for ((o, x), w) in out.iter_mut().zip(x).zip(&norm.weight) {
            *o = (f64::from(*x) * scale * f64::from(*w)) as f32;
        }
    }
}

fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Gelu => 0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2)),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
    }
}

/// By its Taylor series, which converges for every x and is accurate where erf is not yet 1.
fn erf(x: f64) -> f64 {
    if x.abs() > 5.5 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..150 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
}

impl Backend for Reference {
    type Matrix = Plain;

    fn matrix(&self, source: MatrixSource) -> Plain {
        let MatrixSource { dtype, rows, cols, bytes, order } = source;
        let mut stored = vec![0.0; rows * cols];
        (dtype.format().dequantize)(&bytes, &mut stored);
        let w = match order {
            Some(order) => order.iter().flat_map(|&r| stored[r as usize * cols..][..cols].to_vec()).collect(),
            None => stored,
        };
        Plain { rows, cols, w }
    }

    fn copies(&self, _: &Plain) -> bool {
        true
    }

    fn describe(&self, m: &Plain) -> (usize, usize, usize) {
        (m.rows, m.cols, m.w.len() * 4)
    }

    fn embed(&self, table: &Plain, batch: &Batch, scale: f32, out: &mut Acts) {
        let dim = table.cols;
        out.resize(batch.rows.len(), dim);
        for (row, out) in batch.rows.iter().zip(out.values_mut().chunks_exact_mut(dim)) {
            match *row {
                Row::Token(id) => {
                    for (o, w) in out.iter_mut().zip(&table.w[id as usize * dim..]) {
                        *o = w * scale;
                    }
                }
                Row::Embed(i) => out.copy_from_slice(&batch.embeds[i as usize * dim..][..dim]),
            }
        }
    }

    fn rms_norm(&self, x: &Acts, n: &Norm, out: &mut Acts) {
        out.resize(x.rows(), x.cols());
        norm(x.values(), n, out.values_mut());
    }

    fn rms_norm_in_place(&self, x: &mut Acts, n: &Norm) {
        let copy = x.values().to_vec();
        norm(&copy, n, x.values_mut());
    }

    fn linear(&self, x: &mut Acts, jobs: &mut [Job<Plain>]) {
        for job in jobs {
            let m = &job.linear.weight;
            let all: Vec<u32> = (0..x.rows() as u32).collect();
            for (i, &row) in job.gather.unwrap_or(&all).iter().enumerate() {
                let x = &x.values()[row as usize * m.cols..][..m.cols];
                for r in 0..m.rows {
                    let w = &m.w[r * m.cols..][..m.cols];
                    let dot: f64 = w.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
                    let bias = job.linear.bias.as_ref().map_or(0.0, |b| f64::from(b[r]));
                    job.out[i * m.rows + r] = (dot + bias) as f32;
                }
            }
        }
    }

    fn rope(&self, x: &mut Acts, n_heads: usize, table: &RopeTable) {
        let (head_dim, half) = (x.cols() / n_heads, table.half);
        for (i, head) in x.values_mut().chunks_exact_mut(head_dim).enumerate() {
            for j in 0..half {
                let at = i / n_heads * half + j;
                let (cos, sin) = (f64::from(table.cos[at]), f64::from(table.sin[at]));
                let (a, b) = (f64::from(head[j]), f64::from(head[j + half]));
                head[j] = (a * cos - b * sin) as f32;
                head[j + half] = (b * cos + a * sin) as f32;
            }
        }
    }

    fn kv_store(&self, kv: &mut KvCache, layer: usize, k: &Acts, v: &Acts) {
        // What the cache holds is part of the definition, so it is written by the same code.
        let (blocks, layer, plan) = kv.layer(layer);
        kv_store(&Exec::new(Isa::Scalar, 1), blocks, layer, plan, k.values(), v.values());
    }

    fn attention(&self, op: &Attention, kv: &mut KvCache, layer: usize, q: &mut Acts, out: &mut Acts) {
        let (blocks, layer, plan) = kv.layer(layer);
        let dim = layer.layout.head_dim;
        let group = op.n_heads / layer.layout.n_kv_heads;
        out.resize(q.rows(), q.cols());
        let (mut k, mut v) = (vec![0.0; dim], vec![0.0; dim]);
        for span in &plan.spans {
            for (i, head) in (0..span.rows).flat_map(|i| (0..op.n_heads).map(move |h| (i, h))) {
                let at = ((span.row + i) * op.n_heads + head) * dim;
                let q = &q.values()[at..at + dim];
                let pos = span.past + i;
                let first = op.window.map_or(0, |w| (pos + 1).saturating_sub(w));
                let mut scores = Vec::new();
                let mut values = Vec::new();
                for p in first..=pos {
                    let block = plan.tables[span.table + p / KV_BLOCK - span.first_block];
                    layer.read(blocks, (block, p % KV_BLOCK), head / group, &mut k, &mut v);
                    let dot: f64 = q.iter().zip(&k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
                    let score = dot * f64::from(op.scale);
                    scores.push(op.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh()));
                    values.push(v.clone());
                }
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for d in 0..dim {
                    let o: f64 = weights.iter().zip(&values).map(|(w, v)| w * f64::from(v[d])).sum();
                    out.values_mut()[at + d] = (o / sum) as f32;
                }
            }
        }
    }

    fn glu(&self, activation: Activation, gate: &[f32], up: &[f32], out: &mut Acts) {
        for ((o, &g), &u) in out.values_mut().iter_mut().zip(gate).zip(up) {
            *o = (activate(activation, f64::from(g)) * f64::from(u)) as f32;
        }
    }

    fn add(&self, x: &mut Acts, h: &Acts, scale: f32) {
        for (x, &h) in x.values_mut().iter_mut().zip(h.values()) {
            *x += h * scale;
        }
    }

    fn route(
        &self,
        routing: &Routing,
        logits: &mut [f32],
        correction: Option<&[f32]>,
        ids: &mut [u32],
        weights: &mut [f32],
    ) {
        let used = routing.used;
        let rows = ids.len() / used;
        let n = logits.len() / rows.max(1);
        for row in 0..rows {
            let logits: Vec<f64> = logits[row * n..][..n].iter().map(|&x| f64::from(x)).collect();
            let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = logits.iter().map(|x| (x - max).exp()).sum();
            let score = |x: f64| if routing.sigmoid { 1.0 / (1.0 + (-x).exp()) } else { (x - max).exp() / sum };
            let scores: Vec<f64> = logits.into_iter().map(score).collect();
            let mut order: Vec<usize> = (0..n).collect();
            let key = |e: usize| scores[e] + correction.map_or(0.0, |c| f64::from(c[e]));
            order.sort_by(|&a, &b| key(b).total_cmp(&key(a)).then(a.cmp(&b)));
            let chosen: f64 = order[..used].iter().map(|&e| scores[e]).sum();
            let factor = f64::from(routing.scale) / if routing.normalize { chosen } else { 1.0 };
            for (k, &e) in order[..used].iter().enumerate() {
                ids[row * used + k] = e as u32;
                weights[row * used + k] = (scores[e] * factor) as f32;
            }
        }
    }

    fn weighted_sum(&self, y: &[f32], slots: &[u32], weights: &[f32], out: &mut Acts) {
        let width = out.cols();
        let used = slots.len() / out.rows().max(1);
        for (row, out) in out.values_mut().chunks_exact_mut(width).enumerate() {
            for (d, o) in out.iter_mut().enumerate() {
                let term = |k: usize| {
                    let slot = slots[row * used + k] as usize;
                    f64::from(weights[row * used + k]) * f64::from(y[slot * width + d])
                };
                *o = (0..used).map(term).sum::<f64>() as f32;
            }
        }
    }

    fn add_gated(&self, out: &mut Acts, h: &Acts, gate: Option<&[f32]>) {
        let width = out.cols();
        for (i, (o, &h)) in out.values_mut().iter_mut().zip(h.values()).enumerate() {
            let scale = gate.map_or(1.0, |gate| 1.0 / (1.0 + (-f64::from(gate[i / width])).exp()));
            *o = (f64::from(*o) + f64::from(h) * scale) as f32;
        }
    }

    fn select(&self, x: &Acts, rows: &[u32], out: &mut Acts) {
        let dim = x.cols();
        out.resize(rows.len(), dim);
        for (row, out) in rows.iter().zip(out.values_mut().chunks_exact_mut(dim)) {
            out.copy_from_slice(&x.values()[*row as usize * dim..][..dim]);
        }
    }

    fn finish_logits(&self, x: &mut Acts, scale: f32, cap: Option<f32>) {
        for x in x.values_mut() {
            *x *= scale;
            if let Some(cap) = cap {
                *x = (f64::from(cap) * (f64::from(*x) / f64::from(cap)).tanh()) as f32;
            }
        }
    }
}
