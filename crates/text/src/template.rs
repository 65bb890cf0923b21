//! Chat templates: the Jinja programs that models carry to turn a conversation into a prompt, rendered as
//! `transformers` renders them.

mod compile;
mod json;
mod methods;
mod operators;
mod trust;

use std::sync::{Arc, LazyLock};

use minijinja::machinery::{CompiledTemplate, eval, make_string_output};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior, Value};
use serde_json::Value as Json;

use crate::error::{Result, TextError, one_line};
use crate::tokenizer::{Segment, Tokenizer};

/// Work that a rendering may do: one unit an instruction, and one for every 64 bytes it makes. This bounds time (to
/// about a second) and memory (to about 100 MB).
const FUEL: u64 = 1_500_000;
/// More work is allowed for more input: one unit for so many bytes of it.
const INPUT_BYTES_PER_FUEL: u64 = 16;
/// Longest prompt, in bytes; also the longest string that `+` and `*` make.
const MAX_OUTPUT: usize = 16 << 20;
/// Deepest nesting of lists and objects, in messages as in a template's own values.
const MAX_DEPTH: usize = 128;

/// A model's chat template.
///
/// What templates can do is bounded: steps and bytes made ([`TextError::TemplateLimit`] within about a second and
/// 200 MB), 16 MiB of output, the depth of macros and of values, and they see nothing but the variables given. Known
/// differences from Jinja: no `{% include %}`, `{% extends %}` and `{% block %}`; macros have no `varargs` and
/// `kwargs`; comparing values of different types is not an error.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    source: Arc<str>,
}

/// What a chat template is rendered with.
#[derive(Debug, Clone, Copy, Default)]
pub struct ChatInput<'a> {
    /// The conversation, a list of objects with `role` and `content`; passed on as it is.
    pub messages: Option<&'a Json>,
    /// Tools on offer, a list of JSON schemas; `none` in the template if absent.
    pub tools: Option<&'a Json>,
    /// Whether the prompt ends with the beginning of an answer.
    pub add_generation_prompt: bool,
    /// `bos_token`; undefined in the template if absent.
    pub bos_token: Option<&'a str>,
    /// `eos_token`; undefined in the template if absent.
    pub eos_token: Option<&'a str>,
    /// More variables (`enable_thinking`, `documents`, `date_string` ..); they overrule those above.
    pub variables: Option<&'a serde_json::Map<String, Json>>,
}

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    /// [`TextError::TemplateSyntax`], or [`TextError::TemplateLimit`] for an absurdly large expression.
    pub fn new(source: &str) -> Result<ChatTemplate> {
        let source = compile::prepare(source)?;
        compile::compile(&source)?;
        Ok(ChatTemplate { source: source.into() })
    }

    /// The template in the `chat_template` value of tokenizer_config.json (or a file of its own kind): a string, or a
    /// list of named templates, of which the one called `default` is taken. Null is no template.
    ///
    /// # Errors
    /// [`TextError::NoDefaultTemplate`] with the names there are.
    pub fn source_from_config(chat_template: &Json) -> Result<Option<&str>> {
        let file = "tokenizer_config.json: chat_template";
        match chat_template {
            Json::Null => Ok(None),
            Json::String(source) => Ok(Some(source)),
            Json::Array(list) => {
                let name = |t: &Json| t["name"].as_str().unwrap_or("?").to_string();
                let default = list.iter().find(|t| t["name"] == "default").and_then(|t| t["template"].as_str());
                let found = || list.iter().map(name).collect::<Vec<_>>().join(", ");
                default.map(Some).ok_or_else(|| TextError::NoDefaultTemplate { file, found: found() })
            }
            _ => Err(TextError::File { file, problem: "expected a string or a list of named templates".into() }),
        }
    }

    /// The prompt for a conversation.
    ///
    /// # Errors
    /// [`TextError::TemplateRaised`] with the template's own words, [`TextError::TemplateFailed`], or
    /// [`TextError::TemplateLimit`].
    pub fn render(&self, input: &ChatInput) -> Result<String> {
        self.render_variables(&variables(input))
    }

    /// The prompt, divided into what the template wrote and what it copied from the conversation as far as that
    /// matters: text in messages, tools and variables that spells a control token of `tokenizer`, or a part of one at
    /// its ends, is untrusted. The segments joined are exactly what [`ChatTemplate::render`] gives.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`].
    pub fn render_segments(&self, input: &ChatInput, tokenizer: &Tokenizer) -> Result<Vec<Segment>> {
        trust::render(self, variables(input), tokenizer)
    }

    /// Renders with the variables of the object `root`.
    fn render_variables(&self, root: &Json) -> Result<String> {
        let (root, size) = to_value(root)?;
        let mut env = ENVIRONMENT.clone();
        env.set_fuel(Some(FUEL + size / INPUT_BYTES_PER_FUEL));
        let compiled = compile::compile(&self.source)?;
        run(&env, &compiled, root)
    }
}

fn run<'env>(env: &'env Environment<'env>, compiled: &CompiledTemplate<'env>, root: Value) -> Result<String> {
    let mut prompt = String::new();
    let mut output = make_string_output(&mut prompt);
    let result = eval(env, &compiled.instructions, root, &compiled.blocks, &mut output, AutoEscape::None);
    match result.map(drop) {
        Err(error) => Err(failure(&error)),
        Ok(()) if prompt.len() > MAX_OUTPUT => Err(limit(format!("the prompt is longer than {MAX_OUTPUT} bytes"))),
        Ok(()) => Ok(prompt),
    }
}

/// The variables of `input` under their names in templates. Absent tools and documents are defined, as none.
fn variables(input: &ChatInput) -> Json {
    let mut root = serde_json::Map::new();
    root.insert("messages".into(), input.messages.cloned().unwrap_or_else(|| Json::Array(Vec::new())));
    root.insert("tools".into(), input.tools.cloned().unwrap_or(Json::Null));
    root.insert("documents".into(), Json::Null);
    root.insert("add_generation_prompt".into(), input.add_generation_prompt.into());
    for (name, text) in [("bos_token", input.bos_token), ("eos_token", input.eos_token)] {
        root.extend(text.map(|text| (name.to_string(), text.into())));
    }
    root.extend(input.variables.into_iter().flatten().map(|(name, value)| (name.clone(), value.clone())));
    Json::Object(root)
}

/// A JSON value for the template engine, and its size in bytes, roughly.
fn to_value(json: &Json) -> Result<(Value, u64)> {
    fn convert(json: &Json, depth: usize, size: &mut u64) -> Option<Value> {
        *size += 8;
        Some(match json {
            Json::Null => Value::from(()),
            Json::Bool(b) => Value::from(*b),
            Json::Number(n) => match (n.as_i64(), n.as_u64()) {
                (Some(n), _) => Value::from(n),
                (None, Some(n)) => Value::from(n),
                (None, None) => Value::from(n.as_f64()?),
            },
            Json::String(s) => {
                *size += s.len() as u64;
                Value::from(s.as_str())
            }
            _ if depth == 0 => return None,
            Json::Array(list) => list.iter().map(|item| convert(item, depth - 1, size)).collect::<Option<Value>>()?,
            Json::Object(map) => {
                let pairs = map.iter().map(|(key, value)| Some((key.as_str(), convert(value, depth - 1, size)?)));
                Value::from_pairs(pairs.collect::<Option<Vec<_>>>()?)
            }
        })
    }
    let mut size = 0;
    let value = convert(json, MAX_DEPTH, &mut size);
    value.map(|value| (value, size)).ok_or_else(|| limit(format!("the input is nested more than {MAX_DEPTH} deep")))
}

/// What templates find, apart from the variables: Jinja's own filters, tests and functions, Python's methods of
/// strings, lists and dicts, and what `transformers` adds.
static ENVIRONMENT: LazyLock<Environment<'static>> = LazyLock::new(|| {
    let mut env = Environment::new();
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    minijinja_contrib::add_to_environment(&mut env);
    // Not in Jinja, and made lazily at no cost to the template: it could build what it cannot pay for.
    env.remove_filter("chain");
    env.remove_filter("zip");
    env.add_filter("tojson", json::tojson);
    env.add_function("raise_exception", raise_exception);
    env.add_function("strftime_now", strftime_now);
    operators::add_to(&mut env);
    methods::add_to(&mut env);
    env
});

/// Whitespace is handled as `transformers` sets Jinja up.
static SYNTAX: LazyLock<SyntaxConfig> = LazyLock::new(|| {
    let mut syntax = SyntaxConfig::builder();
    syntax.trim_blocks(true).lstrip_blocks(true);
    syntax.build().unwrap_or_default()
});

/// The error of `raise_exception`, found again in [`failure`].
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: &Value) -> std::result::Result<Value, Error> {
    let raised = Raised(one_line(message));
    Err(Error::new(ErrorKind::InvalidOperation, "raised by the template").with_source(raised))
}

fn strftime_now(format: &str) -> std::result::Result<String, Error> {
    let time = jiff::fmt::strtime::format(format, &jiff::ZonedDateTime::now());
    time.map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {e}")))
}

/// The engine's error in this crate's terms.
fn failure(error: &Error) -> TextError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(inner) = cause {
        if let Some(Raised(message)) = inner.downcast_ref() {
            return TextError::TemplateRaised(message.clone());
        }
        if let Some(inner) = inner.downcast_ref::<Error>() {
            let detail = inner.detail().unwrap_or_default();
            if inner.kind() == ErrorKind::OutOfFuel {
                return limit("it does too much work".into());
            }
            if detail.contains("recursion limit") {
                return limit("it calls itself too deeply".into());
            }
        }
        cause = inner.source();
    }
    let problem = match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    let (line, problem) = (error.line().unwrap_or(0), one_line(problem));
    match error.kind() {
        ErrorKind::SyntaxError | ErrorKind::BadEscape => TextError::TemplateSyntax { line, problem },
        _ => TextError::TemplateFailed { line, problem },
    }
}

fn limit(what: String) -> TextError {
    TextError::TemplateLimit(what)
}
