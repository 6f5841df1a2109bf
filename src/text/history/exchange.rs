//! A request with its answers, as the history keeps it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use stolon_text::Answer;

use super::outline::{self, Outline};
use super::{Digest, Known};

/// Maximum number of answers of one exchange. The oldest is forgotten first.
const ANSWERS: usize = 16;
/// Maximum number of exchanges that one continues, directly or indirectly. Beyond it, all tokens of
/// a prompt are stored again.
const DEPTH: usize = 256;
/// Memory of an exchange or an answer without its tokens and texts, in bytes: an estimate.
const OVERHEAD: usize = 512;

/// Number of leading tokens of a piece that are those of a prompt, by the address of the piece and
/// its position in the prompt.
pub(super) type Compared = HashMap<(*const u32, usize), usize>;

/// A prompt that was submitted, and the answers to it.
#[derive(Debug)]
pub(crate) struct Exchange {
    /// The digest of the scope and the messages, or the tokens of another prompt.
    pub(crate) conversation: Digest,
    pub(super) outline: Outline,
    /// Length of the rendered conversation, in bytes.
    pub(crate) text_len: usize,
    /// The digest of the rendered conversation.
    pub(crate) text_digest: Digest,
    /// The request that it continues, with the answer to it.
    base: Option<(Arc<Exchange>, Arc<Answered>)>,
    /// The tokens of the prompt after those of `base`.
    tokens: Box<[u32]>,
    /// Number of exchanges below `base`, with it.
    depth: usize,
    /// The newest last.
    answers: Mutex<Vec<Arc<Answered>>>,
    /// Set when the history keeps the exchange.
    kept: OnceLock<Kept>,
}

/// What is known of an exchange that the history keeps.
#[derive(Debug)]
struct Kept {
    memory: Memory,
    /// Number of blocks that the cache had evicted when the request was submitted.
    evictions: u64,
}

/// An answer that was sampled.
#[derive(Debug)]
pub(crate) struct Answered {
    /// Its tokens, without the token that ended it.
    pub(crate) tokens: Box<[u32]>,
    /// The text of these tokens, with special tokens.
    pub(crate) text: Box<str>,
    /// The parts of the answer, as [`messages::normalized`](super::messages::normalized) has them.
    pub(crate) said: Answer,
    _memory: Memory,
}

/// A share of the history's memory. It is released on drop.
#[derive(Debug)]
struct Memory {
    of: Arc<AtomicUsize>,
    bytes: usize,
}

impl Memory {
    fn new(of: &Arc<AtomicUsize>, bytes: usize) -> Memory {
        of.fetch_add(bytes, Ordering::Relaxed);
        Memory { of: Arc::clone(of), bytes }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.of.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Exchange {
    /// A prompt that is not a conversation.
    pub(crate) fn of_tokens(outline: Outline, tokens: &[u32]) -> Exchange {
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        let digest = *blake3::keyed_hash(&outline.scope(), &bytes).as_bytes();
        Exchange::new(digest, outline, "", None, tokens.to_vec())
    }

    /// A conversation whose text is `text`. Its prompt is the prompt and the answer of `base`, if
    /// it continues one, and `tokens`.
    pub(crate) fn new(
        conversation: Digest,
        outline: Outline,
        text: &str,
        base: Option<Known>,
        tokens: Vec<u32>,
    ) -> Exchange {
        let text = (text.len(), *blake3::hash(text.as_bytes()).as_bytes());
        Exchange::stored(conversation, outline, text, base, tokens)
    }

    /// The same with the length and the digest of the text.
    pub(super) fn stored(
        conversation: Digest,
        outline: Outline,
        (text_len, text_digest): (usize, Digest),
        base: Option<Known>,
        tokens: Vec<u32>,
    ) -> Exchange {
        let base = base.map(|known| (known.exchange, known.answer));
        let depth = base.as_ref().map_or(0, |(exchange, _)| exchange.depth + 1);
        let mut exchange = Exchange {
            conversation,
            outline,
            text_len,
            text_digest,
            base,
            tokens: tokens.into(),
            depth,
            answers: Mutex::default(),
            kept: OnceLock::new(),
        };
        if depth > DEPTH {
            exchange.tokens = exchange.prompt().into();
            (exchange.base, exchange.depth) = (None, 0);
        }
        exchange
    }

    /// The request that it continues, if its answer is the last one in the conversation.
    pub(super) fn previous(&self) -> Option<&Arc<Exchange>> {
        let (exchange, _) = self.base.as_ref()?;
        let answer = exchange.outline.messages.len();
        let after = self.outline.messages.get(answer + 1..)?;
        after.iter().all(|mark| mark.said.is_none()).then_some(exchange)
    }

    /// The tokens of the prompt.
    pub(crate) fn prompt(&self) -> Vec<u32> {
        self.pieces().concat()
    }

    /// The tokens of the prompt, in pieces.
    fn pieces(&self) -> Vec<&[u32]> {
        let mut pieces: Vec<&[u32]> = vec![&self.tokens];
        let mut base = &self.base;
        while let Some((exchange, answer)) = base {
            pieces.extend([&*answer.tokens, &*exchange.tokens]);
            base = &exchange.base;
        }
        pieces.reverse();
        pieces
    }

    /// Number of tokens that a prompt begins with that are those of this prompt, and of this prompt
    /// with the answer that has most of them. Also returns that answer. `compared` has the pieces
    /// that the prompt was compared with: conversations share most of theirs.
    pub(super) fn common(
        &self,
        tokens: &[u32],
        compared: &mut Compared,
    ) -> (usize, Option<Arc<Answered>>) {
        let mut common = 0;
        for piece in self.pieces() {
            let place = (piece.as_ptr(), common);
            let compare = || common_len(piece, &tokens[common..]);
            let here = *compared.entry(place).or_insert_with(compare);
            common += here;
            if here < piece.len() {
                return (common, None);
            }
        }
        let answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        let lens = answers.iter().map(|answer| common_len(&answer.tokens, &tokens[common..]));
        match lens.zip(answers.iter()).max_by_key(|(len, _)| *len) {
            Some((len, answer)) => (common + len, Some(Arc::clone(answer))),
            None => (common, None),
        }
    }

    /// Whether an answer says the same as a message with this digest, with this reasoning if it is
    /// given.
    pub(super) fn has_said(&self, said: &Digest, reasoning: Option<&Digest>) -> bool {
        let answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same = |answer: &Arc<Answered>| {
            let own = outline::digest(answer.said.reasoning.as_bytes());
            outline::digest_of(&answer.said) == *said && reasoning.is_none_or(|other| own == *other)
        };
        answers.iter().any(is_same)
    }

    /// Whether another exchange has the same prompt.
    pub(super) fn has_same_prompt(&self, other: &Exchange) -> bool {
        self.text_digest == other.text_digest && self.prompt() == other.prompt()
    }

    /// Counts the memory of the exchange. `evictions` is the number of blocks that the cache has
    /// evicted.
    pub(super) fn keep(&self, of: &Arc<AtomicUsize>, evictions: u64) {
        self.kept.get_or_init(|| Kept { memory: Memory::new(of, self.bytes()), evictions });
    }

    /// Number of blocks that the cache had evicted when the request was submitted.
    pub(super) fn evictions(&self) -> Option<u64> {
        self.kept.get().map(|kept| kept.evictions)
    }

    /// Size in bytes, without its base.
    fn bytes(&self) -> usize {
        OVERHEAD + self.outline.bytes() + size_of_val(&*self.tokens)
    }

    /// The newest answer that says the same as `said`, which is normalized. An answer without
    /// reasoning is the same as one with it: clients leave it out.
    pub(super) fn answer(&self, said: &Answer) -> Option<Arc<Answered>> {
        let answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same = |answered: &&Arc<Answered>| {
            let own = &answered.said;
            (said.reasoning.is_empty() || said.reasoning == own.reasoning)
                && (&said.text, &said.calls) == (&own.text, &own.calls)
        };
        answers.iter().rev().find(is_same).cloned()
    }

    /// Adds an answer to a request that the history keeps, and returns it.
    pub(crate) fn answered(
        &self,
        tokens: Vec<u32>,
        text: String,
        said: Answer,
    ) -> Option<Arc<Answered>> {
        let Kept { memory, .. } = self.kept.get()?;
        let of_calls = said.calls.iter().map(|call| call.name.len() + call.arguments.len());
        let of_texts = text.len() + said.reasoning.len() + said.text.len();
        let bytes = OVERHEAD + of_texts + of_calls.sum::<usize>() + size_of_val(&*tokens);
        let (tokens, text) = (tokens.into(), text.into());
        let _memory = Memory::new(&memory.of, bytes);
        let answered = Arc::new(Answered { tokens, text, said, _memory });
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        answers.retain(|other| other.tokens != answered.tokens);
        if answers.len() == ANSWERS {
            answers.remove(0);
        }
        answers.push(Arc::clone(&answered));
        Some(answered)
    }
}

/// What is stored.
#[cfg(feature = "tiers")]
impl Exchange {
    /// The request that it continues, with the answer to it.
    pub(super) fn base(&self) -> Option<(&Arc<Exchange>, &Arc<Answered>)> {
        self.base.as_ref().map(|(exchange, answer)| (exchange, answer))
    }

    /// The tokens of the prompt after those of [`Exchange::base`].
    pub(super) fn own_tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Its answers, the oldest first.
    pub(super) fn answers(&self) -> Vec<Arc<Answered>> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The answer whose tokens these are.
    pub(super) fn answer_with(&self, is_it: impl Fn(&[u32]) -> bool) -> Option<Arc<Answered>> {
        self.answers().into_iter().find(|answer| is_it(&answer.tokens))
    }

    /// Size in bytes when it is stored, roughly.
    pub(super) fn stored_bytes(&self) -> usize {
        /// Number of digits of a token, with the comma.
        const TOKEN: usize = 6;
        2 * self.outline.bytes() + TOKEN * self.tokens.len()
    }
}

#[cfg(feature = "tiers")]
impl Answered {
    /// Size in bytes when it is stored, roughly.
    pub(super) fn stored_bytes(&self) -> usize {
        6 * self.tokens.len() + 2 * self.text.len()
    }
}

/// Number of leading tokens that are equal.
fn common_len(left: &[u32], right: &[u32]) -> usize {
    /// Tokens that are compared at once.
    const CHUNK: usize = 64;
    let chunks = left.chunks_exact(CHUNK).zip(right.chunks_exact(CHUNK));
    let equal = chunks.take_while(|(left, right)| left == right).count() * CHUNK;
    let rest = left[equal..].iter().zip(&right[equal..]);
    equal + rest.take_while(|(left, right)| left == right).count()
}
