//! `tojson` as `transformers` defines it: Python's `json.dumps` with `ensure_ascii=False`.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

use super::{MAX_DEPTH, MAX_OUTPUT};

type Result<T> = std::result::Result<T, Error>;

/// The filter: `x | tojson(ensure_ascii, indent, separators, sort_keys)`, by position or by name.
pub(super) fn tojson(
    state: &State,
    value: &Value,
    positional: minijinja::value::Rest<Value>,
    named: Kwargs,
) -> Result<Value> {
    let argument = |index: usize, name: &str| -> Result<Value> {
        let named: Option<Value> = named.get(name)?;
        Ok(positional.get(index).cloned().or(named).unwrap_or(Value::from(())))
    };
    let (ascii, indent) = (argument(0, "ensure_ascii")?, argument(1, "indent")?);
    let (separators, sort) = (argument(2, "separators")?, argument(3, "sort_keys")?);
    named.assert_all_used()?;
    let indent = match (indent.as_usize(), indent.as_str()) {
        (Some(width), _) => Some(" ".repeat(width.min(64))),
        (None, Some(text)) => Some(text.to_string()),
        (None, None) => None,
    };
    let separator = |at: i64| separators.get_item(&Value::from(at)).ok().and_then(|s| s.to_str());
    let mut writer = Writer {
        state,
        out: String::new(),
        ascii: ascii.is_true(),
        comma: separator(0).map_or(if indent.is_some() { "," } else { ", " }.to_string(), |s| s.to_string()),
        colon: separator(1).map_or(": ".to_string(), |s| s.to_string()),
        indent,
        sort: sort.is_true(),
        paid: 0,
    };
    writer.write(value, 0)?;
    Ok(Value::from(writer.out))
}

struct Writer<'s, 'env, 'template> {
    state: &'s State<'template, 'env>,
    out: String,
    ascii: bool,
    comma: String,
    colon: String,
    indent: Option<String>,
    sort: bool,
    paid: usize,
}

impl Writer<'_, '_, '_> {
    fn write(&mut self, value: &Value, depth: usize) -> Result<()> {
        self.pay(depth)?;
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq => {
                let items = value.try_iter()?.checked().map(|item| Ok((None, item?)));
                self.nested(['[', ']'], items.collect::<Result<_>>()?, depth)?;
            }
            ValueKind::Map => {
                let keys = value.try_iter()?.checked();
                let pair = |key: Value| Ok((Some(self::key(&key)?), value.get_item(&key)?));
                let mut pairs = keys.map(|k| pair(k?)).collect::<Result<Vec<_>>>()?;
                if self.sort {
                    pairs.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.nested(['{', '}'], pairs, depth)?;
            }
            other => {
                let message = format!("a value of type {other} is not JSON serializable");
                return Err(Error::new(ErrorKind::BadSerialization, message));
            }
        }
        Ok(())
    }

    /// Charges for what has been written, one unit of work for four bytes, and bounds size and depth.
    fn pay(&mut self, depth: usize) -> Result<()> {
        let new = (self.out.len() - self.paid) / 4 + 1;
        self.paid = self.out.len();
        self.state.consume_fuel(new as u64)?;
        if depth > 2 * MAX_DEPTH || self.out.len() > MAX_OUTPUT {
            return Err(Error::new(ErrorKind::BadSerialization, "a value too large or nested too deep for JSON"));
        }
        Ok(())
    }

    fn nested(&mut self, [open, close]: [char; 2], items: Vec<(Option<String>, Value)>, depth: usize) -> Result<()> {
        self.out.push(open);
        let empty = items.is_empty();
        for (i, (key, value)) in items.into_iter().enumerate() {
            if i > 0 {
                self.out.push_str(&self.comma);
            }
            self.new_line(depth + 1);
            if let Some(key) = key {
                self.string(&key);
                self.out.push_str(&self.colon);
            }
            self.write(&value, depth + 1)?;
        }
        if !empty {
            self.new_line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            (0..depth).for_each(|_| self.out.push_str(indent));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ascii && !c.is_ascii()) || (self.ascii && c == '\u{7f}') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        // Writing to a string does not fail.
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// Keys that are no strings are written as Python writes them.
fn key(key: &Value) -> Result<String> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_string()),
        ValueKind::None => Ok("null".into()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.into()),
        ValueKind::Number => Ok(number(key)),
        other => {
            Err(Error::new(ErrorKind::BadSerialization, format!("a key of type {other} is not JSON serializable")))
        }
    }
}

/// A number as Python's `repr` and `json.dumps` write it.
pub(super) fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => python_float(float),
        _ => value.to_string(),
    }
}

/// The shortest digits that read back as the same number; exponents below 1e-4 and from 1e16, with two digits.
fn python_float(x: f64) -> String {
    if x.is_nan() {
        return "NaN".into();
    }
    if x.is_infinite() {
        return if x > 0.0 { "Infinity" } else { "-Infinity" }.into();
    }
    if x == 0.0 || (1e-4..1e16).contains(&x.abs()) {
        return format!("{x:?}");
    }
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.strip_prefix('-') {
        Some(exponent) => format!("{digits}e-{exponent:0>2}"),
        None => format!("{digits}e+{exponent:0>2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_as_in_python() {
        for (x, text) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-0.0, "-0.0"),
            (1e16, "1e+16"),
            (123456789012345.6, "123456789012345.6"),
            (0.0001, "0.0001"),
            (1.5e-5, "1.5e-05"),
            (1e100, "1e+100"),
            (5e-324, "5e-324"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-Infinity"),
        ] {
            assert_eq!(python_float(x), text);
        }
    }
}
