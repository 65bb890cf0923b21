//! Q4_K: 256 columns, 4-bit codes, a 6-bit scale and a 6-bit minimum for 32 columns under two half-precision scales.
//! Source: ggml's `block_q4_K`.

use super::{
    bytes_at, each_block, each_run, f16_at,
    fit::{self, ScaleMins},
    pack_scale_mins, put, scale_min,
};
use crate::dtype::{Arith, DType, Format, Group};
use crate::linear::PanelFormat;
use crate::pack::{Segment, place};
use crate::panel::{COLS, Codes, Panel, Shared, Tile, nibble_codes, scale6, scale6_bytes};
use crate::simd::{LANES, Simd};

/// 2 bytes `d`, 2 bytes `dmin`, 12 bytes scales and minima, 128 bytes codes: groups 2k and 2k + 1 (32 columns each)
/// are the low and the high nibbles of the bytes 32k..32k + 32.
const BYTES: usize = 144;

/// The row in FORMATS.
pub static FORMAT: Format = Format {
    dtype: DType::Q4_K,
    name: "Q4_K",
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
        let q = block[16 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
        d * f32::from(sc) * f32::from(q) - dmin * f32::from(m)
    })
}

fn unpack(block: &[u8; BYTES]) -> [Group; 8] {
    let (d, dmin, scales) = (f16_at(block, 0), f16_at(block, 2), bytes_at(block, 4));
    std::array::from_fn(|j| {
        let (sc, m) = scale_min(scales, j);
        Group {
            q: bytes_at(block, 16 + j / 2 * 32).map(|b| (b >> (j % 2 * 4) & 15) as i8),
            d: [d * f32::from(sc); 2],
            min: [-(dmin * f32::from(m)); 2],
            ..Group::ZERO
        }
    })
}

fn quantize(x: &[f32; 256]) -> [u8; BYTES] {
    let ScaleMins { d, dmin, sc, m, q } = fit::scale_mins::<8, 32>(x, 15, 63);
    let mut block = [0; BYTES];
    put(&mut block, 0, d.to_le_bytes());
    put(&mut block, 2, dmin.to_le_bytes());
    put(&mut block, 4, pack_scale_mins(&sc, &m));
    for (i, q) in q.into_iter().enumerate() {
        block[16 + i / 64 * 32 + i % 32] |= q << (i / 32 % 2 * 4);
    }
    block
}

/// 16 `d`, 16 `dmin`, scales and minima as [`place::scale_min`] puts them, then codes.
static PANEL: PanelFormat = PanelFormat::new::<Packed>(&[
    Segment { bytes: 0..4, bits: 8, place: place::half, flip: 0 },
    Segment { bytes: 4..16, bits: 2, place: |row, unit| SCALES * 4 + place::scale_min(row, unit), flip: 0 },
    Segment { bytes: 16..144, bits: 4, place: |row, unit| CODES * 2 + place::code4_pairs(row, unit), flip: 0 },
]);

const SCALES: usize = 4 * LANES;
const CODES: usize = 16 * LANES;

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
            Tile {
                codes: nibble_codes(s, p.add(CODES + g * LANES * COLS / 2)),
                d: [s.mul(d, sc); 2],
                min: [s.sub(s.splat(-0.0), s.mul(dmin, m)); 2],
                ..Tile::zero(s)
            }
        }
    }
}
