//! Drafts beside all that a request may ask for, in one batch: steering, residuals, experts, grammars, stop strings,
//! windows. Each request says, shows and counts what it does alone and without drafts.

#![allow(clippy::unwrap_used)]

#[path = "../../model/tests/gguf_builder/mod.rs"]
mod gguf_builder;
mod made;
mod support;

use made::maker::Spec;
use made::oracle::Oracle;
use made::{Rng, made};
use puna::draft::AnswerId;
use puna::{Engine, EngineOptions, Finish, Positions, Request};
use serde_json::json;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use support::inside::{Residuals, Rows, finish, steering};
use support::{Answer, answer, check_empty, greedy, model, options, prompt, request, seeded};

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Plain,
    Steering,
    Grammar,
    Stop,
    /// Of residuals, the last of the prompt or all of the prompt.
    Prompt(Positions),
    /// Of all rows: no drafts.
    All,
    /// No drafts.
    Experts,
    /// No drafts, as it wishes.
    Refused,
}

const KINDS: [Kind; 9] = [
    Kind::Plain,
    Kind::Steering,
    Kind::Grammar,
    Kind::Stop,
    Kind::Prompt(Positions::Last),
    Kind::Prompt(Positions::Prompt),
    Kind::All,
    Kind::Experts,
    Kind::Refused,
];

fn open(name: &str, options: &EngineOptions) -> Engine {
    let windows = Spec { n_layers: 3, window: Some(20), windowed: vec![true, false, true], ..Spec::default() };
    match name {
        "some windows" => made(&windows, options).unwrap(),
        _ => Engine::load(model(name), options, &mut |_, _| {}).unwrap(),
    }
}

/// A request, and where its residuals go. Grammars are of an engine.
fn asked(engine: &Engine, kind: Kind, i: usize) -> (Request, Residuals) {
    let vocab = engine.config().vocab_size as u32;
    let ids: Vec<u32> = prompt(5 + 13 * i % 60, i as u32).into_iter().map(|id| id % vocab).collect();
    let residuals = Residuals::default();
    let layers = 0..engine.config().n_layers;
    let wishes = if i.is_multiple_of(3) { seeded(i as u64) } else { greedy() };
    let mut r = Request { logprobs: Some(2), ..request(ids, &wishes, 40 + i % 30) };
    match kind {
        Kind::Plain | Kind::Stop => {}
        Kind::Steering => r.steering = steering(engine, 1, [1.5, -1.0][i % 2]),
        Kind::Grammar => {
            let schema = json!({ "type": "array", "items": { "enum": ["one", "two", 3] }, "minItems": 3 + i % 3 });
            r.grammar = Some(engine.grammars().unwrap().json_schema(&schema).unwrap());
            r.steering = steering(engine, 1, 0.5);
        }
        Kind::Prompt(positions) => {
            r.capture = residuals.capture(layers, positions);
            r.steering = steering(engine, 1, 1.0);
        }
        Kind::All => {
            r.capture = residuals.capture(layers, Positions::All);
            r.steering = steering(engine, 1, 1.0);
        }
        Kind::Experts => r.count_experts = true,
        Kind::Refused => r.draft = false,
    }
    (r, residuals)
}

fn bits(rows: Rows) -> Vec<((usize, usize, usize), Vec<u32>)> {
    rows.into_iter().map(|(key, row)| (key, row.into_iter().map(f32::to_bits).collect())).collect()
}

#[test]
fn drafts_beside_all_that_can_be_asked_for() {
    for name in ["llama-gqa", "mistral-swa", "mixtral-moe", "some windows"] {
        let mut plain = open(name, &options(1, 512));
        let mut crowd = open(name, &options(2, 24));
        let has_text = plain.tokenizer().is_ok();
        let kinds = KINDS.into_iter().filter(|kind| has_text || ![Kind::Grammar, Kind::Stop].contains(kind));
        let wishes: Vec<Kind> = (0..3).flat_map(|_| kinds.clone()).collect();
        let known = Arc::new(Mutex::new(HashMap::new()));
        crowd.set_drafter(Box::new(Oracle { answers: known.clone(), rng: Rng(3) }), 5, false);
        let mut expected: Vec<(Answer, Finish, Rows)> = Vec::new();
        let mut requests = Vec::new();
        for (i, kind) in wishes.iter().enumerate() {
            let (mut r, rows) = asked(&plain, *kind, i);
            if *kind == Kind::Stop {
                // Something that it says, after a while.
                let text = answer(&mut plain, r.clone()).0.text;
                r.stop = vec![text.chars().skip(text.chars().count() / 2).take(3).collect()];
            }
            let stop = r.stop.clone();
            let (said, finish) = answer(&mut plain, r);
            assert!(*kind != Kind::Stop || said.reason == "stop", "{name}, request {i}");
            let (mut r, shown) = asked(&crowd, *kind, i);
            r.stop = stop;
            requests.push((r, shown));
            expected.push((said, finish, rows.take()));
        }
        let mut ids = Vec::new();
        for ((r, _), (said, ..)) in requests.iter().zip(&expected) {
            let id = crowd.add(r.clone()).unwrap();
            known.lock().unwrap().insert(AnswerId { id, sample: 0 }, said.tokens.clone());
            ids.push(id);
        }
        let got = finish(&mut crowd, &ids);
        for (i, (kind, (said, finish))) in wishes.iter().zip(&got).enumerate() {
            let what = format!("{name}, request {i}, {kind:?}");
            let (alone, without, rows) = &expected[i];
            assert_eq!(said, alone, "{what}");
            assert_eq!(finish.experts, without.experts, "{what}");
            let shown = requests[i].1.take();
            assert_eq!(rows.is_empty(), !matches!(kind, Kind::Prompt(_) | Kind::All), "{what}");
            assert_eq!(bits(shown), bits(rows.clone()), "{what}");
        }
        for kind in kinds {
            let of_kind = wishes.iter().zip(&got).filter(|(of, _)| **of == kind).map(|(_, (_, finish))| finish.stats);
            let drafted: usize = of_kind.clone().map(|stats| stats.drafted_tokens).sum();
            let accepted: usize = of_kind.map(|stats| stats.accepted_tokens).sum();
            let is_plain = [Kind::All, Kind::Refused].contains(&kind) || kind == Kind::Experts && name == "mixtral-moe";
            assert_eq!(drafted == 0, is_plain, "{name}, {kind:?}: {accepted} of {drafted}");
            assert!(is_plain || (accepted > 0 && accepted < drafted), "{name}, {kind:?}: {accepted} of {drafted}");
        }
        check_empty(&crowd);
    }
}
