//! Who may ask, how much, and how long; clients that go away, are slow, or say nothing.

#![allow(clippy::unwrap_used)]

mod support;

use puna_model::{Checkpoint, Gguf};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};
use support::{Running, begin, chat, read, read_chunk, read_head, send, with};

const CHAT: &str = "/v1/chat/completions";
const ENDLESS: usize = 100_000;

/// A server on which an answer can take minutes.
fn slow() -> puna_server::Options {
    support::options(ENDLESS)
}

fn endless(fields: Value) -> Value {
    chat(with(json!({ "max_tokens": ENDLESS }), fields))
}

fn start_stream(server: &Running, body: &Value) -> std::io::BufReader<TcpStream> {
    let mut stream = begin(server.address, "POST", CHAT, &[], body.to_string().as_bytes());
    assert_eq!(read_head(&mut stream).0, 200);
    assert!(read_chunk(&mut stream, &mut Vec::new()));
    stream
}

#[test]
fn keys_are_looked_at() {
    let mut options = support::options(256);
    options.keys = puna_server::Keys::parse("first\nsecond");
    let server = Running::start(options);
    let body = chat(json!({})).to_string();
    let ask = |header: Option<&str>| {
        let headers: Vec<(&str, &str)> = header.iter().map(|value| ("authorization", *value)).collect();
        send(server.address, "POST", CHAT, &headers, body.as_bytes())
    };
    assert_eq!(ask(Some("Bearer first")).status, 200);
    assert_eq!(ask(Some("bearer second")).status, 200);
    for wrong in [Some("Bearer third"), Some("Bearer "), Some("first"), Some("Basic first"), Some("é"), None] {
        let reply = ask(wrong);
        assert_eq!(reply.status, 401, "{wrong:?}");
        assert_eq!(reply.error()["type"], "authentication_error");
        assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
    }
    for (path, status) in [("/health", 200), ("/metrics", 200), ("/v1/models", 401), ("/slots", 401), ("/nothing", 401)]
    {
        assert_eq!(server.get(path).status, status, "{path}");
    }
}

#[test]
fn pages_of_other_origins_are_kept_out() {
    let headers = [("origin", "https://a.example")];
    let server = Running::small();
    let reply = send(server.address, "GET", "/v1/models", &headers, b"");
    assert_eq!(reply.header("access-control-allow-origin"), None);
    let mut options = support::options(256);
    options.cors = vec!["https://a.example".into()];
    options.keys = puna_server::Keys::parse("k");
    let server = Running::start(options);
    let asked =
        [headers[0], ("access-control-request-method", "POST"), ("access-control-request-headers", "authorization")];
    let reply = send(server.address, "OPTIONS", CHAT, &asked, b"");
    assert_eq!((reply.status, reply.header("access-control-allow-origin")), (200, Some("https://a.example")));
    let reply = send(server.address, "OPTIONS", CHAT, &[("origin", "https://b.example"), asked[1]], b"");
    assert_ne!(reply.header("access-control-allow-origin"), Some("https://b.example"));
}

#[test]
fn a_page_that_takes_this_machine_for_its_own_is_kept_out() {
    let get = |server: &Running, host: &str| send(server.address, "GET", "/v1/models", &[("host", host)], b"");
    let server = Running::small();
    for (host, status) in [("localhost:8080", 200), ("127.0.0.1", 200), ("evil.example:8080", 403)] {
        assert_eq!(get(&server, host).status, status, "{host}");
    }
    let reply = get(&server, "evil.example");
    let error = reply.error();
    assert_eq!((&error["type"], &error["code"]), (&json!("permission_error"), &json!("host_not_allowed")));
    assert!(error["message"].as_str().unwrap().contains("--allowed-host"), "{error}");
    // The page, the metrics and questions too; the name may also stand in the request's first line.
    for (method, path) in [("GET", "/"), ("GET", "/metrics"), ("GET", "http://evil.example/health"), ("POST", CHAT)] {
        let host = if path.starts_with("http") { "localhost" } else { "evil.example" };
        assert_eq!(send(server.address, method, path, &[("host", host)], b"{}").status, 403, "{method} {path}");
    }
    // Who is no browser need not say where it goes.
    let mut stream = TcpStream::connect(server.address).unwrap();
    stream.write_all(b"GET /health HTTP/1.0\r\n\r\n").unwrap();
    assert_eq!(read(&mut std::io::BufReader::new(stream)).status, 200);
    // Behind a proxy it has another name.
    let known = puna_server::Options { allowed_hosts: vec!["models.example".into()], ..support::options(256) };
    let server = Running::start(known);
    assert_eq!((get(&server, "models.example").status, get(&server, "evil.example").status), (200, 403));
    // A page of others has no key.
    let keys = puna_server::Options { keys: puna_server::Keys::parse("k"), ..support::options(256) };
    let server = Running::start(keys);
    assert_eq!(get(&server, "evil.example").status, 401);
    let headers = [("host", "models.example"), ("authorization", "Bearer k")];
    assert_eq!(send(server.address, "GET", "/v1/models", &headers, b"").status, 200);
}

#[test]
fn a_page_cannot_ask_what_it_cannot_read() {
    let ask = |server: &Running, headers: &[(&str, &str)]| {
        let body = chat(json!({})).to_string();
        send(server.address, "POST", CHAT, &[&[("content-type", "text/plain")], headers].concat(), body.as_bytes())
    };
    let evil = [("origin", "https://evil.example")];
    let server = Running::small();
    for headers in [&evil[..], &[("origin", "null"), ("sec-fetch-site", "cross-site")]] {
        let reply = ask(&server, headers);
        assert_eq!((reply.status, &reply.error()["code"]), (403, &json!("origin_not_allowed")));
    }
    let own = format!("http://{}", server.address);
    let host = server.address.to_string();
    assert_eq!(ask(&server, &[("host", &host), ("origin", &own)]).status, 200);
    assert_eq!(ask(&server, &[("origin", "null"), ("sec-fetch-site", "same-origin")]).status, 200);
    let server = Running::start(puna_server::Options { cors: vec![evil[0].1.into()], ..support::options(256) });
    assert_eq!(ask(&server, &evil).status, 200);
}

#[test]
fn a_client_that_goes_away_frees_its_sequence() {
    let server = Running::start(slow());
    // While its answer is streamed, while it waits for the whole answer, and with several answers.
    for body in [endless(json!({ "stream": true })), endless(json!({})), endless(json!({ "n": 3, "stream": true }))] {
        let stream = begin(server.address, "POST", CHAT, &[], body.to_string().as_bytes());
        let start = Instant::now();
        while server.metric("puna_requests_running") == 0.0 {
            assert!(start.elapsed() < Duration::from_secs(60));
        }
        drop(stream);
        server.wait_idle(Duration::from_secs(5));
    }
    assert_eq!(server.metric("puna_kv_cache_usage"), 0.0);
    let text = server.get("/metrics").text();
    let aborted = text.lines().find(|l| l.starts_with("puna_answers_total") && l.contains("abort")).unwrap();
    assert!(aborted.ends_with(" 5"), "{aborted}");
}

#[test]
fn one_that_waits_goes_away_too() {
    let mut options = slow();
    options.engine.max_running = 1;
    let server = Running::start(options);
    let first = start_stream(&server, &endless(json!({ "stream": true })));
    let second = begin(server.address, "POST", CHAT, &[], endless(json!({})).to_string().as_bytes());
    let start = Instant::now();
    while server.metric("puna_requests_waiting") == 0.0 {
        assert!(start.elapsed() < Duration::from_secs(60));
    }
    drop(second);
    while server.metric("puna_requests_waiting") > 0.0 {
        assert!(start.elapsed() < Duration::from_secs(60));
    }
    assert_eq!(server.metric("puna_requests_running"), 1.0);
    drop(first);
    server.wait_idle(Duration::from_secs(5));
    server.chat(json!({}));
}

#[test]
fn many_come_and_go() {
    let server = Running::start(slow());
    for i in 0..200 {
        let body = endless(json!({ "stream": i % 2 == 0 }));
        let mut stream = begin(server.address, "POST", CHAT, &[], body.to_string().as_bytes());
        if i % 4 == 0 {
            read_head(&mut stream);
        }
    }
    server.wait_idle(Duration::from_secs(20));
    let start = Instant::now();
    // The one that asks is one of them.
    while !server.get("/metrics").text().lines().any(|line| line == "puna_http_connections 1") {
        assert!(start.elapsed() < Duration::from_secs(20), "connections are left");
    }
    server.chat(json!({}));
}

#[test]
fn too_many_are_told_to_come_again() {
    let mut options = slow();
    (options.engine.max_running, options.limits.queue) = (1, 1);
    let server = Running::start(options);
    let held: Vec<_> = (0..2)
        .map(|_| begin(server.address, "POST", CHAT, &[], endless(json!({ "stream": true })).to_string().as_bytes()))
        .map(|mut stream| {
            assert_eq!(read_head(&mut stream).0, 200);
            stream
        })
        .collect();
    let reply = server.post(CHAT, &chat(json!({})));
    assert_eq!(reply.status, 429);
    assert_eq!((&reply.error()["code"], &reply.error()["type"]), (&json!("queue_full"), &json!("rate_limit_error")));
    assert!(reply.header("retry-after").unwrap().parse::<u64>().unwrap() >= 1);
    assert!(reply.header("retry-after-ms").unwrap().parse::<u64>().unwrap() >= 1);
    assert_eq!(reply.header("x-should-retry"), Some("true"));
    // What can never be taken is not told to come again.
    let reply = server.post(CHAT, &chat(json!({ "n": 3 })));
    assert_eq!((reply.status, &reply.error()["param"]), (400, &json!("n")));
    drop(held);
    server.wait_idle(Duration::from_secs(5));
    server.chat(json!({ "n": 2 }));
}

#[test]
fn when_to_come_again_depends_on_how_fast_answers_end() {
    let mut options = slow();
    (options.engine.max_running, options.limits.queue) = (2, 1);
    let server = Running::start(options);
    let wait = |n: usize| {
        let reply = server.post(CHAT, &chat(json!({ "n": n })));
        assert_eq!(reply.status, 429);
        let number = |name: &str| reply.header(name).unwrap().parse::<u64>().unwrap();
        assert_eq!(number("retry-after"), number("retry-after-ms").div_ceil(1000));
        number("retry-after-ms")
    };
    let start = Instant::now();
    let held: Vec<_> = (0..3)
        .map(|_| begin(server.address, "POST", CHAT, &[], endless(json!({ "stream": true })).to_string().as_bytes()))
        .map(|mut stream| {
            assert_eq!(read_head(&mut stream).0, 200);
            stream
        })
        .collect();
    std::thread::sleep(Duration::from_millis(1600));
    // None has ended so far.
    let (one, three) = (wait(1), wait(3));
    let most = start.elapsed().as_millis() as u64;
    assert!((1600..=most).contains(&one), "{one} of {most}");
    assert!((3 * one..=3 * most).contains(&three), "{three}, {one}");
    drop(held);
    server.wait_idle(Duration::from_secs(5));
    // Many have ended since, in no time.
    let first = start_stream(&server, &endless(json!({ "stream": true })));
    (0..8).for_each(|_| drop(server.chat(json!({ "max_tokens": 1, "n": 2 }))));
    assert_eq!(wait(3), 1000);
    drop(first);
}

#[test]
fn bodies_have_a_limit() {
    let mut options = support::options(256);
    options.limits.body = 10_000;
    let server = Running::start(options);
    let reply = server.post(CHAT, &chat(json!({ "user": "x".repeat(20_000) })));
    assert_eq!((reply.status, &reply.error()["type"]), (413, &json!("invalid_request_error")));
    // Its length is not always told.
    let mut stream = begin(server.address, "PUT", "/health", &[], b"");
    read(&mut stream);
    let mut stream = TcpStream::connect(server.address).unwrap();
    let head =
        format!("POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    for _ in 0..20 {
        let chunk = format!("3e8\r\n{}\r\n", " ".repeat(1000));
        if stream.write_all(chunk.as_bytes()).is_err() {
            break;
        }
    }
    assert_eq!(read(&mut std::io::BufReader::new(stream)).status, 413);
    server.chat(json!({ "user": "x".repeat(9000) }));
}

#[test]
fn slow_clients_stall_nobody() {
    let mut options = slow();
    options.limits.idle = Duration::from_millis(500);
    let server = Running::start(options);
    let connect = || TcpStream::connect(server.address).unwrap();
    let (silent, mut half) = (connect(), connect());
    half.write_all(
        format!("POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{{\"mess").as_bytes(),
    )
    .unwrap();
    let mut slow_head = connect();
    slow_head.write_all(b"GET /hea").unwrap();
    // It asks for more than sockets hold and reads none of it.
    let deaf = begin(
        server.address,
        "POST",
        CHAT,
        &[],
        endless(json!({ "stream": true, "logprobs": true, "top_logprobs": 20 })).to_string().as_bytes(),
    );
    server.chat(json!({}));
    let reply = read(&mut std::io::BufReader::new(half));
    assert_eq!((reply.status, &reply.error()["type"]), (408, &json!("timeout_error")));
    let ends = |mut stream: TcpStream| {
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut rest = Vec::new();
        // It may be cut off.
        let _ = stream.read_to_end(&mut rest);
    };
    ends(silent);
    ends(slow_head);
    server.wait_idle(Duration::from_secs(60));
    drop(deaf);
    server.chat(json!({}));
}

#[test]
fn silent_connections_make_room() {
    let mut options = slow();
    options.limits.connections = 8;
    let server = Running::start(options);
    // One that is answered keeps its place, whoever comes; those who say nothing, or begin and do not go on, do not.
    let mut stream = start_stream(&server, &endless(json!({ "stream": true })));
    let begun = format!("POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{{");
    let held: Vec<TcpStream> = ["", "GET /he", &*begun]
        .iter()
        .cycle()
        .take(30)
        .map(|text| {
            let mut stream = TcpStream::connect(server.address).unwrap();
            // It may be cut off already.
            let _ = stream.write_all(text.as_bytes());
            stream
        })
        .collect();
    let start = Instant::now();
    server.chat(json!({}));
    assert!(start.elapsed() < Duration::from_secs(20), "it waited for others to say something");
    assert!(read_chunk(&mut stream, &mut Vec::new()));
    drop(held);
}

#[test]
fn who_has_only_begun_to_ask_is_not_waited_for() {
    let mut server = Running::start(slow());
    let mut half = TcpStream::connect(server.address).unwrap();
    half.write_all(b"GET /hea").unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let start = Instant::now();
    assert!(server.join().is_ok());
    assert!(start.elapsed() < Duration::from_secs(20), "it took the whole grace time");
}

#[test]
fn half_closed_sockets() {
    let server = Running::start(slow());
    let stream = begin(server.address, "POST", CHAT, &[], endless(json!({ "stream": true })).to_string().as_bytes());
    stream.get_ref().shutdown(std::net::Shutdown::Write).unwrap();
    // Who will say nothing more counts as gone.
    server.wait_idle(Duration::from_secs(30));
    server.chat(json!({}));
}

#[test]
fn an_answer_that_takes_too_long_ends() {
    let mut options = slow();
    options.limits.request = Duration::from_millis(300);
    let server = Running::start(options);
    let reply = server.post(CHAT, &endless(json!({})));
    assert_eq!((reply.status, &reply.error()["code"]), (408, &json!("request_timeout")));
    assert_eq!(reply.header("x-should-retry"), Some("false"));
    let events = server.post(CHAT, &endless(json!({ "stream": true }))).events();
    let (last, chunks) = events.split_last().unwrap();
    assert_eq!(last["error"]["code"], "request_timeout");
    assert!(!chunks.is_empty());
    server.wait_idle(Duration::from_secs(5));
}

#[test]
fn a_stream_with_nothing_to_say_says_so() {
    let mut options = slow();
    options.engine.max_running = 1;
    options.limits.keep_alive = Duration::from_millis(20);
    let server = Running::start(options);
    let first = start_stream(&server, &endless(json!({ "stream": true })));
    let mut second = begin(server.address, "POST", CHAT, &[], chat(json!({ "stream": true })).to_string().as_bytes());
    assert_eq!(read_head(&mut second).0, 200);
    let mut body = Vec::new();
    assert!(read_chunk(&mut second, &mut body));
    assert_eq!(String::from_utf8_lossy(&body), ": keep-alive\n\n");
    drop(first);
    while read_chunk(&mut second, &mut body) {}
    let text = String::from_utf8(body).unwrap();
    assert!(text.contains("\n\ndata: {") && text.ends_with("data: [DONE]\n\n"));
}

#[test]
fn most_tokens_of_an_answer() {
    let mut options = support::options(256);
    options.limits.max_tokens = Some(5);
    let server = Running::start(options);
    for fields in [json!({ "max_tokens": 50 }), json!({ "max_tokens": null })] {
        assert_eq!(server.chat(fields)["usage"]["completion_tokens"], 5);
    }
    assert_eq!(server.chat(json!({ "max_tokens": 3 }))["usage"]["completion_tokens"], 3);
}

#[test]
fn running_requests_come_to_an_end() {
    let mut server = Running::start(slow());
    let body = chat(json!({ "stream": true, "max_tokens": 3000 }));
    let mut stream = begin(server.address, "POST", CHAT, &[], body.to_string().as_bytes());
    assert_eq!(read_head(&mut stream).0, 200);
    let mut text = Vec::new();
    assert!(read_chunk(&mut stream, &mut text));
    server.stop();
    while read_chunk(&mut stream, &mut text) {}
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains("\"finish_reason\":\"length\"") && text.ends_with("data: [DONE]\n\n"));
    assert!(server.join().is_ok());
    assert!(TcpStream::connect(server.address).is_err(), "it still listens");
}

#[test]
fn those_that_do_not_are_ended() {
    let mut options = slow();
    options.limits.grace = Duration::from_millis(200);
    let mut server = Running::start(options);
    let mut stream = start_stream(&server, &endless(json!({ "stream": true })));
    server.stop();
    let mut text = Vec::new();
    while read_chunk(&mut stream, &mut text) {}
    let text = String::from_utf8(text).unwrap();
    let error = text.lines().find(|line| line.starts_with("data: {\"error\"")).unwrap();
    let error: Value = serde_json::from_str(&error[6..]).unwrap();
    assert_eq!(error["error"]["type"], "service_unavailable_error");
    assert!(text.ends_with("data: [DONE]\n\n"));
    assert!(server.join().is_ok());
}

#[test]
fn a_model_that_cannot_be_loaded_ends_the_server() {
    let mut options = support::options(64);
    options.models = vec!["/no/such/model.gguf".into()];
    let mut server = Running::listen(options);
    let ended = server.wait();
    assert!(ended.unwrap_err().to_string().contains("/no/such/model.gguf"));
}

#[test]
fn an_engine_that_cannot_go_on_says_so_in_the_stream() {
    // The embedding of one token is broken, and is not the output too.
    let path = support::model("llama-gqa");
    let gguf = Gguf::open(&path).unwrap();
    let embedding = gguf.find("token_embd.weight").unwrap();
    let row = 4 * gguf.config().unwrap().1.dim;
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[embedding.offset as usize + 300 * row..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    let dir = tempfile::tempdir().unwrap();
    let broken = dir.path().join("broken.gguf");
    std::fs::write(&broken, bytes).unwrap();
    let mut options = support::options(256);
    options.models = vec![broken];
    let server = Running::start(options);
    // It is chosen, and what follows cannot be computed.
    let fields = json!({ "logit_bias": { "300": 100 } });
    let reply = server.post(CHAT, &chat(fields.clone()));
    assert_eq!((reply.status, &reply.error()["type"]), (500, &json!("server_error")));
    let events = server.post(CHAT, &chat(with(fields, json!({ "stream": true })))).events();
    let (last, chunks) = events.split_last().unwrap();
    assert!(last["error"]["message"].as_str().unwrap().contains("not finite"), "{last}");
    assert_eq!(chunks.len(), 1);
    server.chat(json!({}));
}

#[test]
fn slots_show_what_runs() {
    let server = Running::start(slow());
    let headers = [("x-request-id", "look-at-me")];
    let body = endless(json!({ "stream": true })).to_string();
    let mut stream = begin(server.address, "POST", CHAT, &headers, body.as_bytes());
    read_head(&mut stream);
    assert!((0..5).all(|_| read_chunk(&mut stream, &mut Vec::new())));
    let slots = server.get("/slots").json();
    let model = &slots["models"][0];
    assert_eq!((&model["model"], &model["state"]), (&json!("model-f32"), &json!("ready")));
    let slot = &model["slots"][0];
    assert_eq!((&slot["id"], &slot["state"], &slot["answers"]), (&json!("look-at-me"), &json!("running"), &json!(1)));
    assert!(slot["generated_tokens"].as_u64().unwrap() >= 5 && slot["tokens_per_second"].as_f64().unwrap() > 0.0);
    // What is asked is not shown.
    assert!(!slots.to_string().contains("Hello"));
    let props = server.get("/props").json();
    assert_eq!(props["models"][0]["max_model_len"], ENDLESS);
    assert!(server.get("/version").json()["version"].is_string());
    drop(stream);
    server.wait_idle(Duration::from_secs(5));
}

#[test]
fn metrics_that_gateways_read() {
    let server = Running::small();
    server.chat(json!({}));
    server.chat(json!({}));
    assert_eq!(server.metric("vllm:generation_tokens_total"), 16.0);
    // Who hears the end may be quicker than the gauges.
    server.wait_idle(Duration::from_secs(60));
    assert_eq!(server.metric("vllm:num_requests_running"), 0.0);
    assert_eq!(server.metric("vllm:num_requests_waiting"), 0.0);
    let usage = server.metric("vllm:kv_cache_usage_perc");
    assert!((0.0..=1.0).contains(&usage));
    assert_eq!(server.metric("vllm:time_to_first_token_seconds_count"), 2.0);
    assert_eq!(server.metric("vllm:inter_token_latency_seconds_count"), 14.0);
    let text = server.get("/metrics").text();
    for name in [
        "vllm:cache_config_info",
        "vllm:lora_requests_info",
        "vllm:prompt_tokens_total",
        "vllm:request_success_total",
        "vllm:num_preemptions_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:request_queue_time_seconds_count",
        "vllm:request_prefill_time_seconds_count",
        "vllm:request_decode_time_seconds_count",
        "vllm:request_inference_time_seconds_count",
        "vllm:request_prompt_tokens_count",
        "vllm:request_generation_tokens_count",
        "vllm:request_params_max_tokens_count",
        "vllm:request_params_n_count",
        "vllm:iteration_tokens_total_count",
        "puna_http_responses_total",
    ] {
        assert!(text.lines().any(|line| line.starts_with(&format!("{name}{{"))), "{name} is not there");
    }
    let info = text.lines().find(|line| line.starts_with("vllm:cache_config_info{")).unwrap();
    assert!(info.contains("block_size=\"32\"") && info.contains("num_gpu_blocks=\"") && info.ends_with(" 1"));
}
