//! What a step costs beside the forward pass: decodes on a backend that computes next to nothing.
//!
//! ```sh
//! cargo run --release -p stolon-actors --example step_overhead
//! ```

#![allow(clippy::print_stdout, reason = "an example talks to its reader")]

use std::time::Instant;

use stolon_actors::{CoreConfig, CoreHandle, SequenceEvent, SequenceRequest, SequenceStream};
use stolon_model::{FakeBackend, FakeOptions};

const TOKENS: usize = 400;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    for streams in [1, 8, 32] {
        let options = FakeOptions { block_count: 4096, strict: false, ..FakeOptions::default() };
        let backend = Box::new(FakeBackend::new(options));
        let core = CoreHandle::start(backend, CoreConfig::default()).await.expect("it starts");
        let begun = Instant::now();
        let readers: Vec<_> = (0..streams)
            .map(|stream| {
                let request = SequenceRequest::new(vec![stream as u32; 16], TOKENS);
                tokio::spawn(read(core.submit(request).expect("it fits")))
            })
            .collect();
        for reader in readers {
            reader.await.expect("no panic");
        }
        let steps = core.stats().steps;
        println!(
            "{streams:>2} streams: {:.1} us a step, {steps} steps",
            begun.elapsed().as_secs_f64() * 1e6 / steps as f64
        );
    }
}

async fn read(mut stream: SequenceStream) {
    while let Some(event) = stream.next().await {
        if matches!(event.expect("no error"), SequenceEvent::Finished(_)) {
            return;
        }
    }
}
