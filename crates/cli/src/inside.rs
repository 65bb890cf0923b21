//! Options and reports of what happens inside a model: steering, residuals, phases, experts.

use crate::error::Error;
use crate::files;
use clap::{Args, ValueEnum};
use puna::steering::Part;
use puna::{Captured, ControlVector, ExpertCounts, ExpertStats, Phase, Positions, Steering, Timings, Trace};
use puna_model::Config;
use puna_server::openai::Vectors;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Control vectors.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Steering")]
pub struct SteeringArgs {
    /// Control vector (GGUF) to add to the residual, and how strongly; may be repeated
    #[arg(long, value_name = "FILE[:X]")]
    control_vector: Vec<String>,
    /// Strength of the control vectors that come without one [default: 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true, requires = "control_vector")]
    control_strength: Option<f32>,
    /// Layers whose directions are added, from 1 on [default: all]
    #[arg(long, value_name = "A-B", value_parser = range, requires = "control_vector")]
    control_layers: Option<RangeInclusive<usize>>,
}

impl SteeringArgs {
    /// What is asked for, checked against the model; `None` if nothing is.
    pub fn steering(&self, config: &Config) -> Result<Option<Arc<Steering>>, Error> {
        let vectors = self.control_vector.iter().map(|arg| {
            let (path, strength) = file_and_strength(arg);
            let strength = strength.or(self.control_strength).unwrap_or(1.0);
            Ok((ControlVector::open(path)?, strength))
        });
        let vectors = vectors.collect::<Result<Vec<_>, Error>>()?;
        let part = |(vector, strength)| Part { vector, strength, layers: self.control_layers.clone() };
        let parts: Vec<Part> = vectors.iter().map(|(vector, strength)| part((vector, *strength))).collect();
        if parts.is_empty() { Ok(None) } else { Ok(Some(Arc::new(Steering::new(config, &parts)?))) }
    }
}

/// Control vectors by name, for requests to choose from. What they are called is all that errors tell of them.
pub fn open_vectors(named: &[(String, String)]) -> Result<Vectors, Error> {
    let vectors = Vectors::default();
    for (name, path) in named {
        let vector = ControlVector::open(path)?;
        if !vectors.add(name, ControlVector::new(name, vector.directions().clone())?) {
            return Err(Error::Input(format!("two control vectors are called {name:?}")));
        }
    }
    Ok(vectors)
}

/// `FILE:STRENGTH` or a file, which may have a colon in its name.
fn file_and_strength(arg: &str) -> (PathBuf, Option<f32>) {
    match arg.rsplit_once(':').map(|(path, strength)| (path, strength.parse())) {
        Some((path, Ok(strength))) if !path.is_empty() && !Path::new(arg).exists() => (path.into(), Some(strength)),
        _ => (arg.into(), None),
    }
}

/// `A-B`, or one layer.
pub fn range(text: &str) -> Result<RangeInclusive<usize>, String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (first.parse(), last.parse()) {
        (Ok(first), Ok(last)) if first <= last => Ok(first..=last),
        _ => Err("expected A-B, two numbers of layers of which the first is not larger".into()),
    }
}

/// Residuals.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Residuals")]
pub struct CaptureArgs {
    /// Write the residual as these layers leave it: numbers from 0 on and ranges, separated by commas, or all
    #[arg(long, value_name = "LAYERS", value_parser = layers)]
    capture: Option<Layers>,
    /// Of which positions: the prompt's last, all of the prompt, or all
    #[arg(long, value_enum, default_value_t, requires = "capture")]
    capture_positions: PositionsArg,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum PositionsArg {
    #[default]
    Last,
    Prompt,
    All,
}

/// Layers as they are asked for; `None`: all.
#[derive(Clone, Debug)]
struct Layers(Option<Vec<RangeInclusive<usize>>>);

fn layers(text: &str) -> Result<Layers, String> {
    if text == "all" {
        return Ok(Layers(None));
    }
    text.split(',').map(range).collect::<Result<_, _>>().map(|ranges| Layers(Some(ranges)))
}

impl CaptureArgs {
    /// Whether anything is asked for.
    pub fn is_wanted(&self) -> bool {
        self.capture.is_some()
    }

    /// The layers, each once in rising order, and positions; `None` if nothing is asked for.
    pub fn wanted(&self, config: &Config) -> Result<Option<(Vec<usize>, Positions)>, Error> {
        let Some(Layers(ranges)) = &self.capture else { return Ok(None) };
        let n_layers = config.n_layers;
        if let Some(range) = ranges.iter().flatten().find(|range| *range.end() >= n_layers) {
            return Err(puna::Error::CaptureLayer { layer: *range.end(), n_layers }.into());
        }
        let is_wanted = |layer: &usize| ranges.as_ref().is_none_or(|ranges| ranges.iter().any(|r| r.contains(layer)));
        let positions = match self.capture_positions {
            PositionsArg::Last => Positions::Last,
            PositionsArg::Prompt => Positions::Prompt,
            PositionsArg::All => Positions::All,
        };
        Ok(Some(((0..n_layers).filter(is_wanted).collect(), positions)))
    }
}

/// Residuals that were handed out: by layer, positions and rows.
#[derive(Clone, Default)]
pub struct Residuals(Arc<Mutex<BTreeMap<usize, Rows>>>);

/// Rows of a layer.
#[derive(Clone, Default)]
struct Rows {
    positions: Vec<i64>,
    /// Little-endian, `[n, dim]`.
    bytes: Vec<u8>,
}

impl Residuals {
    /// What takes the rows.
    pub fn sink(&self) -> Arc<dyn Fn(Captured) + Send + Sync> {
        let layers = self.0.clone();
        Arc::new(move |row: Captured| {
            let mut layers = layers.lock().unwrap_or_else(PoisonError::into_inner);
            let rows = layers.entry(row.layer).or_default();
            rows.positions.push(row.position as i64);
            rows.bytes.extend(row.residual.iter().flat_map(|x| x.to_le_bytes()));
        })
    }

    /// Writes `layer.N` [n, dim], `positions` [n] and the `tokens` [n] there, of which `ids` are all.
    pub fn write(&self, path: &Path, dim: usize, ids: &[u32]) -> Result<(), Error> {
        let layers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let positions = layers.values().next().map_or(&[][..], |rows| &rows.positions);
        let tokens = positions.iter().map(|&at| ids.get(at as usize).map_or(-1, |&id| i64::from(id)));
        let i64s = |values: &mut dyn Iterator<Item = i64>| values.flat_map(i64::to_le_bytes).collect::<Vec<u8>>();
        let [at, tokens] = [i64s(&mut positions.iter().copied()), i64s(&mut tokens.into_iter())];
        let n = positions.len();
        let view = |name: String, dtype, shape, bytes| Ok((name, TensorView::new(dtype, shape, bytes)?));
        let rows = layers.iter().map(|(l, rows)| view(format!("layer.{l}"), Dtype::F32, vec![n, dim], &rows.bytes));
        let more = [("positions", &at), ("tokens", &tokens)];
        let more = more.into_iter().map(|(name, bytes)| view(name.into(), Dtype::I64, vec![n], bytes));
        let views = rows.chain(more).collect::<Result<Vec<_>, safetensors::SafeTensorError>>();
        files::write(path, |part| safetensors::serialize_to_file(views?, None, part))
    }
}

/// A table of phases: time, its part of the whole, bytes read, and how that compares with what the machine's memory gives
/// at best.
pub fn print_timings(timings: &Timings, wall: Duration, bandwidth: Option<f64>) {
    let total = timings.total().as_secs_f64().max(f64::MIN_POSITIVE);
    eprintln!("{:>12} {:>10} {:>7} {:>10} {:>7} {:>10}", "phase", "ms", "%", "MB", "GB/s", "of machine");
    for (phase, time, bytes) in timings.phases() {
        let seconds = time.as_secs_f64();
        let mut line = format!("{:>12} {:>10.2} {:>7.2}", phase.name(), seconds * 1e3, seconds / total * 100.0);
        if bytes > 0 {
            let _ = write!(line, " {:>10.1}", bytes as f64 / 1e6);
        }
        // Files are read beside what is computed: only the wait is a phase.
        if bytes > 0 && phase != Phase::ExpertReads {
            let rate = bytes as f64 / seconds;
            let share = bandwidth.map_or(String::new(), |best| format!("{:.0} %", rate / best * 100.0));
            let _ = write!(line, " {:>7.1} {share:>10}", rate / 1e9);
        }
        eprintln!("{line}");
    }
    let (sum, wall) = (total * 1e3, wall.as_secs_f64() * 1e3);
    eprintln!("{:>12} {sum:>10.2} of {wall:.2} ms that passed", "total");
    if let Some(best) = bandwidth {
        eprintln!("{:>12} {:>10.1} GB/s are read at best", "memory", best / 1e9);
    }
}

/// Experts that a line of the table names.
const NAMED: usize = 6;

/// A line a layer: choices, experts chosen at all, and those chosen most, by their part of the choices.
pub fn print_experts(counts: &ExpertCounts) {
    eprintln!("{:>12} {:>10} {:>12}  most chosen", "layer", "choices", "of experts");
    for (layer, counts) in counts.layers().enumerate().filter(|(_, counts)| counts.iter().any(|&n| n > 0)) {
        let total: u64 = counts.iter().sum();
        let chosen = counts.iter().filter(|&&n| n > 0).count();
        let mut order: Vec<usize> = (0..counts.len()).collect();
        order.sort_by_key(|&e| std::cmp::Reverse(counts[e]));
        let most = order.iter().take(NAMED.min(chosen));
        let most: Vec<String> =
            most.map(|&e| format!("{e} ({:.0} %)", counts[e] as f64 / total as f64 * 100.0)).collect();
        eprintln!("{layer:>12} {total:>10} {:>12}  {}", format!("{chosen} of {}", counts.len()), most.join(", "));
    }
}

/// What became of experts that are not all in memory.
pub fn print_expert_stats(e: &ExpertStats) {
    let wanted = (e.hits + e.misses).max(1);
    eprintln!(
        "[experts: {} of {} in memory at once; {:.0} % of {wanted} were there, {} read ahead, {} gave way; \
         {:.1} MB read, {:.2} s of waiting]",
        e.slots,
        e.experts,
        100.0 * e.hits as f64 / wanted as f64,
        e.prefetched,
        e.evictions,
        e.bytes_read as f64 / 1e6,
        e.stall.as_secs_f64(),
    );
}

/// The same as JSON.
pub fn expert_stats_json(e: &ExpertStats) -> Value {
    json!({
        "slots": e.slots,
        "experts": e.experts,
        "hits": e.hits,
        "misses": e.misses,
        "prefetched": e.prefetched,
        "evictions": e.evictions,
        "bytes_read": e.bytes_read,
        "stall_s": e.stall.as_secs_f64(),
    })
}

/// Writes a trace as JSON.
pub fn write_trace(trace: &Trace, path: &Path) -> Result<(), Error> {
    files::write(path, |part| {
        let mut out = BufWriter::new(File::create(part)?);
        trace.write(&mut out).and_then(|()| out.flush())
    })?;
    if trace.dropped() > 0 {
        eprintln!("puna: {}: holds the first {} events; {} more came", path.display(), trace.len(), trace.dropped());
    }
    Ok(())
}
