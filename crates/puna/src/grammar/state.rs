//! Where an answer is in its grammar, and the thread that finds out what may come next.

use super::Grammar;
use crate::error::Error;
use llguidance::Matcher;
use llguidance::toktrie::SimpleVob;
use std::sync::{Mutex, mpsc};

/// The state of one answer.
pub(crate) struct State {
    grammar: Grammar,
    at: At,
}

enum At {
    /// Another thread makes the mask.
    Making(mpsc::Receiver<Made>),
    Here(Made),
    /// Nothing can be done any more.
    Lost,
}

/// A parser, with the mask of the next token if it has been made.
struct Made {
    matcher: Box<Matcher>,
    mask: Option<Result<SimpleVob, String>>,
}

impl Made {
    fn make(&mut self) {
        if self.mask.is_none() {
            self.mask = Some(self.matcher.compute_mask_or_eos().map_err(|e| super::first_line(&e.to_string())));
        }
    }
}

/// A mask that is to be made, and where it goes.
type Job = (Made, mpsc::Sender<Made>);

/// The thread that makes masks, from the first one on.
#[derive(Default)]
pub(super) struct Worker(Mutex<Option<mpsc::Sender<Job>>>);

impl Worker {
    /// Gives a job away; takes it back if there is no thread for it.
    fn send(&self, job: Job) -> Result<(), Job> {
        let mut sender = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if sender.is_none() {
            let (to, jobs) = mpsc::channel::<Job>();
            let work = move || {
                for (mut made, back) in jobs {
                    made.make();
                    // Whoever asked may be gone.
                    let _ = back.send(made);
                }
            };
            if std::thread::Builder::new().name("puna-mask".into()).stack_size(super::STACK).spawn(work).is_ok() {
                *sender = Some(to);
            }
        }
        match sender.as_ref() {
            Some(sender) => sender.send(job).map_err(|mpsc::SendError(job)| job),
            None => Err(job),
        }
    }
}

impl State {
    /// At the beginning of the grammar; the first mask is being made.
    pub fn new(grammar: &Grammar) -> State {
        // A shallow copy would share the lexer's states, and with them the bound on their number.
        let made = Made { matcher: Box::new(grammar.matcher.deep_clone()), mask: None };
        let mut state = State { grammar: grammar.clone(), at: At::Lost };
        state.start(made);
        state
    }

    /// Has the next mask made by the other thread.
    fn start(&mut self, made: Made) {
        let (back, made_there) = mpsc::channel();
        self.at = match self.grammar.grammars.worker.send((made, back)) {
            Ok(()) => At::Making(made_there),
            Err((made, _)) => At::Here(made),
        };
    }

    fn here(&mut self) -> Result<&mut Made, Error> {
        if let At::Making(there) = &self.at {
            self.at = there.recv().map_or(At::Lost, At::Here);
        }
        match &mut self.at {
            At::Here(made) => Ok(made),
            _ => Err(Error::Constraint { problem: "the parser is gone".into() }),
        }
    }

    /// Which tokens may come next, a bit each, 32 to a word; ids beyond it may not.
    pub fn mask(&mut self) -> Result<&[u32], Error> {
        let made = self.here()?;
        made.make();
        match &made.mask {
            Some(Ok(mask)) => Ok(mask.as_slice()),
            Some(Err(problem)) => Err(Error::Constraint { problem: problem.clone() }),
            None => Ok(&[]),
        }
    }

    /// Goes on by a token that the mask allowed, and has the next mask made. Returns whether nothing but the end can
    /// come.
    pub fn accept(&mut self, token: u32) -> Result<bool, Error> {
        self.here()?;
        let At::Here(mut made) = std::mem::replace(&mut self.at, At::Lost) else { return Ok(true) };
        made.mask = None;
        if let Err(e) = made.matcher.consume_token(token) {
            return Err(Error::Constraint { problem: super::first_line(&e.to_string()) });
        }
        let is_complete = made.matcher.is_stopped();
        if is_complete {
            self.at = At::Here(made);
        } else {
            self.start(made);
        }
        Ok(is_complete)
    }
}
