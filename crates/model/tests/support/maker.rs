//! Random models of any shape, in any weight format.

use super::Rng;
use crate::gguf_builder::{self as gb, Builder};
use half::{bf16, f16};
use puna_kernels::DType;
use puna_model::Gguf;

/// A model to be made. Weights are such that every layer changes the residual by about its own size.
#[derive(Clone, Debug)]
pub struct Spec {
    /// One of [`ARCHS`].
    pub arch: &'static str,
    pub n_layers: usize,
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    pub dim: usize,
    pub ffn_dim: usize,
    pub vocab_size: usize,
    pub rope: Rope,
    pub window: Option<u32>,
    /// Layers that have the window; all where empty.
    pub windowed: Vec<bool>,
    pub experts: Option<Experts>,
    pub biases: bool,
    /// Factors of embeddings, residual, scores and logits, and soft caps.
    pub scales: bool,
    /// The embedding is the output projection.
    pub tied: bool,
    /// Formats of matrices, in turn; F32 where a row is not a whole number of blocks.
    pub types: Vec<DType>,
    pub seed: u64,
}

/// Architectures that differ in their tensors.
pub const ARCHS: [&str; 8] = ["llama", "qwen3", "olmo2", "phi3", "qwen2moe", "minimax-m2", "smollm3", "granite"];

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rope {
    Plain,
    /// Only so many dimensions of a head.
    Partial(u32),
    Linear,
    Yarn,
    /// Divisors of frequencies.
    Llama3,
    /// Other divisors for sequences longer than this.
    Long(u32),
}

#[derive(Clone, Copy, Debug)]
pub struct Experts {
    pub n: usize,
    pub used: usize,
    pub ffn_dim: usize,
    /// A tensor an expert, and not one for all.
    pub split: bool,
    pub sigmoid: bool,
}

impl Default for Spec {
    fn default() -> Spec {
        Spec {
            arch: "llama",
            n_layers: 2,
            n_heads: 4,
            n_kv_heads: 2,
            head_dim: 8,
            dim: 32,
            ffn_dim: 48,
            vocab_size: 50,
            rope: Rope::Plain,
            window: None,
            windowed: vec![],
            experts: None,
            biases: false,
            scales: false,
            tied: false,
            types: vec![DType::F32],
            seed: 1,
        }
    }
}

impl Spec {
    pub fn gguf(&self) -> Gguf {
        parse(&self.builder())
    }

    pub fn builder(&self) -> Builder {
        let mut m = Maker { rng: Rng(self.seed), types: self.types.iter().cycle(), b: self.keys() };
        m.matrix("token_embd.weight", &[self.vocab_size, self.dim], (self.dim as f32).sqrt());
        for l in 0..self.n_layers {
            self.layer(&mut m, l);
        }
        m.norm("output_norm.weight", self.dim);
        if !self.tied {
            m.matrix("output.weight", &[self.vocab_size, self.dim], 2.0);
        }
        let divisors: Vec<f32> = (0..self.head_dim / 2).map(|i| 1.5 + i as f32).collect();
        match self.rope {
            Rope::Llama3 => m.numbers("rope_freqs.weight", &divisors),
            Rope::Long(_) => {
                m.numbers("rope_factors_long.weight", &divisors);
                m.numbers("rope_factors_short.weight", &vec![1.0; divisors.len()]);
            }
            _ => {}
        }
        m.b
    }

    fn layer(&self, m: &mut Maker, l: usize) {
        let name = |part: &str| format!("blk.{l}.{part}");
        let norms = match self.arch {
            "olmo2" => ["post_attention_norm.weight", "post_ffw_norm.weight"],
            _ => ["attn_norm.weight", "ffn_norm.weight"],
        };
        norms.into_iter().for_each(|norm| m.norm(&name(norm), self.dim));
        let (q_dim, kv_dim) = (self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim);
        // Sharper than it would be at random, so that attention chooses.
        if self.arch == "phi3" {
            m.linear(&name("attn_qkv"), [q_dim + 2 * kv_dim, self.dim], 1.4, self.biases);
        } else {
            let biases = self.biases || self.arch.starts_with("qwen2");
            m.linear(&name("attn_q"), [q_dim, self.dim], 1.5, biases);
            m.linear(&name("attn_k"), [kv_dim, self.dim], 1.5, biases);
            m.linear(&name("attn_v"), [kv_dim, self.dim], 1.0, biases);
        }
        m.linear(&name("attn_output"), [self.dim, q_dim], 1.0, self.biases);
        let widths = match self.arch {
            "qwen3" | "qwen3moe" | "qwen3vl" | "qwen3vlmoe" => Some([self.head_dim; 2]),
            "olmo2" | "minimax-m2" => Some([q_dim, kv_dim]),
            _ => None,
        };
        if let Some([q, k]) = widths {
            m.norm(&name("attn_q_norm.weight"), q);
            m.norm(&name("attn_k_norm.weight"), k);
        }
        match &self.experts {
            Some(experts) => self.mixture(m, experts, l),
            None => self.dense(m, |part| name(part), self.ffn_dim, self.arch == "phi3"),
        }
    }

    fn dense(&self, m: &mut Maker, name: impl Fn(&str) -> String, width: usize, fused: bool) {
        if fused {
            m.linear(&name("ffn_up"), [2 * width, self.dim], 1.0, self.biases);
        } else {
            m.linear(&name("ffn_gate"), [width, self.dim], 1.0, self.biases);
            m.linear(&name("ffn_up"), [width, self.dim], 1.0, self.biases);
        }
        m.linear(&name("ffn_down"), [self.dim, width], 2.0, self.biases);
    }

    fn mixture(&self, m: &mut Maker, experts: &Experts, l: usize) {
        let name = |part: &str| format!("blk.{l}.{part}");
        m.float_matrix(&name("ffn_gate_inp.weight"), &[experts.n, self.dim]);
        let (n, width) = (experts.n, experts.ffn_dim);
        if experts.split {
            (0..n).for_each(|e| self.dense(m, |part| name(&format!("{part}.{e}")), width, false));
        } else {
            m.matrix(&name("ffn_gate_exps.weight"), &[n, width, self.dim], 1.0);
            m.matrix(&name("ffn_up_exps.weight"), &[n, width, self.dim], 1.0);
            m.matrix(&name("ffn_down_exps.weight"), &[n, self.dim, width], 2.0);
        }
        match self.arch {
            "minimax-m2" => m.vector(&name("exp_probs_b.bias"), n, 0.0, 0.2),
            "qwen2moe" => {
                m.vector(&name("ffn_gate_inp_shexp.weight"), self.dim, 0.0, 0.3);
                self.dense(m, |part| name(&format!("{part}_shexp")), self.ffn_dim, false);
            }
            _ => {}
        }
    }

    fn keys(&self) -> Builder {
        let mut keys: Vec<(&str, gb::Value)> = vec![
            ("block_count", gb::u32(self.n_layers as u32)),
            ("context_length", gb::u32(512)),
            ("embedding_length", gb::u32(self.dim as u32)),
            ("feed_forward_length", gb::u32(self.ffn_dim as u32)),
            ("attention.head_count", gb::u32(self.n_heads as u32)),
            ("attention.head_count_kv", gb::u32(self.n_kv_heads as u32)),
            ("attention.layer_norm_rms_epsilon", gb::f32(1e-5)),
        ];
        if self.n_heads * self.head_dim != self.dim {
            keys.push(("attention.key_length", gb::u32(self.head_dim as u32)));
            keys.push(("attention.value_length", gb::u32(self.head_dim as u32)));
        }
        if let Some(window) = self.window {
            keys.push(("attention.sliding_window", gb::u32(window)));
            if !self.windowed.is_empty() {
                let pattern: Vec<gb::Value> = self.windowed.iter().map(|&on| gb::bool(on)).collect();
                keys.push(("attention.sliding_window_pattern", gb::array(7, &pattern)));
            }
        }
        match self.rope {
            Rope::Plain | Rope::Llama3 => {}
            Rope::Partial(width) => keys.push(("rope.dimension_count", gb::u32(width))),
            Rope::Linear => {
                keys.push(("rope.scaling.type", gb::string("linear")));
                keys.push(("rope.scaling.factor", gb::f32(4.0)));
            }
            Rope::Long(original) => keys.push(("rope.scaling.original_context_length", gb::u32(original))),
            Rope::Yarn => {
                keys.push(("rope.scaling.type", gb::string("yarn")));
                keys.push(("rope.scaling.factor", gb::f32(4.0)));
                keys.push(("rope.scaling.original_context_length", gb::u32(32)));
            }
        }
        if let Some(experts) = self.experts {
            keys.push(("expert_count", gb::u32(experts.n as u32)));
            keys.push(("expert_used_count", gb::u32(experts.used as u32)));
            keys.push(("expert_feed_forward_length", gb::u32(experts.ffn_dim as u32)));
            keys.push(("expert_gating_func", gb::u32(1 + u32::from(experts.sigmoid))));
            if self.arch == "qwen2moe" {
                keys.push(("expert_shared_feed_forward_length", gb::u32(self.ffn_dim as u32)));
            }
        }
        if self.scales {
            keys.push(("attention.scale", gb::f32(0.3)));
            keys.push(("attn_logit_softcapping", gb::f32(5.0)));
            keys.push(("final_logit_softcapping", gb::f32(4.0)));
            keys.push(("embedding_scale", gb::f32(1.7)));
            keys.push(("residual_scale", gb::f32(0.6)));
            keys.push(("logit_scale", gb::f32(1.3)));
        }
        let start = Builder::new().key("general.architecture", gb::string(self.arch));
        keys.into_iter().fold(start, |b, (key, value)| b.key(format!("{}.{key}", self.arch), value))
    }
}

pub fn parse(builder: &Builder) -> Gguf {
    Gguf::parse("made.gguf", builder.bytes().into()).unwrap()
}

struct Maker<'a> {
    rng: Rng,
    types: std::iter::Cycle<std::slice::Iter<'a, DType>>,
    b: Builder,
}

impl Maker<'_> {
    fn tensor(&mut self, name: &str, shape: &[usize], dtype: DType, data: Vec<u8>) {
        let shape: Vec<u64> = shape.iter().map(|&n| n as u64).collect();
        self.b = std::mem::replace(&mut self.b, Builder::new()).tensor(name, &shape, dtype as u32, data);
    }

    /// Rows give numbers of about `gain` from numbers of about 1.
    fn matrix(&mut self, name: &str, shape: &[usize], gain: f32) {
        let cols = shape[shape.len() - 1];
        let dtype = *self.types.next().unwrap();
        let dtype = if dtype.row_bytes(cols).is_some() { dtype } else { DType::F32 };
        let data = weights(dtype, shape.iter().product(), gain / (cols as f32).sqrt(), &mut self.rng);
        self.tensor(name, shape, dtype, data);
    }

    /// As routers are kept, whatever format the other weights have.
    fn float_matrix(&mut self, name: &str, shape: &[usize; 2]) {
        let data = weights(DType::F32, shape[0] * shape[1], 1.5 / (shape[1] as f32).sqrt(), &mut self.rng);
        self.tensor(name, shape, DType::F32, data);
    }

    fn linear(&mut self, name: &str, shape: [usize; 2], gain: f32, bias: bool) {
        self.matrix(&format!("{name}.weight"), &shape, gain);
        if bias {
            self.vector(&format!("{name}.bias"), shape[0], 0.0, 0.3);
        }
    }

    fn norm(&mut self, name: &str, width: usize) {
        self.vector(name, width, 1.0, 0.2);
    }

    /// Numbers around `mean`.
    fn vector(&mut self, name: &str, n: usize, mean: f32, spread: f32) {
        let numbers: Vec<f32> = (0..n).map(|_| mean + spread * self.rng.number()).collect();
        self.numbers(name, &numbers);
    }

    fn numbers(&mut self, name: &str, x: &[f32]) {
        self.tensor(name, &[x.len()], DType::F32, x.iter().flat_map(|x| x.to_le_bytes()).collect());
    }
}

/// `n` weights whose mean square is about `scale` squared. Codes of quantized blocks are random bits: every code
/// occurs, those that no quantizer writes too.
pub fn weights(dtype: DType, n: usize, scale: f32, rng: &mut Rng) -> Vec<u8> {
    let mut numbers = (0..n).map(|_| scale * rng.number());
    match dtype {
        DType::F32 => return numbers.flat_map(f32::to_le_bytes).collect(),
        DType::F16 => return numbers.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
        DType::BF16 => return numbers.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
        _ => drop(numbers.by_ref()),
    }
    let format = dtype.format();
    let mut values = vec![0.0; format.block_len];
    let mut bytes = vec![0; n / format.block_len * format.block_bytes];
    for block in bytes.chunks_exact_mut(format.block_bytes) {
        block.fill_with(|| rng.bits() as u8);
        set_scale(dtype, block, 1.0);
        (format.dequantize)(block, &mut values);
        let square: f32 = values.iter().map(|v| v * v).sum();
        let unit = (square / values.len() as f32).sqrt();
        set_scale(dtype, block, scale / unit.max(1e-6));
    }
    bytes
}

/// Writes the scale of a block, and a minimum that puts the middle of the codes at zero.
fn set_scale(dtype: DType, block: &mut [u8], d: f32) {
    let mut put = |at: usize, x: f32| block[at..at + 2].copy_from_slice(&f16::from_f32(x).to_le_bytes());
    match dtype {
        DType::Q4_1 => {
            put(0, d);
            put(2, -7.5 * d);
        }
        DType::Q5_1 => {
            put(0, d);
            put(2, -15.5 * d);
        }
        DType::Q2_K => {
            put(80, d);
            put(82, 1.5 * d);
        }
        DType::Q4_K => {
            put(0, d);
            put(2, 7.5 * d);
        }
        DType::Q5_K => {
            put(0, d);
            put(2, 15.5 * d);
        }
        DType::Q3_K => put(108, d),
        DType::Q6_K => put(208, d),
        DType::TQ1_0 => put(52, d),
        DType::TQ2_0 => put(64, d),
        // Four nibbles, each the upper half of a 16-bit field.
        DType::IQ1_M => {
            for i in 0..4 {
                let nibble = (f16::from_f32(d).to_bits() >> (4 * i) & 15) as u8;
                block[49 + 2 * i] = block[49 + 2 * i] & 15 | nibble << 4;
            }
        }
        // A power of two.
        DType::MXFP4 => block[0] = (127.0 + d.log2().round()) as u8,
        // Four numbers of 4 exponent bits around 7 and 3 fraction bits.
        DType::NVFP4 => block[..4].fill(((7.0 + d.log2().round()).clamp(1.0, 15.0) * 8.0) as u8),
        _ => put(0, d),
    }
}
