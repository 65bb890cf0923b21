//! Weight formats: one row a format in [`FORMATS`]. A format lives in one file under `quant/`.

use crate::linear::PanelFormat;
use crate::quant;

/// A weight format, named as GGUF names it. The discriminant is GGUF's tensor type number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[allow(missing_docs, non_camel_case_types)]
pub enum DType {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    IQ2_XXS = 16,
    IQ2_XS = 17,
    IQ3_XXS = 18,
    IQ1_S = 19,
    IQ4_NL = 20,
    IQ3_S = 21,
    IQ2_S = 22,
    IQ4_XS = 23,
    IQ1_M = 29,
    BF16 = 30,
    TQ1_0 = 34,
    TQ2_0 = 35,
    MXFP4 = 39,
    NVFP4 = 40,
}

/// 32 consecutive columns of one weight row, as the integer kernels see them:
/// `w[i] = d[i / 16] * sub[i / 16] * q[i] + min[i / 16]`.
///
/// `d * sub` of a half is exact in f32 for every format, and `|sum of sub * q * a|` over a group stays below 2^24
/// for any activations `|a| <= 127`, so an integer sum converts to f32 without rounding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Group {
    /// Signed codes.
    pub q: [i8; 32],
    /// Integer scales of the two halves; both 1 where a format has one scale for 32 columns.
    pub sub: [i16; 2],
    /// Float scales of the two halves; equal except for NVFP4.
    pub d: [f32; 2],
    /// What is added to every weight of a half (zero where a format has no minimum).
    pub min: [f32; 2],
}

impl Group {
    /// The group whose weights are all zero.
    pub const ZERO: Group = Group { q: [0; 32], sub: [1; 2], d: [0.0; 2], min: [0.0; 2] };

    /// The weights themselves, for tests and the reference: the same expression for every format.
    pub fn dequantize(&self) -> [f32; 32] {
        std::array::from_fn(|i| {
            let h = i / 16;
            self.d[h] * (i32::from(self.sub[h]) * i32::from(self.q[i])) as f32 + self.min[h]
        })
    }
}

/// How a format's groups enter a dot product; docs/numerics.md writes out the order of the steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arith {
    /// F32, F16, BF16: one multiply-add a column, activations as they are.
    Float,
    /// One scale for 32 columns.
    Scale32,
    /// One scale and one minimum for 32 columns.
    Scale32Min,
    /// Integer scales for 16 columns under one float scale.
    Scale16,
    /// Integer scales and minima for 16 columns.
    Scale16Min,
    /// A float scale for 16 columns.
    Float16,
}

impl Arith {
    /// Whether activations are quantized before they meet this format.
    pub fn is_integer(self) -> bool {
        self != Arith::Float
    }
}

/// Whole blocks to numbers.
pub type Dequantize = fn(&[u8], &mut [f32]);
/// Numbers to whole blocks.
pub type Quantize = fn(&[f32], &mut [u8]);
/// Whole blocks to groups of 32 columns.
pub type Unpack = fn(&[u8], &mut [Group]);

/// One row of [`FORMATS`].
pub struct Format {
    /// The format.
    pub dtype: DType,
    /// Its name in GGUF tools, e.g. `Q4_K`.
    pub name: &'static str,
    /// Columns in a block.
    pub block_len: usize,
    /// Bytes of a block.
    pub block_bytes: usize,
    /// How it enters a dot product.
    pub arith: Arith,
    /// Whole blocks to f32: `src.len() / block_bytes * block_len == dst.len()`.
    pub dequantize: Dequantize,
    /// The best blocks for f32s, the inverse of `dequantize`; `None` for formats that puna only reads.
    pub quantize: Option<Quantize>,
    /// Whole blocks to groups of 32 columns; `None` for float formats.
    pub unpack: Option<Unpack>,
    /// How it is packed; `None` where kernels read the stored blocks.
    pub panel: Option<&'static PanelFormat>,
}

/// Every format puna reads.
pub static FORMATS: &[&Format] = &[
    &quant::float::F32,
    &quant::float::F16,
    &quant::float::BF16,
    &quant::q4_0::FORMAT,
    &quant::q4_1::FORMAT,
    &quant::q5_0::FORMAT,
    &quant::q5_1::FORMAT,
    &quant::q8_0::FORMAT,
    &quant::q2_k::FORMAT,
    &quant::q3_k::FORMAT,
    &quant::q4_k::FORMAT,
    &quant::q5_k::FORMAT,
    &quant::q6_k::FORMAT,
    &quant::iq2_xxs::FORMAT,
    &quant::iq2_xs::FORMAT,
    &quant::iq3_xxs::FORMAT,
    &quant::iq1_s::FORMAT,
    &quant::iq4_nl::FORMAT,
    &quant::iq3_s::FORMAT,
    &quant::iq2_s::FORMAT,
    &quant::iq4_xs::FORMAT,
    &quant::iq1_m::FORMAT,
    &quant::tq1_0::FORMAT,
    &quant::tq2_0::FORMAT,
    &quant::mxfp4::FORMAT,
    &quant::nvfp4::FORMAT,
];

impl DType {
    /// The format's row in [`FORMATS`].
    pub fn format(self) -> &'static Format {
        FORMATS.iter().find(|f| f.dtype == self).expect("every DType has a row in FORMATS: a test says so")
    }

    /// The format with this GGUF tensor type number.
    pub fn from_ggml(id: u32) -> Option<DType> {
        FORMATS.iter().map(|f| f.dtype).find(|&d| d as u32 == id)
    }

    /// The format with this name, in any case.
    pub fn from_name(name: &str) -> Option<DType> {
        FORMATS.iter().find(|f| f.name.eq_ignore_ascii_case(name)).map(|f| f.dtype)
    }

    /// GGUF's name of the format.
    pub fn name(self) -> &'static str {
        self.format().name
    }

    /// Whether [`quantize`] can make it.
    pub fn can_quantize(self) -> bool {
        self.format().quantize.is_some()
    }

    /// Bytes of a row of `cols` columns, or `None` when `cols` is not a whole number of blocks or the size overflows.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        let f = self.format();
        if !cols.is_multiple_of(f.block_len) {
            return None;
        }
        (cols / f.block_len).checked_mul(f.block_bytes)
    }
}

/// Turns numbers into whole blocks of a format, with the least error that its scales allow. A number that is not finite
/// leaves a block whose weights are not finite.
///
/// # Panics
/// If the format is only read, or `out` is not the blocks of `values`.
pub fn quantize(dtype: DType, values: &[f32], out: &mut [u8]) {
    assert_eq!(Some(out.len()), dtype.row_bytes(values.len()), "{dtype:?} blocks of {} values", values.len());
    let quantize = dtype.format().quantize.expect("only formats that can be made are asked for: see can_quantize");
    quantize(values, out);
}
