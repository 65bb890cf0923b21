//! A folder and a GGUF file of the same model: the two roads end in the same logits. Folders are made from the GGUF
//! files of testdata, whose own reference values other tests compare with.

#![allow(clippy::unwrap_used)]

mod hf_maker;

use hf_maker::twin::{Twin, models, twins};
use hf_maker::{assert_same, logits};
use puna_model::{LoadOptions, Model, Source};
use std::path::Path;

fn load(source: &Source) -> Model {
    Model::load(source, &LoadOptions { threads: 1, ..LoadOptions::default() }, &mut |_, _| {}).unwrap()
}

#[test]
fn both_roads_give_the_same_logits() {
    let mut seen = Vec::new();
    for Twin { path, source, config: c, made } in twins() {
        let mut model = load(&source);
        let mut other = load(&Source::open(made.path()).unwrap());
        let tokens: Vec<u32> = (0..40).map(|i| (i * 37 + 5) % c.vocab_size as u32).collect();
        let (got, expected) = (logits(&mut other, &tokens), logits(&mut model, &tokens));
        let what = path.display().to_string();
        if c.rope.kind == "llama3" {
            // The file has divisors of frequencies, rounded; the folder what they are made from.
            let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
            let error = norm(&mut got.iter().zip(&expected).map(|(g, e)| g - e));
            assert!(error <= 1e-5 * norm(&mut expected.iter().copied()), "{what}: {error}");
        } else {
            assert_same(&got, &expected, &what);
        }
        let moe = if c.moe.is_some() { "moe" } else { "dense" };
        seen.extend([c.rope.kind, moe, if c.windows[0].is_some() { "window" } else { "no window" }]);
    }
    for kind in ["none", "linear", "yarn", "llama3", "moe", "window"] {
        assert!(seen.contains(&kind), "no model with {kind}");
    }
}

#[test]
fn a_model_is_opened_by_any_of_its_files() {
    let made = hf_maker::Small::dense("llama").made();
    for name in ["", "config.json", "model.safetensors"] {
        let source = Source::open(made.path().join(name)).unwrap();
        assert_eq!(source.folder().unwrap().path(), made.path().join("").as_path(), "{name}");
        assert!(source.gguf().is_none());
    }
    let file = &models()[0];
    assert_eq!(Source::open(file).unwrap().path(), file);
    let message = |path: &Path| Source::open(path).err().unwrap().to_string();
    assert!(message(&made.path().join("missing.safetensors")).contains("no such file"));
    assert!(message(&made.path().join("missing")).contains("no such file"));
    made.write("other", "{\"a\": 1}");
    assert!(message(&made.path().join("other")).contains("not a GGUF file"));
}
