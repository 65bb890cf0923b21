//! Q4_0: 32 columns, one half-precision scale, 4-bit codes around 8. Source: ggml's `block_q4_0`.

use super::{bytes_at, each_block, each_run, f16, f16_at, fit, nibbles, pack_nibbles, put};
use crate::dtype::{Arith, DType, Format, Group};
use crate::linear::PanelFormat;
use crate::pack::{Segment, place};
use crate::panel::{COLS, Codes, Panel, Shared, Tile, nibble_codes};
use crate::simd::{LANES, Simd};

/// 2 bytes scale `d`, 16 bytes codes (columns 0..16 in the low nibbles, 16..32 in the high ones).
const BYTES: usize = 18;

/// The row in FORMATS.
pub static FORMAT: Format = Format {
    dtype: DType::Q4_0,
    name: "Q4_0",
    block_len: 32,
    block_bytes: BYTES,
    arith: Arith::Scale32,
    dequantize: |src, dst| each_block(src, dst, dequantize),
    quantize: Some(|src, dst| each_run(src, dst, quantize)),
    unpack: Some(|src, dst| each_block(src, dst, unpack)),
    panel: Some(&PANEL),
};

/// `w = d * (q - 8)`.
fn dequantize(block: &[u8; BYTES]) -> [f32; 32] {
    let d = f16_at(block, 0);
    std::array::from_fn(|i| {
        let q = block[2 + i % 16] >> (i / 16 * 4) & 15;
        d * (f32::from(q) - 8.0)
    })
}

fn unpack(block: &[u8; BYTES]) -> [Group; 1] {
    let q = nibbles(bytes_at(block, 2), |q| q as i8 - 8);
    [Group { q, d: [f16_at(block, 0); 2], ..Group::ZERO }]
}

fn quantize(x: &[f32; 32]) -> [u8; BYTES] {
    let d = f16::from_f32(fit::scale(x, -8..=7));
    let q = fit::codes(x, d.to_f32(), -8..=7).map(|q| (q + 8) as u8);
    let mut block = [0; BYTES];
    put(&mut block, 0, d.to_le_bytes());
    put(&mut block, 2, pack_nibbles(&q));
    block
}

/// 16 scales, then codes.
static PANEL: PanelFormat = PanelFormat::new::<Packed>(&[
    Segment { bytes: 0..2, bits: 8, place: place::half, flip: 0 },
    Segment { bytes: 2..18, bits: 4, place: |row, unit| CODES * 2 + place::code4(row, place::halves(unit)), flip: 0 },
]);

const CODES: usize = 2 * LANES;

struct Packed;

impl Panel for Packed {
    const ARITH: Arith = FORMAT.arith;
    const CODES: Codes = Codes::Offset(3);
    const GROUPS: usize = FORMAT.block_len / COLS;
    const BYTES: usize = BYTES * LANES;

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8, _: &Shared, _: usize) -> Tile<S> {
        // SAFETY: 16 scales and 256 bytes of codes.
        unsafe { Tile { codes: nibble_codes(s, p.add(CODES)), d: [s.load_f16(p.cast()); 2], ..Tile::zero(s) } }
    }
}
