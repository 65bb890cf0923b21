//! TQ2_0: 256 columns, ternary codes in 2 bits, one half-precision scale. Source: ggml's `block_tq2_0`.

use super::{bytes_at, each_block, f16_at};
use crate::dtype::{Arith, DType, Format, Group};

/// 64 bytes codes, 2 bytes `d`. The codes of group j (32 columns) are bits `2 * (j % 4)` of the bytes 0..32 for j < 4,
/// 32..64 after.
const BYTES: usize = 66;

/// The row in FORMATS.
pub static FORMAT: Format = Format {
    dtype: DType::TQ2_0,
    name: "TQ2_0",
    block_len: 256,
    block_bytes: BYTES,
    arith: Arith::Scale32,
    dequantize: |src, dst| each_block(src, dst, dequantize),
    quantize: None,
    unpack: Some(|src, dst| each_block(src, dst, unpack)),
    panel: None,
};

/// `w = d * (q - 1)`. A file may hold the code 3 (the weight 2d), though no quantizer writes it.
fn dequantize(block: &[u8; BYTES]) -> [f32; 256] {
    let d = f16_at(block, 64);
    std::array::from_fn(|i| {
        let q = block[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
        d * (f32::from(q) - 1.0)
    })
}

fn unpack(block: &[u8; BYTES]) -> [Group; 8] {
    let d = [f16_at(block, 64); 2];
    std::array::from_fn(|j| {
        let q = bytes_at(block, j / 4 * 32).map(|b| (b >> (j % 4 * 2) & 3) as i8 - 1);
        Group { q, d, ..Group::ZERO }
    })
}
