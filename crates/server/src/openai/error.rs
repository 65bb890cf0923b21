//! Errors in OpenAI's shape.

use serde_json::{Value, json};
use std::time::Duration;

/// What kind of error it is: its HTTP status and its `type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The request is wrong: 400.
    Invalid,
    /// No key, or a wrong one: 401.
    Authentication,
    /// This server does not do it: 403.
    Forbidden,
    /// There is no such thing: 404.
    NotFound,
    /// There is no such method here: 405.
    Method,
    /// The request did not come in time, or took longer than it may: 408.
    Timeout,
    /// The body is too large: 413.
    TooLarge,
    /// The body is compressed: 415.
    Encoding,
    /// Too many requests wait already: 429.
    RateLimit,
    /// The server cannot go on with it: 500.
    Server,
    /// Not now: 503.
    Unavailable,
}

impl Kind {
    /// The HTTP status.
    pub fn status(self) -> u16 {
        match self {
            Kind::Invalid => 400,
            Kind::Authentication => 401,
            Kind::Forbidden => 403,
            Kind::NotFound => 404,
            Kind::Method => 405,
            Kind::Timeout => 408,
            Kind::TooLarge => 413,
            Kind::Encoding => 415,
            Kind::RateLimit => 429,
            Kind::Server => 500,
            Kind::Unavailable => 503,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Kind::Invalid | Kind::Method | Kind::TooLarge | Kind::Encoding => "invalid_request_error",
            Kind::Authentication => "authentication_error",
            Kind::Forbidden => "permission_error",
            Kind::NotFound => "not_found_error",
            Kind::Timeout => "timeout_error",
            Kind::RateLimit => "rate_limit_error",
            Kind::Server => "server_error",
            Kind::Unavailable => "service_unavailable_error",
        }
    }
}

/// A number of tokens that is known from below.
pub(crate) struct AtLeast(pub usize);

impl std::fmt::Display for AtLeast {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "at least {}", self.0)
    }
}

/// Why a request is not answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// What kind of error it is.
    pub kind: Kind,
    /// One precise sentence.
    pub message: String,
    /// The field at fault, as `messages[0].content`.
    pub param: Option<String>,
    /// A name that programs look for, as `context_length_exceeded`.
    pub code: Option<&'static str>,
    /// When to ask again, where that is known.
    pub retry_after: Option<Duration>,
}

impl ApiError {
    /// An error that names no field.
    pub fn new(kind: Kind, message: impl Into<String>) -> ApiError {
        ApiError { kind, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// A field that is wrong.
    pub fn invalid(param: impl Into<String>, what: impl std::fmt::Display) -> ApiError {
        let param = param.into();
        let message = if param.is_empty() { what.to_string() } else { format!("{param}: {what}") };
        ApiError { param: Some(param).filter(|p| !p.is_empty()), ..ApiError::new(Kind::Invalid, message) }
    }

    /// With a name for programs.
    pub fn code(self, code: &'static str) -> ApiError {
        ApiError { code: Some(code), ..self }
    }

    /// A text that does not fit. Gateways that would send it to another model know this error by words of OpenAI's.
    pub(crate) fn context(param: &str, what: &str, tokens: impl std::fmt::Display, ctx: usize) -> ApiError {
        let known = "Input tokens exceed the configured limit: this model's maximum context length is";
        let what = format!("{known} {ctx} tokens, but the {what} has {tokens}");
        ApiError::invalid(param, what).code("context_length_exceeded")
    }

    /// What is wrong with a text or its tokens, given in the field `param`.
    pub fn of_engine(param: &str, error: &puna::Error) -> ApiError {
        use puna::Error as E;
        use puna_model::Error as M;
        match error {
            E::ContextExceeded { prompt, ctx } => ApiError::context(param, "prompt", *prompt, *ctx),
            E::PromptTooLong { least, ctx } => ApiError::context(param, "prompt", AtLeast(*least), *ctx),
            E::TextTooLong { tokens, ctx } => ApiError::context(param, "text", *tokens, *ctx),
            E::Embed { source, .. } => ApiError::of_engine(param, source),
            E::Sample(puna::sampler::SampleError::Param { field, expected, found }) => {
                let field = if field == "repeat_penalty" { "repetition_penalty" } else { field };
                ApiError::invalid(field, format!("expected {expected}, found {found}"))
            }
            E::Message { index, what } => ApiError::invalid(format!("{param}[{index}]"), what),
            // The server's own path is nobody's business.
            E::Text { source, .. } => ApiError::invalid(param, source),
            E::NoTemplate { .. } => ApiError::invalid(param, "the model has no chat template: use /v1/completions"),
            E::NoTokenizer { .. } => ApiError::invalid(param, "the model has no tokenizer: only token ids can be used"),
            E::Schema { .. } => ApiError::invalid(param, error).code("unsupported_schema"),
            E::Grammar { .. } => ApiError::invalid(param, error).code("invalid_grammar"),
            // The grammar is the client's: nothing satisfies it, or nothing from here on.
            E::Constraint { .. } => ApiError::invalid(param, error).code("unsatisfiable_grammar"),
            E::Sample(e @ puna::sampler::SampleError::NothingAllowed { .. }) => ApiError::invalid(param, e),
            E::EmptyPrompt | E::EmptyText | E::TokenId { .. } | E::Samples { .. } => ApiError::invalid(param, error),
            E::Embedding { what, .. } => ApiError::new(Kind::Invalid, format!("the model cannot embed: {what}")),
            E::Model(e @ M::NoHead) => ApiError::new(Kind::Invalid, e.to_string()),
            // The same goes for paths of models.
            E::Model(M::Changed { what, .. }) => {
                ApiError::new(Kind::Server, format!("a file of the model has changed since it was loaded: {what}"))
            }
            E::Model(M::Io { what, .. }) => {
                ApiError::new(Kind::Server, format!("a file of the model cannot be read: {what}"))
            }
            _ => ApiError::new(Kind::Server, error.to_string()),
        }
    }

    /// The body of a response: `{"error": {"message", "type", "param", "code"}}`.
    pub fn body(&self) -> Value {
        json!({
            "error": { "message": self.message, "type": self.kind.name(), "param": self.param, "code": self.code }
        })
    }
}
