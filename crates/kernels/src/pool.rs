//! Persistent threads. A thread that waits for work spins for a moment and then parks: no system calls between the
//! operations of a token, no processor burned when idle.

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};

/// Turns of the spin loop before a waiting thread parks: about a tenth of a millisecond.
const SPINS: u32 = 20_000;

type Job<'a> = dyn Fn(usize) + Sync + 'a;

/// A fixed set of threads that run one job at a time; the caller is thread 0.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<Worker>,
    /// One job at a time, whoever calls.
    turn: Mutex<()>,
}

struct Worker {
    thread: Thread,
    parked: Arc<AtomicBool>,
    handle: Option<JoinHandle<()>>,
}

struct Shared {
    /// Counts jobs; a worker that sees it change has a job. `usize::MAX` ends the workers.
    epoch: AtomicUsize,
    /// Workers that have not finished the job.
    pending: AtomicUsize,
    /// Written by the caller before `epoch`, read by workers after.
    job: UnsafeCell<Option<*const Job<'static>>>,
    panic: Mutex<Option<Box<dyn std::any::Any + Send>>>,
}

// SAFETY: `job` is written only between jobs, by the holder of `turn`, and read only between the change of `epoch`
// and the decrement of `pending`, which order the accesses; the job itself is Sync.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Pool {
    /// A pool of `threads` threads, the caller included; 0 counts as 1. More than there are processors works.
    pub fn new(threads: usize) -> Pool {
        let shared = Arc::new(Shared {
            epoch: AtomicUsize::new(0),
            pending: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            panic: Mutex::new(None),
        });
        let mut workers = Vec::new();
        for index in 1..threads.max(1) {
            let (shared, parked) = (shared.clone(), Arc::new(AtomicBool::new(false)));
            let flag = parked.clone();
            let spawned =
                std::thread::Builder::new().name(format!("puna-{index}")).spawn(move || shared.work(index, &flag));
            // A system that grants fewer threads gets fewer: results do not depend on the number.
            let Ok(handle) = spawned else { break };
            workers.push(Worker { thread: handle.thread().clone(), parked, handle: Some(handle) });
        }
        Pool { shared, workers, turn: Mutex::new(()) }
    }

    /// Threads, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Physical processors this process may use: the default number of threads.
    pub fn default_threads() -> usize {
        let logical = std::thread::available_parallelism().map_or(1, |n| n.get());
        logical.min(physical_cores().unwrap_or(logical)).max(1)
    }

    /// Calls `job(i)` once for each thread index `i`, on that thread, and returns when all have returned.
    pub fn run(&self, job: &Job) {
        if self.workers.is_empty() {
            return job(0);
        }
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: no job runs while we hold `turn`; the reference outlives the job because this function waits for
        // every worker before it returns or unwinds.
        unsafe { *self.shared.job.get() = Some(std::mem::transmute::<*const Job, *const Job<'static>>(job)) };
        self.shared.pending.store(self.workers.len(), Ordering::Relaxed);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        for worker in &self.workers {
            if worker.parked.load(Ordering::SeqCst) {
                worker.thread.unpark();
            }
        }
        let own = catch_unwind(AssertUnwindSafe(|| job(0)));
        let mut spins = 0u32;
        while self.shared.pending.load(Ordering::Acquire) != 0 {
            spins += 1;
            // More threads than processors: let the others run.
            if spins > SPINS { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
        let other = self.shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(turn);
        if let Err(panic) = own {
            resume_unwind(panic);
        }
        if let Some(panic) = other {
            resume_unwind(panic);
        }
    }

    /// Calls `task(i)` once for each `i` below `n`, spread over the threads as they come free.
    pub fn for_each(&self, n: usize, task: &(dyn Fn(usize) + Sync)) {
        if n <= 1 || self.workers.is_empty() {
            return (0..n).for_each(task);
        }
        let next = AtomicUsize::new(0);
        self.run(&|_| {
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= n {
                    return;
                }
                task(i);
            }
        });
    }
}

impl Shared {
    fn work(&self, index: usize, parked: &AtomicBool) {
        let mut seen = 0;
        loop {
            seen = self.wait(seen, parked);
            if seen == usize::MAX {
                return;
            }
            // SAFETY: the caller wrote the job before `epoch` changed and keeps it alive until `pending` is zero.
            let job = unsafe { &*(*self.job.get()).expect("a job is written before the epoch changes") };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(index))) {
                *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
            }
            self.pending.fetch_sub(1, Ordering::Release);
        }
    }

    /// Waits until `epoch` is no longer `seen`: spins, then parks.
    fn wait(&self, seen: usize, parked: &AtomicBool) -> usize {
        for _ in 0..SPINS {
            let epoch = self.epoch.load(Ordering::Acquire);
            if epoch != seen {
                return epoch;
            }
            std::hint::spin_loop();
        }
        parked.store(true, Ordering::SeqCst);
        let epoch = loop {
            let epoch = self.epoch.load(Ordering::SeqCst);
            if epoch != seen {
                break epoch;
            }
            std::thread::park();
        };
        parked.store(false, Ordering::SeqCst);
        epoch
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.epoch.store(usize::MAX, Ordering::SeqCst);
        for worker in &mut self.workers {
            worker.thread.unpark();
            if let Some(handle) = worker.handle.take() {
                let _ = handle.join();
            }
        }
    }
}

/// Physical cores of the machine by the kernel's topology files; `None` where there are none.
fn physical_cores() -> Option<usize> {
    let mut cores = std::collections::BTreeSet::new();
    for entry in std::fs::read_dir("/sys/devices/system/cpu").ok()?.flatten() {
        let siblings = entry.path().join("topology/thread_siblings_list");
        if let Ok(list) = std::fs::read_to_string(siblings) {
            cores.insert(list.trim().to_string());
        }
    }
    (!cores.is_empty()).then_some(cores.len())
}

/// Memory that several threads write, each its own part.
pub(crate) struct SharedMut<T>(*mut T, usize);

// SAFETY: it only carries a pointer; what makes access sound is `slice`'s contract.
unsafe impl<T: Send> Send for SharedMut<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<T> {}

impl<T> SharedMut<T> {
    pub(crate) fn new(data: &mut [T]) -> SharedMut<T> {
        SharedMut(data.as_mut_ptr(), data.len())
    }

    /// # Safety
    /// No other part that overlaps this one may be in use, and the slice given to `new` must still be borrowed.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.1 && len <= self.1 - start, "part {start}..+{len} of {} elements", self.1);
        // SAFETY: in bounds by the assertion; exclusive by the contract.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn every_index_runs_once_at_any_size() {
        for threads in [1, 2, 3, 9] {
            let pool = Pool::new(threads);
            assert_eq!(pool.threads(), threads);
            for round in 0..200 {
                let counts: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
                pool.run(&|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
                let n = round % 17;
                let tasks: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
                pool.for_each(n, &|i| {
                    tasks[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(tasks.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn parked_workers_wake() {
        let pool = Pool::new(3);
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(30));
            let sum = AtomicUsize::new(0);
            pool.run(&|i| {
                sum.fetch_add(i, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 3);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives() {
        let pool = Pool::new(2);
        for bad in 0..2 {
            let caught = catch_unwind(AssertUnwindSafe(|| pool.run(&|i| assert_ne!(i, bad))));
            assert!(caught.is_err());
        }
        let sum = AtomicUsize::new(0);
        pool.run(&|i| {
            sum.fetch_add(i + 1, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 3);
    }
}
