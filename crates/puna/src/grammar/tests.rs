use super::*;
use crate::grammar::State;
use puna_text::reply::{CallStyle, REPLY_FORMATS};
use puna_text::{Delta, ReplyOptions, ReplyParser, TokenStream, VocabSpec};
use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::sync::LazyLock;
use std::time::Instant;

/// Tokens of several bytes, as vocabularies have them.
const WORDS: [&str; 14] = [
    "{\"",
    "\":",
    "\", \"",
    "\"}",
    "name",
    " the",
    "tool",
    "_call>",
    "</",
    "<tool_call>",
    "</tool_call>",
    "\n\n",
    "true",
    "[[",
];
/// Control tokens; the last one ends answers.
const CONTROL: [&str; 5] = ["[TOOL_CALLS]", "<|python_tag|>", "[THINK]", "[/THINK]", "<|im_end|>"];

/// Every byte, some words, and control tokens.
fn tokenizer(control: &[&str]) -> Arc<Tokenizer> {
    let printed = |text: &str| -> String { text.bytes().map(byte_level).collect() };
    let bytes = (0..=255u8).map(|byte| byte_level(byte).to_string());
    let words: Vec<String> = bytes.chain(WORDS.iter().map(|word| printed(word))).collect();
    let mut tokens: Vec<&[u8]> = words.iter().map(String::as_bytes).collect();
    tokens.extend(control.iter().map(|text| text.as_bytes()));
    let mut types = vec![1; words.len()];
    types.extend(vec![3; control.len()]);
    let eos = Some(tokens.len() as u32 - 1);
    let spec =
        VocabSpec { model: "gpt2", pre: Some("gpt-2"), tokens, token_type: Some(types), eos, ..VocabSpec::default() };
    Arc::new(Tokenizer::from_vocab(&spec).unwrap())
}

/// GPT-2's character for a byte.
fn byte_level(byte: u8) -> char {
    let prints = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let hidden = (0..byte).filter(|&b| !prints(b)).count() as u32;
    char::from_u32(if prints(byte) { byte.into() } else { 0x100 + hidden }).unwrap()
}

static GRAMMARS: LazyLock<Arc<Grammars>> = LazyLock::new(|| Grammars::new(&tokenizer(&CONTROL)).unwrap());

/// A text that a grammar allows, chosen by chance, after a given beginning; it ends where it may, at times.
fn walk(grammar: &Grammar, seed: u64, beginning: &str, shown: &[&str]) -> Option<String> {
    let tokenizer = grammar.grammars.tokenizer.clone();
    let eog = *tokenizer.eog_ids().first().unwrap();
    let mut rng = ChaCha12Rng::seed_from_u64(seed);
    let mut state = State::new(grammar);
    let mut stream = TokenStream::continuing(&*tokenizer).skip_special(true).show(shown);
    let mut text = String::new();
    let options = puna_text::EncodeOptions { special: true, bos: puna_text::AddBos::No };
    let mut is_forced = true;
    let mut forced = tokenizer.encode(beginning, options).unwrap().into_iter();
    for _ in 0..4000 {
        let mask = state.mask().unwrap();
        let is_allowed = |id: u32| mask.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1);
        let allowed: Vec<u32> = (0..tokenizer.vocab_size() as u32).filter(|&id| is_allowed(id)).collect();
        if allowed.len() > 100 && rng.next_u32() % 16 == 0 && forced.len() == 0 {
            // By chance a text rarely comes to its mark.
            let mark = ["</parameter>", "</think>", "[/THINK]"][rng.next_u32() as usize % 3];
            let ids = tokenizer.encode(mark, options).unwrap();
            forced = if is_allowed(ids[0]) { ids.into_iter() } else { Vec::new().into_iter() };
            is_forced = false;
        }
        let next = match forced.next() {
            Some(id) if is_allowed(id) => id,
            Some(_) if !is_forced => {
                forced = Vec::new().into_iter();
                continue;
            }
            Some(id) => panic!("{:?} is not allowed after {text:?}", tokenizer.token_text(id)),
            // Long texts are dull: quotes and tags come more often than by chance.
            None if is_allowed(eog) && rng.next_u32() % 3 == 0 => return Some(text),
            None => {
                let short: Vec<u32> =
                    allowed.iter().copied().filter(|&id| b"\"<\\]},.".contains(&(id as u8)) && id < 256).collect();
                let from = if short.is_empty() || rng.next_u32() % 3 > 0 { &allowed } else { &short };
                from[rng.next_u32() as usize % from.len()]
            }
        };
        if next == eog {
            return Some(text);
        }
        text.extend(stream.push(next));
        if state.accept(next).unwrap() {
            return Some(text);
        }
    }
    None
}

/// Whether a value is valid, by the keywords that the tests use.
fn is_valid(value: &Value, schema: &Value, root: &Value) -> bool {
    let Value::Object(schema) = schema else { return schema == &json!(true) };
    schema.iter().all(|(keyword, arg)| {
        let list = || arg.as_array().unwrap().iter();
        let n = || arg.as_f64().unwrap();
        let is = |name: &str| match name {
            "integer" => value.as_f64().is_some_and(|n| n.fract() == 0.0),
            "number" => value.is_number(),
            "string" => value.is_string(),
            "boolean" => value.is_boolean(),
            "null" => value.is_null(),
            "array" => value.is_array(),
            _ => value.is_object(),
        };
        let len = value.as_str().map(|text| text.chars().count() as f64);
        let items = value.as_array().map(|items| items.len() as f64);
        let equal = |a: &Value, b: &Value| a == b || a.as_f64().is_some() && a.as_f64() == b.as_f64();
        match keyword.as_str() {
            "type" => arg.as_str().map_or_else(|| list().any(|name| is(name.as_str().unwrap())), is),
            "const" => equal(value, arg),
            "enum" => list().any(|one| equal(one, value)),
            "anyOf" => list().any(|one| is_valid(value, one, root)),
            "oneOf" => list().filter(|one| is_valid(value, one, root)).count() == 1,
            "allOf" => list().all(|one| is_valid(value, one, root)),
            "$ref" => is_valid(value, root.pointer(&arg.as_str().unwrap()[1..]).unwrap(), root),
            "minLength" => len.is_none_or(|len| len >= n()),
            "maxLength" => len.is_none_or(|len| len <= n()),
            "minItems" => items.is_none_or(|len| len >= n()),
            "maxItems" => items.is_none_or(|len| len <= n()),
            "maximum" => value.as_f64().is_none_or(|value| value <= n()),
            "minimum" => value.as_f64().is_none_or(|value| value >= n()),
            "exclusiveMaximum" => value.as_f64().is_none_or(|value| value < n()),
            "multipleOf" => value.as_f64().is_none_or(|value| value % n() == 0.0),
            "items" if arg.is_array() => value.as_array().is_none_or(|items| {
                let rest = schema.get("additionalItems").unwrap_or(&Value::Bool(true));
                let one = |i: usize| arg.get(i).unwrap_or(rest);
                items.iter().enumerate().all(|(i, item)| is_valid(item, one(i), root))
            }),
            "items" => value.as_array().is_none_or(|items| {
                let before = schema.get("prefixItems").map_or(0, |list| list.as_array().unwrap().len());
                items.iter().skip(before).all(|item| is_valid(item, arg, root))
            }),
            "prefixItems" => value
                .as_array()
                .is_none_or(|items| items.iter().zip(list()).all(|(item, one)| is_valid(item, one, root))),
            "required" => value.as_object().is_none_or(|map| list().all(|key| map.contains_key(key.as_str().unwrap()))),
            "properties" => value.as_object().is_none_or(|map| {
                arg.as_object()
                    .unwrap()
                    .iter()
                    .all(|(key, one)| map.get(key).is_none_or(|value| is_valid(value, one, root)))
            }),
            "additionalProperties" => value.as_object().is_none_or(|map| {
                let known = schema.get("properties").and_then(Value::as_object);
                map.iter()
                    .filter(|(key, _)| known.is_none_or(|known| !known.contains_key(*key)))
                    .all(|(_, value)| is_valid(value, arg, root))
            }),
            "$schema" | "$defs" | "title" | "description" | "additionalItems" => true,
            other => panic!("{other}"),
        }
    })
}

fn schemas() -> Vec<Value> {
    let point = json!({ "type": "object", "properties": { "x": { "type": "number" }, "y": { "type": "integer", "minimum": -3 } },
        "required": ["x", "y"], "additionalProperties": false });
    let tree = json!({ "$ref": "#/$defs/node", "$defs": { "node": { "type": "object", "properties": {
        "value": { "enum": [1, "two", null, true, 2.5] },
        "children": { "type": "array", "items": { "$ref": "#/$defs/node" }, "maxItems": 2 } },
        "required": ["value"], "additionalProperties": false } } });
    let cat = json!({ "type": "object", "properties": { "kind": { "const": "cat" }, "lives": { "type": "integer", "minimum": 0, "exclusiveMaximum": 10 } },
        "required": ["kind", "lives"], "additionalProperties": false });
    let dog = json!({ "type": "object", "properties": { "kind": { "enum": ["dog"] } }, "required": ["kind"], "additionalProperties": false });
    let text = json!({ "type": "string", "maxLength": 9 });
    vec![
        json!({ "type": "object" }),
        json!(true),
        json!({}),
        point.clone(),
        tree,
        json!({ "type": ["string", "null"], "minLength": 2, "maxLength": 5 }),
        json!({ "type": "array", "prefixItems": [point, { "type": "boolean" }], "items": text, "minItems": 1, "maxItems": 4 }),
        json!({ "anyOf": [{ "type": "integer", "multipleOf": 7, "minimum": -999999, "exclusiveMaximum": 999999 }, { "const": "é\"\\\n" }] }),
        json!({ "oneOf": [{ "$ref": "#/$defs/cat" }, { "$ref": "#/$defs/dog" }], "$defs": { "cat": cat, "dog": dog } }),
        json!({ "allOf": [{ "type": "object", "properties": { "a": { "type": "integer" } } }, { "required": ["a"] }] }),
        json!({ "type": "object", "properties": { "a": text }, "additionalProperties": { "type": "boolean" } }),
        // Keywords that another draft does not have, and ones that belong together but stand apart.
        json!({ "$schema": "http://json-schema.org/draft-04/schema#", "const": 3 }),
        json!({ "$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "prefixItems": [{ "const": 1 }], "items": false }),
        json!({ "type": "array", "items": [{ "type": "boolean" }], "anyOf": [{ "minItems": 1 }], "additionalItems": { "const": 1 } }),
        json!({ "type": "array", "prefixItems": [{ "const": 1 }], "additionalItems": true, "items": { "type": "null" } }),
        json!({ "minimum": 1, "anyOf": [{ "type": "integer" }], "maximum": 12 }),
    ]
}

#[test]
fn answers_are_valid() {
    for schema in schemas() {
        let grammar = GRAMMARS.json_schema(&schema).unwrap();
        let mut ended = 0;
        for seed in 0..30 {
            let Some(text) = walk(&grammar, seed, "", &[]) else { continue };
            let value = match serde_json::from_str(&text) {
                Ok(value) => value,
                // JSON has numbers that Rust has not.
                Err(e) if e.to_string().contains("number out of range") => continue,
                Err(e) => panic!("{schema}: {text:?}: {e}"),
            };
            assert!(is_valid(&value, &schema, &schema), "{schema}: {text}");
            ended += 1;
        }
        assert!(ended > 15, "{schema}: only {ended} ended");
    }
}

#[test]
fn other_grammars() {
    let date = GRAMMARS.regex(r"[0-9]{4}-[0-9]{2}").unwrap();
    let lark = GRAMMARS.lark("start: \"a\" b+\nb: /[xy]/ \"!\"").unwrap();
    for seed in 0..20 {
        let text = walk(&date, seed, "", &[]).unwrap();
        let is_good = |(i, c): (usize, char)| if i == 4 { c == '-' } else { c.is_ascii_digit() };
        assert!(text.len() == 7 && text.chars().enumerate().all(is_good), "{text}");
        let text = walk(&lark, seed, "", &[]).unwrap();
        let rest = text.strip_prefix('a').unwrap();
        assert!(!rest.is_empty() && rest.replace("x!", "").replace("y!", "").is_empty(), "{text}");
        let text = walk(&GRAMMARS.json_object().unwrap(), seed, "{\"a\": ", &[]);
        assert!(text.is_none_or(|text| serde_json::from_str::<Value>(&text).unwrap()["a"] != json!(7) || text.contains('7')));
    }
}

#[track_caller]
fn refused(schema: Value, keyword: &str, at: &str) -> String {
    match GRAMMARS.json_schema(&schema) {
        Err(Error::Schema { keyword: found, at: place, problem }) => {
            assert_eq!((found.as_str(), place.as_str()), (keyword, at), "{schema}: {problem}");
            assert!(!problem.is_empty() && !problem.contains('\n'), "{problem}");
            problem
        }
        other => panic!("{schema}: {other:?}"),
    }
}

#[test]
fn what_cannot_be_enforced_is_named() {
    for keyword in [
        "not",
        "if",
        "then",
        "contains",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "propertyNames",
        "unevaluatedProperties",
        "unevaluatedItems",
        "$dynamicRef",
        "$recursiveRef",
        "minContains",
        "x-guidance",
        "foo",
    ] {
        refused(json!({ keyword: {} }), keyword, &format!("/{keyword}"));
        refused(
            json!({ "type": "object", "properties": { "a/b": { "items": { keyword: 1 } } } }),
            keyword,
            &format!("/properties/a~1b/items/{keyword}"),
        );
    }
    refused(json!({ "type": "array", "uniqueItems": true }), "uniqueItems", "/uniqueItems");
    refused(json!({ "$ref": "http://example.com/" }), "$ref", "/$ref");
    refused(json!({ "items": { "$ref": "#/$defs/none" } }), "$ref", "/items/$ref");
    refused(json!({ "const": 9_007_199_254_740_993_u64 }), "const", "/const");
    refused(json!({ "items": 3 }), "items", "/items");
    refused(json!({ "items": [true], "prefixItems": [true] }), "prefixItems", "/prefixItems");
    refused(json!(3), "", "");
    refused(json!({ "properties": [] }), "properties", "/properties");
    // What only the parser knows.
    let some = json!({ "type": "integer" });
    refused(json!({ "anyOf": [{ "oneOf": [some, { "type": "number" }] }] }), "oneOf", "/anyOf/0/oneOf");
    refused(json!({ "type": "strin" }), "type", "/type");
    refused(json!({ "properties": { "a": { "type": "string", "pattern": "(" } } }), "pattern", "/properties/a/pattern");
    refused(json!({ "type": "string", "pattern": "(?=a)b" }), "pattern", "/pattern");
    refused(
        json!({ "type": "array", "items": { "type": "string", "minLength": -1 } }),
        "minLength",
        "/items/minLength",
    );
    refused(
        json!({ "properties": { "a": { "$ref": "#/$defs/b" } }, "$defs": { "b": { "type": "string", "maxLength": 1.5 } } }),
        "maxLength",
        "/$defs/b/maxLength",
    );
    assert!(GRAMMARS.json_schema(&json!(false)).is_err());
    assert!(GRAMMARS.json_schema(&json!({ "type": "integer", "minimum": 3, "maximum": 2 })).is_err());
    // What needs no enforcement.
    let annotated = json!({ "title": "t", "description": "d", "default": 1, "examples": [2], "$comment": "c", "x-order": 1,
        "type": "integer", "format": "int32", "deprecated": true, "nullable": true, "uniqueItems": false, "$id": "urn:a",
        "$schema": "https://json-schema.org/draft/2020-12/schema", "minimum": 10, "maximum": 19 });
    let grammar = GRAMMARS.json_schema(&annotated).unwrap();
    assert!((10..20).contains(&walk(&grammar, 1, "", &[]).unwrap().trim().parse::<i32>().unwrap()));
}

#[test]
fn hostile_grammars_end_in_errors() {
    let deep = |depth: usize| (0..depth).fold(json!({}), |schema, _| json!({ "items": schema }));
    let mut chain = json!({});
    let n = 6000;
    for i in 0..n {
        chain[format!("d{i}")] = json!({ "type": "array", "items": { "$ref": format!("#/$defs/d{}", (i + 1) % n) } });
    }
    let wide: Vec<Value> = (0..30_000).map(Value::from).collect();
    let objects: Vec<Value> = (0..300).map(|i| json!({ "type": "object", "properties": { format!("a{i}"): { "type": "string", "pattern": "^(a|b)*c{1,200}$" } } })).collect();
    let nested = |open: &str, close: &str, n: usize| format!("start: {}\"a\"{}", open.repeat(n), close.repeat(n));
    let start = Instant::now();
    type Compile = Box<dyn FnOnce() -> Result<Grammar, Error>>;
    let schema = |schema: Value| -> Compile { Box::new(move || GRAMMARS.json_schema(&schema)) };
    let lark = |source: String| -> Compile { Box::new(move || GRAMMARS.lark(&source)) };
    let regex = |source: String| -> Compile { Box::new(move || GRAMMARS.regex(&source)) };
    let bad: Vec<(&str, Compile)> = vec![
        ("depth", schema(deep(100))),
        ("width", schema(json!({ "enum": wide }))),
        ("bytes", schema(json!({ "const": "a".repeat(2 << 20) }))),
        ("parentheses", lark(nested("(", ")", 8000))),
        ("open", lark(nested("(", "", 16_000))),
        ("no start", lark("a: \"b\"".into())),
        ("syntax", lark("start: \"".into())),
        ("long", lark("start: \"a\"\n".repeat(10_000))),
        ("regex", regex("(".repeat(16_000))),
        ("regex nesting", regex(format!("{}a{}", "(".repeat(8000), ")".repeat(8000)))),
        ("long regex", regex("a".repeat(17_000))),
        (
            "long patterns",
            schema(
                json!({ "items": { "pattern": "a".repeat(9000) }, "additionalProperties": { "pattern": "a".repeat(9000) } }),
            ),
        ),
        ("empty", lark(String::new())),
    ];
    for (name, compile) in bad {
        let error = compile().err().unwrap_or_else(|| panic!("{name} is accepted"));
        let text = error.to_string();
        assert!(!text.contains('\n') && text.len() < 1000, "{name}: {text}");
    }
    // What the library has to say about an expression comes last, below a drawing of it.
    for (compile, reason) in [
        (schema(json!({ "type": "string", "pattern": "^(?=a)b$" })), "look-around"),
        (
            schema(json!({ "type": "object", "properties": { "x": { "type": "string", "pattern": "(a)\\1" } } })),
            "backreferences",
        ),
        (regex("a(?!b)".into()), "look-around"),
        (lark("start: /[b-a]/".into()), "invalid character class range"),
        (regex(format!("{}(", "a".repeat(1000))), "unclosed group"),
    ] {
        let text = compile().err().unwrap().to_string();
        assert!(text.contains(reason) && !text.contains('\n'), "{text}");
    }
    // These may be fine; they must come to an end, and so must their masks.
    let odd: Vec<(&str, Compile)> = vec![
        ("references", schema(json!({ "$ref": "#/$defs/d0", "$defs": chain }))),
        ("loop", schema(json!({ "$ref": "#" }))),
        ("lengths", schema(json!({ "type": "string", "minLength": 100_000, "maxLength": 2_000_000_000 }))),
        ("items", schema(json!({ "type": "array", "minItems": 1_000_000_000 }))),
        ("numbers", schema(json!({ "type": "number", "minimum": -1e308, "maximum": 1e-308, "multipleOf": 1e-9 }))),
        ("patterns", schema(json!({ "anyOf": objects }))),
        ("repetition", regex("(a|ab|b){1,5000}{1,5000}x".into())),
        ("long text", lark(format!("start: \"{}\"", "ab".repeat(8000)))),
        ("long expression", regex("a?b*".repeat(4000))),
        ("many words", regex((0..3000).map(|i| i.to_string()).collect::<Vec<_>>().join("|"))),
        ("long value", schema(json!({ "const": "ab".repeat(100_000) }))),
        ("many values", schema(json!({ "enum": (0..9000).map(|i| format!("{i}é")).collect::<Vec<_>>() }))),
        ("ambiguity", lark("start: a\na: a a | \"x\" | \"\"".into())),
        ("left recursion", lark("start: start".into())),
        ("intersection", lark("start: A\nA: /(.*a){20}/ & /(.*b){20}/ & ~/(.*c){20}/".into())),
    ];
    for (name, compile) in odd {
        let begin = Instant::now();
        if let Ok(grammar) = compile() {
            let mut state = State::new(&grammar);
            for _ in 0..20 {
                let Ok(mask) = state.mask() else { break };
                let Some(word) = mask.iter().position(|&word| word != 0) else { break };
                let id = word as u32 * 32 + mask[word].trailing_zeros();
                if state.accept(id).is_ok_and(|complete| complete) {
                    break;
                }
            }
        }
        assert!(begin.elapsed().as_secs() < 30, "{name} takes {:?}", begin.elapsed());
    }
    assert!(start.elapsed().as_secs() < 300, "{:?}", start.elapsed());
}

fn tools() -> Vec<Value> {
    let weather = json!({ "type": "object", "properties": {
        "city": { "type": "string", "description": "where" },
        "unit": { "type": "string", "enum": ["C", "F°"] },
        "days": { "type": "integer", "minimum": 1, "exclusiveMaximum": 8 },
        "place": { "$ref": "#/$defs/place" },
        "note": { "anyOf": [{ "type": "string", "maxLength": 4 }, { "type": "null" }] },
    }, "required": ["city", "unit", "place"], "additionalProperties": false,
        "$defs": { "place": { "type": "object", "properties": { "x": { "type": "boolean" } }, "required": ["x"], "additionalProperties": false } } });
    vec![
        json!({ "type": "function", "function": { "name": "weather", "parameters": weather } }),
        json!({ "type": "function", "function": { "name": "now", "description": "the time" } }),
    ]
}

/// The content and the calls of an answer.
fn parse(
    format: &'static ReplyFormat,
    tools: &[Value],
    in_reasoning: bool,
    text: &str,
) -> (String, Vec<(String, Value)>) {
    let mut parser = ReplyParser::new(format, &ReplyOptions { tools, in_reasoning, seed: 1 });
    let (mut content, mut calls) = (String::new(), Vec::<(String, String)>::new());
    for delta in parser.push(text).into_iter().chain(parser.finish()) {
        match delta {
            Delta::Reasoning(_) => {}
            Delta::Content(text) => content += &text,
            Delta::Call(piece) => {
                calls.extend(piece.begin.map(|begin| (begin.name, String::new())));
                calls.last_mut().unwrap().1 += &piece.arguments;
            }
        }
    }
    let value = |(name, arguments): (String, String)| {
        let value = serde_json::from_str(&arguments).unwrap_or_else(|e| panic!("{text}: {arguments}: {e}"));
        (name, value)
    };
    (content, calls.into_iter().map(value).collect())
}

#[track_caller]
fn check_calls(tools: &[Value], calls: &[(String, Value)], text: &str) {
    for (name, arguments) in calls {
        let tool = tools.iter().find(|tool| tool["function"]["name"] == name.as_str()).unwrap();
        let schema = tool["function"].get("parameters").cloned().unwrap_or(json!({ "type": "object" }));
        assert!(is_valid(arguments, &schema, &schema), "{text}: {arguments}");
    }
}

#[test]
fn calls_of_every_format_come_back() {
    let tools = tools();
    // Markers as tokens of their own, and spelled.
    let (marked, spelled) = (GRAMMARS.clone(), Grammars::new(&tokenizer(&["<|im_end|>"])).unwrap());
    let named = Grammars::new(&tokenizer(&["[TOOL_CALLS]", "[ARGS]", "<|im_end|>"])).unwrap();
    for grammars in [&marked, &spelled, &named] {
        for format in REPLY_FORMATS.iter().filter(|format| format.calls != CallStyle::None) {
            for (choice, parallel) in
                [(ToolChoice::Required, true), (ToolChoice::Required, false), (ToolChoice::Named("weather"), true)]
            {
                let request = ToolGrammar { format, tools: &tools, choice, parallel, in_reasoning: false };
                let grammar = grammars.tools(&request).unwrap_or_else(|e| panic!("{}: {e}", format.name));
                let mut ended = 0;
                for seed in 0..6 {
                    let Some(text) = walk(&grammar, seed, "", &format.markers()) else { continue };
                    let (content, calls) = parse(format, &tools, false, &text);
                    assert_eq!(content.trim(), "", "{}: {text}", format.name);
                    assert!(
                        !calls.is_empty() && (parallel && choice == ToolChoice::Required || calls.len() == 1),
                        "{text}"
                    );
                    assert!(choice == ToolChoice::Required || calls[0].0 == "weather");
                    check_calls(&tools, &calls, &text);
                    ended += 1;
                }
                assert!(ended > 0, "{} {choice:?}: none ended", format.name);
            }
        }
    }
}

#[test]
fn text_may_come_before_calls() {
    let tools = tools();
    for format in REPLY_FORMATS.iter().filter(|format| format.calls != CallStyle::None) {
        let request =
            ToolGrammar { format, tools: &tools, choice: ToolChoice::Auto, parallel: true, in_reasoning: false };
        let grammar = GRAMMARS.tools(&request).unwrap();
        let think = format.think.map_or(String::new(), |(open, close)| format!("{open}so {{ <b> é{close}\n\n"));
        let marker = match format.calls {
            CallStyle::Llama3 => "<|python_tag|>",
            _ => format.markers()[if format.think.is_some() { 2 } else { 0 }],
        };
        let mut with_calls = 0;
        for seed in 0..6 {
            // Anything may be said.
            let text = walk(&grammar, seed, &format!("{think}Well, {{\"a\": 1}} </a> "), &format.markers());
            assert!(text.is_some(), "{}", format.name);
            // But a call that is begun is one.
            let beginning = format!("{think}I will look.\n{marker}");
            let Some(text) = walk(&grammar, seed, &beginning, &format.markers()) else { continue };
            let (content, calls) = parse(format, &tools, false, &text);
            assert_eq!(content.trim_end(), "I will look.", "{}: {text}", format.name);
            assert!(!calls.is_empty(), "{}: {text}", format.name);
            check_calls(&tools, &calls, &text);
            with_calls += 1;
        }
        assert!(with_calls > 0, "{}: none ended", format.name);
        if let Some((_, close)) = format.think {
            let request = ToolGrammar { choice: ToolChoice::Required, in_reasoning: true, ..request };
            let grammar = GRAMMARS.tools(&request).unwrap();
            let beginning = format!("hm {marker}{close}").replace(marker, "x");
            let text = (0..9).find_map(|seed| walk(&grammar, seed, &beginning, &format.markers())).unwrap();
            assert!(!parse(format, &tools, true, &text).1.is_empty(), "{text}");
        }
    }
    // Without a marker.
    let format = ReplyFormat::by_name("llama3").unwrap();
    let request = ToolGrammar { format, tools: &tools, choice: ToolChoice::Auto, parallel: false, in_reasoning: false };
    let grammar = GRAMMARS.tools(&request).unwrap();
    let text = (0..9).find_map(|seed| walk(&grammar, seed, "{", &format.markers())).unwrap();
    assert_eq!(parse(format, &tools, false, &text).1.len(), 1, "{text}");
}

#[test]
fn tools_that_cannot_be_enforced_are_named() {
    let request = |tools: &'static [Value], format: &str, choice| ToolGrammar {
        format: ReplyFormat::by_name(format).unwrap(),
        tools,
        choice,
        parallel: true,
        in_reasoning: false,
    };
    let leak = |tools: Vec<Value>| -> &'static [Value] { Vec::leak(tools) };
    let fails =
        |tools: &'static [Value], format: &str, choice| GRAMMARS.tools(&request(tools, format, choice)).unwrap_err();
    let tool = |parameters: Value| {
        leak(vec![json!({ "type": "function", "function": { "name": "f", "parameters": parameters } })])
    };
    let place = |error: Error| match error {
        Error::Schema { at, .. } => at,
        other => panic!("{other}"),
    };
    let base = "/0/function/parameters";
    let bad = tool(json!({ "properties": { "a": { "not": {} } } }));
    for format in ["hermes", "llama3", "mistral", "qwen3-coder", "minimax-m2"] {
        assert_eq!(place(fails(bad, format, ToolChoice::Auto)), format!("{base}/properties/a/not"));
    }
    let pattern = tool(json!({ "properties": { "a": { "type": "string", "pattern": "(" } } }));
    assert_eq!(place(fails(pattern, "hermes", ToolChoice::Required)), format!("{base}/properties/a/pattern"));
    assert_eq!(place(fails(pattern, "minimax-m2", ToolChoice::Required)), format!("{base}/properties/a/pattern"));
    assert_eq!(place(fails(tool(json!({ "type": "array" })), "hermes", ToolChoice::Auto)), format!("{base}/type"));
    assert_eq!(
        place(fails(tool(json!({ "minProperties": 2 })), "qwen3-coder", ToolChoice::Auto)),
        format!("{base}/minProperties")
    );
    assert_eq!(
        place(fails(leak(vec![json!({ "function": { "name": "a b" } })]), "hermes", ToolChoice::Auto)),
        "/0/function/name"
    );
    let fine = tool(json!({}));
    for (tools, format, choice) in [
        (fine, "hermes", ToolChoice::Named("g")),
        (fine, "plain", ToolChoice::Auto),
        (leak(Vec::new()), "hermes", ToolChoice::Auto),
        (leak(vec![fine[0].clone(); 129]), "hermes", ToolChoice::Auto),
    ] {
        assert!(matches!(fails(tools, format, choice), Error::Grammar { kind: "tools", .. }));
    }
}

#[test]
fn json_may_come_after_reasoning() {
    let schema = json!({ "enum": ["a", 7, { "b": true }] });
    for format in &REPLY_FORMATS {
        for in_reasoning in [false, true] {
            let grammar = GRAMMARS.json_reply(&schema, format, in_reasoning).unwrap();
            let (open, close) = format.think.unwrap_or_default();
            let thought = format!("{}so {{ é{close}\n\n", if in_reasoning { "" } else { open });
            let mut beginnings = vec![String::new()];
            beginnings.extend(format.think.map(|_| thought));
            for beginning in beginnings {
                let text = (0..9).find_map(|seed| walk(&grammar, seed, &beginning, &format.markers())).unwrap();
                let in_reasoning = in_reasoning && format.think.is_some();
                let (content, _) = parse(format, &[], in_reasoning, &text);
                let value: Value = serde_json::from_str(&content).unwrap_or_else(|e| panic!("{text}: {content}: {e}"));
                assert!(is_valid(&value, &schema, &schema), "{text}");
            }
        }
    }
}

#[test]
fn what_was_compiled_lately_is_not_compiled_again() {
    let grammars = Grammars::new(&tokenizer(&CONTROL)).unwrap();
    let schema = |names: [&str; 2]| json!({ "type": "object", "properties": { names[0]: {}, names[1]: {} } });
    let first = grammars.json_schema(&schema(["a", "b"])).unwrap();
    let again = grammars.json_schema(&schema(["a", "b"])).unwrap();
    assert!(Arc::ptr_eq(&first.matcher, &again.matcher));
    // An answer that was written shares nothing with the next one.
    let texts: Vec<_> = (0..3).map(|_| walk(&again, 11, "", &[])).collect();
    assert_eq!(texts, vec![walk(&GRAMMARS.json_schema(&schema(["a", "b"])).unwrap(), 11, "", &[]); 3]);
    for other in [
        grammars.json_schema(&schema(["b", "a"])).unwrap(),
        grammars.json_object().unwrap(),
        grammars.regex("a+").unwrap(),
        grammars.lark("start: /a+/").unwrap(),
    ] {
        assert!(!Arc::ptr_eq(&first.matcher, &other.matcher));
    }
    let tools = tools();
    let choice = |choice| {
        let format = &REPLY_FORMATS[0];
        grammars.tools(&ToolGrammar { format, tools: &tools, choice, parallel: true, in_reasoning: false })
    };
    let (auto, required) = (choice(ToolChoice::Auto).unwrap(), choice(ToolChoice::Required).unwrap());
    assert!(!Arc::ptr_eq(&auto.matcher, &required.matcher));
    assert!(Arc::ptr_eq(&choice(ToolChoice::Auto).unwrap().matcher, &auto.matcher));
    // A mistake is one each time.
    let broken = || grammars.lark("start: (").unwrap_err();
    assert_eq!(broken(), broken());
}

#[test]
fn grammars_go_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Grammars>();
    shared::<Grammar>();
    shared::<crate::Request>();
    let compile = |i: u64| {
        let value = json!({ "const": i });
        move || walk(&GRAMMARS.json_schema(&value).unwrap(), i, "", &[])
    };
    let threads: Vec<_> = (0..4).map(|i| std::thread::spawn(compile(i))).collect();
    for (i, thread) in threads.into_iter().enumerate() {
        assert_eq!(thread.join().unwrap().unwrap().trim(), i.to_string());
    }
}

#[test]
fn what_no_text_satisfies_is_said() {
    let grammar = GRAMMARS.json_schema(&json!({ "$ref": "#" })).unwrap();
    let error = State::new(&grammar).mask().unwrap_err().to_string();
    assert_eq!(error, "the answer cannot go on in its grammar: no token of the vocabulary can come next");
}

#[test]
fn another_thread_makes_the_same_masks() {
    let grammar = GRAMMARS.json_schema(&schemas()[6]).unwrap();
    let (mut state, mut matcher) = (State::new(&grammar), grammar.matcher.deep_clone());
    let mut rng = ChaCha12Rng::seed_from_u64(3);
    for _ in 0..60 {
        let mask = matcher.compute_mask_or_eos().unwrap();
        assert_eq!(state.mask().unwrap(), mask.as_slice());
        let allowed: Vec<u32> = (0..GRAMMARS.tokenizer.vocab_size() as u32).filter(|&id| mask.is_allowed(id)).collect();
        let next = allowed[rng.next_u32() as usize % allowed.len()];
        if state.accept(next).unwrap() {
            break;
        }
        matcher.consume_token(next).unwrap();
    }
}

#[test]
fn a_state_goes_on_where_the_tokens_lead() {
    let grammar = GRAMMARS.json_schema(&json!({ "const": "ab" })).unwrap();
    let mut state = State::new(&grammar);
    for (byte, complete) in [(b'"', false), (b'a', false), (b'b', false), (b'"', true)] {
        assert!(state.mask().unwrap()[byte as usize / 32] >> (byte % 32) & 1 == 1);
        assert_eq!(state.accept(byte.into()).unwrap(), complete);
    }
    let eog = *GRAMMARS.tokenizer.eog_ids().first().unwrap();
    let mask = state.mask().unwrap();
    assert_eq!(mask.iter().map(|word| word.count_ones()).sum::<u32>(), 1);
    assert!(mask[eog as usize / 32] >> (eog % 32) & 1 == 1);
    // A token that the mask does not allow is an error, once and for ever.
    let mut state = State::new(&grammar);
    assert!(state.accept(b'x'.into()).is_err());
    assert!(matches!(state.mask(), Err(Error::Constraint { .. })));
}
