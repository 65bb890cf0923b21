//! `puna run`: one answer, or a conversation.

use crate::chat;
use crate::error::Error;
use crate::options::{DraftArgs, GrammarOptions, RunOptions, SamplingOptions, print_notices};
use crate::progress::{Progress, Unit};
use crate::tokenize::read_text;
use clap::Args;
use puna::{Engine, Finish, Grammar, ModelFiles, Request};
use puna_text::EncodeOptions;
use serde_json::{Value, json};
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Arguments of `puna run`.
#[derive(Args)]
pub struct RunArgs {
    /// GGUF file
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
    /// Tell how long each kind of operation took
    #[arg(long)]
    profile: bool,
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
    if is_chat && (args.raw || args.json) {
        return Err(Error::Input("a prompt is needed with --raw and --json: give one with -p or -f".into()));
    }
    let prompt = match (&args.prompt, is_chat) {
        (Some(prompt), _) => Some(prompt.clone()),
        (None, true) => None,
        (None, false) => Some(read_text(args.file.as_ref())?),
    };
    let mut session = Session::load(args)?;
    match prompt {
        None => chat::run(&mut session, args.system.as_deref()),
        Some(prompt) => {
            session.catch_interrupts()?;
            let ids = if args.raw {
                session.encode(&prompt)?
            } else {
                session.encode_chat(args.system.as_deref(), &prompt)?
            };
            session.answer(ids)?;
            Ok(())
        }
    }
}

/// A loaded model and how it is asked.
pub struct Session<'a> {
    pub engine: Engine,
    args: &'a RunArgs,
    template: Option<String>,
    grammar: Option<Grammar>,
    loading: Duration,
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
        options.load.profile = args.profile;
        options.draft = args.draft.engine();
        let engine = Engine::from_files(files, &options, &mut |done, total| progress.update(done, total))?;
        progress.finish();
        print_notices(engine.notices());
        let template = args.template.as_ref().map(|path| read_text(Some(path))).transpose()?;
        let grammar = args.grammar.compile(&engine)?;
        Ok(Session { engine, args, template, grammar, loading: start.elapsed(), interrupted: Arc::default() })
    }

    /// From here on Ctrl-C ends an answer; pressed again before it has ended, the program.
    pub fn catch_interrupts(&self) -> Result<(), Error> {
        let flag = self.interrupted.clone();
        let handler = move || {
            if flag.swap(true, Ordering::SeqCst) {
                std::process::exit(130);
            }
        };
        ctrlc::set_handler(handler).map_err(|e| Error::Input(format!("Ctrl-C cannot be handled: {e}")))
    }

    /// Forgets Ctrl-C that was pressed before now.
    pub fn forget_interrupt(&self) {
        self.interrupted.store(false, Ordering::SeqCst);
    }

    /// Ids of a text as it is.
    fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        let tokenizer = self.engine.tokenizer()?;
        Ok(tokenizer.encode(text, EncodeOptions::default()).map_err(|e| puna::Error::text(&self.args.model, e))?)
    }

    fn encode_chat(&self, system: Option<&str>, user: &str) -> Result<Vec<u32>, Error> {
        let mut messages: Vec<Value> = Vec::new();
        messages.extend(system.map(|text| json!({ "role": "system", "content": text })));
        messages.push(json!({ "role": "user", "content": user }));
        self.encode_messages(&messages)
    }

    /// Ids of a conversation, ready for the answer.
    pub fn encode_messages(&self, messages: &[Value]) -> Result<Vec<u32>, Error> {
        Ok(self.engine.chat_prompt(messages, self.template.as_deref())?)
    }

    /// Generates an answer: the text to standard output as it comes (or one JSON object), the timings to standard
    /// error. Ctrl-C ends it.
    pub fn answer(&mut self, prompt: Vec<u32>) -> Result<String, Error> {
        let sampling = self.engine.sampling(&self.args.sampling.wishes());
        let mut request = Request::new(prompt, sampling);
        request.max_tokens = self.args.max_tokens;
        request.stop.clone_from(&self.args.stop);
        request.grammar.clone_from(&self.grammar);
        let total = request.prompt.len() as u64;
        let mut progress = Progress::new("reading the prompt", Unit::Tokens);
        let (mut text, mut ids) = (String::new(), Vec::new());
        let mut printed: Result<(), std::io::Error> = Ok(());
        let (interrupted, as_json) = (&self.interrupted, self.args.json);
        let finish = self.engine.generate(request, |event| {
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
        progress.finish();
        printed?;
        if as_json {
            writeln!(std::io::stdout(), "{}", self.report(&text, &ids, &finish))?;
        } else {
            writeln!(std::io::stdout())?;
            eprintln!("{}", summary(&finish));
        }
        self.print_profile();
        Ok(text)
    }

    fn print_profile(&mut self) {
        let profile = self.engine.model_mut().take_profile();
        for (phase, time, calls) in profile.phases() {
            eprintln!("{phase:>14} {:>10.1} ms {calls:>8} calls", time.as_secs_f64() * 1e3);
        }
    }

    fn report(&self, text: &str, ids: &[u32], finish: &Finish) -> Value {
        let s = &finish.stats;
        json!({
            "text": text,
            "tokens": ids,
            "finish_reason": finish.reason.name(),
            "seed": s.seed,
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
        })
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
