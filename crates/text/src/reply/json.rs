//! JSON that comes character by character.

use super::call::{Call, Next};

/// Deepest nesting of arguments.
const MAX_DEPTH: usize = 128;

/// Checks one JSON object as it comes: RFC 8259, with control characters in strings allowed, since models write them.
#[derive(Debug, Clone)]
pub(super) struct Scanner {
    /// Whether each open bracket is an object's.
    stack: Vec<bool>,
    at: At,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum At {
    Value,
    /// After `[`.
    ValueOrEnd,
    /// After `{`.
    KeyOrEnd,
    Key,
    Colon,
    /// After a value.
    Comma,
    String {
        is_key: bool,
        escape: Escape,
    },
    /// What is left of `true`, `false` or `null`.
    Word(&'static str),
    Number(Number),
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Escape {
    No,
    Begun,
    /// Digits that are missing.
    Hex(u8),
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Number {
    Minus,
    Zero,
    Integer,
    Point,
    Fraction,
    E,
    Sign,
    Exponent,
}

impl Number {
    fn is_whole(self) -> bool {
        matches!(self, Number::Zero | Number::Integer | Number::Fraction | Number::Exponent)
    }

    /// After another character, if it belongs to the number.
    fn next(self, c: char) -> Option<Number> {
        use Number::*;
        Some(match (self, c) {
            (Minus, '0') => Zero,
            (Minus, '1'..='9') | (Integer, '0'..='9') => Integer,
            (Zero | Integer, '.') => Point,
            (Point | Fraction, '0'..='9') => Fraction,
            (Zero | Integer | Fraction, 'e' | 'E') => E,
            (E, '+' | '-') => Sign,
            (E | Sign | Exponent, '0'..='9') => Exponent,
            _ => return None,
        })
    }
}

impl Scanner {
    /// A scanner of an object whose brace has come.
    pub fn object() -> Scanner {
        Scanner { stack: vec![true], at: At::KeyOrEnd }
    }

    /// Takes a character and returns whether it ends the object; `None` if it cannot come here.
    pub fn feed(&mut self, c: char) -> Option<bool> {
        let is_space = matches!(c, ' ' | '\n' | '\r' | '\t');
        match self.at {
            At::String { is_key, escape } => self.at = string(c, is_key, escape)?,
            At::Word(rest) => {
                let rest = rest.strip_prefix(c)?;
                self.at = if rest.is_empty() { At::Comma } else { At::Word(rest) };
            }
            At::Number(number) => match number.next(c) {
                Some(number) => self.at = At::Number(number),
                None if number.is_whole() => {
                    self.at = At::Comma;
                    return self.feed(c);
                }
                None => return None,
            },
            _ if is_space => {}
            At::KeyOrEnd | At::ValueOrEnd if self.closes(c) => return Some(self.close()),
            At::KeyOrEnd | At::Key if c == '"' => self.at = At::String { is_key: true, escape: Escape::No },
            At::KeyOrEnd | At::Key => return None,
            At::Colon => self.at = Some(At::Value).filter(|_| c == ':')?,
            At::Value | At::ValueOrEnd => self.value(c)?,
            At::Comma if self.closes(c) => return Some(self.close()),
            At::Comma if c == ',' => self.at = if self.stack.last() == Some(&true) { At::Key } else { At::Value },
            At::Comma => return None,
        }
        Some(false)
    }

    /// Whether it is within a string.
    pub fn is_in_string(&self) -> bool {
        matches!(self.at, At::String { .. })
    }

    fn closes(&self, c: char) -> bool {
        self.stack.last().is_some_and(|&is_object| c == if is_object { '}' } else { ']' })
    }

    fn close(&mut self) -> bool {
        self.stack.pop();
        self.at = At::Comma;
        self.stack.is_empty()
    }

    fn value(&mut self, c: char) -> Option<()> {
        self.at = match c {
            '{' | '[' if self.stack.len() == MAX_DEPTH => return None,
            '{' => {
                self.stack.push(true);
                At::KeyOrEnd
            }
            '[' => {
                self.stack.push(false);
                At::ValueOrEnd
            }
            '"' => At::String { is_key: false, escape: Escape::No },
            't' => At::Word("rue"),
            'f' => At::Word("alse"),
            'n' => At::Word("ull"),
            '-' => At::Number(Number::Minus),
            '0' => At::Number(Number::Zero),
            '1'..='9' => At::Number(Number::Integer),
            _ => return None,
        };
        Some(())
    }
}

fn string(c: char, is_key: bool, escape: Escape) -> Option<At> {
    let escape = match (escape, c) {
        (Escape::No, '"') => return Some(if is_key { At::Colon } else { At::Comma }),
        (Escape::No, '\\') => Escape::Begun,
        (Escape::No, _) => Escape::No,
        (Escape::Begun, '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't') => Escape::No,
        (Escape::Begun, 'u') => Escape::Hex(4),
        (Escape::Begun, _) => return None,
        (Escape::Hex(left), c) if c.is_ascii_hexdigit() => {
            if left == 1 {
                Escape::No
            } else {
                Escape::Hex(left - 1)
            }
        }
        (Escape::Hex(_), _) => return None,
    };
    Some(At::String { is_key, escape })
}

/// Adds a character of JSON text; a control character within a string is written as JSON wants it.
pub(super) fn push(text: &mut String, c: char, is_in_string: bool) {
    if is_in_string && c < ' ' {
        text.push_str(&escaped(c.encode_utf8(&mut [0; 4])));
    } else {
        text.push(c);
    }
}

/// A text as it is written between the quotes of a JSON string.
pub(super) fn escaped(text: &str) -> String {
    let quoted = serde_json::Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// A call that is an object with a name and arguments, whose brace has come.
#[derive(Debug, Clone, Default)]
pub(super) struct Object {
    at: ObjectAt,
    /// A key or a text, as far as it has come, without its quotes.
    text: String,
    escapes: bool,
    seen: Vec<Key>,
    name: Option<String>,
    /// Arguments that came before the name.
    early: String,
}

#[derive(Debug, Clone, Default)]
enum ObjectAt {
    #[default]
    KeyOrEnd,
    Key,
    InKey,
    Colon(Key),
    Value(Key),
    Text(Key),
    Arguments(Scanner),
    /// What is left of `null`.
    Null(&'static str),
    Comma,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Key {
    Name,
    Arguments,
    /// What says nothing new.
    Other,
}

impl Object {
    /// Takes a character.
    pub fn feed(&mut self, c: char, call: &mut Call) -> Next {
        self.step(c, call).unwrap_or(Next::Bad)
    }

    fn step(&mut self, c: char, call: &mut Call) -> Option<Next> {
        let is_space = matches!(c, ' ' | '\n' | '\r' | '\t');
        let at = match std::mem::take(&mut self.at) {
            ObjectAt::InKey => match self.text(c)? {
                None => ObjectAt::InKey,
                Some(key) => ObjectAt::Colon(self.key(&key)?),
            },
            ObjectAt::Text(key) => match self.text(c)? {
                None => ObjectAt::Text(key),
                Some(text) => {
                    match key {
                        Key::Name => self.set_name(text, call)?,
                        Key::Arguments => self.arguments(&text, call)?,
                        Key::Other => {}
                    }
                    ObjectAt::Comma
                }
            },
            ObjectAt::Arguments(mut scanner) => {
                let was_in_string = scanner.is_in_string();
                let is_end = scanner.feed(c)?;
                let mut text = String::new();
                push(&mut text, c, was_in_string);
                self.add(&text, call);
                if is_end { ObjectAt::Comma } else { ObjectAt::Arguments(scanner) }
            }
            ObjectAt::Null(rest) => {
                let rest = rest.strip_prefix(c)?;
                if rest.is_empty() { ObjectAt::Comma } else { ObjectAt::Null(rest) }
            }
            at if is_space => at,
            ObjectAt::KeyOrEnd | ObjectAt::Key if c == '"' => ObjectAt::InKey,
            ObjectAt::Colon(key) if c == ':' => ObjectAt::Value(key),
            ObjectAt::Value(Key::Arguments) if c == '{' => {
                self.add("{", call);
                ObjectAt::Arguments(Scanner::object())
            }
            ObjectAt::Value(Key::Arguments) if c == 'n' => ObjectAt::Null("ull"),
            ObjectAt::Value(key) if c == '"' => ObjectAt::Text(key),
            ObjectAt::Comma if c == ',' => ObjectAt::Key,
            ObjectAt::Comma if c == '}' => return self.end(call),
            _ => return None,
        };
        self.at = at;
        Some(Next::More)
    }

    /// Takes a character of a string; the string at its end.
    #[expect(clippy::option_option, reason = "no string, no string yet, a string")]
    fn text(&mut self, c: char) -> Option<Option<String>> {
        if c == '"' && !self.escapes {
            let text = format!("\"{}\"", std::mem::take(&mut self.text));
            return serde_json::from_str(&text).ok().map(Some);
        }
        self.escapes = c == '\\' && !self.escapes;
        push(&mut self.text, c, true);
        Some(None)
    }

    fn key(&mut self, key: &str) -> Option<Key> {
        let key = match key {
            "name" => Key::Name,
            "arguments" | "parameters" => Key::Arguments,
            "id" | "type" => return Some(Key::Other),
            _ => return None,
        };
        if self.seen.contains(&key) {
            return None;
        }
        self.seen.push(key);
        Some(key)
    }

    fn set_name(&mut self, name: String, call: &mut Call) -> Option<()> {
        if !call.accepts(&name) {
            return None;
        }
        if !self.early.is_empty() {
            call.begin(&name);
            call.arguments(&std::mem::take(&mut self.early));
        }
        self.name = Some(name);
        Some(())
    }

    /// Arguments that are a text of JSON, as some models write them.
    fn arguments(&mut self, text: &str, call: &mut Call) -> Option<()> {
        let value: serde_json::Value = serde_json::from_str(text).ok()?;
        value.is_object().then(|| self.add(text, call))
    }

    fn add(&mut self, text: &str, call: &mut Call) {
        match &self.name {
            Some(name) => {
                call.begin(name);
                call.arguments(text);
            }
            None => self.early.push_str(text),
        }
    }

    fn end(&mut self, call: &mut Call) -> Option<Next> {
        let name = self.name.take()?;
        if !call.has_begun() {
            call.begin(&name);
            call.arguments("{}");
        }
        Some(Next::Done)
    }
}
