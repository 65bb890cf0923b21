//! Answers taken apart: every format, every way of cutting them, and what is no call.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use puna_text::reply::{REPLY_FORMATS, ReplyFormat};
use puna_text::{Delta, ReplyOptions, ReplyParser};
use serde_json::{Value, json};
use std::time::Instant;

/// An answer put together again.
#[derive(Debug, Default, PartialEq, Clone)]
struct Reply {
    reasoning: String,
    content: String,
    /// Identifier, name, arguments.
    calls: Vec<(String, String, String)>,
}

impl Reply {
    fn take(&mut self, deltas: Vec<Delta>) {
        for delta in deltas {
            match delta {
                Delta::Reasoning(text) => self.reasoning += &text,
                Delta::Content(text) => self.content += &text,
                Delta::Call(piece) => {
                    if let Some(begin) = piece.begin {
                        assert_eq!(piece.index, self.calls.len());
                        self.calls.push((begin.id, begin.name, String::new()));
                    }
                    assert_eq!(piece.index + 1, self.calls.len());
                    self.calls[piece.index].2 += &piece.arguments;
                }
            }
        }
    }

    fn calls(&self) -> Vec<(&str, Value)> {
        let parse = |arguments: &str| serde_json::from_str(arguments).unwrap_or_else(|e| panic!("{arguments}: {e}"));
        self.calls.iter().map(|(_, name, arguments)| (name.as_str(), parse(arguments))).collect()
    }
}

fn tools() -> Vec<Value> {
    let weather = json!({ "type": "object", "properties": {
        "city": { "type": "string" },
        "days": { "type": "integer" },
        "deep": { "anyOf": [{ "$ref": "#/$defs/d" }, { "type": "null" }] },
        "free": {},
    }, "$defs": { "d": { "type": "object" } } });
    vec![
        json!({ "type": "function", "function": { "name": "weather", "parameters": weather } }),
        json!({ "type": "function", "function": { "name": "time", "parameters": { "type": "object" } } }),
    ]
}

fn parse_pieces<'a>(format: &str, in_reasoning: bool, pieces: impl IntoIterator<Item = &'a str>) -> Reply {
    let tools = tools();
    let options = ReplyOptions { tools: &tools, in_reasoning, seed: 7 };
    let mut parser = ReplyParser::new(ReplyFormat::by_name(format).unwrap(), &options);
    let mut reply = Reply::default();
    for piece in pieces {
        reply.take(parser.push(piece));
    }
    reply.take(parser.finish());
    assert_eq!(parser.n_calls(), reply.calls.len());
    reply
}

fn parse(format: &str, text: &str) -> Reply {
    let whole = parse_pieces(format, false, [text]);
    let chars: Vec<String> = text.chars().map(String::from).collect();
    assert_eq!(parse_pieces(format, false, chars.iter().map(String::as_str)), whole);
    whole
}

/// An answer with text and one call of `weather` with these arguments, or several.
#[track_caller]
fn check(format: &str, text: &str, content: &str, arguments: &[Value]) {
    let reply = parse(format, text);
    let expected: Vec<_> = arguments.iter().map(|arguments| ("weather", arguments.clone())).collect();
    assert_eq!((reply.content.as_str(), reply.calls()), (content, expected), "{text}");
}

#[track_caller]
fn check_text(format: &str, text: &str) {
    check(format, text, text, &[]);
}

#[test]
fn hermes() {
    let one = r#"<tool_call>
{"name": "weather", "arguments": {"city": "Löß \"x\"", "days": 3}}
</tool_call>"#;
    let (a, b) = (json!({ "city": "Löß \"x\"", "days": 3 }), json!({}));
    check("hermes", one, "", std::slice::from_ref(&a));
    check("hermes", &format!("I look.\n\n{one}\n{one}\n"), "I look.", &[a.clone(), a.clone()]);
    check("hermes", &format!("{one} done"), " done", std::slice::from_ref(&a));
    check(
        "hermes",
        r#"<tool_call>{"arguments": {"days": [1, -2.5e3, true, null, {}]}, "name": "weather"}</tool_call>"#,
        "",
        &[json!({ "days": [1, -2.5e3, true, null, {}] })],
    );
    for empty in
        [r#"{"name": "weather"}"#, r#"{"name":"weather","arguments":null}"#, r#"{"name":"weather","arguments":{}}"#]
    {
        check("hermes", &format!("<tool_call>{empty}</tool_call>"), "", std::slice::from_ref(&b));
    }
    let list = r#"<tool_call>[{"name": "weather", "arguments": {}}, {"name": "weather", "arguments": {}}]</tool_call>"#;
    check("hermes", list, "", &[b.clone(), b.clone()]);
    check("hermes", "<tool_call>[{\"name\": \"weather\"}] so", "] so", &[b]);
    // Arguments as a text of JSON, and a line break within a string.
    check(
        "hermes",
        r#"<tool_call>{"name": "weather", "arguments": "{\"days\": 2}"}</tool_call>"#,
        "",
        &[json!({"days": 2})],
    );
    check(
        "hermes",
        "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"a\nb\"}}",
        "",
        &[json!({"city": "a\nb"})],
    );
}

#[test]
fn what_is_no_call_is_text() {
    for text in [
        "<tool_call>",
        "<tool_call>\n",
        "a <tool_call> b",
        "<tool_call>{}</tool_call>",
        "<tool_call>{\"name\": 3}</tool_call>",
        "<tool_call>{\"name\": \"weather\", \"city\": 1}</tool_call>",
        "<tool_call>{\"name\": \"weather\", \"arguments\": [1]}</tool_call>",
        "<tool_call>{\"name\": \"weather\", \"arguments\": \"no\"}</tool_call>",
        "<tool_call>{\"arguments\": {\"a\": 1}}</tool_call>",
        "<tool_call>{\"name\": \"\\ud800\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"a\", \"name\": \"b\"}</tool_call>",
        "<tool_call>{\"name\": \"weather\", ",
        "<tool_",
        "text\n\n",
        "\n\n <tool",
        "</tool_call>",
    ] {
        check_text("hermes", text);
    }
    // The second marker counts.
    check("hermes", "<tool_call><tool_call>{\"name\": \"weather\"}</tool_call>", "<tool_call>", &[json!({})]);
    // What comes after a piece of the call is out is text too.
    let reply = parse("hermes", "<tool_call>{\"name\": \"weather\", \"arguments\": {\"a\": x}}</tool_call>");
    assert_eq!((reply.content.as_str(), reply.calls[0].2.as_str()), ("x}}</tool_call>", "{\"a\": "));
}

#[test]
fn what_is_cut_off_is_not_lost() {
    for (format, text, content, arguments) in [
        ("qwen3-coder", "<function=weather><parameter=days>[12", "", "{\"days\": \"[12\""),
        ("qwen3-coder", "<function=weather><parameter=city>12</par", "", "{\"city\": \"12</par"),
        ("qwen3-coder", "<function=weather><parameter=days>1</parameter>\n", "", "{\"days\": 1"),
        ("qwen3-coder", "<function=weather><parameter=days>1</parameter>\n</fun", "\n</fun", "{\"days\": 1"),
        ("qwen3-coder", "<function=weather><parameter=days>1</parameter> </fan", " </fan", "{\"days\": 1"),
        ("hermes", "<tool_call>{\"name\": \"weather\", \"arguments\": {}, \"12\": 1}", ", \"12\": 1}", "{}"),
        ("hermes", "<tool_call>{\"name\": \"weather\", \"arguments\": {}, \"12", ", \"12", "{}"),
        ("hermes", "<tool_call>{\"name\": \"weather\", \"arguments\": {\"a\": \"12", "", "{\"a\": \"12"),
    ] {
        let reply = parse(format, text);
        assert_eq!((reply.content.as_str(), reply.calls[0].2.as_str()), (content, arguments), "{text}");
    }
}

#[test]
fn without_tools_there_are_no_calls() {
    let text = "<tool_call>{\"name\": \"weather\"}</tool_call>\n";
    let mut parser = ReplyParser::new(ReplyFormat::by_name("hermes").unwrap(), &ReplyOptions::default());
    let mut deltas = parser.push(text);
    deltas.extend(parser.finish());
    assert_eq!(deltas, [Delta::Content(text.into())]);
}

#[test]
fn llama3() {
    let call = r#"{"name": "weather", "parameters": {"city": "Rome"}}"#;
    let rome = json!({ "city": "Rome" });
    check("llama3", call, "", std::slice::from_ref(&rome));
    check("llama3", &format!("\n {call}; {call}"), "", &[rome.clone(), rome.clone()]);
    check("llama3", &format!("<|python_tag|>{call}"), "", std::slice::from_ref(&rome));
    check("llama3", r#"{"type": "function", "name": "weather", "parameters": {}}"#, "", &[json!({})]);
    check(
        "llama3",
        "<|python_tag|>weather.call(city=\"Rome\", days = 2, ok=True)",
        "",
        &[json!({ "city": "Rome", "days": 2, "ok": true })],
    );
    check("llama3", "<|python_tag|>weather.call()", "", &[json!({})]);
    for text in [
        "{\"city\": \"Rome\"}",
        "{\"name\": \"Rome\", \"parameters\": {}}",
        "{}",
        "<|python_tag|>import numpy\nprint(1)",
        "<|python_tag|>weather.call(city='Rome')",
        "<|python_tag|>weather.call(city=",
        "Say {\"name\": \"weather\", \"parameters\": {}}",
    ] {
        check_text("llama3", text);
    }
    check("llama3", &format!("{call}; and"), "; and", &[rome]);
}

#[test]
fn mistral() {
    let rome = json!({ "city": "Rome" });
    let object = r#"{"name": "weather", "arguments": {"city": "Rome"}, "id": "abcdefghi"}"#;
    check("mistral", &format!("[TOOL_CALLS][{object}]"), "", std::slice::from_ref(&rome));
    check("mistral", &format!("Well [TOOL_CALLS] [{object}, {object}]"), "Well ", &[rome.clone(), rome.clone()]);
    let named = "[TOOL_CALLS]weather[ARGS]{\"city\": \"Rome\"}";
    check("mistral", &format!("{named}{named}"), "", &[rome.clone(), rome.clone()]);
    check("mistral", "[TOOL_CALLS]weather[CALL_ID]abc[ARGS]{\"city\": \"Rome\"}", "", std::slice::from_ref(&rome));
    check("mistral", "[TOOL_CALLS]weather{\"city\": \"Rome\"}", "", &[rome]);
    let id = parse("mistral", named).calls[0].0.clone();
    assert!(id.len() == 9 && id.chars().all(|c| c.is_ascii_alphanumeric()), "{id}");
    for text in ["[TOOL_CALLS]", "[TOOL_CALLS][]", "[TOOL_CALLS]no such thing {}", "[TOOL_CALLS]weather[ARGS]", "[TOOL"]
    {
        check_text("mistral", text);
    }
}

#[test]
fn qwen3_coder() {
    let call = "<tool_call>\n<function=weather>\n<parameter=city>\n<b>\"Rome\"</b>\n12\n</parameter>\n<parameter=days>\n3\n\
        </parameter>\n<parameter=deep>\n{\"a\": [1]}\n</parameter>\n</function>\n</tool_call>";
    let arguments = json!({ "city": "<b>\"Rome\"</b>\n12", "days": 3, "deep": { "a": [1] } });
    check("qwen3-coder", call, "", std::slice::from_ref(&arguments));
    check("qwen3-coder", &format!("So:\n{call}\n{call}"), "So:", &[arguments.clone(), arguments]);
    check("qwen3-coder", "<function=weather></function>", "", &[json!({})]);
    let value = |key: &str, text: &str, expected: Value| {
        let call = format!("<function=weather><parameter={key}>{text}</parameter></function>");
        check("qwen3-coder", &call, "", &[json!({ key: expected })]);
    };
    value("city", "7", json!("7"));
    value("city", "\n\n\n", json!("\n"));
    value("days", "seven", json!("seven"));
    value("deep", "None", json!(null));
    value("free", "True", json!(true));
    value("free", "tru", json!("tru"));
    value("unknown", "[1, 2]", json!([1, 2]));
    for text in
        ["<function=", "<function=weather", "<function=weather>\n", "<tool_call>x", "<function=weather><parameter=a"]
    {
        check_text("qwen3-coder", text);
    }
}

#[test]
fn minimax_m2() {
    let invoke = "<invoke name=\"weather\">\n<parameter name=\"city\">a\n</parameter>\n<parameter name=\"days\">2</parameter>\n</invoke>\n";
    let arguments = json!({ "city": "a\n", "days": 2 });
    check(
        "minimax-m2",
        &format!("<think>\nhm\n</think>\n\nLook.\n<minimax:tool_call>\n{invoke}{invoke}</minimax:tool_call>"),
        "Look.",
        &[arguments.clone(), arguments],
    );
}

#[test]
fn reasoning() {
    let expected = |reasoning: &str, content: &str| Reply {
        reasoning: reasoning.into(),
        content: content.into(),
        calls: Vec::new(),
    };
    for format in ["qwen3", "deepseek-r1", "minimax-m2", "qwen3.5"] {
        assert_eq!(parse(format, "<think>\n\nwhy\nnot\n\n</think>\n\nyes\n"), expected("why\nnot", "yes\n"));
        assert_eq!(parse(format, " <think>a</think>b<think>c"), expected("a", "b<think>c"));
        assert_eq!(parse(format, "<think>a</thi"), expected("a</thi", ""));
        assert_eq!(parse(format, "<thin"), expected("", "<thin"));
        assert_eq!(parse(format, " x</think>"), expected("", " x</think>"));
        assert_eq!(parse_pieces(format, true, ["\nwhy", "\n</th", "ink>\n\nyes"]), expected("why", "yes"));
        let format = ReplyFormat::by_name(format).unwrap();
        assert!(format.begins_in_reasoning("..<|assistant|><think>\n"));
        assert!(!format.begins_in_reasoning("..<|assistant|><think>\n\n</think>\n\n"));
    }
    assert_eq!(parse("magistral", "[THINK]a[/THINK]b"), expected("a", "b"));
    assert_eq!(parse("hermes", "<think>a</think>b"), expected("", "<think>a</think>b"));
    // A call in reasoning is none.
    let reply = parse("qwen3", "<think><tool_call>{}</think><tool_call>{\"name\": \"weather\"}</tool_call>");
    assert_eq!((reply.reasoning.as_str(), reply.calls()), ("<tool_call>{}", vec![("weather", json!({}))]));
}

#[test]
fn formats_are_found_in_templates() {
    let named = |source: &str| ReplyFormat::of_template(source).name;
    assert_eq!(named("{{ '<tool_call>\\n' }}"), "hermes");
    assert_eq!(named("{{ '<tool_call>' }}{{ content.split('</think>') }}"), "qwen3");
    assert_eq!(named("<tool_call>\\n<function="), "qwen3-coder");
    assert_eq!(named("<tool_call>\\n<function= </think>"), "qwen3.5");
    assert_eq!(named("{{ \"[TOOL_CALLS][\" }}"), "mistral");
    assert_eq!(named("{{ '<|python_tag|>' }}"), "llama3");
    assert_eq!(named("<|start_header_id|> {\"name\": x, \"parameters\": y}"), "llama3");
    assert_eq!(named("{% if '</think>' in content %}"), "deepseek-r1");
    assert_eq!(named("'<minimax:tool_call>' </think>"), "minimax-m2");
    assert_eq!(named("{{ messages }}"), "plain");
    for name in ReplyFormat::names() {
        assert_eq!(ReplyFormat::by_name(name).unwrap().name, name);
    }
    let with_calls = |name: &str| ReplyFormat::by_name(name).unwrap().with_calls().name;
    assert_eq!(["plain", "deepseek-r1", "mistral"].map(with_calls), ["hermes", "qwen3", "mistral"]);
}

#[test]
fn only_beginnings_of_markers_are_held() {
    let tools = tools();
    let options = ReplyOptions { tools: &tools, ..ReplyOptions::default() };
    let mut parser = ReplyParser::new(ReplyFormat::by_name("hermes").unwrap(), &options);
    let mut push = |text: &str| match parser.push(text).as_slice() {
        [] => String::new(),
        [Delta::Content(text)] => text.clone(),
        [Delta::Call(piece)] => piece.arguments.clone(),
        other => panic!("{other:?}"),
    };
    assert_eq!(push("Hello <"), "Hello ");
    assert_eq!(push("b> <tool"), "<b> ");
    assert_eq!(push("s>\n"), "<tools>");
    assert_eq!(push("x"), "\nx");
    assert_eq!(push("<tool_call>{\"name\": \"weather\", \"arguments\": "), "");
    assert_eq!(push("{\"city\": \"Ro"), "{\"city\": \"Ro");
    assert_eq!(push("me"), "me");
}

#[test]
fn time_grows_as_the_text_does() {
    let long = 1 << 15;
    let texts = [
        "\n".repeat(long),
        "<".repeat(long),
        "<tool_call>".repeat(long / 11),
        "<tool_call>{\"name\": \"weather\", \"arguments\": {\"a\": [".to_owned() + &"\n[1],".repeat(long / 5),
        "<tool_call>{\"name\": \"weather\"}</tool_call>".repeat(long / 42),
        "<tool_call>{\"name\": \"weather\"}".to_owned() + &" ".repeat(long) + "x",
        "{\"name\": \"weather\"}".to_owned() + &" ;".repeat(long / 2) + "x",
        "<function=weather><parameter=city>".to_owned() + &"\n<".repeat(long / 2),
        "[TOOL_CALLS]weather[ARGS]{".repeat(long / 26),
        "<think>".to_owned() + &"</think".repeat(long / 7),
    ];
    let start = Instant::now();
    for format in ReplyFormat::names() {
        for text in &texts {
            let chars = text.char_indices().map(|(i, c)| &text[i..i + c.len_utf8()]);
            parse_pieces(format, false, chars);
        }
    }
    // Three million characters; a parser whose time grew as their square would take hours.
    assert!(start.elapsed().as_secs() < 120);
}

#[test]
fn schemas_that_lead_nowhere_take_no_time() {
    let again = vec![json!({ "$ref": "#" }); 100];
    let tool = json!({ "name": "f", "parameters": { "anyOf": again, "properties": { "a": { "$ref": "#" } } } });
    let options = ReplyOptions { tools: &[tool], ..ReplyOptions::default() };
    let mut parser = ReplyParser::new(ReplyFormat::by_name("qwen3-coder").unwrap(), &options);
    let deltas = parser.push("<function=f><parameter=a>1</parameter></function>");
    assert!(matches!(deltas.as_slice(), [Delta::Call(piece)] if piece.arguments == "{\"a\": 1}"), "{deltas:?}");
}

/// Texts made of what formats are made of.
fn texts() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        prop::sample::select(vec![
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "[",
            "]",
            "<|python_tag|>",
            "weather",
            ".call(",
            ")",
            "<think>",
            "</think>",
            "<function=",
            "<function=weather>",
            "<parameter=city>",
            "<parameter=days>",
            "</parameter>",
            "</function>",
            "<minimax:tool_call>",
            "</minimax:tool_call>",
            "<invoke name=\"weather\">",
            "</invoke>",
            "<parameter name=\"city\">",
            "{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}",
            "{\"name\": \"weather\", \"parameters\": {}}",
            "{\"name\": \"weather\", \"arguments\": ",
            "{",
            "}",
            "\"",
            ",",
            ";",
            "\n",
            " ",
            "12",
            "city=\"x\"",
            "é",
        ])
        .prop_map(str::to_owned),
        "[<>/a-z{}\\\\]{1,3}",
    ];
    prop::collection::vec(piece, 0..14).prop_map(|pieces| pieces.concat())
}

fn cut(text: &str, cuts: &[usize]) -> Vec<String> {
    let mut pieces = vec![String::new()];
    for (i, c) in text.chars().enumerate() {
        if cuts.contains(&i) {
            pieces.push(String::new());
        }
        pieces.last_mut().unwrap().push(c);
    }
    pieces
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn cuts_change_nothing(
        text in texts(), row in 0..REPLY_FORMATS.len(), inside in any::<bool>(), cuts in prop::collection::vec(0usize..60, 0..8),
    ) {
        let name = REPLY_FORMATS[row].name;
        let pieces = cut(&text, &cuts);
        let whole = parse_pieces(name, inside, [text.as_str()]);
        prop_assert_eq!(parse_pieces(name, inside, pieces.iter().map(String::as_str)), whole);
    }

    #[test]
    fn nothing_is_lost(text in texts(), row in 0..REPLY_FORMATS.len()) {
        let reply = parse(REPLY_FORMATS[row].name, &text);
        if reply.calls.is_empty() && reply.reasoning.is_empty() && !text.contains("<think>") {
            prop_assert_eq!(&reply.content, &text);
        }
        // Letters of no marker come out somewhere.
        let count = |text: &str| text.matches(['é', '1', '2']).count() + text.matches("Rome").count();
        let out = count(&reply.reasoning)
            + count(&reply.content)
            + reply.calls.iter().map(|(_, name, arguments)| count(name) + count(arguments)).sum::<usize>();
        prop_assert_eq!(out, count(&text), "{:?}", reply);
    }

    #[test]
    fn calls_come_back(
        arguments in prop::collection::hash_map("[a-z]{1,5}", prop_oneof![
            any::<i32>().prop_map(Value::from), any::<bool>().prop_map(Value::from), Just(Value::Null),
            "[ -~é\n]{0,12}".prop_map(Value::from), prop::collection::vec(any::<u8>(), 0..3).prop_map(Value::from),
        ], 0..4),
        before in "[a-zA-Z .é]{0,12}", n in 1usize..4,
    ) {
        let arguments = Value::from_iter(arguments);
        let object = |key: &str| format!("{{\"name\": \"weather\", \"{key}\": {arguments}}}");
        let hermes = format!("{before}{}", format!("\n<tool_call>\n{}\n</tool_call>", object("arguments")).repeat(n));
        let mistral = format!("{before}[TOOL_CALLS][{}]", vec![object("arguments"); n].join(", "));
        let named = format!("{before}{}", format!("[TOOL_CALLS]weather[ARGS]{arguments}").repeat(n));
        let llama3 = vec![object("parameters"); n].join("; ");
        for (format, text, before) in
            [("hermes", hermes, before.as_str()), ("mistral", mistral, &before), ("mistral", named, &before), ("llama3", llama3, "")]
        {
            let reply = parse(format, &text);
            prop_assert_eq!(&reply.content, before);
            prop_assert_eq!(reply.calls(), vec![("weather", arguments.clone()); n]);
        }
    }

    #[test]
    fn elements_come_back(city in "[ -;=?-~é\n]{0,12}", days in any::<i64>(), n in 1usize..3) {
        let arguments = json!({ "city": city, "days": days });
        let coder = format!("<tool_call>\n<function=weather>\n<parameter=city>\n{city}\n</parameter>\n<parameter=days>\n{days}\n</parameter>\n</function>\n</tool_call>\n");
        let minimax = format!("<invoke name=\"weather\">\n<parameter name=\"city\">{city}</parameter>\n<parameter name=\"days\">{days}</parameter>\n</invoke>\n");
        let minimax = format!("<minimax:tool_call>\n{}</minimax:tool_call>", minimax.repeat(n));
        for (format, text) in [("qwen3-coder", coder.repeat(n)), ("minimax-m2", minimax)] {
            let reply = parse(format, &text);
            prop_assert_eq!(reply.calls(), vec![("weather", arguments.clone()); n]);
            prop_assert_eq!(&reply.content, "");
        }
    }
}
