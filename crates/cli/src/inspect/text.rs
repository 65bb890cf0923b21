//! The report for people.

use super::is_printable;
use super::report::{Experts, Report, Rope, Summary, Tensor, Tokenizer, Window};
use puna_model::error::{escape, shown};
use std::collections::HashMap;
use std::fmt::{self, Display, Write as _};
use std::io::{self, Write};

/// Writes the report: the summary, then metadata, then tensors.
pub fn write(report: &Report, all_tensors: bool, out: &mut impl Write) -> io::Result<()> {
    for file in &report.files {
        line(out, "file", format_args!("{} ({}, {})", shown(&file.path), bytes(file.bytes), file.format))?;
    }
    summary(&report.summary, report.tensors.len(), out)?;
    writeln!(out)?;
    match &report.reasons[..] {
        [] => writeln!(out, "runs: yes")?,
        reasons => reasons.iter().try_for_each(|reason| writeln!(out, "runs: no: {}", OneLine(reason)))?,
    }
    report.notices.iter().try_for_each(|notice| writeln!(out, "notice: {}", OneLine(notice)))?;
    writeln!(out, "\nmetadata: {} keys", report.metadata.len())?;
    for entry in &report.metadata {
        writeln!(out, "  {} = {}", escape(&entry.key), entry.shown)?;
    }
    writeln!(out, "\ntensors: {}", report.tensors.len())?;
    tensors(&report.tensors, all_tensors, out)
}

/// A message. What it quotes should be escaped already; if not, the characters that do harm are.
struct OneLine<'a>(&'a str);

impl Display for OneLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.0
            .chars()
            .try_for_each(|c| if is_printable(c) { f.write_char(c) } else { write!(f, "{}", c.escape_debug()) })
    }
}

fn line(out: &mut impl Write, label: &str, what: impl Display) -> io::Result<()> {
    writeln!(out, "{label:<13} {what}")
}

fn summary(s: &Summary, n_tensors: usize, out: &mut impl Write) -> io::Result<()> {
    let unknown = || "unknown".to_owned();
    let or_unknown = |n: Option<usize>| n.map_or_else(unknown, |n| thousands(n as u64));
    line(out, "architecture", s.architecture.as_ref().map_or_else(unknown, |a| escape(a).to_string()))?;
    if let Some(name) = &s.name {
        line(out, "name", escape(name))?;
    }
    if n_tensors == 0 {
        line(out, "parameters", "none: the file has no tensors, only metadata")?;
    } else if s.active_parameters < s.parameters {
        line(out, "parameters", format_args!("{}, active {}", count(s.parameters), count(s.active_parameters)))?;
    } else {
        line(out, "parameters", count(s.parameters))?;
    }
    line(out, "width", or_unknown(s.shape.dim))?;
    line(out, "layers", or_unknown(s.shape.n_layers))?;
    let [heads, kv, dim] = [s.shape.n_heads, s.shape.n_kv_heads, s.shape.head_dim].map(or_unknown);
    line(out, "heads", format_args!("{heads} of {dim} dimensions, {kv} for keys and values"))?;
    if let Some(width) = s.shape.ffn_dim {
        line(out, "feed-forward", thousands(width as u64))?;
    }
    line(out, "vocabulary", or_unknown(s.shape.vocab_size))?;
    line(out, "context", or_unknown(s.shape.context_length))?;
    line(out, "rope", s.rope.as_ref().map_or_else(unknown, |r| rope(r, s.shape.head_dim)))?;
    line(out, "window", windows(&s.windows, s.shape.n_layers))?;
    if let Some(e) = &s.experts {
        line(out, "experts", experts(e))?;
    }
    if !s.scales.is_empty() {
        let scales: Vec<String> = s.scales.iter().map(|(name, x)| format!("{name} {x}")).collect();
        line(out, "scales", scales.join(", "))?;
    }
    types(s, out)?;
    if let Some(t) = &s.tokenizer {
        tokenizer(t, out)?;
    }
    if n_tensors == 0 { Ok(()) } else { memory(s, out) }
}

fn rope(rope: &Rope, head_dim: Option<usize>) -> String {
    let mut text = match rope.factor {
        Some(factor) => format!("scaling {} by {factor}", escape(&rope.kind)),
        None => format!("scaling {}", escape(&rope.kind)),
    };
    if let Some(theta) = rope.theta {
        text += &format!(", theta {theta}");
    }
    match (rope.width, head_dim) {
        (Some(width), Some(dim)) => text += &format!(", {width} of {dim} dimensions"),
        (Some(width), None) => text += &format!(", {width} dimensions"),
        _ => {}
    }
    if !rope.without.is_empty() {
        text += &format!(", none in layers {}", ranges(&rope.without));
    }
    text
}

fn windows(windows: &[Window], n_layers: Option<usize>) -> String {
    let window = |w: &Window| match &w.layers {
        None => format!("{} positions", w.positions),
        Some(layers) if Some(layers.len()) == n_layers => format!("{} positions, all layers", w.positions),
        Some(layers) => format!("{} positions in layers {}", w.positions, ranges(layers)),
    };
    match windows {
        [] => "none".to_owned(),
        some => some.iter().map(window).collect::<Vec<_>>().join("; "),
    }
}

fn experts(e: &Experts) -> String {
    let mut text = e.n_experts.to_string();
    if let Some(used) = e.used {
        text += &format!(", {used} used");
    }
    if let Some(width) = e.ffn_dim {
        text += &format!(", feed-forward {width}");
    }
    if let Some(width) = e.shared_ffn_dim {
        text += &format!(", one shared by all tokens {width}");
    }
    if let Some(routing) = e.routing {
        text += &format!(", {routing}");
    }
    if e.normalize == Some(true) {
        text += ", weights normalized";
    }
    if let Some(scale) = e.scale.filter(|&x| x != 1.0) {
        text += &format!(", weights times {scale}");
    }
    text
}

fn types(s: &Summary, out: &mut impl Write) -> io::Result<()> {
    let total = s.types.iter().map(|t| t.bytes as f64).sum::<f64>().max(1.0);
    for t in &s.types {
        let (share, bits) = (t.bytes as f64 / total * 100.0, t.bits_per_weight);
        line(out, "type", format_args!("{} {}, {share:.1} %, {bits} bits a weight", t.ty, bytes(t.bytes)))?;
    }
    match s.bits_per_weight {
        Some(bits) if s.types.len() > 1 => line(out, "", format_args!("{bits:.2} bits a weight in all")),
        _ => Ok(()),
    }
}

fn tokenizer(t: &Tokenizer, out: &mut impl Write) -> io::Result<()> {
    let quoted = |x: &Option<String>| x.as_ref().map_or_else(|| "unknown".to_owned(), |x| escape(x).to_string());
    let mut text = quoted(&t.model);
    if t.pre.is_some() {
        text += &format!(", pre {}", quoted(&t.pre));
    }
    if let Some(n) = t.tokens {
        text += &format!(", {} tokens", thousands(n as u64));
    }
    for (key, value) in [("add_bos", t.add_bos), ("add_eos", t.add_eos)] {
        if let Some(value) = value {
            text += &format!(", {key} {value}");
        }
    }
    text += if t.chat_template { ", chat template" } else { ", no chat template" };
    line(out, "tokenizer", text)?;
    if t.special.is_empty() {
        return Ok(());
    }
    let special: Vec<String> = (t.special.iter())
        .map(|s| match &s.text {
            Some(text) => format!("{} {} \"{}\"", escape(&s.role), s.id, escape(text)),
            None => format!("{} {} (not in the vocabulary)", escape(&s.role), s.id),
        })
        .collect();
    line(out, "", special.join(", "))
}

fn memory(s: &Summary, out: &mut impl Write) -> io::Result<()> {
    let m = &s.memory;
    let weights = bytes(m.weight_bytes);
    let (Some(kv), Some(total)) = (m.kv_bytes, m.total_bytes) else {
        return line(out, "memory", format_args!("weights {weights}, keys and values unknown"));
    };
    let beyond = match s.shape.context_length {
        Some(n) if m.ctx > n as u64 => ", beyond the model's context",
        _ => "",
    };
    let (total, kv) = (bytes(total), bytes(kv));
    let what = format_args!("{total} at {} positions{beyond}: weights {weights}, {} KV {kv}", m.ctx, m.kv);
    line(out, "memory", what)
}

/// Most lines of tensors that are written unless all are asked for.
const MAX_LINES: usize = 80;

fn tensors(all: &[Tensor], list_all: bool, out: &mut impl Write) -> io::Result<()> {
    let mut lines: Vec<Line> = if list_all { all.iter().map(Line::Tensor).collect() } else { grouped(all) };
    let left = lines.len().saturating_sub(if list_all { usize::MAX } else { MAX_LINES });
    lines.truncate(lines.len() - left);
    let cells: Vec<Option<[String; 2]>> = lines.iter().map(Line::cells).collect();
    let width = |i: usize| cells.iter().flatten().map(|c| c[i].chars().count()).max().unwrap_or(0);
    let (names, shapes) = (width(0), width(1));
    for (line, cells) in lines.iter().zip(&cells) {
        match (line, cells) {
            (Line::Tensor(t), Some([name, shape])) => {
                writeln!(out, "  {name:<names$}  {shape:<shapes$}  {:<7}  {}", t.ty, bytes(t.bytes))?;
            }
            (Line::Alike { prefix, first, others }, _) => {
                writeln!(out, "  like {0}{first}: {0}{1}", escape(prefix), ranges(others))?;
            }
            _ => {}
        }
    }
    match left {
        0 => Ok(()),
        _ => writeln!(out, "  … and {left} lines more: --tensors lists all tensors"),
    }
}

/// A line of the list of tensors.
enum Line<'a> {
    Tensor(&'a Tensor),
    /// The layers called `prefix` and a number of `others` have tensors as the `first` one has.
    Alike {
        prefix: &'a str,
        first: usize,
        others: Vec<usize>,
    },
}

impl Line<'_> {
    /// Name and shape.
    fn cells(&self) -> Option<[String; 2]> {
        match self {
            Line::Tensor(t) => Some([escape(&t.name).to_string(), format!("{:?}", t.shape)]),
            Line::Alike { .. } => None,
        }
    }
}

/// A name taken apart at its first number: `blk.`, 3, `.attn_q.weight`.
fn layer_name(name: &str) -> Option<(&str, usize, &str)> {
    let mut start = 0;
    for part in name.split('.') {
        if let Some(number) = part.parse().ok().filter(|_| part.bytes().all(|b| b.is_ascii_digit())) {
            return Some((&name[..start], number, &name[start + part.len()..]));
        }
        start += part.len() + 1;
    }
    None
}

/// The tensors that belong to no layer or to the first of the layers that are alike.
fn grouped(all: &[Tensor]) -> Vec<Line<'_>> {
    let mut layers: Vec<((&str, usize), Vec<&Tensor>)> = Vec::new();
    let mut places = HashMap::new();
    let mut lines = Vec::new();
    for t in all {
        let Some((prefix, number, _)) = layer_name(&t.name) else {
            lines.push(Line::Tensor(t));
            continue;
        };
        let place = *places.entry((prefix, number)).or_insert(layers.len());
        if place == layers.len() {
            layers.push(((prefix, number), Vec::new()));
        }
        layers[place].1.push(t);
    }
    // By what layers hold: the first such layer, and the others.
    let mut kinds: Vec<(usize, Vec<usize>)> = Vec::new();
    let mut known = HashMap::new();
    for (place, ((prefix, number), tensors)) in layers.iter().enumerate() {
        let mut holds: Vec<_> = tensors.iter().map(|t| (layer_name(&t.name).map(|n| n.2), &t.shape, t.ty)).collect();
        holds.sort_unstable();
        let kind = *known.entry((prefix, holds)).or_insert(kinds.len());
        match kinds.get_mut(kind) {
            Some((_, others)) => others.push(*number),
            None => kinds.push((place, Vec::new())),
        }
    }
    for (place, mut others) in kinds {
        let ((prefix, first), tensors) = &layers[place];
        lines.extend(tensors.iter().map(|t| Line::Tensor(t)));
        if !others.is_empty() {
            others.sort_unstable();
            lines.push(Line::Alike { prefix, first: *first, others });
        }
    }
    lines
}

/// Most ranges that are written.
const MAX_RANGES: usize = 16;

/// Rising numbers as ranges: `0-3, 5, 7-9`.
fn ranges(numbers: &[usize]) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for &n in numbers {
        match ranges.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(n) => *last = n,
            _ => ranges.push((n, n)),
        }
    }
    let range = |&(a, b): &(usize, usize)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    let mut text: Vec<String> = ranges.iter().take(MAX_RANGES).map(range).collect();
    if ranges.len() > MAX_RANGES {
        text.push("…".to_owned());
    }
    text.join(", ")
}

/// A size with three digits or more, in powers of 1000.
pub fn bytes(n: u64) -> String {
    let (mut x, mut unit) = (n as f64, 0);
    const UNITS: [&str; 7] = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];
    while x >= 999.5 && unit + 1 < UNITS.len() {
        x /= 1000.0;
        unit += 1;
    }
    let digits = match x {
        _ if unit == 0 => 0,
        x if x < 9.995 => 2,
        x if x < 99.95 => 1,
        _ => 0,
    };
    format!("{x:.digits$} {}", UNITS[unit])
}

/// A number of parameters, and about how many that is.
fn count(n: u64) -> String {
    let exact = thousands(n);
    match n {
        0..1_000_000 => exact,
        1_000_000..999_500_000 => format!("{exact} ({:.1} million)", n as f64 / 1e6),
        _ => format!("{exact} ({:.2} billion)", n as f64 / 1e9),
    }
}

fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_true() {
        let shown = [0, 999, 1000, 9_994, 9_995, 99_949, 99_950, 999_499, 999_500, u64::MAX].map(bytes);
        let expected =
            ["0 B", "999 B", "1.00 kB", "9.99 kB", "10.0 kB", "99.9 kB", "100 kB", "999 kB", "1.00 MB", "18.4 EB"];
        assert_eq!(shown, expected);
        assert_eq!([0, 999, 1000, 1_234_567].map(thousands), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!(count(134_515_008), "134,515,008 (134.5 million)");
        assert_eq!(count(46_702_792_704), "46,702,792,704 (46.70 billion)");
    }

    #[test]
    fn neighbours_become_ranges() {
        assert_eq!(ranges(&[]), "");
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8");
        assert_eq!(ranges(&[3, usize::MAX, 0]), format!("3, {}, 0", usize::MAX));
        let odd: Vec<usize> = (0..100).map(|i| 2 * i + 1).collect();
        assert!(ranges(&odd).ends_with("29, 31, …"));
    }

    #[test]
    fn names_fall_apart_at_the_first_number() {
        assert_eq!(layer_name("blk.12.ffn_up.3.weight"), Some(("blk.", 12, ".ffn_up.3.weight")));
        assert_eq!(layer_name("v.blk.0"), Some(("v.blk.", 0, "")));
        assert_eq!(layer_name("7"), Some(("", 7, "")));
        for name in ["output.weight", "a.+1.b", "a.99999999999999999999.b", "", "."] {
            assert_eq!(layer_name(name), None, "{name}");
        }
    }

    #[test]
    fn layers_are_listed_once_a_kind() {
        let tensor = |name: &str, ty| {
            let (name, shape) = (name.to_owned(), vec![64]);
            Tensor { name, ty, shape, bytes: 256, file: 0, offset: 0 }
        };
        let mut all = vec![tensor("blk.0.a", "F32"), tensor("token_embd", "F32"), tensor("blk.0.b", "Q4_K")];
        for layer in 1..5 {
            // In the other order, and one with another type.
            let ty = if layer == 3 { "Q6_K" } else { "Q4_K" };
            all.extend([tensor(&format!("blk.{layer}.b"), ty), tensor(&format!("blk.{layer}.a"), "F32")]);
        }
        all.push(tensor("v.0.a", "F32"));
        let mut out = Vec::new();
        tensors(&all, false, &mut out).unwrap();
        let lines = String::from_utf8(out).unwrap();
        let starts: Vec<&str> = lines.lines().map(|l| l.split("  [").next().unwrap_or(l).trim()).collect();
        let expected = ["token_embd", "blk.0.a", "blk.0.b", "like blk.0: blk.1-2, 4", "blk.3.b", "blk.3.a", "v.0.a"];
        assert_eq!(starts, expected);
    }

    #[test]
    fn long_lists_are_cut_unless_asked_for() {
        let name = |i| format!("tensor{i}");
        let tensor = |i| Tensor { name: name(i), ty: "F32", shape: vec![1], bytes: 4, file: 0, offset: 0 };
        let all: Vec<Tensor> = (0..MAX_LINES + 7).map(tensor).collect();
        let lines = |list_all| {
            let mut out = Vec::new();
            tensors(&all, list_all, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(lines(true).lines().count(), MAX_LINES + 7);
        assert_eq!(lines(false).lines().count(), MAX_LINES + 1);
        assert!(lines(false).ends_with("… and 7 lines more: --tensors lists all tensors\n"));
    }
}
