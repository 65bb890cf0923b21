//! Log-probabilities, in the two forms that the interface has.

use puna::Logprobs;
use puna_text::Tokenizer;
use serde_json::{Map, Value, json};

/// A token as text, for people. Ids without a token have none.
fn text(tokenizer: Option<&Tokenizer>, id: u32) -> String {
    tokenizer.map_or_else(String::new, |t| String::from_utf8_lossy(t.token_bytes(id)).into_owned())
}

/// A token as text that no other token has, as far as the interface's form allows: bytes that are no characters are
/// spelled.
pub(crate) fn exact_text(tokenizer: Option<&Tokenizer>, id: u32) -> String {
    let Some(tokenizer) = tokenizer else { return format!("token_id:{id}") };
    let bytes = tokenizer.token_bytes(id);
    let spelled = || format!("bytes:{}", bytes.iter().map(|b| format!("\\x{b:02x}")).collect::<String>());
    std::str::from_utf8(bytes).map_or_else(|_| spelled(), str::to_owned)
}

/// An entry of a chat's `logprobs.content`.
pub(crate) fn chat_entry(tokenizer: Option<&Tokenizer>, id: u32, logprobs: &Logprobs) -> Value {
    let entry = |id: u32, logprob: f64| {
        let bytes = tokenizer.map_or(&[][..], |t| t.token_bytes(id));
        json!({ "token": text(tokenizer, id), "logprob": logprob, "bytes": bytes })
    };
    let mut value = entry(id, logprobs.logprob);
    value["top_logprobs"] = logprobs.top.iter().map(|top| entry(top.id, top.logprob)).collect();
    value
}

/// A completion's `logprobs`: lists with an entry a token.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lists {
    tokens: Vec<Value>,
    token_logprobs: Vec<Value>,
    top_logprobs: Vec<Value>,
    text_offset: Vec<Value>,
}

impl Lists {
    /// Adds a token whose text begins at `offset`, in characters.
    pub fn push(&mut self, tokenizer: Option<&Tokenizer>, id: u32, logprobs: Option<&Logprobs>, offset: usize) {
        self.tokens.push(exact_text(tokenizer, id).into());
        self.text_offset.push(offset.into());
        self.token_logprobs.push(logprobs.map_or(Value::Null, |l| l.logprob.into()));
        self.top_logprobs.push(logprobs.map_or(Value::Null, |l| {
            let mut map = Map::new();
            // The chosen token is among them, as in OpenAI's answers. The likelier one of two that look alike stays.
            for (id, logprob) in l.top.iter().map(|top| (top.id, top.logprob)).chain([(id, l.logprob)]) {
                map.entry(exact_text(tokenizer, id)).or_insert(logprob.into());
            }
            Value::Object(map)
        }));
    }

    /// What was pushed since the last call.
    pub fn take(&mut self) -> Value {
        let Lists { tokens, token_logprobs, top_logprobs, text_offset } = std::mem::take(self);
        json!({
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": text_offset,
        })
    }
}

/// `prompt_logprobs`: for each token of the prompt an object by token id, null for the first.
pub(crate) fn prompt(tokenizer: Option<&Tokenizer>, ids: &[u32], logprobs: &[Option<Logprobs>]) -> Value {
    let entry = |(&id, logprobs): (&u32, &Option<Logprobs>)| {
        let Some(logprobs) = logprobs else { return Value::Null };
        let mut map = Map::new();
        let own = (id, logprobs.logprob, Value::Null);
        let top = logprobs.top.iter().zip(1..).map(|(top, rank)| (top.id, top.logprob, Value::from(rank)));
        for (id, logprob, rank) in top.chain([own]) {
            let entry = || json!({ "logprob": logprob, "rank": rank, "decoded_token": text(tokenizer, id) });
            map.entry(id.to_string()).or_insert_with(entry);
        }
        Value::Object(map)
    };
    ids.iter().zip(logprobs).map(entry).collect()
}
