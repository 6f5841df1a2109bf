//! Attention over the paged KV store.
//!
//! * `gather` works on every device and for every model: it gathers keys and values by the block
//!   tables and computes an online softmax over tiles of positions.
//! * `flash` (feature `cuda`) calls candle's flash attention, which reads the KV store through the
//!   block tables, for models that it supports.

use candle_core::{Device, Result, Tensor};

use crate::kv_store::{KvLayer, KvShape};
use crate::plan::QuerySpan;

#[cfg(feature = "cuda")]
mod flash;
mod gather;

/// What a layer's attention computes besides `softmax(q k^T) v`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionArgs<'a> {
    pub(crate) heads: usize,
    /// Factor of the scores.
    pub(crate) scale: f32,
    /// Cap of the scores.
    pub(crate) softcap: Option<f32>,
    /// Number of positions that a query reads, including its own.
    pub(crate) window: Option<usize>,
    /// Scores of the attention sinks, `[heads]`.
    pub(crate) sinks: Option<&'a Tensor>,
}

/// How the attention of a model is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttentionKind {
    /// From gathered keys and values.
    Gather,
    /// By candle's flash attention.
    #[cfg(feature = "cuda")]
    Flash,
}

impl AttentionKind {
    /// The fastest kind that supports the model. `has_sinks` tells whether it has attention sinks.
    pub(crate) fn select(device: &Device, shape: &KvShape, has_sinks: bool) -> Self {
        #[cfg(feature = "cuda")]
        match flash::obstacle(device, shape, has_sinks) {
            None => return Self::Flash,
            Some(reason) => tracing::info!(reason, "flash attention is not used"),
        }
        let _ = (device, shape, has_sinks);
        Self::Gather
    }

    /// Its name in logs and fingerprints.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Gather => "gather",
            #[cfg(feature = "cuda")]
            Self::Flash => "flash",
        }
    }

    /// Prepares the attention of the queries of `spans`, which all layers share.
    pub(crate) fn prepare(
        self,
        spans: &[QuerySpan<'_>],
        shape: &KvShape,
        device: &Device,
    ) -> Result<Prepared> {
        match self {
            Self::Gather => Ok(Prepared::Gather(gather::Plan::new(spans, shape, device)?)),
            #[cfg(feature = "cuda")]
            Self::Flash => Ok(Prepared::Flash(flash::Plan::new(spans, device)?)),
        }
    }
}

/// Where the queries of a step and their keys are.
#[derive(Debug)]
pub(crate) enum Prepared {
    Gather(gather::Plan),
    #[cfg(feature = "cuda")]
    Flash(flash::Plan),
}

impl Prepared {
    /// Attention of the queries `q`, `[rows, heads, head_dim]` in f32, over `kv`. Returns
    /// `[rows, heads * head_dim]` in f32.
    pub(crate) fn attend(
        &self,
        q: &Tensor,
        kv: &KvLayer,
        shape: &KvShape,
        args: &AttentionArgs<'_>,
    ) -> Result<Tensor> {
        match self {
            Self::Gather(plan) => plan.attend(q, kv, shape, args),
            #[cfg(feature = "cuda")]
            Self::Flash(plan) => plan.attend(q, kv, shape, args),
        }
    }
}
