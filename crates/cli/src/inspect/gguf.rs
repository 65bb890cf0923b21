//! The report of a GGUF file. What puna supports is described by its [`Config`]; of what it does not, the general keys
//! of the format are shown.

use super::report::{
    Entry, Experts, File, Memory, Report, Rope, Shape, Special, Summary, Tensor, Tokenizer, TypeShare, Window,
};
use crate::error::Error;
use puna::ModelFiles;
use puna_kernels::{KV_BLOCK, KvLayout, KvType};
use puna_model::gguf::{Array, FromValue, Metadata, Strings, TensorInfo, Value, ValueType};
use puna_model::{Config, Gguf, arch, bind};
use serde_json::json;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

/// Opens and describes a model.
///
/// # Errors
/// Only when the container cannot be read.
pub fn report(path: &Path, ctx: Option<u64>, kv: KvType) -> Result<Report, Error> {
    let gguf = Gguf::open(path)?;
    let (config, reasons, notices) = check(&gguf, path);
    let file = |s: &puna_model::gguf::Shard| File {
        path: s.path.clone(),
        bytes: s.map.len() as u64,
        format: format!("GGUF v{}", s.version),
    };
    Ok(Report {
        files: gguf.shards().iter().map(file).collect(),
        summary: summary(&gguf, config.as_ref(), ctx, kv),
        runs: reasons.is_empty(),
        reasons,
        notices,
        metadata: gguf.meta().iter().map(|(key, value)| entry(key, value)).collect(),
        tensors: gguf.tensors().map(tensor).collect(),
    })
}

/// The configuration as far as it can be read, what loading the model would refuse, and what it would ignore.
fn check(gguf: &Gguf, path: &Path) -> (Option<Config>, Vec<String>, Vec<String>) {
    let mut reasons: Vec<String> = gguf.problems().iter().map(ToString::to_string).collect();
    let config = match arch::from_gguf(gguf) {
        Ok((arch, config)) => {
            // Binding refuses a file with problems for the first of them.
            if reasons.is_empty() {
                reasons.extend(bind::bind(gguf, arch, &config).err().map(|e| e.to_string()));
            }
            Some(config)
        }
        Err(e) => {
            reasons.push(e.to_string());
            None
        }
    };
    // The container is good, so that what fails here is the tokenizer or what else lies beside the weights.
    let notices = match ModelFiles::open(path) {
        Ok(files) => files.notices().to_vec(),
        Err(e) => {
            reasons.push(e.to_string());
            Vec::new()
        }
    };
    (config, reasons, notices)
}

fn entry(key: &str, value: Value) -> Entry {
    Entry { key: key.to_owned(), value: json_value(value), shown: value.to_string() }
}

/// Longest array that is written in full.
const MAX_ELEMENTS: usize = 64;

/// A value as JSON: of a long or nested array its type and length, text with U+FFFD for what is no UTF-8, numbers that
/// are not finite as text.
fn json_value(value: Value) -> serde_json::Value {
    match value {
        Value::Bool(x) => x.into(),
        Value::F32(x) => json_float(x.into(), &x.to_string()),
        Value::F64(x) => json_float(x, &x.to_string()),
        Value::Str(x) => String::from_utf8_lossy(x).into(),
        Value::Array(a) if a.len() <= MAX_ELEMENTS && a.elem() != ValueType::Array => {
            a.iter().map(json_value).collect()
        }
        Value::Array(a) => json!({"type": a.elem().name(), "len": a.len()}),
        Value::U64(x) => x.into(),
        // Every other integer fits.
        _ => value.integer().and_then(|n| i64::try_from(n).ok()).into(),
    }
}

/// `shortest` are the fewest digits that give the number back in its own precision.
fn json_float(x: f64, shortest: &str) -> serde_json::Value {
    if x.is_finite() { shortest.parse().unwrap_or(x).into() } else { shortest.into() }
}

fn tensor(info: &TensorInfo) -> Tensor {
    Tensor {
        name: info.name.to_string(),
        ty: info.ty.name(),
        shape: info.shape.clone(),
        bytes: info.bytes,
        file: info.shard,
        offset: info.offset,
    }
}

fn summary(gguf: &Gguf, config: Option<&Config>, ctx: Option<u64>, kv: KvType) -> Summary {
    let meta = gguf.meta();
    let keys = Keys::new(meta);
    let shape = config.map_or_else(|| keys.shape(gguf), shape);
    let (parameters, active_parameters) = parameters(gguf, &keys);
    let types = types(gguf);
    let (elements, bytes) = types.iter().fold((0u64, 0u64), |(n, bytes), t| {
        // A hostile table can describe more than a number holds.
        (n.saturating_add(t.elements), bytes.saturating_add(t.bytes))
    });
    let ctx = ctx.unwrap_or_else(|| shape.context_length.unwrap_or(4096).min(4096) as u64);
    Summary {
        architecture: text(meta, "general.architecture"),
        name: text(meta, "general.name"),
        parameters,
        active_parameters,
        rope: config.map_or_else(|| keys.rope(), |c| Some(rope(c, &keys))),
        windows: config.map_or_else(|| keys.windows(), windows),
        experts: config.map_or_else(|| keys.experts(), experts),
        scales: config.map(scales).unwrap_or_default(),
        bits_per_weight: (elements > 0).then(|| bytes as f64 * 8.0 / elements as f64),
        types,
        tokenizer: tokenizer(meta),
        memory: memory(config, ctx, kv, bytes),
        shape,
    }
}

/// The keys of an architecture, read as far as they make sense.
struct Keys<'a> {
    meta: &'a Metadata,
    arch: String,
}

impl<'a> Keys<'a> {
    fn new(meta: &'a Metadata) -> Keys<'a> {
        Keys { meta, arch: text(meta, "general.architecture").unwrap_or_default() }
    }

    fn get<T: FromValue<'a>>(&self, key: &str) -> Option<T> {
        get(self.meta, &format!("{}.{key}", self.arch))
    }

    /// A count, given once or alike for all layers.
    fn count(&self, key: &str) -> Option<usize> {
        self.get(key).or_else(|| {
            let mut layers = self.get::<Array>(key)?.iter();
            let first = layers.next()?;
            layers.all(|n| n == first).then(|| usize::from_value(first).ok())?
        })
    }

    fn shape(&self, gguf: &Gguf) -> Shape {
        let dim = self.count("embedding_length");
        let n_heads = self.count("attention.head_count");
        let head_dim = || dim?.checked_div(n_heads?);
        let tokens = || get::<Array>(self.meta, "tokenizer.ggml.tokens").map(|a| a.len());
        Shape {
            dim,
            n_layers: self.count("block_count"),
            n_heads,
            n_kv_heads: self.count("attention.head_count_kv"),
            head_dim: self.count("attention.key_length").or_else(head_dim),
            ffn_dim: self.count("feed_forward_length"),
            vocab_size: gguf.find("token_embd.weight").map(TensorInfo::rows).or_else(tokens),
            context_length: self.count("context_length"),
        }
    }

    fn rope(&self) -> Option<Rope> {
        let kind = self.get("rope.scaling.type");
        let (theta, width) = (self.get("rope.freq_base"), self.count("rope.dimension_count"));
        (kind.is_some() || theta.is_some() || width.is_some()).then(|| Rope {
            kind: kind.map_or_else(|| "none".to_owned(), Cow::into_owned),
            factor: self.get("rope.scaling.factor"),
            theta,
            width,
            without: Vec::new(),
        })
    }

    fn windows(&self) -> Vec<Window> {
        let window = self.get("attention.sliding_window").filter(|&n| n > 0);
        window.map(|positions| Window { positions, layers: None }).into_iter().collect()
    }

    fn experts(&self) -> Option<Experts> {
        Some(Experts {
            n_experts: self.count("expert_count").filter(|&n| n > 0)?,
            used: self.count("expert_used_count"),
            ffn_dim: self.count("expert_feed_forward_length"),
            shared_ffn_dim: self.count("expert_shared_feed_forward_length").filter(|&n| n > 0),
            routing: match self.get("expert_gating_func") {
                Some(1u32) => Some("softmax"),
                Some(2) => Some("sigmoid"),
                _ => None,
            },
            normalize: self.get("expert_weights_norm"),
            scale: self.get("expert_weights_scale"),
        })
    }
}

/// The value of a key; `None` where it is missing or of another type.
fn get<'a, T: FromValue<'a>>(meta: &'a Metadata, key: &str) -> Option<T> {
    meta.get(key).ok().flatten()
}

fn text(meta: &Metadata, key: &str) -> Option<String> {
    get::<Cow<str>>(meta, key).map(Cow::into_owned)
}

fn shape(c: &Config) -> Shape {
    Shape {
        dim: Some(c.dim),
        n_layers: Some(c.n_layers),
        n_heads: Some(c.n_heads),
        n_kv_heads: Some(c.n_kv_heads),
        head_dim: Some(c.head_dim),
        ffn_dim: Some(c.ffn_dim).filter(|&n| n > 0),
        vocab_size: Some(c.vocab_size),
        context_length: Some(c.context_length),
    }
}

fn rope(c: &Config, keys: &Keys) -> Rope {
    Rope {
        kind: c.rope.kind.to_owned(),
        factor: keys.get("rope.scaling.factor").or_else(|| keys.get("rope.scale_linear")),
        theta: Some(c.rope.theta),
        width: Some(2 * c.rope.half()),
        without: (0..c.n_layers).filter(|&l| !c.rope_layers[l]).collect(),
    }
}

fn windows(c: &Config) -> Vec<Window> {
    let mut windows: Vec<(usize, Vec<usize>)> = Vec::new();
    for (layer, positions) in c.windows.iter().enumerate().filter_map(|(l, w)| Some((l, (*w)?))) {
        match windows.iter_mut().find(|w| w.0 == positions) {
            Some((_, layers)) => layers.push(layer),
            None => windows.push((positions, vec![layer])),
        }
    }
    windows.into_iter().map(|(positions, layers)| Window { positions, layers: Some(layers) }).collect()
}

fn experts(c: &Config) -> Option<Experts> {
    c.moe.map(|moe| Experts {
        n_experts: moe.n_experts,
        used: Some(moe.routing.used),
        ffn_dim: Some(moe.ffn_dim),
        shared_ffn_dim: Some(moe.shared_ffn_dim).filter(|&n| n > 0),
        routing: Some(if moe.routing.sigmoid { "sigmoid" } else { "softmax" }),
        normalize: Some(moe.routing.normalize),
        scale: Some(moe.routing.scale),
    })
}

fn scales(c: &Config) -> BTreeMap<&'static str, f32> {
    let usual = 1.0 / (c.head_dim as f32).sqrt();
    let all = [
        ("embed_scale", Some(c.embed_scale).filter(|&x| x != 1.0)),
        ("residual_scale", Some(c.residual_scale).filter(|&x| x != 1.0)),
        ("logit_scale", Some(c.logit_scale).filter(|&x| x != 1.0)),
        ("attn_scale", Some(c.attn_scale).filter(|&x| x != usual)),
        ("attn_softcap", c.attn_softcap),
        ("logit_softcap", c.logit_softcap),
    ];
    all.into_iter().filter_map(|(name, x)| Some((name, x?))).collect()
}

/// Parts of the names of tensors that nobody trained by descent: tables that follow from the configuration, and the
/// running correction of a router.
const NO_PARAMETERS: &[&str] =
    &["rope_freqs", "rope_factors_", "rope.freqs", "attn_rot_embd", "rotary_emb.inv_freq", "exp_probs_b"];

/// Parameters, and those that a token makes use of.
fn parameters(gguf: &Gguf, keys: &Keys) -> (u64, u64) {
    let used = keys.count("expert_used_count");
    let trained = |t: &&TensorInfo| !NO_PARAMETERS.iter().any(|part| t.name.contains(part));
    gguf.tensors().filter(trained).fold((0u64, 0u64), |(all, active), t| {
        let elements = t.elements() as u64;
        let active_elements = match (n_experts(t, keys), used) {
            (Some(n), Some(used)) if used < n => (elements as u128 * used as u128 / n as u128) as u64,
            _ => elements,
        };
        (all.saturating_add(elements), active.saturating_add(active_elements))
    })
}

/// The number of experts that a tensor belongs to: merged ones are named `blk.L.ffn_gate_exps.weight`, those of one
/// expert in older files `blk.L.ffn_gate.E.weight`.
fn n_experts(t: &TensorInfo, keys: &Keys) -> Option<usize> {
    let mut parts = t.name.strip_prefix("blk.")?.split('.').skip(1);
    let (role, next) = (parts.next()?, parts.next()?);
    if role.ends_with("_exps") {
        return t.shape.first().map(|&n| n as usize);
    }
    let is_number = next.bytes().all(|b| b.is_ascii_digit());
    keys.count("expert_count").filter(|_| is_number && role.starts_with("ffn_"))
}

fn types(gguf: &Gguf) -> Vec<TypeShare> {
    let mut types: Vec<TypeShare> = Vec::new();
    for t in gguf.tensors() {
        let (elements, bytes) = (t.elements() as u64, t.bytes);
        match types.iter_mut().find(|share| share.ty == t.ty.name()) {
            Some(share) => {
                share.tensors += 1;
                share.elements = share.elements.saturating_add(elements);
                share.bytes = share.bytes.saturating_add(bytes);
            }
            None => {
                let (block_len, block_bytes) = t.ty.block();
                let bits_per_weight = block_bytes as f64 * 8.0 / block_len as f64;
                types.push(TypeShare { ty: t.ty.name(), tensors: 1, elements, bytes, bits_per_weight });
            }
        }
    }
    types.sort_by_key(|share| std::cmp::Reverse(share.bytes));
    types
}

/// Most tokens with a role that are looked up: each costs a walk over the vocabulary.
const MAX_SPECIAL: usize = 16;

fn tokenizer(meta: &Metadata) -> Option<Tokenizer> {
    let tokens = get::<Strings>(meta, "tokenizer.ggml.tokens");
    let model = text(meta, "tokenizer.ggml.model");
    if tokens.is_none() && model.is_none() {
        return None;
    }
    let special = |(key, value): (&str, Value)| {
        let role = key.strip_prefix("tokenizer.ggml.")?.strip_suffix("_token_id")?;
        let id = u64::from_value(value).ok()?;
        let text = tokens.clone().and_then(|mut tokens| tokens.nth(usize::try_from(id).ok()?));
        Some(Special { role: role.to_owned(), id, text: text.map(|t| String::from_utf8_lossy(t).into_owned()) })
    };
    Some(Tokenizer {
        model,
        pre: text(meta, "tokenizer.ggml.pre"),
        special: meta.iter().filter_map(special).take(MAX_SPECIAL).collect(),
        add_bos: get(meta, "tokenizer.ggml.add_bos_token"),
        add_eos: get(meta, "tokenizer.ggml.add_eos_token"),
        chat_template: meta.iter().any(|(key, _)| key.starts_with("tokenizer.chat_template")),
        tokens: tokens.map(|t| t.len()),
    })
}

fn memory(config: Option<&Config>, ctx: u64, kv: KvType, weight_bytes: u64) -> Memory {
    let kv_bytes = config.and_then(|c| kv_bytes(c, ctx, kv));
    let total_bytes = kv_bytes.map(|kv| weight_bytes.saturating_add(kv));
    Memory { ctx, kv: kv.name(), kv_bytes, weight_bytes, total_bytes }
}

/// Widest rows of keys that are believed: sums below stay far from overflow.
const MAX_KV_DIM: usize = 1 << 32;

/// Bytes of keys and values while a sequence of `ctx` positions generates. A layer with a window keeps the blocks
/// that the last positions can touch; a prompt computed in chunks takes those of its chunk besides.
fn kv_bytes(c: &Config, ctx: u64, kind: KvType) -> Option<u64> {
    if c.kv_dim() > MAX_KV_DIM {
        return None;
    }
    let layout = KvLayout { kind, n_kv_heads: c.n_kv_heads, head_dim: c.head_dim };
    let block = KV_BLOCK as u64;
    let blocks = |window: &Option<usize>| {
        let all = ctx.div_ceil(block);
        // However a window lies: at worst it begins with the last position of a block.
        window.map_or(all, |w| all.min((w as u64 - 1).div_ceil(block) + 1))
    };
    let blocks = c.windows.iter().map(blocks).fold(0, u64::saturating_add);
    Some(blocks.saturating_mul(layout.layer_bytes() as u64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use puna_model::{Batch, LoadOptions, Model, Outputs};

    #[test]
    fn a_cache_takes_what_was_promised() {
        for name in ["llama-gqa", "mistral-swa"] {
            let path = format!("{}/../../testdata/models/{name}/model-f32.gguf", env!("CARGO_MANIFEST_DIR"));
            let gguf = Gguf::open(path).unwrap();
            let mut model = Model::load(&gguf, &LoadOptions::default(), &mut |_, _| {}).unwrap();
            let mut kv = model.kv_cache(KvType::F16);
            let seq = kv.add();
            let mut peak = 0;
            for start in 0..100 {
                let mut batch = Batch::default();
                batch.push(seq, start, &[7], Outputs::None);
                model.forward(&batch, &mut kv).unwrap();
                peak = peak.max(kv.bytes() as u64);
                let promised = kv_bytes(model.config(), start as u64 + 1, KvType::F16).unwrap();
                assert!(kv.bytes() as u64 <= promised, "{name} at {start}");
            }
            assert_eq!(Some(peak), kv_bytes(model.config(), 100, KvType::F16), "{name}");
        }
    }
}
