//! What metadata keys say, models do: each has the effect of another change of the model that needs no key.

#![allow(clippy::unwrap_used)]

mod gguf_builder;
mod support;

use gguf_builder::{self as gb, Builder, Tensor};
use puna_kernels::KvType;
use support::Rng;
use support::maker::{Experts, Spec, parse};
use support::run::{Run, assert_same, plain, relative_error};

const VOCAB: usize = 50;

fn dense() -> Builder {
    Spec::default().builder()
}

fn mixture(used: usize) -> Builder {
    let experts = Some(Experts { n: 4, used, ffn_dim: 24, split: false, sigmoid: false });
    Spec { experts, ..Spec::default() }.builder()
}

fn with(builder: Builder, key: &str, value: f32) -> Builder {
    builder.with(format!("llama.{key}"), gb::f32(value))
}

fn logits(builder: &Builder) -> Vec<f32> {
    let tokens = Rng(6).tokens(40, VOCAB);
    Run::new(&parse(builder), &plain(), KvType::F32).alone(&tokens, &[40])
}

/// The numbers of tensors whose name is `part` or, in a layer, begins with it, times a power of two: exact in every product and sum.
fn scaled(builder: Builder, part: &str, factor: f32) -> Builder {
    assert!(factor.log2().fract() == 0.0);
    let mut found = 0;
    let scaled = builder.map(|mut t: Tensor| {
        let name = std::str::from_utf8(&t.name).unwrap();
        if name.splitn(3, '.').last().unwrap().starts_with(part) || name == part {
            found += 1;
            for number in t.data.as_chunks_mut().0 {
                *number = (f32::from_le_bytes(*number) * factor).to_le_bytes();
            }
        }
        vec![t]
    });
    assert!(found > 0, "no tensor {part}");
    scaled
}

#[track_caller]
fn same(key: &Builder, other: &Builder) {
    let expected = logits(other);
    assert_same(&logits(key), &expected, VOCAB, "with the key");
    // The key must matter, or the equality says nothing.
    assert!(relative_error(&expected, &logits(&dense())) > 0.01);
}

#[test]
fn scales() {
    same(&with(dense(), "embedding_scale", 4.0), &scaled(dense(), "token_embd.weight", 4.0));
    let branches = |b, factor| scaled(scaled(b, "attn_output", factor), "ffn_down", factor);
    same(&with(dense(), "residual_scale", 0.25), &branches(dense(), 0.25));
    same(&with(dense(), "logit_scale", 0.5), &scaled(dense(), "output.weight", 0.5));
    // Scores are q k / sqrt(8) by themselves.
    same(&with(dense(), "attention.scale", 4.0 / 8f32.sqrt()), &scaled(dense(), "attn_q.", 4.0));
}

#[test]
fn soft_caps() {
    let plain = logits(&dense());
    let expected: Vec<f32> = plain.iter().map(|&x| (3.0 * (f64::from(x) / 3.0).tanh()) as f32).collect();
    let error = relative_error(&logits(&with(dense(), "final_logit_softcapping", 3.0)), &expected);
    assert!(error < 1e-6, "relative error {error:.1e}");

    // Scores far below the cap stay as they are; under a cap of nothing all are equal, as those of no query are.
    let capped = |cap| logits(&with(dense(), "attn_logit_softcapping", cap));
    let error = relative_error(&capped(1e3), &plain);
    assert!(error < 1e-3, "relative error {error:.1e}");
    let none = dense().map(|mut t| {
        if t.name.ends_with(b"attn_q.weight") {
            t.data.fill(0);
        }
        vec![t]
    });
    let equal = logits(&none);
    let error = relative_error(&capped(1e-6), &equal);
    assert!(error < 1e-4, "relative error {error:.1e}");
    assert!(relative_error(&plain, &equal) > 0.01 && relative_error(&capped(1.0), &plain) > 0.01);
}

#[test]
fn weights_of_experts() {
    let key = |b: Builder, scale| logits(&with(b, "expert_weights_scale", scale));
    let expected = logits(&scaled(mixture(2), "ffn_down_exps", 2.0));
    assert_same(&key(mixture(2), 2.0), &expected, VOCAB, "scale 2");
    // Converters write 0 where nothing is scaled.
    assert_same(&key(mixture(2), 0.0), &logits(&mixture(2)), VOCAB, "scale 0");

    // Weights add up to 1 by themselves where all experts are chosen, and to less where some are.
    let norm = |used, on| logits(&mixture(used).with("llama.expert_weights_norm", gb::bool(on)));
    assert_same(&norm(2, true), &logits(&mixture(2)), VOCAB, "normalized");
    assert!(relative_error(&norm(4, false), &norm(4, true)) < 1e-5);
    assert!(relative_error(&norm(2, false), &norm(2, true)) > 0.01);
}

#[test]
fn rotation() {
    let all = logits(&dense());
    let key = |key: &str, value: gb::Value| dense().with(format!("llama.rope.{key}"), value);
    // What files leave out.
    assert_same(&logits(&key("freq_base", gb::f32(10_000.0))), &all, VOCAB, "the usual base");
    assert_same(&logits(&key("dimension_count", gb::u32(8))), &all, VOCAB, "the whole head");
    assert_same(&logits(&key("scaling.type", gb::string("none"))), &all, VOCAB, "no scaling");
    for changed in [key("freq_base", gb::f32(500.0)), key("dimension_count", gb::u32(4))] {
        assert!(relative_error(&logits(&changed), &all) > 0.01);
    }
    // Linear scaling under its two names, and as divisors that all are the same.
    let linear = key("scaling.type", gb::string("linear")).with("llama.rope.scaling.factor", gb::f32(4.0));
    let expected = logits(&linear);
    assert!(relative_error(&expected, &all) > 0.01);
    assert_same(&logits(&key("scale_linear", gb::f32(4.0))), &expected, VOCAB, "the older key");
    let divisors = [4f32; 4].iter().flat_map(|x| x.to_le_bytes()).collect();
    let divided = dense().tensor("rope_freqs.weight", &[4], 0, divisors);
    assert_same(&logits(&divided), &expected, VOCAB, "divisors");
}
