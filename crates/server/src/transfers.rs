//! States on their way between an engine and a file, a piece at a time: the engine's thread copies pieces between its
//! steps, and another thread reads or writes the file.
//!
//! Who moves a state has a [`Transfer`] and asks for each piece or gives it, and waits. So there is one piece of a state
//! in memory at a time, and between two steps one piece of one state is copied, whoever asks. A transfer that is dropped
//! ends.

use crate::metrics::ModelMetrics;
use crate::openai::{ApiError, Kind};
use crate::worker::Command;
use puna::{Engine, Error, Loading, Saving, State};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use tokio::sync::oneshot;

/// Where something is answered that may be refused.
pub(crate) type Reply<T> = oneshot::Sender<Result<T, Error>>;

/// What the engine's thread is asked about a state, by its number.
pub(crate) enum Move {
    /// Begin to load it. A state that is saved begins with its request.
    Load(Arc<State>, Reply<()>),
    /// Give a piece of one that is saved.
    Next(Reply<Option<Vec<u8>>>),
    /// Take a piece of one that is loaded.
    Put(Vec<u8>, Reply<()>),
    /// All is there, and right: let requests find it.
    Finish(Reply<()>),
    /// Nobody moves it any more.
    End,
}

/// The side of whoever moves a state; it ends with the value. Its functions wait for the engine's thread.
pub(crate) struct Transfer {
    id: u64,
    commands: Sender<Command>,
}

impl Transfer {
    /// One that has not begun.
    pub fn new(commands: Sender<Command>) -> Transfer {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Transfer { id: NEXT.fetch_add(1, Ordering::Relaxed), commands }
    }

    /// Its number.
    pub fn id(&self) -> u64 {
        self.id
    }

    fn ask<T>(&self, what: impl FnOnce(Reply<T>) -> Move) -> Result<T, Trouble> {
        let (reply, answer) = oneshot::channel();
        let sent = self.commands.send(Command::Move(self.id, what(reply)));
        sent.map_err(|_| Trouble::Ended)?;
        answer.blocking_recv().map_err(|_| Trouble::Ended)?.map_err(Trouble::Engine)
    }

    pub fn load(&self, state: &Arc<State>) -> Result<(), Trouble> {
        self.ask(|reply| Move::Load(state.clone(), reply))
    }

    pub fn next_piece(&self) -> Result<Option<Vec<u8>>, Trouble> {
        self.ask(Move::Next)
    }

    pub fn put(&self, piece: Vec<u8>) -> Result<(), Trouble> {
        self.ask(|reply| Move::Put(piece, reply))
    }

    pub fn finish(self) -> Result<(), Trouble> {
        self.ask(Move::Finish)
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        // Where nobody hears it, nothing is left.
        let _ = self.commands.send(Command::Move(self.id, Move::End));
    }
}

/// Why a state does not move on.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// The engine says why.
    Engine(Error),
    /// The engine has ended, or was told to end everything.
    Ended,
    /// Nobody waits for it any more.
    Unwanted,
}

impl From<puna_model::Error> for Trouble {
    fn from(e: puna_model::Error) -> Trouble {
        Trouble::Engine(e.into())
    }
}

impl Trouble {
    /// Whether requests needed the cache: then it does without the state.
    pub fn is_lack_of_room(&self) -> bool {
        use puna_model::Error as E;
        matches!(self, Trouble::Engine(Error::Model(E::BlocksTaken | E::OutOfMemory { .. })))
    }
}

impl From<Trouble> for ApiError {
    fn from(trouble: Trouble) -> ApiError {
        use puna_model::Error as E;
        match trouble {
            Trouble::Engine(Error::Model(e)) => match e {
                // Where files of the server are is nobody's business.
                E::State { what, .. } => {
                    ApiError::new(Kind::Invalid, format!("the file of the prefix cannot be used: {what}"))
                        .code("prefix_unusable")
                }
                E::Write { what, .. } => {
                    let what = format!("the file of the prefix cannot be written: {what}");
                    ApiError::new(Kind::Server, what).code("prefix_not_written")
                }
                E::Io { what, .. } => {
                    let what = format!("the file of the prefix cannot be read: {what}");
                    ApiError::new(Kind::Server, what).code("prefix_not_read")
                }
                E::BlocksTaken => {
                    let what = "running requests needed the cache before the prefix was saved; try again later";
                    ApiError::new(Kind::Unavailable, what).code("prefix_not_saved")
                }
                e => ApiError::of_engine("", &e.into()),
            },
            Trouble::Engine(e) => ApiError::of_engine("", &e),
            Trouble::Ended => ApiError::new(Kind::Unavailable, "the prefix was given up: the server is ending"),
            Trouble::Unwanted => ApiError::new(Kind::Unavailable, "the prefix was given up: its client has gone"),
        }
    }
}

enum Way {
    Out(Saving),
    In(Loading),
}

/// The engine's side: states on their way, and pieces that are asked for.
#[derive(Default)]
pub(crate) struct Transfers {
    ways: HashMap<u64, Way>,
    asked: VecDeque<(u64, Move)>,
}

impl Transfers {
    /// Whether somebody waits for a piece.
    pub fn are_asked(&self) -> bool {
        !self.asked.is_empty()
    }

    /// A state begins to be saved.
    pub fn begin(&mut self, id: u64, saving: Saving) {
        self.ways.insert(id, Way::Out(saving));
    }

    /// Takes what is asked. What copies pieces waits for its turn.
    pub fn take(&mut self, engine: &mut Engine, id: u64, what: Move) {
        match what {
            Move::Load(state, reply) => {
                let begun = engine.begin_load(&state).map(|loading| drop(self.ways.insert(id, Way::In(loading))));
                let _ = reply.send(begun);
            }
            Move::Next(_) | Move::Put(..) => self.asked.push_back((id, what)),
            Move::Finish(reply) => {
                if let Some(Way::In(loading)) = self.ways.remove(&id) {
                    let _ = reply.send(engine.finish_load(loading));
                }
            }
            Move::End => self.ways.remove(&id).into_iter().for_each(|way| end(engine, way)),
        }
    }

    /// Copies one piece.
    pub fn serve(&mut self, engine: &mut Engine, metrics: &ModelMetrics) {
        let Some((id, what)) = self.asked.pop_front() else { return };
        // Whoever does not wait for a reply any more ends the transfer, and whoever asks for one that was ended hears
        // nothing.
        match (what, self.ways.get_mut(&id)) {
            (Move::Next(reply), Some(Way::Out(saving))) => {
                let piece = engine.next_piece(saving);
                metrics.saved_bytes.add(piece.as_ref().ok().and_then(Option::as_ref).map_or(0, Vec::len));
                let _ = reply.send(piece);
            }
            (Move::Put(piece, reply), Some(Way::In(loading))) => {
                metrics.loaded_bytes.add(piece.len());
                let _ = reply.send(engine.put_piece(loading, &piece));
            }
            _ => {}
        }
    }

    /// Ends all of them.
    pub fn end_all(&mut self, engine: &mut Engine) {
        self.asked.clear();
        self.ways.drain().for_each(|(_, way)| end(engine, way));
    }
}

fn end(engine: &mut Engine, way: Way) {
    match way {
        Way::Out(saving) => engine.end_save(saving),
        Way::In(loading) => engine.abandon_load(loading),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::openai::prefixes::Beginning;
    use crate::worker::{Keep, Said, Worker};
    use puna::sampler::PartialSampling;
    use puna::{EngineOptions, Request, StateReader, StateWriter};
    use std::sync::mpsc::channel;
    use std::thread::JoinHandle;
    use std::time::{Duration, Instant};
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    const NOTE: &str = "a note";

    /// An engine on its thread.
    struct Running {
        commands: Sender<Command>,
        metrics: Arc<ModelMetrics>,
        thread: JoinHandle<()>,
    }

    impl Running {
        fn start() -> Running {
            let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/models/qwen3-qknorm/model-f32.gguf");
            let options = EngineOptions { ctx: Some(100_000), ..EngineOptions::default() };
            let engine = Engine::load(path, &options, &mut |_, _| {}).unwrap();
            let (commands, receiver) = channel();
            let metrics = Arc::<ModelMetrics>::default();
            let worker = Worker::new(engine, receiver, metrics.clone());
            Running { commands, metrics, thread: std::thread::spawn(move || worker.run()) }
        }

        fn request(max_tokens: usize) -> Request {
            let prompt: Vec<u32> = (0..64).map(|i| 3 + i % 90).collect();
            let wishes = PartialSampling { ignore_eos: Some(true), ..PartialSampling::default() };
            let sampling = PartialSampling::resolve(&wishes, &PartialSampling::default());
            Request { max_tokens: Some(max_tokens), ..Request::new(prompt, sampling) }
        }

        fn keep(&self) -> (Transfer, oneshot::Receiver<Result<(), ApiError>>) {
            let (reply, answer) = oneshot::channel();
            (self.keep_for(reply), answer)
        }

        fn keep_for(&self, reply: oneshot::Sender<Result<(), ApiError>>) -> Transfer {
            let transfer = Transfer::new(self.commands.clone());
            let beginning = Beginning { request: Running::request(0), note: NOTE.into() };
            let keep = Keep { name: "".into(), beginning, most_bytes: u64::MAX, transfer: transfer.id(), reply };
            self.commands.send(Command::Keep(Box::new(keep))).unwrap();
            transfer
        }

        /// A transfer that has begun.
        fn kept(&self) -> Transfer {
            let (transfer, answer) = self.keep();
            answer.blocking_recv().unwrap().unwrap();
            transfer
        }

        /// Waits until running requests and states hold so much.
        fn wait(&self, fits: impl Fn(f64) -> bool) {
            let start = Instant::now();
            while !fits(self.metrics.kv_held.get()) {
                assert!(start.elapsed() < Duration::from_secs(60), "{} bytes are held", self.metrics.kv_held.get());
                std::thread::sleep(Duration::from_millis(1));
            }
        }

        fn stream(&self) -> UnboundedReceiver<Said> {
            let (accepted, answer) = oneshot::channel();
            let (events, said) = unbounded_channel();
            let requests = vec![Running::request(100_000)];
            self.commands.send(Command::Generate { name: "".into(), requests, accepted, events }).unwrap();
            answer.blocking_recv().unwrap().unwrap();
            said
        }

        fn end(self) {
            drop(self.commands);
            self.thread.join().unwrap();
        }
    }

    #[test]
    fn who_goes_away_leaves_nothing() {
        let running = Running::start();
        let transfer = running.kept();
        running.wait(|held| held > 0.0);
        drop(transfer);
        running.wait(|held| held == 0.0);
        // In the middle, and before anything is computed.
        let transfer = running.kept();
        assert!(transfer.next_piece().unwrap().is_some());
        running.wait(|held| held > 0.0);
        drop(transfer);
        running.wait(|held| held == 0.0);
        drop(running.keep());
        // Nobody waits for the answer any more when it comes, though the transfer has not been ended yet.
        let (reply, answer) = oneshot::channel();
        drop(answer);
        let transfer = running.keep_for(reply);
        running.wait(|held| held == 0.0);
        drop(transfer);
        running.end();
    }

    #[test]
    fn others_go_on_while_nobody_takes_a_piece() {
        let running = Running::start();
        let mut said = running.stream();
        let transfer = running.kept();
        for _ in 0..200 {
            said.blocking_recv().unwrap().1.unwrap();
        }
        assert!(transfer.next_piece().unwrap().is_some());
        assert!(transfer.next_piece().unwrap().is_none());
        drop((said, transfer));
        running.wait(|held| held == 0.0);
        running.end();
    }

    #[test]
    fn a_state_goes_there_and_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        let first = Running::start();
        let transfer = first.kept();
        let mut writer = StateWriter::create(&path).unwrap();
        while let Some(piece) = transfer.next_piece().unwrap() {
            writer.write(&piece).unwrap();
        }
        writer.finish().unwrap();
        drop(transfer);
        first.wait(|held| held == 0.0);
        first.end();
        let second = Running::start();
        let load = |is_finished: bool| {
            let mut reader = StateReader::open(&path).unwrap();
            assert_eq!((reader.state().positions(), reader.state().note()), (64, NOTE));
            let transfer = Transfer::new(second.commands.clone());
            transfer.load(&Arc::new(reader.state().clone())).unwrap();
            while let Some(piece) = reader.next_piece().unwrap() {
                transfer.put(piece).unwrap();
            }
            if is_finished {
                transfer.finish().unwrap();
            }
        };
        load(false);
        second.wait(|held| held == 0.0);
        assert_eq!(second.metrics.kv_cached.get(), 0.0);
        load(true);
        second.wait(|held| held == 0.0);
        assert!(second.metrics.kv_cached.get() > 0.0);
        second.end();
    }

    #[test]
    fn the_end_of_all_is_the_end_of_states() {
        let running = Running::start();
        let transfer = running.kept();
        running.commands.send(Command::End).unwrap();
        assert!(matches!(transfer.next_piece(), Err(Trouble::Ended)));
        assert!(matches!(transfer.load(&never()), Err(Trouble::Engine(_))));
        drop(transfer);
        running.wait(|held| held == 0.0);
        running.end();
    }

    /// A state of no model.
    fn never() -> Arc<State> {
        let dir = tempfile::tempdir().unwrap();
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/models/llama-gqa/model-f32.gguf");
        let mut engine = Engine::load(path, &EngineOptions::default(), &mut |_, _| {}).unwrap();
        let file = dir.path().join("state");
        engine.save_state(&vec![1, 2, 3].into(), "", &file).unwrap();
        Arc::new(StateReader::open(&file).unwrap().state().clone())
    }
}
