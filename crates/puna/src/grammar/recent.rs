//! Grammars that were compiled lately, by what they were made of: clients ask for the same form again and again.

use llguidance::Matcher;
use llguidance::api::TopLevelGrammar;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// Most grammars that are kept. One is some megabytes at most, as it has not been walked.
const MOST: usize = 32;
/// Most bytes of what they were made of, together.
const MOST_BYTES: usize = 2 << 20;

/// Those used last come first.
#[derive(Default)]
pub(super) struct Recent(Mutex<VecDeque<(String, Arc<Matcher>)>>);

impl Recent {
    /// What a grammar is known by: all of it, properties in their order. `None` where it cannot be written down.
    pub fn key(grammar: &TopLevelGrammar) -> Option<String> {
        serde_json::to_string(grammar).ok()
    }

    pub fn get(&self, key: &str) -> Option<Arc<Matcher>> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = kept.iter().position(|(known, _)| known == key).and_then(|at| kept.remove(at))?;
        let matcher = found.1.clone();
        kept.push_front(found);
        Some(matcher)
    }

    /// Keeps a grammar, and lets go of those that were not used for the longest time.
    pub fn put(&self, key: String, matcher: Arc<Matcher>) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have been as fast.
        kept.retain(|(known, _)| *known != key);
        kept.push_front((key, matcher));
        let mut bytes = 0;
        let fits = |(key, _): &&(String, Arc<Matcher>)| {
            bytes += key.len();
            bytes <= MOST_BYTES
        };
        let fitting = kept.iter().take(MOST).take_while(fits).count();
        kept.truncate(fitting);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn matcher() -> Arc<Matcher> {
        Arc::new(Matcher::new(Err(std::io::Error::other("none").into())))
    }

    #[test]
    fn the_last_ones_are_kept() {
        let (recent, first) = (Recent::default(), matcher());
        recent.put("first".into(), first.clone());
        recent.put("second".into(), matcher());
        for i in 0..MOST {
            assert!(Arc::ptr_eq(&recent.get("first").unwrap(), &first), "{i}");
            recent.put(i.to_string(), matcher());
        }
        assert!(recent.get("second").is_none() && recent.get("0").is_none() && recent.get("1").is_some());
        assert_eq!(recent.0.lock().unwrap().len(), MOST);
    }

    #[test]
    fn large_ones_are_few() {
        let recent = Recent::default();
        let key = |i: u8| char::from(b'a' + i).to_string().repeat(MOST_BYTES / 4);
        (0..6).for_each(|i| recent.put(key(i), matcher()));
        assert!(recent.get(&key(1)).is_none() && recent.get(&key(2)).is_some());
        let too_large = "x".repeat(MOST_BYTES + 1);
        recent.put(too_large.clone(), matcher());
        assert!(recent.get(&too_large).is_none());
    }
}
