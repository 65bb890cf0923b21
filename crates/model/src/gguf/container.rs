//! One GGUF file: header, metadata, tensor table. Layout and names follow ggml's docs/gguf.md.

use std::path::Path;

use super::{
    cursor::Cursor,
    meta::Metadata,
    tensor::{MIN_ENTRY, TensorInfo, TensorTable, read_table},
};
use crate::{Error, error::escape, map::Map};

/// Bytes of a metadata entry, at least: key length, a key of one byte, value type, a value of one byte.
const MIN_KEY_VALUE: u64 = 8 + 1 + 4 + 1;

pub(super) const ALIGNMENT: &str = "general.alignment";
pub(super) const DEFAULT_ALIGNMENT: u64 = 32;

/// One file, read up to its weights.
#[derive(Debug)]
pub(super) struct Container {
    pub map: Map,
    pub version: u32,
    pub meta: Metadata,
    /// In the order of the table, offsets from the beginning of the file.
    pub tensors: TensorTable,
}

impl Container {
    pub fn open(path: &Path, shard: usize) -> Result<Container, Error> {
        Container::parse(path, Map::open(path)?, shard)
    }

    /// Reads the file in `map`; `path` is for messages, `shard` for the tensors.
    pub fn parse(path: &Path, map: Map, shard: usize) -> Result<Container, Error> {
        let mut cur = Cursor::new(map.bytes());
        let fault = |cur: &Cursor<'_>, what| Error::Gguf { path: path.to_owned(), at: cur.pos() as u64, what };

        check_magic(path, &mut cur)?;
        let version = read_version(&mut cur).map_err(|what| fault(&cur, what))?;
        let n_tensors = cur.count("tensor count", MIN_ENTRY).map_err(|what| fault(&cur, what))?;
        let n_keys = cur.count("metadata key count", MIN_KEY_VALUE).map_err(|what| fault(&cur, what))?;
        let meta = Metadata::read(path, map.bytes(), &mut cur, n_keys).map_err(|what| fault(&cur, what))?;
        let alignment = alignment(&meta)?;
        let mut tensors = read_table(&mut cur, n_tensors, shard).map_err(|what| fault(&cur, what))?;
        place(path, &mut tensors, cur.pos() as u64, alignment)?;
        Ok(Container { version, meta, tensors, map })
    }

    /// The error when the file ends before its tensors do.
    pub fn truncated(&self) -> Option<Error> {
        let cut: Vec<_> = self.tensors.values().filter(|t| t.end() > self.map.len() as u64).collect();
        let whole = cut.iter().map(|t| t.end()).max()?;
        Some(truncated(self.meta.path(), &self.map, &cut, whole))
    }
}

/// The error for the tensors `cut` off by the end of a file, which should have `whole` bytes for them.
pub(super) fn truncated(path: &Path, map: &Map, cut: &[&TensorInfo], whole: u64) -> Error {
    let names = match cut {
        [] => "a tensor passes".to_owned(),
        [one] => format!("tensor \"{}\" passes", escape(&*one.name)),
        [first, more @ ..] => format!("tensor \"{}\" and {} more pass", escape(&*first.name), more.len()),
    };
    let what = format!("{names} the end of file: expected {whole} bytes or more, found {}", map.len());
    Error::Truncated { path: path.to_owned(), what }
}

/// Files that people mistake for models, by their first bytes.
const LOOKALIKES: [(&[u8], &str); 8] = [
    (b"version https://git-lfs", "it is a Git LFS pointer: fetch the file it stands for with `git lfs pull`"),
    (b"<", "it is a web page, perhaps the error message of a download"),
    (b"{", "it is a JSON file, perhaps the error message of a download"),
    (b"GGML", "magic \"GGML\" is an older format: convert the original model again"),
    (b"lmgg", "magic \"lmgg\" is an older format: convert the original model again"),
    (b"fmgg", "magic \"fmgg\" is an older format: convert the original model again"),
    (b"tjgg", "magic \"tjgg\" is an older format: convert the original model again"),
    (b"PK\x03\x04", "it is a zip archive, perhaps a PyTorch checkpoint"),
];

/// What a file that is no model is instead, where its first bytes tell.
pub(crate) fn lookalike(head: &[u8]) -> Option<&'static str> {
    let found = LOOKALIKES.iter().find(|(start, _)| head.trim_ascii_start().starts_with(start));
    found.map(|(_, what)| *what)
}

fn check_magic(path: &Path, cur: &mut Cursor<'_>) -> Result<(), Error> {
    let head = cur.rest();
    let not_gguf = |what: String| Err(Error::NotGguf { path: path.to_owned(), what });
    if head.is_empty() {
        return not_gguf("the file is empty".into());
    }
    if let Ok(b"GGUF") = cur.take(4, "magic") {
        return Ok(());
    }
    if let Some(what) = lookalike(head) {
        return not_gguf(what.into());
    }
    if head.get(8) == Some(&b'{') {
        return not_gguf("it looks like safetensors: open the folder that has its config.json".into());
    }
    not_gguf(format!("magic \"{}\", expected \"GGUF\"", head[..head.len().min(4)].escape_ascii()))
}

fn read_version(cur: &mut Cursor<'_>) -> Result<u32, String> {
    let mut ahead = cur.clone();
    let version = ahead.u32("version")?;
    match version {
        2 | 3 => *cur = ahead,
        1 => return Err("GGUF version 1 is not supported, expected 2 or 3: convert the original model again".into()),
        v if v != 0 && v & 0xffff == 0 => {
            let v = v.swap_bytes();
            return Err(format!("big-endian file (version {v} in the other byte order), expected little-endian"));
        }
        v => return Err(format!("GGUF version {v} is not supported, expected 2 or 3")),
    }
    Ok(version)
}

pub(super) fn alignment(meta: &Metadata) -> Result<u64, Error> {
    let alignment = meta.get::<u64>(ALIGNMENT)?.unwrap_or(DEFAULT_ALIGNMENT);
    if !alignment.is_power_of_two() || alignment < 8 {
        return Err(meta.error(ALIGNMENT, format!("expected a power of two from 8 on, found {alignment}")));
    }
    Ok(alignment)
}

/// Makes offsets count from the beginning of the file, whose header ends at `header`, and checks that the tensors
/// keep off each other.
fn place(path: &Path, tensors: &mut TensorTable, header: u64, alignment: u64) -> Result<(), Error> {
    for t in tensors.values_mut() {
        if t.offset % alignment != 0 {
            let what = format!("offset {} is not a multiple of the alignment {alignment}", t.offset);
            return Err(Error::tensor(path, &t.name, what));
        }
        let place = header.checked_next_multiple_of(alignment).and_then(|data| data.checked_add(t.offset));
        match place.filter(|place| place.checked_add(t.bytes).is_some()) {
            Some(place) => t.offset = place,
            None => return Err(Error::tensor(path, &t.name, format!("the size overflows: offset {}", t.offset))),
        }
    }
    let mut by_offset: Vec<&TensorInfo> = tensors.values().collect();
    by_offset.sort_by_key(|t| t.offset);
    for pair in by_offset.windows(2) {
        if pair[0].end() > pair[1].offset {
            let (name, end, start) = (escape(&*pair[0].name), pair[0].end(), pair[1].offset);
            let what = format!("overlap: begins at byte {start}, tensor \"{name}\" before it ends at {end}");
            return Err(Error::tensor(path, &pair[1].name, what));
        }
    }
    Ok(())
}
