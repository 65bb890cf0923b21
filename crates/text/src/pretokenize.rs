//! How byte-level vocabularies split text before merging, by the name in `tokenizer.ggml.pre`.
//!
//! Each rule is a list of regular expressions applied one after the other to the pieces so far; a match becomes a
//! piece of its own and so does what lies between matches. The expressions are those of the models' own
//! tokenizer.json files (they agree with llama.cpp's `llama-vocab.cpp`, which writes some of them differently for its
//! own regex engine). Names and flags are llama.cpp's.

use serde_json::Value;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;

use crate::error::{Result, TextError};
use crate::vocab::VocabSpec;

/// One way of splitting text, and what llama.cpp assumes of vocabularies that use it.
#[derive(Debug)]
pub(crate) struct PreTokenizer {
    names: &'static [&'static str],
    patterns: &'static [&'static str],
    /// A whole piece that is a token is taken without looking at the merges.
    pub(crate) ignore_merges: bool,
    /// `add_bos_token` where the file does not say.
    pub(crate) add_bos: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const SEED: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const BAILING: &str =
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
const EXAONE_MOE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
/// The letters of deepseek-llm: Latin, Greek, Cyrillic, Armenian, Georgian, Cherokee, Coptic, Deseret .. Those that
/// Unicode normalization would replace are written as numbers.
const DEEPSEEK_LETTERS: &str = r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌῐ-\x{1FD3}ῖ-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";
const DEEPSEEK_CJK: &str = r"[一-龥ࠀ-一가-퟿]+";

const fn rule(names: &'static [&'static str], patterns: &'static [&'static str]) -> PreTokenizer {
    PreTokenizer { names, patterns, ignore_merges: false, add_bos: false }
}

static TABLE: &[PreTokenizer] = &[
    // What llama.cpp does with files older than the key, whose authors wrote `default`.
    rule(&["default"], &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"]),
    PreTokenizer {
        names: &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ],
        patterns: &[LLAMA3],
        ignore_merges: true,
        add_bos: true,
    },
    rule(&["smaug-bpe", "dbrx", "chatglm-bpe", "glm4"], &[LLAMA3]),
    rule(
        &["qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"],
        &[QWEN2],
    ),
    rule(&["qwen35"], &[QWEN35]),
    PreTokenizer { names: &["tekken"], patterns: &[TEKKEN], ignore_merges: true, add_bos: true },
    rule(&["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], &[GPT4O]),
    rule(
        &[
            "gpt-2",
            "phi-2",
            "olmo",
            "mpt",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "jina-es",
            "jina-de",
            "jina-v2-es",
            "jina-v2-de",
        ],
        &[GPT2],
    ),
    rule(
        &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"],
        &[r"\p{N}", GPT2],
    ),
    rule(&["falcon"], &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"]),
    rule(
        &["deepseek-llm"],
        &[r"[\r\n]", DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", DEEPSEEK_CJK, r"\p{N}+"],
    ),
    rule(&["deepseek-coder"], &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK, r"\p{N}"]),
    rule(&["deepseek-v3", "hunyuan-dense", "joyai-llm"], &[r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3]),
    rule(&["superbpe"], &[r"\p{N}+", r"(?=(\d{3})+(?!\d))"]),
    rule(&["seed-coder"], &[SEED]),
    rule(&["bailingmoe", "bailingmoe2", "llada-moe"], &[BAILING]),
    rule(&["exaone-moe"], &[EXAONE_MOE]),
    rule(&["bloom", "gpt3-finnish", "poro-chat"], &[r" ?[^(\s|.,!?…。，、।۔،)]+"]),
    rule(&["viking"], &[r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"]),
];

/// Tokens that only Llama 3's vocabulary has: its first files came before `tokenizer.ggml.pre`.
const LLAMA3_TOKENS: [&[u8]; 2] = [b"<|begin_of_text|>", b"<|start_header_id|>"];

/// The rule for a `gpt2` vocabulary. A missing name is accepted for Llama 3's vocabulary alone.
pub(crate) fn find(spec: &VocabSpec) -> Result<&'static PreTokenizer> {
    let name = match spec.pre {
        Some(name) => name,
        None if LLAMA3_TOKENS.iter().all(|t| spec.tokens.contains(t)) => "llama-bpe",
        None => return Err(TextError::MissingPreTokenizer),
    };
    let rule = TABLE.iter().find(|rule| rule.names.contains(&name));
    rule.ok_or_else(|| TextError::UnknownPreTokenizer(name.to_string()))
}

/// The name of the rule that splits text as the `pre_tokenizer` section of a byte-level tokenizer.json does.
/// `ignore_merges`: what the rule should say of it, if that makes a difference.
///
/// # Errors
/// [`TextError::UnnamedPreTokenizer`] where no rule has the same expressions in the same order.
pub(crate) fn name_of(component: &Value, ignore_merges: Option<bool>) -> Result<&'static str> {
    let unnamed = || TextError::UnnamedPreTokenizer(shortened(component));
    let steps = match component["pretokenizers"].as_array() {
        Some(steps) => &steps[..],
        None => std::slice::from_ref(component),
    };
    let mut patterns = Vec::with_capacity(steps.len());
    let [splits @ .., last] = steps else { return Err(unnamed()) };
    for step in splits {
        // Line ends may be written as themselves.
        let pattern = pattern(step).ok_or_else(unnamed)?;
        patterns.push(pattern.replace('\r', r"\r").replace('\n', r"\n"));
    }
    // Both default to true.
    let flag = |key: &str| last[key].as_bool().unwrap_or(true);
    match last["type"].as_str() {
        Some("ByteLevel") if !flag("add_prefix_space") => {}
        _ => return Err(unnamed()),
    }
    if flag("use_regex") {
        patterns.push(GPT2.to_string());
    }
    let same = |rule: &&PreTokenizer| rule.patterns == patterns;
    let exact = |rule: &&PreTokenizer| same(rule) && ignore_merges.is_none_or(|ignored| ignored == rule.ignore_merges);
    // Few tokens are not what merging gives, and who asks compares all of them.
    let rule = TABLE.iter().find(exact).or_else(|| TABLE.iter().find(same));
    rule.map(|rule| rule.names[0]).ok_or_else(unnamed)
}

/// The expression that a step cuts out, if it cuts out whole matches and keeps them.
fn pattern(step: &Value) -> Option<&str> {
    match step["type"].as_str()? {
        "Split" => match (step["behavior"].as_str()?, step["invert"].as_bool().unwrap_or(false)) {
            // The expressions of the table leave nothing between matches that could be removed.
            ("Isolated", false) | ("Removed", true) => step["pattern"]["Regex"].as_str(),
            _ => None,
        },
        "Digits" if step["individual_digits"] == true => Some(r"\p{N}"),
        "Digits" => Some(r"\p{N}+"),
        _ => None,
    }
}

/// One short line of JSON.
fn shortened(component: &Value) -> String {
    const SHOWN: usize = 200;
    let text = component.to_string();
    let cut: String = text.chars().take(SHOWN).collect();
    if cut.len() < text.len() { cut + "…" } else { cut }
}

impl PreTokenizer {
    /// The patterns in order, then every byte as a character of the byte-level alphabet.
    pub(crate) fn build(&self) -> Result<PreTokenizerWrapper> {
        let mut steps = Vec::with_capacity(self.patterns.len() + 1);
        for pattern in self.patterns {
            let pattern = SplitPattern::Regex((*pattern).to_string());
            let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
            steps.push(PreTokenizerWrapper::Split(split.map_err(|e| TextError::Encode(e.to_string()))?));
        }
        steps.push(PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, false)));
        Ok(PreTokenizerWrapper::Sequence(Sequence::new(steps)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _};

    fn split(name: &str, text: &str) -> Vec<String> {
        let spec = VocabSpec { pre: Some(name), ..VocabSpec::default() };
        let mut pieces = PreTokenizedString::from(text);
        find(&spec).unwrap().build().unwrap().pre_tokenize(&mut pieces).unwrap();
        let pieces = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
        pieces.into_iter().map(|(_, (start, end), _)| text[start..end].to_string()).collect()
    }

    #[test]
    fn every_name_is_unique_and_every_pattern_compiles() {
        let mut seen = std::collections::HashSet::new();
        for rule in TABLE {
            rule.build().unwrap_or_else(|e| panic!("{:?}: {e}", rule.names));
            assert!(rule.names.iter().all(|name| seen.insert(name)));
        }
    }

    #[test]
    fn unknown_and_missing_names() {
        let unknown = VocabSpec { pre: Some("frob-bpe"), ..VocabSpec::default() };
        assert!(find(&unknown).unwrap_err().to_string().contains("`frob-bpe`"));
        let missing = VocabSpec { tokens: vec![b"a"], ..VocabSpec::default() };
        assert_eq!(find(&missing).unwrap_err(), TextError::MissingPreTokenizer);
        let llama3 = VocabSpec { tokens: vec![b"<|begin_of_text|>", b"<|start_header_id|>"], ..VocabSpec::default() };
        assert!(find(&llama3).unwrap().names.contains(&"llama-bpe"));
    }

    #[test]
    fn one_text_three_splits() {
        let text = "I'LL 12345  x";
        assert_eq!(split("gpt-2", text), ["I", "'", "LL", " 12345", " ", " x"]);
        assert_eq!(split("llama-bpe", text), ["I", "'LL", " ", "123", "45", " ", " x"]);
        assert_eq!(split("qwen2", text), ["I", "'LL", " ", "1", "2", "3", "4", "5", " ", " x"]);
    }

    #[test]
    fn newline_runs_stay_together_and_the_last_space_joins_the_next_word() {
        assert_eq!(split("llama-bpe", "a\n\n  b   "), ["a", "\n\n", " ", " b", "   "]);
        assert_eq!(split("gpt-2", "a\n\n b"), ["a", "\n\n", " b"]);
        assert_eq!(split("qwen2", "x.\r\n\r\ny"), ["x", ".\r\n\r\n", "y"]);
    }

    #[test]
    fn digits_and_case() {
        assert_eq!(split("smollm", "a 12"), ["a", " ", "1", "2"]);
        assert_eq!(split("superbpe", "1234567"), ["1", "234", "567"]);
        assert_eq!(split("default", "12345"), ["123", "45"]);
        assert_eq!(split("tekken", "HelloWorld ABC's 12"), ["Hello", "World", " ABC", "'s", " ", "1", "2"]);
        assert_eq!(split("gpt-4o", "HelloWorld ABC's 1234"), ["Hello", "World", " ABC's", " ", "123", "4"]);
        assert_eq!(split("deepseek-v3", "ab.cd 12"), ["ab", ".cd", " ", "12"]);
        assert_eq!(split("falcon", "a12345!"), ["a", "123", "45", "!"]);
    }
}
