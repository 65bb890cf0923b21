//! Repetition, presence and frequency penalties over the last tokens of a sequence.

use std::collections::{HashMap, VecDeque};

use super::{SamplingParams, saturate};

/// The recent tokens, how often each occurs, and what that costs.
#[derive(Debug, Clone)]
pub(super) struct Penalties {
    on: bool,
    repeat: f64,
    presence: f64,
    frequency: f64,
    /// The length of the window; `None` = the whole sequence, whose order need not be kept.
    last_n: Option<usize>,
    window: VecDeque<u32>,
    counts: HashMap<u32, u32>,
}

impl Penalties {
    /// Whether the parameters ask for any penalty.
    pub fn are_on(params: &SamplingParams) -> bool {
        let neutral = params.repeat_penalty == 1.0 && params.presence_penalty == 0.0 && params.frequency_penalty == 0.0;
        params.repeat_last_n != 0 && !neutral
    }

    pub fn new(params: &SamplingParams) -> Penalties {
        let on = Self::are_on(params);
        let last_n = usize::try_from(params.repeat_last_n).ok();
        // Twice the ids that can be in the map: it then reuses its space instead of growing. A huge window grows as
        // it fills.
        let reserve = if on { last_n.unwrap_or(0).min(4096) + 1 } else { 0 };
        Penalties {
            on,
            repeat: params.repeat_penalty.into(),
            presence: params.presence_penalty.into(),
            frequency: params.frequency_penalty.into(),
            last_n,
            window: VecDeque::with_capacity(reserve),
            counts: HashMap::with_capacity(2 * reserve),
        }
    }

    /// Whether any token is penalized now.
    pub fn is_active(&self) -> bool {
        !self.counts.is_empty()
    }

    pub fn accept(&mut self, id: u32) {
        if !self.on {
            return;
        }
        *self.counts.entry(id).or_insert(0) += 1;
        let Some(last_n) = self.last_n else { return };
        self.window.push_back(id);
        if self.window.len() > last_n
            && let Some(old) = self.window.pop_front()
            && let Some(count) = self.counts.get_mut(&old)
        {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&old);
            }
        }
    }

    /// The ids in the window, each once, in no particular order.
    pub fn ids(&self) -> impl Iterator<Item = u32> {
        self.counts.keys().copied()
    }

    /// The penalized logit of token `id`. `logit` is to be divided by `scale` (an earlier temperature), and so is the
    /// result; the subtractions come after that division.
    pub fn apply(&self, id: u32, logit: f32, scale: f64) -> f32 {
        let Some(&count) = self.counts.get(&id) else { return logit };
        let logit = f64::from(logit);
        let repeated = if logit <= 0.0 { logit * self.repeat } else { logit / self.repeat };
        saturate(repeated - (self.frequency * f64::from(count) + self.presence) * scale)
    }
}
