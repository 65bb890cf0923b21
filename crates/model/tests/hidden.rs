//! Hidden states without logits: models that have no output projection, or whose is not loaded.

#![allow(clippy::unwrap_used)]

mod gguf_builder;
mod hf_maker;
mod support;

use hf_maker::{LAYERS, Small, assert_same, tokens};
use puna_kernels::{Acts, KvType};
use puna_model::arch::Arch;
use puna_model::checkpoint::{Checkpoint, Tensor};
use puna_model::{Batch, Config, Error, LoadOptions, Model, Outputs, Tap};
use serde_json::json;
use std::cell::RefCell;
use support::Fixture;
use support::run::plain;

#[derive(Default)]
struct LastStates(Vec<f32>);

impl Tap for LastStates {
    fn residual(&mut self, _: usize, _: &mut Acts) {}
    fn hidden(&mut self, h: &Acts) {
        self.0.extend(h.values());
    }
    fn wants_all_rows(&self) -> bool {
        false
    }
}

fn headless() -> LoadOptions {
    LoadOptions { head: false, ..plain() }
}

fn load(from: &dyn Checkpoint, options: &LoadOptions) -> Model {
    Model::load(from, options, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}"))
}

/// States after the last norm; what a tap sees of them where there are logits.
fn states(model: &mut Model, tokens: &[u32]) -> Vec<f32> {
    let mut kv = model.kv_cache(KvType::F32);
    let (seq, mut batch) = (kv.add(), Batch::default());
    batch.push(seq, 0, tokens, Outputs::All);
    if !model.has_head() {
        return model.hidden(&batch, &mut kv).unwrap().to_vec();
    }
    let mut tap = LastStates::default();
    model.forward_with(&batch, &mut kv, &mut tap).unwrap();
    tap.0
}

/// A checkpoint that remembers whose elements were read.
struct Watched<'a>(&'a dyn Checkpoint, RefCell<Vec<String>>);

impl Checkpoint for Watched<'_> {
    fn config(&self) -> Result<(&'static Arch, Config), Error> {
        self.0.config()
    }
    fn is_gguf(&self) -> bool {
        self.0.is_gguf()
    }
    fn check(&self) -> Result<(), Error> {
        self.0.check()
    }
    fn missing_head(&self) -> Option<Error> {
        self.0.missing_head()
    }
    fn names(&self) -> Vec<String> {
        self.0.names()
    }
    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.0.shape(name)
    }
    fn tensor(&self, name: &str) -> Result<Tensor, Error> {
        self.1.borrow_mut().push(name.to_owned());
        self.0.tensor(name)
    }
    fn error(&self, name: &str, what: String) -> Error {
        self.0.error(name, what)
    }
    fn missing(&self, name: &str) -> Error {
        self.0.missing(name)
    }
}

#[test]
fn states_are_the_same_without_an_output() {
    let ids: Vec<u32> = (0..40).map(|i| i * 37 % 500).collect();
    for fixture in Fixture::all() {
        let gguf = fixture.gguf();
        let expected = states(&mut load(&gguf, &plain()), &ids);
        let watched = Watched(&gguf, RefCell::default());
        let mut model = load(&watched, &headless());
        assert_same(&states(&mut model, &ids), &expected, &fixture.name);
        let read = watched.1.into_inner();
        assert!(read.len() > 10 && !read.iter().any(|name| name.starts_with("output.")), "{read:?}");
        assert!(model.bytes_per_step() < load(&gguf, &plain()).bytes_per_step());
    }
}

#[test]
fn states_of_a_model_with_an_output() {
    let gguf = Fixture::named("llama-gqa").gguf();
    let mut model = load(&gguf, &plain());
    let expected = states(&mut model, &[5, 6, 7]);
    let mut kv = model.kv_cache(KvType::F32);
    let (seq, mut batch) = (kv.add(), Batch::default());
    batch.push(seq, 0, &[5, 6], Outputs::None);
    assert!(model.hidden(&batch, &mut kv).unwrap().is_empty());
    batch.clear();
    batch.push(seq, 2, &[7], Outputs::Last);
    let dim = model.config().dim;
    assert_same(model.hidden(&batch, &mut kv).unwrap(), &expected[2 * dim..], "the last row");
}

#[test]
fn logits_need_an_output() {
    let gguf = Fixture::named("llama-gqa").gguf();
    let mut model = load(&gguf, &headless());
    let mut kv = model.kv_cache(KvType::F32);
    let (seq, mut batch) = (kv.add(), Batch::default());
    batch.push(seq, 0, &[1], Outputs::Last);
    assert_eq!(model.forward(&batch, &mut kv).unwrap_err(), Error::NoHead);
    assert_eq!(kv.len(seq), Some(0), "nothing was computed");
    assert!(model.hidden(&batch, &mut kv).is_ok());
}

#[test]
fn folders_of_embedding_models() {
    for tied in [false, true] {
        let small = Small::dense("mistral").with("tie_word_embeddings", json!(tied));
        let small = small.with("architectures", json!(["MistralModel"]));
        let expected = states(&mut load(&small.made().folder(), &plain()), &tokens(20));
        let bare = small.clone().without_tensors("lm_head");
        for prefix in ["", "model.", "language_model.model."] {
            let made = bare.clone().renamed(|name| name.replacen("model.", prefix, 1)).made();
            let got = states(&mut load(&made.folder(), &headless()), &tokens(20));
            assert_same(&got, &expected, prefix);
            if !tied {
                let refusal = made.refusal();
                assert!(refusal.contains("lm_head.weight") && refusal.contains("embeddings only"), "{refusal}");
            }
        }
    }
    // What is left out is the output alone.
    let unread = Small::dense("llama").renamed(|name| name.replace("lm_head.weight", "lm_head.scale"));
    let error = Model::load(&unread.made().folder(), &headless(), &mut |_, _| {}).err().unwrap();
    assert!(error.to_string().contains("lm_head.scale"), "{error}");
    let missing = Small::dense("llama").without_tensors(&format!("layers.{}.mlp.up_proj", LAYERS - 1));
    let error = Model::load(&missing.made().folder(), &headless(), &mut |_, _| {}).err().unwrap();
    assert!(error.to_string().contains("up_proj"), "{error}");
}
