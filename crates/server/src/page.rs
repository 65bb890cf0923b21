//! The page at `/`: files that are part of the program, and what a browser may do with them.

use axum::Router;
use axum::http::header;
use axum::routing::get;

/// Path, type and content of each file.
const FILES: [(&str, &str, &str); 8] = [
    ("/", "text/html; charset=utf-8", include_str!("page/index.html")),
    ("/page/icon.svg", "image/svg+xml", include_str!("page/icon.svg")),
    ("/page/style.css", "text/css; charset=utf-8", include_str!("page/style.css")),
    ("/page/chat.js", "text/javascript; charset=utf-8", include_str!("page/chat.js")),
    ("/page/api.js", "text/javascript; charset=utf-8", include_str!("page/api.js")),
    ("/page/live.js", "text/javascript; charset=utf-8", include_str!("page/live.js")),
    ("/page/markdown.js", "text/javascript; charset=utf-8", include_str!("page/markdown.js")),
    ("/page/store.js", "text/javascript; charset=utf-8", include_str!("page/store.js")),
];

/// The page asks nobody but this server, runs nothing but its own files, and cannot make markup of text, whatever a
/// model says.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; \
                      trusted-types 'none'";

/// Routes of the page's files. They need no key; what they ask the server for does.
pub fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    FILES.iter().fold(Router::new(), |router, &(path, kind, content)| {
        let headers = [
            (header::CONTENT_TYPE, kind),
            (header::CONTENT_SECURITY_POLICY, POLICY),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::REFERRER_POLICY, "no-referrer"),
            (header::CACHE_CONTROL, "no-cache"),
        ];
        router.route(path, get(move || async move { (headers, content) }))
    })
}
