//! Answers on their way to a client: as a whole, or as a stream of events.

use crate::app::App;
use crate::http::{event_stream, frame, json};
use crate::models::{Accepted, Model};
use crate::openai::{Answer, ApiError, Assemble, Job, Kind, Stream};
use crate::worker::Said;
use axum::body::{Body, Bytes};
use axum::http::StatusCode;
use axum::response::Response;
use puna::Event;
use serde_json::Value;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout, timeout_at};

/// Answers a request.
///
/// # Errors
/// Whatever keeps it from being answered, as long as nothing has been sent.
pub(crate) async fn answer(app: &App, model: &Arc<Model>, name: Arc<str>, mut job: Job) -> Result<Response, ApiError> {
    let left = job.requests.iter().map(|request| request.n).sum();
    let (start, limit) = (Instant::now(), app.limits.request);
    let deadline = start + limit;
    let place = model.place(left)?;
    job.requests.iter_mut().for_each(|request| request.arrival = Some(start.into_std()));
    if let Some(prefix) = &job.prefix {
        let loading = app.load_prefix(model, prefix, &job.requests);
        timeout_at(deadline, loading).await.map_err(|_| late(limit))??;
    }
    let accepted = model.generate(name.clone(), &mut job, place).await?;
    let talk = Talk { name, accepted, left, tokens: 0, deadline, limit };
    match job.answer {
        Answer::Whole(answer) => whole(talk, answer).await,
        Answer::Stream(answer) => Ok(stream(talk, answer, app.limits.keep_alive)),
    }
}

fn late(limit: Duration) -> ApiError {
    let what = format!("the answer took longer than {} s", limit.as_secs_f64());
    ApiError::new(Kind::Timeout, what).code("request_timeout")
}

/// What is heard of a request. Dropping it ends the request.
struct Talk {
    name: Arc<str>,
    accepted: Accepted,
    /// Answers that have not ended.
    left: usize,
    tokens: usize,
    deadline: Instant,
    limit: Duration,
}

impl Drop for Talk {
    fn drop(&mut self) {
        let (request, tokens, ended) = (&*self.name, self.tokens, self.left == 0);
        tracing::info!(request, tokens, ended, "answer");
    }
}

impl Talk {
    /// The next event; `None` when all answers have ended.
    ///
    /// # Errors
    /// The request took too long, or the engine cannot go on.
    async fn next(&mut self) -> Result<Option<(usize, Event)>, ApiError> {
        let said = timeout_at(self.deadline, self.accepted.events.recv()).await;
        self.take(said.map_err(|_| late(self.limit))?)
    }

    fn take(&mut self, said: Option<Said>) -> Result<Option<(usize, Event)>, ApiError> {
        match said {
            Some((index, Ok(event))) => {
                self.tokens += usize::from(event.token.is_some());
                self.left -= usize::from(event.finish.is_some()).min(self.left);
                Ok(Some((index, event)))
            }
            Some((_, Err(e))) => Err(ApiError::of_engine("", &e)),
            None if self.left == 0 => Ok(None),
            None => Err(ApiError::new(Kind::Unavailable, "the engine has ended")),
        }
    }
}

async fn whole(mut talk: Talk, mut answer: Box<dyn Assemble>) -> Result<Response, ApiError> {
    while let Some((index, event)) = talk.next().await? {
        answer.take(index, &event)?;
    }
    Ok(json(StatusCode::OK, &answer.body()))
}

/// A stream that has not ended.
struct Events {
    talk: Talk,
    answer: Box<dyn Stream>,
    keep_alive: Duration,
}

fn stream(talk: Talk, answer: Box<dyn Stream>, keep_alive: Duration) -> Response {
    let events = Some(Events { talk, answer, keep_alive });
    let step = |events: Option<Events>| async {
        let (bytes, rest) = events?.piece().await;
        Some((Ok::<Bytes, Infallible>(bytes), rest))
    };
    event_stream(Body::from_stream(futures_util::stream::unfold(events, step)))
}

/// Events of one piece, where a client is slower than the engine.
const TOGETHER: usize = 32;

impl Events {
    /// The next piece, and what is left to come.
    async fn piece(mut self) -> (Bytes, Option<Events>) {
        let (mut out, mut chunks) = (Vec::new(), Vec::new());
        let more = match timeout(self.keep_alive, self.chunks(&mut chunks)).await {
            Err(_) => {
                out.extend_from_slice(b": keep-alive\n\n");
                Ok(true)
            }
            Ok(more) => more,
        };
        chunks.iter().for_each(|chunk| frame(&mut out, chunk));
        match more {
            Ok(true) => return (out.into(), Some(self)),
            Ok(false) => {}
            // The status has been sent long ago.
            Err(e) => frame(&mut out, &e.body()),
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
        (out.into(), None)
    }

    /// What the next events make: at least one chunk. Returns whether more is to come.
    async fn chunks(&mut self, chunks: &mut Vec<Value>) -> Result<bool, ApiError> {
        while chunks.is_empty() {
            let Some((index, event)) = self.talk.next().await? else {
                self.answer.end(chunks);
                return Ok(false);
            };
            self.answer.take(index, &event, chunks)?;
        }
        for _ in 1..TOGETHER {
            let Ok(said) = self.talk.accepted.events.try_recv() else { break };
            if let Some((index, event)) = self.talk.take(Some(said))? {
                self.answer.take(index, &event, chunks)?;
            }
        }
        Ok(true)
    }
}
