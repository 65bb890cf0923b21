//! Q8_0: 32 columns, one half-precision scale, signed bytes. Source: ggml's `block_q8_0`.

use super::{bytes_at, each_block, each_run, f16, f16_at, fit, put};
use crate::dtype::{Arith, DType, Format, Group};
use crate::linear::PanelFormat;
use crate::pack::{Segment, place};
use crate::panel::{COLS, Codes, Panel, QUAD, Shared, Tile};
use crate::simd::{LANES, Simd};

/// 2 bytes scale `d`, 32 signed bytes.
const BYTES: usize = 34;

/// The row in FORMATS.
pub static FORMAT: Format = Format {
    dtype: DType::Q8_0,
    name: "Q8_0",
    block_len: 32,
    block_bytes: BYTES,
    arith: Arith::Scale32,
    dequantize: |src, dst| each_block(src, dst, dequantize),
    quantize: Some(|src, dst| each_run(src, dst, quantize)),
    unpack: Some(|src, dst| each_block(src, dst, unpack)),
    panel: Some(&PANEL),
};

/// `w = d * q`. A file may hold the code -128, though no quantizer writes it.
fn dequantize(block: &[u8; BYTES]) -> [f32; 32] {
    let d = f16_at(block, 0);
    std::array::from_fn(|i| d * f32::from(block[2 + i] as i8))
}

fn unpack(block: &[u8; BYTES]) -> [Group; 1] {
    let q = bytes_at(block, 2).map(|b| b as i8);
    [Group { q, d: [f16_at(block, 0); 2], ..Group::ZERO }]
}

fn quantize(x: &[f32; 32]) -> [u8; BYTES] {
    let d = f16::from_f32(fit::extreme(x).abs() / 127.0);
    let mut block = [0; BYTES];
    put(&mut block, 0, d.to_le_bytes());
    put(&mut block, 2, fit::codes(x, d.to_f32(), -127..=127).map(|q| q as u8));
    block
}

/// 16 scales, then codes with 128 added.
static PANEL: PanelFormat = PanelFormat::new::<Packed>(&[
    Segment { bytes: 0..2, bits: 8, place: place::half, flip: 0 },
    Segment { bytes: 2..34, bits: 8, place: |row, unit| CODES + place::code8(row, unit), flip: 0x80 },
]);

const CODES: usize = 2 * LANES;

struct Packed;

impl Panel for Packed {
    const ARITH: Arith = FORMAT.arith;
    const CODES: Codes = Codes::Biased;
    const GROUPS: usize = FORMAT.block_len / COLS;
    const BYTES: usize = BYTES * LANES;

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8, _: &Shared, _: usize) -> Tile<S> {
        let mut t = Tile::zero(s);
        // SAFETY: 16 scales and 8 quads.
        unsafe {
            t.d = [s.load_f16(p.cast()); 2];
            let mut i = 0;
            while i < 8 {
                t.codes[i] = s.load_b(p.add(CODES + i * QUAD));
                i += 1;
            }
        }
        t
    }
}
