//! Attention over cached keys and values.
//!
//! A query goes over parts of 256 positions, aligned to position 0, whatever the chunk or the window. Each part gives a
//! maximum, a sum and an output from scratch, and these are merged in the order of positions. So the result depends on
//! the query and the cache alone: not on how rows were grouped, nor on which thread computed which part.

mod kept;

pub(crate) use self::kept::Q8;
use self::kept::{Kept, Keys, Values};
use crate::act::{ActBlock, Acts, GROUP};
use crate::exec::Exec;
use crate::float_panel;
use crate::isa::Kernel;
use crate::kv::{KV_BLOCK, KvBlocks, KvLayer, KvPlan, KvSpan, KvType};
use crate::math;
use crate::pool::SharedMut;
use crate::simd::{LANES, Simd};
use std::array::{from_mut, from_ref};
use std::marker::PhantomData;
use std::ops::Range;

/// Positions of a part: the unit of every sum.
pub const PART: usize = 256;

/// Queries that pass over keys and values together.
const TILE: usize = 8;

/// Tiles that pass over a part one after the other while it is in the cache.
const STRIP: usize = 4;

/// Blocks of a part.
const BLOCKS: usize = PART / KV_BLOCK;

/// The keys and values of a head in each block of a part; null where no query sees a block.
type Heads = [(*const u8, *const u8); BLOCKS];

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
    /// Positions that position `pos` sees.
    fn visible(&self, pos: usize) -> Range<usize> {
        self.window.map_or(0, |w| (pos + 1).saturating_sub(w))..pos + 1
    }
}

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

/// Results of parts, where they are computed apart; reused from call to call.
#[derive(Debug, Default)]
pub struct AttnScratch(Vec<f32>);

/// `out = softmax(q k^T * scale) v` for each row of the plan, whose own keys and values are in the cache already.
/// `q` and `out`: `[rows, n_heads, head_dim]`; `q` is quantized where keys are.
///
/// # Panics
/// If shapes do not match or a table has no block for a visible position.
pub fn attention(exec: &Exec, op: &Attention, kv: KvView, q: &Acts, out: &mut [f32], scratch: &mut AttnScratch) {
    let (layout, plan) = (kv.layer.layout, kv.plan);
    let width = op.n_heads * layout.head_dim;
    assert!(q.cols() == width && q.rows() == plan.rows(), "queries of {} rows by {width}", plan.rows());
    assert!(out.len() == q.values().len(), "outputs of {} rows by {width}", plan.rows());
    assert_eq!(op.n_heads % layout.n_kv_heads, 0, "{} query heads over {} heads", op.n_heads, layout.n_kv_heads);
    assert!(op.window != Some(0), "a window holds at least the position itself");
    assert!(layout.kind != KvType::Q8_0 || out.is_empty() || !q.blocks().is_empty(), "queries are quantized as keys");
    let step = Step { op, kv, q, out: &SharedMut::new(out), isa: exec.isa };
    let (tiles, units, longest) = step.size();
    // One long sequence among few would keep one thread busy: then parts are the tasks. Two are not worth the merging.
    if longest > 2 && longest * 4 * exec.pool.threads() > units {
        let slots = units * TILE * (layout.head_dim + 2);
        if scratch.0.len() < slots {
            scratch.0.resize(slots, 0.0);
        }
        let parts = SharedMut::new(&mut scratch.0);
        exec.pool.for_each(units, &|unit| {
            // What this thread probably takes next.
            let ahead = unit + 1;
            step.part(unit, (ahead < units).then_some(ahead), &parts)
        });
        exec.pool.for_each(tiles, &|tile| step.merge(tile, &parts));
    } else {
        let strip = (tiles / (8 * exec.pool.threads())).clamp(1, STRIP);
        // The last rows see the most: they come first.
        let strips = tiles.div_ceil(strip);
        exec.pool.for_each(strips, &|task| {
            let first = (strips - 1 - task) * strip;
            let ahead = first.checked_sub(strip);
            step.whole(first..tiles.min(first + strip), ahead);
        });
    }
}

/// One call.
struct Step<'a> {
    op: &'a Attention,
    kv: KvView<'a>,
    q: &'a Acts,
    out: &'a SharedMut<f32>,
    isa: crate::Isa,
}

/// Up to [`TILE`] queries of one sequence over one head of the cache: rows, and in them heads of the group, in order.
struct Tile<'a> {
    span: &'a KvSpan,
    kv_head: usize,
    /// The first query, counted over the span.
    first: usize,
    len: usize,
    /// The number of its first part among all, and from one of its parts to the next: tiles of a head take turns.
    unit: usize,
    stride: usize,
}

impl Step<'_> {
    fn group(&self) -> usize {
        self.op.n_heads / self.kv.layer.layout.n_kv_heads
    }

    /// Tiles of a head, and parts that the last row of a sequence sees.
    fn tiles_and_parts(&self, span: &KvSpan) -> (usize, usize) {
        let seen = self.op.visible(span.past).start / PART..(span.past + span.rows).div_ceil(PART);
        ((span.rows * self.group()).div_ceil(TILE), seen.len())
    }

    /// Tiles, parts of all tiles, and the parts of the tile that has most.
    fn size(&self) -> (usize, usize, usize) {
        let n_kv_heads = self.kv.layer.layout.n_kv_heads;
        self.kv.plan.spans.iter().fold((0, 0, 0), |(all, units, longest), span| {
            let (tiles, parts) = self.tiles_and_parts(span);
            (all + tiles * n_kv_heads, units + tiles * n_kv_heads * parts, longest.max(parts))
        })
    }

    /// The tile of a number, or of a number of a part, and the rest: the part's own number in the tile.
    fn find(&self, mut number: usize, by_part: bool) -> (Tile<'_>, usize) {
        let (n_kv_heads, group, mut unit) = (self.kv.layer.layout.n_kv_heads, self.group(), 0);
        for span in &self.kv.plan.spans {
            let (tiles, parts) = self.tiles_and_parts(span);
            let each = if by_part { tiles * parts } else { tiles };
            if number < n_kv_heads * each {
                // Those of a head lie together, and in them those of a part.
                let (kv_head, at) = (number / each, number % each);
                let (part, tile) = (at / tiles, at % tiles);
                let first = tile * TILE;
                let len = TILE.min(span.rows * group - first);
                let unit = unit + kv_head * tiles * parts + tile;
                return (Tile { span, kv_head, first, len, unit, stride: tiles }, part);
            }
            number -= n_kv_heads * each;
            unit += tiles * n_kv_heads * parts;
        }
        unreachable!("numbers are below what `size` counted")
    }

    /// Query `i` of a tile.
    fn query(&self, tile: &Tile, i: usize) -> Query<'_> {
        let (dim, group) = (self.kv.layer.layout.head_dim, self.group());
        let (row, head) = ((tile.first + i) / group, tile.kv_head * group + (tile.first + i) % group);
        let at = ((tile.span.row + row) * self.op.n_heads + head) * dim;
        let visible = self.op.visible(tile.span.past + row);
        let blocks = self.q.blocks().get(at / GROUP..(at + dim) / GROUP).unwrap_or(&[]);
        Query { q: &self.q.values()[at..at + dim], blocks, at, visible, max: 0.0, sum: 0.0 }
    }

    /// All queries of a tile; the last one repeated where there are fewer.
    fn queries(&self, tile: &Tile) -> [Query<'_>; TILE] {
        std::array::from_fn(|i| self.query(tile, i.min(tile.len - 1)))
    }

    /// The parts that some query of a tile sees: the first one, and how many.
    fn seen(&self, tile: &Tile) -> Range<usize> {
        let row = |i: usize| tile.span.past + (tile.first + i) / self.group();
        self.op.visible(row(0)).start / PART..self.op.visible(row(tile.len - 1)).end.div_ceil(PART)
    }

    /// Where a tile's head is in blocks of a part.
    fn heads(&self, tile: &Tile, part: usize, blocks: Range<usize>) -> Heads {
        let mut heads = [(std::ptr::null(), std::ptr::null()); BLOCKS];
        for (block, head) in heads.iter_mut().enumerate().take(blocks.end).skip(blocks.start) {
            let id = self.kv.plan.block(tile.span, part * PART + block * KV_BLOCK);
            let (key, value) = self.kv.layer.head(self.kv.blocks, id, tile.kv_head);
            *head = (key.cast_const(), value.cast_const());
        }
        heads
    }

    /// The same of what a thread will read next.
    fn heads_ahead(&self, tile: &Tile, part: usize) -> Heads {
        let end = tile.span.past + tile.span.rows;
        let place = |pos: usize| pos.clamp(part * PART, (part + 1) * PART) - part * PART;
        let first = self.op.visible(tile.span.past).start;
        self.heads(tile, part, place(first) / KV_BLOCK..place(end).div_ceil(KV_BLOCK))
    }

    /// Computes tiles from their first part to their last, part by part; after them comes tile `ahead`.
    fn whole(&self, numbers: Range<usize>, ahead: Option<usize>) {
        let mut tiles: [Option<(Tile, [Query; TILE])>; STRIP] = Default::default();
        for (tile, number) in tiles.iter_mut().zip(numbers) {
            let (found, _) = self.find(number, false);
            let queries = self.queries(&found);
            *tile = Some((found, queries));
        }
        let seen = || tiles.iter().flatten().map(|(tile, _)| self.seen(tile));
        let first = seen().map(|parts| parts.start).min().unwrap_or(0);
        let last = seen().map(|parts| parts.end).max().unwrap_or(0);
        for part in first..last {
            // Once for all tiles, if they are of one head.
            let mut heads = None;
            if part + 1 < last {
                heads = tiles.iter().flatten().map(|(tile, _)| self.heads_ahead(tile, part + 1)).next();
            } else if let Some(number) = ahead {
                let (tile, _) = self.find(number, false);
                heads = Some(self.heads_ahead(&tile, self.seen(&tile).start));
            }
            for (tile, queries) in tiles.iter_mut().flatten() {
                if self.seen(tile).contains(&part) {
                    self.run(tile, part, queries, Around { ahead: heads.take(), slot: None });
                }
            }
        }
        for (tile, queries) in tiles.iter().flatten() {
            for query in &queries[..tile.len] {
                // SAFETY: the query's own outputs.
                let out = unsafe { self.out.slice(query.at, query.q.len()) };
                out.iter_mut().for_each(|o| *o /= query.sum);
            }
        }
    }

    /// The part of a number among all.
    fn find_part(&self, unit: usize) -> (Tile<'_>, usize) {
        let (tile, part) = self.find(unit, true);
        // Parts are counted from the first that the sequence's first row sees.
        let first = self.op.visible(tile.span.past).start / PART;
        (tile, first + part)
    }

    /// Computes one part of a tile into its slot; after it comes part `ahead`.
    fn part(&self, unit: usize, ahead: Option<usize>, slots: &SharedMut<f32>) {
        let (tile, part) = self.find_part(unit);
        if !self.seen(&tile).contains(&part) {
            return;
        }
        let ahead = ahead.map(|unit| self.find_part(unit));
        let ahead = ahead.map(|(tile, part)| self.heads_ahead(&tile, part));
        let dim = self.kv.layer.layout.head_dim;
        // SAFETY: a slot is one task's.
        let slot = unsafe { slots.slice(unit * TILE * (dim + 2), TILE * (dim + 2)) };
        let mut queries = self.queries(&tile);
        self.run(&tile, part, &mut queries, Around { ahead, slot: Some(&mut *slot) });
        for (query, slot) in queries[..tile.len].iter().zip(slot.chunks_exact_mut(dim + 2)) {
            slot[dim..].copy_from_slice(&[query.max, query.sum]);
        }
    }

    /// Runs the kernel of the cache's kind and of the tile's length.
    fn run(&self, tile: &Tile, part: usize, queries: &mut [Query; TILE], around: Around) {
        match self.kv.layer.layout.kind {
            KvType::F32 => self.run_as::<float_panel::F32>(tile, part, queries, around),
            KvType::F16 => self.run_as::<float_panel::F16>(tile, part, queries, around),
            KvType::Q8_0 => self.run_as::<kept::Q8>(tile, part, queries, around),
        }
    }

    fn run_as<E: Kept>(&self, tile: &Tile, part: usize, queries: &mut [Query; TILE], around: Around) {
        match tile.len {
            1 => self.run_tile::<E, 1>(tile, part, queries, around),
            2 => self.run_tile::<E, 2>(tile, part, queries, around),
            3 => self.run_tile::<E, 3>(tile, part, queries, around),
            4 => self.run_tile::<E, 4>(tile, part, queries, around),
            5..=6 => self.run_tile::<E, 6>(tile, part, queries, around),
            _ => self.run_tile::<E, TILE>(tile, part, queries, around),
        }
    }

    fn run_tile<E: Kept, const N: usize>(&self, tile: &Tile, part: usize, queries: &mut [Query; TILE], around: Around) {
        let queries = queries.first_chunk_mut::<N>().expect("N is at most TILE");
        self.isa.run(Part { step: self, tile, part, queries, around, kind: PhantomData::<E> });
    }

    /// Merges the parts of a tile.
    fn merge(&self, tile: usize, slots: &SharedMut<f32>) {
        let (tile, _) = self.find(tile, false);
        self.isa.run(MergeTask { step: self, tile: &tile, slots });
    }
}

/// The state of a query between parts.
#[derive(Clone)]
struct Query<'a> {
    q: &'a [f32],
    /// The same quantized, where keys are.
    blocks: &'a [ActBlock],
    /// Element of the outputs where its result goes: the unnormalised sum meanwhile.
    at: usize,
    visible: Range<usize>,
    max: f32,
    sum: f32,
}

/// Factors of what a query had and of what a part adds.
#[derive(Clone, Copy, Default)]
struct Merge {
    is_first: bool,
    old: f32,
    new: f32,
}

impl Query<'_> {
    /// Positions of a part that it sees, from the part's start: none of a part before its window that an earlier query
    /// of the tile still sees.
    #[inline(always)]
    fn in_part(&self, part: usize) -> Range<usize> {
        let start = part * PART;
        let place = |pos: usize| pos.clamp(start, start + PART) - start;
        place(self.visible.start)..place(self.visible.end)
    }

    /// Takes a part's maximum and sum into the running ones.
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

impl Merge {
    /// Puts `n` lanes of a part's output into what is at `out`.
    ///
    /// # Safety
    /// `out` is `n` elements that nothing else uses.
    #[inline(always)]
    unsafe fn put<S: Simd>(&self, s: S, out: *mut f32, x: S::F, n: usize) {
        // SAFETY: as this function.
        unsafe {
            let merged = if self.is_first {
                x
            } else {
                let old = s.load_n(out, n);
                s.fma(x, s.splat(self.new), s.mul(old, s.splat(self.old)))
            };
            s.store_n(out, merged, n)
        }
    }
}

/// What comes after a part, and where its results go.
struct Around<'a> {
    /// What this thread reads next, if that is elsewhere.
    ahead: Option<Heads>,
    /// Where results go instead of the outputs: of each query `head_dim + 2` elements.
    slot: Option<&'a mut [f32]>,
}

/// One part of a tile. What is more than the tile's length repeats the last query and goes nowhere.
struct Part<'a, 'q, E, const N: usize> {
    step: &'a Step<'a>,
    tile: &'a Tile<'a>,
    part: usize,
    queries: &'a mut [Query<'q>; N],
    around: Around<'a>,
    kind: PhantomData<E>,
}

impl<E: Kept, const N: usize> Kernel for Part<'_, '_, E, N> {
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let Part { step, tile, part, .. } = self;
        let queries = &mut *self.queries;
        let dim = step.kv.layer.layout.head_dim;
        let ranges: [Range<usize>; N] = std::array::from_fn(|n| queries[n].in_part(part));
        let low = ranges.iter().fold(PART, |low, r| low.min(r.start)) / KV_BLOCK;
        let high = ranges.iter().fold(0, |high, r| high.max(r.end)).div_ceil(KV_BLOCK);
        let heads = step.heads(tile, part, low..high);
        let mut p = [[0f32; PART]; N];
        for (block, &(key, value)) in heads.iter().enumerate().take(high).skip(low) {
            // SAFETY: a head's keys in a block of kind E.
            let scores = unsafe { E::scores::<S, N>(s, Keys { key, value, dim }, queries) };
            let mut n = 0;
            while n < N {
                // SAFETY: 32 scores of a block.
                unsafe {
                    let p = p[n].as_mut_ptr().add(block * KV_BLOCK);
                    s.store(p, scores[n][0]);
                    s.store(p.add(LANES), scores[n][1]);
                }
                n += 1;
            }
        }
        // A closure would not have the instructions enabled.
        let mut merges = [None; N];
        let mut n = 0;
        while n < N {
            // What a query does not see at all leaves it as it is.
            if !ranges[n].is_empty() {
                let stats = softmax(s, step.op, ranges[n].clone(), &mut p[n]);
                merges[n] = Some(queries[n].merge(s, stats));
            }
            n += 1;
        }
        let ahead = self.around.ahead.take().unwrap_or(heads);
        let values = Values { heads: &heads, ahead: &ahead, dim };
        let mut d = 0;
        while d < dim {
            let weights = E::weights::<S, N>(s, &values, low..high, d, &p);
            let weights = weights.as_ref().unwrap_or(&p);
            // SAFETY: values of kind E; whole vectors of 16 dimensions are there.
            unsafe {
                if d + LANES < dim {
                    let sums = sums::<S, E, N, 2>(s, &values, &ranges, weights, d);
                    self.put(s, &merges, d, &sums);
                    d += 2 * LANES;
                } else {
                    let sums = sums::<S, E, N, 1>(s, &values, &ranges, weights, d);
                    self.put(s, &merges, d, &sums);
                    d += LANES;
                }
            }
        }
    }
}

impl<E, const N: usize> Part<'_, '_, E, N> {
    /// Puts dimensions from `d` on where they go.
    ///
    /// # Safety
    /// `d` is below the head's dimensions.
    #[inline(always)]
    unsafe fn put<S: Simd, const V: usize>(
        &mut self,
        s: S,
        merges: &[Option<Merge>; N],
        d: usize,
        sums: &[[S::F; V]; N],
    ) {
        let dim = self.step.kv.layer.layout.head_dim;
        let mut n = 0;
        while n < N && n < self.tile.len {
            let mut v = 0;
            while let (true, Some(merge)) = (v < V, &merges[n]) {
                let at = d + v * LANES;
                let lanes = LANES.min(dim - at);
                let out = match &mut self.around.slot {
                    Some(slot) => &mut slot[n * (dim + 2) + at..][..lanes],
                    // SAFETY: the query's own outputs.
                    None => unsafe { self.step.out.slice(self.queries[n].at + at, lanes) },
                };
                // SAFETY: `lanes` outputs of this query.
                unsafe { merge.put(s, out.as_mut_ptr(), sums[n][v], lanes) };
                v += 1;
            }
            n += 1;
        }
    }
}

/// Merges a tile's parts from their slots into the outputs.
struct MergeTask<'a> {
    step: &'a Step<'a>,
    tile: &'a Tile<'a>,
    slots: &'a SharedMut<f32>,
}

impl Kernel for MergeTask<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (step, tile, dim) = (self.step, self.tile, self.step.kv.layer.layout.head_dim);
        let first = step.op.visible(tile.span.past).start / PART;
        for i in 0..tile.len {
            let mut query = step.query(tile, i);
            // SAFETY: the query's own outputs.
            let out = unsafe { step.out.slice(query.at, dim) };
            for part in query.visible.start / PART..query.visible.end.div_ceil(PART) {
                let slot = (tile.unit + (part - first) * tile.stride) * TILE + i;
                // SAFETY: no task writes slots any more.
                let slot: &[f32] = unsafe { self.slots.slice(slot * (dim + 2), dim + 2) };
                let merge = query.merge(s, (slot[dim], slot[dim + 1]));
                for d in (0..dim).step_by(LANES) {
                    let lanes = LANES.min(dim - d);
                    // SAFETY: `lanes` elements of both.
                    unsafe {
                        let x = s.load_n(slot.as_ptr().add(d), lanes);
                        merge.put(s, out.as_mut_ptr().add(d), x, lanes);
                    }
                }
            }
            out.iter_mut().for_each(|o| *o /= query.sum);
        }
    }
}

/// Weighted sums of a part's values, `V` vectors of dimensions from `d` on: lane = dimension, keys in order. What all
/// queries see is read once for all; what some do not see must not touch them, not even multiplied by zero.
///
/// # Safety
/// `values` are of kind `E`, with blocks for all of `ranges`.
#[inline(always)]
unsafe fn sums<S: Simd, E: Kept, const N: usize, const V: usize>(
    s: S,
    values: &Values,
    ranges: &[Range<usize>; N],
    weights: &[[f32; PART]; N],
    d: usize,
) -> [[S::F; V]; N] {
    let all_start = ranges.iter().fold(0, |all, r| all.max(r.start));
    let all_end = ranges.iter().fold(PART, |all, r| all.min(r.end));
    let mut acc = [[s.splat(0.0); V]; N];
    let mut n = 0;
    // SAFETY: as this function.
    unsafe {
        while n < N {
            let own = ranges[n].start..ranges[n].end.min(all_start);
            add_values::<S, E, 1, V>(s, values, own, from_ref(&weights[n]), d, from_mut(&mut acc[n]));
            n += 1;
        }
        add_values::<S, E, N, V>(s, values, all_start..all_end, weights, d, &mut acc);
        n = 0;
        while n < N {
            let own = ranges[n].start.max(all_start).max(all_end)..ranges[n].end;
            add_values::<S, E, 1, V>(s, values, own, from_ref(&weights[n]), d, from_mut(&mut acc[n]));
            n += 1;
        }
    }
    acc
}

/// Adds the values of `keys`.
///
/// # Safety
/// As [`sums`].
#[inline(always)]
unsafe fn add_values<S: Simd, E: Kept, const N: usize, const V: usize>(
    s: S,
    values: &Values,
    keys: Range<usize>,
    weights: &[[f32; PART]; N],
    d: usize,
    acc: &mut [[S::F; V]; N],
) {
    let mut key = keys.start;
    while key < keys.end {
        let block = key / KV_BLOCK;
        let end = keys.end.min((block + 1) * KV_BLOCK);
        let (value, ahead) = (values.heads[block].1, values.ahead[block].0);
        // An address without a page would be looked up each time.
        let ahead = if ahead.is_null() { value } else { ahead };
        while key < end {
            let mut x = [s.splat(0.0); V];
            // Dimensions come in twos of vectors, so each key has its line.
            s.prefetch_lines(ahead.wrapping_add((d + key % KV_BLOCK) * E::LINE), E::LINE);
            let mut v = 0;
            while v < V {
                // SAFETY: the value of a key in its block, whole vectors of dimensions.
                x[v] = unsafe { E::value(s, value.add(E::offset(values.dim, key % KV_BLOCK, d + v * LANES))) };
                v += 1;
            }
            let mut n = 0;
            while n < N {
                let w = s.splat(weights[n][key]);
                let mut v = 0;
                while v < V {
                    acc[n][v] = s.fma(w, x[v], acc[n][v]);
                    v += 1;
                }
                n += 1;
            }
            key += 1;
        }
    }
}

/// Scales a part's scores and replaces those in `range` by `e^(score - max)`; gives the maximum and the sum. Others
/// become zero as far as they lie in the same blocks.
#[inline(always)]
fn softmax<S: Simd>(s: S, op: &Attention, range: Range<usize>, p: &mut [f32; PART]) -> (f32, f32) {
    let vectors = range.start / KV_BLOCK * 2..range.end.div_ceil(KV_BLOCK) * 2;
    let hide = |p: &mut [f32; PART]| {
        p[vectors.start * LANES..range.start].fill(f32::NEG_INFINITY);
        p[range.end..vectors.end * LANES].fill(f32::NEG_INFINITY);
    };
    // Before scaling: a hidden lane may hold anything.
    hide(p);
    let (scale, mut max) = (s.splat(op.scale), s.splat(f32::NEG_INFINITY));
    // SAFETY: vectors of the part.
    unsafe {
        for at in vectors.clone().map(|v| v * LANES) {
            let mut x = s.mul(s.load(p.as_ptr().add(at)), scale);
            if let Some(cap) = op.softcap {
                let cap = s.splat(cap);
                x = s.mul(cap, math::tanh(s, s.div(x, cap)));
            }
            s.store(p.as_mut_ptr().add(at), x);
            max = s.max(x, max);
        }
        if op.softcap.is_some() {
            hide(p);
            max = s.splat(f32::NEG_INFINITY);
            for at in vectors.clone().map(|v| v * LANES) {
                max = s.max(s.load(p.as_ptr().add(at)), max);
            }
        }
        let max = s.max_lane(max);
        let (m, mut sum) = (s.splat(max), s.splat(0.0));
        for at in vectors.map(|v| v * LANES) {
            let e = math::exp(s, s.sub(s.load(p.as_ptr().add(at)), m));
            s.store(p.as_mut_ptr().add(at), e);
            sum = s.add(sum, e);
        }
        (max, s.sum(sum))
    }
}
