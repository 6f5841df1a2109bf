//! The page at `/`: a chat next to a picture of the prefix tree. Its files are part of the binary.
//!
//! The page is a client like any other: it uses `/v1` with the keys that its user enters, and this
//! module only delivers its files, which are the same for everybody. Its policy forbids it to load
//! from or send to other servers, to run scripts other than its own files, and to be shown in a
//! frame of another page. Trusted types forbid it to parse text as HTML. Pictures of the user are
//! data URLs.

use std::hash::{DefaultHasher, Hash, Hasher};

use axum::http::{self, HeaderMap, HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::routes::Role::Everybody;
use crate::routes::{Route, get};
use crate::wire::error::ApiError;
use crate::wire::parts::PathId;

const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
    connect-src 'self'; img-src 'self' data:; manifest-src 'self'; base-uri 'none'; \
    form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const IMAGE: &str = "image/svg+xml";
/// With it, browsers offer to install the page as an app.
const MANIFEST: &str = "application/manifest+json";

/// A file of the page: its name below `/page/`, its type and its content.
struct File(&'static str, &'static str, &'static str);

/// Embeds files of the folder `page`.
macro_rules! files {
    ($($name:literal: $kind:ident,)*) => {
        [$(File($name, $kind, include_str!(concat!("../../page/", $name)))),*]
    };
}

static INDEX: File = File("", HTML, include_str!("../../page/index.html"));
static FILES: &[File] = &files! {
    "api.js": SCRIPT,
    "attachments.js": SCRIPT,
    "cache.js": SCRIPT,
    "charts.js": SCRIPT,
    "chat.js": SCRIPT,
    "chats.js": SCRIPT,
    "connection.js": SCRIPT,
    "dom.js": SCRIPT,
    "formulas.js": SCRIPT,
    "icon.svg": IMAGE,
    "inspector.js": SCRIPT,
    "main.js": SCRIPT,
    "manifest.webmanifest": MANIFEST,
    "markdown.js": SCRIPT,
    "marked.js": SCRIPT,
    "messages.js": SCRIPT,
    "misses.js": SCRIPT,
    "models.js": SCRIPT,
    "picture.js": SCRIPT,
    "store.js": SCRIPT,
    "style.css": STYLE,
    "syntax.js": SCRIPT,
    "system.js": SCRIPT,
    "temml.js": SCRIPT,
    "tree.js": SCRIPT,
    "versions.js": SCRIPT,
};

/// The routes of the page, which are not part of the API's description.
pub(crate) fn routes<S: Clone + Send + Sync + 'static>() -> Vec<Route<S>> {
    vec![
        get("/", Everybody, async |headers: HeaderMap| INDEX.reply(&headers)),
        get("/page/{name}", Everybody, file),
        #[cfg(feature = "demo-model")]
        get("/page/handbook.json", Everybody, handbook),
        #[cfg(feature = "demo-model")]
        get("/page/picture.json", Everybody, picture),
    ]
}

async fn file(
    name: Result<PathId<String>, ApiError>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    // A name that is not UTF-8 belongs to no file.
    let file = name.ok().and_then(|PathId(name)| FILES.iter().find(|file| file.0 == name));
    let missing = || ApiError::new(StatusCode::NOT_FOUND, "the page has no such file");
    Ok(file.ok_or_else(missing)?.reply(&headers))
}

/// `GET /page/handbook.json`: a handbook that the demo model can be asked about.
#[cfg(feature = "demo-model")]
async fn handbook(headers: HeaderMap) -> Result<Response, ApiError> {
    let book = stolon::demo::handbook().map_err(|_| ApiError::internal())?;
    let json = serde_json::json!({"system": book.system, "questions": texts(&book.questions)});
    Ok(reply("application/json", json.to_string(), &headers))
}

/// `GET /page/picture.json`: a picture that the demo vision model can be asked about.
#[cfg(feature = "demo-model")]
async fn picture(headers: HeaderMap) -> Result<Response, ApiError> {
    use base64::Engine as _;
    let picture = stolon::demo::picture().map_err(|_| ApiError::internal())?;
    let file = base64::engine::general_purpose::STANDARD.encode(picture.png);
    let image = format!("data:image/png;base64,{file}");
    let questions = texts(&picture.questions);
    let description = &picture.description;
    let json = serde_json::json!({
        "image": image, "description": description, "questions": questions,
    });
    Ok(reply("application/json", json.to_string(), &headers))
}

#[cfg(feature = "demo-model")]
fn texts(questions: &[stolon::demo::Question]) -> Vec<&str> {
    questions.iter().map(|question| question.question.as_str()).collect()
}

impl File {
    fn reply(&self, headers: &HeaderMap) -> Response {
        reply(self.1, self.2, headers)
    }
}

/// A file, or only its tag if the browser has this version already.
fn reply(kind: &'static str, content: impl Into<String>, headers: &HeaderMap) -> Response {
    let content = content.into();
    let mut hasher = DefaultHasher::new();
    content.hash(&mut hasher);
    let hash = format!("\"{:016x}\"", hasher.finish());
    let known = headers.get_all(header::IF_NONE_MATCH).iter().filter_map(|tags| tags.to_str().ok());
    let known = known.flat_map(|tags| tags.split(','));
    let is_known = known.map(|tag| tag.trim().trim_start_matches("W/")).any(|known| known == hash);
    // The tag is weak, because the same content may be sent compressed or not.
    let tag = format!("W/{hash}");
    // Browsers ask again each time, so that a page never mixes files of two versions.
    let caching = [(header::ETAG, tag), (header::CACHE_CONTROL, "no-cache".to_owned())];
    let mut response = match is_known {
        true => (StatusCode::NOT_MODIFIED, caching).into_response(),
        false => (caching, [(header::CONTENT_TYPE, kind)], content).into_response(),
    };
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ] {
        response.headers_mut().insert(name, http::HeaderValue::from_static(value));
    }
    response
}
