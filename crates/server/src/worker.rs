//! A thread for each model: it owns the engine, takes commands between steps, and tells each request what came of it.
//!
//! Nobody else touches an engine. A request whose receiver is gone is cancelled before the next step; where there is
//! nothing to compute the thread sleeps until a command comes.

use crate::metrics::{Counter, ModelMetrics};
use crate::openai::prefixes::Beginning;
use crate::openai::{ApiError, Kind, finish_reason};
use crate::transfers::{Move, Transfers, Trouble};
use puna::{EmbedOptions, Embedding, Engine, Error, Event, Finish, FinishReason, Prompt, Request, RequestId, State};
use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc::UnboundedSender, oneshot};

/// What a request hears: which of its prompts, and what happened.
pub(crate) type Said = (usize, Result<Event, Error>);

/// What the thread is asked.
pub(crate) enum Command {
    /// Answer requests. The channel of events closes when all their answers have ended.
    Generate {
        /// Of the HTTP request, for people who look at what runs.
        name: Arc<str>,
        requests: Vec<Request>,
        /// Whether they can be answered: told before any event.
        accepted: oneshot::Sender<Result<(), Error>>,
        events: UnboundedSender<Said>,
    },
    /// Embed texts.
    Embed { texts: Vec<Vec<u32>>, options: EmbedOptions, reply: oneshot::Sender<Result<Vec<Vec<f32>>, Error>> },
    /// Compute the beginning of prompts, and begin to save it.
    Keep(Box<Keep>),
    /// Tell whether requests of one of these prompts could take more from the cache if the state were there.
    Lacks { prompts: Vec<Prompt>, state: Arc<State>, reply: oneshot::Sender<Result<bool, Error>> },
    /// Move a state, by its number.
    Move(u64, Move),
    /// Tell what is being worked on.
    Slots(oneshot::Sender<Vec<Slot>>),
    /// End all requests.
    End,
}

/// A beginning of prompts that is to be saved.
pub(crate) struct Keep {
    /// Of the HTTP request.
    pub name: Arc<str>,
    pub beginning: Beginning,
    /// Most bytes of its file.
    pub most_bytes: u64,
    /// Number of the transfer that begins when it is computed.
    pub transfer: u64,
    /// Told then.
    pub reply: oneshot::Sender<Result<(), ApiError>>,
}

/// A request that is worked on or waits.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    pub name: Arc<str>,
    pub is_running: bool,
    pub answers: usize,
    pub prompt_tokens: usize,
    pub computed: usize,
    pub generated: usize,
    /// Since the first token.
    pub generating: Option<Duration>,
    /// Since it came.
    pub age: Duration,
}

/// A request in the engine.
struct Active {
    name: Arc<str>,
    index: usize,
    listener: Listener,
    arrival: Instant,
    prompt_tokens: usize,
    answers: usize,
    /// Answers that have not ended.
    left: usize,
    generated: usize,
    first_token: Option<Instant>,
    /// Of each answer.
    last_token: Vec<Option<Instant>>,
}

/// Who hears of a request.
enum Listener {
    Events(UnboundedSender<Said>),
    /// Nobody before it is computed.
    Keep(Box<ToKeep>),
}

/// What is saved when it is computed.
struct ToKeep {
    prompt: Prompt,
    note: String,
    transfer: u64,
    reply: oneshot::Sender<Result<(), ApiError>>,
}

impl Listener {
    /// Whether nobody does any more.
    fn is_gone(&self) -> bool {
        match self {
            Listener::Events(events) => events.is_closed(),
            Listener::Keep(keep) => keep.reply.is_closed(),
        }
    }
}

/// Texts that are being embedded.
struct Job {
    embedding: Embedding<'static>,
    tokens: usize,
    reply: oneshot::Sender<Result<Vec<Vec<f32>>, Error>>,
}

pub(crate) struct Worker {
    engine: Engine,
    commands: Receiver<Command>,
    active: HashMap<RequestId, Active>,
    /// In their order: one after the other.
    jobs: VecDeque<Job>,
    transfers: Transfers,
    metrics: Arc<ModelMetrics>,
}

impl Worker {
    pub fn new(engine: Engine, commands: Receiver<Command>, metrics: Arc<ModelMetrics>) -> Worker {
        let (active, jobs, transfers) = (HashMap::new(), VecDeque::new(), Transfers::default());
        Worker { engine, commands, active, jobs, transfers, metrics }
    }

    /// Works until nobody can ask any more.
    pub fn run(mut self) {
        self.publish();
        while self.take_commands() {
            self.drop_gone();
            if !self.engine.is_idle() {
                self.step();
            }
            self.transfers.serve(&mut self.engine, &self.metrics);
            self.embed();
            self.publish();
        }
    }

    /// Takes all commands that are there; waits for one if there is nothing else to do. False at the end.
    fn take_commands(&mut self) -> bool {
        if self.engine.is_idle() && self.jobs.is_empty() && !self.transfers.are_asked() {
            match self.commands.recv() {
                Ok(command) => self.take(command),
                Err(_) => return false,
            }
        }
        loop {
            match self.commands.try_recv() {
                Ok(command) => self.take(command),
                // Requests that are left are cancelled, since nobody listens.
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => return true,
            }
        }
    }

    // A receiver that is gone is found by `drop_gone`; that nobody hears is no failure.
    fn take(&mut self, command: Command) {
        match command {
            Command::Generate { name, requests, accepted, events } => {
                let result = self.generate(&name, requests, &events);
                let _ = accepted.send(result);
            }
            Command::Embed { texts, options, reply } => {
                let tokens = texts.iter().map(Vec::len).sum();
                match self.engine.embedding(Cow::Owned(texts), &options) {
                    Ok(embedding) => self.jobs.push_back(Job { embedding, tokens, reply }),
                    Err(e) => drop(reply.send(Err(e))),
                }
            }
            Command::Keep(keep) => self.keep(*keep),
            Command::Lacks { prompts, state, reply } => {
                let mut lacks = prompts.iter().map(|prompt| self.engine.lacks(prompt, &state));
                let any = lacks.try_fold(false, |any, lacks| lacks.map(|lacks| any | lacks));
                drop(reply.send(any));
            }
            Command::Move(id, what) => self.transfers.take(&mut self.engine, id, what),
            Command::Slots(reply) => drop(reply.send(self.slots())),
            Command::End => {
                for id in self.active.keys().copied().collect::<Vec<_>>() {
                    self.cancel(id);
                }
                self.jobs.clear();
                self.transfers.end_all(&mut self.engine);
            }
        }
    }

    /// Takes all of the requests or none.
    fn generate(
        &mut self,
        name: &Arc<str>,
        requests: Vec<Request>,
        events: &UnboundedSender<Said>,
    ) -> Result<(), Error> {
        let mut taken = Vec::new();
        for (index, request) in requests.into_iter().enumerate() {
            let listener = Listener::Events(events.clone());
            match self.add((name.clone(), index), request, listener) {
                Ok(id) => taken.push(id),
                Err((e, _)) => {
                    taken.iter().for_each(|&id| self.forget(id));
                    return Err(e);
                }
            }
        }
        Ok(())
    }

    /// Takes a request, or gives back who would have heard of it.
    fn add(
        &mut self,
        (name, index): (Arc<str>, usize),
        request: Request,
        listener: Listener,
    ) -> Result<RequestId, (Error, Listener)> {
        let (prompt_tokens, answers) = (request.prompt.len(), request.n);
        self.metrics.prompt_len.observe(prompt_tokens as f64);
        self.metrics.answers.observe(answers as f64);
        if let Some(most) = request.max_tokens {
            self.metrics.max_tokens.observe(most as f64);
        }
        let id = match self.engine.add(request) {
            Ok(id) => id,
            Err(e) => return Err((e, listener)),
        };
        let active = Active {
            name,
            index,
            listener,
            arrival: Instant::now(),
            prompt_tokens,
            answers,
            left: answers,
            generated: 0,
            first_token: None,
            last_token: vec![None; answers],
        };
        self.active.insert(id, active);
        Ok(id)
    }

    /// Takes the beginning of prompts, if its file is not too large.
    fn keep(&mut self, keep: Keep) {
        let Keep { name, beginning: Beginning { request, note }, most_bytes, transfer, reply } = keep;
        match self.engine.state_bytes(&request.prompt, &note) {
            Ok(bytes) if bytes > most_bytes => drop(reply.send(Err(ApiError::prefixes_full(bytes, most_bytes)))),
            Ok(_) => {
                let to_keep = Box::new(ToKeep { prompt: request.prompt.clone(), note, transfer, reply });
                if let Err((e, Listener::Keep(keep))) = self.add((name, 0), request, Listener::Keep(to_keep)) {
                    drop(keep.reply.send(Err(ApiError::of_engine("", &e))));
                }
            }
            Err(e) => drop(reply.send(Err(ApiError::of_engine("", &e)))),
        }
    }

    /// It is computed, or not: its blocks are held before anybody else can take them.
    fn has_computed(&mut self, keep: ToKeep, reason: &FinishReason) {
        let ToKeep { prompt, note, transfer, reply } = keep;
        let whole = prompt.len();
        let begun = finish_reason(reason, "").and_then(|_| {
            let saving = self.engine.begin_save(&prompt, &note).map_err(|e| ApiError::of_engine("", &e))?;
            if saving.positions() < whole {
                self.engine.end_save(saving);
                return Err(Trouble::from(puna_model::Error::BlocksTaken).into());
            }
            self.transfers.begin(transfer, saving);
            Ok(())
        });
        if reply.send(begun).is_err() {
            self.transfers.take(&mut self.engine, transfer, Move::End);
        }
    }

    fn forget(&mut self, id: RequestId) {
        self.active.remove(&id);
        self.engine.cancel(id);
    }

    /// Ends a request; whoever listens hears it.
    fn cancel(&mut self, id: RequestId) {
        for event in self.engine.cancel(id) {
            self.tell(&event, Instant::now());
        }
        self.active.remove(&id);
    }

    /// Ends what nobody waits for any more.
    fn drop_gone(&mut self) {
        let gone = self.active.iter().filter(|(_, active)| active.listener.is_gone());
        for id in gone.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.cancel(id);
        }
        self.jobs.retain(|job| !job.reply.is_closed());
    }

    fn step(&mut self) {
        let events = match self.engine.step() {
            Ok(events) => events.to_vec(),
            Err(e) => return self.fail(&e),
        };
        self.metrics.step_rows.observe(self.engine.step_rows() as f64);
        let now = Instant::now();
        events.iter().for_each(|event| self.tell(event, now));
    }

    /// No batch can be computed: everybody hears why.
    fn fail(&mut self, e: &Error) {
        tracing::error!(error = %e, "a step failed: all requests end");
        for id in self.active.keys().copied().collect::<Vec<_>>() {
            self.engine.cancel(id);
            if let Some(active) = self.active.remove(&id) {
                self.metrics.ended[3].add(active.left);
                match active.listener {
                    Listener::Events(events) => drop(events.send((active.index, Err(e.clone())))),
                    Listener::Keep(keep) => drop(keep.reply.send(Err(ApiError::of_engine("", e)))),
                }
            }
        }
    }

    fn tell(&mut self, event: &Event, now: Instant) {
        let Some(active) = self.active.get_mut(&event.id) else { return };
        if event.token.is_some() {
            active.generated += 1;
            self.metrics.generated_tokens.add(1);
            if active.first_token.is_none() {
                active.first_token = Some(now);
                self.metrics.first_token.time(now - active.arrival);
            }
            if let Some(last) = active.last_token.get_mut(event.sample).and_then(|last| last.replace(now)) {
                self.metrics.inter_token.time(now - last);
            }
        }
        if let Listener::Events(events) = &active.listener {
            let _ = events.send((active.index, Ok(event.clone())));
        }
        if let Some(finish) = &event.finish {
            self.metrics.whole.time(now - active.arrival);
            active.left -= 1;
            let has_ended = active.left == 0;
            record(&self.metrics, event.sample, finish);
            // What is wrong with a request is told to its client; what is wrong here, to whoever reads the log.
            if let FinishReason::Error(e) = &finish.reason
                && ApiError::of_engine("", e).kind == Kind::Server
            {
                tracing::error!(request = &*active.name, error = %e, "an answer failed");
            }
            if has_ended && let Some(Active { listener: Listener::Keep(keep), .. }) = self.active.remove(&event.id) {
                self.has_computed(*keep, &finish.reason);
            }
        }
    }

    /// A part of the texts that are to be embedded, as large as those who generate can bear.
    fn embed(&mut self) {
        let rows = self.engine.spare_rows();
        let Some(job) = self.jobs.front_mut() else { return };
        let result = self.engine.advance(&mut job.embedding, rows);
        if matches!(result, Ok(false)) {
            return;
        }
        if let Some(job) = self.jobs.pop_front() {
            self.metrics.embedded_tokens.add(job.tokens);
            let _ = job.reply.send(result.map(|_| job.embedding.into_embeddings()));
        }
    }

    fn slots(&self) -> Vec<Slot> {
        let mut active: Vec<(&RequestId, &Active)> = self.active.iter().collect();
        active.sort_by_key(|(id, _)| **id);
        let slot = |(id, active): (&RequestId, &Active)| {
            let computed = self.engine.computed(*id);
            Slot {
                name: active.name.clone(),
                is_running: computed.is_some() || active.generated > 0,
                answers: active.answers,
                prompt_tokens: active.prompt_tokens,
                computed: computed.unwrap_or(0),
                generated: active.generated,
                generating: active.first_token.map(|first| first.elapsed()),
                age: active.arrival.elapsed(),
            }
        };
        active.into_iter().map(slot).collect()
    }

    fn publish(&self) {
        let (status, metrics) = (self.engine.status(), &self.metrics);
        metrics.kv_usage.set(status.kv_held as f64 / status.kv_limit.max(1) as f64);
        metrics.kv_held.set(status.kv_held as f64);
        metrics.kv_cached.set(status.kv_cached as f64);
        metrics.kv_limit.set(status.kv_limit as f64);
        metrics.set_drafts(&status.drafts);
        self.engine.expert_stats().iter().for_each(|stats| metrics.set_expert_reads(stats));
        if let Some(counts) = self.engine.experts() {
            let new = || (0..counts.n_experts()).map(|_| Counter::default()).collect();
            let layers = metrics.experts.get_or_init(|| counts.layers().map(|_| new()).collect());
            let pairs = layers.iter().zip(counts.layers()).flat_map(|(to, from)| to.iter().zip(from));
            pairs.for_each(|(counter, count)| counter.set(*count));
        }
        // At last: who reads that nothing runs any more reads what is true of that in the others.
        metrics.waiting.set((status.waiting + self.jobs.len()) as f64);
        metrics.running.set(status.running as f64);
    }
}

/// Takes note of how an answer ended. What is the prompt's is counted with the first answer.
fn record(metrics: &ModelMetrics, sample: usize, finish: &Finish) {
    let stats = &finish.stats;
    let reason = match finish.reason {
        FinishReason::Stop => 0,
        FinishReason::Length => 1,
        FinishReason::Cancelled => 2,
        FinishReason::Error(_) => 3,
    };
    metrics.ended[reason].add(1);
    metrics.preemptions.add(stats.preemptions);
    if sample == 0 {
        metrics.prompt_tokens.add(stats.prompt_tokens);
        metrics.cache_queries.add(stats.prompt_tokens);
        metrics.cache_hits.add(stats.cached_tokens);
        metrics.queue.time(stats.queue_time);
        metrics.prefill.time(stats.prompt_time);
    }
    metrics.decode.time(stats.generate_time);
    metrics.inference.time(stats.prompt_time + stats.generate_time);
    metrics.answer_len.observe(stats.generated_tokens as f64);
}
