//! What can be seen and changed inside a model while it answers: residuals, chosen experts, where time goes, steering.
//!
//! All of it is asked for by a request, and costs nothing where nobody asks.

use crate::error::Error;
use crate::request::Request;
use crate::sequence::Sequence;
use puna_kernels::Acts;
use puna_model::{Batch, Config, Phase, Steering, Stopwatch, Tap, Timings, Trace};
use serde_json::{Map, Value, json};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Which positions of a request are captured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Positions {
    /// The last one of the prompt, whose residual becomes the first token.
    #[default]
    Last,
    /// All of the prompt.
    Prompt,
    /// All of the prompt and of the answer; but for the answer's last token, which is said and not computed.
    All,
}

/// A row of the residual: as a layer leaves it, steering in, deepstack rows not yet, and before any norm.
#[derive(Clone, Copy, Debug)]
pub struct Captured<'a> {
    /// Which of the request's answers; the prompt's rows are those of the first.
    pub sample: usize,
    /// The layer, from 0.
    pub layer: usize,
    /// The position in the sequence, from 0.
    pub position: usize,
    /// The row, `[dim]`.
    pub residual: &'a [f32],
}

/// A wish for residuals. Each row comes once: those of a step by layer, and within a layer by position. Nothing of a
/// prompt is taken from the cache where all its positions are captured.
#[derive(Clone)]
pub struct Capture {
    /// Layers, from 0.
    pub layers: Vec<usize>,
    /// Positions.
    pub positions: Positions,
    /// Gets the rows, in the middle of a step: it had better be quick.
    pub sink: Arc<dyn Fn(Captured) + Send + Sync>,
}

impl fmt::Debug for Capture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Capture").field("layers", &self.layers).field("positions", &self.positions).finish()
    }
}

/// How often each expert of each layer was chosen. In the last layer only rows whose logits are wanted are computed, or at
/// least counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertCounts {
    n_experts: usize,
    /// `[n_layers, n_experts]`
    counts: Vec<u64>,
}

impl ExpertCounts {
    fn new(config: &Config) -> Option<ExpertCounts> {
        let n_experts = config.moe?.n_experts;
        Some(ExpertCounts { n_experts, counts: vec![0; config.n_layers * n_experts] })
    }

    /// Experts of a layer.
    pub fn n_experts(&self) -> usize {
        self.n_experts
    }

    /// Counts of each layer's experts, `[n_layers]` of `[n_experts]`; a layer without experts has zeros.
    pub fn layers(&self) -> impl ExactSizeIterator<Item = &[u64]> {
        self.counts.chunks_exact(self.n_experts)
    }

    fn add(&mut self, layer: usize, ids: &[u32]) {
        let counts = &mut self.counts[layer * self.n_experts..][..self.n_experts];
        ids.iter().for_each(|&id| counts[id as usize] += 1);
    }
}

/// What a sequence has of all this.
pub(crate) struct Inside {
    pub steering: Option<Arc<Steering>>,
    pub timings: Option<Box<Timings>>,
    pub experts: Option<Box<ExpertCounts>>,
    capture: Option<Capture>,
    /// Positions whose residuals were handed out and whose experts were counted, where that is wanted: rows that are
    /// computed again, since others took their blocks, are not told again.
    seen: usize,
    /// Its part of the rows of the last step.
    share: f64,
}

impl Inside {
    /// What a request asks for.
    pub fn of(request: &mut Request, config: &Config) -> Inside {
        Inside {
            steering: request.steering.take().filter(|steering| !steering.is_empty()),
            timings: request.timings.then(Box::default),
            experts: request.count_experts.then(|| ExpertCounts::new(config)).flatten().map(Box::new),
            capture: request.capture.take(),
            seen: 0,
            share: 0.0,
        }
    }

    /// The same for another answer. [`Inside::fork`] is what it has seen when it begins.
    pub fn sibling(&self) -> Inside {
        Inside {
            steering: self.steering.clone(),
            timings: self.timings.clone(),
            experts: self.experts.clone(),
            capture: self.capture.clone(),
            ..*self
        }
    }

    /// Goes on from where another answer of the request is, whose prompt is computed: what that took counts to both, what
    /// was captured and counted is not told again.
    pub fn fork(&mut self, first: &Inside) {
        self.timings.clone_from(&first.timings);
        (self.seen, self.share) = (first.seen, first.share);
    }

    /// Whether all of the first `len` rows but the last have to be computed, wherever they may be found.
    pub fn needs_rows(&self, len: usize) -> bool {
        let all = self.capture.as_ref().is_some_and(|capture| capture.positions != Positions::Last);
        all && self.seen + 1 < len
    }

    /// Whether rows that may not come would be seen: such a sequence has no drafts.
    pub fn sees_rows(&self) -> bool {
        self.experts.is_some() || self.capture.as_ref().is_some_and(|capture| capture.positions == Positions::All)
    }

    /// The time since the last lap goes to a phase, of this sequence if it asks.
    pub fn lap(&mut self, watch: Option<&Stopwatch>, phase: Phase) {
        let Some(watch) = watch else { return };
        let time = watch.lap(phase);
        if let Some(timings) = &mut self.timings {
            timings.add(phase, time, 0);
        }
    }

    /// Where time went from arrival to now.
    pub fn close(&mut self, queue: Duration, wall: Duration) -> Option<Box<Timings>> {
        let mut timings = self.timings.take()?;
        timings.add(Phase::Queue, queue, 0);
        timings.add(Phase::Other, wall.saturating_sub(timings.total()), 0);
        Some(timings)
    }

    fn wants(&self, layer: usize, position: usize, prompt: usize) -> bool {
        let Some(capture) = &self.capture else { return false };
        let wanted = match capture.positions {
            Positions::Last => position + 1 == prompt,
            Positions::Prompt => position < prompt,
            Positions::All => true,
        };
        wanted && position >= self.seen && capture.layers.contains(&layer)
    }
}

/// Timings as JSON: the whole in milliseconds, and of each phase milliseconds and, where it read, megabytes and, of memory,
/// gigabytes a second, and their part of what the machine's memory gives at best
/// ([`Model::read_bandwidth`](puna_model::Model::read_bandwidth)).
pub fn timings_json(timings: &Timings, bandwidth: Option<f64>) -> Value {
    let phase = |(phase, time, bytes): (Phase, Duration, u64)| {
        let mut fields = Map::from_iter([("ms".to_owned(), json!(time.as_secs_f64() * 1e3))]);
        if bytes > 0 {
            fields.insert("mb".into(), json!(bytes as f64 / 1e6));
        }
        // Files are read beside what is computed: only the wait is a phase.
        if bytes > 0 && phase != Phase::ExpertReads {
            let rate = bytes as f64 / time.as_secs_f64();
            fields.insert("gb_s".into(), json!(rate / 1e9));
            fields.extend(bandwidth.map(|best| ("bandwidth_share".to_owned(), json!(rate / best))));
        }
        (phase.name().to_owned(), Value::Object(fields))
    };
    let phases: Map<String, Value> = timings.phases().map(phase).collect();
    json!({ "wall_ms": timings.total().as_secs_f64() * 1e3, "phases": phases })
}

/// Whether a model can do what a request asks for.
pub(crate) fn check(request: &Request, config: &Config) -> Result<(), Error> {
    let n_layers = config.n_layers;
    let layers = request.capture.as_ref().map_or(&[][..], |capture| &capture.layers);
    if let Some(&layer) = layers.iter().find(|&&layer| layer >= n_layers) {
        return Err(Error::CaptureLayer { layer, n_layers });
    }
    check_steering(request.steering.as_deref(), config)
}

/// Whether steering was made for a model of these layers and this width.
pub(crate) fn check_steering(steering: Option<&Steering>, config: &Config) -> Result<(), Error> {
    let expected = (config.n_layers, config.dim);
    match steering.map(Steering::shape) {
        Some(found) if found != expected => Err(Error::Steering { found, expected }),
        _ => Ok(()),
    }
}

/// What an engine has of all this.
#[derive(Default)]
pub(crate) struct Watch {
    watch: Option<Stopwatch>,
    /// What was measured before the part that has not been given to requests.
    mark: Timings,
    /// Whether this step is timed.
    is_on: bool,
    /// Whether every step is.
    always: bool,
    /// Of all requests.
    experts: Option<ExpertCounts>,
    n_layers: usize,
}

impl Watch {
    pub fn new(config: &Config) -> Watch {
        Watch { experts: ExpertCounts::new(config), n_layers: config.n_layers, ..Watch::default() }
    }

    /// The stopwatch, if this step is timed.
    pub fn watch(&self) -> Option<&Stopwatch> {
        self.watch.as_ref().filter(|_| self.is_on)
    }

    /// The time since the last lap goes to a phase, where steps are timed.
    pub fn lap(&self, phase: Phase) {
        if let Some(watch) = self.watch() {
            watch.lap(phase);
        }
    }

    /// A step begins. What passed since the last one was spent by whoever steps the engine.
    pub fn begin_step(&mut self, running: &mut [Sequence], waiting: &[Sequence]) {
        let asks = |s: &Sequence| s.inside.timings.is_some();
        let is_on = self.always || running.iter().chain(waiting).any(asks);
        let was_on = std::mem::replace(&mut self.is_on, is_on);
        if !is_on {
            return;
        }
        let watch = self.watch.get_or_insert_default();
        if was_on {
            watch.lap(Phase::Write);
            self.share_out(running);
        } else {
            watch.skip();
        }
        if let Some(watch) = &self.watch {
            watch.begin_step();
        }
    }

    /// The batch is made: requests get what follows by their parts of its rows.
    pub fn set_shares(&self, batch: &Batch, running: &mut [Sequence]) {
        let Some(watch) = self.watch() else { return };
        watch.lap(Phase::Schedule);
        running.iter_mut().for_each(|s| s.inside.share = 0.0);
        for span in &batch.spans {
            if let Some(s) = running.iter_mut().find(|s| s.seq == span.seq) {
                s.inside.share = span.rows as f64 / batch.rows.len() as f64;
            }
        }
    }

    /// Gives what was measured since the last time to the running requests, by their parts of the batch's rows.
    pub fn share_out(&mut self, running: &mut [Sequence]) {
        let Some(watch) = self.watch() else { return };
        let now = watch.timings();
        let new = now.since(&self.mark);
        for s in running {
            if let Some(timings) = &mut s.inside.timings {
                timings.add_share(&new, s.inside.share);
            }
        }
        self.mark = now;
    }

    /// A step ends; sequences have been given their own laps. Between steps of an idle engine nothing is measured.
    pub fn end_step(&mut self, batch: &Batch, is_idle: bool) {
        let Some(watch) = self.watch() else { return };
        watch.lap(Phase::Schedule);
        watch.end_step(batch.rows.len(), batch.spans.len());
        self.mark = watch.timings();
        self.is_on = !is_idle;
    }

    /// Nobody is left: until somebody comes nothing is measured.
    pub fn rest(&mut self) {
        self.is_on = false;
    }

    /// A tap for a batch, beside the stopwatch for it.
    pub fn tap<'a>(
        &'a mut self,
        batch: &'a Batch,
        running: &'a mut [Sequence],
    ) -> (StepTap<'a>, Option<&'a Stopwatch>) {
        let mut wants_all = false;
        let (mut captures, mut counts) = (false, false);
        for s in running.iter() {
            counts |= s.inside.experts.is_some();
            let Some(capture) = &s.inside.capture else { continue };
            captures = true;
            let last = capture.layers.contains(&(self.n_layers - 1));
            wants_all |= last && capture.positions != Positions::Last && !s.is_generating();
        }
        let watch = self.watch.as_ref().filter(|_| self.is_on);
        let n_layers = self.n_layers;
        (StepTap { batch, running, captures, counts, wants_all, n_layers, experts: self.experts.as_mut() }, watch)
    }
}

impl crate::Engine {
    /// Measures every step from now on, for [`Engine::timings`](crate::Engine::timings), or only those of requests that
    /// ask for it.
    pub fn set_timing(&mut self, always: bool) {
        self.watch.always = always;
    }

    /// Measures every step from now on and keeps at most so many events of it, in place of an earlier trace.
    pub fn trace(&mut self, max_events: usize) {
        self.watch = Watch {
            watch: Some(Stopwatch::new(Some(Trace::new(max_events)))),
            always: true,
            experts: self.watch.experts.take(),
            n_layers: self.watch.n_layers,
            ..Watch::default()
        };
    }

    /// The trace, which ends here.
    pub fn take_trace(&mut self) -> Option<Trace> {
        self.watch.watch.as_mut()?.take_trace()
    }

    /// Where the time of all steps went that were measured, of all requests together.
    pub fn timings(&self) -> Timings {
        self.watch.watch.as_ref().map(Stopwatch::timings).unwrap_or_default()
    }

    /// How often each expert was chosen since the model was loaded, of all requests together; `None` without experts.
    pub fn experts(&self) -> Option<&ExpertCounts> {
        self.watch.experts.as_ref()
    }
}

/// Hands out residuals and counts experts while a step computes.
pub(crate) struct StepTap<'a> {
    batch: &'a Batch,
    running: &'a mut [Sequence],
    /// Whether somebody wants residuals, and counts of its own.
    captures: bool,
    counts: bool,
    wants_all: bool,
    n_layers: usize,
    experts: Option<&'a mut ExpertCounts>,
}

impl StepTap<'_> {
    /// The step is computed: what it handed out does not come again.
    pub fn finish(self) {
        if !self.captures && !self.counts {
            return;
        }
        for span in &self.batch.spans {
            if let Some(s) = self.running.iter_mut().find(|s| s.seq == span.seq) {
                s.inside.seen = s.inside.seen.max(span.start + span.rows);
            }
        }
    }
}

impl Tap for StepTap<'_> {
    fn residual(&mut self, _: usize, _: &mut Acts) {}

    fn after(&mut self, layer: usize, x: &Acts) {
        if !self.captures {
            return;
        }
        for (span, rows) in self.batch.spans_of(x.rows()) {
            let Some(s) = self.running.iter().find(|s| s.seq == span.seq) else { continue };
            let Some(capture) = &s.inside.capture else { continue };
            for (row, position) in rows {
                if s.inside.wants(layer, position, s.prompt_len()) {
                    let residual = &x.values()[row * x.cols()..][..x.cols()];
                    (capture.sink)(Captured { sample: s.sample, layer, position, residual });
                }
            }
        }
    }

    fn experts(&mut self, layer: usize, ids: &[u32], used: usize) {
        let Some(all) = &mut self.experts else { return };
        // Where somebody's residuals have all rows of the last layer computed, those of others do not count.
        let all_are_there = self.wants_all && layer + 1 == self.n_layers;
        let is_wanted = |row: usize| !all_are_there || self.batch.outputs.binary_search(&(row as u32)).is_ok();
        if all_are_there {
            let rows = ids.chunks_exact(used).enumerate().filter(|(row, _)| is_wanted(*row));
            rows.for_each(|(_, ids)| all.add(layer, ids));
        } else {
            all.add(layer, ids);
        }
        if !self.counts {
            return;
        }
        for (span, rows) in self.batch.spans_of(ids.len() / used) {
            let Some(s) = self.running.iter_mut().find(|s| s.seq == span.seq) else { continue };
            let Some(own) = &mut s.inside.experts else { continue };
            let seen = s.inside.seen;
            let new = rows.filter(|&(row, position)| is_wanted(row) && position >= seen);
            new.for_each(|(row, _)| own.add(layer, &ids[row * used..][..used]));
        }
    }

    fn wants_all_rows(&self) -> bool {
        self.wants_all
    }
}
