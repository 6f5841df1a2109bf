//! Speculative decoding: which tokens are proposed to follow a sequence in a step, and how many.
//!
//! A step that decodes reads all weights for one position per sequence, so on most machines a few
//! more positions cost little. A [`DraftSource`] guesses the next tokens from what is known already.
//! The executor computes their positions in the same step and keeps those that the sampler would
//! have chosen (`verify.rs`), so a proposal changes no bit of an answer. It only costs time if it
//! is wrong.
//!
//! 1. [`Drafts`] belongs to a sequence. While proposals may pay, it asks every source for a draft in
//!    each step, and compares the drafts with the tokens that were sampled, whether or not they were
//!    proposed. So the share of right guesses of a source is known at no cost.
//! 2. [`StepTimes`] learns how long a step takes and by how much a proposed token makes it longer,
//!    for the present number of sequences.
//! 3. Both together say how many tokens to propose: as long as the time that the next one saves, if
//!    it is right, times the probability of that, exceeds the time that it takes. This is none
//!    where it does not pay.
//!
//! Proposals take what others leave: tokens of a step without prompts, positions of a block that
//! the sequence has reserved anyway, and time within [`StepTimes::room`].

mod copying;
mod model;
mod sources;
mod times;

use std::fmt;
use std::sync::Arc;

use stolon_backend::SamplerState;
use stolon_kvcache::{Namespace, TreeReader};

pub(crate) use model::{Candidate, Choice, ModelTimes};
pub(crate) use times::{StepTimes, Worth};

/// Whether and how tokens are proposed to follow the sequences of a step. Proposals change no
/// answer.
#[derive(Clone, Debug)]
pub struct Speculation {
    /// Maximum number of tokens that are proposed for one sequence in one step, at most
    /// [`Speculation::MAX_TOKENS`]. 0 proposes nothing.
    pub max_tokens: usize,
    /// Whether proposals are made only where they are expected to save time. If false, every draft
    /// is proposed, which is for tests and comparisons.
    pub adaptive: bool,
    /// Sources of drafts that take the place of the engine's own.
    pub sources: Option<DraftSources>,
}

impl Default for Speculation {
    /// Up to 8 tokens, adaptively, from the engine's own sources.
    fn default() -> Speculation {
        Speculation { max_tokens: 8, adaptive: true, sources: None }
    }
}

impl Speculation {
    /// Largest value of [`Speculation::max_tokens`]. Each proposed token takes a row of logits.
    pub const MAX_TOKENS: usize = 32;

    /// Proposes nothing.
    #[must_use]
    pub fn off() -> Speculation {
        Speculation { max_tokens: 0, ..Speculation::default() }
    }
}

/// What is known about a sequence when its next tokens are guessed.
#[derive(Clone, Copy, Debug)]
pub struct DraftContext<'a> {
    /// Prompt and generated tokens. Positions of images have values above all token ids.
    pub tokens: &'a [u32],
    /// Number of prompt tokens at the start of `tokens`.
    pub prompt_len: usize,
    /// The text that the caller expects as the answer; empty if there is none.
    pub prediction: &'a [u32],
    /// What other requests have computed in `namespace`. No source reads another namespace.
    pub tree: &'a TreeReader,
    /// The namespace of the request.
    pub namespace: &'a Namespace,
    /// The sampler of the request, whose processor may know tokens that must follow.
    pub sampler: &'a SamplerState,
}

/// Guesses the next tokens of one sequence.
///
/// It is asked before each step that could propose tokens of its sequence. Several tokens may have
/// followed since the last time. It is asked between two steps, so it must take microseconds: work
/// that is proportional to a whole prompt has to be spread over several calls. Its memory must be
/// bounded. Draft models are no such source, because their guesses take time
/// ([`Backend::draft`](stolon_backend::Backend::draft)).
pub trait DraftSource: Send + fmt::Debug {
    /// The tokens that may follow `context.tokens`, most likely right, at most `limit`.
    fn draft(&mut self, context: &DraftContext<'_>, limit: usize) -> Vec<u32>;
}

/// Makes the sources of a sequence, in the order of preference.
#[derive(Clone)]
pub struct DraftSources(Arc<dyn Fn() -> Vec<Box<dyn DraftSource>> + Send + Sync>);

impl DraftSources {
    /// Calls `make` for each sequence that may propose tokens.
    pub fn new(make: impl Fn() -> Vec<Box<dyn DraftSource>> + Send + Sync + 'static) -> Self {
        DraftSources(Arc::new(make))
    }
}

impl fmt::Debug for DraftSources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DraftSources")
    }
}

/// The sources of one sequence, and how often they were right.
#[derive(Debug)]
pub(crate) struct Drafts {
    sources: Vec<Tracked>,
    model: FromModel,
    /// Whether tokens were proposed in the last step that could have had some.
    has_proposed: bool,
}

/// A source with its last draft.
#[derive(Debug)]
struct Tracked {
    source: Box<dyn DraftSource>,
    /// The tokens of its last draft that were not compared yet.
    draft: Vec<u32>,
    acceptance: Acceptance,
}

/// The guesses of a draft model, if the backend has one.
#[derive(Debug)]
struct FromModel {
    /// The tokens of its last draft that were not compared yet.
    draft: Vec<u32>,
    acceptance: Acceptance,
    /// The time in seconds that its drafts would have saved since the last one.
    earned: f64,
    /// Whether it has guessed tokens when it was last asked, so that it has the keys and values of the
    /// sequence.
    is_ready: bool,
}

/// The tokens that are proposed for a sequence.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Proposal {
    /// These; none if the list is empty.
    Tokens(Vec<u32>),
    /// At most `count` tokens that a draft model guesses before the step, if it has to compute no
    /// more than `missing_max` tokens of the sequence for it.
    Model { count: usize, missing_max: usize },
}

impl Proposal {
    /// Maximum number of tokens.
    pub(crate) fn len(&self) -> usize {
        match self {
            Proposal::Tokens(tokens) => tokens.len(),
            Proposal::Model { count, .. } => *count,
        }
    }
}

/// The share of guesses that were right. Later ones count more.
#[derive(Clone, Copy, Debug)]
struct Acceptance {
    right: f64,
    all: f64,
}

impl Acceptance {
    /// Weight of the earlier guesses when another one is added: about twenty count.
    const KEPT: f64 = 0.95;

    /// As if one of two guesses had been right, so that the first drafts are tried.
    const UNKNOWN: Acceptance = Acceptance { right: 1.0, all: 2.0 };

    /// Part that remains of the guesses after a step without any, so that a source that was wrong is
    /// tried again after some thousand steps.
    const REMEMBERED: f64 = 0.9995;

    /// As if two guesses had been right at this rate.
    fn expected(rate: f64) -> Acceptance {
        Acceptance { right: Acceptance::UNKNOWN.all * rate, ..Acceptance::UNKNOWN }
    }

    /// Moves towards what is unknown, in a step without guesses.
    fn forget(&mut self) {
        let Acceptance { right, all } = Acceptance::UNKNOWN;
        self.right = right + Acceptance::REMEMBERED * (self.right - right);
        self.all = all + Acceptance::REMEMBERED * (self.all - all);
    }

    /// Compares a draft with the tokens that have followed, and keeps what was not compared. Returns
    /// how many tokens were right.
    fn compare(&mut self, draft: &mut Vec<u32>, followed: &[u32]) -> usize {
        let right = draft.iter().zip(followed).take_while(|(a, b)| a == b).count();
        (0..right).for_each(|_| self.note(true));
        match right == followed.len() {
            true => drop(draft.drain(..right)),
            false => {
                if right < draft.len() {
                    self.note(false);
                }
                draft.clear();
            }
        }
        right
    }

    fn note(&mut self, is_right: bool) {
        self.right = Acceptance::KEPT * self.right + f64::from(u8::from(is_right));
        self.all = Acceptance::KEPT * self.all + 1.0;
    }

    fn rate(self) -> f64 {
        self.right / self.all
    }
}

impl Drafts {
    /// The sources of a new sequence. A draft model is expected to be right at this `rate`.
    pub(crate) fn new(speculation: &Speculation, rate: f64) -> Drafts {
        let sources = match &speculation.sources {
            Some(DraftSources(make)) => make(),
            None => sources::all(),
        };
        let tracked =
            |source| Tracked { source, draft: Vec::new(), acceptance: Acceptance::UNKNOWN };
        let model = FromModel {
            draft: Vec::new(),
            acceptance: Acceptance::expected(rate),
            earned: 0.0,
            is_ready: false,
        };
        Drafts { sources: sources.into_iter().map(tracked).collect(), model, has_proposed: false }
    }

    /// Whether tokens were proposed in the last step, so that more are likely to be.
    pub(crate) fn has_proposed(&self) -> bool {
        self.has_proposed
    }

    /// The tokens to propose, at most `limit`, and the time in seconds that they are expected to save:
    /// the draft of the source that saves the most time, and as much of it as is `worth` its time.
    /// Without `worth`, all of the first draft.
    pub(crate) fn propose(
        &mut self,
        context: &DraftContext<'_>,
        limit: usize,
        worth: Option<Worth>,
    ) -> (Vec<u32>, f64) {
        self.model.draft.clear();
        if limit == 0 || worth.is_some_and(|worth| !worth.may_pay()) {
            // Not even a search is worth its time.
            self.sources.iter_mut().for_each(|tracked| tracked.draft.clear());
            self.has_proposed = false;
            return (Vec::new(), 0.0);
        }
        let mut best: (f64, &[u32]) = (0.0, &[]);
        for Tracked { source, draft, acceptance } in &mut self.sources {
            *draft = source.draft(context, limit);
            draft.truncate(limit);
            let (count, saved) = match worth {
                Some(worth) => worth.best_len(acceptance.rate(), draft.len()),
                None => (draft.len(), 1.0),
            };
            if count > 0 && saved > best.0 {
                best = (saved, &draft[..count]);
            }
        }
        self.has_proposed = !best.1.is_empty();
        (best.1.to_vec(), best.0)
    }

    /// The share of the guesses of a draft model that is expected to be right.
    pub(crate) fn model_rate(&self) -> f64 {
        self.model.acceptance.rate()
    }

    /// A draft model would save `more` seconds than what is proposed now, with blocks for `count`
    /// tokens. Returns the time that it would have saved since its last draft if it should be asked;
    /// `None` to keep what is proposed, because there are no blocks, or because the draft model has
    /// yet to compute tokens of the sequence.
    pub(crate) fn prefer_model(&mut self, count: usize, more: f64) -> Option<f64> {
        let keeps = self.has_proposed && !self.model.is_ready;
        self.has_proposed = true;
        self.model.earned += more;
        if count == 0 || keeps {
            return None;
        }
        self.model.is_ready = false;
        Some(self.model.earned)
    }

    /// A draft model is not asked in this step.
    pub(crate) fn pass_model(&mut self) {
        self.model.acceptance.forget();
    }

    /// A draft model has guessed these tokens when it was asked.
    pub(crate) fn take_model_draft(&mut self, draft: Vec<u32>) {
        self.model = FromModel { draft, earned: 0.0, is_ready: true, ..self.model };
    }

    /// Learns which tokens have followed. Returns how many of them a draft model has guessed.
    pub(crate) fn learn(&mut self, followed: &[u32]) -> usize {
        for Tracked { draft, acceptance, .. } in &mut self.sources {
            acceptance.compare(draft, followed);
        }
        self.model.acceptance.compare(&mut self.model.draft, followed)
    }
}

#[cfg(test)]
mod tests {
    use stolon_backend::SamplingParams;

    use super::*;

    #[derive(Debug)]
    struct Fixed(&'static [u32]);

    impl DraftSource for Fixed {
        fn draft(&mut self, _context: &DraftContext<'_>, limit: usize) -> Vec<u32> {
            self.0[..limit.min(self.0.len())].to_vec()
        }
    }

    /// Goal: the source that was right is preferred, one that is always wrong ends up proposing
    /// nothing, and becomes interesting again when it is right, although it was not proposed.
    #[test]
    fn the_source_that_is_right_is_preferred() {
        let (_, tree) = stolon_kvcache::prefix_tree(16).expect("a valid block size");
        let sampler = SamplerState::new(SamplingParams::default(), &[]);
        let namespace = Namespace::default();
        let context = DraftContext {
            tokens: &[1],
            prompt_len: 1,
            prediction: &[],
            tree: &tree,
            namespace: &namespace,
            sampler: &sampler,
        };
        let sources = || -> Vec<Box<dyn DraftSource>> {
            vec![Box::new(Fixed(&[9, 9, 9, 9])), Box::new(Fixed(&[5, 6, 7, 8]))]
        };
        let sources = Some(DraftSources::new(sources));
        let mut drafts = Drafts::new(&Speculation { sources, ..Speculation::default() }, 0.5);
        let worth = Some(Worth { saved: 1.0, cost: 0.1 });
        for _ in 0..30 {
            drafts.propose(&context, 4, worth);
            drafts.learn(&[5, 6, 7, 8, 1]);
        }
        assert_eq!(drafts.propose(&context, 4, worth).0, [5, 6, 7, 8]);
        assert_eq!(drafts.propose(&context, 2, worth).0, [5, 6]);
        assert!(drafts.propose(&context, 0, worth).0.is_empty());
        for _ in 0..100 {
            drafts.propose(&context, 4, worth);
            drafts.learn(&[3]);
        }
        assert!(drafts.propose(&context, 4, worth).0.is_empty(), "nothing was right for long");
        for _ in 0..20 {
            drafts.propose(&context, 4, worth);
            drafts.learn(&[9]);
        }
        assert_eq!(drafts.propose(&context, 4, worth).0[0], 9);
    }

    /// Goal: tokens that arrive in several parts are compared with the draft as if they had come
    /// together.
    #[test]
    fn late_tokens_are_compared_with_the_rest_of_the_draft() {
        let fixed = || -> Vec<Box<dyn DraftSource>> { vec![Box::new(Fixed(&[]))] };
        let sources = Some(DraftSources::new(fixed));
        let learned = |parts: &[&[u32]]| {
            let mut drafts = Drafts::new(
                &Speculation { sources: sources.clone(), ..Speculation::default() },
                0.5,
            );
            drafts.sources[0].draft = vec![1, 2, 3, 4];
            parts.iter().for_each(|part| _ = drafts.learn(part));
            drafts.sources[0].acceptance.rate()
        };
        assert_eq!(learned(&[&[1, 2, 9]]), learned(&[&[1], &[2, 9]]));
        assert_eq!(learned(&[&[1, 2, 9], &[4]]), learned(&[&[1, 2, 9]]));
        assert!(learned(&[&[1, 2, 3, 4, 5]]) > learned(&[&[1, 2, 3, 9]]));
    }
}
