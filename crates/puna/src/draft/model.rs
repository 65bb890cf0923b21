//! Guesses of a smaller model.

use super::{AnswerId, Drafter, Text, Want};
use crate::engine::{Engine, EngineOptions};
use crate::error::Error;
use crate::files::ModelFiles;
use puna_model::{Batch, KvCache, Model, Outputs, SeqId};
use puna_text::Tokenizer;
use std::collections::HashMap;
use std::path::Path;

/// Most rows of a pass that reads texts.
const CHUNK: usize = 512;

/// Guesses what a smaller model says: its likeliest token, then the next. Texts are computed together.
pub struct DraftModel {
    model: Model,
    kv: KvCache,
    texts: HashMap<AnswerId, Place>,
    /// Ids that text can have: those that the draft model has an embedding of.
    vocab: usize,
    batch: Batch,
}

/// Where a text stands in the draft model's cache.
struct Place {
    seq: SeqId,
    /// The tokens that are in the cache: of the text, and of drafts that may have been wrong.
    tokens: Vec<u32>,
    /// How many of them are the text's for certain.
    known: usize,
    /// How long it was known to become: its rotation may depend on that.
    total: usize,
}

/// A draft on its way.
struct Run<'w, 'a> {
    want: &'w mut Want<'a>,
    /// Tokens that are not computed yet.
    missing: Vec<u32>,
}

impl DraftModel {
    /// Loads the model at `path` to draft for an engine that was loaded with these options.
    ///
    /// # Errors
    /// As [`ModelFiles::open`] and [`Model::load`]; [`Error::DraftVocabulary`].
    pub fn load(path: &Path, engine: &Engine, options: &EngineOptions) -> Result<DraftModel, Error> {
        let files = ModelFiles::open(path)?;
        let differs = |what: String| Error::DraftVocabulary { path: path.to_owned(), what };
        let own = engine.tokenizer().ok().map(|tokenizer| &**tokenizer);
        match (files.tokenizer(), own) {
            (Some(draft), Some(own)) => compare(draft, own).map_err(differs)?,
            (None, None) => {}
            (Some(_), None) => return Err(differs("it has a tokenizer, and the model has none".into())),
            (None, Some(_)) => return Err(differs("it has no tokenizer, and the model has one".into())),
        }
        let load = crate::LoadOptions { head: true, expert_memory: None, ..options.load };
        let model = Model::load(files.checkpoint(), &load, &mut |_, _| {})?;
        let (rows, expected) = (model.config().vocab_size, engine.config().vocab_size);
        // Files pad vocabularies to different sizes; without a tokenizer nothing tells what is padding.
        if own.is_none() && rows != expected {
            return Err(differs(format!("it has {rows} tokens, and the model has {expected}")));
        }
        let kv = Self::kv_cache(&model, engine, options);
        Ok(DraftModel { model, kv, texts: HashMap::new(), vocab: rows, batch: Batch::default() })
    }

    /// Its cache has as many positions as the engine's, and at least one context.
    fn kv_cache(model: &Model, engine: &Engine, options: &EngineOptions) -> KvCache {
        let block = model.kv_cache(options.kv).block_bytes();
        let context = engine.ctx().div_ceil(puna_kernels::KV_BLOCK) + 1;
        let blocks = (engine.kv.limit() / engine.kv.block_bytes().max(1)).max(context);
        KvCache::new(model.config(), options.kv, blocks.saturating_mul(block))
    }

    /// The tokens of a text that are not in the cache, whose place then ends where they begin.
    fn missing(&mut self, want: &Want) -> Vec<u32> {
        let kv = &mut self.kv;
        let place = self.texts.entry(want.text.answer_id).or_insert_with(|| Place {
            seq: kv.add(),
            tokens: Vec::new(),
            known: 0,
            total: 0,
        });
        let behind = want.text.tokens(place.known).zip(&place.tokens[place.known..]);
        let right = behind.take_while(|(now, then)| *now == Some(**then)).count();
        // The last row is computed again where it is there: its logits are wanted.
        let mut len = (place.known + right).min(want.text.len() - 1);
        let (rope, total) = (&self.model.config().rope, want.text.len() + want.most);
        if rope.is_long(place.total) != rope.is_long(total) {
            len = 0;
        }
        place.total = total;
        if len < place.tokens.len() {
            len = kv.truncate(place.seq, len);
            place.tokens.truncate(len);
        }
        place.known = len;
        want.text.tokens(len).flatten().collect()
    }

    /// Adds up to `most` missing tokens of a text to the batch, as far as there is room for them in the cache.
    fn push(&mut self, run: &mut Run, most: usize) -> usize {
        let Some(place) = self.texts.get_mut(&run.want.text.answer_id) else { return 0 };
        let rows = self.kv.reserve(place.seq, run.missing.len().min(most));
        if rows > 0 {
            let outputs = if rows == run.missing.len() { Outputs::Last } else { Outputs::None };
            self.batch.push(place.seq, place.tokens.len(), &run.missing[..rows], outputs);
            if let Some(span) = self.batch.spans.last_mut() {
                span.total = place.total;
            }
            place.tokens.extend(run.missing.drain(..rows));
        }
        rows
    }

    /// Forgets texts that no draft is made of now.
    fn make_room(&mut self, runs: &[Run]) {
        let kv = &mut self.kv;
        self.texts.retain(|id, place| {
            let stays = runs.iter().any(|run| run.want.text.answer_id == *id);
            if !stays {
                kv.remove(place.seq);
            }
            stays
        });
    }

    fn forget(&mut self, answer: AnswerId) {
        if let Some(place) = self.texts.remove(&answer) {
            self.kv.remove(place.seq);
        }
    }

    /// One pass: each run goes on by what it misses, and those that miss nothing then by a guess. The others wait for
    /// the next step, and so do those that there is no room for.
    fn pass(&mut self, runs: &mut Vec<Run>) {
        self.batch.clear();
        let mut left = CHUNK.max(runs.len());
        let mut waits = Vec::new();
        for (i, run) in runs.iter_mut().enumerate() {
            let rows = self.push(run, left);
            left -= rows;
            if rows == 0 || !run.missing.is_empty() {
                waits.push(i);
            }
        }
        if self.batch.rows.is_empty() {
            return runs.clear();
        }
        let vocab = self.model.config().vocab_size;
        let Ok(logits) = self.model.forward(&self.batch, &mut self.kv) else {
            // There is no memory: what is in the batch did not get into the cache.
            let answers: Vec<AnswerId> = runs.drain(..).map(|run| run.want.text.answer_id).collect();
            return answers.into_iter().for_each(|answer| self.forget(answer));
        };
        let mut logits = logits.chunks_exact(vocab);
        let mut i = 0;
        runs.retain_mut(|run| {
            i += 1;
            if waits.contains(&(i - 1)) {
                return false;
            }
            let Some(guess) = logits.next().and_then(likeliest) else { return false };
            run.want.draft.push(guess);
            run.missing.push(guess);
            run.want.draft.len() < run.want.most
        });
    }
}

/// The likeliest token; `None` if a logit is no number.
fn likeliest(logits: &[f32]) -> Option<u32> {
    let mut best = 0;
    for (id, logit) in logits.iter().enumerate() {
        if logit.is_nan() {
            return None;
        }
        if *logit > logits[best] {
            best = id;
        }
    }
    Some(best as u32)
}

impl Drafter for DraftModel {
    fn ready(&mut self, text: &Text) -> usize {
        let known = self.texts.get(&text.answer_id).map_or(0, |place| place.known);
        let has_all = text.tokens(known).all(|id| id.is_some_and(|id| (id as usize) < self.vocab));
        // Where the draft model counts positions otherwise, it has nothing to say.
        if has_all { usize::MAX } else { 0 }
    }

    fn draft(&mut self, wants: &mut [Want]) {
        let mut runs: Vec<Run> = Vec::new();
        for want in wants {
            let missing = self.missing(want);
            runs.push(Run { want, missing });
        }
        let grown = runs.iter().filter_map(|run| {
            let place = self.texts.get(&run.want.text.answer_id)?;
            Some((place.seq, run.want.text.len() + run.want.most))
        });
        if !self.kv.has_room(grown) {
            self.make_room(&runs);
        }
        while !runs.is_empty() {
            self.pass(&mut runs);
        }
    }

    fn end(&mut self, answer: AnswerId) {
        self.forget(answer);
    }
}

/// Whether two vocabularies are the same, token by token.
fn compare(draft: &Tokenizer, model: &Tokenizer) -> Result<(), String> {
    let (there, here) = (draft.vocab_size(), model.vocab_size());
    if there != here {
        return Err(format!("it has {there} tokens, and the model has {here}"));
    }
    let kind = |tokenizer: &Tokenizer, id: u32| {
        let kind = if tokenizer.is_control(id) { "a control token" } else { "text" };
        if tokenizer.eog_ids().contains(&id) { "an end token" } else { kind }
    };
    for id in 0..here as u32 {
        if draft.token_bytes(id) != model.token_bytes(id) {
            let (there, here) = (draft.token_text(id), model.token_text(id));
            return Err(format!("token {id} is {there:?} there, and {here:?} in the model"));
        }
        let (there, here) = (kind(draft, id), kind(model, id));
        if there != here {
            return Err(format!("token {id}, {:?}, is {there} there, and {here} in the model", model.token_text(id)));
        }
    }
    if draft.bos_id() != model.bos_id() {
        let name = |id: Option<u32>| id.map_or("none".to_owned(), |id| format!("token {id}"));
        let (there, here) = (name(draft.bos_id()), name(model.bos_id()));
        return Err(format!("texts begin with {there} there, and with {here} in the model"));
    }
    Ok(())
}
