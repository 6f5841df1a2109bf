//! Figures of a benchmark run: pure functions from the measurements of each request to percentiles,
//! rates and fractions. No clock is read here.

use hdrhistogram::Histogram;
use serde::Serialize;

/// The measurements of one answered request. Times are seconds since the run began.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestRecord {
    /// When the request was submitted.
    pub sent_at: f64,
    /// When each generated token arrived, in order; never empty for an answered request. A server
    /// may send several tokens at once, which then have one time.
    pub token_times: Vec<f64>,
    /// Number of generated tokens.
    pub output_tokens: usize,
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// Prompt tokens that were read from the prefix cache.
    pub cached_tokens: usize,
}

impl RequestRecord {
    /// The same request in a run that began `seconds` earlier.
    #[must_use]
    pub fn later_by(mut self, seconds: f64) -> Self {
        self.sent_at += seconds;
        self.token_times.iter_mut().for_each(|time| *time += seconds);
        self
    }

    /// Time to first token, in milliseconds.
    #[must_use]
    pub fn ttft_ms(&self) -> Option<f64> {
        self.token_times.first().map(|first| (first - self.sent_at) * 1e3)
    }

    /// Time from submission to the last token, in milliseconds.
    #[must_use]
    pub fn latency_ms(&self) -> Option<f64> {
        self.token_times.last().map(|last| (last - self.sent_at) * 1e3)
    }

    /// Mean time of each token after the first, in milliseconds; `None` for fewer than two tokens.
    #[must_use]
    pub fn time_per_output_token_ms(&self) -> Option<f64> {
        let after_first = self.output_tokens.checked_sub(1).filter(|&count| count > 0)?;
        Some((self.latency_ms()? - self.ttft_ms()?) / after_first as f64)
    }

    /// Times between consecutive tokens, in milliseconds.
    pub fn inter_token_ms(&self) -> impl Iterator<Item = f64> + '_ {
        self.token_times.windows(2).map(|pair| (pair[1] - pair[0]) * 1e3)
    }
}

/// Significant decimal digits that a [`Distribution`] keeps of each value.
const DIGITS: u8 = 5;

/// The longest time that a [`Distribution`] can hold, in nanoseconds: one day.
const LONGEST_NS: u64 = 24 * 3_600 * 1_000_000_000;

/// A distribution of times. Times are exact to 1 ns or five significant digits, whichever is
/// coarser; those above one day count as one day.
#[derive(Clone, Debug)]
pub struct Distribution {
    /// Times in nanoseconds.
    histogram: Histogram<u32>,
}

impl Distribution {
    /// The distribution of times in milliseconds, in any order.
    pub fn of_ms(times: impl IntoIterator<Item = f64>) -> Self {
        let mut histogram = new_histogram();
        for time in times {
            histogram.saturating_record((time * 1e6).round() as u64);
        }
        Self { histogram }
    }

    /// The smallest recorded time that at least `percent` per cent of all times do not exceed, in
    /// milliseconds (the nearest-rank percentile; `percent` from 0 to 100). 0 if nothing was
    /// recorded.
    #[must_use]
    pub fn percentile_ms(&self, percent: f64) -> f64 {
        let value = self.histogram.value_at_quantile((percent / 100.0).clamp(0.0, 1.0));
        self.histogram.lowest_equivalent(value) as f64 / 1e6
    }

    /// The mean, in milliseconds. 0 if nothing was recorded.
    #[must_use]
    pub fn mean_ms(&self) -> f64 {
        self.histogram.mean() / 1e6
    }

    /// The standard deviation, in milliseconds. 0 if nothing was recorded.
    #[must_use]
    pub fn deviation_ms(&self) -> f64 {
        self.histogram.stdev() / 1e6
    }
}

fn new_histogram() -> Histogram<u32> {
    Histogram::new_with_max(LONGEST_NS, DIGITS).expect("the bounds are constants that are allowed")
}

/// Median and tail of a distribution of times, in milliseconds; zero if there are none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    /// Half of the times are at most this.
    pub p50: f64,
    /// 99 per cent of the times are at most this.
    pub p99: f64,
}

impl Spread {
    /// The spread of times in milliseconds, in any order.
    pub fn of_ms(times: impl IntoIterator<Item = f64>) -> Self {
        let times = Distribution::of_ms(times);
        Self { p50: times.percentile_ms(50.0), p99: times.percentile_ms(99.0) }
    }
}

/// The figures of one run, or of several runs of one workload together.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Requests counted: all but the first of each run.
    pub requests: usize,
    /// Time to first token.
    pub ttft_ms: Spread,
    /// Time between consecutive tokens of a request.
    pub itl_ms: Spread,
    /// Time from submission to the last token.
    pub latency_ms: Spread,
    /// Prompt and generated tokens of all requests, the first included, divided by the time from
    /// the first submission to the last token; the median of the runs.
    pub throughput_tok_s: f64,
    /// Generated tokens alone divided by the same time; the median of the runs.
    pub output_tok_s: f64,
    /// Prompt tokens of the requests counted.
    pub prompt_tokens: usize,
    /// Prompt tokens that were read from the prefix cache.
    pub cached_tokens: usize,
    /// Fraction of the requests counted that read anything from the cache, 0 to 1.
    pub hit_rate: f64,
    /// `cached_tokens / prompt_tokens`, 0 to 1: prompt tokens that were not computed again.
    pub saved_share: f64,
}

/// The median of a few values in any order: the mean of the middle two if their number is even.
/// 0 if there are none.
#[must_use]
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        count => (values[(count - 1) / 2] + values[count / 2]) / 2.0,
    }
}

/// `part / whole`, and 0 for an empty whole.
#[must_use]
pub fn share(part: usize, whole: usize) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// Tokens per second of one run, counted by `tokens`; `None` for a run without a token. The time
/// is from the first submission to the last token.
pub fn rate(run: &[RequestRecord], tokens: impl Fn(&RequestRecord) -> usize) -> Option<f64> {
    let begin = run.iter().map(|record| record.sent_at).min_by(f64::total_cmp)?;
    let end = run
        .iter()
        .filter_map(|record| record.token_times.last().copied())
        .max_by(f64::total_cmp)?;
    let total: usize = run.iter().map(tokens).sum();
    (end > begin).then(|| total as f64 / (end - begin))
}

/// Generated tokens of a request, to be used with [`rate`].
#[must_use]
pub fn output_tokens(record: &RequestRecord) -> usize {
    record.output_tokens
}

/// Prompt and generated tokens of a request, to be used with [`rate`].
#[must_use]
pub fn all_tokens(record: &RequestRecord) -> usize {
    record.prompt_tokens + record.output_tokens
}

/// Tokens per second of each run, prompt and generated tokens together; 0 for a run without one.
#[must_use]
pub fn throughputs(runs: &[Vec<RequestRecord>]) -> Vec<f64> {
    runs.iter().map(|run| rate(run, all_tokens).unwrap_or(0.0)).collect()
}

/// Summarizes repeated runs of a workload. The first request of each run only fills the cache: it
/// counts toward the throughput and nothing else.
#[must_use]
pub fn summarize(runs: &[Vec<RequestRecord>]) -> Summary {
    let counted = || runs.iter().flat_map(|run| run.iter().skip(1));
    let prompt_tokens = counted().map(|record| record.prompt_tokens).sum();
    let cached_tokens = counted().map(|record| record.cached_tokens).sum();
    let requests = counted().count();
    let hits = counted().filter(|record| record.cached_tokens > 0).count();
    Summary {
        requests,
        ttft_ms: Spread::of_ms(counted().filter_map(RequestRecord::ttft_ms)),
        itl_ms: Spread::of_ms(counted().flat_map(RequestRecord::inter_token_ms)),
        latency_ms: Spread::of_ms(counted().filter_map(RequestRecord::latency_ms)),
        throughput_tok_s: median(runs.iter().filter_map(|run| rate(run, all_tokens)).collect()),
        output_tok_s: median(runs.iter().filter_map(|run| rate(run, output_tokens)).collect()),
        prompt_tokens,
        cached_tokens,
        hit_rate: share(hits, requests),
        saved_share: share(cached_tokens, prompt_tokens),
    }
}

#[cfg(test)]
mod tests;
