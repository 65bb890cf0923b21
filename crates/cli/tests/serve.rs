//! `puna serve` as a program: where it listens, what it answers, how it ends.

#![allow(clippy::unwrap_used)]
#![cfg(unix)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

fn model() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/models/qwen3-qknorm/model-f32.gguf")
}

/// A running program, which does not outlive the test.
struct Program {
    child: Child,
    address: String,
}

impl Program {
    fn start(arguments: &[&str]) -> Program {
        Program::of(Command::new(env!("CARGO_BIN_EXE_puna")).arg("serve"), arguments)
    }

    fn of(command: &mut Command, arguments: &[&str]) -> Program {
        let mut child = command
            .arg(model())
            .args(["--port", "0", "--threads", "1", "--ctx", "256"])
            .args(arguments)
            .env("PUNA_API_KEYS", "one,two")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("http://").unwrap().to_owned();
        Program { child, address }
    }

    fn wait(&self) {
        let start = Instant::now();
        while !self.ask("GET /health", "").starts_with("HTTP/1.1 200") {
            assert!(start.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn ask(&self, head: &str, body: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let length = body.len();
        write!(stream, "{head} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nauthorization: Bearer two\r\n")
            .unwrap();
        write!(stream, "content-length: {length}\r\n\r\n{body}").unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        reply
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn it_answers_and_ends_when_told() {
    let mut program = Program::start(&["--log-format", "json", "--alias", "other=model-f32"]);
    assert!(program.address.starts_with("127.0.0.1:"));
    program.wait();
    let body = r#"{"model": "other", "messages": [{"role": "user", "content": "a secret"}], "max_tokens": 3}"#;
    let reply = program.ask("POST /v1/chat/completions", body);
    assert!(reply.starts_with("HTTP/1.1 200") && reply.contains("\"chat.completion\""), "{reply}");
    let id = program.child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    assert!(program.child.wait().unwrap().success());
    let mut log = String::new();
    program.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    let lines: Vec<serde_json::Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let response = lines.iter().find(|line| line["path"] == "/v1/chat/completions").unwrap();
    assert_eq!((&response["status"], &response["level"]), (&serde_json::json!(200), &serde_json::json!("INFO")));
    assert!(!log.contains("a secret"));
}

/// A limit on the size of files stands for a disk that is full.
#[test]
fn a_prefix_that_does_not_fit_on_the_disk_leaves_no_file() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("prefixes");
    // One of an earlier run may be there.
    let _ = std::fs::remove_dir_all(&dir);
    let arguments = ["--state-dir", dir.to_str().unwrap(), "--log-level", "off"];
    let body = format!(r#"{{"prompt": "{}"}}"#, "once upon a time ".repeat(12));
    let shell = r#"trap '' XFSZ; ulimit -f 16; exec "$0" serve "$@""#;
    let mut limited = Command::new("sh");
    let program = Program::of(limited.args(["-c", shell, env!("CARGO_BIN_EXE_puna")]), &arguments);
    program.wait();
    let reply = program.ask("PUT /v1/prefixes/a", &body);
    assert!(reply.starts_with("HTTP/1.1 500") && reply.contains("prefix_not_written"), "{reply}");
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
    let reply = program.ask("POST /v1/completions", r#"{"prompt": "Once", "max_tokens": 1}"#);
    assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
    drop(program);
    // The same without the limit.
    let program = Program::start(&arguments);
    program.wait();
    let reply = program.ask("PUT /v1/prefixes/a", &body);
    assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
    assert!(std::fs::metadata(dir.join("a.kv")).unwrap().len() > 20_000);
}

#[test]
fn what_cannot_be_served_is_one_line() {
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_puna"))
            .args(["serve", "--log-level", "off", "--port", "0"])
            .args(arguments)
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    for (arguments, word) in [
        (vec!["/no/such/model.gguf"], "/no/such/model.gguf"),
        (vec!["/no/such/model.gguf", "--alias", "a=b"], "\"b\" is no loaded model"),
        (vec!["/no/such/model.gguf", "--api-key-file", "/no/such/keys"], "/no/such/keys"),
        (vec!["/no/such/model.gguf", "--cors", "example"], "no origin"),
        (vec!["/no/such/model.gguf", "--state-dir", "/dev/null/states"], "/dev/null/states"),
    ] {
        let (code, error) = run(&arguments);
        assert_eq!(code, Some(1), "{error}");
        assert!(error.starts_with("puna: ") && error.contains(word) && error.lines().count() == 1, "{error}");
    }
    assert_eq!(run(&[]).0, Some(2));
}

/// A variable that is meant to hold keys and holds none must not let everybody in.
#[test]
fn keys_of_the_environment_are_there_or_refused() {
    for keys in ["", ",", " , \n"] {
        let output = Command::new(env!("CARGO_BIN_EXE_puna"))
            .arg("serve")
            .arg(model())
            .args(["--port", "0", "--threads", "1", "--ctx", "256"])
            .env("PUNA_API_KEYS", keys)
            .output()
            .unwrap();
        assert!(!output.status.success() && output.stdout.is_empty(), "{keys:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("PUNA_API_KEYS") && said.contains("has no keys"), "{keys:?}: {said}");
    }
}
