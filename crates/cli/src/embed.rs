//! `puna embed`: texts to vectors.

use crate::error::Error;
use crate::inside::SteeringArgs;
use crate::options::{RunOptions, print_notices};
use crate::progress::{Progress, Unit};
use clap::{Args, ValueEnum};
use puna::{EmbedOptions, Engine, LoadOptions, ModelFiles, Steering};
use puna_text::EncodeOptions;
use serde::Serialize;
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Arguments of `puna embed`.
#[derive(Args)]
#[command(mut_arg("ctx", |a| a.help("Most tokens of a text [default: the model's own]")))]
#[command(mut_arg("kv", |a| a.default_value("f32").help("How keys and values are kept while a text is computed: f32, f16 or q8_0")))]
pub struct EmbedArgs {
    /// GGUF file, or folder with config.json and safetensors
    model: PathBuf,
    /// The texts, one a line [default: standard input]; - is standard input
    #[arg(short = 'f', long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// What a line is: the text itself, a JSON string, or a JSON list of token ids, to which nothing is added
    #[arg(long, value_enum, default_value = "text")]
    input: Form,
    /// The vector of a text: as the model's files say (auto), the mean of its tokens', the last one's, the first one's
    #[arg(long, default_value = "auto", value_parser = ["auto", "mean", "last", "cls"])]
    pooling: String,
    /// Divide vectors by their length [default: as the model's files say]
    #[arg(long, overrides_with = "no_normalize")]
    normalize: bool,
    /// Leave vectors as they are
    #[arg(long, overrides_with = "normalize")]
    no_normalize: bool,
    /// Cut texts that are too long, keeping the token that ends them, instead of failing
    #[arg(long)]
    truncate: bool,
    /// Take control tokens that are written out in a text as ordinary characters
    #[arg(long)]
    no_special: bool,
    #[command(flatten)]
    steering: SteeringArgs,
    #[command(flatten)]
    options: RunOptions,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Form {
    Text,
    Json,
    Ids,
}

/// Longest line, in bytes: a text of a million tokens has less.
const MAX_LINE: u64 = 16 << 20;

/// Texts that are computed together end when they have so many tokens: a few batches.
const GROUP: usize = 4096;

/// A line of output. Numbers are as short as they can be and still be the same in single precision.
#[derive(Serialize)]
struct Line<'a> {
    index: u64,
    embedding: &'a [f32],
    tokens: usize,
}

/// Prints a JSON object for each line, in their order: its number from 0, its vector, its tokens. Lines are computed as
/// they come, so that any number of them takes the same memory.
pub fn run(args: &EmbedArgs) -> Result<(), Error> {
    let files = ModelFiles::open(&args.model)?;
    files.embedding()?;
    if args.input != Form::Ids {
        files.require_tokenizer()?;
    }
    let mut options = args.options.engine();
    options.load = LoadOptions { head: false, ..options.load };
    let mut loading = Progress::new("loading", Unit::Bytes);
    let engine = Engine::from_files(files, &options, &mut |done, total| loading.update(done, total))?;
    loading.finish();
    print_notices(engine.notices());
    let steering = args.steering.steering(engine.config())?;
    match args.file.as_deref().filter(|f| f.as_os_str() != "-") {
        Some(path) => {
            let file = std::fs::File::open(path).map_err(|e| Error::file(path, e))?;
            Embed { args, engine, steering, name: path.to_owned(), lines: 0 }.all(BufReader::new(file))
        }
        None => {
            let name = PathBuf::from("standard input");
            Embed { args, engine, steering, name, lines: 0 }.all(BufReader::new(std::io::stdin().lock()))
        }
    }
}

struct Embed<'a> {
    args: &'a EmbedArgs,
    engine: Engine,
    steering: Option<Arc<Steering>>,
    /// Where lines come from.
    name: PathBuf,
    /// Lines read.
    lines: u64,
}

impl Embed<'_> {
    fn all(&mut self, mut input: BufReader<impl Read>) -> Result<(), Error> {
        let mut out = BufWriter::new(std::io::stdout().lock());
        let mut progress = Progress::new("embedding", Unit::Texts);
        loop {
            let first = self.lines;
            let (texts, end) = self.group(&mut input);
            self.write(first, &texts, &mut out)?;
            progress.update(self.lines, 0);
            if end? {
                return Ok(());
            }
        }
    }

    /// The next texts: as many as are there without waiting, up to a limit. Beside them whether the input has ended, or
    /// what is wrong with the line after them.
    fn group(&mut self, input: &mut BufReader<impl Read>) -> (Vec<Vec<u32>>, Result<bool, Error>) {
        let (mut texts, mut tokens) = (Vec::new(), 0);
        while texts.is_empty() || (tokens < GROUP && !input.buffer().is_empty()) {
            match self.text(input) {
                Ok(Some(ids)) => {
                    tokens += ids.len();
                    texts.push(ids);
                    self.lines += 1;
                }
                Ok(None) => return (texts, Ok(true)),
                Err(e) => return (texts, Err(e)),
            }
        }
        (texts, Ok(false))
    }

    /// The ids of the next line; `None` after the last one.
    fn text(&self, input: &mut impl BufRead) -> Result<Option<Vec<u32>>, Error> {
        let mut line = Vec::new();
        input.take(MAX_LINE + 1).read_until(b'\n', &mut line).map_err(|e| self.fault(self.lines, e))?;
        if line.is_empty() {
            return Ok(None);
        }
        if line.len() as u64 > MAX_LINE {
            return Err(self.fault(self.lines, format!("longer than {MAX_LINE} bytes")));
        }
        if line.ends_with(b"\n") {
            line.pop();
            line.pop_if(|end| *end == b'\r');
        }
        let mut ids = self.ids(&line)?;
        if self.args.truncate {
            self.engine.truncate_text(&mut ids);
        }
        self.engine.check_text(&ids).map_err(|e| self.fault(self.lines, e))?;
        Ok(Some(ids))
    }

    fn ids(&self, line: &[u8]) -> Result<Vec<u32>, Error> {
        let fault = |what: String| self.fault(self.lines, what);
        let json;
        let text = match self.args.input {
            Form::Ids => {
                let expected = |e| fault(format!("expected a JSON list of token ids: {e}"));
                return serde_json::from_slice(line).map_err(expected);
            }
            Form::Json => {
                json = serde_json::from_slice::<String>(line)
                    .map_err(|e| fault(format!("expected a JSON string: {e}")))?;
                &json
            }
            Form::Text => std::str::from_utf8(line)
                .map_err(|e| fault(format!("expected UTF-8 text: invalid byte at offset {}", e.valid_up_to())))?,
        };
        let options = EncodeOptions { special: !self.args.no_special, ..EncodeOptions::default() };
        self.engine.tokenizer()?.encode(text, options).map_err(|e| fault(e.to_string()))
    }

    fn write(&mut self, first: u64, texts: &[Vec<u32>], out: &mut impl Write) -> Result<(), Error> {
        let args = self.args;
        let normalize = (args.normalize || args.no_normalize).then_some(args.normalize);
        let options = EmbedOptions { pooling: args.pooling.parse().ok(), normalize, steering: self.steering.clone() };
        let embeddings = self.engine.embed(texts, &options).map_err(|e| match e {
            puna::Error::Embed { index, source } => self.fault(first + index as u64, source),
            e => e.into(),
        })?;
        for ((index, embedding), text) in (first..).zip(&embeddings).zip(texts) {
            let line = Line { index, embedding, tokens: text.len() };
            serde_json::to_writer(&mut *out, &line).map_err(std::io::Error::from)?;
            out.write_all(b"\n")?;
        }
        Ok(out.flush()?)
    }

    /// What is wrong with a line, counted from 0 here and from 1 for people.
    fn fault(&self, line: u64, what: impl std::fmt::Display) -> Error {
        let name: &Path = &self.name;
        Error::file(name, format!("line {}: {what}", line + 1))
    }
}
