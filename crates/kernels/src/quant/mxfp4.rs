//! MXFP4: 32 columns, a power of two as scale, 4-bit floats (E2M1). Source: ggml's `block_mxfp4`; the encodings are
//! those of the OCP Microscaling Formats specification 1.0.

use super::{bytes_at, each_block, each_run, fit, nibbles, pack_nibbles, put};
use crate::dtype::{Arith, DType, Format, Group};
use crate::linear::PanelFormat;
use crate::pack::{Segment, place};
use crate::panel::{COLS, Codes, Panel, Shared, Tile, biased, lookup_codes};
use crate::simd::{LANES, Simd};

/// 1 byte scale `e`, 16 bytes codes (columns 0..16 in the low nibbles, 16..32 in the high ones).
const BYTES: usize = 17;

/// Twice what an E2M1 code stands for, so that it is an integer (ggml's `kvalues_mxfp4`).
pub(super) static VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The row in FORMATS.
pub static FORMAT: Format = Format {
    dtype: DType::MXFP4,
    name: "MXFP4",
    block_len: 32,
    block_bytes: BYTES,
    arith: Arith::Scale32,
    dequantize: |src, dst| each_block(src, dst, dequantize),
    quantize: Some(|src, dst| each_run(src, dst, quantize)),
    unpack: Some(|src, dst| each_block(src, dst, unpack)),
    panel: Some(&PANEL),
};

/// Half of the scale, `2^(e - 128)`, exact: denormal below `e = 2`. The specification calls 255 NaN; ggml, which defines
/// the bytes in a GGUF file, reads it as any other exponent, and so does this.
fn half_scale(e: u8) -> f32 {
    f32::from_bits(if e < 2 { 1 << (21 + e) } else { u32::from(e - 1) << 23 })
}

/// `w = 2^(e - 128) * VALUES[q]`.
fn dequantize(block: &[u8; BYTES]) -> [f32; 32] {
    let d = half_scale(block[0]);
    std::array::from_fn(|i| {
        let q = block[1 + i % 16] >> (i / 16 * 4) & 15;
        d * f32::from(VALUES[usize::from(q)])
    })
}

fn unpack(block: &[u8; BYTES]) -> [Group; 1] {
    let q = nibbles(bytes_at(block, 1), |q| VALUES[usize::from(q)]);
    [Group { q, d: [half_scale(block[0]); 2], ..Group::ZERO }]
}

/// The power of two that brings the largest number to the largest code, or the next one, which cuts nothing off:
/// whichever errs less. There is no scale that is not finite: the largest one with the largest codes stands for it.
fn quantize(x: &[f32; 32]) -> [u8; BYTES] {
    let max = fit::extreme(x).abs();
    if !max.is_finite() {
        return std::array::from_fn(|i| if i == 0 { 255 } else { 0x77 });
    }
    let exponent = (max.to_bits() >> 23) as u8; // of 2^(exponent - 127) <= max
    let blocks = [2, 1].map(|less| block(x, exponent.saturating_sub(less)));
    let error = |block: &[u8; BYTES]| -> f32 { dequantize(block).iter().zip(x).map(|(w, x)| (w - x) * (w - x)).sum() };
    if error(&blocks[1]) < error(&blocks[0]) { blocks[1] } else { blocks[0] }
}

fn block(x: &[f32; 32], e: u8) -> [u8; BYTES] {
    let inv = 1.0 / half_scale(e);
    let code = |x: f32| fit::nearest((x * inv).abs(), &VALUES[..8]) as u8 | u8::from(x < 0.0) << 3;
    let mut block = [e; BYTES];
    put(&mut block, 1, pack_nibbles(&x.map(code)));
    block
}

/// 16 scales, then codes.
static PANEL: PanelFormat = PanelFormat::new::<Packed>(&[
    Segment { bytes: 0..1, bits: 8, place: place::byte, flip: 0 },
    Segment { bytes: 1..17, bits: 4, place: |row, unit| CODES * 2 + place::code4(row, place::halves(unit)), flip: 0 },
]);

const CODES: usize = LANES;

static BIASED: [u8; 16] = biased(&VALUES);

struct Packed;

impl Panel for Packed {
    const ARITH: Arith = FORMAT.arith;
    const CODES: Codes = Codes::Biased;
    const GROUPS: usize = FORMAT.block_len / COLS;
    const BYTES: usize = BYTES * LANES;

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8, _: &Shared, _: usize) -> Tile<S> {
        // SAFETY: 16 scales and 256 bytes of codes.
        unsafe {
            let mut d = [0.0; LANES];
            let mut i = 0;
            while i < LANES {
                d[i] = half_scale(*p.add(i));
                i += 1;
            }
            let codes = lookup_codes(s, &BIASED, p.add(CODES));
            Tile { codes, d: [s.load(d.as_ptr()); 2], ..Tile::zero(s) }
        }
    }
}
