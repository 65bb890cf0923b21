//! What a request says depends on the request alone: not on neighbours, chunks, threads or what the cache held.

#![allow(clippy::unwrap_used)]

use puna::sampler::{LogitBias, PartialSampling, SampleError};
use puna::{Engine, EngineOptions, Error, Event, Finish, FinishReason, LoadOptions, Request};
use std::collections::HashMap;
use std::path::PathBuf;

fn model(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/models").join(name).join("model-f32.gguf")
}

fn options(threads: usize, chunk: usize) -> EngineOptions {
    let load = LoadOptions { threads, ..LoadOptions::default() };
    EngineOptions { load, chunk, ..EngineOptions::default() }
}

fn engine(name: &str, threads: usize, chunk: usize) -> Engine {
    Engine::load(model(name), &options(threads, chunk), &mut |_, _| {}).unwrap()
}

fn prompt(n: usize, seed: u32) -> Vec<u32> {
    (0..n as u32).map(|i| (i * 7919 + seed * 131 + 13) % 500 + 3).collect()
}

fn request(prompt: Vec<u32>, wishes: &PartialSampling, n: usize) -> Request {
    let mut request = Request::new(prompt, PartialSampling::resolve(wishes, &PartialSampling::default()));
    request.max_tokens = Some(n);
    request
}

fn seeded(seed: u64) -> PartialSampling {
    PartialSampling { seed: Some(seed), ignore_eos: Some(true), ..PartialSampling::default() }
}

fn greedy() -> PartialSampling {
    PartialSampling { temperature: Some(0.0), ignore_eos: Some(true), ..PartialSampling::default() }
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Answer {
    tokens: Vec<u32>,
    text: String,
    reason: String,
}

impl Answer {
    fn take(&mut self, event: &Event) {
        self.tokens.extend(event.token);
        self.text.push_str(&event.text);
        if let Some(finish) = &event.finish {
            self.reason = finish.reason.name().to_owned();
        }
    }
}

fn answer(engine: &mut Engine, request: Request) -> (Answer, Finish) {
    let mut answer = Answer::default();
    let finish = engine.generate(request, |event| {
        answer.take(event);
        true
    });
    (answer, finish.unwrap())
}

/// Requests of different lengths, samplings and limits.
fn mixed() -> Vec<Request> {
    (0..9)
        .map(|i| {
            let wishes = if i % 3 == 0 { greedy() } else { seeded(i as u64) };
            request(prompt(3 + 11 * i, i as u32), &wishes, 5 + 3 * i)
        })
        .collect()
}

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
fn a_kept_prefix_changes_nothing() {
    let mut fresh = engine("llama-gqa", 2, 512);
    let mut kept = engine("llama-gqa", 2, 512);
    let first = prompt(70, 1);
    answer(&mut kept, request(first.clone(), &seeded(4), 20));
    let mut second = first[..64].to_vec();
    second.extend(prompt(9, 2));
    let (a, cold) = answer(&mut fresh, request(second.clone(), &seeded(5), 20));
    let (b, warm) = answer(&mut kept, request(second.clone(), &seeded(5), 20));
    assert_eq!(a, b);
    assert_eq!((cold.stats.cached_tokens, warm.stats.cached_tokens), (0, 64));
    // The same prompt again: all but its last token is there.
    let (c, again) = answer(&mut kept, request(second.clone(), &seeded(5), 20));
    assert_eq!(a, c);
    assert_eq!(again.stats.cached_tokens, second.len() - 1);
}

#[test]
fn a_kept_prefix_whose_window_has_passed() {
    let mut fresh = engine("mistral-swa", 1, 512);
    let mut kept = engine("mistral-swa", 1, 512);
    let long = prompt(200, 1);
    answer(&mut kept, request(long.clone(), &greedy(), 4));
    let short = [&long[..40], &prompt(5, 9)[..]].concat();
    let (a, _) = answer(&mut fresh, request(short.clone(), &greedy(), 12));
    let (b, finish) = answer(&mut kept, request(short.clone(), &greedy(), 12));
    assert_eq!(a, b);
    assert_eq!(finish.stats.cached_tokens, 0, "the blocks that position 40 sees are gone");
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
            let event = engine.cancel(doomed).unwrap();
            assert_eq!(event.finish.unwrap().reason, FinishReason::Cancelled);
            assert!(engine.cancel(doomed).is_none());
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
}
