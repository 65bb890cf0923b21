//! Memory for weights and caches: zeroed, aligned, and in large pages where the system has them.
//!
//! A product of one row reads all weights once; with pages of 4 KiB every 64 cache lines need an entry of the page
//! table, and the processor's own prefetching ends at each page.

use memmap2::MmapMut;
use std::ops::{Deref, DerefMut};

/// Zeroed bytes that start on a page. They take memory as they are touched.
pub(crate) struct Memory {
    /// A map cannot be empty.
    map: Option<MmapMut>,
}

impl Memory {
    /// `None` when memory ends.
    pub(crate) fn zeroed(bytes: usize) -> Option<Memory> {
        if bytes == 0 {
            return Some(Memory { map: None });
        }
        let map = MmapMut::map_anon(bytes).ok()?;
        // Systems without large pages refuse, and nothing depends on them.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Some(Memory { map: Some(map) })
    }
}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.map.as_deref_mut().unwrap_or_default()
    }
}
