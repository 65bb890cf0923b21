//! Q5_K: Q4_K with a fifth bit a code. Source: ggml's `block_q5_K`.

use super::{
    bytes_at, each_block, each_run, f16_at,
    fit::{self, ScaleMins},
    pack_scale_mins, put, scale_min,
};
use crate::dtype::{Arith, DType, Format, Group};
use crate::linear::PanelFormat;
use crate::pack::{Segment, place};
use crate::panel::{COLS, Codes, Panel, QUAD, Shared, Tile, nibble_codes, or_bits, scale6, scale6_bytes};
use crate::simd::{LANES, Simd};

/// 2 bytes `d`, 2 bytes `dmin`, 12 bytes scales and minima, 32 bytes fifth bits (bit j of byte i is column i of group
/// j), 128 bytes low bits: groups 2k and 2k + 1 are the low and the high nibbles of the bytes 32k..32k + 32.
const BYTES: usize = 176;

/// The row in FORMATS.
pub static FORMAT: Format = Format {
    dtype: DType::Q5_K,
    name: "Q5_K",
    block_len: 256,
    block_bytes: BYTES,
    arith: Arith::Scale32Min,
    dequantize: |src, dst| each_block(src, dst, dequantize),
    quantize: Some(|src, dst| each_run(src, dst, quantize)),
    unpack: Some(|src, dst| each_block(src, dst, unpack)),
    panel: Some(&PANEL),
};

/// `w = d * sc * q - dmin * m`, with `sc` and `m` of the 32 columns.
fn dequantize(block: &[u8; BYTES]) -> [f32; 256] {
    let (d, dmin, scales) = (f16_at(block, 0), f16_at(block, 2), bytes_at(block, 4));
    std::array::from_fn(|i| {
        let (sc, m) = scale_min(scales, i / 32);
        let low = block[48 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
        let high = block[16 + i % 32] >> (i / 32) & 1;
        d * f32::from(sc) * f32::from(low | high << 4) - dmin * f32::from(m)
    })
}

fn unpack(block: &[u8; BYTES]) -> [Group; 8] {
    let (d, dmin, scales) = (f16_at(block, 0), f16_at(block, 2), bytes_at(block, 4));
    let high = bytes_at::<32>(block, 16);
    std::array::from_fn(|j| {
        let (sc, m) = scale_min(scales, j);
        let mut q = bytes_at(block, 48 + j / 2 * 32).map(|b| (b >> (j % 2 * 4) & 15) as i8);
        for (q, h) in q.iter_mut().zip(high) {
            *q |= ((h >> j & 1) << 4) as i8;
        }
        Group { q, d: [d * f32::from(sc); 2], min: [-(dmin * f32::from(m)); 2], ..Group::ZERO }
    })
}

fn quantize(x: &[f32; 256]) -> [u8; BYTES] {
    let ScaleMins { d, dmin, sc, m, q } = fit::scale_mins::<8, 32>(x, 31, 63);
    let mut block = [0; BYTES];
    put(&mut block, 0, d.to_le_bytes());
    put(&mut block, 2, dmin.to_le_bytes());
    put(&mut block, 4, pack_scale_mins(&sc, &m));
    for (i, q) in q.into_iter().enumerate() {
        block[16 + i % 32] |= (q >> 4) << (i / 32);
        block[48 + i / 64 * 32 + i % 32] |= (q & 15) << (i / 32 % 2 * 4);
    }
    block
}

/// 16 `d`, 16 `dmin`, scales and minima as [`place::scale_min`] puts them; then for each group fifth bits, low bits.
static PANEL: PanelFormat = PanelFormat::new::<Packed>(&[
    Segment { bytes: 0..4, bits: 8, place: place::half, flip: 0 },
    Segment { bytes: 4..16, bits: 2, place: |row, unit| SCALES * 4 + place::scale_min(row, unit), flip: 0 },
    Segment {
        bytes: 16..48,
        bits: 1,
        place: |row, unit| (HIGH + unit % 8 * GROUP) * 8 + place::code1(row, unit / 8),
        flip: 0,
    },
    Segment {
        bytes: 48..176,
        bits: 4,
        place: |row, unit| LOW * 2 + place::grouped(place::code4_pairs(row, unit), COLS * LANES, GROUP * 2),
        flip: 0,
    },
]);

const SCALES: usize = 4 * LANES;
const HIGH: usize = 16 * LANES;
const LOW: usize = HIGH + QUAD;
/// Bytes of a group: high bits, low bits.
const GROUP: usize = QUAD + 4 * QUAD;

struct Packed;

impl Panel for Packed {
    const ARITH: Arith = FORMAT.arith;
    const CODES: Codes = Codes::Unsigned;
    const GROUPS: usize = FORMAT.block_len / COLS;
    const BYTES: usize = BYTES * LANES;

    #[inline(always)]
    unsafe fn prepare<S: Simd>(s: S, p: *const u8, shared: &mut Shared) {
        // SAFETY: the offset is that of PANEL.
        unsafe { scale6_bytes(s, p.add(SCALES), shared) }
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8, shared: &Shared, g: usize) -> Tile<S> {
        // SAFETY: the offsets are those of PANEL.
        unsafe {
            let (d, dmin) = (s.load_f16(p.cast()), s.load_f16(p.add(2 * LANES).cast()));
            let (sc, m) = scale6(s, shared, g);
            let low = nibble_codes(s, p.add(LOW + g * GROUP));
            Tile {
                codes: or_bits::<S, 1, 4>(s, low, p.add(HIGH + g * GROUP)),
                d: [s.mul(d, sc); 2],
                min: [s.sub(s.splat(-0.0), s.mul(dmin, m)); 2],
                ..Tile::zero(s)
            }
        }
    }
}
