//! The cache of keys and values: which blocks a sequence holds. Layers that see equally far share a table; a layer
//! with a window gives a block back when no later position can see it.

use crate::batch::Batch;
use crate::config::Config;
use crate::error::Error;
use puna_kernels::{AttnScratch, KV_BLOCK, KvBlocks, KvLayer, KvLayout, KvPlan, KvType, KvView};
use std::collections::VecDeque;

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
    blocks: KvBlocks,
    /// The rows of the current batch.
    plan: KvPlan,
}

struct Sequence {
    len: usize,
    /// How long it was known to become when it was last computed.
    total: usize,
    /// One a group.
    tables: Vec<Table>,
}

/// The blocks of a sequence from `first` on.
#[derive(Default)]
struct Table {
    first: usize,
    blocks: VecDeque<u32>,
}

impl Table {
    /// Gives back the blocks behind position `len`.
    fn shrink(&mut self, blocks: &mut KvBlocks, len: usize) {
        while self.first + self.blocks.len() > len.div_ceil(KV_BLOCK) {
            let Some(block) = self.blocks.pop_back() else { break };
            blocks.free(block);
        }
    }
}

impl KvCache {
    /// An empty cache for a model. Heads that are no whole blocks of `kind` are kept as F16: see [`KvCache::notice`].
    pub fn new(config: &Config, kind: KvType) -> KvCache {
        let kind = if kind.fits(config.head_dim) { kind } else { KvType::F16 };
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
        let group = |(window, n_layers): (Option<usize>, usize)| Group {
            window,
            blocks: KvBlocks::new(n_layers * layout.layer_bytes()),
            plan: KvPlan::default(),
        };
        KvCache {
            layout,
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

    /// Begins a sequence.
    pub fn add(&mut self) -> SeqId {
        let tables = self.groups.iter().map(|_| Table::default()).collect();
        let index = self.seqs.iter().position(|slot| slot.seq.is_none()).unwrap_or_else(|| {
            self.seqs.push(Slot::default());
            self.seqs.len() - 1
        });
        let slot = &mut self.seqs[index];
        slot.generation = slot.generation.wrapping_add(1);
        slot.seq = Some(Sequence { len: 0, total: 0, tables });
        SeqId { index: index as u32, generation: slot.generation }
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
        for (group, table) in self.groups.iter_mut().zip(seq.tables) {
            table.blocks.iter().for_each(|&b| group.blocks.free(b));
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
        let lost = |(group, table): (&Group, &Table)| table.first > first_needed(group.window, len) / KV_BLOCK;
        let len = if self.groups.iter().zip(&s.tables).any(lost) { 0 } else { len };
        for (group, table) in self.groups.iter_mut().zip(&mut s.tables) {
            if len == 0 {
                table.blocks.drain(..).for_each(|b| group.blocks.free(b));
                table.first = 0;
            }
            table.shrink(&mut group.blocks, len);
        }
        s.len = len;
        len
    }

    /// Bytes of all blocks: what the cache has taken from the system, and what it will use again.
    pub fn bytes(&self) -> usize {
        self.groups.iter().map(|g| g.blocks.bytes()).sum()
    }

    /// Bytes of the blocks that sequences hold.
    pub fn bytes_held(&self) -> usize {
        self.groups.iter().map(|g| g.blocks.bytes_used()).sum()
    }

    /// Gets blocks for the rows of a batch, whose spans were checked against this cache.
    pub(crate) fn prepare(&mut self, batch: &Batch) -> Result<(), Error> {
        for (g, group) in self.groups.iter_mut().enumerate() {
            group.plan.clear();
            for span in &batch.spans {
                let seq = self.seqs[span.seq.index as usize].seq.as_mut().expect("spans were checked");
                let table = &mut seq.tables[g];
                while (table.first + table.blocks.len()) * KV_BLOCK < span.start + span.rows {
                    table.blocks.push_back(group.blocks.alloc().ok_or(Error::OutOfMemory { what: "the KV cache" })?);
                }
                group.plan.push(span.rows, span.start, table.first, table.blocks.iter().copied());
            }
        }
        Ok(())
    }

    /// The batch's rows are in the cache: sequences grow, and what no later position sees is given back.
    pub(crate) fn commit(&mut self, batch: &Batch) {
        for span in &batch.spans {
            let seq = self.seqs[span.seq.index as usize].seq.as_mut().expect("spans were checked");
            seq.len += span.rows;
            seq.total = span.total.max(seq.len);
            for (group, table) in self.groups.iter_mut().zip(&mut seq.tables) {
                let keep = first_needed(group.window, seq.len) / KV_BLOCK;
                while table.first < keep {
                    let Some(block) = table.blocks.pop_front() else { break };
                    group.blocks.free(block);
                    table.first += 1;
                }
            }
        }
    }

    /// Gives back the blocks that only the batch's rows needed: sequences are as before it.
    pub(crate) fn rollback(&mut self, batch: &Batch) {
        for span in &batch.spans {
            let seq = self.seqs[span.seq.index as usize].seq.as_mut().expect("spans were checked");
            for (group, table) in self.groups.iter_mut().zip(&mut seq.tables) {
                table.shrink(&mut group.blocks, seq.len);
            }
        }
    }

    /// A layer's blocks, its place in them, and where the batch's rows are.
    pub(crate) fn layer(&mut self, layer: usize) -> (&mut KvBlocks, KvLayer, &KvPlan) {
        let (group, index) = self.layers[layer];
        let group = &mut self.groups[group];
        (&mut group.blocks, KvLayer { layout: self.layout, index }, &group.plan)
    }

    /// What attention of the batch's rows reads in a layer, and where it may keep results of parts.
    pub(crate) fn view(&mut self, layer: usize) -> (KvView<'_>, &mut AttnScratch) {
        let (group, index) = self.layers[layer];
        let Group { blocks, plan, .. } = &self.groups[group];
        (KvView { blocks, layer: KvLayer { layout: self.layout, index }, plan }, &mut self.scratch)
    }
}

/// First position that the next one (at `len`) sees.
fn first_needed(window: Option<usize>, len: usize) -> usize {
    window.map_or(0, |w| (len + 1).saturating_sub(w))
}
