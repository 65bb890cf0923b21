//! Beginnings of prompts that clients keep under names: files of a folder, which is all that there is of them, so that a
//! server finds those of the one before it.
//!
//! What a file says is read when somebody wants to know, and remembered until the file changes.

use crate::error::Error;
use crate::http::blocking;
use crate::models::Model;
use crate::openai::prefixes::Beginning;
use crate::openai::{ApiError, Card, Kind};
use crate::options::Options;
use crate::transfers::{Transfer, Trouble};
use puna::{Prompt, Request, State, StateFolder, StateReader, StateWriter};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::oneshot;

/// The prefixes of a server. Its functions that are not `async` wait for files.
pub(crate) struct Prefixes {
    folder: StateFolder,
    most: usize,
    most_bytes: u64,
    known: Mutex<HashMap<String, Known>>,
    /// One is made at a time, so that limits hold.
    making: Arc<tokio::sync::Mutex<()>>,
    /// One file is read at a time: whoever wants the same one finds it read.
    reading: Arc<tokio::sync::Mutex<()>>,
    /// Files get and lose their names one at a time, so that who has made one can tell of it.
    naming: Mutex<()>,
}

/// What tells a file from one that replaced it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    bytes: u64,
    modified: SystemTime,
}

/// What is known of a file.
#[derive(Clone)]
struct Known {
    stamp: Stamp,
    /// What it says, or what is wrong with it.
    state: Result<Arc<State>, ApiError>,
    /// When all of it was put into a cache.
    loaded: Option<Instant>,
}

impl Prefixes {
    /// Those of a folder, where the options name one.
    ///
    /// # Errors
    /// There is no such folder, and none can be made.
    pub fn open(options: &Options) -> Result<Option<Arc<Prefixes>>, Error> {
        let Some(path) = &options.state_dir else { return Ok(None) };
        Ok(Some(Arc::new(Prefixes {
            folder: StateFolder::open(path)?,
            most: options.limits.prefixes,
            most_bytes: options.limits.prefix_bytes,
            known: Mutex::default(),
            making: Arc::default(),
            reading: Arc::default(),
            naming: Mutex::default(),
        })))
    }

    /// The file of a name.
    ///
    /// # Errors
    /// A name that no file can have.
    pub fn file(&self, name: &str) -> Result<PathBuf, ApiError> {
        self.folder.file(name).map_err(|_| {
            let what = "expected 1 to 64 letters, digits, '-', '_' or '.', the first no '.'";
            ApiError::invalid("name", what)
        })
    }

    /// Keeps a prefix, in place of one of the same name. Gives it as the server lists it.
    ///
    /// # Errors
    /// There is no room for it, or it cannot be computed or written. What was there before is left then.
    pub async fn keep(
        self: &Arc<Self>,
        model: &Model,
        request: Arc<str>,
        name: &str,
        beginning: Beginning,
        cards: Vec<Arc<Card>>,
    ) -> Result<Value, ApiError> {
        let path = self.file(name)?;
        let making = self.making.clone().lock_owned().await;
        let (this, own) = (self.clone(), name.to_owned());
        let room = blocking(move || this.room_beside(&own)).await?;
        let transfer = model.keep(request, beginning, room).await?;
        let (wanted, _waits) = oneshot::channel::<()>();
        let (this, name) = (self.clone(), name.to_owned());
        blocking(move || {
            let _making = making;
            let written = write(&transfer, &path, &wanted)?;
            let _naming = this.naming.lock().unwrap_or_else(PoisonError::into_inner);
            written.finish().map_err(Trouble::from)?;
            Ok(this.has_written(&name, &path)?.value(&name, &cards))
        })
        .await
    }

    /// Bytes that a file of this name may have.
    fn room_beside(&self, name: &str) -> Result<u64, ApiError> {
        let others = self.names()?.into_iter().filter(|other| other != name);
        let sizes: Vec<u64> = others.filter_map(|other| Some(self.stamp(&other).ok()??.bytes)).collect();
        if sizes.len() >= self.most {
            let what = format!("{} prefixes are kept, as many as there may be: delete others", sizes.len());
            return Err(ApiError::new(Kind::Invalid, what).code("prefixes_full"));
        }
        Ok(self.most_bytes.saturating_sub(sizes.iter().sum()))
    }

    /// What a file says that was just written need not be checked.
    fn has_written(&self, name: &str, path: &Path) -> Result<Known, ApiError> {
        let state = StateReader::open(path).map_err(Trouble::from)?.state().clone();
        let stamp = self.stamp(name)?.ok_or_else(|| unknown(name))?;
        let known = Known { stamp, state: Ok(Arc::new(state)), loaded: None };
        self.lock().insert(name.to_owned(), known.clone());
        Ok(known)
    }

    /// Puts a prefix into the cache of a model, if it is not there and some of the requests could take something of it.
    ///
    /// # Errors
    /// There is none of this name, it is of no use to the model, or damaged.
    pub async fn load(self: &Arc<Self>, model: &Arc<Model>, name: &str, requests: &[Request]) -> Result<(), ApiError> {
        let asked = Instant::now();
        self.file(name)?;
        let state = self.state(name).await?;
        check_key(model.card()?, &state)?;
        // Those that are steered, or that score their prompts, take nothing from it.
        let can_take = |request: &&Request| request.steering.is_none() && request.prompt_logprobs.is_none();
        let prompts: Vec<Prompt> = requests.iter().filter(can_take).map(|request| request.prompt.clone()).collect();
        if !model.lacks(prompts, state).await? {
            return Ok(());
        }
        let reading = self.reading.clone().lock_owned().await;
        if self.lock().get(name).is_some_and(|known| known.loaded.is_some_and(|loaded| loaded > asked)) {
            return Ok(());
        }
        let (wanted, _waits) = oneshot::channel::<()>();
        let (this, model, name) = (self.clone(), model.clone(), name.to_owned());
        blocking(move || {
            let _reading = reading;
            match this.load_file(&model, &name, &wanted) {
                // The requests do without it.
                Err(trouble) if trouble.is_lack_of_room() => Ok(()),
                Err(_) if this.stamp(&name)?.is_none() => Err(unknown(&name)),
                other => Ok(other?),
            }
        })
        .await
    }

    fn load_file(&self, model: &Model, name: &str, wanted: &oneshot::Sender<()>) -> Result<(), Trouble> {
        let path = self.folder.file(name).map_err(Trouble::Engine)?;
        let mut reader = StateReader::open(&path)?;
        let transfer = model.transfer();
        transfer.load(&Arc::new(reader.state().clone()))?;
        while let Some(piece) = reader.next_piece()? {
            if wanted.is_closed() {
                return Err(Trouble::Unwanted);
            }
            transfer.put(piece)?;
        }
        if let Err(e) = reader.finish() {
            // It was right when it was looked at.
            self.lock().remove(name);
            return Err(e.into());
        }
        transfer.finish()?;
        tracing::info!(model = model.id, prefix = name, "a prefix was put into the cache");
        if let Some(known) = self.lock().get_mut(name) {
            known.loaded = Some(Instant::now());
        }
        Ok(())
    }

    /// What the file of a name says.
    ///
    /// # Errors
    /// There is none, or it is no right one.
    async fn state(self: &Arc<Self>, name: &str) -> Result<Arc<State>, ApiError> {
        let (this, own) = (self.clone(), name.to_owned());
        let known = blocking(move || this.known(&own)).await?;
        let known = match known {
            Some(known) => known,
            None => {
                let reading = self.reading.clone().lock_owned().await;
                let (this, own) = (self.clone(), name.to_owned());
                blocking(move || {
                    let _reading = reading;
                    this.look(&own)
                })
                .await?
            }
        };
        known.state
    }

    /// All prefixes, as the server lists them.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub async fn list(self: &Arc<Self>, cards: Vec<Arc<Card>>) -> Result<Vec<Value>, ApiError> {
        let reading = self.reading.clone().lock_owned().await;
        let this = self.clone();
        blocking(move || {
            let _reading = reading;
            // One that has just been deleted is none.
            let entry = |name: String| this.look(&name).ok().map(|known| known.value(&name, &cards));
            Ok(this.names()?.into_iter().filter_map(entry).collect())
        })
        .await
    }

    /// One of them.
    ///
    /// # Errors
    /// There is none of this name.
    pub async fn find(self: &Arc<Self>, name: &str, cards: Vec<Arc<Card>>) -> Result<Value, ApiError> {
        self.file(name)?;
        let reading = self.reading.clone().lock_owned().await;
        let (this, name) = (self.clone(), name.to_owned());
        blocking(move || {
            let _reading = reading;
            Ok(this.look(&name)?.value(&name, &cards))
        })
        .await
    }

    /// Deletes a prefix. What of it is in a cache stays there while memory lasts.
    ///
    /// # Errors
    /// There is none of this name.
    pub async fn remove(self: &Arc<Self>, name: &str) -> Result<(), ApiError> {
        self.file(name)?;
        let (this, name) = (self.clone(), name.to_owned());
        blocking(move || {
            let _naming = this.naming.lock().unwrap_or_else(PoisonError::into_inner);
            this.lock().remove(&name);
            let has_removed = this.folder.remove(&name).map_err(Trouble::Engine)?;
            if has_removed { Ok(()) } else { Err(unknown(&name)) }
        })
        .await
    }

    fn names(&self) -> Result<Vec<String>, ApiError> {
        Ok(self.folder.names().map_err(Trouble::Engine)?)
    }

    /// The file of a name as it is now; `None` where there is none.
    fn stamp(&self, name: &str) -> Result<Option<Stamp>, ApiError> {
        let path = self.folder.file(name).map_err(Trouble::Engine)?;
        let meta = match fs::metadata(&path) {
            Ok(meta) => meta,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Trouble::from(puna_model::Error::io(&path, &e)).into()),
        };
        Ok(Some(Stamp { bytes: meta.len(), modified: meta.modified().unwrap_or(UNIX_EPOCH) }))
    }

    /// What is known of a file, if it has not changed since.
    fn known(&self, name: &str) -> Result<Option<Known>, ApiError> {
        let stamp = self.stamp(name)?.ok_or_else(|| unknown(name))?;
        Ok(self.lock().get(name).filter(|known| known.stamp == stamp).cloned())
    }

    /// Looks at a file, at all of it where it is not known.
    fn look(&self, name: &str) -> Result<Known, ApiError> {
        if let Some(known) = self.known(name)? {
            return Ok(known);
        }
        let stamp = self.stamp(name)?.ok_or_else(|| unknown(name))?;
        let path = self.folder.file(name).map_err(Trouble::Engine)?;
        let read = || {
            let mut reader = StateReader::open(&path)?;
            reader.check()?;
            Ok::<Arc<State>, Trouble>(Arc::new(reader.state().clone()))
        };
        let state = read().map_err(ApiError::from);
        // It may have been deleted before it was opened.
        if state.is_err() && self.stamp(name)?.is_none() {
            return Err(unknown(name));
        }
        let known = Known { stamp, state, loaded: None };
        self.lock().insert(name.to_owned(), known.clone());
        Ok(known)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    /// As the server tells it.
    fn value(&self, name: &str, cards: &[Arc<Card>]) -> Value {
        let created = self.stamp.modified.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let (model, tokens, error) = match &self.state {
            Err(e) => (None, None, Some(e.message.clone())),
            Ok(state) => {
                let is_of = |card: &&Arc<Card>| card.prefixes.is_some_and(|key| key.is_of_model(state));
                let card = cards.iter().find(is_of);
                let error = match card {
                    Some(card) => check_key(card, state).err().map(|e| e.message),
                    None => Some("it is of no model that is served".to_owned()),
                };
                let said = || serde_json::from_str::<Value>(state.note()).ok()?["model"].as_str().map(str::to_owned);
                (card.map(|card| card.id.clone()).or_else(said), Some(state.positions()), error)
            }
        };
        json!({
            "id": name,
            "object": "prefix",
            "created": created,
            "model": model,
            "tokens": tokens,
            "bytes": self.stamp.bytes,
            "error": error,
        })
    }
}

/// Whether a state is of use to a model.
fn check_key(card: &Card, state: &State) -> Result<(), ApiError> {
    let key = card.prefixes.ok_or_else(|| ApiError::no_prefixes(Kind::Invalid))?;
    Ok(key.check(state).map_err(Trouble::from)?)
}

fn unknown(name: &str) -> ApiError {
    let error = ApiError::new(Kind::NotFound, format!("there is no prefix called {name:?}")).code("prefix_not_found");
    ApiError { param: Some("name".into()), ..error }
}

/// Writes what a transfer gives, as long as somebody waits for it. The file has no name yet.
fn write(transfer: &Transfer, path: &Path, wanted: &oneshot::Sender<()>) -> Result<StateWriter, Trouble> {
    let mut writer = StateWriter::create(path)?;
    while let Some(piece) = transfer.next_piece()? {
        if wanted.is_closed() {
            return Err(Trouble::Unwanted);
        }
        writer.write(&piece)?;
    }
    Ok(writer)
}
