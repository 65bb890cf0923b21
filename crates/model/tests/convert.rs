//! A folder as a GGUF file is the same model: the same metadata as llama.cpp's converter gives it, the same bytes, the
//! same logits. What GGUF cannot say is refused.

#![allow(clippy::unwrap_used)]

mod gguf_builder;
mod hf_maker;

use hf_maker::twin::{Twin, twins};
use hf_maker::{DIM, EXPERT_FFN, EXPERTS, HEAD_DIM, KV_HEADS, LAYERS, Numbers, Small, Tensor, assert_same};
use hf_maker::{HEADS, load, logits, tokens};
use puna_kernels::{DType, Pool, quantize};
use puna_model::convert::{Plan, Target, Written};
use puna_model::gguf::{Gguf, TensorType, Value};
use puna_model::{Error, LoadOptions, Model, Source};
use serde_json::json;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A converted model.
struct Converted {
    folder: TempDir,
    written: Written,
    notices: Vec<String>,
}

impl Converted {
    fn path(&self) -> PathBuf {
        self.folder.path().join("model.gguf")
    }

    fn gguf(&self) -> Gguf {
        let gguf = Gguf::open(self.path()).unwrap();
        gguf.check().unwrap();
        gguf
    }

    fn logits(&self, tokens: &[u32]) -> Vec<f32> {
        let options = LoadOptions { threads: 1, ..LoadOptions::default() };
        logits(&mut Model::load(&self.gguf(), &options, &mut |_, _| {}).unwrap(), tokens)
    }
}

fn convert(path: &Path, target: Target) -> Result<Converted, Error> {
    let source = Source::open(path)?;
    let folder = tempfile::tempdir().unwrap();
    let plan = Plan::new(&source, folder.path().join("model.gguf"), target, true)?;
    let notices = plan.notices().to_vec();
    let (mut seen, mut total) = (0, 0);
    let written = plan.write(false, &Pool::new(3), &mut |done, all| {
        assert!(done > seen && done <= all);
        (seen, total) = (done, all);
        ControlFlow::Continue(())
    })?;
    assert_eq!(seen, total);
    Ok(Converted { folder, written, notices })
}

/// The bits of the logits are those of the folder.
#[track_caller]
fn assert_same_model(small: &Small, what: &str) {
    let made = small.made();
    let converted = convert(&made.path(), Target::Keep).unwrap_or_else(|e| panic!("{what}: {e}"));
    let tokens = tokens(40);
    let expected = logits(&mut load(&made.path()).unwrap(), &tokens);
    assert_same(&converted.logits(&tokens), &expected, what);
}

/// The words of what keeps it from being converted.
#[track_caller]
fn refusal(small: &Small) -> String {
    match convert(&small.made().path(), Target::Keep) {
        Ok(_) => panic!("it is converted"),
        Err(e) => e.to_string(),
    }
}

fn close(a: Value, b: Value) -> bool {
    match (a, b) {
        (Value::F32(a), Value::F32(b)) => (a - b).abs() <= 1e-6 * a.abs(),
        _ => a == b,
    }
}

#[test]
fn files_are_those_of_the_other_converter() {
    for Twin { path, source, made, .. } in twins() {
        let (theirs, ours) = (source.gguf().unwrap(), convert(&made.path(), Target::Keep).unwrap().gguf());
        let what = path.display();
        for (key, value) in theirs.meta().iter() {
            // The tokenizer and the name are added by those who know them.
            if !key.starts_with("tokenizer.") && key != "general.name" {
                let own = ours.meta().value(key).unwrap_or_else(|| panic!("{what}: no {key}"));
                assert!(close(own, value), "{what}: {key}: {own} expected {value}");
            }
        }
        assert_eq!(ours.tensors().len(), theirs.tensors().len(), "{what}");
        for info in theirs.tensors() {
            let own = ours.tensor(&info.name).unwrap();
            assert_eq!((&own.shape, own.ty), (&info.shape, info.ty), "{what}: {}", info.name);
            let (own, their) = (ours.data(own).unwrap(), theirs.data(info).unwrap());
            if &*info.name == "rope_freqs.weight" {
                let numbers =
                    |bytes: &[u8]| bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<_>>();
                for (own, their) in numbers(&own).into_iter().zip(numbers(&their)) {
                    assert!((own - their).abs() <= 1e-6 * their, "{what}: {own} expected {their}");
                }
            } else {
                assert_eq!(own, their, "{what}: {}", info.name);
            }
        }
    }
}

#[test]
fn what_makes_a_family_different_survives() {
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, "beta_fast": 16.0,
        "original_max_position_embeddings": 16, "rope_theta": 5000.0});
    let linear = json!({"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0});
    for (what, small) in [
        ("llama", Small::dense("llama")),
        ("linear", Small::dense("llama").with("rope_parameters", linear)),
        ("yarn", Small::dense("llama").with("rope_parameters", yarn)),
        ("window", Small::dense("mistral").with("sliding_window", json!(7))),
        ("tied", Small::dense("llama").with("tie_word_embeddings", json!(true)).without_tensors("lm_head")),
        ("mixture", Small::mixture()),
        ("not normalized", Small::mixture().with("norm_topk_prob", json!(false))),
        (
            "granite",
            Small::dense("granite")
                .with("embedding_multiplier", json!(3.0))
                .with("residual_multiplier", json!(0.5))
                .with("attention_multiplier", json!(0.25))
                .with("logits_scaling", json!(4.0)),
        ),
        ("smollm3", Small::dense("smollm3")),
    ] {
        assert_same_model(&small, what);
    }
}

#[test]
fn some_layers_with_a_window_and_biases() {
    let mut small = Small::dense("qwen2")
        .with("use_sliding_window", json!(true))
        .with("sliding_window", json!(5))
        .with("max_window_layers", json!(1));
    let mut numbers = Numbers(3);
    for l in 0..LAYERS {
        for (name, width) in [("q", HEADS * HEAD_DIM), ("k", KV_HEADS * HEAD_DIM), ("v", KV_HEADS * HEAD_DIM)] {
            let bias = numbers.take(width, 0.5);
            small.tensors.push(Tensor::f32(format!("model.layers.{l}.self_attn.{name}_proj.bias"), &[width], &bias));
        }
    }
    assert_same_model(&small, "qwen2");
    // The same in the order of pairs.
    let small = Small { config: Small::keys("llama"), ..small }.with("attention_bias", json!(true));
    let mut small = small;
    for l in 0..LAYERS {
        let bias = numbers.take(DIM, 0.5);
        small.tensors.push(Tensor::f32(format!("model.layers.{l}.self_attn.o_proj.bias"), &[DIM], &bias));
    }
    assert_same_model(&small, "llama with biases");
}

#[test]
fn rows_that_are_made() {
    // Experts whose rows are stored as columns, all in one tensor.
    let mut small = Small::mixture().without_tensors(".experts.");
    let mut numbers = Numbers(5);
    for l in 0..LAYERS {
        let mut experts = |name: &str, shape: [usize; 3]| {
            let values = numbers.take(shape.iter().product(), 0.4);
            small.tensors.push(Tensor::f32(format!("model.layers.{l}.mlp.experts.{name}"), &shape, &values));
        };
        experts("gate_up_proj", [EXPERTS, DIM, 2 * EXPERT_FFN]);
        experts("down_proj", [EXPERTS, EXPERT_FFN, DIM]);
    }
    assert_same_model(&small, "transposed experts");
    // FP8 with a scale for each block, the last ones cropped.
    let mut small = Small::dense("llama")
        .with("quantization_config", json!({"quant_method": "fp8", "weight_block_size": [16, 16]}));
    for i in 0..small.tensors.len() {
        if !small.tensors[i].name.ends_with("_proj.weight") {
            continue;
        }
        let Tensor { name, shape, .. } = small.tensors[i].clone();
        let bytes = (0..shape[0] * shape[1]).map(|_| numbers.bits() as u8 & 0xbf).collect();
        small.tensors[i] = Tensor::new(&name, "F8_E4M3", &shape, bytes);
        let blocks = [shape[0].div_ceil(16), shape[1].div_ceil(16)];
        let scales: Vec<f32> = numbers.take(blocks[0] * blocks[1], 0.1).iter().map(|x| x + 0.3).collect();
        small.tensors.push(Tensor::f32(format!("{name}_scale_inv"), &blocks, &scales));
    }
    assert_same_model(&small, "FP8");
    let converted = convert(&small.made().path(), Target::Keep).unwrap();
    assert!(converted.notices[0].contains("FP8"), "{:?}", converted.notices);
    assert_eq!(converted.gguf().tensor("blk.0.attn_q.weight").unwrap().ty, TensorType::Weight(DType::F32));
}

#[test]
fn what_gguf_cannot_say_is_refused() {
    let gelu = Small::dense("llama").with("hidden_act", json!("gelu"));
    assert!(refusal(&gelu).contains("GGUF cannot say of a model of architecture llama that its activation is Gelu"));
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "truncate": false,
        "original_max_position_embeddings": 16, "rope_theta": 5000.0});
    assert!(refusal(&Small::dense("llama").with("rope_parameters", yarn)).contains("truncate"));
    let layers = Small::dense("smollm3").with("no_rope_layers", json!([0, 1]));
    assert!(refusal(&layers).contains("layers [0] do not rotate"), "{}", refusal(&layers));
    assert!(refusal(&Small::dense("llama").without_tensors("layers.1.mlp.up")).contains("layers.1.mlp.up_proj.weight"));
    let headless = Small::dense("llama").without_tensors("lm_head");
    assert!(refusal(&headless).contains("lm_head.weight"), "{}", refusal(&headless));
    let made = headless.made();
    let source = Source::open(made.path()).unwrap();
    let plan = Plan::new(&source, "x.gguf", Target::Keep, false).unwrap();
    assert!(plan.notices()[0].contains("no output projection"), "{:?}", plan.notices());
    let made = Small::dense("llama").made();
    let error = convert(&made.path(), Target::Format(DType::IQ1_S)).err().unwrap();
    assert_eq!(error, Error::Quantize { dtype: DType::IQ1_S });
}

/// Types of a converted model, by tensor.
fn types(gguf: &Gguf) -> Vec<(String, DType)> {
    let ty = |ty| if let TensorType::Weight(dtype) = ty { dtype } else { panic!("{ty} is no weight") };
    gguf.tensors().map(|info| (info.name.to_string(), ty(info.ty))).collect()
}

#[test]
fn types_of_tensors() {
    for Twin { path, source, config, made } in twins() {
        for (target, file_type, head) in
            [(DType::F16, 1u32, DType::F16), (DType::Q8_0, 7, DType::Q8_0), (DType::Q4_0, 2, DType::Q8_0)]
        {
            let from_folder = convert(&made.path(), Target::Format(target)).unwrap();
            let from_file = convert(&path, Target::Format(target)).unwrap();
            let (gguf, again, float) = (from_folder.gguf(), from_file.gguf(), source.gguf().unwrap());
            assert_eq!(gguf.meta().require::<u32>("general.file_type").unwrap(), file_type);
            let tied = float.find("output.weight").is_none();
            for (name, dtype) in types(&gguf) {
                let is_head = name == "output.weight" || tied && name == "token_embd.weight";
                let info = float.tensor(&name).unwrap();
                let expected = match &*name {
                    _ if info.shape.len() < 2 || name.contains("ffn_gate_inp") => DType::F32,
                    _ if is_head => head,
                    _ => target,
                };
                assert_eq!(dtype, expected, "{name} of {} to {target:?}", path.display());
                let (_, stored) = float.weight(info).unwrap();
                let values: Vec<f32> = stored.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
                let mut blocks = vec![0; dtype.row_bytes(values.len()).unwrap()];
                quantize(dtype, &values, &mut blocks);
                for file in [&gguf, &again] {
                    let data = file.data(file.tensor(&name).unwrap()).unwrap();
                    assert!(name == "rope_freqs.weight" || data == blocks, "{name} of {}", path.display());
                }
            }
            let n: usize = from_folder.written.types.iter().map(|(_, n, _)| n).sum();
            assert_eq!(n, gguf.tensors().len());
            assert!(from_folder.notices.is_empty(), "{:?} of {}", from_folder.notices, config.arch);
        }
    }
}

#[test]
fn rows_that_are_not_whole_blocks_are_named() {
    let made = Small::dense("llama").made();
    let converted = convert(&made.path(), Target::Format(DType::Q4_K)).unwrap();
    let all: Vec<DType> = types(&converted.gguf()).into_iter().map(|(_, dtype)| dtype).collect();
    assert!(all.iter().all(|dtype| [DType::F16, DType::F32, DType::Q8_0].contains(dtype)), "{all:?}");
    assert!(converted.notices[0].starts_with("F16 for rows of 24, which are not whole blocks of Q4_K (256): "));
    assert!(
        converted.notices[0].ends_with("token_embd, attn_q, attn_k, attn_v, ffn_gate, ffn_up"),
        "{:?}",
        converted.notices
    );
}

#[test]
fn numbers_that_a_type_does_not_have_are_refused() {
    let mut small = Small::dense("llama");
    let i = small.tensors.iter().position(|t| t.name.ends_with("0.mlp.up_proj.weight")).unwrap();
    let mut with = |x: f32, target: DType| {
        let at = small.tensors[i].bytes.len() - 4;
        small.tensors[i].bytes[at..].copy_from_slice(&x.to_le_bytes());
        convert(&small.made().path(), Target::Format(target)).err().map(|e| e.to_string())
    };
    let error = with(70_000.0, DType::F16).unwrap();
    assert!(error.contains("model.layers.0.mlp.up_proj.weight") && error.contains("bf16"), "{error}");
    assert_eq!(with(70_000.0, DType::BF16), None);
    assert_eq!(with(f32::INFINITY, DType::F16), None);
}

#[test]
fn metadata_and_weights_of_files_are_copied() {
    for Twin { path, source, .. } in twins() {
        let (theirs, ours) = (source.gguf().unwrap(), convert(&path, Target::Keep).unwrap().gguf());
        assert!(ours.meta().iter().eq(theirs.meta().iter()));
        assert_eq!(ours.tensors().len(), theirs.tensors().len());
        for (own, their) in ours.tensors().zip(theirs.tensors()) {
            assert_eq!((&own.name, &own.shape, own.ty), (&their.name, &their.shape, their.ty));
            assert_eq!(ours.data(own).unwrap(), theirs.data(their).unwrap());
        }
    }
}

#[test]
fn parts_of_a_split_model_become_one_file() {
    use gguf_builder::{Builder, string, u16};
    let folder = tempfile::tempdir().unwrap();
    let part = |no: u16, tensor: &str| {
        let keys = Builder::new().key("split.no", u16(no)).key("split.count", u16(2));
        keys.key("general.architecture", string("other")).f32(tensor, &[2, 8])
    };
    for (no, tensor) in [(0, "a.weight"), (1, "b.weight")] {
        let name = format!("m-{:05}-of-00002.gguf", no + 1);
        std::fs::write(folder.path().join(name), part(no, tensor).bytes()).unwrap();
    }
    let any = folder.path().join("m-00002-of-00002.gguf");
    let ours = convert(&any, Target::Keep).unwrap().gguf();
    let keys: Vec<&str> = ours.meta().iter().map(|(key, _)| key).collect();
    assert_eq!(keys, ["general.architecture"]);
    let theirs = Gguf::open(&any).unwrap();
    for info in theirs.tensors() {
        assert_eq!(ours.data(ours.tensor(&info.name).unwrap()).unwrap(), theirs.data(info).unwrap());
    }
    // Which of its tensors are weights is not known.
    let error = convert(&any, Target::Format(DType::F16)).err().unwrap().to_string();
    assert!(error.contains("architecture 'other' are only copied"), "{error}");
    std::fs::remove_file(folder.path().join("m-00001-of-00002.gguf")).unwrap();
    assert!(matches!(convert(&any, Target::Keep).err().unwrap(), Error::Split { .. }));
}

#[test]
fn who_stops_gets_no_file() {
    let made = Small::dense("llama").made();
    let source = Source::open(made.path()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model.gguf");
    let plan = Plan::new(&source, &out, Target::Keep, true).unwrap();
    let error = plan.write(false, &Pool::new(1), &mut |_, _| ControlFlow::Break(())).unwrap_err();
    assert_eq!(error, Error::Stopped { path: out });
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
