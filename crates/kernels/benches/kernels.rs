//! Single kernels against the machine's own roofs, measured in the same run.
//!
//! `cargo bench -p puna-kernels [-- WORD]`: only the lines that contain the word.

use puna_kernels::{
    Acts, Attention, AttnScratch, DType, Exec, Isa, KV_BLOCK, KvBlocks, KvLayer, KvLayout, KvPlan, KvType, KvView,
    Matrix, MatrixSource, Pool, Product, attention, kv_store, matmul, quantize, roof,
};
use std::time::{Duration, Instant};

fn main() {
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with('-')).unwrap_or_default();
    let bench = Bench { exec: Exec::new(Isa::detect(), Pool::default_threads()), filter };
    bench.roofs();
    for dtype in [DType::Q4_0, DType::Q4_1, DType::Q8_0, DType::Q4_K, DType::Q6_K, DType::IQ4_XS] {
        bench.matmul(dtype);
    }
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        bench.matmul(dtype);
    }
    for kind in [KvType::F32, KvType::F16, KvType::Q8_0] {
        bench.attention(kind);
    }
}

struct Bench {
    exec: Exec,
    filter: String,
}

/// Seconds of the fastest call.
fn fastest(mut f: impl FnMut()) -> f64 {
    let (start, mut best) = (Instant::now(), f64::MAX);
    while start.elapsed() < Duration::from_millis(400) {
        let start = Instant::now();
        f();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

fn numbers(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i * 7919 % 1009) as f32 / 504.0 - 1.0).collect()
}

impl Bench {
    fn roofs(&self) {
        let e = &self.exec;
        println!("{} on {} threads", e.isa, e.pool.threads());
        println!("roofs: {:.1} GB/s read, {:.0} GFLOP/s f32, {:.0} GOP/s int8", gb(e), gflop(e), gop(e));
    }

    fn wants(&self, name: &str) -> bool {
        name.contains(&self.filter)
    }

    fn acts(&self, rows: usize, cols: usize) -> Acts {
        let mut acts = Acts::default();
        acts.resize(rows, cols);
        acts.values_mut().copy_from_slice(&numbers(rows * cols));
        acts.quantize(&self.exec);
        acts
    }

    fn matmul(&self, dtype: DType) {
        // Narrow as in a small model, wide, and long: 8 matrices, so that none stays in a cache.
        for (n, cols) in [(1536, 576), (4096, 4096), (1536, 8960)] {
            let name = |rows: usize| format!("matmul {} {n}x{cols} rows {rows}", dtype.name());
            let rows: Vec<usize> =
                [1, 2, 8, 32, 120, 512].into_iter().filter(|&rows| self.wants(&name(rows))).collect();
            let Some(row_bytes) = dtype.row_bytes(cols).filter(|_| !rows.is_empty()) else { continue };
            let mut bytes = vec![0; n * row_bytes];
            let values = numbers(n * cols);
            self.exec.pool.for_each_part(&mut bytes, row_bytes, &|i, row| {
                quantize(dtype, &values[i * cols..][..cols], row);
            });
            let bytes = bytes::Bytes::from(bytes);
            let source = || MatrixSource { dtype, rows: n, cols, bytes: bytes.clone(), order: None };
            let weights: Vec<Matrix> = (0..8).map(|_| Matrix::new(&self.exec, source(), true)).collect();
            for rows in rows {
                let name = name(rows);
                let acts = self.acts(rows, cols);
                let mut out = vec![0.0; rows * n];
                let seconds = fastest(|| {
                    for weight in &weights {
                        let (acts, out) = (&acts, &mut out[..]);
                        matmul(&self.exec, &mut [Product { weight, bias: None, acts, gather: None, out }]);
                    }
                }) / 8.0;
                let ops = 2.0 * (rows * n * cols) as f64 / seconds / 1e9;
                let read = weights[0].bytes() as f64 / seconds / 1e9;
                let is_integer = dtype.format().arith.is_integer();
                let roof = if is_integer { gop(&self.exec) } else { gflop(&self.exec) };
                println!(
                    "{name:40} {:9.1} us {ops:7.0} GOP/s ({:3.0} %) {read:6.1} GB/s ({:3.0} %)",
                    seconds * 1e6,
                    100.0 * ops / roof,
                    100.0 * read / gb(&self.exec)
                );
            }
        }
    }

    fn attention(&self, kind: KvType) {
        for (n_heads, n_kv_heads, head_dim) in [(9, 3, 64), (32, 8, 128)] {
            let layout = KvLayout { kind, n_kv_heads, head_dim };
            for (sequences, past, rows) in [(1usize, 0usize, 512usize), (1, 3584, 512), (1, 512, 1), (1, 4096, 1)] {
                self.attention_of(&Shape { layout, n_heads, sequences, past, rows, layers: 1 });
            }
            // What decoding reads does not fit the cache of the processor.
            for (sequences, past, rows) in [(1usize, 4096usize, 1usize), (1, 4096, 4), (8, 1024, 1)] {
                let one = layout.layer_bytes() * sequences * (past + rows).div_ceil(KV_BLOCK);
                self.attention_of(&Shape { layout, n_heads, sequences, past, rows, layers: (96 << 20) / one });
            }
        }
    }

    fn attention_of(&self, shape: &Shape) {
        let &Shape { layout, n_heads, sequences, past, rows, layers } = shape;
        let KvLayout { kind, n_kv_heads, head_dim } = layout;
        let name = format!(
            "attention {kind} {n_heads}/{n_kv_heads}x{head_dim} {sequences} of past {past} rows {rows}, {layers} layers"
        );
        if !self.wants(&name) {
            return;
        }
        let mut blocks = KvBlocks::new(layers * layout.layer_bytes());
        let kv = numbers((past + rows) * n_kv_heads * head_dim);
        let (mut plan, mut table) = (KvPlan::default(), Vec::new());
        for _ in 0..sequences {
            table = (0..(past + rows).div_ceil(KV_BLOCK)).map(|_| blocks.alloc().expect("memory")).collect();
            let mut all = KvPlan::default();
            all.push(past + rows, 0, 0, table.iter().copied());
            for index in 0..layers {
                kv_store(&self.exec, &mut blocks, KvLayer { layout, index }, &all, &kv, &kv);
            }
            plan.push(rows, past, 0, table.iter().copied());
        }
        let q = self.acts(sequences * rows, n_heads * head_dim);
        let mut out = vec![0.0; sequences * rows * n_heads * head_dim];
        let op = Attention { n_heads, scale: 0.1, softcap: None, window: None };
        let mut scratch = AttnScratch::default();
        let seconds = fastest(|| {
            for index in 0..layers {
                let view = KvView { blocks: &blocks, layer: KvLayer { layout, index }, plan: &plan };
                attention(&self.exec, &op, view, &q, &mut out, &mut scratch)
            }
        }) / layers as f64;
        let pairs: usize = sequences * (past..past + rows).map(|pos| pos + 1).sum::<usize>();
        let flops = (4 * pairs * n_heads * head_dim) as f64 / seconds / 1e9;
        let read = (sequences * table.len() * layout.layer_bytes()) as f64 / seconds / 1e9;
        println!(
            "{name:64} {:9.1} us {flops:6.0} GFLOP/s ({:3.0} %) {read:6.1} GB/s",
            seconds * 1e6,
            100.0 * flops / gflop(&self.exec)
        );
    }
}

/// What attention computes.
struct Shape {
    layout: KvLayout,
    n_heads: usize,
    sequences: usize,
    past: usize,
    rows: usize,
    layers: usize,
}

fn gb(exec: &Exec) -> f64 {
    use std::sync::OnceLock;
    static ROOF: OnceLock<f64> = OnceLock::new();
    *ROOF.get_or_init(|| roof::read_bandwidth(exec) / 1e9)
}

fn gflop(exec: &Exec) -> f64 {
    use std::sync::OnceLock;
    static ROOF: OnceLock<f64> = OnceLock::new();
    *ROOF.get_or_init(|| roof::fma_rate(exec) / 1e9)
}

fn gop(exec: &Exec) -> f64 {
    use std::sync::OnceLock;
    static ROOF: OnceLock<f64> = OnceLock::new();
    *ROOF.get_or_init(|| roof::dot_rate(exec) / 1e9)
}
