//! Activations as the matrix kernels read them: rows of f32, and for integer formats the same rows in blocks of 32
//! signed bytes with one scale each.

use crate::exec::Exec;
use crate::isa::Kernel;
use crate::pool::SharedMut;
use crate::simd::{LANES, Simd};

/// Columns that share one activation scale: the unit of every integer sum.
pub const GROUP: usize = 32;

/// 32 activations as `d * q`, and the sums that minima and code offsets need. One cache line.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C, align(64))]
pub struct ActBlock {
    /// Codes in -127..=127.
    pub q: [i8; 32],
    /// The scale: `max |x| / 127`; NaN if any activation is not finite.
    pub d: f32,
    /// `d * sum(q)`, and the same for each half.
    pub ds: f32,
    /// See `ds`.
    pub ds_half: [f32; 2],
    /// `-sum(q)`, and the same for each half.
    pub neg_sum: i32,
    /// See `neg_sum`.
    pub neg_sum_half: [i32; 2],
}

const _: () = assert!(size_of::<ActBlock>() == 64);

impl ActBlock {
    /// The block whose activations are all zero.
    pub const ZERO: ActBlock =
        ActBlock { q: [0; 32], d: 0.0, ds: 0.0, ds_half: [0.0; 2], neg_sum: 0, neg_sum_half: [0; 2] };
}

/// Below this magnitude a block counts as zero: its scale would not be a normal number.
const TINY: f32 = 1e-30;

/// Rows of activations; quantized once and shared by every matrix that they meet.
#[derive(Default)]
pub struct Acts {
    rows: usize,
    cols: usize,
    x: Vec<f32>,
    blocks: Vec<ActBlock>,
    quantized: bool,
}

impl Acts {
    /// Room for `rows` of `cols`, so that later use within it allocates nothing.
    pub fn with_capacity(rows: usize, cols: usize) -> Acts {
        let (x, blocks) = (Vec::with_capacity(rows * cols), Vec::with_capacity(rows * cols.div_ceil(GROUP)));
        Acts { x, blocks, ..Acts::default() }
    }

    /// Changes the shape; the contents are whatever was there, and not quantized.
    pub fn resize(&mut self, rows: usize, cols: usize) {
        (self.rows, self.cols, self.quantized) = (rows, cols, false);
        self.x.resize(rows * cols, 0.0);
    }

    /// Takes the other's shape and values.
    pub fn copy_from(&mut self, other: &Acts) {
        self.resize(other.rows, other.cols);
        self.x.copy_from_slice(&other.x);
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The values, `[rows, cols]`.
    pub fn values(&self) -> &[f32] {
        &self.x
    }

    /// The values to be written, `[rows, cols]`; the quantized form is void from here on.
    pub fn values_mut(&mut self) -> &mut [f32] {
        self.quantized = false;
        &mut self.x
    }

    /// The quantized form, `[rows, cols / 32]`; empty before [`Acts::quantize`].
    pub fn blocks(&self) -> &[ActBlock] {
        if self.quantized { &self.blocks } else { &[] }
    }

    /// Makes the quantized form, once, on all threads.
    ///
    /// # Panics
    /// If the number of columns is not a multiple of 32.
    pub fn quantize(&mut self, exec: &Exec) {
        if self.quantized {
            return;
        }
        assert_eq!(self.cols % GROUP, 0, "activations are quantized in blocks of {GROUP} columns");
        self.blocks.resize(self.rows * self.cols / GROUP, ActBlock::ZERO);
        let (per_row, cols) = (self.cols / GROUP, self.cols);
        let (x, blocks) = (&self.x, SharedMut::new(&mut self.blocks));
        exec.pool.for_each(self.rows, &|row| {
            // SAFETY: each row is one task's.
            let blocks = unsafe { blocks.slice(row * per_row, per_row) };
            exec.isa.run(Quantize { x: &x[row * cols..][..cols], blocks });
        });
        self.quantized = true;
    }
}

struct Quantize<'a> {
    x: &'a [f32],
    blocks: &'a mut [ActBlock],
}

impl Kernel for Quantize<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (x, block) in self.x.as_chunks::<GROUP>().0.iter().zip(self.blocks) {
            quantize_block(s, x, block);
        }
    }
}

/// Quantizes 32 numbers.
#[inline(always)]
pub(crate) fn quantize_block<S: Simd>(s: S, x: &[f32; GROUP], block: &mut ActBlock) {
    // SAFETY: both halves lie in the array.
    let (lo, hi) = unsafe { (s.load(x.as_ptr()), s.load(x.as_ptr().add(LANES))) };
    let max = s.max_lane(s.max(s.abs(lo), s.abs(hi)));
    // x * 0 is NaN for a NaN or an infinity, and zero for every other x: max alone may lose a NaN.
    let zero = s.splat(0.0);
    let finite = s.sum(s.add(s.mul(lo, zero), s.mul(hi, zero))) == 0.0;
    if !finite {
        *block = ActBlock { d: f32::NAN, ds: f32::NAN, ds_half: [f32::NAN; 2], ..ActBlock::ZERO };
        return;
    }
    if max < TINY {
        *block = ActBlock::ZERO;
        return;
    }
    let scale = s.splat(127.0 / max);
    let codes = [s.to_i(s.round(s.mul(lo, scale))), s.to_i(s.round(s.mul(hi, scale)))];
    // SAFETY: both halves lie in the block.
    unsafe {
        s.store_i8(block.q.as_mut_ptr(), codes[0]);
        s.store_i8(block.q.as_mut_ptr().add(LANES), codes[1]);
    }
    block.d = max / 127.0;
    // Sums of whole numbers below 2^24 are exact in f32, in any order.
    let sums = [s.sum(s.to_f(codes[0])), s.sum(s.to_f(codes[1]))];
    block.ds_half = [block.d * sums[0], block.d * sums[1]];
    block.ds = block.d * (sums[0] + sums[1]);
    block.neg_sum_half = [-(sums[0] as i32), -(sums[1] as i32)];
    block.neg_sum = block.neg_sum_half[0] + block.neg_sum_half[1];
}
