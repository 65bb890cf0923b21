//! IQ3_S: 256 columns, runs of 4 from a grid of 512 with free signs, a 4-bit scale for 32 columns under one
//! half-precision scale. Source: ggml's `block_iq3_s`.

use super::iq_grids::IQ3_S as GRID;
use super::{each_block, f16_at, iq3_xxs::join, runs, signed};
use crate::dtype::{Arith, DType, Format, Group};

/// 2 bytes `d`; for runs of 4 columns 64 bytes low bits and 8 bytes ninth bits of the grid index; 32 bytes signs; 4
/// bytes scales (a nibble for 32 columns, low first).
const BYTES: usize = 110;

/// The row in FORMATS.
pub static FORMAT: Format = Format {
    dtype: DType::IQ3_S,
    name: "IQ3_S",
    block_len: 256,
    block_bytes: BYTES,
    arith: Arith::Scale32,
    dequantize: |src, dst| each_block(src, dst, dequantize),
    quantize: None,
    unpack: Some(|src, dst| each_block(src, dst, unpack)),
    panel: None,
};

/// Grid values of the `k`-th 4 columns.
fn run(block: &[u8; BYTES], k: usize) -> [i8; 4] {
    let high = usize::from(block[66 + k / 8] >> (k % 8) & 1);
    GRID[usize::from(block[2 + k]) | high << 8]
}

/// `2s + 1` of the `j`-th 32 columns.
fn scale(block: &[u8; BYTES], j: usize) -> u8 {
    2 * (block[106 + j / 2] >> (j % 2 * 4) & 15) + 1
}

/// `w = d * (2s + 1) * (+-grid)`, with `s` of the 32 columns.
fn dequantize(block: &[u8; BYTES]) -> [f32; 256] {
    let d = f16_at(block, 0);
    std::array::from_fn(|i| {
        let sign = if block[74 + i / 8] >> (i % 8) & 1 == 1 { -1.0 } else { 1.0 };
        d * f32::from(scale(block, i / 32)) * f32::from(run(block, i / 4)[i % 4]) * sign
    })
}

fn unpack(block: &[u8; BYTES]) -> [Group; 8] {
    let d = f16_at(block, 0);
    std::array::from_fn(|j| {
        let q = runs(|l| {
            let k = 4 * j + l;
            signed(join(run(block, 2 * k), run(block, 2 * k + 1)), block[74 + k])
        });
        Group { q, d: [d * f32::from(scale(block, j)); 2], ..Group::ZERO }
    })
}
