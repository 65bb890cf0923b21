//! IQ2_XS: 256 columns, runs of 8 from a grid of 512 with an even number of minuses, a 4-bit scale for 16 columns under
//! one half-precision scale. Source: ggml's `block_iq2_xs`.

use super::iq_grids::IQ2_XS as GRID;
use super::{EVEN_SIGNS, each_block, f16_at, runs, signed, u16_at};
use crate::dtype::{Arith, DType, Format, Group};

/// 2 bytes `d`, 32 x 16 bits for runs of 8 columns (9 bits grid index, 7 bits signs), 8 bytes scales (a nibble for 16
/// columns, low first).
const BYTES: usize = 74;

/// The row in FORMATS.
pub static FORMAT: Format = Format {
    dtype: DType::IQ2_XS,
    name: "IQ2_XS",
    block_len: 256,
    block_bytes: BYTES,
    arith: Arith::Scale16,
    dequantize: |src, dst| each_block(src, dst, dequantize),
    quantize: None,
    unpack: Some(|src, dst| each_block(src, dst, unpack)),
    panel: None,
};

/// Grid values and signs of the `k`-th 8 columns.
fn run(block: &[u8; BYTES], k: usize) -> ([i8; 8], u8) {
    let packed = usize::from(u16_at(block, 2 + 2 * k));
    (GRID[packed & 511], EVEN_SIGNS[packed >> 9])
}

/// `w = d * (0.5 + s) * 0.25 * (+-grid)`, with `s` of the 16 columns.
fn dequantize(block: &[u8; BYTES]) -> [f32; 256] {
    let d = f16_at(block, 0);
    std::array::from_fn(|i| {
        let (grid, signs) = run(block, i / 8);
        let s = block[66 + i / 32] >> (i / 16 % 2 * 4) & 15;
        let sign = if signs >> (i % 8) & 1 == 1 { -1.0 } else { 1.0 };
        d * (0.5 + f32::from(s)) * 0.25 * f32::from(grid[i % 8]) * sign
    })
}

/// `d * (0.5 + s) * 0.25` is `d / 8 * (2s + 1)`.
fn unpack(block: &[u8; BYTES]) -> [Group; 8] {
    let d = [f16_at(block, 0) * 0.125; 2];
    std::array::from_fn(|j| {
        let q = runs(|l| {
            let (grid, signs) = run(block, 4 * j + l);
            signed(grid, signs)
        });
        let s = block[66 + j];
        Group { q, sub: [s & 15, s >> 4].map(|s| 2 * i16::from(s) + 1), d, ..Group::ZERO }
    })
}
