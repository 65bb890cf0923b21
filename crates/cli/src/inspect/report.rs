//! What is known about a model, whatever kind of file it is in. `--json` writes these types as they are, so the names
//! of their fields are an interface.

use serde::{Serialize, Serializer};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Everything that is known about a model.
#[derive(Serialize)]
pub struct Report {
    /// The files it is in.
    pub files: Vec<File>,
    /// What people ask first.
    pub summary: Summary,
    /// Whether puna runs it.
    pub runs: bool,
    /// Why not.
    pub reasons: Vec<String>,
    /// What the file asks for and puna does not do, without harm to the answer.
    pub notices: Vec<String>,
    /// Metadata in the order of the file.
    #[serde(serialize_with = "as_map")]
    pub metadata: Vec<Entry>,
    /// Tensors in the order of the files.
    pub tensors: Vec<Tensor>,
}

/// A file.
#[derive(Serialize)]
pub struct File {
    /// Where it is.
    #[serde(serialize_with = "lossy")]
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// Its format and version.
    pub format: String,
}

/// A metadata key.
pub struct Entry {
    /// Its name.
    pub key: String,
    /// Its value; of a long or nested array, type and length.
    pub value: serde_json::Value,
    /// Its value on one short line, escaped.
    pub shown: String,
}

/// A tensor.
#[derive(Serialize)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    #[serde(rename = "type")]
    pub ty: &'static str,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// Its size in the file.
    pub bytes: u64,
    /// Which file it is in, counted from 0.
    pub file: usize,
    /// Where its bytes begin in that file.
    pub offset: u64,
}

/// What people ask first. What neither the file nor puna knows is `None`.
#[derive(Serialize)]
pub struct Summary {
    /// The architecture, as the file names it.
    pub architecture: Option<String>,
    /// The model's own name.
    pub name: Option<String>,
    /// Weights that were trained: all tensors but rotary tables and the like.
    pub parameters: u64,
    /// Those that take part in computing a token: of a mixture of experts, only the experts used.
    pub active_parameters: u64,
    /// Sizes.
    #[serde(flatten)]
    pub shape: Shape,
    /// Rotation of queries and keys.
    pub rope: Option<Rope>,
    /// Sliding windows; empty where every layer sees all positions.
    pub windows: Vec<Window>,
    /// Mixture of experts.
    pub experts: Option<Experts>,
    /// Constants that most models do not have.
    pub scales: BTreeMap<&'static str, f32>,
    /// Types of the tensors, the one with most bytes first.
    pub types: Vec<TypeShare>,
    /// Bits a weight, over all tensors.
    pub bits_per_weight: Option<f64>,
    /// The vocabulary.
    pub tokenizer: Option<Tokenizer>,
    /// What running it takes.
    pub memory: Memory,
}

/// The sizes of a model.
#[derive(Serialize, Default)]
pub struct Shape {
    /// Width of the residual.
    pub dim: Option<usize>,
    /// Layers.
    pub n_layers: Option<usize>,
    /// Query heads.
    pub n_heads: Option<usize>,
    /// Key and value heads.
    pub n_kv_heads: Option<usize>,
    /// Dimensions of a head.
    pub head_dim: Option<usize>,
    /// Width of a dense feed-forward layer.
    pub ffn_dim: Option<usize>,
    /// Tokens.
    pub vocab_size: Option<usize>,
    /// Positions the model was trained for.
    pub context_length: Option<usize>,
}

/// Rotation of queries and keys.
#[derive(Serialize)]
pub struct Rope {
    /// The kind of scaling.
    pub kind: String,
    /// How many times longer scaling makes the context.
    pub factor: Option<f32>,
    /// The base of the frequencies.
    pub theta: Option<f32>,
    /// Dimensions of a head that rotate.
    pub width: Option<usize>,
    /// Layers that do not rotate.
    pub without: Vec<usize>,
}

/// A sliding window.
#[derive(Serialize)]
pub struct Window {
    /// Positions a layer sees, itself included.
    pub positions: usize,
    /// Layers that have it; `None` where puna cannot tell.
    pub layers: Option<Vec<usize>>,
}

/// A mixture of experts.
#[derive(Serialize)]
pub struct Experts {
    /// Experts of a layer.
    pub n_experts: usize,
    /// Experts of a token.
    pub used: Option<usize>,
    /// Width of an expert.
    pub ffn_dim: Option<usize>,
    /// Width of the expert that every token has.
    pub shared_ffn_dim: Option<usize>,
    /// How router logits become scores.
    pub routing: Option<&'static str>,
    /// Whether the weights of the chosen are divided by their sum.
    pub normalize: Option<bool>,
    /// What multiplies the weights of the chosen.
    pub scale: Option<f32>,
}

/// What one type contributes.
#[derive(Serialize)]
pub struct TypeShare {
    /// Its name.
    #[serde(rename = "type")]
    pub ty: &'static str,
    /// Tensors of it.
    pub tensors: usize,
    /// Elements of them.
    pub elements: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Bits an element.
    pub bits_per_weight: f64,
}

/// A vocabulary.
#[derive(Serialize)]
pub struct Tokenizer {
    /// The kind of tokenizer.
    pub model: Option<String>,
    /// How text is split before merging.
    pub pre: Option<String>,
    /// Number of tokens.
    pub tokens: Option<usize>,
    /// Tokens with a role.
    pub special: Vec<Special>,
    /// Whether a prompt begins with the bos token; `None` where the file does not say.
    pub add_bos: Option<bool>,
    /// Whether a prompt ends with the eos token.
    pub add_eos: Option<bool>,
    /// Whether there is a chat template.
    pub chat_template: bool,
}

/// A token with a role.
#[derive(Serialize)]
pub struct Special {
    /// The role: `bos`, `eos` ..
    pub role: String,
    /// Its id.
    pub id: u64,
    /// Its text; `None` where the vocabulary has no such token.
    pub text: Option<String>,
}

/// What running a model takes.
#[derive(Serialize)]
pub struct Memory {
    /// Positions of the one sequence.
    pub ctx: u64,
    /// How keys and values are kept.
    pub kv: &'static str,
    /// Bytes of keys and values of the sequence while it generates at its full length.
    pub kv_bytes: Option<u64>,
    /// Bytes of all tensors.
    pub weight_bytes: u64,
    /// The sum.
    pub total_bytes: Option<u64>,
}

fn as_map<S: Serializer>(entries: &[Entry], s: S) -> Result<S::Ok, S::Error> {
    s.collect_map(entries.iter().map(|e| (&e.key, &e.value)))
}

fn lossy<S: Serializer>(path: &Path, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(&path.to_string_lossy())
}
