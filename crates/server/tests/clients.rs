//! What existing clients rely on, as far as no other test shows it.

#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use std::time::{Duration, Instant};
use support::{Running, begin, chat, model, options, read_chunk, read_head, send, with};

const PATH: &str = "/v1/chat/completions";

fn content(answer: &Value) -> String {
    answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

#[test]
fn while_a_model_is_loaded_clients_are_told_to_wait() {
    // One after the other is loaded, and the last one is asked at once.
    let path = model(support::MODEL);
    let (folder, file) = (path.parent().unwrap().to_str().unwrap(), path.file_name().unwrap().to_str().unwrap());
    // One file is many models where its path is written in many ways.
    let aliases = (0..60).map(|i| (format!("m{i}"), format!("{folder}/{}{file}", "./".repeat(i)))).collect();
    let server = Running::listen(puna_server::Options { models: Vec::new(), aliases, ..options(64) });
    let body = chat(json!({ "model": "m59" }));
    let (health, answer, list) = (server.get("/health"), server.post(PATH, &body), server.get("/v1/models"));
    for (reply, code) in [(health, "loading"), (answer, "model_loading")] {
        assert_eq!((reply.status, &reply.error()["code"]), (503, &json!(code)));
        assert_eq!(reply.header("x-should-retry"), Some("true"));
        assert!(reply.header("retry-after").unwrap().parse::<u64>().unwrap() >= 1);
        assert!(reply.header("retry-after-ms").unwrap().parse::<u64>().unwrap() >= 1);
    }
    assert!(list.json()["data"].as_array().unwrap().len() < 60);
    while server.get("/health").status != 200 {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(server.post(PATH, &body).json()["model"], "m59");
}

#[test]
fn no_character_comes_in_halves() {
    let server = Running::small();
    let text = "👩‍🚀漢é🙂";
    let fields = |n: usize| json!({ "grammar": format!("start: \"{text}\""), "max_tokens": n, "ignore_eos": false });
    let whole = server.chat(fields(200));
    assert_eq!(content(&whole), text);
    let n = whole["usage"]["completion_tokens"].as_u64().unwrap() as usize;
    let pieces = |n: usize| -> Vec<String> {
        let events = server.post(PATH, &chat(with(fields(n), json!({ "stream": true })))).events();
        let piece = |event: &Value| event["choices"][0]["delta"]["content"].as_str().map(str::to_owned);
        events.iter().filter_map(piece).collect()
    };
    let broken = |text: &String| text.contains('\u{fffd}');
    assert!(n > 8 && pieces(200).concat() == text && !pieces(200).iter().any(broken), "{n} tokens");
    // Cut anywhere, only the end can be broken, and is one mark.
    for n in 1..n {
        let cut = content(&server.chat(fields(n)));
        let pieces = pieces(n);
        assert_eq!(pieces.concat(), cut);
        assert!(text.starts_with(cut.strip_suffix('\u{fffd}').unwrap_or(&cut)), "{cut}");
        assert!(!pieces[..pieces.len() - 1].iter().any(broken), "{pieces:?}");
    }
}

#[test]
fn answers_are_objects_or_whatever_they_are() {
    let server = Running::start(options(1024));
    let mut ended = 0;
    for seed in 0..4 {
        let format = json!({ "response_format": { "type": "json_object" } });
        let fields = json!({ "temperature": 1.5, "seed": seed, "max_tokens": 600, "ignore_eos": false });
        let answer = server.chat(with(fields, format));
        let text = content(&answer);
        assert!(text.trim_start().starts_with('{'), "{text}");
        if answer["choices"][0]["finish_reason"] == "stop" {
            ended += 1;
            assert!(serde_json::from_str::<Value>(&text).unwrap().is_object(), "{text}");
        }
    }
    assert!(ended > 0);
    assert_eq!(
        server.chat(json!({ "response_format": { "type": "text" } }))["choices"],
        server.chat(json!({}))["choices"]
    );
}

#[test]
fn fields_of_sampling_are_heard() {
    let server = Running::small();
    let say = |fields: Value| content(&server.chat(with(json!({ "max_tokens": 24 }), fields)));
    let (greedy, free) = (say(json!({})), json!({ "temperature": 1, "seed": 11, "top_k": 0, "top_p": 1, "min_p": 0 }));
    assert_ne!(say(free.clone()), greedy);
    assert_eq!(say(free.clone()), say(free.clone()));
    assert_ne!(say(with(free.clone(), json!({ "seed": 12 }))), say(free.clone()));
    for only in [json!({ "top_k": 1 }), json!({ "top_p": 0 }), json!({ "min_p": 1 }), json!({ "temperature": 0 })] {
        assert_eq!(say(with(free.clone(), only.clone())), greedy, "{only}");
    }
    // One token is forced, until it is punished.
    let forced = |fields: Value| say(with(json!({ "logit_bias": { "70": 60 } }), fields));
    let all = forced(json!({}));
    assert_eq!(all, all[..1].repeat(24));
    assert_ne!(forced(json!({ "repetition_penalty": 100 })), all);
    let weak = |fields: Value| say(with(json!({ "logit_bias": { "70": 8 } }), fields));
    let often = |text: &str| text.matches(&all[..1]).count();
    assert!(often(&weak(json!({ "frequency_penalty": 2 }))) < often(&weak(json!({}))));
    assert!(often(&weak(json!({ "presence_penalty": 2 }))) <= often(&weak(json!({ "presence_penalty": -2 }))));
}

#[test]
fn metrics_have_what_gateways_parse() {
    let server = Running::small();
    server.chat(json!({}));
    let text = server.get("/metrics").text();
    let line = |name: &str| text.lines().find(|line| line.starts_with(&format!("{name}{{"))).unwrap();
    let adapters = line("vllm:lora_requests_info");
    for label in ["max_lora=\"0\"", "running_lora_adapters=\"\"", "waiting_lora_adapters=\"\""] {
        assert!(adapters.contains(label), "{adapters}");
    }
    // The time of the last change.
    assert!(adapters.rsplit(' ').next().unwrap().parse::<f64>().unwrap() > 1.6e9, "{adapters}");
    assert!(line("vllm:num_requests_waiting").contains("model_name=\"model-f32\""));
    assert!(
        text.contains("vllm:request_success_total{model_name=\"model-f32\",engine=\"0\",finished_reason=\"length\"} 1")
    );
    for name in [
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    ] {
        line(name);
    }
    for old in ["vllm:gpu_", "vllm:num_requests_swapped"] {
        assert!(!text.contains(old), "{old}");
    }
}

/// The lines of a family of metrics, without its name, and the family's type.
fn family<'a>(text: &'a str, name: &str) -> (Vec<&'a str>, &'a str) {
    let head = format!("# TYPE {name} ");
    let kind = text.lines().find_map(|line| line.strip_prefix(&head)).unwrap_or_else(|| panic!("no family {name}"));
    let series = text.lines().filter_map(|line| line.strip_prefix(name).filter(|rest| rest.starts_with('{')));
    (series.collect(), kind)
}

#[test]
fn gauges_say_what_runs_and_what_waits() {
    let mut options = options(100_000);
    options.engine.max_running = 1;
    let server = Running::start(options);
    let body = chat(json!({ "max_tokens": 100_000, "stream": true })).to_string();
    let mut stream = begin(server.address, "POST", PATH, &[], body.as_bytes());
    assert!(read_head(&mut stream).0 == 200 && read_chunk(&mut stream, &mut Vec::new()));
    let second = begin(server.address, "POST", PATH, &[], body.as_bytes());
    let start = Instant::now();
    while server.metric("vllm:num_requests_waiting") != 1.0 {
        assert!(start.elapsed() < Duration::from_secs(60), "nothing waits");
    }
    assert_eq!(server.metric("vllm:num_requests_running"), 1.0);
    // A part of the whole, and no percentage: it is little of the 64 MiB.
    let usage = server.metric("vllm:kv_cache_usage_perc");
    assert!(usage > 0.0 && usage < 0.5, "{usage}");
    let text = server.get("/metrics").text();
    for name in ["num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"] {
        assert_eq!(family(&text, &format!("vllm:{name}")).1, "gauge");
    }
    drop((stream, second));
    server.wait_idle(Duration::from_secs(60));
}

#[test]
fn counters_count_tokens() {
    let mut options = options(256);
    // The model guesses for itself: always right.
    let by = puna::DraftBy::Model(model(support::MODEL));
    options.engine.draft = Some(puna::DraftOptions { by, max: 3, adaptive: false });
    let server = Running::start(options);
    let body = json!({ "messages": [{ "role": "user", "content": "words ".repeat(20) }] });
    let usages = [server.chat(body.clone())["usage"].clone(), server.chat(body)["usage"].clone()];
    let prompt = usages[0]["prompt_tokens"].as_f64().unwrap();
    let cached = usages[1]["prompt_tokens_details"]["cached_tokens"].as_f64().unwrap();
    assert!(cached >= 32.0 && usages[0]["prompt_tokens_details"]["cached_tokens"] == 0);
    for (name, expected) in [
        ("vllm:prompt_tokens_total", 2.0 * prompt),
        ("vllm:generation_tokens_total", 16.0),
        ("vllm:prefix_cache_queries_total", 2.0 * prompt),
        ("vllm:prefix_cache_hits_total", cached),
        ("vllm:num_preemptions_total", 0.0),
        ("vllm:request_prompt_tokens_sum", 2.0 * prompt),
        ("vllm:request_generation_tokens_sum", 16.0),
        ("vllm:request_params_max_tokens_sum", 16.0),
        ("vllm:request_params_n_sum", 2.0),
        ("vllm:e2e_request_latency_seconds_count", 2.0),
    ] {
        assert_eq!(server.metric(name), expected, "{name}");
    }
    let text = server.get("/metrics").text();
    let (drafts, guessed) = ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total");
    let accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total");
    assert!(server.metric(drafts) > 0.0 && accepted > 0.0 && accepted <= server.metric(guessed));
    let (places, kind) = family(&text, "vllm:spec_decode_num_accepted_tokens_per_pos_total");
    assert!(kind == "counter" && places[0].contains("position=\"0\""), "{places:?}");
    let numbers = places.iter().map(|place| place.rsplit(' ').next().unwrap().parse::<f64>().unwrap());
    assert_eq!(numbers.sum::<f64>(), accepted);
    for name in ["time_to_first_token_seconds", "inter_token_latency_seconds", "iteration_tokens_total"] {
        assert_eq!(family(&text, &format!("vllm:{name}")).1, "histogram");
    }
    for name in ["prompt_tokens_total", "request_success_total", "prefix_cache_hits_total"] {
        assert_eq!(family(&text, &format!("vllm:{name}")).1, "counter");
    }
}

/// All numbers and lists of an answer, wherever they are, are there: clients add them up.
fn check_no_null(value: &Value, at: &str) {
    match value {
        Value::Null => panic!("{at} is null"),
        Value::Array(list) => list.iter().for_each(|value| check_no_null(value, at)),
        Value::Object(map) => map.iter().for_each(|(name, value)| check_no_null(value, &format!("{at}.{name}"))),
        _ => {}
    }
}

#[test]
fn what_is_counted_is_never_null() {
    let server = Running::small();
    let options = json!({ "stream": true, "stream_options": { "include_usage": true } });
    let stream = |path: &str, body: Value| server.post(path, &with(body, options.clone())).events();
    let (chat_stream, text_stream) =
        (stream(PATH, chat(json!({}))), stream("/v1/completions", json!({ "prompt": "x", "max_tokens": 3 })));
    let embedding = server.post("/v1/embeddings", &json!({ "input": "x" })).json();
    for usage in [
        &server.chat(json!({ "n": 2 }))["usage"],
        &server.complete(json!({ "max_tokens": 3 }))["usage"],
        &chat_stream.last().unwrap()["usage"],
        &text_stream.last().unwrap()["usage"],
        &embedding["usage"],
    ] {
        assert!(usage["total_tokens"].as_u64() >= usage["prompt_tokens"].as_u64() && usage["prompt_tokens"].is_u64());
        check_no_null(usage, "usage");
    }
    // One chunk has the usage, the one before it ends the answer and has the timings.
    assert_eq!(chat_stream.iter().filter(|chunk| chunk.get("usage").is_some_and(|u| !u.is_null())).count(), 1);
    let timings = &chat_stream[chat_stream.len() - 2]["timings"];
    for name in ["prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms", "predicted_per_second"] {
        assert!(timings[name].is_number(), "{name}: {timings}");
    }
    // Scores are numbers also of what cannot come.
    let fields =
        json!({ "logprobs": true, "top_logprobs": 20, "grammar": "start: \"abc\"", "logit_bias": { "70": -100 } });
    let scores = server.chat(fields)["choices"][0]["logprobs"]["content"].clone();
    assert!(!scores.as_array().unwrap().is_empty());
    check_no_null(&scores, "content");
}

#[test]
fn streams_are_named_as_their_clients_name_them() {
    let server = Running::small();
    let body = chat(json!({ "stream": true })).to_string();
    let reply = send(server.address, "POST", PATH, &[("x-request-id", "bench-0-7")], body.as_bytes());
    assert_eq!(reply.header("x-request-id"), Some("bench-0-7"));
    assert_eq!(reply.events().len(), 9);
}
