//! What goes into the engine and what comes out.

use crate::error::Error;
use crate::grammar::Grammar;
use crate::inside::{Capture, ExpertCounts};
use crate::sampler::{SamplingParams, TokenLogprob};
use puna_model::{Prompt, Steering, Timings};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A request in an [`Engine`](crate::Engine).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub(crate) u64);

/// Something to be continued.
#[derive(Clone, Debug)]
pub struct Request {
    /// What is continued: token ids, or rows of whatever the model takes.
    pub prompt: Prompt,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Most tokens to generate; `None`: as many as the context holds.
    pub max_tokens: Option<usize>,
    /// Texts that end the answer; they are not part of it. As end tokens do, they count from
    /// [`SamplingParams::min_tokens`] on.
    pub stop: Vec<String>,
    /// Tokens that end the answer as an end token does, also where end tokens are banned.
    pub stop_token_ids: Vec<u32>,
    /// Whether control tokens give no text.
    pub skip_special: bool,
    /// Who comes first where not all can run: the higher number, and then who came first.
    pub priority: i32,
    /// Answers wanted, 1 to [`MAX_SAMPLES`]. They share what is computed of the prompt; answer i is what the request
    /// with the seed plus i says alone.
    pub n: usize,
    /// Whether events tell the log-probabilities of tokens, and of how many of the most likely others.
    pub logprobs: Option<usize>,
    /// Whether the first event tells the log-probabilities of the prompt's tokens, and of how many of the most likely
    /// others. Nothing of such a prompt is taken from the cache.
    pub prompt_logprobs: Option<usize>,
    /// What the answer must be: it ends where the grammar does, or is cut off by a limit. Stronger than all of
    /// `sampling`.
    pub grammar: Option<Grammar>,
    /// Control tokens whose text is part of the answer's text, such as the markers of a
    /// [`ReplyFormat`](puna_text::ReplyFormat::markers).
    pub shown: Vec<String>,
    /// What is added to its residual.
    pub steering: Option<Arc<Steering>>,
    /// Whether residuals are wanted, and whose.
    pub capture: Option<Capture>,
    /// Whether [`Finish::experts`] tells how often each expert was chosen.
    pub count_experts: bool,
    /// Whether [`Finish::timings`] tells where its time went.
    pub timings: bool,
    /// Whether guesses at its tokens are verified, where the engine drafts: changes how fast they come, and nothing else.
    pub draft: bool,
    /// Since when it waits; `None`: since [`Engine::add`](crate::Engine::add).
    pub arrival: Option<Instant>,
}

/// Most answers of a request.
pub const MAX_SAMPLES: usize = 128;

impl Request {
    /// A request for one answer with the given sampling and no limits of its own.
    pub fn new(prompt: impl Into<Prompt>, sampling: SamplingParams) -> Request {
        Request {
            prompt: prompt.into(),
            sampling,
            max_tokens: None,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            skip_special: true,
            priority: 0,
            n: 1,
            logprobs: None,
            prompt_logprobs: None,
            grammar: None,
            shown: Vec::new(),
            steering: None,
            capture: None,
            count_experts: false,
            timings: false,
            draft: true,
            arrival: None,
        }
    }
}

/// What a step did for a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Whose it is.
    pub id: RequestId,
    /// Which of its answers, from 0.
    pub sample: usize,
    /// Positions computed so far.
    pub computed: usize,
    /// The token that was chosen.
    pub token: Option<u32>,
    /// How likely it was, if that was asked for.
    pub logprobs: Option<Logprobs>,
    /// Where that was asked for, on the first event of the first answer: of each row of the prompt, `None` for the first
    /// and for what is no token.
    pub prompt_logprobs: Vec<Option<Logprobs>>,
    /// Text that is final now: whole characters, nothing of a stop string.
    pub text: String,
    /// Set on the answer's last event.
    pub finish: Option<Finish>,
}

/// Log-probabilities at one position, before any bias, penalty or temperature.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// Of the token that was chosen.
    pub logprob: f64,
    /// The most likely tokens, as many as asked for, likeliest first.
    pub top: Vec<TokenLogprob>,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Finish {
    /// Why.
    pub reason: FinishReason,
    /// Counts and times.
    pub stats: Stats,
    /// Where the time from arrival to the end went, if that was asked for. Operations of a step count to its requests by
    /// their parts of its rows; [`Phase::Other`](crate::Phase::Other) is what went to the rows of others. Of several
    /// answers each counts the prompt.
    pub timings: Option<Box<Timings>>,
    /// How often each expert was chosen, if that was asked for and there are any. Of several answers the first counts
    /// the prompt.
    pub experts: Option<Box<ExpertCounts>>,
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
    /// Of these, how many were in the cache already and were not computed.
    pub cached_tokens: usize,
    /// Tokens generated, an end token included.
    pub generated_tokens: usize,
    /// From arrival to when work on it began.
    pub queue_time: Duration,
    /// From then to the first token.
    pub prompt_time: Duration,
    /// From the first token to the last.
    pub generate_time: Duration,
    /// How often it had to make room for others, and was computed again.
    pub preemptions: usize,
    /// Tokens that were guessed and verified.
    pub drafted_tokens: usize,
    /// Of these, how many were right.
    pub accepted_tokens: usize,
    /// The seed that reproduces the text.
    pub seed: u64,
}

impl Stats {
    /// From arrival to the first token.
    pub fn time_to_first_token(&self) -> Duration {
        self.queue_time + self.prompt_time
    }

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
