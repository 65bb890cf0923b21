//! `puna batch`: many questions from a file, their answers to another.

mod input;
mod output;

use crate::error::Error;
use crate::inside::open_vectors;
use crate::interrupt;
use crate::options::{DraftArgs, RunOptions, name_and_value, print_notices};
use crate::progress::{Progress, Unit};
use clap::Args;
use input::{Input, Line, Task};
use output::{Output, Place};
use puna::{EmbedOptions, Engine, Event, ModelFiles, Request, RequestId};
use puna_server::openai::embeddings::EmbeddingRequest;
use puna_server::openai::{ApiError, Assemble, Card, Kind};
use serde_json::Value;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Arguments of `puna batch`.
#[derive(Args)]
pub struct BatchArgs {
    /// GGUF file, or folder with config.json and safetensors
    model: PathBuf,
    /// Questions: a JSON object a line, as OpenAI's batches have them, with custom_id, method, url and body
    input: PathBuf,
    /// Answers, a line each, as they are ready. Where the file has some already, only the others are computed
    output: PathBuf,
    /// Most answers that are worked on at once
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u16).range(1..))]
    parallel: u16,
    /// Control vector (GGUF) that questions may name in steering; may be repeated
    #[arg(long, value_name = "NAME=FILE", value_parser = name_and_value)]
    control_vector: Vec<(String, String)>,
    #[command(flatten)]
    draft: DraftArgs,
    #[command(flatten)]
    options: RunOptions,
}

/// Texts are embedded together when they have so many tokens: a few batches.
const GROUP: usize = 4096;

/// Answers every line of the input. Fails if a line of the output says that its question has failed.
pub fn run(args: &BatchArgs) -> Result<(), Error> {
    let input = Input::open(&args.input)?;
    let output = Output::open(&args.output)?;
    let files = ModelFiles::open(&args.model)?;
    print_notices(files.notices());
    let mut options = args.options.engine();
    options.max_running = args.parallel.into();
    options.draft = args.draft.engine();
    let options = options.for_files(&files);
    let mut loading = Progress::new("loading", Unit::Bytes);
    let mut engine = Engine::from_files(files, &options, &mut |done, total| loading.update(done, total))?;
    loading.finish();
    print_notices(engine.notices());
    let vectors = open_vectors(&args.control_vector)?;
    let card = Card { vectors, ..Card::new(puna_server::model_name(&args.model), &engine, &options) };

    let interrupted = Arc::new(AtomicBool::new(false));
    interrupt::catch(&interrupted)?;

    let old = output.old_lines();
    // Enough to wait that no place stays empty.
    let ahead = 2 * options.max_running;
    let mut batch = Batch { card, ahead, input, output, seen: HashMap::new(), ended: false, work: Work::default() };
    let result = batch.all(&mut engine, &interrupted);
    batch.output.sync().and(result)?;
    batch.report(args, old, interrupted.load(Ordering::SeqCst))
}

/// All that is to be done.
struct Batch {
    card: Card,
    /// Answers that run or wait in the engine.
    ahead: usize,
    input: Input,
    output: Output,
    /// Names so far, and their lines.
    seen: HashMap<String, u64>,
    /// Whether all lines have been read.
    ended: bool,
    work: Work,
}

/// What is on its way, and what has been done.
struct Work {
    /// Questions that generate, by their lines.
    talks: HashMap<u64, Talk>,
    /// Which line, and which of its requests.
    requests: HashMap<RequestId, (u64, usize)>,
    /// Answers that have not ended.
    answers: usize,
    texts: Vec<Texts>,
    progress: Progress,
    start: Instant,
    /// Lines that were answered or refused.
    lines: u64,
    /// Bytes of these lines.
    bytes: u64,
    /// Bytes of those that an earlier run had done.
    skipped: u64,
    prompt_tokens: usize,
    generated_tokens: usize,
}

impl Default for Work {
    fn default() -> Work {
        Work {
            talks: HashMap::new(),
            requests: HashMap::new(),
            answers: 0,
            texts: Vec::new(),
            progress: Progress::new("answering", Unit::Lines),
            start: Instant::now(),
            lines: 0,
            bytes: 0,
            skipped: 0,
            prompt_tokens: 0,
            generated_tokens: 0,
        }
    }
}

/// A question whose answers are being generated.
struct Talk {
    place: Place,
    len: u64,
    answer: Box<dyn Assemble>,
    /// Of its requests.
    left: usize,
    ids: Vec<RequestId>,
}

/// A question for embeddings.
struct Texts {
    place: Place,
    len: u64,
    request: EmbeddingRequest,
    ids: Vec<Vec<u32>>,
    options: EmbedOptions,
}

impl Batch {
    fn all(&mut self, engine: &mut Engine, interrupted: &AtomicBool) -> Result<(), Error> {
        let goes_on = || !interrupted.load(Ordering::SeqCst);
        while goes_on() {
            while goes_on() && !self.ended && self.work.answers < self.ahead && self.work.tokens_of_texts() < GROUP {
                match self.input.next()? {
                    Some(line) => self.take(engine, &line)?,
                    None => self.ended = true,
                }
            }
            if self.work.tokens_of_texts() >= GROUP || (engine.is_idle() && !self.work.texts.is_empty()) {
                self.embed(engine)?;
            } else if engine.is_idle() && self.ended {
                break;
            }
            if !engine.is_idle() {
                for event in engine.step()? {
                    self.work.hear(event, &mut self.output)?;
                }
                self.drop_failed(engine);
            }
            self.output.keep()?;
            self.work.show(&self.input, &self.output);
        }
        self.work.progress.finish();
        Ok(())
    }

    /// Takes a line that has not been answered: its work to where it is done, its fault to the output.
    fn take(&mut self, engine: &mut Engine, line: &Line) -> Result<(), Error> {
        let question = line.question();
        let custom_id = match &question {
            Ok(question) => Some(question.custom_id.clone()),
            Err(refusal) => refusal.custom_id.clone(),
        };
        let mut place = Place { line: line.number, custom_id };
        let first = place.custom_id.as_ref().and_then(|id| self.seen.get(id)).copied();
        let result = if let Some(first) = first {
            let id = place.custom_id.take().unwrap_or_default();
            let what = format!("custom_id: {id:?} is the name of line {first} already");
            let error = ApiError { param: Some("custom_id".into()), ..ApiError::new(Kind::Invalid, what) };
            Err(error.code("duplicate_custom_id"))
        } else {
            question.map_err(|refusal| refusal.error)
        };
        let is_old = match &place.custom_id {
            Some(id) => {
                self.seen.insert(id.clone(), line.number);
                self.output.old.ids.remove(id)
            }
            None => self.output.old.lines.remove(&line.number),
        };
        if is_old {
            self.work.skipped += line.len;
            return Ok(());
        }
        match result.and_then(|question| question.task(&self.card)) {
            Ok(Task::Embed(request, ids, options)) => {
                if self.work.texts.first().is_some_and(|texts| texts.options != options) {
                    self.embed(engine)?;
                }
                self.work.texts.push(Texts { place, len: line.len, request, ids, options });
                Ok(())
            }
            Ok(Task::Generate(requests, answer)) => match self.work.add(engine, line, place, requests, answer) {
                Ok(()) => Ok(()),
                Err((place, error)) => self.work.done(&mut self.output, &place, line.len, Err(&error)),
            },
            Err(error) => self.work.done(&mut self.output, &place, line.len, Err(&error)),
        }
    }

    /// Embeds the texts that are there.
    fn embed(&mut self, engine: &mut Engine) -> Result<(), Error> {
        let mut group = std::mem::take(&mut self.work.texts);
        while let Some(first) = group.first() {
            let options = first.options.clone();
            let texts: Vec<Vec<u32>> = group.iter().flat_map(|texts| &texts.ids).cloned().collect();
            match engine.embed(&texts, &options) {
                Ok(vectors) => {
                    let mut vectors = vectors.into_iter();
                    for Texts { place, len, request, ids, .. } in group.drain(..) {
                        let body = request.body(&self.card, &ids, vectors.by_ref().take(ids.len()).collect());
                        self.work.prompt_tokens += ids.iter().map(Vec::len).sum::<usize>();
                        self.work.done(&mut self.output, &place, len, Ok(body))?;
                    }
                }
                // One text is at fault: the others are computed without its line.
                Err(puna::Error::Embed { index, source }) => {
                    let ends = group.iter().scan(0, |end, texts| {
                        *end += texts.ids.len();
                        Some(*end)
                    });
                    let at = ends.take_while(|&end| end <= index).count();
                    let Texts { place, len, .. } = group.remove(at);
                    let error = ApiError::of_engine("input", &source);
                    self.work.done(&mut self.output, &place, len, Err(&error))?;
                }
                // The model does not embed, or memory has ended.
                Err(e) => {
                    let error = ApiError::of_engine("input", &e);
                    if error.kind != Kind::Invalid {
                        return Err(e.into());
                    }
                    for Texts { place, len, .. } in group.drain(..) {
                        self.work.done(&mut self.output, &place, len, Err(&error))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Ends what is left of questions of which one answer has failed.
    fn drop_failed(&mut self, engine: &mut Engine) {
        let Work { requests, talks, .. } = &mut self.work;
        requests.retain(|&id, (line, _)| {
            let is_wanted = talks.contains_key(line);
            if !is_wanted {
                engine.cancel(id);
            }
            is_wanted
        });
    }

    /// What there is to say at the end.
    fn report(&self, args: &BatchArgs, old: u64, is_interrupted: bool) -> Result<(), Error> {
        let (work, failed) = (&self.work, self.output.failed);
        let seconds = work.start.elapsed().as_secs_f64();
        let earlier = if old > 0 { format!(", {old} earlier") } else { String::new() };
        eprintln!(
            "[{} lines{earlier}, {failed} failed; prompts: {} tokens; answers: {} tokens, {:.1} tokens/s; {seconds:.1} s]",
            work.lines,
            work.prompt_tokens,
            work.generated_tokens,
            work.generated_tokens as f64 / seconds,
        );
        if is_interrupted {
            return Err(Error::file(
                &args.output,
                "interrupted; the same command goes on after the lines that are there",
            ));
        }
        match failed {
            0 => Ok(()),
            1 => Err(Error::file(&args.output, "1 line failed: its status_code is not 200")),
            n => Err(Error::file(&args.output, format!("{n} lines failed: their status_code is not 200"))),
        }
    }
}

impl Work {
    /// Gives a question to the engine.
    fn add(
        &mut self,
        engine: &mut Engine,
        line: &Line,
        place: Place,
        requests: Vec<Request>,
        answer: Box<dyn Assemble>,
    ) -> Result<(), (Place, ApiError)> {
        let mut talk = Talk { place, len: line.len, answer, left: 0, ids: Vec::new() };
        for (index, request) in requests.into_iter().enumerate() {
            let n = request.n;
            match engine.add(request) {
                Ok(id) => {
                    talk.left += n;
                    talk.ids.push(id);
                    self.requests.insert(id, (line.number, index));
                }
                Err(e) => {
                    for id in talk.ids {
                        engine.cancel(id);
                        self.requests.remove(&id);
                    }
                    return Err((talk.place, ApiError::of_engine("", &e)));
                }
            }
        }
        self.answers += talk.left;
        self.talks.insert(line.number, talk);
        Ok(())
    }

    /// Takes an event to where it belongs, and writes what is complete.
    fn hear(&mut self, event: &Event, output: &mut Output) -> Result<(), Error> {
        let Some(&(line, index)) = self.requests.get(&event.id) else { return Ok(()) };
        let Some(talk) = self.talks.get_mut(&line) else { return Ok(()) };
        self.generated_tokens += usize::from(event.token.is_some());
        let taken = talk.answer.take(index, event);
        if let Some(finish) = &event.finish {
            talk.left -= 1;
            self.answers -= 1;
            self.prompt_tokens += if event.sample == 0 { finish.stats.prompt_tokens } else { 0 };
        }
        if taken.is_ok() && talk.left > 0 {
            return Ok(());
        }
        let Some(mut talk) = self.talks.remove(&line) else { return Ok(()) };
        self.answers -= talk.left;
        match taken {
            Ok(()) => self.done(output, &talk.place, talk.len, Ok(talk.answer.body())),
            Err(e) => self.done(output, &talk.place, talk.len, Err(&e)),
        }
    }

    /// A line has come to its end.
    fn done(
        &mut self,
        output: &mut Output,
        place: &Place,
        len: u64,
        result: Result<Value, &ApiError>,
    ) -> Result<(), Error> {
        output.write(place, result)?;
        self.lines += 1;
        self.bytes += len;
        Ok(())
    }

    fn tokens_of_texts(&self) -> usize {
        self.texts.iter().flat_map(|texts| &texts.ids).map(Vec::len).sum()
    }

    fn show(&mut self, input: &Input, output: &Output) {
        let tokens = if self.generated_tokens > 0 { self.generated_tokens } else { self.prompt_tokens };
        let rate = tokens as f64 / self.start.elapsed().as_secs_f64();
        let failed = if output.failed > 0 { format!(", {} failed", output.failed) } else { String::new() };
        self.progress.update(self.bytes, input.size.saturating_sub(self.skipped));
        self.progress.say(|| format!("{} lines{failed}, {rate:.0} tokens/s", self.lines));
    }
}
