//! The engine: many sequences, one step at a time.
//!
//! There is no prefill phase and no decode phase: each sequence has its rows and a number of computed ones, and a
//! step computes what it can of what is missing (`scheduler.rs`). What a sequence says depends on its own request alone.

use crate::chat::Chat;
use crate::draft::{DraftOptions, DraftStats, Drafting};
use crate::error::Error;
use crate::files::ModelFiles;
use crate::grammar::Grammars;
use crate::inside::{self, Watch};
use crate::pace::Pace;
use crate::pooling::Declared;
use crate::request::{Event, Finish, FinishReason, MAX_SAMPLES, Request, RequestId};
use crate::sampler::{PartialSampling, SamplingParams, Scratch};
use crate::scheduler::{Clock, Plan, insert};
use crate::sequence::{Sequence, Setting};
use puna_kernels::{KV_BLOCK, KvType};
use puna_model::batch::MAX_POSITIONS;
use puna_model::bind::Progress;
use puna_model::{Batch, Chain, Config, Error as ModelError, ExpertStats, KvCache, LoadOptions, Model, Phase, SeqId};
use puna_text::Tokenizer;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// How an engine is set up. Only `kv` changes what it says.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// How the model is loaded and run.
    pub load: LoadOptions,
    /// How keys and values are kept.
    pub kv: KvType,
    /// Most bytes of keys and values, of running sequences and of prefixes that are kept for later ones; they are taken
    /// as they are needed. `None`: half of `free_memory`, and at least one context.
    pub kv_bytes: Option<usize>,
    /// Bytes that are free for this model; `None`: what [`free_memory`] says when its weights are in memory. Engines that
    /// share a machine share what is free, too.
    pub free_memory: Option<usize>,
    /// Positions of a sequence; `None`: the model's own, at most [`DEFAULT_CTX`] where the sequence grows. Never more
    /// than `kv_bytes` hold.
    pub ctx: Option<usize>,
    /// Most rows of a step, beside one of each sequence that generates.
    pub chunk: usize,
    /// Most requests that run at once; others wait.
    pub max_running: usize,
    /// Guesses that are verified together; `None`: one token after the other.
    pub draft: Option<DraftOptions>,
}

/// The context where nobody asks for one: memory grows with use, but a runaway answer should end.
pub const DEFAULT_CTX: usize = 8192;

impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions {
            load: LoadOptions::default(),
            kv: KvType::F16,
            kv_bytes: None,
            free_memory: None,
            ctx: None,
            chunk: 512,
            max_running: 128,
            draft: None,
        }
    }
}

impl EngineOptions {
    /// The same as far as a model's files allow: where they have no output projection none is loaded, and nothing drafts.
    pub fn for_files(&self, files: &ModelFiles) -> EngineOptions {
        if files.has_head() {
            return self.clone();
        }
        EngineOptions { load: LoadOptions { head: false, ..self.load }, draft: None, ..self.clone() }
    }
}

/// How busy an engine is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Answers that are being worked on.
    pub running: usize,
    /// Requests that wait for their turn, or for blocks that they had to give up.
    pub waiting: usize,
    /// Bytes of keys and values of running answers.
    pub kv_held: usize,
    /// Bytes of keys and values that are kept for requests that begin alike.
    pub kv_cached: usize,
    /// Most bytes of both.
    pub kv_limit: usize,
    /// Drafts so far.
    pub drafts: DraftStats,
}

/// A loaded model and the sequences it works on.
pub struct Engine {
    pub(crate) model: Model,
    pub(crate) kv: KvCache,
    tokenizer: Option<Arc<Tokenizer>>,
    grammars: OnceLock<Arc<Grammars>>,
    template: Option<String>,
    sampling: PartialSampling,
    path: PathBuf,
    notices: Vec<String>,
    ctx: usize,
    /// Positions of a text that does not grow.
    pub(crate) text_ctx: usize,
    /// How its files say that texts become embeddings.
    pub(crate) declared: Result<Declared, Error>,
    pub(crate) chunk: usize,
    pub(crate) max_running: usize,
    /// By rank, as are those who wait.
    pub(crate) running: Vec<Sequence>,
    pub(crate) waiting: Vec<Sequence>,
    next_id: u64,
    pub(crate) batch: Batch,
    pub(crate) pace: Pace,
    pub(crate) plan: Plan,
    /// What a step took, where that is not measured.
    pub(crate) clock: Option<Clock>,
    pub(crate) drafting: Option<Drafting>,
    scratch: Scratch,
    events: Vec<Event>,
    pub(crate) watch: Watch,
    /// What holds the blocks of states that are being saved or loaded.
    pub(crate) on_their_way: Vec<SeqId>,
}

/// A model whose weights are in memory, before it is known how much of the rest is for keys and values.
pub struct Loaded {
    model: Model,
    path: PathBuf,
    declared: Result<Declared, Error>,
    tokenizer: Option<Arc<Tokenizer>>,
    template: Option<String>,
    sampling: PartialSampling,
}

impl Loaded {
    /// Loads a model's weights.
    ///
    /// # Errors
    /// As [`Model::load`].
    pub fn new(files: ModelFiles, options: &LoadOptions, progress: &mut Progress) -> Result<Loaded, Error> {
        let (path, declared) = (files.path(), files.embedding());
        let (source, tokenizer, template, sampling) = files.into_parts();
        let model = Model::load(source.checkpoint(), options, progress)?;
        Ok(Loaded { model, path, declared, tokenizer: tokenizer.map(Arc::new), template, sampling })
    }
}

impl Engine {
    /// Loads a model.
    ///
    /// # Errors
    /// As [`ModelFiles::open`] and [`Model::load`].
    pub fn load(
        path: impl AsRef<std::path::Path>,
        options: &EngineOptions,
        progress: &mut Progress,
    ) -> Result<Engine, Error> {
        Engine::from_files(ModelFiles::open(path)?, options, progress)
    }

    /// Loads a model whose files are open.
    ///
    /// # Errors
    /// As [`Model::load`] and [`Engine::new`].
    pub fn from_files(files: ModelFiles, options: &EngineOptions, progress: &mut Progress) -> Result<Engine, Error> {
        Engine::new(Loaded::new(files, &options.load, progress)?, options)
    }

    /// An engine for a model whose weights are in memory.
    ///
    /// # Errors
    /// [`Error::KvBytes`]; as [`DraftModel::load`](crate::draft::DraftModel::load).
    pub fn new(loaded: Loaded, options: &EngineOptions) -> Result<Engine, Error> {
        let Loaded { model, path, declared, tokenizer, template, sampling } = loaded;
        let own = model.config().context_length;
        let wish = options.ctx.unwrap_or(own.min(DEFAULT_CTX));
        let kv = kv_cache(&model, options, wish)?;
        let ctx = wish.min(kv.capacity()).min(MAX_POSITIONS / 2);
        let mut notices: Vec<String> = model.notices().iter().cloned().chain(kv.notice(options.kv)).collect();
        if kv.capacity() < wish {
            notices.push(format!("sequences have at most {ctx} positions of {wish}: the KV cache holds no more"));
        }
        let mut engine = Engine {
            watch: Watch::new(model.config()),
            kv,
            notices,
            ctx,
            text_ctx: options.ctx.unwrap_or(own),
            declared,
            chunk: options.chunk.max(1),
            max_running: options.max_running.max(1),
            tokenizer,
            grammars: OnceLock::new(),
            model,
            template,
            sampling,
            path,
            running: Vec::new(),
            waiting: Vec::new(),
            next_id: 0,
            batch: Batch::default(),
            pace: Pace::default(),
            plan: Plan::default(),
            clock: None,
            drafting: None,
            scratch: Scratch::default(),
            events: Vec::new(),
            on_their_way: Vec::new(),
        };
        engine.load_drafter(options)?;
        Ok(engine)
    }

    /// What the options ask for and the model does not get, a sentence each.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// What the model is.
    pub fn config(&self) -> &Config {
        self.model.config()
    }

    /// The model, for computing beside the engine's sequences.
    pub fn model_mut(&mut self) -> &mut Model {
        &mut self.model
    }

    /// Whether it can answer: a model that was loaded without its output projection has embeddings only.
    pub fn has_head(&self) -> bool {
        self.model.has_head()
    }

    /// Positions of a text that is embedded.
    pub fn text_ctx(&self) -> usize {
        self.text_ctx
    }

    /// Positions of a sequence.
    pub fn ctx(&self) -> usize {
        self.ctx
    }

    /// Threads it runs on.
    pub fn threads(&self) -> usize {
        self.model.threads()
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// [`Error::NoTokenizer`].
    pub fn tokenizer(&self) -> Result<&Arc<Tokenizer>, Error> {
        self.tokenizer.as_ref().ok_or_else(|| Error::NoTokenizer { path: self.path.clone() })
    }

    /// What makes prompts, for use beside the engine.
    pub fn chat(&self) -> Chat {
        Chat::new(self.path.clone(), self.tokenizer.clone(), self.template.clone())
    }

    /// What compiles grammars for this model. It can be used beside the engine, on other threads.
    ///
    /// # Errors
    /// [`Error::NoTokenizer`]; as [`Grammars::new`].
    pub fn grammars(&self) -> Result<&Arc<Grammars>, Error> {
        if let Some(grammars) = self.grammars.get() {
            return Ok(grammars);
        }
        let grammars = Grammars::new(self.tokenizer()?)?;
        Ok(self.grammars.get_or_init(|| grammars))
    }

    /// The source of the model's chat template.
    ///
    /// # Errors
    /// [`Error::NoTemplate`].
    pub fn template(&self) -> Result<&str, Error> {
        self.template.as_deref().ok_or_else(|| Error::NoTemplate { path: self.path.clone() })
    }

    /// A caller's sampling wishes over what the model's file recommends over the defaults.
    pub fn sampling(&self, wishes: &PartialSampling) -> SamplingParams {
        PartialSampling::resolve(wishes, &self.sampling)
    }

    /// What the model's files recommend of sampling.
    pub fn sampling_defaults(&self) -> &PartialSampling {
        &self.sampling
    }

    /// How busy it is.
    pub fn status(&self) -> Status {
        Status {
            running: self.running.len(),
            waiting: self.waiting.len(),
            kv_held: self.kv.bytes_held(),
            kv_cached: self.kv.bytes_cached(),
            kv_limit: self.kv.limit(),
            drafts: self.drafting.as_ref().map(|drafting| drafting.stats).unwrap_or_default(),
        }
    }

    /// Positions that are computed of a request's first answer; `None` while it waits.
    pub fn computed(&self, id: RequestId) -> Option<usize> {
        self.running.iter().find(|s| s.id == id).map(|s| s.computed)
    }

    /// Rows of the last step.
    pub fn step_rows(&self) -> usize {
        self.batch.rows.len()
    }

    /// What became of the experts that steps wanted; `None` where all are in memory.
    pub fn expert_stats(&self) -> Option<ExpertStats> {
        self.model.expert_stats()
    }

    /// Whether all counts of blocks agree: for tests.
    ///
    /// # Errors
    /// What does not.
    pub fn check(&self) -> Result<(), String> {
        self.kv.check()
    }

    /// Takes a request; [`Engine::step`] works on it.
    ///
    /// # Errors
    /// What is wrong with the request. Nothing has been computed then.
    pub fn add(&mut self, request: Request) -> Result<RequestId, Error> {
        if !self.model.has_head() {
            return Err(puna_model::Error::NoHead.into());
        }
        let (config, prompt) = (self.model.config(), &request.prompt);
        let vocab = config.vocab_size;
        if prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        if let Some(id) = prompt.tokens().find(|&id| id as usize >= vocab) {
            return Err(Error::TokenId { id, vocab });
        }
        if prompt.len() >= self.ctx {
            return Err(Error::ContextExceeded { prompt: prompt.len(), ctx: self.ctx });
        }
        if !(1..=MAX_SAMPLES).contains(&request.n) {
            return Err(Error::Samples { n: request.n, most: MAX_SAMPLES });
        }
        if let Some(&id) = request.stop_token_ids.iter().find(|&&id| id as usize >= vocab) {
            return Err(Error::TokenId { id, vocab });
        }
        if let Some(grammar) = &request.grammar
            && !grammar.is_for(self.tokenizer()?)
        {
            return Err(Error::ForeignGrammar);
        }
        prompt.check(config)?;
        inside::check(&request, config)?;
        let mut chain = Chain::of(prompt, config, config.rope.is_long(prompt.len()));
        chain.set_steering(request.steering.as_deref());
        let id = RequestId(self.next_id);
        let setting = Setting { config, ctx: self.ctx, tokenizer: self.tokenizer.clone() };
        let sequence = Sequence::new(id, request, chain, &setting)?;
        self.next_id += 1;
        insert(&mut self.waiting, sequence);
        Ok(id)
    }

    /// Whether there is nothing to compute.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Ends a request and gives its blocks back; its texts so far stand. Returns the last events of the answers that
    /// have not ended before: none for a request that has.
    pub fn cancel(&mut self, id: RequestId) -> Vec<Event> {
        let mut events = Vec::new();
        for sequences in [&mut self.running, &mut self.waiting] {
            for sequence in sequences.extract_if(.., |s| s.id == id) {
                self.kv.remove(sequence.seq);
                let mut sequence = sequence;
                let siblings = std::mem::take(&mut sequence.siblings);
                self.drafting.iter_mut().for_each(|drafting| drafting.end(sequence.answer_id()));
                events.extend([sequence].into_iter().chain(siblings).map(|mut s| s.finish(FinishReason::Cancelled)));
            }
        }
        if self.is_idle() {
            self.watch.rest();
        }
        events
    }

    /// Computes one batch: a token of every sequence that generates, and as much of the prompts as is good. Returns
    /// what came of it.
    ///
    /// # Errors
    /// When the batch cannot be computed, as when memory ends. An error of one sequence is its [`FinishReason`], and so is
    /// one of a file that the experts of a batch's sequences are read from; others go on.
    pub fn step(&mut self) -> Result<&[Event], Error> {
        self.events.clear();
        if self.is_idle() {
            self.batch.clear();
            return Ok(&self.events);
        }
        self.watch.begin_step(&mut self.running, &self.waiting);
        let mut work = self.schedule();
        if self.batch.rows.is_empty() && self.give_up_states() {
            work = self.schedule();
        }
        self.watch.set_shares(&self.batch, &mut self.running);
        if self.batch.rows.is_empty() {
            // There is room for one at least, unless the system has no memory for it.
            let out_of_memory = puna_model::Error::OutOfMemory { what: "the KV cache" };
            return Err(out_of_memory.into());
        }
        let vocab = self.model.config().vocab_size;
        let start = Instant::now();
        let (mut tap, watch) = self.watch.tap(&self.batch, &mut self.running);
        let logits = match self.model.forward_timed(&self.batch, &mut self.kv, &mut tap, watch) {
            Ok(logits) => logits,
            Err(e @ (ModelError::Changed { .. } | ModelError::Io { .. } | ModelError::Experts { .. })) => {
                self.fail_batch(&e);
                let is_idle = self.is_idle();
                self.watch.end_step(&self.batch, is_idle);
                return Ok(&self.events);
            }
            Err(e) => return Err(e.into()),
        };
        tap.finish();
        let now = Instant::now();
        let time = self.clock.as_mut().map_or(now - start, |clock| clock(work));
        self.pace.record(work, time);
        self.watch.share_out(&mut self.running);
        let watch = self.watch.watch();
        let mut rows = logits.chunks_exact(vocab);
        let mut right = 0;
        for (i, span) in self.batch.spans.iter().enumerate() {
            let at = self.running.iter().position(|s| s.seq == span.seq).expect("spans are of running sequences");
            let sequence = &mut self.running[at];
            if let Err(e) = sequence.compute(span.rows - span.draft, &mut rows, &mut self.scratch) {
                let ended = std::mem::take(&mut sequence.siblings);
                self.events.push(sequence.finish(FinishReason::Error(e.clone().into())));
                self.events.extend(ended.into_iter().map(|mut s| s.finish(FinishReason::Error(e.clone().into()))));
                // The logits of its last row are another's otherwise.
                if sequence.missing() == 0 {
                    rows.next();
                }
                continue;
            }
            sequence.inside.lap(watch, Phase::Sampling);
            if sequence.missing() > 0 {
                continue;
            }
            let logits = rows.next().expect("a whole sequence asked for logits");
            // Counted before anything is said: the answer may end with any of these tokens.
            sequence.guess.drafted += span.draft;
            let siblings = sequence.split(&mut self.kv);
            self.events.push(sequence.sample(logits, &mut self.scratch, (now, watch)));
            // Its draft, as far as it is what is chosen.
            let mut accepted = 0;
            for logits in rows.by_ref().take(span.draft) {
                if sequence.accept_draft(accepted) {
                    accepted += 1;
                    self.events.push(sequence.sample(logits, &mut self.scratch, (now, watch)));
                }
            }
            if let Some(drafting) = self.drafting.as_mut().filter(|_| span.draft > 0) {
                self.kv.accept(&self.batch, i, accepted);
                drafting.settle(&mut sequence.guess, span.draft, accepted);
                sequence.inside.lap(watch, Phase::Draft);
                right += accepted;
            }
            for mut sibling in siblings {
                self.events.push(sibling.sample(logits, &mut self.scratch, (now, watch)));
                insert(&mut self.running, sibling);
            }
        }
        for ended in self.running.extract_if(.., |s| s.is_finished) {
            self.kv.remove(ended.seq);
            self.drafting.iter_mut().for_each(|drafting| drafting.end(ended.answer_id()));
        }
        if let Some(drafting) = &mut self.drafting {
            let time = if self.clock.is_some() { time } else { drafting.step_time(time) };
            drafting.wager.record(work, time, right);
        }
        let is_idle = self.is_idle();
        self.watch.end_step(&self.batch, is_idle);
        Ok(&self.events)
    }

    /// Ends the sequences of the batch, which could not be computed.
    fn fail_batch(&mut self, e: &ModelError) {
        let spans = &self.batch.spans;
        for mut failed in self.running.extract_if(.., |s| spans.iter().any(|span| span.seq == s.seq)) {
            self.kv.remove(failed.seq);
            self.drafting.iter_mut().for_each(|drafting| drafting.end(failed.answer_id()));
            let siblings = std::mem::take(&mut failed.siblings);
            let ended = [failed].into_iter().chain(siblings);
            self.events.extend(ended.map(|mut s| s.finish(FinishReason::Error(e.clone().into()))));
        }
    }

    /// Works on one request until all its answers end, and on others beside it; `each` gets every event of it and may
    /// end it by returning false. Returns how the first answer ended.
    ///
    /// # Errors
    /// As [`Engine::add`] and [`Engine::step`], which end the request, and the error that ended the first answer, if one
    /// did.
    pub fn generate(&mut self, request: Request, mut each: impl FnMut(&Event) -> bool) -> Result<Finish, Error> {
        let mut left = request.n;
        let id = self.add(request)?;
        let mut first = None;
        while left > 0 {
            let events = match self.step() {
                Ok(events) => events,
                Err(e) => {
                    self.cancel(id);
                    return Err(e);
                }
            };
            let mut go_on = true;
            let mut take = |event: &Event| {
                // A step may bring several events of an answer.
                go_on = go_on && each(event);
                left -= usize::from(event.finish.is_some());
                if event.sample == 0 {
                    first = event.finish.clone().or(first.take());
                }
            };
            if events.is_empty() {
                // A part of the prompt.
                let at = self.running.iter().find(|s| s.id == id);
                at.map(Sequence::progress).iter().for_each(take);
            } else {
                events.iter().filter(|event| event.id == id).for_each(&mut take);
            }
            if !go_on && left > 0 {
                for event in self.cancel(id) {
                    each(&event);
                    first = event.finish.filter(|_| event.sample == 0).or(first.take());
                }
                break;
            }
        }
        match first.expect("every answer ends with an event") {
            Finish { reason: FinishReason::Error(e), .. } => Err(e),
            finish => Ok(finish),
        }
    }
}

/// The cache for a model: as large as the options say, or as the machine allows.
fn kv_cache(model: &Model, options: &EngineOptions, ctx: usize) -> Result<KvCache, Error> {
    let block = model.kv_cache(options.kv).block_bytes();
    let context = ctx.div_ceil(KV_BLOCK).saturating_mul(block);
    let half = || options.free_memory.unwrap_or_else(free_memory) / 2;
    let bytes = options.kv_bytes.unwrap_or_else(|| half().max(context));
    if bytes < block {
        return Err(Error::KvBytes { bytes, block });
    }
    Ok(KvCache::new(model.config(), options.kv, bytes))
}

/// Bytes that the system, or the group of processes that this one belongs to, can still give.
pub fn free_memory() -> usize {
    let memory = sysinfo::MemoryRefreshKind::nothing().with_ram();
    let system = sysinfo::System::new_with_specifics(sysinfo::RefreshKind::nothing().with_memory(memory));
    let group = system.cgroup_limits().map_or(u64::MAX, |limits| limits.free_memory);
    usize::try_from(system.available_memory().min(group)).unwrap_or(usize::MAX)
}
