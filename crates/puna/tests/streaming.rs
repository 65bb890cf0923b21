//! Requests to a mixture whose experts are read as they are needed: they say what they say when all are in memory, and
//! a file that changes ends them and no others.

#![allow(clippy::unwrap_used)]

mod support;

use puna::{Engine, EngineOptions, Error, FinishReason, LoadOptions};
use puna_model::Error as ModelError;
use std::fs;
use std::path::Path;
use support::{Answer, answer, check_empty, engine, greedy, model, options, prompt, request, seeded};

fn with(path: &Path, expert_memory: u64) -> Result<Engine, Error> {
    let plain = options(2, 64);
    let load = LoadOptions { expert_memory: Some(expert_memory), ..plain.load };
    Engine::load(path, &EngineOptions { load, ..plain }, &mut |_, _| {})
}

/// Bytes of two experts.
fn two(path: &Path) -> u64 {
    match with(path, 1) {
        Err(Error::Model(ModelError::ExpertMemory { bytes: 1, needed })) => needed,
        other => panic!("{:?}", other.map(drop)),
    }
}

/// With every number of experts in memory, from two to all but one.
#[test]
fn four_requests_at_a_time() {
    for name in ["mixtral-moe", "olmoe-small"] {
        let path = model(name);
        let asked = |i: u32| request(prompt(20 + 9 * i as usize, i), &seeded(u64::from(i)), 12);
        let mut resident = engine(name, 2, 512);
        let expected: Vec<Answer> = (0..4).map(|i| answer(&mut resident, asked(i)).0).collect();
        let n = with(&path, two(&path)).unwrap().expert_stats().unwrap().experts as u64;
        for slots in 2..n {
            let memory = two(&path) / 2 * slots;
            let mut engine = with(&path, memory).unwrap();
            for round in 0..6 {
                let ids: Vec<_> = (0..4).map(|i| engine.add(asked(i)).unwrap()).collect();
                let mut tokens = vec![Vec::new(); 4];
                while !engine.is_idle() {
                    for event in engine.step().unwrap() {
                        tokens[ids.iter().position(|id| *id == event.id).unwrap()].extend(event.token);
                    }
                }
                for (got, expected) in tokens.iter().zip(&expected) {
                    assert_eq!(got, &expected.tokens, "{name}, {memory} bytes, round {round}");
                }
            }
            let stats = engine.expert_stats().unwrap();
            assert_eq!(stats.slots as u64, slots);
            assert!(stats.evictions > 0 && stats.hits > 0 && stats.bytes_read > memory, "{stats:?}");
            assert!(engine.check().is_ok());
        }
    }
}

#[test]
fn a_file_that_is_cut_ends_requests_and_not_the_engine() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    fs::copy(model("mixtral-moe"), &path).unwrap();
    let whole = fs::read(&path).unwrap();
    let mut engine = with(&path, two(&path)).unwrap();
    let asked = |i: u32| request(prompt(30, i), &greedy(), 40);
    let (expected, _) = answer(&mut engine, asked(1));
    let ids = [engine.add(asked(2)).unwrap(), engine.add(asked(3)).unwrap()];
    (0..4).for_each(|_| drop(engine.step().unwrap().to_vec()));
    fs::File::options().write(true).open(&path).unwrap().set_len(1000).unwrap();
    let mut ended = Vec::new();
    while !engine.is_idle() {
        for event in engine.step().unwrap() {
            let Some(finish) = &event.finish else { continue };
            let is_changed = |e: &Error| matches!(e, Error::Model(ModelError::Changed { .. }));
            assert!(matches!(&finish.reason, FinishReason::Error(e) if is_changed(e)), "{:?}", finish.reason);
            ended.push(event.id);
        }
    }
    ended.sort_unstable();
    assert_eq!(ended, ids);
    check_empty(&engine);
    // The next one fails alike, and works when the file is right again.
    let what = engine.generate(asked(1), |_| true).unwrap_err().to_string();
    assert!(what.ends_with(&format!("expected {} bytes, found 1000", whole.len())), "{what}");
    check_empty(&engine);
    fs::write(&path, &whole).unwrap();
    assert_eq!(answer(&mut engine, asked(1)).0, expected);
    check_empty(&engine);
}

/// A vector of texts that were not all computed is none.
#[test]
fn a_file_that_is_cut_ends_training() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let whole = fs::read(model("mixtral-moe")).unwrap();
    fs::write(&path, &whole).unwrap();
    let mut engine = with(&path, two(&path)).unwrap();
    let pairs = [(prompt(30, 1), prompt(20, 2)), (prompt(9, 3), prompt(12, 4))];
    let expected = engine.train_control_vector(&pairs, 1..=1, |_| {}).unwrap();
    fs::write(&path, &whole[..1000]).unwrap();
    let cut = engine.train_control_vector(&pairs, 1..=1, |_| {});
    assert!(matches!(cut, Err(Error::Model(ModelError::Changed { .. }))), "{cut:?}");
    check_empty(&engine);
    fs::write(&path, &whole).unwrap();
    assert_eq!(engine.train_control_vector(&pairs, 1..=1, |_| {}), Ok(expected));
}
