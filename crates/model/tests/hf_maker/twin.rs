//! Folders of the same models as GGUF files of testdata that are of the architecture `llama`.
#![allow(dead_code, clippy::unwrap_used)]

use super::{Made, Tensor};
use puna_model::gguf::Gguf;
use puna_model::{Checkpoint, Config, Source};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// A model's file, and a folder of it.
pub struct Twin {
    pub path: PathBuf,
    pub source: Source,
    pub config: Config,
    pub made: Made,
}

/// Every model that can be written as a folder.
pub fn twins() -> Vec<Twin> {
    let twin = |path: PathBuf| {
        let source = Source::open(&path).unwrap();
        let (_, c) = source.config().unwrap();
        let gguf = source.gguf().unwrap();
        if c.arch != "llama" {
            return None;
        }
        let made = Made::new(&config(gguf, &c), &tensors(gguf, &c));
        Some(Twin { path, source, config: c, made })
    };
    models().into_iter().filter_map(twin).collect()
}

pub fn models() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/models");
    let folders = std::fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = folders.map(|folder| folder.join("model-f32.gguf")).filter(|f| f.exists()).collect();
    files.sort();
    assert!(files.len() >= 6, "{} models under {}", files.len(), root.display());
    files
}

/// What the rows of q and k were before they were put in GGUF's order: pairs that lie side by side there are half a
/// head apart.
fn row_order(rows: usize, head_dim: usize) -> Vec<usize> {
    let half = head_dim / 2;
    let place = |i: usize| if i < half { 2 * i } else { 2 * (i - half) + 1 };
    (0..rows).map(|row| row / head_dim * head_dim + place(row % head_dim)).collect()
}

/// transformers' names of a tensor of the architecture `llama`, and whether its rows are in GGUF's order.
fn renamed(name: &str) -> Option<(String, bool)> {
    let base = name.strip_suffix(".weight").or(name.strip_suffix(".bias"))?;
    let end = &name[base.len()..];
    let Some((layer, part)) = base.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else {
        let name = match base {
            "token_embd" => "model.embed_tokens",
            "output_norm" => "model.norm",
            "output" => "lm_head",
            _ => return None,
        };
        return Some((format!("{name}{end}"), false));
    };
    let (own, ordered) = match part {
        "attn_q" => ("self_attn.q_proj", true),
        "attn_k" => ("self_attn.k_proj", true),
        "attn_v" => ("self_attn.v_proj", false),
        "attn_output" => ("self_attn.o_proj", false),
        "attn_norm" => ("input_layernorm", false),
        "ffn_norm" => ("post_attention_layernorm", false),
        "ffn_gate" => ("mlp.gate_proj", false),
        "ffn_up" => ("mlp.up_proj", false),
        "ffn_down" => ("mlp.down_proj", false),
        "ffn_gate_inp" => ("block_sparse_moe.gate", false),
        // As if there was one expert: taken apart by who calls.
        "ffn_gate_exps" => ("block_sparse_moe.experts.w1", false),
        "ffn_up_exps" => ("block_sparse_moe.experts.w3", false),
        "ffn_down_exps" => ("block_sparse_moe.experts.w2", false),
        _ => return None,
    };
    Some((format!("model.layers.{layer}.{own}{end}"), ordered))
}

pub fn tensors(gguf: &Gguf, config: &Config) -> Vec<Tensor> {
    let mut all = Vec::new();
    for info in gguf.tensors() {
        let Some((name, ordered)) = renamed(&info.name) else {
            assert_eq!(&*info.name, "rope_freqs.weight");
            continue;
        };
        let mut bytes = gguf.data(info).unwrap().to_vec();
        let mut shape: Vec<usize> = info.shape.iter().map(|&n| n as usize).collect();
        if ordered {
            let row = bytes.len() / shape[0];
            let order = row_order(shape[0], config.head_dim);
            bytes = order.iter().flat_map(|&r| bytes[r * row..(r + 1) * row].to_vec()).collect();
        }
        match name.split_once(".experts.") {
            None => all.push(Tensor::new(name, "F32", &shape, bytes)),
            Some((before, part)) => {
                let n = shape.remove(0);
                for (e, bytes) in bytes.chunks_exact(bytes.len() / n).enumerate() {
                    all.push(Tensor::new(format!("{before}.experts.{e}.{part}"), "F32", &shape, bytes.to_vec()));
                }
            }
        }
    }
    all
}

pub fn config(gguf: &Gguf, c: &Config) -> Value {
    let number = |key: &str| gguf.meta().get::<f32>(&format!("llama.rope.scaling.{key}")).unwrap();
    let original = gguf.meta().get::<u32>("llama.rope.scaling.original_context_length").unwrap();
    let rope = match c.rope.kind {
        "none" => json!({"rope_type": "default"}),
        "llama3" => json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}),
        kind => json!({"rope_type": kind, "factor": number("factor"), "original_max_position_embeddings": original}),
    };
    let mut rope = rope;
    rope["rope_theta"] = json!(c.rope.theta);
    let mut config = json!({
        "model_type": "llama", "hidden_size": c.dim, "intermediate_size": c.ffn_dim, "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads, "num_key_value_heads": c.n_kv_heads, "head_dim": c.head_dim,
        "vocab_size": c.vocab_size, "rms_norm_eps": c.norm_eps, "max_position_embeddings": c.context_length,
        "tie_word_embeddings": gguf.find("output.weight").is_none(), "rope_parameters": rope
    });
    if let Some(window) = c.windows[0] {
        config["model_type"] = json!("mistral");
        config["sliding_window"] = json!(window);
    }
    if let Some(moe) = c.moe {
        config["model_type"] = json!("mixtral");
        config["num_local_experts"] = json!(moe.n_experts);
        config["num_experts_per_tok"] = json!(moe.routing.used);
        config["intermediate_size"] = json!(moe.ffn_dim);
    }
    config
}
