//! `/v1/chat/completions`.

use crate::openai::answer::Job;
use crate::openai::fields::expected;
use crate::openai::generation::MAX_LOGPROBS;
use crate::openai::reply::Replies;
use crate::openai::{ApiError, Card, Fields, Generation, chat_answer, messages, tool_text};
use puna::{ChatEnd, Conversation};
use serde_json::{Map, Value, json};
use std::time::Instant;

/// Variables of a template that are not the client's: they would pass by all checks of a message, or spell control
/// tokens.
const OWN_VARIABLES: [&str; 10] = [
    "messages",
    "tools",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
];

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
        let more = fields.object("chat_template_kwargs")?.cloned().unwrap_or_default();
        if let Some(name) = more.keys().find(|name| OWN_VARIABLES.contains(&name.as_str())) {
            let what =
                "this variable of the template cannot be set, it is what the rest of the request or the model says";
            return Err(ApiError::invalid(format!("chat_template_kwargs.{name}"), what));
        }
        variables.extend(more);
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

    /// Calls `f` with what the template gets (tools in text, if it does not show them) and where the prompt must fit.
    fn with_conversation<T>(
        &self,
        card: &Card,
        ctx: Option<usize>,
        f: impl FnOnce(&Conversation) -> Result<T, puna::Error>,
    ) -> Result<T, ApiError> {
        let shows_tools = tool_text::shows_tools(card.chat.template().unwrap_or_default());
        let tools = self.tools.as_ref().and_then(Value::as_array).filter(|_| !shows_tools);
        let spelled = tools.map(|tools| tool_text::spell(&self.messages, tools));
        let conversation = Conversation {
            messages: spelled.as_deref().unwrap_or(&self.messages),
            tools: self.tools.as_ref().filter(|_| shows_tools),
            template: None,
            end: self.end,
            variables: Some(&self.variables),
            ctx,
        };
        f(&conversation).map_err(|e| ApiError::of_engine("messages", &e))
    }

    /// The prompt as text.
    ///
    /// # Errors
    /// What the template says is wrong.
    pub fn render(&self, card: &Card) -> Result<String, ApiError> {
        self.with_conversation(card, None, |conversation| card.chat.render(conversation))
    }

    /// The prompt as ids. One that is far too long for a context of `ctx` positions is not tokenized.
    ///
    /// # Errors
    /// As [`Talk::render`]; the prompt is too long.
    pub fn prompt(&self, card: &Card, ctx: Option<usize>) -> Result<Vec<u32>, ApiError> {
        self.with_conversation(card, ctx, |conversation| card.chat.prompt(conversation))
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
    /// Whether an answer may call several.
    pub parallel: bool,
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
        let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
        if talk.tools.is_some() && generation.constraint.is_some() {
            let what = "cannot be used together with tools, unless tool_choice is none";
            let param = if fields.get("grammar").is_some() { "grammar" } else { "response_format" };
            return Err(ApiError::invalid(param, what));
        }
        if generation.constraint.as_ref().is_some_and(|constraint| !constraint.allows_reasoning()) {
            // What a template would begin with is no part of the grammar.
            talk.variables.entry("enable_thinking").or_insert(json!(false));
        }
        Ok(ChatRequest { model, talk, generation, logprobs, tool_choice, parallel })
    }

    /// The work that the request is for a model.
    ///
    /// # Errors
    /// What the model has to refuse: the template's own words, a prompt that is too long.
    pub fn job(&self, card: &Card) -> Result<Job, ApiError> {
        card.check_head()?;
        let prompt = self.talk.prompt(card, Some(card.ctx))?;
        let ids = prompt.clone();
        let mut request = self.generation.request(card, "messages", prompt)?;
        request.logprobs = self.logprobs;
        let tools = self.talk.tools.as_ref().and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let constraint = self.generation.constraint.as_ref();
        let replies = Replies::new(card, tools, &ids, constraint);
        let start = Instant::now();
        request.grammar = constraint.map(|constraint| constraint.compile_reply(card, &replies)).transpose()?;
        if !tools.is_empty() {
            request.grammar = Some(replies.grammar(card, tools, &self.tool_choice, self.parallel)?);
        }
        let grammar = start.elapsed();
        request.shown = replies.markers();
        request.steering = self.generation.inside.steering.steering(card)?;
        let account = self.generation.inside.account(card, grammar);
        let answer = chat_answer::new(card, self, &request, &replies, (ids, account));
        Ok(Job { requests: vec![request], prefix: self.generation.prefix.clone(), answer })
    }
}

/// What is known and cannot be done.
fn refuse(fields: &Fields) -> Result<(), ApiError> {
    for (i, modality) in fields.list("modalities").unwrap_or_default().into_iter().flatten().enumerate() {
        if modality != "text" {
            return Err(expected(format!("modalities[{i}]"), "text, the only kind of answer", modality));
        }
    }
    for field in ["audio", "functions", "function_call"] {
        if fields.get(field).is_some() {
            return Err(ApiError::invalid(field, "not supported"));
        }
    }
    Ok(())
}
