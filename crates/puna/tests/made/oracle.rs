//! Guesses that are right and wrong as a test wants it.

use super::Rng;
use puna::draft::{AnswerId, Drafter, MAX_DRAFT, Text, Want};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Knows what is said, and guesses wrong with a probability, in percent, that is drawn for each draft.
pub struct Oracle {
    pub answers: Arc<Mutex<HashMap<AnswerId, Vec<u32>>>>,
    pub rng: Rng,
}

impl Drafter for Oracle {
    fn ready(&mut self, text: &Text) -> usize {
        if self.answers.lock().unwrap().contains_key(&text.answer_id) { MAX_DRAFT } else { 0 }
    }

    fn draft(&mut self, wants: &mut [Want]) {
        for want in wants {
            let answers = self.answers.lock().unwrap();
            let wrong = [0, 20, 60, 100][self.rng.bits() as usize % 4];
            let len = 1 + self.rng.bits() as usize % want.most;
            for &token in answers[&want.text.answer_id].iter().skip(want.text.answer.len()).take(len) {
                let is_wrong = self.rng.bits() % 100 < wrong;
                want.draft.push(if is_wrong { (token + 1) % 40 } else { token });
            }
        }
    }

    fn end(&mut self, answer: AnswerId) {
        self.answers.lock().unwrap().remove(&answer);
    }
}
