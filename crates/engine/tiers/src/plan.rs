//! [`plan`]: which records of a prompt are read from the tiers, or looked for there, and how long
//! its request waits for them. It is a plain function of the stored records, the speeds and the
//! policy, and does no I/O.

use std::ops::Range;
use std::time::Duration;

use crate::policy::PrefetchPolicy;

/// A read must be expected to take at most this share of the time of computing.
const WORTH_SHARE: f64 = 0.8;
/// A read is waited for this many times as long as expected and [`GRACE`] longer, or this share of
/// the time of computing if that is longer: where computing takes seconds, a read that is late
/// because the cores are busy is still faster.
const PATIENCE: u32 = 2;
const GRACE: Duration = Duration::from_millis(20);
const PATIENCE_SHARE: f64 = 0.5;
/// Number of records that are read to measure the speed of a tier that was too slow.
const MEASURED_RECORDS: usize = 4;
/// The maximum time that a read is waited for while the speed of computing is not known.
const UNMEASURED_LIMIT: Duration = Duration::from_secs(10);
/// Looking for a record in the object store takes at most this share of the time of computing the
/// positions that the store may have: most prompts are not stored anywhere, and each of them pays
/// for the look-up.
const LOOK_SHARE: f64 = 0.05;
/// Maximum time for looking for a record while the speed of computing is not known.
const UNMEASURED_LOOK: Duration = Duration::from_millis(100);

/// The parts of a prompt that are cached or stored. Records are counted from the start of the
/// prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lookup {
    /// Number of leading positions whose KV is in the pool.
    pub cached: usize,
    /// Number of the last stored records that hold a checkpoint of a recurrent state instead of KV.
    /// If there are any, the records can only be used all together.
    pub checkpoint_records: usize,
    /// With a checkpoint: number of leading positions that do not have to be computed if nothing is
    /// read.
    pub resume: usize,
    /// Positions of a record; at least 1.
    pub record_positions: usize,
    /// Number of leading records that are on the disk. Records within `cached` count, stored or
    /// not, because they are not read.
    pub on_disk: usize,
    /// Number of leading records that are on the disk or, after these, in the object store; at
    /// least `on_disk`.
    pub stored: usize,
    /// Number of leading records that are stored or may be in the object store, where another
    /// engine can have put them since it was listed; at least `stored`.
    pub possible: usize,
    /// Number of positions that the last stored record lacks to be a full record.
    pub missing: usize,
    /// Number of records for which there is memory.
    pub room: usize,
}

/// How fast a prompt is computed and read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speeds {
    /// Positions that are computed per second; `None` before any were.
    pub prefill_rate: Option<f64>,
    /// Time to read a record from the disk.
    pub disk: Duration,
    /// Time to fetch a record from the object store.
    pub store: Duration,
    /// Time until the object store says that it does not have a record.
    pub look: Duration,
}

/// Which records of a prompt are read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReadPlan {
    /// Records that are read from the disk. The first one may be cached in part.
    pub disk: Range<usize>,
    /// Records that are fetched from the object store: those that follow.
    pub store: Range<usize>,
    /// Records that are looked for in the object store after these, and fetched if they are there.
    pub look: Range<usize>,
    /// The maximum time that the plan waits until the store says whether it has the first of the
    /// records in `look`.
    pub look_limit: Duration,
    /// The maximum time that the request waits for all of them.
    pub limit: Duration,
    /// Records on the disk that are not read for the prompt, because computing is faster. They are
    /// worth reading only to learn whether the disk has become faster.
    pub slow_disk: Range<usize>,
    /// Records in the object store that are not read for the prompt, as in `slow_disk`.
    pub slow_store: Range<usize>,
}

/// Decides which records of a prompt are read, beyond those in the pool.
///
/// All stored records are read if that is expected to be faster than computing them; otherwise
/// those on the disk, if that is faster; otherwise none. If all stored records are read, the object
/// store is asked for the records after them, provided that asking takes a small share of the time
/// of computing them.
#[must_use]
pub fn plan(lookup: &Lookup, speeds: &Speeds, policy: PrefetchPolicy) -> ReadPlan {
    let longest = match policy {
        PrefetchPolicy::Timeout(longest) => longest,
        PrefetchPolicy::BestEffort | PrefetchPolicy::WaitComplete => Duration::MAX,
    };
    if longest.is_zero() {
        return ReadPlan::default();
    }
    let mut plan = plan_stored(lookup, speeds, policy);
    if plan.slow_disk.is_empty() && plan.slow_store.is_empty() {
        add_look(&mut plan, lookup, speeds, policy);
    }
    plan.limit = plan.limit.min(longest);
    plan
}

/// The plan for the records that are known to be stored.
fn plan_stored(lookup: &Lookup, speeds: &Speeds, policy: PrefetchPolicy) -> ReadPlan {
    let mut plan = ReadPlan::default();
    let first = lookup.cached / lookup.record_positions;
    let end = lookup.stored.min(first.saturating_add(lookup.room));
    let is_checkpoint = lookup.checkpoint_records > 0;
    if end <= first || is_checkpoint && end < lookup.stored {
        return plan;
    }
    let on_disk = lookup.on_disk.clamp(first, end);
    let limit_up_to = |end: usize| {
        let expected = times(speeds.disk, on_disk - first) + times(speeds.store, end - on_disk);
        let missing = if end == lookup.stored { lookup.missing } else { 0 };
        let kv = end.saturating_sub(lookup.checkpoint_records) * lookup.record_positions - missing;
        let from = if is_checkpoint { lookup.resume } else { lookup.cached };
        let positions = kv.saturating_sub(from);
        let compute = speeds.prefill_rate.map(|rate| computing_time(positions, rate));
        wait_limit(expected, compute, policy)
    };
    let (mut end, mut limit) = (end, limit_up_to(end));
    if limit.is_none() && end > on_disk {
        plan.slow_store = on_disk..end.min(on_disk + MEASURED_RECORDS);
        end = on_disk;
        // The disk alone may be faster than computing.
        limit = if end > first && !is_checkpoint { limit_up_to(end) } else { None };
    }
    match limit {
        Some(limit) => {
            plan.disk = first..on_disk;
            plan.store = on_disk..end;
            plan.limit = limit;
        }
        None => plan.slow_disk = first..on_disk.min(first + MEASURED_RECORDS),
    }
    plan
}

/// Adds the records that may be in the object store after those that are known to be stored.
fn add_look(plan: &mut ReadPlan, lookup: &Lookup, speeds: &Speeds, policy: PrefetchPolicy) {
    let first = lookup.cached / lookup.record_positions;
    let look = lookup.stored.max(first)..lookup.possible.min(first.saturating_add(lookup.room));
    // A checkpoint can only be used with the KV before it, which extends beyond the records that
    // are known.
    if look.is_empty() || lookup.checkpoint_records > 0 {
        return;
    }
    let from = (look.start * lookup.record_positions).max(lookup.cached);
    let positions = look.end * lookup.record_positions - from;
    let compute = speeds.prefill_rate.map(|rate| computing_time(positions, rate));
    let look_limit = compute.map_or(UNMEASURED_LOOK, |compute| compute.mul_f64(LOOK_SHARE));
    let fetch_limit = wait_limit(times(speeds.store, look.len()), compute, policy);
    let Some(fetch_limit) = fetch_limit.filter(|_| speeds.look <= look_limit) else { return };
    if plan.is_empty() {
        (plan.disk, plan.store) = (first..first, first..first);
    }
    plan.limit = plan.limit.saturating_add(look_limit).saturating_add(fetch_limit);
    (plan.look, plan.look_limit) = (look, look_limit);
}

/// How long a request waits for a read that is expected to take `expected`; `None` if computing is
/// faster.
fn wait_limit(
    expected: Duration,
    compute: Option<Duration>,
    policy: PrefetchPolicy,
) -> Option<Duration> {
    match compute {
        _ if policy == PrefetchPolicy::WaitComplete => Some(Duration::MAX),
        None => Some(UNMEASURED_LIMIT),
        Some(compute) if expected > compute.mul_f64(WORTH_SHARE) => None,
        Some(compute) => {
            let patience = expected.saturating_mul(PATIENCE).saturating_add(GRACE);
            Some(patience.max(compute.mul_f64(PATIENCE_SHARE)))
        }
    }
}

fn computing_time(positions: usize, rate: f64) -> Duration {
    Duration::try_from_secs_f64(positions as f64 / rate).unwrap_or(Duration::from_secs(1 << 32))
}

fn times(time: Duration, count: usize) -> Duration {
    time.saturating_mul(u32::try_from(count).unwrap_or(u32::MAX))
}

impl ReadPlan {
    /// Whether nothing is read for the prompt, or looked for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.records().is_empty()
    }

    /// The records that are read, from both tiers, and those that are looked for.
    #[must_use]
    pub fn records(&self) -> Range<usize> {
        self.disk.start..self.store.end.max(self.look.end)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BEST: PrefetchPolicy = PrefetchPolicy::BestEffort;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// 330 tokens, with five records of 64 positions on the disk and none in the pool.
    fn on_disk() -> Lookup {
        Lookup {
            cached: 0,
            checkpoint_records: 0,
            resume: 0,
            record_positions: 64,
            on_disk: 5,
            stored: 5,
            possible: 5,
            missing: 0,
            room: 100,
        }
    }

    /// Computing a record takes 64 ms, reading it 1 ms, fetching it 10 ms, looking for it 5 ms.
    fn speeds() -> Speeds {
        Speeds { prefill_rate: Some(1000.0), disk: ms(1), store: ms(10), look: ms(5) }
    }

    fn check(lookup: Lookup, disk: Range<usize>, store: Range<usize>) {
        let plan = plan(&lookup, &speeds(), BEST);
        assert_eq!((plan.disk, plan.store), (disk, store), "{lookup:?}");
    }

    /// Goal: stored records are read from the first one on that is not in the pool, as far as there
    /// is memory.
    #[test]
    fn stored_records_are_read_beyond_the_pool() {
        check(on_disk(), 0..5, 5..5);
        check(Lookup { room: 0, ..on_disk() }, 0..0, 0..0);
        check(Lookup { room: 2, ..on_disk() }, 0..2, 2..2);
        check(Lookup { cached: 128, ..on_disk() }, 2..5, 5..5);
        check(Lookup { cached: 144, ..on_disk() }, 2..5, 5..5);
        check(Lookup { cached: 320, ..on_disk() }, 0..0, 0..0);
        check(Lookup { cached: 400, ..on_disk() }, 0..0, 0..0);
        check(Lookup { stored: 9, ..on_disk() }, 0..5, 5..9);
        check(Lookup { stored: 9, room: 7, ..on_disk() }, 0..5, 5..7);
        check(Lookup { on_disk: 0, ..on_disk() }, 0..0, 0..5);
    }

    /// Goal: records that end with a checkpoint are read all together or not at all, and are worth
    /// the positions that do not have to be computed thanks to them.
    #[test]
    fn a_checkpoint_is_read_with_all_before_it() {
        let lookup = Lookup { checkpoint_records: 2, ..on_disk() };
        check(lookup, 0..5, 5..5);
        check(Lookup { cached: 192, ..lookup }, 3..5, 5..5);
        check(Lookup { on_disk: 4, ..lookup }, 0..4, 4..5);
        check(Lookup { room: 4, ..lookup }, 0..0, 0..0);
        // Three records take 192 ms to compute, five take 5 ms to read. With one record left to
        // compute, reading the others is worth it up to 51 ms.
        let at = |resume, disk| {
            let speeds = Speeds { disk: Duration::from_millis(disk), ..speeds() };
            plan(&Lookup { resume, cached: 192, ..lookup }, &speeds, BEST).records()
        };
        assert_eq!((at(128, 20), at(128, 30)), (3..5, 0..0));
        assert_eq!((at(0, 70), at(0, 80)), (3..5, 0..0));
    }

    /// Goal: records after the stored ones are looked for where the time for it is a small share of
    /// the time of computing them, and neither with a checkpoint nor with a tier that is too slow.
    #[test]
    fn records_that_may_be_stored_are_looked_for() {
        let lookup = Lookup { possible: 9, ..on_disk() };
        let look = |lookup: Lookup| plan(&lookup, &speeds(), BEST);
        // Four records take 256 ms to compute, and 12.8 ms may be spent on asking for them. Fetching
        // them takes 40 ms; a read is waited for twice as long and 20 ms longer, or half the time
        // of computing.
        let all = look(lookup);
        assert_eq!((all.disk, all.store, all.look), (0..5, 5..5, 5..9));
        assert_eq!(all.look_limit, Duration::from_micros(12_800));
        assert_eq!(all.limit, ms(160) + Duration::from_micros(12_800) + ms(128));
        let only = look(Lookup { on_disk: 0, stored: 0, ..lookup });
        assert_eq!((only.records(), only.look), (0..9, 0..9));
        assert_eq!(look(Lookup { cached: 320, ..lookup }).records(), 5..9);
        // One record takes 64 ms to compute: less than 20 times as long as asking for it.
        assert_eq!(look(Lookup { possible: 6, ..lookup }).look, 0..0);
        assert_eq!(look(Lookup { room: 5, ..lookup }).look, 0..0);
        assert_eq!(look(Lookup { checkpoint_records: 1, ..lookup }).look, 0..0);
        let with = |speeds| plan(&lookup, &speeds, BEST).look;
        assert_eq!(with(Speeds { look: ms(13), ..speeds() }), 0..0);
        assert_eq!(with(Speeds { store: ms(60), ..speeds() }), 0..0);
        assert_eq!(with(Speeds { disk: ms(60), ..speeds() }), 0..0);
        let unmeasured = Speeds { prefill_rate: None, look: ms(100), ..speeds() };
        assert_eq!(with(unmeasured), 5..9);
        assert_eq!(plan(&lookup, &speeds(), PrefetchPolicy::Timeout(ms(3))).limit, ms(3));
    }

    /// Goal: a last record that is short is worth the positions that it has.
    #[test]
    fn a_short_record_is_worth_less() {
        let lookup = |missing| Lookup { cached: 256, missing, ..on_disk() };
        let speeds = Speeds { disk: ms(40), ..speeds() };
        // A full record takes 64 ms to compute, half of one 32 ms.
        let read = |missing| plan(&lookup(missing), &speeds, BEST).records();
        assert_eq!((read(0), read(32)), (4..5, 0..0));
    }

    /// Goal: a tier that is slower than computing is not read, but named, so that its speed is
    /// measured again; the disk is read without a store that is too slow.
    #[test]
    fn slow_tiers_are_not_read() {
        let lookup = Lookup { stored: 9, ..on_disk() };
        let slow = |disk, store| plan(&lookup, &Speeds { disk, store, ..speeds() }, BEST);
        let without_store = slow(ms(1), ms(1000));
        assert_eq!((without_store.disk, without_store.store), (0..5, 5..5));
        assert_eq!((without_store.slow_disk, without_store.slow_store), (0..0, 5..9));
        let nothing = slow(ms(1000), ms(1000));
        assert!(nothing.is_empty());
        assert_eq!((nothing.slow_disk, nothing.slow_store), (0..4, 5..9));
    }

    /// Goal: the limit is twice the expected time and some grace, half of the time of computing if
    /// that is more, a fixed time before that is known, and the policy.
    #[test]
    fn limits_follow_the_policy() {
        let limit = |speeds, policy| plan(&on_disk(), &speeds, policy).limit;
        assert_eq!(limit(speeds(), BEST), ms(160));
        let slow_disk = Speeds { disk: ms(50), ..speeds() };
        assert_eq!(limit(slow_disk, BEST), ms(520));
        let unmeasured = Speeds { prefill_rate: None, ..speeds() };
        assert_eq!(limit(unmeasured, BEST), UNMEASURED_LIMIT);
        assert_eq!(limit(speeds(), PrefetchPolicy::Timeout(ms(3))), ms(3));
        assert!(plan(&on_disk(), &speeds(), PrefetchPolicy::Timeout(ms(0))).is_empty());
        let hopeless = Speeds { disk: ms(10_000), ..speeds() };
        assert_eq!(limit(hopeless, PrefetchPolicy::WaitComplete), Duration::MAX);
    }

    fn lookups() -> impl Strategy<Value = Lookup> {
        let counts = (0..40_usize, 0..40_usize, 0..40_usize);
        (0..3000_usize, 1..300_usize, counts, 0..60_usize).prop_map(
            |(cached, record_positions, (on_disk, more, unknown), room)| Lookup {
                cached,
                checkpoint_records: 0,
                resume: 0,
                record_positions,
                on_disk,
                stored: on_disk + more,
                possible: on_disk + more + unknown,
                missing: 0,
                room,
            },
        )
    }

    fn any_speeds() -> impl Strategy<Value = Speeds> {
        let time = || (0..2_000_000_u64).prop_map(Duration::from_micros);
        (proptest::option::of(1.0..1e5), time(), time(), time()).prop_map(
            |(prefill_rate, disk, store, look)| Speeds { prefill_rate, disk, store, look },
        )
    }

    fn policies() -> impl Strategy<Value = PrefetchPolicy> {
        prop_oneof![
            Just(BEST),
            Just(PrefetchPolicy::WaitComplete),
            (0..100_u64).prop_map(|limit| PrefetchPolicy::Timeout(ms(limit))),
        ]
    }

    proptest! {
        /// Goal: a plan reads consecutive records, all of them stored or perhaps so, none of them
        /// in the pool, and no more than there is memory for; and it gains time.
        #[test]
        fn plans_are_within_what_is_stored(
            lookup in lookups(), speeds in any_speeds(), policy in policies(),
        ) {
            let plan = plan(&lookup, &speeds, policy);
            let first = lookup.cached / lookup.record_positions;
            for slow in [&plan.slow_disk, &plan.slow_store] {
                prop_assert!(slow.len() <= MEASURED_RECORDS && slow.end <= lookup.stored);
            }
            if plan.is_empty() {
                return Ok(());
            }
            prop_assert_eq!(plan.disk.start, first);
            prop_assert_eq!(plan.disk.end, plan.store.start);
            prop_assert!(plan.disk.is_empty() || plan.disk.end <= lookup.on_disk);
            if !plan.look.is_empty() {
                let known = lookup.stored.max(first);
                prop_assert_eq!((plan.look.start, plan.store.end.max(known)), (known, known));
                prop_assert!(plan.look.end <= lookup.possible && speeds.look <= plan.look_limit);
            }
            prop_assert!(plan.store.end <= lookup.stored.max(first));
            prop_assert!(plan.records().len() <= lookup.room);
            prop_assert!(plan.records().end * lookup.record_positions > lookup.cached);
            if let PrefetchPolicy::Timeout(longest) = policy {
                prop_assert!(plan.limit <= longest);
            }
            let is_faster = policy != PrefetchPolicy::WaitComplete;
            if let Some(rate) = speeds.prefill_rate.filter(|_| is_faster) {
                let positions = plan.records().end * lookup.record_positions - lookup.cached;
                let fetched = (plan.store.len() + plan.look.len()) as f64;
                let reading = speeds.disk.as_secs_f64() * plan.disk.len() as f64
                    + speeds.store.as_secs_f64() * fetched
                    + plan.look_limit.as_secs_f64();
                prop_assert!(reading <= positions as f64 / rate);
            }
        }

        /// Goal: a tier that becomes slower is never read more.
        #[test]
        fn slower_tiers_are_read_less(
            lookup in lookups(), speeds in any_speeds(), policy in policies(), more in 0..1000_u64,
        ) {
            let before = plan(&lookup, &speeds, policy).records().len();
            let slower = Speeds { disk: speeds.disk + ms(more), ..speeds };
            prop_assert!(plan(&lookup, &slower, policy).records().len() <= before);
            let slower = Speeds { store: speeds.store + ms(more), ..speeds };
            prop_assert!(plan(&lookup, &slower, policy).records().len() <= before);
        }
    }
}
