//! SmolLM2-135M, which is not part of the repository: `scripts/fetch-model` brings it. Where it is not at hand, tests say
//! so and pass.

use serde_json::Value;
use std::path::PathBuf;

/// Where the model is.
pub fn model() -> Option<PathBuf> {
    let cache = std::env::var_os("PUNA_CACHE").map(PathBuf::from).or_else(|| {
        let home = std::env::home_dir()?.join(".cache");
        Some(std::env::var_os("XDG_CACHE_HOME").map_or(home, PathBuf::from).join("puna"))
    });
    let fetched = cache.map(|c| c.join("SmolLM2-135M-Instruct.Q4_1.gguf"));
    let path = std::env::var_os("PUNA_TEST_MODEL").map(PathBuf::from).or(fetched).filter(|path| path.exists());
    if path.is_none() {
        eprintln!("skipped: no model; scripts/fetch-model fetches it");
    }
    path
}

/// Texts and chats with what was computed for them in float32.
pub fn reference() -> Value {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/real");
    serde_json::from_slice(&std::fs::read(root.join("smollm2-135m-q4_1.json")).unwrap()).unwrap()
}

/// Token ids of a list of numbers.
pub fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}
