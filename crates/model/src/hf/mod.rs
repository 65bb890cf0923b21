//! Folders as Hugging Face has them: config.json, weights in safetensors, and the tokenizer's files.
//!
//! The weights' names become GGUF's, and config.json becomes a [`Config`]; from there on a folder and a GGUF file are
//! the same. Rows of q and k pair halves in every folder.
//!
//! ```no_run
//! use puna_model::{LoadOptions, Model, hf::Folder};
//!
//! let folder = Folder::open("Qwen3-0.6B")?;
//! let tokenizer = folder.file("tokenizer.json")?;
//! let model = Model::load(&folder, &LoadOptions::default(), &mut |_, _| {})?;
//! # Ok::<(), puna_model::Error>(())
//! ```

mod config;
mod families;
mod json;
mod names;
mod rope;
pub mod safetensors;
mod shards;
mod weights;

use self::config::Parsed;
use self::names::{Entry, Names};
use self::safetensors::{Container, Info};
use self::shards::Shards;
use crate::arch::Arch;
use crate::checkpoint::{Checkpoint, Tensor};
use crate::config::Config;
use crate::error::{Error, escape};
use bytes::Bytes;
use std::path::{Path, PathBuf};

/// The configuration of a model.
const CONFIG: &str = "config.json";

/// How the model's authors mean it to be used.
const GENERATION: &str = "generation_config.json";

/// Files of which a model folder has at least one.
const FILES: [&str; 4] = [CONFIG, "tokenizer.json", "tokenizer.model", "tokenizer_config.json"];

/// A model in a folder.
pub struct Folder {
    path: PathBuf,
    shards: Shards,
    /// What config.json says, and where the tensors are.
    model: Result<Box<(Parsed, Names)>, Error>,
    problems: Vec<Error>,
}

impl Folder {
    /// Opens a folder.
    ///
    /// Faults that leave the files readable do not fail here, so that a folder can be inspected and its tokenizer be
    /// used: no weights, weights behind the end of a file, a shard or a tensor that is missing, a configuration that
    /// cannot be computed. They are in [`Folder::problems`], and loading fails for the first of them.
    ///
    /// # Errors
    /// [`Error::Io`] and [`Error::Folder`] when it is no such folder; [`Error::Safetensors`], [`Error::Tensor`],
    /// [`Error::Json`] or [`Error::Key`] when its weights or their index break the format.
    pub fn open(path: impl AsRef<Path>) -> Result<Folder, Error> {
        let path = path.as_ref().to_owned();
        let shards = Shards::open(&path)?;
        if shards.files.is_empty() && !FILES.iter().any(|file| path.join(file).exists()) {
            let gguf = shards::file_names(&path)?.into_iter().find(|name| name.ends_with(".gguf"));
            let hint = gguf.map(|name| format!("; did you mean its file \"{}\"?", escape(&name))).unwrap_or_default();
            let what = format!("no model: the folder has no weights in safetensors and none of {}", FILES.join(", "));
            return Err(Error::Folder { path, what: what + &hint });
        }
        let model = model(&path, &shards).map(Box::new);
        let mut folder = Folder { path, shards, model, problems: Vec::new() };
        let problems = folder.shards.problems.iter().cloned();
        folder.problems = problems.chain(folder.model.as_ref().err().cloned()).chain(folder.missing_part()).collect();
        Ok(folder)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files that hold its weights.
    pub fn files(&self) -> &[Container] {
        &self.shards.files
    }

    /// All tensors: name, number of the file, and what its header says.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, usize, &Info)> {
        self.shards.tensors.iter().map(|(name, located)| (name.as_str(), located.shard, &located.info))
    }

    /// What keeps the model from being loaded although its files can be read.
    pub fn problems(&self) -> &[Error] {
        &self.problems
    }

    /// The bytes of another file of the folder (`tokenizer.json`); `None` where there is no such file.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn file(&self, name: &str) -> Result<Option<Bytes>, Error> {
        Ok(json::open(&self.path.join(name))?.map(|map| map.bytes().clone()))
    }

    /// What generation_config.json has: tokens that end an answer, sampling parameters. Empty where there is none.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Json`].
    pub fn generation_config(&self) -> Result<serde_json::Map<String, serde_json::Value>, Error> {
        Ok(json::read(&self.path.join(GENERATION))?.unwrap_or_default())
    }

    /// The error for the first tensor that the configuration promises and that binding would not miss.
    fn missing_part(&self) -> Option<Error> {
        let (parsed, names) = &**self.model.as_ref().ok()?;
        let has = |name: &str| names.entries.contains_key(name);
        for (layer, &sparse) in parsed.sparse.iter().enumerate() {
            let router = format!("blk.{layer}.ffn_gate_inp.weight");
            if has(&router) && !sparse {
                let what = format!("{CONFIG} says that layer {layer} has no experts");
                return Some(self.error(&router, what));
            }
            let parts = parsed.biases(sparse).map(|part| format!("blk.{layer}.{part}"));
            if let Some(missing) = parts.chain(sparse.then_some(router)).find(|name| !has(name)) {
                return Some(self.missing(&missing));
            }
        }
        None
    }

    /// An entry of that name: its own name in the files, and the file it is in.
    fn find(&self, name: &str) -> Option<(&Entry, &str, &Container, &Info)> {
        let entry = self.model.as_ref().ok()?.1.entries.get(name)?;
        let (name, located) = self.shards.tensors.get_index(entry.tensor)?;
        Some((entry, name, self.shards.files.get(located.shard)?, &located.info))
    }
}

/// What the configuration says, and where the tensors are.
fn model(folder: &Path, shards: &Shards) -> Result<(Parsed, Names), Error> {
    let path = folder.join(CONFIG);
    let Some(object) = json::read(&path)? else {
        return Err(Error::Folder { path, what: "missing: a model folder needs it".into() });
    };
    let mut parsed = config::read(&path, &object, shards.tensors.len())?;
    let names = Names::new(shards, &parsed)?;
    if parsed.config.vocab_size == 0 {
        let embedding = names.entries.get("token_embd.weight").and_then(|e| shards.tensors.get_index(e.tensor));
        parsed.config.vocab_size = embedding.and_then(|(_, t)| t.info.shape.first().copied()).unwrap_or(0);
    }
    Ok((parsed, names))
}

impl Checkpoint for Folder {
    fn config(&self) -> Result<(&'static Arch, Config), Error> {
        match &self.model {
            Ok(model) => Ok((model.0.arch, model.0.config.clone())),
            // Without weights nothing fits; what was first is the cause.
            Err(e) => Err(self.problems.first().unwrap_or(e).clone()),
        }
    }

    fn is_gguf(&self) -> bool {
        false
    }

    fn check(&self) -> Result<(), Error> {
        self.problems.first().map_or(Ok(()), |problem| Err(problem.clone()))
    }

    fn missing_head(&self) -> Option<Error> {
        let names = &self.model.as_ref().ok()?.1;
        if names.tied || names.entries.contains_key("output.weight") {
            return None;
        }
        let mut error = self.missing("output.weight");
        if let Error::Tensor { what, .. } = &mut error {
            what.push_str("; without it the model makes embeddings only");
        }
        Some(error)
    }

    fn names(&self) -> Vec<String> {
        self.model.as_ref().map_or_else(|_| Vec::new(), |model| model.1.entries.keys().cloned().collect())
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        let (entry, _, _, info) = self.find(name)?;
        Some(entry.part.as_ref().map_or_else(|| info.shape.clone(), |part| vec![part.rows, part.cols]))
    }

    fn tensor(&self, name: &str) -> Result<Tensor, Error> {
        let (parsed, names) = &**self.model.as_ref().map_err(Clone::clone)?;
        let entry = names.entries.get(name).ok_or_else(|| self.missing(name))?;
        weights::read(&self.shards, entry, parsed.fp8_block)
    }

    fn error(&self, name: &str, what: String) -> Error {
        match self.find(name) {
            Some((_, name, file, _)) => Error::tensor(&file.path, name, what),
            None => Error::tensor(&self.path, name, what),
        }
    }

    fn missing(&self, name: &str) -> Error {
        let tried = self.model.as_ref().map_or_else(|_| Vec::new(), |model| model.1.tried(name));
        match &tried[..] {
            [] => Error::tensor(&self.path, name, "missing"),
            [only] => Error::tensor(&self.path, only, "missing: no such tensor in the files"),
            [first, others @ ..] => {
                let others: Vec<String> = others.iter().map(|name| format!("\"{}\"", escape(name))).collect();
                Error::tensor(&self.path, first, format!("missing, and so is {}", others.join(", ")))
            }
        }
    }
}
