//! Text encoders through the whole path, from text to vectors and scores, compared with
//! sentence-transformers.

use std::path::PathBuf;

use futures::future::join_all;
use serde_json::Value;
use stolon::{Engine, EngineBuilder, EngineError, Error, ModelSource, Request, WeightType};

use crate::support::copies::copy_all;

const EMBEDDERS: [&str; 13] = [
    "bert",
    "xlm_roberta",
    "mpnet",
    "distilbert",
    "modernbert",
    "nomic_bert",
    "nomic_bert_moe",
    "jina_bert",
    "jina_code",
    "jina_v3",
    "embedding_gemma",
    "eurobert",
    "gte",
];
const RERANKERS: [&str; 8] = [
    "bert_reranker",
    "xlm_roberta_reranker",
    "jina_reranker",
    "jina_roberta_reranker",
    "gte_reranker",
    "modernbert_reranker",
    "qwen3_reranker",
    "qwen3_judge",
];
const CLASSIFIERS: [&str; 2] = ["mpnet_classifier", "distilbert_classifier"];

fn directory(name: &str) -> PathBuf {
    stolon_fixtures::path("encoders").join(name)
}

fn builder(name: &str) -> EngineBuilder {
    Engine::builder().model(ModelSource::Directory(directory(name))).threads(2)
}

async fn engine(name: &str) -> Engine {
    builder(name).build().await.expect(name)
}

fn expected(name: &str) -> Value {
    let text = std::fs::read_to_string(directory(name).join("expected.json")).expect("a fixture");
    serde_json::from_str(&text).expect("JSON")
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().map_or(&[], Vec::as_slice)
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().expect("a text")
}

#[track_caller]
fn assert_close(values: &[f32], expected: &Value, what: &str) {
    assert_within(values, expected, what, 4e-6);
}

#[track_caller]
fn assert_within(values: &[f32], expected: &Value, what: &str, tolerance: f32) {
    let expected = expected.as_array().expect("a list").iter();
    let expected: Vec<f32> = expected.map(|v| v.as_f64().expect("a number") as f32).collect();
    assert_eq!(values.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1.0, |most: f32, value| most.max(value.abs()));
    let difference = values.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(
        difference < tolerance * largest,
        "{what}: {difference}: {values:?}, expected {expected:?}"
    );
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// A text, cut to what the model reads, as sentence-transformers does.
fn cut(engine: &Engine, text: &str) -> Request {
    Request::text(text).truncate(engine.model_info().max_positions)
}

/// Goal: an encoder whose table of tokens stays in its file gives the same bits, and says that it
/// needs less memory.
#[tokio::test]
async fn a_table_that_stays_in_the_file_changes_no_bit() {
    for name in EMBEDDERS {
        let mapped = builder(name).map_embeddings(true);
        let needed = [&builder(name), &mapped].map(|builder| builder.memory_needed().expect(name));
        assert!(needed[1] < needed[0], "{name}: {needed:?}");
        let loaded = engine(name).await;
        let mapped = mapped.build().await.expect(name);
        for text in ["a", "speckled goats and their owners"] {
            let request = || Request::text(text);
            let values = loaded.embed(request(), None).await.expect(name).values;
            let same = mapped.embed(request(), None).await.expect(name).values;
            assert_eq!(same, values, "{name}: {text}");
        }
    }
}

/// Goal: tokens and embeddings of every family equal those of sentence-transformers: with each kind
/// of tokenizer, pooling and dense layer, cut texts, empty texts, prompts and shortened vectors.
#[tokio::test]
async fn embeddings_match_sentence_transformers() {
    for name in EMBEDDERS {
        let (engine, expected) = (engine(name).await, expected(name));
        assert_eq!(engine.model_info().max_positions, 96, "{name}");
        for case in list(&expected, "texts") {
            let request = || cut(&engine, text(case, "text"));
            let tokens = engine.prompt_tokens(&request()).await.expect("tokens");
            assert_eq!(serde_json::json!(tokens), case["tokens"], "{name}");
            let embedding = engine.embed(request(), None).await.expect("an embedding");
            let what = format!("{name}: {:?}", text(case, "text"));
            assert_close(&embedding.values, &case["embedding"], &what);
            assert_eq!(embedding.prompt_tokens, tokens.len());
        }
        if let case @ Value::Object(_) = &expected["prompt"] {
            let prompts = &engine.model_info().prompts.named;
            let prompt = format!("{}{}", prompts[text(case, "name")], text(case, "text"));
            let embedding = engine.embed(Request::text(prompt), None).await.expect("an embedding");
            assert_close(&embedding.values, &case["embedding"], name);
        }
        if let case @ Value::Object(_) = &expected["short"] {
            let size = case["size"].as_u64().map(|size| size as usize);
            let short = engine.embed(Request::text(text(case, "text")), size).await;
            assert_close(&short.expect("an embedding").values, &case["embedding"], name);
            assert!(engine.embed(Request::text("x"), Some(13)).await.is_err(), "{name}");
        }
        assert!(list(&expected, "texts").len() > 4, "{name}");
        engine.audit().await.expect("a consistent accounting");
    }
}

/// Goal: embeddings with the matrices of a task equal those of a model whose weights they were added to,
/// also if texts of all tasks are computed at once; other tasks, and tokens of other tasks, are
/// refused.
#[tokio::test]
async fn tasks_have_matrices_of_their_own() {
    let (engine, expected) = (engine("jina_v3").await, expected("jina_v3"));
    let info = engine.model_info();
    assert_eq!(info.tasks, ["retrieval.query", "retrieval.passage", "text-matching"]);
    let prompt = "Represent the query for retrieving evidence documents: ";
    assert_eq!(info.prompts.named["retrieval.query"], prompt);
    let cases = list(&expected, "tasks");
    assert_eq!(cases.len(), 18);
    let request = |case| cut(&engine, text(case, "text")).task(text(case, "task"));
    let all = join_all(cases.iter().map(|case| engine.embed(request(case), None))).await;
    for (case, together) in cases.iter().zip(all) {
        let alone = engine.embed(request(case), None).await.expect("an embedding").values;
        assert_close(&alone, &case["embedding"], &case.to_string());
        assert_eq!(bits(&together.expect("an embedding").values), bits(&alone));
    }
    let rounded = builder("jina_v3").weights(WeightType::Q8_0).build().await.expect("an engine");
    for case in cases {
        let values = rounded.embed(request(case), None).await.expect("an embedding").values;
        assert_within(&values, &case["embedding"], "weights of 8 bits", 4e-2);
    }
    for (name, request, expected) in [
        ("jina_v3", Request::text("x").task("clustering"), "retrieval.query, retrieval.passage"),
        ("bert", Request::text("x").task("retrieval.query"), "no matrices for tasks"),
        ("jina_v3", Request::tokens([0, info.vocab_size as u32, 2]), "expected an id below"),
    ] {
        let refused = self::engine(name).await.embed(request, None).await;
        let error = refused.expect_err(expected).to_string();
        assert!(error.contains(expected), "{expected}: {error}");
    }
    engine.audit().await.expect("a consistent accounting");
}

/// Goal: a model that needs a task, with adapters in the files of PEFT, computes what PEFT computes,
/// as an encoder and as a decoder, and of all tasks at once; without a task it computes nothing.
#[tokio::test]
async fn tasks_are_adapters_in_the_files_of_peft() {
    for name in ["jina_v5_nano", "jina_v5_small"] {
        let (engine, expected) = (engine(name).await, expected(name));
        let info = engine.model_info();
        assert_eq!(info.tasks, ["retrieval", "text-matching", "clustering"], "{name}");
        assert!(info.task_required && info.prompts.default.as_deref() == Some("document"));
        let cases = list(&expected, "tasks");
        assert_eq!(cases.len(), 36);
        let request = |case| Request::text(text(case, "text")).task(text(case, "task"));
        let all = join_all(cases.iter().map(|case| engine.embed(request(case), None))).await;
        for (case, together) in cases.iter().zip(all) {
            let tokens = engine.prompt_tokens(&request(case)).await.expect("tokens");
            assert_eq!(serde_json::json!(tokens), case["tokens"], "{name}");
            let alone = engine.embed(request(case), None).await.expect("an embedding").values;
            assert_close(&alone, &case["embedding"], &format!("{name}: {case}"));
            assert_eq!(bits(&together.expect("an embedding").values), bits(&alone), "{name}");
        }
        let short = engine.embed(request(&cases[0]), Some(20)).await.expect("an embedding").values;
        let norm: f32 = short.iter().map(|value| value * value).sum();
        assert!(short.len() == 20 && (norm - 1.0).abs() < 1e-5, "{name}: {norm}");
        for request in [Request::text("x"), Request::text("x").task("separation")] {
            let error = engine.embed(request, None).await.expect_err(name).to_string();
            assert!(error.contains("retrieval, text-matching, clustering"), "{name}: {error}");
        }
        engine.audit().await.expect("a consistent accounting");
    }
    // The adapters of a decoder can be named as any others.
    let (engine, expected) = (engine("jina_v5_small").await, expected("jina_v5_small"));
    let case = &list(&expected, "tasks")[0];
    let named = Request::text(text(case, "text")).adapter(text(case, "task"));
    let values = engine.embed(named.clone(), None).await.expect("an embedding").values;
    assert_close(&values, &case["embedding"], "the adapter of a task");
    let both = engine.embed(named.task("clustering"), None).await;
    let error = both.expect_err("two adapters").to_string();
    assert!(error.contains("no task with an adapter"), "{error}");
}

/// Goal: an adapter of a task that is missing, or that would change what is not computed, is refused
/// by the name of its file.
#[tokio::test]
async fn adapters_of_tasks_that_do_not_fit_are_refused() {
    let original = directory("jina_v5_nano");
    let tries = [
        ("no file", "adapters/retrieval/adapter_model.safetensors"),
        ("another rank", "adapters/clustering/adapter_config.json"),
        ("DoRA", "use_dora"),
        ("a tensor of another model", "embed_tokens"),
        ("a name that is a path", "task_names"),
    ];
    for (what, named) in tries {
        let copy = tempfile::tempdir().expect("a directory");
        copy_all(&original, copy.path());
        let adapter = copy.path().join("adapters/clustering");
        let change = |file: &str, from: &str, to: &str| {
            let path =
                if file == "config.json" { copy.path().join(file) } else { adapter.join(file) };
            let content = std::fs::read(&path).expect(what);
            // Safetensors files are text only in their header, so lengths stay.
            let content = String::from_utf8_lossy(&content).into_owned();
            assert!(content.contains(from), "{what}");
            std::fs::write(&path, content.replacen(from, to, 1)).expect(what);
        };
        match what {
            "no file" => {
                let path = copy.path().join("adapters/retrieval/adapter_model.safetensors");
                std::fs::remove_file(path).expect(what);
            }
            "another rank" => change("adapter_config.json", "\"r\": 4", "\"r\": 5"),
            "DoRA" => change("adapter_config.json", "\"use_dora\": false", "\"use_dora\": true"),
            "a tensor of another model" => {
                let path = adapter.join("adapter_model.safetensors");
                let bytes = std::fs::read(&path).expect(what);
                std::fs::write(&path, with_tensor(&bytes, "base_model.model.embed_tokens"))
                    .expect(what);
            }
            _ => change("config.json", "\"clustering\"", "\"../../clustering\""),
        }
        let refused = Engine::builder().model(ModelSource::Directory(copy.path().into()));
        let error = refused.threads(1).build().await.expect_err(what).to_string();
        assert!(error.contains(named), "{what}: {error}");
    }
}

/// A safetensors file with one more tensor, of a single value.
fn with_tensor(bytes: &[u8], name: &str) -> Vec<u8> {
    let (length, rest) = bytes.split_at(8);
    let length = u64::from_le_bytes(length.try_into().expect("8 bytes")) as usize;
    let (header, data) = rest.split_at(length);
    let mut header: Value = serde_json::from_slice(header).expect("a header");
    let end = data.len();
    header[name] =
        serde_json::json!({"dtype": "F32", "shape": [1], "data_offsets": [end, end + 4]});
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data, &[0; 4]].concat()
}

/// Goal: scores of pairs and labels of texts equal those of sentence-transformers and transformers,
/// and reranking returns the same scores in order.
#[tokio::test]
async fn scores_match_sentence_transformers() {
    for name in RERANKERS {
        let (engine, expected) = (engine(name).await, expected(name));
        let pairs = list(&expected, "pairs");
        let mut singles = Vec::new();
        for pair in pairs {
            let most = engine.model_info().max_positions;
            let request = Request::pair(text(pair, "query"), text(pair, "document")).truncate(most);
            let scores = engine.score(request).await.expect("scores").values;
            let one = serde_json::json!([pair["score"]]);
            assert_close(&scores, &one, &format!("{name}: {:?}", text(pair, "document")));
            singles.push(scores[0]);
        }
        let documents: Vec<&str> = pairs.iter().map(|pair| text(pair, "document")).collect();
        let ranked = engine.rerank(text(&pairs[0], "query"), documents).await.expect("a ranking");
        assert!(ranked.windows(2).all(|pair| pair[0].score >= pair[1].score), "{name}");
        for entry in &ranked {
            assert_eq!(entry.score.to_bits(), singles[entry.index].to_bits(), "{name}");
        }
        assert_eq!(ranked.len(), singles.len());
    }
    for name in CLASSIFIERS {
        let (engine, expected) = (engine(name).await, expected(name));
        let labels = engine.model_info().scores.as_ref().expect("scores").labels.len();
        for case in list(&expected, "texts") {
            let scores = engine.score(Request::text(text(case, "text"))).await.expect("scores");
            assert_eq!(scores.values.len(), labels);
            assert_close(&scores.values, &case["scores"], name);
        }
        assert!(!list(&expected, "texts").is_empty());
        let ranked = engine.rerank("x", ["y"]).await;
        assert!(matches!(ranked, Err(Error::NotForScores { .. })), "{ranked:?}");
    }
}

/// Goal: GGUF files, with matrices of every type, have the tokens, embeddings and scores that
/// sentence-transformers computes with the weights in the file.
#[tokio::test]
async fn gguf_files_match_sentence_transformers() {
    for (name, tolerance) in [
        ("bert-F32", 4e-6),
        ("xlm_roberta-F32", 4e-6),
        ("modernbert-F32", 4e-6),
        ("nomic_bert-F32", 4e-6),
        ("nomic_bert_moe-F32", 4e-6),
        ("jina_bert-F32", 4e-6),
        ("jina_code-F32", 4e-6),
        ("embedding_gemma-F32", 4e-6),
        ("eurobert-F32", 4e-6),
        ("xlm_roberta_reranker-F32", 4e-6),
        ("modernbert_reranker-F32", 4e-6),
        // Keys and values, and for Q8_0 the inputs of products, are rounded as the weights are.
        ("bert-F16", 5e-3),
        ("jina_bert-F16", 5e-3),
        ("jina_code-F16", 5e-3),
        ("bert-Q8_0", 2e-2),
    ] {
        let file = stolon_fixtures::path("gguf_encoders").join(format!("{name}.gguf"));
        let expected = std::fs::read_to_string(file.with_extension("json")).expect("a fixture");
        let expected: Value = serde_json::from_str(&expected).expect("JSON");
        let engine = Engine::builder().model(file).threads(2).build().await.expect(name);
        assert!(engine.model_info().is_encoder);
        let mut count = 0;
        for case in list(&expected, "texts") {
            let tokens = engine.prompt_tokens(&Request::text(text(case, "text"))).await;
            assert_eq!(serde_json::json!(tokens.expect("tokens")), case["tokens"], "{name}");
            let embedding = engine.embed(Request::text(text(case, "text")), None).await;
            let values = embedding.expect("an embedding").values;
            assert_within(&values, &case["embedding"], name, tolerance);
            count += 1;
        }
        for pair in list(&expected, "pairs") {
            let request = Request::pair(text(pair, "query"), text(pair, "document"));
            let scores = engine.score(request.truncate(128)).await.expect("scores").values;
            assert_within(&scores, &serde_json::json!([pair["score"]]), name, tolerance);
            count += 1;
        }
        assert!(count >= 4, "{name}");
    }
}

/// Goal: a model whose files say so reads texts in lower case, as bge does in sentence-transformers,
/// also if its tokenizer knows capital letters.
#[tokio::test]
async fn texts_are_converted_to_lower_case_if_the_files_say_so() {
    let copy = tempfile::tempdir().expect("a folder");
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(directory("eurobert").join(name), copy.path().join(name)).expect(name);
    }
    let written = std::fs::write(
        copy.path().join("sentence_bert_config.json"),
        r#"{"max_seq_length": 16, "do_lower_case": true}"#,
    );
    written.expect("a file");
    let lower = Engine::builder().model(copy.path()).threads(2).build().await.expect("an engine");
    let plain = engine("eurobert").await;
    for (text, lowered) in [("A STEM", "a stem"), ("Άξονας", "άξονας"), ("stem", "stem")]
    {
        let tokens = lower.prompt_tokens(&Request::text(text)).await.expect("tokens");
        let expected = plain.prompt_tokens(&Request::text(lowered)).await.expect("tokens");
        assert_eq!(tokens, expected, "{text}");
        let written = plain.prompt_tokens(&Request::text(text)).await.expect("tokens");
        assert_eq!(tokens == written, text == lowered, "{text}");
    }
    assert_eq!(lower.model_info().max_positions, 16);
}

/// Goal: an embedding model with a decoder has the prompts in its files, as Qwen3-Embedding, and as a
/// text encoder.
#[tokio::test]
async fn decoders_have_the_prompts_of_sentence_transformers() {
    let copy = tempfile::tempdir().expect("a folder");
    let source = stolon_fixtures::path("embedding");
    std::fs::create_dir(copy.path().join("1_Pooling")).expect("a folder");
    for name in [
        "config.json",
        "model.safetensors",
        "modules.json",
        "tokenizer.json",
        "1_Pooling/config.json",
    ] {
        std::fs::copy(source.join(name), copy.path().join(name)).expect(name);
    }
    let prompts = r#"{"prompts": {"query": "Instruct: find\nQuery:", "document": ""}}"#;
    std::fs::write(copy.path().join("config_sentence_transformers.json"), prompts).expect("a file");
    let engine = Engine::builder().model(copy.path()).threads(2).build().await.expect("an engine");
    let info = engine.model_info();
    assert!(!info.is_encoder && info.embedding.is_some());
    assert_eq!(info.prompts.named["query"], "Instruct: find\nQuery:");
    assert_eq!((info.prompts.named.len(), &info.prompts.default), (2, &None));
}

/// A copy of the language model that answers yes or no, without the files of sentence-transformers.
fn plain_judge() -> tempfile::TempDir {
    let copy = tempfile::tempdir().expect("a folder");
    for name in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(directory("qwen3_judge").join(name), copy.path().join(name)).expect(name);
    }
    copy
}

/// Goal: a language model is a reranker with the tokens and the template of the builder, with the
/// published template, and with the one in its files; prompts are those of the model's page, also if
/// a document is cut; texts that spell out control tokens contain none; and it generates text.
#[tokio::test]
async fn language_models_rank_with_the_logits_of_two_tokens() {
    let folder = plain_judge();
    let builder = || Engine::builder().model(folder.path()).threads(2);
    let plain = builder().rerank_tokens("yes", Some("no")).build().await.expect("an engine");
    let expected = expected("qwen3_judge");
    let detected = engine("qwen3_judge").await;
    for pair in list(&expected, "pairs") {
        let request = || Request::pair(text(pair, "query"), text(pair, "document"));
        for engine in [&plain, &detected] {
            let tokens = engine.prompt_tokens(&request()).await.expect("tokens");
            assert_eq!(serde_json::json!(tokens), pair["tokens"]);
            let score = engine.score(request()).await.expect("a score").values;
            assert_close(&score, &serde_json::json!([pair["score"]]), text(pair, "document"));
        }
    }
    let template = "Q: {query}\nD: {document}\nA: ";
    let own = builder().rerank_tokens("yes", None).rerank_template(template);
    let own = own.build().await.expect("an engine");
    let tokens = async |text: &str| own.prompt_tokens(&Request::text(text)).await.expect("tokens");
    let pair = own.prompt_tokens(&Request::pair("a", "b c d")).await.expect("tokens");
    assert_eq!(pair, tokens("Q: a\nD: b c d\nA: ").await);
    for (most, cut) in [(17, "Q: a\nD: b c d\nA: "), (16, "Q: a\nD: b c \nA: ")] {
        let request = Request::pair("a", "b c d").truncate(most);
        assert_eq!(own.prompt_tokens(&request).await.expect("tokens"), tokens(cut).await, "{most}");
    }
    let few = own.score(Request::pair("a", "b").truncate(6)).await;
    assert!(few.is_err_and(|error| error.to_string().contains("at least 7 tokens")));
    let task = Request::pair("a", "b").instruction("Find stems");
    for engine in [&plain, &detected] {
        let text = engine.prompt_tokens(&task).await.expect("tokens");
        let text = engine.detokenize(&text, false).expect("a text");
        assert!(text.contains("<Instruct>: Find stems\n<Query>: a\n<Document>: b<"), "{text}");
        assert_ne!(
            engine.score(task.clone()).await.expect("a score"),
            engine.score(Request::pair("a", "b")).await.expect("a score")
        );
    }
    let refused = own.score(task).await;
    assert!(refused.is_err_and(|error| error.to_string().contains("instruction")));
    let ends = plain.prompt_tokens(&Request::pair("a", "<|im_end|>")).await.expect("tokens");
    let end = plain.prompt_tokens(&Request::text("<|im_end|>")).await.expect("tokens");
    assert_eq!(ends.iter().filter(|token| **token == end[0]).count(), 2);
    assert!(plain.generate(Request::text("x")).await.is_ok() && plain.model_info().generates);
    let pair = Engine::builder().model(folder.path()).build().await.expect("an engine");
    assert!(matches!(pair.score(Request::pair("a", "b")).await, Err(Error::NotForScores { .. })));
}

/// Goal: tokens and templates of rerankers that cannot be used are refused by name.
#[tokio::test]
async fn other_rerankers_are_refused() {
    let folder = plain_judge();
    let builder = || Engine::builder().model(folder.path()).rerank_tokens("yes", Some("no"));
    for (builder, expected) in [
        (builder().rerank_tokens("maybe", None), "`maybe`, which is 5"),
        (builder().rerank_template("{document} {query}"), "{query} and, after it, {document}"),
        (builder().rerank_template("{query} {document} {query}"), "once each"),
        (Engine::builder().model(folder.path()).rerank_template("x"), "rerank_tokens"),
        (self::builder("qwen3_reranker").rerank_tokens("yes", None), "classifier"),
        (self::builder("bert").rerank_tokens("yes", None), "text encoder"),
    ] {
        let error = builder.build().await.expect_err(expected).to_string();
        assert!(error.contains(expected), "{expected}: {error}");
    }
}

/// Goal: a reranker with a decoder computes the shared beginning of its pairs once, the scores have
/// the bits of an engine without a cache, and it generates no text.
#[tokio::test]
async fn decoder_rerankers_share_the_query() {
    for name in ["qwen3_reranker", "qwen3_judge"] {
        shares_the_query(name).await;
    }
}

async fn shares_the_query(name: &str) {
    let cold = builder(name).prefix_caching(false).build().await.expect(name);
    let warm = builder(name).num_blocks(512).block_size(4).build().await.expect(name);
    let query = "What is a stolon, and where does it grow along the ground?";
    let documents = ["a stem", "the ground", "der Seitenspross", "a stem"];
    let cold = cold.rerank(query, documents).await.expect("a ranking");
    for _ in 0..2 {
        let ranked = warm.rerank(query, documents).await.expect("a ranking");
        let bits = |ranked: &[stolon::Ranked]| -> Vec<(usize, u32)> {
            ranked.iter().map(|entry| (entry.index, entry.score.to_bits())).collect()
        };
        assert_eq!(bits(&ranked), bits(&cold));
    }
    let stats = warm.stats();
    assert!(stats.cached_tokens > stats.prompt_tokens / 2, "{stats:?}");
    assert!(!warm.model_info().is_encoder && warm.model_info().prefix_caching);
    let generated = warm.generate(Request::text("x")).await;
    assert_eq!(matches!(generated, Err(Error::ScoresOnly { .. })), name == "qwen3_reranker");
    drop(generated);
    warm.audit().await.expect("a consistent accounting");
}

/// Goal: a vector has the same bits alone and in any batch, in steps of any size, and for any number
/// of threads.
#[tokio::test]
async fn embeddings_do_not_depend_on_the_batch() {
    for name in EMBEDDERS {
        let texts: Vec<String> = (0..40)
            .map(|i| "the stem and the ground ".repeat(3 + i * 7 % 17)[i..].to_owned())
            .collect();
        let alone = builder(name).threads(1).build().await.expect(name);
        let mut single = Vec::new();
        let request = |engine: &Engine, index: usize| {
            let request = cut(engine, &texts[index]);
            let tasks = &engine.model_info().tasks;
            // Every fourth text has no task.
            match tasks.get(index % (tasks.len() + 1)) {
                Some(task) => request.task(task.as_str()),
                None => request,
            }
        };
        for index in 0..texts.len() {
            let embedding = alone.embed(request(&alone, index), None).await.expect("an embedding");
            single.push(bits(&embedding.values));
        }
        for (tokens, threads) in [(2048, 2), (100, 2), (7, 1)] {
            let builder = builder(name).max_batched_tokens(tokens).threads(threads);
            let engine = builder.build().await.expect(name);
            let all = (0..texts.len()).map(|index| engine.embed(request(&engine, index), None));
            for (got, single) in join_all(all).await.into_iter().zip(&single) {
                let got = bits(&got.expect("an embedding").values);
                assert_eq!(&got, single, "{name}, steps of {tokens}");
            }
            let steps = engine.histograms().step_tokens.total();
            assert!(tokens > 100 || steps >= 10, "{name}: {steps} steps");
            engine.audit().await.expect("a consistent accounting");
        }
    }
}

/// Goal: what an encoder cannot do is refused by name: generation, texts that are too long, token
/// ids that do not exist, conversations, and scores of a model without them.
#[tokio::test]
async fn other_requests_are_refused() {
    let engine = engine("bert").await;
    assert!(engine.model_info().is_encoder && !engine.model_info().prefix_caching);
    let generated = engine.generate(Request::text("x")).await;
    assert!(matches!(generated, Err(Error::EmbeddingsOnly { .. })), "{generated:?}");
    let long = engine.embed(Request::text("the stem ".repeat(50)), None).await;
    let too_long = matches!(long, Err(Error::Engine(EngineError::PromptTooLong { .. })));
    assert!(too_long, "{long:?}");
    let ids = engine.model_info().vocab_size as u32;
    // Ids of the second token type follow those of the first.
    assert!(engine.embed(Request::tokens([2 * ids - 1]), None).await.is_ok());
    let outside = engine.embed(Request::tokens([2 * ids]), None).await;
    let is_outside = matches!(outside, Err(Error::Engine(EngineError::TokenOutOfRange { .. })));
    assert!(is_outside, "{outside:?}");
    let chat = engine.embed(Request::chat([]), None).await;
    assert!(chat.is_err_and(|error| error.to_string().contains("text encoder")));
    let scores = engine.score(Request::text("x")).await;
    assert!(matches!(scores, Err(Error::NotForScores { .. })), "{scores:?}");
    let empty = engine.embed(Request::tokens([]), None).await;
    assert!(matches!(empty, Err(Error::Engine(EngineError::EmptyPrompt))), "{empty:?}");
    let few = engine.embed(Request::text("x").truncate(1), None).await;
    assert!(few.is_err_and(|error| error.to_string().contains("special tokens")));
    let reranker = self::engine("bert_reranker").await;
    let embedding = reranker.embed(Request::text("x"), None).await;
    assert!(matches!(embedding, Err(Error::NotForEmbeddings { .. })), "{embedding:?}");
    let generated = reranker.generate(Request::text("x")).await;
    assert!(matches!(generated, Err(Error::ScoresOnly { .. })), "{generated:?}");
    // A dropped future gives everything back.
    drop(tokio::time::timeout(std::time::Duration::ZERO, engine.embed(Request::text("x"), None)));
    engine.audit().await.expect("a consistent accounting");
}

/// Goal: the page of encoders names all families.
#[test]
fn the_book_names_all_families() {
    let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/src/encoders.md");
    // A published crate has no book.
    let Ok(page) = std::fs::read_to_string(page) else { return };
    for family in stolon_checkpoint::encoder::EncoderFamily::all() {
        assert!(page.contains(&format!("| {} |", family.name())), "{}", family.name());
    }
}
