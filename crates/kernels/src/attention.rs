//! Attention over cached keys and values.
//!
//! A query attends block by block: 32 positions aligned to position 0, whatever the chunk or the window. Each block
//! gives a maximum, a sum and an output from scratch, and these are merged in the order of positions. So the result
//! depends on the query and the cache alone, not on how rows were grouped or spread over threads.

use crate::exec::Exec;
use crate::isa::Kernel;
use crate::kv::{KV_BLOCK, KvBlocks, KvLayer, KvPlan, KvSpan, KvType};
use crate::math;
use crate::pool::SharedMut;
use crate::simd::{LANES, Simd};

/// What attention needs beside queries and cache.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// Query heads: a multiple of the cache's heads; head h reads head h / (n_heads / n_kv_heads).
    pub n_heads: usize,
    /// Multiplies the scores.
    pub scale: f32,
    /// `cap * tanh(score / cap)` of each scaled score.
    pub softcap: Option<f32>,
    /// A position sees itself and the `window - 1` before it; all before it where there is none.
    pub window: Option<usize>,
}

impl Attention {
    /// First position that position `pos` sees.
    fn first(&self, pos: usize) -> usize {
        self.window.map_or(0, |w| (pos + 1).saturating_sub(w))
    }
}

/// Queries that pass over a block together.
const TILE: usize = 8;

/// Rows of a task.
const ROWS: usize = 16;

/// What attention reads: one layer of the cache.
#[derive(Clone, Copy)]
pub struct KvView<'a> {
    /// The blocks of the layer's group.
    pub blocks: &'a KvBlocks,
    /// The layer's place in them.
    pub layer: KvLayer,
    /// Where the rows are.
    pub plan: &'a KvPlan,
}

/// `out = softmax(q k^T * scale) v` for each row of the plan, whose own keys and values are in the cache already.
/// `q` and `out`: `[rows, n_heads, head_dim]`.
///
/// # Panics
/// If shapes do not match or a table has no block for a visible position.
pub fn attention(exec: &Exec, op: &Attention, kv: KvView, q: &[f32], out: &mut [f32]) {
    let (layout, plan) = (kv.layer.layout, kv.plan);
    let width = op.n_heads * layout.head_dim;
    assert!(q.len() == plan.rows() * width && out.len() == q.len(), "{} rows of {width}", plan.rows());
    assert_eq!(op.n_heads % layout.n_kv_heads, 0, "{} query heads over {} heads", op.n_heads, layout.n_kv_heads);
    assert!(op.window != Some(0), "a window holds at least the position itself");
    let tasks: usize = plan.spans.iter().map(|span| span.rows.div_ceil(ROWS)).sum();
    let out = SharedMut::new(out);
    exec.pool.for_each(tasks * layout.n_kv_heads, &|task| {
        let (mut part, kv_head) = (task / layout.n_kv_heads, task % layout.n_kv_heads);
        for span in &plan.spans {
            let parts = span.rows.div_ceil(ROWS);
            if part < parts {
                let rows = part * ROWS..span.rows.min((part + 1) * ROWS);
                return exec.isa.run(Task { op, kv, span, q, out: &out, kv_head, rows });
            }
            part -= parts;
        }
    });
}

struct Task<'a> {
    op: &'a Attention,
    kv: KvView<'a>,
    span: &'a KvSpan,
    q: &'a [f32],
    out: &'a SharedMut<f32>,
    kv_head: usize,
    /// Rows of the span.
    rows: std::ops::Range<usize>,
}

/// The state of a query between blocks.
#[derive(Clone, Copy)]
struct Query<'a> {
    q: &'a [f32],
    /// Element of `out` where its result goes: the unnormalised sum meanwhile.
    at: usize,
    /// Positions it sees.
    first: usize,
    end: usize,
    max: f32,
    sum: f32,
}

impl Kernel for Task<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let group = self.op.n_heads / self.kv.layer.layout.n_kv_heads;
        let n = self.rows.len() * group;
        let mut i = 0;
        while i < n {
            let count = TILE.min(n - i);
            let mut queries: [Query; TILE] = std::array::from_fn(|j| self.query((i + j.min(count - 1)) / group, i + j));
            self.tile(s, &mut queries[..count]);
            i += count;
        }
    }
}

impl Task<'_> {
    /// Query `index` of the task: head `index % group` of the head's group in row `row`.
    #[inline(always)]
    fn query(&self, row: usize, index: usize) -> Query<'_> {
        let dim = self.kv.layer.layout.head_dim;
        let group = self.op.n_heads / self.kv.layer.layout.n_kv_heads;
        let row = self.rows.start + row;
        let pos = self.span.past + row;
        let at = ((self.span.row + row) * self.op.n_heads + self.kv_head * group + index % group) * dim;
        let (first, end) = (self.op.first(pos), pos + 1);
        Query { q: &self.q[at..at + dim], at, first, end, max: 0.0, sum: 0.0 }
    }

    #[inline(always)]
    fn tile<S: Simd>(&self, s: S, queries: &mut [Query]) {
        let first = queries.iter().map(|q| q.first).min().unwrap_or(0);
        let end = queries.iter().map(|q| q.end).max().unwrap_or(0);
        for block in first / KV_BLOCK..end.div_ceil(KV_BLOCK) {
            let visible = |q: &Query| {
                let start = block * KV_BLOCK;
                (q.first.max(start) - start, q.end.min(start + KV_BLOCK).saturating_sub(start))
            };
            // Queries that see the same part of the block go together. Where they differ, one at a time: what a
            // query does not see must not touch it, not even multiplied by zero.
            let range = visible(&queries[0]);
            if queries.len() == TILE && queries.iter().all(|q| visible(q) == range) {
                self.block::<S, TILE>(s, block, range, queries);
                continue;
            }
            let mut i = 0;
            while i < queries.len() {
                let range = visible(&queries[i]);
                let same = queries[i..].iter().take_while(|q| visible(q) == range).count();
                if range.0 < range.1 {
                    match same {
                        4.. => self.block::<S, 4>(s, block, range, &mut queries[i..i + 4]),
                        2.. => self.block::<S, 2>(s, block, range, &mut queries[i..i + 2]),
                        _ => self.block::<S, 1>(s, block, range, &mut queries[i..i + 1]),
                    }
                }
                i += if same >= 4 { 4 } else { same.min(2) };
            }
        }
        for query in queries {
            // SAFETY: the query's own outputs.
            let out = unsafe { self.out.slice(query.at, query.q.len()) };
            for o in out {
                *o /= query.sum;
            }
        }
    }

    /// `N` queries that see positions `range` of a block.
    #[inline(always)]
    fn block<S: Simd, const N: usize>(&self, s: S, block: usize, range: (usize, usize), queries: &mut [Query]) {
        let id = self.kv.plan.block(self.span, block * KV_BLOCK);
        let (key, value) = self.kv.layer.head(self.kv.blocks, id, self.kv_head);
        // SAFETY: keys are [head_dim, 32] and values [32, value_stride] of the kind.
        unsafe {
            match self.kv.layer.layout.kind {
                KvType::F32 => self.block_of::<S, F32, N>(s, key, value, range, queries),
                KvType::F16 => self.block_of::<S, F16, N>(s, key, value, range, queries),
            }
        }
    }

    /// # Safety
    /// `key` and `value` are a head's part of a block of kind `E`.
    #[inline(always)]
    unsafe fn block_of<S: Simd, E: KvElement, const N: usize>(
        &self,
        s: S,
        key: *const u8,
        value: *const u8,
        range: (usize, usize),
        queries: &mut [Query],
    ) {
        let mut part = [Part { p: [0.0; KV_BLOCK], merge: Merge::default() }; N];
        // SAFETY: as this function.
        unsafe { self.scores::<S, E, N>(s, key, queries, &mut part) };
        let mut n = 0;
        while n < N {
            let stats = softmax_block(s, self.op, range, &mut part[n].p);
            part[n].merge = queries[n].merge(s, stats);
            n += 1;
        }
        // SAFETY: as this function.
        unsafe { self.values::<S, E, N>(s, value, range, &part, queries) };
    }

    /// Scores of 32 keys: lane = key, dimensions in order.
    ///
    /// # Safety
    /// As [`Task::block_of`].
    #[inline(always)]
    unsafe fn scores<S: Simd, E: KvElement, const N: usize>(
        &self,
        s: S,
        key: *const u8,
        queries: &[Query],
        part: &mut [Part; N],
    ) {
        let mut acc = [[s.splat(0.0); 2]; N];
        for d in 0..self.kv.layer.layout.head_dim {
            // SAFETY: 32 keys of dimension d; queries have head_dim elements.
            unsafe {
                let lo = E::load(s, key.add(d * KV_BLOCK * E::BYTES));
                let hi = E::load(s, key.add((d * KV_BLOCK + LANES) * E::BYTES));
                let mut n = 0;
                while n < N {
                    let q = s.splat(*queries.get_unchecked(n).q.get_unchecked(d));
                    acc[n] = [s.fma(q, lo, acc[n][0]), s.fma(q, hi, acc[n][1])];
                    n += 1;
                }
            }
        }
        let mut n = 0;
        while n < N {
            // SAFETY: 32 scores.
            unsafe {
                s.store(part[n].p.as_mut_ptr(), acc[n][0]);
                s.store(part[n].p.as_mut_ptr().add(LANES), acc[n][1]);
            }
            n += 1;
        }
    }

    /// Weighted sums of the block's values, merged into what the queries have so far: lane = dimension, keys in
    /// order.
    ///
    /// # Safety
    /// As [`Task::block_of`].
    #[inline(always)]
    unsafe fn values<S: Simd, E: KvElement, const N: usize>(
        &self,
        s: S,
        value: *const u8,
        range: (usize, usize),
        part: &[Part; N],
        queries: &[Query],
    ) {
        let dim = self.kv.layer.layout.head_dim;
        let stride = dim.next_multiple_of(LANES);
        for d in (0..dim).step_by(LANES) {
            let mut acc = [s.splat(0.0); N];
            let mut key = range.0;
            while key < range.1 {
                // SAFETY: value_stride elements a key, whole vectors.
                let v = unsafe { E::load(s, value.add((key * stride + d) * E::BYTES)) };
                let mut n = 0;
                while n < N {
                    acc[n] = s.fma(s.splat(part[n].p[key]), v, acc[n]);
                    n += 1;
                }
                key += 1;
            }
            let lanes = LANES.min(dim - d);
            let mut n = 0;
            while n < N {
                // SAFETY: the query's own outputs.
                unsafe {
                    let out = self.out.slice(queries[n].at + d, lanes).as_mut_ptr();
                    let m = &part[n].merge;
                    let merged = if m.is_first {
                        acc[n]
                    } else {
                        let old = if lanes == LANES { s.load(out) } else { s.load_partial(out, lanes) };
                        s.fma(acc[n], s.splat(m.new), s.mul(old, s.splat(m.old)))
                    };
                    if lanes == LANES { s.store(out, merged) } else { s.store_partial(out, merged, lanes) }
                }
                n += 1;
            }
        }
    }
}

/// What a block is to one query.
#[derive(Clone, Copy)]
struct Part {
    /// Scores of the block's keys, then their weights.
    p: [f32; KV_BLOCK],
    merge: Merge,
}

/// Factors of what a query had and of what a block adds.
#[derive(Clone, Copy, Default)]
struct Merge {
    is_first: bool,
    old: f32,
    new: f32,
}

impl Query<'_> {
    /// Takes a block's maximum and sum into the running ones.
    #[inline(always)]
    fn merge<S: Simd>(&mut self, s: S, (max, sum): (f32, f32)) -> Merge {
        if self.sum == 0.0 {
            (self.max, self.sum) = (max, sum);
            return Merge { is_first: true, old: 0.0, new: 1.0 };
        }
        let new_max = if self.max > max { self.max } else { max };
        let exp = |x: f32| s.lanes(math::exp(s, s.splat(x)))[0];
        let (old, new) = (exp(self.max - new_max), exp(max - new_max));
        self.sum = sum.mul_add(new, self.sum * old);
        self.max = new_max;
        Merge { is_first: false, old, new }
    }
}

/// Scales scores, hides what is out of `range`, and replaces them by `e^(score - max)`; gives the maximum and the sum.
#[inline(always)]
fn softmax_block<S: Simd>(s: S, op: &Attention, range: (usize, usize), p: &mut [f32; KV_BLOCK]) -> (f32, f32) {
    if range != (0, KV_BLOCK) {
        // Before scaling: a hidden lane may hold anything.
        p[..range.0].fill(f32::NEG_INFINITY);
        p[range.1..].fill(f32::NEG_INFINITY);
    }
    // SAFETY: 32 scores.
    unsafe {
        let mut x = [s.load(p.as_ptr()), s.load(p.as_ptr().add(LANES))];
        let scale = s.splat(op.scale);
        x = [s.mul(x[0], scale), s.mul(x[1], scale)];
        if let Some(cap) = op.softcap {
            let cap = s.splat(cap);
            let soft = |x: S::F| s.mul(cap, math::tanh(s, s.div(x, cap)));
            x = [soft(x[0]), soft(x[1])];
            s.store(p.as_mut_ptr(), x[0]);
            s.store(p.as_mut_ptr().add(LANES), x[1]);
            p[..range.0].fill(f32::NEG_INFINITY);
            p[range.1..].fill(f32::NEG_INFINITY);
            x = [s.load(p.as_ptr()), s.load(p.as_ptr().add(LANES))];
        }
        let max = s.max_lane(s.max(x[0], x[1]));
        let m = s.splat(max);
        let e = [math::exp(s, s.sub(x[0], m)), math::exp(s, s.sub(x[1], m))];
        s.store(p.as_mut_ptr(), e[0]);
        s.store(p.as_mut_ptr().add(LANES), e[1]);
        (max, s.sum(s.add(e[0], e[1])))
    }
}

/// An element of the cache.
trait KvElement {
    const BYTES: usize;
    /// 16 elements at `p`, widened.
    ///
    /// # Safety
    /// `p` points to 16 elements.
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::F;
}

struct F32;
struct F16;

impl KvElement for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::F {
        // SAFETY: the caller vouches for 16 elements.
        unsafe { s.load(p.cast()) }
    }
}

impl KvElement for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::F {
        // SAFETY: the caller vouches for 16 elements.
        unsafe { s.load_f16(p.cast()) }
    }
}
