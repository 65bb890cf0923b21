//! The server: listening, connections, and how it ends.

use crate::app::App;
use crate::browser::{Browsers, guard};
use crate::connections::{Connections, Place};
use crate::error::Error;
use crate::http::{authorize, panicked, uncompressed, watch};
use crate::options::Options;
use crate::routes::router;
use axum::Router;
use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, Method, Request, header};
use axum::middleware::{from_fn, from_fn_with_state};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_io_timeout::TimeoutStream;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowOrigin, CorsLayer};

/// A server that listens while its models are being loaded.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    app: Arc<App>,
    router: Router,
    failed: mpsc::Receiver<Error>,
    connections: Arc<Connections>,
}

/// How long requests that are ended have to say so, and those that are being sent to come to their end.
const LAST_WORDS: Duration = Duration::from_secs(2);

impl Server {
    /// Listens, and starts to load models.
    ///
    /// # Errors
    /// The address is taken; names of models or origins do not fit.
    pub async fn bind(options: &Options) -> Result<Server, Error> {
        let address = SocketAddr::new(options.host, options.port);
        let fault = |source| Error::Bind { address: address.to_string(), source };
        let cors = cors(&options.cors)?;
        let listener = TcpListener::bind(address).await.map_err(fault)?;
        let address = listener.local_addr().map_err(fault)?;
        let (sender, failed) = mpsc::channel(1);
        let app = Arc::new(App::start(options, sender)?);
        let router = router(app.clone())
            .layer(from_fn(uncompressed))
            .layer(from_fn_with_state(app.clone(), authorize))
            .layer(CatchPanicLayer::custom(panicked));
        let router = match Browsers::new(options).map(Arc::new) {
            Some(browsers) => router.layer(from_fn_with_state(browsers, guard)),
            None => router,
        };
        let router = match cors {
            Some(cors) => router.layer(cors),
            None => router,
        };
        let router = router.layer(from_fn_with_state(app.clone(), watch));
        let connections = Arc::new(Connections::new(options.limits.connections));
        Ok(Server { listener, address, app, router, failed, connections })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `shutdown`; then lets running requests come to an end, as long as the grace time allows.
    ///
    /// # Errors
    /// A model that cannot be loaded.
    pub async fn run(mut self, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
        let graceful = GracefulShutdown::new();
        let mut shutdown = std::pin::pin!(shutdown);
        let result = loop {
            tokio::select! {
                () = &mut shutdown => break Ok(()),
                Some(error) = self.failed.recv() => break Err(error),
                (stream, place) = accept(&self.listener, &self.connections) => self.serve(stream, place, &graceful),
            }
        };
        let Server { listener, app, connections, .. } = self;
        drop(listener);
        app.drain();
        if result.is_err() {
            app.end();
        }
        let limits = app.limits;
        tracing::info!(grace = limits.grace.as_secs_f64(), "ending: no new requests");
        let mut drained = std::pin::pin!(graceful.shutdown());
        let silence = async {
            loop {
                tokio::time::sleep(LAST_WORDS).await;
                connections.end_silent(LAST_WORDS);
            }
        };
        let is_drained = async {
            tokio::select! {
                () = &mut drained => {}
                () = silence => {}
            }
        };
        if timeout(limits.grace, is_drained).await.is_err() {
            tracing::warn!("requests are still running: they are ended");
            app.end();
            // Those who do not even hear this are cut off.
            let _ = timeout(LAST_WORDS, drained).await;
        }
        result
    }

    fn serve(&self, stream: TcpStream, place: Place, graceful: &GracefulShutdown) {
        // Small events must not wait for more. Where the system refuses, they do.
        let _ = stream.set_nodelay(true);
        let idle = self.app.limits.idle;
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(idle));
        let (router, turn) = (TowerToHyperService::new(self.router.clone()), place.turn.clone());
        let service = service_fn(move |request: Request<Incoming>| {
            let (turn, response) = (turn.clone(), router.call(request.map(|body| Body::new(turn.question(body)))));
            async move { response.await.map(|response| response.map(|body| turn.answer(body))) }
        });
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(idle);
        let connection = graceful.watch(http.serve_connection(TokioIo::new(Box::pin(stream)), service));
        let app = self.app.clone();
        app.metrics.connections.add(1);
        tokio::spawn(async move {
            tokio::select! {
                // Clients go away as they like.
                result = connection => if let Err(e) = result {
                    tracing::debug!(error = %e, "connection");
                },
                () = place.turn.unwanted() => tracing::debug!("a silent connection is ended"),
            }
            app.metrics.closed.add(1);
            drop(place);
        });
    }
}

/// The next connection, when there is room for it.
async fn accept(listener: &TcpListener, connections: &Arc<Connections>) -> (TcpStream, Place) {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => return (stream, connections.place(peer).await),
            Err(e) => {
                // Out of descriptors, mostly.
                tracing::warn!(error = %e, "accept");
                connections.end_one();
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }
}

/// What pages of other origins may do; nothing where there are none.
fn cors(origins: &[String]) -> Result<Option<CorsLayer>, Error> {
    let allowed = match origins {
        [] => return Ok(None),
        [any] if any == "*" => AllowOrigin::any(),
        list => {
            let origin = |text: &String| {
                let fault = || Error::Origin { origin: text.clone() };
                if !text.contains("://") || text.ends_with('/') {
                    return Err(fault());
                }
                HeaderValue::from_str(text).map_err(|_| fault())
            };
            AllowOrigin::list(list.iter().map(origin).collect::<Result<Vec<_>, _>>()?)
        }
    };
    let headers = [header::AUTHORIZATION, header::CONTENT_TYPE, HeaderName::from_static("x-request-id")];
    Ok(Some(
        CorsLayer::new()
            .allow_origin(allowed)
            .allow_methods([Method::GET, Method::POST, Method::PUT, Method::DELETE])
            .allow_headers(headers)
            .expose_headers([HeaderName::from_static("x-request-id")]),
    ))
}

/// Serves until the process is told to end (SIGTERM, Ctrl-C), on threads of its own. `ready` hears where it listens.
///
/// # Errors
/// As [`Server::bind`] and [`Server::run`]; the system gives no threads or signals.
pub fn serve(options: &Options, ready: impl FnOnce(SocketAddr)) -> Result<(), Error> {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    // Cores are the engine's; handlers are short, and long work has threads of its own.
    let runtime = runtime.worker_threads(2).max_blocking_threads(16).enable_all().build();
    let runtime = runtime.map_err(|source| Error::System { what: "no threads for the server", source })?;
    let result = runtime.block_on(async {
        let signal = crate::signal::end()?;
        let server = Server::bind(options).await?;
        ready(server.address());
        server.run(signal).await
    });
    runtime.shutdown_timeout(LAST_WORDS);
    result
}
