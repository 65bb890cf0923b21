//! Threads that read experts from files, and pack them. Several reads are on their way at once: a disk is at its best
//! then.

use super::files::read_exact_at;
use crate::checkpoint::MakeRows;
use crate::map::{Access, Map, Opened};
use arrayvec::ArrayVec;
use puna_kernels::{DType, pack_in_place, packed_bytes};
use std::collections::VecDeque;
use std::io;
use std::num::NonZero;
use std::ops::{Range, RangeInclusive};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Fewest and most threads. What is packed keeps as many processors busy; that a disk has several reads at once does not
/// take more, since the system is told of each when it is submitted.
const THREADS: RangeInclusive<usize> = 4..=16;

/// Bytes of a file that become one or more of an expert's matrices.
pub struct Piece {
    /// Number of the file.
    pub file: usize,
    /// Its map, through which the system is told what will be read; it is never touched.
    pub map: Map,
    /// First byte.
    pub at: u64,
    /// How many.
    pub bytes: usize,
    /// What becomes of them.
    pub parts: ArrayVec<Part, 3>,
}

/// Rows of one of an expert's matrices.
pub struct Part {
    /// Gate, up, down.
    pub matrix: usize,
    /// Their format.
    pub dtype: DType,
    /// How many.
    pub rows: usize,
    /// Bytes of one.
    pub row_bytes: usize,
    /// How they are made, where they are not stored as they are multiplied with.
    pub made: Option<(Arc<dyn MakeRows>, Range<usize>)>,
}

impl Part {
    /// Bytes in memory.
    pub fn bytes(&self) -> usize {
        packed_bytes(self.rows, self.row_bytes)
    }
}

/// A piece to be read.
pub struct Read {
    /// Whose it is.
    pub slot: u32,
    /// What is read.
    pub piece: Arc<Piece>,
    /// Where.
    pub file: Arc<Opened>,
    /// Memory for its parts, in their order.
    pub buffers: ArrayVec<Vec<u8>, 3>,
    /// Whether matrices are packed when they are there.
    pub pack: bool,
    /// How it went.
    pub result: io::Result<()>,
}

impl Read {
    fn run(&mut self, scratch: &mut Vec<u8>) -> io::Result<()> {
        let (piece, file) = (&*self.piece, &self.file.file);
        for (part, buffer) in piece.parts.iter().zip(&mut self.buffers) {
            buffer.resize(part.bytes(), 0);
        }
        match (&piece.parts[..], &mut self.buffers[..]) {
            ([Part { made: None, .. }], [buffer]) => read_exact_at(file, &mut buffer[..piece.bytes], piece.at)?,
            (parts, buffers) => {
                scratch.resize(piece.bytes, 0);
                read_exact_at(file, scratch, piece.at)?;
                for (part, buffer) in parts.iter().zip(buffers) {
                    let out = &mut buffer[..part.rows * part.row_bytes];
                    match &part.made {
                        Some((rows, range)) => rows.make(scratch, range.clone(), out),
                        None => out.copy_from_slice(scratch),
                    }
                }
            }
        }
        if self.pack {
            for (part, buffer) in piece.parts.iter().zip(&mut self.buffers) {
                pack_in_place(part.dtype, part.rows, buffer, scratch);
            }
        }
        Ok(())
    }
}

/// Reads that wait for a thread.
#[derive(Default)]
struct Waiting {
    /// Somebody waits for them.
    urgent: VecDeque<Read>,
    later: VecDeque<Read>,
    is_closed: bool,
}

#[derive(Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    more: Condvar,
}

impl Queue {
    /// The next read, the urgent ones first; `None` when there will be no more.
    fn next(&self) -> Option<Read> {
        // Nothing here panics, so that a poisoned lock would still guard a whole queue.
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let is_empty = |w: &mut Waiting| w.urgent.is_empty() && w.later.is_empty() && !w.is_closed;
        let mut waiting = self.more.wait_while(waiting, is_empty).unwrap_or_else(PoisonError::into_inner);
        if waiting.is_closed {
            return None;
        }
        waiting.urgent.pop_front().or_else(|| waiting.later.pop_front())
    }
}

/// The threads, which end with it.
pub struct Readers {
    queue: Arc<Queue>,
    done: Receiver<Read>,
    threads: Vec<JoinHandle<()>>,
}

impl Readers {
    /// Starts the threads.
    ///
    /// # Errors
    /// When the system starts none.
    pub fn new() -> io::Result<Readers> {
        let queue = Arc::new(Queue::default());
        let (sender, done) = mpsc::channel();
        let mut readers = Readers { queue, done, threads: Vec::new() };
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        for _ in 0..processors.clamp(*THREADS.start(), *THREADS.end()) {
            let (queue, sender) = (readers.queue.clone(), sender.clone());
            let thread = std::thread::Builder::new().name("puna-read".into()).spawn(move || work(&queue, &sender));
            match thread {
                Ok(thread) => readers.threads.push(thread),
                Err(e) if readers.threads.is_empty() => return Err(e),
                Err(_) => break,
            }
        }
        Ok(readers)
    }

    /// Has a piece read, the urgent ones first.
    pub fn submit(&self, read: Read, is_urgent: bool) {
        let start = read.piece.at as usize;
        read.piece.map.advise(start..start + read.piece.bytes, Access::WillNeed);
        let mut waiting = self.queue.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if is_urgent {
            waiting.urgent.push_back(read)
        } else {
            waiting.later.push_back(read)
        }
        drop(waiting);
        self.queue.more.notify_one();
    }

    /// Moves what was not urgent and has not begun to the urgent reads where `slot` is the one it is for.
    pub fn hurry(&self, slot: impl Fn(u32) -> bool) {
        let mut waiting = self.queue.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let Waiting { urgent, later, .. } = &mut *waiting;
        for _ in 0..later.len() {
            if let Some(read) = later.pop_front() {
                if slot(read.slot) { urgent.push_back(read) } else { later.push_back(read) }
            }
        }
    }

    /// A read that has ended.
    pub fn done(&self) -> Option<Read> {
        self.done.try_recv().ok()
    }

    /// The next read that ends; `None` where all threads have.
    pub fn wait(&self) -> Option<Read> {
        self.done.recv().ok()
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.queue.waiting.lock().unwrap_or_else(PoisonError::into_inner).is_closed = true;
        self.queue.more.notify_all();
        for thread in self.threads.drain(..) {
            // It can only have failed by a panic, which it has told of.
            let _ = thread.join();
        }
    }
}

fn work(queue: &Queue, done: &Sender<Read>) {
    let mut scratch = Vec::new();
    while let Some(mut read) = queue.next() {
        read.result = read.run(&mut scratch);
        if done.send(read).is_err() {
            return;
        }
    }
}
