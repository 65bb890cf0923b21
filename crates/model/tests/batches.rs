//! Batches that do not fit the model or the cache are errors, and leave both as they were.

#![allow(clippy::unwrap_used)]

mod gguf_builder;
mod support;

use gguf_builder::message;
use puna_kernels::KvType;
use puna_model::{Batch, Error, Outputs, Row, SeqId, Span};
use support::Rng;
use support::maker::{Rope, Spec};
use support::run::{Run, assert_same, plain};

const VOCAB: usize = 50;
const DIM: usize = 32;

/// A model with sequences: one of five positions, one without any, one that has ended.
struct Setup {
    run: Run,
    tokens: Vec<u32>,
    /// Logits of all tokens, computed undisturbed.
    expected: Vec<f32>,
    running: SeqId,
    new: SeqId,
    ended: SeqId,
}

impl Setup {
    fn new() -> Setup {
        let spec = Spec { window: Some(20), windowed: vec![true, false], ..Spec::default() };
        assert_eq!((spec.vocab_size, spec.dim), (VOCAB, DIM));
        let mut run = Run::new(&spec.gguf(), &plain(), KvType::F16);
        let tokens = Rng(1).tokens(70, VOCAB);
        let expected = run.alone(&tokens, &[70]);
        let [running, new, ended] = [(); 3].map(|()| run.kv.add());
        run.kv.remove(ended);
        run.feed(running, &tokens[..5]);
        Setup { run, tokens, expected, running, new, ended }
    }

    /// A batch of the next three tokens, changed.
    fn batch(&self, change: impl FnOnce(&mut Batch)) -> Batch {
        let mut batch = Batch::default();
        batch.push(self.running, 5, &self.tokens[5..8], Outputs::All);
        change(&mut batch);
        batch
    }

    /// The batch is an error that says `words`, nothing has changed, and everything goes on as if it had not been.
    #[track_caller]
    fn refused(&mut self, change: impl FnOnce(&mut Batch), words: &[&str]) {
        let batch = self.batch(change);
        let state = |s: &Setup| (s.run.len(s.running), s.run.len(s.new), s.run.kv.len(s.ended), s.run.kv.bytes_held());
        let before = state(self);
        let result = self.run.model.forward(&batch, &mut self.run.kv);
        assert!(matches!(result, Err(Error::Batch { .. })), "{batch:?}");
        let text = message(result, "batch");
        for word in words {
            assert!(text.contains(word), "expected {word:?} in: {text}");
        }
        assert_eq!(state(self), before, "{text}");
        assert_eq!(before.0, 5);

        let got = self.run.feed_chunks(self.running, &self.tokens[5..], &[3, 40]);
        assert_same(&got, &self.expected[5 * VOCAB..], VOCAB, &format!("after: {text}"));
        let got = self.run.alone(&self.tokens, &[70]);
        assert_same(&got, &self.expected, VOCAB, &format!("anew after: {text}"));
        self.run.kv.truncate(self.running, 0);
        self.run.feed(self.running, &self.tokens[..5]);
    }
}

#[test]
fn a_batch_that_fits_is_none() {
    let mut setup = Setup::new();
    let batch = setup.batch(|_| {});
    let got = setup.run.forward(&batch);
    assert_same(&got, &setup.expected[5 * VOCAB..8 * VOCAB], VOCAB, "unchanged");
}

#[test]
fn rows() {
    let mut s = Setup::new();
    for id in [VOCAB as u32, u32::MAX] {
        s.refused(|b| b.rows[1] = Row::Token(id), &["row 1", &format!("token id {id}"), "out of range", "50"]);
    }
    s.refused(|b| b.rows[2] = Row::Embed(0), &["row 2", "embedding 0", "has 0"]);
    let embeds = |b: &mut Batch, row: Row, numbers: usize| {
        b.embeds = vec![0.5; numbers];
        b.rows[0] = row;
    };
    s.refused(|b| embeds(b, Row::Embed(2), 2 * DIM), &["row 0", "embedding 2", "has 2"]);
    s.refused(|b| embeds(b, Row::Embed(1), 2 * DIM - 1), &["row 0", "embedding 1", "has 1"]);
    s.refused(|b| embeds(b, Row::Embed(u32::MAX), DIM), &["embedding 4294967295"]);
    s.refused(|b| b.deepstack = vec![0.0; DIM], &["deepstack", "32", "expected 0"]);
    s.refused(|b| b.positions = vec![[0; 3]; 2], &["2 positions", "3 rows"]);
    s.refused(|b| b.positions = vec![[0, 1 << 25, 0]; 3], &["row 0", "33554432", "16777216"]);
}

#[test]
fn spans() {
    let mut s = Setup::new();
    for start in [0, 4, 6, 1 << 40, usize::MAX] {
        s.refused(|b| b.spans[0].start = start, &["span 0", &format!("position {start}"), "holds 5"]);
    }
    s.refused(|b| b.spans[0].rows = 0, &["span 0", "empty"]);
    s.refused(|b| b.spans[0].rows = 2, &["2 rows", "3"]);
    s.refused(|b| b.spans[0].rows = 4, &["4 rows", "3"]);
    s.refused(|b| b.spans[0].rows = 1 << 25, &["span 0", "16777216"]);
    s.refused(Batch::clear, &["at least one"]);
    s.refused(|b| b.spans.clear(), &["0 rows", "3"]);
    let (running, new) = (s.running, s.new);
    s.refused(|b| b.push(new, 0, &[], Outputs::All), &["span 1", "empty"]);
    s.refused(|b| b.push(new, 1, &[1], Outputs::All), &["span 1", "position 1", "holds 0"]);
    s.refused(|b| b.push(running, 8, &[1], Outputs::All), &["span 1", "position 8", "holds 5"]);
    s.refused(|b| b.push(running, 5, &[1], Outputs::All), &["span 1", "second one of its sequence"]);
    s.refused(|b| b.spans.push(Span { seq: new, start: 0, rows: 1, total: 1, draft: 0 }), &["4 rows", "3"]);
}

#[test]
fn sequences_that_are_not_there() {
    let mut s = Setup::new();
    let ended = s.ended;
    s.refused(|b| b.spans[0].seq = ended, &["span 0", "ended"]);
    s.refused(|b| b.push(ended, 0, &[1], Outputs::All), &["span 1", "ended"]);
    s.refused(|b| b.spans[0].seq = SeqId::NONE, &["span 0", "ended"]);
    s.run.kv.remove(ended);
    s.run.kv.remove(SeqId::NONE);
    assert_eq!(s.run.kv.truncate(ended, 0), 0);
    assert_eq!(s.run.kv.len(ended), None);
}

#[test]
fn outputs() {
    let mut s = Setup::new();
    s.refused(|b| b.outputs = vec![1, 0], &["outputs 1 and 0", "rising"]);
    s.refused(|b| b.outputs = vec![0, 2, 2], &["outputs 2 and 2", "rising"]);
    s.refused(|b| b.outputs = vec![0, 3], &["output 3", "3 rows"]);
    s.refused(|b| b.outputs = vec![u32::MAX], &["output 4294967295"]);
}

/// Where long sequences turn otherwise, keys of the one kind and of the other do not mix.
#[test]
fn sequences_that_outgrow_their_rotation() {
    let mut run = Run::new(&Spec { rope: Rope::Long(20), ..Spec::default() }.gguf(), &plain(), KvType::F32);
    let tokens = Rng(2).tokens(30, VOCAB);
    let [short, long] = [20, 30].map(|n| run.alone(&tokens[..n], &[n]));
    assert_ne!(short, long[..20 * VOCAB]);
    let seq = run.kv.add();
    run.feed(seq, &tokens[..18]);
    let mut batch = Batch::default();
    batch.push(seq, 18, &tokens[18..21], Outputs::All);
    let text = message(run.model.forward(&batch, &mut run.kv), "outgrown");
    assert!(text.contains("span 0") && text.contains("from its beginning"), "{text}");
    // As a short one it goes on to its end.
    let got = run.feed(seq, &tokens[18..20]);
    assert_same(&got, &short[18 * VOCAB..], VOCAB, "short");
    // From the beginning it becomes a long one, which stays one when it is cut.
    assert_eq!(run.kv.truncate(seq, 0), 0);
    let got = run.feed(seq, &tokens);
    assert_same(&got, &long, VOCAB, "long");
    assert_eq!(run.kv.truncate(seq, 10), 10);
    batch.clear();
    batch.push(seq, 10, &tokens[10..15], Outputs::All);
    assert!(run.model.forward(&batch, &mut run.kv).is_err());
    run.total = 30;
    let got = run.feed(seq, &tokens[10..15]);
    assert_same(&got, &long[10 * VOCAB..15 * VOCAB], VOCAB, "long again");
}

#[test]
fn a_handle_that_has_ended_stays_so() {
    let mut run = Run::new(&Spec::default().gguf(), &plain(), KvType::F32);
    let old = run.kv.add();
    run.kv.remove(old);
    let new = run.kv.add();
    assert_ne!(old, new);
    assert_eq!((run.kv.len(old), run.kv.len(new)), (None, Some(0)));
    run.kv.remove(old);
    assert_eq!(run.kv.len(new), Some(0), "ending it again ends nobody else");
}

#[test]
fn a_cache_of_another_model() {
    let mut run = Run::new(&Spec::default().gguf(), &plain(), KvType::F32);
    for spec in [Spec { n_layers: 1, ..Spec::default() }, Spec { head_dim: 4, ..Spec::default() }] {
        let mut kv = Run::new(&spec.gguf(), &plain(), KvType::F32).kv;
        let mut batch = Batch::default();
        batch.push(kv.add(), 0, &[1, 2], Outputs::All);
        assert!(matches!(run.model.forward(&batch, &mut kv), Err(Error::Batch { .. })));
    }
}

#[test]
fn rows_beyond_counting() {
    let mut run = Run::new(&Spec::default().gguf(), &plain(), KvType::F32);
    let seq = run.kv.add();
    run.feed(seq, &[1]);
    let mut batch = Batch::default();
    batch.push(seq, 1, &[1, 2], Outputs::All);
    batch.spans[0].rows = usize::MAX;
    assert!(matches!(run.model.forward(&batch, &mut run.kv), Err(Error::Batch { .. })));
}
