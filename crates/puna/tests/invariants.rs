//! One answer on a real model: the logits of SmolLM2 are the same bits with any number of threads, in chunks of any
//! size, alone and beside others, with any instructions, packed or not, for each kind of cache.
//!
//! `cargo test` does this on a short text. On 2,500 tokens, with a line for each way to compute them (the better part
//! of an hour on two cores, most of it without vector instructions):
//!
//!     cargo test --release -p puna --test invariants -- --ignored --nocapture

#![allow(clippy::unwrap_used)]

mod support;

use puna::{Isa, KvType, LoadOptions, ModelFiles};
use puna_model::{Batch, Model, Outputs};
use std::fmt;
use std::time::Instant;
use support::real;

/// Sequences beside the one that counts, where there are others.
const OTHERS: usize = 31;

/// A way to compute that must not matter.
#[derive(Clone, Copy)]
struct Way {
    isa: Isa,
    pack: bool,
    threads: usize,
    chunk: usize,
    beside_others: bool,
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Way { isa, threads, chunk, .. } = self;
        write!(f, "{isa:<6}  threads {threads}  chunk {chunk:<3}")?;
        f.write_str(if self.beside_others { "  beside 31" } else { "  alone    " })?;
        f.write_str(if self.pack { "" } else { "  not packed" })
    }
}

/// The ways for each kind of cache. The first one is what the others are compared with.
///
/// Threads, chunks and neighbours decide together how attention is divided into tasks and which tiles products take, so
/// they meet in all pairs; instructions change what happens inside of a tile, so each level meets large
/// chunks, others beside them, and single rows.
fn ways() -> Vec<Way> {
    let best = Isa::detect();
    let way = |isa, threads, chunk| Way { isa, pack: true, threads, chunk, beside_others: false };
    let beside = |isa, threads, chunk| Way { beside_others: true, ..way(isa, threads, chunk) };
    let mut ways: Vec<Way> =
        [1, 2, 3].into_iter().flat_map(|threads| [512, 7, 1].map(|chunk| way(best, threads, chunk))).collect();
    ways.extend([
        beside(best, 1, 512),
        beside(best, 2, 7),
        beside(best, 3, 7),
        Way { pack: false, ..way(best, 2, 512) },
    ]);
    for &isa in Isa::available().iter().filter(|&&isa| isa != best) {
        ways.extend([way(isa, 2, 512), beside(isa, 3, 512), way(isa, 2, 1)]);
    }
    ways
}

/// A hash of the logits of each of the sequence's tokens.
fn rows(model: &mut Model, kv: KvType, tokens: &[u32], way: &Way) -> Vec<blake3::Hash> {
    let vocab = model.config().vocab_size;
    let mut kv = model.kv_cache(kv);
    let seq = kv.add();
    let others: Vec<_> = (0..if way.beside_others { OTHERS } else { 0 }).map(|_| kv.add()).collect();
    let mut batch = Batch::default();
    let (mut rows, mut bytes) = (Vec::new(), vec![0; 4 * vocab]);
    for (step, chunk) in tokens.chunks(way.chunk).enumerate() {
        batch.clear();
        // The others come one after the other with prompts of different lengths, and go on by a token a step.
        for (i, &other) in others.iter().enumerate().take(4 * (step + 1)) {
            let start = kv.len(other).unwrap();
            let n = if start == 0 { 1 + i * 53 % (tokens.len() / 12) } else { 1 };
            let text: Vec<u32> = (start..start + n).map(|p| ((p * 7919 + i * 131) % (vocab - 1)) as u32).collect();
            batch.push(other, start, &text, Outputs::Last);
            if i == OTHERS / 2 {
                batch.push(seq, step * way.chunk, chunk, Outputs::All);
            }
        }
        if batch.spans.iter().all(|span| span.seq != seq) {
            batch.push(seq, step * way.chunk, chunk, Outputs::All);
        }
        let before: usize = batch.spans.iter().take_while(|span| span.seq != seq).count();
        let logits = model.forward(&batch, &mut kv).unwrap();
        let own = &logits[before * vocab..][..chunk.len() * vocab];
        rows.extend(own.chunks_exact(vocab).map(|row| {
            assert!(row.iter().all(|x| x.is_finite()), "{way}: a logit is not finite");
            bytes.as_chunks_mut().0.iter_mut().zip(row).for_each(|(bytes, x)| *bytes = x.to_le_bytes());
            blake3::hash(&bytes)
        }));
    }
    rows
}

/// Computes so many tokens in all the ways, with all kinds of caches, and fails if a single bit differs.
fn check(n: usize, ways: &[Way]) {
    let Some(path) = real::model() else { return };
    let text = real::reference()["texts"].as_array().unwrap().iter().flat_map(|text| real::ids(&text["ids"])).collect();
    let text: Vec<u32> = text;
    let tokens: Vec<u32> = text.iter().copied().cycle().take(n).collect();
    let files = ModelFiles::open(&path).unwrap();
    let start = Instant::now();
    let mut expected: [Option<Vec<blake3::Hash>>; 3] = Default::default();
    let mut wrong = 0;
    for way in ways {
        let options = LoadOptions { isa: way.isa, pack: way.pack, threads: way.threads, ..LoadOptions::default() };
        let mut model = Model::load(files.checkpoint(), &options, &mut |_, _| {}).unwrap();
        assert_eq!(model.threads(), way.threads);
        for (kv, expected) in [KvType::F32, KvType::F16, KvType::Q8_0].into_iter().zip(&mut expected) {
            let begin = Instant::now();
            let got = rows(&mut model, kv, &tokens, way);
            let expected = expected.get_or_insert_with(|| got.clone());
            let bytes: Vec<u8> = got.iter().flat_map(|row| *row.as_bytes()).collect();
            let digest = &blake3::hash(&bytes).to_hex()[..16];
            let seconds = begin.elapsed().as_secs_f64();
            let differs = got.iter().zip(expected.iter()).position(|(got, expected)| got != expected);
            let verdict = differs.map(|row| format!("  DIFFERS from row {row} on")).unwrap_or_default();
            println!("{digest}  kv {kv:<4}  {way}  {seconds:.1} s{verdict}");
            wrong += usize::from(differs.is_some() || got.len() != n);
        }
    }
    let minutes = start.elapsed().as_secs_f64() / 60.0;
    println!("{n} tokens in {} ways with 3 caches: {wrong} differ ({minutes:.1} min)", ways.len());
    let [f32, f16, q8_0] = expected.map(Option::unwrap);
    assert!(f32 != f16 && f16 != q8_0, "what the caches keep is different");
    assert_eq!(wrong, 0, "ways to compute that differ");
}

/// The largest differences in the ways, on as few tokens as cross a part of attention.
#[test]
fn on_a_short_text() {
    let some = |way: &Way| way.isa != Isa::Scalar && matches!((way.threads, way.chunk), (1, 512) | (2, 1) | (3, 7));
    check(270, &ways().into_iter().filter(some).collect::<Vec<_>>());
}

#[test]
#[ignore = "takes the better part of an hour: see above"]
fn on_a_long_text() {
    check(2500, &ways());
}
