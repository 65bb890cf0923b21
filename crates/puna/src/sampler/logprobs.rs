//! Log-probabilities of tokens: what the model said, before any bias, penalty or temperature.

use super::math::{ln, sum_exp};
use super::{SampleError, Scratch, check_finite};

/// The least log-probability ever given, also for a token of probability 0: as in OpenAI's interface, where JSON has no
/// infinity.
pub const MIN_LOGPROB: f64 = -9999.0;

/// A token and the natural logarithm of its probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub id: u32,
    /// [`MIN_LOGPROB`] to 0.
    pub logprob: f64,
}

/// The log-softmax of one row of logits. The maximum is subtracted before anything is exponentiated, so that no size of
/// logits overflows; the same bits come out on every machine.
#[derive(Debug, Clone, Copy)]
pub struct LogSoftmax<'a> {
    logits: &'a [f32],
    highest: f64,
    log_total: f64,
}

impl<'a> LogSoftmax<'a> {
    /// One pass over the `logits`.
    ///
    /// # Errors
    /// [`SampleError::NotFinite`] for NaN or +inf, [`SampleError::NothingLeft`] if all are -inf or there are none.
    pub fn new(logits: &'a [f32]) -> Result<LogSoftmax<'a>, SampleError> {
        check_finite(logits)?;
        let highest = logits.iter().fold(f32::NEG_INFINITY, |highest, &logit| highest.max(logit));
        if highest == f32::NEG_INFINITY {
            return Err(SampleError::NothingLeft { vocab_size: logits.len() });
        }
        let highest = f64::from(highest);
        let log_total = ln(sum_exp(logits, |&logit| f64::from(logit) - highest));
        Ok(LogSoftmax { logits, highest, log_total })
    }

    /// The log-probability of a token, not below [`MIN_LOGPROB`]; `None` outside the vocabulary.
    pub fn get(&self, id: u32) -> Option<f64> {
        let logit = f64::from(*self.logits.get(id as usize)?);
        Some((logit - self.highest - self.log_total).clamp(MIN_LOGPROB, 0.0))
    }

    /// Fills `top` with the `n` most likely tokens, likeliest first, the lower id first on a tie; fewer if fewer have a
    /// logit above -inf.
    pub fn top(&self, n: usize, scratch: &mut Scratch, top: &mut Vec<TokenLogprob>) {
        let candidates = &mut scratch.candidates;
        candidates.fill(self.logits, n);
        candidates.rank();
        top.clear();
        top.extend(
            candidates
                .items()
                .iter()
                .filter_map(|item| Some(TokenLogprob { id: item.id, logprob: self.get(item.id)? })),
        );
    }
}
