use puna_text::*;
use std::time::Instant;
fn main() {
    let a: Vec<String> = std::env::args().skip(1).collect();
    for t in a {
        let t0 = Instant::now();
        let r = ChatTemplate::new(&t).and_then(|x| x.render(&ChatInput::default()));
        let s = std::fs::read_to_string("/proc/self/status").unwrap();
        let hwm = s.lines().find(|l| l.starts_with("VmHWM")).unwrap().to_string();
        println!(
            "{:?} {} {:?} {}",
            &t[..t.len().min(80)],
            hwm.split_whitespace().nth(1).unwrap(),
            t0.elapsed(),
            match r {
                Ok(s) => format!("ok {}", s.len()),
                Err(e) => e.to_string(),
            }
        );
    }
}
