//! Where time goes: phases, how long each took, and the stopwatch that measures them.
//!
//! A stopwatch only ever laps: the time since the last lap goes to the phase that has just ended. So phases add up to all
//! the time from the first lap to the last, and what lies between two operations counts to the second of them.

use crate::trace::Trace;
use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

/// What time is spent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Waiting for others.
    Queue,
    /// Choosing what a step computes, and its place in the cache.
    Schedule,
    /// Guessing the next tokens, and taking the guesses that were right.
    Draft,
    /// From text to ids.
    Tokenize,
    /// Rows of the embedding, deepstack rows.
    Embed,
    /// Norms of rows and heads.
    Norm,
    /// Queries, keys and values.
    Qkv,
    /// Rotation.
    Rope,
    /// Keeping keys and values, and attention over them.
    Attention,
    /// The output projection of attention.
    Output,
    /// Scores of experts, and the choice.
    Router,
    /// Feed-forward, experts too.
    Ffn,
    /// Waiting for experts to come from the file.
    ExpertReads,
    /// Logits.
    Head,
    /// Choosing tokens.
    Sampling,
    /// What a grammar allows.
    Grammar,
    /// From ids to text, and stop strings.
    Detokenize,
    /// What whoever steps the engine does between steps: writing the text.
    Write,
    /// Rows of other requests in the same steps, and what nobody measured.
    Other,
}

impl Phase {
    /// All of them, in the order of a request's life.
    pub const ALL: [Phase; 19] = [
        Phase::Queue,
        Phase::Schedule,
        Phase::Draft,
        Phase::Tokenize,
        Phase::Embed,
        Phase::Norm,
        Phase::Qkv,
        Phase::Rope,
        Phase::Attention,
        Phase::Output,
        Phase::Router,
        Phase::Ffn,
        Phase::ExpertReads,
        Phase::Head,
        Phase::Sampling,
        Phase::Grammar,
        Phase::Detokenize,
        Phase::Write,
        Phase::Other,
    ];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Queue => "queue",
            Phase::Schedule => "schedule",
            Phase::Draft => "draft",
            Phase::Tokenize => "tokenize",
            Phase::Embed => "embed",
            Phase::Norm => "norm",
            Phase::Qkv => "qkv",
            Phase::Rope => "rope",
            Phase::Attention => "attention",
            Phase::Output => "output",
            Phase::Router => "router",
            Phase::Ffn => "ffn",
            Phase::ExpertReads => "expert_reads",
            Phase::Head => "head",
            Phase::Sampling => "sampling",
            Phase::Grammar => "grammar",
            Phase::Detokenize => "detokenize",
            Phase::Write => "write",
            Phase::Other => "other",
        }
    }

    /// The phase that products with a projection belong to, by its name in GGUF files.
    pub(crate) fn of_projection(name: &str) -> Phase {
        let part = name.strip_prefix("blk.").and_then(|name| name.split_once('.')).map_or(name, |(_, part)| part);
        match part {
            _ if part.starts_with("attn_output") => Phase::Output,
            _ if part.starts_with("attn_") => Phase::Qkv,
            _ if part.starts_with("ffn_gate_inp") && !part.contains("shexp") => Phase::Router,
            _ if part.starts_with("ffn_") => Phase::Ffn,
            // The embedding is a projection where it serves as the output.
            _ => Phase::Head,
        }
    }
}

/// How long each phase took, and the bytes of weights, keys and values that it read; of [`Phase::ExpertReads`], the bytes
/// that came from files.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timings {
    time: [Duration; Phase::ALL.len()],
    bytes: [u64; Phase::ALL.len()],
}

impl Timings {
    /// Time of a phase.
    pub fn time(&self, phase: Phase) -> Duration {
        self.time[phase as usize]
    }

    /// Bytes that a phase read: of weights, keys and values, each once a step; from files those of [`Phase::ExpertReads`],
    /// also while something else was computed.
    pub fn bytes(&self, phase: Phase) -> u64 {
        self.bytes[phase as usize]
    }

    /// Phases that took time, with it and their bytes, in the order of [`Phase::ALL`].
    pub fn phases(&self) -> impl Iterator<Item = (Phase, Duration, u64)> {
        let all = Phase::ALL.into_iter().map(|phase| (phase, self.time(phase), self.bytes(phase)));
        all.filter(|(_, time, _)| !time.is_zero())
    }

    /// All phases together.
    pub fn total(&self) -> Duration {
        self.time.iter().sum()
    }

    /// Adds to a phase.
    pub fn add(&mut self, phase: Phase, time: Duration, bytes: u64) {
        self.time[phase as usize] += time;
        self.bytes[phase as usize] += bytes;
    }

    /// Adds a part, from 0 to 1, of all phases of another.
    pub fn add_share(&mut self, other: &Timings, share: f64) {
        for phase in Phase::ALL {
            let bytes = (other.bytes(phase) as f64 * share) as u64;
            self.add(phase, other.time(phase).mul_f64(share), bytes);
        }
    }

    /// What came since an earlier state of the same stopwatch.
    pub fn since(&self, earlier: &Timings) -> Timings {
        let mut new = self.clone();
        for i in 0..Phase::ALL.len() {
            new.time[i] = new.time[i].saturating_sub(earlier.time[i]);
            new.bytes[i] = new.bytes[i].saturating_sub(earlier.bytes[i]);
        }
        new
    }
}

/// Measures phases.
pub struct Stopwatch {
    /// When the current phase began.
    lap: Cell<Instant>,
    /// When the current step began.
    step: Cell<Instant>,
    last: Cell<Phase>,
    timings: RefCell<Timings>,
    trace: Option<RefCell<Trace>>,
}

impl Default for Stopwatch {
    fn default() -> Stopwatch {
        Stopwatch::new(None)
    }
}

impl Stopwatch {
    /// One that starts now. `trace`: where laps and steps are kept, one by one.
    pub fn new(trace: Option<Trace>) -> Stopwatch {
        let now = Instant::now();
        Stopwatch {
            lap: Cell::new(now),
            step: Cell::new(now),
            last: Cell::new(Phase::Other),
            timings: RefCell::default(),
            trace: trace.map(RefCell::new),
        }
    }

    /// The time since the last lap goes to no phase.
    pub fn skip(&self) {
        self.lap.set(Instant::now());
    }

    /// The time since the last lap goes to a phase. Returns it.
    pub fn lap(&self, phase: Phase) -> Duration {
        let now = Instant::now();
        let start = self.lap.replace(now);
        self.last.set(phase);
        let time = now - start;
        self.timings.borrow_mut().add(phase, time, 0);
        if let Some(trace) = &self.trace {
            trace.borrow_mut().phase(phase, start, time);
        }
        time
    }

    /// A lap of the phase that the last one was of: small steps that belong to what came before them.
    pub fn lap_again(&self) {
        self.lap(self.last.get());
    }

    /// A phase reads so many bytes.
    pub fn read(&self, phase: Phase, bytes: u64) {
        self.timings.borrow_mut().add(phase, Duration::ZERO, bytes);
    }

    /// A step begins.
    pub fn begin_step(&self) {
        self.step.set(Instant::now());
    }

    /// The step ends that began last: it computed so many rows of so many sequences.
    pub fn end_step(&self, rows: usize, sequences: usize) {
        if let Some(trace) = &self.trace {
            let start = self.step.get();
            trace.borrow_mut().step(rows, sequences, start, start.elapsed());
        }
    }

    /// What was measured so far.
    pub fn timings(&self) -> Timings {
        self.timings.borrow().clone()
    }

    /// The trace so far; what comes later is not kept.
    pub fn take_trace(&mut self) -> Option<Trace> {
        self.trace.take().map(RefCell::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn laps_add_up() {
        let start = Instant::now();
        let watch = Stopwatch::default();
        for phase in Phase::ALL {
            std::thread::sleep(Duration::from_millis(1));
            watch.lap(phase);
            watch.read(phase, 3);
        }
        watch.lap_again();
        let (timings, wall) = (watch.timings(), start.elapsed());
        assert!(timings.total() <= wall && wall - timings.total() < Duration::from_millis(1), "{timings:?}, {wall:?}");
        assert!(timings.phases().all(|(_, time, bytes)| time >= Duration::from_millis(1) && bytes == 3));
        let later = timings.since(&Timings::default());
        assert_eq!((&later, timings.since(&timings)), (&timings, Timings::default()));
        let mut half = Timings::default();
        half.add_share(&timings, 0.5);
        assert_eq!(half.bytes(Phase::Ffn), 1);
        assert!(half.total() <= timings.total() / 2 + Duration::from_micros(1));
    }

    #[test]
    fn phases_of_projections() {
        for (name, phase) in [
            ("blk.3.attn_q", Phase::Qkv),
            ("blk.3.attn_qkv", Phase::Qkv),
            ("blk.0.attn_output", Phase::Output),
            ("blk.0.ffn_gate_inp", Phase::Router),
            ("blk.0.ffn_gate_inp_shexp", Phase::Ffn),
            ("blk.0.ffn_up.7", Phase::Ffn),
            ("blk.11.ffn_down_exps", Phase::Ffn),
            ("output", Phase::Head),
            ("token_embd", Phase::Head),
        ] {
            assert_eq!(Phase::of_projection(name), phase, "{name}");
        }
    }
}
