//! A server of a small model, and a small client: blocking sockets, one request a connection.
#![allow(dead_code, clippy::unwrap_used)]

pub mod schema;

use puna::{EngineOptions, LoadOptions};
use puna_server::{Error, Options, Server};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// A model with a byte-level vocabulary, a chat template and a token that ends turns.
pub const MODEL: &str = "qwen3-qknorm";

pub fn model(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/models").join(name).join("model-f32.gguf")
}

/// One thread, since tests run beside each other; a free port.
pub fn options(ctx: usize) -> Options {
    let load = LoadOptions { threads: 1, ..LoadOptions::default() };
    let engine = EngineOptions { load, ctx: Some(ctx), kv_bytes: Some(64 << 20), ..EngineOptions::default() };
    Options { engine, port: 0, ..Options::new(vec![model(MODEL)]) }
}

/// A server on a thread of its own; it ends with the value.
pub struct Running {
    pub address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<Result<(), Error>>>,
}

impl Running {
    /// A server that has loaded its models.
    pub fn start(options: Options) -> Running {
        let running = Running::listen(options);
        let start = Instant::now();
        while running.get("/health").status != 200 {
            assert!(start.elapsed() < Duration::from_secs(120), "the model is not loaded");
            std::thread::sleep(Duration::from_millis(5));
        }
        running
    }

    /// A server that may still be loading.
    pub fn listen(options: Options) -> Running {
        let (stop, stopped) = oneshot::channel::<()>();
        let (sender, address) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            runtime.block_on(async move {
                let server = Server::bind(&options).await?;
                sender.send(server.address()).unwrap();
                server.run(async { drop(stopped.await) }).await
            })
        });
        Running { address: address.recv().unwrap(), stop: Some(stop), thread: Some(thread) }
    }

    pub fn small() -> Running {
        Running::start(options(256))
    }

    /// Tells it to end.
    pub fn stop(&mut self) {
        drop(self.stop.take());
    }

    /// How it ended, told to.
    pub fn join(&mut self) -> Result<(), Error> {
        self.stop();
        self.wait()
    }

    /// How it ended of itself.
    pub fn wait(&mut self) -> Result<(), Error> {
        self.thread.take().unwrap().join().unwrap()
    }

    pub fn get(&self, path: &str) -> Reply {
        send(self.address, "GET", path, &[], b"")
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.post_raw(path, body.to_string().as_bytes())
    }

    pub fn post_raw(&self, path: &str, body: &[u8]) -> Reply {
        send(self.address, "POST", path, &[("content-type", "application/json")], body)
    }

    pub fn put(&self, path: &str, body: &Value) -> Reply {
        send(self.address, "PUT", path, &[("content-type", "application/json")], body.to_string().as_bytes())
    }

    pub fn delete(&self, path: &str) -> Reply {
        send(self.address, "DELETE", path, &[], b"")
    }

    /// A chat that must succeed.
    pub fn chat(&self, fields: Value) -> Value {
        let reply = self.post("/v1/chat/completions", &chat(fields));
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()
    }

    pub fn complete(&self, fields: Value) -> Value {
        let reply = self.post("/v1/completions", &with(json!({ "prompt": "Once" }), fields));
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()
    }

    /// The value of a metric's first series.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").text();
        let line = text.lines().find(|line| line.starts_with(&format!("{name}{{")));
        let line = line.unwrap_or_else(|| panic!("no metric {name}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// Waits until nothing runs or waits; panics if that takes too long.
    pub fn wait_idle(&self, patience: Duration) {
        let start = Instant::now();
        while self.metric("puna_requests_running") + self.metric("puna_requests_waiting") > 0.0 {
            assert!(start.elapsed() < patience, "requests are left: {}", self.get("/slots").text());
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// `base` with `fields` put in or replaced.
pub fn with(mut base: Value, fields: Value) -> Value {
    base.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    base
}

/// A greedy chat of a few tokens, with these fields beside.
pub fn chat(fields: Value) -> Value {
    let base = json!({
        "messages": [{ "role": "user", "content": "Hello" }], "temperature": 0, "max_tokens": 8, "ignore_eos": true,
    });
    with(base, fields)
}

#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Reply {
    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    /// The `error` object, which must be whole.
    #[track_caller]
    pub fn error(&self) -> Value {
        let value = self.json();
        let error = &value["error"];
        assert!(error["message"].as_str().is_some_and(|text| !text.is_empty()), "{value}");
        assert!(error["type"].is_string(), "{value}");
        assert!(error.get("param").is_some() && error.get("code").is_some(), "{value}");
        error.clone()
    }

    /// The objects of a stream, which must end as streams do.
    #[track_caller]
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.text());
        assert!(self.header("content-type").unwrap().starts_with("text/event-stream"));
        let text = self.text();
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
        // Clients read line by line.
        assert!(text.split("\n\n").all(|block| !block.contains('\n')), "{text}");
        let blocks = text.split_terminator("\n\n").filter(|block| !block.starts_with(':'));
        let data: Vec<&str> = blocks.map(|block| block.strip_prefix("data: ").unwrap()).collect();
        data[..data.len() - 1].iter().map(|json| serde_json::from_str(json).unwrap()).collect()
    }
}

/// Sends one request and reads all of the response.
pub fn send(address: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
    let mut stream = begin(address, method, path, headers, body);
    read(&mut stream)
}

/// Sends one request.
pub fn begin(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> BufReader<TcpStream> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let mut head = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\n");
    if !headers.iter().any(|(name, _)| *name == "host") {
        head += "host: localhost\r\n";
    }
    if matches!(method, "POST" | "PUT") {
        head += &format!("content-length: {}\r\n", body.len());
    }
    headers.iter().for_each(|(name, value)| head += &format!("{name}: {value}\r\n"));
    head += "\r\n";
    // A server that refuses a body early may have closed.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
    BufReader::new(stream)
}

/// Reads status and headers.
pub fn read_head(stream: &mut impl BufRead) -> (u16, Vec<(String, String)>) {
    let mut line = String::new();
    stream.read_line(&mut line).unwrap();
    let status = line.split(' ').nth(1).unwrap_or_else(|| panic!("no response: {line:?}")).parse().unwrap();
    let mut headers = Vec::new();
    loop {
        line.clear();
        stream.read_line(&mut line).unwrap();
        let Some((name, value)) = line.trim_end().split_once(": ") else { return (status, headers) };
        headers.push((name.to_lowercase(), value.to_owned()));
    }
}

/// Reads a response.
pub fn read(stream: &mut impl BufRead) -> Reply {
    let (status, headers) = read_head(stream);
    let mut body = Vec::new();
    if headers.iter().any(|(name, value)| name == "transfer-encoding" && value == "chunked") {
        while read_chunk(stream, &mut body) {}
    } else {
        let length = headers.iter().find(|(name, _)| name == "content-length").map(|(_, n)| n.parse().unwrap());
        stream.take(length.unwrap_or(u64::MAX)).read_to_end(&mut body).unwrap();
    }
    Reply { status, headers, body }
}

/// Reads a chunk of a body; false after the last one.
pub fn read_chunk(stream: &mut impl BufRead, body: &mut Vec<u8>) -> bool {
    let mut line = String::new();
    stream.read_line(&mut line).unwrap();
    let n = u64::from_str_radix(line.trim_end(), 16).unwrap_or_else(|_| panic!("no chunk: {line:?}"));
    stream.take(n).read_to_end(body).unwrap();
    line.clear();
    stream.read_line(&mut line).unwrap();
    n > 0
}
