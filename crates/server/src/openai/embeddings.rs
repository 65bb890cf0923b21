//! `/v1/embeddings`.

use crate::openai::completions::Input;
use crate::openai::error::AtLeast;
use crate::openai::inside::Wishes;
use crate::openai::{ApiError, Card, Fields};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use puna::EmbedOptions;
use puna_text::{AddBos, EncodeOptions};
use serde_json::{Value, json};

/// A request.
#[derive(Clone, Debug)]
pub struct EmbeddingRequest {
    /// The model's name, if it says one.
    pub model: Option<String>,
    /// The texts, and where they stand.
    pub input: Vec<(String, Input)>,
    /// Vectors as base64 of little-endian single precision, and not as lists of numbers.
    pub base64: bool,
    /// So many of the first numbers of a vector, which is then of length 1 again.
    pub dimensions: Option<usize>,
    /// What is added to the residual.
    pub steering: Wishes,
}

impl EmbeddingRequest {
    /// Reads a request.
    ///
    /// # Errors
    /// The field that is wrong.
    pub fn read(body: &Value) -> Result<EmbeddingRequest, ApiError> {
        let fields = Fields::new(body, "")?;
        let input = Input::read(&fields, "input")?;
        let base64 = match fields.string("encoding_format")? {
            None | Some("float") => false,
            Some("base64") => true,
            Some(_) => return Err(fields.expected("encoding_format", "float or base64")),
        };
        let dimensions = fields.integer("dimensions", 1..=u64::from(u32::MAX))?.map(|n| n as usize);
        let model = fields.string("model")?.map(str::to_owned);
        Ok(EmbeddingRequest { model, input, base64, dimensions, steering: Wishes::read(&fields)? })
    }

    /// The ids of the texts. Control tokens that are written out in a text are ordinary characters.
    ///
    /// # Errors
    /// The text that the model has to refuse.
    pub fn texts(&self, card: &Card) -> Result<Vec<Vec<u32>>, ApiError> {
        if let Some(n) = self.dimensions.filter(|&n| n > card.dim) {
            return Err(ApiError::invalid("dimensions", format!("expected at most {}, found {n}", card.dim)));
        }
        let options = EncodeOptions { special: false, bos: AddBos::Auto };
        let text = |(param, input): &(String, Input)| {
            if let Some(least) = input.least_tokens_over(card, card.text_ctx) {
                return Err(ApiError::context(param, "text", AtLeast(least), card.text_ctx));
            }
            let ids = input.ids(card, param, options)?;
            let error = match ids.iter().find(|&&id| id as usize >= card.vocab_size) {
                Some(&id) => Some(puna::Error::TokenId { id, vocab: card.vocab_size }),
                None if ids.is_empty() => Some(puna::Error::EmptyText),
                None if ids.len() > card.text_ctx => {
                    Some(puna::Error::TextTooLong { tokens: ids.len(), ctx: card.text_ctx })
                }
                None => None,
            };
            error.map_or(Ok(ids), |e| Err(ApiError::of_engine(param, &e)))
        };
        self.input.iter().map(text).collect()
    }

    /// How the engine is asked: vectors are of length 1.
    ///
    /// # Errors
    /// As [`Wishes::steering`].
    pub fn options(&self, card: &Card) -> Result<EmbedOptions, ApiError> {
        Ok(EmbedOptions { pooling: None, normalize: Some(true), steering: self.steering.steering(card)? })
    }

    /// The answer: a vector for each text, in their order.
    pub fn body(&self, card: &Card, texts: &[Vec<u32>], embeddings: Vec<Vec<f32>>) -> Value {
        let tokens: usize = texts.iter().map(Vec::len).sum();
        let data = embeddings.into_iter().enumerate().map(|(index, vector)| {
            let vector = self.cut(vector);
            let embedding = if self.base64 {
                let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
                json!(STANDARD.encode(bytes))
            } else {
                json!(vector)
            };
            json!({ "object": "embedding", "index": index, "embedding": embedding })
        });
        json!({
            "object": "list",
            "data": data.collect::<Vec<Value>>(),
            "model": card.id,
            "usage": { "prompt_tokens": tokens, "total_tokens": tokens },
        })
    }

    fn cut(&self, mut vector: Vec<f32>) -> Vec<f32> {
        if let Some(n) = self.dimensions.filter(|&n| n < vector.len()) {
            vector.truncate(n);
            let square: f64 = vector.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
            let length = if square > 0.0 { square.sqrt() } else { 1.0 };
            vector.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
        }
        vector
    }
}
