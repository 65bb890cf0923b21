//! The messages of a chat.

use crate::openai::fields::expected;
use crate::openai::{ApiError, Fields};
use serde_json::{Value, json};

/// Who can say something.
const ROLES: &[&str] = &["system", "developer", "user", "assistant", "tool", "function"];

/// Checks `messages` and gives them as templates expect them.
///
/// # Errors
/// The message, or the part of it, that is wrong.
pub(crate) fn read(fields: &Fields) -> Result<Vec<Value>, ApiError> {
    fields.require("messages")?;
    let list = fields.list("messages")?.map_or(&[][..], |list| list.as_slice());
    if list.is_empty() {
        return Err(fields.expected("messages", "at least one message"));
    }
    list.iter().enumerate().map(|(i, value)| message(value, &format!("messages[{i}]"))).collect()
}

fn message(value: &Value, path: &str) -> Result<Value, ApiError> {
    let fields = Fields::new(value, path)?;
    fields.require("role")?;
    let role = fields.string("role")?.unwrap_or_default();
    if !ROLES.contains(&role) {
        return Err(fields.expected("role", "system, developer, user, assistant or tool"));
    }
    fields.string("name")?;
    fields.string("tool_call_id")?;
    fields.string("reasoning_content")?;
    content(&fields)?;
    let calls = fields.list("tool_calls")?.map_or(&[][..], |list| list.as_slice());
    for (i, call) in calls.iter().enumerate() {
        tool_call(call, &fields.name(&format!("tool_calls[{i}]")))?;
    }
    for refused in ["audio", "function_call"] {
        if fields.get(refused).is_some() {
            return Err(ApiError::invalid(fields.name(refused), "not supported"));
        }
    }
    let mut message = value.clone();
    // Templates know the older name.
    if role == "developer" {
        message["role"] = json!("system");
    }
    // A template may ask whether a field is there.
    if let Some(map) = message.as_object_mut() {
        map.retain(|name, value| name == "content" || !value.is_null());
    }
    Ok(message)
}

fn content(fields: &Fields) -> Result<(), ApiError> {
    let parts = match fields.get("content") {
        None | Some(Value::String(_)) => return Ok(()),
        Some(Value::Array(parts)) => parts,
        Some(_) => return Err(fields.expected("content", "a string, null, or a list of parts")),
    };
    for (i, part) in parts.iter().enumerate() {
        let path = fields.name(&format!("content[{i}]"));
        let part = Fields::new(part, &path)?;
        part.require("type")?;
        let refuse =
            |what: &str| Err(ApiError::invalid(part.name("type"), format!("{what} cannot be read by this model")));
        match part.string("type")?.unwrap_or_default() {
            "text" => {
                part.require("text")?;
                part.string("text")?;
            }
            "image_url" | "input_image" => return refuse("images"),
            "input_audio" => return refuse("audio"),
            "file" | "input_file" => return refuse("files"),
            _ => return Err(part.expected("type", "text")),
        }
    }
    Ok(())
}

fn tool_call(value: &Value, path: &str) -> Result<(), ApiError> {
    let call = Fields::new(value, path)?;
    call.string("id")?;
    if call.string("type")?.is_some_and(|name| name != "function") {
        return Err(call.expected("type", "function"));
    }
    let path = call.name("function");
    let function = Fields::new(call.require("function")?, &path)?;
    function.require("name")?;
    function.string("name")?;
    match function.get("arguments") {
        None | Some(Value::String(_) | Value::Object(_)) => Ok(()),
        Some(other) => Err(expected(function.name("arguments"), "a string that is JSON", other)),
    }
}
