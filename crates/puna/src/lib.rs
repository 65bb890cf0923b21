//! The engine: sequences, sampling, generation.
#![forbid(unsafe_code)]

pub mod sampler;
