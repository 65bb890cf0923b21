//! Blocks made from numbers: at most 1 % worse than ggml makes them, and what is not finite stays visible.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use puna_kernels::dtype::FORMATS;
use puna_kernels::{DType, quantize};

/// Relative error (root of summed squares) of ggml's own quantizers, without importance, on [`sample`].
const GGML: &[(DType, f64)] = &[
    (DType::Q4_0, 0.13623),
    (DType::Q4_1, 0.09425),
    (DType::Q5_0, 0.06846),
    (DType::Q5_1, 0.04511),
    (DType::Q8_0, 0.00864),
    (DType::Q2_K, 0.33306),
    (DType::Q3_K, 0.19487),
    (DType::Q4_K, 0.08824),
    (DType::Q5_K, 0.04397),
    (DType::Q6_K, 0.02561),
    (DType::IQ4_NL, 0.10593),
    (DType::IQ4_XS, 0.10760),
    (DType::MXFP4, 0.14660),
];

/// 64 x 256 numbers as weights are: a bell, and one in 97 eight times as large.
fn sample() -> Vec<f32> {
    let mut state = 1u32;
    let mut uniform = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f64::from(state >> 8) / f64::from(1 << 24) - 0.5
    };
    let mut bell = |i| (0..4).map(|_| uniform()).sum::<f64>() * if i % 97 == 0 { 8.0 } else { 1.0 };
    (0..256 * 64).map(|i| bell(i) as f32).collect()
}

fn round_trip(dtype: DType, x: &[f32]) -> Vec<f32> {
    let mut blocks = vec![0xa5; dtype.row_bytes(x.len()).unwrap()];
    quantize(dtype, x, &mut blocks);
    let mut y = vec![0.0; x.len()];
    (dtype.format().dequantize)(&blocks, &mut y);
    y
}

fn error(x: &[f32], y: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let error: f64 = x.iter().zip(y).map(|(x, y)| square(f64::from(*x) - f64::from(*y))).sum();
    (error / x.iter().map(|x| square(f64::from(*x))).sum::<f64>()).sqrt()
}

fn made() -> impl Iterator<Item = DType> {
    FORMATS.iter().map(|f| f.dtype).filter(|d| d.can_quantize())
}

#[test]
fn blocks_err_no_more_than_ggmls() {
    let x = sample();
    for dtype in made().filter(|d| d.format().block_len > 1) {
        let &(_, ggml) = GGML.iter().find(|(d, _)| *d == dtype).expect("every format that is made has a reference");
        let own = error(&x, &round_trip(dtype, &x));
        println!("{dtype:?}: {own:.5}, ggml {ggml}");
        assert!(own <= ggml * 1.01, "{dtype:?}: error {own:.5}, ggml's {ggml}");
    }
}

#[test]
fn floats_round_to_nearest() {
    let x = [1.0, -0.1, 65504.0, 1e-8, 3.4e38];
    assert_eq!(round_trip(DType::F32, &x), x);
    assert_eq!(round_trip(DType::F16, &x), x.map(|x| half::f16::from_f32(x).to_f32()));
    assert_eq!(round_trip(DType::BF16, &x), x.map(|x| half::bf16::from_f32(x).to_f32()));
}

#[test]
fn what_is_not_finite_stays_visible() {
    for dtype in made() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = vec![0.5; 256];
            x[100] = bad;
            let y = round_trip(dtype, &x);
            assert!(!y[100].is_finite(), "{dtype:?}: {bad} became {}", y[100]);
        }
    }
}

/// Numbers that share a scale.
fn run(dtype: DType) -> usize {
    if matches!(dtype, DType::Q2_K | DType::Q3_K | DType::Q6_K) { 16 } else { 32 }
}

/// The root of the mean squared error, as it counts when scales are chosen: large numbers more than small ones.
fn weighted_error(x: &[f32], y: &[f32]) -> f32 {
    let rms = (x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32).sqrt();
    let weight = |x: f32| rms + x.abs();
    let error: f32 = x.iter().zip(y).map(|(x, y)| weight(*x) * (x - y) * (x - y)).sum();
    (error / x.iter().map(|x| weight(*x)).sum::<f32>().max(f32::MIN_POSITIVE)).sqrt()
}

/// The part of the largest number that the error can reach. The obvious scale is among those that are tried, so the best
/// one errs no more than it does: half a step, which for the four levels of Q2_K is a third, or what a signed range
/// cuts off at its shorter end, which is a quarter in Q3_K and MXFP4. Rounding scales and minima adds a tenth in Q2_K (3
/// codes of half a fifteenth of two thirds, and half a fifteenth) and 4 codes of half a thirty-second in Q3_K.
fn share(dtype: DType) -> f32 {
    match dtype {
        DType::Q2_K => 0.435,
        DType::Q3_K => 0.315,
        _ => 0.255,
    }
}

/// What half precision is too coarse for: a scale of it is lost below 2^-25, times 32 * 128 in Q6_K.
const LOST: f32 = 1.3e-4;

proptest! {
    // A bound that holds for all holds for many.
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn any_magnitude_keeps_its_blocks_near(seed: u64, exponent in -12i32..4, zeros in 0usize..256) {
        let mut state = seed;
        let scale = 10f32.powi(exponent);
        let mut x: Vec<f32> = (0..256).map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale
        }).collect();
        x[..zeros].fill(0.0);
        for dtype in made() {
            let y = round_trip(dtype, &x);
            let max = x.iter().fold(0f32, |m, x| m.max(x.abs()));
            for (x, y) in x.chunks(run(dtype)).zip(y.chunks(run(dtype))) {
                let (error, bound) = (weighted_error(x, y), share(dtype) * max + LOST);
                prop_assert!(error <= bound, "{:?}: {:?} became {:?}: {} > {}", dtype, x, y, error, bound);
            }
        }
    }
}
