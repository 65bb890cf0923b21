//! Saved states: a prompt, or a conversation so far, with its keys and values, in a file that another process goes on
//! from without computing it again.

use crate::engine::Engine;
use crate::error::Error;
use puna_model::{Chain, Prompt, State};
use std::fs;
use std::path::{Path, PathBuf};

impl Engine {
    /// Saves the rows of `prompt`, with the keys and values of as many of its whole blocks of 32 as the cache has: right
    /// after a request, its prompt and answer are there. `note` is any text. Gives the positions that are saved with keys
    /// and values.
    ///
    /// # Errors
    /// [`puna_model::Error::Write`]; what is wrong with the prompt.
    pub fn save_state(&self, prompt: &Prompt, note: &str, path: &Path) -> Result<usize, Error> {
        let config = self.model.config();
        prompt.check(config)?;
        let chain = Chain::of(prompt, config, config.rope.is_long(prompt.len()));
        Ok(self.model.save_state(&self.kv, &chain, note, path)?)
    }

    /// Puts a saved state into the cache. A request whose prompt begins with its tokens goes on from there, and says what
    /// it would have said without it, bit for bit.
    ///
    /// # Errors
    /// [`puna_model::Error::State`] where the file is damaged, or of another model or kind of cache.
    pub fn load_state(&mut self, path: &Path) -> Result<State, Error> {
        Ok(self.model.load_state(&mut self.kv, path)?)
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
