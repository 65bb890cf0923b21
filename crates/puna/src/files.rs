//! What a model's files hold beside weights: tokenizer, chat template, sampling defaults.

use crate::error::Error;
use crate::pooling::Declared;
use crate::sampler::{MetaValue, PartialSampling};
use bytes::Bytes;
use puna_model::gguf::{Gguf, Strings, Value};
use puna_model::hf::Folder;
use puna_model::{Checkpoint, Source};
use puna_text::{ChatTemplate, HfFiles, TextError, Tokenizer, VocabSpec};
use std::path::{Path, PathBuf};

/// A model's files, read and checked; weights are bound when the model is loaded.
pub struct ModelFiles {
    source: Source,
    tokenizer: Option<Tokenizer>,
    template: Option<String>,
    sampling: PartialSampling,
    notices: Vec<String>,
    embedding: Result<Declared, Error>,
}

impl ModelFiles {
    /// Opens a GGUF file (any shard of a split one) or a Hugging Face folder.
    ///
    /// # Errors
    /// What is wrong with the container, the tokenizer or the sampling defaults. Files without tensors open, and so do
    /// files of architectures that cannot be run; an absent tokenizer is no error, a broken one is.
    pub fn open(path: impl AsRef<Path>) -> Result<ModelFiles, Error> {
        let source = Source::open(path)?;
        let embedding = Declared::read(&source);
        match &source {
            Source::Gguf(gguf) => {
                let tokenizer = gguf_tokenizer(gguf)?;
                let template = gguf.meta().get::<String>("tokenizer.chat_template")?;
                let lookup = |key: &str| gguf.meta().value(key).map(meta_value);
                let (sampling, notices) = PartialSampling::from_gguf(lookup)?;
                Ok(ModelFiles { tokenizer, template, sampling, notices, embedding, source })
            }
            Source::Folder(folder) => {
                let tokenizer = folder_tokenizer(folder)?;
                let template = folder_template(folder)?;
                let config = serde_json::Value::Object(folder.generation_config()?);
                let sampling = PartialSampling::from_generation_config(&config)?;
                Ok(ModelFiles { tokenizer, template, sampling, notices: Vec::new(), embedding, source })
            }
        }
    }

    /// The weights and their configuration.
    pub fn checkpoint(&self) -> &dyn Checkpoint {
        self.source.checkpoint()
    }

    /// Whether there is an output projection, its own or the embedding. A model without one has embeddings only.
    pub fn has_head(&self) -> bool {
        self.checkpoint().missing_head().is_none()
    }

    /// The file or folder.
    pub fn path(&self) -> PathBuf {
        self.source.path().to_owned()
    }

    /// The tokenizer, where there is one.
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

    /// The source of the chat template, where there is one.
    pub fn template(&self) -> Option<&str> {
        self.template.as_deref()
    }

    /// The sampling parameters that the files recommend.
    pub fn sampling(&self) -> &PartialSampling {
        &self.sampling
    }

    /// What the files ask for and this engine does not do, a sentence each.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// How the files say that texts become embeddings.
    ///
    /// # Errors
    /// What they ask for and puna does not have: such a model can be run, but not embed.
    pub fn embedding(&self) -> Result<Declared, Error> {
        self.embedding.clone()
    }

    pub(crate) fn source(&self) -> &Source {
        &self.source
    }

    /// Calls `read` with the files of a folder's tokenizer; there are none in a GGUF file.
    pub(crate) fn with_tokenizer_files<T>(&self, read: impl FnOnce(&HfFiles) -> T) -> Result<T, Error> {
        let read = |files: Option<&TokenizerFiles>| read(&files.map(TokenizerFiles::borrowed).unwrap_or_default());
        match self.source.folder() {
            Some(folder) => Ok(read(Some(&TokenizerFiles::read(folder)?))),
            None => Ok(read(None)),
        }
    }

    pub(crate) fn into_parts(self) -> (Source, Option<Tokenizer>, Option<String>, PartialSampling) {
        (self.source, self.tokenizer, self.template, self.sampling)
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
fn gguf_tokenizer(gguf: &Gguf) -> Result<Option<Tokenizer>, Error> {
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
    let rows = gguf.find("token_embd.weight").map(|embedding| embedding.rows());
    check_size(gguf.path(), &tokenizer, rows)?;
    Ok(Some(tokenizer))
}

/// A vocabulary may be smaller than the embedding, whose last rows then stand for nothing, but not larger.
fn check_size(path: &Path, tokenizer: &Tokenizer, rows: Option<usize>) -> Result<(), Error> {
    let tokens = tokenizer.vocab_size();
    match rows {
        Some(rows) if rows < tokens => Err(Error::Vocabulary { path: path.to_owned(), tokens, rows }),
        _ => Ok(()),
    }
}

/// The files of a folder's tokenizer.
struct TokenizerFiles {
    tokenizer_json: Option<Bytes>,
    tokenizer_model: Option<Bytes>,
    tokenizer_config: Option<Bytes>,
    special_tokens_map: Option<Bytes>,
    added_tokens: Option<Bytes>,
    generation_config: Option<Bytes>,
    config: Option<Bytes>,
}

impl TokenizerFiles {
    fn read(folder: &Folder) -> Result<TokenizerFiles, Error> {
        Ok(TokenizerFiles {
            tokenizer_json: folder.file("tokenizer.json")?,
            tokenizer_model: folder.file("tokenizer.model")?,
            tokenizer_config: folder.file("tokenizer_config.json")?,
            special_tokens_map: folder.file("special_tokens_map.json")?,
            added_tokens: folder.file("added_tokens.json")?,
            generation_config: folder.file("generation_config.json")?,
            config: folder.file("config.json")?,
        })
    }

    fn borrowed(&self) -> HfFiles<'_> {
        HfFiles {
            tokenizer_json: self.tokenizer_json.as_deref(),
            tokenizer_model: self.tokenizer_model.as_deref(),
            tokenizer_config: self.tokenizer_config.as_deref(),
            special_tokens_map: self.special_tokens_map.as_deref(),
            added_tokens: self.added_tokens.as_deref(),
            generation_config: self.generation_config.as_deref(),
            config: self.config.as_deref(),
        }
    }
}

/// The tokenizer of a folder; `None` where it has no file of one.
fn folder_tokenizer(folder: &Folder) -> Result<Option<Tokenizer>, Error> {
    let files = TokenizerFiles::read(folder)?;
    if files.tokenizer_json.is_none() && files.tokenizer_model.is_none() {
        return Ok(None);
    }
    let tokenizer = Tokenizer::from_hf(&files.borrowed()).map_err(|e| Error::text(folder.path(), e))?;
    let rows = folder.shape("token_embd.weight").and_then(|shape| shape.first().copied());
    check_size(folder.path(), &tokenizer, rows)?;
    Ok(Some(tokenizer))
}

/// chat_template.jinja, or what tokenizer_config.json says.
fn folder_template(folder: &Folder) -> Result<Option<String>, Error> {
    let error = |e: TextError| Error::text(folder.path(), e);
    let fault = |file: &'static str, problem: String| error(TextError::File { file, problem });
    if let Some(source) = folder.file("chat_template.jinja")? {
        let source = String::from_utf8(source.to_vec()).map_err(|e| fault("chat_template.jinja", e.to_string()))?;
        return Ok(Some(source));
    }
    let name = "tokenizer_config.json";
    let Some(config) = folder.file(name)? else { return Ok(None) };
    let config: serde_json::Value = serde_json::from_slice(&config).map_err(|e| fault(name, e.to_string()))?;
    Ok(ChatTemplate::source_from_config(&config["chat_template"]).map_err(error)?.map(str::to_owned))
}
