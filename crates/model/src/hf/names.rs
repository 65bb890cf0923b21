//! Names of tensors: transformers' to GGUF's, which the rest of the crate knows, and back for messages.

use super::config::Parsed;
use super::safetensors::FP8;
use super::shards::Shards;
use crate::arch::Norms;
use crate::config::Config;
use crate::error::{Error, escape};
use indexmap::IndexMap;

/// What a layer's tensors are called after the layer, without `.weight` or `.bias`: in transformers, in GGUF. `{}` is
/// the number of an expert.
static LAYER: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", "ffn_gate_inp"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("mlp.experts.{}.gate_proj", "ffn_gate.{}"),
    ("mlp.experts.{}.up_proj", "ffn_up.{}"),
    ("mlp.experts.{}.down_proj", "ffn_down.{}"),
    ("block_sparse_moe.experts.{}.w1", "ffn_gate.{}"),
    ("block_sparse_moe.experts.{}.w3", "ffn_up.{}"),
    ("block_sparse_moe.experts.{}.w2", "ffn_down.{}"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
];

/// The norm between attention and feed-forward, whose GGUF name depends on the side it is on.
const MIDDLE_NORM: &str = "post_attention_layernorm";

/// The running correction of a router: whole names.
static CORRECTION: &[&str] =
    &["block_sparse_moe.e_score_correction_bias", "mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"];
const CORRECTION_GGUF: &str = "exp_probs_b.bias";

/// All experts of a layer in one tensor: gate and up together, the gate first; and down.
const FUSED_GATE_UP: &str = "mlp.experts.gate_up_proj";
const FUSED_DOWN: &str = "mlp.experts.down_proj";

/// Where the text model's tensors are known to begin. Others are found by their embedding.
static PREFIXES: &[&str] =
    &["model.", "model.language_model.", "language_model.model.", "model.text_model.", "language_model.", ""];

/// Last parts of names that do not matter: tables that every reader computes, and scales of activations, keys and
/// values, which are not kept in eight bits here.
static HARMLESS: &[&str] = &["inv_freq", "input_scale", "input_scale_ub", "activation_scale", "k_scale", "v_scale"];

/// What is added to the name of an FP8 tensor for its scales.
const SCALES: [&str; 2] = ["_scale_inv", "_scale"];

/// One of GGUF's tensors, and where its elements are.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Its number among the tensors of the files.
    pub tensor: usize,
    /// Part of the tensor; `None`: all of it.
    pub part: Option<ExpertPart>,
}

/// One expert's matrix, or half of it, in a tensor of all experts.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertPart {
    /// The expert.
    pub expert: usize,
    /// The first of its rows.
    pub start: usize,
    /// How many.
    pub rows: usize,
    /// Length of a row.
    pub cols: usize,
    /// They are stored as columns.
    pub transposed: bool,
}

/// The text model's tensors under GGUF's names.
pub struct Names {
    /// By GGUF's name, in the order of the files.
    pub entries: IndexMap<String, Entry>,
    /// The output is the embedding.
    pub tied: bool,
    /// What transformers' names begin with.
    prefix: String,
    /// Where the output can be: beside the text model or at any level above it.
    heads: Vec<String>,
    middle_norm: &'static str,
}

impl Names {
    /// Finds the tensors. Those that have no name in GGUF keep theirs, so that binding finds them to be of no use. An output that is not read because the embedding is, is left out.
    ///
    /// # Errors
    /// [`Error::Tensor`] for experts whose shape is not one of the two that exist, and for a tensor that is there under
    /// two names.
    pub fn new(shards: &Shards, parsed: &Parsed) -> Result<Names, Error> {
        let middle_norm = match parsed.arch.norms {
            Norms::Before => "ffn_norm",
            Norms::After => "post_attention_norm",
        };
        let prefix = prefix(shards);
        let heads = heads(&prefix);
        let mut names = Names { entries: IndexMap::new(), tied: false, prefix, heads, middle_norm };
        let has_head = names.heads.iter().any(|head| shards.tensors.contains_key(&format!("{head}.weight")));
        names.tied = parsed.tied.unwrap_or(!has_head);
        for (tensor, name) in shards.tensors.keys().enumerate() {
            if is_harmless(name) || is_scale(shards, name) {
                continue;
            }
            if let Some(name) = names.outside_layers(name) {
                if !names.tied || name != "output.weight" {
                    names.insert(shards, name, Entry { tensor, part: None })?;
                }
            } else if let Some((layer, part)) = names.layer(name) {
                match (part, &parsed.config.moe) {
                    (FUSED_GATE_UP | FUSED_DOWN, Some(_)) => {
                        let (layer, part) = (layer, part.to_owned());
                        names.insert_experts(shards, &parsed.config, layer, &part, tensor)?;
                    }
                    _ => {
                        let gguf = names.part(part).unwrap_or_else(|| part.to_owned());
                        names.insert(shards, format!("blk.{layer}.{gguf}"), Entry { tensor, part: None })?;
                    }
                }
            } else if !names.prefix.is_empty() && name.starts_with(&names.prefix) {
                // Without a prefix, a vision tower would be taken for a part of the text model.
                names.insert(shards, name.clone(), Entry { tensor, part: None })?;
            }
        }
        Ok(names)
    }

    /// GGUF's name of embedding, last norm and output.
    fn outside_layers(&self, name: &str) -> Option<String> {
        let (base, suffix) = name.rsplit_once('.')?;
        if self.heads.iter().any(|head| head == base) {
            return Some(format!("output.{suffix}"));
        }
        match base.strip_prefix(&self.prefix)? {
            "embed_tokens" => Some(format!("token_embd.{suffix}")),
            "norm" => Some(format!("output_norm.{suffix}")),
            _ => None,
        }
    }

    /// The layer of a tensor, and the name after it.
    fn layer<'a>(&self, name: &'a str) -> Option<(usize, &'a str)> {
        let (layer, part) = name.strip_prefix(&self.prefix)?.strip_prefix("layers.")?.split_once('.')?;
        Some((layer.parse().ok()?, part))
    }

    /// GGUF's name of a part of a layer.
    fn part(&self, part: &str) -> Option<String> {
        if CORRECTION.contains(&part) {
            return Some(CORRECTION_GGUF.to_owned());
        }
        let (base, suffix) = part.rsplit_once('.')?;
        self.rows().find_map(|(hf, gguf)| Some(format!("{}.{suffix}", gguf.replace("{}", number(hf, base)?))))
    }

    fn rows(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        LAYER.iter().copied().chain([(MIDDLE_NORM, self.middle_norm)])
    }

    /// Splits a tensor of all experts into theirs. Rows are output features, or columns are, as transformers 4 had it
    /// in some families.
    fn insert_experts(
        &mut self,
        shards: &Shards,
        config: &Config,
        layer: usize,
        part: &str,
        tensor: usize,
    ) -> Result<(), Error> {
        let Some(moe) = &config.moe else { return Ok(()) };
        let (n, width, dim) = (moe.n_experts, moe.ffn_dim, config.dim);
        let matrix = |part: &str| if part == FUSED_DOWN { [dim, width] } else { [2 * width, dim] };
        let shape = |part: &str, name: &str| match shards.tensors.get(name)?.info.shape[..] {
            [experts, a, b] if experts == n => {
                let [rows, cols] = matrix(part);
                Some(([a, b] == [rows, cols], [a, b] == [cols, rows]))
            }
            _ => None,
        };
        let (name, located) =
            &shards.tensors[tensor..tensor + 1].get_index(0).expect("the tensor is one of the files'");
        let other = if part == FUSED_DOWN { FUSED_GATE_UP } else { FUSED_DOWN };
        let sibling = || shape(other, &name.replace(part, other));
        let transposed = match shape(part, name) {
            Some((true, false)) => false,
            Some((false, true)) => true,
            // A square says nothing, and then the other tensor is none.
            Some((true, true)) => sibling().is_some_and(|(_, transposed)| transposed),
            _ => {
                let ([rows, cols], found) = (matrix(part), &located.info.shape);
                let what = format!("expected shape [{n}, {rows}, {cols}] or [{n}, {cols}, {rows}], found {found:?}");
                return Err(Error::tensor(&shards.files[located.shard].path, name, what));
            }
        };
        for expert in 0..n {
            let mut insert = |name: &str, start, rows, cols| {
                let part = ExpertPart { expert, start, rows, cols, transposed };
                self.insert(shards, format!("blk.{layer}.{name}.{expert}.weight"), Entry { tensor, part: Some(part) })
            };
            if part == FUSED_DOWN {
                insert("ffn_down", 0, dim, width)?;
            } else {
                insert("ffn_gate", 0, width, dim)?;
                insert("ffn_up", width, width, dim)?;
            }
        }
        Ok(())
    }

    fn insert(&mut self, shards: &Shards, name: String, entry: Entry) -> Result<(), Error> {
        let stored = |entry: &Entry| shards.tensors.get_index(entry.tensor);
        if let Some(first) = self.entries.get(&name)
            && let (Some((first, _)), Some((second, located))) = (stored(first), stored(&entry))
        {
            let what = format!("it takes the same place as \"{}\"", escape(first));
            return Err(Error::tensor(&shards.files[located.shard].path, second, what));
        }
        self.entries.insert(name, entry);
        Ok(())
    }

    /// The names that a tensor would have in the files.
    pub fn tried(&self, gguf: &str) -> Vec<String> {
        let Some((base, suffix)) = gguf.rsplit_once('.') else { return Vec::new() };
        let prefix = &self.prefix;
        match base {
            "token_embd" => return vec![format!("{prefix}embed_tokens.{suffix}")],
            "output_norm" => return vec![format!("{prefix}norm.{suffix}")],
            "output" => return self.heads.iter().map(|head| format!("{head}.{suffix}")).collect(),
            _ => {}
        }
        let Some((layer, part)) = gguf.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else {
            return Vec::new();
        };
        let mut parts: Vec<String> = match part {
            CORRECTION_GGUF => CORRECTION.iter().map(|&part| part.to_owned()).collect(),
            _ => self.parts(part.rsplit_once('.').map_or(part, |(base, _)| base), suffix),
        };
        parts.iter_mut().for_each(|part| *part = format!("{prefix}layers.{layer}.{part}"));
        parts
    }

    /// The names of one of GGUF's parts of a layer.
    fn parts(&self, base: &str, suffix: &str) -> Vec<String> {
        // Merged experts were looked for where the first one of its own is missing.
        let merged = base.strip_suffix("_exps").map(|part| format!("{part}.0"));
        let base = merged.as_deref().unwrap_or(base);
        let own = self.rows().filter_map(|(hf, gguf)| Some(hf.replace("{}", number(gguf, base)?)));
        let mut parts: Vec<String> = own.map(|hf| format!("{hf}.{suffix}")).collect();
        match base.split('.').collect::<Vec<_>>()[..] {
            ["attn_q" | "attn_k" | "attn_v"] => parts.push(format!("self_attn.qkv_proj.{suffix}")),
            ["ffn_gate"] => parts.push(format!("mlp.gate_up_proj.{suffix}")),
            ["ffn_gate" | "ffn_up", _] => parts.push(FUSED_GATE_UP.to_owned()),
            ["ffn_down", _] => parts.push(FUSED_DOWN.to_owned()),
            _ => {}
        }
        parts
    }
}

/// The number that stands for `{}` where `name` fits `pattern`; nothing where there is no `{}`.
fn number<'a>(pattern: &str, name: &'a str) -> Option<&'a str> {
    match pattern.split_once("{}") {
        None => (pattern == name).then_some(""),
        Some((before, after)) => {
            let number = name.strip_prefix(before)?.strip_suffix(after)?;
            (!number.is_empty() && number.bytes().all(|b| b.is_ascii_digit())).then_some(number)
        }
    }
}

fn is_harmless(name: &str) -> bool {
    name.rsplit('.').next().is_some_and(|last| HARMLESS.contains(&last))
}

/// The scales of an FP8 tensor: their number among the tensors of the files.
pub fn scales(shards: &Shards, name: &str) -> Option<usize> {
    SCALES.iter().find_map(|end| shards.tensors.get_index_of(&format!("{name}{end}")))
}

/// Whether a tensor has the scales of another one.
fn is_scale(shards: &Shards, name: &str) -> bool {
    let of = SCALES.iter().find_map(|end| name.strip_suffix(end));
    of.and_then(|of| shards.tensors.get(of)).is_some_and(|located| located.info.ty.name == FP8)
}

/// `lm_head` at each level of a prefix.
fn heads(prefix: &str) -> Vec<String> {
    let levels = std::iter::once(0).chain(prefix.match_indices('.').map(|(i, _)| i + 1));
    levels.map(|end| format!("{}lm_head", &prefix[..end])).collect()
}

/// What the text model's names begin with.
fn prefix(shards: &Shards) -> String {
    const EMBEDDING: &str = "embed_tokens.weight";
    let begins = |name: &str, prefix: &str| {
        name.strip_prefix(prefix).is_some_and(|own| own.starts_with("layers.") || own == EMBEDDING)
    };
    let known = PREFIXES.iter().find(|prefix| shards.tensors.keys().any(|name| begins(name, prefix)));
    let found = shards.tensors.keys().find_map(|name| name.strip_suffix(EMBEDDING));
    known.copied().or(found).unwrap_or(PREFIXES[0]).to_owned()
}
