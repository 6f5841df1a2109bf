//! Text encoders: `/v1/embeddings`, `/v1/rerank`, `/score` and `/classify`, with the models in
//! `crates/models/checkpoint/tests/fixtures/encoders`.

use serde_json::{Value, json};

use crate::support::{Server, encoder};

fn start(name: &str) -> Server {
    Server::start(&encoder(name))
}

fn expected(name: &str) -> Value {
    let file = format!("{}/expected.json", encoder(name));
    serde_json::from_str(&std::fs::read_to_string(file).expect("a fixture")).expect("JSON")
}

#[track_caller]
fn assert_close(values: &Value, expected: &Value) {
    let numbers = |value: &Value| -> Vec<f64> {
        value.as_array().expect("a list").iter().map(|v| v.as_f64().expect("a number")).collect()
    };
    let (values, expected) = (numbers(values), numbers(expected));
    assert_eq!(values.len(), expected.len());
    let difference = values.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(difference < 1e-5, "{difference}");
}

/// Goal: texts and token ids have the embeddings of sentence-transformers, with the model's prompt
/// under each of its names, and long texts are cut on request only.
#[tokio::test]
async fn encoders_answer_embeddings() {
    let (server, expected) = (start("modernbert"), expected("modernbert"));
    let cases = expected["texts"].as_array().expect("a list");
    let texts: Vec<&Value> = cases.iter().map(|case| &case["text"]).filter(|t| *t != "").collect();
    let body = json!({"input": texts, "truncate_prompt_tokens": -1, "model": "modernbert"});
    let reply = server.ok("/v1/embeddings", body).await;
    for (entry, case) in reply["data"].as_array().expect("a list").iter().zip(cases) {
        assert_close(&entry["embedding"], &case["embedding"]);
    }
    let reply = server.ok("/v1/embeddings", json!({"input": [cases[0]["tokens"]]})).await;
    assert_close(&reply["data"][0]["embedding"], &cases[0]["embedding"]);
    assert_eq!(reply["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let (status, reply) = server.post("/v1/embeddings", json!({"input": texts})).await;
    assert_eq!((status, &reply["error"]["param"]), (400, &json!("input[3]")), "{reply}");
    let message = reply["error"]["message"].as_str().expect("a message");
    assert!(message.contains("`--auto-truncate`"), "{message}");
    let cutting = Server::with(&encoder("modernbert"), |engine, options| {
        options.auto_truncate = true;
        engine
    });
    let reply = cutting.ok("/v1/embeddings", json!({"input": texts})).await;
    for (entry, case) in reply["data"].as_array().expect("a list").iter().zip(cases) {
        assert_close(&entry["embedding"], &case["embedding"]);
    }
    let body = json!({"input": texts[3], "truncate_prompt_tokens": 5});
    let reply = cutting.ok("/v1/embeddings", body).await;
    assert_eq!(reply["usage"]["prompt_tokens"], 5);
    let prompt = &expected["prompt"];
    for (name, value) in
        [("prompt_name", "query"), ("input_type", "query"), ("input_type", "search_query")]
    {
        let reply =
            server.ok("/v1/embeddings", json!({"input": prompt["text"], name: value})).await;
        assert_close(&reply["data"][0]["embedding"], &prompt["embedding"]);
    }
    for name in ["prompt_name", "input_type"] {
        let (status, reply) = server.post("/v1/embeddings", json!({"input": "x", name: "y"})).await;
        assert_eq!((status, &reply["error"]["param"]), (400, &json!(name)));
        let message = reply["error"]["message"].as_str().expect("a message");
        assert!(message.contains("`document`, `query`"), "{message}");
    }
    let short = &expected["short"];
    let body = json!({"input": short["text"], "dimensions": short["size"]});
    let reply = server.ok("/v1/embeddings", body).await;
    assert_close(&reply["data"][0]["embedding"], &short["embedding"]);
    let models = server.get("/v1/models").await.1;
    assert_eq!(models["data"][0]["embedding_size"], 32, "{models}");
    server.settled_audit().await;
}

/// Goal: a model with matrices for tasks uses those of `task`, with the prompt of the task unless
/// another is named, and `input_type` chooses task and prompt.
#[tokio::test]
async fn tasks_choose_matrices_and_prompts() {
    let (server, expected) = (start("jina_v3"), expected("jina_v3"));
    let vector = async |body: Value| {
        let reply = server.ok("/v1/embeddings", body).await;
        reply["data"][0]["embedding"].clone()
    };
    let cases = expected["tasks"].as_array().expect("a list").iter();
    for case in cases.filter(|case| case["text"].as_str().is_some_and(|text| text.len() == 1)) {
        // The prompt of this name is empty.
        let body = json!({"input": "x", "task": case["task"], "prompt_name": "text-matching"});
        assert_close(&vector(body).await, &case["embedding"]);
    }
    for (kind, task, prompt) in [
        ("query", "retrieval.query", "Represent the query for retrieving evidence documents: "),
        ("passage", "retrieval.passage", "Represent the document for retrieval: "),
    ] {
        let written = json!({
            "input": format!("{prompt}the stem"), "task": task, "prompt_name": "text-matching",
        });
        let written = vector(written).await;
        let plain = vector(json!({"input": format!("{prompt}the stem")})).await;
        assert_ne!(written, plain);
        assert_eq!(vector(json!({"input": "the stem", "task": task})).await, written);
        assert_eq!(vector(json!({"input": "the stem", "input_type": kind})).await, written);
        assert_eq!(vector(json!({"input": "the stem", "prompt_name": task})).await, plain);
    }
    let (status, reply) = server.post("/v1/embeddings", json!({"input": "x", "task": "y"})).await;
    assert_eq!((status, &reply["error"]["param"]), (400, &json!("task")), "{reply}");
    let message = reply["error"]["message"].as_str().expect("a message");
    assert!(message.contains("`retrieval.query`, `retrieval.passage`"), "{message}");
    server.settled_audit().await;
    let other = start("bert");
    let (status, reply) =
        other.post("/v1/embeddings", json!({"input": "x", "task": "retrieval.query"})).await;
    assert_eq!((status, &reply["error"]["param"]), (400, &json!("task")), "{reply}");
}

/// Goal: with a model that needs a task, `task` chooses it, with the model's default prompt or that of
/// `input_type`, which alone chooses the task, too; without either, the error lists the tasks.
#[tokio::test]
async fn a_model_that_needs_a_task_says_so() {
    for name in ["jina_v5_nano", "jina_v5_small"] {
        let (server, expected) = (start(name), expected(name));
        let found = |task: &str, text: &str| {
            let cases = expected["tasks"].as_array().expect("a list").iter();
            let found = cases.clone().find(|case| case["task"] == task && case["text"] == text);
            found.expect("a case")["embedding"].clone()
        };
        let query = found("retrieval", "Query: What is a stolon?");
        let document = found("retrieval", "Document: What is a stolon?");
        let cluster = found("clustering", "Document: What is a stolon?");
        for (settings, vector) in [
            (json!({"task": "retrieval"}), &document),
            (json!({"task": "retrieval", "prompt_name": "query"}), &query),
            (json!({"task": "retrieval", "input_type": "query"}), &query),
            (json!({"input_type": "query"}), &query),
            (json!({"input_type": "search_document"}), &document),
            (json!({"input_type": "clustering"}), &cluster),
            (json!({"task": "clustering", "input_type": "document"}), &cluster),
        ] {
            let mut body = json!({"input": "What is a stolon?"});
            body.as_object_mut()
                .expect("an object")
                .extend(settings.as_object().expect("settings").clone());
            let reply = server.ok("/v1/embeddings", body).await;
            assert_close(&reply["data"][0]["embedding"], vector);
        }
        let (status, reply) = server.post("/v1/embeddings", json!({"input": "x"})).await;
        assert_eq!((status, &reply["error"]["param"]), (400, &json!("task")), "{reply}");
        let message = reply["error"]["message"].as_str().expect("a message");
        assert!(message.contains("retrieval, text-matching, clustering"), "{message}");
        server.settled_audit().await;
    }
}

/// Goal: vectors in vLLM's form are those of `/v1/embeddings`, in both formats.
#[tokio::test]
async fn vectors_in_the_form_of_vllm_are_the_same() {
    let server = start("bert");
    for format in ["float", "base64"] {
        let body = json!({"input": ["the stem", "x"], "encoding_format": format, "model": "bert"});
        let reply = server.ok("/pooling", body.clone()).await;
        let vectors = server.ok("/v1/embeddings", body).await;
        assert_eq!((&reply["object"], &reply["model"]), (&json!("list"), &json!("bert")));
        assert!(reply["id"].as_str().is_some_and(|id| id.starts_with("pool-")), "{reply}");
        assert_eq!(reply["usage"], vectors["usage"]);
        for index in 0..2 {
            let entry = &reply["data"][index];
            assert_eq!((&entry["index"], &entry["object"]), (&json!(index), &json!("pooling")));
            assert_eq!(entry["data"], vectors["data"][index]["embedding"]);
            assert!(!entry["data"].is_null());
        }
    }
}

/// Goal: `/pooling` has the scores of models that compute no vectors, for texts and token ids, and
/// refuses what concerns vectors.
#[tokio::test]
async fn scores_in_the_form_of_vllm_are_those_of_classify() {
    for name in ["mpnet_classifier", "bert_reranker"] {
        let server = start(name);
        let texts = json!(["the stem", "x"]);
        let classes = server.ok("/classify", json!({"input": texts})).await;
        let reply = server.ok("/pooling", json!({"input": texts})).await;
        assert!(reply["id"].as_str().is_some_and(|id| id.starts_with("pool-")), "{reply}");
        assert_eq!(reply["usage"], classes["usage"]);
        for index in 0..2 {
            let entry = &reply["data"][index];
            assert_eq!((&entry["index"], &entry["object"]), (&json!(index), &json!("pooling")));
            assert_eq!(entry["data"], classes["data"][index]["probs"]);
            assert!(!entry["data"].is_null());
        }
        let one = json!({"input": "x", "encoding_format": "base64"});
        assert!(server.ok("/pooling", one).await["data"][0]["data"].is_string());
        for (body, param) in [
            (json!({"input": "x", "dimensions": 1}), "dimensions"),
            (json!({"input": "x", "prompt_name": "query"}), "prompt_name"),
            (json!({"input": []}), "input"),
        ] {
            let (status, reply) = server.post("/pooling", body.clone()).await;
            assert_eq!((status, &reply["error"]["param"]), (400, &json!(param)), "{body}: {reply}");
        }
    }
}

/// Goal: an instruction changes the scores of a language model that answers yes or no, on every route
/// and alike, and other models refuse it.
#[tokio::test]
async fn instructions_reach_the_template() {
    let server = start("qwen3_judge");
    let rerank = |instruction: Option<&str>| json!({"query": "a", "documents": ["b"], "instruction": instruction});
    let score = async |instruction| {
        server.ok("/v1/rerank", rerank(instruction)).await["results"][0]["relevance_score"].clone()
    };
    let (plain, told) = (score(None).await, score(Some("Find stems")).await);
    assert_ne!(plain, told);
    let published = "Given a web search query, retrieve relevant passages that answer the query";
    assert_eq!(score(Some(published)).await, plain);
    let body = json!({"text_1": "a", "text_2": "b", "instruction": "Find stems"});
    assert_eq!(server.ok("/score", body.clone()).await["data"][0]["score"], told);
    let (status, reply) = start("bert_reranker").post("/score", body).await;
    assert_eq!((status, &reply["error"]["param"]), (400, &json!("instruction")), "{reply}");
}

/// Goal: items have the probability of the first label's token after query and item, in both orders,
/// as texts and as token ids, divided by the sum of the labels' or not, cached or not.
#[tokio::test]
async fn items_are_scored_by_the_next_token() {
    let server = Server::start("demo");
    let cold = Server::with("demo", |engine, _| engine.prefix_caching(false));
    let tokens = async |text: &str, special: bool| {
        let body = json!({"prompt": text, "add_special_tokens": special});
        cold.ok("/tokenize", body).await["tokens"].clone()
    };
    let logprob = async |prompt: &Value, label: &Value| {
        let prompt = [prompt.as_array().expect("ids").clone(), vec![label.clone()]].concat();
        let body = json!({"prompt": prompt, "echo": true, "max_tokens": 0, "logprobs": 0});
        let reply = cold.ok("/v1/completions", body).await;
        let all = reply["choices"][0]["logprobs"]["token_logprobs"].clone();
        all.as_array().and_then(|all| all.last()).and_then(Value::as_f64).expect("a number")
    };
    let (query, item) = ("The lamp of the tower is", " lit every evening by the");
    let labels = json!([tokens(" keeper", false).await[0], tokens(" sea", false).await[0]]);
    let ids = |first: &Value, second: &Value| {
        json!(
            [first.as_array().expect("ids").clone(), second.as_array().expect("ids").clone()]
                .concat()
        )
    };
    let own = tokens(query, true).await;
    let others = tokens(item, false).await;
    for (item_first, prompt) in [(false, ids(&own, &others)), (true, ids(&others, &own))] {
        let mut expected = [0.0; 2];
        for (index, expected) in expected.iter_mut().enumerate() {
            *expected = logprob(&prompt, &labels[index]).await.exp();
        }
        for softmax in [None, Some(true), Some(false)] {
            let whole = if softmax == Some(false) { 1.0 } else { expected[0] + expected[1] };
            for (query, items) in [(json!(query), json!([item])), (own.clone(), json!([others]))] {
                let body = json!({"query": query, "items": items, "label_token_ids": labels,
                                  "item_first": item_first, "apply_softmax": softmax});
                let reply = server.ok("/generative_scoring", body.clone()).await;
                let got = reply["data"][0]["score"].as_f64().expect("a number");
                assert!((got - expected[0] / whole).abs() < 1e-5, "{body}: {got}");
                assert_eq!(reply["data"][0]["object"], "score");
                let alone = cold.ok("/generative_scoring", body).await;
                assert_eq!(alone["data"], reply["data"]);
                assert_eq!(alone["usage"], reply["usage"]);
            }
        }
    }
    for (body, param) in [
        (json!({"query": "a", "items": ["b"]}), "label_token_ids"),
        (json!({"query": "a", "items": ["b"], "label_token_ids": []}), "label_token_ids"),
        (json!({"query": "a", "items": ["b"], "label_token_ids": [1 << 30]}), "label_token_ids"),
        (json!({"query": "a", "items": ["b"], "label_token_ids": vec![1; 129]}), "label_token_ids"),
        (
            json!({"query": "a", "items": vec!["b"; 100], "label_token_ids": vec![1; 100]}),
            "label_token_ids",
        ),
        (json!({"query": "a", "items": "b", "label_token_ids": [1]}), "items"),
        (json!({"query": "a", "items": [], "label_token_ids": [1]}), "items"),
        (json!({"query": ["a"], "items": ["b"], "label_token_ids": [1]}), "query"),
        (json!({"query": vec![1; 4096], "items": vec!["b"; 512], "label_token_ids": [1]}), "query"),
    ] {
        let (status, reply) = server.post("/generative_scoring", body.clone()).await;
        assert_eq!((status, &reply["error"]["param"]), (400, &json!(param)), "{reply}");
    }
    server.settled_audit().await;
}

/// Goal: what a text encoder cannot do is refused with the reason.
#[tokio::test]
async fn encoders_refuse_what_they_are_not_meant_for() {
    let server = start("bert");
    for (path, body) in [
        ("/v1/completions", json!({"prompt": "a"})),
        ("/v1/rerank", json!({"query": "a", "documents": ["b"]})),
        ("/score", json!({"text_1": "a", "text_2": "b"})),
        ("/classify", json!({"input": "a"})),
    ] {
        let (status, reply) = server.post(path, body).await;
        assert_eq!((status, &reply["error"]["code"]), (400, &json!("unsupported_endpoint")));
    }
    let chat = json!({"messages": [{"role": "user", "content": "a"}]});
    assert_eq!(server.post("/v1/chat/completions", chat).await.0, 400);
    let generative = json!({"query": "a", "items": ["b"], "label_token_ids": [1]});
    assert_eq!(server.post("/generative_scoring", generative).await.0, 400);
    let server = start("bert_reranker");
    for (path, body) in
        [("/v1/embeddings", json!({"input": "a"})), ("/v1/completions", json!({"prompt": "a"}))]
    {
        let (status, reply) = server.post(path, body).await;
        assert_eq!((status, &reply["error"]["code"]), (400, &json!("unsupported_endpoint")));
    }
    for (path, body, param) in [
        ("/v1/rerank", json!({"query": "a", "documents": []}), "documents"),
        ("/v1/rerank", json!({"query": "a", "documents": [1]}), "documents[0]"),
        ("/v1/rerank", json!({"query": "a", "documents": ["b"], "top_n": 0}), "top_n"),
        ("/v1/rerank", json!({"query": "a", "documents": ["b"], "rank": 1}), "rank"),
        ("/v1/rerank", json!({"documents": ["b"]}), "query"),
        ("/v1/rerank", json!({"query": "a", "documents": vec!["b"; 2049]}), "documents"),
        ("/score", json!({"text_1": ["a", "b"], "text_2": ["c"]}), "text_1"),
        ("/score", json!({"text_1": [], "text_2": []}), "text_2"),
        ("/score", json!({"text_1": "a", "text_2": ["b", "the ".repeat(200)]}), "text_2[1]"),
        ("/classify", json!({"input": []}), "input"),
    ] {
        let (status, reply) = server.post(path, body.clone()).await;
        assert_eq!((status, &reply["error"]["param"]), (400, &json!(param)), "{body}: {reply}");
    }
}

/// Goal: documents come in the order of the scores of sentence-transformers, in all forms of the
/// request and on all paths, and pairs have the same scores alone.
#[tokio::test]
async fn rerankers_answer_in_order() {
    for name in ["bert_reranker", "xlm_roberta_reranker", "qwen3_judge"] {
        let (server, expected) = (start(name), expected(name));
        let pairs = expected["pairs"].as_array().expect("a list");
        let query = &pairs[0]["query"];
        let texts: Vec<&Value> = pairs.iter().map(|pair| &pair["document"]).collect();
        let objects: Vec<Value> = texts.iter().map(|text| json!({"text": text})).collect();
        let mut order: Vec<usize> = (0..pairs.len()).collect();
        let score = |index: &usize| pairs[*index]["score"].as_f64().expect("a number");
        order.sort_by(|a, b| score(b).total_cmp(&score(a)));
        for (path, documents) in [
            ("/v1/rerank", json!(texts)),
            ("/v2/rerank", json!(objects)),
            ("/rerank", json!(texts)),
        ] {
            let body = json!({"model": name, "query": query, "documents": documents, "top_n": 3});
            let reply = server.ok(path, body).await;
            let results = reply["results"].as_array().expect("a list");
            assert_eq!(results.len(), 3);
            for (result, &index) in results.iter().zip(&order) {
                assert_eq!(result["index"], index, "{name}");
                assert_eq!(&result["document"]["text"], texts[index]);
                assert_close(&json!([result["relevance_score"]]), &json!([pairs[index]["score"]]));
            }
            assert!(reply["usage"]["total_tokens"].as_u64() > Some(0) && reply["id"].is_string());
        }
        let body = json!({"query": query, "documents": texts, "return_documents": false});
        let reply = server.ok("/v1/rerank", body).await;
        assert!(reply["results"][0].get("document").is_none());
        let body = json!({"text_1": query, "text_2": texts, "truncate_prompt_tokens": -1});
        let scores = server.ok("/score", body).await;
        for (index, pair) in pairs.iter().enumerate() {
            assert_close(&json!([scores["data"][index]["score"]]), &json!([pair["score"]]));
        }
        server.settled_audit().await;
    }
}

/// Goal: labels have the probabilities of transformers, and the best one is named.
#[tokio::test]
async fn classifiers_name_the_best_label() {
    let (server, expected) = (start("mpnet_classifier"), expected("mpnet_classifier"));
    let cases = expected["texts"].as_array().expect("a list");
    let texts: Vec<&Value> = cases.iter().map(|case| &case["text"]).collect();
    let reply = server.ok("/classify", json!({"input": texts})).await;
    let names = ["contradiction", "entailment", "neutral"];
    for (entry, case) in reply["data"].as_array().expect("a list").iter().zip(cases) {
        assert_close(&entry["probs"], &case["scores"]);
        let probs = entry["probs"].as_array().expect("a list");
        let best = probs.iter().map(|p| p.as_f64().expect("a number")).fold(0.0, f64::max);
        let index = probs.iter().position(|p| p.as_f64() == Some(best)).expect("the best one");
        assert_eq!((&entry["label"], &entry["num_classes"]), (&json!(names[index]), &json!(3)));
    }
    let (status, _) = server.post("/v1/rerank", json!({"query": "a", "documents": ["b"]})).await;
    assert_eq!(status, 400);
}

/// Goal: a language model gives labels the probabilities of their tokens after the prompt, for texts
/// and for a conversation, whether the prompt is cached or not.
#[tokio::test]
async fn language_models_compare_labels() {
    let server = Server::start("demo");
    let cold = Server::with("demo", |engine, _| engine.prefix_caching(false));
    let prompt = "The lamp of the tower is lit every evening by the keeper. The keeper";
    let labels = ["safe", " lights the lamp", " walks up", "?"];
    // The tokens of the labels, one after another, under the model's own distribution.
    let logprob = async |label: &str| {
        let body = json!({"prompt": format!("{prompt}{label}"), "echo": true, "max_tokens": 0, "logprobs": 0});
        let all = cold.ok("/v1/completions", body).await;
        let count = |reply: &Value| reply["tokens"].as_array().expect("tokens").len();
        let body = json!({"prompt": prompt});
        let prompt = count(&cold.ok("/tokenize", body).await);
        let logprobs = all["choices"][0]["logprobs"]["token_logprobs"].as_array().expect("a list");
        logprobs[prompt..].iter().map(|logprob| logprob.as_f64().expect("a number")).sum::<f64>()
    };
    let mut expected = Vec::new();
    for label in labels {
        expected.push(logprob(label).await.exp());
    }
    let sum: f64 = expected.iter().sum();
    let body = json!({"input": [prompt, "x", prompt], "labels": labels});
    let reply = server.ok("/classify", body.clone()).await;
    let data = reply["data"].as_array().expect("a list");
    assert_eq!((data.len(), &data[0]["num_classes"]), (3, &json!(4)));
    assert_eq!(data[0]["probs"], data[2]["probs"]);
    for (index, expected) in expected.iter().enumerate() {
        let got = data[0]["probs"][index].as_f64().expect("a number");
        assert!(
            (got - expected / sum).abs() < 1e-5,
            "{}: {got}, {}",
            labels[index],
            expected / sum
        );
    }
    let best = (0..4).max_by(|a, b| expected[*a].total_cmp(&expected[*b])).expect("four");
    assert_eq!(data[0]["label"], labels[best]);
    // The same bits without a cache, and once more.
    for server in [&cold, &server] {
        assert_eq!(server.ok("/classify", body.clone()).await["data"], reply["data"]);
    }
    let messages = json!([{"role": "user", "content": "Is the lamp lit?"}]);
    let chat = json!({"messages": messages, "labels": ["Yes", "No"]});
    let judged = server.ok("/v1/classify", chat).await;
    let probs = judged["data"][0]["probs"].as_array().expect("a list").iter();
    let sum: f64 = probs.map(|prob| prob.as_f64().expect("a number")).sum();
    assert!((sum - 1.0).abs() < 1e-5, "{judged}");
}

/// Goal: labels that cannot be compared are refused with their parameter.
#[tokio::test]
async fn wrong_labels_are_refused() {
    let server = Server::start("demo");
    let two = json!(["Yes", "No"]);
    let user = json!([{"role": "user", "content": "x"}]);
    for (body, param) in [
        (json!({"input": "x", "labels": ["Yes"]}), "labels"),
        (json!({"input": "x", "labels": ["Yes", ""]}), "labels"),
        (json!({"input": "x", "labels": ["Yes", "x".repeat(257)]}), "labels"),
        (json!({"input": "x", "labels": vec!["x"; 129]}), "labels"),
        (json!({"input": vec!["x"; 100], "labels": vec!["x"; 100]}), "labels"),
        (json!({"input": "x", "labels": [1, 2]}), "labels[0]"),
        (json!({"labels": two}), "input"),
        (json!({"input": [], "labels": two}), "input"),
        (json!({"input": "x", "messages": user, "labels": two}), "messages"),
        (json!({"messages": [], "labels": two}), "messages"),
        (json!({"input": "x", "chat_template_kwargs": {}, "labels": two}), "chat_template_kwargs"),
    ] {
        let (status, reply) = server.post("/classify", body.clone()).await;
        assert_eq!((status, &reply["error"]["param"]), (400, &json!(param)), "{body}: {reply}");
    }
    // A text encoder has its own labels.
    let classifier = start("mpnet_classifier");
    let (status, _) = classifier.post("/classify", json!({"input": "x", "labels": two})).await;
    assert_eq!(status, 400);
    let (status, reply) = classifier.post("/classify", json!({"messages": user})).await;
    assert_eq!((status, &reply["error"]["param"]), (400, &json!("messages")));
}
