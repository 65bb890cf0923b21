//! `puna embed` as a program.

#![allow(clippy::unwrap_used)]

use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/models").join(name)
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_puna"));
    command.arg("embed").arg(model("llama-gqa/model-f32.gguf")).args(args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn embed(args: &[&str], input: impl AsRef<[u8]>) -> Output {
    let mut child = command(args).spawn().unwrap();
    // A program that has failed does not read on.
    let _ = child.stdin.take().unwrap().write_all(input.as_ref());
    child.wait_with_output().unwrap()
}

#[track_caller]
fn lines(args: &[&str], input: impl AsRef<[u8]>) -> Vec<Value> {
    let out = embed(args, input);
    assert!(out.status.success() && out.stderr.is_empty(), "{out:?}");
    out.stdout.split(|&b| b == b'\n').filter(|l| !l.is_empty()).map(|l| serde_json::from_slice(l).unwrap()).collect()
}

fn numbers(line: &Value) -> Vec<f32> {
    line["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

#[test]
fn the_mean_is_the_references() {
    let bytes = std::fs::read(model("llama-gqa/golden.safetensors")).unwrap();
    let golden = SafeTensors::deserialize(&bytes).unwrap();
    let ids = golden.tensor("input_ids").unwrap();
    let ids: Vec<i64> = ids.data().as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect();
    let mean = golden.tensor("mean_pooled").unwrap();
    let mean: Vec<f32> = mean.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let got = lines(&["--pooling", "mean", "--input", "ids"], json!(ids).to_string());
    assert_eq!((&got[0]["index"], &got[0]["tokens"]), (&json!(0), &json!(ids.len())));
    let got = numbers(&got[0]);
    assert_eq!(got.len(), mean.len());
    assert!(got.iter().zip(&mean).all(|(g, m)| (g - m).abs() < 1e-5));
}

#[test]
fn every_line_is_a_text() {
    let texts: Vec<String> = (0..300).map(|i| "llamas graze on the puna ".repeat(i % 7) + &i.to_string()).collect();
    let all = lines(&[], texts.join("\n"));
    assert_eq!(all.len(), texts.len());
    for (i, line) in all.iter().enumerate() {
        assert_eq!(line["index"], json!(i));
    }
    for i in [0, 1, 150, 299] {
        let alone = lines(&["--threads", "1"], format!("{}\r\n", texts[i]));
        assert_eq!((alone.len(), &alone[0]["embedding"]), (1, &all[i]["embedding"]), "{i}");
    }
    let as_json: Vec<String> = texts.iter().map(|text| json!(text).to_string()).collect();
    assert_eq!(lines(&["--input", "json"], as_json.join("\n")), all);
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("embed-texts.txt");
    std::fs::write(&path, texts.join("\n")).unwrap();
    assert_eq!(lines(&["-f", path.to_str().unwrap()], ""), all);
    assert!(lines(&[], "").is_empty());
}

#[test]
fn vectors_of_length_one() {
    let length = |args: &[&str]| numbers(&lines(args, "the puna")[0]).iter().map(|x| x * x).sum::<f32>();
    assert!((length(&["--normalize"]) - 1.0).abs() < 1e-5);
    assert!(length(&[]) > 1.5 && length(&["--normalize", "--no-normalize"]) > 1.5);
}

#[test]
fn an_answer_does_not_wait_for_more() {
    let mut child = command(&[]).spawn().unwrap();
    let (mut input, mut output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
    for i in 0..3 {
        writeln!(input, "line {i}").unwrap();
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&line).unwrap()["index"], json!(i));
    }
    drop(input);
    assert!(child.wait().unwrap().success());
}

#[test]
fn lines_that_cannot_be_embedded() {
    let long = format!("[5]\n[{}3]", "3,".repeat(300));
    for (args, input, words) in [
        (&["--input", "ids"][..], "[5]\n[]\n", &["line 2", "no tokens"][..]),
        (&["--input", "ids"], "[5]\n[5, 512]\n[6]", &["line 2", "512"]),
        (&["--input", "ids"], "[5]\n[-1]", &["line 2", "token ids"]),
        (&["--input", "ids"], "[5]\nllamas", &["line 2", "token ids"]),
        (&["--input", "ids"], &long, &["line 2", "301 tokens", "256"]),
        (&["--input", "ids", "--ctx", "4"], "[5]\n[1,2,3,4,5]", &["line 2", "5 tokens", "holds 4"]),
        (&["--input", "json"], "\"a\"\nb", &["line 2", "JSON string"]),
    ] {
        let out = embed(args, input);
        let message = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(1), "{message}");
        assert_eq!(message.lines().count(), 1, "{message}");
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
        // What came before is there.
        assert_eq!(out.stdout.iter().filter(|&&b| b == b'\n').count(), 1, "{message}");
    }
    let out = embed(&[], b"good\n\xff\xfe\n");
    assert!(String::from_utf8(out.stderr).unwrap().contains("line 2: expected UTF-8"));
    let cut = lines(&["--input", "ids", "--ctx", "4", "--truncate"], "[1,2,3,4,5]\n[1,2,3,4]");
    assert_eq!(cut[0]["embedding"], cut[1]["embedding"]);
    assert_eq!(embed(&["--pooling", "max"], "").status.code(), Some(2));
}
