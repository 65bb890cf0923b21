//! IQ4_XS: 256 columns, codes into the table of IQ4_NL, a 6-bit scale for 32 columns under one half-precision scale.
//! Source: ggml's `block_iq4_xs`.

use super::{
    bytes_at, each_block, each_run, f16_at, fit,
    iq4_nl::{BIASED, VALUES},
    nibbles, pack_nibbles, put, u16_at,
};
use crate::dtype::{Arith, DType, Format, Group};
use crate::linear::PanelFormat;
use crate::pack::{Segment, place};
use crate::panel::{COLS, Codes, Panel, Shared, Tile, lookup_codes};
use crate::simd::{LANES, Simd};

/// 2 bytes `d`, 2 bytes high bits and 4 bytes low bits of the scales, 128 bytes codes: 16 for a group of 32 columns
/// (its columns 0..16 in the low nibbles, 16..32 in the high ones).
const BYTES: usize = 136;

/// The row in FORMATS.
pub static FORMAT: Format = Format {
    dtype: DType::IQ4_XS,
    name: "IQ4_XS",
    block_len: 256,
    block_bytes: BYTES,
    arith: Arith::Scale32,
    dequantize: |src, dst| each_block(src, dst, dequantize),
    quantize: Some(|src, dst| each_run(src, dst, quantize)),
    unpack: Some(|src, dst| each_block(src, dst, unpack)),
    panel: Some(&PANEL),
};

/// Scale of the `j`-th group: nibble j of the low bits, bits 2j of the high ones, less 32.
fn scale(block: &[u8; BYTES], j: usize) -> i8 {
    let low = block[4 + j / 2] >> (j % 2 * 4) & 15;
    let high = (u16_at(block, 2) >> (2 * j) & 3) as u8;
    (low | high << 4) as i8 - 32
}

/// `w = d * sc * VALUES[q]`, with `sc` of the 32 columns.
fn dequantize(block: &[u8; BYTES]) -> [f32; 256] {
    let d = f16_at(block, 0);
    std::array::from_fn(|i| {
        let q = block[8 + i / 32 * 16 + i % 16] >> (i / 16 % 2 * 4) & 15;
        d * f32::from(scale(block, i / 32)) * f32::from(VALUES[usize::from(q)])
    })
}

fn unpack(block: &[u8; BYTES]) -> [Group; 8] {
    let d = f16_at(block, 0);
    std::array::from_fn(|j| {
        let q = nibbles(bytes_at(block, 8 + 16 * j), |q| VALUES[usize::from(q)]);
        Group { q, d: [d * f32::from(scale(block, j)); 2], ..Group::ZERO }
    })
}

fn quantize(x: &[f32; 256]) -> [u8; BYTES] {
    let (d, sc) = fit::scales::<8, 32>(x, -32..=31, |x| fit::table_scale(x, &VALUES));
    let mut block = [0; BYTES];
    put(&mut block, 0, d.to_le_bytes());
    for (j, (x, &sc)) in x.as_chunks::<32>().0.iter().zip(&sc).enumerate() {
        let inv = fit::inverse(d.to_f32() * f32::from(sc));
        put(&mut block, 8 + 16 * j, pack_nibbles(&x.map(|x| fit::nearest(x * inv, &VALUES) as u8)));
        let sc = (sc + 32) as u8;
        block[4 + j / 2] |= (sc & 15) << (j % 2 * 4);
        block[2 + j / 4] |= (sc >> 4) << (j % 4 * 2);
    }
    block
}

/// 16 `d`, high bits of the scales, low bits, then codes.
static PANEL: PanelFormat = PanelFormat::new::<Packed>(&[
    Segment { bytes: 0..2, bits: 8, place: place::half, flip: 0 },
    Segment { bytes: 2..8, bits: 8, place: |row, unit| SCALES + place::byte(row, unit), flip: 0 },
    Segment { bytes: 8..136, bits: 4, place: place_code, flip: 0 },
]);

const SCALES: usize = 2 * LANES;
const CODES: usize = SCALES + 6 * LANES;

fn place_code(row: usize, unit: usize) -> usize {
    let (group, unit) = (unit / 32, unit % 32);
    CODES * 2 + group * LANES * COLS + place::code4(row, place::halves(unit))
}

struct Packed;

impl Panel for Packed {
    const ARITH: Arith = FORMAT.arith;
    const CODES: Codes = Codes::Biased;
    const GROUPS: usize = FORMAT.block_len / COLS;
    const BYTES: usize = BYTES * LANES;

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8, _: &Shared, g: usize) -> Tile<S> {
        // SAFETY: the offsets are those of PANEL.
        unsafe {
            let high = s.shr_i(s.load_u8(p.add(SCALES + g / 4 * LANES)), 2 * (g as u32 % 4));
            let low = s.shr_i(s.load_u8(p.add(SCALES + (2 + g / 2) * LANES)), 4 * (g as u32 % 2));
            let six = s.or_i(s.and_i(low, s.splat_i(15)), s.shl_i(s.and_i(high, s.splat_i(3)), 4));
            let sc = s.to_f(s.add_i(six, s.splat_i(-32)));
            let codes = lookup_codes(s, &BIASED, p.add(CODES + g * LANES * COLS / 2));
            Tile { codes, d: [s.mul(s.load_f16(p.cast()), sc); 2], ..Tile::zero(s) }
        }
    }
}
