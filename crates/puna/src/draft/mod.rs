//! Drafts: guesses at the next tokens of answers, which one step of the model verifies together.
//!
//! A step computes a sequence's newest token and the draft behind it. Then tokens are chosen from the logits one by one,
//! as without a draft: by the sequence's own sampler, random numbers, grammar and limits. As long as the token chosen is
//! the one that was guessed, the next row of logits is there already. So a draft changes when tokens come, and never
//! which: logits do not depend on what else is in the batch, and no random number is drawn for a row that is not reached.
//! For a guess that is one token and not a distribution, no scheme that keeps the answer's distribution accepts more
//! often: the guess is accepted as often as the model says it.

mod lookup;
mod model;
mod odds;

pub use self::lookup::Lookup;
pub use self::model::DraftModel;
pub(crate) use self::odds::{Odds, Wager};

use crate::engine::Engine;
use crate::error::Error;
use crate::request::RequestId;
use puna_model::{Phase, Row};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Most tokens of a draft.
pub const MAX_DRAFT: usize = 32;

/// Drafts that an engine makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftOptions {
    /// Who guesses.
    pub by: DraftBy,
    /// Most tokens of a draft, 1 to [`MAX_DRAFT`].
    pub max: usize,
    /// Shorter drafts, or none, where they take more time than they save. Otherwise they are always as long as they can
    /// be.
    pub adaptive: bool,
}

/// Who guesses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DraftBy {
    /// The sequence itself: what followed the last time that it said the same ([`Lookup`]).
    Lookup,
    /// A smaller model of the same vocabulary ([`DraftModel`]).
    Model(PathBuf),
}

impl DraftOptions {
    /// Drafts that adapt, of at most 16 tokens.
    pub fn new(by: DraftBy) -> DraftOptions {
        DraftOptions { by, max: 16, adaptive: true }
    }
}

/// An answer of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AnswerId {
    /// The request.
    pub id: RequestId,
    /// Which of its answers.
    pub sample: usize,
}

/// What an answer is so far, its prompt included.
#[derive(Clone, Copy, Debug)]
pub struct Text<'a> {
    /// Whose it is.
    pub answer_id: AnswerId,
    /// The rows of the prompt.
    pub prompt: &'a [Row],
    /// The tokens after it.
    pub answer: &'a [u32],
}

impl Text<'_> {
    /// Rows.
    pub fn len(&self) -> usize {
        self.prompt.len() + self.answer.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The tokens from row `from` on, `None` for rows that are none.
    pub fn tokens(&self, from: usize) -> impl Iterator<Item = Option<u32>> {
        let prompt = self.prompt.iter().map(|row| match row {
            Row::Token(id) => Some(*id),
            Row::Embed(_) => None,
        });
        prompt.skip(from).chain(self.answer[from.saturating_sub(self.prompt.len())..].iter().map(|id| Some(*id)))
    }
}

/// A draft that is wanted.
#[derive(Debug)]
pub struct Want<'a> {
    /// What it goes on from.
    pub text: Text<'a>,
    /// Most tokens of it.
    pub most: usize,
    /// The guesses: empty at first.
    pub draft: &'a mut Vec<u32>,
}

/// Guesses what comes next. A wrong guess, or none, costs time and changes nothing. Ids that the model does not have are
/// left out, with what follows them.
pub trait Drafter: Send {
    /// How many tokens it could guess now.
    fn ready(&mut self, text: &Text) -> usize;

    /// Makes the drafts of a step.
    fn draft(&mut self, wants: &mut [Want]);

    /// An answer has ended.
    fn end(&mut self, answer: AnswerId);
}

/// Counts of drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftStats {
    /// Drafts that were verified.
    pub drafts: usize,
    /// Their tokens.
    pub drafted: usize,
    /// Of these, how many were right, with all before them.
    pub accepted: usize,
    /// The same by their place in the draft.
    pub accepted_at: [usize; MAX_DRAFT],
}

/// The draft of a sequence, and how such drafts went.
#[derive(Debug, Default)]
pub(crate) struct Guess {
    pub tokens: Vec<u32>,
    pub odds: Odds,
    pub drafted: usize,
    pub accepted: usize,
}

/// What an engine that drafts has.
pub(crate) struct Drafting {
    drafter: Box<dyn Drafter>,
    max: usize,
    adaptive: bool,
    /// How long the drafts of this step took to make.
    time: Duration,
    pub wager: Wager,
    pub stats: DraftStats,
    lengths: Vec<usize>,
}

impl Drafting {
    pub fn new(drafter: Box<dyn Drafter>, max: usize, adaptive: bool) -> Drafting {
        Drafting {
            drafter,
            max: max.clamp(1, MAX_DRAFT),
            adaptive,
            time: Duration::ZERO,
            wager: Wager::default(),
            stats: DraftStats::default(),
            lengths: Vec::new(),
        }
    }

    pub fn end(&mut self, answer: AnswerId) {
        self.drafter.end(answer);
    }

    /// A draft of a sequence was verified.
    pub fn settle(&mut self, guess: &mut Guess, drafted: usize, accepted: usize) {
        guess.odds.record(drafted, accepted);
        self.wager.odds.record(drafted, accepted);
        self.stats.drafts += 1;
        self.stats.drafted += drafted;
        self.stats.accepted += accepted;
        self.stats.accepted_at[..accepted].iter_mut().for_each(|n| *n += 1);
    }

    /// How long drafting and the step behind it took, if `forward` is what the latter did.
    pub fn step_time(&self, forward: Duration) -> Duration {
        self.time + forward
    }
}

impl Engine {
    /// Lets `drafter` guess, at most `max` tokens (up to [`MAX_DRAFT`]) at a time, and fewer where `adaptive` and it is not
    /// worth it. Without this, [`EngineOptions::draft`](crate::EngineOptions::draft) says who guesses.
    pub fn set_drafter(&mut self, drafter: Box<dyn Drafter>, max: usize, adaptive: bool) {
        self.drafting = Some(Drafting::new(drafter, max, adaptive));
    }

    /// A drafter as the options say.
    pub(crate) fn load_drafter(&mut self, options: &crate::EngineOptions) -> Result<(), Error> {
        let Some(wish) = &options.draft else { return Ok(()) };
        let drafter: Box<dyn Drafter> = match &wish.by {
            DraftBy::Lookup => Box::<Lookup>::default(),
            DraftBy::Model(path) => Box::new(DraftModel::load(path, self, options)?),
        };
        self.set_drafter(drafter, wish.max, wish.adaptive);
        Ok(())
    }

    /// Makes drafts for sequences that generate; those and prompts may take `beside` rows together where prompts are
    /// read. Returns the number of drafted tokens.
    pub(crate) fn draft(&mut self, beside: Option<usize>) -> usize {
        let Some(drafting) = &mut self.drafting else { return 0 };
        self.watch.lap(Phase::Schedule);
        let Drafting { drafter, max, adaptive, time, wager, lengths, .. } = drafting;
        let start = Instant::now();
        let rope = &self.model.config().rope;
        let most_rows = beside.map_or(usize::MAX, |rows| rows / 2);
        let mut generating = 0;
        lengths.clear();
        for s in &mut self.running {
            s.guess.tokens.clear();
            generating += usize::from(s.is_generating());
            let most = s.most_draft(rope).min(*max);
            lengths.push(if most > 0 && most_rows > 0 { drafter.ready(&s.text()).min(most) } else { 0 });
        }
        if *adaptive {
            let odds = self.running.iter().map(|s| &s.guess.odds);
            wager.lengths(generating, odds, lengths, most_rows, beside.is_some());
        } else {
            let mut left = most_rows;
            for length in &mut *lengths {
                *length = left.min(*length);
                left -= *length;
            }
        }
        let wanted = self.running.iter_mut().zip(&*lengths).filter(|(_, most)| **most > 0);
        let mut wants: Vec<Want> = wanted.map(|(s, &most)| s.want(most)).collect();
        let mut drafted = 0;
        if !wants.is_empty() {
            drafter.draft(&mut wants);
            let vocab = self.model.config().vocab_size;
            for want in &mut wants {
                let right = want.draft.iter().take(want.most).take_while(|id| (**id as usize) < vocab).count();
                want.draft.truncate(right);
                drafted += right;
            }
        }
        // A draft model that only reads a prompt: no step is slower for it than reading it takes.
        *time = if drafted == 0 { Duration::ZERO } else { start.elapsed() };
        self.watch.lap(Phase::Draft);
        drafted
    }
}
