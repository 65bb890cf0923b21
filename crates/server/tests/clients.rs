//! What existing clients rely on, as far as no other test shows it.

#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use support::{Running, chat, model, options, with};

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
        std::thread::sleep(std::time::Duration::from_millis(5));
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
