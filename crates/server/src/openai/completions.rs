//! `/v1/completions`: texts and token ids, continued as they are.

use crate::openai::answer::{Answer, Assemble, Header, Job, Stream, Tokens, Usage, finish_reason, unique};
use crate::openai::fields::expected;
use crate::openai::generation::{MAX_LOGPROBS, ids};
use crate::openai::inside::Account;
use crate::openai::logprobs::{self, Lists, exact_text};
use crate::openai::{ApiError, Card, Fields, Generation, StreamOptions};
use puna::request::MAX_SAMPLES;
use puna::{Event, Logprobs, Request};
use puna_text::EncodeOptions;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// A text, or its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// A text.
    Text(String),
    /// Token ids, to which nothing is added.
    Ids(Vec<u32>),
}

/// Most texts of a request.
pub(crate) const MAX_INPUTS: usize = 2048;

impl Input {
    /// Reads one text or many, each as a string or as token ids, from a field that must be there. Gives the place of
    /// each, for errors.
    ///
    /// # Errors
    /// The item that is wrong.
    pub fn read(fields: &Fields, field: &str) -> Result<Vec<(String, Input)>, ApiError> {
        let what = "a string, a list of strings, a list of token ids, or a list of such lists";
        let list = match fields.require(field)? {
            Value::String(text) => return Ok(vec![(fields.name(field), Input::Text(text.clone()))]),
            Value::Array(list) if list.is_empty() => return Err(fields.expected(field, "at least one text")),
            Value::Array(list) => list,
            _ => return Err(fields.expected(field, what)),
        };
        let path = fields.name(field);
        if list[0].is_number() {
            let ids = Input::Ids(ids(list, &path)?);
            return Ok(vec![(path, ids)]);
        }
        if list.len() > MAX_INPUTS {
            return Err(ApiError::invalid(path, format!("{} texts, at most {MAX_INPUTS} are taken", list.len())));
        }
        let item = |(i, value): (usize, &Value)| {
            let place = format!("{path}[{i}]");
            let input = match value {
                Value::String(text) => Input::Text(text.clone()),
                Value::Array(list) => Input::Ids(ids(list, &place)?),
                _ => return Err(expected(place, "a string or a list of token ids", value)),
            };
            Ok((place, input))
        };
        list.iter().enumerate().map(item).collect()
    }

    /// Its ids.
    ///
    /// # Errors
    /// A text where there is no tokenizer.
    pub fn ids(&self, card: &Card, param: &str, options: EncodeOptions) -> Result<Vec<u32>, ApiError> {
        match self {
            Input::Text(text) => card.encode(param, text, options),
            Input::Ids(ids) => Ok(ids.clone()),
        }
    }

    /// Its ids, where an answer is to follow. A text that is far too long is not tokenized.
    ///
    /// # Errors
    /// As [`Input::ids`]; the prompt is too long.
    pub fn prompt(&self, card: &Card, param: &str) -> Result<Vec<u32>, ApiError> {
        match self.least_tokens_over(card, card.ctx.saturating_sub(1)) {
            Some(least) => Err(ApiError::of_engine(param, &puna::Error::PromptTooLong { least, ctx: card.ctx })),
            None => self.ids(card, param, EncodeOptions::default()),
        }
    }

    /// How many tokens it has at least, if it is a long text that certainly has more than `most`.
    pub fn least_tokens_over(&self, card: &Card, most: usize) -> Option<usize> {
        match self {
            Input::Text(text) => card.chat.least_tokens_over(most, [text.as_str()]),
            Input::Ids(_) => None,
        }
    }
}

/// A request.
#[derive(Clone, Debug)]
pub struct CompletionRequest {
    /// The model's name, if it says one.
    pub model: Option<String>,
    /// What is continued, and where it stands.
    pub prompts: Vec<(String, Input)>,
    /// How.
    pub generation: Generation,
    /// Log-probabilities: of how many other tokens.
    pub logprobs: Option<usize>,
    /// Whether the prompt is part of the text.
    pub echo: bool,
    /// So many answers are generated, and the most likely ones given.
    pub best_of: usize,
}

impl CompletionRequest {
    /// Reads a request.
    ///
    /// # Errors
    /// The field that is wrong, or that asks for what cannot be done.
    pub fn read(body: &Value) -> Result<CompletionRequest, ApiError> {
        let fields = Fields::new(body, "")?;
        let prompts = Input::read(&fields, "prompt")?;
        let echo = fields.boolean("echo")?.unwrap_or(false);
        let max_tokens = fields.integer("max_tokens", 0..=u64::MAX)?.unwrap_or(16);
        if max_tokens == 0 && !echo {
            return Err(fields.expected("max_tokens", "1 or more, unless echo is true"));
        }
        let max_tokens = usize::try_from(max_tokens).unwrap_or(usize::MAX);
        let generation = Generation::read(&fields, Some(max_tokens))?;
        let best_of = fields.integer("best_of", 1..=MAX_SAMPLES as u64)?.map_or(generation.n, |n| n as usize);
        if best_of < generation.n {
            return Err(fields.expected("best_of", "at least n"));
        }
        if best_of > generation.n && generation.stream.is_some() {
            return Err(ApiError::invalid("best_of", "more than n is not available when stream is true"));
        }
        if fields.string("suffix")?.is_some_and(|suffix| !suffix.is_empty()) {
            return Err(ApiError::invalid("suffix", "not supported: only what comes before can be given"));
        }
        let logprobs = fields.integer("logprobs", 0..=MAX_LOGPROBS)?.map(|n| n as usize);
        let model = fields.string("model")?.map(str::to_owned);
        Ok(CompletionRequest { model, prompts, generation, logprobs, echo, best_of })
    }

    /// The work that the request is for a model.
    ///
    /// # Errors
    /// What the model has to refuse.
    pub fn job(&self, card: &Card) -> Result<Job, ApiError> {
        card.check_head()?;
        let (mut requests, mut prompts) = (Vec::new(), Vec::new());
        let (steering, mut grammar) = (self.generation.inside.steering.steering(card)?, Duration::ZERO);
        for (param, input) in &self.prompts {
            let ids = input.prompt(card, param)?;
            let mut request = self.request(card, param, ids.clone())?;
            request.steering.clone_from(&steering);
            let start = Instant::now();
            request.grammar = self.generation.constraint.as_ref().map(|c| c.compile(card)).transpose()?;
            grammar += start.elapsed();
            requests.push(request);
            let text = match input {
                _ if !self.echo => String::new(),
                Input::Text(text) => text.clone(),
                Input::Ids(ids) => card.chat.tokenizer().map(|t| t.decode(ids)).unwrap_or_default(),
            };
            prompts.push(Prompt { text, ids, logprobs: None });
        }
        let shared = Shared {
            header: Header {
                id: unique("cmpl-"),
                object: "text_completion",
                created: super::model::now(),
                model: card.id.clone(),
                fingerprint: card.fingerprint.clone(),
            },
            tokens: Tokens::new(card, &requests[0]),
            usage: Usage { prompt: prompts.iter().map(|p| p.ids.len()).sum(), ..Usage::default() },
            prompts,
            account: self.generation.inside.account(card, grammar),
            echo: self.echo,
            logprobs: self.logprobs.is_some(),
            form: self.generation.constraint.as_ref().map_or("", |constraint| constraint.param),
        };
        let choices = vec![Choice::default(); shared.prompts.len() * self.best_of];
        let answer = match self.generation.stream {
            None => Answer::Whole(Box::new(Whole { shared, choices, n: self.generation.n, best_of: self.best_of })),
            Some(options) => {
                let left = choices.len();
                Answer::Stream(Box::new(Chunks { shared, choices, n: self.generation.n, options, left }))
            }
        };
        Ok(Job { requests, prefix: self.generation.prefix.clone(), answer })
    }

    fn request(&self, card: &Card, param: &str, ids: Vec<u32>) -> Result<Request, ApiError> {
        let mut request = self.generation.request(card, param, ids)?;
        request.n = self.best_of;
        // Which answers are best is a matter of how likely they are.
        request.logprobs = self.logprobs.or((self.best_of > self.generation.n).then_some(0));
        if self.echo && request.prompt_logprobs.is_none() {
            request.prompt_logprobs = self.logprobs;
        }
        Ok(request)
    }
}

struct Prompt {
    text: String,
    ids: Vec<u32>,
    logprobs: Option<Vec<Option<Logprobs>>>,
}

/// What whole answers and streams have in common.
struct Shared {
    header: Header,
    tokens: Tokens,
    prompts: Vec<Prompt>,
    usage: Usage,
    account: Account,
    echo: bool,
    logprobs: bool,
    /// The field that says what answers must be; empty if none does.
    form: &'static str,
}

/// One of the answers.
#[derive(Clone, Default)]
struct Choice {
    has_begun: bool,
    text: String,
    lists: Lists,
    /// Characters of tokens so far.
    offset: usize,
    /// How likely the answer is, and its tokens.
    score: (f64, usize),
    finish: &'static str,
}

impl Choice {
    /// The mean log-probability of a token.
    fn mean(&self) -> f64 {
        self.score.0 / self.score.1.max(1) as f64
    }
}

impl Shared {
    /// Adds to a choice what an event says.
    fn take(&mut self, index: usize, choice: &mut Choice, event: &Event) -> Result<(), ApiError> {
        self.usage.take(event);
        let Some(prompt) = self.prompts.get_mut(index) else { return Ok(()) };
        if !event.prompt_logprobs.is_empty() {
            prompt.logprobs = Some(event.prompt_logprobs.clone());
        }
        let tokenizer = self.tokens.tokenizer();
        if !choice.has_begun && self.echo {
            choice.text.push_str(&prompt.text);
            if self.logprobs {
                let none = vec![None; prompt.ids.len()];
                for (&id, logprobs) in prompt.ids.iter().zip(prompt.logprobs.as_ref().unwrap_or(&none)) {
                    choice.lists.push(tokenizer, id, logprobs.as_ref(), choice.offset);
                    choice.offset += exact_text(tokenizer, id).chars().count();
                }
            }
        }
        choice.has_begun = true;
        choice.text.push_str(&event.text);
        if let Some(logprobs) = &event.logprobs {
            choice.score = (choice.score.0 + logprobs.logprob, choice.score.1 + 1);
            if let (true, Some(id)) = (self.logprobs, self.tokens.shown(event)) {
                choice.lists.push(tokenizer, id, Some(logprobs), choice.offset);
                choice.offset += exact_text(tokenizer, id).chars().count();
            }
        }
        if let Some(finish) = &event.finish {
            choice.finish = finish_reason(&finish.reason, self.form)?;
            self.account.take(event);
        }
        Ok(())
    }

    /// What a choice says since the last time.
    fn value(&self, index: usize, choice: &mut Choice, finish: Option<&str>) -> Value {
        let logprobs = self.logprobs.then(|| choice.lists.take());
        let text = std::mem::take(&mut choice.text);
        json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": finish })
    }
}

struct Whole {
    shared: Shared,
    /// `best_of` for each prompt.
    choices: Vec<Choice>,
    n: usize,
    best_of: usize,
}

impl Assemble for Whole {
    fn take(&mut self, index: usize, event: &Event) -> Result<(), ApiError> {
        match self.choices.get_mut(index * self.best_of + event.sample) {
            Some(choice) => self.shared.take(index, choice, event),
            None => Ok(()),
        }
    }

    fn body(&mut self) -> Value {
        let mut values = Vec::new();
        for (choices, prompt) in self.choices.chunks_mut(self.best_of).zip(&self.shared.prompts) {
            if self.n < self.best_of {
                choices.sort_by(|a, b| b.mean().total_cmp(&a.mean()));
            }
            for choice in &mut choices[..self.n] {
                let finish = choice.finish;
                let mut value = self.shared.value(values.len(), choice, Some(finish));
                if let (Some(logprobs), false) = (&prompt.logprobs, self.shared.echo) {
                    value["prompt_logprobs"] = logprobs::prompt(self.shared.tokens.tokenizer(), &prompt.ids, logprobs);
                }
                values.push(value);
            }
        }
        let mut body = self.shared.header.with(values);
        body["usage"] = self.shared.usage.value();
        self.shared.account.put(&mut body);
        body
    }
}

struct Chunks {
    shared: Shared,
    choices: Vec<Choice>,
    n: usize,
    options: StreamOptions,
    /// Answers that have not ended.
    left: usize,
}

impl Stream for Chunks {
    fn take(&mut self, index: usize, event: &Event, chunks: &mut Vec<Value>) -> Result<(), ApiError> {
        let at = index * self.n + event.sample;
        let Some(choice) = self.choices.get_mut(at) else { return Ok(()) };
        self.shared.take(index, choice, event)?;
        let finish = event.finish.as_ref().map(|_| choice.finish);
        if event.token.is_none() && finish.is_none() {
            return Ok(());
        }
        let value = self.shared.value(at, choice, finish);
        let mut chunk = self.shared.header.with(vec![value]);
        if self.options.continuous_usage {
            chunk["usage"] = self.shared.usage.value();
        }
        if finish.is_some() {
            self.left = self.left.saturating_sub(1);
            if self.left == 0 {
                self.shared.account.put(&mut chunk);
            }
        }
        chunks.push(chunk);
        Ok(())
    }

    fn end(&mut self, chunks: &mut Vec<Value>) {
        if self.options.include_usage {
            let mut chunk = self.shared.header.with(Vec::new());
            chunk["usage"] = self.shared.usage.value();
            chunks.push(chunk);
        }
    }
}
