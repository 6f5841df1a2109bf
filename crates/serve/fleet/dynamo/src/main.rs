//! `stolon-dynamo`: a worker of NVIDIA Dynamo.

use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use dynamo_backend_common::{CommonArgs, WorkerConfig, run};
use stolon_cli::args::EngineArgs;
use stolon_dynamo::{StartEngine, StolonWorker, WorkerOptions};

/// Runs a Stolon engine as a worker of NVIDIA Dynamo: its frontend has the API, and its router
/// sends each request to the worker that holds the longest part of the prompt.
#[derive(Parser)]
#[command(name = "stolon-dynamo", version)]
struct Arguments {
    /// Name of the model for clients, instead of its id
    #[arg(long, value_name = "NAME")]
    served_model_name: Option<String>,
    /// Directory or Hugging Face hub id with the tokenizer and the chat template of the model, for
    /// Dynamo's frontend
    ///
    /// Default: the value of --model, which must then be a directory or a hub id.
    #[arg(long, value_name = "DIRECTORY_OR_ID")]
    tokenizer: Option<String>,
    /// Seconds that running requests have to finish after SIGINT or SIGTERM
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    shutdown_timeout: u64,
    #[command(flatten, next_help_heading = "Dynamo")]
    common: CommonArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

fn main() -> anyhow::Result<()> {
    let Arguments { served_model_name, tokenizer, shutdown_timeout, common, engine } =
        Arguments::parse();
    let tokenizer = tokenizer.unwrap_or_else(|| engine.model.clone());
    let options = WorkerOptions {
        served_name: served_model_name.clone(),
        max_running: engine.max_running,
        max_batched_tokens: engine.max_batched_tokens,
        shutdown_timeout: Duration::from_secs(shutdown_timeout),
    };
    let start: StartEngine = Box::new(move || {
        let engine = engine.clone();
        Box::pin(async move { engine.start().await })
    });
    let config = WorkerConfig {
        namespace: common.namespace,
        component: common.component,
        endpoint: common.endpoint,
        model_name: tokenizer,
        served_model_name,
        endpoint_types: common.endpoint_types,
        custom_jinja_template: common.custom_jinja_template,
        tool_call_parser: common.dyn_tool_call_parser,
        reasoning_parser: common.dyn_reasoning_parser,
        exclude_tools_when_tool_choice_none: common.exclude_tools_when_tool_choice_none,
        disaggregation_mode: common.disaggregation_mode,
        runtime: common.runtime,
        ..WorkerConfig::default()
    };
    run(Arc::new(StolonWorker::new(start, options)), config)
}
