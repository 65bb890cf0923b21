//! What the machine can do at best, measured: the roofs that kernels are compared with.

use crate::exec::Exec;
use crate::isa::Kernel;
use crate::memory::Memory;
use crate::simd::{LANES, Simd};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Bytes that are read for [`read_bandwidth`]: more than caches hold.
const BYTES: usize = 256 << 20;

/// Bytes of a task: what four panels of a large matrix have.
const TASK: usize = 1 << 18;

/// Bytes a second that all threads read from memory together, the best of some passes over 256 MiB that are kept as
/// weights are. 0 where there is no memory for them.
pub fn read_bandwidth(exec: &Exec) -> f64 {
    let Some(mut data) = Memory::zeroed(BYTES) else { return 0.0 };
    // Pages that were never written are all the same one.
    exec.pool.for_each_part(&mut data, TASK, &|_, part| part.fill(1));
    let parts: Vec<&[u8]> = data.chunks(TASK).collect();
    best(Duration::from_millis(300), || {
        exec.pool.for_each(parts.len(), &|i| exec.isa.run(Read(parts[i])));
        BYTES as f64
    })
}

/// Floating-point operations a second of all threads together, in multiply-adds (two each) of registers.
pub fn fma_rate(exec: &Exec) -> f64 {
    let tasks = exec.pool.threads();
    best(Duration::from_millis(100), || {
        exec.pool.for_each(tasks, &|_| exec.isa.run(Fma));
        (tasks * ROUNDS * CHAINS * LANES * 2) as f64
    })
}

/// Integer operations a second of all threads together: products of bytes and their sums (two each) of registers.
pub fn dot_rate(exec: &Exec) -> f64 {
    let tasks = exec.pool.threads();
    best(Duration::from_millis(100), || {
        exec.pool.for_each(tasks, &|_| exec.isa.run(Dot));
        (tasks * ROUNDS * CHAINS * LANES * 4 * 2) as f64
    })
}

/// The best rate of a job that says how much it did, over so long a time.
fn best(time: Duration, mut job: impl FnMut() -> f64) -> f64 {
    let (start, mut best) = (Instant::now(), 0f64);
    while start.elapsed() < time {
        let start = Instant::now();
        let amount = job();
        best = best.max(amount / start.elapsed().as_secs_f64());
    }
    best
}

/// Steps of a task.
const ROUNDS: usize = 20_000;

/// Sums that do not wait for one another.
const CHAINS: usize = 12;

struct Read<'a>(&'a [u8]);

impl Kernel for Read<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut acc = [s.splat(0.0); 8];
        // Four places at once, as products of one row read: memory gives more than in one stream.
        let quarter = self.0.len() / 4;
        let (a, b) = self.0.split_at(2 * quarter);
        let ((a, b), (c, d)) = (a.split_at(quarter), b.split_at(quarter));
        let [a, b, c, d] = [a, b, c, d].map(|x| x.as_chunks::<{ 2 * LANES * 4 }>().0);
        for (((a, b), c), d) in a.iter().zip(b).zip(c).zip(d) {
            let streams = [a, b, c, d];
            let mut i = 0;
            while i < 8 {
                // SAFETY: 16 of the chunk's floats, which need no alignment and may be any bits.
                acc[i] = s.add(acc[i], unsafe { s.load(streams[i / 2].as_ptr().cast::<f32>().add(i % 2 * LANES)) });
                i += 1;
            }
        }
        for acc in acc {
            black_box(s.lanes(acc));
        }
    }
}

struct Fma;

impl Kernel for Fma {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (a, b) = (s.splat(black_box(0.5)), s.splat(black_box(0.25)));
        let mut acc = [s.splat(0.0); CHAINS];
        for _ in 0..ROUNDS {
            let mut i = 0;
            while i < CHAINS {
                acc[i] = s.fma(acc[i], a, b);
                i += 1;
            }
        }
        for acc in acc {
            black_box(s.lanes(acc));
        }
    }
}

struct Dot;

impl Kernel for Dot {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let codes = s.splat_b(black_box(3));
        let acts = s.splat_b(black_box(5));
        let mut acc = [s.splat_i(0); CHAINS];
        for _ in 0..ROUNDS {
            let mut i = 0;
            while i < CHAINS {
                acc[i] = s.dot(acc[i], codes, acts);
                i += 1;
            }
        }
        for acc in acc {
            black_box(s.lanes(s.to_f(acc)));
        }
    }
}
