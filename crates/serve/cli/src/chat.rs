//! `stolon chat`: a conversation in the terminal.
//!
//! Each turn sends the whole conversation. The prefix cache avoids computing the earlier turns
//! again; a dim line after each answer shows how much came from the cache.

mod command;
mod input;
mod render;

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use serde_json::{Value, json};
use stolon::{ChatMessage, ChatOptions, Engine, Event, MessageContent, Request};

use self::command::{Command, HELP};
use self::input::{Input, Read};
use self::render::Renderer;
use crate::args::{EngineArgs, SamplingArgs};
use crate::download;
use crate::generate::figures;
use crate::{image_file, terminal, text_file};

/// Arguments of `stolon chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// The model, as with --model
    #[arg(value_name = "MODEL")]
    model_argument: Option<String>,
    /// System prompt: instructions that precede the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// File that contains the system prompt
    #[arg(long, value_name = "FILE", conflicts_with = "system")]
    system_file: Option<PathBuf>,
    /// File of an image that belongs to the first message: PNG, JPEG, WebP, GIF or BMP. Can be
    /// repeated. Only for models that take images; `/image FILE` adds images to later messages
    #[arg(long, value_name = "FILE")]
    image: Vec<PathBuf>,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

/// The conversation so far and the engine that answers.
struct Conversation {
    engine: Engine,
    sampling: SamplingArgs,
    /// The system prompt, if there is one, and the turns.
    messages: Vec<ChatMessage>,
    /// The file that `/save` has written. `/save` replaces no other file.
    saved: Option<PathBuf>,
    /// The images of the next message.
    images: Vec<Value>,
}

impl ChatArgs {
    /// Runs the command until the input ends.
    ///
    /// # Errors
    /// An unreadable file, a model without a chat template, and errors of the engine.
    pub async fn run(self) -> anyhow::Result<()> {
        let system = match &self.system_file {
            Some(path) => Some(text_file::read(path, text_file::MAX_BYTES)?),
            None => self.system.clone(),
        };
        let images = self.image.iter().map(|path| image_file::part(path));
        let images = images.collect::<anyhow::Result<Vec<Value>>>()?;
        let engine = start(&self.engine).await?;
        let info = engine.model_info();
        anyhow::ensure!(
            info.has_chat_template,
            "the model `{}` has no chat template: use `stolon generate`",
            info.id
        );
        anyhow::ensure!(
            images.is_empty() || info.takes_images,
            "the model `{}` takes text only: expected no `--image`",
            info.id
        );
        let mut conversation = Conversation {
            engine: engine.clone(),
            sampling: self.sampling,
            messages: system.map(|text| ChatMessage::new("system", text)).into_iter().collect(),
            images,
            saved: None,
        };
        let mut input = Input::new()?;
        if input.is_terminal() {
            let hint = "/help shows the commands; Ctrl-C stops an answer, and twice it exits";
            note(&format!("{}; {hint}", info.id), input.width())?;
        }
        let mut was_interrupted = false;
        loop {
            match input.read().await? {
                Read::End => break,
                Read::Interrupted if was_interrupted => break,
                Read::Interrupted => {
                    was_interrupted = true;
                    note("[Ctrl-C once more exits]", None)?;
                }
                Read::Text(line) => {
                    was_interrupted = false;
                    let width = input.width();
                    if !conversation.obey(Command::parse(&line), width).await? {
                        break;
                    }
                }
            }
        }
        engine.shutdown().await;
        Ok(())
    }
}

/// Starts the engine. Meanwhile a terminal shows that the model is being loaded.
async fn start(args: &EngineArgs) -> anyhow::Result<Engine> {
    let spinner = download::spinner(format!("loading {}", args.model));
    let engine = args.start().await;
    spinner.finish_and_clear();
    engine
}

impl Conversation {
    /// Executes a line. Returns whether the conversation continues.
    async fn obey(&mut self, command: Command<'_>, width: Option<usize>) -> anyhow::Result<bool> {
        match command {
            Command::Quit => return Ok(false),
            Command::Say("") => {}
            Command::Say(text) => self.turn(text, width).await?,
            other => {
                let lines = self.reply(other).await;
                let lines = lines.unwrap_or_else(|error| vec![crate::cli::one_line(&error)]);
                for line in lines {
                    note(&line, width)?;
                }
            }
        }
        Ok(true)
    }

    /// Executes a command and returns the lines to show.
    async fn reply(&mut self, command: Command<'_>) -> anyhow::Result<Vec<String>> {
        let one = |line: String| vec![format!("[{line}]")];
        Ok(match command {
            Command::Help => HELP.lines().map(str::to_owned).collect(),
            Command::Reset => {
                let system = self.system_count();
                self.messages.truncate(system);
                self.images.clear();
                one("a new conversation".to_owned())
            }
            Command::Cache => self.cached().await?,
            Command::Stats => vec![self.stats()],
            Command::System(None) => match self.messages.first() {
                Some(message) if self.system_count() == 1 => {
                    content(message).lines().map(str::to_owned).collect()
                }
                _ => one("no system prompt".to_owned()),
            },
            Command::System(Some(text)) => one(self.set_system(text)),
            Command::Set(None) => {
                let set = command::shown(&self.sampling).join(", ");
                let set = if set.is_empty() { "nothing is set".to_owned() } else { set };
                one(format!("{set}; the model's defaults apply to the rest"))
            }
            Command::Set(Some((name, value))) => {
                command::set(&mut self.sampling, name, value)?;
                one(command::shown(&self.sampling).join(", "))
            }
            Command::Save(path) => {
                self.save(&path)?;
                one(format!("saved as {}", path.display()))
            }
            Command::Image(path) => {
                self.images.push(image_file::part(&path)?);
                one(format!("{} is part of the next message", path.display()))
            }
            Command::Unknown(line) => one(format!("no command `{line}`; /help shows them")),
            Command::Say(_) | Command::Quit => Vec::new(),
        })
    }

    /// Number of messages before the first turn: 1 with a system prompt, otherwise 0.
    fn system_count(&self) -> usize {
        self.messages.iter().take_while(|message| message.role == "system").count()
    }

    fn set_system(&mut self, text: &str) -> String {
        let count = self.system_count();
        self.messages.drain(..count);
        if text == "-" {
            return "the system prompt is removed".to_owned();
        }
        self.messages.insert(0, ChatMessage::new("system", text));
        "the system prompt is replaced; the conversation goes on with it".to_owned()
    }

    /// Writes the conversation to a file, which must be new or have been written by this command.
    fn save(&mut self, path: &Path) -> anyhow::Result<()> {
        let is_json = path.extension().is_some_and(|extension| extension == "json");
        let text = if is_json {
            format!("{:#}\n", json!(self.messages))
        } else {
            let parts = self.messages.iter();
            parts.map(|it| format!("## {}\n\n{}\n\n", it.role, content(it).trim())).collect()
        };
        let is_ours = self.saved.as_deref() == Some(path);
        let mut options = OpenOptions::new();
        options.write(true).create_new(!is_ours).create(is_ours).truncate(is_ours);
        let written = options.open(path).and_then(|mut file| file.write_all(text.as_bytes()));
        written.with_context(|| format!("cannot write {}", path.display()))?;
        self.saved = Some(path.to_owned());
        Ok(())
    }

    /// One turn: streams the answer and appends it to the conversation. A turn that fails or is
    /// interrupted leaves the conversation as it was.
    async fn turn(&mut self, text: &str, width: Option<usize>) -> anyhow::Result<()> {
        let mut message = ChatMessage::new("user", text);
        let mut parts = std::mem::take(&mut self.images);
        if !parts.is_empty() {
            parts.push(json!({"type": "text", "text": text}));
            message.content = Some(MessageContent::Parts(parts));
        }
        self.messages.push(message);
        match self.answer(width).await {
            Ok(Some(answer)) => self.messages.push(ChatMessage::new("assistant", answer)),
            Ok(None) => {
                self.take_back();
                note("\n[interrupted; the question was removed from the conversation]", width)?;
            }
            Err(error) if crate::cli::is_broken_pipe(&error) => return Err(error),
            Err(error) => {
                self.take_back();
                note(&format!("[{}]", crate::cli::one_line(&error)), width)?;
            }
        }
        Ok(())
    }

    /// Removes the last question. Its images belong to the next one.
    fn take_back(&mut self) {
        let content = self.messages.pop().and_then(|question| question.content);
        if let Some(MessageContent::Parts(mut parts)) = content {
            parts.pop();
            self.images = parts;
        }
    }

    /// Streams the answer to standard output and returns it; `None` if it was interrupted.
    async fn answer(&self, width: Option<usize>) -> anyhow::Result<Option<String>> {
        let mut renderer = width.map(|width| Renderer::new(width, terminal::is_styled()));
        let request = Request::chat(self.messages.clone());
        let mut sampling = self.sampling.clone();
        sampling.end_repetition.get_or_insert(!sampling.ignore_eos);
        let request = sampling.apply(request, &self.engine.chat_sampling());
        let mut stream = self.engine.generate(request).await?;
        let mut answer = String::new();
        // The text that the renderer holds back is shown however the answer ends.
        let rest_of = |renderer: &mut Option<Renderer>| {
            renderer.as_mut().map(Renderer::finish).unwrap_or_default()
        };
        loop {
            let event = tokio::select! {
                event = stream.next() => event.transpose(),
                // Dropping the stream cancels the request.
                _ = tokio::signal::ctrl_c() => {
                    terminal::stream(&rest_of(&mut renderer))?;
                    return Ok(None);
                }
            };
            let event = match event {
                Ok(event) => event,
                Err(error) => {
                    terminal::line(rest_of(&mut renderer))?;
                    return Err(error.into());
                }
            };
            match event {
                Some(Event::Token(token)) => {
                    match &mut renderer {
                        Some(renderer) => terminal::stream(&renderer.push(&token.text))?,
                        None => terminal::stream(&token.text)?,
                    }
                    answer.push_str(&token.text);
                }
                Some(Event::Finished(finish)) => {
                    terminal::line(rest_of(&mut renderer))?;
                    note(&figures(&finish), width)?;
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

/// Writes a line that is not part of an answer, wrapped if the width of the terminal is known.
fn note(text: &str, width: Option<usize>) -> io::Result<()> {
    let wrapped = width.map(|width| {
        let mut renderer = Renderer::new(width, false);
        renderer.push(text) + &renderer.finish()
    });
    terminal::line(terminal::dim(wrapped.as_deref().unwrap_or(text)))
}

/// The text of a message, which comes after its images.
fn content(message: &ChatMessage) -> &str {
    match &message.content {
        Some(MessageContent::Text(text)) => text,
        Some(MessageContent::Parts(parts)) => {
            parts.last().and_then(|part| part["text"].as_str()).unwrap_or_default()
        }
        None => "",
    }
}
