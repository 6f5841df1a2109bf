//! Turns the server's replies into the lines of text that `stolon cache` prints.

use bytesize::ByteSize;
use stolon_http::api::cache::{
    CacheResult, CacheResults, CacheStatsReply, PinInfo, PinList, TiersReply, Tree,
};
use stolon_http::api::sessions::{Session, SessionList};

pub(super) fn stats(reply: &CacheStatsReply) -> Vec<String> {
    let CacheStatsReply {
        cache,
        stats,
        kv_bytes,
        cached_kv_bytes,
        token_hit_rate,
        request_hit_rate,
    } = reply;
    let share = *cached_kv_bytes as f64 / (*kv_bytes).max(1) as f64;
    vec![
        format!(
            "blocks   {} cached ({} evictable, {} pinned), {} free, \
             {} private to requests and sessions",
            cache.blocks,
            cache.blocks_evictable,
            cache.blocks_pinned,
            stats.blocks_free,
            stats.blocks_reserved
        ),
        format!(
            "KV       {} cached, {:.1} % of {}",
            ByteSize(*cached_kv_bytes as u64),
            share * 100.0,
            ByteSize(*kv_bytes as u64)
        ),
        format!(
            "hits     {:.1} % of prompt tokens, {:.1} % of requests",
            token_hit_rate * 100.0,
            request_hit_rate * 100.0
        ),
        format!("tree     {} nodes, {} bytes", cache.nodes, cache.index_bytes),
        format!(
            "removed  {} blocks to make room, {} for quotas, {} by operators",
            stats.evictions, stats.evictions_for_quota, stats.evictions_requested
        ),
        format!("requests {} running, {} waiting", stats.running, stats.waiting),
    ]
}

/// The tree with each node below its parent.
pub(super) fn tree(reply: &Tree) -> Vec<String> {
    let mut children = vec![Vec::new(); reply.nodes.len()];
    let mut pending = Vec::new();
    for (index, node) in reply.nodes.iter().enumerate().rev() {
        match node.parent.and_then(|parent| children.get_mut(parent)) {
            Some(siblings) => siblings.push(index),
            None => pending.push((index, 0)),
        }
    }
    let mut lines = Vec::new();
    while let Some((index, depth)) = pending.pop() {
        let node = &reply.nodes[index];
        let first = match &node.first_tokens {
            None => String::new(),
            Some(first) => {
                let first: Vec<_> = first.iter().map(ToString::to_string).collect();
                format!(", begins with [{}]", first.join(", "))
            }
        };
        lines.push(format!(
            "{}{} tokens, {} hits, {} locks{first}",
            "  ".repeat(depth),
            node.tokens,
            node.hits,
            node.locks
        ));
        pending.extend(children[index].iter().map(|&child| (child, depth + 1)));
    }
    if lines.is_empty() { vec!["nothing is cached".to_owned()] } else { lines }
}

pub(super) fn results(reply: &CacheResults) -> Vec<String> {
    let line = |result: &CacheResult| {
        let mut line =
            format!("{} of {} tokens are cached", result.cached_tokens, result.prompt_tokens);
        for (tokens, place) in [
            (result.disk_tokens, "on disk"),
            (result.object_store_tokens, "there or in the object store"),
        ] {
            if let Some(tokens) = tokens {
                line.push_str(&format!(", {tokens} are {place}"));
            }
        }
        line
    };
    reply.results.iter().map(line).collect()
}

pub(super) fn pins(reply: &PinList) -> Vec<String> {
    let line = |pin: &PinInfo| {
        let mut line = format!("pin {}: {} tokens, {} blocks", pin.id, pin.tokens, pin.blocks);
        if pin.is_mark {
            line.push_str(", a mark");
        }
        if pin.demoted {
            line.push_str(", demoted");
        }
        if let Some(seconds) = pin.ends_in_seconds {
            line.push_str(&format!(", ends in {seconds:.0} s"));
        }
        for (name, text) in
            [("reason", &pin.reason), ("description", &pin.description), ("text", &pin.text)]
        {
            if let Some(text) = text {
                line.push_str(&format!(", {name} {text:?}"));
            }
        }
        line
    };
    let lines: Vec<String> = reply.pins.iter().map(line).collect();
    if lines.is_empty() { vec!["there are no pins".to_owned()] } else { lines }
}

pub(super) fn sessions(reply: &SessionList) -> Vec<String> {
    let line = |session: &Session| {
        let Session { id, tokens, held_tokens, held_blocks, turns, .. } = session;
        let mut line = format!(
            "{id}: {held_tokens} of {tokens} tokens held in {held_blocks} blocks, {turns} turns"
        );
        line.push_str(&match session.idle_seconds {
            Some(idle) => format!(", idle for {idle:.0} of {:.0} s", session.ttl_seconds),
            None => ", in a turn".to_owned(),
        });
        if let Some(owner) = &session.owner {
            line.push_str(&format!(", of {owner:?}"));
        }
        line
    };
    let lines: Vec<String> = reply.data.iter().map(line).collect();
    if lines.is_empty() { vec!["there are no sessions".to_owned()] } else { lines }
}

pub(super) fn tiers(reply: &TiersReply) -> Vec<String> {
    let mut lines = vec![format!(
        "loaded   {} tokens, instead of computing them for {:.1} s",
        reply.loaded_tokens, reply.compute_seconds_saved
    )];
    let Some(disk) = &reply.disk else {
        lines.push("disk     none (--kv-cache-dir)".to_owned());
        return lines;
    };
    lines.push(format!(
        "disk     {} of {} in {} records, {} removed to make room",
        ByteSize(disk.bytes),
        ByteSize(disk.budget_bytes),
        disk.records,
        disk.records_evicted
    ));
    lines.push(format!(
        "read     {} ({} tokens) in {:.1} s, {} records refused",
        ByteSize(disk.read_bytes),
        disk.read_tokens,
        disk.read_micros as f64 / 1e6,
        disk.records_refused
    ));
    lines.push(format!(
        "written  {} in {} records, {} failed, {} skipped",
        ByteSize(disk.written_bytes),
        disk.records_written,
        disk.writes_failed,
        disk.writes_skipped
    ));
    if let Some(store) = &reply.object_store {
        lines.push(format!(
            "store    {} records known, {} fetched, {} stored, {} requests failed, {} skipped",
            store.records,
            ByteSize(store.fetched_bytes),
            ByteSize(store.stored_bytes),
            store.failures,
            store.writes_skipped
        ));
    }
    lines
}
