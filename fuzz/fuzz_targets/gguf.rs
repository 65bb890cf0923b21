//! Any bytes as a GGUF file: parsed, its metadata read, its weights bound.
#![no_main]

use libfuzzer_sys::fuzz_target;
use puna_model::{Gguf, arch, bind};

fuzz_target!(|data: &[u8]| {
    let Ok(gguf) = Gguf::parse("fuzz.gguf", data.to_vec().into()) else { return };
    for (_, value) in gguf.meta().iter() {
        let _ = value.to_string();
    }
    if let Ok((arch, config)) = arch::from_gguf(&gguf) {
        let _ = bind::bind(&gguf, arch, &config);
    }
});
