//! `puna bench`: speed of prompts, generation and batches, as JSON lines that other engines' benchmarks can be laid
//! beside.

mod draft;

use crate::error::Error;
use crate::files;
use crate::inside::{print_timings, write_trace};
use crate::options::{DraftArgs, LoadArgs, print_notices};
use clap::Args;
use puna_kernels::Isa;
use puna_model::{Batch, KvCache, Model, Outputs, SeqId, Source, Stopwatch, Timings, Trace};
use serde_json::{Map, Value, json};
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Arguments of `puna bench`.
#[derive(Args)]
pub struct BenchArgs {
    /// GGUF file, or folder with config.json and safetensors
    model: PathBuf,
    /// Prompt lengths
    #[arg(short = 'p', long, value_delimiter = ',', default_value = "512", conflicts_with = "draft")]
    prompt: Vec<usize>,
    /// Tokens to generate
    #[arg(short = 'n', long, default_value_t = 64)]
    generate: usize,
    /// Numbers of sequences that generate in step
    #[arg(short = 'b', long, value_delimiter = ',', default_value = "1")]
    batch: Vec<usize>,
    /// Positions in the cache before generation is timed
    #[arg(short = 'd', long, value_delimiter = ',', default_value = "0", conflicts_with = "draft")]
    depth: Vec<usize>,
    /// Times each test is repeated
    #[arg(short = 'r', long, default_value_t = 3)]
    repeat: usize,
    /// Tell where the time of each test went
    #[arg(long)]
    profile: bool,
    /// Write what happened when, for chrome://tracing and Perfetto
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// With --draft: a text to answer [default: a piece of code that is to be repeated with a name changed]
    #[arg(short = 'f', long, value_name = "FILE", requires = "draft")]
    file: Option<PathBuf>,
    #[command(flatten)]
    draft: DraftArgs,
    #[command(flatten)]
    load: LoadArgs,
}

/// Rows of a step of a prompt.
const CHUNK: usize = 512;

/// Runs the command.
pub fn run(args: &BenchArgs) -> Result<(), Error> {
    args.trace.iter().try_for_each(|path| files::check(path))?;
    if let Some(wish) = args.draft.engine() {
        return draft::run(args, wish);
    }
    let options = args.load.load();
    let start = Instant::now();
    let source = Source::open(&args.model)?;
    let model = Model::load(&source, &options, &mut |_, _| {})?;
    let seconds = start.elapsed().as_secs_f64();
    print_notices(model.notices());
    let trace = args.trace.as_ref().map(|_| Trace::new(Trace::MAX_EVENTS));
    let watch = (args.profile || trace.is_some()).then(|| Stopwatch::new(trace));
    let (batch, timings) = (Batch::default(), Timings::default());
    let mut bench =
        Bench { model, args, isa: options.isa, random: 1, batch, watch, timings, bandwidth: None, peak_mb: None };
    bench.print("load", fields(json!({ "seconds": round(seconds, 3) })))?;
    for &n in &args.prompt {
        bench.prompt(n)?;
    }
    for &depth in &args.depth {
        bench.generate(&format!("tg{}@d{depth}", args.generate), 1, depth)?;
    }
    for &n in args.batch.iter().filter(|&&n| n > 1) {
        bench.generate(&format!("b{n}"), n, 16)?;
    }
    match (&args.trace, bench.watch.as_mut().and_then(Stopwatch::take_trace)) {
        (Some(path), Some(trace)) => write_trace(&trace, path),
        _ => Ok(()),
    }
}

struct Bench<'a> {
    model: Model,
    args: &'a BenchArgs,
    isa: Isa,
    random: u64,
    batch: Batch,
    watch: Option<Stopwatch>,
    /// Of the rounds of the current test that count.
    timings: Timings,
    /// Bytes a second that the machine read before or after the current test.
    bandwidth: Option<f64>,
    /// The most memory that was held before the bandwidth was measured, which takes some.
    peak_mb: Option<u64>,
}

impl Bench<'_> {
    fn token(&mut self) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random % self.model.config().vocab_size as u64) as u32
    }

    fn feed(&mut self, kv: &mut KvCache, seq: SeqId, n: usize) -> Result<(), Error> {
        let mut done = kv.len(seq).unwrap_or(0);
        let end = done + n;
        while done < end {
            let tokens: Vec<u32> = (0..CHUNK.min(end - done)).map(|_| self.token()).collect();
            let last = done + tokens.len() == end;
            self.batch.clear();
            self.batch.push(seq, done, &tokens, if last { Outputs::Last } else { Outputs::None });
            self.forward(kv)?;
            done += tokens.len();
        }
        Ok(())
    }

    fn prompt(&mut self, n: usize) -> Result<(), Error> {
        let mut samples = Vec::new();
        for round in 0..=self.args.repeat {
            let mut kv = self.model.kv_cache(self.args.load.kv);
            let seq = kv.add();
            let (begin, start) = (self.begin(), Instant::now());
            // The first round warms up.
            self.feed(&mut kv, seq, if round == 0 { n.min(64) } else { n })?;
            if round > 0 {
                samples.push(start.elapsed().as_secs_f64());
                self.count(&begin);
            }
        }
        let (layers, head) = self.model.ops_per_row();
        let more = rate("gop_s", (layers * n + head) as f64, &samples);
        self.row(&format!("pp{n}"), &samples, n, more)
    }

    fn generate(&mut self, test: &str, n_seqs: usize, depth: usize) -> Result<(), Error> {
        let n = self.args.generate;
        let mut samples = Vec::new();
        let mut kv_bytes = 0;
        let before = self.read_bandwidth();
        for _ in 0..self.args.repeat {
            let mut kv = self.model.kv_cache(self.args.load.kv);
            let seqs: Vec<SeqId> = (0..n_seqs).map(|_| kv.add()).collect();
            for &seq in &seqs {
                self.feed(&mut kv, seq, depth)?;
            }
            if n_seqs == 1 {
                self.step(&mut kv, &seqs)?;
            }
            let (begin, start) = (self.begin(), Instant::now());
            for _ in 0..n {
                self.step(&mut kv, &seqs)?;
            }
            samples.push(start.elapsed().as_secs_f64());
            self.count(&begin);
            kv_bytes = kv.bytes_held();
        }
        let (layers, head) = self.model.ops_per_row();
        let bytes = (self.model.bytes_per_step() + kv_bytes) as f64 * n as f64;
        let mut more = rate("gb_s", bytes, &samples);
        more.extend(rate("gop_s", ((layers + head) * n * n_seqs) as f64, &samples));
        self.bandwidth = before.zip(self.read_bandwidth()).map(|(before, after)| before.max(after));
        if let Some(bandwidth) = self.bandwidth {
            let best = samples.iter().copied().fold(f64::INFINITY, f64::min);
            more.insert("read_gb_s".into(), json!(round(bandwidth / 1e9, 1)));
            more.insert("read_share".into(), json!(round(bytes / best / bandwidth, 2)));
        }
        self.row(test, &samples, n * n_seqs, more)
    }

    fn step(&mut self, kv: &mut KvCache, seqs: &[SeqId]) -> Result<(), Error> {
        self.batch.clear();
        for &seq in seqs {
            let token = self.token();
            self.batch.push(seq, kv.len(seq).unwrap_or(0), &[token], Outputs::Last);
        }
        self.forward(kv)
    }

    fn forward(&mut self, kv: &mut KvCache) -> Result<(), Error> {
        self.watch.iter().for_each(Stopwatch::begin_step);
        self.model.forward_timed(&self.batch, kv, &mut (), self.watch.as_ref())?;
        self.watch.iter().for_each(|watch| watch.end_step(self.batch.rows.len(), self.batch.spans.len()));
        Ok(())
    }

    /// A round begins: what was measured so far.
    fn begin(&self) -> Timings {
        self.watch.iter().for_each(Stopwatch::skip);
        self.watch.as_ref().map(Stopwatch::timings).unwrap_or_default()
    }

    /// A round ends that counts.
    fn count(&mut self, begin: &Timings) {
        let new = self.watch.as_ref().map(Stopwatch::timings).unwrap_or_default().since(begin);
        self.timings.add_share(&new, 1.0);
    }

    /// Measures how fast the machine reads just now, without counting the memory that takes.
    fn read_bandwidth(&mut self) -> Option<f64> {
        self.peak_mb = self.peak_mb.max(peak_memory_mb());
        let bandwidth = self.model.read_bandwidth();
        // Linux forgets the peak; elsewhere it is not told.
        let _ = std::fs::write("/proc/self/clear_refs", "5");
        bandwidth
    }

    fn row(&mut self, test: &str, seconds: &[f64], tokens: usize, more: Map<String, Value>) -> Result<(), Error> {
        if seconds.is_empty() {
            return Ok(());
        }
        let mut fields = speeds(seconds.iter().map(|s| tokens as f64 / s).collect());
        fields.extend(self.machine());
        fields.extend(more);
        self.print(test, fields)?;
        let timings = std::mem::take(&mut self.timings);
        if self.args.profile {
            eprintln!("{test}:");
            print_timings(&timings, Duration::from_secs_f64(seconds.iter().sum()), self.bandwidth);
        }
        Ok(())
    }

    fn machine(&self) -> Map<String, Value> {
        fields(json!({
            "threads": self.model.threads(),
            "isa": self.isa.name(),
            "kv": self.args.load.kv.for_heads_of(self.model.config().head_dim).name(),
        }))
    }

    fn print(&self, test: &str, fields: Map<String, Value>) -> Result<(), Error> {
        print(test, fields, self.peak_mb)
    }
}

/// An object's fields.
fn fields(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

/// Tokens a second of rounds, of which there is one at least.
fn speeds(mut rates: Vec<f64>) -> Map<String, Value> {
    rates.sort_by(f64::total_cmp);
    fields(json!({
        "avg_ts": round(rates.iter().sum::<f64>() / rates.len() as f64, 2),
        "median_ts": round(median(&rates), 2),
        "min_ts": round(rates[0], 2),
        "max_ts": round(rates[rates.len() - 1], 2),
    }))
}

/// Of sorted numbers, one at least.
fn median(sorted: &[f64]) -> f64 {
    let mid = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[mid] } else { (sorted[mid - 1] + sorted[mid]) / 2.0 }
}

/// A line. `peak_mb`: memory that was held at some time.
fn print(test: &str, more: Map<String, Value>, peak_mb: Option<u64>) -> Result<(), Error> {
    let mut line = fields(json!({ "engine": "puna", "test": test }));
    line.extend(more);
    if let Some(mb) = peak_mb.max(peak_memory_mb()) {
        line.insert("peak_mb".into(), json!(mb));
    }
    writeln!(std::io::stdout(), "{}", Value::Object(line))?;
    Ok(())
}

/// 10^9 a second, in the fastest of the rounds.
fn rate(name: &str, amount: f64, seconds: &[f64]) -> Map<String, Value> {
    let best = seconds.iter().copied().fold(f64::INFINITY, f64::min);
    Map::from_iter([(name.to_owned(), json!(round(amount / best / 1e9, 1)))])
}

fn round(x: f64, digits: i32) -> f64 {
    let factor = 10f64.powi(digits);
    (x * factor).round() / factor
}

/// The most memory this process has held, in MB, where the system tells.
fn peak_memory_mb() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    // The system's kB are 1024 bytes.
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024 / 1_000_000)
}
