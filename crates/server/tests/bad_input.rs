//! Whatever is wrong with a request, it is refused in the interface's form with the field's name, and the next one is
//! answered.

#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use support::{Running, chat, with};

/// Values that hardly any field takes.
fn oddities(most: Value) -> Vec<Value> {
    vec![
        json!(-1),
        json!(0),
        most,
        json!(1e308),
        json!("x"),
        Value::Null,
        json!([]),
        json!({}),
        json!(true),
        json!(1.5),
    ]
}

/// A field, the first number above its range, and whether it takes a value of [`oddities`].
type Field = (&'static str, Value, fn(&Value) -> bool);

fn null(value: &Value) -> bool {
    value.is_null()
}

fn count_from(value: &Value, least: u64, most: u64) -> bool {
    value.is_null() || value.as_u64().is_some_and(|n| (least..=most).contains(&n))
}

fn number(value: &Value, least: f64, most: f64) -> bool {
    value.is_null() || value.as_f64().is_some_and(|x| (least..=most).contains(&x))
}

fn flag(value: &Value) -> bool {
    value.is_null() || value.is_boolean()
}

fn object(value: &Value) -> bool {
    value.is_null() || value.is_object()
}

/// What both kinds of requests have.
fn common() -> Vec<Field> {
    vec![
        ("temperature", json!(2.1), |v| number(v, 0.0, 2.0)),
        ("top_p", json!(1.1), |v| number(v, 0.0, 1.0)),
        ("min_p", json!(1.1), |v| number(v, 0.0, 1.0)),
        ("top_k", json!(1u64 << 31), |v| *v == -1 || count_from(v, 0, 1 << 30)),
        ("repetition_penalty", json!(100.1), |v| number(v, 0.01, 100.0)),
        ("presence_penalty", json!(2.1), |v| number(v, -2.0, 2.0)),
        ("frequency_penalty", json!(2.1), |v| number(v, -2.0, 2.0)),
        ("n", json!(129), |v| count_from(v, 1, 128)),
        ("seed", json!(2e19), |v| v.is_null() || v.is_i64()),
        ("min_tokens", json!(1u64 << 32), |v| count_from(v, 0, 0)),
        ("stop", json!(vec!["x"; 65]), |v| null(v) || v == "x" || *v == json!([])),
        ("stop_token_ids", json!([1u64 << 32]), |v| null(v) || *v == json!([])),
        ("logit_bias", json!({ "5": 101 }), |v| null(v) || *v == json!({})),
        ("ignore_eos", json!("true"), flag),
        ("skip_special_tokens", json!(2), flag),
        ("prompt_logprobs", json!(21), |v| count_from(v, 0, 20)),
        ("stream", json!(2), flag),
        ("model", json!(5), |v| null(v) || v.is_string()),
    ]
}

/// Sends every field with every oddity.
fn matrix(server: &Running, path: &str, base: &Value, fields: &[Field]) {
    for (field, most, takes) in fields {
        for value in oddities(most.clone()) {
            let body = with(base.clone(), json!({ *field: value }));
            let reply = server.post(path, &body);
            if takes(&value) {
                assert_eq!(reply.status, 200, "{path} {field} {value}: {}", reply.text());
                continue;
            }
            assert_eq!(reply.status, 400, "{path} {field} {value}: {}", reply.text());
            let (error, param) = (reply.error(), reply.error()["param"].clone());
            let param = param.as_str().unwrap_or_else(|| panic!("{path} {field} {value}: no param in {error}"));
            assert!(param.starts_with(field), "{path} {field} {value}: {error}");
            assert_eq!(error["type"], "invalid_request_error");
        }
    }
    assert_eq!(server.post(path, base).status, 200);
}

#[test]
fn every_field_of_a_chat() {
    let server = Running::small();
    let mut fields = common();
    fields.extend([
        ("messages", json!([{ "role": "nobody", "content": "x" }]), (|_| false) as fn(&Value) -> bool),
        ("max_tokens", json!(-2), |v| count_from(v, 1, u64::MAX)),
        ("max_completion_tokens", json!(-2), |v| count_from(v, 1, u64::MAX)),
        ("logprobs", json!(2), flag),
        ("top_logprobs", json!(21), |v| count_from(v, 0, 0)),
        ("stream_options", json!({ "include_usage": 1 }), null),
        ("tools", json!([{ "type": "function", "function": {} }]), |v| null(v) || *v == json!([])),
        ("tool_choice", json!({ "type": "function", "function": { "name": "none" } }), null),
        ("reasoning_effort", json!(1), |v| null(v) || v.is_string()),
        ("chat_template_kwargs", json!(1), object),
        ("add_generation_prompt", json!(2), flag),
        ("continue_final_message", json!(2), |v| flag(v)),
    ]);
    matrix(&server, "/v1/chat/completions", &chat(json!({ "max_tokens": 1 })), &fields);
}

#[test]
fn every_field_of_a_completion() {
    let server = Running::small();
    let mut fields = common();
    fields.extend([
        ("prompt", json!([1u64 << 32]), (|v| v == "x") as fn(&Value) -> bool),
        ("max_tokens", json!(-2), |v| count_from(v, 1, u64::MAX)),
        ("logprobs", json!(21), |v| count_from(v, 0, 20)),
        ("best_of", json!(129), |v| count_from(v, 1, 128)),
        ("echo", json!(2), flag),
        ("suffix", json!(2), null),
    ]);
    matrix(&server, "/v1/completions", &json!({ "prompt": "x", "max_tokens": 1, "temperature": 0 }), &fields);
}

#[test]
fn every_field_of_the_rest() {
    let server = Running::small();
    let is_text = |v: &Value| v == "x";
    let model: Field = ("model", json!(5), |v| null(v) || v.is_string());
    let input: Field = ("input", json!([512]), is_text);
    let dimensions: Field = ("dimensions", json!(100_000), |v| count_from(v, 1, 64));
    let format: Field = ("encoding_format", json!(1), null);
    matrix(&server, "/v1/embeddings", &json!({ "input": "x" }), &[input, dimensions, format, model.clone()]);
    let prompt: Field = ("prompt", json!(1), is_text);
    let adds: Field = ("add_special_tokens", json!(2), flag);
    let strings: Field = ("return_token_strs", json!(2), flag);
    matrix(&server, "/tokenize", &json!({ "prompt": "x" }), &[prompt, adds, strings, model.clone()]);
    let tokens: Field = ("tokens", json!([512]), |v| *v == json!([]));
    matrix(&server, "/detokenize", &json!({ "tokens": [5] }), &[tokens, model.clone()]);
    let messages: Field = ("messages", json!(1), |_| false);
    matrix(&server, "/apply-template", &chat(json!({})), &[messages, model]);
}

#[test]
fn messages_that_are_none() {
    let server = Running::small();
    let user = json!({ "role": "user", "content": "x" });
    for (message, param) in [
        (json!(7), "messages[1]"),
        (json!({}), "messages[1].role"),
        (json!({ "role": 5 }), "messages[1].role"),
        (json!({ "role": "user", "content": 3 }), "messages[1].content"),
        (json!({ "role": "user", "content": { "text": "x" } }), "messages[1].content"),
        (json!({ "role": "user", "content": ["x"] }), "messages[1].content[0]"),
        (json!({ "role": "user", "content": [{}] }), "messages[1].content[0].type"),
        (json!({ "role": "user", "content": [{ "type": "text" }] }), "messages[1].content[0].text"),
        (json!({ "role": "user", "content": [{ "type": "smell" }] }), "messages[1].content[0].type"),
        (json!({ "role": "user", "content": "x", "name": 1 }), "messages[1].name"),
        (json!({ "role": "assistant", "tool_calls": {} }), "messages[1].tool_calls"),
        (json!({ "role": "assistant", "tool_calls": [1] }), "messages[1].tool_calls[0]"),
        (json!({ "role": "assistant", "tool_calls": [{ "function": {} }] }), "messages[1].tool_calls[0].function.name"),
    ] {
        let reply = server.post("/v1/chat/completions", &chat(json!({ "messages": [user, message] })));
        assert_eq!((reply.status, &reply.error()["param"]), (400, &json!(param)), "{message}");
    }
}

#[test]
fn bodies_that_are_no_json() {
    let server = Running::small();
    let quoted = |text: &[u8]| [b"{\"prompt\": \"".as_slice(), text, b"\"}"].concat();
    let bodies: Vec<Vec<u8>> = vec![
        b"".to_vec(),
        b"nonsense".to_vec(),
        b"[]".to_vec(),
        b"null".to_vec(),
        b"{\"prompt\": \"x\"".to_vec(),
        b"\xef\xbb\xbf{\"prompt\": \"x\"}".to_vec(),
        quoted(b"\xff\xfe"),
        quoted(b"\xc4\xe3\xba\xc3"),
        quoted(b"\\ud800"),
        quoted(b"\\udc00 \\ud800"),
        "[".repeat(100_000).into_bytes(),
        "{\"a\":".repeat(100_000).into_bytes(),
        [b"{\"prompt\": ".to_vec(), "[".repeat(100_000).into_bytes(), "]".repeat(100_000).into_bytes(), b"}".to_vec()]
            .concat(),
        b"{\"prompt\": \"x\", \"temperature\": NaN}".to_vec(),
        b"{\"prompt\": \"x\", \"temperature\": 1e999}".to_vec(),
    ];
    for path in
        ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize", "/apply-template"]
    {
        for body in &bodies {
            let reply = server.post_raw(path, body);
            assert_eq!(reply.status, 400, "{path}: {:?}", String::from_utf8_lossy(&body[..body.len().min(40)]));
            // What was sent is not repeated.
            assert!(reply.error()["message"].as_str().unwrap().len() < 200);
        }
        // The last of two fields counts, as everywhere.
        let reply =
            server.post_raw(path, b"{\"tokens\": 1, \"prompt\": 1, \"input\": 1, \"messages\": 1, \"messages\": 2}");
        assert_eq!(reply.status, 400);
    }
    server.chat(json!({}));
}

#[test]
fn long_strings() {
    let server = Running::small();
    let long = "a".repeat(10 << 20);
    let reply = server.post("/v1/completions", &json!({ "prompt": long }));
    assert_eq!((reply.status, &reply.error()["code"]), (400, &json!("context_length_exceeded")));
    for (fields, param) in [
        (json!({ "stop": long }), "stop[0]"),
        (json!({ "tool_choice": long }), "tool_choice"),
        (json!({ "messages": [{ "role": long, "content": "x" }] }), "messages[0].role"),
    ] {
        let reply = server.post("/v1/chat/completions", &chat(fields));
        assert_eq!((reply.status, &reply.error()["param"]), (400, &json!(param)));
        assert!(reply.body.len() < 1000);
    }
    // Where every name is taken for the only model.
    server.chat(json!({ "model": long }));
    server.chat(json!({ "user": long }));
}

#[test]
fn what_the_model_does_not_have() {
    let server = Running::small();
    for (fields, param) in [
        (json!({ "logit_bias": { "512": 1 } }), "logit_bias"),
        (json!({ "logit_bias": { "x": 1 } }), "logit_bias"),
        (json!({ "logit_bias": { "5": "1" } }), "logit_bias.5"),
        (json!({ "stop_token_ids": [512] }), "stop_token_ids"),
        (json!({ "min_tokens": 9 }), "min_tokens"),
        (json!({ "stream_options": { "include_usage": true } }), "stream_options"),
        (json!({ "top_logprobs": 3 }), "top_logprobs"),
        (json!({ "tool_choice": "required" }), "tool_choice"),
        (json!({ "chat_template_kwargs": { "messages": [] } }), "chat_template_kwargs.messages"),
        (json!({ "chat_template_kwargs": { "bos_token": "<|im_end|>" } }), "chat_template_kwargs.bos_token"),
    ] {
        let reply = server.post("/v1/chat/completions", &chat(fields.clone()));
        assert_eq!((reply.status, &reply.error()["param"]), (400, &json!(param)), "{fields}");
    }
    let reply = server.post("/v1/completions", &json!({ "prompt": [5, 512] }));
    assert_eq!((reply.status, &reply.error()["param"]), (400, &json!("prompt")));
    let reply = server.post("/v1/completions", &json!({ "prompt": "" }));
    assert_eq!((reply.status, &reply.error()["param"]), (400, &json!("prompt")));
}

#[test]
fn grammars_that_nothing_satisfies() {
    let server = Running::small();
    let schema = |schema| json!({ "response_format": { "type": "json_schema", "json_schema": { "schema": schema } } });
    for fields in [
        schema(json!({ "$ref": "#" })),
        schema(json!({ "$ref": "#/$defs/a", "$defs": { "a": { "$ref": "#/$defs/b" }, "b": { "$ref": "#/$defs/a" } } })),
        json!({ "grammar": "start: start" }),
    ] {
        let reply = server.post("/v1/chat/completions", &chat(fields.clone()));
        assert_eq!(reply.status, 400, "{fields}: {}", reply.text());
        let error = reply.error();
        assert_eq!(
            (&error["type"], &error["code"]),
            (&json!("invalid_request_error"), &json!("unsatisfiable_grammar")),
            "{fields}"
        );
    }
    // One that never ends is satisfied by each token and ends by length.
    let endless = server.post("/v1/chat/completions", &chat(json!({ "grammar": "start: a\na: \"x\" a" })));
    assert_eq!((endless.status, &endless.json()["choices"][0]["finish_reason"]), (200, &json!("length")));
    server.chat(json!({}));
}

#[test]
fn paths_and_methods_that_are_none() {
    let server = Running::small();
    let reply = server.get("/v1/nothing");
    assert_eq!((reply.status, &reply.error()["code"]), (404, &json!("unknown_url")));
    let reply = server.get("/v1/chat/completions");
    assert_eq!((reply.status, &reply.error()["code"]), (405, &json!("method_not_allowed")));
    assert_eq!(server.post("/health", &json!({})).status, 405);
    assert_eq!(server.get("/v1/models/%ff").status / 100, 4);
}
