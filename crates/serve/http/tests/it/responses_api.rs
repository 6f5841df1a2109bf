//! `/v1/responses`, with a model that recites scripts.

use serde_json::{Value, json};
use stolon_http::Tenants;

use crate::support::{SCRIPTED, Server, api_keys};

const PATH: &str = "/v1/responses";

/// A request that is answered with a script.
fn ask(script: &str) -> Value {
    // A strict tool has these arguments alone.
    let properties = json!({"city": {"type": "string"}, "days": {"type": "integer"}});
    let schema = json!({"type": "object", "properties": properties});
    json!({
        "input": format!("Now {script}"), "instructions": "Be brief.", "temperature": 0,
        "max_output_tokens": 32,
        "tools": [{"type": "function", "name": "get_weather", "parameters": schema, "strict": true}],
    })
}

/// The response without the members that differ from reply to reply.
fn without_ids(mut response: Value) -> Value {
    for name in ["id", "created_at", "usage"] {
        response[name] = Value::Null;
    }
    for item in response["output"].as_array_mut().expect("items") {
        item["id"] = Value::Null;
        item["call_id"] = Value::Null;
    }
    response
}

/// Asks whole and streamed; the responses must be equal, and the events must add up to them.
async fn answer(server: &Server, body: Value) -> Value {
    let whole = server.ok(PATH, body.clone()).await;
    let events = server.named_events(PATH, body).await;
    let (mut items, mut text) = (Vec::new(), String::new());
    for (number, (name, event)) in events.iter().enumerate() {
        assert_eq!((&event["type"], &event["sequence_number"]), (&json!(name), &json!(number)));
        if let Some(delta) = event["delta"].as_str() {
            text.push_str(delta);
        }
        match name.as_str() {
            "response.output_item.added" => text.clear(),
            "response.output_text.done" | "response.reasoning_text.done" => {
                assert_eq!(event["text"], text.as_str());
            }
            "response.function_call_arguments.done" => {
                assert_eq!(event["arguments"], text.as_str())
            }
            "response.custom_tool_call_input.done" => assert_eq!(event["input"], text.as_str()),
            "response.output_item.done" => items.push(event["item"].clone()),
            _ => {}
        }
    }
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names[..3],
        ["response.created", "response.in_progress", "response.output_item.added"]
    );
    let last = &events.last().expect("events").1;
    assert_eq!(last["response"]["output"], Value::Array(items));
    assert_eq!(without_ids(last["response"].clone()), without_ids(whole.clone()));
    whole
}

/// Goal: text, calls and reasoning are items, whole and streamed alike, and the response repeats
/// the request.
#[tokio::test]
async fn answers_consist_of_items() {
    let server = Server::start(SCRIPTED);
    let response = answer(&server, ask("script:call")).await;
    assert_eq!(
        (&response["object"], &response["status"]),
        (&json!("response"), &json!("completed"))
    );
    assert_eq!(
        (&response["store"], &response["instructions"]),
        (&json!(true), &json!("Be brief."))
    );
    let [message, call] = &response["output"].as_array().expect("items")[..] else {
        panic!("expected two items: {response}")
    };
    assert_eq!(message["content"][0]["text"], "I look it up.");
    assert_eq!((&call["type"], &call["name"]), (&json!("function_call"), &json!("get_weather")));
    assert_eq!(call["arguments"], "{\"city\": \"Paris\", \"days\": 2}");
    let response = answer(&server, ask("script:think")).await;
    assert_eq!(response["output"][0]["content"][0]["text"], "Let me think about it.");
    assert_eq!(response["output"][1]["content"][0]["text"], "It is sunny.");
    let mut cut = ask("script:plain");
    cut["max_output_tokens"] = json!(2);
    let response = answer(&server, cut).await;
    assert_eq!(response["status"], "incomplete");
    assert_eq!(response["incomplete_details"]["reason"], "max_output_tokens");
    server.settled_audit().await;
}

/// Goal: a guaranteed call that the answer's length cuts off is one incomplete item, whole and
/// streamed alike, and not text in addition.
#[tokio::test]
async fn a_guaranteed_call_that_is_cut_off_is_incomplete() {
    let server = Server::start("demo");
    let mut body = ask("hello");
    body["tools"][0]["parameters"]["required"] = json!(["city", "days"]);
    body["tool_choice"] = json!("required");
    body["parallel_tool_calls"] = json!(false);
    body["max_output_tokens"] = json!(45);
    let response = answer(&server, body).await;
    let [call] = &response["output"].as_array().expect("items")[..] else {
        panic!("expected one item: {response}")
    };
    let incomplete = (&json!("function_call"), &json!("incomplete"));
    assert_eq!((&call["type"], &call["status"]), incomplete, "{response}");
    assert_eq!(response["status"], "incomplete");
}

/// Goal: the output of a response, and the results of its calls, continue the conversation, and
/// everything before them is cached.
#[tokio::test]
async fn results_of_calls_continue_the_conversation() {
    let server = Server::with(SCRIPTED, |engine, _| engine.block_size(4));
    let mut body = ask("script:call");
    let first = server.ok(PATH, body.clone()).await;
    let mut items = vec![json!({"role": "user", "content": body["input"]})];
    items.extend(first["output"].as_array().expect("items").clone());
    items.push(json!({"type": "function_call_output", "call_id": first["output"][1]["call_id"],
                      "output": "18 degrees. script:plain"}));
    body["input"] = json!(items);
    let second = server.ok(PATH, body).await;
    assert_eq!(second["output"][0]["content"][0]["text"], "Hello, world.");
    let cached = second["usage"]["input_tokens_details"]["cached_tokens"].as_u64();
    let before = first["usage"]["input_tokens"].as_u64().expect("a count");
    assert!(cached >= Some(before - before % 4), "{second}");
}

/// Goal: the call of a tool with free text is an item with the text, whole and streamed alike, also
/// if the request requires one; the call and its output continue the conversation.
#[tokio::test]
async fn tools_with_free_text_are_called() {
    let server = Server::start(SCRIPTED);
    let custom = json!({"type": "custom", "name": "get_weather", "description": "Looks it up.",
                        "format": {"type": "text"}});
    let mut body = ask("script:two");
    body["tools"] = json!([custom, {"type": "function", "name": "get_time"}]);
    let response = answer(&server, body.clone()).await;
    let [weather, time] = &response["output"].as_array().expect("items")[..] else {
        panic!("expected two items: {response}")
    };
    let seen = (&weather["type"], &weather["name"], &weather["input"]);
    assert_eq!(seen, (&json!("custom_tool_call"), &json!("get_weather"), &json!("Oslo")));
    assert_eq!((&time["type"], &time["arguments"]), (&json!("function_call"), &json!("{}")));
    let result = json!({"type": "custom_tool_call_output", "call_id": weather["call_id"],
                        "output": "18 degrees. script:plain"});
    body["input"] = json!([{"role": "user", "content": body["input"]}, weather, result]);
    let next = server.ok(PATH, body).await;
    assert_eq!(next["output"][0]["content"][0]["text"], "Hello, world.");

    let server = Server::start("demo");
    for choice in [json!("required"), json!({"type": "custom", "name": "get_weather"})] {
        let mut body = ask("hello");
        body["tools"] = json!([custom]);
        body["tool_choice"] = choice;
        let response = answer(&server, body).await;
        let call = &response["output"][0];
        assert_eq!(call["type"], "custom_tool_call", "{response}");
        assert!(call["input"].as_str().is_some_and(|text| !text.contains("\"input\"")), "{call}");
    }
}

/// Goal: a text has the log-probabilities of its own tokens, whole and streamed alike, and a request
/// may set variables of the chat template.
#[tokio::test]
async fn texts_have_log_probabilities() {
    let server = Server::start(SCRIPTED);
    let mut body = ask("script:think");
    body["include"] = json!(["message.output_text.logprobs"]);
    body["top_logprobs"] = json!(2);
    let response = answer(&server, body.clone()).await;
    assert_eq!(response["top_logprobs"], 2);
    let tokens = |entries: &Value| -> Vec<String> {
        let entries = entries.as_array().expect("a list").iter();
        entries.map(|entry| entry["token"].as_str().expect("a token").to_owned()).collect()
    };
    let entries = &response["output"][1]["content"][0]["logprobs"];
    assert_eq!(tokens(entries), ["\n\nIt is sunny."]);
    assert_eq!(entries[0]["top_logprobs"].as_array().map(Vec::len), Some(2));
    let events = server.named_events(PATH, body.clone()).await;
    let of_deltas = events.iter().filter(|(name, _)| name == "response.output_text.delta");
    let streamed: Vec<String> =
        of_deltas.flat_map(|(_, event)| tokens(&event["logprobs"])).collect();
    assert_eq!(streamed, tokens(entries));
    // The template begins the reasoning, whose script is another one.
    body["chat_template_kwargs"] = json!({"enable_thinking": true});
    let response = answer(&server, body).await;
    assert_eq!(response["output"][0]["content"][0]["text"], "Hmm, so.");
    assert_eq!(
        tokens(&response["output"][1]["content"][0]["logprobs"]).last().expect("a token"),
        " indeed."
    );
}

/// Goal: unsupported parameters are refused by name.
#[tokio::test]
async fn unsupported_parameters_are_refused() {
    let server = Server::start(SCRIPTED);
    for (extra, param) in [
        (json!({"input": []}), "input"),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
            "input[0].content",
        ),
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"previous_response_id": 7}), "previous_response_id"),
        (json!({"store": "yes"}), "store"),
        (json!({"background": true}), "background"),
        (json!({"tools": [{"type": "robot"}]}), "tools[0].type"),
        (json!({"text": {"format": {"type": "xml"}}}), "text.format.type"),
        (json!({"text": {"format": {"type": "json_schema"}}}), "text.format.schema"),
        (json!({"reasoning": {"efort": "high"}}), "reasoning.efort"),
    ] {
        let mut body = ask("script:plain");
        for (name, value) in extra.as_object().expect("an object") {
            body[name] = value.clone();
        }
        let (status, reply) = server.post(PATH, body).await;
        assert_eq!((status, &reply["error"]["param"]), (400, &json!(param)), "{extra}: {reply}");
    }
}

/// The usage and the output of a response, without ids.
fn content(response: &Value) -> (Value, Value) {
    (response["usage"]["input_tokens"].clone(), without_ids(response.clone())["output"].clone())
}

/// Goal: a response that continues another one is the response to the whole conversation: text,
/// reasoning, calls and their results, over several turns, whole and streamed; instructions are
/// those of the request alone.
#[tokio::test]
async fn a_response_is_continued_by_its_id() {
    let server = Server::start(SCRIPTED);
    let first = server.ok(PATH, ask("script:call")).await;
    assert_eq!((&first["store"], &first["previous_response_id"]), (&json!(true), &Value::Null));
    let call = first["output"].as_array().expect("items").last().expect("a call").clone();
    let result = json!([{"type": "function_call_output", "call_id": call["call_id"],
                         "output": "22 degrees"},
                        {"role": "user", "content": "Now script:think"}]);
    let continued = |input: &Value, previous: &Value| {
        let mut body = ask("");
        body["input"] = input.clone();
        body["previous_response_id"] = previous["id"].clone();
        body
    };
    let whole = |turns: &[&Value]| {
        let items = turns.iter().flat_map(|turn| match turn {
            Value::Array(items) => items.clone(),
            response => response["output"].as_array().expect("items").clone(),
        });
        let mut body = ask("");
        body["input"] = Value::Array(items.collect());
        body
    };
    let second = answer(&server, continued(&result, &first)).await;
    assert_eq!(second["previous_response_id"], first["id"]);
    let question = json!([{"role": "user", "content": "Now script:call"}]);
    let expected = server.ok(PATH, whole(&[&question, &first, &result])).await;
    assert_eq!(content(&second), content(&expected));
    let more = json!([{"role": "user", "content": "Now script:plain"}]);
    let third = answer(&server, continued(&more, &second)).await;
    let expected = server.ok(PATH, whole(&[&question, &first, &result, &second, &more])).await;
    assert_eq!(content(&third), content(&expected));
    // The second answer to the first response does not see the first one.
    let branch = server.ok(PATH, continued(&more, &first)).await;
    let expected = server.ok(PATH, whole(&[&question, &first, &more])).await;
    assert_eq!(content(&branch), content(&expected));
    let mut without = continued(&more, &first);
    without["instructions"] = Value::Null;
    let without = server.ok(PATH, without).await;
    assert!(without["usage"]["input_tokens"].as_u64() < branch["usage"]["input_tokens"].as_u64());
}

/// Goal: a response is kept for its own client, until it is deleted or the memory is used up, and
/// not at all if the client or the operator does not want it.
#[tokio::test]
async fn responses_are_kept_for_their_client_within_the_memory() {
    let server = Server::with(SCRIPTED, |engine, options| {
        options.access.api_keys = api_keys(&[("a", "key-a"), ("b", "key-b")]);
        options.access.tenants = Tenants::ByKey;
        options.response_memory = 12 << 10;
        engine
    });
    let send = async |method: &str, path: &str, key: &str, body: &Value| {
        let method = method.parse().expect("a method");
        let request = reqwest::Client::new().request(method, server.url(path)).bearer_auth(key);
        let request = request.header("content-type", "application/json").body(body.to_string());
        let reply = request.send().await.expect("a reply");
        let status = reply.status().as_u16();
        let text = reply.text().await.expect("a text");
        (status, serde_json::from_str::<Value>(&text).expect("JSON"))
    };
    let (_, first) = send("POST", PATH, "key-a", &ask("script:plain")).await;
    let path = format!("{PATH}/{}", first["id"].as_str().expect("an id"));
    let nothing = Value::Null;
    assert_eq!(send("GET", &path, "key-a", &nothing).await, (200, first.clone()));
    assert_eq!(send("GET", &path, "key-b", &nothing).await.0, 404);
    assert_eq!(send("DELETE", &path, "key-b", &nothing).await.0, 404);
    let mut next = ask("script:plain");
    next["previous_response_id"] = first["id"].clone();
    let (status, refused) = send("POST", PATH, "key-b", &next).await;
    assert_eq!(
        (status, &refused["error"]["code"]),
        (400, &json!("previous_response_not_found")),
        "{refused}"
    );
    let (_, second) = send("POST", PATH, "key-a", &next).await;
    let deleted = send("DELETE", &path, "key-a", &nothing).await;
    assert_eq!(deleted, (200, json!({"id": first["id"], "object": "response", "deleted": true})));
    assert_eq!(send("POST", PATH, "key-a", &next).await.0, 400);
    // What continues it has its messages.
    next["previous_response_id"] = second["id"].clone();
    assert_eq!(send("POST", PATH, "key-a", &next).await.0, 200);
    for _ in 0..20 {
        assert_eq!(send("POST", PATH, "key-a", &ask("script:plain")).await.0, 200);
    }
    assert_eq!(send("POST", PATH, "key-a", &next).await.0, 400, "it is forgotten");
    let mut unstored = ask("script:plain");
    unstored["store"] = json!(false);
    let (_, reply) = send("POST", PATH, "key-a", &unstored).await;
    assert_eq!(reply["store"], json!(false));
    let path = format!("{PATH}/{}", reply["id"].as_str().expect("an id"));
    assert_eq!(send("GET", &path, "key-a", &nothing).await.0, 404);
    let server = Server::with(SCRIPTED, |engine, options| {
        options.response_memory = 0;
        engine
    });
    unstored["store"] = json!(true);
    let reply = server.send(PATH, unstored.to_string()).await;
    assert_eq!(reply.headers()["x-stolon-ignored"], "store");
}
