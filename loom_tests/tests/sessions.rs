//! The sessions. The scheduler and the caller's stream both hold a turn, and the first one that
//! notices the end of the turn ends it. Several callers may use a session at the same time.
//!
//! The scheduler runs on a separate thread here, as in the engine. The other thread is the caller's:
//! the stream that reads the answer, the next turn, or a flush.
#![cfg(all(loom, not(crossbeam_loom)))]

use std::sync::Arc;
use std::time::{Duration, Instant};

use loom::thread;
use stolon_kvcache::{BlockPool, Namespace, PrefixLease, TreeReader, TreeWriter, prefix_tree};
use stolon_loom_tests::{explore, must_fail, put, tree};
use stolon_scheduler::planted::{Bug, plant};
use stolon_scheduler::{
    NewSession, SessionContent, SessionHold, SessionId, SessionInfo, Sessions, Turn, TurnEnd,
};

/// The tokens that the scheduler has computed: more than the caller reads if a stop string ends the
/// answer.
const COMPUTED: [u32; 3] = [1, 2, 3];
/// The tokens that the caller has read.
const READ: [u32; 2] = [1, 2];
/// The tokens of the session after the next turn.
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
        Engine::with_budget(8)
    }

    /// An engine whose sessions may hold `budget` blocks.
    fn with_budget(budget: usize) -> Engine {
        let (mut tree, _reader) = tree();
        put(&mut tree, &COMPUTED, 0);
        put(&mut tree, &NEXT, 3);
        let sessions = Arc::new(Sessions::new(budget, 8, Duration::from_secs(600)));
        let id = open(&sessions, "conversation");
        Engine { sessions, id, tree, _reader }
    }

    /// Begins a turn.
    fn turn(&self) -> Arc<Turn> {
        begin(&self.sessions, &self.id).expect("the session is idle")
    }

    /// A complete turn of the session with these tokens, without a hold.
    fn complete_turn(&self, tokens: &[u32]) {
        complete(&self.turn(), tokens);
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

    /// The session after `scheduler` has ended, and its tokens. Checks that nothing is locked in
    /// the tree except the prefix that the session holds, and nothing at all once the session is
    /// closed.
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

/// Opens a session.
fn open(sessions: &Sessions, name: &str) -> SessionId {
    let id = SessionId::new(name);
    let new = NewSession { id: id.clone(), namespace: Namespace::default(), ttl: None };
    sessions.open(new, Instant::now()).expect("the id is free");
    id
}

/// Begins a turn unless the session is busy.
fn begin(sessions: &Arc<Sessions>, id: &SessionId) -> Option<Arc<Turn>> {
    sessions.begin_turn(id, &Namespace::default(), Instant::now()).ok()
}

fn complete(turn: &Turn, tokens: &[u32]) {
    let tokens = Arc::new(tokens.to_vec());
    let content = SessionContent { tokens, ..SessionContent::default() };
    let end = TurnEnd { content, prompt_tokens: 1, cached_tokens: 0 };
    turn.complete(end, Instant::now());
}

/// Goal: in whichever order the scheduler and the caller end the turn, it counts once, and the
/// session has the tokens that the caller read.
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

/// Goal: a turn that is canceled while it completes is either complete, with its hold, or has no
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

/// Goal: a turn whose caller continues at once changes neither the tokens nor the hold of the next
/// turn, however late the scheduler ends it.
#[test]
fn a_late_end_does_not_touch_the_next_turn() {
    explore(3, the_next_turn_overtakes);
}

/// A flush while a turn ends. Afterward the session holds nothing in the emptied tree.
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

/// Goal: the models find a session that holds the lease of an earlier revision.
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

/// Goal: of two turns of a session that begin at the same time, one begins.
#[test]
fn two_turns_begin_at_once() {
    explore(3, || {
        let engine = Engine::new();
        let (sessions, id) = (Arc::clone(&engine.sessions), engine.id.clone());
        let other = thread::spawn(move || begin(&sessions, &id));
        let own = begin(&engine.sessions, &engine.id);
        let other = other.join().expect("the thread does not panic");
        assert!(own.is_some() != other.is_some(), "a session has one turn at a time");
    });
}

/// Goal: a turn that follows the tokens of a session and a rewind that takes these tokens back at
/// the same time never both succeed.
#[test]
fn a_rewind_meets_the_next_turn() {
    explore(3, || {
        let engine = Engine::new();
        engine.complete_turn(&COMPUTED);
        let now = Instant::now();
        let content = engine.sessions.content(&engine.id, now).expect("the session is idle");
        let (sessions, id) = (Arc::clone(&engine.sessions), engine.id.clone());
        let next = thread::spawn(move || {
            let tokens = Some(&content.tokens);
            sessions.begin_turn_after(tokens, &id, &Namespace::default(), now).ok()
        });
        let rewound = engine.sessions.rewind(&engine.id, 1, now).is_ok();
        let next = next.join().expect("the thread does not panic");
        assert!(rewound != next.is_some(), "rewound during a turn");
    });
}

/// Goal: no turn begins in the fork of a session before the fork has its tokens.
#[test]
fn a_turn_meets_the_fork_of_its_session() {
    explore(3, || {
        let engine = Engine::new();
        engine.complete_turn(&COMPUTED);
        let fork = SessionId::new("fork");
        let (sessions, id) = (Arc::clone(&engine.sessions), fork.clone());
        let next = thread::spawn(move || {
            let _turn = begin(&sessions, &id)?;
            Some(sessions.info(&id, Instant::now()).expect("the session is open").tokens)
        });
        let forked = engine.sessions.fork(&engine.id, fork, None, Instant::now());
        assert_eq!(*forked.expect("the id is free").tokens, COMPUTED);
        let seen = next.join().expect("the thread does not panic");
        assert!(seen.is_none_or(|tokens| tokens == COMPUTED.len()), "began without tokens");
    });
}

/// Goal: a turn that is canceled takes away nothing that its session holds, even if it is about to
/// continue in the session's last block.
#[test]
fn a_cancel_meets_the_start_of_its_turn() {
    explore(3, || {
        let (mut tree, _reader) = prefix_tree(2).expect("a valid block size");
        let (mut pool, _fence) = BlockPool::new(1).expect("a valid count");
        let sessions = Arc::new(Sessions::new(8, 8, Duration::from_secs(600)));
        let id = open(&sessions, "conversation");
        let first = begin(&sessions, &id).expect("the session is idle");
        complete(&first, &[1]);
        let prefix = tree.acquire(&Namespace::default(), &[]);
        first.keep(SessionHold::new(prefix, &[1], pool.reserve(1).ok()));
        let next = begin(&sessions, &id).expect("the session is idle");
        let prefix = tree.acquire(&Namespace::default(), &[1]);
        let scheduler = {
            let next = Arc::clone(&next);
            thread::spawn(move || next.take_partial(&prefix, &[1]))
        };
        next.abandon(Instant::now());
        let held = || sessions.info(&id, Instant::now()).expect("the session is open").held_blocks;
        let after = held();
        let taken = scheduler.join().expect("the thread does not panic");
        assert_eq!(held(), after, "took a block after it was canceled");
        assert_eq!(after + usize::from(taken.is_some()), 1, "a block was lost or has two owners");
    });
}

/// Goal: all sessions together never hold more blocks than their budget, at any moment that another
/// thread can see.
#[test]
fn sessions_never_hold_more_than_their_budget() {
    explore(3, || {
        let mut engine = Engine::with_budget(4);
        let lease = engine.lease(&COMPUTED);
        let turn = engine.turn();
        complete(&turn, &COMPUTED);
        turn.keep(lease);
        let other = open(&engine.sessions, "other");
        let turn = begin(&engine.sessions, &other).expect("the session is idle");
        complete(&turn, &NEXT);
        let lease = engine.lease(&NEXT);
        let scheduler = thread::spawn(move || turn.keep(lease));
        let sessions = engine.sessions.list(Instant::now());
        let holders = sessions.iter().filter(|session| session.held_blocks > 0).count();
        assert_eq!(holders, 1, "both together have 5 blocks");
        scheduler.join().expect("the thread does not panic");
    });
}

/// Goal: while any session holds something, the scheduler gets blocks from a session, even if the
/// one that has been idle longest is closed meanwhile.
#[test]
fn a_close_meets_the_loss_of_a_hold() {
    explore(3, || {
        let mut engine = Engine::new();
        let other = open(&engine.sessions, "other");
        for id in [engine.id.clone(), other] {
            let lease = engine.lease(&COMPUTED);
            let turn = begin(&engine.sessions, &id).expect("the session is idle");
            complete(&turn, &COMPUTED);
            turn.keep(lease);
        }
        let (sessions, id) = (Arc::clone(&engine.sessions), engine.id.clone());
        let closing = thread::spawn(move || sessions.close(&id, Instant::now()));
        assert!(engine.sessions.lose_oldest_hold(), "one session holds something in any case");
        assert!(closing.join().expect("the thread does not panic"), "the session was open");
    });
}
