//! NVFP4: 64 columns, an 8-bit float (E4M3) as scale for 16, 4-bit floats (E2M1). Source: ggml's `block_nvfp4`.

use super::{bytes_at, each_block, mxfp4::VALUES, runs};
use crate::dtype::{Arith, DType, Format, Group};

/// 4 bytes scales, then 8 bytes codes for each 16 columns (columns 0..8 in the low nibbles, 8..16 in the high ones).
const BYTES: usize = 36;

/// Half of what each scale byte stands for: 4 bits exponent of bias 7, 3 bits mantissa, the sign ignored. 0x7f (NaN in
/// E4M3) is 0 and 0xff is 240, as in ggml's `ggml_ue4m3_to_fp32`.
static HALF_SCALES: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (exponent, mantissa) = (byte as u32 >> 3 & 15, byte & 7);
        table[byte] = match exponent {
            _ if byte == 0x7f => 0.0,
            0 => mantissa as f32 / 1024.0,
            _ => (8 + mantissa) as f32 * (1 << exponent) as f32 / 2048.0,
        };
        byte += 1;
    }
    table
};

/// The row in FORMATS.
pub static FORMAT: Format = Format {
    dtype: DType::NVFP4,
    name: "NVFP4",
    block_len: 64,
    block_bytes: BYTES,
    arith: Arith::Float16,
    dequantize: |src, dst| each_block(src, dst, dequantize),
    quantize: None,
    unpack: Some(|src, dst| each_block(src, dst, unpack)),
    panel: None,
};

/// `w = HALF_SCALES[s] * VALUES[q]`, with `s` of the 16 columns.
fn dequantize(block: &[u8; BYTES]) -> [f32; 64] {
    std::array::from_fn(|i| {
        let q = block[4 + i / 16 * 8 + i % 8] >> (i / 8 % 2 * 4) & 15;
        HALF_SCALES[usize::from(block[i / 16])] * f32::from(VALUES[usize::from(q)])
    })
}

/// Codes of the `h`-th 16 columns.
fn half(block: &[u8; BYTES], h: usize) -> [i8; 16] {
    let bytes = bytes_at::<8>(block, 4 + 8 * h);
    std::array::from_fn(|i| VALUES[usize::from(bytes[i % 8] >> (i / 8 * 4) & 15)])
}

fn unpack(block: &[u8; BYTES]) -> [Group; 2] {
    std::array::from_fn(|j| Group {
        q: runs(|h| half(block, 2 * j + h)),
        d: bytes_at(block, 2 * j).map(|s| HALF_SCALES[usize::from(s)]),
        ..Group::ZERO
    })
}
