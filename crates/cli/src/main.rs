//! The program `puna`.

#![forbid(unsafe_code)]

mod bench;
mod error;
mod eval;

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
    /// Measure the speed of prompts, generation and batches
    Bench(bench::BenchArgs),
    /// Compute logits of token ids, for comparison with a reference
    Eval(eval::EvalArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Bench(args) => bench::run(&args),
        Command::Eval(args) => eval::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) if e.is_closed_stdout() => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("puna: {e}");
            ExitCode::FAILURE
        }
    }
}
