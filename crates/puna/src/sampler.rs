//! Sampling: from the logits of one position to the next token.
//!
//! The chain is llama.cpp's, in its order: logit bias, then `penalties`, `top_k`, `typ_p`, `top_p`, `min_p`,
//! `temperature`, then one draw from the softmax of what is left ([`SamplingParams::samplers`] reorders the named
//! stages). Each stage looks at the probabilities that the stages before it left, renormalised.
//!
//! **The same seed gives the same text on every machine.** All arithmetic is `+ - * /` and comparisons on IEEE numbers
//! in a fixed order, `exp` and `ln` included; candidates are ordered by (logit descending, id ascending) or by id. The
//! random bits are the key stream of ChaCha with 12 rounds, 64-bit counter 0 and stream 0, whose 256-bit key is the
//! seed as 8 little-endian bytes followed by 24 zero bytes. Every call that draws takes the next 8 bytes as a
//! little-endian integer n and uses u = (n >> 11) * 2^-53, so 0 <= u < 1; greedy calls take none. The token is the first
//! at which the running sum of weights exceeds u times their total.

mod candidates;
mod logprobs;
mod math;
mod params;
mod penalties;

use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

pub use self::logprobs::{LogSoftmax, MIN_LOGPROB, TokenLogprob};
pub use self::params::{LogitBias, MetaValue, PartialSampling, SamplerKind, SamplingParams};

use self::candidates::Candidates;
use self::penalties::Penalties;

/// Why no token was chosen, or no sampler made.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// A parameter, of a caller or of a model file, cannot be used.
    #[error("{field} must be {expected}, found {found}")]
    Param {
        /// The parameter or metadata key.
        field: String,
        /// What it may be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// The model's output is broken: NaN or +inf.
    #[error("the logits are not finite: token {id} has {value}")]
    NotFinite {
        /// The first such token.
        id: u32,
        /// NaN or +inf.
        value: f32,
    },
    /// Every logit is -inf, by the model, a mask, a bias or a ban.
    #[error("no token can be chosen: all {vocab_size} logits are -inf, by the model, a mask or logit_bias")]
    NothingLeft {
        /// How many there are.
        vocab_size: usize,
    },
    /// Every token that a grammar allows is banned.
    #[error(
        "no token can be chosen: all {allowed} tokens that the grammar allows here are banned, by logit_bias, ignore_eos or min_tokens, or -inf by the model"
    )]
    NothingAllowed {
        /// How many it allows.
        allowed: usize,
    },
    /// The row of logits is not the one this sampler was made for.
    #[error("expected {expected} logits (the size of the vocabulary), found {found}")]
    LogitsLen {
        /// The size of the vocabulary.
        expected: usize,
        /// The length of the row.
        found: usize,
    },
    /// The operating system gave no random seed.
    #[error("no random seed from the operating system: {0}")]
    Seed(String),
}

impl SampleError {
    fn param(field: impl Into<String>, expected: impl Into<String>, found: impl std::fmt::Display) -> SampleError {
        SampleError::Param { field: field.into(), expected: expected.into(), found: found.to_string() }
    }
}

/// Work memory for sampling. One serves any number of samplers, one after the other; it grows to the vocabulary's size
/// at most and then no call allocates.
#[derive(Debug, Clone, Default)]
pub struct Scratch {
    adjusted: Vec<f32>,
    candidates: Candidates,
}

/// A stage that is on, with its numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Stage {
    Penalties,
    TopK(usize),
    TypicalP(f64),
    TopP(f64),
    MinP(f64),
    Temperature(f64),
}

/// The sampling state of one sequence: its random stream and its recent tokens. A clone goes on exactly as the original
/// would.
#[derive(Debug, Clone)]
pub struct Sampler {
    vocab_size: usize,
    greedy: bool,
    stages: Vec<Stage>,
    min_keep: usize,
    /// Penalties come before every other stage, as they do by default.
    penalties_first: bool,
    penalties: Penalties,
    logit_bias: Vec<(u32, f32)>,
    eog: Vec<u32>,
    /// End tokens are banned while fewer tokens than this have been generated.
    min_tokens: u64,
    generated: u64,
    seed: u64,
    rng: ChaCha12Rng,
}

impl Sampler {
    /// A sampler for rows of `vocab_size` logits. `eog` are the ids that end a generation, for `ignore_eos` and
    /// `min_tokens`; ids outside the vocabulary are ignored, since the model cannot produce them.
    ///
    /// # Errors
    /// [`SampleError::Param`] for parameters that [`SamplingParams::validate`] refuses or a biased id outside the
    /// vocabulary; [`SampleError::Seed`].
    pub fn new(params: &SamplingParams, vocab_size: usize, eog: &[u32]) -> Result<Sampler, SampleError> {
        params.validate()?;
        let logit_bias: Vec<_> = params.logit_bias.0.iter().map(|(&id, &bias)| (id, bias)).collect();
        if let Some((id, _)) = logit_bias.iter().find(|(id, _)| *id as usize >= vocab_size) {
            return Err(SampleError::param("logit_bias", format!("about ids below {vocab_size}"), id));
        }
        let seed = match params.seed {
            Some(seed) => seed,
            // 32 bits are enough to differ and short enough to type; JSON keeps them exactly.
            None => u64::from(getrandom::u32().map_err(|e| SampleError::Seed(e.to_string()))?),
        };
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());

        let mut stages: Vec<_> =
            params.samplers.iter().filter_map(|&kind| Stage::new(kind, params, vocab_size)).collect();
        let penalties_first = stages.first() == Some(&Stage::Penalties);
        if penalties_first {
            stages.remove(0);
        }
        Ok(Sampler {
            vocab_size,
            greedy: params.temperature <= 0.0,
            stages,
            min_keep: params.min_keep,
            penalties_first,
            penalties: Penalties::new(params),
            logit_bias,
            eog: eog.iter().copied().filter(|&id| (id as usize) < vocab_size).collect(),
            min_tokens: if params.ignore_eos { u64::MAX } else { params.min_tokens.into() },
            generated: 0,
            seed,
            rng: ChaCha12Rng::from_seed(key),
        })
    }

    /// The seed in use: the one asked for, or the random one that was taken instead.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Takes note of the prompt's tokens, in order. They count for the penalties as generated ones do (as in
    /// llama.cpp), but not for `min_tokens`.
    pub fn accept_prompt(&mut self, ids: &[u32]) {
        for &id in ids {
            self.penalties.accept(id);
        }
    }

    /// Takes note of a generated token.
    pub fn accept(&mut self, id: u32) {
        self.penalties.accept(id);
        self.generated += 1;
    }

    /// Chooses the next token from its `logits` (`vocab_size` of them). It is not part of the history until
    /// [`accept`](Self::accept) is called with it.
    ///
    /// # Errors
    /// [`SampleError::LogitsLen`], [`SampleError::NotFinite`], [`SampleError::NothingLeft`]; no random bits are used up
    /// then.
    pub fn sample(&mut self, logits: &[f32], scratch: &mut Scratch) -> Result<u32, SampleError> {
        self.sample_among(logits, None, scratch)
    }

    /// As [`sample`](Self::sample), among the tokens whose bit is set in `allowed`, 32 to a word. This comes before
    /// everything else; log-probabilities do not know of it.
    ///
    /// # Errors
    /// As [`sample`](Self::sample); [`SampleError::NothingAllowed`].
    pub fn sample_among(
        &mut self,
        logits: &[f32],
        allowed: Option<&[u32]>,
        scratch: &mut Scratch,
    ) -> Result<u32, SampleError> {
        let candidates = self.narrow(logits, allowed, scratch).map_err(|e| match (e, allowed) {
            (SampleError::NothingLeft { .. }, Some(allowed)) => {
                SampleError::NothingAllowed { allowed: allowed.iter().map(|word| word.count_ones() as usize).sum() }
            }
            (e, _) => e,
        })?;
        let chosen = if self.greedy { candidates.best() } else { candidates.pick(uniform(&mut self.rng)) };
        chosen.ok_or(SampleError::NothingLeft { vocab_size: self.vocab_size })
    }

    /// The candidates that the chain leaves: at least one.
    fn narrow<'s>(
        &self,
        logits: &[f32],
        allowed: Option<&[u32]>,
        scratch: &'s mut Scratch,
    ) -> Result<&'s Candidates, SampleError> {
        if logits.len() != self.vocab_size {
            return Err(SampleError::LogitsLen { expected: self.vocab_size, found: logits.len() });
        }
        check_finite(logits)?;
        let Scratch { adjusted, candidates } = scratch;
        candidates.fill(self.adjust(logits, allowed, adjusted), self.limit());
        if candidates.items().is_empty() {
            return Err(SampleError::NothingLeft { vocab_size: self.vocab_size });
        }
        for &stage in &self.stages {
            match stage {
                Stage::Penalties => candidates.change(|id, logit, scale| self.penalties.apply(id, logit, scale)),
                Stage::TopK(k) => candidates.top_k(k),
                Stage::TypicalP(p) => candidates.typical_p(p, self.min_keep),
                Stage::TopP(p) => candidates.top_p(p, self.min_keep),
                Stage::MinP(p) => candidates.min_p(p, self.min_keep),
                Stage::Temperature(temperature) => candidates.divide(temperature),
            }
        }
        Ok(candidates)
    }

    /// The logits after the mask, biases, bans and leading penalties: the given ones if none of these changes any.
    fn adjust<'a>(&self, logits: &'a [f32], allowed: Option<&[u32]>, adjusted: &'a mut Vec<f32>) -> &'a [f32] {
        let penalize = self.penalties_first && self.penalties.is_active();
        let ban = self.generated < self.min_tokens && !self.eog.is_empty();
        if allowed.is_none() && !penalize && !ban && self.logit_bias.is_empty() {
            return logits;
        }
        adjusted.clear();
        adjusted.extend_from_slice(logits);
        if let Some(allowed) = allowed {
            mask(adjusted, allowed);
        }
        for &(id, bias) in &self.logit_bias {
            let logit = &mut adjusted[id as usize];
            *logit = if bias == f32::NEG_INFINITY { bias } else { saturate(f64::from(*logit) + f64::from(bias)) };
        }
        if ban {
            for &id in &self.eog {
                adjusted[id as usize] = f32::NEG_INFINITY;
            }
        }
        if penalize {
            for id in self.penalties.ids() {
                if let Some(logit) = adjusted.get_mut(id as usize) {
                    *logit = self.penalties.apply(id, *logit, 1.0);
                }
            }
        }
        adjusted
    }

    /// How many of the most likely tokens are all that the stages can need.
    fn limit(&self) -> usize {
        // Only these can pass over the likeliest token.
        let passes_over = |stage: &Stage| matches!(stage, Stage::TypicalP(_) | Stage::Penalties);
        match self.stages.first() {
            _ if self.greedy && !self.stages.iter().any(passes_over) => 1,
            Some(&Stage::TopK(k)) => k,
            _ => usize::MAX,
        }
    }
}

impl Stage {
    /// The stage of this kind, or `None` if the parameters turn it off.
    fn new(kind: SamplerKind, params: &SamplingParams, vocab_size: usize) -> Option<Stage> {
        let (typical_p, top_p, min_p) = (params.typical_p.into(), params.top_p.into(), params.min_p.into());
        match kind {
            SamplerKind::Penalties => Some(Stage::Penalties).filter(|_| Penalties::are_on(params)),
            SamplerKind::TopK => {
                usize::try_from(params.top_k).ok().filter(|k| (1..vocab_size).contains(k)).map(Stage::TopK)
            }
            SamplerKind::TypicalP => Some(Stage::TypicalP(typical_p)).filter(|_| typical_p < 1.0),
            SamplerKind::TopP => Some(Stage::TopP(top_p)).filter(|_| top_p < 1.0),
            SamplerKind::MinP => Some(Stage::MinP(min_p)).filter(|_| min_p > 0.0),
            SamplerKind::Temperature => {
                Some(Stage::Temperature(params.temperature.into())).filter(|_| params.temperature > 0.0)
            }
        }
    }
}

/// Bans the tokens whose bit is not set.
fn mask(logits: &mut [f32], allowed: &[u32]) {
    let words = allowed.iter().copied().chain(std::iter::repeat(0));
    for (logits, word) in logits.chunks_mut(32).zip(words) {
        match word {
            0 => logits.fill(f32::NEG_INFINITY),
            u32::MAX => {}
            word => {
                let banned = logits.iter_mut().enumerate().filter(|(i, _)| word >> i & 1 == 0);
                banned.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
            }
        }
    }
}

/// The next number of the random stream, 0 <= u < 1, a multiple of 2^-53.
fn uniform(rng: &mut ChaCha12Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// An error for the first logit that is NaN or +inf.
fn check_finite(logits: &[f32]) -> Result<(), SampleError> {
    // No early exit within a block: that makes it vector code.
    let bad = |value: &f32| value.is_nan() | (*value == f32::INFINITY);
    match logits.chunks(256).position(|block| block.iter().fold(false, |any, value| any | bad(value))) {
        None => Ok(()),
        Some(block) => {
            let id = block * 256 + logits[block * 256..].iter().position(bad).unwrap_or(0);
            Err(SampleError::NotFinite { id: id as u32, value: logits[id] })
        }
    }
}

/// The nearest finite f32; -inf and NaN stay.
fn saturate(logit: f64) -> f32 {
    if logit == f64::NEG_INFINITY { f32::NEG_INFINITY } else { logit.clamp(f32::MIN.into(), f32::MAX.into()) as f32 }
}

#[cfg(test)]
mod tests;
