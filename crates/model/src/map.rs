//! A file in memory: the only unsafe code of this crate.
//!
//! Files are mapped, not read: opening is instant whatever the size, pages come from disk when they are touched, and
//! processes that run the same model share them.
//!
//! **A mapped file must stay as it is.** The operating system offers no protection: when another process shortens the
//! file, touching a page behind the new end kills this process with SIGBUS, and no check at load time can prevent it;
//! when another process writes into the file, weights change under way. Replace a model by renaming a new file over
//! the old name (what downloaders do): the map then keeps the old file.

#![allow(unsafe_code)]

use std::{
    fs,
    fs::File,
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use bytes::Bytes;
use memmap2::Mmap;

use crate::Error;

/// The read-only bytes of a whole file. Cloning and slicing copy nothing; every [`Bytes`] taken from it keeps the
/// map alive.
#[derive(Clone, Debug)]
pub struct Map {
    bytes: Bytes,
    /// `None` for an empty file, which cannot be mapped, and for bytes that never were a file.
    mmap: Option<Arc<Mmap>>,
    file: Option<Arc<Opened>>,
}

/// The file that was mapped: what reads it goes on with the same one when its name becomes another's.
#[derive(Debug)]
pub struct Opened {
    /// Where it was.
    pub path: PathBuf,
    /// The file.
    pub file: File,
}

/// How a range of the file is about to be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// From front to back, once: read ahead far, drop early.
    Sequential,
    /// Soon: begin to read it now.
    WillNeed,
}

struct Owner(Arc<Mmap>);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Map {
    /// Maps `path`.
    ///
    /// # Errors
    /// [`Error::Io`] when it is missing, unreadable, a directory or no regular file, or larger than the address space.
    pub fn open(path: &Path) -> Result<Map, Error> {
        // Looked at before it is opened, since opening a named pipe waits for its writer.
        let kind = fs::metadata(path).map_err(|e| Error::io(path, &e))?.file_type();
        if kind.is_dir() {
            let e = io::Error::new(io::ErrorKind::IsADirectory, "it is a directory, expected a file");
            return Err(Error::io(path, &e));
        }
        if !kind.is_file() {
            let e = io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file");
            return Err(Error::io(path, &e));
        }
        Self::read_only(path).map_err(|e| Error::io(path, &e))
    }

    fn read_only(path: &Path) -> io::Result<Map> {
        let file = File::open(path)?;
        let len = file.metadata()?.len();
        if len == 0 {
            return Ok(Bytes::new().into());
        }
        if isize::try_from(len).is_err() {
            let what = format!("its {len} bytes do not fit the address space");
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, what));
        }
        // SAFETY: the map is read-only and lives as long as a slice of it does. That nobody shortens or rewrites the
        // file meanwhile is asked of the user (see the head of this file); it is the one thing that cannot be checked.
        let mmap = Arc::new(unsafe { Mmap::map(&file) }?);
        let file = Arc::new(Opened { path: path.to_owned(), file });
        Ok(Map { bytes: Bytes::from_owner(Owner(mmap.clone())), mmap: Some(mmap), file: Some(file) })
    }

    /// The file; `None` for an empty one, and for bytes that never were one.
    pub fn file(&self) -> Option<&Arc<Opened>> {
        self.file.as_ref()
    }

    /// The whole file.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// The file's size in bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether the file is empty.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Tells the operating system how `range` (bytes of the file) will be used. Only a hint: the part of the range
    /// behind the end of the file is ignored, and so are refusals and platforms without such hints.
    pub fn advise(&self, range: Range<usize>, access: Access) {
        #[cfg(unix)]
        if let Some((mmap, start, len)) = self.part(range) {
            let advice = match access {
                Access::Sequential => memmap2::Advice::Sequential,
                Access::WillNeed => memmap2::Advice::WillNeed,
            };
            let _ = mmap.advise_range(advice, start, len);
        }
        #[cfg(not(unix))]
        let _ = (range, access);
    }

    /// Gives the memory of `range` (bytes of the file) back, whole pages, both ends included. The bytes stay
    /// readable: a page that is touched again comes back from the file. For weights that were copied into another
    /// layout, so that no second copy stays in memory.
    pub fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        if let Some((mmap, start, len)) = self.part(range) {
            // SAFETY: MADV_DONTNEED on a read-only shared map of a file only drops the pages; reading them again
            // yields the file's bytes, which are the same, so slices that are alive see no change.
            let _ = unsafe { mmap.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, len) };
        }
        #[cfg(not(unix))]
        let _ = range;
    }

    /// The map with start and length of what of `range` lies in it.
    #[cfg(unix)]
    fn part(&self, range: Range<usize>) -> Option<(&Mmap, usize, usize)> {
        let end = range.end.min(self.len());
        let len = end.checked_sub(range.start).filter(|&len| len > 0)?;
        Some((self.mmap.as_ref()?, range.start, len))
    }
}

/// Bytes already in memory, as if they were a file; hints do nothing.
impl From<Bytes> for Map {
    fn from(bytes: Bytes) -> Map {
        Map { bytes, mmap: None, file: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), bytes).unwrap();
        file
    }

    #[test]
    fn slices_outlive_the_map_and_the_name() {
        let file = file(&[7; 10_000]);
        let slice = Map::open(file.path()).unwrap().bytes().slice(5000..);
        drop(file);
        assert_eq!(slice, [7; 5000][..]);
    }

    #[test]
    fn an_empty_file_is_empty() {
        let map = Map::open(file(b"").path()).unwrap();
        assert!(map.is_empty());
        map.release(0..10);
    }

    #[test]
    #[cfg(unix)]
    fn what_is_no_file_is_refused() {
        let kind = |path: &str| match Map::open(Path::new(path)) {
            Err(Error::Io { kind, .. }) => Some(kind),
            _ => None,
        };
        assert_eq!(kind("/"), Some(io::ErrorKind::IsADirectory));
        assert_eq!(kind("/dev/null"), Some(io::ErrorKind::InvalidInput));
        assert_eq!(kind("/no/such/file"), Some(io::ErrorKind::NotFound));
    }

    #[test]
    fn hints_take_any_range() {
        let map = Map::open(file(&[1; 9000]).path()).unwrap();
        for range in [0..0, 0..9000, 4097..4098, 8999..1 << 40, 1 << 40..usize::MAX] {
            map.advise(range.clone(), Access::WillNeed);
            map.advise(range.clone(), Access::Sequential);
            map.release(range);
        }
        assert!(map.bytes().iter().all(|&b| b == 1));
        Map::from(Bytes::from_static(b"x")).release(0..1);
    }

    /// Resident kilobytes of the map of `path`.
    #[cfg(target_os = "linux")]
    fn resident(path: &Path) -> usize {
        let maps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = maps.lines().skip_while(|line| !line.ends_with(path.to_str().unwrap()));
        let rss = lines.find_map(|line| line.strip_prefix("Rss:")).unwrap();
        rss.trim().trim_end_matches(" kB").parse().unwrap()
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn release_gives_memory_back_and_keeps_the_bytes() {
        let bytes: Vec<u8> = (0..4 << 20).map(|i| (i / 4096) as u8).collect();
        let file = file(&bytes);
        let map = Map::open(file.path()).unwrap();
        assert_eq!(map.bytes(), &bytes);
        assert!(resident(file.path()) >= 4096);
        map.release(1 << 20..3 << 20);
        assert!(resident(file.path()) <= 2048);
        assert_eq!(map.bytes(), &bytes);
    }
}
