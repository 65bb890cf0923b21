//! Between a cache and the pieces of a file.

use super::{MAX_NOTE, PIECE, State, StateKey, file_bytes, head};
use crate::error::Error;
use crate::kv::{KvCache, SeqId};
use crate::prefix::Chain;
use puna_kernels::KV_BLOCK;
use std::collections::VecDeque;

/// A state that is being saved. A sequence of its own holds its blocks, so that they stay as they are and where they are
/// whatever else is computed. Where the sequence is removed before the end, what is left cannot be saved any more.
#[derive(Debug)]
pub struct Saving {
    seq: SeqId,
    /// What comes first, until it has been given.
    head: Vec<u8>,
    /// Groups of layers, and blocks, that are to come.
    left: VecDeque<(usize, u32)>,
    /// Bytes of the first of them that have been given.
    done: usize,
    blocks: usize,
    bytes: u64,
}

impl Saving {
    pub(crate) fn begin(kv: &mut KvCache, key: &StateKey, chain: &Chain, note: &str) -> Result<Saving, Error> {
        if note.len() > MAX_NOTE {
            return Err(Error::StateNote { bytes: note.len(), most: MAX_NOTE });
        }
        let seq = kv.hold(chain);
        let blocks = kv.len(seq).unwrap_or(0) / KV_BLOCK;
        let bytes = file_bytes(kv, chain, note, blocks);
        let head = head(key, chain, note, blocks, bytes);
        Ok(Saving { seq, head, left: kv.held(seq).collect(), done: 0, blocks, bytes })
    }

    /// The sequence that holds its blocks.
    pub fn seq(&self) -> SeqId {
        self.seq
    }

    /// Positions that are saved with their keys and values.
    pub fn positions(&self) -> usize {
        self.blocks * KV_BLOCK
    }

    /// Bytes of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The next piece of the file, for [`StateWriter::write`](super::StateWriter::write): some MiB, and `None` at the end.
    ///
    /// # Errors
    /// [`Error::BlocksTaken`] where its sequence was removed.
    pub fn next_piece(&mut self, kv: &KvCache) -> Result<Option<Vec<u8>>, Error> {
        if kv.len(self.seq).is_none() {
            return Err(Error::BlocksTaken);
        }
        let mut piece = std::mem::take(&mut self.head);
        while let Some(&(group, id)) = self.left.front()
            && piece.len() < PIECE
        {
            let rest = &kv.block(group, id)[self.done..];
            let n = rest.len().min(PIECE - piece.len());
            piece.extend_from_slice(&rest[..n]);
            self.done += n;
            if n == rest.len() {
                self.done = 0;
                self.left.pop_front();
            }
        }
        Ok((!piece.is_empty()).then_some(piece))
    }

    /// Ends it, complete or not: the blocks are nobody's again.
    pub fn end(self, kv: &mut KvCache) {
        kv.remove(self.seq);
    }
}

/// A state on its way into the cache: blocks that are being filled, and that nobody finds before all are there.
#[derive(Debug)]
pub struct Loading {
    seq: SeqId,
    state: State,
    left: VecDeque<(usize, u32)>,
    /// Bytes of the first of them that are there.
    done: usize,
}

impl Loading {
    pub(crate) fn begin(kv: &mut KvCache, key: &StateKey, state: &State) -> Result<Loading, Error> {
        key.check(state)?;
        let (expected, found) = (kv.kept_bytes(state.blocks), state.kv_bytes);
        if expected != found {
            return Err(state.error(format!("expected {expected} bytes of keys and values, found {found}")));
        }
        let seq = kv.hold_empty(state.blocks).ok_or(Error::OutOfMemory { what: "the KV cache" })?;
        Ok(Loading { seq, state: state.clone(), left: kv.held(seq).collect(), done: 0 })
    }

    /// The sequence that holds its blocks.
    pub fn seq(&self) -> SeqId {
        self.seq
    }

    /// Takes the next piece.
    ///
    /// # Errors
    /// [`Error::BlocksTaken`] where its sequence was removed; [`Error::State`] where there are more bytes than it has.
    pub fn put(&mut self, kv: &mut KvCache, mut piece: &[u8]) -> Result<(), Error> {
        if kv.len(self.seq).is_none() {
            return Err(Error::BlocksTaken);
        }
        while !piece.is_empty() {
            let Some(&(group, id)) = self.left.front() else {
                return Err(self.state.error("more keys and values than it says"));
            };
            let block = &mut kv.block_mut(group, id)[self.done..];
            let n = block.len().min(piece.len());
            block[..n].copy_from_slice(&piece[..n]);
            piece = &piece[n..];
            self.done += n;
            if n == block.len() {
                self.done = 0;
                self.left.pop_front();
            }
        }
        Ok(())
    }

    /// Puts the blocks where sequences that begin alike find them. Only for what is known to be as it was written:
    /// [`StateReader::finish`](super::StateReader::finish).
    ///
    /// # Errors
    /// [`Error::BlocksTaken`] where its sequence was removed; [`Error::State`] where pieces are missing. Nothing gets into
    /// the cache then.
    pub fn finish(self, kv: &mut KvCache) -> Result<(), Error> {
        let result = match (kv.len(self.seq), self.left.is_empty()) {
            (None, _) => Err(Error::BlocksTaken),
            (_, false) => Err(self.state.error("less keys and values than it says")),
            (_, true) => {
                kv.name_held(self.seq, &self.state.chain);
                Ok(())
            }
        };
        kv.remove(self.seq);
        result
    }

    /// Ends it, and forgets what was put.
    pub fn abandon(self, kv: &mut KvCache) {
        kv.remove(self.seq);
    }
}
