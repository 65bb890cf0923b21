//! The answer to a chat, as a whole or in pieces.

use crate::openai::answer::{Answer, Assemble, Header, Stream, Tokens, Usage, finish_reason, unique};
use crate::openai::chat::ChatRequest;
use crate::openai::inside::Account;
use crate::openai::reply::{Message, Replies, delta};
use crate::openai::{ApiError, Card, StreamOptions, logprobs};
use puna::{Event, Request};
use puna_text::{Delta, ReplyParser};
use serde_json::{Map, Value, json};

/// What becomes of what the engine says to `request`, whose prompt is `ids`.
pub(crate) fn new(
    card: &Card,
    chat: &ChatRequest,
    request: &Request,
    replies: &Replies,
    (ids, account): (Vec<u32>, Account),
) -> Answer {
    let header = |object| Header {
        id: unique("chatcmpl-"),
        object,
        created: super::model::now(),
        model: card.id.clone(),
        fingerprint: card.fingerprint.clone(),
    };
    let tokens = Tokens::new(card, request);
    let usage = Usage { prompt: ids.len(), ..Usage::default() };
    let (n, begin) = (request.n, getrandom::u64().unwrap_or(0));
    let readers = (0..n as u64).map(|i| Reader::new(replies, begin.wrapping_add(i)));
    match chat.generation.stream {
        None => {
            let logprobs = chat.logprobs.map(|_| Vec::new());
            let choice =
                |reader| Choice { reader, message: Message::default(), logprobs: logprobs.clone(), finish: "stop" };
            let (header, choices) = (header("chat.completion"), readers.map(choice).collect());
            let whole = Whole { header, tokens, ids, choices, usage, prompt_logprobs: None, account };
            Answer::Whole(Box::new(whole))
        }
        Some(options) => {
            let choices = readers.map(|reader| Piecewise { reader, has_begun: false }).collect();
            let header = header("chat.completion.chunk");
            Answer::Stream(Box::new(Chunks { header, tokens, choices, usage, options, left: n, account }))
        }
    }
}

/// Takes one answer apart.
struct Reader {
    parser: ReplyParser,
    is_reasoning: bool,
    /// White space that the content begins with, as long as calls may come: before those it is nothing that was said.
    blank: Option<String>,
    /// Of the last call.
    arguments: String,
    /// As [`Replies::form`].
    form: &'static str,
}

impl Reader {
    fn new(replies: &Replies, seed: u64) -> Reader {
        let blank = replies.has_tools().then(String::new);
        let (parser, arguments) = (replies.parser(seed), String::new());
        Reader { parser, is_reasoning: false, blank, arguments, form: replies.form }
    }

    /// The pieces that an event makes, and why the answer ended, if it did.
    fn take(&mut self, event: &Event, usage: &mut Usage) -> Result<(Vec<Delta>, Option<&'static str>), ApiError> {
        usage.take(event);
        let mut pieces = self.parser.push(&event.text);
        let end = event.finish.as_ref().map(|finish| finish_reason(&finish.reason, self.form)).transpose()?;
        if end.is_some() {
            pieces.extend(self.parser.finish());
        }
        for piece in &pieces {
            if let Delta::Call(call) = piece {
                if call.begin.is_some() {
                    self.arguments.clear();
                }
                self.arguments.push_str(&call.arguments);
            }
        }
        let reason = end.map(|name| if name == "stop" && self.ends_with_call() { "tool_calls" } else { name });
        if let Some(last) = pieces.last() {
            self.is_reasoning = matches!(last, Delta::Reasoning(_));
        }
        usage.reasoning += usize::from(event.token.is_some() && self.is_reasoning);
        Ok((self.without_blank(pieces, reason.is_some()), reason))
    }

    /// Whether there are calls, and the last one is whole: a stop string can cut it, and then nobody can make it.
    fn ends_with_call(&self) -> bool {
        self.parser.n_calls() > 0 && serde_json::from_str::<Value>(&self.arguments).is_ok()
    }

    /// The pieces without white space that may turn out to stand before calls alone.
    fn without_blank(&mut self, pieces: Vec<Delta>, is_end: bool) -> Vec<Delta> {
        let mut kept = Vec::new();
        for piece in pieces {
            match (piece, &mut self.blank) {
                (Delta::Content(text), Some(blank)) => {
                    blank.push_str(&text);
                    if !blank.trim().is_empty() {
                        kept.extend(self.blank.take().map(Delta::Content));
                    }
                }
                (piece, _) => kept.push(piece),
            }
        }
        if is_end && self.parser.n_calls() == 0 {
            kept.extend(self.blank.take().filter(|blank| !blank.is_empty()).map(Delta::Content));
        }
        kept
    }

    /// The content of a piece that has none: null where nothing has been said, and maybe nothing will be.
    fn no_content(&self) -> Value {
        if self.blank.is_some() { Value::Null } else { json!("") }
    }
}

/// An entry of `logprobs.content`. A token that ends the answer is no part of it.
fn entry(tokens: &Tokens, event: &Event) -> Option<Value> {
    Some(logprobs::chat_entry(tokens.tokenizer(), tokens.shown(event)?, event.logprobs.as_ref()?))
}

/// One of the answers, as a whole.
struct Choice {
    reader: Reader,
    message: Message,
    logprobs: Option<Vec<Value>>,
    finish: &'static str,
}

impl Choice {
    fn value(&mut self, index: usize) -> Value {
        let logprobs = self.logprobs.take().map(|content| json!({ "content": content, "refusal": null }));
        let message = self.message.value();
        json!({ "index": index, "message": message, "logprobs": logprobs, "finish_reason": self.finish })
    }
}

struct Whole {
    header: Header,
    tokens: Tokens,
    ids: Vec<u32>,
    choices: Vec<Choice>,
    usage: Usage,
    prompt_logprobs: Option<Value>,
    account: Account,
}

impl Assemble for Whole {
    fn take(&mut self, _: usize, event: &Event) -> Result<(), ApiError> {
        let Some(choice) = self.choices.get_mut(event.sample) else { return Ok(()) };
        let (pieces, finish) = choice.reader.take(event, &mut self.usage)?;
        choice.message.add(pieces);
        choice.finish = finish.unwrap_or(choice.finish);
        if let (Some(list), Some(entry)) = (&mut choice.logprobs, entry(&self.tokens, event)) {
            list.push(entry);
        }
        if !event.prompt_logprobs.is_empty() {
            self.prompt_logprobs = Some(logprobs::prompt(self.tokens.tokenizer(), &self.ids, &event.prompt_logprobs));
        }
        self.account.take(event);
        Ok(())
    }

    fn body(&mut self) -> Value {
        let choices = self.choices.iter_mut().enumerate().map(|(i, choice)| choice.value(i)).collect();
        let mut body = self.header.with(choices);
        body["usage"] = self.usage.value();
        if let Some(logprobs) = self.prompt_logprobs.take() {
            body["prompt_logprobs"] = logprobs;
        }
        self.account.put(&mut body);
        body
    }
}

/// One of the answers, as it comes.
struct Piecewise {
    reader: Reader,
    has_begun: bool,
}

struct Chunks {
    header: Header,
    tokens: Tokens,
    choices: Vec<Piecewise>,
    usage: Usage,
    options: StreamOptions,
    /// Answers that have not ended.
    left: usize,
    account: Account,
}

impl Chunks {
    fn chunk(&self, index: usize, delta: Value, logprobs: Option<Value>, finish: Option<&str>) -> Value {
        let logprobs = logprobs.map(|entry| json!({ "content": [entry], "refusal": null }));
        let choice = json!({ "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish });
        let mut chunk = self.header.with(vec![choice]);
        if self.options.continuous_usage {
            chunk["usage"] = self.usage.value();
        }
        chunk
    }
}

impl Stream for Chunks {
    fn take(&mut self, _: usize, event: &Event, chunks: &mut Vec<Value>) -> Result<(), ApiError> {
        let Some(choice) = self.choices.get_mut(event.sample) else { return Ok(()) };
        let (pieces, finish) = choice.reader.take(event, &mut self.usage)?;
        let mut deltas: Vec<Value> = pieces.into_iter().map(delta).collect();
        // One chunk a token, whether or not its text is final: clients measure by chunks. An end token is none.
        let is_silent =
            deltas.is_empty() && (self.tokens.shown(event).is_some() || !choice.has_begun && finish.is_some());
        if is_silent {
            deltas.push(json!({ "content": choice.reader.no_content() }));
        }
        if let (false, Some(first)) = (choice.has_begun, deltas.first_mut()) {
            // The role comes with the first token, so that a client's time to it is what it says.
            choice.has_begun = true;
            let mut with_role = Map::from_iter([("role".to_owned(), json!("assistant"))]);
            with_role.extend(first.as_object().cloned().unwrap_or_default());
            *first = Value::Object(with_role);
        }
        let mut entry = entry(&self.tokens, event);
        for delta in deltas {
            chunks.push(self.chunk(event.sample, delta, entry.take(), None));
        }
        self.account.take(event);
        if let Some(reason) = finish {
            self.left = self.left.saturating_sub(1);
            let mut chunk = self.chunk(event.sample, json!({}), None, Some(reason));
            if self.left == 0 {
                self.account.put(&mut chunk);
            }
            chunks.push(chunk);
        }
        Ok(())
    }

    fn end(&mut self, chunks: &mut Vec<Value>) {
        if self.options.include_usage {
            let mut chunk = self.header.with(Vec::new());
            chunk["usage"] = self.usage.value();
            self.account.put(&mut chunk);
            chunks.push(chunk);
        }
    }
}
