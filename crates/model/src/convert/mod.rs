//! A model as one GGUF file: from a Hugging Face folder, or from GGUF files of other formats or in several parts.
//!
//! A [`Plan`] says what will be in the file. Whoever knows more of the model than its weights (tokenizer, sampling)
//! adds that with [`Plan::set`]; [`Plan::write`] then reads, converts and writes one piece after the other.
//!
//! ```no_run
//! use puna_kernels::Pool;
//! use puna_model::{Source, convert::{Plan, Target}};
//! use std::ops::ControlFlow;
//!
//! let source = Source::open("Qwen3-0.6B")?;
//! let mut plan = Plan::new(&source, "qwen3.gguf", Target::Keep, true)?;
//! plan.set("general.name", "Qwen3 0.6B");
//! plan.write(false, &Pool::new(4), &mut |_, _| ControlFlow::Continue(()))?;
//! # Ok::<(), puna_model::Error>(())
//! ```

mod metadata;
mod rows;
mod types;

use self::rows::Rows;
use self::types::{Tensor, file_type};
use crate::arch;
use crate::bind::{bind, is_part};
use crate::checkpoint::Checkpoint;
use crate::error::{Error, escape};
use crate::gguf::{Field, Gguf, Header, TensorType, Writer};
use crate::hf::Folder;
use crate::source::Source;
use indexmap::IndexMap;
use puna_kernels::{Arith, DType, Pool};
use std::ops::ControlFlow;
use std::path::Path;

pub use self::types::Target;

/// Called as a file is written: bytes done, bytes in all. Whoever breaks gets [`Error::Stopped`], and no file.
pub type Progress<'a> = dyn FnMut(u64, u64) -> ControlFlow<()> + 'a;

/// Bytes of a tensor that are copied at a time.
const PIECE: usize = 1 << 23;

/// Parts of names that the tensors of vision towers have.
const VISION: [&str; 2] = ["visual", "vision"];

/// What a file will have, and where it comes from.
pub struct Plan<'a> {
    source: &'a Source,
    header: Header,
    /// One for each tensor of the header.
    jobs: Vec<Job>,
    notices: Vec<String>,
    misfits: IndexMap<Misfit, Vec<String>>,
}

/// Why tensors get another format than the one asked for: the one they get, the other one, the length of their rows.
type Misfit = (DType, DType, usize);

/// Where a tensor's elements come from.
enum Job {
    /// From nowhere.
    Table(Vec<f32>),
    /// As they are in the tensor of the same name.
    Copy,
    /// From tensors, one after the other.
    Rows {
        /// Their names.
        from: Vec<String>,
        /// What their elements become.
        to: DType,
        /// Halves become adjacent pairs: dimensions of a head, and how many of them rotate.
        pairs: Option<[usize; 2]>,
    },
}

/// What was written.
#[derive(Clone, Debug)]
pub struct Written {
    /// Bytes of the file.
    pub bytes: u64,
    /// Each type with the number of its tensors and their bytes, the one with most bytes first.
    pub types: Vec<(TensorType, usize, u64)>,
}

impl<'a> Plan<'a> {
    /// What a model will be as a GGUF file at `out`.
    ///
    /// Metadata of GGUF files is copied; that of a folder is written anew, without a tokenizer. Norms, biases and
    /// routers become F32 in any case. Rows that are not whole blocks of the format become Q8_0, or F16; and formats
    /// of fewer bits leave the output in Q6_K, as in llama.cpp. `head`: a folder must have an output projection; readers
    /// of a file without one take the embedding in its place.
    ///
    /// # Errors
    /// [`Error::Quantize`] for a format that is only read, [`Error::Convert`] for a model that GGUF cannot describe, and
    /// whatever keeps the model from being loaded.
    pub fn new(source: &'a Source, out: impl AsRef<Path>, target: Target, head: bool) -> Result<Plan<'a>, Error> {
        let (jobs, notices, misfits) = Default::default();
        let mut plan = Plan { source, header: Header::new(out), jobs, notices, misfits };
        if let Target::Format(dtype) = target
            && !dtype.can_quantize()
        {
            return Err(Error::Quantize { dtype });
        }
        match source {
            Source::Folder(folder) => plan.folder(folder, target, head)?,
            Source::Gguf(gguf) => plan.gguf(gguf, target)?,
        }
        for ((to, wanted, cols), parts) in std::mem::take(&mut plan.misfits) {
            let (parts, len) = (parts.join(", "), wanted.format().block_len);
            let (to, wanted) = (to.name(), wanted.name());
            plan.note(format!("{to} for rows of {cols}, which are not whole blocks of {wanted} ({len}): {parts}"));
        }
        Ok(plan)
    }

    /// Gives a key of the metadata a value, in place of one that it had.
    pub fn set(&mut self, key: impl Into<String>, value: impl Into<Field>) {
        self.header.set(key, value);
    }

    /// What the file will not have as one might expect it, a sentence each.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Writes the file, in pieces of some megabytes. `replace`: in place of one that is there.
    ///
    /// # Errors
    /// [`Error::Write`], [`Error::Stopped`], [`Error::Tensor`] for numbers that the format does not have. There is no
    /// file then, or the one that was there before.
    pub fn write(self, replace: bool, pool: &Pool, progress: &mut Progress) -> Result<Written, Error> {
        let tensors: Vec<(String, TensorType, u64)> =
            self.header.tensors().map(|(name, ty, bytes)| (name.to_owned(), ty, bytes)).collect();
        let out = self.header.path().to_owned();
        let mut sink = Sink {
            total: tensors.iter().map(|t| t.2).sum(),
            done: 0,
            progress,
            writer: self.header.create(replace)?,
            out: &out,
        };
        let mut types: Vec<(TensorType, usize, u64)> = Vec::new();
        for ((name, ty, bytes), job) in tensors.iter().zip(&self.jobs) {
            match job {
                Job::Table(values) => sink.write(&values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())?,
                Job::Copy => copy(self.source, name, &mut sink)?,
                Job::Rows { from, to, pairs } => {
                    from.iter().try_for_each(|name| convert(self.source, name, *to, *pairs, pool, &mut sink))?;
                }
            }
            match types.iter_mut().find(|(known, ..)| known == ty) {
                Some((_, n, sum)) => (*n, *sum) = (*n + 1, *sum + bytes),
                None => types.push((*ty, 1, *bytes)),
            }
        }
        types.sort_by_key(|(_, _, bytes)| std::cmp::Reverse(*bytes));
        Ok(Written { bytes: sink.writer.finish()?, types })
    }

    fn fault(&self, what: String) -> Error {
        Error::Convert { path: self.source.path().to_owned(), what }
    }

    fn folder(&mut self, folder: &Folder, target: Target, head: bool) -> Result<(), Error> {
        let (arch, config) = folder.config()?;
        // What is bound is whole: every part is there and of the right shape, and there is no other.
        bind(folder, arch, &config, head || folder.missing_head().is_none())?;
        let tables = metadata::describe(folder.path(), arch, &config, &mut self.header)?;
        self.set("general.type", "model");
        self.jobs.extend(tables.iter().map(|(_, values)| Job::Table(values.clone())));
        if folder.missing_head().is_some() {
            self.note(
                "the folder has no output projection: the file is good for embeddings, and its logits are not".into(),
            );
        }
        if folder.tensors().any(|(name, ..)| VISION.iter().any(|part| name.contains(part))) {
            self.note("the file holds the text model alone: what sees images is left out".into());
        }
        let is_tied = folder.shape("output.weight").is_none();
        let pairs = Some([config.head_dim, 2 * config.rope.half()]).filter(|_| arch.interleaved);
        for (name, from) in merged(folder.names()) {
            let shape = folder.shape(&from[0]).ok_or_else(|| folder.missing(&from[0]))?;
            let cols = shape.last().copied().unwrap_or(1);
            let shape =
                if from.len() > 1 || name.contains("_exps.") { [&[from.len()], &shape[..]].concat() } else { shape };
            let is_head = name == "output.weight" || is_tied && name == "token_embd.weight";
            let tensor = Tensor { name: &name, dims: shape.len(), cols, is_head };
            let own = self.own_format(folder, &from)?;
            let (to, wanted) = if tensor.is_bulk() { tensor.format(own, target) } else { (DType::F32, None) };
            self.note_misfit(&name, cols, to, wanted);
            self.header.tensor(&name, &shape, TensorType::Weight(to))?;
            let is_rotated = ["attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias"];
            let pairs = pairs.filter(|_| is_rotated.iter().any(|end| name.ends_with(end)));
            self.jobs.push(Job::Rows { from, to, pairs });
        }
        metadata::check(folder.path(), &config, &self.header, &tables)?;
        let main = match target {
            Target::Format(dtype) => dtype,
            Target::Keep => self.main_format(),
        };
        self.set_file_type(main);
        self.set("general.size_label", size_label(&self.header));
        Ok(())
    }

    /// The format that tensors have; F32 where they have several, or one that GGUF does not have.
    fn own_format(&mut self, folder: &Folder, names: &[String]) -> Result<DType, Error> {
        let mut own = None;
        for name in names {
            let tensor = folder.tensor(name)?;
            let elements: usize = folder.shape(name).unwrap_or_default().iter().product();
            let stored = tensor.place.map_or(usize::MAX, |place| place.range.len());
            if tensor.dtype == DType::F32 && stored < 4 * elements {
                self.note(
                    "weights in FP8 are multiplied with their scales, which only F32 holds without loss: \
                           choose bf16 for a file of half the size"
                        .into(),
                );
            }
            own = Some(own.map_or(tensor.dtype, |own| if own == tensor.dtype { own } else { DType::F32 }));
        }
        Ok(own.unwrap_or(DType::F32))
    }

    /// The format of most of the weights.
    fn main_format(&self) -> DType {
        let mut formats: Vec<(DType, u64)> = Vec::new();
        for (_, ty, bytes) in self.header.tensors() {
            let TensorType::Weight(dtype) = ty else { continue };
            match formats.iter_mut().find(|(known, _)| *known == dtype) {
                Some((_, sum)) => *sum += bytes,
                None => formats.push((dtype, bytes)),
            }
        }
        formats.into_iter().max_by_key(|(_, bytes)| *bytes).map_or(DType::F32, |(dtype, _)| dtype)
    }

    fn set_file_type(&mut self, main: DType) {
        self.set("general.file_type", file_type(main));
        self.set("general.quantization_version", 2u32);
    }

    fn gguf(&mut self, gguf: &Gguf, target: Target) -> Result<(), Error> {
        gguf.check()?;
        for (key, value) in gguf.meta().iter().filter(|(key, _)| !key.starts_with("split.")) {
            self.set(key, value);
        }
        if let Target::Format(dtype) = target {
            // Which tensors are what is known of these architectures only.
            let name: &str = gguf.meta().require("general.architecture")?;
            if arch::find(name).is_none() {
                let what = format!("weights of architecture '{}' are only copied as they are", escape(name));
                return Err(self.fault(what));
            }
            self.set_file_type(dtype);
        }
        let is_tied = gguf.find("output.weight").is_none();
        for info in gguf.tensors() {
            let is_head = &*info.name == "output.weight" || is_tied && &*info.name == "token_embd.weight";
            let tensor = Tensor { name: &info.name, dims: info.shape.len(), cols: info.cols(), is_head };
            let shape: Vec<usize> = info.shape.iter().map(|&n| n as usize).collect();
            let (ty, job) = match info.ty {
                TensorType::Weight(own) if tensor.is_bulk() && is_part(&info.name) => {
                    let (to, wanted) = tensor.format(own, target);
                    self.note_misfit(&info.name, info.cols(), to, wanted);
                    if to != own && own.format().arith != Arith::Float && to.format().arith != Arith::Float {
                        self.note(
                            "some weights are quantized already: quantizing them again loses more than \
                                   quantizing the original would"
                                .into(),
                        );
                    }
                    let rows = Job::Rows { from: vec![info.name.to_string()], to, pairs: None };
                    (TensorType::Weight(to), if to == own { Job::Copy } else { rows })
                }
                ty => (ty, Job::Copy),
            };
            self.header.tensor(&info.name, &shape, ty)?;
            self.jobs.push(job);
        }
        Ok(())
    }

    fn note_misfit(&mut self, name: &str, cols: usize, to: DType, wanted: Option<DType>) {
        let Some(wanted) = wanted else { return };
        // Layers are alike.
        let part = match name.split('.').collect::<Vec<_>>()[..] {
            ["blk", _, part, ..] | [part, ..] => part,
            [] => name,
        };
        let parts = self.misfits.entry((to, wanted, cols)).or_default();
        if !parts.iter().any(|known| known == part) {
            parts.push(part.to_owned());
        }
    }

    fn note(&mut self, notice: String) {
        if !self.notices.contains(&notice) {
            self.notices.push(notice);
        }
    }
}

/// Where the bytes of a file go.
struct Sink<'a, 'p> {
    writer: Writer,
    out: &'a Path,
    done: u64,
    total: u64,
    progress: &'a mut Progress<'p>,
}

impl Sink<'_, '_> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.writer.write(bytes)?;
        self.done += bytes.len() as u64;
        match (self.progress)(self.done, self.total) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(Error::Stopped { path: self.out.to_owned() }),
        }
    }
}

/// Copies a tensor of a GGUF file as it is.
fn copy(source: &Source, name: &str, sink: &mut Sink) -> Result<(), Error> {
    let Some(gguf) = source.gguf() else { return Err(source.missing(name)) };
    let info = gguf.tensor(name)?;
    gguf.data(info)?.chunks(PIECE).try_for_each(|piece| sink.write(piece))?;
    gguf.release(info);
    Ok(())
}

fn convert(
    source: &Source,
    name: &str,
    to: DType,
    pairs: Option<[usize; 2]>,
    pool: &Pool,
    sink: &mut Sink,
) -> Result<(), Error> {
    let shape = source.shape(name).ok_or_else(|| source.missing(name))?;
    let tensor = source.tensor(name)?;
    // Each number of a bias is a row, which goes where the weights' row goes.
    let (n, cols) = match (&shape[..], pairs) {
        ([n], Some(_)) => (*n, 1),
        ([outer @ .., cols], _) => (outer.iter().product(), *cols),
        ([], _) => (1, 1),
    };
    let rows = Rows { data: tensor.data, n, cols, from: tensor.dtype, to, pairs };
    rows.convert(pool, &mut |bytes| sink.write(bytes), |what| source.error(name, what))?;
    if let Some(place) = tensor.place {
        place.map.release(place.range);
    }
    Ok(())
}

/// GGUF's tensors, each with those that become it, in the order of layers. Experts become one.
fn merged(names: Vec<String>) -> Vec<(String, Vec<String>)> {
    let mut all: IndexMap<String, Vec<(usize, String)>> = IndexMap::new();
    for name in names.into_iter().filter(|name| is_part(name)) {
        let (merged, expert) = match name.split('.').collect::<Vec<_>>()[..] {
            ["blk", layer, part, expert, end] => match expert.parse() {
                Ok(expert) => (format!("blk.{layer}.{part}_exps.{end}"), expert),
                Err(_) => (name.clone(), 0),
            },
            _ => (name.clone(), 0),
        };
        all.entry(merged).or_default().push((expert, name));
    }
    let place = |name: &str| match name.split('.').collect::<Vec<_>>()[..] {
        ["token_embd", ..] => 0,
        ["blk", layer, ..] => layer.parse::<usize>().map_or(usize::MAX, |layer| layer.saturating_add(1)),
        _ => usize::MAX,
    };
    all.sort_by(|a, _, b, _| place(a).cmp(&place(b)));
    let sorted = |mut parts: Vec<(usize, String)>| {
        parts.sort();
        parts.into_iter().map(|(_, name)| name).collect()
    };
    all.into_iter().map(|(name, parts)| (name, sorted(parts))).collect()
}

/// How large a model is, as `general.size_label` has it: `135M`, `8x7B`.
fn size_label(header: &Header) -> String {
    let (mut shared, mut expert, mut experts) = (0, 0, 0);
    for (name, ..) in header.tensors() {
        let shape = header.shape(name).unwrap_or_default();
        let elements: u64 = shape.iter().product();
        match shape {
            [n, _, _] if name.contains("_exps.") => (expert, experts) = (expert + elements / n, *n),
            _ => shared += elements,
        }
    }
    let size = (shared + expert) as f64;
    let units = [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")];
    let (unit, suffix) = units.into_iter().find(|(unit, _)| size > *unit).unwrap_or((1e3, "K"));
    let digits = usize::from((size / unit).round() < 10.0);
    let size = format!("{:.digits$}{suffix}", size / unit);
    if experts > 0 { format!("{experts}x{size}") } else { size }
}
