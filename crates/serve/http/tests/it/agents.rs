//! The requests of coding agents: they have parameters that are only advice, and tools that their
//! vendor's service would execute. The bodies have the members of real first requests, with shorter
//! texts.

use serde_json::{Value, json};

use stolon_http::UnknownParameters;

use crate::support::{SCRIPTED, Server};

fn weather() -> Value {
    json!({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "number"}}})
}

/// Sends a body and returns the names of the ignored parameters, and the reply.
async fn ask(server: &Server, path: &str, body: Value) -> (String, Value) {
    let reply = server.send(path, body.to_string()).await;
    let status = reply.status();
    let ignored = reply.headers().get("x-stolon-ignored").cloned();
    let text = reply.text().await.expect("a text");
    assert!(status.is_success(), "{status}: {text}");
    let ignored = ignored.map(|names| names.to_str().expect("ASCII").to_owned());
    (ignored.unwrap_or_default(), serde_json::from_str(&text).expect("JSON"))
}

/// Goal: the first request of Claude Code is answered, and its advice is named.
#[tokio::test]
async fn claude_code_connects() {
    let server = Server::start(SCRIPTED);
    let body = json!({
        "max_tokens": 64, "stream": false,
        "system": [{"type": "text", "text": "You are an agent.",
                    "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "Please: script:call", "cache_control": {"type": "ephemeral"}}]}],
        "tools": [
            {"name": "get_weather", "description": "Looks it up.", "input_schema": weather(),
             "defer_loading": false},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "thinking": {"type": "disabled"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "metadata": {"user_id": "someone"},
    });
    let (ignored, reply) = ask(&server, "/v1/messages?beta=true", body).await;
    assert_eq!(
        ignored,
        "context_management, output_config.effort, tools.web_search_20250305, \
         tools[0].defer_loading"
    );
    let call = reply["content"].as_array().expect("a list").last().expect("a block");
    assert_eq!(call["name"], "get_weather", "{reply}");
    assert_eq!(call["input"], json!({"city": "Paris", "days": 2}));
}

/// Goal: the first request of the Codex CLI is answered. The functions of a namespace can be
/// called, and the call names both.
#[tokio::test]
async fn codex_connects() {
    let server = Server::start(SCRIPTED);
    let message = |role: &str, text: &str| json!({"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]});
    let tools = json!([
        {"type": "function", "name": "get_weather", "description": "Looks it up.", "strict": false,
         "parameters": weather()},
        {"type": "namespace", "name": "clock", "description": "Times.", "tools": [
            {"type": "function", "name": "now", "description": "The time.", "strict": false,
             "parameters": {"type": "object", "properties": {}}, "defer_loading": true}]},
        {"type": "web_search", "external_web_access": false},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
    ]);
    let body = json!({
        "instructions": "You are an agent.", "stream": false, "store": false,
        "input": [message("developer", "Be brief."), message("user", "Please: script:call")],
        "tools": tools, "tool_choice": "auto", "parallel_tool_calls": true,
        "reasoning": {"effort": "none", "summary": "auto"},
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "key",
        "text": {"verbosity": "low"}, "client_metadata": {"x": "y"}, "service_tier": "priority",
        "max_output_tokens": 64,
    });
    let (ignored, reply) = ask(&server, "/v1/responses", body.clone()).await;
    assert_eq!(
        ignored,
        "reasoning.summary, service_tier, text.verbosity, \
         tools.web_search, tools[1].tools[0].defer_loading"
    );
    let call = reply["output"].as_array().expect("a list").last().expect("an item");
    assert_eq!((&call["type"], &call["name"]), (&json!("function_call"), &json!("get_weather")));
    assert_eq!(call.get("namespace"), None);

    let mut next = body;
    next["input"] = json!([message("user", "Please: script:clock")]);
    let (_, reply) = ask(&server, "/v1/responses", next.clone()).await;
    let call = reply["output"].as_array().expect("a list").last().expect("an item");
    assert_eq!((&call["namespace"], &call["name"]), (&json!("clock"), &json!("now")), "{reply}");
    // The call and its output are part of the next turn.
    let output =
        json!({"type": "function_call_output", "call_id": call["call_id"], "output": "noon"});
    let input = next["input"].as_array_mut().expect("a list");
    input.extend([call.clone(), output, message("user", "Please: script:plain")]);
    let (_, reply) = ask(&server, "/v1/responses", next).await;
    assert_eq!(reply["output"][0]["content"][0]["text"], "Hello, world.");
}

/// Goal: the first request of OpenCode is answered, and values that other servers accept are.
#[tokio::test]
async fn opencode_connects() {
    let server = Server::start(SCRIPTED);
    let tools = json!([
        {"type": "function", "function": {"name": "get_weather", "parameters": weather()}},
        {"type": "custom", "custom": {"name": "shell"}},
    ]);
    let body = json!({
        "max_tokens": 64, "top_p": 0, "stop": "", "store": true,
        "messages": [{"role": "user", "content": "Please: script:call"}], "tools": tools,
        "tool_choice": "auto", "reasoning_effort": "medium", "verbosity": "low",
        "chat_template_kwargs": {"enable_thinking": false},
        "prompt_cache_options": {"ttl": "1h"},
    });
    let (ignored, reply) = ask(&server, "/v1/chat/completions", body.clone()).await;
    assert_eq!(ignored, "prompt_cache_options, reasoning_effort, store, verbosity");
    let call = &reply["choices"][0]["message"]["tool_calls"][0]["function"];
    assert_eq!(call["name"], "get_weather", "{reply}");
    // Parameters that would change the answer are still refused, and so are unknown ones.
    for (name, value) in [("length_penalty", json!(2)), ("temprature", json!(1))] {
        let mut wrong = body.clone();
        wrong[name] = value;
        assert_eq!(server.post("/v1/chat/completions", wrong).await.0, 400, "{name}");
    }
    let mut wrong = body;
    wrong["tools"][1]["type"] = json!("fnction");
    assert_eq!(server.post("/v1/chat/completions", wrong).await.0, 400);
}

/// Goal: the effort reaches a template that has a variable for it, and is then not ignored.
#[tokio::test]
async fn a_template_receives_the_effort() {
    for variable in ["reasoning_effort", "reasoning_strength"] {
        reaches(variable).await;
    }
}

async fn reaches(variable: &str) {
    let template =
        format!("{{% if {variable} == 'high' %}}script:json{{% else %}}script:plain{{% endif %}}");
    let server = Server::with(SCRIPTED, |engine, _| engine.chat_template(template));
    for (effort, answer) in [("high", "{\"answer\": 42}"), ("low", "Hello, world.")] {
        let messages = json!([{"role": "user", "content": "x"}]);
        let body = json!({"messages": messages, "reasoning_effort": effort, "max_tokens": 8});
        let (ignored, reply) = ask(&server, "/v1/chat/completions", body).await;
        assert_eq!(ignored, "");
        assert_eq!(reply["choices"][0]["message"]["content"], answer);
        let body = json!({"input": "x", "reasoning": {"effort": effort}, "max_output_tokens": 8});
        let (ignored, reply) = ask(&server, "/v1/responses", body).await;
        assert_eq!(ignored, "");
        assert_eq!(reply["output"][0]["content"][0]["text"], answer);
        let body =
            json!({"messages": messages, "output_config": {"effort": effort}, "max_tokens": 8});
        let (ignored, reply) = ask(&server, "/v1/messages", body).await;
        assert_eq!(ignored, "");
        assert_eq!(reply["content"][0]["text"], answer);
    }
}

/// Goal: in a template that can switch reasoning, the effort switches it, unless the request says
/// itself whether to reason.
#[tokio::test]
async fn the_effort_switches_reasoning() {
    let messages = json!([{"role": "user", "content": "x"}]);
    for name in ["enable_thinking", "thinking"] {
        let template = format!(
            "{{% if {name} is not defined %}}script:two{{% elif {name} %}}script:json\
             {{% else %}}script:plain{{% endif %}}"
        );
        let server = Server::with(SCRIPTED, |engine, _| engine.chat_template(template));
        for (effort, answer) in
            [("none", "Hello, world."), ("low", "{\"answer\": 42}"), ("high", "{\"answer\": 42}")]
        {
            let mut body =
                json!({"messages": messages, "reasoning_effort": effort, "max_tokens": 8});
            let (ignored, reply) = ask(&server, "/v1/chat/completions", body.clone()).await;
            assert_eq!(ignored, "", "{name} {effort}");
            assert_eq!(reply["choices"][0]["message"]["content"], answer, "{name} {effort}");
            body["chat_template_kwargs"] = json!({ name: false });
            let (_, reply) = ask(&server, "/v1/chat/completions", body).await;
            assert_eq!(reply["choices"][0]["message"]["content"], "Hello, world.");
            let body =
                json!({"input": "x", "reasoning": {"effort": effort}, "max_output_tokens": 8});
            let (_, reply) = ask(&server, "/v1/responses", body).await;
            assert_eq!(reply["output"][0]["content"][0]["text"], answer, "{name} {effort}");
        }
        let thinking = json!({"type": "enabled", "budget_tokens": 1024});
        let body = json!({"messages": messages, "thinking": thinking, "max_tokens": 2000});
        let (_, reply) = ask(&server, "/v1/messages", body).await;
        assert_eq!(reply["content"][0]["text"], "{\"answer\": 42}", "{name}");
    }
}

/// Goal: if the operator wants it, unknown parameters are ignored and named, and
/// those that would change the answer are refused.
#[tokio::test]
async fn unknown_parameters_can_be_ignored() {
    let server = Server::with(SCRIPTED, |engine, options| {
        options.unknown_parameters = UnknownParameters::Warn;
        engine
    });
    let body = json!({"prompt": "script:plain", "max_tokens": 8, "never_heard_of": {"a": [1]}});
    let (ignored, reply) = ask(&server, "/v1/completions", body.clone()).await;
    assert_eq!(ignored, "never_heard_of");
    assert_eq!(reply["choices"][0]["text"], "Hello, world.");
    let mut wrong = body;
    wrong["length_penalty"] = json!(2);
    assert_eq!(server.post("/v1/completions", wrong).await.0, 400);
}
