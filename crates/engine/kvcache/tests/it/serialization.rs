//! Serialization, so that events can leave the process and a remote router can rebuild the index.

use std::fmt::Debug;

use serde::{Serialize, de::DeserializeOwned};
use stolon_kvcache::{BlockId, EvictedBlock, Namespace, PrefixCache};

fn check<T: Serialize + DeserializeOwned + PartialEq + Debug>(value: &T) {
    let json = serde_json::to_string(value).expect("serializable");
    assert_eq!(serde_json::from_str::<T>(&json).expect("the same type"), *value, "{json}");
}

/// Goal: events, snapshots and what evictions return are the same after they were sent as JSON, in
/// the base namespace and in others.
#[test]
fn values_survive_json() {
    let mut cache = PrefixCache::new(1, 8).expect("a valid block size");
    let events = cache.subscribe(10).expect("a capacity");
    for namespace in [Namespace::default(), Namespace::builder().salt("tenant").build()] {
        check(&namespace);
        let mut sequence = cache.begin(&namespace, &[1, 2]).expect("free blocks");
        assert_eq!(cache.commit(&mut sequence, 2), Ok(2));
        cache.pin(&namespace, &[1]).expect("cached");
    }
    let snapshot = serde_json::to_string(&cache.snapshot()).expect("serializable");
    let rebuilt: stolon_kvcache::CacheSnapshot = serde_json::from_str(&snapshot).expect("the same");
    assert_eq!(rebuilt.events, cache.snapshot().events);
    cache.pins().iter().for_each(check);
    check::<Vec<EvictedBlock>>(&cache.make_room(8));
    check::<Vec<EvictedBlock>>(&cache.flush());
    let events = events.drain();
    assert_eq!(events.len(), 5, "two commits, two evictions and a flush");
    events.iter().for_each(check);
    check(&BlockId(7));
    check(&cache.tree_counts());
    check(&cache.pool_counts());
    check(cache.stats());
}
