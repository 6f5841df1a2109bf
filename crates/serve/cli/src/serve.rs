//! `stolon serve`: binds the address, loads the model and serves until SIGINT or SIGTERM.
//!
//! The address is bound first, so that one in use is reported before the model is loaded. Requests
//! are answered with status 503 until the model is loaded.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use clap::builder::RangedU64ValueParser;
use stolon::{
    Drafting, Engine, EngineBuilder, EngineHealth, ModelSet, ReasoningFormat, ToolCallFormat,
};
use tokio::sync::watch;

use crate::args::EngineArgs;
use crate::memory::format_bytes;
use crate::traces::TracesArgs;
use crate::{terminal, text_file};
use stolon_http::api::options::MAX_CHOICES;
use stolon_http::{
    ApiKeys, Certificate, FormatChoice, Gate, ImageHost, ImageHosts, Origins, PriorityOrder,
    RouterOptions, UnknownParameters, listen, models_router, router,
};

mod access;
mod address;
mod interrupts;
mod kv_events;
mod limits;
pub(crate) mod models;
mod warm;

use access::AccessArgs;
use address::AddressArgs;
use interrupts::Interrupts;
use kv_events::KvEventsArgs;
use limits::LimitArgs;
use models::{ModelsArgs, NamedModel};
use warm::WarmArgs;

/// Arguments of `stolon serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Model to load, as with --model
    #[arg(value_name = "MODEL")]
    model_argument: Option<String>,
    #[command(flatten)]
    address: AddressArgs,
    /// Name of the model for clients, instead of its id. Can be repeated
    ///
    /// Requests may use any of the names. The first one is that of replies and metrics. A request
    /// with another name is answered, too, if there is one name and no adapter, or if one of the
    /// names is `*`; the reply has the model's own name in the header x-stolon-model.
    #[arg(long, visible_alias = "served-name", value_name = "NAME")]
    served_model_name: Vec<String>,
    /// Maximum number of tokens of an answer, if the request sets no limit
    ///
    /// Default: 16 for completions, as in OpenAI's API, and for chat as many as the context and the
    /// KV cache allow.
    #[arg(long, value_name = "TOKENS", value_parser = from_one())]
    default_max_tokens: Option<u64>,
    /// Let messages contain special tokens, such as `<|im_end|>`, that act as control tokens
    ///
    /// By default they are encoded as ordinary text, so that a user cannot forge another turn.
    #[arg(long)]
    special_tokens_in_messages: bool,
    /// What to do with unknown parameters of requests: refuse, or warn
    ///
    /// With refuse, the request gets status 400, which names the parameter. With warn, the
    /// parameter is ignored, logged once, and named in the reply's header x-stolon-ignored. Known
    /// parameters that would change the answer are refused in any case.
    #[arg(long, value_name = "ACTION", default_value = "refuse")]
    unknown_parameters: UnknownParameters,
    /// Format in which the model calls tools: auto, none, or the name of a format, such as hermes
    ///
    /// auto recognizes it in the chat template. With none, calls are left in the text. The error
    /// for an unknown name lists all formats.
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    tool_call_parser: FormatChoice<ToolCallFormat>,
    /// Tags around the model's reasoning: auto, none, think (<think> and </think>), mistral
    /// ([THINK] and [/THINK]), cohere or openai
    ///
    /// auto recognizes them in the chat template. Replies have the reasoning in the field
    /// `reasoning_content`; with none, it is left in the text.
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    reasoning_parser: FormatChoice<ReasoningFormat>,
    /// Maximum number of tokens of the reasoning before an answer, if the request sets none
    ///
    /// After them, only the tag that ends the reasoning can follow, and the model has to answer. By
    /// default there is no limit. Requests set their own with `thinking_token_budget`, or
    /// `thinking.budget_tokens` in Anthropic's API.
    #[arg(long, value_name = "TOKENS")]
    reasoning_budget: Option<usize>,
    /// Host from which images may be fetched that requests name by URL. Can be repeated
    ///
    /// A name (images.example.com), all names below one (*.example.com), either with a port. Their
    /// addresses have to be public, and redirects have to stay on the list. Files have at most 20
    /// MiB and arrive within 10 seconds, all files of a request within 20. By default only data
    /// URLs are accepted.
    #[arg(long, visible_alias = "allowed-media-domains", value_name = "HOST", num_args = 1..)]
    image_hosts: Vec<ImageHost>,
    /// Cut inputs of embeddings and scores that are too long for the model
    ///
    /// Without it, they are refused, unless the request says how many tokens are kept
    /// (`truncate_prompt_tokens`). Programs that expect a server which cuts texts, such as those that
    /// divide documents by characters, need it.
    #[arg(long)]
    auto_truncate: bool,
    /// Do not serve the page at /
    ///
    /// The page is a chat next to a picture of the prefix cache. It uses the other routes as any
    /// client does, with the keys that its user enters.
    #[arg(long, visible_alias = "no-webui")]
    no_page: bool,
    /// Seconds that running requests have to finish after SIGINT or SIGTERM
    ///
    /// New requests are refused meanwhile, with status 503. A second signal stops the server
    /// immediately.
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    shutdown_timeout: u64,
    #[command(flatten)]
    warm: WarmArgs,
    #[command(flatten)]
    tls: TlsArgs,
    #[command(flatten)]
    access: AccessArgs,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    kv_events: KvEventsArgs,
    #[command(flatten)]
    traces: TracesArgs,
    #[command(flatten)]
    several: ModelsArgs,
    #[command(flatten)]
    engine: EngineArgs,
    /// The models, if they have names.
    #[arg(skip)]
    models: Vec<NamedModel>,
}

/// What a server serves.
enum Served {
    One(Engine),
    Several(ModelSet),
}

/// The certificate of a server that speaks HTTPS.
#[derive(Debug, Args)]
#[command(next_help_heading = "TLS")]
struct TlsArgs {
    /// PEM file with the private key of the certificate, without a password. Serves HTTPS
    #[arg(long, value_name = "FILE", requires = "ssl_certfile")]
    ssl_keyfile: Option<PathBuf>,
    /// PEM file with the server's certificate, followed by any intermediate certificates
    ///
    /// Both files are read when the server starts, and again when it receives SIGHUP.
    #[arg(long, value_name = "FILE", requires = "ssl_keyfile")]
    ssl_certfile: Option<PathBuf>,
}

impl TlsArgs {
    /// The files of the certificate and of its key, if there are any.
    fn files(&self) -> Option<(&Path, &Path)> {
        self.ssl_certfile.as_deref().zip(self.ssl_keyfile.as_deref())
    }

    fn read(&self) -> anyhow::Result<Option<Certificate>> {
        let Some((chain, key)) = self.files() else { return Ok(None) };
        let name = format!("{} and {}", chain.display(), key.display());
        text_file::announced(name, || Certificate::read(chain, key)).map(Some)
    }
}

/// A whole number from 1 to a million.
fn from_one() -> RangedU64ValueParser<u64> {
    RangedU64ValueParser::new().range(1..=1_000_000)
}

impl ServeArgs {
    /// The flag that names the collector of traces.
    pub(crate) fn traces(&self) -> &TracesArgs {
        &self.traces
    }

    /// Sets the models of a server of several.
    pub(crate) fn set_models(&mut self, models: Vec<NamedModel>) {
        self.models = models;
    }

    /// Serves until SIGINT or SIGTERM, then lets running requests finish. A second signal ends
    /// them, and one while the engine stops ends this at once.
    ///
    /// # Errors
    /// If the address cannot be bound, the keys cannot be read or the engine cannot be started.
    pub async fn run(mut self) -> anyhow::Result<()> {
        let hosts = self.image_hosts.clone();
        let complete = move |builder: EngineBuilder| {
            if hosts.is_empty() {
                return builder;
            }
            let hosts = ImageHosts::new(hosts.clone());
            builder.image_urls(move |url| hosts.fetch(url))
        };
        let models = std::mem::take(&mut self.models);
        if models.is_empty() {
            self.several.check_unused()?;
            let mut engine = self.engine.clone();
            engine.demo_kv_memory();
            return self
                .run_with(async move { engine.start_from(complete(engine.builder()?)).await })
                .await;
        }
        anyhow::ensure!(
            self.served_model_name.is_empty(),
            "expected --model NAME=SOURCE without --served-model-name, because each model has a name"
        );
        anyhow::ensure!(
            self.kv_events.read()?.is_none(),
            "expected --kv-events-config with one model, because its events do not name the model"
        );
        let several = self.several.clone();
        let set = async move { Ok(Served::Several(several.start(&models, complete).await?)) };
        self.serve(set).await
    }

    /// The same with an engine that the caller starts, for programs with a custom backend. The
    /// flags of the engine have no effect.
    ///
    /// # Errors
    /// As [`ServeArgs::run`].
    pub async fn run_with(
        self,
        engine: impl Future<Output = anyhow::Result<Engine>>,
    ) -> anyhow::Result<()> {
        self.serve(async move { Ok(Served::One(engine.await?)) }).await
    }

    async fn serve(
        self,
        served: impl Future<Output = anyhow::Result<Served>>,
    ) -> anyhow::Result<()> {
        let mut options = self.router_options()?;
        let certificate = self.tls.read()?;
        let tls = certificate.as_ref().map(Certificate::acceptor).transpose()?;
        let kv_events = self.kv_events.read()?;
        let requests = self.warm.read()?;
        anyhow::ensure!(
            kv_events.is_none() || !self.engine.no_prefix_caching,
            "expected --kv-events-config without --no-prefix-caching, because there are no events \
             without a prefix cache"
        );
        let api_keys = options.access.api_keys.clone();
        let can_reload = certificate.is_some() || self.access.api_key_file.is_some();
        let mut interrupts = Interrupts::new(can_reload).context("cannot receive signals")?;
        let (listener, address) = self.address.bind(certificate.is_some()).await?;
        address.warn_if_open(&options.access);
        let gate = Arc::new(Gate::loading().below(self.address.root_path.clone()));
        let (stopping, stop) = watch::channel(false);
        let limits = self.limits.of_connections();
        let serving = tokio::spawn(listen(listener, Arc::clone(&gate), limits, tls, stop));
        terminal::note(format!("loading {} for {address}", self.engine.model));
        let reload = || self.reload(&api_keys, certificate.as_ref());
        let served = tokio::select! {
            served = served => served?,
            () = interrupts.stop(reload) => return Ok(()),
        };
        let publisher = match &served {
            Served::One(engine) => {
                self.check_adapters(engine)?;
                kv_events::start(kv_events.as_ref(), engine).await?
            }
            Served::Several(_) => None,
        };
        options.counters.extend(publisher.as_ref().map(kv_events::counters));
        tokio::select! {
            warmed = requests.compute(&served, &options) => warmed?,
            () = interrupts.stop(reload) => return Ok(()),
        }
        served.open(&gate, options);
        served.announce();
        terminal::note(format!("listening on {address}"));
        let has_stopped = tokio::select! {
            () = interrupts.stop(reload) => false,
            () = served.stopped() => true,
        };
        gate.close();
        stopping.send_replace(true);
        anyhow::ensure!(!has_stopped, "the engine has stopped; the log says why");
        terminal::note("stopping; waiting for running requests to finish");
        tokio::select! {
            result = serving => result?,
            () = tokio::time::sleep(Duration::from_secs(self.shutdown_timeout)) => {}
            () = interrupts.stop(reload) => {}
        }
        // A step that hangs keeps the engine from stopping.
        tokio::select! {
            () = served.shutdown() => Ok(()),
            () = interrupts.stop(reload) => anyhow::bail!("ended before the engine had stopped"),
        }
    }

    /// Refuses adapters that have a name of the model.
    fn check_adapters(&self, engine: &Engine) -> anyhow::Result<()> {
        for adapter in engine.adapters() {
            let name = &adapter.name;
            let is_taken = self.served_model_name.contains(name);
            anyhow::ensure!(!is_taken, "`{name}` is the name of an adapter and of the model");
        }
        Ok(())
    }

    /// Reads the files with keys and certificates again. If a file cannot be read, its old content
    /// stays in use.
    fn reload(&self, api_keys: &ApiKeys, certificate: Option<&Certificate>) {
        if let Some(file) = &self.access.api_key_file {
            match text_file::regular(file).and_then(|_| self.access.keys()) {
                Ok(keys) => {
                    api_keys.replace(keys);
                    terminal::note("the API keys were read again");
                }
                Err(error) => terminal::warn(format!("WARNING: {error:#}; the API keys stay")),
            }
        }
        if let Some((certificate, (chain, key))) = certificate.zip(self.tls.files()) {
            let renew = || {
                text_file::regular(chain)?;
                text_file::regular(key)?;
                certificate.renew(chain, key)
            };
            match renew() {
                Ok(()) => terminal::note("the certificate was read again"),
                Err(error) => terminal::warn(format!("WARNING: {error:#}; the certificate stays")),
            }
        }
    }

    fn router_options(&self) -> anyhow::Result<RouterOptions> {
        let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let max_answers = self.engine.max_queued.unwrap_or(MAX_CHOICES).min(MAX_CHOICES);
        // A path on this machine is not a name for clients.
        let alias = Some(&self.engine.model).filter(|model| !Path::new(model).exists());
        Ok(RouterOptions {
            served_names: self.served_model_name.clone(),
            alias: alias.cloned(),
            access: self.access.read()?,
            body_limit: self.limits.body_limit.map(size),
            body_timeout: Duration::from_secs(self.limits.body_timeout),
            body_memory: size(self.limits.body_memory),
            request_timeout: Some(Duration::from_secs(self.limits.request_timeout)),
            default_max_tokens: self.default_max_tokens.map(size),
            max_answers,
            unknown_parameters: self.unknown_parameters,
            special_tokens_in_messages: self.special_tokens_in_messages,
            tool_calls: self.tool_call_parser,
            reasoning: self.reasoning_parser,
            reasoning_budget: self.reasoning_budget,
            allowed_origins: self.access.allowed_origins.iter().flat_map(Origins::list).collect(),
            public_metrics: self.access.public_metrics,
            counters: Vec::new(),
            hide_cached_tokens: self.access.hide_cached_tokens,
            auto_truncate: self.auto_truncate,
            response_memory: size(self.limits.response_memory),
            priority: match self.engine.admission.smaller_first {
                true => PriorityOrder::SmallerFirst,
                false => PriorityOrder::LargerFirst,
            },
            page: !self.no_page,
            root_path: self.address.root_path.clone(),
        })
    }
}

impl Served {
    /// Answers requests from now on.
    fn open(&self, gate: &Gate, options: RouterOptions) {
        gate.open(match self {
            Self::One(engine) => router(engine.clone(), options),
            Self::Several(models) => models_router(models.clone(), options),
        });
    }

    /// Describes the models on standard output. A server whose output is not read serves all the
    /// same.
    fn announce(&self) {
        match self {
            Self::One(engine) => announce(engine),
            Self::Several(models) => models::announce(models),
        }
    }

    /// Waits until the engine has stopped by itself, because its backend fails again and again. A
    /// process manager can then start the server anew. Of several models, one that has stopped is
    /// loaded again by its next request.
    async fn stopped(&self) {
        match self {
            Self::One(engine) => {
                while engine.health() != EngineHealth::Stopped {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            }
            Self::Several(_) => std::future::pending().await,
        }
    }

    async fn shutdown(&self) {
        match self {
            Self::One(engine) => drop(engine.shutdown().await),
            Self::Several(models) => models.shutdown().await,
        }
    }
}

/// Describes the engine of a server of one model.
fn announce(engine: &Engine) {
    let info = engine.model_info();
    terminal::note(format!("model    {} ({} tokens of context)", info.id, info.max_positions));
    terminal::note(format!(
        "KV cache {} tokens in {} blocks of {}, {}; prefix caching {}",
        info.num_blocks * info.block_size,
        info.num_blocks,
        info.block_size,
        format_bytes(info.kv_bytes as u64),
        if info.prefix_caching { "on" } else { "off" },
    ));
    let drafting = match info.drafting {
        Drafting::DraftModel => Some("a draft model guesses tokens"),
        Drafting::Eagle3 => Some("an EAGLE-3 head guesses tokens"),
        Drafting::Gemma4Assistant => Some("an assistant guesses tokens"),
        Drafting::Mtp => Some("the model's own head (MTP) guesses tokens"),
        Drafting::UnusedMtp => Some("none; this model has a head that guesses tokens: --mtp"),
        _ => None,
    };
    drafting.iter().for_each(|drafting| terminal::note(format!("drafts   {drafting}")));
    for adapter in engine.adapters() {
        let (name, rank, bytes) = (&adapter.name, adapter.rank, format_bytes(adapter.bytes));
        terminal::note(format!("adapter  {name} (LoRA of rank {rank}, {bytes})"));
    }
}
