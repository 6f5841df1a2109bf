//! `stolon chat`: a conversation in the terminal.
//!
//! Each turn sends the whole conversation. The prefix cache avoids computing the earlier turns
//! again; a dim line after each answer shows how much came from the cache.

use std::io::{self, BufRead, IsTerminal};
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use stolon::{ChatMessage, ChatOptions, Engine, Event, Request};

use crate::args::{EngineArgs, SamplingArgs};
use crate::generate::figures;
use crate::terminal;

const HELP: &str = "/reset starts a new conversation, /cache shows what of it is cached, /stats \
                    shows the prefix cache, /quit (or end of input) exits; Ctrl-C stops an answer";

/// Arguments of `stolon chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// System prompt: instructions that precede the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// File that contains the system prompt
    #[arg(long, value_name = "FILE", conflicts_with = "system")]
    system_file: Option<PathBuf>,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

/// Where input lines come from: a line editor with history in a terminal, plain lines otherwise.
enum Input {
    Terminal(Box<DefaultEditor>),
    Plain,
}

/// The conversation so far and the engine that answers.
struct Conversation {
    engine: Engine,
    sampling: SamplingArgs,
    messages: Vec<ChatMessage>,
    /// Number of messages before the first turn: 1 with a system prompt, otherwise 0.
    initial_count: usize,
}

impl ChatArgs {
    /// Runs the command until the input ends.
    ///
    /// # Errors
    /// An unreadable file, a model without a chat template, and errors of the engine.
    pub async fn run(self) -> anyhow::Result<()> {
        let system = match &self.system_file {
            Some(path) => Some(
                std::fs::read_to_string(path)
                    .with_context(|| format!("cannot read {}", path.display()))?,
            ),
            None => self.system.clone(),
        };
        let engine = self.engine.start().await?;
        let info = engine.model_info();
        anyhow::ensure!(
            info.has_chat_template,
            "the model `{}` has no chat template: use `stolon generate`",
            info.id
        );
        let messages: Vec<ChatMessage> =
            system.map(|text| ChatMessage::new("system", text)).into_iter().collect();
        let mut conversation = Conversation {
            sampling: self.sampling,
            initial_count: messages.len(),
            messages,
            engine: engine.clone(),
        };
        let mut input = Input::new()?;
        if matches!(input, Input::Terminal(_)) {
            terminal::line(terminal::dim(format!("{}; {HELP}", info.id)))?;
        }
        while let Some(line) = input.read().await? {
            match line.trim() {
                "" => {}
                "/quit" | "/exit" => break,
                "/help" => terminal::line(terminal::dim(HELP))?,
                "/reset" => conversation.messages.truncate(conversation.initial_count),
                "/cache" => {
                    for line in conversation.cached().await? {
                        terminal::line(terminal::dim(line))?;
                    }
                }
                "/stats" => terminal::line(terminal::dim(conversation.stats()))?,
                command if command.starts_with('/') => {
                    terminal::line(terminal::dim(format!("no command `{command}`; {HELP}")))?;
                }
                text => conversation.turn(text).await?,
            }
        }
        engine.shutdown().await;
        Ok(())
    }
}

impl Conversation {
    /// One turn: streams the answer and appends it to the conversation. A turn that fails or is
    /// interrupted leaves the conversation as it was.
    async fn turn(&mut self, text: &str) -> anyhow::Result<()> {
        self.messages.push(ChatMessage::new("user", text));
        match self.answer().await {
            Ok(Some(answer)) => self.messages.push(ChatMessage::new("assistant", answer)),
            Ok(None) => {
                self.messages.pop();
                terminal::line(terminal::dim(
                    "\n[interrupted; the question was removed from the conversation]",
                ))?;
            }
            Err(error) if crate::cli::is_broken_pipe(&error) => return Err(error),
            Err(error) => {
                self.messages.pop();
                terminal::line(terminal::dim(format!("[{}]", crate::cli::one_line(&error))))?;
            }
        }
        Ok(())
    }

    /// Streams the answer to standard output and returns it; `None` if it was interrupted.
    async fn answer(&self) -> anyhow::Result<Option<String>> {
        let request = Request::chat(self.messages.clone());
        let request = self.sampling.apply(request, &self.engine.recommended_sampling());
        let mut stream = self.engine.generate(request).await?;
        let mut answer = String::new();
        loop {
            let event = tokio::select! {
                event = stream.next() => event,
                // Dropping the stream cancels the request.
                _ = tokio::signal::ctrl_c() => return Ok(None),
            };
            match event.transpose()? {
                Some(Event::Token(token)) => {
                    terminal::stream(&token.text)?;
                    answer.push_str(&token.text);
                }
                Some(Event::Finished(finish)) => {
                    terminal::line("")?;
                    terminal::line(terminal::dim(figures(&finish)))?;
                }
                Some(_) => {}
                None => return Ok(Some(answer)),
            }
        }
    }

    /// How much of each message is cached.
    async fn cached(&self) -> anyhow::Result<Vec<String>> {
        if self.messages.is_empty() {
            return Ok(vec!["[the conversation is empty]".to_owned()]);
        }
        let options = ChatOptions { add_generation_prompt: false, ..ChatOptions::default() };
        let whole = Request::chat(self.messages.clone()).chat_options(options.clone());
        let whole = self.engine.tokenized(whole).await?;
        let cached = self.engine.cache().query_match_lens(std::slice::from_ref(&whole))?;
        let cached = cached.first().copied().unwrap_or(0);
        let mut lines = Vec::new();
        let mut start = 0;
        for (index, message) in self.messages.iter().enumerate() {
            let part =
                Request::chat(self.messages[..=index].to_vec()).chat_options(options.clone());
            // Some templates refuse conversations that end with certain messages.
            let Ok(tokens) = self.engine.prompt_tokens(&part).await else { continue };
            let end = tokens.len().max(start);
            let of_message = cached.clamp(start, end) - start;
            lines.push(format!(
                "[{:9} {of_message} of {} tokens cached]",
                message.role,
                end - start
            ));
            start = end;
        }
        let tokens = self.engine.prompt_tokens(&whole).await?.len();
        lines.push(format!("[{cached} of {tokens} tokens of the conversation are cached]"));
        Ok(lines)
    }

    fn stats(&self) -> String {
        let stats = self.engine.stats();
        format!(
            "[{} turns; {} of {} prompt tokens came from the cache ({:.0} %); \
             {} of {} KV blocks are cached, {} are free]",
            stats.finished,
            stats.cached_tokens,
            stats.prompt_tokens,
            stats.token_hit_rate() * 100.0,
            stats.blocks_cached,
            stats.blocks_total,
            stats.blocks_free,
        )
    }
}

impl Input {
    fn new() -> anyhow::Result<Self> {
        if io::stdin().is_terminal() && io::stdout().is_terminal() {
            Ok(Self::Terminal(Box::new(DefaultEditor::new()?)))
        } else {
            Ok(Self::Plain)
        }
    }

    /// The next line; `None` at the end of input. The blocking read happens on another thread, so
    /// that it does not block the runtime.
    async fn read(&mut self) -> anyhow::Result<Option<String>> {
        let mut input = std::mem::replace(self, Self::Plain);
        let (input, line) = tokio::task::spawn_blocking(move || {
            let line = input.read_blocking();
            (input, line)
        })
        .await?;
        *self = input;
        line
    }

    fn read_blocking(&mut self) -> anyhow::Result<Option<String>> {
        let Self::Terminal(editor) = self else {
            let mut line = String::new();
            let count = io::stdin().lock().read_line(&mut line)?;
            return Ok((count > 0).then_some(line));
        };
        match editor.readline("> ") {
            Ok(line) => {
                editor.add_history_entry(&line)?;
                Ok(Some(line))
            }
            Err(ReadlineError::Eof | ReadlineError::Interrupted) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}
