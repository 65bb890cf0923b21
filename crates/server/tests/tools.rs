//! Answers of a form: JSON of a schema, grammars, calls of tools; and reasoning in a field of its own.

#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use support::{Running, chat, with};

const PATH: &str = "/v1/chat/completions";

fn tool(name: &str) -> Value {
    let parameters = json!({
        "type": "object", "required": ["city", "days"], "additionalProperties": false,
        "properties": { "city": { "enum": ["Puno", "Cusco"] }, "days": { "type": "integer", "minimum": 1, "maximum": 9 } },
    });
    json!({ "type": "function", "function": { "name": name, "description": "Tells the weather", "parameters": parameters } })
}

fn with_tools(choice: Value) -> Value {
    json!({
        "tools": [tool("weather"), tool("climate")], "tool_choice": choice, "max_tokens": 200, "ignore_eos": false,
        "temperature": 1, "seed": 5,
    })
}

fn check_call(call: &Value, names: &[&str]) {
    assert_eq!(call["type"], "function");
    assert!(call["id"].as_str().is_some_and(|id| !id.is_empty()));
    assert!(names.contains(&call["function"]["name"].as_str().unwrap()), "{call}");
    let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    assert!(["Puno", "Cusco"].contains(&arguments["city"].as_str().unwrap()));
    assert!((1..=9).contains(&arguments["days"].as_i64().unwrap()));
}

#[test]
fn tools_are_called_when_they_must_be() {
    let server = Running::start(support::options(1024));
    for (choice, names) in [
        (json!("required"), vec!["weather", "climate"]),
        (json!({ "type": "function", "function": { "name": "climate" } }), vec!["climate"]),
    ] {
        let fields = with(with_tools(choice), json!({ "parallel_tool_calls": false }));
        let body = server.chat(fields.clone());
        let choice = &body["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{choice}");
        assert!(choice["message"]["content"].is_null(), "{choice}");
        let calls = choice["message"]["tool_calls"].as_array().unwrap();
        assert_eq!(calls.len(), 1);
        check_call(&calls[0], &names);
        // A stream tells the same in pieces: what identifies a call comes once, arguments are fragments of a string.
        let chunks = server.post(PATH, &chat(with(fields, json!({ "stream": true })))).events();
        let (mut name, mut arguments, mut ids, mut types) = (String::new(), String::new(), 0, 0);
        for chunk in &chunks {
            for call in chunk["choices"][0]["delta"]["tool_calls"].as_array().into_iter().flatten() {
                assert_eq!(call["index"], 0);
                assert!(call["function"].is_object());
                name += call["function"]["name"].as_str().unwrap_or("");
                arguments += call["function"]["arguments"].as_str().unwrap();
                ids += usize::from(call["id"].is_string());
                types += usize::from(call["type"] == "function");
            }
        }
        assert_eq!((ids, types), (1, 1));
        assert_eq!(name, calls[0]["function"]["name"].as_str().unwrap());
        assert_eq!(arguments, calls[0]["function"]["arguments"].as_str().unwrap());
        let last = &chunks.last().unwrap()["choices"][0];
        assert_eq!((&last["delta"], &last["finish_reason"]), (&json!({}), &json!("tool_calls")));
    }
}

#[test]
fn several_calls_are_told_apart_by_their_index() {
    let server = Running::start(support::options(2048));
    let mut several = 0;
    for seed in 0..8 {
        let fields = with(with_tools(json!("required")), json!({ "seed": seed, "max_tokens": 600 }));
        let whole = server.chat(fields.clone())["choices"][0].clone();
        let calls = whole["message"]["tool_calls"].as_array().unwrap();
        if whole["finish_reason"] == "tool_calls" {
            calls.iter().for_each(|call| check_call(call, &["weather", "climate"]));
        }
        // Put together as guidellm and Open WebUI do it: what has the same index is one call, and strings are joined.
        let chunks = server.post(PATH, &chat(with(fields, json!({ "stream": true })))).events();
        let (mut joined, mut ids) = (Vec::<(String, String)>::new(), Vec::new());
        for piece in chunks.iter().flat_map(|c| c["choices"][0]["delta"]["tool_calls"].as_array().into_iter().flatten())
        {
            let index = piece["index"].as_u64().unwrap() as usize;
            if index == joined.len() {
                assert_eq!(piece["type"], "function");
                ids.push(piece["id"].as_str().unwrap().to_owned());
                joined.push((String::new(), String::new()));
            } else {
                assert!(
                    index + 1 == joined.len() && piece.get("id").is_none() && piece.get("type").is_none(),
                    "{piece}"
                );
            }
            joined[index].0 += piece["function"]["name"].as_str().unwrap_or("");
            joined[index].1 += piece["function"]["arguments"].as_str().unwrap();
        }
        let of = |call: &Value| ["name", "arguments"].map(|name| call["function"][name].as_str().unwrap().to_owned());
        let expected: Vec<(String, String)> = calls.iter().map(of).map(|[name, arguments]| (name, arguments)).collect();
        assert_eq!(joined, expected);
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), calls.len(), "an id is there twice");
        several += usize::from(calls.len() > 1);
    }
    assert!(several > 0, "no answer has several calls");
}

#[test]
fn a_call_that_is_cut_is_none_to_be_made() {
    let server = Running::start(support::options(1024));
    let fields = with(with_tools(json!("required")), json!({ "parallel_tool_calls": false }));
    let whole = server.chat(fields.clone())["choices"][0]["message"]["tool_calls"][0]["function"].clone();
    let arguments: Vec<char> = whole["arguments"].as_str().unwrap().chars().collect();
    let (mut cut, mut kept) = (0, 0);
    for at in 0..arguments.len() - 1 {
        let stop: String = arguments[at..at + 2].iter().collect();
        let fields = with(fields.clone(), json!({ "stop": stop }));
        let choice = server.chat(fields.clone())["choices"][0].clone();
        let chunks = server.post(PATH, &chat(with(fields, json!({ "stream": true })))).events();
        assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], choice["finish_reason"], "{stop:?}");
        let calls = choice["message"]["tool_calls"].as_array().into_iter().flatten();
        let is_whole =
            |call: &Value| serde_json::from_str::<Value>(call["function"]["arguments"].as_str().unwrap()).is_ok();
        let whole: Vec<bool> = calls.map(is_whole).collect();
        let expected = if whole == [true] { "tool_calls" } else { "stop" };
        assert_eq!(choice["finish_reason"], expected, "{stop:?}: {choice}");
        cut += usize::from(whole == [false]);
        kept += usize::from(whole == [true]);
    }
    assert!(cut > 3, "{cut} are cut, {kept} are whole");
}

/// What a stream says, put together: null where no piece has content.
fn streamed(server: &Running, fields: &Value) -> Value {
    let chunks = server.post(PATH, &chat(with(fields.clone(), json!({ "stream": true })))).events();
    let contents = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str());
    contents.fold(Value::Null, |all, text| json!(all.as_str().unwrap_or("").to_owned() + text))
}

#[test]
fn white_space_before_calls_is_nothing_said() {
    let server = Running::start(support::options(4096));
    let id = |text: &str| server.post("/tokenize", &json!({ "prompt": text })).json()["tokens"][0].to_string();
    let blank = json!({ id("\n"): 100, id(" "): 100 });
    for choice in [json!("required"), json!({ "type": "function", "function": { "name": "climate" } })] {
        for seed in 0..3 {
            let fields = json!({ "logit_bias": blank, "parallel_tool_calls": false, "max_tokens": 4000, "seed": seed });
            let fields = with(with_tools(choice.clone()), with(fields, json!({ "logprobs": true })));
            let choice = server.chat(fields.clone())["choices"][0].clone();
            let (message, tokens) = (&choice["message"], choice["logprobs"]["content"].as_array().unwrap());
            assert!(tokens[0]["token"].as_str().unwrap().trim().is_empty(), "{}", tokens[0]);
            assert_eq!((&message["content"], message["tool_calls"].as_array().unwrap().len()), (&Value::Null, 1));
            assert_eq!(streamed(&server, &fields), Value::Null);
        }
    }
    // Without calls it is what was said, at last; and so is it before a word.
    let auto = with(with_tools(json!("auto")), json!({ "max_tokens": 6, "ignore_eos": true }));
    let word = with(blank.clone(), json!({ id("A"): 100 }));
    for bias in [blank, word] {
        for seed in 0..4 {
            let fields = with(auto.clone(), json!({ "logit_bias": bias, "seed": seed }));
            let content = server.chat(fields.clone())["choices"][0]["message"]["content"].clone();
            assert_eq!(content.as_str().map(str::len), Some(6), "{content}");
            assert_eq!(streamed(&server, &fields), content);
        }
    }
}

#[test]
fn tools_are_not_called_when_they_must_not_be() {
    let server = Running::start(support::options(1024));
    let with_none = with(with_tools(json!("none")), json!({ "max_tokens": 8, "ignore_eos": true }));
    let without = with(with_none.clone(), json!({ "tools": null, "tool_choice": null }));
    assert_eq!(server.chat(with_none)["choices"], server.chat(without)["choices"]);
    // Free to choose, a model that knows nothing says something.
    let body = server.chat(with(with_tools(json!("auto")), json!({ "max_tokens": 8, "temperature": 0 })));
    assert!(body["choices"][0]["message"]["content"].is_string());
}

#[test]
fn answers_are_json_of_a_schema() {
    let server = Running::start(support::options(1024));
    let schema = json!({
        "type": "object", "required": ["ok", "names"], "additionalProperties": false,
        "properties": { "ok": { "type": "boolean" }, "names": { "type": "array", "items": { "enum": ["a", "b"] }, "maxItems": 3 } },
    });
    let format = json!({ "type": "json_schema", "json_schema": { "name": "x", "strict": true, "schema": schema } });
    for seed in 0..4 {
        let fields = json!({
            "response_format": format, "temperature": 1, "seed": seed, "max_tokens": 300, "ignore_eos": false,
        });
        let body = server.chat(fields.clone());
        assert_eq!(body["choices"][0]["finish_reason"], "stop");
        let text = body["choices"][0]["message"]["content"].as_str().unwrap();
        let value: Value = serde_json::from_str(text).unwrap();
        assert!(value["ok"].is_boolean() && value["names"].as_array().unwrap().len() <= 3);
        let chunks = server.post(PATH, &chat(with(fields, json!({ "stream": true })))).events();
        let streamed: String = chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!(streamed, text);
    }
    // The same of a completion.
    let fields = json!({ "response_format": format, "max_tokens": 300, "temperature": 0 });
    let text = server.complete(fields)["choices"][0]["text"].as_str().unwrap().to_owned();
    assert!(serde_json::from_str::<Value>(&text).unwrap()["ok"].is_boolean());
}

#[test]
fn grammars_are_the_same_when_asked_for_again() {
    let server = Running::start(support::options(512));
    let schema = json!({ "type": "object", "required": ["n"], "properties": { "n": { "enum": [1, 2, 3] } },
        "additionalProperties": false });
    let format = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema } });
    let ask = |seed: u64| {
        let fields = json!({ "response_format": format, "temperature": 1, "seed": seed, "max_tokens": 300,
            "ignore_eos": false });
        server.chat(fields)["choices"].clone()
    };
    let first: Vec<Value> = (0..4).map(ask).collect();
    assert_eq!(first, (0..4).map(ask).collect::<Vec<Value>>());
}

#[test]
fn answers_are_of_a_grammar() {
    let server = Running::start(support::options(1024));
    for grammar in [
        json!("start: (\"yes\" | \"no\") \"!\""),
        json!({ "syntax": "lark", "definition": "start: (\"yes\" | \"no\") \"!\"" }),
        json!({ "syntax": "regex", "definition": "(yes|no)!" }),
    ] {
        let body = server.chat(json!({ "grammar": grammar, "max_tokens": 50, "ignore_eos": false }));
        let text = body["choices"][0]["message"]["content"].as_str().unwrap();
        assert!(["yes!", "no!"].contains(&text), "{text}");
        assert_eq!(body["choices"][0]["finish_reason"], "stop");
    }
}

#[test]
fn what_cannot_be_enforced_is_refused_by_name() {
    let server = Running::start(support::options(1024));
    let schema = |schema: Value| json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "x", "schema": schema } } });
    let broken = json!({ "type": "object", "properties": { "a": { "type": "no such type" } } });
    let mut bad_tool = with_tools(json!("required"));
    bad_tool["tools"][1]["function"]["parameters"] = broken.clone();
    for (fields, param) in [
        (schema(broken), "response_format.json_schema.schema"),
        (schema(json!(5)), "response_format.json_schema.schema"),
        (json!({ "response_format": { "type": "xml" } }), "response_format.type"),
        (json!({ "response_format": {} }), "response_format.type"),
        (json!({ "response_format": 1 }), "response_format"),
        (json!({ "grammar": 1 }), "grammar"),
        (json!({ "grammar": "start: (" }), "grammar"),
        (json!({ "grammar": { "syntax": "ebnf", "definition": "x" } }), "grammar.syntax"),
        (json!({ "grammar": { "syntax": "regex", "definition": "(" } }), "grammar.definition"),
        (json!({ "grammar": "start: \"x\"", "response_format": { "type": "json_object" } }), "grammar"),
        (with(with_tools(json!("auto")), json!({ "response_format": { "type": "json_object" } })), "response_format"),
        (bad_tool, "tools[1].function.parameters"),
        (with_tools(json!({ "type": "function", "function": { "name": "other" } })), "tool_choice.function.name"),
    ] {
        let reply = server.post(PATH, &chat(fields.clone()));
        assert_eq!(reply.status, 400, "{fields}: {}", reply.text());
        assert_eq!(reply.error()["param"], param, "{fields}: {}", reply.text());
    }
}

/// A template of models that reason: it opens the reasoning, unless told not to.
const REASONS: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                       <|im_start|>assistant\n{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}\
                       {# <tool_call> </think> #}";

#[test]
fn reasoning_has_a_field_of_its_own() {
    let mut options = support::options(512);
    options.template = Some(REASONS.to_owned());
    let server = Running::start(options);
    let id = server.post("/tokenize", &json!({ "prompt": "A" })).json()["tokens"][0].to_string();
    let fields = json!({ "logit_bias": { id: 100 }, "max_tokens": 5 });
    let body = server.chat(fields.clone());
    let message = &body["choices"][0]["message"];
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("AAAAA"), &json!("")));
    assert_eq!(body["usage"]["completion_tokens_details"]["reasoning_tokens"], 5);
    let chunks = server.post(PATH, &chat(with(fields.clone(), json!({ "stream": true })))).events();
    let deltas: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]).collect();
    assert_eq!(*deltas[0], json!({ "role": "assistant", "reasoning_content": "A" }));
    assert!(deltas[1..5].iter().all(|delta| **delta == json!({ "reasoning_content": "A" })));
    // A template is told not to, in either way.
    for off in [json!({ "reasoning_effort": "none" }), json!({ "chat_template_kwargs": { "enable_thinking": false } })]
    {
        let message = server.chat(with(fields.clone(), off))["choices"][0]["message"].clone();
        assert_eq!((&message["content"], message.get("reasoning_content")), (&json!("AAAAA"), None));
    }
    // JSON comes after the reasoning.
    let format = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": { "enum": [1, 2] } } });
    let close =
        json!({ "response_format": format, "temperature": 1, "seed": 1, "max_tokens": 400, "ignore_eos": false });
    let body = server.chat(close);
    let message = &body["choices"][0]["message"];
    if body["choices"][0]["finish_reason"] == "stop" {
        assert!(["1", "2"].contains(&message["content"].as_str().unwrap().trim()), "{message}");
    } else {
        assert!(message["reasoning_content"].is_string(), "{message}");
    }
}
