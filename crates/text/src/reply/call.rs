//! One call on its way, and the shorter forms of calls.

use super::json::{Object, Scanner, escaped, push};
use super::tools::Tools;
use super::xml::Elements;

/// What a character did to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// It belongs to the call.
    More,
    /// It ends the call.
    Done,
    /// It cannot come here: this is no call, or not any more.
    Bad,
}

/// What is known of a call.
#[derive(Debug, Clone)]
pub(super) struct Call<'a> {
    pub tools: &'a Tools,
    /// Whether it must name a tool that there is.
    pub is_announced: bool,
    /// Its name, in the first piece.
    pub name: Option<String>,
    pub has_begun: bool,
    pub arguments: String,
}

impl Call<'_> {
    /// Whether it may have this name.
    pub fn accepts(&self, name: &str) -> bool {
        !name.is_empty() && (self.is_announced || self.tools.has(name))
    }

    pub fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// Whether nothing is known of it that was not before.
    pub fn is_silent(&self) -> bool {
        self.name.is_none() && self.arguments.is_empty()
    }

    /// From here on it is a call of this name.
    pub fn begin(&mut self, name: &str) {
        if !self.has_begun {
            self.has_begun = true;
            self.name = Some(name.to_owned());
        }
    }

    /// Adds to the JSON text of its arguments.
    pub fn arguments(&mut self, text: &str) {
        self.arguments.push_str(text);
    }
}

/// What reads a call.
#[derive(Debug, Clone)]
pub(super) enum Machine {
    Object(Object),
    Named(Named),
    Builtin(Builtin),
    Elements(Elements),
}

impl Machine {
    pub fn feed(&mut self, c: char, call: &mut Call) -> Next {
        match self {
            Machine::Object(machine) => machine.feed(c, call),
            Machine::Named(machine) => machine.feed(c, call),
            Machine::Builtin(machine) => machine.feed(c, call).unwrap_or(Next::Bad),
            Machine::Elements(machine) => machine.feed(c, call),
        }
    }

    /// The text has ended within the call.
    pub fn finish(&mut self, call: &mut Call) {
        if let Machine::Elements(machine) = self {
            machine.finish(call);
        }
    }
}

/// `name[ARGS]{..}`, or with `[CALL_ID]..` between, or the name and the object alone.
#[derive(Debug, Clone, Default)]
pub(super) struct Named {
    head: String,
    arguments: Option<Scanner>,
}

/// Longest name with its marks.
const MAX_HEAD: usize = 512;

impl Named {
    fn feed(&mut self, c: char, call: &mut Call) -> Next {
        let Some(scanner) = &mut self.arguments else {
            if c == '{' {
                let Some(name) = self.name().filter(|name| call.accepts(name)) else { return Next::Bad };
                call.begin(&name);
                call.arguments("{");
                self.arguments = Some(Scanner::object());
                return Next::More;
            }
            self.head.push(c);
            let is_good = self.head.len() < MAX_HEAD && !c.is_control();
            return if is_good { Next::More } else { Next::Bad };
        };
        let was_in_string = scanner.is_in_string();
        let Some(is_end) = scanner.feed(c) else { return Next::Bad };
        push(&mut call.arguments, c, was_in_string);
        if is_end { Next::Done } else { Next::More }
    }

    fn name(&self) -> Option<String> {
        let head = self.head.trim();
        let head = head.strip_suffix("[ARGS]").unwrap_or(head);
        let name = head.split_once("[CALL_ID]").map_or(head, |(name, _)| name);
        let is_name = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.');
        (!name.is_empty() && name.chars().all(is_name)).then(|| name.to_owned())
    }
}

/// `name.call(key="value", other=1)`: the built-in tools of Llama 3.1.
#[derive(Debug, Clone, Default)]
pub(super) struct Builtin {
    at: BuiltinAt,
    name: String,
    /// A key or a value, as far as it has come.
    text: String,
    escapes: bool,
    arguments: String,
}

#[derive(Debug, Clone, Copy, Default)]
enum BuiltinAt {
    #[default]
    Name,
    KeyOrEnd,
    Key,
    Value,
    Text,
    Word,
    Comma,
}

impl Builtin {
    fn feed(&mut self, c: char, call: &mut Call) -> Option<Next> {
        let is_word = c.is_alphanumeric() || matches!(c, '_' | '.' | '-' | '+');
        self.at = match self.at {
            BuiltinAt::Name if c == '(' => {
                self.name = self.name.strip_suffix(".call").filter(|name| call.accepts(name))?.to_owned();
                BuiltinAt::KeyOrEnd
            }
            BuiltinAt::Name if is_word && self.name.len() < MAX_HEAD => {
                self.name.push(c);
                BuiltinAt::Name
            }
            BuiltinAt::Name => return None,
            BuiltinAt::Text => self.text(c)?,
            BuiltinAt::Key if c == '=' => {
                let comma = if self.arguments.is_empty() { "{" } else { ", " };
                let key = std::mem::take(&mut self.text);
                self.arguments.push_str(&format!("{comma}\"{}\": ", escaped(&key)));
                BuiltinAt::Value
            }
            BuiltinAt::KeyOrEnd | BuiltinAt::Key if is_word => {
                self.text.push(c);
                BuiltinAt::Key
            }
            BuiltinAt::Word if is_word => {
                self.text.push(c);
                BuiltinAt::Word
            }
            BuiltinAt::Word => {
                self.word()?;
                self.after_value(c, call)?
            }
            at if c.is_whitespace() => at,
            BuiltinAt::Value if c == '"' => BuiltinAt::Text,
            BuiltinAt::Value if is_word => {
                self.text.push(c);
                BuiltinAt::Word
            }
            at @ (BuiltinAt::KeyOrEnd | BuiltinAt::Comma) if c == ')' || matches!(at, BuiltinAt::Comma) => {
                self.after_value(c, call)?
            }
            _ => return None,
        };
        Some(if call.has_begun() { Next::Done } else { Next::More })
    }

    fn text(&mut self, c: char) -> Option<BuiltinAt> {
        if c != '"' || self.escapes {
            self.escapes = c == '\\' && !self.escapes;
            push(&mut self.text, c, true);
            return Some(BuiltinAt::Text);
        }
        let text = format!("\"{}\"", std::mem::take(&mut self.text));
        serde_json::from_str::<String>(&text).ok()?;
        self.arguments.push_str(&text);
        Some(BuiltinAt::Comma)
    }

    fn word(&mut self) -> Option<()> {
        let word = std::mem::take(&mut self.text);
        let word = match word.as_str() {
            "True" => "true",
            "False" => "false",
            "None" => "null",
            word => word,
        };
        serde_json::from_str::<serde_json::Value>(word).ok()?;
        self.arguments.push_str(word);
        Some(())
    }

    fn after_value(&mut self, c: char, call: &mut Call) -> Option<BuiltinAt> {
        match c {
            ')' => {
                call.begin(&self.name);
                call.arguments(if self.arguments.is_empty() { "{" } else { &self.arguments });
                call.arguments("}");
                Some(BuiltinAt::Comma)
            }
            ',' => Some(BuiltinAt::Key),
            c if c.is_whitespace() => Some(BuiltinAt::Comma),
            _ => None,
        }
    }
}
