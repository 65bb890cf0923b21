//! What chat and completion requests have in common.

use crate::openai::fields::{expected, integer};
use crate::openai::inside::Inside;
use crate::openai::{ApiError, Card, Constraint, Fields};
use puna::sampler::{LogitBias, PartialSampling};
use puna::{Request, request::MAX_SAMPLES};
use serde_json::Value;
use std::collections::BTreeMap;

/// How an answer is generated.
#[derive(Clone, Debug)]
pub struct Generation {
    /// Sampling, as far as the request says.
    pub sampling: PartialSampling,
    /// Most tokens; `None`: as many as the context holds.
    pub max_tokens: Option<usize>,
    /// Texts that end an answer.
    pub stop: Vec<String>,
    /// Tokens that end an answer.
    pub stop_token_ids: Vec<u32>,
    /// Whether control tokens give no text.
    pub skip_special: bool,
    /// Answers.
    pub n: usize,
    /// Log-probabilities of the prompt's tokens, and of how many others.
    pub prompt_logprobs: Option<usize>,
    /// What the answer must be.
    pub constraint: Option<Constraint>,
    /// What it changes and sees inside the model.
    pub inside: Inside,
    /// The prefix that it says to begin with.
    pub prefix: Option<String>,
    /// `Some` if the answer is to come in pieces.
    pub stream: Option<StreamOptions>,
}

/// What a stream tells beside the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamOptions {
    /// A last piece with counts of tokens.
    pub include_usage: bool,
    /// Counts in every piece.
    pub continuous_usage: bool,
}

/// Most stop strings, and most characters of one.
const MAX_STOPS: usize = 64;
const MAX_STOP_LEN: usize = 1024;
/// Most log-probabilities of other tokens.
pub(crate) const MAX_LOGPROBS: u64 = 20;

impl Generation {
    /// Reads the fields; `max_tokens` is what the kind of request says of it.
    ///
    /// # Errors
    /// The field that is wrong.
    pub fn read(fields: &Fields, max_tokens: Option<usize>) -> Result<Generation, ApiError> {
        let sampling = sampling(fields)?;
        let min_tokens = sampling.min_tokens.unwrap_or(0) as usize;
        if max_tokens.is_some_and(|most| min_tokens > most) {
            return Err(fields.expected("min_tokens", "at most max_tokens"));
        }
        let stream = fields.boolean("stream")?.unwrap_or(false);
        let options = stream_options(fields)?;
        if options.is_some() && !stream {
            return Err(ApiError::invalid("stream_options", "only allowed when stream is true"));
        }
        let prompt_logprobs = fields.integer("prompt_logprobs", 0..=MAX_LOGPROBS)?;
        if prompt_logprobs.is_some() && stream {
            return Err(ApiError::invalid("prompt_logprobs", "not available when stream is true"));
        }
        Ok(Generation {
            sampling,
            max_tokens,
            stop: stop(fields)?,
            stop_token_ids: token_ids(fields, "stop_token_ids")?.unwrap_or_default(),
            skip_special: fields.boolean("skip_special_tokens")?.unwrap_or(true),
            n: fields.integer("n", 1..=MAX_SAMPLES as u64)?.unwrap_or(1) as usize,
            prompt_logprobs: prompt_logprobs.map(|n| n as usize),
            constraint: Constraint::read(fields)?,
            inside: Inside::read(fields)?,
            prefix: fields.string("prefix")?.map(str::to_owned),
            stream: stream.then(|| options.unwrap_or_default()),
        })
    }

    /// The engine's request for a prompt, which was given in the field `param`.
    ///
    /// # Errors
    /// What the model has to refuse.
    pub fn request(&self, card: &Card, param: &str, prompt: Vec<u32>) -> Result<Request, ApiError> {
        card.check_prefix(self.prefix.as_deref())?;
        card.check_prompt(param, &prompt)?;
        let bad = self.stop_token_ids.iter().find(|&&id| id as usize >= card.vocab_size);
        if let Some(&id) = bad {
            let error = puna::Error::TokenId { id, vocab: card.vocab_size };
            return Err(ApiError::of_engine("stop_token_ids", &error));
        }
        let biased = self.sampling.logit_bias.iter().flat_map(|bias| bias.0.keys());
        if let Some(&id) = biased.copied().find(|&id| id as usize >= card.vocab_size).as_ref() {
            return Err(ApiError::of_engine("logit_bias", &puna::Error::TokenId { id, vocab: card.vocab_size }));
        }
        let sampling = PartialSampling::resolve(&self.sampling, &card.sampling);
        sampling.validate().map_err(|e| ApiError::of_engine("", &e.into()))?;
        let mut request = Request::new(prompt, sampling);
        request.max_tokens = self.max_tokens.into_iter().chain(card.max_tokens).min();
        request.stop.clone_from(&self.stop);
        request.stop_token_ids.clone_from(&self.stop_token_ids);
        request.skip_special = self.skip_special;
        request.n = self.n;
        request.prompt_logprobs = self.prompt_logprobs;
        self.inside.ask(card, &mut request)?;
        Ok(request)
    }
}

/// Greedy is 0; above 2 there is hardly anything but noise, and the interface's own limit is 2.
const TEMPERATURE: std::ops::RangeInclusive<f64> = 0.0..=2.0;

fn sampling(fields: &Fields) -> Result<PartialSampling, ApiError> {
    let repeat_penalty = fields.number("repetition_penalty", 0.01..=100.0)?;
    Ok(PartialSampling {
        temperature: fields.number("temperature", TEMPERATURE)?,
        top_k: top_k(fields)?,
        top_p: fields.number("top_p", 0.0..=1.0)?,
        min_p: fields.number("min_p", 0.0..=1.0)?,
        repeat_penalty,
        // Where clients send this field, it is about the whole text.
        repeat_last_n: repeat_penalty.map(|_| -1),
        presence_penalty: fields.number("presence_penalty", -2.0..=2.0)?,
        frequency_penalty: fields.number("frequency_penalty", -2.0..=2.0)?,
        logit_bias: logit_bias(fields)?,
        ignore_eos: fields.boolean("ignore_eos")?,
        min_tokens: fields.integer("min_tokens", 0..=u64::from(u32::MAX))?.map(|n| n as u32),
        seed: seed(fields)?,
        ..PartialSampling::default()
    })
}

/// -1 and 0 keep all.
fn top_k(fields: &Fields) -> Result<Option<i32>, ApiError> {
    match fields.get("top_k") {
        Some(value) if value.as_i64() == Some(-1) => Ok(Some(0)),
        _ => {
            let what = "-1, 0 (both keep all tokens) or more";
            let k = fields.integer("top_k", 0..=i32::MAX as u64).map_err(|_| fields.expected("top_k", what))?;
            Ok(k.map(|k| k as i32))
        }
    }
}

/// Any 64-bit integer; negative ones stand for large ones.
fn seed(fields: &Fields) -> Result<Option<u64>, ApiError> {
    let number = |value: &Value| integer(value).or_else(|| value.as_i64().map(|seed| seed as u64));
    match fields.get("seed") {
        None => Ok(None),
        Some(value) => number(value).map(Some).ok_or_else(|| fields.expected("seed", "a 64-bit integer")),
    }
}

fn logit_bias(fields: &Fields) -> Result<Option<LogitBias>, ApiError> {
    let Some(map) = fields.object("logit_bias")? else { return Ok(None) };
    let mut bias = BTreeMap::new();
    for (id, value) in map {
        let id: u32 = id.parse().map_err(|_| fields.expected("logit_bias", "token ids as names of its fields"))?;
        let number = value.as_f64().filter(|x| (-100.0..=100.0).contains(x));
        let number = number.ok_or_else(|| expected(format!("logit_bias.{id}"), "a number from -100 to 100", value))?;
        bias.insert(id, number as f32);
    }
    Ok(Some(LogitBias(bias)).filter(|bias| !bias.0.is_empty()))
}

fn stop(fields: &Fields) -> Result<Vec<String>, ApiError> {
    let list = match fields.get("stop") {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) if list.len() <= MAX_STOPS => list.as_slice(),
        Some(text @ Value::String(_)) => std::slice::from_ref(text),
        Some(_) => return Err(fields.expected("stop", "a string, or a list of at most 64 strings")),
    };
    let text = |(i, value): (usize, &Value)| {
        let text = value.as_str().filter(|text| !text.is_empty() && text.chars().count() <= MAX_STOP_LEN);
        let what = "a string of 1 to 1024 characters";
        text.map(str::to_owned).ok_or_else(|| expected(format!("stop[{i}]"), what, value))
    };
    list.iter().enumerate().map(text).collect()
}

/// A list of token ids.
pub(crate) fn token_ids(fields: &Fields, field: &str) -> Result<Option<Vec<u32>>, ApiError> {
    let Some(list) = fields.list(field)? else { return Ok(None) };
    ids(list, &fields.name(field)).map(Some)
}

/// Token ids of a list that is at `path`.
pub(crate) fn ids(list: &[Value], path: &str) -> Result<Vec<u32>, ApiError> {
    let id = |(i, value): (usize, &Value)| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| expected(format!("{path}[{i}]"), "a token id", value))
    };
    list.iter().enumerate().map(id).collect()
}

fn stream_options(fields: &Fields) -> Result<Option<StreamOptions>, ApiError> {
    let Some(value) = fields.get("stream_options") else { return Ok(None) };
    let options = Fields::new(value, "stream_options")?;
    Ok(Some(StreamOptions {
        include_usage: options.boolean("include_usage")?.unwrap_or(false),
        continuous_usage: options.boolean("continuous_usage_stats")?.unwrap_or(false),
    }))
}
