//! AVX2 (with FMA and F16C) and AVX-512 (F, BW, DQ, VL), each with or without its byte dot product (AVX-VNNI,
//! AVX-512 VNNI).

use super::{LANES, Simd};
use std::arch::x86_64::*;

/// Two halves of 8 lanes. `VNNI`: the processor has AVX-VNNI.
#[derive(Clone, Copy)]
pub(crate) struct Avx2<const VNNI: bool>(());

/// One register. `VNNI`: the processor has AVX-512 VNNI.
#[derive(Clone, Copy)]
pub(crate) struct Avx512<const VNNI: bool>(());

impl<const VNNI: bool> Avx2<VNNI> {
    /// # Safety
    /// The processor has AVX2, FMA and F16C, and AVX-VNNI where `VNNI` is set.
    pub(crate) unsafe fn new() -> Self {
        Avx2(())
    }
}

impl<const VNNI: bool> Avx512<VNNI> {
    /// # Safety
    /// The processor has AVX-512 F, BW, DQ and VL, and AVX-512 VNNI where `VNNI` is set.
    pub(crate) unsafe fn new() -> Self {
        Avx512(())
    }
}

/// An operation that needs nothing but the instructions.
macro_rules! op {
    ($e:expr) => {{
        // SAFETY: `self` proves the instructions, and the operation touches registers only.
        unsafe { $e }
    }};
}

/// An operation on memory.
macro_rules! mem {
    ($e:expr) => {{
        // SAFETY: `self` proves the instructions; the caller vouches for the memory.
        unsafe { $e }
    }};
}

/// The same operation on both halves.
macro_rules! two {
    ($f:ident($($x:ident),*) $(, $n:expr)?) => {
        op!([$f($($x[0]),* $(, $n)?), $f($($x[1]),* $(, $n)?)])
    };
}

/// The first `n` lanes, one half as a mask for `maskload`: `half` is 0 or 8.
#[inline(always)]
unsafe fn lanes_below(n: usize, half: usize) -> __m256i {
    let mut mask = [0i32; 8];
    for (i, m) in mask.iter_mut().enumerate() {
        *m = if half + i < n { -1 } else { 0 };
    }
    // SAFETY: the caller holds an Avx2; the array has 32 bytes.
    unsafe { _mm256_loadu_si256(mask.as_ptr().cast()) }
}

impl<const VNNI: bool> Simd for Avx2<VNNI> {
    const TILE: usize = 4;

    type F = [__m256; 2];
    type I = [__m256i; 2];
    type B = [__m256i; 2];

    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        // SAFETY: a prefetch of any address is no access.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline(always)]
    fn prefetch_far(self, p: *const u8) {
        // SAFETY: a prefetch of any address is no access.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        op!([_mm256_set1_ps(x); 2])
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::F {
        mem!([_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))])
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, x: Self::F) {
        mem!({
            _mm256_storeu_ps(p, x[0]);
            _mm256_storeu_ps(p.add(8), x[1]);
        })
    }
    #[inline(always)]
    unsafe fn load_partial(self, p: *const f32, n: usize) -> Self::F {
        mem!([_mm256_maskload_ps(p, lanes_below(n, 0)), _mm256_maskload_ps(p.wrapping_add(8), lanes_below(n, 8))])
    }
    #[inline(always)]
    unsafe fn store_partial(self, p: *mut f32, x: Self::F, n: usize) {
        mem!({
            _mm256_maskstore_ps(p, lanes_below(n, 0), x[0]);
            _mm256_maskstore_ps(p.wrapping_add(8), lanes_below(n, 8), x[1]);
        })
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> Self::F {
        mem!([_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast()))])
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, x: Self::F) {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;
        mem!({
            _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<NEAREST>(x[0]));
            _mm_storeu_si128(p.add(8).cast(), _mm256_cvtps_ph::<NEAREST>(x[1]));
        })
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> Self::F {
        mem!([
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())))),
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(8).cast()))))
        ])
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        two!(_mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        two!(_mm256_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        two!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        two!(_mm256_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        two!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        two!(_mm256_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        two!(_mm256_min_ps(a, b))
    }
    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        let sign = self.splat(-0.0);
        two!(_mm256_andnot_ps(sign, a))
    }
    #[inline(always)]
    fn round(self, a: Self::F) -> Self::F {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        op!([_mm256_round_ps::<NEAREST>(a[0]), _mm256_round_ps::<NEAREST>(a[1])])
    }
    #[inline(always)]
    fn select_lt(self, x: Self::F, y: Self::F, a: Self::F, b: Self::F) -> Self::F {
        op!([
            _mm256_blendv_ps(b[0], a[0], _mm256_cmp_ps::<_CMP_LT_OQ>(x[0], y[0])),
            _mm256_blendv_ps(b[1], a[1], _mm256_cmp_ps::<_CMP_LT_OQ>(x[1], y[1]))
        ])
    }
    #[inline(always)]
    fn lanes(self, a: Self::F) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        // SAFETY: 16 f32 of our own.
        unsafe { self.store(out.as_mut_ptr(), a) };
        out
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> Self::I {
        op!([_mm256_set1_epi32(x); 2])
    }
    #[inline(always)]
    unsafe fn load_i(self, p: *const i32) -> Self::I {
        mem!([_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(8).cast())])
    }
    #[inline(always)]
    unsafe fn store_i(self, p: *mut i32, x: Self::I) {
        mem!({
            _mm256_storeu_si256(p.cast(), x[0]);
            _mm256_storeu_si256(p.add(8).cast(), x[1]);
        })
    }
    #[inline(always)]
    unsafe fn load_u8(self, p: *const u8) -> Self::I {
        mem!([_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast())), _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.add(8).cast()))])
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const u8) -> Self::I {
        mem!([_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())), _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.add(8).cast()))])
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8, x: Self::I) {
        // 16 lanes to 16 bytes: packs interleaves the 128-bit halves, the permutation puts them in order again.
        mem!({
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(x[0], x[1]));
            let bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(p.cast(), bytes);
        })
    }
    #[inline(always)]
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I {
        two!(_mm256_add_epi32(a, b))
    }
    #[inline(always)]
    fn and_i(self, a: Self::I, b: Self::I) -> Self::I {
        two!(_mm256_and_si256(a, b))
    }
    #[inline(always)]
    fn or_i(self, a: Self::I, b: Self::I) -> Self::I {
        two!(_mm256_or_si256(a, b))
    }
    #[inline(always)]
    fn xor_i(self, a: Self::I, b: Self::I) -> Self::I {
        two!(_mm256_xor_si256(a, b))
    }
    #[inline(always)]
    fn shl_i(self, a: Self::I, n: u32) -> Self::I {
        two!(_mm256_sll_epi32(a), _mm_cvtsi32_si128(n as i32))
    }
    #[inline(always)]
    fn shr_i(self, a: Self::I, n: u32) -> Self::I {
        two!(_mm256_srl_epi32(a), _mm_cvtsi32_si128(n as i32))
    }
    #[inline(always)]
    fn to_f(self, a: Self::I) -> Self::F {
        two!(_mm256_cvtepi32_ps(a))
    }
    #[inline(always)]
    fn to_i(self, a: Self::F) -> Self::I {
        two!(_mm256_cvtps_epi32(a))
    }
    #[inline(always)]
    fn bits_to_f(self, a: Self::I) -> Self::F {
        two!(_mm256_castsi256_ps(a))
    }

    #[inline(always)]
    fn splat_b(self, x: u8) -> Self::B {
        op!([_mm256_set1_epi8(x as i8); 2])
    }
    #[inline(always)]
    unsafe fn load_b(self, p: *const u8) -> Self::B {
        mem!([_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast())])
    }
    #[inline(always)]
    unsafe fn store_b(self, p: *mut u8, x: Self::B) {
        mem!({
            _mm256_storeu_si256(p.cast(), x[0]);
            _mm256_storeu_si256(p.add(32).cast(), x[1])
        })
    }
    #[inline(always)]
    unsafe fn broadcast4(self, p: *const i8) -> Self::B {
        mem!([_mm256_set1_epi32(p.cast::<i32>().read_unaligned()); 2])
    }
    #[inline(always)]
    fn and_b(self, a: Self::B, b: Self::B) -> Self::B {
        two!(_mm256_and_si256(a, b))
    }
    #[inline(always)]
    fn or_b(self, a: Self::B, b: Self::B) -> Self::B {
        two!(_mm256_or_si256(a, b))
    }
    #[inline(always)]
    fn shl_b(self, a: Self::B, n: u32) -> Self::B {
        two!(_mm256_sll_epi16(a), _mm_cvtsi32_si128(n as i32))
    }
    #[inline(always)]
    fn shr_b(self, a: Self::B, n: u32) -> Self::B {
        two!(_mm256_srl_epi16(a), _mm_cvtsi32_si128(n as i32))
    }
    #[inline(always)]
    fn lookup(self, table: &[u8; 16], a: Self::B) -> Self::B {
        // SAFETY: 16 bytes of the table; `self` proves the instructions.
        let t = unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())) };
        op!([_mm256_shuffle_epi8(t, a[0]), _mm256_shuffle_epi8(t, a[1])])
    }

    #[inline(always)]
    fn dot(self, acc: Self::I, codes: Self::B, acts: Self::B) -> Self::I {
        if VNNI {
            return two!(_mm256_dpbusd_avx_epi32(acc, codes, acts));
        }
        // Pairs reach at most 2 * 128 * 127, which i16 holds.
        op!({
            let one = _mm256_set1_epi16(1);
            [
                _mm256_add_epi32(acc[0], _mm256_madd_epi16(_mm256_maddubs_epi16(codes[0], acts[0]), one)),
                _mm256_add_epi32(acc[1], _mm256_madd_epi16(_mm256_maddubs_epi16(codes[1], acts[1]), one)),
            ]
        })
    }
    #[inline(always)]
    fn start_biased(self, neg_sum: Self::I) -> Self::I {
        if VNNI { self.shl_i(neg_sum, 7) } else { self.splat_i(0) }
    }
    #[inline(always)]
    fn dot_biased(self, acc: Self::I, codes: Self::B, acts: Self::B) -> Self::I {
        if VNNI {
            return two!(_mm256_dpbusd_avx_epi32(acc, codes, acts));
        }
        // |code| by an activation that takes the code's sign: pairs stay within i16, as 128 * 127 * 2 does.
        op!({
            let (one, bias) = (_mm256_set1_epi16(1), _mm256_set1_epi8(-128));
            let c = [_mm256_xor_si256(codes[0], bias), _mm256_xor_si256(codes[1], bias)];
            let p = [
                _mm256_maddubs_epi16(_mm256_abs_epi8(c[0]), _mm256_sign_epi8(acts[0], c[0])),
                _mm256_maddubs_epi16(_mm256_abs_epi8(c[1]), _mm256_sign_epi8(acts[1], c[1])),
            ];
            [
                _mm256_add_epi32(acc[0], _mm256_madd_epi16(p[0], one)),
                _mm256_add_epi32(acc[1], _mm256_madd_epi16(p[1], one)),
            ]
        })
    }
}

impl<const VNNI: bool> Simd for Avx512<VNNI> {
    const TILE: usize = 10;

    type F = __m512;
    type I = __m512i;
    type B = __m512i;

    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        // SAFETY: a prefetch of any address is no access.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline(always)]
    fn prefetch_far(self, p: *const u8) {
        // SAFETY: a prefetch of any address is no access.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        op!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::F {
        mem!(_mm512_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, x: Self::F) {
        mem!(_mm512_storeu_ps(p, x))
    }
    #[inline(always)]
    unsafe fn load_partial(self, p: *const f32, n: usize) -> Self::F {
        mem!(_mm512_maskz_loadu_ps((1u16 << n) - 1, p))
    }
    #[inline(always)]
    unsafe fn store_partial(self, p: *mut f32, x: Self::F, n: usize) {
        mem!(_mm512_mask_storeu_ps(p, (1u16 << n) - 1, x))
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> Self::F {
        mem!(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast())))
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, x: Self::F) {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        mem!(_mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<NEAREST>(x)))
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> Self::F {
        mem!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())))))
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        op!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        op!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        op!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        op!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        op!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        op!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        op!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        op!(_mm512_abs_ps(a))
    }
    #[inline(always)]
    fn round(self, a: Self::F) -> Self::F {
        op!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a))
    }
    #[inline(always)]
    fn select_lt(self, x: Self::F, y: Self::F, a: Self::F, b: Self::F) -> Self::F {
        op!(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, y), b, a))
    }
    #[inline(always)]
    fn lanes(self, a: Self::F) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        // SAFETY: 16 f32 of our own.
        unsafe { self.store(out.as_mut_ptr(), a) };
        out
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> Self::I {
        op!(_mm512_set1_epi32(x))
    }
    #[inline(always)]
    unsafe fn load_i(self, p: *const i32) -> Self::I {
        mem!(_mm512_loadu_epi32(p))
    }
    #[inline(always)]
    unsafe fn store_i(self, p: *mut i32, x: Self::I) {
        mem!(_mm512_storeu_epi32(p, x))
    }
    #[inline(always)]
    unsafe fn load_u8(self, p: *const u8) -> Self::I {
        mem!(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())))
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const u8) -> Self::I {
        mem!(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())))
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8, x: Self::I) {
        mem!(_mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(x)))
    }
    #[inline(always)]
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I {
        op!(_mm512_add_epi32(a, b))
    }
    #[inline(always)]
    fn and_i(self, a: Self::I, b: Self::I) -> Self::I {
        op!(_mm512_and_si512(a, b))
    }
    #[inline(always)]
    fn or_i(self, a: Self::I, b: Self::I) -> Self::I {
        op!(_mm512_or_si512(a, b))
    }
    #[inline(always)]
    fn xor_i(self, a: Self::I, b: Self::I) -> Self::I {
        op!(_mm512_xor_si512(a, b))
    }
    #[inline(always)]
    fn shl_i(self, a: Self::I, n: u32) -> Self::I {
        op!(_mm512_sll_epi32(a, _mm_cvtsi32_si128(n as i32)))
    }
    #[inline(always)]
    fn shr_i(self, a: Self::I, n: u32) -> Self::I {
        op!(_mm512_srl_epi32(a, _mm_cvtsi32_si128(n as i32)))
    }
    #[inline(always)]
    fn to_f(self, a: Self::I) -> Self::F {
        op!(_mm512_cvtepi32_ps(a))
    }
    #[inline(always)]
    fn to_i(self, a: Self::F) -> Self::I {
        op!(_mm512_cvtps_epi32(a))
    }
    #[inline(always)]
    fn bits_to_f(self, a: Self::I) -> Self::F {
        op!(_mm512_castsi512_ps(a))
    }

    #[inline(always)]
    fn splat_b(self, x: u8) -> Self::B {
        op!(_mm512_set1_epi8(x as i8))
    }
    #[inline(always)]
    unsafe fn load_b(self, p: *const u8) -> Self::B {
        mem!(_mm512_loadu_si512(p.cast()))
    }
    #[inline(always)]
    unsafe fn store_b(self, p: *mut u8, x: Self::B) {
        mem!(_mm512_storeu_si512(p.cast(), x))
    }
    #[inline(always)]
    unsafe fn broadcast4(self, p: *const i8) -> Self::B {
        mem!(_mm512_set1_epi32(p.cast::<i32>().read_unaligned()))
    }
    #[inline(always)]
    fn and_b(self, a: Self::B, b: Self::B) -> Self::B {
        op!(_mm512_and_si512(a, b))
    }
    #[inline(always)]
    fn or_b(self, a: Self::B, b: Self::B) -> Self::B {
        op!(_mm512_or_si512(a, b))
    }
    #[inline(always)]
    fn shl_b(self, a: Self::B, n: u32) -> Self::B {
        op!(_mm512_sll_epi16(a, _mm_cvtsi32_si128(n as i32)))
    }
    #[inline(always)]
    fn shr_b(self, a: Self::B, n: u32) -> Self::B {
        op!(_mm512_srl_epi16(a, _mm_cvtsi32_si128(n as i32)))
    }
    #[inline(always)]
    fn lookup(self, table: &[u8; 16], a: Self::B) -> Self::B {
        // SAFETY: 16 bytes of the table; `self` proves the instructions.
        let t = unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())) };
        op!(_mm512_shuffle_epi8(t, a))
    }

    #[inline(always)]
    fn dot(self, acc: Self::I, codes: Self::B, acts: Self::B) -> Self::I {
        if VNNI {
            return op!(_mm512_dpbusd_epi32(acc, codes, acts));
        }
        op!({
            let pairs = _mm512_maddubs_epi16(codes, acts);
            _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
        })
    }
    #[inline(always)]
    fn start_biased(self, neg_sum: Self::I) -> Self::I {
        self.shl_i(neg_sum, 7)
    }
    #[inline(always)]
    fn dot_biased(self, acc: Self::I, codes: Self::B, acts: Self::B) -> Self::I {
        if VNNI {
            return op!(_mm512_dpbusd_epi32(acc, codes, acts));
        }
        // Codes up to 255 would saturate i16, so they go in as two summands of at most 128.
        op!({
            let half = _mm512_avg_epu8(codes, _mm512_setzero_si512());
            let rest = _mm512_sub_epi8(codes, half);
            self.dot(self.dot(acc, half, acts), rest, acts)
        })
    }
}
