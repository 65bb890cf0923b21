//! Experts that are read from their files when a step wants them, for models whose experts are larger than memory.
//!
//! [`ExpertStream`] has a fixed number of slots (`slots.rs`) and threads that fill them (`reader.rs`). A layer asks for
//! the experts that its rows chose; those in memory are computed while the others are read, and what comes is computed
//! as it comes, in waves. Which expert is computed when changes nothing: a row's experts are added in the order of
//! rank when all are there (docs/numerics.md).
//!
//! A thread that has read a matrix packs it where it is. Packing costs about as much as computing once with what is
//! packed; computing with what is stored costs many times as much.

mod files;
mod plan;
mod reader;
mod slots;

pub(crate) use files::read_exact_at;
pub(crate) use plan::{Plan, Wishes};

use crate::backend::Backend;
use crate::error::Error;
use crate::weights::{Dense, Linear};
use files::ExpertFile;
use plan::Expert;
use reader::{Read, Readers};
use slots::{Load, Slots};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What became of experts that steps wanted, since the model was loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertStats {
    /// Bytes that experts may take: [`LoadOptions::expert_memory`](crate::LoadOptions::expert_memory).
    pub budget: u64,
    /// Experts that fit in it at once.
    pub slots: usize,
    /// Experts of all layers.
    pub experts: usize,
    /// Their bytes.
    pub experts_bytes: u64,
    /// Wanted experts that were in memory. A layer wants an expert once in a step, whatever the number of its rows.
    pub hits: u64,
    /// Wanted experts that were not.
    pub misses: u64,
    /// Experts that were read before a layer wanted them.
    pub prefetched: u64,
    /// Experts that made room for others.
    pub evictions: u64,
    /// Bytes read from files.
    pub bytes_read: u64,
    /// Time that steps did nothing but wait for reads.
    pub stall: Duration,
    /// Experts that the router of the next layer was expected to choose, and how many of these it did choose.
    pub predicted: u64,
    /// See `predicted`.
    pub predicted_right: u64,
}

/// Rows of a step up to which the next layer's router is asked what it would choose. With more, most experts of a layer
/// are wanted, and how often they were chosen lately says enough.
const MAX_ASKED: usize = 8;

/// Predictions are followed where so many of them have lately been right: a read for nothing costs as much as one in
/// time saves.
const MIN_RIGHT: f32 = 0.5;

/// Otherwise one in so many layers is predicted, to notice when they become right again.
const RETRY: u64 = 32;

/// Most experts that are read ahead at a time.
const MAX_AHEAD: usize = 8;

/// Memory of a slot. The buffers are used again for the next expert, so that memory never grows beyond the budget.
struct Held<M> {
    /// Of gate, up and down; empty while they are read into, and while `dense` has them.
    buffers: [Vec<u8>; 3],
    /// Pieces that are being read.
    left: usize,
    failed: Option<Error>,
    dense: Option<Dense<M>>,
}

/// Experts of all layers, of which some are in memory. `M`: a device's matrix.
pub struct ExpertStream<M> {
    files: Vec<ExpertFile>,
    /// By layer; none where a layer is dense.
    experts: Vec<Vec<Expert>>,
    /// Bytes of a slot's buffers.
    sizes: [usize; 3],
    pack: bool,
    slots: Slots,
    held: Vec<Held<M>>,
    readers: Readers,
    in_flight: usize,
    arrived: Vec<u32>,
    layer: usize,
    rows: usize,
    /// What the next layer is expected to want.
    predicted: Vec<u32>,
    /// The part of predictions that was right lately.
    right: f32,
    layers_seen: u64,
    stats: ExpertStats,
}

impl<M> ExpertStream<M> {
    /// Nothing is in memory yet.
    ///
    /// # Errors
    /// Where files have changed since they were bound, or threads cannot be started.
    pub(crate) fn new(plan: Plan) -> Result<ExpertStream<M>, Error> {
        let Plan { files, experts, sizes, n_slots, used, pack, stats } = plan;
        let files = files.into_iter().map(|(file, len)| ExpertFile::new(file, len)).collect::<Result<Vec<_>, _>>()?;
        let n_experts = experts.iter().map(Vec::len).max().unwrap_or(0);
        let held = || Held { buffers: Default::default(), left: 0, failed: None, dense: None };
        Ok(ExpertStream {
            files,
            slots: Slots::new(experts.len(), n_experts, used, n_slots),
            experts,
            sizes,
            pack,
            held: (0..n_slots).map(|_| held()).collect(),
            readers: Readers::new().map_err(|e| Error::Experts { what: format!("no thread can be started: {e}") })?,
            in_flight: 0,
            arrived: Vec::new(),
            layer: 0,
            rows: 0,
            predicted: Vec::new(),
            right: 1.0,
            layers_seen: 0,
            stats,
        })
    }

    /// Counts since it was made.
    pub fn stats(&self) -> ExpertStats {
        self.stats
    }

    /// Bytes of the experts that one token reads.
    pub fn bytes_per_step(&self, used: usize) -> usize {
        self.experts.iter().map(|layer| layer.iter().take(used).map(Expert::bytes).sum::<usize>()).sum()
    }

    /// A layer of `rows` rows begins; expert e is wanted by `starts[e + 1] - starts[e]` of them.
    pub fn begin(&mut self, layer: usize, rows: usize, starts: &[usize]) {
        (self.layer, self.rows) = (layer, rows);
        self.layers_seen += 1;
        let (hits, misses) = self.slots.want(layer, rows, starts);
        self.stats.hits += hits;
        self.stats.misses += misses;
        if misses > 0 && self.in_flight > 0 {
            self.readers.hurry(|slot| self.slots.is_held(slot));
        }
        self.judge(starts);
    }

    /// How right the prediction for this layer was.
    fn judge(&mut self, starts: &[usize]) {
        if self.predicted.is_empty() {
            return;
        }
        let right = self.predicted.iter().filter(|&&e| starts[e as usize + 1] > starts[e as usize]).count();
        self.stats.predicted += self.predicted.len() as u64;
        self.stats.predicted_right += right as u64;
        self.right += 0.02 * (right as f32 / self.predicted.len() as f32 - self.right);
        self.predicted.clear();
    }

    /// The next experts that can be computed, by their numbers in the layer and in rising order; false when all were.
    /// Waits where none is there.
    ///
    /// # Errors
    /// [`Error::Changed`] or [`Error::Io`] where an expert cannot be read: then nothing of the layer is wanted any more,
    /// and the stream is ready for the next step.
    pub fn wave<B: Backend<Matrix = M>>(&mut self, b: &B, wave: &mut Vec<u32>) -> Result<bool, Error> {
        wave.clear();
        let mut result = self.harvest(b, false);
        while result.is_ok() && !self.slots.is_done() {
            while let Some(load) = self.slots.next_load() {
                self.load(b, load, true);
            }
            self.slots.wave(wave);
            if !wave.is_empty() {
                self.read_likely(b);
                return Ok(true);
            }
            result = self.harvest(b, true);
        }
        if result.is_err() {
            self.abort();
        }
        result.map(|()| false)
    }

    /// An expert of a wave.
    pub fn expert(&self, expert: u32) -> &Dense<M> {
        let slot = self.slots.ready(self.slots.key(self.layer, expert as usize));
        let dense = slot.and_then(|slot| self.held[slot as usize].dense.as_ref());
        dense.expect("an expert of a wave keeps its slot until the wave is released")
    }

    /// A wave is computed.
    pub fn release(&mut self, wave: &[u32]) {
        self.slots.release(wave);
    }

    /// Whether it is worth asking what the next layer will want.
    pub fn wants_prediction(&self) -> bool {
        let is_followed = self.right >= MIN_RIGHT || self.layers_seen.is_multiple_of(RETRY);
        self.rows <= MAX_ASKED && is_followed && !self.is_dense(self.layer + 1)
    }

    /// Takes what the next layer is expected to want, and begins to read it.
    pub fn predict<B: Backend<Matrix = M>>(&mut self, b: &B, experts: &[u32]) {
        self.predicted.clear();
        self.predicted.extend(experts);
        self.predicted.sort_unstable();
        self.predicted.dedup();
        if self.right >= MIN_RIGHT {
            let predicted = std::mem::take(&mut self.predicted);
            self.read_ahead(b, &predicted);
            self.predicted = predicted;
        }
    }

    fn is_dense(&self, layer: usize) -> bool {
        self.experts.get(layer).is_none_or(Vec::is_empty)
    }

    /// Begins to read what a next layer of as many rows will most likely want.
    fn read_likely<B: Backend<Matrix = M>>(&mut self, b: &B) {
        if self.rows > MAX_ASKED && !self.is_dense(self.layer + 1) {
            let likely = |&e: &u32| self.slots.is_likely(self.slots.key(self.layer + 1, e as usize));
            let likely: Vec<u32> = (0..self.experts[self.layer + 1].len() as u32).filter(likely).collect();
            self.read_ahead(b, &likely);
        }
    }

    /// Begins to read experts of the next layer, once all that this one wants are on their way.
    fn read_ahead<B: Backend<Matrix = M>>(&mut self, b: &B, experts: &[u32]) {
        if !self.slots.is_on_its_way() {
            return;
        }
        let most = MAX_AHEAD.min(self.slots.len() / 4);
        let mut begun = self.in_flight / 3;
        for &expert in experts {
            if begun >= most {
                break;
            }
            if let Some(load) = self.slots.prefetch(self.slots.key(self.layer + 1, expert as usize)) {
                self.load(b, load, false);
                self.stats.prefetched += 1;
                begun += 1;
            }
        }
    }

    /// Has an expert read into its slot.
    fn load<B: Backend<Matrix = M>>(&mut self, b: &B, load: Load, is_urgent: bool) {
        self.stats.evictions += u64::from(load.evicted.is_some());
        let (slot, sizes) = (load.slot, self.sizes);
        let held = &mut self.held[slot as usize];
        if let Some(Dense { gate, up, down }) = held.dense.take() {
            held.buffers = [gate, up, down].map(|linear| b.disown(linear.weight));
        }
        let expert = expert(&self.experts, &self.slots, slot);
        held.left = expert.pieces.len();
        self.in_flight += expert.pieces.len();
        for piece in &expert.pieces {
            let mut buffer = |matrix: usize| {
                let mut buffer = std::mem::take(&mut held.buffers[matrix]);
                // Once: no expert is larger.
                buffer.reserve_exact(sizes[matrix].saturating_sub(buffer.len()));
                buffer
            };
            let buffers = piece.parts.iter().map(|part| buffer(part.matrix)).collect();
            let (piece, file) = (piece.clone(), self.files[piece.file].opened().clone());
            self.readers.submit(Read { slot, piece, file, buffers, pack: self.pack, result: Ok(()) }, is_urgent);
        }
    }

    /// Takes what has been read; waits for something where `waits`.
    fn harvest<B: Backend<Matrix = M>>(&mut self, b: &B, waits: bool) -> Result<(), Error> {
        if waits && self.in_flight == 0 {
            // Slots are held by waves, which are released, or by reads: it does not happen.
            return Err(Error::Experts { what: "no slot is free and nothing is being read".into() });
        }
        let mut next = if waits {
            let start = Instant::now();
            let read = self.readers.wait();
            self.stats.stall += start.elapsed();
            Some(read.ok_or_else(|| Error::Experts { what: "all threads that read have ended".into() })?)
        } else {
            self.readers.done()
        };
        while let Some(read) = next {
            self.end(read);
            next = self.readers.done();
        }
        if self.arrived.is_empty() {
            return Ok(());
        }
        let mut result = Ok(());
        for slot in std::mem::take(&mut self.arrived) {
            match self.held[slot as usize].failed.take() {
                None => {
                    self.held[slot as usize].dense = Some(self.dense(b, slot));
                    self.slots.arrived(slot);
                }
                Some(e) => {
                    // What was only read ahead is read again when it is wanted, and fails then.
                    if self.slots.is_held(slot) && result.is_ok() {
                        result = Err(e);
                    }
                    self.slots.failed(slot);
                }
            }
        }
        result
    }

    /// A read has ended: its buffers are the slot's again. The file is looked at after the read, so that what was written
    /// to it before or meanwhile is noticed.
    fn end(&mut self, read: Read) {
        let source = &mut self.files[read.piece.file];
        let checked = source.check();
        if checked.is_ok() && !Arc::ptr_eq(&read.file, source.opened()) {
            // What was read may be of a file that the right one has taken the place of.
            let again = Read { file: source.opened().clone(), result: Ok(()), ..read };
            return self.readers.submit(again, true);
        }
        let Read { slot, piece, file, buffers, result, .. } = read;
        self.in_flight -= 1;
        let read = checked.and_then(|()| result.map_err(|e| Error::io(&file.path, &e)));
        self.stats.bytes_read += if read.is_ok() { piece.bytes as u64 } else { 0 };
        let held = &mut self.held[slot as usize];
        for (part, buffer) in piece.parts.iter().zip(buffers) {
            held.buffers[part.matrix] = buffer;
        }
        held.failed = held.failed.take().or(read.err());
        held.left -= 1;
        if held.left == 0 {
            self.arrived.push(slot);
        }
    }

    fn dense<B: Backend<Matrix = M>>(&mut self, b: &B, slot: u32) -> Dense<M> {
        let expert = expert(&self.experts, &self.slots, slot);
        let buffers = &mut self.held[slot as usize].buffers;
        let mut linear = |i: usize| {
            let matrix = &expert.matrices[i];
            let weight = b.owned(matrix.dtype, matrix.shape, std::mem::take(&mut buffers[i]));
            Linear { weight, bias: matrix.bias.clone(), phase: crate::timings::Phase::Ffn }
        };
        Dense { gate: linear(0), up: linear(1), down: linear(2) }
    }

    /// Ends a step that cannot go on: waits for what is being read, and forgets it.
    fn abort(&mut self) {
        self.slots.abort();
        self.predicted.clear();
        while self.in_flight > 0 {
            let Some(read) = self.readers.wait() else { break };
            self.end(read);
        }
        for slot in std::mem::take(&mut self.arrived) {
            self.held[slot as usize].failed = None;
            self.slots.failed(slot);
        }
    }
}

/// The expert in a slot.
fn expert<'a>(experts: &'a [Vec<Expert>], slots: &Slots, slot: u32) -> &'a Expert {
    let (layer, expert) = slots.place(slots.expert_in(slot));
    &experts[layer][expert]
}
