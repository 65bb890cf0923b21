//! Products of weight panels (16 rows side by side) with rows of activations: the inner loops of everything.
//!
//! The order of every sum is fixed (docs/numerics.md): within 32 columns an exact integer sum, then one multiply-add
//! per 32 columns, in column order. How many activation rows a tile holds changes no bit.

use crate::act::{ActBlock, GROUP};
use crate::dtype::{Arith, Group};
use crate::isa::{Isa, Kernel};
use crate::simd::{LANES, Simd};

/// Bytes of a quad: 4 columns of 16 rows.
pub(crate) const QUAD: usize = 64;

/// 32 columns of 16 rows, in registers. What a format's [`Arith`] does not use is left zero and costs nothing.
pub(crate) struct Tile<S: Simd> {
    /// Codes of 8 quads: unsigned, see [`Panel::CODES`].
    pub codes: [S::B; 8],
    /// Float scales of the two halves.
    pub d: [S::F; 2],
    /// Integer scales of the two halves, as floats.
    pub sub: [S::F; 2],
    /// Minima of the two halves.
    pub min: [S::F; 2],
}

impl<S: Simd> Tile<S> {
    #[inline(always)]
    pub(crate) fn zero(s: S) -> Tile<S> {
        Tile { codes: [s.splat_b(0); 8], d: [s.splat(0.0); 2], sub: [s.splat(0.0); 2], min: [s.splat(0.0); 2] }
    }
}

/// How a panel's unsigned codes stand for signed ones.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Codes {
    /// `code - (1 << shift)`, codes up to 128.
    Offset(u32),
    /// Codes as they are, up to 128.
    Unsigned,
    /// `code - 128`, codes up to 255.
    Biased,
}

/// What a block's groups share, as its format decodes it once.
pub(crate) type Shared = [u8; 4 * QUAD];

/// A packed format as the kernels see it.
pub(crate) trait Panel {
    /// How groups enter the sum.
    const ARITH: Arith;
    /// How codes are stored.
    const CODES: Codes;
    /// Groups of 32 columns in a block.
    const GROUPS: usize;
    /// Bytes of a block of 16 rows.
    const BYTES: usize;

    /// Decodes what is quicker to decode for all groups of the block at `p`.
    ///
    /// # Safety
    /// `p` points to `BYTES` bytes.
    #[inline(always)]
    unsafe fn prepare<S: Simd>(_: S, _: *const u8, _: &mut Shared) {}

    /// Loads group `g` of the block at `p`, for which `shared` was prepared.
    ///
    /// # Safety
    /// `p` points to `BYTES` bytes and `g < GROUPS`.
    unsafe fn load<S: Simd>(s: S, p: *const u8, _: &Shared, g: usize) -> Tile<S>;
}

/// Panels of a task.
pub(crate) const SIDE: usize = 4;

/// 16 output columns a panel of one or many rows: `out[r][16 p..16 p + 16] (+)= panels[p] * acts[r]`.
pub(crate) struct PanelJob<'a> {
    /// Panels one after the other: of each, blocks of 16 rows.
    pub panels: &'a [u8],
    /// How many, at most [`SIDE`].
    pub n_panels: usize,
    /// All activation rows.
    pub acts: &'a [ActBlock],
    /// Blocks in an activation row.
    pub act_stride: usize,
    /// First block of each activation row that meets this panel.
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

/// Runs a job for format `P`.
///
/// # Safety
/// `out` is valid for `rows` rows of `width` elements `out_stride` apart, and nothing else uses them meanwhile.
pub(crate) unsafe fn run<P: Panel>(isa: Isa, job: &PanelJob) {
    let blocks = job.panels.len() / (job.n_panels * P::BYTES);
    assert!(job.n_panels <= SIDE && job.panels.len() == job.n_panels * blocks * P::BYTES, "panels are whole blocks");
    assert!(job.width <= job.n_panels * LANES && job.width > (job.n_panels - 1) * LANES, "outputs of every panel");
    assert!(job.act_start + blocks * P::GROUPS <= job.act_stride, "activation rows cover the panel's columns");
    let last = match job.gather {
        Some(rows) => {
            assert_eq!(rows.len(), job.rows);
            rows.iter().max().map_or(0, |&r| r as usize + 1)
        }
        None => job.rows,
    };
    assert!(last * job.act_stride <= job.acts.len(), "activation rows exist");
    isa.run(Rows::<P> { job, format: std::marker::PhantomData });
}

struct Rows<'a, P> {
    job: &'a PanelJob<'a>,
    format: std::marker::PhantomData<P>,
}

impl<P: Panel> Kernel for Rows<'_, P> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let job = self.job;
        // SAFETY: `run` checked the panels and the activations, its caller vouches for the outputs.
        unsafe {
            for panel in 0..job.n_panels {
                let mut row = 0;
                while row < job.rows {
                    row += match job.rows - row {
                        9.. if S::TILE >= 10 && row > 0 => rows::<S, P, 10>(s, job, panel, row),
                        5.. if S::TILE >= 10 => rows::<S, P, 8>(s, job, panel, row),
                        3.. => rows::<S, P, 4>(s, job, panel, row),
                        2 => rows::<S, P, 2>(s, job, panel, row),
                        _ => rows::<S, P, 1>(s, job, panel, row),
                    };
                }
            }
        }
    }
}

/// The body for `n` from 0 to `N - 1`, at most 10, one after the other in the code: accumulators stay in registers only
/// where no loop is left that indexes them, and the compiler leaves one when the body is long.
macro_rules! unrolled {
    ($n:ident < $end:ident, $body:block) => { unrolled!(@ $n $end $body 0 1 2 3 4 5 6 7 8 9) };
    (@ $n:ident $end:ident $body:block $($i:literal)*) => {
        $( if $i < $end { let $n = $i; $body } )*
    };
}

/// Bytes ahead of a panel's first pass over memory that it is asked for. They may be of the next panels, which mostly
/// are the next that the thread reads.
const AHEAD: usize = 4096;

/// A tile of panel `panel` and the `N` rows (at most 10) from `row` on, where as many are left; says how many. Rows that
/// are not there are the last one again.
///
/// # Safety
/// As [`run`], with `row < rows` and a panel of the job.
#[inline(always)]
unsafe fn rows<S: Simd, P: Panel, const N: usize>(s: S, job: &PanelJob, panel: usize, row: usize) -> usize {
    let mut acts = [std::ptr::null::<ActBlock>(); N];
    let mut acc = [s.splat(0.0); N];
    let last = job.rows - 1;
    let mut n = 0;
    while n < N {
        let at = last.min(row + n);
        let act_row = job.gather.map_or(at, |rows| rows[at] as usize);
        // SAFETY: `run` checked that activation rows exist.
        acts[n] = unsafe { job.acts.as_ptr().add(act_row * job.act_stride + job.act_start) };
        if job.resume {
            // SAFETY: the caller vouches for the outputs.
            acc[n] = unsafe { s.load_n(job.out_at(at, panel), job.lanes(panel)) };
        }
        n += 1;
    }
    let bytes = job.panels.len() / job.n_panels;
    let blocks = &job.panels[panel * bytes..][..bytes];
    let (mut group, mut shared) = (0, [0; 4 * QUAD]);
    for block in blocks.chunks_exact(P::BYTES) {
        let block = block.as_ptr();
        // SAFETY: a block.
        unsafe { P::prepare(s, block, &mut shared) };
        let mut g = 0;
        while g < P::GROUPS {
            if N < 10 && row == 0 {
                // The widest tile never comes first: even a branch that is not taken costs it 4 %.
                let mut line = 0;
                while line <= P::BYTES / P::GROUPS / 64 {
                    s.prefetch(block.wrapping_add(g * (P::BYTES / P::GROUPS) + line * 64 + AHEAD));
                    line += 1;
                }
            }
            // SAFETY: a block of P::BYTES bytes, and the activation rows have as many groups.
            unsafe {
                let tile = P::load(s, block, &shared, g);
                unrolled!(n < N, {
                    acc[n] = step::<S, P>(s, &tile, acts[n].add(group), acc[n]);
                });
            }
            group += 1;
            g += 1;
        }
    }
    let mut n = 0;
    while n < N && row + n <= last {
        // SAFETY: the caller vouches for the outputs.
        unsafe { s.store_n(job.out_at(row + n, panel), acc[n], job.lanes(panel)) };
        n += 1;
    }
    N.min(job.rows - row)
}

impl PanelJob<'_> {
    /// Outputs of a panel that exist.
    #[inline(always)]
    fn lanes(&self, panel: usize) -> usize {
        (self.width - panel * LANES).min(LANES)
    }

    /// A row's first output of a panel.
    ///
    /// # Safety
    /// The row and the panel are the job's.
    #[inline(always)]
    unsafe fn out_at(&self, row: usize, panel: usize) -> *mut f32 {
        // SAFETY: the job's outputs are `rows` by `width`.
        unsafe { self.out.add(row * self.out_stride + panel * LANES) }
    }
}

/// One group of 32 columns: the arithmetic of docs/numerics.md.
///
/// # Safety
/// `act` points to a block.
#[inline(always)]
unsafe fn step<S: Simd, P: Panel>(s: S, t: &Tile<S>, act: *const ActBlock, acc: S::F) -> S::F {
    // SAFETY: the caller vouches for the block; its codes are 32 bytes.
    let (a, q) = unsafe { (&*act, (*act).q.as_ptr()) };
    let d = s.splat(a.d);
    match P::ARITH {
        Arith::Float => unreachable!("float formats have kernels of their own"),
        Arith::Scale32 | Arith::Scale32Min => {
            let mut sum = start::<S, P>(s, a.neg_sum);
            let mut i = 0;
            while i < 8 {
                // SAFETY: bytes 4i..4i + 4 of 32.
                sum = dot::<S, P>(s, sum, t.codes[i], unsafe { s.broadcast4(q.add(4 * i)) });
                i += 1;
            }
            let acc = s.fma(s.to_f(sum), s.mul(t.d[0], d), acc);
            if P::ARITH == Arith::Scale32Min { s.fma(t.min[0], s.splat(a.ds), acc) } else { acc }
        }
        Arith::Scale16 | Arith::Scale16Min | Arith::Float16 => {
            let (mut lo, mut hi) = (start::<S, P>(s, a.neg_sum_half[0]), start::<S, P>(s, a.neg_sum_half[1]));
            let mut i = 0;
            while i < 4 {
                // SAFETY: bytes 4i..4i + 4 of each half of 16.
                unsafe {
                    lo = dot::<S, P>(s, lo, t.codes[i], s.broadcast4(q.add(4 * i)));
                    hi = dot::<S, P>(s, hi, t.codes[i + 4], s.broadcast4(q.add(16 + 4 * i)));
                }
                i += 1;
            }
            if P::ARITH == Arith::Float16 {
                let acc = s.fma(s.to_f(lo), s.mul(t.d[0], d), acc);
                return s.fma(s.to_f(hi), s.mul(t.d[1], d), acc);
            }
            // Exact: each product and their sum are whole numbers below 2^24 (see Group), and floats are faster here.
            let sum = s.fma(s.to_f(hi), t.sub[1], s.mul(s.to_f(lo), t.sub[0]));
            let acc = s.fma(sum, s.mul(t.d[0], d), acc);
            if P::ARITH == Arith::Scale16Min {
                let acc = s.fma(t.min[0], s.splat(a.ds_half[0]), acc);
                s.fma(t.min[1], s.splat(a.ds_half[1]), acc)
            } else {
                acc
            }
        }
    }
}

#[inline(always)]
fn start<S: Simd, P: Panel>(s: S, neg_sum: i32) -> S::I {
    match P::CODES {
        Codes::Offset(shift) => s.shl_i(s.splat_i(neg_sum), shift),
        Codes::Unsigned => s.splat_i(0),
        Codes::Biased => s.start_biased(s.splat_i(neg_sum)),
    }
}

#[inline(always)]
fn dot<S: Simd, P: Panel>(s: S, acc: S::I, codes: S::B, acts: S::B) -> S::I {
    if matches!(P::CODES, Codes::Biased) { s.dot_biased(acc, codes, acts) } else { s.dot(acc, codes, acts) }
}

/// A group of 32 columns of 16 rows, unpacked from any format: what formats without a packing use.
#[derive(Clone)]
#[repr(C, align(64))]
pub(crate) struct WideGroup {
    codes: [u8; 8 * QUAD],
    d: [[f32; LANES]; 2],
    sub: [[f32; LANES]; 2],
    min: [[f32; LANES]; 2],
}

impl WideGroup {
    pub(crate) const ZERO: WideGroup =
        WideGroup { codes: [0x80; 8 * QUAD], d: [[0.0; LANES]; 2], sub: [[1.0; LANES]; 2], min: [[0.0; LANES]; 2] };

    /// Sets row `row` of 16.
    pub(crate) fn set_row(&mut self, row: usize, group: &Group) {
        for (quad, q) in self.codes.as_chunks_mut::<QUAD>().0.iter_mut().zip(group.q.as_chunks::<4>().0) {
            for (code, &q) in quad[row * 4..row * 4 + 4].iter_mut().zip(q) {
                *code = q as u8 ^ 0x80;
            }
        }
        for h in 0..2 {
            self.d[h][row] = group.d[h];
            self.sub[h][row] = f32::from(group.sub[h]);
            self.min[h][row] = group.min[h];
        }
    }

    /// The groups as a panel's bytes.
    pub(crate) fn bytes(groups: &[WideGroup]) -> &[u8] {
        // SAFETY: WideGroup is plain numbers without padding (896 is their sum and a multiple of the alignment).
        unsafe { std::slice::from_raw_parts(groups.as_ptr().cast(), size_of_val(groups)) }
    }
}

const _: () = assert!(size_of::<WideGroup>() == 512 + 3 * 128);

macro_rules! wide {
    ($name:ident) => {
        pub(crate) struct $name;

        impl Panel for $name {
            const ARITH: Arith = Arith::$name;
            const CODES: Codes = Codes::Biased;
            const GROUPS: usize = 1;
            const BYTES: usize = size_of::<WideGroup>();

            #[inline(always)]
            unsafe fn load<S: Simd>(s: S, p: *const u8, _: &Shared, _: usize) -> Tile<S> {
                // SAFETY: `p` points to a WideGroup, which `bytes` made from one.
                let w = unsafe { &*p.cast::<WideGroup>() };
                let mut t = Tile::zero(s);
                // SAFETY: 8 quads of 64 bytes, and arrays of 16 numbers.
                unsafe {
                    let mut i = 0;
                    while i < 8 {
                        t.codes[i] = s.load_b(w.codes.as_ptr().add(QUAD * i));
                        i += 1;
                    }
                    let mut h = 0;
                    while h < 2 {
                        t.d[h] = s.load(w.d[h].as_ptr());
                        t.sub[h] = s.load(w.sub[h].as_ptr());
                        t.min[h] = s.load(w.min[h].as_ptr());
                        h += 1;
                    }
                }
                t
            }
        }
    };
}

wide!(Scale32);
wide!(Scale32Min);
wide!(Scale16);
wide!(Scale16Min);
wide!(Float16);

/// The kernel for unpacked groups of a format.
pub(crate) fn wide_kernel(arith: Arith) -> unsafe fn(Isa, &PanelJob) {
    match arith {
        Arith::Float => unreachable!("float formats have no groups"),
        Arith::Scale32 => run::<Scale32>,
        Arith::Scale32Min => run::<Scale32Min>,
        Arith::Scale16 => run::<Scale16>,
        Arith::Scale16Min => run::<Scale16Min>,
        Arith::Float16 => run::<Float16>,
    }
}

/// Codes of 8 quads from 256 bytes of nibbles, as [`place::code4`](crate::pack::place::code4) puts them.
///
/// # Safety
/// `p` points to 256 bytes.
#[inline(always)]
pub(crate) unsafe fn nibble_codes<S: Simd>(s: S, p: *const u8) -> [S::B; 8] {
    let mask = s.splat_b(15);
    let mut codes = [mask; 8];
    let mut i = 0;
    while i < 4 {
        // SAFETY: 64 bytes at 64i of 256.
        let x = unsafe { s.load_b(p.add(QUAD * i)) };
        codes[2 * i] = s.and_b(x, mask);
        codes[2 * i + 1] = s.and_b(s.shr_b(x, 4), mask);
        i += 1;
    }
    codes
}

/// Adds the `BITS` higher bits of each code at bit `TO`, as [`place::code1`](crate::pack::place::code1) and
/// [`place::code2`](crate::pack::place::code2) put them: quad i has bits `i * BITS % 8` of vector `i * BITS / 8`.
///
/// # Safety
/// `p` points to `BITS * 64` bytes.
#[inline(always)]
pub(crate) unsafe fn or_bits<S: Simd, const BITS: usize, const TO: usize>(
    s: S,
    mut codes: [S::B; 8],
    p: *const u8,
) -> [S::B; 8] {
    let mask = s.splat_b(((1 << BITS) - 1) << TO);
    let mut i = 0;
    while i < 8 {
        // SAFETY: one of BITS vectors.
        let x = unsafe { s.load_b(p.add(i * BITS / 8 * QUAD)) };
        let from = i * BITS % 8;
        let x = if from <= TO { s.shl_b(x, (TO - from) as u32) } else { s.shr_b(x, (from - TO) as u32) };
        codes[i] = s.or_b(codes[i], s.and_b(x, mask));
        i += 1;
    }
    codes
}

/// A table of signed values with 128 added, for [`lookup_codes`].
pub(crate) const fn biased(values: &[i8; 16]) -> [u8; 16] {
    let mut table = [0; 16];
    let mut i = 0;
    while i < 16 {
        table[i] = values[i] as u8 ^ 0x80;
        i += 1;
    }
    table
}

/// As [`nibble_codes`], each replaced by its entry of a table.
///
/// # Safety
/// As [`nibble_codes`].
#[inline(always)]
pub(crate) unsafe fn lookup_codes<S: Simd>(s: S, table: &[u8; 16], p: *const u8) -> [S::B; 8] {
    // SAFETY: as this function.
    let mut codes = unsafe { nibble_codes(s, p) };
    let mut i = 0;
    while i < 8 {
        codes[i] = s.lookup(table, codes[i]);
        i += 1;
    }
    codes
}

/// The 6-bit scales and minima of 8 groups as bytes, for [`scale6`], from where
/// [`place::scale_min`](crate::pack::place::scale_min) puts them.
///
/// # Safety
/// `p` points to 192 bytes.
#[inline(always)]
pub(crate) unsafe fn scale6_bytes<S: Simd>(s: S, p: *const u8, shared: &mut Shared) {
    let (low, high) = (s.splat_b(15), s.splat_b(0x30));
    // SAFETY: three vectors of 64 bytes, and four to store.
    unsafe {
        let (scales, mins, both) = (s.load_b(p), s.load_b(p.add(QUAD)), s.load_b(p.add(2 * QUAD)));
        let to = shared.as_mut_ptr();
        s.store_b(to, s.or_b(s.and_b(scales, low), s.and_b(s.shl_b(both, 4), high)));
        s.store_b(to.add(QUAD), s.or_b(s.and_b(s.shr_b(scales, 4), low), s.and_b(s.shl_b(both, 2), high)));
        s.store_b(to.add(2 * QUAD), s.or_b(s.and_b(mins, low), s.and_b(both, high)));
        s.store_b(to.add(3 * QUAD), s.or_b(s.and_b(s.shr_b(mins, 4), low), s.and_b(s.shr_b(both, 2), high)));
    }
}

/// The scale and the minimum of group `g`: even groups come before odd ones.
#[inline(always)]
pub(crate) fn scale6<S: Simd>(s: S, shared: &Shared, g: usize) -> (S::F, S::F) {
    debug_assert!(g < 8);
    // SAFETY: 16 bytes of 256 each.
    unsafe {
        let scale = shared.as_ptr().add(g % 2 * QUAD + g / 2 * LANES);
        (s.to_f(s.load_u8(scale)), s.to_f(s.load_u8(scale.add(2 * QUAD))))
    }
}

/// Columns in a group, as the loaders of packed formats count them.
pub(crate) const COLS: usize = GROUP;
