//! Grammars of tool calls, in each format that answers have them.

use super::MAX_TEXT;
use super::schema::{self, error};
use crate::error::Error;
use puna_text::Tokenizer;
use puna_text::reply::{CallStyle, Kinds, ReplyFormat};
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// Most tools of a grammar.
const MAX_TOOLS: usize = 128;
/// Longest grammar of tools, in bytes.
const MAX_LEN: usize = 2 << 20;

/// Whether tools are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolChoice<'a> {
    /// Text, and then calls if the model begins one.
    Auto,
    /// At least one call, and no text.
    Required,
    /// One call of this tool.
    Named(&'a str),
}

/// Which calls an answer may have.
#[derive(Clone, Copy, Debug)]
pub struct ToolGrammar<'a> {
    /// How the model writes calls.
    pub format: &'static ReplyFormat,
    /// The tools, as in a request: objects with `name` and `parameters`, within `function` or not.
    pub tools: &'a [Value],
    /// Whether they are called.
    pub choice: ToolChoice<'a>,
    /// Whether there may be several calls.
    pub parallel: bool,
    /// Whether the answer begins within reasoning.
    pub in_reasoning: bool,
}

/// A tool that may be called.
struct Tool<'a> {
    name: &'a str,
    parameters: &'a Value,
    /// Where its parameters are, in the list of tools.
    at: String,
}

/// A marker as grammars name it: a token of its own, or a text.
enum Mark {
    Token(u32),
    Text(&'static str),
}

impl Mark {
    fn new(text: &'static str, tokenizer: &Tokenizer) -> Mark {
        match tokenizer.token_to_id(text).filter(|&id| tokenizer.is_control(id)) {
            Some(id) => Mark::Token(id),
            None => Mark::Text(text),
        }
    }

    fn lark(&self) -> String {
        match self {
            Mark::Token(id) => format!("<[{id}]>"),
            Mark::Text(text) => quoted(text),
        }
    }
}

impl<'a> ToolGrammar<'a> {
    /// The schemas of all parameters, and where they are in the list of tools.
    pub(super) fn schemas(&self) -> impl Iterator<Item = (String, &'a Value)> {
        self.tools.iter().enumerate().filter_map(|(i, tool)| {
            let tool = read(i, tool).ok()?;
            Some((tool.at, tool.parameters))
        })
    }

    /// The grammar.
    pub(super) fn lark(&self, tokenizer: &Tokenizer) -> Result<String, Error> {
        let failed = |problem: String| Error::Grammar { kind: "tools", problem };
        if self.tools.len() > MAX_TOOLS {
            return Err(failed(format!("there are {} tools, at most {MAX_TOOLS} are allowed", self.tools.len())));
        }
        let mut tools = self.tools.iter().enumerate().map(|(i, tool)| read(i, tool)).collect::<Result<Vec<_>, _>>()?;
        if let ToolChoice::Named(name) = self.choice {
            tools.retain(|tool| tool.name == name);
            if tools.is_empty() {
                return Err(failed(format!("there is no tool `{name}`")));
            }
        }
        if tools.is_empty() {
            return Err(failed("there are no tools".into()));
        }
        let patterns: usize = tools.iter().map(|tool| schema::pattern_bytes(tool.parameters)).sum();
        if patterns > MAX_TEXT {
            return Err(failed(format!("the expressions of all tools have more than {MAX_TEXT} bytes")));
        }
        let mut out = Rules { text: String::new(), tokenizer };
        let shape = match self.format.calls {
            CallStyle::None => {
                return Err(failed(format!("answers of the format `{}` have no calls", self.format.name)));
            }
            CallStyle::Hermes => out.hermes(&tools)?,
            CallStyle::Llama3 => out.llama3(&tools)?,
            CallStyle::Mistral => out.mistral(&tools, self.is_single())?,
            CallStyle::Qwen3Coder => out.elements(&tools, &CODER)?,
            CallStyle::MiniMaxM2 => out.elements(&tools, &MINIMAX)?,
        };
        out.start(self, &shape);
        if out.text.len() > MAX_LEN {
            return Err(failed(format!("their grammar has {} bytes, at most {MAX_LEN} are allowed", out.text.len())));
        }
        Ok(out.text)
    }

    fn is_single(&self) -> bool {
        !self.parallel || matches!(self.choice, ToolChoice::Named(_))
    }
}

fn read(index: usize, tool: &Value) -> Result<Tool<'_>, Error> {
    let (function, at) = match tool.get("function") {
        Some(function) => (function, format!("/{index}/function")),
        None => (tool, format!("/{index}")),
    };
    static ANY: std::sync::LazyLock<Value> = std::sync::LazyLock::new(|| json!({ "type": "object" }));
    let name = function.get("name").and_then(Value::as_str).filter(|name| is_name(name));
    let Some(name) = name else {
        let problem = "expected letters, digits, `_`, `-` and `.`, at most 128 of them".to_owned();
        return Err(Error::Schema { keyword: "name".into(), at: format!("{at}/name"), problem });
    };
    let parameters = match function.get("parameters") {
        None | Some(Value::Null) => &*ANY,
        Some(parameters) => parameters,
    };
    Ok(Tool { name, parameters, at: format!("{at}/parameters") })
}

fn is_name(name: &str) -> bool {
    let is_good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    (1..=128).contains(&name.len()) && name.chars().all(is_good)
}

/// How a format's calls fit into an answer.
struct Shape {
    /// What begins a call.
    open: Mark,
    /// What begins a call at the beginning of the answer only: then text begins otherwise.
    bare: Option<&'static str>,
    /// The rule of what follows, with all that can be said by it.
    first: String,
    /// The rule of another call, from its beginning on.
    next: Option<String>,
}

struct Rules<'t> {
    text: String,
    tokenizer: &'t Tokenizer,
}

impl Rules<'_> {
    fn rule(&mut self, name: &str, body: &str) {
        let _ = writeln!(self.text, "{name}: {body}");
    }

    /// The rules of an answer: reasoning, text, calls.
    fn start(&mut self, grammar: &ToolGrammar, shape: &Shape) {
        let think = grammar
            .format
            .think
            .map(|(open, close)| (Mark::new(open, self.tokenizer), Mark::new(close, self.tokenizer)));
        self.rule("SPACE", r"/[ \n]{1,4}/");
        self.rule("TEXT", "/(?s:.*)/");
        let mut no_think = String::new();
        let think = match think {
            None => "",
            Some((_, Mark::Token(close))) if grammar.in_reasoning => {
                self.rule("think", &format!("TEXT <[{close}]>"));
                "think"
            }
            Some((_, Mark::Text(close))) if grammar.in_reasoning => {
                self.rule("think[lazy]", &format!("TEXT {}", quoted(close)));
                "think"
            }
            Some((Mark::Text(open), Mark::Text(close))) => {
                self.rule("think[lazy]", &format!(r"/[ \n]*/ {} TEXT {}", quoted(open), quoted(close)));
                no_think = format!(r" & ~/[ \n]*{}(?s:.*)/", escaped(open));
                "think?"
            }
            Some((open, close)) => {
                self.rule("think", &format!("{} TEXT {}", open.lark(), close.lark()));
                "think?"
            }
        };
        let more = match &shape.next {
            Some(next) if !grammar.is_single() => format!("(SPACE? {next})*"),
            _ => String::new(),
        };
        self.rule("calls", &format!("{} {more}", shape.first));
        let open = shape.open.lark();
        let body = match grammar.choice {
            ToolChoice::Auto => {
                match &shape.open {
                    Mark::Token(_) => self.rule("marked", &format!("BEFORE {open} calls")),
                    Mark::Text(_) => {
                        self.rule("head[lazy]", &format!("BEFORE {open}"));
                        self.rule("marked", "head calls");
                    }
                }
                let text = match shape.bare {
                    Some(bare) => format!(r"/([ \n]*[^ \n{}](?s:.*))?[ \n]*/", escaped(bare)),
                    None => "/(?s:.*)/".to_owned(),
                };
                self.rule("BEFORE", &format!("{text}{no_think}"));
                "(BEFORE | marked)"
            }
            _ => {
                self.rule("marked", &format!("SPACE? {open} calls"));
                "marked"
            }
        };
        match shape.bare {
            Some(_) => {
                self.rule("bare", "SPACE? calls");
                self.rule("start", &format!("{think} (bare | {body})"));
            }
            None => self.rule("start", &format!("{think} {body}")),
        }
    }

    /// `prefix`, an object of each tool's arguments, `}`.
    fn objects(&mut self, tools: &[Tool], key: &str) -> Result<String, Error> {
        let mut names = Vec::new();
        for (i, tool) in tools.iter().enumerate() {
            let schema = parameters(tool)?;
            let head = format!("{{\"name\": {}, \"{key}\": ", quoted(tool.name));
            self.rule(&format!("object_{i}"), &format!("{} %json {} \"}}\"", quoted(&head), super::spaced(&schema)));
            names.push(format!("object_{i}"));
        }
        Ok(format!("({})", names.join(" | ")))
    }

    fn hermes(&mut self, tools: &[Tool]) -> Result<Shape, Error> {
        let (open, close) = (Mark::new("<tool_call>", self.tokenizer), Mark::new("</tool_call>", self.tokenizer));
        let object = self.objects(tools, "arguments")?;
        self.rule("call", &format!("SPACE? {object} SPACE? {}", close.lark()));
        let next = Some(format!("{} call", open.lark()));
        Ok(Shape { open, bare: None, first: "call".into(), next })
    }

    fn llama3(&mut self, tools: &[Tool]) -> Result<Shape, Error> {
        let object = self.objects(tools, "parameters")?;
        self.rule("call", &object);
        let open = Mark::new("<|python_tag|>", self.tokenizer);
        Ok(Shape { open, bare: Some("{"), first: "call".into(), next: Some("\";\" SPACE? call".into()) })
    }

    /// The list of calls, or names where the vocabulary has the token that follows them.
    fn mistral(&mut self, tools: &[Tool], is_single: bool) -> Result<Shape, Error> {
        let open = Mark::new("[TOOL_CALLS]", self.tokenizer);
        if let Mark::Token(id) = Mark::new("[ARGS]", self.tokenizer) {
            let mut names = Vec::new();
            for (i, tool) in tools.iter().enumerate() {
                let schema = super::spaced(&parameters(tool)?);
                self.rule(&format!("named_{i}"), &format!("{} <[{id}]> %json {schema}", quoted(tool.name)));
                names.push(format!("named_{i}"));
            }
            self.rule("call", &names.join(" | "));
            let next = Some(format!("{} call", open.lark()));
            return Ok(Shape { open, bare: None, first: "call".into(), next });
        }
        let object = self.objects(tools, "arguments")?;
        let more = if is_single { String::new() } else { format!("(\",\" SPACE? {object})*") };
        self.rule("call", &format!("SPACE? \"[\" {object} {more} \"]\""));
        Ok(Shape { open, bare: None, first: "call".into(), next: None })
    }

    fn elements(&mut self, tools: &[Tool], style: &Elements) -> Result<Shape, Error> {
        let (open, close) = (Mark::new(style.open, self.tokenizer), Mark::new(style.close, self.tokenizer));
        let mut names = Vec::new();
        for (i, tool) in tools.iter().enumerate() {
            let parameters = self.element_parameters(i, tool, style)?;
            let head = quoted(&format!("{}{}{}\n", style.function, tool.name, style.name_end));
            self.rule(&format!("function_{i}"), &format!("{head} {parameters} {}", quoted(style.end)));
            names.push(format!("function_{i}"));
        }
        self.rule("function", &names.join(" | "));
        self.rule("call", &format!("SPACE? function SPACE? {}", close.lark()));
        let next = Some(format!("{} call", open.lark()));
        Ok(Shape { open, bare: None, first: "call".into(), next })
    }

    fn element_parameters(&mut self, index: usize, tool: &Tool, style: &Elements) -> Result<String, Error> {
        let schema = schema::prepare(tool.parameters).map_err(|e| below(e, &tool.at))?;
        let empty = Map::new();
        let object = schema.as_object().unwrap_or(&empty);
        let known = ["type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"];
        if let Some(keyword) = object.keys().find(|keyword| !known.contains(&keyword.as_str())) {
            let problem = "it cannot be enforced where parameters are elements";
            return Err(error(keyword, &format!("{}/{keyword}", tool.at), problem));
        }
        let properties = object.get("properties").and_then(Value::as_object).unwrap_or(&empty);
        let required: Vec<&str> =
            object.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
        if let Some(name) = required.iter().find(|name| !properties.contains_key(**name)) {
            let problem = format!("`{name}` is not among the properties");
            return Err(error("required", &format!("{}/required", tool.at), problem));
        }
        let mut all = String::new();
        for (i, (name, property)) in properties.iter().enumerate() {
            let at = format!("{}/properties/{name}", tool.at);
            if name.contains(['<', '>', '"', '\n']) || name.is_empty() {
                return Err(error(name, &at, "this name cannot be written as an element"));
            }
            let rule = format!("parameter_{index}_{i}");
            let value = self.element_value(&rule, property, &schema, &at, style)?;
            let head = quoted(&format!("{}{name}{}", style.parameter, style.parameter_end));
            self.rule(&rule, &format!("{head} {value} \"\\n\""));
            let _ = write!(all, "{rule}{} ", if required.contains(&name.as_str()) { "" } else { "?" });
        }
        Ok(all)
    }

    /// A value and the mark after it.
    fn element_value(
        &mut self,
        rule: &str,
        property: &Value,
        root: &Value,
        at: &str,
        style: &Elements,
    ) -> Result<String, Error> {
        let line = if style.has_newlines { "\n" } else { "" };
        let close = format!("{line}{VALUE_END}");
        if !Kinds::of(property, root).is_text() {
            let mut schema = property.clone();
            if let (Value::Object(schema), Value::Object(root)) = (&mut schema, root) {
                for keyword in ["$schema", "$defs", "definitions"] {
                    root.get(keyword).map(|value| schema.insert(keyword.to_owned(), value.clone()));
                }
            }
            return Ok(format!("{} %json {} {}", quoted(line), super::spaced(&schema), quoted(&close)));
        }
        let property = property.as_object().filter(|map| !map.contains_key("$ref"));
        let bad = property.map_or(Some("$ref"), |map| {
            map.keys().map(String::as_str).find(|keyword| !["type", "enum", "const"].contains(keyword))
        });
        if let Some(keyword) = bad {
            let problem = "it cannot be enforced of a text that is written as an element";
            return Err(error(keyword, &format!("{at}/{keyword}"), problem));
        }
        let values = property.and_then(|map| match (map.get("const"), map.get("enum")) {
            (Some(value), _) => Some(vec![value]),
            (None, Some(Value::Array(values))) => Some(values.iter().collect()),
            _ => None,
        });
        let Some(values) = values else {
            // The text ends at the first mark.
            self.rule(&format!("{rule}_text[lazy]"), &format!("TEXT {}", quoted(VALUE_END)));
            return Ok(format!("{} {rule}_text", quoted(line)));
        };
        let mut texts = Vec::new();
        for value in values.into_iter().filter_map(Value::as_str) {
            if value.contains(VALUE_END) {
                return Err(error("enum", &format!("{at}/enum"), "a value holds the mark that ends it"));
            }
            texts.push(quoted(&format!("{line}{value}{close}")));
        }
        Ok(format!("({})", texts.join(" | ")))
    }
}

/// How calls are written as elements.
struct Elements {
    open: &'static str,
    close: &'static str,
    function: &'static str,
    name_end: &'static str,
    parameter: &'static str,
    parameter_end: &'static str,
    end: &'static str,
    has_newlines: bool,
}

const VALUE_END: &str = "</parameter>";

const CODER: Elements = Elements {
    open: "<tool_call>",
    close: "</tool_call>",
    function: "<function=",
    name_end: ">",
    parameter: "<parameter=",
    parameter_end: ">",
    end: "</function>",
    has_newlines: true,
};

const MINIMAX: Elements = Elements {
    open: "<minimax:tool_call>",
    close: "</minimax:tool_call>",
    function: "<invoke name=\"",
    name_end: "\">",
    parameter: "<parameter name=\"",
    parameter_end: "\">",
    end: "</invoke>",
    has_newlines: false,
};

/// The schema of a tool's arguments, which are an object whatever it says.
fn parameters(tool: &Tool) -> Result<Value, Error> {
    let mut schema = schema::prepare(tool.parameters).map_err(|e| below(e, &tool.at))?;
    match &mut schema {
        Value::Object(map) if !["type", "$ref", "anyOf", "oneOf", "allOf"].iter().any(|k| map.contains_key(*k)) => {
            map.insert("type".into(), "object".into());
        }
        Value::Bool(true) => schema = json!({ "type": "object" }),
        _ => {}
    }
    if Kinds::of(&schema, &schema) != Kinds::of(&json!({ "type": "object" }), &Value::Null) {
        return Err(error("type", &format!("{}/type", tool.at), "arguments must be an object"));
    }
    Ok(schema)
}

/// An error of a schema that is at `at`.
fn below(e: Error, at: &str) -> Error {
    match e {
        Error::Schema { keyword, at: inner, problem } => Error::Schema { keyword, at: format!("{at}{inner}"), problem },
        other => other,
    }
}

/// A text as a string of Lark, which is one of JSON.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// A text within a regular expression.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        if r"\.+*?()|[]{}^$/".contains(c) {
            out.push('\\');
        }
        out.push(c);
    }
    out
}
