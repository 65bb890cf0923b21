//! IQ4_XS: 256 columns, codes into the table of IQ4_NL, a 6-bit scale for 32 columns under one half-precision scale.
//! Source: ggml's `block_iq4_xs`.

use super::{bytes_at, each_block, f16_at, iq4_nl::VALUES, nibbles, u16_at};
use crate::dtype::{Arith, DType, Format, Group};

/// 2 bytes `d`, 2 bytes high bits and 4 bytes low bits of the scales, 128 bytes codes: 16 for a group of 32 columns
/// (its columns 0..16 in the low nibbles, 16..32 in the high ones).
const BYTES: usize = 136;

/// The row in FORMATS.
pub static FORMAT: Format = Format {
    dtype: DType::IQ4_XS,
    name: "IQ4_XS",
    block_len: 256,
    block_bytes: BYTES,
    arith: Arith::Scale32,
    dequantize: |src, dst| each_block(src, dst, dequantize),
    unpack: Some(|src, dst| each_block(src, dst, unpack)),
    panel: None,
};

/// Scale of the `j`-th group: nibble j of the low bits, bits 2j of the high ones, less 32.
fn scale(block: &[u8; BYTES], j: usize) -> i8 {
    let low = block[4 + j / 2] >> (j % 2 * 4) & 15;
    let high = (u16_at(block, 2) >> (2 * j) & 3) as u8;
    (low | high << 4) as i8 - 32
}

/// `w = d * sc * VALUES[q]`, with `sc` of the 32 columns.
fn dequantize(block: &[u8; BYTES]) -> [f32; 256] {
    let d = f16_at(block, 0);
    std::array::from_fn(|i| {
        let q = block[8 + i / 32 * 16 + i % 16] >> (i / 16 % 2 * 4) & 15;
        d * f32::from(scale(block, i / 32)) * f32::from(VALUES[usize::from(q)])
    })
}

fn unpack(block: &[u8; BYTES]) -> [Group; 8] {
    let d = f16_at(block, 0);
    std::array::from_fn(|j| {
        let q = nibbles(bytes_at(block, 8 + 16 * j), |q| VALUES[usize::from(q)]);
        Group { q, d: [d * f32::from(scale(block, j)); 2], ..Group::ZERO }
    })
}
