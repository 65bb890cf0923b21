//! What tests of whole models share: random models, models of the project's testdata, and how they are run.
#![allow(dead_code, clippy::unwrap_used)]

pub mod golden;
pub mod maker;
pub mod prompt;
pub mod run;

use puna_model::Gguf;
use std::path::PathBuf;

/// A fixed sequence of pseudo-random numbers (SplitMix64).
pub struct Rng(pub u64);

impl Rng {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// A number of variance 1 around 0.
    pub fn number(&mut self) -> f32 {
        let unit = (self.bits() >> 40) as f32 / (1u32 << 24) as f32;
        (unit - 0.5) * 12f32.sqrt()
    }

    pub fn tokens(&mut self, n: usize, vocab_size: usize) -> Vec<u32> {
        (0..n).map(|_| self.below(vocab_size) as u32).collect()
    }
}

/// A model of the project's testdata, with reference values beside it.
pub struct Fixture {
    pub name: String,
    pub folder: PathBuf,
}

impl Fixture {
    /// All of them, found by looking: whoever adds a folder has it tested.
    pub fn all() -> Vec<Fixture> {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/models");
        let folders = std::fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().path());
        let mut all: Vec<Fixture> = folders
            .filter(|f| ["golden.safetensors", "model-f32.gguf"].iter().all(|file| f.join(file).exists()))
            .map(|folder| Fixture { name: folder.file_name().unwrap().to_str().unwrap().to_owned(), folder })
            .collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        assert!(all.len() >= 6, "{} models under {}", all.len(), root.display());
        all
    }

    pub fn named(name: &str) -> Fixture {
        Fixture::all().into_iter().find(|f| f.name == name).unwrap_or_else(|| panic!("no model {name}"))
    }

    pub fn gguf(&self) -> Gguf {
        Gguf::open(self.folder.join("model-f32.gguf")).unwrap()
    }
}
