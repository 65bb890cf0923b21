//! Files that experts are read from while the model runs: whether they still are what was loaded.

use crate::error::Error;
use crate::map::Opened;
use std::fs::{self, File, Metadata};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

/// A file, as it was when the model was loaded.
pub struct ExpertFile {
    opened: Arc<Opened>,
    identity: Identity,
    sample: [u8; 32],
}

/// What the system says of a file: changes when it is written to or replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    len: u64,
    modified: Option<SystemTime>,
    /// Device and number there.
    inode: Option<(u64, u64)>,
}

impl Identity {
    fn of(meta: &Metadata) -> Identity {
        #[cfg(unix)]
        let inode = Some((std::os::unix::fs::MetadataExt::dev(meta), std::os::unix::fs::MetadataExt::ino(meta)));
        #[cfg(not(unix))]
        let inode = None;
        Identity { len: meta.len(), modified: meta.modified().ok(), inode }
    }
}

impl ExpertFile {
    /// A file of `len` bytes that is open.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Changed`] where it has another length.
    pub fn new(opened: Arc<Opened>, len: u64) -> Result<ExpertFile, Error> {
        let io = |e| Error::io(&opened.path, &e);
        let identity = Identity::of(&opened.file.metadata().map_err(io)?);
        if identity.len != len {
            return Err(other_length(&opened.path, len, identity.len));
        }
        let sample = sample(&opened.file, len).map_err(io)?;
        Ok(ExpertFile { opened, identity, sample })
    }

    /// What is read.
    pub fn opened(&self) -> &Arc<Opened> {
        &self.opened
    }

    /// Whether the file is what it was. One that was written anew, or stands in its place under its name, is taken
    /// where it is as long and a sample of its content is the same.
    ///
    /// # Errors
    /// [`Error::Changed`]; [`Error::Io`] where there is none.
    pub fn check(&mut self) -> Result<(), Error> {
        let path = &self.opened.path;
        let io = |e| Error::io(path, &e);
        if Identity::of(&fs::metadata(path).map_err(io)?) == self.identity {
            return Ok(());
        }
        let file = File::open(path).map_err(io)?;
        let identity = Identity::of(&file.metadata().map_err(io)?);
        let len = self.identity.len;
        if identity.len != len {
            return Err(other_length(path, len, identity.len));
        }
        if sample(&file, len).map_err(io)? != self.sample {
            let what = "its content is another one".into();
            return Err(Error::Changed { path: path.clone(), what });
        }
        self.identity = identity;
        self.opened = Arc::new(Opened { path: path.clone(), file });
        Ok(())
    }
}

fn other_length(path: &Path, expected: u64, found: u64) -> Error {
    Error::Changed { path: path.to_owned(), what: format!("expected {expected} bytes, found {found}") }
}

/// Bytes of one place of a [`sample`].
const PART: u64 = 4096;

/// Places of a [`sample`].
const PARTS: u64 = 64;

/// A hash of a file's beginning, of its end and of places between them, evenly spaced.
pub fn sample(file: &File, len: u64) -> io::Result<[u8; 32]> {
    let mut hasher = blake3::Hasher::new();
    let mut part = vec![0; PART.min(len) as usize];
    let last = len.saturating_sub(PART);
    for i in 0..PARTS {
        let at = (u128::from(last) * u128::from(i) / u128::from(PARTS - 1)) as u64;
        read_exact_at(file, &mut part, at)?;
        hasher.update(&part);
    }
    Ok(*hasher.finalize().as_bytes())
}

/// Fills `out` with the file's bytes from `at` on; the file may be read by others at the same time.
pub fn read_exact_at(file: &File, out: &mut [u8], at: u64) -> io::Result<()> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::read_exact_at(file, out, at);
    #[cfg(windows)]
    {
        let (mut at, mut out) = (at, out);
        while !out.is_empty() {
            match std::os::windows::fs::FileExt::seek_read(file, out, at)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => (at, out) = (at + n as u64, &mut out[n..]),
            }
        }
        Ok(())
    }
    #[cfg(not(any(unix, windows)))]
    {
        let _ = (file, out, at);
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::map::Map;

    #[test]
    fn a_file_that_changes_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("a"), dir.path().join("b"));
        let bytes: Vec<u8> = (0..100_000u32).map(|i| (i / 7) as u8).collect();
        fs::write(&path, &bytes).unwrap();
        let map = Map::open(&path).unwrap();
        let mut file = ExpertFile::new(map.file().unwrap().clone(), bytes.len() as u64).unwrap();
        file.check().unwrap();
        let what = |file: &mut ExpertFile| match file.check() {
            Err(Error::Changed { what, .. }) => what,
            other => panic!("{other:?}"),
        };
        // Another file takes its name.
        let mut changed = bytes.clone();
        changed[0] += 1;
        fs::write(&other, &changed).unwrap();
        fs::rename(&other, &path).unwrap();
        assert_eq!(what(&mut file), "its content is another one");
        fs::write(&path, &bytes[..50_000]).unwrap();
        assert_eq!(what(&mut file), "expected 100000 bytes, found 50000");
        // The right one comes back.
        fs::write(&path, &bytes).unwrap();
        file.check().unwrap();
        let mut byte = [0];
        read_exact_at(&file.opened().file, &mut byte, 99_999).unwrap();
        assert_eq!(byte[0], bytes[99_999]);
        fs::remove_file(&path).unwrap();
        assert!(matches!(file.check(), Err(Error::Io { .. })));
    }
}
