//! Templates that try to run for ever, to fill memory or to overflow the stack end in an error, soon. The tests run
//! on threads with Rust's default stack of 2 MiB.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use proptest::prelude::*;
use puna_text::{ChatInput, ChatTemplate, TextError};
use serde_json::json;

/// How much a chain of operators is repeated.
const MANY: usize = 100_000;

fn render(template: &str) -> Result<String, TextError> {
    let messages = json!([{"role": "user", "content": "hi"}]);
    ChatTemplate::new(template)?.render(&ChatInput { messages: Some(&messages), ..ChatInput::default() })
}

/// Renders within the time allowed, with an error of one line unless `may_succeed`.
fn check(name: &str, template: &str, may_succeed: bool) {
    let start = Instant::now();
    let result = render(template);
    let took = start.elapsed();
    // Generous for debug builds on a busy machine; a release build takes a third of a second at most.
    assert!(took < Duration::from_secs(20), "{name} took {took:?}");
    match result {
        Ok(text) => assert!(may_succeed && text.len() < 1000, "{name}: {} bytes", text.len()),
        Err(error) => assert!(!error.to_string().contains('\n'), "{name}: {error}"),
    }
}

#[test]
fn endless_work() {
    for (name, template) in [
        ("nested loops", "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"),
        ("sorting", "{% for i in range(100000) %}{{ range(100000)|sort|length }}{% endfor %}"),
        ("searching", "{% set a = range(100000)|list %}{% for i in range(100000) %}{{ 'q' in a }}{% endfor %}"),
        ("counting", "{% set a = range(90000)|list %}{% for i in range(100000) %}{{ a.count(1) }}{% endfor %}"),
        ("storing", "{% for i in range(100000) %}{% set a = range(90000) %}{% endfor %}"),
        (
            "appending",
            "{% set n = namespace(l=[]) %}{% for i in range(99999) %}{% set n.l = n.l + ['x'] %}{% endfor %}",
        ),
        ("joining", "{% set a = 'x' * 100000 %}{{ range(100000)|join(a)|length }}"),
        ("strings", "{% for i in range(99999) %}{% set a = 'x' * 9999999 %}{% endfor %}"),
        ("splitting", "{% set a = 'x' * 9999999 %}{% for i in range(99999) %}{{ a.split('y')|length }}{% endfor %}"),
        ("comparing", "{% set a = 'x' * 65000 %}{% for i in range(99999) %}{{ a == a }}{{ [a, a]|sort }}{% endfor %}"),
        ("picking", "{% set a = 'x' * 65000 %}{% for i in range(99999) %}{{ a[64000] }}{{ a[1:2] }}{% endfor %}"),
        ("hashing", "{% set a = 'x' * 65000 %}{% for i in range(99999) %}{% set d = {a: 1} %}{% endfor %}"),
        ("keeping", "{% set a = 'x' * 9999999 %}"),
        ("recursive loop", "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}"),
        ("macro", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
        (
            "two macros",
            "{% macro f(x) %}{{ g(x) }}{% endmacro %}{% macro g(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        ),
        ("caller", "{% macro f() %}{% call f() %}{{ caller() }}{% endcall %}{% endmacro %}{{ f() }}"),
    ] {
        check(name, template, false);
    }
}

#[test]
fn endless_memory() {
    let nested_sets = format!("{{% set x = [1] %}}{}{{{{ x|length }}}}", "{% set x = x + x %}".repeat(60));
    let sum = format!("{{{{ ([0] * 1000000{})|length }}}}", " + [0] * 1000000".repeat(60));
    for (name, template) in [
        ("string ~", "{% set n = namespace(x='xx') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"),
        ("string +", "{% set n = namespace(x='xx') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}"),
        ("list +", "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}"),
        ("list [x, x]", "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"),
        ("list set", nested_sets.as_str()),
        ("macro +", "{% macro f(x) %}{{ f(x + x) }}{% endmacro %}{{ f([1]) }}"),
        ("with", &format!("{}{}", "{% with x = (x or [1]) + (x or [1]) %}".repeat(60), "{% endwith %}".repeat(60))),
        ("one sum", sum.as_str()),
        ("string *", "{{ 'x' * 2**40 }}"),
        ("string * 90 MB", "{{ ('x' * 90000000)|length }}"),
        ("list *", "{{ ([0] * 2**40)|length }}"),
        ("tuple *", "{{ ((0,) * 2**40)|length }}"),
        ("replace", "{% set a = 'x' * 100000 %}{{ a|replace('x', a)|length }}"),
        ("replace method", "{% set a = 'x' * 100000 %}{{ a.replace('x', a)|length }}"),
        ("format", "{{ '{:2000000000}'.format(1) }}"),
        ("printf", "{{ '%2000000000d' % 1 }}"),
        ("printf filter", "{{ '%2000000000d'|format(1) }}"),
        ("center", "{{ 'a'|center(2000000000) }}"),
        ("ljust", "{{ 'a'.ljust(2000000000) }}"),
        ("indent", "{{ 'a'|indent(2000000000, true) }}"),
        ("power", "{{ 9**9**9**9 }}"),
        ("range", "{{ range(10**12)|list|length }}"),
        (
            "json",
            "{% set n = namespace(x=[1]) %}{% for i in range(20) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x|tojson|length }}",
        ),
        ("json indent", "{{ [[[[[1]]]]]|tojson(indent='x' * 9999999) }}"),
        ("output", "{% set a = 'x' * 9999999 %}{% for i in range(99) %}{{ a }}{% endfor %}"),
    ] {
        check(name, template, false);
    }
}

#[test]
fn deep_values() {
    let nested = |start: &str, step: &str, end: &str| {
        format!(
            "{{% set n = namespace(x={start}) %}}{{% for i in range(99999) %}}{{% set n.x = {step} %}}{{% endfor %}}{end}"
        )
    };
    for (name, template) in [
        ("list", nested("[]", "[n.x]", "ok")),
        ("list printed", nested("[]", "[n.x]", "{{ n.x }}")),
        ("dict", nested("{}", "{'a': n.x}", "ok")),
        ("tuple", nested("()", "(n.x,)", "ok")),
        ("namespace", nested("1", "namespace(a=n.x)", "ok")),
        ("namespace in itself", nested("1", "n", "{{ n }}")),
        ("in a list in itself", nested("1", "[n]", "{{ n }}{{ n == n }}{{ n|string }}{{ n ~ '' }}")),
    ] {
        check(name, &template, false);
    }
    for (name, template) in [
        ("slices", nested("[1]", "n.x[0:]", "ok")),
        ("map", nested("[1]", "n.x|map('string')", "ok")),
        ("reverse", nested("[1]", "n.x|reverse", "ok")),
        ("once in itself", "{% set n = namespace() %}{% set n.x = n %}{{ n == n }}{{ n.x }}".into()),
        (
            "once in a list",
            "{% set n = namespace(a=1) %}{% set n.x = [n] %}{{ n.x }}{{ n.x|tojson }}{{ n.x == n.x }}".into(),
        ),
        ("sets", format!("{}{{{{ x == x }}}}", "{% set x = [x] %}".repeat(1900))),
        ("slice sets", format!("{{% set x = [1] %}}{}{{{{ x|length }}}}", "{% set x = x[0:] %}".repeat(1900))),
    ] {
        check(name, &template, true);
    }
}

#[test]
fn deep_syntax() {
    let chain = |start: &str, link: &str| format!("{{{{ {start}{} }}}}", link.repeat(MANY));
    let around = |open: &str, close: &str| format!("{{{{ {}1{} }}}}", open.repeat(MANY), close.repeat(MANY));
    let blocks = |open: &str, close: &str| format!("{}{}", open.repeat(MANY), close.repeat(MANY));
    for (name, template) in [
        ("+", chain("1", "+1")),
        ("~", chain("1", "~1")),
        ("and", chain("1", " and 1")),
        ("**", chain("1", "**1")),
        ("<", chain("1", "<2")),
        (".", chain("a", ".b")),
        ("[]", chain("a", "[0]")),
        ("()", chain("a", "()")),
        ("|", chain("a", "|upper")),
        ("is", chain("a", " is defined")),
        ("if", chain("a", " if 1")),
        ("else", format!("{{{{ {}1 }}}}", "1 if 0 else ".repeat(MANY))),
        ("not", format!("{{{{ {}1 }}}}", "not ".repeat(MANY))),
        ("-", format!("{{{{ {}1 }}}}", "-".repeat(MANY))),
        ("parentheses", around("(", ")")),
        ("brackets", around("[", "]")),
        ("braces", around("{1:", "}")),
        ("if blocks", blocks("{% if 1 %}", "{% endif %}")),
        ("for blocks", blocks("{% for a in [1] %}", "{% endfor %}")),
        ("macros", blocks("{% macro a() %}", "{% endmacro %}")),
        ("set blocks", blocks("{% set a %}", "{% endset %}")),
        ("with blocks", blocks("{% with %}", "{% endwith %}")),
        ("filter blocks", blocks("{% filter upper %}", "{% endfilter %}")),
        ("elif", format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}x".repeat(MANY))),
    ] {
        check(name, &template, false);
    }
}

#[test]
fn chains_within_the_limits_work() {
    for (template, expected) in [
        (format!("{{{{ 1{} }}}}", "+1".repeat(399)), "400"),
        (format!("{{{{ a{} }}}}", " if 1".repeat(399)), ""),
        (format!("{{{{ 'a'{} }}}}", "|upper".repeat(399)), "A"),
        (format!("{{{{ {}1 }}}}", "not ".repeat(399)), "False"),
        (format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}x".repeat(400)), ""),
    ] {
        assert_eq!(render(&template).unwrap(), expected);
    }
}

#[test]
fn nothing_but_the_variables_is_in_reach() {
    for template in [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__subclasses__() }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ self.__init__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends 'x' %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ open('/etc/passwd') }}",
    ] {
        check(template, template, true);
    }
}

#[test]
fn errors_carry_the_templates_words_in_one_line() {
    let error = render("a\n{{ raise_exception('Roles must\n alternate: \"x\"') }}").unwrap_err();
    assert_eq!(error, TextError::TemplateRaised("Roles must alternate: \"x\"".into()));
    assert_eq!(error.to_string(), "Roles must alternate: \"x\"");
    let inside = "{% macro f() %}{{ raise_exception('no') }}{% endmacro %}{% for i in [1] %}{{ f() }}{% endfor %}";
    assert_eq!(render(inside).unwrap_err(), TextError::TemplateRaised("no".into()));
    let failed = render("a\n{{ 'a' + 1 }}").unwrap_err().to_string();
    assert_eq!(failed, "chat template, line 2: invalid operation: unsupported operands of +: string and number");
    assert!(matches!(render("{% endfor %}"), Err(TextError::TemplateSyntax { line: 1, .. })));
    assert!(matches!(
        render("{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}"),
        Err(TextError::TemplateLimit(_))
    ));
}

#[test]
fn deep_messages_are_refused() {
    let mut deep = json!("x");
    for _ in 0..200 {
        deep = json!([deep]);
    }
    let template = ChatTemplate::new("{{ messages }}").unwrap();
    let input = ChatInput { messages: Some(&deep), ..ChatInput::default() };
    assert!(matches!(template.render(&input), Err(TextError::TemplateLimit(_))));
}

/// Bits of templates, whole and broken.
const PIECES: [&str; 40] = [
    "{{",
    "}}",
    "{%",
    "%}",
    "{#",
    "#}",
    "{%- ",
    " -%}",
    " if ",
    " else ",
    "for m in messages",
    "endfor",
    "endif",
    "set x = ",
    "set n.x = ",
    "messages",
    "[0]",
    "[::-1]",
    ".content",
    " | ",
    "tojson",
    "length",
    "('a', 2)",
    "namespace(x=1)",
    " + ",
    " * ",
    " % ",
    "'%s'",
    "\"",
    "[1, 2]",
    "{'a': none}",
    "x",
    "n.x",
    " is ",
    "string",
    " in ",
    "macro f(a)",
    "endmacro",
    "generation",
    "endgeneration",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn any_template(pieces in prop::collection::vec(prop::sample::select(PIECES.to_vec()), 0..24)) {
        if let Err(error) = render(&pieces.concat()) {
            prop_assert!(!error.to_string().contains('\n'), "{}", error);
        }
    }

    #[test]
    fn any_expression(pieces in prop::collection::vec(prop::sample::select(PIECES[8..].to_vec()), 0..10)) {
        let _ = render(&format!("{{% set n = namespace(x=[1]) %}}{{{{ {} }}}}", pieces.concat()));
    }
}
