//! Graphs of the driver. No GPU has run them yet.

use std::fmt;

use candle_core::cuda_backend::cudarc::driver::{CudaGraph, CudaStream, sys};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Result, bail};

use crate::options::message;

/// The recorded kernels of a step.
pub(super) struct Graph(CudaGraph);

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Graph")
    }
}

impl Graph {
    /// Runs the kernels after all that was launched before.
    pub(super) fn launch(&self) -> Result<()> {
        self.0.launch().w()
    }
}

/// Runs `work`, and records what it launches when it is run once more, which computes nothing.
/// `None` if it cannot be recorded; the log says why.
pub(super) fn record(
    device: &CudaDevice,
    mut work: impl FnMut() -> Result<()>,
) -> Result<Option<Graph>> {
    // The first run loads kernels and uploads the strides of tensors, which candle then keeps.
    let _kept = device.enable_cuda_graph_htod_cache();
    work()?;
    let graph = capture(&device.cuda_stream(), work);
    let graph = graph.inspect_err(|error| {
        tracing::warn!(error = %message(error), "CUDA graphs are not used: none could be recorded");
    });
    Ok(graph.ok())
}

fn capture(
    stream: &std::sync::Arc<CudaStream>,
    work: impl FnOnce() -> Result<()>,
) -> Result<Graph> {
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).w()?;
    let launched = work();
    // This is needed after an error, too: the stream would go on recording.
    let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0));
    // Memory that could not be freed while a recording failed must not fail what comes next.
    let freed = stream.context().check_err();
    launched?;
    freed.w()?;
    match graph.w()? {
        Some(graph) => Ok(Graph(graph)),
        None => bail!("nothing was recorded"),
    }
}
