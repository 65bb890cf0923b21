//! What a request says depends on the request alone: not on neighbours, chunks, threads or what the cache held.

#![allow(clippy::unwrap_used)]

mod support;

use puna::sampler::{LogitBias, PartialSampling, SampleError};
use puna::{Engine, EngineOptions, Error, FinishReason, LoadOptions, Request};
use std::collections::HashMap;
use support::{Answer, answer, check_empty, engine, greedy, mixed, model, prompt, request, seeded};

#[test]
fn alone_or_in_company() {
    for name in ["llama-gqa", "mistral-swa", "mixtral-moe"] {
        let mut alone = engine(name, 1, 512);
        let expected: Vec<Answer> = mixed().into_iter().map(|r| answer(&mut alone, r).0).collect();
        for (threads, chunk) in [(2, 512), (3, 7), (1, 1)] {
            let mut together = engine(name, threads, chunk);
            let mut answers = HashMap::new();
            let ids: Vec<_> = mixed().into_iter().map(|r| together.add(r).unwrap()).collect();
            while !together.is_idle() {
                for event in together.step().unwrap() {
                    answers.entry(event.id).or_insert_with(Answer::default).take(event);
                }
            }
            for (id, expected) in ids.iter().zip(&expected) {
                assert_eq!(&answers[id], expected, "{name} with {threads} threads, chunks of {chunk}");
            }
        }
    }
}

#[test]
fn the_seed_is_told_and_repeats_the_text() {
    let mut engine = engine("llama-gqa", 2, 512);
    let wishes = PartialSampling { ignore_eos: Some(true), ..PartialSampling::default() };
    let (a, first) = answer(&mut engine, request(prompt(5, 0), &wishes, 30));
    let (b, second) = answer(&mut engine, request(prompt(5, 0), &seeded(first.stats.seed), 30));
    assert_eq!(a, b);
    assert_eq!(first.stats.seed, second.stats.seed);
    let (c, _) = answer(&mut engine, request(prompt(5, 0), &seeded(first.stats.seed + 1), 30));
    assert_ne!(a, c);
}

#[test]
fn limits() {
    let load = LoadOptions { threads: 1, ..LoadOptions::default() };
    let options = EngineOptions { load, ctx: Some(64), ..EngineOptions::default() };
    let mut engine = Engine::load(model("llama-gqa"), &options, &mut |_, _| {}).unwrap();
    for n in [64, 65, 1000] {
        let error = engine.add(request(prompt(n, 0), &greedy(), 5)).unwrap_err();
        assert_eq!(error, Error::ContextExceeded { prompt: n, ctx: 64 });
    }
    let (a, finish) = answer(&mut engine, request(prompt(63, 0), &greedy(), 5));
    assert_eq!((a.tokens.len(), finish.reason), (1, FinishReason::Length));
    let (a, finish) = answer(&mut engine, request(prompt(10, 0), &greedy(), usize::MAX));
    assert_eq!((a.tokens.len(), finish.reason), (54, FinishReason::Length));
    let (a, finish) = answer(&mut engine, request(prompt(10, 0), &greedy(), 0));
    assert_eq!((a.tokens.len(), finish.reason), (0, FinishReason::Length));
    assert_eq!(engine.add(request(vec![], &greedy(), 1)).unwrap_err(), Error::EmptyPrompt);
    let error = engine.add(request(vec![5, 512], &greedy(), 1)).unwrap_err();
    assert_eq!(error, Error::TokenId { id: 512, vocab: 512 });
    let bad = PartialSampling { temperature: Some(f32::NAN), ..PartialSampling::default() };
    let error = engine.add(request(prompt(3, 0), &bad, 1)).unwrap_err();
    assert!(matches!(error, Error::Sample(SampleError::Param { .. })), "{error}");
    let (a, _) = answer(&mut engine, request(prompt(10, 0), &greedy(), 5));
    assert_eq!(a.tokens.len(), 5, "after all these the engine still works");
}

/// A bias that leaves one token makes the model say it for ever.
fn always(token: u32) -> PartialSampling {
    let bias = (0..512).filter(|&id| id != token).map(|id| (id, f32::NEG_INFINITY)).collect();
    PartialSampling { logit_bias: Some(LogitBias(bias)), ..greedy() }
}

#[test]
fn end_tokens_end() {
    let mut engine = engine("llama-gqa", 1, 512);
    let eos = engine.tokenizer().unwrap().eos_id().unwrap();
    let wishes = PartialSampling { ignore_eos: None, ..always(eos) };
    let (a, finish) = answer(&mut engine, request(prompt(4, 0), &wishes, 9));
    assert_eq!((a.tokens, a.text.as_str(), finish.reason), (vec![eos], "", FinishReason::Stop));
}

#[test]
fn stop_strings_end_and_are_not_shown() {
    let mut engine = engine("llama-gqa", 1, 512);
    let (whole, _) = answer(&mut engine, request(prompt(6, 3), &greedy(), 24));
    let chars: Vec<char> = whole.text.chars().collect();
    let stop: String = chars[chars.len() / 2..chars.len() / 2 + 3].iter().collect();
    let mut r = request(prompt(6, 3), &greedy(), 24);
    r.stop = vec!["never said".into(), stop.clone()];
    let (a, finish) = answer(&mut engine, r);
    assert_eq!(finish.reason, FinishReason::Stop);
    assert_eq!(a.text, whole.text[..whole.text.find(&stop).unwrap()]);
    assert!(a.tokens.len() < whole.tokens.len());
}

#[test]
fn cancelled_requests_leave_the_others_alone() {
    let mut engine = engine("llama-gqa", 2, 16);
    let requests = mixed();
    let expected = answer(&mut engine, requests[8].clone()).0;
    let doomed = engine.add(requests[7].clone()).unwrap();
    let kept = engine.add(requests[8].clone()).unwrap();
    let mut got = Answer::default();
    for step in 0.. {
        if step == 3 {
            let event = engine.cancel(doomed).remove(0);
            assert_eq!(event.finish.unwrap().reason, FinishReason::Cancelled);
            assert!(engine.cancel(doomed).is_empty());
        }
        engine.step().unwrap().iter().filter(|e| e.id == kept).for_each(|e| got.take(e));
        if engine.is_idle() {
            break;
        }
    }
    assert_eq!(got, expected);
    let mut steps = 0;
    let finish = engine.generate(requests[8].clone(), |_| {
        steps += 1;
        steps < 6
    });
    assert_eq!(finish.unwrap().reason, FinishReason::Cancelled);
    check_empty(&engine);
}

#[test]
fn parallel_answers() {
    for name in ["llama-gqa", "mistral-swa"] {
        let mut alone = engine(name, 1, 512);
        let mut together = engine(name, 2, 20);
        for (len, max_tokens) in [(1, 9), (31, 40), (32, 3), (50, 30), (7, 0)] {
            let mut one = request(prompt(len, 7), &seeded(40), max_tokens);
            one.logprobs = Some(3);
            let several = Request { n: 5, ..one.clone() };
            let mut got = vec![Answer::default(); 5];
            let first = together.generate(several, |event| {
                got[event.sample].take(event);
                true
            });
            assert_eq!(first.unwrap().stats.seed, 40);
            check_empty(&together);
            for (i, got) in got.iter().enumerate() {
                one.sampling.seed = Some(40 + i as u64);
                let (expected, _) = answer(&mut alone, one.clone());
                assert_eq!(got, &expected, "{name}, {len} tokens, answer {i}");
                assert_eq!(got.logprobs.len(), max_tokens);
            }
        }
        // The prompt is computed once.
        let id = together.add(Request { n: 4, ..request(prompt(60, 1), &seeded(1), 2) }).unwrap();
        let mut steps = 0;
        while together.step().unwrap().is_empty() {
            steps += 1;
        }
        assert_eq!((steps, together.status().running), (2, 4));
        assert_eq!(together.cancel(id).len(), 4);
        check_empty(&together);
    }
}

#[test]
fn how_many_answers() {
    let mut engine = engine("llama-gqa", 1, 512);
    for n in [0, 129, usize::MAX] {
        let error = engine.add(Request { n, ..request(prompt(3, 0), &seeded(1), 2) }).unwrap_err();
        assert_eq!(error, Error::Samples { n, most: 128 });
    }
    let id = engine.add(Request { n: 128, ..request(prompt(3, 0), &seeded(1), 2) }).unwrap();
    // Those that have not begun end as well.
    assert_eq!(engine.cancel(id).iter().map(|event| event.sample).collect::<Vec<_>>(), (0..128).collect::<Vec<_>>());
    check_empty(&engine);
}

#[test]
fn logprobs_are_of_the_model() {
    let mut engine = engine("llama-gqa", 1, 512);
    let mut r = request(prompt(9, 1), &greedy(), 6);
    assert!(answer(&mut engine, r.clone()).0.logprobs.is_empty());
    r.logprobs = Some(4);
    let (a, _) = answer(&mut engine, r);
    for (token, l) in a.tokens.iter().zip(&a.logprobs) {
        assert_eq!((l.top.len(), l.top[0].id, l.top[0].logprob), (4, *token, l.logprob));
        assert!(l.top.is_sorted_by(|a, b| a.logprob >= b.logprob) && l.logprob < 0.0);
    }
    assert_eq!(a.logprobs.len(), 6);
}
