//! Reading JSON files of a folder, and keys of their objects.

use crate::error::{Error, escape};
use crate::map::Map;
use indexmap::IndexMap;
use serde::de::{self, Deserialize, DeserializeOwned, IgnoredAny, MapAccess};
use serde_json::Value;
use std::path::Path;

/// Largest configuration that is read. Real ones have some kilobytes, and a tree of values takes many times the
/// file's size.
const MAX_CONFIG: usize = 4 << 20;

/// Largest width or number of parts. Real ones stay below 2^18.
const MAX_SIZE: usize = 1 << 20;

/// An object.
pub type Object = serde_json::Map<String, Value>;

/// What serde_json has to say, without whatever long text of the file it quotes. Quotes are escaped by it already.
pub fn words(e: &serde_json::Error) -> String {
    let words = e.to_string();
    match words.char_indices().nth(300) {
        Some((end, _)) => format!("{}…", &words[..end]),
        None => words,
    }
}

/// A file's map; `None` where there is no such file.
///
/// # Errors
/// [`Error::Io`].
pub fn open(path: &Path) -> Result<Option<Map>, Error> {
    match Map::open(path) {
        Err(Error::Io { kind: std::io::ErrorKind::NotFound, .. }) => Ok(None),
        map => map.map(Some),
    }
}

/// The object that is the content of a configuration file; `None` where there is no such file.
///
/// # Errors
/// [`Error::Io`] or [`Error::Json`].
pub fn read(path: &Path) -> Result<Option<Object>, Error> {
    read_up_to(path, MAX_CONFIG)
}

/// The content of a file of at most `max` bytes; `None` where there is no such file.
///
/// # Errors
/// [`Error::Io`] or [`Error::Json`].
pub fn read_up_to<T: DeserializeOwned>(path: &Path, max: usize) -> Result<Option<T>, Error> {
    let Some(map) = open(path)? else { return Ok(None) };
    let fault = |what| Error::Json { path: path.to_owned(), what };
    if map.len() > max {
        return Err(fault(format!("the file has {} bytes, at most {max} are read", map.len())));
    }
    serde_json::from_slice(map.bytes()).map(Some).map_err(|e| fault(words(&e)))
}

/// The entries of an object, none twice and at most `max`, in their order; that of `skip` is left out. A failure names
/// the entry, as a `kind` of thing.
pub fn entries<'de, A, V>(
    mut map: A,
    kind: &str,
    skip: Option<&str>,
    max: usize,
) -> Result<IndexMap<String, V>, A::Error>
where
    A: MapAccess<'de>,
    V: Deserialize<'de>,
{
    let mut entries = IndexMap::new();
    while let Some(name) = map.next_key::<String>()? {
        if Some(&*name) == skip {
            map.next_value::<IgnoredAny>()?;
            continue;
        }
        let named = |what: String| de::Error::custom(format!("{kind} \"{}\": {what}", escape(&name)));
        let value = map.next_value().map_err(|e: A::Error| named(e.to_string()))?;
        if entries.len() == max {
            return Err(named(format!("expected at most {max}")));
        }
        if entries.contains_key(&name) {
            return Err(named("duplicate: it is there twice".into()));
        }
        entries.insert(name, value);
    }
    Ok(entries)
}

/// What a key has: keys that are absent take the default of a family, null often means something else.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Given<T> {
    /// No such key.
    Absent,
    /// The key is null.
    Null,
    /// The key has a value of the type asked for.
    Value(T),
}

impl<T> Given<T> {
    /// The value, or what stands for an absent key and for null.
    pub fn or(self, absent: T, null: T) -> T {
        match self {
            Given::Absent => absent,
            Given::Null => null,
            Given::Value(value) => value,
        }
    }

    /// The value, where absent and null mean the same.
    pub fn value(self) -> Option<T> {
        match self {
            Given::Value(value) => Some(value),
            _ => None,
        }
    }

    /// The value or null as `Some` or `None`, or the default of an absent key.
    pub fn nullable(self, absent: Option<T>) -> Option<T> {
        match self {
            Given::Absent => absent,
            given => given.value(),
        }
    }
}

/// The keys of an object in a JSON file, read with the types that are expected of them.
#[derive(Clone)]
pub struct Keys<'a> {
    path: &'a Path,
    object: &'a Object,
    /// Where the object is in the file: `text_config.`
    prefix: String,
}

impl<'a> Keys<'a> {
    /// The keys of a file's outermost object.
    pub fn new(path: &'a Path, object: &'a Object) -> Keys<'a> {
        Keys { path, object, prefix: String::new() }
    }

    /// The full name of a key.
    pub fn name(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    /// An error about a key.
    pub fn error(&self, key: &str, what: impl Into<String>) -> Error {
        Error::key(self.path, &self.name(key), what)
    }

    /// A value as it is.
    pub fn get(&self, key: &str) -> Given<&'a Value> {
        match self.object.get(key) {
            None => Given::Absent,
            Some(Value::Null) => Given::Null,
            Some(value) => Given::Value(value),
        }
    }

    /// A value that `read` takes.
    fn typed<T>(&self, key: &str, expected: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Given<T>, Error> {
        Ok(match self.get(key) {
            Given::Absent => Given::Absent,
            Given::Null => Given::Null,
            Given::Value(value) => Given::Value(read(value).ok_or_else(|| {
                let what = format!("expected {expected}, found {}", shown(value));
                self.error(key, what)
            })?),
        })
    }

    /// A whole number above 0 and within reason.
    pub fn count(&self, key: &str) -> Result<Given<usize>, Error> {
        let expected = "a whole number above 0 (and below 2^32)";
        self.typed(key, expected, |v| Some(u32::try_from(v.as_u64()?).ok().filter(|&n| n > 0)? as usize))
    }

    /// A whole number from 0 on.
    pub fn number_from_0(&self, key: &str) -> Result<Given<usize>, Error> {
        let expected = "a whole number from 0 on (and below 2^32)";
        self.typed(key, expected, |v| Some(u32::try_from(v.as_u64()?).ok()? as usize))
    }

    /// A number of heads, layers, experts, or the width of something: above 0, and small enough that a few of them
    /// can be multiplied, and that lists of one of them fit in memory.
    pub fn size(&self, key: &str) -> Result<Given<usize>, Error> {
        match self.count(key)? {
            Given::Value(n) if n > MAX_SIZE => Err(self.error(key, format!("expected at most {MAX_SIZE}, found {n}"))),
            size => Ok(size),
        }
    }

    /// A size that must be there.
    pub fn require_size(&self, key: &str) -> Result<usize, Error> {
        self.size(key)?.value().ok_or_else(|| self.missing(key))
    }

    /// A number above 0 that single precision can hold.
    pub fn positive(&self, key: &str) -> Result<Given<f32>, Error> {
        self.typed(key, "a number above 0", |v| Some(v.as_f64()? as f32).filter(|x| x.is_finite() && *x > 0.0))
    }

    /// A number above 0 and up to 1, in double precision.
    pub fn fraction(&self, key: &str) -> Result<Given<f64>, Error> {
        self.typed(key, "a number above 0 and up to 1", |v| v.as_f64().filter(|x| *x > 0.0 && *x <= 1.0))
    }

    /// A number from 0 on.
    pub fn not_negative(&self, key: &str) -> Result<Given<f32>, Error> {
        self.typed(key, "a number from 0 on", |v| Some(v.as_f64()? as f32).filter(|x| x.is_finite() && *x >= 0.0))
    }

    /// True or false; null is as good as absent.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, Error> {
        Ok(self.typed(key, "true or false", Value::as_bool)?.value())
    }

    /// Text; null is as good as absent.
    pub fn text(&self, key: &str) -> Result<Option<&'a str>, Error> {
        Ok(self.typed(key, "text", Value::as_str)?.value())
    }

    /// A list whose elements `read` takes; null is as good as absent.
    pub fn list<T>(&self, key: &str, of: &str, read: fn(&'a Value) -> Option<T>) -> Result<Option<Vec<T>>, Error> {
        let list = self.typed(key, &format!("a list of {of}"), |v| v.as_array()?.iter().map(read).collect());
        Ok(list?.value())
    }

    /// The keys of an object inside; null is as good as absent.
    pub fn object(&self, key: &str) -> Result<Option<Keys<'a>>, Error> {
        let object = self.typed(key, "an object", Value::as_object)?.value();
        Ok(object.map(|object| Keys { path: self.path, object, prefix: format!("{}{key}.", self.prefix) }))
    }

    /// The names of all keys.
    pub fn keys(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.object.keys().map(String::as_str)
    }

    /// The error that a key is missing.
    pub fn missing(&self, key: &str) -> Error {
        self.error(key, if self.get(key) == Given::Null { "expected a value, found null" } else { "missing" })
    }
}

/// A value for a message: short, and fit for a terminal.
pub fn shown(value: &Value) -> String {
    match value {
        Value::Array(list) if list.len() > 8 => format!("a list of {}", list.len()),
        Value::Object(_) => "an object".to_owned(),
        Value::String(text) => format!("\"{}\"", escape(text)),
        value => escape(&value.to_string()).to_string(),
    }
}
