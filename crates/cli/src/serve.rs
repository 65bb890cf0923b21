//! `puna serve`: models behind OpenAI's interface.

use crate::error::Error;
use crate::inside::open_vectors;
use crate::options::{DraftArgs, RunOptions, name_and_value};
use crate::tokenize::read_text;
use clap::{Args, ValueEnum};
use puna_server::{Keys, Limits, Options};
use std::io::{IsTerminal, Write};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Arguments of `puna serve`.
#[derive(Args)]
pub struct ServeArgs {
    /// GGUF files or Hugging Face folders; requests name one by its file name without the ending
    #[arg(required_unless_present = "alias")]
    models: Vec<PathBuf>,
    /// Another name for a model, or a name for one that is loaded from a path; may be repeated
    #[arg(long, value_name = "NAME=MODEL", value_parser = name_and_value)]
    alias: Vec<(String, String)>,
    /// Use this chat template (Jinja) in place of the models'
    #[arg(long, value_name = "FILE")]
    template: Option<PathBuf>,
    /// Address to listen on; 0.0.0.0 is all of this machine's
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "N", default_value_t = 8080)]
    port: u16,
    /// File of keys, one a line: only requests with one of them are answered. Keys are also taken from the environment
    /// variable PUNA_API_KEYS, separated by commas
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Let pages of this origin read answers; * is every origin; may be repeated
    #[arg(long, value_name = "ORIGIN")]
    cors: Vec<String>,
    /// Another name that this server is reached by, as behind a proxy; * is every name; may be repeated. Without keys, a
    /// server for this machine alone takes no others than localhost and addresses, since pages can make up names
    #[arg(long, value_name = "NAME")]
    allowed_host: Vec<String>,
    /// Control vector (GGUF) that requests may name in steering; may be repeated
    #[arg(long, value_name = "NAME=FILE", value_parser = name_and_value)]
    control_vector: Vec<(String, String)>,
    /// Let clients upload and delete control vectors
    #[arg(long)]
    allow_uploads: bool,
    /// Keep beginnings of prompts that clients name in this folder, with their keys and values (/v1/prefixes)
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// Measure what memory gives at best, so that timings tell their part of it
    #[arg(long)]
    profile: bool,
    /// How to write the log, on standard error
    #[arg(long, value_enum, default_value = "text")]
    log_format: LogFormat,
    /// What to write of it: error, warn, info, debug or off
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    log_level: tracing::level_filters::LevelFilter,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    draft: DraftArgs,
    #[command(flatten)]
    options: RunOptions,
}

#[derive(Args)]
#[command(next_help_heading = "Limits")]
struct LimitArgs {
    /// Answers that are worked on at once
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    max_running: u32,
    /// Answers that may wait beside them; more are told to come again later
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_queue: u32,
    /// Most tokens of an answer, whatever a request asks for [default: as many as the context holds]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,
    /// Most MiB of keys and values of each model [default: its part of half of the memory that is free when all are loaded]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..))]
    kv_memory: Option<u32>,
    /// Prefixes in --state-dir
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_prefixes: u32,
    /// Most MiB of the files in --state-dir together
    #[arg(long, value_name = "MIB", default_value_t = 4096)]
    state_limit: u32,
    /// Connections at once; where all are taken, silent ones are closed and others wait
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    max_connections: u32,
    /// Most MiB of a request's body
    #[arg(long, value_name = "MIB", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    max_body: u32,
    /// Seconds that an answer may take, waiting included
    #[arg(long, value_name = "SECONDS", default_value_t = 3600, value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    request_timeout: u64,
    /// Seconds that a connection may be silent while the client is to send or to read
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    idle_timeout: u64,
    /// Seconds that running requests get when the server is told to end
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    grace: u32,
}

#[derive(Clone, Copy, ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

/// Serves until the process is told to end.
pub fn run(args: &ServeArgs) -> Result<(), Error> {
    start_log(args);
    let options = args.server_options()?;
    let open = options.keys.is_empty() && !options.host.is_loopback();
    if open {
        tracing::warn!(host = %options.host, "anybody who can reach this address can use the models: see --api-key-file");
    }
    let ready = |address| {
        // Where nobody reads it, it is not needed.
        let _ = writeln!(std::io::stdout(), "http://{address}");
    };
    Ok(puna_server::serve(&options, ready)?)
}

fn start_log(args: &ServeArgs) {
    let log = tracing_subscriber::fmt()
        .with_max_level(args.log_level)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false);
    match args.log_format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
}

/// Keys of the environment: none where the variable is not there. One that is there and has none is a mistake that would
/// let everybody in.
fn keys_of_environment() -> Result<Keys, Error> {
    const NAME: &str = "PUNA_API_KEYS";
    let Some(text) = std::env::var_os(NAME) else { return Ok(Keys::default()) };
    let keys = Keys::parse(&text.to_string_lossy().replace(',', "\n"));
    if keys.is_empty() {
        return Err(Error::file(Path::new(NAME), "the environment variable is there, but has no keys"));
    }
    Ok(keys)
}

impl ServeArgs {
    fn server_options(&self) -> Result<Options, Error> {
        let mut keys = keys_of_environment()?;
        if let Some(path) = &self.api_key_file {
            keys = keys.and(Keys::read(path)?);
        }
        let limits = &self.limits;
        let mut engine = self.options.engine();
        engine.draft = self.draft.engine();
        engine.max_running = limits.max_running as usize;
        engine.kv_bytes = limits.kv_memory.map(|mib| (mib as usize) << 20).or(engine.kv_bytes);
        Ok(Options {
            aliases: self.alias.clone(),
            engine,
            template: self.template.as_ref().map(|path| read_text(Some(path))).transpose()?,
            host: self.host,
            port: self.port,
            keys,
            cors: self.cors.clone(),
            allowed_hosts: self.allowed_host.clone(),
            vectors: open_vectors(&self.control_vector)?,
            uploads: self.allow_uploads,
            state_dir: self.state_dir.clone(),
            profile: self.profile,
            limits: Limits {
                max_tokens: limits.max_tokens.map(|n| n as usize),
                queue: limits.max_queue as usize,
                connections: limits.max_connections as usize,
                body: (limits.max_body as usize) << 20,
                prefixes: limits.max_prefixes as usize,
                prefix_bytes: u64::from(limits.state_limit) << 20,
                request: Duration::from_secs(limits.request_timeout),
                idle: Duration::from_secs(limits.idle_timeout),
                grace: Duration::from_secs(limits.grace.into()),
                ..Limits::default()
            },
            ..Options::new(self.models.clone())
        })
    }
}
