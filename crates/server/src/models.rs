//! The models that are served, by name.

use crate::error::Error;
use crate::loading::Loading;
use crate::metrics::ModelMetrics;
use crate::openai::prefixes::Beginning;
use crate::openai::{ApiError, Card, Job, Kind};
use crate::options::Options;
use crate::room::{Full, Place, Room};
use crate::transfers::Transfer;
use crate::worker::{Command, Keep, Said, Worker};
use puna::{EmbedOptions, Prompt, State};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use tokio::sync::{mpsc, oneshot};

/// A model that is served, or will be when it is loaded.
pub(crate) struct Model {
    pub id: String,
    pub metrics: Arc<ModelMetrics>,
    card: OnceLock<Arc<Card>>,
    commands: Sender<Command>,
    room: Room,
    thread: OnceLock<JoinHandle<()>>,
}

/// An accepted request: what it hears, and its place among those who run or wait.
pub(crate) struct Accepted {
    pub events: mpsc::UnboundedReceiver<Said>,
    pub _place: Place,
}

impl Model {
    fn new(id: String, options: &Options) -> (Model, Receiver<Command>) {
        let (sender, receiver) = channel();
        let model = Model {
            id,
            metrics: Arc::default(),
            card: OnceLock::new(),
            commands: sender,
            room: Room::new(options.engine.max_running.saturating_add(options.limits.queue)),
            thread: OnceLock::new(),
        };
        (model, receiver)
    }

    /// What requests need to know of it.
    ///
    /// # Errors
    /// Not now: it is being loaded, or its engine has ended.
    pub fn card(&self) -> Result<&Arc<Card>, ApiError> {
        let unavailable = |what: &str| ApiError::new(Kind::Unavailable, format!("{}: {what}", self.id));
        if self.has_ended() {
            return Err(unavailable("its engine has ended"));
        }
        self.card.get().ok_or_else(|| unavailable("the model is being loaded").code("model_loading"))
    }

    /// From here on it can be asked.
    pub fn set_card(&self, card: Card) {
        // It is set here and nowhere else.
        let _ = self.card.set(Arc::new(card));
    }

    pub fn is_loaded(&self) -> bool {
        self.card.get().is_some()
    }

    pub fn has_ended(&self) -> bool {
        self.thread.get().is_some_and(JoinHandle::is_finished)
    }

    /// A place for `n` answers.
    ///
    /// # Errors
    /// If there is none, or can be none.
    pub fn place(&self, n: usize) -> Result<Place, ApiError> {
        self.room.take(n).map_err(|full| match full {
            Full::Never { most } => ApiError::invalid(
                "n",
                format!("{n} answers at once (prompts times n), the server takes at most {most}"),
            ),
            Full::Later(wait) => {
                let what = format!("{}: too many requests wait already; try again later", self.id);
                ApiError { retry_after: Some(wait), ..ApiError::new(Kind::RateLimit, what).code("queue_full") }
            }
        })
    }

    fn send(&self, command: Command) -> Result<(), ApiError> {
        let ended = |_| ApiError::new(Kind::Unavailable, format!("{}: its engine has ended", self.id));
        self.commands.send(command).map_err(ended)
    }

    fn has_gone<E>(&self) -> impl Fn(E) -> ApiError {
        let what = format!("{}: its engine has ended", self.id);
        move |_| ApiError::new(Kind::Unavailable, what.clone())
    }

    /// Begins to answer, with a place for all answers.
    ///
    /// # Errors
    /// The engine refuses it.
    pub async fn generate(&self, name: Arc<str>, job: &mut Job, place: Place) -> Result<Accepted, ApiError> {
        let (accepted, answer) = oneshot::channel();
        let (sender, events) = mpsc::unbounded_channel();
        let requests = std::mem::take(&mut job.requests);
        self.send(Command::Generate { name, requests, accepted, events: sender })?;
        let answer = answer.await.map_err(self.has_gone())?;
        answer.map_err(|e| ApiError::of_engine("", &e))?;
        Ok(Accepted { events, _place: place })
    }

    /// Embeds texts.
    ///
    /// # Errors
    /// Too many wait, or the engine refuses them.
    pub async fn embed(&self, texts: Vec<Vec<u32>>, options: EmbedOptions) -> Result<Vec<Vec<f32>>, ApiError> {
        let _place = self.place(1)?;
        let (reply, answer) = oneshot::channel();
        self.send(Command::Embed { texts, options, reply })?;
        let answer = answer.await.map_err(self.has_gone())?;
        answer.map_err(|e| ApiError::of_engine("input", &e))
    }

    /// Computes the beginning of prompts, whose file may have at most so many bytes; the transfer that saves it.
    ///
    /// # Errors
    /// Too many wait, the engine refuses it, or the file would be too large.
    pub async fn keep(&self, name: Arc<str>, beginning: Beginning, most_bytes: u64) -> Result<Transfer, ApiError> {
        let _place = self.place(1)?;
        let (reply, answer) = oneshot::channel();
        let transfer = self.transfer();
        let keep = Keep { name, beginning, most_bytes, transfer: transfer.id(), reply };
        self.send(Command::Keep(Box::new(keep)))?;
        answer.await.map_err(self.has_gone())??;
        Ok(transfer)
    }

    /// Whether requests of one of these prompts could take more from the cache if the state were there.
    ///
    /// # Errors
    /// What is wrong with a prompt.
    pub async fn lacks(&self, prompts: Vec<Prompt>, state: Arc<State>) -> Result<bool, ApiError> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Lacks { prompts, state, reply })?;
        let answer = answer.await.map_err(self.has_gone())?;
        answer.map_err(|e| ApiError::of_engine("", &e))
    }

    /// A way for a state, which has not begun.
    pub fn transfer(&self) -> Transfer {
        Transfer::new(self.commands.clone())
    }

    /// What it works on.
    pub async fn slots(&self) -> Vec<crate::worker::Slot> {
        let (reply, answer) = oneshot::channel();
        if !self.is_loaded() || self.send(Command::Slots(reply)).is_err() {
            return Vec::new();
        }
        answer.await.unwrap_or_default()
    }

    /// Ends all its requests.
    pub fn end(&self) {
        // One that has ended has none.
        let _ = self.send(Command::End);
    }
}

/// All models.
pub(crate) struct Models {
    /// In the order in which they were given.
    pub list: Vec<Arc<Model>>,
    names: HashMap<String, usize>,
}

impl Models {
    /// Starts to load models, one after the other, each on the thread that it will run on. `failed` hears of the first
    /// one that cannot be loaded.
    ///
    /// # Errors
    /// Names that do not fit together; no thread.
    pub fn start(options: &Options, failed: mpsc::Sender<Error>) -> Result<Models, Error> {
        let (paths, names) = named(options)?;
        let loading = Arc::new(Loading::new(paths.len()));
        let mut list = Vec::new();
        for (id, path) in paths {
            let (model, commands) = Model::new(id, options);
            let model = Arc::new(model);
            let (shared, failed, loading, options) = (model.clone(), failed.clone(), loading.clone(), options.clone());
            let run = move || {
                let loaded = loading.load(&shared, &path, &options);
                let metrics = shared.metrics.clone();
                // The thread must not keep itself alive: it ends when nobody can send commands.
                drop(shared);
                match loaded {
                    Ok(engine) => Worker::new(engine, commands, metrics).run(),
                    // Where nobody listens, the server has ended.
                    Err(e) => drop(failed.blocking_send(e.into())),
                }
            };
            let thread = std::thread::Builder::new().name(format!("model-{}", list.len())).spawn(run);
            let thread = thread.map_err(|source| Error::System { what: "no thread for a model", source })?;
            // It is set here and nowhere else.
            let _ = model.thread.set(thread);
            list.push(model);
        }
        Ok(Models { list, names })
    }

    /// One model that is never loaded.
    #[cfg(test)]
    pub fn unloaded(options: &Options) -> (Models, Receiver<Command>) {
        let (model, commands) = Model::new("a".into(), options);
        let names = HashMap::from([(model.id.clone(), 0)]);
        (Models { list: vec![Arc::new(model)], names }, commands)
    }

    /// The model that a request names. A wrong name is taken for the only model where there is only one, as clients
    /// have names of other services built in.
    ///
    /// # Errors
    /// There is no such model, or none is named where there are several.
    pub fn pick(&self, name: Option<&str>) -> Result<&Arc<Model>, ApiError> {
        match (name.and_then(|name| self.names.get(name)), self.list.as_slice()) {
            (Some(&at), list) => Ok(&list[at]),
            (None, [only]) => Ok(only),
            (None, _) => Err(match name {
                Some(name) => self.unknown(name),
                None => ApiError::invalid("model", format!("missing, but required: one of {}", self.known())),
            }),
        }
    }

    /// The model of exactly this name.
    ///
    /// # Errors
    /// There is no such model.
    pub fn find(&self, name: &str) -> Result<&Arc<Model>, ApiError> {
        self.names.get(name).map(|&at| &self.list[at]).ok_or_else(|| self.unknown(name))
    }

    fn unknown(&self, name: &str) -> ApiError {
        let name: String = name.chars().take(100).collect();
        let what = format!("the model {name:?} does not exist; there are: {}", self.known());
        ApiError { param: Some("model".into()), ..ApiError::new(Kind::NotFound, what).code("model_not_found") }
    }

    fn known(&self) -> String {
        self.list.iter().map(|model| model.id.as_str()).collect::<Vec<_>>().join(", ")
    }

    /// Names of a model beside its own.
    pub fn aliases(&self, at: usize) -> Vec<&str> {
        let own = &self.list[at].id;
        let mut names: Vec<&str> =
            self.names.iter().filter(|(name, i)| **i == at && *name != own).map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        names
    }
}

type Named = (Vec<(String, PathBuf)>, HashMap<String, usize>);

/// Models by the names of their files, and who has which name.
fn named(options: &Options) -> Result<Named, Error> {
    let mut paths: Vec<(String, PathBuf)> =
        options.models.iter().map(|path| (model_name(path), path.clone())).collect();
    let mut names = HashMap::new();
    let mut add = |name: &str, at: usize| match names.insert(name.to_owned(), at) {
        None => Ok(()),
        Some(_) => Err(Error::Name { name: name.to_owned() }),
    };
    for (at, (name, _)) in paths.iter().enumerate() {
        add(name, at)?;
    }
    for (alias, target) in &options.aliases {
        let known = || paths.iter().position(|(name, path)| name == target || path.as_os_str() == target.as_str());
        let at = match known() {
            Some(at) => at,
            None if Path::new(target).exists() => {
                paths.push((alias.clone(), target.into()));
                paths.len() - 1
            }
            None => {
                let known = paths.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
                return Err(Error::Alias { alias: alias.clone(), target: target.clone(), known });
            }
        };
        add(alias, at)?;
    }
    if paths.is_empty() { Err(Error::NoModel) } else { Ok((paths, names)) }
}

/// What a model is called unless it has an alias: the name of its file without the ending, or of its folder.
pub fn model_name(path: &Path) -> String {
    let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
    name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn names_are_unique_and_aliases_stand_for_something() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, "").unwrap();
            path
        };
        let (a, b) = (file("a.gguf"), file("b.gguf"));
        let options = |aliases: &[(&str, &str)]| Options {
            aliases: aliases.iter().map(|(n, t)| ((*n).to_owned(), (*t).to_owned())).collect(),
            ..Options::new(vec![a.clone()])
        };
        let (paths, names) = named(&options(&[("x", "a"), ("y", b.to_str().unwrap()), ("z", "y")])).unwrap();
        assert_eq!(paths.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["a", "y"]);
        assert_eq!((names["a"], names["x"], names["y"], names["z"]), (0, 0, 1, 1));
        assert!(matches!(named(&options(&[("a", "a")])), Err(Error::Name { .. })));
        assert!(matches!(named(&options(&[("x", "nothing")])), Err(Error::Alias { .. })));
        assert!(matches!(named(&Options::new(vec![a.clone(), a.clone()])), Err(Error::Name { .. })));
        assert!(matches!(named(&Options::new(vec![])), Err(Error::NoModel)));
    }
}
