//! The file of answers. What is in it is whole lines, whenever the program ends and for whatever reason.

use crate::error::Error;
use puna_server::openai::ApiError;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::HashSet;
use std::fs::{File, TryLockError};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What every line begins with: how a line that was cut off is told from a file of somebody else.
const BEGIN: &[u8] = b"{\"id\":\"batch_req_";

/// What is written is on the disk after this time, and a step.
const SYNC_EVERY: Duration = Duration::from_secs(5);

/// The file.
pub struct Output {
    path: PathBuf,
    file: File,
    /// Bytes of whole lines, where the file is one that lines can be taken from again.
    len: Option<u64>,
    synced: Instant,
    is_synced: bool,
    /// What an earlier run has written.
    pub old: Old,
    /// Lines that failed, those of earlier runs among them.
    pub failed: u64,
}

/// Questions that have been answered, or refused.
#[derive(Default)]
pub struct Old {
    /// By their names.
    pub ids: HashSet<String>,
    /// By their lines, where they have no names of their own.
    pub lines: HashSet<u64>,
}

/// Which question an answer is for.
pub struct Place {
    /// The line.
    pub line: u64,
    /// Its name; none where the line has none, or that of another line.
    pub custom_id: Option<String>,
}

#[derive(Serialize)]
struct Answer<'a> {
    id: String,
    custom_id: Option<&'a str>,
    response: Response,
    error: Option<Fault<'a>>,
}

#[derive(Serialize)]
struct Response {
    status_code: u16,
    request_id: String,
    body: Value,
}

/// Beside the response where only its number says which line it is about.
#[derive(Serialize)]
struct Fault<'a> {
    code: &'a str,
    message: &'a str,
    line: u64,
}

#[derive(Deserialize)]
struct OldAnswer {
    custom_id: Option<String>,
    response: OldResponse,
    error: Option<OldFault>,
}

#[derive(Deserialize)]
struct OldResponse {
    status_code: u16,
}

#[derive(Deserialize)]
struct OldFault {
    line: u64,
}

impl Output {
    /// Opens the file, or makes it. A line that an earlier run could not write to its end is cut off.
    pub fn open(path: &Path) -> Result<Output, Error> {
        let fault = |e| Error::file(path, e);
        let file = File::options().read(true).append(true).create(true).open(path).map_err(fault)?;
        let mut output = Output {
            path: path.to_owned(),
            file,
            len: None,
            synced: Instant::now(),
            is_synced: true,
            old: Old::default(),
            failed: 0,
        };
        // A terminal or a pipe has no earlier lines.
        if output.file.metadata().map_err(fault)?.is_file() {
            match output.file.try_lock() {
                Err(TryLockError::WouldBlock) => return Err(Error::file(path, "another program is writing to it")),
                // Some systems have no locks.
                Ok(()) | Err(TryLockError::Error(_)) => {}
            }
            output.read_old()?;
        }
        Ok(output)
    }

    fn read_old(&mut self) -> Result<(), Error> {
        let fault = |e| Error::file(&self.path, e);
        let (mut reader, mut line) = (BufReader::new(&self.file), Vec::new());
        let mut len = 0;
        for number in 1.. {
            line.clear();
            reader.by_ref().take(BEGIN.len() as u64).read_until(b'\n', &mut line).map_err(fault)?;
            if line.is_empty() {
                break;
            }
            let begins = BEGIN.starts_with(&line);
            if begins && line.len() == BEGIN.len() {
                reader.read_until(b'\n', &mut line).map_err(fault)?;
            }
            if !line.ends_with(b"\n") && begins {
                self.file.set_len(len).map_err(fault)?;
                break;
            }
            let answer = serde_json::from_slice::<OldAnswer>(&line).ok().filter(|_| begins);
            let what = || format!("line {number} is not an answer of a batch: give a new file, or one to go on with");
            let answer = answer.ok_or_else(|| Error::file(&self.path, what()))?;
            self.failed += u64::from(answer.response.status_code != 200);
            match (answer.error, answer.custom_id) {
                (Some(fault), _) => drop(self.old.lines.insert(fault.line)),
                (None, Some(id)) => drop(self.old.ids.insert(id)),
                (None, None) => {}
            }
            len += line.len() as u64;
        }
        self.len = Some(len);
        Ok(())
    }

    /// Lines of earlier runs.
    pub fn old_lines(&self) -> u64 {
        (self.old.ids.len() + self.old.lines.len()) as u64
    }

    /// Writes what a question got.
    pub fn write(&mut self, place: &Place, result: Result<Value, &ApiError>) -> Result<(), Error> {
        let error = result.as_ref().err().filter(|_| place.custom_id.is_none());
        let fault =
            error.map(|e| Fault { code: e.code.unwrap_or("invalid_request"), message: &e.message, line: place.line });
        let (status_code, body) = match result {
            Ok(body) => (200, body),
            Err(e) => (e.kind.status(), e.body()),
        };
        let answer = Answer {
            id: format!("batch_req_{}", place.line),
            custom_id: place.custom_id.as_deref(),
            response: Response { status_code, request_id: format!("req_{}", place.line), body },
            error: fault,
        };
        let mut line = serde_json::to_vec(&answer).map_err(|e| Error::file(&self.path, e))?;
        line.push(b'\n');
        if let Err(e) = self.file.write_all(&line) {
            return Err(self.full(&e));
        }
        self.len = self.len.map(|len| len + line.len() as u64);
        self.failed += u64::from(status_code != 200);
        self.is_synced = self.len.is_none();
        Ok(())
    }

    /// Sees to it now and then that what is written stays.
    pub fn keep(&mut self) -> Result<(), Error> {
        if self.synced.elapsed() < SYNC_EVERY { Ok(()) } else { self.sync() }
    }

    /// Sees to it that what is written stays.
    pub fn sync(&mut self) -> Result<(), Error> {
        if !self.is_synced {
            self.file.sync_data().map_err(|e| self.full(&e))?;
        }
        (self.is_synced, self.synced) = (true, Instant::now());
        Ok(())
    }

    /// Takes back what was written of a line.
    fn full(&self, cause: &std::io::Error) -> Error {
        if let Some(len) = self.len {
            // Where it cannot be cut off, the next run does it.
            let _ = self.file.set_len(len);
        }
        Error::file(&self.path, format!("{cause}; all lines before are whole: the same command goes on after them"))
    }
}
