//! Small trained models as people download them: that they load, that their answers make sense, and
//! that the cache does not change them.
//!
//! The files are too large for the repository. `fetch_models.py` downloads them:
//!
//! ```sh
//! python crates/models/checkpoint/tests/fetch_models.py target/models
//! STOLON_MODELS=$PWD/target/models cargo test --release -p stolon --test real_models -- --ignored
//! ```

use std::path::PathBuf;

use futures::future::join_all;
use stolon::{ChatMessage, Completion, Engine, Request, SamplingParams};

const SMOLLM2: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const GEMMA: &str = "gemma-3-270m-q4_k_m.gguf";

async fn engine(name: &str, caches: bool) -> Engine {
    let directory = std::env::var_os("STOLON_MODELS").expect("STOLON_MODELS names the directory");
    let path = PathBuf::from(directory).join(name);
    let builder = Engine::builder().model(path).num_blocks(512).prefix_caching(caches);
    builder.build().await.expect("run fetch_models.py first")
}

fn greedy() -> SamplingParams {
    SamplingParams::default()
}

async fn complete(engine: &Engine, request: Request) -> Completion {
    engine.complete(request).await.expect("it fits and ends")
}

/// Goal: a conversation with an instruction-tuned model is answered sensibly, each turn finds the
/// turns before in the cache, and answers are token for token those of an engine without a cache.
#[tokio::test]
#[ignore = "needs models that fetch_models.py downloads"]
async fn a_conversation_continues_from_the_cache() {
    let (warm, cold) = (engine(SMOLLM2, true).await, engine(SMOLLM2, false).await);
    let mut messages = Vec::new();
    for question in ["Name the seven days of the week.", "What is gravity?", "Thank you."] {
        messages.push(ChatMessage::new("user", question));
        let request = || Request::chat(messages.clone()).max_tokens(60).sampling(greedy());
        let (with, without) = (complete(&warm, request()).await, complete(&cold, request()).await);
        assert_eq!(with.token_ids, without.token_ids, "{question}: {}", with.text);
        if messages.len() == 1 {
            assert!(with.text.contains("3. Wednesday"), "{}", with.text);
        } else {
            let usage = with.finish.usage;
            assert!(usage.cached_tokens > usage.prompt_tokens / 2, "{usage:?}");
        }
        messages.push(ChatMessage::new("assistant", with.text));
    }
}

/// Goal: a file with five types of tensors is continued sensibly, alone as in a batch.
#[tokio::test]
#[ignore = "needs models that fetch_models.py downloads"]
async fn a_file_of_mixed_types_is_continued_sensibly() {
    let engine = engine(GEMMA, true).await;
    let prompts = [
        ("Monday, Tuesday, Wednesday,", "Thursday, Friday"),
        ("One, two, three, four,", "five"),
        ("def add(a, b):\n    return", "a + b"),
    ];
    let request = |prompt: &str| Request::text(prompt).max_tokens(12).sampling(greedy());
    let together = join_all(prompts.map(|(prompt, _)| complete(&engine, request(prompt)))).await;
    for ((prompt, expected), batched) in prompts.into_iter().zip(together) {
        assert!(batched.text.contains(expected), "{prompt}{}", batched.text);
        assert_eq!(complete(&engine, request(prompt)).await.token_ids, batched.token_ids);
    }
}
