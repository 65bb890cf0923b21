//! What pages of a browser may do to a server that asks nobody for a key.
//!
//! Such a server relies on listening to its own machine alone, and a browser on that machine runs everybody's pages. A
//! page can make its own name stand for 127.0.0.1 once it is loaded (DNS rebinding): what it asks for then is of its own
//! origin, and it may read all answers; but the browser still says the page's name in `Host`. And without reading answers
//! any page may send what looks like a form; the browser then says whose page it is.

use crate::openai::{ApiError, Kind};
use crate::options::Options;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::net::IpAddr;
use std::sync::Arc;

/// Which names a server goes by, and whose pages may ask.
#[derive(Debug)]
pub(crate) struct Browsers {
    /// Names beside addresses and those that mean this machine.
    hosts: Vec<String>,
    /// Origins that may read answers.
    origins: Vec<String>,
}

impl Browsers {
    /// `None` where requests need a key, which no page of others has, where other machines are meant to ask, unless the
    /// names are given, and where any name will do.
    pub fn new(options: &Options) -> Option<Browsers> {
        let (hosts, origins) = (options.allowed_hosts.clone(), options.cors.clone());
        let is_open = hosts.iter().any(|host| host == "*");
        let is_private = options.host.is_loopback() && options.keys.is_empty();
        (!is_open && (is_private || !hosts.is_empty())).then_some(Browsers { hosts, origins })
    }

    /// Whether this server goes by a host, which may have a port. It does by every address: only names can be made to
    /// stand for something else.
    fn knows(&self, host: &str) -> bool {
        let name = name(host);
        // Browsers ask nobody what the first two stand for. The last is kept for private use, as host.docker.internal:
        // nobody can have a page there for all the world.
        let is_near = || name == "localhost" || name.ends_with(".localhost") || name.ends_with(".internal");
        name.parse::<IpAddr>().is_ok() || is_near() || self.lists(&name)
    }

    fn lists(&self, name: &str) -> bool {
        self.hosts.iter().any(|host| host.eq_ignore_ascii_case(name))
    }

    fn check(&self, request: &Request) -> Result<(), ApiError> {
        let headers = request.headers();
        let target = request.uri().host();
        let hosts = headers.get_all(header::HOST).iter().map(|host| host.to_str().unwrap_or_default());
        if let Some(host) = hosts.chain(target).find(|host| !self.knows(host)) {
            let host: String = host.chars().take(100).collect();
            let what = format!("this server is not known as {host:?}: see --allowed-host");
            return Err(ApiError::new(Kind::Forbidden, what).code("host_not_allowed"));
        }
        if !matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS) && !self.is_own(headers) {
            let what = "pages of other origins may not send this: see --cors";
            return Err(ApiError::new(Kind::Forbidden, what).code("origin_not_allowed"));
        }
        Ok(())
    }

    /// Whether a request comes from no browser, from a page of this server, or from one that may ask.
    fn is_own(&self, headers: &HeaderMap) -> bool {
        let text = |name: HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or_default());
        let (site, origin) = (text(HeaderName::from_static("sec-fetch-site")), text(header::ORIGIN));
        let is_listed = self.origins.iter().any(|known| known == "*" || Some(known.as_str()) == origin);
        let is_same = match (site, origin) {
            (Some(site), _) => matches!(site, "same-origin" | "none"),
            (None, None) => true,
            // Browsers tell the site only to this machine and over TLS.
            (None, Some(origin)) => origin
                .split_once("://")
                .is_some_and(|(_, host)| Some(host) == text(header::HOST) || self.lists(&name(host))),
        };
        is_same || is_listed
    }
}

/// A host without its port, in small letters; an address without brackets.
fn name(host: &str) -> String {
    let name = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase()
}

/// Refuses what pages of others ask for.
pub(crate) async fn guard(State(browsers): State<Arc<Browsers>>, request: Request, next: Next) -> Response {
    match browsers.check(&request) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::options::Keys;
    use axum::body::Body;

    fn browsers(hosts: &[&str], cors: &[&str]) -> Browsers {
        let list = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Browsers { hosts: list(hosts), origins: list(cors) }
    }

    #[test]
    fn names_are_known_or_not() {
        let own = browsers(&["models.example.com"], &[]);
        for host in [
            "localhost",
            "LocalHost:8080",
            "localhost.",
            "a.localhost:1",
            "127.0.0.1:8080",
            "[::1]:8080",
            "192.168.1.7",
            "host.docker.internal:8080",
            "Models.Example.com:443",
        ] {
            assert!(own.knows(host), "{host}");
        }
        for host in ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8080", "notlocalhost", "", "::1"]
        {
            assert!(!own.knows(host), "{host}");
        }
        assert!(!browsers(&[], &[]).knows("models.example.com"));
    }

    #[test]
    fn who_is_looked_at() {
        let base = Options::new(vec!["a.gguf".into()]);
        assert!(Browsers::new(&base).is_some());
        assert!(Browsers::new(&Options { keys: Keys::parse("k"), ..base.clone() }).is_none());
        let public = Options { host: "0.0.0.0".parse().unwrap(), ..base.clone() };
        assert!(Browsers::new(&public).is_none());
        assert!(Browsers::new(&Options { allowed_hosts: vec!["a.example".into()], ..public }).is_some());
        assert!(Browsers::new(&Options { allowed_hosts: vec!["*".into()], ..base }).is_none());
    }

    #[test]
    fn pages_are_own_or_not() {
        let own = browsers(&["models.example.com"], &["https://ui.example"]);
        let is_own = |headers: &[(&str, &str)]| {
            let request =
                headers.iter().fold(Request::post("/"), |request, (name, value)| request.header(*name, *value));
            own.is_own(request.body(Body::empty()).unwrap().headers())
        };
        let host = ("host", "127.0.0.1:8080");
        assert!(is_own(&[host]));
        for (site, origin, expected) in [
            (Some("same-origin"), "https://models.example.com", true),
            (Some("none"), "null", true),
            (Some("cross-site"), "https://evil.example", false),
            (Some("same-site"), "http://127.0.0.1:3000", false),
            (Some("cross-site"), "https://ui.example", true),
            (None, "http://127.0.0.1:8080", true),
            (None, "http://127.0.0.1:3000", false),
            (None, "http://models.example.com", true),
            (None, "http://evil.example", false),
            (None, "https://ui.example", true),
            (None, "null", false),
        ] {
            let site = site.map(|site| ("sec-fetch-site", site));
            let headers: Vec<_> = [host, ("origin", origin)].into_iter().chain(site).collect();
            assert_eq!(is_own(&headers), expected, "{headers:?}");
        }
        assert!(
            browsers(&[], &["*"])
                .is_own(Request::post("/").header("origin", "null").body(Body::empty()).unwrap().headers())
        );
    }
}
