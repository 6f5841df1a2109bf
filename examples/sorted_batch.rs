//! A batch of prompts, sorted by their tokens, so that prompts with a common prefix follow each other
//! and find it in the cache before it is evicted. Prints how far it is.
//!
//! ```sh
//! cargo run --release -p stolon --example sorted_batch -- path/to/model
//! ```

#![allow(clippy::print_stdout, reason = "an example prints its results")]

use futures::stream::{self, StreamExt, TryStreamExt};
use stolon::{Engine, Error, Request};

/// Number of requests that are submitted at a time. The engine runs as many of them as it can.
const SUBMITTED: usize = 32;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let model = std::env::args().nth(1).unwrap_or_else(|| "random:tiny".to_owned());
    let engine = Engine::builder().model(model).num_blocks(256).build().await?;
    let documents: Vec<String> =
        (0..12).map(|number| format!("Document {number}: ").repeat(20)).collect();
    let mut requests = Vec::new();
    for question in 0..10 {
        for document in &documents {
            let request = Request::text(format!("{document}Question {question}:")).max_tokens(4);
            requests.push(engine.tokenized(request).await?);
        }
    }
    requests.sort_by(|a, b| a.token_ids().cmp(&b.token_ids()));
    let count = requests.len();
    let answers: Vec<_> = stream::iter(requests)
        .map(|request| engine.complete(request))
        .buffered(SUBMITTED)
        .enumerate()
        .map(|(number, answer)| {
            if (number + 1) % 20 == 0 {
                println!("{} of {count}", number + 1);
            }
            answer
        })
        .try_collect()
        .await
        .map_err(|error: Error| error)?;
    let cached: usize = answers.iter().map(|answer| answer.finish.usage.cached_tokens).sum();
    let prompts: usize = answers.iter().map(|answer| answer.finish.usage.prompt_tokens).sum();
    println!("{cached} of {prompts} prompt tokens were not computed");
    engine.shutdown().await;
    Ok(())
}
