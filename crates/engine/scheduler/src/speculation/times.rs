//! [`StepTimes`]: by how much proposed tokens make a step longer, measured.

use std::time::Duration;

/// Classes of steps by the number of their sequences: 1, 2 to 3, 4 to 7, and so on.
pub(super) const CLASSES: usize = 10;

/// Weight of a new measurement of a step without proposals.
const NEW: f64 = 0.1;

/// Weight of the earlier steps with proposals when another one is added: about fifty count.
const KEPT: f64 = 0.98;

/// The assumption before any measurement: a number of proposed tokens, and the part of a step by
/// which each of them makes it longer. A single step that other programs have delayed does not
/// change the result much.
const EXPECTED: (f64, f64) = (2.0, 0.05);

/// Number of steps without proposals from which their time counts as known.
const PLAIN_MIN: u32 = 4;

/// After this many steps with proposals, one without measures what they are compared with: contexts
/// grow, and other programs come and go.
const PLAIN_EVERY: u32 = 64;

/// Weight that the steps with proposals keep after a step without. So proposals are tried again after
/// some hundred steps where they did not pay, in case that the load of the machine has changed. All
/// trials together take less than a hundredth of the time.
const FORGOTTEN: f64 = 0.9995;

/// The part of its duration by which proposals may make a step longer that other sequences wait for.
const LONGER: f64 = 0.25;

/// The durations of steps without prompts.
#[derive(Debug, Default)]
pub(crate) struct StepTimes([Times; CLASSES]);

/// The durations of steps with about the same number of sequences, in seconds.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    /// Of a step without proposals, smoothed.
    plain: f64,
    /// Number of steps without proposals, saturating.
    plain_steps: u32,
    /// Steps with proposals since the last one without.
    since_plain: u32,
    /// By how much the last steps with proposals took longer, together.
    longer: f64,
    /// Number of tokens that were proposed in them.
    proposed: f64,
}

impl Times {
    /// By how much each proposed token makes a step longer. The sums of several steps are divided,
    /// because the times of single ones vary by more than a token takes.
    fn each(&self) -> f64 {
        let (tokens, part) = EXPECTED;
        let longer = self.longer + tokens * part * self.plain;
        (longer / (self.proposed + tokens)).max(0.0)
    }
}

/// The class of a step with this number of sequences.
pub(super) fn class(sequences: usize) -> usize {
    (sequences.max(1).ilog2() as usize).min(CLASSES - 1)
}

/// What a proposed token costs and saves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Worth {
    /// The time in seconds that a step takes per sequence: saved for each accepted token.
    pub(crate) saved: f64,
    /// The time in seconds by which each proposed token makes a step longer.
    pub(crate) cost: f64,
}

impl Worth {
    /// Whether a token that is certainly right saves time.
    pub(crate) fn may_pay(self) -> bool {
        self.saved > self.cost
    }

    /// How many of `available` tokens to propose if each is right with the probability `rate` after
    /// all before it were right, and the time in seconds that is expected to be saved.
    pub(crate) fn best_len(self, rate: f64, available: usize) -> (usize, f64) {
        let (mut count, mut saved, mut reached) = (0, 0.0, 1.0);
        while count < available {
            reached *= rate;
            let more = reached * self.saved - self.cost;
            if more <= 0.0 {
                break;
            }
            saved += more;
            count += 1;
        }
        (count, saved)
    }
}

impl StepTimes {
    /// Learns from the duration of a step with this number of sequences. `proposed` is the number of
    /// proposed tokens of all of them together.
    pub(crate) fn note(&mut self, sequences: usize, proposed: usize, time: Duration) {
        let times = &mut self.0[class(sequences)];
        let seconds = time.as_secs_f64();
        if proposed == 0 {
            if times.plain_steps == 0 {
                times.plain = seconds;
            } else {
                // A step that was delayed by other programs has a limited weight.
                let seconds = seconds.min(2.0 * times.plain);
                let weight = if times.plain_steps < PLAIN_MIN { 0.5 } else { NEW };
                times.plain += weight * (seconds - times.plain);
            }
            times.plain_steps = times.plain_steps.saturating_add(1);
            times.since_plain = 0;
            times.longer *= FORGOTTEN;
            times.proposed *= FORGOTTEN;
        } else if times.plain_steps >= PLAIN_MIN {
            times.since_plain += 1;
            let longer = (seconds - times.plain).clamp(-times.plain, 4.0 * times.plain);
            times.longer = KEPT * times.longer + longer;
            times.proposed = KEPT * times.proposed + proposed as f64;
        }
    }

    /// The worth of proposals in a step with this number of sequences; `None` if nothing should be
    /// proposed, because the time of a step without proposals is to be measured.
    pub(crate) fn worth(&self, sequences: usize) -> Option<Worth> {
        let times = &self.0[class(sequences)];
        let is_known = times.plain_steps >= PLAIN_MIN && times.since_plain < PLAIN_EVERY;
        let worth = Worth { saved: times.plain / sequences.max(1) as f64, cost: times.each() };
        is_known.then_some(worth)
    }

    /// The time in seconds by which proposals may make a step longer that several sequences wait for:
    /// a quarter of its duration, or more up to the duration `target` that every step may have.
    pub(crate) fn spare(&self, sequences: usize, target: Option<Duration>) -> f64 {
        let times = &self.0[class(sequences)];
        let target = target.map_or(0.0, |target| target.as_secs_f64() - times.plain);
        (LONGER * times.plain).max(target)
    }

    /// Number of tokens that may be proposed in this time.
    pub(crate) fn room(&self, sequences: usize, spare: f64) -> usize {
        (spare / self.0[class(sequences)].each()) as usize
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    fn ms(ms: f64) -> Duration {
        Duration::from_secs_f64(ms / 1e3)
    }

    /// Runs 2,000 steps of about 10 ms, `each_ms` longer for each proposed token, of a source whose
    /// tokens are right with the probability `rate`. Returns the mean number of proposed tokens, and
    /// the time per token of a sequence in ms, without its variation.
    fn run(sequences: usize, rate: f64, each_ms: f64) -> (f64, f64) {
        let mut times = StepTimes::default();
        let mut random = SmallRng::seed_from_u64(4);
        let (mut proposed, mut total, mut tokens) = (0, 0.0, 0.0);
        for _ in 0..2_000 {
            let worth = times.worth(sequences);
            let each = worth.map_or(0, |worth| worth.best_len(rate, 8).0);
            let count = each * sequences;
            let time = 10.0 + each_ms * count as f64;
            times.note(sequences, count, ms(time * random.random_range(0.7..1.3)));
            (proposed, total) = (proposed + each, total + time);
            tokens += (0..=each as i32).map(|accepted| rate.powi(accepted)).sum::<f64>();
        }
        (proposed as f64 / 2e3, total / tokens)
    }

    /// Goal: many tokens are proposed where they are cheap and right, few where they are dear or
    /// wrong, and where they do not pay, all trials together cost less than 2 %.
    #[test]
    fn proposals_are_made_where_they_pay() {
        for (sequences, rate, each_ms) in [(1, 0.95, 0.5), (4, 0.95, 0.2), (16, 0.95, 0.1)] {
            let (mean, _) = run(sequences, rate, each_ms);
            assert!(mean > 6.5, "{sequences}: {mean} tokens");
        }
        let (mean, _) = run(1, 0.5, 2.0);
        assert!((0.8..3.0).contains(&mean), "{mean}");
        for (sequences, rate, each_ms) in
            [(1, 0.1, 3.0), (1, 0.7, 9.0), (16, 0.5, 0.6), (4, 0.0, 0.5)]
        {
            let (mean, time) = run(sequences, rate, each_ms);
            assert!(time < 10.2, "{sequences}, {rate}, {each_ms}: {mean} tokens, {time} ms");
        }
    }

    /// Goal: steps that others wait for get longer by a quarter at most, or up to the target.
    #[test]
    fn the_room_of_a_step_is_bounded() {
        let mut times = StepTimes::default();
        (0..10).for_each(|_| times.note(4, 0, ms(10.0)));
        (0..100).for_each(|_| times.note(4, 10, ms(15.0)));
        let room = |target| times.room(4, times.spare(4, target));
        assert!((4..=6).contains(&room(None)), "{}", room(None));
        let long = room(Some(ms(20.0)));
        assert!((18..=22).contains(&long), "{long}");
        assert_eq!(room(Some(ms(5.0))), room(None));
    }

    /// Goal: a machine on which proposals become cheap is noticed, and one on which they become dear
    /// too.
    #[test]
    fn a_change_is_noticed() {
        let mut times = StepTimes::default();
        let mut step = |each_ms: f64| {
            let count = times.worth(1).map_or(0, |worth| worth.best_len(0.6, 8).0);
            times.note(1, count, ms(10.0 + each_ms * count as f64));
            count
        };
        let dear: usize = (0..500).map(|_| step(20.0)).sum();
        let cheap: usize = (0..3000).map(|_| step(0.1)).sum();
        let last: usize = (0..1000).map(|_| step(20.0)).skip(500).sum();
        assert!(dear < 50 && cheap > 3000 && last < 50, "{dear}, {cheap}, {last}");
    }
}
