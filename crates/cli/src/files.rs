//! Files that are written at the end of the work.

use crate::error::Error;
use puna_model::NewFile;
use std::fs;
use std::path::Path;

/// Whether something that is no file stands there, as a device or a pipe: it is written to as it is.
fn is_special(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir())
}

/// Whether a file can be where it is to be written at the end: told before the work is done.
pub fn check(path: &Path) -> Result<(), Error> {
    if is_special(path) { Ok(()) } else { Ok(NewFile::create(path, true).map(drop)?) }
}

/// Makes a file of what `write` puts where it is told to. It takes its place when it is whole: an old one stays as it was
/// until then.
pub fn write<E: std::fmt::Display>(path: &Path, write: impl FnOnce(&Path) -> Result<(), E>) -> Result<(), Error> {
    let fault = |e| Error::file(path, e);
    if is_special(path) {
        return write(path).map_err(fault);
    }
    let new = NewFile::create(path, true)?;
    write(new.part()).map_err(fault)?;
    Ok(new.finish()?)
}
