//! The demonstration with a picture: several questions about it. Only the first one waits for the
//! image encoder and for the prefill of the picture.

use std::fmt::Write as _;
use std::io;
use std::sync::Arc;

use stolon::demo::{Picture, PictureLimits, Pixels, picture};
use stolon::{ChatMessage, Engine, Request};

use crate::{Answer, Output, ask, median_ttft};

/// Characters per line of the picture in a terminal. Each shows two pixels, one above the other.
const COLUMNS: usize = 40;

/// Asks several questions about a picture, on an engine whose model is the demo vision model or
/// another one that takes images.
///
/// # Errors
/// Errors of the engine, also if its model takes no images, and [`io::Error`] of the output. A
/// wrong answer is shown and is not an error.
pub async fn run_picture(engine: &Engine, output: &mut Output<'_>) -> anyhow::Result<()> {
    let picture = picture()?;
    introduce(engine, &picture, output)?;
    let encoded = engine.stats().images_encoded;
    let file: Arc<[u8]> = picture.png.into();
    let mut answers = Vec::new();
    for question in &picture.questions {
        let messages = vec![ChatMessage::new("user", &question.question)];
        let request = Request::chat(messages).image(Arc::clone(&file));
        answers.push(ask(engine, request, question, Some(output)).await?);
    }
    conclude(&answers, engine.stats().images_encoded - encoded, output)?;
    Ok(())
}

fn introduce(engine: &Engine, picture: &Picture, output: &mut Output<'_>) -> anyhow::Result<()> {
    let pixels = Pixels::decode(picture.png, &PictureLimits::default())?;
    output.write(&format!(
        "Model {}.\nThe questions are about a picture of {} x {} pixels: {}.\n",
        engine.model_info().id,
        pixels.width(),
        pixels.height(),
        picture.description,
    ))?;
    if output.is_styled {
        output.write(&format!("\n{}", drawn(&pixels)))?;
    }
    Ok(())
}

/// The picture in half blocks, whose upper half has the color of one pixel and whose lower half has
/// the color of the pixel below it.
fn drawn(pixels: &Pixels) -> String {
    let rows = COLUMNS * pixels.height() / pixels.width() / 2;
    let mut text = String::new();
    for row in 0..rows {
        text += "  ";
        for column in 0..COLUMNS {
            let [upper, lower] = [2 * row, 2 * row + 1]
                .map(|half| mean(pixels, [column, half], [COLUMNS, 2 * rows]));
            let [(r, g, b), (below_r, below_g, below_b)] = [upper, lower];
            // Writing to a string does not fail.
            let _ = write!(
                text,
                "\x1b[38;2;{r};{g};{b}m\x1b[48;2;{below_r};{below_g};{below_b}m\u{2580}"
            );
        }
        text += "\x1b[0m\n";
    }
    text
}

/// The mean color of the part at `at`, its column and row, of a picture that is divided into
/// `parts` columns and rows.
fn mean(pixels: &Pixels, at: [usize; 2], parts: [usize; 2]) -> (usize, usize, usize) {
    let size = [pixels.width(), pixels.height()];
    let range = |axis: usize| {
        let begin = at[axis] * size[axis] / parts[axis];
        begin..((at[axis] + 1) * size[axis] / parts[axis]).max(begin + 1)
    };
    let (mut sums, mut count) = ([0; 3], 0);
    for y in range(1) {
        for x in range(0) {
            let first = 3 * (y * size[0] + x);
            for (sum, byte) in sums.iter_mut().zip(&pixels.pixels()[first..first + 3]) {
                *sum += usize::from(*byte);
            }
            count += 1;
        }
    }
    (sums[0] / count, sums[1] / count, sums[2] / count)
}

/// Says how often the encoder ran, how much was cached, and how much sooner later answers began.
fn conclude(answers: &[Answer], encoded: u64, output: &mut Output<'_>) -> io::Result<()> {
    let Some((first, later)) = answers.split_first() else { return Ok(()) };
    let right = answers.iter().filter(|answer| answer.right).count();
    let cached: Vec<usize> = later.iter().map(|answer| answer.finish.usage.cached_tokens).collect();
    let [least, most] = [cached.iter().min(), cached.iter().max()].map(|n| n.copied().unwrap_or(0));
    let times = if encoded == 1 { "once" } else { &format!("{encoded} times") };
    let (cold, warm) = (median_ttft(std::slice::from_ref(first)), median_ttft(later));
    let mut text = format!(
        "\n{right} of {} answers are right. The image encoder ran {times}: later questions found \
         {least} to {most} tokens\nin the cache, {} of them those of the picture.\n",
        answers.len(),
        first.finish.usage.image_tokens,
    );
    text += &format!("The first answer began after {cold:.1} ms, the others after {warm:.1} ms");
    text += &match warm > 0.0 {
        true => format!(" (median): {:.1} times sooner.\n", cold / warm),
        false => ".\n".to_owned(),
    };
    output.write(&text)
}
