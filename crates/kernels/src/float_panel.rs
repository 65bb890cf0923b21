//! Products of float weights: 16 rows side by side, one multiply-add a column, in column order, activations as they
//! are.

use crate::isa::{Isa, Kernel};
use crate::panel::SIDE;
use crate::simd::{LANES, Simd};

/// A float element of a panel.
pub(crate) trait Element {
    /// Bytes of an element.
    const BYTES: usize;
    /// 16 elements at `p`, widened.
    ///
    /// # Safety
    /// `p` points to 16 elements.
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::F;
}

macro_rules! element {
    ($name:ident, $bytes:expr, $load:ident) => {
        pub(crate) struct $name;
        impl Element for $name {
            const BYTES: usize = $bytes;
            #[inline(always)]
            unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::F {
                // SAFETY: the caller vouches for 16 elements.
                unsafe { s.$load(p.cast()) }
            }
        }
    };
}

element!(F32, 4, load);
element!(F16, 2, load_f16);
element!(BF16, 2, load_bf16);

/// Up to [`SIDE`] panels with one or many rows of activations.
pub(crate) struct FloatJob<'a> {
    /// Panels one after the other, `[panels, cols, 16]`.
    pub panels: &'a [u8],
    /// How many, at most [`SIDE`].
    pub n_panels: usize,
    /// Activations, `[act rows, act_stride]`.
    pub acts: &'a [f32],
    /// Columns in an activation row.
    pub act_stride: usize,
    /// First column that meets the panels.
    pub act_start: usize,
    /// Activation row of each output row; `None`: the same number.
    pub gather: Option<&'a [u32]>,
    /// Output rows.
    pub rows: usize,
    /// First output of row 0.
    pub out: *mut f32,
    /// Elements between output rows.
    pub out_stride: usize,
    /// Outputs of a row that exist, at most 16 a panel.
    pub width: usize,
    /// Whether sums go on from what `out` holds.
    pub resume: bool,
}

/// Runs a job for element `E`.
///
/// # Safety
/// `out` is valid for `rows` rows of `width` elements `out_stride` apart, and nothing else uses them meanwhile.
pub(crate) unsafe fn run<E: Element>(isa: Isa, job: &FloatJob) {
    let cols = job.panels.len() / (job.n_panels * LANES * E::BYTES);
    assert!(job.n_panels <= SIDE && job.panels.len() == job.n_panels * LANES * E::BYTES * cols);
    assert!(job.width <= job.n_panels * LANES && job.width > (job.n_panels - 1) * LANES);
    assert!(job.act_start + cols <= job.act_stride, "activation rows cover the panel's columns");
    let last = match job.gather {
        Some(rows) => {
            assert_eq!(rows.len(), job.rows);
            rows.iter().max().map_or(0, |&r| r as usize + 1)
        }
        None => job.rows,
    };
    assert!(last * job.act_stride <= job.acts.len(), "activation rows exist");
    isa.run(Rows::<E> { job, cols, element: std::marker::PhantomData });
}

struct Rows<'a, E> {
    job: &'a FloatJob<'a>,
    cols: usize,
    element: std::marker::PhantomData<E>,
}

impl<E: Element> Kernel for Rows<'_, E> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut row = 0;
        // SAFETY: `run` checked panels and activations, its caller vouches for the outputs.
        unsafe {
            while self.job.rows - row >= 4 {
                let mut p = 0;
                while p < self.job.n_panels {
                    let m = if self.job.n_panels - p >= 2 { 2 } else { 1 };
                    if m == 2 {
                        self.tile::<S, 2, 4>(s, row, p)
                    } else {
                        self.tile::<S, 1, 4>(s, row, p)
                    }
                    p += m;
                }
                row += 4;
            }
            while self.job.rows - row >= 1 {
                if self.job.n_panels == SIDE {
                    self.tile::<S, SIDE, 1>(s, row, 0);
                } else {
                    for p in 0..self.job.n_panels {
                        self.tile::<S, 1, 1>(s, row, p);
                    }
                }
                row += 1;
            }
        }
    }
}

impl<E: Element> Rows<'_, E> {
    /// Panels `panel..panel + M` by activation rows `row..row + N`.
    ///
    /// # Safety
    /// As [`run`], within the job's panels and rows.
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize, const N: usize>(&self, s: S, row: usize, panel: usize) {
        let job = self.job;
        let step = LANES * E::BYTES;
        let mut acts = [std::ptr::null::<f32>(); N];
        let mut acc = [[s.splat(0.0); M]; N];
        let mut n = 0;
        while n < N {
            let act_row = job.gather.map_or(row + n, |rows| rows[row + n] as usize);
            // SAFETY: `run` checked that activation rows exist.
            acts[n] = unsafe { job.acts.as_ptr().add(act_row * job.act_stride + job.act_start) };
            let mut m = 0;
            while m < M && job.resume {
                // SAFETY: the caller vouches for the outputs.
                acc[n][m] = unsafe { self.load_out(s, row + n, panel + m) };
                m += 1;
            }
            n += 1;
        }
        // SAFETY: the panels hold `cols` columns each, and so do the activation rows.
        unsafe {
            let weights = job.panels.as_ptr().add(panel * self.cols * step);
            for col in 0..self.cols {
                let mut w = [s.splat(0.0); M];
                let mut m = 0;
                while m < M {
                    w[m] = E::load(s, weights.add((m * self.cols + col) * step));
                    m += 1;
                }
                let mut n = 0;
                while n < N {
                    let x = s.splat(*acts[n].add(col));
                    let mut m = 0;
                    while m < M {
                        acc[n][m] = s.fma(w[m], x, acc[n][m]);
                        m += 1;
                    }
                    n += 1;
                }
            }
        }
        let mut n = 0;
        while n < N {
            let mut m = 0;
            while m < M {
                // SAFETY: the caller vouches for the outputs.
                unsafe { self.store_out(s, row + n, panel + m, acc[n][m]) };
                m += 1;
            }
            n += 1;
        }
    }

    /// # Safety
    /// The outputs exist.
    #[inline(always)]
    unsafe fn load_out<S: Simd>(&self, s: S, row: usize, panel: usize) -> S::F {
        let lanes = (self.job.width - panel * LANES).min(LANES);
        // SAFETY: `lanes` outputs of the row exist from here.
        unsafe {
            let p = self.job.out.add(row * self.job.out_stride + panel * LANES);
            s.load_n(p, lanes)
        }
    }

    /// # Safety
    /// The outputs exist.
    #[inline(always)]
    unsafe fn store_out<S: Simd>(&self, s: S, row: usize, panel: usize, x: S::F) {
        let lanes = (self.job.width - panel * LANES).min(LANES);
        // SAFETY: `lanes` outputs of the row exist from here.
        unsafe {
            let p = self.job.out.add(row * self.job.out_stride + panel * LANES);
            s.store_n(p, x, lanes)
        }
    }
}
