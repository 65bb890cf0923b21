//! Answers taken apart: reasoning, text, and tool calls, as they come.
//!
//! A parser reads an answer character by character, so that its result does not depend on how the text was cut, in time
//! that grows as the text does. It holds back what may be the beginning of a marker and nothing more. What looks like a
//! call and is none is text; once a piece of a call is out, what cannot belong to it is text as well.

mod call;
mod format;
mod hold;
mod json;
mod tools;
mod xml;

pub use format::{CallStyle, REPLY_FORMATS, ReplyFormat};
pub use tools::Kinds;
pub use xml::Xml;

use call::{Builtin, Call, Machine, Named, Next};
use format::{Follow, Then};
use hold::Hold;
use json::Object;
use serde_json::Value;
use tools::Tools;
use xml::Elements;

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delta {
    /// Reasoning.
    Reasoning(String),
    /// Text.
    Content(String),
    /// A piece of a tool call.
    Call(CallDelta),
}

/// A piece of a tool call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallDelta {
    /// Which call, from 0.
    pub index: usize,
    /// In the first piece: its identifier and its name.
    pub begin: Option<CallBegin>,
    /// What comes next of the JSON text of its arguments.
    pub arguments: String,
}

/// What the first piece of a tool call says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallBegin {
    /// Its identifier.
    pub id: String,
    /// The tool's name.
    pub name: String,
}

/// What a parser knows about the request.
#[derive(Debug, Clone, Copy, Default)]
pub struct ReplyOptions<'a> {
    /// The tools on offer, as in the request: without any, no calls are looked for.
    pub tools: &'a [Value],
    /// Whether the answer begins within reasoning ([`ReplyFormat::begins_in_reasoning`]).
    pub in_reasoning: bool,
    /// What identifiers of calls are made from: another number for each answer.
    pub seed: u64,
}

/// Takes an answer apart.
#[derive(Debug, Clone)]
pub struct ReplyParser {
    format: &'static ReplyFormat,
    calls: CallStyle,
    tools: Tools,
    state: State,
    /// Looks for calls in text.
    content: Hold,
    n_calls: usize,
    seed: u64,
    out: Vec<Delta>,
}

#[derive(Debug, Clone)]
enum State {
    /// One of a few texts must come, white space aside.
    Expect(Expect),
    Reasoning(Hold),
    Content,
    Call(InCall),
}

#[derive(Debug, Clone)]
struct Expect {
    follow: Vec<(&'static str, Then)>,
    /// What has come of one of them.
    partial: String,
    /// What is text if none of them comes.
    raw: String,
    /// Whether that text may hold the marker of a call.
    is_fresh: bool,
}

#[derive(Debug, Clone)]
struct InCall {
    machine: Machine,
    is_announced: bool,
    has_begun: bool,
    /// What is text if this is no call: what has come since its last piece.
    raw: String,
}

impl ReplyParser {
    /// A parser of one answer.
    pub fn new(format: &'static ReplyFormat, options: &ReplyOptions) -> ReplyParser {
        let calls = if options.tools.is_empty() { CallStyle::None } else { format.calls };
        let syntax = calls.syntax();
        let has_calls = !syntax.open.is_empty();
        let mut parser = ReplyParser {
            format,
            calls,
            tools: Tools::new(options.tools),
            state: State::Content,
            content: Hold::new(syntax.open.iter().map(|(text, _)| *text)).hold_newlines(has_calls),
            n_calls: 0,
            seed: options.seed,
            out: Vec::new(),
        };
        let think = format.think.map(|(open, _)| (open, Then::Think));
        let at_start: Vec<_> = think.into_iter().chain(syntax.at_start.iter().copied()).collect();
        if options.in_reasoning {
            parser.begin_reasoning();
        } else if !at_start.is_empty() {
            parser.state = State::Expect(Expect::new(at_start, String::new(), true));
        }
        parser
    }

    /// Takes the next piece of text and returns what is final now.
    pub fn push(&mut self, text: &str) -> Vec<Delta> {
        text.chars().for_each(|c| self.feed(c));
        std::mem::take(&mut self.out)
    }

    /// Ends the answer and returns what was held back.
    pub fn finish(&mut self) -> Vec<Delta> {
        match std::mem::replace(&mut self.state, State::Content) {
            // White space after the last call.
            State::Expect(expect) if expect.is_fresh && self.n_calls > 0 && expect.is_blank() => {}
            State::Expect(expect) if expect.is_fresh => self.refeed(&(expect.raw + &expect.partial)),
            State::Expect(expect) => self.text(&(expect.raw + &expect.partial)),
            State::Reasoning(mut hold) => hold.finish(&mut |text| add(&mut self.out, text, Delta::Reasoning)),
            State::Call(mut call) => {
                if call.has_begun {
                    self.with_call(&mut call, |machine, call| machine.finish(call));
                }
                if !(call.has_begun && call.raw.trim().is_empty()) {
                    self.text(&call.raw);
                }
            }
            State::Content => {}
        }
        self.content.finish(&mut |text| add(&mut self.out, text, Delta::Content));
        std::mem::take(&mut self.out)
    }

    /// Calls so far.
    pub fn n_calls(&self) -> usize {
        self.n_calls
    }

    fn feed(&mut self, c: char) {
        match &mut self.state {
            State::Content => self.feed_content(c),
            State::Expect(_) => self.feed_expect(c),
            State::Call(_) => self.feed_call(c),
            State::Reasoning(hold) => {
                if hold.feed(c, &mut |text| add(&mut self.out, text, Delta::Reasoning)).is_some() {
                    self.state = State::Content;
                    self.content.skip_newlines();
                }
            }
        }
    }

    fn feed_content(&mut self, c: char) {
        let Some(marker) = self.content.feed(c, &mut |text| add(&mut self.out, text, Delta::Content)) else { return };
        let (text, then) = self.calls.syntax().open[marker];
        let raw = "\n".repeat(self.content.take_newlines()) + text;
        self.go(then, raw);
    }

    /// Text that may hold the marker of a call.
    fn refeed(&mut self, text: &str) {
        self.state = State::Content;
        text.chars().for_each(|c| self.feed(c));
    }

    fn text(&mut self, text: &str) {
        if !text.is_empty() {
            add(&mut self.out, text, Delta::Content);
        }
    }

    fn begin_reasoning(&mut self) {
        let close = self.format.think.map(|(_, close)| close);
        let mut hold = Hold::new(close).hold_newlines(true);
        hold.skip_newlines();
        self.state = State::Reasoning(hold);
    }

    fn expect(&mut self, follow: Follow, raw: String, is_fresh: bool) {
        self.state = State::Expect(Expect::new(follow.to_vec(), raw, is_fresh));
    }

    /// Goes where a text leads; `raw` is what is text if that is nowhere.
    fn go(&mut self, then: Then, raw: String) {
        let mut is_call_announced = true;
        let machine = match then {
            Then::Think => return self.begin_reasoning(),
            Then::Expect(follow) => return self.expect(follow, raw, false),
            Then::Closed => return self.expect(self.calls.syntax().after, String::new(), true),
            Then::Separator => return self.expect(self.calls.syntax().after, raw, true),
            Then::Object { is_announced } => {
                is_call_announced = is_announced;
                Machine::Object(Object::default())
            }
            Then::Name => Machine::Named(Named::default()),
            Then::Builtin => Machine::Builtin(Builtin::default()),
            Then::Elements(xml) => Machine::Elements(Elements::new(xml)),
        };
        self.state = State::Call(InCall { machine, is_announced: is_call_announced, has_begun: false, raw });
    }

    fn feed_expect(&mut self, c: char) {
        let State::Expect(expect) = &mut self.state else { return };
        if expect.partial.is_empty() && c.is_whitespace() {
            expect.raw.push(c);
            return;
        }
        expect.partial.push(c);
        let partial = expect.partial.as_str();
        let hit = expect.follow.iter().find(|(text, _)| *text == partial).map(|(_, then)| *then);
        if hit.is_none() && expect.follow.iter().any(|(text, _)| text.starts_with(partial)) {
            return;
        }
        let default = expect.follow.iter().find(|(text, _)| text.is_empty()).map(|(_, then)| *then);
        let (mut raw, partial, is_fresh) =
            (std::mem::take(&mut expect.raw), std::mem::take(&mut expect.partial), expect.is_fresh);
        match (hit, default) {
            (Some(then), _) => self.go(then, raw + &partial),
            (None, Some(then)) => {
                self.go(then, raw);
                partial.chars().for_each(|c| self.feed(c));
            }
            (None, None) if is_fresh => self.refeed(&(raw + &partial)),
            (None, None) => {
                raw.push_str(&partial[..partial.len() - c.len_utf8()]);
                self.text(&raw);
                self.state = State::Content;
                self.feed(c);
            }
        }
    }

    fn feed_call(&mut self, c: char) {
        let State::Call(mut call) = std::mem::replace(&mut self.state, State::Content) else { return };
        let next = self.with_call(&mut call, |machine, call| {
            let next = machine.feed(c, call);
            (next, call.is_silent() && next == Next::More)
        });
        if next.1 {
            call.raw.push(c);
        }
        match next.0 {
            Next::More => self.state = State::Call(call),
            Next::Done => self.expect(self.calls.syntax().after, String::new(), true),
            Next::Bad => {
                self.text(&call.raw);
                self.feed(c);
            }
        }
    }

    fn with_call<T>(&mut self, in_call: &mut InCall, f: impl FnOnce(&mut Machine, &mut Call) -> T) -> T {
        let InCall { machine, is_announced, has_begun, raw } = in_call;
        let mut call = Call {
            tools: &self.tools,
            is_announced: *is_announced,
            name: None,
            has_begun: *has_begun,
            arguments: String::new(),
        };
        let result = f(machine, &mut call);
        let Call { name, arguments, has_begun: begun, .. } = call;
        *has_begun = begun;
        if name.is_some() || !arguments.is_empty() {
            raw.clear();
        }
        if let Some(name) = name {
            let begin = Some(CallBegin { id: self.id(), name });
            self.out.push(Delta::Call(CallDelta { index: self.n_calls, begin, arguments }));
            self.n_calls += 1;
        } else if !arguments.is_empty() {
            let index = self.n_calls - 1;
            match self.out.last_mut() {
                Some(Delta::Call(last)) if last.index == index => last.arguments.push_str(&arguments),
                _ => self.out.push(Delta::Call(CallDelta { index, begin: None, arguments })),
            }
        }
        result
    }

    /// The identifier of the next call.
    fn id(&self) -> String {
        const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
        let len = self.calls.syntax().id_len;
        let digit = |i: usize| {
            let n = self.n_calls as u64 * 64 + i as u64;
            // splitmix64
            let mut z = self.seed.wrapping_add((n + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            char::from(DIGITS[((z ^ (z >> 31)) % 62) as usize])
        };
        let prefix = if len > 9 { "call_" } else { "" };
        prefix.chars().chain((0..len).map(digit)).collect()
    }
}

impl Expect {
    fn new(follow: Vec<(&'static str, Then)>, raw: String, is_fresh: bool) -> Expect {
        Expect { follow, partial: String::new(), raw, is_fresh }
    }

    fn is_blank(&self) -> bool {
        self.partial.is_empty() && self.raw.trim().is_empty()
    }
}

/// Adds text, to the last piece if it is of the same kind.
fn add(out: &mut Vec<Delta>, text: &str, kind: fn(String) -> Delta) {
    match (out.last_mut(), kind(String::new())) {
        (Some(Delta::Reasoning(last)), Delta::Reasoning(_)) | (Some(Delta::Content(last)), Delta::Content(_)) => {
            last.push_str(text);
        }
        _ => out.push(kind(text.to_owned())),
    }
}
