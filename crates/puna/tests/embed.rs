//! Embeddings: equal to the reference's, and the same whatever else is computed with them.

#![allow(clippy::unwrap_used)]

#[path = "../../model/tests/gguf_builder/mod.rs"]
mod gguf_builder;

use gguf_builder::{self as gb, Builder};
use puna::sampler::PartialSampling;
use puna::{EmbedOptions, Engine, EngineOptions, Error, KvType, LoadOptions, ModelFiles, Pooling, Request};
use puna_model::Gguf;
use puna_text::EncodeOptions;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/models").join(name)
}

fn options(threads: usize, chunk: usize) -> EngineOptions {
    let load = LoadOptions { threads, head: false, ..LoadOptions::default() };
    EngineOptions { load, chunk, kv: KvType::F32, ..EngineOptions::default() }
}

fn load(path: &Path, options: &EngineOptions) -> Engine {
    Engine::load(path, options, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}"))
}

fn engine(name: &str, threads: usize, chunk: usize) -> Engine {
    load(&fixture(name).join("model-f32.gguf"), &options(threads, chunk))
}

fn pooled(pooling: Pooling) -> EmbedOptions {
    EmbedOptions { pooling: Some(pooling), ..EmbedOptions::default() }
}

fn text(n: usize, seed: u32) -> Vec<u32> {
    (0..n as u32).map(|i| (i * 7919 + seed * 131 + 13) % 500 + 3).collect()
}

fn ragged() -> Vec<Vec<u32>> {
    [5, 1, 64, 17, 100, 2, 33, 31, 1, 150].iter().zip(1..).map(|(&n, seed)| text(n, seed)).collect()
}

fn bits(embeddings: &[Vec<f32>]) -> Vec<Vec<u32>> {
    embeddings.iter().map(|e| e.iter().map(|x| x.to_bits()).collect()).collect()
}

#[test]
fn means_are_the_references() {
    let mut n = 0;
    for folder in std::fs::read_dir(fixture("")).unwrap().map(|entry| entry.unwrap().path()) {
        let bytes = std::fs::read(folder.join("golden.safetensors")).unwrap();
        let golden = SafeTensors::deserialize(&bytes).unwrap();
        let (ids, mean) = (golden.tensor("input_ids").unwrap(), golden.tensor("mean_pooled").unwrap());
        assert_eq!((ids.dtype(), mean.dtype()), (Dtype::I64, Dtype::F32));
        let ids: Vec<u32> = ids.data().as_chunks().0.iter().map(|b| i64::from_le_bytes(*b) as u32).collect();
        let mean: Vec<f32> = mean.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let mut engine = load(&folder.join("model-f32.gguf"), &options(2, 20));
        let got = engine.embed(&[ids], &pooled(Pooling::Mean)).unwrap().remove(0);
        assert_eq!(got.len(), mean.len());
        let worst = got.iter().zip(&mean).map(|(g, m)| (g - m).abs()).fold(0.0, f32::max);
        assert!(worst < 1e-5, "{}: {worst:e}", folder.display());
        n += 1;
    }
    assert!(n >= 6);
}

#[test]
fn alone_or_in_company() {
    for name in ["llama-gqa", "mistral-swa", "mixtral-moe", "llama-bias-yarn"] {
        for pooling in Pooling::ALL {
            for normalize in [Some(false), Some(true)] {
                let how = EmbedOptions { pooling: Some(pooling), normalize, ..EmbedOptions::default() };
                let mut alone = engine(name, 1, 512);
                let one = |text: &Vec<u32>| alone.embed(std::slice::from_ref(text), &how).unwrap().remove(0);
                let expected: Vec<Vec<f32>> = ragged().iter().map(one).collect();
                for (threads, chunk) in [(1, 512), (2, 7), (3, 64), (1, 1)] {
                    let got = engine(name, threads, chunk).embed(&ragged(), &how).unwrap();
                    let case = format!("{name}, {pooling}, {normalize:?}, {threads} threads, batches of {chunk}");
                    assert_eq!(bits(&got), bits(&expected), "{case}");
                }
            }
        }
    }
}

#[test]
fn what_is_pooled() {
    let mut engine = engine("llama-gqa", 1, 16);
    let mut embed = |text: &[u32], pooling| engine.embed(&[text.to_vec()], &pooled(pooling)).unwrap().remove(0);
    let long = text(40, 1);
    let first = embed(&long[..1], Pooling::Last);
    assert_eq!(embed(&long, Pooling::Cls), first, "in a causal model the first state knows the first token alone");
    assert_eq!(embed(&long[..1], Pooling::Mean), first);
    let states: Vec<Vec<f32>> = (1..=long.len()).map(|n| embed(&long[..n], Pooling::Last)).collect();
    let mean = |i: usize| (states.iter().map(|s| f64::from(s[i])).sum::<f64>() / long.len() as f64) as f32;
    assert_eq!(embed(&long, Pooling::Mean), (0..first.len()).map(mean).collect::<Vec<f32>>());
    let unit = EmbedOptions { normalize: Some(true), ..pooled(Pooling::Mean) };
    let unit = engine.embed(&[long], &unit).unwrap().remove(0);
    let square: f64 = unit.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    assert!((square - 1.0).abs() < 1e-6, "{square}");
    assert!(engine.embed(&[], &EmbedOptions::default()).unwrap().is_empty());
}

#[test]
fn texts_that_cannot_be_embedded() {
    let mut engine = load(&fixture("llama-gqa/model-f32.gguf"), &EngineOptions { ctx: Some(64), ..options(1, 16) });
    for (bad, expected) in [
        (vec![], Error::EmptyText),
        (text(65, 0), Error::TextTooLong { tokens: 65, ctx: 64 }),
        (vec![5, 512], Error::TokenId { id: 512, vocab: 512 }),
    ] {
        assert_eq!(engine.check_text(&bad).unwrap_err(), expected);
        let error = engine.embed(&[text(4, 0), bad, vec![]], &EmbedOptions::default()).unwrap_err();
        assert_eq!(error, Error::Embed { index: 1, source: Box::new(expected) });
    }
    let mut cut = text(65, 0);
    engine.truncate_text(&mut cut);
    assert_eq!(cut, text(65, 0)[..64]);
    assert_eq!(engine.embed(&[cut], &EmbedOptions::default()).unwrap().len(), 1);
}

#[test]
fn beside_answers() {
    let with_head = EngineOptions { load: LoadOptions { head: true, ..options(1, 8).load }, ..options(1, 8) };
    let path = fixture("llama-gqa/model-f32.gguf");
    let wishes = PartialSampling { temperature: Some(0.0), ignore_eos: Some(true), ..PartialSampling::default() };
    let answer = |embed: bool| {
        let mut engine = load(&path, &with_head);
        let mut request = Request::new(text(20, 5), engine.sampling(&wishes));
        request.max_tokens = Some(12);
        engine.add(request).unwrap();
        let (mut tokens, mut embeddings) = (Vec::new(), Vec::new());
        while !engine.is_idle() {
            tokens.extend(engine.step().unwrap().iter().filter_map(|event| event.token));
            if embed {
                embeddings.push(engine.embed(&ragged(), &pooled(Pooling::Last)).unwrap());
            }
        }
        (tokens, embeddings)
    };
    let (tokens, embeddings) = answer(true);
    assert_eq!(tokens, answer(false).0);
    let headless = load(&path, &options(1, 8)).embed(&ragged(), &pooled(Pooling::Last)).unwrap();
    assert!(embeddings.iter().all(|e| bits(e) == bits(&headless)));
    let mut headless = load(&path, &options(1, 8));
    let request = Request::new(text(3, 0), headless.sampling(&wishes));
    assert_eq!(headless.add(request).unwrap_err(), puna_model::Error::NoHead.into());
}

#[test]
fn gguf_files_say_how() {
    let gguf = Builder::read(&Gguf::open(fixture("qwen3-qknorm/model-f32.gguf")).unwrap());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let open = |builder: Builder| {
        std::fs::write(&path, builder.bytes()).unwrap();
        load(&path, &options(1, 64))
    };
    let how = EmbedOptions::default();
    for (number, pooling) in [(0, Pooling::Mean), (1, Pooling::Mean), (2, Pooling::Cls), (3, Pooling::Last)] {
        let mut engine = open(gguf.clone().with("qwen3.pooling_type", gb::u32(number)));
        assert_eq!(engine.resolve(&how).unwrap(), (pooling, false));
        assert_eq!(engine.resolve(&pooled(Pooling::Cls)).unwrap(), (Pooling::Cls, false));
        let (own, asked) = (engine.embed(&ragged(), &how), engine.embed(&ragged(), &pooled(pooling)));
        assert_eq!(bits(&own.unwrap()), bits(&asked.unwrap()));
    }
    let error = open(gguf.clone().with("qwen3.pooling_type", gb::u32(4))).resolve(&how).unwrap_err().to_string();
    assert!(error.contains("qwen3.pooling_type") && error.contains("rank"), "{error}");
    // A file that appends its end token, and says no more.
    let engine = open(gguf.with("tokenizer.ggml.add_eos_token", gb::bool(true)));
    assert_eq!(engine.resolve(&how).unwrap(), (Pooling::Last, false));
    check_end(&engine, 2);
}

/// Texts get their end token once, and keep it when they are cut.
fn check_end(engine: &Engine, end: u32) {
    let tokenizer = engine.tokenizer().unwrap();
    for text in ["", "a", "llamas graze ", "on the puna\n\n"] {
        let ids = tokenizer.encode(text, EncodeOptions::default()).unwrap();
        assert_eq!(ids.iter().filter(|&&id| id == end).count(), 1, "{text:?}: {ids:?}");
        assert_eq!(ids.last(), Some(&end));
    }
    let mut ids = tokenizer.encode(&"graze ".repeat(500), EncodeOptions::default()).unwrap();
    let whole = ids.clone();
    engine.truncate_text(&mut ids);
    let ctx = engine.config().context_length;
    assert_eq!((&ids[..ctx - 1], ids[ctx - 1], ids.len()), (&whole[..ctx - 1], end, ctx));
}

/// A folder as embedding models come: the fixture qwen3-qknorm without prefixes and without an output.
fn folder() -> tempfile::TempDir {
    let gguf = Gguf::open(fixture("qwen3-qknorm/model-f32.gguf")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let name = |name: &str| {
        let (base, end) = name.rsplit_once('.').unwrap();
        let base = match base {
            "token_embd" => "embed_tokens".to_owned(),
            "output_norm" => "norm".to_owned(),
            _ => base
                .replace("blk.", "layers.")
                .replace("attn_q_norm", "self_attn.q_norm")
                .replace("attn_k_norm", "self_attn.k_norm")
                .replace("attn_norm", "input_layernorm")
                .replace("attn_output", "self_attn.o_proj")
                .replace("ffn_norm", "post_attention_layernorm")
                .replace("attn_q", "self_attn.q_proj")
                .replace("attn_k", "self_attn.k_proj")
                .replace("attn_v", "self_attn.v_proj")
                .replace("ffn_gate", "mlp.gate_proj")
                .replace("ffn_up", "mlp.up_proj")
                .replace("ffn_down", "mlp.down_proj"),
        };
        format!("{base}.{end}")
    };
    let data: Vec<_> = gguf.tensors().map(|info| (info, gguf.data(info).unwrap())).collect();
    let tensors = data.iter().map(|(info, bytes)| {
        let shape = info.shape.iter().map(|&n| n as usize).collect();
        (name(&info.name), TensorView::new(Dtype::F32, shape, bytes).unwrap())
    });
    safetensors::serialize_to_file(tensors, None, &dir.path().join("model.safetensors")).unwrap();
    let config = json!({
        "architectures": ["Qwen3Model"], "model_type": "qwen3", "hidden_size": 80, "intermediate_size": 160,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 256, "tie_word_embeddings": false
    });
    write(&dir, "config.json", &config);
    let own = fixture("qwen3-qknorm/hf");
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(own.join(file), dir.path().join(file)).unwrap();
    }
    dir
}

fn write(dir: &tempfile::TempDir, file: &str, value: &Value) {
    let path = dir.path().join(file);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, value.to_string()).unwrap();
}

fn edit(dir: &tempfile::TempDir, file: &str, change: impl FnOnce(&mut Value)) {
    let mut value = serde_json::from_slice(&std::fs::read(dir.path().join(file)).unwrap()).unwrap();
    change(&mut value);
    write(dir, file, &value);
}

#[test]
fn folders_without_an_output() {
    let dir = folder();
    let mut engine = load(dir.path(), &options(1, 64));
    let expected = self::engine("qwen3-qknorm", 1, 64).embed(&ragged(), &EmbedOptions::default()).unwrap();
    assert_eq!(bits(&engine.embed(&ragged(), &EmbedOptions::default()).unwrap()), bits(&expected));
    let with_head = EngineOptions { load: LoadOptions::default(), ..options(1, 64) };
    let error = Engine::load(dir.path(), &with_head, &mut |_, _| {}).err().unwrap().to_string();
    assert!(error.contains("lm_head.weight"), "{error}");
}

#[test]
fn folders_append_their_end_token_once() {
    let dir = folder();
    let template = json!({"type": "Sequence", "processors": [
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        {"type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}}]});
    edit(&dir, "tokenizer.json", |json| json["post_processor"] = template);
    check_end(&load(dir.path(), &options(1, 64)), 0);
    // Said twice, it is still once.
    edit(&dir, "tokenizer_config.json", |json| {
        json["eos_token"] = json!("<|endoftext|>");
        json["add_eos_token"] = json!(true);
    });
    let engine = load(dir.path(), &options(1, 64));
    check_end(&engine, 0);
    assert_eq!(engine.resolve(&EmbedOptions::default()).unwrap(), (Pooling::Last, false));
}

#[test]
fn folders_say_how() {
    let dir = folder();
    let how = |dir: &tempfile::TempDir| {
        let files = ModelFiles::open(dir.path()).unwrap();
        files.embedding().map(|declared| (declared.pooling, declared.normalize)).map_err(|e| e.to_string())
    };
    assert_eq!(how(&dir), Ok((None, false)));
    let mode = |on: &[&str]| {
        let modes =
            ["cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"];
        let mut config = json!({"word_embedding_dimension": 80, "include_prompt": true});
        modes.iter().for_each(|mode| config[format!("pooling_mode_{mode}")] = json!(on.contains(mode)));
        config
    };
    let pooling = "1_Pooling/config.json";
    for (on, expected) in [("cls_token", Pooling::Cls), ("mean_tokens", Pooling::Mean), ("lasttoken", Pooling::Last)] {
        write(&dir, pooling, &mode(&[on]));
        assert_eq!(how(&dir), Ok((Some(expected), false)));
    }
    write(&dir, pooling, &json!({"pooling_mode": "lasttoken", "embedding_dimension": 80}));
    assert_eq!(how(&dir), Ok((Some(Pooling::Last), false)));
    for on in [&["max_tokens"][..], &["weightedmean_tokens"], &["cls_token", "mean_tokens"]] {
        write(&dir, pooling, &mode(on));
        let refusal = how(&dir).unwrap_err();
        assert!(refusal.contains(pooling) && refusal.contains("not supported"), "{refusal}");
    }
    let module = |name: &str, path: &str| json!({"name": "x", "path": path, "type": format!("sentence_transformers.models.{name}")});
    let modules = |last: Value| json!([module("Transformer", ""), module("Pooling", "9_Pooling"), last]);
    write(&dir, "9_Pooling/config.json", &mode(&["lasttoken"]));
    write(&dir, "modules.json", &modules(module("Normalize", "2_Normalize")));
    assert_eq!(how(&dir), Ok((Some(Pooling::Last), true)));
    let mut engine = load(dir.path(), &options(1, 64));
    assert_eq!(engine.resolve(&EmbedOptions::default()).unwrap(), (Pooling::Last, true));
    let own = engine.embed(&ragged(), &EmbedOptions::default()).unwrap();
    let asked = EmbedOptions { normalize: Some(true), ..pooled(Pooling::Last) };
    assert_eq!(bits(&own), bits(&engine.embed(&ragged(), &asked).unwrap()));
    write(&dir, "modules.json", &modules(module("Dense", "2_Dense")));
    assert!(how(&dir).unwrap_err().contains("Dense"));
    // Such a model runs, or is inspected, all the same; it does not embed.
    let error = load(dir.path(), &options(1, 64)).embed(&ragged(), &EmbedOptions::default()).unwrap_err();
    assert!(matches!(error, Error::Embedding { .. }), "{error}");
    for path in ["../1_Pooling", "/etc"] {
        write(&dir, "modules.json", &json!([module("Pooling", path)]));
        assert!(how(&dir).unwrap_err().contains("leads out"));
    }
    for odd in ["[1, null, {}]", "[", "{\"a\": 1", ""] {
        std::fs::write(dir.path().join("modules.json"), odd).unwrap();
        assert!(how(&dir).unwrap_err().contains("modules.json"), "{odd}");
    }
    std::fs::remove_file(dir.path().join("modules.json")).unwrap();
    write(&dir, pooling, &mode(&["mean_tokens"]));
    edit(&dir, "config.json", |json| json["auto_map"] = json!({"AutoModel": "modeling_qwen.Qwen2Model"}));
    assert!(how(&dir).unwrap_err().contains("modeling_qwen.Qwen2Model"));
}

#[test]
fn part_by_part_beside_answers() {
    let path = fixture("llama-gqa").join("model-f32.gguf");
    let mut both = load(
        &path,
        &EngineOptions { chunk: 16, load: LoadOptions { threads: 1, ..LoadOptions::default() }, ..options(1, 16) },
    );
    let texts = ragged();
    for pooling in Pooling::ALL {
        let expected = both.embed(&texts, &pooled(pooling)).unwrap();
        let wishes = PartialSampling { seed: Some(1), ignore_eos: Some(true), ..PartialSampling::default() };
        let request = Request { max_tokens: Some(40), ..Request::new(text(9, 5), both.sampling(&wishes)) };
        let mut alone = Vec::new();
        both.generate(request.clone(), |event| {
            alone.extend(event.token);
            true
        })
        .unwrap();
        for rows in [1, 5, 1000] {
            let mut job = both.embedding((&texts[..]).into(), &pooled(pooling)).unwrap();
            let (mut tokens, mut is_done) = (Vec::new(), false);
            both.add(request.clone()).unwrap();
            while !both.is_idle() || !is_done {
                assert!(both.spare_rows() >= 1);
                tokens.extend(both.step().unwrap().iter().filter_map(|event| event.token));
                is_done = is_done || both.advance(&mut job, rows).unwrap();
            }
            assert_eq!(tokens, alone);
            assert_eq!(bits(&job.into_embeddings()), bits(&expected));
        }
    }
}
