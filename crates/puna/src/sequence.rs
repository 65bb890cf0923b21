//! One answer to a request on its way.

use crate::draft::{AnswerId, Guess, MAX_DRAFT, Text, Want};
use crate::error::Error;
use crate::grammar::State;
use crate::inside::Inside;
use crate::request::{Event, Finish, FinishReason, Logprobs, Request, RequestId, Stats};
use crate::sampler::{LogSoftmax, SampleError, Sampler, SamplingParams, Scratch};
use puna_model::rope::Rope;
use puna_model::{Batch, Chain, Config, Grown, KvCache, Phase, Prompt, Row, SeqId, Stopwatch};
use puna_text::{StopMatcher, StopStep, TokenStream, Tokenizer};
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A sequence: its rows, how many of them are computed, and how its text is made.
pub(crate) struct Sequence {
    pub id: RequestId,
    /// Which answer to the request.
    pub sample: usize,
    pub priority: i32,
    /// Its place in the cache, while it runs.
    pub seq: SeqId,
    /// How many of its rows are in the cache.
    pub computed: usize,
    pub is_finished: bool,
    /// Other answers, which begin when the prompt is computed.
    pub siblings: Vec<Sequence>,
    /// What may come next.
    pub guess: Guess,
    /// Whether that is guessed.
    drafts: bool,
    pub inside: Inside,
    prompt: Arc<Prompt>,
    answer: Vec<u32>,
    /// What its rows are.
    chain: Chain,
    /// How far positions of the answer are ahead of their place.
    delta: i64,
    /// Length at which it ends.
    pub limit: usize,
    sampler: Sampler,
    grammar: Option<State>,
    logprobs: Option<usize>,
    eog: BTreeSet<u32>,
    ignore_eos: bool,
    stop_ids: Vec<u32>,
    min_tokens: usize,
    /// Where the prompt's tokens are to be scored.
    scores: Option<Scores>,
    stream: Option<TokenStream<Arc<Tokenizer>>>,
    stop: StopMatcher,
    times: Times,
    cached: usize,
    preemptions: usize,
}

/// When what happened.
#[derive(Clone, Copy)]
struct Times {
    arrival: Instant,
    begin: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Instant,
}

/// Log-probabilities of a prompt's tokens.
struct Scores {
    /// How many of the most likely others are told.
    top: usize,
    /// Of the rows so far.
    rows: Vec<Option<Logprobs>>,
}

/// Most numbers of a step's logits that score prompts, of one prompt.
const MAX_SCORES: usize = 16 << 20;

/// What all sequences of an engine have in common.
pub(crate) struct Setting<'a> {
    pub config: &'a Config,
    pub ctx: usize,
    pub tokenizer: Option<Arc<Tokenizer>>,
}

impl Sequence {
    /// The answers to a request: one, which the others wait in. `chain`: what the prompt's rows are.
    pub fn new(id: RequestId, mut request: Request, chain: Chain, setting: &Setting) -> Result<Sequence, Error> {
        let now = request.arrival.unwrap_or_else(Instant::now);
        let inside = Inside::of(&mut request, setting.config);
        let eog = setting.tokenizer.as_ref().map(|t| t.eog_ids().clone()).unwrap_or_default();
        let banned = request.stop_token_ids.iter().filter(|_| !request.sampling.ignore_eos);
        let ids: Vec<u32> = eog.iter().chain(banned).copied().collect();
        let mut sampler = Sampler::new(&request.sampling, setting.config.vocab_size, &ids)?;
        request.prompt.tokens().for_each(|id| sampler.accept_prompt(&[id]));
        let (prompt_len, delta) = (request.prompt.len(), request.prompt.position_delta());
        let skip_special = request.skip_special;
        let stream = || {
            let new = |t| TokenStream::continuing(t).skip_special(skip_special).show(&request.shown);
            setting.tokenizer.clone().map(new)
        };
        let mut first = Sequence {
            id,
            sample: 0,
            priority: request.priority,
            seq: SeqId::NONE,
            computed: 0,
            is_finished: false,
            siblings: Vec::new(),
            guess: Guess::default(),
            drafts: request.draft,
            inside,
            prompt: Arc::new(request.prompt),
            answer: Vec::new(),
            chain,
            delta,
            limit: request.max_tokens.map_or(setting.ctx, |n| prompt_len.saturating_add(n).min(setting.ctx)),
            sampler,
            grammar: request.grammar.as_ref().map(State::new),
            logprobs: request.logprobs,
            eog,
            ignore_eos: request.sampling.ignore_eos,
            stop_ids: request.stop_token_ids.clone(),
            min_tokens: request.sampling.min_tokens as usize,
            scores: request.prompt_logprobs.map(|top| Scores { top, rows: vec![None] }),
            stream: stream(),
            stop: StopMatcher::new(&request.stop),
            times: Times { arrival: now, begin: None, first_token: None, last_token: now },
            cached: 0,
            preemptions: 0,
        };
        for sample in 1..request.n {
            let seed = Some(first.sampler.seed().wrapping_add(sample as u64));
            let sampling = SamplingParams { seed, ..request.sampling.clone() };
            let mut sampler = Sampler::new(&sampling, setting.config.vocab_size, &ids)?;
            first.prompt.tokens().for_each(|id| sampler.accept_prompt(&[id]));
            let sibling = Sequence {
                sample,
                siblings: Vec::new(),
                guess: Guess::default(),
                inside: first.inside.sibling(),
                prompt: first.prompt.clone(),
                answer: Vec::new(),
                chain: Chain::default(),
                sampler,
                grammar: request.grammar.as_ref().map(State::new),
                eog: first.eog.clone(),
                stop_ids: first.stop_ids.clone(),
                scores: None,
                stream: stream(),
                stop: StopMatcher::new(&request.stop),
                ..first
            };
            first.siblings.push(sibling);
        }
        Ok(first)
    }

    /// Rows, computed or not.
    pub fn len(&self) -> usize {
        self.prompt.len() + self.answer.len()
    }

    /// Rows of the prompt.
    pub fn prompt_len(&self) -> usize {
        self.prompt.len()
    }

    /// Rows that are not computed.
    pub fn missing(&self) -> usize {
        self.len() - self.computed
    }

    /// Whether all but its newest row is computed.
    pub fn is_generating(&self) -> bool {
        self.missing() == 1
    }

    /// The lowest comes first: the highest priority, and then who came first.
    pub fn rank(&self) -> (Reverse<i32>, RequestId, usize) {
        (Reverse(self.priority), self.id, self.sample)
    }

    /// Begins, or begins again, in the cache.
    pub fn begin(&mut self, kv: &mut KvCache, rope: &Rope) {
        self.seq = kv.add_shared();
        self.turn(kv, rope);
        self.adopt(kv);
    }

    /// Leaves the cache, to be computed again.
    pub fn preempt(&mut self, kv: &mut KvCache) {
        self.guess.tokens.clear();
        self.leave(kv);
        self.preemptions += 1;
    }

    /// Leaves the cache.
    pub fn leave(&mut self, kv: &mut KvCache) {
        kv.remove(self.seq);
        self.seq = SeqId::NONE;
        self.computed = 0;
        if self.answer.is_empty() {
            self.cached = 0;
        }
    }

    /// Work on it has begun.
    pub fn set_begun(&mut self, now: Instant) {
        self.times.begin.get_or_insert(now);
    }

    /// Where its rotation depends on its length, and the length has come to where it changes, nothing is computed.
    pub fn turn(&mut self, kv: &mut KvCache, rope: &Rope) {
        let is_long = rope.is_long(self.len());
        if self.chain.is_long() != is_long {
            self.chain.set_long(is_long);
            self.computed = kv.truncate(self.seq, 0);
        }
    }

    /// Whether rows of the prompt are still to be scored: all of them have to be computed.
    fn scores_prompt(&self) -> bool {
        self.scores.as_ref().is_some_and(|scores| scores.rows.len() < self.prompt.len())
    }

    /// Whether what is in the cache of the rows that are missing is of no use.
    pub fn needs_rows(&self) -> bool {
        self.scores_prompt() || self.inside.needs_rows(self.len())
    }

    /// Missing rows that one step may compute, of a vocabulary's size.
    pub fn most_rows(&self, vocab: usize) -> usize {
        let most = if self.scores_prompt() { (MAX_SCORES / vocab).max(1) } else { usize::MAX };
        self.missing().min(most)
    }

    /// Which answer it is.
    pub fn answer_id(&self) -> AnswerId {
        AnswerId { id: self.id, sample: self.sample }
    }

    /// What it is so far.
    pub fn text(&self) -> Text<'_> {
        Text { answer_id: self.answer_id(), prompt: &self.prompt.rows, answer: &self.answer }
    }

    /// A wish for a draft of at most so many tokens.
    pub fn want(&mut self, most: usize) -> Want<'_> {
        let text = Text { answer_id: self.answer_id(), prompt: &self.prompt.rows, answer: &self.answer };
        Want { text, most, draft: &mut self.guess.tokens }
    }

    /// Most tokens of a draft: as many as can come before the answer's last one; none where rotation would depend on
    /// them, or somebody would see rows that do not come.
    pub fn most_draft(&self, rope: &Rope) -> usize {
        if !self.drafts || self.answer.is_empty() || !self.is_generating() || self.inside.sees_rows() {
            return 0;
        }
        let most = self.limit.saturating_sub(self.len() + 1).min(MAX_DRAFT);
        if rope.is_long(self.len() + most) == self.chain.is_long() { most } else { 0 }
    }

    /// Takes what is in the cache of the rows that are missing.
    pub fn adopt(&mut self, kv: &mut KvCache) {
        if self.needs_rows() {
            return;
        }
        let len = kv.adopt(self.seq, &self.chain, self.len());
        if self.answer.is_empty() {
            self.cached += len - self.computed;
        }
        self.computed = len;
    }

    /// Whether another one's next block is the same as its own: one of them need not compute it.
    pub fn follows(&self, other: &Sequence) -> bool {
        let block = self.computed / puna_kernels::KV_BLOCK;
        other.computed / puna_kernels::KV_BLOCK == block && self.chain.shares(&other.chain, block)
    }

    /// Adds its next rows to a batch.
    pub fn push(&self, batch: &mut Batch, rows: usize, dim: usize) {
        let end = self.computed + rows;
        let grown = Grown { prompt: &self.prompt, answer: &self.answer, delta: self.delta };
        let first = batch.rows.len();
        batch.push_grown(self.seq, &grown, self.computed..end, dim);
        let scored = self.scored(self.computed..end).map(|row| (first + row - self.computed) as u32);
        batch.outputs.extend(scored);
        if let Some(steering) = &self.inside.steering {
            batch.steer(steering);
        }
        if end == self.len() {
            batch.outputs.push(batch.rows.len() as u32 - 1);
            batch.draft(&self.guess.tokens, self.delta);
        }
    }

    /// Rows of a range whose logits score the row of the prompt after them.
    fn scored(&self, range: Range<usize>) -> Range<usize> {
        let Some(scores) = &self.scores else { return 0..0 };
        // Row 0 has no score, so row i is scored by the logits of row i - 1.
        let (start, end) = (range.start.max(scores.rows.len() - 1), range.end.min(self.prompt.len() - 1));
        start..end.max(start)
    }

    /// Takes note of the step's last rows, whose logits come first in `logits`: scores of the prompt.
    ///
    /// # Errors
    /// Logits that are not finite.
    pub fn compute<'l>(
        &mut self,
        rows: usize,
        logits: &mut impl Iterator<Item = &'l [f32]>,
        scratch: &mut Scratch,
    ) -> Result<(), SampleError> {
        let scored = self.scored(self.computed..self.computed + rows);
        self.computed += rows;
        let Some(scores) = &mut self.scores else { return Ok(()) };
        let mut result = Ok(());
        for (row, logits) in scored.zip(logits) {
            let score = match self.prompt.rows[row + 1] {
                Row::Token(token) => self::logprobs(logits, token, scores.top, scratch).map(Some),
                Row::Embed(_) => Ok(None),
            };
            scores.rows.push(score.unwrap_or_else(|e| {
                result = Err(e);
                None
            }));
        }
        result
    }

    /// The siblings, with a place in the cache each: they go on from where this one is.
    pub fn split(&mut self, kv: &mut KvCache) -> Vec<Sequence> {
        let mut siblings = std::mem::take(&mut self.siblings);
        for sibling in &mut siblings {
            sibling.seq = kv.fork(self.seq).unwrap_or(SeqId::NONE);
            sibling.chain = self.chain.clone();
            sibling.computed = self.computed;
            sibling.cached = self.cached;
            sibling.preemptions = self.preemptions;
            sibling.times = self.times;
            sibling.inside.fork(&self.inside);
        }
        siblings
    }

    /// Chooses the next token from the logits of the last one, which came at `now`.
    pub fn sample(
        &mut self,
        logits: &[f32],
        scratch: &mut Scratch,
        (now, watch): (Instant, Option<&Stopwatch>),
    ) -> Event {
        let prompt_logprobs = self.scores.take().map(|scores| scores.rows).unwrap_or_default();
        Event { prompt_logprobs, ..self.go_on(logits, scratch, (now, watch)) }
    }

    /// Whether the draft's token `at` is the one that was chosen: its row counts as computed then.
    pub fn accept_draft(&mut self, at: usize) -> bool {
        let is_right = !self.is_finished && self.guess.tokens.get(at) == self.answer.last();
        self.computed += usize::from(is_right);
        self.guess.accepted += usize::from(is_right);
        is_right
    }

    fn go_on(&mut self, logits: &[f32], scratch: &mut Scratch, (now, watch): (Instant, Option<&Stopwatch>)) -> Event {
        if self.len() >= self.limit {
            return self.finish(FinishReason::Length);
        }
        let chosen = self.choose(logits, scratch, watch);
        self.inside.lap(watch, Phase::Sampling);
        let (token, logprobs) = match chosen {
            Ok(chosen) => chosen,
            Err(e) => return self.finish(FinishReason::Error(e)),
        };
        self.times.first_token.get_or_insert(now);
        self.times.last_token = now;
        let position = (self.len() as i64 + self.delta) as u32;
        self.chain.push_token(token, [position; 3]);
        self.answer.push(token);
        let ends = self.eog.contains(&token) && !self.ignore_eos;
        if ends || (self.stop_ids.contains(&token) && self.answer.len() > self.min_tokens) {
            return Event { token: Some(token), logprobs, ..self.finish(FinishReason::Stop) };
        }
        self.sampler.accept(token);
        let is_complete = match self.grammar.as_mut().map(|grammar| grammar.accept(token)).transpose() {
            Ok(is_complete) => is_complete == Some(true),
            Err(e) => return Event { token: Some(token), logprobs, ..self.finish(FinishReason::Error(e)) },
        };
        if self.grammar.is_some() {
            self.inside.lap(watch, Phase::Grammar);
        }
        let piece = self.stream.as_mut().and_then(|s| s.push(token)).unwrap_or_default();
        let counts = self.answer.len() > self.min_tokens;
        let step = if counts { self.stop.push(&piece) } else { StopStep { text: piece, stopped: None } };
        self.inside.lap(watch, Phase::Detokenize);
        let event = if step.stopped.is_some() || is_complete {
            self.finish(FinishReason::Stop)
        } else if self.len() >= self.limit {
            self.finish(FinishReason::Length)
        } else {
            self.progress()
        };
        Event { token: Some(token), logprobs, text: step.text + &event.text, ..event }
    }

    /// The next token, and how likely it was if that is asked for.
    fn choose(
        &mut self,
        logits: &[f32],
        scratch: &mut Scratch,
        watch: Option<&Stopwatch>,
    ) -> Result<(u32, Option<Logprobs>), Error> {
        let allowed = self.grammar.as_mut().map(State::mask).transpose()?;
        if allowed.is_some() {
            self.inside.lap(watch, Phase::Grammar);
        }
        let token = self.sampler.sample_among(logits, allowed, scratch)?;
        let logprobs = self.logprobs.map(|n| logprobs(logits, token, n, scratch)).transpose()?;
        Ok((token, logprobs))
    }

    /// An event that says only how far it is.
    pub fn progress(&self) -> Event {
        Event {
            id: self.id,
            sample: self.sample,
            computed: self.computed,
            token: None,
            logprobs: None,
            prompt_logprobs: Vec::new(),
            text: String::new(),
            finish: None,
        }
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
        let stats = self.stats();
        let timings = self.inside.close(stats.queue_time, self.times.arrival.elapsed());
        let finish = Finish { reason, stats, timings, experts: self.inside.experts.take() };
        Event { text, finish: Some(finish), ..self.progress() }
    }

    fn stats(&self) -> Stats {
        let Times { arrival, begin, first_token, last_token } = self.times;
        let begun = begin.unwrap_or(arrival);
        Stats {
            prompt_tokens: self.prompt.len(),
            cached_tokens: self.cached,
            generated_tokens: self.answer.len(),
            queue_time: begin.map_or_else(|| arrival.elapsed(), |begin| begin - arrival),
            prompt_time: first_token.map_or(Duration::ZERO, |first| first - begun),
            generate_time: first_token.map_or(Duration::ZERO, |first| last_token - first),
            preemptions: self.preemptions,
            drafted_tokens: self.guess.drafted,
            accepted_tokens: self.guess.accepted,
            seed: self.sampler.seed(),
        }
    }
}

fn logprobs(logits: &[f32], token: u32, n: usize, scratch: &mut Scratch) -> Result<Logprobs, SampleError> {
    let softmax = LogSoftmax::new(logits)?;
    let mut top = Vec::new();
    softmax.top(n, scratch, &mut top);
    let logprob = softmax.get(token).expect("the token is one of the logits'");
    Ok(Logprobs { logprob, top })
}
