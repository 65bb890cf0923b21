//! `puna perplexity`: how well a model predicts a text.

use crate::error::Error;
use crate::inside::SteeringArgs;
use crate::options::{RunOptions, print_notices};
use crate::progress::{Progress, Unit};
use crate::tokenize::read_text;
use clap::Args;
use puna::ModelFiles;
use puna::sampler::LogSoftmax;
use puna_model::{Batch, Model, Outputs};
use puna_text::EncodeOptions;
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;

/// Arguments of `puna perplexity`.
#[derive(Args)]
pub struct PerplexityArgs {
    /// GGUF file, or folder with config.json and safetensors
    model: PathBuf,
    /// The text; - is standard input
    #[arg(short = 'f', long, value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    steering: SteeringArgs,
    #[command(flatten)]
    options: RunOptions,
}

/// Prints a JSON object: tokens predicted, mean negative log-likelihood in nats, perplexity.
///
/// The text is cut into windows of the context. Within a window every token but the first is predicted from those
/// before it.
pub fn run(args: &PerplexityArgs) -> Result<(), Error> {
    let text = read_text(Some(&args.file))?;
    let files = ModelFiles::open(&args.model)?;
    let tokenizer = files.require_tokenizer()?;
    let ids = tokenizer.encode(&text, EncodeOptions::default()).map_err(|e| puna::Error::text(&args.model, e))?;
    let options = args.options.engine();
    let mut loading = Progress::new("loading", Unit::Bytes);
    let mut model = Model::load(files.checkpoint(), &options.load, &mut |done, total| loading.update(done, total))?;
    loading.finish();
    print_notices(model.notices());
    let steering = args.steering.steering(model.config())?;
    print_notices(model.kv_cache(options.kv).notice(options.kv).as_slice());
    let own = model.config().context_length;
    let window = options.ctx.unwrap_or(own.min(puna::engine::DEFAULT_CTX));
    if ids.len() < 2 || window < 2 {
        let what = format!("{} tokens in windows of {window}: at least two of each are needed", ids.len());
        return Err(Error::Input(what));
    }
    let mut progress = Progress::new("computing", Unit::Tokens);
    let mut sum = Sum::default();
    for (i, window_ids) in ids.chunks(window).enumerate() {
        let mut kv = model.kv_cache(options.kv);
        let seq = kv.add();
        let mut batch = Batch::default();
        for start in (0..window_ids.len()).step_by(options.chunk) {
            let end = window_ids.len().min(start + options.chunk);
            batch.clear();
            batch.push(seq, start, &window_ids[start..end], Outputs::All);
            batch.spans[0].total = window_ids.len();
            steering.iter().for_each(|steering| batch.steer(steering));
            let vocab = model.config().vocab_size;
            let logits = model.forward(&batch, &mut kv)?;
            for (row, &next) in logits.chunks_exact(vocab).zip(&window_ids[start + 1..]) {
                let nll = -LogSoftmax::new(row).map_err(puna::Error::from)?.get(next).unwrap_or(f64::NAN);
                sum.add(nll);
            }
            progress.update((i * window + end) as u64, ids.len() as u64);
        }
    }
    progress.finish();
    let nll = sum.value / sum.tokens as f64;
    writeln!(std::io::stdout(), "{}", json!({ "tokens": sum.tokens, "nll": nll, "perplexity": nll.exp() }))?;
    Ok(())
}

#[derive(Default)]
struct Sum {
    tokens: usize,
    value: f64,
}

impl Sum {
    fn add(&mut self, nll: f64) {
        self.tokens += 1;
        self.value += nll;
    }
}
