//! `stolon cache`: shows and changes the prefix cache of a running server through its routes below
//! `/v1/cache`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use ureq::config::ConfigBuilder;
use ureq::typestate::AgentScope;

use crate::{terminal, text_file};
use stolon_http::api::cache::{Evicted, Flushed, Imported, PinCreated, PinDeleted};
use stolon_http::certificates::Authorities;
use stolon_loadgen::http::certificate_hint;

use explain::ExplainArgs;

mod explain;
mod files;
mod lines;

/// Maximum size of a reply, in bytes.
const MAX_REPLY_BYTES: u64 = 1 << 30;

/// Arguments of `stolon cache`.
#[derive(Debug, Args)]
pub struct CacheArgs {
    /// Address of the server
    #[arg(long, default_value = "http://127.0.0.1:8080", env = "STOLON_URL", global = true)]
    url: String,
    /// The server's key for operators (its --admin-key). Not needed for a server on this machine
    /// that has no such key
    #[arg(
        long,
        value_name = "KEY",
        env = "STOLON_ADMIN_KEY",
        hide_env_values = true,
        global = true
    )]
    admin_key: Option<String>,
    /// PEM file with the certificates of the authorities to trust, instead of the public ones, for
    /// a server with https
    #[arg(long, value_name = "FILE", env = "STOLON_CACERT", global = true)]
    cacert: Option<PathBuf>,
    /// Print the server's reply as JSON
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: CacheCommand,
}

#[derive(Debug, Subcommand)]
enum CacheCommand {
    /// Show how much is cached and how often it is used
    Stats {
        /// Show the statistics again every SECONDS seconds until interrupted
        #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
        watch: Option<u64>,
    },
    /// Show the KV that is stored outside of the KV pool, and the time that it has saved
    Tiers,
    /// Show the prefix tree
    Tree {
        /// Print a graph in Graphviz's DOT language
        #[arg(long)]
        dot: bool,
        /// Show the first tokens of each node, which are parts of prompts
        #[arg(long)]
        tokens: bool,
    },
    /// Show how much of each prompt is cached, without computing anything
    Query(PromptArgs),
    /// Explain why the prompt of a request is not cached, without computing anything
    Explain(ExplainArgs),
    /// Show the requests that lost most cached tokens, and why
    Misses,
    /// Compute the part of each prompt that is not cached
    Warm(PromptArgs),
    /// Keep a prompt in the cache: compute the part that is not cached, and protect its whole blocks
    /// (`stolon serve --block-size`) from eviction
    Pin(PinArgs),
    /// End the pins of prompts, or one pin by its id
    Unpin {
        #[command(flatten)]
        prompts: PromptArgs,
        /// Id of the pin, as `list-pinned` shows it
        #[arg(long, value_name = "ID",
              conflicts_with_all = ["prompts", "prompt_file", "messages", "token_ids"])]
        id: Option<u64>,
    },
    /// Show all pins and what they hold
    ListPinned {
        /// Show the beginning of each pinned prompt
        #[arg(long)]
        tokens: bool,
    },
    /// Show the open sessions of all clients and what they hold
    Sessions,
    /// Remove prompts, or with --cache-salt or --tenant alone everything of that salt or tenant
    Evict(PromptArgs),
    /// Remove everything that no request uses, and end all pins
    Flush {
        /// Remove the KV that is stored on the disk, too. An object store keeps its KV
        #[arg(long)]
        disk: bool,
    },
    /// Compute the part of a prompt that is not cached, and write the prompt's keys and values to a
    /// file for `import`
    Export {
        /// File to write. It is replaced if it exists
        file: PathBuf,
        #[command(flatten)]
        prompt: PromptArgs,
    },
    /// Add a file that `export` has written to the cache. The server must run the same model with
    /// the same settings on the same kind of processor. Import only files that you trust
    Import {
        /// File to read
        file: PathBuf,
    },
}

/// The prompts to which a command applies.
#[derive(Debug, Args)]
struct PromptArgs {
    /// Texts of prompts
    #[arg(value_name = "TEXT")]
    prompts: Vec<String>,
    /// Read one text from a file; `-` is standard input
    #[arg(long, value_name = "FILE", conflicts_with = "prompts")]
    prompt_file: Option<PathBuf>,
    /// Read a conversation from a JSON file: a list of messages, or an object with `messages`. `-`
    /// is standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompts", "prompt_file"])]
    messages: Option<PathBuf>,
    /// Token ids of one prompt, separated by commas
    #[arg(long, value_name = "IDS", value_delimiter = ',',
          conflicts_with_all = ["prompts", "prompt_file", "messages"])]
    token_ids: Vec<u32>,
    /// The cache salt that requests with these prompts use
    #[arg(long, value_name = "SALT")]
    cache_salt: Option<String>,
    /// The tenant to which the prompts belong, on a server with --tenant-by
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
}

#[derive(Debug, Args)]
struct PinArgs {
    #[command(flatten)]
    prompt: PromptArgs,
    /// Seconds after which the pin ends. Default: it lasts until it is unpinned
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    ttl: Option<u32>,
    /// Let each request that uses the prompt start the time of the pin anew
    #[arg(long, requires = "ttl")]
    refresh_on_hit: bool,
    /// Reason of the pin; shown by `list-pinned`
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    /// Description of the prompt; shown by `list-pinned`
    #[arg(long, value_name = "TEXT")]
    description: Option<String>,
    /// Pin only what is cached already
    #[arg(long)]
    no_compute: bool,
}

impl PromptArgs {
    /// The body of a request about these prompts.
    fn body(&self) -> anyhow::Result<Map<String, Value>> {
        let mut body = Map::new();
        if let Some(path) = &self.prompt_file {
            body.insert("prompt".to_owned(), json!(text_file::read_or_stdin(path)?));
        } else if let Some(path) = &self.messages {
            let read: Value = serde_json::from_str(&text_file::read_or_stdin(path)?)
                .with_context(|| format!("{} is not JSON", path.display()))?;
            let messages = read.get("messages").cloned().unwrap_or(read);
            body.insert("messages".to_owned(), messages);
        } else if !self.token_ids.is_empty() {
            body.insert("prompt".to_owned(), json!(self.token_ids));
        } else if !self.prompts.is_empty() {
            body.insert("prompt".to_owned(), json!(self.prompts));
        }
        for (name, value) in [("cache_salt", &self.cache_salt), ("tenant", &self.tenant)] {
            body.extend(value.iter().map(|value| (name.to_owned(), json!(value))));
        }
        Ok(body)
    }
}

impl PinArgs {
    fn body(&self) -> anyhow::Result<Map<String, Value>> {
        let mut body = self.prompt.body()?;
        body.insert("compute".to_owned(), json!(!self.no_compute));
        if let Some(seconds) = self.ttl {
            body.insert("ttl_seconds".to_owned(), json!(seconds));
            body.insert("refresh_on_hit".to_owned(), json!(self.refresh_on_hit));
        }
        for (name, value) in [("reason", &self.reason), ("description", &self.description)] {
            body.extend(value.iter().map(|value| (name.to_owned(), json!(value))));
        }
        Ok(body)
    }
}

impl CacheArgs {
    /// Sends the command to the server and prints its reply.
    ///
    /// # Errors
    /// If the server cannot be reached or refuses, with its reason.
    pub async fn run(self) -> anyhow::Result<()> {
        // The HTTP client blocks.
        tokio::task::spawn_blocking(move || self.run_blocking()).await?
    }

    fn run_blocking(&self) -> anyhow::Result<()> {
        let client = self.client()?;
        match &self.command {
            CacheCommand::Stats { watch } => loop {
                self.show(&client.get("stats")?, lines::stats)?;
                let Some(seconds) = watch else { return Ok(()) };
                std::thread::sleep(Duration::from_secs(*seconds));
            },
            CacheCommand::Tiers => self.show(&client.get("tiers")?, lines::tiers),
            CacheCommand::Tree { dot: true, tokens } => {
                let text = client.get(&format!("tree?format=dot&tokens={tokens}"))?;
                Ok(terminal::line(text.trim_end())?)
            }
            CacheCommand::Tree { dot: false, tokens } => {
                self.show(&client.get(&format!("tree?tokens={tokens}"))?, lines::tree)
            }
            CacheCommand::Explain(args) => self.show(&args.send(&client)?, explain::explanations),
            CacheCommand::Misses => self.show(&client.get("misses")?, explain::misses),
            CacheCommand::Query(prompts) => {
                self.show(&client.post("query", &prompts.body()?)?, lines::results)
            }
            CacheCommand::Warm(prompts) => {
                self.show(&client.post("warm", &prompts.body()?)?, lines::results)
            }
            CacheCommand::Pin(pin) => self
                .show(&client.post("pin", &pin.body()?)?, |PinCreated { id, tokens }| {
                    vec![format!("pin {id}: {tokens} tokens")]
                }),
            CacheCommand::Unpin { prompts, id } => {
                let mut body = prompts.body()?;
                body.extend(id.map(|id| ("id".to_owned(), json!(id))));
                self.show(&client.post("unpin", &body)?, |PinDeleted { pins, .. }| {
                    vec![match pins {
                        1 => "1 pin has ended".to_owned(),
                        pins => format!("{pins} pins have ended"),
                    }]
                })
            }
            CacheCommand::ListPinned { tokens } => {
                self.show(&client.get(&format!("pins?tokens={tokens}"))?, lines::pins)
            }
            CacheCommand::Sessions => self.show(&client.get("sessions")?, lines::sessions),
            CacheCommand::Evict(prompts) => self
                .show(&client.post("evict", &prompts.body()?)?, |Evicted { blocks }| {
                    vec![format!("{blocks} blocks freed")]
                }),
            CacheCommand::Flush { disk } => {
                let path = if *disk { "flush?disk=true" } else { "flush" };
                let emptied = |_: &Flushed| vec!["the cache is empty".to_owned()];
                self.show(&client.post(path, &Map::new())?, emptied)
            }
            CacheCommand::Export { file, prompt } => {
                let bytes = client.export(file, json!(prompt.body()?).to_string())?;
                if self.json {
                    return Ok(terminal::line(json!({"bytes": bytes}))?);
                }
                let size = bytesize::ByteSize(bytes);
                Ok(terminal::line(format_args!("{}: {size}", file.display()))?)
            }
            CacheCommand::Import { file } => self
                .show(&client.import(file)?, |Imported { tokens }| {
                    vec![format!("{tokens} tokens are cached")]
                }),
        }
    }

    fn client(&self) -> anyhow::Result<Client<'_>> {
        let timeout = Some(Duration::from_secs(10));
        let agent = agent(self.cacert.as_deref(), |config| config.timeout_connect(timeout))?;
        Ok(Client { url: &self.url, admin_key: self.admin_key.as_deref(), agent })
    }

    /// Prints a reply: unchanged as JSON, or as lines of text.
    fn show<T: DeserializeOwned>(
        &self,
        reply: &str,
        lines: impl Fn(&T) -> Vec<String>,
    ) -> anyhow::Result<()> {
        let not_ours = "the reply is not as expected: is the address that of a Stolon?";
        if self.json {
            let reply: Value = serde_json::from_str(reply).context(not_ours)?;
            return Ok(terminal::line(reply)?);
        }
        let reply = serde_json::from_str(reply).context(not_ours)?;
        Ok(lines(&reply).into_iter().try_for_each(terminal::line)?)
    }
}

/// A client of a server, which trusts the authorities in the file of `--cacert`. Replies of all
/// statuses are replies.
pub(crate) fn agent(
    cacert: Option<&Path>,
    set: impl FnOnce(ConfigBuilder<AgentScope>) -> ConfigBuilder<AgentScope>,
) -> anyhow::Result<ureq::Agent> {
    let mut config = set(ureq::Agent::config_builder().http_status_as_error(false));
    if let Some(path) = cacert {
        let authorities = Authorities::read(path);
        let authorities = authorities.with_context(|| format!("--cacert {}", path.display()))?;
        config = config.tls_config(authorities.for_ureq());
    }
    Ok(ureq::Agent::new_with_config(config.build()))
}

/// A connection to the server's routes below `/v1/cache`.
#[derive(Clone)]
struct Client<'a> {
    url: &'a str,
    admin_key: Option<&'a str>,
    agent: ureq::Agent,
}

impl Client<'_> {
    fn get(&self, path: &str) -> anyhow::Result<String> {
        self.send(path, None)
    }

    fn post(&self, name: &str, body: &Map<String, Value>) -> anyhow::Result<String> {
        self.send(name, Some(json!(body).to_string()))
    }

    fn with_key<B>(&self, request: ureq::RequestBuilder<B>) -> ureq::RequestBuilder<B> {
        match self.admin_key {
            Some(key) => request.header("authorization", format!("Bearer {key}")),
            None => request,
        }
    }

    /// Sends a request to a path below `/v1/cache`, which may have a query, and returns the text of
    /// a successful reply.
    fn send(&self, path: &str, body: Option<String>) -> anyhow::Result<String> {
        let url = self.route(path);
        let sent = match body {
            Some(body) => {
                let request = self.agent.post(&url).header("content-type", "application/json");
                self.with_key(request).send(body)
            }
            None => self.with_key(self.agent.get(&url)).call(),
        };
        let mut reply = sent.map_err(|error| unreachable(&url, error))?;
        if !reply.status().is_success() {
            return Err(failure(&mut reply));
        }
        let text = reply.body_mut().with_config().limit(MAX_REPLY_BYTES).read_to_string();
        text.with_context(|| format!("the reply of {url} was cut off"))
    }

    /// The address of a path below `/v1/cache`.
    fn route(&self, path: &str) -> String {
        format!("{}/v1/cache/{path}", self.url.trim_end_matches('/'))
    }
}

/// The error of a request that was not answered.
pub(crate) fn unreachable(url: &str, error: ureq::Error) -> anyhow::Error {
    let text = error.to_string();
    match certificate_hint(&text) {
        "" => anyhow::Error::new(error).context(format!(
            "cannot reach {url}: is `stolon serve` running there? --url sets the address"
        )),
        hint => anyhow::anyhow!("cannot reach {url}: {text}{hint}"),
    }
}

/// The error of a reply that is not successful, with the server's reason.
fn failure(reply: &mut ureq::http::Response<ureq::Body>) -> anyhow::Error {
    let status = reply.status();
    let text = reply.body_mut().read_to_string().unwrap_or_default();
    let error: Option<Value> = serde_json::from_str(&text).ok();
    let message = error.as_ref().and_then(|error| error["error"]["message"].as_str());
    let hint = match status.as_u16() {
        401 => " (set STOLON_ADMIN_KEY or --admin-key)",
        _ => "",
    };
    let reason = message.unwrap_or("no reason given");
    anyhow::anyhow!("the server answered {status}: {reason}{hint}")
}
