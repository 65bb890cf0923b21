//! Models on their way into memory, and how those of one server share what is left of it.

use crate::models::Model;
use crate::openai::Card;
use crate::options::Options;
use puna::{Engine, EngineOptions, Loaded, ModelFiles};
use std::path::Path;
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::Instant;

/// What models have in common while they are loaded, each on its own thread.
pub(crate) struct Loading {
    /// Models that are not in memory yet. Whose turn it is holds it: one alone uses all cores.
    left: Mutex<usize>,
    all_loaded: Condvar,
    models: usize,
    free_memory: OnceLock<usize>,
}

impl Loading {
    pub fn new(models: usize) -> Loading {
        Loading { left: Mutex::new(models), all_loaded: Condvar::new(), models, free_memory: OnceLock::new() }
    }

    /// Loads a model, when it is its turn.
    ///
    /// # Errors
    /// As [`ModelFiles::open`], [`Loaded::new`] and [`Engine::new`].
    pub fn load(&self, model: &Model, path: &Path, options: &Options) -> Result<Engine, puna::Error> {
        let start = Instant::now();
        let loaded = {
            let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
            let loaded = weights(&model.id, path, &options.engine);
            *left -= 1;
            loaded
        };
        self.all_loaded.notify_all();
        let (loaded, mut wishes) = loaded?;
        if wishes.kv_bytes.is_none() && self.models > 1 {
            wishes.free_memory = Some(self.share(&wishes));
        }
        let mut engine = Engine::new(loaded, &wishes)?;
        engine.notices().iter().for_each(|notice| tracing::warn!(model = model.id, "{notice}"));
        let (limit, kv) = (engine.status().kv_limit, wishes.kv);
        let block = engine.model_mut().kv_cache(kv).block_bytes();
        model.metrics.blocks.set((limit / block.max(1)) as f64);
        let card = card(model, &mut engine, options)?;
        let (ctx, seconds) = (card.ctx, start.elapsed().as_secs_f64());
        tracing::info!(model = model.id, path = %path.display(), ctx, kv_bytes = limit, seconds, "loaded");
        model.set_card(card);
        Ok(engine)
    }

    /// A model's part of the memory that is free when all are loaded. It is measured once: what one has cached by then
    /// must not be missing to the next.
    fn share(&self, wishes: &EngineOptions) -> usize {
        let left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.all_loaded.wait_while(left, |left| *left > 0));
        let measure = || wishes.free_memory.unwrap_or_else(puna::free_memory);
        *self.free_memory.get_or_init(measure) / self.models
    }
}

/// A model's weights in memory, and the options as far as its files allow them.
fn weights(id: &str, path: &Path, wishes: &EngineOptions) -> Result<(Loaded, EngineOptions), puna::Error> {
    let files = ModelFiles::open(path)?;
    files.notices().iter().for_each(|notice| tracing::warn!(model = id, "{notice}"));
    let options = wishes.for_files(&files);
    if !options.load.head {
        tracing::warn!(model = id, "the files have no output projection: the model makes embeddings only");
    }
    Ok((Loaded::new(files, &options.load, &mut |_, _| {})?, options))
}

/// What requests need to know of the model.
fn card(model: &Model, engine: &mut Engine, options: &Options) -> Result<Card, puna::Error> {
    let vectors = options.vectors.clone();
    let unfit = vectors.each(|name, vector| vector.check(engine.config()).err().map(|e| (name.to_owned(), e)));
    unfit.iter().for_each(|(name, e)| tracing::warn!(model = model.id, vector = name, "{e}"));
    let bandwidth = if options.profile { engine.model_mut().read_bandwidth() } else { None };
    let card = Card::new(&model.id, engine, &options.engine);
    let prefixes = options.state_dir.as_ref().map(|_| engine.state_key()).transpose()?;
    let mut card = Card { max_tokens: options.limits.max_tokens, vectors, prefixes, bandwidth, ..card };
    if let Some(template) = &options.template {
        card.chat = card.chat.with_template(template.clone());
    }
    if card.has_head {
        // While requests are answered, the cores are theirs.
        card.chat.prepare();
    }
    Ok(card)
}
