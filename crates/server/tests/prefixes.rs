//! Prefixes that are kept under names: they change nothing but how soon an answer begins.

#![allow(clippy::unwrap_used)]

mod support;

use puna::KvType;
use puna_server::Options;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};
use support::{Running, begin, chat, model, options, read_chunk, read_head, send, with};

fn kept_in(dir: &Path) -> Options {
    Options { state_dir: Some(dir.to_owned()), ..options(1024) }
}

fn system(n: usize) -> Value {
    json!({ "role": "system", "content": "You know all about the high plains of the Andes. ".repeat(n) })
}

/// A chat that goes on after the system message.
fn talk(n: usize, question: &str, fields: Value) -> Value {
    let messages = json!([system(n), { "role": "user", "content": question }]);
    with(json!({ "messages": messages, "logprobs": true, "max_tokens": 12 }), fields)
}

#[track_caller]
fn keep(server: &Running, name: &str, n: usize) -> Value {
    let reply = server.put(&format!("/v1/prefixes/{name}"), &json!({ "messages": [system(n)] }));
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

fn ids(server: &Running) -> Vec<String> {
    let list = server.get("/v1/prefixes").json();
    assert_eq!(list["object"], "list");
    list["data"].as_array().unwrap().iter().map(|entry| entry["id"].as_str().unwrap().to_owned()).collect()
}

fn files(dir: &Path) -> Vec<String> {
    let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut names: Vec<String> = fs::read_dir(dir).unwrap().map(name).collect();
    names.sort();
    names
}

/// Waits until nobody holds a block of the cache.
fn wait_free(server: &Running) {
    server.wait_idle(Duration::from_secs(60));
    let start = Instant::now();
    while server.metric("puna_kv_cache_held_bytes") > 0.0 {
        assert!(start.elapsed() < Duration::from_secs(60), "blocks are held");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Status, param and code of an error.
#[track_caller]
fn error(reply: &support::Reply) -> (u16, Value, Value) {
    let error = reply.error();
    (reply.status, error["param"].clone(), error["code"].clone())
}

fn ask(server: &Running, body: &Value) -> support::Reply {
    server.post("/v1/chat/completions", &chat(body.clone()))
}

#[test]
fn a_prefix_outlives_the_server_and_changes_no_answer() {
    let dir = tempfile::tempdir().unwrap();
    let expected = Running::start(options(1024)).chat(talk(3, "Who lives there?", json!({})))["choices"].clone();
    let mut server = Running::start(kept_in(&dir.path().join("states")));
    assert_eq!(ids(&server), [""; 0]);
    let made = keep(&server, "andes", 3);
    let tokens = made["tokens"].as_u64().unwrap();
    assert!(tokens >= 64 && tokens.is_multiple_of(32), "{made}");
    assert_eq!((&made["id"], &made["object"], &made["error"]), (&json!("andes"), &json!("prefix"), &Value::Null));
    assert_eq!(made["model"], server.get("/v1/models").json()["data"][0]["id"]);
    assert!(made["created"].as_u64().unwrap() > 1_600_000_000);
    let file = dir.path().join("states/andes.kv");
    assert_eq!(made["bytes"], fs::metadata(&file).unwrap().len());
    assert_eq!(server.get("/v1/prefixes/andes").json(), made);
    assert_eq!(server.get("/v1/prefixes").json()["data"], json!([made]));
    assert_eq!(server.metric("puna_prefix_saved_bytes_total") as u64, made["bytes"].as_u64().unwrap() - 32);
    // It is in the cache already.
    let answer = server.chat(talk(3, "Who lives there?", json!({ "prefix": "andes" })));
    assert_eq!((&answer["choices"], cached(&answer)), (&expected, tokens));
    assert_eq!(server.metric("puna_prefix_loaded_bytes_total"), 0.0);
    server.join().unwrap();

    let server = Running::start(kept_in(&dir.path().join("states")));
    assert_eq!(server.get("/v1/prefixes").json()["data"], json!([made]));
    // Many ask for it at once: it is loaded once.
    std::thread::scope(|scope| {
        let ask = |question| server.chat(talk(3, question, json!({ "prefix": "andes" })));
        let asked: Vec<_> = (0..8).map(|_| scope.spawn(move || ask("Who lives there?"))).collect();
        for answer in asked {
            let answer = answer.join().unwrap();
            assert_eq!(answer["choices"], expected);
            assert!(cached(&answer) >= tokens, "{answer}");
        }
    });
    let loaded = server.metric("puna_prefix_loaded_bytes_total");
    assert!(loaded > 0.0 && loaded < made["bytes"].as_f64().unwrap(), "{loaded}");
    // Streams and completions have it too.
    let body = chat(talk(3, "And why?", json!({ "prefix": "andes", "stream": true })));
    assert!(server.post("/v1/chat/completions", &body).events().len() > 2);
    assert_eq!(
        server.delete("/v1/prefixes/andes").json(),
        json!({ "id": "andes", "object": "prefix", "deleted": true })
    );
    assert_eq!(error(&server.delete("/v1/prefixes/andes")), (404, json!("name"), json!("prefix_not_found")));
    assert_eq!(error(&server.get("/v1/prefixes/andes")), (404, json!("name"), json!("prefix_not_found")));
    assert_eq!((ids(&server), files(&dir.path().join("states"))), (vec![], vec![]));
    let gone = ask(&server, &talk(3, "Who?", json!({ "prefix": "andes" })));
    assert_eq!(error(&gone), (404, json!("prefix"), json!("prefix_not_found")));
}

#[test]
fn tools_and_variables_of_the_template_are_part_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let parameters = json!({ "type": "object", "properties": { "place": { "type": "string" } } });
    let tool = json!({ "type": "function", "function": { "name": "weather", "parameters": parameters } });
    let made_of = json!({ "tools": [tool], "chat_template_kwargs": { "enable_thinking": false } });
    let mut server = Running::start(kept_in(dir.path()));
    let reply = server.put("/v1/prefixes/tools", &with(json!({ "messages": [system(2)] }), made_of.clone()));
    assert_eq!(reply.status, 200, "{}", reply.text());
    let plain = keep(&server, "plain", 2)["tokens"].as_u64().unwrap();
    let tokens = reply.json()["tokens"].as_u64().unwrap();
    assert!(tokens > plain);
    server.join().unwrap();
    let server = Running::start(kept_in(dir.path()));
    let answer = server.chat(with(talk(2, "Is it cold?", json!({ "prefix": "tools" })), made_of));
    assert_eq!(cached(&answer), tokens);
    // Without the tools the prompt is another one, and nothing of the prefix is taken.
    let before = server.metric("puna_prefix_loaded_bytes_total");
    let answer = server.chat(talk(2, "Is it cold?", json!({ "prefix": "tools" })));
    assert!(cached(&answer) < plain, "{answer}");
    assert_eq!(server.metric("puna_prefix_loaded_bytes_total"), before);
}

#[test]
fn texts_and_ids_are_prefixes_too() {
    let dir = tempfile::tempdir().unwrap();
    let text = "The llamas of the high plain go from well to well. ".repeat(2);
    let longer = format!("{text} And then");
    let expected = Running::start(options(1024)).complete(json!({ "prompt": longer, "temperature": 0 }));
    let mut server = Running::start(kept_in(dir.path()));
    let ids = server.post("/tokenize", &json!({ "prompt": text })).json()["tokens"].clone();
    for (name, prompt) in [("text", json!(text)), ("ids", ids)] {
        let reply = server.put(&format!("/v1/prefixes/{name}"), &json!({ "prompt": prompt }));
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    assert_eq!(fs::read(dir.path().join("text.kv")).unwrap(), fs::read(dir.path().join("ids.kv")).unwrap());
    server.join().unwrap();
    let server = Running::start(kept_in(dir.path()));
    let fields = |prompt: Value| json!({ "prompt": prompt, "temperature": 0, "prefix": "text" });
    let answer = server.complete(fields(json!(longer)));
    assert_eq!(answer["choices"], expected["choices"]);
    assert_eq!(cached(&answer), server.get("/v1/prefixes/text").json()["tokens"].as_u64().unwrap());
    // A prefix that is none of the prompt's gives nothing, and changes nothing.
    let other = server.complete(fields(json!("Something else")));
    assert_eq!(cached(&other), 0);
    assert_eq!(other["choices"], server.complete(json!({ "prompt": "Something else", "temperature": 0 }))["choices"]);
}

#[test]
fn wrong_requests_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let server = Running::start(kept_in(dir.path()));
    let (system, long) = (system(2), "x".repeat(65));
    for name in [".x", "a%2Fb", "..%2Fa", "a%20b", "%C3%A9", &long] {
        let path = format!("/v1/prefixes/{name}");
        for reply in [server.put(&path, &json!({ "messages": [system] })), server.get(&path), server.delete(&path)] {
            assert_eq!((reply.status, &reply.error()["param"]), (400, &json!("name")), "{name}: {}", reply.text());
        }
    }
    for (name, status) in [("", 400), ("../a", 400), (".x", 400), ("nothing", 404)] {
        let reply = ask(&server, &json!({ "prefix": name }));
        assert_eq!((reply.status, &reply.error()["param"]), (status, &json!("prefix")), "{name}: {}", reply.text());
    }
    for (body, param) in [
        (json!({}), "messages"),
        (json!({ "messages": [] }), "messages"),
        (json!({ "messages": [{ "role": "nobody" }] }), "messages[0].role"),
        (json!({ "messages": [system], "prompt": "x" }), "prompt"),
        (json!({ "prompt": ["a", "b"] }), "prompt"),
        (json!({ "prompt": "short" }), "prompt"),
        (json!({ "prompt": [1, 2, 999_999] }), "prompt"),
        (json!({ "prompt": "x".repeat(2000) }), "prompt"),
        (json!({ "messages": [system], "steering": [{ "vector": "a" }] }), "steering"),
        (json!({ "messages": [system], "tools": 1 }), "tools"),
    ] {
        let reply = server.put("/v1/prefixes/a", &body);
        assert_eq!((reply.status, &reply.error()["param"]), (400, &json!(param)), "{body}: {}", reply.text());
    }
    let reply = ask(&server, &json!({ "prefix": true }));
    assert_eq!((reply.status, &reply.error()["param"]), (400, &json!("prefix")));
    assert_eq!(files(dir.path()), [""; 0]);
    // Names that files can have.
    keep(&server, "A-1_b.c", 1);
    keep(&server, &"x".repeat(64), 1);
    assert_eq!(ids(&server), ["A-1_b.c", &*"x".repeat(64)]);
}

#[test]
fn without_a_folder_the_server_says_how_to_have_one() {
    let server = Running::small();
    let body = json!({ "messages": [system(2)] });
    for reply in [
        server.get("/v1/prefixes"),
        server.get("/v1/prefixes/a"),
        server.put("/v1/prefixes/a", &body),
        server.delete("/v1/prefixes/a"),
    ] {
        assert_eq!(error(&reply), (403, Value::Null, json!("prefixes_off")));
        assert!(reply.text().contains("--state-dir"), "{}", reply.text());
    }
    let reply = ask(&server, &json!({ "prefix": "a" }));
    assert_eq!(error(&reply), (400, json!("prefix"), json!("prefixes_off")));
    assert!(reply.text().contains("--state-dir"), "{}", reply.text());
    let reply = server.post("/v1/completions", &json!({ "prompt": "Once", "prefix": "a" }));
    assert_eq!(error(&reply), (400, json!("prefix"), json!("prefixes_off")));
    server.chat(json!({ "prefix": null }));
}

#[test]
fn there_is_room_for_so_many() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = kept_in(dir.path());
    options.limits.prefixes = 2;
    let server = Running::start(options);
    keep(&server, "a", 2);
    let size = keep(&server, "b", 2)["bytes"].as_u64().unwrap();
    let full = |server: &Running, name: &str, n: usize| {
        let reply = server.put(&format!("/v1/prefixes/{name}"), &json!({ "messages": [system(n)] }));
        assert_eq!(error(&reply), (400, Value::Null, json!("prefixes_full")), "{}", reply.text());
    };
    full(&server, "c", 2);
    // One that is there is replaced, and another's place is free when it is deleted.
    assert!(keep(&server, "b", 3)["bytes"].as_u64().unwrap() > size);
    server.delete("/v1/prefixes/a");
    keep(&server, "c", 2);
    assert_eq!(ids(&server), ["b", "c"]);
    drop(server);
    let mut options = kept_in(dir.path());
    let used: u64 =
        ["b", "c"].map(|name| fs::metadata(dir.path().join(format!("{name}.kv"))).unwrap().len()).iter().sum();
    options.limits.prefix_bytes = used + size;
    let server = Running::start(options);
    full(&server, "d", 3);
    keep(&server, "d", 2);
    full(&server, "e", 1);
    keep(&server, "d", 1);
    assert_eq!(files(dir.path()), ["b.kv", "c.kv", "d.kv"]);
}

#[test]
fn damaged_and_foreign_files_are_told_and_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut server = Running::start(kept_in(dir.path()));
    let made = keep(&server, "good", 3);
    keep(&server, "bad", 3);
    server.join().unwrap();
    let bad = dir.path().join("bad.kv");
    let mut bytes = fs::read(&bad).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&bad, &bytes).unwrap();
    fs::write(dir.path().join("text.kv"), "no state").unwrap();
    fs::write(dir.path().join("other.txt"), "no state either").unwrap();
    let refuse = |server: &Running, name: &str, what: &str| {
        let told = server.get(&format!("/v1/prefixes/{name}")).json();
        assert!(told["error"].as_str().unwrap().contains(what), "{told}");
        let reply = ask(server, &talk(3, "Who?", json!({ "prefix": name })));
        assert_eq!(error(&reply), (400, json!("prefix"), json!("prefix_unusable")), "{}", reply.text());
        assert!(
            reply.text().contains(what) && !reply.text().contains(dir.path().to_str().unwrap()),
            "{}",
            reply.text()
        );
        server.chat(json!({}));
        wait_free(server);
    };
    let server = Running::start(kept_in(dir.path()));
    assert_eq!(ids(&server), ["bad", "good", "text"]);
    refuse(&server, "bad", "it is damaged");
    refuse(&server, "text", "it is no saved state");
    assert_eq!(server.get("/v1/prefixes/good").json(), made);
    // A file that is damaged after it was looked at.
    fs::write(dir.path().join("good.kv"), &bytes[..middle]).unwrap();
    refuse(&server, "good", "truncated");
    // Made again, it is right again.
    keep(&server, "bad", 3);
    assert_eq!(server.chat(talk(3, "Who?", json!({ "prefix": "bad" })))["object"], "chat.completion");
    drop(server);
    // Another kind of cache, another model.
    let mut options = kept_in(dir.path());
    options.engine.kv = KvType::F32;
    let server = Running::start(options);
    refuse(&server, "bad", "its keys and values are kept as f16, those of the cache as f32");
    drop(server);
    let server = Running::start(Options { models: vec![model("llama-gqa")], ..kept_in(dir.path()) });
    let told = server.get("/v1/prefixes/bad").json();
    assert_eq!((&told["model"], &told["error"]), (&made["model"], &json!("it is of no model that is served")));
    let reply = server.post("/v1/completions", &json!({ "prompt": [1, 2, 3], "prefix": "bad" }));
    assert_eq!(error(&reply), (400, json!("prefix"), json!("prefix_unusable")), "{}", reply.text());
}

#[test]
fn a_prefix_is_of_one_of_several_models() {
    let dir = tempfile::tempdir().unwrap();
    let alias = |name: &str, path: &str| (name.to_owned(), model(path).to_str().unwrap().to_owned());
    let aliases = vec![alias("one", support::MODEL), alias("two", "mixtral-moe")];
    let options = || Options { models: Vec::new(), aliases: aliases.clone(), ..kept_in(dir.path()) };
    let mut server = Running::start(options());
    let prompt: Vec<u32> = (0..70).map(|i| 3 + i % 90).collect();
    for name in ["one", "two"] {
        let reply = server.put(&format!("/v1/prefixes/of-{name}"), &json!({ "model": name, "prompt": prompt }));
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!((&reply.json()["model"], &reply.json()["tokens"]), (&json!(name), &json!(64)));
    }
    let missing = server.put("/v1/prefixes/x", &json!({ "prompt": prompt }));
    assert_eq!((missing.status, &missing.error()["param"]), (400, &json!("model")));
    server.join().unwrap();
    let server = Running::start(options());
    let ask = |model: &str, prefix: &str| {
        let body = json!({ "model": model, "prompt": prompt, "prefix": prefix, "max_tokens": 2 });
        server.post("/v1/completions", &body)
    };
    assert_eq!(error(&ask("two", "of-one")), (400, json!("prefix"), json!("prefix_unusable")));
    for name in ["one", "two"] {
        let reply = ask(name, &format!("of-{name}"));
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(cached(&reply.json()), 64);
    }
}

#[test]
fn what_cannot_be_written_leaves_nothing() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("states");
    let server = Running::start(kept_in(&dir));
    fs::remove_dir(&dir).unwrap();
    let reply = server.put("/v1/prefixes/a", &json!({ "messages": [system(2)] }));
    assert_eq!((reply.status, reply.header("x-should-retry")), (500, Some("false")), "{}", reply.text());
    assert!(!reply.text().contains(parent.path().to_str().unwrap()), "{}", reply.text());
    // A name that is taken by what no file can replace.
    fs::create_dir_all(dir.join("a.kv")).unwrap();
    let reply = server.put("/v1/prefixes/a", &json!({ "messages": [system(2)] }));
    assert_eq!(error(&reply), (500, Value::Null, json!("prefix_not_written")), "{}", reply.text());
    assert_eq!(files(&dir), ["a.kv"]);
    wait_free(&server);
    fs::remove_dir(dir.join("a.kv")).unwrap();
    keep(&server, "a", 2);
}

#[test]
fn clients_that_go_away_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let server = Running::start(kept_in(dir.path()));
    let body = json!({ "messages": [system(15)] }).to_string();
    for i in 0..24 {
        let stream = begin(server.address, "PUT", "/v1/prefixes/a", &[], body.as_bytes());
        std::thread::sleep(Duration::from_millis(i * 7));
        drop(stream);
    }
    wait_free(&server);
    // It is there where one was faster than its client.
    let start = Instant::now();
    while files(dir.path()).iter().any(|name| name != "a.kv") {
        assert!(start.elapsed() < Duration::from_secs(60), "{:?} are left", files(dir.path()));
        std::thread::sleep(Duration::from_millis(5));
    }
    let made = keep(&server, "a", 15);
    assert_eq!(server.get("/v1/prefixes").json()["data"], json!([made]));
}

#[test]
fn streams_go_on_while_prefixes_come_and_go() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = kept_in(dir.path());
    options.engine.ctx = Some(100_000);
    let server = Running::start(options);
    let body = chat(json!({ "max_tokens": 100_000, "stream": true })).to_string();
    let mut stream = begin(server.address, "POST", "/v1/chat/completions", &[], body.as_bytes());
    assert_eq!(read_head(&mut stream).0, 200);
    std::thread::scope(|scope| {
        let kept = scope.spawn(|| {
            for i in 0..5 {
                let made = keep(&server, &format!("p{i}"), 4 + i);
                let answer = server.chat(talk(4 + i, "Who?", json!({ "prefix": format!("p{i}") })));
                assert_eq!(cached(&answer), made["tokens"], "{answer}");
            }
        });
        while !kept.is_finished() {
            assert!(read_chunk(&mut stream, &mut Vec::new()));
        }
        kept.join().unwrap();
    });
    assert!(read_chunk(&mut stream, &mut Vec::new()));
    drop(stream);
    server.wait_idle(Duration::from_secs(10));
    assert_eq!(ids(&server), ["p0", "p1", "p2", "p3", "p4"]);
}

/// Clients that make, use, look at and delete the same prefixes at once.
#[test]
fn the_same_name_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let lengths = [3, 4];
    let plain = Running::start(options(1024));
    let expected = lengths.map(|n| plain.chat(talk(n, "Who lives there?", json!({})))["choices"].clone());
    drop(plain);
    let server = Running::start(kept_in(dir.path()));
    let (server, expected, dir) = (&server, &expected, dir.path());
    std::thread::scope(|scope| {
        for client in 0..8 {
            scope.spawn(move || {
                for round in 0..6 {
                    let (name, which) = (["a", "b"][round % 2], (client + round) % 2);
                    let path = format!("/v1/prefixes/{name}");
                    match client % 4 {
                        // It tells what it has made, whatever became of it.
                        0 => assert!(keep(server, name, lengths[which])["tokens"].as_u64().is_some()),
                        1 => assert!([200, 404].contains(&server.delete(&path).status)),
                        2 => {
                            let told = server.get(&path);
                            assert!(told.status == 404 || told.json()["error"].is_null(), "{}", told.text());
                        }
                        _ => {
                            let fields = json!({ "prefix": name });
                            let reply = ask(server, &talk(lengths[which], "Who lives there?", fields));
                            match reply.status {
                                200 => assert_eq!(reply.json()["choices"], expected[which]),
                                _ => assert_eq!(error(&reply), (404, json!("prefix"), json!("prefix_not_found"))),
                            }
                        }
                    }
                }
            });
        }
    });
    wait_free(server);
    for (i, name) in ["a", "b"].into_iter().enumerate() {
        keep(server, name, lengths[i]);
        let answer = server.chat(talk(lengths[i], "Who lives there?", json!({ "prefix": name })));
        assert_eq!(answer["choices"], expected[i]);
    }
    assert_eq!(files(dir), ["a.kv", "b.kv"]);
}

#[test]
fn keys_and_limits_are_those_of_other_routes() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = kept_in(dir.path());
    options.keys = puna_server::Keys::parse("secret");
    options.limits.body = 1000;
    let server = Running::start(options);
    let put = |headers: &[(&str, &str)], n: usize| {
        let body = json!({ "messages": [system(n)] }).to_string();
        send(server.address, "PUT", "/v1/prefixes/a", headers, body.as_bytes()).status
    };
    assert_eq!(put(&[], 2), 401);
    assert_eq!(put(&[("authorization", "Bearer secret")], 40), 413);
    assert_eq!(put(&[("authorization", "Bearer secret")], 2), 200);
    assert_eq!(server.get("/v1/prefixes").status, 401);
    assert_eq!(server.delete("/v1/prefixes/a").status, 401);
    assert_eq!(files(dir.path()), ["a.kv"]);
}
