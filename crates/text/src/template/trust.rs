//! Which parts of a prompt the template wrote itself, and which it copied from the conversation.
//!
//! Strings in a template carry no origin, so it is found out by rendering twice. Where the conversation holds the text
//! of a control token, or a part of one where it might be joined with something, one character is replaced by a
//! private one of its own. If the second prompt, with these characters put back, equals the first, then they are
//! exactly where the conversation's text went, and the control token that contains one is not the template's. A
//! replaced character keeps lengths, splits, trimming and comparisons with other text as they were, so only templates
//! that look for control tokens inside messages, or change their case, render differently; for those, see
//! [`by_search`]. Conversations without such text, nearly all, are rendered once.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use aho_corasick::AhoCorasick;
use minijinja::machinery::{Token, tokenize};
use serde_json::Value as Json;

use super::{ChatTemplate, SYNTAX};
use crate::error::{Result, TextError};
use crate::tokenizer::{Segment, Tokenizer};

/// Variables that hold special tokens for the template's own use.
const TRUSTED_VARIABLES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"];
/// The first private character used (plane 15).
const FIRST_MARK: u32 = 0xF_0000;

pub(super) fn render(template: &ChatTemplate, mut root: Json, tokenizer: &Tokenizer) -> Result<Vec<Segment>> {
    let prompt = template.render_variables(&root)?;
    let controls = Controls::new(tokenizer)?;
    let mut marker = Marker {
        literals: literals(&template.source),
        taken: template.source.chars().chain(prompt.chars()).filter(|c| *c as u32 >= FIRST_MARK).collect(),
        controls: &controls,
        marks: HashMap::new(),
        originals: HashMap::new(),
        dangerous: Vec::new(),
    };
    if let Json::Object(variables) = &mut root {
        let mut untrusted = variables.iter_mut().filter(|(name, _)| !TRUSTED_VARIABLES.contains(&name.as_str()));
        untrusted.try_for_each(|(_, value)| marker.mark(value))?;
    }
    if marker.originals.is_empty() {
        return Ok(vec![Segment::trusted(prompt)]);
    }
    let marked = template.render_variables(&root).unwrap_or_default();
    let untrusted = marker.positions(&marked, &prompt).unwrap_or_else(|| marker.by_search(&marked, &prompt));
    Ok(segments(&prompt, untrusted))
}

/// The texts of a tokenizer's control tokens, and their parts.
struct Controls {
    texts: Vec<String>,
    search: AhoCorasick,
    /// Beginnings and ends of the texts, not whole.
    prefixes: HashSet<String>,
    suffixes: HashSet<String>,
    /// Characters that the texts begin and end with.
    firsts: HashSet<char>,
    lasts: HashSet<char>,
    /// Length of the longest, in characters.
    longest: usize,
}

impl Controls {
    fn new(tokenizer: &Tokenizer) -> Result<Controls> {
        let texts: Vec<String> = tokenizer.control_texts().map(str::to_string).collect();
        let cuts = |text: &str| text.char_indices().skip(1).map(|(at, _)| at).collect::<Vec<_>>();
        let parts = |part: fn(&str, usize) -> &str| {
            let parts = texts.iter().flat_map(|text| cuts(text).into_iter().map(move |at| part(text, at).to_string()));
            parts.collect::<HashSet<String>>()
        };
        Ok(Controls {
            search: AhoCorasick::new(&texts).map_err(|e| TextError::Encode(e.to_string()))?,
            prefixes: parts(|text, at| &text[..at]),
            suffixes: parts(|text, at| &text[at..]),
            firsts: texts.iter().filter_map(|t| t.chars().next()).collect(),
            lasts: texts.iter().filter_map(|t| t.chars().next_back()).collect(),
            longest: texts.iter().map(|t| t.chars().count()).max().unwrap_or(0),
            texts,
        })
    }

    /// Whether `text` ends in the beginning of a control token.
    fn begins_at_end(&self, text: &str) -> bool {
        let starts = text.char_indices().rev().take(self.longest).filter(|(_, c)| self.firsts.contains(c));
        starts.into_iter().any(|(at, _)| self.prefixes.contains(&text[at..]))
    }

    /// Whether `text` starts with the end of a control token.
    fn ends_at_start(&self, text: &str) -> bool {
        let mut ends = text.char_indices().take(self.longest).filter(|(_, c)| self.lasts.contains(c));
        ends.any(|(at, c)| self.suffixes.contains(&text[..at + c.len_utf8()]))
    }
}

/// String literals of a template: where it might cut a message into pieces.
fn literals(source: &str) -> Vec<String> {
    let tokens = tokenize(source, false, SYNTAX.clone()).map_while(|token| token.ok());
    let literals = tokens.filter_map(|(token, _)| match token {
        Token::Str(text) => Some(text.to_string()),
        Token::String(text) => Some(text.to_string()),
        _ => None,
    });
    literals.filter(|text| !text.is_empty()).collect::<HashSet<_>>().into_iter().collect()
}

/// Replaces characters of the conversation, and finds them again.
struct Marker<'c> {
    controls: &'c Controls,
    literals: Vec<String>,
    /// Private characters that are in use already.
    taken: HashSet<char>,
    /// A character and the private one that stands for it, both ways.
    marks: HashMap<char, char>,
    originals: HashMap<char, char>,
    /// Strings in which something was replaced, as they were.
    dangerous: Vec<String>,
}

impl Marker<'_> {
    /// Marks every string in `value`. A role or type that is a plain word belongs to the template's vocabulary too, and
    /// may be a part of control tokens that the template builds: `'<|' + message.role + '|>'`. So may a key; in keys
    /// only whole control tokens are marked.
    fn mark(&mut self, value: &mut Json) -> Result<()> {
        match value {
            Json::String(text) => *text = self.mark_text(text, true)?,
            Json::Array(list) => list.iter_mut().try_for_each(|item| self.mark(item))?,
            Json::Object(map) => {
                let marked = std::mem::take(map).into_iter().map(|(key, mut value)| {
                    match &mut value {
                        Json::String(word) if (key == "role" || key == "type") && is_word(word) => {}
                        value => self.mark(value)?,
                    }
                    Ok((self.mark_text(&key, false)?, value))
                });
                *map = marked.collect::<Result<_>>()?;
            }
            _ => {}
        }
        Ok(())
    }

    fn mark_text(&mut self, text: &str, ends: bool) -> Result<String> {
        self.taken.extend(text.chars().filter(|c| *c as u32 >= FIRST_MARK));
        let mut at: HashSet<usize> = HashSet::new();
        for found in self.controls.search.find_overlapping_iter(text) {
            if !found.range().any(|i| at.contains(&i)) {
                at.insert(found.start() + best_mark(&text[found.range()]));
            }
        }
        if ends {
            self.mark_ends(text, &mut at);
        }
        if at.is_empty() {
            return Ok(text.to_string());
        }
        self.dangerous.push(text.to_string());
        text.char_indices().map(|(i, c)| if at.contains(&i) { self.mark_of(c) } else { Ok(c) }).collect()
    }

    /// Marks parts of control tokens where a template may cut or trim: at both ends, at white space, and around its
    /// own literals.
    fn mark_ends(&self, text: &str, at: &mut HashSet<usize>) {
        let spaces = text.match_indices(char::is_whitespace).map(|(i, space)| (i, i + space.len()));
        let literals = self.literals.iter().flat_map(|l| text.match_indices(l.as_str()).map(|(i, l)| (i, i + l.len())));
        let cuts = spaces.chain(literals).flat_map(|(start, end)| [start, end]).chain([0, text.len()]);
        for cut in cuts {
            let (before, after) = text.split_at(cut);
            if self.controls.begins_at_end(before) {
                at.extend(before.char_indices().next_back().map(|(i, _)| i));
            }
            if self.controls.ends_at_start(after) {
                at.insert(cut);
            }
        }
    }

    /// The private character for `c`.
    fn mark_of(&mut self, c: char) -> Result<char> {
        if let Some(&mark) = self.marks.get(&c) {
            return Ok(mark);
        }
        let free = (FIRST_MARK..0xF_FFFE).chain(0x10_0000..0x10_FFFE).filter_map(char::from_u32);
        let mark = free.into_iter().find(|mark| !self.taken.contains(mark) && !self.originals.contains_key(mark));
        let mark = mark.ok_or_else(|| TextError::TemplateLimit("no private characters are left".into()))?;
        self.marks.insert(c, mark);
        self.originals.insert(mark, c);
        Ok(mark)
    }

    /// Where the marked characters went in the prompt, unless the marks changed it.
    fn positions(&self, marked: &str, prompt: &str) -> Option<Vec<Range<usize>>> {
        let (mut at, mut untrusted) = (0, Vec::new());
        for c in marked.chars() {
            let original = self.originals.get(&c).copied();
            let c = original.unwrap_or(c);
            if !prompt[at..].starts_with(c) {
                return None;
            }
            let end = at + c.len_utf8();
            untrusted.extend(original.map(|_| at..end));
            at = end;
        }
        (at == prompt.len()).then_some(untrusted)
    }

    /// For a template that treats marked text differently: what equals a dangerous message, or a line of one, is
    /// taken to be copied from it. If there is still more of some control token outside of these places than in the
    /// marked prompt, where messages have none, then that token is trusted nowhere.
    fn by_search(&self, marked: &str, prompt: &str) -> Vec<Range<usize>> {
        let lines = self.dangerous.iter().flat_map(|text| text.lines()).map(str::trim);
        let whole = self.dangerous.iter().map(|text| text.trim());
        let mut copied: Vec<&str> = whole.chain(lines).filter(|text| !text.is_empty()).collect();
        copied.sort_by_key(|text| std::cmp::Reverse(text.len()));
        let places = |text: &str| prompt.match_indices(text).map(|(i, t)| i..i + t.len()).collect::<Vec<_>>();
        let mut untrusted: Vec<Range<usize>> = Vec::new();
        let dangerous = |text: &&str| self.controls.search.is_match(*text) || self.dangerous.iter().any(|d| d == *text);
        copied.into_iter().filter(dangerous).for_each(|text| untrusted.extend(places(text)));
        for text in &self.controls.texts {
            let found = places(text);
            let outside = |at: &&Range<usize>| !untrusted.iter().any(|u| u.start < at.end && at.start < u.end);
            if found.iter().filter(outside).count() > marked.matches(text.as_str()).count() {
                untrusted.extend(found);
            }
        }
        untrusted
    }
}

fn is_word(text: &str) -> bool {
    text.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '-')
}

/// The character of a control token whose replacement disturbs templates least: not one at its ends, which they may
/// look for, and not one that JSON would escape.
fn best_mark(text: &str) -> usize {
    let last =
        |wanted: fn(char) -> bool| text.char_indices().filter(move |(_, c)| wanted(*c)).map(|(i, _)| i).next_back();
    last(char::is_alphanumeric).or_else(|| last(|c| c > ' ' && c != '"' && c != '\\')).unwrap_or(0)
}

/// `prompt` cut at the untrusted ranges, which may overlap.
fn segments(prompt: &str, mut untrusted: Vec<Range<usize>>) -> Vec<Segment> {
    untrusted.sort_by_key(|range| range.start);
    let (mut segments, mut done) = (Vec::<Segment>::new(), 0);
    for range in untrusted {
        if range.end <= done {
            continue;
        }
        let start = range.start.max(done);
        if start > done {
            segments.push(Segment::trusted(&prompt[done..start]));
        }
        match segments.last_mut() {
            Some(last) if !last.trusted => last.text.push_str(&prompt[start..range.end]),
            _ => segments.push(Segment::untrusted(&prompt[start..range.end])),
        }
        done = range.end;
    }
    if done < prompt.len() {
        segments.push(Segment::trusted(&prompt[done..]));
    }
    segments
}
