//! Weights by name: each tensor's shape is checked against the configuration, and a tensor of a layer that nothing
//! reads is an error, because ignoring it would give wrong answers.

use crate::arch::{Arch, Norms};
use crate::backend::Backend;
use crate::checkpoint::{Checkpoint, Data, Place, Tensor};
use crate::config::{Config, MoeConfig};
use crate::error::Error;
use crate::quantize::{self, quantize_rows};
use crate::timings::Phase;
use crate::weights::{Attn, Dense, Ffn, Layer, Linear, Moe, Norm, Shared, Weights};
use bytes::Bytes;
use puna_kernels::{Arith, DType, MatrixSource, Pool};
use std::cell::RefCell;
use std::collections::HashSet;
use std::ops::Range;

/// A matrix that was found and checked, and is not yet in a device's form.
pub struct Found {
    pub(crate) dtype: DType,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_bytes: usize,
    pub(crate) data: Data,
    /// Row of the data that becomes row i; `None`: row i.
    order: Option<Vec<u32>>,
    /// What is read of a file, to give its memory back.
    pub(crate) place: Option<Place>,
    /// Whether it is a layer's projection or the output, which may be quantized: not the embedding, not a router.
    is_projection: bool,
    /// Rows of it are looked up, and nothing is multiplied with it.
    is_table: bool,
}

/// Called as weights are loaded: bytes done, bytes in all.
pub type Progress<'a> = dyn FnMut(u64, u64) + 'a;

/// Finds and checks all weights of a checkpoint, and brings none into memory. `head`: the output projection too.
///
/// # Errors
/// [`Error::Tensor`] names the tensor that is missing, of another shape or type than the configuration says, or that
/// nothing reads.
pub fn bind(from: &dyn Checkpoint, arch: &Arch, config: &Config, head: bool) -> Result<Weights<Found>, Error> {
    from.check()?;
    if let Some(missing) = from.missing_head().filter(|_| head) {
        return Err(missing);
    }
    let binder = Binder { from, arch, config, read: RefCell::default() };
    let mut weights = Weights {
        tok_embd: binder.linear("token_embd", [config.vocab_size, config.dim])?,
        layers: (0..config.n_layers).map(|l| binder.layer(l)).collect::<Result<_, _>>()?,
        output_norm: binder.required_norm("output_norm", config.dim)?,
        output: if head { binder.optional_linear("output", [config.vocab_size, config.dim])? } else { None },
        has_head: head,
    };
    weights.tok_embd.weight.is_table = weights.output.is_some() || !head;
    if !head {
        binder.read.borrow_mut().extend(["output.weight".to_owned(), "output.bias".to_owned()]);
    }
    binder.check_unread()?;
    Ok(weights)
}

/// Bytes of all weights as they are loaded, before matrices are in a device's form.
pub fn bytes(weights: &Weights<Found>) -> u64 {
    let mut total = matrix_bytes(weights);
    weights.each_vector(&mut |vector| total += size_of_val(vector) as u64);
    total
}

fn matrix_bytes(weights: &Weights<Found>) -> u64 {
    let mut total = 0;
    weights.each(&mut |found| total += found.bytes());
    total
}

/// What becomes of weights where they are to be quantized to `wish`: a sentence where some do not.
pub fn notice(weights: &Weights<Found>, wish: DType) -> Option<String> {
    let (mut simpler, mut kept) = (0, 0);
    weights.each(&mut |found: &Found| match found.target(wish) {
        None if found.is_projection => kept += 1,
        Some(to) if to != wish => simpler += 1,
        _ => {}
    });
    let name = wish.name();
    let simpler =
        (simpler > 0).then(|| format!("{simpler} become Q8_0, because their rows are no whole blocks of {name}"));
    let kept = (kept > 0).then(|| format!("{kept} stay as they are, quantized already or in rows of another length"));
    let parts: Vec<String> = simpler.into_iter().chain(kept).collect();
    (!parts.is_empty()).then(|| format!("of the projections to be quantized to {name}, {}", parts.join("; ")))
}

/// Brings bound weights into a device's form, and gives back the pages of files that it copied. `quantize`: what
/// projections that are stored as floats become before. `own`: nothing goes on using the maps of files.
pub fn load<B: Backend>(
    backend: &B,
    weights: Weights<Found>,
    quantize: Option<(&Pool, DType)>,
    own: bool,
    progress: &mut Progress,
) -> Weights<B::Matrix> {
    let (mut done, total) = (0, matrix_bytes(&weights));
    weights.map(&mut |found: Found| {
        let n_bytes = found.bytes();
        let target = quantize.and_then(|(pool, wish)| Some((pool, found.target(wish)?)));
        let Found { dtype, rows, cols, data, order, place, is_table, .. } = found;
        let is_copy = target.is_some() || matches!(data, Data::Made(..));
        let (dtype, bytes) = match target {
            Some((pool, to)) => (to, quantize_rows(pool, &data, [rows, cols], dtype, to)),
            None => (dtype, data.read()),
        };
        let device = |bytes: Bytes| {
            let source = MatrixSource { dtype, rows, cols, bytes, order: order.clone() };
            if is_table { backend.table(source) } else { backend.matrix(source) }
        };
        let mut matrix = device(bytes.clone());
        let is_copy = is_copy || backend.copies(&matrix);
        if own && !is_copy {
            matrix = device(Bytes::copy_from_slice(&bytes));
        }
        if let Some(place) = place.filter(|_| own || is_copy) {
            // Of a file that experts are read from, all that loading has touched goes.
            place.map.release(if own { 0..place.map.len() } else { place.range });
        }
        done += n_bytes;
        progress(done, total);
        matrix
    })
}

impl Found {
    /// Bytes of the matrix before it is in a device's form.
    pub(crate) fn bytes(&self) -> u64 {
        self.rows as u64 * self.row_bytes as u64
    }

    /// The format it is quantized to where `wish` is asked for.
    pub(crate) fn target(&self, wish: DType) -> Option<DType> {
        quantize::target(self.dtype, wish, self.cols).filter(|_| self.is_projection)
    }

    /// Some of its rows, which are in the order of the data.
    fn slice(&self, rows: Range<usize>) -> Found {
        let (n, row_bytes) = (rows.len(), self.row_bytes);
        let place = self.place.as_ref().map(|place| match self.data {
            Data::Stored(_) => {
                let start = place.range.start;
                Place { map: place.map.clone(), range: start + rows.start * row_bytes..start + rows.end * row_bytes }
            }
            Data::Made(..) => place.clone(),
        });
        let data = self.data.slice(rows, row_bytes);
        Found { rows: n, data, order: None, place, ..*self }
    }
}

struct Binder<'a> {
    from: &'a dyn Checkpoint,
    arch: &'a Arch,
    config: &'a Config,
    /// Tensors that were read.
    read: RefCell<HashSet<String>>,
}

impl Binder<'_> {
    fn layer(&self, l: usize) -> Result<Layer<Found>, Error> {
        let dim = self.config.dim;
        let has_router = self.has(&format!("blk.{l}.ffn_gate_inp"));
        let moe_needs = self.arch.moe_needs.iter().filter(|_| has_router);
        for part in self.arch.needs.iter().chain(moe_needs) {
            let name = format!("blk.{l}.{part}");
            if self.from.shape(&name).is_none() {
                return Err(self.from.missing(&name));
            }
        }
        let norm = |part: &str, place: Norms| {
            let wanted = self.arch.norms == place;
            wanted.then(|| self.required_norm(&format!("blk.{l}.{part}"), dim)).transpose()
        };
        Ok(Layer {
            attn_norm: norm("attn_norm", Norms::Before)?,
            attn: self.attn(l)?,
            post_attn_norm: norm("post_attention_norm", Norms::After)?,
            ffn_norm: norm("ffn_norm", Norms::Before)?,
            ffn: self.ffn(l)?,
            post_ffn_norm: norm("post_ffw_norm", Norms::After)?,
        })
    }

    fn attn(&self, l: usize) -> Result<Attn<Found>, Error> {
        let c = self.config;
        let name = |part: &str| format!("blk.{l}.{part}");
        let (q_dim, kv_dim) = (c.q_dim(), c.kv_dim());
        let [q, k, v] = if self.has(&name("attn_qkv")) {
            let qkv = self.linear(&name("attn_qkv"), [q_dim + 2 * kv_dim, c.dim])?;
            [rows(&qkv, 0, q_dim), rows(&qkv, q_dim, kv_dim), rows(&qkv, q_dim + kv_dim, kv_dim)]
        } else {
            [
                self.linear(&name("attn_q"), [q_dim, c.dim])?,
                self.linear(&name("attn_k"), [kv_dim, c.dim])?,
                self.linear(&name("attn_v"), [kv_dim, c.dim])?,
            ]
        };
        let interleaved = self.arch.interleaved && self.from.is_gguf();
        let order = |linear| if interleaved { halves(linear, c.head_dim, 2 * c.rope.half()) } else { linear };
        Ok(Attn {
            q: order(q),
            k: order(k),
            v,
            o: self.linear(&name("attn_output"), [c.dim, q_dim])?,
            q_norm: self.head_norm(&name("attn_q_norm"), q_dim)?,
            k_norm: self.head_norm(&name("attn_k_norm"), kv_dim)?,
        })
    }

    /// A norm of each head or of the whole row: its length tells.
    fn head_norm(&self, name: &str, row: usize) -> Result<Option<Norm>, Error> {
        let name = format!("{name}.weight");
        let whole = self.from.shape(&name).is_some_and(|shape| shape == [row]);
        let width = if whole { row } else { self.config.head_dim };
        Ok(self.vector(&name, width)?.map(|weight| Norm { weight, eps: self.config.norm_eps }))
    }

    fn ffn(&self, l: usize) -> Result<Ffn<Found>, Error> {
        let name = |part: &str| format!("blk.{l}.{part}");
        let has_router = self.has(&name("ffn_gate_inp"));
        match &self.config.moe {
            Some(moe) if has_router => Ok(Ffn::Moe(Box::new(self.moe(l, moe)?))),
            // A layer of a mixture may be dense; one with neither kind of tensor lacks its router.
            Some(_) if !self.has(&name("ffn_gate")) => Err(self.from.missing(&name("ffn_gate_inp.weight"))),
            _ if !self.has(&name("ffn_gate")) && !self.is_missing_gate(l) => Ok(Ffn::Dense(self.fused_dense(l)?)),
            _ => Ok(Ffn::Dense(self.dense(name, self.config.ffn_dim)?)),
        }
    }

    /// Whether a layer without `ffn_gate` lacks it, and does not have it as the first half of `ffn_up`.
    fn is_missing_gate(&self, l: usize) -> bool {
        let up = self.from.shape(&format!("blk.{l}.ffn_up.weight"));
        up.is_none_or(|shape| shape != [2 * self.config.ffn_dim, self.config.dim])
    }

    /// Gate and up in one tensor, the gate first.
    fn fused_dense(&self, l: usize) -> Result<Dense<Found>, Error> {
        let (dim, width) = (self.config.dim, self.config.ffn_dim);
        let both = self.linear(&format!("blk.{l}.ffn_up"), [2 * width, dim])?;
        let down = self.linear(&format!("blk.{l}.ffn_down"), [dim, width])?;
        Ok(Dense { gate: rows(&both, 0, width), up: rows(&both, width, width), down })
    }

    fn shared_expert(&self, l: usize, width: usize) -> Result<Option<Shared<Found>>, Error> {
        let name = |part: &str| format!("blk.{l}.{part}_shexp");
        if !self.has(&name("ffn_gate")) {
            return Ok(None);
        }
        let gate = name("ffn_gate_inp");
        let gate = match self.from.shape(&format!("{gate}.weight")) {
            None => None,
            // Some converters write it as a vector.
            Some(shape) if shape.len() == 1 => {
                let weight = self.matrix(&format!("{gate}.weight"), &[self.config.dim])?;
                Some(Linear { weight, bias: None, phase: Phase::Ffn })
            }
            Some(_) => Some(self.linear(&gate, [1, self.config.dim])?),
        };
        Ok(Some(Shared { gate, ffn: self.dense(name, width)? }))
    }

    fn dense(&self, name: impl Fn(&str) -> String, width: usize) -> Result<Dense<Found>, Error> {
        Ok(Dense {
            gate: self.linear(&name("ffn_gate"), [width, self.config.dim])?,
            up: self.linear(&name("ffn_up"), [width, self.config.dim])?,
            down: self.linear(&name("ffn_down"), [self.config.dim, width])?,
        })
    }

    fn moe(&self, l: usize, moe: &MoeConfig) -> Result<Moe<Found>, Error> {
        let name = |part: &str| format!("blk.{l}.{part}");
        let (n, dim, width) = (moe.n_experts, self.config.dim, moe.ffn_dim);
        let router = self.linear(&name("ffn_gate_inp"), [n, dim])?;
        // Older files have a tensor for each expert.
        let any_split = ["ffn_gate.0", "ffn_up.0", "ffn_down.0"].iter().any(|part| self.has(&name(part)));
        let is_split = any_split && !self.has(&name("ffn_gate_exps"));
        let experts = if is_split {
            let expert = |e: usize| self.dense(|part| format!("blk.{l}.{part}.{e}"), width);
            (0..n).map(expert).collect::<Result<_, _>>()?
        } else {
            let mut gate = self.merged(&name("ffn_gate_exps"), [n, width, dim])?;
            let mut up = self.merged(&name("ffn_up_exps"), [n, width, dim])?;
            let mut down = self.merged(&name("ffn_down_exps"), [n, dim, width])?;
            let mut next = |(): ()| Some(Dense { gate: gate.next()?, up: up.next()?, down: down.next()? });
            (0..n).map_while(|_| next(())).collect()
        };
        Ok(Moe {
            router,
            correction: self.vector(&name("exp_probs_b.bias"), n)?,
            experts,
            shared: self.shared_expert(l, moe.shared_ffn_dim)?,
        })
    }

    /// The experts of a merged tensor, one after the other.
    fn merged(&self, name: &str, shape: [usize; 3]) -> Result<impl Iterator<Item = Linear<Found>> + use<>, Error> {
        let [n, rows, _] = shape;
        let all = self.matrix(&format!("{name}.weight"), &shape)?;
        let bias = self.matrix_values(&format!("{name}.bias"), &[n, rows])?;
        Ok((0..n).map(move |e| {
            let bias = bias.as_ref().map(|b| b[e * rows..(e + 1) * rows].to_vec());
            Linear { weight: all.slice(e * rows..(e + 1) * rows), bias, phase: Phase::Ffn }
        }))
    }

    /// `NAME.weight` and, where there is one, `NAME.bias`.
    fn linear(&self, name: &str, [rows, cols]: [usize; 2]) -> Result<Linear<Found>, Error> {
        let weight = self.matrix(&format!("{name}.weight"), &[rows, cols])?;
        let bias = self.vector(&format!("{name}.bias"), rows)?;
        Ok(Linear { weight, bias, phase: Phase::of_projection(name) })
    }

    fn optional_linear(&self, name: &str, shape: [usize; 2]) -> Result<Option<Linear<Found>>, Error> {
        self.has(name).then(|| self.linear(name, shape)).transpose()
    }

    fn required_norm(&self, name: &str, width: usize) -> Result<Norm, Error> {
        let name = format!("{name}.weight");
        let weight = self.vector(&name, width)?.ok_or_else(|| self.from.missing(&name))?;
        Ok(Norm { weight, eps: self.config.norm_eps })
    }

    fn matrix(&self, name: &str, shape: &[usize]) -> Result<Found, Error> {
        let tensor = self.find(name, shape)?.ok_or_else(|| self.from.missing(name))?;
        let cols = shape.last().copied().unwrap_or(1);
        let rows = shape.iter().rev().skip(1).product();
        let Tensor { dtype, data, place } = tensor;
        let row_bytes = dtype.row_bytes(cols).ok_or_else(|| {
            self.from.error(name, format!("row length {cols} is not a whole number of {} blocks", dtype.name()))
        })?;
        let is_projection = !NO_PROJECTIONS.iter().any(|part| name.contains(part));
        Ok(Found { dtype, rows, cols, row_bytes, data, order: None, place, is_projection, is_table: false })
    }

    /// A vector in single precision; `None` where there is none.
    fn vector(&self, name: &str, len: usize) -> Result<Option<Vec<f32>>, Error> {
        self.matrix_values(name, &[len])
    }

    fn matrix_values(&self, name: &str, shape: &[usize]) -> Result<Option<Vec<f32>>, Error> {
        let Some(tensor) = self.find(name, shape)? else { return Ok(None) };
        if tensor.dtype.format().arith != Arith::Float {
            let what = format!("expected type F32, F16 or BF16, found {}", tensor.dtype.name());
            return Err(self.from.error(name, what));
        }
        let mut values = vec![0.0; shape.iter().product()];
        (tensor.dtype.format().dequantize)(&tensor.data.read(), &mut values);
        Ok(Some(values))
    }

    /// Whether there is a projection of that name.
    fn has(&self, name: &str) -> bool {
        self.from.shape(&format!("{name}.weight")).is_some()
    }

    /// The tensor of that name, whose shape must be the given one; `None` where there is none.
    fn find(&self, name: &str, shape: &[usize]) -> Result<Option<Tensor>, Error> {
        let Some(found) = self.from.shape(name) else { return Ok(None) };
        self.read.borrow_mut().insert(name.to_owned());
        if found != shape {
            let what = format!("expected shape {shape:?} (outermost dimension first), found {found:?}");
            return Err(self.from.error(name, what));
        }
        self.from.tensor(name).map(Some)
    }

    /// Tensors of layers, embedding or output that nothing read. Others (of a vision tower, of a later layer) do not
    /// touch the answer.
    fn check_unread(&self) -> Result<(), Error> {
        let read = self.read.borrow();
        let layer_of = |name: &str| name.strip_prefix("blk.")?.split('.').next()?.parse::<usize>().ok();
        for name in self.from.names() {
            let layer = layer_of(&name);
            if layer.is_some_and(|l| l >= self.config.n_layers) {
                let what = format!("the model has only {} layers", self.config.n_layers);
                return Err(self.from.error(&name, what));
            }
            if is_part(&name) && !read.contains(&*name) {
                let what = format!(
                    "nothing in architecture {} reads it: the model needs what puna does not have",
                    self.config.arch
                );
                return Err(self.from.error(&name, what));
            }
        }
        Ok(())
    }
}

/// Matrices that no rows of a large product go through, and whose errors cost most.
const NO_PROJECTIONS: &[&str] = &["token_embd.", "ffn_gate_inp"];

/// Whether a tensor is a part of the text model's weights.
pub fn is_part(name: &str) -> bool {
    !ELSEWHERE.iter().any(|start| name.starts_with(start)) && !HARMLESS.iter().any(|part| name.contains(part))
}

/// Tensors of a vision or audio tower that a file has beside the text model, and what `arch.rs` reads.
const ELSEWHERE: &[&str] = &["v.", "a.", "mm.", "rope_freqs", "rope_factors_"];

/// Tensors that old converters wrote and that every reader computes itself.
const HARMLESS: &[&str] = &["rope_freqs", "rope.freqs", "attn_rot_embd", "rotary_emb.inv_freq"];

/// Rows `start..start + n` of a projection.
fn rows(linear: &Linear<Found>, start: usize, n: usize) -> Linear<Found> {
    let weight = linear.weight.slice(start..start + n);
    let bias = linear.bias.as_ref().map(|b| b[start..start + n].to_vec());
    Linear { weight, bias, phase: linear.phase }
}

/// Brings rows from the order of adjacent pairs, `(2i, 2i + 1)`, into that of halves, `(i, i + half)`, head by head,
/// within the rotary width. Rows are independent in every format, and a bias moves with its row.
fn halves(mut linear: Linear<Found>, head_dim: usize, width: usize) -> Linear<Found> {
    let place = |row: usize| {
        let (head, i) = (row / head_dim * head_dim, row % head_dim);
        let half = width / 2;
        match i {
            _ if i >= width => row,
            _ if i < half => head + 2 * i,
            _ => head + 2 * (i - half) + 1,
        }
    };
    let order: Vec<u32> = (0..linear.weight.rows).map(|row| place(row) as u32).collect();
    if let Some(bias) = &mut linear.bias {
        *bias = order.iter().map(|&row| bias[row as usize]).collect();
    }
    linear.weight.order = Some(order);
    linear
}
