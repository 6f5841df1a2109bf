//! A run's figures, and tables of them.

use crate::drive::{Record, Run};

/// The figures of one run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Summary {
    /// Requests that finished.
    pub requests: usize,
    /// Milliseconds to the first token: half of the requests saw at most this.
    pub ttft_p50: f64,
    /// 99 in a hundred saw at most this.
    pub ttft_p99: f64,
    /// Milliseconds to the last token, median.
    pub latency_p50: f64,
    /// The same, the slowest.
    pub latency_most: f64,
    /// Generated tokens a second, from the first arrival to the last token.
    pub output_rate: f64,
    /// Requests running, the mean over the time in which others waited; 0 if none ever did.
    pub running_mean: f64,
    /// Most requests running at a time.
    pub running_most: usize,
    /// Prompt tokens found in the cache, as a share of all.
    pub hit_rate: f64,
    /// Later work admitted before a request, in uncached tokens, at most.
    pub most_overtaken: usize,
    /// Requests that gave up their blocks.
    pub preemptions: u64,
}

impl Summary {
    /// Sums a run up.
    #[must_use]
    pub fn of(run: &Run) -> Summary {
        let records = &run.records;
        let begin = records.iter().map(|record| record.sent).fold(f64::INFINITY, f64::min);
        let end = records.iter().map(|record| record.last).fold(0.0, f64::max);
        let total = |part: fn(&Record) -> usize| records.iter().map(part).sum::<usize>() as f64;
        let times = |part: fn(&Record) -> f64| {
            let mut times: Vec<f64> = records.iter().map(part).collect();
            times.sort_by(f64::total_cmp);
            times
        };
        let ttft = times(|record| (record.first - record.sent) * 1e3);
        let latency = times(|record| (record.last - record.sent) * 1e3);
        let contended = || run.running.windows(2).filter(|change| change[0].2);
        let contended_for: f64 = contended().map(|change| change[1].0 - change[0].0).sum();
        let area: f64 =
            contended().map(|change| (change[1].0 - change[0].0) * change[0].1 as f64).sum();
        let span = (end - begin).max(f64::MIN_POSITIVE);
        Summary {
            requests: records.len(),
            ttft_p50: percentile(&ttft, 50.0),
            ttft_p99: percentile(&ttft, 99.0),
            latency_p50: percentile(&latency, 50.0),
            latency_most: latency.last().copied().unwrap_or(0.0),
            output_rate: total(|record| record.output) / span,
            running_mean: if contended_for > 0.0 { area / contended_for } else { 0.0 },
            running_most: run.running.iter().map(|&(_, running, _)| running).max().unwrap_or(0),
            hit_rate: total(|record| record.cached) / total(|record| record.prompt).max(1.0),
            most_overtaken: run.stats.most_overtaken_tokens,
            preemptions: run.stats.preemptions,
        }
    }

    /// The head of a table of summaries, in Markdown.
    pub const TABLE_HEAD: &str = "| | TTFT p50, ms | TTFT p99, ms | output, tokens/s | \
         running while others wait | at most | hit rate | most overtaken, tokens | preemptions |\n\
         |---|---|---|---|---|---|---|---|---|";

    /// A row of that table.
    #[must_use]
    pub fn row(&self, name: &str) -> String {
        format!(
            "| {name} | {:.0} | {:.0} | {:.0} | {:.1} | {} | {:.1} % | {} | {} |",
            self.ttft_p50,
            self.ttft_p99,
            self.output_rate,
            self.running_mean,
            self.running_most,
            self.hit_rate * 100.0,
            self.most_overtaken,
            self.preemptions,
        )
    }
}

/// The linearly interpolated percentile of values in ascending order; zero for no values.
#[must_use]
pub fn percentile(ascending: &[f64], q: f64) -> f64 {
    let Some(last) = ascending.len().checked_sub(1) else { return 0.0 };
    let rank = (q / 100.0).clamp(0.0, 1.0) * last as f64;
    let (below, above) = (rank.floor() as usize, rank.ceil() as usize);
    ascending[below] + (ascending[above] - ascending[below]) * (rank - below as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_summed_up() {
        let record = |sent: f64, first: f64, last: f64| Record {
            sent,
            first,
            last,
            prompt: 100,
            cached: 25,
            output: 10,
        };
        let run = Run {
            records: vec![record(1.0, 1.5, 2.0), record(1.0, 2.5, 5.0)],
            running: vec![(1.0, 2, true), (2.0, 1, true), (5.0, 0, false)],
            ..Run::default()
        };
        let summary = Summary::of(&run);
        assert_eq!((summary.ttft_p50, summary.latency_p50), (1000.0, 2500.0));
        assert_eq!(summary.latency_most, 4000.0);
        assert_eq!((summary.output_rate, summary.hit_rate), (5.0, 0.25));
        assert_eq!((summary.running_mean, summary.running_most), (1.25, 2));
        assert_eq!(Summary::of(&Run::default()).requests, 0);
    }
}
