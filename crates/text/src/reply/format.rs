//! Which markers a model's answers have: a row for each format.

use super::xml::Xml;

/// How a model writes reasoning and tool calls.
#[derive(Debug, PartialEq, Eq)]
pub struct ReplyFormat {
    /// Its name, for choosing it.
    pub name: &'static str,
    /// Texts that a chat template of such a model holds, all of them.
    detect: &'static [&'static str],
    /// What encloses reasoning, which comes first in an answer.
    pub think: Option<(&'static str, &'static str)>,
    /// How tool calls are written.
    pub calls: CallStyle,
}

/// How tool calls are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallStyle {
    /// Not at all.
    None,
    /// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`
    Hermes,
    /// `{"name": .., "parameters": {..}}` and `<|python_tag|>name.call(key="value")`
    Llama3,
    /// `[TOOL_CALLS][{"name": .., "arguments": {..}}]` and `[TOOL_CALLS]name[ARGS]{..}`
    Mistral,
    /// `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`
    Qwen3Coder,
    /// `<minimax:tool_call><invoke name="name"><parameter name="key">value</parameter></invoke></minimax:tool_call>`
    MiniMaxM2,
}

const THINK: Option<(&str, &str)> = Some(("<think>", "</think>"));

/// All formats. The first whose texts a template holds is a model's; the last fits all.
pub static REPLY_FORMATS: [ReplyFormat; 11] = [
    row("minimax-m2", &["<minimax:tool_call>", "</think>"], THINK, CallStyle::MiniMaxM2),
    row("qwen3.5", &["<function=", "</think>"], THINK, CallStyle::Qwen3Coder),
    row("qwen3-coder", &["<function="], None, CallStyle::Qwen3Coder),
    row("magistral", &["[TOOL_CALLS]", "[THINK]"], Some(("[THINK]", "[/THINK]")), CallStyle::Mistral),
    row("mistral", &["[TOOL_CALLS]"], None, CallStyle::Mistral),
    row("qwen3", &["<tool_call>", "</think>"], THINK, CallStyle::Hermes),
    row("hermes", &["<tool_call>"], None, CallStyle::Hermes),
    row("deepseek-r1", &["</think>"], THINK, CallStyle::None),
    row("llama3", &["<|python_tag|>"], None, CallStyle::Llama3),
    row("llama3", &["<|start_header_id|>", "\"parameters\""], None, CallStyle::Llama3),
    row("plain", &[], None, CallStyle::None),
];

const fn row(
    name: &'static str,
    detect: &'static [&'static str],
    think: Option<(&'static str, &'static str)>,
    calls: CallStyle,
) -> ReplyFormat {
    ReplyFormat { name, detect, think, calls }
}

impl ReplyFormat {
    /// The format of the answers to prompts of a chat template, by the markers in its source.
    pub fn of_template(source: &str) -> &'static ReplyFormat {
        let holds = |format: &&ReplyFormat| format.detect.iter().all(|text| source.contains(text));
        REPLY_FORMATS.iter().find(holds).expect("the last row fits all")
    }

    /// The format of this name.
    pub fn by_name(name: &str) -> Option<&'static ReplyFormat> {
        REPLY_FORMATS.iter().find(|format| format.name == name)
    }

    /// The format of answers to requests that offer tools: where the model has no way of its own to call them, it is
    /// Hermes', which most models have seen.
    pub fn with_calls(&'static self) -> &'static ReplyFormat {
        let fits = |format: &&ReplyFormat| format.calls == CallStyle::Hermes && format.think == self.think;
        match self.calls {
            CallStyle::None => REPLY_FORMATS.iter().find(fits).unwrap_or(self),
            _ => self,
        }
    }

    /// The names there are.
    pub fn names() -> impl Iterator<Item = &'static str> {
        let is_first = |i: usize| i == 0 || REPLY_FORMATS[i].name != REPLY_FORMATS[i - 1].name;
        (0..REPLY_FORMATS.len()).filter(move |&i| is_first(i)).map(|i| REPLY_FORMATS[i].name)
    }

    /// Texts that a parser looks for, which may be control tokens: these must give their text
    /// ([`TokenStream::show`](crate::TokenStream::show)).
    pub fn markers(&self) -> Vec<&'static str> {
        let think = self.think.iter().flat_map(|&(open, close)| [open, close]);
        think.chain(self.calls.markers().iter().copied()).collect()
    }

    /// Whether an answer to this prompt begins within reasoning, which the template has opened.
    pub fn begins_in_reasoning(&self, prompt: &str) -> bool {
        self.think.is_some_and(|(open, _)| prompt.trim_end().ends_with(open))
    }
}

impl CallStyle {
    fn markers(self) -> &'static [&'static str] {
        match self {
            CallStyle::None => &[],
            CallStyle::Hermes | CallStyle::Qwen3Coder => &["<tool_call>", "</tool_call>"],
            CallStyle::Llama3 => &["<|python_tag|>"],
            CallStyle::Mistral => &["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
            CallStyle::MiniMaxM2 => &["<minimax:tool_call>", "</minimax:tool_call>"],
        }
    }

    /// What begins calls and what ends them, where tags enclose them.
    pub fn tags(self) -> Option<(&'static str, &'static str)> {
        match (self, self.markers()) {
            (CallStyle::Hermes | CallStyle::Qwen3Coder | CallStyle::MiniMaxM2, &[open, close]) => Some((open, close)),
            _ => None,
        }
    }

    /// The marks of calls that are elements.
    pub fn elements(self) -> Option<&'static Xml> {
        match self {
            CallStyle::Qwen3Coder => Some(&CODER_ELEMENTS),
            CallStyle::MiniMaxM2 => Some(&MINIMAX_ELEMENTS),
            _ => None,
        }
    }

    pub(super) fn syntax(self) -> &'static Syntax {
        match self {
            CallStyle::None => &Syntax { at_start: &[], open: &[], after: &[], id_len: 0 },
            CallStyle::Hermes => &HERMES,
            CallStyle::Llama3 => &LLAMA3,
            CallStyle::Mistral => &MISTRAL,
            CallStyle::Qwen3Coder => &QWEN3_CODER,
            CallStyle::MiniMaxM2 => &MINIMAX_M2,
        }
    }
}

/// What may come next, white space aside, and what follows from it. The empty text fits whatever no other one fits.
pub(super) type Follow = &'static [(&'static str, Then)];

/// What follows from a text that was expected.
#[derive(Debug, Clone, Copy)]
pub(super) enum Then {
    /// Reasoning.
    Think,
    /// One of these.
    Expect(Follow),
    /// An object of a call, whose brace it was; one that no marker announced must name a tool.
    Object { is_announced: bool },
    /// A call by name: `name[ARGS]{..}`.
    Name,
    /// A call as in Python: `name.call(key="value")`.
    Builtin,
    /// A call as elements.
    Elements(&'static Xml),
    /// A mark after a call, which is no text.
    Closed,
    /// A mark after a call, which is text if no call follows.
    Separator,
}

/// Where calls are.
pub(super) struct Syntax {
    /// At the very beginning of the answer's text.
    pub at_start: Follow,
    /// Anywhere in the text.
    pub open: Follow,
    /// After a call.
    pub after: Follow,
    /// Characters of an identifier; the prefix `call_` comes with the long ones.
    pub id_len: usize,
}

const ID: usize = 24;
const ANNOUNCED: Then = Then::Object { is_announced: true };

const BARE: Then = Then::Object { is_announced: false };
/// One call, or a list of them.
const IN_TAGS: Follow = &[("{", ANNOUNCED), ("[", Then::Expect(&[("{", ANNOUNCED)]))];

static HERMES: Syntax = Syntax {
    at_start: &[],
    open: &[("<tool_call>", Then::Expect(IN_TAGS))],
    after: &[
        ("</tool_call>", Then::Closed),
        ("<tool_call>", Then::Expect(IN_TAGS)),
        ("{", BARE),
        (",", Then::Separator),
        ("]", Then::Separator),
    ],
    id_len: ID,
};

const PYTHON: Follow = &[("{", ANNOUNCED), ("", Then::Builtin)];

static LLAMA3: Syntax = Syntax {
    at_start: &[("{", BARE)],
    open: &[("<|python_tag|>", Then::Expect(PYTHON))],
    after: &[("{", BARE), (";", Then::Separator), (",", Then::Separator), ("<|python_tag|>", Then::Expect(PYTHON))],
    id_len: ID,
};

const LISTED: Follow = &[("[", Then::Expect(&[("{", ANNOUNCED)])), ("", Then::Name)];

static MISTRAL: Syntax = Syntax {
    at_start: &[],
    open: &[("[TOOL_CALLS]", Then::Expect(LISTED))],
    after: &[(",", Then::Separator), ("{", ANNOUNCED), ("]", Then::Closed), ("[TOOL_CALLS]", Then::Expect(LISTED))],
    // What the templates of these models insist on.
    id_len: 9,
};

const CODER_FUNCTION: &str = "<function=";
static CODER_ELEMENTS: Xml = Xml {
    function: CODER_FUNCTION,
    name_end: ">",
    parameter: "<parameter=",
    parameter_end: ">",
    value_end: "</parameter>",
    end: "</function>",
    has_newlines: true,
};

static QWEN3_CODER: Syntax = Syntax {
    at_start: &[],
    // Such models leave out the outer element at times.
    open: &[
        ("<tool_call>", Then::Expect(&[(CODER_FUNCTION, Then::Elements(&CODER_ELEMENTS))])),
        (CODER_FUNCTION, Then::Elements(&CODER_ELEMENTS)),
    ],
    after: &[
        ("</tool_call>", Then::Closed),
        ("<tool_call>", Then::Expect(&[(CODER_FUNCTION, Then::Elements(&CODER_ELEMENTS))])),
        (CODER_FUNCTION, Then::Elements(&CODER_ELEMENTS)),
    ],
    id_len: ID,
};

const MINIMAX_FUNCTION: &str = "<invoke name=\"";
static MINIMAX_ELEMENTS: Xml = Xml {
    function: MINIMAX_FUNCTION,
    name_end: "\">",
    parameter: "<parameter name=\"",
    parameter_end: "\">",
    value_end: "</parameter>",
    end: "</invoke>",
    has_newlines: false,
};

static MINIMAX_M2: Syntax = Syntax {
    at_start: &[],
    open: &[("<minimax:tool_call>", Then::Expect(&[(MINIMAX_FUNCTION, Then::Elements(&MINIMAX_ELEMENTS))]))],
    after: &[
        ("</minimax:tool_call>", Then::Closed),
        (MINIMAX_FUNCTION, Then::Elements(&MINIMAX_ELEMENTS)),
        ("<minimax:tool_call>", Then::Expect(&[(MINIMAX_FUNCTION, Then::Elements(&MINIMAX_ELEMENTS))])),
    ],
    id_len: ID,
};
