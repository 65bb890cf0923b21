//! Products against the contract of docs/numerics.md written out plainly, bit for bit: every format, every level,
//! packed or not, any number of rows and threads.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use puna_kernels::dtype::FORMATS;
use puna_kernels::{
    ActBlock, Acts, Arith, Exec, Format, Group, Isa, Matrix, MatrixSource, Product, matmul, pack_in_place, packed_bytes,
};

/// A small generator of repeatable bytes (xorshift).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() >> 32) as usize % n
    }

    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 24) as f32 * 2.0 - 1.0
    }
}

/// Codes and activations of a test.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fill {
    Random,
    /// The largest magnitudes of either sign, many side by side: where sums of bytes or words could saturate.
    Extreme,
}

impl Fill {
    fn block(self, bytes: usize, random: &mut Random) -> Vec<u8> {
        // Codes of all widths at both ends of their range.
        const ENDS: [u8; 8] = [0x00, 0xff, 0x80, 0x7f, 0x88, 0x77, 0x0f, 0xf0];
        let most = ENDS[random.below(8)];
        let byte = |random: &mut Random| match self {
            Fill::Random => random.next() as u8,
            Fill::Extreme if random.below(8) > 0 => most,
            Fill::Extreme => ENDS[random.below(8)],
        };
        (0..bytes).map(|_| byte(random)).collect()
    }

    fn acts(self, cols: usize, random: &mut Random) -> Vec<f32> {
        let signs = random.below(4);
        let sign = |i: usize, random: &mut Random| match signs {
            0 => true,
            1 => false,
            2 => i.is_multiple_of(2),
            _ => random.below(2) == 0,
        };
        let value = |i: usize| match self {
            Fill::Random => random.unit(),
            Fill::Extreme if sign(i, random) => 1.0,
            Fill::Extreme => -1.0,
        };
        (0..cols).map(value).collect()
    }
}

/// Blocks whose weights are finite.
fn weights(format: &Format, rows: usize, cols: usize, fill: Fill, random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut values = vec![0.0; format.block_len];
    for _ in 0..rows * cols / format.block_len {
        loop {
            let block = fill.block(format.block_bytes, random);
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

fn acts(rows: usize, cols: usize, fill: Fill, random: &mut Random) -> Acts {
    let mut acts = Acts::default();
    acts.resize(rows, cols);
    acts.values_mut().chunks_exact_mut(cols).for_each(|row| row.copy_from_slice(&fill.acts(cols, random)));
    if cols.is_multiple_of(32) {
        acts.quantize(&Exec::new(Isa::Scalar, 1));
    }
    acts
}

/// A matrix by rows of activations.
#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    cols: usize,
    act_rows: usize,
    fill: Fill,
    /// With biases, rows of the matrix in another order, and gathered rows of activations.
    dressed: bool,
    seed: u64,
}

impl Case {
    /// Numbers of columns are rounded up to whole blocks.
    fn check(self, format: &Format) {
        let cols = self.cols.next_multiple_of(format.block_len);
        let Case { rows, act_rows, fill, dressed, seed, .. } = self;
        let random = &mut Random(seed | 1);
        let bytes: bytes::Bytes = weights(format, rows, cols, fill, random).into();
        let row_bytes = bytes.len() / rows;
        let order: Vec<u32> = if dressed { (0..rows as u32).rev().collect() } else { (0..rows as u32).collect() };
        let gather: Vec<u32> =
            (0..act_rows as u32).map(|i| if dressed { (i * 7 + 3) % act_rows as u32 } else { i }).collect();
        let bias: Vec<f32> = (0..rows).map(|_| random.unit()).collect();
        let x = acts(act_rows, cols, fill, random);
        let mut expected = Vec::new();
        for &a in &gather {
            let (a, per_row) = (a as usize, cols / 32);
            let blocks = x.blocks().get(a * per_row..(a + 1) * per_row).unwrap_or(&[]);
            for (&r, bias) in order.iter().zip(&bias) {
                let row = &bytes[r as usize * row_bytes..][..row_bytes];
                let y = contract(format, row, &x.values()[a * cols..][..cols], blocks);
                expected.push(if dressed { y + bias } else { y });
            }
        }
        for &isa in Isa::available() {
            let exec = Exec::new(isa, 2);
            for pack in [false, true] {
                let order = dressed.then(|| order.clone());
                let source = MatrixSource { dtype: format.dtype, rows, cols, bytes: bytes.clone(), order };
                let weight = Matrix::new(&exec, source, pack);
                let mut out = vec![f32::NAN; act_rows * rows];
                let (bias, gather) = (dressed.then_some(&bias[..]), dressed.then_some(&gather[..]));
                matmul(&exec, &mut [Product { weight: &weight, bias, acts: &x, gather, out: &mut out }]);
                for (i, (o, e)) in out.iter().zip(&expected).enumerate() {
                    let name = format.name;
                    assert_eq!(
                        o.to_bits(),
                        e.to_bits(),
                        "{name} {isa} packed: {pack}, {self:?}, output {i}: {o} expected {e}"
                    );
                }
            }
        }
    }
}

const FIRST: Case = Case { rows: 1, cols: 1, act_rows: 1, fill: Fill::Random, dressed: true, seed: 0 };

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 24 }))]
    #[test]
    fn products_keep_the_contract(
        (rows, cols, act_rows) in (1usize..70, 1usize..900, 1usize..14), dressed: bool, seed: u64,
    ) {
        for format in FORMATS {
            Case { rows, cols, act_rows, fill: Fill::Random, dressed, seed }.check(format);
        }
    }

    #[test]
    fn nothing_saturates((rows, cols, act_rows) in (1usize..40, 1usize..600, 1usize..14), seed: u64) {
        for format in FORMATS {
            Case { rows, cols, act_rows, fill: Fill::Extreme, dressed: false, seed }.check(format);
        }
    }
}

/// Each number of rows that tiles are cut into, by numbers of outputs that fill panels and do not.
#[test]
fn every_number_of_rows() {
    for format in FORMATS {
        for act_rows in if cfg!(miri) { 1..4 } else { 1..24 } {
            let rows = [1, 15, 16, 17, 31, 33, 63, 64, 65, 81, 97][act_rows % 11];
            let cols = [1, 33, 65, 97, 129][act_rows % 5];
            Case { rows, cols, act_rows, dressed: act_rows % 2 == 0, seed: act_rows as u64, ..FIRST }.check(format);
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "takes hours")]
fn many_rows_and_columns() {
    for (i, format) in FORMATS.iter().enumerate() {
        let dressed = i % 2 == 0;
        Case { rows: 33, cols: 1025, act_rows: 61 + i, dressed, seed: 5, ..FIRST }.check(format);
        Case { rows: 129, cols: 32, act_rows: 131, dressed: !dressed, seed: 6, ..FIRST }.check(format);
    }
}

/// Products of one parallel step: of different formats, heights and rows, on more threads than there are tasks and fewer.
#[test]
fn products_side_by_side() {
    let random = &mut Random(77);
    let x = acts(9, 256, Fill::Random, random);
    let gather: Vec<u32> = vec![8, 0, 3, 3];
    for &isa in Isa::available() {
        for threads in [1, 3, 9] {
            let exec = Exec::new(isa, threads);
            let matrices: Vec<Matrix> = FORMATS
                .iter()
                .enumerate()
                .map(|(i, format)| {
                    let rows = 1 + i * 13 % 90;
                    let bytes = weights(format, rows, 256, Fill::Random, random).into();
                    let source = MatrixSource { dtype: format.dtype, rows, cols: 256, bytes, order: None };
                    Matrix::new(&exec, source, i % 5 != 0)
                })
                .collect();
            let rows_of = |i: usize| i.is_multiple_of(3).then_some(&gather[..]);
            let outputs = |i: usize| vec![f32::NAN; matrices[i].rows() * rows_of(i).map_or(9, <[u32]>::len)];
            let [mut alone, mut together] = [(); 2].map(|()| (0..matrices.len()).map(outputs).collect::<Vec<_>>());
            for (i, out) in alone.iter_mut().enumerate() {
                matmul(&exec, &mut [Product { weight: &matrices[i], bias: None, acts: &x, gather: rows_of(i), out }]);
            }
            let product = |(i, out)| Product { weight: &matrices[i], bias: None, acts: &x, gather: rows_of(i), out };
            let mut products: Vec<_> = together.iter_mut().map(Vec::as_mut_slice).enumerate().map(product).collect();
            matmul(&exec, &mut products);
            for (i, (alone, together)) in alone.iter().zip(&together).enumerate() {
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert!(alone.iter().all(|x| !x.is_nan()));
                assert_eq!(bits(together), bits(alone), "{} at {isa} on {threads} threads", FORMATS[i].name);
            }
        }
    }
}

/// Rows of a packed matrix read back as they were stored, from its panels and from those packed in place.
#[test]
fn rows_read_back() {
    let random = &mut Random(7);
    for format in FORMATS {
        for rows in [1, 16, 37] {
            let cols = 3 * format.block_len;
            let bytes = weights(format, rows, cols, Fill::Random, random);
            let row_bytes = bytes.len() / rows;
            let order: Vec<u32> = (0..rows as u32).rev().collect();
            let exec = Exec::new(Isa::detect(), 2);
            let dtype = format.dtype;
            let source = |order| MatrixSource { dtype, rows, cols, bytes: bytes.clone().into(), order };
            let mut in_place = bytes.clone();
            in_place.resize(packed_bytes(rows, row_bytes), 0xaa);
            pack_in_place(dtype, rows, &mut in_place, &mut Vec::new());
            let matrices = [
                (Matrix::new(&exec, source(Some(order.clone())), true), true),
                (Matrix::new(&exec, source(Some(order)), false), true),
                (Matrix::new(&exec, source(None), true), false),
                (Matrix::owned(dtype, [rows, cols], in_place, true), false),
            ];
            for (matrix, reversed) in matrices {
                let (mut row, mut stored) = (vec![0.0; cols], vec![0.0; cols]);
                for i in 0..rows {
                    let r = if reversed { rows - 1 - i } else { i };
                    matrix.row(i, &mut row);
                    (format.dequantize)(&bytes[r * row_bytes..][..row_bytes], &mut stored);
                    assert_eq!(row, stored, "{} row {i} of {rows}", format.name);
                }
            }
        }
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
