//! Files that get their name when they are whole.

use crate::error::{Error, escape};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// A file that is made beside its place and takes it at the end, so that whatever interrupts the work leaves no part of
/// it there, and an old one as it was.
#[derive(Debug)]
pub struct NewFile {
    path: PathBuf,
    file: NamedTempFile,
    replace: bool,
}

impl NewFile {
    /// Begins the file. An existing one is left alone unless `replace`, and then until the new one is complete.
    ///
    /// # Errors
    /// [`Error::Write`] where there is a file already, or something that is no file, or no file can be made.
    pub fn create(path: &Path, replace: bool) -> Result<NewFile, Error> {
        // What the umask leaves of this, as of any new file: other users may read it.
        NewFile::begin(path, replace, 0o666)
    }

    /// Begins a file that takes the place of an existing one and that only its owner may read.
    ///
    /// # Errors
    /// As [`NewFile::create`].
    pub fn private(path: &Path) -> Result<NewFile, Error> {
        NewFile::begin(path, true, 0o600)
    }

    #[cfg_attr(not(unix), expect(unused_variables))]
    fn begin(path: &Path, replace: bool, mode: u32) -> Result<NewFile, Error> {
        let error = |what: String| Error::Write { path: path.to_owned(), what };
        match fs::symlink_metadata(path) {
            Ok(found) if found.is_dir() => return Err(error("it is a directory".into())),
            // A new file in place of a device or pipe is never what was meant.
            Ok(_) if !fs::metadata(path).is_ok_and(|found| found.is_file()) => {
                return Err(error("it is not a regular file".into()));
            }
            Ok(_) if !replace => return Err(error("there is a file of this name already".into())),
            _ => {}
        }
        let mut builder = tempfile::Builder::new();
        builder.prefix(".puna-").suffix(".part");
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(mode));
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let file = builder.tempfile_in(folder).map_err(|e| error(reason(&e)))?;
        Ok(NewFile { path: path.to_owned(), file, replace })
    }

    /// Where it is until it is whole.
    pub fn part(&self) -> &Path {
        self.file.path()
    }

    /// Puts the file in its place.
    ///
    /// # Errors
    /// [`Error::Write`].
    pub fn finish(self) -> Result<(), Error> {
        let error = |e: &io::Error| Error::Write { path: self.path.clone(), what: reason(e) };
        // The name must not outlive a crash that the content does not.
        self.file.as_file().sync_all().map_err(|e| error(&e))?;
        let placed = if self.replace { self.file.persist(&self.path) } else { self.file.persist_noclobber(&self.path) };
        placed.map(drop).map_err(|e| error(&e.error))
    }
}

impl Write for NewFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// What the system says, in fewer words where that is possible, and without the name of the file in the making.
pub(crate) fn reason(e: &io::Error) -> String {
    match e.kind() {
        io::ErrorKind::NotFound => "there is no such folder".into(),
        io::ErrorKind::PermissionDenied => "permission denied".into(),
        io::ErrorKind::StorageFull => "no space is left on the disk".into(),
        io::ErrorKind::AlreadyExists => "there is a file of this name already".into(),
        _ => match e.raw_os_error() {
            Some(code) => io::Error::from_raw_os_error(code).to_string(),
            // `tempfile` puts the name behind what the system says.
            None => escape(e.to_string().split(" at path ").next().unwrap_or_default()).to_string(),
        },
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// What the system says has no names of files that were never asked for, whatever it is.
    #[test]
    fn errors_do_not_tell_of_the_file_in_the_making() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), b"x").unwrap();
        let mut folders = vec!["none".to_owned(), "file".into(), "x".repeat(300)];
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink("loop", dir.path().join("loop")).unwrap();
            folders.push("loop".into());
        }
        for folder in folders {
            let Err(Error::Write { what, .. }) = NewFile::create(&dir.path().join(&folder).join("new"), true) else {
                panic!("{folder} is a folder");
            };
            let names = [".puna-", ".part", dir.path().to_str().unwrap()];
            assert!(!what.is_empty() && !names.iter().any(|name| what.contains(name)), "{folder}: {what}");
        }
    }
}
