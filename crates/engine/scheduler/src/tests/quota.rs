//! Quotas: which requests are admitted while those of one client are held, and when these start.

use super::*;

/// A scheduler with room for many requests.
fn harness(policy: AdmissionPolicy, max_overtake_tokens: usize) -> Harness {
    let config = EngineConfig {
        policy,
        prefix_caching: false,
        max_overtake_tokens,
        ..EngineConfig::default()
    };
    Harness::new(4, 200, config)
}

/// Submits a prompt of `len` tokens that is charged to `quota`, and returns the caller's index.
fn submit(harness: &mut Harness, quota: Option<&Quota>, len: usize, max_tokens: usize) -> usize {
    let index = harness.callers.len();
    harness.submit_request(prompt(index as u32, len), max_tokens, |request| {
        request.options.quota = quota.cloned();
    });
    index
}

fn started(harness: &mut Harness) -> Vec<usize> {
    harness.read(true);
    let callers = harness.callers.iter().enumerate();
    callers.filter(|(_, caller)| caller.cached.is_some()).map(|(index, _)| index).collect()
}

/// Goal: requests of other clients pass a request that its quota holds, however many come after it,
/// and starts when its own client's requests end.
#[test]
fn a_held_request_keeps_nobody_else_out() {
    for policy in [AdmissionPolicy::Fcfs, AdmissionPolicy::LongestPrefix, AdmissionPolicy::Cost] {
        let mut harness = harness(policy, 8);
        let (ada, bob) = (Quota::new(40, None), Quota::new(40, None));
        let first = submit(&mut harness, Some(&ada), 20, 10);
        let held = submit(&mut harness, Some(&ada), 20, 10);
        // Together they cost far more than the bound on overtaking.
        let mut others = vec![submit(&mut harness, Some(&bob), 30, 10)];
        others.extend((0..4).map(|_| submit(&mut harness, None, 30, 10)));
        let running = [&[first][..], &others].concat();
        assert_eq!(started(&mut harness), running, "{policy}");
        assert_eq!(ada.tokens_in_flight(), 60);
        while harness.step(false) && !started(&mut harness).contains(&held) {}
        assert!(harness.callers[first].end.is_some(), "{policy}: it waited for the first one");
        harness.finish();
        assert_eq!((ada.tokens_in_flight(), bob.tokens_in_flight()), (0, 0));
    }
}

/// Goal: small requests of a client do not starve its large one, which runs alone.
#[test]
fn a_large_request_is_overtaken_within_its_bound() {
    let mut harness = harness(AdmissionPolicy::Cost, 24);
    let ada = Quota::new(40, None);
    submit(&mut harness, Some(&ada), 8, 4);
    let large = submit(&mut harness, Some(&ada), 40, 10);
    for _ in 0..20 {
        submit(&mut harness, Some(&ada), 8, 4);
    }
    while !started(&mut harness).contains(&large) {
        assert!(harness.step(false), "the large request starts");
    }
    let before = started(&mut harness).len() - 2;
    assert!((1..=3).contains(&before), "{before} requests of 8 tokens overtook the large one");
    let running = |caller: &&Caller| caller.cached.is_some() && caller.end.is_none();
    assert_eq!(harness.callers.iter().filter(running).count(), 1, "it runs alone");
    harness.finish();
    assert_eq!(ada.tokens_in_flight(), 0);
}

/// Goal: a request that is canceled while it waits or runs makes room at once.
#[test]
fn cancellation_makes_room() {
    let mut harness = harness(AdmissionPolicy::Fcfs, 100);
    let ada = Quota::new(40, Some(40));
    let first = submit(&mut harness, Some(&ada), 30, 10);
    let second = submit(&mut harness, Some(&ada), 30, 10);
    let refused = harness.callers.len();
    submit(&mut harness, Some(&ada), 1, 1);
    assert_eq!(harness.callers.len(), refused, "40 tokens wait, which is the limit");
    harness.cancel(second);
    assert_eq!(ada.tokens_in_flight(), 40);
    let third = submit(&mut harness, Some(&ada), 20, 10);
    assert!(!started(&mut harness).contains(&third));
    // It is part of the step in flight, and ends with it.
    harness.cancel(first);
    harness.step(false);
    assert_eq!(started(&mut harness), [first, third]);
    assert_eq!(ada.tokens_in_flight(), 30);
    harness.finish();
    assert_eq!(ada.tokens_in_flight(), 0);
}
