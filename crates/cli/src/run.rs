//! `puna run`: one answer, or a conversation.

use crate::chat;
use crate::error::Error;
use crate::files;
use crate::inside::{
    CaptureArgs, Residuals, SteeringArgs, expert_stats_json, print_expert_stats, print_experts, print_timings,
    write_trace,
};
use crate::interrupt;
use crate::options::{DraftArgs, GrammarOptions, RunOptions, SamplingOptions, print_notices};
use crate::progress::{Progress, Unit};
use crate::tokenize::read_text;
use clap::Args;
use puna::inside::timings_json;
use puna::{Capture, Engine, Finish, Grammar, ModelFiles, Phase, Positions, Prompt, Request};
use puna::{State, Steering, Trace};
use puna_text::{AddBos, EncodeOptions};
use serde_json::{Value, json};
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Arguments of `puna run`.
#[derive(Args)]
pub struct RunArgs {
    /// GGUF file, or folder with config.json and safetensors
    pub model: PathBuf,
    /// The prompt; without one, a conversation in a terminal, or a prompt from standard input
    #[arg(short, long, value_name = "TEXT", conflicts_with = "file")]
    prompt: Option<String>,
    /// Read the prompt from a file; - is standard input
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Most tokens to generate [default: as many as the context holds]
    #[arg(short = 'n', long, value_name = "N")]
    max_tokens: Option<usize>,
    /// Continue the prompt as it is, without the model's chat template
    #[arg(long)]
    raw: bool,
    /// System message of the conversation
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    /// Use this chat template (Jinja) in place of the model's
    #[arg(long, value_name = "FILE", conflicts_with = "raw")]
    template: Option<PathBuf>,
    /// Text that ends the answer; may be repeated
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Print one JSON object in place of the text: text, token ids, finish reason, timings
    #[arg(long)]
    json: bool,
    /// Tell where the time went, and which experts were chosen
    #[arg(long)]
    profile: bool,
    /// Go on from where a file says, which --save-state wrote
    #[arg(long, value_name = "FILE", conflicts_with = "system")]
    load_state: Option<PathBuf>,
    /// Write what was said, with its keys and values, to a file at the end
    #[arg(long, value_name = "FILE")]
    save_state: Option<PathBuf>,
    /// Write what happened when, for chrome://tracing and Perfetto
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Where --capture writes (safetensors)
    #[arg(long, value_name = "FILE", default_value = "residuals.safetensors", requires = "capture")]
    capture_file: PathBuf,
    #[command(flatten)]
    capture: CaptureArgs,
    #[command(flatten)]
    steering: SteeringArgs,
    #[command(flatten)]
    grammar: GrammarOptions,
    #[command(flatten)]
    draft: DraftArgs,
    #[command(flatten)]
    pub options: RunOptions,
    #[command(flatten)]
    pub sampling: SamplingOptions,
}

/// Runs the command.
pub fn run(args: &RunArgs) -> Result<(), Error> {
    let is_chat = args.prompt.is_none() && args.file.is_none() && std::io::stdin().is_terminal();
    if is_chat && (args.raw || args.json || args.capture.is_wanted()) {
        return Err(Error::Input("a prompt is needed with --raw, --json and --capture: give one with -p or -f".into()));
    }
    let prompt = match (&args.prompt, is_chat) {
        (Some(prompt), _) => Some(prompt.clone()),
        (None, true) => None,
        (None, false) => Some(read_text(args.file.as_ref())?),
    };
    let capture_file = args.capture.is_wanted().then_some(&args.capture_file);
    args.trace.iter().chain(capture_file).chain(&args.save_state).try_for_each(|path| files::check(path))?;
    let mut session = Session::load(args)?;
    match prompt {
        None => chat::run(&mut session, args.system.as_deref())?,
        Some(prompt) => {
            session.catch_interrupts()?;
            session.start = Instant::now();
            if args.raw {
                let ids = session.encode(&prompt)?;
                session.answer(ids)?;
                session.save(&[])?;
            } else {
                let mut messages = session.first_messages(args.system.as_deref());
                messages.push(json!({ "role": "user", "content": prompt }));
                let ids = session.encode_messages(&messages)?;
                let answer = session.answer(ids)?;
                messages.push(json!({ "role": "assistant", "content": answer }));
                session.save(&messages)?;
            }
        }
    }
    match (&args.trace, session.engine.take_trace()) {
        (Some(path), Some(trace)) => write_trace(&trace, path),
        _ => Ok(()),
    }
}

/// A loaded model and how it is asked.
pub struct Session<'a> {
    pub engine: Engine,
    args: &'a RunArgs,
    template: Option<String>,
    grammar: Option<Grammar>,
    loading: Duration,
    /// What it goes on from.
    state: Option<State>,
    /// The last prompt and its answer.
    said: Vec<u32>,
    steering: Option<Arc<Steering>>,
    /// Layers and positions.
    capture: Option<(Vec<usize>, Positions)>,
    /// When work on the current answer began.
    pub start: Instant,
    bandwidth: Option<f64>,
    /// Set by Ctrl-C.
    interrupted: Arc<AtomicBool>,
}

impl<'a> Session<'a> {
    fn load(args: &'a RunArgs) -> Result<Session<'a>, Error> {
        let start = Instant::now();
        let files = ModelFiles::open(&args.model)?;
        print_notices(files.notices());
        let mut progress = Progress::new("loading", Unit::Bytes);
        let mut options = args.options.engine();
        options.draft = args.draft.engine();
        let mut engine = Engine::from_files(files, &options, &mut |done, total| progress.update(done, total))?;
        progress.finish();
        print_notices(engine.notices());
        let template = args.template.as_ref().map(|path| read_text(Some(path))).transpose()?;
        let grammar = args.grammar.compile(&engine)?;
        let loading = start.elapsed();
        let state = args.load_state.as_ref().map(|path| engine.load_state(path)).transpose()?;
        let steering = args.steering.steering(engine.config())?;
        let capture = args.capture.wanted(engine.config())?;
        let bandwidth = if args.profile { engine.model_mut().read_bandwidth() } else { None };
        if args.trace.is_some() {
            engine.trace(Trace::MAX_EVENTS);
        }
        Ok(Session {
            engine,
            args,
            template,
            grammar,
            loading,
            state,
            said: Vec::new(),
            steering,
            capture,
            start: Instant::now(),
            bandwidth,
            interrupted: Arc::default(),
        })
    }

    /// From here on Ctrl-C ends an answer; pressed again before it has ended, the program.
    pub fn catch_interrupts(&self) -> Result<(), Error> {
        interrupt::catch(&self.interrupted)
    }

    /// Forgets Ctrl-C that was pressed before now.
    pub fn forget_interrupt(&self) {
        self.interrupted.store(false, Ordering::SeqCst);
    }

    /// Ids of a text as it is, after those of the state.
    fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        let tokenizer = self.engine.tokenizer()?;
        let mut ids = Vec::new();
        let mut options = EncodeOptions::default();
        if let Some(state) = &self.state {
            let no_tokens = || Error::Input("the saved state has rows that are no tokens".into());
            ids.extend(state.tokens().ok_or_else(no_tokens)?);
            options.bos = AddBos::No;
        }
        ids.extend(tokenizer.encode(text, options).map_err(|e| puna::Error::text(&self.args.model, e))?);
        Ok(ids)
    }

    /// What a conversation begins with: what was said in the state, or the system message.
    pub fn first_messages(&self, system: Option<&str>) -> Vec<Value> {
        let note = self.state.as_ref().and_then(|state| serde_json::from_str::<Value>(state.note()).ok());
        match note.as_ref().and_then(|note| note["messages"].as_array()) {
            Some(messages) => messages.clone(),
            None => system.into_iter().map(|text| json!({ "role": "system", "content": text })).collect(),
        }
    }

    /// Saves what was said, where that is asked for.
    pub fn save(&mut self, messages: &[Value]) -> Result<(), Error> {
        let Some(path) = &self.args.save_state else { return Ok(()) };
        let note = json!({ "messages": messages }).to_string();
        let prompt = Prompt::from(self.said.clone());
        let kept = self.engine.save_state(&prompt, &note, path)?;
        eprintln!("[saved: {} tokens, {kept} of them with keys and values]", prompt.len());
        Ok(())
    }

    /// Ids of a conversation, ready for the answer.
    pub fn encode_messages(&self, messages: &[Value]) -> Result<Vec<u32>, Error> {
        Ok(self.engine.chat_prompt(messages, self.template.as_deref())?)
    }

    /// Generates an answer: the text to standard output as it comes (or one JSON object), the timings to standard
    /// error. Ctrl-C ends it.
    pub fn answer(&mut self, prompt: Vec<u32>) -> Result<String, Error> {
        let sampling = self.engine.sampling(&self.args.sampling.wishes());
        self.said.clone_from(&prompt);
        let mut request = Request::new(prompt, sampling);
        request.max_tokens = self.args.max_tokens;
        request.stop.clone_from(&self.args.stop);
        request.grammar.clone_from(&self.grammar);
        request.steering.clone_from(&self.steering);
        (request.timings, request.count_experts) = (self.args.profile, self.args.profile);
        let residuals = Residuals::default();
        let capture = |(layers, positions)| Capture { layers, positions, sink: residuals.sink() };
        request.capture = self.capture.clone().map(capture);
        let mut all: Vec<u32> = request.prompt.tokens().collect();
        let total = request.prompt.len() as u64;
        let mut progress = Progress::new("reading the prompt", Unit::Tokens);
        let (mut text, mut ids) = (String::new(), Vec::new());
        let mut printed: Result<(), std::io::Error> = Ok(());
        let (interrupted, as_json) = (&self.interrupted, self.args.json);
        // From here on the engine measures.
        let tokenize = self.start.elapsed();
        let mut finish = self.engine.generate(request, |event| {
            if event.token.is_none() && event.finish.is_none() {
                progress.update(event.computed as u64, total);
            } else {
                progress.finish();
            }
            ids.extend(event.token);
            text.push_str(&event.text);
            if !as_json && !event.text.is_empty() {
                let mut out = std::io::stdout();
                printed = out.write_all(event.text.as_bytes()).and_then(|()| out.flush());
            }
            printed.is_ok() && !interrupted.load(Ordering::SeqCst)
        })?;
        let end = Instant::now();
        progress.finish();
        self.said.extend(&ids);
        printed?;
        if !as_json {
            writeln!(std::io::stdout())?;
        }
        if let Some(timings) = &mut finish.timings {
            timings.add(Phase::Tokenize, tokenize, 0);
            timings.add(Phase::Write, end.elapsed(), 0);
        }
        let wall = self.start.elapsed();
        if as_json {
            writeln!(std::io::stdout(), "{}", self.report(&text, &ids, &finish))?;
        } else {
            eprintln!("{}", summary(&finish));
            finish.timings.iter().for_each(|timings| print_timings(timings, wall, self.bandwidth));
            finish.experts.iter().for_each(|counts| print_experts(counts));
        }
        if self.capture.is_some() {
            all.extend(&ids);
            residuals.write(&self.args.capture_file, self.engine.config().dim, &all)?;
        }
        if let Some(stats) = self.engine.expert_stats().filter(|_| !as_json) {
            print_expert_stats(&stats);
        }
        Ok(text)
    }

    fn report(&self, text: &str, ids: &[u32], finish: &Finish) -> Value {
        let s = &finish.stats;
        let mut report = json!({
            "text": text,
            "tokens": ids,
            "finish_reason": finish.reason.name(),
            "seed": s.seed,
            "expert_memory": self.engine.expert_stats().map(|stats| expert_stats_json(&stats)),
            "timings": {
                "load_s": self.loading.as_secs_f64(),
                "prompt_tokens": s.prompt_tokens,
                "cached_tokens": s.cached_tokens,
                "prompt_s": s.prompt_time.as_secs_f64(),
                "prompt_per_second": s.prompt_rate(),
                "generated_tokens": s.generated_tokens,
                "generate_s": s.generate_time.as_secs_f64(),
                "generated_per_second": s.generate_rate(),
                "drafted_tokens": s.drafted_tokens,
                "accepted_tokens": s.accepted_tokens,
            },
        });
        if let Some(timings) = &finish.timings {
            report["profile"] = timings_json(timings, self.bandwidth);
        }
        if let Some(counts) = &finish.experts {
            report["experts"] = counts.layers().map(|layer| json!(layer)).collect();
        }
        report
    }
}

fn summary(finish: &Finish) -> String {
    let s = &finish.stats;
    let drafted = if s.drafted_tokens > 0 {
        format!(", {} of {} guesses right", s.accepted_tokens, s.drafted_tokens)
    } else {
        String::new()
    };
    let cached = if s.cached_tokens > 0 { format!(" ({} kept)", s.cached_tokens) } else { String::new() };
    format!(
        "[prompt: {} tokens{cached}, {:.0} tokens/s; answer: {} tokens, {:.1} tokens/s{drafted}; {}; seed {}]",
        s.prompt_tokens,
        s.prompt_rate(),
        s.generated_tokens,
        s.generate_rate(),
        finish.reason.name(),
        s.seed,
    )
}
