//! Explains why a part of a prompt is not cached, by the nearest earlier prompt.

use std::collections::HashSet;
use std::sync::Arc;

use super::exchange::{Answered, Compared, Exchange};
use super::outline::Mark;
use super::{Digest, History};
use crate::{CacheMiss, MissMessage, MissReason, PrefixMatch};

/// Maximum number of earlier prompts that a prompt is compared with, the newest ones.
const COMPARED: usize = 64;
/// Maximum number of earlier prompts of all tenants that are looked at.
const LOOKED_AT: usize = 1024;
/// Number of tokens after the common ones that are shown as text.
const SHOWN: usize = 48;
/// Length of a token in bytes, roughly: shared tokens and shared messages are weighed by it.
const TOKEN_BYTES: usize = 4;

/// The earlier prompt, with its answer, that a prompt has most in common with.
#[derive(Debug)]
struct Nearest {
    exchange: Arc<Exchange>,
    /// The tokens of the prompt and of the answer that continues most like the other prompt.
    tokens: Vec<u32>,
    /// Number of tokens of its prompt.
    prompt_len: usize,
    /// Number of leading tokens that are the same.
    common: usize,
}

/// A prompt that was compared, the number of leading tokens that are the same, and the answer to it
/// that has most of them.
type Candidate = (Arc<Exchange>, usize, Option<Arc<Answered>>);

/// How a prompt differs from the nearest earlier one.
#[derive(Debug)]
struct Difference {
    reason: MissReason,
    message: Option<MissMessage>,
}

impl Difference {
    fn new(reason: MissReason) -> Difference {
        Difference { reason, message: None }
    }

    fn at(reason: MissReason, index: usize, mark: &Mark) -> Difference {
        let message = MissMessage { index, role: mark.role.to_string() };
        Difference { reason, message: Some(message) }
    }
}

impl History {
    /// Why a part of a prompt is not cached. `found` is what is cached now, `resume_max` returns
    /// how much of a prompt of a length can be cached, `evictions` is the number of blocks that the
    /// cache has evicted, and `text` decodes tokens. `None` if all of it is cached, or if it has images.
    pub(crate) fn miss(
        &self,
        prompt: &Exchange,
        tokens: &[u32],
        found: PrefixMatch,
        resume_max: impl Fn(usize) -> usize,
        evictions: u64,
        text: impl Fn(&[u32]) -> String,
    ) -> Option<CacheMiss> {
        let (cached, max) = (found.resume, resume_max(tokens.len()));
        if cached >= max || prompt.outline.has_images {
            return None;
        }
        let nearest = self.nearest(prompt, tokens);
        let common = nearest.as_ref().map_or(0, |nearest| nearest.common);
        let shown = |tokens: &[u32]| text(&tokens[common..tokens.len().min(common + SHOWN)]);
        let mut miss = CacheMiss {
            reason: MissReason::New,
            prompt_tokens: tokens.len(),
            cached_tokens: cached,
            lost_tokens: 0,
            lost_time: None,
            common_tokens: common,
            message: None,
            prompt_text: shown(tokens),
            earlier_text: nearest.as_ref().map_or(String::new(), |nearest| shown(&nearest.tokens)),
        };
        let Some(nearest) = nearest else { return Some(miss) };
        // Computed before, but not cached now.
        let known = resume_max(common).min(max);
        let gone = known.saturating_sub(cached);
        // What follows in the nearest prompt, and not in this one.
        let apart = resume_max(nearest.tokens.len()).min(max).saturating_sub(known.max(cached));
        miss.lost_tokens = gone + apart;
        if apart > gone {
            let (ours, theirs) = (miss.prompt_text.as_str(), miss.earlier_text.as_str());
            let same_text = !ours.is_empty() && ours.starts_with(theirs)
                || !theirs.is_empty() && theirs.starts_with(ours);
            // The shorter part is decoded.
            let before = match prompt.text_len {
                len if len > 0 && tokens.len() - common < common => {
                    len.saturating_sub(text(&tokens[common..]).len())
                }
                _ => text(&tokens[..common]).len(),
            };
            Difference { reason: miss.reason, message: miss.message } =
                nearest.difference(prompt, same_text, before);
        } else if gone > 0 {
            miss.reason = match nearest.separation(prompt) {
                Some(reason) => reason,
                None if found.cached > cached => MissReason::NoCheckpoint,
                None => nearest.loss(evictions),
            };
        }
        Some(miss)
    }

    /// The earlier prompt of the same tenant that has most in common with a prompt; `None` if there
    /// is none that has anything in common. A prompt that was submitted before, or that continues
    /// one, is not compared with others.
    fn nearest(&self, prompt: &Exchange, tokens: &[u32]) -> Option<Nearest> {
        let same = self.state().exchanges.get(&prompt.conversation).map(|(_, kept)| kept.clone());
        let related = same.or_else(|| prompt.previous().cloned()).map(|exchange| {
            let (common, answer) = exchange.common(tokens, &mut Compared::new());
            (exchange, common, answer)
        });
        let (exchange, common, answer) = related.or_else(|| self.nearest_of_all(prompt, tokens))?;
        let mut with_answer = exchange.prompt();
        let prompt_len = with_answer.len();
        with_answer.extend(answer.iter().flat_map(|answer| answer.tokens.iter().copied()));
        Some(Nearest { exchange, tokens: with_answer, prompt_len, common })
    }

    /// The newest prompt of those that have most in common with a prompt, with the number of tokens
    /// that they have in common, and the answer to it that has most of them.
    fn nearest_of_all(&self, prompt: &Exchange, tokens: &[u32]) -> Option<Candidate> {
        let own: HashSet<&Digest> =
            prompt.outline.messages.iter().map(|mark| &mark.digest).collect();
        let mut best: Option<(usize, Candidate)> = None;
        // They stay alive while the addresses of their pieces are compared.
        let newest = self.newest(&prompt.outline.tenant);
        let mut compared = Compared::new();
        for exchange in newest {
            let (common, answer) = exchange.common(tokens, &mut compared);
            let shared = exchange.outline.messages.iter().filter(|mark| own.contains(&mark.digest));
            let shared: usize = shared.map(|mark| 1 + mark.bytes).sum();
            let score = TOKEN_BYTES * common + shared;
            // Among equals, the first is the newest.
            if score > best.as_ref().map_or(0, |(score, _)| *score) {
                best = Some((score, (exchange, common, answer)));
            }
        }
        best.map(|(_, candidate)| candidate)
    }

    /// The newest exchanges of a tenant, the newest first.
    fn newest(&self, tenant: &Digest) -> Vec<Arc<Exchange>> {
        let state = self.state();
        let exchanges = state.order.values().rev().take(LOOKED_AT);
        let exchanges = exchanges.filter_map(|digest| Some(&state.exchanges.get(digest)?.1));
        let own = exchanges
            .filter(|exchange| exchange.outline.tenant == *tenant && !exchange.outline.has_images);
        own.take(COMPARED).cloned().collect()
    }
}

impl Nearest {
    /// Why a prompt with the same beginning is not cached, although this one was submitted.
    /// `evictions` is the number of blocks that the cache has evicted.
    fn loss(&self, evictions: u64) -> MissReason {
        match self.exchange.evictions() {
            Some(before) if before == evictions => MissReason::NotComputed,
            _ => MissReason::Evicted,
        }
    }

    /// Why a prompt with the same beginning was computed apart from this one; `None` if they share
    /// KV.
    fn separation(&self, prompt: &Exchange) -> Option<MissReason> {
        let (own, other) = (&prompt.outline, &self.exchange.outline);
        if own.adapter != other.adapter {
            return Some(MissReason::OtherAdapter);
        }
        (own.salt != other.salt).then_some(MissReason::OtherSalt)
    }

    /// Why a prompt goes another way after the common tokens. `same_text` says whether the texts
    /// after them are the same, and `text_bytes` is the size of the text before.
    fn difference(&self, prompt: &Exchange, same_text: bool, text_bytes: usize) -> Difference {
        let (own, other) = (&prompt.outline, &self.exchange.outline);
        if own.messages.is_empty() || other.messages.is_empty() {
            return Difference::new(match same_text {
                true => MissReason::OtherTokens,
                false => MissReason::TextChanged,
            });
        }
        if own.tools != other.tools {
            return Difference::new(MissReason::ToolsChanged);
        }
        let (ours, theirs) = (&own.messages, &other.messages);
        let same = |is_same: fn(&Mark, &Mark) -> bool| {
            ours.iter().zip(theirs).take_while(|(mine, their)| is_same(mine, their)).count()
        };
        if same_text {
            return Difference::new(MissReason::OtherTokens);
        }
        let cause = |same| self.cause(ours, theirs, same, text_bytes);
        // Most templates show calls whose JSON was only written in another way as before.
        cause(same(Mark::says_the_same))
            .or_else(|| cause(same(|mine, their| mine.digest == their.digest)))
            .unwrap_or_else(|| {
                Difference::new(match own.options == other.options {
                    true => MissReason::TemplateChanged,
                    false => MissReason::OptionsChanged,
                })
            })
    }

    /// How the messages differ after the first `same` ones; `None` if that does not explain why the
    /// texts part after `text_bytes`.
    fn cause(
        &self,
        ours: &[Mark],
        theirs: &[Mark],
        same: usize,
        text_bytes: usize,
    ) -> Option<Difference> {
        // A template shows the messages one after another. If the texts part before the first
        // message that differs, that message is not the cause.
        if text_bytes < ours[..same].iter().map(|mark| mark.bytes).sum() {
            return None;
        }
        match (ours.get(same), theirs.get(same)) {
            (Some(mine), Some(their)) => {
                let (reason, shown) = if continues(&ours[same..], &theirs[same + 1..]) {
                    (MissReason::MessageRemoved, their)
                } else if continues(&theirs[same..], &ours[same + 1..]) {
                    (MissReason::MessageInserted, mine)
                } else {
                    (mine.change_of(their), mine)
                };
                Some(Difference::at(reason, same, shown))
            }
            // The prompt continues the earlier one and leaves it after its end.
            (Some(mine), None) if self.common >= self.prompt_len => match mine.said {
                Some(said) if !self.exchange.has_said(&said, None) => {
                    Some(Difference::at(MissReason::AnswerChanged, same, mine))
                }
                Some(said) if !self.exchange.has_said(&said, Some(&mine.reasoning)) => {
                    Some(Difference::at(MissReason::ReasoningChanged, same, mine))
                }
                Some(_) => None,
                None => Some(Difference::new(MissReason::MessageRemoved)),
            },
            _ => None,
        }
    }
}

impl Mark {
    /// Whether the messages are the same, but for how the JSON of their calls is written.
    fn says_the_same(&self, other: &Mark) -> bool {
        let says = |mark: &Mark| mark.said.map(|said| (said, mark.reasoning));
        self.digest == other.digest || says(self).is_some() && says(self) == says(other)
    }

    /// How the message differs from another one in its place.
    fn change_of(&self, other: &Mark) -> MissReason {
        match (self.said, other.said) {
            (Some(mine), Some(their)) if mine != their => MissReason::AnswerChanged,
            (Some(_), Some(_)) if self.reasoning != other.reasoning => MissReason::ReasoningChanged,
            _ => MissReason::MessageChanged,
        }
    }
}

/// Whether the messages begin anywhere in others: the first one and, if both go on, the second.
fn continues(messages: &[Mark], others: &[Mark]) -> bool {
    let is_same = |index: usize, at: usize| match (messages.get(index), others.get(at)) {
        (Some(own), Some(other)) => own.says_the_same(other),
        _ => true,
    };
    (0..others.len()).any(|at| is_same(0, at) && is_same(1, at + 1))
}
