//! Elementary functions from basic operations only, so that every machine and every level gives the same bits: no
//! libm, no estimates. Coefficients are Chebyshev fits of the named functions.

use crate::simd::Simd;

/// Horner's scheme, coefficients from the highest power down, one multiply-add a coefficient.
macro_rules! poly {
    ($s:ident, $x:expr, $first:expr $(, $rest:expr)*) => {{
        let x = $x;
        let mut y = $s.splat($first);
        $( y = $s.fma(y, x, $s.splat($rest)); )*
        y
    }};
}

/// `e^x`, within 2 ulp; 0 below -103.97, infinity above 88.73, NaN for NaN.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::F) -> S::F {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // ln 2 in two parts: the first has so few bits that its product with a whole number is exact.
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    // The operand order keeps a NaN in x.
    let x = s.min(s.splat(89.0), s.max(s.splat(-104.0), x));
    let n = s.round(s.mul(x, s.splat(LOG2_E)));
    let r = s.fma(n, s.splat(-LN2_HI), x);
    let r = s.fma(n, s.splat(-LN2_LO), r);
    let q = poly!(s, r, 1.989_929e-4, 1.393_365_4e-3, 8.333_298e-3, 4.166_646_7e-2, 1.666_666_7e-1, 0.5);
    let p = s.add(s.fma(q, s.mul(r, r), r), s.splat(1.0));
    // 2^n in two factors: n reaches -150 and 128, beyond what one exponent holds.
    let half = s.round(s.mul(n, s.splat(0.5)));
    s.mul(s.mul(p, exp2_whole(s, half)), exp2_whole(s, s.sub(n, half)))
}

/// `2^n` for whole `n` in -126..=127.
#[inline(always)]
fn exp2_whole<S: Simd>(s: S, n: S::F) -> S::F {
    s.bits_to_f(s.shl_i(s.add_i(s.to_i(n), s.splat_i(127)), 23))
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(s: S, x: S::F) -> S::F {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, neg(s, x))))
}

/// `x * sigmoid(x)`.
#[inline(always)]
pub(crate) fn silu<S: Simd>(s: S, x: S::F) -> S::F {
    s.div(x, s.add(s.splat(1.0), exp(s, neg(s, x))))
}

/// `tanh(x) = 1 - 2 / (e^2x + 1)`: absolute error below 2e-7.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::F) -> S::F {
    let one = s.splat(1.0);
    let e = exp(s, s.add(x, x));
    s.sub(one, s.div(s.splat(2.0), s.add(e, one)))
}

/// `x / 2 * (1 + erf(x / sqrt 2))`.
#[inline(always)]
pub(crate) fn gelu<S: Simd>(s: S, x: S::F) -> S::F {
    let e = erf(s, s.mul(x, s.splat(std::f32::consts::FRAC_1_SQRT_2)));
    let half = s.mul(x, s.splat(0.5));
    s.fma(half, e, half)
}

/// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`.
#[inline(always)]
pub(crate) fn gelu_tanh<S: Simd>(s: S, x: S::F) -> S::F {
    let cube = s.mul(s.mul(x, x), x);
    let inner = s.fma(s.splat(0.044_715), cube, x);
    // (1 + tanh u) / 2 = sigmoid(2u)
    s.mul(x, sigmoid(s, s.mul(s.splat(2.0 * 0.797_884_6), inner)))
}

/// The error function, absolute error below 2e-7: `x P(x^2)` up to 1, `1 - e^Q(|x|)` from there to 4, then 1.
#[inline(always)]
fn erf<S: Simd>(s: S, x: S::F) -> S::F {
    let t = s.abs(x);
    let small = s.mul(
        x,
        poly!(
            s,
            s.mul(x, x),
            7.882_497_4e-5,
            -8.018_855e-4,
            5.189_312e-3,
            -2.685_433e-2,
            1.128_359_7e-1,
            -3.761_262_6e-1,
            std::f32::consts::FRAC_2_SQRT_PI
        ),
    );
    let log_erfc = poly!(
        s,
        s.min(s.splat(4.0), t),
        -1.330_939e-5,
        3.175_720_3e-4,
        -3.436_867_6e-3,
        2.262_198_6e-2,
        -1.033_189_8e-1,
        -6.390_933_4e-1,
        -1.125_925_9,
        -7.569_686e-4
    );
    let large = s.sub(s.splat(1.0), exp(s, log_erfc));
    let large = s.select_lt(x, s.splat(0.0), neg(s, large), large);
    // A NaN is not below 1 and takes the second branch, which keeps it: min returns its second operand.
    s.select_lt(t, s.splat(1.0), small, large)
}

#[inline(always)]
pub(crate) fn neg<S: Simd>(s: S, x: S::F) -> S::F {
    s.sub(s.splat(-0.0), x)
}

/// Natural logarithm of a positive finite number, relative error about 1e-15.
pub fn ln(x: f64) -> f64 {
    // x = m * 2^k with m in [sqrt(1/2), sqrt 2); ln m = 2 atanh((m - 1) / (m + 1))
    let bits = x.to_bits();
    let mut k = ((bits >> 52) & 0x7ff) as i64 - 1023;
    let mut m = f64::from_bits(bits & ((1 << 52) - 1) | 1023 << 52);
    if m > std::f64::consts::SQRT_2 {
        m *= 0.5;
        k += 1;
    }
    let t = (m - 1.0) / (m + 1.0);
    let t2 = t * t;
    let mut sum = 0.0;
    for i in (0..13).rev() {
        sum = sum * t2 + 1.0 / f64::from(2 * i + 1);
    }
    2.0 * t * sum + k as f64 * std::f64::consts::LN_2
}

/// `e^x` for |x| < 700, relative error about 1e-15.
pub fn exp_f64(x: f64) -> f64 {
    const LN2_HI: f64 = 0.693_147_180_369_123_8;
    const LN2_LO: f64 = 1.908_214_929_270_587_7e-10;
    let n = (x * std::f64::consts::LOG2_E).round_ties_even();
    let r = (x - n * LN2_HI) - n * LN2_LO;
    let mut sum = 1.0;
    for i in (1..18).rev() {
        sum = sum * r / f64::from(i) + 1.0;
    }
    sum * f64::from_bits(((n as i64 + 1023) as u64) << 52)
}

/// `base^exponent` for a positive base.
pub fn pow(base: f64, exponent: f64) -> f64 {
    exp_f64(exponent * ln(base))
}

/// Sine and cosine of an angle in radians below about 10^8, absolute error about 1e-15.
pub fn sin_cos(x: f64) -> (f64, f64) {
    // pi / 2 in three parts of 33 bits, so that products with whole numbers below 2^20 are exact.
    const P1: f64 = 1.570_796_326_734_125_6;
    const P2: f64 = 6.077_100_506_303_966e-11;
    const P3: f64 = 2.022_266_248_795_950_6e-21;
    let n = (x * std::f64::consts::FRAC_2_PI).round_ties_even();
    let r = ((x - n * P1) - n * P2) - n * P3;
    let r2 = r * r;
    let (mut sin, mut cos) = (1.0, 1.0);
    for i in (1..10).rev() {
        sin = 1.0 - sin * r2 / f64::from(2 * i * (2 * i + 1));
        cos = 1.0 - cos * r2 / f64::from(2 * i * (2 * i - 1));
    }
    sin *= r;
    match (n as i64).rem_euclid(4) {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::{Isa, Kernel};
    use crate::simd::LANES;

    /// One function on many values, at a level.
    struct Map<'a>(usize, &'a [f32], &'a mut [f32]);

    impl Kernel for Map<'_> {
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            for (x, y) in self.1.as_chunks::<LANES>().0.iter().zip(self.2.as_chunks_mut::<LANES>().0) {
                // SAFETY: 16 numbers each.
                unsafe {
                    let x = s.load(x.as_ptr());
                    let f = match self.0 {
                        0 => exp(s, x),
                        1 => sigmoid(s, x),
                        2 => silu(s, x),
                        3 => tanh(s, x),
                        4 => gelu(s, x),
                        _ => gelu_tanh(s, x),
                    };
                    s.store(y.as_mut_ptr(), f);
                }
            }
        }
    }

    fn map(isa: Isa, function: usize, x: &[f32]) -> Vec<f32> {
        let mut y = vec![0.0; x.len()];
        isa.run(Map(function, x, &mut y));
        y
    }

    fn values() -> Vec<f32> {
        let mut x: Vec<f32> = (-120 * 64..120 * 64).map(|i| i as f32 / 64.0 + 1e-3).collect();
        x.extend((-4000..4000).map(|i| i as f32 / 1000.0));
        let edge = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, 1e-40, -1e-40, 88.72, -103.9, -104.5, 1e30, -1e30];
        x.extend(edge);
        x.resize(x.len().next_multiple_of(LANES), 1.0);
        x
    }

    #[test]
    fn every_level_gives_the_same_bits() {
        for f in 0..6 {
            let scalar: Vec<u32> = map(Isa::Scalar, f, &values()).iter().map(|y| y.to_bits()).collect();
            for &isa in Isa::available() {
                let bits: Vec<u32> = map(isa, f, &values()).iter().map(|y| y.to_bits()).collect();
                assert_eq!(bits, scalar, "function {f} at {isa}");
            }
        }
    }

    #[test]
    fn close_to_the_true_functions() {
        let erf = |x: f64| -> f64 {
            // Taylor series; enough terms for |x| < 6.
            let (mut term, mut sum) = (x, x);
            for n in 1..200 {
                term *= -x * x / f64::from(n);
                sum += term / f64::from(2 * n + 1);
            }
            if x.abs() > 5.0 { x.signum() } else { sum * 2.0 / std::f64::consts::PI.sqrt() }
        };
        type True = Box<dyn Fn(f64) -> f64>;
        let true_functions: [(&str, True); 6] = [
            ("exp", Box::new(f64::exp)),
            ("sigmoid", Box::new(|x| 1.0 / (1.0 + (-x).exp()))),
            ("silu", Box::new(|x| x / (1.0 + (-x).exp()))),
            ("tanh", Box::new(f64::tanh)),
            ("gelu", Box::new(move |x| 0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2)))),
            (
                "gelu_tanh",
                Box::new(|x| {
                    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
                }),
            ),
        ];
        for (f, (name, truth)) in true_functions.iter().enumerate() {
            for (x, y) in values().iter().zip(map(Isa::detect(), f, &values())) {
                let t = truth(f64::from(*x));
                if !t.is_finite() || t.abs() > 3.4e38 || x.abs() > 1e4 {
                    continue;
                }
                let bound =
                    if f == 0 { t.abs() * 2.4e-7 + 1e-44 } else { t.abs() * 5e-7 + x.abs().max(1.0) as f64 * 3e-7 };
                assert!((f64::from(y) - t).abs() <= bound, "{name}({x}) = {y}, expected {t}");
            }
        }
    }

    #[test]
    fn limits_and_nan() {
        let x = [f32::NEG_INFINITY, f32::INFINITY, f32::NAN, -104.0, -1e9];
        let mut padded = vec![0.0; LANES];
        padded[..x.len()].copy_from_slice(&x);
        for &isa in Isa::available() {
            let y = map(isa, 0, &padded);
            assert_eq!((y[0], y[1], y[3], y[4], y[5]), (0.0, f32::INFINITY, 0.0, 0.0, 1.0));
            for f in 0..6 {
                assert!(map(isa, f, &padded)[2].is_nan(), "function {f} keeps NaN at {isa}");
            }
        }
    }

    #[test]
    fn double_precision_helpers() {
        for i in 0..20_000 {
            let x = f64::from(i) * 7.3 - 50_000.0;
            let (sin, cos) = sin_cos(x);
            assert!((sin - x.sin()).abs() < 1e-11 && (cos - x.cos()).abs() < 1e-11, "{x}");
        }
        for base in [10_000.0, 500_000.0, 1e6, 1.5, 0.3] {
            for e in [0.0, 0.125, 0.5, 0.96875, -0.75] {
                let (p, t) = (pow(base, e), f64::powf(base, e));
                assert!((p / t - 1.0).abs() < 1e-13, "{base}^{e} = {p}, expected {t}");
            }
        }
    }
}
