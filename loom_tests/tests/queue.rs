//! The limits of the admission queue: callers that arrive and leave at the same time.
#![cfg(all(loom, not(crossbeam_loom)))]

use loom::thread;
use stolon_loom_tests::explore;
use stolon_scheduler::ModelQueue;

/// Goal: callers that arrive at the same time never get more places than the queue has, and the
/// count is zero when all of them have left.
#[test]
fn callers_at_the_same_time_never_exceed_the_limit() {
    explore(3, || {
        let queue = ModelQueue::new(1, usize::MAX, usize::MAX);
        let other = {
            let queue = queue.clone();
            thread::spawn(move || queue.acquire(None, 5, 0))
        };
        let own = queue.acquire(None, 7, 0);
        let other = other.join().expect("the thread does not panic");
        assert!(own.is_none() || other.is_none(), "two requests have the only place");
        let held = [own.is_some(), other.is_some()].iter().filter(|&&held| held).count();
        let tokens = if own.is_some() { 7 } else { 0 } + if other.is_some() { 5 } else { 0 };
        assert_eq!(queue.counts(), (held, tokens, 0, 0));
        drop((own, other));
        assert_eq!(queue.counts(), (0, 0, 0, 0));
    });
}

/// Two requests arrive at the same time: one with more tokens, or pixels, than the queue may have,
/// which is accepted only while no other request waits, and one that would fit alone.
fn a_large_and_a_small_request(large: (usize, usize), small: (usize, usize)) {
    let queue = ModelQueue::new(4, 100, 100);
    let other = {
        let queue = queue.clone();
        thread::spawn(move || queue.acquire(None, small.0, small.1))
    };
    let own = queue.acquire(None, large.0, large.1);
    let other = other.join().expect("the thread does not panic");
    assert!(own.is_some() != other.is_some(), "the first one is accepted, and no other");
    drop((own, other));
    assert_eq!(queue.counts(), (0, 0, 0, 0));
}

/// Goal: a large request and another one that arrive at the same time do not both pass the limit of
/// tokens.
#[test]
fn tokens_never_exceed_the_limit() {
    explore(3, || a_large_and_a_small_request((5000, 0), (50, 0)));
}

/// Goal: the same for the limit of pixels.
#[test]
fn pixels_never_exceed_the_limit() {
    explore(3, || a_large_and_a_small_request((0, 5000), (0, 50)));
}

/// Goal: a request that leaves while another one of the same tenant arrives subtracts only itself
/// from the counts.
#[test]
fn a_request_leaves_while_another_arrives() {
    explore(3, || {
        let queue = ModelQueue::new(4, usize::MAX, usize::MAX);
        let first = queue.acquire(Some("tenant"), 5, 3);
        assert!(first.is_some());
        let leaving = thread::spawn(move || drop(first));
        let second = queue.acquire(Some("tenant"), 7, 4);
        assert!(second.is_some(), "there is room for both");
        leaving.join().expect("the thread does not panic");
        assert_eq!(queue.counts(), (1, 7, 4, 1));
        drop(second);
        assert_eq!(queue.counts(), (0, 0, 0, 0));
    });
}
