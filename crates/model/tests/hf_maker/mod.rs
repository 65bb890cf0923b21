//! Folders for tests: tensors, written as safetensors byte by byte, and a config.json.
#![allow(dead_code, clippy::unwrap_used)]

pub mod twin;

use puna_model::hf::Folder;
use puna_model::{Batch, Error, LoadOptions, Model, Outputs};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A tensor of a folder.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Tensor {
    pub fn new(name: impl Into<String>, dtype: &'static str, shape: &[usize], bytes: Vec<u8>) -> Tensor {
        Tensor { name: name.into(), dtype, shape: shape.to_vec(), bytes }
    }

    pub fn f32(name: impl Into<String>, shape: &[usize], values: &[f32]) -> Tensor {
        assert_eq!(shape.iter().product::<usize>(), values.len());
        Tensor::new(name, "F32", shape, values.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    pub fn values(&self) -> Vec<f32> {
        assert_eq!(self.dtype, "F32");
        self.bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }
}

/// The bytes of a safetensors file.
pub fn safetensors(tensors: &[Tensor]) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    for t in tensors {
        let start = data.len();
        data.extend(&t.bytes);
        let info = json!({"dtype": t.dtype, "shape": t.shape, "data_offsets": [start, data.len()]});
        header.insert(t.name.clone(), info);
    }
    container(&Value::Object(header).to_string(), &data)
}

/// The bytes of a file with any header.
pub fn container(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// A folder that is removed with it.
pub struct Made {
    pub dir: TempDir,
}

impl Made {
    pub fn new(config: &Value, tensors: &[Tensor]) -> Made {
        let made = Made { dir: tempfile::tempdir().unwrap() };
        made.write("config.json", config.to_string());
        made.write("model.safetensors", safetensors(tensors));
        made
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        fs::write(self.path().join(name), bytes).unwrap();
    }

    pub fn remove(&self, name: &str) {
        fs::remove_file(self.path().join(name)).unwrap();
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().to_owned()
    }

    pub fn folder(&self) -> Folder {
        Folder::open(self.dir.path()).unwrap()
    }

    /// The words of what keeps it from being loaded.
    #[track_caller]
    pub fn refusal(&self) -> String {
        match load(self.dir.path()) {
            Err(e) => e.to_string(),
            Ok(_) => panic!("it loads"),
        }
    }

    #[track_caller]
    pub fn logits(&self, tokens: &[u32]) -> Vec<f32> {
        let mut model = load(self.dir.path()).unwrap_or_else(|e| panic!("{e}"));
        let logits = logits(&mut model, tokens);
        if model.config().moe.is_some() {
            assert_same(&self.streamed(tokens), &logits, "with two experts in memory");
        }
        logits
    }

    /// The same where a mixture has as little memory for its experts as there can be.
    fn streamed(&self, tokens: &[u32]) -> Vec<f32> {
        let load = |bytes| {
            let options = LoadOptions { threads: 1, expert_memory: Some(bytes), ..LoadOptions::default() };
            Model::load(&self.folder(), &options, &mut |_, _| {})
        };
        let Err(Error::ExpertMemory { needed, .. }) = load(1) else { panic!("one byte holds no experts") };
        let mut model = load(needed).unwrap_or_else(|e| panic!("{e}"));
        let logits = logits(&mut model, tokens);
        let stats = model.expert_stats().unwrap();
        assert!(stats.slots == 2 && stats.evictions > 0, "{stats:?}");
        logits
    }
}

pub fn load(path: &Path) -> Result<Model, Error> {
    let options = LoadOptions { threads: 1, ..LoadOptions::default() };
    Model::load(&Folder::open(path)?, &options, &mut |_, _| {})
}

/// Logits of every position.
pub fn logits(model: &mut Model, tokens: &[u32]) -> Vec<f32> {
    let mut kv = model.kv_cache(puna_kernels::KvType::F32);
    let (seq, mut batch) = (kv.add(), Batch::default());
    batch.push(seq, 0, tokens, Outputs::All);
    model.forward(&batch, &mut kv).unwrap().to_vec()
}

/// Fails unless both are the same bits, and finite.
#[track_caller]
pub fn assert_same(got: &[f32], expected: &[f32], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        assert!(e.is_finite() && g.to_bits() == e.to_bits(), "{what}: number {i}: {g} expected {e}");
    }
}

/// A fixed sequence of numbers around 0 of about `scale`.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z ^ (z >> 29)
    }

    pub fn take(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| (((self.bits() >> 40) as f32) / (1u32 << 23) as f32 - 1.0) * scale).collect()
    }
}

/// A small model: its configuration and tensors.
#[derive(Clone)]
pub struct Small {
    pub config: Value,
    pub tensors: Vec<Tensor>,
}

pub const DIM: usize = 24;
pub const HEADS: usize = 4;
pub const KV_HEADS: usize = 2;
pub const HEAD_DIM: usize = 8;
pub const FFN: usize = 40;
pub const VOCAB: usize = 50;
pub const LAYERS: usize = 2;
pub const EXPERTS: usize = 3;
pub const EXPERT_FFN: usize = 20;

/// Random token ids.
pub fn tokens(n: usize) -> Vec<u32> {
    let mut numbers = Numbers(7);
    (0..n).map(|_| (numbers.bits() % VOCAB as u64) as u32).collect()
}

impl Small {
    /// Keys that every family has.
    pub fn keys(model_type: &str) -> Value {
        json!({
            "model_type": model_type, "hidden_size": DIM, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": VOCAB,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": false
        })
    }

    fn base(model_type: &str, mut layer: impl FnMut(usize, &mut Maker)) -> Small {
        let mut m = Maker { numbers: Numbers(1), tensors: Vec::new() };
        m.matrix("model.embed_tokens.weight", VOCAB, DIM);
        for l in 0..LAYERS {
            m.norm(&format!("model.layers.{l}.input_layernorm.weight"), DIM);
            m.norm(&format!("model.layers.{l}.post_attention_layernorm.weight"), DIM);
            let q = HEADS * HEAD_DIM;
            for (name, rows, cols) in
                [("q", q, DIM), ("k", KV_HEADS * HEAD_DIM, DIM), ("v", KV_HEADS * HEAD_DIM, DIM), ("o", DIM, q)]
            {
                m.matrix(&format!("model.layers.{l}.self_attn.{name}_proj.weight"), rows, cols);
            }
            layer(l, &mut m);
        }
        m.norm("model.norm.weight", DIM);
        m.matrix("lm_head.weight", VOCAB, DIM);
        Small { config: Small::keys(model_type), tensors: m.tensors }
    }

    /// `llama`, or a family with the same tensors.
    pub fn dense(model_type: &str) -> Small {
        Small::base(model_type, |l, m| {
            for (name, rows, cols) in [("gate", FFN, DIM), ("up", FFN, DIM), ("down", DIM, FFN)] {
                m.matrix(&format!("model.layers.{l}.mlp.{name}_proj.weight"), rows, cols);
            }
        })
    }

    /// `qwen3_moe`: heads with norms, a tensor for each part of each expert.
    pub fn mixture() -> Small {
        let mut small = Small::base("qwen3_moe", |l, m| {
            for name in ["q", "k"] {
                m.norm(&format!("model.layers.{l}.self_attn.{name}_norm.weight"), HEAD_DIM);
            }
            m.matrix(&format!("model.layers.{l}.mlp.gate.weight"), EXPERTS, DIM);
            for e in 0..EXPERTS {
                for (name, rows, cols) in
                    [("gate", EXPERT_FFN, DIM), ("up", EXPERT_FFN, DIM), ("down", DIM, EXPERT_FFN)]
                {
                    m.matrix(&format!("model.layers.{l}.mlp.experts.{e}.{name}_proj.weight"), rows, cols);
                }
            }
        });
        for (key, value) in [
            ("num_experts", json!(EXPERTS)),
            ("num_experts_per_tok", json!(2)),
            ("moe_intermediate_size", json!(EXPERT_FFN)),
            ("norm_topk_prob", json!(true)),
        ] {
            small.config[key] = value;
        }
        small
    }

    pub fn made(&self) -> Made {
        Made::new(&self.config, &self.tensors)
    }

    /// With another value of a key; null is null.
    pub fn with(mut self, key: &str, value: Value) -> Small {
        self.config[key] = value;
        self
    }

    /// Without a key.
    pub fn without(mut self, key: &str) -> Small {
        self.config.as_object_mut().unwrap().remove(key);
        self
    }

    /// Without the tensors whose names contain `part`.
    pub fn without_tensors(mut self, part: &str) -> Small {
        let before = self.tensors.len();
        self.tensors.retain(|t| !t.name.contains(part));
        assert!(self.tensors.len() < before, "no tensor {part}");
        self
    }

    pub fn tensor(&self, name: &str) -> &Tensor {
        self.tensors.iter().find(|t| t.name == name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    /// With every tensor's name replaced.
    pub fn renamed(mut self, name: impl Fn(&str) -> String) -> Small {
        self.tensors.iter_mut().for_each(|t| t.name = name(&t.name));
        self
    }
}

struct Maker {
    numbers: Numbers,
    tensors: Vec<Tensor>,
}

impl Maker {
    fn matrix(&mut self, name: &str, rows: usize, cols: usize) {
        let values = self.numbers.take(rows * cols, 2.0 / (cols as f32).sqrt());
        self.tensors.push(Tensor::f32(name, &[rows, cols], &values));
    }

    fn norm(&mut self, name: &str, width: usize) {
        let values: Vec<f32> = self.numbers.take(width, 0.3).iter().map(|x| 1.0 + x).collect();
        self.tensors.push(Tensor::f32(name, &[width], &values));
    }
}
