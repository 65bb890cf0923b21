//! What can go wrong between a model file and its text.

use crate::sampler::SampleError;
use puna_model::error::{escape, shown};
use puna_text::TextError;
use std::path::{Path, PathBuf};

/// An error of the engine: one line.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model file, its weights or a batch.
    #[error(transparent)]
    Model(#[from] puna_model::Error),
    /// The tokenizer or the chat template of a model.
    #[error("{}: {source}", shown(path))]
    Text {
        /// The model's file.
        path: PathBuf,
        /// What is wrong.
        source: TextError,
    },
    /// The tokenizer and the weights do not belong together.
    #[error("{}: the vocabulary has {tokens} tokens, but token_embd.weight has only {rows} rows", shown(path))]
    Vocabulary {
        /// The model's file.
        path: PathBuf,
        /// Tokens of the vocabulary.
        tokens: usize,
        /// Rows of the embedding.
        rows: usize,
    },
    /// A model that is to draft for another one and has other tokens.
    #[error("{}: it cannot draft for the model, whose vocabulary is another one: {what}", shown(path))]
    DraftVocabulary {
        /// The draft model's file.
        path: PathBuf,
        /// The first difference.
        what: String,
    },
    /// Sampling parameters, of a request or of the model's file, or logits that nothing can be chosen from.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// Text is asked of a model that has no tokenizer.
    #[error("{}: the file has no tokenizer: only token ids can be used", shown(path))]
    NoTokenizer {
        /// The model's file.
        path: PathBuf,
    },
    /// A chat is asked of a model that has no chat template.
    #[error("{}: the file has no chat template; give one, or use the prompt as it is", shown(path))]
    NoTemplate {
        /// The model's file.
        path: PathBuf,
    },
    /// A prompt without tokens.
    #[error("the prompt is empty: it has no tokens, and the model has no token that begins a text")]
    EmptyPrompt,
    /// A prompt that does not fit.
    #[error("the prompt has {prompt} tokens, but the context holds {ctx}, with at least one for the answer")]
    ContextExceeded {
        /// Tokens of the prompt.
        prompt: usize,
        /// Positions of the context.
        ctx: usize,
    },
    /// A prompt so long that it was not tokenized.
    #[error("the prompt has {least} tokens or more, but the context holds {ctx}, with at least one for the answer")]
    PromptTooLong {
        /// Tokens that it has at least.
        least: usize,
        /// Positions of the context.
        ctx: usize,
    },
    /// A cache that holds nothing.
    #[error("a KV cache of {bytes} bytes is too small: 32 positions take {block}")]
    KvBytes {
        /// Bytes it may take.
        bytes: usize,
        /// Bytes of 32 positions.
        block: usize,
    },
    /// More answers to a request than there can be, or none.
    #[error("n must be 1 to {most}, found {n}")]
    Samples {
        /// Answers asked for.
        n: usize,
        /// Most there can be.
        most: usize,
    },
    /// The residual after a layer that the model does not have.
    #[error("layer {layer} cannot be captured: the model has {n_layers}, from 0 on")]
    CaptureLayer {
        /// The layer.
        layer: usize,
        /// How many there are.
        n_layers: usize,
    },
    /// A direction of a control vector after a layer that has none.
    #[error("layer {layer} has no direction: those of the model are of layers 1 to {}", n_layers - 1)]
    DirectionLayer {
        /// The layer.
        layer: usize,
        /// How many there are.
        n_layers: usize,
    },
    /// A control vector of nothing.
    #[error("there are no pairs of prompts to make a control vector of")]
    NoPairs,
    /// Steering that was made for another model.
    #[error(
        "the steering was made for {} layers of width {}, the model has {} of {}",
        found.0, found.1, expected.0, expected.1
    )]
    Steering {
        /// Layers and width that it was made for.
        found: (usize, usize),
        /// Those of the model.
        expected: (usize, usize),
    },
    /// A token id that the model does not have.
    #[error("token id {id} is out of range: the vocabulary has {vocab}")]
    TokenId {
        /// The id.
        id: u32,
        /// Rows of the embedding.
        vocab: usize,
    },
    /// A text to be embedded that has no tokens.
    #[error("it is empty: it has no tokens, and the model adds none at its ends")]
    EmptyText,
    /// A text to be embedded that does not fit.
    #[error("it has {tokens} tokens, but the context holds {ctx}")]
    TextTooLong {
        /// Tokens of the text.
        tokens: usize,
        /// Positions of the context.
        ctx: usize,
    },
    /// An embedding that is no direction in space.
    #[error("its embedding has numbers that are not finite")]
    NotFinite,
    /// What is wrong with one of several texts.
    #[error("text {index}: {source}")]
    Embed {
        /// Which one, from 0.
        index: usize,
        /// What is wrong with it.
        source: Box<Error>,
    },
    /// The files say that embeddings are made in a way that puna does not have.
    #[error("{}: {what}", shown(path))]
    Embedding {
        /// The file.
        path: PathBuf,
        /// What was found, and what is supported.
        what: String,
    },
    /// A JSON Schema that cannot be enforced.
    #[error("the schema cannot be enforced: {}: {problem}", if at.is_empty() { "its root".into() } else { format!("`{keyword}` at {at}") })]
    Schema {
        /// The keyword at fault.
        keyword: String,
        /// Where it is: a JSON pointer, into the list of tools where it is a tool's.
        at: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A grammar that cannot be used.
    #[error("{kind} grammar: {problem}")]
    Grammar {
        /// What it was made of: `json_schema`, `lark`, `regex`, `tools`.
        kind: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// A grammar that was made for another model.
    #[error("the grammar was made for the tokens of another model")]
    ForeignGrammar,
    /// An answer that cannot go on in its grammar.
    #[error("the answer cannot go on in its grammar: {problem}")]
    Constraint {
        /// Why.
        problem: String,
    },
    /// A name that no file can safely have.
    #[error(
        "\"{}\" is no name of a saved state: expected 1 to 64 letters, digits, '-', '_' or '.', the first no '.'",
        escape(name)
    )]
    StateName {
        /// The name.
        name: String,
    },
    /// A message of a chat that is no message.
    #[error("message {index}: {what}")]
    Message {
        /// Which one, from 0.
        index: usize,
        /// What was expected and what was found.
        what: String,
    },
}

impl Error {
    /// An error of the tokenizer or the template of the model at `path`.
    pub fn text(path: &Path, source: TextError) -> Error {
        Error::Text { path: path.to_owned(), source }
    }
}
