//! The tensor table of a file.

use std::{
    fmt::{self, Display},
    ops::Range,
    sync::Arc,
};

use indexmap::IndexMap;
use puna_kernels::DType;

use super::cursor::{Cursor, What};
use crate::error::escape;

/// Longest tensor name in bytes. The format allows 64; ggml takes 63.
pub(super) const MAX_NAME: usize = 64;

/// Most tensors in a file. The largest known models of one tensor an expert have under 80,000; the limit bounds the
/// memory a hostile file can take.
const MAX_TENSORS: usize = 1 << 18;

/// Bytes of a table entry, at least: name length, a name of one byte, dimension count, one dimension, type, offset.
pub(super) const MIN_ENTRY: u64 = 8 + 1 + 4 + 8 + 4 + 8;

/// What the elements of a tensor are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorType {
    /// A format that weights can have.
    Weight(DType),
    /// A type that GGUF knows and that cannot be multiplied with.
    Other(&'static OtherType),
}

/// A type of GGUF that is no weight format here.
#[derive(Debug, PartialEq, Eq)]
pub struct OtherType {
    /// Its number in the file.
    pub id: u32,
    /// Its name in GGUF tools.
    pub name: &'static str,
    /// Elements in a block.
    pub block_len: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
}

const fn other(id: u32, name: &'static str, block_len: u64, block_bytes: u64) -> OtherType {
    OtherType { id, name, block_len, block_bytes }
}

/// Integers, f64, the activation formats of ggml, and a format newer than this reader. Sizes are those of ggml.h.
static OTHER: [OtherType; 8] = [
    other(9, "Q8_1", 32, 36),
    other(15, "Q8_K", 256, 292),
    other(24, "I8", 1, 1),
    other(25, "I16", 1, 2),
    other(26, "I32", 1, 4),
    other(27, "I64", 1, 8),
    other(28, "F64", 1, 8),
    other(41, "Q1_0", 128, 18),
];

/// Types that GGUF once had.
const REMOVED: [(u32, &str); 8] = [
    (4, "Q4_2"),
    (5, "Q4_3"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (36, "IQ4_NL_4_4"),
    (37, "IQ4_NL_4_8"),
    (38, "IQ4_NL_8_8"),
];

impl TensorType {
    fn from_id(id: u32) -> Result<TensorType, What> {
        if let Some(dtype) = DType::from_ggml(id) {
            return Ok(TensorType::Weight(dtype));
        }
        if let Some(other) = OTHER.iter().find(|t| t.id == id) {
            return Ok(TensorType::Other(other));
        }
        match REMOVED.iter().find(|t| t.0 == id) {
            Some((_, name)) => Err(format!("type {id} ({name}) was removed from the format")),
            None => Err(format!("unknown tensor type {id}")),
        }
    }

    /// Its number in the file.
    pub fn id(self) -> u32 {
        match self {
            TensorType::Weight(dtype) => dtype as u32,
            TensorType::Other(t) => t.id,
        }
    }

    /// Elements and bytes of a block; plain types have blocks of one.
    pub fn block(self) -> (u64, u64) {
        match self {
            TensorType::Weight(dtype) => (dtype.format().block_len as u64, dtype.format().block_bytes as u64),
            TensorType::Other(t) => (t.block_len, t.block_bytes),
        }
    }

    /// Its name in GGUF tools.
    pub fn name(self) -> &'static str {
        match self {
            TensorType::Weight(dtype) => dtype.name(),
            TensorType::Other(t) => t.name,
        }
    }
}

impl Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One tensor of the table. Its bytes come from [`Gguf::data`](super::Gguf::data).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name, e.g. `blk.0.attn_q.weight`.
    pub name: Arc<str>,
    /// One to four dimensions, none zero, outermost first: `[rows, cols]` of a matrix, `[experts, rows, cols]` of
    /// merged experts. GGUF writes them the other way round. The product fits a usize.
    pub shape: Vec<u64>,
    /// The type of its elements.
    pub ty: TensorType,
    /// Which file of a split model it is in, counted from 0.
    pub shard: usize,
    /// Where its bytes begin in that file. They may lie behind the end of the file: see
    /// [`Gguf::problems`](super::Gguf::problems).
    pub offset: u64,
    /// How many bytes it has. `offset + bytes` does not overflow.
    pub bytes: u64,
}

impl TensorInfo {
    /// Length of a row: the innermost dimension.
    pub fn cols(&self) -> usize {
        self.shape.last().map_or(1, |&n| n as usize)
    }

    /// Number of rows, over all outer dimensions: 1 for a vector.
    pub fn rows(&self) -> usize {
        self.shape.iter().rev().skip(1).map(|&n| n as usize).product()
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.rows() * self.cols()
    }

    /// The end of its bytes in the file.
    pub(super) fn end(&self) -> u64 {
        self.offset.saturating_add(self.bytes)
    }

    /// Its bytes in the file, where the address space has room for them.
    pub(super) fn range(&self) -> Option<Range<usize>> {
        Some(usize::try_from(self.offset).ok()?..usize::try_from(self.end()).ok()?)
    }
}

/// Tensors by name, in the order of the file.
pub(super) type TensorTable = IndexMap<Arc<str>, TensorInfo>;

/// Reads the table of `count` tensors at `cur`. Offsets still count from the beginning of the data.
pub(super) fn read_table(cur: &mut Cursor<'_>, count: usize, shard: usize) -> Result<TensorTable, What> {
    if count > MAX_TENSORS {
        return Err(format!("tensor count {count}, at most {MAX_TENSORS} are read"));
    }
    let mut table = TensorTable::with_capacity(count);
    for i in 0..count {
        let name = read_name(cur).map_err(|what| format!("tensor {i} of {count}: {what}"))?;
        let tensor = read_rest(cur, name, shard).map_err(|what| format!("tensor \"{}\": {what}", escape(name)))?;
        if table.insert(tensor.name.clone(), tensor).is_some() {
            return Err(format!("duplicate tensor \"{}\"", escape(name)));
        }
    }
    Ok(table)
}

fn read_name<'a>(cur: &mut Cursor<'a>) -> Result<&'a str, What> {
    let name = cur.string("name")?;
    match std::str::from_utf8(name) {
        _ if name.len() > MAX_NAME => {
            Err(format!("name of {} bytes, at most {MAX_NAME} are allowed: \"{}\"", name.len(), escape(name)))
        }
        Ok("") => Err("the name is empty".into()),
        Ok(name) => Ok(name),
        Err(_) => Err(format!("the name is not UTF-8: \"{}\"", escape(name))),
    }
}

fn read_rest(cur: &mut Cursor<'_>, name: &str, shard: usize) -> Result<TensorInfo, What> {
    let dims = cur.u32("dimension count")?;
    if !(1..=4).contains(&dims) {
        return Err(format!("{dims} dimensions, expected 1 to 4"));
    }
    let mut shape = (0..dims).map(|_| cur.u64("dimension")).collect::<Result<Vec<_>, _>>()?;
    shape.reverse();
    if shape.contains(&0) {
        return Err(format!("a dimension of shape {shape:?} is zero"));
    }
    let ty = TensorType::from_id(cur.u32("type")?)?;
    let bytes = size(&shape, ty)?;
    let offset = cur.u64("offset")?;
    Ok(TensorInfo { name: name.into(), shape, ty, shard, offset, bytes })
}

/// Bytes of a tensor; checks that its elements can be counted and its rows are whole blocks.
pub(super) fn size(shape: &[u64], ty: TensorType) -> Result<u64, What> {
    let (block_len, block_bytes) = ty.block();
    let cols = shape.last().copied().unwrap_or(1);
    if cols % block_len != 0 {
        return Err(format!("row length {cols} is not a multiple of {ty}'s block length {block_len}"));
    }
    let elements = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d)).filter(|&n| usize::try_from(n).is_ok());
    elements
        .and_then(|n| (n / block_len).checked_mul(block_bytes))
        .ok_or_else(|| format!("the size of shape {shape:?} overflows"))
}
