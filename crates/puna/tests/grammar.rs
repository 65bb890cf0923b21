//! Answers under a grammar: valid with any weights, the same alone and among others, and errors where none is possible.

#![allow(clippy::unwrap_used)]

mod support;

use proptest::prelude::*;
use puna::sampler::{LogitBias, PartialSampling, SampleError};
use puna::{Engine, EngineOptions, Error, FinishReason, Grammar, Request, RequestId, ToolChoice, ToolGrammar};
use puna_text::{Delta, ReplyFormat, ReplyOptions, ReplyParser};
use serde_json::{Value, json};
use std::collections::HashMap;
use support::{Answer, answer, check_empty, engine, greedy, mixed, model, options, prompt, request};

const MODELS: [&str; 3] = ["llama-gqa", "llama3-rope-tied", "qwen3-qknorm"];

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "maxLength": 6 },
            "kind": { "enum": ["a", 7, null] },
            "list": { "type": "array", "items": { "type": "integer", "minimum": -50, "maximum": 999 }, "maxItems": 3 },
        },
        "required": ["name", "kind", "list"],
        "additionalProperties": false,
    })
}

fn is_valid(value: &Value) -> bool {
    let item = |item: &Value| item.as_f64().is_some_and(|n| n.fract() == 0.0 && (-50.0..=999.0).contains(&n));
    value.as_object().is_some_and(|map| map.len() == 3)
        && value["name"].as_str().is_some_and(|name| name.chars().count() <= 6)
        && [json!("a"), json!(7), json!(null)]
            .iter()
            .any(|one| one == &value["kind"] || one == 7 && value["kind"] == 7.0)
        && value["list"].as_array().is_some_and(|list| list.len() <= 3 && list.iter().all(item))
}

fn sampled(seed: u64) -> PartialSampling {
    PartialSampling { seed: Some(seed), ..PartialSampling::default() }
}

fn constrained(grammar: &Grammar, seed: u64) -> Request {
    Request {
        grammar: Some(grammar.clone()),
        ..request(prompt(5 + seed as usize % 40, seed as u32), &sampled(seed), 200)
    }
}

#[test]
fn random_weights_say_valid_json() {
    for name in MODELS {
        let mut engine = engine(name, 1, 512);
        let grammar = engine.grammars().unwrap().json_schema(&schema()).unwrap();
        let mut ended = 0;
        for seed in 0..12 {
            let (answer, finish) = answer(&mut engine, constrained(&grammar, seed));
            if finish.reason == FinishReason::Length {
                continue;
            }
            assert_eq!(finish.reason, FinishReason::Stop);
            let value = serde_json::from_str(&answer.text).unwrap_or_else(|e| panic!("{}: {e}", answer.text));
            assert!(is_valid(&value), "{}", answer.text);
            ended += 1;
        }
        assert!(ended >= 6, "{name}: only {ended} ended");
        check_empty(&engine);
    }
}

#[test]
fn end_tokens_need_not_come() {
    let mut engine = engine("llama-gqa", 1, 512);
    let grammar = engine.grammars().unwrap().json_schema(&json!({ "const": [1, "b"] })).unwrap();
    for ignore_eos in [false, true] {
        let wishes = PartialSampling { ignore_eos: Some(ignore_eos), ..greedy() };
        let request = Request { grammar: Some(grammar.clone()), ..request(prompt(4, 1), &wishes, 300) };
        let (answer, finish) = answer(&mut engine, request);
        assert_eq!(finish.reason, FinishReason::Stop, "{}", answer.text);
        assert_eq!(serde_json::from_str::<Value>(&answer.text).unwrap(), json!([1, "b"]));
    }
}

/// An engine with little memory: its answers have to make room for each other.
fn crowded(blocks: usize) -> Engine {
    let load = |kv_bytes| {
        let options = EngineOptions { kv_bytes: Some(kv_bytes), ..options(2, 24) };
        Engine::load(model("llama-gqa"), &options, &mut |_, _| {})
    };
    let Err(Error::KvBytes { block, .. }) = load(0) else { panic!("a cache of no bytes") };
    load(blocks * block).unwrap()
}

/// Runs all requests at once.
fn together(engine: &mut Engine, requests: &[Request]) -> Vec<Vec<Answer>> {
    let ids: Vec<RequestId> = requests.iter().map(|r| engine.add(r.clone()).unwrap()).collect();
    let mut answers: HashMap<(RequestId, usize), Answer> = HashMap::new();
    while !engine.is_idle() {
        for event in engine.step().unwrap() {
            answers.entry((event.id, event.sample)).or_default().take(event);
        }
    }
    let of = |(id, request): (&RequestId, &Request)| (0..request.n).map(|i| answers[&(*id, i)].clone()).collect();
    ids.iter().zip(requests).map(of).collect()
}

#[test]
fn alone_and_among_others() {
    let mut alone = engine("llama-gqa", 1, 512);
    let mut shared = crowded(20);
    let with_grammar = |engine: &Engine| {
        let grammar = engine.grammars().unwrap().json_schema(&schema()).unwrap();
        let mut requests = mixed();
        requests.extend((0..8).map(|seed| Request { n: 1 + seed as usize % 3, ..constrained(&grammar, seed) }));
        requests
    };
    let requests = with_grammar(&shared);
    let answers = together(&mut shared, &requests);
    for (request, answers) in with_grammar(&alone).iter().zip(answers) {
        for (i, got) in answers.iter().enumerate() {
            let mut one = Request { n: 1, ..request.clone() };
            one.sampling.seed = one.sampling.seed.map(|seed| seed + i as u64);
            let (expected, _) = answer(&mut alone, one);
            assert_eq!(got, &expected);
        }
    }
    check_empty(&shared);
}

#[test]
fn preempted_answers_go_on_in_their_grammar() {
    let mut alone = engine("llama-gqa", 1, 512);
    let mut shared = crowded(9);
    let requests = |engine: &Engine| -> Vec<Request> {
        let schema = json!({ "type": "array", "items": { "type": "boolean" }, "minItems": 25, "maxItems": 25 });
        let grammar = engine.grammars().unwrap().json_schema(&schema).unwrap();
        let one = |i: u64| Request { priority: i as i32, ..constrained(&grammar, i * 9) };
        (0..6).map(one).collect()
    };
    let mut preemptions = 0;
    let of_shared = requests(&shared);
    let mut answers: HashMap<RequestId, Answer> = HashMap::new();
    let mut ids = Vec::new();
    let mut waiting = of_shared.into_iter();
    for step in 0.. {
        // One after the other, each more urgent than those before.
        if step % 8 == 0 {
            ids.extend(waiting.next().map(|request| shared.add(request).unwrap()));
        }
        for event in shared.step().unwrap() {
            answers.entry(event.id).or_default().take(event);
            preemptions += event.finish.as_ref().map_or(0, |finish| finish.stats.preemptions);
        }
        if shared.is_idle() && waiting.len() == 0 {
            break;
        }
    }
    assert!(preemptions > 0);
    for (id, request) in ids.iter().zip(requests(&alone)) {
        assert_eq!(answers[id], answer(&mut alone, request).0);
    }
    check_empty(&shared);
}

#[test]
fn what_is_banned_ends_in_a_sentence() {
    let mut engine = engine("llama3-rope-tied", 1, 512);
    let grammar = engine.grammars().unwrap().regex("[ab]").unwrap();
    let vocab = engine.config().vocab_size as u32;
    let bias: LogitBias = LogitBias((0..vocab).filter(|&id| id != 40).map(|id| (id, f32::NEG_INFINITY)).collect());
    let wishes = PartialSampling { logit_bias: Some(bias), ..sampled(1) };
    let request = Request { grammar: Some(grammar.clone()), ..request(prompt(4, 1), &wishes, 9) };
    let error = engine.generate(request, |_| true).unwrap_err();
    assert!(matches!(error, Error::Sample(SampleError::NothingAllowed { allowed: 1.. })), "{error}");
    // A bias that leaves something is weaker than the grammar.
    let tokenizer = engine.tokenizer().unwrap().clone();
    let b = tokenizer.token_to_id("b").unwrap();
    let wishes = PartialSampling { logit_bias: Some(LogitBias([(b, 90.0), (40, 100.0)].into())), ..sampled(1) };
    let request = support::request(prompt(4, 1), &wishes, 9);
    let (answer, _) = answer(&mut engine, Request { grammar: Some(grammar.clone()), ..request.clone() });
    assert_eq!(answer.text, "b");
    let mut other = support::engine("qwen3-qknorm", 1, 512);
    assert_eq!(other.add(Request { grammar: Some(grammar), ..request }).unwrap_err(), Error::ForeignGrammar);
    check_empty(&engine);
}

#[test]
fn random_weights_call_tools() {
    let parameters = json!({ "type": "object", "properties": { "n": { "type": "integer", "minimum": 0, "maximum": 9 } }, "required": ["n"] });
    let parameters = json!({ "additionalProperties": false, "type": parameters["type"], "properties": parameters["properties"], "required": ["n"] });
    let tools = vec![json!({ "type": "function", "function": { "name": "pick", "parameters": parameters } })];
    let mut engine = engine("llama3-rope-tied", 1, 512);
    for name in ["hermes", "llama3", "mistral", "qwen3-coder"] {
        let format = ReplyFormat::by_name(name).unwrap();
        let choice = ToolChoice::Named("pick");
        let request = ToolGrammar { format, tools: &tools, choice, parallel: false, in_reasoning: false };
        let grammar = engine.grammars().unwrap().tools(&request).unwrap();
        for seed in 0..3 {
            let mut request = constrained(&grammar, seed);
            request.shown = format.markers().into_iter().map(str::to_owned).collect();
            let (answer, finish) = answer(&mut engine, request);
            assert_eq!(finish.reason, FinishReason::Stop, "{}", answer.text);
            let mut parser = ReplyParser::new(format, &ReplyOptions { tools: &tools, in_reasoning: false, seed });
            let deltas = [parser.push(&answer.text), parser.finish()].concat();
            let arguments: String = deltas
                .iter()
                .map(|delta| match delta {
                    Delta::Call(piece) => piece.arguments.as_str(),
                    _ => "",
                })
                .collect();
            let value: Value =
                serde_json::from_str(&arguments).unwrap_or_else(|e| panic!("{name}: {}: {e}", answer.text));
            assert!(value["n"].as_f64().is_some_and(|n| (0.0..=9.0).contains(&n)), "{value}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn keys_and_constants_of_any_text(texts in prop::collection::vec("[ -~éß\u{1F600}\"\\\\]{1,8}", 1..4), seed in 0u64..100) {
        thread_local! {
            static ENGINE: std::cell::RefCell<Engine> = std::cell::RefCell::new(engine("qwen3-qknorm", 1, 512));
        }
        let object: serde_json::Map<String, Value> = texts.iter().map(|text| (text.clone(), json!(text))).collect();
        let value = Value::Object(object);
        ENGINE.with_borrow_mut(|engine| {
            let grammar = engine.grammars().unwrap().json_schema(&json!({ "const": value })).unwrap();
            let (answer, finish) = answer(engine, constrained(&grammar, seed));
            if finish.reason == FinishReason::Stop {
                assert_eq!(serde_json::from_str::<Value>(&answer.text).unwrap(), value);
            }
        });
    }
}
