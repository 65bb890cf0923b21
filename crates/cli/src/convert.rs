//! `puna convert`: a model as one GGUF file.

use crate::error::Error;
use crate::inspect::bytes;
use crate::interrupt;
use crate::options::print_notices;
use crate::progress::{Progress, Unit};
use clap::Args;
use puna::{Conversion, ConvertOptions, ModelFiles, Pool};
use puna_kernels::DType;
use puna_kernels::dtype::FORMATS;
use puna_model::convert::Target;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Arguments of `puna convert`.
#[derive(Args)]
pub struct ConvertArgs {
    /// Hugging Face folder; or a GGUF file, any of a split one, to get one file of it, or one of another type
    model: PathBuf,
    /// GGUF file to write; it appears when it is complete
    out: PathBuf,
    /// Type of the weights: auto, or f32, f16, bf16, q8_0, q4_k, ..
    ///
    /// With auto nothing is lost: F32, F16 and BF16 stay as they are, and FP8 times its scales becomes F32. Norms,
    /// biases and routers are F32 in any case. Rows that are not whole blocks of a type become q8_0, or f16; types
    /// below q8_0 leave the output (or the embedding that serves as one) in q6_k.
    #[arg(long = "type", value_name = "TYPE", default_value = "auto", value_parser = target)]
    target: Target,
    /// Name of the pre-tokenizer (tokenizer.ggml.pre), where the tokenizer has none that GGUF knows
    #[arg(long, value_name = "NAME")]
    pre: Option<String>,
    /// Name of the model (general.name) [default: what the folder is called]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Replace OUT if it is there
    #[arg(long)]
    force: bool,
    /// Threads [default: physical cores]
    #[arg(long, short = 't', value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
}

fn target(name: &str) -> Result<Target, String> {
    match DType::from_name(name).filter(|dtype| dtype.can_quantize()) {
        Some(dtype) => Ok(Target::Format(dtype)),
        None if name == "auto" => Ok(Target::Keep),
        None => {
            let all = FORMATS.iter().map(|f| f.dtype).filter(|d| d.can_quantize()).map(|d| d.name().to_lowercase());
            Err(format!("expected auto or one of {}", all.collect::<Vec<_>>().join(", ")))
        }
    }
}

/// Runs the command.
pub fn run(args: &ConvertArgs) -> Result<(), Error> {
    let files = ModelFiles::open(&args.model)?;
    print_notices(files.notices());
    let options = ConvertOptions { target: args.target, pre: args.pre.clone(), name: args.name.clone() };
    let conversion = Conversion::new(&files, &args.out, &options)?;
    print_notices(conversion.notices());
    // A file in the making is removed; without this it would be left behind.
    let interrupted = Arc::new(AtomicBool::new(false));
    interrupt::catch(&interrupted)?;
    let mut progress = Progress::new("writing", Unit::Bytes);
    let threads = args.threads.map_or_else(Pool::default_threads, usize::from);
    let written = conversion.write(args.force, threads, &mut |done, total| {
        progress.update(done, total);
        if interrupted.load(Ordering::SeqCst) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    progress.finish();
    let n: usize = written.types.iter().map(|(_, n, _)| n).sum();
    let types = written.types.iter().map(|(ty, n, sum)| format!("{n} {ty} ({})", bytes(*sum)));
    let types = types.collect::<Vec<_>>().join(", ");
    let out = puna_model::error::shown(&args.out).to_string();
    writeln!(std::io::stdout(), "{out}: {}, {n} tensors: {types}", bytes(written.bytes))?;
    Ok(())
}
