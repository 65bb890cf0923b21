//! What tests of the engine share: models, requests and answers.
#![allow(dead_code, clippy::unwrap_used)]

pub mod inside;
pub mod real;

use puna::sampler::PartialSampling;
use puna::{Engine, EngineOptions, Event, Finish, LoadOptions, Logprobs, Prompt, Request};
use std::path::PathBuf;

pub fn model(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/models").join(name).join("model-f32.gguf")
}

pub fn options(threads: usize, chunk: usize) -> EngineOptions {
    let load = LoadOptions { threads, ..LoadOptions::default() };
    EngineOptions { load, chunk, ..EngineOptions::default() }
}

pub fn engine(name: &str, threads: usize, chunk: usize) -> Engine {
    Engine::load(model(name), &options(threads, chunk), &mut |_, _| {}).unwrap()
}

pub fn prompt(n: usize, seed: u32) -> Vec<u32> {
    (0..n as u32).map(|i| (i * 7919 + seed * 131 + 13) % 500 + 3).collect()
}

pub fn request(prompt: impl Into<Prompt>, wishes: &PartialSampling, n: usize) -> Request {
    let mut request = Request::new(prompt, PartialSampling::resolve(wishes, &PartialSampling::default()));
    request.max_tokens = Some(n);
    request
}

pub fn seeded(seed: u64) -> PartialSampling {
    PartialSampling { seed: Some(seed), ignore_eos: Some(true), ..PartialSampling::default() }
}

pub fn greedy() -> PartialSampling {
    PartialSampling { temperature: Some(0.0), ignore_eos: Some(true), ..PartialSampling::default() }
}

/// What a request said. Log-probabilities are compared bit for bit.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    pub tokens: Vec<u32>,
    pub text: String,
    pub reason: String,
    pub logprobs: Vec<Logprobs>,
}

impl PartialEq for Answer {
    fn eq(&self, other: &Answer) -> bool {
        let bits = |a: &Answer| -> Vec<(u32, u64)> {
            let each = |l: &Logprobs| {
                let top: Vec<_> = l.top.iter().map(|t| (t.id, t.logprob.to_bits())).collect();
                [(u32::MAX, l.logprob.to_bits())].into_iter().chain(top)
            };
            a.logprobs.iter().flat_map(each).collect()
        };
        (&self.tokens, &self.text, &self.reason) == (&other.tokens, &other.text, &other.reason)
            && bits(self) == bits(other)
    }
}

impl Answer {
    pub fn take(&mut self, event: &Event) {
        self.tokens.extend(event.token);
        self.text.push_str(&event.text);
        self.logprobs.extend(event.logprobs.clone());
        if let Some(finish) = &event.finish {
            self.reason = finish.reason.name().to_owned();
        }
    }
}

pub fn answer(engine: &mut Engine, request: Request) -> (Answer, Finish) {
    let mut answer = Answer::default();
    let finish = engine.generate(request, |event| {
        answer.take(event);
        true
    });
    (answer, finish.unwrap())
}

/// Requests of different lengths, samplings and limits.
pub fn mixed() -> Vec<Request> {
    (0..9)
        .map(|i| {
            let wishes = if i % 3 == 0 { greedy() } else { seeded(i as u64) };
            request(prompt(3 + 11 * i, i as u32), &wishes, 5 + 3 * i)
        })
        .collect()
}

/// Nobody holds a block, and all counts agree.
#[track_caller]
pub fn check_empty(engine: &Engine) {
    assert!(engine.is_idle());
    engine.check().unwrap();
    let status = engine.status();
    assert_eq!((status.running, status.waiting, status.kv_held), (0, 0, 0));
    assert!(status.kv_cached <= status.kv_limit);
}
