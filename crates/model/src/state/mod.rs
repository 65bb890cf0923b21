//! Saved states: the rows of a sequence and the blocks of the cache that they fill, in a file.
//!
//! A file is, in little-endian numbers:
//!
//! | bytes | what |
//! |---|---|
//! | 8 | `punaKV` and a version of 16 bits, 1 |
//! | 8 | bytes of the whole file |
//! | 32 | which model: [`Model::fingerprint`](crate::Model::fingerprint) |
//! | 1, 1, 6 | how keys and values are kept; whether the sequence turns as long ones do; zeros |
//! | 8, 8, 8 | bytes of the note, rows, whole blocks of 32 positions |
//! | .. | the note: text of whoever saved it |
//! | .. | for each row 0 and a token's id of 4 bytes, or 1 and a hash of 32 bytes |
//! | .. | for each kind of layer, the blocks that a longer sequence reads, in order |
//! | 32 | BLAKE3 of all before |
//!
//! The blocks are as the cache has them, for all layers of a kind. What the checksum says is that a file is as it was
//! written: whoever gives you a file can have written anything, as with a model.
//!
//! A state goes between cache and file in pieces, so that the cache can be used in between and files are read and written
//! on other threads: [`Saving`] makes pieces of what is in the cache and [`StateWriter`] a file of them; [`StateReader`]
//! makes pieces of a file and [`Loading`] puts them into the cache.

mod file;
mod transfer;

pub use file::{StateReader, StateWriter};
pub use transfer::{Loading, Saving};

use crate::error::Error;
use crate::kv::KvCache;
use crate::prefix::Chain;
use puna_kernels::{KV_BLOCK, KvType};
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 6] = b"punaKV";
const VERSION: u16 = 1;
const HEADER: usize = 80;
const HASH: usize = 32;

/// Longest note.
pub const MAX_NOTE: usize = 16 << 20;

/// Bytes of a piece, at most, but for the first one where the note or the rows are longer.
const PIECE: usize = 4 << 20;

const KINDS: [KvType; 3] = [KvType::F32, KvType::F16, KvType::Q8_0];

/// What a state is saved from, and can be loaded into: a model, loaded in a way, and a kind of cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateKey {
    pub(crate) model: [u8; 32],
    pub(crate) kind: KvType,
}

impl StateKey {
    /// Whether a state is of use here.
    ///
    /// # Errors
    /// [`Error::State`] where it is of another model or kind of cache.
    pub fn check(&self, state: &State) -> Result<(), Error> {
        let (kind, own) = (state.key.kind, self.kind);
        if !self.is_of_model(state) {
            return Err(state.error("it was saved from another model, or from the same loaded in another way"));
        }
        if kind != own {
            return Err(state.error(format!("its keys and values are kept as {kind}, those of the cache as {own}")));
        }
        Ok(())
    }

    /// Whether a state was saved from this model, whatever the kind of cache.
    pub fn is_of_model(&self, state: &State) -> bool {
        state.key.model == self.model
    }
}

/// What a saved state says, beside its keys and values.
#[derive(Clone, Debug)]
pub struct State {
    path: PathBuf,
    key: StateKey,
    chain: Chain,
    note: String,
    /// Whole blocks that it has keys and values of.
    blocks: usize,
    /// Bytes of these.
    kv_bytes: u64,
}

impl State {
    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The rows of the sequence; `None` where some are no tokens.
    pub fn tokens(&self) -> Option<Vec<u32>> {
        self.chain.tokens()
    }

    /// How many of them it has keys and values of: whole blocks of 32.
    pub fn positions(&self) -> usize {
        self.blocks * KV_BLOCK
    }

    /// What whoever saved it wrote there.
    pub fn note(&self) -> &str {
        &self.note
    }

    fn error(&self, what: impl Into<String>) -> Error {
        Error::State { path: self.path.clone(), what: what.into() }
    }

    /// Whether a sequence that is to become `chain` could take more from the cache if this were there.
    pub(crate) fn helps(&self, kv: &KvCache, chain: &Chain) -> bool {
        kv.lacks(chain, &self.chain, self.blocks)
    }
}

/// Bytes of a file with the rows of `chain`, of which `blocks` whole blocks have keys and values.
pub(crate) fn file_bytes(kv: &KvCache, chain: &Chain, note: &str, blocks: usize) -> u64 {
    (HEADER + note.len() + chain.bytes_len() + HASH) as u64 + kv.kept_bytes(blocks)
}

/// All that comes before the blocks.
fn head(key: &StateKey, chain: &Chain, note: &str, blocks: usize, total: u64) -> Vec<u8> {
    let mut head = Vec::with_capacity(HEADER + note.len() + chain.bytes_len());
    head.extend(MAGIC);
    head.extend(VERSION.to_le_bytes());
    head.extend(total.to_le_bytes());
    head.extend(key.model);
    let kind = KINDS.iter().position(|&kind| kind == key.kind).expect("all kinds are listed");
    head.extend([kind as u8, u8::from(chain.is_long()), 0, 0, 0, 0, 0, 0]);
    for n in [note.len(), chain.len(), blocks] {
        head.extend((n as u64).to_le_bytes());
    }
    head.extend(note.as_bytes());
    chain.write_bytes(&mut head);
    head
}
