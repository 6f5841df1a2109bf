//! The load of the worker. Dynamo's router compares it to choose among workers with equal prefixes.

use std::sync::Arc;
use std::time::Duration;

use dynamo_backend_common::{ComponentSnapshot, SnapshotPublisher};
use stolon::{Engine, EngineHealth, EngineStats};

use crate::events::RANK;

/// Interval at which the load is read. It is published when it has changed.
const INTERVAL: Duration = Duration::from_millis(50);

/// Publishes the load until the engine stops.
pub(crate) async fn publish(engine: Engine, publisher: Arc<SnapshotPublisher>) {
    let mut last = None;
    while engine.health() != EngineHealth::Stopped {
        let load = snapshot(&engine.stats());
        if last != Some(load) {
            publisher.publish(RANK, load);
            last = Some(load);
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// The load that the worker reports to the router. Blocks that are cached but not in use can be
/// evicted at any time, so they do not count as load.
fn snapshot(stats: &EngineStats) -> ComponentSnapshot {
    let unused = stats.blocks_free + stats.blocks_evictable;
    let used = stats.blocks_total.saturating_sub(unused) as u64;
    let total = stats.blocks_total as u64;
    ComponentSnapshot {
        kv_used_blocks: used,
        kv_total_blocks: total,
        gpu_cache_usage: if total == 0 { 0.0 } else { used as f32 / total as f32 },
        kv_cache_hit_rate: (stats.prompt_tokens > 0).then(|| stats.token_hit_rate() as f32),
        dp_rank: RANK,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: evictable blocks are not reported as used, and no request as no hit rate.
    #[test]
    fn the_load_is_what_requests_hold() {
        let mut stats = EngineStats::default();
        assert_eq!(snapshot(&stats).gpu_cache_usage, 0.0);
        (stats.blocks_total, stats.blocks_free, stats.blocks_evictable) = (100, 20, 30);
        let load = snapshot(&stats);
        assert_eq!((load.kv_used_blocks, load.kv_total_blocks), (50, 100));
        assert_eq!((load.gpu_cache_usage, load.kv_cache_hit_rate), (0.5, None));
        (stats.prompt_tokens, stats.cached_tokens) = (8, 2);
        assert_eq!(snapshot(&stats).kv_cache_hit_rate, Some(0.25));
    }
}
