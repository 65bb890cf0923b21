//! How many rows of prompts a step may carry while others generate: so many that it takes less than twice as long as a
//! step that only generates.
//!
//! Both times are measured, and both change: with the number of sequences, their lengths, and what else the machine does.
//! Medians of the last few steps follow them and do not follow a single slow step. Nothing here changes what is said.

use std::time::Duration;

/// What a step computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Work {
    /// Sequences that went on by their newest token.
    pub generating: usize,
    /// Rows of prompts, and of what is computed again.
    pub prompt_rows: usize,
    /// Rows of drafts.
    pub draft_rows: usize,
}

/// Times of recent steps.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// Of steps that only generated, in seconds.
    generate: Recent,
    /// How many sequences generated in these.
    generating: usize,
    /// Of a prompt's row beside generation, in seconds.
    row: Recent,
    /// Of a prompt's row where nobody generates.
    row_alone: Recent,
    /// Of steps that did both, in seconds.
    both: Recent,
    /// How many of these there were since the last one that only generated.
    mixed: usize,
    /// Rows of prompts, and of drafts with them, in the last step that had some beside generation.
    rows: usize,
    /// Steps in a row that were to carry none.
    skipped: usize,
}

/// What a prompt may add to a step, as a part of what generation takes: less than all of it, so that a step that the
/// machine disturbs is seldom over twice the others.
const SHARE: f64 = 0.75;

/// So many steps without prompts tell what generation takes.
const MEASURED: usize = 3;

/// After so many steps with prompts, one without tells anew.
const MIXED: usize = 8;

impl Pace {
    /// Rows of prompts, and of drafts with them, that the next step may carry beside `generating` sequences, at most `most`. None where the step
    /// is needed to measure what generation takes; never none four times in a row.
    pub fn rows(&mut self, generating: usize, most: usize) -> usize {
        if generating > 2 * self.generating || 2 * generating < self.generating {
            self.generate.clear();
            self.both.clear();
            self.generating = generating;
        }
        let measures = self.generate.n < MEASURED || self.mixed >= MIXED;
        if measures && self.skipped < MEASURED {
            self.skipped += 1;
            return 0;
        }
        self.skipped = 0;
        // A prompt's row is about as much work as a sequence that generates: as many of them take no longer.
        let grown = if measures { generating } else { generating.max(2 * self.rows) };
        let fit = match self.row.median().or(self.row_alone.median()) {
            // Saturates: a row that seems to take no time sets no limit.
            Some(row) => (SHARE * self.step() / row) as usize,
            None => grown,
        };
        fit.min(grown).clamp(1, most.max(1))
    }

    /// Rows of other work, at most `most`, that a step may carry beside those who generate.
    pub fn beside(&self, generating: usize, most: usize) -> usize {
        let row = self.row.median().or(self.row_alone.median());
        row.map_or(generating, |row| (SHARE * self.step() / row) as usize).clamp(1, most.max(1))
    }

    /// What a step takes that only generates: not more than one that does both.
    fn step(&self) -> f64 {
        let step = self.generate.median().unwrap_or(0.0);
        self.both.median().map_or(step, |both| both.min(step))
    }

    /// Takes note of what a step took.
    pub fn record(&mut self, work: Work, time: Duration) {
        let time = time.as_secs_f64();
        match work {
            Work { generating, prompt_rows: 0, draft_rows: 0 } => {
                self.generate.push(time);
                self.generating = generating;
                self.mixed = 0;
            }
            // What drafts do is measured in `draft/odds.rs`.
            Work { prompt_rows: 0, .. } => {}
            Work { generating: 0, prompt_rows, .. } => self.row_alone.push(time / prompt_rows as f64),
            Work { prompt_rows, draft_rows, .. } => {
                let rows = prompt_rows + draft_rows;
                self.both.push(time);
                self.row.push((time - self.step()).max(0.0) / rows as f64);
                self.mixed += 1;
                self.rows = rows;
            }
        }
    }
}

/// The last few of many numbers.
#[derive(Debug, Default)]
pub(crate) struct Recent {
    values: [f64; Recent::LEN],
    n: usize,
    next: usize,
}

impl Recent {
    const LEN: usize = 5;

    pub fn push(&mut self, value: f64) {
        self.values[self.next] = value;
        self.next = (self.next + 1) % Recent::LEN;
        self.n = (self.n + 1).min(Recent::LEN);
    }

    pub fn clear(&mut self) {
        *self = Recent::default();
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.n
    }

    /// The lower one of two.
    pub fn median(&self) -> Option<f64> {
        let mut sorted = self.values;
        let sorted = &mut sorted[..self.n];
        sorted.sort_by(f64::total_cmp);
        sorted.get(self.n.saturating_sub(1) / 2).copied()
    }
}

/// Shares `rows` among prompts, given by priority and missing rows, highest priority first: the higher priority takes
/// what it can use; prompts of one priority get equal parts, and what some cannot use goes to the others. What is left
/// of rows that cannot be divided goes to those that come first, from another one on each `turn`.
pub(crate) fn share(mut rows: usize, prompts: &[(i32, usize)], turn: usize, parts: &mut Vec<usize>) {
    parts.clear();
    parts.resize(prompts.len(), 0);
    let mut start = 0;
    for class in prompts.chunk_by(|a, b| a.0 == b.0) {
        let parts = &mut parts[start..start + class.len()];
        start += class.len();
        loop {
            let open = parts.iter().zip(class).filter(|(part, (_, missing))| *part < missing).count();
            if open == 0 || rows == 0 {
                break;
            }
            let (each, n) = ((rows / open).max(1), class.len());
            for i in (0..n).map(|i| (i + turn) % n) {
                let more = each.min(class[i].1 - parts[i]).min(rows);
                parts[i] += more;
                rows -= more;
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The next of numbers from 0 to 1 that are the same in every run.
    pub fn random(state: &mut u64) -> f64 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 40) as f64 / (1u64 << 24) as f64
    }

    /// A machine whose steps take a known time.
    struct Machine {
        /// Seconds of a step, of a sequence that generates, of a prompt's row, of each row before that one.
        costs: [f64; 4],
        /// Times are off by up to this part.
        noise: f64,
        state: u64,
    }

    impl Machine {
        fn time(&mut self, work: Work, done: usize) -> (f64, f64) {
            let [step, token, row, length] = self.costs;
            let rows = work.prompt_rows as f64;
            let exact = step + token * work.generating as f64 + rows * (row + length * done as f64);
            let mut measured = exact * (1.0 + self.noise * (2.0 * random(&mut self.state) - 1.0));
            if self.noise > 0.0 && random(&mut self.state) < 0.04 {
                measured *= 8.0;
            }
            (exact, measured)
        }
    }

    /// Runs a prompt of `n` rows beside sequences that generate (by step); gives exact times of the steps over those
    /// without prompts, and how many steps the prompt took.
    fn run(machine: &mut Machine, n: usize, generating: impl Fn(usize) -> usize) -> (Vec<f64>, usize) {
        let (mut pace, mut done, mut over) = (Pace::default(), 0, Vec::new());
        let mut empty = 0;
        for step in 0.. {
            if done == n {
                return (over, step);
            }
            let generating = generating(step);
            let prompt_rows = pace.rows(generating, 512).min(n - done);
            empty = if prompt_rows == 0 { empty + 1 } else { 0 };
            assert!(empty <= MEASURED, "{empty} steps in a row without prompts");
            let work = Work { generating, prompt_rows, draft_rows: 0 };
            let (exact, measured) = machine.time(work, done);
            let (alone, _) = machine.time(Work { prompt_rows: 0, ..work }, done);
            pace.record(work, Duration::from_secs_f64(measured));
            over.push(exact / alone);
            done += prompt_rows;
        }
        unreachable!("prompts end")
    }

    fn worst(over: &[f64]) -> f64 {
        over.iter().copied().fold(0.0, f64::max)
    }

    #[test]
    fn a_long_prompt_takes_no_more_time_than_generation() {
        for costs in
            [[10e-3, 0.9e-3, 1e-3, 0.0], [20e-3, 1e-3, 1.5e-3, 1e-6], [1e-3, 1e-4, 1e-5, 0.0], [5e-3, 4e-3, 4e-3, 0.0]]
        {
            for generating in [1, 8, 32] {
                let mut machine = Machine { costs, noise: 0.0, state: 1 };
                let (over, steps) = run(&mut machine, 4000, |_| generating);
                assert!(worst(&over) <= 2.0, "{costs:?}, {generating}: {}", worst(&over));
                // Nor does it wait: most steps are as long as they may be.
                let mean = over.iter().sum::<f64>() / steps as f64;
                assert!(mean > 1.35 || steps < 100, "{costs:?}, {generating}: {mean}");
            }
        }
    }

    #[test]
    fn others_come_and_go() {
        let costs = [5e-3, 1e-3, 0.5e-3, 0.0];
        let mut machine = Machine { costs, noise: 0.0, state: 1 };
        let (over, _) = run(&mut machine, 4000, |step| [1, 32, 2, 16][step / 20 % 4]);
        assert!(worst(&over) <= 2.2, "{}", worst(&over));
        // However often they do, prompts go on.
        let (_, steps) = run(&mut machine, 400, |step| [1, 32, 2, 16][step % 4]);
        assert!(steps <= 1600, "{steps} steps");
    }

    #[test]
    fn one_row_goes_round() {
        let (mut got, mut parts) = ([0; 4], Vec::new());
        for turn in 0..12 {
            share(1, &[(1, 90), (1, 2), (1, 5), (0, 9)], turn, &mut parts);
            got.iter_mut().zip(&parts).for_each(|(got, part)| *got += part);
        }
        assert_eq!(got, [4, 4, 4, 0]);
    }

    #[test]
    fn noise_is_no_measure() {
        for state in 0..40 {
            let mut machine = Machine { costs: [10e-3, 0.2e-3, 0.6e-3, 0.0], noise: 0.2, state };
            let (mut over, steps) = run(&mut machine, 4000, |_| 8);
            over.sort_by(f64::total_cmp);
            let most = over[over.len() * 95 / 100];
            assert!(most <= 2.75 && worst(&over) <= 4.0, "{state}: {most}, at worst {}", worst(&over));
            assert!(steps < 400, "{state}: {steps} steps");
        }
    }

    proptest! {
        #[test]
        fn any_times_are_a_pace(times in prop::collection::vec((0u64..u64::MAX, 0usize..40, 0usize..600), 0..60)) {
            let mut pace = Pace::default();
            for (nanos, generating, prompt_rows) in times {
                let rows = pace.rows(generating.max(1), 512);
                prop_assert!(rows <= 512);
                if generating + prompt_rows > 0 {
                    pace.record(Work { generating, prompt_rows, draft_rows: 0 }, Duration::from_nanos(nanos));
                }
            }
            for _ in 0..=MEASURED {
                pace.rows(3, 512);
                pace.record(Work { generating: 3, ..Work::default() }, Duration::ZERO);
            }
            prop_assert!((1..=512).contains(&pace.rows(3, 512)));
        }

        #[test]
        fn parts(rows in 0usize..3000, mut prompts in prop::collection::vec((0i32..3, 1usize..900), 0..9)) {
            prompts.sort_by_key(|p| -p.0);
            let mut parts = Vec::new();
            share(rows, &prompts, 0, &mut parts);
            let missing: usize = prompts.iter().map(|p| p.1).sum();
            prop_assert_eq!(parts.iter().sum::<usize>(), rows.min(missing));
            for (i, (p, part)) in prompts.iter().zip(&parts).enumerate() {
                prop_assert!(*part <= p.1);
                for (q, other) in prompts.iter().zip(&parts).skip(i + 1) {
                    // Who lacks rows is not behind one of the same priority that came later, nor of a lower one.
                    let lacks = *part < p.1;
                    prop_assert!(!lacks || part >= other || p.0 > q.0);
                    prop_assert!(!lacks || p.0 == q.0 || *other == 0);
                    let other_lacks = *other < q.1;
                    prop_assert!(!other_lacks || p.0 != q.0 || *part <= other + 1 || *part <= p.1.min(other + 1));
                }
            }
        }
    }
}
