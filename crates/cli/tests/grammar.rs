//! `puna run` with a grammar, as a program.

#![allow(clippy::unwrap_used)]

use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};

fn run(option: &str, text: &str) -> Output {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("grammar-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&file, text).unwrap();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/models/llama-gqa/model-f32.gguf");
    let mut command = Command::new(env!("CARGO_BIN_EXE_puna"));
    command.arg("run").arg(model).args(["--raw", "-p", "Hello", "-n", "200", "--seed", "1", "--json"]);
    command.arg(option).arg(&file).output().unwrap()
}

#[track_caller]
fn text(option: &str, grammar: &str) -> String {
    let out = run(option, grammar);
    assert!(out.status.success(), "{out:?}");
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(report["finish_reason"], "stop");
    report["text"].as_str().unwrap().to_owned()
}

#[test]
fn answers_follow_the_file() {
    let schema = json!({ "type": "object", "properties": { "n": { "enum": [1, 2] } }, "required": ["n"], "additionalProperties": false });
    let value: Value = serde_json::from_str(&text("--json-schema", &schema.to_string())).unwrap();
    assert!(value == json!({ "n": 1 }) || value == json!({ "n": 2 }), "{value}");
    assert_eq!(text("--grammar", "start: \"yes, \" (\"sir\" | \"sir\")"), "yes, sir");
}

#[test]
fn what_is_wrong_is_said() {
    let not = json!({ "properties": { "a": { "not": {} } } }).to_string();
    for (option, grammar, expected) in [
        ("--json-schema", not.as_str(), "`not` at /properties/a/not"),
        ("--json-schema", "{", "EOF"),
        ("--grammar", "start: b", "grammar"),
    ] {
        let out = run(option, grammar);
        let error = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(1), "{error}");
        assert!(error.contains(expected) && error.lines().count() == 1, "{error}");
    }
}
