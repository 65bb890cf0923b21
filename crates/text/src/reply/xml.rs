//! Calls that are written as elements, a parameter each.

use super::call::{Call, Next};
use super::hold::Hold;
use super::json::escaped;
use super::tools::{Kinds, to_json};

/// The marks of such calls. Values stand between them as they are: nothing is escaped.
#[derive(Debug, Clone, Copy)]
pub struct Xml {
    /// Before the function's name.
    pub function: &'static str,
    /// After the function's name.
    pub name_end: &'static str,
    /// Before a parameter's name.
    pub parameter: &'static str,
    /// After it.
    pub parameter_end: &'static str,
    /// After its value.
    pub value_end: &'static str,
    /// After the last parameter.
    pub end: &'static str,
    /// Whether a line break before and after a value is not part of it.
    pub has_newlines: bool,
}

/// Longest name of a function or a parameter.
const MAX_NAME: usize = 512;

/// Reads such a call, from the function's name on.
#[derive(Debug, Clone)]
pub(super) struct Elements {
    xml: &'static Xml,
    at: ElementsAt,
    name: String,
    /// A name, or what has come of a mark.
    text: String,
    n_parameters: usize,
}

#[derive(Debug, Clone)]
enum ElementsAt {
    Name,
    ParameterOrEnd,
    ParameterName,
    Value {
        hold: Hold,
        kinds: Kinds,
        /// What has come of a value that need not be a text.
        value: String,
        is_first: bool,
    },
}

impl Elements {
    pub fn new(xml: &'static Xml) -> Elements {
        Elements { xml, at: ElementsAt::Name, name: String::new(), text: String::new(), n_parameters: 0 }
    }

    /// Takes a character.
    pub fn feed(&mut self, c: char, call: &mut Call) -> Next {
        match &mut self.at {
            ElementsAt::Name => match self.name_until(self.xml.name_end, c) {
                Some(None) => Next::More,
                Some(Some(name)) if call.accepts(&name) => {
                    self.name = name;
                    self.at = ElementsAt::ParameterOrEnd;
                    Next::More
                }
                _ => Next::Bad,
            },
            ElementsAt::ParameterOrEnd => self.parameter_or_end(c, call),
            ElementsAt::ParameterName => match self.name_until(self.xml.parameter_end, c) {
                Some(None) => Next::More,
                Some(Some(key)) => {
                    self.begin_value(&key, call);
                    Next::More
                }
                None => Next::Bad,
            },
            ElementsAt::Value { .. } => {
                self.value(c, call);
                Next::More
            }
        }
    }

    /// The text has ended within the call.
    pub fn finish(&mut self, call: &mut Call) {
        let ElementsAt::Value { hold, kinds, value, .. } = &mut self.at else { return };
        if kinds.is_text() {
            hold.finish(&mut |text| call.arguments(&escaped(text)));
        } else {
            hold.finish(&mut |text| value.push_str(text));
            if !value.is_empty() {
                call.arguments(&to_json(value, *kinds));
            }
        }
    }

    /// Takes a character of a name; the name at its end, nothing if this is none.
    #[expect(clippy::option_option, reason = "no name, no name yet, a name")]
    fn name_until(&mut self, end: &str, c: char) -> Option<Option<String>> {
        self.text.push(c);
        if let Some(name) = self.text.strip_suffix(end) {
            let name = name.to_owned();
            self.text.clear();
            return (!name.is_empty()).then_some(Some(name));
        }
        (self.text.len() < MAX_NAME && !c.is_control() && c != '<').then_some(None)
    }

    fn parameter_or_end(&mut self, c: char, call: &mut Call) -> Next {
        if self.text.is_empty() && c.is_whitespace() {
            return Next::More;
        }
        self.text.push(c);
        if self.text == self.xml.parameter {
            self.text.clear();
            self.at = ElementsAt::ParameterName;
            Next::More
        } else if self.text == self.xml.end {
            call.begin(&self.name);
            call.arguments(if self.n_parameters == 0 { "{}" } else { "}" });
            Next::Done
        } else if self.xml.parameter.starts_with(&self.text) || self.xml.end.starts_with(&self.text) {
            Next::More
        } else {
            Next::Bad
        }
    }

    fn begin_value(&mut self, key: &str, call: &mut Call) {
        let kinds = call.tools.kinds(&self.name, key);
        call.begin(&self.name);
        call.arguments(if self.n_parameters == 0 { "{" } else { ", " });
        call.arguments(&format!("\"{}\": ", escaped(key)));
        if kinds.is_text() {
            call.arguments("\"");
        }
        self.n_parameters += 1;
        let hold = Hold::new([self.xml.value_end]).hold_newlines(self.xml.has_newlines);
        self.at = ElementsAt::Value { hold, kinds, value: String::new(), is_first: true };
    }

    fn value(&mut self, c: char, call: &mut Call) {
        let ElementsAt::Value { hold, kinds, value, is_first } = &mut self.at else { return };
        if std::mem::take(is_first) && c == '\n' && self.xml.has_newlines {
            return;
        }
        let mut release = |text: &str| match kinds.is_text() {
            true => call.arguments(&escaped(text)),
            false => value.push_str(text),
        };
        if hold.feed(c, &mut release).is_none() {
            return;
        }
        // The last line break belongs to the mark.
        release(&"\n".repeat(hold.take_newlines().saturating_sub(1)));
        if kinds.is_text() {
            call.arguments("\"");
        } else {
            let json = to_json(value, *kinds);
            call.arguments(&json);
        }
        self.at = ElementsAt::ParameterOrEnd;
    }
}
