//! Calls of tools and reasoning in `/v1/chat/completions`, with a model that recites scripts.

use serde_json::{Value, json};

use stolon::ToolCallFormat;
use stolon_http::FormatChoice;

use crate::support::{SCRIPTED, Server};

const PATH: &str = "/v1/chat/completions";

fn tool(name: &str) -> Value {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let description = "Looks something up.";
    json!({"type": "function",
           "function": {"name": name, "description": description, "parameters": parameters}})
}

/// A request that is answered with a script.
fn ask(script: &str) -> Value {
    json!({"messages": [{"role": "user", "content": format!("Please: {script}")}],
           "tools": [tool("get_weather"), tool("get_time")], "max_tokens": 32})
}

/// The message and the finish reason that streamed pieces add up to.
fn put_together(events: &[Value]) -> (Value, Value) {
    let mut message = json!({"role": "assistant"});
    let mut reason = Value::Null;
    for event in events {
        let choice = &event["choices"][0];
        let delta = &choice["delta"];
        for name in ["content", "reasoning_content", "reasoning"] {
            if let Some(text) = delta[name].as_str() {
                let before = message[name].as_str().unwrap_or_default();
                message[name] = json!(format!("{before}{text}"));
            }
        }
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = call["index"].as_u64().expect("an index") as usize;
            if message["tool_calls"].is_null() {
                message["tool_calls"] = json!([]);
            }
            let calls = message["tool_calls"].as_array_mut().expect("a list");
            if index == calls.len() {
                assert!(call["id"].is_string() && call["function"]["name"].is_string(), "{call}");
                let mut first = call.clone();
                first.as_object_mut().expect("an object").remove("index");
                calls.push(first);
            } else {
                assert!(call["id"].is_null() && call["function"]["name"].is_null(), "{call}");
                let before = calls[index]["function"]["arguments"].as_str().expect("arguments");
                let more = call["function"]["arguments"].as_str().expect("arguments");
                calls[index]["function"]["arguments"] = json!(format!("{before}{more}"));
            }
        }
        if !choice["finish_reason"].is_null() {
            reason = choice["finish_reason"].clone();
        }
    }
    (message, reason)
}

/// The message without ids, which differ from reply to reply.
fn without_ids(message: &Value) -> Value {
    let mut message = message.clone();
    for call in message["tool_calls"].as_array_mut().into_iter().flatten() {
        assert!(call.as_object_mut().expect("an object").remove("id").is_some());
    }
    message
}

/// Asks whole and streamed, and returns the message and the finish reason, which must be equal.
async fn answers(server: &Server, body: Value) -> (Value, Value) {
    let whole = server.ok(PATH, body.clone()).await;
    let events = server.events(PATH, body).await;
    let (mut streamed, reason) = put_together(&events);
    let choice = &whole["choices"][0];
    let mut message = choice["message"].clone();
    message.as_object_mut().expect("an object").remove("refusal");
    if message["content"].is_null() {
        assert_eq!(streamed["content"], "");
        streamed["content"] = Value::Null;
    }
    assert_eq!(without_ids(&streamed), without_ids(&message));
    assert_eq!(reason, choice["finish_reason"]);
    (choice["message"].clone(), reason)
}

/// Goal: calls are found, whole and streamed alike, with their ids, and they end the answer with
/// `tool_calls`; broken ones are text.
#[tokio::test]
async fn calls_are_found_whole_and_streamed() {
    let server = Server::start(SCRIPTED);
    let (message, reason) = answers(&server, ask("script:call")).await;
    assert_eq!((&message["content"], &reason), (&json!("I look it up."), &json!("tool_calls")));
    let call = &message["tool_calls"][0];
    assert_eq!(
        (&call["type"], &call["function"]["name"]),
        (&json!("function"), &json!("get_weather"))
    );
    assert_eq!(call["function"]["arguments"], r#"{"city": "Paris", "days": 2}"#);
    assert!(call["id"].as_str().is_some_and(|id| id.starts_with("call_")));

    let (message, _) = answers(&server, ask("script:two")).await;
    assert_eq!(message["content"], Value::Null);
    let name = |index: usize| &message["tool_calls"][index]["function"]["name"];
    assert_eq!((name(0), name(1)), (&json!("get_weather"), &json!("get_time")));
    assert_ne!(message["tool_calls"][0]["id"], message["tool_calls"][1]["id"]);
    let mut single = ask("script:two");
    single["parallel_tool_calls"] = json!(false);
    let (message, reason) = answers(&server, single).await;
    assert_eq!(
        (message["tool_calls"].as_array().map(Vec::len), reason),
        (Some(1), json!("tool_calls"))
    );

    let whole = server.ok(PATH, ask("script:broken")).await;
    let choice = &whole["choices"][0];
    assert_eq!(choice["message"]["tool_calls"], Value::Null);
    assert_eq!(choice["finish_reason"], "stop");
    let broken = "So: <tool_call>{\"name\": \"get_weather\", \"arguments\": {\"city\": oops}}";
    assert_eq!(choice["message"]["content"], broken);
    // A client that streams never sees the beginning of a call that is broken.
    let (message, _) = answers(&server, ask("script:broken")).await;
    assert_eq!(message["content"], broken);

    let mut cut = ask("script:call");
    cut["max_tokens"] = json!(5);
    let whole = server.ok(PATH, cut).await;
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    server.settled_audit().await;
}

/// Goal: without tools, or with `tool_choice: none`, calls are not looked for, and tools that are
/// not offered are not shown to the model.
#[tokio::test]
async fn without_tools_nothing_is_a_call() {
    let server = Server::start(SCRIPTED);
    let mut none = ask("script:call");
    none["tool_choice"] = json!("none");
    let mut without = none.clone();
    without.as_object_mut().expect("an object").remove("tools");
    let (chosen, reason) = answers(&server, none).await;
    let whole = server.ok(PATH, without).await;
    assert_eq!(chosen, whole["choices"][0]["message"]);
    assert_eq!(reason, "stop");
    assert!(chosen["content"].as_str().is_some_and(|text| text.contains("<tool_call>")));
}

/// Goal: the result of a call continues the conversation, and everything before it is cached.
#[tokio::test]
async fn results_of_calls_continue_the_conversation() {
    let server = Server::with(SCRIPTED, |engine, _| engine.block_size(4));
    let mut body = ask("script:call");
    let first = server.ok(PATH, body.clone()).await;
    let message = &first["choices"][0]["message"];
    let result = json!({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"],
                        "content": [{"type": "text", "text": "18 degrees. script:plain"}]});
    let turns = body["messages"].as_array_mut().expect("a list");
    turns.extend([message.clone(), result]);
    let second = server.ok(PATH, body).await;
    assert_eq!(second["choices"][0]["message"]["content"], "Hello, world.");
    let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    let before = first["usage"]["prompt_tokens"].as_u64().expect("a count");
    assert!(cached >= Some(before - before % 4), "{second}");
}

/// Goal: reasoning has a field of its own, whether the model or the prompt begins it, and can be
/// left out or left in the text.
#[tokio::test]
async fn reasoning_has_a_field_of_its_own() {
    let server = Server::start(SCRIPTED);
    let (message, _) = answers(&server, ask("script:think")).await;
    assert_eq!(message["reasoning_content"], "Let me think about it.");
    assert_eq!(message["content"], "It is sunny.");
    let mut open = ask("Think.");
    open["chat_template_kwargs"] = json!({"enable_thinking": true});
    let (message, _) = answers(&server, open.clone()).await;
    assert_eq!(
        (&message["reasoning_content"], &message["content"]),
        (&json!("Hmm, so."), &json!("Sunny indeed."))
    );
    open["include_reasoning"] = json!(false);
    let (message, _) = answers(&server, open).await;
    assert_eq!(
        (&message["reasoning_content"], &message["content"]),
        (&Value::Null, &json!("Sunny indeed."))
    );
    let server = Server::with(SCRIPTED, |engine, options| {
        options.reasoning = FormatChoice::Off;
        engine
    });
    let (message, _) = answers(&server, ask("script:think")).await;
    assert!(
        message["content"].as_str().is_some_and(|text| text.starts_with("<think>")),
        "{message}"
    );
}

/// Goal: the call of a tool with free text has its text, whole and streamed alike, also if the
/// request requires one, and the call and its result continue the conversation.
#[tokio::test]
async fn tools_with_free_text_are_called() {
    let custom = json!({"type": "custom", "custom": {"name": "get_weather"}});
    let server = Server::start(SCRIPTED);
    let mut body = ask("script:two");
    body["tools"] = json!([custom, tool("get_time")]);
    body["temperature"] = json!(0);
    let whole = server.ok(PATH, body.clone()).await;
    let choice = &whole["choices"][0];
    let calls = &choice["message"]["tool_calls"];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(calls[0]["custom"], json!({"name": "get_weather", "input": "Oslo"}), "{calls}");
    assert_eq!((&calls[0]["type"], calls[0].get("function")), (&json!("custom"), None));
    assert_eq!(
        (&calls[1]["type"], &calls[1]["function"]["arguments"]),
        (&json!("function"), &json!("{}"))
    );
    let (mut input, mut kinds) = (String::new(), Vec::new());
    for event in server.events(PATH, body.clone()).await {
        for call in event["choices"][0]["delta"]["tool_calls"].as_array().into_iter().flatten() {
            kinds.extend(call.get("type").cloned());
            input.push_str(call["custom"]["input"].as_str().unwrap_or_default());
        }
    }
    assert_eq!((input.as_str(), kinds), ("Oslo", vec![json!("custom"), json!("function")]));
    let turns = body["messages"].as_array_mut().expect("a list");
    turns.push(choice["message"].clone());
    for call in calls.as_array().expect("calls") {
        turns.push(
            json!({"role": "tool", "tool_call_id": call["id"], "content": "18 script:plain"}),
        );
    }
    let next = server.ok(PATH, body).await;
    assert_eq!(next["choices"][0]["message"]["content"], "Hello, world.");

    let server = Server::start("demo");
    for choice in [json!("required"), json!({"type": "custom", "custom": {"name": "get_weather"}})]
    {
        let mut body = ask("hello");
        body["tools"] = json!([custom]);
        body["tool_choice"] = choice;
        let reply = server.ok(PATH, body).await;
        let call = &reply["choices"][0]["message"]["tool_calls"][0];
        assert_eq!(
            (&call["type"], &call["custom"]["name"]),
            (&json!("custom"), &json!("get_weather"))
        );
    }
}

/// Goal: the text of a tool whose grammar is a regular expression matches it, whether a call is
/// required or not, and a wrong expression is refused by name.
#[tokio::test]
async fn texts_of_tools_match_a_regular_expression() {
    let custom = |definition: &str| {
        let grammar = json!({"syntax": "regex", "definition": definition});
        json!({"type": "custom", "custom": {"name": "note",
               "format": {"type": "grammar", "grammar": grammar}}})
    };
    let server = Server::start("demo");
    let mut body = ask("hello");
    body["max_tokens"] = json!(200);
    body["tools"] = json!([custom("[ab]{3}\"\n|[cd]{3}\"\n")]);
    body["tool_choice"] = json!("required");
    let reply = server.ok(PATH, body.clone()).await;
    let input = &reply["choices"][0]["message"]["tool_calls"][0]["custom"]["input"];
    let text = input.as_str().expect("a text").strip_suffix("\"\n");
    let text = text.unwrap_or_else(|| panic!("{reply}"));
    let of = |letters: [char; 2]| text.chars().all(|char| letters.contains(&char));
    assert!(text.len() == 3 && (of(['a', 'b']) || of(['c', 'd'])), "{text:?}");
    // Codex's grammar of patches, with one line instead of any number.
    let patch = "start: begin_patch hunk end_patch\nbegin_patch: \"*** Begin Patch\" LF\n\
        end_patch: \"*** End Patch\" LF?\nhunk: add_hunk | delete_hunk\n\
        add_hunk: \"*** Add File: \" filename LF add_line\n\
        delete_hunk: \"*** Delete File: \" filename LF\n\
        filename: /[a-z]\\.\"rs/\nadd_line: \"+\" /[\\\\x]{4}/ LF -> line\n%import common.LF";
    let mut tool = custom(patch);
    tool["custom"]["format"]["grammar"]["syntax"] = json!("lark");
    body["tools"] = json!([tool]);
    let reply = server.ok(PATH, body.clone()).await;
    let input = &reply["choices"][0]["message"]["tool_calls"][0]["custom"]["input"];
    let lines: Vec<&str> = input.as_str().expect("a text").lines().collect();
    assert_eq!((lines[0], lines[lines.len() - 1]), ("*** Begin Patch", "*** End Patch"));
    assert!(lines[1].ends_with(".\"rs"), "{lines:?}");
    let line = lines[2].strip_prefix('+');
    let fits = line.is_some_and(|line| line.len() == 4 && line.chars().all(|c| "\\x".contains(c)));
    assert!(
        if lines[1].starts_with("*** Add File: ") { fits } else { lines.len() == 3 },
        "{lines:?}"
    );

    body["tools"] = json!([custom("(a")]);
    let (status, reply) = server.post(PATH, body).await;
    let param = "tools[0].custom.format";
    assert!(reply["error"]["param"].as_str().is_some_and(|at| at.starts_with(param)), "{reply}");
    assert_eq!(status, 400);
}

/// Goal: the operator chooses another format, whose markers may be special tokens, and JSON that
/// names no function is text.
#[tokio::test]
async fn the_operator_chooses_the_format() {
    for (format, script, city) in
        [("mistral", "script:mistral", "Rome"), ("llama3_json", "script:llama", "Lima")]
    {
        let server = Server::with(SCRIPTED, |engine, options| {
            options.tool_calls = format.parse().expect("a format");
            engine
        });
        let (message, reason) = answers(&server, ask(script)).await;
        assert_eq!(reason, "tool_calls", "{message}");
        let call = &message["tool_calls"][0];
        assert_eq!(call["function"]["arguments"], format!("{{\"city\": \"{city}\"}}"));
        assert_eq!(format == "mistral", call["id"].as_str().map(str::len) == Some(9), "{call}");
        let (message, _) = answers(&server, ask("script:json")).await;
        assert_eq!(message["content"], "{\"answer\": 42}");
    }
}

/// Goal: if a model's template does not know tools, the conversation describes them, and calls are
/// guaranteed, whole and streamed alike.
#[tokio::test]
async fn tools_work_with_a_template_that_does_not_know_them() {
    let server = Server::start("demo");
    let parameters = json!({"type": "object", "properties": {"city": {"enum": ["Rome", "Lima"]}},
                            "required": ["city"], "additionalProperties": false});
    let function = json!({"name": "get_weather", "parameters": parameters});
    let mut body = ask("hello");
    body["tools"] = json!([{"type": "function", "function": function}]);
    (body["max_tokens"], body["temperature"]) = (json!(100), json!(0));
    let named = json!({"type": "function", "function": {"name": "get_weather"}});
    body["parallel_tool_calls"] = json!(false);
    for choice in [json!("required"), named] {
        body["tool_choice"] = choice;
        let (message, reason) = answers(&server, body.clone()).await;
        assert_eq!(reason, "tool_calls", "{message}");
        let arguments = message["tool_calls"][0]["function"]["arguments"].as_str();
        let arguments: Value = serde_json::from_str(arguments.expect("text")).expect("JSON");
        assert!(["Rome", "Lima"].iter().any(|city| arguments["city"] == *city), "{arguments}");
    }
    // If the call is cut off, the part that was generated is kept as a call, and is not repeated as
    // text.
    let mut cut = body.clone();
    cut["max_tokens"] = json!(45);
    let (message, reason) = answers(&server, cut).await;
    assert_eq!((&message["content"], reason), (&Value::Null, json!("length")), "{message}");
    let function = &message["tool_calls"][0]["function"];
    let arguments = function["arguments"].as_str().expect("text");
    assert!(serde_json::from_str::<Value>(arguments).is_err(), "{message}");
    let call = json!({"id": "c1", "type": "function",
                      "function": {"name": "get_weather", "arguments": "{\"city\": \"Rome\"}"}});
    body["messages"] = json!([
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    ]);
    let mut prompts = Vec::new();
    for choice in ["auto", "none"] {
        body["tool_choice"] = json!(choice);
        prompts.push(server.ok(PATH, body.clone()).await["usage"]["prompt_tokens"].as_u64());
    }
    assert!(prompts[0] > prompts[1], "the tools are a part of the prompt: {prompts:?}");
    let tokenized = json!({"messages": body["messages"], "tools": body["tools"]});
    assert_eq!(server.ok("/tokenize", tokenized).await["count"].as_u64(), prompts[0]);
}

/// Goal: however programs describe the arguments of their tools, a request with them is answered,
/// by every API, also if the grammar of the calls contains all of them. Only a tool that is strict
/// is refused, by its name and path.
#[tokio::test]
async fn tools_are_taken_as_programs_describe_them() {
    let server = Server::start("demo");
    for (keyword, value) in [
        ("maxLength", json!(524_288)),
        ("maxItems", json!(9_007_199_254_740_991_i64)),
        ("nullable", json!(true)),
        ("markdownDescription", json!("m")),
        ("enumDescriptions", json!(["e"])),
        ("strict", json!(true)),
        ("not", json!({"type": "null"})),
        ("if", json!({"const": 1})),
        ("contains", json!({"const": 1})),
        ("pattern", json!("^(?<!a)\\Z(?>b)")),
        ("pattern", json!("(unclosed")),
        ("enum", json!([1])),
        ("$ref", json!("#/components/schemas/missing")),
    ] {
        let member = json!({"type": "string", keyword: value});
        let schema = json!({"type": "object", "properties": {"script": member},
                            "required": ["script"]});
        let function = json!({"name": "workflow", "parameters": schema});
        let mut body = ask("hello");
        body["max_tokens"] = json!(2);
        for choice in ["auto", "required"] {
            body["tool_choice"] = json!(choice);
            body["tools"] = json!([{"type": "function", "function": function}]);
            server.ok(PATH, body.clone()).await;
        }
        let tool = json!({"name": "workflow", "input_schema": schema});
        let messages = json!([{"role": "user", "content": "hello"}]);
        server
            .ok("/v1/messages", json!({"max_tokens": 2, "messages": messages, "tools": [tool]}))
            .await;
        let tool = json!({"type": "function", "name": "workflow", "parameters": schema});
        server
            .ok(
                "/v1/responses",
                json!({"max_output_tokens": 16, "input": "hello", "tools": [tool]}),
            )
            .await;
        body["tools"][0]["function"]["strict"] = json!(true);
        let (status, reply) = server.post(PATH, body).await;
        let error = &reply["error"];
        assert_eq!(status, 400, "{keyword}: {reply}");
        let path = error["param"].as_str().expect("a path");
        assert!(path.starts_with("tools[0].function.parameters.properties.script"), "{reply}");
        assert!(error["message"].as_str().expect("a text").contains("workflow"), "{reply}");
    }
}

/// Goal: the operator replaces the template, and disables tools.
#[tokio::test]
async fn the_operator_chooses_the_template() {
    let template = std::fs::read_to_string(format!("{SCRIPTED}/chat_template.jinja"));
    let template = template.expect("a template");
    let server = Server::with("demo", |engine, options| {
        options.reasoning = FormatChoice::Off;
        engine.chat_template(template.clone())
    });
    server.ok(PATH, ask("hello")).await;
    let server = Server::with("demo", |engine, options| {
        options.tool_calls = FormatChoice::Off;
        engine.chat_template(template)
    });
    let (status, reply) = server.post(PATH, ask("hello")).await;
    assert_eq!((status, &reply["error"]["param"]), (400, &json!("tools")), "{reply}");
}

/// Goal: parameters of tools that are wrong, or that request a guarantee which cannot be given, are
/// refused by their path.
#[tokio::test]
async fn wrong_tools_are_refused() {
    let server = Server::start(SCRIPTED);
    for (extra, param) in [
        (json!({"tools": [{"type": "function"}]}), "tools[0].function"),
        (json!({"tools": [{"type": "retrieval"}]}), "tools[0].type"),
        (json!({"tools": [tool("a b")]}), "tools[0].function.name"),
        (json!({"tools": vec![tool("f"); 1025]}), "tools"),
        (json!({"tool_choice": "required", "tools": []}), "tool_choice"),
        (json!({"tool_choice": "sometimes"}), "tool_choice"),
        (
            json!({"tool_choice": {"type": "function", "function": {"name": "get_rain"}}}),
            "tool_choice",
        ),
        (json!({"continue_final_message": true}), "messages"),
        (json!({"chat_template_kwargs": []}), "chat_template_kwargs"),
    ] {
        let mut body = ask("script:call");
        for (name, value) in extra.as_object().expect("an object") {
            body[name] = value.clone();
        }
        let (status, reply) = server.post(PATH, body).await;
        assert_eq!((status, &reply["error"]["param"]), (400, &json!(param)), "{extra}: {reply}");
    }
}

/// Goal: a call within reasoning that is never closed is a call, in all APIs.
#[tokio::test]
async fn a_call_may_end_the_reasoning() {
    let server = Server::start(SCRIPTED);
    let (message, reason) = answers(&server, ask("script:lost")).await;
    assert_eq!(message["reasoning_content"], "I look.", "{message}");
    assert_eq!(message["tool_calls"][0]["function"]["name"], "get_time", "{message}");
    assert_eq!(reason, "tool_calls");
    let text = "script:lost";
    let schema = json!({"type": "object"});
    let body = json!({"messages": [{"role": "user", "content": text}], "max_tokens": 32,
                      "tools": [{"name": "get_time", "input_schema": schema}]});
    let reply = server.ok("/v1/messages", body).await;
    let kinds = [&reply["content"][0]["type"], &reply["content"][1]["type"]];
    assert_eq!(kinds, [&json!("thinking"), &json!("tool_use")], "{reply}");
    let body = json!({"input": text, "max_output_tokens": 32,
                      "tools": [{"type": "function", "name": "get_time", "parameters": schema}]});
    let reply = server.ok("/v1/responses", body).await;
    assert_eq!(reply["output"][1]["type"], "function_call", "{reply}");
}

/// Goal: stop strings end an answer where they are in its text, and not in the reasoning or in the
/// arguments of a call, in all APIs.
#[tokio::test]
async fn stop_strings_are_looked_for_in_the_text_alone() {
    let server = Server::start(SCRIPTED);
    for stop in ["about", "Let me", "think", "</think>", "\n"] {
        let mut body = ask("script:think");
        body["stop"] = json!([stop]);
        let (message, _) = answers(&server, body).await;
        assert_eq!(message["content"], "It is sunny.", "{stop:?}");
        assert_eq!(message["reasoning_content"], "Let me think about it.", "{stop:?}");
        let body = json!({"messages": [{"role": "user", "content": "script:think"}],
                          "max_tokens": 32, "stop_sequences": [stop]});
        let reply = server.ok("/v1/messages", body).await;
        assert_eq!(reply["content"][1]["text"], "It is sunny.", "{stop:?}: {reply}");
        assert_eq!(reply["stop_reason"], "end_turn", "{stop:?}");
    }
    let mut body = ask("script:think");
    body["stop"] = json!(["sunny"]);
    let (message, reason) = answers(&server, body).await;
    assert_eq!((&message["content"], reason), (&json!("It is "), json!("stop")));
    let mut body = ask("script:call");
    body["stop"] = json!(["ris"]);
    let (message, reason) = answers(&server, body.clone()).await;
    assert_eq!(reason, "tool_calls", "{message}");
    let arguments = &message["tool_calls"][0]["function"]["arguments"];
    assert_eq!(arguments, r#"{"city": "Paris", "days": 2}"#);
    body["stop"] = json!(["look"]);
    let (message, reason) = answers(&server, body).await;
    assert_eq!((&message["content"], reason), (&json!("I "), json!("stop")), "{message}");
    server.settled_audit().await;
}

/// Goal: an answer that continues reasoning is reasoning until it is closed, and one that continues
/// a text is text.
#[tokio::test]
async fn an_answer_may_continue_reasoning() {
    let server = Server::start(SCRIPTED);
    for (prefill, reasoning, content) in [
        ("<think>\nLet me see. script:so", json!("391."), "It is 391."),
        ("<think>\nHm.\n</think>\nHi. script:plain", Value::Null, "Hello, world."),
        ("What does <think> mean? </think> ends it. script:plain", Value::Null, "Hello, world."),
    ] {
        let messages = json!([{"role": "user", "content": "17 * 23? Not <think> but"},
                              {"role": "assistant", "content": prefill}]);
        let body = json!({"messages": messages, "continue_final_message": true,
                          "add_generation_prompt": false, "max_tokens": 16});
        let (message, _) = answers(&server, body).await;
        assert_eq!(
            (&message["reasoning_content"], &message["content"]),
            (&reasoning, &json!(content))
        );
        let reply =
            server.ok("/v1/messages", json!({"messages": messages, "max_tokens": 16})).await;
        let text = reply["content"].as_array().and_then(|blocks| blocks.last()).cloned();
        assert_eq!(text.expect("a block")["text"], content, "{reply}");
    }
}

/// Goal: the ids of Kimi's calls have the name of the function and the number of the call in the
/// conversation, in all APIs.
#[tokio::test]
async fn ids_of_calls_count_over_the_conversation() {
    let server = Server::with(SCRIPTED, |engine, options| {
        options.tool_calls = FormatChoice::Format(ToolCallFormat::Kimi);
        engine
    });
    let mut body = ask("script:kimi");
    let first = server.ok(PATH, body.clone()).await["choices"][0]["message"].clone();
    assert_eq!(first["tool_calls"][0]["id"], "functions.get_time:0", "{first}");
    let result =
        json!({"role": "tool", "tool_call_id": "functions.get_time:0", "content": "12:04"});
    let turns = body["messages"].as_array_mut().expect("a list");
    turns.extend([first, result, json!({"role": "user", "content": "script:kimi"})]);
    let second = server.ok(PATH, body).await;
    let call = &second["choices"][0]["message"]["tool_calls"][0];
    assert_eq!(call["id"], "functions.get_time:1", "{second}");
    let schema = json!({"type": "object"});
    let body = json!({"messages": [{"role": "user", "content": "script:kimi"}], "max_tokens": 16,
                      "tools": [{"name": "get_time", "input_schema": schema}]});
    let reply = server.ok("/v1/messages", body).await;
    assert_eq!(reply["content"][0]["id"], "functions.get_time:0", "{reply}");
    let body = json!({"input": "script:kimi", "max_output_tokens": 16,
                      "tools": [{"type": "function", "name": "get_time", "parameters": schema}]});
    let reply = server.ok("/v1/responses", body).await;
    assert_eq!(reply["output"][0]["call_id"], "functions.get_time:0", "{reply}");
}

/// Goal: an answer is not ended before `min_tokens`, neither by the model nor by a stop string, and
/// the last message can be continued.
#[tokio::test]
async fn answers_have_a_least_length_and_can_be_continued() {
    let server = Server::start(SCRIPTED);
    let body = json!({"messages": [{"role": "user", "content": "script:plain"}], "max_tokens": 8});
    for (extra, count) in [
        (json!({}), 4),
        (json!({"min_tokens": 6}), 8),
        (json!({"stop": [","]}), 2),
        (json!({"stop": [","], "min_tokens": 3}), 4),
    ] {
        let mut body = body.clone();
        for (name, value) in extra.as_object().expect("an object") {
            body[name] = value.clone();
        }
        let reply = server.ok(PATH, body).await;
        assert_eq!(reply["usage"]["completion_tokens"], count, "{extra}: {reply}");
    }
    let body = json!({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello"}],
                      "continue_final_message": true, "add_generation_prompt": false, "max_tokens": 8});
    let reply = server.ok(PATH, body).await;
    assert_eq!(reply["choices"][0]["message"]["content"], ", world.");
}
