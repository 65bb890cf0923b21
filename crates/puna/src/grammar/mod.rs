//! Answers that follow a grammar: JSON of a schema, Lark, a regular expression, or calls of tools.
//!
//! The parser is `llguidance`'s. Here is what makes it strict: schemas with keywords that it would pass over are refused
//! (`schema.rs`), sizes and work are bounded, and a mask that cannot be made ends the answer. The mask of the next token
//! depends on tokens that are known, so a thread of its own makes it while the model computes.

mod recent;
mod schema;
mod state;
mod tools;

pub(crate) use state::State;
pub use tools::{ToolChoice, ToolGrammar};

use crate::error::Error;
use llguidance::api::TopLevelGrammar;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, INVALID_TOKEN, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use puna_text::{ReplyFormat, Tokenizer};
use serde_json::{Value, json};
use std::sync::Arc;

/// Longest grammar, and most regular expressions, in bytes: work on them can grow as the square.
const MAX_TEXT: usize = 16 << 10;
/// Longest token that a grammar allows, in bytes: what the parser's table of tokens can hold.
const MAX_TOKEN: usize = 1000;
/// Stack of the thread that compiles: the depth of a hostile grammar ends within it.
const STACK: usize = 256 << 20;
/// White space between the parts of JSON. Without a bound a model can write nothing else for ever.
const JSON_SPACE: &str = r"[\x20\x0A\x0D\x09]{1,64}";

/// Compiles grammars for the answers of one model, and keeps those that were used lately.
pub struct Grammars {
    factory: ParserFactory,
    tokenizer: Arc<Tokenizer>,
    worker: state::Worker,
    recent: recent::Recent,
}

/// A grammar that answers can follow. Cheap to clone.
#[derive(Clone)]
pub struct Grammar {
    /// At its beginning. Every answer goes on from a copy that shares nothing with others.
    matcher: Arc<Matcher>,
    grammars: Arc<Grammars>,
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammar").finish_non_exhaustive()
    }
}

impl Grammars {
    /// For the tokens of this tokenizer. Takes some tenths of a second for a large vocabulary.
    ///
    /// # Errors
    /// [`Error::Grammar`] if the vocabulary has more tokens than the parser can tell apart.
    pub fn new(tokenizer: &Arc<Tokenizer>) -> Result<Arc<Grammars>, Error> {
        let failed = |problem: String| Error::Grammar { kind: "vocabulary", problem };
        let vocab = u32::try_from(tokenizer.vocab_size()).ok().filter(|&n| n < 1 << 22);
        let vocab_size = vocab.ok_or_else(|| failed("it has more than 4 million tokens".into()))?;
        let words: Vec<Vec<u8>> = (0..vocab_size).map(|id| word(tokenizer, id)).collect();
        let eog: Vec<u32> = tokenizer.eog_ids().iter().copied().collect();
        let info = TokRxInfo::new(vocab_size, eog.first().copied().unwrap_or(INVALID_TOKEN));
        let trie = TokTrie::from(&info, &words);
        let trie = if eog.is_empty() { trie } else { trie.with_eos_tokens(&eog) };
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = SlicedBiasComputer::json_slices();
        let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
            .map_err(|e| failed(first_line(&e.to_string())))?;
        factory.quiet();
        let limits = factory.limits_mut();
        // Per mask: about 15 ms of work at most.
        limits.step_lexer_fuel = 200_000;
        limits.step_max_items = 50_000;
        // Per grammar: about 20 ms for its expressions, some megabytes for its rules, 40 MB for its states.
        limits.initial_lexer_fuel = 1_000_000;
        limits.max_grammar_size = 200_000;
        limits.max_lexer_states = 20_000;
        limits.verbose_errors = false;
        let (worker, recent) = (state::Worker::default(), recent::Recent::default());
        Ok(Arc::new(Grammars { factory, tokenizer: tokenizer.clone(), worker, recent }))
    }

    /// Any JSON object.
    ///
    /// # Errors
    /// [`Error::Grammar`].
    pub fn json_object(self: &Arc<Grammars>) -> Result<Grammar, Error> {
        self.json_schema(&json!({ "type": "object" }))
    }

    /// JSON that is valid under a JSON Schema (draft 2020-12, or what its `$schema` says). Properties come in the
    /// schema's order.
    ///
    /// # Errors
    /// [`Error::Schema`] names the keyword that cannot be enforced and where it is; [`Error::Grammar`].
    pub fn json_schema(self: &Arc<Grammars>, schema: &Value) -> Result<Grammar, Error> {
        let schema = schema::prepare(schema)?;
        let compile = |schema: &Value| self.compile("json_schema", TopLevelGrammar::from_json_schema(spaced(schema)));
        compile(&schema).map_err(|error| {
            let fails = |schema: &Value| match compile(schema) {
                Err(Error::Grammar { problem, .. }) => Some(problem),
                _ => None,
            };
            match error {
                Error::Grammar { problem, .. } => schema::locate(&schema, &problem, &fails),
                other => other,
            }
        })
    }

    /// As [`Grammars::json_schema`], for answers of a model that may reason first, or is reasoning when the answer begins.
    ///
    /// # Errors
    /// As [`Grammars::json_schema`].
    pub fn json_reply(
        self: &Arc<Grammars>,
        schema: &Value,
        format: &ReplyFormat,
        in_reasoning: bool,
    ) -> Result<Grammar, Error> {
        let grammar = self.json_schema(schema)?;
        if format.think.is_none() {
            return Ok(grammar);
        }
        let source = tools::json_lark(&schema::prepare(schema)?, format, in_reasoning, &self.tokenizer);
        self.compile("json_schema", TopLevelGrammar::from_lark(source))
    }

    /// A grammar in the parser's form of Lark.
    ///
    /// # Errors
    /// [`Error::Grammar`] with the place of the mistake.
    pub fn lark(self: &Arc<Grammars>, source: &str) -> Result<Grammar, Error> {
        check_len("lark", source)?;
        self.compile("lark", TopLevelGrammar::from_lark(source.to_owned()))
    }

    /// Texts that match a regular expression as a whole.
    ///
    /// # Errors
    /// [`Error::Grammar`].
    pub fn regex(self: &Arc<Grammars>, pattern: &str) -> Result<Grammar, Error> {
        check_len("regex", pattern)?;
        self.compile("regex", TopLevelGrammar::from_regex(pattern))
    }

    /// Calls of tools, and text where the choice allows it.
    ///
    /// # Errors
    /// [`Error::Schema`] names what cannot be enforced of a tool's parameters, and where it is within the list of tools;
    /// [`Error::Grammar`] if there is no such tool, or the format has no calls.
    pub fn tools(self: &Arc<Grammars>, tools: &ToolGrammar) -> Result<Grammar, Error> {
        let source = tools.lark(&self.tokenizer)?;
        let error = match self.compile("tools", TopLevelGrammar::from_lark(source)) {
            Ok(grammar) => return Ok(grammar),
            Err(error) => error,
        };
        // One of the schemas, most likely: then its own error is the better one.
        for (at, schema) in tools.schemas() {
            if let Err(Error::Schema { keyword, at: below, problem }) = self.json_schema(schema) {
                return Err(Error::Schema { keyword, at: format!("{at}{below}"), problem });
            }
        }
        Err(error)
    }

    fn compile(self: &Arc<Grammars>, kind: &'static str, grammar: TopLevelGrammar) -> Result<Grammar, Error> {
        let key = recent::Recent::key(&grammar);
        let matcher = match key.as_ref().and_then(|key| self.recent.get(key)) {
            Some(matcher) => matcher,
            None => {
                let matcher = Arc::new(self.compile_anew(kind, grammar)?);
                key.into_iter().for_each(|key| self.recent.put(key, matcher.clone()));
                matcher
            }
        };
        Ok(Grammar { matcher, grammars: self.clone() })
    }

    fn compile_anew(&self, kind: &'static str, grammar: TopLevelGrammar) -> Result<Matcher, Error> {
        let failed = |problem: String| Error::Grammar { kind, problem: first_line(&problem) };
        let compile = || {
            let mut matcher = Matcher::new(self.factory.create_parser(grammar));
            match (matcher.get_error(), matcher.grammar_warnings().first()) {
                (None, None) => Ok(matcher),
                (Some(problem), _) => Err(problem),
                // A warning tells of something that would not be enforced.
                (None, Some(warning)) => Err(warning.clone()),
            }
        };
        let matcher = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("puna-grammar".into()).stack_size(STACK);
            let thread = thread.spawn_scoped(scope, compile).map_err(|e| e.to_string())?;
            thread.join().map_err(|_| "the parser gave up".to_owned())?
        });
        matcher.map_err(failed)
    }
}

impl Grammar {
    /// Whether it was made for the tokens of this tokenizer.
    pub(crate) fn is_for(&self, tokenizer: &Arc<Tokenizer>) -> bool {
        Arc::ptr_eq(&self.grammars.tokenizer, tokenizer)
    }
}

/// A token as the parser wants it: control tokens are marked by a byte that no text has.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let bytes = tokenizer.token_bytes(id);
    if bytes.len() > MAX_TOKEN || bytes.is_empty() || bytes.contains(&TokTrie::SPECIAL_TOKEN_MARKER) {
        Vec::new()
    } else if tokenizer.is_control(id) {
        [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat()
    } else {
        bytes.to_vec()
    }
}

/// A schema with the bound on white space.
fn spaced(schema: &Value) -> Value {
    match schema {
        Value::Object(object) => {
            let mut object = object.clone();
            object.insert("x-guidance".into(), json!({ "whitespace_pattern": JSON_SPACE }));
            Value::Object(object)
        }
        Value::Bool(true) => spaced(&json!({})),
        other => other.clone(),
    }
}

fn check_len(kind: &'static str, text: &str) -> Result<(), Error> {
    if text.len() > MAX_TEXT {
        let problem = format!("it has {} bytes, at most {MAX_TEXT} are allowed", text.len());
        return Err(Error::Grammar { kind, problem });
    }
    Ok(())
}

/// The first line that says something, without what follows a panic; and what is wrong with an expression, which follows
/// a drawing of it.
fn first_line(text: &str) -> String {
    const MAX_LEN: usize = 300;
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let line = lines.next().unwrap_or("unknown cause");
    let mut said = match line.char_indices().nth(MAX_LEN) {
        Some((end, _)) => format!("{}..", &line[..end]),
        None => line.to_owned(),
    };
    if line.ends_with("regex parse error:") {
        let reason = lines.filter_map(|line| line.strip_prefix("error: ")).next_back();
        reason.into_iter().for_each(|reason| said += &format!(" {reason}"));
    }
    said
}

#[cfg(test)]
mod tests;
