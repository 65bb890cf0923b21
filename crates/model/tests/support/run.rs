//! Sequences through a model.

use super::Rng;
use puna_kernels::{Isa, KvType};
use puna_model::{Batch, Gguf, KvCache, LoadOptions, Model, Outputs, Row, SeqId, Span};

/// The kinds of cache.
pub const KV_TYPES: [KvType; 3] = [KvType::F32, KvType::F16, KvType::Q8_0];

/// One thread, the best instructions, packed weights: what the others are compared with.
pub fn plain() -> LoadOptions {
    LoadOptions { threads: 1, ..LoadOptions::default() }
}

/// All ways to run that must not matter.
pub fn variants() -> Vec<LoadOptions> {
    let mut all: Vec<LoadOptions> = [2, 3, 5].map(|threads| LoadOptions { threads, ..plain() }).to_vec();
    for pack in [true, false] {
        all.extend(Isa::available().iter().map(|&isa| LoadOptions { isa, pack, ..plain() }));
    }
    all.push(LoadOptions { threads: 2, pack: false, ..plain() });
    all
}

/// A model and a cache.
pub struct Run {
    pub model: Model,
    pub kv: KvCache,
    /// How long sequences are said to become, where that is more than they are.
    pub total: usize,
}

impl Run {
    pub fn new(gguf: &Gguf, options: &LoadOptions, kind: KvType) -> Run {
        let model = Model::load(gguf, options, &mut |_, _| {}).unwrap();
        let kv = model.kv_cache(kind);
        Run { model, kv, total: 0 }
    }

    pub fn vocab_size(&self) -> usize {
        self.model.config().vocab_size
    }

    pub fn len(&self, seq: SeqId) -> usize {
        self.kv.len(seq).unwrap()
    }

    /// Adds tokens that a sequence goes on with.
    pub fn push(&self, batch: &mut Batch, seq: SeqId, tokens: &[u32], outputs: Outputs) {
        batch.push(seq, self.len(seq), tokens, outputs);
        let span = batch.spans.last_mut().unwrap();
        span.total = span.total.max(self.total);
    }

    pub fn forward(&mut self, batch: &Batch) -> Vec<f32> {
        self.model.forward(batch, &mut self.kv).unwrap().to_vec()
    }

    /// Logits of tokens that a sequence goes on with.
    pub fn feed(&mut self, seq: SeqId, tokens: &[u32]) -> Vec<f32> {
        let mut batch = Batch::default();
        self.push(&mut batch, seq, tokens, Outputs::All);
        self.forward(&batch)
    }

    /// The same in chunks of these sizes, in turn.
    pub fn feed_chunks(&mut self, seq: SeqId, mut tokens: &[u32], sizes: &[usize]) -> Vec<f32> {
        let mut logits = Vec::new();
        let said = self.total;
        self.total = said.max(self.len(seq) + tokens.len());
        for &size in sizes.iter().cycle() {
            let (chunk, rest) = tokens.split_at(size.min(tokens.len()));
            tokens = rest;
            if chunk.is_empty() {
                break;
            }
            logits.extend(self.feed(seq, chunk));
        }
        self.total = said;
        logits
    }

    /// Logits of a sequence that is begun and ended for it.
    pub fn alone(&mut self, tokens: &[u32], sizes: &[usize]) -> Vec<f32> {
        let seq = self.kv.add();
        let logits = self.feed_chunks(seq, tokens, sizes);
        self.kv.remove(seq);
        logits
    }

    /// Logits of many sequences that share batches: at each step some of them, in any order, go on by a few tokens.
    pub fn together(&mut self, seqs: &[Vec<u32>], rng: &mut Rng) -> Vec<Vec<f32>> {
        let vocab_size = self.vocab_size();
        let ids: Vec<SeqId> = seqs.iter().map(|_| self.kv.add()).collect();
        let mut logits = vec![Vec::new(); seqs.len()];
        let mut batch = Batch::default();
        loop {
            batch.clear();
            let mut order: Vec<usize> = (0..seqs.len()).filter(|&i| self.len(ids[i]) < seqs[i].len()).collect();
            if order.is_empty() {
                break;
            }
            for i in (1..order.len()).rev() {
                order.swap(i, rng.below(i + 1));
            }
            order.truncate(1 + rng.below(order.len()));
            for &i in &order {
                let start = self.len(ids[i]);
                let n = [1, 1, 3, 20][rng.below(4)].min(seqs[i].len() - start);
                self.push(&mut batch, ids[i], &seqs[i][start..start + n], Outputs::All);
                let span = batch.spans.last_mut().unwrap();
                span.total = span.total.max(seqs[i].len());
            }
            let mut rest = self.model.forward(&batch, &mut self.kv).unwrap();
            for (&i, span) in order.iter().zip(&batch.spans) {
                let (own, after) = rest.split_at(span.rows * vocab_size);
                logits[i].extend(own);
                rest = after;
            }
        }
        ids.into_iter().for_each(|seq| self.kv.remove(seq));
        logits
    }

    /// A sequence whose keys and values are all NaN.
    pub fn poisoned(&mut self, n: usize) -> SeqId {
        let seq = self.kv.add();
        let batch = Batch {
            rows: vec![Row::Embed(0); n],
            spans: vec![Span { seq, start: 0, rows: n, total: n, draft: 0 }],
            embeds: vec![f32::NAN; self.model.config().dim],
            ..Batch::default()
        };
        self.model.forward(&batch, &mut self.kv).unwrap();
        seq
    }
}

/// Fails unless both are the same bits, and finite.
#[track_caller]
pub fn assert_same(got: &[f32], expected: &[f32], vocab_size: usize, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}: numbers");
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        let (row, col) = (i / vocab_size, i % vocab_size);
        assert!(e.is_finite(), "{what}: row {row} column {col} is {e}");
        assert_eq!(g.to_bits(), e.to_bits(), "{what}: row {row} column {col}: {g} expected {e}");
    }
}

/// `|got - expected| / |expected|`.
pub fn relative_error(got: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(got.len(), expected.len(), "as many numbers");
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let mut differences = got.iter().zip(expected).map(|(&g, &e)| f64::from(g) - f64::from(e));
    norm(&mut differences) / norm(&mut expected.iter().map(|&e| f64::from(e))).max(1e-30)
}
