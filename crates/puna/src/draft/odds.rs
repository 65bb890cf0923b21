//! How long drafts should be: what their rows cost is measured, and so is how often they are right.
//!
//! A row more costs little where a step waits for memory, and as much as a token where it does not. A draft's token j is
//! of use with probability p^j. The lengths are those with the most tokens a second, and none where that is no draft.
//!
//! Estimates can be wrong, and what is never tried is never known. So there is an account: each step pays in a small part
//! of its time, a draft pays the time that it took more, and gets what its right tokens would have taken. Who is in debt
//! does not draft. So drafts that are always wrong cost [`INCOME`] of the time at most, beside what was gained before.

use crate::pace::{Recent, Work};
use std::time::Duration;

/// The part of time that may be lost.
const INCOME: f64 = 0.015;
/// What is there at first, and the most that is kept, in steps without drafts.
const CREDIT: f64 = 2.0;
const SAVINGS: f64 = 8.0;
/// So many steps without drafts tell what they take; after so many with drafts, one tells anew.
const MEASURED: usize = 2;
const REFRESH: usize = 64;
/// Most rows of drafts in a step.
const MAX_ROWS: usize = 64;
/// Gains below this part of a step are none.
const MARGIN: f64 = 1.03;
/// A draft of a step that only finds out whether they are right.
const PROBE: usize = 2;
/// A draft of a step that finds out what rows cost.
const FIRST: usize = 4;

/// How often guesses were right lately.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Odds {
    right: f64,
    tried: f64,
}

impl Odds {
    /// What happened before counts for less with each draft, and for at most so many guesses.
    const KEPT: f64 = 0.75;
    const MOST: f64 = 8.0;

    /// A draft of `drafted` tokens, of which the first `accepted` were right. What came behind a wrong one tells nothing.
    pub fn record(&mut self, drafted: usize, accepted: usize) {
        self.right = self.right * Odds::KEPT + accepted as f64;
        self.tried = self.tried * Odds::KEPT + drafted.min(accepted + 1) as f64;
        let scale = (Odds::MOST / self.tried).min(1.0);
        self.right *= scale;
        self.tried *= scale;
    }

    /// How likely a guess is right if all before it are, where nothing else is known than that others were with
    /// probability `before`.
    fn chance(&self, before: f64) -> f64 {
        ((self.right + before) / (self.tried + 1.0)).min(0.98)
    }
}

/// What drafts cost and bring.
#[derive(Debug, Default)]
pub(crate) struct Wager {
    /// Of all sequences.
    pub odds: Odds,
    /// Of steps without drafts, in seconds, and of how many sequences.
    plain: Recent,
    generating: usize,
    /// What a row of a draft took more, in seconds, by how many there were: 1, 2, 3 or 4, 5 to 8, ..
    rows: [Recent; 7],
    /// For how many sequences that was measured.
    rows_generating: usize,
    /// Steps with drafts since the last one without.
    drafted: usize,
    /// Seconds that may be lost.
    balance: Option<f64>,
    /// Whose turn it is to find out.
    turn: usize,
    /// Rows of drafts that might be added: probability that they bring a token, and the sequence.
    order: Vec<(f64, usize)>,
}

/// Where the cost of so many rows is kept.
fn class(rows: usize) -> usize {
    (rows.max(1).next_power_of_two().trailing_zeros() as usize).min(6)
}

impl Wager {
    /// Cuts the lengths of drafts that sequences could have to those that are worth it: `odds` of each, most rows in all,
    /// and whether prompts are read beside them, so that nothing can be found out.
    pub fn lengths<'o>(
        &mut self,
        generating: usize,
        odds: impl Iterator<Item = &'o Odds>,
        lengths: &mut [usize],
        most: usize,
        beside: bool,
    ) {
        if generating != self.generating {
            self.plain.clear();
            self.generating = generating;
        }
        if generating > 2 * self.rows_generating || 2 * generating < self.rows_generating {
            self.rows.iter_mut().for_each(Recent::clear);
            self.rows_generating = generating;
        }
        let known = self.plain.median().filter(|_| self.plain.len() >= MEASURED && self.drafted < REFRESH);
        let (Some(plain), true) = (known, lengths.iter().any(|&length| length > 0)) else {
            return lengths.fill(0);
        };
        let balance = *self.balance.get_or_insert(CREDIT * plain);
        if balance <= 0.0 {
            return lengths.fill(0);
        }
        self.sort(odds, lengths);
        let mut rows = self.best(plain, most.min(MAX_ROWS));
        if rows == 0 && !beside {
            rows = self.probe(balance).min(most);
        }
        lengths.fill(0);
        self.order[..rows].iter().for_each(|&(_, at)| lengths[at] += 1);
    }

    /// Rows that drafts could have, the likeliest first.
    fn sort<'o>(&mut self, odds: impl Iterator<Item = &'o Odds>, lengths: &[usize]) {
        // One guess of two: a first draft has to find out.
        let before = self.odds.chance(0.5);
        self.order.clear();
        for (at, (odds, &length)) in odds.zip(lengths).enumerate() {
            let chance = odds.chance(before);
            let mut right = 1.0;
            for _ in 0..length {
                right *= chance;
                self.order.push((right, at));
            }
        }
        // Stable: of a sequence, earlier rows come first.
        self.order.sort_by(|a, b| b.0.total_cmp(&a.0));
    }

    /// How many rows of drafts give the most tokens a second; none where their cost is not known.
    fn best(&self, plain: f64, most: usize) -> usize {
        let mut tokens = self.generating as f64;
        let (mut best, mut rate) = (0, tokens / plain * MARGIN);
        for (i, (right, _)) in self.order.iter().take(most).enumerate() {
            tokens += right;
            let Some(row) = self.row(i + 1) else { return 0 };
            let new = tokens / (plain + row * (i + 1) as f64);
            if new > rate {
                (best, rate) = (i + 1, new);
            }
        }
        best
    }

    /// What a row costs where there are `rows`: as measured for about as many.
    fn row(&self, rows: usize) -> Option<f64> {
        let at = class(rows);
        let below = self.rows[..=at].iter().rev().find_map(Recent::median);
        below.or_else(|| self.rows[at..].iter().find_map(Recent::median))
    }

    /// How many rows of one sequence's draft find something out, if that can be paid: these come first in the order then.
    fn probe(&mut self, balance: f64) -> usize {
        let most = match self.row(PROBE) {
            Some(row) if row * PROBE as f64 > balance => return 0,
            Some(_) => PROBE,
            None => FIRST,
        };
        self.turn += 1;
        let of_turn = self.turn % self.order.iter().map(|(_, at)| at + 1).max().unwrap_or(1);
        let at = self.order.iter().map(|(_, at)| *at).filter(|at| *at >= of_turn).min();
        let Some(at) = at else { return 0 };
        self.order.retain(|row| row.1 == at);
        self.order.len().min(most)
    }

    /// Takes note of what a step took, drafting included, and how many guesses were right.
    pub fn record(&mut self, work: Work, time: Duration, accepted: usize) {
        let time = time.as_secs_f64();
        if work.prompt_rows > 0 || work.generating == 0 {
            return;
        }
        if work.draft_rows == 0 {
            if work.generating == self.generating {
                self.plain.push(time);
            }
            self.drafted = 0;
        }
        let Some(plain) = self.plain.median() else { return };
        let mut change = INCOME * time.min(2.0 * plain);
        if work.draft_rows > 0 {
            self.drafted += 1;
            let rows = work.draft_rows as f64;
            let more = (time - plain).max(0.0);
            // A step that takes far more than others did is a slow one, whatever it computed.
            let most = self.row(work.draft_rows).map_or(rows * plain, |row| (2.0 * row * rows).max(plain));
            self.rows[class(work.draft_rows)].push(more / rows);
            let more = more.min(most);
            change += accepted as f64 * plain / work.generating as f64 - more;
        }
        let balance = self.balance.unwrap_or(CREDIT * plain) + change;
        self.balance = Some(balance.clamp(-SAVINGS * plain, SAVINGS * plain));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pace::tests::random;
    use proptest::prelude::*;

    /// Sequences whose guesses are right with a known probability, on a machine whose rows take a known time.
    struct Machine {
        /// Seconds of a step, and of a row.
        step: f64,
        row: f64,
        noise: f64,
        state: u64,
    }

    impl Machine {
        /// Makes each of `n` sequences say `len` tokens; `chance` by how many it has said. Gives the time, over that
        /// without drafts.
        fn run(&mut self, n: usize, len: usize, chance: impl Fn(usize) -> f64) -> f64 {
            let (mut wager, mut odds, mut said) = (Wager::default(), vec![Odds::default(); n], vec![0; n]);
            let (mut time, mut least) = (0.0, 0);
            while least < len {
                let mut lengths = vec![16; n];
                wager.lengths(n, odds.iter(), &mut lengths, usize::MAX, false);
                let mut accepted = 0;
                for i in 0..n {
                    let right = (0..lengths[i]).take_while(|_| random(&mut self.state) < chance(said[i])).count();
                    if lengths[i] > 0 {
                        odds[i].record(lengths[i], right);
                        wager.odds.record(lengths[i], right);
                    }
                    said[i] += 1 + right;
                    accepted += right;
                }
                let draft_rows = lengths.iter().sum();
                let exact = self.step + self.row * (n + draft_rows) as f64;
                let mut measured = exact * (1.0 + self.noise * (2.0 * random(&mut self.state) - 1.0));
                if self.noise > 0.0 && random(&mut self.state) < 0.02 {
                    measured *= 5.0;
                }
                time += exact;
                let work = Work { generating: n, prompt_rows: 0, draft_rows };
                wager.record(work, Duration::from_secs_f64(measured), accepted);
                least = said.iter().copied().min().unwrap_or(len);
            }
            let tokens: usize = said.iter().sum();
            time / ((self.step + self.row * n as f64) / n as f64 * tokens as f64)
        }
    }

    #[test]
    fn wrong_guesses_cost_little() {
        for (step, row) in [(10e-3, 1e-3), (10e-3, 0.1e-3), (1e-3, 5e-3), (5e-3, 2e-3)] {
            for n in [1, 4, 16] {
                for chance in [0.0, 0.1, 0.3] {
                    for (noise, state) in [(0.0, 1), (0.1, 2), (0.1, 3)] {
                        let mut machine = Machine { step, row, noise, state };
                        let over = machine.run(n, 500, |_| chance);
                        assert!(over <= 1.03, "{step} {row}, {n} sequences, {chance}, noise {noise}: {over}");
                    }
                }
            }
        }
    }

    #[test]
    fn right_guesses_save_time() {
        let mut machine = Machine { step: 8e-3, row: 1.5e-3, noise: 0.05, state: 1 };
        let over = machine.run(1, 400, |_| 0.95);
        assert!(over < 0.45, "{over}");
        let over = machine.run(4, 400, |_| 0.95);
        assert!(over < 0.7, "{over}");
        // Not where a row takes as long as a token.
        let over = Machine { step: 0.1e-3, row: 5e-3, noise: 0.0, state: 1 }.run(8, 400, |_| 0.9);
        assert!((0.95..1.03).contains(&over), "{over}");
    }

    #[test]
    fn it_is_noticed_when_guesses_become_right_or_wrong() {
        for state in 0..10 {
            let mut machine = Machine { step: 8e-3, row: 1.5e-3, noise: 0.05, state };
            let over = machine.run(1, 1000, |said| if said < 300 { 0.02 } else { 0.95 });
            assert!(over < 0.75, "{state}: {over}");
            let over = machine.run(1, 1000, |said| if said < 300 { 0.95 } else { 0.02 });
            assert!(over < 0.93, "{state}: {over}");
        }
    }

    proptest! {
        /// Whatever times are measured, lengths stay within what could be.
        #[test]
        fn any_times(steps in prop::collection::vec((0u64..u64::MAX, 0usize..6, 0usize..9, any::<bool>()), 1..80)) {
            let (mut wager, mut odds) = (Wager::default(), [Odds::default(); 6]);
            for (nanos, generating, most, beside) in steps {
                let wish: Vec<usize> = (0..6).map(|i| if i < generating { (i * 7 + most) % 17 } else { 0 }).collect();
                let mut lengths = wish.clone();
                let rows = if beside { most } else { usize::MAX };
                wager.lengths(generating, odds.iter(), &mut lengths, rows, beside);
                prop_assert!(lengths.iter().zip(&wish).all(|(length, wish)| length <= wish));
                let draft_rows: usize = lengths.iter().sum();
                prop_assert!(draft_rows <= rows.min(MAX_ROWS));
                let accepted = if most % 2 == 0 { draft_rows } else { 0 };
                odds[0].record(lengths[0], accepted.min(lengths[0]));
                let work = Work { generating, prompt_rows: usize::from(beside), draft_rows };
                wager.record(work, Duration::from_nanos(nanos), accepted);
            }
        }
    }
}
