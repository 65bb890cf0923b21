//! Conversations that go on in another process.

#![allow(clippy::unwrap_used)]

mod support;

use puna::{Error, Prompt, StateFolder};
use support::{answer, check_empty, engine, prompt, request, seeded};

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
        assert_eq!((state.tokens.unwrap(), state.positions, &*state.note), (so_far, 96, "note"));
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
