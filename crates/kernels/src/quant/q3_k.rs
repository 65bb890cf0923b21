//! Q3_K: 256 columns, 3-bit codes around 4, a 6-bit scale for 16 columns under one half-precision scale.
//! Source: ggml's `block_q3_K`.

use super::{bytes_at, each_block, each_run, f16_at, fit, put};
use crate::dtype::{Arith, DType, Format, Group};
use crate::linear::PanelFormat;
use crate::pack::{Segment, place};
use crate::panel::{COLS, Codes, Panel, QUAD, Shared, Tile, or_bits};
use crate::simd::{LANES, Simd};

/// 32 bytes third bits, 64 bytes low bits, 12 bytes scales, 2 bytes `d`. In group j (32 columns) column i has the
/// third bit j of byte i, and the low bits `2 * (j % 4)` of byte i (j < 4) or 32 + i.
const BYTES: usize = 110;

/// The row in FORMATS.
pub static FORMAT: Format = Format {
    dtype: DType::Q3_K,
    name: "Q3_K",
    block_len: 256,
    block_bytes: BYTES,
    arith: Arith::Scale16,
    dequantize: |src, dst| each_block(src, dst, dequantize),
    quantize: Some(|src, dst| each_run(src, dst, quantize)),
    unpack: Some(|src, dst| each_block(src, dst, unpack)),
    panel: Some(&PANEL),
};

/// Scale of the `k`-th 16 columns: low 4 bits in the nibbles of bytes 0..8, high 2 bits in bytes 8..12, less 32.
fn scale(packed: &[u8; 12], k: usize) -> i8 {
    let low = packed[k % 8] >> (k / 8 * 4) & 15;
    let high = packed[8 + k % 4] >> (k / 4 * 2) & 3;
    (low | high << 4) as i8 - 32
}

/// `w = d * sc * (q - 4)`, with `sc` of the 16 columns.
fn dequantize(block: &[u8; BYTES]) -> [f32; 256] {
    let (d, scales) = (f16_at(block, 108), bytes_at(block, 96));
    std::array::from_fn(|i| {
        let low = block[32 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
        let high = block[i % 32] >> (i / 32) & 1;
        d * f32::from(scale(scales, i / 16)) * (f32::from(low | high << 2) - 4.0)
    })
}

fn unpack(block: &[u8; BYTES]) -> [Group; 8] {
    let (d, scales, high) = (f16_at(block, 108), bytes_at(block, 96), bytes_at::<32>(block, 0));
    std::array::from_fn(|j| {
        let mut q = bytes_at(block, 32 + j / 4 * 32).map(|b| (b >> (j % 4 * 2) & 3) as i8 - 4);
        for (q, h) in q.iter_mut().zip(high) {
            *q += ((h >> j & 1) << 2) as i8;
        }
        Group { q, sub: [2 * j, 2 * j + 1].map(|k| scale(scales, k).into()), d: [d; 2], ..Group::ZERO }
    })
}

fn quantize(x: &[f32; 256]) -> [u8; BYTES] {
    let (d, sc) = fit::scales::<16, 16>(x, -32..=31, |x| fit::scale(x, -4..=3));
    let mut block = [0; BYTES];
    for (j, (x, &sc)) in x.as_chunks::<16>().0.iter().zip(&sc).enumerate() {
        let codes = fit::codes(x, d.to_f32() * f32::from(sc), -4..=3);
        for (i, q) in (16 * j..).zip(codes.map(|q| (q + 4) as u8)) {
            block[i % 32] |= (q >> 2) << (i / 32);
            block[32 + i / 128 * 32 + i % 32] |= (q & 3) << (i / 32 % 4 * 2);
        }
        let sc = (sc + 32) as u8;
        block[96 + j % 8] |= (sc & 15) << (j / 8 * 4);
        block[104 + j % 4] |= (sc >> 4) << (j / 4 * 2);
    }
    put(&mut block, 108, d.to_le_bytes());
    block
}

/// 16 `d`, planes of scales; then for each group third bits, low bits.
static PANEL: PanelFormat = PanelFormat::new::<Packed>(&[
    Segment { bytes: 108..110, bits: 8, place: place::half, flip: 0 },
    Segment { bytes: 96..108, bits: 2, place: place_scale, flip: 0 },
    Segment {
        bytes: 0..32,
        bits: 1,
        place: |row, unit| (HIGH + unit % 8 * GROUP) * 8 + place::code1(row, unit / 8),
        flip: 0,
    },
    Segment {
        bytes: 32..96,
        bits: 2,
        place: |row, unit| LOW * 4 + place::grouped(place::code2_quarters(row, unit), COLS * LANES, GROUP * 4),
        flip: 0,
    },
]);

const SCALES: usize = 2 * LANES;
const HIGH: usize = SCALES + 12 * LANES;
const LOW: usize = HIGH + QUAD;
/// Bytes of a group: high bits, low bits.
const GROUP: usize = QUAD + 2 * QUAD;

/// Planes of 16 bytes: the low 4 bits of scales 2i and 2i + 1 (planes 0..8), the high 2 bits of scales 4i..4i + 4.
fn place_scale(row: usize, unit: usize) -> usize {
    let (byte, pair) = (unit / 4, unit % 4);
    let (plane, at) = if byte < 8 {
        let k = byte + pair / 2 * 8;
        (k / 2, k % 2 * 2 + pair % 2)
    } else {
        let k = byte - 8 + 4 * pair;
        (8 + k / 4, k % 4)
    };
    (SCALES + plane * LANES + row) * 4 + at
}

struct Packed;

impl Panel for Packed {
    const ARITH: Arith = FORMAT.arith;
    const CODES: Codes = Codes::Offset(2);
    const GROUPS: usize = FORMAT.block_len / COLS;
    const BYTES: usize = BYTES * LANES;

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8, _: &Shared, g: usize) -> Tile<S> {
        let mut t = Tile::zero(s);
        // SAFETY: the offsets are those of PANEL.
        unsafe {
            t.codes = or_bits::<S, 2, 0>(s, t.codes, p.add(LOW + g * GROUP));
            t.codes = or_bits::<S, 1, 2>(s, t.codes, p.add(HIGH + g * GROUP));
            t.d = [s.load_f16(p.cast()); 2];
            let low = s.load_u8(p.add(SCALES + g * LANES));
            let high = s.load_u8(p.add(SCALES + (8 + g / 2) * LANES));
            let mut h = 0;
            while h < 2 {
                let low = s.and_i(s.shr_i(low, 4 * h as u32), s.splat_i(15));
                let high = s.and_i(s.shr_i(high, 2 * ((2 * g + h) % 4) as u32), s.splat_i(3));
                t.sub[h] = s.to_f(s.add_i(s.or_i(low, s.shl_i(high, 4)), s.splat_i(-32)));
                h += 1;
            }
        }
        t
    }
}
