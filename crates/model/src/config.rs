//! What a model is, as plain data: whatever differs between architectures is a value here.

use crate::error::Error;
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

    /// Checks what files guarantee and a configuration made by hand may not.
    ///
    /// # Errors
    /// [`Error::Config`] names the field.
    pub fn check(&self) -> Result<(), Error> {
        let error = |what: String| Err(Error::Config { what });
        let counts = [
            ("vocab_size", self.vocab_size),
            ("dim", self.dim),
            ("n_layers", self.n_layers),
            ("n_heads", self.n_heads),
            ("n_kv_heads", self.n_kv_heads),
            ("head_dim", self.head_dim),
        ];
        if let Some((name, _)) = counts.iter().find(|(_, n)| *n == 0) {
            return error(format!("{name}: expected a number above 0"));
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            return error(format!("n_kv_heads: {} heads are not divisible into {}", self.n_heads, self.n_kv_heads));
        }
        for (name, len) in [("rope_layers", self.rope_layers.len()), ("windows", self.windows.len())] {
            if len != self.n_layers {
                return error(format!("{name}: expected {} entries, one a layer, found {len}", self.n_layers));
            }
        }
        if self.windows.contains(&Some(0)) {
            return error("windows: a window holds at least the position itself".into());
        }
        let halves = [Some(self.rope.inv_freq.len()), self.rope.long.as_ref().map(|long| long.inv_freq.len())];
        if let Some(half) =
            halves.into_iter().flatten().find(|&half| half != self.rope.half() || 2 * half > self.head_dim)
        {
            return error(format!("rope: {half} frequencies do not fit heads of {} dimensions", self.head_dim));
        }
        if self.n_deepstack > self.n_layers {
            return error(format!("n_deepstack: {} of {} layers", self.n_deepstack, self.n_layers));
        }
        match &self.moe {
            Some(moe) if moe.routing.used == 0 || moe.routing.used > moe.n_experts || moe.ffn_dim == 0 => {
                error(format!("moe: {} of {} experts of width {}", moe.routing.used, moe.n_experts, moe.ffn_dim))
            }
            None if self.ffn_dim == 0 => error("ffn_dim: expected a number above 0".into()),
            _ => Ok(()),
        }
    }
}
