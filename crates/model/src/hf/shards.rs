//! Which safetensors files of a folder hold its model.

use super::json;
use super::safetensors::{Container, Info, MAX_TENSORS};
use crate::error::{Error, escape};
use indexmap::IndexMap;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use std::collections::HashMap;
use std::fmt;
use std::path::{Component, Path, PathBuf};

/// The index of a model in several files: `weight_map` says which file has which tensor.
const INDEX: &str = "model.safetensors.index.json";

/// Largest index that is read. The largest known models have some ten megabytes.
const MAX_INDEX: usize = 64 << 20;

/// The model in one file.
const SINGLE: &str = "model.safetensors";

/// Files that lie beside a model and are not it: Mistral's copy under names of its own, and adapters.
const OTHERS: [&str; 2] = ["consolidated.safetensors", "adapter_model.safetensors"];

/// Most problems that are kept: a hostile index has one a line.
const MAX_PROBLEMS: usize = 20;

/// A tensor and the file it is in.
#[derive(Clone, Debug)]
pub struct Located {
    /// The file, counted from 0.
    pub shard: usize,
    /// Its type, shape and place.
    pub info: Info,
}

/// The files and tensors of a model.
#[derive(Debug, Default)]
pub struct Shards {
    /// The files.
    pub files: Vec<Container>,
    /// All tensors by name.
    pub tensors: IndexMap<String, Located>,
    /// What keeps the model from being loaded although headers can be read.
    pub problems: Vec<Error>,
}

impl Shards {
    /// Opens the files of a folder: those that `model.safetensors.index.json` names; without it `model.safetensors`, or
    /// the only other `*.safetensors`. Symbolic links are followed, as the download cache of Hugging Face needs it.
    ///
    /// # Errors
    /// Files that cannot be read, break the format, or that the index cannot name. Files that are missing or truncated
    /// are [`Shards::problems`].
    pub fn open(folder: &Path) -> Result<Shards, Error> {
        let index = folder.join(INDEX);
        if let Some(Index { weight_map: WeightMap(map) }) = json::read_up_to(&index, MAX_INDEX)? {
            return Shards::indexed(folder, &index, map);
        }
        let mut shards = Shards::default();
        match single(folder) {
            Ok(path) => {
                shards.add(Container::open(&path)?);
                let all = shards.files[0].tensors.iter();
                let located = |(name, info): (&String, &Info)| (name.clone(), Located { shard: 0, info: info.clone() });
                shards.tensors = all.map(located).collect();
            }
            // A tokenizer is of use without weights.
            Err(problem @ Error::Folder { .. }) => shards.problem(problem),
            Err(e) => return Err(e),
        }
        Ok(shards)
    }

    /// Opens the files that an index names, and takes the tensors from where it says.
    fn indexed(folder: &Path, index: &Path, map: IndexMap<String, String>) -> Result<Shards, Error> {
        let fault = |name: &str, what: String| Error::key(index, &format!("weight_map.{name}"), what);
        let mut shards = Shards::default();
        // Of each file that the index names: its number, or nothing where it is missing.
        let mut opened: HashMap<String, Option<usize>> = HashMap::new();
        for (name, file) in map {
            if !is_file_name(&file) {
                let what = format!("expected a plain file name inside the folder, found \"{}\"", escape(&file));
                return Err(fault(&name, what));
            }
            let shard = match opened.get(&file) {
                Some(shard) => *shard,
                None => {
                    let shard = shards.open_shard(folder.join(&file))?;
                    opened.insert(file.clone(), shard);
                    shard
                }
            };
            let Some(shard) = shard else { continue };
            match shards.files[shard].tensors.get(&name) {
                Some(info) => {
                    shards.tensors.insert(name, Located { shard, info: info.clone() });
                }
                None => shards.problem(fault(&name, format!("\"{}\" has no such tensor", escape(&file)))),
            }
        }
        Ok(shards)
    }

    /// The number of a shard; `None` where there is no such file.
    fn open_shard(&mut self, path: PathBuf) -> Result<Option<usize>, Error> {
        match Container::open(&path) {
            Err(Error::Io { kind: std::io::ErrorKind::NotFound, .. }) => {
                let what = format!("missing shard: {INDEX} names it, and it is not in the folder");
                self.problem(Error::Folder { path, what });
                Ok(None)
            }
            file => {
                self.add(file?);
                Ok(Some(self.files.len() - 1))
            }
        }
    }

    fn add(&mut self, file: Container) {
        if let Some(problem) = file.truncated() {
            self.problem(problem);
        }
        self.files.push(file);
    }

    fn problem(&mut self, problem: Error) {
        if self.problems.len() < MAX_PROBLEMS {
            self.problems.push(problem);
        }
    }
}

/// The index, as far as it matters; its `total_size` is wrong in many.
#[derive(serde::Deserialize)]
struct Index {
    weight_map: WeightMap,
}

/// Tensors and the names of their files.
struct WeightMap(IndexMap<String, String>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<WeightMap, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("weight_map, an object of file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<WeightMap, A::Error> {
                json::entries(map, "weight_map: tensor", None, MAX_TENSORS).map(WeightMap)
            }
        }
        d.deserialize_map(Entries)
    }
}

/// What is in a folder, in alphabetical order; names that are no UTF-8 are left out.
pub fn file_names(folder: &Path) -> Result<Vec<String>, Error> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(|e| Error::io(folder, &e))? {
        let name = entry.map_err(|e| Error::io(folder, &e))?.file_name();
        names.extend(name.into_string());
    }
    names.sort();
    Ok(names)
}

/// Whether it is a plain file name, which leads out of no folder.
fn is_file_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    let is_plain = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
    is_plain && !name.contains(['/', '\\', '\0'])
}

/// The only file of a model without an index.
///
/// # Errors
/// [`Error::Folder`] where there is none, or more.
fn single(folder: &Path) -> Result<PathBuf, Error> {
    let path = folder.join(SINGLE);
    if path.exists() {
        return Ok(path);
    }
    let names = file_names(folder)?;
    let is_model = |name: &&String| name.ends_with(".safetensors") && !OTHERS.contains(&name.as_str());
    let found: Vec<&String> = names.iter().filter(is_model).collect();
    let what = match found[..] {
        [name] => return Ok(folder.join(name)),
        [first, ..] => format!(
            "{} safetensors files (\"{}\" ..) and no {INDEX} that says which tensor is in which",
            found.len(),
            escape(first)
        ),
        [] => match names.iter().find(|name| [".bin", ".pt", ".pth"].iter().any(|end| name.ends_with(end))) {
            Some(name) => format!(
                "no weights in safetensors: \"{}\" is PyTorch's own format, which can run code; convert it to \
                 safetensors",
                escape(name)
            ),
            None => format!("no weights: looked for {INDEX}, {SINGLE} and a single *.safetensors"),
        },
    };
    Err(Error::Folder { path: folder.to_owned(), what })
}
