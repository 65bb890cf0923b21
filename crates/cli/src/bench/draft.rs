//! Speed with drafts and without, and how often guesses are right.

use super::{BenchArgs, fields, median, print, round, speeds};
use crate::error::Error;
use crate::inside::{print_timings, write_trace};
use crate::options::print_notices;
use crate::tokenize::read_text;
use puna::sampler::PartialSampling;
use puna::{DraftBy, DraftOptions, Engine, EngineOptions, FinishReason, Request, Timings, Trace};
use puna_text::EncodeOptions;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

/// A text whose answer says again most of it.
const EDIT: &str = include_str!("edit.txt");

/// Runs the tests of drafts: answers of each number of sequences, with drafts and without in turn.
pub fn run(args: &BenchArgs, wish: DraftOptions) -> Result<(), Error> {
    let (max, by) = (wish.max, name(&wish.by));
    let options =
        EngineOptions { load: args.load.load(), kv: args.load.kv, draft: Some(wish), ..EngineOptions::default() };
    let text = args.file.as_ref().map_or_else(|| Ok(EDIT.to_owned()), |path| read_text(Some(path)))?;
    let start = Instant::now();
    let mut engine = Engine::load(&args.model, &options, &mut |_, _| {})?;
    let seconds = start.elapsed().as_secs_f64();
    print_notices(engine.notices());
    print("load", fields(json!({ "seconds": round(seconds, 3) })), None)?;
    let ids = encode(&engine, &text, &args.model)?;
    let sampling = engine.sampling(&PartialSampling { temperature: Some(0.0), ..PartialSampling::default() });
    let mut request = Request::new(ids, sampling);
    request.max_tokens = Some(args.generate);
    if args.trace.is_some() {
        engine.trace(Trace::MAX_EVENTS);
    }
    engine.set_timing(args.profile || args.trace.is_some());
    for &n in &args.batch {
        let test = if n == 1 { format!("draft-{by}") } else { format!("draft-{by}-b{n}") };
        let (plain, with) = alternate(&mut engine, &mut request, n, args.repeat)?;
        let mut line = fields(json!({ "draft_max": max, "prompt_tokens": request.prompt.len() }));
        line.extend(with.line(&plain));
        line.extend(fields(json!({
            "threads": engine.threads(),
            "isa": options.load.isa.name(),
            "kv": options.kv.for_heads_of(engine.config().head_dim).name(),
        })));
        print(&test, line, None)?;
        if args.profile {
            eprintln!("{test}:");
            print_timings(&with.timings, with.all.wall, None);
        }
    }
    match (&args.trace, engine.take_trace()) {
        (Some(path), Some(trace)) => write_trace(&trace, path),
        _ => Ok(()),
    }
}

fn name(by: &DraftBy) -> &'static str {
    match by {
        DraftBy::Lookup => "ngram",
        DraftBy::Model(_) => "model",
    }
}

/// Rounds without drafts and with them, in turn.
fn alternate(engine: &mut Engine, request: &mut Request, n: usize, repeat: usize) -> Result<(Rounds, Rounds), Error> {
    let mut rounds = (Rounds::default(), Rounds::default());
    for i in 0..=repeat.max(1) {
        for (draft, of) in [(false, &mut rounds.0), (true, &mut rounds.1)] {
            request.draft = draft;
            let begin = engine.timings();
            let round = Round::run(engine, request, n)?;
            // The first ones warm up, and find out what rows cost.
            if i > 0 {
                of.add(&round, &engine.timings().since(&begin));
            }
        }
    }
    if rounds.0.rates.is_empty() || rounds.1.rates.is_empty() {
        return Err(Error::Input("no token came after an answer's first one: there is nothing to be guessed".into()));
    }
    Ok(rounds)
}

/// A message, or a text that goes on where there is no chat template.
fn encode(engine: &Engine, text: &str, path: &Path) -> Result<Vec<u32>, Error> {
    if engine.template().is_ok() {
        return Ok(engine.chat_prompt(&[json!({ "role": "user", "content": text })], None)?);
    }
    let ids = engine.tokenizer()?.encode(text, EncodeOptions::default());
    Ok(ids.map_err(|e| puna::Error::text(path, e))?)
}

/// Sequences that answer the same, from when all of them generate.
#[derive(Default)]
struct Round {
    tokens: usize,
    time: Duration,
    /// Steps, each counted once for each sequence that generates.
    rows: usize,
    drafted: usize,
    accepted: usize,
    /// From before the prompt to the end.
    wall: Duration,
}

impl Round {
    fn run(engine: &mut Engine, request: &Request, n: usize) -> Result<Round, Error> {
        let (mut round, mut begun, start) = (Round::default(), BTreeSet::new(), Instant::now());
        for _ in 0..n {
            engine.add(request.clone())?;
        }
        while !engine.is_idle() {
            let (running, is_counted, step) = (engine.status().running, begun.len() == n, Instant::now());
            for event in engine.step()? {
                begun.extend(event.token.map(|_| event.id));
                round.tokens += usize::from(event.token.is_some() && is_counted);
                let Some(finish) = &event.finish else { continue };
                if let FinishReason::Error(e) = &finish.reason {
                    return Err(e.clone().into());
                }
                round.drafted += finish.stats.drafted_tokens;
                round.accepted += finish.stats.accepted_tokens;
            }
            if is_counted {
                round.time += step.elapsed();
                round.rows += running;
            }
        }
        round.wall = start.elapsed();
        Ok(round)
    }

    /// Tokens a second of all sequences together; `None` where none was counted.
    fn rate(&self) -> Option<f64> {
        (self.tokens > 0).then(|| self.tokens as f64 / self.time.as_secs_f64())
    }
}

/// Rounds of a test.
#[derive(Default)]
struct Rounds {
    rates: Vec<f64>,
    all: Round,
    timings: Timings,
}

impl Rounds {
    fn add(&mut self, round: &Round, timings: &Timings) {
        self.rates.extend(round.rate());
        self.all.tokens += round.tokens;
        self.all.rows += round.rows;
        self.all.drafted += round.drafted;
        self.all.accepted += round.accepted;
        self.all.wall += round.wall;
        self.timings.add_share(timings, 1.0);
    }

    /// What drafts brought, beside rounds without.
    fn line(&self, plain: &Rounds) -> Map<String, Value> {
        let all = &self.all;
        let median_of = |rounds: &Rounds| {
            let mut rates = rounds.rates.clone();
            rates.sort_by(f64::total_cmp);
            median(&rates)
        };
        let (with, without) = (median_of(self), median_of(plain));
        let mut line = speeds(self.rates.clone());
        line.extend(fields(json!({
            "tokens": all.tokens,
            "plain_ts": round(without, 2),
            "speedup": round(with / without, 3),
            "drafted": all.drafted,
            "accepted": all.accepted,
            "accepted_share": (all.drafted > 0).then(|| round(all.accepted as f64 / all.drafted as f64, 3)),
            "tokens_per_step": round(all.tokens as f64 / all.rows as f64, 3),
        })));
        line
    }
}
