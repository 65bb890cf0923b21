//! What requests change and see inside a model.

#![allow(clippy::unwrap_used)]

mod support;

use puna::ControlVector;
use puna_server::Options;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Instant;
use support::{Running, chat, model, options, send, with};

/// Directions of layer 1, far from nothing.
fn vector(dim: usize) -> ControlVector {
    let direction = (0..dim).map(|i| ((i * 7 % 11) as f32 - 5.0) * 2.0).collect();
    ControlVector::new("test", BTreeMap::from([(1, direction)])).unwrap()
}

fn bytes(vector: &ControlVector) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vector.gguf");
    vector.write(&path, "test", false).unwrap();
    std::fs::read(path).unwrap()
}

/// The width of the model of these tests.
const DIM: usize = 80;

fn steered() -> Options {
    let options = options(256);
    assert!(options.vectors.add("wild", vector(DIM)));
    assert!(options.vectors.add("narrow", vector(DIM / 2)));
    assert!(!options.vectors.add("wild", vector(DIM)));
    options
}

fn text(answer: &Value) -> String {
    answer["choices"][0]["message"]["content"].to_string()
}

fn wild(strength: f64) -> Value {
    json!({ "steering": [{ "vector": "wild", "strength": strength }] })
}

#[test]
fn answers_are_steered() {
    let server = Running::start(steered());
    let plain = text(&server.chat(json!({})));
    let other = text(&server.chat(wild(1.0)));
    assert_ne!(plain, other);
    // Parts add up; nothing is no steering; the cache tells prompts apart.
    let halves = json!({ "steering": [{ "vector": "wild", "strength": 0.5 }, { "vector": "wild", "strength": 0.5 }] });
    assert_eq!(text(&server.chat(halves)), other);
    assert_eq!(
        text(&server.chat(with(wild(1.0), json!({ "steering": [{ "vector": "wild", "layers": [1, 1] }] })))),
        other
    );
    for same in [wild(0.0), json!({ "steering": [] }), json!({ "steering": null })] {
        assert_eq!(text(&server.chat(same)), plain);
    }
    // Beside one another each says what it says alone.
    std::thread::scope(|scope| {
        let ask = |fields: Value| scope.spawn(|| text(&server.chat(fields)));
        let asked: Vec<_> = (0..4).map(|i| (i, ask(if i % 2 == 0 { json!({}) } else { wild(1.0) }))).collect();
        for (i, answer) in asked {
            assert_eq!(answer.join().unwrap(), if i % 2 == 0 { &*plain } else { &*other });
        }
    });
    let complete =
        |fields| server.complete(with(json!({ "temperature": 0, "logprobs": 1 }), fields))["choices"].clone();
    assert_ne!(complete(json!({})), complete(wild(1.0)));
    let embed = |fields| {
        let reply = server.post("/v1/embeddings", &with(json!({ "input": ["one", "two"] }), fields));
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()["data"].clone()
    };
    assert_ne!(embed(json!({})), embed(wild(1.0)));
    assert_eq!(embed(json!({})), embed(wild(0.0)));
}

#[test]
fn steering_that_cannot_be_done_is_refused_by_name() {
    let server = Running::start(steered());
    let wish = |fields| json!({ "steering": [{ "vector": "wild" }, with(json!({ "vector": "wild" }), fields)] });
    for (fields, param) in [
        (json!({ "steering": "wild" }), "steering"),
        (json!({ "steering": vec![json!({ "vector": "wild" }); 17] }), "steering"),
        (json!({ "steering": ["wild"] }), "steering[0]"),
        (json!({ "steering": [{}] }), "steering[0].vector"),
        (wish(json!({ "vector": "unknown" })), "steering[1].vector"),
        (wish(json!({ "vector": "narrow" })), "steering[1].vector"),
        (wish(json!({ "strength": "much" })), "steering[1].strength"),
        (wish(json!({ "strength": 1e30 })), "steering[1].strength"),
        (wish(json!({ "layers": [1] })), "steering[1].layers"),
        (wish(json!({ "layers": [2, 1] })), "steering[1].layers"),
        (wish(json!({ "layers": [0, 1] })), "steering[1].layers[0]"),
        (wish(json!({ "layers": [1, 99] })), "steering[1].layers"),
        (json!({ "timings": 1 }), "timings"),
        (json!({ "count_experts": true }), "count_experts"),
    ] {
        let body = chat(fields.clone());
        let reply = server.post("/v1/chat/completions", &body);
        assert_eq!((reply.status, reply.error()["param"].as_str()), (400, Some(param)), "{}", reply.text());
        if fields["steering"].is_null() {
            continue;
        }
        let reply = server.post("/v1/embeddings", &with(json!({ "input": "one" }), fields));
        assert_eq!((reply.status, reply.error()["param"].as_str()), (400, Some(param)), "{}", reply.text());
    }
}

#[test]
fn vectors_come_and_go() {
    let mut server = Running::start(steered());
    let upload =
        |server: &Running, name: &str, bytes: &[u8]| server.post_raw(&format!("/v1/control-vectors/{name}"), bytes);
    let delete =
        |server: &Running, name: &str| send(server.address, "DELETE", &format!("/v1/control-vectors/{name}"), &[], b"");
    let file = bytes(&vector(DIM));
    // Nobody may, unless the server is told so.
    assert_eq!(upload(&server, "mine", &file).status, 403);
    assert_eq!(delete(&server, "wild").status, 403);
    server.join().unwrap();
    let server = Running::start(Options { uploads: true, ..steered() });
    let ids = || {
        let list = server.get("/v1/control-vectors").json();
        let id = |entry: &Value| entry["id"].as_str().unwrap().to_owned();
        list["data"].as_array().unwrap().iter().map(id).collect::<Vec<_>>()
    };
    assert_eq!(ids(), ["narrow", "wild"]);
    let reply = upload(&server, "mine", &file);
    assert_eq!(reply.status, 200, "{}", reply.text());
    let expected = json!({ "id": "mine", "object": "control_vector", "dim": DIM, "layers": [1], "uploaded": true });
    assert_eq!(reply.json(), expected);
    assert_eq!(ids(), ["mine", "narrow", "wild"]);
    let mine = json!({ "steering": [{ "vector": "mine" }] });
    assert_eq!(text(&server.chat(mine.clone())), text(&server.chat(wild(1.0))));
    // What is there is not replaced, and what is no vector is not taken.
    for (name, bytes) in
        [("mine", &file[..]), ("wild", &file[..]), ("a%20b", &file[..]), ("broken", &file[..99]), ("none", b"")]
    {
        let reply = upload(&server, name, bytes);
        assert_eq!(reply.status, 400, "{name}");
        reply.error();
    }
    let model_file = std::fs::read(model(support::MODEL)).unwrap();
    assert_eq!(upload(&server, "model", &model_file).status, 400);
    assert_eq!((delete(&server, "wild").status, delete(&server, "nothing").status), (403, 404));
    assert_eq!(delete(&server, "mine").status, 200);
    assert_eq!(ids(), ["narrow", "wild"]);
    assert_eq!(server.post("/v1/chat/completions", &chat(mine)).status, 400);
}

#[test]
fn phases_add_up_to_the_time_that_passed() {
    let server = Running::small();
    let schema = json!({ "type": "object", "properties": { "a": { "enum": ["b", "c"] } }, "required": ["a"] });
    let fields = json!({
        "timings": true, "max_tokens": 64, "ignore_eos": false,
        "response_format": { "type": "json_schema", "json_schema": { "name": "x", "schema": schema } },
    });
    let start = Instant::now();
    let whole = server.chat(fields.clone());
    let passed = start.elapsed().as_secs_f64() * 1e3;
    let stream = server.post("/v1/chat/completions", &chat(with(fields, json!({ "stream": true })))).events();
    let complete = server.complete(json!({ "timings": true, "prompt": ["Once", "Twice"], "n": 2, "ignore_eos": true }));
    for (i, answer) in [&whole, stream.last().unwrap(), &complete].into_iter().enumerate() {
        let timings = &answer["timings"];
        for name in ["cache_n", "prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms"] {
            assert!(timings[name].is_number(), "{name}: {timings}");
        }
        let phases = timings["phases"].as_object().unwrap();
        let ms: f64 = phases.values().map(|phase| phase["ms"].as_f64().unwrap()).sum();
        let wall = timings["wall_ms"].as_f64().unwrap();
        assert!((ms - wall).abs() < 0.02 * wall, "{timings}");
        for name in ["tokenize", "qkv", "attention", "ffn", "head", "sampling", "detokenize"] {
            assert!(phases[name]["ms"].as_f64().unwrap() > 0.0, "{name}: {timings}");
        }
        assert!(phases["qkv"]["mb"].as_f64().unwrap() > 0.0);
        // What is said of the same time without a stopwatch, and what of it nobody measured.
        let of = |name: &str| timings[name].as_f64().unwrap();
        let engine = of("queue_ms") + of("prompt_ms") + of("predicted_ms");
        let beside = ["tokenize", "grammar", "detokenize", "write"]
            .map(|name| phases.get(name).map_or(0.0, |p| p["ms"].as_f64().unwrap()));
        assert!(wall >= engine && wall - engine <= beside.iter().sum::<f64>() + 0.02 * wall, "{timings}");
        let other = phases.get("other").map_or(0.0, |phase| phase["ms"].as_f64().unwrap());
        // The third request shared its steps.
        assert!(i == 2 || other <= 0.02 * wall, "{timings}");
    }
    assert!(whole["timings"]["wall_ms"].as_f64().unwrap() <= passed);
    assert!(whole["timings"]["phases"]["grammar"]["ms"].as_f64().unwrap() > 0.0);
    assert!(server.chat(json!({}))["timings"].get("phases").is_none());
}

#[test]
fn drafting_is_a_phase() {
    let mut options = options(256);
    // The model guesses for itself: always right.
    let by = puna::DraftBy::Model(model(support::MODEL));
    options.engine.draft = Some(puna::DraftOptions { by, max: 3, adaptive: false });
    let server = Running::start(options);
    let answer = server.chat(json!({ "timings": true, "max_tokens": 40 }));
    let timings = &answer["timings"];
    let phases = timings["phases"].as_object().unwrap();
    let ms = |name: &str| phases[name]["ms"].as_f64().unwrap();
    let sum: f64 = phases.values().map(|phase| phase["ms"].as_f64().unwrap()).sum();
    let wall = timings["wall_ms"].as_f64().unwrap();
    assert!((sum - wall).abs() < 0.02 * wall, "{timings}");
    // Three passes of the draft model beside each of the model, and as much again for the prompt.
    assert!(ms("draft") > 0.25 * (ms("qkv") + ms("ffn") + ms("head")) && ms("draft") < wall, "{timings}");
    assert!(ms("schedule") < ms("draft"), "{timings}");
    assert_eq!(text(&answer), text(&Running::small().chat(json!({ "max_tokens": 40 }))));
}

#[test]
fn experts_are_counted() {
    let server = Running::start(Options { models: vec![model("olmoe-small")], ..options(256) });
    let ask = |fields| {
        server.complete(with(
            json!({ "prompt": [5, 6, 7], "temperature": 0, "max_tokens": 4, "ignore_eos": true }),
            fields,
        ))
    };
    let sums = |answer: &Value| -> Vec<u64> {
        let layers = answer["experts"].as_array().unwrap();
        layers.iter().map(|layer| layer.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).sum()).collect()
    };
    let one = ask(json!({ "count_experts": true }));
    // Three tokens and three of the answer, three experts each; in the last layer only rows that get logits.
    assert_eq!(sums(&one), [18, 12]);
    let body = json!({ "prompt": [[5, 6, 7], [8, 9]], "max_tokens": 4, "ignore_eos": true, "count_experts": true, "stream": true });
    let stream = server.post("/v1/completions", &body).events();
    assert_eq!(sums(stream.last().unwrap()), [18 + 15, 24]);
    assert!(ask(json!({})).get("experts").is_none());
    server.wait_idle(std::time::Duration::from_secs(10));
    let metrics = server.get("/metrics").text();
    let of = |layer: usize| -> u64 {
        let layer = format!(",layer=\"{layer}\",expert=");
        let lines = metrics.lines().filter(|l| l.starts_with("puna_expert_tokens_total{") && l.contains(&layer));
        lines.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
    };
    assert_eq!((of(0), of(1)), (18 + 33 + 18, 12 + 24 + 12));
}
