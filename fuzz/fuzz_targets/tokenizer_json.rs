//! Any bytes as tokenizer.json.
#![no_main]

use libfuzzer_sys::fuzz_target;
use puna_text::{HfFiles, Tokenizer};

fuzz_target!(|data: &[u8]| {
    let files = HfFiles { tokenizer_json: Some(data), ..HfFiles::default() };
    if let Ok(tokenizer) = Tokenizer::from_hf(&files) {
        if let Ok(ids) = tokenizer.encode("a <s> bc\n1234", Default::default()) {
            let _ = tokenizer.decode(&ids);
        }
    }
});
