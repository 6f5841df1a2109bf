//! `--otlp-traces-endpoint` of `stolon serve`: the collector of traces.

#[cfg(feature = "otel")]
use anyhow::Context;
use clap::Args;
#[cfg(feature = "otel")]
use stolon_http::traces::{Export, SpanLayer};

#[cfg(feature = "otel")]
use crate::terminal;

/// The flag that names the collector of traces.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Traces")]
pub(crate) struct TracesArgs {
    /// Address of an OpenTelemetry collector that receives a trace of each request, by OTLP over
    /// HTTP, such as http://localhost:4318/v1/traces
    ///
    /// The path /v1/traces is added if there is none. The variables OTEL_EXPORTER_OTLP_ENDPOINT,
    /// OTEL_EXPORTER_OTLP_HEADERS, OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER and others of
    /// OpenTelemetry work as usual. Traces have times and numbers, never texts.
    #[arg(long, value_name = "URL")]
    otlp_traces_endpoint: Option<String>,
}

impl TracesArgs {
    /// Begins the export, if a collector is given by the flag or by the variables of OpenTelemetry.
    ///
    /// # Errors
    /// If the flag's value is not an address of HTTP, or the exporter cannot be made.
    #[cfg(feature = "otel")]
    pub(crate) fn start(&self) -> anyhow::Result<Option<(SpanLayer, Export)>> {
        stolon_http::traces::start(self.otlp_traces_endpoint.as_deref(), terminal::warn)
            .context("--otlp-traces-endpoint")
    }

    /// Refuses the flag.
    ///
    /// # Errors
    /// If it is given.
    #[cfg(not(feature = "otel"))]
    pub(crate) fn start(&self) -> anyhow::Result<()> {
        anyhow::ensure!(
            self.otlp_traces_endpoint.is_none(),
            "--otlp-traces-endpoint: this program was built without the feature `otel`"
        );
        Ok(())
    }
}
