//! Best-of: several answers to one prompt are generated, and the most likely ones are returned.
//!
//! [`Engine::best_of`](crate::Engine::best_of) generates the candidates. This module ranks them and
//! adds up their usage.

use crate::{Completion, Usage};

/// The most likely of several answers to one request, from
/// [`Engine::best_of`](crate::Engine::best_of).
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct BestOf {
    /// The returned answers, the most likely one first. It has the log-probabilities of the prompt,
    /// if they were requested.
    pub completions: Vec<Completion>,
    /// Token counts of all candidates, including those that are not returned. The prompt counts
    /// once.
    pub usage: Usage,
}

impl BestOf {
    /// Returns the best `count` of the candidates. They must have log-probabilities.
    pub(crate) fn choose(mut candidates: Vec<Completion>, count: usize) -> BestOf {
        // All candidates have the same prompt. The first one computed it, so its usage says how
        // much of the prompt was cached before.
        let mut usage = candidates.first().map(|first| first.finish.usage).unwrap_or_default();
        usage.completion_tokens =
            candidates.iter().map(|candidate| candidate.finish.usage.completion_tokens).sum();
        let prompt_logprobs =
            candidates.first_mut().map(|first| std::mem::take(&mut first.prompt_logprobs));
        // The sort is stable, so the earlier one of equal candidates comes first.
        candidates.sort_by(|a, b| score(b).total_cmp(&score(a)));
        candidates.truncate(count);
        if let Some(best) = candidates.first_mut() {
            best.prompt_logprobs = prompt_logprobs.unwrap_or_default();
        }
        BestOf { completions: candidates, usage }
    }
}

/// Mean log-probability per generated token. An end-of-sequence token and the tokens of a stop
/// string count, because they were sampled like all others. An answer without tokens ranks last.
fn score(completion: &Completion) -> f64 {
    let logprobs = &completion.logprobs;
    let sum: f64 = logprobs.iter().map(|entry| f64::from(entry.logprob)).sum();
    if logprobs.is_empty() { f64::NEG_INFINITY } else { sum / logprobs.len() as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Answer, Finish, FinishReason, Timings, TokenLogprob};

    fn candidate(name: &str, logprobs: &[f32]) -> Completion {
        let entry = |&logprob| TokenLogprob { token_id: 1, logprob, rank: 1, top: Vec::new() };
        let usage = Usage {
            prompt_tokens: 9,
            cached_tokens: 4,
            completion_tokens: logprobs.len(),
            ..Usage::default()
        };
        let reason = FinishReason::Length;
        Completion {
            text: name.to_owned(),
            answer: Answer::default(),
            token_ids: vec![1; logprobs.len()],
            logprobs: logprobs.iter().map(entry).collect(),
            prompt_logprobs: Vec::new(),
            finish: Finish { reason, usage, timings: Timings::default() },
        }
    }

    fn check(candidates: &[(&str, &[f32])], count: usize, expected: &[&str]) {
        let completions =
            candidates.iter().map(|(name, logprobs)| candidate(name, logprobs)).collect();
        let best = BestOf::choose(completions, count);
        let names: Vec<&str> = best.completions.iter().map(|best| best.text.as_str()).collect();
        assert_eq!(names, expected);
        let generated = candidates.iter().map(|(_, logprobs)| logprobs.len()).sum();
        let usage = Usage {
            prompt_tokens: 9,
            cached_tokens: 4,
            completion_tokens: generated,
            ..Usage::default()
        };
        assert_eq!(best.usage, usage);
    }

    /// Goal: candidates are ranked by mean log-probability per token, not by the sum.
    #[test]
    fn ranking_does_not_depend_on_length() {
        check(&[("short", &[-1.5]), ("long", &[-1.0; 4])], 1, &["long"]);
        check(&[("a", &[-3.0]), ("b", &[-1.0]), ("c", &[-2.0])], 2, &["b", "c"]);
    }

    /// Goal: the earlier one of equal candidates ranks first, and one without tokens ranks last.
    #[test]
    fn ties_keep_their_order_and_empty_answers_rank_last() {
        check(&[("a", &[-1.0]), ("b", &[-1.0, -1.0]), ("c", &[-0.5])], 3, &["c", "a", "b"]);
        check(&[("empty", &[]), ("poor", &[-99.0])], 2, &["poor", "empty"]);
        check(&[("empty", &[])], 1, &["empty"]);
    }
}
