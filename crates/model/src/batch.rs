//! What a forward pass computes: rows of one or many sequences. A prompt, a chunk of one, one token of each of many
//! sequences, a draft to verify, rows of an image: all are one shape.

use crate::config::Config;
use crate::error::Error;
use crate::kv::SeqId;
use crate::steering::Steering;
use std::ops::Range;
use std::sync::Arc;

/// One row of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Row {
    /// A token.
    Token(u32),
    /// A row of [`Batch::embeds`] in place of a token's embedding.
    Embed(u32),
}

/// Consecutive rows of a batch that go on from where a sequence stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The sequence; at most once in a batch.
    pub seq: SeqId,
    /// Position of the first row: the length of the sequence so far.
    pub start: usize,
    /// Rows.
    pub rows: usize,
    /// How long the sequence is known to become: the whole prompt while a part of it is computed. Where rotation
    /// depends on a sequence's length (longrope), this decides, and so chunks change nothing.
    pub total: usize,
    /// How many of the rows, the last ones, are a draft: they are computed, and enter the cache only as far as
    /// [`KvCache::accept`](crate::KvCache::accept) says.
    pub draft: usize,
}

/// Which rows of a push get logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outputs {
    /// None: the positions are only kept.
    None,
    /// The last one.
    Last,
    /// Every one.
    All,
}

/// The rows of one sequence: a text, or what else a model takes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prompt {
    /// The rows.
    pub rows: Vec<Row>,
    /// Embeddings that [`Row::Embed`] names, `[n, dim]`.
    pub embeds: Vec<f32>,
    /// Added to the rows of these embeddings after the first layers, `[n_deepstack, n, dim]`; empty: nothing is.
    pub deepstack: Vec<f32>,
    /// Time, height and width of each row, `[rows]`; empty: all three are the position in the sequence.
    pub positions: Vec<[u32; 3]>,
}

impl From<Vec<u32>> for Prompt {
    fn from(tokens: Vec<u32>) -> Prompt {
        Prompt { rows: tokens.into_iter().map(Row::Token).collect(), ..Prompt::default() }
    }
}

impl Prompt {
    /// Rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The ids of the rows that are tokens.
    pub fn tokens(&self) -> impl Iterator<Item = u32> {
        self.rows.iter().filter_map(|row| match row {
            Row::Token(id) => Some(*id),
            Row::Embed(_) => None,
        })
    }

    /// How far what follows the prompt is ahead of its place in the sequence: the first row after it turns by one more
    /// than the largest of its positions, as in Qwen2-VL (`mrope_position_deltas`).
    pub fn position_delta(&self) -> i64 {
        match self.positions.iter().flatten().max() {
            Some(&last) => i64::from(last) + 1 - self.len() as i64,
            None => 0,
        }
    }

    /// Whether a model of this configuration can compute it.
    ///
    /// # Errors
    /// [`Error::Batch`], of rows of the prompt.
    pub fn check(&self, config: &Config) -> Result<(), Error> {
        check_rows(&self.rows, &self.embeds, config)?;
        // What follows has as far to go again.
        check_positions(&self.positions, self.len(), MAX_POSITIONS / 2)?;
        let embeds = self.embeds.len();
        let error = |what: String| Err(Error::Batch { what });
        if !embeds.is_multiple_of(config.dim) {
            return error(format!("embeddings have {embeds} numbers, expected a multiple of {}", config.dim));
        }
        let deepstack = config.n_deepstack * embeds;
        if !self.deepstack.is_empty() && self.deepstack.len() != deepstack {
            return error(format!("deepstack has {} numbers, expected {deepstack}", self.deepstack.len()));
        }
        Ok(())
    }
}

/// What deepstack adds where there is none: the number that changes no other, not even 0.0 and -0.0.
pub(crate) const NOTHING: f32 = -0.0;

/// A prompt and the tokens that came after it.
#[derive(Clone, Copy, Debug)]
pub struct Grown<'a> {
    /// The prompt.
    pub prompt: &'a Prompt,
    /// What came after it.
    pub answer: &'a [u32],
    /// How far its tokens turn ahead of their place: [`Prompt::position_delta`], unless something else is known.
    pub delta: i64,
}

/// Rows to compute, span after span.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// The rows.
    pub rows: Vec<Row>,
    /// Sequences, in order of rows.
    pub spans: Vec<Span>,
    /// Rows that get logits, in rising order.
    pub outputs: Vec<u32>,
    /// Embeddings that [`Row::Embed`] names, `[n, dim]`.
    pub embeds: Vec<f32>,
    /// Added to the rows of these embeddings after the first layers, `[n_deepstack, n, dim]`; empty: nothing is.
    pub deepstack: Vec<f32>,
    /// Time, height and width of each row, `[rows]`; empty: all three are the position in the sequence.
    pub positions: Vec<[u32; 3]>,
    /// Spans whose residual something is added to, in rising order: [`Batch::steer`].
    pub steering: Vec<(usize, Arc<Steering>)>,
}

impl Batch {
    /// No rows; keeps its memory.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.spans.clear();
        self.outputs.clear();
        self.embeds.clear();
        self.deepstack.clear();
        self.positions.clear();
        self.steering.clear();
    }

    /// Steers the rows of the last span. A sequence that shares blocks ([`KvCache::add_shared`](crate::KvCache)) is
    /// steered alike from its first row to its last.
    pub fn steer(&mut self, steering: &Arc<Steering>) {
        if let Some(span) = self.spans.len().checked_sub(1).filter(|_| !steering.is_empty()) {
            self.steering.push((span, steering.clone()));
        }
    }

    /// What a span is steered by.
    pub fn steering_of(&self, span: usize) -> Option<&Steering> {
        Some(&*self.steering.iter().find(|(at, _)| *at == span)?.1)
    }

    /// Adds tokens of a sequence that holds `start` positions.
    pub fn push(&mut self, seq: SeqId, start: usize, tokens: &[u32], outputs: Outputs) {
        let first = self.rows.len();
        self.rows.extend(tokens.iter().map(|&t| Row::Token(t)));
        self.close(Span { seq, start, rows: tokens.len(), total: start + tokens.len(), draft: 0 }, first, outputs);
        self.fill_positions();
    }

    /// Adds rows of a prompt, with their embeddings and positions, to a sequence that holds those before them.
    ///
    /// # Panics
    /// If the range is not within a prompt that [`Prompt::check`] accepts for a model of `dim`.
    pub fn push_prompt(&mut self, seq: SeqId, prompt: &Prompt, range: Range<usize>, dim: usize, outputs: Outputs) {
        let (first, old) = (self.rows.len(), self.embeds.len() / dim);
        let mut taken = Vec::new();
        for row in &prompt.rows[range.clone()] {
            self.rows.push(match *row {
                Row::Token(id) => Row::Token(id),
                Row::Embed(i) => {
                    let i = i as usize;
                    taken.push(i);
                    self.embeds.extend_from_slice(&prompt.embeds[i * dim..][..dim]);
                    Row::Embed((old + taken.len() - 1) as u32)
                }
            });
        }
        self.push_deepstack(prompt, &taken, old, dim);
        if !prompt.positions.is_empty() {
            self.fill_positions_to(first);
            self.positions.extend_from_slice(&prompt.positions[range.clone()]);
        }
        self.close(Span { seq, start: range.start, rows: range.len(), total: prompt.len(), draft: 0 }, first, outputs);
        self.fill_positions();
    }

    /// Adds rows of a sequence that is a prompt and an answer, and holds those before them. No row gets logits.
    ///
    /// # Panics
    /// As [`Batch::push_prompt`], if the range is not within the sequence.
    pub fn push_grown(&mut self, seq: SeqId, grown: &Grown, range: Range<usize>, dim: usize) {
        let (Range { start, end }, prompt) = (range, grown.prompt.len());
        let in_prompt = start.min(prompt)..end.min(prompt);
        if in_prompt.is_empty() {
            self.push(seq, start, &[], Outputs::None);
        } else {
            self.push_prompt(seq, grown.prompt, in_prompt, dim, Outputs::None);
        }
        self.extend(&grown.answer[start.max(prompt) - prompt..end.max(prompt) - prompt], grown.delta);
        if let Some(span) = self.spans.last_mut() {
            span.total = prompt + grown.answer.len();
        }
    }

    /// Lets the last span go on by tokens, which turn by `delta` more than their place in the sequence.
    pub fn extend(&mut self, tokens: &[u32], delta: i64) {
        let Some(span) = self.spans.last_mut() else { return };
        let (first, place) = (self.rows.len(), span.start + span.rows);
        self.rows.extend(tokens.iter().map(|&t| Row::Token(t)));
        span.rows += tokens.len();
        span.total = span.total.max(span.start + span.rows);
        if delta != 0 {
            self.fill_positions_to(first);
            let own = (place..place + tokens.len()).map(|place| [(place as i64 + delta) as u32; 3]);
            self.positions.extend(own);
        }
        self.fill_positions();
    }

    /// Lets the last span go on by tokens that may not come, each with logits; they turn as those of [`Batch::extend`]. A
    /// sequence's rotation (longrope) must not depend on whether they come.
    pub fn draft(&mut self, tokens: &[u32], delta: i64) {
        let first = self.rows.len() as u32;
        self.extend(tokens, delta);
        let Some(span) = self.spans.last_mut() else { return };
        span.draft += tokens.len();
        self.outputs.extend(first..self.rows.len() as u32);
    }

    /// Of each span the rows and their positions, where only `n` rows are left: all, or those that get logits.
    pub fn spans_of(&self, n: usize) -> impl Iterator<Item = (&Span, impl Iterator<Item = (usize, usize)> + use<'_>)> {
        let all = n == self.rows.len();
        let mut first = 0;
        self.spans.iter().map(move |span| {
            let own = first..first + span.rows;
            first = own.end;
            let (start, begin) = (own.start, span.start);
            let place = |row: usize| self.outputs.partition_point(|&output| (output as usize) < row);
            let left = if all { own } else { place(own.start)..place(own.end) };
            let batch_row = move |row: usize| if all { row } else { self.outputs[row] as usize };
            (span, left.map(move |row| (row, begin + batch_row(row) - start)))
        })
    }

    /// Ends a push whose rows begin at `first`.
    fn close(&mut self, span: Span, first: usize, outputs: Outputs) {
        self.spans.push(span);
        let (first, end) = (first as u32, self.rows.len() as u32);
        match outputs {
            Outputs::None => {}
            Outputs::Last => self.outputs.extend((end > first).then(|| end - 1)),
            Outputs::All => self.outputs.extend(first..end),
        }
    }

    /// Adds the deepstack rows of the embeddings `taken` from a prompt behind those of `old` earlier ones.
    fn push_deepstack(&mut self, prompt: &Prompt, taken: &[usize], old: usize, dim: usize) {
        if taken.is_empty() || (self.deepstack.is_empty() && prompt.deepstack.is_empty()) {
            return;
        }
        let (all, new) = (prompt.embeds.len(), (old + taken.len()) * dim);
        let layers =
            if prompt.deepstack.is_empty() { self.deepstack.len() / (old * dim) } else { prompt.deepstack.len() / all };
        let before = std::mem::replace(&mut self.deepstack, vec![NOTHING; layers * new]);
        for (l, layer) in self.deepstack.chunks_exact_mut(new).enumerate() {
            let (earlier, own) = layer.split_at_mut(old * dim);
            if !before.is_empty() {
                earlier.copy_from_slice(&before[l * old * dim..][..old * dim]);
            }
            if !prompt.deepstack.is_empty() {
                for (&i, own) in taken.iter().zip(own.chunks_exact_mut(dim)) {
                    own.copy_from_slice(&prompt.deepstack[l * all + i * dim..][..dim]);
                }
            }
        }
    }

    /// Where some rows have positions, gives the others theirs.
    fn fill_positions(&mut self) {
        if !self.positions.is_empty() {
            self.fill_positions_to(self.rows.len());
        }
    }

    fn fill_positions_to(&mut self, end: usize) {
        let places = self.spans.iter().flat_map(|span| span.start..span.start + span.rows);
        let missing = places.take(end).skip(self.positions.len());
        self.positions.extend(missing.map(|place| [place as u32; 3]));
    }
}

/// Whether the rows are tokens of the vocabulary and embeddings that are there.
pub(crate) fn check_rows(rows: &[Row], embeds: &[f32], config: &Config) -> Result<(), Error> {
    let (dim, vocab) = (config.dim, config.vocab_size);
    for (i, row) in rows.iter().enumerate() {
        let what = match *row {
            Row::Token(id) if id as usize >= vocab => {
                format!("row {i}: token id {id} is out of range: the vocabulary has {vocab}")
            }
            Row::Embed(e) if (e as usize + 1) * dim > embeds.len() => {
                format!("row {i}: embedding {e} is out of range: the batch has {}", embeds.len() / dim)
            }
            _ => continue,
        };
        return Err(Error::Batch { what });
    }
    Ok(())
}

/// Positions are exact in single precision up to here: the longest that a sequence can be.
pub const MAX_POSITIONS: usize = 1 << 24;

/// Whether there are positions for all of `n` rows, or none, and none is past `most`.
pub(crate) fn check_positions(positions: &[[u32; 3]], n: usize, most: usize) -> Result<(), Error> {
    let error = |what: String| Err(Error::Batch { what });
    if !positions.is_empty() && positions.len() != n {
        return error(format!("{} positions for {n} rows", positions.len()));
    }
    match positions.iter().position(|axes| axes.iter().any(|&axis| axis as usize > most)) {
        Some(row) => error(format!("row {row}: positions {:?} go past {most}", positions[row])),
        None => Ok(()),
    }
}

/// Whether what is added to residuals fits the model, and belongs to spans that are there.
pub(crate) fn check_steering(batch: &Batch, config: &Config) -> Result<(), Error> {
    let error = |what: String| Err(Error::Batch { what });
    let mut next = 0;
    for (span, steering) in &batch.steering {
        if *span < next || *span >= batch.spans.len() {
            return error(format!(
                "steering of span {span}: spans are steered once, in rising order, and must be there"
            ));
        }
        if steering.shape() != (config.n_layers, config.dim) {
            let (layers, dim) = steering.shape();
            let (n_layers, width) = (config.n_layers, config.dim);
            return error(format!(
                "span {span}: steering made for {layers} layers of width {dim}, the model has {n_layers} of {width}"
            ));
        }
        next = span + 1;
    }
    Ok(())
}
