//! A conversation in a terminal.

use crate::error::Error;
use crate::run::Session;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Instant;

const HELP: &str = "\
/help           this list
/system TEXT    begin anew with a system message; without TEXT, without one
/clear          begin anew
/again          another answer to the last message
/exit           leave; so do Ctrl-D, and Ctrl-C twice
A line that ends in \\ goes on in the next one. Ctrl-C ends an answer.";

/// Talks until the user leaves.
pub fn run(session: &mut Session, system: Option<&str>) -> Result<(), Error> {
    let mut editor = DefaultEditor::new().map_err(|e| Error::Input(format!("the terminal cannot be read: {e}")))?;
    // The editor takes Ctrl-C for itself when it is made: we come after it.
    session.catch_interrupts()?;
    let history = history_file();
    if let Some(path) = &history {
        // The first time there is none.
        let _ = editor.load_history(path);
    }
    let config = session.engine.config();
    let name = config.name.as_deref().unwrap_or(config.arch);
    eprintln!(
        "{}, context of {} tokens. /help lists what else you can type.",
        name.escape_debug(),
        session.engine.ctx()
    );
    let mut talk = Conversation { system: None, messages: session.first_messages(system) };
    talk.system = talk.messages.first().filter(|message| message["role"] == "system").cloned();
    let mut wants_to_leave = false;
    loop {
        let line = match read(&mut editor) {
            Ok(line) => line,
            Err(ReadlineError::Eof) => break,
            Err(ReadlineError::Interrupted) if wants_to_leave => break,
            Err(ReadlineError::Interrupted) => {
                // It may have been meant for an answer that had just ended.
                eprintln!("Once more to leave.");
                wants_to_leave = true;
                continue;
            }
            Err(e) => return Err(Error::Input(format!("the terminal cannot be read: {e}"))),
        };
        wants_to_leave = false;
        session.forget_interrupt();
        let text = line.trim();
        if text.is_empty() {
            continue;
        }
        let _ = editor.add_history_entry(text);
        match text.split_once(' ').unwrap_or((text, "")) {
            ("/exit" | "/quit", _) => break,
            ("/help", _) => eprintln!("{HELP}"),
            ("/clear", _) => talk.clear(),
            ("/system", text) => talk = Conversation::new(Some(text).filter(|t| !t.is_empty())),
            ("/again", _) => match talk.take_back() {
                Some(text) => talk.say(session, &text)?,
                None => eprintln!("There is nothing to answer yet."),
            },
            (command, _) if command.starts_with('/') => eprintln!("{command} is no command; /help lists them."),
            _ => talk.say(session, text)?,
        }
    }
    if let Some(path) = &history {
        save(&mut editor, path);
    }
    session.save(&talk.messages)
}

struct Conversation {
    system: Option<Value>,
    messages: Vec<Value>,
}

impl Conversation {
    fn new(system: Option<&str>) -> Conversation {
        let mut talk = Conversation {
            system: system.map(|text| json!({ "role": "system", "content": text })),
            messages: Vec::new(),
        };
        talk.clear();
        talk
    }

    fn clear(&mut self) {
        self.messages = self.system.iter().cloned().collect();
    }

    /// Takes the last message and its answer back.
    fn take_back(&mut self) -> Option<String> {
        let at = self.messages.iter().rposition(|m| m["role"] == "user")?;
        let message = self.messages.drain(at..).next()?;
        message["content"].as_str().map(str::to_owned)
    }

    /// Says something and keeps the answer. What does not work is told, and the conversation stays as it was.
    fn say(&mut self, session: &mut Session, text: &str) -> Result<(), Error> {
        self.messages.push(json!({ "role": "user", "content": text }));
        session.start = Instant::now();
        match session.encode_messages(&self.messages).and_then(|ids| session.answer(ids)) {
            Ok(answer) => self.messages.push(json!({ "role": "assistant", "content": answer })),
            Err(e) if e.is_closed_stdout() => return Err(e),
            Err(e) => {
                self.messages.pop();
                eprintln!("puna: {e}");
            }
        }
        Ok(())
    }
}

/// One message: a line, or several where all but the last end in a backslash.
fn read(editor: &mut DefaultEditor) -> Result<String, ReadlineError> {
    let mut text = String::new();
    let mut prompt = "> ";
    loop {
        let line = editor.readline(prompt)?;
        match line.strip_suffix('\\') {
            Some(line) => {
                text.push_str(line);
                text.push('\n');
                prompt = ". ";
            }
            None => return Ok(text + &line),
        }
    }
}

/// Where typed lines are kept: `$XDG_STATE_HOME/puna/history`, by default under `~/.local/state`.
fn history_file() -> Option<PathBuf> {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    let state = state.or_else(|| Some(std::env::home_dir()?.join(".local/state")))?;
    Some(state.join("puna/history"))
}

/// Losing the history is no failure of the conversation.
fn save(editor: &mut DefaultEditor, path: &PathBuf) {
    let saved = path.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(ReadlineError::from);
    if let Err(e) = saved.and_then(|()| editor.save_history(path)) {
        eprintln!("puna: {}: {e}", path.display());
    }
}
