//! Best-of: several answers to one prompt are generated, the likeliest are kept.
//!
//! Whoever asks for it is [`Engine::best_of`](crate::Engine::best_of); what is here is the order of
//! answers and the sum of what they took.

use crate::{Completion, Usage};

/// The best of several answers to one request.
#[derive(Clone, Debug, PartialEq)]
pub struct BestOf {
    /// The answers that were kept, best first.
    pub completions: Vec<Completion>,
    /// What all candidates took, those left out included; the prompt counts once.
    pub usage: Usage,
}

impl BestOf {
    /// Keeps the best `count` of the candidates. Their log-probabilities must be there.
    pub(crate) fn choose(mut candidates: Vec<Completion>, count: usize) -> BestOf {
        // All have the same prompt. The first one computed it; the others found it cached.
        let mut usage = candidates.first().map(|first| first.finish.usage).unwrap_or_default();
        usage.completion_tokens =
            candidates.iter().map(|candidate| candidate.finish.usage.completion_tokens).sum();
        // Stable: of equal candidates the earlier one is the better.
        candidates.sort_by(|a, b| score(b).total_cmp(&score(a)));
        candidates.truncate(count);
        BestOf { completions: candidates, usage }
    }
}

/// Log-probability per generated token, an end-of-sequence token and tokens of a stop string
/// included: they were chosen like the others. An answer without any token counts as impossible.
fn score(completion: &Completion) -> f64 {
    let logprobs = &completion.logprobs;
    let sum: f64 = logprobs.iter().map(|entry| f64::from(entry.logprob)).sum();
    if logprobs.is_empty() { f64::NEG_INFINITY } else { sum / logprobs.len() as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Finish, FinishReason, Timings, TokenLogprob};

    fn candidate(name: &str, logprobs: &[f32]) -> Completion {
        let entry = |&logprob| TokenLogprob { token_id: 1, logprob, top: Vec::new() };
        let usage = Usage { prompt_tokens: 9, cached_tokens: 4, completion_tokens: logprobs.len() };
        let reason = FinishReason::Length;
        Completion {
            text: name.to_owned(),
            token_ids: vec![1; logprobs.len()],
            logprobs: logprobs.iter().map(entry).collect(),
            prompt_logprobs: Vec::new(),
            finish: Finish { reason, usage, timings: Timings::default() },
        }
    }

    fn check(candidates: &[(&str, &[f32])], count: usize, expected: &[&str]) {
        let given = candidates.iter().map(|(name, logprobs)| candidate(name, logprobs)).collect();
        let best = BestOf::choose(given, count);
        let names: Vec<&str> = best.completions.iter().map(|kept| kept.text.as_str()).collect();
        assert_eq!(names, expected);
        let generated = candidates.iter().map(|(_, logprobs)| logprobs.len()).sum();
        let usage = Usage { prompt_tokens: 9, cached_tokens: 4, completion_tokens: generated };
        assert_eq!(best.usage, usage);
    }

    /// Goal: by log-probability per token, not by its sum, best first.
    #[test]
    fn longer_answers_are_not_worse_for_their_length() {
        check(&[("short", &[-1.5]), ("long", &[-1.0; 4])], 1, &["long"]);
        check(&[("a", &[-3.0]), ("b", &[-1.0]), ("c", &[-2.0])], 2, &["b", "c"]);
    }

    /// Goal: of equal answers the earlier is the better, and one without a token is the worst.
    #[test]
    fn ties_and_empty_answers_have_their_place() {
        check(&[("a", &[-1.0]), ("b", &[-1.0, -1.0]), ("c", &[-0.5])], 3, &["c", "a", "b"]);
        check(&[("empty", &[]), ("poor", &[-99.0])], 2, &["poor", "empty"]);
        check(&[("empty", &[])], 1, &["empty"]);
    }
}
