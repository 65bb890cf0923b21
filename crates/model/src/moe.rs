//! A mixture of experts: each row's tokens go to a few experts, whose outputs are added in the order of rank.

use crate::backend::{Backend, Job, MAX_JOBS};
use crate::config::MoeConfig;
use crate::weights::{Dense, Linear, Moe};
use arrayvec::ArrayVec;
use puna_kernels::Acts;
use puna_kernels::ops::Activation;

/// Buffers of [`forward`], reused from layer to layer.
#[derive(Default)]
pub struct MoeScratch {
    /// Router logits, then scores, `[rows, n_experts]`.
    scores: Vec<f32>,
    /// Chosen experts, `[rows, used]`.
    ids: Vec<u32>,
    /// Their weights, `[rows, used]`.
    weights: Vec<f32>,
    /// Where each expert's rows begin in the sorted order, `[n_experts + 1]`.
    starts: Vec<usize>,
    /// Rows sorted by expert, `[rows * used]`.
    rows: Vec<u32>,
    /// Place in the sorted order of each choice, `[rows, used]`.
    slots: Vec<u32>,
    /// 0, 1, 2, ..
    identity: Vec<u32>,
    /// `[rows * used, ffn_dim]`
    gate: Vec<f32>,
    up: Vec<f32>,
    act: Acts,
    /// `[rows * used, dim]`
    down: Vec<f32>,
}

impl MoeScratch {
    /// Sorts choices by expert, rows in rising order within an expert.
    fn sort(&mut self, n_experts: usize, used: usize) {
        let n = self.ids.len();
        self.starts.clear();
        self.starts.resize(n_experts + 1, 0);
        for &e in &self.ids {
            self.starts[e as usize + 1] += 1;
        }
        for e in 0..n_experts {
            self.starts[e + 1] += self.starts[e];
        }
        self.rows.resize(n, 0);
        self.slots.resize(n, 0);
        // Each start moves on as its expert fills, and so ends as the next one's; shifting puts it right again.
        for (i, &e) in self.ids.iter().enumerate() {
            let slot = &mut self.starts[e as usize];
            self.rows[*slot] = (i / used) as u32;
            self.slots[i] = *slot as u32;
            *slot += 1;
        }
        self.starts.rotate_right(1);
        self.starts[0] = 0;
        let known = self.identity.len();
        self.identity.extend(known as u32..n.max(known) as u32);
    }
}

/// `out[row]` = the weighted sum of the row's experts, in the order of rank.
pub fn forward<B: Backend>(
    b: &B,
    moe: &Moe<B::Matrix>,
    config: &MoeConfig,
    activation: Activation,
    x: &mut Acts,
    s: &mut MoeScratch,
    out: &mut Acts,
) {
    let (rows, dim, used) = (x.rows(), x.cols(), config.routing.used);
    if rows == 0 {
        return out.resize(0, dim);
    }
    s.scores.resize(rows * config.n_experts, 0.0);
    b.linear(x, &mut [Job { linear: &moe.router, gather: None, out: &mut s.scores }]);
    s.ids.resize(rows * used, 0);
    s.weights.resize(rows * used, 0.0);
    b.route(&config.routing, &mut s.scores, moe.correction.as_deref(), &mut s.ids, &mut s.weights);
    s.sort(config.n_experts, used);

    s.gate.resize(rows * used * config.ffn_dim, 0.0);
    s.up.resize(rows * used * config.ffn_dim, 0.0);
    s.act.resize(rows * used, config.ffn_dim);
    s.down.resize(rows * used * dim, 0.0);
    let sorted = Sorted { starts: &s.starts, gather: &s.rows };
    let gate = Projection { pick: |e| &e.gate, out: &mut s.gate };
    let up = Projection { pick: |e| &e.up, out: &mut s.up };
    project(b, &moe.experts, x, sorted, [gate, up]);
    b.glu(activation, &s.gate, &s.up, &mut s.act);
    let sorted = Sorted { starts: &s.starts, gather: &s.identity[..rows * used] };
    project(b, &moe.experts, &mut s.act, sorted, [Projection { pick: |e| &e.down, out: &mut s.down }]);
    out.resize(rows, dim);
    b.weighted_sum(&s.down, &s.slots, &s.weights, out);
}

/// Rows of an input in the order of experts.
#[derive(Clone, Copy)]
struct Sorted<'a> {
    /// `[n_experts + 1]`
    starts: &'a [usize],
    gather: &'a [u32],
}

/// One projection of every expert.
struct Projection<'a, M> {
    pick: fn(&Dense<M>) -> &Linear<M>,
    /// `[gathered rows, weight rows]`
    out: &'a mut [f32],
}

fn project<B: Backend, const N: usize>(
    b: &B,
    experts: &[Dense<B::Matrix>],
    x: &mut Acts,
    sorted: Sorted,
    projections: [Projection<B::Matrix>; N],
) {
    let mut jobs = ArrayVec::<Job<B::Matrix>, MAX_JOBS>::new();
    for Projection { pick, out } in projections {
        let width = out.len() / sorted.gather.len();
        let mut rest = out;
        for (expert, range) in experts.iter().zip(sorted.starts.windows(2)) {
            let (out, after) = rest.split_at_mut((range[1] - range[0]) * width);
            rest = after;
            if out.is_empty() {
                continue;
            }
            if jobs.is_full() {
                b.linear(x, &mut jobs);
                jobs.clear();
            }
            jobs.push(Job { linear: pick(expert), gather: Some(&sorted.gather[range[0]..range[1]]), out });
        }
    }
    b.linear(x, &mut jobs);
}
