//! config.json to [`Config`]. Keys that are absent mean what they mean to transformers ([`FAMILIES`]); null means
//! "none" or "as usual", which is often something else.

use super::families::{Experts, FAMILIES, Family, Normalize, TIED, Windows};
use super::json::{Given, Keys, Object, shown};
use super::rope::rope;
use crate::arch::{self, Arch};
use crate::config::{Config, MoeConfig};
use crate::error::{Error, escape};
use puna_kernels::ops::{Activation, Routing};
use serde_json::Value;
use std::path::Path;

/// What a config.json says.
#[derive(Clone)]
pub struct Parsed {
    /// The row of the architecture.
    pub arch: &'static Arch,
    /// The model. Its `vocab_size` is 0 where the file does not say.
    pub config: Config,
    /// Whether the output is the embedding; `None` if only the text part of a larger model says so.
    pub tied: Option<bool>,
    /// Whether each layer has a router.
    pub sparse: Vec<bool>,
    /// Biases that every layer and that every layer without a router must have, as GGUF names them after the layer.
    biases: [Vec<String>; 2],
    /// Rows and columns that share a scale of FP8 weights.
    pub fp8_block: [usize; 2],
}

impl Parsed {
    /// Biases that a layer must have.
    pub fn biases(&self, sparse: bool) -> impl Iterator<Item = &String> {
        let [all, dense] = &self.biases;
        all.iter().chain(dense.iter().filter(move |_| !sparse))
    }
}

/// Objects that hold the text part of a larger model.
const TEXT: &[&str] = &["text_config", "llm_config", "language_config"];

/// Reads the configuration of a model that has `n_tensors` tensors.
///
/// # Errors
/// [`Error::Key`] names the key that is missing, of another type, out of range, or asks for what puna cannot do.
pub fn read(path: &Path, object: &Object, n_tensors: usize) -> Result<Parsed, Error> {
    let outer = Keys::new(path, object);
    let inner = TEXT.iter().map(|key| outer.object(key)).find_map(Result::transpose).transpose()?;
    let keys = inner.as_ref().unwrap_or(&outer);
    let family = family(&outer, inner.as_ref())?;
    inner.iter().chain([&outer]).try_for_each(refuse_bidirectional)?;
    let arch = arch::find(family.arch).ok_or_else(|| keys.error("model_type", "its architecture is missing"))?;
    for (key, only) in family.fixed {
        let Given::Value(value) = keys.get(key) else { continue };
        let json = value.to_string();
        if json != *only {
            return Err(keys.error(key, format!("only {only} is supported, found {}", shown(value))));
        }
    }
    let n_layers = keys.require_size("num_hidden_layers")?;
    // A hostile count must not size anything: each layer has tensors of its own.
    if n_layers > n_tensors {
        let what = format!("{n_layers} layers, but the files have {n_tensors} tensors: layers are missing");
        return Err(keys.error("num_hidden_layers", what));
    }
    let sparse = sparse(keys, family, n_layers)?;
    let mut config = model(&outer, keys, family, arch, n_layers)?;
    (family.adjust)(keys, &mut config)?;
    config.windows = windows(keys, family, &config.rope_layers)?;
    Ok(Parsed {
        arch,
        config,
        tied: tied(&outer, inner.as_ref())?,
        sparse,
        biases: biases(keys, family)?,
        fp8_block: quantization(&outer, keys)?,
    })
}

/// The family of the text model, by its own type where it has one, or else by that of the model around it.
fn family(outer: &Keys, inner: Option<&Keys>) -> Result<&'static Family, Error> {
    let by_type = |name: &str| FAMILIES.iter().find(|f| f.types.contains(&name));
    let keys = match inner {
        Some(inner) if inner.text("model_type")?.is_some() => inner,
        _ => outer,
    };
    let (key, name, found) = match keys.text("model_type")? {
        Some(name) => ("model_type", name, by_type(name)),
        None => {
            let list = keys.list("architectures", "names", Value::as_str)?;
            let Some(&class) = list.as_ref().and_then(|list| list.first()) else {
                return Err(keys.missing("model_type"));
            };
            ("architectures", class, FAMILIES.iter().find(|f| f.is_class(class)))
        }
    };
    found.ok_or_else(|| {
        let known: Vec<&str> = FAMILIES.iter().map(|f| f.types[0]).collect();
        keys.error(key, format!("\"{}\" is not supported; supported are {}", escape(name), known.join(", ")))
    })
}

/// Encoders made of these families say so by a key or by the name of their class.
fn refuse_bidirectional(keys: &Keys) -> Result<(), Error> {
    const WHAT: &str = "attention to later positions is not supported";
    for (key, causal) in [("is_causal", true), ("use_bidirectional_attention", false), ("bidirectional", false)] {
        if let Given::Value(value) = keys.get(key)
            && *value != causal
        {
            return Err(keys.error(key, format!("{WHAT}, found {}", shown(value))));
        }
    }
    let Given::Value(Value::Array(classes)) = keys.get("architectures") else { return Ok(()) };
    let is_encoder = |class: &&str| ["Bidirectional", "BiModel", "BiFor", "Encoder"].iter().any(|s| class.contains(s));
    match classes.iter().filter_map(Value::as_str).find(is_encoder) {
        Some(class) => Err(keys.error("architectures", format!("{WHAT}, which \"{}\" asks for", escape(class)))),
        None => Ok(()),
    }
}

fn model(outer: &Keys, keys: &Keys, family: &Family, arch: &Arch, n_layers: usize) -> Result<Config, Error> {
    let dim = keys.require_size("hidden_size")?;
    let n_heads = keys.require_size("num_attention_heads")?;
    let n_kv_heads = keys.size("num_key_value_heads")?.or(family.defaults.n_kv_heads.unwrap_or(n_heads), n_heads);
    if n_heads % n_kv_heads != 0 {
        let what = format!("{n_heads} heads are not divisible into {n_kv_heads} groups");
        return Err(keys.error("num_key_value_heads", what));
    }
    let head_dim = match keys.size("head_dim")?.nullable(family.defaults.head_dim) {
        Some(n) => n,
        None if dim % n_heads == 0 => dim / n_heads,
        None => {
            let what = format!("missing, and hidden_size {dim} is not divisible by {n_heads} heads");
            return Err(keys.error("head_dim", what));
        }
    };
    let norm_eps = match keys.not_negative("rms_norm_eps")? {
        Given::Absent => family.defaults.norm_eps,
        Given::Null => return Err(keys.missing("rms_norm_eps")),
        Given::Value(eps) => eps,
    };
    let context_length = match keys.count("max_position_embeddings")? {
        Given::Absent => family.defaults.context,
        Given::Null => return Err(keys.missing("max_position_embeddings")),
        Given::Value(n) => n,
    };
    let ffn_dim = keys.size("intermediate_size")?.value();
    let moe = family.experts.as_ref().map(|experts| moe(keys, experts)).transpose()?;
    Ok(Config {
        arch: arch.name,
        name: None,
        vocab_size: keys.count("vocab_size")?.value().unwrap_or(0),
        dim,
        n_layers,
        n_heads,
        n_kv_heads,
        head_dim,
        ffn_dim: ffn_dim.ok_or_else(|| keys.missing("intermediate_size"))?,
        context_length,
        norm_eps,
        rope: rope(keys, family, head_dim, context_length)?,
        rope_layers: vec![true; n_layers],
        windows: vec![None; n_layers],
        attn_scale: 1.0 / (head_dim as f32).sqrt(),
        attn_softcap: None,
        logit_softcap: None,
        embed_scale: 1.0,
        residual_scale: 1.0,
        logit_scale: 1.0,
        activation: activation(keys)?,
        n_deepstack: deepstack(outer, family, n_layers)?,
        moe,
    })
}

fn activation(keys: &Keys) -> Result<Activation, Error> {
    match keys.text("hidden_act")? {
        None | Some("silu" | "swish") => Ok(Activation::Silu),
        Some("gelu" | "gelu_python") => Ok(Activation::Gelu),
        Some("gelu_new" | "gelu_pytorch_tanh" | "gelu_python_tanh") => Ok(Activation::GeluTanh),
        Some(other) => {
            let supported = "silu, swish, gelu, gelu_new, gelu_pytorch_tanh";
            let what = format!("activation \"{}\" is not supported; supported are {supported}", escape(other));
            Err(keys.error("hidden_act", what))
        }
    }
}

/// Layers that get more of the image: as many as the vision tower hands over.
fn deepstack(outer: &Keys, family: &Family, n_layers: usize) -> Result<usize, Error> {
    let has_deepstack = family.axes.as_ref().is_some_and(|axes| axes.deepstack);
    let Some(vision) = outer.object("vision_config")?.filter(|_| has_deepstack) else { return Ok(0) };
    let key = "deepstack_visual_indexes";
    // Three is what an absent list means to transformers.
    let n = vision.list(key, "layer numbers", Value::as_u64)?.map_or(3, |layers| layers.len());
    if n > n_layers {
        return Err(vision.error(key, format!("{n} layers for a text model of {n_layers}")));
    }
    Ok(n)
}

fn windows(keys: &Keys, family: &Family, rope_layers: &[bool]) -> Result<Vec<Option<usize>>, Error> {
    let (switched, absent) = match family.windows {
        Windows::Never => return Ok(vec![None; rope_layers.len()]),
        Windows::All(absent) => (false, absent),
        Windows::AllSwitched | Windows::Layers(..) => (true, Some(4096)),
        Windows::Unrotated => (true, None),
    };
    let is_on = !switched || keys.flag("use_sliding_window")?.unwrap_or(false);
    let window = if is_on { keys.count("sliding_window")?.nullable(absent) } else { None };
    let listed = match family.windows {
        Windows::AllSwitched => None,
        _ => keys.list("layer_types", "names", Value::as_str)?,
    };
    if let Some(types) = listed {
        return listed_windows(keys, &types, window, rope_layers.len());
    }
    let max = match family.windows {
        Windows::Layers(default, _) => keys.number_from_0("max_window_layers")?.or(default, default),
        _ => 0,
    };
    let has_window = |layer: usize| match family.windows {
        Windows::Layers(_, pick) => pick(layer, max),
        Windows::Unrotated => !rope_layers[layer],
        _ => true,
    };
    Ok((0..rope_layers.len()).map(|layer| window.filter(|_| has_window(layer))).collect())
}

fn listed_windows(
    keys: &Keys,
    types: &[&str],
    window: Option<usize>,
    n_layers: usize,
) -> Result<Vec<Option<usize>>, Error> {
    let fault = |what: String| keys.error("layer_types", what);
    if types.len() != n_layers {
        return Err(fault(format!("expected {n_layers} names, one a layer, found {}", types.len())));
    }
    let layer = |ty: &&str| match *ty {
        "full_attention" => Ok(None),
        "sliding_attention" if window.is_some() => Ok(window),
        "sliding_attention" => Err(fault("sliding_attention, while no sliding_window is given or switched on".into())),
        other => {
            let supported = "full_attention, sliding_attention";
            Err(fault(format!("\"{}\" is not supported; supported are {supported}", escape(other))))
        }
    };
    types.iter().map(layer).collect()
}

fn moe(keys: &Keys, experts: &Experts) -> Result<MoeConfig, Error> {
    // The older name and the newer one.
    let counts = [keys.size("num_experts")?.value(), keys.size("num_local_experts")?.value()];
    let n_experts = match counts {
        [Some(a), Some(b)] if a != b => {
            return Err(keys.error("num_experts", format!("{a}, while num_local_experts is {b}")));
        }
        [Some(n), _] | [None, Some(n)] => n,
        [None, None] => return Err(keys.missing("num_local_experts (or num_experts)")),
    };
    let used = keys.size("num_experts_per_tok")?.or(experts.used, experts.used);
    if used > n_experts {
        return Err(keys.error("num_experts_per_tok", format!("{used} experts of {n_experts} cannot be used")));
    }
    let normalize = match experts.normalize {
        Normalize::Always => true,
        Normalize::Asked => keys.flag("norm_topk_prob")?.unwrap_or(false),
    };
    let shared_ffn_dim = experts.shared_ffn_key.map(|key| keys.require_size(key)).transpose()?;
    Ok(MoeConfig {
        n_experts,
        ffn_dim: keys.require_size(experts.ffn_key)?,
        shared_ffn_dim: shared_ffn_dim.unwrap_or(0),
        routing: Routing { used, sigmoid: experts.sigmoid, normalize, scale: 1.0 },
    })
}

/// Whether each layer is a mixture: not those of `mlp_only_layers`, and of the others every `decoder_sparse_step`th.
fn sparse(keys: &Keys, family: &Family, n_layers: usize) -> Result<Vec<bool>, Error> {
    let Some(experts) = &family.experts else { return Ok(vec![false; n_layers]) };
    // Families whose experts have a width of their own may have dense layers too.
    if experts.ffn_key == "intermediate_size" {
        return Ok(vec![true; n_layers]);
    }
    let step = keys.count("decoder_sparse_step")?.or(1, 1);
    let dense = keys.list("mlp_only_layers", "layer numbers", Value::as_u64)?.unwrap_or_default();
    Ok((0..n_layers).map(|layer| (layer + 1) % step == 0 && !dense.contains(&(layer as u64))).collect())
}

/// Biases that the file promises, of every layer and of layers without a router.
fn biases(keys: &Keys, family: &Family) -> Result<[Vec<String>; 2], Error> {
    let mut promised = [Vec::new(), Vec::new()];
    for biases in family.biases {
        if keys.flag(biases.key)?.unwrap_or(false) {
            for part in biases.of {
                promised[usize::from(part.starts_with("ffn"))].push(format!("{part}.bias"));
            }
        }
    }
    Ok(promised)
}

/// Whether the output is the embedding: what the outermost key says, or the text part's where there is none. `None`:
/// the two differ, and the file that has no separate output is right.
fn tied(outer: &Keys, inner: Option<&Keys>) -> Result<Option<bool>, Error> {
    let key = "tie_word_embeddings";
    let own = inner.map(|inner| inner.flag(key)).transpose()?.flatten();
    Ok(match (outer.flag(key)?, own) {
        (Some(false), Some(true)) => None,
        (Some(tied), _) | (None, Some(tied)) => Some(tied),
        (None, None) => Some(outer.text("model_type")?.is_some_and(|ty| TIED.contains(&ty))),
    })
}

/// Rows and columns of a block of FP8 weights that share a scale.
fn quantization(outer: &Keys, text: &Keys) -> Result<[usize; 2], Error> {
    const USUAL: [usize; 2] = [128, 128];
    let key = "quantization_config";
    let Some(keys) = outer.object(key)?.or(text.object(key)?) else { return Ok(USUAL) };
    let method = keys.text("quant_method")?.ok_or_else(|| keys.missing("quant_method"))?;
    let format = keys.text("format")?;
    match (method, format) {
        ("fp8" | "fbgemm_fp8", _) | ("compressed-tensors", Some("float-quantized")) => {}
        _ => {
            let format = format.map(|f| format!(" ({})", escape(f))).unwrap_or_default();
            let what = format!(
                "\"{}\"{format} is not supported; supported are weights in F32, F16, BF16 and FP8 (fp8, fbgemm_fp8, \
                 compressed-tensors as float-quantized)",
                escape(method)
            );
            return Err(keys.error("quant_method", what));
        }
    }
    let count = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok()).filter(|&n| n > 0);
    match keys.list("weight_block_size", "two whole numbers above 0", count)?.as_deref() {
        None => Ok(USUAL),
        Some(&[rows, cols]) => Ok([rows as usize, cols as usize]),
        Some(other) => Err(keys.error("weight_block_size", format!("expected two numbers, found {}", other.len()))),
    }
}

/// Its scales, which it calls multipliers.
pub(super) fn granite(keys: &Keys, config: &mut Config) -> Result<(), Error> {
    let multiplier = |key: &str| Ok::<f32, Error>(keys.positive(key)?.or(1.0, 1.0));
    config.embed_scale = multiplier("embedding_multiplier")?;
    config.residual_scale = multiplier("residual_multiplier")?;
    config.attn_scale = multiplier("attention_multiplier")?;
    config.logit_scale = 1.0 / multiplier("logits_scaling")?;
    Ok(())
}

/// Layers that do not rotate: those with a 0 in `no_rope_layers`, or every `no_rope_layer_interval`th.
pub(super) fn smollm3(keys: &Keys, config: &mut Config) -> Result<(), Error> {
    let n_layers = config.n_layers;
    let key = "no_rope_layers";
    match keys.list(key, "numbers, 1 where a layer rotates and 0 where not", Value::as_u64)? {
        Some(list) if list.len() < n_layers => {
            return Err(keys.error(key, format!("expected {n_layers} numbers, one a layer, found {}", list.len())));
        }
        Some(list) => config.rope_layers = list[..n_layers].iter().map(|&n| n != 0).collect(),
        None => {
            let interval = keys.count("no_rope_layer_interval")?.or(4, 4);
            config.rope_layers = (0..n_layers).map(|layer| (layer + 1) % interval != 0).collect();
        }
    }
    Ok(())
}
