//! Measures the cost of structured output: the throughput of a batch with a JSON schema and
//! without, by turns in one process.
//!
//! ```sh
//! cargo run --release -p stolon-benches --bin grammar -- --model model.gguf
//! ```

#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "the figures are printed")]

use std::time::Instant;

use clap::Parser;
use futures::future::try_join_all;
use serde_json::json;
use stolon::{Engine, Grammar, Request, SamplingParams};

/// Compare the throughput of a batch with a JSON schema and without.
#[derive(Debug, Parser)]
struct Args {
    /// Model to measure: `demo`, a Hugging Face directory, a `.gguf` file or `random:PRESET`
    #[arg(long, default_value = "demo")]
    model: String,
    /// Number of requests at the same time
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Number of tokens of each answer
    #[arg(long, default_value_t = 128)]
    tokens: usize,
    /// Number of turns
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Softmax temperature
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
}

/// A schema whose answers are longer than the measured number of tokens.
fn schema() -> Grammar {
    let person = json!({
        "type": "object", "additionalProperties": false, "required": ["name", "age", "tags"],
        "properties": {
            "name": {"type": "string", "minLength": 3, "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["new", "old", "other"]}, "maxItems": 3},
            "note": {"type": "string"},
        },
    });
    Grammar::JsonSchema(json!({"type": "array", "items": person, "minItems": 2000}))
}

/// Tokens per second of a batch whose prompts are cached.
async fn measure(engine: &Engine, args: &Args, grammar: Option<Grammar>) -> anyhow::Result<f64> {
    let request = |index: usize| {
        let sampling = SamplingParams {
            temperature: args.temperature,
            seed: Some(index as u64),
            ..SamplingParams::default()
        };
        let text = format!("List number {index}: people with their age, as JSON.\n");
        let request = Request::text(text).sampling(sampling).max_tokens(args.tokens);
        match &grammar {
            Some(grammar) => request.grammar(grammar.clone()),
            None => request.ignore_eos(true),
        }
    };
    let begun = Instant::now();
    let answers =
        try_join_all((0..args.batch).map(|index| engine.complete(request(index)))).await?;
    let tokens: usize = answers.iter().map(|answer| answer.token_ids.len()).sum();
    anyhow::ensure!(tokens == args.batch * args.tokens, "an answer has ended: {tokens} tokens");
    Ok(tokens as f64 / begun.elapsed().as_secs_f64())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let engine = Engine::builder().model(args.model.as_str()).num_blocks(4096).build().await?;
    for grammar in [None, Some(schema())] {
        measure(&engine, &args, grammar).await?;
    }
    let mut ratios = Vec::new();
    for _ in 0..args.rounds {
        let free = measure(&engine, &args, None).await?;
        let bound = measure(&engine, &args, Some(schema())).await?;
        println!("{free:8.1} tok/s free, {bound:8.1} tok/s with a schema: {:.3}", bound / free);
        ratios.push(bound / free);
    }
    ratios.sort_by(f64::total_cmp);
    println!("median {:.3} of the throughput without a schema", ratios[ratios.len() / 2]);
    Ok(())
}
