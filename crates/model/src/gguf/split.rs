//! Models split over several files, as ggml's gguf-split writes them: `NAME-00001-of-00003.gguf` and so on. File
//! names count from 1, the key `split.no` from 0. The first file has the metadata, every file has its own tensors.

use std::path::{Path, PathBuf};

use super::{
    Gguf,
    container::{ALIGNMENT, Container, DEFAULT_ALIGNMENT, alignment},
    meta::Metadata,
};
use crate::{
    Error,
    error::{escape, shown},
};

const NO: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

/// The name of a shard, taken apart.
#[derive(Debug, PartialEq, Eq)]
struct ShardName<'a> {
    folder: &'a Path,
    stem: &'a str,
    /// Counted from 1; digits as written.
    number: &'a str,
    count: &'a str,
}

impl<'a> ShardName<'a> {
    /// `None` when the name is not `STEM-N-of-M.gguf`.
    fn parse(path: &'a Path) -> Option<ShardName<'a>> {
        let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
        let (rest, count) = path.file_name()?.to_str()?.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let folder = path.parent().unwrap_or(Path::new(""));
        (digits(count) && digits(number)).then_some(ShardName { folder, stem, number, count })
    }

    /// The path of shard `n`, counted from 1. Numbers are as wide as in this name; where there is no such file they
    /// may be as wide as the count or bare, which tells `1-of-12` and `01-of-12` right from `12-of-12`.
    fn sibling(&self, n: u64) -> PathBuf {
        let path = |width: usize| self.folder.join(format!("{}-{n:0width$}-of-{}.gguf", self.stem, self.count));
        let widths = [self.number.len(), self.count.len(), 1];
        widths.map(path).into_iter().find(|p| p.exists()).unwrap_or_else(|| path(self.number.len()))
    }
}

/// The model that `path` is, or is a shard of. What is wrong with the set becomes a problem of the model, so that the
/// files at hand can be looked at.
///
/// # Errors
/// The file itself, or the first file of its set, which has the metadata, cannot be read.
pub(super) fn open(path: &Path) -> Result<Gguf, Error> {
    let opened = Container::open(path, 0)?;
    let Some(count) = shard_count(&opened.meta)? else { return Ok(Gguf::new(opened)) };
    let Some(name) = ShardName::parse(path) else {
        let what = format!("{COUNT} is {count}, but the file is not named like NAME-00001-of-{count:05}.gguf");
        return Ok(Gguf::new(opened).with_problem(fault(path, what)));
    };
    let first = match name.number.parse() {
        Ok(1) => opened,
        _ => open_shard(path, &name, 1, count)?,
    };
    let mut gguf = Gguf::new(first);
    match join(&mut gguf, path, &name, count) {
        Ok(()) => Ok(gguf),
        Err(problem) => Ok(gguf.with_problem(problem)),
    }
}

/// The number of files, when there is more than one; 0 and 1 are left behind by tools that merge.
pub(super) fn shard_count(meta: &Metadata) -> Result<Option<u64>, Error> {
    Ok(meta.get::<u64>(COUNT)?.filter(|&n| n > 1))
}

pub(super) fn fault(path: &Path, what: String) -> Error {
    Error::Split { path: path.to_owned(), what }
}

/// Adds shards 2 to `count` to the first one, up to one that does not belong there.
fn join(gguf: &mut Gguf, path: &Path, name: &ShardName<'_>, count: u64) -> Result<(), Error> {
    if name.count.parse() != Ok(count) {
        return Err(fault(path, format!("{COUNT} is {count}, the file name says {}", name.count)));
    }
    belongs(&gguf.meta, &gguf.meta, 1, count)?;
    for n in 2..=count {
        let shard = open_shard(path, name, n, count)?;
        belongs(&gguf.meta, &shard.meta, n, count)?;
        gguf.add(shard)?;
    }
    let total = gguf.tensors.len() as u64;
    match gguf.meta.get::<u64>(TENSORS)? {
        Some(n) if n != total => Err(fault(path, format!("{TENSORS} is {n}, the shards have {total} tensors"))),
        _ => Ok(()),
    }
}

fn open_shard(path: &Path, name: &ShardName<'_>, n: u64, count: u64) -> Result<Container, Error> {
    let shard = name.sibling(n);
    let order = if n == 1 { "the first shard" } else { "a shard" };
    Container::open(&shard, n as usize - 1).map_err(|e| match e {
        Error::Io { kind: std::io::ErrorKind::NotFound, .. } => {
            fault(path, format!("{order} is missing: number {n} of {count}, expected at {}", shown(&shard)))
        }
        e => e,
    })
}

/// Checks that the file with metadata `shard` is shard `n` (counted from 1) of the set that begins with `first`.
fn belongs(first: &Metadata, shard: &Metadata, n: u64, count: u64) -> Result<(), Error> {
    let expect = |key: &str, expected: u64| match shard.require::<u64>(key)? {
        found if found == expected => Ok(()),
        found => Err(fault(shard.path(), format!("{key} is {found}, expected {expected} in shard {n} of {count}"))),
    };
    expect(COUNT, count)?;
    expect(NO, n - 1)?;
    if let (Some(total), Some(_)) = (first.get(TENSORS)?, shard.value(TENSORS)) {
        expect(TENSORS, total)?;
    }
    // gguf-split lays such a shard out by the default, gguf-py by the first shard's alignment.
    let alignment = alignment(first)?;
    if alignment != DEFAULT_ALIGNMENT && shard.value(ALIGNMENT).is_none() {
        let what = format!("{ALIGNMENT} is {alignment} in the first shard and missing here, expected in every shard");
        return Err(fault(shard.path(), what));
    }
    // A shard of another model: most have no metadata of their own, but what they have must agree.
    for (key, value) in shard.iter().filter(|(key, _)| !key.starts_with("split.") && *key != ALIGNMENT) {
        if first.value(key).is_some_and(|v| v != value) {
            let what = format!("key \"{}\" is not as in the first shard: is it of another model?", escape(key));
            return Err(fault(shard.path(), what));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_names_apart() {
        let parts = |p| ShardName::parse(Path::new(p)).map(|n| (n.stem, n.number, n.count));
        assert_eq!(parts("/m/a-b-of-c-00002-of-00010.gguf"), Some(("a-b-of-c", "00002", "00010")));
        assert_eq!(parts("x-1-of-3.gguf"), Some(("x", "1", "3")));
        assert_eq!(parts("x-+1-of-3.gguf"), None);
        assert_eq!(parts("x-1-of-.gguf"), None);
        assert_eq!(parts("x-1-of-3.bin"), None);
        assert_eq!(parts("x.gguf"), None);
    }

    #[test]
    fn siblings_keep_the_width_of_the_name() {
        let sibling = |p, n| ShardName::parse(Path::new(p)).map(|name| name.sibling(n));
        assert_eq!(sibling("/m/x-00003-of-00010.gguf", 10), Some("/m/x-00010-of-00010.gguf".into()));
        assert_eq!(sibling("/m/x-3-of-10.gguf", 10), Some("/m/x-10-of-10.gguf".into()));
    }
}
