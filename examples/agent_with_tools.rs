//! An agent: the model calls functions of this program until it has an answer. The next round finds
//! the rounds before it in the prefix cache.
//!
//! The model has to be able to call functions; small ones make mistakes, which they read as errors.
//!
//! ```sh
//! cargo run --release -p stolon --features schema --example agent_with_tools -- Qwen/Qwen3-0.6B
//! ```

#![allow(clippy::print_stdout, reason = "an example prints its results")]

use std::path::{Path, PathBuf};

use stolon::schemars::JsonSchema;
use stolon::{ChatMessage, Engine, MessageContent, Request, Tool};

/// The folder that the agent may read.
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples");

#[derive(serde::Deserialize, JsonSchema)]
#[schemars(crate = "stolon::schemars")]
struct File {
    /// The name of a file, without a folder.
    name: String,
}

#[derive(serde::Deserialize, JsonSchema)]
#[schemars(crate = "stolon::schemars")]
struct Nothing {}

/// The path of a file of the folder. What the model writes is not to be trusted.
fn path(name: &str) -> Result<PathBuf, String> {
    let is_plain = Path::new(name).file_name().is_some_and(|file| file == name);
    is_plain
        .then(|| Path::new(FOLDER).join(name))
        .ok_or_else(|| format!("{name:?} is no file name"))
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let model = std::env::args().nth(1).unwrap_or_else(|| "Qwen/Qwen3-0.6B".to_owned());
    let engine = Engine::builder().model(model).build().await?;
    let list = Tool::new("list_files", "Lists the files of the folder.", |Nothing {}| {
        let names = std::fs::read_dir(FOLDER)?.flatten().map(|entry| entry.file_name());
        Ok::<_, std::io::Error>(serde_json::json!(names.collect::<Vec<_>>()))
    });
    let read =
        Tool::new_async("read_file", "Reads a file of the folder.", |file: File| async move {
            let text =
                std::fs::read_to_string(path(&file.name)?).map_err(|error| error.to_string())?;
            Ok::<_, String>(text)
        });
    let question = "Which of the files shows how to pin a prompt? Look into the folder.";
    let request = Request::chat([ChatMessage::user(question)])
        .sampling(engine.chat_sampling())
        .max_tokens(1000);
    let run = engine.run_tools(request, &[list, read], 8).await?;
    for message in &run.messages {
        let text = match &message.content {
            Some(MessageContent::Text(text)) => text.chars().take(200).collect(),
            _ => String::new(),
        };
        let calls = message.extra.get("tool_calls").map(ToString::to_string).unwrap_or_default();
        println!("{}: {text} {calls}", message.role);
    }
    for completion in &run.completions {
        let usage = completion.finish.usage;
        println!("{} of {} prompt tokens were cached", usage.cached_tokens, usage.prompt_tokens);
    }
    engine.shutdown().await;
    Ok(())
}
