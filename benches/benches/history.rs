//! What the memory of conversations costs a request: its prompt's tokens, with the answers of 40
//! turns as they were sampled, next to tokenizing all text; and the explanation why it is not
//! cached, next to 64 other prompts. Run it with `cargo bench -p stolon-benches --bench history`.

#![allow(missing_docs, reason = "criterion's macros define undocumented functions")]

use criterion::{Criterion, criterion_group, criterion_main};
use std::hint::black_box;
use std::time::Duration;
use stolon::inspect::{InspectOptions, inspect};
use stolon::{ChatMessage, Engine, MissReason, ModelSource, Request, SamplingParams, TextModel};
use stolon_backend::fake::{FakeBackend, FakeOptions};
use tokio::runtime::Runtime;

/// Number of turns of the conversation.
const TURNS: usize = 40;

/// About a thousand tokens that differ by `number`.
fn page(number: usize) -> String {
    (0..70).map(|line| format!("The room {line} of the house {number} is on the left. ")).collect()
}

/// An engine without a model, with the tokenizer of the demo model.
async fn engine(history_bytes: usize) -> Engine {
    let options = FakeOptions {
        vocab_size: 4096,
        max_positions: 1 << 16,
        block_size: 16,
        block_count: 1 << 14,
        ..FakeOptions::default()
    };
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/models/demo_model/text");
    let demo = inspect(&ModelSource::Directory(path.into()), &InspectOptions::default());
    let source = demo.expect("a model").text.expect("it has a tokenizer");
    let text = TextModel::new(&source, &[1]).expect("a tokenizer");
    let builder = Engine::builder().backend("fake", Box::new(FakeBackend::new(options)));
    builder.text_model(text).history_bytes(history_bytes).build().await.expect("an engine")
}

async fn answer(engine: &Engine, messages: &[ChatMessage]) -> String {
    let request = Request::chat(messages).max_tokens(64).ignore_eos(true);
    let request = request.sampling(SamplingParams::default());
    engine.complete(request).await.expect("an answer").text
}

/// A conversation, turn by turn.
async fn converse(engine: &Engine, first: &str) -> Vec<ChatMessage> {
    let mut messages = vec![ChatMessage::system(page(0)), ChatMessage::user(first)];
    for turn in 0..TURNS {
        let said = answer(engine, &messages).await;
        messages.extend([ChatMessage::assistant(said), ChatMessage::user(page(turn))]);
    }
    messages
}

fn history(c: &mut Criterion) {
    let runtime = Runtime::new().expect("a runtime");
    let (with, without, messages) = runtime.block_on(async {
        let (with, without) = (engine(256 << 20).await, engine(0).await);
        let messages = converse(&with, "The first question.").await;
        // Prompts that have most in common with it.
        for other in 0..64 {
            let mut other_messages = messages.clone();
            other_messages.push(ChatMessage::user(page(100 + other)));
            answer(&with, &other_messages).await;
        }
        (with, without, messages)
    });
    let request = Request::chat(messages.clone());
    let len = runtime.block_on(with.prompt_tokens(&request)).expect("tokens").len();
    let mut group = c.benchmark_group(format!("history of {len} tokens"));
    group.sample_size(20).measurement_time(Duration::from_secs(8));
    for (name, engine) in [("tokenize all text", &without), ("answers as sampled", &with)] {
        group.bench_function(name, |b| {
            b.iter(|| black_box(runtime.block_on(engine.prompt_tokens(&request))));
        });
    }
    for (name, index) in
        [("explain, changed early", 1), ("explain, changed late", messages.len() - 3)]
    {
        let mut changed = messages.clone();
        changed[index] = ChatMessage::user("Another question.");
        let request = runtime.block_on(with.tokenized(Request::chat(changed))).expect("tokens");
        let miss = runtime.block_on(with.cache().explain(&request)).expect("an explanation");
        assert_eq!(miss.expect("a miss").reason, MissReason::MessageChanged);
        group.bench_function(name, |b| {
            b.iter(|| black_box(runtime.block_on(with.cache().explain(&request))));
        });
    }
    group.finish();
}

criterion_group!(benches, history);
criterion_main!(benches);
