//! IQ4_NL: 32 columns, one half-precision scale, 4-bit codes into a table of values. Source: ggml's `block_iq4_nl`.

use super::{bytes_at, each_block, each_run, f16, f16_at, fit, nibbles, pack_nibbles, put};
use crate::dtype::{Arith, DType, Format, Group};
use crate::linear::PanelFormat;
use crate::pack::{Segment, place};
use crate::panel::{COLS, Codes, Panel, Shared, Tile, biased, lookup_codes};
use crate::simd::{LANES, Simd};

/// 2 bytes scale `d`, 16 bytes codes (columns 0..16 in the low nibbles, 16..32 in the high ones).
const BYTES: usize = 18;

/// What a code stands for (ggml's `kvalues_iq4nl`).
pub(super) static VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The row in FORMATS.
pub static FORMAT: Format = Format {
    dtype: DType::IQ4_NL,
    name: "IQ4_NL",
    block_len: 32,
    block_bytes: BYTES,
    arith: Arith::Scale32,
    dequantize: |src, dst| each_block(src, dst, dequantize),
    quantize: Some(|src, dst| each_run(src, dst, quantize)),
    unpack: Some(|src, dst| each_block(src, dst, unpack)),
    panel: Some(&PANEL),
};

/// `w = d * VALUES[q]`.
fn dequantize(block: &[u8; BYTES]) -> [f32; 32] {
    let d = f16_at(block, 0);
    std::array::from_fn(|i| {
        let q = block[2 + i % 16] >> (i / 16 * 4) & 15;
        d * f32::from(VALUES[usize::from(q)])
    })
}

fn unpack(block: &[u8; BYTES]) -> [Group; 1] {
    let q = nibbles(bytes_at(block, 2), |q| VALUES[usize::from(q)]);
    [Group { q, d: [f16_at(block, 0); 2], ..Group::ZERO }]
}

fn quantize(x: &[f32; 32]) -> [u8; BYTES] {
    let d = f16::from_f32(fit::table_scale(x, &VALUES));
    let inv = fit::inverse(d.to_f32());
    let mut block = [0; BYTES];
    put(&mut block, 0, d.to_le_bytes());
    put(&mut block, 2, pack_nibbles(&x.map(|x| fit::nearest(x * inv, &VALUES) as u8)));
    block
}

/// 16 scales, then codes.
static PANEL: PanelFormat = PanelFormat::new::<Packed>(&[
    Segment { bytes: 0..2, bits: 8, place: place::half, flip: 0 },
    Segment { bytes: 2..18, bits: 4, place: |row, unit| CODES * 2 + place::code4(row, place::halves(unit)), flip: 0 },
]);

const CODES: usize = 2 * LANES;

/// The table as kernels take it.
pub(super) static BIASED: [u8; 16] = biased(&VALUES);

struct Packed;

impl Panel for Packed {
    const ARITH: Arith = FORMAT.arith;
    const CODES: Codes = Codes::Biased;
    const GROUPS: usize = FORMAT.block_len / COLS;
    const BYTES: usize = BYTES * LANES;

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8, _: &Shared, _: usize) -> Tile<S> {
        // SAFETY: 16 scales and 256 bytes of codes.
        unsafe {
            let codes = lookup_codes(s, &BIASED, p.add(CODES));
            Tile { codes, d: [s.load_f16(p.cast()); 2], ..Tile::zero(s) }
        }
    }
}
