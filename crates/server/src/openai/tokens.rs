//! `/tokenize`, `/detokenize`, `/tokenizer_info` and `/apply-template`, as vLLM and llama.cpp have them.

use crate::openai::chat::Talk;
use crate::openai::generation::token_ids;
use crate::openai::logprobs::exact_text;
use crate::openai::{ApiError, Card, Fields};
use puna_text::{AddBos, EncodeOptions};
use serde_json::{Value, json};

/// What is to be tokenized.
enum What {
    Text(String, bool),
    Talk(Box<Talk>),
}

/// A request to tokenize a text or a chat.
pub struct TokenizeRequest {
    /// The model's name, if it says one.
    pub model: Option<String>,
    what: What,
    strings: bool,
}

impl TokenizeRequest {
    /// Reads a request.
    ///
    /// # Errors
    /// The field that is wrong.
    pub fn read(body: &Value) -> Result<TokenizeRequest, ApiError> {
        let fields = Fields::new(body, "")?;
        let what = if fields.get("messages").is_some() {
            What::Talk(Box::new(Talk::read(&fields)?))
        } else {
            fields.require("prompt")?;
            let text = fields.string("prompt")?.unwrap_or_default().to_owned();
            What::Text(text, fields.boolean("add_special_tokens")?.unwrap_or(true))
        };
        let strings = fields.boolean("return_token_strs")?.unwrap_or(false);
        Ok(TokenizeRequest { model: fields.string("model")?.map(str::to_owned), what, strings })
    }

    /// The answer.
    ///
    /// # Errors
    /// What the model has to refuse.
    pub fn body(&self, card: &Card) -> Result<Value, ApiError> {
        let ids = match &self.what {
            What::Text(text, adds) => {
                let bos = if *adds { AddBos::Auto } else { AddBos::No };
                card.encode("prompt", text, EncodeOptions { special: true, bos })?
            }
            What::Talk(talk) => talk.prompt(card, None)?,
        };
        let mut body = json!({ "count": ids.len(), "max_model_len": card.ctx, "tokens": ids });
        if self.strings {
            let tokenizer = card.chat.tokenizer().ok().map(|t| &**t);
            body["token_strs"] = ids.iter().map(|&id| exact_text(tokenizer, id)).collect();
        }
        Ok(body)
    }
}

/// A request to turn ids into text.
pub struct DetokenizeRequest {
    /// The model's name, if it says one.
    pub model: Option<String>,
    tokens: Vec<u32>,
}

impl DetokenizeRequest {
    /// Reads a request.
    ///
    /// # Errors
    /// The field that is wrong.
    pub fn read(body: &Value) -> Result<DetokenizeRequest, ApiError> {
        let fields = Fields::new(body, "")?;
        fields.require("tokens")?;
        let tokens = token_ids(&fields, "tokens")?.unwrap_or_default();
        Ok(DetokenizeRequest { model: fields.string("model")?.map(str::to_owned), tokens })
    }

    /// The answer.
    ///
    /// # Errors
    /// Ids that the model does not have.
    pub fn body(&self, card: &Card) -> Result<Value, ApiError> {
        let tokenizer = card.chat.tokenizer().map_err(|e| ApiError::of_engine("tokens", &e))?;
        if let Some(&id) = self.tokens.iter().find(|&&id| id as usize >= card.vocab_size) {
            return Err(ApiError::of_engine("tokens", &puna::Error::TokenId { id, vocab: card.vocab_size }));
        }
        Ok(json!({ "prompt": tokenizer.decode(&self.tokens) }))
    }
}

/// What evaluations want to know of a tokenizer that they use from afar: `null` stands for tokens that it does not have.
///
/// # Errors
/// A model without a tokenizer.
pub fn info(card: &Card) -> Result<Value, ApiError> {
    let tokenizer = card.chat.tokenizer().map_err(|e| ApiError::of_engine("", &e))?;
    let text = |id: Option<u32>| id.map(|id| tokenizer.token_text(id));
    Ok(json!({
        "bos_token": text(tokenizer.bos_id()),
        "eos_token": text(tokenizer.eos_id()),
        "unk_token": text(tokenizer.unk_id()),
        "pad_token": text(tokenizer.pad_id()),
        "add_bos_token": tokenizer.adds_bos(),
        "chat_template": card.chat.template(),
        "model_max_length": card.ctx,
        "vocab_size": card.vocab_size,
    }))
}

/// A request for the text that a chat becomes.
pub struct TemplateRequest {
    /// The model's name, if it says one.
    pub model: Option<String>,
    talk: Talk,
}

impl TemplateRequest {
    /// Reads a request.
    ///
    /// # Errors
    /// The field that is wrong.
    pub fn read(body: &Value) -> Result<TemplateRequest, ApiError> {
        let fields = Fields::new(body, "")?;
        Ok(TemplateRequest { model: fields.string("model")?.map(str::to_owned), talk: Talk::read(&fields)? })
    }

    /// The answer.
    ///
    /// # Errors
    /// What the template says is wrong.
    pub fn body(&self, card: &Card) -> Result<Value, ApiError> {
        Ok(json!({ "prompt": self.talk.render(card)? }))
    }
}
