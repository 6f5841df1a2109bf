//! What `stolon cache` prints of the server's replies: lines of text.

use serde_json::Value;

pub(super) fn stats(reply: &Value) -> Vec<String> {
    let (cache, stats) = (&reply["cache"], &reply["stats"]);
    let percent = |value: &Value| value.as_f64().unwrap_or(0.0) * 100.0;
    vec![
        format!(
            "blocks   {} cached ({} evictable, {} pinned), {} free, {} in use by requests",
            cache["blocks"],
            cache["blocks_evictable"],
            cache["blocks_pinned"],
            stats["blocks_free"],
            stats["blocks_reserved"]
        ),
        format!(
            "hits     {:.1} % of prompt tokens, {:.1} % of requests",
            percent(&reply["token_hit_rate"]),
            percent(&reply["request_hit_rate"])
        ),
        format!("tree     {} nodes, {} bytes", cache["nodes"], cache["index_bytes"]),
        format!(
            "removed  {} blocks to make room, {} by operators",
            stats["evictions"], stats["evictions_requested"]
        ),
        format!("requests {} running, {} waiting", stats["running"], stats["waiting"]),
    ]
}

/// The tree with each node below its parent.
pub(super) fn tree(reply: &Value) -> Vec<String> {
    let nodes = reply["nodes"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut children = vec![Vec::new(); nodes.len()];
    let mut pending = Vec::new();
    for (index, node) in nodes.iter().enumerate().rev() {
        let parent = node["parent"].as_u64().and_then(|parent| usize::try_from(parent).ok());
        match parent.and_then(|parent| children.get_mut(parent)) {
            Some(siblings) => siblings.push(index),
            None => pending.push((index, 0)),
        }
    }
    let mut lines = Vec::new();
    while let Some((index, depth)) = pending.pop() {
        let node = &nodes[index];
        let first = match &node["first_tokens"] {
            Value::Null => String::new(),
            first => format!(", begins with {first}"),
        };
        lines.push(format!(
            "{}{} tokens, {} hits, {} locks{first}",
            "  ".repeat(depth),
            node["tokens"],
            node["hits"],
            node["locks"]
        ));
        pending.extend(children[index].iter().map(|&child| (child, depth + 1)));
    }
    if lines.is_empty() { vec!["nothing is cached".to_owned()] } else { lines }
}

pub(super) fn results(reply: &Value) -> Vec<String> {
    let results = reply["results"].as_array().map(Vec::as_slice).unwrap_or_default();
    let line = |result: &Value| {
        let (cached, all) = (&result["cached_tokens"], &result["prompt_tokens"]);
        let mut line = format!("{cached} of {all} tokens are cached");
        for (name, place) in
            [("disk_tokens", "on disk"), ("object_store_tokens", "there or in the object store")]
        {
            if let Some(tokens) = result[name].as_u64() {
                line.push_str(&format!(", {tokens} are {place}"));
            }
        }
        line
    };
    results.iter().map(line).collect()
}

pub(super) fn pins(reply: &Value) -> Vec<String> {
    let pins = reply["pins"].as_array().map(Vec::as_slice).unwrap_or_default();
    let line = |pin: &Value| {
        let mut line =
            format!("pin {}: {} tokens, {} blocks", pin["id"], pin["tokens"], pin["blocks"]);
        if let Some(seconds) = pin["ends_in_seconds"].as_f64() {
            line.push_str(&format!(", ends in {seconds:.0} s"));
        }
        for name in ["reason", "description", "text"] {
            if let Some(text) = pin[name].as_str() {
                line.push_str(&format!(", {name} {text:?}"));
            }
        }
        line
    };
    let lines: Vec<String> = pins.iter().map(line).collect();
    if lines.is_empty() { vec!["there are no pins".to_owned()] } else { lines }
}

pub(super) fn sessions(reply: &Value) -> Vec<String> {
    let sessions = reply["data"].as_array().map(Vec::as_slice).unwrap_or_default();
    let line = |session: &Value| {
        let mut line = format!(
            "{}: {} of {} tokens held in {} blocks, {} turns",
            session["id"].as_str().unwrap_or_default(),
            session["held_tokens"],
            session["tokens"],
            session["held_blocks"],
            session["turns"],
        );
        line.push_str(&match session["idle_seconds"].as_f64() {
            Some(idle) => {
                let ttl = session["ttl_seconds"].as_f64().unwrap_or_default();
                format!(", idle for {idle:.0} of {ttl:.0} s")
            }
            None => ", in a turn".to_owned(),
        });
        if let Some(owner) = session["owner"].as_str() {
            line.push_str(&format!(", of {owner:?}"));
        }
        line
    };
    let lines: Vec<String> = sessions.iter().map(line).collect();
    if lines.is_empty() { vec!["there are no sessions".to_owned()] } else { lines }
}

pub(super) fn tiers(reply: &Value) -> Vec<String> {
    let mut lines = vec![format!(
        "loaded   {} tokens, instead of computing them for {:.1} s",
        reply["loaded_tokens"],
        reply["compute_seconds_saved"].as_f64().unwrap_or(0.0)
    )];
    let disk = &reply["disk"];
    if disk.is_null() {
        lines.push("disk     none (--kv-cache-dir)".to_owned());
        return lines;
    }
    let number = |name: &str| disk[name].as_u64().unwrap_or(0);
    let size = |name: &str| bytesize::ByteSize(number(name));
    lines.push(format!(
        "disk     {} of {} in {} records, {} removed to make room",
        size("bytes"),
        size("budget_bytes"),
        number("records"),
        number("records_evicted")
    ));
    lines.push(format!(
        "read     {} ({} tokens) in {:.1} s, {} records refused",
        size("read_bytes"),
        number("read_tokens"),
        number("read_micros") as f64 / 1e6,
        number("records_refused")
    ));
    lines.push(format!(
        "written  {} in {} records, {} failed, {} skipped",
        size("written_bytes"),
        number("records_written"),
        number("writes_failed"),
        number("writes_skipped")
    ));
    let store = &reply["object_store"];
    if !store.is_null() {
        let number = |name: &str| store[name].as_u64().unwrap_or(0);
        let size = |name: &str| bytesize::ByteSize(number(name));
        lines.push(format!(
            "store    {} records known, {} fetched, {} stored, {} requests failed, {} skipped",
            number("records"),
            size("fetched_bytes"),
            size("stored_bytes"),
            number("failures"),
            number("writes_skipped")
        ));
    }
    lines
}
