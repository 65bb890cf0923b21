//! A loaded model: from a file to logits.

use crate::backend::Backend;
use crate::batch::{Batch, MAX_POSITIONS, check_positions, check_rows, check_steering};
use crate::bind::{self, Progress};
use crate::checkpoint::Checkpoint;
use crate::config::Config;
use crate::cpu::Cpu;
use crate::error::Error;
use crate::experts::{ExpertStats, ExpertStream, Plan, Wishes};
use crate::fingerprint::Fingerprint;
use crate::forward::{self, Scratch, Tap};
use crate::kv::KvCache;
use crate::prefix::Chain;
use crate::reference::Reference;
use crate::state::{self, Loading, Saving, State, StateKey, StateReader, StateWriter};
use crate::timed::Timed;
use crate::timings::{Phase, Stopwatch};
use crate::weights::Weights;
use puna_kernels::{DType, Isa, KvType, Pool};
use std::cell::RefCell;
use std::path::Path;

/// What computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendKind {
    /// Packed weights on all cores.
    #[default]
    Cpu,
    /// Plain loops over f32 weights: slow, and what the other is compared with.
    Reference,
}

/// How a model is loaded and run. Nothing here changes what is computed, except that the reference is exact and that
/// `quantize` changes the weights.
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// What computes.
    pub backend: BackendKind,
    /// Level of instructions: one of [`Isa::available`].
    pub isa: Isa,
    /// Threads.
    pub threads: usize,
    /// Rearrange weights for speed; otherwise they are used as the file stores them, without being copied.
    pub pack: bool,
    /// Quantize projections that are stored as floats: one of the formats that [`DType::can_quantize`]. Rows that are not
    /// whole blocks of it become Q8_0. Norms, biases, routers and embeddings stay as they are, and so do weights that
    /// are quantized already.
    pub quantize: Option<DType>,
    /// Most bytes of routed experts in memory, where they are read from their files as they are needed; at least two
    /// experts. `None`: all of them are. Where all fit they are loaded as without a limit.
    pub expert_memory: Option<u64>,
    /// Load the output projection. Without it there are no logits, only [`Model::hidden`]; files need not have one.
    pub head: bool,
}

impl Default for LoadOptions {
    fn default() -> LoadOptions {
        let threads = Pool::default_threads();
        LoadOptions {
            backend: BackendKind::Cpu,
            isa: Isa::detect(),
            threads,
            pack: true,
            quantize: None,
            expert_memory: None,
            head: true,
        }
    }
}

/// A model that can compute.
pub struct Model {
    config: Config,
    runner: Box<dyn Runner + Send>,
    notices: Vec<String>,
    fingerprint: Fingerprint,
    scratch: Scratch,
}

/// What a forward pass is given.
struct Step<'a> {
    config: &'a Config,
    batch: &'a Batch,
    kv: &'a mut KvCache,
    scratch: &'a mut Scratch,
    tap: &'a mut dyn Tap,
    watch: Option<&'a Stopwatch>,
}

/// A backend with its weights, whichever it is.
trait Runner {
    fn forward(&self, step: Step) -> Result<(), Error>;
    fn head(&self, config: &Config, scratch: &mut Scratch, watch: Option<&Stopwatch>);
    fn has_head(&self) -> bool;
    fn threads(&self) -> usize;
    fn bytes_per_step(&self, config: &Config) -> usize;
    fn ops_per_row(&self, config: &Config) -> (usize, usize);
    fn expert_stats(&self) -> Option<ExpertStats>;
    fn read_bandwidth(&self) -> Option<f64>;
}

struct Run<B: Backend> {
    backend: B,
    weights: Weights<B::Matrix>,
    threads: usize,
    /// Experts that are not in memory.
    experts: Option<RefCell<ExpertStream<B::Matrix>>>,
}

impl<B: Backend> Runner for Run<B> {
    fn forward(&self, step: Step) -> Result<(), Error> {
        let Step { config, batch, kv, scratch, tap, watch } = step;
        let loaded = (config, &self.weights, self.experts.as_ref());
        match watch {
            None => forward::forward(&self.backend, loaded, batch, kv, scratch, tap),
            Some(watch) => {
                watch.read(Phase::Attention, kv.bytes_read(batch));
                forward::forward(&Timed { inner: &self.backend, watch }, loaded, batch, kv, scratch, tap)
            }
        }
    }

    fn head(&self, config: &Config, scratch: &mut Scratch, watch: Option<&Stopwatch>) {
        let loaded = (config, &self.weights);
        match watch {
            None => forward::head(&self.backend, loaded, scratch),
            Some(watch) => forward::head(&Timed { inner: &self.backend, watch }, loaded, scratch),
        }
    }

    fn has_head(&self) -> bool {
        self.weights.has_head
    }

    fn threads(&self) -> usize {
        self.threads
    }

    fn bytes_per_step(&self, config: &Config) -> usize {
        let bytes = |m: &B::Matrix| self.backend.describe(m).2;
        let used = config.moe.map_or(0, |moe| moe.routing.used);
        let streamed = self.experts.as_ref().map_or(0, |experts| experts.borrow().bytes_per_step(used));
        self.weights.per_step(config, &bytes) + streamed
    }

    fn ops_per_row(&self, config: &Config) -> (usize, usize) {
        let ops = |m: &B::Matrix| {
            let (rows, cols, _) = self.backend.describe(m);
            2 * rows * cols
        };
        let head = if self.weights.has_head { ops(&self.weights.head().weight) } else { 0 };
        (self.weights.per_step(config, &ops) - head, head)
    }

    fn expert_stats(&self) -> Option<ExpertStats> {
        self.experts.as_ref().map(|experts| experts.borrow().stats())
    }

    fn read_bandwidth(&self) -> Option<f64> {
        self.backend.read_bandwidth()
    }
}

impl Model {
    /// Loads a model: a [`Gguf`](crate::Gguf) file, a [`Folder`](crate::hf::Folder), a [`Source`](crate::Source) that
    /// is one of them, or whatever else gives a configuration and tensors.
    ///
    /// # Errors
    /// Whatever is wrong with the files, before any weight is read into memory; an architecture or a tensor that is
    /// not supported is named.
    pub fn load(from: &dyn Checkpoint, options: &LoadOptions, progress: &mut Progress) -> Result<Model, Error> {
        if !Isa::available().contains(&options.isa) {
            return Err(Error::Isa { isa: options.isa });
        }
        if let Some(dtype) = options.quantize.filter(|d| !d.can_quantize()) {
            return Err(Error::Quantize { dtype });
        }
        let (arch, config) = from.config()?;
        let mut weights = bind::bind(from, arch, &config, options.head)?;
        let mut notices: Vec<String> =
            options.quantize.and_then(|wish| bind::notice(&weights, wish)).into_iter().collect();
        let plan = match options.expert_memory {
            Some(budget) => {
                let wishes = Wishes { budget, quantize: options.quantize, pack: options.pack };
                Plan::take(&mut weights, &config, wishes)?
            }
            None => None,
        };
        if options.expert_memory.is_some() && config.moe.is_none() {
            notices.push("the model has no experts: a limit of their memory changes nothing".into());
        }
        let own = plan.is_some();
        // Keys and values depend on these, too.
        let way = format!("{:?} {:?}", options.backend, options.quantize);
        let fingerprint = Fingerprint::new(from, &config, &way);
        let runner: Box<dyn Runner + Send> = match options.backend {
            BackendKind::Cpu => {
                let cpu = Cpu::new(options.isa, options.threads, options.pack);
                let threads = cpu.exec().pool.threads();
                let quantize = options.quantize.map(|dtype| (&cpu.exec().pool, dtype));
                let weights = bind::load(&cpu, weights, quantize, own, progress);
                let experts = plan.map(ExpertStream::new).transpose()?.map(RefCell::new);
                Box::new(Run { backend: cpu, weights, threads, experts })
            }
            BackendKind::Reference => {
                if own {
                    return Err(Error::Experts { what: "the reference keeps all weights in memory".into() });
                }
                let pool = Pool::new(options.threads);
                let quantize = options.quantize.map(|dtype| (&pool, dtype));
                let weights = bind::load(&Reference, weights, quantize, own, progress);
                Box::new(Run { backend: Reference, weights, threads: 1, experts: None })
            }
        };
        Ok(Model { config, runner, notices, fingerprint, scratch: Scratch::default() })
    }

    /// What the model is.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What the options ask for and the model does not get, a sentence each.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Whether it computes logits: [`LoadOptions::head`].
    pub fn has_head(&self) -> bool {
        self.runner.has_head()
    }

    /// What tells it from other models, and from itself loaded in a way that changes what it computes: a hash of its
    /// configuration, of its tensors' names, shapes and formats, and of 256 bytes from the middle of each. They are read
    /// when this is first asked for.
    ///
    /// # Errors
    /// [`Error::Io`] where a file of the model cannot be read any more.
    pub fn fingerprint(&self) -> Result<[u8; 32], Error> {
        self.fingerprint.hash()
    }

    /// What states are known by that are saved from this model and such a cache.
    ///
    /// # Errors
    /// As [`Model::fingerprint`].
    pub fn state_key(&self, kv: &KvCache) -> Result<StateKey, Error> {
        Ok(StateKey { model: self.fingerprint()?, kind: kv.kind() })
    }

    /// Begins to save what the cache has of a sequence's rows: whole blocks of 32 positions with their keys and values, as
    /// many as every layer can go on from. The other rows are saved as what they are, and are computed again. `note`: any
    /// text, kept with it. What is begun must be ended ([`Saving::end`]).
    ///
    /// # Errors
    /// [`Error::StateNote`]; [`Error::Batch`] where the cache is of another shape; as [`Model::fingerprint`].
    pub fn begin_save(&self, kv: &mut KvCache, chain: &Chain, note: &str) -> Result<Saving, Error> {
        self.check_cache(kv)?;
        Saving::begin(kv, &self.state_key(kv)?, chain, note)
    }

    /// Bytes of the file that [`Model::begin_save`] makes where the cache has all whole blocks.
    pub fn state_bytes(&self, kv: &KvCache, chain: &Chain, note: &str) -> u64 {
        state::file_bytes(kv, chain, note, chain.keys().len())
    }

    /// Begins to put a saved state into the cache. What is begun must be ended: [`Loading::finish`], [`Loading::abandon`].
    ///
    /// # Errors
    /// [`Error::State`] where it is of another model or kind of cache, or contradicts itself; [`Error::OutOfMemory`] where
    /// the cache has no room for it; otherwise as [`Model::begin_save`]. The cache is as before then.
    pub fn begin_load(&self, kv: &mut KvCache, state: &State) -> Result<Loading, Error> {
        self.check_cache(kv)?;
        Loading::begin(kv, &self.state_key(kv)?, state)
    }

    /// Whether a sequence that is to become `chain` could take more from the cache if a state were there.
    pub fn lacks(&self, kv: &KvCache, chain: &Chain, state: &State) -> bool {
        state.helps(kv, chain)
    }

    /// [`Model::begin_save`] to the end, into a file, which replaces one of its name when it is complete. Gives how many
    /// positions are saved with their keys and values.
    ///
    /// # Errors
    /// [`Error::Write`]; as [`Model::begin_save`].
    pub fn save_state(&self, kv: &mut KvCache, chain: &Chain, note: &str, path: &Path) -> Result<usize, Error> {
        let mut writer = StateWriter::create(path)?;
        let mut saving = self.begin_save(kv, chain, note)?;
        let write = || {
            while let Some(piece) = saving.next_piece(kv)? {
                writer.write(&piece)?;
            }
            writer.finish()
        };
        let written = write();
        let positions = saving.positions();
        saving.end(kv);
        written.map(|()| positions)
    }

    /// [`Model::begin_load`] to the end, from a file: shared sequences that begin alike ([`KvCache::adopt`]) go on from it,
    /// and are what they would have been without it, bit for bit.
    ///
    /// # Errors
    /// [`Error::State`] where the file is damaged; [`Error::Io`]; as [`Model::begin_load`]. Nothing gets into the cache
    /// then.
    pub fn load_state(&self, kv: &mut KvCache, path: &Path) -> Result<State, Error> {
        let mut reader = StateReader::open(path)?;
        reader.check()?;
        let state = reader.state().clone();
        let mut loading = self.begin_load(kv, &state)?;
        let read = || {
            while let Some(piece) = reader.next_piece()? {
                loading.put(kv, &piece)?;
            }
            reader.finish()
        };
        match read() {
            Ok(()) => loading.finish(kv).map(|()| state),
            Err(e) => {
                loading.abandon(kv);
                Err(e)
            }
        }
    }

    fn check_cache(&self, kv: &KvCache) -> Result<(), Error> {
        let what = || "the cache was made for a model of another shape".into();
        if kv.fits(&self.config) { Ok(()) } else { Err(Error::Batch { what: what() }) }
    }

    /// Threads it runs on.
    pub fn threads(&self) -> usize {
        self.runner.threads()
    }

    /// Bytes a second that its threads read from memory at best, measured: a third of a second, and 256 MB. `None` for
    /// the reference.
    pub fn read_bandwidth(&self) -> Option<f64> {
        self.runner.read_bandwidth()
    }

    /// What became of wanted experts; `None` where all are in memory.
    pub fn expert_stats(&self) -> Option<ExpertStats> {
        self.runner.expert_stats()
    }

    /// Bytes of weights that one token reads: all but the embedding table and the experts that are not chosen.
    pub fn bytes_per_step(&self) -> usize {
        self.runner.bytes_per_step(&self.config)
    }

    /// Operations of the products with one row, two a weight: of its layers, and of the output projection, which only
    /// rows with logits meet. Experts in memory only; attention is not counted.
    pub fn ops_per_row(&self) -> (usize, usize) {
        self.runner.ops_per_row(&self.config)
    }

    /// An empty cache for its sequences, as large as they need.
    pub fn kv_cache(&self, kind: KvType) -> KvCache {
        KvCache::new(&self.config, kind, usize::MAX)
    }

    /// Computes a batch: its positions enter the cache, and the rows that want them get logits,
    /// `[outputs, vocab_size]`. The logits of a row depend on the model and its own sequence alone. Rows that are a draft
    /// ([`Batch::draft`]) enter the cache when they are accepted.
    ///
    /// # Errors
    /// [`Error::Batch`] when the batch does not fit the model or the cache, which are then as before;
    /// [`Error::OutOfMemory`] when the cache cannot grow; [`Error::NoHead`]. Where experts are read from files,
    /// [`Error::Changed`] or [`Error::Io`]: the cache is as before then, and the same batch can be computed once the
    /// files are right.
    pub fn forward(&mut self, batch: &Batch, kv: &mut KvCache) -> Result<&[f32], Error> {
        self.forward_with(batch, kv, &mut ())
    }

    /// [`Model::forward`] with a tap on the residual. One that changes it must not be used on sequences that share blocks
    /// ([`KvCache::add_shared`]): what it changes is no part of what blocks are known by. [`Batch::steer`] is.
    ///
    /// # Errors
    /// As [`Model::forward`].
    pub fn forward_with(&mut self, batch: &Batch, kv: &mut KvCache, tap: &mut dyn Tap) -> Result<&[f32], Error> {
        self.forward_timed(batch, kv, tap, None)
    }

    /// [`Model::forward_with`] and a stopwatch, whose laps are the operations.
    ///
    /// # Errors
    /// As [`Model::forward`].
    pub fn forward_timed(
        &mut self,
        batch: &Batch,
        kv: &mut KvCache,
        tap: &mut dyn Tap,
        watch: Option<&Stopwatch>,
    ) -> Result<&[f32], Error> {
        if !self.has_head() {
            return Err(Error::NoHead);
        }
        self.compute(batch, kv, tap, watch)?;
        kv.commit(batch);
        self.runner.head(&self.config, &mut self.scratch, watch);
        Ok(self.scratch.logits.values())
    }

    /// [`Model::forward`] that leaves the cache as it was: the same logits, and the batch's sequences stand where they
    /// stood. For scores of tokens that may not come: drafts, prompts of which only probabilities are wanted.
    ///
    /// # Errors
    /// As [`Model::forward`].
    pub fn peek(&mut self, batch: &Batch, kv: &mut KvCache) -> Result<&[f32], Error> {
        if !self.has_head() {
            return Err(Error::NoHead);
        }
        self.compute(batch, kv, &mut (), None)?;
        kv.rollback(batch);
        self.runner.head(&self.config, &mut self.scratch, None);
        Ok(self.scratch.logits.values())
    }

    /// As [`Model::forward`], but gives the rows after the last norm, `[outputs, dim]`, and computes no logits: what
    /// embeddings are made of.
    ///
    /// # Errors
    /// As [`Model::forward`], except [`Error::NoHead`].
    pub fn hidden(&mut self, batch: &Batch, kv: &mut KvCache) -> Result<&[f32], Error> {
        self.compute(batch, kv, &mut (), None)?;
        kv.commit(batch);
        Ok(self.scratch.h.values())
    }

    /// Everything before the logits. The batch's rows are in the cache's blocks, but not yet counted.
    fn compute(
        &mut self,
        batch: &Batch,
        kv: &mut KvCache,
        tap: &mut dyn Tap,
        watch: Option<&Stopwatch>,
    ) -> Result<(), Error> {
        self.check(batch, kv)?;
        kv.prepare(batch)?;
        let (cos, sin) = (&mut self.scratch.cos, &mut self.scratch.sin);
        cos.clear();
        sin.clear();
        let mut row = 0;
        for span in &batch.spans {
            let is_long = self.config.rope.is_long(span.total.max(span.start + span.rows));
            for position in span.start..span.start + span.rows {
                let own = batch.positions.get(row).copied().unwrap_or([position as u32; 3]);
                self.config.rope.push_angles(own, is_long, cos, sin);
                row += 1;
            }
        }
        if let Some(watch) = watch {
            watch.lap(Phase::Schedule);
        }
        let step = Step { config: &self.config, batch, kv: &mut *kv, scratch: &mut self.scratch, tap, watch };
        let outcome = self.runner.forward(step);
        if outcome.is_err() {
            kv.rollback(batch);
        }
        outcome
    }

    fn check(&self, batch: &Batch, kv: &KvCache) -> Result<(), Error> {
        let error = |what: String| Err(Error::Batch { what });
        let n = batch.rows.len();
        self.check_cache(kv)?;
        check_rows(&batch.rows, &batch.embeds, &self.config)?;
        if let Some(bad) = batch.outputs.windows(2).find(|o| o[0] >= o[1]) {
            return error(format!("outputs {} and {} are not in rising order", bad[0], bad[1]));
        }
        if let Some(last) = batch.outputs.last().filter(|&&o| o as usize >= n) {
            return error(format!("output {last} is out of range: the batch has {n} rows"));
        }
        let mut rows = 0;
        for (i, span) in batch.spans.iter().enumerate() {
            let Some(len) = kv.len(span.seq) else {
                return error(format!("span {i}: its sequence has ended"));
            };
            if span.start != len {
                let start = span.start;
                return error(format!("span {i} starts at position {start}, but its sequence holds {len} positions"));
            }
            if span.draft > span.rows {
                return error(format!("span {i} has {} rows, but a draft of {}", span.rows, span.draft));
            }
            if span.rows == 0 || batch.spans[..i].iter().any(|s| s.seq == span.seq) {
                return error(format!("span {i} is empty, or a second one of its sequence"));
            }
            if span.rows > MAX_POSITIONS || span.start > MAX_POSITIONS - span.rows {
                return error(format!("span {i} goes past position {MAX_POSITIONS}"));
            }
            let (before, after) = (kv.total(span.seq), span.total.max(span.start + span.rows));
            if span.start > 0 && self.config.rope.is_long(before) != self.config.rope.is_long(after) {
                return error(format!(
                    "span {i}: its sequence was computed as one of {before} positions and is now one of {after}, \
                     which rotate otherwise: it must be computed again from its beginning"
                ));
            }
            if !kv.can_steer(span.seq, batch.steering_of(i)) {
                return error(format!("span {i}: its sequence shares blocks and was steered otherwise so far"));
            }
            rows += span.rows;
        }
        check_steering(batch, &self.config)?;
        check_positions(&batch.positions, n, MAX_POSITIONS)?;
        let deepstack = self.config.n_deepstack * batch.embeds.len();
        if !batch.deepstack.is_empty() && batch.deepstack.len() != deepstack {
            return error(format!("deepstack has {} numbers, expected {deepstack}", batch.deepstack.len()));
        }
        if rows != n || n == 0 {
            return error(format!("spans have {rows} rows, the batch {n}: expected as many, and at least one"));
        }
        Ok(())
    }
}
