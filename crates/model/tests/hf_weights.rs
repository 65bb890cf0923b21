//! Weights of a folder, in whatever layout and type they are stored: the same numbers give the same logits, bit for
//! bit.

#![allow(clippy::unwrap_used)]

mod hf_maker;

use hf_maker::{DIM, EXPERT_FFN, EXPERTS, Made, Numbers, Small, Tensor, assert_same, safetensors, tokens};
use serde_json::{Value, json};

#[test]
fn any_prefix_is_found() {
    let small = Small::dense("llama");
    let expected = small.made().logits(&tokens(12));
    let prefixes =
        ["model.language_model.", "language_model.model.", "model.text_model.", "language_model.", "", "a.b."];
    for prefix in prefixes {
        let renamed = small.clone().renamed(|name| match name.strip_prefix("model.") {
            Some(own) => format!("{prefix}{own}"),
            None => name.to_owned(),
        });
        assert_same(&renamed.made().logits(&tokens(12)), &expected, prefix);
    }
    for head in ["language_model.lm_head.weight", "language_model.model.lm_head.weight"] {
        let renamed = small.clone().renamed(|name| match name.strip_prefix("model.") {
            Some(own) => format!("language_model.model.{own}"),
            None => head.to_owned(),
        });
        assert_same(&renamed.made().logits(&tokens(12)), &expected, head);
    }
}

#[test]
fn a_vision_tower_is_left_alone() {
    let mut small = Small::dense("llama").renamed(|name| name.replace("model.", "model.language_model."));
    let expected = small.made().logits(&tokens(12));
    for name in ["model.visual.blocks.0.attn.qkv.weight", "model.visual.layers.0.self_attn.q_proj.weight", "visual.x"] {
        small.tensors.push(Tensor::f32(name, &[2, 2], &[f32::NAN; 4]));
    }
    assert_same(&small.made().logits(&tokens(12)), &expected, "with a tower");
}

#[test]
fn shards_are_put_together() {
    let small = Small::dense("llama");
    let expected = small.made().logits(&tokens(12));
    let made = sharded(&small, 3, &mut |_| {});
    // What lies beside an index is not looked at.
    made.write("model.safetensors", b"not a model");
    made.write("consolidated.safetensors", b"not a model");
    assert_same(&made.logits(&tokens(12)), &expected, "three shards");
    // A single file may have any name.
    let made = small.made();
    std::fs::rename(made.path().join("model.safetensors"), made.path().join("weights.safetensors")).unwrap();
    made.write("consolidated.safetensors", b"not a model");
    assert_same(&made.logits(&tokens(12)), &expected, "another name");
}

/// The model in `n` files with an index, which `change` may change.
fn sharded(small: &Small, n: usize, change: &mut dyn FnMut(&mut Value)) -> Made {
    let made = small.made();
    made.remove("model.safetensors");
    let mut index = json!({"metadata": {"total_size": 1}, "weight_map": {}});
    for (i, tensors) in small.tensors.chunks(small.tensors.len().div_ceil(n)).enumerate() {
        let file = format!("model-{:05}-of-{n:05}.safetensors", i + 1);
        made.write(&file, safetensors(tensors));
        for t in tensors {
            index["weight_map"][&t.name] = json!(file);
        }
    }
    change(&mut index);
    made.write("model.safetensors.index.json", index.to_string());
    made
}

#[test]
fn an_index_is_checked() {
    let small = Small::dense("llama");
    let name = "model.layers.1.self_attn.k_proj.weight";
    let wrong: [(&str, Value, &[&str]); 9] = [
        ("a path up", json!("../model-00001-of-00002.safetensors"), &["index.json", "plain file name"]),
        ("a path down", json!("sub/model.safetensors"), &["plain file name"]),
        ("an absolute path", json!("/etc/hostname"), &["plain file name", "/etc/hostname"]),
        ("a path of another system", json!("..\\x.safetensors"), &["plain file name"]),
        ("the folder above", json!(".."), &["plain file name"]),
        ("the folder", json!("."), &["plain file name"]),
        ("nothing", json!(""), &["plain file name"]),
        ("a number", json!(1), &["index.json", "weight_map", name]),
        ("another shard", json!("model-00001-of-00002.safetensors"), &[name, "no such tensor"]),
    ];
    for (what, value, words) in wrong {
        let refusal = sharded(&small, 2, &mut |index| index["weight_map"][name] = value.clone()).refusal();
        assert!(words.iter().all(|word| refusal.contains(word)), "{what}: {refusal}");
    }
    let made = sharded(&small, 2, &mut |_| {});
    made.remove("model-00002-of-00002.safetensors");
    let refusal = made.refusal();
    assert!(refusal.contains("model-00002-of-00002.safetensors") && refusal.contains("missing shard"), "{refusal}");
    assert!(made.folder().tensors().len() > 0, "what is there can be looked at");
    made.remove("model.safetensors.index.json");
    made.write("model-00002-of-00002.safetensors", safetensors(&small.tensors[..1]));
    let refusal = made.refusal();
    assert!(refusal.contains("2 safetensors files") && refusal.contains("index.json"), "{refusal}");
}

#[test]
fn fused_projections_are_taken_apart() {
    let small = Small::dense("llama");
    let expected = small.made().logits(&tokens(12));
    let mut fused = small.clone().with("model_type", json!("phi3"));
    for l in 0..hf_maker::LAYERS {
        for (parts, name) in [
            (&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"][..], "self_attn.qkv_proj"),
            (&["mlp.gate_proj", "mlp.up_proj"], "mlp.gate_up_proj"),
        ] {
            let names: Vec<String> = parts.iter().map(|part| format!("model.layers.{l}.{part}.weight")).collect();
            let bytes: Vec<u8> = names.iter().flat_map(|name| small.tensor(name).bytes.clone()).collect();
            fused.tensors.retain(|t| !names.contains(&t.name));
            let rows = bytes.len() / 4 / DIM;
            fused.tensors.push(Tensor::new(format!("model.layers.{l}.{name}.weight"), "F32", &[rows, DIM], bytes));
        }
    }
    assert_same(&fused.made().logits(&tokens(12)), &expected, "fused");
}

/// The experts of a model in merged tensors; `transposed`: with rows as columns.
fn merged(small: &Small, transposed: bool) -> Small {
    let mut merged = small.clone().without_tensors(".mlp.experts.");
    for l in 0..hf_maker::LAYERS {
        let part = |e: usize, part: &str| small.tensor(&format!("model.layers.{l}.mlp.experts.{e}.{part}_proj.weight"));
        for (name, parts, rows, cols) in
            [("gate_up_proj", &["gate", "up"][..], 2 * EXPERT_FFN, DIM), ("down_proj", &["down"][..], DIM, EXPERT_FFN)]
        {
            let mut values = Vec::new();
            for e in 0..EXPERTS {
                let own: Vec<f32> = parts.iter().flat_map(|p| part(e, p).values()).collect();
                if transposed {
                    values.extend((0..cols).flat_map(|c| (0..rows).map(move |r| r * cols + c)).map(|i| own[i]));
                } else {
                    values.extend(own);
                }
            }
            let shape = if transposed { [EXPERTS, cols, rows] } else { [EXPERTS, rows, cols] };
            merged.tensors.push(Tensor::f32(format!("model.layers.{l}.mlp.experts.{name}"), &shape, &values));
        }
    }
    merged
}

#[test]
fn experts_in_any_layout() {
    let small = Small::mixture();
    let expected = small.made().logits(&tokens(12));
    assert_same(&merged(&small, false).made().logits(&tokens(12)), &expected, "rows");
    assert_same(&merged(&small, true).made().logits(&tokens(12)), &expected, "columns");
    let mixtral = small.renamed(|name| {
        let name =
            name.replace("mlp.experts", "block_sparse_moe.experts").replace("mlp.gate.", "block_sparse_moe.gate.");
        name.replace("gate_proj", "w1").replace("up_proj", "w3").replace("down_proj", "w2")
    });
    assert_same(&mixtral.made().logits(&tokens(12)), &expected, "Mixtral's names");
}

#[test]
fn experts_of_another_shape_are_refused() {
    let mut wrong = merged(&Small::mixture(), false);
    wrong.config["moe_intermediate_size"] = json!(EXPERT_FFN + 1);
    let refusal = wrong.made().refusal();
    assert!(refusal.contains("gate_up_proj") && refusal.contains("[3, 42, 24] or [3, 24, 42]"), "{refusal}");
    let mut wrong = merged(&Small::mixture(), false);
    wrong.config["num_experts"] = json!(EXPERTS + 1);
    assert!(wrong.made().refusal().contains("expected shape [4, "));
    let both = Small { tensors: [Small::mixture().tensors, wrong.tensors].concat(), ..Small::mixture() };
    let mut seen = std::collections::HashSet::new();
    let both = Small { tensors: both.tensors.into_iter().filter(|t| seen.insert(t.name.clone())).collect(), ..both };
    let refusal = both.made().refusal();
    assert!(refusal.contains("takes the same place as"), "{refusal}");
    for part in ["experts.1.up_proj", "experts.0.gate_proj", "experts.2.down_proj"] {
        let refusal = Small::mixture().without_tensors(part).made().refusal();
        assert!(refusal.contains(part), "{part}: {refusal}");
    }
    let mut fewer = Small::mixture();
    fewer.config["num_experts"] = json!(EXPERTS - 1);
    assert!(fewer.made().refusal().contains("mlp.gate.weight"));
}

/// A value of FP8's format, from its definition.
fn fp8(byte: u8) -> f32 {
    let (exponent, fraction) = (i32::from(byte >> 3 & 15), f32::from(byte & 7) / 8.0);
    let size = if exponent == 0 { fraction * 2f32.powi(-6) } else { (1.0 + fraction) * 2f32.powi(exponent - 7) };
    if byte < 128 { size } else { -size }
}

/// The model with `of` in FP8 of random bytes and scales in these blocks, and the same in single precision.
fn in_fp8(small: &Small, of: &str, block: [usize; 2], shape: impl Fn(usize, usize) -> Vec<usize>) -> [Small; 2] {
    let (mut numbers, mut both) = (Numbers(3), [small.clone(), small.clone()]);
    let names: Vec<String> = small.tensors.iter().filter(|t| t.name.contains(of)).map(|t| t.name.clone()).collect();
    assert!(!names.is_empty());
    for name in names {
        let at = small.tensors.iter().position(|t| t.name == name).unwrap();
        let [rows, cols] = small.tensors[at].shape[..] else { panic!("{name} is no matrix") };
        let bytes: Vec<u8> = (0..rows * cols).map(|_| numbers.bits() as u8).map(|b| b & !(4 << (b & 1))).collect();
        let blocks = [rows.div_ceil(block[0]), cols.div_ceil(block[1])];
        let scales: Vec<f32> = numbers.take(blocks[0] * blocks[1], 1.0).iter().map(|x| 1e-3 * (1.2 + x)).collect();
        let value = |i: usize| fp8(bytes[i]) * scales[i / cols / block[0] * blocks[1] + i % cols / block[1]];
        let values: Vec<f32> = (0..rows * cols).map(value).collect();
        both[1].tensors[at] = Tensor::f32(&name, &[rows, cols], &values);
        both[0].tensors[at] = Tensor::new(&name, "F8_E4M3", &[rows, cols], bytes);
        both[0].tensors.push(Tensor::f32(format!("{name}_scale_inv"), &shape(blocks[0], blocks[1]), &scales));
    }
    both
}

#[test]
fn fp8_times_its_scales() {
    let small = Small::dense("llama").with("quantization_config", json!({"quant_method": "fp8"}));
    let sized = |rows: usize, cols: usize| json!({"quant_method": "fp8", "weight_block_size": [rows, cols]});
    // Blocks that crop at the edges, whole rows, one number.
    for (block, key) in
        [([7, 5], sized(7, 5)), ([16, 8], sized(16, 8)), ([128, 128], small.config["quantization_config"].clone())]
    {
        let small = small.clone().with("quantization_config", key);
        let [stored, plain] = in_fp8(&small, "_proj.weight", block, |r, c| vec![r, c]);
        assert_same(&stored.made().logits(&tokens(12)), &plain.made().logits(&tokens(12)), &format!("{block:?}"));
    }
    for column in [false, true] {
        let shape = |r: usize, _| if column { vec![r, 1] } else { vec![r] };
        let [stored, plain] = in_fp8(&small, "_proj.weight", [1, 1 << 20], shape);
        assert_same(&stored.made().logits(&tokens(12)), &plain.made().logits(&tokens(12)), "rows");
    }
    for shape in [vec![], vec![1], vec![1, 1]] {
        let [stored, plain] = in_fp8(&small, "_proj.weight", [1 << 20, 1 << 20], |_, _| shape.clone());
        let stored = stored.renamed(|name| name.replace("_scale_inv", "_scale"));
        assert_same(&stored.made().logits(&tokens(12)), &plain.made().logits(&tokens(12)), &format!("{shape:?}"));
    }
}

#[test]
fn fp8_experts_in_one_tensor() {
    let small =
        Small::mixture().with("quantization_config", json!({"quant_method": "fp8", "weight_block_size": [6, 7]}));
    let [stored, plain] = in_fp8(&small, "mlp.experts.", [6, 7], |r, c| vec![r, c]);
    let expected = plain.made().logits(&tokens(12));
    assert_same(&stored.made().logits(&tokens(12)), &expected, "a tensor an expert");
    let mut fused = stored.clone().without_tensors("down_proj");
    for l in 0..hf_maker::LAYERS {
        let join = |end: &str| {
            let all =
                (0..EXPERTS).map(|e| stored.tensor(&format!("model.layers.{l}.mlp.experts.{e}.down_proj.weight{end}")));
            let all: Vec<&Tensor> = all.collect();
            let shape = [&[EXPERTS], &all[0].shape[..]].concat();
            let bytes = all.iter().flat_map(|t| t.bytes.clone()).collect();
            Tensor::new(format!("model.layers.{l}.mlp.experts.down_proj{end}"), all[0].dtype, &shape, bytes)
        };
        fused.tensors.extend([join(""), join("_scale_inv")]);
    }
    assert_same(&fused.made().logits(&tokens(12)), &expected, "one tensor");
}

#[test]
fn fp8_that_cannot_be_read_is_refused() {
    let [stored, _] = in_fp8(&Small::dense("llama"), "1.mlp.up_proj.weight", [128, 128], |r, c| vec![r, c]);
    let refusal = stored.clone().without_tensors("_scale_inv").made().refusal();
    assert!(["F8_E4M3", "1.mlp.up_proj.weight", "scale"].iter().all(|w| refusal.contains(w)), "{refusal}");
    let mut wrong = stored.clone();
    let scales = wrong.tensors.last_mut().unwrap();
    *scales = Tensor::f32(scales.name.clone(), &[2, 2], &[1.0; 4]);
    let refusal = wrong.made().refusal();
    assert!(refusal.contains("up_proj.weight_scale_inv") && refusal.contains("[2, 2]"), "{refusal}");
    let mut wrong = stored.clone();
    let scales = wrong.tensors.last_mut().unwrap();
    *scales = Tensor::new(scales.name.clone(), "F8_E8M0", &[1, 1], vec![127]);
    assert!(wrong.made().refusal().contains("F8_E8M0"));
    for dtype in ["F8_E5M2", "I8", "U8"] {
        let mut wrong = stored.clone().without_tensors("_scale_inv");
        wrong.tensors.iter_mut().filter(|t| t.dtype == "F8_E4M3").for_each(|t| t.dtype = dtype);
        let refusal = wrong.made().refusal();
        assert!(refusal.contains(dtype) && refusal.contains("not supported"), "{refusal}");
    }
    // Scales that nothing takes.
    let mut wrong = Small::dense("llama");
    wrong.tensors.push(Tensor::f32("model.layers.0.mlp.up_proj.weight_scale", &[1], &[0.5]));
    assert!(wrong.made().refusal().contains("model.layers.0.mlp.up_proj.weight_scale"));
}

#[test]
fn halves_stay_as_they_are() {
    for (dtype, convert) in [
        ("F16", (|x: f32| half::f16::from_f32(x).to_le_bytes()) as fn(f32) -> [u8; 2]),
        ("BF16", |x| half::bf16::from_f32(x).to_le_bytes()),
    ] {
        let (mut stored, mut plain) = (Small::dense("llama"), Small::dense("llama"));
        for (stored, plain) in stored.tensors.iter_mut().zip(&mut plain.tensors) {
            let values = plain.values();
            let bytes: Vec<u8> = values.iter().flat_map(|&x| convert(x)).collect();
            let rounded = bytes.as_chunks().0.iter().map(|b| match dtype {
                "F16" => half::f16::from_le_bytes(*b).to_f32(),
                _ => half::bf16::from_le_bytes(*b).to_f32(),
            });
            *plain = Tensor::f32(&plain.name, &plain.shape, &rounded.collect::<Vec<_>>());
            *stored = Tensor::new(&stored.name, dtype, &stored.shape, bytes);
        }
        assert_same(&stored.made().logits(&tokens(12)), &plain.made().logits(&tokens(12)), dtype);
    }
}

#[test]
fn a_missing_tensor_is_named() {
    let small = Small::dense("llama");
    for part in ["layers.1.self_attn.q_proj", "layers.0.mlp.down_proj", "layers.1.input_layernorm", "model.norm"] {
        let refusal = small.clone().without_tensors(part).made().refusal();
        assert!(refusal.contains(part) && refusal.contains("missing"), "{part}: {refusal}");
    }
    let refusal = small.clone().without_tensors("embed_tokens").made().refusal();
    assert!(refusal.contains("model.embed_tokens.weight"), "{refusal}");
    let refusal = small.without_tensors("lm_head").made().refusal();
    assert!(refusal.contains("lm_head.weight") && refusal.contains("model.lm_head.weight"), "{refusal}");
}

#[test]
fn a_tensor_of_no_use_is_named() {
    for name in [
        "model.layers.1.self_attn.sinks",
        "model.layers.0.mlp.act.scale",
        "model.norm.bias",
        "model.embed_norm.weight",
        "lm_head.scale",
    ] {
        let mut small = Small::dense("llama");
        small.tensors.push(Tensor::f32(name, &[2], &[1.0, 2.0]));
        let refusal = small.made().refusal();
        assert!(refusal.contains(name) && refusal.contains("nothing"), "{name}: {refusal}");
    }
    let mut small = Small::dense("llama");
    let expected = small.made().logits(&tokens(12));
    // Tables that every reader makes, and what is no part of the text model.
    for name in [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "model.layers.0.mlp.up_proj.input_scale",
        "model.layers.0.self_attn.k_scale",
        "score.weight",
    ] {
        small.tensors.push(Tensor::f32(name, &[2], &[1.0, 2.0]));
    }
    assert_same(&small.made().logits(&tokens(12)), &expected, "more tensors");
}

#[test]
fn biases_are_used_and_missed() {
    let mut small = Small::dense("llama");
    let without = small.made().logits(&tokens(12));
    for l in 0..hf_maker::LAYERS {
        for (part, n) in [("q", 32), ("k", 16), ("v", 16), ("o", DIM)] {
            let name = format!("model.layers.{l}.self_attn.{part}_proj.bias");
            small.tensors.push(Tensor::f32(name, &[n], &Numbers(n as u64).take(n, 1.0)));
        }
    }
    let with = small.made().logits(&tokens(12));
    let change = with.iter().zip(&without).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(change > 0.1, "{change}");
    // A key that promises them, and a family that always has them.
    let asked = small.clone().with("attention_bias", json!(true));
    assert_same(&asked.made().logits(&tokens(12)), &with, "attention_bias");
    for part in ["0.self_attn.q_proj.bias", "1.self_attn.o_proj.bias"] {
        let refusal = asked.clone().without_tensors(part).made().refusal();
        assert!(refusal.contains(part), "{part}: {refusal}");
    }
    let qwen2 = small.with("model_type", json!("qwen2")).without_tensors("o_proj.bias");
    assert_same(&qwen2.made().logits(&tokens(12)), &qwen2.made().logits(&tokens(12)), "qwen2");
    let refusal = qwen2.without_tensors("1.self_attn.k_proj.bias").made().refusal();
    assert!(refusal.contains("1.self_attn.k_proj.bias"), "{refusal}");
    let refusal = Small::mixture().without_tensors("0.self_attn.k_norm").made().refusal();
    assert!(refusal.contains("0.self_attn.k_norm"), "{refusal}");
}

#[test]
fn the_embedding_is_the_output_where_the_file_says_so() {
    let untied = Small::dense("llama");
    let mut same = untied.clone();
    let embedding = untied.tensor("model.embed_tokens.weight").clone();
    same.tensors.iter_mut().filter(|t| t.name == "lm_head.weight").for_each(|t| t.bytes = embedding.bytes.clone());
    let expected = same.made().logits(&tokens(12));
    let tied = untied.clone().with("tie_word_embeddings", json!(true));
    assert_same(&tied.made().logits(&tokens(12)), &expected, "tied, with an output beside");
    assert_same(&tied.clone().without_tensors("lm_head").made().logits(&tokens(12)), &expected, "tied");
    // Around a text model: the outermost key counts; where it denies, the text's own does if there is no output.
    let around = |outer: Value, inner: Value, small: &Small| {
        let mut text = small.config.clone();
        text["tie_word_embeddings"] = inner;
        let config = json!({"model_type": "llava", "tie_word_embeddings": outer, "text_config": text});
        Small { config, ..small.clone() }.made()
    };
    let headless = untied.clone().without_tensors("lm_head");
    assert_same(&around(json!(true), json!(false), &untied).logits(&tokens(12)), &expected, "outer");
    assert_same(&around(Value::Null, json!(true), &untied).logits(&tokens(12)), &expected, "inner");
    assert_same(&around(json!(false), json!(true), &headless).logits(&tokens(12)), &expected, "no output");
    let own = untied.made().logits(&tokens(12));
    assert_same(&around(json!(false), json!(true), &untied).logits(&tokens(12)), &own, "an output");
    assert!(around(Value::Null, Value::Null, &headless).refusal().contains("lm_head.weight"));
}
