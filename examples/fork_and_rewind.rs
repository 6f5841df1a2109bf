//! Several ways to continue one conversation: each is a fork of the session, which shares its KV. The
//! best one goes on, and the session is taken back to before a turn.
//!
//! ```sh
//! cargo run --release -p stolon --example fork_and_rewind -- path/to/model
//! ```

#![allow(clippy::print_stdout, reason = "an example prints its results")]

use stolon::{Engine, Request, SamplingParams, SessionId, SessionOptions};

/// The next turn of a session: only its new text.
fn turn(session: &SessionId, text: &str, seed: u64) -> Request {
    let sampling = SamplingParams { temperature: 0.8, seed: Some(seed), ..Default::default() };
    Request::text(text)
        .session(session.clone())
        .append()
        .sampling(sampling)
        .logprobs(0)
        .max_tokens(24)
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let model = std::env::args().nth(1).unwrap_or_else(|| "random:tiny".to_owned());
    let engine = Engine::builder().model(model).build().await?;
    let story = SessionId::from("story");
    engine.sessions().open(SessionOptions::new(story.clone()))?;
    engine.complete(turn(&story, "Once upon a time, a strawberry had a runner.", 0)).await?;
    let start = engine.sessions().get(&story)?.tokens;

    let mut best: Option<(f32, SessionId)> = None;
    for seed in 1..=4 {
        let branch = SessionId::new(format!("branch-{seed}"));
        engine.sessions().fork(&story, branch.clone(), None).await?;
        let answer = engine.complete(turn(&branch, " One day,", seed)).await?;
        let sum: f32 = answer.logprobs.iter().map(|token| token.logprob).sum();
        let score = sum / answer.logprobs.len() as f32;
        println!("{score:.2} ({} cached):{}", answer.finish.usage.cached_tokens, answer.text);
        let loser = match best.take() {
            Some((of_best, id)) if of_best >= score => {
                best = Some((of_best, id));
                Some(branch)
            }
            other => {
                best = Some((score, branch));
                other.map(|(_, id)| id)
            }
        };
        // A closed session gives back its blocks.
        if let Some(id) = loser {
            engine.sessions().close(&id);
        }
    }
    let (_, winner) = best.expect("there were four branches");
    engine.complete(turn(&winner, " In the end,", 9)).await?;
    println!("{} tokens", engine.sessions().get(&winner)?.tokens);
    engine.sessions().rewind(&winner, start).await?;
    println!("{} tokens after going back", engine.sessions().get(&winner)?.tokens);
    engine.shutdown().await;
    Ok(())
}
