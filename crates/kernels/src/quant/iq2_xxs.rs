//! IQ2_XXS: 256 columns, runs of 8 from a grid of 256 with an even number of minuses, a 4-bit scale for 32 columns
//! under one half-precision scale. Source: ggml's `block_iq2_xxs`.

use super::iq_grids::IQ2_XXS as GRID;
use super::{each_block, even_signs, f16_at, runs, signed, u32_at};
use crate::dtype::{Arith, DType, Format, Group};

/// 2 bytes `d`, then 8 bytes for a group of 32 columns: 4 grid indices, and 32 bits of which the low 28 are four sign
/// fields and the high 4 the scale.
const BYTES: usize = 66;

/// The row in FORMATS.
pub static FORMAT: Format = Format {
    dtype: DType::IQ2_XXS,
    name: "IQ2_XXS",
    block_len: 256,
    block_bytes: BYTES,
    arith: Arith::Scale32,
    dequantize: |src, dst| each_block(src, dst, dequantize),
    quantize: None,
    unpack: Some(|src, dst| each_block(src, dst, unpack)),
    panel: None,
};

/// `w = d * (0.5 + s) * 0.25 * (+-grid)`, with `s` of the 32 columns.
fn dequantize(block: &[u8; BYTES]) -> [f32; 256] {
    let d = f16_at(block, 0);
    std::array::from_fn(|i| {
        let (j, l) = (i / 32, i / 8 % 4);
        let packed = u32_at(block, 6 + 8 * j);
        let g = GRID[usize::from(block[2 + 8 * j + l])][i % 8];
        let sign = if even_signs(packed, l) >> (i % 8) & 1 == 1 { -1.0 } else { 1.0 };
        d * (0.5 + (packed >> 28) as f32) * 0.25 * f32::from(g) * sign
    })
}

/// `d * (0.5 + s) * 0.25` is `d * (2s + 1) / 8`.
fn unpack(block: &[u8; BYTES]) -> [Group; 8] {
    let d = f16_at(block, 0) * 0.125;
    std::array::from_fn(|j| {
        let packed = u32_at(block, 6 + 8 * j);
        let q = runs(|l| signed(GRID[usize::from(block[2 + 8 * j + l])], even_signs(packed, l)));
        Group { q, d: [d * (2 * (packed >> 28) + 1) as f32; 2], ..Group::ZERO }
    })
}
