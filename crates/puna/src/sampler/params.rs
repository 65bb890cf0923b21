//! What a caller can ask of the sampler, and where the values nobody asked for come from.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::SampleError;

/// One stage of the chain, named as in llama.cpp's `--samplers` and in the metadata key `general.sampling.sequence`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SamplerKind {
    /// Repetition, frequency and presence penalties.
    Penalties,
    /// The `top_k` most likely tokens.
    TopK,
    /// Locally typical tokens: those whose surprisal is nearest to the entropy.
    #[serde(rename = "typ_p")]
    TypicalP,
    /// The smallest set of most likely tokens that holds the probability `top_p`.
    TopP,
    /// Tokens at least `min_p` times as likely as the likeliest.
    MinP,
    /// Division of the logits by the temperature.
    Temperature,
}

impl SamplerKind {
    /// The order of the chain in llama.cpp. Its stages `dry`, `top_n_sigma` and `xtc` are off there unless asked for
    /// and do not exist here.
    pub const DEFAULT_ORDER: [SamplerKind; 6] =
        [Self::Penalties, Self::TopK, Self::TypicalP, Self::TopP, Self::MinP, Self::Temperature];

    /// The stage of this name; the spellings are those llama.cpp takes.
    pub fn from_name(name: &str) -> Option<SamplerKind> {
        Some(match name {
            "penalties" => Self::Penalties,
            "top_k" | "top-k" => Self::TopK,
            "typ_p" | "typ-p" | "typ" | "typical" | "typical_p" | "typical-p" => Self::TypicalP,
            "top_p" | "top-p" | "nucleus" => Self::TopP,
            "min_p" | "min-p" => Self::MinP,
            "temperature" | "temp" => Self::Temperature,
            _ => return None,
        })
    }
}

/// A number added to the logit of a token, by id; `f32::NEG_INFINITY` bans the token. In JSON a ban is `false`, as in
/// llama.cpp's server, because JSON has no infinity.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LogitBias(pub BTreeMap<u32, f32>);

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum JsonBias {
    Allowed(bool),
    Bias(f32),
}

impl Serialize for LogitBias {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(id, &bias)| match bias {
            f32::NEG_INFINITY => (id, JsonBias::Allowed(false)),
            bias => (id, JsonBias::Bias(bias)),
        }))
    }
}

impl<'de> Deserialize<'de> for LogitBias {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let biases = BTreeMap::<u32, JsonBias>::deserialize(deserializer)?;
        let value = |bias| match bias {
            JsonBias::Allowed(false) => f32::NEG_INFINITY,
            JsonBias::Allowed(true) => 0.0,
            JsonBias::Bias(bias) => bias,
        };
        Ok(LogitBias(biases.into_iter().map(|(id, bias)| (id, value(bias))).collect()))
    }
}

/// How the next token is chosen. Names, defaults and meanings are llama.cpp's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SamplingParams {
    /// The stages, in the order in which they run; at most 32.
    pub samplers: Vec<SamplerKind>,
    /// Logits are divided by it. 0 = greedy: the highest logit of what the other stages left, the lowest id on a tie.
    pub temperature: f32,
    /// Keep this many of the most likely tokens; 0 or less, or more than the vocabulary = off.
    pub top_k: i32,
    /// 0 to 1; 1 = off.
    pub top_p: f32,
    /// 0 to 1; 0 = off.
    pub min_p: f32,
    /// 0 to 1; 1 = off.
    pub typical_p: f32,
    /// `top_p`, `min_p` and `typical_p` leave at least this many tokens.
    pub min_keep: usize,
    /// Positive logits of recent tokens are divided by it, others multiplied. Above 0; 1 = off.
    pub repeat_penalty: f32,
    /// How many of the last tokens, those of the prompt included, the three penalties look at; 0 = off, -1 = all of
    /// the sequence.
    pub repeat_last_n: i32,
    /// Subtracted once from the logit of every recent token.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a recent token as often as it occurs.
    pub frequency_penalty: f32,
    /// Added to the logits before anything else.
    pub logit_bias: LogitBias,
    /// Ban the tokens that end a generation.
    pub ignore_eos: bool,
    /// Ban them until this many tokens have been generated.
    pub min_tokens: u32,
    /// The same seed and the same logits give the same tokens on every machine; `None` takes a random one.
    pub seed: Option<u64>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            samplers: SamplerKind::DEFAULT_ORDER.to_vec(),
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            typical_p: 1.0,
            min_keep: 0,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: LogitBias::default(),
            ignore_eos: false,
            min_tokens: 0,
            seed: None,
        }
    }
}

/// The numbers a parameter may take; NaN and infinities are in no range.
struct Range {
    low: f32,
    high: f32,
    text: &'static str,
}

const TEMPERATURE: Range = Range { low: 0.0, high: f32::MAX, text: "a number of 0 (greedy) or more" };
const FRACTION: Range = Range { low: 0.0, high: 1.0, text: "a number from 0 to 1" };
const REPEAT_PENALTY: Range = Range { low: f32::MIN_POSITIVE, high: f32::MAX, text: "a number above 0 (1 = off)" };
const FINITE: Range = Range { low: f32::MIN, high: f32::MAX, text: "a finite number" };
const REPEAT_LAST_N: &str = "a count of tokens, 0 (off) or -1 (the whole sequence)";
const MAX_SAMPLERS: usize = 32;

impl Range {
    fn check(&self, field: &str, value: f32) -> Result<f32, SampleError> {
        if (self.low..=self.high).contains(&value) {
            return Ok(value);
        }
        Err(SampleError::param(field, self.text, value))
    }
}

impl SamplingParams {
    /// Refuses values outside their range, NaN and infinities (but for a bias of -inf), naming the field.
    pub fn validate(&self) -> Result<(), SampleError> {
        TEMPERATURE.check("temperature", self.temperature)?;
        FRACTION.check("top_p", self.top_p)?;
        FRACTION.check("min_p", self.min_p)?;
        FRACTION.check("typical_p", self.typical_p)?;
        REPEAT_PENALTY.check("repeat_penalty", self.repeat_penalty)?;
        FINITE.check("presence_penalty", self.presence_penalty)?;
        FINITE.check("frequency_penalty", self.frequency_penalty)?;
        if self.repeat_last_n < -1 {
            return Err(SampleError::param("repeat_last_n", REPEAT_LAST_N, self.repeat_last_n));
        }
        if self.samplers.len() > MAX_SAMPLERS {
            let expected = format!("a list of at most {MAX_SAMPLERS} stages");
            return Err(SampleError::param("samplers", expected, self.samplers.len()));
        }
        for (id, &bias) in &self.logit_bias.0 {
            if bias.is_nan() || bias == f32::INFINITY {
                return Err(SampleError::param(format!("logit_bias[{id}]"), "a finite number or -inf", bias));
            }
        }
        Ok(())
    }
}

/// Some of the parameters: what a user or a model file states, silent about the rest. In JSON an absent key and `null`
/// are the same.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[expect(missing_docs, reason = "the fields are those of SamplingParams")]
pub struct PartialSampling {
    pub samplers: Option<Vec<SamplerKind>>,
    pub temperature: Option<f32>,
    pub top_k: Option<i32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub typical_p: Option<f32>,
    pub min_keep: Option<usize>,
    pub repeat_penalty: Option<f32>,
    pub repeat_last_n: Option<i32>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub logit_bias: Option<LogitBias>,
    pub ignore_eos: Option<bool>,
    pub min_tokens: Option<u32>,
    pub seed: Option<u64>,
}

impl PartialSampling {
    /// What `user` states, else what the model's `file` states, else the default. The result is not yet validated.
    pub fn resolve(user: &PartialSampling, file: &PartialSampling) -> SamplingParams {
        let mut params = SamplingParams::default();
        file.apply(&mut params);
        user.apply(&mut params);
        params
    }

    /// Overwrites in `params` what is stated here.
    pub fn apply(&self, params: &mut SamplingParams) {
        macro_rules! set {
            ($($field:ident)*) => {
                $(if let Some(value) = &self.$field {
                    params.$field.clone_from(value);
                })*
            };
        }
        set!(samplers temperature top_k top_p min_p typical_p min_keep repeat_penalty repeat_last_n);
        set!(presence_penalty frequency_penalty logit_bias ignore_eos min_tokens);
        params.seed = self.seed.or(params.seed);
    }

    /// The recommendations in a GGUF file's metadata, and a sentence for each that cannot be followed because its
    /// stage does not exist here (xtc, mirostat). `lookup` gives the value of a metadata key.
    ///
    /// Keys (llama.cpp): `general.sampling.` + `sequence` (names separated by `;`), `temp`, `top_k`, `top_p`, `min_p`,
    /// `penalty_last_n`, `penalty_repeat`. A value of the wrong type or out of range is an error naming the key.
    pub fn from_gguf<'a>(
        lookup: impl Fn(&str) -> Option<MetaValue<'a>>,
    ) -> Result<(PartialSampling, Vec<String>), SampleError> {
        let prefix = "general.sampling.";
        let source = Source { prefix, lookup: |key: &str| lookup(&format!("{prefix}{key}")) };
        let mut notices = Vec::new();
        let mut sampling = PartialSampling {
            temperature: source.number("temp", &TEMPERATURE)?,
            top_k: source.integer("top_k")?,
            top_p: source.number("top_p", &FRACTION)?,
            min_p: source.number("min_p", &FRACTION)?,
            repeat_penalty: source.number("penalty_repeat", &REPEAT_PENALTY)?,
            repeat_last_n: source.integer("penalty_last_n")?,
            ..PartialSampling::default()
        };
        if let Some(n) = sampling.repeat_last_n.filter(|&n| n < -1) {
            return Err(SampleError::param(source.field("penalty_last_n"), REPEAT_LAST_N, n));
        }
        if let Some(names) = source.text("sequence")? {
            sampling.samplers = parse_sequence(&source.field("sequence"), names, &mut notices)?;
        }
        for key in ["xtc_probability", "mirostat"] {
            if let Some(value) = source.number(key, &FINITE)?.filter(|&value| value != 0.0) {
                notices.push(format!("{} = {value} is ignored: there is no such sampling stage", source.field(key)));
            }
        }
        Ok((sampling, notices))
    }

    /// The recommendations in a Hugging Face folder's `generation_config.json`: `temperature`, `top_k`,
    /// `top_p`, `min_p`, `typical_p`, `repetition_penalty`, and `do_sample`, whose `false` means greedy as in
    /// transformers. (Absent means false there too, but many files that state a temperature leave it out.) `null` is
    /// absent. A value of the wrong type or out of range is an error naming the key.
    pub fn from_generation_config(config: &serde_json::Value) -> Result<PartialSampling, SampleError> {
        if !config.is_object() {
            return Err(SampleError::param("generation_config.json", "an object", "something else"));
        }
        let lookup = |key: &str| MetaValue::from_json(config.get(key)?);
        let source = Source { prefix: "generation_config.json: ", lookup };
        let mut sampling = PartialSampling {
            temperature: source.number("temperature", &TEMPERATURE)?,
            top_k: source.integer("top_k")?,
            top_p: source.number("top_p", &FRACTION)?,
            min_p: source.number("min_p", &FRACTION)?,
            typical_p: source.number("typical_p", &FRACTION)?,
            repeat_penalty: source.number("repetition_penalty", &REPEAT_PENALTY)?,
            ..PartialSampling::default()
        };
        if source.boolean("do_sample")? == Some(false) {
            sampling.temperature = Some(0.0);
        }
        Ok(sampling)
    }
}

/// The stages of a `;`-separated list; `None` when no stage is left of it.
fn parse_sequence(
    field: &str,
    names: &str,
    notices: &mut Vec<String>,
) -> Result<Option<Vec<SamplerKind>>, SampleError> {
    let mut samplers = Vec::new();
    for name in names.split(';').map(str::trim).filter(|name| !name.is_empty()) {
        match SamplerKind::from_name(name) {
            Some(_) if samplers.len() == MAX_SAMPLERS => {
                let expected = format!("a list of at most {MAX_SAMPLERS} stages");
                return Err(SampleError::param(field, expected, "more"));
            }
            Some(kind) => samplers.push(kind),
            // These do nothing in llama.cpp either, unless a parameter turns them on.
            None if ["dry", "top_n_sigma", "top-n-sigma", "xtc"].contains(&name) => {}
            None if notices.len() < MAX_SAMPLERS => {
                notices.push(format!("{field}: stage {name:?} is ignored: there is no such sampling stage"));
            }
            None => {}
        }
    }
    Ok((!samplers.is_empty()).then_some(samplers))
}

/// A value of a model file's metadata, as far as the sampler can use it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MetaValue<'a> {
    /// Any integer or float.
    Number(f64),
    /// A truth value.
    Bool(bool),
    /// A string.
    Text(&'a str),
    /// Anything else; the name of its type, for the error.
    Other(&'static str),
}

impl<'a> MetaValue<'a> {
    fn from_json(value: &'a serde_json::Value) -> Option<MetaValue<'a>> {
        Some(match value {
            serde_json::Value::Null => return None,
            serde_json::Value::Bool(value) => MetaValue::Bool(*value),
            serde_json::Value::Number(value) => MetaValue::Number(value.as_f64()?),
            serde_json::Value::String(value) => MetaValue::Text(value),
            serde_json::Value::Array(_) => MetaValue::Other("a list"),
            serde_json::Value::Object(_) => MetaValue::Other("an object"),
        })
    }
}

impl std::fmt::Display for MetaValue<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            MetaValue::Number(value) => write!(f, "{value}"),
            MetaValue::Bool(value) => write!(f, "{value}"),
            MetaValue::Text(text) => write!(f, "the string {:?}", text.chars().take(40).collect::<String>()),
            MetaValue::Other(name) => f.write_str(name),
        }
    }
}

/// Metadata by key; errors put `prefix` before the key.
struct Source<F> {
    prefix: &'static str,
    lookup: F,
}

impl<'a, F: Fn(&str) -> Option<MetaValue<'a>>> Source<F> {
    fn field(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    /// The value of a key, taken by `take`; a value that it does not take is an error.
    fn get<T>(
        &self,
        key: &str,
        expected: &str,
        take: impl Fn(MetaValue<'a>) -> Option<T>,
    ) -> Result<Option<T>, SampleError> {
        let Some(value) = (self.lookup)(key) else { return Ok(None) };
        take(value).map(Some).ok_or_else(|| SampleError::param(self.field(key), expected, value))
    }

    fn number(&self, key: &str, range: &Range) -> Result<Option<f32>, SampleError> {
        self.get(key, range.text, |value| match value {
            MetaValue::Number(x) => Some(x as f32).filter(|x| (range.low..=range.high).contains(x)),
            _ => None,
        })
    }

    fn integer(&self, key: &str) -> Result<Option<i32>, SampleError> {
        self.get(key, "a 32-bit integer", |value| match value {
            MetaValue::Number(x) => Some(x as i32).filter(|&i| f64::from(i) == x),
            _ => None,
        })
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>, SampleError> {
        self.get(key, "a string", |value| match value {
            MetaValue::Text(text) => Some(text),
            _ => None,
        })
    }

    fn boolean(&self, key: &str) -> Result<Option<bool>, SampleError> {
        self.get(key, "true or false", |value| match value {
            MetaValue::Bool(value) => Some(value),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests;
