//! A prompt that is still cached after a restart: its KV is stored in a directory.
//!
//! ```sh
//! cargo run --release -p stolon --features tiers --example disk_tier -- path/to/model
//! ```

#![allow(clippy::print_stdout, reason = "an example prints its results")]

use stolon::{Engine, Request};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let model = std::env::args().nth(1).unwrap_or_else(|| "random:tiny".to_owned());
    let directory = tempfile::tempdir()?;
    let document = "A stolon is the runner of a strawberry plant. ".repeat(20);
    for question in ["What is a stolon?", "Whose runner is it?"] {
        // The directory holds at most 1 GiB.
        let builder = Engine::builder().model(model.clone()).num_blocks(256);
        let engine = builder.kv_cache_dir(directory.path(), 1 << 30).build().await?;
        let request = Request::text(format!("{document}{question}")).max_tokens(16);
        let stored = engine.estimate(&request)?.stored_tokens;
        let usage = engine.complete(request).await?.finish.usage;
        println!("{stored} tokens were stored, {} not computed", usage.cached_tokens);
        // Waits until everything is written.
        engine.shutdown().await;
    }
    Ok(())
}
