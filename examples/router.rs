//! A router over two engines: each request goes where it will get its first token soonest. The
//! estimate counts what is cached and what another request is computing already, so that requests
//! with a common prefix stay together.
//!
//! ```sh
//! cargo run --release -p stolon --example router -- path/to/model
//! ```

#![allow(clippy::print_stdout, reason = "an example prints its results")]

use futures::future::try_join_all;
use stolon::{Engine, Error, Request};

/// The engine that has to compute the least for a request, and among equals the one with the
/// shortest queue.
fn choose(engines: &[Engine], request: &Request) -> Result<usize, Error> {
    let mut best = (0, (usize::MAX, usize::MAX));
    for (index, engine) in engines.iter().enumerate() {
        let estimate = engine.estimate(request)?;
        let known = estimate.cached_tokens + estimate.pending_tokens.max(estimate.stored_tokens);
        let cost = (estimate.prompt_tokens - known, estimate.queued_tokens);
        if cost < best.1 {
            best = (index, cost);
        }
    }
    Ok(best.0)
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let model = std::env::args().nth(1).unwrap_or_else(|| "random:tiny".to_owned());
    let build = || Engine::builder().model(model.clone()).threads(1).num_blocks(512).build();
    let engines = [build().await?, build().await?];
    let books = ["a book about strawberries. ".repeat(30), "a book about tents. ".repeat(30)];
    let mut answers = Vec::new();
    for number in 0..24 {
        let book = &books[number % books.len()];
        let request = Request::text(format!("{book}Question {number}: ")).max_tokens(8);
        // Its tokens are the same for all engines that run this model.
        let request = engines[0].tokenized(request).await?;
        let index = choose(&engines, &request)?;
        let stream = engines[index].generate(request).await?;
        answers.push(async move { Ok::<_, Error>((index, stream.collect_text().await?)) });
    }
    let (mut counts, mut cached, mut prompts) = ([0; 2], 0, 0);
    for (index, answer) in try_join_all(answers).await? {
        counts[index] += 1;
        cached += answer.finish.usage.cached_tokens;
        prompts += answer.finish.usage.prompt_tokens;
    }
    println!("{counts:?} requests; {cached} of {prompts} prompt tokens were not computed");
    for engine in engines {
        engine.shutdown().await;
    }
    Ok(())
}
