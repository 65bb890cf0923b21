//! Memory for weights and caches: zeroed, aligned, and in large pages where the system has them.
//!
//! A product of one row reads all weights once; with pages of 4 KiB every 64 cache lines need an entry of the page
//! table, and the processor's own prefetching ends at each page. Matrices that are smaller than a large page share
//! them: the experts of a mixture mostly are.

use memmap2::{MmapMut, MmapRaw};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes: zeroed ones that take memory as they are touched, or lent ones.
pub(crate) enum Memory {
    Part(Part),
    Heap(Vec<u8>),
}

/// A part of a map that is nobody else's, on a cache line.
pub(crate) struct Part {
    data: NonNull<u8>,
    len: usize,
    /// Owns the memory.
    _map: Arc<MmapRaw>,
}

// SAFETY: a part's bytes are its own alone, and the map that holds them goes with it.
unsafe impl Send for Part {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for Part {}

impl Memory {
    /// On a page; `None` when memory ends.
    pub(crate) fn zeroed(bytes: usize) -> Option<Memory> {
        Chunk::new(bytes)?.take(bytes)
    }

    /// Lent bytes as they came, others as a copy.
    pub(crate) fn into_vec(self) -> Vec<u8> {
        match self {
            Memory::Part(_) => self.to_vec(),
            Memory::Heap(bytes) => bytes,
        }
    }
}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            // SAFETY: `Chunk::take` made the part from bytes of a map that lives as long.
            Memory::Part(part) => unsafe { std::slice::from_raw_parts(part.data.as_ptr(), part.len) },
            Memory::Heap(bytes) => bytes,
        }
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            // SAFETY: as above, and no other part has any of these bytes.
            Memory::Part(part) => unsafe { std::slice::from_raw_parts_mut(part.data.as_ptr(), part.len) },
            Memory::Heap(bytes) => bytes,
        }
    }
}

/// Gives out memory of maps that it fills one after the other. A map goes when all its parts have gone.
#[derive(Default)]
pub(crate) struct Arena(Mutex<Option<Chunk>>);

/// Bytes of a map. What is not touched takes no memory.
const CHUNK: usize = 128 << 20;

impl Arena {
    /// `None` when memory ends.
    pub(crate) fn zeroed(&self, bytes: usize) -> Option<Memory> {
        if bytes > CHUNK {
            return Memory::zeroed(bytes);
        }
        let mut chunk = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(memory) = chunk.as_mut().and_then(|chunk| chunk.take(bytes)) {
            return Some(memory);
        }
        chunk.insert(Chunk::new(CHUNK)?).take(bytes)
    }
}

/// A map of which parts are given out from the front.
struct Chunk {
    map: Arc<MmapRaw>,
    used: usize,
}

impl Chunk {
    fn new(bytes: usize) -> Option<Chunk> {
        let map = MmapMut::map_anon(bytes.max(1)).ok()?; // A map cannot be empty.
        // Systems without large pages refuse, and nothing depends on them. Miri does not know the call.
        #[cfg(all(target_os = "linux", not(miri)))]
        let _ = map.advise(memmap2::Advice::HugePage);
        Some(Chunk { map: Arc::new(map.into()), used: 0 })
    }

    fn take(&mut self, bytes: usize) -> Option<Memory> {
        let start = self.used.next_multiple_of(64);
        let end = start.checked_add(bytes).filter(|&end| end <= self.map.len())?;
        self.used = end;
        let data = NonNull::new(self.map.as_mut_ptr().wrapping_add(start))?;
        Some(Memory::Part(Part { data, len: bytes, _map: self.map.clone() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_apart_and_zeroed_and_outlive_the_arena() {
        let arena = Arena::default();
        let sizes = [0, 1, 63, 64, 65, 4096, CHUNK - 5000, 3 << 20, 0, CHUNK, 7, CHUNK + 1, 100];
        let mut parts: Vec<Memory> = sizes.iter().map(|&bytes| arena.zeroed(bytes).unwrap()).collect();
        drop(arena);
        for (i, (part, bytes)) in parts.iter_mut().zip(sizes).enumerate() {
            assert_eq!((part.len(), part.as_ptr() as usize % 64), (bytes, 0));
            let ends = [0, bytes / 2, bytes.saturating_sub(1)];
            for at in ends.into_iter().filter(|&at| at < bytes) {
                assert_eq!(part[at], 0, "part {i}");
            }
            for at in ends.into_iter().filter(|&at| at < bytes) {
                part[at] = i as u8 + 1;
            }
        }
        for (i, part) in parts.into_iter().enumerate() {
            assert!([part.first(), part.last()].into_iter().flatten().all(|&byte| byte == i as u8 + 1), "part {i}");
        }
    }
}
