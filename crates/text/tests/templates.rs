//! Template features against transformers (data/templates.json, written by data/generate_templates.py), and hostile
//! templates against the bounds.
#![allow(clippy::unwrap_used)]

use puna_text::{ChatInput, ChatTemplate, TextError};
use serde_json::{Map, Value};

fn render(template: &str, variables: &Map<String, Value>) -> Result<String, TextError> {
    ChatTemplate::new(template)?.render(&ChatInput { variables: Some(variables), ..ChatInput::default() })
}

#[test]
fn snippets_as_transformers_renders_them() {
    let data: Value = serde_json::from_slice(include_bytes!("data/templates.json")).unwrap();
    let variables = data["variables"].as_object().unwrap();
    let cases = data["cases"].as_array().unwrap();
    assert!(cases.len() > 80);
    let mut wrong = Vec::new();
    for case in cases {
        let rendered = render(case["template"].as_str().unwrap(), variables);
        match (case["expected"].as_str(), &rendered) {
            (Some(expected), Ok(text)) if expected == text => {}
            (None, Err(_)) => {}
            (expected, _) => wrong.push(format!("{}\n  {expected:?}\n  {rendered:?}", case["name"])),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
