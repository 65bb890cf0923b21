//! Q3_K: 256 columns, 3-bit codes around 4, a 6-bit scale for 16 columns under one half-precision scale.
//! Source: ggml's `block_q3_K`.

use super::{bytes_at, each_block, f16_at};
use crate::dtype::{Arith, DType, Format, Group};

/// 32 bytes third bits, 64 bytes low bits, 12 bytes scales, 2 bytes `d`. In group j (32 columns) column i has the
/// third bit j of byte i, and the low bits `2 * (j % 4)` of byte i (j < 4) or 32 + i.
const BYTES: usize = 110;

/// The row in FORMATS.
pub static FORMAT: Format = Format {
    dtype: DType::Q3_K,
    name: "Q3_K",
    block_len: 256,
    block_bytes: BYTES,
    arith: Arith::Scale16,
    dequantize: |src, dst| each_block(src, dst, dequantize),
    unpack: Some(|src, dst| each_block(src, dst, unpack)),
    panel: None,
};

/// Scale of the `k`-th 16 columns: low 4 bits in the nibbles of bytes 0..8, high 2 bits in bytes 8..12, less 32.
fn scale(packed: &[u8; 12], k: usize) -> i8 {
    let low = packed[k % 8] >> (k / 8 * 4) & 15;
    let high = packed[8 + k % 4] >> (k / 4 * 2) & 3;
    (low | high << 4) as i8 - 32
}

/// `w = d * sc * (q - 4)`, with `sc` of the 16 columns.
fn dequantize(block: &[u8; BYTES]) -> [f32; 256] {
    let (d, scales) = (f16_at(block, 108), bytes_at(block, 96));
    std::array::from_fn(|i| {
        let low = block[32 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
        let high = block[i % 32] >> (i / 32) & 1;
        d * f32::from(scale(scales, i / 16)) * (f32::from(low | high << 2) - 4.0)
    })
}

fn unpack(block: &[u8; BYTES]) -> [Group; 8] {
    let (d, scales, high) = (f16_at(block, 108), bytes_at(block, 96), bytes_at::<32>(block, 0));
    std::array::from_fn(|j| {
        let mut q = bytes_at(block, 32 + j / 4 * 32).map(|b| (b >> (j % 4 * 2) & 3) as i8 - 4);
        for (q, h) in q.iter_mut().zip(high) {
            *q += ((h >> j & 1) << 2) as i8;
        }
        Group { q, sub: [2 * j, 2 * j + 1].map(|k| scale(scales, k).into()), d: [d; 2], ..Group::ZERO }
    })
}
