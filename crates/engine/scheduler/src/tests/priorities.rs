//! Priorities in virtual time: a request with a larger priority does not wait for running ones of its
//! tenant, within the bound on overtaking.

use std::collections::HashMap;
use std::time::Duration;

use stolon_backend::{BackendSpec, StepBatch};

use crate::config::EngineConfig;
use crate::event::Event;
use crate::request::SequenceRequest;
use crate::simulation::Simulation;

fn cost(_: &StepBatch) -> Duration {
    Duration::from_millis(10)
}

type Engine = Simulation<fn(&StepBatch) -> Duration>;

fn engine(max_overtake_tokens: usize) -> Engine {
    let config = EngineConfig { max_running: 2, max_overtake_tokens, ..EngineConfig::default() };
    let spec = BackendSpec {
        vocab_size: 1_000,
        max_positions: 4_096,
        block_size: 16,
        block_count: 512,
        block_bytes: 1,
        ..BackendSpec::default()
    };
    Simulation::new(spec, config, cost as fn(&StepBatch) -> Duration).expect("valid settings")
}

/// A request of `tenant` with a prompt of 20 tokens, all of them `token`.
fn request(token: u32, answer: usize, priority: i32, tenant: &str) -> SequenceRequest {
    let mut request = SequenceRequest::new(vec![token; 20], answer);
    request.options.priority = priority;
    request.options.tenant = Some(tenant.into());
    request
}

/// Runs `steps` steps. Adds the time of the end of each request that ends.
fn run(engine: &mut Engine, steps: usize, ends: &mut HashMap<u64, Duration>) {
    for _ in 0..steps {
        for happened in engine.finish_step().expect("no actor is involved") {
            if let Event::Finished(_) = happened.event.expect("no request fails") {
                ends.insert(happened.request, engine.now());
            }
        }
    }
}

/// Goal: with all slots taken, a request with a larger priority takes the slot of the youngest one
/// with the smallest priority of its tenant, which completes later. Neither one of equal priority nor
/// one of another tenant is preempted for it, nor any if nothing may be overtaken.
#[test]
fn a_larger_priority_takes_a_slot_of_its_tenant() {
    let mut engine = engine(4_096);
    let mut ends = HashMap::new();
    let submit = |engine: &mut Engine, token, answer, priority, tenant: &str| {
        engine.submit(request(token, answer, priority, tenant)).expect("accepted")
    };
    let low = [1, 2].map(|token| submit(&mut engine, token, 500, 0, "a"));
    run(&mut engine, 20, &mut ends);
    let equal = submit(&mut engine, 3, 4, 0, "a");
    let high = submit(&mut engine, 4, 4, 100, "a");
    run(&mut engine, 10, &mut ends);
    assert!(ends.contains_key(&high) && ends.len() == 1, "{ends:?}");
    assert_eq!(engine.stats().preemptions_for_priority, 1);
    run(&mut engine, 1_000, &mut ends);
    assert!(ends[&low[0]] < ends[&low[1]] && ends.contains_key(&equal), "{ends:?}");
    assert_eq!(engine.audit().expect("a consistent accounting").running, 0);

    // Both tenants have their share of the slots.
    let others = [5, 6].map(|token| submit(&mut engine, token, 500, 0, &token.to_string()));
    run(&mut engine, 20, &mut ends);
    let high = submit(&mut engine, 7, 4, 100, "a");
    run(&mut engine, 100, &mut ends);
    assert!(!ends.contains_key(&high), "{ends:?}");
    run(&mut engine, 1_000, &mut ends);
    assert!(others.iter().all(|other| ends[other] < ends[&high]), "{ends:?}");
    assert_eq!(engine.stats().preemptions_for_priority, 1);

    let mut strict = self::engine(0);
    let low = [1, 2].map(|token| submit(&mut strict, token, 500, 0, "a"));
    run(&mut strict, 20, &mut ends);
    let high = submit(&mut strict, 7, 4, 100, "a");
    ends.clear();
    run(&mut strict, 1_000, &mut ends);
    assert!(low.iter().any(|low| ends[low] < ends[&high]), "{ends:?}");
    assert_eq!(strict.stats().preemptions_for_priority, 0);
}

/// Goal: however many requests with larger priorities come, the ones that they take the slots of are
/// overtaken by no more tokens than their bound, and complete.
#[test]
fn preempted_requests_keep_their_bound() {
    let mut engine = engine(400);
    let mut ends = HashMap::new();
    let low = [1, 2].map(|token| engine.submit(request(token, 50, 0, "a")).expect("accepted"));
    run(&mut engine, 10, &mut ends);
    let mut high = 0;
    while !low.iter().all(|low| ends.contains_key(low)) {
        // There is always one more that waits.
        while engine.stats().waiting < 4 {
            engine.submit(request(10 + high, 5, 7, "a")).expect("accepted");
            high += 1;
        }
        run(&mut engine, 1, &mut ends);
        assert!(high < 200, "they starve: {ends:?}");
    }
    // Each of the two may be overtaken by twenty prompts, and some run in the meantime.
    assert!(high > 10 && engine.stats().preemptions_for_priority > 2, "{high}");
}
