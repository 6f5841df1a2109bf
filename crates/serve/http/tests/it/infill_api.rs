//! Filling in the middle: `suffix` in `/v1/completions`, and `/infill`, `/props` and
//! `/apply-template` as in llama.cpp's server.

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::infill::write_model;
use crate::support::{SCRIPTED, Server, texts};

/// Positions per KV block.
const BLOCK: usize = 4;

/// A server of a model that fills gaps with `Hello, wor`, with or without a prefix cache.
fn server(caches: bool) -> (Server, TempDir) {
    let directory = tempfile::tempdir().expect("a directory");
    write_model(directory.path());
    let path = directory.path().to_str().expect("UTF-8").to_owned();
    let server = Server::with(&path, |engine, _| engine.block_size(BLOCK).prefix_caching(caches));
    (server, directory)
}

/// The token ids of a text, in which special tokens may be spelled out.
async fn tokens(server: &Server, text: &str) -> Value {
    server.ok("/tokenize", json!({"prompt": text})).await["tokens"].clone()
}

/// Goal: a gap is filled by the prompt that the model was trained with, and its own tokens end the
/// text, in both APIs, whole and streamed.
#[tokio::test]
async fn gaps_are_filled() {
    let (server, _directory) = server(true);
    let prompt = "<fim_prefix>ab<fim_suffix>cd<fim_middle>";
    let expected = tokens(&server, prompt).await;
    let reply = server
        .complete(json!({"prompt": ["ab", "x"], "suffix": "cd", "return_token_ids": true}))
        .await;
    assert_eq!(texts(&reply), ["Hello, wor", "Hello, wor"]);
    assert_eq!(reply["choices"][0]["prompt_token_ids"], expected);
    assert_eq!(reply["choices"][0]["finish_reason"], "stop");

    let ask = json!({"input_prefix": "a", "prompt": "b", "input_suffix": "cd", "seed": -1,
                     "repeat_penalty": 1.0, "id_slot": 0, "n_predict": -1});
    let whole = server.ok("/infill", ask.clone()).await;
    assert_eq!((&whole["content"], &whole["stop_type"]), (&json!("Hello, wor"), &json!("eos")));
    assert_eq!(whole["tokens_evaluated"], json!(expected.as_array().expect("ids").len()));
    let response = server.send("/infill", json_with(&ask, "stream", json!(true)).to_string()).await;
    let text = response.text().await.expect("a body");
    let events: Vec<Value> = text
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(|data| serde_json::from_str(data).expect("JSON"))
        .collect();
    let content: String = events.iter().filter_map(|event| event["content"].as_str()).collect();
    let stops: Vec<bool> = events.iter().map(|event| event["stop"] == true).collect();
    assert_eq!((content.as_str(), &stops[..]), ("Hello, wor", &[false, false, true][..]));
    assert_eq!(events[2]["timings"]["predicted_n"], whole["timings"]["predicted_n"]);

    for (extra, content, stop_type, word) in [
        (json!({"n_predict": 1}), "Hello", "limit", ""),
        (json!({"stop": ["wo"]}), "Hello, ", "word", "wo"),
    ] {
        let mut body = ask.clone();
        body.as_object_mut().expect("an object").extend(extra.as_object().expect("one").clone());
        let reply = server.ok("/infill", body).await;
        assert_eq!(reply["content"], content);
        assert_eq!(
            (&reply["stop_type"], &reply["stopping_word"]),
            (&json!(stop_type), &json!(word))
        );
    }
}

/// Goal: `/completion` continues a prompt as `/v1/completions` does, in llama.cpp's form: text and
/// token ids, whole and streamed, with a schema, stop strings and llama.cpp's names; its samplers
/// pass with the values that switch them off, and several prompts are refused.
#[tokio::test]
async fn prompts_are_continued_in_the_form_of_llama_cpp() {
    let server = Server::tiny();
    let options = json!({"temperature": 0.7, "seed": 5, "top_k": 20});
    let with = |more: Value| {
        let mut body = options.as_object().expect("an object").clone();
        body.extend(more.as_object().expect("an object").clone());
        Value::Object(body)
    };
    let ids = tokens(&server, "the").await;
    for (theirs, ours) in [
        (
            json!({"prompt": "the", "n_predict": 12, "repeat_penalty": 1.2}),
            json!({"prompt": "the", "max_tokens": 12, "repetition_penalty": 1.2}),
        ),
        (json!({"prompt": ids, "n_predict": 8}), json!({"prompt": ids, "max_tokens": 8})),
        (
            json!({"prompt": "the", "n_predict": 30, "json_schema": {"type": "boolean"},
                   "stop_token_ids": [10]}),
            json!({"prompt": "the", "max_tokens": 30, "guided_json": {"type": "boolean"},
                   "stop_token_ids": [10]}),
        ),
    ] {
        let expected = server.complete(with(ours)).await;
        let (text, usage) = (&expected["choices"][0]["text"], &expected["usage"]);
        let neutral = json!({"cache_prompt": true, "typical_p": 1.0, "mirostat": 0, "grammar": "",
                             "repeat_last_n": -1, "n_probs": 0});
        let mut body = with(theirs);
        body.as_object_mut().expect("one").extend(neutral.as_object().expect("one").clone());
        let whole = server.ok("/completion", body.clone()).await;
        assert_eq!((&whole["content"], &whole["stop"]), (text, &json!(true)));
        assert_eq!(whole["tokens_predicted"], usage["completion_tokens"]);
        assert_eq!(whole["tokens_evaluated"], usage["prompt_tokens"]);
        let response =
            server.send("/completion", json_with(&body, "stream", json!(true)).to_string());
        let events = response.await.text().await.expect("a body");
        let events = events.lines().filter_map(|line| line.strip_prefix("data: "));
        let content: String = events
            .filter_map(|data| {
                serde_json::from_str::<Value>(data).expect("JSON")["content"]
                    .as_str()
                    .map(str::to_owned)
            })
            .collect();
        assert_eq!(json!(content), *text);
    }
    for (member, value) in [
        ("prompt", json!(["a", "b"])),
        ("mirostat", json!(2)),
        ("grammar", json!("root ::= \"a\"")),
        ("repeat_last_n", json!(64)),
        ("n_predict", json!(-2)),
    ] {
        let body = json_with(&json!({"prompt": "a", "n_predict": 1}), member, value);
        let (status, reply) = server.post("/completion", body).await;
        let message = reply["error"]["message"].as_str().expect("a message");
        assert!(status == 400 && message.contains(member), "{member}: {reply}");
    }
}

fn json_with(body: &Value, name: &str, value: Value) -> Value {
    let mut body = body.clone();
    body[name] = value;
    body
}

/// The requests that llama.vim sends while somebody types a line: the lines before it, the line up
/// to the cursor, the lines after it, and pieces of other files.
fn keystrokes(line: &str) -> Vec<Value> {
    let before = "fn area(width: u32, height: u32) -> u32 {\n    width * height\n}\n\n";
    let extra: Vec<Value> = (0..3)
        .map(|file| json!({"filename": format!("{file}.rs"), "text": "let side = 7;\n".repeat(4)}))
        .collect();
    let fields = ["content", "timings/prompt_n", "timings/predicted_n", "truncated", "none/such"];
    let request = |end: usize| {
        json!({
            "id_slot": 0, "input_prefix": before, "input_suffix": "\n}\n", "input_extra": extra,
            "prompt": &line[..end], "n_predict": 16, "stop": [], "n_indent": 4, "top_k": 40,
            "top_p": 0.90, "samplers": ["top_k", "top_p", "infill"], "stream": false,
            "cache_prompt": true, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
            "response_fields": fields,
        })
    };
    (0..=line.len()).map(request).collect()
}

/// Goal: while somebody types, each request computes only the text from the key on: the key itself,
/// the suffix, and at most the rest of a block. The answers are those of an engine without a cache.
#[tokio::test]
async fn typing_computes_what_has_changed() {
    let ((server, _directory), (plain, _other)) = (server(true), server(false));
    let requests = keystrokes("fn volume(width: u32) {");
    // llama.vim sends the other files ahead, when they change.
    let mut warm = requests[0].clone();
    for (name, value) in [
        ("input_prefix", json!("")),
        ("input_suffix", json!("")),
        ("n_predict", json!(0)),
        ("samplers", json!([])),
        ("response_fields", json!([""])),
    ] {
        warm[name] = value;
    }
    assert_eq!(server.ok("/infill", warm.clone()).await, json!({}));
    warm["response_fields"] = json!(["content", "tokens_predicted", "stop_type"]);
    let warmed = server.ok("/infill", warm).await;
    assert_eq!(warmed, json!({"content": "", "tokens_predicted": 0, "stop_type": "limit"}));
    // The special tokens of the suffix and the middle, and one token for each byte.
    let after = 2 + "\n}\n".len();
    let before = requests[0]["input_prefix"].as_str().expect("a text").len();
    for (key, request) in requests.into_iter().enumerate() {
        let reply = server.ok("/infill", request.clone()).await;
        let computed = reply["timings/prompt_n"].as_u64().expect("a count") as usize;
        let changed = after + if key == 0 { before } else { 1 };
        assert!((changed..changed + BLOCK).contains(&computed), "{key}: {computed} of {changed}");
        let expected = plain.ok("/infill", request).await;
        assert!(expected["timings/prompt_n"].as_u64() > Some(100), "{expected}");
        assert_eq!(reply["content"], expected["content"]);
        let mut names: Vec<&String> = reply.as_object().expect("an object").keys().collect();
        names.sort_unstable();
        assert_eq!(names, ["content", "timings/predicted_n", "timings/prompt_n", "truncated"]);
    }
    server.settled_audit().await;
}

/// Goal: a model that was not trained to fill in the middle says so, and what cannot be combined
/// with a suffix is refused by name.
#[tokio::test]
async fn gaps_that_cannot_be_filled_are_refused() {
    let scripted = Server::start(SCRIPTED);
    for (path, body) in [
        ("/infill", json!({"input_prefix": "a", "input_suffix": "b"})),
        ("/v1/completions", json!({"prompt": "a", "suffix": "b"})),
    ] {
        let (status, reply) = scripted.post(path, body).await;
        let message = reply["error"]["message"].as_str().expect("a message");
        assert_eq!((status, message.contains("<|fim_prefix|>")), (400, true), "{reply}");
        assert_eq!(reply["error"]["code"], "unsupported_endpoint");
    }
    assert_eq!(scripted.complete(json!({"prompt": "a", "suffix": ""})).await["model"], "scripted");
    let (server, _directory) = server(true);
    for (body, words) in [
        (json!({"prompt": "a", "suffix": "b", "echo": true}), "`echo`"),
        (json!({"prompt": "a", "suffix": "b", "truncate_prompt_tokens": 3}), "`truncate_prompt"),
        (json!({"prompt": [1, 2], "suffix": "b"}), "text"),
    ] {
        let (status, reply) = server.post("/v1/completions", body).await;
        assert_eq!((status, &reply["error"]["param"]), (400, &json!("suffix")), "{reply}");
        assert!(reply["error"]["message"].as_str().expect("a message").contains(words), "{reply}");
    }
    let (status, reply) = server.post("/infill", json!({"input_extra": [{"filename": "x"}]})).await;
    assert_eq!((status, &reply["error"]["param"]), (400, &json!("input_extra[0].text")), "{reply}");
}

/// Goal: a model without a tokenizer is described, too, with empty strings for its texts.
#[tokio::test]
async fn models_without_a_tokenizer_are_described() {
    let model = stolon_fixtures::path("gemma4");
    let server = Server::start(model.to_str().expect("a path"));
    let (status, props) = server.get("/props").await;
    assert_eq!((status, &props["default_generation_settings"]["n_ctx"]), (200, &json!(256)));
    for name in ["chat_template", "bos_token", "eos_token"] {
        assert_eq!(props[name], "", "{name}");
    }
    assert_eq!(server.get("/tokenizer_info").await.0, 200);
}

/// Goal: clients of llama.cpp's server find what they ask for: the context length, the template,
/// and the text of a conversation's prompt.
#[tokio::test]
async fn clients_of_llama_cpp_find_the_model() {
    let server = Server::start(SCRIPTED);
    let (status, props) = server.get("/props").await;
    assert_eq!(status, 200);
    assert_eq!(props["default_generation_settings"]["n_ctx"], 4096);
    assert_eq!(
        (&props["model_alias"], &props["eos_token"]),
        (&json!("scripted"), &json!("<|end|>"))
    );
    assert!(props["chat_template"].as_str().expect("a template").contains("message.role"));
    assert_eq!(props["modalities"], json!({"vision": false, "audio": false}));
    assert_eq!(props["drafting"], "none");
    let messages = json!([{"role": "user", "content": "Now"}]);
    let applied = server.ok("/apply-template", json!({"messages": messages})).await;
    assert_eq!(applied, json!({"prompt": "|user|Now"}));
    let (status, reply) = server.post("/apply-template", json!({"prompt": "x"})).await;
    assert_eq!((status, &reply["error"]["param"]), (400, &json!("messages")));
}
