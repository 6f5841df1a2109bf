//! `/v1/completions`, `/v1/models`, `/health` and `/admin/stats`.

use std::time::Duration;

use futures::StreamExt;
use serde_json::{Value, json};

use crate::support::{Server, TINY, prompt, texts};

/// Goal: a repeated prompt gives the same text, and the second time its whole blocks are cached.
#[tokio::test]
async fn a_repeated_prompt_is_cached_and_gives_the_same_text() {
    let server = Server::tiny();
    let body = json!({"prompt": prompt(100, 1), "max_tokens": 12, "ignore_eos": true});
    let cold = server.complete(body.clone()).await;
    let warm = server.complete(body).await;
    assert_eq!(texts(&cold), texts(&warm));
    assert_eq!(cold["object"], "text_completion");
    assert_eq!(cold["choices"][0]["finish_reason"], "length");
    assert_ne!(cold["id"], warm["id"]);
    let usage = |reply: &Value| reply["usage"].clone();
    let expected = |cached: usize| {
        json!({"prompt_tokens": 108, "completion_tokens": 12, "total_tokens": 120,
               "prompt_tokens_details": {"cached_tokens": cached}})
    };
    assert_eq!(usage(&cold), expected(0));
    assert_eq!(usage(&warm), expected(96));
    server.settled_audit().await;
}

/// Goal: a text, its token ids, and lists of either are the same prompts, answered in order.
#[tokio::test]
async fn all_forms_of_a_prompt_agree() {
    let server = Server::tiny();
    let ids = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
    let ask = async |prompt: Value| server.complete(json!({"prompt": prompt})).await;
    let alpha = ask(json!("alpha")).await;
    let beta = ask(json!("beta")).await;
    assert_eq!(texts(&alpha), texts(&ask(json!(ids("alpha"))).await));
    for both in [json!(["alpha", "beta"]), json!([ids("alpha"), ids("beta")])] {
        let both = ask(both).await;
        assert_eq!(texts(&both), [texts(&alpha)[0], texts(&beta)[0]]);
        assert_eq!(both["choices"][1]["index"], 1);
        assert_eq!(both["usage"]["prompt_tokens"], 9);
    }
}

/// Goal: the pieces of a streamed reply put together equal the reply that is not streamed; the
/// usage comes last if it is requested.
#[tokio::test]
async fn a_streamed_reply_equals_the_whole_one() {
    let server = Server::tiny();
    let body = json!({"prompt": ["one", "two"], "max_tokens": 24, "logprobs": 2});
    let whole = server.complete(body.clone()).await;
    let mut streamed = body;
    streamed["stream_options"] = json!({"include_usage": true});
    let events = server.events("/v1/completions", streamed).await;
    let mut sums = [String::new(), String::new()];
    let mut tokens = [Vec::new(), Vec::new()];
    let mut reasons = [Value::Null, Value::Null];
    let (last, pieces) = events.split_last().expect("events");
    for piece in pieces {
        assert!(piece["usage"].is_null() && piece["id"] == pieces[0]["id"]);
        let choice = &piece["choices"][0];
        let index = choice["index"].as_u64().expect("an index") as usize;
        sums[index].push_str(choice["text"].as_str().expect("a text"));
        tokens[index]
            .extend(choice["logprobs"]["tokens"].as_array().into_iter().flatten().cloned());
        if !choice["finish_reason"].is_null() {
            reasons[index] = choice["finish_reason"].clone();
        }
    }
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], whole["usage"]["completion_tokens"]);
    for index in 0..2 {
        let choice = &whole["choices"][index];
        assert_eq!(sums[index], choice["text"]);
        assert_eq!(json!(tokens[index]), choice["logprobs"]["tokens"]);
        assert_eq!(reasons[index], choice["finish_reason"]);
    }
}

/// Goal: log-probabilities have one entry per token; greedy decoding takes the most likely token;
/// `echo` adds the prompt and its log-probabilities; `max_tokens` 0 scores the prompt alone.
#[tokio::test]
async fn logprobs_cover_the_answer_and_with_echo_the_prompt() {
    let server = Server::tiny();
    let body = json!({"prompt": "abc", "max_tokens": 5, "logprobs": 3, "ignore_eos": true});
    let plain = server.complete(body.clone()).await;
    let lists = &plain["choices"][0]["logprobs"];
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(lists[name].as_array().map(Vec::len), Some(5), "{name}: {lists}");
    }
    for (value, top) in lists["token_logprobs"]
        .as_array()
        .into_iter()
        .flatten()
        .zip(lists["top_logprobs"].as_array().into_iter().flatten())
    {
        let value = value.as_f64().expect("a number");
        let most_likely = top.as_object().expect("an object").values().filter_map(Value::as_f64);
        assert!(value <= 0.0 && most_likely.fold(f64::MIN, f64::max) <= value + 1e-6);
    }
    let mut echoing = body.clone();
    echoing["echo"] = json!(true);
    let echoed = server.complete(echoing.clone()).await;
    let text = texts(&echoed)[0];
    assert_eq!(text, format!("abc{}", texts(&plain)[0]));
    let echo_lists = &echoed["choices"][0]["logprobs"];
    assert_eq!(echo_lists["token_logprobs"].as_array().map(Vec::len), Some(8));
    assert!(echo_lists["token_logprobs"][0].is_null() && echo_lists["top_logprobs"][0].is_null());
    assert_eq!(echo_lists["text_offset"][3], 3);
    assert_eq!(echo_lists["token_logprobs"][3], lists["token_logprobs"][0]);

    echoing["max_tokens"] = json!(0);
    let scored = server.complete(echoing).await;
    assert_eq!(texts(&scored), ["abc"]);
    assert_eq!(scored["usage"]["completion_tokens"], 0);
    let scores = scored["choices"][0]["logprobs"]["token_logprobs"].as_array().expect("a list");
    let prompt_part = echo_lists["token_logprobs"].as_array().expect("a list");
    assert_eq!(scores[..], prompt_part[..3]);
}

/// Goal: `text_offset` counts characters, some of which have several tokens. It is the same
/// streamed and whole, also with a stop string that withholds text.
#[tokio::test]
async fn text_offsets_count_characters() {
    let server = Server::tiny();
    // The bytes of U+00E9 and U+20AC are tokens of their own. Each prompt forces one token.
    let body = json!({"prompt": "a\u{e9}b\u{20ac}c", "max_tokens": 6, "logprobs": 1, "echo": true,
                      "ignore_eos": true, "logit_bias": {"65": 100}, "stop": "AAAB"});
    let whole = server.complete(body.clone()).await;
    let offsets = json!([0, 1, 1, 2, 3, 3, 3, 4, 5, 6, 7, 8, 9, 10]);
    assert_eq!(texts(&whole), ["a\u{e9}b\u{20ac}cAAAAAA"]);
    assert_eq!(whole["choices"][0]["logprobs"]["text_offset"], offsets);
    let events = server.events("/v1/completions", body).await;
    let streamed: Vec<&Value> = events
        .iter()
        .filter_map(|event| event["choices"][0]["logprobs"]["text_offset"].as_array())
        .flatten()
        .collect();
    assert_eq!(json!(streamed), offsets);
}

/// Goal: the log-probabilities of a repeated prompt are computed once for all choices, and are the
/// same in each, streamed and whole. A reply of too many of them is refused.
#[tokio::test]
async fn repeated_prompts_are_scored_once() {
    let server = Server::tiny();
    let body = json!({"prompt": prompt(100, 1), "n": 4, "echo": true, "logprobs": 1, "seed": 3,
                      "max_tokens": 3, "temperature": 1, "ignore_eos": true});
    let whole = server.complete(body.clone()).await;
    assert_eq!(whole["usage"]["prompt_tokens"], 108);
    assert_eq!(whole["usage"]["completion_tokens"], 12);
    assert_eq!(whole["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let (_, stats) = server.get("/admin/stats").await;
    let computed = stats["stats"]["computed_tokens"].as_u64().expect("a count");
    assert!(computed < 2 * 108, "the prompt was computed {computed} / 108 times");
    let scores = |choice: &Value| {
        choice["logprobs"]["token_logprobs"].as_array().expect("a list")[..108].to_vec()
    };
    for index in 1..4 {
        assert_eq!(scores(&whole["choices"][index]), scores(&whole["choices"][0]));
    }
    let events = server.events("/v1/completions", body).await;
    for index in 0..4 {
        let mut pieces = events.iter().map(|event| &event["choices"][0]);
        let opening = pieces.find(|choice| choice["index"] == index).expect("a piece");
        assert_eq!(scores(opening), scores(&whole["choices"][0]));
    }
    let body = json!({"prompt": prompt(4000, 1), "n": 128, "echo": true, "logprobs": 20,
                      "max_tokens": 0});
    let (status, reply) = server.post("/v1/completions", body).await;
    assert_eq!((status, &reply["error"]["param"]), (400, &json!("echo")), "{reply}");
}

/// Goal: the same seed gives the same choices, and the choices of one call differ.
#[tokio::test]
async fn a_seed_repeats_its_choices_and_choices_differ() {
    let server = Server::tiny();
    let body = json!({"prompt": "seeded", "n": 3, "seed": 11, "temperature": 1.0,
                      "max_tokens": 16, "ignore_eos": true});
    let first = server.complete(body.clone()).await;
    let again = server.complete(body).await;
    assert_eq!(texts(&first), texts(&again));
    let mut different = texts(&first);
    different.sort_unstable();
    different.dedup();
    assert_eq!(different.len(), 3);
    assert_eq!(first["usage"]["prompt_tokens"], 6, "a prompt counts once: {first}");
    assert_eq!(first["usage"]["completion_tokens"], 48);
}

/// Goal: `best_of` returns the answers with the highest log-probability per token among those that
/// `n` would give, best first. All candidates count as usage; their prompt is computed once.
#[tokio::test]
async fn best_of_returns_the_most_likely_answers() {
    let server = Server::tiny();
    let mut body = json!({"prompt": [prompt(100, 1), prompt(100, 2)], "seed": 11, "temperature": 1,
                          "max_tokens": 12, "ignore_eos": true, "logprobs": 0, "n": 6});
    let all = server.complete(body.clone()).await;
    (body["n"], body["best_of"]) = (json!(2), json!(6));
    let best = server.complete(body.clone()).await;
    let choices = |reply: &Value| reply["choices"].as_array().expect("a list").clone();
    let score = |choice: &Value| {
        let logprobs = choice["logprobs"]["token_logprobs"].as_array().expect("a list");
        logprobs.iter().filter_map(Value::as_f64).sum::<f64>() / logprobs.len() as f64
    };
    for (index, returned) in choices(&best).iter().enumerate() {
        let mut candidates = choices(&all)[index / 2 * 6..][..6].to_vec();
        candidates.sort_by(|a, b| score(b).total_cmp(&score(a)));
        assert_eq!(returned["index"], index);
        assert_eq!(returned["text"], candidates[index % 2]["text"], "{best} {all}");
    }
    assert_eq!(choices(&best).len(), 4);
    assert_eq!(best["usage"]["prompt_tokens"], 216);
    assert_eq!(best["usage"]["completion_tokens"], 2 * 6 * 12);

    body["logprobs"] = Value::Null;
    let plain = server.complete(body).await;
    assert_eq!(texts(&plain), texts(&best));
    assert!(plain["choices"][0]["logprobs"].is_null(), "they were not requested: {plain}");
    server.settled_audit().await;
    let (_, stats) = server.get("/admin/stats").await;
    // Only one of 36 answers computed the 96 tokens that all prompts share in whole blocks.
    assert_eq!(stats["stats"]["cached_tokens"], 35 * 96, "{stats}");
}

/// Goal: `best_of` 1 has no effect, streamed or not; a client that disconnects cancels all
/// candidates.
#[tokio::test]
async fn best_of_one_has_no_effect_and_a_disconnect_cancels_all_candidates() {
    let server = Server::tiny();
    let body = json!({"prompt": "alone", "best_of": 1, "max_tokens": 4});
    let whole = server.complete(body.clone()).await;
    let streamed = server.events("/v1/completions", body).await;
    assert_eq!(whole["usage"]["completion_tokens"], 4);
    assert_eq!(streamed[0]["object"], "text_completion");

    let body = json!({"prompt": "endless", "best_of": 4, "max_tokens": 4_000, "ignore_eos": true,
                      "temperature": 1});
    let asked = server.send("/v1/completions", body.to_string());
    assert!(tokio::time::timeout(Duration::from_millis(300), asked).await.is_err());
    server.settled_audit().await;
    let (_, stats) = server.get("/admin/stats").await;
    assert_eq!(stats["stats"]["canceled"], 4, "{stats}");
}

/// Goal: sampling parameters and stop conditions reach the engine: a bias forces a token, a stop
/// string ends the text before it, a stop token ends the answer.
#[tokio::test]
async fn biases_and_stop_conditions_reach_the_engine() {
    let server = Server::tiny();
    let forced =
        server.complete(json!({"prompt": "x", "max_tokens": 4, "logit_bias": {"65": 100}})).await;
    assert_eq!(texts(&forced), ["AAAA"]);
    let stopped = server
        .complete(json!({"prompt": "x", "max_tokens": 9, "logit_bias": {"65": 100}, "stop": "AAA"}))
        .await;
    assert_eq!(texts(&stopped), [""]);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    let by_id = server
        .complete(json!({"prompt": "x", "logit_bias": {"65": 100}, "stop_token_ids": [65]}))
        .await;
    assert_eq!(by_id["choices"][0]["finish_reason"], "stop");
}

/// Goal: each of many concurrent clients gets the text that it would get alone.
#[tokio::test]
async fn concurrent_clients_do_not_disturb_each_other() {
    let server = Server::tiny();
    let ask = |seed| {
        let body = json!({"prompt": prompt(60, seed), "max_tokens": 10, "ignore_eos": true});
        server.complete(body)
    };
    let together = futures::future::join_all((0..24).map(ask)).await;
    for (seed, reply) in together.iter().enumerate() {
        assert_eq!(texts(reply), texts(&ask(seed as u32).await), "client {seed}");
    }
    server.settled_audit().await;
}

/// Goal: a client that disconnects in the middle of a stream cancels its request, and every block
/// is released.
#[tokio::test]
async fn a_disconnect_cancels_the_request() {
    let server = Server::tiny();
    let body =
        json!({"prompt": "endless", "max_tokens": 4_000, "ignore_eos": true, "stream": true});
    let response = server.send("/v1/completions", body.to_string()).await;
    let mut body = response.bytes_stream();
    body.next().await.expect("a piece").expect("bytes");
    drop(body);
    server.settled_audit().await;
    let (_, stats) = server.get("/admin/stats").await;
    assert_eq!(stats["stats"]["canceled"], 1, "{stats}");
    assert_eq!(stats["stats"]["finished"], 0, "{stats}");
}

/// Goal: the model is listed under all its names and can be used by each; health and statistics
/// are reported.
#[tokio::test]
async fn models_health_and_stats_are_reported() {
    let server = Server::with(TINY, |engine, options| {
        options.served_names = ["org/served", "other-name"].map(String::from).to_vec();
        engine
    });
    assert_eq!(server.get("/health").await, (200, json!({"status": "ok"})));
    let (_, models) = server.get("/v1/models").await;
    let listed: Vec<&Value> =
        models["data"].as_array().expect("a list").iter().map(|model| &model["id"]).collect();
    assert_eq!(listed, ["org/served", "other-name"]);
    let (status, model) = server.get("/v1/models/org/served").await;
    assert_eq!((status, &model["object"]), (200, &json!("model")));
    let (status, reply) = server.get("/v1/models/%ff").await;
    assert_eq!((status, &reply["error"]["param"]), (400, &json!("id")));
    // The names replace the model's own.
    let (status, reply) = server.get(&format!("/v1/models/{}", TINY)).await;
    let message = reply["error"]["message"].as_str().expect("a message");
    assert!(status == 404 && message.ends_with("`org/served`"), "{message}");
    for (name, expected) in [
        (json!("other-name"), "other-name"),
        (json!("org/served"), "org/served"),
        (Value::Null, "org/served"),
    ] {
        let reply = server.complete(json!({"model": name, "prompt": "x", "max_tokens": 1})).await;
        assert_eq!(reply["model"], expected);
    }
    let metrics = reqwest::get(server.url("/metrics")).await.expect("a reply").text().await;
    assert!(metrics.expect("text").contains("model_name=\"org/served\""));
    let (_, stats) = server.get("/admin/stats").await;
    assert_eq!(stats["stats"]["finished"], 3);
    assert_eq!(stats["model"]["num_blocks"], 512);
}
