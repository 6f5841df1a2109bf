//! [`GrammarState`]: a sequence that follows a grammar, and the threads that compute its masks.
//!
//! A mask takes 20 to 500 microseconds, and up to seconds for an ambiguous grammar. It is computed
//! by a worker thread (`workers.rs`), while the model computes the step in which the mask is used.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use llguidance::Matcher;

use super::compile::next_mask;
use super::mask::TokenMask;
use super::messages::message;
use super::workers::Workers;
use super::{GrammarError, GrammarFailure};
use crate::Busy;
use crate::bounded::{Client, MAX_WAIT, catch};
use crate::processor_time::OwnTime;

/// Processor time that the masks of a request may take together. A request that needs more ends
/// with an error.
const BUDGET: Duration = Duration::from_secs(10);

/// Processor time for looking ahead that a request may take. What is found saves time, but no answer
/// depends on it.
const AHEAD_BUDGET: Duration = Duration::from_secs(1);

/// Number of allowed tokens up to which text may be forced.
const FORCED_ALLOWED: usize = 32;

/// Number of bytes of forced text that are used at once.
const FORCED_BYTES: usize = 256;

/// A grammar before the first token. Its sequences share what the lexer has learned.
pub(super) struct Start {
    pub(super) matcher: Mutex<Matcher>,
    /// The mask of the first token.
    pub(super) mask: Arc<TokenMask>,
}

/// A sequence that follows a grammar.
///
/// The tokens of the sequence are given in each call, so a state never disagrees with its sequence.
/// If they do not continue those of the call before, the state begins again with the first token.
pub struct GrammarState {
    start: Arc<Start>,
    slot: Arc<Slot>,
    spent: Arc<Spent>,
    workers: Workers,
}

/// The client of a request, and the processor time that was spent on its masks. The sequences of a
/// request share it.
#[derive(Debug, Default)]
pub(super) struct Spent {
    client: Client,
    /// They guard no other memory, so all accesses are relaxed.
    micros: AtomicU64,
    /// The time for tokens that may never be sampled. It does not count towards the request's budget:
    /// a guess makes no request fail.
    ahead_micros: AtomicU64,
}

/// The state that a sequence shares with the workers.
struct Slot {
    progress: Mutex<Progress>,
    /// Notified when a worker has found something.
    finished: Condvar,
}

struct Progress {
    known: Arc<Known>,
    parser: Parser,
    /// The tokens that may follow those of the job that runs, for which masks are computed, too.
    wanted: Vec<u32>,
}

enum Parser {
    /// The parser after the tokens that are known; `None` before the first token.
    Idle(Option<Box<Matcher>>),
    /// A worker computes with it.
    Busy,
}

/// What is known about a sequence after some tokens.
#[derive(Clone)]
struct Known {
    tokens: Vec<u32>,
    /// The mask after `tokens`.
    mask: Result<Arc<TokenMask>, GrammarError>,
    /// Tokens to which the grammar leaves no alternative, most likely.
    forced: Vec<u32>,
    /// Tokens that may follow, each with the mask after it.
    ahead: Vec<(u32, Arc<TokenMask>)>,
}

impl Known {
    /// The mask after `tokens`; `None` if it is not known.
    fn mask_after(&self, tokens: &[u32]) -> Option<Result<Arc<TokenMask>, GrammarError>> {
        let rest = tokens.strip_prefix(self.tokens.as_slice())?;
        let Some(last) = rest.len().checked_sub(1) else { return Some(self.mask.clone()) };
        let is_ahead = rest.iter().zip(&self.ahead).all(|(token, (ahead, _))| token == ahead);
        let (_, mask) = self.ahead.get(last).filter(|_| is_ahead)?;
        Some(Ok(Arc::clone(mask)))
    }

    /// The forced tokens after `tokens`, which continue those that are known.
    fn forced_after(&self, tokens: &[u32]) -> &[u32] {
        let rest = tokens.strip_prefix(self.tokens.as_slice());
        rest.and_then(|rest| self.forced.strip_prefix(rest)).unwrap_or_default()
    }
}

/// A mask to compute.
pub(super) struct Job {
    start: Arc<Start>,
    slot: Arc<Slot>,
    spent: Arc<Spent>,
    known: Arc<Known>,
    /// The parser after the tokens of `known`.
    matcher: Option<Box<Matcher>>,
    /// All tokens of the sequence.
    tokens: Vec<u32>,
}

impl GrammarState {
    pub(super) fn new(start: Arc<Start>, spent: Arc<Spent>, workers: Workers) -> Self {
        let mask = Ok(Arc::clone(&start.mask));
        let known = Known { tokens: Vec::new(), mask, forced: Vec::new(), ahead: Vec::new() };
        let parser = Parser::Idle(None);
        let progress = Progress { known: Arc::new(known), parser, wanted: Vec::new() };
        let slot = Arc::new(Slot { progress: Mutex::new(progress), finished: Condvar::new() });
        Self { start, slot, spent, workers }
    }

    /// The state of another sequence of the same request, before its first token.
    #[must_use]
    pub fn restarted(&self) -> Self {
        Self::new(Arc::clone(&self.start), Arc::clone(&self.spent), self.workers.clone())
    }

    /// Starts computing the mask of the token after `tokens`. Returns at once.
    pub fn begin(&self, tokens: &[u32]) {
        self.begin_locked(&mut self.slot.lock(), tokens);
    }

    /// As [`GrammarState::begin`], and then the masks after `proposals`, which may follow `tokens`, in
    /// a time that is bounded for the whole request. Returns at once.
    pub fn begin_ahead(&self, tokens: &[u32], proposals: &[u32]) {
        let mut progress = self.slot.lock();
        progress.wanted = proposals.to_vec();
        if let Parser::Idle(_) = progress.parser {
            self.send_locked(&mut progress, tokens);
        }
    }

    /// Tokens that most likely follow `tokens`, because the grammar leaves no alternative, as far as
    /// they are known. Returns at once.
    #[must_use]
    pub fn forced(&self, tokens: &[u32]) -> Vec<u32> {
        self.slot.lock().known.forced_after(tokens).to_vec()
    }

    /// Whether the mask of the token after `tokens` is known.
    #[must_use]
    pub fn is_ready(&self, tokens: &[u32]) -> bool {
        self.slot.lock().known.mask_after(tokens).is_some()
    }

    /// The tokens that may come after `tokens`. Waits for it if it is not known yet.
    ///
    /// # Errors
    /// [`GrammarFailure`] if the grammar has become too complex, if the masks of the request take
    /// too much work, or if the machine is too busy.
    pub fn mask(&self, tokens: &[u32]) -> Result<Arc<TokenMask>, GrammarFailure> {
        let deadline = Instant::now() + MAX_WAIT;
        let mut progress = self.slot.lock();
        loop {
            if let Some(mask) = progress.known.mask_after(tokens) {
                return mask.map_err(GrammarFailure::from);
            }
            self.begin_locked(&mut progress, tokens);
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let limit = MAX_WAIT.as_secs();
                let reason =
                    format!("the next tokens of the grammar were not known after {limit} s");
                return Err(Busy::new(reason).into());
            }
            let waited = self.slot.finished.wait_timeout(progress, left);
            progress = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn begin_locked(&self, progress: &mut Progress, tokens: &[u32]) {
        let is_idle = matches!(progress.parser, Parser::Idle(_));
        if is_idle && progress.known.mask_after(tokens).is_none() {
            progress.wanted.clear();
            self.send_locked(progress, tokens);
        }
    }

    /// Hands the parser, which is idle, to a worker.
    fn send_locked(&self, progress: &mut Progress, tokens: &[u32]) {
        let parser = std::mem::replace(&mut progress.parser, Parser::Busy);
        let Parser::Idle(matcher) = parser else { return };
        let (start, slot) = (Arc::clone(&self.start), Arc::clone(&self.slot));
        let (spent, known) = (Arc::clone(&self.spent), Arc::clone(&progress.known));
        self.workers.send(Job { start, slot, spent, known, matcher, tokens: tokens.to_vec() });
    }
}

impl fmt::Debug for GrammarState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarState").finish_non_exhaustive()
    }
}

impl Spent {
    /// A counter of the time spent on one request of `client`.
    pub(super) fn of(client: Client) -> Arc<Spent> {
        Arc::new(Spent { client, ..Spent::default() })
    }

    fn get(&self) -> Duration {
        Duration::from_micros(self.micros.load(Ordering::Relaxed))
    }

    fn ahead(&self) -> Duration {
        Duration::from_micros(self.ahead_micros.load(Ordering::Relaxed))
    }
}

fn add(micros: &AtomicU64, time: Duration) {
    let time = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    micros.fetch_add(time, Ordering::Relaxed);
}

impl Job {
    /// The client of the request.
    pub(super) fn client(&self) -> &Client {
        &self.spent.client
    }

    /// Processor time that was spent on the masks of the request so far.
    pub(super) fn spent(&self) -> Duration {
        self.spent.get()
    }

    /// Computes the mask. Once the request's budget is used up, the mask is an error. Then looks
    /// ahead, as long as the time for that is not used up.
    pub(super) fn run(self) {
        let Self { start, slot, spent, known, matcher, tokens } = self;
        let advance = || {
            if spent.get() >= BUDGET {
                let limit = BUDGET.as_secs();
                let reason = format!(
                    "the grammar is too slow: expected at most {limit} s of processor time for the \
                     allowed tokens of a whole request, got more"
                );
                return (None, Err(GrammarError::new(reason)));
            }
            let clock = OwnTime::start();
            let advanced = advance(&known, matcher, &start, &tokens);
            add(&spent.micros, clock.spent());
            advanced
        };
        let (matcher, mask) = catch(advance)
            .unwrap_or_else(|_| (None, Err(GrammarError::new("the parser of the grammar failed"))));
        let forced = known.forced_after(&tokens).to_vec();
        let mut known = Known { tokens, mask, forced, ahead: Vec::new() };
        // The mask may be used while the worker looks ahead.
        let wanted = slot.publish(&known, None);
        if let (Some(matcher), true) = (&matcher, spent.ahead() < AHEAD_BUDGET) {
            let clock = OwnTime::start();
            // A guess that fails is of no use, and nothing else.
            let found = catch(|| known.look_ahead(matcher, &wanted)).ok();
            (known.forced, known.ahead) = found.unwrap_or_default();
            add(&spent.ahead_micros, clock.spent());
        }
        slot.publish(&known, Some(Parser::Idle(matcher)));
    }
}

impl Slot {
    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces what is known, and the parser if it is given. Returns the tokens that are wanted.
    fn publish(&self, known: &Known, parser: Option<Parser>) -> Vec<u32> {
        let mut progress = self.lock();
        progress.known = Arc::new(known.clone());
        if let Some(parser) = parser {
            progress.parser = parser;
        }
        let wanted = std::mem::take(&mut progress.wanted);
        drop(progress);
        self.finished.notify_all();
        wanted
    }
}

type Advanced = (Option<Box<Matcher>>, Result<Arc<TokenMask>, GrammarError>);

/// Accepts those of `tokens` that are not known yet, and computes the next mask.
fn advance(
    known: &Known,
    matcher: Option<Box<Matcher>>,
    start: &Start,
    tokens: &[u32],
) -> Advanced {
    let continued = tokens.strip_prefix(known.tokens.as_slice());
    let (mut matcher, rest) = match (matcher, continued) {
        (matcher, Some([])) => return (matcher, known.mask.clone()),
        (Some(matcher), Some(rest)) => (matcher, rest),
        _ => {
            let first = start.matcher.lock().unwrap_or_else(PoisonError::into_inner);
            if tokens.is_empty() {
                return (None, Ok(Arc::clone(&start.mask)));
            }
            (Box::new(first.clone()), tokens)
        }
    };
    for &token in rest {
        // After the end of the grammar, only end-of-sequence tokens can come.
        if matcher.is_stopped() {
            break;
        }
        if let Err(error) = matcher.consume_token(token) {
            let error = GrammarError::new(message(&error.to_string()));
            return (Some(matcher), Err(error));
        }
    }
    let mask = next_mask(&mut matcher).map(Arc::new);
    (Some(matcher), mask)
}

impl Known {
    /// The forced tokens after those that are known, and the masks after as many of `wanted` as the
    /// grammar allows.
    fn look_ahead(
        &self,
        matcher: &Matcher,
        wanted: &[u32],
    ) -> (Vec<u32>, Vec<(u32, Arc<TokenMask>)>) {
        let Ok(mask) = &self.mask else { return Default::default() };
        let mut forced = self.forced.clone();
        // Where text is forced, only tokens with the beginnings of it are allowed, which are few.
        if forced.is_empty() && mask.allows_at_most(FORCED_ALLOWED) && !matcher.is_stopped() {
            let mut ahead = matcher.clone();
            let mut bytes = ahead.compute_ff_bytes();
            bytes.truncate(FORCED_BYTES);
            if let Ok(env) = ahead.tok_env() {
                forced = env.tok_trie().greedy_tokenize(&bytes);
            }
        }
        let mut masks: Vec<(u32, Arc<TokenMask>)> = Vec::new();
        if wanted.is_empty() {
            return (forced, masks);
        }
        let mut ahead = matcher.clone();
        for &token in wanted {
            let before = masks.last().map_or(mask, |(_, mask)| mask);
            if !before.allows(token) || ahead.is_stopped() || ahead.consume_token(token).is_err() {
                break;
            }
            let Ok(mask) = next_mask(&mut ahead) else { break };
            masks.push((token, Arc::new(mask)));
        }
        (forced, masks)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::{Grammar, GrammarCompiler};
    use crate::Tokenizer;

    /// Goal: a mask that was begun in advance equals the one that is computed from the first token
    /// on, and allows exactly the tokens that the parser accepts one by one; also after a step
    /// back, as when a sequence is used again.
    #[test]
    fn masks_equal_those_of_the_slow_path() {
        let schema = json!({
            "type": "object", "additionalProperties": false, "required": ["a", "b"],
            "properties": {"a": {"type": "string", "maxLength": 5}, "b": {"type": "number"}},
        });
        let lark = "start: \"x\" start | /[a-z]+ü?/ \";\"".to_owned();
        let grammars =
            [Grammar::JsonSchema(schema), Grammar::Lark(lark), Grammar::Regex("(ab|a)*é".into())];
        let compiler = GrammarCompiler::new(Tokenizer::bytes(), &[0]);
        for grammar in grammars {
            let compiled = compiler.compile(&grammar).expect("a valid grammar");
            let state = compiled.state();
            let mut tokens: Vec<u32> = Vec::new();
            let mut random: u32 = 1;
            for _ in 0..60 {
                let fast = state.mask(&tokens).expect("a mask");
                let slow = state.restarted().mask(&tokens).expect("a mask");
                assert_eq!(fast, slow, "{grammar:?} {tokens:?}");
                let mut matcher = compiled.state().start.matcher.lock().expect("idle").clone();
                matcher.consume_tokens(&tokens).expect("accepted");
                for token in 1..256 {
                    let accepts = matcher.validate_tokens(&[token]).expect("a count") == 1;
                    assert_eq!(fast.allows(token), accepts, "{grammar:?} {tokens:?} {token}");
                }
                assert_eq!(fast.allows(0), fast.may_end());
                let allowed: Vec<u32> = (1..256).filter(|&token| fast.allows(token)).collect();
                if allowed.is_empty() {
                    break;
                }
                random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                tokens.push(allowed[(random >> 16) as usize % allowed.len()]);
                state.begin(&tokens);
            }
            assert!(tokens.len() >= 2);
            let back = state.mask(&tokens[..2]).expect("a mask");
            assert_eq!(back, state.restarted().mask(&tokens[..2]).expect("a mask"));
        }
    }

    /// Calls `is_done` until it returns true, while workers compute.
    fn wait_for(mut is_done: impl FnMut() -> bool) {
        for _ in 0..10_000 {
            if is_done() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        panic!("the workers found nothing");
    }

    /// Goal: masks that were computed ahead are those of the slow path, as far as the grammar allows
    /// the proposals; whatever was proposed, no later mask changes.
    #[test]
    fn looking_ahead_changes_no_mask() {
        let compiler = GrammarCompiler::new(Tokenizer::bytes(), &[0]);
        let compiled = compiler.compile(&Grammar::Regex("(abc|abd)*xyz".into())).expect("valid");
        let answer: Vec<u32> = "abcabdabcabcxyz".bytes().map(u32::from).collect();
        for (wrong, allowed) in [(0, 0), (1, 1), (3, 3), (20, 6)] {
            let state = compiled.state();
            for at in (1..9).step_by(2) {
                let mut proposals = answer[at..at + 6].to_vec();
                if let Some(token) = proposals.get_mut(wrong) {
                    *token = u32::from(b'!');
                }
                state.mask(&answer[..at]).expect("a mask");
                // A job may be running, which forgets what is wanted if it is just ending.
                wait_for(|| {
                    state.begin_ahead(&answer[..at], &proposals);
                    state.is_ready(&answer[..at + allowed.min(6)])
                });
                for end in at..=at + 6 {
                    let slow = state.restarted().mask(&answer[..end]).expect("a mask");
                    if end - at > allowed {
                        assert!(!state.is_ready(&[&answer[..at], &proposals[..end - at]].concat()));
                    } else {
                        assert!(state.is_ready(&answer[..end]));
                        assert_eq!(state.mask(&answer[..end]).expect("a mask"), slow);
                    }
                }
            }
            let last = state.mask(&answer).expect("a mask");
            assert_eq!(last, state.restarted().mask(&answer).expect("a mask"));
        }
    }

    /// Goal: the text to which a grammar leaves no alternative is known in advance, and no more.
    #[test]
    fn forced_text_is_known() {
        let schema = json!({
            "type": "object", "additionalProperties": false, "required": ["name"],
            "properties": {"name": {"enum": ["one", "two"]}},
        });
        let compiler = GrammarCompiler::new(Tokenizer::bytes(), &[0]);
        let compiled = compiler.compile(&Grammar::JsonSchema(schema)).expect("valid");
        let tokens = |text: &str| text.bytes().map(u32::from).collect::<Vec<u32>>();
        let state = compiled.state();
        let after = tokens("{\"");
        state.mask(&after).expect("a mask");
        wait_for(|| !state.forced(&after).is_empty());
        // Space may come before the colon.
        assert_eq!(state.forced(&after), tokens("name\""));
        // It is known as the answer goes on, without a further mask.
        assert_eq!(state.forced(&tokens("{\"na")), tokens("me\""));
        assert!(state.forced(&tokens("{\"nb")).is_empty());
    }
}
