//! `puna inspect`: what a model file holds, what it takes to run it, and whether it can be run.
//!
//! A source ([`gguf`], [`folder`]) reads files into a [`Report`], which is plain data; [`text`] and `--json` only know the report.

mod common;
mod folder;
mod gguf;
mod report;
mod text;

pub use text::bytes;

use crate::error::Error;
use clap::Args;
use puna_kernels::KvType;
use puna_model::Source;
use report::Report;
use serde::Serialize;
use serde_json::ser::Formatter;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;

/// Arguments of `puna inspect`.
#[derive(Args)]
#[command(after_help = "\
A model that cannot be run is described as far as it can be read, with the reasons, and the exit status is 0.
It is 1 when the file is no model file, or damaged before its weights begin.
Shapes are written outermost dimension first: [rows, columns]. kB, MB and GB are powers of 1000.")]
pub struct InspectArgs {
    /// GGUF file (of a split model, any of its files), or folder with config.json and safetensors
    model: PathBuf,
    /// One JSON object with everything; of arrays longer than 64, type and length
    #[arg(long)]
    json: bool,
    /// Positions that one sequence may have, for the memory that takes [default: the model's context, 4096 at most]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    ctx: Option<u64>,
    /// How keys and values are kept: f32, f16 or q8_0
    #[arg(long, default_value = "f16")]
    kv: KvType,
    /// List every tensor, not only the first of the layers that are alike
    #[arg(long)]
    tensors: bool,
}

/// Runs the command.
pub fn run(args: &InspectArgs) -> Result<(), Error> {
    let report = match Source::open(&args.model)? {
        Source::Gguf(gguf) => gguf::report(&gguf, args.ctx, args.kv),
        Source::Folder(folder) => folder::report(&folder, args.ctx, args.kv)?,
    };
    let mut out = BufWriter::new(io::stdout().lock());
    if args.json {
        write_json(&report, &mut out)?;
    } else {
        text::write(&report, args.tensors, &mut out)?;
    }
    Ok(out.flush()?)
}

fn write_json(report: &Report, out: &mut impl Write) -> io::Result<()> {
    let mut json = serde_json::Serializer::with_formatter(&mut *out, Printable);
    report.serialize(&mut json)?;
    writeln!(out)
}

/// Compact JSON in which characters that a terminal could obey are escaped too: JSON itself leaves those above
/// U+001F as they are.
struct Printable;

impl Formatter for Printable {
    fn write_string_fragment<W: ?Sized + Write>(&mut self, out: &mut W, fragment: &str) -> io::Result<()> {
        let mut shown = 0;
        for (at, c) in fragment.char_indices() {
            if !is_printable(c) {
                out.write_all(&fragment.as_bytes()[shown..at])?;
                for unit in c.encode_utf16(&mut [0; 2]) {
                    write!(out, "\\u{unit:04x}")?;
                }
                shown = at + c.len_utf8();
            }
        }
        out.write_all(&fragment.as_bytes()[shown..])
    }
}

/// Whether a terminal shows a character and does nothing else.
fn is_printable(c: char) -> bool {
    matches!(c, '\'' | '"' | '\\') || c.escape_debug().len() == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_no_character_that_a_terminal_obeys() {
        let text = "it's \u{9b}31m \u{7f}\u{202e}\u{e0001} é \"\\\n";
        let mut out = Vec::new();
        text.serialize(&mut serde_json::Serializer::with_formatter(&mut out, Printable)).unwrap();
        let json = String::from_utf8(out).unwrap();
        assert_eq!(json, r#""it's \u009b31m \u007f\u202e\udb40\udc01 é \"\\\n""#);
        assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
    }
}
