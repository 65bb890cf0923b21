//! Plain Rust: the meaning of every operation, and what runs where no faster level exists.

use super::{LANES, Simd};
use half::{bf16, f16};

/// The level every processor has.
#[derive(Clone, Copy)]
pub(crate) struct Scalar;

macro_rules! each {
    ($i:ident => $e:expr) => {{
        let mut out = [Default::default(); LANES];
        let mut $i = 0;
        while $i < LANES {
            out[$i] = $e;
            $i += 1;
        }
        out
    }};
}

macro_rules! each_byte {
    ($i:ident => $e:expr) => {{
        let mut out = [0u8; 64];
        let mut $i = 0;
        while $i < 64 {
            out[$i] = $e;
            $i += 1;
        }
        out
    }};
}

impl Simd for Scalar {
    const TILE: usize = 4;

    type F = [f32; LANES];
    type I = [i32; LANES];
    type B = [u8; 64];

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::F {
        // SAFETY: the caller vouches for 16 f32.
        unsafe { p.cast::<Self::F>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, x: Self::F) {
        // SAFETY: the caller vouches for 16 f32.
        unsafe { p.cast::<Self::F>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn load_partial(self, p: *const f32, n: usize) -> Self::F {
        // SAFETY: the caller vouches for n f32.
        each!(i => if i < n { unsafe { p.add(i).read_unaligned() } } else { 0.0 })
    }
    #[inline(always)]
    unsafe fn store_partial(self, p: *mut f32, x: Self::F, n: usize) {
        for (i, v) in x.iter().enumerate().take(n) {
            // SAFETY: the caller vouches for n f32.
            unsafe { p.add(i).write_unaligned(*v) }
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> Self::F {
        // SAFETY: the caller vouches for 16 numbers.
        let x = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        each!(i => f16::from_bits(x[i]).to_f32())
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, x: Self::F) {
        let h: [u16; LANES] = each!(i => f16::from_f32(x[i]).to_bits());
        // SAFETY: the caller vouches for 16 numbers.
        unsafe { p.cast::<[u16; LANES]>().write_unaligned(h) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> Self::F {
        // SAFETY: the caller vouches for 16 numbers.
        let x = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        each!(i => bf16::from_bits(x[i]).to_f32())
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        each!(i => a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        each!(i => a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        each!(i => a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        each!(i => a[i] / b[i])
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        each!(i => a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        each!(i => if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        each!(i => if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        each!(i => a[i].abs())
    }
    #[inline(always)]
    fn round(self, a: Self::F) -> Self::F {
        each!(i => a[i].round_ties_even())
    }
    #[inline(always)]
    fn select_lt(self, x: Self::F, y: Self::F, a: Self::F, b: Self::F) -> Self::F {
        each!(i => if x[i] < y[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn lanes(self, a: Self::F) -> [f32; LANES] {
        a
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> Self::I {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load_i(self, p: *const i32) -> Self::I {
        // SAFETY: the caller vouches for 16 elements.
        unsafe { p.cast::<[i32; LANES]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_i(self, p: *mut i32, x: Self::I) {
        // SAFETY: the caller vouches for 16 elements.
        unsafe { p.cast::<[i32; LANES]>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn load_u8(self, p: *const u8) -> Self::I {
        // SAFETY: the caller vouches for 16 bytes.
        let x = unsafe { p.cast::<[u8; LANES]>().read_unaligned() };
        each!(i => i32::from(x[i]))
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const u8) -> Self::I {
        // SAFETY: the caller vouches for 16 bytes.
        let x = unsafe { p.cast::<[i8; LANES]>().read_unaligned() };
        each!(i => i32::from(x[i]))
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8, x: Self::I) {
        let b: [i8; LANES] = each!(i => x[i] as i8);
        // SAFETY: the caller vouches for 16 bytes.
        unsafe { p.cast::<[i8; LANES]>().write_unaligned(b) }
    }
    #[inline(always)]
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I {
        each!(i => a[i].wrapping_add(b[i]))
    }
    #[inline(always)]
    fn and_i(self, a: Self::I, b: Self::I) -> Self::I {
        each!(i => a[i] & b[i])
    }
    #[inline(always)]
    fn or_i(self, a: Self::I, b: Self::I) -> Self::I {
        each!(i => a[i] | b[i])
    }
    #[inline(always)]
    fn xor_i(self, a: Self::I, b: Self::I) -> Self::I {
        each!(i => a[i] ^ b[i])
    }
    #[inline(always)]
    fn shl_i(self, a: Self::I, n: u32) -> Self::I {
        each!(i => a[i] << n)
    }
    #[inline(always)]
    fn shr_i(self, a: Self::I, n: u32) -> Self::I {
        each!(i => ((a[i] as u32) >> n) as i32)
    }
    #[inline(always)]
    fn to_f(self, a: Self::I) -> Self::F {
        each!(i => a[i] as f32)
    }
    #[inline(always)]
    fn to_i(self, a: Self::F) -> Self::I {
        each!(i => a[i] as i32)
    }
    #[inline(always)]
    fn bits_to_f(self, a: Self::I) -> Self::F {
        each!(i => f32::from_bits(a[i] as u32))
    }

    #[inline(always)]
    fn splat_b(self, x: u8) -> Self::B {
        [x; 64]
    }
    #[inline(always)]
    unsafe fn load_b(self, p: *const u8) -> Self::B {
        // SAFETY: the caller vouches for 64 bytes.
        unsafe { p.cast::<Self::B>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_b(self, p: *mut u8, x: Self::B) {
        // SAFETY: the caller vouches for 64 bytes.
        unsafe { p.cast::<Self::B>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn broadcast4(self, p: *const i8) -> Self::B {
        // SAFETY: the caller vouches for 4 bytes.
        let x = unsafe { p.cast::<[u8; 4]>().read_unaligned() };
        each_byte!(i => x[i % 4])
    }
    #[inline(always)]
    fn and_b(self, a: Self::B, b: Self::B) -> Self::B {
        each_byte!(i => a[i] & b[i])
    }
    #[inline(always)]
    fn or_b(self, a: Self::B, b: Self::B) -> Self::B {
        each_byte!(i => a[i] | b[i])
    }
    #[inline(always)]
    fn shl_b(self, a: Self::B, n: u32) -> Self::B {
        each_byte!(i => a[i] << n)
    }
    #[inline(always)]
    fn shr_b(self, a: Self::B, n: u32) -> Self::B {
        each_byte!(i => a[i] >> n)
    }
    #[inline(always)]
    fn lookup(self, table: &[u8; 16], a: Self::B) -> Self::B {
        each_byte!(i => table[usize::from(a[i] & 15)])
    }

    #[inline(always)]
    fn dot(self, acc: Self::I, codes: Self::B, acts: Self::B) -> Self::I {
        each!(i => {
            let mut sum = acc[i];
            let mut j = 4 * i;
            while j < 4 * i + 4 {
                sum += i32::from(codes[j]) * i32::from(acts[j] as i8);
                j += 1;
            }
            sum
        })
    }
    #[inline(always)]
    fn start_biased(self, _neg_sum: Self::I) -> Self::I {
        [0; LANES]
    }
    #[inline(always)]
    fn dot_biased(self, acc: Self::I, codes: Self::B, acts: Self::B) -> Self::I {
        each!(i => {
            let mut sum = acc[i];
            let mut j = 4 * i;
            while j < 4 * i + 4 {
                sum += i32::from((codes[j] ^ 0x80) as i8) * i32::from(acts[j] as i8);
                j += 1;
            }
            sum
        })
    }
}
