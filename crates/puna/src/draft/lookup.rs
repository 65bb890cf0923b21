//! Guesses from the sequence itself: texts that edit, quote or repeat say again what is there.

use super::{AnswerId, Drafter, Text, Want};
use std::collections::HashMap;

/// What is said again must have been the same for so many tokens.
const SAME: usize = 3;
/// Places where the same was said that are looked at, the last ones first.
const PLACES: usize = 32;
/// How far back they are compared.
const LONGEST: usize = 64;
/// In place of a row that is no token: no such id is ever said.
const NO_TOKEN: u32 = u32::MAX;

/// Guesses that an answer goes on as it did where its last tokens were said before, in the prompt or the answer: at the
/// place where most of them were the same. Where it differed from the last draft by one token, it is guessed to go on
/// behind that.
#[derive(Debug, Default)]
pub struct Lookup {
    texts: HashMap<AnswerId, Index>,
}

/// The tokens of a text, and where each run of [`SAME`] was said.
#[derive(Debug, Default)]
struct Index {
    tokens: Vec<u32>,
    /// Of each run, the place behind it, the last time it was said.
    last: HashMap<[u32; SAME], u32>,
    /// By the place behind a run: the same the time before; 0 if there was none.
    before: Vec<u32>,
    /// Where the last draft was taken from, and how long the text was.
    taken: Option<(usize, usize)>,
}

impl Index {
    /// Takes note of what is new.
    fn extend(&mut self, text: &Text) {
        for token in text.tokens(self.tokens.len()) {
            // The run behind which this token stands can be found from now on: something follows it.
            let end = self.tokens.len();
            let run = self.tokens.last_chunk::<SAME>().filter(|run| !run.contains(&NO_TOKEN));
            let before = run.and_then(|run| self.last.insert(*run, end as u32));
            self.before.push(before.unwrap_or(0));
            self.tokens.push(token.unwrap_or(NO_TOKEN));
        }
    }

    /// The place of what may follow.
    fn find(&self) -> Option<usize> {
        self.longest().or_else(|| self.resumed())
    }

    /// Where the same was said for longest, and last.
    fn longest(&self) -> Option<usize> {
        let run = self.tokens.last_chunk::<SAME>()?;
        let mut place = *self.last.get(run)? as usize;
        let mut best = None;
        for _ in 0..PLACES {
            let (said, now) = (&self.tokens[..place], &self.tokens[..]);
            let same = said.iter().rev().zip(now.iter().rev()).take(LONGEST).take_while(|(a, b)| a == b).count();
            if best.is_none_or(|(most, _)| same > most) {
                best = Some((same, place));
            }
            place = self.before[place] as usize;
            if place == 0 || best.is_some_and(|(most, _)| most >= LONGEST) {
                break;
            }
        }
        best.map(|(_, place)| place)
    }

    /// Where the last draft was taken from, as much further as the text is longer now: if it was right but for one token.
    fn resumed(&self) -> Option<usize> {
        let (place, len) = self.taken?;
        let (said, now) = (&self.tokens[place..], &self.tokens[len..]);
        let replaced = said.iter().zip(now).filter(|(a, b)| a != b).count();
        (replaced <= 1).then_some(place + now.len())
    }
}

impl Drafter for Lookup {
    fn ready(&mut self, text: &Text) -> usize {
        let index = self.texts.entry(text.answer_id).or_default();
        index.extend(text);
        index.find().map_or(0, |place| index.tokens.len() - place)
    }

    fn draft(&mut self, wants: &mut [Want]) {
        for want in wants {
            let index = self.texts.entry(want.text.answer_id).or_default();
            index.extend(&want.text);
            let Some(place) = index.find() else { continue };
            index.taken = Some((place, index.tokens.len()));
            let said = index.tokens[place..].iter().take(want.most).take_while(|id| **id != NO_TOKEN);
            want.draft.extend(said);
        }
    }

    fn end(&mut self, answer: AnswerId) {
        self.texts.remove(&answer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::RequestId;
    use proptest::prelude::*;
    use puna_model::Row;

    fn text<'a>(prompt: &'a [Row], answer: &'a [u32]) -> Text<'a> {
        Text { answer_id: AnswerId { id: RequestId(1), sample: 0 }, prompt, answer }
    }

    fn rows(tokens: &[u32]) -> Vec<Row> {
        tokens.iter().map(|id| Row::Token(*id)).collect()
    }

    fn guess(lookup: &mut Lookup, prompt: &[Row], answer: &[u32], most: usize) -> Vec<u32> {
        let mut draft = Vec::new();
        lookup.draft(&mut [Want { text: text(prompt, answer), most, draft: &mut draft }]);
        draft
    }

    #[test]
    fn what_was_said_before() {
        let mut lookup = Lookup::default();
        let prompt = rows(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        assert!(guess(&mut lookup, &prompt, &[1, 2], 4).is_empty());
        assert_eq!(guess(&mut lookup, &prompt, &[1, 2, 3], 4), [4, 5, 6, 7]);
        assert_eq!(lookup.ready(&text(&prompt, &[1, 2, 3])), 10);
        // One token is another one: it goes on behind it.
        assert_eq!(guess(&mut lookup, &prompt, &[1, 2, 3, 4, 50], 4), [6, 7, 8, 9]);
        assert_eq!(guess(&mut lookup, &prompt, &[1, 2, 3, 4, 50, 6, 7], 3), [8, 9, 10]);
        assert_eq!(guess(&mut lookup, &prompt, &[1, 2, 3, 4, 50, 6, 7, 8], 9), [9, 10, 1, 2, 3, 4, 50, 6, 7]);
        lookup.end(text(&prompt, &[]).answer_id);
        assert!(lookup.texts.is_empty());
    }

    #[test]
    fn the_longest_and_then_the_last() {
        let mut lookup = Lookup::default();
        let prompt = rows(&[9, 1, 2, 3, 40, 8, 1, 2, 3, 41, 7, 1, 2, 3, 42]);
        assert_eq!(guess(&mut lookup, &prompt, &[8, 1, 2, 3], 1), [41]);
        assert_eq!(guess(&mut Lookup::default(), &prompt, &[6, 1, 2, 3], 1), [42]);
    }

    #[test]
    fn rows_that_are_no_tokens() {
        let mut lookup = Lookup::default();
        let prompt = [rows(&[1, 2, 3, 4]), vec![Row::Embed(0), Row::Embed(1), Row::Embed(2)], rows(&[5])].concat();
        assert_eq!(guess(&mut lookup, &prompt, &[1, 2, 3], 9), [4]);
        assert!(guess(&mut Lookup::default(), &[Row::Embed(0); 9], &[1], 9).is_empty());
    }

    proptest! {
        /// It finds a place where as many tokens were the same as at any place that it looks at.
        #[test]
        fn as_a_search_finds(tokens in prop::collection::vec(0u32..4, 1..80), cut in 0usize..80) {
            let prompt = rows(&tokens[..cut.min(tokens.len() - 1)]);
            let answer = &tokens[prompt.len()..];
            let mut lookup = Lookup::default();
            for n in 1..=answer.len() {
                lookup.ready(&text(&prompt, &answer[..n]));
            }
            let same = |place: usize| {
                tokens[..place].iter().rev().zip(tokens.iter().rev()).take_while(|(a, b)| a == b).count()
            };
            let places: Vec<usize> = (1..tokens.len()).rev().filter(|&p| same(p) >= SAME).take(PLACES).collect();
            let best = places.iter().copied().max_by_key(|&p| (same(p).min(LONGEST), p));
            let found = lookup.texts.values().next().and_then(Index::longest);
            prop_assert_eq!(found.map(same), best.map(same));
        }
    }
}
