/// Looks for stop strings in streamed text.
///
/// Text goes in as it is generated and comes out as soon as it cannot be part of a stop string. The match that is
/// completed first ends the text (the longest of those completed by the same character), wherever the borders between
/// the pieces of text lie, so the result does not depend on how tokens cut the text.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    stops: Vec<Stop>,
    /// Text not released yet: the longest suffix that begins a stop string.
    held: String,
    stopped: Option<usize>,
}

#[derive(Debug, Clone)]
pub(crate) struct Stop {
    /// Position among the strings given.
    pub(crate) index: usize,
    pub(crate) bytes: Vec<u8>,
    /// `fallback[n]`: how much of the stop string is matched when the byte after the first `n` does not fit
    /// (Knuth, Morris, Pratt).
    fallback: Vec<usize>,
    pub(crate) matched: usize,
}

/// What [`StopMatcher::push`] found out.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StopStep {
    /// Text that is final now. Nothing of a stop string and nothing after it.
    pub text: String,
    /// The stop string that ended the text, by its position in the list.
    pub stopped: Option<usize>,
}

impl StopMatcher {
    /// Empty stop strings are ignored.
    pub fn new<S: AsRef<str>>(stops: impl IntoIterator<Item = S>) -> StopMatcher {
        let stops = stops.into_iter().enumerate();
        let stops = stops.filter(|(_, s)| !s.as_ref().is_empty()).map(|(i, s)| Stop::new(i, s.as_ref().as_bytes()));
        StopMatcher { stops: stops.collect(), held: String::new(), stopped: None }
    }

    /// Takes the next piece of text. After a stop string nothing more comes out.
    pub fn push(&mut self, text: &str) -> StopStep {
        if self.stopped.is_some() {
            return StopStep { text: String::new(), stopped: self.stopped };
        }
        let old = self.held.len();
        self.held.push_str(text);
        for at in old..self.held.len() {
            let byte = self.held.as_bytes()[at];
            let mut hit: Option<(usize, usize)> = None; // length, index
            for stop in &mut self.stops {
                if stop.step(byte) && hit.is_none_or(|(len, _)| stop.bytes.len() > len) {
                    hit = Some((stop.bytes.len(), stop.index));
                }
            }
            if let Some((len, index)) = hit {
                self.held.truncate(at + 1 - len);
                self.stopped = Some(index);
                return StopStep { text: std::mem::take(&mut self.held), stopped: self.stopped };
            }
        }
        let keep = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let tail = self.held.split_off(self.held.len() - keep);
        StopStep { text: std::mem::replace(&mut self.held, tail), stopped: None }
    }

    /// Ends the text: what was held back is released.
    pub fn finish(&mut self) -> String {
        for stop in &mut self.stops {
            stop.matched = 0;
        }
        std::mem::take(&mut self.held)
    }

    /// The stop string that ended the text, by its position in the list.
    pub fn stopped(&self) -> Option<usize> {
        self.stopped
    }
}

impl Stop {
    pub(crate) fn new(index: usize, bytes: &[u8]) -> Stop {
        let mut fallback = vec![0; bytes.len() + 1];
        let mut n = 0;
        for i in 1..bytes.len() {
            while n > 0 && bytes[i] != bytes[n] {
                n = fallback[n];
            }
            n += usize::from(bytes[i] == bytes[n]);
            fallback[i + 1] = n;
        }
        Stop { index, bytes: bytes.to_vec(), fallback, matched: 0 }
    }

    /// Whether `byte` completes the stop string; then nothing but a reset of `matched` may follow.
    pub(crate) fn step(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.fallback[self.matched];
        }
        self.matched += usize::from(self.bytes[self.matched] == byte);
        self.matched == self.bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, Option<usize>) {
        let mut matcher = StopMatcher::new(stops);
        let mut text = String::new();
        for piece in pieces {
            text.push_str(&matcher.push(piece).text);
        }
        text.push_str(&matcher.finish());
        (text, matcher.stopped())
    }

    #[test]
    fn cuts_before_the_match_across_pieces() {
        assert_eq!(run(&["END"], &["one E", "N", "D two"]), ("one ".into(), Some(0)));
        assert_eq!(run(&["END"], &["one E", "N", "d two"]), ("one ENd two".into(), None));
        assert_eq!(run(&["\n\n", "User:"], &["a\n", "Us", "er: b"]), ("a\n".into(), Some(1)));
        assert_eq!(run(&["", "x"], &["aax"]), ("aa".into(), Some(1)));
        assert_eq!(run(&[], &["a", "b"]), ("ab".into(), None));
    }

    #[test]
    fn holds_back_only_what_may_match() {
        let mut matcher = StopMatcher::new(["aab"]);
        assert_eq!(matcher.push("xaa").text, "x");
        assert_eq!(matcher.push("a").text, "a");
        assert_eq!(matcher.push("c").text, "aac");
        assert_eq!(matcher.push("aa").text, "");
        assert_eq!(matcher.finish(), "aa");
    }

    #[test]
    fn characters_are_not_split() {
        // é and è share their first byte.
        assert_eq!(run(&["é!"], &["aè", "é", "?é", "!"]), ("aèé?".into(), Some(0)));
    }

    #[test]
    fn first_completed_and_longest_of_those() {
        assert_eq!(run(&["b", "abc"], &["abc"]), ("a".into(), Some(0)));
        assert_eq!(run(&["bc", "abc"], &["xabc"]), ("x".into(), Some(1)));
    }

    /// The definition: the shortest prefix that ends in a stop string.
    fn naive(stops: &[String], text: &str) -> (String, Option<usize>) {
        for (end, c) in text.char_indices() {
            let seen = &text[..end + c.len_utf8()];
            let hits = stops.iter().enumerate().filter(|(_, s)| !s.is_empty() && seen.ends_with(s.as_str()));
            if let Some((i, s)) = hits.rev().max_by_key(|(_, s)| s.len()) {
                return (seen[..seen.len() - s.len()].to_string(), Some(i));
            }
        }
        (text.to_string(), None)
    }

    proptest! {
        #[test]
        fn equals_the_definition(
            stops in proptest::collection::vec("[abé]{0,4}", 0..4),
            pieces in proptest::collection::vec("[abcé]{0,4}", 0..8),
        ) {
            let stop_refs: Vec<&str> = stops.iter().map(String::as_str).collect();
            let piece_refs: Vec<&str> = pieces.iter().map(String::as_str).collect();
            prop_assert_eq!(run(&stop_refs, &piece_refs), naive(&stops, &pieces.concat()));
        }
    }
}
