//! What is the same for all routes: bodies, errors, keys, names of requests, the log.

use crate::app::App;
use crate::openai::{ApiError, Kind};
use axum::body::{Body, Bytes};
use axum::extract::{FromRequestParts, Path, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;
use serde::Serialize;
use serde_json::Value;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A name in a path, its escapes resolved.
pub(crate) struct PathName(pub String);

impl<S: Send + Sync> FromRequestParts<S> for PathName {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<PathName, ApiError> {
        let wrong = |_| {
            let what = "the path is no UTF-8 when its escapes are resolved";
            ApiError::new(Kind::Invalid, what).code("invalid_path")
        };
        Path::from_request_parts(parts, state).await.map(|Path(name)| PathName(name)).map_err(wrong)
    }
}

/// A body, and the place that it takes among all that are being read.
pub(crate) struct Guarded {
    bytes: Vec<u8>,
    _permit: Option<OwnedSemaphorePermit>,
    /// Where there is much to be done for it.
    pub turn: Option<OwnedSemaphorePermit>,
}

impl Guarded {
    /// How many bytes there are.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The bytes, which count no more.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// The JSON in it.
    ///
    /// # Errors
    /// If it is none. The message does not repeat what was sent.
    pub fn json(&self) -> Result<Value, ApiError> {
        serde_json::from_slice(&self.bytes).map_err(|e| {
            let what = if self.bytes.is_empty() { "it is empty".to_owned() } else { e.to_string() };
            ApiError::new(Kind::Invalid, format!("the body is no JSON: {what}")).code("invalid_json")
        })
    }
}

/// Reads a body of at most `most` bytes, with a permit for each KiB of it.
pub(crate) async fn read(mut body: Body, most: usize, permits: &Arc<Semaphore>) -> Result<Guarded, ApiError> {
    let too_large = || ApiError::new(Kind::TooLarge, format!("the body has more than {most} bytes"));
    if http_body::Body::size_hint(&body).lower() > most as u64 {
        return Err(too_large());
    }
    let (mut bytes, mut permit) = (Vec::new(), None::<OwnedSemaphorePermit>);
    while let Some(frame) = body.frame().await {
        let broken = |_| ApiError::new(Kind::Invalid, "the body did not come to its end");
        let Ok(data) = frame.map_err(broken)?.into_data() else { continue };
        if bytes.len() + data.len() > most {
            return Err(too_large());
        }
        bytes.extend_from_slice(&data);
        let (has, needs) =
            (permit.as_ref().map_or(0, OwnedSemaphorePermit::num_permits), bytes.len().div_ceil(1 << 10));
        if needs > has {
            let busy = |_| ApiError::new(Kind::RateLimit, "too many large requests are being read; try again later");
            let more = u32::try_from(needs - has).unwrap_or(u32::MAX);
            let more = permits.clone().try_acquire_many_owned(more).map_err(busy)?;
            match &mut permit {
                Some(permit) => permit.merge(more),
                None => permit = Some(more),
            }
        }
    }
    Ok(Guarded { bytes, _permit: permit, turn: None })
}

/// A response of JSON.
pub(crate) fn json(status: StatusCode, value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(bytes) => (status, [(header::CONTENT_TYPE, "application/json")], bytes).into_response(),
        // Values have keys that are strings and no other way to fail.
        Err(e) => (StatusCode::INTERNAL_SERVER_ERROR, e.to_string()).into_response(),
    }
}

/// When to ask again, where nothing tells how long it takes.
const RETRY_AFTER: Duration = Duration::from_secs(1);

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.kind.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = json(status, &self.body());
        let mut set = |name: &'static str, value: &str| {
            // Numbers and words can be written in a header.
            response
                .headers_mut()
                .extend(HeaderValue::from_str(value).map(|value| (HeaderName::from_static(name), value)));
        };
        match self.kind {
            Kind::RateLimit | Kind::Unavailable => {
                let wait = self.retry_after.unwrap_or(RETRY_AFTER);
                set("retry-after", &wait.as_secs_f64().ceil().to_string());
                set("retry-after-ms", &wait.as_millis().to_string());
                set("x-should-retry", "true");
            }
            // The same request would fail again.
            Kind::Server | Kind::Timeout => set("x-should-retry", "false"),
            Kind::Authentication => set("www-authenticate", "Bearer"),
            Kind::Encoding => set("accept-encoding", "identity"),
            _ => {}
        }
        response
    }
}

/// The name of a request: what the client calls it, if that can be written in a log, or one of our own.
#[derive(Clone, Debug)]
pub(crate) struct RequestName(pub Arc<str>);

const REQUEST_ID: &str = "x-request-id";

/// Names requests, counts and logs responses.
pub(crate) async fn watch(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let start = Instant::now();
    let fits = |name: &&str| (1..=128).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_graphic());
    let name = request.headers().get(REQUEST_ID).and_then(|name| name.to_str().ok()).filter(fits);
    let name: Arc<str> = name.map_or_else(|| crate::openai::unique("req-"), str::to_owned).into();
    request.extensions_mut().insert(RequestName(name.clone()));
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let mut response = next.run(request).await;
    let status = response.status().as_u16();
    app.metrics.response(status);
    if let Ok(value) = HeaderValue::from_str(&name) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    let ms = start.elapsed().as_secs_f64() * 1e3;
    // These are asked for many times a second.
    if matches!(path.as_str(), "/health" | "/metrics" | "/slots") {
        tracing::debug!(request = &*name, %method, path, status, ms, "response");
    } else {
        tracing::info!(request = &*name, %method, path, status, ms, "response");
    }
    response
}

/// Whether a route needs no key: the page's files and what tells nothing of what is asked and answered.
fn is_open(path: &str) -> bool {
    matches!(path, "/" | "/health" | "/metrics") || path.starts_with("/page/")
}

/// Lets in who has a key.
pub(crate) async fn authorize(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let is_open = app.keys.is_empty() || is_open(request.uri().path()) || request.method() == Method::OPTIONS;
    let given = request.headers().get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
    let key =
        given.and_then(|value| value.split_at_checked(7).filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"bearer ")));
    match key {
        _ if is_open => next.run(request).await,
        Some((_, key)) if app.keys.contain(key.trim_ascii()) => next.run(request).await,
        Some(_) => ApiError::new(Kind::Authentication, "the API key is wrong").code("invalid_api_key").into_response(),
        None => {
            let what = "an API key is needed: send the header Authorization: Bearer KEY";
            ApiError::new(Kind::Authentication, what).code("missing_api_key").into_response()
        }
    }
}

/// Refuses bodies that are compressed: how much of them there will be, what was sent does not tell.
pub(crate) async fn uncompressed(request: Request, next: Next) -> Response {
    let encodings = request.headers().get_all(header::CONTENT_ENCODING);
    match encodings.iter().find(|encoding| !encoding.as_bytes().eq_ignore_ascii_case(b"identity")) {
        None => next.run(request).await,
        Some(encoding) => {
            let name: String = String::from_utf8_lossy(encoding.as_bytes()).chars().take(40).collect();
            let what = format!("the content encoding {name:?} is not supported: send the body as it is");
            ApiError::new(Kind::Encoding, what).code("unsupported_encoding").into_response()
        }
    }
}

/// What a panic becomes: our fault, and no reason to end.
pub(crate) fn panicked(_: Box<dyn std::any::Any + Send>) -> Response {
    tracing::error!("a handler panicked");
    ApiError::new(Kind::Server, "the server has a fault; it goes on").into_response()
}

/// Work that takes a while, on a thread that may be blocked.
///
/// # Errors
/// The work's own; a panic in it.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let fault = |_| ApiError::new(Kind::Server, "the server has a fault; it goes on");
    tokio::task::spawn_blocking(work).await.map_err(fault)?
}

/// An event of a stream.
pub(crate) fn frame(out: &mut Vec<u8>, value: &Value) {
    out.extend_from_slice(b"data: ");
    // Writing values to memory does not fail.
    let _ = serde_json::to_writer(&mut *out, value);
    out.extend_from_slice(b"\n\n");
}

/// A response that is a stream of events.
pub(crate) fn event_stream(body: Body) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (header::CACHE_CONTROL, "no-cache"),
        // nginx keeps events back otherwise.
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (headers, body).into_response()
}

/// A text of this server itself.
pub(crate) fn text(kind: &'static str, body: impl Into<Bytes>) -> Response {
    ([(header::CONTENT_TYPE, kind)], Body::from(body.into())).into_response()
}
