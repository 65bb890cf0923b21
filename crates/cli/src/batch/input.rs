//! Lines of a batch: what they ask for, and under which name.

use crate::error::Error;
use puna::EmbedOptions;
use puna_server::openai::chat::ChatRequest;
use puna_server::openai::completions::CompletionRequest;
use puna_server::openai::embeddings::EmbeddingRequest;
use puna_server::openai::{Answer, ApiError, Assemble, Card, Fields, Kind};
use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Longest line, in bytes: as large as a request's body may be.
const MAX_LINE: u64 = 16 << 20;

/// The file with questions, read line by line.
pub struct Input {
    path: PathBuf,
    reader: BufReader<File>,
    lines: u64,
    /// Bytes of the file, 0 where it is none that has a size.
    pub size: u64,
}

/// A line.
pub struct Line {
    /// From 1.
    pub number: u64,
    /// Bytes, the end of the line among them.
    pub len: u64,
    /// `None` if it is too long.
    text: Option<Vec<u8>>,
}

/// What a line asks for.
pub struct Question {
    /// Its name.
    pub custom_id: String,
    method: String,
    url: String,
    body: Value,
}

/// A line that asks for nothing that can be answered.
pub struct Refusal {
    /// Its name, if it has one.
    pub custom_id: Option<String>,
    /// Why.
    pub error: ApiError,
}

/// The work that a question is.
pub enum Task {
    /// For the engine's steps.
    Generate(Vec<puna::Request>, Box<dyn Assemble>),
    /// Texts as token ids.
    Embed(EmbeddingRequest, Vec<Vec<u32>>, EmbedOptions),
}

impl Input {
    /// Opens the file.
    pub fn open(path: &Path) -> Result<Input, Error> {
        let file = File::open(path).map_err(|e| Error::file(path, e))?;
        let size = file.metadata().map_or(0, |data| data.len());
        Ok(Input { path: path.to_owned(), reader: BufReader::new(file), lines: 0, size })
    }

    /// The next line that is not empty; `None` after the last one.
    pub fn next(&mut self) -> Result<Option<Line>, Error> {
        loop {
            let mut text = Vec::new();
            let fault = |e| Error::file(&self.path, e);
            self.reader.by_ref().take(MAX_LINE + 1).read_until(b'\n', &mut text).map_err(fault)?;
            if text.is_empty() {
                return Ok(None);
            }
            self.lines += 1;
            let mut len = text.len() as u64;
            let is_too_long = len > MAX_LINE;
            if is_too_long && !text.ends_with(b"\n") {
                len += self.reader.skip_until(b'\n').map_err(|e| Error::file(&self.path, e))? as u64;
            }
            if self.lines == 1 && text.starts_with(b"\xef\xbb\xbf") {
                text.drain(..3);
            }
            if is_too_long || !text.trim_ascii().is_empty() {
                return Ok(Some(Line { number: self.lines, len, text: (!is_too_long).then_some(text) }));
            }
        }
    }
}

impl Line {
    /// What it asks for.
    pub fn question(&self) -> Result<Question, Refusal> {
        let anonymous = |error| Refusal { custom_id: None, error };
        let Some(text) = &self.text else {
            let what = format!("the line is longer than {MAX_LINE} bytes");
            return Err(anonymous(ApiError::new(Kind::TooLarge, what)));
        };
        let line: Value = serde_json::from_slice(text).map_err(|e| {
            anonymous(ApiError::new(Kind::Invalid, format!("the line is no JSON: {e}")).code("invalid_json"))
        })?;
        let fields = Fields::new(&line, "").map_err(anonymous)?;
        let custom_id = required(&fields, "custom_id").map_err(anonymous)?.to_owned();
        let rest = || {
            let (method, url) = (required(&fields, "method")?.to_owned(), required(&fields, "url")?.to_owned());
            Ok((method, url, fields.require("body")?.clone()))
        };
        match rest() {
            Ok((method, url, body)) => Ok(Question { custom_id, method, url, body }),
            Err(error) => Err(Refusal { custom_id: Some(custom_id), error }),
        }
    }
}

/// A field that must be a string with something in it.
fn required<'a>(fields: &Fields<'a>, field: &str) -> Result<&'a str, ApiError> {
    fields.require(field)?;
    fields
        .string(field)?
        .filter(|text| !text.is_empty())
        .ok_or_else(|| fields.expected(field, "a string that is not empty"))
}

impl Question {
    /// The work that it is for a model: as the server at this URL takes it.
    pub fn task(&self, card: &Card) -> Result<Task, ApiError> {
        if self.method != "POST" {
            let what = format!("method: expected POST, found {}", short(&self.method));
            return Err(ApiError { param: Some("method".into()), ..ApiError::new(Kind::Method, what) });
        }
        let job = match self.url.as_str() {
            "/v1/chat/completions" => ChatRequest::read(&self.body)?.job(card)?,
            "/v1/completions" => CompletionRequest::read(&self.body)?.job(card)?,
            "/v1/embeddings" => {
                let request = EmbeddingRequest::read(&self.body)?;
                let (texts, options) = (request.texts(card)?, request.options(card)?);
                return Ok(Task::Embed(request, texts, options));
            }
            other => {
                let what = format!(
                    "url: expected /v1/chat/completions, /v1/completions or /v1/embeddings, found {}",
                    short(other)
                );
                let error = ApiError::new(Kind::NotFound, what).code("unknown_url");
                return Err(ApiError { param: Some("url".into()), ..error });
            }
        };
        match job.answer {
            Answer::Whole(answer) => Ok(Task::Generate(job.requests, answer)),
            Answer::Stream(_) => Err(ApiError::invalid("stream", "true has no meaning in a batch")),
        }
    }
}

fn short(text: &str) -> String {
    text.chars().take(100).collect()
}
