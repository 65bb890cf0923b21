use puna_text::*;
fn main() {
    for a in std::env::args().skip(1) {
        println!("{:?}", ChatTemplate::new(&a).and_then(|t| t.render(&ChatInput::default())));
    }
}
