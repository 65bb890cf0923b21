//! Files that are good containers and no model that puna computes: each is refused before any weight is read, by a
//! line that names the key or the tensor.

#![allow(clippy::unwrap_used)]

mod gguf_builder;
mod support;

use gguf_builder::{self as gb, Builder, Tensor, Value, message};
use puna_model::{BackendKind, Error, Gguf, LoadOptions, Model};
use std::time::{Duration, Instant};
use support::Fixture;
use support::maker::{Experts, Rope, Spec, parse};
use support::run::plain;

fn load(gguf: &Gguf) -> Result<(), Error> {
    Model::load(gguf, &plain(), &mut |_, _| {}).map(drop)
}

#[track_caller]
fn loads(builder: &Builder, what: &str) {
    if let Err(e) = load(&parse(builder)) {
        panic!("{what}: {e}");
    }
}

/// The message names `key` or a tensor by `subject`, and says all of `words`.
#[track_caller]
fn refused(builder: &Builder, subject: &str, words: &[&str]) {
    let gguf = parse(builder);
    let start = Instant::now();
    let message = message(load(&gguf), subject);
    assert!(message.starts_with("made.gguf: "), "{subject}: {message}");
    for word in [subject].iter().chain(words) {
        assert!(message.contains(word), "{subject}: expected {word:?} in: {message}");
    }
    // What is wrong costs nothing, whatever numbers it has.
    assert!(start.elapsed() < Duration::from_secs(2), "{subject}: took {:?}", start.elapsed());
    let reference = LoadOptions { backend: BackendKind::Reference, ..plain() };
    assert!(Model::load(&gguf, &reference, &mut |_, _| {}).is_err());
}

fn dense() -> Builder {
    Spec { dim: 16, n_heads: 2, n_kv_heads: 1, ffn_dim: 24, ..Spec::default() }.builder()
}

fn mixture(split: bool) -> Builder {
    let experts = Some(Experts { n: 4, used: 2, ffn_dim: 24, split, sigmoid: false });
    Spec { dim: 16, n_heads: 2, n_kv_heads: 1, experts, ..Spec::default() }.builder()
}

fn yarn() -> Builder {
    Spec { rope: Rope::Yarn, ..Spec::default() }.builder()
}

fn llama3() -> Builder {
    Spec { rope: Rope::Llama3, ..Spec::default() }.builder()
}

/// The value that has this key in [`dense`].
fn with(key: &str, value: Value) -> Builder {
    dense().with(format!("llama.{key}"), value)
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn f32_tensor(builder: Builder, name: &str, shape: &[u64]) -> Builder {
    let n: u64 = shape.iter().product();
    builder.tensor(name, shape, 0, f32s(&vec![0.5; n as usize]))
}

#[test]
fn what_is_changed_below_is_good() {
    loads(&dense(), "dense");
    loads(&mixture(false), "merged experts");
    loads(&mixture(true), "split experts");
    loads(&yarn(), "yarn");
    loads(&llama3(), "llama3");
}

#[test]
fn architectures() {
    let key = "general.architecture";
    refused(&dense().with(key, gb::string("gpt2")), key, &["'gpt2'", "not supported", "llama", "mistral"]);
    refused(&dense().with(key, gb::string("a\nb")), key, &[r"'a\nb'"]);
    refused(&dense().with(key, gb::u32(7)), key, &["string", "u32 7"]);
    refused(&dense().with(key, None), key, &["missing"]);
}

#[test]
fn counts() {
    let required = ["block_count", "embedding_length", "attention.head_count", "attention.layer_norm_rms_epsilon"];
    for key in required {
        refused(&dense().with(format!("llama.{key}"), None), key, &["missing"]);
    }
    let counts = [
        "block_count",
        "embedding_length",
        "attention.head_count",
        "attention.head_count_kv",
        "feed_forward_length",
        "attention.key_length",
        "attention.value_length",
        "rope.dimension_count",
        "context_length",
        "vocab_size",
    ];
    for key in counts {
        refused(&with(key, gb::u32(0)), key, &["above 0", "found 0"]);
        refused(&with(key, gb::i32(-3)), key, &["-3"]);
        refused(&with(key, gb::string("2")), key, &["integer", "string"]);
        refused(&with(key, gb::f32(2.0)), key, &["integer", "f32"]);
        refused(&with(key, gb::u64(1 << 40)), key, &["1099511627776"]);
    }
}

#[test]
fn integers_of_any_width_are_fine() {
    let mut builder = dense();
    for (_, value) in &mut builder.keys {
        if value.ty == gb::u32(0).ty {
            let number = u32::from_le_bytes(value.bytes[..].try_into().unwrap());
            *value = gb::u64(number.into());
        }
    }
    loads(&builder, "u64");
    loads(&with("context_length", gb::u32(u32::MAX)), "a context that is only a number");
}

/// Numbers that no tensor bears out, and that must not size anything first.
#[test]
fn absurd_counts() {
    let max = || gb::u32(u32::MAX);
    refused(&with("block_count", gb::u32(1 << 31)), "block_count", &["2147483648 layers", "missing"]);
    refused(&with("block_count", gb::u32(3)), "blk.2.attn_norm.weight", &["missing"]);
    refused(&with("embedding_length", max()), "attention.key_length", &["4294967295", "not divisible"]);
    refused(&with("embedding_length", gb::u32(1 << 31)), "attention.key_length", &["1073741824"]);
    refused(&with("embedding_length", gb::u32(1 << 12)), "token_embd.weight", &["shape", "4096"]);
    refused(&with("attention.key_length", gb::u32(1 << 31)), "attention.key_length", &["2147483648"]);
    refused(&with("attention.key_length", gb::u32(1 << 10)), "blk.0.attn_q.weight", &["shape", "2048"]);
    refused(&with("attention.head_count", max()), "attention.key_length", &["not divisible", "4294967295"]);
    refused(&with("attention.head_count_kv", max()), "attention.head_count_kv", &["4294967295 groups"]);
    refused(&with("feed_forward_length", max()), "blk.0.ffn_gate.weight", &["shape", "4294967295"]);
    refused(&with("vocab_size", max()), "vocab_size", &["4294967295", "50 rows"]);
    let moe = |key: &str| mixture(false).with(format!("llama.{key}"), max());
    refused(&moe("expert_count"), "blk.0.ffn_gate_inp.weight", &["shape", "4294967295"]);
    refused(&moe("expert_used_count"), "expert_used_count", &["4294967295 experts of 4"]);
    refused(&moe("expert_feed_forward_length"), "blk.0.ffn_gate_exps.weight", &["shape", "4294967295"]);
    refused(&mixture(true).with("llama.expert_count", max()), "blk.0.ffn_gate_inp.weight", &["4294967295"]);
}

#[test]
fn heads() {
    let heads = |n: u32, n_kv: u32| {
        with("attention.head_count", gb::u32(n)).with("llama.attention.head_count_kv", gb::u32(n_kv))
    };
    refused(&heads(8, 3), "attention.head_count_kv", &["8 heads", "not divisible", "3 groups"]);
    refused(&heads(2, 4), "attention.head_count_kv", &["2 heads", "not divisible"]);
    refused(&heads(3, 1), "attention.key_length", &["16", "not divisible by 3 heads"]);
    refused(&with("attention.value_length", gb::u32(4)), "attention.value_length", &["8", "4"]);
    let per_layer = |key: &str, counts: &[u32]| {
        let counts: Vec<Value> = counts.iter().map(|&n| gb::u32(n)).collect();
        with(key, gb::array(4, &counts))
    };
    for (key, n) in [("attention.head_count", 2), ("attention.head_count_kv", 1), ("feed_forward_length", 24)] {
        loads(&per_layer(key, &[n, n]), key);
        refused(&per_layer(key, &[n, n, n]), key, &["2 numbers", "found 3"]);
        refused(&per_layer(key, &[]), key, &["2 numbers", "found 0"]);
        refused(&per_layer(key, &[n, 2 * n]), key, &["layers that differ"]);
        refused(&per_layer(key, &[0, 0]), key, &["above 0"]);
        refused(&with(key, gb::strings(&["2", "2"])), key, &["string"]);
    }
}

#[test]
fn numbers_that_are_none() {
    let numbers = [
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
        "rope.scale_linear",
        "attention.scale",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "embedding_scale",
        "residual_scale",
        "logit_scale",
    ];
    for key in numbers {
        refused(&with(key, gb::f32(f32::NAN)), key, &["finite", "NaN"]);
        refused(&with(key, gb::f32(f32::INFINITY)), key, &["finite", "inf"]);
        refused(&with(key, gb::f32(-1.0)), key, &["-1"]);
        refused(&with(key, gb::u32(1)), key, &["float", "u32"]);
    }
    for key in &numbers[1..3] {
        refused(&with(key, gb::f32(0.0)), key, &["above 0"]);
    }
    // Beyond single precision.
    refused(&with("rope.freq_base", gb::f64(1e300)), "rope.freq_base", &["finite", "inf"]);
}

#[test]
fn rotary_positions() {
    let width = |n: u32| with("rope.dimension_count", gb::u32(n));
    refused(&width(64), "rope.dimension_count", &["8 dimensions", "found 64"]);
    refused(&width(10), "rope.dimension_count", &["found 10"]);
    refused(&width(3), "rope.dimension_count", &["even", "found 3"]);
    let odd = Spec { head_dim: 7, ..Spec::default() }.builder();
    refused(&odd, "rope.dimension_count", &["even", "found 7"]);

    let kind = |kind: &str| with("rope.scaling.type", gb::string(kind));
    refused(&kind("hyper"), "rope.scaling.type", &["'hyper'", "not supported", "none", "linear", "yarn"]);
    refused(&kind("dynamic"), "rope.scaling.type", &["'dynamic'"]);
    refused(&with("rope.scaling.type", gb::u32(1)), "rope.scaling.type", &["string"]);
    refused(&kind("linear"), "rope.scaling.factor", &["missing"]);
    let factor = |x: f32| kind("linear").with("llama.rope.scaling.factor", gb::f32(x));
    loads(&factor(2.0), "linear");
    refused(&factor(0.0), "rope.scaling.factor", &["above 0"]);
    refused(&factor(f32::NAN), "rope.scaling.factor", &["finite"]);

    refused(&yarn().with("llama.rope.scaling.factor", None), "rope.scaling.factor", &["missing"]);
    let original = "llama.rope.scaling.original_context_length";
    refused(&yarn().with(original, None), original, &["missing"]);
    refused(&yarn().with(original, gb::u32(0)), original, &["above 0"]);
    for key in ["yarn_beta_fast", "yarn_beta_slow", "attn_factor", "yarn_attn_factor"] {
        let key = format!("llama.rope.scaling.{key}");
        refused(&yarn().with(&key, gb::f32(0.0)), &key, &["above 0"]);
        refused(&yarn().with(&key, gb::f32(f32::NAN)), &key, &["finite"]);
    }
    for (key, x) in [("yarn_ext_factor", 0.5), ("yarn_log_multiplier", 0.1)] {
        let key = format!("llama.rope.scaling.{key}");
        refused(&yarn().with(&key, gb::f32(x)), &key, &["supported"]);
    }
}

#[test]
fn rotary_divisors() {
    let name = "rope_freqs.weight";
    let divisors = |shape: &[u64], ty: u32, data: Vec<u8>| {
        let rest = llama3().without(name);
        rest.tensor(name, shape, ty, data)
    };
    loads(&divisors(&[4], 0, f32s(&[1.0, 2.0, 3.0, 4.0])), "divisors");
    refused(&divisors(&[3], 0, f32s(&[1.0, 2.0, 3.0])), name, &["shape [4]", "[3]"]);
    refused(&divisors(&[8], 0, f32s(&[1.0; 8])), name, &["shape [4]", "[8]"]);
    refused(&divisors(&[2, 2], 0, f32s(&[1.0; 4])), name, &["shape [4]"]);
    refused(&divisors(&[4], 26, vec![1; 16]), name, &["I32"]);
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        refused(&divisors(&[4], 0, f32s(&[1.0, bad, 1.0, 1.0])), name, &["above 0"]);
    }
}

#[test]
fn windows() {
    let pattern = |value: Value| with("attention.sliding_window", gb::u32(9)).with(PATTERN, value);
    const PATTERN: &str = "llama.attention.sliding_window_pattern";
    let bools = |on: &[bool]| gb::array(7, &on.iter().map(|&on| gb::bool(on)).collect::<Vec<_>>());
    loads(&pattern(bools(&[true, false])), "a pattern");
    refused(&pattern(bools(&[true])), PATTERN, &["2 entries", "found 1"]);
    refused(&pattern(bools(&[true; 3])), PATTERN, &["2 entries", "found 3"]);
    refused(&pattern(gb::u32(6)), PATTERN, &["list of booleans"]);
    refused(&pattern(gb::array(4, &[gb::u32(1), gb::u32(0)])), PATTERN, &["bool"]);
    refused(&with("attention.sliding_window", gb::i32(-1)), "attention.sliding_window", &["-1"]);
}

#[test]
fn mixtures() {
    let moe = |key: &str, value: Value| mixture(false).with(format!("llama.{key}"), value);
    refused(&moe("expert_count", gb::u32(5)), "blk.0.ffn_gate_inp.weight", &["shape [5, 16]", "[4, 16]"]);
    refused(&moe("expert_used_count", gb::u32(0)), "expert_used_count", &["above 0"]);
    refused(&moe("expert_used_count", gb::u32(5)), "expert_used_count", &["5 experts of 4"]);
    refused(&mixture(false).with("llama.expert_used_count", None), "expert_used_count", &["missing"]);
    refused(&moe("expert_gating_func", gb::u32(3)), "expert_gating_func", &["softmax", "sigmoid", "found 3"]);
    refused(&moe("expert_weights_scale", gb::f32(f32::NAN)), "expert_weights_scale", &["finite"]);
    refused(&moe("expert_weights_norm", gb::u32(1)), "expert_weights_norm", &["bool"]);
    refused(&moe("expert_feed_forward_length", gb::u32(25)), "blk.0.ffn_gate_exps.weight", &["25"]);
    // Merged tensors of fewer experts than the router has.
    let fewer = mixture(false).edit("blk.1.ffn_up_exps.weight", |mut t| {
        t.dims[2] = 3;
        t.data.truncate(t.data.len() / 4 * 3);
        vec![t]
    });
    refused(&fewer, "blk.1.ffn_up_exps.weight", &["[4, 24, 16]", "[3, 24, 16]"]);
    refused(&mixture(false).without("blk.1.ffn_gate_inp.weight"), "blk.1.ffn_gate_inp.weight", &["missing"]);
    refused(&mixture(true).without("blk.1.ffn_down.3.weight"), "blk.1.ffn_down.3.weight", &["missing"]);
    // A mixture that does not say so: its experts are not looked for.
    refused(&mixture(false).with("llama.expert_count", gb::u32(0)), "blk.0.ffn_gate", &["missing"]);
}

/// `t` with one row more or, where it is a vector, one number more.
fn longer(mut t: Tensor) -> Tensor {
    let row = if t.dims.len() == 1 { 1 } else { t.data.len() / t.dims[t.dims.len() - 1] as usize };
    let n = if t.dims.len() == 1 { 4 } else { row };
    t.data.extend(vec![0; n]);
    *t.dims.last_mut().unwrap() += 1;
    t
}

#[test]
fn every_tensor_is_needed_in_its_shape() {
    for builder in [dense(), mixture(false), mixture(true), yarn().map(|t| vec![t])] {
        for name in builder.tensors.iter().map(|t| String::from_utf8(t.name.clone()).unwrap()) {
            let tied = name == "output.weight";
            match builder.clone().without(&name) {
                without if tied => loads(&without, "the embedding serves as output"),
                // Without the first of split experts there may as well be merged ones.
                without => refused(&without, name.trim_end_matches(".0.weight"), &["missing"]),
            }
            // Rows of the embedding are what the vocabulary is; the output must have as many.
            let subject = if name == "token_embd.weight" { "output.weight" } else { &name };
            refused(&builder.clone().edit(&name, |t| vec![longer(t)]), subject, &["shape"]);
            // The right number of elements in another shape.
            let transposed = builder.clone().edit(&name, |mut t| {
                t.dims.reverse();
                if t.dims.len() == 1 || t.dims.iter().eq(t.dims.iter().rev()) {
                    t.dims.push(1);
                    t.n_dims += 1;
                }
                vec![t]
            });
            refused(&transposed, &name, &["shape"]);
        }
    }
}

#[test]
fn types_that_are_no_weights() {
    for name in ["token_embd.weight", "blk.0.attn_q.weight", "blk.1.ffn_down.weight", "output.weight"] {
        for (ty, what) in [(26, "I32"), (28, "F64"), (24, "I8")] {
            let bytes = [4, 8, 1][[26, 28, 24].iter().position(|&t| t == ty).unwrap()];
            let change = |mut t: Tensor| {
                t.data.resize(t.data.len() / 4 * bytes, 0);
                t.ty = ty;
                vec![t]
            };
            refused(&dense().edit(name, change), name, &[what, "not a weight format"]);
        }
    }
    let norm = "blk.0.attn_norm.weight";
    let integers = |mut t: Tensor| {
        t.ty = 26;
        vec![t]
    };
    refused(&dense().edit(norm, integers), norm, &["type I32"]);
    // A norm in blocks: 32 numbers in 34 bytes.
    let blocks = |mut t: Tensor| {
        t.ty = 8;
        t.data = vec![0; 34];
        vec![t]
    };
    let norm = "blk.1.ffn_norm.weight";
    refused(&Spec::default().builder().edit(norm, blocks), norm, &["F32, F16 or BF16", "Q8_0"]);
}

#[test]
fn floats_of_half_the_size_are_fine_for_vectors() {
    let half = |mut t: Tensor| {
        if t.n_dims == 1 {
            t.ty = 1;
            t.data = half::f16::from_f32(1.0).to_le_bytes().repeat(t.data.len() / 4);
        }
        vec![t]
    };
    loads(&dense().map(half), "norms in F16");
}

#[test]
fn tensors_that_nothing_reads() {
    let cases = [
        ("blk.0.attn_q.scale", &[1][..]),
        ("blk.1.ffn_down.input_scale", &[1]),
        ("blk.1.attn_sinks.weight", &[2]),
        ("blk.0.attn_norm.bias", &[16]),
        ("blk.0.ssm_in.weight", &[16, 16]),
        ("blk.0.ffn_gate_exps.weight", &[4, 24, 16]),
        ("blk.1.attn_kv_a_mqa.weight", &[16, 16]),
        ("blk.0.layer_output_scale.weight", &[1]),
        ("token_embd.scale", &[1]),
        ("token_embd_norm.weight", &[16]),
        ("output_norm.bias", &[16]),
        ("output.scale", &[1]),
    ];
    for (name, shape) in cases {
        refused(&f32_tensor(dense(), name, shape), name, &["nothing", "llama", "reads it"]);
    }
    let shared = f32_tensor(mixture(false), "blk.0.ffn_latent_down.weight", &[24, 16]);
    refused(&shared, "blk.0.ffn_latent_down.weight", &["nothing", "reads it"]);
    // What old converters wrote is computed instead.
    let old = f32_tensor(dense(), "blk.0.attn_rot_embd", &[4]);
    loads(&f32_tensor(old, "blk.1.attn.rotary_emb.inv_freq", &[4]), "frequencies of a layer");
    // A part of another tower.
    loads(&f32_tensor(dense(), "v.blk.0.attn_q.weight", &[4, 4]), "a vision tower");
}

#[test]
fn keys_that_change_the_model() {
    let refused_keys = [
        "attention.clamp_kqv",
        "attention.max_alibi_bias",
        "attention.q_lora_rank",
        "attention.kv_lora_rank",
        "attention.output_scale",
        "attention.shared_kv_layers",
        "attention.temperature_length",
        "expert_group_count",
        "router_logit_softcapping",
        "swiglu_clamp_exp",
        "use_parallel_residual",
        "rope.scaling.alpha",
    ];
    for key in refused_keys {
        for on in [gb::f32(0.5), gb::u32(3), gb::bool(true), gb::f32(f32::NAN), gb::string("yes")] {
            refused(&with(key, on), key, &["not supported"]);
        }
        for off in [gb::f32(0.0), gb::u32(0), gb::bool(false)] {
            loads(&with(key, off), key);
        }
    }
    refused(&with("attention.causal", gb::bool(false)), "attention.causal", &["not supported"]);
    loads(&with("attention.causal", gb::bool(true)), "causal");
}

#[test]
fn weights_that_end_early() {
    let bytes = dense().bytes();
    for (cut, what) in [(1, "one byte short"), (bytes.len() / 2, "half")] {
        let gguf = Gguf::parse("made.gguf", bytes[..bytes.len() - cut].to_vec().into()).unwrap();
        assert!(message(load(&gguf), what).contains("truncated"), "{what}");
    }
    let mut builder = dense();
    builder.tensors[3].offset = 1 << 40;
    refused(&builder, "blk", &["truncated", "1099511"]);
}

#[test]
fn no_tensors_at_all() {
    let builder = dense().map(|_| vec![]);
    refused(&builder, "block_count", &["2 layers", "0 tensors"]);
}

#[test]
fn layers_and_tensors_beyond_the_model() {
    let beyond = dense().with("llama.block_count", gb::u32(1));
    refused(&beyond, "blk.1.", &["only 1 layers"]);
    let positions = f32_tensor(dense(), "position_embd.weight", &[512, 32]);
    refused(&positions, "position_embd.weight", &["reads"]);
    loads(&f32_tensor(dense(), "v.patch_embd.weight", &[4, 4]), "a vision tower beside the model");
}

#[test]
fn longrope_needs_its_lists() {
    refused(&with("rope.scaling.type", gb::string("longrope")), "rope_factors_short.weight", &["missing"]);
}

#[test]
fn a_missing_first_expert_is_named() {
    refused(&mixture(true).without("blk.0.ffn_gate.0.weight"), "blk.0.ffn_gate.0.weight", &["missing"]);
}

#[test]
fn parts_that_an_architecture_always_has() {
    let qwen3 = || Builder::read(&Fixture::named("qwen3-qknorm").gguf());
    loads(&qwen3(), "the fixture");
    for part in ["attn_q_norm", "attn_k_norm"] {
        let name = format!("blk.1.{part}.weight");
        refused(&qwen3().without(&name), &name, &["missing"]);
    }
}
