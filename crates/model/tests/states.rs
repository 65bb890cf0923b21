//! Saved states: what goes on from a file is what would have gone on without it, bit for bit, and a file that is not
//! right is refused.

#![allow(clippy::unwrap_used)]

mod gguf_builder;
mod support;

use proptest::prelude::*;
use puna_kernels::{KV_BLOCK, KvType};
use puna_model::{Chain, Error, Gguf, KvCache, LoadOptions, Prompt, State, StateReader, StateWriter};
use std::fs;
use std::path::Path;
use support::Rng;
use support::maker::{Rope, Spec};
use support::run::{KV_TYPES, Run, assert_same, plain};

fn chain(run: &Run, tokens: &[u32]) -> Chain {
    let config = run.model.config();
    Chain::of(&Prompt::from(tokens.to_vec()), config, config.rope.is_long(tokens.len()))
}

/// Computes tokens, and saves what the cache has of them when their sequence has ended.
fn save(run: &mut Run, tokens: &[u32], note: &str, path: &Path) -> usize {
    let seq = run.kv.add_shared();
    run.feed_chunks(seq, tokens, &[23, 40]);
    run.kv.remove(seq);
    let chain = chain(run, tokens);
    run.model.save_state(&mut run.kv, &chain, note, path).unwrap()
}

fn load(run: &mut Run, path: &Path) -> Result<State, Error> {
    let state = run.model.load_state(&mut run.kv, path);
    run.kv.check().unwrap();
    state
}

/// Tokens, positions and note.
fn said(state: &State) -> (Option<Vec<u32>>, usize, String) {
    (state.tokens(), state.positions(), state.note().to_owned())
}

fn models() -> Vec<(&'static str, Gguf)> {
    let base = || Spec { n_layers: 4, head_dim: 32, ..Spec::default() };
    let windowed = |window, windowed: &[bool]| Spec { window: Some(window), windowed: windowed.to_vec(), ..base() };
    vec![
        ("no window", base().gguf()),
        ("window 20", windowed(20, &[]).gguf()),
        ("window 1", windowed(1, &[true, false, true, true]).gguf()),
        ("window 70", windowed(70, &[true, false, true, true]).gguf()),
        ("longrope", Spec { rope: Rope::Long(100), ..base() }.gguf()),
    ]
}

#[test]
fn what_goes_on_is_what_would_have_gone_on() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    for (name, gguf) in models() {
        for kind in KV_TYPES {
            let mut rng = Rng(5);
            let mut first = Run::new(&gguf, &plain(), kind);
            let vocab = first.vocab_size();
            let tokens = rng.tokens(150, vocab);
            assert_eq!(save(&mut first, &tokens, "what was said: é", &path), 128, "{name}, {kind}");
            let mut run = Run::new(&gguf, &LoadOptions { threads: 2, ..plain() }, kind);
            let expected = (Some(tokens.clone()), 128, "what was said: é".to_owned());
            assert_eq!(said(&load(&mut run, &path).unwrap()), expected);
            // Twice is as good as once.
            let bytes = run.kv.bytes_cached();
            assert_eq!(said(&load(&mut run, &path).unwrap()), expected);
            assert_eq!((run.kv.bytes_cached(), run.kv.bytes_held()), (bytes, 0));
            let longer = [tokens, rng.tokens(37, vocab)].concat();
            let seq = run.kv.add_shared();
            let taken = run.kv.adopt(seq, &chain(&run, &longer), longer.len());
            assert_eq!(taken, 128, "{name}, {kind}");
            let got = run.feed_chunks(seq, &longer[taken..], &[9]);
            let whole = Run::new(&gguf, &plain(), kind).alone(&longer, &[200]);
            assert_same(&got, &whole[taken * vocab..], vocab, &format!("{name}, {kind}"));
        }
    }
}

#[test]
fn what_is_not_in_the_cache_is_not_saved() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    let gguf = Spec::default().gguf();
    let mut run = Run::new(&gguf, &plain(), KvType::F16);
    let tokens = Rng(5).tokens(100, run.vocab_size());
    let chain = chain(&run, &tokens);
    assert_eq!(run.model.save_state(&mut run.kv, &chain, "", &path), Ok(0));
    let state = load(&mut run, &path).unwrap();
    assert_eq!(said(&state), (Some(tokens), 0, String::new()));
    let nowhere = run.model.save_state(&mut run.kv, &chain, "", &dir.path().join("no/state"));
    assert!(matches!(nowhere, Err(Error::Write { .. })), "{nowhere:?}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left behind");
}

#[test]
fn foreign_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    let spec = Spec { head_dim: 32, ..Spec::default() };
    let mut run = Run::new(&spec.gguf(), &plain(), KvType::F16);
    let tokens = Rng(5).tokens(100, run.vocab_size());
    save(&mut run, &tokens, "", &path);
    let refusal = |run: &mut Run, path: &Path| {
        let e = load(run, path).unwrap_err().to_string();
        assert_eq!(run.kv.bytes_cached(), 0, "{e}");
        e.split_once(": ").unwrap().1.to_owned()
    };
    let cannot = |what: &str| format!("the saved state cannot be used: {what}");
    let other = Spec { seed: 2, ..spec.clone() }.gguf();
    let another = cannot("it was saved from another model, or from the same loaded in another way");
    assert_eq!(refusal(&mut Run::new(&other, &plain(), KvType::F16), &path), another);
    assert_eq!(
        refusal(&mut Run::new(&spec.gguf(), &plain(), KvType::Q8_0), &path),
        cannot("its keys and values are kept as f16, those of the cache as q8_0")
    );
    let mut fresh = Run::new(&spec.gguf(), &plain(), KvType::F16);
    fs::write(dir.path().join("text"), "not a state at all").unwrap();
    assert_eq!(refusal(&mut fresh, &dir.path().join("text")), cannot("it is no saved state"));
    assert_eq!(refusal(&mut fresh, &dir.path().join("none")), "no such file");
    let mut newer = fs::read(&path).unwrap();
    newer[6] = 2;
    fs::write(dir.path().join("newer"), newer).unwrap();
    assert_eq!(refusal(&mut fresh, &dir.path().join("newer")), cannot("version 2 of saved states, expected 1"));
    // A cache that does not hold it.
    let block = fresh.kv.block_bytes();
    fresh.kv = KvCache::new(fresh.model.config(), KvType::F16, 2 * block);
    assert_eq!(load(&mut fresh, &path).map(|_| ()), Err(Error::OutOfMemory { what: "the KV cache" }));
    assert_eq!((fresh.kv.bytes_held(), fresh.kv.bytes_cached()), (0, 0));
}

/// A state of 100 tokens, and a model for it.
fn saved() -> (Run, Vec<u8>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    let mut run = Run::new(&Spec::default().gguf(), &plain(), KvType::F16);
    let tokens = Rng(5).tokens(100, run.vocab_size());
    save(&mut run, &tokens, "a note", &path);
    run.kv = run.model.kv_cache(KvType::F16);
    (run, fs::read(&path).unwrap())
}

fn try_load(run: &mut Run, bytes: &[u8]) -> Result<State, Error> {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("state"), bytes).unwrap();
    load(run, &dir.path().join("state"))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever is changed, cut off or added is noticed, and nothing of it gets into the cache.
    #[test]
    fn damage_is_noticed(at: prop::sample::Index, to: u8, cut: prop::sample::Index, kind in 0..3) {
        let (mut run, good) = saved();
        let mut bytes = good.clone();
        match kind {
            0 => bytes[at.index(good.len())] = to,
            1 => bytes.truncate(cut.index(good.len())),
            _ => bytes.insert(at.index(good.len() + 1), to),
        }
        let result = try_load(&mut run, &bytes);
        if bytes == good {
            prop_assert_eq!(result.unwrap().positions(), 96);
        } else {
            prop_assert!(matches!(result, Err(Error::State { .. })), "{:?}", result);
            prop_assert_eq!(run.kv.bytes_cached(), 0);
        }
    }

    /// Files with any counts and rows and a good checksum are read or refused, and take no more memory than they have
    /// bytes.
    #[test]
    fn lies_are_refused(
        changes in prop::collection::vec((48usize..200, any::<u8>()), 1..4),
        count in prop::option::of((prop::sample::select(&[56usize, 64, 72][..]), any::<u64>())),
        add in 0usize..100,
    ) {
        let (mut run, mut bytes) = saved();
        bytes.truncate(bytes.len() - 32);
        for (at, to) in changes {
            bytes[at] = to;
        }
        if let Some((at, n)) = count {
            bytes[at..at + 8].copy_from_slice(&n.to_le_bytes());
        }
        bytes.extend(vec![0; add]);
        let len = bytes.len() as u64 + 32;
        bytes[8..16].copy_from_slice(&len.to_le_bytes());
        let hash = blake3::hash(&bytes);
        bytes.extend(hash.as_bytes());
        match try_load(&mut run, &bytes) {
            Ok(state) => prop_assert_eq!(state.positions(), 3 * KV_BLOCK),
            Err(e) => {
                prop_assert!(matches!(e, Error::State { .. }), "{}", e);
                prop_assert_eq!(run.kv.bytes_cached(), 0);
            }
        }
    }
}

#[test]
fn pieces_make_the_whole_file() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, pieces) = (dir.path().join("whole"), dir.path().join("pieces"));
    // Longer than a piece, so that the blocks are not in the first one.
    let note = "x".repeat(5 << 20);
    for (name, gguf) in models() {
        let mut run = Run::new(&gguf, &plain(), KvType::F16);
        let mut rng = Rng(5);
        let vocab = run.vocab_size();
        let tokens = rng.tokens(100, vocab);
        save(&mut run, &tokens, &note, &whole);
        let chain = chain(&run, &tokens);
        assert_eq!(run.model.state_bytes(&run.kv, &chain, &note), fs::metadata(&whole).unwrap().len(), "{name}");
        let mut saving = run.model.begin_save(&mut run.kv, &chain, &note).unwrap();
        assert!(run.kv.bytes_held() > 0);
        let mut writer = StateWriter::create(&pieces).unwrap();
        while let Some(piece) = saving.next_piece(&run.kv).unwrap() {
            writer.write(&piece).unwrap();
            // What goes on from the same blocks, or begins anew, leaves them as they are.
            for begins in [&tokens[..96], &[][..]] {
                let longer = [begins, &rng.tokens(40, vocab)].concat();
                let seq = run.kv.add_shared();
                let chain = self::chain(&run, &longer);
                let taken = run.kv.adopt(seq, &chain, longer.len());
                run.feed_chunks(seq, &longer[taken..], &[50]);
                run.kv.remove(seq);
                // Longer than a hundred, a longrope sequence turns otherwise, and begins anew the first time.
                assert!(taken == begins.len() || (name == "longrope" && taken == 0), "{name}: {taken}");
            }
            run.kv.check().unwrap();
        }
        saving.end(&mut run.kv);
        writer.finish().unwrap();
        assert_eq!((run.kv.bytes_held(), run.kv.check()), (0, Ok(())));
        assert_eq!(fs::read(&pieces).unwrap(), fs::read(&whole).unwrap(), "{name}");
    }
}

#[test]
fn a_state_without_its_sequence_goes_nowhere() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    let mut run = Run::new(&Spec::default().gguf(), &plain(), KvType::F16);
    let tokens = Rng(5).tokens(100, run.vocab_size());
    save(&mut run, &tokens, "", &path);
    let chain = chain(&run, &tokens);
    let mut saving = run.model.begin_save(&mut run.kv, &chain, "").unwrap();
    run.kv.remove(saving.seq());
    assert_eq!(saving.next_piece(&run.kv), Err(Error::BlocksTaken));
    saving.end(&mut run.kv);
    let state = StateReader::open(&path).unwrap().state().clone();
    let mut loading = run.model.begin_load(&mut run.kv, &state).unwrap();
    run.kv.remove(loading.seq());
    assert_eq!(loading.put(&mut run.kv, &[1]), Err(Error::BlocksTaken));
    assert_eq!(loading.finish(&mut run.kv), Err(Error::BlocksTaken));
    run.kv.check().unwrap();
    // A reader that has not read all does not know whether it is right.
    let unread = StateReader::open(&path).unwrap().finish();
    assert!(matches!(unread, Err(Error::State { .. })), "{unread:?}");
}
