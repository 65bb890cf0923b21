//! The metadata of a file: keys in order, values by key.

use std::{
    ops::Range,
    path::{Path, PathBuf},
};

use bytes::Bytes;
use indexmap::{IndexMap, map::Entry};

use super::{
    cursor::{Cursor, What},
    value::{FromValue, Value, ValueType},
};
use crate::{Error, error::escape};

/// Longest key in bytes (the specification's limit).
const MAX_KEY: usize = 65_535;

/// Most keys in a file. Known files have under a hundred; the limit bounds the memory a hostile file can take.
const MAX_KEYS: usize = 1 << 16;

/// The metadata of a GGUF file. Values stay in the file's map and are decoded when asked for.
#[derive(Clone, Debug)]
pub struct Metadata {
    path: PathBuf,
    bytes: Bytes,
    entries: IndexMap<Box<str>, Stored>,
}

/// Where in the file a value of which type is.
#[derive(Clone, Debug)]
struct Stored {
    ty: ValueType,
    range: Range<usize>,
}

impl Stored {
    /// The value; `None` only when the file was changed under the map.
    fn value<'a>(&self, file: &'a [u8]) -> Option<Value<'a>> {
        Value::reread(self.ty, &file[self.range.clone()])
    }
}

impl Metadata {
    /// Reads `count` keys with their values from `bytes` (the whole file) at `cur`.
    pub(super) fn read(path: &Path, bytes: &Bytes, cur: &mut Cursor<'_>, count: usize) -> Result<Metadata, What> {
        if count > MAX_KEYS {
            return Err(format!("metadata key count {count}, at most {MAX_KEYS} are read"));
        }
        let mut entries = IndexMap::with_capacity(count);
        for i in 0..count {
            let key = read_key(cur).map_err(|what| format!("metadata key {i} of {count}: {what}"))?;
            let stored = read_value(cur).map_err(|what| format!("metadata key \"{}\": {what}", escape(key)))?;
            match entries.entry(key.into()) {
                Entry::Vacant(slot) => slot.insert(stored),
                Entry::Occupied(_) => return Err(format!("duplicate metadata key \"{}\"", escape(key))),
            };
        }
        Ok(Metadata { path: path.to_owned(), bytes: bytes.clone(), entries })
    }

    /// The value of `key`, or `None` when the file has no such key.
    ///
    /// # Errors
    /// [`Error::Key`] when the value is of another type or does not fit.
    pub fn get<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>, Error> {
        self.value(key).map(T::from_value).transpose().map_err(|what| self.error(key, what))
    }

    /// The value of `key`.
    ///
    /// # Errors
    /// [`Error::Key`] when the key is missing or its value is of another type or does not fit.
    pub fn require<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T, Error> {
        self.get(key)?.ok_or_else(|| self.error(key, "missing"))
    }

    /// The value of `key` as the file has it.
    pub fn value(&self, key: &str) -> Option<Value<'_>> {
        self.entries.get(key)?.value(&self.bytes)
    }

    /// All keys and values in the order of the file.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Value<'_>)> {
        self.entries.iter().filter_map(|(key, stored)| Some((&**key, stored.value(&self.bytes)?)))
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no key.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The file the metadata is from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// An [`Error::Key`] of this file, for a value that is of the right type and still wrong.
    pub fn error(&self, key: &str, what: impl Into<String>) -> Error {
        Error::key(&self.path, key, what)
    }
}

fn read_key<'a>(cur: &mut Cursor<'a>) -> Result<&'a str, What> {
    let key = cur.string("key")?;
    match std::str::from_utf8(key) {
        Ok("") => Err("the key is empty".into()),
        Ok(_) if key.len() > MAX_KEY => Err(format!("the key has {} bytes, at most {MAX_KEY} are allowed", key.len())),
        Ok(key) => Ok(key),
        Err(_) => Err(format!("the key is not UTF-8: \"{}\"", escape(key))),
    }
}

fn read_value(cur: &mut Cursor<'_>) -> Result<Stored, What> {
    let ty = cur.value_type("value type")?;
    let start = cur.pos();
    Value::read(cur, ty, 0)?;
    Ok(Stored { ty, range: start..cur.pos() })
}
