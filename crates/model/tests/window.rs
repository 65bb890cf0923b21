//! Layers with a window: a position sees exactly so many, memory does not grow with length, and layers with and
//! without a window live in one model.

#![allow(clippy::unwrap_used)]

mod gguf_builder;
mod support;

use puna_kernels::{KV_BLOCK, KvType};
use puna_model::{BackendKind, Gguf, LoadOptions, SeqId};
use support::maker::Spec;
use support::run::{KV_TYPES, Run, assert_same, plain, relative_error};
use support::{Fixture, Rng};

/// Blocks that a layer with window `w` needs between steps: those of the `w - 1` positions that the next one sees
/// beside itself, wherever they lie.
fn most_blocks(w: usize) -> usize {
    (w - 1).div_ceil(KV_BLOCK) + 1
}

/// Bytes that a sequence of one position holds: a block for each window that the model has.
fn first_bytes(run: &mut Run) -> usize {
    let seq = run.kv.add();
    run.feed(seq, &[1]);
    let bytes = run.kv.bytes_held();
    run.kv.remove(seq);
    assert_eq!(run.kv.bytes_held(), 0);
    bytes
}

/// Bytes held after each step until the sequence has `n` positions, by length.
fn grow(run: &mut Run, seq: SeqId, n: usize, sizes: &[usize]) -> Vec<(usize, usize)> {
    let mut rng = Rng(9);
    let mut held = Vec::new();
    for &size in sizes.iter().cycle() {
        let size = size.min(n - run.len(seq));
        if size == 0 {
            break;
        }
        let tokens = rng.tokens(size, run.vocab_size());
        run.feed(seq, &tokens);
        held.push((run.len(seq), run.kv.bytes_held()));
    }
    held
}

#[test]
fn memory_does_not_grow_with_length() {
    let gguf = Fixture::named("mistral-swa").gguf();
    for kind in KV_TYPES {
        let mut run = Run::new(&gguf, &plain(), kind);
        let window = run.model.config().windows[0].unwrap();
        assert!(run.model.config().windows.iter().all(|&w| w == Some(window)));
        let block = first_bytes(&mut run);
        for sizes in [&[1][..], &[7], &[50, 1, 1, 1], &[240]] {
            let seq = run.kv.add();
            let held = grow(&mut run, seq, 240, sizes);
            for &(len, bytes) in &held {
                // Exactly the blocks that the next position sees something of.
                let blocks = len.div_ceil(KV_BLOCK) - (len + 1).saturating_sub(window) / KV_BLOCK;
                assert!(blocks <= most_blocks(window));
                assert_eq!(bytes, blocks * block, "{kind}, {len} positions in chunks of {sizes:?}");
            }
            run.kv.remove(seq);
            assert_eq!(run.kv.bytes_held(), 0);
        }
    }
}

#[test]
fn the_same_length_holds_the_same_however_it_came() {
    let gguf = Fixture::named("mistral-swa").gguf();
    let mut run = Run::new(&gguf, &plain(), KvType::F16);
    for n in [1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 100, 240] {
        let held = [&[1][..], &[13], &[n]].map(|sizes| {
            let seq = run.kv.add();
            let held = grow(&mut run, seq, n, sizes);
            run.kv.remove(seq);
            held[held.len() - 1]
        });
        assert!(held[0] == held[1] && held[1] == held[2], "{n} positions: {held:?}");
    }
}

/// A model of one layer, whose output at a position depends on what that layer sees and on nothing else.
fn one_layer(window: Option<u32>) -> Gguf {
    Spec { n_layers: 1, window, ..Spec::default() }.gguf()
}

#[test]
fn a_position_sees_itself_and_those_before_it_in_the_window() {
    let n = 80;
    for window in [1, 2, 16, 31, 32, 33, 64, 65] {
        let mut run = Run::new(&one_layer(Some(window)), &plain(), KvType::F32);
        let vocab_size = run.vocab_size();
        let tokens = Rng(u64::from(window)).tokens(n, vocab_size);
        let expected = run.alone(&tokens, &[n]);
        for changed in [0, 5, 13, 14, 31, 32, 60] {
            let mut tokens = tokens.clone();
            tokens[changed] = (tokens[changed] + 1) % vocab_size as u32;
            let got = run.alone(&tokens, &[n]);
            for (i, (got, expected)) in got.chunks(vocab_size).zip(expected.chunks(vocab_size)).enumerate() {
                let sees = (changed..changed + window as usize).contains(&i);
                assert_eq!(got != expected, sees, "window {window}: position {i}, token {changed} changed");
            }
        }
    }
}

#[test]
fn a_window_as_long_as_the_sequence_is_none() {
    let n = 70;
    let mut runs = [None, Some(70), Some(1000)].map(|w| Run::new(&one_layer(w), &plain(), KvType::F16));
    let vocab_size = runs[0].vocab_size();
    let tokens = Rng(4).tokens(n, vocab_size);
    let [none, exact, long] = runs.each_mut().map(|run| run.alone(&tokens, &[9]));
    assert_same(&exact, &none, vocab_size, "window 70");
    assert_same(&long, &none, vocab_size, "window 1000");
}

#[test]
fn some_layers_have_a_window() {
    let (n, window) = (150, 20);
    let spec = Spec { n_layers: 4, window: Some(window), windowed: vec![true, false, true, true], ..Spec::default() };
    let gguf = spec.gguf();
    let tokens = Rng(2).tokens(n, spec.vocab_size);
    for kind in KV_TYPES {
        let mut run = Run::new(&gguf, &plain(), kind);
        let whole = run.alone(&tokens, &[n]);
        for sizes in [&[1][..], &[25], &[64, 3]] {
            let got = run.alone(&tokens, sizes);
            assert_same(&got, &whole, spec.vocab_size, &format!("{kind}, chunks of {sizes:?}"));
        }
        let reference = LoadOptions { backend: BackendKind::Reference, ..plain() };
        let expected = Run::new(&gguf, &reference, kind).alone(&tokens, &[n]);
        let error = relative_error(&whole, &expected);
        assert!(error <= 2e-3, "{kind}: relative error {error:.1e}");

        // Three layers of four share the blocks of the window; the other's grow.
        let layer = first_bytes(&mut run) / 4;
        let seq = run.kv.add();
        for (len, bytes) in grow(&mut run, seq, n, &[1]) {
            let all = len.div_ceil(KV_BLOCK);
            let windowed = all - (len + 1).saturating_sub(window as usize) / KV_BLOCK;
            assert_eq!(bytes, (all + 3 * windowed) * layer, "{kind}, {len} positions");
        }
    }
}

#[test]
fn a_pattern_says_which_layers() {
    let windows = |window, windowed: &[bool]| {
        let spec = Spec { n_layers: 3, window, windowed: windowed.to_vec(), ..Spec::default() };
        Run::new(&spec.gguf(), &plain(), KvType::F32).model.config().windows.clone()
    };
    assert_eq!(windows(None, &[]), [None; 3]);
    assert_eq!(windows(Some(0), &[]), [None; 3]);
    assert_eq!(windows(Some(5), &[]), [Some(5); 3]);
    assert_eq!(windows(Some(5), &[true, false, true]), [Some(5), None, Some(5)]);
    assert_eq!(windows(Some(5), &[false; 3]), [None; 3]);
}

#[test]
fn cutting_a_sequence_behind_its_window_empties_it() {
    let gguf = Fixture::named("mistral-swa").gguf();
    let mut run = Run::new(&gguf, &plain(), KvType::F16);
    let tokens = Rng(3).tokens(100, run.vocab_size());
    let whole = run.alone(&tokens, &[100]);
    let vocab_size = run.vocab_size();
    // At 100 positions, 84 to 99 can be seen, which are in blocks 2 and 3; cut at 79, the next sees from 64 on.
    for (keep, kept) in [(100, 100), (200, 100), (99, 99), (79, 79), (78, 0), (64, 0), (1, 0), (0, 0)] {
        let seq = run.kv.add();
        run.feed_chunks(seq, &tokens, &[30]);
        assert_eq!(run.kv.truncate(seq, keep), kept, "cut at {keep}");
        assert_eq!(run.len(seq), kept);
        let got = run.feed_chunks(seq, &tokens[kept..], &[9]);
        assert_same(&got, &whole[kept * vocab_size..], vocab_size, &format!("cut at {keep}"));
        run.kv.remove(seq);
    }
}

/// Memory is bounded by the window: what the cache has taken at 100 positions is enough at 240.
#[test]
fn memory_does_not_grow_beyond_the_window() {
    let fixture = Fixture::named("mistral-swa");
    for chunk in [1, 7] {
        let mut run = Run::new(&fixture.gguf(), &plain(), KvType::F16);
        let seq = run.kv.add();
        let tokens: Vec<u32> = (0..240).map(|i| (i * 7919 + 13) % 500 + 3).collect();
        run.feed_chunks(seq, &tokens[..100], &[chunk]);
        let at_100 = run.kv.bytes();
        run.feed_chunks(seq, &tokens[100..], &[chunk]);
        assert_eq!(run.kv.bytes(), at_100, "chunks of {chunk}");
    }
}
