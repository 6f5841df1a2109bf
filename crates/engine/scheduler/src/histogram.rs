//! Distributions of the times and sizes of requests and steps, in the buckets that dashboards for
//! inference engines know.
//!
//! A value is recorded with two relaxed atomic additions and without a lock. They guard no other
//! memory.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;

/// Upper bounds for the time to the first token, in seconds.
const FIRST_TOKEN: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
/// Upper bounds for the time between tokens, in seconds.
const INTER_TOKEN: [f64; 19] = [
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
];
/// Upper bounds for the phases of a request and for all of it, in seconds.
const REQUEST: [f64; 21] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];
/// Upper bounds for the tokens of a request.
const TOKENS: [f64; 22] = [
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5,
    5e5, 1e6, 2e6, 5e6, 1e7,
];
/// Upper bounds for the tokens of a step.
const STEP_TOKENS: [f64; 13] =
    [1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];

/// Counts values by buckets.
#[derive(Debug)]
pub(crate) struct Histogram {
    bounds: &'static [f64],
    /// One count per bound, for values up to it and above the one before, then one for values above
    /// all bounds.
    counts: Box<[AtomicU64]>,
    /// Sum of all values, in nanoseconds or tokens.
    sum: AtomicU64,
    /// Factor from the unit of `sum` to the unit of the bounds.
    unit: f64,
}

impl Histogram {
    fn new(bounds: &'static [f64], unit: f64) -> Histogram {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Histogram { bounds, counts, sum: AtomicU64::new(0), unit }
    }

    fn seconds(bounds: &'static [f64]) -> Histogram {
        Histogram::new(bounds, 1e-9)
    }

    fn tokens(bounds: &'static [f64]) -> Histogram {
        Histogram::new(bounds, 1.0)
    }

    /// Records a time, in a histogram of seconds.
    pub(crate) fn time(&self, time: Duration) {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.record(time.as_secs_f64(), nanoseconds);
    }

    /// Records a number of tokens, in a histogram of tokens.
    pub(crate) fn count(&self, tokens: usize) {
        self.record(tokens as f64, tokens as u64);
    }

    fn record(&self, value: f64, units: u64) {
        let bucket = self.bounds.partition_point(|&bound| bound < value);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(units, Ordering::Relaxed);
    }

    fn read(&self) -> HistogramData {
        HistogramData {
            bounds: self.bounds,
            counts: self.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect(),
            sum: self.sum.load(Ordering::Relaxed) as f64 * self.unit,
        }
    }
}

/// A copy of a distribution.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct HistogramData {
    /// Upper bounds of the buckets, ascending, in seconds or tokens. A value that equals a bound
    /// belongs to its bucket.
    pub bounds: &'static [f64],
    /// Number of values in each bucket, not cumulated, and at the end the number of values above
    /// all bounds.
    pub counts: Vec<u64>,
    /// Sum of all values, in the unit of the bounds.
    pub sum: f64,
}

impl HistogramData {
    /// Number of values.
    pub fn total(&self) -> u64 {
        self.counts.iter().sum()
    }
}

macro_rules! histograms {
    ($($(#[$doc:meta])* $name:ident: $kind:ident($bounds:ident),)+) => {
        /// The live distributions. [`EngineHistograms`] documents each of them.
        #[derive(Debug)]
        pub(crate) struct Histograms {
            $(pub(crate) $name: Histogram,)+
        }

        impl Default for Histograms {
            fn default() -> Histograms {
                Histograms { $($name: Histogram::$kind(&$bounds),)+ }
            }
        }

        impl Histograms {
            pub(crate) fn read(&self) -> EngineHistograms {
                EngineHistograms { $($name: self.$name.read(),)+ }
            }
        }

        /// Distributions since the engine started, of times in seconds and of numbers of tokens.
        /// Each request is recorded once when it has ended, also if it was canceled or failed,
        /// except for the times of its tokens, which are recorded as they are generated. For a
        /// request that never left the queue, only the time to its end is recorded.
        #[derive(Clone, Debug, PartialEq, Serialize)]
        #[non_exhaustive]
        pub struct EngineHistograms {
            $($(#[$doc])* pub $name: HistogramData,)+
        }
    };
}

histograms! {
    /// Time from submission to the first token.
    time_to_first_token: seconds(FIRST_TOKEN),
    /// Time between two tokens of a request, queuing after a preemption included.
    inter_token: seconds(INTER_TOKEN),
    /// Mean time between the tokens of a request that generated at least two.
    time_per_output_token: seconds(INTER_TOKEN),
    /// Time from submission until a request left the admission queue.
    queue_time: seconds(REQUEST),
    /// Time from leaving the admission queue to the first token.
    prefill_time: seconds(REQUEST),
    /// Time from the first token to the last.
    decode_time: seconds(REQUEST),
    /// Time from submission to the end.
    end_to_end: seconds(REQUEST),
    /// Tokens of the prompt.
    prompt_tokens: tokens(TOKENS),
    /// Generated tokens.
    generation_tokens: tokens(TOKENS),
    /// Positions that a step computed, of all requests together.
    step_tokens: tokens(STEP_TOKENS),
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a value that equals a bound belongs to the bucket below it, larger ones to the next,
    /// and the sum is in the unit of the bounds.
    #[test]
    fn values_are_counted_in_their_bucket() {
        let times = Histogram::seconds(&REQUEST);
        for milliseconds in [300, 301, 500, 8_000_000] {
            times.time(Duration::from_millis(milliseconds));
        }
        let data = times.read();
        assert_eq!(data.counts[..3], [1, 2, 0]);
        assert_eq!((data.counts.last(), data.total()), (Some(&1), 4));
        assert!((data.sum - 8_001.101).abs() < 1e-6, "{}", data.sum);
        let tokens = Histogram::tokens(&TOKENS);
        for count in [0, 1, 3] {
            tokens.count(count);
        }
        assert_eq!((&tokens.read().counts[..3], tokens.read().sum), (&[2, 0, 1][..], 4.0));
    }

    /// Goal: the bounds of every histogram ascend.
    #[test]
    fn bounds_ascend() {
        for bounds in [&FIRST_TOKEN[..], &INTER_TOKEN, &REQUEST, &TOKENS, &STEP_TOKENS] {
            assert!(bounds.is_sorted_by(|a, b| a < b), "{bounds:?}");
        }
    }
}
