use puna_text::*;
use serde_json::Value;
fn main() {
    let dir = std::path::Path::new("/work/shared/fixtures/chat");
    let (mut ok, mut bad) = (0, 0);
    for e in std::fs::read_dir(dir).unwrap() {
        let p = e.unwrap().path();
        if p.extension().unwrap() != "jinja" {
            continue;
        }
        let src = std::fs::read_to_string(&p).unwrap();
        let cases: Value = serde_json::from_slice(&std::fs::read(p.with_extension("cases.json")).unwrap()).unwrap();
        let t = ChatTemplate::new(&src).unwrap();
        for c in cases.as_array().unwrap() {
            let tools = Some(&c["tools"]).filter(|t| !t.is_null() && t.as_array().is_none_or(|a| !a.is_empty()));
            let t0 = std::time::Instant::now();
            let r = t.render(&ChatInput {
                messages: Some(&c["messages"]),
                tools,
                variables: c["variables"].as_object(),
                ..Default::default()
            });
            let dt = t0.elapsed();
            match (c["expected"].as_str(), r) {
                (Some(e), Ok(o)) if e == o => {
                    ok += 1;
                    if dt.as_millis() > 5 {
                        println!("slow {dt:?}")
                    }
                }
                (None, Err(e)) => {
                    ok += 1;
                    println!("{e}  <- {}", c["error"])
                }
                (e, o) => {
                    bad += 1;
                    println!("{:?} {}\n {e:?}\n {o:?}", p.file_name(), c["name"])
                }
            }
        }
    }
    println!("{ok} ok {bad} bad");
}
