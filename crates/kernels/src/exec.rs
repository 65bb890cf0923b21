//! What an operation runs on: a level of instructions and a pool of threads. Neither changes a bit of any result.

use crate::isa::Isa;
use crate::memory::Arena;
use crate::pool::Pool;

/// Where operations run.
pub struct Exec {
    /// The level of instructions.
    pub isa: Isa,
    /// The threads.
    pub pool: Pool,
    /// Where weights are put.
    pub(crate) arena: Arena,
}

impl Exec {
    /// The given level on so many threads.
    pub fn new(isa: Isa, threads: usize) -> Exec {
        Exec { isa, pool: Pool::new(threads), arena: Arena::default() }
    }
}
