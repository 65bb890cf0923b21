//! `/v1/chat/completions`.

use crate::openai::answer::{Answer, Assemble, Header, Job, Stream, Tokens, Usage, finish_reason, timings, unique};
use crate::openai::fields::expected;
use crate::openai::generation::MAX_LOGPROBS;
use crate::openai::reply::{Piece, Reply};
use crate::openai::{ApiError, Card, Fields, Generation, StreamOptions, logprobs, messages};
use puna::{ChatEnd, Conversation, Event, Stats};
use serde_json::{Map, Value, json};

/// A conversation and what of it a template gets.
#[derive(Clone, Debug)]
pub struct Talk {
    /// The messages, checked.
    pub messages: Vec<Value>,
    /// Tools on offer.
    pub tools: Option<Value>,
    /// What the prompt ends with.
    pub end: ChatEnd,
    /// More variables.
    pub variables: Map<String, Value>,
}

impl Talk {
    /// Reads the fields that make a prompt.
    ///
    /// # Errors
    /// The field that is wrong.
    pub fn read(fields: &Fields) -> Result<Talk, ApiError> {
        let mut variables = Map::new();
        if let Some(effort) = fields.string("reasoning_effort")? {
            if effort == "none" {
                variables.insert("enable_thinking".into(), json!(false));
            }
            variables.insert("reasoning_effort".into(), json!(effort));
        }
        variables.extend(fields.object("chat_template_kwargs")?.cloned().unwrap_or_default());
        let generates = fields.boolean("add_generation_prompt")?;
        let end = match (fields.boolean("continue_final_message")?.unwrap_or(false), generates) {
            (true, Some(true)) => {
                let what = "cannot be true together with add_generation_prompt";
                return Err(ApiError::invalid("continue_final_message", what));
            }
            (true, _) => ChatEnd::LastMessage,
            (false, Some(false)) => ChatEnd::Nothing,
            (false, _) => ChatEnd::Answer,
        };
        Ok(Talk { messages: messages::read(fields)?, tools: tools(fields)?, end, variables })
    }

    fn conversation(&self) -> Conversation<'_> {
        Conversation {
            messages: &self.messages,
            tools: self.tools.as_ref(),
            template: None,
            end: self.end,
            variables: Some(&self.variables),
        }
    }

    /// The prompt as text.
    ///
    /// # Errors
    /// What the template says is wrong.
    pub fn render(&self, card: &Card) -> Result<String, ApiError> {
        card.chat.render(&self.conversation()).map_err(|e| ApiError::of_engine("messages", &e))
    }

    /// The prompt as ids.
    ///
    /// # Errors
    /// As [`Talk::render`].
    pub fn prompt(&self, card: &Card) -> Result<Vec<u32>, ApiError> {
        card.chat.prompt(&self.conversation()).map_err(|e| ApiError::of_engine("messages", &e))
    }
}

/// `tools`, checked as far as it is about functions.
fn tools(fields: &Fields) -> Result<Option<Value>, ApiError> {
    let Some(list) = fields.list("tools")? else { return Ok(None) };
    for (i, tool) in list.iter().enumerate() {
        let path = format!("tools[{i}]");
        let tool = Fields::new(tool, &path)?;
        tool.require("type")?;
        if tool.string("type")? != Some("function") {
            return Err(tool.expected("type", "function"));
        }
        let path = tool.name("function");
        let function = Fields::new(tool.require("function")?, &path)?;
        function.require("name")?;
        if function.string("name")?.is_some_and(str::is_empty) {
            return Err(function.expected("name", "a name"));
        }
        function.string("description")?;
        function.object("parameters")?;
        function.boolean("strict")?;
    }
    Ok((!list.is_empty()).then(|| Value::Array(list.clone())))
}

/// Which tools an answer may or must call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolChoice {
    /// None.
    None,
    /// As the model likes.
    Auto,
    /// At least one.
    Required,
    /// This one.
    Named(String),
}

impl ToolChoice {
    fn read(fields: &Fields, tools: Option<&Value>) -> Result<ToolChoice, ApiError> {
        let what = "none, auto, required, or an object that names a function";
        let choice = match fields.get("tool_choice") {
            None => return Ok(if tools.is_some() { ToolChoice::Auto } else { ToolChoice::None }),
            Some(Value::String(name)) => match name.as_str() {
                "none" => ToolChoice::None,
                "auto" => ToolChoice::Auto,
                "required" => ToolChoice::Required,
                _ => return Err(fields.expected("tool_choice", what)),
            },
            Some(value @ Value::Object(_)) => {
                let choice = Fields::new(value, "tool_choice")?;
                if choice.string("type")? != Some("function") {
                    return Err(choice.expected("type", "function"));
                }
                let function = Fields::new(choice.require("function")?, "tool_choice.function")?;
                function.require("name")?;
                ToolChoice::Named(function.string("name")?.unwrap_or_default().to_owned())
            }
            Some(_) => return Err(fields.expected("tool_choice", what)),
        };
        let names = || tools.and_then(Value::as_array).into_iter().flatten().map(|tool| &tool["function"]["name"]);
        match &choice {
            ToolChoice::Named(name) if !names().any(|n| n == name) => {
                Err(ApiError::invalid("tool_choice.function.name", format!("no tool is called {name:?}")))
            }
            ToolChoice::Required if tools.is_none() => {
                Err(ApiError::invalid("tool_choice", "required, but tools is empty"))
            }
            _ => Ok(choice),
        }
    }
}

/// A request.
#[derive(Clone, Debug)]
pub struct ChatRequest {
    /// The model's name, if it says one.
    pub model: Option<String>,
    /// What makes the prompt.
    pub talk: Talk,
    /// How the answer is generated.
    pub generation: Generation,
    /// Log-probabilities: of how many other tokens.
    pub logprobs: Option<usize>,
    /// Which tools may or must be called.
    pub tool_choice: ToolChoice,
}

impl ChatRequest {
    /// Reads a request.
    ///
    /// # Errors
    /// The field that is wrong, or that asks for what cannot be done.
    pub fn read(body: &Value) -> Result<ChatRequest, ApiError> {
        let fields = Fields::new(body, "")?;
        let mut talk = Talk::read(&fields)?;
        refuse(&fields)?;
        let old = fields.integer("max_tokens", 1..=u64::MAX)?;
        let max_tokens = fields.integer("max_completion_tokens", 1..=u64::MAX)?.or(old);
        let generation = Generation::read(&fields, max_tokens.map(|n| usize::try_from(n).unwrap_or(usize::MAX)))?;
        let (wanted, top) = (fields.boolean("logprobs")?, fields.integer("top_logprobs", 0..=MAX_LOGPROBS)?);
        if top.is_some_and(|n| n > 0) && wanted != Some(true) {
            return Err(ApiError::invalid("top_logprobs", "only allowed when logprobs is true"));
        }
        let tool_choice = ToolChoice::read(&fields, talk.tools.as_ref())?;
        if tool_choice == ToolChoice::None {
            talk.tools = None;
        }
        let logprobs = (wanted == Some(true)).then_some(top.unwrap_or(0) as usize);
        let model = fields.string("model")?.map(str::to_owned);
        Ok(ChatRequest { model, talk, generation, logprobs, tool_choice })
    }

    /// The work that the request is for a model.
    ///
    /// # Errors
    /// What the model has to refuse: the template's own words, a prompt that is too long.
    pub fn job(&self, card: &Card) -> Result<Job, ApiError> {
        let prompt = self.talk.prompt(card)?;
        let ids = prompt.clone();
        let mut request = self.generation.request(card, "messages", prompt)?;
        request.logprobs = self.logprobs;
        let tokens = Tokens::new(card, &request);
        let header = |object| Header {
            id: unique("chatcmpl-"),
            object,
            created: super::model::now(),
            model: card.id.clone(),
            fingerprint: card.fingerprint.clone(),
        };
        let usage = Usage { prompt: ids.len(), ..Usage::default() };
        let n = request.n;
        let answer = match self.generation.stream {
            None => {
                let choices = (0..n).map(|_| Choice::new(self)).collect();
                let header = header("chat.completion");
                Answer::Whole(Box::new(Whole {
                    header,
                    tokens,
                    ids,
                    choices,
                    usage,
                    prompt_logprobs: None,
                    stats: None,
                }))
            }
            Some(options) => {
                let choices = (0..n).map(|_| Piecewise { reply: Reply::default(), has_begun: false }).collect();
                let header = header("chat.completion.chunk");
                Answer::Stream(Box::new(Chunks { header, tokens, choices, usage, options, left: n, stats: None }))
            }
        };
        Ok(Job { requests: vec![request], answer })
    }
}

/// What is known and cannot be done.
fn refuse(fields: &Fields) -> Result<(), ApiError> {
    for (i, modality) in fields.list("modalities").unwrap_or_default().into_iter().flatten().enumerate() {
        if modality != "text" {
            return Err(expected(format!("modalities[{i}]"), "text, the only kind of answer", modality));
        }
    }
    for field in ["audio", "functions", "function_call", "response_format", "grammar"] {
        if fields.get(field).is_some_and(|value| value["type"] != "text") {
            return Err(ApiError::invalid(field, "not supported"));
        }
    }
    Ok(())
}

/// One of the answers, as a whole.
struct Choice {
    reply: Reply,
    content: String,
    logprobs: Option<Vec<Value>>,
    finish: &'static str,
}

impl Choice {
    fn new(request: &ChatRequest) -> Choice {
        let logprobs = request.logprobs.map(|_| Vec::new());
        Choice { reply: Reply::default(), content: String::new(), logprobs, finish: "stop" }
    }

    fn add(&mut self, pieces: Vec<Piece>) {
        for piece in pieces {
            match piece {
                Piece::Content(text) => self.content.push_str(&text),
            }
        }
    }

    fn value(&mut self, index: usize) -> Value {
        let content = std::mem::take(&mut self.content);
        let message = json!({ "role": "assistant", "content": content, "refusal": null });
        let logprobs = self.logprobs.take().map(|content| json!({ "content": content, "refusal": null }));
        json!({ "index": index, "message": message, "logprobs": logprobs, "finish_reason": self.finish })
    }
}

struct Whole {
    header: Header,
    tokens: Tokens,
    ids: Vec<u32>,
    choices: Vec<Choice>,
    usage: Usage,
    prompt_logprobs: Option<Value>,
    stats: Option<Stats>,
}

impl Assemble for Whole {
    fn take(&mut self, _: usize, event: &Event) -> Result<(), ApiError> {
        self.usage.take(event);
        let Some(choice) = self.choices.get_mut(event.sample) else { return Ok(()) };
        if !event.prompt_logprobs.is_empty() {
            self.prompt_logprobs = Some(logprobs::prompt(self.tokens.tokenizer(), &self.ids, &event.prompt_logprobs));
        }
        if let (Some(list), Some(entry)) = (&mut choice.logprobs, entry(&self.tokens, event)) {
            list.push(entry);
        }
        let pieces = choice.reply.push(&event.text);
        choice.add(pieces);
        if let Some(finish) = &event.finish {
            choice.finish = finish_reason(&finish.reason)?;
            self.stats = self.stats.or(Some(finish.stats));
        }
        Ok(())
    }

    fn body(&mut self) -> Value {
        let choices = self.choices.iter_mut().enumerate().map(|(i, choice)| choice.value(i)).collect();
        let mut body = self.header.with(choices);
        body["usage"] = self.usage.value();
        if let Some(logprobs) = self.prompt_logprobs.take() {
            body["prompt_logprobs"] = logprobs;
        }
        if let Some(stats) = &self.stats {
            body["timings"] = timings(stats);
        }
        body
    }
}

/// An entry of `logprobs.content`. A token that ends the answer is no part of it.
fn entry(tokens: &Tokens, event: &Event) -> Option<Value> {
    Some(logprobs::chat_entry(tokens.tokenizer(), tokens.shown(event)?, event.logprobs.as_ref()?))
}

/// One of the answers, as it comes.
struct Piecewise {
    reply: Reply,
    has_begun: bool,
}

struct Chunks {
    header: Header,
    tokens: Tokens,
    choices: Vec<Piecewise>,
    usage: Usage,
    options: StreamOptions,
    /// Answers that have not ended.
    left: usize,
    stats: Option<Stats>,
}

impl Chunks {
    fn chunk(&self, index: usize, delta: Value, logprobs: Option<Value>, finish: Option<&str>) -> Value {
        let logprobs = logprobs.map(|entry| json!({ "content": [entry], "refusal": null }));
        let choice = json!({ "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish });
        let mut chunk = self.header.with(vec![choice]);
        if self.options.continuous_usage {
            chunk["usage"] = self.usage.value();
        }
        chunk
    }
}

impl Stream for Chunks {
    fn take(&mut self, _: usize, event: &Event, chunks: &mut Vec<Value>) -> Result<(), ApiError> {
        self.usage.take(event);
        let Some(choice) = self.choices.get_mut(event.sample) else { return Ok(()) };
        let mut deltas = Vec::new();
        for piece in choice.reply.push(&event.text) {
            match piece {
                Piece::Content(text) => deltas.push(json!({ "content": text })),
            }
        }
        let mut entry = entry(&self.tokens, event);
        // One chunk a token, whether or not its text is final: clients measure by chunks. An end token is none.
        if deltas.is_empty() && self.tokens.shown(event).is_some() {
            deltas.push(json!({ "content": "" }));
        }
        // The role comes with the first token, so that a client's time to it is what it says.
        if !choice.has_begun && (!deltas.is_empty() || event.finish.is_some()) {
            choice.has_begun = true;
            if deltas.is_empty() {
                deltas.push(json!({ "content": "" }));
            }
            let mut first = Map::from_iter([("role".to_owned(), json!("assistant"))]);
            first.extend(deltas[0].as_object().cloned().unwrap_or_default());
            deltas[0] = Value::Object(first);
        }
        for delta in deltas {
            chunks.push(self.chunk(event.sample, delta, entry.take(), None));
        }
        if let Some(finish) = &event.finish {
            let reason = finish_reason(&finish.reason)?;
            self.stats = self.stats.or(Some(finish.stats));
            self.left = self.left.saturating_sub(1);
            let mut chunk = self.chunk(event.sample, json!({}), None, Some(reason));
            if let (0, Some(stats)) = (self.left, &self.stats) {
                chunk["timings"] = timings(stats);
            }
            chunks.push(chunk);
        }
        Ok(())
    }

    fn end(&mut self, chunks: &mut Vec<Value>) {
        if self.options.include_usage {
            let mut chunk = self.header.with(Vec::new());
            chunk["usage"] = self.usage.value();
            if let Some(stats) = &self.stats {
                chunk["timings"] = timings(stats);
            }
            chunks.push(chunk);
        }
    }
}
