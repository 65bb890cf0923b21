//! A mixture of experts: each row's tokens go to a few experts, whose outputs are added in the order of rank.

use crate::backend::{Backend, Job, MAX_JOBS};
use crate::config::MoeConfig;
use crate::error::Error;
use crate::experts::ExpertStream;
use crate::weights::{Dense, Moe, Shared};
use arrayvec::ArrayVec;
use puna_kernels::Acts;
use puna_kernels::ops::Activation;
use std::cell::RefCell;
use std::ops::Range;

/// What a router makes of rows.
#[derive(Default)]
struct Choice {
    /// Router logits, then scores, `[rows, n_experts]`.
    scores: Vec<f32>,
    /// Chosen experts, `[rows, used]`.
    ids: Vec<u32>,
    /// Their weights, `[rows, used]`.
    weights: Vec<f32>,
}

/// Buffers of [`MoeStep`], reused from layer to layer.
#[derive(Default)]
pub struct MoeScratch {
    choice: Choice,
    /// What the next layer's router would choose.
    next: Choice,
    /// Where each expert's rows begin in the sorted order, `[n_experts + 1]`.
    starts: Vec<usize>,
    /// Rows sorted by expert, `[rows * used]`.
    rows: Vec<u32>,
    /// Place in the sorted order of each choice, `[rows, used]`.
    slots: Vec<u32>,
    /// 0, 1, 2, ..
    identity: Vec<u32>,
    /// Experts that are computed together.
    wave: Vec<u32>,
    /// `[rows of the wave, ffn_dim]`
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
        &self.choice.ids
    }

    /// Sorts choices by expert, rows in rising order within an expert.
    fn sort(&mut self, n_experts: usize, used: usize) {
        let n = self.choice.ids.len();
        self.starts.clear();
        self.starts.resize(n_experts + 1, 0);
        for &e in &self.choice.ids {
            self.starts[e as usize + 1] += 1;
        }
        for e in 0..n_experts {
            self.starts[e + 1] += self.starts[e];
        }
        self.rows.resize(n, 0);
        self.slots.resize(n, 0);
        // Each start moves on as its expert fills, and so ends as the next one's; shifting puts it right again.
        for (i, &e) in self.choice.ids.iter().enumerate() {
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
pub struct MoeStep<'a, B: Backend> {
    /// The device.
    pub b: &'a B,
    /// The mixture.
    pub config: &'a MoeConfig,
    /// The gate of the experts.
    pub activation: Activation,
    /// Buffers.
    pub s: &'a mut MoeScratch,
    /// Where experts come from that are not in memory.
    pub stream: Option<Streamed<'a, B::Matrix>>,
}

/// Experts of a layer that are read when they are wanted.
pub struct Streamed<'a, M> {
    /// Those of all layers.
    pub experts: &'a RefCell<ExpertStream<M>>,
    /// The layer.
    pub layer: usize,
    /// The layer after it, if it is a mixture.
    pub next: Option<&'a Moe<M>>,
}

/// Asks a layer's router.
fn choose<B: Backend>(b: &B, config: &MoeConfig, moe: &Moe<B::Matrix>, x: &mut Acts, choice: &mut Choice) {
    let (rows, routing) = (x.rows(), &config.routing);
    let Choice { scores, ids, weights } = choice;
    scores.resize(rows * config.n_experts, 0.0);
    b.linear(x, &mut [Job { linear: &moe.router, gather: None, out: scores }]);
    ids.resize(rows * routing.used, 0);
    weights.resize(rows * routing.used, 0.0);
    b.route(routing, scores, moe.correction.as_deref(), ids, weights);
}

impl<B: Backend> MoeStep<'_, B> {
    /// `out[row]` = the weighted sum of the row's experts, in the order of rank, and of the shared one.
    ///
    /// # Errors
    /// Where experts are read from files, and one cannot be.
    pub fn forward(&mut self, moe: &Moe<B::Matrix>, x: &mut Acts, out: &mut Acts) -> Result<(), Error> {
        if x.rows() == 0 {
            self.s.choice.ids.clear();
            out.resize(0, x.cols());
            return Ok(());
        }
        self.route(moe, x);
        self.s.down.resize(self.s.rows.len() * x.cols(), 0.0);
        let starts = std::mem::take(&mut self.s.starts);
        let computed = match self.stream.take() {
            None => {
                let ranges = starts.windows(2).map(|range| range[0]..range[1]);
                self.wave(moe.experts.iter().zip(ranges), x);
                Ok(())
            }
            Some(stream) => self.streamed(&stream, &starts, x),
        };
        self.s.starts = starts;
        computed?;
        out.resize(x.rows(), x.cols());
        self.b.weighted_sum(&self.s.down, &self.s.slots, &self.s.choice.weights, out);
        if let Some(shared) = &moe.shared {
            self.shared(shared, x, out);
        }
        Ok(())
    }

    fn route(&mut self, moe: &Moe<B::Matrix>, x: &mut Acts) {
        choose(self.b, self.config, moe, x, &mut self.s.choice);
        self.s.sort(self.config.n_experts, self.config.routing.used);
    }

    /// Computes experts as they come into memory.
    fn streamed(&mut self, stream: &Streamed<B::Matrix>, starts: &[usize], x: &mut Acts) -> Result<(), Error> {
        let (b, mut experts) = (self.b, stream.experts.borrow_mut());
        let mut wave = std::mem::take(&mut self.s.wave);
        experts.begin(stream.layer, x.rows(), starts);
        let (mut is_first, mut read) = (true, experts.stats().bytes_read);
        let result = loop {
            let more = experts.wave(b, &mut wave);
            let before = std::mem::replace(&mut read, experts.stats().bytes_read);
            b.waited_for_experts(read - before);
            match more {
                Ok(true) => {}
                Ok(false) => break Ok(()),
                Err(e) => break Err(e),
            }
            if let Some(next) = stream.next.filter(|_| is_first && experts.wants_prediction()) {
                // As if this layer added nothing.
                choose(b, self.config, next, x, &mut self.s.next);
                experts.predict(b, &self.s.next.ids);
            }
            is_first = false;
            let range = |e: u32| starts[e as usize]..starts[e as usize + 1];
            self.wave(wave.iter().map(|&e| (experts.expert(e), range(e))), x);
            experts.release(&wave);
        };
        self.s.wave = wave;
        result
    }

    /// Computes experts, in rising order, each for its range of the sorted rows.
    fn wave<'w>(&mut self, wave: impl Iterator<Item = (&'w Dense<B::Matrix>, Range<usize>)> + Clone, x: &mut Acts)
    where
        B::Matrix: 'w,
    {
        let (b, s, width, dim) = (self.b, &mut *self.s, self.config.ffn_dim, x.cols());
        let wave = wave.filter(|(_, range)| !range.is_empty());
        let n: usize = wave.clone().map(|(_, range)| range.len()).sum();
        s.gate.resize(n * width, 0.0);
        s.up.resize(n * width, 0.0);
        s.act.resize(n, width);
        let (rows, mut gate, mut up) = (&s.rows[..], &mut s.gate[..], &mut s.up[..]);
        let jobs = wave.clone().map(|(expert, range)| {
            let out = range.len() * width;
            let gather = Some(&rows[range]);
            [
                Job { linear: &expert.gate, gather, out: split(&mut gate, out) },
                Job { linear: &expert.up, gather, out: split(&mut up, out) },
            ]
        });
        project(b, x, jobs);
        b.glu(self.activation, &s.gate, &s.up, &mut s.act);
        let (mut at, mut from, mut down) = (0, 0, &mut s.down[..]);
        let jobs = wave.map(|(expert, range)| {
            split(&mut down, (range.start - at) * dim);
            at = range.end;
            let gather = Some(&s.identity[from..from + range.len()]);
            from += range.len();
            [Job { linear: &expert.down, gather, out: split(&mut down, range.len() * dim) }]
        });
        project(b, &mut s.act, jobs);
    }

    /// Adds the expert that every row has.
    fn shared(&mut self, shared: &Shared<B::Matrix>, x: &mut Acts, out: &mut Acts) {
        let (b, s, rows, width) = (self.b, &mut *self.s, x.rows(), self.config.shared_ffn_dim);
        s.gate.resize(rows * width, 0.0);
        s.up.resize(rows * width, 0.0);
        s.act.resize(rows, width);
        s.choice.scores.resize(rows, 0.0);
        let mut jobs = ArrayVec::<Job<B::Matrix>, 3>::new();
        jobs.push(Job { linear: &shared.ffn.gate, gather: None, out: &mut s.gate });
        jobs.push(Job { linear: &shared.ffn.up, gather: None, out: &mut s.up });
        if let Some(gate) = &shared.gate {
            jobs.push(Job { linear: gate, gather: None, out: &mut s.choice.scores });
        }
        b.linear(x, &mut jobs);
        drop(jobs);
        b.glu(self.activation, &s.gate, &s.up, &mut s.act);
        s.shared.resize(rows, x.cols());
        b.linear(&mut s.act, &mut [Job { linear: &shared.ffn.down, gather: None, out: s.shared.values_mut() }]);
        b.add_gated(out, &s.shared, shared.gate.is_some().then_some(&s.choice.scores[..]));
    }
}

/// Takes the first `n` numbers away.
fn split<'a>(rest: &mut &'a mut [f32], n: usize) -> &'a mut [f32] {
    let (first, after) = std::mem::take(rest).split_at_mut(n);
    *rest = after;
    first
}

/// Computes jobs, as many at a time as fit.
fn project<'a, B: Backend, const N: usize>(b: &B, x: &mut Acts, jobs: impl Iterator<Item = [Job<'a, B::Matrix>; N]>)
where
    B::Matrix: 'a,
{
    let mut some = ArrayVec::<Job<B::Matrix>, MAX_JOBS>::new();
    for jobs in jobs {
        if some.remaining_capacity() < N {
            b.linear(x, &mut some);
            some.clear();
        }
        some.extend(jobs);
    }
    b.linear(x, &mut some);
}
