//! What `puna bench` tells.

#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

fn testdata(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/models").join(name);
    path.to_str().unwrap().to_owned()
}

fn bench(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_puna")).arg("bench").args(args).output().unwrap()
}

/// The lines, and what else was told.
#[track_caller]
fn lines(args: &[&str]) -> (Vec<Value>, String) {
    let out = bench(args);
    assert!(out.status.success(), "{args:?}: {out:?}");
    let text = String::from_utf8(out.stdout).unwrap();
    (text.lines().map(|line| serde_json::from_str(line).unwrap()).collect(), String::from_utf8(out.stderr).unwrap())
}

fn tests(lines: &[Value]) -> Vec<&str> {
    lines.iter().map(|line| line["test"].as_str().unwrap()).collect()
}

#[test]
fn speeds_are_told() {
    let model = testdata("llama-gqa/model-f32.gguf");
    let (lines, _) = lines(&[&model, "-p", "20,9", "-n", "4", "-b", "1,3", "-d", "0,5", "-r", "2", "-t", "1"]);
    assert_eq!(tests(&lines), ["load", "pp20", "pp9", "tg4@d0", "tg4@d5", "b3"]);
    for line in &lines[1..] {
        let [min, median, max] = ["min_ts", "median_ts", "max_ts"].map(|name| line[name].as_f64().unwrap());
        assert!(0.0 < min && min <= median && median <= max, "{line}");
        assert_eq!((&line["threads"], &line["kv"]), (&1.into(), &"f16".into()));
    }
}

#[test]
fn drafts_are_compared_with_none() {
    let model = testdata("llama-gqa/model-f32.gguf");
    let text = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bench-draft.txt");
    std::fs::write(&text, "llamas graze on the puna ".repeat(4)).unwrap();
    let file = text.to_str().unwrap();
    for (by, name) in [("ngram", "ngram"), (&*model, "model")] {
        let args = [&model, "--draft", by, "--draft-max", "4", "-f", file, "-n", "60", "-b", "1,3", "-r", "2"];
        let (lines, table) = lines(&[&args[..], &["--profile"]].concat());
        assert_eq!(tests(&lines), ["load".to_owned(), format!("draft-{name}"), format!("draft-{name}-b3")]);
        for (line, n) in lines[1..].iter().zip([1, 3]) {
            let number = |name: &str| line[name].as_f64().unwrap_or_else(|| panic!("{name}: {line}"));
            // All tokens of both rounds but the first of each answer, unless the prompts began in different steps.
            let tokens = number("tokens");
            assert!(tokens == 2.0 * 59.0 * f64::from(n) || n > 1 && tokens > 100.0, "{line}");
            let (drafted, accepted) = (number("drafted"), number("accepted"));
            // Where guessing takes as long as saying there may be none.
            assert!(accepted <= drafted, "{line}");
            match line["accepted_share"].as_f64() {
                Some(share) => assert!((share - accepted / drafted).abs() < 1e-3, "{line}"),
                None => assert_eq!(drafted, 0.0, "{line}"),
            }
            // It guesses what it says itself.
            assert!(name == "ngram" || accepted == drafted, "{line}");
            let steps = tokens / number("tokens_per_step");
            assert!(steps <= tokens + 1.0 && steps >= tokens - accepted - 1.0, "{line}");
            let speedup = number("median_ts") / number("plain_ts");
            assert!((number("speedup") / speedup - 1.0).abs() < 0.01, "{line}");
            assert_eq!(line["draft_max"], 4);
        }
        assert!(table.contains(&format!("draft-{name}-b3:")), "{table}");
        assert!(table.lines().any(|line| line.trim_start().starts_with("draft ")), "{table}");
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    let model = testdata("llama-gqa/model-f32.gguf");
    for wrong in [&["--draft", "ngram", "-p", "5"][..], &["--draft", "ngram", "-d", "5"], &["-f", "x"]] {
        assert_eq!(bench(&[&[&*model], wrong].concat()).status.code(), Some(2), "{wrong:?}");
    }
    let other = testdata("llama3-rope-tied/model-f32.gguf");
    let out = bench(&[&model, "--draft", &other]);
    assert_eq!(out.status.code(), Some(1));
    assert!(String::from_utf8(out.stderr).unwrap().contains("token 0 is"));
}
