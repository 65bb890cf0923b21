//! `puna tokenize` and `puna detokenize`.

use crate::error::Error;
use clap::{Args, ValueEnum};
use puna::ModelFiles;
use puna_text::{AddBos, EncodeOptions, TokenStream};
use std::io::{Read, Write};
use std::path::PathBuf;

/// Arguments of `puna tokenize`.
#[derive(Args)]
pub struct TokenizeArgs {
    /// GGUF file or Hugging Face folder; its tokenizer is enough
    model: PathBuf,
    /// The text [default: standard input]
    #[arg(long, value_name = "S", conflicts_with = "file")]
    text: Option<String>,
    /// Read the text from a file; - is standard input
    #[arg(long, value_name = "F")]
    file: Option<PathBuf>,
    /// Take control tokens that are written out in the text as ordinary characters
    #[arg(long)]
    no_special: bool,
    /// Begin with the token that begins a text: as the model's file says (auto), yes, or no added token at either end
    #[arg(long, value_enum, default_value = "auto")]
    add_bos: Bos,
}

#[derive(Clone, Copy, ValueEnum)]
enum Bos {
    Auto,
    Yes,
    No,
}

/// Prints one JSON list of ids.
pub fn tokenize(args: &TokenizeArgs) -> Result<(), Error> {
    let text = match (&args.text, &args.file) {
        (Some(text), _) => text.clone(),
        (None, file) => read_text(file.as_ref())?,
    };
    let files = ModelFiles::open(&args.model)?;
    let bos = match args.add_bos {
        Bos::Auto => AddBos::Auto,
        Bos::Yes => AddBos::Yes,
        Bos::No => AddBos::No,
    };
    let options = EncodeOptions { special: !args.no_special, bos };
    let ids = files.require_tokenizer()?.encode(&text, options).map_err(|e| puna::Error::text(&args.model, e))?;
    writeln!(std::io::stdout(), "{}", serde_json::json!(ids))?;
    Ok(())
}

/// A whole file, or standard input for none or `-`.
pub fn read_text(file: Option<&PathBuf>) -> Result<String, Error> {
    let mut bytes = Vec::new();
    let name = match file.filter(|f| f.as_os_str() != "-") {
        Some(path) => {
            bytes = std::fs::read(path).map_err(|e| Error::file(path, e))?;
            path.clone()
        }
        None => {
            let name = PathBuf::from("standard input");
            std::io::stdin().read_to_end(&mut bytes).map_err(|e| Error::file(&name, e))?;
            name
        }
    };
    String::from_utf8(bytes).map_err(|e| {
        let what = format!("expected UTF-8 text: invalid byte at offset {}", e.utf8_error().valid_up_to());
        Error::file(&name, what)
    })
}

/// Arguments of `puna detokenize`.
#[derive(Args)]
pub struct DetokenizeArgs {
    /// GGUF file or Hugging Face folder; its tokenizer is enough
    model: PathBuf,
    /// Token ids, separated by commas
    #[arg(long, value_delimiter = ',', required = true)]
    ids: Vec<u32>,
}

/// Prints the text of ids.
pub fn detokenize(args: &DetokenizeArgs) -> Result<(), Error> {
    let files = ModelFiles::open(&args.model)?;
    let mut stream = TokenStream::new(files.require_tokenizer()?);
    let mut text = String::new();
    for &id in &args.ids {
        text.extend(stream.push(id));
    }
    text.extend(stream.finish());
    writeln!(std::io::stdout(), "{text}")?;
    Ok(())
}
