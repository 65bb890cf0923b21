//! From what the engine says to what a client reads.

use crate::openai::{ApiError, Card, Kind};
use puna::{Event, FinishReason, Request, Stats};
use puna_text::Tokenizer;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// A request on its way: what the engine is asked, and what becomes of its answers.
pub struct Job {
    /// What is asked of the engine; a request for completions can have several prompts.
    pub requests: Vec<Request>,
    /// The name of a prefix that is to be in the cache before they begin.
    pub prefix: Option<String>,
    /// What the client gets.
    pub answer: Answer,
}

/// What the client gets.
pub enum Answer {
    /// One object, when all is said.
    Whole(Box<dyn Assemble>),
    /// An object for each piece, as it comes.
    Stream(Box<dyn Stream>),
}

/// Makes one object of all events.
pub trait Assemble: Send {
    /// Takes an event of request `index`.
    ///
    /// # Errors
    /// If the engine could not go on with it.
    fn take(&mut self, index: usize, event: &Event) -> Result<(), ApiError>;

    /// The object, when every answer has ended.
    fn body(&mut self) -> Value;
}

/// Makes an object of each piece.
pub trait Stream: Send {
    /// Adds to `chunks` what an event of request `index` makes.
    ///
    /// # Errors
    /// If the engine could not go on with it.
    fn take(&mut self, index: usize, event: &Event, chunks: &mut Vec<Value>) -> Result<(), ApiError>;

    /// Adds what comes when every answer has ended.
    fn end(&mut self, chunks: &mut Vec<Value>);
}

/// What every object of an answer has.
#[derive(Clone, Debug)]
pub(crate) struct Header {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub fingerprint: String,
}

impl Header {
    /// An object with these choices.
    pub fn with(&self, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        })
    }
}

/// Counts of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Of the prompts, each counted once.
    pub prompt: usize,
    /// Of these, found in the cache.
    pub cached: usize,
    /// Of the answers.
    pub completion: usize,
    /// Of these, reasoning; told only where there is any.
    pub reasoning: usize,
}

impl Usage {
    /// Takes note of an event.
    pub fn take(&mut self, event: &Event) {
        self.completion += usize::from(event.token.is_some());
        if let Some(finish) = &event.finish
            && event.sample == 0
        {
            self.cached += finish.stats.cached_tokens;
        }
    }

    /// `usage`.
    pub fn value(&self) -> Value {
        let mut value = json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": { "cached_tokens": self.cached },
        });
        if self.reasoning > 0 {
            value["completion_tokens_details"] = json!({ "reasoning_tokens": self.reasoning });
        }
        value
    }
}

/// How long it took, as llama.cpp's server tells it.
pub(crate) fn timings(stats: &Stats) -> Value {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    json!({
        "cache_n": stats.cached_tokens,
        "prompt_n": stats.prompt_tokens - stats.cached_tokens,
        "prompt_ms": ms(stats.prompt_time),
        "prompt_per_second": stats.prompt_rate(),
        "predicted_n": stats.generated_tokens,
        "predicted_ms": ms(stats.generate_time),
        "predicted_per_second": stats.generate_rate(),
        "queue_ms": ms(stats.queue_time),
        "seed": stats.seed,
    })
}

/// `finish_reason`. `form`: the field that says what the answer must be, if one does.
///
/// # Errors
/// If it ended because the engine could not go on.
pub(crate) fn finish_reason(reason: &FinishReason, form: &str) -> Result<&'static str, ApiError> {
    match reason {
        FinishReason::Error(e) => Err(ApiError::of_engine(form, e)),
        FinishReason::Cancelled => Err(ApiError::new(Kind::Unavailable, "the request was ended by the server")),
        reason => Ok(reason.name()),
    }
}

/// A name that nobody else has, for an answer or a request.
pub(crate) fn unique(prefix: &str) -> String {
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicU64, Ordering};
    static START: LazyLock<u64> = LazyLock::new(|| getrandom::u64().unwrap_or_else(|_| super::model::now()));
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("{prefix}{:016x}{:08x}", *START, NEXT.fetch_add(1, Ordering::Relaxed))
}

/// What tokens of an answer are.
#[derive(Clone)]
pub(crate) struct Tokens {
    tokenizer: Option<Arc<Tokenizer>>,
    stop_ids: Vec<u32>,
}

impl Tokens {
    /// For answers to `request`.
    pub fn new(card: &Card, request: &Request) -> Tokens {
        Tokens { tokenizer: card.chat.tokenizer().ok().cloned(), stop_ids: request.stop_token_ids.clone() }
    }

    /// The tokenizer, where there is one.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_deref()
    }

    /// The token of an event, if it is part of the text: one that ends the answer is not.
    pub fn shown(&self, event: &Event) -> Option<u32> {
        let stops = event.finish.as_ref().is_some_and(|finish| finish.reason == FinishReason::Stop);
        let is_end =
            |id: &u32| self.stop_ids.contains(id) || self.tokenizer.as_ref().is_some_and(|t| t.eog_ids().contains(id));
        event.token.filter(|id| !(stops && is_end(id)))
    }
}
