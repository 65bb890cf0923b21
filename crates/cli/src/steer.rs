//! `puna steer-train`: a control vector from pairs of prompts.

use crate::error::Error;
use crate::inside::range;
use crate::options::{RunOptions, print_notices};
use crate::progress::{Progress, Unit};
use crate::tokenize::read_text;
use clap::Args;
use puna::{ControlVector, Engine, ModelFiles};
use puna_text::EncodeOptions;
use serde_json::json;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

/// Arguments of `puna steer-train`.
#[derive(Args)]
pub struct SteerTrainArgs {
    /// GGUF file, or folder with config.json and safetensors
    model: PathBuf,
    /// Prompts that show what is wanted, one a line
    positive: PathBuf,
    /// As many prompts that show the opposite, in the same order
    negative: PathBuf,
    /// The control vector (GGUF) to write
    out: PathBuf,
    /// Layers that get a direction, from 1 on [default: all]
    #[arg(long, value_name = "A-B", value_parser = range)]
    layers: Option<RangeInclusive<usize>>,
    /// Make every direction's length 1
    #[arg(long)]
    normalize: bool,
    /// Take each line as a message to the model, by its chat template
    #[arg(long)]
    chat: bool,
    /// Replace OUT if it is there
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    options: RunOptions,
}

/// A direction is the mean difference of residuals after the prompts' last tokens.
pub fn train(args: &SteerTrainArgs) -> Result<(), Error> {
    let [positive, negative] = [&args.positive, &args.negative].map(|path| lines(path));
    let (positive, negative) = (positive?, negative?);
    if positive.len() != negative.len() {
        let what = format!("{} prompts beside {} of {}", negative.len(), positive.len(), args.positive.display());
        return Err(Error::file(&args.negative, what));
    }
    let files = ModelFiles::open(&args.model)?;
    files.require_tokenizer()?;
    let mut loading = Progress::new("loading", Unit::Bytes);
    let mut engine = Engine::from_files(files, &args.options.engine(), &mut |done, total| loading.update(done, total))?;
    loading.finish();
    print_notices(engine.notices());
    let encode = |path: &Path, (i, line): (usize, &String)| {
        let ids = if args.chat {
            engine.chat_prompt(&[json!({ "role": "user", "content": line })], None)
        } else {
            let ids = engine.tokenizer()?.encode(line, EncodeOptions::default());
            ids.map_err(|e| puna::Error::text(&args.model, e))
        };
        ids.map_err(|e| Error::file(path, format!("line {}: {e}", i + 1)))
    };
    let pair = |(i, (p, n))| Ok((encode(&args.positive, (i, p))?, encode(&args.negative, (i, n))?));
    let pairs = positive.iter().zip(&negative).enumerate().map(pair).collect::<Result<Vec<_>, Error>>()?;
    let layers = args.layers.clone().unwrap_or(1..=engine.config().n_layers - 1);
    let mut progress = Progress::new("computing", Unit::Texts);
    let vector = engine.train_control_vector(&pairs, layers, |done| progress.update(2 * done as u64, 0))?;
    progress.finish();
    let vector = if args.normalize { normalized(&vector)? } else { vector };
    vector.write(&args.out, engine.config().arch, args.force)?;
    eprintln!("{}: {} directions of {} pairs", args.out.display(), vector.directions().len(), pairs.len());
    Ok(())
}

fn lines(path: &Path) -> Result<Vec<String>, Error> {
    let text = read_text(Some(&path.to_owned()))?;
    Ok(text.lines().map(str::to_owned).collect())
}

/// Each direction divided by its length.
fn normalized(vector: &ControlVector) -> Result<ControlVector, Error> {
    let unit = |values: &Vec<f32>| {
        let square: f64 = values.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        let length = if square > 0.0 { square.sqrt() } else { 1.0 };
        values.iter().map(|&x| (f64::from(x) / length) as f32).collect()
    };
    let directions = vector.directions().iter().map(|(&layer, values)| (layer, unit(values))).collect();
    Ok(ControlVector::new(vector.path(), directions)?)
}
