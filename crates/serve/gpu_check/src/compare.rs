//! What changed between two reports of `stolon gpu-check`.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, ensure};
use serde_json::Value;

use super::report::VERSION;

/// Maximum size of a report's file in bytes. Reports have less than 100 KiB.
const BYTES_MAX: u64 = 16 << 20;
/// Smallest relative change of a measurement that is listed.
const CHANGE_MIN: f64 = 0.05;

/// Reads a report.
///
/// # Errors
/// If the file cannot be read, is too large, or is not a report of this version.
pub(super) fn read(path: &Path) -> anyhow::Result<Value> {
    let mut text = String::new();
    let file = std::fs::File::open(path);
    let mut file = file.with_context(|| format!("cannot read {}", path.display()))?.take(BYTES_MAX);
    file.read_to_string(&mut text).with_context(|| format!("cannot read {}", path.display()))?;
    ensure!(
        (text.len() as u64) < BYTES_MAX,
        "{}: expected a report of less than {BYTES_MAX} bytes",
        path.display()
    );
    let report: Value = serde_json::from_str(&text)
        .with_context(|| format!("{}: expected a report of stolon gpu-check", path.display()))?;
    let version = &report["report_version"];
    ensure!(
        *version == VERSION,
        "{}: expected a report of version {VERSION} (report_version), got {version}",
        path.display()
    );
    Ok(report)
}

/// The changes from the report `old` to the report `new`, as lines: the device and the build, checks
/// that pass or fail now, checks that only one report has, and measurements that changed by 5 % or
/// more.
pub(super) fn changes(old: &Value, new: &Value) -> Vec<String> {
    let mut lines = Vec::new();
    for (name, pointer) in [
        ("version", "/stolon_version"),
        ("features", "/features"),
        ("device", "/device/name"),
        ("driver", "/device/driver"),
        ("model", "/speed/model"),
    ] {
        let [before, after] =
            [old, new].map(|report| report.pointer(pointer).unwrap_or(&Value::Null));
        if before != after {
            lines.push(format!("{name}: {before} -> {after}"));
        }
    }
    for (name, [before, after]) in pairs([old, new].map(checks)) {
        match (before, after) {
            (Some(true), Some(false)) => lines.push(format!("FAILED now: {name}")),
            (Some(false), Some(true)) => lines.push(format!("passes now: {name}")),
            (None, Some(passed)) => {
                lines.push(format!("new, {}: {name}", if passed { "ok" } else { "FAILED" }));
            }
            (Some(_), None) => lines.push(format!("not run now: {name}")),
            (Some(_), Some(_)) | (None, None) => {}
        }
    }
    for (name, [before, after]) in pairs([old, new].map(measurements)) {
        match (before, after) {
            (Some(before), Some(after)) => {
                let change = after / before - 1.0;
                if change.abs() >= CHANGE_MIN {
                    lines.push(format!(
                        "{name}: {before:.4} -> {after:.4} ({:+.1} %)",
                        100.0 * change
                    ));
                }
            }
            (None, Some(after)) => lines.push(format!("{name}: new, {after:.4}")),
            (Some(before), None) => lines.push(format!("{name}: {before:.4} -> not measured")),
            (None, None) => {}
        }
    }
    if lines.is_empty() {
        lines.push("nothing changed by 5 % or more".to_owned());
    }
    lines
}

/// The values of both maps for each key of either.
fn pairs<T: Copy>([old, new]: [BTreeMap<String, T>; 2]) -> BTreeMap<String, [Option<T>; 2]> {
    let keys = old.keys().chain(new.keys());
    keys.map(|key| (key.clone(), [old.get(key).copied(), new.get(key).copied()])).collect()
}

/// Whether each check passed, by its kind, model and setup.
fn checks(report: &Value) -> BTreeMap<String, bool> {
    let name = |check: &Value| {
        let text = |key: &str| check[key].as_str().unwrap_or("-").to_owned();
        let mut name = format!("{} {} {}", text("kind"), text("model"), text("compute_type"));
        if let Some(kv_type) = check["kv_type"].as_str() {
            name += &format!(", KV in {kv_type}");
        }
        name += with(check);
        name
    };
    let checks = report["checks"].as_array().into_iter().flatten();
    checks.map(|check| (name(check), check["passed"] == true)).collect()
}

/// All measurements by their names, which have their units.
fn measurements(report: &Value) -> BTreeMap<String, f64> {
    let speed = &report["speed"];
    let mut all = BTreeMap::new();
    let mut add = |name: String, value: &Value, scale: f64| {
        if let Some(value) = value.as_f64() {
            all.insert(name, scale * value);
        }
    };
    add("copies, GB/s".to_owned(), &speed["copy_bytes_per_second"], 1e-9);
    for (compute, flops) in speed["product_flops"].as_object().into_iter().flatten() {
        add(format!("matrix products in {compute}, TFLOP/s"), flops, 1e-12);
    }
    for run in speed["runs"].as_array().into_iter().flatten() {
        let with = with(run);
        let list = |key: &str| run[key].as_array().into_iter().flatten();
        for one in list("prefill") {
            let name = format!("prefill of {} tokens{with}, tokens/s", one["tokens"]);
            add(name, &one["tokens_per_second"], 1.0);
        }
        for one in list("decode") {
            let (batch, context) = (&one["batch"], &one["context"]);
            let name = format!("decode of {batch} sequences of {context} tokens{with}, ms");
            add(name, &one["seconds"], 1e3);
        }
        for one in list("first_token") {
            for (state, key) in [("cold", "cold_seconds"), ("warm", "warm_seconds")] {
                let shared = &one["shared_tokens"];
                let name = format!("first token, {shared} shared tokens, {state}{with}, ms");
                add(name, &one[key], 1e3);
            }
        }
    }
    all
}

/// How a check or a run was opened, if not in the usual way.
fn with(one: &Value) -> &'static str {
    match (one["batch_invariant"] == false, one["cuda_graphs"] == true) {
        (false, false) => "",
        (false, true) => ", CUDA graphs",
        (true, false) => ", without batch invariance",
        (true, true) => ", without batch invariance, CUDA graphs",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn report(passed: bool, kind: &str, rate: f64, seconds: f64) -> Value {
        let check = |kind: &str, passed: bool| {
            json!({ "kind": kind, "model": "llama", "compute_type": "f32", "passed": passed,
                    "batch_invariant": true, "cuda_graphs": false })
        };
        json!({
            "report_version": VERSION,
            "device": { "name": "a GPU" },
            "checks": [check("cpu-parity", passed), check(kind, true)],
            "speed": {
                "copy_bytes_per_second": 2e12,
                "product_flops": { "bf16": 6e14 },
                "runs": [{
                    "batch_invariant": false, "cuda_graphs": false,
                    "prefill": [{ "tokens": 512, "tokens_per_second": rate }],
                    "decode": [{ "batch": 64, "context": 1024, "seconds": seconds }],
                    "first_token": [],
                }],
            },
        })
    }

    /// Goal: checks that pass or fail now, checks of only one report, and measurements that changed
    /// by 5 % or more are listed, and nothing else.
    #[test]
    fn changes_are_listed() {
        let old = report(true, "draws", 1000.0, 0.004);
        assert_eq!(changes(&old, &old), ["nothing changed by 5 % or more"]);
        let slightly = report(true, "draws", 1040.0, 0.0041);
        assert_eq!(changes(&old, &slightly), ["nothing changed by 5 % or more"]);
        let new = report(false, "adapters", 1100.0, 0.003);
        assert_eq!(
            changes(&old, &new),
            [
                "new, ok: adapters llama f32",
                "FAILED now: cpu-parity llama f32",
                "not run now: draws llama f32",
                "decode of 64 sequences of 1024 tokens, without batch invariance, ms: 4.0000 -> \
                 3.0000 (-25.0 %)",
                "prefill of 512 tokens, without batch invariance, tokens/s: 1000.0000 -> 1100.0000 \
                 (+10.0 %)",
            ]
        );
        assert_eq!(changes(&new, &old)[1], "passes now: cpu-parity llama f32");
    }

    /// Goal: a file that is not a report is refused with what was expected.
    #[test]
    fn other_files_are_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("old.json");
        let error = |text: &str| {
            std::fs::write(&path, text).expect("a file");
            format!("{:#}", read(&path).expect_err("not a report"))
        };
        assert!(error("no JSON").contains("expected a report of stolon gpu-check"));
        assert!(error("{}").contains("version 1 (report_version), got null"), "{}", error("{}"));
        assert!(error("{\"report_version\": 2}").contains("got 2"));
        std::fs::write(&path, report(true, "draws", 1.0, 1.0).to_string()).expect("a file");
        assert_eq!(read(&path).expect("a report")["report_version"], VERSION);
    }
}
