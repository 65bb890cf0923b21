//! Engines for models that are made.
#![allow(dead_code, clippy::unwrap_used)]

#[path = "../../../model/tests/support/maker.rs"]
pub mod maker;
pub mod oracle;

use crate::support::prompt;
use maker::Spec;
use puna::{Engine, EngineOptions};

/// A fixed sequence of pseudo-random numbers.
pub struct Rng(pub u64);

impl Rng {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 16
    }

    pub fn number(&mut self) -> f32 {
        let unit = (self.bits() & 0xff_ffff) as f32 / (1u32 << 24) as f32;
        (unit - 0.5) * 12f32.sqrt()
    }
}

/// An engine for a model.
pub fn made(spec: &Spec, options: &EngineOptions) -> Result<Engine, puna::Error> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("made.gguf");
    std::fs::write(&path, spec.builder().bytes()).unwrap();
    Engine::load(&path, options, &mut |_, _| {})
}

/// Tokens of the small vocabulary of such models.
pub fn small(n: usize, seed: u32) -> Vec<u32> {
    prompt(n, seed).into_iter().map(|id| id % 50).collect()
}
