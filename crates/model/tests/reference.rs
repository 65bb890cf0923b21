//! The fast backend against the plain loops of the reference, on models of any shape and format.

#![allow(clippy::unwrap_used)]

mod gguf_builder;
mod support;

use puna_kernels::dtype::FORMATS;
use puna_kernels::{Arith, DType, KvType};
use puna_model::{BackendKind, Gguf, LoadOptions};
use support::maker::{ARCHS, Experts, Rope, Spec};
use support::run::{KV_TYPES, Run, plain, relative_error};
use support::{Fixture, Rng};

/// Relative error of the logits of `n` random tokens, the worst position's too.
fn errors(gguf: &Gguf, kind: KvType, n: usize) -> (f64, f64) {
    let reference = LoadOptions { backend: BackendKind::Reference, ..plain() };
    let [mut fast, mut slow] = [plain(), reference].map(|options| Run::new(gguf, &options, kind));
    let vocab_size = fast.vocab_size();
    let tokens = Rng(n as u64).tokens(n, vocab_size);
    let (got, expected) = (fast.alone(&tokens, &[n]), slow.alone(&tokens, &[n]));
    let rows = got.chunks(vocab_size).zip(expected.chunks(vocab_size));
    let worst = rows.map(|(g, e)| relative_error(g, e)).fold(0.0, f64::max);
    (relative_error(&got, &expected), worst)
}

/// The reference is itself the same however a sequence is cut.
#[test]
fn the_reference_knows_no_chunks() {
    for fixture in Fixture::all() {
        let options = LoadOptions { backend: BackendKind::Reference, ..plain() };
        let mut run = Run::new(&fixture.gguf(), &options, KvType::F16);
        let tokens = Rng(5).tokens(40, run.vocab_size());
        let whole = run.alone(&tokens, &[40]);
        assert_eq!(run.alone(&tokens, &[7, 1]), whole, "{}", fixture.name);
    }
}

#[test]
fn float_models() {
    let ratios = [(7, 1), (14, 2), (6, 2), (5, 5), (24, 1), (20, 1), (9, 3)];
    let ropes = [Rope::Plain, Rope::Partial(4), Rope::Linear, Rope::Yarn, Rope::Llama3, Rope::Long(60)];
    let experts = Experts { n: 9, used: 3, ffn_dim: 20, split: false, sigmoid: false };
    for i in 0..28 {
        let (n_heads, n_kv_heads) = ratios[i % ratios.len()];
        let spec = Spec {
            arch: ARCHS[i % ARCHS.len()],
            n_layers: 1 + i % 3,
            n_heads,
            n_kv_heads,
            head_dim: [8, 20, 36, 6][i % 4],
            dim: [24, 45, 50][i % 3],
            ffn_dim: [37, 64, 100][i % 3],
            vocab_size: [41, 64, 97][i % 3],
            rope: ropes[i % ropes.len()],
            window: [None, Some(1), Some(19), Some(33)][i / 7],
            experts: (i % 4 == 3).then_some(Experts { split: i % 8 == 3, sigmoid: i % 3 == 0, ..experts }),
            biases: i % 5 == 0,
            scales: i % 5 == 2,
            tied: i % 3 == 2,
            types: vec![[DType::F32, DType::F16, DType::BF16][i % 3]],
            seed: i as u64,
            ..Spec::default()
        };
        let (error, _) = errors(&spec.gguf(), KvType::F32, 70);
        assert!(error <= 1e-4, "relative error {error:.1e}: {spec:?}");
        // Rounding to half precision can fall on the other side where numbers differ in their last bit.
        let (error, _) = errors(&spec.gguf(), KvType::F16, 70);
        assert!(error <= 2e-3, "relative error {error:.1e} with a cache in f16: {spec:?}");
    }
}

#[test]
fn every_weight_format() {
    for (i, format) in FORMATS.iter().enumerate() {
        let spec = Spec {
            n_heads: 6,
            n_kv_heads: 3,
            head_dim: 32,
            dim: 256,
            ffn_dim: 256,
            vocab_size: 70,
            // Every expert is chosen, so that rounding cannot choose another.
            experts: (i % 3 == 0).then_some(Experts { n: 3, used: 3, ffn_dim: 256, split: false, sigmoid: false }),
            biases: i % 2 == 0,
            types: vec![format.dtype],
            seed: i as u64,
            ..Spec::default()
        };
        let (error, worst) = errors(&spec.gguf(), KV_TYPES[i % 2], 34);
        // Activations have 8 bits where weights are quantized.
        let bound = if format.arith == Arith::Float { 2e-3 } else { 0.05 };
        assert!(error <= bound && worst <= 2.0 * bound, "{}: relative error {error:.1e}, {worst:.1e}", format.name);
    }
}
