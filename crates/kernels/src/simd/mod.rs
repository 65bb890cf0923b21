//! Sixteen lanes, written once: every kernel is generic over [`Simd`], so every level of instructions runs the same
//! floating-point operations in the same order. A level may differ only inside an exact integer operation.
//!
//! A value that implements [`Simd`] is the proof that the processor has the instructions: only
//! [`Isa::run`](crate::isa::Isa::run) makes one, after detection. All methods are `#[inline(always)]`, so that they
//! end up inside the function of `isa.rs` that enables the instructions.

mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use scalar::Scalar;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

/// Lanes of a vector, rows of a weight panel: the unit of everything here.
pub(crate) const LANES: usize = 16;

/// Operations on 16 lanes of f32 or i32 and on 64 bytes.
///
/// `max(a, b)` is `if a > b { a } else { b }` (so `b` where either is NaN) and `min` alike, as x86 has it.
/// Methods that take a pointer are unsafe: it must be valid for what the method's name says, at any alignment.
#[allow(clippy::missing_safety_doc)]
pub(crate) trait Simd: Copy {
    /// Activation rows that a matrix kernel holds in registers at once.
    const TILE: usize;

    /// 16 f32.
    type F: Copy;
    /// 16 i32.
    type I: Copy;
    /// 64 bytes.
    type B: Copy;

    fn splat(self, x: f32) -> Self::F;
    unsafe fn load(self, p: *const f32) -> Self::F;
    unsafe fn store(self, p: *mut f32, x: Self::F);
    /// Loads `n < 16` lanes; the others are zero.
    unsafe fn load_partial(self, p: *const f32, n: usize) -> Self::F;
    /// Stores the first `n < 16` lanes.
    unsafe fn store_partial(self, p: *mut f32, x: Self::F, n: usize);
    /// 16 half-precision numbers, widened.
    unsafe fn load_f16(self, p: *const u16) -> Self::F;
    /// Rounds to half precision, ties to even.
    unsafe fn store_f16(self, p: *mut u16, x: Self::F);
    /// 16 bfloat16 numbers, widened.
    unsafe fn load_bf16(self, p: *const u16) -> Self::F;

    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    fn abs(self, a: Self::F) -> Self::F;
    /// To the nearest whole number, ties to even.
    fn round(self, a: Self::F) -> Self::F;
    /// `if x < y { a } else { b }`, lane by lane.
    fn select_lt(self, x: Self::F, y: Self::F, a: Self::F, b: Self::F) -> Self::F;
    /// All lanes, for the few steps that go lane by lane.
    fn lanes(self, a: Self::F) -> [f32; LANES];

    fn splat_i(self, x: i32) -> Self::I;
    unsafe fn load_i(self, p: *const i32) -> Self::I;
    unsafe fn store_i(self, p: *mut i32, x: Self::I);
    /// 16 bytes, zero-extended.
    unsafe fn load_u8(self, p: *const u8) -> Self::I;
    /// 16 bytes, sign-extended.
    unsafe fn load_i8(self, p: *const u8) -> Self::I;
    /// Stores the lowest byte of each lane: for values in -128..=127.
    unsafe fn store_i8(self, p: *mut i8, x: Self::I);
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I;
    fn and_i(self, a: Self::I, b: Self::I) -> Self::I;
    fn or_i(self, a: Self::I, b: Self::I) -> Self::I;
    fn xor_i(self, a: Self::I, b: Self::I) -> Self::I;
    fn shl_i(self, a: Self::I, n: u32) -> Self::I;
    /// Logical shift.
    fn shr_i(self, a: Self::I, n: u32) -> Self::I;
    /// Exact where the lane is below 2^24 in magnitude.
    fn to_f(self, a: Self::I) -> Self::F;
    /// Of a whole number in the range of i32.
    fn to_i(self, a: Self::F) -> Self::I;
    /// The same bits as a float.
    fn bits_to_f(self, a: Self::I) -> Self::F;

    fn splat_b(self, x: u8) -> Self::B;
    unsafe fn load_b(self, p: *const u8) -> Self::B;
    unsafe fn store_b(self, p: *mut u8, x: Self::B);
    /// Four bytes, repeated 16 times.
    unsafe fn broadcast4(self, p: *const i8) -> Self::B;
    fn and_b(self, a: Self::B, b: Self::B) -> Self::B;
    fn or_b(self, a: Self::B, b: Self::B) -> Self::B;
    /// Shifts each byte left; bits that leave a byte may enter the next one, so a mask must follow.
    fn shl_b(self, a: Self::B, n: u32) -> Self::B;
    /// Shifts each byte right; a mask must follow.
    fn shr_b(self, a: Self::B, n: u32) -> Self::B;
    /// `table[a & 15]` of each byte; bytes of `a` must be below 16.
    fn lookup(self, table: &[u8; 16], a: Self::B) -> Self::B;

    /// Adds to each lane the exact sum of 4 products, `codes` in 0..=128 by signed `acts` in -127..=127.
    fn dot(self, acc: Self::I, codes: Self::B, acts: Self::B) -> Self::I;
    /// The start of a sum of [`Simd::dot_biased`] over activations whose sum is `-neg_sum`.
    fn start_biased(self, neg_sum: Self::I) -> Self::I;
    /// As [`Simd::dot`] for signed codes stored with 128 added; the sum starts from [`Simd::start_biased`].
    fn dot_biased(self, acc: Self::I, codes: Self::B, acts: Self::B) -> Self::I;

    /// Loads the first `n` lanes, up to all; the others are zero.
    #[inline(always)]
    unsafe fn load_n(self, p: *const f32, n: usize) -> Self::F {
        // SAFETY: the caller vouches for n elements.
        unsafe { if n == LANES { self.load(p) } else { self.load_partial(p, n) } }
    }

    /// Stores the first `n` lanes, up to all.
    #[inline(always)]
    unsafe fn store_n(self, p: *mut f32, x: Self::F, n: usize) {
        // SAFETY: the caller vouches for n elements.
        unsafe { if n == LANES { self.store(p, x) } else { self.store_partial(p, x, n) } }
    }

    /// Asks for the cache line at `p`, which need not be valid.
    #[inline(always)]
    fn prefetch(self, _p: *const u8) {}

    /// The same for later: the line comes no nearer than the second-level cache.
    #[inline(always)]
    fn prefetch_far(self, _p: *const u8) {}

    /// All lines of `bytes` at `p`, for later.
    #[inline(always)]
    fn prefetch_lines(self, p: *const u8, bytes: usize) {
        let mut at = 0;
        while at < bytes {
            self.prefetch_far(p.wrapping_add(at));
            at += 64;
        }
    }

    /// The sum of the lanes in the order of a binary tree: lane i with i + 8, then + 4, + 2, + 1.
    #[inline(always)]
    fn sum(self, a: Self::F) -> f32 {
        let mut x = self.lanes(a);
        let mut n = LANES / 2;
        while n > 0 {
            for i in 0..n {
                x[i] += x[i + n];
            }
            n /= 2;
        }
        x[0]
    }

    /// The largest lane; a NaN anywhere may be lost.
    #[inline(always)]
    fn max_lane(self, a: Self::F) -> f32 {
        let x = self.lanes(a);
        let mut m = x[0];
        for &v in &x[1..] {
            m = if m > v { m } else { v };
        }
        m
    }
}
