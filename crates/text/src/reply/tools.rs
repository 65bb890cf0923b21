//! What the tools' schemas say about parameters: how a value that is written without quotes is meant.

use super::json::escaped;
use serde_json::{Map, Value};
use std::collections::HashMap;

/// Deepest nesting of a schema that is looked into.
const MAX_DEPTH: usize = 16;
/// Most schemas that are looked into for one parameter: references can lead anywhere, again and again.
const MAX_SCHEMAS: usize = 1000;

/// Kinds of JSON values, as a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kinds(u8);

impl Kinds {
    const STRING: Kinds = Kinds(1);
    const NUMBER: Kinds = Kinds(2);
    const BOOLEAN: Kinds = Kinds(4);
    const NULL: Kinds = Kinds(8);
    const OBJECT: Kinds = Kinds(16);
    const ARRAY: Kinds = Kinds(32);
    const NONE: Kinds = Kinds(0);
    const ALL: Kinds = Kinds(63);

    /// The kinds of values that `schema` allows, as far as its keywords about kinds say; `root` is where its references
    /// lead.
    pub fn of(schema: &Value, root: &Value) -> Kinds {
        Look { root, left: MAX_SCHEMAS }.schema(schema, MAX_DEPTH)
    }

    /// Whether only strings are allowed: these are written as they are.
    pub fn is_text(self) -> bool {
        self == Kinds::STRING
    }

    fn and(self, other: Kinds) -> Kinds {
        Kinds(self.0 & other.0)
    }

    fn or(self, other: Kinds) -> Kinds {
        Kinds(self.0 | other.0)
    }

    fn contains(self, other: Kinds) -> bool {
        self.and(other) == other
    }

    fn of_name(name: &str) -> Kinds {
        match name {
            "string" => Kinds::STRING,
            "number" | "integer" => Kinds::NUMBER,
            "boolean" => Kinds::BOOLEAN,
            "null" => Kinds::NULL,
            "object" => Kinds::OBJECT,
            "array" => Kinds::ARRAY,
            _ => Kinds::ALL,
        }
    }

    fn of_value(value: &Value) -> Kinds {
        match value {
            Value::String(_) => Kinds::STRING,
            Value::Number(_) => Kinds::NUMBER,
            Value::Bool(_) => Kinds::BOOLEAN,
            Value::Null => Kinds::NULL,
            Value::Object(_) => Kinds::OBJECT,
            Value::Array(_) => Kinds::ARRAY,
        }
    }
}

/// A look into a schema. Where it ends, anything may be.
struct Look<'a> {
    root: &'a Value,
    left: usize,
}

impl Look<'_> {
    fn schema(&mut self, schema: &Value, depth: usize) -> Kinds {
        let (Some(left), Some(depth), Value::Object(schema)) = (self.left.checked_sub(1), depth.checked_sub(1), schema)
        else {
            return Kinds::ALL;
        };
        self.left = left;
        schema.iter().fold(Kinds::ALL, |kinds, (keyword, value)| kinds.and(self.keyword(keyword, value, depth)))
    }

    fn keyword(&mut self, keyword: &str, value: &Value, depth: usize) -> Kinds {
        let any = |kinds: &mut dyn Iterator<Item = Kinds>| kinds.fold(Kinds::NONE, Kinds::or);
        match (keyword, value) {
            ("type", Value::String(name)) => Kinds::of_name(name),
            ("type", Value::Array(names)) => {
                any(&mut names.iter().map(|name| Kinds::of_name(name.as_str().unwrap_or_default())))
            }
            ("const", value) => Kinds::of_value(value),
            ("enum", Value::Array(values)) => any(&mut values.iter().map(Kinds::of_value)),
            ("anyOf" | "oneOf", Value::Array(schemas)) => any(&mut schemas.iter().map(|one| self.schema(one, depth))),
            ("allOf", Value::Array(schemas)) => {
                schemas.iter().fold(Kinds::ALL, |kinds, one| kinds.and(self.schema(one, depth)))
            }
            ("$ref", Value::String(path)) => {
                let target = path.strip_prefix('#').and_then(|pointer| self.root.pointer(pointer));
                target.map_or(Kinds::ALL, |target| self.schema(target, depth))
            }
            _ => Kinds::ALL,
        }
    }
}

/// The tools that there are.
#[derive(Debug, Clone, Default)]
pub(super) struct Tools(HashMap<String, HashMap<String, Kinds>>);

impl Tools {
    /// `tools`: objects with `name` and `parameters`, within `function` or not.
    pub fn new(tools: &[Value]) -> Tools {
        let tools = tools.iter().filter_map(|tool| {
            let function = tool.get("function").unwrap_or(tool);
            let parameters = function.get("parameters").unwrap_or(&Value::Null);
            let empty = Map::new();
            let properties = parameters.get("properties").and_then(Value::as_object).unwrap_or(&empty);
            let kinds = properties.iter().map(|(key, schema)| (key.clone(), Kinds::of(schema, parameters)));
            Some((function.get("name")?.as_str()?.to_owned(), kinds.collect()))
        });
        Tools(tools.collect())
    }

    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// What a parameter may be: anything, if nothing is known of it.
    pub fn kinds(&self, tool: &str, parameter: &str) -> Kinds {
        self.0.get(tool).and_then(|kinds| kinds.get(parameter)).copied().unwrap_or(Kinds::ALL)
    }
}

/// The JSON text of a value that is written without quotes, where it need not be a text: JSON of one of the kinds, the
/// words of Python for it, or else a string.
pub(super) fn to_json(value: &str, kinds: Kinds) -> String {
    let text = match value.trim() {
        "True" => "true",
        "False" => "false",
        "None" => "null",
        text => text,
    };
    match serde_json::from_str::<Value>(text) {
        Ok(parsed) if kinds.contains(Kinds::of_value(&parsed)) => text.to_owned(),
        _ => format!("\"{}\"", escaped(value)),
    }
}
