//! What models need not have, and what several of them share.

#![allow(clippy::unwrap_used)]

#[path = "../../model/tests/hf_maker/mod.rs"]
mod hf_maker;
mod support;

use hf_maker::{Made, twin};
use puna_model::{Checkpoint, Gguf};
use puna_server::Options;
use serde_json::json;
use support::{Running, chat, model, options};

/// A folder of a model whose output projection is left out and is not the embedding.
fn without_output() -> Made {
    let path = model("llama-gqa");
    let gguf = Gguf::open(&path).unwrap();
    let (_, c) = gguf.config().unwrap();
    let mut tensors = twin::tensors(&gguf, &c);
    let all = tensors.len();
    tensors.retain(|tensor| tensor.name != "lm_head.weight");
    let config = twin::config(&gguf, &c);
    assert!(tensors.len() + 1 == all && config["tie_word_embeddings"] == false);
    let made = Made::new(&config, &tensors);
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        made.write(name, std::fs::read(path.parent().unwrap().join("hf").join(name)).unwrap());
    }
    made
}

#[test]
fn a_model_without_output_makes_embeddings_only() {
    let made = without_output();
    let alias = |name: &str, path: std::path::PathBuf| (name.to_owned(), path.to_str().unwrap().to_owned());
    let aliases = vec![alias("whole", model("llama-gqa")), alias("bare", made.path())];
    let mut options = Options { models: Vec::new(), aliases, ..options(128) };
    options.engine.draft = Some(puna::DraftOptions { by: puna::DraftBy::Lookup, max: 4, adaptive: false });
    let server = Running::start(options);
    let embed = |name: &str| {
        let input = ["Once", "Llamas live in the Andes."];
        let reply = server.post("/v1/embeddings", &json!({ "model": name, "input": input }));
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()["data"].clone()
    };
    assert_eq!(embed("bare"), embed("whole"));
    for stream in [false, true] {
        let asked = [
            ("/v1/chat/completions", chat(json!({ "model": "bare", "stream": stream }))),
            ("/v1/completions", json!({ "model": "bare", "prompt": "Once", "stream": stream })),
            (
                "/v1/completions",
                json!({ "model": "bare", "prompt": "Once", "echo": true, "logprobs": 1, "max_tokens": 0 }),
            ),
        ];
        for (path, body) in asked {
            let reply = server.post(path, &body);
            assert_eq!(reply.status, 400, "{path}: {}", reply.text());
            let error = reply.error();
            assert_eq!((&error["param"], &error["code"]), (&json!("model"), &json!("embeddings_only")));
            let message = error["message"].as_str().unwrap();
            assert!(
                message.contains("bare has no output projection") && message.contains("/v1/embeddings"),
                "{message}"
            );
        }
    }
    assert_eq!(server.post("/tokenize", &json!({ "model": "bare", "prompt": "Once" })).status, 200);
    assert_eq!(server.get("/v1/models/bare").status, 200);
}

/// Most bytes of keys and values that each model of a server may have.
fn limits(options: Options) -> Vec<u64> {
    let server = Running::start(options);
    let models = server.get("/slots").json()["models"].clone();
    models.as_array().unwrap().iter().map(|model| model["kv_limit_bytes"].as_f64().unwrap() as u64).collect()
}

#[test]
fn free_memory_is_divided_once() {
    let dir = tempfile::tempdir().unwrap();
    let copy = |name: &str| {
        let path = dir.path().join(name);
        std::fs::copy(model(support::MODEL), &path).unwrap();
        path
    };
    let paths = [copy("a.gguf"), copy("b.gguf"), copy("c.gguf")];
    let some = |n: usize, free: Option<usize>| {
        let mut options = Options { models: paths[..n].to_vec(), ..options(64) };
        (options.engine.kv_bytes, options.engine.free_memory) = (None, free);
        limits(options)
    };
    let free = 96 << 20;
    let block = some(1, Some(0))[0] / 2;
    for n in 1..=3 {
        let expected = free / 2 / n;
        for limit in some(n, Some(free)) {
            assert!((expected as u64 - block..=expected as u64).contains(&limit), "{n}: {limit}");
        }
    }
    // As it is measured: the same for all, whenever one of them is loaded.
    let found = some(3, None);
    assert!(found[0] > 0 && found.iter().all(|limit| *limit == found[0]), "{found:?}");
    // One context at least.
    assert_eq!(some(2, Some(0)), [2 * block; 2]);
    let mut given = Options { models: paths.to_vec(), ..options(64) };
    given.engine.kv_bytes = Some(8 << 20);
    assert!(limits(given).iter().all(|limit| (8 << 20) - limit < block));
}

#[test]
fn one_that_cannot_be_loaded_keeps_nobody_waiting() {
    let dir = tempfile::tempdir().unwrap();
    let broken = dir.path().join("broken.gguf");
    std::fs::write(&broken, "GGUF").unwrap();
    for models in [vec![broken.clone(), model(support::MODEL)], vec![model(support::MODEL), broken]] {
        let mut options = Options { models, ..options(64) };
        options.engine.kv_bytes = None;
        let error = Running::listen(options).wait().unwrap_err().to_string();
        assert!(error.contains("broken.gguf"), "{error}");
    }
}
