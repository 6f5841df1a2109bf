//! The bound on overtaking in a deep queue, recounted from outside: by who came, who began to run
//! and what that cost, not by the scheduler's own books.

use super::*;

/// Tokens over and above what waited.
const MORE: usize = 64;

/// A request as seen from outside.
struct Seen {
    cost: usize,
    bound: usize,
    overtaken: usize,
    started: bool,
}

/// Lets so many requests wait, then runs them all; returns the most by which any was overtaken, and
/// whether the order of starting was that of arrival.
fn run(policy: AdmissionPolicy, count: usize) -> (usize, bool) {
    let config = EngineConfig {
        policy,
        prefix_caching: false,
        max_running: 3,
        max_batched_tokens: 64,
        max_queued_requests: count,
        max_overtake_tokens: MORE,
        ..EngineConfig::default()
    };
    let mut world = World::new(4, 64, config);
    let mut seen: Vec<Seen> = Vec::new();
    let mut most = 0;
    let mut in_order = true;
    for index in 0..count as u32 {
        let len = 1 + (index as usize * 37) % 60;
        let waits = seen.iter().filter(|seen| !seen.started).map(|seen| seen.cost).sum::<usize>();
        seen.push(Seen { cost: len, bound: waits + MORE, overtaken: 0, started: false });
        world.submit(prompt(index, len), 1, None);
        note_started(&mut world, &mut seen, &mut in_order);
    }
    while world.step(false) {
        note_started(&mut world, &mut seen, &mut in_order);
        for (index, seen) in seen.iter().enumerate() {
            assert!(seen.overtaken <= seen.bound, "{policy}: request {index} of {count}");
            most = most.max(seen.overtaken);
        }
    }
    world.finish();
    (most, in_order)
}

/// Charges those that began to run to all that came before them and still wait.
fn note_started(world: &mut World, seen: &mut [Seen], in_order: &mut bool) {
    world.read(true);
    for index in 0..seen.len() {
        if seen[index].started || world.callers[index].cached.is_none() {
            continue;
        }
        seen[index].started = true;
        let cost = seen[index].cost;
        for (other, earlier) in seen[..index].iter_mut().enumerate() {
            if !earlier.started && world.callers[other].cached.is_none() {
                earlier.overtaken += cost;
                *in_order = false;
            }
        }
    }
}

/// Goal: with few or with a thousand waiting, nobody is overtaken past its bound, and at no depth
/// does a policy turn into order of arrival.
#[test]
fn the_bound_holds_at_any_depth() {
    for count in [20, 1000] {
        let (most, in_order) = run(AdmissionPolicy::Fcfs, count);
        assert!(in_order && most == 0, "{count}");
        for policy in [AdmissionPolicy::Cost, AdmissionPolicy::Priority] {
            let (most, in_order) = run(policy, count);
            assert!(!in_order, "{policy}, {count}");
            // In a deep queue far more passes a request than a bound of `MORE` alone would let.
            assert!(most > MORE * count / 20, "{policy}, {count}: {most}");
        }
    }
}
