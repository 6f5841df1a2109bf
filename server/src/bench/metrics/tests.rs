//! Percentiles and sums against values worked out by hand.

use super::*;

fn close(got: f64, expected: f64) {
    assert!((got - expected).abs() < 1e-9, "expected {expected}, got {got}");
}

fn record(sent_at: f64, token_times: &[f64], prompt: usize, cached: usize) -> RequestRecord {
    RequestRecord {
        sent_at,
        token_times: token_times.to_vec(),
        prompt_tokens: prompt,
        cached_tokens: cached,
    }
}

/// Goal: percentiles interpolate between ranks and hit both ends exactly.
#[test]
fn percentiles_interpolate_between_ranks() {
    let values = [1.0, 2.0, 3.0, 4.0];
    close(percentile(&values, 0.0), 1.0);
    close(percentile(&values, 50.0), 2.5);
    close(percentile(&values, 99.0), 3.97);
    close(percentile(&values, 100.0), 4.0);
    close(percentile(&values, 250.0), 4.0);
    close(percentile(&[7.0], 99.0), 7.0);
    close(percentile(&[], 50.0), 0.0);
}

/// Goal: the order in which values came does not matter.
#[test]
fn a_spread_sorts_for_itself() {
    let spread = Spread::of(vec![30.0, 10.0, 20.0]);
    close(spread.p50, 20.0);
    close(spread.p99, 29.8);
}

/// Goal: the first request of each run is left out of every figure but the throughput.
#[test]
fn the_first_request_counts_for_throughput_only() {
    let run = vec![
        record(0.0, &[9.0, 9.5], 1_000, 0),
        record(9.5, &[9.6, 9.7, 9.9], 1_100, 1_000),
        record(9.5, &[9.8, 10.0], 900, 0),
    ];
    let summary = summarise(&[run]);
    assert_eq!(summary.requests, 2);
    close(summary.ttft_ms.p50, 200.0);
    close(summary.itl_ms.p50, 200.0);
    close(summary.latency_ms.p50, 450.0);
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
    let summary = summarise(&runs);
    assert_eq!(summary.requests, 3);
    close(summary.throughput_tok_s, 10.5);
    close(summary.ttft_ms.p50, 2_000.0);
}

/// Goal: nothing measured gives zeros, not a panic or a NaN that JSON cannot hold.
#[test]
fn nothing_measured_gives_zeros() {
    assert_eq!(summarise(&[]), Summary::default());
    assert_eq!(summarise(&[vec![]]), Summary::default());
    let silent = summarise(&[vec![record(0.0, &[], 5, 0), record(0.0, &[], 5, 0)]]);
    assert_eq!((silent.throughput_tok_s, silent.ttft_ms.p99), (0.0, 0.0));
}
