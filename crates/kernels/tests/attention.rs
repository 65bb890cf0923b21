//! Attention against a plain double-precision softmax, and against itself: chunks, levels, threads, neighbours.

#![allow(clippy::unwrap_used)]

use half::f16;
use proptest::prelude::*;
use puna_kernels::{
    Acts, Attention, AttnScratch, Exec, Isa, KV_BLOCK, KvBlocks, KvLayer, KvLayout, KvPlan, KvType, KvView, attention,
    kv_store,
};

/// One sequence's queries, keys and values, `[len, heads, head_dim]`.
#[derive(Clone)]
struct Sequence {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    layout: KvLayout,
    op: Attention,
    len: usize,
}

fn random(n: usize, seed: u64) -> Vec<f32> {
    let mut x = seed | 1;
    (0..n)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 40) as f32 / (1 << 23) as f32 * 2.0 - 2.0
        })
        .collect()
}

/// Rows of queries, quantized where they can be.
fn queries(exec: &Exec, q: &[f32], width: usize) -> Acts {
    let mut acts = Acts::default();
    acts.resize(q.len() / width, width);
    acts.values_mut().copy_from_slice(q);
    if width.is_multiple_of(32) {
        acts.quantize(exec);
    }
    acts
}

/// Numbers as Q8_0 keeps them, its scale as it is or in half precision.
fn q8(x: &[f32], half: bool) -> Vec<f64> {
    let quantized = |x: &[f32]| -> Vec<f64> {
        let max = x.iter().fold(0f32, |m, x| m.max(x.abs()));
        let d = if half { f16::from_f32(max / 127.0).to_f32() } else { max / 127.0 };
        x.iter().map(|x| f64::from((x * (127.0 / max)).round_ties_even()) * f64::from(d)).collect()
    };
    x.chunks_exact(32).flat_map(quantized).collect()
}

impl Shape {
    fn sequence(&self, seed: u64) -> Sequence {
        let (q, kv) = (self.op.n_heads * self.layout.head_dim, self.layout.n_kv_heads * self.layout.head_dim);
        Sequence {
            q: random(self.len * q, seed),
            k: random(self.len * kv, seed ^ 0x55),
            v: random(self.len * kv, seed ^ 0xaa),
        }
    }

    /// All outputs, computed in chunks of the given length, with other positions in the pool's blocks.
    fn run(&self, exec: &Exec, x: &Sequence, chunk: usize) -> Vec<f32> {
        let (q, kv) = (self.op.n_heads * self.layout.head_dim, self.layout.n_kv_heads * self.layout.head_dim);
        let mut blocks = KvBlocks::new(2 * self.layout.layer_bytes());
        let table: Vec<u32> = (0..self.len.div_ceil(KV_BLOCK)).map(|_| blocks.alloc().unwrap()).collect();
        let mut out = vec![f32::NAN; x.q.len()];
        for past in (0..self.len).step_by(chunk) {
            let rows = chunk.min(self.len - past);
            let mut plan = KvPlan::default();
            plan.push(rows, past, 0, table.iter().copied());
            let layer = KvLayer { layout: self.layout, index: 1 };
            let part = |x: &[f32], width: usize| x[past * width..(past + rows) * width].to_vec();
            kv_store(exec, &mut blocks, layer, &plan, &part(&x.k, kv), &part(&x.v, kv));
            let out = &mut out[past * q..(past + rows) * q];
            let q = queries(exec, &part(&x.q, q), q);
            let view = KvView { blocks: &blocks, layer, plan: &plan };
            attention(exec, &self.op, view, &q, out, &mut AttnScratch::default());
        }
        out
    }

    /// The definition, in double precision.
    fn naive(&self, x: &Sequence) -> Vec<f64> {
        let (dim, n_kv) = (self.layout.head_dim, self.layout.n_kv_heads);
        let kept = |x: &[f32]| -> Vec<f64> {
            match self.layout.kind {
                KvType::F32 => x.iter().map(|&x| f64::from(x)).collect(),
                KvType::F16 => x.iter().map(|&x| f64::from(f16::from_f32(x).to_f32())).collect(),
                KvType::Q8_0 => q8(x, true),
            }
        };
        let (k, v) = (kept(&x.k), kept(&x.v));
        // Queries are quantized where keys are.
        let q: Vec<f64> = match self.layout.kind {
            KvType::Q8_0 => q8(&x.q, false),
            _ => x.q.iter().map(|&x| f64::from(x)).collect(),
        };
        let mut out = Vec::new();
        for pos in 0..self.len {
            for head in 0..self.op.n_heads {
                let kv_head = head / (self.op.n_heads / n_kv);
                let first = self.op.window.map_or(0, |w| (pos + 1).saturating_sub(w));
                let at = |p: usize| (p * n_kv + kv_head) * dim;
                let q = &q[(pos * self.op.n_heads + head) * dim..][..dim];
                let scores: Vec<f64> = (first..=pos)
                    .map(|p| {
                        let dot: f64 = q.iter().zip(&k[at(p)..]).map(|(q, k)| q * k).sum();
                        let score = dot * f64::from(self.op.scale);
                        self.op.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
                    })
                    .collect();
                let max = scores.iter().copied().fold(f64::MIN, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for d in 0..dim {
                    let o: f64 = weights.iter().zip(first..).map(|(w, p)| w * v[at(p) + d]).sum();
                    out.push(o / sum);
                }
            }
        }
        out
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn shapes() -> impl Strategy<Value = Shape> {
    let heads = prop_oneof![
        Just((1, 1)),
        Just((3, 3)),
        Just((4, 2)),
        Just((9, 3)),
        Just((7, 1)),
        Just((14, 2)),
        Just((24, 1)),
        Just((20, 1)),
    ];
    let window = prop_oneof![Just(None), (1usize..90).prop_map(Some)];
    let kind = prop_oneof![Just(KvType::F32), Just(KvType::F16), Just(KvType::Q8_0)];
    let softcap = prop_oneof![Just(None), Just(Some(3.0))];
    let window = prop_oneof![window, Just(Some(256)), (200usize..600).prop_map(Some)];
    let len = prop_oneof![4 => 1usize..150, 1 => 250usize..270, 1 => 500usize..530];
    // Any size, and those of models.
    let dim = prop_oneof![2 => 1usize..40, 1 => prop::sample::select(&[64usize, 80, 96, 112, 128, 192, 256][..])];
    (heads, dim, window, kind, softcap, len).prop_map(|((h, kv), dim, window, kind, softcap, len)| {
        let dim = match kind {
            KvType::Q8_0 if dim < 40 => dim.div_ceil(16) * 32,
            KvType::Q8_0 => dim.next_multiple_of(32),
            _ => dim,
        };
        // Large heads by short sequences: the definition takes its time.
        let len = if dim >= 64 && h > 4 { len.min(60) } else { len };
        Shape {
            layout: KvLayout { kind, n_kv_heads: kv, head_dim: dim },
            op: Attention { n_heads: h, scale: 1.0 / (dim as f32).sqrt(), softcap, window },
            len,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 96 }))]
    #[test]
    fn right_and_the_same_however_it_is_cut(shape in shapes(), seed: u64, chunk in 1usize..70) {
        let x = shape.sequence(seed);
        let whole = shape.run(&Exec::new(Isa::detect(), 2), &x, shape.len);
        for (i, (o, e)) in whole.iter().zip(shape.naive(&x)).enumerate() {
            prop_assert!((f64::from(*o) - e).abs() < 2e-5, "{:?} element {}: {} expected {}", shape, i, o, e);
        }
        for &isa in Isa::available() {
            let exec = Exec::new(isa, 3);
            prop_assert_eq!(bits(&shape.run(&exec, &x, shape.len)), bits(&whole), "{} whole", isa);
            prop_assert_eq!(bits(&shape.run(&exec, &x, chunk)), bits(&whole), "{} in chunks of {}", isa, chunk);
        }
        let one_by_one = shape.run(&Exec::new(Isa::detect(), 1), &x, 1);
        prop_assert_eq!(bits(&one_by_one), bits(&whole), "one by one");
    }
}

/// A window may leave a part behind in the middle of a tile, whose earlier queries still see the part's end.
#[test]
fn windows_pass_the_border_of_a_part() {
    for (window, kind) in [
        (1, KvType::F32),
        (5, KvType::F16),
        (16, KvType::Q8_0),
        (250, KvType::F32),
        (256, KvType::F16),
        (600, KvType::F32),
    ] {
        for (n_heads, n_kv_heads) in [(1, 1), (4, 2), (3, 1)] {
            let shape = Shape {
                layout: KvLayout { kind, n_kv_heads, head_dim: 32 },
                op: Attention { n_heads, scale: 0.25, softcap: None, window: Some(window) },
                len: 256 + window + 12,
            };
            let x = shape.sequence(5);
            let one_by_one = shape.run(&Exec::new(Isa::detect(), 1), &x, 1);
            for (i, (o, e)) in one_by_one.iter().zip(shape.naive(&x)).enumerate() {
                assert!((f64::from(*o) - e).abs() < 2e-5, "{shape:?} element {i}: {o} expected {e}");
            }
            for &isa in Isa::available() {
                for chunk in [shape.len, 61, 7] {
                    let out = shape.run(&Exec::new(isa, 2), &x, chunk);
                    assert_eq!(bits(&out), bits(&one_by_one), "{shape:?} {isa} in chunks of {chunk}");
                }
            }
        }
    }
}

/// What a position does not see must not reach it, not even a NaN or an infinity.
#[test]
fn the_unseen_does_not_leak() {
    for window in [None, Some(5)] {
        for kind in [KvType::F32, KvType::F16, KvType::Q8_0] {
            let shape = Shape {
                layout: KvLayout { kind, n_kv_heads: 2, head_dim: 32 },
                op: Attention { n_heads: 6, scale: 0.25, softcap: None, window },
                len: 70,
            };
            let exec = Exec::new(Isa::detect(), 2);
            let good = shape.sequence(3);
            let expected = shape.run(&exec, &good, 70);
            let mut bad = good.clone();
            let poisoned = 40;
            bad.k[poisoned * 64..][..64].fill(f32::NAN);
            bad.v[poisoned * 64..][..64].fill(f32::INFINITY);
            let out = shape.run(&exec, &bad, 70);
            assert_eq!(bits(&out[..poisoned * 192]), bits(&expected[..poisoned * 192]), "earlier rows");
            assert!(out[poisoned * 192].is_nan());
            if window.is_some() {
                let after = (poisoned + 5) * 192;
                assert_eq!(bits(&out[after..]), bits(&expected[after..]), "rows whose window has passed it");
            }
        }
    }
}

/// Sequences of one batch do not touch one another, and a table may start after the first block.
#[test]
fn spans_are_independent() {
    let shape = Shape {
        layout: KvLayout { kind: KvType::F16, n_kv_heads: 1, head_dim: 24 },
        op: Attention { n_heads: 3, scale: 0.2, softcap: None, window: Some(33) },
        len: 128,
    };
    let exec = Exec::new(Isa::detect(), 2);
    let (a, b) = (shape.sequence(1), shape.sequence(2));
    let (want_a, want_b) = (shape.run(&exec, &a, 128), shape.run(&exec, &b, 128));
    let mut blocks = KvBlocks::new(shape.layout.layer_bytes());
    let tables: [Vec<u32>; 2] = std::array::from_fn(|_| (0..4).map(|_| blocks.alloc().unwrap()).collect());
    let layer = KvLayer { layout: shape.layout, index: 0 };
    for (x, table) in [(&a, &tables[0]), (&b, &tables[1])] {
        let mut plan = KvPlan::default();
        plan.push(128, 0, 0, table.iter().copied());
        kv_store(&exec, &mut blocks, layer, &plan, &x.k, &x.v);
    }
    // The last 20 rows of one sequence and the last 50 of the other, neither of which sees the first block.
    let mut plan = KvPlan::default();
    plan.push(20, 108, 1, tables[0][1..].iter().copied());
    plan.push(50, 78, 1, tables[1][1..].iter().copied());
    let q = [&a.q[108 * 72..], &b.q[78 * 72..]].concat();
    let mut out = vec![0.0; q.len()];
    let view = KvView { blocks: &blocks, layer, plan: &plan };
    attention(&exec, &shape.op, view, &queries(&exec, &q, 72), &mut out, &mut AttnScratch::default());
    assert_eq!(bits(&out), bits(&[&want_a[108 * 72..], &want_b[78 * 72..]].concat()));
}
