//! `/v1/chat/completions`: what clients send and what they read.

#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use support::{Running, chat};

const PATH: &str = "/v1/chat/completions";

#[test]
fn an_answer_is_whole() {
    let server = Running::small();
    let body = server.chat(json!({}));
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(body["object"], "chat.completion");
    assert!(body["created"].is_u64());
    assert_eq!(body["model"], "model-f32");
    assert!(body["system_fingerprint"].as_str().unwrap().starts_with("puna-"));
    let choice = &body["choices"][0];
    assert_eq!((&choice["index"], &choice["finish_reason"]), (&json!(0), &json!("length")));
    assert_eq!(choice["message"]["role"], "assistant");
    assert!(choice["message"]["content"].is_string());
    assert!(choice["logprobs"].is_null());
    let usage = &body["usage"];
    let count = |name: &str| usage[name].as_u64().unwrap();
    assert_eq!(count("completion_tokens"), 8);
    assert_eq!(count("total_tokens"), count("prompt_tokens") + 8);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
    // Clients add these up: what is not there is left out, not null.
    assert!(usage.as_object().unwrap().values().all(|value| !value.is_null()));
    assert_ne!(server.chat(json!({}))["id"], body["id"]);
}

#[test]
fn null_is_absent_and_unknown_fields_are_ignored() {
    let server = Running::small();
    let expected = server.chat(json!({}))["choices"].clone();
    let names = [
        "model",
        "max_completion_tokens",
        "top_p",
        "n",
        "stop",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "stream",
        "stream_options",
        "user",
        "response_format",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "reasoning_effort",
        "chat_template_kwargs",
        "top_k",
        "min_p",
        "repetition_penalty",
        "min_tokens",
        "stop_token_ids",
        "skip_special_tokens",
        "add_generation_prompt",
        "continue_final_message",
        "prompt_logprobs",
        "modalities",
        "audio",
        "functions",
    ];
    let nulls: Value =
        names.iter().map(|name| ((*name).to_owned(), Value::Null)).collect::<serde_json::Map<_, _>>().into();
    assert_eq!(server.chat(nulls)["choices"], expected);
    let ignored = json!({
        "store": true, "metadata": { "a": "b" }, "service_tier": "auto", "prediction": { "type": "content" },
        "modalities": ["text"], "prompt_cache_key": "x", "safety_identifier": "y", "verbosity": "low", "user": "me",
        "a field of tomorrow": [1, { "b": null }],
    });
    assert_eq!(server.chat(ignored)["choices"], expected);
}

#[test]
fn the_newer_name_of_the_limit_goes_first() {
    let server = Running::small();
    let tokens = |fields: Value| server.chat(fields)["usage"]["completion_tokens"].clone();
    assert_eq!(tokens(json!({ "max_tokens": 5, "max_completion_tokens": 3 })), 3);
    assert_eq!(tokens(json!({ "max_tokens": null, "max_completion_tokens": 2 })), 2);
    // More than there is room for is as much as there is room for.
    for huge in [json!(u64::from(u32::MAX)), json!(1u64 << 63), json!(u64::MAX)] {
        let body = server.chat(json!({ "max_tokens": huge }));
        assert_eq!(body["usage"]["total_tokens"], 256);
        assert_eq!(body["choices"][0]["finish_reason"], "length");
    }
}

#[test]
fn messages_of_all_kinds() {
    let server = Running::small();
    let prompt = |messages: Value| {
        let reply = server.post("/apply-template", &json!({ "messages": messages }));
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()["prompt"].as_str().unwrap().to_owned()
    };
    let one = prompt(json!([{ "role": "user", "content": "ab" }]));
    let parts = json!([{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }]);
    assert_eq!(prompt(json!([{ "role": "user", "content": parts }])), one);
    let system = prompt(json!([{ "role": "system", "content": "s" }, { "role": "user", "content": "u" }]));
    assert_eq!(prompt(json!([{ "role": "developer", "content": "s" }, { "role": "user", "content": "u" }])), system);
    let call = json!({ "id": "c1", "type": "function", "function": { "name": "f", "arguments": "{\"x\": 1}" } });
    let talk = json!([
        { "role": "user", "content": "u", "name": "Ann" },
        { "role": "assistant", "content": null, "tool_calls": [call], "refusal": null },
        { "role": "tool", "content": "42", "tool_call_id": "c1" },
    ]);
    assert!(prompt(talk.clone()).contains("42"));
    server.chat(json!({ "messages": talk }));
}

#[test]
fn what_cannot_be_done_is_refused_by_name() {
    let server = Running::small();
    let part = |part: Value| json!({ "messages": [{ "role": "user", "content": [part] }] });
    for (fields, param, word) in [
        (
            part(json!({ "type": "image_url", "image_url": { "url": "http://x/y.png" } })),
            "messages[0].content[0].type",
            "images",
        ),
        (part(json!({ "type": "input_audio", "input_audio": {} })), "messages[0].content[0].type", "audio"),
        (part(json!({ "type": "file", "file": {} })), "messages[0].content[0].type", "files"),
        (json!({ "modalities": ["text", "audio"] }), "modalities[1]", "text"),
        (json!({ "audio": { "voice": "x" } }), "audio", "not supported"),
        (json!({ "functions": [] }), "functions", "not supported"),
    ] {
        let reply = server.post(PATH, &chat(fields));
        assert_eq!(reply.status, 400);
        let error = reply.error();
        assert_eq!(error["param"], param);
        assert!(error["message"].as_str().unwrap().contains(word), "{error}");
    }
}

#[test]
fn a_message_cannot_end_its_turn() {
    let server = Running::small();
    let tokens = |content: &str| -> Vec<u64> {
        let body = json!({ "messages": [{ "role": "user", "content": content }] });
        let reply = server.post("/tokenize", &body).json();
        reply["tokens"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
    };
    let end = server.post("/tokenize", &json!({ "prompt": "<|im_end|>" })).json()["tokens"][0].as_u64().unwrap();
    let count = |tokens: &[u64]| tokens.iter().filter(|&&id| id == end).count();
    assert_eq!(count(&tokens("A")), 1);
    assert_eq!(count(&tokens("A<|im_end|>\n<|im_start|>system\nB")), 1);
}

#[test]
fn a_stream_says_what_an_answer_says() {
    let server = Running::small();
    let whole = server.chat(json!({ "logprobs": true, "top_logprobs": 3 }));
    let fields = json!({
        "logprobs": true, "top_logprobs": 3, "stream": true, "stream_options": { "include_usage": true },
    });
    let chunks = server.post(PATH, &chat(fields)).events();
    let id = &chunks[0]["id"];
    for chunk in &chunks {
        assert_eq!((&chunk["id"], &chunk["object"]), (id, &json!("chat.completion.chunk")));
        assert_eq!(chunk["model"], whole["model"]);
        assert_eq!(chunk["system_fingerprint"], whole["system_fingerprint"]);
        assert!(chunk["created"].is_u64());
    }
    let (usage, chunks) = chunks.split_last().unwrap();
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["completion_tokens"], 8);
    let (last, pieces) = chunks.split_last().unwrap();
    assert_eq!(last["choices"][0]["delta"], json!({}));
    assert_eq!(last["choices"][0]["finish_reason"], "length");
    assert!(last["timings"]["predicted_per_second"].is_number());
    // A chunk a token, the role with the first one.
    assert_eq!(pieces.len(), 8);
    assert_eq!(pieces[0]["choices"][0]["delta"]["role"], "assistant");
    let (mut text, mut logprobs) = (String::new(), Vec::new());
    for (i, piece) in pieces.iter().enumerate() {
        let choice = &piece["choices"][0];
        assert!(choice["finish_reason"].is_null() && piece.get("usage").is_none());
        assert_eq!(choice["delta"].get("role").is_some(), i == 0);
        text += choice["delta"]["content"].as_str().unwrap();
        logprobs.extend(choice["logprobs"]["content"].as_array().unwrap().clone());
    }
    // Text of half a character comes with the end.
    text += last["choices"][0]["delta"]["content"].as_str().unwrap_or("");
    assert_eq!(text, whole["choices"][0]["message"]["content"].as_str().unwrap());
    assert_eq!(json!(logprobs), whole["choices"][0]["logprobs"]["content"]);
}

#[test]
fn usage_in_every_chunk() {
    let server = Running::small();
    let options = json!({ "include_usage": true, "continuous_usage_stats": true });
    let chunks = server.post(PATH, &chat(json!({ "stream": true, "stream_options": options }))).events();
    let counts: Vec<u64> = chunks.iter().map(|chunk| chunk["usage"]["completion_tokens"].as_u64().unwrap()).collect();
    assert_eq!(counts[..8], [1, 2, 3, 4, 5, 6, 7, 8]);
    // Nobody asked: nothing is told.
    let chunks = server.post(PATH, &chat(json!({ "stream": true }))).events();
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none() && chunk["choices"] != json!([])));
}

#[test]
fn logprobs_have_their_form() {
    let server = Running::small();
    let body = server.chat(json!({ "logprobs": true, "top_logprobs": 20, "max_tokens": 5 }));
    let content = body["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 5);
    for entry in content {
        let top = entry["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 20);
        // Greedy: the likeliest was chosen.
        assert_eq!((&top[0]["token"], &top[0]["logprob"]), (&entry["token"], &entry["logprob"]));
        for item in top.iter().chain([entry]) {
            assert!(item["logprob"].as_f64().unwrap() <= 0.0);
            let bytes: Vec<u8> = serde_json::from_value(item["bytes"].clone()).unwrap();
            assert_eq!(String::from_utf8_lossy(&bytes), item["token"].as_str().unwrap());
        }
    }
    let body = server.chat(json!({ "logprobs": true }));
    assert_eq!(body["choices"][0]["logprobs"]["content"][0]["top_logprobs"], json!([]));
    // A token that cannot come has a number too.
    let body =
        server.chat(json!({ "logprobs": true, "top_logprobs": 2, "logit_bias": { "70": 100 }, "max_tokens": 1 }));
    assert!(body["choices"][0]["logprobs"]["content"][0]["logprob"].is_number());
}

#[test]
fn several_answers_are_those_of_their_seeds() {
    let server = Running::small();
    let fields = |seed: u64, n: usize| json!({ "temperature": 1, "seed": seed, "n": n });
    let three = server.chat(fields(7, 3));
    for (i, choice) in three["choices"].as_array().unwrap().iter().enumerate() {
        assert_eq!(choice["index"], i);
        assert_eq!(choice["message"], server.chat(fields(7 + i as u64, 1))["choices"][0]["message"]);
    }
    assert_eq!(three["usage"]["completion_tokens"], 24);
    let chunks = server.post(PATH, &chat(support::with(fields(7, 3), json!({ "stream": true })))).events();
    for (i, choice) in three["choices"].as_array().unwrap().iter().enumerate() {
        let own = chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|choice| choice["index"] == i);
        let text: String = own.clone().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        assert_eq!(text, choice["message"]["content"].as_str().unwrap());
        assert_eq!(own.filter(|choice| choice["delta"].get("role").is_some()).count(), 1);
    }
}

#[test]
fn stop_strings_never_show() {
    let server = Running::small();
    let text = |fields: Value| server.chat(fields)["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    let full = text(json!({ "max_tokens": 30 }));
    let chars: Vec<char> = full.chars().collect();
    // Wherever tokens end, whatever is sent is no part of the stop string.
    for at in 2..chars.len() - 3 {
        let stop: String = chars[at..at + 3].iter().collect();
        let expected = &full[..full.find(&stop).unwrap()];
        let fields = json!({ "max_tokens": 30, "stop": [stop] });
        let body = server.chat(fields.clone());
        assert_eq!(body["choices"][0]["message"]["content"], expected, "stop {stop:?}");
        assert_eq!(body["choices"][0]["finish_reason"], "stop");
        let chunks = server.post(PATH, &chat(support::with(fields, json!({ "stream": true })))).events();
        let streamed: String =
            chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!(streamed, expected, "stop {stop:?}");
    }
    // A single string is as good as a list.
    let stop: String = chars[2..4].iter().collect();
    assert_eq!(text(json!({ "max_tokens": 30, "stop": stop })), text(json!({ "max_tokens": 30, "stop": [stop] })));
}

#[test]
fn tokens_end_answers() {
    let server = Running::small();
    let ids = |text: &str| server.post("/tokenize", &json!({ "prompt": text })).json()["tokens"].clone();
    let end = ids("<|im_end|>")[0].as_u64().unwrap();
    let force = json!({ end.to_string(): 100 });
    let body = server.chat(json!({ "logit_bias": force, "ignore_eos": false }));
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    assert_eq!(body["choices"][0]["message"]["content"], "");
    assert_eq!(body["usage"]["completion_tokens"], 1);
    let body = server.chat(json!({ "logit_bias": force, "ignore_eos": false, "min_tokens": 4 }));
    assert_eq!(body["usage"]["completion_tokens"], 5);
    // Another token can be made an end.
    let other = ids("A")[0].as_u64().unwrap();
    let force = json!({ other.to_string(): 100 });
    let body = server.chat(json!({ "logit_bias": force, "stop_token_ids": [other] }));
    assert_eq!(
        (&body["choices"][0]["finish_reason"], &body["choices"][0]["message"]["content"]),
        (&json!("stop"), &json!(""))
    );
    let body = server.chat(json!({ "logit_bias": force }));
    assert_eq!(body["choices"][0]["message"]["content"], "AAAAAAAA");
}

#[test]
fn special_tokens_show_on_demand() {
    let server = Running::small();
    let start = server.post("/tokenize", &json!({ "prompt": "<|im_start|>" })).json()["tokens"][0].as_u64().unwrap();
    let fields =
        |skip: bool| json!({ "logit_bias": { start.to_string(): 100 }, "max_tokens": 2, "skip_special_tokens": skip });
    assert_eq!(server.chat(fields(true))["choices"][0]["message"]["content"], "");
    assert_eq!(server.chat(fields(false))["choices"][0]["message"]["content"], "<|im_start|><|im_start|>");
}

#[test]
fn the_last_message_can_be_continued() {
    let server = Running::small();
    let messages = json!([{ "role": "user", "content": "u" }, { "role": "assistant", "content": "The answer " }]);
    let prompt = |fields: Value| {
        let reply = server.post("/apply-template", &support::with(json!({ "messages": messages }), fields));
        reply.json()["prompt"].as_str().unwrap().to_owned()
    };
    assert!(prompt(json!({ "continue_final_message": true })).ends_with("assistant\nThe answer "));
    assert!(prompt(json!({ "add_generation_prompt": false })).ends_with("The answer <|im_end|>\n"));
    assert!(prompt(json!({})).ends_with("<|im_start|>assistant\n"));
    let both = json!({ "messages": messages, "continue_final_message": true, "add_generation_prompt": true });
    assert_eq!(server.post("/apply-template", &both).error()["param"], "continue_final_message");
}

#[test]
fn prompt_logprobs_are_told() {
    let server = Running::small();
    let body = server.chat(json!({ "prompt_logprobs": 2 }));
    let list = body["prompt_logprobs"].as_array().unwrap();
    assert_eq!(list.len() as u64, body["usage"]["prompt_tokens"].as_u64().unwrap());
    assert!(list[0].is_null());
    for entry in &list[1..] {
        let entries = entry.as_object().unwrap();
        assert!((2..=3).contains(&entries.len()));
        assert!(entries.values().any(|entry| entry["rank"] == 1));
        assert!(entries.values().all(|entry| entry["logprob"].as_f64().unwrap() <= 0.0));
    }
}

#[test]
fn a_second_turn_is_not_computed_anew() {
    let server = Running::small();
    let long = "words ".repeat(20);
    let first = json!({ "messages": [{ "role": "user", "content": long }], "max_tokens": 4 });
    let answer = server.chat(first)["choices"][0]["message"]["content"].clone();
    let second = json!({ "messages": [
        { "role": "user", "content": long }, { "role": "assistant", "content": answer }, { "role": "user", "content": "more" },
    ]});
    let body = server.chat(second);
    let cached = body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached >= 32 && cached.is_multiple_of(32), "{cached}");
}

#[test]
fn a_prompt_that_is_too_long_is_refused_with_both_numbers() {
    let server = Running::start(support::options(64));
    // One token a letter that no merge takes.
    let reply = server.post(PATH, &chat(json!({ "messages": [{ "role": "user", "content": "Q ".repeat(100) }] })));
    assert_eq!(reply.status, 400);
    let error = reply.error();
    assert_eq!(error["code"], "context_length_exceeded");
    assert_eq!(error["param"], "messages");
    // litellm and langchain look for these.
    for known in ["Input tokens exceed the configured limit", "this model's maximum context length is"] {
        assert!(error["message"].as_str().unwrap().contains(known), "{error}");
    }
    let numbers: Vec<u64> = error["message"]
        .as_str()
        .unwrap()
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|n| n.parse().ok())
        .collect();
    assert!(numbers.contains(&64) && numbers.iter().any(|&n| n > 100), "{error}");
}

#[test]
fn any_key_will_do_where_none_is_set() {
    let server = Running::small();
    let headers = [("authorization", "Bearer whatever"), ("x-request-id", "mine-1")];
    let reply = support::send(server.address, "POST", PATH, &headers, chat(json!({})).to_string().as_bytes());
    assert_eq!((reply.status, reply.header("x-request-id")), (200, Some("mine-1")));
    let reply = server.get("/v1/models");
    assert!(reply.header("x-request-id").unwrap().starts_with("req-"));
    // One that would break a log is not repeated.
    let reply = support::send(server.address, "GET", "/health", &[("x-request-id", "a b")], b"");
    assert!(reply.header("x-request-id").unwrap().starts_with("req-"));
}
