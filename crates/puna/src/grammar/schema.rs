//! What of JSON Schema can be enforced.
//!
//! The parser passes over keywords that it does not know, and over some that it does, depending on the draft. Here every
//! keyword is known to be enforced, known to need no enforcement, or an error.

use super::MAX_TEXT;
use crate::error::Error;
use serde_json::{Map, Number, Value};
use std::time::{Duration, Instant};

/// Most values in a schema.
const MAX_NODES: usize = 20_000;
/// Most bytes of its texts.
const MAX_BYTES: usize = 1 << 20;
/// Deepest nesting.
const MAX_DEPTH: usize = 64;
/// Integers up to here are exact in the parser's arithmetic.
const MAX_EXACT: u64 = 1 << 53;

/// What stands after a keyword.
#[derive(Clone, Copy, PartialEq)]
enum Holds {
    /// A schema, or a list of them.
    Schemas,
    /// Schemas by name.
    Map,
    /// Numbers, texts or values.
    Other,
}

/// Keywords that are enforced.
const ENFORCED: [(&str, Holds); 29] = [
    ("type", Holds::Other),
    ("enum", Holds::Other),
    ("const", Holds::Other),
    ("anyOf", Holds::Schemas),
    ("oneOf", Holds::Schemas),
    ("allOf", Holds::Schemas),
    ("$ref", Holds::Other),
    ("$defs", Holds::Map),
    ("definitions", Holds::Map),
    ("items", Holds::Schemas),
    ("additionalItems", Holds::Schemas),
    ("prefixItems", Holds::Schemas),
    ("minItems", Holds::Other),
    ("maxItems", Holds::Other),
    ("properties", Holds::Map),
    ("additionalProperties", Holds::Schemas),
    ("patternProperties", Holds::Map),
    ("required", Holds::Other),
    ("minProperties", Holds::Other),
    ("maxProperties", Holds::Other),
    ("minLength", Holds::Other),
    ("maxLength", Holds::Other),
    ("pattern", Holds::Other),
    ("format", Holds::Other),
    ("minimum", Holds::Other),
    ("maximum", Holds::Other),
    ("exclusiveMinimum", Holds::Other),
    ("exclusiveMaximum", Holds::Other),
    ("multipleOf", Holds::Other),
];

/// Keywords that say nothing about which values are valid. `nullable` only ever allows more.
const ANNOTATIONS: [&str; 18] = [
    "title",
    "description",
    "default",
    "example",
    "examples",
    "$comment",
    "$id",
    "id",
    "$anchor",
    "deprecated",
    "readOnly",
    "writeOnly",
    "nullable",
    "contentMediaType",
    "contentEncoding",
    "contentSchema",
    "discriminator",
    "externalDocs",
];

/// Formats that are enforced; others are annotations, as the standard has it.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// The schema without what needs no enforcement.
///
/// # Errors
/// [`Error::Schema`] names what cannot be enforced and where it is.
pub(super) fn prepare(schema: &Value) -> Result<Value, Error> {
    let mut walk = Walk { root: schema, depth: 0, nodes: 0, bytes: 0, patterns: 0 };
    walk.schema(schema, &mut Vec::new())
}

pub(super) fn error(keyword: &str, at: &str, problem: impl Into<String>) -> Error {
    Error::Schema { keyword: keyword.to_owned(), at: at.to_owned(), problem: problem.into() }
}

/// A JSON pointer.
fn pointer(path: &[String]) -> String {
    path.iter().map(|part| format!("/{}", part.replace('~', "~0").replace('/', "~1"))).collect()
}

struct Walk<'a> {
    root: &'a Value,
    depth: usize,
    nodes: usize,
    bytes: usize,
    patterns: usize,
}

impl Walk<'_> {
    fn schema(&mut self, schema: &Value, path: &mut Vec<String>) -> Result<Value, Error> {
        self.depth += 1;
        self.count(1, 0, path)?;
        let object = match schema {
            Value::Object(object) => object,
            Value::Bool(_) => {
                self.depth -= 1;
                return Ok(schema.clone());
            }
            other => {
                let keyword = path.last().cloned().unwrap_or_default();
                return Err(error(&keyword, &pointer(path), format!("expected a schema, found {other}")));
            }
        };
        let mut out = Map::new();
        for (keyword, value) in object {
            path.push(keyword.clone());
            let kept = self.keyword(object, keyword, value, path)?;
            path.pop();
            if let Some((keyword, value)) = kept {
                out.insert(keyword, value);
            }
        }
        self.depth -= 1;
        Ok(Value::Object(out))
    }

    /// What remains of a keyword.
    fn keyword(
        &mut self,
        object: &Map<String, Value>,
        keyword: &str,
        value: &Value,
        path: &mut Vec<String>,
    ) -> Result<Option<(String, Value)>, Error> {
        self.count(1, keyword.len(), path)?;
        self.patterns += patterns_of(keyword, value);
        let at = |problem: &str| Err(error(keyword, &pointer(path), problem));
        let holds = ENFORCED.iter().find(|(name, _)| *name == keyword).map(|(_, holds)| *holds);
        let value = match (keyword, holds) {
            ("pattern" | "patternProperties", _) if self.patterns > MAX_TEXT => {
                return at(&format!("the expressions of the schema have more than {MAX_TEXT} bytes"));
            }
            ("format", _) if value.as_str().is_some_and(|name| !FORMATS.contains(&name)) => return Ok(None),
            ("$ref", _) => self.reference(value, path)?,
            ("oneOf", _) if self.are_disjoint(value) => {
                return Ok(Some(("anyOf".into(), self.schemas(value, path)?)));
            }
            (_, Some(Holds::Schemas)) => self.schemas(value, path)?,
            (_, Some(Holds::Map)) => self.map(value, path)?,
            (_, Some(Holds::Other)) => {
                self.values(value, path)?;
                value.clone()
            }
            ("$schema", _) if path.len() == 1 => value.clone(),
            ("$schema", _) => return at("it can only be at the root"),
            ("$id", _) if path.len() > 1 && has_references(object) => {
                return at("references below another identifier are not supported");
            }
            ("uniqueItems", _) if value == &Value::Bool(false) => return Ok(None),
            (name, _) if ANNOTATIONS.contains(&name) => return Ok(None),
            (name, _) if name.starts_with("x-") && name != "x-guidance" => return Ok(None),
            _ => return at("it is not supported"),
        };
        Ok(Some((keyword.to_owned(), value)))
    }

    fn schemas(&mut self, value: &Value, path: &mut Vec<String>) -> Result<Value, Error> {
        let Value::Array(list) = value else { return self.schema(value, path) };
        let mut out = Vec::with_capacity(list.len());
        for (i, schema) in list.iter().enumerate() {
            path.push(i.to_string());
            out.push(self.schema(schema, path)?);
            path.pop();
        }
        Ok(Value::Array(out))
    }

    fn map(&mut self, value: &Value, path: &mut Vec<String>) -> Result<Value, Error> {
        let Value::Object(map) = value else {
            let keyword = path.last().cloned().unwrap_or_default();
            return Err(error(&keyword, &pointer(path), "expected an object of schemas"));
        };
        let mut out = Map::new();
        for (name, schema) in map {
            path.push(name.clone());
            self.count(0, name.len(), path)?;
            out.insert(name.clone(), self.schema(schema, path)?);
            path.pop();
        }
        Ok(Value::Object(out))
    }

    /// Counts values, and refuses numbers that would be rounded.
    fn values(&mut self, value: &Value, path: &[String]) -> Result<(), Error> {
        let mut open = vec![(value, self.depth)];
        while let Some((value, depth)) = open.pop() {
            let bytes = value.as_str().map_or(0, str::len);
            self.count(1, bytes, path)?;
            let keyword = || path.last().cloned().unwrap_or_default();
            if depth > MAX_DEPTH {
                return Err(error(&keyword(), &pointer(path), format!("it is nested deeper than {MAX_DEPTH}")));
            }
            match value {
                Value::Number(number) if !is_exact(number) => {
                    let problem = format!("{number} cannot be compared exactly, only integers up to 2^53 can");
                    return Err(error(&keyword(), &pointer(path), problem));
                }
                Value::Array(list) => open.extend(list.iter().map(|value| (value, depth + 1))),
                Value::Object(map) => {
                    for (key, value) in map {
                        self.count(0, key.len(), path)?;
                        open.push((value, depth + 1));
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn reference(&self, value: &Value, path: &[String]) -> Result<Value, Error> {
        let at = |problem: String| error("$ref", &pointer(path), problem);
        let Some(target) = value.as_str() else { return Err(at(format!("expected a text, found {value}"))) };
        let Some(pointer) = target.strip_prefix('#').filter(|p| p.is_empty() || p.starts_with('/')) else {
            return Err(at(format!("`{target}` is not in this schema: only #/.. is supported")));
        };
        if pointer.contains(['~', '%']) {
            return Err(at(format!("`{target}` has escapes, which are not supported")));
        }
        if self.root.pointer(pointer).is_none() {
            return Err(at(format!("`{target}` does not exist")));
        }
        Ok(value.clone())
    }

    /// Whether at most one of these schemas can be valid, since a property that all of them require has another constant
    /// in each: then `oneOf` is `anyOf`.
    fn are_disjoint(&self, value: &Value) -> bool {
        let Value::Array(options) = value else { return false };
        let options: Option<Vec<&Map<String, Value>>> = options.iter().map(|option| self.resolve(option)).collect();
        let Some((first, options)) = options.as_ref().and_then(|options| Some((options.first()?, options))) else {
            return false;
        };
        let keys = first.get("properties").and_then(Value::as_object).into_iter().flat_map(Map::keys);
        keys.into_iter().any(|key| {
            let mut seen = Vec::new();
            options.iter().all(|option| match constant(option, key) {
                Some(value) if !seen.contains(&value) => {
                    seen.push(value);
                    true
                }
                _ => false,
            })
        })
    }

    fn resolve<'s>(&'s self, schema: &'s Value) -> Option<&'s Map<String, Value>> {
        let mut schema = schema.as_object()?;
        for _ in 0..8 {
            match schema.get("$ref").and_then(Value::as_str).and_then(|target| target.strip_prefix('#')) {
                None => return Some(schema),
                Some(pointer) => schema = self.root.pointer(pointer)?.as_object()?,
            }
        }
        None
    }

    fn count(&mut self, nodes: usize, bytes: usize, path: &[String]) -> Result<(), Error> {
        self.nodes += nodes;
        self.bytes += bytes;
        let problem = if self.nodes > MAX_NODES {
            format!("the schema has more than {MAX_NODES} values")
        } else if self.bytes > MAX_BYTES {
            format!("the texts of the schema have more than {MAX_BYTES} bytes")
        } else if self.depth > MAX_DEPTH {
            format!("the schema is nested deeper than {MAX_DEPTH}")
        } else {
            return Ok(());
        };
        Err(error(&path.last().cloned().unwrap_or_default(), &pointer(path), problem))
    }
}

/// Bytes of the regular expressions that a keyword holds.
fn patterns_of(keyword: &str, value: &Value) -> usize {
    match (keyword, value) {
        ("pattern", Value::String(pattern)) => pattern.len(),
        ("patternProperties", Value::Object(map)) => map.keys().map(String::len).sum(),
        _ => 0,
    }
}

/// Bytes of the regular expressions that a schema holds, at most: what looks like one counts.
pub(super) fn pattern_bytes(schema: &Value) -> usize {
    let (mut open, mut bytes) = (vec![schema], 0);
    while let Some(value) = open.pop() {
        match value {
            Value::Object(map) => {
                bytes += map.iter().map(|(keyword, value)| patterns_of(keyword, value)).sum::<usize>();
                open.extend(map.values());
            }
            Value::Array(list) => open.extend(list),
            _ => {}
        }
    }
    bytes
}

/// The text that a required property must be.
fn constant<'a>(schema: &'a Map<String, Value>, key: &str) -> Option<&'a str> {
    let required = schema.get("required")?.as_array()?;
    if !required.iter().any(|name| name == key) || schema.get("type").is_none_or(|kind| kind != "object") {
        return None;
    }
    let property = schema.get("properties")?.get(key)?;
    match (property.get("const"), property.get("enum").and_then(Value::as_array)) {
        (Some(value), _) => value.as_str(),
        (None, Some(values)) if values.len() == 1 => values[0].as_str(),
        _ => None,
    }
}

fn is_exact(number: &Number) -> bool {
    match (number.as_u64(), number.as_i64()) {
        (Some(n), _) => n <= MAX_EXACT,
        (None, Some(n)) => n.unsigned_abs() <= MAX_EXACT,
        _ => true,
    }
}

fn has_references(schema: &Map<String, Value>) -> bool {
    let mut open: Vec<&Value> = schema.values().collect();
    while let Some(value) = open.pop() {
        match value {
            Value::Object(map) if map.contains_key("$ref") => return true,
            Value::Object(map) => open.extend(map.values()),
            Value::Array(list) => open.extend(list),
            _ => {}
        }
    }
    schema.contains_key("$ref")
}

/// Where looking for the cause of a failure ends.
const SEARCH_TIME: Duration = Duration::from_millis(500);
/// Most references that are followed on the way to it.
const MAX_HOPS: usize = 8;

/// Which keyword it is that makes a schema fail with `problem`: the innermost schema that fails with it, and there the
/// keyword without which it does not. `fails`: how a schema fails, if it does.
pub(super) fn locate(root: &Value, problem: &str, fails: &dyn Fn(&Value) -> Option<String>) -> Error {
    let deadline = Instant::now() + SEARCH_TIME;
    let is_it =
        |schema: &Value| Instant::now() < deadline && fails(&with_definitions(schema, root)) == Some(problem.into());
    let (mut path, mut here) = (String::new(), root);
    for _ in 0..MAX_HOPS {
        while let Some((step, below)) = children(here).into_iter().find(|(_, below)| is_it(below)) {
            path.push_str(&pointer(&step));
            here = below;
        }
        let Some(keyword) = cause(here, &is_it) else { break };
        let target = here[&keyword].as_str().and_then(|target| target.strip_prefix('#'));
        match target.filter(|_| keyword == "$ref").and_then(|target| Some((target, root.pointer(target)?))) {
            Some((target, below)) => (path, here) = (target.to_owned(), below),
            None => return error(&keyword, &(path + &pointer(std::slice::from_ref(&keyword))), problem),
        }
    }
    let keyword = path.rsplit('/').next().unwrap_or_default().to_owned();
    error(&keyword, &path, problem)
}

/// The keyword without which a schema does not fail: not its type, if there is another one.
fn cause(schema: &Value, is_it: &dyn Fn(&Value) -> bool) -> Option<String> {
    let keywords: Vec<&String> = schema.as_object()?.keys().filter(|keyword| !is_definitions(keyword)).collect();
    let is_cause = |keyword: &&&String| {
        let mut rest = schema.clone();
        rest.as_object_mut().map(|map| map.shift_remove(keyword.as_str()));
        !is_it(&rest)
    };
    let (types, others): (Vec<&String>, Vec<_>) = keywords.into_iter().partition(|keyword| *keyword == "type");
    others.iter().find(is_cause).or_else(|| types.iter().find(is_cause)).map(|keyword| (*keyword).clone())
}

fn is_definitions(keyword: &str) -> bool {
    matches!(keyword, "$defs" | "definitions")
}

/// A schema with the definitions of the root.
fn with_definitions(schema: &Value, root: &Value) -> Value {
    let mut schema = schema.clone();
    if let (Value::Object(schema), Value::Object(root)) = (&mut schema, root) {
        for keyword in ["$schema", "$defs", "definitions"] {
            if let Some(value) = root.get(keyword).filter(|_| !schema.contains_key(keyword)) {
                schema.insert(keyword.to_owned(), value.clone());
            }
        }
    }
    schema
}

/// The schemas within a schema, without its definitions: references lead there.
fn children(schema: &Value) -> Vec<(Vec<String>, &Value)> {
    let mut out = Vec::new();
    for (keyword, value) in schema.as_object().into_iter().flatten().filter(|(keyword, _)| !is_definitions(keyword)) {
        let holds = ENFORCED.iter().find(|(name, _)| name == keyword).map(|(_, holds)| *holds);
        match (holds, value) {
            (Some(Holds::Schemas), Value::Array(list)) => {
                out.extend(list.iter().enumerate().map(|(i, below)| (vec![keyword.clone(), i.to_string()], below)));
            }
            (Some(Holds::Schemas), below) => out.push((vec![keyword.clone()], below)),
            (Some(Holds::Map), Value::Object(map)) => {
                out.extend(map.iter().map(|(name, below)| (vec![keyword.clone(), name.clone()], below)));
            }
            _ => {}
        }
    }
    out
}
