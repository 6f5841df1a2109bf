//! Graphs of the driver.

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
    /// Runs the kernels after all that was launched before.
    pub(super) fn launch(&self) -> Result<()> {
        self.0.launch().w()
    }
}

/// Runs `work`, and then captures what it launches when it is called once more, which computes
/// nothing. `None` if it cannot be captured; the log says why.
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
    // Also after an error: the stream would go on capturing.
    let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0));
    // If the capture has failed, memory may not have been freed. That must not fail the next step.
    let freed = stream.context().check_err();
    launched?;
    freed.w()?;
    match graph.w()? {
        Some(graph) => Ok(Graph(graph)),
        None => bail!("nothing was captured"),
    }
}
