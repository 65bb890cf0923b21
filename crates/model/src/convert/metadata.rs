//! A configuration as metadata: the inverse of what `arch.rs` reads, with llama.cpp's names of keys.

use crate::arch::{self, Arch};
use crate::config::Config;
use crate::error::Error;
use crate::gguf::{Gguf, Header, TensorType};
use crate::rope::{Rope, Scaling, Yarn, base_frequencies};
use puna_kernels::DType;
use std::path::Path;

/// A vector that stands in the file beside the weights: divisors or factors of rotary frequencies.
pub type Table = (&'static str, Vec<f32>);

/// Bytes that every tensor's place is a multiple of.
const ALIGNMENT: usize = 32;

/// Writes what a model is into `header`, and returns the tables that belong to it, which `header` has as its first
/// tensors.
///
/// # Errors
/// [`Error::Convert`] for a number that GGUF has no room for.
pub fn describe(from: &Path, arch: &Arch, config: &Config, header: &mut Header) -> Result<Vec<Table>, Error> {
    let fault = |what: String| Error::Convert { path: from.to_owned(), what };
    header.set("general.architecture", arch.name);
    let key = |name: &str| format!("{}.{name}", arch.keys.unwrap_or(arch.name));
    let count = |n: usize| u32::try_from(n).map_err(|_| fault(format!("{n} is more than GGUF can say")));
    let c = config;
    for (name, n) in [
        ("block_count", c.n_layers),
        ("context_length", c.context_length),
        ("embedding_length", c.dim),
        ("feed_forward_length", c.ffn_dim),
        ("attention.head_count", c.n_heads),
        ("attention.head_count_kv", c.n_kv_heads),
        ("attention.key_length", c.head_dim),
        ("attention.value_length", c.head_dim),
        ("vocab_size", c.vocab_size),
        ("rope.dimension_count", 2 * c.rope.half()),
    ] {
        header.set(key(name), count(n)?);
    }
    header.set(key("attention.layer_norm_rms_epsilon"), c.norm_eps);
    for (name, number) in [
        ("attention.scale", Some(c.attn_scale).filter(|&s| s != 1.0 / (c.head_dim as f32).sqrt())),
        ("attn_logit_softcapping", c.attn_softcap),
        ("final_logit_softcapping", c.logit_softcap),
        ("embedding_scale", Some(c.embed_scale).filter(|&s| s != 1.0)),
        ("residual_scale", Some(c.residual_scale).filter(|&s| s != 1.0)),
        ("logit_scale", Some(c.logit_scale).filter(|&s| s != 1.0)),
    ] {
        if let Some(number) = number {
            header.set(key(name), number);
        }
    }
    for (name, number) in arch.tells {
        header.set(key(name), number(c));
    }
    if let Some(window) = c.windows.iter().flatten().max() {
        header.set(key("attention.sliding_window"), count(*window)?);
        if c.windows.contains(&None) {
            let windowed: Vec<bool> = c.windows.iter().map(Option::is_some).collect();
            header.set(key("attention.sliding_window_pattern"), windowed);
        }
    }
    if c.n_deepstack > 0 {
        header.set(key("n_deepstack_layers"), count(c.n_deepstack)?);
    }
    if let Some(moe) = &c.moe {
        header.set(key("expert_count"), count(moe.n_experts)?);
        header.set(key("expert_used_count"), count(moe.routing.used)?);
        header.set(key("expert_feed_forward_length"), count(moe.ffn_dim)?);
        header.set(key("expert_weights_norm"), moe.routing.normalize);
        if moe.shared_ffn_dim > 0 {
            header.set(key("expert_shared_feed_forward_length"), count(moe.shared_ffn_dim)?);
        }
        if moe.routing.sigmoid {
            header.set(key("expert_gating_func"), 2u32);
        }
        if moe.routing.scale != 1.0 {
            header.set(key("expert_weights_scale"), moe.routing.scale);
        }
    }
    let tables = rotation(&c.rope, key, count, header)?;
    for (name, values) in &tables {
        header.tensor(name, &[values.len()], TensorType::Weight(DType::F32))?;
    }
    Ok(tables)
}

/// The keys of a rotation, and its tables.
fn rotation(
    rope: &Rope,
    key: impl Fn(&str) -> String,
    count: impl Fn(usize) -> Result<u32, Error>,
    header: &mut Header,
) -> Result<Vec<Table>, Error> {
    header.set(key("rope.freq_base"), rope.theta);
    if let Some(sections) = &rope.sections {
        let [t, h, w] = sections.sizes.map(|n| n as i32);
        header.set(key("rope.dimension_sections"), vec![t, h, w, 0]);
    }
    match &rope.scaling {
        Scaling::Divided => {
            let base = base_frequencies(rope.theta, 2 * rope.half());
            if base == rope.inv_freq {
                return Ok(Vec::new());
            }
            let divisors = base.iter().zip(&rope.inv_freq).map(|(base, freq)| base / freq);
            return Ok(vec![("rope_freqs.weight", divisors.collect())]);
        }
        Scaling::Linear(factor) => {
            header.set(key("rope.scaling.type"), "linear");
            header.set(key("rope.scaling.factor"), *factor);
        }
        Scaling::Yarn(yarn) => {
            header.set(key("rope.scaling.type"), "yarn");
            header.set(key("rope.scaling.factor"), yarn.factor);
            header.set(key("rope.scaling.original_context_length"), count(yarn.original_context)?);
            header.set(key("rope.scaling.yarn_beta_fast"), yarn.beta_fast);
            header.set(key("rope.scaling.yarn_beta_slow"), yarn.beta_slow);
            // Here it multiplies YaRN's own magnitude, and is not in its place.
            let factor = rope.magnitude / Yarn::magnitude(yarn.factor, 1.0);
            if factor != 1.0 {
                header.set(key("rope.scaling.attn_factor"), factor);
            }
        }
        Scaling::LongRope([short, long]) => {
            let original = rope.long.as_ref().map_or(0, |long| long.original_context);
            header.set(key("rope.scaling.original_context_length"), count(original)?);
            header.set(key("rope.scaling.attn_factor"), rope.magnitude);
            return Ok(vec![("rope_factors_long.weight", long.clone()), ("rope_factors_short.weight", short.clone())]);
        }
    }
    Ok(Vec::new())
}

/// Reads the header as every reader will, and compares.
///
/// # Errors
/// [`Error::Convert`] names what GGUF cannot say of this model, so that readers would run another one.
pub fn check(from: &Path, config: &Config, header: &Header, tables: &[Table]) -> Result<(), Error> {
    let mut bytes = header.to_bytes();
    for (_, values) in tables {
        bytes.extend(values.iter().flat_map(|x| x.to_le_bytes()));
        bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
    }
    // The weights that are not there yet only matter to who reads them.
    let (_, read) = arch::from_gguf(&Gguf::parse(from, bytes.into())?)?;
    match difference(config, &read) {
        None => Ok(()),
        Some(what) => {
            let what = format!("GGUF cannot say of a model of architecture {} that {what}", config.arch);
            Err(Error::Convert { path: from.to_owned(), what })
        }
    }
}

/// How what was read differs from what was meant.
fn difference(meant: &Config, read: &Config) -> Option<String> {
    let close = |a: f32, b: f32| a == b || (a - b).abs() <= 1e-6 * a.abs();
    let all_close = |a: &[f32], b: &[f32]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| close(*a, *b));
    let same_rotation = |a: &Rope, b: &Rope| {
        let long = match (&a.long, &b.long) {
            (None, None) => true,
            (Some(a), Some(b)) => a.original_context == b.original_context && all_close(&a.inv_freq, &b.inv_freq),
            _ => false,
        };
        long && all_close(&a.inv_freq, &b.inv_freq) && close(a.magnitude, b.magnitude) && a.sections == b.sections
    };
    let (m, r) = (meant, read);
    let sizes = |c: &Config| {
        let attention = [c.n_heads, c.n_kv_heads, c.head_dim];
        (c.arch, c.vocab_size, c.dim, c.n_layers, attention, c.ffn_dim, c.context_length, c.n_deepstack)
    };
    let numbers = |c: &Config| [c.norm_eps, c.attn_scale, c.embed_scale, c.residual_scale, c.logit_scale];
    let caps = |c: &Config| [c.attn_softcap, c.logit_softcap].map(|cap| cap.unwrap_or(0.0));
    let experts = |c: &Config| c.moe.map(|moe| (moe.n_experts, moe.ffn_dim, moe.shared_ffn_dim, moe.routing));
    if m.activation != r.activation {
        return Some(format!("its activation is {:?}", m.activation));
    }
    if m.rope_layers != r.rope_layers {
        let layers: Vec<usize> = (0..m.n_layers).filter(|&l| !m.rope_layers[l]).collect();
        return Some(format!("layers {layers:?} do not rotate"));
    }
    if m.windows != r.windows {
        return Some(format!("its layers' windows are {:?}", m.windows));
    }
    if let Scaling::Yarn(Yarn { truncate: false, .. }) = m.rope.scaling {
        return Some("YaRN's ramp has borders between pairs (truncate is false)".into());
    }
    if !same_rotation(&m.rope, &r.rope) {
        return Some(format!("its rotation is {:?}", m.rope.scaling));
    }
    if experts(m) != experts(r) {
        return Some(format!("its experts are {:?}", m.moe));
    }
    if sizes(m) != sizes(r) {
        return Some(format!("its sizes are {:?}", sizes(m)));
    }
    let same = all_close(&numbers(m), &numbers(r)) && all_close(&caps(m), &caps(r));
    (!same).then(|| format!("its constants are {:?} and {:?}", numbers(m), caps(m)))
}
