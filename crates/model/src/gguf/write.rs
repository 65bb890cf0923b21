//! Writing a GGUF file, version 3, little-endian: the header at once, then the weights as they come.
//!
//! The file is made beside its place and takes it at the end, so that whatever interrupts the work leaves no half of a
//! model there.

use std::{
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use indexmap::IndexMap;

use super::{
    container::{ALIGNMENT, DEFAULT_ALIGNMENT},
    tensor::{MAX_NAME, TensorType, size},
    value::{Value, ValueType},
};
use crate::{
    Error,
    new_file::{NewFile, reason},
};

/// A value that metadata can have, alone or as an element of an array.
pub trait Element {
    /// Its type in the file.
    const TYPE: ValueType;
    /// Appends its bytes.
    fn put(&self, out: &mut Vec<u8>);
}

macro_rules! numbers {
    ($($t:ty: $ty:ident),*) => {$(
        impl Element for $t {
            const TYPE: ValueType = ValueType::$ty;
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}

numbers!(u8: U8, i8: I8, u16: U16, i16: I16, u32: U32, i32: I32, u64: U64, i64: I64, f32: F32, f64: F64);

impl Element for bool {
    const TYPE: ValueType = ValueType::Bool;
    fn put(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }
}

impl Element for &[u8] {
    const TYPE: ValueType = ValueType::Str;
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u64).put(out);
        out.extend_from_slice(self);
    }
}

impl Element for &str {
    const TYPE: ValueType = ValueType::Str;
    fn put(&self, out: &mut Vec<u8>) {
        self.as_bytes().put(out);
    }
}

impl Element for String {
    const TYPE: ValueType = ValueType::Str;
    fn put(&self, out: &mut Vec<u8>) {
        self.as_bytes().put(out);
    }
}

/// A metadata value, as its bytes in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    ty: ValueType,
    bytes: Vec<u8>,
}

impl<T: Element> From<T> for Field {
    fn from(value: T) -> Field {
        let mut bytes = Vec::new();
        value.put(&mut bytes);
        Field { ty: T::TYPE, bytes }
    }
}

/// An array.
impl<T: Element> From<Vec<T>> for Field {
    fn from(elements: Vec<T>) -> Field {
        let mut bytes = Vec::new();
        (T::TYPE as u32).put(&mut bytes);
        (elements.len() as u64).put(&mut bytes);
        elements.iter().for_each(|element| element.put(&mut bytes));
        Field { ty: ValueType::Array, bytes }
    }
}

/// A value of another file.
impl From<Value<'_>> for Field {
    fn from(value: Value<'_>) -> Field {
        match value {
            Value::U8(x) => x.into(),
            Value::I8(x) => x.into(),
            Value::U16(x) => x.into(),
            Value::I16(x) => x.into(),
            Value::U32(x) => x.into(),
            Value::I32(x) => x.into(),
            Value::U64(x) => x.into(),
            Value::I64(x) => x.into(),
            Value::F32(x) => x.into(),
            Value::F64(x) => x.into(),
            Value::Bool(x) => x.into(),
            Value::Str(x) => x.into(),
            Value::Array(x) => {
                let mut bytes = Vec::new();
                (x.elem() as u32).put(&mut bytes);
                (x.len() as u64).put(&mut bytes);
                bytes.extend_from_slice(x.bytes());
                Field { ty: ValueType::Array, bytes }
            }
        }
    }
}

/// What comes before the weights: metadata, and the table of tensors.
#[derive(Clone, Debug)]
pub struct Header {
    path: PathBuf,
    fields: IndexMap<String, Field>,
    tensors: IndexMap<String, Entry>,
    /// Bytes of all tensors so far, each filled up to the alignment.
    data: u64,
}

/// A tensor to be written.
#[derive(Clone, Debug)]
struct Entry {
    /// Outermost dimension first.
    shape: Vec<u64>,
    ty: TensorType,
    offset: u64,
    bytes: u64,
}

impl Header {
    /// A file without metadata and tensors that is to be written to `path`.
    pub fn new(path: impl AsRef<Path>) -> Header {
        let path = path.as_ref().to_owned();
        Header { path, fields: IndexMap::new(), tensors: IndexMap::new(), data: 0 }
    }

    /// Where the file is to be.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives `key` a value, in place of one that it had. Weights are always aligned to 32 bytes, so that
    /// `general.alignment` is left out.
    pub fn set(&mut self, key: impl Into<String>, value: impl Into<Field>) {
        let key = key.into();
        if key != ALIGNMENT {
            self.fields.insert(key, value.into());
        }
    }

    /// Whether `key` has a value.
    pub fn has(&self, key: &str) -> bool {
        self.fields.contains_key(key)
    }

    /// Appends a tensor; `shape` begins with the outermost dimension.
    ///
    /// # Errors
    /// [`Error::Tensor`] for a name that is longer than 63 bytes or there already, and for a shape that the format
    /// does not have: no dimension or more than four, a dimension of zero, rows that are not whole blocks.
    pub fn tensor(&mut self, name: &str, shape: &[usize], ty: TensorType) -> Result<(), Error> {
        let error = |what: String| Error::tensor(&self.path, name, what);
        if name.is_empty() || name.len() >= MAX_NAME {
            return Err(error(format!("the name has {} bytes, GGUF takes 1 to {}", name.len(), MAX_NAME - 1)));
        }
        if shape.is_empty() || shape.len() > 4 || shape.contains(&0) {
            return Err(error(format!("shape {shape:?}: GGUF takes one to four dimensions, none of them 0")));
        }
        let shape: Vec<u64> = shape.iter().map(|&n| n as u64).collect();
        let bytes = size(&shape, ty).map_err(error)?;
        let offset = self.data;
        let end = offset.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(DEFAULT_ALIGNMENT));
        let end = end.ok_or_else(|| error("the size of the file overflows".into()))?;
        if self.tensors.insert(name.to_owned(), Entry { shape, ty, offset, bytes }).is_some() {
            return Err(error("there are two tensors of this name".into()));
        }
        self.data = end;
        Ok(())
    }

    /// Name, type and bytes of the tensors, in the order in which they are written.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, TensorType, u64)> {
        self.tensors.iter().map(|(name, entry)| (name.as_str(), entry.ty, entry.bytes))
    }

    /// Shape of a tensor, outermost dimension first.
    pub fn shape(&self, name: &str) -> Option<&[u64]> {
        self.tensors.get(name).map(|entry| &entry.shape[..])
    }

    /// The header as it is in the file, up to where the weights begin.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        3u32.put(&mut out);
        (self.tensors.len() as u64).put(&mut out);
        (self.fields.len() as u64).put(&mut out);
        for (key, field) in &self.fields {
            key.put(&mut out);
            (field.ty as u32).put(&mut out);
            out.extend_from_slice(&field.bytes);
        }
        for (name, entry) in &self.tensors {
            name.put(&mut out);
            (entry.shape.len() as u32).put(&mut out);
            entry.shape.iter().rev().for_each(|n| n.put(&mut out));
            entry.ty.id().put(&mut out);
            entry.offset.put(&mut out);
        }
        out.resize(out.len().next_multiple_of(DEFAULT_ALIGNMENT as usize), 0);
        out
    }

    /// Begins the file. An existing one is left alone unless `replace`, and then until the new one is complete.
    ///
    /// # Errors
    /// [`Error::Write`] where there is a file already, or no file can be made.
    pub fn create(self, replace: bool) -> Result<Writer, Error> {
        let file = NewFile::create(&self.path, replace)?;
        let header = self.to_bytes();
        let total = header.len() as u64 + self.data;
        let out = BufWriter::with_capacity(1 << 20, file);
        let mut writer = Writer { header: self, out, next: 0, written: 0, total };
        writer.put(&header)?;
        Ok(writer)
    }
}

/// A file whose weights are being written.
pub struct Writer {
    header: Header,
    out: BufWriter<NewFile>,
    /// The tensor that the next bytes belong to.
    next: usize,
    /// Bytes of it that were written.
    written: u64,
    /// Bytes of the whole file.
    total: u64,
}

impl Writer {
    /// Writes the next bytes of the tensors, in the order of the table; what keeps them apart is added.
    ///
    /// # Errors
    /// [`Error::Write`] when the disk is full or the like, and [`Error::Tensor`] when a tensor gets more bytes than it
    /// has.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if bytes.is_empty() {
            return Ok(());
        }
        let Some((name, entry)) = self.header.tensors.get_index(self.next) else {
            return Err(self.error("there are more bytes than tensors".into()));
        };
        let (len, size) = (bytes.len() as u64, entry.bytes);
        if len > size - self.written {
            let what = format!("expected {size} bytes, found {} or more", self.written + len);
            return Err(Error::tensor(&self.header.path, name, what));
        }
        self.put(bytes)?;
        self.written += len;
        if self.written == size {
            (self.next, self.written) = (self.next + 1, 0);
            let fill = size.next_multiple_of(DEFAULT_ALIGNMENT) - size;
            self.put(&[0; DEFAULT_ALIGNMENT as usize][..fill as usize])?;
        }
        Ok(())
    }

    /// Puts the file in its place, and says how many bytes it has.
    ///
    /// # Errors
    /// [`Error::Tensor`] when bytes of a tensor are missing, and [`Error::Write`].
    pub fn finish(self) -> Result<u64, Error> {
        if let Some((name, entry)) = self.header.tensors.get_index(self.next) {
            let what = format!("expected {} bytes, found {}", entry.bytes, self.written);
            return Err(Error::tensor(&self.header.path, name, what));
        }
        let (path, total) = (self.header.path, self.total);
        let error = |e: &io::Error| Error::Write { path: path.clone(), what: with_size(e, total) };
        let file = self.out.into_inner().map_err(|e| error(e.error()))?;
        file.finish().map(|()| total)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.out.write_all(bytes).map_err(|e| self.error(with_size(&e, self.total)))
    }

    fn error(&self, what: String) -> Error {
        Error::Write { path: self.header.path.clone(), what }
    }
}

/// What the system says, and how much room a file takes that has too little.
fn with_size(e: &io::Error, total: u64) -> String {
    match e.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            format!("{} (the file has {total} bytes in all)", reason(e))
        }
        _ => reason(e),
    }
}
