//! The engine: many sequences, one step at a time.
//!
//! There is no prefill phase and no decode phase: each sequence has its tokens and a number of computed ones, and a
//! step computes what it can of what is missing. What a sequence says depends on its own request alone.

use crate::error::Error;
use crate::files::ModelFiles;
use crate::pooling::Declared;
use crate::request::{Event, Finish, FinishReason, Request, RequestId};
use crate::sampler::{PartialSampling, SamplingParams, Scratch};
use crate::sequence::Sequence;
use puna_kernels::KvType;
use puna_model::bind::Progress;
use puna_model::{Batch, Config, KvCache, LoadOptions, Model, Row, SeqId, Span};
use puna_text::Tokenizer;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// How an engine is set up. Only `kv` changes what it says.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// How the model is loaded and run.
    pub load: LoadOptions,
    /// How keys and values are kept.
    pub kv: KvType,
    /// Positions of a sequence; `None`: the model's own, at most [`DEFAULT_CTX`] where the sequence grows.
    pub ctx: Option<usize>,
    /// Most rows of a step.
    pub chunk: usize,
}

/// The context where nobody asks for one: memory grows with use, but a runaway answer should end.
pub const DEFAULT_CTX: usize = 8192;

impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions { load: LoadOptions::default(), kv: KvType::F16, ctx: None, chunk: 512 }
    }
}

/// A loaded model and the sequences it works on.
pub struct Engine {
    pub(crate) model: Model,
    pub(crate) kv: KvCache,
    tokenizer: Option<Arc<Tokenizer>>,
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
    /// In order of arrival.
    running: Vec<Sequence>,
    /// What the last finished sequence left in the cache, for a request that begins alike.
    kept: Option<(SeqId, Vec<u32>)>,
    next_id: u64,
    pub(crate) batch: Batch,
    scratch: Scratch,
    events: Vec<Event>,
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
    /// As [`Model::load`].
    pub fn from_files(files: ModelFiles, options: &EngineOptions, progress: &mut Progress) -> Result<Engine, Error> {
        let (path, declared) = (files.path(), files.embedding());
        let (source, tokenizer, template, sampling) = files.into_parts();
        let model = Model::load(source.checkpoint(), &options.load, progress)?;
        let own = model.config().context_length;
        let kv = model.kv_cache(options.kv);
        let notices = model.notices().iter().cloned().chain(kv.notice(options.kv)).collect();
        Ok(Engine {
            kv,
            notices,
            ctx: options.ctx.unwrap_or(own.min(DEFAULT_CTX)),
            text_ctx: options.ctx.unwrap_or(own),
            declared,
            chunk: options.chunk.max(1),
            tokenizer: tokenizer.map(Arc::new),
            model,
            template,
            sampling,
            path,
            running: Vec::new(),
            kept: None,
            next_id: 0,
            batch: Batch::default(),
            scratch: Scratch::default(),
            events: Vec::new(),
        })
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

    pub(crate) fn path(&self) -> &std::path::Path {
        &self.path
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

    /// Takes a request; [`Engine::step`] works on it.
    ///
    /// # Errors
    /// What is wrong with the request. Nothing has been computed then.
    pub fn add(&mut self, request: Request) -> Result<RequestId, Error> {
        if !self.model.has_head() {
            return Err(puna_model::Error::NoHead.into());
        }
        let vocab = self.model.config().vocab_size;
        if request.prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        if let Some(&id) = request.prompt.iter().find(|&&id| id as usize >= vocab) {
            return Err(Error::TokenId { id, vocab });
        }
        if request.prompt.len() >= self.ctx {
            return Err(Error::ContextExceeded { prompt: request.prompt.len(), ctx: self.ctx });
        }
        let id = RequestId(self.next_id);
        let mut sequence = Sequence::new(id, request, vocab, self.ctx, self.tokenizer.clone())?;
        self.next_id += 1;
        self.place(&mut sequence);
        self.running.push(sequence);
        Ok(id)
    }

    /// Gives a new sequence its place in the cache: the kept one's, as far as both begin alike.
    fn place(&mut self, sequence: &mut Sequence) {
        let Some((seq, tokens)) = self.kept.take() else {
            sequence.seq = self.kv.add();
            return;
        };
        let common = tokens.iter().zip(&sequence.tokens).take_while(|(a, b)| a == b).count();
        // The last token of a prompt is computed in any case: its logits are wanted.
        let common = common.min(sequence.tokens.len() - 1);
        let rope = &self.model.config().rope;
        let turns_alike = rope.is_long(tokens.len()) == rope.is_long(sequence.tokens.len());
        sequence.seq = seq;
        sequence.computed = self.kv.truncate(seq, if turns_alike { common } else { 0 });
        sequence.cached = sequence.computed;
        sequence.total = tokens.len();
    }

    /// Whether there is nothing to compute.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty()
    }

    /// Ends a request; its text so far stands. Does nothing for one that has ended.
    pub fn cancel(&mut self, id: RequestId) -> Option<Event> {
        let at = self.running.iter().position(|s| s.id == id)?;
        let mut sequence = self.running.remove(at);
        let event = sequence.finish(FinishReason::Cancelled);
        self.keep(sequence);
        Some(event)
    }

    /// Computes one batch: a token of every sequence that generates, and as much of the prompts as fits. Returns what
    /// came of it.
    ///
    /// # Errors
    /// When the batch cannot be computed, as when memory ends. An error of one sequence is its [`FinishReason`].
    pub fn step(&mut self) -> Result<&[Event], Error> {
        self.events.clear();
        self.schedule();
        if self.batch.rows.is_empty() {
            return Ok(&self.events);
        }
        let vocab = self.model.config().vocab_size;
        let logits = self.model.forward(&self.batch, &mut self.kv)?;
        let mut rows = logits.chunks_exact(vocab);
        let now = Instant::now();
        for span in &self.batch.spans {
            let sequence = self.running.iter_mut().find(|s| s.seq == span.seq).expect("spans are of running sequences");
            sequence.computed += span.rows;
            sequence.total = span.total;
            if sequence.computed == sequence.tokens.len() {
                let logits = rows.next().expect("a whole sequence asked for logits");
                self.events.push(sequence.sample(logits, &mut self.scratch, now));
            }
        }
        while let Some(at) = self.running.iter().position(|s| s.is_finished) {
            let sequence = self.running.remove(at);
            self.keep(sequence);
        }
        Ok(&self.events)
    }

    /// Fills the batch.
    fn schedule(&mut self) {
        self.batch.clear();
        let rope = &self.model.config().rope;
        for s in &mut self.running {
            if s.computed > 0 && rope.is_long(s.total) != rope.is_long(s.tokens.len()) {
                // The whole sequence rotates otherwise from here on.
                s.computed = self.kv.truncate(s.seq, 0);
            }
        }
        let mut budget = self.chunk;
        // Sequences with one missing token generate: they come first, so that no prompt holds them up.
        for generating in [true, false] {
            for s in self.running.iter().filter(|s| (s.tokens.len() - s.computed == 1) == generating) {
                let rows = (s.tokens.len() - s.computed).min(budget.max(usize::from(generating)));
                if rows == 0 {
                    continue;
                }
                budget = budget.saturating_sub(rows);
                let (start, total) = (s.computed, s.tokens.len());
                self.batch.rows.extend(s.tokens[start..start + rows].iter().map(|&t| Row::Token(t)));
                self.batch.spans.push(Span { seq: s.seq, start, rows, total });
                if start + rows == total {
                    self.batch.outputs.push(self.batch.rows.len() as u32 - 1);
                }
            }
        }
    }

    /// Keeps what a finished sequence left in the cache, in place of what was kept before.
    fn keep(&mut self, sequence: Sequence) {
        let (seq, mut tokens) = (sequence.seq, sequence.tokens);
        tokens.truncate(sequence.computed);
        if let Some((old, _)) = self.kept.replace((seq, tokens)) {
            self.kv.remove(old);
        }
    }

    /// Works on one request until it ends; `each` gets every event of it and may end it by returning false.
    ///
    /// # Errors
    /// As [`Engine::add`] and [`Engine::step`], and the error that ended the sequence, if one did.
    pub fn generate(&mut self, request: Request, mut each: impl FnMut(&Event) -> bool) -> Result<Finish, Error> {
        let id = self.add(request)?;
        loop {
            let events = self.step()?;
            let mut go_on = true;
            let mut finish = None;
            if events.is_empty() {
                // A part of the prompt.
                go_on = each(&self.progress(id));
            } else {
                for event in events.iter().filter(|e| e.id == id) {
                    go_on &= each(event);
                    finish = event.finish.clone().or(finish);
                }
            }
            if finish.is_none() && !go_on {
                finish = self.cancel(id).and_then(|event| {
                    each(&event);
                    event.finish
                });
            }
            match finish {
                Some(Finish { reason: FinishReason::Error(e), .. }) => return Err(e),
                Some(finish) => return Ok(finish),
                None => {}
            }
        }
    }

    /// An event that says only how far a request's prompt is.
    fn progress(&self, id: RequestId) -> Event {
        let computed = self.running.iter().find(|s| s.id == id).map_or(0, |s| s.computed);
        Event { id, computed, token: None, text: String::new(), finish: None }
    }
}
