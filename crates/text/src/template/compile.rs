//! From source to instructions, with the bounds that the template engine does not set itself.
//!
//! minijinja charges work to a budget, but list concatenation and repetition are lazy and free, values may nest
//! without end, and long chains of operators overflow its stack. So expressions are limited in size before they are
//! parsed, and some instructions are replaced or preceded by calls of our own ([`super::operators`]), which check and
//! charge. The same calls make `+`, `*` and `%` behave as in Python. The instruction list has no stable interface,
//! hence the exact version of minijinja in Cargo.toml.

use minijinja::machinery::{CompiledTemplate, Instruction, Instructions, TemplateConfig, Token, tokenize};
use std::sync::Arc;

use super::{SYNTAX, failure, limit, operators};
use crate::error::{Result, TextError};

const NAME: &str = "chat template";
/// Longest template in bytes; the longest in use have about 30,000.
const MAX_SOURCE: usize = 1 << 20;
/// Operators in one tag, and branches in one template; chains of them nest in the syntax tree.
const MAX_OPERATORS: usize = 400;
const MAX_BRANCHES: usize = 400;
/// Pairs in a dict that is written out; calls cannot have more arguments.
const MAX_PAIRS: usize = 30_000;
/// Assignments in one template; each can nest or wrap the one before.
const MAX_ASSIGNMENTS: usize = 2000;

/// The source as it is compiled. Line ends become `\n`, as Jinja reads them.
///
/// # Errors
/// Syntax that cannot be cut into tokens, and sources over the bounds.
pub(super) fn prepare(source: &str) -> Result<String> {
    if source.len() > MAX_SOURCE {
        return Err(limit(format!("it is longer than {MAX_SOURCE} bytes")));
    }
    let source = without_generation(&source.replace("\r\n", "\n").replace('\r', "\n"));
    check_size(&source)?;
    multiply_at_run_time(&source)
}

/// `{% generation %}`, which only marks text for training, becomes a block with a scope of its own.
fn without_generation(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start + 2);
        out.push_str(before);
        rest = tag;
        let word = tag.trim_start_matches(['-', '+']).trim_start();
        for (name, plain) in [("generation", "with"), ("endgeneration", "endwith")] {
            let after = word.strip_prefix(name).map(str::trim_start);
            if let Some(after) = after.filter(|a| a.trim_start_matches(['-', '+']).starts_with("%}")) {
                out.push_str(&tag[..tag.len() - word.len()]);
                out.push_str(plain);
                out.push(' ');
                rest = after;
            }
        }
    }
    out.push_str(rest);
    out
}

/// Every `a * b` as `a * ONE * b`, where the variable [`operators::ONE`] is 1: the engine would multiply constants,
/// lists too, while compiling, where nothing is charged.
fn multiply_at_run_time(source: &str) -> Result<String> {
    let (mut out, mut done) = (String::with_capacity(source.len()), 0);
    let mut prefix = true; // `*args` in a call
    for token in tokenize(source, false, SYNTAX.clone()) {
        let (token, span) = token.map_err(|e| syntax_error(&e))?;
        if matches!(token, Token::Mul) && !prefix {
            let end = span.end_offset as usize;
            out.push_str(&source[done..end]);
            out.push_str(&format!(" {} *", operators::ONE));
            done = end;
        }
        prefix = matches!(token, Token::ParenOpen | Token::Comma);
    }
    out.push_str(&source[done..]);
    Ok(out)
}

/// Compiles a prepared source.
pub(super) fn compile(source: &str) -> Result<CompiledTemplate<'_>> {
    let config = TemplateConfig {
        syntax_config: SYNTAX.clone(),
        default_auto_escape: Arc::new(|_| minijinja::AutoEscape::None),
    };
    let mut compiled = CompiledTemplate::new(NAME, source, &config).map_err(|e| syntax_error(&e))?;
    compiled.instructions = guard(&compiled.instructions);
    Ok(compiled)
}

fn syntax_error(error: &minijinja::Error) -> TextError {
    match failure(error) {
        TextError::TemplateFailed { line, problem } => TextError::TemplateSyntax { line, problem },
        other => other,
    }
}

fn check_size(source: &str) -> Result<()> {
    let (mut operators, mut branches, mut assignments) = (0, 0, 0);
    for token in tokenize(source, false, SYNTAX.clone()) {
        match token.map_err(|e| syntax_error(&e))?.0 {
            Token::VariableStart | Token::BlockStart => operators = 0,
            Token::Ident("elif") => branches += 1,
            Token::Assign => assignments += 1,
            Token::Ident("and" | "or" | "not" | "is" | "in" | "if" | "else") => operators += 1,
            Token::Ident(_) | Token::Str(_) | Token::String(_) | Token::Int(_) | Token::Int128(_) | Token::Float(_) => {
            }
            Token::TemplateData(_) | Token::VariableEnd | Token::BlockEnd | Token::Comma | Token::Colon => {}
            _ => operators += 1,
        }
        for (count, most, what) in [
            (operators, MAX_OPERATORS, "operators in one expression"),
            (branches, MAX_BRANCHES, "`elif` branches"),
            (assignments, MAX_ASSIGNMENTS, "assignments"),
        ] {
            if count > most {
                return Err(limit(format!("it has more than {most} {what}")));
            }
        }
    }
    Ok(())
}

/// The same program with guarded instructions. Jumps to an instruction become jumps to its guard.
fn guard<'s>(code: &Instructions<'s>) -> Instructions<'s> {
    let instructions = || (0..).map_while(|i| code.get(i).map(|instruction| (i, instruction)));
    let mut moved = Vec::new();
    let mut end = 0;
    for (_, instruction) in instructions() {
        moved.push(end);
        end += 1 + guards(instruction).len() as u32;
    }
    moved.push(end);
    let target = |old: &u32| moved.get(*old as usize).copied().unwrap_or(end);
    let mut out = Instructions::new(code.name(), code.source());
    for (i, instruction) in instructions() {
        let replaced = match instruction {
            Instruction::Iterate(to) => Instruction::Iterate(target(to)),
            Instruction::Jump(to) => Instruction::Jump(target(to)),
            Instruction::JumpIfFalse(to) => Instruction::JumpIfFalse(target(to)),
            Instruction::JumpIfFalseOrPop(to) => Instruction::JumpIfFalseOrPop(target(to)),
            Instruction::JumpIfTrueOrPop(to) => Instruction::JumpIfTrueOrPop(target(to)),
            Instruction::BuildMacro(name, at, flags) => Instruction::BuildMacro(name, target(at), *flags),
            Instruction::Add => call(operators::ADD, 2),
            Instruction::Mul => call(operators::MUL, 2),
            Instruction::Rem => call(operators::REM, 2),
            Instruction::Slice => call(operators::SLICE, 4),
            Instruction::BuildMap(pairs @ 1..=MAX_PAIRS) => call(operators::MAP, 2 * *pairs as u16),
            other => other.clone(),
        };
        for instruction in guards(instruction).into_iter().chain([replaced]) {
            match code.get_span(i) {
                Some(span) => out.add_with_span(instruction, span),
                None => out.add(instruction),
            };
        }
    }
    out
}

/// What comes before an instruction: values are checked, and made plain, before they are kept, and paid for where the
/// engine looks at all of them for nothing.
fn guards(instruction: &Instruction) -> Vec<Instruction<'static>> {
    use Instruction::*;
    let below = |name| vec![Swap, call(name, 1), Swap];
    match instruction {
        StoreLocal(_) => vec![call(operators::STORE, 1)],
        // On top of the value lies the object whose attribute is set.
        SetAttr(_) => below(operators::STORE_ATTRIBUTE),
        PushLoop(_) => vec![call(operators::ITERATE, 1)],
        Eq | Ne | Gt | Gte | Lt | Lte | CompareAndPreserve(_) | PerformTest(_, Some(1), _) => {
            vec![call(operators::PAY, 1)]
        }
        PerformTest(_, Some(2), _) => below(operators::PAY),
        GetItem => [vec![call(operators::PAY, 1)], below(operators::PAY)].concat(),
        _ => Vec::new(),
    }
}

/// A call of a filter that is looked up by name each time.
fn call(name: &'static str, arguments: u16) -> Instruction<'static> {
    Instruction::ApplyFilter(name, Some(arguments), !0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_become_scopes() {
        let prepared = |s| prepare(s).unwrap();
        assert_eq!(prepared("a{% generation %}b{% endgeneration %}c"), "a{% with %}b{% endwith %}c");
        assert_eq!(prepared("{%- generation -%}b{%+ endgeneration+%}"), "{%- with -%}b{%+ endwith +%}");
        assert_eq!(prepared("{% generations %}{{ generation }}"), "{% generations %}{{ generation }}");
        assert_eq!(
            prepared("a*b{{ 2*3 }}{{ f(*x) }}"),
            format!("a*b{{{{ 2* {} *3 }}}}{{{{ f(*x) }}}}", operators::ONE)
        );
        assert_eq!(prepared("a\r\nb\rc"), "a\nb\nc");
    }

    #[test]
    fn size_limits() {
        let error = |s: String| ChatSource(s).error();
        struct ChatSource(String);
        impl ChatSource {
            fn error(&self) -> String {
                prepare(&self.0).and_then(|s| compile(&s).map(drop)).unwrap_err().to_string()
            }
        }
        assert!(error(format!("{{{{ 1{} }}}}", "+1".repeat(500))).contains("operators"));
        assert!(error(format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(500))).contains("elif"));
        assert!(error("{% set x = 1 %}".repeat(2001)).contains("assignments"));
        assert!(error(" ".repeat(MAX_SOURCE + 1)).contains("longer"));
        assert_eq!(error("a\n{% if %}".into()), "chat template, line 2: syntax error: unexpected end of block");
    }
}
