//! What an answer must be: `response_format` and `grammar`.

use crate::openai::reply::Replies;
use crate::openai::{ApiError, Card, Fields};
use puna::{Grammar, Grammars};
use serde_json::{Value, json};
use std::sync::Arc;

/// What an answer must be.
#[derive(Clone, Debug, PartialEq)]
pub struct Constraint {
    form: Form,
    /// The field that says it.
    pub(crate) param: &'static str,
}

#[derive(Clone, Debug, PartialEq)]
enum Form {
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
        let constraint = |(form, param)| Constraint { form, param };
        Ok(format.or(grammar).map(constraint))
    }

    /// Whether the answer may begin with reasoning all the same.
    pub(crate) fn allows_reasoning(&self) -> bool {
        matches!(self.form, Form::JsonObject | Form::JsonSchema(_))
    }

    /// What keeps a text to it.
    ///
    /// # Errors
    /// What cannot be enforced, by name.
    pub(crate) fn compile(&self, card: &Card) -> Result<Grammar, ApiError> {
        self.compiled(card, |grammars, schema| grammars.json_schema(schema))
    }

    /// What keeps a model's answer to it, after whatever it reasons.
    ///
    /// # Errors
    /// As [`Constraint::compile`].
    pub(crate) fn compile_reply(&self, card: &Card, replies: &Replies) -> Result<Grammar, ApiError> {
        self.compiled(card, |grammars, schema| grammars.json_reply(schema, replies.format, replies.in_reasoning))
    }

    fn compiled(
        &self,
        card: &Card,
        json: impl FnOnce(&Arc<Grammars>, &Value) -> Result<Grammar, puna::Error>,
    ) -> Result<Grammar, ApiError> {
        let grammars = card.chat.grammars().map_err(|e| ApiError::of_engine("", &e))?;
        let result = match &self.form {
            Form::JsonObject => json(grammars, &json!({ "type": "object" })),
            Form::JsonSchema(schema) => json(grammars, schema),
            Form::Lark(source) => grammars.lark(source),
            Form::Regex(pattern) => grammars.regex(pattern),
        };
        result.map_err(|e| ApiError::of_engine(self.param, &e))
    }
}

/// A form, and the field that says it.
type Said = (Form, &'static str);

fn response_format(fields: &Fields) -> Result<Option<Said>, ApiError> {
    let Some(value) = fields.get("response_format") else { return Ok(None) };
    let format = Fields::new(value, "response_format")?;
    format.require("type")?;
    match format.string("type")?.unwrap_or_default() {
        "text" => Ok(None),
        "json_object" => match format.object("schema")? {
            None => Ok(Some((Form::JsonObject, "response_format"))),
            Some(schema) => Ok(Some((Form::JsonSchema(Value::Object(schema.clone())), "response_format.schema"))),
        },
        "json_schema" => {
            let inner = Fields::new(format.require("json_schema")?, "response_format.json_schema")?;
            inner.string("name")?;
            inner.boolean("strict")?;
            match inner.require("schema")? {
                schema @ (Value::Object(_) | Value::Bool(_)) => {
                    Ok(Some((Form::JsonSchema(schema.clone()), "response_format.json_schema.schema")))
                }
                _ => Err(inner.expected("schema", "a JSON schema")),
            }
        }
        _ => Err(format.expected("type", "text, json_object or json_schema")),
    }
}

/// A string is Lark; an object says what it is, as OpenAI's custom tools do.
fn grammar(fields: &Fields) -> Result<Option<Said>, ApiError> {
    let value = match fields.get("grammar") {
        None => return Ok(None),
        Some(Value::String(source)) => return Ok(Some((Form::Lark(source.clone()), "grammar"))),
        Some(value @ Value::Object(_)) => value,
        Some(_) => return Err(fields.expected("grammar", "a string, or an object with syntax and definition")),
    };
    let grammar = Fields::new(value, "grammar")?;
    grammar.require("definition")?;
    let text = grammar.string("definition")?.unwrap_or_default().to_owned();
    match grammar.string("syntax")? {
        Some("lark") => Ok(Some((Form::Lark(text), "grammar.definition"))),
        Some("regex") => Ok(Some((Form::Regex(text), "grammar.definition"))),
        _ => Err(grammar.expected("syntax", "lark or regex")),
    }
}
