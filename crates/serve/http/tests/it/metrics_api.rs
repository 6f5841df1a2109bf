//! `/metrics` and the dashboard that uses it.

use std::collections::HashMap;

use serde_json::{Value, json};

use crate::support::{Server, TINY, prompt};

const DASHBOARD: &str = include_str!("../../dashboards/stolon.json");

/// The samples of a scrape: name and labels without `model_name`, and the value.
async fn scrape(server: &Server) -> HashMap<String, f64> {
    let response = reqwest::get(server.url("/metrics")).await.expect("a response");
    assert_eq!(response.status(), 200);
    let kind = response.headers()["content-type"].to_str().expect("text").to_owned();
    assert!(kind.starts_with("application/openmetrics-text; version=1.0.0"), "{kind}");
    let text = response.text().await.expect("text");
    assert!(text.ends_with("# EOF\n"), "{text}");
    let model = format!("model_name=\"{TINY}\"");
    let samples = text.lines().filter(|line| !line.starts_with('#')).map(|line| {
        let (name, value) = line.rsplit_once(' ').expect("a value");
        let has_prefix = name.starts_with("stolon:") || name.starts_with("vllm:");
        assert!(has_prefix && name.contains(&model), "{line}");
        let name = name.replace(&format!("{model},"), "").replace(&format!("{{{model}}}"), "");
        (name, value.parse().expect("a number"))
    });
    samples.collect()
}

/// Goal: counters and distributions have the numbers of the requests that were answered, and the
/// buckets are cumulative, with the bounds that dashboards know.
#[tokio::test]
async fn metrics_count_what_happened() {
    let server = Server::tiny();
    let before = scrape(&server).await;
    assert_eq!(before["stolon:num_requests_running"], 0.0);
    assert_eq!(before["stolon:request_success_total{finished_reason=\"length\"}"], 0.0);
    let (tokens, answers, length) = (prompt(40, 1), 3, 6);
    for _ in 0..answers {
        let body = json!({"prompt": tokens, "max_tokens": length, "ignore_eos": true});
        server.complete(body).await;
    }
    server.settled_audit().await;
    let after = scrape(&server).await;
    let prompts = (answers * tokens.len()) as f64;
    for (name, expected) in [
        ("prompt_tokens_total", prompts),
        ("prefix_cache_queries_total", prompts),
        ("prefix_cache_hits_total", ((answers - 1) * tokens.len()) as f64),
        ("generation_tokens_total", (answers * length) as f64),
        ("request_success_total{finished_reason=\"length\"}", answers as f64),
        ("request_success_total{finished_reason=\"stop\"}", 0.0),
        ("time_to_first_token_seconds_count", answers as f64),
        ("inter_token_latency_seconds_count", (answers * (length - 1)) as f64),
        ("request_time_per_output_token_seconds_count", answers as f64),
        ("e2e_request_latency_seconds_count", answers as f64),
        ("request_queue_time_seconds_count", answers as f64),
        ("request_prompt_tokens_sum", prompts),
        ("request_prompt_tokens_bucket{le=\"20.0\"}", 0.0),
        ("request_prompt_tokens_bucket{le=\"50.0\"}", answers as f64),
        ("request_prompt_tokens_bucket{le=\"+Inf\"}", answers as f64),
        ("request_generation_tokens_sum", (answers * length) as f64),
        ("time_to_first_token_seconds_bucket{le=\"2560.0\"}", answers as f64),
        ("e2e_request_latency_seconds_bucket{le=\"7680.0\"}", answers as f64),
        ("kv_cache_blocks{state=\"cached\"}", 3.0),
        ("kv_cache_blocks{state=\"evictable\"}", 3.0),
        ("kv_cache_usage_perc", 0.0),
        ("num_requests_waiting", 0.0),
        ("num_preemptions_total", 0.0),
    ] {
        let name = format!("stolon:{name}");
        assert_eq!(after.get(&name), Some(&expected), "{name}");
    }
    assert!(after["stolon:time_to_first_token_seconds_sum"] > 0.0);
    assert!(after["stolon:iteration_tokens_total_sum"] > 0.0);
}

/// Goal: the metrics that routers read are there under the names by which they read them: first the
/// metrics for the endpoint picker of llm-d, and then those for the router of the vLLM production
/// stack.
#[tokio::test]
async fn routers_find_their_metrics() {
    let server = Server::with(TINY, |engine, _| engine.num_blocks(64).block_size(16));
    let tokens = prompt(40, 1);
    let body = json!({"prompt": tokens, "max_tokens": 2, "ignore_eos": true});
    server.complete(body.clone()).await;
    server.complete(body).await;
    server.settled_audit().await;
    let samples = scrape(&server).await;
    let sizes = "block_size=\"16\",num_gpu_blocks=\"64\",enable_prefix_caching=\"true\"";
    for (name, expected) in [
        ("num_requests_waiting", 0.0),
        ("num_requests_running", 0.0),
        ("kv_cache_usage_perc", 0.0),
        (&format!("cache_config_info{{{sizes}}}"), 1.0),
        ("gpu_cache_usage_perc", 0.0),
        ("gpu_prefix_cache_queries_total", 2.0 * tokens.len() as f64),
        ("gpu_prefix_cache_hits_total", tokens.len() as f64),
        ("gpu_prefix_cache_hit_rate", 0.5),
    ] {
        let name = format!("vllm:{name}");
        assert_eq!(samples.get(&name), Some(&expected), "{name}: {samples:?}");
    }
    let adapters = "max_lora=\"0\",running_lora_adapters=\"\",waiting_lora_adapters=\"\"";
    let time = samples.get(&format!("vllm:lora_requests_info{{{adapters}}}"));
    assert!(time.is_some_and(|&time| time > 1.7e9), "{samples:?}");
}

/// Goal: a refused request is counted by the limit that it exceeded.
#[tokio::test]
async fn refusals_are_counted_by_their_reason() {
    let server = Server::with(TINY, |engine, _| {
        engine.max_running(1).max_queued_requests(4).max_queued_tokens(40)
    });
    let ask = |seed, length| {
        let body = json!({"prompt": prompt(length, seed), "max_tokens": 100, "ignore_eos": true,
                          "cache_salt": seed.to_string()});
        server.send("/v1/completions", body.to_string())
    };
    let replies = futures::future::join_all((0..24).map(|seed| ask(seed, 20))).await;
    let refused = replies.iter().filter(|reply| reply.status() == 429).count();
    assert!(refused > 0, "the queue is full");
    let after = scrape(&server).await;
    let count = |reason: &str| {
        after[&format!("stolon:admission_rejections_total{{reason=\"{reason}\"}}")] as usize
    };
    assert_eq!(count("requests") + count("tokens"), refused);
    assert!(count("tokens") > 0, "two prompts of 28 tokens are more than 40");
}

/// Goal: `/metrics` is for operators, unless the operator makes it public.
#[tokio::test]
async fn metrics_follow_the_rules_of_operators() {
    let status = async |admin_key: Option<&str>, is_public, key: Option<&str>| {
        let server = Server::with(TINY, |engine, options| {
            options.access.admin_key = admin_key.map(|key| key.to_owned().into());
            options.public_metrics = is_public;
            engine
        });
        let mut request = reqwest::Client::new().get(server.url("/metrics"));
        if let Some(key) = key {
            request = request.bearer_auth(key);
        }
        // A proxy adds this header: the client is not on this machine.
        let request = request.header("x-forwarded-for", "203.0.113.9");
        request.send().await.expect("a response").status().as_u16()
    };
    assert_eq!(status(None, false, None).await, 403);
    assert_eq!(status(Some("root"), false, None).await, 401);
    assert_eq!(status(Some("root"), false, Some("root")).await, 200);
    assert_eq!(status(Some("root"), true, None).await, 200);
}

/// The names of metrics in a text.
fn names(text: &str) -> Vec<&str> {
    let part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.split("stolon:")
        .skip(1)
        .map(|rest| rest.split(|c| !part(c)).next().unwrap_or(""))
        .collect()
}

/// The texts of all queries in a dashboard.
fn queries(value: &Value) -> Vec<&str> {
    match value {
        Value::Object(object) => object
            .iter()
            .flat_map(|(name, value)| match value {
                Value::String(text) if name == "expr" || name == "query" => vec![text.as_str()],
                value => queries(value),
            })
            .collect(),
        Value::Array(list) => list.iter().flat_map(queries).collect(),
        _ => Vec::new(),
    }
}

/// Goal: every metric and every label that the dashboard names is exported.
#[tokio::test]
async fn the_dashboard_uses_exported_metrics() {
    let folder = tempfile::tempdir().expect("a folder");
    let disk = folder.path().join("kv");
    let server = Server::with(TINY, |engine, _| engine.kv_cache_dir(disk, 1 << 30));
    let samples = scrape(&server).await;
    let exported = |wanted: &str| {
        samples.keys().find(|name| {
            let name = name.split('{').next().unwrap_or_default();
            name.strip_prefix("stolon:") == Some(wanted)
        })
    };
    let dashboard: Value = serde_json::from_str(DASHBOARD).expect("JSON");
    let queries = queries(&dashboard);
    let used: Vec<&str> = queries.iter().flat_map(|query| names(query)).collect();
    assert!(used.len() > 30, "{used:?}");
    // Its metrics are there with an object store.
    let needs_store = |name: &str| name.starts_with("kv_object_store");
    for name in used {
        assert!(exported(name).is_some() || needs_store(name), "{name} is not exported");
    }
    for query in queries {
        let Some((_, label)) = query.split_once("sum by (") else { continue };
        let (label, _) = label.split_once(')').expect("the end of the label");
        let name = names(query)[0];
        let sample = exported(name).expect("an exported metric");
        assert!(sample.contains(&format!("{label}=")), "{name} has no label {label}");
    }
}

/// Goal: with a quota of namespaces, a salt keeps as many blocks as it may, and the metrics and the
/// statistics of the cache count the blocks that were evicted for its quota.
#[tokio::test]
async fn evictions_for_a_quota_are_counted() {
    let server = Server::with(TINY, |engine, _| engine.namespace_quota(3));
    server.complete(json!({"prompt": prompt(40, 0), "max_tokens": 1})).await;
    for seed in 1..=3 {
        let body = json!({"prompt": prompt(40, seed), "max_tokens": 1, "cache_salt": "flood"});
        server.complete(body).await;
    }
    server.settled_audit().await;
    let after = scrape(&server).await;
    for (name, expected) in [
        ("prefix_cache_evicted_blocks_total{reason=\"quota\"}", 2.0),
        ("prefix_cache_evicted_blocks_total{reason=\"room\"}", 0.0),
        ("kv_cache_blocks{state=\"cached\"}", 6.0),
        ("kv_cache_blocks{state=\"evictable\"}", 6.0),
    ] {
        assert_eq!(after.get(&format!("stolon:{name}")), Some(&expected), "{name}");
    }
    let (_, stats) = server.get("/v1/cache/stats").await;
    assert_eq!(stats["cache"]["evicted_for_quota"], 2, "{stats}");
}
