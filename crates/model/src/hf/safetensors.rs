//! The safetensors container (<https://github.com/huggingface/safetensors>): eight bytes of header length,
//! little-endian, a JSON header, and the tensors' bytes, which the header's ranges cover exactly.
//!
//! A file is mapped and its header is read once. Every length, shape and range is checked before it is used.

use super::json;
use crate::error::{Error, escape};
use crate::gguf::lookalike;
use crate::map::Map;
use bytes::Bytes;
use indexmap::IndexMap;
use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Longest header, as the format's own reader has it.
const MAX_HEADER: u64 = 100_000_000;

/// Most tensors in a file: bounds the memory that a hostile header can take.
pub(super) const MAX_TENSORS: usize = 1 << 18;

/// Most dimensions of a tensor.
const MAX_DIMS: usize = 8;

/// A file, read up to its weights.
#[derive(Debug)]
pub struct Container {
    /// Where it is.
    pub path: PathBuf,
    /// Its bytes.
    pub map: Map,
    /// By name, in the order of the header.
    pub tensors: IndexMap<String, Info>,
    /// Bytes that the file should have; it is truncated where they are more than it has.
    whole: u64,
}

/// One tensor of the header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// The type of its elements.
    pub ty: &'static Type,
    /// Dimensions, outermost first; none for a single number. The product fits a usize.
    pub shape: Vec<usize>,
    /// Its bytes in the file, or behind its end where it is truncated.
    pub range: Range<u64>,
}

/// A type of elements.
#[derive(Debug, PartialEq, Eq)]
pub struct Type {
    /// Its name in the header.
    pub name: &'static str,
    /// Bits of an element.
    pub bits: u64,
}

const fn ty(name: &'static str, bits: u64) -> Type {
    Type { name, bits }
}

/// The type of FP8 weights that are read.
pub const FP8: &str = "F8_E4M3";

/// All types of the format.
static TYPES: &[Type] = &[
    ty("F32", 32),
    ty("F16", 16),
    ty("BF16", 16),
    ty(FP8, 8),
    ty("F8_E5M2", 8),
    ty("F8_E8M0", 8),
    ty("F8_E4M3FNUZ", 8),
    ty("F8_E5M2FNUZ", 8),
    ty("F6_E2M3", 6),
    ty("F6_E3M2", 6),
    ty("F4", 4),
    ty("BOOL", 8),
    ty("U8", 8),
    ty("I8", 8),
    ty("U16", 16),
    ty("I16", 16),
    ty("U32", 32),
    ty("I32", 32),
    ty("U64", 64),
    ty("I64", 64),
    ty("F64", 64),
    ty("C64", 64),
];

impl Container {
    /// Maps a file and reads its header.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Safetensors`] or [`Error::Tensor`]. A file that only ends too early opens: see
    /// [`Container::truncated`].
    pub fn open(path: &Path) -> Result<Container, Error> {
        Container::parse(path, Map::open(path)?)
    }

    /// Reads the header of the file in `map`; `path` is for messages.
    ///
    /// # Errors
    /// As [`Container::open`].
    pub fn parse(path: &Path, map: Map) -> Result<Container, Error> {
        let fault = |what| Error::Safetensors { path: path.to_owned(), what };
        let header = header(map.bytes()).map_err(fault)?;
        let header: Header = serde_json::from_str(header).map_err(|e| fault(format!("header: {}", json::words(&e))))?;
        let data = map.bytes().len() as u64 - header_end(map.bytes());
        let mut tensors = IndexMap::with_capacity(header.0.len());
        for (name, raw) in header.0 {
            let info = raw.check().map_err(|what| Error::tensor(path, &name, what))?;
            tensors.insert(name, info);
        }
        let used = covered(path, &tensors)?;
        if used < data {
            return Err(fault(format!("header: {} bytes at the end of the file belong to no tensor", data - used)));
        }
        let start = header_end(map.bytes());
        let whole = start.saturating_add(used);
        for info in tensors.values_mut() {
            info.range = start.saturating_add(info.range.start)..start.saturating_add(info.range.end);
        }
        Ok(Container { path: path.to_owned(), map, tensors, whole })
    }

    /// The error when the file ends before its tensors do.
    pub fn truncated(&self) -> Option<Error> {
        let found = self.map.len() as u64;
        (self.whole > found).then(|| {
            let what = format!("the header's data_offsets need {} bytes, found {found}", self.whole);
            Error::Truncated { path: self.path.clone(), what }
        })
    }

    /// The bytes of a tensor, a slice of the map.
    ///
    /// # Errors
    /// [`Error::Truncated`] when the file ends before they do.
    pub fn data(&self, info: &Info) -> Result<(Bytes, Range<usize>), Error> {
        if info.range.end > self.map.len() as u64 {
            let what = format!("a tensor ends at byte {}, the file has {}", info.range.end, self.map.len());
            return Err(Error::Truncated { path: self.path.clone(), what });
        }
        // Within the map, so within the address space.
        let range = info.range.start as usize..info.range.end as usize;
        Ok((self.map.bytes().slice(range.clone()), range))
    }
}

/// The end of the header, of a file that has one.
fn header_end(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |len| 8 + u64::from_le_bytes(*len))
}

/// The header's text.
fn header(bytes: &[u8]) -> Result<&str, String> {
    if bytes.is_empty() {
        return Err("header: the file is empty".into());
    }
    let what_else = || lookalike(bytes).map(|what| format!("header: the file is something else: {what}"));
    let Some((len, rest)) = bytes.split_first_chunk() else {
        let what = || format!("header: the file is too short: expected 8 bytes of length, found {}", bytes.len());
        return Err(what_else().unwrap_or_else(what));
    };
    let len = u64::from_le_bytes(*len);
    let max = MAX_HEADER.min(rest.len() as u64);
    if len == 0 || len > max {
        let what = || format!("header length: expected 1 to {max} (100 MB, or what the file has), found {len}");
        return Err(what_else().unwrap_or_else(what));
    }
    let text = std::str::from_utf8(&rest[..len as usize]).map_err(|e| format!("header: not UTF-8: {e}"))?;
    if !text.starts_with('{') {
        let what = || "header: expected a JSON object, which begins with {".to_owned();
        return Err(what_else().unwrap_or_else(what));
    }
    Ok(text)
}

/// Checks that the ranges cover the data from its beginning on, each byte once, and gives their end.
fn covered(path: &Path, tensors: &IndexMap<String, Info>) -> Result<u64, Error> {
    let mut by_offset: Vec<(&String, &Info)> = tensors.iter().collect();
    by_offset.sort_by_key(|(_, info)| (info.range.start, info.range.end));
    let mut end = 0;
    for (name, Info { range, .. }) in by_offset {
        if range.start != end {
            let what = if range.start < end { "they overlap" } else { "bytes before them belong to no tensor" };
            let what = format!("data_offsets begin at {}, expected {end}, where others end: {what}", range.start);
            return Err(Error::tensor(path, name, what));
        }
        end = range.end;
    }
    Ok(end)
}

/// Tensors by name, none twice.
struct Header(IndexMap<String, RawInfo>);

/// A tensor as the header has it.
#[derive(serde::Deserialize)]
struct RawInfo {
    dtype: String,
    #[serde(deserialize_with = "shape")]
    shape: Vec<u64>,
    #[serde(deserialize_with = "data_offsets")]
    data_offsets: Vec<u64>,
}

impl RawInfo {
    fn check(self) -> Result<Info, String> {
        let RawInfo { dtype, shape, data_offsets: offsets } = self;
        let ty = TYPES.iter().find(|t| t.name == dtype).ok_or_else(|| format!("unknown dtype {}", escape(&dtype)))?;
        let &[begin, end] = &offsets[..] else {
            return Err(format!("data_offsets: expected two numbers, found {}", offsets.len()));
        };
        if begin > end {
            return Err(format!("data_offsets: begin {begin} is behind end {end}"));
        }
        let elements = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d)).filter(|&n| usize::try_from(n).is_ok());
        let bits = elements.and_then(|n| n.checked_mul(ty.bits));
        let bits = bits.ok_or_else(|| format!("the size of shape {shape:?} of {dtype} overflows"))?;
        if bits % 8 != 0 || bits / 8 != end - begin {
            let (need, have) = (bits.div_ceil(8), end - begin);
            return Err(format!("shape {shape:?} of {dtype} has {need} bytes, data_offsets [{begin}, {end}] {have}"));
        }
        // A dimension can only be larger than an address where another one is zero.
        let shape = shape.into_iter().map(usize::try_from).collect::<Result<_, _>>();
        Ok(Info { ty, shape: shape.map_err(|_| "a dimension overflows".to_owned())?, range: begin..end })
    }
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Header, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a JSON object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Header, A::Error> {
                json::entries(map, "tensor", Some("__metadata__"), MAX_TENSORS).map(Header)
            }
        }
        d.deserialize_map(Entries)
    }
}

fn shape<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<u64>, D::Error> {
    d.deserialize_seq(Numbers(MAX_DIMS)).map_err(|e| de::Error::custom(format!("shape: {e}")))
}

fn data_offsets<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<u64>, D::Error> {
    d.deserialize_seq(Numbers(2)).map_err(|e| de::Error::custom(format!("data_offsets: {e}")))
}

/// At most so many numbers.
struct Numbers(usize);

impl<'de> Visitor<'de> for Numbers {
    type Value = Vec<u64>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "at most {} whole numbers from 0 on", self.0)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<u64>, A::Error> {
        let mut numbers = Vec::new();
        while let Some(n) = seq.next_element()? {
            if numbers.len() == self.0 {
                return Err(de::Error::invalid_length(self.0 + 1, &self));
            }
            numbers.push(n);
        }
        Ok(numbers)
    }
}
