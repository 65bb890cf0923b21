//! Sequences with rows of images.

use puna_model::{Batch, Outputs, Row, SeqId, Span};
use std::ops::Range;

/// The rows of a sequence.
#[derive(Clone, Default)]
pub struct Prompt {
    pub rows: Vec<Row>,
    /// As in [`Batch`].
    pub embeds: Vec<f32>,
    /// As in [`Batch`].
    pub deepstack: Vec<f32>,
    /// As in [`Batch`].
    pub positions: Vec<[u32; 3]>,
    /// What positions of rows behind these are ahead of their place.
    pub rope_delta: i64,
}

impl Prompt {
    pub fn tokens(tokens: &[u32]) -> Prompt {
        Prompt { rows: tokens.iter().map(|&t| Row::Token(t)).collect(), ..Prompt::default() }
    }

    pub fn len(&self) -> usize {
        self.rows.len()
    }

    pub fn add(&mut self, token: u32) {
        if !self.positions.is_empty() {
            let position = self.len() as i64 + self.rope_delta;
            self.positions.push([u32::try_from(position).unwrap(); 3]);
        }
        self.rows.push(Row::Token(token));
    }

    /// Adds rows of it to a batch; its images come along whole. All sequences of a batch have positions, or none has.
    pub fn push(&self, batch: &mut Batch, seq: SeqId, range: Range<usize>, outputs: Outputs) {
        assert!(batch.embeds.is_empty() || self.embeds.is_empty(), "one sequence of a batch has images");
        let first = batch.rows.len() as u32;
        batch.rows.extend(&self.rows[range.clone()]);
        batch.embeds.extend(&self.embeds);
        batch.deepstack.extend(&self.deepstack);
        if !self.positions.is_empty() {
            batch.positions.extend(&self.positions[range.clone()]);
        }
        let end = batch.rows.len() as u32;
        batch.outputs.extend(match outputs {
            Outputs::None => end..end,
            Outputs::Last => end - 1..end,
            Outputs::All => first..end,
        });
        batch.spans.push(Span { seq, start: range.start, rows: range.len(), total: self.len(), draft: 0 });
    }
}
