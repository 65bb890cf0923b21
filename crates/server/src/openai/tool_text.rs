//! Tools, calls and results as text, for models whose template knows nothing of them.

use serde_json::{Value, json};

/// Whether a template shows tools.
pub(crate) fn shows_tools(template: &str) -> bool {
    template.contains("tools")
}

/// The same conversation where the system message tells of `tools`, calls are text in the form that the parser reads
/// (Hermes), and results come from the user.
pub(crate) fn spell(messages: &[Value], tools: &[Value]) -> Vec<Value> {
    let lines: String = tools.iter().map(|tool| format!("{}\n", tool["function"])).collect();
    let about = format!(
        "You may call functions to help the user. These are the functions, one a line:\n<tools>\n{lines}</tools>\nTo \
         call one, answer with its name and arguments like this:\n<tool_call>\n{{\"name\": \"NAME\", \"arguments\": \
         {{\"ARGUMENT\": \"VALUE\"}}}}\n</tool_call>"
    );
    let mut spelled: Vec<Value> = messages.iter().map(message).collect();
    match spelled.first_mut().filter(|first| first["role"] == "system") {
        Some(system) => system["content"] = json!(format!("{}\n\n{about}", text(&system["content"]))),
        None => spelled.insert(0, json!({ "role": "system", "content": about })),
    }
    spelled
}

fn message(message: &Value) -> Value {
    match (message["role"].as_str(), message["tool_calls"].as_array()) {
        (Some("tool" | "function"), _) => {
            let result = text(&message["content"]);
            json!({ "role": "user", "content": format!("<tool_response>\n{result}\n</tool_response>") })
        }
        (Some("assistant"), Some(calls)) => {
            let call = |call: &Value| {
                let function = &call["function"];
                // Arguments are the text of an object.
                let arguments =
                    function["arguments"].as_str().map_or_else(|| function["arguments"].to_string(), str::to_owned);
                format!("<tool_call>\n{{\"name\": {}, \"arguments\": {arguments}}}\n</tool_call>", function["name"])
            };
            let said = text(&message["content"]);
            let parts = Some(said).filter(|said| !said.is_empty()).into_iter().chain(calls.iter().map(call));
            json!({ "role": "assistant", "content": parts.collect::<Vec<String>>().join("\n") })
        }
        _ => message.clone(),
    }
}

/// The text of a content that has been checked.
fn text(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_and_results_are_text() {
        let tools = [json!({ "type": "function", "function": { "name": "f" } })];
        let call = json!({ "id": "1", "type": "function", "function": { "name": "f", "arguments": "{\"x\": 1}" } });
        let talk = [
            json!({ "role": "system", "content": [{ "type": "text", "text": "Be brief." }] }),
            json!({ "role": "user", "content": "Hi" }),
            json!({ "role": "assistant", "content": null, "tool_calls": [call] }),
            json!({ "role": "tool", "content": "42", "tool_call_id": "1" }),
        ];
        let spelled = spell(&talk, &tools);
        let system = text(&spelled[0]["content"]);
        assert!(system.starts_with("Be brief.\n\nYou may") && system.contains("\n{\"name\":\"f\"}\n"));
        assert_eq!(spelled[1], talk[1]);
        assert_eq!(spelled[2]["content"], "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>");
        assert_eq!(spelled[3], json!({ "role": "user", "content": "<tool_response>\n42\n</tool_response>" }));
        assert_eq!(spell(&talk[1..2], &tools)[0]["role"], "system");
    }
}
