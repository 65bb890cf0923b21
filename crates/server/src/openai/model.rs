//! What requests need to know of a model.

use crate::openai::{ApiError, Kind, Vectors};
use puna::sampler::PartialSampling;
use puna::{Chat, Engine, EngineOptions, StateKey};
use puna_model::Config;
use puna_text::EncodeOptions;
use serde_json::{Value, json};
use std::time::{SystemTime, UNIX_EPOCH};

/// A loaded model, as far as requests are concerned. It shares nothing with the engine that changes.
#[derive(Clone)]
pub struct Card {
    /// Its name in requests and answers.
    pub id: String,
    /// When it was loaded, in seconds since 1970.
    pub created: u64,
    /// Positions of a sequence.
    pub ctx: usize,
    /// Positions of a text that is embedded.
    pub text_ctx: usize,
    /// Width of an embedding.
    pub dim: usize,
    /// What the model is.
    pub config: Config,
    /// Token ids are below it.
    pub vocab_size: usize,
    /// Whether it can answer; it makes embeddings only otherwise.
    pub has_head: bool,
    /// Tokenizer and template.
    pub chat: Chat,
    /// What its files recommend.
    pub sampling: PartialSampling,
    /// Most tokens of an answer, whatever a request says.
    pub max_tokens: Option<usize>,
    /// Control vectors that requests may name.
    pub vectors: Vectors,
    /// What prefixes are known by that are kept for it, where any are.
    pub prefixes: Option<StateKey>,
    /// Bytes a second that memory gives at best, where it was measured.
    pub bandwidth: Option<f64>,
    /// What answers depend on beside requests: the version of the program, the model, how it is kept.
    pub fingerprint: String,
}

impl Card {
    /// The card of a model.
    pub fn new(id: impl Into<String>, engine: &Engine, options: &EngineOptions) -> Card {
        let (config, chat) = (engine.config(), engine.chat());
        let size = std::fs::metadata(chat.path()).map_or(0, |file| file.len());
        let name = chat.path().file_name().map(|name| name.to_string_lossy().into_owned());
        let key = format!("{config:?} {name:?} {size} {:?} {:?}", options.kv, options.load.quantize);
        let hash = blake3::hash(key.as_bytes()).to_hex();
        Card {
            id: id.into(),
            created: now(),
            ctx: engine.ctx(),
            text_ctx: engine.text_ctx(),
            dim: config.dim,
            config: config.clone(),
            vocab_size: config.vocab_size,
            has_head: engine.has_head(),
            chat,
            sampling: engine.sampling_defaults().clone(),
            max_tokens: None,
            vectors: Vectors::default(),
            prefixes: None,
            bandwidth: None,
            fingerprint: format!("puna-{}-{}", env!("CARGO_PKG_VERSION"), &hash[..12]),
        }
    }

    /// As `/v1/models` lists it.
    pub fn listed(&self) -> Value {
        json!({
            "id": self.id,
            "object": "model",
            "created": self.created,
            "owned_by": "puna",
            "parent": null,
            "max_model_len": self.ctx,
        })
    }

    /// The ids of a text that stands in the field `param`.
    ///
    /// # Errors
    /// A model without a tokenizer.
    pub(crate) fn encode(&self, param: &str, text: &str, options: EncodeOptions) -> Result<Vec<u32>, ApiError> {
        let tokenizer = self.chat.tokenizer().map_err(|e| ApiError::of_engine(param, &e))?;
        tokenizer.encode(text, options).map_err(|e| ApiError::invalid(param, e))
    }

    /// Refuses requests for answers where there can be none.
    ///
    /// # Errors
    /// The model makes embeddings only.
    pub(crate) fn check_head(&self) -> Result<(), ApiError> {
        let what = format!("{} has no output projection: it makes embeddings only, see /v1/embeddings", self.id);
        let error = || ApiError::invalid("model", what).code("embeddings_only");
        if self.has_head { Ok(()) } else { Err(error()) }
    }

    /// Refuses requests that begin with a prefix where none are kept.
    ///
    /// # Errors
    /// If this is one.
    pub(crate) fn check_prefix(&self, name: Option<&str>) -> Result<(), ApiError> {
        let error = || ApiError { param: Some("prefix".into()), ..ApiError::no_prefixes(Kind::Invalid) };
        if name.is_none() || self.prefixes.is_some() { Ok(()) } else { Err(error()) }
    }

    /// Refuses a prompt that leaves no room for an answer, before it waits for its turn.
    ///
    /// # Errors
    /// As [`Engine::add`](puna::Engine::add) has them.
    pub(crate) fn check_prompt(&self, param: &str, ids: &[u32]) -> Result<(), ApiError> {
        let vocab = self.vocab_size;
        let bad = ids.iter().find(|&&id| id as usize >= vocab).map(|&id| puna::Error::TokenId { id, vocab });
        let error = match bad {
            Some(error) => error,
            None if ids.is_empty() => puna::Error::EmptyPrompt,
            None if ids.len() >= self.ctx => puna::Error::ContextExceeded { prompt: ids.len(), ctx: self.ctx },
            None => return Ok(()),
        };
        Err(ApiError::of_engine(param, &error))
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
