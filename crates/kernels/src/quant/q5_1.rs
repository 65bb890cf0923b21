//! Q5_1: 32 columns, half-precision scale and minimum, 5-bit codes. Source: ggml's `block_q5_1`.

use super::{
    bytes_at, each_block, each_run, f16, f16_at, fit, nibbles, pack_nibbles, put,
    q5_0::{add_fifth_bit, fifth_bits},
    u32_at,
};
use crate::dtype::{Arith, DType, Format, Group};
use crate::linear::PanelFormat;
use crate::pack::{Segment, place};
use crate::panel::{COLS, Codes, Panel, QUAD, Shared, Tile, nibble_codes, or_bits};
use crate::simd::{LANES, Simd};

/// 2 bytes scale `d`, 2 bytes minimum `m`, 4 bytes fifth bits (bit i is column i), 16 bytes low bits (columns 0..16
/// in the low nibbles, 16..32 in the high ones).
const BYTES: usize = 24;

/// The row in FORMATS.
pub static FORMAT: Format = Format {
    dtype: DType::Q5_1,
    name: "Q5_1",
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
    let (d, m, high) = (f16_at(block, 0), f16_at(block, 2), u32_at(block, 4));
    std::array::from_fn(|i| {
        let q = block[8 + i % 16] >> (i / 16 * 4) & 15 | ((high >> i & 1) << 4) as u8;
        d * f32::from(q) + m
    })
}

fn unpack(block: &[u8; BYTES]) -> [Group; 1] {
    let q = add_fifth_bit(nibbles(bytes_at(block, 8), |q| q as i8), u32_at(block, 4));
    [Group { q, d: [f16_at(block, 0); 2], min: [f16_at(block, 2); 2], ..Group::ZERO }]
}

fn quantize(x: &[f32; 32]) -> [u8; BYTES] {
    let (d, m) = fit::scale_min(x, 31, false);
    let (d, m) = (f16::from_f32(d), f16::from_f32(m));
    let q = fit::codes_from(x, d.to_f32(), m.to_f32(), 31);
    let mut block = [0; BYTES];
    put(&mut block, 0, d.to_le_bytes());
    put(&mut block, 2, m.to_le_bytes());
    put(&mut block, 4, fifth_bits(&q));
    put(&mut block, 8, pack_nibbles(&q));
    block
}

/// 16 scales, 16 minima, fifth bits, then low bits.
static PANEL: PanelFormat = PanelFormat::new::<Packed>(&[
    Segment { bytes: 0..4, bits: 8, place: place::half, flip: 0 },
    Segment { bytes: 4..8, bits: 1, place: |row, unit| HIGH * 8 + place::code1(row, unit), flip: 0 },
    Segment { bytes: 8..24, bits: 4, place: |row, unit| LOW * 2 + place::code4(row, place::halves(unit)), flip: 0 },
]);

const HIGH: usize = 4 * LANES;
const LOW: usize = HIGH + QUAD;

struct Packed;

impl Panel for Packed {
    const ARITH: Arith = FORMAT.arith;
    const CODES: Codes = Codes::Unsigned;
    const GROUPS: usize = FORMAT.block_len / COLS;
    const BYTES: usize = BYTES * LANES;

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8, _: &Shared, _: usize) -> Tile<S> {
        // SAFETY: the offsets are those of PANEL.
        unsafe {
            Tile {
                codes: or_bits::<S, 1, 4>(s, nibble_codes(s, p.add(LOW)), p.add(HIGH)),
                d: [s.load_f16(p.cast()); 2],
                min: [s.load_f16(p.add(2 * LANES).cast()); 2],
                ..Tile::zero(s)
            }
        }
    }
}
