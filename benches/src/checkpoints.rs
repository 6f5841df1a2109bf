//! Measures from where requests resume, for a model with a recurrent state: four workloads on the
//! engine's scheduler and cache, with little memory and different orders of eviction.
//!
//! The workloads come from Marconi (Pan et al., MLSys 2025): conversations, shared system prompts,
//! few-shot examples and agents. Requests run one after another, so that only the cache decides
//! which tokens are computed.

use std::collections::HashSet;
use std::convert::Infallible;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use stolon_backend::{BackendSpec, StateSpec, StepBatch};
use stolon_kvcache::{EvictionCandidate, EvictionOrder, EvictionPolicy, EvictionRank};
use stolon_loadgen::rng::SeededRng;
use stolon_loadgen::workload::Turn;
use stolon_scheduler::{EngineConfig, Event, EvictionOrderFactory, SequenceRequest, Simulation};

const VOCAB_SIZE: usize = 32_000;
const BLOCK_SIZE: usize = 16;

/// Bytes per position of Qwen3.5-0.8B: keys and values of six layers with two heads of 256 values
/// in bf16.
pub(crate) const KV_BYTES: usize = 6 * 2 * 2 * 256 * 2;

/// Bytes of a state of Qwen3.5-0.8B: 18 layers with 16 heads of 128 x 128 values in f32, and the
/// last three inputs of a convolution over 6,144 channels.
pub(crate) const STATE_BYTES: usize = 18 * 4 * (16 * 128 * 128 + 3 * 6144);

/// A workload of Marconi's kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateWorkload {
    /// Conversations of 5 to 25 turns after a common system prompt of 200 tokens, 64 at a time. A
    /// turn has 20 to 250 tokens, an answer 30 to 120.
    Chat,
    /// 60 system prompts of 500 to 3,000 tokens, with the first ones used most. Each request adds
    /// 30 to 300 tokens.
    SystemPrompts,
    /// 100 tasks with examples of 800 to 2,000 tokens. Each request adds 40 to 120 tokens.
    FewShot,
    /// Agents of 20 to 60 steps after a common prompt of 2,500 tokens, 24 at a time. A step adds
    /// 50 to 500 tokens, an answer has 20 to 100. Context grows up to 16,000 tokens.
    Agents,
}

impl StateWorkload {
    /// All workloads.
    pub const ALL: [StateWorkload; 4] = [
        StateWorkload::Chat,
        StateWorkload::SystemPrompts,
        StateWorkload::FewShot,
        StateWorkload::Agents,
    ];

    /// The name used in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            StateWorkload::Chat => "chat",
            StateWorkload::SystemPrompts => "shared system prompts",
            StateWorkload::FewShot => "few-shot examples",
            StateWorkload::Agents => "agents",
        }
    }

    /// Number of conversations that take turns with each other.
    fn at_a_time(self) -> usize {
        match self {
            StateWorkload::Chat => 64,
            StateWorkload::SystemPrompts | StateWorkload::FewShot => 1,
            StateWorkload::Agents => 24,
        }
    }
}

/// Makes the conversations of a workload, one after another.
struct Source {
    workload: StateWorkload,
    rng: SeededRng,
    /// The prefixes with which conversations begin, as token ids.
    prefixes: Vec<Vec<u32>>,
}

impl Source {
    fn new(workload: StateWorkload, seed: u64) -> Source {
        let mut rng = SeededRng::new(seed);
        let (count, lengths) = match workload {
            StateWorkload::Chat => (1, (200, 200)),
            StateWorkload::SystemPrompts => (60, (500, 3000)),
            StateWorkload::FewShot => (100, (800, 2000)),
            StateWorkload::Agents => (1, (2500, 2500)),
        };
        let mut prefix = || {
            let length = rng.between(lengths.0, lengths.1);
            rng.tokens(length, VOCAB_SIZE)
        };
        let prefixes = (0..count).map(|_| prefix()).collect();
        Source { workload, rng, prefixes }
    }

    fn conversation(&mut self) -> Vec<Turn> {
        let (turns, own, answer) = match self.workload {
            StateWorkload::Chat => ((5, 25), (20, 250), (30, 120)),
            StateWorkload::SystemPrompts => ((1, 1), (30, 300), (10, 60)),
            StateWorkload::FewShot => ((1, 1), (40, 120), (2, 20)),
            StateWorkload::Agents => ((20, 60), (50, 500), (20, 100)),
        };
        let rng = &mut self.rng;
        // The product of two uniformly chosen numbers is more often small, so the first prefixes
        // are preferred.
        let last = self.prefixes.len() - 1;
        let chosen = rng.between(0, last) * rng.between(0, last) / last.max(1);
        let mut prefix = self.prefixes[chosen].clone();
        let mut turn = |tokens: Vec<u32>| {
            let count = rng.between(own.0, own.1);
            let tokens = [tokens, rng.tokens(count, VOCAB_SIZE)].concat();
            Turn { tokens, output_tokens: rng.between(answer.0, answer.1) }
        };
        let first = turn(std::mem::take(&mut prefix));
        let mut all = vec![first];
        let count = self.rng.between(turns.0, turns.1);
        for _ in 1..count {
            let rng = &mut self.rng;
            let own = rng.between(own.0, own.1);
            let tokens = rng.tokens(own, VOCAB_SIZE);
            all.push(Turn { tokens, output_tokens: rng.between(answer.0, answer.1) });
        }
        all
    }
}

/// An order of eviction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Order {
    /// A policy of the engine.
    Policy(EvictionPolicy),
    /// Marconi's rule: recency, plus `weight` times the blocks that a checkpoint saves per block
    /// that it takes. Marconi adapts the weight to the workload.
    Marconi {
        /// Operations of the tree that one more saved block per block is worth.
        weight: u64,
    },
}

#[derive(Debug)]
struct Marconi(u64);

impl EvictionOrder for Marconi {
    fn rank(&mut self, leaf: &EvictionCandidate) -> EvictionRank {
        let worth = self.0 * leaf.saved_blocks as u64 / leaf.block_count.max(1) as u64;
        EvictionRank(leaf.last_use + worth, leaf.last_use)
    }
}

/// The results of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Savings {
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// Tokens of the prompts that were not computed.
    pub saved_tokens: u64,
    /// Blocks that the cache held at the end.
    pub blocks: usize,
}

impl Savings {
    /// Share of the prompts' tokens that were not computed, from 0 to 1.
    #[must_use]
    pub fn rate(&self) -> f64 {
        self.saved_tokens as f64 / self.prompt_tokens.max(1) as f64
    }
}

/// Runs `requests` requests of a workload with a pool of `block_count` blocks. Without
/// `has_states`, the model has the same KV and no state.
///
/// # Errors
/// If the check of the block accounting at the end fails.
pub fn run(
    workload: StateWorkload,
    requests: usize,
    block_count: usize,
    order: Order,
    has_states: bool,
) -> anyhow::Result<Savings> {
    let spec = BackendSpec {
        vocab_size: VOCAB_SIZE,
        max_positions: 1 << 16,
        block_size: BLOCK_SIZE,
        block_count,
        block_bytes: BLOCK_SIZE * KV_BYTES,
        hidden_size: None,
        draws: false,
        state: has_states.then_some(StateSpec { bytes: STATE_BYTES, slots: 64 }),
        ..BackendSpec::default()
    };
    let mut config = EngineConfig { logit_cache_bytes: 0, ..EngineConfig::default() };
    match order {
        Order::Policy(policy) => config.eviction_policy = Some(policy),
        Order::Marconi { weight } => {
            let order = move || -> Box<dyn EvictionOrder> { Box::new(Marconi(weight)) };
            config.eviction_order = Some(EvictionOrderFactory::new(order));
        }
    }
    let step = |batch: &StepBatch| Duration::from_micros(batch.tokens.len() as u64);
    let mut simulation = Simulation::new(spec, config, step)?;
    replay(workload, requests, |history, output_tokens| {
        answer(&mut simulation, history, output_tokens)
    })?;
    let (stats, audit) = (simulation.stats(), simulation.audit()?);
    anyhow::ensure!(audit.blocks_reserved == 0 && audit.running == 0, "{audit:?}");
    Ok(Savings {
        prompt_tokens: stats.prompt_tokens,
        saved_tokens: stats.cached_tokens,
        blocks: audit.blocks_committed,
    })
}

/// The savings of a cache that keeps a state at the end of each prompt and nowhere else, with
/// memory for all states.
#[must_use]
pub fn ends_of_prompts(workload: StateWorkload, requests: usize) -> Savings {
    let (mut savings, mut rng) = (Savings::default(), SeededRng::new(3));
    let mut ends = HashSet::new();
    let Ok(()) = replay::<Infallible>(workload, requests, |history, output_tokens| {
        // The last position is always computed.
        let blocks = history[..history.len() - 1].chunks_exact(BLOCK_SIZE);
        let (mut prefix, mut resume) = (0, 0);
        for (index, block) in blocks.enumerate() {
            let mut hasher = DefaultHasher::new();
            (prefix, block).hash(&mut hasher);
            prefix = hasher.finish();
            if ends.contains(&prefix) {
                resume = (index + 1) * BLOCK_SIZE;
            }
        }
        ends.insert(prefix);
        savings.prompt_tokens += history.len() as u64;
        savings.saved_tokens += resume as u64;
        history.extend(rng.tokens(output_tokens, VOCAB_SIZE));
        Ok(())
    });
    savings
}

/// Answers the prompts of `requests` requests of a workload. `answer` gets a prompt and the length of
/// its answer, and appends as many tokens to it.
fn replay<E>(
    workload: StateWorkload,
    requests: usize,
    mut answer: impl FnMut(&mut Vec<u32>, usize) -> Result<(), E>,
) -> Result<(), E> {
    let mut source = Source::new(workload, 1);
    let mut choose = SeededRng::new(2);
    let mut active: Vec<(Vec<u32>, std::vec::IntoIter<Turn>)> = Vec::new();
    for _ in 0..requests {
        while active.len() < workload.at_a_time() {
            active.push((Vec::new(), source.conversation().into_iter()));
        }
        let index = choose.between(0, active.len() - 1);
        let (history, turns) = &mut active[index];
        if let Some(turn) = turns.next() {
            history.extend(&turn.tokens);
            answer(history, turn.output_tokens)?;
        }
        let is_long = history.len() > 16_000;
        if turns.len() == 0 || is_long {
            active.swap_remove(index);
        }
    }
    Ok(())
}

/// Runs a request to its end and appends its answer to its prompt.
fn answer<C: FnMut(&StepBatch) -> Duration>(
    simulation: &mut Simulation<C>,
    history: &mut Vec<u32>,
    output_tokens: usize,
) -> anyhow::Result<()> {
    simulation.submit(SequenceRequest::new(history.clone(), output_tokens))?;
    while simulation.step_end().is_some() {
        for event in simulation.finish_step()? {
            if let Event::Token(token) = event.event? {
                history.extend(token.id);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: with enough memory, a model with a state saves nearly as much as one without, and with
    /// little memory less. With states at the ends of prompts only, each answer is computed again.
    #[test]
    fn states_save_nearly_what_attention_saves() {
        let lru = Order::Policy(EvictionPolicy::Lru);
        let rate = |blocks, has_states| {
            run(StateWorkload::Chat, 300, blocks, lru, has_states).expect("it runs").rate()
        };
        let (attention, states, little) =
            (rate(1 << 20, false), rate(1 << 20, true), rate(5000, true));
        assert!(states < attention && states > 0.93 * attention, "{states} of {attention}");
        assert!(little < states, "{little} and {states}");
        let ends = ends_of_prompts(StateWorkload::Chat, 300).rate();
        assert!(ends < states && ends > 0.5 * states, "{ends} of {states}");
    }
}
