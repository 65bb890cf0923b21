//! Files of saved states, in pieces. Nothing here knows a cache.

use super::{HASH, HEADER, KINDS, MAGIC, MAX_NOTE, PIECE, State, StateKey, VERSION};
use crate::error::Error;
use crate::new_file::{NewFile, reason};
use crate::prefix::Chain;
use puna_kernels::KV_BLOCK;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Take, Write};
use std::path::{Path, PathBuf};

/// Hashes what passes through.
struct Hashing<T> {
    inner: T,
    hasher: blake3::Hasher,
}

impl<T> Hashing<T> {
    fn new(inner: T) -> Hashing<T> {
        Hashing { inner, hasher: blake3::Hasher::new() }
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(out)?;
        self.hasher.update(&out[..n]);
        Ok(n)
    }
}

/// A state that is being written, of the pieces of a [`Saving`](super::Saving) in their order. The file takes its name
/// when it is complete; until then, and if it is dropped, nothing is there but what was before.
pub struct StateWriter {
    path: PathBuf,
    file: Hashing<NewFile>,
}

impl StateWriter {
    /// Begins to write a file.
    ///
    /// # Errors
    /// [`Error::Write`]; so for all that follow.
    pub fn create(path: &Path) -> Result<StateWriter, Error> {
        // It says what somebody said.
        Ok(StateWriter { path: path.to_owned(), file: Hashing::new(NewFile::private(path)?) })
    }

    /// Adds a piece.
    ///
    /// # Errors
    /// As [`StateWriter::create`].
    pub fn write(&mut self, piece: &[u8]) -> Result<(), Error> {
        self.file.hasher.update(piece);
        self.file.inner.write_all(piece).map_err(|e| failed(&self.path, &e))
    }

    /// Completes the file, and replaces one of the same name.
    ///
    /// # Errors
    /// As [`StateWriter::create`].
    pub fn finish(self) -> Result<(), Error> {
        let StateWriter { path, file: Hashing { inner: mut file, hasher } } = self;
        file.write_all(hasher.finalize().as_bytes()).map_err(|e| failed(&path, &e))?;
        file.finish()
    }
}

fn failed(path: &Path, e: &io::Error) -> Error {
    Error::Write { path: path.to_owned(), what: reason(e) }
}

/// A file of a saved state, and what it says. What is read is hashed: whoever has read all pieces knows from
/// [`StateReader::finish`] whether they are as they were written.
pub struct StateReader {
    state: State,
    /// All but the hash at the end.
    from: BufReader<Hashing<Take<File>>>,
}

impl StateReader {
    /// Opens a file and reads what comes before its keys and values. It takes no more memory than a few times what the
    /// file has bytes.
    ///
    /// # Errors
    /// [`Error::State`] where it is no saved state, is not complete or contradicts itself; [`Error::Io`].
    pub fn open(path: &Path) -> Result<StateReader, Error> {
        let file = File::open(path).map_err(|e| Error::io(path, &e))?;
        let meta = file.metadata().map_err(|e| Error::io(path, &e))?;
        if !meta.is_file() {
            return Err(Error::State { path: path.to_owned(), what: "expected a file".into() });
        }
        read_head(file, meta.len(), path).map_err(|fault| fault.of(path))
    }

    /// What it says.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Reads all of the file, to know before anything is done with it whether it is as it was written.
    ///
    /// # Errors
    /// [`Error::State`] where it is not; [`Error::Io`].
    pub fn check(&mut self) -> Result<(), Error> {
        let mut whole_hash = || {
            let file = self.from.get_mut().inner.get_mut();
            let at = file.stream_position()?;
            file.rewind()?;
            let len = file.metadata()?.len();
            let hash = blake3::Hasher::new().update_reader((&*file).take(len.saturating_sub(HASH as u64)))?.finalize();
            let mut expected = [0; HASH];
            file.read_exact(&mut expected)?;
            file.seek(SeekFrom::Start(at))?;
            Ok::<bool, io::Error>(*hash.as_bytes() == expected)
        };
        let is_whole = whole_hash().map_err(|e| Error::io(&self.state.path, &e))?;
        if is_whole { Ok(()) } else { Err(self.damaged()) }
    }

    /// The next keys and values, for [`Loading::put`](super::Loading::put): some MiB, and `None` at the end.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn next_piece(&mut self) -> Result<Option<Vec<u8>>, Error> {
        let mut piece = Vec::with_capacity(PIECE.min(self.state.kv_bytes as usize));
        let read = self.from.by_ref().take(PIECE as u64).read_to_end(&mut piece);
        read.map_err(|e| Error::io(&self.state.path, &e))?;
        Ok((!piece.is_empty()).then_some(piece))
    }

    /// Whether all that was read is as it was written.
    ///
    /// # Errors
    /// [`Error::State`] where it is not, or not all was read; [`Error::Io`].
    pub fn finish(self) -> Result<(), Error> {
        let damaged = self.damaged();
        let path = self.state.path;
        let Hashing { inner, hasher } = self.from.into_inner();
        let mut expected = [0; HASH];
        inner.into_inner().read_exact(&mut expected).map_err(|e| Error::io(&path, &e))?;
        if *hasher.finalize().as_bytes() == expected { Ok(()) } else { Err(damaged) }
    }

    fn damaged(&self) -> Error {
        self.state.error("it is damaged: its checksum is not that of its content")
    }
}

/// What is wrong with a file.
enum Fault {
    State(String),
    Io(io::Error),
}

impl Fault {
    fn of(self, path: &Path) -> Error {
        match self {
            Fault::State(what) => Error::State { path: path.to_owned(), what },
            Fault::Io(e) => Error::io(path, &e),
        }
    }
}

impl From<io::Error> for Fault {
    fn from(e: io::Error) -> Fault {
        match e.kind() {
            io::ErrorKind::UnexpectedEof => too_short("what it says"),
            _ => Fault::Io(e),
        }
    }
}

fn too_short(what: &str) -> Fault {
    Fault::State(format!("it is too short for {what}"))
}

fn read_head(mut file: File, len: u64, path: &Path) -> Result<StateReader, Fault> {
    let state = |what: String| Err(Fault::State(what));
    let mut start = [0; 8];
    if len < 8 || file.read_exact(&mut start).is_err() || start[..6] != MAGIC[..] {
        return state("it is no saved state".into());
    }
    let version = u16::from_le_bytes([start[6], start[7]]);
    if version != VERSION {
        return state(format!("version {version} of saved states, expected {VERSION}"));
    }
    let Some(content) = len.checked_sub(HASH as u64).filter(|&n| n >= HEADER as u64) else {
        return state(format!("it is truncated: {len} bytes"));
    };
    file.rewind()?;
    let mut from = BufReader::new(Hashing::new(file.take(content)));
    let mut header = [0; HEADER];
    from.read_exact(&mut header)?;
    let number = |at: usize| u64::from_le_bytes(*header[at..].first_chunk().expect("the header is longer"));
    if number(8) != len {
        return state(format!("it is damaged or truncated: {len} bytes, its header says {}", number(8)));
    }
    let Some(&kind) = KINDS.get(usize::from(header[48])) else {
        return state(format!("keys and values of kind {}, which there is not", header[48]));
    };
    let key = StateKey { model: *header[16..].first_chunk().expect("the header is longer"), kind };
    let (note_len, rows, blocks) = (number(56), number(64), number(72));
    let mut left = content - HEADER as u64;
    if note_len > MAX_NOTE as u64 || note_len > left {
        return state(format!("a note of {note_len} bytes: at most {} are there", left.min(MAX_NOTE as u64)));
    }
    let mut note = vec![0; note_len as usize];
    from.read_exact(&mut note)?;
    let Ok(note) = String::from_utf8(note) else { return state("its note is no text".into()) };
    left -= note_len;
    // Each row takes five bytes at least.
    if rows > left / 5 || blocks > rows / KV_BLOCK as u64 {
        return Err(too_short("its rows"));
    }
    let chain = read_rows(&mut from, header[49] != 0, rows)?;
    let Some(kv_bytes) = left.checked_sub(chain.bytes_len() as u64) else { return Err(too_short("its rows")) };
    let state = State { path: path.to_owned(), key, chain, note, blocks: blocks as usize, kv_bytes };
    Ok(StateReader { state, from })
}

fn read_rows(from: &mut impl Read, is_long: bool, rows: u64) -> Result<Chain, Fault> {
    let mut chain = Chain::new(is_long);
    for _ in 0..rows {
        let (mut tag, mut key) = ([0], [0; 32]);
        from.read_exact(&mut tag)?;
        let key = &mut key[..if tag[0] == 0 { 4 } else { 32 }];
        from.read_exact(key)?;
        if !chain.push_bytes(tag[0], key) {
            return Err(Fault::State(format!("a row of kind {}, which there is not", tag[0])));
        }
    }
    Ok(chain)
}
