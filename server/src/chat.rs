//! `stolon chat`: a conversation at the terminal. Each turn sends the whole conversation again;
//! the prefix cache is what makes that cheap, and a dim line after each answer shows how cheap.

use std::io::{self, BufRead, IsTerminal};
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use stolon::{ChatMessage, Engine, Event, Request};

use crate::args::{EngineArgs, SamplingArgs};
use crate::generate::figures;
use crate::terminal;

const HELP: &str = "/reset forgets the conversation, /stats shows the cache, /quit (or the end of \
                    input) leaves; interrupting stops an answer";

/// Arguments of `stolon chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// What the model is told before the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// A file that holds what the model is told before the conversation
    #[arg(long, value_name = "FILE", conflicts_with = "system")]
    system_file: Option<PathBuf>,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

/// Where lines come from: an editor with history at a terminal, plain lines otherwise.
enum Input {
    Terminal(Box<DefaultEditor>),
    Plain,
}

/// The conversation so far, and the engine that continues it.
struct Conversation {
    engine: Engine,
    sampling: SamplingArgs,
    messages: Vec<ChatMessage>,
    /// How many of the messages are there before the first turn: 1 with a system prompt, else 0.
    fixed: usize,
}

impl ChatArgs {
    /// Runs the command until the input ends.
    ///
    /// # Errors
    /// An unreadable file, a model without a chat template, and whatever the engine refuses.
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
            fixed: messages.len(),
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
                "/reset" => conversation.messages.truncate(conversation.fixed),
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
    /// One turn: streams the answer and keeps it. A refused or interrupted turn leaves the
    /// conversation as it was, and the program running.
    async fn turn(&mut self, text: &str) -> anyhow::Result<()> {
        self.messages.push(ChatMessage::new("user", text));
        match self.answer().await {
            Ok(Some(answer)) => self.messages.push(ChatMessage::new("assistant", answer)),
            Ok(None) => {
                self.messages.pop();
                terminal::line(terminal::dim("\n[interrupted; the question is forgotten]"))?;
            }
            Err(error) if crate::cli::is_broken_pipe(&error) => return Err(error),
            Err(error) => {
                self.messages.pop();
                terminal::line(terminal::dim(format!("[{}]", crate::cli::in_words(&error))))?;
            }
        }
        Ok(())
    }

    /// The answer, streamed to standard output; `None` when it was interrupted.
    async fn answer(&self) -> anyhow::Result<Option<String>> {
        let request = Request::chat(self.messages.clone());
        let request = self.sampling.apply(request, &self.engine.recommended_sampling());
        let mut stream = self.engine.generate(request)?;
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

    fn stats(&self) -> String {
        let stats = self.engine.stats();
        format!(
            "[{} turns; {} of {} prompt tokens came from the cache ({:.0} %); \
             {} of {} KV blocks hold cached text, {} are free]",
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

    /// The next line, without its end; `None` at the end of input. Waits on a thread of its own,
    /// so that the runtime keeps running.
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
