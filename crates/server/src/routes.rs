//! What is where.

use crate::answering::answer;
use crate::app::App;
use crate::http::{self, Guarded, PathName, RequestName, blocking, json};
use crate::openai::chat::ChatRequest;
use crate::openai::completions::CompletionRequest;
use crate::openai::embeddings::EmbeddingRequest;
use crate::openai::prefixes::PrefixRequest;
use crate::openai::tokens::{self, DetokenizeRequest, TemplateRequest, TokenizeRequest};
use crate::openai::{ApiError, Card, Kind};
use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Extensions, StatusCode};
use axum::response::Response;
use axum::routing::{MethodRouter, get, post};
use serde_json::{Value, json as object};
use std::sync::Arc;

type Shared = State<Arc<App>>;
type Answer = Result<Response, ApiError>;

/// All routes, as the OpenAPI document lists them.
pub(crate) fn routes() -> Vec<(&'static str, MethodRouter<Arc<App>>)> {
    vec![
        ("/v1/chat/completions", post(chat)),
        ("/v1/completions", post(completions)),
        ("/v1/embeddings", post(embeddings)),
        ("/v1/models", get(models)),
        ("/v1/models/{id}", get(model)),
        ("/v1/control-vectors", get(vectors)),
        ("/v1/control-vectors/{name}", post(upload).delete(remove)),
        ("/v1/prefixes", get(prefixes)),
        ("/v1/prefixes/{name}", get(prefix).put(keep_prefix).delete(remove_prefix)),
        ("/tokenize", post(tokenize)),
        ("/detokenize", post(detokenize)),
        ("/tokenizer_info", get(tokenizer_info)),
        ("/apply-template", post(apply_template)),
        ("/health", get(health)),
        ("/metrics", get(metrics)),
        ("/version", get(version)),
        ("/slots", get(slots)),
        ("/props", get(props)),
        ("/openapi.json", get(openapi)),
    ]
}

/// The service, but for what wraps all of it.
pub(crate) fn router(app: Arc<App>) -> Router {
    let router = routes().into_iter().fold(Router::new(), |router, (path, method)| router.route(path, method));
    let router = router.merge(crate::page::routes());
    router.fallback(nothing).method_not_allowed_fallback(no_method).with_state(app)
}

async fn nothing(request: axum::extract::Request) -> ApiError {
    let path: String = request.uri().path().chars().take(200).collect();
    ApiError::new(Kind::NotFound, format!("there is nothing at {} {path}", request.method())).code("unknown_url")
}

async fn no_method(request: axum::extract::Request) -> ApiError {
    ApiError::new(Kind::Method, format!("{} is not allowed here", request.method())).code("method_not_allowed")
}

fn name(extensions: &Extensions) -> Arc<str> {
    extensions.get::<RequestName>().map_or_else(|| "".into(), |name| name.0.clone())
}

async fn chat(State(app): Shared, extensions: Extensions, body: Body) -> Answer {
    let body = app.read(body).await?;
    let shared = app.clone();
    let (model, job) = blocking(move || {
        let request = ChatRequest::read(&body.json()?)?;
        let (model, card) = shared.pick(request.model.as_deref())?;
        Ok((model, request.job(&card)?))
    })
    .await?;
    answer(&app, &model, name(&extensions), job).await
}

async fn completions(State(app): Shared, extensions: Extensions, body: Body) -> Answer {
    let body = app.read(body).await?;
    let shared = app.clone();
    let (model, job) = blocking(move || {
        let request = CompletionRequest::read(&body.json()?)?;
        let (model, card) = shared.pick(request.model.as_deref())?;
        Ok((model, request.job(&card)?))
    })
    .await?;
    answer(&app, &model, name(&extensions), job).await
}

async fn embeddings(State(app): Shared, body: Body) -> Answer {
    let body = app.read(body).await?;
    let shared = app.clone();
    let (model, card, request, (texts, options)) = blocking(move || {
        let request = EmbeddingRequest::read(&body.json()?)?;
        let (model, card) = shared.pick(request.model.as_deref())?;
        let (texts, options) = (request.texts(&card)?, request.options(&card)?);
        Ok((model, card, request, (texts, options)))
    })
    .await?;
    let embedding = model.embed(texts.clone(), options);
    let late = |_| ApiError::new(Kind::Timeout, "the answer took too long").code("request_timeout");
    let embeddings = tokio::time::timeout(app.limits.request, embedding).await.map_err(late)??;
    Ok(json(StatusCode::OK, &request.body(&card, &texts, embeddings)))
}

async fn models(State(app): Shared) -> Answer {
    let data: Vec<Value> = app.cards().iter().map(|card| card.listed()).collect();
    Ok(json(StatusCode::OK, &object!({ "object": "list", "data": data })))
}

async fn model(State(app): Shared, PathName(id): PathName) -> Answer {
    Ok(json(StatusCode::OK, &app.models.find(&id)?.card()?.listed()))
}

async fn vectors(State(app): Shared) -> Response {
    json(StatusCode::OK, &object!({ "object": "list", "data": app.vectors.listed() }))
}

/// Whoever may upload decides what others can ask for, and takes memory: the server has to be told to allow it.
fn allow_uploads(app: &App) -> Result<(), ApiError> {
    let off =
        || ApiError::new(Kind::Forbidden, "this server takes no uploads: see --allow-uploads").code("uploads_off");
    app.uploads.then_some(()).ok_or_else(off)
}

async fn upload(State(app): Shared, PathName(name): PathName, body: Body) -> Answer {
    allow_uploads(&app)?;
    let body = app.read(body).await?;
    let value = blocking(move || app.vectors.upload(&name, body.into_bytes())).await?;
    Ok(json(StatusCode::OK, &value))
}

async fn remove(State(app): Shared, PathName(name): PathName) -> Answer {
    allow_uploads(&app)?;
    app.vectors.remove(&name)?;
    Ok(json(StatusCode::OK, &object!({ "id": name, "object": "control_vector", "deleted": true })))
}

async fn prefixes(State(app): Shared) -> Answer {
    let data = app.prefixes()?.list(app.cards()).await?;
    Ok(json(StatusCode::OK, &object!({ "object": "list", "data": data })))
}

async fn prefix(State(app): Shared, PathName(name): PathName) -> Answer {
    Ok(json(StatusCode::OK, &app.prefixes()?.find(&name, app.cards()).await?))
}

async fn keep_prefix(State(app): Shared, PathName(id): PathName, extensions: Extensions, body: Body) -> Answer {
    let prefixes = app.prefixes()?;
    prefixes.file(&id)?;
    let body = app.read(body).await?;
    let shared = app.clone();
    let (model, beginning) = blocking(move || {
        let request = PrefixRequest::read(&body.json()?)?;
        let (model, card) = shared.pick(request.model.as_deref())?;
        Ok((model, request.beginning(&card)?))
    })
    .await?;
    let keeping = prefixes.keep(&model, name(&extensions), &id, beginning, app.cards());
    let late = |_| ApiError::new(Kind::Timeout, "the prefix took too long").code("request_timeout");
    let kept = tokio::time::timeout(app.limits.request, keeping).await.map_err(late)??;
    Ok(json(StatusCode::OK, &kept))
}

async fn remove_prefix(State(app): Shared, PathName(name): PathName) -> Answer {
    app.prefixes()?.remove(&name).await?;
    Ok(json(StatusCode::OK, &object!({ "id": name, "object": "prefix", "deleted": true })))
}

/// A request that needs no engine.
async fn simple<R: 'static>(
    app: Arc<App>,
    body: Body,
    read: fn(&Value) -> Result<R, ApiError>,
    model: fn(&R) -> Option<&str>,
    work: fn(&R, &Card) -> Result<Value, ApiError>,
) -> Answer {
    let body: Guarded = app.read(body).await?;
    let value = blocking(move || {
        let request = read(&body.json()?)?;
        let (_, card) = app.pick(model(&request))?;
        work(&request, &card)
    })
    .await?;
    Ok(json(StatusCode::OK, &value))
}

async fn tokenize(State(app): Shared, body: Body) -> Answer {
    simple(app, body, TokenizeRequest::read, |r| r.model.as_deref(), TokenizeRequest::body).await
}

async fn detokenize(State(app): Shared, body: Body) -> Answer {
    simple(app, body, DetokenizeRequest::read, |r| r.model.as_deref(), DetokenizeRequest::body).await
}

async fn tokenizer_info(State(app): Shared) -> Answer {
    Ok(json(StatusCode::OK, &tokens::info(&app.pick(None)?.1)?))
}

async fn apply_template(State(app): Shared, body: Body) -> Answer {
    simple(app, body, TemplateRequest::read, |r| r.model.as_deref(), TemplateRequest::body).await
}

async fn health(State(app): Shared) -> Answer {
    app.health()?;
    Ok(json(StatusCode::OK, &object!({ "status": "ok" })))
}

async fn metrics(State(app): Shared) -> Response {
    http::text("text/plain; version=0.0.4; charset=utf-8", app.render_metrics())
}

async fn version() -> Response {
    json(StatusCode::OK, &object!({ "version": env!("CARGO_PKG_VERSION") }))
}

async fn slots(State(app): Shared) -> Response {
    json(StatusCode::OK, &app.slots().await)
}

async fn props(State(app): Shared) -> Response {
    json(StatusCode::OK, &app.props())
}

async fn openapi() -> Response {
    http::text("application/json", include_str!("openapi.json"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_document_lists_all_routes() {
        let document: Value = serde_json::from_str(include_str!("openapi.json")).unwrap();
        let mut listed: Vec<&String> = document["paths"].as_object().unwrap().keys().collect();
        let mut all: Vec<String> = routes().into_iter().map(|(path, _)| path.to_owned()).collect();
        listed.sort();
        all.sort();
        assert_eq!(listed, all.iter().collect::<Vec<_>>());
        // Every reference stands for something.
        for (at, _) in document.to_string().match_indices("#/components/schemas/") {
            let text = document.to_string();
            let name = text[at..].split('"').next().unwrap().rsplit('/').next().unwrap().to_owned();
            assert!(document["components"]["schemas"][&name].is_object(), "{name}");
        }
    }
}
