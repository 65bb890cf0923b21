//! What a report says of any model that has a [`Config`] or tensors, whatever files they come from.

use super::report::{Experts, Memory, Rope, Shape, Tensor, TypeShare, Window};
use puna::ModelFiles;
use puna_kernels::{KV_BLOCK, KvLayout, KvType};
use puna_model::{Checkpoint, Config, Error, bind};
use std::collections::BTreeMap;
use std::path::Path;

/// Longest array that is written in full.
pub const MAX_ELEMENTS: usize = 64;

/// What reading a model's files comes to.
pub struct Checked {
    /// The configuration, as far as it can be read.
    pub config: Option<Config>,
    /// Bytes of the weights that are loaded, where they can be: without a vision tower's, and FP8 as what it becomes.
    pub weight_bytes: Option<u64>,
    /// What loading the model would refuse.
    pub reasons: Vec<String>,
    /// What lies beside the weights, where it can be read.
    pub files: Option<ModelFiles>,
}

impl Checked {
    /// Checks all but the weights themselves. `problems`: what is known to be wrong with the files at `path`.
    pub fn new(from: &dyn Checkpoint, problems: &[Error], path: &Path) -> Checked {
        let mut reasons: Vec<String> = problems.iter().map(ToString::to_string).collect();
        let mut weight_bytes = None;
        let config = match from.config() {
            Ok((arch, config)) => {
                // Binding refuses a file with problems for the first of them.
                if reasons.is_empty() {
                    match bind::bind(from, arch, &config, true) {
                        Ok(weights) => weight_bytes = Some(bind::bytes(&weights)),
                        Err(e) => reasons.push(e.to_string()),
                    }
                }
                Some(config)
            }
            Err(e) => {
                reasons.push(e.to_string());
                None
            }
        };
        // The container is good, so that what fails here is the tokenizer or what else lies beside the weights.
        let files = ModelFiles::open(path);
        reasons.extend(files.as_ref().err().map(ToString::to_string));
        reasons.dedup();
        Checked { config, weight_bytes, reasons, files: files.ok() }
    }

    /// What running the model would ignore.
    pub fn notices(&self) -> Vec<String> {
        self.files.as_ref().map(|files| files.notices().to_vec()).unwrap_or_default()
    }
}

/// Sizes.
pub fn shape(c: &Config) -> Shape {
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

/// Rotation; `factor`: how many times longer scaling makes the context.
pub fn rope(c: &Config, factor: Option<f32>) -> Rope {
    Rope {
        kind: c.rope.kind.to_owned(),
        factor,
        theta: Some(c.rope.theta),
        width: Some(2 * c.rope.half()),
        without: (0..c.n_layers).filter(|&l| !c.rope_layers[l]).collect(),
    }
}

/// Windows and the layers that have them.
pub fn windows(c: &Config) -> Vec<Window> {
    let mut windows: Vec<(usize, Vec<usize>)> = Vec::new();
    for (layer, positions) in c.windows.iter().enumerate().filter_map(|(l, w)| Some((l, (*w)?))) {
        match windows.iter_mut().find(|w| w.0 == positions) {
            Some((_, layers)) => layers.push(layer),
            None => windows.push((positions, vec![layer])),
        }
    }
    windows.into_iter().map(|(positions, layers)| Window { positions, layers: Some(layers) }).collect()
}

/// The mixture of experts.
pub fn experts(c: &Config) -> Option<Experts> {
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

/// Constants that most models do not have.
pub fn scales(c: &Config) -> BTreeMap<&'static str, f32> {
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

/// Whether a tensor's elements are parameters.
pub fn is_trained(name: &str) -> bool {
    !NO_PARAMETERS.iter().any(|part| name.contains(part))
}

/// What each type of tensors contributes, and elements and bytes of all.
pub fn types(tensors: &[Tensor]) -> (Vec<TypeShare>, u64, u64) {
    let mut types: Vec<TypeShare> = Vec::new();
    let (mut all_elements, mut all_bytes) = (0u64, 0u64);
    for t in tensors {
        // A hostile table can describe more than a number holds.
        let elements = t.shape.iter().fold(1u64, |n, &d| n.saturating_mul(d));
        all_elements = all_elements.saturating_add(elements);
        all_bytes = all_bytes.saturating_add(t.bytes);
        match types.iter_mut().find(|share| share.ty == t.ty) {
            Some(share) => {
                share.tensors += 1;
                share.elements = share.elements.saturating_add(elements);
                share.bytes = share.bytes.saturating_add(t.bytes);
            }
            None => {
                types.push(TypeShare { ty: t.ty, tensors: 1, elements, bytes: t.bytes, bits_per_weight: 0.0 });
            }
        }
    }
    for share in &mut types {
        share.bits_per_weight = bits(share.elements, share.bytes).unwrap_or(0.0);
    }
    types.sort_by_key(|share| std::cmp::Reverse(share.bytes));
    (types, all_elements, all_bytes)
}

/// Bits an element.
pub fn bits(elements: u64, bytes: u64) -> Option<f64> {
    (elements > 0).then(|| bytes as f64 * 8.0 / elements as f64)
}

/// What running it takes, besides what a chunk of a prompt takes for its time.
pub fn memory(config: Option<&Config>, ctx: u64, kv: KvType, weight_bytes: u64) -> Memory {
    let kv = config.map_or(kv, |c| kv.for_heads_of(c.head_dim));
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
    use puna_model::{Batch, Gguf, LoadOptions, Model, Outputs};

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
                peak = peak.max(kv.bytes_held() as u64);
                let promised = kv_bytes(model.config(), start as u64 + 1, KvType::F16).unwrap();
                assert!(kv.bytes_held() as u64 <= promised, "{name} at {start}");
            }
            assert_eq!(Some(peak), kv_bytes(model.config(), 100, KvType::F16), "{name}");
        }
    }
}
