//! Elements of tensors that are not stored as they are multiplied with: FP8 with scales, and experts whose rows are
//! columns.
//!
//! FP8 is E4M3 of arXiv 2209.05433: a sign bit, four of exponent around 7, three of fraction; no infinities, and NaN
//! where all bits but the sign are set. A weight is its number times the scale of its block, rounded once to single
//! precision.

use super::names::{self, Entry};
use super::safetensors::{Container, FP8, Info};
use super::shards::Shards;
use crate::checkpoint::{Data, MakeRows, Place, Tensor};
use crate::error::Error;
use bytes::Bytes;
use puna_kernels::DType;
use std::ops::Range;
use std::sync::Arc;

/// A tensor, or an expert's part of one. `block`: rows and columns that share a scale of FP8 weights.
///
/// # Errors
/// [`Error::Tensor`] for types that are not weights, and for FP8 without scales or with scales of another shape;
/// [`Error::Truncated`].
pub fn read(shards: &Shards, entry: &Entry, block: [usize; 2]) -> Result<Tensor, Error> {
    let (name, located) = shards.tensors.get_index(entry.tensor).expect("names are made of the same tensors");
    let (info, file) = (&located.info, &shards.files[located.shard]);
    let error = |what: String| Error::tensor(&file.path, name, what);
    let (mut bytes, mut range) = file.data(info)?;
    if bytes.is_empty() {
        return Err(error(format!("expected elements, found none: shape {:?}", info.shape)));
    }
    let mut shape = &info.shape[..];
    if let (Some(part), [n, matrix @ ..]) = (&entry.part, &info.shape[..]) {
        let each = bytes.len() / n;
        bytes = bytes.slice(part.expert * each..(part.expert + 1) * each);
        range = range.start + part.expert * each..range.start + (part.expert + 1) * each;
        shape = matrix;
    }
    let cols = shape.last().copied().unwrap_or(1);
    let n_rows = shape.iter().rev().skip(1).product();
    let (dtype, elements) = match info.ty.name {
        "F32" => (DType::F32, Elements::Plain(4)),
        "F16" => (DType::F16, Elements::Plain(2)),
        "BF16" => (DType::BF16, Elements::Plain(2)),
        FP8 => (DType::F32, Elements::Fp8(scales(shards, entry, [n_rows, cols], block)?)),
        other => return Err(error(format!("type {other} is not supported; supported are F32, F16, BF16 and {FP8}"))),
    };
    let (rows, transposed) = match &entry.part {
        Some(part) => (part.start..part.start + part.rows, part.transposed),
        None => (0..n_rows, false),
    };
    let data = match elements {
        Elements::Plain(width) if !transposed => {
            let stored = rows.start * cols * width..rows.end * cols * width;
            range = range.start + stored.start..range.start + stored.end;
            Data::Stored(bytes.slice(stored))
        }
        _ if transposed => Data::Made(Arc::new(Transposed(Stored { bytes, cols, elements })), rows),
        _ => Data::Made(Arc::new(Stored { bytes, cols, elements }), rows),
    };
    Ok(Tensor { dtype, data, place: Some(Place { map: file.map.clone(), range }) })
}

/// The scales of an FP8 matrix, or of an expert's. `weight_scale_inv` multiplies too, in spite of its name.
fn scales(shards: &Shards, entry: &Entry, [rows, cols]: [usize; 2], block: [usize; 2]) -> Result<Scales, Error> {
    let tensor = |i: usize| {
        let (name, located) = shards.tensors.get_index(i)?;
        Some((name, &shards.files[located.shard], &located.info))
    };
    let (name, file, info): (&String, &Container, &Info) =
        tensor(entry.tensor).expect("names are made of the same tensors");
    let Some((scales, scales_file, scales_info)) = names::scales(shards, name).and_then(tensor) else {
        let what = format!("type {FP8} needs scales: there is no \"_scale_inv\" or \"_scale\" of this name");
        return Err(Error::tensor(&file.path, name, what));
    };
    let error = |what: String| Error::tensor(&scales_file.path, scales, what);
    let dtype = match scales_info.ty.name {
        "F32" => DType::F32,
        "F16" => DType::F16,
        "BF16" => DType::BF16,
        other => return Err(error(format!("scales of type {other} are not supported; expected F32, F16 or BF16"))),
    };
    let (mut bytes, _) = scales_file.data(scales_info)?;
    let mut shape = &scales_info.shape[..];
    if let (Some(part), [n, ..]) = (&entry.part, &info.shape[..]) {
        let [of, rest @ ..] = shape else { return Err(error(format!("expected scales of {n} experts, found one"))) };
        if of != n {
            return Err(error(format!("expected scales of {n} experts, found shape {shape:?}")));
        }
        let each = bytes.len() / n;
        (bytes, shape) = (bytes.slice(part.expert * each..(part.expert + 1) * each), rest);
    }
    let blocks = [rows.div_ceil(block[0]), cols.div_ceil(block[1])];
    let block = match *shape {
        [r, c] if [r, c] == blocks => block,
        [] | [1] | [1, 1] => [rows, cols],
        [r] | [r, 1] if r == rows => [1, cols],
        _ => {
            let what = format!(
                "shape {shape:?} does not fit a matrix of [{rows}, {cols}]: expected {blocks:?} (blocks of {block:?}), \
                 [{rows}] or one number"
            );
            return Err(error(what));
        }
    };
    let mut values = vec![0.0; shape.iter().product()];
    (dtype.format().dequantize)(&bytes, &mut values);
    Ok(Scales { values, block })
}

/// A matrix as it is stored.
pub struct Stored {
    /// One row after the other.
    pub bytes: Bytes,
    /// Length of a row.
    pub cols: usize,
    /// What the elements are.
    pub elements: Elements,
}

/// What elements are.
pub enum Elements {
    /// Numbers that are multiplied with as they are, of so many bytes.
    Plain(usize),
    /// FP8 with scales, which becomes single precision.
    Fp8(Scales),
}

/// Scales of an FP8 matrix, one a block.
pub struct Scales {
    /// `[ceil(rows / block[0]), ceil(cols / block[1])]`: blocks at the edges are cropped.
    pub values: Vec<f32>,
    /// Rows and columns of a block.
    pub block: [usize; 2],
}

impl Stored {
    /// Bytes of an element once it is made.
    fn width(&self) -> usize {
        match self.elements {
            Elements::Plain(bytes) => bytes,
            Elements::Fp8(_) => 4,
        }
    }

    fn n_rows(&self) -> usize {
        let width = if let Elements::Plain(bytes) = self.elements { bytes } else { 1 };
        self.bytes.len() / width / self.cols
    }

    /// Makes the elements `cols` of row `row` of the matrix that is stored as `bytes`.
    fn elements(&self, bytes: &[u8], row: usize, cols: Range<usize>, out: &mut [u8]) {
        let (start, end) = (row * self.cols + cols.start, row * self.cols + cols.end);
        match &self.elements {
            Elements::Plain(width) => out.copy_from_slice(&bytes[start * width..end * width]),
            Elements::Fp8(Scales { values, block: [block_rows, block_cols] }) => {
                let scales = &values[row / block_rows * self.cols.div_ceil(*block_cols)..];
                let (mut col, mut bytes, mut out) = (cols.start, &bytes[start..end], out);
                while !bytes.is_empty() {
                    let block = col / block_cols;
                    let n = bytes.len().min((block + 1) * block_cols - col);
                    let (these, rest) = bytes.split_at(n);
                    let (made, after) = out.split_at_mut(n * 4);
                    for (byte, made) in these.iter().zip(made.as_chunks_mut().0) {
                        *made = (E4M3[usize::from(*byte)] * scales[block]).to_le_bytes();
                    }
                    (col, bytes, out) = (col + n, rest, after);
                }
            }
        }
    }
}

impl MakeRows for Stored {
    fn row_bytes(&self) -> usize {
        self.cols * self.width()
    }

    fn stored(&self) -> &[u8] {
        &self.bytes
    }

    fn make(&self, stored: &[u8], range: Range<usize>, out: &mut [u8]) {
        for (row, out) in range.zip(out.chunks_exact_mut(self.row_bytes())) {
            self.elements(stored, row, 0..self.cols, out);
        }
    }
}

/// A matrix whose rows are the stored one's columns.
pub struct Transposed(pub Stored);

impl MakeRows for Transposed {
    fn row_bytes(&self) -> usize {
        self.0.n_rows() * self.0.width()
    }

    fn stored(&self) -> &[u8] {
        &self.0.bytes
    }

    fn make(&self, stored: &[u8], range: Range<usize>, out: &mut [u8]) {
        let (n, width, len) = (self.0.n_rows(), self.0.width(), range.len());
        if len == 0 {
            return;
        }
        // A few stored rows at a time, so that what is written lies close together.
        let mut some = vec![0; 16 * len * width];
        for first in (0..n).step_by(16) {
            let rows = some.chunks_exact_mut(len * width).zip(first..n);
            let count = rows.map(|(made, row)| self.0.elements(stored, row, range.clone(), made)).count();
            for (i, out) in out.chunks_exact_mut(n * width).enumerate() {
                for k in 0..count {
                    let element = &some[(k * len + i) * width..][..width];
                    out[(first + k) * width..][..width].copy_from_slice(element);
                }
            }
        }
    }
}

/// What each byte stands for.
static E4M3: [f32; 256] = e4m3();

const fn e4m3() -> [f32; 256] {
    let mut table = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (exponent, fraction) = ((byte >> 3) as u32 & 15, byte as u32 & 7);
        // Single precision has 127 where this has 7, and 23 bits of fraction where this has 3.
        let size = match exponent {
            0 => fraction as f32 / 512.0,
            15 if fraction == 7 => f32::NAN,
            _ => f32::from_bits((exponent + 120) << 23 | fraction << 20),
        };
        table[byte] = if byte < 128 { size } else { -size };
        byte += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bytes_of_fp8() {
        for byte in 0..=255u8 {
            let x = E4M3[usize::from(byte)];
            if byte & 0x7f == 0x7f {
                assert!(x.is_nan(), "{byte:#x}");
                continue;
            }
            let (exponent, fraction) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
            let size = match exponent {
                0 => fraction / 8.0 * 2f64.powi(-6),
                e => (1.0 + fraction / 8.0) * 2f64.powi(e - 7),
            };
            let expected = if byte < 128 { size } else { -size };
            assert_eq!(f64::from(x).to_bits(), expected.to_bits(), "{byte:#x}");
        }
        assert_eq!(E4M3[0x7e], 448.0);
    }

    /// Every element as its definition says.
    fn element(m: &Stored, row: usize, col: usize) -> Vec<u8> {
        let i = row * m.cols + col;
        match &m.elements {
            Elements::Plain(width) => m.bytes[i * width..(i + 1) * width].to_vec(),
            Elements::Fp8(Scales { values, block }) => {
                let scale = values[row / block[0] * m.cols.div_ceil(block[1]) + col / block[1]];
                (E4M3[usize::from(m.bytes[i])] * scale).to_le_bytes().to_vec()
            }
        }
    }

    #[test]
    fn rows_and_columns_of_any_range() {
        let (rows, cols) = (37usize, 23usize);
        let bytes: Vec<u8> = (0..rows * cols * 4).map(|i| (i * 7 + i / 11) as u8 & 0x6f).collect();
        let fp8 = |block: [usize; 2]| {
            let n = rows.div_ceil(block[0]) * cols.div_ceil(block[1]);
            Elements::Fp8(Scales { values: (0..n).map(|i| 1.0 + i as f32 / 3.0).collect(), block })
        };
        let kinds = [Elements::Plain(2), Elements::Plain(4), fp8([5, 4]), fp8([1, cols]), fp8([64, 64])];
        for elements in kinds {
            let width = if let Elements::Plain(width) = elements { width } else { 1 };
            let stored = Stored { bytes: Bytes::copy_from_slice(&bytes[..rows * cols * width]), cols, elements };
            for range in [0..rows, 3..4, 17..37, 5..5] {
                let expected: Vec<u8> = range
                    .clone()
                    .flat_map(|r| (0..cols).flat_map(move |c| [(r, c)]))
                    .flat_map(|(r, c)| element(&stored, r, c))
                    .collect();
                assert_eq!(MakeRows::rows(&stored, range), expected);
            }
            let stored = Transposed(stored);
            for range in [0..cols, 3..4, 11..23, 5..5] {
                let places = range.clone().flat_map(|c| (0..rows).map(move |r| (r, c)));
                let expected: Vec<u8> = places.flat_map(|(r, c)| element(&stored.0, r, c)).collect();
                assert_eq!(MakeRows::rows(&stored, range), expected);
            }
        }
    }
}
