//! One file a weight format: its block layout, the reference `dequantize` (value by value, as the format is defined),
//! `unpack` (the integer form that the kernels use, group by group) and, for most, `quantize` (the best block for given
//! values, whose factors `fit` finds).
//!
//! Layouts and formulas are ggml's: `block_*` in ggml-common.h and `dequantize_row_*` in ggml-quants.c. All products of
//! scales and codes are exact in f32 (short of overflow, which only MXFP4's largest scales reach); in formats with a
//! minimum its sum with the product rounds, once. So [`Group::dequantize`](crate::Group::dequantize) of what `unpack`
//! gives equals `dequantize` exactly, however the factors are grouped.

mod fit;
pub mod float;
pub mod iq1_m;
pub mod iq1_s;
pub mod iq2_s;
pub mod iq2_xs;
pub mod iq2_xxs;
pub mod iq3_s;
pub mod iq3_xxs;
pub mod iq4_nl;
pub mod iq4_xs;
mod iq_grids;
pub mod mxfp4;
pub mod nvfp4;
pub mod q2_k;
pub mod q3_k;
pub mod q4_0;
pub mod q4_1;
pub mod q4_k;
pub mod q5_0;
pub mod q5_1;
pub mod q5_k;
pub mod q6_k;
pub mod q8_0;
pub mod tq1_0;
pub mod tq2_0;

use half::f16;

/// Applies `f` to every block of `src`: `BYTES` bytes become `LEN` values or groups of `dst`.
fn each_block<const BYTES: usize, const LEN: usize, T>(
    src: &[u8],
    dst: &mut [T],
    f: impl Fn(&[u8; BYTES]) -> [T; LEN],
) {
    let ((src, src_rest), (dst, dst_rest)) = (src.as_chunks(), dst.as_chunks_mut());
    debug_assert!(src.len() == dst.len() && src_rest.is_empty() && dst_rest.is_empty(), "whole blocks on both sides");
    for (block, out) in src.iter().zip(dst) {
        *out = f(block);
    }
}

/// Applies `f` to every run of `LEN` values of `src`, which become the `BYTES` bytes of a block of `dst`.
fn each_run<const LEN: usize, const BYTES: usize>(src: &[f32], dst: &mut [u8], f: impl Fn(&[f32; LEN]) -> [u8; BYTES]) {
    let ((src, src_rest), (dst, dst_rest)) = (src.as_chunks(), dst.as_chunks_mut());
    debug_assert!(src.len() == dst.len() && src_rest.is_empty() && dst_rest.is_empty(), "whole blocks on both sides");
    for (run, block) in src.iter().zip(dst) {
        *block = f(run);
    }
}

/// Writes the `N` bytes of a block that start at `at`.
fn put<const N: usize>(block: &mut [u8], at: usize, bytes: [u8; N]) {
    block[at..at + N].copy_from_slice(&bytes);
}

/// The `N` bytes of a block that start at `at`.
fn bytes_at<const N: usize>(block: &[u8], at: usize) -> &[u8; N] {
    block[at..].first_chunk().expect("a block's fields lie inside it: offsets depend on no input")
}

/// The half-precision number at byte `at` of a block, widened.
pub(crate) fn f16_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes(*bytes_at(block, at)).to_f32()
}

fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(*bytes_at(block, at))
}

fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*bytes_at(block, at))
}

/// 32 codes from 16 bytes: the low nibbles are columns 0..16, the high ones 16..32.
fn nibbles(bytes: &[u8; 16], code: impl Fn(u8) -> i8) -> [i8; 32] {
    let mut q = [0; 32];
    for (i, &b) in bytes.iter().enumerate() {
        q[i] = code(b & 15);
        q[i + 16] = code(b >> 4);
    }
    q
}

/// The low nibbles of 32 codes, as [`nibbles`] reads them.
fn pack_nibbles(q: &[u8; 32]) -> [u8; 16] {
    std::array::from_fn(|i| q[i] & 15 | (q[i + 16] & 15) << 4)
}

/// 32 codes from runs of `N`.
fn runs<const N: usize>(run: impl Fn(usize) -> [i8; N]) -> [i8; 32] {
    let mut q = [0; 32];
    for (l, out) in q.as_chunks_mut().0.iter_mut().enumerate() {
        *out = run(l);
    }
    q
}

/// Scale and minimum of the `j`-th of 8 groups, 6 bits each, as Q4_K and Q5_K pack them (ggml's
/// `get_scale_min_k4`): groups 0..4 in the low 6 bits of bytes 0..4 and 4..8; groups 4..8 in the nibbles of bytes
/// 8..12 and the two high bits that were left.
fn scale_min(packed: &[u8; 12], j: usize) -> (u8, u8) {
    if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        let nibbles = packed[j + 4];
        (nibbles & 15 | packed[j - 4] >> 6 << 4, nibbles >> 4 | packed[j] >> 6 << 4)
    }
}

/// Scales and minima of 8 groups, as [`scale_min`] reads them.
fn pack_scale_mins(sc: &[u8; 8], m: &[u8; 8]) -> [u8; 12] {
    let mut packed = [0; 12];
    for j in 0..4 {
        packed[j] = sc[j] | sc[j + 4] >> 4 << 6;
        packed[j + 4] = m[j] | m[j + 4] >> 4 << 6;
        packed[j + 8] = sc[j + 4] & 15 | (m[j + 4] & 15) << 4;
    }
    packed
}

/// Codes with the sign of the IQ2 and IQ3 formats: negative where the bit of `signs` is set.
fn signed(codes: [i8; 8], signs: u8) -> [i8; 8] {
    let mask = SIGN_MASKS[usize::from(signs)];
    std::array::from_fn(|i| (codes[i] ^ mask[i]) - mask[i])
}

/// -1 where the bit is set, 0 elsewhere: a look-up, because a byte's bits spread slowly without SIMD.
static SIGN_MASKS: [[i8; 8]; 256] = {
    let mut table = [[0; 8]; 256];
    let mut i = 0;
    while i < 256 * 8 {
        table[i / 8][i % 8] = -(((i / 8) >> (i % 8) & 1) as i8);
        i += 1;
    }
    table
};

/// Eight signs stored in 7 bits: the number of minuses is even, which gives the eighth (ggml's `ksigns_iq2xs`).
static EVEN_SIGNS: [u8; 128] = {
    let mut table = [0; 128];
    let mut i = 0;
    while i < 128 {
        table[i] = i as u8 | ((i.count_ones() as u8 & 1) << 7);
        i += 1;
    }
    table
};

/// The `l`-th of the four 7-bit sign fields in the low 28 bits of `packed`, as a byte for [`signed`].
fn even_signs(packed: u32, l: usize) -> u8 {
    EVEN_SIGNS[(packed >> (7 * l) & 127) as usize]
}
