//! Tests of the table of sessions, on a real prefix tree.

use std::collections::HashSet;

use proptest::prelude::*;
use stolon_backend::ImageInput;
use stolon_kvcache::{BlockId, BlockPool, StepFence, TreeWriter, prefix_tree};

use super::*;
use crate::images::pixel_bytes;
use crate::tests::image_input;

const BLOCK: usize = 4;

/// Number of blocks of the pool from which partial blocks are reserved.
const POOL: u32 = 16;

/// A prefix tree, a pool, and the sessions that hold leases on them.
struct Fixture {
    sessions: Arc<Sessions>,
    writer: TreeWriter,
    pool: BlockPool,
    _fence: StepFence,
    next_block: u32,
    start: Instant,
}

impl Fixture {
    fn new(budget: usize, max: usize, ttl_seconds: u64) -> Fixture {
        let (writer, _) = prefix_tree(BLOCK).expect("a block size");
        let sessions = Arc::new(Sessions::new(budget, max, Duration::from_secs(ttl_seconds)));
        let (pool, _fence) = BlockPool::new(POOL as usize).expect("a valid count");
        let start = Instant::now();
        Fixture { sessions, writer, pool, _fence, next_block: POOL, start }
    }

    /// This many seconds after the start.
    fn at(&self, seconds: u64) -> Instant {
        self.start + Duration::from_secs(seconds)
    }

    fn open(&self, id: &SessionId, seconds: u64) -> Result<SessionInfo, EngineError> {
        let new = NewSession { id: id.clone(), namespace: Namespace::default(), ttl: None };
        self.sessions.open(new, self.at(seconds))
    }

    /// The lease of a request that has computed and committed `tokens`.
    fn lease(&mut self, namespace: &Namespace, tokens: &[u32]) -> PrefixLease {
        let mut lease = self.writer.acquire(namespace, tokens);
        let missing = tokens.len() / BLOCK - lease.blocks().len();
        let blocks: Vec<_> = (self.next_block..).map(BlockId).take(missing).collect();
        self.next_block += missing as u32;
        let commit = self.writer.commit(&mut lease, tokens, &blocks).expect("its own lease");
        assert!(commit.duplicates.is_empty());
        lease
    }

    /// What a request leaves that has computed `tokens`, and committed its full blocks.
    fn hold(&mut self, namespace: &Namespace, tokens: &[u32]) -> SessionHold {
        let lease = self.lease(namespace, tokens);
        let after = &tokens[lease.len()..];
        let reserved = self.pool.reserve(1).expect("enough blocks");
        SessionHold::new(lease, after, Some(reserved))
    }

    /// A complete turn.
    fn turn(&mut self, id: &SessionId, tokens: &[u32], seconds: u64) -> Result<(), SessionError> {
        let (namespace, now) = (Namespace::default(), self.at(seconds));
        let turn = self.sessions.begin_turn(id, &namespace, now)?;
        let lease = self.lease(&namespace, tokens);
        turn.complete(end(tokens), now);
        turn.keep(lease);
        Ok(())
    }

    fn info(&self, id: &SessionId, seconds: u64) -> SessionInfo {
        self.sessions.info(id, self.at(seconds)).expect("an open session")
    }
}

fn end(tokens: &[u32]) -> TurnEnd {
    let prompt_tokens = tokens.len() - 1;
    let content = SessionContent { tokens: Arc::new(tokens.to_vec()), ..SessionContent::default() };
    TurnEnd { content, prompt_tokens, cached_tokens: 0 }
}

fn ids<const N: usize>(names: [&str; N]) -> [SessionId; N] {
    names.map(SessionId::new)
}

/// The end of a turn with images of `pixels` bytes at these positions of 20 tokens.
fn end_with_images(starts: &[usize], pixels: usize) -> TurnEnd {
    let image = |&start: &usize| {
        let pixels = vec![0; pixels];
        let input = ImageInput { pixels, ..image_input(start as u128, 4, false) };
        PromptImage { start, input: Arc::new(input) }
    };
    let mut end = end(&[1; 20]);
    end.content.images = starts.iter().map(image).collect();
    end
}

/// Goal: a session keeps its images. A fork, and a session that is taken back, keep the images of
/// their tokens. No image can be cut.
#[test]
fn sessions_keep_whole_images() {
    let fixture = Fixture::new(100, 10, 60);
    let (id, now) = (SessionId::new("a"), fixture.at(0));
    fixture.open(&id, 0).expect("a free id");
    let turn = fixture.sessions.begin_turn(&id, &Namespace::default(), now).expect("idle");
    turn.complete(end_with_images(&[2, 10], 3), now);
    let starts = |id: &SessionId| {
        let content = fixture.sessions.content(id, now).expect("idle");
        content.images.iter().map(|image| image.start).collect::<Vec<_>>()
    };
    assert_eq!(starts(&id), [2, 10]);
    for (count, expected) in [(20, vec![2, 10]), (14, vec![2, 10]), (10, vec![2]), (2, vec![])] {
        let to = SessionId::new(format!("to {count}").replace(' ', "-"));
        fixture.sessions.fork(&id, to.clone(), Some(count), now).expect("whole images");
        assert_eq!(starts(&to), expected, "{count}");
    }
    for count in [3, 5, 13] {
        let refused = fixture.sessions.rewind(&id, count, now).expect_err("inside an image");
        assert!(refused.to_string().contains("not inside the image"), "{refused}");
    }
    fixture.sessions.rewind(&id, 6, now).expect("whole images");
    assert_eq!(starts(&id), [2]);
}

/// Goal: the pixels that all sessions keep are bounded. The session that was idle longest loses its
/// own, and keeps its images.
#[test]
fn pixels_of_sessions_are_bounded() {
    let sessions = Sessions::new(100, 10, Duration::from_secs(60)).keep_pixels(100);
    let (sessions, now) = (Arc::new(sessions), Instant::now());
    let ids = ["a", "b", "c"].map(SessionId::new);
    let turn = |id: &SessionId, pixels| {
        let turn = sessions.begin_turn(id, &Namespace::default(), now).expect("idle");
        turn.complete(end_with_images(&[2, 10], pixels), now);
    };
    let kept = || {
        ids.clone().map(|id| {
            let content = sessions.content(&id, now).expect("idle");
            assert_eq!(content.images.len(), 2);
            pixel_bytes(&content.images)
        })
    };
    for id in &ids {
        let new = NewSession { id: id.clone(), namespace: Namespace::default(), ttl: None };
        sessions.open(new, now).expect("a free id");
        turn(id, 20);
    }
    assert_eq!(kept(), [0, 40, 40]);
    turn(&ids[1], 10);
    turn(&ids[0], 20);
    assert_eq!(kept(), [40, 20, 40]);
    turn(&ids[1], 20);
    assert_eq!(kept(), [40, 40, 0]);
    turn(&ids[2], 51);
    assert_eq!(kept(), [0, 0, 0], "more than all may have");
}

/// Goal: a session holds the whole blocks of its last turn, and closing it frees them.
#[test]
fn a_session_holds_its_last_turn_until_it_is_closed() {
    let mut fixture = Fixture::new(100, 10, 60);
    let [id] = ids(["a"]);
    fixture.open(&id, 0).expect("a free id");
    let tokens: Vec<u32> = (0..18).collect();
    fixture.turn(&id, &tokens[..9], 1).expect("an idle session");
    assert_eq!(fixture.info(&id, 1).held_blocks, 2);
    fixture.turn(&id, &tokens, 5).expect("an idle session");
    let info = fixture.info(&id, 8);
    assert_eq!((info.tokens, info.held_tokens, info.held_blocks, info.turns), (18, 16, 4, 2));
    assert_eq!((info.age.as_secs(), info.idle.map(|idle| idle.as_secs())), (8, Some(3)));
    assert_eq!(fixture.writer.counts().locked, 4);
    assert!(fixture.writer.evict(10).is_empty());
    assert!(fixture.sessions.close(&id, fixture.at(8)));
    assert!(!fixture.sessions.close(&id, fixture.at(8)));
    assert_eq!(fixture.writer.evict(10).len(), 4);
}

/// Goal: a session is busy from the beginning of a turn to its end, however it ends, and a turn
/// that does not complete changes nothing.
#[test]
fn a_turn_makes_its_session_busy_until_it_ends() {
    let mut fixture = Fixture::new(100, 10, 60);
    let [id] = ids(["a"]);
    fixture.open(&id, 0).expect("a free id");
    fixture.turn(&id, &[1; 8], 0).expect("an idle session");
    let (namespace, now) = (Namespace::default(), fixture.at(1));
    let turn = fixture.sessions.begin_turn(&id, &namespace, now).expect("an idle session");
    let second = fixture.sessions.begin_turn(&id, &namespace, now);
    assert_eq!(second.expect_err("busy"), SessionError::Busy { id: id.clone() });
    assert_eq!(fixture.info(&id, 1000).idle, None, "a busy session does not expire");
    let lease = fixture.lease(&namespace, &[2; 40]);
    turn.abandon(now);
    turn.complete(end(&[2; 40]), now);
    turn.keep(lease);
    let info = fixture.info(&id, 2);
    assert_eq!((info.tokens, info.held_blocks, info.turns), (8, 2, 1));
    drop(fixture.sessions.begin_turn(&id, &namespace, now).expect("it was abandoned"));
    drop(fixture.sessions.begin_turn(&id, &namespace, now).expect("it was dropped"));
    let other = Namespace::builder().salt("other").build();
    let refused = fixture.sessions.begin_turn(&id, &other, now);
    assert_eq!(refused.expect_err("another salt"), SessionError::OtherNamespace { id });
}

/// Goal: if the scheduler and the caller's stream report different ends of a turn, the shorter one
/// counts, in either order.
#[test]
fn a_turn_ends_where_the_caller_stops_reading() {
    let mut fixture = Fixture::new(100, 10, 60);
    let [id] = ids(["a"]);
    fixture.open(&id, 0).expect("a free id");
    let (namespace, now) = (Namespace::default(), fixture.at(0));
    for order in [[9, 7], [7, 9]] {
        let turn = fixture.sessions.begin_turn(&id, &namespace, now).expect("an idle session");
        let lease = fixture.lease(&namespace, &[3; 8]);
        for length in order {
            turn.complete(end(&vec![3; length]), now);
        }
        turn.keep(lease);
        let info = fixture.info(&id, 0);
        assert_eq!((info.tokens, info.held_tokens, info.held_blocks), (7, 7, 2));
    }
}

/// Goal: the next turn gets the partial block of the turn before with as many of its positions as
/// it continues, if its own prefix is the prefix of the session, and at most once.
#[test]
fn a_turn_goes_on_in_the_partial_block_of_the_last_one() {
    let mut fixture = Fixture::new(100, 10, 60);
    let [id] = ids(["a"]);
    fixture.open(&id, 0).expect("a free id");
    let (namespace, now) = (Namespace::default(), fixture.at(0));
    let tokens: Vec<u32> = (0..7).collect();
    let mut begin = |tokens: &[u32]| {
        let turn = fixture.sessions.begin_turn(&id, &namespace, now).expect("an idle session");
        turn.complete(end(tokens), now);
        let hold = fixture.hold(&namespace, tokens);
        turn.keep(hold);
        let info = fixture.info(&id, 0);
        assert_eq!((info.held_tokens, info.held_blocks), (tokens.len(), tokens.len().div_ceil(4)));
        let turn = fixture.sessions.begin_turn(&id, &namespace, now).expect("an idle session");
        let prefix = fixture.writer.acquire(&namespace, tokens);
        (turn, prefix)
    };
    for (rest, expected) in [
        (&[4, 5, 6, 9, 9][..], Some(3)),
        (&[4, 5, 8, 9], Some(2)),
        (&[4], Some(1)),
        (&[8, 5, 6], None),
        (&[], None),
    ] {
        let (turn, prefix) = begin(&tokens);
        let taken = turn.take_partial(&prefix, rest);
        assert_eq!(
            taken.as_ref().map(|(block, count)| (block.len(), *count)),
            expected.map(|n| (1, n))
        );
        if taken.is_some() {
            assert!(turn.take_partial(&prefix, rest).is_none(), "it has one owner");
        }
    }
    // Spans that the partial block has in part and completely.
    let span = |more: bool| 1 << 31 | u32::from(more) << 30;
    for (is_cut, expected) in [(true, 1), (false, 3)] {
        let (turn, prefix) = begin(&[0, 1, 2, 3, 4, span(true), span(is_cut)]);
        let taken = turn.take_partial(&prefix, &[4, span(true), span(is_cut), span(false)]);
        assert_eq!(taken.map(|(_, count)| count), Some(expected), "no match ends inside a span");
    }
    // A turn whose prefix ends earlier cannot use it, nor one that has ended.
    let (turn, prefix) = begin(&tokens);
    drop(prefix);
    let shorter = fixture.writer.acquire(&namespace, &tokens[..3]);
    assert!(turn.take_partial(&shorter, &tokens[..3]).is_none());
    let prefix = fixture.writer.acquire(&namespace, &tokens);
    turn.abandon(now);
    assert!(turn.take_partial(&prefix, &tokens[4..]).is_none());
    assert_eq!(fixture.pool.counts().reserved, 1);
    assert!(fixture.sessions.close(&id, now));
    assert_eq!(fixture.pool.counts().reserved, 0);
}

/// Goal: an idle session is closed when its time to live has passed since its last turn.
#[test]
fn an_idle_session_expires() {
    let mut fixture = Fixture::new(100, 10, 60);
    let [id, other] = ids(["a", "b"]);
    fixture.open(&id, 0).expect("a free id");
    let ttl = Some(Duration::from_secs(500));
    let new = NewSession { id: other.clone(), namespace: Namespace::default(), ttl };
    fixture.sessions.open(new, fixture.at(0)).expect("a free id");
    fixture.turn(&id, &[1; 8], 50).expect("an idle session");
    fixture.sessions.expire(fixture.at(109));
    assert_eq!(fixture.writer.counts().locked, 2);
    fixture.sessions.expire(fixture.at(110));
    assert_eq!(fixture.writer.counts().locked, 0);
    let unknown = fixture.turn(&id, &[1; 8], 110).expect_err("it has expired");
    assert!(unknown.to_string().contains("open it, and send the whole prompt"), "{unknown}");
    assert_eq!(fixture.info(&other, 110).turns, 0);
    assert_eq!(fixture.sessions.counts(fixture.at(110)).expired, 1);
}

/// Goal: blocks that sessions share count once; beyond the budget, the session that was used
/// longest ago loses its hold; a hold that is larger than the budget is not kept, and no other
/// session loses its hold for it.
#[test]
fn the_budget_counts_different_blocks() {
    let mut fixture = Fixture::new(6, 10, 60);
    let sessions = ids(["a", "b", "c"]);
    let tokens = |last: u32| [vec![7; 12], vec![last; 4]].concat();
    for (index, id) in sessions.iter().enumerate() {
        fixture.open(id, 0).expect("a free id");
        fixture.turn(id, &tokens(index as u32), 0).expect("an idle session");
    }
    let held = |fixture: &Fixture| sessions.clone().map(|id| fixture.info(&id, 0).held_blocks);
    assert_eq!(held(&fixture), [4, 4, 4]);
    assert_eq!(fixture.sessions.counts(fixture.at(0)).held_blocks, 6);
    fixture.turn(&sessions[0], &tokens(9), 0).expect("an idle session");
    assert_eq!(held(&fixture), [4, 4, 4]);
    fixture.turn(&sessions[1], &[8; 12], 0).expect("an idle session");
    assert_eq!(held(&fixture), [0, 3, 0]);
    fixture.turn(&sessions[0], &[6; 28], 0).expect("an idle session");
    assert_eq!(held(&fixture), [0, 3, 0]);
    assert!(fixture.sessions.release_oldest());
    assert!(!fixture.sessions.release_oldest());
    assert_eq!(fixture.writer.counts().locked, 0);
    assert_eq!(fixture.sessions.counts(fixture.at(0)).holds_lost, 4);
}

/// Goal: when there are too many sessions, the owner with the most loses the one that is idle
/// longest, and never one whose turn is in progress.
#[test]
fn the_owner_with_the_most_sessions_makes_room() {
    let mut fixture = Fixture::new(100, 3, 60);
    let owned = |owner: &str, name: &str| SessionId::owned_by(owner, name);
    for id in [owned("ada", "1"), owned("bob", "1"), owned("bob", "2")] {
        fixture.open(&id, 0).expect("a free id");
    }
    fixture.turn(&owned("bob", "1"), &[1; 4], 1).expect("an idle session");
    fixture.open(&owned("eve", "1"), 2).expect("bob has two");
    let names = |fixture: &Fixture| {
        let open = fixture.sessions.list(fixture.at(2)).into_iter();
        open.map(|info| format!("{}/{}", info.id.owner(), info.id)).collect::<Vec<_>>()
    };
    assert_eq!(names(&fixture), ["ada/1", "bob/1", "eve/1"]);
    let turns = ["ada", "bob", "eve"].map(|owner| {
        let turn =
            fixture.sessions.begin_turn(&owned(owner, "1"), &Namespace::default(), fixture.at(2));
        turn.expect("an idle session")
    });
    let refused = fixture.open(&owned("eve", "2"), 2).expect_err("all are busy");
    assert_eq!(refused, SessionError::TooMany { max: 3 }.into());
    drop(turns);
    let exists = fixture.open(&owned("eve", "1"), 2).expect_err("it is open");
    assert_eq!(exists, SessionError::Exists { id: owned("eve", "1") }.into());
}

/// Goal: after a flush and after the eviction of a namespace nothing is held, not even by a turn
/// that was in progress, and the sessions stay.
#[test]
fn holds_that_are_ended_on_request_do_not_come_back() {
    let mut fixture = Fixture::new(100, 10, 60);
    let [id] = ids(["a"]);
    fixture.open(&id, 0).expect("a free id");
    fixture.turn(&id, &[1; 8], 0).expect("an idle session");
    let (namespace, now) = (Namespace::default(), fixture.at(0));
    for flush in [true, false] {
        let turn = fixture.sessions.begin_turn(&id, &namespace, now).expect("an idle session");
        let lease = fixture.lease(&namespace, &[1; 12]);
        match flush {
            true => fixture.sessions.release_all(),
            false => fixture.sessions.release_namespace(&namespace),
        }
        turn.complete(end(&[1; 12]), now);
        turn.keep(lease);
        let info = fixture.info(&id, 0);
        assert_eq!((info.tokens, info.held_blocks), (12, 0));
        assert_eq!(fixture.writer.counts().locked, 0);
        fixture.turn(&id, &[1; 12], 0).expect("an idle session");
        assert_eq!(fixture.info(&id, 0).held_blocks, 3);
    }
    fixture.sessions.release_namespace(&Namespace::builder().salt("other").build());
    assert_eq!(fixture.info(&id, 0).held_blocks, 3);
}

/// Goal: ids are bounded, and errors quote at most as much of them.
#[test]
fn ids_and_times_are_bounded() {
    let fixture = Fixture::new(100, 10, 60);
    for name in ["", "a b", "a/b", "ä", "a\n", &"x".repeat(129), &"é".repeat(1 << 16)] {
        let error = fixture.open(&SessionId::new(name), 0).expect_err("invalid").to_string();
        assert!(error.contains("session_id") && error.len() < 400, "{error}");
    }
    fixture.open(&SessionId::new("x".repeat(128)), 0).expect("the longest name");
    let random = [SessionId::random(""), SessionId::random("")];
    assert_ne!(random[0], random[1]);
    fixture.open(&random[0], 0).expect("a valid id");
    for ttl in [Duration::ZERO, Duration::MAX] {
        let namespace = Namespace::default();
        let new = NewSession { id: random[1].clone(), namespace, ttl: Some(ttl) };
        let error = fixture.sessions.open(new, fixture.at(0)).expect_err("invalid");
        assert!(error.to_string().starts_with("ttl: expected more than 0"), "{error}");
    }
}

/// Goal: a fork continues where its origin is, or earlier, and continues by itself; a session is
/// taken back to a prefix of its tokens; prefixes that were locked for an earlier state are not
/// held.
#[test]
fn sessions_are_forked_and_rewound() {
    let mut fixture = Fixture::new(100, 3, 60);
    let [id, fork, late] = ids(["a", "b", "c"]);
    let tokens: Vec<u32> = (0..18).collect();
    fixture.open(&id, 0).expect("a free id");
    fixture.turn(&id, &tokens, 0).expect("an idle session");
    let now = fixture.at(0);
    let prefix = fixture.sessions.fork(&id, fork.clone(), None, now).expect("a free id");
    assert_eq!(*prefix.tokens, tokens);
    let lease = fixture.lease(&prefix.namespace, &prefix.tokens);
    fixture.sessions.hold(&prefix, lease);
    assert_eq!(fixture.info(&fork, 0).held_blocks, 4);
    assert_eq!(fixture.sessions.counts(now).held_blocks, 4, "they share all blocks");
    assert!(fixture.sessions.close(&id, now));
    assert_eq!(fixture.writer.counts().locked, 4);

    let prefix = fixture.sessions.rewind(&fork, 9, now).expect("an idle session");
    assert_eq!(fixture.info(&fork, 0).held_tokens, 9, "it still holds more");
    let lease = fixture.lease(&prefix.namespace, &prefix.tokens);
    fixture.sessions.hold(&prefix, lease);
    assert_eq!((fixture.info(&fork, 0).held_blocks, fixture.writer.counts().locked), (2, 2));
    let prefix = fixture.sessions.fork(&fork, late.clone(), Some(5), now).expect("a free id");
    fixture.turn(&late, &[9; 12], 0).expect("an idle session");
    let lease = fixture.lease(&prefix.namespace, &prefix.tokens);
    fixture.sessions.hold(&prefix, lease);
    assert_eq!((fixture.info(&late, 0).held_blocks, fixture.info(&late, 0).tokens), (3, 12));

    let turn = fixture.sessions.begin_turn(&fork, &Namespace::default(), now);
    let busy = fixture.sessions.rewind(&fork, 0, now).expect_err("a turn is in progress");
    assert_eq!(busy, SessionError::Busy { id: fork.clone() }.into());
    let forked = fixture.sessions.fork(&fork, id.clone(), None, now).expect("before its turn");
    assert_eq!(forked.tokens.len(), 9);
    drop(turn);
    for (result, part) in [
        (fixture.sessions.fork(&fork, late.clone(), None, now), "not in use"),
        (fixture.sessions.fork(&fork, SessionId::new("d"), Some(10), now), "at most 9"),
        (fixture.sessions.fork(&SessionId::new("x"), SessionId::new("d"), None, now), "`x`"),
        (fixture.sessions.rewind(&fork, 10, now), "at most 9"),
    ] {
        let error = result.expect_err("refused").to_string();
        assert!(error.contains(part), "{error}");
    }
    let prefix = fixture.sessions.rewind(&fork, 0, now).expect("an idle session");
    let lease = fixture.lease(&prefix.namespace, &prefix.tokens);
    fixture.sessions.hold(&prefix, lease);
    assert_eq!((fixture.info(&fork, 0).tokens, fixture.info(&fork, 0).held_blocks), (0, 0));
    fixture.sessions.audit().expect("sound accounting");
}

/// What a test does with one of a few sessions.
#[derive(Clone, Debug)]
enum Action {
    Open(usize),
    Close(usize),
    Begin(usize),
    /// Ends the turn of a session with these tokens, if it has one.
    Complete(usize, Vec<u32>),
    Abandon(usize),
    /// Takes the partial block in a turn with this prompt.
    TakePartial(usize, Vec<u32>),
    /// Opens a session that continues the first tokens of another one of its namespace.
    Fork(usize, usize),
    Rewind(usize, usize),
    Wait(u64),
    ReleaseOldest,
    Flush,
    ReleaseNamespace(usize),
}

fn action() -> impl Strategy<Value = Action> {
    let session = 0..6usize;
    let tokens = prop::collection::vec(0..2u32, 1..40);
    prop_oneof![
        4 => session.clone().prop_map(Action::Open),
        1 => session.clone().prop_map(Action::Close),
        8 => session.clone().prop_map(Action::Begin),
        8 => (session.clone(), tokens.clone())
            .prop_map(|(id, tokens)| Action::Complete(id, tokens)),
        4 => (session.clone(), tokens).prop_map(|(id, tokens)| Action::TakePartial(id, tokens)),
        2 => session.clone().prop_map(Action::Abandon),
        2 => (session.clone(), 0..40usize).prop_map(|(id, tokens)| Action::Fork(id, tokens)),
        2 => (session.clone(), 0..40usize).prop_map(|(id, tokens)| Action::Rewind(id, tokens)),
        2 => (1..40u64).prop_map(Action::Wait),
        1 => Just(Action::ReleaseOldest),
        1 => Just(Action::Flush),
        1 => session.prop_map(Action::ReleaseNamespace),
    ]
}

/// What a session should be. Blocks are known by their content: namespace and tokens up to their
/// end.
#[derive(Clone, Debug, Default)]
struct Expected {
    tokens: Vec<u32>,
    /// The positions of the full blocks that it holds.
    held: Vec<u32>,
    /// The positions in its partial block.
    partial: Vec<u32>,
    last_use: u64,
    used: u64,
    /// Which turn was begun last.
    turn: u64,
    busy: bool,
    /// Whether the blocks that the turn in progress has locked may be held.
    may_hold: bool,
}

impl Expected {
    fn held_blocks(&self) -> usize {
        self.held.len() / BLOCK + usize::from(!self.partial.is_empty())
    }

    fn release(&mut self) {
        self.held.clear();
        self.partial.clear();
    }
}

const TTL: u64 = 60;
const BUDGET: usize = 12;

/// A slow, obvious table of sessions.
#[derive(Debug, Default)]
struct Model {
    sessions: std::collections::BTreeMap<usize, Expected>,
    uses: u64,
}

impl Model {
    fn expire(&mut self, now: u64) {
        self.sessions.retain(|_, session| session.busy || now < session.last_use + TTL);
    }

    fn held(&self) -> usize {
        let blocks = self.sessions.iter().flat_map(|(id, session)| {
            (1..=session.held.len() / BLOCK)
                .map(move |count| (id % 2, &session.held[..count * BLOCK]))
        });
        blocks.collect::<HashSet<_>>().len() + self.partial_blocks()
    }

    fn partial_blocks(&self) -> usize {
        self.sessions.values().filter(|session| !session.partial.is_empty()).count()
    }

    fn release_oldest(&mut self, except: Option<usize>) -> bool {
        let holding = self
            .sessions
            .iter_mut()
            .filter(|(id, session)| session.held_blocks() > 0 && Some(**id) != except);
        let oldest = holding.min_by_key(|(_, session)| session.used);
        oldest.map(|(_, session)| session.release()).is_some()
    }

    /// Opens a session. Returns whether that is possible.
    fn open(&mut self, id: usize, now: u64) -> bool {
        if self.sessions.contains_key(&id) {
            return false;
        }
        if self.sessions.len() == 4 {
            let idle = self.sessions.iter().filter(|(_, session)| !session.busy);
            let oldest = idle.min_by_key(|(_, session)| session.used).map(|(id, _)| *id);
            let Some(oldest) = oldest else { return false };
            self.sessions.remove(&oldest);
        }
        let used = self.uses;
        let new = Expected { last_use: now, used, may_hold: true, ..Expected::default() };
        self.sessions.insert(id, new);
        true
    }

    fn complete(&mut self, id: usize, tokens: &[u32], partial: &[u32], now: u64) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        (session.busy, session.last_use) = (false, now);
        session.tokens = tokens.to_vec();
        let blocks = tokens.len() / BLOCK;
        if session.may_hold {
            session.release();
            if blocks <= BUDGET {
                session.held = tokens[..blocks * BLOCK].to_vec();
            }
            if blocks < BUDGET {
                session.partial = partial.to_vec();
            }
            while self.held() > BUDGET {
                assert!(self.release_oldest(Some(id)));
            }
        }
    }
}

proptest! {
    /// Goal: after any actions of clients and operators, in any order, the table is as the model
    /// says, the budget is never exceeded, and the tree's locks are exactly those of sessions and
    /// turns.
    #[test]
    fn sessions_are_as_the_model_says(actions in prop::collection::vec(action(), 1..120)) {
        let mut fixture = Fixture::new(BUDGET, 4, TTL);
        let mut model = Model::default();
        let mut turns: Vec<Option<(Arc<Turn>, u64)>> = vec![None; 6];
        let mut now = 0;
        let namespace = |id: usize| match id % 2 {
            0 => Namespace::default(),
            _ => Namespace::builder().salt("odd").build(),
        };
        let name = |id: usize| SessionId::new(id.to_string());
        for action in actions {
            model.expire(now);
            model.uses += 1;
            let time = fixture.at(now);
            match action {
                Action::Open(id) => {
                    let new = NewSession { id: name(id), namespace: namespace(id), ttl: None };
                    let opened = fixture.sessions.open(new, time).is_ok();
                    prop_assert_eq!(opened, model.open(id, now));
                }
                Action::Close(id) => {
                    let closed = fixture.sessions.close(&name(id), time);
                    prop_assert_eq!(closed, model.sessions.remove(&id).is_some());
                }
                Action::Begin(id) => {
                    let turn = fixture.sessions.begin_turn(&name(id), &namespace(id), time);
                    let session = model.sessions.get_mut(&id).filter(|session| !session.busy);
                    prop_assert_eq!(turn.is_ok(), session.is_some());
                    if let (Ok(turn), Some(session)) = (turn, session) {
                        (session.busy, session.may_hold) = (true, true);
                        (session.used, session.turn) = (model.uses, model.uses);
                        turns[id] = Some((turn, model.uses));
                    }
                }
                Action::Complete(id, tokens) => {
                    let Some((turn, number)) = turns[id].take() else { continue };
                    let hold = fixture.hold(&namespace(id), &tokens);
                    turn.complete(end(&tokens), time);
                    turn.keep(hold);
                    // Its session may have been closed, and another one opened under its name.
                    if model.sessions.get(&id).is_some_and(|session| session.turn == number) {
                        let partial = &tokens[tokens.len() / BLOCK * BLOCK..];
                        model.complete(id, &tokens, partial, now);
                    }
                }
                Action::TakePartial(id, tokens) => {
                    let Some((turn, number)) = &turns[id] else { continue };
                    let prefix = fixture.writer.acquire(&namespace(id), &tokens);
                    let (before, rest) = tokens.split_at(prefix.len());
                    let taken = turn.take_partial(&prefix, rest).map(|(_, count)| count);
                    let session = model.sessions.get_mut(&id);
                    let session = session.filter(|session| {
                        session.busy && session.turn == *number && session.held == before
                    });
                    let equal = session.map_or(0, |session| {
                        let both = session.partial.iter().zip(rest);
                        let equal = both.take_while(|(own, other)| own == other).count();
                        if equal > 0 {
                            session.partial.clear();
                        }
                        equal
                    });
                    prop_assert_eq!(taken.unwrap_or(0), equal);
                }
                Action::Abandon(id) => {
                    let Some((turn, number)) = turns[id].take() else { continue };
                    turn.abandon(time);
                    if let Some(session) = model.sessions.get_mut(&id)
                        && session.turn == number
                    {
                        (session.busy, session.last_use) = (false, now);
                    }
                }
                Action::Fork(id, count) => {
                    let to = (id + 2) % 6;
                    let forked = fixture.sessions.fork(&name(id), name(to), Some(count), time);
                    let origin = model.sessions.get_mut(&id);
                    let origin = origin.filter(|session| count <= session.tokens.len());
                    let tokens = origin.map(|session| {
                        (session.used, session.last_use) = (model.uses, now);
                        session.tokens[..count].to_vec()
                    });
                    model.uses += 1;
                    let possible = tokens.is_some() && model.open(to, now);
                    prop_assert_eq!(forked.is_ok(), possible);
                    if let (Ok(prefix), Some(tokens)) = (forked, tokens) {
                        let lease = fixture.lease(&prefix.namespace, &prefix.tokens);
                        fixture.sessions.hold(&prefix, lease);
                        model.complete(to, &tokens, &[], now);
                    }
                }
                Action::Rewind(id, count) => {
                    let rewound = fixture.sessions.rewind(&name(id), count, time);
                    let session = model.sessions.get_mut(&id);
                    let session =
                        session.filter(|session| !session.busy && count <= session.tokens.len());
                    prop_assert_eq!(rewound.is_ok(), session.is_some());
                    if let (Ok(prefix), Some(session)) = (rewound, session) {
                        (session.used, session.may_hold) = (model.uses, true);
                        let tokens = session.tokens[..count].to_vec();
                        let lease = fixture.lease(&prefix.namespace, &prefix.tokens);
                        fixture.sessions.hold(&prefix, lease);
                        model.complete(id, &tokens, &[], now);
                    }
                }
                Action::Wait(seconds) => now += seconds,
                Action::ReleaseOldest => {
                    let released = fixture.sessions.release_oldest();
                    prop_assert_eq!(released, model.release_oldest(None));
                }
                Action::Flush => {
                    fixture.sessions.release_all();
                    drop(fixture.writer.flush());
                    for session in model.sessions.values_mut() {
                        session.release();
                        session.may_hold = false;
                    }
                }
                Action::ReleaseNamespace(id) => {
                    fixture.sessions.release_namespace(&namespace(id));
                    for (other, session) in &mut model.sessions {
                        if other % 2 == id % 2 {
                            session.release();
                            session.may_hold = false;
                        }
                    }
                }
            }
            fixture.sessions.audit().expect("sound accounting");
            let time = fixture.at(now);
            model.expire(now);
            let mut listed = fixture.sessions.list(time);
            listed.sort_by(|a, b| a.id.cmp(&b.id));
            let got: Vec<_> = listed.iter().map(|info| {
                (info.id.clone(), info.tokens, info.held_blocks, info.idle.is_none())
            }).collect();
            let expected: Vec<_> = model.sessions.iter().map(|(&id, session)| {
                (name(id), session.tokens.len(), session.held_blocks(), session.busy)
            }).collect();
            prop_assert_eq!(got, expected);
            let held = fixture.sessions.counts(time).held_blocks;
            prop_assert!(held <= BUDGET);
            prop_assert_eq!(held, model.held());
            // No lease outlives the action, except those that sessions hold.
            let partial_blocks = model.partial_blocks();
            prop_assert_eq!(fixture.writer.counts().locked, held - partial_blocks);
            prop_assert_eq!(fixture.pool.counts().reserved, partial_blocks);
            fixture.writer.audit().expect("a sound tree");
        }
    }
}

/// Goal: sessions that are saved continue on another table: with their tokens, without what they
/// held, and for the rest of their time to live; no open session is replaced.
#[test]
fn saved_sessions_continue() {
    let mut fixture = Fixture::new(100, 10, 60);
    let [a, b, c] = ids(["a", "b", "c"]);
    for id in [&a, &b, &c] {
        fixture.open(id, 0).expect("a free id");
    }
    fixture.turn(&a, &[1; 9], 30).expect("idle");
    fixture.turn(&c, &[2; 9], 30).expect("idle");
    let saved = fixture.sessions.save(fixture.at(40));
    assert_eq!(saved.len(), 3);
    let later = Fixture { start: fixture.start, ..Fixture::new(100, 10, 60) };
    later.open(&c, 45).expect("a free id");
    later.sessions.restore(saved, later.at(50));
    let info = later.info(&a, 50);
    assert_eq!((info.tokens, info.held_blocks, info.turns), (9, 0, 0));
    let content = later.sessions.content(&a, later.at(50)).expect("idle");
    assert_eq!(*content.tokens, [1; 9]);
    assert_eq!(later.info(&c, 50).tokens, 0, "it was opened there");
    let left = |seconds| later.sessions.list(later.at(seconds)).len();
    assert_eq!([left(59), left(61), left(91), left(106)], [3, 2, 1, 0]);
}
