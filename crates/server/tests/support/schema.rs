//! What the server's own OpenAPI document allows, and bodies with a strange value at each place of a request.

use serde_json::{Value, json};
use std::cmp::Ordering;

/// The document.
pub struct Document(pub Value);

/// A body with a value at one place.
pub struct Body {
    /// The place, as errors name it: `messages[0].content`.
    pub place: String,
    pub value: Value,
    pub body: Value,
}

type Wrap<'a> = &'a dyn Fn(Value) -> Value;

impl Document {
    /// What a schema stands for.
    pub fn resolve<'a>(&'a self, schema: &'a Value) -> &'a Value {
        match schema["$ref"].as_str() {
            Some(name) => self.resolve(self.0.pointer(name.strip_prefix('#').unwrap()).unwrap()),
            None => schema,
        }
    }

    fn branches<'a>(&'a self, schema: &'a Value) -> Vec<&'a Value> {
        let schema = self.resolve(schema);
        match schema["anyOf"].as_array() {
            Some(list) => list.iter().flat_map(|branch| self.branches(branch)).collect(),
            None => vec![schema],
        }
    }

    /// Whether a schema allows a value. Keywords that the document does not use are not known here, and panic.
    pub fn allows(&self, schema: &Value, value: &Value) -> bool {
        let schema = self.resolve(schema);
        schema.as_object().unwrap().iter().all(|(keyword, what)| self.keyword(schema, keyword, what, value))
    }

    fn keyword(&self, schema: &Value, keyword: &str, what: &Value, value: &Value) -> bool {
        let (object, list, text) = (value.as_object(), value.as_array(), value.as_str());
        let size = |n: Option<usize>| n.map_or(Value::Null, |n| json!(n));
        let length = size(text.map(|text| text.chars().count()));
        let items = size(list.map(Vec::len));
        match keyword {
            "description" | "format" | "examples" => true,
            "type" => match what {
                Value::Array(names) => names.iter().any(|name| is(value, name.as_str().unwrap())),
                name => is(value, name.as_str().unwrap()),
            },
            "const" => value == what,
            "enum" => what.as_array().unwrap().contains(value),
            "anyOf" => what.as_array().unwrap().iter().any(|branch| self.allows(branch, value)),
            "minimum" => order(value, what) != Some(Ordering::Less),
            "maximum" => order(value, what) != Some(Ordering::Greater),
            "minLength" => order(&length, what) != Some(Ordering::Less),
            "maxLength" => order(&length, what) != Some(Ordering::Greater),
            "minItems" => order(&items, what) != Some(Ordering::Less),
            "maxItems" => order(&items, what) != Some(Ordering::Greater),
            "items" => list.is_none_or(|list| list.iter().all(|item| self.allows(what, item))),
            "required" => {
                let mut names = what.as_array().unwrap().iter().map(|name| name.as_str().unwrap());
                object.is_none_or(|map| names.all(|name| map.contains_key(name)))
            }
            "properties" => {
                let fits = |(name, value)| what.get(name).is_none_or(|schema| self.allows(schema, value));
                object.is_none_or(|map| map.iter().all(fits))
            }
            "additionalProperties" => object.is_none_or(|map| {
                map.iter().all(|(name, value)| schema["properties"].get(name).is_some() || self.allows(what, value))
            }),
            "propertyNames" => {
                assert_eq!(what, &json!({ "pattern": "^[0-9]{1,9}$" }));
                let fits = |name: &String| (1..=9).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_digit());
                object.is_none_or(|map| map.keys().all(fits))
            }
            _ => panic!("the keyword {keyword} is not known here"),
        }
    }

    /// A small value that a schema allows.
    pub fn specimen(&self, schema: &Value) -> Value {
        let schema = self.branches(schema).into_iter().find(|branch| branch["type"] != "null").unwrap();
        let first = |value: &Value| value.as_array().map_or(value.clone(), |list| list[0].clone());
        let given = ["examples", "enum", "const"].into_iter().find_map(|name| schema.get(name));
        if let Some(value) = given {
            return if schema.get("const") == Some(value) { value.clone() } else { first(value) };
        }
        match first(&schema["type"]).as_str().unwrap_or("string") {
            "string" => json!("x"),
            "boolean" => json!(true),
            "integer" | "number" => {
                schema.get("minimum").filter(|least| least.as_f64() > Some(0.0)).cloned().unwrap_or(json!(1))
            }
            "array" => {
                let n = schema["minItems"].as_u64().unwrap_or(1).max(1) as usize;
                json!(vec![self.specimen(&schema["items"]); n])
            }
            "object" => {
                let names = schema["required"].as_array().into_iter().flatten().map(|name| name.as_str().unwrap());
                let fields = names.map(|name| (name.to_owned(), self.specimen(&schema["properties"][name])));
                Value::Object(fields.collect())
            }
            kind => panic!("no specimen of {kind}"),
        }
    }

    /// Bodies of a request with every strange value at every place of it.
    pub fn bodies(&self, schema: &Value) -> Vec<Body> {
        let mut out = Vec::new();
        self.inside(schema, "", &|value| value, &mut out);
        out
    }

    fn place(&self, schema: &Value, place: &str, wrap: Wrap, out: &mut Vec<Body>) {
        for value in self.oddities(schema) {
            out.push(Body { place: place.to_owned(), body: wrap(value.clone()), value });
        }
        self.inside(schema, place, wrap, out);
    }

    fn inside(&self, schema: &Value, place: &str, wrap: Wrap, out: &mut Vec<Body>) {
        for branch in self.branches(schema) {
            let specimen = || self.specimen(branch);
            for (name, schema) in branch["properties"].as_object().into_iter().flatten() {
                let dot = if place.is_empty() { "" } else { "." };
                let wrap = |value: Value| {
                    let mut object = specimen();
                    object[name] = value;
                    wrap(object)
                };
                self.place(schema, &format!("{place}{dot}{name}"), &wrap, out);
            }
            if let Some(schema) = branch.get("items") {
                let wrap = |value: Value| {
                    let mut list = specimen();
                    list[0] = value;
                    wrap(list)
                };
                self.place(schema, &format!("{place}[0]"), &wrap, out);
            }
            if let Some(schema) = branch.get("additionalProperties") {
                self.place(schema, &format!("{place}.5"), &|value| wrap(json!({ "5": value })), out);
            }
        }
    }

    /// Values that hardly any place takes, and those just outside of what it takes.
    fn oddities(&self, schema: &Value) -> Vec<Value> {
        let mut values = vec![
            json!(-1),
            json!(0),
            json!(1e308),
            json!("x"),
            Value::Null,
            json!([]),
            json!({}),
            json!(true),
            json!(1.5),
            json!(18_446_744_073_709_551_616.0),
        ];
        for branch in self.branches(schema) {
            let number = |name: &str| branch[name].as_f64();
            // Floats that are no other number are left out.
            let beyond =
                |name: &str, step: f64| number(name).filter(|end| end + step != *end).map(|end| json!(end + step));
            values.extend(beyond("maximum", 1.0));
            values.extend(beyond("minimum", -1.0));
            values.extend(number("maxLength").map(|most| json!("x".repeat(most as usize + 1))));
            values.extend(number("minLength").map(|_| json!("")));
            values
                .extend(number("maxItems").map(|most| json!(vec![self.specimen(&branch["items"]); most as usize + 1])));
        }
        values
    }
}

/// How numbers compare, whole ones exactly; nothing else does.
fn order(a: &Value, b: &Value) -> Option<Ordering> {
    let whole = |x: f64| Some(x as i128).filter(|n| *n as f64 == x);
    let exact = |v: &Value| {
        let n = v.as_i64().map(i128::from).or(v.as_u64().map(i128::from));
        n.or_else(|| v.as_f64().and_then(whole))
    };
    match (exact(a), exact(b)) {
        (Some(a), Some(b)) => Some(a.cmp(&b)),
        _ => a.as_f64()?.partial_cmp(&b.as_f64()?),
    }
}

fn is(value: &Value, kind: &str) -> bool {
    match kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        "number" => value.is_number(),
        "integer" => value.as_f64().is_some_and(|x| x.fract() == 0.0),
        _ => panic!("the type {kind} is not known here"),
    }
}
