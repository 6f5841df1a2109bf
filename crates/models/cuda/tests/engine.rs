//! The engine on the candle backend: the answers are those on the CPU backend, with a cold and a
//! warm cache, and for requests that run together.

#[path = "../../checkpoint/tests/it/support/adapter_writer.rs"]
mod adapter_writer;
#[path = "../../checkpoint/tests/it/support/model_adapter.rs"]
mod model_adapter;

use std::path::{Path, PathBuf};

use futures::future::join_all;
use stolon::{ChatMessage, Completion, Engine, Request, TextModel};
use stolon_checkpoint::{KvBudget, LoadOptions, LoadedModel, ModelSource, load};
use stolon_cuda::{CandleBackend, CandleOptions, DeviceChoice};

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../demo_model/text")
}

async fn on_cpu_backend() -> Engine {
    let path = demo();
    let builder = Engine::builder().model(path.to_str().expect("a path in UTF-8"));
    builder.num_blocks(512).build().await.expect("the demo model loads")
}

async fn on_candle(max_batched_tokens: usize, options: CandleOptions) -> Engine {
    let LoadedModel { id, config, weights, text, generation, .. } =
        load(&ModelSource::Directory(demo()), &LoadOptions::default()).expect("the demo model");
    let text = TextModel::new(&text, &generation.eos_token_ids).expect("its tokenizer");
    let options = CandleOptions { kv_budget: KvBudget::Blocks(256), ..options };
    let builder = Engine::builder()
        .backend_with(id, move || CandleBackend::open(config, weights, options))
        .text_model(text)
        .max_batched_tokens(max_batched_tokens);
    builder.build().await.expect("the backend opens")
}

/// A handbook of the demo model's held-out set with questions about it.
fn book() -> (String, Vec<String>) {
    #[derive(serde::Deserialize)]
    struct Book {
        system: String,
        qa: Vec<Question>,
    }
    #[derive(serde::Deserialize)]
    struct Question {
        q: String,
    }
    let lines = std::fs::read_to_string(demo().join("heldout.jsonl")).expect("it is committed");
    let book: Book =
        serde_json::from_str(lines.lines().next().expect("a book")).expect("a handbook a line");
    (book.system, book.qa.into_iter().map(|question| question.q).collect())
}

fn request(handbook: &str, question: &str) -> Request {
    let messages = [ChatMessage::new("system", handbook), ChatMessage::new("user", question)];
    Request::chat(messages.to_vec()).max_tokens(24)
}

async fn answer(engine: &Engine, request: Request) -> Completion {
    engine.generate(request).await.expect("it fits").collect_text().await.expect("ends")
}

/// With log-probabilities.
async fn ask(engine: &Engine, handbook: &str, question: &str) -> Completion {
    answer(engine, request(handbook, question).logprobs(0)).await
}

/// Goal: greedy answers to questions about a handbook are those of the CPU backend; a warm cache
/// and requests that run together change neither tokens nor log-probabilities.
#[tokio::test]
async fn answers_are_those_of_the_cpu_backend() {
    let (handbook, questions) = book();
    let questions = &questions[..3];
    let options = CandleOptions::default();
    let (cpu, candle, chunked) =
        (on_cpu_backend().await, on_candle(512, options).await, on_candle(48, options).await);
    let mut cold = Vec::new();
    for question in questions {
        candle.cache().flush().await.expect("nothing runs");
        let answer = ask(&candle, &handbook, question).await;
        assert_eq!(answer.finish.usage.cached_tokens, 0);
        assert!(!answer.text.is_empty());
        assert_eq!(answer.text, ask(&cpu, &handbook, question).await.text, "{question}");
        cold.push(answer);
    }
    for engine in [&candle, &chunked] {
        let together = questions.iter().map(|question| ask(engine, &handbook, question));
        for (warm, cold) in join_all(together).await.iter().zip(&cold) {
            assert_eq!(warm.token_ids, cold.token_ids);
            assert_eq!(warm.logprobs, cold.logprobs);
        }
        let warm = ask(engine, &handbook, &questions[0]).await;
        assert!(warm.finish.usage.cached_tokens >= 1024, "{:?}", warm.finish.usage);
        assert_eq!(warm.logprobs, cold[0].logprobs);
        engine.audit().await.expect("consistent accounting");
    }
    for engine in [cpu, candle, chunked] {
        engine.shutdown().await;
    }
}

/// Goal: requests that run together get the answers of the CPU backend if decode steps are captured
/// and replayed.
#[tokio::test]
async fn replayed_steps_give_the_answers_of_the_cpu_backend() {
    let (handbook, questions) = book();
    let options =
        CandleOptions { batch_invariant: false, cuda_graphs: true, ..CandleOptions::default() };
    let (cpu, candle) = (on_cpu_backend().await, on_candle(512, options).await);
    for questions in questions.chunks(5) {
        let requests = || questions.iter().map(|question| request(&handbook, question));
        let expected = join_all(requests().map(|request| answer(&cpu, request))).await;
        let got = join_all(requests().map(|request| answer(&candle, request))).await;
        for (got, expected) in got.into_iter().zip(expected) {
            assert_eq!(got.text, expected.text);
        }
    }
    candle.audit().await.expect("consistent accounting");
    for engine in [cpu, candle] {
        engine.shutdown().await;
    }
}

/// Goal: requests with an adapter that is loaded while the engine runs get the answers of the CPU
/// backend, together with requests of the model itself, whose cached prefixes they do not read. An
/// adapter that was unloaded is unknown.
#[tokio::test]
async fn adapters_give_the_answers_of_the_cpu_backend() {
    let (handbook, questions) = book();
    let (cpu, candle) = (on_cpu_backend().await, on_candle(512, CandleOptions::default()).await);
    let LoadedModel { config, .. } =
        load(&ModelSource::Directory(demo()), &LoadOptions::default()).expect("the demo model");
    let dir = tempfile::tempdir().expect("a directory");
    model_adapter::whole_adapter(&config, 8, "F32", 1).write(dir.path());
    let base = ask(&candle, &handbook, &questions[0]).await;
    for engine in [&cpu, &candle] {
        let info = engine.load_adapter("own", dir.path()).await.expect("a valid adapter");
        assert!(info.bytes > 0);
    }
    let adapted = || request(&handbook, &questions[0]).logprobs(0).adapter("own");
    let expected = answer(&cpu, adapted()).await;
    let (cold, again) =
        tokio::join!(answer(&candle, adapted()), ask(&candle, &handbook, &questions[0]));
    assert_eq!(cold.text, expected.text);
    assert_eq!(cold.finish.usage.cached_tokens, 0);
    assert_eq!((&again.text, &again.logprobs), (&base.text, &base.logprobs));
    let warm = answer(&candle, adapted()).await;
    assert!(warm.finish.usage.cached_tokens >= 1024, "{:?}", warm.finish.usage);
    assert_eq!((&warm.token_ids, &warm.logprobs), (&cold.token_ids, &cold.logprobs));
    assert_ne!(cold.logprobs, base.logprobs);
    candle.unload_adapter("own").expect("it is loaded");
    let error = candle.generate(adapted()).await.expect_err("it was unloaded").to_string();
    assert!(error.contains("own"), "{error}");
    candle.audit().await.expect("consistent accounting");
    for engine in [cpu, candle] {
        engine.shutdown().await;
    }
}

/// Goal: an engine whose device does not exist does not start, and says why.
#[tokio::test]
async fn a_missing_device_is_an_error() {
    let LoadedModel { config, weights, .. } =
        load(&ModelSource::Directory(demo()), &LoadOptions::default()).expect("the demo model");
    let options = CandleOptions { device: DeviceChoice::Metal(0), ..CandleOptions::default() };
    let open = move || CandleBackend::open(config, weights, options);
    let error = Engine::builder().backend_with("demo", open).build().await;
    let error = error.expect_err("no such device").to_string();
    assert!(error.contains("metal:0"), "{error}");
}
