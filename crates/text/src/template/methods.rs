//! Python's methods, filters and tests that the template engine and its Python module lack or do differently.

use minijinja::value::{ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};
use minijinja_contrib::pycompat;

use super::json;
use super::operators::{charge, check_widths};

type Result<T> = std::result::Result<T, Error>;

/// Widest field that padding methods make.
const MAX_WIDTH: usize = 10_000;

pub(super) fn add_to(env: &mut Environment<'static>) {
    env.set_unknown_method_callback(method);
    env.set_formatter(print);
    env.add_filter("int", to_int);
    env.add_filter("float", |value: &Value, default: Option<f64>| to_float(value).or(default).unwrap_or(0.0));
    env.add_filter("center", |text: &str, width: Option<usize>| pad(text, width.unwrap_or(80), ' ', Side::Both));
    env.add_filter("truncate", truncate);
    env.add_filter("wordcount", |text: &str| {
        text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()).count()
    });
    env.add_filter("pprint", |value: &Value| format!("{value:?}"));
    env.add_test("callable", |value: &Value| {
        value.kind() == ValueKind::Plain && value.as_object().is_some_and(|object| !object.type_name().is_empty())
    });
    env.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map) || value.is_tuple()
    });
    env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
}

/// Prints floats as Python does; everything else prints that way already.
fn print(out: &mut Output, state: &mut State, value: &Value) -> Result<()> {
    if value.kind() == ValueKind::Number && !value.is_integer() {
        let text = match f64::try_from(value.clone()) {
            Ok(x) if x.is_nan() => "nan".to_string(),
            Ok(x) if x.is_infinite() => if x > 0.0 { "inf" } else { "-inf" }.to_string(),
            _ => json::number(value),
        };
        return out.write_str(&text).map_err(Error::from);
    }
    minijinja::escape_formatter(out, state, value)
}

/// `int(default=0, base=10)`: what cannot be read is the default, as in Jinja.
fn to_int(value: &Value, default: Option<i64>, base: Option<u32>) -> i64 {
    let default = default.unwrap_or(0);
    match value.kind() {
        ValueKind::Bool => value.is_true().into(),
        ValueKind::Number => value.as_i64().or_else(|| to_float(value).map(|x| x as i64)).unwrap_or(default),
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default().trim();
            let base = base.filter(|b| (2..=36).contains(b)).unwrap_or(10);
            let digits = match base {
                16 => text.trim_start_matches("0x"),
                8 => text.trim_start_matches("0o"),
                2 => text.trim_start_matches("0b"),
                _ => text,
            };
            let whole = i64::from_str_radix(digits, base).ok();
            whole.or_else(|| text.parse::<f64>().ok().map(|x| x as i64)).unwrap_or(default)
        }
        _ => default,
    }
}

fn to_float(value: &Value) -> Option<f64> {
    match value.kind() {
        ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        ValueKind::Number => f64::try_from(value.clone()).ok(),
        ValueKind::String => value.as_str()?.trim().parse().ok(),
        _ => None,
    }
}

/// `truncate(length=255, killwords=false, end='...', leeway=5)`
fn truncate(
    text: &str,
    length: Option<usize>,
    cut_words: Option<bool>,
    end: Option<&str>,
    leeway: Option<usize>,
) -> String {
    let (length, end) = (length.unwrap_or(255), end.unwrap_or("..."));
    if text.chars().count() <= length.saturating_add(leeway.unwrap_or(5)) {
        return text.to_string();
    }
    let kept: String = text.chars().take(length.saturating_sub(end.chars().count())).collect();
    let kept = if cut_words == Some(true) { &kept } else { kept.rsplit_once(' ').map_or(&*kept, |(words, _)| words) };
    format!("{kept}{end}")
}

fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value> {
    // Most methods look at all of their object.
    charge(state, value.as_str().map_or_else(|| value.len().unwrap_or(0), |text| text.len() / 8))?;
    let own = match (value.as_str(), value.kind()) {
        (Some(text), _) => string_method(text, name, args)?,
        (None, ValueKind::Seq | ValueKind::Iterable) => list_method(value, name, args)?,
        (None, ValueKind::Map) if name == "copy" => Some(value.clone()),
        _ => None,
    };
    match own {
        Some(result) => Ok(result),
        None => pycompat::unknown_method_callback(state, value, name, args),
    }
}

fn list_method(list: &Value, name: &str, args: &[Value]) -> Result<Option<Value>> {
    match name {
        "copy" => Ok(Some(list.clone())),
        "index" => {
            let (wanted,): (&Value,) = from_args(args)?;
            let at = list.try_iter()?.position(|item| item == *wanted);
            at.map(|at| Some(Value::from(at))).ok_or_else(|| not_found("value is not in the list"))
        }
        _ => Ok(None),
    }
}

fn not_found(message: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

fn string_method(text: &str, name: &str, args: &[Value]) -> Result<Option<Value>> {
    let character = |c: Option<&str>| c.and_then(|c| c.chars().next()).unwrap_or(' ');
    Ok(Some(match name {
        "swapcase" => Value::from(swap_case(text)),
        "casefold" => Value::from(text.to_lowercase()),
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            let parts = match name {
                "partition" => text.split_once(separator).unwrap_or((text, "")),
                _ => text.rsplit_once(separator).unwrap_or(("", text)),
            };
            let found = if text.contains(separator) { separator } else { "" };
            Value::from(minijinja::value::Tuple::from([parts.0.into(), found.into(), parts.1.into()]))
        }
        "rsplit" => {
            let (separator, most): (Option<&str>, Option<i64>) = from_args(args)?;
            Value::from(split_from_right(text, separator, most))
        }
        "splitlines" => {
            let (keep,): (Option<bool>,) = from_args(args)?;
            Value::from(lines(text, keep.unwrap_or(false)))
        }
        "index" | "rindex" => {
            let (wanted,): (&str,) = from_args(args)?;
            let at = if name == "index" { text.find(wanted) } else { text.rfind(wanted) };
            let at = at.ok_or_else(|| not_found("substring not found"))?;
            Value::from(text[..at].chars().count())
        }
        "ljust" | "rjust" | "center" => {
            let (width, fill): (usize, Option<&str>) = from_args(args)?;
            let side = match name {
                "ljust" => Side::Right,
                "rjust" => Side::Left,
                _ => Side::Both,
            };
            Value::from(pad(text, width, character(fill), side)?)
        }
        "zfill" => {
            let (width,): (usize,) = from_args(args)?;
            let digits = text.trim_start_matches(['+', '-']);
            let sign = &text[..text.len() - digits.len()];
            let width = width.saturating_sub(sign.len());
            Value::from(format!("{sign}{}", pad(digits, width, '0', Side::Left)?))
        }
        "expandtabs" => {
            let (size,): (Option<usize>,) = from_args(args)?;
            Value::from(expand_tabs(text, size.unwrap_or(8).min(MAX_WIDTH)))
        }
        "isdecimal" => Value::from(!text.is_empty() && text.chars().all(|c| c.is_numeric())),
        "isidentifier" => {
            let first = text.chars().next().is_some_and(|c| c.is_alphabetic() || c == '_');
            Value::from(first && text.chars().all(|c| c.is_alphanumeric() || c == '_'))
        }
        "istitle" => {
            let titled = minijinja::filters::title(text.into());
            Value::from(titled == text && text.chars().any(char::is_alphabetic))
        }
        "format" => {
            check_widths(text)?;
            return Ok(None);
        }
        _ => return Ok(None),
    }))
}

fn swap_case(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_uppercase() { out.extend(c.to_lowercase()) } else { out.extend(c.to_uppercase()) }
    }
    out
}

fn split_from_right(text: &str, separator: Option<&str>, most: Option<i64>) -> Vec<Value> {
    let pieces = most.and_then(|n| usize::try_from(n).ok()).map_or(usize::MAX, |n| n.saturating_add(1));
    let mut parts: Vec<Value> = match separator {
        Some(separator) => text.rsplitn(pieces, separator).map(Value::from).collect(),
        None => {
            let (mut rest, mut parts) = (text.trim_end(), Vec::new());
            while !rest.is_empty() {
                let cut = if parts.len() + 1 < pieces { rest.rfind(char::is_whitespace) } else { None };
                let start = cut.map_or(0, |at| at + rest[at..].chars().next().map_or(1, char::len_utf8));
                parts.push(Value::from(if cut.is_some() { &rest[start..] } else { rest.trim_start() }));
                rest = rest[..cut.unwrap_or(0)].trim_end();
            }
            parts
        }
    };
    parts.reverse();
    parts
}

/// Python's line ends, which are more than `\n`.
fn lines(text: &str, keep: bool) -> Vec<Value> {
    let end =
        |c: char| matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let (mut rest, mut lines) = (text, Vec::new());
    while !rest.is_empty() {
        let at = rest.find(end).unwrap_or(rest.len());
        let len = match &rest[at..] {
            tail if tail.starts_with("\r\n") => 2,
            tail => tail.chars().next().map_or(0, char::len_utf8),
        };
        lines.push(Value::from(&rest[..if keep { at + len } else { at }]));
        rest = &rest[at + len..];
    }
    lines
}

fn expand_tabs(text: &str, size: usize) -> String {
    let (mut out, mut column) = (String::with_capacity(text.len()), 0);
    for c in text.chars() {
        match c {
            '\t' => {
                let spaces = if size == 0 { 0 } else { size - column % size };
                out.extend(std::iter::repeat_n(' ', spaces));
                column += spaces;
            }
            _ => {
                out.push(c);
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
            }
        }
    }
    out
}

/// Where padding goes.
enum Side {
    Left,
    Right,
    Both,
}

fn pad(text: &str, width: usize, fill: char, side: Side) -> Result<String> {
    if width > MAX_WIDTH {
        return Err(Error::new(ErrorKind::InvalidOperation, format!("a width of more than {MAX_WIDTH}")));
    }
    let missing = width.saturating_sub(text.chars().count());
    let left = match side {
        Side::Left => missing,
        Side::Right => 0,
        // Python puts the odd one on the left if the width is odd.
        Side::Both => missing / 2 + (missing & width & 1),
    };
    let fill = |n: usize| std::iter::repeat_n(fill, n).collect::<String>();
    Ok(format!("{}{text}{}", fill(left), fill(missing - left)))
}
