//! Every model under testdata/models against its reference values: logits and hidden states that transformers
//! computed in single precision, and the tokens it chose.

#![allow(clippy::unwrap_used)]

mod gguf_builder;
mod support;

use gguf_builder::Builder;
use puna_kernels::{Acts, KvType};
use puna_model::{BackendKind, Batch, Gguf, LoadOptions, Outputs, Tap};
use support::golden::Golden;
use support::maker::parse;
use support::run::{Run, assert_same, plain, relative_error};
use support::{Fixture, Rng};

/// Collects what [`Golden::hidden_states`] has.
#[derive(Default)]
struct HiddenStates {
    states: Vec<f32>,
    n_layers: usize,
}

impl Tap for HiddenStates {
    fn residual(&mut self, layer: usize, x: &mut Acts) {
        if layer < self.n_layers {
            self.states.extend(x.values());
        }
    }

    fn hidden(&mut self, h: &Acts) {
        self.states.extend(h.values());
    }

    fn wants_all_rows(&self) -> bool {
        false
    }
}

fn argmax(logits: &[f32]) -> u32 {
    (0..logits.len()).reduce(|a, b| if logits[b] > logits[a] { b } else { a }).unwrap() as u32
}

/// Everything the reference says, in single precision.
fn check(name: &str, gguf: &Gguf, golden: &Golden, options: &LoadOptions) {
    let mut run = Run::new(gguf, options, KvType::F32);
    let (dim, vocab_size, n_layers) = (run.model.config().dim, run.vocab_size(), run.model.config().n_layers);
    let close = |what: &str, got: &[f32], expected: &[f32]| {
        let error = relative_error(got, expected);
        assert!(error <= 1e-5, "{name} ({:?}): {what}: relative error {error:.2e}", options.backend);
    };
    let mut tap = HiddenStates { n_layers, ..HiddenStates::default() };
    let mut prompt = golden.prompt.clone();
    let seq = run.kv.add();
    let mut batch = Batch::default();
    prompt.push(&mut batch, seq, 0..prompt.len(), Outputs::All);
    let mut logits = run.model.forward_with(&batch, &mut run.kv, &mut tap).unwrap().to_vec();
    close("logits", &logits, &golden.logits);
    let each = prompt.len() * dim;
    if let Some(expected) = &golden.hidden_states {
        close("hidden states", &tap.states, expected);
        // The whole must not hide a part.
        for (l, (got, expected)) in tap.states.chunks(each).zip(expected.chunks(each)).enumerate() {
            close(&format!("hidden states {l}"), got, expected);
        }
    }
    if let Some(expected) = &golden.mean_pooled {
        let last = &tap.states[n_layers * each..];
        let mean = |d: usize| last.iter().skip(d).step_by(dim).map(|&x| f64::from(x)).sum::<f64>();
        let pooled: Vec<f32> = (0..dim).map(|d| (mean(d) / prompt.len() as f64) as f32).collect();
        close("mean", &pooled, expected);
    }
    let mut greedy = vec![argmax(&logits[logits.len() - vocab_size..])];
    while greedy.len() < golden.greedy.len() {
        prompt.add(greedy[greedy.len() - 1]);
        // Where a longer sequence turns otherwise, it is computed again.
        let rope = &run.model.config().rope;
        if rope.is_long(prompt.len()) != rope.is_long(prompt.len() - 1) {
            run.kv.truncate(seq, 0);
        }
        batch.clear();
        prompt.push(&mut batch, seq, run.len(seq)..prompt.len(), Outputs::Last);
        logits = run.forward(&batch);
        greedy.push(argmax(&logits));
    }
    assert_eq!(greedy, golden.greedy, "{name} ({:?})", options.backend);
}

#[test]
fn the_processor_computes_what_the_reference_says() {
    for fixture in Fixture::all() {
        check(&fixture.name, &fixture.gguf(), &Golden::read(&fixture), &plain());
    }
}

#[test]
fn plain_loops_compute_what_the_reference_says() {
    let options = LoadOptions { backend: BackendKind::Reference, ..plain() };
    for fixture in Fixture::all() {
        check(&fixture.name, &fixture.gguf(), &Golden::read(&fixture), &options);
    }
}

#[test]
fn a_cache_in_half_precision_costs_little() {
    for fixture in Fixture::all() {
        let golden = Golden::read(&fixture);
        let mut run = Run::new(&fixture.gguf(), &plain(), KvType::F16);
        let seq = run.kv.add();
        let mut batch = Batch::default();
        golden.prompt.push(&mut batch, seq, 0..golden.prompt.len(), Outputs::All);
        let error = relative_error(&run.forward(&batch), &golden.logits);
        assert!(error <= 2e-3, "{}: relative error {error:.2e}", fixture.name);
    }
}

/// The same tensors written another way are the same model.
fn assert_same_model(fixture: &Fixture, rewrite: impl Fn(Builder) -> Builder) {
    let gguf = fixture.gguf();
    let [mut original, mut other] =
        [&gguf, &parse(&rewrite(Builder::read(&gguf)))].map(|gguf| Run::new(gguf, &plain(), KvType::F32));
    let tokens = Rng(7).tokens(60, original.vocab_size());
    let (expected, got) = (original.alone(&tokens, &[60]), other.alone(&tokens, &[60]));
    assert_same(&got, &expected, original.vocab_size(), &fixture.name);
}

#[test]
fn experts_may_be_a_tensor_each() {
    assert_same_model(&Fixture::named("mixtral-moe"), |b| {
        b.map(|t| {
            let name = String::from_utf8(t.name.clone()).unwrap();
            let Some(stem) = name.strip_suffix("_exps.weight") else { return vec![t] };
            let n = t.shape()[0];
            let part = |(e, data): (usize, &[u8])| gguf_builder::Tensor {
                name: format!("{stem}.{e}.weight").into(),
                n_dims: 2,
                dims: t.dims[..2].to_vec(),
                data: data.to_vec(),
                ..t
            };
            t.data.chunks(t.data.len() / n as usize).enumerate().map(part).collect()
        })
    });
}

#[test]
fn mistral_may_be_named_with_keys_of_llama() {
    assert_same_model(&Fixture::named("mistral-swa"), |b| {
        b.with("general.architecture", gguf_builder::string("mistral"))
    });
}

#[test]
fn mistral_may_be_named_with_keys_of_its_own() {
    assert_same_model(&Fixture::named("mistral-swa"), |mut b| {
        for (key, _) in &mut b.keys {
            if let Some(rest) = key.strip_prefix(b"llama.") {
                *key = [b"mistral.", rest].concat();
            }
        }
        b.with("general.architecture", gguf_builder::string("mistral"))
    });
}
