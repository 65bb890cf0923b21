//! What a model's files hold beside weights: tokenizer, chat template, sampling defaults.

use crate::error::Error;
use crate::sampler::{MetaValue, PartialSampling};
use puna_model::gguf::{Gguf, Strings, Value};
use puna_text::{Tokenizer, VocabSpec};
use std::path::{Path, PathBuf};

/// A model's files, read and checked; weights are bound when the model is loaded.
pub struct ModelFiles {
    gguf: Gguf,
    tokenizer: Option<Tokenizer>,
    template: Option<String>,
    sampling: PartialSampling,
    notices: Vec<String>,
}

impl ModelFiles {
    /// Opens a GGUF file (any shard of a split one).
    ///
    /// # Errors
    /// What is wrong with the container, the tokenizer or the sampling defaults. Files without tensors open, and so do
    /// files of architectures that cannot be run; an absent tokenizer is no error, a broken one is.
    pub fn open(path: impl AsRef<Path>) -> Result<ModelFiles, Error> {
        let gguf = Gguf::open(path)?;
        let tokenizer = tokenizer(&gguf)?;
        let template = template(&gguf)?;
        let lookup = |key: &str| gguf.meta().value(key).map(meta_value);
        let (sampling, notices) = PartialSampling::from_gguf(lookup)?;
        Ok(ModelFiles { gguf, tokenizer, template, sampling, notices })
    }

    /// The container.
    pub fn gguf(&self) -> &Gguf {
        &self.gguf
    }

    /// The file.
    pub fn path(&self) -> PathBuf {
        self.gguf.path().to_owned()
    }

    /// The tokenizer, where the file has one.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// [`Error::NoTokenizer`].
    pub fn require_tokenizer(&self) -> Result<&Tokenizer, Error> {
        self.tokenizer.as_ref().ok_or_else(|| Error::NoTokenizer { path: self.path() })
    }

    /// The source of the chat template, where the file has one.
    pub fn template(&self) -> Option<&str> {
        self.template.as_deref()
    }

    /// The sampling parameters that the file recommends.
    pub fn sampling(&self) -> &PartialSampling {
        &self.sampling
    }

    /// What the file asks for and this engine does not do, a sentence each.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    pub(crate) fn into_parts(self) -> (Gguf, Option<Tokenizer>, Option<String>, PartialSampling) {
        (self.gguf, self.tokenizer, self.template, self.sampling)
    }
}

fn meta_value(value: Value<'_>) -> MetaValue<'_> {
    match value {
        Value::F32(x) => MetaValue::Number(f64::from(x)),
        Value::F64(x) => MetaValue::Number(x),
        Value::Bool(x) => MetaValue::Bool(x),
        Value::Str(s) => std::str::from_utf8(s).map_or(MetaValue::Other("string"), MetaValue::Text),
        other => other.integer().map_or(MetaValue::Other(other.ty().name()), |n| MetaValue::Number(n as f64)),
    }
}

/// The vocabulary of a GGUF file; `None` where it has none or says so.
fn tokenizer(gguf: &Gguf) -> Result<Option<Tokenizer>, Error> {
    let meta = gguf.meta();
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let Some(model) = meta.get::<&str>(&key("model"))? else {
        return match meta.value(&key("tokens")) {
            Some(_) => Err(meta.error(&key("model"), "missing, although there are tokens").into()),
            None => Ok(None),
        };
    };
    if model == "none" || model == "no_vocab" {
        return Ok(None);
    }
    let id = |name: &str| meta.get::<u32>(&key(&format!("{name}_token_id")));
    let flag = |name: &str| meta.get::<bool>(&key(name));
    let extra_eog = ["fim_pad", "fim_rep", "fim_sep"].map(|name| (key(&format!("{name}_token_id")), name));
    let mut eog = Vec::new();
    for (full, name) in &extra_eog {
        if let Some(id) = id(name)? {
            eog.push((full.as_str(), id));
        }
    }
    let spec = VocabSpec {
        model,
        pre: meta.get(&key("pre"))?,
        name: meta.get("general.name").unwrap_or(None),
        tokens: meta.require::<Strings>(&key("tokens"))?.collect(),
        token_type: meta.get(&key("token_type"))?,
        scores: meta.get(&key("scores"))?,
        merges: meta.get::<Strings>(&key("merges"))?.map(Iterator::collect).unwrap_or_default(),
        bos: id("bos")?,
        eos: id("eos")?,
        eot: id("eot")?,
        eom: id("eom")?,
        unk: id("unknown")?,
        sep: id("seperator")?,
        pad: id("padding")?,
        eog,
        other_ids: Vec::new(),
        add_bos: flag("add_bos_token")?,
        add_eos: flag("add_eos_token")?,
        add_space_prefix: flag("add_space_prefix")?,
        remove_extra_whitespaces: flag("remove_extra_whitespaces")?,
    };
    let tokenizer = Tokenizer::from_vocab(&spec).map_err(|e| Error::text(gguf.path(), e))?;
    match gguf.find("token_embd.weight") {
        Some(embedding) if embedding.rows() < tokenizer.vocab_size() => {
            let (tokens, rows) = (tokenizer.vocab_size(), embedding.rows());
            Err(Error::Vocabulary { path: gguf.path().to_owned(), tokens, rows })
        }
        _ => Ok(Some(tokenizer)),
    }
}

fn template(gguf: &Gguf) -> Result<Option<String>, Error> {
    Ok(gguf.meta().get::<String>("tokenizer.chat_template")?)
}
