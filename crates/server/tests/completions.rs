//! `/v1/completions`, `/v1/embeddings` and what turns texts into tokens.

#![allow(clippy::unwrap_used)]

mod support;

use base64::Engine;
use serde_json::{Value, json};
use support::{Running, model, with};

const PATH: &str = "/v1/completions";

fn greedy(fields: Value) -> Value {
    with(json!({ "prompt": "Once upon", "temperature": 0, "max_tokens": 6, "ignore_eos": true }), fields)
}

fn numbers(list: &Value) -> Vec<Option<f64>> {
    list.as_array().unwrap().iter().map(Value::as_f64).collect()
}

#[test]
fn a_text_is_continued() {
    let server = Running::small();
    let body = server.complete(greedy(json!({})));
    assert_eq!(body["object"], "text_completion");
    assert!(body["id"].as_str().unwrap().starts_with("cmpl-"));
    let choice = &body["choices"][0];
    assert_eq!(
        (&choice["index"], &choice["finish_reason"], &choice["logprobs"]),
        (&json!(0), &json!("length"), &Value::Null)
    );
    assert_eq!(body["usage"]["completion_tokens"], 6);
    // Sixteen, unless the request says otherwise.
    let body = server.complete(greedy(json!({ "max_tokens": null })));
    assert_eq!(body["usage"]["completion_tokens"], 16);
}

#[test]
fn null_is_absent_and_unknown_fields_are_ignored() {
    let server = Running::small();
    let expected = server.complete(greedy(json!({})))["choices"].clone();
    let names = [
        "model",
        "suffix",
        "best_of",
        "n",
        "stop",
        "seed",
        "stream",
        "stream_options",
        "echo",
        "logprobs",
        "user",
        "logit_bias",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "min_tokens",
        "stop_token_ids",
        "skip_special_tokens",
        "prompt_logprobs",
    ];
    let nulls: Value =
        names.iter().map(|name| ((*name).to_owned(), Value::Null)).collect::<serde_json::Map<_, _>>().into();
    assert_eq!(server.complete(greedy(nulls))["choices"], expected);
    // As vLLM's benchmark sends it.
    let bench = json!({ "best_of": 1, "logprobs": null, "repetition_penalty": 1.0, "stream_options": null });
    assert_eq!(server.complete(greedy(bench))["choices"], expected);
}

#[test]
fn prompts_of_all_kinds() {
    let server = Running::small();
    let ids = server.post("/tokenize", &json!({ "prompt": "Once upon" })).json()["tokens"].clone();
    let text = |prompt: Value| -> Vec<String> {
        let body = server.complete(greedy(json!({ "prompt": prompt })));
        let choices = body["choices"].as_array().unwrap();
        assert!(choices.iter().enumerate().all(|(i, choice)| choice["index"] == i));
        choices.iter().map(|choice| choice["text"].as_str().unwrap().to_owned()).collect()
    };
    let [one] = text(json!("Once upon")).try_into().unwrap();
    let [other] = text(json!("Another")).try_into().unwrap();
    assert_eq!(text(json!(["Once upon", "Another"])), [one.clone(), other.clone()]);
    assert_eq!(text(ids.clone()), vec![one.clone()]);
    assert_eq!(text(json!([ids, ids])), [one.clone(), one.clone()]);
    let body = server.complete(greedy(json!({ "prompt": ["Once upon", "Another"], "n": 2 })));
    assert_eq!(body["choices"].as_array().unwrap().len(), 4);
    assert_eq!(body["choices"][2]["text"], other);
    assert_eq!(body["usage"]["completion_tokens"], 24);
}

#[test]
fn echo_scores_the_prompt() {
    let server = Running::small();
    // As an evaluation does it: nothing or one token is generated, and the prompt is what counts.
    for max_tokens in [0, 1] {
        let body = server.complete(greedy(json!({ "echo": true, "logprobs": 1, "max_tokens": max_tokens })));
        let choice = &body["choices"][0];
        assert!(choice["text"].as_str().unwrap().starts_with("Once upon"));
        assert_eq!(choice["finish_reason"], "length");
        let lists = &choice["logprobs"];
        let n = body["usage"]["prompt_tokens"].as_u64().unwrap() as usize + max_tokens;
        for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            assert_eq!(lists[list].as_array().unwrap().len(), n, "{list}");
        }
        let scores = numbers(&lists["token_logprobs"]);
        assert_eq!(scores[0], None);
        assert!(scores[1..].iter().all(|score| score.is_some_and(|x| x <= 0.0)));
        assert!(lists["top_logprobs"][0].is_null());
        assert!(lists["top_logprobs"].as_array().unwrap()[1..].iter().all(Value::is_object));
        let tokens: Vec<&str> = lists["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
        for (i, offset) in lists["text_offset"].as_array().unwrap().iter().enumerate() {
            assert_eq!(offset.as_u64().unwrap() as usize, tokens[..i].concat().chars().count());
        }
        assert_eq!(body["usage"]["completion_tokens"], max_tokens);
    }
    let body = server.complete(greedy(json!({ "echo": true, "max_tokens": 0 })));
    assert_eq!(body["choices"][0]["text"], "Once upon");
    assert_eq!(server.post(PATH, &greedy(json!({ "max_tokens": 0 }))).error()["param"], "max_tokens");
}

#[test]
fn what_was_generated_scores_the_same_as_a_prompt() {
    let server = Running::small();
    let begin = [7, 8, 9, 10];
    // A bias makes the answer a known one; scores do not know of it.
    let forced = json!({ "prompt": begin, "logprobs": 2, "max_tokens": 20, "logit_bias": { "70": 100 } });
    let generated = server.complete(greedy(forced))["choices"][0]["logprobs"].clone();
    let whole = [begin.to_vec(), vec![70; 20]].concat();
    let scored = server.complete(json!({ "prompt": whole, "echo": true, "logprobs": 2, "max_tokens": 0 }));
    let scored = &scored["choices"][0]["logprobs"];
    for list in ["tokens", "token_logprobs", "top_logprobs"] {
        assert_eq!(scored[list].as_array().unwrap()[4..], generated[list].as_array().unwrap()[..], "{list}");
    }
}

#[test]
fn the_best_of_several() {
    let server = Running::small();
    let fields = |fields: Value| greedy(with(json!({ "temperature": 1, "seed": 3, "logprobs": 0 }), fields));
    let mean = |choice: &Value| {
        let scores = numbers(&choice["logprobs"]["token_logprobs"]);
        scores.iter().flatten().sum::<f64>() / scores.len() as f64
    };
    let all = server.complete(fields(json!({ "n": 5 })));
    let mut all: Vec<Value> = all["choices"].as_array().unwrap().clone();
    all.sort_by(|a, b| mean(b).total_cmp(&mean(a)));
    let best = server.complete(fields(json!({ "n": 2, "best_of": 5 })));
    let best = best["choices"].as_array().unwrap();
    assert_eq!(best.len(), 2);
    for (got, expected) in best.iter().zip(&all) {
        assert_eq!((&got["text"], &got["logprobs"]), (&expected["text"], &expected["logprobs"]));
    }
    let reply = server.post(PATH, &fields(json!({ "n": 2, "best_of": 1 })));
    assert_eq!(reply.error()["param"], "best_of");
    let reply = server.post(PATH, &fields(json!({ "best_of": 2, "stream": true })));
    assert_eq!(reply.error()["param"], "best_of");
    let reply = server.post(PATH, &fields(json!({ "suffix": "the end" })));
    assert_eq!(reply.error()["param"], "suffix");
}

#[test]
fn a_stream_says_what_an_answer_says() {
    let server = Running::small();
    let fields =
        json!({ "prompt": ["Once upon", "Another"], "n": 2, "temperature": 1, "seed": 5, "logprobs": 2, "echo": true });
    let whole = server.complete(greedy(fields.clone()));
    let stream = json!({ "stream": true, "stream_options": { "include_usage": true } });
    let chunks = server.post(PATH, &greedy(with(fields, stream))).events();
    let (usage, chunks) = chunks.split_last().unwrap();
    assert_eq!((&usage["choices"], &usage["usage"]), (&json!([]), &whole["usage"]));
    for (i, expected) in whole["choices"].as_array().unwrap().iter().enumerate() {
        let own: Vec<&Value> = chunks.iter().map(|c| &c["choices"][0]).filter(|choice| choice["index"] == i).collect();
        let text: String = own.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
        assert_eq!(text, expected["text"].as_str().unwrap());
        for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            let joined: Vec<Value> =
                own.iter().flat_map(|choice| choice["logprobs"][list].as_array().unwrap().clone()).collect();
            assert_eq!(json!(joined), expected["logprobs"][list], "{list}");
        }
        assert_eq!(own.iter().filter(|choice| choice["finish_reason"] == "length").count(), 1);
    }
    assert!(chunks.iter().all(|chunk| chunk["object"] == "text_completion"));
}

#[test]
fn embeddings_of_all_forms() {
    let server = Running::small();
    let path = "/v1/embeddings";
    let ids = |text: &str| server.post("/tokenize", &json!({ "prompt": text })).json()["tokens"].clone();
    let embed = |fields: Value| -> Vec<Vec<f32>> {
        let reply = server.post(path, &fields);
        assert_eq!(reply.status, 200, "{}", reply.text());
        let body = reply.json();
        assert_eq!((&body["object"], &body["model"]), (&json!("list"), &json!("model-f32")));
        assert_eq!(body["usage"]["prompt_tokens"], body["usage"]["total_tokens"]);
        let data = body["data"].as_array().unwrap();
        data.iter()
            .enumerate()
            .map(|(i, item)| {
                assert_eq!((&item["index"], &item["object"]), (&json!(i), &json!("embedding")));
                serde_json::from_value(item["embedding"].clone()).unwrap()
            })
            .collect()
    };
    let [hello] = embed(json!({ "input": "Hello" })).try_into().unwrap();
    let [other] = embed(json!({ "input": "Something else" })).try_into().unwrap();
    let length = |vector: &[f32]| vector.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt();
    assert!((length(&hello) - 1.0).abs() < 1e-6);
    assert_eq!(embed(json!({ "input": ["Something else", "Hello"] })), [other.clone(), hello.clone()]);
    assert_eq!(embed(json!({ "input": ids("Hello") })), vec![hello.clone()]);
    assert_eq!(embed(json!({ "input": [ids("Hello"), ids("Something else")] })), [hello.clone(), other.clone()]);
    let [short] = embed(json!({ "input": "Hello", "dimensions": 8 })).try_into().unwrap();
    assert_eq!(short.len(), 8);
    assert!((length(&short) - 1.0).abs() < 1e-6);
    let scale = length(&hello[..8]);
    assert!(short.iter().zip(&hello).all(|(a, b)| (f64::from(*a) - f64::from(*b) / scale).abs() < 1e-6));
    let body = server.post(path, &json!({ "input": "Hello", "encoding_format": "base64" })).json();
    let text = body["data"][0]["embedding"].as_str().unwrap();
    let bytes = base64::engine::general_purpose::STANDARD.decode(text).unwrap();
    let decoded: Vec<f32> = bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(decoded, hello);
    for (fields, param) in [
        (json!({ "input": "x", "dimensions": hello.len() + 1 }), "dimensions"),
        (json!({ "input": ["x", ""] }), "input[1]"),
        (json!({ "input": [[1, 2], [3, 100000]] }), "input[1]"),
        (json!({ "input": [] }), "input"),
        (json!({ "input": "x", "encoding_format": "int8" }), "encoding_format"),
        (json!({ "input": "Q ".repeat(300) }), "input"),
    ] {
        let reply = server.post(path, &fields);
        assert_eq!((reply.status, &reply.error()["param"]), (400, &json!(param)));
    }
}

#[test]
fn texts_and_tokens() {
    let server = Running::small();
    let body = server.post("/tokenize", &json!({ "prompt": "Hello, world", "return_token_strs": true })).json();
    assert_eq!(body["max_model_len"], 256);
    assert_eq!(body["count"].as_u64().unwrap() as usize, body["tokens"].as_array().unwrap().len());
    let strings: String = body["token_strs"].as_array().unwrap().iter().map(|s| s.as_str().unwrap()).collect();
    assert_eq!(strings, "Hello, world");
    assert_eq!(server.post("/detokenize", &json!({ "tokens": body["tokens"] })).json()["prompt"], "Hello, world");
    assert_eq!(server.post("/detokenize", &json!({ "tokens": [999_999] })).error()["param"], "tokens");
    assert_eq!(server.post("/tokenize", &json!({})).error()["param"], "prompt");
    let messages = json!({ "messages": [{ "role": "user", "content": "Hi" }] });
    let prompt = server.post("/apply-template", &messages).json()["prompt"].clone();
    assert_eq!(prompt, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    let ids = server.post("/tokenize", &messages).json()["tokens"].clone();
    assert_eq!(server.post("/tokenize", &json!({ "prompt": prompt })).json()["tokens"], ids);
    let info = server.get("/tokenizer_info").json();
    let end = json!({ "prompt": info["eos_token"], "add_special_tokens": false });
    assert_eq!(server.post("/tokenize", &end).json()["count"], 1, "{info}");
    assert!(info["chat_template"].as_str().unwrap().contains("<|im_start|>"), "{info}");
    assert_eq!(info["model_max_length"], 256);
}

#[test]
fn models_by_name() {
    let mut options = support::options(128);
    options.aliases = vec![("small".into(), "model-f32".into())];
    let server = Running::start(options);
    let list = server.get("/v1/models").json();
    assert_eq!(list["object"], "list");
    let first = &list["data"][0];
    assert_eq!(
        (&first["id"], &first["object"], &first["max_model_len"]),
        (&json!("model-f32"), &json!("model"), &json!(128))
    );
    assert!(first["created"].is_u64() && first["owned_by"].is_string() && first.get("parent").is_some());
    assert_eq!(server.get("/v1/models/small").json(), *first);
    assert_eq!(server.get("/v1/models/other").error()["code"], "model_not_found");
    // Where there is one model, every name means it, and the answer says which it is.
    for name in [json!("small"), json!("model-f32"), json!("gpt-4o"), Value::Null] {
        assert_eq!(server.complete(greedy(json!({ "model": name })))["model"], "model-f32");
    }
}

#[test]
fn several_models() {
    let mut options = support::options(128);
    options.aliases =
        vec![("llama".into(), model("llama-gqa").to_str().unwrap().into()), ("second".into(), "llama".into())];
    let server = Running::start(options);
    let ids: Vec<Value> =
        server.get("/v1/models").json()["data"].as_array().unwrap().iter().map(|m| m["id"].clone()).collect();
    assert_eq!(ids, ["model-f32", "llama"]);
    let first = server.complete(greedy(json!({ "model": "model-f32" })));
    let second = server.complete(greedy(json!({ "model": "second" })));
    assert_eq!((&first["model"], &second["model"]), (&json!("model-f32"), &json!("llama")));
    assert_ne!(first["system_fingerprint"], second["system_fingerprint"]);
    let reply = server.post(PATH, &greedy(json!({ "model": "gpt-4o" })));
    assert_eq!(reply.status, 404);
    assert_eq!((&reply.error()["param"], &reply.error()["code"]), (&json!("model"), &json!("model_not_found")));
    let reply = server.post(PATH, &greedy(json!({})));
    assert_eq!((reply.status, &reply.error()["param"]), (400, &json!("model")));
    assert_eq!(server.get("/tokenizer_info").status, 400);
}
