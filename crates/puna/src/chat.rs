//! Conversations: from messages to a prompt.
//!
//! The template's own text may hold control tokens; what the messages say may not, whatever it spells.

use crate::engine::Engine;
use crate::error::Error;
use puna_text::{AddBos, ChatInput, ChatTemplate, Tokenizer};
use serde_json::{Value, json};

impl Engine {
    /// The text of a conversation as the model expects it, ready for the answer. `messages`: objects with `role` and
    /// `content`; a content of null is empty, a list of text parts is joined. `template`: in place of the model's own.
    ///
    /// # Errors
    /// [`Error::Message`], [`Error::NoTemplate`], or what the template says is wrong.
    pub fn render_chat(&self, messages: &[Value], template: Option<&str>) -> Result<String, Error> {
        self.with_template(messages, template, |template, input, _| template.render(input))
    }

    /// Token ids of [`Engine::render_chat`]: with exactly one token that begins a text, if the template or the model's
    /// files want one.
    ///
    /// # Errors
    /// As [`Engine::render_chat`].
    pub fn chat_prompt(&self, messages: &[Value], template: Option<&str>) -> Result<Vec<u32>, Error> {
        self.with_template(messages, template, |template, input, tokenizer| {
            let segments = template.render_segments(input, tokenizer)?;
            let mut ids = tokenizer.encode_segments(&segments, AddBos::No)?;
            match tokenizer.bos_id() {
                Some(bos) if tokenizer.adds_bos() && ids.first() != Some(&bos) => ids.insert(0, bos),
                _ => {}
            }
            Ok(ids)
        })
    }

    fn with_template<T>(
        &self,
        messages: &[Value],
        template: Option<&str>,
        f: impl FnOnce(&ChatTemplate, &ChatInput, &Tokenizer) -> Result<T, puna_text::TextError>,
    ) -> Result<T, Error> {
        let tokenizer = self.tokenizer()?;
        let source = template.map_or_else(|| self.template(), Ok)?;
        let messages = Value::Array(normalize(messages)?);
        let text_of = |id: Option<u32>| id.map(|id| tokenizer.token_text(id));
        let (bos, eos) = (text_of(tokenizer.bos_id()), text_of(tokenizer.eos_id()));
        let input = ChatInput {
            messages: Some(&messages),
            add_generation_prompt: true,
            bos_token: bos.as_deref(),
            eos_token: eos.as_deref(),
            ..ChatInput::default()
        };
        let result = ChatTemplate::new(source).and_then(|template| f(&template, &input, tokenizer));
        result.map_err(|e| Error::text(self.path(), e))
    }
}

/// Messages as templates expect them: a role, and content that is text.
fn normalize(messages: &[Value]) -> Result<Vec<Value>, Error> {
    let normalize = |(index, message): (usize, &Value)| {
        let error = |what: &str| Error::Message { index, what: what.to_owned() };
        if !message["role"].is_string() {
            return Err(error("expected an object with a role"));
        }
        let mut message = message.clone();
        message["content"] = match &message["content"] {
            Value::String(text) => json!(text),
            Value::Null => json!(""),
            Value::Array(parts) => {
                let mut text = String::new();
                for part in parts {
                    match (part["type"].as_str(), part["text"].as_str()) {
                        (Some("text"), Some(part)) => text.push_str(part),
                        (Some("text"), None) => return Err(error("a text part has no text")),
                        _ => return Err(error("only text parts are supported")),
                    }
                }
                json!(text)
            }
            _ => return Err(error("expected content that is a string, null, or a list of parts")),
        };
        Ok(message)
    };
    messages.iter().enumerate().map(normalize).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_become_text() {
        let parts = json!([{ "type": "text", "text": "a" }, { "type": "text", "text": " b" }]);
        let messages = [
            json!({ "role": "user", "content": parts }),
            json!({ "role": "assistant", "content": null, "tool_calls": [1] }),
            json!({ "role": "tool" }),
        ];
        let normal = normalize(&messages).unwrap();
        assert_eq!(normal[0], json!({ "role": "user", "content": "a b" }));
        assert_eq!(normal[1], json!({ "role": "assistant", "content": "", "tool_calls": [1] }));
        assert_eq!(normal[2]["content"], "");
    }

    #[test]
    fn what_is_no_message_is_named() {
        for bad in [
            json!(7),
            json!({ "content": "x" }),
            json!({ "role": "user", "content": 3 }),
            json!({ "role": "user", "content": { "a": 1 } }),
            json!({ "role": "user", "content": [{ "type": "image_url" }] }),
            json!({ "role": "user", "content": [{ "type": "text" }] }),
            json!({ "role": "user", "content": ["text"] }),
        ] {
            let good = json!({ "role": "user", "content": "x" });
            let error = normalize(&[good, bad]).unwrap_err();
            assert!(matches!(error, Error::Message { index: 1, .. }), "{error}");
        }
    }
}
