//! The ways in which keys and values are kept, as attention reads them.

use super::{Heads, PART, Query};
use crate::act::GROUP;
use crate::float_panel::Element;
use crate::kv::KV_BLOCK;
use crate::simd::{LANES, Simd};
use std::ops::Range;

/// The keys of a head in a block.
#[derive(Clone, Copy)]
pub struct Keys {
    pub key: *const u8,
    /// The head's values, which are asked for on the way.
    pub value: *const u8,
    pub dim: usize,
}

/// What weights are multiplied with.
pub struct Values<'a> {
    pub heads: &'a Heads,
    /// What is read after them: its keys are asked for on the way.
    pub ahead: &'a Heads,
    pub dim: usize,
}

/// A kind of cache.
pub trait Kept {
    /// Bytes of 32 keys, or of 32 values, for a dimension: about a line.
    const LINE: usize;

    /// Products of the queries with 32 keys: lane = key.
    ///
    /// # Safety
    /// `keys` are of this kind.
    unsafe fn scores<S: Simd, const N: usize>(s: S, keys: Keys, queries: &[Query; N]) -> [[S::F; 2]; N];

    /// What the values' dimensions from `d` on are multiplied with, where it is not the weights themselves.
    #[inline(always)]
    fn weights<S: Simd, const N: usize>(
        _: S,
        _: &Values,
        _: Range<usize>,
        _: usize,
        _: &[[f32; PART]; N],
    ) -> Option<[[f32; PART]; N]> {
        None
    }

    /// Bytes from a head's values to the 16 dimensions from `d` on of the one in a slot.
    fn offset(dim: usize, slot: usize, d: usize) -> usize;

    /// 16 dimensions of a value.
    ///
    /// # Safety
    /// `p` points to them.
    unsafe fn value<S: Simd>(s: S, p: *const u8) -> S::F;
}

impl<E: Element> Kept for E {
    const LINE: usize = KV_BLOCK * E::BYTES;

    /// Dimensions in order.
    #[inline(always)]
    unsafe fn scores<S: Simd, const N: usize>(s: S, keys: Keys, queries: &[Query; N]) -> [[S::F; 2]; N] {
        let mut acc = [[s.splat(0.0); 2]; N];
        for d in 0..keys.dim {
            // SAFETY: 32 keys of dimension d; queries have as many dimensions.
            unsafe {
                let lo = E::load(s, keys.key.add(d * Self::LINE));
                let hi = E::load(s, keys.key.add(d * Self::LINE + LANES * E::BYTES));
                s.prefetch_lines(keys.value.wrapping_add(d * Self::LINE), Self::LINE);
                let mut n = 0;
                while n < N {
                    let q = s.splat(*queries[n].q.get_unchecked(d));
                    acc[n] = [s.fma(q, lo, acc[n][0]), s.fma(q, hi, acc[n][1])];
                    n += 1;
                }
            }
        }
        acc
    }

    #[inline(always)]
    fn offset(dim: usize, slot: usize, d: usize) -> usize {
        (slot * dim.next_multiple_of(LANES) + d) * E::BYTES
    }

    #[inline(always)]
    unsafe fn value<S: Simd>(s: S, p: *const u8) -> S::F {
        // SAFETY: as this function.
        unsafe { E::load(s, p) }
    }
}

/// Signed bytes, with a half-precision scale for 32 dimensions of a key or a value. Layout: see `kv.rs`.
pub struct Q8;

impl Q8 {
    /// Bytes of 32 scales.
    pub const SCALES: usize = 2 * KV_BLOCK;
    /// Bytes of 32 dimensions of 32 keys: scales, then codes.
    pub const GROUP: usize = Q8::SCALES + KV_BLOCK * GROUP;
}

impl Kept for Q8 {
    const LINE: usize = Q8::GROUP / GROUP;

    /// Exact within 32 dimensions; groups of them in order.
    #[inline(always)]
    unsafe fn scores<S: Simd, const N: usize>(s: S, keys: Keys, queries: &[Query; N]) -> [[S::F; 2]; N] {
        let mut acc = [[s.splat(0.0); 2]; N];
        for g in 0..keys.dim / GROUP {
            // SAFETY: a group of 32 dimensions; queries have a block for each.
            unsafe {
                let key = keys.key.add(g * Q8::GROUP);
                let scales = [s.load_f16(key.cast()), s.load_f16(key.add(2 * LANES).cast())];
                let codes = key.add(Q8::SCALES);
                let mut sums = [[s.splat_i(0); 2]; N];
                let mut n = 0;
                while n < N {
                    let start = s.start_biased(s.splat_i(queries[n].blocks.get_unchecked(g).neg_sum));
                    sums[n] = [start; 2];
                    n += 1;
                }
                let mut quad = 0;
                while quad < GROUP / 4 {
                    let at = codes.add(quad * 4 * KV_BLOCK);
                    let (lo, hi) = (s.load_b(at), s.load_b(at.add(4 * LANES)));
                    let value = keys.value.wrapping_add(g * Q8::GROUP + quad * 4 * KV_BLOCK);
                    s.prefetch_far(value);
                    s.prefetch_far(value.wrapping_add(4 * LANES));
                    n = 0;
                    while n < N {
                        let q = s.broadcast4(queries[n].blocks.get_unchecked(g).q.as_ptr().add(4 * quad));
                        sums[n] = [s.dot_biased(sums[n][0], lo, q), s.dot_biased(sums[n][1], hi, q)];
                        n += 1;
                    }
                    quad += 1;
                }
                n = 0;
                while n < N {
                    let d = s.splat(queries[n].blocks.get_unchecked(g).d);
                    acc[n] = [
                        s.fma(s.to_f(sums[n][0]), s.mul(scales[0], d), acc[n][0]),
                        s.fma(s.to_f(sums[n][1]), s.mul(scales[1], d), acc[n][1]),
                    ];
                    n += 1;
                }
            }
        }
        acc
    }

    /// The values' scales go into the weights, once for 32 dimensions.
    #[inline(always)]
    fn weights<S: Simd, const N: usize>(
        s: S,
        values: &Values,
        blocks: Range<usize>,
        d: usize,
        p: &[[f32; PART]; N],
    ) -> Option<[[f32; PART]; N]> {
        let mut weights = [[0.0; PART]; N];
        for block in blocks {
            // SAFETY: 32 scales of the group, 32 weights of the block.
            unsafe {
                let scales = values.heads[block].1.add(d / GROUP * Q8::SCALES);
                let scales = [s.load_f16(scales.cast()), s.load_f16(scales.add(2 * LANES).cast())];
                let mut n = 0;
                while n < N {
                    let (p, w) = (p[n].as_ptr().add(block * KV_BLOCK), weights[n].as_mut_ptr().add(block * KV_BLOCK));
                    s.store(w, s.mul(s.load(p), scales[0]));
                    s.store(w.add(LANES), s.mul(s.load(p.add(LANES)), scales[1]));
                    n += 1;
                }
            }
        }
        Some(weights)
    }

    #[inline(always)]
    fn offset(dim: usize, slot: usize, d: usize) -> usize {
        dim / GROUP * Q8::SCALES + slot * dim + d
    }

    #[inline(always)]
    unsafe fn value<S: Simd>(s: S, p: *const u8) -> S::F {
        // SAFETY: as this function.
        unsafe { s.to_f(s.load_i8(p)) }
    }
}
