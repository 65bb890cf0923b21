//! Blocks that sequences share: who holds them, what they are known by, and which are given up when others are needed.

use crate::prefix::BlockKey;
use puna_kernels::{KV_BLOCK, KvBlocks};
use std::collections::{BTreeSet, HashMap};

/// Blocks of one size. A block that nobody holds keeps its content, and can be found by its key, until it is needed for
/// something else; the one that was given back first goes first.
pub(crate) struct Pages {
    pub blocks: KvBlocks,
    block_bytes: usize,
    /// Most blocks there may be.
    limit: usize,
    /// By block.
    pages: Vec<Page>,
    by_key: HashMap<BlockKey, u32>,
    /// Blocks that nobody holds and that have a key, by when they were given back.
    idle: BTreeSet<(u64, u32)>,
    /// Blocks that somebody holds.
    held: usize,
    /// Counts what was given back.
    clock: u64,
}

#[derive(Clone, Default)]
struct Page {
    holders: u32,
    key: Option<BlockKey>,
    /// When it was given back.
    since: u64,
}

impl Pages {
    /// No blocks yet, of `block_bytes` each, and never more than `limit`.
    pub fn new(block_bytes: usize, limit: usize) -> Pages {
        Pages {
            blocks: KvBlocks::new(block_bytes),
            block_bytes,
            limit,
            pages: Vec::new(),
            by_key: HashMap::new(),
            idle: BTreeSet::new(),
            held: 0,
            clock: 0,
        }
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Most blocks there may be.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Blocks that can be had.
    pub fn available(&self) -> usize {
        self.limit - self.held
    }

    /// Bytes of the blocks that somebody holds.
    pub fn bytes_held(&self) -> usize {
        self.held * self.block_bytes
    }

    /// Bytes of the blocks that nobody holds and that can be found.
    pub fn bytes_idle(&self) -> usize {
        self.idle.len() * self.block_bytes
    }

    /// A block of one's own, with whatever an earlier owner left in it; `None` when there are no more.
    pub fn alloc(&mut self) -> Option<u32> {
        let free = self.pages.len() - self.held - self.idle.len();
        let fresh = if free > 0 || self.pages.len() < self.limit { self.blocks.alloc() } else { None };
        let id = fresh.or_else(|| {
            let (_, id) = self.idle.pop_first()?;
            self.forget(id);
            Some(id)
        })?;
        if id as usize == self.pages.len() {
            self.pages.push(Page::default());
        }
        self.pages[id as usize].holders = 1;
        self.held += 1;
        Some(id)
    }

    /// The block of this key.
    pub fn find(&self, key: &BlockKey) -> Option<u32> {
        self.by_key.get(key).copied()
    }

    /// One more holds a block.
    pub fn hold(&mut self, id: u32) {
        let page = &mut self.pages[id as usize];
        if page.holders == 0 {
            self.idle.remove(&(page.since, id));
            self.held += 1;
        }
        page.holders += 1;
    }

    /// Whether more than one hold a block.
    pub fn is_shared(&self, id: u32) -> bool {
        self.pages[id as usize].holders > 1
    }

    /// One less holds a block.
    pub fn release(&mut self, id: u32) {
        let page = &mut self.pages[id as usize];
        page.holders -= 1;
        if page.holders > 0 {
            return;
        }
        self.held -= 1;
        if page.key.is_some() {
            page.since = self.clock;
            self.clock += 1;
            self.idle.insert((page.since, id));
        } else {
            self.blocks.free(id);
        }
    }

    /// Makes a held block known by a key. If another block is, that one is held in its place, and given.
    pub fn name(&mut self, id: u32, key: BlockKey) -> u32 {
        match self.find(&key) {
            Some(other) if other != id => {
                self.hold(other);
                self.release(id);
                other
            }
            Some(_) => id,
            None => {
                self.forget(id);
                self.pages[id as usize].key = Some(key);
                self.by_key.insert(key, id);
                id
            }
        }
    }

    /// A block whose content is about to change can no longer be found.
    pub fn forget(&mut self, id: u32) {
        if let Some(key) = self.pages[id as usize].key.take() {
            self.by_key.remove(&key);
        }
    }

    /// Makes a block's content that of another.
    pub fn copy(&mut self, from: u32, to: u32) {
        self.blocks.copy(from, to);
    }

    /// Whether counts, keys and lists agree with each other and with `tables`, all that sequences hold.
    pub fn check<'a>(&self, tables: impl Iterator<Item = &'a u32>) -> Result<(), String> {
        let mut holders = vec![0; self.pages.len()];
        tables.for_each(|&id| holders[id as usize] += 1);
        for (id, (page, &holders)) in self.pages.iter().zip(&holders).enumerate() {
            let id = id as u32;
            if page.holders != holders {
                return Err(format!("block {id}: {holders} sequences hold it, counted {}", page.holders));
            }
            if page.key.is_some_and(|key| self.find(&key) != Some(id)) {
                return Err(format!("block {id} is not found by its key"));
            }
            if self.idle.contains(&(page.since, id)) != (page.key.is_some() && holders == 0) {
                return Err(format!("block {id}: idle or not, against its {holders} holders"));
            }
        }
        let held = holders.iter().filter(|&&n| n > 0).count();
        let keys = self.pages.iter().filter(|page| page.key.is_some()).count();
        let idle = self.pages.iter().filter(|page| page.key.is_some() && page.holders == 0).count();
        let used = self.blocks.bytes_used().checked_div(self.block_bytes).unwrap_or(held + idle);
        if (held, keys, idle, used) != (self.held, self.by_key.len(), self.idle.len(), held + idle) {
            return Err(format!("{held} blocks held, {keys} keys, {idle} idle, {used} used: counted otherwise"));
        }
        if self.pages.len() > self.limit {
            return Err(format!("{} blocks of {}", self.pages.len(), self.limit));
        }
        Ok(())
    }

    /// Positions that blocks can hold.
    pub fn positions(&self) -> usize {
        self.limit.saturating_mul(KV_BLOCK)
    }
}
