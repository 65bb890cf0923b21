//! Q4_1: 32 columns, half-precision scale and minimum, 4-bit codes. Source: ggml's `block_q4_1`.

use super::{bytes_at, each_block, each_run, f16, f16_at, fit, nibbles, pack_nibbles, put};
use crate::dtype::{Arith, DType, Format, Group};
use crate::linear::PanelFormat;
use crate::pack::{Segment, place};
use crate::panel::{COLS, Codes, Panel, Shared, Tile, nibble_codes};
use crate::simd::{LANES, Simd};

/// 2 bytes scale `d`, 2 bytes minimum `m`, 16 bytes codes (columns 0..16 low nibbles, 16..32 high ones).
const BYTES: usize = 20;

/// The row in FORMATS.
pub static FORMAT: Format = Format {
    dtype: DType::Q4_1,
    name: "Q4_1",
    block_len: 32,
    block_bytes: BYTES,
    arith: Arith::Scale32Min,
    dequantize: |src, dst| each_block(src, dst, dequantize),
    quantize: Some(|src, dst| each_run(src, dst, quantize)),
    unpack: Some(|src, dst| each_block(src, dst, unpack)),
    panel: Some(&PANEL),
};

/// `w = d * q + m`.
fn dequantize(block: &[u8; BYTES]) -> [f32; 32] {
    let (d, m) = (f16_at(block, 0), f16_at(block, 2));
    std::array::from_fn(|i| {
        let q = block[4 + i % 16] >> (i / 16 * 4) & 15;
        d * f32::from(q) + m
    })
}

fn unpack(block: &[u8; BYTES]) -> [Group; 1] {
    let q = nibbles(bytes_at(block, 4), |q| q as i8);
    [Group { q, d: [f16_at(block, 0); 2], min: [f16_at(block, 2); 2], ..Group::ZERO }]
}

fn quantize(x: &[f32; 32]) -> [u8; BYTES] {
    let (d, m) = fit::scale_min(x, 15, false);
    let (d, m) = (f16::from_f32(d), f16::from_f32(m));
    let mut block = [0; BYTES];
    put(&mut block, 0, d.to_le_bytes());
    put(&mut block, 2, m.to_le_bytes());
    put(&mut block, 4, pack_nibbles(&fit::codes_from(x, d.to_f32(), m.to_f32(), 15)));
    block
}

/// 16 scales, 16 minima, then codes.
static PANEL: PanelFormat = PanelFormat::new::<Packed>(&[
    Segment { bytes: 0..4, bits: 8, place: place::half, flip: 0 },
    Segment { bytes: 4..20, bits: 4, place: |row, unit| CODES * 2 + place::code4(row, place::halves(unit)), flip: 0 },
]);

const CODES: usize = 4 * LANES;

struct Packed;

impl Panel for Packed {
    const ARITH: Arith = FORMAT.arith;
    const CODES: Codes = Codes::Unsigned;
    const GROUPS: usize = FORMAT.block_len / COLS;
    const BYTES: usize = BYTES * LANES;

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8, _: &Shared, _: usize) -> Tile<S> {
        // SAFETY: 16 scales, 16 minima and 256 bytes of codes.
        unsafe {
            Tile {
                codes: nibble_codes(s, p.add(CODES)),
                d: [s.load_f16(p.cast()); 2],
                min: [s.load_f16(p.add(2 * LANES).cast()); 2],
                ..Tile::zero(s)
            }
        }
    }
}
