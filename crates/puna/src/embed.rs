//! Embeddings: the hidden states of a text after the last norm, pooled into one vector.
//!
//! A text's embedding depends on the model, the text, the KV type and the pooling. What else is embedded in the same
//! call, how texts are cut into batches and how many threads run change nothing, bit for bit.

use crate::engine::Engine;
use crate::error::Error;
use crate::inside;
use crate::pooling::Pooling;
use puna_model::{Batch, KvCache, Outputs, Phase, SeqId, Steering};
use std::borrow::Cow;
use std::sync::Arc;

/// How texts become embeddings; `None` is what the model's files say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EmbedOptions {
    /// Where the files say nothing: `last` if the tokenizer puts an end token after a text, else `mean`.
    pub pooling: Option<Pooling>,
    /// Whether a vector is divided by its length. Where the files say nothing, it is not.
    pub normalize: Option<bool>,
    /// What is added to the residual of texts.
    pub steering: Option<Arc<Steering>>,
}

impl Engine {
    /// Embeds texts, given as token ids: a vector `[dim]` for each, in their order. The model needs no output
    /// projection ([`puna_model::LoadOptions::head`]).
    ///
    /// # Errors
    /// What [`ModelFiles::embedding`](crate::ModelFiles::embedding) has to refuse; [`Error::Steering`]; [`Error::Embed`] names the text that
    /// [`Engine::check_text`] refuses, before any is computed, or whose embedding is not finite; and when a batch cannot
    /// be computed.
    pub fn embed(&mut self, texts: &[Vec<u32>], options: &EmbedOptions) -> Result<Vec<Vec<f32>>, Error> {
        let mut job = self.embedding(texts.into(), options)?;
        while !self.advance(&mut job, self.chunk)? {}
        Ok(job.into_embeddings())
    }

    /// Texts to be embedded part by part, beside sequences that generate: [`Engine::advance`] between steps.
    ///
    /// # Errors
    /// As [`Engine::embed`].
    pub fn embedding<'a>(&self, texts: Cow<'a, [Vec<u32>]>, options: &EmbedOptions) -> Result<Embedding<'a>, Error> {
        let (pooling, normalize) = self.resolve(options)?;
        let steering = options.steering.clone();
        inside::check_steering(steering.as_deref(), self.config())?;
        for (index, text) in texts.iter().enumerate() {
            self.check_text(text).map_err(|e| of_text(index, e))?;
        }
        let embeddings = vec![Vec::new(); texts.len()];
        // Texts leave nothing behind: they have a cache of their own, of the length of the longest at most.
        let kv = self.model.kv_cache(self.kv.kind());
        let dim = self.config().dim;
        let work = Work { texts, steering, pooling, normalize, dim, running: Vec::new(), next: 0, embeddings };
        Ok(Embedding { work, kv })
    }

    /// Computes at most `rows` more rows of texts. Returns whether all embeddings are there.
    ///
    /// # Errors
    /// As [`Engine::embed`]; the job cannot go on then.
    pub fn advance(&mut self, job: &mut Embedding, rows: usize) -> Result<bool, Error> {
        job.work.fill(&mut self.batch, &mut job.kv, rows.max(1));
        if self.batch.rows.is_empty() {
            return Ok(true);
        }
        self.watch.lap(Phase::Write);
        let states = self.model.hidden(&self.batch, &mut job.kv)?;
        job.work.pool(states, &mut job.kv)?;
        self.watch.lap(Phase::Other);
        Ok(job.work.is_done())
    }

    /// Rows that [`Engine::advance`] may compute before the next step, so that those who generate wait about as long
    /// as for one step more; as many as pay where nobody generates.
    pub fn spare_rows(&self) -> usize {
        match self.running.iter().filter(|s| s.is_generating()).count() {
            0 => self.chunk,
            generating => self.pace.beside(generating, self.chunk),
        }
    }

    /// How texts are embedded: what is asked for over what the files say over the defaults of [`EmbedOptions`].
    ///
    /// # Errors
    /// What the files ask for and puna does not have.
    pub fn resolve(&self, options: &EmbedOptions) -> Result<(Pooling, bool), Error> {
        let declared = self.declared.clone()?;
        let ends = self.tokenizer().is_ok_and(|tokenizer| !tokenizer.suffix().is_empty());
        let default = if ends { Pooling::Last } else { Pooling::Mean };
        let pooling = options.pooling.or(declared.pooling).unwrap_or(default);
        Ok((pooling, options.normalize.unwrap_or(declared.normalize)))
    }

    /// Whether a text can be embedded.
    ///
    /// # Errors
    /// [`Error::EmptyText`], [`Error::TextTooLong`], [`Error::TokenId`].
    pub fn check_text(&self, text: &[u32]) -> Result<(), Error> {
        let vocab = self.config().vocab_size;
        if text.is_empty() {
            return Err(Error::EmptyText);
        }
        if text.len() > self.text_ctx {
            return Err(Error::TextTooLong { tokens: text.len(), ctx: self.text_ctx });
        }
        match text.iter().find(|&&id| id as usize >= vocab) {
            Some(&id) => Err(Error::TokenId { id, vocab }),
            None => Ok(()),
        }
    }

    /// Cuts a text to the length that [`Engine::check_text`] allows. The tokens that the tokenizer puts after a text
    /// stay, since they may be what is pooled.
    pub fn truncate_text(&self, text: &mut Vec<u32>) {
        let suffix = self.tokenizer().map_or(&[][..], |tokenizer| tokenizer.suffix());
        if text.len() > self.text_ctx {
            let kept = if text.ends_with(suffix) { suffix.len().min(self.text_ctx) } else { 0 };
            text.drain(self.text_ctx - kept..text.len() - kept);
        }
    }
}

/// Most texts of a batch: each takes a block of the cache in every layer, however short it is.
const MAX_TEXTS: usize = 64;

/// Texts that are being embedded.
pub struct Embedding<'a> {
    work: Work<'a>,
    kv: KvCache,
}

impl Embedding<'_> {
    /// The vectors, `[dim]` each, in the order of texts; empty where [`Engine::advance`] has not come to the end.
    pub fn into_embeddings(self) -> Vec<Vec<f32>> {
        self.work.embeddings
    }
}

/// Texts on their way to embeddings, in order: at most one of them is ever computed in part.
struct Work<'a> {
    texts: Cow<'a, [Vec<u32>]>,
    steering: Option<Arc<Steering>>,
    pooling: Pooling,
    normalize: bool,
    dim: usize,
    /// Those in the cache.
    running: Vec<Text>,
    /// The first that has not begun.
    next: usize,
    embeddings: Vec<Vec<f32>>,
}

/// A text in the cache.
struct Text {
    index: usize,
    seq: SeqId,
    /// Positions computed.
    done: usize,
    /// Of these, in the current batch.
    rows: usize,
    /// The sum of the states that count, `[dim]`.
    sum: Vec<f64>,
}

impl Work<'_> {
    /// Positions of a text that are computed.
    fn needed(&self, index: usize) -> usize {
        // Nothing that comes later reaches the first position.
        if self.pooling == Pooling::Cls { 1 } else { self.texts[index].len() }
    }

    /// Fills a batch with at most `max` rows: the rest of the text that has begun, then those that follow.
    fn fill(&mut self, batch: &mut Batch, kv: &mut KvCache, max: usize) {
        batch.clear();
        while batch.rows.len() < max && batch.spans.len() < MAX_TEXTS {
            let at = batch.spans.len();
            if at == self.running.len() {
                if self.next == self.texts.len() {
                    break;
                }
                self.running.push(Text { index: self.next, seq: kv.add(), done: 0, rows: 0, sum: vec![0.0; self.dim] });
                self.next += 1;
            }
            let needed = self.needed(self.running[at].index);
            let text = &mut self.running[at];
            let (start, ids) = (text.done, &self.texts[text.index]);
            text.rows = (needed - start).min(max - batch.rows.len());
            text.done += text.rows;
            let outputs = match self.pooling {
                Pooling::Mean => Outputs::All,
                Pooling::Cls | Pooling::Last if text.done == needed => Outputs::Last,
                Pooling::Cls | Pooling::Last => Outputs::None,
            };
            batch.push(text.seq, start, &ids[start..text.done], outputs);
            // The whole length decides how positions rotate, whatever part of it is computed.
            batch.spans[at].total = ids.len();
            self.steering.iter().for_each(|steering| batch.steer(steering));
        }
    }

    /// Takes the states of a batch, `[outputs, dim]`, and finishes the texts that are whole.
    fn pool(&mut self, states: &[f32], kv: &mut KvCache) -> Result<(), Error> {
        let mut states = states.chunks_exact(self.dim);
        for i in 0..self.running.len() {
            let is_whole = self.is_whole(&self.running[i]);
            let text = &mut self.running[i];
            let (outputs, n) = match self.pooling {
                Pooling::Mean => (text.rows, text.done),
                Pooling::Cls | Pooling::Last => (usize::from(is_whole), 1),
            };
            for state in states.by_ref().take(outputs) {
                text.sum.iter_mut().zip(state).for_each(|(sum, &x)| *sum += f64::from(x));
            }
            if is_whole {
                let embedding = finish(&text.sum, n, self.normalize);
                self.embeddings[text.index] = embedding.ok_or_else(|| of_text(text.index, Error::NotFinite))?;
            }
        }
        let running = std::mem::take(&mut self.running);
        let (whole, rest): (Vec<Text>, Vec<Text>) = running.into_iter().partition(|text| self.is_whole(text));
        self.running = rest;
        whole.iter().for_each(|text| kv.remove(text.seq));
        Ok(())
    }

    fn is_done(&self) -> bool {
        self.running.is_empty() && self.next == self.texts.len()
    }

    fn is_whole(&self, text: &Text) -> bool {
        text.done == self.needed(text.index)
    }
}

fn of_text(index: usize, e: Error) -> Error {
    Error::Embed { index, source: Box::new(e) }
}

/// The mean of `n` states from their sum, divided by its length where asked for; `None` if it is not finite.
fn finish(sum: &[f64], n: usize, normalize: bool) -> Option<Vec<f32>> {
    let mut embedding: Vec<f32> = sum.iter().map(|sum| (sum / n as f64) as f32).collect();
    if normalize {
        let square: f64 = embedding.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        // A zero vector has no direction, and stays.
        let length = if square > 0.0 { square.sqrt() } else { 1.0 };
        embedding.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
    embedding.iter().all(|x| x.is_finite()).then_some(embedding)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::engine::EngineOptions;
    use puna_model::{Checkpoint, Gguf};
    use std::path::Path;

    #[test]
    fn an_error_leaves_nothing_behind() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/models/llama-gqa/model-f32.gguf");
        let gguf = Gguf::open(&path).unwrap();
        let embedding = gguf.tensor("token_embd.weight").unwrap();
        let row = 4 * gguf.config().unwrap().1.dim;
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[embedding.offset as usize + 300 * row..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
        let dir = tempfile::tempdir().unwrap();
        let broken = dir.path().join("broken.gguf");
        std::fs::write(&broken, bytes).unwrap();
        let mut engine =
            Engine::load(&broken, &EngineOptions { chunk: 8, ..EngineOptions::default() }, &mut |_, _| {}).unwrap();
        let options = EmbedOptions { pooling: Some(Pooling::Mean), ..EmbedOptions::default() };
        let good = [vec![9, 8], vec![1; 30], vec![7; 3]];
        let expected = engine.embed(&good, &options).unwrap();
        assert_eq!(engine.kv.bytes_held(), 0);
        // The token is in the middle of a batch: texts beside it are computed, and one of them only in part.
        let error = engine.embed(&[vec![9, 8], vec![7, 300, 7], vec![1; 30]], &options).unwrap_err();
        assert_eq!(error, of_text(1, Error::NotFinite));
        assert_eq!(engine.kv.bytes_held(), 0);
        assert_eq!(engine.embed(&good, &options).unwrap(), expected);
    }
}
