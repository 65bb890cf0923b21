//! Writes GGUF files for tests, damaged ones too: every count, type and offset can be a lie.
#![allow(dead_code, clippy::unwrap_used)]

use std::fmt::Debug;

use puna_model::gguf::{self, Gguf, TensorType};

/// A metadata value: type number and bytes as in the file.
#[derive(Clone)]
pub struct Value {
    pub ty: u32,
    pub bytes: Vec<u8>,
}

macro_rules! scalars {
    ($($name:ident $ty:literal),*) => {$(
        pub fn $name(x: $name) -> Value {
            Value { ty: $ty, bytes: x.to_le_bytes().to_vec() }
        }
    )*};
}

scalars!(u8 0, i8 1, u16 2, i16 3, u32 4, i32 5, f32 6, u64 10, i64 11, f64 12);

pub fn bool(x: bool) -> Value {
    Value { ty: 7, bytes: vec![x.into()] }
}

pub fn string(x: impl AsRef<[u8]>) -> Value {
    let mut bytes = (x.as_ref().len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(x.as_ref());
    Value { ty: 8, bytes }
}

/// An array that says it has `len` elements of type `elem`.
pub fn raw_array(elem: u32, len: u64, elements: &[u8]) -> Value {
    let mut bytes = elem.to_le_bytes().to_vec();
    bytes.extend_from_slice(&len.to_le_bytes());
    bytes.extend_from_slice(elements);
    Value { ty: 9, bytes }
}

/// An array of elements of type `elem`, all made by the same function.
pub fn array(elem: u32, elements: &[Value]) -> Value {
    raw_array(elem, elements.len() as u64, &elements.iter().flat_map(|v| v.bytes.clone()).collect::<Vec<_>>())
}

pub fn strings<S: AsRef<[u8]>>(elements: &[S]) -> Value {
    array(8, &elements.iter().map(string).collect::<Vec<_>>())
}

/// A value as it was read, to be written again.
fn reread(value: gguf::Value) -> Value {
    use gguf::Value as V;
    match value {
        V::U8(x) => u8(x),
        V::I8(x) => i8(x),
        V::U16(x) => u16(x),
        V::I16(x) => i16(x),
        V::U32(x) => u32(x),
        V::I32(x) => i32(x),
        V::F32(x) => f32(x),
        V::Bool(x) => bool(x),
        V::Str(x) => string(x),
        V::Array(x) => array(x.elem() as _, &x.iter().map(reread).collect::<Vec<_>>()),
        V::U64(x) => u64(x),
        V::I64(x) => i64(x),
        V::F64(x) => f64(x),
    }
}

#[derive(Clone)]
pub struct Tensor {
    pub name: Vec<u8>,
    /// What the file says; the innermost dimension first.
    pub n_dims: u32,
    pub dims: Vec<u64>,
    pub ty: u32,
    pub offset: u64,
    pub data: Vec<u8>,
}

impl Tensor {
    /// Outermost dimension first.
    pub fn shape(&self) -> Vec<u64> {
        self.dims.iter().rev().copied().collect()
    }
}

/// A file to be. [`Builder::bytes`] writes what the fields say, true or not.
#[derive(Clone)]
pub struct Builder {
    pub version: u32,
    pub n_tensors: Option<u64>,
    pub n_keys: Option<u64>,
    pub keys: Vec<(Vec<u8>, Value)>,
    pub tensors: Vec<Tensor>,
    /// How data is laid out; writing the key is the caller's.
    pub alignment: usize,
}

impl Builder {
    pub fn new() -> Builder {
        Builder { version: 3, n_tensors: None, n_keys: None, keys: vec![], tensors: vec![], alignment: 32 }
    }

    pub fn key(mut self, key: impl AsRef<[u8]>, value: Value) -> Builder {
        self.keys.push((key.as_ref().to_vec(), value));
        self
    }

    /// A tensor behind those before it. `shape` is outermost first.
    pub fn tensor(mut self, name: impl AsRef<[u8]>, shape: &[u64], ty: u32, data: Vec<u8>) -> Builder {
        let end = self.tensors.last().map_or(0, |t| t.offset as usize + t.data.len());
        self.tensors.push(Tensor {
            name: name.as_ref().to_vec(),
            n_dims: shape.len() as u32,
            dims: shape.iter().rev().copied().collect(),
            ty,
            offset: end.next_multiple_of(self.alignment) as u64,
            data,
        });
        self
    }

    /// An F32 tensor whose values count up.
    pub fn f32(self, name: &str, shape: &[u64]) -> Builder {
        let n = shape.iter().product::<u64>();
        self.tensor(name, shape, 0, (0..n).flat_map(|i| (i as f32).to_le_bytes()).collect())
    }

    /// All that a file holds.
    pub fn read(file: &Gguf) -> Builder {
        let keys = file.meta().iter().fold(Builder::new(), |b, (key, value)| b.key(key, reread(value)));
        file.tensors().fold(keys, |b, t| {
            let ty = match t.ty {
                TensorType::Weight(dtype) => dtype as _,
                TensorType::Other(other) => other.id,
            };
            b.tensor(&*t.name, &t.shape, ty, file.data(t).unwrap().to_vec())
        })
    }

    /// The builder with another value of a key, or without it.
    pub fn with(mut self, key: impl AsRef<[u8]>, value: impl Into<Option<Value>>) -> Builder {
        self.keys.retain(|(k, _)| k != key.as_ref());
        match value.into() {
            Some(value) => self.key(key, value),
            None => self,
        }
    }

    /// The builder with the tensors that `change` makes of each; their offsets follow from their sizes.
    pub fn map(self, change: impl FnMut(Tensor) -> Vec<Tensor>) -> Builder {
        let rest = Builder { tensors: vec![], ..self.clone() };
        let tensors = self.tensors.into_iter().flat_map(change);
        tensors.fold(rest, |b, t| b.tensor(&t.name, &t.shape(), t.ty, t.data))
    }

    /// [`Builder::map`] of one tensor.
    pub fn edit(self, name: &str, change: impl FnOnce(Tensor) -> Vec<Tensor>) -> Builder {
        let mut change = Some(change);
        let edited = self.map(|t| if t.name == name.as_bytes() { change.take().unwrap()(t) } else { vec![t] });
        assert!(change.is_none(), "no tensor {name}");
        edited
    }

    pub fn without(self, name: &str) -> Builder {
        self.edit(name, |_| vec![])
    }

    /// The builder with a change to the last tensor.
    pub fn last(mut self, change: impl FnOnce(&mut Tensor)) -> Builder {
        change(self.tensors.last_mut().unwrap());
        self
    }

    pub fn header(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.n_tensors.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.n_keys.unwrap_or(self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            out.extend(string(key).bytes);
            out.extend(value.ty.to_le_bytes());
            out.extend(&value.bytes);
        }
        for t in &self.tensors {
            out.extend(string(&t.name).bytes);
            out.extend(t.n_dims.to_le_bytes());
            out.extend(t.dims.iter().flat_map(|d| d.to_le_bytes()));
            out.extend(t.ty.to_le_bytes());
            out.extend(t.offset.to_le_bytes());
        }
        out
    }

    /// The whole file; data lies one tensor behind the other whatever their offsets say, padded like the last one.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.header();
        for t in &self.tensors {
            out.resize(out.len().next_multiple_of(self.alignment), 0);
            out.extend(&t.data);
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out
    }
}

/// A valid file: all value types, tensors of three formats and of one to three dimensions.
pub fn base() -> Builder {
    Builder::new()
        .key("general.architecture", string("llama"))
        .key("a.u8", u8(200))
        .key("a.i8", i8(-100))
        .key("a.u16", u16(60_000))
        .key("a.i16", i16(-30_000))
        .key("a.u32", u32(4_000_000_000))
        .key("a.i32", i32(-2_000_000_000))
        .key("a.u64", u64(u64::MAX))
        .key("a.i64", i64(i64::MIN))
        .key("a.f32", f32(1e-5))
        .key("a.f64", f64(1e300))
        .key("a.bool", bool(true))
        .key("tokens", strings(&["a", "", "\u{120}t", "\n"]))
        .key("types", array(5, &[1, 1, 3, 6].map(i32)))
        .key("scores", array(6, &[0.0, -1.5].map(f32)))
        .key("flags", array(7, &[true, false].map(bool)))
        .f32("token_embd.weight", &[4, 8])
        .tensor("blk.0.attn_q.weight", &[2, 32], 2, vec![7; 36])
        .tensor("blk.0.ffn_up_exps.weight", &[2, 3, 2], 1, vec![1; 24])
        .f32("output_norm.weight", &[8])
}

/// `bytes` cut to its first `n`.
pub fn cut(bytes: &[u8], n: usize) -> Vec<u8> {
    bytes[..n].to_vec()
}

/// The one line of an error; fails when the result is good, or the message is not one clean line.
pub fn message<T: Debug, E: std::error::Error>(result: Result<T, E>, id: &str) -> String {
    let text = match result {
        Ok(x) => panic!("{id}: no error but {x:?}"),
        Err(e) => e.to_string(),
    };
    assert!(!text.chars().any(char::is_control), "{id}: {text:?} has control characters");
    assert!(text.len() < 600, "{id}: {text}");
    text
}
