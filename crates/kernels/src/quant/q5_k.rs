//! Q5_K: Q4_K with a fifth bit a code. Source: ggml's `block_q5_K`.

use super::{bytes_at, each_block, f16_at, scale_min};
use crate::dtype::{Arith, DType, Format, Group};

/// 2 bytes `d`, 2 bytes `dmin`, 12 bytes scales and minima, 32 bytes fifth bits (bit j of byte i is column i of group
/// j), 128 bytes low bits: groups 2k and 2k + 1 are the low and the high nibbles of the bytes 32k..32k + 32.
const BYTES: usize = 176;

/// The row in FORMATS.
pub static FORMAT: Format = Format {
    dtype: DType::Q5_K,
    name: "Q5_K",
    block_len: 256,
    block_bytes: BYTES,
    arith: Arith::Scale32Min,
    dequantize: |src, dst| each_block(src, dst, dequantize),
    unpack: Some(|src, dst| each_block(src, dst, unpack)),
    panel: None,
};

/// `w = d * sc * q - dmin * m`, with `sc` and `m` of the 32 columns.
fn dequantize(block: &[u8; BYTES]) -> [f32; 256] {
    let (d, dmin, scales) = (f16_at(block, 0), f16_at(block, 2), bytes_at(block, 4));
    std::array::from_fn(|i| {
        let (sc, m) = scale_min(scales, i / 32);
        let low = block[48 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
        let high = block[16 + i % 32] >> (i / 32) & 1;
        d * f32::from(sc) * f32::from(low | high << 4) - dmin * f32::from(m)
    })
}

fn unpack(block: &[u8; BYTES]) -> [Group; 8] {
    let (d, dmin, scales) = (f16_at(block, 0), f16_at(block, 2), bytes_at(block, 4));
    let high = bytes_at::<32>(block, 16);
    std::array::from_fn(|j| {
        let (sc, m) = scale_min(scales, j);
        let mut q = bytes_at(block, 48 + j / 2 * 32).map(|b| (b >> (j % 2 * 4) & 15) as i8);
        for (q, h) in q.iter_mut().zip(high) {
            *q |= ((h >> j & 1) << 4) as i8;
        }
        Group { q, d: [d * f32::from(sc); 2], min: [-(dmin * f32::from(m)); 2], ..Group::ZERO }
    })
}
