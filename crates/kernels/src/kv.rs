//! Storage of keys and values: blocks of 32 positions, aligned to position 0, for all layers that share a window.
//!
//! A block holds, for each of its layers and each head, the keys transposed (`[head_dim, 32]`, so that a lane is a
//! key) and the values (`[32, head_dim]`, so that a lane is a dimension). Q8_0 keeps 32 dimensions of a key or a value
//! as signed bytes under one half-precision scale: keys as groups of 32 dimensions, each 32 scales and then
//! `[8, 32, 4]` codes with 128 added; values as `[head_dim / 32, 32]` scales and then `[32, head_dim]` codes.

use crate::act::{ActBlock, GROUP, quantize_block};
use crate::attention::Q8;
use crate::exec::Exec;
use crate::isa::Kernel;
use crate::memory::Memory;
use crate::simd::{LANES, Simd};
use half::f16;
use std::fmt;
use std::ptr::NonNull;
use std::str::FromStr;

/// Positions in a block: the unit of paging and of every attention sum.
pub const KV_BLOCK: usize = 32;

/// How keys and values are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvType {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// Signed bytes, one half-precision scale for 32 dimensions. Queries are quantized alike when they meet the keys.
    Q8_0,
}

impl KvType {
    /// The name that `--kv` takes.
    pub fn name(self) -> &'static str {
        match self {
            KvType::F32 => "f32",
            KvType::F16 => "f16",
            KvType::Q8_0 => "q8_0",
        }
    }

    /// This kind for heads of so many dimensions, or F16 where they are no whole blocks of it.
    pub fn for_heads_of(self, head_dim: usize) -> KvType {
        if self == KvType::Q8_0 && !head_dim.is_multiple_of(GROUP) { KvType::F16 } else { self }
    }

    /// Bytes of 32 keys, or of 32 values, of `dim` dimensions.
    fn bytes(self, dim: usize) -> usize {
        match self {
            KvType::F32 => 4 * KV_BLOCK * dim,
            KvType::F16 => 2 * KV_BLOCK * dim,
            KvType::Q8_0 => dim.div_ceil(GROUP) * Q8::GROUP,
        }
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for KvType {
    type Err = String;

    fn from_str(s: &str) -> Result<KvType, String> {
        [KvType::F32, KvType::F16, KvType::Q8_0]
            .into_iter()
            .find(|kind| kind.name() == s)
            .ok_or_else(|| format!("'{s}' is no KV type: expected f32, f16 or q8_0"))
    }
}

/// The shape of one layer's part of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// How numbers are kept.
    pub kind: KvType,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Dimensions of a head.
    pub head_dim: usize,
}

impl KvLayout {
    /// Bytes of one layer in a block.
    pub fn layer_bytes(&self) -> usize {
        self.n_kv_heads * self.head_bytes()
    }

    /// Keys, then values.
    fn head_bytes(&self) -> usize {
        self.key_bytes() + self.kind.bytes(self.value_stride())
    }

    fn key_bytes(&self) -> usize {
        self.kind.bytes(self.head_dim)
    }

    /// Elements from one value to the next: whole vectors, so that loads stay inside.
    fn value_stride(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }
}

/// Blocks of one size, made when first needed, reused when freed.
pub struct KvBlocks {
    block_bytes: usize,
    /// Blocks of a slab.
    per_slab: usize,
    slabs: Vec<Slab>,
    /// Blocks that were given out so far.
    made: usize,
    free: Vec<u32>,
}

/// Bytes of a slab, where a block is not larger: two large pages.
const SLAB: usize = 4 << 20;

/// Blocks side by side in memory.
struct Slab {
    data: NonNull<u8>,
    /// Owns the memory.
    _memory: Memory,
}

// SAFETY: a slab owns its memory; who may use which block when is what KvBlocks' borrows say.
unsafe impl Send for Slab {}
// SAFETY: as above.
unsafe impl Sync for Slab {}

impl Slab {
    fn new(bytes: usize) -> Option<Slab> {
        let mut memory = Memory::zeroed(bytes)?;
        Some(Slab { data: NonNull::new(memory.as_mut_ptr())?, _memory: memory })
    }
}

impl KvBlocks {
    /// No blocks yet, of `block_bytes` each.
    pub fn new(block_bytes: usize) -> KvBlocks {
        // Blocks begin on a cache line.
        let block_bytes = block_bytes.max(1).next_multiple_of(64);
        let per_slab = (SLAB / block_bytes).max(1);
        KvBlocks { block_bytes, per_slab, slabs: Vec::new(), made: 0, free: Vec::new() }
    }

    /// A block whose contents are whatever an earlier owner left; `None` when memory ends.
    pub fn alloc(&mut self) -> Option<u32> {
        if let Some(id) = self.free.pop() {
            return Some(id);
        }
        let id = u32::try_from(self.made).ok()?;
        if self.made == self.slabs.len() * self.per_slab {
            self.slabs.push(Slab::new(self.per_slab * self.block_bytes)?);
            // A later `free` must not allocate.
            self.free.reserve(self.slabs.len() * self.per_slab);
        }
        self.made += 1;
        Some(id)
    }

    /// Gives a block back.
    pub fn free(&mut self, id: u32) {
        debug_assert!((id as usize) < self.made && !self.free.contains(&id));
        self.free.push(id);
    }

    /// Makes the content of block `to` that of block `from`.
    ///
    /// # Panics
    /// If one of them is none.
    pub fn copy(&mut self, from: u32, to: u32) {
        if from != to {
            let (from, to) = (self.block(from), self.block(to));
            // SAFETY: two blocks of `block_bytes`, and nothing else uses them while we are borrowed mutably.
            unsafe { std::ptr::copy_nonoverlapping(from, to, self.block_bytes) };
        }
    }

    /// What is in a block, as it is stored.
    ///
    /// # Panics
    /// If it is none.
    pub fn content(&self, id: u32) -> &[u8] {
        // SAFETY: a block of `block_bytes` that were zeroed when it was made; writing takes the blocks mutably.
        unsafe { std::slice::from_raw_parts(self.block(id), self.block_bytes) }
    }

    /// The same, to be written.
    ///
    /// # Panics
    /// If it is none.
    pub fn content_mut(&mut self, id: u32) -> &mut [u8] {
        // SAFETY: as above, and nothing else uses it while we are borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.block(id), self.block_bytes) }
    }

    /// Bytes of all blocks.
    pub fn bytes(&self) -> usize {
        self.made * self.block_bytes
    }

    /// Bytes of the blocks that are in use.
    pub fn bytes_used(&self) -> usize {
        (self.made - self.free.len()) * self.block_bytes
    }

    pub(crate) fn block(&self, id: u32) -> *mut u8 {
        let id = id as usize;
        assert!(id < self.made, "block {id} of {}", self.made);
        // SAFETY: slabs hold `per_slab` blocks.
        unsafe { self.slabs[id / self.per_slab].data.as_ptr().add(id % self.per_slab * self.block_bytes) }
    }

    pub(crate) fn block_bytes(&self) -> usize {
        self.block_bytes
    }
}

/// Rows of a batch that belong to one sequence: `rows` new positions after `past` old ones.
#[derive(Clone, Copy, Debug)]
pub struct KvSpan {
    /// First row in the batch.
    pub row: usize,
    /// How many.
    pub rows: usize,
    /// Positions before the first row.
    pub past: usize,
    /// Number of the first block in the sequence's table: earlier ones have left the window.
    pub first_block: usize,
    /// Where the sequence's table begins in [`KvPlan::tables`].
    pub table: usize,
}

/// Where the rows of a batch are in the cache. Plain data, so that it can be filled again without allocating.
#[derive(Clone, Debug, Default)]
pub struct KvPlan {
    /// The batch's sequences, in order of rows.
    pub spans: Vec<KvSpan>,
    /// Their blocks, one table after the other, each in order of positions.
    pub tables: Vec<u32>,
}

impl KvPlan {
    /// No rows.
    pub fn clear(&mut self) {
        self.spans.clear();
        self.tables.clear();
    }

    /// Adds a sequence's rows: see [`KvSpan`] for the numbers.
    pub fn push(&mut self, rows: usize, past: usize, first_block: usize, table: impl IntoIterator<Item = u32>) {
        let row = self.spans.last().map_or(0, |s| s.row + s.rows);
        self.spans.push(KvSpan { row, rows, past, first_block, table: self.tables.len() });
        self.tables.extend(table);
    }

    /// Rows in all.
    pub fn rows(&self) -> usize {
        self.spans.last().map_or(0, |s| s.row + s.rows)
    }

    /// The block that holds a position of a span.
    #[inline(always)]
    pub(crate) fn block(&self, span: &KvSpan, pos: usize) -> u32 {
        self.tables[span.table + pos / KV_BLOCK - span.first_block]
    }
}

/// One layer's place in the blocks of its group.
#[derive(Clone, Copy, Debug)]
pub struct KvLayer {
    /// The shape of the layer's part of a block.
    pub layout: KvLayout,
    /// Which of the layers that share the blocks.
    pub index: usize,
}

impl KvLayer {
    /// The keys of a head in a block, and its values.
    pub(crate) fn head(&self, blocks: &KvBlocks, block: u32, head: usize) -> (*mut u8, *mut u8) {
        let layout = &self.layout;
        let offset = self.index * layout.layer_bytes() + head * layout.head_bytes();
        assert!(offset + layout.head_bytes() <= blocks.block_bytes() && head < layout.n_kv_heads);
        // SAFETY: inside the block, by the assertion.
        unsafe {
            let key = blocks.block(block).add(offset);
            (key, key.add(layout.key_bytes()))
        }
    }

    /// The key and the value of one position and head, as the cache keeps them: for tests and references.
    pub fn read(&self, blocks: &KvBlocks, (block, slot): (u32, usize), head: usize, k: &mut [f32], v: &mut [f32]) {
        let dim = self.layout.head_dim;
        assert!(slot < KV_BLOCK && k.len() == dim && v.len() == dim);
        let (key, value) = self.head(blocks, block, head);
        let stride = self.layout.value_stride();
        for d in 0..dim {
            // SAFETY: keys are [head_dim, 32] and values [32, value_stride] of the kind; no one writes meanwhile,
            // since writing takes the blocks mutably.
            unsafe {
                (k[d], v[d]) = match self.layout.kind {
                    KvType::F32 => (
                        key.cast::<f32>().add(d * KV_BLOCK + slot).read(),
                        value.cast::<f32>().add(slot * stride + d).read(),
                    ),
                    KvType::F16 => (half(key, d * KV_BLOCK + slot), half(value, slot * stride + d)),
                    KvType::Q8_0 => {
                        let group = key.add(d / GROUP * Q8::GROUP);
                        let code = group.add(Q8::SCALES + d % GROUP / 4 * 4 * KV_BLOCK + slot * 4 + d % 4).read();
                        let scales = dim / GROUP * Q8::SCALES;
                        let v = value.add(scales + slot * dim + d).cast::<i8>().read();
                        (
                            half(group, slot) * (f32::from(code) - 128.0),
                            half(value, d / GROUP * KV_BLOCK + slot) * f32::from(v),
                        )
                    }
                };
            }
        }
    }
}

/// Half-precision element `i` at `p`, widened.
///
/// # Safety
/// It is there.
unsafe fn half(p: *const u8, i: usize) -> f32 {
    // SAFETY: as this function.
    f16::from_bits(unsafe { p.cast::<u16>().add(i).read() }).to_f32()
}

/// Stores the keys and values of all rows. `k` and `v`: `[rows, n_kv_heads, head_dim]`.
///
/// # Panics
/// If shapes do not match or a table has no block for a position.
pub fn kv_store(exec: &Exec, blocks: &mut KvBlocks, layer: KvLayer, plan: &KvPlan, k: &[f32], v: &[f32]) {
    let width = layer.layout.n_kv_heads * layer.layout.head_dim;
    assert!(k.len() == plan.rows() * width && v.len() == k.len(), "keys and values of {} rows", plan.rows());
    let blocks = &*blocks;
    let heads = layer.layout.n_kv_heads;
    // A few rows are stored sooner than other threads are told.
    let tasks = if k.len() < 1 << 12 { 1 } else { heads };
    exec.pool.for_each(tasks, &|task| {
        for head in task * heads / tasks..(task + 1) * heads / tasks {
            exec.isa.run(Store { blocks, layer, plan, k, v, head });
        }
    });
}

struct Store<'a> {
    blocks: &'a KvBlocks,
    layer: KvLayer,
    plan: &'a KvPlan,
    k: &'a [f32],
    v: &'a [f32],
    head: usize,
}

impl Kernel for Store<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let layout = self.layer.layout;
        let (width, dim) = (layout.n_kv_heads * layout.head_dim, layout.head_dim);
        for span in &self.plan.spans {
            for i in 0..span.rows {
                let (pos, slot) = (span.past + i, (span.past + i) % KV_BLOCK);
                let (key, value) = self.layer.head(self.blocks, self.plan.block(span, pos), self.head);
                let at = (span.row + i) * width + self.head * dim;
                let (k, v) = (&self.k[at..at + dim], &self.v[at..at + dim]);
                // SAFETY: the head's part of the block is this task's alone; keys are [dim, 32], values
                // [32, value_stride].
                unsafe {
                    match layout.kind {
                        KvType::F32 => {
                            let (key, value) = (key.cast::<f32>(), value.cast::<f32>());
                            for (d, x) in k.iter().enumerate() {
                                key.add(d * KV_BLOCK + slot).write(*x);
                            }
                            let value = value.add(slot * layout.value_stride());
                            value.copy_from_nonoverlapping(v.as_ptr(), dim);
                        }
                        KvType::F16 => {
                            let (key, value) = (key.cast::<u16>(), value.cast::<u16>());
                            let mut half = [0u16; LANES];
                            for d in (0..dim).step_by(LANES) {
                                let n = LANES.min(dim - d);
                                to_f16(s, &k[d..d + n], &mut half);
                                for (j, x) in half[..n].iter().enumerate() {
                                    key.add((d + j) * KV_BLOCK + slot).write(*x);
                                }
                                to_f16(s, &v[d..d + n], &mut half);
                                let value = value.add(slot * layout.value_stride() + d);
                                value.copy_from_nonoverlapping(half.as_ptr(), n);
                            }
                        }
                        KvType::Q8_0 => store_q8(s, (k, v), (key, value), slot),
                    }
                }
            }
        }
    }
}

/// # Safety
/// `key` and `value` are a head's part of a block, of whole groups of 32 dimensions.
#[inline(always)]
unsafe fn store_q8<S: Simd>(s: S, (k, v): (&[f32], &[f32]), (key, value): (*mut u8, *mut u8), slot: usize) {
    let (dim, mut block) = (k.len(), ActBlock::ZERO);
    let groups = k.as_chunks::<GROUP>().0.iter().zip(v.as_chunks::<GROUP>().0);
    for (g, (k, v)) in groups.enumerate() {
        // SAFETY: group g of the keys' [8, 32, 4] codes and of the values' [32, dim].
        unsafe {
            quantize_block(s, k, &mut block);
            let key = key.add(g * Q8::GROUP);
            key.cast::<u16>().add(slot).write(f16::from_f32(block.d).to_bits());
            for (quad, codes) in block.q.as_chunks::<4>().0.iter().enumerate() {
                let biased = codes.map(|q| q as u8 ^ 0x80);
                key.add(Q8::SCALES + (quad * KV_BLOCK + slot) * 4).cast::<[u8; 4]>().write(biased);
            }
            quantize_block(s, v, &mut block);
            value.cast::<u16>().add(g * KV_BLOCK + slot).write(f16::from_f32(block.d).to_bits());
            let value = value.add(dim / GROUP * Q8::SCALES + slot * dim + g * GROUP);
            value.cast::<[i8; GROUP]>().write(block.q);
        }
    }
}

#[inline(always)]
fn to_f16<S: Simd>(s: S, x: &[f32], out: &mut [u16; LANES]) {
    // SAFETY: x has its length, out 16.
    unsafe {
        let x = s.load_n(x.as_ptr(), x.len());
        s.store_f16(out.as_mut_ptr(), x);
    }
}
