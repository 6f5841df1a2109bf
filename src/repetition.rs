//! Detects that an answer repeats itself without end, as small models do when they are decoded
//! greedily.

/// Longest repeated part that is recognized, in tokens.
const MAX_PERIOD: usize = 256;
/// Least number of tokens that have to be repetitions.
const MIN_REPEATED: usize = 256;
/// Least number of times that the repeated part has to follow itself.
const MIN_REPEATS: usize = 4;

/// Watches the tokens of one answer. Each token takes one comparison per possible period.
#[derive(Clone, Debug)]
pub(crate) struct RepetitionDetector {
    /// The latest tokens, the last one first.
    latest: Vec<u32>,
    /// For each period minus 1, the number of tokens up to now that are the same as the one a
    /// period before.
    repeated: Vec<u32>,
}

impl RepetitionDetector {
    pub(crate) fn new() -> Self {
        Self { latest: Vec::with_capacity(MAX_PERIOD), repeated: vec![0; MAX_PERIOD] }
    }

    /// Adds a token, and tells whether the answer has become a loop.
    pub(crate) fn push(&mut self, token: u32) -> bool {
        let mut longest = 0;
        for (repeated, before) in self.repeated.iter_mut().zip(&self.latest) {
            *repeated = if *before == token { *repeated + 1 } else { 0 };
            longest = longest.max(*repeated);
        }
        self.latest.truncate(MAX_PERIOD - 1);
        self.latest.insert(0, token);
        // For nearly all tokens, no period is long enough.
        longest as usize >= MIN_REPEATED
            && (1..).zip(&self.repeated).any(|(period, &repeated)| {
                repeated as usize >= MIN_REPEATED.max(MIN_REPEATS * period)
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of tokens after which a loop is detected.
    fn detected(tokens: impl IntoIterator<Item = u32>) -> Option<usize> {
        let mut detector = RepetitionDetector::new();
        tokens.into_iter().position(|token| detector.push(token)).map(|index| index + 1)
    }

    /// Goal: loops of every length are detected as soon as they are long enough, after any other
    /// tokens.
    #[test]
    fn loops_are_detected() {
        for (before, period) in [(0, 1), (700, 1), (3, 7), (1000, 64), (5, 100), (0, 256)] {
            let start = (0..before).map(|index| 10_000 + index as u32);
            let repeated = (0..period as u32).cycle().take(10_000);
            let expected = before + period + MIN_REPEATED.max(MIN_REPEATS * period);
            assert_eq!(detected(start.chain(repeated)), Some(expected), "{before} {period}");
        }
    }

    /// Goal: text that is merely alike is not a loop, and neither is a short one.
    #[test]
    fn other_text_is_not_a_loop() {
        // Items that count up, as lines of a table do.
        assert_eq!(detected((0..5000).flat_map(|number| [1, 2, 3, 4, 10 + number])), None);
        assert_eq!(detected((0..64u32).cycle().take(64 + 255)), None);
        assert_eq!(detected((0..257u32).cycle().take(20_000)), None);
        // The same number again and again, interrupted now and then.
        assert_eq!(detected((0..20_000u32).map(|index| u32::from(index % 200 == 0) * index)), None);
    }
}
