//! SmolLM2-135M against values computed in float32 on its dequantized weights (testdata/real).

#![allow(clippy::unwrap_used)]

mod support;

use puna::sampler::{LogSoftmax, PartialSampling};
use puna::{Engine, EngineOptions, KvType, Request};
use puna_model::{Batch, Outputs};
use puna_text::EncodeOptions;
use serde_json::{Value, json};
use support::real::{self, ids};

fn load() -> Option<(Engine, Value)> {
    let engine = Engine::load(real::model()?, &EngineOptions::default(), &mut |_, _| {}).unwrap();
    Some((engine, real::reference()))
}

/// Logits of every position, `[T, vocab]`.
fn logits(engine: &mut Engine, ids: &[u32], kv: KvType) -> Vec<Vec<f32>> {
    let model = engine.model_mut();
    let vocab = model.config().vocab_size;
    let mut kv = model.kv_cache(kv);
    let mut batch = Batch::default();
    batch.push(kv.add(), 0, ids, Outputs::All);
    model.forward(&batch, &mut kv).unwrap().chunks_exact(vocab).map(<[f32]>::to_vec).collect()
}

fn argmax(row: &[f32]) -> u32 {
    (0..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best }) as u32
}

#[test]
fn predicts_texts_as_the_reference_does() {
    let Some((mut engine, reference)) = load() else { return };
    let (mut same, mut positions) = (0, 0);
    for text in reference["texts"].as_array().unwrap() {
        let expected = ids(&text["ids"]);
        if let Some(text) = text["text"].as_str() {
            let tokenizer = engine.tokenizer().unwrap();
            assert_eq!(tokenizer.encode(text, EncodeOptions::default()).unwrap(), expected);
        }
        let rows = logits(&mut engine, &expected, KvType::F16);
        let nll = |i: usize| -LogSoftmax::new(&rows[i]).unwrap().get(expected[i + 1]).unwrap();
        let mean = (0..rows.len() - 1).map(nll).sum::<f64>() / (rows.len() - 1) as f64;
        let wanted = text["mean_nll"].as_f64().unwrap();
        let bound = if expected.len() >= 1000 { 0.001 } else { 0.01 };
        println!("{} tokens: mean nll {mean:.5}, reference {wanted:.5}", expected.len());
        assert!((mean / wanted - 1.0).abs() < bound, "{} tokens: {mean} expected {wanted}", expected.len());
        for (row, &best) in rows.iter().zip(&ids(&text["argmax"])) {
            same += usize::from(argmax(row) == best);
            positions += 1;
        }
    }
    println!("{same} of {positions} positions have the reference's most likely token");
    assert!(same as f64 >= 0.96 * positions as f64, "{same} of {positions}");
}

#[test]
fn chats_as_the_reference_does() {
    let Some((mut engine, reference)) = load() else { return };
    for (i, chat) in reference["chats"].as_array().unwrap().iter().enumerate() {
        let messages = [json!({ "role": "user", "content": chat["user"] })];
        assert_eq!(engine.render_chat(&messages, None).unwrap(), chat["prompt"].as_str().unwrap());
        let prompt = engine.chat_prompt(&messages, None).unwrap();
        assert_eq!(prompt, ids(&chat["prompt_ids"]));
        let answer = ids(&chat["greedy_ids"]);
        let rows = logits(&mut engine, &[&prompt[..], &answer].concat(), KvType::F16);
        let margins = chat["margins"].as_array().unwrap().iter().map(|m| m.as_f64().unwrap());
        for ((row, &token), margin) in rows[prompt.len() - 1..].iter().zip(&answer).zip(margins) {
            assert!(margin <= 1.0 || argmax(row) == token, "chat {i}: token {token} by a margin of {margin}");
        }
        if i == 0 {
            let greedy = PartialSampling { temperature: Some(0.0), ..PartialSampling::default() };
            let mut text = String::new();
            let request = Request::new(prompt, engine.sampling(&greedy));
            engine
                .generate(request, |event| {
                    text.push_str(&event.text);
                    true
                })
                .unwrap();
            assert_eq!(text, chat["greedy_text"].as_str().unwrap());
        }
    }
}
