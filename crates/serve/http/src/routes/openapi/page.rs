//! The reference page: the description of the API as one HTML document, which a script searches.

use std::fmt::Write;

use serde_json::Value;

/// The styles of the page, for light and dark.
pub(super) const STYLE: &str = "\
:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;\
margin:0 auto;padding:1rem}code{font:0.9em ui-monospace,monospace}h2{margin-top:2.5rem}\
table{border-collapse:collapse;width:100%;margin:.5rem 0}td,th{text-align:left;vertical-align:top;\
padding:.25rem .5rem;border-bottom:1px solid #8884}details{border:1px solid #8886;\
border-radius:6px;margin:.5rem 0;padding:.5rem .75rem}summary{cursor:pointer}\
#search{font:inherit;width:100%;box-sizing:border-box;padding:.4rem .6rem}\
[hidden]{display:none}.method{display:inline-block;min-width:3.2em;font-weight:600;text-transform:uppercase}";

/// Renders the description.
pub(super) fn render(description: &Value) -> String {
    let mut page = Page(String::new());
    let info = &description["info"];
    page.add("<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">");
    page.add("<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">");
    page.add("<title>Stolon: HTTP API</title><style>");
    page.add(STYLE);
    page.add("</style></head><body><main><h1>Stolon: HTTP API</h1><p>");
    page.text(&info["description"]);
    page.add("</p><p>Version ");
    page.text(&info["version"]);
    page.add(". For programs: <a href=\"openapi.json\"><code>/openapi.json</code></a>.</p>");
    for tag in list(&description["tags"]) {
        page.heading(&tag["name"]);
        page.add("<p>");
        page.text(&tag["description"]);
        page.add("</p>");
        for (path, item) in members(&description["paths"]) {
            for (method, operation) in members(item) {
                if operation["tags"][0] == tag["name"] {
                    page.operation(method, path, operation);
                }
            }
        }
    }
    page.heading(&Value::from("Access"));
    page.add("<table>");
    for (name, scheme) in members(&description["components"]["securitySchemes"]) {
        page.row(name, "", &scheme["description"]);
    }
    page.add("</table>");
    page.heading(&Value::from("Types"));
    for (name, schema) in members(&description["components"]["schemas"]) {
        page.schema(name, schema);
    }
    page.add("</main><script type=\"module\" src=\"docs/search.js\"></script></body></html>\n");
    page.0
}

struct Page(String);

impl Page {
    fn add(&mut self, html: &str) {
        self.0.push_str(html);
    }

    /// Adds text of the description.
    fn text(&mut self, text: &Value) {
        self.0.push_str(&escape(text.as_str().unwrap_or_default()));
    }

    fn heading(&mut self, text: &Value) {
        self.add("<h2>");
        self.text(text);
        self.add("</h2>");
    }

    fn row(&mut self, name: &str, kind: &str, description: &Value) {
        let _ = write!(self.0, "<tr><td><code>{}</code></td><td>{kind}</td><td>", escape(name));
        self.text(description);
        self.add("</td></tr>");
    }

    fn operation(&mut self, method: &str, path: &str, operation: &Value) {
        let id = escape(operation["operationId"].as_str().unwrap_or_default());
        let path = escape(path);
        let _ = write!(
            self.0,
            "<details id=\"{id}\"><summary><span class=\"method\">{method}</span> \
             <code>{path}</code> "
        );
        self.text(&operation["summary"]);
        self.add("</summary><table>");
        for parameter in list(&operation["parameters"]) {
            let name = parameter["name"].as_str().unwrap_or_default();
            let place = parameter["in"].as_str().unwrap_or_default();
            let kind = format!("{place}, {}", kind(&parameter["schema"]));
            self.row(name, &kind, &parameter["description"]);
        }
        let body = &operation["requestBody"]["content"]["application/json"]["schema"];
        if !body.is_null() {
            self.row("body", &kind(body), &body["description"]);
        }
        for (status, response) in members(&operation["responses"]) {
            let kinds = members(&response["content"]).map(|(media, content)| {
                format!("<code>{}</code>: {}", escape(media), kind(&content["schema"]))
            });
            let kinds = kinds.collect::<Vec<_>>().join("<br>");
            self.row(status, &kinds, &response["description"]);
        }
        self.add("</table></details>");
    }

    fn schema(&mut self, name: &str, schema: &Value) {
        let id = escape(name);
        let _ = write!(self.0, "<details id=\"type-{id}\" open><summary><code>{id}</code> ");
        self.text(&schema["description"]);
        self.add("</summary>");
        let required = list(&schema["required"]).collect::<Vec<_>>();
        if schema["properties"].is_object() {
            self.add("<table>");
            for (name, member) in members(&schema["properties"]) {
                let is_required = required.iter().any(|one| *one == name);
                let kind = kind(member) + if is_required { ", required" } else { "" };
                self.row(name, &kind, &member["description"]);
            }
            self.add("</table>");
        } else {
            let _ = write!(self.0, "<p>{}</p>", kind(schema));
        }
        self.add("</details>");
    }
}

/// The type of a value, as HTML.
fn kind(schema: &Value) -> String {
    if let Some(reference) = schema["$ref"].as_str() {
        let name = escape(reference.rsplit('/').next().unwrap_or_default());
        return format!("<a href=\"#type-{name}\"><code>{name}</code></a>");
    }
    for choice in ["anyOf", "oneOf"] {
        if schema[choice].is_array() {
            return list(&schema[choice]).map(kind).collect::<Vec<_>>().join(" or ");
        }
    }
    if !schema["const"].is_null() {
        return format!("<code>{}</code>", escape(&schema["const"].to_string()));
    }
    if schema["enum"].is_array() {
        let values = list(&schema["enum"]).map(|value| escape(&value.to_string()));
        let values = values.map(|value| format!("<code>{value}</code>"));
        return values.collect::<Vec<_>>().join(" or ");
    }
    let names: Vec<&str> = match &schema["type"] {
        Value::String(name) => vec![name],
        several => list(several).filter_map(Value::as_str).collect(),
    };
    let mut text = match names.is_empty() {
        true => "any value".to_owned(),
        false => escape(&names.join(" or ")),
    };
    if schema["items"].is_object() {
        let _ = write!(text, " of {}", kind(&schema["items"]));
    } else if schema["properties"].is_object() {
        let inner = members(&schema["properties"])
            .map(|(name, member)| format!("<code>{}</code>: {}", escape(name), kind(member)));
        let _ = write!(text, " {{ {} }}", inner.collect::<Vec<_>>().join(", "));
    }
    for (bound, words) in [("minimum", "from"), ("maximum", "to"), ("maxItems", "at most")] {
        if !schema[bound].is_null() {
            let _ = write!(text, " {words} {}", schema[bound]);
        }
    }
    text
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn members(value: &Value) -> impl Iterator<Item = (&str, &Value)> {
    value.as_object().into_iter().flatten().map(|(name, value)| (name.as_str(), value))
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            other => escaped.push(other),
        }
    }
    escaped
}
