//! Conversations: from messages to a prompt.
//!
//! The template's own text may hold control tokens; what the messages say may not, whatever it spells.

use crate::engine::Engine;
use crate::error::Error;
use crate::grammar::Grammars;
use puna_text::{AddBos, ChatInput, ChatTemplate, Segment, TextError, Tokenizer};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// A model's tokenizer and chat template. A clone is cheap and can be used on another thread than the engine's.
#[derive(Clone)]
pub struct Chat(Arc<Inner>);

struct Inner {
    path: PathBuf,
    tokenizer: Option<Arc<Tokenizer>>,
    source: Option<String>,
    /// Compiled when it is first used.
    template: OnceLock<Result<ChatTemplate, TextError>>,
    /// Made when they are first used.
    grammars: OnceLock<Result<Arc<Grammars>, Error>>,
}

/// From so many bytes on a text is long: tokenizing it takes some ten milliseconds.
const LONG: usize = 64 << 10;

/// What a prompt ends with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChatEnd {
    /// The beginning of an answer.
    #[default]
    Answer,
    /// The last message, closed.
    Nothing,
    /// The text of the last message, which the answer continues.
    LastMessage,
}

/// A conversation that becomes a prompt.
#[derive(Clone, Copy, Debug, Default)]
pub struct Conversation<'a> {
    /// Objects with `role` and `content`; a content of null is empty, a list of text parts is joined.
    pub messages: &'a [Value],
    /// Tools on offer, a list as in OpenAI's interface.
    pub tools: Option<&'a Value>,
    /// In place of the model's own.
    pub template: Option<&'a str>,
    /// What the prompt ends with.
    pub end: ChatEnd,
    /// More variables of the template.
    pub variables: Option<&'a Map<String, Value>>,
    /// Positions of the context, if a prompt that is far too long for it need not be tokenized.
    pub ctx: Option<usize>,
}

impl Chat {
    pub(crate) fn new(path: PathBuf, tokenizer: Option<Arc<Tokenizer>>, source: Option<String>) -> Chat {
        Chat(Arc::new(Inner { path, tokenizer, source, template: OnceLock::new(), grammars: OnceLock::new() }))
    }

    /// The model's file or folder.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// [`Error::NoTokenizer`].
    pub fn tokenizer(&self) -> Result<&Arc<Tokenizer>, Error> {
        self.0.tokenizer.as_ref().ok_or_else(|| Error::NoTokenizer { path: self.0.path.clone() })
    }

    /// The same with another template.
    pub fn with_template(&self, source: String) -> Chat {
        Chat::new(self.0.path.clone(), self.0.tokenizer.clone(), Some(source))
    }

    /// What compiles grammars for the model.
    ///
    /// # Errors
    /// [`Error::NoTokenizer`]; as [`Grammars::new`].
    pub fn grammars(&self) -> Result<&Arc<Grammars>, Error> {
        let made = self.0.grammars.get_or_init(|| Grammars::new(self.tokenizer()?));
        made.as_ref().map_err(Clone::clone)
    }

    /// Makes now what is made when it is first used: the compiled template, and the tables that grammars need, which
    /// takes some tenths of a second for a large vocabulary. What is wrong with them is told when they are used.
    pub fn prepare(&self) {
        let (_, _) = (self.compiled(None), self.grammars());
    }

    /// The source of the model's chat template.
    pub fn template(&self) -> Option<&str> {
        self.0.source.as_deref()
    }

    /// The text of a conversation as the model expects it.
    ///
    /// # Errors
    /// [`Error::Message`], [`Error::NoTemplate`], or what the template says is wrong.
    pub fn render(&self, talk: &Conversation) -> Result<String, Error> {
        let segments = self.segments(talk)?;
        Ok(segments.into_iter().map(|segment| segment.text).collect())
    }

    /// Token ids of [`Chat::render`]: with exactly one token that begins a text, if the template or the model's files
    /// want one.
    ///
    /// # Errors
    /// As [`Chat::render`]; [`Error::PromptTooLong`].
    pub fn prompt(&self, talk: &Conversation) -> Result<Vec<u32>, Error> {
        let (segments, tokenizer) = (self.segments(talk)?, self.tokenizer()?);
        let texts = segments.iter().map(|segment| segment.text.as_str());
        let least = |ctx: usize| Some((self.least_tokens_over(ctx.saturating_sub(1), texts)?, ctx));
        if let Some((least, ctx)) = talk.ctx.and_then(least) {
            return Err(Error::PromptTooLong { least, ctx });
        }
        let ids = tokenizer.encode_segments(&segments, AddBos::No);
        let mut ids = ids.map_err(|e| Error::text(&self.0.path, e))?;
        match tokenizer.bos_id() {
            Some(bos) if tokenizer.adds_bos() && ids.first() != Some(&bos) => ids.insert(0, bos),
            _ => {}
        }
        Ok(ids)
    }

    /// How many tokens a long text has at least, where these are certainly more than `most`: see
    /// [`Tokenizer::least_tokens_over`]. Shorter texts are tokenized in no time, so that their true number can be told.
    pub fn least_tokens_over<'t>(
        &self,
        most: usize,
        parts: impl IntoIterator<Item = &'t str> + Clone,
    ) -> Option<usize> {
        let is_long = parts.clone().into_iter().map(str::len).sum::<usize>() >= LONG;
        self.0.tokenizer.as_ref().filter(|_| is_long)?.least_tokens_over(most, parts)
    }

    /// The prompt, by who wrote its parts.
    fn segments(&self, talk: &Conversation) -> Result<Vec<Segment>, Error> {
        let tokenizer = self.tokenizer()?;
        let template = self.compiled(talk.template)?;
        let list = normalize(talk.messages)?;
        let last = list.last().and_then(|message| message["content"].as_str()).unwrap_or("").to_owned();
        let messages = Value::Array(list);
        let text_of = |id: Option<u32>| id.map(|id| tokenizer.token_text(id));
        let (bos, eos) = (text_of(tokenizer.bos_id()), text_of(tokenizer.eos_id()));
        let input = ChatInput {
            messages: Some(&messages),
            tools: talk.tools,
            add_generation_prompt: talk.end == ChatEnd::Answer,
            bos_token: bos.as_deref(),
            eos_token: eos.as_deref(),
            variables: talk.variables,
        };
        let segments = template.render_segments(&input, tokenizer).map_err(|e| Error::text(&self.0.path, e))?;
        if talk.end == ChatEnd::LastMessage {
            let index = talk.messages.len().saturating_sub(1);
            let what = "the template does not show its content as it is: it cannot be continued".to_owned();
            return cut_after(segments, &last).ok_or(Error::Message { index, what });
        }
        Ok(segments)
    }

    fn compiled(&self, template: Option<&str>) -> Result<ChatTemplate, Error> {
        let own = || match &self.0.source {
            Some(source) => Ok(self.0.template.get_or_init(|| ChatTemplate::new(source)).clone()),
            None => Err(Error::NoTemplate { path: self.0.path.clone() }),
        };
        let template = template.map_or_else(own, |source| Ok(ChatTemplate::new(source)))?;
        template.map_err(|e| Error::text(&self.0.path, e))
    }
}

/// Segments up to the end of where `text` stands last; a template may have trimmed it.
fn cut_after(mut segments: Vec<Segment>, text: &str) -> Option<Vec<Segment>> {
    let whole: String = segments.iter().map(|segment| segment.text.as_str()).collect();
    let end = [text, text.trim_start(), text.trim_end(), text.trim()]
        .into_iter()
        .find_map(|text| whole.rfind(text).map(|at| at + text.len()))?;
    let mut start = 0;
    segments.retain_mut(|segment| {
        let len = segment.text.len();
        segment.text.truncate(end.saturating_sub(start).min(len));
        start += len;
        !segment.text.is_empty()
    });
    Some(segments)
}

impl Engine {
    /// The text of a conversation as the model expects it, ready for the answer. `messages`: objects with `role` and
    /// `content`; a content of null is empty, a list of text parts is joined. `template`: in place of the model's own.
    ///
    /// # Errors
    /// [`Error::Message`], [`Error::NoTemplate`], or what the template says is wrong.
    pub fn render_chat(&self, messages: &[Value], template: Option<&str>) -> Result<String, Error> {
        self.chat().render(&Conversation { messages, template, ..Conversation::default() })
    }

    /// Token ids of [`Engine::render_chat`]: with exactly one token that begins a text, if the template or the model's
    /// files want one.
    ///
    /// # Errors
    /// As [`Engine::render_chat`].
    pub fn chat_prompt(&self, messages: &[Value], template: Option<&str>) -> Result<Vec<u32>, Error> {
        self.chat().prompt(&Conversation { messages, template, ..Conversation::default() })
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
        if let Some(calls) = message.get_mut("tool_calls").and_then(Value::as_array_mut) {
            calls.iter_mut().for_each(open_arguments);
        }
        Ok(message)
    };
    messages.iter().enumerate().map(normalize).collect()
}

/// Arguments of a tool call come as text that is JSON; templates expect what it says.
fn open_arguments(call: &mut Value) {
    if let Some(arguments) = call.pointer_mut("/function/arguments")
        && let Some(text) = arguments.as_str()
        && let Ok(value @ Value::Object(_)) = serde_json::from_str(text)
    {
        *arguments = value;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::ModelFiles;

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
    fn what_is_prepared_is_there() {
        let tokenizer = ModelFiles::open("../../testdata/models/qwen3-qknorm/model-f32.gguf").unwrap();
        let tokenizer = Arc::new(tokenizer.into_parts().1.unwrap());
        for (tokenizer, source) in [(Some(tokenizer), "{{ messages }}"), (None, "{% broken")] {
            let chat = Chat::new("here".into(), tokenizer.clone(), Some(source.to_owned()));
            assert!(chat.0.grammars.get().is_none());
            chat.prepare();
            let (template, grammars) = (chat.0.template.get().unwrap(), chat.0.grammars.get().unwrap());
            assert_eq!((template.is_ok(), grammars.is_ok()), (tokenizer.is_some(), tokenizer.is_some()));
        }
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
