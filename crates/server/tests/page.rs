//! The page at `/`.

#![allow(clippy::unwrap_used)]

mod support;

use support::Running;

#[test]
fn all_of_it_is_here_and_needs_no_key() {
    let mut options = support::options(256);
    options.keys = puna_server::Keys::parse("key");
    let server = Running::start(options);
    let html = server.get("/").text();
    let mut files: Vec<String> = html.split('"').filter(|part| part.starts_with("page/")).map(str::to_owned).collect();
    let mut seen = 0;
    while let Some(file) = files.pop() {
        let reply = server.get(&format!("/{file}"));
        assert_eq!(reply.status, 200, "{file}");
        let policy = reply.header("content-security-policy").unwrap();
        assert!(policy.starts_with("default-src 'none'; script-src 'self';"), "{policy}");
        let kind = reply.header("content-type").unwrap();
        assert!(kind.starts_with("text/javascript") == file.ends_with(".js"), "{file}: {kind}");
        let text = reply.text();
        assert!(!text.contains("innerHTML"), "{file}");
        let imports = text.split("from \"./").skip(1).map(|rest| format!("page/{}", rest.split('"').next().unwrap()));
        files.extend(imports);
        seen += 1;
        assert!(seen < 50, "files import each other");
    }
    assert!(seen >= 7, "{seen}");
    // What it asks for needs a key.
    for path in ["/slots", "/v1/models", "/page"] {
        assert_eq!(server.get(path).status, 401, "{path}");
    }
    assert_eq!(server.get("/page/nothing.js").status, 404);
}
