//! The tokenizer of a Hugging Face folder as GGUF metadata holds one.
//!
//! GGUF knows two kinds: byte-level BPE with the name of a pre-tokenizer, and SentencePiece with scores. Neither says
//! all that a tokenizer.json can say. What has been written is therefore read again, and must give the same ids on a
//! list of texts that tell tokenizers apart.

mod compare;

use ahash::AHashMap;
use serde_json::Value;
use tokenizers::Model;

use self::compare::Comparison;
use crate::config::Config;
use crate::error::{Result, TextError, one_line};
use crate::hf::{HfFiles, all_added, build};
use crate::pretokenize;
use crate::sentencepiece::ModelProto;
use crate::spm::SPACE;
use crate::tokenizer::{EOG_TEXTS, Encoder, Tokenizer};
use crate::tokenizer_json::{AddedTokenJson, Decoder, FILE, TokenizerJson};
use crate::vocab::{VocabSpec, byte_token};

const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// What to write, beside what the files say.
#[derive(Debug, Clone, Copy, Default)]
pub struct ExportOptions<'a> {
    /// `tokenizer.ggml.pre`, in place of the name that fits the file's pre-tokenizer.
    pub pre: Option<&'a str>,
    /// `general.name` of the file: that of a Phi-3 model changes what its tokens swallow.
    pub name: Option<&'a str>,
    /// Rows of the embedding: as many tokens as this are written, the last ones unused.
    pub rows: Option<usize>,
}

/// A vocabulary to be written: the fields of [`VocabSpec`], in memory of its own.
#[derive(Debug, Clone, Default, PartialEq)]
#[expect(missing_docs, reason = "the fields are those of VocabSpec")]
pub struct Vocab {
    pub model: &'static str,
    pub pre: String,
    pub name: Option<String>,
    pub tokens: Vec<Vec<u8>>,
    pub token_type: Vec<i32>,
    pub scores: Option<Vec<f32>>,
    pub merges: Vec<String>,
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub eot: Option<u32>,
    pub eom: Option<u32>,
    pub unk: Option<u32>,
    pub pad: Option<u32>,
    pub add_bos: bool,
    pub add_eos: bool,
    pub add_space_prefix: Option<bool>,
    pub remove_extra_whitespaces: Option<bool>,
}

impl Vocab {
    /// The vocabulary of a folder's tokenizer, and what a reader of GGUF will do otherwise, a sentence each.
    ///
    /// # Errors
    /// Those of [`Tokenizer::from_hf`]; [`TextError::UnnamedPreTokenizer`]; [`TextError::Unsaid`] where the ids of an
    /// ordinary text would differ. With a name given in [`ExportOptions::pre`], that is only told.
    pub fn from_hf(files: &HfFiles, options: &ExportOptions) -> Result<(Vocab, Vec<String>)> {
        let tokenizer = build(files)?;
        let config = Config::read(files)?;
        let mut notices = Vec::new();
        let mut vocab = match (files.tokenizer_json, files.tokenizer_model) {
            (Some(json), model) => from_json(json, model, &config, options, &tokenizer)?,
            (None, Some(model)) => from_sentencepiece(model, &config)?,
            (None, None) => Vocab::default(),
        };
        vocab.name = options.name.map(str::to_string);
        vocab.fill(options.rows.unwrap_or(0));
        vocab.set_roles(&tokenizer, &mut notices);
        let is_named = options.pre.is_some() && vocab.model == "gpt2";
        if options.pre.is_some() && !is_named {
            notices.push("the name of a pre-tokenizer is left out: one with scores has none".into());
        }
        let comparison = Comparison { vocab: &vocab, meant: &tokenizer, read: Tokenizer::from_vocab(&vocab.spec())? };
        comparison.texts(is_named, &mut notices)?;
        comparison.tokens(&mut notices)?;
        Ok((vocab, notices))
    }

    /// The same, borrowed.
    pub fn spec(&self) -> VocabSpec<'_> {
        VocabSpec {
            model: self.model,
            pre: Some(&self.pre),
            name: self.name.as_deref(),
            tokens: self.tokens.iter().map(Vec::as_slice).collect(),
            token_type: Some(self.token_type.clone()),
            scores: self.scores.clone(),
            merges: self.merges.iter().map(String::as_bytes).collect(),
            bos: self.bos,
            eos: self.eos,
            eot: self.eot,
            eom: self.eom,
            unk: self.unk,
            pad: self.pad,
            add_bos: Some(self.add_bos),
            add_eos: Some(self.add_eos),
            add_space_prefix: self.add_space_prefix,
            remove_extra_whitespaces: self.remove_extra_whitespaces,
            ..VocabSpec::default()
        }
    }

    fn set(&mut self, id: u32, text: &[u8], kind: i32) {
        self.fill(id as usize + 1);
        (self.tokens[id as usize], self.token_type[id as usize]) = (text.to_vec(), kind);
    }

    /// Makes it as long as this; ids that no token has get the texts that llama.cpp's converter gives them.
    fn fill(&mut self, len: usize) {
        for id in self.tokens.len()..len {
            self.tokens.push(format!("[PAD{id}]").into_bytes());
            self.token_type.push(UNUSED);
        }
        if let Some(scores) = &mut self.scores {
            // Below the score of any token.
            scores.resize(self.tokens.len().max(scores.len()), -1e6);
        }
    }

    fn set_roles(&mut self, tokenizer: &Tokenizer, notices: &mut Vec<String>) {
        let roles = &tokenizer.roles;
        (self.bos, self.eos, self.unk, self.pad) = (roles.bos, roles.eos, roles.unk, roles.pad);
        self.add_bos = !roles.prefix.is_empty();
        self.add_eos = !roles.suffix.is_empty();
        // What is added at the end is by definition of the format the eos.
        if let [only] = roles.suffix[..] {
            self.eos = Some(only);
        }
        let is_known = |&id: &u32| {
            let control = self.token_type.get(id as usize) == Some(&CONTROL);
            let text = self.tokens.get(id as usize).and_then(|text| std::str::from_utf8(text).ok());
            Some(id) == self.eos || control && text.is_some_and(|text| EOG_TEXTS.contains(&text))
        };
        let mut more = roles.eog.iter().copied().filter(|id| !is_known(id));
        (self.eot, self.eom) = (more.next(), more.next());
        let rest: Vec<u32> = more.collect();
        if !rest.is_empty() {
            notices.push(format!("the tokens {rest:?} end an answer too, for which GGUF has no more keys"));
        }
    }
}

fn from_sentencepiece(file: &[u8], config: &Config) -> Result<Vocab> {
    let model = ModelProto::read(file)?;
    let spec = model.spec();
    let mut vocab = Vocab {
        model: "llama",
        pre: "default".into(),
        tokens: spec.tokens.iter().map(|text| text.to_vec()).collect(),
        token_type: spec.token_type.clone().unwrap_or_default(),
        scores: spec.scores.clone(),
        add_space_prefix: spec.add_space_prefix,
        remove_extra_whitespaces: spec.remove_extra_whitespaces.filter(|&on| on),
        ..Vocab::default()
    };
    let ids: AHashMap<&[u8], u32> = (0..).zip(&spec.tokens).map(|(id, &text)| (text, id)).collect();
    for token in config.added_tokens(|text| ids.get(text.as_bytes()).copied()) {
        vocab.set_added(&token);
    }
    Ok(vocab)
}

impl Vocab {
    fn set_added(&mut self, token: &AddedTokenJson) {
        let kind = match self.token_type.get(token.id as usize) {
            Some(&UNKNOWN) => UNKNOWN,
            _ if token.special => CONTROL,
            _ => USER_DEFINED,
        };
        self.set(token.id, token.content.as_bytes(), kind);
    }
}

fn from_json(
    file: &[u8],
    model: Option<&[u8]>,
    config: &Config,
    options: &ExportOptions,
    tokenizer: &Tokenizer,
) -> Result<Vocab> {
    let fault = |e: serde_json::Error| TextError::File { file: FILE, problem: one_line(e) };
    let mut json: TokenizerJson = serde_json::from_slice(file).map_err(fault)?;
    let added = all_added(&json, config);
    let decoder = Decoder::read(&json.decoder, &json.pre_tokenizer)?;
    let merges = json.model.take_merges()?;
    let mut vocab = Vocab::default();
    for (text, &id) in &json.model.vocab.0 {
        vocab.set(id, text.as_bytes(), NORMAL);
    }
    if !decoder.byte_level {
        vocab.set_kinds(json.model.unk_token.as_deref());
    }
    added.iter().for_each(|token| vocab.set_added(token));
    if decoder.byte_level {
        vocab.model = "gpt2";
        vocab.pre = match options.pre {
            Some(name) => name.to_string(),
            None => {
                let ignored = json.model.ignore_merges.unwrap_or(false);
                let ignored = (!merges_make_all(tokenizer, &vocab)).then_some(ignored);
                pretokenize::name_of(&json.pre_tokenizer, ignored)?.to_string()
            }
        };
        vocab.merges = merges.into_iter().map(joined).collect::<Result<_>>()?;
    } else if decoder.spaces && json.model.byte_fallback.unwrap_or(false) {
        vocab.model = "llama";
        // What llama.cpp's converter writes where it means nothing.
        vocab.pre = "default".into();
        vocab.add_space_prefix = Some(begins_with_space(&json));
        vocab.scores = Some(match model.and_then(|model| same_pieces(model, &vocab)) {
            Some(scores) => scores,
            None => scores(&json, &merges, &added)?,
        });
    } else {
        let what = "it is neither byte-level BPE nor BPE with spaces as U+2581 and a fallback to bytes";
        return Err(TextError::Unsaid(what.into()));
    }
    vocab.fill(0);
    Ok(vocab)
}

impl Vocab {
    /// Tells bytes and the unknown token from the others.
    fn set_kinds(&mut self, unknown: Option<&str>) {
        for (text, kind) in self.tokens.iter().zip(&mut self.token_type) {
            *kind = match *kind {
                NORMAL if byte_token(text).is_some() => BYTE,
                NORMAL if unknown.is_some_and(|unknown| unknown.as_bytes() == text) => UNKNOWN,
                kind => kind,
            };
        }
    }
}

/// Whether merging gives every token from its own text, so that taking whole tokens first changes nothing.
fn merges_make_all(tokenizer: &Tokenizer, vocab: &Vocab) -> bool {
    let Encoder::Bpe(bpe) = &tokenizer.encoder else { return false };
    // A model that takes whole tokens first does not show what merging gives.
    !bpe.model.ignore_merges
        && vocab.tokens.iter().zip(&vocab.token_type).zip(0..).all(|((text, &kind), id)| {
            let text = std::str::from_utf8(text).unwrap_or_default();
            let made = || bpe.model.tokenize(text).ok().is_some_and(|made| made.len() == 1 && made[0].id == id);
            kind != NORMAL || made()
        })
}

/// A merge as GGUF has it, with a space between its sides.
fn joined((left, right): (String, String)) -> Result<String> {
    if left.contains(' ') || right.contains(' ') {
        return Err(TextError::Unsaid(format!("a merge has a space in it: {left:?} and {right:?}")));
    }
    Ok(format!("{left} {right}"))
}

/// Whether a space is put before a text.
fn begins_with_space(json: &TokenizerJson) -> bool {
    fn any(component: &Value, is_it: &dyn Fn(&Value) -> bool) -> bool {
        let inner = ["normalizers", "pretokenizers"].iter().filter_map(|key| component[*key].as_array()).flatten();
        is_it(component) || inner.into_iter().any(|component| any(component, is_it))
    }
    let space = SPACE.to_string();
    let prepends = |c: &Value| c["type"] == "Prepend" && c["prepend"] == *space;
    let metaspace = |c: &Value| {
        c["type"] == "Metaspace" && c["prepend_scheme"] != "never" && c["add_prefix_space"].as_bool().unwrap_or(true)
    };
    any(&json.normalizer, &prepends) || any(&json.pre_tokenizer, &metaspace)
}

/// The scores of tokenizer.model, if it is of the same vocabulary.
fn same_pieces(file: &[u8], vocab: &Vocab) -> Option<Vec<f32>> {
    let model = ModelProto::read(file).ok()?;
    let spec = model.spec();
    let is_same = |(id, text): (usize, &&[u8])| vocab.tokens.get(id).is_some_and(|token| token == text);
    let mut scores = spec.scores.clone()?;
    if !spec.tokens.iter().enumerate().all(is_same) {
        return None;
    }
    // What the folder added to the model's own vocabulary is not made by merging.
    scores.resize(vocab.tokens.len().max(scores.len()), -1e6);
    Some(scores)
}

/// Scores that merge as the list of merges does: the earlier, the better. SentencePiece merges whatever two pieces
/// make a third; so that both are the same, every such pair must be in the list.
fn scores(json: &TokenizerJson, merges: &[(String, String)], added: &[AddedTokenJson]) -> Result<Vec<f32>> {
    let ids = &json.model.vocab.0;
    let mut ranks: AHashMap<u32, usize> = AHashMap::new();
    let mut pairs = AHashMap::with_capacity(merges.len());
    for (rank, (left, right)) in merges.iter().enumerate() {
        if let Some(&id) = ids.get(&format!("{left}{right}")) {
            ranks.entry(id).or_insert(rank);
        }
        pairs.insert((left.as_str(), right.as_str()), rank);
    }
    let is_added = |text: &str| added.iter().any(|token| token.content == text);
    let last = ids.values().max().map_or(0, |&id| id as usize + 1);
    let mut scores = vec![0.0; last];
    for (text, &id) in ids {
        let parts = text.char_indices().skip(1).map(|(at, _)| text.split_at(at));
        let unlisted = parts
            .filter(|(left, right)| ids.contains_key(*left) && ids.contains_key(*right))
            .find(|pair| !pairs.contains_key(pair));
        if let Some((left, right)) = unlisted.filter(|_| byte_token(text.as_bytes()).is_none() && !is_added(text)) {
            return Err(TextError::Unsaid(format!(
                "it never merges {left:?} and {right:?}, and a vocabulary with scores would, because {text:?} is a token"
            )));
        }
        scores[id as usize] = -(ranks.get(&id).map_or(merges.len(), |&rank| rank) as f32) - 1.0;
    }
    Ok(scores)
}
