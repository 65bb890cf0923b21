//! Operations on rows against their definitions in double precision, and against themselves at every level and on any
//! number of threads, bit for bit, on rows of any length.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use puna_kernels::ops::{self, Activation, RopeTable, Routing};
use puna_kernels::{Exec, Isa};

/// A small generator of repeatable numbers (xorshift) of magnitudes from 1e-3 to `scale`, zeros among them.
fn random(n: usize, scale: f32, seed: u64) -> Vec<f32> {
    let mut x = seed | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|i| if i % 29 == 11 { 0.0 } else { next() * scale }).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// The result of `f`, which must be the same bits everywhere.
#[track_caller]
fn same(what: &str, f: impl Fn(&Exec) -> Vec<f32>) -> Vec<f32> {
    let first = f(&Exec::new(Isa::Scalar, 1));
    for &isa in Isa::available() {
        for threads in [1, 3] {
            assert_eq!(bits(&f(&Exec::new(isa, threads))), bits(&first), "{what} at {isa} on {threads} threads");
        }
    }
    first
}

#[track_caller]
fn close(what: &str, got: &[f32], expected: impl IntoIterator<Item = f64>, bound: f64) {
    let expected: Vec<f64> = expected.into_iter().collect();
    assert_eq!(got.len(), expected.len(), "{what}: numbers");
    for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
        let error = (f64::from(*got) - expected).abs();
        assert!(error <= bound * expected.abs().max(1.0), "{what}: number {i} is {got}, expected {expected}");
    }
}

fn f64s(x: &[f32]) -> impl Iterator<Item = f64> {
    x.iter().map(|&x| f64::from(x))
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig::with_cases(if cfg!(miri) { 2 } else { cases })
}

proptest! {
    #![proptest_config(cases(128))]

    #[test]
    fn norms(rows in 1usize..9, width in prop_oneof![1usize..70, 4000usize..4200], scale in 1e-3f32..50.0, seed: u64) {
        let (x, weight, eps) = (random(rows * width, scale, seed), random(width, 2.0, seed ^ 9), 1e-5);
        let got = same("rms_norm", |exec| {
            let mut out = vec![f32::NAN; x.len()];
            ops::rms_norm(exec, &x, &weight, eps, &mut out);
            out
        });
        let in_place = same("rms_norm_in_place", |exec| {
            let mut x = x.clone();
            ops::rms_norm_in_place(exec, &mut x, &weight, eps);
            x
        });
        prop_assert_eq!(bits(&got), bits(&in_place));
        let expected = x.chunks(width).flat_map(|row| {
            let mean = f64s(row).map(|x| x * x).sum::<f64>() / width as f64;
            let scale = 1.0 / (mean + f64::from(eps)).sqrt();
            f64s(row).zip(f64s(&weight)).map(|(x, w)| x * scale * w).collect::<Vec<_>>()
        });
        close("rms_norm", &got, expected, 1e-5);
    }

    #[test]
    fn rotations(rows in 1usize..40, n_heads in 1usize..5, half in 1usize..70, rest in 0usize..20, seed: u64) {
        let head_dim = 2 * half + rest;
        let x = random(rows * n_heads * head_dim, 3.0, seed);
        let angles = random(rows * half, 3.0, seed ^ 3);
        let [cos, sin]: [Vec<f32>; 2] = [f32::cos, f32::sin].map(|f| angles.iter().map(|&a| f(a)).collect());
        let got = same("rope", |exec| {
            let mut x = x.clone();
            ops::rope(exec, &mut x, n_heads, head_dim, &RopeTable { cos: &cos, sin: &sin, half });
            x
        });
        let expected = x.chunks(head_dim).enumerate().flat_map(|(i, head)| {
            let table = i / n_heads * half;
            let head: Vec<f64> = f64s(head).collect();
            let turned = |d: usize| {
                let pair = d % half;
                let (cos, sin) = (f64::from(cos[table + pair]), f64::from(sin[table + pair]));
                let (a, b) = (head[pair], head[pair + half]);
                if d < half { a * cos - b * sin } else { b * cos + a * sin }
            };
            (0..head_dim).map(|d| if d < 2 * half { turned(d) } else { head[d] }).collect::<Vec<_>>()
        });
        close("rope", &got, expected, 1e-6);
    }

    #[test]
    fn pointwise(n in prop_oneof![1usize..100, 4000usize..9000], scale in 1e-2f32..90.0, seed: u64) {
        let (a, b) = (random(n, scale, seed), random(n, 2.0, seed ^ 5));
        for activation in [Activation::Silu, Activation::GeluTanh, Activation::Gelu] {
            let got = same("glu", |exec| {
                let mut out = vec![f32::NAN; n];
                ops::glu(exec, activation, &a, &b, &mut out);
                out
            });
            let gate = |x: f64| match activation {
                Activation::Silu => x * sigmoid(x),
                // Its error function is compared with the true one beside it in math.rs; these two differ by 5e-4.
                _ => x * sigmoid(2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x)),
            };
            let bound = if activation == Activation::Gelu { 2e-3 } else { 2e-6 };
            close("glu", &got, f64s(&a).zip(f64s(&b)).map(|(a, b)| gate(a) * b), bound);
        }
        let on = |f: &dyn Fn(&Exec, &mut [f32])| same("an operation in place", |exec| {
            let mut x = a.clone();
            f(exec, &mut x);
            x
        });
        let added = on(&|exec, x| ops::add_scaled(exec, x, &b, 0.3));
        close("add_scaled", &added, f64s(&a).zip(f64s(&b)).map(|(a, b)| a + b * f64::from(0.3f32)), 1e-6);
        let scaled = on(&|exec, x| ops::scale(exec, x, 0.3));
        close("scale", &scaled, f64s(&a).map(|a| a * f64::from(0.3f32)), 1e-6);
        let capped = on(&|exec, x| ops::softcap(exec, x, 30.0));
        close("softcap", &capped, f64s(&a).map(|a| 30.0 * (a / 30.0).tanh()), 1e-5);
    }

    #[test]
    fn routes(
        rows in 1usize..6, n_experts in 1usize..140, wish in 1usize..9, sigmoid_scores: bool, normalize: bool, corrected: bool,
        seed: u64,
    ) {
        let used = wish.min(n_experts);
        let routing = Routing { used, sigmoid: sigmoid_scores, normalize, scale: 1.5 };
        let logits = random(rows * n_experts, 4.0, seed);
        let correction = corrected.then(|| random(n_experts, 0.3, seed ^ 4));
        let run = |exec: &Exec| {
            let (mut scores, mut ids, mut weights) = (logits.clone(), vec![0; rows * used], vec![0.0; rows * used]);
            ops::route(exec, &routing, &mut scores, correction.as_deref(), &mut ids, &mut weights);
            (ids, weights, scores)
        };
        let numbers = same("route", |exec| {
            let (ids, weights, scores) = run(exec);
            ids.iter().map(|&id| id as f32).chain(weights).chain(scores).collect()
        });
        let (ids, weights, scores) = run(&Exec::new(Isa::Scalar, 1));
        prop_assert_eq!(numbers.len(), 2 * rows * used + rows * n_experts);
        let expected = logits.chunks(n_experts).flat_map(|row| {
            let sum: f64 = f64s(row).map(f64::exp).sum();
            f64s(row).map(|x| if sigmoid_scores { sigmoid(x) } else { x.exp() / sum }).collect::<Vec<_>>()
        });
        close("scores", &scores, expected, 1e-6);
        for (row, (ids, weights)) in ids.chunks(used).zip(weights.chunks(used)).enumerate() {
            let scores = &scores[row * n_experts..][..n_experts];
            let key = |e: u32| scores[e as usize] + correction.as_ref().map_or(0.0, |c| c[e as usize]);
            let mut order: Vec<u32> = (0..n_experts as u32).collect();
            order.sort_by(|&a, &b| key(b).total_cmp(&key(a)).then(a.cmp(&b)));
            prop_assert_eq!(ids, &order[..used]);
            let sum: f64 = ids.iter().map(|&id| f64::from(scores[id as usize])).sum();
            let weight = |id: &u32| f64::from(scores[*id as usize]) / if normalize { sum } else { 1.0 } * 1.5;
            close("weights", weights, ids.iter().map(weight), 1e-6);
        }
    }

    #[test]
    fn sums_of_experts(
        rows in 1usize..20, width in prop_oneof![1usize..70, 1000usize..1100], used in 1usize..9, seed: u64,
    ) {
        let y = random(rows * used * width, 2.0, seed);
        let slots: Vec<u32> = (0..(rows * used) as u32).rev().collect();
        let weights = random(rows * used, 1.0, seed ^ 2);
        let got = same("weighted_sum", |exec| {
            let mut out = vec![f32::NAN; rows * width];
            ops::weighted_sum(exec, &y, width, &slots, &weights, &mut out);
            out
        });
        let expected = (0..rows * width).map(|i| {
            let (row, col) = (i / width, i % width);
            let term = |k: usize| f64::from(weights[k]) * f64::from(y[slots[k] as usize * width + col]);
            (row * used..(row + 1) * used).map(term).sum::<f64>()
        });
        close("weighted_sum", &got, expected, 1e-5);

        let (x, gate) = (random(rows * width, 2.0, seed ^ 7), random(rows, 5.0, seed ^ 8));
        let h = &y[..rows * width];
        for gate in [None, Some(&gate[..])] {
            let got = same("add_gated", |exec| {
                let mut x = x.clone();
                ops::add_gated(exec, &mut x, h, gate);
                x
            });
            let scale = |i: usize| gate.map_or(1.0, |gate| sigmoid(f64::from(gate[i / width])));
            close("add_gated", &got, f64s(&x).zip(f64s(h)).enumerate().map(|(i, (x, h))| x + h * scale(i)), 1e-6);
        }
    }
}

/// What is not finite stays where it is, and is the same at every level.
#[test]
fn what_is_not_finite_stays_in_its_place() {
    let kinds = |x: &[f32]| x.iter().map(|x| (!x.is_nan()).then(|| x.to_bits())).collect::<Vec<_>>();
    let mut x = random(3 * 37, 2.0, 4);
    (x[40], x[50], x[60]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
    let weight = random(37, 1.0, 5);
    let run = |isa: Isa| {
        let exec = Exec::new(isa, 2);
        let mut norm = vec![0.0; x.len()];
        ops::rms_norm(&exec, &x, &weight, 1e-5, &mut norm);
        let [silu, gelu, gelu_tanh] = [Activation::Silu, Activation::Gelu, Activation::GeluTanh].map(|activation| {
            let mut out = vec![0.0; x.len()];
            ops::glu(&exec, activation, &x, &x, &mut out);
            out
        });
        let mut capped = x.clone();
        ops::softcap(&exec, &mut capped, 30.0);
        [norm, silu, gelu, gelu_tanh, capped]
    };
    let first = run(Isa::Scalar);
    for &isa in Isa::available() {
        for (got, first) in run(isa).iter().zip(&first) {
            assert_eq!(kinds(got), kinds(first), "{isa}");
        }
    }
    let [norm, silu, ..] = &first;
    assert!(norm[..37].iter().chain(&norm[74..]).all(|x| x.is_finite()), "other rows");
    assert!(norm[40].is_nan() && silu[40].is_nan() && silu[50] == f32::INFINITY && silu[41].is_finite());
}
