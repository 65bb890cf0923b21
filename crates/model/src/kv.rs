//! The cache of keys and values: which blocks a sequence holds. Layers that see equally far share a table; a layer
//! with a window gives a block back when no later position can see it.
//!
//! Sequences that were begun by [`KvCache::add_shared`] share blocks: a whole block can be found by what its rows and all
//! before them are ([`Chain`]), as long as nobody else needed its memory, and [`KvCache::adopt`] takes what is there in
//! place of computing it. A block that several hold is copied by the first of them that writes into it.

use crate::batch::{Batch, Span};
use crate::config::Config;
use crate::error::Error;
use crate::paging::Pages;
use crate::prefix::{BlockKey, Chain};
use crate::rope::Rope;
use crate::steering::Steering;
use puna_kernels::{AttnScratch, KV_BLOCK, KvBlocks, KvLayer, KvLayout, KvPlan, KvType, KvView};
use std::collections::VecDeque;
use std::ops::Range;

/// A sequence in a [`KvCache`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SeqId {
    index: u32,
    /// How many sequences had this place before: the handle of one that has ended stays without a sequence.
    generation: u32,
}

impl SeqId {
    /// No sequence.
    pub const NONE: SeqId = SeqId { index: u32::MAX, generation: u32::MAX };
}

/// Keys and values of many sequences.
pub struct KvCache {
    layout: KvLayout,
    dim: usize,
    rope: Rope,
    groups: Vec<Group>,
    /// Group of each layer, and its place there.
    layers: Vec<(usize, usize)>,
    seqs: Vec<Slot>,
    scratch: AttnScratch,
}

/// The place of a sequence.
#[derive(Default)]
struct Slot {
    generation: u32,
    seq: Option<Sequence>,
}

/// Layers with the same window.
struct Group {
    window: Option<usize>,
    pages: Pages,
    /// The rows of the current batch.
    plan: KvPlan,
}

struct Sequence {
    len: usize,
    /// How long it was known to become when it was last computed.
    total: usize,
    /// One a group.
    tables: Vec<Table>,
    /// What its rows are, if it shares blocks.
    chain: Option<Chain>,
}

/// The blocks of a sequence from `first` on.
#[derive(Clone, Default)]
struct Table {
    first: usize,
    blocks: VecDeque<u32>,
}

impl Table {
    /// Number of the block after the last one.
    fn end(&self) -> usize {
        self.first + self.blocks.len()
    }

    /// Gives back the blocks behind position `len`.
    fn shrink(&mut self, pages: &mut Pages, len: usize) {
        while self.end() > len.div_ceil(KV_BLOCK) {
            let Some(block) = self.blocks.pop_back() else { break };
            pages.release(block);
        }
    }

    /// Gives back all blocks, the last one first: of a prefix that is kept, the beginning serves most.
    fn clear(&mut self, pages: &mut Pages) {
        self.shrink(pages, 0);
        self.first = 0;
    }
}

impl Sequence {
    /// Takes the first `blocks` whole blocks of `chain` in place of what it holds. Every group has what it needs of them.
    fn take(&mut self, groups: &mut [Group], chain: &Chain, blocks: usize) {
        for (group, table) in groups.iter_mut().zip(&mut self.tables) {
            let first = group.first_kept(blocks);
            let keys = &chain.keys()[first..blocks];
            let found = keys.iter().map(|key| group.pages.find(key).expect("every layer serves them"));
            let found: VecDeque<u32> = found.collect();
            found.iter().for_each(|&block| group.pages.hold(block));
            table.clear(&mut group.pages);
            *table = Table { first, blocks: found };
        }
        self.len = blocks * KV_BLOCK;
        if let Some(own) = &mut self.chain {
            own.copy_from(chain, self.len);
        }
    }
}

impl Group {
    /// First block that the position at `len` needs.
    fn first_block(&self, len: usize) -> usize {
        first_needed(self.window, len) / KV_BLOCK
    }

    /// First block that a sequence needs that goes on after `blocks` whole ones.
    fn first_kept(&self, blocks: usize) -> usize {
        self.first_block(blocks * KV_BLOCK).min(blocks)
    }

    /// Most blocks that a sequence of `len` positions needs between steps.
    fn needed(&self, len: usize) -> usize {
        let window = self.window.map_or(usize::MAX, |w| (w.max(1) - 1).div_ceil(KV_BLOCK) + 1);
        len.div_ceil(KV_BLOCK).min(window)
    }

    /// Gets blocks of its own for `rows` positions from `len` on; gives how many of them have blocks then.
    fn reserve(&mut self, table: &mut Table, len: usize, rows: usize) -> usize {
        let (partly, at) = (len % KV_BLOCK, len / KV_BLOCK);
        if partly > 0 && rows > 0 {
            let block = &mut table.blocks[at - table.first];
            if self.pages.is_shared(*block) {
                let Some(own) = self.pages.alloc() else { return 0 };
                self.pages.copy(*block, own);
                self.pages.release(*block);
                *block = own;
            } else {
                self.pages.forget(*block);
            }
        }
        while table.end() * KV_BLOCK < len + rows {
            match self.pages.alloc() {
                Some(block) => table.blocks.push_back(block),
                None => break,
            }
        }
        (table.end() * KV_BLOCK - len).min(rows)
    }
}

impl KvCache {
    /// An empty cache for a model, which takes at most `bytes`: as many blocks of each kind of layer as fit. Heads that
    /// are no whole blocks of `kind` are kept as F16: see [`KvCache::notice`].
    pub fn new(config: &Config, kind: KvType, bytes: usize) -> KvCache {
        let kind = kind.for_heads_of(config.head_dim);
        let layout = KvLayout { kind, n_kv_heads: config.n_kv_heads, head_dim: config.head_dim };
        let mut windows: Vec<Option<usize>> = Vec::new();
        let mut counts = Vec::new();
        let mut layers = Vec::new();
        for window in &config.windows {
            let group = windows.iter().position(|w| w == window).unwrap_or_else(|| {
                windows.push(*window);
                counts.push(0);
                windows.len() - 1
            });
            layers.push((group, counts[group]));
            counts[group] += 1;
        }
        let limit = bytes / (config.windows.len() * layout.layer_bytes()).max(1);
        let group = |(window, n_layers): (Option<usize>, usize)| Group {
            window,
            pages: Pages::new(n_layers * layout.layer_bytes(), limit),
            plan: KvPlan::default(),
        };
        KvCache {
            layout,
            dim: config.dim,
            rope: config.rope.clone(),
            groups: windows.into_iter().zip(counts).map(group).collect(),
            layers,
            seqs: Vec::new(),
            scratch: AttnScratch::default(),
        }
    }

    /// How numbers are kept.
    pub fn kind(&self) -> KvType {
        self.layout.kind
    }

    /// A sentence for whoever asked for `wish`, where the cache is of another kind.
    pub fn notice(&self, wish: KvType) -> Option<String> {
        let (kind, head_dim) = (self.kind(), self.layout.head_dim);
        (kind != wish).then(|| {
            format!("keys and values are kept as {kind}: heads of {head_dim} dimensions are no whole blocks of {wish}")
        })
    }

    /// Begins a sequence whose blocks nobody else finds.
    pub fn add(&mut self) -> SeqId {
        let tables = self.groups.iter().map(|_| Table::default()).collect();
        self.place(Sequence { len: 0, total: 0, tables, chain: None })
    }

    /// Begins a sequence that shares blocks with others that begin alike: [`KvCache::adopt`] takes what is there, and
    /// others find what it computes.
    pub fn add_shared(&mut self) -> SeqId {
        let tables = self.groups.iter().map(|_| Table::default()).collect();
        self.place(Sequence { len: 0, total: 0, tables, chain: Some(Chain::default()) })
    }

    /// Begins a sequence that holds what another one does: the same blocks, until either writes into them. `None` if
    /// that one has ended.
    pub fn fork(&mut self, seq: SeqId) -> Option<SeqId> {
        let s = self.slot_mut(seq)?.seq.as_mut()?;
        let (len, total, chain, mut tables) = (s.len, s.total, s.chain.clone(), s.tables.clone());
        for (group, table) in self.groups.iter_mut().zip(&mut tables) {
            // Blocks that it has reserved and not written are its own.
            table.blocks.truncate(len.div_ceil(KV_BLOCK).saturating_sub(table.first));
            table.blocks.iter().for_each(|&block| group.pages.hold(block));
        }
        Some(self.place(Sequence { len, total, tables, chain }))
    }

    fn place(&mut self, seq: Sequence) -> SeqId {
        let index = self.seqs.iter().position(|slot| slot.seq.is_none()).unwrap_or_else(|| {
            self.seqs.push(Slot::default());
            self.seqs.len() - 1
        });
        let slot = &mut self.seqs[index];
        slot.generation = slot.generation.wrapping_add(1);
        slot.seq = Some(seq);
        SeqId { index: index as u32, generation: slot.generation }
    }

    /// Takes blocks that are in the cache already for a shared sequence that is to become `chain`, of `total` positions:
    /// as many as every layer can go on from, but never the last row, whose output somebody wants. Returns its length
    /// now, which is as before or a multiple of 32.
    pub fn adopt(&mut self, seq: SeqId, chain: &Chain, total: usize) -> usize {
        let Some(len) = self.len(seq) else { return 0 };
        let Some(s) = &mut self.seqs[seq.index as usize].seq else { return 0 };
        let Some(own) = &mut s.chain else { return len };
        let is_long = self.rope.is_long(total.max(chain.len()));
        let keys = chain.keys();
        let begins = len == 0 || (own.is_long() == is_long && keys.get(..len / KV_BLOCK) == Some(own.keys()));
        if chain.is_long() != is_long || !begins {
            return len;
        }
        let most = chain.len().saturating_sub(1) / KV_BLOCK;
        let from = len / KV_BLOCK;
        let Some(blocks) = longest(&self.groups, keys, from, most) else { return len };
        s.take(&mut self.groups, chain, blocks);
        s.total = total.max(s.len);
        s.len
    }

    /// Begins a sequence that holds the whole blocks of `chain` that are in the cache, as many as every layer can go on
    /// from: until it ends they stay as they are.
    pub(crate) fn hold(&mut self, chain: &Chain) -> SeqId {
        let blocks = longest(&self.groups, chain.keys(), 0, chain.keys().len()).unwrap_or(0);
        let seq = self.add_shared();
        if let Some(s) = &mut self.seqs[seq.index as usize].seq {
            s.take(&mut self.groups, chain, blocks);
        }
        seq
    }

    /// Begins a sequence that holds as many blocks as [`KvCache::hold`] does of `blocks` whole ones, to be filled: until
    /// they have names nobody finds them. `None`, and the cache as before, where there is no memory.
    pub(crate) fn hold_empty(&mut self, blocks: usize) -> Option<SeqId> {
        let fits = |group: &Group| blocks - group.first_kept(blocks) <= group.pages.available();
        if !self.groups.iter().all(fits) {
            return None;
        }
        let seq = self.add();
        let s = self.seqs[seq.index as usize].seq.as_mut()?;
        for (group, table) in self.groups.iter_mut().zip(&mut s.tables) {
            table.first = group.first_kept(blocks);
            while table.end() < blocks {
                let Some(block) = group.pages.alloc() else {
                    self.remove(seq);
                    return None;
                };
                table.blocks.push_back(block);
            }
        }
        Some(seq)
    }

    /// The blocks that a sequence holds, with their groups, in order.
    pub(crate) fn held(&self, seq: SeqId) -> impl Iterator<Item = (usize, u32)> {
        let tables = self.slot(seq).and_then(|slot| slot.seq.as_ref()).map_or(&[][..], |s| s.tables.as_slice());
        tables.iter().enumerate().flat_map(|(g, table)| table.blocks.iter().map(move |&id| (g, id)))
    }

    /// Makes the blocks that a sequence holds known as those of `chain`.
    pub(crate) fn name_held(&mut self, seq: SeqId, chain: &Chain) {
        if self.len(seq).is_none() {
            return;
        }
        let Some(s) = &mut self.seqs[seq.index as usize].seq else { return };
        for (group, table) in self.groups.iter_mut().zip(&mut s.tables) {
            for (block, key) in table.blocks.iter_mut().zip(&chain.keys()[table.first..]) {
                *block = group.pages.name(*block, *key);
            }
        }
    }

    /// Whether a sequence that is to become `chain` could take more blocks if the first `blocks` of `saved`, as
    /// [`KvCache::hold`] has them, were in the cache.
    pub(crate) fn lacks(&self, chain: &Chain, saved: &Chain, blocks: usize) -> bool {
        let pairs = chain.keys().iter().zip(saved.keys().iter().take(blocks));
        let most = chain.len().saturating_sub(1) / KV_BLOCK;
        let common = pairs.take_while(|(a, b)| a == b).count().min(most);
        // Windows of a shorter prefix begin earlier, where nothing was saved.
        let serves = |group: &Group| group.first_kept(common) >= group.first_kept(blocks);
        let is_served = self.groups.iter().all(serves);
        is_served && longest(&self.groups, chain.keys(), 0, common).unwrap_or(0) < common
    }

    /// Bytes of what [`KvCache::hold`] holds of so many blocks.
    pub(crate) fn kept_bytes(&self, blocks: usize) -> u64 {
        let bytes = |group: &Group| (blocks - group.first_kept(blocks)) as u64 * group.pages.block_bytes() as u64;
        self.groups.iter().map(bytes).sum()
    }

    /// The content of a block.
    pub(crate) fn block(&self, group: usize, id: u32) -> &[u8] {
        self.groups[group].pages.blocks.content(id)
    }

    /// The same, to be written.
    pub(crate) fn block_mut(&mut self, group: usize, id: u32) -> &mut [u8] {
        self.groups[group].pages.blocks.content_mut(id)
    }

    /// Gets blocks for `rows` more positions of a sequence, which stay its own until it is cut or ends. Returns how many
    /// of them have blocks: fewer when the cache is full.
    pub fn reserve(&mut self, seq: SeqId, rows: usize) -> usize {
        if self.len(seq).is_none() {
            return 0;
        }
        let Some(s) = &mut self.seqs[seq.index as usize].seq else { return 0 };
        let mut got = rows;
        for (group, table) in self.groups.iter_mut().zip(&mut s.tables) {
            got = got.min(group.reserve(table, s.len, got));
        }
        for (group, table) in self.groups.iter_mut().zip(&mut s.tables) {
            table.shrink(&mut group.pages, s.len + got);
        }
        got
    }

    /// Whether these sequences could grow to these lengths together.
    pub fn has_room(&self, wishes: impl Iterator<Item = (SeqId, usize)> + Clone) -> bool {
        self.groups.iter().enumerate().all(|(g, group)| {
            let missing = wishes.clone().map(|(seq, len)| {
                let held = self.slot(seq).and_then(|slot| slot.seq.as_ref()).map_or(0, |s| s.tables[g].blocks.len());
                group.needed(len).saturating_sub(held)
            });
            missing.fold(0, usize::saturating_add) <= group.pages.available()
        })
    }

    /// Bytes of keys and values that attention of a batch's rows reads, over all layers, each once.
    pub(crate) fn bytes_read(&self, batch: &Batch) -> u64 {
        let of_group = |(g, group): (usize, &Group)| {
            let layers = self.layers.iter().filter(|(of, _)| *of == g).count();
            let seen = batch.spans.iter().map(|s| s.start + s.rows - first_needed(group.window, s.start));
            seen.sum::<usize>() as u64 * (layers * self.layout.layer_bytes()) as u64 / KV_BLOCK as u64
        };
        self.groups.iter().enumerate().map(of_group).sum()
    }

    /// Positions that one sequence can have if it is alone.
    pub fn capacity(&self) -> usize {
        let fits = |group: &Group| {
            let window = group.needed(usize::MAX) <= group.pages.limit();
            if group.window.is_some() && window { usize::MAX } else { group.pages.positions() }
        };
        self.groups.iter().map(fits).min().unwrap_or(usize::MAX)
    }

    /// Bytes of 32 positions in all layers.
    pub fn block_bytes(&self) -> usize {
        self.layers.len() * self.layout.layer_bytes()
    }

    /// Bytes that it may take.
    pub fn limit(&self) -> usize {
        self.groups.first().map_or(0, |group| group.pages.limit().saturating_mul(self.block_bytes()))
    }

    /// Whether all counts and lists agree with what sequences hold: for tests.
    ///
    /// # Errors
    /// What does not.
    pub fn check(&self) -> Result<(), String> {
        let seqs = || self.seqs.iter().filter_map(|slot| slot.seq.as_ref());
        for (g, group) in self.groups.iter().enumerate() {
            group.pages.check(seqs().flat_map(|s| &s.tables[g].blocks)).map_err(|e| format!("group {g}: {e}"))?;
            let short = seqs().find(|s| s.tables[g].end() * KV_BLOCK < s.len);
            if let Some(s) = short {
                return Err(format!("group {g}: {} positions have {} blocks", s.len, s.tables[g].end()));
            }
        }
        match seqs().find(|s| s.chain.as_ref().is_some_and(|chain| chain.len() != s.len)) {
            Some(s) => Err(format!("{} positions are known by another number of rows", s.len)),
            None => Ok(()),
        }
    }

    fn slot(&self, id: SeqId) -> Option<&Slot> {
        self.seqs.get(id.index as usize).filter(|slot| slot.generation == id.generation)
    }

    fn slot_mut(&mut self, id: SeqId) -> Option<&mut Slot> {
        self.seqs.get_mut(id.index as usize).filter(|slot| slot.generation == id.generation)
    }

    /// Whether it was made for a model of this shape.
    pub(crate) fn fits(&self, config: &Config) -> bool {
        let windows = self.layers.iter().map(|&(group, _)| self.groups[group].window);
        let KvLayout { n_kv_heads, head_dim, .. } = self.layout;
        (n_kv_heads, head_dim) == (config.n_kv_heads, config.head_dim) && windows.eq(config.windows.iter().copied())
    }

    /// Ends a sequence and gives its blocks back; does nothing for one that has ended.
    pub fn remove(&mut self, seq: SeqId) {
        let Some(seq) = self.slot_mut(seq).and_then(|slot| slot.seq.take()) else { return };
        for (group, mut table) in self.groups.iter_mut().zip(seq.tables) {
            table.clear(&mut group.pages);
        }
    }

    /// Positions a sequence holds; `None` for one that has ended.
    pub fn len(&self, seq: SeqId) -> Option<usize> {
        Some(self.slot(seq)?.seq.as_ref()?.len)
    }

    /// How long a sequence was known to become when it was last computed.
    pub(crate) fn total(&self, seq: SeqId) -> usize {
        self.slot(seq).and_then(|slot| slot.seq.as_ref()).map_or(0, |s| s.total)
    }

    /// Whether the next rows of a sequence may be steered like this: one that shares blocks is so from its beginning.
    pub(crate) fn can_steer(&self, seq: SeqId, steering: Option<&Steering>) -> bool {
        let chain = self.slot(seq).and_then(|slot| slot.seq.as_ref()?.chain.as_ref());
        chain.is_none_or(|chain| chain.is_empty() || chain.is_steered_by(steering))
    }

    /// Forgets the positions of a sequence from `len` on. Where a window has already given back blocks that the
    /// shorter sequence would need, it is emptied. Returns the length it has now.
    pub fn truncate(&mut self, seq: SeqId, len: usize) -> usize {
        if self.len(seq).is_none() {
            return 0;
        }
        let Some(s) = &mut self.seqs[seq.index as usize].seq else { return 0 };
        if len >= s.len {
            return s.len;
        }
        let lost = |(group, table): (&Group, &Table)| table.first > group.first_block(len);
        let len = if self.groups.iter().zip(&s.tables).any(lost) { 0 } else { len };
        for (group, table) in self.groups.iter_mut().zip(&mut s.tables) {
            table.shrink(&mut group.pages, len);
            if len == 0 {
                table.first = 0;
            }
        }
        s.len = len;
        if let Some(chain) = &mut s.chain {
            chain.truncate(len);
        }
        len
    }

    /// Bytes of all blocks: what the cache has taken from the system, and what it will use again.
    pub fn bytes(&self) -> usize {
        self.groups.iter().map(|g| g.pages.blocks.bytes()).sum()
    }

    /// Bytes of the blocks that sequences hold.
    pub fn bytes_held(&self) -> usize {
        self.groups.iter().map(|g| g.pages.bytes_held()).sum()
    }

    /// Bytes of the blocks that no sequence holds and that one that begins alike can take.
    pub fn bytes_cached(&self) -> usize {
        self.groups.iter().map(|g| g.pages.bytes_idle()).sum()
    }

    /// Gets blocks for the rows of a batch, whose spans were checked against this cache.
    pub(crate) fn prepare(&mut self, batch: &Batch) -> Result<(), Error> {
        for span in &batch.spans {
            if self.reserve(span.seq, span.rows) < span.rows {
                self.rollback(batch);
                return Err(Error::OutOfMemory { what: "the KV cache" });
            }
        }
        for (g, group) in self.groups.iter_mut().enumerate() {
            group.plan.clear();
            for span in &batch.spans {
                let seq = self.seqs[span.seq.index as usize].seq.as_ref().expect("spans were checked");
                let table = &seq.tables[g];
                group.plan.push(span.rows, span.start, table.first, table.blocks.iter().copied());
            }
        }
        Ok(())
    }

    /// The batch's rows are in the cache: sequences grow by all that are no drafts.
    pub(crate) fn commit(&mut self, batch: &Batch) {
        let mut row = 0;
        for (i, span) in batch.spans.iter().enumerate() {
            self.enter(batch, i, row..row + span.rows - span.draft);
            row += span.rows;
        }
    }

    /// Takes the first `n` rows of a span's draft, from the batch that was computed last: they stand in the cache as if
    /// they had been computed one by one. The others leave nothing behind.
    pub fn accept(&mut self, batch: &Batch, span: usize, n: usize) {
        let Some(&Span { seq, rows, draft, .. }) = batch.spans.get(span) else { return };
        if self.len(seq).is_none() {
            return;
        }
        let before: usize = batch.spans[..span].iter().map(|s| s.rows).sum();
        let first = before + rows - draft;
        self.enter(batch, span, first..first + n.min(draft));
        let Some(s) = &mut self.seqs[seq.index as usize].seq else { return };
        for (group, table) in self.groups.iter_mut().zip(&mut s.tables) {
            table.shrink(&mut group.pages, s.len);
        }
    }

    /// A span's sequence grows by `rows` of the batch: whole blocks can be found, and what no later position sees is given
    /// back.
    fn enter(&mut self, batch: &Batch, span: usize, rows: Range<usize>) {
        let Span { seq, total, .. } = batch.spans[span];
        let s = self.seqs[seq.index as usize].seq.as_mut().expect("spans were checked");
        s.total = total.max(s.len + rows.len());
        if let Some(chain) = &mut s.chain {
            if s.len == 0 {
                *chain = Chain::new(self.rope.is_long(s.total));
                chain.set_steering(batch.steering_of(span));
            }
            let from = s.len / KV_BLOCK;
            chain.extend_from(batch, rows.clone(), self.dim);
            for (group, table) in self.groups.iter_mut().zip(&mut s.tables) {
                for (i, key) in chain.keys().iter().enumerate().skip(from) {
                    let block = &mut table.blocks[i - table.first];
                    *block = group.pages.name(*block, *key);
                }
            }
        }
        s.len += rows.len();
        for (group, table) in self.groups.iter_mut().zip(&mut s.tables) {
            let keep = group.first_block(s.len);
            while table.first < keep {
                let Some(block) = table.blocks.pop_front() else { break };
                group.pages.release(block);
                table.first += 1;
            }
        }
    }

    /// Gives back the blocks that only the batch's rows needed: sequences are as before it.
    pub(crate) fn rollback(&mut self, batch: &Batch) {
        for span in &batch.spans {
            let seq = self.seqs[span.seq.index as usize].seq.as_mut().expect("spans were checked");
            for (group, table) in self.groups.iter_mut().zip(&mut seq.tables) {
                table.shrink(&mut group.pages, seq.len);
            }
        }
    }

    /// A layer's blocks, its place in them, and where the batch's rows are.
    pub(crate) fn layer(&mut self, layer: usize) -> (&mut KvBlocks, KvLayer, &KvPlan) {
        let (group, index) = self.layers[layer];
        let group = &mut self.groups[group];
        (&mut group.pages.blocks, KvLayer { layout: self.layout, index }, &group.plan)
    }

    /// What attention of the batch's rows reads in a layer, and where it may keep results of parts.
    pub(crate) fn view(&mut self, layer: usize) -> (KvView<'_>, &mut AttnScratch) {
        let (group, index) = self.layers[layer];
        let Group { pages, plan, .. } = &self.groups[group];
        (KvView { blocks: &pages.blocks, layer: KvLayer { layout: self.layout, index }, plan }, &mut self.scratch)
    }
}

/// First position that the next one (at `len`) sees.
fn first_needed(window: Option<usize>, len: usize) -> usize {
    window.map_or(0, |w| (len + 1).saturating_sub(w))
}

/// The most blocks, of those that `keys` name, that every group can go on from: more than `from`, at most `most`.
fn longest(groups: &[Group], keys: &[BlockKey], from: usize, most: usize) -> Option<usize> {
    // Without a window, all blocks are needed.
    let whole = groups.iter().filter(|group| group.window.is_none());
    let most = whole.fold(most, |most, group| {
        let missing = |i: &usize| group.pages.find(&keys[*i]).is_none();
        (0..most).find(missing).unwrap_or(most)
    });
    let windowed: Vec<(&Group, Vec<usize>)> = groups
        .iter()
        .filter(|group| group.window.is_some() && from < most)
        .map(|group| {
            // How many blocks in a row end with each.
            let mut run = 0;
            let mut next = |key| {
                run = if group.pages.find(key).is_some() { run + 1 } else { 0 };
                run
            };
            (group, keys[..most].iter().map(&mut next).collect())
        })
        .collect();
    (from + 1..=most).rev().find(|&blocks| {
        windowed
            .iter()
            .all(|(group, runs)| blocks - group.first_block(blocks * KV_BLOCK).min(blocks) <= runs[blocks - 1])
    })
}
