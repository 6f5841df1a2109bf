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
use crate::processor_time::ProcessorTime;

/// Processor time that the masks of a request may take together. A request that needs more ends
/// with an error.
const BUDGET: Duration = Duration::from_secs(10);

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
    /// It guards no other memory, so all accesses are relaxed.
    micros: AtomicU64,
}

/// The state that a sequence shares with the workers.
struct Slot {
    progress: Mutex<Progress>,
    /// Notified when a worker has finished.
    finished: Condvar,
}

enum Progress {
    Idle(Box<Reached>),
    /// A worker computes with it.
    Busy,
}

/// The state of a sequence after some tokens.
struct Reached {
    /// The parser after `tokens`; `None` before the first token.
    matcher: Option<Matcher>,
    tokens: Vec<u32>,
    /// The mask after `tokens`.
    mask: Result<Arc<TokenMask>, GrammarError>,
}

/// A mask to compute.
pub(super) struct Job {
    start: Arc<Start>,
    slot: Arc<Slot>,
    spent: Arc<Spent>,
    reached: Box<Reached>,
    /// All tokens of the sequence.
    tokens: Vec<u32>,
}

impl GrammarState {
    pub(super) fn new(start: Arc<Start>, spent: Arc<Spent>, workers: Workers) -> Self {
        let mask = Ok(Arc::clone(&start.mask));
        let reached = Box::new(Reached { matcher: None, tokens: Vec::new(), mask });
        let progress = Mutex::new(Progress::Idle(reached));
        let slot = Arc::new(Slot { progress, finished: Condvar::new() });
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

    /// Whether the mask of the token after `tokens` is known.
    #[must_use]
    pub fn is_ready(&self, tokens: &[u32]) -> bool {
        matches!(&*self.slot.lock(), Progress::Idle(reached) if reached.tokens == tokens)
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
            match &*progress {
                Progress::Idle(reached) if reached.tokens == tokens => {
                    return reached.mask.clone().map_err(GrammarFailure::from);
                }
                Progress::Idle(_) => self.begin_locked(&mut progress, tokens),
                Progress::Busy => {}
            }
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
        match progress {
            Progress::Idle(reached) if reached.tokens != tokens => {}
            _ => return,
        }
        if let Progress::Idle(reached) = std::mem::replace(progress, Progress::Busy) {
            let (start, slot) = (Arc::clone(&self.start), Arc::clone(&self.slot));
            let (spent, tokens) = (Arc::clone(&self.spent), tokens.to_vec());
            self.workers.send(Job { start, slot, spent, reached, tokens });
        }
    }
}

impl fmt::Debug for GrammarState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarState").finish_non_exhaustive()
    }
}

impl Slot {
    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Spent {
    /// A counter of the time spent on one request of `client`.
    pub(super) fn of(client: Client) -> Arc<Spent> {
        Arc::new(Spent { client, micros: AtomicU64::new(0) })
    }

    fn get(&self) -> Duration {
        Duration::from_micros(self.micros.load(Ordering::Relaxed))
    }

    fn add(&self, time: Duration) {
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.micros.fetch_add(micros, Ordering::Relaxed);
    }
}

impl Job {
    /// The client of the request.
    pub(super) fn client(&self) -> &Client {
        &self.spent.client
    }

    /// Processor time that was spent on the request so far.
    pub(super) fn spent(&self) -> Duration {
        self.spent.get()
    }

    /// Computes the mask. Once the request's budget is used up, the mask is an error.
    pub(super) fn run(self) {
        let Self { start, slot, spent, reached, tokens } = self;
        let advance = || {
            if spent.get() >= BUDGET {
                let limit = BUDGET.as_secs();
                let reason = format!(
                    "the grammar is too slow: expected at most {limit} s of processor time for the \
                     allowed tokens of a whole request, got more"
                );
                return (None, Err(GrammarError::new(reason)));
            }
            let clock = ProcessorTime::of_this_thread();
            let advanced = reached.advance(&start, &tokens);
            spent.add(clock.spent());
            advanced
        };
        let (matcher, mask) = catch(advance)
            .unwrap_or_else(|_| (None, Err(GrammarError::new("the parser of the grammar failed"))));
        *slot.lock() = Progress::Idle(Box::new(Reached { matcher, tokens, mask }));
        slot.finished.notify_all();
    }
}

type Advanced = (Option<Matcher>, Result<Arc<TokenMask>, GrammarError>);

impl Reached {
    /// Accepts those of `tokens` that have not been accepted yet, and computes the next mask.
    fn advance(self, start: &Start, tokens: &[u32]) -> Advanced {
        let continued = tokens.strip_prefix(self.tokens.as_slice());
        let (mut matcher, rest) = match (self.matcher, continued) {
            (Some(matcher), Some(rest)) => (matcher, rest),
            _ => {
                let first = start.matcher.lock().unwrap_or_else(PoisonError::into_inner);
                if tokens.is_empty() {
                    return (None, Ok(Arc::clone(&start.mask)));
                }
                (first.clone(), tokens)
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
}
