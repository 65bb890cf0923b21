//! What requests see and change inside a model: residuals, steering, experts, phases.

#![allow(clippy::unwrap_used)]

mod support;

use puna::draft::{AnswerId, Drafter, Text, Want};
use puna::{
    EmbedOptions, Engine, EngineOptions, Error, Event, ExpertCounts, KvType, Phase, Positions, Request, Timings, Trace,
};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use support::inside::{Residuals, steering, together};
use support::{answer, check_empty, engine, greedy, model, options, prompt, request, seeded};

const MODELS: [&str; 7] =
    ["llama-gqa", "mistral-swa", "mixtral-moe", "olmoe-small", "qwen3-qknorm", "llama-bias-yarn", "llama3-rope-tied"];

fn precise(name: &str, chunk: usize) -> Engine {
    let options = EngineOptions { kv: KvType::F32, ..options(2, chunk) };
    Engine::load(model(name), &options, &mut |_, _| {}).unwrap()
}

#[test]
fn residuals_are_the_references_hidden_states() {
    for name in MODELS {
        let bytes = std::fs::read(model(name).with_file_name("golden.safetensors")).unwrap();
        let golden = SafeTensors::deserialize(&bytes).unwrap();
        let ids = golden.tensor("input_ids").unwrap();
        let ids: Vec<u32> = ids.data().as_chunks().0.iter().map(|b| i64::from_le_bytes(*b) as u32).collect();
        let states = golden.tensor("hidden_states").unwrap();
        let states: Vec<f32> = states.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let mut engine = precise(name, 10);
        let (n_layers, dim) = (engine.config().n_layers, engine.config().dim);
        let residuals = Residuals::default();
        let mut r = request(ids.clone(), &greedy(), 3);
        r.capture = residuals.capture(0..n_layers, Positions::Prompt);
        engine.generate(r, |_| true).unwrap();
        let rows = residuals.take();
        assert_eq!(rows.len(), n_layers * ids.len(), "{name}");
        for layer in 0..n_layers - 1 {
            let (mut difference, mut square) = (0.0, 0.0);
            for position in 0..ids.len() {
                let expected = &states[((layer + 1) * ids.len() + position) * dim..][..dim];
                for (got, expected) in rows[&(0, layer, position)].iter().zip(expected) {
                    difference += f64::from(got - expected).powi(2);
                    square += f64::from(*expected).powi(2);
                }
            }
            let error = (difference / square).sqrt();
            assert!(error <= 1e-5, "{name}, layer {layer}: relative error {error:.2e}");
        }
        // Of the last layer the reference tells what its norm leaves.
        let last = &rows[&(0, n_layers - 1, ids.len() - 1)];
        let expected = &states[((n_layers + 1) * ids.len() - 1) * dim..][..dim];
        assert!(last.iter().zip(expected).any(|(got, normed)| (got - normed).abs() > 1e-3), "{name}: not normed");
    }
}

#[test]
fn residuals_do_not_depend_on_how_they_were_computed() {
    for name in ["llama-gqa", "mistral-swa", "mixtral-moe"] {
        let mut alone = precise(name, 512);
        let layers = 0..alone.config().n_layers;
        let (prompt_ids, residuals) = (prompt(75, 4), Residuals::default());
        let mut r = request(prompt_ids.clone(), &seeded(3), 20);
        r.capture = residuals.capture(layers.clone(), Positions::All);
        let (expected_answer, _) = answer(&mut alone, r.clone());
        let expected = residuals.take();
        // The last token of the answer is said and not computed.
        assert_eq!(expected.len(), layers.len() * (75 + 20 - 1), "{name}");
        r.capture = None;
        assert_eq!(answer(&mut alone, r.clone()).0, expected_answer, "looking changes nothing");
        // The prompt is in the cache by now, and all is computed and told again.
        for (positions, n) in [(Positions::All, 94), (Positions::Prompt, 75), (Positions::Last, 1)] {
            let mut engine = precise(name, 16);
            let others: Vec<Request> = (0..4)
                .map(|i| request([prompt(64, 4), prompt(9 * i, i as u32)].concat(), &seeded(i as u64), 30))
                .collect();
            r.capture = residuals.capture(layers.clone(), positions);
            for round in 0..2 {
                let got = together(&mut engine, &[&others[..], std::slice::from_ref(&r)].concat());
                assert_eq!(got[4].0, expected_answer);
                let rows = residuals.take();
                assert_eq!(rows.len(), layers.len() * n, "{name}, {positions:?}, round {round}");
                for (key, row) in rows {
                    let same = row.iter().zip(&expected[&key]).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{name}, {positions:?}, round {round}: {key:?}");
                }
            }
        }
    }
}

#[test]
fn answers_of_one_request_tell_the_prompt_once() {
    let mut engine = engine("llama-gqa", 2, 16);
    let residuals = Residuals::default();
    let mut r = request(prompt(40, 1), &seeded(5), 6);
    r.n = 3;
    r.capture = residuals.capture([1], Positions::All);
    engine.generate(r, |_| true).unwrap();
    let of = |sample| residuals.0.lock().unwrap().keys().filter(|key| key.0 == sample).count();
    assert_eq!([0, 1, 2].map(of), [45, 5, 5]);
}

#[test]
fn steering_is_seen_in_residuals() {
    let mut engine = precise("qwen3-qknorm", 16);
    let residuals = Residuals::default();
    let mut r = request(prompt(40, 2), &greedy(), 0);
    r.capture = residuals.capture([0, 1], Positions::Prompt);
    engine.generate(r.clone(), |_| true).unwrap();
    let without = residuals.take();
    r.steering = steering(&engine, 1, 0.5);
    let added = r.steering.as_ref().unwrap().layer(1).unwrap().to_vec();
    engine.generate(r, |_| true).unwrap();
    for (key, row) in residuals.take() {
        for (i, (with, without)) in row.iter().zip(&without[&key]).enumerate() {
            let expected = if key.1 == 1 { without + added[i] } else { *without };
            assert_eq!(with.to_bits(), expected.to_bits(), "{key:?}");
        }
    }
}

#[test]
fn steered_requests_say_what_they_say_alone() {
    for name in ["llama-gqa", "mistral-swa", "mixtral-moe"] {
        let mut mixed = engine(name, 2, 24);
        let mut requests = support::mixed();
        for (i, r) in requests.iter_mut().enumerate() {
            r.logprobs = Some(3);
            r.steering = [None, steering(&mixed, 1, 1.5), steering(&mixed, 1, -1.0)][i % 3].clone();
        }
        let got = together(&mut mixed, &requests);
        for (i, (r, (got, _))) in requests.into_iter().zip(got).enumerate() {
            let mut alone = engine(name, 1, 512);
            let unsteered = Request { steering: None, ..r.clone() };
            let is_steered = r.steering.is_some();
            assert_eq!(answer(&mut alone, r).0, got, "{name}: request {i}");
            let plain = answer(&mut alone, unsteered).0;
            assert_eq!(plain != got, is_steered, "{name}: request {i}");
        }
    }
}

#[test]
fn the_cache_knows_steering() {
    for name in ["llama-gqa", "mistral-swa"] {
        let mut warm = engine(name, 1, 512);
        let steerings = [None, steering(&warm, 1, 1.0), steering(&warm, 1, 2.0), steering(&warm, 1, 0.0)];
        // A strength of 0 is none.
        let expected = [[0, 64, 64], [0, 64, 64], [0, 64, 64], [64, 64, 64]];
        for (steering, expected) in steerings.into_iter().zip(expected) {
            for (round, cached) in expected.into_iter().enumerate() {
                let mut r = request(prompt(70, 1), &seeded(round as u64), 10);
                r.logprobs = Some(2);
                r.steering.clone_from(&steering);
                let (got, finish) = answer(&mut warm, r.clone());
                assert_eq!(finish.stats.cached_tokens, cached, "{name}, round {round}");
                assert_eq!(got, answer(&mut engine(name, 1, 512), r).0, "{name}, round {round}");
            }
        }
        check_empty(&warm);
    }
}

#[test]
fn embeddings_are_steered() {
    let mut engine = engine("llama-gqa", 1, 16);
    let texts = [prompt(30, 1), prompt(5, 2)];
    let options = EmbedOptions { pooling: Some(puna::Pooling::Mean), ..EmbedOptions::default() };
    let plain = engine.embed(&texts, &options).unwrap();
    let options_steered = EmbedOptions { steering: steering(&engine, 1, 1.0), ..options.clone() };
    let steered = engine.embed(&texts, &options_steered).unwrap();
    assert_ne!(plain, steered);
    assert_eq!(engine.embed(&texts[1..], &options_steered).unwrap()[0], steered[1]);
    assert_eq!(engine.embed(&texts, &options).unwrap(), plain);
}

#[test]
fn what_cannot_be_done_is_refused() {
    let mut engine = engine("llama-gqa", 1, 16);
    let n_layers = engine.config().n_layers;
    let mut r = request(prompt(5, 1), &greedy(), 1);
    r.capture = Residuals::default().capture([0, n_layers], Positions::Last);
    assert_eq!(engine.add(r.clone()), Err(Error::CaptureLayer { layer: n_layers, n_layers }));
    r.capture = None;
    let other = support::engine("qwen3-qknorm", 1, 16);
    r.steering = steering(&other, 1, 1.0);
    let shape = |engine: &Engine| (engine.config().n_layers, engine.config().dim);
    assert_eq!(engine.add(r), Err(Error::Steering { found: shape(&other), expected: shape(&engine) }));
    let pairs = [(vec![1], vec![2])];
    for (layers, layer) in [(0..=1, 0), (1..=n_layers, n_layers)] {
        let refused = engine.train_control_vector(&pairs, layers, |_| {});
        assert_eq!(refused, Err(Error::DirectionLayer { layer, n_layers }));
    }
    assert_eq!(engine.train_control_vector(&[], 1..=1, |_| {}), Err(Error::NoPairs));
}

#[test]
fn control_vectors_are_mean_differences() {
    let mut engine = engine("mixtral-moe", 2, 24);
    let pairs: Vec<(Vec<u32>, Vec<u32>)> =
        (0..20).map(|i| (prompt(3 + 5 * i, i as u32), prompt(40 - i, 100 + i as u32))).collect();
    let mut seen = Vec::new();
    let vector = engine.train_control_vector(&pairs, 1..=1, |done| seen.push(done)).unwrap();
    assert_eq!(seen, [16, 20]);
    let residuals = Residuals::default();
    let mut last = |ids: &Vec<u32>| {
        let mut r = request(ids.clone(), &greedy(), 0);
        r.capture = residuals.capture([1], Positions::Last);
        engine.generate(r, |_| true).unwrap();
        residuals.take().remove(&(0, 1, ids.len() - 1)).unwrap()
    };
    let mut sum = vec![0f64; vector.dim()];
    for (positive, negative) in &pairs {
        let (positive, negative) = (last(positive), last(negative));
        sum.iter_mut().zip(positive.iter().zip(&negative)).for_each(|(s, (p, n))| *s += f64::from(*p) - f64::from(*n));
    }
    let mean: Vec<f32> = sum.into_iter().map(|sum| (sum / 20.0) as f32).collect();
    assert_eq!(vector.directions(), &BTreeMap::from([(1, mean)]));
}

fn sums(counts: &ExpertCounts) -> Vec<u64> {
    counts.layers().map(|layer| layer.iter().sum()).collect()
}

#[test]
fn experts_are_counted() {
    for name in ["mixtral-moe", "olmoe-small"] {
        let mut all = engine(name, 2, 20);
        let (n_layers, moe) = (all.config().n_layers, all.config().moe.unwrap());
        let mut requests = support::mixed();
        requests.iter_mut().skip(1).for_each(|r| r.count_experts = true);
        let got = together(&mut all, &requests);
        assert!(got[0].1.experts.is_none(), "{name}: not asked for");
        let mut total = vec![vec![0; moe.n_experts]; n_layers];
        for (i, (r, (_, finish))) in requests.iter().zip(&got).enumerate() {
            let mut alone = engine(name, 1, 512);
            let asks = Request { count_experts: true, ..r.clone() };
            let expected = answer(&mut alone, asks).1.experts.unwrap();
            assert_eq!(alone.experts(), Some(&*expected), "{name}: request {i}");
            assert_eq!(finish.stats.cached_tokens, 0, "{name}: request {i}");
            if i > 0 {
                assert_eq!(finish.experts.as_deref(), Some(&*expected), "{name}: request {i}");
            }
            let computed = r.prompt.len() + finish.stats.generated_tokens - 1;
            let mut rows = vec![(computed * moe.routing.used) as u64; n_layers];
            rows[n_layers - 1] = (finish.stats.generated_tokens * moe.routing.used) as u64;
            assert_eq!(sums(&expected), rows, "{name}: request {i}");
            let own = expected.layers().flatten();
            total.iter_mut().flatten().zip(own).for_each(|(sum, n)| *sum += n);
        }
        assert_eq!(all.experts().unwrap().layers().map(<[u64]>::to_vec).collect::<Vec<_>>(), total, "{name}");
    }
    let mut dense = engine("llama-gqa", 1, 16);
    let mut r = request(prompt(5, 1), &greedy(), 2);
    r.count_experts = true;
    assert!(answer(&mut dense, r).1.experts.is_none() && dense.experts().is_none());
}

/// Where sequences take each other's blocks, rows are computed again: they are told and counted once.
#[test]
fn rows_that_are_computed_again_count_once() {
    for (name, long) in [("mixtral-moe", 90), ("olmoe-small", 90)] {
        let mut alone = engine(name, 1, 512);
        let block = alone.model_mut().kv_cache(KvType::F16).block_bytes();
        let few = EngineOptions { kv_bytes: Some(5 * block), ..support::options(2, 24) };
        let mut crowd = Engine::load(support::model(name), &few, &mut |_, _| {}).unwrap();
        let last = alone.config().n_layers - 1;
        let asked = |i: usize| {
            let residuals = Residuals::default();
            let positions = [Positions::Last, Positions::Prompt, Positions::All][i % 3];
            let capture = residuals.capture([0, last], positions);
            let r =
                Request { count_experts: true, capture, ..request(prompt(30 + i, i as u32), &seeded(i as u64), long) };
            (r, residuals)
        };
        let (requests, rows): (Vec<Request>, Vec<Residuals>) = (0..6).map(asked).unzip();
        let got = together(&mut crowd, &requests);
        let preemptions: usize = got.iter().map(|(_, finish)| finish.stats.preemptions).sum();
        assert!(preemptions > 1, "{name}: {preemptions} times somebody made room");
        for (i, (said, finish)) in got.iter().enumerate() {
            let (r, expected) = asked(i);
            let (same, once) = answer(&mut alone, r);
            assert_eq!(said, &same, "{name}, {i}");
            assert_eq!(finish.experts, once.experts, "{name}, {i}");
            assert!(rows[i].take() == expected.take(), "{name}, {i}: other residuals");
        }
    }
}

/// A request's timings, and what passed from before it was added to its last event.
fn timed(engine: &mut Engine, mut r: Request, mut each: impl FnMut(&Event)) -> (Timings, Duration) {
    r.timings = true;
    let start = Instant::now();
    let mut wall = Duration::ZERO;
    let finish = engine.generate(r, |event| {
        wall = start.elapsed();
        each(event);
        true
    });
    (*finish.unwrap().timings.unwrap(), wall)
}

#[test]
fn phases_add_up_to_the_time_that_passed() {
    for name in ["llama-gqa", "mixtral-moe"] {
        let mut engine = engine(name, 2, 32);
        let (timings, wall) = timed(&mut engine, request(prompt(150, 1), &seeded(1), 60), |event| {
            // Whoever writes the text takes time, too.
            if event.token.is_some() && event.finish.is_none() {
                std::thread::sleep(Duration::from_micros(500));
            }
        });
        let gap = wall.abs_diff(timings.total());
        assert!(gap <= wall.mul_f64(0.02) + Duration::from_micros(300), "{name}: {:?} of {wall:?}", timings.total());
        let other = timings.time(Phase::Other);
        assert!(other <= wall.mul_f64(0.02), "{name}: {other:?} of {wall:?} nobody measured");
        assert!(timings.time(Phase::Write) >= Duration::from_micros(500 * 50), "{name}: {timings:?}");
        let mut needed = vec![Phase::Queue, Phase::Schedule, Phase::Embed, Phase::Norm, Phase::Qkv, Phase::Rope];
        needed.extend([Phase::Attention, Phase::Output, Phase::Ffn, Phase::Head, Phase::Sampling, Phase::Detokenize]);
        needed.extend((name == "mixtral-moe").then_some(Phase::Router));
        for phase in needed {
            assert!(!timings.time(phase).is_zero(), "{name}: {phase:?} takes time");
        }
        // 5 chunks of the prompt and 59 tokens read the output projection, but for chunks without logits.
        let head = (engine.config().vocab_size * engine.config().dim * 4) as u64;
        assert_eq!(timings.bytes(Phase::Head), 60 * head, "{name}");
        assert!(timings.bytes(Phase::Attention) > 0 && timings.bytes(Phase::Norm) == 0);
    }
}

/// Knows what is said, and takes its time to say so.
struct Slow(Vec<u32>);

impl Slow {
    const TIME: Duration = Duration::from_millis(2);
}

impl Drafter for Slow {
    fn ready(&mut self, text: &Text) -> usize {
        self.0.len() - text.answer.len()
    }

    fn draft(&mut self, wants: &mut [Want]) {
        std::thread::sleep(Slow::TIME);
        for want in wants {
            want.draft.extend(self.0.iter().skip(want.text.answer.len()).take(want.most));
        }
    }

    fn end(&mut self, _: AnswerId) {}
}

#[test]
fn drafting_is_a_phase() {
    let mut engine = engine("llama-gqa", 1, 64);
    let r = request(prompt(70, 1), &greedy(), 60);
    let (plain, _) = answer(&mut engine, r.clone());
    engine.set_drafter(Box::new(Slow(plain.tokens)), 4, false);
    engine.trace(Trace::MAX_EVENTS);
    let (timings, wall) = timed(&mut engine, r, |_| ());
    let gap = wall.abs_diff(timings.total());
    assert!(gap <= wall.mul_f64(0.02) + Duration::from_micros(300), "{:?} of {wall:?}", timings.total());
    let other = timings.time(Phase::Other);
    assert!(other <= wall.mul_f64(0.02), "{other:?} of {wall:?} nobody measured");
    let drafts = engine.status().drafts;
    // The first token, and then steps of five.
    assert_eq!((drafts.drafts, drafts.accepted), (12, 12 * 4 - 1), "{drafts:?}");
    let (draft, least) = (timings.time(Phase::Draft), Slow::TIME * drafts.drafts as u32);
    assert!(draft >= least, "{draft:?} of {least:?}");
    // What it took is in no other phase.
    assert!(timings.time(Phase::Schedule) < least / 2 && draft < wall, "{timings:?}");
    let mut json = Vec::new();
    engine.take_trace().unwrap().write(&mut json).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    let slow = |e: &&serde_json::Value| e["name"] == "draft" && e["dur"].as_f64().unwrap() >= 2000.0;
    assert_eq!(json["traceEvents"].as_array().unwrap().iter().filter(slow).count(), drafts.drafts);
}

#[test]
fn nobody_is_timed_who_does_not_ask() {
    let mut engine = engine("llama-gqa", 1, 32);
    let (_, finish) = answer(&mut engine, request(prompt(20, 1), &greedy(), 5));
    assert_eq!(finish.timings, None);
    assert_eq!(engine.timings(), Timings::default());
    let mut asks = request(prompt(20, 2), &greedy(), 5);
    asks.timings = true;
    let got = together(&mut engine, &[request(prompt(30, 1), &greedy(), 5), asks]);
    assert!(got[0].1.timings.is_none() && got[1].1.timings.is_some());
}

#[test]
fn an_idle_engine_measures_nothing() {
    let mut engine = engine("llama-gqa", 1, 32);
    engine.set_timing(true);
    let pause = Duration::from_millis(300);
    let idle = |engine: &mut Engine| {
        assert!(engine.is_idle());
        std::thread::sleep(pause);
        answer(engine, request(prompt(20, 2), &greedy(), 2));
        let write = engine.timings().time(Phase::Write);
        assert!(write < pause, "nobody wrote for {write:?}");
    };
    // When all have ended, when the last one was ended, and when there was nothing to do.
    answer(&mut engine, request(prompt(20, 1), &greedy(), 2));
    idle(&mut engine);
    let id = engine.add(request(prompt(20, 1), &greedy(), 50)).unwrap();
    (0..3).for_each(|_| drop(engine.step().unwrap().to_vec()));
    engine.cancel(id);
    idle(&mut engine);
    engine.step().unwrap();
    idle(&mut engine);
}

#[test]
fn a_batch_is_shared_by_rows() {
    let mut engine = engine("mixtral-moe", 2, 64);
    let mut requests = support::mixed();
    requests.iter_mut().for_each(|r| r.timings = true);
    let got = together(&mut engine, &requests);
    let all = engine.timings();
    let model = [Phase::Embed, Phase::Norm, Phase::Qkv, Phase::Attention, Phase::Output, Phase::Ffn, Phase::Head];
    for phase in model.into_iter().chain([Phase::Sampling, Phase::Detokenize]) {
        let sum: Duration = got.iter().map(|(_, finish)| finish.timings.as_ref().unwrap().time(phase)).sum();
        let gap = sum.abs_diff(all.time(phase));
        assert!(gap <= all.time(phase).mul_f64(0.02) + Duration::from_micros(50), "{phase:?}: {sum:?} of {all:?}");
    }
    for (_, finish) in &got {
        let (timings, stats) = (finish.timings.as_ref().unwrap(), &finish.stats);
        let wall = stats.queue_time + stats.prompt_time + stats.generate_time;
        let gap = timings.total().abs_diff(wall);
        assert!(gap <= wall.mul_f64(0.02) + Duration::from_millis(2), "{:?} of {wall:?}", timings.total());
        assert!(timings.time(Phase::Other) > wall / 10, "others take part of it");
    }
}

#[test]
fn a_trace_holds_steps_and_phases() {
    let mut engine = engine("llama-gqa", 1, 32);
    engine.trace(Trace::MAX_EVENTS);
    answer(&mut engine, request(prompt(100, 1), &greedy(), 10));
    let trace = engine.take_trace().unwrap();
    assert!(engine.take_trace().is_none());
    let mut json = Vec::new();
    trace.write(&mut json).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    let events = json["traceEvents"].as_array().unwrap();
    let steps: Vec<u64> =
        events.iter().filter(|e| e["name"] == "step").map(|e| e["args"]["rows"].as_u64().unwrap()).collect();
    assert_eq!(steps, [32, 32, 32, 4, 1, 1, 1, 1, 1, 1, 1, 1, 1]);
    for phase in ["schedule", "qkv", "attention", "ffn", "head", "sampling", "write"] {
        assert!(events.iter().filter(|e| e["name"] == phase).count() >= 9, "{phase}");
    }
    engine.trace(5);
    answer(&mut engine, request(prompt(10, 1), &greedy(), 10));
    let trace = engine.take_trace().unwrap();
    assert!(trace.len() == 5 && trace.dropped() > 100);
}
