//! Control vectors, and what they do to the rows that ask for them and to no others.

#![allow(clippy::unwrap_used)]

mod gguf_builder;
mod support;

use gguf_builder::{self as gb, Builder, message};
use puna_kernels::{Acts, KvType};
use puna_model::checkpoint::{Checkpoint, Data};
use puna_model::steering::Part;
use puna_model::{
    BackendKind, Batch, ControlVector, Error, Gguf, LoadOptions, MemoryCheckpoint, Model, Outputs, Row, SeqId,
    Steering, Tap,
};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::sync::Arc;
use support::maker::{Experts, Spec};
use support::run::{KV_TYPES, Run, assert_same, plain, relative_error};
use support::{Fixture, Rng};

fn direction(dim: usize, seed: u64) -> Vec<f32> {
    let mut rng = Rng(seed);
    (0..dim).map(|_| rng.number()).collect()
}

fn vector(dim: usize, layers: &[usize]) -> ControlVector {
    let directions = layers.iter().map(|&layer| (layer, direction(dim, layer as u64))).collect();
    ControlVector::new("made", directions).unwrap()
}

fn part(vector: &ControlVector, strength: f32) -> Part<'_> {
    Part { vector, strength, layers: None }
}

fn spec() -> Spec {
    let experts = Some(Experts { n: 6, used: 2, ffn_dim: 16, split: false, sigmoid: false });
    Spec { arch: "llama", n_layers: 4, experts, ..Spec::default() }
}

#[test]
fn the_reference_says_the_same() {
    let fixture = Fixture::named("llama-gqa");
    let bytes = std::fs::read(fixture.folder.join("control-vector-golden.safetensors")).unwrap();
    let golden = SafeTensors::deserialize(&bytes).unwrap();
    let vector = ControlVector::open(fixture.folder.join("control-vector.gguf")).unwrap();
    assert_eq!((vector.dim(), vector.directions().keys().copied().collect::<Vec<_>>()), (64, vec![1]));
    let ids = golden.tensor("input_ids").unwrap();
    let ids: Vec<u32> = ids.data().as_chunks().0.iter().map(|b| i64::from_le_bytes(*b) as u32).collect();
    for backend in [BackendKind::Cpu, BackendKind::Reference] {
        let mut run = Run::new(&fixture.gguf(), &LoadOptions { backend, ..plain() }, KvType::F32);
        for (name, strength) in [("logits_scale_1.0", 1.0), ("logits_scale_-0.5", -0.5)] {
            let expected = golden.tensor(name).unwrap();
            let expected: Vec<f32> = expected.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            let steering = Arc::new(Steering::new(run.model.config(), &[part(&vector, strength)]).unwrap());
            let got = steered(&mut run, &ids, &steering, &[ids.len()]);
            let error = relative_error(&got, &expected);
            assert!(error <= 1e-5, "{name}: relative error {error:.2e}");
        }
    }
}

/// Logits of tokens that are computed in chunks, steered.
fn steered(run: &mut Run, tokens: &[u32], steering: &Arc<Steering>, sizes: &[usize]) -> Vec<f32> {
    let (seq, mut batch, mut logits) = (run.kv.add(), Batch::default(), Vec::new());
    let mut sizes = sizes.iter().cycle();
    while run.len(seq) < tokens.len() {
        let start = run.len(seq);
        let end = tokens.len().min(start + sizes.next().unwrap());
        batch.clear();
        run.push(&mut batch, seq, &tokens[start..end], Outputs::All);
        batch.spans[0].total = tokens.len();
        batch.steer(steering);
        logits.extend(run.forward(&batch));
    }
    run.kv.remove(seq);
    logits
}

#[test]
fn rows_are_steered_alone() {
    for (i, kind) in KV_TYPES.into_iter().enumerate() {
        let spec = Spec { window: [None, Some(9), None][i], ..spec() };
        let (gguf, mut rng) = (spec.gguf(), Rng(i as u64));
        let mut run = Run::new(&gguf, &plain(), kind);
        let vocab = run.vocab_size();
        let config = run.model.config().clone();
        let vectors = [vector(32, &[1, 3]), vector(32, &[2])];
        let steerings: Vec<Option<Arc<Steering>>> = [None, Some(0.7), Some(-1.5), None, Some(1.0)]
            .into_iter()
            .map(|strength| {
                let parts = [part(&vectors[0], strength?), part(&vectors[1], 0.3)];
                Some(Arc::new(Steering::new(&config, &parts).unwrap()))
            })
            .collect();
        let tokens: Vec<Vec<u32>> = (0..5).map(|n| rng.tokens(30 + 11 * n, vocab)).collect();
        let alone: Vec<Vec<f32>> = tokens
            .iter()
            .zip(&steerings)
            .map(|(tokens, steering)| match steering {
                Some(steering) => steered(&mut run, tokens, steering, &[tokens.len()]),
                None => run.alone(tokens, &[tokens.len()]),
            })
            .collect();
        let plain_logits = run.alone(&tokens[1], &[99]);
        assert!(relative_error(&alone[1], &plain_logits) > 0.01, "steering does something");
        assert_same(
            &steered(&mut run, &tokens[1], steerings[1].as_ref().unwrap(), &[7, 1, 3]),
            &alone[1],
            vocab,
            "chunks",
        );
        // All in the same batches, some rows without logits.
        let ids: Vec<SeqId> = tokens.iter().map(|_| run.kv.add()).collect();
        let mut batch = Batch::default();
        while ids.iter().zip(&tokens).any(|(seq, tokens)| run.len(*seq) < tokens.len()) {
            batch.clear();
            let mut wanted = Vec::new();
            for (s, seq) in ids.iter().enumerate() {
                let (start, all) = (run.len(*seq), tokens[s].len());
                let n = [1, 4, 13][rng.below(3)].min(all - start);
                let outputs = [Outputs::None, Outputs::Last, Outputs::All][rng.below(3)];
                if n == 0 {
                    continue;
                }
                run.push(&mut batch, *seq, &tokens[s][start..start + n], outputs);
                batch.spans.last_mut().unwrap().total = all;
                steerings[s].iter().for_each(|steering| batch.steer(steering));
                let rows = match outputs {
                    Outputs::None => start..start,
                    Outputs::Last => start + n - 1..start + n,
                    Outputs::All => start..start + n,
                };
                wanted.extend_from_slice(&alone[s][rows.start * vocab..rows.end * vocab]);
            }
            let got = run.forward(&batch);
            assert_same(&got, &wanted, vocab, &format!("{kind:?}: together"));
        }
    }
}

#[test]
fn nothing_added_is_no_steering() {
    let gguf = spec().gguf();
    let mut run = Run::new(&gguf, &plain(), KvType::F16);
    let config = run.model.config().clone();
    let made = vector(32, &[1, 2]);
    let none = Steering::new(&config, &[part(&made, 0.0)]).unwrap();
    assert!(none.is_empty() && none.key().is_none());
    let undone = Steering::new(&config, &[part(&made, 1.0), part(&made, -1.0)]).unwrap();
    assert!(undone.is_empty());
    let tokens = Rng(3).tokens(20, run.vocab_size());
    let expected = run.alone(&tokens, &[20]);
    assert_same(&steered(&mut run, &tokens, &Arc::new(none), &[20]), &expected, 50, "strength 0");
}

/// What is added is the sum in the order of the parts, each product and each sum rounded.
#[test]
fn parts_are_added_in_order() {
    let config = spec().gguf().config().unwrap().1;
    let [a, b] = [vector(32, &[1, 2]), ControlVector::new("b", BTreeMap::from([(2, direction(32, 9))])).unwrap()];
    let steering = Steering::new(&config, &[part(&a, 0.3), part(&b, -1.7)]).unwrap();
    let expected = |layer: usize| -> Vec<u32> {
        let other = b.directions().get(&layer);
        let sum = |i: usize, x: &f32| other.map_or(0.3 * x, |other| 0.3 * x + -1.7 * other[i]).to_bits();
        a.directions()[&layer].iter().enumerate().map(|(i, x)| sum(i, x)).collect()
    };
    for layer in [1, 2] {
        let got: Vec<u32> = steering.layer(layer).unwrap().iter().map(|x| x.to_bits()).collect();
        assert_eq!(got, expected(layer), "layer {layer}");
    }
    assert!(steering.layer(0).is_none() && steering.layer(3).is_none() && steering.layer(4).is_none());
    let only = Part { layers: Some(2..=3), ..part(&a, 0.3) };
    let some = Steering::new(&config, &[only]).unwrap();
    assert!(some.layer(1).is_none() && some.layer(2).is_some());
    assert_ne!(some.key(), steering.key());
    let again = Steering::new(&config, &[part(&a, 0.3), part(&b, -1.7)]).unwrap();
    assert_eq!(again.key(), steering.key());
}

/// Keeps what each layer leaves, and what the next one gets.
#[derive(Default)]
struct Residuals {
    before: Vec<Vec<f32>>,
    after: Vec<Vec<f32>>,
}

impl Tap for Residuals {
    fn residual(&mut self, _: usize, x: &mut Acts) {
        self.before.push(x.values().to_vec());
    }
    fn after(&mut self, _: usize, x: &Acts) {
        self.after.push(x.values().to_vec());
    }
    fn wants_all_rows(&self) -> bool {
        true
    }
}

#[test]
fn steering_comes_before_taps_and_deepstack_after_them() {
    let gguf = spec().gguf();
    let (_, mut config) = gguf.config().unwrap();
    config.n_deepstack = 2;
    let mut checkpoint = MemoryCheckpoint::new(config.clone());
    checkpoint.gguf_order = true;
    for name in gguf.names() {
        let shape = gguf.shape(&name).unwrap();
        let Data::Stored(bytes) = Checkpoint::tensor(&gguf, &name).unwrap().data else { panic!("{name} is stored") };
        checkpoint.insert(&name, puna_kernels::DType::F32, &shape, bytes).unwrap();
    }
    let mut model = Model::load(&checkpoint, &plain(), &mut |_, _| {}).unwrap();
    let made = vector(32, &[1, 3]);
    let steering = Arc::new(Steering::new(&config, &[part(&made, 0.5)]).unwrap());
    let mut residuals = |steering: Option<&Arc<Steering>>, deepstack: f32| {
        let (mut kv, mut tap) = (model.kv_cache(KvType::F32), Residuals::default());
        let seq = kv.add();
        let mut batch = Batch::default();
        batch.push(seq, 0, &[1, 2, 3], Outputs::Last);
        batch.rows[1] = Row::Embed(0);
        batch.embeds = direction(32, 77);
        batch.deepstack = vec![deepstack; 64];
        steering.iter().for_each(|steering| batch.steer(steering));
        model.forward_with(&batch, &mut kv, &mut tap).unwrap();
        tap
    };
    let (with, without) = (residuals(Some(&steering), 0.25), residuals(None, 0.25));
    // Until layer 1 nothing differs; what it leaves differs by the direction alone, in every row.
    assert_eq!((&with.after[0], &with.before[1]), (&without.after[0], &without.before[1]));
    let added = steering.layer(1).unwrap();
    for (i, (with, without)) in with.after[1].iter().zip(&without.after[1]).enumerate() {
        assert_eq!(with.to_bits(), (without + added[i % 32]).to_bits(), "number {i}");
    }
    // Deepstack is added to the image's row alone, after the tap, and not after the second layer.
    for layer in 0..3 {
        for (i, (left, got)) in with.after[layer].iter().zip(&with.before[layer + 1]).enumerate() {
            let more = if layer < 2 && i / 32 == 1 { 0.25 } else { 0.0 };
            assert_eq!(*got, left + more, "layer {layer}, number {i}");
        }
    }
    // The first layer's own output knows no deepstack.
    assert_eq!(residuals(None, 1.0).after[0], without.after[0]);
    assert_ne!(residuals(None, 1.0).after[1], without.after[1]);
}

#[test]
fn shared_sequences_are_steered_from_their_beginning() {
    let mut run = Run::new(&spec().gguf(), &plain(), KvType::F16);
    let steering = Arc::new(Steering::new(run.model.config(), &[part(&vector(32, &[1]), 1.0)]).unwrap());
    for (first, second) in [(true, false), (false, true)] {
        let (seq, mut batch) = (run.kv.add_shared(), Batch::default());
        let mut push = |run: &mut Run, steered: bool| {
            batch.clear();
            run.push(&mut batch, seq, &[1, 2, 3], Outputs::Last);
            if steered {
                batch.steer(&steering);
            }
            run.model.forward(&batch, &mut run.kv).map(<[f32]>::len)
        };
        assert_eq!(push(&mut run, first), Ok(50));
        assert_eq!(push(&mut run, first), Ok(50));
        let error = message(push(&mut run, second), "another steering");
        assert!(error.contains("span 0") && error.contains("steered otherwise"), "{error}");
        assert_eq!(run.len(seq), 6);
        run.kv.remove(seq);
    }
}

#[test]
fn batches_with_steering_that_does_not_fit() {
    let mut run = Run::new(&spec().gguf(), &plain(), KvType::F16);
    let seq = run.kv.add();
    let mut refused = |change: &dyn Fn(&mut Batch), parts: &[&str]| {
        let mut batch = Batch::default();
        batch.push(seq, 0, &[1, 2], Outputs::Last);
        change(&mut batch);
        let error = message(run.model.forward(&batch, &mut run.kv).map(<[f32]>::len), "steering");
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    };
    let made = |n_layers: usize, dim: usize| {
        let config = Spec { n_layers, dim, ..spec() }.gguf().config().unwrap().1;
        Arc::new(Steering::new(&config, &[part(&vector(dim, &[1]), 1.0)]).unwrap())
    };
    refused(&|b| b.steer(&made(4, 64)), &["4 layers of width 64", "has 4 of 32"]);
    refused(&|b| b.steer(&made(3, 32)), &["3 layers of width 32"]);
    refused(&|b| b.steering = vec![(1, made(4, 32))], &["steering of span 1"]);
    refused(&|b| b.steering = vec![(0, made(4, 32)), (0, made(4, 32))], &["steering of span 0"]);
}

fn file(directions: &[(&str, &[f32])]) -> Builder {
    let start = Builder::new().key("general.architecture", gb::string("controlvector"));
    directions.iter().fold(start, |b, (name, values)| {
        b.tensor(name, &[values.len() as u64], 0, values.iter().flat_map(|x| x.to_le_bytes()).collect())
    })
}

fn open(builder: &Builder) -> Result<ControlVector, Error> {
    ControlVector::from_gguf(&Gguf::parse("v.gguf", builder.bytes().into())?)
}

#[test]
fn files_that_are_no_control_vectors() {
    let ones = [1.0; 32];
    assert!(open(&file(&[("direction.1", &ones), ("direction.3", &ones)])).is_ok());
    let refused = |builder: Builder, parts: &[&str]| {
        let error = message(open(&builder), "a control vector");
        assert!(error.contains("v.gguf") && parts.iter().all(|part| error.contains(part)), "{error}");
    };
    let good = || file(&[("direction.1", &ones)]);
    refused(
        good().with("general.architecture", gb::string("llama")),
        &["general.architecture", "controlvector", "llama"],
    );
    refused(good().with("general.architecture", None), &["general.architecture", "missing"]);
    refused(file(&[]), &["direction.1", "missing"]);
    refused(file(&[("direction.0", &ones)]), &["direction.0", "layer 0 has no direction"]);
    for name in ["direction.x", "direction.", "direction.-1", "blk.0.attn_q.weight", "direction.99999999999999999999"] {
        refused(file(&[(name, &ones)]), &[name, "expected direction.N"]);
    }
    refused(file(&[("direction.1", &ones), ("direction.01", &ones)]), &["direction.01", "two directions of layer 1"]);
    refused(file(&[("direction.1", &ones), ("direction.2", &ones[1..])]), &["direction.2", "expected 32", "found 31"]);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut values = ones;
        values[7] = bad;
        refused(file(&[("direction.1", &values)]), &["direction.1", "number 7", "finite"]);
    }
    refused(file(&[]).tensor("direction.1", &[2, 16], 0, vec![0; 128]), &["direction.1", "one dimension", "[2, 16]"]);
    refused(file(&[]).tensor("direction.1", &[32], 1, vec![0; 64]), &["direction.1", "F32", "F16"]);
    let cut = good().bytes();
    let truncated = Gguf::parse("v.gguf", cut[..cut.len() - 4].to_vec().into());
    assert!(truncated.and_then(|gguf| ControlVector::from_gguf(&gguf)).is_err());
}

#[test]
fn vectors_that_do_not_fit_a_model() {
    let config = spec().gguf().config().unwrap().1;
    let refused = |parts: &[Part], words: &[&str]| {
        let error = message(Steering::new(&config, parts), "steering");
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    };
    let good = vector(32, &[1, 3]);
    refused(&[part(&vector(31, &[1]), 1.0)], &["direction.1", "expected 32", "found 31"]);
    // A vector of another model is refused, whichever layers are asked for.
    let deep = vector(32, &[1, 4]);
    refused(&[Part { layers: Some(1..=1), ..part(&deep, 1.0) }], &["direction.4", "4 layers", "1 to 3"]);
    refused(&[part(&good, 1.0), Part { layers: Some(0..=2), ..part(&good, 1.0) }], &["layer 0 has no direction"]);
    refused(&[Part { layers: Some(2..=4), ..part(&good, 1.0) }], &["layers 2 to 4", "within 1 to 3"]);
    #[allow(clippy::reversed_empty_ranges)]
    let backwards = 3..=1;
    refused(&[Part { layers: Some(backwards), ..part(&good, 1.0) }], &["layers 3 to 1"]);
    refused(&[Part { layers: Some(2..=2), ..part(&good, 1.0) }], &["no direction of layers 2 to 2"]);
    for strength in [f32::NAN, f32::INFINITY] {
        refused(&[part(&good, strength)], &["strength", "not finite"]);
    }
    let large = ControlVector::new("large", BTreeMap::from([(1, vec![1e38; 32])])).unwrap();
    refused(&[part(&large, 3.0), part(&large, 3.0)], &["large", "layer 1", "not finite"]);
}

#[test]
fn a_written_vector_reads_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("v.gguf");
    let made = vector(32, &[1, 2, 3]);
    made.write(&path, "llama", false).unwrap();
    let read = ControlVector::open(&path).unwrap();
    assert_eq!((read.directions(), read.path()), (made.directions(), &*path));
    let gguf = Gguf::open(&path).unwrap();
    assert_eq!(gguf.meta().require::<&str>("controlvector.model_hint").unwrap(), "llama");
    assert_eq!(gguf.meta().require::<u32>("controlvector.layer_count").unwrap(), 3);
    assert!(made.write(&path, "llama", false).unwrap_err().to_string().contains("already"));
    made.write(&path, "llama", true).unwrap();
}
