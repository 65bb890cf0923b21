//! What transformers assumes of each model family where a config.json is silent, and which row of
//! [`ARCHS`](crate::arch::ARCHS) computes it. Defaults are those of transformers 5.24's configuration classes.

use super::config::{granite, smollm3};
use super::json::Keys;
use crate::config::Config;
use crate::error::Error;

/// A family of models: one row of [`FAMILIES`].
pub struct Family {
    /// `model_type`, of the text model or of a model around it; the first is the family's own.
    pub types: &'static [&'static str],
    /// What `architectures` has, for files without a type; the same without an output is the class `Model`.
    pub class: &'static str,
    /// The architecture, as GGUF names it.
    pub arch: &'static str,
    /// Defaults of keys that are absent.
    pub defaults: Defaults,
    /// Which layers have a sliding window.
    pub windows: Windows,
    /// Only part of a head may rotate.
    pub partial_rotary: bool,
    /// Positions before scaling are what the outermost key says, whatever the rope parameters say.
    pub original_context_outside: bool,
    /// Pairs turn by time, height and width.
    pub axes: Option<Axes>,
    /// Mixture of experts.
    pub experts: Option<Experts>,
    /// Tensors of layers that exist when a key is true.
    pub biases: &'static [Biases],
    /// Keys of which only one value is computed.
    pub fixed: &'static [(&'static str, &'static str)],
    /// What no other field says.
    pub adjust: fn(&Keys, &mut Config) -> Result<(), Error>,
}

impl Family {
    /// Whether `architectures` may name it so: `Qwen3ForCausalLM`, `Qwen3Model`.
    pub fn is_class(&self, name: &str) -> bool {
        let stem = self.class.split_once("For").map_or(self.class, |(stem, _)| stem);
        name == self.class || name.strip_suffix("Model") == Some(stem)
    }
}

/// What an absent key means.
pub struct Defaults {
    /// `num_key_value_heads`; `None`: as many as query heads.
    pub n_kv_heads: Option<usize>,
    /// `head_dim`; `None`: hidden_size by heads.
    pub head_dim: Option<usize>,
    /// `rms_norm_eps`
    pub norm_eps: f32,
    /// `rope_theta`
    pub theta: f32,
    /// `max_position_embeddings`
    pub context: usize,
}

/// Which layers have a sliding window.
pub enum Windows {
    /// None, whatever the file says.
    Never,
    /// `sliding_window`, by default the given one, in all layers, or in those of `layer_types`.
    All(Option<usize>),
    /// The same, but `layer_types` is not looked at, and `use_sliding_window` must be true.
    AllSwitched,
    /// `sliding_window`, 4096 where absent, where `use_sliding_window` is true: in the layers of `layer_types`, or else
    /// where the function says, of the layer and `max_window_layers` (its default is given).
    Layers(usize, fn(usize, usize) -> bool),
    /// The same in the layers that do not rotate, and none by default.
    Unrotated,
}

/// Pairs that turn by time, height and width.
pub struct Axes {
    /// `mrope_section`: pairs of each.
    pub sections: [usize; 3],
    /// They take turns.
    pub interleaved: bool,
    /// The first layers get more of the image, as many as the vision tower hands over.
    pub deepstack: bool,
}

/// A mixture of experts.
pub struct Experts {
    /// The key of an expert's width.
    pub ffn_key: &'static str,
    /// `num_experts_per_tok`
    pub used: usize,
    /// Scores are sigmoids, and not a softmax.
    pub sigmoid: bool,
    /// Whether the weights of the chosen are divided by their sum.
    pub normalize: Normalize,
    /// The key of the width of an expert that every token has.
    pub shared_ffn_key: Option<&'static str>,
}

/// Whether the weights of the chosen experts are divided by their sum.
pub enum Normalize {
    /// Always.
    Always,
    /// If `norm_topk_prob` is true; it is false by default.
    Asked,
}

/// Biases that exist when a key is true.
pub struct Biases {
    /// The key; it is false by default.
    pub key: &'static str,
    /// Projections that have one, as GGUF names them.
    pub of: &'static [&'static str],
}

const ATTENTION_BIAS: Biases = Biases { key: "attention_bias", of: &["attn_q", "attn_k", "attn_v", "attn_output"] };
const MLP_BIAS: Biases = Biases { key: "mlp_bias", of: &["ffn_gate", "ffn_up", "ffn_down"] };

const LLAMA: Family = Family {
    types: &["llama", "smolvlm", "idefics3"],
    class: "LlamaForCausalLM",
    arch: "llama",
    defaults: Defaults { n_kv_heads: None, head_dim: None, norm_eps: 1e-6, theta: 10_000.0, context: 2048 },
    windows: Windows::Never,
    partial_rotary: false,
    original_context_outside: false,
    axes: None,
    experts: None,
    biases: &[ATTENTION_BIAS, MLP_BIAS],
    fixed: &[],
    adjust: |_, _| Ok(()),
};

const MISTRAL: Family = Family {
    types: &["mistral", "ministral", "mistral3"],
    class: "MistralForCausalLM",
    defaults: Defaults { n_kv_heads: Some(8), context: 131_072, ..LLAMA.defaults },
    windows: Windows::All(Some(4096)),
    biases: &[],
    ..LLAMA
};

const QWEN2: Family = Family {
    types: &["qwen2"],
    class: "Qwen2ForCausalLM",
    arch: "qwen2",
    defaults: Defaults { n_kv_heads: Some(32), context: 32_768, ..LLAMA.defaults },
    windows: Windows::Layers(28, |layer, max| layer >= max),
    biases: &[],
    ..LLAMA
};

const QWEN3: Family = Family {
    types: &["qwen3", "lighton_ocr"],
    class: "Qwen3ForCausalLM",
    arch: "qwen3",
    defaults: Defaults { head_dim: Some(128), ..QWEN2.defaults },
    biases: &[ATTENTION_BIAS],
    ..QWEN2
};

const QWEN3_VL: Family = Family {
    types: &["qwen3_vl_text", "qwen3_vl"],
    class: "Qwen3VLForConditionalGeneration",
    arch: "qwen3vl",
    defaults: Defaults { theta: 500_000.0, context: 128_000, ..QWEN3.defaults },
    windows: Windows::Never,
    axes: Some(Axes { sections: [24, 20, 20], interleaved: true, deepstack: true }),
    ..QWEN3
};

/// Every family that is read from a folder.
pub static FAMILIES: &[Family] = &[
    LLAMA,
    MISTRAL,
    Family {
        types: &["mixtral"],
        class: "MixtralForCausalLM",
        defaults: Defaults { norm_eps: 1e-5, theta: 1e6, ..MISTRAL.defaults },
        windows: Windows::All(None),
        experts: Some(Experts {
            ffn_key: "intermediate_size",
            used: 2,
            sigmoid: false,
            normalize: Normalize::Always,
            shared_ffn_key: None,
        }),
        ..MISTRAL
    },
    QWEN2,
    Family {
        types: &["qwen2_moe"],
        class: "Qwen2MoeForCausalLM",
        arch: "qwen2moe",
        defaults: Defaults { n_kv_heads: Some(16), ..QWEN2.defaults },
        // Every other layer of the first ones: so it is in the reference.
        windows: Windows::Layers(28, |layer, max| layer % 2 == 0 && layer < max),
        experts: Some(Experts {
            ffn_key: "moe_intermediate_size",
            used: 4,
            sigmoid: false,
            normalize: Normalize::Asked,
            shared_ffn_key: Some("shared_expert_intermediate_size"),
        }),
        fixed: &[("qkv_bias", "true")],
        ..QWEN2
    },
    QWEN3,
    Family {
        types: &["qwen3_moe"],
        class: "Qwen3MoeForCausalLM",
        arch: "qwen3moe",
        defaults: Defaults { n_kv_heads: Some(4), head_dim: None, ..QWEN3.defaults },
        windows: Windows::AllSwitched,
        experts: Some(Experts {
            ffn_key: "moe_intermediate_size",
            used: 8,
            sigmoid: false,
            normalize: Normalize::Asked,
            shared_ffn_key: None,
        }),
        ..QWEN3
    },
    Family {
        types: &["qwen2_vl_text", "qwen2_vl", "qwen2_5_vl_text", "qwen2_5_vl"],
        class: "Qwen2VLForConditionalGeneration",
        arch: "qwen2vl",
        defaults: Defaults { n_kv_heads: Some(8), norm_eps: 1e-5, theta: 1e6, ..QWEN2.defaults },
        windows: Windows::Layers(80, |layer, max| layer >= max),
        axes: Some(Axes { sections: [16, 24, 24], interleaved: false, deepstack: false }),
        ..QWEN2
    },
    QWEN3_VL,
    Family {
        types: &["qwen3_vl_moe_text", "qwen3_vl_moe"],
        class: "Qwen3VLMoeForConditionalGeneration",
        arch: "qwen3vlmoe",
        defaults: Defaults { n_kv_heads: Some(16), head_dim: None, ..QWEN3_VL.defaults },
        experts: Some(Experts {
            ffn_key: "moe_intermediate_size",
            used: 4,
            sigmoid: false,
            normalize: Normalize::Always,
            shared_ffn_key: None,
        }),
        fixed: &[("norm_topk_prob", "true")],
        ..QWEN3_VL
    },
    Family {
        types: &["phi3"],
        class: "Phi3ForCausalLM",
        arch: "phi3",
        defaults: Defaults { norm_eps: 1e-5, context: 4096, ..LLAMA.defaults },
        windows: Windows::All(None),
        partial_rotary: true,
        original_context_outside: true,
        biases: &[],
        ..LLAMA
    },
    Family {
        types: &["minimax_m2"],
        class: "MiniMaxM2ForCausalLM",
        arch: "minimax-m2",
        defaults: Defaults { n_kv_heads: Some(8), head_dim: Some(128), theta: 5e6, context: 196_608, ..LLAMA.defaults },
        partial_rotary: true,
        experts: Some(Experts {
            ffn_key: "intermediate_size",
            used: 8,
            sigmoid: true,
            normalize: Normalize::Always,
            shared_ffn_key: None,
        }),
        biases: &[],
        fixed: &[
            ("scoring_func", "\"sigmoid\""),
            ("use_routing_bias", "true"),
            ("use_qk_norm", "true"),
            ("qk_norm_type", "\"per_layer\""),
            ("shared_intermediate_size", "0"),
        ],
        ..LLAMA
    },
    Family {
        types: &["smollm3"],
        class: "SmolLM3ForCausalLM",
        arch: "smollm3",
        defaults: Defaults { n_kv_heads: Some(4), theta: 2e6, context: 32_768, ..LLAMA.defaults },
        windows: Windows::Unrotated,
        adjust: smollm3,
        ..LLAMA
    },
    Family { types: &["granite"], class: "GraniteForCausalLM", arch: "granite", adjust: granite, ..LLAMA },
    Family {
        types: &["olmo2"],
        class: "Olmo2ForCausalLM",
        arch: "olmo2",
        defaults: Defaults { norm_eps: 1e-5, ..LLAMA.defaults },
        biases: &[ATTENTION_BIAS],
        ..LLAMA
    },
    Family {
        types: &["olmoe"],
        class: "OlmoeForCausalLM",
        arch: "olmoe",
        defaults: Defaults { norm_eps: 1e-5, context: 4096, ..LLAMA.defaults },
        experts: Some(Experts {
            ffn_key: "intermediate_size",
            used: 8,
            sigmoid: false,
            normalize: Normalize::Asked,
            shared_ffn_key: None,
        }),
        biases: &[ATTENTION_BIAS],
        fixed: &[("clip_qkv", "null")],
        ..LLAMA
    },
];

/// Models whose output is the embedding where no file says otherwise.
pub const TIED: &[&str] = &["smollm3", "lighton_ocr", "mistral3"];
