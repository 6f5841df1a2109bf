//! `/tokenize`, `/detokenize`, `/version` and `x-request-id`.

use serde_json::{Value, json};

use crate::support::{SCRIPTED, Server, TINY, api_key};

/// Goal: a text becomes token ids and back, with the texts of the tokens if requested, and the
/// special tokens around it can be left out.
#[tokio::test]
async fn texts_are_tokenized_and_back() {
    let server = Server::tiny();
    let reply = server.ok("/tokenize", json!({"prompt": "h\u{e9}", "model": TINY})).await;
    assert_eq!(reply["tokens"], json!([104, 195, 169]));
    assert_eq!((&reply["count"], &reply["token_strs"]), (&json!(3), &json!(null)));
    let (_, model) = server.get("/v1/models").await;
    assert_eq!(reply["max_model_len"], model["data"][0]["max_model_len"]);
    let strs = json!({"prompt": "hi", "return_token_strs": true, "add_special_tokens": false});
    assert_eq!(server.ok("/tokenize", strs).await["token_strs"], json!(["h", "i"]));
    let back = server.ok("/detokenize", json!({"tokens": reply["tokens"]})).await;
    assert_eq!(back, json!({"prompt": "h\u{e9}"}));
    // More tokens than are converted on the thread of the connection.
    let long = "word ".repeat(4_000);
    let strs = json!({"prompt": long, "return_token_strs": true});
    let many = server.ok("/tokenize", strs).await;
    assert_eq!(many["token_strs"].as_array().map(Vec::len), Some(20_000));
    let back = server.ok("/detokenize", json!({"tokens": many["tokens"]})).await;
    assert_eq!(back["prompt"], json!(long));
}

/// Goal: `token_strs` has the pieces of the vocabulary, as in vLLM, and not their texts.
#[tokio::test]
async fn token_strs_are_pieces() {
    let server = Server::start(SCRIPTED);
    let body = json!({"prompt": "a \u{e9}script:call", "return_token_strs": true});
    let reply = server.ok("/tokenize", body).await;
    assert_eq!(reply["token_strs"], json!(["a", "\u{120}", "\u{c3}", "\u{a9}", "script:call"]));
}

/// Goal: a conversation is counted as its request is, special tokens around a text are added only
/// on request, and the generation prompt can be left out.
#[tokio::test]
async fn conversations_are_tokenized_as_chat_requests_are() {
    let server = Server::start("demo");
    let messages = json!([{"role": "user", "content": "Who keeps the tower?"}]);
    let whole = server.ok("/tokenize", json!({"messages": messages})).await;
    let chat = json!({"messages": messages, "max_completion_tokens": 1});
    let chat = server.ok("/v1/chat/completions", chat).await;
    assert_eq!(whole["count"], chat["usage"]["prompt_tokens"]);
    // An answer that has begun is part of the prompt.
    let mut begun = messages.clone();
    begun.as_array_mut().expect("a list").push(json!({"role": "assistant", "content": "The"}));
    let body = json!({"messages": begun, "continue_final_message": true});
    let continued = server.ok("/tokenize", body).await;
    let text = server.ok("/detokenize", json!({"tokens": continued["tokens"]})).await;
    assert!(text["prompt"].as_str().is_some_and(|text| text.ends_with("The")), "{text}");
    let body = json!({"messages": messages, "add_generation_prompt": false});
    let open = server.ok("/tokenize", body).await;
    let tokens = |reply: &Value| reply["tokens"].as_array().expect("tokens").clone();
    assert!(
        tokens(&open).len() < tokens(&whole).len() && tokens(&whole).starts_with(&tokens(&open))
    );
}

/// Goal: input that cannot be tokenized is refused by the name of the parameter.
#[tokio::test]
async fn wrong_tokenize_requests_are_refused() {
    let server = Server::tiny();
    let messages = json!([{"role": "user", "content": "x"}]);
    let add = json!({"type": "function", "function": {"name": "add"}});
    for (path, body, status, param) in [
        ("/tokenize", json!({}), 400, "prompt"),
        ("/tokenize", json!({"prompt": "x", "messages": messages}), 400, "messages"),
        ("/tokenize", json!({"prompt": 7}), 400, "prompt"),
        ("/tokenize", json!({"messages": []}), 400, "messages"),
        ("/tokenize", json!({"messages": [7]}), 400, "messages[0]"),
        (
            "/tokenize",
            json!({"messages": messages, "add_special_tokens": true}),
            400,
            "add_special_tokens",
        ),
        (
            "/tokenize",
            json!({"prompt": "x", "add_generation_prompt": true}),
            400,
            "add_generation_prompt",
        ),
        ("/tokenize", json!({"prompt": "x", "tools": [add]}), 400, "tools"),
        ("/tokenize", json!({"prompt": "x", "model": 7}), 400, "model"),
        (
            "/tokenize",
            json!({"prompt": "x", "continue_final_message": true}),
            400,
            "continue_final_message",
        ),
        (
            "/tokenize",
            json!({"messages": messages, "continue_final_message": true,
                   "add_generation_prompt": true}),
            400,
            "continue_final_message",
        ),
        ("/detokenize", json!({}), 400, "tokens"),
        ("/detokenize", json!({"tokens": [-1]}), 400, "tokens[0]"),
        ("/detokenize", json!({"tokens": [1, 4_000_000_000_u32]}), 400, "tokens"),
    ] {
        let (got, reply) = server.post(path, body.clone()).await;
        assert_eq!((got, &reply["error"]["param"]), (status, &json!(param)), "{body}: {reply}");
    }
}

/// Goal: both routes need an API key if there are any, `/version` does not.
#[tokio::test]
async fn tokenizing_needs_a_key() {
    let server = Server::with(TINY, |engine, options| {
        options.access.api_keys = api_key("sesame");
        engine
    });
    for path in ["/tokenize", "/detokenize"] {
        assert_eq!(server.post(path, json!({"prompt": "x", "tokens": [1]})).await.0, 401);
    }
    assert_eq!(server.get("/version").await, (200, json!({"version": env!("CARGO_PKG_VERSION")})));
}

/// Goal: every reply has an id, errors and paths that do not exist included; a harmless id of the
/// client is kept, any other is replaced.
#[tokio::test]
async fn replies_have_a_request_id() {
    let server = Server::tiny();
    let client = reqwest::Client::new();
    let id = async |path: &str, given: Option<&str>| {
        let mut request = client.get(server.url(path));
        if let Some(given) = given {
            request = request.header("x-request-id", given);
        }
        let response = request.send().await.expect("a response");
        response.headers()["x-request-id"].to_str().expect("text").to_owned()
    };
    for path in ["/health", "/v1/models/unknown", "/nowhere", "/tokenize"] {
        assert_eq!(id(path, Some("job-7:1")).await, "job-7:1");
        assert_ne!(id(path, None).await, id(path, None).await);
        for bad in ["a b", "\"", &"x".repeat(129)] {
            assert_ne!(id(path, Some(bad)).await, bad);
        }
    }
}

/// The token ids in the pieces of a streamed choice, joined.
fn streamed_ids(pieces: &[Value]) -> Vec<Value> {
    let ids = |piece: &Value| piece["choices"][0]["token_ids"].as_array().cloned();
    pieces.iter().flat_map(|piece| ids(piece).unwrap_or_default()).collect()
}

/// Goal: with `return_token_ids`, completions have the ids of each prompt and answer, whole and
/// streamed alike; with a stop string too, and none of it without.
#[tokio::test]
async fn completions_return_token_ids() {
    let server = Server::tiny();
    let body = json!({"prompt": ["ab", "c"], "n": 2, "max_tokens": 5, "return_token_ids": true});
    let reply = server.complete(body).await;
    for (index, prompt) in
        [json!([97, 98]), json!([97, 98]), json!([99]), json!([99])].iter().enumerate()
    {
        let choice = &reply["choices"][index];
        assert_eq!(&choice["prompt_token_ids"], prompt);
        assert_eq!(choice["token_ids"].as_array().map(Vec::len), Some(5));
        let text = server.ok("/detokenize", json!({"tokens": choice["token_ids"]})).await;
        assert_eq!(text["prompt"], choice["text"]);
    }
    for echo in [false, true] {
        let body = json!({"prompt": "ab", "max_tokens": 5, "return_token_ids": true, "echo": echo});
        let whole = server.complete(body.clone()).await;
        let pieces = server.events("/v1/completions", body).await;
        assert_eq!(pieces[0]["choices"][0]["prompt_token_ids"], json!([97, 98]));
        assert!(pieces[1]["choices"][0]["prompt_token_ids"].is_null());
        assert_eq!(json!(streamed_ids(&pieces)), whole["choices"][0]["token_ids"]);
    }
    let plain = server.complete(json!({"prompt": "ab", "max_tokens": 1})).await;
    let choice = plain["choices"][0].as_object().expect("a choice");
    assert!(!choice.contains_key("token_ids") && !choice.contains_key("prompt_token_ids"));
}

/// Goal: in chat the ids of the prompt are in the reply, or in its first piece, once for all
/// choices, and are those of `/tokenize`.
#[tokio::test]
async fn chat_returns_token_ids() {
    let server = Server::start("demo");
    let messages = json!([{"role": "user", "content": "Who keeps the tower?"}]);
    let prompt = server.ok("/tokenize", json!({"messages": messages})).await["tokens"].clone();
    let body = json!({"messages": messages, "max_completion_tokens": 6, "temperature": 0,
                      "return_token_ids": true});
    let whole = server.ok("/v1/chat/completions", body.clone()).await;
    assert_eq!(whole["prompt_token_ids"], prompt);
    let count = whole["usage"]["completion_tokens"].as_u64().map(|count| count as usize);
    assert_eq!(whole["choices"][0]["token_ids"].as_array().map(Vec::len), count);
    let pieces = server.events("/v1/chat/completions", body).await;
    assert_eq!(pieces[0]["prompt_token_ids"], prompt);
    assert!(pieces[1..].iter().all(|piece| piece["prompt_token_ids"].is_null()));
    assert_eq!(json!(streamed_ids(&pieces)), whole["choices"][0]["token_ids"]);
}

/// Goal: a conversation with tools has the tokens of the same chat request, which are more than
/// without tools, also where Anthropic's clients count them.
#[tokio::test]
async fn tools_are_counted() {
    let server = Server::start(SCRIPTED);
    let messages = json!([{"role": "user", "content": "What is 2 + 3?"}]);
    let schema = json!({"type": "object", "properties": {"a": {"type": "number"}}});
    let tools = json!([{"type": "function", "function": {"name": "add", "parameters": schema}}]);
    let count = async |path: &str, body: Value, member: &str| -> u64 {
        server.ok(path, body).await[member].as_u64().expect("a number")
    };
    let plain = count("/tokenize", json!({"messages": messages}), "count").await;
    let body = json!({"messages": messages, "tools": tools});
    let with_tools = count("/tokenize", body.clone(), "count").await;
    assert!(with_tools > plain, "{with_tools} and {plain}");
    let reply = server.ok("/v1/chat/completions", body).await;
    assert_eq!(reply["usage"]["prompt_tokens"], with_tools);
    let tools = json!([{"name": "add", "input_schema": schema}]);
    let body = json!({"messages": messages, "tools": tools, "max_tokens": 9});
    assert_eq!(count("/v1/messages/count_tokens", body, "input_tokens").await, with_tools);
}

/// Goal: the tokenizer's information has what lm_eval reads: the special tokens, which `/tokenize`
/// takes as one token each, and the chat template.
#[tokio::test]
async fn the_tokenizer_is_described() {
    let server = Server::start("demo");
    let (status, info) = server.get("/tokenizer_info").await;
    assert_eq!(status, 200, "{info}");
    let eos = info["eos_token"].as_str().expect("an end-of-sequence token");
    let body = json!({"prompt": eos, "add_special_tokens": false});
    assert_eq!(server.ok("/tokenize", body).await["count"], 1);
    assert!(info["chat_template"].as_str().is_some_and(|template| template.contains("messages")));
    assert!(info.as_object().is_some_and(|info| info.contains_key("bos_token")));
}
