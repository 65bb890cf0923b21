use puna_text::*;
use std::time::Instant;
fn rss() -> String {
    std::fs::read_to_string("/proc/self/status")
        .unwrap()
        .lines()
        .filter(|l| l.starts_with("VmHWM") || l.starts_with("VmRSS"))
        .map(|l| l.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect::<Vec<_>>()
        .join(" ")
}
fn main() {
    for name in ["llama-bpe", "llama-spm", "phi-3", "qwen2"] {
        let j: serde_json::Value =
            serde_json::from_slice(&std::fs::read(format!("/tmp/scratch/ggml-vocab-{name}.gguf.json")).unwrap())
                .unwrap();
        let g = |k: &str| &j[format!("tokenizer.ggml.{k}").as_str()];
        let strs = |k: &str| {
            g(k).as_array()
                .map(|a| a.iter().map(|s| s.as_str().unwrap().as_bytes()).collect::<Vec<_>>())
                .unwrap_or_default()
        };
        let id = |k: &str| g(k).as_u64().map(|x| x as u32);
        let spec = VocabSpec {
            model: g("model").as_str().unwrap(),
            pre: g("pre").as_str(),
            name: j["general.name"].as_str(),
            tokens: strs("tokens"),
            merges: strs("merges"),
            token_type: g("token_type").as_array().map(|a| a.iter().map(|x| x.as_i64().unwrap() as i32).collect()),
            scores: g("scores").as_array().map(|a| a.iter().map(|x| x.as_f64().unwrap() as f32).collect()),
            bos: id("bos_token_id"),
            eos: id("eos_token_id"),
            unk: id("unknown_token_id"),
            pad: id("padding_token_id"),
            add_bos: g("add_bos_token").as_bool(),
            add_eos: g("add_eos_token").as_bool(),
            ..Default::default()
        };
        let t = Instant::now();
        let tk = Tokenizer::from_vocab(&spec).unwrap();
        println!(
            "{name}: build {:?} {} {:?} eog {:?}",
            t.elapsed(),
            rss(),
            tk,
            tk.eog_ids().iter().map(|&i| tk.token_text(i).into_owned()).collect::<Vec<_>>()
        );
        let inp =
            std::fs::read_to_string(format!("/work/shared/fixtures/tokenizers/ggml-vocab-{name}.gguf.inp")).unwrap();
        let out =
            std::fs::read_to_string(format!("/work/shared/fixtures/tokenizers/ggml-vocab-{name}.gguf.out")).unwrap();
        let (mut ok, mut bad) = (0, 0);
        for (t, l) in inp.split("\n__ggml_vocab_test__\n").zip(out.split('\n')) {
            let want: Vec<u32> = l.split_whitespace().map(|x| x.parse().unwrap()).collect();
            let got = tk.encode(t, EncodeOptions { special: false, bos: AddBos::No }).unwrap();
            if got == want {
                ok += 1
            } else {
                bad += 1;
                println!("BAD {t:?}\n {got:?}\n {want:?}");
            }
            if tk.decode(&got) != t {
                println!("decode {t:?} {:?}", tk.decode(&got));
            }
        }
        println!("  {ok} ok {bad} bad");
        let text = std::fs::read_to_string("/usr/share/common-licenses/GPL-3").unwrap().repeat(30);
        let t = Instant::now();
        let ids = tk.encode(&text, EncodeOptions::default()).unwrap();
        let dt = t.elapsed();
        println!(
            "  {} bytes {} ids {:?} {:.2} MB/s {}",
            text.len(),
            ids.len(),
            dt,
            text.len() as f64 / 1e6 / dt.as_secs_f64(),
            rss()
        );
        let t = Instant::now();
        let d = tk.decode(&ids);
        println!("  decode {:?} {}", t.elapsed(), d.ends_with(&text));
        for s in [
            "a".repeat(10000),
            " ".repeat(10000),
            " ".repeat(2_000_000),
            "\n ".repeat(10000),
            "é".repeat(100000),
            "!".repeat(100000),
            "A".repeat(2_000_000),
            "1".repeat(1_000_000),
            "a".repeat(1_000_000),
        ] {
            let t = Instant::now();
            let e = tk.encode(&s, EncodeOptions::default()).unwrap();
            println!(
                "  {:?}x{} {} {:?} {}",
                &s[..s.chars().next().unwrap().len_utf8()],
                s.len(),
                e.len(),
                t.elapsed(),
                tk.decode_skip_special(&e) == s
            );
        }
    }
    for f in ["qwen2", "llama-bpe"] {
        let data = std::fs::read(format!("/tmp/scratch/ggml-vocab-{f}.gguf.tokenizer.json")).unwrap();
        let t = Instant::now();
        let tk = Tokenizer::from_hf(&HfFiles { tokenizer_json: Some(&data), ..Default::default() }).unwrap();
        println!("{f} json {:?} {} {tk:?}", t.elapsed(), rss());
    }
}
