//! Sequences that share blocks of the cache: what is taken from it is what would have been computed, bit for bit.

#![allow(clippy::unwrap_used)]

mod gguf_builder;
mod support;

use gguf_builder as gb;
use proptest::prelude::*;
use puna_kernels::{KV_BLOCK, KvType};
use puna_model::{Batch, Chain, Config, Gguf, KvCache, Outputs, Prompt, Row, SeqId};
use support::maker::{Rope, Spec, parse};
use support::run::{KV_TYPES, Run, assert_same, plain};
use support::{Fixture, Rng};

fn chain(run: &Run, tokens: &[u32], total: usize) -> Chain {
    let config = run.model.config();
    Chain::of(&Prompt::from(tokens.to_vec()), config, config.rope.is_long(total))
}

/// Begins a shared sequence, takes what is there, computes the rest; gives what was taken, and logits from there on.
fn begin(run: &mut Run, tokens: &[u32], sizes: &[usize]) -> (SeqId, usize, Vec<f32>) {
    let seq = run.kv.add_shared();
    let len = run.kv.adopt(seq, &chain(run, tokens, tokens.len()), tokens.len());
    let logits = run.feed_chunks(seq, &tokens[len..], sizes);
    run.kv.check().unwrap();
    (seq, len, logits)
}

/// Bounds the cache to `n` blocks of each kind of layer.
fn bound(run: &mut Run, n: usize) {
    let (kind, block) = (run.kv.kind(), run.kv.block_bytes());
    run.kv = KvCache::new(run.model.config(), kind, n * block + block - 1);
    assert_eq!(run.kv.limit(), n * block);
}

/// Models whose layers see as far as each other, and not.
fn models() -> Vec<(&'static str, Gguf)> {
    let pattern = |window, windowed: &[bool]| {
        Spec { n_layers: 4, window: Some(window), windowed: windowed.to_vec(), head_dim: 32, ..Spec::default() }.gguf()
    };
    vec![
        ("no window", Spec { head_dim: 32, ..Spec::default() }.gguf()),
        ("window 20", pattern(20, &[])),
        ("window 1", pattern(1, &[true, false, true, true])),
        ("window 33", pattern(33, &[true, false, true, true])),
        ("window 100", pattern(100, &[false, true, true, false])),
    ]
}

#[test]
fn what_is_taken_is_what_would_have_been_computed() {
    for (name, gguf) in models() {
        for kind in KV_TYPES {
            let mut run = Run::new(&gguf, &plain(), kind);
            let (vocab, mut rng) = (run.vocab_size(), Rng(5));
            let first = rng.tokens(150, vocab);
            let (seq, taken, expected) = begin(&mut run, &first, &[23]);
            assert_eq!((taken, expected.len()), (0, 150 * vocab));
            run.kv.remove(seq);
            assert_eq!(run.kv.bytes_held(), 0);
            for common in [150, 149, 128, 127, 97, 96, 64, 40, 32, 31, 0] {
                let mut tokens = first[..common].to_vec();
                tokens.extend(rng.tokens(37, vocab - 1));
                if common < 150 {
                    // Another token than the first one's, so that it is where they differ.
                    tokens[common] = (first[common] + 1) % vocab as u32;
                }
                let fresh = Run::new(&gguf, &plain(), kind).alone(&tokens, &[200]);
                let (seq, taken, got) = begin(&mut run, &tokens, &[9]);
                assert_eq!(taken, common / KV_BLOCK * KV_BLOCK, "{name}, {kind}, {common} in common");
                assert_same(&got, &fresh[taken * vocab..], vocab, &format!("{name}, {kind}, {common} in common"));
                run.kv.remove(seq);
            }
            // The last row is computed in any case.
            for (n, expected) in [(96, 64), (97, 96), (33, 32), (32, 0)] {
                let (seq, taken, _) = begin(&mut run, &first[..n], &[50]);
                assert_eq!(taken, expected, "{name}, {kind}, {n} rows");
                run.kv.remove(seq);
            }
        }
    }
}

#[test]
fn sequences_share_while_they_run() {
    let mut run = Run::new(&Spec::default().gguf(), &plain(), KvType::F16);
    let tokens = Rng(1).tokens(100, run.vocab_size());
    let (a, _, _) = begin(&mut run, &tokens, &[100]);
    let one = run.kv.bytes_held();
    let (b, taken, _) = begin(&mut run, &tokens, &[100]);
    assert_eq!((taken, run.kv.bytes_held()), (96, one + one / 4));
    // What two have computed at the same time is kept once.
    let [c, d] = [(); 2].map(|()| run.kv.add_shared());
    let other = Rng(2).tokens(64, run.vocab_size());
    let mut batch = Batch::default();
    [c, d].iter().for_each(|&seq| batch.push(seq, 0, &other, Outputs::None));
    run.forward(&batch);
    run.kv.check().unwrap();
    assert_eq!(run.kv.bytes_held(), one + one / 4 + one / 2);
    [a, b, c, d].into_iter().for_each(|seq| run.kv.remove(seq));
    run.kv.check().unwrap();
    // Whole blocks stay: three of the one prefix and two of the other.
    assert_eq!((run.kv.bytes_held(), run.kv.bytes_cached()), (0, 5 * run.kv.block_bytes()));
}

#[test]
fn temporary_sequences_leave_nothing_and_find_nothing() {
    let mut run = Run::new(&Spec::default().gguf(), &plain(), KvType::F16);
    let tokens = Rng(1).tokens(100, run.vocab_size());
    run.alone(&tokens, &[100]);
    assert_eq!(run.kv.bytes_cached(), 0);
    let (seq, taken, _) = begin(&mut run, &tokens, &[100]);
    assert_eq!(taken, 0);
    run.kv.remove(seq);
    let seq = run.kv.add();
    assert_eq!(run.kv.adopt(seq, &chain(&run, &tokens, 100), 100), 0);
    assert_eq!(run.kv.adopt(SeqId::NONE, &chain(&run, &tokens, 100), 100), 0);
}

#[test]
fn whoever_writes_into_a_shared_block_copies_it() {
    for (name, gguf) in models() {
        for kind in KV_TYPES {
            let mut run = Run::new(&gguf, &plain(), kind);
            let (vocab, mut rng) = (run.vocab_size(), Rng(3));
            for n in [1, 31, 32, 33, 75] {
                let prompt = rng.tokens(n, vocab);
                let seq = run.kv.add_shared();
                run.feed(seq, &prompt);
                let mut all = vec![(seq, prompt)];
                all.extend((0..3).map(|_| (run.kv.fork(seq).unwrap(), all[0].1.clone())).collect::<Vec<_>>());
                run.kv.check().unwrap();
                for round in 0..40 {
                    for (seq, tokens) in &mut all {
                        let token = rng.below(vocab) as u32;
                        tokens.push(token);
                        let got = run.feed(*seq, &[token]);
                        if round % 13 == 0 || round == 39 {
                            let fresh = Run::new(&gguf, &plain(), kind).alone(tokens, &[200]);
                            let last = &fresh[fresh.len() - vocab..];
                            assert_same(&got, last, vocab, &format!("{name}, {kind}, {n}, round {round}"));
                        }
                    }
                    run.kv.check().unwrap();
                }
                all.iter().for_each(|(seq, _)| run.kv.remove(*seq));
                assert_eq!(run.kv.bytes_held(), 0);
            }
        }
    }
}

#[test]
fn a_full_cache_gives_up_what_was_given_back_first() {
    let mut run = Run::new(&Spec::default().gguf(), &plain(), KvType::F16);
    bound(&mut run, 6);
    assert_eq!(run.kv.capacity(), 6 * KV_BLOCK);
    let texts: Vec<Vec<u32>> = (0..3).map(|i| Rng(i).tokens(65, run.vocab_size())).collect();
    for text in &texts[..2] {
        let (seq, _, _) = begin(&mut run, text, &[65]);
        run.kv.remove(seq);
    }
    assert_eq!(run.kv.bytes_cached(), 4 * run.kv.block_bytes());
    // Two blocks are free, one more is needed: the end of the first text.
    let (seq, _, _) = begin(&mut run, &texts[2], &[65]);
    run.kv.remove(seq);
    for (i, expected) in [(1, 64), (2, 64), (0, 32)] {
        let seq = run.kv.add_shared();
        assert_eq!(run.kv.adopt(seq, &chain(&run, &texts[i], 65), 65), expected, "text {i}");
        run.kv.remove(seq);
    }
    // What somebody holds is not given up.
    let (held, taken, _) = begin(&mut run, &texts[1], &[65]);
    assert_eq!(taken, 64);
    let seq = run.kv.add();
    let has_room = |wishes: &[(SeqId, usize)]| run.kv.has_room(wishes.iter().copied());
    assert!(has_room(&[(seq, 96)]) && !has_room(&[(seq, 97)]));
    assert!(has_room(&[(seq, 96), (held, 96)]) && !has_room(&[(seq, 96), (held, 97)]));
    assert_eq!((run.kv.reserve(seq, 100), run.kv.reserve(held, 31), run.kv.reserve(held, 40)), (96, 31, 31));
    let mut batch = Batch::default();
    batch.push(seq, 0, &[1; 97], Outputs::Last);
    let before = run.kv.len(held);
    assert!(matches!(run.model.forward(&batch, &mut run.kv), Err(puna_model::Error::OutOfMemory { .. })));
    run.kv.check().unwrap();
    assert_eq!((run.kv.len(held), run.kv.len(seq)), (before, Some(0)));
    assert_eq!(run.kv.bytes_held(), 3 * run.kv.block_bytes());
}

/// A window's layers go round in few blocks, however long the sequence.
#[test]
fn windows_in_a_bounded_cache() {
    let gguf = Fixture::named("mistral-swa").gguf();
    let mut run = Run::new(&gguf, &plain(), KvType::F16);
    let tokens = Rng(3).tokens(240, run.vocab_size());
    let vocab = run.vocab_size();
    let whole = run.alone(&tokens, &[240]);
    bound(&mut run, 1);
    assert_eq!(run.kv.capacity(), KV_BLOCK);
    for n in [2, 3] {
        bound(&mut run, n);
        assert_eq!(run.kv.capacity(), usize::MAX);
        let (seq, mut at) = (run.kv.add_shared(), 0);
        while at < 240 {
            let rows = run.kv.reserve(seq, 50).min(240 - at);
            assert!(rows > 0);
            run.total = 240;
            let got = run.feed(seq, &tokens[at..at + rows]);
            assert_same(&got, &whole[at * vocab..(at + rows) * vocab], vocab, &format!("{n} blocks, position {at}"));
            run.kv.check().unwrap();
            at += rows;
        }
    }
}

#[test]
fn the_two_rotations_share_nothing() {
    let gguf = Spec { rope: Rope::Long(70), ..Spec::default() }.gguf();
    let mut run = Run::new(&gguf, &plain(), KvType::F16);
    let (vocab, tokens) = (run.vocab_size(), Rng(6).tokens(120, run.vocab_size()));
    let take = |run: &mut Run, n: usize| {
        let (seq, taken, got) = begin(run, &tokens[..n], &[n]);
        run.kv.remove(seq);
        let fresh = Run::new(&gguf, &plain(), KvType::F16).alone(&tokens[..n], &[n]);
        assert_same(&got, &fresh[taken * vocab..], vocab, &format!("{n} rows"));
        taken
    };
    // Short, long for the first time, long again, short again.
    assert_eq!([70, 71, 120, 70, 66].map(|n| take(&mut run, n)), [0, 0, 64, 64, 64]);
    // A chain of the one kind is no chain of the other, nor does a sequence change its kind.
    let seq = run.kv.add_shared();
    assert_eq!(run.kv.adopt(seq, &chain(&run, &tokens[..70], 70), 71), 0);
    run.feed(seq, &tokens[..10]);
    assert_eq!(run.kv.adopt(seq, &chain(&run, &tokens, 120), 120), 10);
    assert_eq!(run.kv.adopt(seq, &chain(&run, &tokens[..70], 70), 70), 64);
}

#[test]
fn only_what_goes_on_alike_is_taken() {
    let mut run = Run::new(&Spec::default().gguf(), &plain(), KvType::F16);
    let tokens = Rng(6).tokens(120, run.vocab_size());
    let (seq, _, _) = begin(&mut run, &tokens, &[120]);
    run.kv.remove(seq);
    let mut other = tokens.clone();
    other[3] = (other[3] + 1) % 50;
    let seq = run.kv.add_shared();
    run.feed(seq, &other[..40]);
    assert_eq!(run.kv.adopt(seq, &chain(&run, &tokens, 120), 120), 40, "it has begun otherwise");
    run.kv.truncate(seq, 0);
    run.feed(seq, &tokens[..40]);
    assert_eq!(run.kv.adopt(seq, &chain(&run, &tokens, 120), 120), 96);
    assert_eq!(run.kv.adopt(seq, &chain(&run, &tokens, 120), 120), 96, "there is no more");
    run.kv.check().unwrap();
}

/// A model whose image rows get more added after its first layer, and whose positions have three axes.
fn vision() -> Gguf {
    let spec = Spec { arch: "qwen3vl", ..Spec::default() };
    let sections = gb::array(4, &[2, 1, 1, 0].map(gb::u32));
    let builder = spec.builder().key("qwen3vl.rope.dimension_sections", sections);
    parse(&builder.key("qwen3vl.n_deepstack_layers", gb::u32(1)))
}

/// A prompt of 80 rows, 20 of them of an image.
fn image(config: &Config, seed: u64) -> Prompt {
    let (mut rng, n) = (Rng(seed), 20);
    let mut prompt = Prompt::from(Rng(1).tokens(80, 50));
    for i in 0..n {
        prompt.rows[10 + i] = Row::Embed(i as u32);
    }
    prompt.embeds = (0..n * config.dim).map(|_| rng.number()).collect();
    prompt.deepstack = (0..config.n_deepstack * n * config.dim).map(|_| rng.number()).collect();
    let position = |i: u32| match i {
        0..10 => [i; 3],
        10..30 => [10, 10 + (i - 10) / 5, 10 + (i - 10) % 5],
        _ => [i - 15; 3],
    };
    prompt.positions = (0..80).map(position).collect();
    prompt.check(config).unwrap();
    assert_eq!(prompt.position_delta(), -15);
    prompt
}

fn feed(run: &mut Run, seq: SeqId, prompt: &Prompt, size: usize) -> Vec<f32> {
    let (dim, mut logits) = (run.model.config().dim, Vec::new());
    while run.len(seq) < prompt.len() {
        let start = run.len(seq);
        let mut batch = Batch::default();
        batch.push_prompt(seq, prompt, start..prompt.len().min(start + size), dim, Outputs::All);
        logits.extend(run.forward(&batch));
    }
    run.kv.check().unwrap();
    logits
}

#[test]
fn rows_of_images() {
    let mut run = Run::new(&vision(), &plain(), KvType::F16);
    let config = run.model.config().clone();
    assert_eq!(config.n_deepstack, 1);
    let vocab = run.vocab_size();
    let first = image(&config, 1);
    let mut changed: Vec<(&str, Prompt)> = vec![("nothing", first.clone()), ("another image", image(&config, 2))];
    let mut change = |what, change: &dyn Fn(&mut Prompt)| {
        let mut prompt = first.clone();
        change(&mut prompt);
        changed.push((what, prompt));
    };
    change("a number of the image", &|p| p.embeds[5] = -p.embeds[5]);
    change("a number of deepstack", &|p| p.deepstack[19 * 32] += 1.0);
    change("no deepstack", &|p| p.deepstack.clear());
    change("a position", &|p| p.positions[12][1] += 1);
    change("no positions", &|p| p.positions.clear());
    change("rows in another order", &|p| p.rows.swap(11, 12));
    change("a token", &|p| p.rows[2] = Row::Token(7));
    change("a token in place of the image's row", &|p| p.rows[20] = Row::Token(7));
    for (what, prompt) in &changed {
        let chain = Chain::of(prompt, &config, false);
        let fresh = {
            let mut run = Run::new(&vision(), &plain(), KvType::F16);
            let seq = run.kv.add();
            feed(&mut run, seq, prompt, 80)
        };
        for round in 0..2 {
            let seq = run.kv.add_shared();
            let taken = run.kv.adopt(seq, &chain, 80);
            assert_eq!(taken, if round == 1 { 64 } else { 0 }, "{what}, round {round}");
            let got = feed(&mut run, seq, prompt, [80, 7][round]);
            assert_same(&got, &fresh[taken * vocab..], vocab, what);
            run.kv.remove(seq);
        }
    }
}

#[test]
fn images_and_texts_in_one_batch() {
    let mut run = Run::new(&vision(), &plain(), KvType::F16);
    let config = run.model.config().clone();
    let plain_image = Prompt { deepstack: vec![], ..image(&config, 4) };
    let text = Prompt::from(Rng(9).tokens(80, 50));
    let prompts = [image(&config, 1), plain_image, text, image(&config, 2)];
    let vocab = run.vocab_size();
    let expected: Vec<Vec<f32>> = prompts
        .iter()
        .map(|prompt| {
            let seq = run.kv.add();
            let logits = feed(&mut run, seq, prompt, 80);
            run.kv.remove(seq);
            logits
        })
        .collect();
    for order in [[0, 1, 2, 3], [2, 1, 0, 3], [1, 2, 3, 0]] {
        let seqs = order.map(|_| run.kv.add_shared());
        let mut got = vec![Vec::new(); 4];
        for range in [0..17, 17..25, 25..80] {
            let mut batch = Batch::default();
            for (&i, &seq) in order.iter().zip(&seqs) {
                batch.push_prompt(seq, &prompts[i], range.clone(), config.dim, Outputs::All);
            }
            let logits = run.forward(&batch);
            for (&i, own) in order.iter().zip(logits.chunks(range.len() * vocab)) {
                got[i].extend_from_slice(own);
            }
        }
        run.kv.check().unwrap();
        for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
            assert_same(got, expected, vocab, &format!("prompt {i} in {order:?}"));
        }
        seqs.into_iter().for_each(|seq| run.kv.remove(seq));
        // Whoever computed them, and beside whom: they are found.
        for prompt in &prompts {
            let seq = run.kv.add_shared();
            assert_eq!(run.kv.adopt(seq, &Chain::of(prompt, &config, false), 80), 64);
            run.kv.remove(seq);
        }
    }
}

#[test]
fn prompts_that_do_not_fit() {
    let run = Run::new(&vision(), &plain(), KvType::F16);
    let config = run.model.config();
    let refused = |change: &dyn Fn(&mut Prompt), words: &str| {
        let mut prompt = image(config, 1);
        change(&mut prompt);
        let error = prompt.check(config).unwrap_err().to_string();
        assert!(error.contains(words), "expected {words:?} in: {error}");
    };
    refused(&|p| p.rows[3] = Row::Token(50), "row 3: token id 50");
    refused(&|p| p.rows[3] = Row::Embed(20), "embedding 20 is out of range");
    refused(&|p| p.embeds.push(0.0), "641 numbers, expected a multiple of 32");
    refused(&|p| p.deepstack.truncate(3), "3 numbers, expected 640");
    refused(&|p| p.positions.truncate(3), "3 positions for 80 rows");
    refused(&|p| p.positions[7][2] = u32::MAX, "row 7: positions [7, 7, 4294967295] go past 8388608");
}

/// What may be done with sequences that share blocks.
#[derive(Clone, Debug)]
enum Op {
    Begin { text: usize, len: usize },
    Grow { seq: usize, n: usize },
    Other { seq: usize },
    Cut { seq: usize, part: usize },
    Fork { seq: usize },
    End { seq: usize },
    Peek { seq: usize },
    Reserve { seq: usize, n: usize },
}

fn op() -> impl Strategy<Value = Op> {
    let seq = 0usize..6;
    prop_oneof![
        3 => (0usize..3, 1usize..110).prop_map(|(text, len)| Op::Begin { text, len }),
        4 => (seq.clone(), 1usize..45).prop_map(|(seq, n)| Op::Grow { seq, n }),
        2 => seq.clone().prop_map(|seq| Op::Other { seq }),
        2 => (seq.clone(), 0usize..101).prop_map(|(seq, part)| Op::Cut { seq, part }),
        2 => seq.clone().prop_map(|seq| Op::Fork { seq }),
        3 => seq.clone().prop_map(|seq| Op::End { seq }),
        1 => seq.clone().prop_map(|seq| Op::Peek { seq }),
        1 => (seq, 0usize..90).prop_map(|(seq, n)| Op::Reserve { seq, n }),
    ]
}

/// Sequences, what they should hold, and what their next tokens are taken from.
struct World {
    run: Run,
    limit: usize,
    live: Vec<(SeqId, Vec<u32>, usize)>,
}

impl World {
    fn text(i: usize) -> Vec<u32> {
        Rng(100 + i as u64 / 2).tokens(40, 50).into_iter().chain(Rng(i as u64).tokens(400, 50)).collect()
    }

    /// Logits of the last token of each sequence are those of the whole alone.
    fn probe(&mut self, alone: &mut Run, at: usize) {
        let (seq, tokens, _) = &self.live[at];
        let mut batch = Batch::default();
        batch.push(*seq, tokens.len(), &[7], Outputs::Last);
        let Ok(got) = self.run.model.peek(&batch, &mut self.run.kv) else { return };
        let got = got.to_vec();
        let whole = [&tokens[..], &[7]].concat();
        let expected = alone.alone(&whole, &[300]);
        assert_same(&got, &expected[expected.len() - 50..], 50, &format!("{} tokens", tokens.len()));
    }

    fn feed(&mut self, at: usize, tokens: &[u32]) {
        let (seq, own, _) = &mut self.live[at];
        if own.len() + tokens.len() > 200 {
            return;
        }
        let got = self.run.kv.reserve(*seq, tokens.len());
        if got > 0 {
            self.run.feed(*seq, &tokens[..got]);
            own.extend_from_slice(&tokens[..got]);
        }
    }

    fn act(&mut self, op: &Op) {
        let n = self.live.len();
        let at = |seq: &usize| (n > 0).then(|| seq % n.max(1));
        match op {
            Op::Begin { text, len } if n < 6 => {
                let tokens = &World::text(*text)[..*len];
                let seq = self.run.kv.add_shared();
                let taken = self.run.kv.adopt(seq, &chain(&self.run, tokens, *len), *len);
                self.live.push((seq, tokens[..taken].to_vec(), *text));
                self.feed(n, &tokens[taken..]);
            }
            Op::Begin { .. } => {}
            Op::Grow { seq, n } => {
                let Some(at) = at(seq) else { return };
                let (len, text) = (self.live[at].1.len(), World::text(self.live[at].2));
                self.feed(at, &text[len..len + n]);
            }
            Op::Other { seq } => {
                let Some(at) = at(seq) else { return };
                self.feed(at, &[(self.live[at].1.len() % 50) as u32]);
            }
            Op::Cut { seq, part } => {
                let Some(at) = at(seq) else { return };
                let (seq, own, _) = &mut self.live[at];
                let len = self.run.kv.truncate(*seq, own.len() * part / 100);
                own.truncate(len);
            }
            Op::Fork { seq } => {
                let Some(at) = at(seq).filter(|_| n < 6) else { return };
                let (seq, own, text) = self.live[at].clone();
                self.live.push((self.run.kv.fork(seq).unwrap(), own, text));
            }
            Op::End { seq } => {
                let Some(at) = at(seq) else { return };
                self.run.kv.remove(self.live.remove(at).0);
            }
            Op::Peek { seq } => {
                let Some(at) = at(seq) else { return };
                let mut batch = Batch::default();
                batch.push(self.live[at].0, self.live[at].1.len(), &[3; 20], Outputs::All);
                // It may not fit.
                let _ = self.run.model.peek(&batch, &mut self.run.kv);
            }
            Op::Reserve { seq, n } => {
                let Some(at) = at(seq) else { return };
                assert!(self.run.kv.reserve(self.live[at].0, *n) <= *n);
            }
        }
        self.run.kv.check().unwrap();
        assert!(self.run.kv.bytes() <= self.limit * self.run.kv.block_bytes());
        for (seq, own, _) in &self.live {
            assert_eq!(self.run.kv.len(*seq), Some(own.len()));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn any_life(model in 0usize..5, limit in 3usize..14, kind in 0usize..3, ops in prop::collection::vec(op(), 1..40)) {
        let (_, gguf) = models().swap_remove(model);
        let mut run = Run::new(&gguf, &plain(), KV_TYPES[kind]);
        bound(&mut run, limit);
        let mut alone = Run::new(&gguf, &plain(), KV_TYPES[kind]);
        let mut world = World { run, limit, live: Vec::new() };
        for (i, op) in ops.iter().enumerate() {
            world.act(op);
            if i % 3 == 0 || i + 1 == ops.len() {
                (0..world.live.len()).for_each(|at| world.probe(&mut alone, at));
            }
        }
        world.live.drain(..).for_each(|(seq, ..)| world.run.kv.remove(seq));
        world.run.kv.check().unwrap();
        prop_assert_eq!(world.run.kv.bytes_held(), 0);
    }
}
