//! `GET /openapi.json` and `GET /docs`: a description of the API, and a page that shows it.
//!
//! The schemas come from the types in [`api`](crate::api), which the server itself uses to parse
//! requests and to write replies. Its operations are the routes of `routes.rs`. Neither the
//! description nor the page loads anything from elsewhere.

mod page;

use std::borrow::Cow;
use std::sync::LazyLock;

use axum::extract::State;
use axum::http::{HeaderName, header};
use axum::response::IntoResponse;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use hmac_sha256::Hash;
use schemars::SchemaGenerator;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use crate::api::schemas::Make;
use crate::api::{chat, messages, options, responses};
use crate::guard::deadline;
use crate::handlers::app::RouterOptions;
use crate::routes::{self, FILE, Operation, Reply, Request, Role, Route};
use crate::wire::reply::LINES;
use crate::wire::root_path::RootPath;

/// JSON pointer of the schemas in the description.
const COMPONENTS: &str = "/components/schemas";

/// The servers in the description of a router without a root path, as JSON. The address is relative
/// to the description, because a router may be nested below any path.
const RELATIVE_SERVERS: &str = r#""servers":[{"url":"./"}]"#;

/// The description as JSON, made at the first request for it.
static DESCRIPTION: LazyLock<Value> = LazyLock::new(describe);
static JSON: LazyLock<String> = LazyLock::new(|| DESCRIPTION.to_string());
static PAGE: LazyLock<String> = LazyLock::new(|| page::render(&DESCRIPTION));

/// `GET /openapi.json`.
pub(crate) async fn json(State(root_path): State<RootPath>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], at(&root_path))
}

/// The description of a server that clients reach below this path.
fn at(root_path: &RootPath) -> Cow<'static, str> {
    if root_path.as_str().is_empty() {
        return JSON.as_str().into();
    }
    let servers = json!([{"url": root_path.as_str()}]);
    // Only this member is different, and the description has hundreds of kilobytes.
    JSON.replacen(RELATIVE_SERVERS, &format!("\"servers\":{servers}"), 1).into()
}

/// The policy of the page, which allows nothing but its own styles, by their hash, and its script.
static POLICY: LazyLock<String> = LazyLock::new(|| {
    let hash = BASE64_STANDARD.encode(Hash::hash(page::STYLE.as_bytes()));
    format!(
        "default-src 'none'; style-src 'sha256-{hash}'; script-src 'self'; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; \
         trusted-types 'none'"
    )
});

/// `GET /docs`.
pub(crate) async fn docs() -> impl IntoResponse {
    let headers: [(HeaderName, &str); 3] = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, POLICY.as_str()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    (headers, PAGE.as_str())
}

/// `GET /docs/search.js`.
pub(crate) async fn search() -> impl IntoResponse {
    let kind = (header::CONTENT_TYPE, "text/javascript; charset=utf-8");
    let kind = [kind, (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
    (kind, include_str!("../../page/search.js"))
}

/// The OpenAPI document.
fn describe() -> Value {
    let mut schemas = Schemas::new();
    let mut paths = Map::new();
    let mut tags = Vec::new();
    for group in routes::groups(&RouterOptions::default()) {
        tags.push(json!({"name": group.name, "description": group.description}));
        for route in &group.routes {
            let Some(operation) = &route.operation else { continue };
            // For axum, a parameter with a star may contain slashes.
            let item = paths.entry(route.path.replace("{*", "{")).or_insert_with(|| json!({}));
            item[route.method] = schemas.operation(route, operation);
            item[route.method]["tags"] = json!([group.name]);
        }
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Stolon",
            "version": env!("CARGO_PKG_VERSION"),
            "summary": "An LLM inference engine with a shared prefix cache",
            "description": "OpenAI's and Anthropic's APIs over one model, and the prefix cache for \
                            operators. A member of a request that no schema names is refused with \
                            status 400, unless its value requests nothing.",
            "license": {"name": "MIT OR Apache-2.0", "identifier": "MIT OR Apache-2.0"},
        },
        // See RELATIVE_SERVERS.
        "servers": [{"url": "./"}],
        "tags": tags,
        "paths": paths,
        "components": {
            "schemas": schemas.finish(),
            "securitySchemes": {
                "apiKey": {
                    "type": "http", "scheme": "bearer",
                    "description": "An API key, if the server is started with any.",
                },
                "xApiKey": {
                    "type": "apiKey", "in": "header", "name": "x-api-key",
                    "description": "An API key, as Anthropic's clients send it.",
                },
                "adminKey": {
                    "type": "http", "scheme": "bearer",
                    "description": "The administrator's key. Without one, only programs on the \
                                    server's machine may use these routes.",
                },
            },
        },
    })
}

/// Makes the schemas of an API's types, each of which is written once.
struct Schemas {
    /// Describes the types that the server accepts.
    requests: SchemaGenerator,
    /// Describes the types that the server writes.
    replies: SchemaGenerator,
}

impl Schemas {
    fn new() -> Self {
        let mut settings = SchemaSettings::draft2020_12();
        settings.definitions_path = COMPONENTS.into();
        settings.meta_schema = None;
        let requests = settings.clone().for_deserialize().into_generator();
        Self { requests, replies: settings.for_serialize().into_generator() }
    }

    /// The schemas of all types. The few types in both requests and replies have the same schema in
    /// both.
    fn finish(mut self) -> Value {
        let mut schemas = self.replies.take_definitions(true);
        schemas.extend(self.requests.take_definitions(true));
        let mut schemas = Value::Object(schemas);
        tidy(&mut schemas);
        schemas
    }

    /// One operation: its parameters, its body, and its replies.
    fn operation(&mut self, route: &Route, operation: &Operation) -> Value {
        let mut described = json!({
            "operationId": operation.id,
            "summary": operation.summary,
            "responses": self.responses(route),
            "security": match route.role {
                Role::Everybody => json!([]),
                Role::Client => json!([{"apiKey": []}, {"xApiKey": []}, {}]),
                Role::Operator => json!([{"adminKey": []}, {}]),
            },
        });
        let content = route.request.map(|request| match request {
            Request::Json(make) => ("application/json", schema(make, &mut self.requests)),
            Request::File => (FILE, json!({"type": "string", "format": "binary"})),
        });
        if let Some((kind, schema)) = content {
            described["requestBody"] =
                json!({"required": true, "content": {kind: {"schema": schema}}});
        }
        let mut parameters = self.parameters(route);
        if route.has_deadline() {
            parameters.push(json!({
                "name": deadline::HEADER.as_str(), "in": "header", "required": false,
                "description": "Seconds within which the answer has to be complete; fractions are \
                                allowed. The request is then ended like one that reaches the \
                                server's own limit.",
                "schema": {"type": "number", "exclusiveMinimum": 0},
            }));
        }
        if !parameters.is_empty() {
            described["parameters"] = Value::Array(parameters);
        }
        described
    }

    /// The parameters in the path and in the query.
    fn parameters(&mut self, route: &Route) -> Vec<Value> {
        let mut parameters = Vec::new();
        if let Some((_, rest)) = route.path.split_once('{')
            && let Some((name, _)) = rest.split_once('}')
        {
            parameters.push(json!({
                "name": name.trim_start_matches('*'), "in": "path", "required": true,
                "schema": {"type": "string"},
            }));
        }
        let Some(query) = route.query else { return parameters };
        let mut query = Value::from(query(&mut self.requests));
        tidy(&mut query);
        for (name, schema) in query["properties"].as_object().into_iter().flatten() {
            let mut schema = schema.clone();
            let description = schema.as_object_mut().and_then(|it| it.remove("description"));
            parameters.push(json!({
                "name": name, "in": "query", "required": false, "schema": schema,
                "description": description,
            }));
        }
        parameters
    }

    fn responses(&mut self, route: &Route) -> Value {
        let mut content = Map::new();
        for reply in &route.replies {
            let (kind, schema) = match reply {
                Reply::Json(make) => ("application/json", schema(*make, &mut self.replies)),
                Reply::Text(kind) => (*kind, json!({"type": "string"})),
                // A schema describes the data of one event.
                Reply::Lines(make) => (LINES, schema(*make, &mut self.replies)),
                Reply::Events(make) => ("text/event-stream", schema(*make, &mut self.replies)),
            };
            content.insert(kind.to_owned(), json!({ "schema": schema }));
        }
        let request_id = json!({
            "description": "The id of the request: the client's, or a fresh one",
            "schema": {"type": "string"},
        });
        let headers = json!({"x-request-id": request_id});
        let mut responses = json!({
            "200": {"description": "Success", "content": content, "headers": headers},
        });
        for status in route.errors() {
            let (description, retries) = meaning(status);
            let mut headers = headers.clone();
            if retries {
                headers["retry-after"] = json!({
                    "description": "Seconds after which the request may succeed",
                    "schema": {"type": "integer", "minimum": 1},
                });
            }
            let schema = schema(route.error(), &mut self.replies);
            responses[status.to_string()] = json!({
                "description": description, "headers": headers,
                "content": {"application/json": {"schema": schema}},
            });
        }
        responses
    }
}

/// The meaning of an error's status, and whether it comes with `Retry-After`.
fn meaning(status: u16) -> (&'static str, bool) {
    match status {
        400 => ("The request is wrong; `param` names the member at fault", false),
        401 => ("A key is missing or wrong", false),
        403 => ("The route may not be used from there", false),
        404 => ("There is no such model, pin or session", false),
        408 => ("The body did not arrive in time", false),
        409 => ("The prompt cannot be pinned, or is not cached, or the session is in use", false),
        413 => ("The body is too large", false),
        415 => ("The body is not of the expected type, or is compressed", false),
        429 => ("The queue, or what the key may use, is full", true),
        501 => ("The backend cannot copy KV blocks", false),
        503 => ("The server cannot answer now", true),
        504 => ("The time for the answer has passed", false),
        _ => ("A defect of the server", false),
    }
}

fn schema(make: Make, generator: &mut SchemaGenerator) -> Value {
    let mut schema = Value::from(make(generator));
    tidy(&mut schema);
    schema
}

/// Constants that descriptions name.
const CONSTANTS: [(&str, usize); 15] = [
    ("MAX_MESSAGES", chat::MAX_MESSAGES),
    ("MAX_PARTS", chat::MAX_PARTS),
    ("MAX_TOOLS", chat::MAX_TOOLS),
    ("MAX_CHOICES", options::MAX_CHOICES),
    ("MAX_INCLUDED", responses::MAX_INCLUDED),
    ("MAX_LOGPROB_IDS", options::MAX_LOGPROB_IDS),
    ("MAX_STOP_STRINGS", options::MAX_STOP_STRINGS),
    ("MAX_TOKEN_IDS", options::MAX_TOKEN_IDS),
    ("MAX_STOP_SEQUENCES", messages::MAX_STOP_SEQUENCES),
    ("MAX_LABELS", crate::api::scores::MAX_LABELS),
    ("MAX_LABEL_BYTES", crate::api::scores::MAX_LABEL_BYTES),
    ("MAX_EXTRA", crate::api::llama_cpp::MAX_EXTRA),
    ("MAX_PROMPTS", crate::api::cache::MAX_PROMPTS),
    ("MAX_PIN_TEXT", crate::api::cache::MAX_PIN_TEXT),
    ("MAX_OUTLINE_NODES", crate::api::outline::MAX_OUTLINE_NODES),
];

/// Turns rustdoc's links in descriptions into text, and removes Rust-specific formats.
fn tidy(value: &mut Value) {
    match value {
        Value::Array(list) => list.iter_mut().for_each(tidy),
        Value::Object(object) => {
            if object.get("format").is_some_and(|format| format != "binary") {
                object.remove("format");
            }
            for (name, member) in object.iter_mut() {
                match member {
                    Value::String(text) if name == "description" => *text = without_links(text),
                    other => tidy(other),
                }
            }
        }
        _ => {}
    }
}

/// A description in which `` [`NAME`] `` is the value of the constant, or else just the name.
fn without_links(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, link)) = rest.split_once("[`") {
        let Some((name, after)) = link.split_once("`]") else { break };
        plain.push_str(before);
        match CONSTANTS.iter().find(|(constant, _)| *constant == name) {
            Some((_, value)) => plain.push_str(&value.to_string()),
            None => plain.push_str(&format!("`{name}`")),
        }
        // The target of a link follows in brackets.
        rest = match after.strip_prefix('(').and_then(|target| target.split_once(')')) {
            Some((_, after)) => after,
            None => after,
        };
    }
    plain.push_str(rest);
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: descriptions are text for readers who have no source.
    #[test]
    fn descriptions_have_no_links_of_rustdoc() {
        assert_eq!(
            without_links("at most [`MAX_PROMPTS`]; see [`X::y`](a::b)."),
            "at most 128; see `X::y`."
        );
        let text = DESCRIPTION.to_string();
        assert!(!text.contains("[`"), "{}", &text[text.find("[`").unwrap_or(0)..][..80]);
        assert!(!text.contains("MAX_"), "a constant is missing in CONSTANTS");
    }

    /// Goal: the description names the root path as its server, and is otherwise the same.
    #[test]
    fn the_root_path_is_the_server() {
        let root_path: RootPath = "/llm/".parse().expect("a path");
        let mut below: Value = serde_json::from_str(&at(&root_path)).expect("JSON");
        assert_eq!(below["servers"], json!([{"url": "/llm"}]));
        below["servers"] = json!([{"url": "./"}]);
        assert_eq!(below, *DESCRIPTION);
        assert_eq!(at(&RootPath::default()), JSON.as_str());
    }

    /// Goal: a type that is both in requests and in replies has one form.
    #[test]
    fn types_have_one_form() {
        let mut schemas = Schemas::new();
        for route in routes::groups(&RouterOptions::default()).iter().flat_map(|it| &it.routes) {
            if let Some(operation) = &route.operation {
                schemas.operation(route, operation);
            }
        }
        let requests = schemas.requests.take_definitions(true);
        for (name, schema) in schemas.replies.take_definitions(true) {
            assert!(requests.get(&name).is_none_or(|request| *request == schema), "{name}");
        }
    }
}
