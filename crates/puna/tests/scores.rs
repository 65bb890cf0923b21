//! Scores of a prompt are those that its tokens get when they are generated, however the prompt is computed.

#![allow(clippy::unwrap_used)]

mod support;

use proptest::prelude::*;
use puna::{Engine, Event, FinishReason, Logprobs, Request};
use support::{answer, check_empty, engine, greedy, prompt, request, seeded};

const TOP: usize = 3;

/// Runs requests together; the events of each.
fn run(engine: &mut Engine, requests: Vec<Request>) -> Vec<Vec<Event>> {
    let ids: Vec<_> = requests.into_iter().map(|request| engine.add(request).unwrap()).collect();
    let mut events = vec![Vec::new(); ids.len()];
    while !engine.is_idle() {
        for event in engine.step().unwrap() {
            events[ids.iter().position(|id| *id == event.id).unwrap()].push(event.clone());
        }
    }
    check_empty(engine);
    events
}

fn scores(events: &[Event]) -> Vec<Option<Logprobs>> {
    let told: Vec<&Event> = events.iter().filter(|event| !event.prompt_logprobs.is_empty()).collect();
    assert_eq!(told.len(), 1);
    told[0].prompt_logprobs.clone()
}

/// What was generated after a prompt, scored, and how it was scored then.
fn generated(engine: &mut Engine) -> (Vec<u32>, Vec<Logprobs>) {
    let begin = prompt(20, 1);
    let (said, _) = answer(engine, Request { logprobs: Some(TOP), ..request(begin.clone(), &greedy(), 40) });
    ([begin, said.tokens].concat(), said.logprobs)
}

#[test]
fn of_a_prompt_as_of_an_answer() {
    for name in ["llama-gqa", "mistral-swa", "mixtral-moe"] {
        let mut whole = engine(name, 1, 512);
        let (tokens, expected) = generated(&mut whole);
        for chunk in [1, 7, 32, 512] {
            let mut engine = engine(name, 2, chunk);
            let scored = Request { prompt_logprobs: Some(TOP), ..request(tokens.clone(), &greedy(), 0) };
            // Twice: nothing is taken from the cache.
            for _ in 0..2 {
                let events = run(&mut engine, vec![scored.clone()]);
                let all = scores(&events[0]);
                assert_eq!(all.len(), tokens.len());
                assert_eq!(all[0], None);
                let got: Vec<Logprobs> = all[20..].iter().flatten().cloned().collect();
                assert_eq!(got, expected, "{name}, chunks of {chunk}");
                let finish = events[0].last().unwrap().finish.clone().unwrap();
                assert_eq!((finish.reason, finish.stats.generated_tokens), (FinishReason::Length, 0));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn beside_others(lens in prop::collection::vec((1usize..70, 0usize..12, any::<bool>(), 1usize..3), 1..8)) {
        let mut alone = engine("llama-gqa", 1, 512);
        let mut crowd = engine("llama-gqa", 1, 16);
        let make = |&(len, n, scored, samples): &(usize, usize, bool, usize)| Request {
            prompt_logprobs: scored.then_some(TOP),
            logprobs: Some(1),
            n: samples,
            ..request(prompt(len, 1), &seeded(len as u64), n)
        };
        let requests: Vec<Request> = lens.iter().map(make).collect();
        let said = |events: &[Event]| -> Vec<_> {
            let mut all: Vec<_> = events.iter().map(|e| (e.sample, e.token, e.logprobs.clone(), e.prompt_logprobs.clone())).collect();
            all.sort_by_key(|(sample, ..)| *sample);
            all
        };
        let together = run(&mut crowd, requests.clone());
        for (request, events) in requests.into_iter().zip(together) {
            let expected = run(&mut alone, vec![request]);
            prop_assert_eq!(said(&events), said(&expected[0]));
        }
    }
}

#[test]
fn tokens_that_end_an_answer() {
    let mut engine = engine("llama-gqa", 1, 512);
    let (said, _) = answer(&mut engine, request(prompt(9, 2), &greedy(), 12));
    let stop = said.tokens[5];
    let first = said.tokens.iter().position(|&id| id == stop).unwrap();
    let ends = |min_tokens: u32| {
        let mut request = request(prompt(9, 2), &greedy(), 12);
        request.stop_token_ids = vec![stop];
        request.sampling.min_tokens = min_tokens;
        request
    };
    let (short, finish) = answer(&mut engine, ends(0));
    assert_eq!(short.tokens, said.tokens[..=first]);
    assert_eq!(finish.reason, FinishReason::Stop);
    // Its text is not the answer's.
    let (without, _) = answer(&mut engine, request(prompt(9, 2), &greedy(), first));
    assert_eq!(short.text.trim_end_matches('\u{fffd}'), without.text.trim_end_matches('\u{fffd}'));
    let (long, _) = answer(&mut engine, ends(first as u32 + 1));
    assert!(long.tokens.len() > first + 1);
    let vocab = engine.config().vocab_size as u32;
    let bad = Request { stop_token_ids: vec![vocab], ..request(prompt(9, 2), &greedy(), 1) };
    assert!(matches!(engine.add(bad), Err(puna::Error::TokenId { .. })));
}
