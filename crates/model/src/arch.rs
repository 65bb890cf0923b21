//! Architectures: one row each. What differs between them is data: where keys are, how rows are ordered, which
//! constants hold. No code path asks for an architecture's name.

use crate::config::{Config, MoeConfig};
use crate::error::{Error, escape};
use crate::gguf::{Gguf, Metadata, Value};
use crate::rope::{LongRope, Rope, Scaling, Sections, Yarn, base_frequencies, scaled_frequencies};
use puna_kernels::ops::{Activation, Routing};

/// An architecture that puna computes.
pub struct Arch {
    /// `general.architecture`.
    pub name: &'static str,
    /// What its keys begin with, where that is not the name.
    pub keys: Option<&'static str>,
    /// GGUF files hold the rows of q and k in the order of adjacent rotary pairs; otherwise halves pair.
    pub interleaved: bool,
    /// Where a layer's norms are.
    pub norms: Norms,
    /// Tensors that every layer has.
    pub needs: &'static [&'static str],
    /// Tensors that every layer with a router has.
    pub moe_needs: &'static [&'static str],
    /// What the file's metadata cannot say.
    pub adjust: fn(&Keys, &mut Config) -> Result<(), Error>,
    /// Numbers that its metadata gives in another way than [`Config`] has them, for writing it.
    pub tells: &'static [(&'static str, Number)],
}

/// A number of a configuration.
pub type Number = fn(&Config) -> f32;

/// Where a layer's norms are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norms {
    /// Before attention and before feed-forward.
    Before,
    /// After them.
    After,
}

/// What most architectures are: halves pair, norms come first, and metadata says the rest.
const PLAIN: Arch = Arch {
    name: "",
    keys: None,
    interleaved: false,
    norms: Norms::Before,
    needs: &[],
    moe_needs: &[],
    adjust: |_, _| Ok(()),
    tells: &[],
};

const QKV_BIAS: &[&str] = &["attn_q.bias", "attn_k.bias", "attn_v.bias"];
const QK_NORM: &[&str] = &["attn_q_norm.weight", "attn_k_norm.weight"];

/// Every architecture that puna computes.
pub static ARCHS: &[Arch] = &[
    Arch { name: "llama", interleaved: true, ..PLAIN },
    // Some converters name the model and keep the keys.
    Arch { name: "mistral", keys: Some("llama"), interleaved: true, ..PLAIN },
    Arch { name: "qwen2", needs: QKV_BIAS, ..PLAIN },
    Arch {
        name: "qwen2moe",
        needs: QKV_BIAS,
        moe_needs: &["ffn_gate_shexp.weight", "ffn_gate_inp_shexp.weight"],
        adjust: qwen2moe,
        ..PLAIN
    },
    Arch { name: "qwen3", needs: QK_NORM, ..PLAIN },
    Arch { name: "qwen3moe", needs: QK_NORM, ..PLAIN },
    Arch { name: "qwen2vl", needs: QKV_BIAS, adjust: |keys, config| sections(keys, config, false), ..PLAIN },
    Arch { name: "qwen3vl", needs: QK_NORM, adjust: qwen3vl, ..PLAIN },
    Arch { name: "qwen3vlmoe", needs: QK_NORM, adjust: qwen3vl, ..PLAIN },
    Arch { name: "phi3", ..PLAIN },
    Arch { name: "minimax-m2", needs: QK_NORM, moe_needs: &["exp_probs_b.bias"], adjust: minimax, ..PLAIN },
    Arch { name: "smollm3", interleaved: true, adjust: smollm3, ..PLAIN },
    Arch {
        name: "granite",
        interleaved: true,
        adjust: granite,
        tells: &[("logit_scale", |config| 1.0 / config.logit_scale)],
        ..PLAIN
    },
    Arch { name: "olmo2", norms: Norms::After, needs: QK_NORM, ..PLAIN },
    Arch { name: "olmoe", needs: QK_NORM, adjust: unnormalized, ..PLAIN },
];

/// The row of an architecture, by the name GGUF has for it.
pub fn find(name: &str) -> Option<&'static Arch> {
    ARCHS.iter().find(|arch| arch.name == name)
}

/// Files do not say that the weights of the chosen experts stay as they are.
fn unnormalized(keys: &Keys, config: &mut Config) -> Result<(), Error> {
    if let Some(moe) = &mut config.moe {
        moe.routing.normalize = keys.meta.get(&keys.name("expert_weights_norm"))?.unwrap_or(false);
    }
    Ok(())
}

fn qwen2moe(keys: &Keys, config: &mut Config) -> Result<(), Error> {
    unnormalized(keys, config)?;
    if let Some(moe) = &mut config.moe {
        moe.shared_ffn_dim = match keys.count("expert_shared_feed_forward_length")? {
            Some(n) => n,
            None => config.ffn_dim,
        };
    }
    Ok(())
}

fn qwen3vl(keys: &Keys, config: &mut Config) -> Result<(), Error> {
    config.n_deepstack = keys.meta.get::<u32>(&keys.name("n_deepstack_layers"))?.unwrap_or(0) as usize;
    if config.n_deepstack > config.n_layers {
        let what = format!("{} layers of {}", config.n_deepstack, config.n_layers);
        return Err(keys.error("n_deepstack_layers", what));
    }
    sections(keys, config, true)
}

/// Pairs turn by time, height and width.
fn sections(keys: &Keys, config: &mut Config, interleaved: bool) -> Result<(), Error> {
    let key = "rope.dimension_sections";
    let sizes: Vec<u32> = keys.meta.require(&keys.name(key))?;
    let half = config.rope.half();
    match sizes[..] {
        [t, h, w] | [t, h, w, 0] if [t, h, w].iter().map(|&n| n as usize).sum::<usize>() == half => {
            config.rope.sections = Some(Sections { sizes: [t as usize, h as usize, w as usize], interleaved });
            Ok(())
        }
        _ => Err(keys.error(key, format!("expected three numbers that add up to {half} pairs, found {sizes:?}"))),
    }
}

/// Its scores are sigmoids; a file that does not say so is not taken at the default.
fn minimax(keys: &Keys, config: &mut Config) -> Result<(), Error> {
    let key = "expert_gating_func";
    match keys.meta.get::<u32>(&keys.name(key))? {
        None if config.moe.is_some() => Err(keys.error(key, "missing")),
        _ => Ok(()),
    }
}

/// Every fourth layer does not rotate.
fn smollm3(_: &Keys, config: &mut Config) -> Result<(), Error> {
    for (l, rotates) in config.rope_layers.iter_mut().enumerate() {
        *rotates = (l + 1) % 4 != 0;
    }
    Ok(())
}

/// Its logit scale divides.
fn granite(_: &Keys, config: &mut Config) -> Result<(), Error> {
    config.logit_scale = 1.0 / config.logit_scale;
    Ok(())
}

/// Keys that change what a model computes and that no row of [`ARCHS`] knows: refused unless they say "off".
const REFUSED: &[&str] = &[
    "attention.max_alibi_bias",
    "attention.clamp_kqv",
    "attention.q_lora_rank",
    "attention.kv_lora_rank",
    "attention.key_length_swa",
    "attention.output_scale",
    "attention.shared_kv_layers",
    "attention.temperature_length",
    "attention.temperature_scale",
    "attention.indexer.top_k",
    "expert_group_count",
    "expert_group_scale",
    "logit_scale_type",
    "rope.dimension_count_swa",
    "rope.freq_base_swa",
    "rope.scaling.alpha",
    "router_logit_softcapping",
    "swiglu_clamp_exp",
    "use_parallel_residual",
];

/// The metadata of one architecture.
pub struct Keys<'a> {
    meta: &'a Metadata,
    prefix: String,
}

impl<'a> Keys<'a> {
    /// The full name of a key.
    pub fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    /// An error about a key.
    pub fn error(&self, key: &str, what: impl Into<String>) -> Error {
        self.meta.error(&self.name(key), what)
    }

    /// A count above zero.
    fn count(&self, key: &str) -> Result<Option<usize>, Error> {
        match self.meta.get::<u32>(&self.name(key))? {
            Some(0) => Err(self.error(key, "expected a number above 0, found 0")),
            n => Ok(n.map(|n| n as usize)),
        }
    }

    fn require_count(&self, key: &str) -> Result<usize, Error> {
        self.count(key)?.ok_or_else(|| self.error(key, "missing"))
    }

    /// A finite number.
    pub fn number(&self, key: &str) -> Result<Option<f32>, Error> {
        match self.meta.get::<f32>(&self.name(key))? {
            Some(x) if !x.is_finite() => Err(self.error(key, format!("expected a finite number, found {x}"))),
            x => Ok(x),
        }
    }

    /// A finite number above zero.
    fn positive(&self, key: &str) -> Result<Option<f32>, Error> {
        match self.number(key)? {
            Some(x) if x <= 0.0 => Err(self.error(key, format!("expected a number above 0, found {x}"))),
            x => Ok(x),
        }
    }

    /// A count that a file may give once or for each layer; layers must agree.
    fn count_of_layers(&self, key: &str, n_layers: usize) -> Result<Option<usize>, Error> {
        let name = self.name(key);
        if !matches!(self.meta.value(&name), Some(Value::Array(_))) {
            return self.count(key);
        }
        let counts: Vec<u32> = self.meta.require(&name)?;
        if counts.len() != n_layers {
            return Err(self.error(key, format!("expected {n_layers} numbers, one a layer, found {}", counts.len())));
        }
        match counts.first() {
            Some(&n) if n > 0 && counts.iter().all(|&c| c == n) => Ok(Some(n as usize)),
            _ => Err(self
                .error(key, "expected the same number above 0 for all layers: layers that differ are not supported")),
        }
    }
}

/// The row of a file's architecture, and its configuration.
///
/// # Errors
/// [`Error::Key`] names the key that is missing, of another type, out of range, or asks for what puna cannot do.
pub fn from_gguf(gguf: &Gguf) -> Result<(&'static Arch, Config), Error> {
    let meta = gguf.meta();
    let name: &str = meta.require("general.architecture")?;
    let arch = find(name).ok_or_else(|| {
        let known: Vec<&str> = ARCHS.iter().map(|a| a.name).collect();
        let what = format!("architecture '{}' is not supported; supported are {}", escape(name), known.join(", "));
        meta.error("general.architecture", what)
    })?;
    let own = format!("{name}.block_count");
    let prefix = arch.keys.filter(|_| meta.value(&own).is_none()).unwrap_or(name);
    let keys = Keys { meta, prefix: prefix.to_owned() };
    let mut config = read(gguf, arch, &keys)?;
    (arch.adjust)(&keys, &mut config)?;
    Ok((arch, config))
}

fn read(gguf: &Gguf, arch: &'static Arch, keys: &Keys) -> Result<Config, Error> {
    for key in REFUSED {
        let off = match keys.meta.value(&keys.name(key)) {
            None | Some(Value::Bool(false)) => true,
            Some(value) => value.integer() == Some(0) || matches!(value, Value::F32(x) if x == 0.0),
        };
        if !off {
            return Err(keys.error(key, "not supported"));
        }
    }
    if keys.meta.get::<bool>(&keys.name("attention.causal"))? == Some(false) {
        return Err(keys.error("attention.causal", "attention to later positions is not supported"));
    }
    let n_layers = keys.require_count("block_count")?;
    // A hostile count must not size anything: each layer has tensors of its own.
    if n_layers > gguf.tensors().len() {
        let what = format!("{n_layers} layers, but the file has {} tensors: layers are missing", gguf.tensors().len());
        return Err(keys.error("block_count", what));
    }
    let dim = keys.require_count("embedding_length")?;
    let n_heads = keys.count_of_layers("attention.head_count", n_layers)?;
    let n_heads = n_heads.ok_or_else(|| keys.error("attention.head_count", "missing"))?;
    let n_kv_heads = keys.count_of_layers("attention.head_count_kv", n_layers)?.unwrap_or(n_heads);
    if n_heads % n_kv_heads != 0 {
        let what = format!("{n_heads} heads are not divisible into {n_kv_heads} groups");
        return Err(keys.error("attention.head_count_kv", what));
    }
    let head_dim = head_dim(keys, dim, n_heads)?;
    let embedding = gguf.tensor("token_embd.weight")?;
    let vocab_size = embedding.rows();
    if let Some(n) = keys.count("vocab_size")?.filter(|&n| n > vocab_size) {
        let what = format!("{n} tokens, but token_embd.weight has {vocab_size} rows");
        return Err(keys.error("vocab_size", what));
    }
    let eps = "attention.layer_norm_rms_epsilon";
    let norm_eps = keys.number(eps)?.ok_or_else(|| keys.error(eps, "missing"))?;
    if norm_eps < 0.0 {
        return Err(keys.error(eps, format!("expected a number from 0 on, found {norm_eps}")));
    }
    let ffn_dim = keys.count_of_layers("feed_forward_length", n_layers)?;
    Ok(Config {
        arch: arch.name,
        name: keys.meta.get::<std::borrow::Cow<str>>("general.name").ok().flatten().map(|n| n.into_owned()),
        vocab_size,
        dim,
        n_layers,
        n_heads,
        n_kv_heads,
        head_dim,
        ffn_dim: ffn_dim.unwrap_or(0),
        context_length: keys.count("context_length")?.unwrap_or(4096),
        norm_eps,
        rope: rope(gguf, keys, head_dim)?,
        rope_layers: vec![true; n_layers],
        windows: windows(keys, n_layers)?,
        attn_scale: keys.positive("attention.scale")?.unwrap_or(1.0 / (head_dim as f32).sqrt()),
        attn_softcap: keys.positive("attn_logit_softcapping")?,
        logit_softcap: keys.positive("final_logit_softcapping")?,
        embed_scale: keys.positive("embedding_scale")?.unwrap_or(1.0),
        residual_scale: keys.positive("residual_scale")?.unwrap_or(1.0),
        logit_scale: keys.positive("logit_scale")?.unwrap_or(1.0),
        activation: Activation::Silu,
        n_deepstack: 0,
        moe: moe(keys, ffn_dim)?,
    })
}

/// Dimensions of a head: models have up to a few hundred, and a hostile number must not size anything.
const MAX_HEAD_DIM: usize = 1 << 13;

fn head_dim(keys: &Keys, dim: usize, n_heads: usize) -> Result<usize, Error> {
    let key_length = keys.count("attention.key_length")?;
    let head_dim = match key_length {
        Some(n) => n,
        None if dim.is_multiple_of(n_heads) => dim / n_heads,
        None => {
            let what = format!("missing, and embedding_length {dim} is not divisible by {n_heads} heads");
            return Err(keys.error("attention.key_length", what));
        }
    };
    if head_dim > MAX_HEAD_DIM {
        return Err(keys.error("attention.key_length", format!("at most {MAX_HEAD_DIM} dimensions, found {head_dim}")));
    }
    match keys.count("attention.value_length")? {
        Some(n) if n != head_dim => {
            let what =
                format!("expected {head_dim} as the keys have, found {n}: values of another length are not supported");
            Err(keys.error("attention.value_length", what))
        }
        _ => Ok(head_dim),
    }
}

fn windows(keys: &Keys, n_layers: usize) -> Result<Vec<Option<usize>>, Error> {
    let window = keys.meta.get::<u32>(&keys.name("attention.sliding_window"))?.filter(|&w| w > 0).map(|w| w as usize);
    let pattern = "attention.sliding_window_pattern";
    match keys.meta.value(&keys.name(pattern)) {
        Some(Value::Array(_)) if window.is_some() => {
            let windowed: Vec<bool> = keys.meta.require(&keys.name(pattern))?;
            if windowed.len() != n_layers {
                let what = format!("expected {n_layers} entries, one a layer, found {}", windowed.len());
                return Err(keys.error(pattern, what));
            }
            Ok(windowed.into_iter().map(|on| window.filter(|_| on)).collect())
        }
        Some(_) if window.is_some() => Err(keys.error(pattern, "only a list of booleans is supported")),
        _ => Ok(vec![window; n_layers]),
    }
}

fn rope(gguf: &Gguf, keys: &Keys, head_dim: usize) -> Result<Rope, Error> {
    let width = keys.count("rope.dimension_count")?.unwrap_or(head_dim);
    if width > head_dim || width % 2 != 0 {
        let what = format!("expected an even number up to the head's {head_dim} dimensions, found {width}");
        return Err(keys.error("rope.dimension_count", what));
    }
    let theta = keys.positive("rope.freq_base")?.unwrap_or(10_000.0);
    // The older key says by how much positions are scaled: linear.
    let old = keys.positive("rope.scale_linear")?;
    let kind = match keys.meta.get::<&str>(&keys.name("rope.scaling.type"))? {
        None => old.map_or("none", |_| "linear"),
        Some(kind) => kind,
    };
    let factor = || match keys.positive("rope.scaling.factor")?.or(old) {
        Some(factor) => Ok(factor),
        None => Err(keys.error("rope.scaling.factor", "missing")),
    };
    let mut scaling = Scaling::Divided;
    let (kind, mut inv_freq, magnitude) = match kind {
        "none" => ("none", base_frequencies(theta, width), 1.0),
        "linear" => {
            let factor = factor()?;
            scaling = Scaling::Linear(factor);
            ("linear", base_frequencies(theta, width).into_iter().map(|f| f / factor).collect(), 1.0)
        }
        "yarn" => {
            let (yarn, magnitude) = yarn(keys, factor()?)?;
            scaling = Scaling::Yarn(yarn);
            ("yarn", yarn.frequencies(theta, width), magnitude)
        }
        // The lists of factors say it all.
        "longrope" => ("longrope", base_frequencies(theta, width), 1.0),
        other => {
            let what = format!(
                "rope scaling '{}' is not supported; supported are none, linear, yarn, longrope",
                escape(other)
            );
            return Err(keys.error("rope.scaling.type", what));
        }
    };
    let mut rope = Rope { inv_freq: Vec::new(), long: None, sections: None, magnitude, kind, theta, scaling };
    if let Some(divisors) = frequency_factors(gguf, "rope_freqs.weight", width / 2)? {
        for (freq, divisor) in inv_freq.iter_mut().zip(divisors) {
            *freq /= divisor;
        }
        rope.kind = "llama3";
    }
    let lists = ["rope_factors_short.weight", "rope_factors_long.weight"];
    let [short, long] = lists.map(|name| frequency_factors(gguf, name, width / 2));
    match (short?, long?) {
        (None, None) if rope.kind == "longrope" => return Err(Error::tensor(gguf.path(), lists[0], "missing")),
        (None, None) => {}
        (Some(short), Some(long)) => {
            let original_context = keys.require_count("rope.scaling.original_context_length")?;
            rope.kind = "longrope";
            rope.magnitude = keys.positive("rope.scaling.attn_factor")?.unwrap_or(1.0);
            rope.long = Some(LongRope { original_context, inv_freq: scaled_frequencies(theta, width, &long) });
            inv_freq = scaled_frequencies(theta, width, &short);
            rope.scaling = Scaling::LongRope([short, long]);
        }
        (short, _) => {
            let name = if short.is_some() { lists[1] } else { lists[0] };
            return Err(Error::tensor(gguf.path(), name, "missing, while the other list of rope factors is there"));
        }
    }
    rope.inv_freq = inv_freq;
    Ok(rope)
}

fn yarn(keys: &Keys, factor: f32) -> Result<(Yarn, f32), Error> {
    let yarn = Yarn {
        factor,
        original_context: keys.require_count("rope.scaling.original_context_length")?,
        beta_fast: keys.positive("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
        beta_slow: keys.positive("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
        truncate: true,
    };
    for (key, neutral) in [("rope.scaling.yarn_ext_factor", 1.0), ("rope.scaling.yarn_log_multiplier", 0.0)] {
        if let Some(x) = keys.number(key)?.filter(|&x| x != neutral && x >= 0.0) {
            return Err(keys.error(key, format!("only {neutral} is supported, found {x}")));
        }
    }
    // In GGUF the attention factors multiply YaRN's own magnitude.
    let mut magnitude = Yarn::magnitude(factor, 1.0);
    for key in ["rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"] {
        magnitude *= keys.positive(key)?.unwrap_or(1.0);
    }
    Ok((yarn, magnitude))
}

/// A factor for each frequency: what Llama 3's scaling comes to, or one of longrope's lists.
fn frequency_factors(gguf: &Gguf, name: &str, half: usize) -> Result<Option<Vec<f32>>, Error> {
    let Some(info) = gguf.find(name) else { return Ok(None) };
    let (dtype, bytes) = gguf.weight(info)?;
    if info.elements() != half || info.rows() != 1 || dtype.format().block_len != 1 {
        let what = format!("expected shape [{half}] of a float type, found {:?} of {}", info.shape, info.ty);
        return Err(gguf.error(info, what));
    }
    let mut factors = vec![0.0; half];
    (dtype.format().dequantize)(&bytes, &mut factors);
    match factors.iter().find(|f| !f.is_finite() || **f <= 0.0) {
        Some(bad) => Err(gguf.error(info, format!("expected factors above 0, found {bad}"))),
        None => Ok(Some(factors)),
    }
}

fn moe(keys: &Keys, ffn_dim: Option<usize>) -> Result<Option<MoeConfig>, Error> {
    // Zero experts is how some converters say that there are none.
    let n_experts = keys.meta.get::<u32>(&keys.name("expert_count"))?.unwrap_or(0) as usize;
    if n_experts == 0 {
        return Ok(None);
    }
    let used = keys.require_count("expert_used_count")?;
    if used > n_experts {
        return Err(keys.error("expert_used_count", format!("{used} experts of {n_experts} cannot be used")));
    }
    let width = keys.count("expert_feed_forward_length")?.or(ffn_dim);
    let sigmoid = match keys.meta.get::<u32>(&keys.name("expert_gating_func"))?.unwrap_or(1) {
        1 => false,
        2 => true,
        n => {
            return Err(
                keys.error("expert_gating_func", format!("only 1 (softmax) and 2 (sigmoid) are supported, found {n}"))
            );
        }
    };
    Ok(Some(MoeConfig {
        n_experts,
        ffn_dim: width.ok_or_else(|| keys.error("expert_feed_forward_length", "missing"))?,
        shared_ffn_dim: keys.count("expert_shared_feed_forward_length")?.unwrap_or(0),
        routing: Routing {
            used,
            sigmoid,
            normalize: keys.meta.get(&keys.name("expert_weights_norm"))?.unwrap_or(true),
            // Zero is how converters say that nothing is scaled.
            scale: keys.number("expert_weights_scale")?.filter(|&s| s != 0.0).unwrap_or(1.0),
        },
    }))
}
