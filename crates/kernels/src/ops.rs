//! Operations on rows of f32 other than products: norms, rotation, gates, sums, routing.
//!
//! Sums over a row run in 16 lanes (column c in lane c mod 16, one multiply-add a column) and end in the tree of
//! `Simd::sum`: the same order at every level.

use crate::exec::Exec;
use crate::isa::Kernel;
use crate::math;
use crate::pool::SharedMut;
use crate::simd::{LANES, Simd};

/// Elements worth a task: below this a second thread costs more than it saves.
const TASK: usize = 4096;

/// Splits `n` rows of `width` elements into tasks and calls `f(first row, rows)` for each.
fn for_rows(exec: &Exec, n: usize, width: usize, f: &(dyn Fn(usize, usize) + Sync)) {
    let per_task = TASK.div_ceil(width.max(1)).max(1);
    exec.pool.for_each(n.div_ceil(per_task), &|t| f(t * per_task, per_task.min(n - t * per_task)));
}

/// Runs a body for each run of 16 elements, with its start and its lanes; the last may be shorter. A closure instead
/// would be a function of its own, without the instructions.
macro_rules! each {
    ($len:expr, |$i:ident, $n:ident| $body:expr) => {{
        let (len, mut $i) = ($len, 0);
        while $i < len {
            let $n = if len - $i < LANES { len - $i } else { LANES };
            $body;
            $i += LANES;
        }
    }};
}

/// The gate of a feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// `x / 2 * (1 + erf(x / sqrt 2))`.
    Gelu,
    /// The tanh approximation of [`Activation::Gelu`].
    GeluTanh,
}

/// `out = x / sqrt(mean(x^2) + eps) * weight` for each row of `weight.len()` elements.
///
/// # Panics
/// If `x` and `out` differ in length or are not whole rows.
pub fn rms_norm(exec: &Exec, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let width = weight.len();
    assert!(
        x.len() == out.len() && x.len().is_multiple_of(width),
        "{} and {} elements, rows of {width}",
        x.len(),
        out.len()
    );
    let parts = SharedMut::new(out);
    for_rows(exec, x.len() / width, width, &|row, rows| {
        // SAFETY: rows of this task only.
        let out = unsafe { parts.slice(row * width, rows * width) };
        exec.isa.run(RmsNorm { x: x[row * width..][..rows * width].as_ptr(), weight, eps, out });
    });
}

/// [`rms_norm`] that replaces its input: what q and k norms do, per head or per row by the length of `weight`.
pub fn rms_norm_in_place(exec: &Exec, x: &mut [f32], weight: &[f32], eps: f32) {
    let width = weight.len();
    assert_eq!(x.len() % width, 0, "{} elements, rows of {width}", x.len());
    let n = x.len() / width;
    let parts = SharedMut::new(x);
    for_rows(exec, n, width, &|row, rows| {
        // SAFETY: rows of this task only.
        let out = unsafe { parts.slice(row * width, rows * width) };
        exec.isa.run(RmsNorm { x: out.as_ptr(), weight, eps, out });
    });
}

struct RmsNorm<'a> {
    /// As many elements as `out`, which it may be.
    x: *const f32,
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.weight.len();
        for row in 0..self.out.len() / width {
            // SAFETY: `x` and `out` have whole rows of `width` elements; within a row all reads of an element come
            // before its write.
            unsafe {
                let (x, out) = (self.x.add(row * width), self.out.as_mut_ptr().add(row * width));
                let mut acc = s.splat(0.0);
                each!(width, |i, n| {
                    let v = s.load_n(x.add(i), n);
                    acc = s.fma(v, v, acc);
                });
                let mean = s.sum(acc) / width as f32;
                let scale = s.splat(1.0 / (mean + self.eps).sqrt());
                each!(width, |i, n| {
                    let v = s.mul(s.mul(s.load_n(x.add(i), n), scale), s.load_n(self.weight.as_ptr().add(i), n));
                    s.store_n(out.add(i), v, n);
                });
            }
        }
    }
}

/// Cosines and sines of the angles of each row: made once, used by every head of every layer.
pub struct RopeTable<'a> {
    /// `[rows, half]`.
    pub cos: &'a [f32],
    /// `[rows, half]`.
    pub sin: &'a [f32],
    /// Pairs that rotate: half the rotary width.
    pub half: usize,
}

/// Rotates pairs `(i, i + half)` of each head; dimensions from `2 * half` on stay as they are.
/// `x`: `[rows, n_heads, head_dim]`.
///
/// # Panics
/// If shapes do not match.
pub fn rope(exec: &Exec, x: &mut [f32], n_heads: usize, head_dim: usize, table: &RopeTable) {
    let (width, half) = (n_heads * head_dim, table.half);
    let rows = x.len() / width;
    assert!(x.len() == rows * width && 2 * half <= head_dim, "rows of {n_heads} x {head_dim}, rotary half {half}");
    assert!(table.cos.len() == rows * half && table.sin.len() == rows * half, "one row of angles a row");
    let parts = SharedMut::new(x);
    for_rows(exec, rows, width, &|row, rows| {
        // SAFETY: rows of this task only.
        let x = unsafe { parts.slice(row * width, rows * width) };
        let (cos, sin) = (&table.cos[row * half..][..rows * half], &table.sin[row * half..][..rows * half]);
        exec.isa.run(Rope { x, n_heads, head_dim, cos, sin, half });
    });
}

struct Rope<'a> {
    x: &'a mut [f32],
    n_heads: usize,
    head_dim: usize,
    cos: &'a [f32],
    sin: &'a [f32],
    half: usize,
}

impl Kernel for Rope<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let half = self.half;
        for (i, head) in self.x.chunks_exact_mut(self.head_dim).enumerate() {
            let row = i / self.n_heads;
            let (cos, sin) = (&self.cos[row * half..][..half], &self.sin[row * half..][..half]);
            each!(half, |i, n| {
                // SAFETY: n elements from i of each half, which end before head_dim.
                unsafe {
                    let (p, q) = (head.as_mut_ptr().add(i), head.as_mut_ptr().add(half + i));
                    let (a, b) = (s.load_n(p, n), s.load_n(q, n));
                    let (cos, sin) = (s.load_n(cos.as_ptr().add(i), n), s.load_n(sin.as_ptr().add(i), n));
                    s.store_n(p, s.fma(a, cos, math::neg(s, s.mul(b, sin))), n);
                    s.store_n(q, s.fma(b, cos, s.mul(a, sin)), n);
                }
            });
        }
    }
}

/// An operation on elements at the same place.
#[derive(Clone, Copy)]
enum Pointwise {
    /// `out = activation(a) * b`
    Glu(Activation),
    /// `out = b + a * scale`
    AddScaled(f32),
    /// `out = a * scale`
    Scale(f32),
    /// `out = cap * tanh(a / cap)`
    Softcap(f32),
}

struct PointwiseJob<'a> {
    op: Pointwise,
    /// As long as `out`; `b` may be `out`.
    a: *const f32,
    b: *const f32,
    out: &'a mut [f32],
}

impl Kernel for PointwiseJob<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let out = self.out.as_mut_ptr();
        each!(self.out.len(), |i, n| {
            // SAFETY: all three have as many elements; an element is read before it is written.
            unsafe {
                let (a, b) = (s.load_n(self.a.add(i), n), s.load_n(self.b.add(i), n));
                let y = match self.op {
                    Pointwise::Glu(Activation::Silu) => s.mul(math::silu(s, a), b),
                    Pointwise::Glu(Activation::Gelu) => s.mul(math::gelu(s, a), b),
                    Pointwise::Glu(Activation::GeluTanh) => s.mul(math::gelu_tanh(s, a), b),
                    Pointwise::AddScaled(scale) => s.fma(a, s.splat(scale), b),
                    Pointwise::Scale(scale) => s.mul(a, s.splat(scale)),
                    Pointwise::Softcap(cap) => s.mul(s.splat(cap), math::tanh(s, s.div(a, s.splat(cap)))),
                };
                s.store_n(out.add(i), y, n);
            }
        });
    }
}

fn pointwise(exec: &Exec, op: Pointwise, a: Option<&[f32]>, b: Option<&[f32]>, out: &mut [f32]) {
    for input in [a, b].into_iter().flatten() {
        assert_eq!(input.len(), out.len(), "as many elements in as out");
    }
    let n = out.len();
    let parts = SharedMut::new(out);
    for_rows(exec, n.div_ceil(LANES), LANES, &|row, rows| {
        let range = row * LANES..((row + rows) * LANES).min(n);
        // SAFETY: elements of this task only.
        let out = unsafe { parts.slice(range.start, range.len()) };
        let pointer = |x: Option<&[f32]>| x.map_or(out.as_ptr(), |x| x[range.clone()].as_ptr());
        exec.isa.run(PointwiseJob { op, a: pointer(a), b: pointer(b), out });
    });
}

/// `out = activation(gate) * up`.
pub fn glu(exec: &Exec, activation: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
    pointwise(exec, Pointwise::Glu(activation), Some(gate), Some(up), out);
}

/// `x += h * scale`, one multiply-add an element.
pub fn add_scaled(exec: &Exec, x: &mut [f32], h: &[f32], scale: f32) {
    pointwise(exec, Pointwise::AddScaled(scale), Some(h), None, x);
}

/// `x *= scale`.
pub fn scale(exec: &Exec, x: &mut [f32], scale: f32) {
    if scale != 1.0 {
        pointwise(exec, Pointwise::Scale(scale), None, None, x);
    }
}

/// `x = cap * tanh(x / cap)`.
pub fn softcap(exec: &Exec, x: &mut [f32], cap: f32) {
    pointwise(exec, Pointwise::Softcap(cap), None, None, x);
}

/// How a mixture of experts chooses and weighs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Experts of a token.
    pub used: usize,
    /// Scores by a sigmoid of each logit; otherwise by a softmax over all.
    pub sigmoid: bool,
    /// Divide the chosen weights by their sum.
    pub normalize: bool,
    /// Multiply the weights by this, last.
    pub scale: f32,
}

/// Chooses experts for each row of router logits: the largest scores (plus `correction`, where given), the lower
/// number where equal, in falling order. Weights are the scores without the correction.
///
/// `logits`: `[rows, n_experts]`, replaced by the scores; `ids` and `weights`: `[rows, used]`.
///
/// # Panics
/// If shapes do not match, or more experts are to be chosen than there are.
pub fn route(
    exec: &Exec,
    routing: &Routing,
    logits: &mut [f32],
    correction: Option<&[f32]>,
    ids: &mut [u32],
    weights: &mut [f32],
) {
    let rows = ids.len() / routing.used;
    let n_experts = logits.len() / rows.max(1);
    assert!(ids.len() == rows * routing.used && weights.len() == ids.len() && logits.len() == rows * n_experts);
    assert!(routing.used <= n_experts || rows == 0, "{} of {n_experts} experts", routing.used);
    assert!(correction.is_none_or(|c| c.len() == n_experts || rows == 0), "one correction an expert");
    for row in 0..rows {
        let scores = &mut logits[row * n_experts..][..n_experts];
        exec.isa.run(Scores { x: scores, sigmoid: routing.sigmoid });
        let range = row * routing.used..(row + 1) * routing.used;
        choose(routing, scores, correction, &mut ids[range.clone()], &mut weights[range]);
    }
}

fn choose(routing: &Routing, scores: &[f32], correction: Option<&[f32]>, ids: &mut [u32], weights: &mut [f32]) {
    let key = |e: usize| scores[e] + correction.map_or(0.0, |c| c[e]);
    for k in 0..ids.len() {
        let taken = &ids[..k];
        let mut best = None;
        for e in (0..scores.len()).filter(|e| !taken.contains(&(*e as u32))) {
            // A NaN never wins over a number, but an expert must be chosen even if all are NaN.
            if best.is_none_or(|b| key(e) > key(b) || (key(b).is_nan() && !key(e).is_nan())) {
                best = Some(e);
            }
        }
        let best = best.expect("fewer experts are chosen than there are");
        ids[k] = best as u32;
        weights[k] = scores[best];
    }
    if routing.normalize {
        let sum = weights.iter().fold(0.0, |sum, w| sum + w);
        for w in weights.iter_mut() {
            *w /= sum;
        }
    }
    for w in weights.iter_mut() {
        *w *= routing.scale;
    }
}

/// `out[row] = sum over k of weights[row, k] * y[slots[row, k]]`, in the order of k, one multiply-add an element.
/// `y` and `out`: rows of `width`; `slots` and `weights`: `[rows, used]`.
///
/// # Panics
/// If shapes do not match.
pub fn weighted_sum(exec: &Exec, y: &[f32], width: usize, slots: &[u32], weights: &[f32], out: &mut [f32]) {
    let rows = out.len() / width;
    let used = slots.len() / rows.max(1);
    assert!(out.len() == rows * width && slots.len() == rows * used && weights.len() == slots.len());
    assert!(slots.iter().all(|&slot| (slot as usize + 1) * width <= y.len()), "slots are rows of y");
    let parts = SharedMut::new(out);
    for_rows(exec, rows, width * used, &|row, n| {
        // SAFETY: rows of this task only.
        let out = unsafe { parts.slice(row * width, n * width) };
        let range = row * used..(row + n) * used;
        exec.isa.run(WeightedSum { y, width, slots: &slots[range.clone()], weights: &weights[range], out });
    });
}

struct WeightedSum<'a> {
    y: &'a [f32],
    width: usize,
    slots: &'a [u32],
    weights: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for WeightedSum<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let rows = self.out.len() / self.width;
        let used = self.slots.len() / rows.max(1);
        for row in 0..rows {
            let (slots, weights) = (&self.slots[row * used..][..used], &self.weights[row * used..][..used]);
            let out = &mut self.out[row * self.width..][..self.width];
            each!(self.width, |i, n| {
                let mut acc = s.splat(0.0);
                for (slot, weight) in slots.iter().zip(weights) {
                    let y = &self.y[*slot as usize * self.width..][..self.width];
                    // SAFETY: n elements from i of a row of `width`.
                    acc = s.fma(s.splat(*weight), unsafe { s.load_n(y.as_ptr().add(i), n) }, acc);
                }
                // SAFETY: as above.
                unsafe { s.store_n(out.as_mut_ptr().add(i), acc, n) };
            });
        }
    }
}

/// `out[row] += h[row] * sigmoid(gate[row])`, or `out += h` without gates. `out` and `h`: `[rows, width]`.
///
/// # Panics
/// If shapes do not match.
pub fn add_gated(exec: &Exec, out: &mut [f32], h: &[f32], gate: Option<&[f32]>) {
    let Some(gate) = gate.filter(|gate| !gate.is_empty()) else { return add_scaled(exec, out, h, 1.0) };
    let width = out.len() / gate.len();
    assert!(out.len() == gate.len() * width && h.len() == out.len(), "one gate a row");
    for ((out, h), gate) in out.chunks_exact_mut(width).zip(h.chunks_exact(width)).zip(gate) {
        let mut scale = [*gate];
        exec.isa.run(Scores { x: &mut scale, sigmoid: true });
        add_scaled(exec, out, h, scale[0]);
    }
}

struct Scores<'a> {
    x: &'a mut [f32],
    sigmoid: bool,
}

impl Kernel for Scores<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (len, p) = (self.x.len(), self.x.as_mut_ptr());
        // SAFETY: elements of x.
        unsafe {
            if self.sigmoid {
                each!(len, |i, n| s.store_n(p.add(i), math::sigmoid(s, s.load_n(p.add(i), n)), n));
                return;
            }
            let max = self.x.iter().fold(f32::NEG_INFINITY, |m, &v| if v > m { v } else { m });
            let mut acc = s.splat(0.0);
            each!(len, |i, n| {
                let e = math::exp(s, s.sub(s.load_n(p.add(i), n), s.splat(max)));
                s.store_n(p.add(i), e, n);
                acc = s.add(acc, s.load_n(p.add(i), n));
            });
            let sum = s.splat(s.sum(acc));
            each!(len, |i, n| s.store_n(p.add(i), s.div(s.load_n(p.add(i), n), sum), n));
        }
    }
}
