//! Metadata values: read from the file's bytes, converted to Rust types, shown.

use std::{
    borrow::Cow,
    fmt::{self, Display},
};

use super::cursor::{Cursor, What};
use crate::error::escape;

/// Deepest nesting of arrays that is read. Known files nest none; the limit keeps a hostile file off the stack.
const MAX_DEPTH: usize = 4;

/// The type of a metadata value, named as the GGUF specification names it. The discriminant is its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    Str = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    /// The type with this number.
    pub fn from_id(id: u32) -> Option<ValueType> {
        use ValueType::*;
        [U8, I8, U16, I16, U32, I32, F32, Bool, Str, Array, U64, I64, F64].get(id as usize).copied()
    }

    /// Its name in messages.
    pub fn name(self) -> &'static str {
        use ValueType::*;
        match self {
            U8 => "u8",
            I8 => "i8",
            U16 => "u16",
            I16 => "i16",
            U32 => "u32",
            I32 => "i32",
            F32 => "f32",
            Bool => "bool",
            Str => "string",
            Array => "array",
            U64 => "u64",
            I64 => "i64",
            F64 => "f64",
        }
    }

    /// Bytes of a value in the file, at least: an empty string is its length, an empty array its type and length.
    fn min_bytes(self) -> u64 {
        use ValueType::*;
        match self {
            U8 | I8 | Bool => 1,
            U16 | I16 => 2,
            U32 | I32 | F32 => 4,
            U64 | I64 | F64 | Str => 8,
            Array => 12,
        }
    }
}

impl Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A metadata value, borrowed from the file. Its [`Display`] form is one short line without control characters.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Value<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    /// Text, by promise of the format; vocabularies break it.
    Str(&'a [u8]),
    Array(Array<'a>),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// An array of metadata values. Elements stay in the file and are decoded while iterating, so that a vocabulary
/// costs nothing until it is used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Array<'a> {
    elem: ValueType,
    len: usize,
    bytes: &'a [u8],
}

impl<'a> Value<'a> {
    /// Reads a value of type `ty`; arrays are walked to their end, so that all counts and lengths in them are known
    /// to be good. `depth` is the number of arrays around it.
    pub(super) fn read(cur: &mut Cursor<'a>, ty: ValueType, depth: usize) -> Result<Value<'a>, What> {
        Ok(match ty {
            ValueType::U8 => Value::U8(u8::from_le_bytes(cur.array("u8 value")?)),
            ValueType::I8 => Value::I8(i8::from_le_bytes(cur.array("i8 value")?)),
            ValueType::U16 => Value::U16(u16::from_le_bytes(cur.array("u16 value")?)),
            ValueType::I16 => Value::I16(i16::from_le_bytes(cur.array("i16 value")?)),
            ValueType::U32 => Value::U32(u32::from_le_bytes(cur.array("u32 value")?)),
            ValueType::I32 => Value::I32(i32::from_le_bytes(cur.array("i32 value")?)),
            ValueType::F32 => Value::F32(f32::from_le_bytes(cur.array("f32 value")?)),
            ValueType::U64 => Value::U64(u64::from_le_bytes(cur.array("u64 value")?)),
            ValueType::I64 => Value::I64(i64::from_le_bytes(cur.array("i64 value")?)),
            ValueType::F64 => Value::F64(f64::from_le_bytes(cur.array("f64 value")?)),
            ValueType::Bool => {
                let [byte] = cur.array("bool value")?;
                check_bools(&[byte])?;
                Value::Bool(byte != 0)
            }
            ValueType::Str => Value::Str(cur.string("value")?),
            ValueType::Array => Value::Array(Array::read(cur, depth + 1)?),
        })
    }

    /// The value whose bytes are all of `bytes`; it was read before, so that arrays need no second walk.
    pub(super) fn reread(ty: ValueType, bytes: &'a [u8]) -> Option<Value<'a>> {
        let mut cur = Cursor::new(bytes);
        match ty {
            ValueType::Array => Some(Value::Array(Array::head(&mut cur).ok()?)),
            _ => Value::read(&mut cur, ty, 0).ok(),
        }
    }

    /// The type it has in the file.
    pub fn ty(&self) -> ValueType {
        match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::F32(_) => ValueType::F32,
            Value::Bool(_) => ValueType::Bool,
            Value::Str(_) => ValueType::Str,
            Value::Array(_) => ValueType::Array,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F64(_) => ValueType::F64,
        }
    }

    /// The value of any integer type.
    pub fn integer(&self) -> Option<i128> {
        Some(match *self {
            Value::U8(x) => x.into(),
            Value::I8(x) => x.into(),
            Value::U16(x) => x.into(),
            Value::I16(x) => x.into(),
            Value::U32(x) => x.into(),
            Value::I32(x) => x.into(),
            Value::U64(x) => x.into(),
            Value::I64(x) => x.into(),
            _ => return None,
        })
    }

    /// Type and value for messages: `u32 7`, `array of 3 string`.
    fn describe(&self) -> String {
        match self {
            Value::Array(a) => format!("array of {} {}", a.len, a.elem),
            _ => format!("{} {self}", self.ty()),
        }
    }
}

fn check_bools(bytes: &[u8]) -> Result<(), What> {
    match bytes.iter().find(|&&b| b > 1) {
        Some(b) => Err(format!("bool value {b}, expected 0 or 1")),
        None => Ok(()),
    }
}

impl<'a> Array<'a> {
    fn read(cur: &mut Cursor<'a>, depth: usize) -> Result<Array<'a>, What> {
        if depth > MAX_DEPTH {
            return Err(format!("arrays nested more than {MAX_DEPTH} deep"));
        }
        let Array { elem, len, bytes } = Array::head(cur)?;
        match elem {
            ValueType::Str => (0..len).try_for_each(|_| cur.string("array element").map(drop))?,
            ValueType::Array => (0..len).try_for_each(|_| Array::read(cur, depth + 1).map(drop))?,
            ValueType::Bool => check_bools(cur.take(len as u64, "array")?)?,
            _ => drop(cur.take(len as u64 * elem.min_bytes(), "array")?),
        }
        Ok(Array { elem, len, bytes: &bytes[..bytes.len() - cur.rest().len()] })
    }

    /// Element type and length; `bytes` is all that follows.
    fn head(cur: &mut Cursor<'a>) -> Result<Array<'a>, What> {
        let elem = cur.value_type("array element type")?;
        let len = cur.count("array length", elem.min_bytes())?;
        Ok(Array { elem, len, bytes: cur.rest() })
    }

    /// The type of every element.
    pub fn elem(&self) -> ValueType {
        self.elem
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements as they are in the file.
    pub(super) fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The elements in order.
    pub fn iter(&self) -> Elements<'a> {
        Elements { cur: Cursor::new(self.bytes), elem: self.elem, left: self.len }
    }

    /// The elements of an array of strings.
    pub fn strings(&self) -> Option<Strings<'a>> {
        (self.elem == ValueType::Str).then(|| Strings(self.iter()))
    }
}

/// The elements of an [`Array`].
#[derive(Clone, Debug)]
pub struct Elements<'a> {
    cur: Cursor<'a>,
    elem: ValueType,
    left: usize,
}

impl<'a> Iterator for Elements<'a> {
    type Item = Value<'a>;

    fn next(&mut self) -> Option<Value<'a>> {
        self.left = self.left.checked_sub(1)?;
        // The array was checked when the file was opened. Should the file change under the map, iteration ends.
        Value::read(&mut self.cur, self.elem, 1).ok()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Elements<'_> {}

/// The elements of an array of strings, as bytes.
#[derive(Clone, Debug)]
pub struct Strings<'a>(Elements<'a>);

impl<'a> Iterator for Strings<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        match self.0.next()? {
            Value::Str(s) => Some(s),
            _ => None,
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl ExactSizeIterator for Strings<'_> {}

/// A Rust type that a metadata value converts to. Conversions never lose a value: integers convert from every
/// integer type as long as the number fits, floats from f32 and f64, nothing else.
pub trait FromValue<'a>: Sized {
    /// The value, or `expected .., found ..`.
    fn from_value(value: Value<'a>) -> Result<Self, String>;
}

fn mismatch<T>(expected: &str, value: Value<'_>) -> Result<T, String> {
    Err(format!("expected {expected}, found {}", value.describe()))
}

macro_rules! integers {
    ($($t:ty),*) => {$(
        impl FromValue<'_> for $t {
            fn from_value(value: Value<'_>) -> Result<Self, String> {
                match value.integer().map(<$t>::try_from) {
                    Some(Ok(x)) => Ok(x),
                    Some(Err(_)) => mismatch(&format!("an integer from {} to {}", <$t>::MIN, <$t>::MAX), value),
                    None => mismatch("an integer type", value),
                }
            }
        }
    )*};
}

integers!(u8, i8, u16, i16, u32, i32, u64, i64, usize);

impl FromValue<'_> for f64 {
    fn from_value(value: Value<'_>) -> Result<f64, String> {
        match value {
            Value::F32(x) => Ok(x.into()),
            Value::F64(x) => Ok(x),
            _ => mismatch("a float type", value),
        }
    }
}

/// Rounds an f64 to the nearest f32.
impl FromValue<'_> for f32 {
    fn from_value(value: Value<'_>) -> Result<f32, String> {
        f64::from_value(value).map(|x| x as f32)
    }
}

impl FromValue<'_> for bool {
    fn from_value(value: Value<'_>) -> Result<bool, String> {
        match value {
            Value::Bool(x) => Ok(x),
            _ => mismatch("type bool", value),
        }
    }
}

/// Strings as they are, UTF-8 or not.
impl<'a> FromValue<'a> for &'a [u8] {
    fn from_value(value: Value<'a>) -> Result<&'a [u8], String> {
        match value {
            Value::Str(x) => Ok(x),
            _ => mismatch("type string", value),
        }
    }
}

/// Strings that are valid UTF-8; others are refused.
impl<'a> FromValue<'a> for &'a str {
    fn from_value(value: Value<'a>) -> Result<&'a str, String> {
        let bytes = <&[u8]>::from_value(value)?;
        std::str::from_utf8(bytes).or_else(|_| mismatch("UTF-8 text", value))
    }
}

impl FromValue<'_> for String {
    fn from_value(value: Value<'_>) -> Result<String, String> {
        <&str>::from_value(value).map(str::to_owned)
    }
}

/// Strings with U+FFFD in place of what is no UTF-8.
impl<'a> FromValue<'a> for Cow<'a, str> {
    fn from_value(value: Value<'a>) -> Result<Cow<'a, str>, String> {
        <&[u8]>::from_value(value).map(String::from_utf8_lossy)
    }
}

impl<'a> FromValue<'a> for Value<'a> {
    fn from_value(value: Value<'a>) -> Result<Value<'a>, String> {
        Ok(value)
    }
}

impl<'a> FromValue<'a> for Array<'a> {
    fn from_value(value: Value<'a>) -> Result<Array<'a>, String> {
        match value {
            Value::Array(x) => Ok(x),
            _ => mismatch("type array", value),
        }
    }
}

impl<'a> FromValue<'a> for Strings<'a> {
    fn from_value(value: Value<'a>) -> Result<Strings<'a>, String> {
        let array = Array::from_value(value)?;
        array.strings().map_or_else(|| mismatch("an array of type string", value), Ok)
    }
}

/// Arrays, element by element.
impl<'a, T: FromValue<'a>> FromValue<'a> for Vec<T> {
    fn from_value(value: Value<'a>) -> Result<Vec<T>, String> {
        let elements = Array::from_value(value)?.iter().enumerate();
        elements.map(|(i, x)| T::from_value(x).map_err(|what| format!("element {i}: {what}"))).collect()
    }
}

/// Elements of an array that are shown.
const SHOWN_ELEMENTS: usize = 8;

impl Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::U8(x) => x.fmt(f),
            Value::I8(x) => x.fmt(f),
            Value::U16(x) => x.fmt(f),
            Value::I16(x) => x.fmt(f),
            Value::U32(x) => x.fmt(f),
            Value::I32(x) => x.fmt(f),
            Value::U64(x) => x.fmt(f),
            Value::I64(x) => x.fmt(f),
            Value::Bool(x) => x.fmt(f),
            // Debug writes small and large numbers with an exponent.
            Value::F32(x) => write!(f, "{x:?}"),
            Value::F64(x) => write!(f, "{x:?}"),
            Value::Str(x) => write!(f, "\"{}\"", escape(x)),
            Value::Array(x) => x.fmt(f),
        }
    }
}

impl Display for Array<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[")?;
        for (i, x) in self.iter().take(SHOWN_ELEMENTS).enumerate() {
            let comma = if i > 0 { ", " } else { "" };
            match x {
                // Inner arrays in full would multiply the length of the line.
                Value::Array(_) => write!(f, "{comma}{}", x.describe())?,
                _ => write!(f, "{comma}{x}")?,
            }
        }
        if self.len > SHOWN_ELEMENTS {
            write!(f, ", … {} in all", self.len)?;
        }
        write!(f, "]")
    }
}
