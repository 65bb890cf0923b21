//! Q2_K: 256 columns, 2-bit codes, a 4-bit scale and a 4-bit minimum for 16 columns under two half-precision scales.
//! Source: ggml's `block_q2_K`.

use super::{bytes_at, each_block, f16_at};
use crate::dtype::{Arith, DType, Format, Group};

/// 16 bytes scales (low nibble) and minima (high nibble), 64 bytes codes, 2 bytes `d`, 2 bytes `dmin`. The codes of
/// group j (32 columns) are bits `2 * (j % 4)` of the bytes 0..32 for j < 4, 32..64 after.
const BYTES: usize = 84;

/// The row in FORMATS.
pub static FORMAT: Format = Format {
    dtype: DType::Q2_K,
    name: "Q2_K",
    block_len: 256,
    block_bytes: BYTES,
    arith: Arith::Scale16Min,
    dequantize: |src, dst| each_block(src, dst, dequantize),
    unpack: Some(|src, dst| each_block(src, dst, unpack)),
    panel: None,
};

/// `w = d * sc * q - dmin * m`, with `sc` and `m` of the 16 columns.
fn dequantize(block: &[u8; BYTES]) -> [f32; 256] {
    let (d, dmin) = (f16_at(block, 80), f16_at(block, 82));
    std::array::from_fn(|i| {
        let (sc, m) = (block[i / 16] & 15, block[i / 16] >> 4);
        let q = block[16 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
        d * f32::from(sc) * f32::from(q) - dmin * f32::from(m)
    })
}

fn unpack(block: &[u8; BYTES]) -> [Group; 8] {
    let (d, dmin) = (f16_at(block, 80), f16_at(block, 82));
    std::array::from_fn(|j| {
        let halves = *bytes_at::<2>(block, 2 * j);
        Group {
            q: bytes_at(block, 16 + j / 4 * 32).map(|b| (b >> (j % 4 * 2) & 3) as i8),
            sub: halves.map(|b| i16::from(b & 15)),
            d: [d; 2],
            min: halves.map(|b| -(dmin * f32::from(b >> 4))),
        }
    })
}
