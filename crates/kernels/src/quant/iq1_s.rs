//! IQ1_S: 256 columns, runs of 8 ternary values from a grid of 2048, shifted by an eighth up or down, a 3-bit scale for
//! 32 columns under one half-precision scale. Source: ggml's `block_iq1_s`.

use super::iq_grids::IQ1 as GRID;
use super::{each_block, f16_at, runs, u16_at};
use crate::dtype::{Arith, DType, Format, Group};

/// 2 bytes `d`, 32 bytes low bits of the grid index of runs of 8 columns, then 16 bits for a group of 32 columns: four
/// times 3 high bits of the index, 3 bits scale, 1 bit that says the shift is down.
const BYTES: usize = 50;

/// The row in FORMATS.
pub static FORMAT: Format = Format {
    dtype: DType::IQ1_S,
    name: "IQ1_S",
    block_len: 256,
    block_bytes: BYTES,
    arith: Arith::Scale32,
    dequantize: |src, dst| each_block(src, dst, dequantize),
    quantize: None,
    unpack: Some(|src, dst| each_block(src, dst, unpack)),
    panel: None,
};

/// Grid values of the `l`-th 8 columns of group `j`, whose 16 bits are `high`.
fn run(block: &[u8; BYTES], high: u16, j: usize, l: usize) -> [i8; 8] {
    GRID[usize::from(block[2 + 4 * j + l]) | usize::from(high >> (3 * l) & 7) << 8]
}

/// `w = d * (2s + 1) * (grid +- 1/8)`, with `s` and the sign of the 32 columns.
fn dequantize(block: &[u8; BYTES]) -> [f32; 256] {
    let d = f16_at(block, 0);
    std::array::from_fn(|i| {
        let high = u16_at(block, 34 + i / 32 * 2);
        let shift = if high >> 15 == 1 { -0.125 } else { 0.125 };
        let g = run(block, high, i / 32, i / 8 % 4)[i % 8];
        d * f32::from(2 * (high >> 12 & 7) + 1) * (f32::from(g) + shift)
    })
}

/// `d * (grid +- 1/8)` is `d / 8 * (8 * grid +- 1)`.
fn unpack(block: &[u8; BYTES]) -> [Group; 8] {
    let d = f16_at(block, 0) * 0.125;
    std::array::from_fn(|j| {
        let high = u16_at(block, 34 + 2 * j);
        let shift = 1 - 2 * (high >> 15) as i8;
        let q = runs(|l| run(block, high, j, l)).map(|g| 8 * g + shift);
        Group { q, d: [d * f32::from(2 * (high >> 12 & 7) + 1); 2], ..Group::ZERO }
    })
}
