//! `stolon bench` with small workloads. The tests check the reports, not the speed.

use serde_json::Value;

use crate::support::{TINY, fail, json_lines, succeed};

fn bench(args: &[&str]) -> Value {
    let output = succeed(&[&["bench"], args, &["--json", "--model", TINY]].concat());
    let mut objects = json_lines(&output);
    assert_eq!(objects.len(), 1, "one object and nothing else: {output}");
    objects.remove(0)
}

const SMALL: [&str; 9] =
    ["prefix", "--requests", "8", "--shared", "256", "--unique-min", "8", "--unique-max", "24"];

/// Goal: the report has every figure for both settings and both rates; only the run with caching
/// has cached tokens.
#[test]
fn prefix_reports_both_settings() {
    let report = bench(&[&SMALL[..], &["--output-tokens", "4", "--num-blocks", "1024"]].concat());
    for figures in [&report, &report["as_fast_as_possible"]] {
        for side in ["off", "on"] {
            let side = &figures[side];
            for spread in ["ttft_ms", "itl_ms", "latency_ms"] {
                let (p50, p99) = (&side[spread]["p50"], &side[spread]["p99"]);
                assert!(p50.as_f64() > Some(0.0) && p50.as_f64() <= p99.as_f64(), "{side}");
            }
            assert!(side["throughput_tok_s"].as_f64() > Some(0.0));
            assert_eq!(side["requests"], 7, "the first is not counted");
            let prompt = side["prompt_tokens"].as_u64().expect("a count");
            assert!((7 * 264..=7 * 280).contains(&prompt), "{side}");
        }
        assert_eq!(figures["off"]["cached_tokens"], 0);
        assert!(figures["first"]["on"]["ttft_ms"].as_f64() > Some(0.0));
    }
    let extra = ["--output-tokens", "2", "--rate", "inf", "--after-first"];
    let warmed = bench(&[&SMALL[..], &extra].concat());
    assert_eq!(warmed["on"]["cached_tokens"], 7 * 256, "{warmed}");
    assert_eq!(warmed["on"]["hit_rate"], 1.0);
    assert!(warmed["as_fast_as_possible"].is_null());
}

/// Goal: with `--distinct` nothing is reused, and the prompts have the same lengths.
#[test]
fn prefix_with_nothing_shared_reuses_nothing() {
    let extra = ["--distinct", "--rate", "inf", "--repeats", "2", "--output-tokens", "2"];
    let report = bench(&[&SMALL[..], &extra].concat());
    assert_eq!(report["on"]["cached_tokens"], 0, "{report}");
    assert_eq!(report["on"]["requests"], 14);
    assert_eq!(report["on"]["prompt_tokens"], report["off"]["prompt_tokens"]);
}

/// Goal: a soak test with cancellations and a small KV pool ends with every block accounted for,
/// and reports its measurements.
#[test]
fn soak_accounts_for_every_block() {
    let report = bench(&[
        "soak",
        "--requests",
        "200",
        "--max-prompt",
        "200",
        "--max-output",
        "12",
        "--num-blocks",
        "64",
        "--cancel-percent",
        "25",
    ]);
    assert_eq!(report["requests"], 200);
    assert!(report["canceled"].as_u64() > Some(10), "{report}");
    assert_eq!(report["audit"]["blocks_reserved"], 0);
    assert_eq!(report["audit"]["blocks_total"], 64);
    if cfg!(target_os = "linux") {
        assert_eq!(report["samples"].as_array().map(Vec::len), Some(10));
    }
}

/// Goal: every request is either answered or refused, and at several times the capacity some are
/// refused.
#[test]
fn load_accounts_for_every_request() {
    let report = bench(&[
        "load",
        "--clients",
        "4",
        "--each",
        "4",
        "--loads",
        "0.5,8",
        "--seconds",
        "0.5",
        "--max-queued",
        "4",
        "--max-running",
        "2",
        "--output-tokens",
        "8",
        "--num-blocks",
        "256",
    ]);
    assert!(report["speedup"].as_f64() > Some(0.0), "{report}");
    let levels = report["levels"].as_array().expect("a list");
    assert_eq!(levels.len(), 2);
    for level in levels {
        let count = |name: &str| level[name].as_u64().expect("a count");
        assert_eq!(count("sent"), count("finished") + count("rejected"), "{level}");
        assert!(level["goodput_tok_s"].as_f64() > Some(0.0), "{level}");
    }
    assert!(levels[1]["rejected"].as_u64() > Some(0), "{report}");
}

/// Goal: a setting that the comparison would ignore is refused.
#[test]
fn the_prefix_benchmark_refuses_no_prefix_caching() {
    let message = fail(&["bench", "prefix", "--model", TINY, "--no-prefix-caching"]);
    assert!(message.contains("--no-prefix-caching"), "{message}");
}

/// Goal: every turn of all conversations is reported for each tier, and the pool alone has nothing
/// for a first turn; sizes that fit nothing are refused with the numbers.
#[test]
fn tiers_reports_every_turn() {
    let size = ["--clients", "8", "--rounds", "2", "--input-tokens", "64", "--output-tokens", "4"];
    let rest = ["--concurrency", "2", "--prefix", "128", "--block-size", "16"];
    let report = bench(&[&["tiers"], &size[..], &rest].concat());
    let tiers = report["tiers"].as_array().expect("an array");
    let names: Vec<&Value> = tiers.iter().map(|tier| &tier["tier"]).collect();
    assert_eq!(names, ["pool", "disk"], "{report}");
    for tier in tiers {
        let turns = tier["turns"].as_array().expect("an array");
        assert_eq!(turns.len(), 2, "{report}");
        for figures in turns.iter().chain([&tier["all"]]) {
            assert!(figures["ttft_ms"]["p50"].as_f64() > Some(0.0), "{report}");
        }
        assert!(tier["throughput_tok_s"].as_f64() > Some(0.0), "{report}");
    }
    assert_eq!(tiers[0]["turns"][0]["cached_share"], 0.0, "{report}");
    for name in ["cold_ms", "warm_ms", "restarted_ms"] {
        assert!(report["restart"][name].as_f64() > Some(0.0), "{report}");
    }
    let message =
        fail(&["bench", "tiers", "--model", TINY, "--clients", "2", "--concurrency", "2"]);
    assert!(message.contains("2880 tokens, got 720"), "{message}");
    let message = fail(&["bench", "tiers", "--model", TINY, "--num-blocks", "9"]);
    assert!(message.contains("--working-set"), "{message}");
}
