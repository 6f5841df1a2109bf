//! [`LogitsProcessor`]: a caller's own change of a row of logits.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::SamplingError;
use crate::regions::RegionLogits;

/// Changes the logits of one request before a token is chosen, for example to exclude tokens that
/// do not continue a grammar.
///
/// It runs once per generated token: between two steps if it is ready, and otherwise on a thread of
/// its own, while its sequence takes part in no step. So no other request waits for it. Sequences
/// may be sampled at the same time on several threads. If it fails or panics, its own request ends
/// with an error and no other does.
pub trait LogitsProcessor: Send + Sync {
    /// Changes `logits`, `[vocab_size]`, from which the token after `output` is chosen. `output`
    /// are the tokens that the request has generated so far. Minus infinity excludes a token; NaN
    /// and plus infinity end the request.
    ///
    /// After a preemption it is not called again for tokens that were generated already.
    ///
    /// # Errors
    /// [`SamplingError::ProcessorFailed`] and [`SamplingError::ProcessorBusy`] end the request.
    fn process(&self, output: &[u32], logits: &mut [f32]) -> Result<(), SamplingError>;

    /// Replaces `token`, which was sampled from the vocabulary to follow `output`, by a coordinate
    /// or a size, which is a token, too ([`TokenSpan`](stolon_kvcache::TokenSpan)), or keeps it.
    /// `regions` are the logits of their bins. Called only for requests that generate coordinates
    /// and sizes, between two steps, so it must be as fast as reading the logits. Default: keeps
    /// the token.
    fn replace(&self, _output: &[u32], token: u32, _regions: &RegionLogits<'_>) -> u32 {
        token
    }

    /// Called when the last token of `output` was chosen, before the step that computes the logits
    /// of the next one. May begin work in the background for [`LogitsProcessor::process`] with the
    /// same `output`. Must return at once.
    fn prepare(&self, _output: &[u32]) {}

    /// Whether [`LogitsProcessor::process`] with this `output` takes no longer than reading the
    /// logits. Only then it runs between two steps, and the first token may be chosen from cached
    /// logits of the prompt. Default: no. A processor that is always fast should say so, because
    /// a thread for each token costs some 50 microseconds.
    fn is_ready(&self, _output: &[u32]) -> bool {
        false
    }

    /// Tokens that must follow `output`, as far as the processor knows them without further work.
    /// They are proposed in the next step, which computes several tokens of the sequence if they
    /// are right. A wrong guess costs time and changes no token. Must return at once. Default: none.
    fn forced(&self, _output: &[u32]) -> Vec<u32> {
        Vec::new()
    }

    /// The next step will call [`LogitsProcessor::process`] not only with `output`, but probably
    /// also with `output` followed by one or more of `proposals`. May begin work in the background
    /// for them, as [`LogitsProcessor::prepare`]. Must return at once.
    fn prepare_ahead(&self, _output: &[u32], _proposals: &[u32]) {}

    /// A processor for one of several sequences of the request. `None`, the default, shares this
    /// one, whose calls then have the outputs of all sequences.
    fn for_sequence(&self) -> Option<SharedProcessor> {
        None
    }
}

/// A [`LogitsProcessor`] that the sequences of a request share. Two are equal if they are the same
/// object.
#[derive(Clone)]
pub struct SharedProcessor(Arc<dyn LogitsProcessor>);

impl SharedProcessor {
    /// Makes a processor shareable.
    #[must_use]
    pub fn new(processor: impl LogitsProcessor + 'static) -> Self {
        Self(Arc::new(processor))
    }

    /// # Errors
    /// The error of the processor, and [`SamplingError::ProcessorPanicked`].
    pub(super) fn process_caught(
        &self,
        output: &[u32],
        logits: &mut [f32],
    ) -> Result<(), SamplingError> {
        // The row is not used after a panic, and the processor belongs to the caller.
        catch_unwind(AssertUnwindSafe(|| self.0.process(output, logits))).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            Err(SamplingError::ProcessorPanicked { reason: text.unwrap_or("a panic").to_owned() })
        })
    }

    /// As [`LogitsProcessor::replace`].
    ///
    /// # Errors
    /// [`SamplingError::ProcessorPanicked`].
    pub(super) fn replace_caught(
        &self,
        output: &[u32],
        token: u32,
        regions: &RegionLogits<'_>,
    ) -> Result<u32, SamplingError> {
        catch_unwind(AssertUnwindSafe(|| self.0.replace(output, token, regions))).map_err(|_| {
            SamplingError::ProcessorPanicked { reason: "while it replaced a token".to_owned() }
        })
    }

    /// As [`LogitsProcessor::is_ready`]. After a panic it is not ready: `process` reports what is
    /// wrong.
    pub(super) fn is_ready_caught(&self, output: &[u32]) -> bool {
        catch_unwind(AssertUnwindSafe(|| self.0.is_ready(output))).unwrap_or(false)
    }

    /// As [`LogitsProcessor::forced`]. After a panic, nothing is forced.
    pub(super) fn forced_caught(&self, output: &[u32]) -> Vec<u32> {
        catch_unwind(AssertUnwindSafe(|| self.0.forced(output))).unwrap_or_default()
    }

    /// As [`LogitsProcessor::prepare_ahead`]. A panic is ignored: `process` reports what is wrong.
    pub(super) fn prepare_ahead_caught(&self, output: &[u32], proposals: &[u32]) {
        let _ = catch_unwind(AssertUnwindSafe(|| self.0.prepare_ahead(output, proposals)));
    }

    /// As [`LogitsProcessor::prepare`]. A panic is ignored: `process` reports what is wrong.
    pub(super) fn prepare_caught(&self, output: &[u32]) {
        let _ = catch_unwind(AssertUnwindSafe(|| self.0.prepare(output)));
    }
}

impl LogitsProcessor for SharedProcessor {
    fn process(&self, output: &[u32], logits: &mut [f32]) -> Result<(), SamplingError> {
        self.0.process(output, logits)
    }

    fn replace(&self, output: &[u32], token: u32, regions: &RegionLogits<'_>) -> u32 {
        self.0.replace(output, token, regions)
    }

    fn prepare(&self, output: &[u32]) {
        self.0.prepare(output);
    }

    fn is_ready(&self, output: &[u32]) -> bool {
        self.0.is_ready(output)
    }

    fn forced(&self, output: &[u32]) -> Vec<u32> {
        self.0.forced(output)
    }

    fn prepare_ahead(&self, output: &[u32], proposals: &[u32]) {
        self.0.prepare_ahead(output, proposals);
    }

    fn for_sequence(&self) -> Option<SharedProcessor> {
        self.0.for_sequence()
    }
}

impl PartialEq for SharedProcessor {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for SharedProcessor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedProcessor(..)")
    }
}
