//! What a step costs beside the forward pass: decodes on a backend that computes next to nothing.
//!
//! ```sh
//! cargo run --release --example step_overhead
//! ```

#![allow(clippy::print_stdout, reason = "an example talks to its reader")]

use std::time::Instant;

use stolon::{Engine, Request};
use stolon_model::{FakeBackend, FakeOptions};

const TOKENS: usize = 400;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> anyhow::Result<()> {
    for streams in [1, 8, 32] {
        let options = FakeOptions { block_count: 4096, strict: false, ..FakeOptions::default() };
        let backend = Box::new(FakeBackend::new(options));
        let engine = Engine::builder().backend("fake", backend, None).build().await?;
        let begun = Instant::now();
        let mut readers = Vec::new();
        for stream in 0..streams {
            let request = Request::tokens(vec![stream; 16]).max_tokens(TOKENS);
            readers.push(tokio::spawn(engine.generate(request)?.collect_text()));
        }
        for reader in readers {
            reader.await??;
        }
        let steps = engine.stats().steps;
        let elapsed = begun.elapsed().as_secs_f64() * 1e6 / steps as f64;
        println!("{streams:>2} streams: {elapsed:.1} us a step, {steps} steps");
    }
    Ok(())
}
