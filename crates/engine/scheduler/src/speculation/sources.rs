//! The engine's own sources of drafts.

use super::copying::Copying;
use super::{DraftContext, DraftSource};

/// Number of tokens that are read from the tree at once.
const READ: usize = 64;

/// A look-up in the tree compares all tokens of a sequence. After a look-up without a result, the
/// next one waits for one token, and for another one per this number of tokens of the sequence.
const LOOKED_UP: usize = 1_024;

/// All sources, in the order of preference.
pub(super) fn all() -> Vec<Box<dyn DraftSource>> {
    vec![
        Box::new(Forced),
        Box::new(Predicted::default()),
        Box::new(FromTree::default()),
        Box::new(FromItself::default()),
    ]
}

/// The tokens to which the grammar of the request leaves no alternative.
#[derive(Debug)]
struct Forced;

impl DraftSource for Forced {
    fn draft(&mut self, context: &DraftContext<'_>, limit: usize) -> Vec<u32> {
        let mut tokens = context.sampler.forced();
        tokens.truncate(limit);
        tokens
    }
}

/// The answer that the caller expects.
#[derive(Debug, Default)]
struct Predicted(Option<Copying>);

impl DraftSource for Predicted {
    fn draft(&mut self, context: &DraftContext<'_>, limit: usize) -> Vec<u32> {
        if context.prediction.is_empty() {
            return Vec::new();
        }
        let copying = self.0.get_or_insert_with(|| Copying::from_start(context.prompt_len));
        copying.draft(context.prediction, context.tokens, false, limit)
    }
}

/// An earlier part of the prompt or of the answer (prompt lookup).
#[derive(Debug, Default)]
struct FromItself(Copying);

impl DraftSource for FromItself {
    fn draft(&mut self, context: &DraftContext<'_>, limit: usize) -> Vec<u32> {
        self.0.draft(context.tokens, context.tokens, true, limit)
    }
}

/// What other requests of the namespace went on with after exactly these tokens.
#[derive(Debug, Default)]
struct FromTree {
    /// Tokens that were read from the tree.
    read: Vec<u32>,
    /// Number of tokens of the sequence before them.
    from: usize,
    /// Number of tokens of the sequence at the next look-up, if `read` is of no use.
    next: usize,
}

impl DraftSource for FromTree {
    fn draft(&mut self, context: &DraftContext<'_>, limit: usize) -> Vec<u32> {
        let tokens = context.tokens;
        // The tokens since the last call were compared then, or are compared now.
        let since = tokens.get(self.from..).unwrap_or_default();
        let followed = self.read.strip_prefix(since).filter(|rest| !rest.is_empty());
        if followed.is_none() && tokens.len() >= self.next {
            self.read = context.tree.continuation(context.namespace, tokens, READ);
            self.from = tokens.len();
            self.next = tokens.len() + 1 + tokens.len() / LOOKED_UP;
        } else if followed.is_none() {
            self.read.clear();
        }
        let rest = self.read.get(tokens.len() - self.from.min(tokens.len())..).unwrap_or_default();
        rest[..rest.len().min(limit)].to_vec()
    }
}
