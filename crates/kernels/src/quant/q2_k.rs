//! Q2_K: 256 columns, 2-bit codes, a 4-bit scale and a 4-bit minimum for 16 columns under two half-precision scales.
//! Source: ggml's `block_q2_K`.

use super::{
    bytes_at, each_block, each_run, f16_at,
    fit::{self, ScaleMins},
    put,
};
use crate::dtype::{Arith, DType, Format, Group};
use crate::linear::PanelFormat;
use crate::pack::{Segment, place};
use crate::panel::{COLS, Codes, Panel, QUAD, Shared, Tile, or_bits};
use crate::simd::{LANES, Simd};

/// 16 bytes scales (low nibble) and minima (high nibble), 64 bytes codes, 2 bytes `d`, 2 bytes `dmin`. The codes of
/// group j (32 columns) are bits `2 * (j % 4)` of the bytes 0..32 for j < 4, 32..64 after.
const BYTES: usize = 84;

/// The row in FORMATS.
pub static FORMAT: Format = Format {
    dtype: DType::Q2_K,
    name: "Q2_K",
    block_len: 256,
    block_bytes: BYTES,
    arith: Arith::Scale16Min,
    dequantize: |src, dst| each_block(src, dst, dequantize),
    quantize: Some(|src, dst| each_run(src, dst, quantize)),
    unpack: Some(|src, dst| each_block(src, dst, unpack)),
    panel: Some(&PANEL),
};

/// `w = d * sc * q - dmin * m`, with `sc` and `m` of the 16 columns.
fn dequantize(block: &[u8; BYTES]) -> [f32; 256] {
    let (d, dmin) = (f16_at(block, 80), f16_at(block, 82));
    std::array::from_fn(|i| {
        let (sc, m) = (block[i / 16] & 15, block[i / 16] >> 4);
        let q = block[16 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
        d * f32::from(sc) * f32::from(q) - dmin * f32::from(m)
    })
}

fn unpack(block: &[u8; BYTES]) -> [Group; 8] {
    let (d, dmin) = (f16_at(block, 80), f16_at(block, 82));
    std::array::from_fn(|j| {
        let halves = *bytes_at::<2>(block, 2 * j);
        Group {
            q: bytes_at(block, 16 + j / 4 * 32).map(|b| (b >> (j % 4 * 2) & 3) as i8),
            sub: halves.map(|b| i16::from(b & 15)),
            d: [d; 2],
            min: halves.map(|b| -(dmin * f32::from(b >> 4))),
        }
    })
}

fn quantize(x: &[f32; 256]) -> [u8; BYTES] {
    let ScaleMins { d, dmin, sc, m, q } = fit::scale_mins::<16, 16>(x, 3, 15);
    let mut block = [0; BYTES];
    put::<16>(&mut block, 0, std::array::from_fn(|j| sc[j] | m[j] << 4));
    for (i, q) in q.into_iter().enumerate() {
        block[16 + i / 128 * 32 + i % 32] |= q << (i / 32 % 4 * 2);
    }
    put(&mut block, 80, d.to_le_bytes());
    put(&mut block, 82, dmin.to_le_bytes());
    block
}

/// 16 `d`, 16 `dmin`, 16 x 16 scales and minima, then codes.
static PANEL: PanelFormat = PanelFormat::new::<Packed>(&[
    Segment { bytes: 80..84, bits: 8, place: place::half, flip: 0 },
    Segment { bytes: 0..16, bits: 8, place: |row, unit| SCALES + place::byte(row, unit), flip: 0 },
    Segment { bytes: 16..80, bits: 2, place: |row, unit| CODES * 4 + place::code2_quarters(row, unit), flip: 0 },
]);

const SCALES: usize = 4 * LANES;
const CODES: usize = SCALES + 16 * LANES;

struct Packed;

impl Panel for Packed {
    const ARITH: Arith = FORMAT.arith;
    const CODES: Codes = Codes::Unsigned;
    const GROUPS: usize = FORMAT.block_len / COLS;
    const BYTES: usize = BYTES * LANES;

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8, _: &Shared, g: usize) -> Tile<S> {
        let mut t = Tile::zero(s);
        // SAFETY: the offsets are those of PANEL.
        unsafe {
            t.codes = or_bits::<S, 2, 0>(s, t.codes, p.add(CODES + 2 * g * QUAD));
            t.d = [s.load_f16(p.cast()); 2];
            let dmin = s.load_f16(p.add(2 * LANES).cast());
            let mut h = 0;
            while h < 2 {
                let both = s.load_u8(p.add(SCALES + (2 * g + h) * LANES));
                t.sub[h] = s.to_f(s.and_i(both, s.splat_i(15)));
                t.min[h] = s.sub(s.splat(-0.0), s.mul(dmin, s.to_f(s.shr_i(both, 4))));
                h += 1;
            }
        }
        t
    }
}
