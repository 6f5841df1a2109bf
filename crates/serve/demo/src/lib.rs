//! Demonstrates the prefix cache with a small built-in model: `stolon demo`, and the program of
//! this crate, which `cargo run` in a checkout compiles.
//!
//! Asks several questions about a long handbook: the first answer computes the handbook, all others
//! find it in the prefix cache. Then asks the same questions with an empty cache, to compare times
//! and answers. With the feature `images`, the other demonstration asks about a picture.

#![forbid(unsafe_code)]

#[cfg(feature = "images")]
mod picture;

use std::io::{self, Write};
use std::time::Duration;

use stolon::demo::{Handbook, Question, handbook};
use stolon::{ChatMessage, Engine, Event, Finish, Request};

#[cfg(feature = "images")]
pub use picture::run_picture;

/// Characters of the handbook that are shown.
const BEGINNING_CHARS: usize = 240;
/// Maximum number of tokens of an answer.
const MAX_TOKENS: usize = 64;

/// One answer and its figures.
struct Answer {
    text: String,
    /// Whether the text is the expected answer.
    right: bool,
    finish: Finish,
}

/// The writer that the demonstration is shown on.
pub struct Output<'a> {
    /// Receives the text. It is flushed after each token.
    pub writer: &'a mut (dyn Write + Send),
    /// Whether the text has bold and dim parts.
    pub is_styled: bool,
}

/// Runs the demonstration on an engine, whose model is the demo model or another chat model.
///
/// # Errors
/// Errors of the engine, and [`io::Error`] of the output. A wrong answer is shown and is not an
/// error.
pub async fn run(
    engine: &Engine,
    show_handbook: bool,
    output: &mut Output<'_>,
) -> anyhow::Result<()> {
    let book = handbook()?;
    introduce(engine, &book, show_handbook, output).await?;
    let mut shared = Vec::new();
    for question in &book.questions {
        shared.push(ask(engine, about(&book, question), question, Some(output)).await?);
    }
    let mut cold = Vec::new();
    for question in &book.questions {
        engine.cache().flush().await?;
        cold.push(ask(engine, about(&book, question), question, None).await?);
    }
    conclude(&shared, &cold, output)?;
    Ok(())
}

impl Output<'_> {
    /// Writes a piece of text, so that it is visible while the next is computed.
    fn write(&mut self, text: &str) -> io::Result<()> {
        self.writer.write_all(text.as_bytes())?;
        self.writer.flush()
    }

    fn dim(&self, text: &str) -> String {
        if self.is_styled { format!("\x1b[2m{text}\x1b[0m") } else { text.to_owned() }
    }

    fn bold(&self, text: &str) -> String {
        if self.is_styled { format!("\x1b[1m{text}\x1b[0m") } else { text.to_owned() }
    }
}

impl std::fmt::Debug for Output<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Output").field("is_styled", &self.is_styled).finish_non_exhaustive()
    }
}

/// A question about the handbook.
fn about(book: &Handbook, question: &Question) -> Request {
    Request::chat(vec![
        ChatMessage::new("system", &book.system),
        ChatMessage::new("user", &question.question),
    ])
}

async fn introduce(
    engine: &Engine,
    book: &Handbook,
    show_handbook: bool,
    output: &mut Output<'_>,
) -> anyhow::Result<()> {
    let info = engine.model_info();
    let tokens = engine.tokenize(&book.system, false).await?.len();
    let beginning = match show_handbook {
        true => None,
        false => book.system.char_indices().nth(BEGINNING_CHARS),
    };
    let (end, rest) = match beginning {
        Some((end, _)) => (end, " ..."),
        None => (book.system.len(), ""),
    };
    let shown = format!("  {}{rest}", book.system[..end].replace('\n', "\n  "));
    output.write(&format!(
        "Model {}, {} KV blocks of {} tokens.\n\
         The system prompt is a handbook of {tokens} tokens:\n\n{}\n",
        info.id,
        info.num_blocks,
        info.block_size,
        output.dim(&shown),
    ))?;
    Ok(())
}

/// Asks a question. With an output, streams the answer and shows its figures.
async fn ask(
    engine: &Engine,
    request: Request,
    question: &Question,
    mut output: Option<&mut Output<'_>>,
) -> anyhow::Result<Answer> {
    let mut stream = engine.generate(request.max_tokens(MAX_TOKENS)).await?;
    if let Some(output) = &mut output {
        output.write(&format!("\n{}\n", output.bold(&question.question)))?;
    }
    let mut text = String::new();
    while let Some(event) = stream.next().await {
        match event? {
            Event::Token(token) => {
                if let Some(output) = &mut output {
                    output.write(&token.text)?;
                }
                text.push_str(&token.text);
            }
            Event::Finished(finish) => {
                let right = text.trim() == question.answer.trim();
                if let Some(output) = &mut output {
                    let verdict = verdict(right, &question.answer, &finish);
                    output.write(&format!("{}\n", output.dim(&verdict)))?;
                }
                return Ok(Answer { text, right, finish });
            }
            _ => {}
        }
    }
    anyhow::bail!("the stream ended without a finish event")
}

fn verdict(right: bool, expected: &str, finish: &Finish) -> String {
    let verdict = if right { "right".to_owned() } else { format!("wrong, expected: {expected}") };
    format!(
        "\n  {verdict}; {} prompt tokens, {} of them cached, first token after {:.1} ms",
        finish.usage.prompt_tokens,
        finish.usage.cached_tokens,
        millis(finish.timings.ttft),
    )
}

/// Shows a table that compares the answers with the handbook in the cache to those to the same
/// questions with an empty cache.
fn conclude(shared: &[Answer], cold: &[Answer], output: &mut Output<'_>) -> io::Result<()> {
    // The first answer computed the handbook, so it was not warm.
    let warm = &shared[1.min(shared.len())..];
    let line = |cells: [&str; 6]| {
        let [name, answers, prompt, cached, ttft, right] = cells;
        format!("{name:<32}  {answers:>7}  {prompt:>13}  {cached:>7}  {ttft:>11}  {right:>8}\n")
    };
    let row = |name: &str, answers: &[Answer]| {
        let total = |count: fn(&Answer) -> usize| answers.iter().map(count).sum::<usize>();
        line([
            name,
            &answers.len().to_string(),
            &total(|answer| answer.finish.usage.prompt_tokens).to_string(),
            &total(|answer| answer.finish.usage.cached_tokens).to_string(),
            &format!("{:.1} ms", median_ttft(answers)),
            &format!(
                "{} of {}",
                answers.iter().filter(|answer| answer.right).count(),
                answers.len()
            ),
        ])
    };
    let mut text = String::from("\n");
    text += &line(["", "answers", "prompt tokens", "cached", "median TTFT", "right"]);
    text += &row("cold (cache emptied before each)", cold);
    text += &row("warm (handbook in the cache)", warm);
    if median_ttft(warm) > 0.0 {
        let ratio = median_ttft(cold) / median_ttft(warm);
        text += &format!("\nThe first token arrives {ratio:.1} times sooner when warm.\n");
    }
    let same = shared.iter().zip(cold).filter(|(a, b)| a.text == b.text).count();
    text += &format!(
        "{same} of {} answers are the same, character for character, warm and cold.\n",
        cold.len()
    );
    output.write(&text)
}

/// The median time to the first token in milliseconds; 0 if there are no answers.
fn median_ttft(answers: &[Answer]) -> f64 {
    let mut times: Vec<f64> =
        answers.iter().map(|answer| millis(answer.finish.timings.ttft)).collect();
    times.sort_by(f64::total_cmp);
    match times.len() {
        0 => 0.0,
        count => (times[(count - 1) / 2] + times[count / 2]) / 2.0,
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
