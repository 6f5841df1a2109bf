//! CUDA graphs of the driver.

use std::fmt;

use candle_core::cuda_backend::cudarc::driver::{CudaGraph, CudaStream, sys};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Result, bail};

use crate::options::message;

/// The captured kernels of a step.
pub(super) struct Graph(CudaGraph);

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Graph")
    }
}

impl Graph {
    /// Runs the kernels after all work that was launched before.
    pub(super) fn launch(&self) -> Result<()> {
        self.0.launch().w()
    }
}

/// Runs `work` once, and then calls it again to capture the kernels that it launches. The second
/// call computes nothing. Returns `None`, with a warning in the log, if the step cannot be
/// captured.
pub(super) fn capture_after_first_run(
    device: &CudaDevice,
    mut work: impl FnMut() -> Result<()>,
) -> Result<Option<Graph>> {
    // The first run loads kernels and uploads the strides of tensors, which candle then keeps.
    let _kept = device.enable_cuda_graph_htod_cache();
    work()?;
    let graph = capture(&device.cuda_stream(), work);
    let graph = graph.inspect_err(|error| {
        tracing::warn!(
            error = %message(error),
            "CUDA graphs are not used, because a step could not be captured"
        );
    });
    Ok(graph.ok())
}

fn capture(
    stream: &std::sync::Arc<CudaStream>,
    work: impl FnOnce() -> Result<()>,
) -> Result<Graph> {
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).w()?;
    let launched = work();
    // The capture is ended after an error, too, because the stream would otherwise keep capturing.
    let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0));
    // A failed capture may leave an error in the context from memory that was not freed. Reading it
    // here keeps it from failing the next step.
    let freed = stream.context().check_err();
    launched?;
    freed.w()?;
    match graph.w()? {
        Some(graph) => Ok(Graph(graph)),
        None => bail!("nothing was captured"),
    }
}
