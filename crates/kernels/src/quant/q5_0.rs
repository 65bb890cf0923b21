//! Q5_0: 32 columns, one half-precision scale, 5-bit codes around 16. Source: ggml's `block_q5_0`.

use super::{bytes_at, each_block, each_run, f16, f16_at, fit, nibbles, pack_nibbles, put, u32_at};
use crate::dtype::{Arith, DType, Format, Group};
use crate::linear::PanelFormat;
use crate::pack::{Segment, place};
use crate::panel::{COLS, Codes, Panel, QUAD, Shared, Tile, nibble_codes, or_bits};
use crate::simd::{LANES, Simd};

/// 2 bytes scale `d`, 4 bytes fifth bits (bit i is column i), 16 bytes low bits (columns 0..16 in the low nibbles,
/// 16..32 in the high ones).
const BYTES: usize = 22;

/// The row in FORMATS.
pub static FORMAT: Format = Format {
    dtype: DType::Q5_0,
    name: "Q5_0",
    block_len: 32,
    block_bytes: BYTES,
    arith: Arith::Scale32,
    dequantize: |src, dst| each_block(src, dst, dequantize),
    quantize: Some(|src, dst| each_run(src, dst, quantize)),
    unpack: Some(|src, dst| each_block(src, dst, unpack)),
    panel: Some(&PANEL),
};

/// `w = d * (q - 16)`.
fn dequantize(block: &[u8; BYTES]) -> [f32; 32] {
    let (d, high) = (f16_at(block, 0), u32_at(block, 2));
    std::array::from_fn(|i| {
        let q = block[6 + i % 16] >> (i / 16 * 4) & 15 | ((high >> i & 1) << 4) as u8;
        d * (f32::from(q) - 16.0)
    })
}

fn unpack(block: &[u8; BYTES]) -> [Group; 1] {
    let q = add_fifth_bit(nibbles(bytes_at(block, 6), |q| q as i8 - 16), u32_at(block, 2));
    [Group { q, d: [f16_at(block, 0); 2], ..Group::ZERO }]
}

fn quantize(x: &[f32; 32]) -> [u8; BYTES] {
    let d = f16::from_f32(fit::scale(x, -16..=15));
    let q = fit::codes(x, d.to_f32(), -16..=15).map(|q| (q + 16) as u8);
    let mut block = [0; BYTES];
    put(&mut block, 0, d.to_le_bytes());
    put(&mut block, 2, fifth_bits(&q));
    put(&mut block, 6, pack_nibbles(&q));
    block
}

/// Bit 4 of each code, as [`add_fifth_bit`] reads them.
pub(super) fn fifth_bits(q: &[u8; 32]) -> [u8; 4] {
    q.iter().enumerate().fold(0, |bits: u32, (i, &q)| bits | u32::from(q >> 4) << i).to_le_bytes()
}

/// Adds 16 to the codes whose bit in `high` is set.
pub(super) fn add_fifth_bit(mut q: [i8; 32], high: u32) -> [i8; 32] {
    for (q, bits) in q.as_chunks_mut::<8>().0.iter_mut().zip(high.to_le_bytes()) {
        for (i, q) in q.iter_mut().enumerate() {
            *q += if bits & 1 << i != 0 { 16 } else { 0 };
        }
    }
    q
}

/// 16 scales, fifth bits, then low bits.
static PANEL: PanelFormat = PanelFormat::new::<Packed>(&[
    Segment { bytes: 0..2, bits: 8, place: place::half, flip: 0 },
    Segment { bytes: 2..6, bits: 1, place: |row, unit| HIGH * 8 + place::code1(row, unit), flip: 0 },
    Segment { bytes: 6..22, bits: 4, place: |row, unit| LOW * 2 + place::code4(row, place::halves(unit)), flip: 0 },
]);

const HIGH: usize = 2 * LANES;
const LOW: usize = HIGH + QUAD;

struct Packed;

impl Panel for Packed {
    const ARITH: Arith = FORMAT.arith;
    const CODES: Codes = Codes::Offset(4);
    const GROUPS: usize = FORMAT.block_len / COLS;
    const BYTES: usize = BYTES * LANES;

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8, _: &Shared, _: usize) -> Tile<S> {
        // SAFETY: the offsets are those of PANEL.
        unsafe {
            let codes = or_bits::<S, 1, 4>(s, nibble_codes(s, p.add(LOW)), p.add(HIGH));
            Tile { codes, d: [s.load_f16(p.cast()); 2], ..Tile::zero(s) }
        }
    }
}
