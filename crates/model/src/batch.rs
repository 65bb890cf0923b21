//! What a forward pass computes: rows of one or many sequences. A prompt, a chunk of one, one token of each of many
//! sequences, a draft to verify, rows of an image: all are one shape.

use crate::kv::SeqId;

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
    }

    /// Adds tokens of a sequence that holds `start` positions.
    pub fn push(&mut self, seq: SeqId, start: usize, tokens: &[u32], outputs: Outputs) {
        let first = self.rows.len() as u32;
        self.rows.extend(tokens.iter().map(|&t| Row::Token(t)));
        self.spans.push(Span { seq, start, rows: tokens.len(), total: start + tokens.len() });
        let end = self.rows.len() as u32;
        match outputs {
            Outputs::None => {}
            Outputs::Last => self.outputs.extend((end > first).then(|| end - 1)),
            Outputs::All => self.outputs.extend(first..end),
        }
    }
}
