//! `stolon demo`: shows what the prefix cache does, with a small built-in model.
//!
//! Asks several questions about a long handbook: the first answer computes the handbook, all others
//! find it in the prefix cache. Then asks the same questions with an empty cache, to compare times
//! and answers.

use std::time::Duration;

use clap::Args;
use stolon::demo::{Handbook, handbook};
use stolon::{ChatMessage, Engine, Event, Finish, Request};

use crate::args::EngineArgs;
use crate::terminal;
use stolon_loadgen::metrics::median;

/// Arguments of `stolon demo`, all optional.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Print the whole handbook instead of its beginning
    #[arg(long)]
    show_handbook: bool,
    #[command(flatten)]
    engine: EngineArgs,
}

/// One answer and its figures.
struct Answer {
    text: String,
    /// Whether the text is the expected answer.
    right: bool,
    finish: Finish,
}

impl DemoArgs {
    /// Runs the demonstration.
    ///
    /// # Errors
    /// Errors of the engine. A wrong answer is shown and is not an error.
    pub async fn run(self) -> anyhow::Result<()> {
        let book = handbook()?;
        let engine = self.engine.start().await?;
        self.introduce(&engine, &book).await?;

        let mut shared = Vec::new();
        for index in 0..book.questions.len() {
            shared.push(ask(&engine, &book, index, true).await?);
        }
        let mut cold = Vec::new();
        for index in 0..book.questions.len() {
            engine.flush().await?;
            cold.push(ask(&engine, &book, index, false).await?);
        }
        conclude(&shared, &cold)?;
        engine.shutdown().await;
        Ok(())
    }

    async fn introduce(&self, engine: &Engine, book: &Handbook) -> anyhow::Result<()> {
        let info = engine.model_info();
        terminal::line(format!(
            "Model {}, {} KV blocks of {} tokens.",
            info.id, info.num_blocks, info.block_size
        ))?;
        let tokens = engine.tokenize(&book.system, false).await?.len();
        terminal::line(format!("The system prompt is a handbook of {tokens} tokens:\n"))?;
        let end = if self.show_handbook {
            book.system.len()
        } else {
            book.system.char_indices().nth(240).map_or(book.system.len(), |(at, _)| at)
        };
        let rest = if end < book.system.len() { " ..." } else { "" };
        terminal::line(terminal::dim(format!(
            "  {}{rest}",
            book.system[..end].replace('\n', "\n  ")
        )))?;
        Ok(())
    }
}

/// Asks one of the handbook's questions. If `shown`, streams the answer and prints its figures.
async fn ask(
    engine: &Engine,
    book: &Handbook,
    index: usize,
    shown: bool,
) -> anyhow::Result<Answer> {
    let question = &book.questions[index];
    let messages = vec![
        ChatMessage::new("system", &book.system),
        ChatMessage::new("user", &question.question),
    ];
    let mut stream = engine.generate(Request::chat(messages).max_tokens(48)).await?;
    if shown {
        terminal::stream(&format!("\n{}\n", terminal::bold(&question.question)))?;
    }
    let mut text = String::new();
    while let Some(event) = stream.next().await {
        match event? {
            Event::Token(token) => {
                if shown {
                    terminal::stream(&token.text)?;
                }
                text.push_str(&token.text);
            }
            Event::Finished(finish) => {
                let right = text.trim() == question.answer.trim();
                if shown {
                    terminal::line(verdict(right, &question.answer, &finish))?;
                }
                return Ok(Answer { text, right, finish });
            }
            _ => {}
        }
    }
    anyhow::bail!("the stream ended without a finish event")
}

fn verdict(right: bool, expected: &str, finish: &Finish) -> String {
    let verdict =
        if right { "right".to_owned() } else { format!("wrong, the handbook says: {expected}") };
    terminal::dim(format!(
        "\n  {verdict}; {} prompt tokens, {} of them cached, first token after {:.1} ms",
        finish.usage.prompt_tokens,
        finish.usage.cached_tokens,
        millis(finish.timings.ttft),
    ))
}

/// Prints a table that compares the answers with the handbook in the cache to those to the same
/// questions with an empty cache.
fn conclude(shared: &[Answer], cold: &[Answer]) -> anyhow::Result<()> {
    // The first answer computed the handbook, so it was not warm.
    let warm = &shared[1.min(shared.len())..];
    let ttft = |answers: &[Answer]| {
        median(answers.iter().map(|answer| millis(answer.finish.timings.ttft)).collect())
    };
    let row = |name: &str, answers: &[Answer]| {
        let total = |count: fn(&Answer) -> usize| answers.iter().map(count).sum::<usize>();
        vec![
            name.to_owned(),
            answers.len().to_string(),
            total(|answer| answer.finish.usage.prompt_tokens).to_string(),
            total(|answer| answer.finish.usage.cached_tokens).to_string(),
            format!("{:.1} ms", ttft(answers)),
            format!("{} of {}", answers.iter().filter(|a| a.right).count(), answers.len()),
        ]
    };
    let heading = ["", "answers", "prompt tokens", "cached", "median TTFT", "right"];
    let rows = [
        heading.map(str::to_owned).to_vec(),
        row("cold (cache emptied before each)", cold),
        row("warm (handbook in the cache)", warm),
    ];
    terminal::line(format!("\n{}", terminal::table(&rows)))?;
    if ttft(warm) > 0.0 {
        let ratio = ttft(cold) / ttft(warm);
        terminal::line(format!("The first token arrives {ratio:.1} times sooner when warm."))?;
    }
    let same = shared.iter().zip(cold).filter(|(a, b)| a.text == b.text).count();
    terminal::line(format!(
        "{same} of {} answers are the same, character for character, warm and cold.",
        cold.len()
    ))?;
    Ok(())
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
