//! What an answer must be: `response_format` and `grammar`.

use crate::openai::{ApiError, Card, Fields};
use puna::Grammar;
use serde_json::Value;

/// What an answer must be.
#[derive(Clone, Debug, PartialEq)]
pub enum Constraint {
    /// A JSON object.
    JsonObject,
    /// JSON of a schema.
    JsonSchema(Value),
    /// A text of a grammar in Lark's form.
    Lark(String),
    /// A text that a regular expression matches as a whole.
    Regex(String),
}

impl Constraint {
    /// Reads the fields.
    ///
    /// # Errors
    /// The field that is wrong.
    pub fn read(fields: &Fields) -> Result<Option<Constraint>, ApiError> {
        let format = response_format(fields)?;
        let grammar = grammar(fields)?;
        if format.is_some() && grammar.is_some() {
            return Err(ApiError::invalid("grammar", "cannot be used together with response_format"));
        }
        Ok(format.or(grammar))
    }

    /// What keeps an answer to it.
    ///
    /// # Errors
    /// What cannot be enforced, by name.
    pub fn compile(&self, card: &Card) -> Result<Grammar, ApiError> {
        let (param, result) = match self {
            Constraint::JsonObject => ("response_format", card.chat.grammars().and_then(|g| g.json_object())),
            Constraint::JsonSchema(schema) => {
                ("response_format.json_schema.schema", card.chat.grammars().and_then(|g| g.json_schema(schema)))
            }
            Constraint::Lark(source) => ("grammar", card.chat.grammars().and_then(|g| g.lark(source))),
            Constraint::Regex(pattern) => ("grammar", card.chat.grammars().and_then(|g| g.regex(pattern))),
        };
        result.map_err(|e| ApiError::of_engine(param, &e))
    }
}

fn response_format(fields: &Fields) -> Result<Option<Constraint>, ApiError> {
    let Some(value) = fields.get("response_format") else { return Ok(None) };
    let format = Fields::new(value, "response_format")?;
    format.require("type")?;
    match format.string("type")?.unwrap_or_default() {
        "text" => Ok(None),
        "json_object" => match format.object("schema")? {
            None => Ok(Some(Constraint::JsonObject)),
            Some(schema) => Ok(Some(Constraint::JsonSchema(Value::Object(schema.clone())))),
        },
        "json_schema" => {
            let inner = Fields::new(format.require("json_schema")?, "response_format.json_schema")?;
            inner.string("name")?;
            inner.boolean("strict")?;
            match inner.require("schema")? {
                schema @ (Value::Object(_) | Value::Bool(_)) => Ok(Some(Constraint::JsonSchema(schema.clone()))),
                _ => Err(inner.expected("schema", "a JSON schema")),
            }
        }
        _ => Err(format.expected("type", "text, json_object or json_schema")),
    }
}

/// A string is Lark; an object says what it is, as OpenAI's custom tools do.
fn grammar(fields: &Fields) -> Result<Option<Constraint>, ApiError> {
    let value = match fields.get("grammar") {
        None => return Ok(None),
        Some(Value::String(source)) => return Ok(Some(Constraint::Lark(source.clone()))),
        Some(value @ Value::Object(_)) => value,
        Some(_) => return Err(fields.expected("grammar", "a string, or an object with syntax and definition")),
    };
    let grammar = Fields::new(value, "grammar")?;
    grammar.require("definition")?;
    let text = grammar.string("definition")?.unwrap_or_default().to_owned();
    match grammar.string("syntax")? {
        Some("lark") => Ok(Some(Constraint::Lark(text))),
        Some("regex") => Ok(Some(Constraint::Regex(text))),
        _ => Err(grammar.expected("syntax", "lark or regex")),
    }
}
