//! The bound on overtaking in a deep queue, computed independently of the scheduler: from the order
//! of submissions and of starts, and the cost of each request.

use super::*;

/// `max_overtake_tokens`: the number that is added to the tokens that wait on arrival.
const MAX_OVERTAKE: usize = 64;

/// A request as the test sees it, in tokens.
struct Record {
    cost: usize,
    bound: usize,
    overtaken: usize,
    started: bool,
}

/// Submits `count` requests, with different priorities or without, then runs them all. Returns the
/// largest number of tokens by which one was overtaken, and whether they started in the order of
/// arrival.
fn run(policy: AdmissionPolicy, priorities: bool, count: usize) -> (usize, bool) {
    let config = EngineConfig {
        policy,
        prefix_caching: false,
        max_running: 3,
        max_batched_tokens: 64,
        max_queued_requests: count,
        max_overtake_tokens: MAX_OVERTAKE,
        ..EngineConfig::default()
    };
    let mut harness = Harness::new(4, 64, config);
    harness.priorities = priorities;
    let mut seen: Vec<Record> = Vec::new();
    let mut most = 0;
    let mut in_order = true;
    for index in 0..count as u32 {
        let len = 1 + (index as usize * 37) % 60;
        let waits = seen.iter().filter(|seen| !seen.started).map(|seen| seen.cost).sum::<usize>();
        seen.push(Record { cost: len, bound: waits + MAX_OVERTAKE, overtaken: 0, started: false });
        harness.submit(prompt(index, len), 1, None);
        note_started(&mut harness, &mut seen, &mut in_order);
    }
    while harness.step(false) {
        note_started(&mut harness, &mut seen, &mut in_order);
        for (index, seen) in seen.iter().enumerate() {
            assert!(seen.overtaken <= seen.bound, "{policy}: request {index} of {count}");
            most = most.max(seen.overtaken);
        }
    }
    harness.finish();
    (most, in_order)
}

/// Charges the cost of requests that have started to all earlier ones that still wait.
fn note_started(harness: &mut Harness, seen: &mut [Record], in_order: &mut bool) {
    harness.read(true);
    for index in 0..seen.len() {
        if seen[index].started || harness.callers[index].cached.is_none() {
            continue;
        }
        seen[index].started = true;
        let cost = seen[index].cost;
        for (other, earlier) in seen[..index].iter_mut().enumerate() {
            if !earlier.started && harness.callers[other].cached.is_none() {
                earlier.overtaken += cost;
                *in_order = false;
            }
        }
    }
}

/// Goal: with 20 and with 1000 waiting requests, no request is overtaken beyond its bound, and no
/// policy degenerates into order of arrival.
#[test]
fn the_overtaking_bound_holds_at_any_queue_depth() {
    for count in [20, 1000] {
        let (most, in_order) = run(AdmissionPolicy::Fcfs, false, count);
        assert!(in_order && most == 0, "{count}");
        for (policy, priorities) in [(AdmissionPolicy::Cost, false), (AdmissionPolicy::Fcfs, true)]
        {
            let (most, in_order) = run(policy, priorities, count);
            assert!(!in_order, "{policy}, {count}");
            // In a deep queue a request is overtaken by far more than `MAX_OVERTAKE` alone would
            // allow.
            assert!(most > MAX_OVERTAKE * count / 20, "{policy}, {count}: {most}");
        }
    }
}
