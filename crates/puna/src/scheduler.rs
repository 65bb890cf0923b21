//! What a step computes: which sequences run, and how many rows of each.
//!
//! Sequences have a rank: the higher priority, and then who came first. Whoever needs a block that is not there takes
//! the blocks of the lowest rank, which is computed again later. So the first one always goes on, and all come to be
//! first. Nothing here changes what a sequence says.

use crate::engine::Engine;
use crate::pace::{Work, share};
use crate::sequence::Sequence;
use puna_kernels::KV_BLOCK;
use std::time::{Duration, Instant};

/// Takes the place of the clock in tests.
pub(crate) type Clock = Box<dyn FnMut(Work) -> Duration + Send>;

/// Work memory of a step.
#[derive(Default)]
pub(crate) struct Plan {
    /// Sequences that go on by part of a prompt, by their place among the running.
    prompts: Vec<usize>,
    /// Their priorities and missing rows.
    missing: Vec<(i32, usize)>,
    parts: Vec<usize>,
    /// Steps so far: who is first where a row cannot be divided.
    turn: usize,
    /// Rows of each running sequence.
    rows: Vec<usize>,
}

impl Engine {
    /// Fills the batch; returns what is in it.
    pub(crate) fn schedule(&mut self) -> Work {
        self.batch.clear();
        self.admit();
        let rope = &self.model.config().rope;
        for s in &mut self.running {
            s.turn(&mut self.kv, rope);
            if !s.is_generating() {
                s.adopt(&mut self.kv);
            }
        }
        let generating = self.running.iter().filter(|s| s.is_generating()).count();
        let chunk = self.chunk.saturating_sub(generating).max(1);
        let rows = if generating == 0 { self.chunk } else { self.pace.rows(generating, chunk) };
        let is_reading = generating < self.running.len();
        let drafted = self.draft(is_reading.then_some(rows));
        let work = self.fill(rows.saturating_sub(drafted));
        // Those who generate may have no blocks until a prompt goes on.
        if self.batch.rows.is_empty() && rows == 0 { self.fill(chunk) } else { work }
    }

    /// Lets requests run, in order of their rank, as far as there are blocks for them.
    fn admit(&mut self) {
        while let Some(next) = self.waiting.first_mut() {
            next.begin(&mut self.kv, &self.model.config().rope);
            // Each of the running will soon want another block.
            let grown = self.running.iter().map(|s| (s.seq, (s.len() + KV_BLOCK).min(s.limit)));
            let wishes = grown.chain([(next.seq, next.len() + 1)]);
            let has_room = self.running.len() < self.max_running && self.kv.has_room(wishes);
            if !self.running.is_empty() && !has_room {
                next.leave(&mut self.kv);
                let priority = next.priority;
                if self.running.last().is_some_and(|last| last.priority < priority) {
                    self.preempt_last();
                    continue;
                }
                return;
            }
            next.set_begun(Instant::now());
            let next = self.waiting.remove(0);
            insert(&mut self.running, next);
        }
    }

    /// The sequence of the lowest rank gives its blocks back and waits.
    fn preempt_last(&mut self) {
        if let Some(mut last) = self.running.pop() {
            last.preempt(&mut self.kv);
            insert(&mut self.waiting, last);
        }
    }

    /// Fills the batch: a row of every sequence that generates, its draft, and up to `rows` of prompts.
    fn fill(&mut self, rows: usize) -> Work {
        let mut plan = std::mem::take(&mut self.plan);
        self.divide(rows, &mut plan);
        // Those who generate get their blocks first: where layers have a window, a chunk of a prompt needs many for a
        // moment.
        let mut read = 0;
        for generating in [true, false] {
            let mut at = 0;
            while at < self.running.len() {
                if self.running[at].is_generating() == generating {
                    // A prompt waits where one before it goes on.
                    let got = self.reserve(at, plan.rows[at], generating || read == 0);
                    plan.rows[at] = got;
                    read += if generating { 0 } else { got };
                }
                at += 1;
            }
        }
        // Drafts take what is left: nobody makes room for a guess.
        for (s, rows) in self.running.iter_mut().zip(&plan.rows).filter(|(s, _)| !s.guess.tokens.is_empty()) {
            let got = if *rows > 0 { self.kv.reserve(s.seq, rows + s.guess.tokens.len()) } else { 0 };
            s.guess.tokens.truncate(got.saturating_sub(*rows));
        }
        let mut work = Work::default();
        for (s, &rows) in self.running.iter().zip(&plan.rows).filter(|(_, rows)| **rows > 0) {
            s.push(&mut self.batch, rows, self.model.config().dim);
            if s.is_generating() {
                work.generating += 1;
                work.draft_rows += s.guess.tokens.len();
            } else {
                work.prompt_rows += rows;
            }
        }
        self.plan = plan;
        work
    }

    /// How many rows each of the running should get.
    fn divide(&self, rows: usize, plan: &mut Plan) {
        let Plan { prompts, missing, parts, turn, rows: all } = plan;
        prompts.clear();
        missing.clear();
        for (at, s) in self.running.iter().enumerate().filter(|(_, s)| !s.is_generating()) {
            // Where two begin alike, the second waits for what the first computes, and adopts it.
            if s.needs_rows() || !prompts.iter().any(|&before| s.follows(&self.running[before])) {
                prompts.push(at);
                missing.push((s.priority, s.most_rows(self.model.config().vocab_size)));
            }
        }
        *turn = turn.wrapping_add(1);
        share(rows, missing, *turn, parts);
        all.clear();
        all.extend(self.running.iter().map(|s| usize::from(s.is_generating())));
        for (&at, &part) in prompts.iter().zip(&*parts) {
            all[at] = part;
        }
    }

    /// Gets blocks for up to `rows` rows of a running sequence; where there are none at all and it `takes`, those of the
    /// lowest rank behind it. Returns how many rows have blocks.
    fn reserve(&mut self, at: usize, rows: usize, takes: bool) -> usize {
        loop {
            let got = self.kv.reserve(self.running[at].seq, rows);
            if rows == 0 || got > 0 || !takes || self.running.len() == at + 1 {
                return got;
            }
            self.preempt_last();
        }
    }
}

/// Puts a sequence in its place by rank.
pub(crate) fn insert(sequences: &mut Vec<Sequence>, sequence: Sequence) {
    let at = sequences.partition_point(|s| s.rank() < sequence.rank());
    sequences.insert(at, sequence);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::engine::EngineOptions;
    use crate::request::Request;
    use crate::sampler::PartialSampling;
    use std::path::Path;
    use std::sync::{Arc, Mutex};

    /// Steps of an engine whose rows take known times: what each computed, and how long it took.
    struct Watched {
        engine: Engine,
        steps: Arc<Mutex<Vec<(Work, Duration)>>>,
    }

    impl Watched {
        fn new() -> Watched {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/models/llama-gqa/model-f32.gguf");
            let mut engine = Engine::load(&path, &EngineOptions::default(), &mut |_, _| {}).unwrap();
            let steps = Arc::new(Mutex::new(Vec::new()));
            let seen = steps.clone();
            engine.clock = Some(Box::new(move |work| {
                let rows = (work.generating + work.prompt_rows) as u32;
                let time = Duration::from_millis(8) + Duration::from_micros(700) * rows;
                seen.lock().unwrap().push((work, time));
                time
            }));
            Watched { engine, steps }
        }

        fn add(&mut self, n: u32, max_tokens: usize) {
            let prompt: Vec<u32> = (0..n).map(|i| 3 + (i * 31 + max_tokens as u32) % 500).collect();
            let wishes =
                PartialSampling { temperature: Some(0.0), ignore_eos: Some(true), ..PartialSampling::default() };
            let mut request = Request::new(prompt, self.engine.sampling(&wishes));
            request.max_tokens = Some(max_tokens);
            self.engine.add(request).unwrap();
        }

        /// Steps since the last call.
        fn step(&mut self, n: usize) -> Vec<(Work, Duration)> {
            (0..n).for_each(|_| drop(self.engine.step().unwrap().to_vec()));
            std::mem::take(&mut *self.steps.lock().unwrap())
        }
    }

    #[test]
    fn prompts_beside_those_who_generate() {
        let mut watched = Watched::new();
        (0..6).for_each(|i| watched.add(5, 200 + i));
        // With nobody generating, all are read at once.
        assert_eq!(watched.step(1)[0].0, Work { prompt_rows: 30, ..Work::default() });
        let alone = watched.step(10);
        let median = alone[5].1;
        assert!(alone.iter().all(|(work, _)| *work == Work { generating: 6, ..Work::default() }));
        (0..4).for_each(|i| watched.add(230, 1 + i));
        let busy = watched.step(110);
        let read: usize = busy.iter().map(|(work, _)| work.prompt_rows).sum();
        // The last row of a prompt may come alone, as one that is generated.
        assert!((4 * 229..=4 * 230).contains(&read), "{read}");
        let steps = busy.iter().filter(|(work, _)| work.prompt_rows > 0).count();
        assert!((70..85).contains(&steps), "{steps} steps of about {median:?}");
        for (work, time) in busy {
            assert!(work.generating >= 6, "{work:?}");
            assert!(time <= median.mul_f64(2.0), "{work:?} took {time:?}, over {median:?}");
        }
    }

    #[test]
    fn chunks_are_large_where_nobody_waits() {
        let mut watched = Watched::new();
        watched.engine.chunk = 200;
        (0..2).for_each(|i| watched.add(230, 1 + i));
        let rows: Vec<usize> = watched.step(3).iter().map(|(work, _)| work.prompt_rows).collect();
        assert_eq!(rows, [200, 200, 60]);
    }
}
