//! [`ModelTimes`]: what the guesses of a draft model cost, measured, and how often they are right.

use std::array;

use super::times::{CLASSES, class};
use super::{Acceptance, Worth};
use crate::step_plan::DraftDone;

/// The assumption before any measurement: the duration of a forward pass of the draft model as a
/// part of a step.
const EXPECTED_PASS: f64 = 0.1;

/// The same for each token in the first pass, if it has many.
const EXPECTED_TOKEN: f64 = 0.005;

/// Weight of the earlier measurements when another one is added: about fifty count.
const KEPT: f64 = 0.98;

/// Weight that the measurements keep after a step without guesses, so that a draft model that did
/// not pay is tried again after some thousand steps.
const REMEMBERED: f64 = 0.9995;

/// Minimum number of tokens of a first pass from which their time is measured.
const TOKENS_MIN: usize = 32;

/// Number of tokens of a sequence that the draft model may always compute before it guesses: about
/// as many as a few steps with proposals of other sources have.
const MISSING_MIN: usize = 32;

/// What a draft model takes, in seconds, and how often it is right.
#[derive(Debug)]
pub(crate) struct ModelTimes {
    /// A forward pass with one token per sequence, by the number of sequences.
    passes: [Mean; CLASSES],
    /// A token of a forward pass with many.
    token: Mean,
    /// The guesses for all sequences.
    acceptance: Acceptance,
}

/// A mean of which later values count more.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    sum: f64,
    weight: f64,
}

impl Mean {
    fn note(&mut self, value: f64) {
        self.sum = KEPT * self.sum + value;
        self.weight = KEPT * self.weight + 1.0;
    }

    fn forget(&mut self) {
        self.sum *= REMEMBERED;
        self.weight *= REMEMBERED;
    }

    /// The mean, with `expected` as one of the values.
    fn or(self, expected: f64) -> f64 {
        (self.sum + expected) / (self.weight + 1.0)
    }
}

/// A sequence for which a draft model may guess tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    /// The index of its slice.
    pub(crate) index: usize,
    /// The probability that a guess is right after all before it were right.
    pub(crate) rate: f64,
    /// Maximum number of guesses.
    pub(crate) limit: usize,
    /// The time in seconds that is saved by what is proposed otherwise.
    pub(crate) saved: f64,
}

/// How many tokens a draft model should guess for a sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Choice {
    /// The index of its slice.
    pub(crate) index: usize,
    /// Number of tokens.
    pub(crate) count: usize,
    /// The time in seconds that they save in addition to what is proposed otherwise.
    pub(crate) more: f64,
}

impl ModelTimes {
    pub(crate) fn new() -> ModelTimes {
        let passes = array::from_fn(|_| Mean::default());
        ModelTimes { passes, token: Mean::default(), acceptance: Acceptance::UNKNOWN }
    }

    /// The share of guesses that were right recently.
    pub(crate) fn rate(&self) -> f64 {
        self.acceptance.rate()
    }

    /// Learns from a step in which the draft model has computed something.
    pub(crate) fn note(&mut self, done: &DraftDone) {
        let (sequences, output) = (done.proposals.len(), &done.output);
        let pass = &mut self.passes[class(sequences)];
        if output.passes > 0 {
            pass.note(output.later.as_secs_f64() / output.passes as f64);
        }
        let first = output.first.as_secs_f64();
        if (1..=2 * sequences).contains(&output.first_tokens) {
            pass.note(first);
        } else if output.first_tokens >= TOKENS_MIN {
            self.token.note(first / output.first_tokens as f64);
        }
    }

    /// Learns whether the guesses for a sequence were right.
    pub(crate) fn learn(&mut self, mut guesses: Vec<u32>, followed: &[u32]) {
        self.acceptance.compare(&mut guesses, followed);
    }

    /// Moves towards the assumptions, after a step in which the draft model has computed nothing.
    pub(crate) fn forget(&mut self) {
        self.passes.iter_mut().for_each(Mean::forget);
        self.token.forget();
        self.acceptance.forget();
    }

    /// Number of tokens that may be guessed for a sequence in `spare` seconds. `plain` is the duration
    /// of a step.
    pub(crate) fn room(&self, sequences: usize, plain: f64, spare: f64) -> usize {
        (spare / self.pass(sequences, plain)) as usize
    }

    /// Number of missing tokens that the draft model computes in this time.
    pub(crate) fn tokens(&self, plain: f64, seconds: f64) -> usize {
        (seconds / self.token.or(EXPECTED_TOKEN * plain)) as usize
    }

    /// Number of missing tokens that the draft model may compute for a sequence if its guesses would
    /// have saved `earned` seconds since the last ones. So what is lost is at most what would have
    /// been gained, however soon the answer ends.
    pub(crate) fn missing_max(&self, plain: f64, earned: f64) -> usize {
        MISSING_MIN.saturating_add(self.tokens(plain, earned))
    }

    /// The sequences for which the draft model should guess tokens in a step of `plain` seconds. They
    /// share its forward passes, so each one for which that does not pay makes guesses for the others
    /// dearer.
    pub(crate) fn choose(
        &self,
        mut candidates: Vec<Candidate>,
        worth: Worth,
        plain: f64,
    ) -> Vec<Choice> {
        loop {
            let count = candidates.len();
            let pass = self.pass(count, plain) / count.max(1) as f64;
            let worth = Worth { cost: worth.cost + pass, ..worth };
            let best = |candidate: &Candidate| worth.best_len(candidate.rate, candidate.limit);
            candidates.retain(|candidate| best(candidate).1 > candidate.saved);
            if candidates.len() == count {
                let choice = |candidate: &Candidate| {
                    let ((count, saved), index) = (best(candidate), candidate.index);
                    Choice { index, count, more: saved - candidate.saved }
                };
                return candidates.iter().map(choice).collect();
            }
        }
    }

    fn pass(&self, sequences: usize, plain: f64) -> f64 {
        self.passes[class(sequences)].or(EXPECTED_PASS * plain).max(f64::MIN_POSITIVE)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use stolon_backend::DraftOutput;

    use super::*;

    fn candidates(rates: &[f64]) -> Vec<Candidate> {
        let candidate = |(index, &rate)| Candidate { index, rate, limit: 8, saved: 0.0 };
        rates.iter().enumerate().map(candidate).collect()
    }

    /// A step in which `sequences` sequences got guesses in four passes of `pass_ms`, after one with
    /// `first_tokens` tokens.
    fn done(sequences: usize, pass_ms: u64, first_tokens: usize, first_ms: u64) -> DraftDone {
        DraftDone {
            proposals: (0..sequences).map(|index| (index, vec![1; 4])).collect(),
            output: DraftOutput {
                first_tokens,
                first: Duration::from_millis(first_ms),
                passes: 3,
                later: Duration::from_millis(3 * pass_ms),
                ..DraftOutput::default()
            },
            time: Duration::ZERO,
        }
    }

    /// Goal: a draft model is asked where its guesses are right often enough for what it takes, which
    /// sequences share.
    #[test]
    fn it_is_asked_where_that_pays() {
        let mut times = ModelTimes::new();
        (0..100).for_each(|_| times.note(&done(1, 30, 2, 30)));
        (0..100).for_each(|_| times.note(&done(4, 30, 8, 30)));
        // A step takes 100 ms, and each proposed token makes it 2 ms longer.
        let worth = |sequences: f64| Worth { saved: 0.1 / sequences, cost: 0.002 };
        let counts = |rates: &[f64]| {
            let chosen = times.choose(candidates(rates), worth(rates.len() as f64), 0.1);
            chosen.iter().map(|choice| (choice.index, choice.count)).collect::<Vec<_>>()
        };
        assert!(matches!(counts(&[0.9])[..], [(0, 8)]), "{:?}", counts(&[0.9]));
        assert!(matches!(counts(&[0.6])[..], [(0, 1..4)]), "{:?}", counts(&[0.6]));
        assert_eq!(counts(&[0.3]), []);
        // Four sequences share the passes, but one of four does not pay for all.
        assert_eq!(counts(&[0.8; 4]).len(), 4);
        assert_eq!(counts(&[0.8, 0.1, 0.1, 0.1]), []);
        // A source that saves more is preferred.
        let mut better = candidates(&[0.9]);
        better[0].saved = 1.0;
        assert!(times.choose(better, worth(1.0), 0.1).is_empty());
    }

    /// Goal: after many steps in which it was not asked, because it was wrong or slow, it is tried
    /// again.
    #[test]
    fn it_is_tried_again() {
        let mut times = ModelTimes::new();
        for _ in 0..100 {
            times.note(&done(1, 90, 2, 90));
            times.learn(vec![1; 4], &[2]);
        }
        let worth = Worth { saved: 0.1, cost: 0.001 };
        let asked =
            |times: &ModelTimes| !times.choose(candidates(&[times.rate()]), worth, 0.1).is_empty();
        let mut steps = 0;
        while !asked(&times) && steps < 20_000 {
            times.forget();
            steps += 1;
        }
        assert!((1_000..20_000).contains(&steps), "{steps}");
    }

    /// Goal: the tokens that it may compute for a sequence take no longer than what it would have
    /// saved, except for a few, and no longer than other requests wait.
    #[test]
    fn missing_tokens_take_what_guesses_save() {
        let mut times = ModelTimes::new();
        (0..200).for_each(|_| times.note(&done(1, 1, 1_000, 100)));
        assert_eq!(times.missing_max(0.1, 0.0), MISSING_MIN);
        let earned = times.missing_max(0.1, 0.05) - MISSING_MIN;
        assert!((450..=500).contains(&earned), "{earned} tokens in 50 ms");
        assert!((45..=50).contains(&times.tokens(0.1, 0.005)));
        assert_eq!(times.room(1, 0.1, 0.0), 0);
        assert!((3..6).contains(&times.room(1, 0.1, 0.006)), "{}", times.room(1, 0.1, 0.006));
        assert_eq!(times.missing_max(0.1, f64::INFINITY), usize::MAX);
    }
}
