//! The demo model's answers on handbooks it has never seen, cold and warm. A mixed-up KV shows
//! here as a wrong answer.

use std::path::{Path, PathBuf};

use serde_json::Value;
use stolon::{ChatMessage, Engine, Request};

/// Questions of the held-out set, and how many of them the model is known to answer.
const QUESTION_COUNT: usize = 200;
const RIGHT_MIN: usize = 190;

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("model/demo")
}

async fn engine(prefix_caching: bool) -> Engine {
    let path = demo();
    Engine::builder()
        .model(path.to_str().expect("a path in UTF-8"))
        .num_blocks(1024)
        .prefix_caching(prefix_caching)
        .build()
        .await
        .expect("the demo model loads")
}

async fn ask(engine: &Engine, handbook: &str, question: &str) -> (String, usize) {
    let messages = [ChatMessage::new("system", handbook), ChatMessage::new("user", question)];
    let request = Request::chat(messages.to_vec()).max_tokens(40);
    let answer = engine.generate(request).expect("it fits").collect_text().await.expect("ends");
    (answer.text, answer.finish.usage.cached_tokens)
}

/// Goal: at least nine of ten held-out questions are answered to the letter, and every answer is
/// the same whether the handbook was in the cache or not.
#[tokio::test]
async fn held_out_questions_are_answered_cold_and_warm() {
    let lines = std::fs::read_to_string(demo().join("heldout.jsonl")).expect("it is committed");
    let (cold, warm) = (engine(false).await, engine(true).await);
    let (mut asked, mut right, mut hits) = (0, 0, 0);
    for line in lines.lines() {
        let handbook: Value = serde_json::from_str(line).expect("a JSON object a line");
        let text = handbook["system"].as_str().expect("the handbook");
        for pair in handbook["qa"].as_array().expect("its questions") {
            let question = pair["q"].as_str().expect("a question");
            let (without, _) = ask(&cold, text, question).await;
            let (with, cached) = ask(&warm, text, question).await;
            assert_eq!(without, with, "cold and warm answers to {question:?}");
            asked += 1;
            right += usize::from(Some(with.as_str()) == pair["a"].as_str());
            hits += usize::from(cached >= 1024);
        }
    }
    assert_eq!(asked, QUESTION_COUNT);
    assert!(right >= RIGHT_MIN, "{right} of {asked} right, expected at least {RIGHT_MIN}");
    assert!(hits >= asked * 7 / 8, "the handbook was found {hits} times of {asked}");
    cold.shutdown().await;
    warm.shutdown().await;
}
