//! The program `puna`.

#![forbid(unsafe_code)]

mod batch;
mod bench;
mod chat;
mod convert;
mod embed;
mod error;
mod eval;
mod files;
mod inside;
mod inspect;
mod interrupt;
mod options;
mod perplexity;
mod progress;
mod run;
mod serve;
mod steer;
mod template;
mod tokenize;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Runs Llama-family language models on CPUs: the same answer, bit for bit, however it is computed.
#[derive(Parser)]
#[command(name = "puna", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Answer many questions from a file, as OpenAI's batches have them
    Batch(batch::BatchArgs),
    /// Measure the speed of prompts, generation and batches
    Bench(bench::BenchArgs),
    /// Write a model as one GGUF file: from a Hugging Face folder, or from GGUF files in parts or of another type
    Convert(convert::ConvertArgs),
    /// Turn token ids into text
    Detokenize(tokenize::DetokenizeArgs),
    /// Turn texts into vectors, one JSON object a line
    Embed(embed::EmbedArgs),
    /// Compute logits of token ids, for comparison with a reference
    Eval(eval::EvalArgs),
    /// Show what a model file holds, what it takes to run it, and whether it can be run
    Inspect(inspect::InspectArgs),
    /// Measure how well a model predicts a text
    Perplexity(perplexity::PerplexityArgs),
    /// Answer a prompt, or hold a conversation
    Run(Box<run::RunArgs>),
    /// Serve models over HTTP, with OpenAI's interface
    Serve(serve::ServeArgs),
    /// Make a control vector from pairs of prompts
    SteerTrain(steer::SteerTrainArgs),
    /// Show the prompt that a conversation becomes
    Template(template::TemplateArgs),
    /// Turn text into token ids
    Tokenize(tokenize::TokenizeArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Batch(args) => batch::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Convert(args) => convert::run(&args),
        Command::Detokenize(args) => tokenize::detokenize(&args),
        Command::Embed(args) => embed::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Perplexity(args) => perplexity::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::SteerTrain(args) => steer::train(&args),
        Command::Template(args) => template::run(&args),
        Command::Tokenize(args) => tokenize::tokenize(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) if e.is_closed_stdout() => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("puna: {}", one_line(&e.to_string()));
            ExitCode::FAILURE
        }
    }
}

/// A message without what a terminal would obey: files may have put it there.
fn one_line(message: &str) -> String {
    let escape = |c: char| if c.is_control() { c.escape_debug().to_string() } else { c.to_string() };
    message.chars().map(escape).collect()
}
