//! Persistent threads. A thread that waits for work spins for a moment and then parks: no system calls between the
//! operations of a token, no processor burned when idle.
//!
//! A job is a number of tasks. Each thread has a run of them as its own, the same for every job of that size: it reads
//! memory in one direction, and what it read or wrote in one job may still be near in the next. A thread that has done
//! its own takes from the ends of others' runs. The caller takes part, and waits only for threads that did too: one that
//! the system has put aside in favour of another program holds nobody up.

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};

/// Turns of the spin loop before a waiting thread parks: about a tenth of a millisecond.
const SPINS: u32 = 20_000;

type Task<'a> = dyn Fn(usize) + Sync + 'a;

/// A fixed set of threads that work on one job at a time; the caller is one of them.
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
    /// The number of the job in the upper half; whether it can be joined; how many workers are at it.
    gate: AtomicU64,
    /// Written while no worker is at a job and none can join.
    task: UnsafeCell<Option<*const Task<'static>>>,
    /// Of each thread, the caller first.
    runs: Box<[Run]>,
    panic: Mutex<Option<Box<dyn std::any::Any + Send>>>,
}

/// The job can be joined.
const OPEN: u64 = 1 << 31;
/// Workers at the job.
const ACTIVE: u64 = OPEN - 1;
/// One job further.
const NEXT: u64 = 1 << 32;
/// No job will come: workers end.
const END: u64 = u64::MAX;

// SAFETY: `task` is written only by the holder of `turn` while the gate is closed and no worker is active, and read
// only by workers that entered through the open gate, whose atomic changes order the accesses; the task is Sync.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Pool {
    /// A pool of `threads` threads, the caller included; 0 counts as 1. More than there are processors works.
    pub fn new(threads: usize) -> Pool {
        let runs = (0..threads.max(1)).map(|_| Run::default()).collect();
        let (gate, task, panic) = (AtomicU64::new(0), UnsafeCell::new(None), Mutex::new(None));
        let shared = Arc::new(Shared { gate, task, runs, panic });
        let mut workers = Vec::new();
        for index in 1..threads.max(1) {
            let (shared, parked) = (shared.clone(), Arc::new(AtomicBool::new(false)));
            let flag = parked.clone();
            let name = format!("puna-{index}");
            let spawned = std::thread::Builder::new().name(name).spawn(move || shared.work(index, &flag));
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

    /// Physical cores that this thread may use, by its affinity and its control groups: the default number of threads.
    pub fn default_threads() -> usize {
        // The standard library knows affinity and quotas of both versions of control groups, but not which processors
        // share a core.
        let logical = std::thread::available_parallelism().map_or(1, |n| n.get());
        logical.min(physical_cores().unwrap_or(logical)).max(1)
    }

    /// Calls `task(i)` once for each `i` below `n`, spread over the threads, and returns when all have returned. The
    /// task after `i` is most probably the thread's next.
    ///
    /// # Panics
    /// If there are 2^32 tasks or more.
    pub fn for_each(&self, n: usize, task: &(dyn Fn(usize) + Sync)) {
        if n <= 1 || self.workers.is_empty() {
            return (0..n).for_each(task);
        }
        assert!(u32::try_from(n).is_ok(), "{n} tasks");
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let threads = self.threads();
        for (i, run) in self.shared.runs[..threads].iter().enumerate() {
            run.set((i * n).div_ceil(threads), ((i + 1) * n).div_ceil(threads));
        }
        let gate = &self.shared.gate;
        // SAFETY: we hold `turn` and the last job was left closed and with no worker at it; the reference outlives
        // the job because this function closes it and waits for every worker before it returns or unwinds.
        unsafe { *self.shared.task.get() = Some(std::mem::transmute::<*const Task, *const Task<'static>>(task)) };
        gate.store((gate.load(Ordering::Relaxed) & !(OPEN | ACTIVE)).wrapping_add(NEXT) | OPEN, Ordering::SeqCst);
        for worker in &self.workers {
            if worker.parked.load(Ordering::SeqCst) {
                worker.thread.unpark();
            }
        }
        let own = catch_unwind(AssertUnwindSafe(|| self.shared.run(0, task)));
        gate.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0u32;
        while gate.load(Ordering::Acquire) & ACTIVE != 0 {
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

    /// Calls `task(i, part)` for each part of `data`, of `len` elements each and the last one of what is left.
    ///
    /// # Panics
    /// If `len` is zero.
    pub fn for_each_part<T: Send>(&self, data: &mut [T], len: usize, task: &(dyn Fn(usize, &mut [T]) + Sync)) {
        let total = data.len();
        let parts = SharedMut::new(data);
        self.for_each(total.div_ceil(len), &|i| {
            // SAFETY: parts do not overlap, and each is one task's.
            task(i, unsafe { parts.slice(i * len, len.min(total - i * len)) });
        });
    }
}

/// Tasks that are left of a thread's own: the end in the upper half, the first in the lower. Others take from the end.
#[derive(Default)]
#[repr(align(128))]
struct Run(AtomicU64);

impl Run {
    fn set(&self, first: usize, end: usize) {
        self.0.store((end as u64) << 32 | first as u64, Ordering::Relaxed);
    }

    fn take(&self, from_end: bool) -> Option<usize> {
        let split = |run: u64| (run & u64::from(u32::MAX), run >> 32);
        let less = |run| {
            let (first, end) = split(run);
            (first < end).then(|| if from_end { run - (1 << 32) } else { run + 1 })
        };
        // What a task reads and writes is ordered by the gate.
        let (first, end) = split(self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).ok()?);
        Some(if from_end { end - 1 } else { first } as usize)
    }
}

impl Shared {
    /// Does a thread's own tasks, and then what others have left.
    fn run(&self, thread: usize, task: &Task) {
        let (before, own) = self.runs.split_at(thread);
        for (i, run) in own.iter().chain(before).enumerate() {
            while let Some(n) = run.take(i > 0) {
                task(n);
            }
        }
    }

    fn work(&self, index: usize, parked: &AtomicBool) {
        let mut seen = 0;
        loop {
            let gate = self.wait(seen, parked);
            if gate == END {
                return;
            }
            seen = gate & !(OPEN | ACTIVE);
            if !self.enter(seen) {
                continue;
            }
            // SAFETY: the caller wrote the task before it opened the gate and keeps it alive while we are counted.
            let task = unsafe { &*(*self.task.get()).expect("a task is written before the gate opens") };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.run(index, task))) {
                *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
            }
            self.gate.fetch_sub(1, Ordering::Release);
        }
    }

    /// Joins the job of that number, if it can still be joined.
    fn enter(&self, job: u64) -> bool {
        let join = |gate: u64| (gate & !ACTIVE == job | OPEN).then_some(gate + 1);
        self.gate.fetch_update(Ordering::AcqRel, Ordering::Acquire, join).is_ok()
    }

    /// Waits for a job after the one that was `seen`: spins, then parks.
    fn wait(&self, seen: u64, parked: &AtomicBool) -> u64 {
        let news = |gate: u64| gate & !(OPEN | ACTIVE) != seen;
        for _ in 0..SPINS {
            let gate = self.gate.load(Ordering::Acquire);
            if news(gate) {
                return gate;
            }
            std::hint::spin_loop();
        }
        parked.store(true, Ordering::SeqCst);
        let gate = loop {
            let gate = self.gate.load(Ordering::SeqCst);
            if news(gate) {
                break gate;
            }
            std::thread::park();
        };
        parked.store(false, Ordering::SeqCst);
        gate
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.gate.store(END, Ordering::SeqCst);
        for worker in &mut self.workers {
            worker.thread.unpark();
            if let Some(handle) = worker.handle.take() {
                let _ = handle.join();
            }
        }
    }
}

/// Physical cores among the processors that this thread may run on, by the files of Linux; `None` without these.
fn physical_cores() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/thread-self/status").ok()?;
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let siblings = |cpu: usize| {
        std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")).ok()
    };
    count_cores(allowed, siblings)
}

/// Cores of the processors of a list as `0-3,8`; processors of one core name the same siblings.
fn count_cores(allowed: &str, siblings: impl Fn(usize) -> Option<String>) -> Option<usize> {
    let mut cores = std::collections::BTreeSet::new();
    for range in allowed.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        for cpu in first.parse::<usize>().ok()?..=last.parse().ok()? {
            cores.insert(siblings(cpu)?.trim().to_owned());
        }
    }
    Some(cores.len())
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
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    #[test]
    fn every_task_runs_once_at_any_size() {
        for threads in [1, 2, 3, 9] {
            let pool = Pool::new(threads);
            assert_eq!(pool.threads(), threads);
            for round in 0..500 {
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
    fn parts_are_all_and_apart() {
        let pool = Pool::new(3);
        for (total, len) in [(0, 1), (1, 4), (7, 3), (64, 8), (65, 8)] {
            let mut data = vec![0usize; total];
            pool.for_each_part(&mut data, len, &|i, part| {
                for (j, x) in part.iter_mut().enumerate() {
                    *x += i * len + j + 1;
                }
            });
            assert!(data.iter().enumerate().all(|(i, &x)| x == i + 1));
        }
    }

    #[test]
    fn parked_workers_wake_and_take_part() {
        let pool = Pool::new(3);
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(30));
            let threads = Mutex::new(std::collections::HashSet::new());
            pool.for_each(30, &|_| {
                std::thread::sleep(Duration::from_millis(2));
                threads.lock().unwrap().insert(std::thread::current().id());
            });
            assert_eq!(threads.into_inner().unwrap().len(), 3);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives() {
        let pool = Pool::new(2);
        for bad in 0..8 {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.for_each(8, &|i| {
                    std::thread::sleep(Duration::from_millis(1));
                    assert_ne!(i, bad);
                });
            }));
            assert!(caught.is_err());
        }
        let sum = AtomicUsize::new(0);
        pool.for_each(5, &|i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 10);
    }

    #[test]
    fn callers_take_turns() {
        let pool = Pool::new(2);
        let sum = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        pool.for_each(6, &|i| {
                            sum.fetch_add(i, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(sum.into_inner(), 4 * 200 * 15);
    }

    #[test]
    fn processors_of_one_core_count_once() {
        // Eight processors, of which i and i + 4 share a core.
        let paired = |cpu: usize| (cpu < 8).then(|| format!("{},{}\n", cpu % 4, cpu % 4 + 4));
        for (allowed, cores) in
            [("0-7", 4), ("0-3", 4), ("0,4", 1), ("\t1,2,5", 2), ("2-6", 4), ("3\n", 1), ("0-1,4-5", 2)]
        {
            assert_eq!(count_cores(allowed, paired), Some(cores), "{allowed}");
        }
        for unknown in ["", "x", "0-", "7-8", "1,,2"] {
            assert_eq!(count_cores(unknown, paired), None, "{unknown}");
        }
        assert_eq!(count_cores("0-7", |cpu| Some(cpu.to_string())), Some(8), "one processor a core");
    }

    /// What `taskset` does, on a thread of its own.
    #[cfg(target_os = "linux")]
    #[test]
    #[cfg_attr(miri, ignore = "asks the system")]
    fn affinity_is_honoured() {
        use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
        use nix::unistd::Pid;
        let this = Pid::from_raw(0);
        let all = sched_getaffinity(this).unwrap();
        let cpus: Vec<usize> = (0..CpuSet::count()).filter(|&cpu| all.is_set(cpu).unwrap()).collect();
        assert!((1..=cpus.len()).contains(&Pool::default_threads()));
        let alone = std::thread::spawn(move || {
            let mut one = CpuSet::new();
            one.set(cpus[cpus.len() - 1]).unwrap();
            sched_setaffinity(this, &one).unwrap();
            Pool::default_threads()
        });
        assert_eq!(alone.join().unwrap(), 1);
    }
}
