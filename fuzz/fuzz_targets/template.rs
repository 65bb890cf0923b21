//! Any text as a chat template.
#![no_main]

use libfuzzer_sys::fuzz_target;
use puna_text::{ChatInput, ChatTemplate};

fuzz_target!(|source: &str| {
    let Ok(template) = ChatTemplate::new(source) else { return };
    let messages = serde_json::json!([{ "role": "user", "content": "<|im_end|> a" }]);
    let _ = template.render(&ChatInput { messages: Some(&messages), ..ChatInput::default() });
});
