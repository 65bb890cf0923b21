//! Conversations that go on in another process, and prompts that are saved and loaded beside others.

#![allow(clippy::unwrap_used)]

mod support;

use puna::{Engine, EngineOptions, Error, KvType, Prompt, Saving, StateFolder, StateReader, StateWriter};
use std::fs;
use std::path::Path;
use support::{answer, check_empty, engine, greedy, model, options, prompt, request, seeded};

#[test]
fn a_conversation_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let folder = StateFolder::open(dir.path().join("states")).unwrap();
    for name in ["llama-gqa", "mistral-swa", "mixtral-moe"] {
        let path = folder.file(name).unwrap();
        let mut first = engine(name, 2, 64);
        let asked = prompt(70, 1);
        let (said, _) = answer(&mut first, request(asked.clone(), &seeded(4), 40));
        let so_far = [&asked[..], &said.tokens].concat();
        assert_eq!(first.save_state(&Prompt::from(so_far.clone()), "note", &path).unwrap(), 96);
        let more = [&so_far[..], &prompt(9, 2)].concat();
        let (expected, _) = answer(&mut first, request(more.clone(), &seeded(5), 20));
        let mut second = engine(name, 1, 512);
        let state = second.load_state(&path).unwrap();
        assert_eq!((state.tokens().unwrap(), state.positions(), state.note()), (so_far, 96, "note"));
        let (got, finish) = answer(&mut second, request(more, &seeded(5), 20));
        assert_eq!(got, expected, "{name}");
        assert_eq!(finish.stats.cached_tokens, 96);
        check_empty(&second);
        // Not into another model.
        let other = if name == "llama-gqa" { "mixtral-moe" } else { "llama-gqa" };
        let refused = engine(other, 1, 512).load_state(&path);
        assert!(matches!(refused, Err(Error::Model(puna_model::Error::State { .. }))), "{refused:?}");
    }
    assert_eq!(folder.names().unwrap(), ["llama-gqa", "mistral-swa", "mixtral-moe"]);
    assert_eq!((folder.remove("mistral-swa").unwrap(), folder.remove("mistral-swa").unwrap()), (true, false));
    assert_eq!(folder.names().unwrap(), ["llama-gqa", "mixtral-moe"]);
}

#[test]
fn names_stay_in_their_folder() {
    let dir = tempfile::tempdir().unwrap();
    let folder = StateFolder::open(dir.path()).unwrap();
    for name in ["", ".", "..", ".x", "a/b", "a\\b", "é", "a b", "a\0", &"x".repeat(65)] {
        assert!(matches!(folder.file(name), Err(Error::StateName { .. })), "{name}");
    }
    for name in ["a", "A-1_b.c", &"x".repeat(64)] {
        assert_eq!(folder.file(name).unwrap().parent(), Some(dir.path()));
    }
}

/// An engine whose cache holds so many blocks.
fn small(name: &str, blocks: usize) -> Engine {
    let block = engine(name, 1, 64).model_mut().kv_cache(KvType::F16).block_bytes();
    let options = EngineOptions { kv_bytes: Some(blocks * block), ..options(1, 64) };
    Engine::load(model(name), &options, &mut |_, _| {}).unwrap()
}

/// Computes a prompt, so that the cache has it.
fn compute(engine: &mut Engine, prompt: &[u32]) {
    answer(engine, request(prompt.to_vec(), &greedy(), 0));
}

/// What the cache has of a prompt.
fn cached(engine: &mut Engine, prompt: &[u32]) -> usize {
    answer(engine, request(prompt.to_vec(), &greedy(), 1)).1.stats.cached_tokens
}

fn write(engine: &mut Engine, saving: &mut Saving, path: &Path, mut between: impl FnMut(&mut Engine)) -> usize {
    let mut writer = StateWriter::create(path).unwrap();
    let mut pieces = 0;
    while let Some(piece) = engine.next_piece(saving).unwrap() {
        writer.write(&piece).unwrap();
        between(engine);
        engine.check().unwrap();
        pieces += 1;
    }
    writer.finish().unwrap();
    pieces
}

fn is_taken<T: std::fmt::Debug>(result: Result<T, Error>) -> bool {
    matches!(result, Err(Error::Model(puna_model::Error::BlocksTaken)))
}

#[test]
fn pieces_are_the_whole_file_whatever_is_computed_between() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["llama-gqa", "mistral-swa"] {
        // A note of more than a piece, so that blocks are not in the first one.
        let note = "x".repeat(5 << 20);
        let (whole, pieces) = (dir.path().join("whole"), dir.path().join("pieces"));
        let mut engine = small(name, 8);
        let kept = prompt(96, 1);
        compute(&mut engine, &kept);
        assert_eq!(engine.save_state(&Prompt::from(kept.clone()), &note, &whole).unwrap(), 96);
        let mut saving = engine.begin_save(&Prompt::from(kept.clone()), &note).unwrap();
        assert_eq!((saving.positions(), saving.bytes()), (96, fs::metadata(&whole).unwrap().len()));
        assert_eq!(engine.state_bytes(&Prompt::from(kept.clone()), &note).unwrap(), saving.bytes());
        // Others take all that nobody holds, again and again.
        let mut other = 10;
        let mut others = |engine: &mut Engine| {
            for _ in 0..4 {
                other += 1;
                compute(engine, &prompt(100, other));
            }
        };
        others(&mut engine);
        assert!(write(&mut engine, &mut saving, &pieces, others) >= 2);
        assert!(engine.status().kv_held > 0);
        engine.end_save(saving);
        assert_eq!(fs::read(&pieces).unwrap(), fs::read(&whole).unwrap(), "{name}");
        check_empty(&engine);
    }
}

#[test]
fn requests_go_first() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    let long = request(prompt(200, 9), &seeded(1), 20);
    let (expected, _) = answer(&mut engine("llama-gqa", 1, 64), long.clone());
    let mut engine = small("llama-gqa", 8);
    let kept = prompt(96, 1);
    compute(&mut engine, &kept);
    engine.save_state(&Prompt::from(kept.clone()), "", &path).unwrap();
    let mut saving = engine.begin_save(&Prompt::from(kept.clone()), "").unwrap();
    // It needs seven of the eight blocks.
    assert_eq!(answer(&mut engine, long.clone()).0, expected);
    assert!(is_taken(engine.next_piece(&mut saving)));
    engine.end_save(saving);
    check_empty(&engine);
    let state = engine.load_state(&path).unwrap();
    for gives_up in [true, false] {
        let mut loading = engine.begin_load(&state).unwrap();
        assert_eq!(answer(&mut engine, long.clone()).0, expected);
        assert!(is_taken(engine.put_piece(&mut loading, &[0; 100])));
        if gives_up {
            engine.abandon_load(loading);
        } else {
            assert!(is_taken(engine.finish_load(loading)));
        }
        check_empty(&engine);
    }
    // And no state takes what running requests have.
    let id = engine.add(long).unwrap();
    for _ in 0..8 {
        engine.step().unwrap();
    }
    let held = engine.status().kv_held;
    assert!(matches!(engine.begin_load(&state), Err(Error::Model(puna_model::Error::OutOfMemory { .. }))));
    assert_eq!(engine.status().kv_held, held);
    engine.cancel(id);
    check_empty(&engine);
}

#[test]
fn a_state_is_found_when_all_of_it_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    for name in ["llama-gqa", "mistral-swa"] {
        let mut first = engine(name, 1, 64);
        let kept = prompt(160, 1);
        compute(&mut first, &kept);
        assert_eq!(first.save_state(&Prompt::from(kept.clone()), "", &path).unwrap(), 160);
        let longer = [&kept[..], &prompt(9, 2)].concat();
        let (expected, _) = answer(&mut first, request(longer.clone(), &seeded(5), 20));
        let mut second = engine(name, 2, 64);
        let mut reader = StateReader::open(&path).unwrap();
        reader.check().unwrap();
        let state = reader.state().clone();
        let (asks, too_short) = (Prompt::from(longer.clone()), Prompt::from(kept[..32].to_vec()));
        assert!(second.lacks(&asks, &state).unwrap());
        assert!(!second.lacks(&too_short, &state).unwrap(), "its last token is computed in any case");
        assert!(!second.lacks(&Prompt::from(prompt(170, 3)), &state).unwrap(), "nothing is common");
        let mut loading = second.begin_load(&state).unwrap();
        while let Some(piece) = reader.next_piece().unwrap() {
            for part in piece.chunks(1000) {
                second.put_piece(&mut loading, part).unwrap();
                second.check().unwrap();
            }
        }
        assert_eq!(cached(&mut second, &[3, 4, 5]), 0);
        assert!(second.lacks(&asks, &state).unwrap(), "not before its end");
        assert!(second.put_piece(&mut loading, &[0]).is_err(), "there is no more");
        reader.finish().unwrap();
        second.finish_load(loading).unwrap();
        assert!(!second.lacks(&asks, &state).unwrap());
        let (got, finish) = answer(&mut second, request(longer.clone(), &seeded(5), 20));
        assert_eq!((got, finish.stats.cached_tokens), (expected, 160), "{name}");
        check_empty(&second);
        // One that is not whole is not found.
        let mut third = engine(name, 1, 64);
        let mut loading = third.begin_load(&state).unwrap();
        third.put_piece(&mut loading, &[0; 1000]).unwrap();
        let unfinished = third.finish_load(loading);
        assert!(matches!(unfinished, Err(Error::Model(puna_model::Error::State { .. }))), "{unfinished:?}");
        assert_eq!(cached(&mut third, &longer), 0);
        check_empty(&third);
    }
}

#[test]
fn what_is_not_right_is_refused_and_the_cache_is_as_before() {
    let dir = tempfile::tempdir().unwrap();
    let (good, path) = (dir.path().join("good"), dir.path().join("state"));
    let mut first = engine("llama-gqa", 1, 64);
    let kept = prompt(40, 1);
    compute(&mut first, &kept);
    first.save_state(&Prompt::from(kept.clone()), "note", &good).unwrap();
    let bytes = fs::read(&good).unwrap();
    // A cache that is full of what others have computed.
    let mut engine = small("llama-gqa", 3);
    let other = prompt(70, 2);
    compute(&mut engine, &other);
    let before = engine.status();
    let mut refuse = |damaged: &[u8], what: &str| {
        fs::write(&path, damaged).unwrap();
        let refused = engine.load_state(&path);
        assert!(matches!(refused, Err(Error::Model(puna_model::Error::State { .. }))), "{what}: {refused:?}");
        assert_eq!(engine.status(), before, "{what}");
        engine.check().unwrap();
    };
    let places = (0..400).chain((400..bytes.len()).step_by(251)).chain(bytes.len() - 40..bytes.len());
    for at in places {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x10;
        refuse(&damaged, &format!("byte {at}"));
    }
    for len in (0..100).chain((100..bytes.len()).step_by(997)) {
        refuse(&bytes[..len], &format!("{len} bytes"));
    }
    refuse(&[&bytes[..], &[0]].concat(), "a byte more");
    assert_eq!(cached(&mut engine, &other), 64);
    // It is noticed too where it happens while the file is read.
    fs::write(&path, &bytes).unwrap();
    let mut reader = StateReader::open(&path).unwrap();
    reader.check().unwrap();
    let mut damaged = bytes.clone();
    damaged[bytes.len() - 100] ^= 1;
    fs::write(&path, damaged).unwrap();
    while reader.next_piece().unwrap().is_some() {}
    assert!(matches!(reader.finish(), Err(puna_model::Error::State { .. })));
    // Of other models and kinds of cache.
    for (name, kv) in [("mixtral-moe", KvType::F16), ("llama-gqa", KvType::F32)] {
        let mut foreign = Engine::load(model(name), &EngineOptions { kv, ..options(1, 64) }, &mut |_, _| {}).unwrap();
        let refused = foreign.load_state(&good);
        assert!(matches!(refused, Err(Error::Model(puna_model::Error::State { .. }))), "{name}, {kv}: {refused:?}");
        assert_eq!(foreign.status().kv_cached, 0);
    }
}

#[test]
fn a_file_is_whole_or_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    let mut engine = engine("llama-gqa", 1, 64);
    let kept = prompt(70, 1);
    compute(&mut engine, &kept);
    let mut saving = engine.begin_save(&Prompt::from(kept.clone()), "").unwrap();
    let mut writer = StateWriter::create(&path).unwrap();
    writer.write(&engine.next_piece(&mut saving).unwrap().unwrap()).unwrap();
    drop(writer);
    engine.end_save(saving);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    check_empty(&engine);
    let too_long = engine.begin_save(&Prompt::from(kept), &"x".repeat((16 << 20) + 1));
    assert!(matches!(too_long, Err(Error::Model(puna_model::Error::StateNote { .. }))));
    check_empty(&engine);
}
