//! How long a step takes, learned from the last steps.
//!
//! The time of a step is modeled as a sum: a constant (reading the weights, and everything else
//! that a step does once), a time for each sequence that decodes and for each position that it
//! attends to, and a time for each prompt token and for each position that it attends to. The five
//! coefficients minimize the squares of the errors over the last steps, each relative to
//! the time that was expected. Older steps count less. No coefficient is negative.
//!
//! Steps with and without prompts are summed up apart. Otherwise a long answer would make the
//! engine forget how fast it computes prompts.

use std::time::Duration;

/// Number of coefficients.
const TERMS: usize = 5;
/// Weight of the earlier steps of a kind when another one is added: about fifty steps count.
const KEPT: f64 = 0.98;
/// Limits on the expected time of a step, to which its error is relative: at most this multiple of
/// the measured time, and at least this fraction of it. So the weight of a step is bounded.
const OUTLIER: f64 = 3.0;
/// Number of rounds of coordinate descent per step. It begins with the coefficients of the last
/// step, so a few rounds suffice.
const ROUNDS: usize = 16;

/// The work of a step, as far as its duration depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct StepWork {
    /// Number of sequences that decode, each with one token.
    decodes: f64,
    /// Number of positions that these attend to, together.
    decode_attended: f64,
    /// Number of prompt tokens.
    prompt: f64,
    /// Number of positions that each of these attends to, summed over them.
    prompt_attended: f64,
}

impl StepWork {
    /// The token at `position` of one sequence.
    pub(crate) fn decode(position: f64) -> StepWork {
        StepWork { decodes: 1.0, decode_attended: position, ..StepWork::default() }
    }

    /// `count` tokens of a prompt, the first one at position `start`.
    pub(crate) fn prompt(start: f64, count: f64) -> StepWork {
        let prompt_attended = count * (start + count / 2.0);
        StepWork { prompt: count, prompt_attended, ..StepWork::default() }
    }

    /// `count` tokens of one sequence, the first one at position `start`. A single one is a decode.
    pub(crate) fn of_slice(start: usize, count: usize) -> StepWork {
        match count {
            1 => StepWork::decode(start as f64),
            _ => StepWork::prompt(start as f64, count as f64),
        }
    }

    /// A step with the work of both.
    pub(crate) fn and(self, other: StepWork) -> StepWork {
        StepWork {
            decodes: self.decodes + other.decodes,
            decode_attended: self.decode_attended + other.decode_attended,
            prompt: self.prompt + other.prompt,
            prompt_attended: self.prompt_attended + other.prompt_attended,
        }
    }

    /// The factors of the coefficients.
    fn terms(&self) -> [f64; TERMS] {
        // The coefficients are fitted in this order, so that the first step of all is attributed
        // to its tokens, not to the constant.
        [self.prompt, self.decodes, self.prompt_attended, self.decode_attended, 1.0]
    }
}

/// Weighted sums over steps: the normal equations of the least squares.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    products: [[f64; TERMS]; TERMS],
    times: [f64; TERMS],
}

impl Sums {
    /// Adds a step that took `seconds`. Its error counts relative to `scale`.
    fn add(&mut self, terms: [f64; TERMS], seconds: f64, scale: f64) {
        for (i, term) in terms.iter().enumerate() {
            let relative = term / scale;
            self.times[i] = KEPT * self.times[i] + relative * seconds / scale;
            for (j, other) in terms.iter().enumerate() {
                self.products[i][j] = KEPT * self.products[i][j] + relative * other / scale;
            }
        }
    }
}

/// The learned model. See the module documentation.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StepCost {
    /// The steps that only decode, and those with prompts.
    sums: [Sums; 2],
    /// In seconds per unit of [`StepWork::terms`], not negative.
    coefficients: [f64; TERMS],
}

impl StepCost {
    /// Learns from a step that took `time`.
    pub(crate) fn note(&mut self, work: StepWork, time: Duration) {
        if time.is_zero() || work.decodes + work.prompt == 0.0 {
            return;
        }
        // Relative to the measured time instead, the result would be too short if times vary. A step
        // that was delayed by other programs has a limited weight.
        let (expected, seconds) = (self.seconds(work), time.as_secs_f64());
        let scale = expected.clamp(seconds / OUTLIER, seconds * OUTLIER);
        self.sums[usize::from(work.prompt > 0.0)].add(work.terms(), seconds, scale);
        for _ in 0..ROUNDS {
            for i in 0..TERMS {
                self.fit(i);
            }
        }
    }

    /// Sets a coefficient to its best value, given the others.
    fn fit(&mut self, i: usize) {
        let sum = |of: &dyn Fn(&Sums) -> f64| self.sums.iter().map(of).sum::<f64>();
        let weight = sum(&|sums| sums.products[i][i]);
        // Nothing is known of it. The sums of a term that has not occurred for long fade away.
        if weight < f64::MIN_POSITIVE / f64::EPSILON {
            return;
        }
        let others = (0..TERMS).filter(|&j| j != i);
        let explained: f64 =
            others.map(|j| self.coefficients[j] * sum(&|sums| sums.products[i][j])).sum();
        self.coefficients[i] = ((sum(&|sums| sums.times[i]) - explained) / weight).max(0.0);
    }

    /// Whether a step was noted.
    pub(crate) fn is_known(&self) -> bool {
        self.coefficients.iter().any(|&seconds| seconds > 0.0)
    }

    /// The time of a step in seconds.
    pub(crate) fn seconds(&self, work: StepWork) -> f64 {
        work.terms().iter().zip(self.coefficients).map(|(term, each)| term * each).sum()
    }

    /// By how much this work makes a step longer, in seconds.
    pub(crate) fn share(&self, work: StepWork) -> f64 {
        self.seconds(work) - self.seconds(StepWork::default())
    }

    /// The time in seconds of a step with nothing but one decode at the start of a context.
    pub(crate) fn one_decode(&self) -> f64 {
        self.seconds(StepWork::decode(0.0))
    }

    /// Number of tokens of a prompt, from position `start` on, that make a step longer by `seconds`.
    pub(crate) fn prompt_tokens(&self, seconds: f64, start: usize) -> usize {
        let each = self.share(StepWork::prompt(start as f64, 1.0));
        if each > 0.0 { (seconds / each) as usize } else { usize::MAX }
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    /// The time that a step really takes: 4 ms, 0.2 ms for each decode and 0.4 ms for each prompt
    /// token, more with longer contexts.
    fn truth(work: StepWork) -> Duration {
        let StepWork { decodes, decode_attended, prompt, prompt_attended } = work;
        let micros = 4_000.0 + 200.0 * decodes + 0.2 * decode_attended;
        Duration::from_secs_f64((micros + 400.0 * prompt + 0.05 * prompt_attended) / 1e6)
    }

    fn check(cost: &StepCost, work: StepWork, within: f64) {
        let (estimate, actual) = (cost.seconds(work), truth(work).as_secs_f64());
        let factor = (estimate / actual).max(actual / estimate);
        assert!(factor < within, "{work:?}: {estimate}, got {actual}");
    }

    /// Goal: the first step of all tells how long others take, roughly.
    #[test]
    fn one_step_is_enough_for_a_rough_estimate() {
        let mut cost = StepCost::default();
        assert!(!cost.is_known());
        cost.note(StepWork::prompt(0.0, 500.0), truth(StepWork::prompt(0.0, 500.0)));
        assert!(cost.is_known());
        check(&cost, StepWork::prompt(0.0, 100.0), 1.2);
    }

    /// Goal: from steps of any mixture, the time of others is known within a few percent, although
    /// each step takes up to a fifth more or less than it should, and it is still known after a long
    /// time without prompts.
    #[test]
    fn mixed_steps_are_predicted() {
        let mut random = SmallRng::seed_from_u64(3);
        let mut cost = StepCost::default();
        for step in 0..2_000 {
            let position = |random: &mut SmallRng| f64::from(random.random_range(0..6_000));
            let mut work = StepWork::default();
            for _ in 0..random.random_range(1..20) {
                work = work.and(StepWork::decode(position(&mut random)));
            }
            if step < 300 && step % 3 == 0 {
                let count = f64::from(random.random_range(20..400));
                work = work.and(StepWork::prompt(position(&mut random), count));
            }
            let noise = random.random_range(0.8..1.2);
            cost.note(work, truth(work).mul_f64(noise));
        }
        for decodes in [1, 4, 16] {
            let decode = StepWork::decode(3_000.0);
            let decodes = (1..decodes).fold(decode, |work, _| work.and(decode));
            check(&cost, decodes, 1.2);
            check(&cost, decodes.and(StepWork::prompt(2_000.0, 100.0)), 1.1);
            check(&cost, decodes.and(StepWork::prompt(0.0, 400.0)), 1.1);
        }
        let tokens = cost.prompt_tokens(0.05, 1_000);
        assert!((80..130).contains(&tokens), "{tokens}");
    }

    /// Goal: what changes, such as the load of other programs, is noticed after some steps.
    #[test]
    fn a_change_is_noticed() {
        let mut cost = StepCost::default();
        let work = StepWork::decode(100.0);
        (0..500).for_each(|_| cost.note(work, Duration::from_millis(4)));
        (0..150).for_each(|_| cost.note(work, Duration::from_millis(8)));
        assert!((cost.seconds(work) - 0.008).abs() < 0.001, "{}", cost.seconds(work));
    }

    /// Goal: no coefficient is negative or infinite, whatever was measured.
    #[test]
    fn no_estimate_is_negative() {
        let mut random = SmallRng::seed_from_u64(4);
        let mut cost = StepCost::default();
        cost.note(StepWork::decode(1.0), Duration::ZERO);
        cost.note(StepWork::default(), Duration::from_secs(1));
        assert!(!cost.is_known());
        for _ in 0..5_000 {
            let position = f64::from(random.random_range(0..100_000));
            let work = match random.random_range(0..2) {
                0 => StepWork::decode(position),
                _ => StepWork::prompt(position, f64::from(random.random_range(1..4_000))),
            };
            cost.note(work, Duration::from_nanos(random.random_range(1..10_000_000_000)));
            let each = cost.coefficients;
            assert!(each.iter().all(|each| each.is_finite() && *each >= 0.0), "{each:?}");
        }
    }
}
