//! A conversation of several turns. Each turn finds the earlier ones in the prefix cache, the
//! model's own answers included.
//!
//! ```sh
//! cargo run --release -p stolon --example multi_turn_chat -- path/to/model
//! ```

#![allow(clippy::print_stdout, reason = "an example prints its results")]

use stolon::{ChatMessage, Engine, Event, Request};

const QUESTIONS: [&str; 3] =
    ["What is a stolon?", "Which plants have one?", "And what grows at its nodes?"];

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let model = std::env::args().nth(1).unwrap_or_else(|| "random:tiny".to_owned());
    let engine = Engine::builder().model(model).build().await?;
    let has_template = engine.model_info().has_chat_template;
    let mut messages = vec![ChatMessage::system("You answer in one sentence.")];
    // For a model without a chat template: plain text to which each turn is appended.
    let mut transcript = "A conversation.\n".to_owned();
    for question in QUESTIONS {
        println!("> {question}");
        messages.push(ChatMessage::user(question));
        transcript.push_str(&format!("User: {question}\nAssistant: "));
        let request = if has_template {
            Request::chat(messages.clone())
        } else {
            Request::text(transcript.clone())
        };
        let mut stream = engine.generate(request.max_tokens(48)).await?;
        let mut answer = String::new();
        while let Some(event) = stream.next().await {
            match event? {
                Event::Token(token) => answer.push_str(&token.text),
                Event::Finished(end) => println!(
                    "{answer}\n  [{} prompt tokens, {} of them cached, first token after {:?}]",
                    end.usage.prompt_tokens, end.usage.cached_tokens, end.timings.ttft
                ),
                _ => {}
            }
        }
        transcript.push_str(&answer);
        transcript.push('\n');
        messages.push(ChatMessage::assistant(answer));
    }
    engine.shutdown().await;
    Ok(())
}
