//! Figures of a benchmark run: pure functions from what each request saw to percentiles, rates
//! and shares. No clock is read here.

use serde::Serialize;

/// What one finished request saw. Times are seconds since the run began.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestRecord {
    /// When it was handed to the engine.
    pub sent_at: f64,
    /// When each generated token arrived, in order; never empty for a finished request.
    pub token_times: Vec<f64>,
    /// Positions of its prompt.
    pub prompt_tokens: usize,
    /// How many of them were read from the cache.
    pub cached_tokens: usize,
}

impl RequestRecord {
    /// The same request in a run that began so many seconds earlier.
    #[must_use]
    pub fn later_by(mut self, seconds: f64) -> Self {
        self.sent_at += seconds;
        self.token_times.iter_mut().for_each(|time| *time += seconds);
        self
    }

    /// Milliseconds from sending to the first token.
    #[must_use]
    pub fn ttft_ms(&self) -> Option<f64> {
        self.token_times.first().map(|first| (first - self.sent_at) * 1e3)
    }

    /// Milliseconds from sending to the last token.
    #[must_use]
    pub fn latency_ms(&self) -> Option<f64> {
        self.token_times.last().map(|last| (last - self.sent_at) * 1e3)
    }

    /// Milliseconds between consecutive tokens.
    pub fn inter_token_ms(&self) -> impl Iterator<Item = f64> + '_ {
        self.token_times.windows(2).map(|pair| (pair[1] - pair[0]) * 1e3)
    }
}

/// Median and tail of a set of times in milliseconds; zero for an empty set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    /// Half of the values are at most this.
    pub p50: f64,
    /// 99 in a hundred are at most this.
    pub p99: f64,
}

impl Spread {
    /// The spread of `values`, in any order.
    #[must_use]
    pub fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        Self { p50: percentile(&values, 50.0), p99: percentile(&values, 99.0) }
    }
}

/// The figures of one run, or of several runs of one workload put together.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Requests counted: all but each run's first.
    pub requests: usize,
    /// Time to first token.
    pub ttft_ms: Spread,
    /// Time between consecutive tokens of a request.
    pub itl_ms: Spread,
    /// Time from sending to the last token.
    pub latency_ms: Spread,
    /// Prompt and generated tokens of all requests, the first included, over the time from the
    /// first request's sending to the last token of all; the median over the runs.
    pub throughput_tok_s: f64,
    /// Generated tokens alone over the same time; the median over the runs.
    pub output_tok_s: f64,
    /// Prompt positions of the requests counted.
    pub prompt_tokens: usize,
    /// How many of them were read from the cache.
    pub cached_tokens: usize,
    /// Share of the requests counted that read anything from the cache, 0 to 1.
    pub hit_rate: f64,
    /// `cached_tokens / prompt_tokens`, 0 to 1: prompt positions that were not computed again.
    pub saved_share: f64,
}

/// The linearly interpolated percentile of values in ascending order (`q` from 0 to 100): with n
/// values the rank is `q / 100 * (n - 1)`, as in numpy's default. Zero for no values.
#[must_use]
pub fn percentile(ascending: &[f64], q: f64) -> f64 {
    let Some(last) = ascending.len().checked_sub(1) else { return 0.0 };
    let rank = (q / 100.0).clamp(0.0, 1.0) * last as f64;
    let below = rank.floor() as usize;
    let above = rank.ceil() as usize;
    ascending[below] + (ascending[above] - ascending[below]) * (rank - below as f64)
}

/// The median of values in any order. Zero for no values.
#[must_use]
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    percentile(&values, 50.0)
}

/// `part / whole`, and 0 for an empty whole.
#[must_use]
pub fn share(part: usize, whole: usize) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// Tokens a second over one run; `None` for a run without a token.
fn rate(run: &[RequestRecord], tokens: impl Fn(&RequestRecord) -> usize) -> Option<f64> {
    let begin = run.iter().map(|record| record.sent_at).min_by(f64::total_cmp)?;
    let end = run
        .iter()
        .filter_map(|record| record.token_times.last().copied())
        .max_by(f64::total_cmp)?;
    let total: usize = run.iter().map(tokens).sum();
    (end > begin).then(|| total as f64 / (end - begin))
}

/// Tokens a second of each run, prompt and generated tokens together; 0 for a run without one.
#[must_use]
pub fn throughputs(runs: &[Vec<RequestRecord>]) -> Vec<f64> {
    let all = |record: &RequestRecord| record.prompt_tokens + record.token_times.len();
    runs.iter().map(|run| rate(run, all).unwrap_or(0.0)).collect()
}

/// Sums up repeats of a workload. Each run's first request only fills the cache: it is left out
/// of everything but the throughput, and its times are to be reported apart.
#[must_use]
pub fn summarise(runs: &[Vec<RequestRecord>]) -> Summary {
    let counted: Vec<&RequestRecord> = runs.iter().flat_map(|run| run.iter().skip(1)).collect();
    let prompt_tokens = counted.iter().map(|record| record.prompt_tokens).sum();
    let cached_tokens = counted.iter().map(|record| record.cached_tokens).sum();
    let hits = counted.iter().filter(|record| record.cached_tokens > 0).count();
    let all = |record: &RequestRecord| record.prompt_tokens + record.token_times.len();
    let output = |record: &RequestRecord| record.token_times.len();
    Summary {
        requests: counted.len(),
        ttft_ms: Spread::of(counted.iter().filter_map(|record| record.ttft_ms()).collect()),
        itl_ms: Spread::of(counted.iter().flat_map(|record| record.inter_token_ms()).collect()),
        latency_ms: Spread::of(counted.iter().filter_map(|record| record.latency_ms()).collect()),
        throughput_tok_s: median(runs.iter().filter_map(|run| rate(run, all)).collect()),
        output_tok_s: median(runs.iter().filter_map(|run| rate(run, output)).collect()),
        prompt_tokens,
        cached_tokens,
        hit_rate: share(hits, counted.len()),
        saved_share: share(cached_tokens, prompt_tokens),
    }
}

#[cfg(test)]
mod tests;
