//! Mixtures whose experts are read from their files as they are needed: what `/metrics` tells of that, and files that
//! change under a server.

#![allow(clippy::unwrap_used)]

mod support;

use puna::{Engine, EngineOptions, Error, LoadOptions};
use puna_model::Error as ModelError;
use puna_server::Options;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{BufReader, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};
use support::{MODEL, Running, begin, model, options, read_chunk, read_head, with};

const MIXTURE: &str = "mixtral-moe";
const COMPLETIONS: &str = "/v1/completions";
/// An answer of so many tokens takes minutes.
const ENDLESS: usize = 100_000;
const SERIES: [&str; 7] = [
    "expert_memory_bytes",
    "expert_hits_total",
    "expert_misses_total",
    "expert_prefetches_total",
    "expert_evictions_total",
    "expert_read_bytes_total",
    "expert_stall_seconds_total",
];

/// Bytes of an expert of the mixture in memory.
fn one() -> u64 {
    let load = LoadOptions { threads: 1, expert_memory: Some(1), ..LoadOptions::default() };
    match Engine::load(model(MIXTURE), &EngineOptions { load, ..EngineOptions::default() }, &mut |_, _| {}) {
        Err(Error::Model(ModelError::ExpertMemory { bytes: 1, needed })) => needed / 2,
        other => panic!("{:?}", other.map(drop)),
    }
}

/// A server of the mixture in a file, `mixture`, and of a dense model, `dense`.
fn serve(path: &Path, expert_memory: Option<u64>, ctx: usize) -> Running {
    let alias = |name: &str, path: &Path| (name.to_owned(), path.to_str().unwrap().to_owned());
    let aliases = vec![alias("mixture", path), alias("dense", &model(MODEL))];
    let mut options = Options { models: Vec::new(), aliases, ..options(ctx) };
    options.engine.load.expert_memory = expert_memory;
    Running::start(options)
}

fn series(server: &Running, model: &str) -> [f64; SERIES.len()] {
    let text = server.get("/metrics").text();
    SERIES.map(|name| {
        let start = format!("puna_{name}{{model_name=\"{model}\",");
        let line = text.lines().find(|line| line.starts_with(&start)).unwrap_or_else(|| panic!("no {start}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    })
}

fn ask(server: &Running, model: &str, fields: Value) -> Value {
    let base = json!({ "model": model, "prompt": [5], "max_tokens": 12, "ignore_eos": true, "logprobs": 1, "seed": 3 });
    server.complete(with(base, fields))
}

#[test]
fn what_is_read_is_counted() {
    let (path, one) = (model(MIXTURE), one());
    let resident = serve(&path, None, 256);
    let expected = ask(&resident, "mixture", json!({}))["choices"].clone();
    assert_eq!(series(&resident, "mixture"), [0.0; 7], "all experts are in memory");
    drop(resident);
    // 12 steps of a row, 2 layers, 2 experts each.
    let wanted = 12 * 2 * 2;
    for slots in [2, 5] {
        let server = serve(&path, Some(one * slots), 256);
        let mut before = series(&server, "mixture");
        assert_eq!(before, [(one * slots) as f64, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        for round in 1..=2 {
            let start = Instant::now();
            let answer = ask(&server, "mixture", json!({ "timings": true }));
            assert_eq!(answer["choices"], expected, "{slots} slots");
            server.wait_idle(Duration::from_secs(10));
            let now = series(&server, "mixture");
            let [_, hits, misses, ahead, evictions, bytes, stall] = now;
            assert_eq!(hits + misses, f64::from(round * wanted), "{now:?}");
            // One that was still on its way when it was wanted is both a miss and read ahead.
            let reads = bytes / one as f64;
            assert!(misses <= reads && reads <= misses + ahead && reads.fract() == 0.0, "{now:?}");
            // Slots are empty at first.
            assert_eq!(evictions, reads - slots as f64, "{now:?}");
            assert!(misses > 4.0 && (slots == 2 || hits > 0.0), "{now:?}");
            assert!(stall > before[6] && stall - before[6] < start.elapsed().as_secs_f64(), "{now:?}");
            let told = answer["timings"]["phases"]["expert_reads"]["mb"].as_f64().unwrap() * 1e6;
            assert!((told - (bytes - before[5])).abs() <= 12.0, "{told} of {now:?}");
            before = now;
        }
        ask(&server, "dense", json!({}));
        assert_eq!(series(&server, "dense")[1..], [0.0; 6]);
    }
}

fn start_stream(server: &Running, fields: Value) -> BufReader<TcpStream> {
    let base = json!({ "model": "mixture", "max_tokens": ENDLESS, "ignore_eos": true, "stream": true });
    let body = with(base, fields).to_string();
    let mut stream = begin(server.address, "POST", COMPLETIONS, &[], body.as_bytes());
    assert_eq!(read_head(&mut stream).0, 200);
    assert!(read_chunk(&mut stream, &mut Vec::new()));
    stream
}

/// The error that a stream ends with.
fn end_of(mut stream: BufReader<TcpStream>) -> Value {
    let mut rest = Vec::new();
    while read_chunk(&mut stream, &mut rest) {}
    let text = String::from_utf8(rest).unwrap();
    let text = text.strip_suffix("data: [DONE]\n\n").unwrap_or_else(|| panic!("{text}"));
    let last = text.trim_end().rsplit("\n\n").next().unwrap();
    serde_json::from_str::<Value>(last.strip_prefix("data: ").unwrap()).unwrap()["error"].clone()
}

/// Writes over a file's bytes.
fn write_over(path: &Path, bytes: &[u8]) {
    File::options().write(true).open(path).unwrap().write_all(bytes).unwrap();
}

/// Puts other bytes under a file's name.
fn replace(path: &Path, bytes: &[u8]) {
    let other = path.with_extension("new");
    fs::write(&other, bytes).unwrap();
    fs::rename(&other, path).unwrap();
}

#[test]
fn files_that_change_end_requests_and_not_the_server() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    fs::copy(model(MIXTURE), &path).unwrap();
    let whole = fs::read(&path).unwrap();
    let (all, half) = (whole.len(), whole.len() / 2);
    let other: Vec<u8> = whole.iter().map(|byte| byte ^ 1).collect();
    let server = serve(&path, Some(one() * 2), ENDLESS);
    let expected = ["mixture", "dense"].map(|name| ask(&server, name, json!({}))["choices"].clone());
    let changed = |what: &str| format!("a file of the model has changed since it was loaded: {what}");
    let another = changed("its content is another one");
    let length = |found: usize| changed(&format!("expected {all} bytes, found {found}"));
    type Change<'a> = &'a dyn Fn();
    let changes: [(Change, String); 7] = [
        (&|| File::options().write(true).open(&path).unwrap().set_len(1000).unwrap(), length(1000)),
        (&|| File::create(&path).map(drop).unwrap(), length(0)),
        (&|| replace(&path, &whole[..half]), length(half)),
        (&|| replace(&path, &other), another.clone()),
        (&|| write_over(&path, &other), another),
        (&|| File::options().append(true).open(&path).unwrap().write_all(b"more").unwrap(), length(all + 4)),
        (&|| fs::remove_file(&path).unwrap(), "a file of the model cannot be read: no such file".into()),
    ];
    for (i, (change, message)) in changes.iter().enumerate() {
        let greedy = start_stream(&server, json!({ "prompt": "Once upon a time", "temperature": 0 }));
        let sampled = start_stream(&server, json!({ "prompt": [9, 8, 7], "seed": 4, "n": 2 }));
        // Times of files may be as coarse as a tick of the system's clock.
        std::thread::sleep(Duration::from_millis(20));
        change();
        let body = json!({ "model": "mixture", "prompt": "Llamas live in the Andes", "max_tokens": 9 });
        let reply = server.post(COMPLETIONS, &body);
        assert_eq!(reply.status, 500, "{}", reply.text());
        let texts = json!({ "model": "mixture", "input": ["Llamas live in the Andes", "and so on"] });
        let vectors = server.post("/v1/embeddings", &texts);
        assert_eq!(vectors.status, 500, "{}", vectors.text());
        for error in [reply.error(), vectors.error(), end_of(greedy), end_of(sampled)] {
            let expected = json!({ "message": message, "type": "server_error", "param": null, "code": null });
            assert_eq!(error, expected, "change {i}");
        }
        server.wait_idle(Duration::from_secs(10));
        // One of the answers of a request with two ends it; the worker ends the other.
        let metrics = server.get("/metrics").text();
        let held = metrics.lines().find(|l| l.starts_with("puna_kv_cache_held_bytes{model_name=\"mixture\"")).unwrap();
        assert!(held.ends_with(" 0"), "{held}");
        assert_eq!(ask(&server, "dense", json!({}))["choices"], expected[1], "change {i}");
        // The right file again: in place, or under the name.
        if i % 2 == 0 {
            fs::write(&path, &whole).unwrap()
        } else {
            replace(&path, &whole)
        }
        assert_eq!(ask(&server, "mixture", json!({}))["choices"], expected[0], "change {i}");
    }
}
