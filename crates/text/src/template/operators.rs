//! Operators and checks that the compiled program calls instead of, or before, the engine's own instructions.

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Rest, Tuple, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::{FUEL, INPUT_BYTES_PER_FUEL, MAX_DEPTH, MAX_OUTPUT};

type Result<T> = std::result::Result<T, Error>;

// No filter that a template could name.
pub(super) const ADD: &str = "+";
pub(super) const MUL: &str = "*";
pub(super) const REM: &str = "%";
/// A variable that is 1.
pub(super) const ONE: &str = "__one__";
pub(super) const SLICE: &str = "[:]";
pub(super) const MAP: &str = "{}";
pub(super) const PAY: &str = "$";
pub(super) const STORE: &str = "=";
pub(super) const STORE_ATTRIBUTE: &str = ".=";
pub(super) const ITERATE: &str = "in:";

/// Longest list made by an operator.
const MAX_ITEMS: usize = 1_000_000;
/// Items copied or looked at for one unit of work, and bytes.
const ITEMS_PER_FUEL: usize = 8;
const BYTES_PER_FUEL: usize = 64;
/// Longest string that a template may keep, beyond four times what it was given: comparing strings, in the engine's
/// own filters too, costs it nothing.
const MAX_KEPT_TEXT: usize = 1 << 16;

pub(super) fn add_to(env: &mut Environment<'static>) {
    env.add_global(ONE, 1);
    env.add_filter(ADD, add);
    env.add_filter(MUL, mul);
    env.add_filter(REM, rem);
    env.add_filter(SLICE, slice);
    env.add_filter(MAP, map);
    env.add_filter(PAY, pay);
    env.add_filter(STORE, |state: &State, value: Value| store(state, value, false));
    env.add_filter(STORE_ATTRIBUTE, |state: &State, value: Value| store(state, value, true));
    env.add_filter(ITERATE, iterate);
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

fn unsupported(operator: &str, left: &Value, right: &Value) -> Error {
    invalid(format!("unsupported operands of {operator}: {} and {}", left.kind(), right.kind()))
}

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) && !value.is_tuple()
}

/// Pays for `len` items.
pub(super) fn charge(state: &State, len: usize) -> Result<()> {
    check_items(len)?;
    state.consume_fuel((len / ITEMS_PER_FUEL) as u64)
}

fn check_items(len: usize) -> Result<()> {
    match len {
        0..=MAX_ITEMS => Ok(()),
        _ => Err(invalid(format!("a list of more than {MAX_ITEMS} items"))),
    }
}

/// Pays for looking at a value; nested values are on the house, being bounded by [`MAX_KEPT_TEXT`].
fn pay(state: &State, value: Value) -> Result<Value> {
    let cost = match value.as_str() {
        Some(text) => text.len() / BYTES_PER_FUEL,
        None => value.len().unwrap_or(0) / ITEMS_PER_FUEL,
    };
    state.consume_fuel(cost as u64)?;
    Ok(value)
}

/// A dict from keys and values in turn.
fn map(state: &State, first: Value, rest: Rest<Value>) -> Result<Value> {
    let mut values = std::iter::once(first).chain(rest.0);
    let mut pairs = Vec::new();
    while let (Some(key), Some(value)) = (values.next(), values.next()) {
        pairs.push((pay(state, key)?, value));
    }
    charge(state, 2 * pairs.len())?;
    Ok(Value::from_pairs(pairs))
}

/// `value[start:stop:step]`, as in Python.
fn slice(state: &State, value: Value, start: Value, stop: Value, step: Value) -> Result<Value> {
    let at = |bound: &Value| bound.as_i64();
    let (start, stop, step) = (at(&start), at(&stop), at(&step).unwrap_or(1));
    if step == 0 {
        return Err(invalid("a slice step of 0".into()));
    }
    let value = pay(state, value)?;
    if let Some(text) = value.as_str() {
        let characters: Vec<char> = text.chars().collect();
        let picked = picked(characters.len(), start, stop, step);
        return Ok(Value::from(picked.map(|i| characters[i]).collect::<String>()));
    }
    if !is_list(&value) && !value.is_tuple() {
        return Err(invalid(format!("a value of type {} cannot be sliced", value.kind())));
    }
    let mut list = Vec::new();
    items(state, &value, &mut list)?;
    let picked: Vec<Value> = picked(list.len(), start, stop, step).map(|i| list[i].clone()).collect();
    Ok(if value.is_tuple() { Value::from(Tuple::new(picked)) } else { Value::from(picked) })
}

/// The positions that a slice picks from `len` items.
fn picked(len: usize, start: Option<i64>, stop: Option<i64>, step: i64) -> impl Iterator<Item = usize> {
    let len = len as i64;
    let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let clamp = |bound: i64| if bound < 0 { bound.saturating_add(len).max(low) } else { bound.min(high) };
    let (from, to) = if step > 0 { (low, high) } else { (high, low) };
    let (from, to) = (start.map_or(from, clamp), stop.map_or(to, clamp));
    let inside = move |i: &i64| if step > 0 { *i < to } else { *i > to };
    std::iter::successors(Some(from), move |i| i.checked_add(step)).take_while(inside).map(|i| i as usize)
}

/// Appends the items of `value`, paying for each.
fn items(state: &State, value: &Value, into: &mut Vec<Value>) -> Result<()> {
    check_items(into.len().saturating_add(value.len().unwrap_or(0)))?;
    for item in value.try_iter()?.checked() {
        into.push(item?);
        check_items(into.len())?;
        if into.len().is_multiple_of(ITEMS_PER_FUEL) {
            state.consume_fuel(1)?;
        }
    }
    Ok(())
}

fn check_text(len: Option<usize>) -> Result<()> {
    match len {
        Some(len) if len <= MAX_OUTPUT => Ok(()),
        _ => Err(invalid(format!("a string of more than {MAX_OUTPUT} bytes"))),
    }
}

/// Numbers as Python sees them: integers (booleans among them) and floats.
enum Number {
    Int(i128),
    Float(f64),
}

fn number(value: &Value) -> Option<Number> {
    match value.kind() {
        ValueKind::Bool => Some(Number::Int(value.is_true().into())),
        ValueKind::Number if value.is_integer() => i128::try_from(value.clone()).ok().map(Number::Int),
        ValueKind::Number => f64::try_from(value.clone()).ok().map(Number::Float),
        _ => None,
    }
}

fn numbers(left: &Value, right: &Value) -> Option<(Number, Number)> {
    Some(match (number(left)?, number(right)?) {
        (Number::Int(a), Number::Float(b)) => (Number::Float(a as f64), Number::Float(b)),
        (Number::Float(a), Number::Int(b)) => (Number::Float(a), Number::Float(b as f64)),
        same => same,
    })
}

fn int(result: Option<i128>) -> Result<Value> {
    let value = result.ok_or_else(|| invalid("integer overflow".into()))?;
    Ok(i64::try_from(value).map_or_else(|_| Value::from(value), Value::from))
}

fn add(state: &State, left: Value, right: Value) -> Result<Value> {
    if let (Some(a), Some(b)) = (left.as_str(), right.as_str()) {
        check_text(a.len().checked_add(b.len()))?;
        return Ok(Value::from([a, b].concat()));
    }
    match numbers(&left, &right) {
        Some((Number::Int(a), Number::Int(b))) => return int(a.checked_add(b)),
        Some((Number::Float(a), Number::Float(b))) => return Ok(Value::from(a + b)),
        _ => {}
    }
    let tuples = left.is_tuple() && right.is_tuple();
    let lists = is_list(&left) && is_list(&right);
    if !tuples && !lists {
        return Err(unsupported("+", &left, &right));
    }
    let mut joined = Vec::new();
    items(state, &left, &mut joined)?;
    items(state, &right, &mut joined)?;
    Ok(if tuples { Value::from(Tuple::new(joined)) } else { Value::from(joined) })
}

fn mul(state: &State, left: Value, right: Value) -> Result<Value> {
    match numbers(&left, &right) {
        Some((Number::Int(a), Number::Int(b))) => return int(a.checked_mul(b)),
        Some((Number::Float(a), Number::Float(b))) => return Ok(Value::from(a * b)),
        _ => {}
    }
    let (repeated, times) = if number(&left).is_some() { (&right, &left) } else { (&left, &right) };
    let Some(Number::Int(times)) = number(times) else { return Err(unsupported("*", &left, &right)) };
    let times = usize::try_from(times.max(0)).unwrap_or(usize::MAX);
    if let Some(text) = repeated.as_str() {
        check_text(text.len().checked_mul(times))?;
        return Ok(Value::from(text.repeat(times)));
    }
    if !is_list(repeated) && !repeated.is_tuple() {
        return Err(unsupported("*", &left, &right));
    }
    let mut once = Vec::new();
    items(state, repeated, &mut once)?;
    charge(state, once.len().saturating_mul(times))?;
    let len = once.len() * if once.is_empty() { 0 } else { times };
    let many: Vec<Value> = once.iter().cycle().take(len).cloned().collect();
    Ok(if repeated.is_tuple() { Value::from(Tuple::new(many)) } else { Value::from(many) })
}

/// Remainder with the sign of the divisor; `%` formatting if the left side is a string.
fn rem(state: &State, left: Value, right: Value) -> Result<Value> {
    if let Some(text) = left.as_str() {
        let arguments: Vec<Value> = match right.is_tuple() {
            true => right.try_iter()?.collect(),
            false => vec![right],
        };
        state.consume_fuel(text.len() as u64)?;
        check_widths(text)?;
        return format(FormatStyle::Printf, text, &arguments).map(Value::from);
    }
    let zero = || invalid("division by zero".into());
    match numbers(&left, &right) {
        Some((Number::Int(a), Number::Int(b))) => {
            let rest = a.checked_rem(b).ok_or_else(zero)?;
            int(Some(if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }))
        }
        Some((Number::Float(_), Number::Float(0.0))) => Err(zero()),
        Some((Number::Float(a), Number::Float(b))) => Ok(Value::from(a - b * (a / b).floor())),
        _ => Err(unsupported("%", &left, &right)),
    }
}

/// Refuses a format string that asks for absurd widths.
pub(super) fn check_widths(format: &str) -> Result<()> {
    let longest = format.split(|c: char| !c.is_ascii_digit()).map(str::len).max();
    match longest {
        Some(5..) => Err(invalid("a format width of more than 9999".into())),
        _ => Ok(()),
    }
}

/// A value about to be kept: not nested too deep, and no lazy view on other values. What goes into a namespace is
/// copied, so that a namespace never contains itself.
fn store(state: &State, value: Value, copy_maps: bool) -> Result<Value> {
    let fuel = state.fuel_levels().map_or(FUEL, |(used, left)| used + left);
    let given = fuel.saturating_sub(FUEL).saturating_mul(INPUT_BYTES_PER_FUEL);
    let longest = MAX_KEPT_TEXT.saturating_add(usize::try_from(given).unwrap_or(usize::MAX).saturating_mul(4));
    Storing { state, copy_maps, longest }.plain(value, MAX_DEPTH)
}

struct Storing<'s, 'env, 'template> {
    state: &'s State<'template, 'env>,
    copy_maps: bool,
    /// In bytes.
    longest: usize,
}

impl Storing<'_, '_, '_> {
    fn plain(&self, value: Value, depth: usize) -> Result<Value> {
        if value.as_str().is_some_and(|text| text.len() > self.longest) {
            return Err(invalid(format!("a string of more than {} bytes is kept", self.longest)));
        }
        let nested = matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map);
        // A `joiner` calls itself a map without being one.
        if !nested || value.try_iter().is_err() {
            return Ok(value);
        }
        if depth == 0 {
            return Err(invalid(format!("values nested more than {MAX_DEPTH} deep")));
        }
        charge(self.state, 2 * ITEMS_PER_FUEL + value.len().unwrap_or(0))?;
        if value.kind() == ValueKind::Map {
            return self.map(value, depth);
        }
        let lazy = !value.is_tuple() && value.downcast_object_ref::<Vec<Value>>().is_none();
        let mut list = Vec::new();
        items(self.state, &value, &mut list)?;
        let is_tuple = value.is_tuple();
        for item in &mut list {
            *item = self.plain(std::mem::take(item), depth - 1)?;
        }
        match (is_tuple, lazy || self.copy_maps) {
            (_, false) => Ok(value),
            (true, true) => Ok(Value::from(Tuple::new(list))),
            (false, true) => Ok(Value::from(list)),
        }
    }

    fn map(&self, value: Value, depth: usize) -> Result<Value> {
        let mut pairs = Vec::new();
        for key in value.try_iter()?.checked() {
            let key = key?;
            let item = self.plain(value.get_item(&key)?, depth - 1)?;
            pairs.push((key, item));
        }
        Ok(if self.copy_maps { Value::from_pairs(pairs) } else { value })
    }
}

/// Python refuses to iterate over none.
fn iterate(value: Value) -> Result<Value> {
    if value.is_none() {
        return Err(invalid("'NoneType' object is not iterable".into()));
    }
    Ok(value)
}
