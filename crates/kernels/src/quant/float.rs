//! F32, F16 and BF16: no blocks, no codes.

use crate::dtype::{Arith, DType, Format};
use half::{bf16, f16};

/// IEEE single precision.
pub static F32: Format = Format {
    dtype: DType::F32,
    name: "F32",
    block_len: 1,
    block_bytes: 4,
    arith: Arith::Float,
    dequantize: |src, dst| {
        for (s, d) in src.as_chunks().0.iter().zip(dst) {
            *d = f32::from_le_bytes(*s);
        }
    },
    quantize: Some(|src, dst| {
        for (x, d) in src.iter().zip(dst.as_chunks_mut().0) {
            *d = x.to_le_bytes();
        }
    }),
    unpack: None,
    panel: None,
};

/// IEEE half precision.
pub static F16: Format = Format {
    dtype: DType::F16,
    name: "F16",
    block_len: 1,
    block_bytes: 2,
    arith: Arith::Float,
    dequantize: |src, dst| {
        for (s, d) in src.as_chunks().0.iter().zip(dst) {
            *d = f16::from_le_bytes(*s).to_f32();
        }
    },
    quantize: Some(|src, dst| {
        for (x, d) in src.iter().zip(dst.as_chunks_mut().0) {
            *d = f16::from_f32(*x).to_le_bytes();
        }
    }),
    unpack: None,
    panel: None,
};

/// The upper half of a single-precision number.
pub static BF16: Format = Format {
    dtype: DType::BF16,
    name: "BF16",
    block_len: 1,
    block_bytes: 2,
    arith: Arith::Float,
    dequantize: |src, dst| {
        for (s, d) in src.as_chunks().0.iter().zip(dst) {
            *d = bf16::from_le_bytes(*s).to_f32();
        }
    },
    quantize: Some(|src, dst| {
        for (x, d) in src.iter().zip(dst.as_chunks_mut().0) {
            *d = bf16::from_f32(*x).to_le_bytes();
        }
    }),
    unpack: None,
    panel: None,
};
