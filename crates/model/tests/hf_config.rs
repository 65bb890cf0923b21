//! config.json: what keys that are absent, null, of another type or out of range mean. Defaults are those of
//! transformers 5.24.

#![allow(clippy::unwrap_used)]

mod hf_maker;

use hf_maker::{FFN, HEAD_DIM, HEADS, Made, Small, Tensor};
use puna_kernels::ops::Activation;
use puna_model::Config;
use puna_model::checkpoint::Checkpoint;
use puna_model::rope::{Llama3, LongRope, Sections, Yarn, base_frequencies, scaled_frequencies};
use serde_json::{Value, json};

/// A folder of any family whose weights nobody looks at.
fn folder(config: &Value) -> Made {
    let tensors: Vec<Tensor> = (0..8).map(|i| Tensor::f32(format!("t{i}"), &[1], &[0.0])).collect();
    Made::new(config, &tensors)
}

#[track_caller]
fn read(config: &Value) -> (Config, &'static str) {
    let (arch, config) = folder(config).folder().config().unwrap_or_else(|e| panic!("{e}"));
    (config, arch.name)
}

#[track_caller]
fn refused(config: &Value, words: &[&str]) {
    let message = match folder(config).folder().config() {
        Ok(_) => panic!("it is read; expected {words:?}"),
        Err(e) => e.to_string(),
    };
    for word in ["config.json: key"].iter().chain(words) {
        assert!(message.contains(word), "expected {word:?} in: {message}");
    }
}

/// The keys of a family, some replaced; `()` removes one.
macro_rules! keys {
    ($family:expr $(, $key:literal: $value:tt)* $(,)?) => {{
        #[allow(unused_mut)]
        let mut keys = family($family);
        $(keys!(@set keys, $key, $value);)*
        keys
    }};
    (@set $keys:ident, $key:literal, ()) => { $keys.as_object_mut().unwrap().remove($key); };
    (@set $keys:ident, $key:literal, $value:tt) => { $keys[$key] = json!($value); };
}

/// All that a family cannot do without.
fn family(name: &str) -> Value {
    let mut keys = Small::keys(name);
    for (key, value) in [
        ("num_experts", json!(4)),
        ("moe_intermediate_size", json!(12)),
        ("shared_expert_intermediate_size", json!(20)),
        ("num_experts_per_tok", json!(2)),
    ] {
        if name.ends_with("moe") || ["mixtral", "minimax_m2", "olmoe"].contains(&name) {
            keys[key] = value;
        }
    }
    keys
}

const FAMILIES: [(&str, &str); 16] = [
    ("llama", "llama"),
    ("mistral", "llama"),
    ("mixtral", "llama"),
    ("qwen2", "qwen2"),
    ("qwen2_moe", "qwen2moe"),
    ("qwen3", "qwen3"),
    ("qwen3_moe", "qwen3moe"),
    ("qwen2_5_vl_text", "qwen2vl"),
    ("qwen3_vl_text", "qwen3vl"),
    ("qwen3_vl_moe", "qwen3vlmoe"),
    ("phi3", "phi3"),
    ("minimax_m2", "minimax-m2"),
    ("smollm3", "smollm3"),
    ("granite", "granite"),
    ("olmo2", "olmo2"),
    ("olmoe", "olmoe"),
];

/// The keys of a family whose heads rotate in three parts.
fn sections(keys: Value, name: &str) -> Value {
    let mut keys = keys;
    if name.contains("vl") && keys.get("rope_parameters").is_none() {
        keys["rope_parameters"] = json!({"rope_type": "default", "mrope_section": [2, 1, 1]});
    }
    keys
}

#[test]
fn defaults_of_each_family() {
    // num_key_value_heads, head_dim (0: by heads), rms_norm_eps, rope_theta, max_position_embeddings
    type Row = (usize, usize, f32, f32, usize);
    let expected = |name: &str| -> Row {
        match name {
            "llama" | "granite" => (64, 0, 1e-6, 1e4, 2048),
            "mistral" => (8, 0, 1e-6, 1e4, 131_072),
            "mixtral" => (8, 0, 1e-5, 1e6, 131_072),
            "qwen2" => (32, 0, 1e-6, 1e4, 32_768),
            "qwen2_moe" => (16, 0, 1e-6, 1e4, 32_768),
            "qwen3" => (32, 128, 1e-6, 1e4, 32_768),
            "qwen3_moe" => (4, 0, 1e-6, 1e4, 32_768),
            "qwen2_5_vl_text" => (8, 0, 1e-5, 1e6, 32_768),
            "qwen3_vl_text" => (32, 128, 1e-6, 5e5, 128_000),
            "qwen3_vl_moe" => (16, 0, 1e-6, 5e5, 128_000),
            "phi3" => (64, 0, 1e-5, 1e4, 4096),
            "minimax_m2" => (8, 128, 1e-6, 5e6, 196_608),
            "smollm3" => (4, 0, 1e-6, 2e6, 32_768),
            "olmo2" => (64, 0, 1e-5, 1e4, 2048),
            "olmoe" => (64, 0, 1e-5, 1e4, 4096),
            other => panic!("{other}"),
        }
    };
    for (name, arch) in FAMILIES {
        let (n_kv_heads, head_dim, norm_eps, theta, context) = expected(name);
        let head_dim = if head_dim == 0 { 8 } else { head_dim };
        let keys = keys!(name, "num_attention_heads": 64, "hidden_size": 512, "num_key_value_heads": (),
            "head_dim": (), "rms_norm_eps": (), "max_position_embeddings": ());
        let mut keys = sections(keys, name);
        if name.contains("vl") {
            keys["rope_parameters"]["mrope_section"] = json!([head_dim / 2 - 2, 1, 1]);
        }
        let (c, found) = read(&keys);
        assert_eq!((found, c.arch), (arch, arch));
        assert_eq!((c.n_kv_heads, c.head_dim, c.norm_eps), (n_kv_heads, head_dim, norm_eps), "{name}");
        assert_eq!((c.rope.theta, c.context_length), (theta, context), "{name}");
        assert_eq!(c.rope.inv_freq, base_frequencies(theta, head_dim), "{name}");
        // Null is as many heads as there are, and heads that share the width.
        for (key, null) in [("num_key_value_heads", true), ("head_dim", false)] {
            let mut keys = keys.clone();
            keys[key] = Value::Null;
            if name.contains("vl") && !null {
                keys["rope_parameters"]["mrope_section"] = json!([2, 1, 1]);
            }
            let (c, _) = read(&keys);
            assert_eq!(if null { c.n_kv_heads } else { c.head_dim }, if null { 64 } else { 8 }, "{name} {key}");
        }
    }
}

#[test]
fn what_must_be_there() {
    for (name, _) in FAMILIES {
        for key in ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"] {
            for bad in [
                Value::Null,
                json!(0),
                json!(-1),
                json!("8"),
                json!(8.5),
                json!([8]),
                json!(1u64 << 40),
                json!(1 << 21),
                json!(true),
            ] {
                let mut keys = sections(family(name), name);
                keys[key] = bad;
                refused(&keys, &[key]);
            }
            let mut keys = family(name);
            keys.as_object_mut().unwrap().remove(key);
            refused(&keys, &[key, "missing"]);
        }
    }
    for (key, bad) in [
        ("num_key_value_heads", json!(3)),
        ("num_key_value_heads", json!(0)),
        ("head_dim", json!("8")),
        ("head_dim", json!(1 << 30)),
        ("rms_norm_eps", Value::Null),
        ("rms_norm_eps", json!(-1e-5)),
        ("rms_norm_eps", json!("1e-5")),
        ("max_position_embeddings", Value::Null),
        ("vocab_size", json!(-1)),
        ("tie_word_embeddings", json!(1)),
        ("attention_bias", json!("no")),
        ("hidden_act", json!(1)),
        ("hidden_act", json!("relu")),
        ("hidden_act", json!("quick_gelu")),
        ("rope_theta", json!(0)),
        ("rope_theta", json!("10000")),
        ("rope_scaling", json!("linear")),
        ("partial_rotary_factor", json!(0.5)),
        ("num_hidden_layers", json!(9)),
    ] {
        let mut keys = family("llama");
        keys[key] = bad;
        refused(&keys, &[key]);
    }
    refused(&keys!("llama", "head_dim": null, "hidden_size": 25), &["head_dim", "25", "4 heads"]);
    refused(&keys!("llama", "num_attention_heads": 3), &["num_key_value_heads", "3 heads are not divisible into 2"]);
}

#[test]
fn types_that_are_not_supported() {
    for name in ["gemma3_text", "minimax", "llama4", "\u{1b}[31m"] {
        refused(&keys!("llama", "model_type": name), &["model_type", "not supported", "llama, mistral, mixtral"]);
    }
    let escapes = folder(&keys!("llama", "model_type": "\u{1b}[31m"));
    let refusal = escapes.folder().config().err().unwrap().to_string();
    assert!(!refusal.contains('\u{1b}'), "{refusal}");
    refused(&keys!("llama", "model_type": ()), &["model_type", "missing"]);
    refused(&keys!("llama", "model_type": 1), &["model_type", "expected text"]);
    refused(
        &keys!("llama", "model_type": (), "architectures": ["OPTForCausalLM"]),
        &["architectures", "OPTForCausalLM"],
    );
    for (class, arch) in [
        ("Qwen3ForCausalLM", "qwen3"),
        ("Qwen3Model", "qwen3"),
        ("LlamaModel", "llama"),
        ("MistralModel", "llama"),
        ("Phi3Model", "phi3"),
    ] {
        assert_eq!(read(&keys!("llama", "model_type": (), "architectures": [class])).0.arch, arch);
    }
}

#[test]
fn attention_to_later_positions_is_refused() {
    refused(&keys!("llama", "is_causal": false), &["is_causal", "not supported", "false"]);
    refused(&keys!("llama", "use_bidirectional_attention": true), &["use_bidirectional_attention", "true"]);
    refused(&keys!("llama", "use_bidirectional_attention": "all"), &["use_bidirectional_attention", "all"]);
    refused(&keys!("llama", "bidirectional": true), &["bidirectional"]);
    for class in ["LlamaBidirectionalModel", "MistralBiModel", "LlamaBiForMNTP", "LlamaEncoderModel"] {
        refused(&keys!("llama", "architectures": [class]), &["architectures", "later positions", class]);
    }
    for (key, value) in
        [("is_causal", json!(true)), ("use_bidirectional_attention", json!(false)), ("is_causal", ().into())]
    {
        let mut config = family("llama");
        config[key] = value;
        read(&config);
    }
    read(&keys!("llama", "architectures": ["LlamaModel"]));
}

#[test]
fn text_inside_a_larger_model() {
    for (outer, key, inner, arch) in [
        ("smolvlm", "text_config", Some("llama"), "llama"),
        ("smolvlm", "text_config", None, "llama"),
        ("idefics3", "text_config", Some("mistral"), "llama"),
        ("lighton_ocr", "text_config", None, "qwen3"),
        ("qwen2_5_vl", "text_config", None, "qwen2vl"),
        ("internvl_chat", "llm_config", Some("qwen2"), "qwen2"),
        ("unknown_vision_model", "text_config", Some("qwen3"), "qwen3"),
    ] {
        let mut text = sections(family("llama"), outer);
        match inner {
            Some(inner) => text["model_type"] = json!(inner),
            None => drop(text.as_object_mut().unwrap().remove("model_type")),
        }
        // What is outside is not the text model's.
        let config = json!({"model_type": outer, key: text, "hidden_size": 4096, "head_dim": 1});
        let (c, _) = read(&config);
        assert_eq!((c.arch, c.dim, c.head_dim), (arch, hf_maker::DIM, HEAD_DIM), "{outer}");
    }
    refused(&json!({"model_type": "x", "text_config": {"model_type": "llama"}}), &["text_config.num_hidden_layers"]);
    refused(&json!({"model_type": "x", "text_config": family("gemma")}), &["text_config.model_type", "gemma"]);
    refused(&json!({"model_type": "x", "text_config": 1}), &["text_config", "an object"]);
    // Flat, as it was before.
    let flat = sections(family("qwen2_vl"), "qwen2_vl");
    assert_eq!(read(&flat).1, "qwen2vl");
}

#[test]
fn deepstack_layers_are_the_vision_tower_s() {
    let config = |vision: Value| {
        json!({"model_type": "qwen3_vl", "vision_config": vision,
            "text_config": sections(keys!("qwen3_vl_text", "num_hidden_layers": 4), "vl")})
    };
    assert_eq!(read(&config(json!({"deepstack_visual_indexes": [5, 11]}))).0.n_deepstack, 2);
    assert_eq!(read(&config(json!({"deepstack_visual_indexes": []}))).0.n_deepstack, 0);
    assert_eq!(read(&config(json!({}))).0.n_deepstack, 3);
    assert_eq!(read(&config(Value::Null)).0.n_deepstack, 0);
    refused(&config(json!({"deepstack_visual_indexes": [1, 2, 3, 4, 5]})), &["vision_config.deepstack_visual_indexes"]);
}

#[test]
fn activations() {
    for (name, activation) in [
        ("silu", Activation::Silu),
        ("swish", Activation::Silu),
        ("gelu", Activation::Gelu),
        ("gelu_new", Activation::GeluTanh),
        ("gelu_pytorch_tanh", Activation::GeluTanh),
    ] {
        assert_eq!(read(&keys!("llama", "hidden_act": name)).0.activation, activation);
    }
    assert_eq!(read(&family("llama")).0.activation, Activation::Silu);
}

#[test]
fn windows() {
    let at = |keys: Value| read(&keys).0.windows;
    let all = |w| vec![Some(w); 4];
    let none = vec![None; 4];
    // In all layers, unless the file says otherwise.
    assert_eq!(at(keys!("mistral", "num_hidden_layers": 4)), all(4096));
    assert_eq!(at(keys!("mistral", "num_hidden_layers": 4, "sliding_window": null)), none);
    assert_eq!(at(keys!("mistral", "num_hidden_layers": 4, "sliding_window": 7)), all(7));
    for name in ["mixtral", "phi3"] {
        assert_eq!(at(keys!(name, "num_hidden_layers": 4)), none);
        assert_eq!(at(keys!(name, "num_hidden_layers": 4, "sliding_window": 7)), all(7));
    }
    for name in ["llama", "granite", "olmo2", "minimax_m2"] {
        assert_eq!(at(keys!(name, "num_hidden_layers": 4, "sliding_window": 7, "use_sliding_window": true)), none);
    }
    // Only if they are switched on, and then from a layer on.
    for name in ["qwen2", "qwen3"] {
        let keys = keys!(name, "num_hidden_layers": 4, "sliding_window": 7, "max_window_layers": 1);
        assert_eq!(at(keys.clone()), none);
        let mut on = keys.clone();
        on["use_sliding_window"] = json!(true);
        assert_eq!(at(on.clone()), [None, Some(7), Some(7), Some(7)]);
        on["max_window_layers"] = json!(0);
        assert_eq!(at(on.clone()), all(7));
        on.as_object_mut().unwrap().remove("max_window_layers");
        assert_eq!(at(on.clone()), none, "28 layers without come first");
        on["layer_types"] = json!(["sliding_attention", "full_attention", "full_attention", "sliding_attention"]);
        assert_eq!(at(on.clone()), [Some(7), None, None, Some(7)]);
        on.as_object_mut().unwrap().remove("sliding_window");
        assert_eq!(at(on.clone()), [Some(4096), None, None, Some(4096)]);
        on["sliding_window"] = Value::Null;
        refused(&on, &["layer_types", "no sliding_window"]);
        on["sliding_window"] = json!(0);
        refused(&on, &["sliding_window", "above 0"]);
    }
    let moe = |on: bool| keys!("qwen2_moe", "num_hidden_layers": 4, "sliding_window": 7, "max_window_layers": 3, "use_sliding_window": on);
    assert_eq!(at(moe(true)), [Some(7), None, Some(7), None], "every other one of the first");
    assert_eq!(at(moe(false)), none);
    let moe = keys!("qwen3_moe", "num_hidden_layers": 4, "use_sliding_window": true, "max_window_layers": 3);
    assert_eq!(at(moe), all(4096), "all of them");
    let smollm3 = keys!("smollm3", "num_hidden_layers": 4, "sliding_window": 7, "use_sliding_window": true);
    assert_eq!(at(smollm3), [None, None, None, Some(7)], "where nothing rotates");
    for (types, word) in [
        (json!(["full_attention"]), "expected 2 names"),
        (json!(["full_attention", "linear_attention"]), "linear_attention"),
    ] {
        let mut keys = family("qwen2");
        keys["layer_types"] = types;
        refused(&keys, &["layer_types", word]);
    }
}

#[test]
fn layers_that_do_not_rotate() {
    let at = |keys: Value| read(&keys).0.rope_layers;
    assert_eq!(at(keys!("smollm3", "num_hidden_layers": 5)), [true, true, true, false, true]);
    assert_eq!(at(keys!("smollm3", "num_hidden_layers": 4, "no_rope_layer_interval": 2)), [true, false, true, false]);
    assert_eq!(at(keys!("smollm3", "no_rope_layers": [0, 1, 1])), [false, true]);
    refused(&keys!("smollm3", "no_rope_layers": [1]), &["no_rope_layers", "expected 2"]);
    refused(&keys!("smollm3", "no_rope_layer_interval": 0), &["no_rope_layer_interval"]);
}

#[test]
fn scales() {
    let (c, _) = read(&family("granite"));
    assert_eq!((c.embed_scale, c.residual_scale, c.attn_scale, c.logit_scale), (1.0, 1.0, 1.0, 1.0));
    let keys = keys!("granite", "embedding_multiplier": 12, "residual_multiplier": 0.25, "attention_multiplier": 0.5,
        "logits_scaling": 8.0);
    let (c, _) = read(&keys);
    assert_eq!((c.embed_scale, c.residual_scale, c.attn_scale, c.logit_scale), (12.0, 0.25, 0.5, 0.125));
    let (c, _) = read(&family("llama"));
    assert_eq!((c.embed_scale, c.attn_scale, c.ffn_dim), (1.0, 1.0 / (HEAD_DIM as f32).sqrt(), FFN));
}

#[test]
fn experts() {
    let moe = |keys: &Value| read(keys).0.moe.unwrap();
    let m = moe(&keys!("mixtral", "num_experts": (), "num_local_experts": 6, "num_experts_per_tok": ()));
    assert_eq!((m.n_experts, m.ffn_dim, m.routing.used), (6, FFN, 2));
    assert!(m.routing.normalize && !m.routing.sigmoid && m.routing.scale == 1.0);
    for (name, used) in [("qwen2_moe", 4), ("qwen3_moe", 8)] {
        let keys = keys!(name, "num_experts": 9, "num_experts_per_tok": ());
        let m = moe(&keys);
        assert_eq!((m.n_experts, m.ffn_dim, m.routing.used, m.routing.normalize), (9, 12, used, false), "{name}");
        assert_eq!(m.shared_ffn_dim, if name == "qwen2_moe" { 20 } else { 0 });
        assert!(moe(&keys!(name, "norm_topk_prob": true)).routing.normalize);
    }
    let m = moe(&sections(family("qwen3_vl_moe"), "vl"));
    assert!(m.routing.normalize && m.ffn_dim == 12);
    let m = moe(&family("minimax_m2"));
    assert!(m.routing.normalize && m.routing.sigmoid && m.ffn_dim == FFN);
    let m = moe(&keys!("olmoe", "num_experts": 9, "num_experts_per_tok": (), "clip_qkv": null));
    assert_eq!((m.ffn_dim, m.routing.used, m.routing.normalize), (FFN, 8, false));
    assert!(moe(&keys!("olmoe", "norm_topk_prob": true)).routing.normalize);
    refused(&keys!("olmoe", "clip_qkv": 8.0), &["clip_qkv", "only null is supported, found 8"]);
    refused(&keys!("mixtral", "num_experts": ()), &["num_local_experts"]);
    refused(&keys!("mixtral", "num_local_experts": 5), &["num_experts", "4, while num_local_experts is 5"]);
    refused(&keys!("mixtral", "num_experts_per_tok": 5), &["num_experts_per_tok", "5 experts of 4"]);
    refused(&keys!("mixtral", "num_experts_per_tok": 0), &["num_experts_per_tok"]);
    refused(&keys!("qwen3_moe", "moe_intermediate_size": ()), &["moe_intermediate_size", "missing"]);
    refused(&keys!("qwen2_moe", "shared_expert_intermediate_size": ()), &["shared_expert_intermediate_size"]);
    for (key, bad) in [
        ("scoring_func", json!("softmax")),
        ("use_routing_bias", json!(false)),
        ("use_qk_norm", json!(false)),
        ("qk_norm_type", json!("per_head")),
        ("shared_intermediate_size", json!(64)),
    ] {
        let mut keys = family("minimax_m2");
        keys[key] = bad;
        refused(&keys, &[key, "only"]);
    }
}

#[test]
fn layers_that_are_no_mixture() {
    let small = Small::mixture();
    let dense = |keys: &[(&str, Value)]| {
        let mut small = small.clone();
        keys.iter().for_each(|(key, value)| small.config[*key] = value.clone());
        small.made().refusal()
    };
    for keys in [[("mlp_only_layers", json!([0]))], [("decoder_sparse_step", json!(2))]] {
        let refusal = dense(&keys);
        assert!(refusal.contains("layers.0.mlp.gate.weight") && refusal.contains("no experts"), "{refusal}");
    }
    let refusal = small.without_tensors("1.mlp.gate").made().refusal();
    assert!(refusal.contains("layers.1.mlp.gate.weight") && refusal.contains("missing"), "{refusal}");
}

/// The keys of a llama with these rope parameters: as they are now, and as they were before.
fn rope_styles(theta: f64, parameters: &Value) -> [Value; 3] {
    let mut new = parameters.clone();
    new["rope_theta"] = json!(theta);
    let mut old = parameters.clone();
    let kind = old.as_object_mut().unwrap().remove("rope_type").unwrap();
    old["type"] = kind;
    let mut keys = [(); 3].map(|_| family("llama"));
    keys[0]["rope_parameters"] = new;
    keys[1]["rope_scaling"] = parameters.clone();
    keys[2]["rope_scaling"] = old;
    keys[1]["rope_theta"] = json!(theta);
    keys[2]["rope_theta"] = json!(theta);
    keys
}

#[test]
fn kinds_of_rope() {
    let theta = 500_000.0;
    let base = base_frequencies(theta, HEAD_DIM);
    let llama3 = Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 32 };
    let yarn = Yarn { factor: 4.0, original_context: 16, beta_fast: 32.0, beta_slow: 1.0, truncate: true };
    let other = Yarn { beta_fast: 16.0, beta_slow: 2.0, truncate: false, original_context: 64, ..yarn };
    let ramp = |yarn: Yarn| yarn.frequencies(theta, HEAD_DIM);
    let g = |m| Yarn::magnitude(4.0, m);
    let cases = [
        (json!({"rope_type": "default"}), "none", base.clone(), 1.0),
        (json!({"rope_type": "linear", "factor": 2}), "linear", base.iter().map(|f| f / 2.0).collect(), 1.0),
        (
            json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4,
                "original_max_position_embeddings": 32}),
            "llama3",
            llama3.frequencies(theta, HEAD_DIM),
            1.0,
        ),
        (
            json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
            "yarn",
            ramp(yarn),
            g(1.0),
        ),
        (
            json!({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, "original_max_position_embeddings": 16}),
            "yarn",
            ramp(yarn),
            1.25,
        ),
        // Zeros are as good as absent; null is the stretch of the context; the original context is the whole one.
        (
            json!({"rope_type": "yarn", "factor": null, "beta_fast": 0, "mscale": 0, "mscale_all_dim": 2,
                "original_max_position_embeddings": 16}),
            "yarn",
            ramp(yarn),
            g(1.0),
        ),
        (
            json!({"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2, "truncate": false,
                "mscale": 0.7, "mscale_all_dim": 0.3}),
            "yarn",
            ramp(other),
            g(0.7) / g(0.3),
        ),
    ];
    for (parameters, kind, inv_freq, magnitude) in cases {
        for keys in rope_styles(f64::from(theta), &parameters) {
            let rope = read(&keys).0.rope;
            assert_eq!((rope.kind, rope.theta, rope.magnitude), (kind, theta, magnitude), "{keys}");
            assert_eq!(rope.inv_freq, inv_freq, "{keys}");
            assert!(rope.long.is_none() && rope.sections.is_none());
        }
    }
}

#[test]
fn longrope() {
    let short: Vec<f32> = vec![1.0, 1.5, 2.0, 2.5];
    let long: Vec<f32> = vec![1.0, 2.0, 4.0, 8.0];
    let parameters = json!({"rope_type": "longrope", "short_factor": short, "long_factor": long,
        "original_max_position_embeddings": 16});
    let [new, older, oldest] = rope_styles(10_000.0, &parameters);
    let mut su = oldest.clone();
    su["rope_scaling"]["type"] = json!("su");
    for keys in [&new, &older, &oldest, &su] {
        let rope = read(keys).0.rope;
        let list = |factors: &[f32]| scaled_frequencies(10_000.0, HEAD_DIM, factors);
        assert_eq!((rope.kind, rope.inv_freq), ("longrope", list(&short)));
        assert_eq!(rope.long, Some(LongRope { original_context: 16, inv_freq: list(&long) }));
        // The context is 64, four times the original one.
        let expected = (1.0 + 4f64.ln() / 16f64.ln()).sqrt();
        assert!((f64::from(rope.magnitude) - expected).abs() < 1e-6);
    }
    let with = |key: &str, value: Value| {
        let mut keys = new.clone();
        keys["rope_parameters"][key] = value;
        keys
    };
    assert_eq!(read(&with("attention_factor", json!(1.19))).0.rope.magnitude, 1.19);
    assert_eq!(read(&with("factor", json!(1.0))).0.rope.magnitude, 1.0);
    for key in ["short_factor", "long_factor"] {
        refused(&with(key, json!([1.0, 2.0, 3.0])), &["rope_parameters", key, "expected 4 factors"]);
        refused(&with(key, json!([1.0, 2.0, 3.0, 0.0])), &["rope_parameters", key]);
        refused(&with(key, json!([1.0, 2.0, 3.0, null])), &["rope_parameters", key]);
        refused(&with(key, Value::Null), &["rope_parameters", key]);
    }
    refused(&with("original_max_position_embeddings", json!(1)), &["original_max_position_embeddings"]);
    // Phi-3 says its original context outside, and calls its first kind yarn.
    let mut phi3 = new.clone();
    phi3["model_type"] = json!("phi3");
    refused(&phi3, &["original_max_position_embeddings", "missing"]);
    phi3["original_max_position_embeddings"] = json!(32);
    phi3["rope_parameters"]["rope_type"] = json!("yarn");
    assert_eq!(read(&phi3).0.rope.long.unwrap().original_context, 32);
}

#[test]
fn rope_that_is_not_supported() {
    for (parameters, words) in [
        (json!({"rope_type": "dynamic", "factor": 2.0}), &["rope_type", "\"dynamic\" is not supported"][..]),
        (json!({"rope_type": "proportional"}), &["proportional"]),
        (json!({"rope_type": "mrope"}), &["mrope"]),
        (json!({"rope_type": "linear"}), &["factor", "missing"]),
        (json!({"rope_type": "linear", "factor": 0}), &["factor"]),
        (json!({"rope_type": "linear", "factor": "2"}), &["factor"]),
        (json!({"rope_type": "yarn"}), &["factor", "missing"]),
        (json!({"rope_type": "llama3", "factor": 8.0}), &["low_freq_factor", "missing"]),
        (
            json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}),
            &["high_freq_factor"],
        ),
        (json!({"rope_type": "longrope"}), &["short_factor", "missing"]),
        (json!({"rope_type": 1}), &["rope_type", "expected text"]),
        (json!({"rope_type": "default", "full_attention": {"rope_theta": 1.0}}), &["full_attention"]),
    ] {
        for key in ["rope_parameters", "rope_scaling"] {
            let mut keys = family("llama");
            keys[key] = parameters.clone();
            refused(&keys, words);
        }
    }
    // Both styles at once, and they differ.
    let mut keys = family("llama");
    keys["rope_parameters"] = json!({"rope_type": "linear", "factor": 2.0});
    keys["rope_scaling"] = json!({"rope_type": "linear", "factor": 2});
    assert_eq!(read(&keys).0.rope.kind, "linear");
    keys["rope_scaling"] = json!({"rope_type": "linear", "factor": 4.0});
    refused(&keys, &["rope_scaling.factor", "4.0, while rope_parameters has 2.0"]);
    keys["rope_scaling"] = Value::Null;
    keys["rope_theta"] = json!(77.0);
    keys["rope_parameters"]["rope_theta"] = json!(99.0);
    assert_eq!(read(&keys).0.rope.theta, 99.0);
}

#[test]
fn part_of_a_head_rotates() {
    let half = |keys: Value| read(&keys).0.rope.half();
    assert_eq!(half(keys!("phi3", "head_dim": 16, "partial_rotary_factor": 0.75)), 6);
    assert_eq!(half(keys!("phi3", "head_dim": 20, "rope_parameters": {"partial_rotary_factor": 0.7})), 7);
    assert_eq!(half(keys!("minimax_m2", "head_dim": 16, "rotary_dim": 8)), 4);
    assert_eq!(
        half(keys!("minimax_m2", "head_dim": 16, "rotary_dim": 8, "rope_parameters": {"partial_rotary_factor": 0.25})),
        2
    );
    assert_eq!(half(keys!("minimax_m2", "head_dim": 16)), 8);
    refused(&keys!("phi3", "head_dim": 16, "partial_rotary_factor": 0.7), &["partial_rotary_factor", "even", "11"]);
    refused(&keys!("phi3", "partial_rotary_factor": 0.1), &["partial_rotary_factor", "found 0"]);
    refused(&keys!("phi3", "partial_rotary_factor": 1.5), &["partial_rotary_factor"]);
    refused(&keys!("minimax_m2", "head_dim": 16, "rotary_dim": 32), &["rotary_dim", "32"]);
    refused(
        &keys!("llama", "rope_parameters": {"partial_rotary_factor": 0.5}),
        &["partial_rotary_factor", "not supported"],
    );
    assert_eq!(half(keys!("llama", "partial_rotary_factor": 1.0)), HEAD_DIM / 2);
}

#[test]
fn three_axes() {
    let keys = |name: &str, parameters: Value| {
        let mut keys = family(name);
        keys["rope_scaling"] = parameters;
        keys
    };
    for (name, interleaved) in [("qwen2_vl", false), ("qwen3_vl_text", true)] {
        for kind in ["default", "mrope"] {
            let rope = read(&keys(name, json!({"type": kind, "mrope_section": [2, 1, 1]}))).0.rope;
            assert_eq!(rope.sections, Some(Sections { sizes: [2, 1, 1], interleaved }));
            assert_eq!(rope.kind, "none");
        }
        for bad in [json!([2, 1]), json!([2, 1, 2]), json!([4, 1, 1, 0]), json!("x")] {
            refused(&keys(name, json!({"type": "mrope", "mrope_section": bad})), &["rope_scaling.mrope_section"]);
        }
        let other = json!({"type": "mrope", "mrope_section": [2, 1, 1], "mrope_interleaved": !interleaved});
        refused(&keys(name, other), &["mrope_interleaved"]);
        // Without sections there are those of the published models, for heads of 128.
        let mut usual = keys(name, Value::Null);
        usual["head_dim"] = json!(128);
        let sizes = if interleaved { [24, 20, 20] } else { [16, 24, 24] };
        assert_eq!(read(&usual).0.rope.sections, Some(Sections { sizes, interleaved }));
    }
    assert_eq!(read(&family("qwen3")).0.rope.sections, None);
    assert_eq!(HEADS, 4);
}

#[test]
fn quantized_weights() {
    for config in [
        json!({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}),
        json!({"quant_method": "fp8", "weight_block_size": null}),
        json!({"quant_method": "compressed-tensors", "format": "float-quantized"}),
    ] {
        read(&keys!("llama", "quantization_config": config));
    }
    for (config, word) in [
        (json!({"quant_method": "gptq", "bits": 4}), "gptq"),
        (json!({"quant_method": "awq"}), "awq"),
        (json!({"quant_method": "bitsandbytes", "load_in_4bit": true}), "bitsandbytes"),
        (
            json!({"quant_method": "compressed-tensors", "format": "pack-quantized"}),
            "compressed-tensors\" (pack-quantized)",
        ),
        (json!({"quant_method": "mxfp4"}), "mxfp4"),
        (json!({"bits": 4}), "missing"),
        (json!({"quant_method": "fp8", "weight_block_size": [128]}), "weight_block_size"),
        (json!({"quant_method": "fp8", "weight_block_size": [0, 128]}), "weight_block_size"),
    ] {
        refused(&keys!("llama", "quantization_config": config), &["quantization_config", word]);
        let inside = json!({"model_type": "x", "text_config": keys!("llama", "quantization_config": config)});
        refused(&inside, &["text_config.quantization_config", word]);
    }
}
