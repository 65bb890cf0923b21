//! A mixture of experts: each row's tokens go to a few experts, whose outputs are added in the order of rank.

use crate::backend::{Backend, Job, MAX_JOBS};
use crate::config::MoeConfig;
use crate::weights::{Dense, Linear, Moe, Shared};
use arrayvec::ArrayVec;
use puna_kernels::Acts;
use puna_kernels::ops::Activation;

/// Buffers of [`MoeStep`], reused from layer to layer.
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
    /// Output of the shared expert, `[rows, dim]`.
    shared: Acts,
}

impl MoeScratch {
    /// The experts that the last rows went to, `[rows, used]`, in the order of rank.
    pub fn chosen(&self) -> &[u32] {
        &self.ids
    }

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

/// What every layer's mixture is computed with.
pub struct MoeStep<'a, B> {
    /// The device.
    pub b: &'a B,
    /// The mixture.
    pub config: &'a MoeConfig,
    /// The gate of the experts.
    pub activation: Activation,
    /// Buffers.
    pub s: &'a mut MoeScratch,
}

impl<B: Backend> MoeStep<'_, B> {
    /// `out[row]` = the weighted sum of the row's experts, in the order of rank, and of the shared one.
    pub fn forward(&mut self, moe: &Moe<B::Matrix>, x: &mut Acts, out: &mut Acts) {
        if x.rows() == 0 {
            self.s.ids.clear();
            return out.resize(0, x.cols());
        }
        self.route(moe, x);
        self.experts(&moe.experts, x, out);
        if let Some(shared) = &moe.shared {
            self.shared(shared, x, out);
        }
    }

    fn route(&mut self, moe: &Moe<B::Matrix>, x: &mut Acts) {
        let (rows, routing, s) = (x.rows(), &self.config.routing, &mut *self.s);
        s.scores.resize(rows * self.config.n_experts, 0.0);
        self.b.linear(x, &mut [Job { linear: &moe.router, gather: None, out: &mut s.scores }]);
        s.ids.resize(rows * routing.used, 0);
        s.weights.resize(rows * routing.used, 0.0);
        self.b.route(routing, &mut s.scores, moe.correction.as_deref(), &mut s.ids, &mut s.weights);
        s.sort(self.config.n_experts, routing.used);
    }

    fn experts(&mut self, experts: &[Dense<B::Matrix>], x: &mut Acts, out: &mut Acts) {
        let (b, s, width) = (self.b, &mut *self.s, self.config.ffn_dim);
        let n = s.rows.len();
        s.gate.resize(n * width, 0.0);
        s.up.resize(n * width, 0.0);
        s.act.resize(n, width);
        s.down.resize(n * x.cols(), 0.0);
        let sorted = Sorted { starts: &s.starts, gather: &s.rows };
        let gate = Projection { pick: |e| &e.gate, out: &mut s.gate };
        let up = Projection { pick: |e| &e.up, out: &mut s.up };
        project(b, experts, x, sorted, [gate, up]);
        b.glu(self.activation, &s.gate, &s.up, &mut s.act);
        let sorted = Sorted { starts: &s.starts, gather: &s.identity[..n] };
        project(b, experts, &mut s.act, sorted, [Projection { pick: |e| &e.down, out: &mut s.down }]);
        out.resize(x.rows(), x.cols());
        b.weighted_sum(&s.down, &s.slots, &s.weights, out);
    }

    /// Adds the expert that every row has.
    fn shared(&mut self, shared: &Shared<B::Matrix>, x: &mut Acts, out: &mut Acts) {
        let (b, s, rows, width) = (self.b, &mut *self.s, x.rows(), self.config.shared_ffn_dim);
        s.gate.resize(rows * width, 0.0);
        s.up.resize(rows * width, 0.0);
        s.act.resize(rows, width);
        s.scores.resize(rows, 0.0);
        let mut jobs = ArrayVec::<Job<B::Matrix>, 3>::new();
        jobs.push(Job { linear: &shared.ffn.gate, gather: None, out: &mut s.gate });
        jobs.push(Job { linear: &shared.ffn.up, gather: None, out: &mut s.up });
        if let Some(gate) = &shared.gate {
            jobs.push(Job { linear: gate, gather: None, out: &mut s.scores });
        }
        b.linear(x, &mut jobs);
        drop(jobs);
        b.glu(self.activation, &s.gate, &s.up, &mut s.act);
        s.shared.resize(rows, x.cols());
        b.linear(&mut s.act, &mut [Job { linear: &shared.ffn.down, gather: None, out: s.shared.values_mut() }]);
        b.add_gated(out, &s.shared, shared.gate.is_some().then_some(&s.scores[..]));
    }
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
