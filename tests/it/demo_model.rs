//! Answers of the demo model to questions about handbooks that are not in its training data, with a
//! cold and a warm cache, and with quantized weights, keys and values. Keys and values of a wrong
//! block would show here as wrong answers.

use std::path::{Path, PathBuf};

use futures::future::join_all;
use serde::Deserialize;
use stolon::{ChatMessage, Completion, Engine, EngineBuilder, KvType, Request, WeightType};

/// Number of questions in the held-out set.
const QUESTION_COUNT: usize = 200;
/// Minimum number of them that the model must answer correctly.
const CORRECT_MIN: usize = 190;

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/models/demo_model/text")
}

async fn engine(set: impl FnOnce(EngineBuilder) -> EngineBuilder) -> Engine {
    let path = demo();
    let builder = Engine::builder().model(path.to_str().expect("a path in UTF-8")).num_blocks(1024);
    set(builder).build().await.expect("the demo model loads")
}

/// A handbook, and questions with their answers.
#[derive(Deserialize)]
struct Book {
    system: String,
    qa: Vec<Question>,
}

#[derive(Deserialize)]
struct Question {
    q: String,
    a: String,
}

fn books() -> Vec<Book> {
    let lines = std::fs::read_to_string(demo().join("heldout.jsonl")).expect("it is committed");
    lines.lines().map(|line| serde_json::from_str(line).expect("a handbook a line")).collect()
}

async fn ask(engine: &Engine, handbook: &str, question: &str) -> Completion {
    let messages = [ChatMessage::new("system", handbook), ChatMessage::new("user", question)];
    let request = Request::chat(messages.to_vec()).max_tokens(40).logprobs(0);
    engine.complete(request).await.expect("it ends")
}

/// Goal: at least 190 of 200 held-out questions are answered exactly, and every answer is the same
/// whether the handbook was cached or not.
#[tokio::test]
async fn held_out_questions_are_answered_cold_and_warm() {
    let cold = engine(|builder| builder.prefix_caching(false)).await;
    let warm = engine(|builder| builder).await;
    let (mut asked, mut right, mut hits) = (0, 0, 0);
    for book in books() {
        for Question { q: question, a: answer } in &book.qa {
            let without = ask(&cold, &book.system, question).await;
            let with = ask(&warm, &book.system, question).await;
            assert_eq!(without.text, with.text, "cold and warm answers to {question:?}");
            assert_eq!(without.logprobs, with.logprobs, "cold and warm answers to {question:?}");
            asked += 1;
            right += usize::from(with.text == *answer);
            hits += usize::from(with.finish.usage.cached_tokens >= 1024);
        }
    }
    assert_eq!(asked, QUESTION_COUNT);
    assert!(right >= CORRECT_MIN, "{right} of {asked} right, expected at least {CORRECT_MIN}");
    assert!(hits >= asked * 7 / 8, "the handbook was found {hits} times of {asked}");
    cold.shutdown().await;
    warm.shutdown().await;
}

/// Answers to all held-out questions, and the number of correct ones.
async fn answers(kv_type: KvType, weights: WeightType) -> (Vec<Completion>, usize) {
    let engine = engine(|builder| builder.kv_type(kv_type).weights(weights)).await;
    let (mut answers, mut right) = (Vec::new(), 0);
    for book in books() {
        let asked = book.qa.iter().map(|question| ask(&engine, &book.system, &question.q));
        for (answer, question) in join_all(asked).await.into_iter().zip(&book.qa) {
            right += usize::from(answer.text == question.a);
            answers.push(answer);
        }
    }
    engine.shutdown().await;
    (answers, right)
}

/// Goal: the program in the README gets the right answers.
#[tokio::test]
async fn the_questions_of_the_readme_are_answered() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
    let readme = std::fs::read_to_string(path).expect("it is committed");
    let between = |start: &str, end: &str| {
        let (_, rest) = readme.split_once(start).expect("the program has it");
        rest.split_once(end).expect("it ends").0.to_owned()
    };
    let handbook = between("const HANDBOOK: &str = \"", "\";").replace("\\\n    ", "");
    let questions = between("for question in [\"", "\"]");
    let engine = engine(|builder| builder).await;
    let mut answers = Vec::new();
    for question in questions.split("\", \"") {
        let messages = [ChatMessage::system(handbook.as_str()), ChatMessage::user(question)];
        let answer = engine.complete(Request::chat(messages).max_tokens(32)).await;
        answers.push(answer.expect("it ends").text);
    }
    assert_eq!(
        answers,
        ["The violet tent costs 45 crowns.", "The speckled goat belongs to Ottilie."]
    );
}

/// How keys, values and weights are stored, and by how much the log-probabilities of equal answers
/// may change on average.
const ROUNDED: [(KvType, WeightType, f64); 7] = [
    (KvType::F16, WeightType::Stored, 0.002),
    (KvType::Int8, WeightType::Q8_0, 0.01),
    (KvType::Bf16, WeightType::Stored, 0.002),
    (KvType::Int8, WeightType::Stored, 0.002),
    (KvType::F32, WeightType::Q8_0, 0.01),
    (KvType::K8V4, WeightType::Stored, 0.01),
    (KvType::Int4, WeightType::Stored, 0.01),
];

/// Goal: with quantized weights, activations, keys and values the model still gives at least 190
/// correct answers, and the log-probabilities of equal answers change little.
#[tokio::test]
async fn quantized_weights_and_caches_answer_as_well() {
    check(&ROUNDED[..2]).await;
}

/// Goal: the same as in the test above, for every combination of types.
#[tokio::test]
#[ignore = "half a minute"]
async fn all_quantized_weights_and_caches_answer_as_well() {
    check(&ROUNDED).await;
}

#[allow(clippy::print_stdout, reason = "the table of the results")]
async fn check(rounded: &[(KvType, WeightType, f64)]) {
    let (exact, right) = answers(KvType::F32, WeightType::Stored).await;
    println!(
        "KV type, weights: correct, different answers, mean and maximum change of log-probability"
    );
    println!("f32, stored: {right}");
    for &(kv_type, weights, mean_max) in rounded {
        let (quantized, right) = answers(kv_type, weights).await;
        let (mut differ, mut count, mut sum, mut most) = (0, 0, 0.0, 0.0_f64);
        for (exact, quantized) in exact.iter().zip(&quantized) {
            if exact.token_ids != quantized.token_ids {
                differ += 1;
                continue;
            }
            for (exact, quantized) in exact.logprobs.iter().zip(&quantized.logprobs) {
                let off = f64::from((exact.logprob - quantized.logprob).abs());
                (count, sum, most) = (count + 1, sum + off, most.max(off));
            }
        }
        let mean = sum / f64::from(count);
        println!("{kv_type}, {weights:?}: {right}, {differ}, {mean:.5}, {most:.3}");
        assert!(right >= CORRECT_MIN, "{kv_type}, {weights:?}: {right} right");
        assert!(count > 1000 && mean <= mean_max, "{kv_type}, {weights:?}: off by {mean}");
    }
}
