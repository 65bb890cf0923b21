//! Text that is released as soon as it cannot be the beginning of a marker.

use crate::stop::Stop;

/// Looks for markers in text that comes character by character.
#[derive(Debug, Clone)]
pub(super) struct Hold {
    markers: Vec<Stop>,
    /// The longest end of the text that begins a marker.
    partial: String,
    /// Line breaks before it: where they are no part of the text before a marker.
    newlines: usize,
    holds_newlines: bool,
    /// Line breaks are left out until something else comes.
    skips_newlines: bool,
}

impl Hold {
    pub fn new<'a>(markers: impl IntoIterator<Item = &'a str>) -> Hold {
        let markers = markers.into_iter().enumerate().map(|(i, text)| Stop::new(i, text.as_bytes())).collect();
        Hold { markers, partial: String::new(), newlines: 0, holds_newlines: false, skips_newlines: false }
    }

    /// Line breaks before a marker are held as well.
    pub fn hold_newlines(self, hold: bool) -> Hold {
        Hold { holds_newlines: hold, ..self }
    }

    /// Line breaks that come next are left out.
    pub fn skip_newlines(&mut self) {
        self.skips_newlines = true;
    }

    /// Takes a character; `release` gets text that is final. Returns the marker that it completes, by its place: what is
    /// held then are the line breaks before it.
    pub fn feed(&mut self, c: char, release: &mut dyn FnMut(&str)) -> Option<usize> {
        if self.skips_newlines && c == '\n' {
            return None;
        }
        self.skips_newlines = false;
        self.partial.push(c);
        let mut hit: Option<(usize, usize)> = None;
        for byte in c.encode_utf8(&mut [0; 4]).bytes() {
            for marker in &mut self.markers {
                if marker.step(byte) && hit.is_none_or(|(len, _)| marker.bytes.len() > len) {
                    hit = Some((marker.bytes.len(), marker.index));
                }
            }
        }
        let keep = match hit {
            Some((len, _)) => {
                self.markers.iter_mut().for_each(|marker| marker.matched = 0);
                len
            }
            None => self.markers.iter().map(|marker| marker.matched).max().unwrap_or(0),
        };
        let free = self.partial.len() - keep;
        if free > 0 {
            let tail = self.partial.split_off(free);
            let text = std::mem::replace(&mut self.partial, tail);
            let kept = if self.holds_newlines { text.trim_end_matches('\n').len() } else { text.len() };
            if kept > 0 {
                self.release_newlines(release);
                release(&text[..kept]);
            }
            self.newlines += text.len() - kept;
        }
        let (_, index) = hit?;
        self.partial.clear();
        Some(index)
    }

    /// Takes the line breaks that are held.
    pub fn take_newlines(&mut self) -> usize {
        std::mem::take(&mut self.newlines)
    }

    /// Releases what is held: the text has ended.
    pub fn finish(&mut self, release: &mut dyn FnMut(&str)) {
        self.release_newlines(release);
        if !self.partial.is_empty() {
            release(&std::mem::take(&mut self.partial));
        }
        self.markers.iter_mut().for_each(|marker| marker.matched = 0);
    }

    fn release_newlines(&mut self, release: &mut dyn FnMut(&str)) {
        if self.newlines > 0 {
            release(&"\n".repeat(std::mem::take(&mut self.newlines)));
        }
    }
}
