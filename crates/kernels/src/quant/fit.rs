//! From numbers to blocks: scales and minima with the least weighted squared error, found by trying some around the
//! obvious one and solving for the best factors of the codes that each gives (as ggml's `make_qx_quants` and
//! `make_qkx2_quants` do).
//!
//! Sums run over 8 lanes in a fixed order and rounding is by addition, so that the same numbers give the same blocks on
//! every processor.

use half::f16;
use std::ops::RangeInclusive;

/// Around the obvious scale, in steps of a tenth of a code.
const STEPS: RangeInclusive<i32> = -9..=9;

/// To the nearest whole number, ties to even, for numbers below 2^22.
fn round(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23
    (x + MAGIC) - MAGIC
}

/// `sum of f(i)`.
fn sum<const N: usize>(f: impl Fn(usize) -> f32) -> f32 {
    let mut acc = [0f32; 8];
    for i in (0..N).step_by(8) {
        for (lane, acc) in acc.iter_mut().enumerate() {
            *acc += f(i + lane);
        }
    }
    let [a, b, c, d, e, f, g, h] = acc;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// What an error counts: large weights more than small ones, none nothing.
fn importance<const N: usize>(x: &[f32; N]) -> [f32; N] {
    let rms = (sum::<N>(|i| x[i] * x[i]) / N as f32).sqrt();
    x.map(|x| rms + x.abs())
}

/// The number that is largest in magnitude, with its sign; NaN where one is not finite.
pub fn extreme<const N: usize>(x: &[f32; N]) -> f32 {
    if sum::<N>(|i| x[i] * 0.0) != 0.0 {
        return f32::NAN;
    }
    x.iter().fold(0.0, |m: f32, &x| if x.abs() > m.abs() { x } else { m })
}

/// 1 / d, or 0 for a block of zeros.
pub fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// The whole number of `codes` that is nearest to each `x / d`.
pub fn codes<const N: usize>(x: &[f32; N], d: f32, codes: RangeInclusive<i32>) -> [i8; N] {
    let (inv, lo, hi) = (inverse(d), *codes.start() as f32, *codes.end() as f32);
    x.map(|x| round((x * inv).clamp(lo, hi)) as i8)
}

/// The code of `0..=top` that brings `d * q + m` nearest to each `x`.
pub fn codes_from<const N: usize>(x: &[f32; N], d: f32, m: f32, top: i32) -> [u8; N] {
    let (inv, top) = (inverse(d), top as f32);
    x.map(|x| round(((x - m) * inv).clamp(0.0, top)) as u8)
}

/// `d` for the best `x = d * q` with q one of `range`, which reaches further down than up. NaN where a number is not
/// finite, zero where all are.
pub fn scale<const N: usize>(x: &[f32; N], range: RangeInclusive<i32>) -> f32 {
    let (lo, hi) = (*range.start() as f32, *range.end() as f32);
    best_scale(x, lo, |inv| x.map(|x| round((x * inv).clamp(lo, hi))))
}

/// The same where q is one of a rising `table`.
pub fn table_scale<const N: usize>(x: &[f32; N], table: &[i8; 16]) -> f32 {
    best_scale(x, f32::from(table[0]), |inv| x.map(|x| f32::from(table[nearest(x * inv, table)])))
}

/// The index of the entry of a rising table that is nearest to `x`.
pub fn nearest(x: f32, table: &[i8]) -> usize {
    table.windows(2).map(|pair| usize::from(2.0 * x > f32::from(pair[0]) + f32::from(pair[1]))).sum()
}

/// Tries to map the extreme of `x` to codes around `end`.
fn best_scale<const N: usize>(x: &[f32; N], end: f32, quantize: impl Fn(f32) -> [f32; N]) -> f32 {
    let extreme = extreme(x);
    if extreme == 0.0 || extreme.is_nan() {
        return extreme;
    }
    let w = importance(x);
    let (mut best, mut d) = (-1.0, 0.0);
    for step in STEPS {
        let q = quantize((end + 0.1 * step as f32) / extreme);
        let (xq, qq) = (sum::<N>(|i| w[i] * x[i] * q[i]), sum::<N>(|i| w[i] * q[i] * q[i]));
        // The error of the best factor is the sum of w x^2, less this.
        let gain = xq * xq / qq;
        if gain > best {
            (best, d) = (gain, xq / qq);
        }
    }
    // Numbers so small that their squares vanish.
    if best < 0.0 { extreme / end } else { d }
}

/// `(d, m)` for the best `x = d * q + m` with q one of `0..=top`; `m <= 0` where `below_zero` is set. NaN where a
/// number is not finite.
pub fn scale_min<const N: usize>(x: &[f32; N], top: i32, below_zero: bool) -> (f32, f32) {
    if extreme(x).is_nan() {
        return (f32::NAN, f32::NAN);
    }
    let fold = |f: fn(f32, f32) -> f32| x.iter().copied().fold(x[0], f);
    let (min, max) = (fold(f32::min), fold(f32::max));
    let min = if below_zero { min.min(0.0) } else { min };
    if max <= min {
        return (0.0, min);
    }
    let (w, top) = (importance(x), top as f32);
    let error = |q: &[f32; N], d: f32, m: f32| {
        sum::<N>(|i| {
            let e = d * q[i] + m - x[i];
            w[i] * e * e
        })
    };
    let quantize = |inv: f32| x.map(|x| round(((x - min) * inv).clamp(0.0, top)));
    let mut best = ((max - min) / top, min);
    let mut least = error(&quantize(top / (max - min)), best.0, best.1);
    let (ws, wx) = (sum::<N>(|i| w[i]), sum::<N>(|i| w[i] * x[i]));
    for step in STEPS {
        let q = quantize((top + 0.1 * step as f32) / (max - min));
        let wq = sum::<N>(|i| w[i] * q[i]);
        let (qq, xq) = (sum::<N>(|i| w[i] * q[i] * q[i]), sum::<N>(|i| w[i] * x[i] * q[i]));
        let det = ws * qq - wq * wq;
        let (mut d, mut m) = ((ws * xq - wx * wq) / det, (qq * wx - wq * xq) / det);
        if below_zero && m > 0.0 {
            (d, m) = (xq / qq, 0.0);
        }
        let e = error(&q, d, m);
        if e < least {
            (least, best) = (e, (d, m));
        }
    }
    best
}

/// What a block of runs with scales and minima holds.
pub struct ScaleMins<const RUNS: usize> {
    /// Factor of the scales.
    pub d: f16,
    /// Factor of the minima, which are subtracted.
    pub dmin: f16,
    /// Scales of the runs.
    pub sc: [u8; RUNS],
    /// Minima of the runs.
    pub m: [u8; RUNS],
    /// Codes.
    pub q: [u8; 256],
}

/// Fits `RUNS` runs of `LEN` as `d * sc * q - dmin * m`, with codes up to `top_code`, scales and minima up to
/// `top_scale`.
pub fn scale_mins<const RUNS: usize, const LEN: usize>(
    x: &[f32; 256],
    top_code: i32,
    top_scale: i32,
) -> ScaleMins<RUNS> {
    let runs = x.as_chunks::<LEN>().0;
    let fits: [(f32, f32); RUNS] = std::array::from_fn(|j| scale_min(&runs[j], top_code, true));
    let (scales, mins) = (fits.map(|(d, _)| d), fits.map(|(_, m)| -m));
    let [d, dmin] = [&scales, &mins].map(|parts| f16::from_f32(extreme(parts) / top_scale as f32));
    let sc = codes_from(&scales, d.to_f32(), 0.0, top_scale);
    let m = codes_from(&mins, dmin.to_f32(), 0.0, top_scale);
    let mut q = [0; 256];
    for (j, (run, q)) in runs.iter().zip(q.as_chunks_mut::<LEN>().0).enumerate() {
        let (d, m) = (d.to_f32() * f32::from(sc[j]), -dmin.to_f32() * f32::from(m[j]));
        *q = codes_from(run, d, m, top_code);
    }
    ScaleMins { d, dmin, sc, m, q }
}

/// Fits a scale to each of `RUNS` runs of `LEN` and gives them as `d * sc` with `sc` one of `range`.
pub fn scales<const RUNS: usize, const LEN: usize>(
    x: &[f32; 256],
    range: RangeInclusive<i32>,
    fit: impl Fn(&[f32; LEN]) -> f32,
) -> (f16, [i8; RUNS]) {
    let runs = x.as_chunks::<LEN>().0;
    let scales: [f32; RUNS] = std::array::from_fn(|j| fit(&runs[j]));
    let d = f16::from_f32(extreme(&scales) / *range.start() as f32);
    (d, codes(&scales, d.to_f32(), range))
}
