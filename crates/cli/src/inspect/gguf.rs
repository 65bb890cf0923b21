//! The report of a GGUF file. What puna supports is described by its [`Config`]; of what it does not, the general keys
//! of the format are shown.

use super::common::{self, Checked};
use super::report::{Entry, Experts, File, Report, Rope, Shape, Special, Summary, Tensor, Tokenizer, Window};
use puna_kernels::KvType;
use puna_model::Gguf;
use puna_model::gguf::{Array, FromValue, Metadata, Strings, TensorInfo, Value, ValueType};
use serde_json::json;
use std::borrow::Cow;

/// Describes a model.
pub fn report(gguf: &Gguf, ctx: Option<u64>, kv: KvType) -> Report {
    let checked = Checked::new(gguf, gguf.problems(), gguf.path());
    let file = |s: &puna_model::gguf::Shard| File {
        path: s.path.clone(),
        bytes: s.map.len() as u64,
        format: format!("GGUF v{}", s.version),
    };
    let tensors: Vec<Tensor> = gguf.tensors().map(tensor).collect();
    Report {
        files: gguf.shards().iter().map(file).collect(),
        summary: summary(gguf, &tensors, &checked, ctx, kv),
        runs: checked.reasons.is_empty(),
        notices: checked.notices(),
        reasons: checked.reasons,
        metadata: gguf.meta().iter().map(|(key, value)| entry(key, value)).collect(),
        tensors,
    }
}

fn entry(key: &str, value: Value) -> Entry {
    Entry { key: key.to_owned(), value: json_value(value), shown: value.to_string() }
}

/// A value as JSON: of a long or nested array its type and length, text with U+FFFD for what is no UTF-8, numbers that
/// are not finite as text.
fn json_value(value: Value) -> serde_json::Value {
    match value {
        Value::Bool(x) => x.into(),
        Value::F32(x) => json_float(x.into(), &x.to_string()),
        Value::F64(x) => json_float(x, &x.to_string()),
        Value::Str(x) => String::from_utf8_lossy(x).into(),
        Value::Array(a) if a.len() <= common::MAX_ELEMENTS && a.elem() != ValueType::Array => {
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

fn summary(gguf: &Gguf, tensors: &[Tensor], checked: &Checked, ctx: Option<u64>, kv: KvType) -> Summary {
    let config = checked.config.as_ref();
    let meta = gguf.meta();
    let keys = Keys::new(meta);
    let shape = config.map_or_else(|| keys.shape(gguf), common::shape);
    let (parameters, active_parameters) = parameters(gguf, &keys);
    let (types, elements, bytes) = common::types(tensors);
    let ctx = ctx.unwrap_or_else(|| shape.context_length.unwrap_or(4096).min(4096) as u64);
    Summary {
        architecture: text(meta, "general.architecture"),
        name: text(meta, "general.name"),
        parameters,
        active_parameters,
        rope: config.map_or_else(|| keys.rope(), |c| Some(common::rope(c, keys.factor()))),
        windows: config.map_or_else(|| keys.windows(), common::windows),
        experts: config.map_or_else(|| keys.experts(), common::experts),
        scales: config.map(common::scales).unwrap_or_default(),
        bits_per_weight: common::bits(elements, bytes),
        types,
        tokenizer: tokenizer(meta),
        memory: common::memory(config, ctx, kv, checked.weight_bytes.unwrap_or(bytes)),
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
            factor: self.factor(),
            theta,
            width,
            without: Vec::new(),
        })
    }

    /// How many times longer scaling makes the context.
    fn factor(&self) -> Option<f32> {
        self.get("rope.scaling.factor").or_else(|| self.get("rope.scale_linear"))
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

/// Parameters, and those that a token makes use of.
fn parameters(gguf: &Gguf, keys: &Keys) -> (u64, u64) {
    let used = keys.count("expert_used_count");
    gguf.tensors().filter(|t| common::is_trained(&t.name)).fold((0u64, 0u64), |(all, active), t| {
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
