//! A warm model computes without a single heap allocation, on any thread. One test, since every thread counts.

#![allow(clippy::unwrap_used)]

mod gguf_builder;
mod support;

use puna_kernels::{DType, KV_BLOCK, KvType};
use puna_model::{Batch, Gguf, LoadOptions, Outputs};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, Stats, StatsAlloc};
use std::alloc::System;
use support::maker::{Experts, Spec};
use support::run::{Run, plain};
use support::{Fixture, Rng};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Calls to the allocator, of any kind.
fn calls(stats: &Stats) -> usize {
    stats.allocations + stats.reallocations + stats.deallocations
}

/// Sequences that go on by `rows` tokens a step, `steps` times; gives the lengths before the steps that called the
/// allocator, and how often.
fn steps(run: &mut Run, seqs: usize, rows: usize, steps: usize) -> Vec<(usize, Stats)> {
    let tokens = Rng(1).tokens(rows, run.vocab_size());
    let ids: Vec<_> = (0..seqs).map(|_| run.kv.add()).collect();
    let mut batch = Batch::default();
    let mut found = Vec::with_capacity(steps);
    for step in 0..steps {
        let region = Region::new(ALLOCATOR);
        batch.clear();
        for &seq in &ids {
            batch.push(seq, step * rows, &tokens, Outputs::Last);
        }
        let logits = run.model.forward(&batch, &mut run.kv).unwrap();
        assert_eq!(logits.len(), seqs * run.model.config().vocab_size);
        let change = region.change();
        if calls(&change) > 0 {
            found.push((step * rows, change));
        }
    }
    ids.into_iter().for_each(|seq| run.kv.remove(seq));
    found
}

/// [`steps`] of which none from position `warm` on calls the allocator, but for blocks that are missing where
/// `grows`. A worker that the system starts late allocates once, so there are a few attempts where there are workers;
/// what a step allocates, it allocates in each.
#[track_caller]
fn quiet(run: &mut Run, (seqs, rows, n): (usize, usize, usize), warm: usize, grows: bool, what: &str) {
    let mut late = Vec::new();
    let attempts = if run.model.threads() == 1 { 1 } else { 4 };
    for _ in 0..attempts {
        late = steps(run, seqs, rows, n);
        late.retain(|(len, stats)| {
            let crosses = len.next_multiple_of(KV_BLOCK) < len + rows;
            *len >= warm && !(grows && crosses && stats.deallocations == 0)
        });
        if late.is_empty() {
            return;
        }
    }
    panic!("{what}: {late:?}");
}

fn check(name: &str, gguf: &Gguf) {
    for threads in [1, 2, 3] {
        let options = LoadOptions { threads, ..plain() };
        for (seqs, rows) in [(1, 1), (1, 24), (5, 1), (3, 7)] {
            let mut run = Run::new(gguf, &options, KvType::F16);
            let what = format!("{name}, {threads} threads, {seqs} sequences by {rows}");
            let n = 70usize.div_ceil(rows);
            // Until every buffer has had every role.
            let warm = 3 * rows;
            quiet(&mut run, (seqs, rows, n), warm, true, &what);
            // Blocks that are there serve again; the batch is made anew, within the first step.
            quiet(&mut run, (seqs, rows, n), 1, false, &what);
            if run.model.config().windows.iter().all(Option::is_some) {
                // Nor does length cost anything: the window's blocks go round.
                quiet(&mut run, (seqs, rows, 4 * n), 1, false, &what);
            }
        }
    }
}

/// Bytes that are allocated when the sequence has come to each length.
fn memory_at(run: &mut Run, lens: &[usize], chunk: usize) -> Vec<usize> {
    let token = [1];
    let seq = run.kv.add();
    let mut batch = Batch::default();
    let start = ALLOCATOR.stats();
    let held = |stats: Stats| {
        let now = stats - start;
        now.bytes_allocated as isize - now.bytes_deallocated as isize
    };
    let mut found = Vec::with_capacity(lens.len());
    for &len in lens {
        while run.len(seq) < len {
            batch.clear();
            let n = chunk.min(len - run.len(seq));
            batch.push(seq, run.len(seq), &token.repeat(n), Outputs::Last);
            run.model.forward(&batch, &mut run.kv).unwrap();
        }
        found.push(held(ALLOCATOR.stats()) as usize);
    }
    run.kv.remove(seq);
    found
}

#[test]
fn a_warm_model_allocates_nothing() {
    for name in ["llama-gqa", "mistral-swa", "mixtral-moe"] {
        check(name, &Fixture::named(name).gguf());
    }
    let quantized = Spec { dim: 64, ffn_dim: 96, types: vec![DType::Q4_0, DType::Q8_0], ..Spec::default() };
    let experts = Some(Experts { n: 20, used: 3, ffn_dim: 32, split: true, sigmoid: false });
    check("quantized", &quantized.gguf());
    check("quantized experts", &Spec { experts, ..quantized }.gguf());

    // What a window bounds, the system sees: as much memory at 240 positions as at 100.
    let gguf = Fixture::named("mistral-swa").gguf();
    for chunk in [1, 20] {
        let mut run = Run::new(&gguf, &plain(), KvType::F16);
        let held = memory_at(&mut run, &[100, 240], chunk);
        assert_eq!(held[0], held[1], "chunks of {chunk}");
    }
}
