//! What a model is, as plain data: whatever differs between architectures is a value here.

use crate::rope::Rope;
use puna_kernels::ops::{Activation, Routing};

/// The shape and the constants of a model.
#[derive(Clone, Debug)]
pub struct Config {
    /// Architecture, as GGUF names it.
    pub arch: &'static str,
    /// The model's own name, where the file gives one.
    pub name: Option<String>,
    /// Rows of the embedding: token ids are below it.
    pub vocab_size: usize,
    /// Width of the residual.
    pub dim: usize,
    /// Layers.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; divides `n_heads`.
    pub n_kv_heads: usize,
    /// Dimensions of a head, for queries, keys and values.
    pub head_dim: usize,
    /// Width of a dense feed-forward layer.
    pub ffn_dim: usize,
    /// Positions the model was trained for.
    pub context_length: usize,
    /// Added to the mean square in every norm.
    pub norm_eps: f32,
    /// Rotation of queries and keys.
    pub rope: Rope,
    /// Layers that rotate at all, `[n_layers]`.
    pub rope_layers: Vec<bool>,
    /// Positions a layer sees, itself included, `[n_layers]`; all before it where `None`.
    pub windows: Vec<Option<usize>>,
    /// Multiplies attention scores: `1 / sqrt(head_dim)` unless the file says otherwise.
    pub attn_scale: f32,
    /// `cap * tanh(score / cap)` of attention scores.
    pub attn_softcap: Option<f32>,
    /// The same of logits.
    pub logit_softcap: Option<f32>,
    /// Multiplies embeddings of tokens.
    pub embed_scale: f32,
    /// Multiplies what attention and feed-forward add to the residual.
    pub residual_scale: f32,
    /// Multiplies logits.
    pub logit_scale: f32,
    /// The gate of feed-forward layers.
    pub activation: Activation,
    /// Layers after which image rows get more of the image added (deepstack).
    pub n_deepstack: usize,
    /// Mixture of experts, in the layers that have a router.
    pub moe: Option<MoeConfig>,
}

/// A mixture of experts.
#[derive(Clone, Copy, Debug)]
pub struct MoeConfig {
    /// Experts of a layer.
    pub n_experts: usize,
    /// Width of an expert.
    pub ffn_dim: usize,
    /// Width of the expert that every token has, where there is one.
    pub shared_ffn_dim: usize,
    /// How experts are chosen and weighed.
    pub routing: Routing,
}

impl Config {
    /// Width of the queries: `n_heads * head_dim`.
    pub fn q_dim(&self) -> usize {
        self.n_heads * self.head_dim
    }

    /// Width of the keys and of the values: `n_kv_heads * head_dim`.
    pub fn kv_dim(&self) -> usize {
        self.n_kv_heads * self.head_dim
    }
}
