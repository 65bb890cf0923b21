use thiserror::Error;

/// Shorthand for results of this crate.
pub(crate) type Result<T> = std::result::Result<T, TextError>;

/// What can be wrong with a vocabulary, a tokenizer file or a chat template. Every message is one line.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum TextError {
    /// A tokenizer of a kind this crate does not have.
    #[error("{key}: `{found}` is not supported (supported: {supported})")]
    UnsupportedKind {
        /// Metadata key, or file and field.
        key: &'static str,
        /// The kind found.
        found: String,
        /// The kinds there are.
        supported: &'static str,
    },
    /// A part of a tokenizer file that this crate does not have.
    #[error("{file}: {part} `{found}` is not supported")]
    UnsupportedPart {
        /// File name.
        file: &'static str,
        /// Which part of the pipeline.
        part: &'static str,
        /// Its type in the file.
        found: String,
    },
    /// A vocabulary without a token.
    #[error("{0}: the vocabulary is empty, expected at least one token")]
    EmptyVocab(&'static str),
    /// A key without which the vocabulary cannot be used.
    #[error("{key} is missing: {need}")]
    Missing {
        /// Metadata key, or file.
        key: &'static str,
        /// Why it is needed.
        need: &'static str,
    },
    /// A list that must have one entry for each token and has not.
    #[error("{key} has {found} entries, expected {expected}, one for each token")]
    Length {
        /// Metadata key.
        key: &'static str,
        /// Number of tokens.
        expected: usize,
        /// Number of entries.
        found: usize,
    },
    /// A token id that no token has.
    #[error("{key} is {id}, out of range: the vocabulary has {vocab} tokens")]
    TokenId {
        /// Metadata key, or file and field.
        key: String,
        /// The id found.
        id: u64,
        /// Number of tokens.
        vocab: usize,
    },
    /// A score that is not a number.
    #[error("tokenizer.ggml.scores[{index}] is {found}, expected a number")]
    Score {
        /// Token id.
        index: usize,
        /// The value found.
        found: f32,
    },
    /// A merge that cannot be applied.
    #[error("{key}[{index}] is {found:?}: {problem}")]
    Merge {
        /// Metadata key, or file and field.
        key: &'static str,
        /// Position in the list.
        index: usize,
        /// The entry found.
        found: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A pre-tokenizer name that is not in the table.
    #[error("tokenizer.ggml.pre: `{0}` is not a known pre-tokenizer")]
    UnknownPreTokenizer(String),
    /// No pre-tokenizer name, and a vocabulary that is not recognised.
    #[error(
        "tokenizer.ggml.pre is missing and the vocabulary is not Llama 3's: text cannot be split as the model was \
         trained; convert the model again, or add the key (`default` is the oldest files' rule)"
    )]
    MissingPreTokenizer,
    /// A tokenizer file that cannot be read.
    #[error("{file}: {problem}")]
    File {
        /// File name.
        file: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// A pre-tokenizer that has no name in GGUF.
    #[error(
        "tokenizer.json: GGUF has no name for the pre-tokenizer {0}: say which of tokenizer.ggml.pre's names splits \
         text alike (--pre)"
    )]
    UnnamedPreTokenizer(String),
    /// A tokenizer that a GGUF file cannot hold.
    #[error("GGUF cannot hold this tokenizer: {0}")]
    Unsaid(String),
    /// The tokenizer library refused a text; a checked vocabulary does not lead here.
    #[error("the text cannot be encoded: {0}")]
    Encode(String),
    /// The file has no chat template.
    #[error("the model has no chat template: give one with --template, or use --raw for plain text")]
    NoTemplate,
    /// A list of named templates without the one called `default`.
    #[error("{file}: no chat template is called `default` (found: {found})")]
    NoDefaultTemplate {
        /// File name.
        file: &'static str,
        /// The names found.
        found: String,
    },
    /// A chat template that cannot be compiled.
    #[error("chat template, line {line}: {problem}")]
    TemplateSyntax {
        /// Line in the template, from 1.
        line: usize,
        /// What is wrong.
        problem: String,
    },
    /// The template called `raise_exception`: its own text.
    #[error("{0}")]
    TemplateRaised(String),
    /// The template failed while rendering.
    #[error("chat template, line {line}: {problem}")]
    TemplateFailed {
        /// Line in the template, from 1.
        line: usize,
        /// What went wrong.
        problem: String,
    },
    /// The template went over one of the bounds of [`crate::ChatTemplate`].
    #[error("chat template: stopped, {0}")]
    TemplateLimit(String),
}

/// One line of text: line breaks and runs of spaces become one space.
pub(crate) fn one_line(text: impl std::fmt::Display) -> String {
    text.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}
