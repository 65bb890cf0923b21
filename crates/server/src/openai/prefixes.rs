//! `/v1/prefixes`: beginnings of prompts that are kept under names.

use crate::openai::chat::Talk;
use crate::openai::completions::Input;
use crate::openai::{ApiError, Card, Fields, Kind};
use puna::sampler::PartialSampling;
use puna::{ChatEnd, Request};
use serde_json::{Value, json};

/// Tokens of a block: a prefix has whole ones.
const BLOCK: usize = 32;

/// A request to keep a prefix.
#[derive(Clone, Debug)]
pub struct PrefixRequest {
    /// The model's name, if it says one.
    pub model: Option<String>,
    what: What,
}

/// What prompts begin with.
#[derive(Clone, Debug)]
enum What {
    Talk(Box<Talk>),
    Text(Input),
}

/// What is to be computed and kept.
pub struct Beginning {
    /// Whole blocks of tokens, of which no answer is wanted.
    pub request: Request,
    /// What the file says beside them, as `puna run` does.
    pub note: String,
}

impl PrefixRequest {
    /// Reads a request: `messages` and what else makes the prompt of a chat, or `prompt`.
    ///
    /// # Errors
    /// The field that is wrong.
    pub fn read(body: &Value) -> Result<PrefixRequest, ApiError> {
        let fields = Fields::new(body, "")?;
        if fields.list("steering")?.is_some_and(|list| !list.is_empty()) {
            return Err(ApiError::invalid("steering", "not supported: prefixes are kept as they are without it"));
        }
        let what = match (fields.get("messages"), fields.get("prompt")) {
            (Some(_), Some(_)) => return Err(ApiError::invalid("prompt", "cannot be used together with messages")),
            (None, Some(_)) => match Input::read(&fields, "prompt")?.as_slice() {
                [(_, input)] => What::Text(input.clone()),
                _ => return Err(fields.expected("prompt", "one text")),
            },
            _ => {
                let mut talk = Talk::read(&fields)?;
                // More messages follow, and not yet an answer.
                if talk.end == ChatEnd::Answer && fields.get("add_generation_prompt").is_none() {
                    talk.end = ChatEnd::Nothing;
                }
                What::Talk(Box::new(talk))
            }
        };
        Ok(PrefixRequest { model: fields.string("model")?.map(str::to_owned), what })
    }

    /// What a model has to compute.
    ///
    /// # Errors
    /// What the model has to refuse; less than a block.
    pub fn beginning(&self, card: &Card) -> Result<Beginning, ApiError> {
        card.check_head()?;
        let (param, ids, note) = match &self.what {
            What::Talk(talk) => {
                let ids = talk.prompt(card, Some(card.ctx))?;
                ("messages", ids, json!({ "model": card.id, "messages": talk.messages }))
            }
            What::Text(input) => ("prompt", input.prompt(card, "prompt")?, json!({ "model": card.id })),
        };
        card.check_prompt(param, &ids)?;
        let whole = ids.len() / BLOCK * BLOCK;
        if whole == 0 {
            let what =
                format!("{} tokens: expected at least {BLOCK}, since whole blocks of {BLOCK} are kept", ids.len());
            return Err(ApiError::invalid(param, what));
        }
        let sampling = PartialSampling::resolve(&PartialSampling::default(), &card.sampling);
        let mut request = Request::new(ids[..whole].to_vec(), sampling);
        request.max_tokens = Some(0);
        Ok(Beginning { request, note: note.to_string() })
    }
}

impl ApiError {
    /// Nobody has told the server where to keep prefixes.
    pub(crate) fn no_prefixes(kind: Kind) -> ApiError {
        let what = "no prefixes are kept here: puna serve --state-dir DIR keeps them";
        ApiError::new(kind, what).code("prefixes_off")
    }

    /// The file would take more room than there is.
    pub(crate) fn prefixes_full(bytes: u64, most: u64) -> ApiError {
        let what =
            format!("the file of the prefix would have {bytes} bytes, and there is room for {most}: delete others");
        ApiError::new(Kind::Invalid, what).code("prefixes_full")
    }
}
