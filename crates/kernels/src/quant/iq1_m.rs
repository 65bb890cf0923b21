//! IQ1_M: the grid of IQ1_S with a shift for 8 columns, a 3-bit scale for 16 columns under one half-precision scale.
//! Source: ggml's `block_iq1_m`.

use super::iq_grids::IQ1 as GRID;
use super::{each_block, runs, u16_at};
use crate::dtype::{Arith, DType, Format, Group};
use half::f16;

/// For runs of 8 columns 32 bytes low bits of the grid index and 16 bytes nibbles (3 high bits of the index, 1 bit that
/// says the shift is down; low nibble first); 4 x 16 bits with four 3-bit scales of 16 columns each, and in their high
/// 4 bits, lowest first, the half-precision `d`.
const BYTES: usize = 56;

/// The row in FORMATS.
pub static FORMAT: Format = Format {
    dtype: DType::IQ1_M,
    name: "IQ1_M",
    block_len: 256,
    block_bytes: BYTES,
    arith: Arith::Scale16,
    dequantize: |src, dst| each_block(src, dst, dequantize),
    quantize: None,
    unpack: Some(|src, dst| each_block(src, dst, unpack)),
    panel: None,
};

fn d(block: &[u8; BYTES]) -> f32 {
    let bits = (0..4).fold(0, |bits, k| bits | u16_at(block, 48 + 2 * k) >> 12 << (4 * k));
    f16::from_bits(bits).to_f32()
}

/// `2s + 1` of the `k`-th 16 columns.
fn scale(block: &[u8; BYTES], k: usize) -> i16 {
    2 * (u16_at(block, 48 + k / 4 * 2) >> (k % 4 * 3) & 7) as i16 + 1
}

/// Grid values of the `k`-th 8 columns, and whether they are shifted down.
fn run(block: &[u8; BYTES], k: usize) -> ([i8; 8], bool) {
    let nibble = block[32 + k / 2] >> (k % 2 * 4);
    (GRID[usize::from(block[k]) | usize::from(nibble & 7) << 8], nibble & 8 != 0)
}

/// `w = d * (2s + 1) * (grid +- 1/8)`, with `s` of the 16 columns and the sign of the 8 columns.
fn dequantize(block: &[u8; BYTES]) -> [f32; 256] {
    let d = d(block);
    std::array::from_fn(|i| {
        let (grid, down) = run(block, i / 8);
        let shift = if down { -0.125 } else { 0.125 };
        d * f32::from(scale(block, i / 16)) * (f32::from(grid[i % 8]) + shift)
    })
}

/// `d * (grid +- 1/8)` is `d / 8 * (8 * grid +- 1)`.
fn unpack(block: &[u8; BYTES]) -> [Group; 8] {
    let d = [d(block) * 0.125; 2];
    std::array::from_fn(|j| {
        let q = runs(|l| {
            let (grid, down) = run(block, 4 * j + l);
            let shift = 1 - 2 * i8::from(down);
            grid.map(|g| 8 * g + shift)
        });
        Group { q, sub: [2 * j, 2 * j + 1].map(|k| scale(block, k)), d, ..Group::ZERO }
    })
}
