//! Arguments that several commands share.

use crate::error::Error;
use crate::tokenize::read_text;
use clap::Args;
use puna::draft::MAX_DRAFT;
use puna::sampler::{LogitBias, PartialSampling};
use puna::{DraftBy, DraftOptions, Engine, EngineOptions, Grammar, Isa, KvType, LoadOptions, Pool};
use puna_kernels::DType;
use puna_kernels::dtype::FORMATS;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// How a model is loaded. Nothing here but `--kv` and `--quantize` changes what it says.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Model")]
pub struct LoadArgs {
    /// Threads [default: physical cores]
    #[arg(long, short = 't', value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    /// How keys and values are kept: f32, f16 or q8_0
    #[arg(long, value_name = "KIND", default_value = "f16")]
    pub kv: KvType,
    /// Instructions: scalar, avx2 or avx512 [default: the best of this processor; the environment variable PUNA_ISA
    /// lowers it]
    #[arg(long)]
    isa: Option<Isa>,
    /// Rearrange weights while loading (auto), or use them as the file stores them (no)
    #[arg(long, default_value = "auto", value_parser = ["auto", "no"])]
    pack: String,
    /// Quantize projections that are stored as floats while loading: q8_0, q4_0, q4_k, .. or none
    #[arg(long, value_name = "TYPE", default_value = "none", value_parser = quantize)]
    quantize: Quantize,
    /// Keep at most so many bytes of a mixture's experts in memory (2G, 512M) and read them from the file as they are
    /// needed [default: all are loaded]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    expert_memory: Option<u64>,
}

impl LoadArgs {
    /// The same for the model.
    pub fn load(&self) -> LoadOptions {
        LoadOptions {
            isa: self.isa.unwrap_or_else(Isa::detect),
            threads: self.threads.map_or_else(Pool::default_threads, usize::from),
            pack: self.pack == "auto",
            quantize: self.quantize.0,
            expert_memory: self.expert_memory,
            ..LoadOptions::default()
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Quantize(Option<DType>);

fn quantize(name: &str) -> Result<Quantize, String> {
    if name == "none" {
        return Ok(Quantize(None));
    }
    let blocks = |dtype: &DType| dtype.can_quantize() && dtype.format().block_len > 1;
    match DType::from_name(name).filter(blocks) {
        Some(dtype) => Ok(Quantize(Some(dtype))),
        None => {
            let all = FORMATS.iter().map(|f| f.dtype).filter(blocks).map(|d| d.name().to_lowercase());
            Err(format!("expected none or one of {}", all.collect::<Vec<_>>().join(", ")))
        }
    }
}

/// A number of bytes: 1000000, 512M, 1.5G; units are powers of 1024.
fn size(text: &str) -> Result<u64, String> {
    let error = || "expected a number of bytes, or one with K, M, G or T behind it".to_owned();
    let number = text.trim_end_matches(['b', 'B']).trim_end_matches('i');
    let unit = number.chars().last().and_then(|unit| "KMGT".find(unit.to_ascii_uppercase()));
    let number = if unit.is_some() { &number[..number.len() - 1] } else { number };
    let bytes =
        number.trim().parse::<f64>().map_err(|_| error())? * 1024f64.powi(unit.map_or(0, |unit| unit as i32 + 1));
    // Larger ones are as good as the largest.
    if bytes >= 1.0 { Ok(bytes as u64) } else { Err(error()) }
}

/// How a model is run.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Model")]
pub struct RunOptions {
    /// Positions of a sequence, prompt and answer together [default: the model's own, at most 8192]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    ctx: Option<u32>,
    #[command(flatten)]
    load: LoadArgs,
}

impl RunOptions {
    /// The same for the engine.
    pub fn engine(&self) -> EngineOptions {
        EngineOptions {
            load: self.load.load(),
            kv: self.load.kv,
            ctx: self.ctx.map(|n| n as usize),
            ..EngineOptions::default()
        }
    }
}

/// Whether guesses are verified together. Changes how fast answers come, and nothing else.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Guessing ahead")]
pub struct DraftArgs {
    /// Guess the next tokens and verify them together: ngram guesses that the text says again what it said before, a model
    /// of the same vocabulary says what it would say. Answers stay the same
    #[arg(long, value_name = "ngram|MODEL")]
    draft: Option<PathBuf>,
    /// Most tokens that are guessed at a time; fewer where they are often wrong [default: 16]
    #[arg(long, value_name = "N", requires = "draft", value_parser = clap::value_parser!(u8).range(1..=MAX_DRAFT as i64))]
    draft_max: Option<u8>,
}

impl DraftArgs {
    /// The same for the engine.
    pub fn engine(&self) -> Option<DraftOptions> {
        let by = match self.draft.as_ref()? {
            name if name.as_os_str() == "ngram" => DraftBy::Lookup,
            path => DraftBy::Model(path.clone()),
        };
        let options = DraftOptions::new(by);
        Some(DraftOptions { max: self.draft_max.map_or(options.max, usize::from), ..options })
    }
}

/// Tells what a file or an option asks for and does not get.
pub fn print_notices(notices: &[String]) {
    for notice in notices {
        eprintln!("puna: {notice}");
    }
}

/// What answers must be.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Form of answers")]
pub struct GrammarOptions {
    /// Answers are JSON that is valid under the JSON Schema in this file
    #[arg(long, value_name = "FILE", conflicts_with = "grammar")]
    json_schema: Option<PathBuf>,
    /// Answers follow the Lark grammar in this file
    #[arg(long, value_name = "FILE")]
    grammar: Option<PathBuf>,
}

impl GrammarOptions {
    /// The same for requests.
    pub fn compile(&self, engine: &Engine) -> Result<Option<Grammar>, Error> {
        let Some(path) = self.json_schema.as_ref().or(self.grammar.as_ref()) else { return Ok(None) };
        let (text, grammars) = (read_text(Some(path))?, engine.grammars()?);
        let grammar = if self.json_schema.is_some() {
            let schema = serde_json::from_str(&text).map_err(|e| Error::file(path, e))?;
            grammars.json_schema(&schema)
        } else {
            grammars.lark(&text)
        };
        grammar.map(Some).map_err(|e| Error::file(path, e))
    }
}

/// How tokens are chosen. What is not given comes from the model's file, and then from llama.cpp's defaults.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingOptions {
    /// Temperature; 0 always takes the most likely token [default: 0.8]
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temp: Option<f32>,
    /// Keep the K most likely tokens; 0 keeps all [default: 40]
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    top_k: Option<i32>,
    /// Keep the most likely tokens that hold this probability [default: 0.95]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Keep tokens at least this likely, relative to the likeliest [default: 0.05]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f32>,
    /// Keep locally typical tokens that hold this probability; 1 keeps all [default: 1]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    typical: Option<f32>,
    /// Make recent tokens less likely; 1 does not [default: 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    repeat_penalty: Option<f32>,
    /// Recent tokens that penalties look at; -1 is all [default: 64]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    repeat_last_n: Option<i32>,
    /// Subtracted from the logits of recent tokens [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    presence_penalty: Option<f32>,
    /// Subtracted from the logits of recent tokens, once for each time they occur [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    frequency_penalty: Option<f32>,
    /// Added to the logit of a token: ID=NUMBER, or ID=false to ban it; may be repeated
    #[arg(long, value_name = "ID=X", value_parser = logit_bias)]
    logit_bias: Vec<(u32, f32)>,
    /// Never choose a token that ends the answer
    #[arg(long)]
    ignore_eos: bool,
    /// Seed of the random numbers; the same seed gives the same text [default: a random one]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

impl SamplingOptions {
    /// What was asked for.
    pub fn wishes(&self) -> PartialSampling {
        let bias: BTreeMap<u32, f32> = self.logit_bias.iter().copied().collect();
        PartialSampling {
            temperature: self.temp,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            typical_p: self.typical,
            repeat_penalty: self.repeat_penalty,
            repeat_last_n: self.repeat_last_n,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: (!bias.is_empty()).then_some(LogitBias(bias)),
            ignore_eos: self.ignore_eos.then_some(true),
            seed: self.seed,
            ..PartialSampling::default()
        }
    }
}

fn logit_bias(text: &str) -> Result<(u32, f32), String> {
    let (id, bias) = text.split_once('=').ok_or("expected ID=NUMBER")?;
    let id = id.parse().map_err(|e| format!("token id '{id}': {e}"))?;
    match bias {
        "false" => Ok((id, f32::NEG_INFINITY)),
        bias => Ok((id, bias.parse().map_err(|e| format!("bias '{bias}': {e}"))?)),
    }
}

/// `NAME=VALUE`.
pub fn name_and_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() && !value.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("expected a name, =, and what it stands for".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::size;

    #[test]
    fn sizes() {
        for (text, bytes) in [("1", 1), ("512M", 512 << 20), ("1.5g", 3 << 29), ("2GiB", 2 << 30), ("4 KB", 4096)] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in ["", "0", "-1", "G", "2X", "nan", "1é", "é", "0.2"] {
            assert!(size(text).is_err(), "{text}");
        }
    }
}
