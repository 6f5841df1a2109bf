//! The log on standard error: its level and its format.

use std::io::{IsTerminal, stderr};

use clap::{Args, ValueEnum};
use tracing_subscriber::EnvFilter;

/// Warnings, and the progress of downloads from the hub.
const DEFAULT_LEVEL: &str = "warn,stolon_checkpoint::hub=info";

/// Help heading of the options of the log, which all commands have.
pub(crate) const HEADING: &str = "Log";

/// Options of the log.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = HEADING)]
pub struct LogArgs {
    /// Which messages to log on standard error: error, warn, info, debug or trace, also for single
    /// modules, as in warn,stolon=info
    ///
    /// With info, the server logs each HTTP request and each generated answer, with the request's
    /// id, numbers of tokens and times, but never their texts.
    #[arg(
        long,
        global = true,
        value_name = "FILTER",
        env = "RUST_LOG",
        default_value = DEFAULT_LEVEL,
        value_parser = filter
    )]
    log_level: String,
    /// Form of the log: text, or json with one object per line
    #[arg(long, global = true, value_name = "FORMAT", value_enum, default_value_t)]
    log_format: LogFormat,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    #[default]
    Text,
    Json,
}

/// Checks a filter, which is compiled again when the log begins.
fn filter(text: &str) -> Result<String, tracing_subscriber::filter::ParseError> {
    EnvFilter::builder().parse(text).map(|_| text.to_owned())
}

impl LogArgs {
    /// Begins the log of this process. Has no effect if there is one already.
    pub fn init(&self) {
        let log = tracing_subscriber::fmt()
            .with_env_filter(EnvFilter::new(&self.log_level))
            .with_writer(stderr)
            .with_ansi(stderr().is_terminal())
            // It would report on standard error that standard error is closed, and panic.
            .log_internal_errors(false);
        let _ = match self.log_format {
            LogFormat::Text => log.try_init(),
            // The spans of an event are in a list, so that the current one is not repeated.
            LogFormat::Json => log.json().flatten_event(true).with_current_span(false).try_init(),
        };
    }

    /// The same with traces of requests. They need spans even if the log's level excludes them.
    #[cfg(feature = "otel")]
    pub(crate) fn init_with_traces(&self, traces: stolon_http::traces::SpanLayer) {
        use tracing_subscriber::Layer;
        use tracing_subscriber::layer::SubscriberExt;
        use tracing_subscriber::util::SubscriberInitExt;

        let log = tracing_subscriber::fmt::layer()
            .with_writer(stderr)
            .with_ansi(stderr().is_terminal())
            .log_internal_errors(false);
        let log = match self.log_format {
            LogFormat::Text => log.boxed(),
            LogFormat::Json => log.json().flatten_event(true).with_current_span(false).boxed(),
        };
        let _ = tracing_subscriber::registry()
            .with(log.with_filter(EnvFilter::new(&self.log_level)))
            .with(traces.with_filter(stolon_http::traces::SpanLayer::filter()))
            .try_init();
    }
}
