//! `stolon gpu-check` on the CPU, run as from a shell.

use serde_json::Value;

use crate::support::{TINY, stolon};

/// Goal: on the CPU all checks pass for all architectures, everything is measured, and the report
/// is written as JSON and as text.
#[test]
fn the_cpu_passes_all_checks() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("report.json");
    let file = path.to_str().expect("a path in UTF-8");
    let args = ["gpu-check", "--device", "cpu", "--model", TINY, "--json", file];
    let output = stolon(&args).output().expect("it starts");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(output.status.success(), "{text}");
    let report: Value =
        serde_json::from_slice(&std::fs::read(&path).expect("a report")).expect("JSON");
    assert_eq!(report["passed"], true, "{text}");
    let checks = report["checks"].as_array().expect("a list");
    let count = |kind: &str| checks.iter().filter(|check| check["kind"] == kind).count();
    // 44 architectures in f32, two of them in f16, four with keys and values of 8 bits, ten formats of
    // weights, and the model; a warm cache with and without batch invariance, of keys and values of 8
    // bits, of the formats and of the model.
    assert_eq!(count("cpu-parity"), 61);
    assert_eq!(count("warm-equals-cold"), 107);
    assert_eq!(count("blocks-reused"), 2);
    // CUDA graphs of 44 architectures and of the model; architectures with experts, convolutions or
    // recurrent layers are left out.
    assert_eq!(count("cuda-graphs"), 45);
    let left_out = |check: &&Value| check["detail"] == "left out: no step can be captured";
    assert_eq!(checks.iter().filter(left_out).count(), 22);
    for check in checks {
        let (value, limit) = (&check["value"], &check["limit"]);
        let is_within = value.as_f64() <= limit.as_f64();
        assert!(is_within && value.is_number() != left_out(&check), "{check}");
        assert!(text.contains(check["detail"].as_str().expect("a text")));
    }
    let speed = &report["speed"];
    assert!(speed["copy_bytes_per_second"].as_f64().is_some_and(|speed| speed > 0.0));
    assert_eq!(speed["errors"], Value::Array(Vec::new()));
    assert_eq!(speed["model"], format!("{TINY}@0"));
    let runs = speed["runs"].as_array().expect("a list");
    assert_eq!(runs.len(), 2);
    for run in runs {
        let prefill = &run["prefill"][0];
        assert_eq!(prefill["tokens"], 128);
        assert!(prefill["share"].as_f64().is_some_and(|share| share > 0.0));
        assert_eq!(run["decode"][1]["batch"], 4);
        let first = &run["first_token"][0];
        assert_eq!(
            (&first["shared_tokens"], &first["cached_tokens"]),
            (&1024.into(), &1024.into())
        );
        assert!(first["warm_seconds"].as_f64().is_some_and(|seconds| seconds > 0.0));
    }
    assert!(text.contains("first token with 1024 shared tokens") && text.contains("passed: 0 of"));
}

/// Goal: a device that does not exist is a report with a failed check and exit status 1.
#[cfg(not(any(feature = "cuda-core", feature = "metal")))]
#[test]
fn a_missing_device_is_reported() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("report.json");
    let file = path.to_str().expect("a path in UTF-8");
    let output = stolon(&["gpu-check", "--device", "cuda:3", "--json", file]).output();
    let output = output.expect("it starts");
    assert_eq!(output.status.code(), Some(1));
    let report: Value =
        serde_json::from_slice(&std::fs::read(&path).expect("a report")).expect("JSON");
    assert_eq!(report["passed"], false);
    assert_eq!(report["checks"][0]["kind"], "device");
    let detail = report["checks"][0]["detail"].as_str().expect("a text");
    assert!(detail.contains("cuda:3") && detail.contains("`cuda`"), "{detail}");
}
