//! `puna batch` as a program.

#![allow(clippy::unwrap_used)]

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A place for one test.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Place {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("batch").join(name);
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Place(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Writes the questions.
    fn ask(&self, lines: &[Value]) {
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        fs::write(self.file("in.jsonl"), text).unwrap();
    }

    fn arguments(&self) -> [PathBuf; 3] {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/models/qwen3-qknorm/model-f32.gguf");
        [model, self.file("in.jsonl"), self.file("out.jsonl")]
    }

    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_puna"));
        command.arg("batch").args(self.arguments()).args(["--threads", "1", "--ctx", "512", "--parallel", "4"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn run(&self) -> Output {
        self.command().output().unwrap()
    }

    /// Starts, and waits until some answers are there.
    fn start(&self) -> Child {
        let child = self.command().spawn().unwrap();
        let start = Instant::now();
        while self.text().lines().count() < 5 {
            assert!(start.elapsed() < Duration::from_secs(120), "nothing is answered");
            std::thread::sleep(Duration::from_millis(1));
        }
        child
    }

    fn text(&self) -> String {
        fs::read_to_string(self.file("out.jsonl")).unwrap_or_default()
    }

    /// The answers by name; each must be there once.
    #[track_caller]
    fn answers(&self) -> BTreeMap<String, Value> {
        let mut answers = BTreeMap::new();
        for line in self.text().split_inclusive('\n') {
            assert!(line.ends_with('\n'), "a line is torn: {line}");
            let line: Value = serde_json::from_str(line).unwrap();
            if let Some(id) = line["custom_id"].as_str() {
                assert!(answers.insert(id.to_owned(), line["response"].clone()).is_none(), "{id} twice");
            }
        }
        answers
    }
}

fn question(id: &str, url: &str, body: Value) -> Value {
    json!({ "custom_id": id, "method": "POST", "url": url, "body": body })
}

fn chat(id: &str, text: &str, tokens: usize) -> Value {
    let messages = json!([{ "role": "user", "content": text }]);
    let body = json!({ "model": "m", "messages": messages, "max_tokens": tokens, "seed": 7, "ignore_eos": true });
    question(id, "/v1/chat/completions", body)
}

/// Enough work to be interrupted in.
fn many() -> Vec<Value> {
    (0..60).map(|i| chat(&format!("q{i}"), &format!("question {i}"), 20 + i * 5)).collect()
}

/// What does not depend on when and beside whom a line was answered.
fn content(response: &Value) -> Value {
    let body = &response["body"];
    let usage = (&body["usage"]["prompt_tokens"], &body["usage"]["completion_tokens"]);
    json!([response["status_code"], body["object"], body["model"], body["choices"], body["data"], usage])
}

fn error(out: &Output) -> String {
    assert_eq!(out.status.code(), Some(1), "{out:?}");
    String::from_utf8_lossy(&out.stderr).into_owned()
}

#[test]
fn answers_are_those_of_lines_alone() {
    let all = Place::new("all");
    let mut questions = many()[..8].to_vec();
    for i in 0..6 {
        let prompts = json!([format!("the puna {i}"), "llamas graze", [1, 2, 3]]);
        let body = json!({ "prompt": prompts, "max_tokens": 9, "n": 2, "seed": i, "logprobs": 2 });
        questions.push(question(&format!("c{i}"), "/v1/completions", body));
        let format = if i % 2 == 0 { "float" } else { "base64" };
        let body = json!({ "input": ["the puna", format!("text {i}").repeat(i + 1)], "encoding_format": format });
        questions.push(question(&format!("e{i}"), "/v1/embeddings", body));
    }
    all.ask(&questions);
    let out = all.run();
    assert!(out.status.success() && out.stdout.is_empty(), "{out:?}");
    let answers = all.answers();
    assert_eq!(answers.len(), questions.len());
    for (i, question) in questions.iter().enumerate().step_by(3) {
        let alone = Place::new(&format!("alone-{i}"));
        alone.ask(std::slice::from_ref(question));
        assert!(alone.run().status.success());
        let id = question["custom_id"].as_str().unwrap();
        assert_eq!(content(&alone.answers()[id]), content(&answers[id]), "{id}");
    }
    let (chat, embedding) = (&answers["q3"]["body"], &answers["e2"]["body"]);
    assert_eq!((&answers["q3"]["status_code"], &chat["object"]), (&json!(200), &json!("chat.completion")));
    assert_eq!(chat["usage"]["completion_tokens"], 35);
    assert!(chat["choices"][0]["message"]["content"].as_str().is_some_and(|text| !text.is_empty()));
    assert_eq!(embedding["data"].as_array().unwrap().len(), 2);
    assert_eq!(answers["c0"]["body"]["choices"].as_array().unwrap().len(), 6);
}

#[test]
fn faults_of_lines_stop_nothing() {
    let place = Place::new("faults");
    let text = json!([{ "role": "user", "content": "word ".repeat(600) }]);
    let many = chat("good", "hello", 5)["body"].clone();
    let with = |field: &str, value: Value| {
        let mut body = many.clone();
        body[field] = value;
        question(field, "/v1/chat/completions", body)
    };
    let lines = [
        "{\"custom_id\": \"torn".to_owned(),
        "[1, 2]".to_owned(),
        String::new(),
        json!({ "method": "POST" }).to_string(),
        chat("good", "hello", 5).to_string(),
        chat("good", "again", 5).to_string(),
        question("url", "/v1/images", json!({})).to_string(),
        json!({ "custom_id": "method", "method": "GET", "url": "/v1/completions", "body": {} }).to_string(),
        json!({ "custom_id": "body", "method": "POST", "url": "/v1/completions" }).to_string(),
        with("temperature", json!("hot")).to_string(),
        with("stream", json!(true)).to_string(),
        question("long", "/v1/chat/completions", json!({ "messages": text })).to_string(),
        question("empty", "/v1/embeddings", json!({ "input": ["a", ""] })).to_string(),
        format!("{}{{}}", " ".repeat(16 << 20)),
        chat("last", "hello", 5).to_string(),
    ];
    fs::write(place.file("in.jsonl"), lines.join("\r\n")).unwrap();
    let said = error(&place.run());
    assert!(said.contains("[14 lines, 12 failed"), "{said}");

    let status = |(id, response): (String, Value)| (id, response["status_code"].as_u64().unwrap());
    let statuses: BTreeMap<String, u64> = place.answers().into_iter().map(status).collect();
    let expected = [
        ("body", 400),
        ("empty", 400),
        ("good", 200),
        ("last", 200),
        ("long", 400),
        ("method", 405),
        ("stream", 400),
        ("temperature", 400),
        ("url", 404),
    ];
    assert_eq!(statuses, expected.map(|(id, status)| (id.to_owned(), status)).into());
    let answers = place.answers();
    let fault = &answers["long"]["body"]["error"];
    assert_eq!(fault["code"], "context_length_exceeded");
    assert!(fault["message"].as_str().unwrap().contains("512"), "{fault}");
    assert_eq!(answers["temperature"]["body"]["error"]["param"], "temperature");

    let text = place.text();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let nameless: BTreeMap<u64, (u64, String)> = lines
        .filter(|line| line["custom_id"].is_null())
        .map(|line| {
            let (error, status) = (&line["error"], line["response"]["status_code"].as_u64().unwrap());
            (error["line"].as_u64().unwrap(), (status, error["code"].as_str().unwrap().to_owned()))
        })
        .collect();
    let expected = [
        (1, 400, "invalid_json"),
        (2, 400, "invalid_request"),
        (4, 400, "invalid_request"),
        (6, 400, "duplicate_custom_id"),
        (14, 413, "invalid_request"),
    ];
    assert_eq!(nameless, expected.map(|(line, status, code)| (line, (status, code.to_owned()))).into());

    // Nothing is left to do; it failed all the same.
    let said = error(&place.run());
    assert!(said.contains("[0 lines, 14 earlier"), "{said}");
    assert_eq!(place.text(), text);
}

#[test]
fn what_was_killed_goes_on() {
    let (whole, killed) = (Place::new("whole"), Place::new("killed"));
    whole.ask(&many());
    assert!(whole.run().status.success());
    let expected: Vec<Value> = whole.answers().values().map(content).collect();

    killed.ask(&many());
    let mut child = killed.start();
    child.kill().unwrap();
    child.wait().unwrap();
    let before = killed.text();
    assert!((5..60).contains(&before.lines().count()));
    // As if power had failed in the middle of a line.
    fs::write(killed.file("out.jsonl"), format!("{before}{{\"id\":\"batch_req_99\",\"custom_id\":\"q5")).unwrap();
    let out = killed.run();
    assert!(out.status.success(), "{out:?}");
    assert!(killed.text().starts_with(&before));
    assert_eq!(killed.answers().values().map(content).collect::<Vec<_>>(), expected);
    // A beginning of the beginning of a line is cut off too.
    let text = killed.text();
    fs::write(killed.file("out.jsonl"), format!("{text}{{\"id")).unwrap();
    assert!(killed.run().status.success());
    assert_eq!(killed.text(), text);
}

#[test]
fn killed_at_any_moment_nothing_is_lost_or_twice() {
    let place = Place::new("again");
    let mut questions = many();
    for i in 0..20 {
        questions.insert(3 * i, question(&format!("e{i}"), "/v1/embeddings", json!({ "input": format!("text {i}") })));
    }
    place.ask(&questions);
    let (mut rounds, mut before) = (0u64, String::new());
    let out = loop {
        rounds += 1;
        let mut child = place.command().spawn().unwrap();
        // From before there is a file until after the last line, more at every round.
        std::thread::sleep(Duration::from_millis(rounds * rounds * 7919 % (20 * rounds)));
        if rounds > 40 || child.try_wait().unwrap().is_some() {
            break child.wait_with_output().unwrap();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        // A line that was being written may be there in part.
        let text = place.text();
        let whole = &text[..text.rfind('\n').map_or(0, |at| at + 1)];
        assert!(whole.starts_with(&before), "what was there has changed in round {rounds}");
        before = whole.to_owned();
    };
    assert!(out.status.success(), "{out:?}");
    assert!(rounds > 3 && place.text().starts_with(&before), "{rounds} rounds");
    let answers = place.answers();
    assert_eq!(answers.len(), questions.len());
    assert_eq!(place.text().lines().count(), questions.len());
    assert!(answers.values().all(|response| response["status_code"] == 200));
}

#[cfg(unix)]
#[test]
fn ctrl_c_leaves_whole_lines() {
    let place = Place::new("interrupted");
    place.ask(&many());
    let child = place.start();
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    let said = error(&child.wait_with_output().unwrap());
    assert!(said.contains("interrupted; the same command goes on"), "{said}");
    let before = place.answers().len();
    assert!((5..60).contains(&before), "{before}");
    assert!(place.run().status.success());
    assert_eq!(place.answers().len(), 60);
}

#[cfg(unix)]
#[test]
fn a_full_disk_loses_nothing() {
    let place = Place::new("full");
    place.ask(&many());
    // Files may have 16 blocks: what is written then is cut off, as on a disk that is full.
    let arguments = place.command();
    let mut limited = Command::new("sh");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 16; exec \"$@\"", "sh"]).arg(arguments.get_program());
    let said = error(&limited.args(arguments.get_args()).output().unwrap());
    assert!(said.contains("too large") && said.contains("goes on after them"), "{said}");
    let before = place.text();
    assert!(!before.is_empty() && place.answers().len() < 60);
    let out = place.run();
    assert!(out.status.success(), "{out:?}");
    assert!(place.text().starts_with(&before));
    assert_eq!(place.answers().len(), 60);

    let [model, input, _] = place.arguments();
    let full = Path::new("/dev/full");
    if fs::metadata(full).is_ok_and(|file| std::os::unix::fs::FileTypeExt::is_char_device(&file.file_type())) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_puna"));
        let said = error(&command.arg("batch").args([&model, &input]).arg(full).output().unwrap());
        assert!(said.contains("/dev/full: No space left"), "{said}");
    }
}

#[test]
fn files_of_somebody_else_stay() {
    let place = Place::new("else");
    place.ask(&many());
    for text in ["my notes", "my notes\n", "{\"id\":1}\n", "{\"id\":\"batch_req_1\",\"custom_id\":\"q1\"}\n"] {
        fs::write(place.file("out.jsonl"), text).unwrap();
        let said = error(&place.run());
        assert!(said.contains("line 1 is not an answer of a batch"), "{said}");
        assert_eq!(place.text(), text);
    }
    let questions = fs::read(place.file("in.jsonl")).unwrap();
    let [model, input, _] = place.arguments();
    let mut command = Command::new(env!("CARGO_BIN_EXE_puna"));
    error(&command.arg("batch").arg(model).args([&input, &input]).output().unwrap());
    assert_eq!(fs::read(input).unwrap(), questions);
}
