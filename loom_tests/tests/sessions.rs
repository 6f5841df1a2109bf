//! The end of a session's turn. The scheduler and the caller's stream both hold the turn, and the
//! one that learns of the end first ends it.
//!
//! The scheduler runs on a separate thread here, as in the engine. The other thread is the caller's:
//! the stream that reads the answer, the next turn, or a flush.
#![cfg(all(loom, not(crossbeam_loom)))]

use std::sync::Arc;
use std::time::{Duration, Instant};

use loom::thread;
use stolon_kvcache::{Namespace, PrefixLease, TreeReader, TreeWriter};
use stolon_loom_tests::{explore, must_fail, put, tree};
use stolon_scheduler::planted::{Bug, plant};
use stolon_scheduler::{
    NewSession, SessionContent, SessionId, SessionInfo, Sessions, Turn, TurnEnd,
};

/// What the scheduler has computed: more than the caller reads if a stop string ends the answer.
const COMPUTED: [u32; 3] = [1, 2, 3];
/// What the caller has read.
const READ: [u32; 2] = [1, 2];
/// The turn after it.
const NEXT: [u32; 4] = [1, 2, 4, 5];

/// A session, and the tree that has the prefixes of its turns.
struct Engine {
    sessions: Arc<Sessions>,
    id: SessionId,
    tree: TreeWriter,
    _reader: TreeReader,
}

impl Engine {
    fn new() -> Engine {
        let (mut tree, _reader) = tree();
        put(&mut tree, &COMPUTED, 0);
        put(&mut tree, &NEXT, 3);
        let sessions = Arc::new(Sessions::new(8, 8, Duration::from_secs(600)));
        let id = SessionId::new("conversation");
        let new = NewSession { id: id.clone(), namespace: Namespace::default(), ttl: None };
        sessions.open(new, Instant::now()).expect("the id is free");
        Engine { sessions, id, tree, _reader }
    }

    /// Begins a turn.
    fn turn(&self) -> Arc<Turn> {
        let turn = self.sessions.begin_turn(&self.id, &Namespace::default(), Instant::now());
        turn.expect("the session is idle")
    }

    /// The lease of a request with these tokens.
    fn lease(&mut self, tokens: &[u32]) -> PrefixLease {
        self.tree.acquire(&Namespace::default(), tokens)
    }

    /// Begins a turn that the scheduler completes on its own thread.
    fn turn_at_its_end(&mut self) -> (Arc<Turn>, thread::JoinHandle<()>) {
        let (turn, lease) = (self.turn(), self.lease(&COMPUTED));
        let scheduler = Arc::clone(&turn);
        let completed = thread::spawn(move || {
            complete(&scheduler, &COMPUTED);
            scheduler.keep(lease);
        });
        (turn, completed)
    }

    /// The session after `scheduler` has ended, and its tokens. What it holds is all that is locked
    /// in the tree, and nothing is once the session is closed.
    fn settle(mut self, scheduler: thread::JoinHandle<()>) -> (SessionInfo, Vec<u32>) {
        scheduler.join().expect("the thread does not panic");
        let now = Instant::now();
        let info = self.sessions.info(&self.id, now).expect("the session is open");
        let content = self.sessions.content(&self.id, now).expect("the session is idle");
        assert_eq!(self.tree.counts().locked, info.held_blocks, "a lease was lost or kept twice");
        assert!(self.sessions.close(&self.id, now));
        assert_eq!(self.tree.counts().locked, 0, "a closed session holds something");
        (info, content.tokens.to_vec())
    }
}

fn complete(turn: &Turn, tokens: &[u32]) {
    let tokens = Arc::new(tokens.to_vec());
    let content = SessionContent { tokens, ..SessionContent::default() };
    let end = TurnEnd { content, prompt_tokens: 1, cached_tokens: 0 };
    turn.complete(end, Instant::now());
}

/// Goal: in whichever order the two end the turn, it counts once, and the session has the tokens
/// that the caller read.
#[test]
fn both_ends_complete_a_turn() {
    explore(3, || {
        let mut engine = Engine::new();
        let (turn, scheduler) = engine.turn_at_its_end();
        complete(&turn, &READ);
        drop(turn);
        let (info, tokens) = engine.settle(scheduler);
        assert_eq!((info.turns, info.held_blocks, tokens), (1, 3, READ.to_vec()));
    });
}

/// Goal: a turn that is cancelled while it completes is either complete, with its hold, or has no
/// effect.
#[test]
fn a_cancel_meets_the_end_of_its_turn() {
    explore(3, || {
        let mut engine = Engine::new();
        let (turn, scheduler) = engine.turn_at_its_end();
        turn.abandon(Instant::now());
        let (info, tokens) = engine.settle(scheduler);
        let expected = match info.turns {
            0 => (0, Vec::new()),
            _ => (3, COMPUTED.to_vec()),
        };
        assert_eq!((info.held_blocks, tokens), expected);
    });
}

/// The caller has read the answer, and begins and completes the next turn, while the scheduler ends
/// the first one.
fn the_next_turn_overtakes() {
    let mut engine = Engine::new();
    let (first, scheduler) = engine.turn_at_its_end();
    complete(&first, &READ);
    let (next, lease) = (engine.turn(), engine.lease(&NEXT));
    complete(&next, &NEXT);
    next.keep(lease);
    drop((first, next));
    let (info, tokens) = engine.settle(scheduler);
    assert_eq!((info.turns, info.held_tokens, tokens), (2, 4, NEXT.to_vec()));
}

/// Goal: a turn whose caller goes on at once changes neither the tokens nor the hold of the next
/// one, however late the scheduler ends it.
#[test]
fn a_late_end_does_not_touch_the_next_turn() {
    explore(3, the_next_turn_overtakes);
}

/// A flush while a turn ends: afterwards nothing is held of the tree that was emptied.
fn flush_at_the_end() {
    let mut engine = Engine::new();
    let (turn, scheduler) = engine.turn_at_its_end();
    engine.sessions.release_all();
    let (info, _) = engine.settle(scheduler);
    drop(turn);
    assert_eq!((info.turns, info.held_blocks), (1, 0), "holds what was flushed");
}

/// Goal: no turn that ends during a flush holds anything after it.
#[test]
fn a_flush_meets_the_end_of_a_turn() {
    explore(3, flush_at_the_end);
}

/// Goal: the models find a session that holds the lease of an earlier state.
#[test]
fn planted_hold_of_any_revision_is_caught() {
    plant(Bug::AnyRevision);
    must_fail(
        "planted_hold_of_any_revision_is_caught",
        "holds what was flushed",
        3,
        flush_at_the_end,
    );
}
