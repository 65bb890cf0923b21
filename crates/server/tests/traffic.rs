//! Many clients at once, some of whom go away: every answer that comes to its end is the one the request gets alone.

#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use support::{Running, begin, read_chunk, read_head, with};

const CLIENTS: usize = 16;
const REQUESTS: usize = 200;

/// A fixed sequence of pseudo-random numbers.
fn random(seed: usize, below: usize) -> usize {
    let x = (seed as u64).wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    ((x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 33) as usize % below
}

/// A request and where it goes.
fn request(i: usize) -> (&'static str, Value) {
    let text = format!("{} {}", "once upon a time ".repeat(random(i, 8)), random(i + 1000, 50));
    let sampling = match i % 3 {
        0 => json!({ "temperature": 0 }),
        _ => json!({ "temperature": 1, "top_k": 20, "seed": i }),
    };
    let limits = json!({ "max_tokens": 1 + random(i + 2000, 40), "ignore_eos": true, "n": 1 + i % 2 });
    match i % 4 {
        0 => ("/v1/completions", with(with(json!({ "prompt": text, "logprobs": 1, "echo": true }), sampling), limits)),
        3 => ("/v1/embeddings", json!({ "input": [text, "x"] })),
        _ => {
            let messages = json!([{ "role": "user", "content": text }]);
            ("/v1/chat/completions", with(with(json!({ "messages": messages, "logprobs": true }), sampling), limits))
        }
    }
}

/// What must be the same.
fn content(reply: &Value) -> Value {
    if reply["choices"].is_null() { reply["data"].clone() } else { reply["choices"].clone() }
}

#[test]
fn everybody_gets_the_answer_of_one_who_is_alone() {
    let mut options = support::options(512);
    // So little room that answers have to make room for each other.
    options.engine.kv_bytes = Some(3 << 20);
    options.engine.max_running = 12;
    let server = Running::start(options);
    let alone: Vec<Value> = (0..REQUESTS)
        .map(|i| {
            let (path, body) = request(i);
            let reply = server.post(path, &body);
            assert_eq!(reply.status, 200, "{}", reply.text());
            content(&reply.json())
        })
        .collect();
    let (next, compared) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (server, alone, next, compared) = (&server, &alone, &next, &compared);
            scope.spawn(move || {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    if i >= REQUESTS {
                        return;
                    }
                    let (path, body) = request(i);
                    if random(i + 3000, 4) == 0 {
                        leave(server, path, &body, i + client);
                    } else {
                        let reply = server.post(path, &body);
                        assert_eq!(reply.status, 200, "{}", reply.text());
                        assert_eq!(content(&reply.json()), alone[i], "request {i}: {body}");
                        compared.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    assert!(compared.load(Ordering::Relaxed) > REQUESTS / 2);
    server.wait_idle(Duration::from_secs(10));
    assert_eq!(server.metric("puna_kv_cache_usage"), 0.0);
}

/// Asks, and goes away at some point.
fn leave(server: &Running, path: &str, body: &Value, seed: usize) {
    let streams = path != "/v1/embeddings" && seed.is_multiple_of(2);
    let body = if streams { with(body.clone(), json!({ "stream": true })) } else { body.clone() };
    let mut stream = begin(server.address, "POST", path, &[], body.to_string().as_bytes());
    if streams {
        assert_eq!(read_head(&mut stream).0, 200);
        (0..seed % 5).all(|_| read_chunk(&mut stream, &mut Vec::new()));
    }
}
