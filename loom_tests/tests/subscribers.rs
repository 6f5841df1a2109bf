//! The queue between the writer of a tree and a subscriber to its events: waking and closing.
#![cfg(all(loom, not(crossbeam_loom)))]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use loom::thread;
use stolon_kvcache::{CacheEvent, EventLog, NumberedEvent};
use stolon_loom_tests::explore;

/// Records that it was called.
#[derive(Default)]
struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Flag>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Polls a subscription while another thread calls `act` with its log. Whichever is first, the
/// subscriber gets an event if `act` reports one, and then the end if it drops the log: at once, or
/// after it was woken.
fn subscriber(act: fn(EventLog) -> Option<EventLog>, is_event: bool) {
    let mut log = EventLog::default();
    let mut receiver = log.subscribe(1);
    let flag = Arc::new(Flag::default());
    let waker = Waker::from(Arc::clone(&flag));
    let mut context = Context::from_waker(&waker);
    let actor = thread::spawn(move || act(log));
    let first = receiver.poll_next(&mut context);
    let log = actor.join().expect("the thread does not panic");
    let first = match first {
        Poll::Ready(first) => Poll::Ready(first),
        Poll::Pending => {
            assert!(flag.0.load(Ordering::Relaxed), "the wake-up was lost");
            receiver.poll_next(&mut context)
        }
    };
    let number = |polled: Poll<Option<NumberedEvent>>| polled.map(|event| Some(event?.number));
    let end = if log.is_some() { Poll::Pending } else { Poll::Ready(None) };
    if is_event {
        assert_eq!(number(first), Poll::Ready(Some(1)), "the event was lost");
        assert_eq!(number(receiver.poll_next(&mut context)), end);
    } else {
        assert_eq!(number(first), end);
    }
}

fn report(mut log: EventLog) -> Option<EventLog> {
    log.report(|| CacheEvent::Cleared);
    Some(log)
}

/// Goal: a subscriber that finds no event is woken by the next one.
#[test]
fn an_event_wakes_the_subscriber() {
    explore(3, || subscriber(report, true));
}

/// Goal: a subscriber that finds no event is woken when the log is dropped.
#[test]
fn dropping_the_log_wakes_the_subscriber() {
    explore(3, || subscriber(|_| None, false));
}

/// Goal: a subscriber gets the last event before the end.
#[test]
fn the_last_event_comes_before_the_end() {
    explore(3, || subscriber(|log| report(log).and(None), true));
}
