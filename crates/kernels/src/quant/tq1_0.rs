//! TQ1_0: 256 columns, ternary codes, five (or four) to a byte, one half-precision scale. Source: ggml's `block_tq1_0`.

use super::{bytes_at, each_block, f16_at, runs};
use crate::dtype::{Arith, DType, Format, Group};

/// 52 bytes codes, 2 bytes `d`. Bytes 0..32 hold five digits each: digit n of byte i is column 32n + i. Bytes 32..48
/// likewise: column 160 + 16n + i. Bytes 48..52 hold four digits each: column 240 + 4n + i.
const BYTES: usize = 54;

/// The row in FORMATS.
pub static FORMAT: Format = Format {
    dtype: DType::TQ1_0,
    name: "TQ1_0",
    block_len: 256,
    block_bytes: BYTES,
    arith: Arith::Scale32,
    dequantize: |src, dst| each_block(src, dst, dequantize),
    quantize: None,
    unpack: Some(|src, dst| each_block(src, dst, unpack)),
    panel: None,
};

/// Digit `n` of a byte, less 1: the byte is the fraction `0.t0 t1 t2..` in base 3, scaled to 256 and rounded up.
fn digit(byte: u8, n: usize) -> i8 {
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    ((u16::from(byte.wrapping_mul(POWERS[n])) * 3) >> 8) as i8 - 1
}

/// `w = d * (t - 1)`.
fn dequantize(block: &[u8; BYTES]) -> [f32; 256] {
    let d = f16_at(block, 52);
    std::array::from_fn(|i| {
        let t = match i {
            0..160 => digit(block[i % 32], i / 32),
            160..240 => digit(block[32 + i % 16], (i - 160) / 16),
            _ => digit(block[48 + i % 4], (i - 240) / 4),
        };
        d * f32::from(t)
    })
}

/// Codes of the `h`-th 16 columns.
fn half(block: &[u8; BYTES], h: usize) -> [i8; 16] {
    match h {
        0..10 => bytes_at(block, h % 2 * 16).map(|b| digit(b, h / 2)),
        10..15 => bytes_at(block, 32).map(|b| digit(b, h - 10)),
        _ => std::array::from_fn(|i| digit(block[48 + i % 4], i / 4)),
    }
}

fn unpack(block: &[u8; BYTES]) -> [Group; 8] {
    let d = [f16_at(block, 52); 2];
    std::array::from_fn(|j| Group { q: runs(|h| half(block, 2 * j + h)), d, ..Group::ZERO })
}
