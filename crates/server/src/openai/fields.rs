//! Reading JSON objects field by field.

use crate::openai::ApiError;
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

/// The fields of an object. `null` is the same as absence.
#[derive(Clone, Copy, Debug)]
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Where the object is: empty, or as `messages[0]`.
    path: &'a str,
}

/// What a value is, for errors: never the value itself if it may be long.
pub(crate) fn found(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(b) => b.to_string(),
        Value::Number(n) => n.to_string(),
        Value::String(s) if s.chars().count() <= 40 => format!("{s:?}"),
        Value::String(_) => "a string".into(),
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "an object".into(),
    }
}

/// An error about a value.
pub(crate) fn expected(param: impl Into<String>, expected: &str, value: &Value) -> ApiError {
    ApiError::invalid(param, format!("expected {expected}, found {}", found(value)))
}

impl<'a> Fields<'a> {
    /// The fields of `value`, which is at `path`.
    ///
    /// # Errors
    /// If it is no object.
    pub fn new(value: &'a Value, path: &'a str) -> Result<Fields<'a>, ApiError> {
        match value {
            Value::Object(map) => Ok(Fields { map, path }),
            other => Err(expected(path, "an object", other)),
        }
    }

    /// The name of a field, for errors.
    pub fn name(&self, field: &str) -> String {
        if self.path.is_empty() { field.to_owned() } else { format!("{}.{field}", self.path) }
    }

    /// A field, whatever it is.
    pub fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    /// A field that must be there.
    ///
    /// # Errors
    /// If it is not.
    pub fn require(&self, field: &str) -> Result<&'a Value, ApiError> {
        let missing = || ApiError::invalid(self.name(field), "missing, but required");
        self.get(field).ok_or_else(missing)
    }

    /// An error about a field.
    pub fn expected(&self, field: &str, what: &str) -> ApiError {
        expected(self.name(field), what, self.map.get(field).unwrap_or(&Value::Null))
    }

    fn take<T>(&self, field: &str, what: &str, f: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>, ApiError> {
        self.get(field).map(|value| f(value).ok_or_else(|| self.expected(field, what))).transpose()
    }

    /// A string.
    ///
    /// # Errors
    /// If it is something else; so for all that follow.
    pub fn string(&self, field: &str) -> Result<Option<&'a str>, ApiError> {
        self.take(field, "a string", Value::as_str)
    }

    /// A truth value.
    ///
    /// # Errors
    /// As [`Fields::string`].
    pub fn boolean(&self, field: &str) -> Result<Option<bool>, ApiError> {
        self.take(field, "true or false", Value::as_bool)
    }

    /// A list.
    ///
    /// # Errors
    /// As [`Fields::string`].
    pub fn list(&self, field: &str) -> Result<Option<&'a Vec<Value>>, ApiError> {
        self.take(field, "a list", Value::as_array)
    }

    /// An object.
    ///
    /// # Errors
    /// As [`Fields::string`].
    pub fn object(&self, field: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        self.take(field, "an object", Value::as_object)
    }

    /// A number in a range.
    ///
    /// # Errors
    /// As [`Fields::string`].
    pub fn number(&self, field: &str, range: RangeInclusive<f64>) -> Result<Option<f32>, ApiError> {
        let what = format!("a number from {} to {}", range.start(), range.end());
        self.take(field, &what, |value| value.as_f64().filter(|x| range.contains(x)).map(|x| x as f32))
    }

    /// An integer in a range; `2.0` is one too.
    ///
    /// # Errors
    /// As [`Fields::string`].
    pub fn integer(&self, field: &str, range: RangeInclusive<u64>) -> Result<Option<u64>, ApiError> {
        let what = match *range.end() {
            u64::MAX => format!("an integer of {} or more", range.start()),
            end => format!("an integer from {} to {end}", range.start()),
        };
        self.take(field, &what, |value| integer(value).filter(|n| range.contains(n)))
    }
}

/// A whole number that is not negative.
pub(crate) fn integer(value: &Value) -> Option<u64> {
    // Up to 2^53 floats are exact.
    let whole = |x: &f64| x.fract() == 0.0 && (0.0..=9_007_199_254_740_992.0).contains(x);
    value.as_u64().or_else(|| value.as_f64().filter(whole).map(|x| x as u64))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use serde_json::json;

    #[test]
    fn null_is_absent_and_ranges_are_checked() {
        let value =
            json!({ "a": null, "n": 3, "f": 2.0, "big": 1e308, "neg": -1, "s": "x", "b": true, "l": [], "o": {} });
        let fields = Fields::new(&value, "").unwrap();
        assert_eq!(fields.string("a"), Ok(None));
        assert_eq!(fields.integer("n", 0..=3), Ok(Some(3)));
        assert_eq!(fields.integer("f", 0..=3), Ok(Some(2)));
        for (field, range) in [("n", 0..=2), ("big", 0..=u64::MAX), ("neg", 0..=9), ("s", 0..=9), ("l", 0..=9)] {
            let error = fields.integer(field, range).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(field), "{error}");
        }
        assert_eq!(
            fields.number("big", 0.0..=2.0).unwrap_err().message,
            "big: expected a number from 0 to 2, found 1e+308"
        );
        assert_eq!(fields.boolean("b"), Ok(Some(true)));
        assert!(fields.list("o").is_err() && fields.object("l").is_err() && fields.string("n").is_err());
        assert_eq!(fields.require("a").unwrap_err().message, "a: missing, but required");
        let inner = Fields::new(&value, "messages[0]").unwrap();
        assert_eq!(inner.boolean("n").unwrap_err().param.as_deref(), Some("messages[0].n"));
    }
}
