//! `exp` and `ln` made of additions, multiplications and divisions alone.
//!
//! The standard library's call the platform's libm, whose last bits differ between machines; a token drawn at a
//! boundary would differ with them. IEEE 754 fixes every operation used here, so these give the same bits everywhere.

/// 1.5 * 2^52: adding it to a number of moderate size rounds that number to an integer, held in the low bits.
const ROUND: f64 = 6_755_399_441_055_744.0;
/// ln 2 in two parts; the first has trailing zero bits, so that its product with an exponent is exact.
const LN_2_HIGH: f64 = f64::from_bits(0x3fe6_2e42_fee0_0000);
const LN_2_LOW: f64 = f64::from_bits(0x3dea_39ef_3579_3c76);
/// Below this the result leaves the normal range of f64; it is given as 0.
const EXP_MIN: f64 = -708.0;
/// 1, 1, 1/2!, .. 1/13!: on |r| <= ln(2)/2 the first term left out is under 2^-57.
const EXP_TERMS: [f64; 14] = {
    let mut terms = [1.0; 14];
    let mut n = 2;
    while n < 14 {
        terms[n] = terms[n - 1] / n as f64;
        n += 1;
    }
    terms
};

/// e^x for x <= 0, with a relative error under 2^-51; 0 below -708.
#[inline]
pub(super) fn exp(x: f64) -> f64 {
    let rounded = x.max(EXP_MIN) * std::f64::consts::LOG2_E + ROUND;
    let k = rounded - ROUND;
    let r = x.max(EXP_MIN) - k * LN_2_HIGH - k * LN_2_LOW;
    // Estrin's scheme: short chains of dependent operations, unlike Horner's.
    let (r2, r4) = (r * r, (r * r) * (r * r));
    let cubic = |i: usize| (EXP_TERMS[i] + EXP_TERMS[i + 1] * r) + (EXP_TERMS[i + 2] + EXP_TERMS[i + 3] * r) * r2;
    let tail = cubic(8) + (EXP_TERMS[12] + EXP_TERMS[13] * r) * r4;
    let sum = (cubic(0) + cubic(4) * r4) + tail * (r4 * r4);
    // The low 12 bits of `rounded` are k in two's complement: plus the bias they are the exponent of 2^k.
    let power = f64::from_bits(rounded.to_bits().wrapping_add(1023) << 52);
    if x < EXP_MIN { 0.0 } else { sum * power }
}

/// The natural logarithm of a normal, positive, finite `x`; exactly 0 at 1.
pub(super) fn ln(x: f64) -> f64 {
    const MANTISSA: u64 = (1 << 52) - 1;
    let bits = x.to_bits();
    let mut k = (bits >> 52) as f64 - 1023.0;
    let mut m = f64::from_bits((bits & MANTISSA) | 1.0f64.to_bits());
    if m > std::f64::consts::SQRT_2 {
        m *= 0.5;
        k += 1.0;
    }
    // ln m = 2 artanh(s), and |s| <= 0.172: twelve terms reach the precision of f64.
    let s = (m - 1.0) / (m + 1.0);
    let mut sum = 0.0;
    for n in (0..12).rev() {
        sum = sum * (s * s) + 1.0 / f64::from(2 * n + 1);
    }
    k * LN_2_HIGH + (2.0 * s * sum + k * LN_2_LOW)
}

/// Calls `f(item, e^exponent(item))` for every item in order; every exponent is at most 0.
pub(super) fn for_each_exp<T>(items: &[T], exponent: impl Fn(&T) -> f64, mut f: impl FnMut(&T, f64)) {
    // The exponentials of a block are independent of each other: vector code.
    let mut block = [0.0; 64];
    for chunk in items.chunks(block.len()) {
        for (value, item) in block.iter_mut().zip(chunk) {
            *value = exp(exponent(item));
        }
        for (item, &value) in chunk.iter().zip(&block) {
            f(item, value);
        }
    }
}

/// The sum of e^exponent(item) in the order of the items; every exponent is at most 0.
pub(super) fn sum_exp<T>(items: &[T], exponent: impl Fn(&T) -> f64) -> f64 {
    let mut sum = 0.0;
    for_each_exp(items, exponent, |_, value| sum += value);
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_to_the_platforms() {
        for i in 0..200_000 {
            let x = -f64::from(i) * 0.003_541;
            let (ours, std) = (exp(x), x.exp());
            if x < EXP_MIN {
                assert_eq!(ours, 0.0);
            } else {
                assert!((ours - std).abs() <= 2.0 * f64::EPSILON * std, "exp({x}) = {ours}, expected {std}");
            }
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f64::NEG_INFINITY), 0.0);
    }

    #[test]
    fn exp_has_these_bits_on_every_machine() {
        let bits = [-1.0, -0.1, -3.3, -17.75, -250.0].map(|x| exp(x).to_bits());
        assert_eq!(
            bits,
            [
                0x3fd7_8b56_362c_ef38,
                0x3fec_f46d_99d5_2b3b,
                0x3fa2_e259_bb85_be85,
                0x3e54_ff6c_b83d_aa3f,
                0x2964_0f53_1e1e_6722
            ]
        );
    }

    #[test]
    fn ln_is_close_to_the_platforms() {
        let mut x = f64::MIN_POSITIVE;
        while x < 1e300 {
            let (ours, std) = (ln(x), x.ln());
            assert!((ours - std).abs() <= 4.0 * f64::EPSILON * std.abs().max(0.1), "ln({x}) = {ours}, expected {std}");
            x *= 1.0137;
        }
        assert_eq!(ln(1.0), 0.0);
        assert_eq!(ln(2.0).to_bits(), std::f64::consts::LN_2.to_bits());
    }
}
