//! What all requests share.

use crate::error::Error;
use crate::http::Guarded;
use crate::metrics::{HttpMetrics, ModelMetrics, render};
use crate::models::{Model, Models};
use crate::openai::{ApiError, Card, Kind, Vectors};
use crate::options::{Keys, Limits, Options};
use crate::prefixes::Prefixes;
use axum::body::Body;
use puna::Request;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use tokio::sync::{Semaphore, mpsc};

/// What all requests share.
pub(crate) struct App {
    pub models: Models,
    pub keys: Keys,
    pub limits: Limits,
    pub vectors: Vectors,
    /// Whether clients may add control vectors.
    pub uploads: bool,
    prefixes: Option<Arc<Prefixes>>,
    pub metrics: HttpMetrics,
    /// A permit for each KiB of a body that is being read.
    bodies: Arc<Semaphore>,
    /// A permit for each large body that is being worked on.
    large: Arc<Semaphore>,
    draining: AtomicBool,
    start: Instant,
}

/// From so many bytes on a body is large: tokenizing it can take seconds and a hundred times its memory. So many of them
/// are worked on at once, and small ones never wait for them.
const LARGE: usize = 256 << 10;
const LARGE_AT_ONCE: usize = 2;

impl App {
    /// Starts to load the models.
    ///
    /// # Errors
    /// As [`Prefixes::open`] and [`Models::start`].
    pub fn start(options: &Options, failed: mpsc::Sender<Error>) -> Result<App, Error> {
        let prefixes = Prefixes::open(options)?;
        Ok(App { prefixes, ..App::new(options, Models::start(options, failed)?) })
    }

    fn new(options: &Options, models: Models) -> App {
        let budget = (options.limits.body.saturating_mul(4) >> 10).clamp(1, Semaphore::MAX_PERMITS);
        App {
            models,
            keys: options.keys.clone(),
            limits: options.limits,
            vectors: options.vectors.clone(),
            uploads: options.uploads,
            prefixes: None,
            metrics: HttpMetrics::default(),
            bodies: Arc::new(Semaphore::new(budget)),
            large: Arc::new(Semaphore::new(LARGE_AT_ONCE)),
            draining: AtomicBool::new(false),
            start: Instant::now(),
        }
    }

    /// From here on no request for an answer is taken.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
    }

    /// Ends all requests.
    pub fn end(&self) {
        self.models.list.iter().for_each(|model| model.end());
    }

    /// Reads a request's body.
    ///
    /// # Errors
    /// It is too large, does not come in time, or too many others are being read.
    pub async fn read(&self, body: Body) -> Result<Guarded, ApiError> {
        if self.draining.load(Ordering::SeqCst) {
            return Err(ApiError::new(Kind::Unavailable, "the server is ending").code("draining"));
        }
        let reading = crate::http::read(body, self.limits.body, &self.bodies);
        let idle = self.limits.idle;
        let late = || ApiError::new(Kind::Timeout, format!("the body did not come within {} s", idle.as_secs_f64()));
        let mut body = tokio::time::timeout(idle, reading).await.map_err(|_| late())??;
        if body.len() > LARGE {
            // Nobody closes the semaphore.
            body.turn = self.large.clone().acquire_owned().await.ok();
        }
        Ok(body)
    }

    /// The model that a request names, and what is known of it.
    ///
    /// # Errors
    /// There is none of this name; it is being loaded.
    pub fn pick(&self, name: Option<&str>) -> Result<(Arc<Model>, Arc<Card>), ApiError> {
        let model = self.models.pick(name)?;
        Ok((model.clone(), model.card()?.clone()))
    }

    /// What keeps prefixes.
    ///
    /// # Errors
    /// Nothing does.
    pub fn prefixes(&self) -> Result<&Arc<Prefixes>, ApiError> {
        self.prefixes.as_ref().ok_or_else(|| ApiError::no_prefixes(Kind::Forbidden))
    }

    /// Puts the prefix that requests name into the cache of their model, as far as it is of use to them.
    ///
    /// # Errors
    /// There is no such prefix, it is damaged or of another model.
    pub async fn load_prefix(&self, model: &Arc<Model>, name: &str, requests: &[Request]) -> Result<(), ApiError> {
        let loaded = self.prefixes()?.load(model, name, requests).await;
        loaded.map_err(|e| ApiError { param: Some("prefix".into()), ..e })
    }

    /// Models that can be asked.
    pub fn cards(&self) -> Vec<Arc<Card>> {
        self.models.list.iter().filter_map(|model| model.card().ok().cloned()).collect()
    }

    /// Whether requests can be answered: `ok`, or why not.
    pub fn health(&self) -> Result<(), ApiError> {
        let not_now = |status: &'static str| Err(ApiError::new(Kind::Unavailable, status).code(status));
        if self.draining.load(Ordering::SeqCst) {
            return not_now("draining");
        }
        if self.models.list.iter().any(|model| model.has_ended()) {
            return not_now("failed");
        }
        if self.models.list.iter().all(|model| model.is_loaded()) { Ok(()) } else { not_now("loading") }
    }

    /// For Prometheus.
    pub fn render_metrics(&self) -> String {
        let models: Vec<(&str, &ModelMetrics)> =
            self.models.list.iter().map(|model| (model.id.as_str(), &*model.metrics)).collect();
        render(&self.metrics, &models)
    }

    /// What every model works on.
    pub async fn slots(&self) -> Value {
        let mut models = Vec::new();
        for model in &self.models.list {
            let (metrics, slots) = (&model.metrics, model.slots().await);
            let slot = |slot: &crate::worker::Slot| {
                let seconds = slot.generating.map_or(0.0, |time| time.as_secs_f64());
                // The first token comes with the prompt.
                let rate =
                    if seconds > 0.0 { slot.generated.saturating_sub(slot.answers) as f64 / seconds } else { 0.0 };
                json!({
                    "id": &*slot.name,
                    "state": if slot.is_running { "running" } else { "waiting" },
                    "answers": slot.answers,
                    "prompt_tokens": slot.prompt_tokens,
                    "computed_tokens": slot.computed,
                    "generated_tokens": slot.generated,
                    "tokens_per_second": rate,
                    "seconds": slot.age.as_secs_f64(),
                })
            };
            models.push(json!({
                "model": model.id,
                "state": state(model),
                "running": metrics.running.get(),
                "waiting": metrics.waiting.get(),
                "kv_usage": metrics.kv_usage.get(),
                "kv_held_bytes": metrics.kv_held.get(),
                "kv_cached_bytes": metrics.kv_cached.get(),
                "kv_limit_bytes": metrics.kv_limit.get(),
                "prompt_tokens_total": metrics.prompt_tokens.get(),
                "generated_tokens_total": metrics.generated_tokens.get(),
                "slots": slots.iter().map(slot).collect::<Vec<Value>>(),
            }));
        }
        json!({ "uptime_seconds": self.start.elapsed().as_secs_f64(), "models": models })
    }

    /// What the server and its models are.
    pub fn props(&self) -> Value {
        let model = |(at, model): (usize, &Arc<Model>)| {
            let mut value = json!({ "id": model.id, "aliases": self.models.aliases(at), "state": state(model) });
            if let Ok(card) = model.card() {
                value["max_model_len"] = json!(card.ctx);
                value["max_tokens"] = json!(card.max_tokens);
                value["vocab_size"] = json!(card.vocab_size);
                value["embedding_size"] = json!(card.dim);
                value["system_fingerprint"] = json!(card.fingerprint);
                value["chat_template"] = json!(card.chat.template());
                value["sampling"] = json!(card.sampling);
            }
            value
        };
        let limits = &self.limits;
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "models": self.models.list.iter().enumerate().map(model).collect::<Vec<Value>>(),
            "limits": {
                "body_bytes": limits.body,
                "queue": limits.queue,
                "request_seconds": limits.request.as_secs_f64(),
            },
        })
    }
}

fn state(model: &Model) -> &'static str {
    match (model.has_ended(), model.is_loaded()) {
        (true, _) => "failed",
        (false, true) => "ready",
        (false, false) => "loading",
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn while_a_model_is_loaded_nothing_is_answered() {
        // Its commands are read by nobody: it stays as it is.
        let options = Options::new(vec!["a.gguf".into()]);
        let (models, _commands) = Models::unloaded(&options);
        let app = App::new(&options, models);
        assert_eq!(app.health().unwrap_err().code, Some("loading"));
        let Err(error) = app.pick(None) else { panic!("it is not loaded") };
        assert_eq!((error.kind.status(), error.code), (503, Some("model_loading")));
        assert_eq!(app.props()["models"][0]["state"], "loading");
        app.drain();
        assert_eq!(app.health().unwrap_err().code, Some("draining"));
    }

    #[test]
    fn large_bodies_take_turns_and_small_ones_pass() {
        let options = Options::new(vec!["a.gguf".into()]);
        let (models, _commands) = Models::unloaded(&options);
        let app = App::new(&options, models);
        let read = async |len: usize| {
            let reading = app.read(Body::from(vec![b' '; len]));
            tokio::time::timeout(std::time::Duration::from_millis(100), reading).await.ok().map(Result::unwrap)
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut held: Vec<Guarded> = Vec::new();
            for _ in 0..LARGE_AT_ONCE {
                held.extend(read(LARGE + 1).await);
            }
            assert_eq!(held.len(), LARGE_AT_ONCE);
            assert!(read(LARGE + 1).await.is_none(), "one too many is worked on");
            assert!(read(LARGE).await.is_some(), "a small one waits");
            held.pop();
            assert!(read(LARGE + 1).await.is_some());
        });
    }
}
