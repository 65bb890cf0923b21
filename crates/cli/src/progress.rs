//! Progress on standard error: a bar, when that is a terminal and the work takes more than a second.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// Work, mostly of a known size.
pub struct Progress {
    what: &'static str,
    unit: Unit,
    start: Instant,
    bar: Option<ProgressBar>,
    is_terminal: bool,
}

/// What the work is counted in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Bytes of weights.
    Bytes,
    /// Tokens of a prompt.
    Tokens,
    /// Texts, of which nobody knows how many there will be.
    Texts,
    /// Bytes of lines, of which a message says more.
    Lines,
}

/// Work that is done sooner shows no bar.
const PATIENCE: Duration = Duration::from_secs(1);

impl Progress {
    /// Nothing is shown yet.
    pub fn new(what: &'static str, unit: Unit) -> Progress {
        Progress { what, unit, start: Instant::now(), bar: None, is_terminal: std::io::stderr().is_terminal() }
    }

    /// So much of so much is done.
    pub fn update(&mut self, done: u64, total: u64) {
        if !self.is_terminal || self.start.elapsed() < PATIENCE {
            return;
        }
        let (what, unit) = (self.what, self.unit);
        let bar = self.bar.get_or_insert_with(|| {
            let template = match unit {
                Unit::Bytes => "{msg} [{bar:30}] {bytes} of {total_bytes}, {eta} left",
                Unit::Tokens => "{msg} [{bar:30}] {pos} of {len} tokens, {per_sec}, {eta} left",
                Unit::Texts => "{msg}: {pos} texts, {per_sec}",
                Unit::Lines => "{msg} [{bar:30}] {eta} left",
            };
            let bar = ProgressBar::new(total);
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style.progress_chars("=> "));
            }
            bar.with_message(what)
        });
        bar.set_length(total);
        bar.set_position(done);
    }

    /// Says something else than what the work is, if anything is shown.
    pub fn say(&mut self, message: impl FnOnce() -> String) {
        if let Some(bar) = &self.bar {
            bar.set_message(message());
        }
    }

    /// The work is done: the bar disappears.
    pub fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.finish();
    }
}
