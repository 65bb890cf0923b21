//! `puna eval`: logits and hidden states of given token ids, for comparison with a reference.

use crate::error::Error;
use crate::files;
use crate::inside::{CaptureArgs, SteeringArgs};
use crate::options::{LoadArgs, print_notices};
use clap::Args;
use puna::{ModelFiles, Positions};
use puna_kernels::{Acts, Isa, KvType};
use puna_model::batch::MAX_POSITIONS;
use puna_model::{BackendKind, Batch, Grown, KvCache, LoadOptions, Model, Prompt, Row, SeqId, Steering, Tap};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Arguments of `puna eval`.
#[derive(Args)]
pub struct EvalArgs {
    /// GGUF file, or folder with config.json and safetensors
    model: PathBuf,
    /// Token ids, separated by commas
    #[arg(long, value_delimiter = ',', required_unless_present = "input", conflicts_with = "input")]
    tokens: Vec<i64>,
    /// Safetensors file with input_ids [T], i64; optionally image_embeds [n, dim] f32 and image_mask [T] u8
    #[arg(long, value_name = "IN")]
    input: Option<PathBuf>,
    /// Safetensors file to write: logits [T, vocabulary] and what else was asked for
    #[arg(long)]
    out: PathBuf,
    /// Also write hidden_states [layers + 1, T, dim] and mean_pooled [dim] of the prompt
    #[arg(long)]
    hidden_states: bool,
    /// Also choose N further tokens, each the most likely one; end tokens do not end
    #[arg(long, value_name = "N", default_value_t = 0)]
    greedy: usize,
    /// Positions computed in one step
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(1..))]
    chunk: u64,
    /// JSON list of token lists that run in the same batches
    #[arg(long, value_name = "FILE")]
    batch_with: Option<PathBuf>,
    /// What computes: cpu, or the slow reference
    #[arg(long, default_value = "auto", value_parser = ["auto", "cpu", "reference"])]
    backend: String,
    #[command(flatten)]
    capture: CaptureArgs,
    #[command(flatten)]
    steering: SteeringArgs,
    #[command(flatten)]
    load: LoadArgs,
}

/// Runs the command.
pub fn run(args: &EvalArgs) -> Result<(), Error> {
    files::check(&args.out)?;
    // The whole model is checked, its tokenizer too.
    let files = ModelFiles::open(&args.model)?;
    let backend = if args.backend == "reference" { BackendKind::Reference } else { BackendKind::Cpu };
    let options = LoadOptions { backend, ..args.load.load() };
    let mut model = Model::load(files.checkpoint(), &options, &mut |_, _| {})?;
    let input = match &args.input {
        Some(path) => Input::read(path, model.config().dim)?,
        None => Input { ids: args.tokens.clone(), ..Input::default() },
    };
    let others = args.batch_with.as_deref().map(companions).transpose()?.unwrap_or_default();
    let mut kv = model.kv_cache(args.load.kv);
    print_notices(model.notices());
    print_notices(kv.notice(args.load.kv).as_slice());
    let mut eval = Eval::new(&mut model, &mut kv, input, others, args)?;
    eval.prompt()?;
    eval.greedy(args.greedy)?;
    eval.residuals();
    let result = eval.result;
    result.write(&args.out, &model, options.isa, kv.kind())
}

/// What is evaluated.
#[derive(Default)]
struct Input {
    ids: Vec<i64>,
    /// Positions whose embedding is a row of `embeds`.
    mask: Vec<u8>,
    /// `[n, dim]`
    embeds: Vec<f32>,
    /// `[k, n, dim]`
    deepstack: Vec<f32>,
    /// Time, height, width of each position.
    positions: Vec<[u32; 3]>,
    /// What later positions are ahead of their place.
    rope_delta: i64,
}

impl Input {
    fn read(path: &Path, dim: usize) -> Result<Input, Error> {
        let bytes = std::fs::read(path).map_err(|e| Error::file(path, e))?;
        let file = SafeTensors::deserialize(&bytes).map_err(|e| Error::file(path, e))?;
        let get = |name: &str, dtype: Dtype| match file.tensor(name) {
            Ok(t) if t.dtype() == dtype => Ok(Some(t.data().to_vec())),
            Ok(t) => Err(Error::file(path, format!("{name}: expected {dtype:?}, found {:?}", t.dtype()))),
            Err(_) => Ok(None),
        };
        let ids = get("input_ids", Dtype::I64)?.ok_or_else(|| Error::file(path, "no tensor input_ids"))?;
        let i64s = |b: Vec<u8>| -> Vec<i64> { b.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect() };
        let f32s = |b: Vec<u8>| -> Vec<f32> { b.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect() };
        let ids = i64s(ids);
        let mask = get("image_mask", Dtype::U8)?.unwrap_or_default();
        let embeds = f32s(get("image_embeds", Dtype::F32)?.unwrap_or_default());
        let deepstack = f32s(get("deepstack_embeds", Dtype::F32)?.unwrap_or_default());
        let axes = i64s(get("position_ids", Dtype::I64)?.unwrap_or_default());
        let n = ids.len();
        if !axes.is_empty() && (axes.len() != 3 * n || axes.iter().any(|p| u32::try_from(*p).is_err())) {
            return Err(Error::file(path, format!("position_ids: expected [3, {n}] numbers from 0 on")));
        }
        let position = |i: usize| [axes[i] as u32, axes[n + i] as u32, axes[2 * n + i] as u32];
        let positions = if axes.is_empty() { Vec::new() } else { (0..n).map(position).collect() };
        let rope_delta = get("rope_delta", Dtype::I64)?.map(i64s).and_then(|d| d.first().copied()).unwrap_or(0);
        if rope_delta.unsigned_abs() > MAX_POSITIONS as u64 {
            return Err(Error::file(path, format!("rope_delta: {rope_delta} is past {MAX_POSITIONS} positions")));
        }
        let images = mask.iter().filter(|&&m| m != 0).count();
        if !mask.is_empty() && (mask.len() != ids.len() || embeds.len() != images * dim) {
            let what = format!(
                "image_mask [{}] with {images} images and {} numbers of image_embeds do not fit {} ids and width {dim}",
                mask.len(),
                embeds.len(),
                ids.len()
            );
            return Err(Error::file(path, what));
        }
        Ok(Input { ids, mask, embeds, deepstack, positions, rope_delta })
    }
}

/// Sequences that run beside the one that counts.
fn companions(path: &Path) -> Result<Vec<Vec<i64>>, Error> {
    let bytes = std::fs::read(path).map_err(|e| Error::file(path, e))?;
    serde_json::from_slice(&bytes).map_err(|e| Error::file(path, format!("expected a JSON list of token lists: {e}")))
}

/// A prompt, what was generated after it, and how far both are computed.
struct Sequence {
    id: SeqId,
    prompt: Prompt,
    answer: Vec<u32>,
    /// What later positions are ahead of their place.
    rope_delta: i64,
    done: usize,
    /// How long it was when its computed rows were: what longrope goes by.
    total: usize,
}

impl Sequence {
    fn len(&self) -> usize {
        self.prompt.len() + self.answer.len()
    }

    fn is_whole(&self) -> bool {
        self.done == self.len()
    }
}

struct Eval<'a> {
    model: &'a mut Model,
    kv: &'a mut KvCache,
    /// The first is the one that counts.
    seqs: Vec<Sequence>,
    chunk: usize,
    batch: Batch,
    states: Option<HiddenStates>,
    /// What the first sequence is steered by.
    steering: Option<Arc<Steering>>,
    capture: Option<(Vec<usize>, Positions)>,
    result: Output,
}

/// What is written.
#[derive(Default)]
struct Output {
    logits: Vec<f32>,
    hidden_states: Option<Vec<f32>>,
    mean_pooled: Option<Vec<f32>>,
    prompt: usize,
    greedy: Vec<i64>,
    /// Name and rows.
    residuals: Vec<(String, Vec<f32>)>,
    steps: usize,
    rows: usize,
}

impl<'a> Eval<'a> {
    fn new(
        model: &'a mut Model,
        kv: &'a mut KvCache,
        input: Input,
        others: Vec<Vec<i64>>,
        args: &EvalArgs,
    ) -> Result<Eval<'a>, Error> {
        let vocab = model.config().vocab_size;
        let mut seqs = Vec::new();
        let Input { mut embeds, mut mask, mut deepstack, mut positions, mut rope_delta, .. } = input;
        for ids in std::iter::once(input.ids).chain(others) {
            if ids.is_empty() {
                return Err(Error::Input("a sequence to evaluate has no tokens".into()));
            }
            let mut image = 0;
            let mut row = |(i, id): (usize, i64)| {
                if mask.get(i).is_some_and(|&m| m != 0) {
                    image += 1;
                    return Ok(Row::Embed(image - 1));
                }
                match u32::try_from(id) {
                    Ok(id) if (id as usize) < vocab => Ok(Row::Token(id)),
                    _ => Err(Error::Input(format!("token id {id} is out of range: the vocabulary has {vocab}"))),
                }
            };
            let rows = ids.into_iter().enumerate().map(&mut row).collect::<Result<_, _>>()?;
            // Only the first one has more than tokens.
            let [embeds, deepstack] = [&mut embeds, &mut deepstack].map(std::mem::take);
            let prompt = Prompt { rows, embeds, deepstack, positions: std::mem::take(&mut positions) };
            prompt.check(model.config())?;
            let rope_delta = std::mem::take(&mut rope_delta);
            seqs.push(Sequence { id: kv.add(), prompt, answer: Vec::new(), rope_delta, done: 0, total: 0 });
            mask.clear();
        }
        let config = model.config();
        let capture = args.capture.wanted(config)?;
        let captured = capture.iter().flat_map(|(layers, _)| layers.iter().map(|&layer| (layer, Vec::new()))).collect();
        let states = (args.hidden_states || capture.is_some()).then(|| HiddenStates {
            captured,
            ..HiddenStates::new(if args.hidden_states { config.n_layers } else { 0 })
        });
        let steering = args.steering.steering(config)?;
        let chunk = usize::try_from(args.chunk).unwrap_or(usize::MAX);
        Ok(Eval {
            model,
            kv,
            seqs,
            chunk,
            batch: Batch::default(),
            states,
            steering,
            capture,
            result: Output::default(),
        })
    }

    /// Computes the next chunk of every sequence that has rows left; gives the logits of the first one's rows.
    fn step(&mut self) -> Result<Vec<f32>, Error> {
        self.batch.clear();
        let (rope, dim) = (&self.model.config().rope, self.model.config().dim);
        for (i, seq) in self.seqs.iter_mut().enumerate() {
            let total = seq.len();
            if seq.done > 0 && rope.is_long(seq.total) != rope.is_long(total) {
                // The whole sequence rotates otherwise from here on.
                seq.done = self.kv.truncate(seq.id, 0);
            }
            if let Some(states) = self.states.as_mut().filter(|_| i == 0 && seq.done == 0) {
                states.captured.iter_mut().for_each(|(_, rows)| rows.clear());
            }
            let n = self.chunk.min(total - seq.done);
            if n == 0 {
                continue;
            }
            let first = self.batch.rows.len() as u32;
            let grown = Grown { prompt: &seq.prompt, answer: &seq.answer, delta: seq.rope_delta };
            self.batch.push_grown(seq.id, &grown, seq.done..seq.done + n, dim);
            self.steering.iter().filter(|_| i == 0).for_each(|steering| self.batch.steer(steering));
            // Of companions only the last row's logits are read, to go on with.
            self.batch.outputs.extend(if i == 0 { first } else { first + n as u32 - 1 }..first + n as u32);
            seq.done += n;
            seq.total = total;
        }
        let vocab = self.model.config().vocab_size;
        let own = self.batch.spans.first().filter(|s| s.seq == self.seqs[0].id).map_or(0, |s| s.rows);
        let logits = match &mut self.states {
            Some(states) if own > 0 => {
                states.own = own;
                self.model.forward_with(&self.batch, self.kv, states)?
            }
            _ => self.model.forward(&self.batch, self.kv)?,
        };
        self.result.steps += 1;
        self.result.rows += self.batch.rows.len();
        // Companions decode on, so that batches stay mixed.
        let (own_logits, rest) = logits.split_at(own * vocab);
        let running = self.batch.spans.iter().filter(|s| s.seq != self.seqs[0].id);
        let next: Vec<(SeqId, Option<u32>)> =
            running.zip(rest.chunks_exact(vocab)).map(|(s, l)| (s.seq, argmax(l))).collect();
        for (id, token) in next {
            let seq = self.seqs.iter_mut().find(|s| s.id == id);
            if let (Some(seq), Some(token)) = (seq.filter(|s| s.is_whole()), token) {
                seq.answer.push(token);
            }
        }
        Ok(own_logits.to_vec())
    }

    /// Computes until the first sequence is whole; gives the logits of its last row.
    fn advance(&mut self) -> Result<Vec<f32>, Error> {
        let vocab = self.model.config().vocab_size;
        loop {
            let logits = self.step()?;
            if self.seqs[0].is_whole() {
                return Ok(logits[logits.len() - vocab..].to_vec());
            }
        }
    }

    fn prompt(&mut self) -> Result<(), Error> {
        self.result.prompt = self.seqs[0].len();
        while !self.seqs[0].is_whole() {
            let logits = self.step()?;
            self.result.logits.extend(logits);
        }
        if let Some(states) = self.states.as_mut().filter(|states| !states.layers.is_empty()) {
            let dim = self.model.config().dim;
            let last = &states.layers[self.model.config().n_layers];
            let mut mean = vec![0f64; dim];
            for (i, x) in last.iter().enumerate() {
                mean[i % dim] += f64::from(*x);
            }
            let n = self.result.prompt as f64;
            self.result.mean_pooled = Some(mean.into_iter().map(|sum| (sum / n) as f32).collect());
            self.result.hidden_states = Some(states.layers.concat());
            states.layers.clear();
        }
        Ok(())
    }

    /// Takes the residuals that were asked for, of the positions that were computed.
    fn residuals(&mut self) {
        let (Some(states), Some((_, positions))) = (self.states.take(), &self.capture) else { return };
        let (dim, prompt) = (self.model.config().dim, self.result.prompt);
        for (layer, rows) in states.captured {
            let rows = match positions {
                Positions::Last => &rows[(prompt - 1) * dim..prompt * dim],
                Positions::Prompt => &rows[..prompt * dim],
                Positions::All => &rows[..],
            };
            self.result.residuals.push((format!("layer.{layer}"), rows.to_vec()));
        }
    }

    fn greedy(&mut self, n: usize) -> Result<(), Error> {
        let vocab = self.model.config().vocab_size;
        let mut logits = self.result.logits[self.result.logits.len() - vocab..].to_vec();
        for i in 0..n {
            let token = argmax(&logits)
                .ok_or_else(|| Error::Input(format!("token {i} of --greedy: the logits are not finite")))?;
            self.result.greedy.push(i64::from(token));
            if i + 1 < n {
                self.seqs[0].answer.push(token);
                logits = self.advance()?;
            }
        }
        Ok(())
    }
}

/// The most likely token, the lowest id where equal; `None` if a logit is NaN or positive infinity.
fn argmax(logits: &[f32]) -> Option<u32> {
    let mut best = 0;
    for (i, &x) in logits.iter().enumerate() {
        if x.is_nan() || x == f32::INFINITY {
            return None;
        }
        if x > logits[best] {
            best = i;
        }
    }
    Some(best as u32)
}

/// Collects the residual of the first rows of each batch.
struct HiddenStates {
    /// `[n_layers + 1]` of `[T, dim]`
    layers: Vec<Vec<f32>>,
    /// Residuals of some layers as they leave them.
    captured: Vec<(usize, Vec<f32>)>,
    /// Rows of the batch that count.
    own: usize,
}

impl HiddenStates {
    fn new(n_layers: usize) -> HiddenStates {
        let layers = if n_layers > 0 { n_layers + 1 } else { 0 };
        HiddenStates { layers: vec![Vec::new(); layers], captured: Vec::new(), own: 0 }
    }
}

impl Tap for HiddenStates {
    fn residual(&mut self, layer: usize, x: &mut Acts) {
        if layer + 1 < self.layers.len() {
            self.layers[layer].extend(&x.values()[..self.own * x.cols()]);
        }
    }

    fn after(&mut self, layer: usize, x: &Acts) {
        if let Some((_, rows)) = self.captured.iter_mut().find(|(wanted, _)| *wanted == layer) {
            rows.extend(&x.values()[..self.own * x.cols()]);
        }
    }

    fn hidden(&mut self, h: &Acts) {
        if let Some(last) = self.layers.last_mut() {
            last.extend(&h.values()[..self.own * h.cols()]);
        }
    }

    fn wants_all_rows(&self) -> bool {
        false
    }
}

impl Output {
    fn write(&self, path: &Path, model: &Model, isa: Isa, kv: KvType) -> Result<(), Error> {
        let c = model.config();
        let mut tensors: Vec<(&str, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
        let f32s = |x: &[f32]| x.iter().flat_map(|x| x.to_le_bytes()).collect();
        tensors.push(("logits", Dtype::F32, vec![self.prompt, c.vocab_size], f32s(&self.logits)));
        if let Some(states) = &self.hidden_states {
            tensors.push(("hidden_states", Dtype::F32, vec![c.n_layers + 1, self.prompt, c.dim], f32s(states)));
        }
        if let Some(mean) = &self.mean_pooled {
            tensors.push(("mean_pooled", Dtype::F32, vec![c.dim], f32s(mean)));
        }
        for (name, rows) in &self.residuals {
            tensors.push((name, Dtype::F32, vec![rows.len() / c.dim, c.dim], f32s(rows)));
        }
        if !self.greedy.is_empty() {
            let ids = self.greedy.iter().flat_map(|id| id.to_le_bytes()).collect();
            tensors.push(("greedy", Dtype::I64, vec![self.greedy.len()], ids));
        }
        let views = tensors
            .iter()
            .map(|(name, dtype, shape, bytes)| Ok((*name, TensorView::new(*dtype, shape.clone(), bytes)?)))
            .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()
            .map_err(|e| Error::file(path, e))?;
        let meta = HashMap::from([
            ("isa".to_owned(), isa.to_string()),
            ("threads".to_owned(), model.threads().to_string()),
            ("steps".to_owned(), self.steps.to_string()),
            ("rows".to_owned(), self.rows.to_string()),
            ("kv".to_owned(), kv.to_string()),
        ]);
        files::write(path, |part| safetensors::serialize_to_file(views, Some(meta), part))
    }
}
