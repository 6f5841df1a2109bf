//! Percentiles and sums against values worked out by hand.

use super::*;

fn close(got: f64, expected: f64) {
    assert!((got - expected).abs() < 1e-9, "expected {expected}, got {got}");
}

/// A time as a distribution keeps it: to five significant digits.
fn close_time(got: f64, expected: f64) {
    assert!((got - expected).abs() <= expected * 1e-5, "expected {expected}, got {got}");
}

fn record(sent_at: f64, token_times: &[f64], prompt: usize, cached: usize) -> RequestRecord {
    RequestRecord {
        sent_at,
        token_times: token_times.to_vec(),
        output_tokens: token_times.len(),
        prompt_tokens: prompt,
        cached_tokens: cached,
    }
}

/// Goal: percentiles are recorded values, by nearest rank, from the smallest to the largest, in
/// any order of the values.
#[test]
fn percentiles_are_nearest_rank() {
    let times = Distribution::of_ms([3.0, 1.0, 4.0, 2.0]);
    close_time(times.percentile_ms(0.0), 1.0);
    close_time(times.percentile_ms(50.0), 2.0);
    close_time(times.percentile_ms(51.0), 3.0);
    close_time(times.percentile_ms(99.0), 4.0);
    close_time(times.percentile_ms(100.0), 4.0);
    close_time(times.percentile_ms(250.0), 4.0);
    close_time(Distribution::of_ms([7.0]).percentile_ms(99.0), 7.0);
    close(Distribution::of_ms([]).percentile_ms(50.0), 0.0);
    let spread = Spread::of_ms([30.0, 10.0, 20.0]);
    close_time(spread.p50, 20.0);
    close_time(spread.p99, 30.0);
}

/// Goal: times from a nanosecond to an hour keep five significant digits.
#[test]
fn distributions_keep_five_digits() {
    for ms in [0.000_001, 0.001_234, 1.234, 1_234.0, 3_600_000.0] {
        close_time(Distribution::of_ms([ms]).percentile_ms(50.0), ms);
    }
}

/// Goal: the median of an even number of values lies between the middle two.
#[test]
fn medians_of_few_values() {
    close(median(vec![30.0, 10.0, 20.0]), 20.0);
    close(median(vec![4.0, 1.0, 3.0, 2.0]), 2.5);
    close(median(vec![7.0]), 7.0);
    close(median(vec![]), 0.0);
}

/// Goal: the first request of each run is left out of every figure but the throughput.
#[test]
fn the_first_request_counts_for_throughput_only() {
    let run = vec![
        record(0.0, &[9.0, 9.5], 1_000, 0),
        record(9.5, &[9.6, 9.7, 9.9], 1_100, 1_000),
        record(9.5, &[9.8, 10.0], 900, 0),
    ];
    let summary = summarize(&[run]);
    assert_eq!(summary.requests, 2);
    close_time(summary.ttft_ms.p50, 100.0);
    close_time(summary.ttft_ms.p99, 300.0);
    close_time(summary.itl_ms.p50, 200.0);
    close_time(summary.latency_ms.p50, 400.0);
    close_time(summary.latency_ms.p99, 500.0);
    assert_eq!((summary.prompt_tokens, summary.cached_tokens), (2_000, 1_000));
    close(summary.hit_rate, 0.5);
    close(summary.saved_share, 0.5);
    close(summary.throughput_tok_s, 3_007.0 / 10.0);
    close(summary.output_tok_s, 0.7);
}

/// Goal: repeats pool their times and take the median of their throughputs.
#[test]
fn repeats_are_pooled() {
    let run =
        |seconds: f64| vec![record(0.0, &[seconds / 2.0], 10, 0), record(0.0, &[seconds], 9, 8)];
    let runs = [run(1.0), run(4.0), run(2.0)];
    assert_eq!(throughputs(&runs), [21.0, 5.25, 10.5]);
    let summary = summarize(&runs);
    assert_eq!(summary.requests, 3);
    close(summary.throughput_tok_s, 10.5);
    close_time(summary.ttft_ms.p50, 2_000.0);
}

/// Goal: an empty run gives zeros, not a panic or a NaN, which JSON cannot hold.
#[test]
fn empty_runs_give_zeros() {
    assert_eq!(summarize(&[]), Summary::default());
    assert_eq!(summarize(&[vec![]]), Summary::default());
    let silent = summarize(&[vec![record(0.0, &[], 5, 0), record(0.0, &[], 5, 0)]]);
    assert_eq!((silent.throughput_tok_s, silent.ttft_ms.p99), (0.0, 0.0));
}
