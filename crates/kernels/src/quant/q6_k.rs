//! Q6_K: 256 columns, 6-bit codes around 32, a signed 8-bit scale for 16 columns under one half-precision scale.
//! Source: ggml's `block_q6_K`.

use super::{bytes_at, each_block, each_run, f16_at, fit, put};
use crate::dtype::{Arith, DType, Format, Group};
use crate::linear::PanelFormat;
use crate::pack::{Segment, place};
use crate::panel::{COLS, Codes, Panel, QUAD, Shared, Tile, nibble_codes, or_bits};
use crate::simd::{LANES, Simd};

/// 128 bytes low bits, 64 bytes high bits, 16 signed bytes scales, 2 bytes `d`. Each half of the block (128 columns,
/// groups 0..4 of 32) has 64 bytes of low bits (groups 0 and 1 in the low nibbles, 2 and 3 in the high ones) and 32
/// bytes of high bits (bits 2k of byte i belong to column i of group k).
const BYTES: usize = 210;

/// The row in FORMATS.
pub static FORMAT: Format = Format {
    dtype: DType::Q6_K,
    name: "Q6_K",
    block_len: 256,
    block_bytes: BYTES,
    arith: Arith::Scale16,
    dequantize: |src, dst| each_block(src, dst, dequantize),
    quantize: Some(|src, dst| each_run(src, dst, quantize)),
    unpack: Some(|src, dst| each_block(src, dst, unpack)),
    panel: Some(&PANEL),
};

/// `w = d * sc * (q - 32)`, with `sc` of the 16 columns.
fn dequantize(block: &[u8; BYTES]) -> [f32; 256] {
    let d = f16_at(block, 208);
    std::array::from_fn(|i| {
        let (half, k) = (i / 128, i / 32 % 4);
        let low = block[64 * half + i % 64] >> (k / 2 * 4) & 15;
        let high = block[128 + 32 * half + i % 32] >> (2 * k) & 3;
        d * f32::from(block[192 + i / 16] as i8) * (f32::from(low | high << 4) - 32.0)
    })
}

fn unpack(block: &[u8; BYTES]) -> [Group; 8] {
    let d = f16_at(block, 208);
    std::array::from_fn(|j| {
        let (half, k) = (j / 4, j % 4);
        let mut q = bytes_at(block, 64 * half + 32 * (k % 2)).map(|b| (b >> (k / 2 * 4) & 15) as i8 - 32);
        for (q, h) in q.iter_mut().zip(bytes_at::<32>(block, 128 + 32 * half)) {
            *q += ((h >> (2 * k) & 3) << 4) as i8;
        }
        Group { q, sub: bytes_at(block, 192 + 2 * j).map(|b| i16::from(b as i8)), d: [d; 2], ..Group::ZERO }
    })
}

fn quantize(x: &[f32; 256]) -> [u8; BYTES] {
    let (d, sc) = fit::scales::<16, 16>(x, -128..=127, |x| fit::scale(x, -32..=31));
    let mut block = [0; BYTES];
    for (j, (x, &sc)) in x.as_chunks::<16>().0.iter().zip(&sc).enumerate() {
        let codes = fit::codes(x, d.to_f32() * f32::from(sc), -32..=31);
        for (i, q) in (16 * j..).zip(codes.map(|q| (q + 32) as u8)) {
            let (half, k) = (i / 128, i / 32 % 4);
            block[64 * half + i % 64] |= (q & 15) << (k / 2 * 4);
            block[128 + 32 * half + i % 32] |= (q >> 4) << (2 * k);
        }
    }
    put(&mut block, 192, sc.map(|sc| sc as u8));
    put(&mut block, 208, d.to_le_bytes());
    block
}

/// 16 `d`; then for each group 2 x 16 scales, high bits, low bits.
static PANEL: PanelFormat = PanelFormat::new::<Packed>(&[
    Segment { bytes: 208..210, bits: 8, place: place::half, flip: 0 },
    Segment { bytes: 192..208, bits: 8, place: |row, unit| SCALES + grouped(place::byte(row, unit), 8), flip: 0 },
    Segment {
        bytes: 128..192,
        bits: 2,
        place: |row, unit| HIGH * 4 + grouped(place::code2_quarters(row, unit), 2),
        flip: 0,
    },
    Segment { bytes: 0..128, bits: 4, place: |row, unit| LOW * 2 + grouped(place_low(row, unit), 4), flip: 0 },
]);

const SCALES: usize = 2 * LANES;
const HIGH: usize = SCALES + 2 * LANES;
const LOW: usize = HIGH + 2 * QUAD;
/// Bytes of a group: scales, high bits, low bits.
const GROUP: usize = 2 * LANES + 2 * QUAD + 4 * QUAD;

/// Units of `bits` bits: a group has two scales of 8 bits a row, and 32 codes of fewer.
fn grouped(place: usize, bits: usize) -> usize {
    let run = if bits == 8 { 2 * LANES } else { COLS * LANES };
    place::grouped(place, run, GROUP * 8 / bits)
}

fn place_low(row: usize, unit: usize) -> usize {
    let (byte, high) = (unit / 2, unit % 2);
    let group = byte / 64 * 4 + high * 2 + byte % 64 / 32;
    group * LANES * COLS + place::code4(row, byte % 32)
}

struct Packed;

impl Panel for Packed {
    const ARITH: Arith = FORMAT.arith;
    const CODES: Codes = Codes::Offset(5);
    const GROUPS: usize = FORMAT.block_len / COLS;
    const BYTES: usize = BYTES * LANES;

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8, _: &Shared, g: usize) -> Tile<S> {
        let mut t = Tile::zero(s);
        // SAFETY: the offsets are those of PANEL.
        unsafe {
            t.d = [s.load_f16(p.cast()); 2];
            let p = p.add(g * GROUP);
            t.sub = [s.to_f(s.load_i8(p.add(SCALES))), s.to_f(s.load_i8(p.add(SCALES + LANES)))];
            t.codes = nibble_codes(s, p.add(LOW));
            t.codes = or_bits::<S, 2, 4>(s, t.codes, p.add(HIGH));
        }
        t
    }
}
