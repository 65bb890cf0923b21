//! The tokens still in the running for one draw, and the ways of narrowing them down.

use std::cmp::Ordering;

use super::math::{exp, for_each_exp, ln, sum_exp};

/// A token and its logit, which is finite and never -0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Candidate {
    pub id: u32,
    pub logit: f32,
}

/// Most likely first, the lower id first on a tie: a total order, so that a set has one sorted form.
fn by_rank(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}

/// Bins a sixteenth of a nat wide; the last one takes all that is farther away.
const BINS: usize = 512;

/// The bin of a distance, which is 0 or more.
fn bin(distance: f64) -> usize {
    (distance * 16.0).min((BINS - 1) as f64) as i32 as usize
}

/// Between two stages the items are ordered either by id or by rank, so that every sum over them has one order and
/// one result.
#[derive(Debug, Clone, Default)]
pub(super) struct Candidates {
    items: Vec<Candidate>,
    ranked: bool,
    /// 1 / temperature. Logits stay undivided, lest a small temperature take them to infinity.
    sharpness: f64,
}

impl Candidates {
    /// Starts over with the `limit` most likely of all tokens whose logit is above -inf; none may be NaN or +inf.
    /// They come ordered by rank if there is a limit below the number of logits, else by id.
    pub fn fill(&mut self, logits: &[f32], limit: usize) {
        const BLOCK: usize = 64;
        self.items.clear();
        self.sharpness = 1.0;
        self.ranked = limit < logits.len();
        let capacity = if self.ranked { limit.max(BLOCK).saturating_mul(2) } else { usize::MAX };
        // What a logit must exceed: an equal one with a later id ranks behind all those kept.
        let mut floor = f32::NEG_INFINITY;
        for (block, values) in logits.chunks(BLOCK).enumerate() {
            // Nearly every block of a large vocabulary falls to this test, which is vector code.
            if !values.iter().fold(false, |any, &logit| any | (logit > floor)) {
                continue;
            }
            for (i, &logit) in values.iter().enumerate() {
                if logit > floor {
                    // Adding 0 turns -0 into +0, which total_cmp would rank higher.
                    self.items.push(Candidate { id: (block * BLOCK + i) as u32, logit: logit + 0.0 });
                }
            }
            if self.items.len() >= capacity {
                self.select(limit);
                floor = self.items.last().map_or(floor, |worst| worst.logit);
            }
        }
        if self.ranked {
            self.select(limit);
            self.items.sort_unstable_by(by_rank);
        }
    }

    /// Orders the items by rank.
    pub fn rank(&mut self) {
        if !self.ranked {
            self.items.sort_unstable_by(by_rank);
            self.ranked = true;
        }
    }

    pub fn items(&self) -> &[Candidate] {
        &self.items
    }

    /// Keeps the `k` most likely in no particular order, the k-th last.
    fn select(&mut self, k: usize) {
        if k < self.items.len() {
            if k > 0 {
                self.items.select_nth_unstable_by(k - 1, by_rank);
            }
            self.items.truncate(k);
        }
    }

    /// Keeps the `k` most likely.
    pub fn top_k(&mut self, k: usize) {
        if k < self.items.len() {
            if !self.ranked {
                self.select(k);
            }
            self.rank();
            self.items.truncate(k);
        }
    }

    /// Divides the logits by `temperature`, which is above 0.
    pub fn divide(&mut self, temperature: f64) {
        // No list of stages can take it to 0 or infinity, and no logit times it overflows.
        self.sharpness = (self.sharpness / temperature).clamp(1e-200, 1e200);
    }

    /// Replaces each logit by `f(id, logit, temperature)`, in units of the undivided logits.
    pub fn change(&mut self, f: impl Fn(u32, f32, f64) -> f32) {
        let temperature = 1.0 / self.sharpness;
        for item in &mut self.items {
            item.logit = f(item.id, item.logit, temperature) + 0.0;
        }
        if self.ranked {
            self.items.sort_unstable_by(by_rank);
        }
    }

    /// The logarithm of each candidate's weight: the logit less the highest logit, over the temperature. Not above 0.
    fn exponent(&self) -> impl Fn(&Candidate) -> f64 + Copy + use<> {
        let highest = match self.items.first() {
            Some(first) if self.ranked => first.logit,
            _ => self.items.iter().fold(f32::NEG_INFINITY, |highest, item| highest.max(item.logit)),
        };
        let sharpness = self.sharpness;
        move |item| (f64::from(item.logit) - f64::from(highest)) * sharpness
    }

    /// Keeps the fewest most likely candidates, at least `min_keep`, that hold the probability `p` (0 to 1).
    pub fn top_p(&mut self, p: f64, min_keep: usize) {
        let exponent = self.exponent();
        let distance = |item: &Candidate| -exponent(item);
        let bins = self.bins(exponent, distance);
        let target = p * bins.iter().map(|bin| bin.0).sum::<f64>();
        let enough = |sum: f64, count: usize| sum >= target && count >= min_keep;
        if !self.ranked {
            self.shortlist(&bins, distance, enough);
            self.rank();
        }
        self.cut(exponent, enough);
    }

    /// Keeps the candidates at least `p` (0 to 1, not 0) times as likely as the likeliest, and at least `min_keep`.
    pub fn min_p(&mut self, p: f64, min_keep: usize) {
        let exponent = self.exponent();
        let lowest = ln(p);
        if self.items.iter().filter(|item| exponent(item) >= lowest).count() >= min_keep {
            self.items.retain(|item| exponent(item) >= lowest);
        } else {
            self.top_k(min_keep);
        }
    }

    /// Keeps the fewest most typical candidates, at least `min_keep`, that hold more than the probability `p`.
    /// The most typical are those with the least |surprisal - entropy| (Meister et al., arXiv 2202.00666).
    pub fn typical_p(&mut self, p: f64, min_keep: usize) {
        let exponent = self.exponent();
        let (mut total, mut mean) = (0.0, 0.0);
        for_each_exp(&self.items, exponent, |item, weight| {
            total += weight;
            mean += weight * exponent(item);
        });
        mean /= total;
        // surprisal = ln(total) - exponent and entropy = ln(total) - mean exponent: the logarithm cancels.
        let distance = |item: &Candidate| (exponent(item) - mean).abs();
        let enough = |sum: f64, count: usize| sum > p * total && count >= min_keep;
        self.shortlist(&self.bins(exponent, distance), distance, enough);
        self.items.sort_unstable_by(|a, b| distance(a).total_cmp(&distance(b)).then(a.id.cmp(&b.id)));
        self.cut(exponent, enough);
        self.ranked = false;
        self.rank();
    }

    /// The sum of weights and the number of the candidates in each of the bins of growing distance.
    fn bins(&self, exponent: impl Fn(&Candidate) -> f64, distance: impl Fn(&Candidate) -> f64) -> [(f64, usize); BINS] {
        let mut bins = [(0.0, 0); BINS];
        for_each_exp(&self.items, exponent, |item, weight| {
            let (sum, count) = &mut bins[bin(distance(item))];
            *sum += weight;
            *count += 1;
        });
        bins
    }

    /// Drops candidates too far away to be among the nearest whose (sum of weights, count) is `enough`. So a nucleus
    /// out of a large vocabulary is found in linear time: what remains to sort is little more than the nucleus.
    fn shortlist(
        &mut self,
        bins: &[(f64, usize); BINS],
        distance: impl Fn(&Candidate) -> f64,
        enough: impl Fn(f64, usize) -> bool,
    ) {
        let (mut sum, mut count) = (0.0, 0);
        let last = bins.iter().position(|bin| {
            sum += bin.0;
            count += bin.1;
            // Less a margin for the rounding of a sum in another order.
            enough(sum * (1.0 - 1e-9), count)
        });
        if let Some(last) = last {
            self.items.retain(|item| bin(distance(item)) <= last);
        }
    }

    /// Keeps the candidates up to the first at which (sum of weights, count) is `enough`.
    fn cut(&mut self, exponent: impl Fn(&Candidate) -> f64, enough: impl Fn(f64, usize) -> bool) {
        let mut sum = 0.0;
        let last = self.items.iter().enumerate().position(|(i, item)| {
            sum += exp(exponent(item));
            enough(sum, i + 1)
        });
        if let Some(last) = last {
            self.items.truncate(last + 1);
        }
    }

    /// The most likely candidate.
    pub fn best(&self) -> Option<u32> {
        self.items.iter().min_by(|a, b| by_rank(a, b)).map(|item| item.id)
    }

    /// The candidate at which the running sum of the probabilities, in the order of the candidates, first exceeds
    /// `u` (0 <= u < 1).
    pub fn pick(&self, u: f64) -> Option<u32> {
        let exponent = self.exponent();
        let target = u * sum_exp(&self.items, exponent);
        let mut sum = 0.0;
        let mut last = None;
        for item in &self.items {
            let weight = exp(exponent(item));
            sum += weight;
            if weight > 0.0 {
                last = Some(item.id);
            }
            if sum > target {
                break;
            }
        }
        // When rounding made the target the whole sum, this is the last token of any probability.
        last
    }
}

#[cfg(test)]
impl Candidates {
    /// Each id with its probability, in the order of the candidates.
    pub fn probabilities(&self) -> impl Iterator<Item = (u32, f64)> {
        let exponent = self.exponent();
        let total = sum_exp(&self.items, exponent);
        self.items.iter().map(move |item| (item.id, exp(exponent(item)) / total))
    }
}
