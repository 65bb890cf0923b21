//! A model as one GGUF file, with its tokenizer, chat template and sampling defaults inside.

use crate::error::Error;
use crate::files::ModelFiles;
use crate::pooling::Declared;
use crate::sampler::PartialSampling;
use puna_kernels::Pool;
use puna_model::convert::{Plan, Progress, Target, Written};
use puna_model::hf::Folder;
use puna_model::{Checkpoint, Source};
use puna_text::{ExportOptions, Vocab};
use std::path::Path;

/// How a model is converted.
#[derive(Clone, Debug)]
pub struct ConvertOptions {
    /// The format of its weights.
    pub target: Target,
    /// `tokenizer.ggml.pre`, in place of what the tokenizer's own pre-tokenizer is called in GGUF.
    pub pre: Option<String>,
    /// `general.name` [default: what the folder is called].
    pub name: Option<String>,
}

impl Default for ConvertOptions {
    fn default() -> ConvertOptions {
        ConvertOptions { target: Target::Keep, pre: None, name: None }
    }
}

/// A conversion that can begin.
pub struct Conversion<'a> {
    plan: Plan<'a>,
    notices: Vec<String>,
}

impl<'a> Conversion<'a> {
    /// Checks that `files` can be written to `out`, and with what.
    ///
    /// # Errors
    /// Those of [`Plan::new`], and [`Error::Text`] for a tokenizer that a GGUF file cannot hold.
    pub fn new(files: &'a ModelFiles, out: &Path, options: &ConvertOptions) -> Result<Conversion<'a>, Error> {
        // Whoever declares a pooling means embeddings, which need no output.
        let pooling = files.embedding().unwrap_or_default().pooling;
        let plan = Plan::new(files.source(), out, options.target, pooling.is_none())?;
        let notices = plan.notices().to_vec();
        let mut conversion = Conversion { plan, notices };
        match files.source() {
            Source::Folder(folder) => conversion.folder(files, folder, options)?,
            Source::Gguf(_) => {
                for (key, value) in [("general.name", &options.name), ("tokenizer.ggml.pre", &options.pre)] {
                    if let Some(value) = value {
                        conversion.plan.set(key, value.clone());
                    }
                }
            }
        }
        Ok(conversion)
    }

    /// What the file will not have as one might expect it, a sentence each.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Writes the file; `replace`: in place of one that is there.
    ///
    /// # Errors
    /// Those of [`Plan::write`].
    pub fn write(self, replace: bool, threads: usize, progress: &mut Progress) -> Result<Written, Error> {
        Ok(self.plan.write(replace, &Pool::new(threads), progress)?)
    }

    fn folder(&mut self, files: &ModelFiles, folder: &Folder, options: &ConvertOptions) -> Result<(), Error> {
        let name = options.name.clone().or_else(|| name_of(folder.path()));
        if let Some(name) = &name {
            self.plan.set("general.name", name.clone());
        }
        self.sampling(files.sampling());
        let embedding = files.embedding().unwrap_or_else(|e| {
            self.notices.push(format!("how texts become embeddings is left out: {e}"));
            Declared::default()
        });
        if let Some(pooling) = embedding.pooling {
            let (arch, _) = folder.config()?;
            self.plan.set(format!("{}.pooling_type", arch.name), pooling.number());
        }
        if embedding.normalize {
            self.notices.push("that vectors are divided by their length is left out: GGUF has no key for it".into());
        }
        if files.tokenizer().is_none() {
            self.notices.push("the folder has no tokenizer, and so has the file: only token ids can be used".into());
            self.plan.set("tokenizer.ggml.model", "none");
            return Ok(());
        }
        let rows = folder.shape("token_embd.weight").and_then(|shape| shape.first().copied());
        let export = ExportOptions { pre: options.pre.as_deref(), name: name.as_deref(), rows };
        let vocab = files.with_tokenizer_files(|files| Vocab::from_hf(files, &export))?;
        let (vocab, notices) = vocab.map_err(|e| Error::text(folder.path(), e))?;
        self.notices.extend(notices.into_iter().map(|notice| format!("tokenizer: {notice}")));
        self.vocabulary(vocab);
        if let Some(template) = files.template() {
            self.plan.set("tokenizer.chat_template", template);
        }
        Ok(())
    }

    fn vocabulary(&mut self, vocab: Vocab) {
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let plan = &mut self.plan;
        plan.set(key("model"), vocab.model);
        plan.set(key("pre"), vocab.pre);
        plan.set(key("tokens"), vocab.tokens.iter().map(Vec::as_slice).collect::<Vec<_>>());
        plan.set(key("token_type"), vocab.token_type);
        if let Some(scores) = vocab.scores {
            plan.set(key("scores"), scores);
        }
        if !vocab.merges.is_empty() {
            plan.set(key("merges"), vocab.merges);
        }
        for (name, id) in [
            ("bos", vocab.bos),
            ("eos", vocab.eos),
            ("eot", vocab.eot),
            ("eom", vocab.eom),
            ("unknown", vocab.unk),
            ("padding", vocab.pad),
        ] {
            if let Some(id) = id {
                plan.set(key(&format!("{name}_token_id")), id);
            }
        }
        plan.set(key("add_bos_token"), vocab.add_bos);
        plan.set(key("add_eos_token"), vocab.add_eos);
        let flags = [
            ("add_space_prefix", vocab.add_space_prefix),
            ("remove_extra_whitespaces", vocab.remove_extra_whitespaces),
        ];
        for (name, flag) in flags {
            if let Some(flag) = flag {
                plan.set(key(name), flag);
            }
        }
    }

    fn sampling(&mut self, sampling: &PartialSampling) {
        let numbers = [
            ("temp", sampling.temperature),
            ("top_p", sampling.top_p),
            ("min_p", sampling.min_p),
            ("penalty_repeat", sampling.repeat_penalty),
        ];
        for (name, number) in numbers {
            if let Some(number) = number {
                self.plan.set(format!("general.sampling.{name}"), number);
            }
        }
        for (name, count) in [("top_k", sampling.top_k), ("penalty_last_n", sampling.repeat_last_n)] {
            if let Some(count) = count {
                self.plan.set(format!("general.sampling.{name}"), count);
            }
        }
        if let Some(p) = sampling.typical_p.filter(|&p| p != 1.0) {
            self.notices.push(format!("typical_p {p} is left out: GGUF has no key for it"));
        }
    }
}

/// What a folder is called, `.` too.
fn name_of(folder: &Path) -> Option<String> {
    let whole = std::fs::canonicalize(folder).ok()?;
    Some(whole.file_name()?.to_string_lossy().into_owned())
}
