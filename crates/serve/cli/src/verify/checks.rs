//! Compares the answers of `stolon verify`.
//!
//! The first answer to a prompt is its reference. Every later answer to the same prompt has to be
//! equal: in its text, in its token ids and in its log-probabilities, as far as the server sends
//! them. Every answer is also searched for the secret words of other prompts.

use std::collections::HashMap;

use indexmap::IndexMap;
use stolon_loadgen::drive::Failure;
use stolon_loadgen::http::{Answer, Message};

use super::conversations::SECRETS;

/// In what state of the server a prompt is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Scenario {
    Cold,
    Warm,
    Branches,
    Batched,
    Growing,
    Canceled,
    Unrelated,
    Evicted,
}

impl Scenario {
    /// The name in reports.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::Warm => "warm",
            Self::Branches => "branches",
            Self::Batched => "batched",
            Self::Growing => "growing",
            Self::Canceled => "canceled",
            Self::Unrelated => "unrelated",
            Self::Evicted => "evicted",
        }
    }
}

/// The figures of a scenario.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    /// Number of answers.
    pub(super) answers: usize,
    /// Answers to prompts that had been answered before, which were compared.
    pub(super) compared: usize,
    /// Compared answers without any difference.
    pub(super) equal: usize,
    /// Compared answers with other tokens or another text.
    pub(super) flips: usize,
    /// Compared answers for which the server sent log-probabilities.
    pub(super) with_logprobs: usize,
    /// Compared answers with another log-probability of a token before the first other token.
    pub(super) logprob_differences: usize,
    /// The largest difference of two log-probabilities.
    pub(super) max_logprob_difference: f64,
    /// Answers with the secret word of another prompt.
    pub(super) leaks: usize,
    /// Requests that were not answered.
    pub(super) failures: usize,
    /// Tokens of the prompts, and those of them that were cached, as the server reports them.
    pub(super) prompt_tokens: usize,
    pub(super) cached_tokens: usize,
}

/// The first difference that a scenario has found.
#[derive(Debug)]
pub(super) struct Difference {
    pub(super) scenario: Scenario,
    pub(super) prompt: usize,
    /// The scenario of the reference.
    pub(super) reference_scenario: Scenario,
    pub(super) comparison: Comparison,
    pub(super) reference: String,
    pub(super) text: String,
}

/// An answer with a secret word of another prompt.
#[derive(Debug)]
pub(super) struct Leak {
    pub(super) scenario: Scenario,
    pub(super) prompt: usize,
    pub(super) secret: &'static str,
    pub(super) text: String,
}

/// A request that was not answered.
#[derive(Debug)]
pub(super) struct Unanswered {
    pub(super) scenario: Scenario,
    pub(super) prompt: usize,
    pub(super) message: String,
}

/// All prompts, their references, and what the comparisons have found.
#[derive(Debug, Default)]
pub(super) struct Checks {
    prompts: Vec<Vec<Message>>,
    references: HashMap<usize, (Scenario, Answer)>,
    /// By scenario, in the order in which they began.
    pub(super) tallies: IndexMap<Scenario, Tally>,
    /// At most one per scenario.
    pub(super) differences: Vec<Difference>,
    /// At most one per scenario.
    pub(super) leaks: Vec<Leak>,
    pub(super) unanswered: Vec<Unanswered>,
    /// Answers with a secret word of their own prompt.
    pub(super) own_secrets: usize,
    /// Whether any answer had text, token ids, or a number of cached tokens.
    pub(super) has_text: bool,
    pub(super) has_token_ids: bool,
    pub(super) has_cached_tokens: bool,
}

impl Checks {
    /// Adds a prompt and returns its number.
    pub(super) fn add(&mut self, messages: Vec<Message>) -> usize {
        self.prompts.push(messages);
        self.prompts.len() - 1
    }

    /// Number of prompts.
    pub(super) fn len(&self) -> usize {
        self.prompts.len()
    }

    /// The messages of a prompt.
    pub(super) fn messages(&self, prompt: usize) -> &[Message] {
        &self.prompts[prompt]
    }

    /// The text of the first answer to a prompt, if there is one.
    pub(super) fn reference(&self, prompt: usize) -> Option<&str> {
        self.references.get(&prompt).map(|(_, answer)| answer.text.as_str())
    }

    /// Records the outcome of a request.
    pub(super) fn record(
        &mut self,
        scenario: Scenario,
        prompt: usize,
        outcome: Result<Answer, Failure>,
    ) {
        match outcome {
            Ok(answer) => {
                self.search(scenario, prompt, &answer.text);
                self.compare(scenario, prompt, answer);
            }
            Err(failure) => {
                self.tally(scenario).failures += 1;
                let message = failure.to_string();
                self.unanswered.push(Unanswered { scenario, prompt, message });
            }
        }
    }

    fn tally(&mut self, scenario: Scenario) -> &mut Tally {
        self.tallies.entry(scenario).or_default()
    }

    /// The figures of all scenarios together.
    pub(super) fn total(&self) -> Tally {
        self.tallies.values().fold(Tally::default(), |sum, tally| Tally {
            answers: sum.answers + tally.answers,
            compared: sum.compared + tally.compared,
            equal: sum.equal + tally.equal,
            flips: sum.flips + tally.flips,
            with_logprobs: sum.with_logprobs + tally.with_logprobs,
            logprob_differences: sum.logprob_differences + tally.logprob_differences,
            max_logprob_difference: sum.max_logprob_difference.max(tally.max_logprob_difference),
            leaks: sum.leaks + tally.leaks,
            failures: sum.failures + tally.failures,
            prompt_tokens: sum.prompt_tokens + tally.prompt_tokens,
            cached_tokens: sum.cached_tokens + tally.cached_tokens,
        })
    }

    /// Searches an answer for secret words.
    fn search(&mut self, scenario: Scenario, prompt: usize, text: &str) {
        let is_own = |secret: &str| self.prompts[prompt].iter().any(|m| m.text.contains(secret));
        let named = SECRETS.into_iter().filter(|secret| text.contains(secret));
        let (own, foreign): (Vec<_>, Vec<_>) = named.partition(|secret| is_own(secret));
        self.own_secrets += usize::from(!own.is_empty());
        let Some(&secret) = foreign.first() else { return };
        let tally = self.tally(scenario);
        tally.leaks += 1;
        if tally.leaks == 1 {
            self.leaks.push(Leak { scenario, prompt, secret, text: text.to_owned() });
        }
    }

    /// Compares an answer with the reference, or makes it the reference.
    fn compare(&mut self, scenario: Scenario, prompt: usize, answer: Answer) {
        self.has_text |= !answer.text.is_empty();
        self.has_token_ids |= !answer.token_ids.is_empty();
        self.has_cached_tokens |= answer.usage.cached.is_some();
        let tally = self.tallies.entry(scenario).or_default();
        tally.answers += 1;
        tally.prompt_tokens += answer.usage.prompt.unwrap_or(0);
        tally.cached_tokens += answer.usage.cached.unwrap_or(0);
        let Some((reference_scenario, reference)) = self.references.get(&prompt) else {
            self.references.insert(prompt, (scenario, answer));
            return;
        };
        let comparison = Comparison::new(reference, &answer);
        let largest = comparison.logprob_difference;
        tally.compared += 1;
        tally.equal += usize::from(comparison.is_equal());
        tally.flips += usize::from(comparison.is_flip());
        tally.with_logprobs += usize::from(largest.is_some());
        tally.logprob_differences += usize::from(comparison.logprob.is_some());
        tally.max_logprob_difference = tally.max_logprob_difference.max(largest.unwrap_or(0.0));
        if !comparison.is_equal() && tally.equal + 1 == tally.compared {
            self.differences.push(Difference {
                scenario,
                prompt,
                reference_scenario: *reference_scenario,
                comparison,
                reference: reference.text.clone(),
                text: answer.text,
            });
        }
    }
}

/// How an answer differs from the reference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Comparison {
    /// Number of equal tokens before the first other one, if there is another one and the server has
    /// sent the tokens of both answers.
    pub(super) token: Option<usize>,
    /// Number of equal characters before the first other one, if there is another one.
    pub(super) character: Option<usize>,
    /// The largest difference of two log-probabilities before the first other token; `None` if the
    /// server sends none.
    pub(super) logprob_difference: Option<f64>,
    /// Number of tokens before the first one with another log-probability, if there is one.
    pub(super) logprob: Option<usize>,
}

impl Comparison {
    fn new(reference: &Answer, answer: &Answer) -> Self {
        let spelled = |answer: &Answer| -> Vec<String> {
            answer.logprobs.iter().map(|entry| entry.token.clone()).collect()
        };
        let by_id = first_other_token(&reference.token_ids, &answer.token_ids);
        let by_text = first_other_token(&spelled(reference), &spelled(answer));
        let token = [by_id, by_text].into_iter().flatten().min();
        let characters = |answer: &Answer| -> Vec<char> { answer.text.chars().collect() };
        let character = first_difference(&characters(reference), &characters(answer));
        let pairs = reference.logprobs.iter().zip(&answer.logprobs);
        let distances = pairs.take(token.unwrap_or(usize::MAX)).map(|(one, other)| {
            let (one, other) = one.logprob.zip(other.logprob)?;
            Some((one - other).abs())
        });
        let distances: Vec<Option<f64>> = distances.collect();
        Self {
            token,
            character,
            logprob_difference: distances.iter().copied().flatten().reduce(f64::max),
            logprob: distances.iter().position(|distance| distance.is_some_and(|d| d > 0.0)),
        }
    }

    fn is_flip(&self) -> bool {
        self.token.is_some() || self.character.is_some()
    }

    fn is_equal(&self) -> bool {
        !self.is_flip() && self.logprob.is_none()
    }
}

/// The first index at which two answers have other tokens, if the server has sent those of both.
fn first_other_token<T: PartialEq>(one: &[T], other: &[T]) -> Option<usize> {
    let are_given = !one.is_empty() && !other.is_empty();
    are_given.then(|| first_difference(one, other)).flatten()
}

/// The first index at which one sequence has another item or has ended.
fn first_difference<T: PartialEq>(one: &[T], other: &[T]) -> Option<usize> {
    let same = one.iter().zip(other).take_while(|(one, other)| one == other).count();
    (same < one.len().max(other.len())).then_some(same)
}

#[cfg(test)]
mod tests {
    use stolon_loadgen::http::TokenLogprob;

    use super::*;

    fn answer(text: &str, ids: &[u32], logprobs: &[(&str, f64)]) -> Answer {
        let logprob = |&(token, logprob): &(&str, f64)| TokenLogprob {
            token: token.to_owned(),
            logprob: Some(logprob),
        };
        let mut answer = Answer::default();
        answer.text = text.to_owned();
        answer.token_ids = ids.to_vec();
        answer.logprobs = logprobs.iter().map(logprob).collect();
        answer
    }

    fn prompt(text: &str) -> Vec<Message> {
        vec![Message { role: "user", text: text.to_owned() }]
    }

    /// Goal: texts, token ids, tokens and log-probabilities are compared where they are given, and
    /// log-probabilities only before the first other token.
    #[test]
    fn everything_that_is_given_is_compared() {
        let base = answer("ab", &[1, 2], &[("a", -0.5), ("b", -1.0)]);
        let found = |token, character, logprob_difference, logprob| Comparison {
            token,
            character,
            logprob_difference,
            logprob,
        };
        let near = answer("ab", &[1, 2], &[("a", -0.5), ("b", -1.25)]);
        let flip = answer("ac", &[1, 3], &[("a", -0.75), ("c", -9.0)]);
        let other_id = answer("ab", &[1, 9], &[("a", -0.5), ("b", -1.0)]);
        for (answer, expected) in [
            (base.clone(), found(None, None, Some(0.0), None)),
            (answer("ab", &[1, 2], &[]), found(None, None, None, None)),
            (near, found(None, None, Some(0.25), Some(1))),
            (flip, found(Some(1), Some(1), Some(0.25), Some(0))),
            (other_id, found(Some(1), None, Some(0.0), None)),
            (answer("abc", &[1, 2, 3], &[]), found(Some(2), Some(2), None, None)),
            (answer("", &[], &[]), found(None, Some(0), None, None)),
            (answer("ab", &[1, 2], &[("ab", -0.5)]), found(Some(0), None, None, None)),
        ] {
            assert_eq!(Comparison::new(&base, &answer), expected, "{answer:?}");
        }
    }

    /// Goal: the first answer to a prompt is its reference, later ones are counted as equal, as
    /// flips or as other log-probabilities, and the first difference of a scenario is kept.
    #[test]
    fn answers_are_counted() {
        let mut checks = Checks::default();
        let id = checks.add(prompt("hello"));
        let base = answer("ab", &[1, 2], &[("a", -0.5), ("b", -1.0)]);
        let near = answer("ab", &[1, 2], &[("a", -0.5), ("b", -1.5)]);
        let flip = answer("ac", &[1, 3], &[("a", -0.5), ("c", -1.0)]);
        checks.record(Scenario::Cold, id, Ok(base.clone()));
        for answer in [base, near, flip] {
            checks.record(Scenario::Warm, id, Ok(answer));
        }
        assert_eq!(
            (checks.tallies[&Scenario::Cold].answers, checks.tallies[&Scenario::Cold].compared),
            (1, 0)
        );
        let warm = checks.tallies[&Scenario::Warm];
        assert_eq!((warm.compared, warm.equal, warm.flips, warm.logprob_differences), (3, 1, 1, 1));
        assert_eq!((warm.with_logprobs, warm.max_logprob_difference), (3, 0.5));
        let [difference] = &checks.differences[..] else { panic!("{:?}", checks.differences) };
        assert_eq!((difference.prompt, difference.comparison.logprob_difference), (0, Some(0.5)));
    }

    /// Goal: a secret word of another prompt is a leak, the own one is none, and neither is a word
    /// that came into the prompt with an earlier answer.
    #[test]
    fn foreign_secrets_are_leaks() {
        let mut checks = Checks::default();
        let one = checks.add(prompt("It is called Quillon."));
        let both = checks.add(prompt("Not Quillon but Zelda."));
        for (id, text) in [(one, "Quillon"), (one, "Zelda!"), (one, "Zelda"), (both, "Zelda")] {
            checks.record(Scenario::Batched, id, Ok(answer(text, &[], &[])));
        }
        assert_eq!((checks.total().leaks, checks.own_secrets), (2, 2));
        let [leak] = &checks.leaks[..] else { panic!("{:?}", checks.leaks) };
        assert_eq!((leak.prompt, leak.secret, leak.text.as_str()), (one, "Zelda", "Zelda!"));
    }
}
