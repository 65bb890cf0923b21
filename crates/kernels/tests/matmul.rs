//! Products against the contract of docs/numerics.md written out plainly, bit for bit: every format, every level,
//! packed or not, any number of rows and threads.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use puna_kernels::dtype::FORMATS;
use puna_kernels::{ActBlock, Acts, Arith, DType, Exec, Format, Group, Isa, Matrix, MatrixSource, Product, matmul};

/// A small generator of repeatable bytes (xorshift).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 24) as f32 * 2.0 - 1.0
    }
}

/// Random blocks whose weights are finite.
fn weights(format: &Format, rows: usize, cols: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut values = vec![0.0; format.block_len];
    for _ in 0..rows * cols / format.block_len {
        loop {
            let block: Vec<u8> = (0..format.block_bytes).map(|_| random.next() as u8).collect();
            (format.dequantize)(&block, &mut values);
            if values.iter().all(|v| v.is_finite() && v.abs() < 1e10) {
                bytes.extend(block);
                break;
            }
        }
    }
    bytes
}

/// One output: the order of operations that every kernel must keep.
fn contract(format: &Format, row: &[u8], x: &[f32], blocks: &[ActBlock]) -> f32 {
    let Some(unpack) = format.unpack else {
        let mut w = vec![0.0; x.len()];
        (format.dequantize)(row, &mut w);
        return w.iter().zip(x).fold(0.0, |acc, (w, x)| w.mul_add(*x, acc));
    };
    let mut groups = vec![Group::ZERO; blocks.len()];
    unpack(row, &mut groups);
    let mut acc = 0f32;
    for (g, a) in groups.iter().zip(blocks) {
        let half = |h: usize| -> i32 { (16 * h..16 * h + 16).map(|i| i32::from(g.q[i]) * i32::from(a.q[i])).sum() };
        match format.arith {
            Arith::Float => unreachable!(),
            Arith::Float16 => {
                acc = (half(0) as f32).mul_add(g.d[0] * a.d, acc);
                acc = (half(1) as f32).mul_add(g.d[1] * a.d, acc);
            }
            _ => {
                let sum = half(0) * i32::from(g.sub[0]) + half(1) * i32::from(g.sub[1]);
                acc = (sum as f32).mul_add(g.d[0] * a.d, acc);
            }
        }
        match format.arith {
            Arith::Scale32Min => acc = g.min[0].mul_add(a.ds, acc),
            Arith::Scale16Min => {
                acc = g.min[0].mul_add(a.ds_half[0], acc);
                acc = g.min[1].mul_add(a.ds_half[1], acc);
            }
            _ => {}
        }
    }
    acc
}

fn acts(exec: &Exec, rows: usize, cols: usize, random: &mut Random) -> Acts {
    let mut acts = Acts::default();
    acts.resize(rows, cols);
    acts.values_mut().iter_mut().for_each(|x| *x = random.unit());
    if cols.is_multiple_of(32) {
        acts.quantize(exec);
    }
    acts
}

fn check(format: &Format, rows: usize, blocks: usize, act_rows: usize, seed: u64) {
    let random = &mut Random(seed | 1);
    let cols = blocks * format.block_len;
    let bytes: bytes::Bytes = weights(format, rows, cols, random).into();
    let row_bytes = bytes.len() / rows;
    let order: Vec<u32> = (0..rows as u32).rev().collect();
    let gather: Vec<u32> = (0..act_rows as u32).map(|i| (i * 7 + 3) % act_rows as u32).collect();
    let bias: Vec<f32> = (0..rows).map(|_| random.unit()).collect();
    let first = Exec::new(Isa::Scalar, 1);
    let x = acts(&first, act_rows, cols, random);
    let mut expected = Vec::new();
    for &a in &gather {
        let (a, per_row) = (a as usize, cols / 32);
        let blocks = x.blocks().get(a * per_row..(a + 1) * per_row).unwrap_or(&[]);
        for r in (0..rows).rev() {
            let row = &bytes[r * row_bytes..][..row_bytes];
            expected.push(contract(format, row, &x.values()[a * cols..][..cols], blocks) + bias[rows - 1 - r]);
        }
    }
    for &isa in Isa::available() {
        let exec = Exec::new(isa, 2);
        for pack in [false, true] {
            let source =
                MatrixSource { dtype: format.dtype, rows, cols, bytes: bytes.clone(), order: Some(order.clone()) };
            let weight = Matrix::new(&exec, source, pack);
            let mut out = vec![f32::NAN; act_rows * rows];
            let (bias, gather) = (Some(&bias[..]), Some(&gather[..]));
            matmul(&exec, &mut [Product { weight: &weight, bias, acts: &x, gather, out: &mut out }]);
            for (i, (o, e)) in out.iter().zip(&expected).enumerate() {
                let what = (format.name, isa, pack, rows, cols, act_rows);
                assert_eq!(o.to_bits(), e.to_bits(), "{what:?} output {i}: {o} expected {e}");
            }
            let mut row = vec![0.0; cols];
            let mut stored = vec![0.0; cols];
            for (i, &r) in order.iter().enumerate() {
                weight.row(i, &mut row);
                (format.dequantize)(&bytes[r as usize * row_bytes..][..row_bytes], &mut stored);
                assert_eq!(row, stored, "row {i} reads back");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn products_keep_the_contract(rows in 1usize..70, blocks in 1usize..5, act_rows in 1usize..14, seed: u64) {
        for format in FORMATS {
            check(format, rows, blocks, act_rows, seed);
        }
    }
}

#[test]
fn many_rows_and_columns() {
    for dtype in [DType::Q4_0, DType::Q4_1, DType::Q8_0, DType::Q4_K, DType::Q6_K, DType::F16, DType::F32] {
        let format = dtype.format();
        check(format, 33, 2048 / format.block_len.max(2), 131, 5);
    }
}

#[test]
fn quantizing_is_the_same_at_every_level() {
    let random = &mut Random(99);
    let mut x: Vec<f32> = (0..32 * 40).map(|_| random.unit() * 3.0).collect();
    x[..32].fill(0.0);
    x[40] = f32::NAN;
    x[64 + 5] = f32::INFINITY;
    x[96..128].fill(1e-33);
    x[130] = 3e38;
    let blocks = |isa| {
        let mut acts = Acts::default();
        acts.resize(4, 320);
        acts.values_mut().copy_from_slice(&x);
        acts.quantize(&Exec::new(isa, 3));
        acts.blocks().iter().map(|b| (b.q, b.d.to_bits(), b.ds.to_bits(), b.neg_sum)).collect::<Vec<_>>()
    };
    let scalar = blocks(Isa::Scalar);
    for &isa in Isa::available() {
        assert_eq!(blocks(isa), scalar, "{isa}");
    }
    assert!(f32::from_bits(scalar[1].1).is_nan() && f32::from_bits(scalar[2].1).is_nan());
    assert_eq!((scalar[0].1, scalar[3].1), (0, 0), "zero and tiny blocks have scale 0");
    for (b, x) in scalar[5..].iter().zip(x[160..].chunks(32)) {
        let d = f32::from_bits(b.1);
        for (q, x) in b.0.iter().zip(x) {
            assert!((f32::from(*q) * d - x).abs() <= d * 0.5001, "{q} * {d} for {x}");
        }
    }
}
