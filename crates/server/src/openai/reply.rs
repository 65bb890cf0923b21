//! How the answers of a model are taken apart.

use crate::openai::chat::ToolChoice;
use crate::openai::{ApiError, Card, Constraint};
use puna::{Grammar, ToolGrammar};
use puna_text::{Delta, ReplyFormat, ReplyOptions, ReplyParser};
use serde_json::{Value, json};

/// What all answers to a request have in common.
#[derive(Clone, Debug)]
pub(crate) struct Replies {
    pub format: &'static ReplyFormat,
    tools: Vec<Value>,
    pub in_reasoning: bool,
    /// The field of the request that says what answers must be; empty if none does.
    pub form: &'static str,
}

impl Replies {
    /// For answers to a prompt. Without `tools` no calls are looked for. An answer that follows a grammar of its own is
    /// all text.
    pub fn new(card: &Card, tools: &[Value], prompt: &[u32], constraint: Option<&Constraint>) -> Replies {
        let mut format = ReplyFormat::of_template(card.chat.template().unwrap_or_default());
        if constraint.is_some_and(|constraint| !constraint.allows_reasoning()) {
            format = ReplyFormat::of_template("");
        } else if !tools.is_empty() {
            format = format.with_calls();
        }
        // What a template opens is at the prompt's end.
        let tail = &prompt[prompt.len().saturating_sub(16)..];
        let tail = card.chat.tokenizer().map(|t| t.decode(tail)).unwrap_or_default();
        let form = if tools.is_empty() { constraint.map_or("", |constraint| constraint.param) } else { "tools" };
        Replies { format, tools: tools.to_vec(), in_reasoning: format.begins_in_reasoning(&tail), form }
    }

    /// Whether answers may have calls.
    pub fn has_tools(&self) -> bool {
        !self.tools.is_empty()
    }

    /// Control tokens whose text a parser looks for.
    pub fn markers(&self) -> Vec<String> {
        self.format.markers().into_iter().map(str::to_owned).collect()
    }

    /// What keeps an answer to calls of tools as `choice` says, with arguments that their schemas allow.
    ///
    /// # Errors
    /// A schema that cannot be enforced; a model whose answers have no calls.
    pub fn grammar(
        &self,
        card: &Card,
        tools: &[Value],
        choice: &ToolChoice,
        parallel: bool,
    ) -> Result<Grammar, ApiError> {
        let wanted = match choice {
            ToolChoice::None | ToolChoice::Auto => puna::ToolChoice::Auto,
            ToolChoice::Required => puna::ToolChoice::Required,
            ToolChoice::Named(name) => puna::ToolChoice::Named(name),
        };
        let (format, in_reasoning) = (self.format, self.in_reasoning);
        let grammar = ToolGrammar { format, tools, choice: wanted, parallel, in_reasoning };
        let result = card.chat.grammars().and_then(|grammars| grammars.tools(&grammar));
        result.map_err(|e| ApiError::of_engine(&place(&e), &e))
    }

    /// A parser for one answer; `seed` is another for each.
    pub fn parser(&self, seed: u64) -> ReplyParser {
        let options = ReplyOptions { tools: &self.tools, in_reasoning: self.in_reasoning, seed };
        ReplyParser::new(self.format, &options)
    }
}

/// Which of the tools an error is about.
fn place(error: &puna::Error) -> String {
    let index = match error {
        puna::Error::Schema { at, .. } => at.split('/').nth(1),
        _ => None,
    };
    index.map_or("tools".into(), |index| format!("tools[{index}].function.parameters"))
}

/// The `delta` of a piece.
pub(crate) fn delta(piece: Delta) -> Value {
    match piece {
        Delta::Content(text) => json!({ "content": text }),
        Delta::Reasoning(text) => json!({ "reasoning_content": text }),
        Delta::Call(call) => {
            let function = match &call.begin {
                Some(begin) => json!({ "name": begin.name, "arguments": call.arguments }),
                None => json!({ "arguments": call.arguments }),
            };
            let mut value = json!({ "index": call.index, "function": function });
            // Clients join what comes twice: these come once.
            if let Some(begin) = call.begin {
                value["id"] = json!(begin.id);
                value["type"] = json!("function");
            }
            json!({ "tool_calls": [value] })
        }
    }
}

/// The `message` of an answer, from its pieces.
#[derive(Clone, Debug, Default)]
pub(crate) struct Message {
    content: String,
    reasoning: String,
    calls: Vec<(String, String, String)>,
}

impl Message {
    /// Adds pieces.
    pub fn add(&mut self, pieces: Vec<Delta>) {
        for piece in pieces {
            match piece {
                Delta::Content(text) => self.content.push_str(&text),
                Delta::Reasoning(text) => self.reasoning.push_str(&text),
                Delta::Call(call) => {
                    if let Some(begin) = call.begin {
                        self.calls.push((begin.id, begin.name, String::new()));
                    }
                    if let Some((_, _, arguments)) = self.calls.get_mut(call.index) {
                        arguments.push_str(&call.arguments);
                    }
                }
            }
        }
    }

    /// As the interface has it: the content is null where there are only calls.
    pub fn value(&self) -> Value {
        let has_content = !self.content.is_empty() || self.calls.is_empty();
        let content = has_content.then_some(&self.content);
        let mut value = json!({ "role": "assistant", "content": content, "refusal": null });
        if !self.reasoning.is_empty() {
            value["reasoning_content"] = json!(self.reasoning);
        }
        if !self.calls.is_empty() {
            let call = |(id, name, arguments): &(String, String, String)| json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } });
            value["tool_calls"] = self.calls.iter().map(call).collect();
        }
        value
    }
}
