//! The event channel between the scheduler and a caller: pausing and resuming, waking, closing.
#![cfg(all(loom, not(crossbeam_loom)))]

use std::task::{Context, Poll, Wake, Waker};

use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use stolon_loom_tests::{explore, must_fail};
use stolon_scheduler::planted::{Bug, plant};
use stolon_scheduler::{
    EngineError, Event, EventReceiver, EventSender, RESERVED_EVENTS, Received, TokenEvent,
    event_channel,
};

/// An event to send.
fn token(id: u32) -> Result<Event, EngineError> {
    Ok(Event::Token(TokenEvent { id: Some(id), ..TokenEvent::default() }))
}

/// A channel that holds `count` events, and has room for a step only while it holds at most one.
fn channel_with(count: u32) -> (EventSender, EventReceiver) {
    let (sender, receiver) = event_channel(RESERVED_EVENTS + 1);
    for id in 0..count {
        assert!(sender.send(token(id)));
    }
    (sender, receiver)
}

/// Records that it was called.
#[derive(Default)]
struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: std::sync::Arc<Flag>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A full channel: the sender checks for room while the reader reads everything there is.
fn pause_during_a_drain() {
    let (sender, mut receiver) = channel_with(2);
    let planner = thread::spawn(move || (sender.has_room(), sender));
    let mut resumed = false;
    let mut events = 0;
    while let Some(Received { event, resume }) = receiver.try_next() {
        assert_eq!(event, Some(token(events)), "events come in order");
        resumed |= resume;
        events += 1;
    }
    let (had_room, sender) = planner.join().expect("the thread does not panic");
    assert_eq!(events, 2, "no event is lost");
    assert!(had_room || resumed, "paused for ever");
    assert!(!had_room || !resumed, "resumed without a pause");
    // In any case, the next plan sees the room.
    assert!(sender.has_room());
}

/// Goal: a sender that finds no room while the reader drains the channel is always resumed, and one
/// that finds room is not.
#[test]
fn a_pause_during_a_drain_is_resumed() {
    explore(3, pause_during_a_drain);
}

/// Goal: the model above fails if the sender pauses because of a length that has changed meanwhile.
#[test]
fn planted_stale_length_is_caught() {
    plant(Bug::StaleLength);
    must_fail("planted_stale_length_is_caught", "paused for ever", 3, pause_during_a_drain);
}

/// Goal: a paused sender is resumed exactly once, whichever read drains the channel, and then sends
/// without loss.
#[test]
fn a_resumed_sender_continues_without_loss() {
    explore(3, || {
        let (sender, mut receiver) = channel_with(2);
        assert!(!sender.has_room());
        let reader = thread::spawn(move || {
            let reads = [receiver.try_next(), receiver.try_next()];
            (reads.map(|read| read.expect("two events are queued").resume), receiver)
        });
        let sent = sender.has_room() && sender.send(token(2));
        let (resumes, mut receiver) = reader.join().expect("the thread does not panic");
        let resumes = resumes.iter().filter(|&&resume| resume).count();
        assert_eq!(resumes, 1, "resumed exactly once");
        let next = receiver.try_next();
        assert_eq!(next.map(|read| read.event), sent.then(|| Some(token(2))));
    });
}

/// Polls the channel while another thread calls `act` with its sender. Whichever is first, the
/// reader gets `expected`: at once, or after it was woken.
fn wake_up(
    act: impl FnOnce(EventSender) -> Option<EventSender> + Send + 'static,
    expected: Option<Result<Event, EngineError>>,
) {
    let (sender, mut receiver) = channel_with(0);
    let flag = std::sync::Arc::new(Flag::default());
    let waker = Waker::from(flag.clone());
    let mut context = Context::from_waker(&waker);
    let actor = thread::spawn(move || act(sender));
    let polled = receiver.poll(&mut context);
    let sender = actor.join().expect("the thread does not panic");
    let received = match polled {
        Poll::Ready(received) => received,
        Poll::Pending => {
            assert!(flag.0.load(Ordering::Relaxed), "the wake-up was lost");
            match receiver.poll(&mut context) {
                Poll::Ready(received) => received,
                Poll::Pending => panic!("woken without a reason"),
            }
        }
    };
    assert_eq!(received.event, expected);
    drop(sender);
}

/// Goal: a reader that finds no event is woken by the next one.
#[test]
fn an_event_wakes_the_reader() {
    explore(3, || {
        let send = |sender: EventSender| {
            assert!(sender.send(token(7)));
            Some(sender)
        };
        wake_up(send, Some(token(7)));
    });
}

/// Goal: a reader that finds no event is woken when the sender is dropped.
#[test]
fn dropping_the_sender_wakes_the_reader() {
    explore(3, || {
        wake_up(
            |sender| {
                drop(sender);
                None
            },
            None,
        );
    });
}

/// Goal: dropping the receiver closes the channel. A send before that succeeds, a later one fails,
/// and no event is kept for a reader that no longer exists.
#[test]
fn dropping_the_receiver_closes_the_channel() {
    explore(3, || {
        let (sender, receiver) = channel_with(0);
        let reader = thread::spawn(move || drop(receiver));
        let first = sender.send(token(0));
        let second = sender.send(token(1));
        assert!(first || !second, "a closed channel opened again");
        reader.join().expect("the thread does not panic");
        assert!(sender.is_closed());
        assert!(!sender.send(token(2)), "sent to a dropped receiver");
        assert_eq!(sender.queued(), 0, "an event is kept that nobody reads");
    });
}
