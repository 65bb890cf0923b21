//! The forward pass: one function for every architecture. What differs is a value in [`Config`] or a part of
//! [`Weights`] that is there or not.

use crate::backend::{Backend, Job};
use crate::batch::Batch;
use crate::config::Config;
use crate::error::Error;
use crate::experts::ExpertStream;
use crate::kv::KvCache;
use crate::moe::{MoeScratch, MoeStep, Streamed};
use crate::steering;
use crate::weights::{Ffn, Weights};
use puna_kernels::ops::RopeTable;
use puna_kernels::{Acts, Attention};
use std::cell::RefCell;

/// Sees what is inside a forward pass: what capture, counts of experts and tests hang on to.
pub trait Tap {
    /// The residual `[rows, dim]` before layer `layer`; after the last one for `n_layers`.
    fn residual(&mut self, layer: usize, x: &mut Acts);
    /// The residual `[rows, dim]` as layer `layer` leaves it: steering is in, deepstack rows are not yet, and no norm was
    /// applied. After the last layer only the batch's outputs are left, `[outputs, dim]`, unless some tap or deepstack
    /// needs the others.
    fn after(&mut self, _layer: usize, _x: &Acts) {}
    /// The experts that layer `layer` chose, `[rows, used]` in the order of rank; of as many rows as [`Tap::after`] sees.
    fn experts(&mut self, _layer: usize, _ids: &[u32], _used: usize) {}
    /// The batch's outputs after the last norm, `[outputs, dim]`.
    fn hidden(&mut self, _h: &Acts) {}
    /// Whether it needs every row after the last layer, and not only those that get logits.
    fn wants_all_rows(&self) -> bool;
}

/// No tap.
impl Tap for () {
    fn residual(&mut self, _: usize, _: &mut Acts) {}
    fn wants_all_rows(&self) -> bool {
        false
    }
}

/// Every intermediate buffer, reused from step to step: after a few steps, those within the sizes of earlier ones
/// allocate nothing.
#[derive(Default)]
pub struct Scratch {
    /// Cosines and sines of the rows' positions, `[rows, half]`.
    pub(crate) cos: Vec<f32>,
    pub(crate) sin: Vec<f32>,
    x: Acts,
    /// After [`forward`]: the outputs after the last norm, `[outputs, dim]`.
    pub(crate) h: Acts,
    q: Acts,
    k: Acts,
    v: Acts,
    attn: Acts,
    gate: Acts,
    up: Acts,
    act: Acts,
    moe: MoeScratch,
    pub(crate) logits: Acts,
}

/// A model: what it is, its weights, and its experts that are not in memory.
pub(crate) type Loaded<'a, M> = (&'a Config, &'a Weights<M>, Option<&'a RefCell<ExpertStream<M>>>);

/// Computes the batch's rows, keeps their keys and values in `kv` (which has blocks for them), and leaves its outputs
/// after the last norm, `[outputs, dim]`, in the scratch.
///
/// # Errors
/// Where experts are read from files, and one cannot be: nothing that `kv` counts has changed.
pub(crate) fn forward<B: Backend>(
    b: &B,
    (c, w, experts): Loaded<B::Matrix>,
    batch: &Batch,
    kv: &mut KvCache,
    s: &mut Scratch,
    tap: &mut dyn Tap,
) -> Result<(), Error> {
    let rope = RopeTable { cos: &s.cos, sin: &s.sin, half: c.rope.half() }; // [rows, half]
    let rows = batch.rows.len();
    b.embed(&w.tok_embd.weight, batch, c.embed_scale, &mut s.x); // [rows, dim]
    for (l, layer) in w.layers.iter().enumerate() {
        tap.residual(l, &mut s.x);
        let a = &layer.attn;
        match &layer.attn_norm {
            Some(norm) => b.rms_norm(&s.x, norm, &mut s.h), // [rows, dim]
            None => s.h.copy_from(&s.x),
        }
        s.q.resize(rows, c.q_dim()); // [rows, n_heads, head_dim]
        s.k.resize(rows, c.kv_dim()); // [rows, n_kv_heads, head_dim]
        s.v.resize(rows, c.kv_dim()); // [rows, n_kv_heads, head_dim]
        b.linear(
            &mut s.h,
            &mut [
                Job { linear: &a.q, gather: None, out: s.q.values_mut() },
                Job { linear: &a.k, gather: None, out: s.k.values_mut() },
                Job { linear: &a.v, gather: None, out: s.v.values_mut() },
            ],
        );
        if let Some(norm) = &a.q_norm {
            b.rms_norm_in_place(&mut s.q, norm);
        }
        if let Some(norm) = &a.k_norm {
            b.rms_norm_in_place(&mut s.k, norm);
        }
        if c.rope_layers[l] {
            b.rope(&mut s.q, c.n_heads, &rope);
            b.rope(&mut s.k, c.n_kv_heads, &rope);
        }
        b.kv_store(kv, l, &s.k, &s.v);
        let op = Attention { n_heads: c.n_heads, scale: c.attn_scale, softcap: c.attn_softcap, window: c.windows[l] };
        b.attention(&op, kv, l, &mut s.q, &mut s.attn); // [rows, n_heads, head_dim]
        let later = tap.wants_all_rows() || l < c.n_deepstack;
        if l + 1 == w.layers.len() && !later {
            // Nothing attends to the last layer's output: only rows that get logits go on.
            b.select(&s.x, &batch.outputs, &mut s.q);
            std::mem::swap(&mut s.x, &mut s.q); // [outputs, dim]
            b.select(&s.attn, &batch.outputs, &mut s.q);
            std::mem::swap(&mut s.attn, &mut s.q); // [outputs, n_heads, head_dim]
        }
        s.h.resize(s.x.rows(), c.dim); // [rows, dim]
        b.linear(&mut s.attn, &mut [Job { linear: &a.o, gather: None, out: s.h.values_mut() }]);
        if let Some(norm) = &layer.post_attn_norm {
            b.rms_norm_in_place(&mut s.h, norm);
        }
        b.add(&mut s.x, &s.h, c.residual_scale);
        match &layer.ffn_norm {
            Some(norm) => b.rms_norm(&s.x, norm, &mut s.h),
            None => s.h.copy_from(&s.x),
        }
        match (&layer.ffn, &c.moe) {
            (Ffn::Moe(m), Some(config)) => {
                let next = w.layers.get(l + 1).and_then(|layer| layer.ffn.moe());
                let stream = experts.map(|experts| Streamed { experts, layer: l, next });
                let mut moe = MoeStep { b, config, activation: c.activation, s: &mut s.moe, stream };
                moe.forward(m, &mut s.h, &mut s.attn)?; // [rows, dim]
                tap.experts(l, s.moe.chosen(), config.routing.used); // [rows, used]
            }
            (Ffn::Moe(_), None) => unreachable!("experts are bound only where the configuration has them"),
            (Ffn::Dense(f), _) => {
                s.gate.resize(s.x.rows(), c.ffn_dim); // [rows, ffn_dim]
                s.up.resize(s.x.rows(), c.ffn_dim); // [rows, ffn_dim]
                s.act.resize(s.x.rows(), c.ffn_dim); // [rows, ffn_dim]
                b.linear(
                    &mut s.h,
                    &mut [
                        Job { linear: &f.gate, gather: None, out: s.gate.values_mut() },
                        Job { linear: &f.up, gather: None, out: s.up.values_mut() },
                    ],
                );
                b.glu(c.activation, s.gate.values(), s.up.values(), &mut s.act);
                s.attn.resize(s.x.rows(), c.dim); // [rows, dim]
                b.linear(&mut s.act, &mut [Job { linear: &f.down, gather: None, out: s.attn.values_mut() }]);
            }
        }
        if let Some(norm) = &layer.post_ffn_norm {
            b.rms_norm_in_place(&mut s.attn, norm);
        }
        b.add(&mut s.x, &s.attn, c.residual_scale);
        steering::apply(batch, l, &mut s.x);
        tap.after(l, &s.x);
        if l < c.n_deepstack && !batch.deepstack.is_empty() {
            b.add_deepstack(&mut s.x, batch, l);
        }
    }
    tap.residual(w.layers.len(), &mut s.x);
    if s.x.rows() != batch.outputs.len() {
        b.select(&s.x, &batch.outputs, &mut s.q);
        std::mem::swap(&mut s.x, &mut s.q); // [outputs, dim]
    }
    b.rms_norm(&s.x, &w.output_norm, &mut s.h); // [outputs, dim]
    tap.hidden(&s.h);
    Ok(())
}

/// Logits of what [`forward`] left, `[outputs, vocab_size]`.
pub(crate) fn head<B: Backend>(b: &B, (c, w): (&Config, &Weights<B::Matrix>), s: &mut Scratch) {
    s.logits.resize(s.h.rows(), c.vocab_size); // [outputs, vocab_size]
    b.linear(&mut s.h, &mut [Job { linear: w.head(), gather: None, out: s.logits.values_mut() }]);
    b.finish_logits(&mut s.logits, c.logit_scale, c.logit_softcap);
}
