//! What blocks of the cache are known by: a hash of everything that their keys and values depend on.
//!
//! That is every row of the sequence up to the block's last one (a token's id, or the bytes of an embedding and of its
//! deepstack rows, and the positions by which a row turns where they are not its place in the sequence), by which of
//! two lists of frequencies the sequence turns (longrope), and by what it is steered. A block's key is the BLAKE3 hash, of 256 bits, of the key of
//! the block before it and of its own 32 rows. Blocks are found by keys alone: two different prefixes would have to
//! collide in BLAKE3, of which no case is known, nor a way to find one.

use crate::batch::{Batch, NOTHING, Prompt, Row};
use crate::config::Config;
use crate::steering::Steering;
use puna_kernels::KV_BLOCK;

/// The key of a whole block.
pub(crate) type BlockKey = [u8; 32];

/// What a row is: all that tells it from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RowKey {
    /// A token that turns by its place in the sequence.
    Token(u32),
    /// The hash of anything else.
    Hash([u8; 32]),
}

/// The rows of a sequence from its beginning, and the keys of the blocks that they fill.
#[derive(Clone, Debug, Default)]
pub struct Chain {
    is_long: bool,
    /// The key of what it is steered by.
    steering: Option<[u8; 32]>,
    rows: Vec<RowKey>,
    keys: Vec<BlockKey>,
}

impl Chain {
    /// No rows of a sequence. `is_long`: whether it turns as long ones do ([`Rope::is_long`](crate::rope::Rope::is_long)).
    pub fn new(is_long: bool) -> Chain {
        Chain { is_long, ..Chain::default() }
    }

    /// The rows of a prompt that begins a sequence.
    pub fn of(prompt: &Prompt, config: &Config, is_long: bool) -> Chain {
        let mut chain = Chain::new(is_long);
        chain.extend(&Source::from(prompt), 0..prompt.len(), config.dim);
        chain
    }

    /// Adds a token; `position` is what it turns by.
    pub fn push_token(&mut self, id: u32, position: [u32; 3]) {
        let place = self.rows.len() as u32;
        self.push(if position == [place; 3] {
            RowKey::Token(id)
        } else {
            hash(Kind::Token, &id.to_le_bytes(), Some(position))
        });
    }

    /// Rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Whether it is of a sequence that turns as long ones do.
    pub fn is_long(&self) -> bool {
        self.is_long
    }

    /// Makes it one of a sequence that turns as long ones do, or does not.
    pub fn set_long(&mut self, is_long: bool) {
        if self.is_long != is_long {
            self.is_long = is_long;
            self.keys.clear();
            self.fill();
        }
    }

    /// Makes it one of a sequence that is steered, or is not.
    pub fn set_steering(&mut self, steering: Option<&Steering>) {
        let key = steering.and_then(Steering::key);
        if self.steering != key {
            self.steering = key;
            self.keys.clear();
            self.fill();
        }
    }

    /// Whether it is of a sequence that is steered like this.
    pub(crate) fn is_steered_by(&self, steering: Option<&Steering>) -> bool {
        self.steering == steering.and_then(Steering::key)
    }

    /// Forgets the rows from `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.rows.truncate(len);
        self.keys.truncate(len / KV_BLOCK);
    }

    /// Whether block `block` is whole, and the same as another sequence's.
    pub fn shares(&self, other: &Chain, block: usize) -> bool {
        self.keys.get(block).is_some_and(|key| other.keys.get(block) == Some(key))
    }

    /// The tokens of its rows; `None` where some are none, or turn by other positions.
    pub fn tokens(&self) -> Option<Vec<u32>> {
        let token = |row: &RowKey| match row {
            RowKey::Token(id) => Some(*id),
            RowKey::Hash(_) => None,
        };
        self.rows.iter().map(token).collect()
    }

    /// Bytes of what [`Chain::write_bytes`] writes.
    pub(crate) fn bytes_len(&self) -> usize {
        let bytes = |row: &RowKey| if matches!(row, RowKey::Token(_)) { 5 } else { 33 };
        self.rows.iter().map(bytes).sum()
    }

    /// Writes the rows as [`Chain::push_bytes`] takes them, one after the other.
    pub(crate) fn write_bytes(&self, out: &mut Vec<u8>) {
        for row in &self.rows {
            match row {
                RowKey::Token(id) => {
                    out.push(0);
                    out.extend(id.to_le_bytes());
                }
                RowKey::Hash(hash) => {
                    out.push(1);
                    out.extend(hash);
                }
            }
        }
    }

    /// Adds a row: tag 0 and a token's id, or tag 1 and a hash. False where it is neither.
    pub(crate) fn push_bytes(&mut self, tag: u8, key: &[u8]) -> bool {
        let row = match (tag, <[u8; 4]>::try_from(key), <[u8; 32]>::try_from(key)) {
            (0, Ok(id), _) => RowKey::Token(u32::from_le_bytes(id)),
            (1, _, Ok(hash)) => RowKey::Hash(hash),
            _ => return false,
        };
        self.push(row);
        true
    }

    /// Keys of the whole blocks.
    pub(crate) fn keys(&self) -> &[BlockKey] {
        &self.keys
    }

    /// Adds rows of a batch.
    pub(crate) fn extend_from(&mut self, batch: &Batch, rows: std::ops::Range<usize>, dim: usize) {
        self.extend(&Source::from(batch), rows, dim);
    }

    /// Becomes the first `len` rows of another.
    pub(crate) fn copy_from(&mut self, other: &Chain, len: usize) {
        (self.is_long, self.steering) = (other.is_long, other.steering);
        self.rows.clear();
        self.rows.extend_from_slice(&other.rows[..len]);
        self.keys.clear();
        self.keys.extend_from_slice(&other.keys[..len / KV_BLOCK]);
    }

    fn extend(&mut self, source: &Source, rows: std::ops::Range<usize>, dim: usize) {
        for row in rows {
            let own = source.positions.get(row).copied().filter(|&own| own != [self.rows.len() as u32; 3]);
            self.push(match (source.rows[row], own) {
                (Row::Token(id), None) => RowKey::Token(id),
                (Row::Token(id), own) => hash(Kind::Token, &id.to_le_bytes(), own),
                (Row::Embed(i), own) => source.embed(i as usize, dim, own),
            });
        }
    }

    fn push(&mut self, row: RowKey) {
        self.rows.push(row);
        self.fill();
    }

    /// Keys of the blocks that rows fill and that have none yet.
    fn fill(&mut self) {
        for block in self.rows.as_chunks::<KV_BLOCK>().0.iter().skip(self.keys.len()) {
            let mut hasher = blake3::Hasher::new();
            match self.keys.last() {
                Some(key) => hasher.update(key),
                None => match &self.steering {
                    Some(key) => hasher.update(&[2 + u8::from(self.is_long)]).update(key),
                    None => hasher.update(&[u8::from(self.is_long)]),
                },
            };
            for row in block {
                match row {
                    RowKey::Token(id) => hasher.update(&[0]).update(&id.to_le_bytes()),
                    RowKey::Hash(hash) => hasher.update(&[1]).update(hash),
                };
            }
            self.keys.push(*hasher.finalize().as_bytes());
        }
    }
}

/// Rows, of a batch or of a prompt.
struct Source<'a> {
    rows: &'a [Row],
    embeds: &'a [f32],
    deepstack: &'a [f32],
    positions: &'a [[u32; 3]],
}

impl<'a> From<&'a Batch> for Source<'a> {
    fn from(b: &'a Batch) -> Source<'a> {
        Source { rows: &b.rows, embeds: &b.embeds, deepstack: &b.deepstack, positions: &b.positions }
    }
}

impl<'a> From<&'a Prompt> for Source<'a> {
    fn from(p: &'a Prompt) -> Source<'a> {
        Source { rows: &p.rows, embeds: &p.embeds, deepstack: &p.deepstack, positions: &p.positions }
    }
}

impl Source<'_> {
    /// What the row of embedding `i` is.
    fn embed(&self, i: usize, dim: usize, own: Option<[u32; 3]>) -> RowKey {
        let row = |layer: &'_ [f32]| -> Vec<u8> {
            layer[i * dim..][..dim].iter().flat_map(|x| x.to_bits().to_le_bytes()).collect()
        };
        let mut bytes = row(self.embeds);
        let layers = self.deepstack.chunks_exact(self.embeds.len().max(1));
        let deepstack: Vec<u8> = layers.flat_map(row).collect();
        // A batch adds NOTHING to the embeddings of prompts without deepstack that stand beside others with it.
        if deepstack.as_chunks().0.iter().any(|x| *x != NOTHING.to_le_bytes()) {
            bytes.extend(deepstack);
        }
        hash(Kind::Embed, &bytes, own)
    }
}

/// Kinds of rows that are hashed.
#[derive(Clone, Copy)]
enum Kind {
    Token,
    Embed,
}

/// The hash of a row.
fn hash(kind: Kind, bytes: &[u8], own: Option<[u32; 3]>) -> RowKey {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&[kind as u8]).update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
    for axis in own.into_iter().flatten() {
        hasher.update(&axis.to_le_bytes());
    }
    RowKey::Hash(*hasher.finalize().as_bytes())
}
