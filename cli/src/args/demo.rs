//! The built-in models.

use stolon::ModelSource;

/// The default of `--model`.
pub(crate) const DEMO: &str = "demo";

/// The built-in model that answers questions about pictures.
#[cfg(feature = "demo-model")]
pub(crate) const DEMO_VISION: &str = "demo-vision";

#[cfg(feature = "demo-model")]
#[allow(clippy::unnecessary_wraps, reason = "without the feature it returns an error")]
pub(super) fn demo_model() -> anyhow::Result<ModelSource> {
    Ok(ModelSource::Demo)
}

#[cfg(not(feature = "demo-model"))]
pub(super) fn demo_model() -> anyhow::Result<ModelSource> {
    anyhow::bail!(
        "this build does not contain the demo model (feature `demo-model`): choose another one with \
         --model"
    )
}
