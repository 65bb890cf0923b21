//! Drafts change when tokens come, and never which.

#![allow(clippy::unwrap_used)]

#[path = "../../model/tests/gguf_builder/mod.rs"]
mod gguf_builder;
mod made;
mod support;

use made::maker::{Rope, Spec};
use made::oracle::Oracle;
use made::{Rng, made, small};
use proptest::prelude::*;
use puna::draft::{AnswerId, Drafter, Lookup, Text, Want};
use puna::sampler::PartialSampling;
use puna::{DraftBy, DraftOptions, Engine, EngineOptions, Error, KvType, Request};
use serde_json::json;
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use support::{Answer, answer, check_empty, engine, greedy, model, options, prompt, request, seeded};

/// Text that repeats itself, with changes.
fn repeats(rng: &mut Rng, vocab: u64) -> Vec<u32> {
    let unit: Vec<u32> = (0..4 + rng.bits() % 12).map(|_| (3 + rng.bits() % (vocab - 3)) as u32).collect();
    let mut text = Vec::new();
    for _ in 0..2 + rng.bits() % 4 {
        text.extend(&unit);
        if rng.bits().is_multiple_of(2) {
            text.push((3 + rng.bits() % (vocab - 3)) as u32);
        }
    }
    text
}

const NAMES: [&str; 6] = ["llama-gqa", "mistral-swa", "mixtral-moe", "some windows", "long windows", "longrope"];

fn open(name: &str, options: &EngineOptions) -> Result<Engine, Error> {
    let windowed = |window, windowed: &[bool]| {
        made(&Spec { n_layers: 3, window: Some(window), windowed: windowed.to_vec(), ..Spec::default() }, options)
    };
    match name {
        "some windows" => windowed(20, &[true, false, true]),
        "long windows" => windowed(90, &[false, true, true]),
        "longrope" => made(&Spec { rope: Rope::Long(80), ..Spec::default() }, options),
        _ => Engine::load(model(name), options, &mut |_, _| {}),
    }
}

/// 204 random prompts, each with drafts of each length.
#[test]
fn greedy_is_plain_decoding() {
    let mut rng = Rng(7);
    let (mut drafted, mut accepted) = (0, 0);
    for name in NAMES {
        let mut plain = open(name, &options(1, 512)).unwrap();
        let mut drafts = open(name, &options(1, 24)).unwrap();
        let vocab = plain.config().vocab_size as u64;
        for round in 0..34 {
            let r = Request { logprobs: Some(1), ..request(repeats(&mut rng, vocab), &greedy(), 40 + round % 30) };
            let (expected, without) = answer(&mut plain, r.clone());
            for most in 1..=8 {
                drafts.set_drafter(Box::<Lookup>::default(), most, false);
                let (got, with) = answer(&mut drafts, r.clone());
                assert_eq!(got, expected, "{name}, round {round}, drafts of {most}");
                assert_eq!(with.stats.generated_tokens, without.stats.generated_tokens);
                check_empty(&drafts);
                let stats = drafts.status().drafts;
                assert_eq!((stats.drafted, stats.accepted), (with.stats.drafted_tokens, with.stats.accepted_tokens));
                assert!(stats.drafted <= most * stats.drafts, "{stats:?}");
                drafted += stats.drafted;
                accepted += stats.accepted;
            }
        }
    }
    assert!(accepted > 2400 && accepted < drafted, "{accepted} of {drafted}");
}

/// Each token of a draft of each length is wrong at times, and right at others.
#[test]
fn every_place_is_accepted_and_rejected() {
    let mut plain = engine("llama-gqa", 1, 512);
    for most in 1..=8 {
        let mut drafts = engine("llama-gqa", 1, 512);
        let answers = Arc::new(Mutex::new(HashMap::new()));
        drafts.set_drafter(Box::new(Oracle { answers: answers.clone(), rng: Rng(most as u64) }), most, false);
        for i in 0..12 {
            let r = request(prompt(10 + i, i as u32), &if i % 2 == 0 { greedy() } else { seeded(i as u64) }, 60);
            let (expected, _) = answer(&mut plain, r.clone());
            let id = drafts.add(r).unwrap();
            answers.lock().unwrap().insert(AnswerId { id, sample: 0 }, expected.tokens.clone());
            let mut got = Answer::default();
            while !drafts.is_idle() {
                drafts.step().unwrap().iter().for_each(|event| got.take(event));
                drafts.check().unwrap();
            }
            assert_eq!(got, expected);
        }
        let stats = drafts.status().drafts;
        let at = &stats.accepted_at[..most];
        assert!(at.iter().all(|n| *n > 0 && *n < stats.drafts), "{most}: {stats:?}");
        assert_eq!(at.iter().sum::<usize>(), stats.accepted);
        check_empty(&drafts);
    }
}

/// A request of many kinds, for a model.
fn any_request(engine: &Engine, i: usize) -> Request {
    let vocab = engine.config().vocab_size as u32;
    let tokens = [prompt(40, 1 + i as u32 % 2), prompt(3 + 7 * i % 50, i as u32)].concat();
    let wishes = match i % 4 {
        0 => greedy(),
        1 => PartialSampling { repeat_penalty: Some(1.4), temperature: Some(1.5), ..seeded(i as u64 * 100) },
        2 => PartialSampling { min_tokens: Some(9), ignore_eos: None, ..seeded(i as u64 * 100) },
        _ => seeded(i as u64 * 100),
    };
    Request {
        n: 1 + i % 3,
        priority: (i % 2) as i32,
        logprobs: i.is_multiple_of(2).then_some(2),
        ..request(tokens.into_iter().map(|id| id % vocab).collect::<Vec<u32>>(), &wishes, 20 + i * 9 % 70)
    }
}

/// Little memory, many at once: they make room for each other, and drafts change nothing.
#[test]
fn among_others() {
    for (name, kv) in NAMES.iter().zip([KvType::F16, KvType::F32, KvType::Q8_0, KvType::F16, KvType::F32, KvType::F16])
    {
        let mut small = EngineOptions { kv_bytes: Some(0), kv, ..options(2, 32) };
        let Err(Error::KvBytes { block, .. }) = open(name, &small) else { panic!("a cache of no bytes") };
        small.kv_bytes = Some(8 * block);
        let mut crowd = open(name, &small).unwrap();
        let mut alone = open(name, &EngineOptions { kv, ..options(1, 512) }).unwrap();
        let answers = Arc::new(Mutex::new(HashMap::new()));
        crowd.set_drafter(Box::new(Oracle { answers: answers.clone(), rng: Rng(5) }), 6, false);
        let (mut expected, mut got) = (HashMap::new(), HashMap::new());
        for i in 0..10 {
            let r = any_request(&alone, i);
            let id = crowd.add(r.clone()).unwrap();
            for sample in 0..r.n {
                let mut one = Request { n: 1, ..r.clone() };
                one.sampling.seed = one.sampling.seed.map(|seed| seed + sample as u64);
                let (said, _) = answer(&mut alone, one);
                answers.lock().unwrap().insert(AnswerId { id, sample }, said.tokens.clone());
                expected.insert((id, sample), said);
                got.insert((id, sample), Answer::default());
            }
        }
        let mut preemptions = 0;
        while !crowd.is_idle() {
            for event in crowd.step().unwrap() {
                got.get_mut(&(event.id, event.sample)).unwrap().take(event);
                preemptions += event.finish.as_ref().map_or(0, |finish| finish.stats.preemptions);
            }
            crowd.check().unwrap();
        }
        assert!(preemptions > 0, "{name}: nobody had to make room");
        let stats = crowd.status().drafts;
        assert!(stats.accepted > 0 && stats.accepted < stats.drafted, "{name}: {stats:?}");
        assert_eq!(got, expected, "{name}");
        assert!(answers.lock().unwrap().is_empty(), "the drafter was not told of every end");
        check_empty(&crowd);
    }
}

/// What was guessed wrong is not found as the beginning of another text, and what was right is.
#[test]
fn the_cache_holds_what_was_said() {
    for name in ["llama-gqa", "some windows"] {
        let mut plain = open(name, &options(1, 512)).unwrap();
        let mut drafts = open(name, &options(1, 512)).unwrap();
        let answers = Arc::new(Mutex::new(HashMap::new()));
        drafts.set_drafter(Box::new(Oracle { answers: answers.clone(), rng: Rng(9) }), 8, false);
        for i in 0..12 {
            let r = request(small(20 + 3 * i, i as u32), &seeded(i as u64), 60 + i);
            let (said, _) = answer(&mut plain, r.clone());
            let id = drafts.add(r.clone()).unwrap();
            answers.lock().unwrap().insert(AnswerId { id, sample: 0 }, said.tokens.clone());
            while !drafts.is_idle() {
                drafts.step().unwrap();
                drafts.check().unwrap();
            }
            let history: Vec<u32> = r.prompt.tokens().chain(said.tokens.iter().copied()).collect();
            let wrong: Vec<u32> =
                history.iter().enumerate().map(|(at, id)| if at < 40 { *id } else { (id + 1) % 40 }).collect();
            for next in [[&history[..], &small(5, 3)].concat(), wrong] {
                let next = Request { logprobs: Some(2), ..request(next, &greedy(), 9) };
                let (expected, cold) = answer(&mut plain, next.clone());
                let (got, warm) = answer(&mut drafts, next);
                assert_eq!(got, expected, "{name}, {i}");
                assert_eq!(warm.stats.cached_tokens, cold.stats.cached_tokens, "{name}, {i}");
            }
        }
    }
}

#[test]
fn ends_are_where_they_are_without() {
    let mut plain = engine("llama-gqa", 1, 512);
    let mut drafts = engine("llama-gqa", 1, 512);
    let answers = Arc::new(Mutex::new(HashMap::new()));
    drafts.set_drafter(Box::new(Oracle { answers: answers.clone(), rng: Rng(2) }), 8, false);
    let schema = json!({
        "type": "object",
        "properties": { "name": { "type": "string", "maxLength": 5 }, "n": { "type": "integer", "maximum": 99 } },
        "required": ["name", "n"],
        "additionalProperties": false,
    });
    let long = answer(&mut plain, request(prompt(9, 4), &seeded(4), 60)).0;
    let mut reasons = HashMap::new();
    for i in 0..60_usize {
        let mut r = request(prompt(9, 4), &seeded(4), 60);
        match i % 4 {
            // A stop string within what the draft holds, or across it.
            0 => r.stop = vec![long.text.chars().skip(3 + i / 2).take(2 + i % 3).collect()],
            1 => r.stop_token_ids = vec![long.tokens[i % 50]],
            2 => r.max_tokens = Some(i),
            _ => r.sampling.seed = Some(i as u64),
        }
        let of = |engine: &Engine| {
            let grammar = (i % 4 == 3).then(|| engine.grammars().unwrap().json_schema(&schema).unwrap());
            Request { grammar, logprobs: Some(1), ..r.clone() }
        };
        let alone = of(&plain);
        let (expected, without) = answer(&mut plain, alone);
        let id = drafts.add(of(&drafts)).unwrap();
        // It knows more than is said.
        let known = if i % 4 == 3 { [&expected.tokens[..], &[5, 6, 7]].concat() } else { long.tokens.clone() };
        answers.lock().unwrap().insert(AnswerId { id, sample: 0 }, known);
        let mut got = Answer::default();
        while !drafts.is_idle() {
            for event in drafts.step().unwrap() {
                got.take(event);
                if let Some(finish) = &event.finish {
                    assert_eq!(finish.stats.generated_tokens, without.stats.generated_tokens);
                }
            }
        }
        assert_eq!(got, expected, "{i}");
        *reasons.entry(got.reason).or_insert(0) += 1;
    }
    assert!(reasons["stop"] > 20 && reasons["length"] > 10, "{reasons:?}");
    let stats = drafts.status().drafts;
    assert!(stats.accepted > 100 && stats.accepted < stats.drafted, "{stats:?}");
    check_empty(&drafts);
}

/// Always guesses the same.
struct Stubborn(u32);

impl Drafter for Stubborn {
    fn ready(&mut self, _: &Text) -> usize {
        1
    }

    fn draft(&mut self, wants: &mut [Want]) {
        wants.iter_mut().for_each(|want| want.draft.push(self.0));
    }

    fn end(&mut self, _: AnswerId) {}
}

/// 50,000 pairs of tokens, of which the second one was guessed: as often as the model says.
#[test]
fn samples_are_distributed_as_without() {
    const VOCAB: usize = 12;
    const N: usize = 50_000;
    let spec = Spec { vocab_size: VOCAB, ..Spec::default() };
    let mut engine = made(&spec, &options(1, 512)).unwrap();
    let all = PartialSampling {
        temperature: Some(1.0),
        top_k: Some(0),
        top_p: Some(1.0),
        min_p: Some(0.0),
        ..PartialSampling::default()
    };
    let chances = |engine: &mut Engine, tokens: Vec<u32>| {
        let r =
            Request { logprobs: Some(VOCAB), ..request(tokens, &PartialSampling { seed: Some(1), ..all.clone() }, 1) };
        let mut chances = [0.0; VOCAB];
        answer(engine, r).0.logprobs[0].top.iter().for_each(|top| chances[top.id as usize] = top.logprob.exp());
        chances
    };
    let start = vec![3, 1, 4, 1, 5];
    let first = chances(&mut engine, start.clone());
    let second: Vec<[f64; VOCAB]> =
        (0..VOCAB as u32).map(|id| chances(&mut engine, [&start[..], &[id]].concat())).collect();
    let likeliest = (0..VOCAB).max_by(|a, b| first[*a].total_cmp(&first[*b])).unwrap() as u32;
    engine.set_drafter(Box::new(Stubborn(likeliest)), 1, false);
    let mut counts = [[0.0; VOCAB]; VOCAB];
    let mut seed = 0;
    while seed < N {
        let n = 125;
        let wishes = PartialSampling { seed: Some(seed as u64), ..all.clone() };
        let mut pairs = vec![Vec::new(); n];
        let r = Request { n, ..request(start.clone(), &wishes, 3) };
        engine
            .generate(r, |event| {
                pairs[event.sample].extend(event.token);
                true
            })
            .unwrap();
        pairs.iter().for_each(|pair| counts[pair[0] as usize][pair[1] as usize] += 1.0);
        seed += n;
    }
    // Pairs that are rare count as one.
    let (mut square, mut cells, mut rest) = (0.0, 0, (0.0, 0.0));
    for (a, row) in counts.iter().enumerate() {
        for (b, &count) in row.iter().enumerate() {
            let expected = first[a] * second[a][b] * N as f64;
            if expected < 5.0 {
                rest = (rest.0 + count, rest.1 + expected);
            } else {
                square += (count - expected) * (count - expected) / expected;
                cells += 1;
            }
        }
    }
    if rest.1 > 5.0 {
        square += (rest.0 - rest.1) * (rest.0 - rest.1) / rest.1;
        cells += 1;
    }
    let free = f64::from(cells - 1);
    // Mean and deviation of the chi-square distribution.
    assert!(cells > 20 && (square - free).abs() < 4.5 * (2.0 * free).sqrt(), "{square} with {free} degrees of freedom");
    let stats = engine.status().drafts;
    assert!(stats.drafted >= N / 2 && stats.accepted > 1000 && stats.accepted < stats.drafted, "{stats:?}");
}

fn with_model(path: &Path, max: usize, adaptive: bool) -> EngineOptions {
    let draft = DraftOptions { max, adaptive, ..DraftOptions::new(DraftBy::Model(path.to_owned())) };
    EngineOptions { draft: Some(draft), ..options(1, 64) }
}

fn load(path: &Path, options: &EngineOptions) -> Engine {
    Engine::load(path, options, &mut |_, _| {}).unwrap()
}

/// The same answers, several at once.
fn compare(plain: &mut Engine, drafts: &mut Engine, n: usize, wishes: impl Fn(usize) -> PartialSampling) {
    let requests: Vec<Request> = (0..n)
        .map(|i| Request { n: 1 + i % 2, ..request(small(5 + 17 * i % 90, i as u32), &wishes(i), 30 + 5 * i) })
        .collect();
    let ids: Vec<_> = requests.iter().map(|r| drafts.add(r.clone()).unwrap()).collect();
    let mut got = vec![vec![Answer::default(); 2]; n];
    while !drafts.is_idle() {
        for event in drafts.step().unwrap() {
            got[ids.iter().position(|id| *id == event.id).unwrap()][event.sample].take(event);
        }
        drafts.check().unwrap();
    }
    for (r, got) in requests.into_iter().zip(got) {
        for (sample, got) in got.iter().enumerate().take(r.n) {
            let mut one = Request { n: 1, ..r.clone() };
            one.sampling.seed = one.sampling.seed.map(|seed| seed + sample as u64);
            assert_eq!(got, &answer(plain, one).0);
        }
    }
    check_empty(drafts);
}

#[test]
fn a_model_drafts_for_itself() {
    for name in ["llama-gqa", "mistral-swa"] {
        let mut drafts = load(&model(name), &with_model(&model(name), 5, false));
        let mut plain = engine(name, 1, 512);
        compare(&mut plain, &mut drafts, 8, |_| greedy());
        let stats = drafts.status().drafts;
        assert!(stats.drafted > 200, "{name}: {stats:?}");
        assert_eq!(stats.drafted, stats.accepted, "{name}");
        compare(&mut plain, &mut drafts, 8, |i| seeded(i as u64 * 50));
    }
}

#[test]
fn another_model_drafts() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, spec: Spec| {
        let path = dir.path().join(name);
        std::fs::write(&path, spec.builder().bytes()).unwrap();
        path
    };
    let target = file("model.gguf", Spec::default());
    let small = Spec { n_layers: 1, seed: 5, ..Spec::default() };
    let drafters = [
        file("small.gguf", small.clone()),
        file("window.gguf", Spec { window: Some(20), ..small.clone() }),
        file("long.gguf", Spec { rope: Rope::Long(60), ..small.clone() }),
    ];
    let mut plain = load(&target, &options(1, 512));
    for path in drafters {
        let mut drafts = load(&target, &with_model(&path, 4, false));
        compare(&mut plain, &mut drafts, 8, |i| if i % 2 == 0 { greedy() } else { seeded(i as u64 * 50) });
        let stats = drafts.status().drafts;
        assert!(stats.drafted > 200 && stats.accepted < stats.drafted / 2, "{path:?}: {stats:?}");
        // As long as it seems to be worth it.
        let mut adaptive = load(&target, &with_model(&path, 8, true));
        compare(&mut plain, &mut adaptive, 8, |i| seeded(i as u64 * 50));
    }
    let other = file("other.gguf", Spec { vocab_size: 60, ..small });
    let error = Engine::load(&target, &with_model(&other, 4, true), &mut |_, _| {}).err().unwrap().to_string();
    assert!(error.contains("other.gguf") && error.contains("has 60 tokens, and the model has 50"), "{error}");
    let error = Engine::load(&target, &with_model(&model("llama-gqa"), 4, true), &mut |_, _| {}).err().unwrap();
    assert!(error.to_string().contains("it has a tokenizer, and the model has none"), "{error}");
    let error = Engine::load(model("llama-gqa"), &with_model(&target, 4, true), &mut |_, _| {}).err().unwrap();
    assert!(error.to_string().contains("it has no tokenizer, and the model has one"), "{error}");
}

/// As many tokens are not the same tokens.
#[test]
fn another_vocabulary_is_refused() {
    for (name, there, here) in [("llama-gqa", "<|endoftext|>", "<unk>"), ("llama3-rope-tied", "<unk>", "<|endoftext|>")]
    {
        let other = if name == "llama-gqa" { "llama3-rope-tied" } else { "llama-gqa" };
        let error = Engine::load(model(name), &with_model(&model(other), 4, true), &mut |_, _| {}).err().unwrap();
        let Error::DraftVocabulary { path, what } = &error else { panic!("{error}") };
        assert_eq!(path, &model(other));
        assert_eq!(what, &format!("token 0 is {there:?} there, and {here:?} in the model"));
    }
}

/// The same tokens, of which one is another kind of token, or that texts begin with another one.
#[test]
fn another_use_of_the_same_tokens_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (path, model) = (dir.path().join("other.gguf"), model("llama-gqa"));
    let bytes = std::fs::read(&model).unwrap();
    let place = |key: &str| bytes.windows(key.len()).position(|w| w == key.as_bytes()).unwrap() + key.len();
    // Behind a key its type, 4 bytes; of lists also the type of what is in them, and their length of 8 bytes.
    let kind = |id: usize| place("tokenizer.ggml.token_type") + 16 + 4 * id;
    let (bos, eos) = (place("tokenizer.ggml.bos_token_id") + 4, place("tokenizer.ggml.eos_token_id") + 4);
    for (at, to, start) in [
        (bos, 5u32, "texts begin with token 5 there, and with token 1 in the model"),
        (kind(294), 3, "token 294, \"self\", is a control token there, and text in the model"),
        (eos, 300, "token 300, \" f\", is an end token there, and text in the model"),
    ] {
        let mut other = bytes.clone();
        other[at..at + 4].copy_from_slice(&to.to_le_bytes());
        std::fs::write(&path, other).unwrap();
        let error = Engine::load(&model, &with_model(&path, 4, true), &mut |_, _| {}).err();
        let Some(Error::DraftVocabulary { path: of, what }) = error else { panic!("{start}: {error:?}") };
        assert!(of == path && what.starts_with(start), "{what}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Whatever a drafter says, known ids or not.
    #[test]
    fn any_guesses(seed in 0u64..1000, most in 1usize..9) {
        struct Noise(Rng);
        impl Drafter for Noise {
            fn ready(&mut self, _: &Text) -> usize {
                (self.0.bits() % 7) as usize
            }
            fn draft(&mut self, wants: &mut [Want]) {
                for want in wants {
                    let n = self.0.bits() % 12;
                    want.draft.extend((0..n).map(|_| (self.0.bits() % 700) as u32));
                }
            }
            fn end(&mut self, _: AnswerId) {}
        }
        let mut plain = engine("llama-gqa", 1, 512);
        let mut drafts = engine("llama-gqa", 1, 512);
        drafts.set_drafter(Box::new(Noise(Rng(seed))), most, false);
        compare(&mut plain, &mut drafts, 3, |i| seeded(seed + i as u64 * 50));
    }
}
