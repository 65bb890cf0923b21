//! The program `puna`.

#![forbid(unsafe_code)]

mod bench;
mod error;
mod eval;
mod inspect;

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
    /// Show what a model file holds, what it takes to run it, and whether it can be run
    Inspect(inspect::InspectArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Bench(args) => bench::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Inspect(args) => inspect::run(&args),
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
