//! A configuration as metadata: the inverse of what `arch.rs` reads, with llama.cpp's names of keys.

use crate::arch::{self, Arch};
use crate::config::{Config, MoeConfig};
use crate::error::Error;
use crate::gguf::{Field, Gguf, Header, TensorType};
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
    header.set("general.architecture", arch.name);
    let mut keys = Keys { from, prefix: arch.keys.unwrap_or(arch.name), header };
    sizes(&mut keys, config)?;
    numbers(&mut keys, config);
    for (name, number) in arch.tells {
        keys.set(name, number(config));
    }
    windows(&mut keys, config)?;
    if let Some(moe) = &config.moe {
        experts(&mut keys, moe)?;
    }
    let tables = rotation(&mut keys, &config.rope)?;
    for (name, values) in &tables {
        header.tensor(name, &[values.len()], TensorType::Weight(DType::F32))?;
    }
    Ok(tables)
}

/// The keys of one architecture.
struct Keys<'a> {
    from: &'a Path,
    prefix: &'a str,
    header: &'a mut Header,
}

impl Keys<'_> {
    fn set(&mut self, name: &str, value: impl Into<Field>) {
        self.header.set(format!("{}.{name}", self.prefix), value);
    }

    fn count(&mut self, name: &str, n: usize) -> Result<(), Error> {
        let Ok(small) = u32::try_from(n) else {
            let what = format!("{name} is {n}, which is more than GGUF can say");
            return Err(Error::Convert { path: self.from.to_owned(), what });
        };
        self.set(name, small);
        Ok(())
    }
}

fn sizes(keys: &mut Keys, c: &Config) -> Result<(), Error> {
    keys.count("block_count", c.n_layers)?;
    keys.count("context_length", c.context_length)?;
    keys.count("embedding_length", c.dim)?;
    keys.count("feed_forward_length", c.ffn_dim)?;
    keys.count("attention.head_count", c.n_heads)?;
    keys.count("attention.head_count_kv", c.n_kv_heads)?;
    keys.count("attention.key_length", c.head_dim)?;
    keys.count("attention.value_length", c.head_dim)?;
    keys.count("vocab_size", c.vocab_size)?;
    if c.n_deepstack > 0 {
        keys.count("n_deepstack_layers", c.n_deepstack)?;
    }
    Ok(())
}

/// Constants; those that most models do not have, only where they change something.
fn numbers(keys: &mut Keys, c: &Config) {
    keys.set("attention.layer_norm_rms_epsilon", c.norm_eps);
    let unless = |usual: f32, number: f32| Some(number).filter(|&number| number != usual);
    for (name, number) in [
        ("attention.scale", unless(1.0 / (c.head_dim as f32).sqrt(), c.attn_scale)),
        ("attn_logit_softcapping", c.attn_softcap),
        ("final_logit_softcapping", c.logit_softcap),
        ("embedding_scale", unless(1.0, c.embed_scale)),
        ("residual_scale", unless(1.0, c.residual_scale)),
        ("logit_scale", unless(1.0, c.logit_scale)),
    ] {
        if let Some(number) = number {
            keys.set(name, number);
        }
    }
}

fn windows(keys: &mut Keys, c: &Config) -> Result<(), Error> {
    let Some(window) = c.windows.iter().flatten().max() else { return Ok(()) };
    keys.count("attention.sliding_window", *window)?;
    if c.windows.contains(&None) {
        keys.set("attention.sliding_window_pattern", c.windows.iter().map(Option::is_some).collect::<Vec<_>>());
    }
    Ok(())
}

fn experts(keys: &mut Keys, moe: &MoeConfig) -> Result<(), Error> {
    keys.count("expert_count", moe.n_experts)?;
    keys.count("expert_used_count", moe.routing.used)?;
    keys.count("expert_feed_forward_length", moe.ffn_dim)?;
    if moe.shared_ffn_dim > 0 {
        keys.count("expert_shared_feed_forward_length", moe.shared_ffn_dim)?;
    }
    // Architectures differ in what they mean where it is absent.
    keys.set("expert_weights_norm", moe.routing.normalize);
    if moe.routing.sigmoid {
        keys.set("expert_gating_func", 2u32);
    }
    if moe.routing.scale != 1.0 {
        keys.set("expert_weights_scale", moe.routing.scale);
    }
    Ok(())
}

/// The keys of a rotation, and its tables.
fn rotation(keys: &mut Keys, rope: &Rope) -> Result<Vec<Table>, Error> {
    let width = 2 * rope.half();
    keys.count("rope.dimension_count", width)?;
    keys.set("rope.freq_base", rope.theta);
    if let Some(sections) = &rope.sections {
        let [t, h, w] = sections.sizes.map(|n| n as i32);
        keys.set("rope.dimension_sections", vec![t, h, w, 0]);
    }
    match &rope.scaling {
        Scaling::Divided => {
            let base = base_frequencies(rope.theta, width);
            if base != rope.inv_freq {
                let divisors = base.iter().zip(&rope.inv_freq).map(|(base, freq)| base / freq);
                return Ok(vec![("rope_freqs.weight", divisors.collect())]);
            }
        }
        Scaling::Linear(factor) => {
            keys.set("rope.scaling.type", "linear");
            keys.set("rope.scaling.factor", *factor);
        }
        Scaling::Yarn(yarn) => {
            keys.set("rope.scaling.type", "yarn");
            keys.set("rope.scaling.factor", yarn.factor);
            keys.count("rope.scaling.original_context_length", yarn.original_context)?;
            keys.set("rope.scaling.yarn_beta_fast", yarn.beta_fast);
            keys.set("rope.scaling.yarn_beta_slow", yarn.beta_slow);
            // In GGUF it multiplies YaRN's own magnitude, and is not in its place.
            let factor = rope.magnitude / Yarn::magnitude(yarn.factor, 1.0);
            if factor != 1.0 {
                keys.set("rope.scaling.attn_factor", factor);
            }
        }
        Scaling::LongRope([short, long]) => {
            let original = rope.long.as_ref().map_or(0, |long| long.original_context);
            keys.count("rope.scaling.original_context_length", original)?;
            keys.set("rope.scaling.attn_factor", rope.magnitude);
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
