//! How a model's files say that texts become embeddings: `{arch}.pooling_type` of a GGUF file; `modules.json` and the
//! pooling's `config.json` of a folder, as sentence-transformers writes them.

use crate::error::Error;
use puna_model::Source;
use puna_model::error::escape;
use puna_model::gguf::Gguf;
use puna_model::hf::Folder;
use serde_json::Value;
use std::fmt::{self, Display};
use std::path::{Component, Path};
use std::str::FromStr;

/// How the hidden states of a text become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// That of the first token. In a causal model it knows nothing of the others.
    Cls,
    /// That of the last token.
    Last,
}

impl Pooling {
    /// All of them.
    pub const ALL: [Pooling; 3] = [Pooling::Mean, Pooling::Cls, Pooling::Last];

    /// `mean`, `cls` or `last`.
    pub fn name(self) -> &'static str {
        match self {
            Pooling::Mean => "mean",
            Pooling::Cls => "cls",
            Pooling::Last => "last",
        }
    }
}

impl Pooling {
    /// `pooling_type` of a GGUF file.
    pub(crate) fn number(self) -> u32 {
        match self {
            Pooling::Mean => 1,
            Pooling::Cls => 2,
            Pooling::Last => 3,
        }
    }
}

impl Display for Pooling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Pooling {
    type Err = String;

    fn from_str(name: &str) -> Result<Pooling, String> {
        let found = Pooling::ALL.into_iter().find(|pooling| pooling.name() == name);
        found.ok_or_else(|| "expected mean, cls or last".to_owned())
    }
}

/// What a model's files say of embeddings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Declared {
    /// How states are pooled; `None` where the files do not say.
    pub pooling: Option<Pooling>,
    /// Vectors are divided by their length.
    pub normalize: bool,
}

impl Declared {
    /// Reads it from a model's files.
    ///
    /// # Errors
    /// [`Error::Embedding`] names what puna does not have; [`Error::Model`] where a file cannot be read.
    pub(crate) fn read(source: &Source) -> Result<Declared, Error> {
        match source {
            Source::Gguf(gguf) => Ok(Declared { pooling: gguf_pooling(gguf)?, normalize: false }),
            Source::Folder(folder) => folder_modules(folder),
        }
    }
}

fn gguf_pooling(gguf: &Gguf) -> Result<Option<Pooling>, Error> {
    let Some(arch) = gguf.meta().get::<&str>("general.architecture")? else { return Ok(None) };
    let key = format!("{arch}.pooling_type");
    match gguf.meta().get::<u32>(&key)? {
        None | Some(0) => Ok(None),
        Some(1) => Ok(Some(Pooling::Mean)),
        Some(2) => Ok(Some(Pooling::Cls)),
        Some(3) => Ok(Some(Pooling::Last)),
        Some(other) => {
            let rank = if other == 4 { " (rank: a score, and no embedding)" } else { "" };
            let what = format!("expected 0 (none), 1 (mean), 2 (cls) or 3 (last), found {other}{rank}");
            Err(gguf.meta().error(&key, what).into())
        }
    }
}

/// Where the pooling's configuration is, unless modules.json says otherwise.
const POOLING: &str = "1_Pooling";

fn folder_modules(folder: &Folder) -> Result<Declared, Error> {
    let fault = |file: &str, what: String| Error::Embedding { path: folder.path().join(file), what };
    let config = json(folder, "config.json")?.unwrap_or_default();
    if let Some(class) = config["auto_map"]["AutoModel"].as_str() {
        let what = format!("its embeddings come from code of its own (\"{}\"), which is not run", escape(class));
        return Err(fault("config.json", what));
    }
    let Some(modules) = json(folder, "modules.json")? else {
        return Ok(Declared { pooling: folder_pooling(folder, POOLING)?, normalize: false });
    };
    let mut declared = Declared::default();
    for module in modules.as_array().into_iter().flatten() {
        let kind = module["type"].as_str().unwrap_or_default();
        match kind.rsplit('.').next() {
            Some("Transformer") => {}
            Some("Pooling") => {
                let path = module["path"].as_str().unwrap_or(POOLING);
                declared.pooling = folder_pooling(folder, path)?;
            }
            Some("Normalize") => declared.normalize = true,
            _ => {
                let supported = "Transformer, Pooling, Normalize";
                let what = format!("module \"{}\" is not supported; supported are {supported}", escape(kind));
                return Err(fault("modules.json", what));
            }
        }
    }
    Ok(declared)
}

/// What the configuration of a pooling module says.
fn folder_pooling(folder: &Folder, dir: &str) -> Result<Option<Pooling>, Error> {
    if !Path::new(dir).components().all(|part| matches!(part, Component::Normal(_))) {
        let what = format!("module path \"{}\" leads out of the folder", escape(dir));
        return Err(Error::Embedding { path: folder.path().join("modules.json"), what });
    }
    let file = format!("{dir}/config.json");
    let Some(config) = json(folder, &file)? else { return Ok(None) };
    // One name, or a switch for each.
    let is_on = |(key, value): (&String, &Value)| {
        let mode = key.strip_prefix("pooling_mode_").filter(|_| *value == true)?;
        Some(mode.strip_suffix("_tokens").or(mode.strip_suffix("_token")).unwrap_or(mode).to_owned())
    };
    let modes: Vec<String> = match config["pooling_mode"].as_str() {
        Some(mode) => vec![mode.to_owned()],
        None => config.as_object().into_iter().flatten().filter_map(is_on).collect(),
    };
    match modes.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => Ok(None),
        ["mean"] => Ok(Some(Pooling::Mean)),
        ["cls"] => Ok(Some(Pooling::Cls)),
        ["lasttoken"] => Ok(Some(Pooling::Last)),
        _ => {
            let found = modes.join(" + ");
            let what = format!("pooling \"{}\" is not supported; supported are mean, cls, lasttoken", escape(&found));
            Err(Error::Embedding { path: folder.path().join(file), what })
        }
    }
}

/// Largest file that is read: real ones have some kilobytes.
const MAX_JSON: usize = 1 << 20;

/// A JSON file of the folder; `None` where there is none.
fn json(folder: &Folder, file: &str) -> Result<Option<Value>, Error> {
    let Some(bytes) = folder.file(file)? else { return Ok(None) };
    let fault = |what: String| Error::Embedding { path: folder.path().join(file), what };
    if bytes.len() > MAX_JSON {
        return Err(fault(format!("the file has {} bytes, at most {MAX_JSON} are read", bytes.len())));
    }
    serde_json::from_slice(&bytes).map(Some).map_err(|e| fault(format!("expected JSON: {}", escape(&e.to_string()))))
}
