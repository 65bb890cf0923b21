//! Whatever is wrong with a request, it is refused in the interface's form with the field's name, and the next one is
//! answered.

#![allow(clippy::unwrap_used)]

mod support;

use puna_server::Options;
use serde_json::{Value, json};
use support::schema::{Body, Document};
use support::{Reply, Running, chat, with};

/// What a field needs beside it to mean something.
fn beside(field: &str) -> Value {
    match field {
        "stream_options" => json!({ "stream": true }),
        "top_logprobs" => json!({ "logprobs": true }),
        "max_tokens" => json!({ "echo": true }),
        "tool_choice" => json!({ "tools": [{ "type": "function", "function": { "name": "x" } }] }),
        _ => json!({}),
    }
}

/// What is refused though the document allows it: what the model of these tests has not, a text that is no grammar.
fn is_more_than_schemas_say(place: &str, value: &Value) -> bool {
    matches!((place, value.as_str()), ("grammar" | "grammar.definition", Some(_)))
        || (place == "count_experts" && *value == true)
}

/// What is refused because it is less than the block that a prefix has at least.
fn is_less_than_a_block(reply: &Reply, place: &str, value: &Value) -> bool {
    place == "prompt" && value.is_string() && reply.text().contains("whole blocks of 32 are kept")
}

/// What an answer says, without what differs from time to time.
fn told(reply: &Reply) -> (u16, Value) {
    let mut answer = reply.json();
    ["id", "created", "timings", "usage"].iter().for_each(|name| drop(answer.as_object_mut().unwrap().remove(*name)));
    (reply.status, answer)
}

/// Whether a field that an error names is a place, or inside of it; or the list that does not fit together with it, what
/// was to be there in its stead, or the item after it, which is not of its kind.
fn is_within(param: &str, place: &str) -> bool {
    let is_inside = param.strip_prefix(place).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']));
    let is_around = place.strip_suffix("[0]").is_some_and(|list| list.ends_with(".layers") && param == list);
    is_inside
        || is_around
        || matches!((place, param), ("messages", "prompt") | ("prompt", "messages") | ("prompt[0]", "prompt[1]"))
}

/// Sends every strange value at every place of a request, which is allowed or refused by its name. Gives how many.
fn sweep(document: &Document, schema: &Value, path: &str, ask: impl Fn(&Value) -> Reply) -> usize {
    let generates = schema["properties"].get("max_tokens").is_some();
    let base = if generates { json!({ "max_tokens": 1, "temperature": 0 }) } else { json!({}) };
    let plain = with(document.specimen(schema), base.clone());
    let expected = told(&ask(&plain));
    assert_eq!(expected.0, 200, "{path}: {plain}: {}", expected.1);
    let of_tomorrow = with(plain.clone(), json!({ "a field of tomorrow": [1, { "b": null }] }));
    assert_eq!(told(&ask(&of_tomorrow)), expected, "{path}: a field that is not known");
    let bodies = document.bodies(schema);
    for (i, Body { place, value, body }) in bodies.iter().enumerate() {
        let body = with(with(base.clone(), beside(place.split(['.', '[']).next().unwrap())), body.clone());
        let (reply, is_allowed) = (ask(&body), document.allows(schema, &body));
        let what: String = format!("{path} {place} {value}").chars().take(200).collect();
        if reply.status == 200 {
            assert!(is_allowed, "{what} is answered");
        } else {
            assert_eq!(reply.status, 400, "{what}: {}", reply.text());
            let is_refused_anyway =
                is_more_than_schemas_say(place, value) || is_less_than_a_block(&reply, place, value);
            assert!(!is_allowed || is_refused_anyway, "{what} is refused: {}", reply.text());
            let error = reply.error();
            assert_eq!(error["type"], "invalid_request_error", "{what}");
            assert!(error["param"].as_str().is_some_and(|param| is_within(param, place)), "{what}: {error}");
        }
        if bodies.get(i + 1).is_none_or(|next| next.place != *place) {
            assert_eq!(told(&ask(&plain)), expected, "after {what}");
        }
    }
    bodies.len()
}

#[test]
fn every_field_of_every_request() {
    let dir = tempfile::tempdir().unwrap();
    // Every conversation begins with more than a block, so that all can be kept as prefixes.
    let template = Running::small().get("/props").json()["models"][0]["chat_template"].as_str().unwrap().to_owned();
    let template = Some("This is said before everything else. ".repeat(2) + &template);
    let options = Options { template, state_dir: Some(dir.path().to_owned()), ..support::options(512) };
    let direction = std::collections::BTreeMap::from([(1, vec![0.5; 80])]);
    assert!(options.vectors.add("x", puna::ControlVector::new("x", direction).unwrap()));
    let server = Running::start(options);
    let greeting = json!({ "messages": [{ "role": "user", "content": "Hello" }] });
    assert_eq!(server.put("/v1/prefixes/x", &greeting).status, 200);
    let document = Document(server.get("/openapi.json").json());
    let mut swept = std::collections::BTreeMap::new();
    for (path, methods) in document.0["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
            if schema.is_null() {
                continue;
            }
            let here = path.replace("{name}", "x");
            let ask = |body: &Value| match method.as_str() {
                "post" => server.post(&here, body),
                "put" => server.put(&here, body),
                other => panic!("the method {other} is not known here"),
            };
            *swept.entry(method.as_str()).or_insert(0) += sweep(&document, document.resolve(schema), path, ask);
        }
    }
    assert!(swept["post"] > 2000 && swept["put"] > 300, "{swept:?} requests");
}

/// Keywords of JSON Schema, and some that are none.
const KEYWORDS: [&str; 42] = [
    "type",
    "enum",
    "const",
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "if",
    "then",
    "else",
    "$ref",
    "$defs",
    "definitions",
    "$id",
    "$schema",
    "items",
    "additionalItems",
    "prefixItems",
    "contains",
    "minItems",
    "maxItems",
    "uniqueItems",
    "properties",
    "additionalProperties",
    "patternProperties",
    "propertyNames",
    "dependentRequired",
    "required",
    "minProperties",
    "maxProperties",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "title",
    "nullable",
    "x-guidance",
];

#[test]
fn every_keyword_of_a_schema() {
    let server = Running::start(support::options(512));
    let values = [
        json!(-1),
        json!(0),
        json!(1u64 << 62),
        json!(1e308),
        json!("x"),
        Value::Null,
        json!([]),
        json!({}),
        json!(true),
        json!(1.5),
        json!([{}]),
        json!({ "x": {} }),
        json!(["x", 1]),
        json!([[]]),
    ];
    for keyword in KEYWORDS {
        for value in &values {
            let schema = json!({ "type": "object", "properties": { "x": { keyword: value } }, "required": ["x"] });
            let format = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema } });
            let tool = json!({ "type": "function", "function": { "name": "x", "parameters": schema } });
            for (place, fields) in [
                ("response_format.json_schema.schema", json!({ "response_format": format })),
                ("tools", json!({ "tools": [tool], "tool_choice": "required" })),
            ] {
                let reply = server.post("/v1/chat/completions", &chat(with(json!({ "max_tokens": 1 }), fields)));
                if reply.status == 200 {
                    continue;
                }
                let (error, what) = (reply.error(), format!("{keyword}: {value}"));
                assert_eq!(reply.status, 400, "{what}: {error}");
                assert!(error["param"].as_str().is_some_and(|param| is_within(param, place)), "{what}: {error}");
                // It says which keyword, and where.
                let message = error["message"].as_str().unwrap();
                assert!(error["code"] != "unsupported_schema" || message.contains("` at /"), "{what}: {error}");
            }
        }
    }
    server.chat(json!({}));
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
    // It is not tokenized to find that out.
    assert!(reply.text().contains("is 256 tokens, but the prompt has at least "), "{}", reply.text());
    let talk = chat(json!({ "messages": [{ "role": "user", "content": long }] }));
    let reply = server.post("/v1/chat/completions", &talk);
    assert!(reply.text().contains("at least ") && reply.error()["param"] == "messages", "{}", reply.text());
    let reply = server.post("/v1/embeddings", &json!({ "input": ["x", long] }));
    assert!(
        reply.text().contains("the text has at least ") && reply.error()["param"] == "input[1]",
        "{}",
        reply.text()
    );
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
fn whatever_fits_is_taken() {
    const CTX: usize = 8192;
    let server = Running::start(support::options(CTX));
    let text =
        |id: u32| server.post("/detokenize", &json!({ "tokens": [id] })).json()["prompt"].as_str().unwrap().to_owned();
    // The tokens that stand for most, and a mixture of them.
    let mut texts: Vec<String> = (0..512).map(text).filter(|text| !text.contains(['\u{fffd}', '<'])).collect();
    texts.sort_by_key(|text| std::cmp::Reverse(text.len()));
    texts = vec![texts[0].clone(), texts[1].clone(), texts[..8].concat()];
    for text in texts {
        let count = |n: usize| {
            let body = server.post("/tokenize", &json!({ "prompt": text.repeat(n) })).json();
            body["count"].as_u64().unwrap() as usize
        };
        // The first number of repetitions that are too many.
        let (mut fits, mut exceeds) = (1, 4 * CTX);
        while fits + 1 < exceeds {
            let middle = fits.midpoint(exceeds);
            if count(middle) < CTX { fits = middle } else { exceeds = middle }
        }
        let ask = |n: usize| server.post("/v1/completions", &json!({ "prompt": text.repeat(n), "max_tokens": 1 }));
        assert_eq!(ask(fits).status, 200, "{} tokens of {text:?}", count(fits));
        let said = ask(exceeds).error()["message"].as_str().unwrap().to_owned();
        let said = said.split("the prompt has ").nth(1).unwrap();
        let number: usize = said.trim_start_matches("at least ").parse().unwrap();
        let exact = count(exceeds);
        assert!(number == exact || said.starts_with("at least") && (CTX..exact).contains(&number), "{said}, {exact}");
    }
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
        let param = if fields["grammar"].is_null() { "response_format.json_schema.schema" } else { "grammar" };
        let reply = server.post("/v1/chat/completions", &chat(fields.clone()));
        assert_eq!(reply.status, 400, "{fields}: {}", reply.text());
        let error = reply.error();
        assert_eq!(
            (&error["type"], &error["code"], &error["param"]),
            (&json!("invalid_request_error"), &json!("unsatisfiable_grammar"), &json!(param)),
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
    for path in ["/v1/models/%ff", "/v1/control-vectors/%ff", "/v1/prefixes/a%c3"] {
        for method in ["GET", "PUT", "POST", "DELETE"] {
            let reply = support::send(server.address, method, path, &[], b"{}");
            let error = reply.error();
            match reply.status {
                400 => assert_eq!(error["code"], "invalid_path", "{method} {path}"),
                status => assert_eq!((status, &error["code"]), (405, &json!("method_not_allowed")), "{method} {path}"),
            }
        }
    }
}

#[test]
fn bodies_that_are_compressed() {
    let server = Running::small();
    let body = chat(json!({})).to_string();
    let send = |encoding| {
        let headers = [("content-encoding", encoding)];
        support::send(server.address, "POST", "/v1/chat/completions", &headers, body.as_bytes())
    };
    for encoding in ["gzip", "br", "zstd", "identity, gzip", "nonsense"] {
        let reply = send(encoding);
        assert_eq!((reply.status, &reply.error()["code"]), (415, &json!("unsupported_encoding")), "{encoding}");
        assert!(reply.text().contains(encoding) && reply.header("accept-encoding") == Some("identity"));
    }
    assert_eq!(send("identity").status, 200);
}
