//! Experts that are read from files as they are needed: the same logits, bit for bit, however few are in memory.

#![allow(clippy::unwrap_used)]

mod gguf_builder;
mod support;

use gguf_builder::{self as gb, Builder};
use proptest::prelude::*;
use puna_kernels::dtype::FORMATS;
use puna_kernels::{DType, KvType};
use puna_model::{BackendKind, Batch, Error, ExpertStats, Gguf, LoadOptions, Model, Outputs};
use std::fs;
use std::path::PathBuf;
use support::Rng;
use support::maker::{Experts, Spec};
use support::run::{Run, assert_same, plain};
use tempfile::TempDir;

/// A model in a file.
struct InFile {
    dir: TempDir,
    gguf: Gguf,
}

impl InFile {
    fn new(spec: &Spec) -> InFile {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.gguf");
        fs::write(&path, spec.builder().bytes()).unwrap();
        InFile { gguf: Gguf::open(&path).unwrap(), dir }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("model.gguf")
    }

    /// Bytes of one of its experts, the largest of each kind of matrix, and of all.
    fn expert_bytes(&self) -> (u64, u64) {
        let (mut largest, mut total) = ([0; 3], 0);
        for info in self.gguf.tensors() {
            let part = ["ffn_gate", "ffn_up", "ffn_down"].iter().position(|part| info.name.contains(part));
            let is_expert =
                !info.name.contains("shexp") && !info.name.contains("gate_inp") && info.name.contains(".weight");
            let n = if info.name.contains("_exps") { info.shape[0] } else { 1 };
            if let Some(part) = part.filter(|_| is_expert) {
                largest[part] = (info.bytes / n).max(largest[part]);
                total += info.bytes;
            }
        }
        (largest.iter().sum(), total)
    }

    /// Loads it with room for so many experts.
    fn with(&self, slots: u64) -> Run {
        let (one, all) = self.expert_bytes();
        let memory = (one * slots).min(all - 1);
        Run::new(&self.gguf, &LoadOptions { expert_memory: Some(memory), ..plain() }, KvType::F16)
    }
}

fn stats(run: &Run) -> ExpertStats {
    run.model.expert_stats().unwrap()
}

fn mixture(arch: &'static str, split: bool, sigmoid: bool) -> Spec {
    let experts = Some(Experts { n: 8, used: 3, ffn_dim: 32, split, sigmoid });
    Spec { arch, n_layers: 3, experts, types: vec![DType::Q4_0, DType::Q8_0, DType::F16], seed: 9, ..Spec::default() }
}

fn mixtures() -> Vec<Spec> {
    vec![
        mixture("llama", false, false),
        mixture("llama", true, false),
        mixture("qwen3moe", false, false),
        mixture("qwen2moe", false, false),
        mixture("minimax-m2", false, true),
        Spec { biases: true, ..mixture("llama", true, false) },
    ]
}

#[test]
fn any_budget_gives_the_same_bits() {
    for spec in mixtures() {
        let model = InFile::new(&spec);
        let tokens = Rng(3).tokens(40, spec.vocab_size);
        let mut resident = Run::new(&model.gguf, &plain(), KvType::F16);
        assert!(resident.model.expert_stats().is_none());
        let expected = resident.alone(&tokens, &[40]);
        let bytes = resident.model.bytes_per_step();
        for slots in 2..24 {
            let mut run = model.with(slots);
            assert!(stats(&run).slots as u64 <= slots && stats(&run).experts == 24);
            assert_eq!(run.model.bytes_per_step(), bytes);
            for sizes in [&[1][..], &[7], &[40], &[12, 1, 1]] {
                let what = format!("{} split {:?}, {slots} slots, {sizes:?}", spec.arch, spec.experts);
                assert_same(&run.alone(&tokens, sizes), &expected, spec.vocab_size, &what);
            }
            let stats = stats(&run);
            assert!(stats.evictions > 0 && stats.misses > stats.slots as u64, "{stats:?}");
            assert!(stats.bytes_read >= stats.misses * model.expert_bytes().0 / 4, "{stats:?}");
        }
        // Where all fit, all are loaded.
        let options = LoadOptions { expert_memory: Some(model.expert_bytes().1), ..plain() };
        assert!(Run::new(&model.gguf, &options, KvType::F16).model.expert_stats().is_none());
    }
}

#[test]
fn four_sequences_at_a_time() {
    let spec = mixture("qwen3moe", false, false);
    let model = InFile::new(&spec);
    let mut resident = Run::new(&model.gguf, &plain(), KvType::F16);
    let mut rng = Rng(17);
    for slots in [2, 5, 6, 12, 23] {
        let mut run = model.with(slots);
        for round in 0..10 {
            let seqs: Vec<Vec<u32>> = (0..4).map(|_| rng.tokens(10, spec.vocab_size)).collect();
            let together = run.together(&seqs, &mut rng);
            for (tokens, got) in seqs.iter().zip(together) {
                let expected = resident.alone(tokens, &[10]);
                assert_same(&got, &expected, spec.vocab_size, &format!("{slots} slots, round {round}"));
            }
        }
        assert!(stats(&run).evictions > 50, "{:?}", stats(&run));
    }
}

/// A chunk of a prompt reads no expert twice, however few are in memory.
#[test]
fn a_chunk_reads_each_expert_once() {
    for spec in mixtures() {
        let model = InFile::new(&spec);
        let all = model.expert_bytes().1;
        for slots in 2..24 {
            let mut run = model.with(slots);
            let seq = run.kv.add();
            let mut read = 0;
            for chunk in Rng(slots).tokens(120, spec.vocab_size).chunks(40) {
                run.feed_chunks(seq, chunk, &[40]);
                let now = stats(&run).bytes_read;
                assert!(now - read <= all, "{}, {slots} slots: {} of {all} bytes", spec.arch, now - read);
                read = now;
            }
            assert!(read > all, "{}, {slots} slots: {read} bytes of all", spec.arch);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn models_of_any_shape(
        arch in proptest::sample::select(&["llama", "qwen3moe", "qwen2moe", "minimax-m2", "granite"][..]),
        (n, used, n_layers) in (3usize..20, 1usize..6, 1usize..4),
        (split, sigmoid, biases, threads) in (any::<bool>(), any::<bool>(), any::<bool>(), 1usize..3),
        types in proptest::collection::vec(0..FORMATS.len(), 1..6),
        slots in 2u64..30,
        seed: u64,
    ) {
        let experts = Some(Experts { n, used: used.min(n), ffn_dim: 64, split, sigmoid });
        let types = types.into_iter().map(|i| FORMATS[i].dtype).collect();
        let spec = Spec { arch, n_layers, dim: 256, head_dim: 16, experts, biases, types, seed, ..Spec::default() };
        let model = InFile::new(&spec);
        let tokens = Rng(seed).tokens(24, spec.vocab_size);
        let expected = Run::new(&model.gguf, &plain(), KvType::F16).alone(&tokens, &[24]);
        let (one, all) = model.expert_bytes();
        let expert_memory = Some((one * slots).min(all - 1).max(one * 2));
        let pack = seed % 3 > 0;
        let options = LoadOptions { threads, pack, expert_memory, ..plain() };
        let mut run = Run::new(&model.gguf, &options, KvType::F16);
        assert_same(&run.alone(&tokens, &[1, 9, 2]), &expected, spec.vocab_size, "streamed");
    }
}

#[test]
fn budgets_that_cannot_be() {
    let spec = mixture("llama", false, false);
    let model = InFile::new(&spec);
    let load = |options: LoadOptions| Model::load(&model.gguf, &options, &mut |_, _| {}).map(drop);
    let one = model.expert_bytes().0;
    for bytes in [0, 1, one, 2 * one - 1] {
        let expected = Error::ExpertMemory { bytes, needed: 2 * one };
        assert_eq!(load(LoadOptions { expert_memory: Some(bytes), ..plain() }), Err(expected));
    }
    let few = LoadOptions { expert_memory: Some(2 * one), ..plain() };
    let what = |result: Result<(), Error>| result.unwrap_err().to_string();
    assert_eq!(
        what(load(LoadOptions { backend: BackendKind::Reference, ..few })),
        "experts cannot be read as they are needed: the reference keeps all weights in memory"
    );
    let in_memory = Model::load(&spec.gguf(), &few, &mut |_, _| {}).map(drop);
    assert!(what(in_memory).ends_with("the model is in memory and not in files"));
    let quantized = load(LoadOptions { quantize: Some(DType::Q8_0), ..few });
    assert!(what(quantized).contains("convert the model"));
    // A dense model has no experts to be limited.
    let dense = InFile::new(&Spec::default());
    let loaded = Model::load(&dense.gguf, &LoadOptions { expert_memory: Some(1), ..plain() }, &mut |_, _| {}).unwrap();
    assert_eq!(loaded.notices(), ["the model has no experts: a limit of their memory changes nothing"]);
}

/// What a step over all of a prompt says.
fn step(run: &mut Run, tokens: &[u32]) -> Result<Vec<f32>, Error> {
    let seq = run.kv.add_shared();
    let mut batch = Batch::default();
    batch.push(seq, 0, tokens, Outputs::All);
    let result = run.model.forward(&batch, &mut run.kv).map(<[f32]>::to_vec);
    assert_eq!(run.kv.len(seq), Some(if result.is_ok() { tokens.len() } else { 0 }));
    run.kv.check().unwrap();
    run.kv.remove(seq);
    assert_eq!(run.kv.bytes_held(), 0);
    result
}

#[test]
fn files_that_change_end_the_step_and_no_more() {
    let spec = mixture("qwen2moe", false, false);
    for threads in [1, 2] {
        let model = InFile::new(&spec);
        let (path, whole) = (model.path(), fs::read(model.path()).unwrap());
        let tokens = Rng(3).tokens(40, spec.vocab_size);
        let expected = Run::new(&model.gguf, &plain(), KvType::F16).alone(&tokens, &[40]);
        let memory = Some(model.expert_bytes().0 * 3);
        let mut run = Run::new(&model.gguf, &LoadOptions { threads, expert_memory: memory, ..plain() }, KvType::F16);
        let good = |run: &mut Run| assert_same(&step(run, &tokens).unwrap(), &expected, spec.vocab_size, "streamed");
        let bad = |run: &mut Run, start: &str| {
            // The same error as often as it is tried.
            for _ in 0..3 {
                let e = step(run, &tokens).unwrap_err().to_string();
                let path = path.to_str().unwrap();
                assert!(e.starts_with(&format!("{path}: {start}")), "{e}");
            }
        };
        good(&mut run);
        // Shortened in place: what is mapped of it may not be touched any more.
        fs::File::options().write(true).open(&path).unwrap().set_len(whole.len() as u64 / 2).unwrap();
        let (half, all) = (whole.len() / 2, whole.len());
        bad(&mut run, &format!("the file has changed since the model was loaded: expected {all} bytes, found {half}"));
        fs::write(&path, []).unwrap();
        bad(&mut run, &format!("the file has changed since the model was loaded: expected {all} bytes, found 0"));
        fs::write(&path, &whole).unwrap();
        good(&mut run);
        // Another model, as long, under the same name.
        let other = model.dir.path().join("other");
        fs::write(&other, Spec { seed: 10, ..spec.clone() }.builder().bytes()).unwrap();
        fs::rename(&other, &path).unwrap();
        bad(&mut run, "the file has changed since the model was loaded: its content is another one");
        fs::remove_file(&path).unwrap();
        bad(&mut run, "no such file");
        // The right one takes the place of a wrong one that is still open, and that nothing was read from.
        let wrong = Spec { seed: 10, ..spec.clone() }.builder().bytes();
        for bytes in [&wrong[..], &whole[..half]] {
            fs::write(&path, &whole).unwrap();
            good(&mut run);
            fs::write(&path, bytes).unwrap();
            fs::write(&other, &whole).unwrap();
            fs::rename(&other, &path).unwrap();
            good(&mut run);
        }
        fs::write(&path, &whole).unwrap();
        good(&mut run);
        good(&mut run);
    }
}

#[test]
fn split_files() {
    let spec = mixture("qwen3moe", false, false);
    let whole = spec.builder();
    let dir = tempfile::tempdir().unwrap();
    let count = 4u16;
    let per_file = whole.tensors.len().div_ceil(usize::from(count));
    let path = |n: usize| dir.path().join(format!("m-{:05}-of-{count:05}.gguf", n + 1));
    for (n, tensors) in whole.tensors.chunks(per_file).enumerate() {
        let first = if n == 0 { Builder { tensors: vec![], ..whole.clone() } } else { Builder::new() };
        let keys = first.key("split.no", gb::u16(n as u16)).key("split.count", gb::u16(count));
        let keys = keys.key("split.tensors.count", gb::i32(whole.tensors.len() as i32));
        let file = tensors.iter().fold(keys, |b, t| b.tensor(&t.name, &t.shape(), t.ty, t.data.clone()));
        fs::write(path(n), file.bytes()).unwrap();
    }
    let tokens = Rng(3).tokens(40, spec.vocab_size);
    let expected = Run::new(&spec.gguf(), &plain(), KvType::F16).alone(&tokens, &[40]);
    let gguf = Gguf::open(path(0)).unwrap();
    let memory = Some(InFile::new(&spec).expert_bytes().0 * 2);
    let mut run = Run::new(&gguf, &LoadOptions { expert_memory: memory, ..plain() }, KvType::F16);
    assert_same(&run.alone(&tokens, &[3]), &expected, spec.vocab_size, "split");
    // One of the files is gone.
    fs::rename(path(2), dir.path().join("kept")).unwrap();
    assert!(step(&mut run, &tokens).unwrap_err().to_string().contains("m-00003-of-00004.gguf: no such file"));
    fs::rename(dir.path().join("kept"), path(2)).unwrap();
    assert_same(&step(&mut run, &tokens).unwrap(), &expected, spec.vocab_size, "split");
}
