//! What tokenizer_config.json and its neighbours add to a tokenizer: special tokens by name, ids that end a
//! generation, and whether bos and eos are added.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::error::{Result, TextError, one_line};
use crate::hf::HfFiles;
use crate::tokenizer::Tokenizer;
use crate::tokenizer_json::AddedTokenJson;

const CONFIG: &str = "tokenizer_config.json";

/// The parts of the small JSON files that matter for tokens.
#[derive(Debug, Default)]
pub(crate) struct Config {
    bos: Option<String>,
    eos: Option<String>,
    unk: Option<String>,
    pad: Option<String>,
    /// All special tokens by their text, those above included.
    special: Vec<String>,
    /// Added tokens with ids, from `added_tokens_decoder` or added_tokens.json.
    added: Vec<AddedTokenJson>,
    add_bos: Option<bool>,
    add_eos: Option<bool>,
    /// SentencePiece: a space before text that follows a special token; transformers' default is true.
    pub(crate) legacy: Option<bool>,
    /// Key and id, in the order in which they count.
    bos_ids: Vec<(&'static str, u64)>,
    eos_ids: Vec<(&'static str, u64)>,
}

impl Config {
    pub(crate) fn read(files: &HfFiles) -> Result<Config> {
        let tokenizer = object(CONFIG, files.tokenizer_config)?;
        let map = object("special_tokens_map.json", files.special_tokens_map)?;
        let named = |name: &str| text(&tokenizer[name]).or_else(|| text(&map[name]));
        let more = [&tokenizer, &map].into_iter().filter_map(|c| c["additional_special_tokens"].as_array());
        let names = ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"];
        let special = names.iter().filter_map(|n| named(n)).chain(more.flatten().filter_map(text));
        let mut config = Config {
            bos: named("bos_token"),
            eos: named("eos_token"),
            unk: named("unk_token"),
            pad: named("pad_token"),
            special: special.collect(),
            added: added_tokens(&tokenizer, &object("added_tokens.json", files.added_tokens)?)?,
            add_bos: tokenizer["add_bos_token"].as_bool(),
            add_eos: tokenizer["add_eos_token"].as_bool(),
            legacy: tokenizer["legacy"].as_bool(),
            ..Config::default()
        };
        let generation = object("generation_config.json", files.generation_config)?;
        config.add_ids(&generation, "generation_config.json: bos_token_id", "generation_config.json: eos_token_id")?;
        let model = object("config.json", files.config)?;
        config.add_ids(&model, "config.json: bos_token_id", "config.json: eos_token_id")?;
        let (bos, eos) = ("config.json: text_config.bos_token_id", "config.json: text_config.eos_token_id");
        config.add_ids(&model["text_config"], bos, eos)?;
        Ok(config)
    }

    fn add_ids(&mut self, from: &Value, bos: &'static str, eos: &'static str) -> Result<()> {
        self.bos_ids.extend(ids(bos, &from["bos_token_id"])?);
        self.eos_ids.extend(ids(eos, &from["eos_token_id"])?);
        Ok(())
    }

    /// Tokens to match in text beyond those of the tokenizer file itself. `known` finds the id of a text in the
    /// vocabulary; a special token that it does not know is not added.
    pub(crate) fn added_tokens(&self, known: impl Fn(&str) -> Option<u32>) -> Vec<AddedTokenJson> {
        let mut tokens = self.added.clone();
        for token in &mut tokens {
            token.id = known(&token.content).unwrap_or(token.id);
            token.special |= self.special.contains(&token.content);
        }
        for content in &self.special {
            if let (None, Some(id)) = (tokens.iter().find(|t| &t.content == content), known(content)) {
                tokens.push(AddedTokenJson { id, special: true, ..AddedTokenJson::plain(content) });
            }
        }
        tokens
    }

    /// Whether the flags of this added token come from a config rather than from being named special.
    pub(crate) fn gives_flags(&self, content: &str) -> bool {
        self.added.iter().any(|t| t.content == content)
    }

    /// Gives the tokens with a role their role.
    pub(crate) fn apply_roles(&self, tokenizer: &mut Tokenizer) -> Result<()> {
        let id = |name: &Option<String>| name.as_ref().and_then(|text| tokenizer.token_to_id(text));
        let (bos, eos, unk, pad) = (id(&self.bos), id(&self.eos), id(&self.unk), id(&self.pad));
        let checked = |list: &[(&'static str, u64)]| {
            list.iter().map(|&(key, id)| check(key, id, tokenizer.vocab_size())).collect::<Result<Vec<u32>>>()
        };
        let (bos_ids, eos_ids) = (checked(&self.bos_ids)?, checked(&self.eos_ids)?);
        let roles = &mut tokenizer.roles;
        roles.bos = bos.or(roles.bos).or(bos_ids.first().copied());
        roles.eos = eos.or(roles.eos).or(eos_ids.first().copied());
        roles.unk = unk.or(roles.unk);
        roles.pad = pad.or(roles.pad);
        roles.eog.extend(roles.eos.into_iter().chain(eos_ids));
        set_presence(&mut roles.prefix, self.add_bos, roles.bos, true);
        set_presence(&mut roles.suffix, self.add_eos, roles.eos, false);
        Ok(())
    }
}

/// `add_bos_token` and `add_eos_token` overrule what the tokenizer file adds.
fn set_presence(affix: &mut Vec<u32>, wanted: Option<bool>, id: Option<u32>, front: bool) {
    let (Some(wanted), Some(id)) = (wanted, id) else { return };
    match (wanted, affix.contains(&id)) {
        (true, false) => affix.insert(if front { 0 } else { affix.len() }, id),
        (false, true) => affix.retain(|&other| other != id),
        _ => {}
    }
}

fn check(key: &str, id: u64, vocab: usize) -> Result<u32> {
    match u32::try_from(id) {
        Ok(small) if (small as usize) < vocab => Ok(small),
        _ => Err(TextError::TokenId { key: key.to_string(), id, vocab }),
    }
}

/// An absent file is an object without keys.
fn object(file: &'static str, bytes: Option<&[u8]>) -> Result<Value> {
    let Some(bytes) = bytes else { return Ok(Value::Object(Map::new())) };
    match serde_json::from_slice(bytes) {
        Ok(value @ Value::Object(_)) => Ok(value),
        Ok(_) => Err(TextError::File { file, problem: "expected a JSON object".into() }),
        Err(e) => Err(TextError::File { file, problem: one_line(e) }),
    }
}

/// A token's text: a string, or an object with `content`.
fn text(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_string)
}

/// One id or a list; null and absent are no id.
fn ids(key: &'static str, value: &Value) -> Result<Vec<(&'static str, u64)>> {
    let id = |value: &Value| match value.as_u64() {
        Some(id) => Ok((key, id)),
        None => Err(TextError::File { file: key, problem: format!("expected a token id, found {}", one_line(value)) }),
    };
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Array(list) => list.iter().map(id).collect(),
        value => Ok(vec![id(value)?]),
    }
}

fn added_tokens(config: &Value, old: &Value) -> Result<Vec<AddedTokenJson>> {
    let error = |file, problem: String| TextError::File { file, problem };
    let mut tokens = BTreeMap::new();
    for (content, id) in old.as_object().into_iter().flatten() {
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
        let id = id.ok_or_else(|| error("added_tokens.json", format!("expected an id for {content:?}")))?;
        tokens.insert(id, AddedTokenJson { id, ..AddedTokenJson::plain(content) });
    }
    for (id, token) in config["added_tokens_decoder"].as_object().into_iter().flatten() {
        let number =
            id.parse().map_err(|_| error(CONFIG, format!("added_tokens_decoder: {id:?} is not a token id")))?;
        let token: AddedTokenJson = serde_json::from_value(token.clone())
            .map_err(|e| error(CONFIG, format!("added_tokens_decoder[{id:?}]: {e}")))?;
        tokens.insert(number, AddedTokenJson { id: number, ..token });
    }
    Ok(tokens.into_values().collect())
}
