//! Memory for weights and caches: zeroed, aligned, and in large pages where the system has them.
//!
//! A product of one row reads all weights once; with pages of 4 KiB every 64 cache lines need an entry of the page
//! table, and the processor's own prefetching ends at each page.

use memmap2::MmapMut;
use std::ops::{Deref, DerefMut};

/// Bytes: zeroed ones that start on a page and take memory as they are touched, or lent ones.
pub(crate) enum Memory {
    Map(MmapMut),
    Heap(Vec<u8>),
}

impl Memory {
    /// `None` when memory ends.
    pub(crate) fn zeroed(bytes: usize) -> Option<Memory> {
        if bytes == 0 {
            return Some(Memory::Heap(Vec::new())); // A map cannot be empty.
        }
        let map = MmapMut::map_anon(bytes).ok()?;
        // Systems without large pages refuse, and nothing depends on them. Miri does not know the call.
        #[cfg(all(target_os = "linux", not(miri)))]
        let _ = map.advise(memmap2::Advice::HugePage);
        Some(Memory::Map(map))
    }

    /// Lent bytes as they came, others as a copy.
    pub(crate) fn into_vec(self) -> Vec<u8> {
        match self {
            Memory::Map(map) => map.to_vec(),
            Memory::Heap(bytes) => bytes,
        }
    }
}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Memory::Map(map) => map,
            Memory::Heap(bytes) => bytes,
        }
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Memory::Map(map) => map,
            Memory::Heap(bytes) => bytes,
        }
    }
}
