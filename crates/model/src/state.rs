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
//! The blocks are as the cache has them, for all layers of a kind. A file is read twice, first for its checksum, so that
//! nothing of a damaged one gets into the cache. What a checksum says is that a file is as it was written: whoever
//! gives you a file can have written anything, as with a model.

use crate::error::Error;
use crate::kv::KvCache;
use crate::prefix::Chain;
use puna_kernels::{KV_BLOCK, KvType};
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::Path;
use tempfile::NamedTempFile;

const MAGIC: &[u8; 6] = b"punaKV";
const VERSION: u16 = 1;
const HEADER: usize = 80;
const HASH: usize = 32;

/// Longest note.
pub const MAX_NOTE: usize = 16 << 20;

/// What a saved state says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// The rows of the sequence; `None` where some were no tokens.
    pub tokens: Option<Vec<u32>>,
    /// How many of them are in the cache now: whole blocks of 32.
    pub positions: usize,
    /// What whoever saved it wrote there.
    pub note: String,
}

/// What a state is saved with.
pub(crate) struct Saved<'a> {
    pub model: &'a [u8; 32],
    pub chain: &'a Chain,
    pub note: &'a str,
}

fn kinds() -> [KvType; 3] {
    [KvType::F32, KvType::F16, KvType::Q8_0]
}

/// A writer that hashes what it writes.
struct Hashing<W> {
    to: W,
    hasher: blake3::Hasher,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.to.write(bytes)?;
        self.hasher.update(&bytes[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Writes a state; the file takes its name when it is complete. Gives how many positions it has keys and values of.
///
/// # Errors
/// [`Error::Write`].
pub(crate) fn save(kv: &KvCache, saved: &Saved, path: &Path) -> Result<usize, Error> {
    let error = |what: String| Error::Write { path: path.to_owned(), what };
    if saved.note.len() > MAX_NOTE {
        return Err(error(format!("a note of {} bytes, at most {MAX_NOTE} are kept", saved.note.len())));
    }
    let written = write(kv, saved, path).map_err(|e| error(e.to_string()))?;
    Ok(written * KV_BLOCK)
}

fn write(kv: &KvCache, saved: &Saved, path: &Path) -> io::Result<usize> {
    let Saved { model, chain, note } = saved;
    let (blocks, kept) = kv.kept(chain);
    let rows = chain.to_bytes();
    let in_cache: usize = kept.iter().map(|(group, ids)| kv.group_bytes(*group) * ids.len()).sum();
    let total = HEADER + note.len() + rows.len() + in_cache + HASH;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let file = NamedTempFile::new_in(folder)?;
    let mut out = Hashing { to: BufWriter::new(file), hasher: blake3::Hasher::new() };
    out.write_all(MAGIC)?;
    out.write_all(&VERSION.to_le_bytes())?;
    out.write_all(&(total as u64).to_le_bytes())?;
    out.write_all(*model)?;
    let kind = kinds().iter().position(|&kind| kind == kv.kind()).unwrap_or_default();
    out.write_all(&[kind as u8, u8::from(chain.is_long()), 0, 0, 0, 0, 0, 0])?;
    for n in [note.len(), chain.len(), blocks] {
        out.write_all(&(n as u64).to_le_bytes())?;
    }
    out.write_all(note.as_bytes())?;
    out.write_all(&rows)?;
    for (group, ids) in kept {
        for id in ids {
            out.write_all(kv.block(group, id))?;
        }
    }
    let hash = *out.hasher.finalize().as_bytes();
    out.write_all(&hash)?;
    let file = out.to.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|e| e.error)?;
    Ok(blocks)
}

/// Reads a state and puts its blocks into the cache, where sequences that begin alike find them.
///
/// # Errors
/// [`Error::State`] where the file is damaged, no state, or one of another model or kind of cache; [`Error::Io`];
/// [`Error::OutOfMemory`] where the cache is too small. The cache is as before then, but for prefixes that were kept.
pub(crate) fn load(kv: &mut KvCache, model: &[u8; 32], path: &Path) -> Result<State, Error> {
    let error = |what: String| Error::State { path: path.to_owned(), what };
    let file = File::open(path).map_err(|e| Error::io(path, &e))?;
    let meta = file.metadata().map_err(|e| Error::io(path, &e))?;
    if !meta.is_file() {
        return Err(error("expected a file".into()));
    }
    let header = check(&file, meta.len()).map_err(|fault| fault.of(path))?;
    if header.model != *model {
        return Err(error("it was saved from another model, or from the same loaded in another way".into()));
    }
    let Some(kind) = kinds().get(usize::from(header.kind)).copied() else {
        return Err(error(format!("keys and values of kind {}, which there is not", header.kind)));
    };
    if kind != kv.kind() {
        return Err(error(format!("its keys and values are kept as {kind}, those of the cache as {}", kv.kind())));
    }
    let mut reader = Reader { from: BufReader::with_capacity(1 << 20, file), left: header.body };
    restore(kv, &header, &mut reader).map_err(|fault| fault.of(path))
}

/// What is wrong with a file.
enum Fault {
    State(String),
    Io(io::Error),
    Other(Error),
}

impl Fault {
    fn of(self, path: &Path) -> Error {
        match self {
            Fault::State(what) => Error::State { path: path.to_owned(), what },
            Fault::Io(e) => Error::io(path, &e),
            Fault::Other(e) => e,
        }
    }
}

impl From<io::Error> for Fault {
    fn from(e: io::Error) -> Fault {
        Fault::Io(e)
    }
}

struct Header {
    model: [u8; 32],
    kind: u8,
    is_long: bool,
    note: u64,
    rows: u64,
    blocks: u64,
    /// Bytes between header and hash.
    body: u64,
}

/// Reads the header, and the whole file for its checksum.
fn check(mut file: &File, len: u64) -> Result<Header, Fault> {
    let state = |what: String| Err(Fault::State(what));
    let mut header = [0; HEADER];
    let mut start = [0; 8];
    if len < 8 || file.read_exact(&mut start).is_err() || start[..6] != MAGIC[..] {
        return state("it is no saved state".into());
    }
    let version = u16::from_le_bytes([start[6], start[7]]);
    if version != VERSION {
        return state(format!("version {version} of saved states, expected {VERSION}"));
    }
    if len < (HEADER + HASH) as u64 {
        return state(format!("it is truncated: {len} bytes"));
    }
    header[..8].copy_from_slice(&start);
    file.read_exact(&mut header[8..])?;
    let number = |at: usize| u64::from_le_bytes(*header[at..].first_chunk().expect("the header is longer"));
    if number(8) != len {
        return state(format!("it is damaged or truncated: {len} bytes, its header says {}", number(8)));
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(&header);
    let body = len - (HEADER + HASH) as u64;
    hasher.update_reader(file.take(body))?;
    let mut hash = [0; HASH];
    file.read_exact(&mut hash)?;
    if *hasher.finalize().as_bytes() != hash {
        return state("it is damaged: its checksum is not that of its content".into());
    }
    io::Seek::seek(&mut file, io::SeekFrom::Start(HEADER as u64))?;
    let mut model = [0; 32];
    model.copy_from_slice(&header[16..48]);
    let (note, rows, blocks) = (number(56), number(64), number(72));
    Ok(Header { model, kind: header[48], is_long: header[49] != 0, note, rows, blocks, body })
}

/// Reads no more than there is.
struct Reader<R> {
    from: R,
    left: u64,
}

impl<R: Read> Reader<R> {
    fn fill(&mut self, out: &mut [u8]) -> Result<(), Fault> {
        self.left = self.left.checked_sub(out.len() as u64).ok_or_else(|| too_short("its counts"))?;
        Ok(self.from.read_exact(out)?)
    }

    fn bytes(&mut self, n: u64, what: &str) -> Result<Vec<u8>, Fault> {
        if n > self.left {
            return Err(too_short(what));
        }
        let mut bytes = vec![0; n as usize];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }
}

fn too_short(what: &str) -> Fault {
    Fault::State(format!("it is too short for {what}"))
}

fn restore(kv: &mut KvCache, header: &Header, reader: &mut Reader<impl Read>) -> Result<State, Fault> {
    if header.note > MAX_NOTE as u64 {
        return Err(Fault::State(format!("a note of {} bytes, at most {MAX_NOTE} are kept", header.note)));
    }
    let note = String::from_utf8(reader.bytes(header.note, "its note")?)
        .map_err(|_| Fault::State("its note is no text".into()))?;
    // Each row takes five bytes at least.
    if header.rows > reader.left / 5 || header.blocks > header.rows / KV_BLOCK as u64 {
        return Err(too_short("its rows"));
    }
    let mut chain = Chain::new(header.is_long);
    for _ in 0..header.rows {
        let [tag] = *reader.bytes(1, "its rows")? else { return Err(too_short("its rows")) };
        let key = reader.bytes(if tag == 0 { 4 } else { 32 }, "its rows")?;
        if !chain.push_bytes(tag, &key) {
            return Err(Fault::State(format!("a row of kind {tag}, which there is not")));
        }
    }
    let blocks = header.blocks as usize;
    let expected = kv.kept_bytes(blocks);
    if expected != reader.left {
        let found = reader.left;
        return Err(Fault::State(format!("expected {expected} bytes of keys and values, found {found}")));
    }
    let mut fault = None;
    let put = kv.put(&chain, blocks, &mut |out| reader.fill(out).map_err(|e| fault = Some(e)).is_ok());
    match (put, fault) {
        (_, Some(fault)) => Err(fault),
        (false, None) => Err(Fault::Other(Error::OutOfMemory { what: "the KV cache" })),
        (true, None) => Ok(State { tokens: chain.tokens(), positions: blocks * KV_BLOCK, note }),
    }
}
