//! `stolon generate`: generates text from one or several prompts.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use futures::future::try_join_all;
use serde_json::{Value, json};
use stolon::{
    ChatMessage, Completion, Engine, Event, Finish, Request, SamplingParams, TokenLogprob,
};

use crate::args::{EngineArgs, SamplingArgs};
use crate::{image_file, terminal, text_file};

/// Arguments of `stolon generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// Prompt text. Can be repeated
    #[arg(long, value_name = "TEXT")]
    prompt: Vec<String>,
    /// File that contains a prompt, or - for standard input. Can be repeated
    #[arg(long, value_name = "FILE")]
    prompt_file: Vec<PathBuf>,
    /// Prompt as token ids separated by commas, such as 1,2,3. Can be repeated
    #[arg(long, value_name = "IDS", value_parser = parse_ids)]
    prompt_tokens: Vec<TokenIds>,
    /// File of an image that belongs to each text prompt: PNG, JPEG, WebP, GIF or BMP. Can be
    /// repeated. Only for models that take images
    #[arg(long, value_name = "FILE")]
    image: Vec<PathBuf>,
    /// Send each text prompt as a user's message, with the model's chat template
    #[arg(long)]
    chat: bool,
    /// Print the log-probability of each generated token and of the N most likely tokens at its
    /// position
    #[arg(long, value_name = "N")]
    logprobs: Option<usize>,
    /// Print one JSON object per prompt, each on one line, instead of the text
    #[arg(long)]
    json: bool,
    /// Run all prompts at the same time instead of one after another. Requires --json
    #[arg(long, requires = "json")]
    concurrent: bool,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

/// A prompt given as token ids. A newtype because clap interprets a `Vec` as a repeated flag.
#[derive(Clone, Debug, PartialEq, Eq)]
struct TokenIds(Vec<u32>);

impl GenerateArgs {
    /// Runs the prompts: texts first, then files, then token ids, each in the order given.
    ///
    /// # Errors
    /// An unreadable file, and errors of the engine.
    pub async fn run(self) -> anyhow::Result<()> {
        let requests = self.requests()?;
        anyhow::ensure!(
            !requests.is_empty(),
            "expected a prompt: --prompt, --prompt-file or --prompt-tokens, got none"
        );
        let engine = self.engine.start().await?;
        let recommended = engine.recommended_sampling();
        let requests = requests.into_iter().map(|request| self.sampled(request, &recommended));
        let requests: Vec<Request> = requests.collect();
        if self.concurrent {
            let streams = try_join_all(requests.into_iter().map(|r| engine.generate(r))).await?;
            for completion in try_join_all(streams.into_iter().map(|s| s.collect_text())).await? {
                terminal::line(to_json(&completion))?;
            }
        } else {
            for request in requests {
                if self.json {
                    let completion = engine.generate(request).await?.collect_text().await?;
                    terminal::line(to_json(&completion))?;
                } else {
                    self.print(&engine, request).await?;
                }
            }
        }
        engine.shutdown().await;
        Ok(())
    }

    fn requests(&self) -> anyhow::Result<Vec<Request>> {
        let mut texts = self.prompt.clone();
        for path in &self.prompt_file {
            texts.push(text_file::read_or_stdin(path)?);
        }
        let images = self.image.iter().map(|path| image_file::read(path));
        let images = images.collect::<anyhow::Result<Vec<Arc<[u8]>>>>()?;
        let text = |text| {
            let request = match self.chat {
                true => Request::chat(vec![ChatMessage::new("user", text)]),
                false => Request::text(text),
            };
            images.iter().cloned().fold(request, Request::image)
        };
        let ids = self.prompt_tokens.iter().map(|ids| Request::tokens(ids.0.clone()));
        Ok(texts.into_iter().map(text).chain(ids).collect())
    }

    /// The request with the sampling parameters of the flags, or else with those that the model's
    /// authors recommend.
    fn sampled(&self, request: Request, recommended: &SamplingParams) -> Request {
        // The JSON form always has the log-probability of each token.
        let logprobs = self.logprobs.or(self.json.then_some(0));
        match (self.sampling.apply(request, recommended), logprobs) {
            (request, Some(top)) => request.logprobs(top),
            (request, None) => request,
        }
    }

    /// Streams the text of one answer to standard output, followed by a line of figures.
    async fn print(&self, engine: &Engine, request: Request) -> anyhow::Result<()> {
        let mut stream = engine.generate(request).await?;
        let mut logprobs = Vec::new();
        while let Some(event) = stream.next().await {
            match event? {
                Event::Token(token) => {
                    terminal::stream(&token.text)?;
                    logprobs.extend(token.logprob);
                }
                Event::Finished(finish) => {
                    terminal::line("")?;
                    for logprob in &logprobs {
                        terminal::line(terminal::dim(logprob_json(logprob)))?;
                    }
                    terminal::line(terminal::dim(figures(&finish)))?;
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// One line with the token counts and times of an answer.
pub(crate) fn figures(finish: &Finish) -> String {
    format!(
        "[{} prompt tokens, {} cached; first token after {:.1} ms; {} generated in {:.2} s{}: {}]",
        finish.usage.prompt_tokens,
        finish.usage.cached_tokens,
        finish.timings.ttft.as_secs_f64() * 1e3,
        finish.usage.completion_tokens,
        finish.timings.total.as_secs_f64(),
        decode_rate(finish).map(|rate| format!(", {rate:.1} tokens/s")).unwrap_or_default(),
        finish.reason.as_str(),
    )
}

/// Tokens a second after the first one; `None` for an answer without further tokens.
fn decode_rate(finish: &Finish) -> Option<f64> {
    let tokens = finish.usage.completion_tokens.checked_sub(1).filter(|&tokens| tokens > 0)?;
    let seconds = finish.timings.total.saturating_sub(finish.timings.ttft).as_secs_f64();
    (seconds > 0.0).then(|| tokens as f64 / seconds)
}

fn to_json(completion: &Completion) -> Value {
    let finish = &completion.finish;
    json!({
        "token_ids": completion.token_ids,
        "text": completion.text,
        "logprobs": completion.logprobs.iter().map(logprob_json).collect::<Vec<_>>(),
        "prompt_tokens": finish.usage.prompt_tokens,
        "cached_tokens": finish.usage.cached_tokens,
        "ttft_ms": finish.timings.ttft.as_secs_f64() * 1e3,
        "total_ms": finish.timings.total.as_secs_f64() * 1e3,
        "finish_reason": finish.reason.as_str(),
    })
}

fn logprob_json(entry: &TokenLogprob) -> Value {
    let pair =
        |&(token_id, logprob): &(u32, f32)| json!({"token_id": token_id, "logprob": logprob});
    json!({
        "token_id": entry.token_id,
        "logprob": entry.logprob,
        "top": entry.top.iter().map(pair).collect::<Vec<_>>(),
    })
}

fn parse_ids(text: &str) -> Result<TokenIds, String> {
    let id = |part: &str| {
        part.trim().parse().map_err(|_| {
            format!("expected token ids between commas, such as 1,2,3; got `{}`", part.trim())
        })
    };
    if text.trim().is_empty() {
        return Ok(TokenIds(Vec::new())); // The engine refuses it with a clear message.
    }
    text.split(',').map(id).collect::<Result<_, _>>().map(TokenIds)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: ids are parsed with or without spaces; anything else is refused with what was
    /// expected.
    #[test]
    fn token_ids_are_parsed() {
        assert_eq!(parse_ids("1, 2,3"), Ok(TokenIds(vec![1, 2, 3])));
        assert_eq!(parse_ids(" "), Ok(TokenIds(vec![])));
        for bad in ["1,x", "1,,2", "-1", "4294967296"] {
            assert!(parse_ids(bad).is_err_and(|message| message.contains("expected")), "{bad}");
        }
    }
}
