//! A model from a configuration and tensors in memory is the same as from its files; weights quantized while loading are
//! the same as weights that were quantized before.

#![allow(clippy::unwrap_used)]

mod gguf_builder;
mod support;

use puna_kernels::{Arith, DType, KvType, quantize};
use puna_model::{BackendKind, Checkpoint, Config, Error, Gguf, LoadOptions, MemoryCheckpoint, Model};
use std::num::NonZero;
use support::Fixture;
use support::Rng;
use support::maker::{ARCHS, Experts, Rope, Spec};
use support::run::{Run, plain};

/// The same model in memory, with tensors that `change` may replace.
fn in_memory(from: &dyn Checkpoint, change: impl Fn(&str, DType, Vec<u8>) -> (DType, Vec<u8>)) -> MemoryCheckpoint {
    let mut memory = MemoryCheckpoint::new(from.config().unwrap().1);
    memory.gguf_order = from.is_gguf();
    for name in from.names().iter().filter(|name| !name.starts_with("rope_f")) {
        let tensor = from.tensor(name).unwrap();
        let (dtype, bytes) = change(name, tensor.dtype, tensor.data.read().to_vec());
        memory.insert(name, dtype, &from.shape(name).unwrap(), bytes.into()).unwrap();
    }
    memory
}

/// Fails unless both are the same bits.
#[track_caller]
fn assert_same(got: &[f32], expected: &[f32], what: &str) {
    support::run::assert_same(got, expected, 1, what);
}

fn logits(from: &dyn Checkpoint, options: &LoadOptions, tokens: &[u32]) -> Vec<f32> {
    let model = Model::load(from, options, &mut |_, _| {}).unwrap();
    let kv = model.kv_cache(KvType::F32);
    Run { model, kv, total: 0 }.alone(tokens, &[tokens.len()])
}

fn specs() -> Vec<Spec> {
    let mut specs: Vec<Spec> = ARCHS.iter().map(|&arch| Spec { arch, scales: true, ..Spec::default() }).collect();
    let experts = Some(Experts { n: 5, used: 2, ffn_dim: 24, split: false, sigmoid: false });
    specs.push(Spec { experts, tied: true, biases: true, ..Spec::default() });
    specs.push(Spec {
        rope: Rope::Long(20),
        window: Some(9),
        types: vec![DType::BF16, DType::Q8_0],
        ..Spec::default()
    });
    specs
}

#[test]
fn in_memory_is_as_in_files() {
    for spec in specs() {
        let (gguf, tokens) = (spec.gguf(), Rng(5).tokens(30, spec.vocab_size));
        let memory = in_memory(&gguf, |_, dtype, bytes| (dtype, bytes));
        let expected = logits(&gguf, &plain(), &tokens);
        assert_same(&logits(&memory, &plain(), &tokens), &expected, spec.arch);
        assert_same(&logits(&memory, &LoadOptions { pack: false, ..plain() }, &tokens), &expected, spec.arch);
    }
}

/// What quantizing does, done by hand to tensors in memory.
fn quantized(name: &str, dtype: DType, bytes: Vec<u8>, cols: usize, wish: DType) -> (DType, Vec<u8>) {
    let is_projection = ["attn_q.", "attn_k.", "attn_v.", "attn_qkv", "attn_output", "ffn_gate.", "ffn_up", "ffn_down"]
        .iter()
        .chain(&["ffn_gate_exps", "ffn_gate_shexp", "output.weight"])
        .any(|part| name.contains(part) && name.ends_with("weight") && !name.contains("_inp"));
    let to = [wish, DType::Q8_0].into_iter().find(|d| d.row_bytes(cols).is_some());
    match to {
        Some(to) if is_projection && dtype.format().arith == Arith::Float => {
            let mut values = vec![0.0; bytes.len() / dtype.format().block_bytes];
            (dtype.format().dequantize)(&bytes, &mut values);
            let mut blocks = vec![0; values.len() / to.format().block_len * to.format().block_bytes];
            quantize(to, &values, &mut blocks);
            (to, blocks)
        }
        _ => (dtype, bytes),
    }
}

#[test]
fn quantized_while_loading_is_as_quantized_before() {
    let experts = Some(Experts { n: 5, used: 2, ffn_dim: 256, split: true, sigmoid: false });
    let llama = Spec { dim: 256, ffn_dim: 96, head_dim: 64, types: vec![DType::F32, DType::BF16], ..Spec::default() };
    for spec in [Spec { experts, ..llama.clone() }, Spec { arch: "phi3", tied: true, ..llama.clone() }, llama] {
        let gguf = spec.gguf();
        let tokens = Rng(5).tokens(20, spec.vocab_size);
        for wish in [DType::Q8_0, DType::Q4_0, DType::Q4_K] {
            let cols = |name: &str| *gguf.shape(name).unwrap().last().unwrap();
            let memory = in_memory(&gguf, |name, dtype, bytes| quantized(name, dtype, bytes, cols(name), wish));
            let expected = logits(&memory, &plain(), &tokens);
            for threads in [1, 3] {
                let options = LoadOptions { quantize: Some(wish), threads, ..plain() };
                assert_same(&logits(&gguf, &options, &tokens), &expected, &format!("{} {wish:?}", spec.arch));
            }
            let unpacked = LoadOptions { quantize: Some(wish), pack: false, ..plain() };
            assert_same(&logits(&gguf, &unpacked, &tokens), &expected, "unpacked");
            assert_ne!(logits(&gguf, &plain(), &tokens), expected, "{wish:?} changes something");
            let reference = LoadOptions { quantize: Some(wish), backend: BackendKind::Reference, ..plain() };
            let exact = logits(&gguf, &reference, &tokens);
            let error: f32 = exact.iter().zip(&expected).map(|(a, b)| (a - b) * (a - b)).sum();
            let norm: f32 = exact.iter().map(|a| a * a).sum();
            assert!((error / norm).sqrt() < 0.05, "{wish:?}: {}", (error / norm).sqrt());
        }
    }
}

#[test]
fn what_is_not_quantized_is_said() {
    let load = |gguf: &Gguf, quantize| {
        Model::load(gguf, &LoadOptions { quantize, ..plain() }, &mut |_, _| {}).map(|m| m.notices().to_vec())
    };
    // Rows of 32 are no blocks of 256; rows of 48 are none of any.
    let gguf = Spec::default().gguf();
    assert_eq!(load(&gguf, None), Ok(vec![]));
    let notices = load(&gguf, Some(DType::Q4_K)).unwrap();
    assert!(
        notices.len() == 1 && notices[0].contains("13 become Q8_0") && notices[0].contains("2 stay"),
        "{notices:?}"
    );
    assert_eq!(load(&gguf, Some(DType::IQ2_S)), Err(Error::Quantize { dtype: DType::IQ2_S }));
}

#[test]
fn wrong_configurations_are_named() {
    type Change = fn(&mut Config);
    let changes: [(&str, Change); 9] = [
        ("dim", |c| c.dim = 0),
        ("vocab_size", |c| c.vocab_size = 0),
        ("n_kv_heads", |c| c.n_kv_heads = 3),
        ("windows", |c| c.windows.clear()),
        ("windows", |c| c.windows[0] = Some(0)),
        ("rope_layers", |c| c.rope_layers.push(true)),
        ("rope", |c| c.rope.inv_freq.resize(40, 1.0)),
        ("ffn_dim", |c| c.ffn_dim = 0),
        ("architecture", |c| c.arch = "clip"),
    ];
    let gguf = Spec::default().gguf();
    for (word, change) in changes {
        let mut memory = in_memory(&gguf, |_, dtype, bytes| (dtype, bytes));
        let mut config = gguf.config().unwrap().1;
        change(&mut config);
        let tensors = std::mem::replace(&mut memory, MemoryCheckpoint::new(config));
        for name in tensors.names() {
            let tensor = tensors.tensor(&name).unwrap();
            memory.insert(&name, tensor.dtype, &tensors.shape(&name).unwrap(), tensor.data.read()).unwrap();
        }
        match Model::load(&memory, &plain(), &mut |_, _| {}).map(|_| ()) {
            Err(e @ Error::Config { .. }) => assert!(e.to_string().contains(word), "{word}: {e}"),
            other => panic!("{word}: {other:?}"),
        }
    }
}

#[test]
fn wrong_tensors_are_named() {
    let gguf = Spec::default().gguf();
    let mut memory = in_memory(&gguf, |_, dtype, bytes| (dtype, bytes));
    for (dtype, shape, bytes) in [
        (DType::F32, &[2usize, 3][..], 20usize),
        (DType::F32, &[], 4),
        (DType::Q8_0, &[2, 33], 68),
        (DType::F32, &[usize::MAX, 8], 32),
        (DType::F32, &[0, 8], 0),
    ] {
        let error = memory.insert("a.weight", dtype, shape, vec![0; bytes].into()).unwrap_err();
        assert!(error.to_string().contains("a.weight"), "{error}");
    }
    memory.insert_f32("blk.0.ffn_up.weight", &[4, 8], &[0.0; 32]).unwrap();
    let error = Model::load(&memory, &plain(), &mut |_, _| {}).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("blk.0.ffn_up.weight") && error.contains("[4, 8]"), "{error}");
    memory.insert_f32("blk.1.attn_sinks.weight", &[4], &[0.0; 4]).unwrap();
    memory.insert("blk.0.ffn_up.weight", DType::F32, &[48, 32], gguf_bytes(&gguf, "blk.0.ffn_up.weight")).unwrap();
    let error = Model::load(&memory, &plain(), &mut |_, _| {}).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("blk.1.attn_sinks.weight"), "{error}");
}

fn gguf_bytes(gguf: &Gguf, name: &str) -> bytes::Bytes {
    Checkpoint::tensor(gguf, name).unwrap().data.read()
}

/// Logits of every position leave no trace: windows, longrope, a draft that is not taken.
#[test]
fn peeking_changes_nothing() {
    let windowed = Spec { window: Some(20), windowed: vec![true, false], ..Spec::default() };
    for spec in [Spec::default(), windowed, Spec { rope: Rope::Long(150), ..Spec::default() }] {
        for kind in [KvType::F32, KvType::F16] {
            let mut run = Run::new(&spec.gguf(), &plain(), kind);
            let tokens = Rng(9).tokens(120, spec.vocab_size);
            let other = Rng(10).tokens(50, spec.vocab_size);
            let expected = run.alone(&tokens, &[120]);
            let seq = run.kv.add();
            let mut at = 0;
            for n in [33, 1, 40, 46] {
                let state = |run: &Run| (run.len(seq), run.kv.bytes_held());
                let before = state(&run);
                for tokens in [&other[..], &tokens[at..at + n]] {
                    let mut batch = puna_model::Batch::default();
                    run.push(&mut batch, seq, tokens, puna_model::Outputs::All);
                    let peeked = run.model.peek(&batch, &mut run.kv).unwrap().to_vec();
                    assert_eq!(state(&run), before);
                    if tokens.len() == n {
                        let v = spec.vocab_size;
                        assert_same(&peeked, &expected[at * v..(at + n) * v], "peeked");
                    }
                }
                let v = spec.vocab_size;
                assert_same(&run.feed(seq, &tokens[at..at + n]), &expected[at * v..(at + n) * v], "fed");
                at += n;
            }
        }
    }
}

/// As many threads as there are, which is what a user has.
#[test]
fn a_fixture_in_memory_is_as_its_file() {
    let gguf = Fixture::named("llama-gqa").gguf();
    let options = LoadOptions { threads: std::thread::available_parallelism().map_or(1, NonZero::get), ..plain() };
    let tokens = Rng(3).tokens(40, gguf.config().unwrap().1.vocab_size);
    let memory = in_memory(&gguf, |_, dtype, bytes| (dtype, bytes));
    assert_same(&logits(&memory, &options, &tokens), &logits(&gguf, &plain(), &tokens), "fixture");
}
