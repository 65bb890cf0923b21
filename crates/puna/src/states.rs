//! Saved states: a prompt, or a conversation so far, with its keys and values, in a file that another process goes on
//! from without computing it again.
//!
//! [`Engine::save_state`] and [`Engine::load_state`] do all of it at once. Whoever steps an engine for others does it in
//! pieces of some MiB between steps: [`Engine::begin_save`] and a [`StateWriter`](puna_model::StateWriter) on another
//! thread, a [`StateReader`](puna_model::StateReader) there and [`Engine::begin_load`]. The blocks of a state on its way
//! are nobody else's. But requests go first: where they cannot go on otherwise, states on their way are given up, which
//! their next piece tells ([`puna_model::Error::BlocksTaken`]).

use crate::engine::Engine;
use crate::error::Error;
use puna_model::{Chain, Loading, Prompt, Saving, SeqId, State, StateKey};
use std::fs;
use std::path::{Path, PathBuf};

impl Engine {
    /// What states are known by that are saved here. When it is first asked for, it reads some bytes of each of the model's
    /// tensors from its files.
    ///
    /// # Errors
    /// [`puna_model::Error::Io`] where they cannot be read any more.
    pub fn state_key(&self) -> Result<StateKey, Error> {
        Ok(self.model.state_key(&self.kv)?)
    }

    /// Saves the rows of `prompt`, with the keys and values of as many of its whole blocks of 32 as the cache has: right
    /// after a request, its prompt and answer are there. `note` is any text. Gives the positions that are saved with keys
    /// and values.
    ///
    /// # Errors
    /// [`puna_model::Error::Write`]; as [`Engine::begin_save`].
    pub fn save_state(&mut self, prompt: &Prompt, note: &str, path: &Path) -> Result<usize, Error> {
        let chain = self.chain(prompt)?;
        Ok(self.model.save_state(&mut self.kv, &chain, note, path)?)
    }

    /// Puts a saved state into the cache. A request whose prompt begins with its tokens goes on from there, and says what
    /// it would have said without it, bit for bit.
    ///
    /// # Errors
    /// [`puna_model::Error::State`] where the file is damaged, or of another model or kind of cache.
    pub fn load_state(&mut self, path: &Path) -> Result<State, Error> {
        Ok(self.model.load_state(&mut self.kv, path)?)
    }

    /// Bytes of the file of a prompt whose whole blocks are all in the cache.
    ///
    /// # Errors
    /// What is wrong with the prompt.
    pub fn state_bytes(&self, prompt: &Prompt, note: &str) -> Result<u64, Error> {
        Ok(self.model.state_bytes(&self.kv, &self.chain(prompt)?, note))
    }

    /// Begins to save what the cache has of a prompt, as [`Engine::save_state`] does. It must be ended.
    ///
    /// # Errors
    /// What is wrong with the prompt; [`puna_model::Error::StateNote`].
    pub fn begin_save(&mut self, prompt: &Prompt, note: &str) -> Result<Saving, Error> {
        let chain = self.chain(prompt)?;
        let saving = self.model.begin_save(&mut self.kv, &chain, note)?;
        self.on_their_way.push(saving.seq());
        Ok(saving)
    }

    /// The next piece of what is saved; `None` when there was the last one.
    ///
    /// # Errors
    /// [`puna_model::Error::BlocksTaken`].
    pub fn next_piece(&self, saving: &mut Saving) -> Result<Option<Vec<u8>>, Error> {
        Ok(saving.next_piece(&self.kv)?)
    }

    /// Ends what [`Engine::begin_save`] began.
    pub fn end_save(&mut self, saving: Saving) {
        self.has_come(saving.seq());
        saving.end(&mut self.kv);
    }

    /// Whether a request for `prompt` could take more from the cache if a state were there. Where it could not, it is of
    /// no use to load it.
    ///
    /// # Errors
    /// What is wrong with the prompt.
    pub fn lacks(&self, prompt: &Prompt, state: &State) -> Result<bool, Error> {
        Ok(self.model.lacks(&self.kv, &self.chain(prompt)?, state))
    }

    /// Begins to put a state into the cache. It must be ended.
    ///
    /// # Errors
    /// [`puna_model::Error::State`] where it is of another model or kind of cache; [`puna_model::Error::OutOfMemory`]
    /// where running requests leave no room for it.
    pub fn begin_load(&mut self, state: &State) -> Result<Loading, Error> {
        let loading = self.model.begin_load(&mut self.kv, state)?;
        self.on_their_way.push(loading.seq());
        Ok(loading)
    }

    /// Takes the next piece of what is loaded.
    ///
    /// # Errors
    /// [`puna_model::Error::BlocksTaken`]; [`puna_model::Error::State`] where there are too many.
    pub fn put_piece(&mut self, loading: &mut Loading, piece: &[u8]) -> Result<(), Error> {
        Ok(loading.put(&mut self.kv, piece)?)
    }

    /// Ends what [`Engine::begin_load`] began: from now on requests find it. Only for pieces of a file that
    /// [`StateReader::finish`](puna_model::StateReader::finish) knows to be right.
    ///
    /// # Errors
    /// [`puna_model::Error::BlocksTaken`]; [`puna_model::Error::State`] where pieces are missing.
    pub fn finish_load(&mut self, loading: Loading) -> Result<(), Error> {
        self.has_come(loading.seq());
        Ok(loading.finish(&mut self.kv)?)
    }

    /// Ends what [`Engine::begin_load`] began, and forgets it.
    pub fn abandon_load(&mut self, loading: Loading) {
        self.has_come(loading.seq());
        loading.abandon(&mut self.kv);
    }

    fn has_come(&mut self, seq: SeqId) {
        self.on_their_way.retain(|other| *other != seq);
    }

    /// Gives up all states on their way; false where there are none.
    pub(crate) fn give_up_states(&mut self) -> bool {
        let had_any = !self.on_their_way.is_empty();
        self.on_their_way.drain(..).for_each(|seq| self.kv.remove(seq));
        had_any
    }

    fn chain(&self, prompt: &Prompt) -> Result<Chain, Error> {
        let config = self.model.config();
        prompt.check(config)?;
        Ok(Chain::of(prompt, config, config.rope.is_long(prompt.len())))
    }
}

/// A folder of saved states, each under a name.
#[derive(Clone, Debug)]
pub struct StateFolder {
    path: PathBuf,
}

/// How files of states end.
const END: &str = ".kv";

/// Longest name.
const MAX_NAME: usize = 64;

impl StateFolder {
    /// The folder, which is made where there is none.
    ///
    /// # Errors
    /// [`puna_model::Error::Io`].
    pub fn open(path: impl Into<PathBuf>) -> Result<StateFolder, Error> {
        let path = path.into();
        fs::create_dir_all(&path).map_err(|e| puna_model::Error::io(&path, &e))?;
        Ok(StateFolder { path })
    }

    /// The file of a name, which may not exist, for [`Engine::save_state`] and [`Engine::load_state`].
    ///
    /// # Errors
    /// [`Error::StateName`].
    pub fn file(&self, name: &str) -> Result<PathBuf, Error> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let is_name = (1..=MAX_NAME).contains(&name.len()) && !name.starts_with('.') && name.chars().all(is_plain);
        if is_name { Ok(self.path.join(format!("{name}{END}"))) } else { Err(Error::StateName { name: name.into() }) }
    }

    /// All names, in order.
    ///
    /// # Errors
    /// [`puna_model::Error::Io`].
    pub fn names(&self) -> Result<Vec<String>, Error> {
        let io = |e| puna_model::Error::io(&self.path, &e);
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(io)? {
            let file = entry.map_err(io)?.file_name();
            let name = file.to_str().and_then(|file| file.strip_suffix(END));
            names.extend(name.filter(|name| self.file(name).is_ok()).map(str::to_owned));
        }
        names.sort_unstable();
        Ok(names)
    }

    /// Removes a state; false where there is none of that name.
    ///
    /// # Errors
    /// [`Error::StateName`]; [`puna_model::Error::Io`].
    pub fn remove(&self, name: &str) -> Result<bool, Error> {
        let path = self.file(name)?;
        match fs::remove_file(&path) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(puna_model::Error::io(&path, &e).into()),
        }
    }
}
