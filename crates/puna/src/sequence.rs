//! One request on its way.

use crate::error::Error;
use crate::request::{Event, Finish, FinishReason, Request, RequestId, Stats};
use crate::sampler::{Sampler, Scratch};
use puna_model::SeqId;
use puna_text::{StopMatcher, TokenStream, Tokenizer};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

/// A sequence: its tokens, how many of them are computed, and how its text is made.
pub(crate) struct Sequence {
    pub id: RequestId,
    /// Its place in the cache; set by the engine.
    pub seq: SeqId,
    /// Prompt and answer.
    pub tokens: Vec<u32>,
    /// How many of the tokens are in the cache.
    pub computed: usize,
    /// How many of the prompt's were there before.
    pub cached: usize,
    /// How long the sequence was when its computed tokens were: what longrope goes by.
    pub total: usize,
    pub is_finished: bool,
    prompt_len: usize,
    /// Length at which it ends.
    limit: usize,
    sampler: Sampler,
    eog: BTreeSet<u32>,
    ignore_eos: bool,
    stream: Option<TokenStream<Arc<Tokenizer>>>,
    stop: StopMatcher,
    arrival: Instant,
    first_token: Option<Instant>,
    last_token: Instant,
}

impl Sequence {
    pub fn new(
        id: RequestId,
        request: Request,
        vocab: usize,
        ctx: usize,
        tokenizer: Option<Arc<Tokenizer>>,
    ) -> Result<Sequence, Error> {
        let eog = tokenizer.as_ref().map(|t| t.eog_ids().clone()).unwrap_or_default();
        let ids: Vec<u32> = eog.iter().copied().collect();
        let mut sampler = Sampler::new(&request.sampling, vocab, &ids)?;
        sampler.accept_prompt(&request.prompt);
        let prompt_len = request.prompt.len();
        let now = Instant::now();
        Ok(Sequence {
            id,
            seq: SeqId::NONE,
            computed: 0,
            cached: 0,
            total: 0,
            is_finished: false,
            prompt_len,
            limit: request.max_tokens.map_or(ctx, |n| prompt_len.saturating_add(n).min(ctx)),
            sampler,
            eog,
            ignore_eos: request.sampling.ignore_eos,
            stream: tokenizer.map(|t| TokenStream::continuing(t).skip_special(true)),
            stop: StopMatcher::new(&request.stop),
            tokens: request.prompt,
            arrival: now,
            first_token: None,
            last_token: now,
        })
    }

    /// Chooses the next token from the logits of the last one.
    pub fn sample(&mut self, logits: &[f32], scratch: &mut Scratch, now: Instant) -> Event {
        if self.tokens.len() >= self.limit {
            return self.finish(FinishReason::Length);
        }
        let token = match self.sampler.sample(logits, scratch) {
            Ok(token) => token,
            Err(e) => return self.finish(FinishReason::Error(e.into())),
        };
        self.first_token.get_or_insert(now);
        self.last_token = now;
        self.tokens.push(token);
        if self.eog.contains(&token) && !self.ignore_eos {
            return Event { token: Some(token), ..self.finish(FinishReason::Stop) };
        }
        self.sampler.accept(token);
        let piece = self.stream.as_mut().and_then(|s| s.push(token)).unwrap_or_default();
        let step = self.stop.push(&piece);
        let event = if step.stopped.is_some() {
            self.finish(FinishReason::Stop)
        } else if self.tokens.len() >= self.limit {
            self.finish(FinishReason::Length)
        } else {
            Event { id: self.id, computed: self.computed, token: None, text: String::new(), finish: None }
        };
        Event { token: Some(token), text: step.text + &event.text, ..event }
    }

    /// Ends the sequence: text that was held back comes out, unless a stop string ended it.
    pub fn finish(&mut self, reason: FinishReason) -> Event {
        self.is_finished = true;
        let mut text = String::new();
        if self.stop.stopped().is_none() {
            let tail = self.stream.as_mut().and_then(|s| s.finish()).unwrap_or_default();
            text = self.stop.push(&tail).text;
            text.push_str(&self.stop.finish());
        }
        let first = self.first_token.unwrap_or(self.last_token);
        let stats = Stats {
            prompt_tokens: self.prompt_len,
            cached_tokens: self.cached,
            generated_tokens: self.tokens.len() - self.prompt_len,
            prompt_time: first - self.arrival,
            generate_time: self.last_token - first,
            seed: self.sampler.seed(),
        };
        Event { id: self.id, computed: self.computed, token: None, text, finish: Some(Finish { reason, stats }) }
    }
}
