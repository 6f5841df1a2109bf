//! A pinned system prompt: other work cannot evict it from the cache before its time to live ends.
//!
//! ```sh
//! cargo run --release -p stolon --example pinned_system_prompt -- path/to/model
//! ```

#![allow(clippy::print_stdout, reason = "an example prints its results")]

use std::time::Duration;

use stolon::{Engine, Request};

const SYSTEM_PROMPT: &str = "You answer questions about plants. You answer in one sentence, and \
    you say so if you do not know. ";

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let model = std::env::args().nth(1).unwrap_or_else(|| "random:tiny".to_owned());
    // 128 blocks of 16 positions, of which pins may hold 32.
    let engine = Engine::builder().model(model).num_blocks(128).pin_budget(32).build().await?;
    let system_prompt = Request::text(SYSTEM_PROMPT);

    // A pin holds cached blocks, so the prompt is computed first.
    engine.cache().warm(system_prompt.clone()).await?;
    let pin = engine.cache().pin(&system_prompt, Some(Duration::from_secs(3600))).await?;

    // Other work fills the pool several times and evicts everything else.
    for number in 0..24 {
        let filler = Request::text(format!("{number} ").repeat(200)).max_tokens(1);
        engine.complete(filler).await?;
    }
    let question = Request::text(format!("{SYSTEM_PROMPT}What is a stolon?")).max_tokens(16);
    println!("after other work, {} tokens are cached", engine.cache().query_match_len(&question)?);
    let usage = engine.complete(question).await?.finish.usage;
    println!("{} of {} prompt tokens were not computed", usage.cached_tokens, usage.prompt_tokens);

    for pin in engine.cache().pins().await? {
        println!("pinned: {} tokens in {} blocks", pin.tokens, pin.blocks);
    }
    engine.cache().unpin(pin).await?;
    engine.shutdown().await;
    Ok(())
}
