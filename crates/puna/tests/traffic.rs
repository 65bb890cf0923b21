//! Many requests at once, with little memory: each says what it says alone, and nothing is left behind.

#![allow(clippy::unwrap_used)]

#[path = "../../model/tests/gguf_builder/mod.rs"]
mod gguf_builder;
mod made;
mod support;

use made::maker::{Rope, Spec};
use made::{Rng, made};
use proptest::prelude::*;
use puna::{Engine, EngineOptions, Error, FinishReason, LoadOptions, Prompt, Request, RequestId, Row};
use std::cell::RefCell;
use std::collections::HashMap;
use support::{Answer, answer, check_empty, engine, greedy, model, prompt, request, seeded};

/// A request, when it comes, and when it is cancelled.
#[derive(Clone, Debug)]
struct Visit {
    /// Which of a few beginnings it has, and how many tokens of it.
    begins: (u32, usize),
    own: usize,
    max_tokens: usize,
    /// Whether some of the rows that are its own are embeddings.
    image: bool,
    priority: i32,
    n: usize,
    greedy: bool,
    arrival: usize,
    cancel: Option<usize>,
}

fn visit() -> impl Strategy<Value = Visit> {
    let length = ((0u32..3, 0usize..90), 1usize..40, 0usize..45);
    let n = prop_oneof![4 => Just(1usize), 1 => 2usize..4];
    let manner = (-1i32..2, n, any::<bool>(), prop::bool::weighted(0.2));
    (length, manner, 0usize..60, prop::option::weighted(0.25, 0usize..40)).prop_map(
        |((begins, own, max_tokens), (priority, n, greedy, image), arrival, cancel)| Visit {
            begins,
            own,
            max_tokens,
            image,
            priority,
            n,
            greedy,
            arrival,
            cancel,
        },
    )
}

impl Visit {
    fn request(&self, engine: &Engine, i: usize) -> Request {
        let wishes = if self.greedy { greedy() } else { seeded(i as u64 * 1000) };
        let tokens = [prompt(self.begins.1, self.begins.0), prompt(self.own, 50 + i as u32)].concat();
        let vocab = engine.config().vocab_size as u32;
        let mut rows = Prompt::from(tokens.into_iter().map(|id| id % vocab).collect::<Vec<u32>>());
        if self.image {
            let n = self.own.min(3);
            let mut rng = Rng(self.own as u64 % 2);
            (0..n).for_each(|e| rows.rows[self.begins.1 + e] = Row::Embed(e as u32));
            rows.embeds = (0..n * engine.config().dim).map(|_| rng.number()).collect();
        }
        let r = request(rows, &wishes, self.max_tokens);
        Request { priority: self.priority, n: self.n, logprobs: Some(2), ..r }
    }
}

/// Engines are loaded once.
struct Models {
    alone: Engine,
    /// With a full cache's worth of positions, in blocks, and rows of a step.
    crowded: HashMap<(usize, usize), Engine>,
}

thread_local! {
    static MODELS: RefCell<HashMap<&'static str, Models>> = RefCell::default();
}

/// Models of each kind: all layers with a window, some, none; experts; a rotation that changes with length.
const NAMES: [&str; 6] = ["llama-gqa", "mistral-swa", "mixtral-moe", "some windows", "long windows", "longrope"];

fn open(name: &str, options: &EngineOptions) -> Result<Engine, Error> {
    let windowed = |window, windowed: &[bool]| {
        let spec = Spec { n_layers: 3, window: Some(window), windowed: windowed.to_vec(), ..Spec::default() };
        made(&spec, options)
    };
    match name {
        "some windows" => windowed(20, &[true, false, true]),
        "long windows" => windowed(90, &[false, true, true]),
        "longrope" => made(&Spec { rope: Rope::Long(80), ..Spec::default() }, options),
        _ => Engine::load(model(name), options, &mut |_, _| {}),
    }
}

fn alone(name: &str) -> Engine {
    open(name, &support::options(1, 512)).unwrap()
}

fn crowded(name: &str, blocks: usize, chunk: usize) -> Engine {
    let mut options = EngineOptions { kv_bytes: Some(0), ..support::options(1, chunk) };
    let Err(Error::KvBytes { block, .. }) = open(name, &options) else { panic!("a cache of no bytes") };
    options.kv_bytes = Some(blocks * block);
    options.load = LoadOptions { threads: 2, ..options.load };
    open(name, &options).unwrap()
}

/// Lets the visits happen; gives the answers to each, and how often one was computed again.
fn happen(engine: &mut Engine, visits: &[Visit]) -> (Vec<Vec<Answer>>, usize) {
    let mut answers: Vec<Vec<Answer>> = visits.iter().map(|v| vec![Answer::default(); v.n]).collect();
    let mut ids: HashMap<RequestId, usize> = HashMap::new();
    let mut preemptions = 0;
    let last = visits.iter().map(|v| v.arrival).max().unwrap_or(0);
    for step in 0.. {
        for (i, visit) in visits.iter().enumerate().filter(|(_, v)| v.arrival == step) {
            ids.insert(engine.add(visit.request(engine, i)).unwrap(), i);
        }
        for (i, visit) in visits.iter().enumerate() {
            if visit.cancel.is_some_and(|after| visit.arrival + after == step) {
                let id = *ids.iter().find(|(_, at)| **at == i).unwrap().0;
                for event in engine.cancel(id) {
                    assert_eq!(event.finish.as_ref().unwrap().reason, FinishReason::Cancelled);
                    answers[i][event.sample].take(&event);
                }
                assert!(engine.cancel(id).is_empty());
            }
        }
        for event in engine.step().unwrap() {
            answers[ids[&event.id]][event.sample].take(event);
            preemptions += event.finish.as_ref().map_or(0, |finish| finish.stats.preemptions);
        }
        engine.check().unwrap();
        let status = engine.status();
        assert!(status.kv_held + status.kv_cached <= status.kv_limit);
        if step >= last && engine.is_idle() {
            break;
        }
        assert!(step < 20_000, "it does not end");
    }
    (answers, preemptions)
}

/// Answers are those of the requests alone; those of cancelled ones begin alike.
fn compare(alone: &mut Engine, visits: &[Visit], answers: &[Vec<Answer>]) {
    for (i, (visit, answers)) in visits.iter().zip(answers).enumerate() {
        for (sample, got) in answers.iter().enumerate() {
            let mut r = Request { n: 1, ..visit.request(alone, i) };
            r.sampling.seed = r.sampling.seed.map(|seed| seed + sample as u64);
            let (expected, _) = answer(alone, r);
            if got.reason == "cancelled" {
                assert!(expected.tokens.starts_with(&got.tokens), "request {i}, answer {sample}");
            } else {
                assert_eq!(got, &expected, "request {i}, answer {sample}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn any_traffic(
        name in prop::sample::select(NAMES.to_vec()),
        (blocks, chunk) in prop::sample::select(vec![(6, 512), (6, 16), (9, 40), (40, 64)]),
        visits in prop::collection::vec(visit(), 1..16),
    ) {
        MODELS.with_borrow_mut(|models| {
            let models = models.entry(name).or_insert_with(|| Models { alone: alone(name), crowded: HashMap::new() });
            let crowd = models.crowded.entry((blocks, chunk)).or_insert_with(|| crowded(name, blocks, chunk));
            let (answers, _) = happen(crowd, &visits);
            check_empty(crowd);
            compare(&mut models.alone, &visits, &answers);
        });
    }
}

/// Six blocks for twelve requests: they make room for each other, again and again.
#[test]
fn room_is_made() {
    for name in NAMES {
        let visit = |i: usize| Visit {
            begins: (0, 20),
            own: 10 + i,
            max_tokens: 60 + 5 * i,
            image: i % 4 == 3,
            priority: (i % 3) as i32,
            n: 1 + i % 2,
            greedy: false,
            arrival: i * 2,
            cancel: None,
        };
        let visits: Vec<Visit> = (0..12).map(visit).collect();
        let mut crowd = crowded(name, 6, 32);
        let (answers, preemptions) = happen(&mut crowd, &visits);
        assert!(preemptions > 0, "{name}: nobody had to make room");
        check_empty(&crowd);
        compare(&mut alone(name), &visits, &answers);
    }
}

/// The higher priority comes first, and then who came first.
#[test]
fn who_comes_first() {
    let mut engine = crowded("llama-gqa", 4, 512);
    let ids: Vec<RequestId> = [0, 0, 5, -3]
        .iter()
        .map(|&priority| engine.add(Request { priority, ..request(prompt(90, 1), &greedy(), 8) }).unwrap())
        .collect();
    let mut order = Vec::new();
    while !engine.is_idle() {
        order.extend(engine.step().unwrap().iter().filter(|e| e.finish.is_some()).map(|e| e.id));
    }
    assert_eq!(order, [ids[2], ids[0], ids[1], ids[3]]);
    // One that comes later and matters more takes the room of one that runs.
    let low = engine.add(request(prompt(90, 2), &greedy(), 30)).unwrap();
    engine.step().unwrap();
    let high = engine.add(Request { priority: 1, ..request(prompt(90, 3), &greedy(), 8) }).unwrap();
    let mut finished = Vec::new();
    while !engine.is_idle() {
        for event in engine.step().unwrap().iter().filter(|e| e.finish.is_some()) {
            finished.push((event.id, event.finish.as_ref().unwrap().stats));
        }
    }
    assert_eq!((finished[0].0, finished[1].0), (high, low));
    assert_eq!((finished[0].1.preemptions, finished[1].1.preemptions), (0, 1));
    assert!(finished[1].1.queue_time < finished[0].1.time_to_first_token());
    check_empty(&engine);
}

/// A long prompt does not hold up a short one that comes later, nor those who generate.
#[test]
fn a_long_prompt_stalls_nobody() {
    let mut engine = engine("llama-gqa", 1, 16);
    let talking = engine.add(request(prompt(5, 1), &greedy(), 400)).unwrap();
    (0..4).for_each(|_| drop(engine.step().unwrap().to_vec()));
    let long = engine.add(request(prompt(150, 2), &greedy(), 1)).unwrap();
    engine.step().unwrap();
    let short = engine.add(request(prompt(4, 3), &greedy(), 1)).unwrap();
    let mut order = Vec::new();
    while order.len() < 2 {
        let events = engine.step().unwrap();
        assert!(events.iter().any(|e| e.id == talking && e.token.is_some()), "every step goes on with the first");
        order.extend(events.iter().filter(|e| e.finish.is_some()).map(|e| e.id));
    }
    assert_eq!(order, [short, long]);
    engine.cancel(talking);
    check_empty(&engine);
}

#[test]
fn so_many_at_once() {
    let options = EngineOptions { max_running: 2, ..support::options(1, 512) };
    let mut engine = Engine::load(model("llama-gqa"), &options, &mut |_, _| {}).unwrap();
    let ids: Vec<RequestId> = (0..5).map(|i| engine.add(request(prompt(5, i), &greedy(), 3)).unwrap()).collect();
    engine.step().unwrap();
    assert_eq!((engine.status().running, engine.status().waiting), (2, 3));
    // One that waits is cancelled like one that runs.
    assert_eq!(engine.cancel(ids[4])[0].finish.as_ref().unwrap().stats.generated_tokens, 0);
    let mut order = Vec::new();
    while !engine.is_idle() {
        order.extend(engine.step().unwrap().iter().filter(|e| e.finish.is_some()).map(|e| e.id));
        assert!(engine.status().running <= 2);
    }
    assert_eq!(order, ids[..4]);
}

#[test]
fn an_engine_moves_to_another_thread() {
    let mut engine = engine("llama-gqa", 1, 16);
    let here = answer(&mut engine, request(prompt(20, 1), &greedy(), 5)).0;
    let there = std::thread::spawn(move || answer(&mut engine, request(prompt(20, 1), &greedy(), 5)).0);
    assert_eq!(there.join().unwrap(), here);
}
