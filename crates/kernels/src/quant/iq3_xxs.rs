//! IQ3_XXS: 256 columns, runs of 4 from a grid of 256, an even number of minuses in 8, a 4-bit scale for 32 columns
//! under one half-precision scale. Source: ggml's `block_iq3_xxs`.

use super::iq_grids::IQ3_XXS as GRID;
use super::{bytes_at, each_block, even_signs, f16_at, runs, signed, u32_at};
use crate::dtype::{Arith, DType, Format, Group};

/// 2 bytes `d`, 64 bytes grid indices of runs of 4 columns, then 32 bits for a group of 32 columns, of which the low 28
/// are four sign fields and the high 4 the scale.
const BYTES: usize = 98;

/// The row in FORMATS.
pub static FORMAT: Format = Format {
    dtype: DType::IQ3_XXS,
    name: "IQ3_XXS",
    block_len: 256,
    block_bytes: BYTES,
    arith: Arith::Scale32,
    dequantize: |src, dst| each_block(src, dst, dequantize),
    quantize: None,
    unpack: Some(|src, dst| each_block(src, dst, unpack)),
    panel: None,
};

/// `w = d * (0.5 + s) * 0.5 * (+-grid)`, with `s` of the 32 columns.
fn dequantize(block: &[u8; BYTES]) -> [f32; 256] {
    let d = f16_at(block, 0);
    std::array::from_fn(|i| {
        let packed = u32_at(block, 66 + i / 32 * 4);
        let g = GRID[usize::from(block[2 + i / 4])][i % 4];
        let sign = if even_signs(packed, i / 8 % 4) >> (i % 8) & 1 == 1 { -1.0 } else { 1.0 };
        d * (0.5 + (packed >> 28) as f32) * 0.5 * f32::from(g) * sign
    })
}

/// `d * (0.5 + s) * 0.5` is `d * (2s + 1) / 4`.
fn unpack(block: &[u8; BYTES]) -> [Group; 8] {
    let d = f16_at(block, 0) * 0.25;
    std::array::from_fn(|j| {
        let packed = u32_at(block, 66 + 4 * j);
        let q = runs(|l| {
            let [a, b] = bytes_at(block, 2 + 8 * j + 2 * l).map(|index| GRID[usize::from(index)]);
            signed(join(a, b), even_signs(packed, l))
        });
        Group { q, d: [d * (2 * (packed >> 28) + 1) as f32; 2], ..Group::ZERO }
    })
}

/// Two runs of 4 as one of 8.
pub(super) fn join(a: [i8; 4], b: [i8; 4]) -> [i8; 8] {
    let ([a0, a1, a2, a3], [b0, b1, b2, b3]) = (a, b);
    [a0, a1, a2, a3, b0, b1, b2, b3]
}
