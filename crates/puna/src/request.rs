//! What goes into the engine and what comes out.

use crate::error::Error;
use crate::sampler::SamplingParams;
use std::time::Duration;

/// A request in an [`Engine`](crate::Engine).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestId(pub(crate) u64);

/// A text to be continued.
#[derive(Clone, Debug)]
pub struct Request {
    /// Token ids.
    pub prompt: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Most tokens to generate; `None`: as many as the context holds.
    pub max_tokens: Option<usize>,
    /// Texts that end the answer; they are not part of it.
    pub stop: Vec<String>,
}

impl Request {
    /// A request with the given sampling and no limits of its own.
    pub fn new(prompt: Vec<u32>, sampling: SamplingParams) -> Request {
        Request { prompt, sampling, max_tokens: None, stop: Vec::new() }
    }
}

/// What a step did for a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Whose it is.
    pub id: RequestId,
    /// Positions computed so far.
    pub computed: usize,
    /// The token that was chosen.
    pub token: Option<u32>,
    /// Text that is final now: whole characters, nothing of a stop string.
    pub text: String,
    /// Set on the request's last event.
    pub finish: Option<Finish>,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Finish {
    /// Why.
    pub reason: FinishReason,
    /// Counts and times.
    pub stats: Stats,
}

/// Why a request ended.
#[derive(Clone, Debug, PartialEq)]
pub enum FinishReason {
    /// An end token or a stop string.
    Stop,
    /// The limit of tokens, or the end of the context.
    Length,
    /// It was cancelled.
    Cancelled,
    /// No token could be chosen.
    Error(Error),
}

impl FinishReason {
    /// As OpenAI's interface names it.
    pub fn name(&self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled => "cancelled",
            FinishReason::Error(_) => "error",
        }
    }
}

/// Counts and times of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, how many were in the cache already.
    pub cached_tokens: usize,
    /// Tokens generated, an end token included.
    pub generated_tokens: usize,
    /// From arrival to the first token.
    pub prompt_time: Duration,
    /// From the first token to the last.
    pub generate_time: Duration,
    /// The seed that reproduces the text.
    pub seed: u64,
}

impl Stats {
    /// Prompt tokens computed a second.
    pub fn prompt_rate(&self) -> f64 {
        rate(self.prompt_tokens - self.cached_tokens, self.prompt_time)
    }

    /// Tokens generated a second, the first one aside: it comes with the prompt.
    pub fn generate_rate(&self) -> f64 {
        rate(self.generated_tokens.saturating_sub(1), self.generate_time)
    }
}

fn rate(n: usize, time: Duration) -> f64 {
    if n == 0 || time.is_zero() { 0.0 } else { n as f64 / time.as_secs_f64() }
}
