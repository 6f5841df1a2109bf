//! Answers that are compared bit by bit.

use stolon::Completion;

/// The tokens of an answer with the bits of their log-probabilities.
pub(crate) fn bits(completion: &Completion) -> Vec<(u32, u32)> {
    let logprobs = completion.logprobs.iter().map(|logprob| logprob.logprob.to_bits());
    completion.token_ids.iter().copied().zip(logprobs).collect()
}
