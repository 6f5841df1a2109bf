//! The standard workloads: named, fixed mixes of conversations. The seed determines everything.

use std::time::Duration;

use stolon_backend::BackendSpec;
use stolon_loadgen::rng::SeededRng;
use stolon_loadgen::workload::{Conversation, Turn};

/// A standard workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// 1,024 requests in random order, in 64 groups of 16. The prompts of a group share a system
    /// prompt of 2,048 tokens and add 128 of their own; 256 tokens are generated.
    SharedSystemPrompt,
    /// 640 requests. Each prompt is one of 10 prefixes of 256 tokens and 256 tokens of its own; 128
    /// tokens are generated.
    PrefixRepetition,
    /// 24 conversations of 12 to 18 turns. All share their first 500 tokens, a turn adds 120 to
    /// 160, an answer has 80 to 120.
    MultiTurn,
    /// 384 requests with prompts of 512 to 1,024 tokens that share nothing; 128 tokens are
    /// generated.
    NothingShared,
    /// 4,008 requests. Each prompt is one of 24 prefixes of 512 tokens and 8 to 40 tokens of its
    /// own; 16 tokens are generated. Requests arrive at 1.5 times the capacity.
    ThinLeaves,
}

impl Workload {
    /// All standard workloads.
    pub const ALL: [Workload; 5] = [
        Workload::SharedSystemPrompt,
        Workload::PrefixRepetition,
        Workload::MultiTurn,
        Workload::NothingShared,
        Workload::ThinLeaves,
    ];

    /// The name used in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Workload::SharedSystemPrompt => "shared system prompt",
            Workload::PrefixRepetition => "prefix repetition",
            Workload::MultiTurn => "multi-turn",
            Workload::NothingShared => "nothing shared",
            Workload::ThinLeaves => "thin leaves",
        }
    }

    /// Positions of the largest request: prompt and generated tokens.
    #[must_use]
    pub fn positions_max(self) -> usize {
        match self {
            Workload::SharedSystemPrompt => 2048 + 128 + 256,
            Workload::PrefixRepetition => 256 + 256 + 128,
            Workload::MultiTurn => 500 + 18 * (160 + 120),
            Workload::NothingShared => 1024 + 128,
            Workload::ThinLeaves => 512 + 40 + 16,
        }
    }

    /// A backend whose KV pool holds `pool` of the largest requests if they share nothing.
    #[must_use]
    pub fn spec(self, pool: usize, vocab_size: usize) -> BackendSpec {
        const BLOCK_SIZE: usize = 16;
        BackendSpec {
            vocab_size,
            max_positions: 8192,
            block_size: BLOCK_SIZE,
            block_count: pool * self.positions_max().div_ceil(BLOCK_SIZE),
            block_bytes: 1,
            hidden_size: None,
            draws: false,
            ..BackendSpec::default()
        }
    }

    /// Arrival rate as a multiple of the capacity.
    #[must_use]
    pub fn load(self) -> f64 {
        match self {
            Workload::ThinLeaves => 1.5,
            _ => 0.9,
        }
    }

    /// The conversations in order of arrival. Arrivals are a Poisson process with `per_second`
    /// conversations a second on average.
    #[must_use]
    pub fn conversations(self, per_second: f64, vocab_size: usize, seed: u64) -> Vec<Conversation> {
        let mut rng = SeededRng::new(seed);
        let mut turns = self.turns(&mut rng, vocab_size);
        if self != Workload::MultiTurn {
            rng.shuffle(&mut turns);
        }
        let mut start = 0.0;
        turns
            .into_iter()
            .map(|turns| {
                start += rng.wait_seconds(per_second);
                let priority = rng.between(0, 3) as i32;
                let start = Duration::from_secs_f64(start);
                Conversation { start, pause: Duration::from_secs(1), turns, priority }
            })
            .collect()
    }

    fn turns(self, rng: &mut SeededRng, vocab_size: usize) -> Vec<Vec<Turn>> {
        match self {
            Workload::SharedSystemPrompt => {
                grouped(rng, vocab_size, (64, 16), 2048, (128, 128), 256)
            }
            Workload::PrefixRepetition => grouped(rng, vocab_size, (10, 64), 256, (256, 256), 128),
            Workload::ThinLeaves => grouped(rng, vocab_size, (24, 167), 512, (8, 40), 16),
            Workload::NothingShared => grouped(rng, vocab_size, (384, 1), 0, (512, 1024), 128),
            Workload::MultiTurn => {
                let common = rng.tokens(500, vocab_size);
                (0..24).map(|_| conversation(rng, vocab_size, &common)).collect()
            }
        }
    }
}

/// Requests in `groups.0` groups of `groups.1`. The prompts of a group share `shared` tokens and
/// have between `own.0` and `own.1` tokens of their own; `output_tokens` are generated.
fn grouped(
    rng: &mut SeededRng,
    vocab_size: usize,
    groups: (usize, usize),
    shared: usize,
    own: (usize, usize),
    output_tokens: usize,
) -> Vec<Vec<Turn>> {
    let mut requests = Vec::with_capacity(groups.0 * groups.1);
    for _ in 0..groups.0 {
        let prefix = rng.tokens(shared, vocab_size);
        for _ in 0..groups.1 {
            let mut tokens = prefix.clone();
            let count = rng.between(own.0, own.1);
            tokens.extend(rng.tokens(count, vocab_size));
            requests.push(vec![Turn { tokens, output_tokens }]);
        }
    }
    requests
}

fn conversation(rng: &mut SeededRng, vocab_size: usize, common: &[u32]) -> Vec<Turn> {
    let count = rng.between(12, 18);
    let mut turns = Vec::with_capacity(count);
    for turn in 0..count {
        let mut tokens = if turn == 0 { common.to_vec() } else { Vec::new() };
        let own = rng.between(120, 160);
        tokens.extend(rng.tokens(own, vocab_size));
        turns.push(Turn { tokens, output_tokens: rng.between(80, 120) });
    }
    turns
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the workloads are as documented, and the seed alone determines them.
    #[test]
    fn workloads_are_as_documented() {
        for (workload, count, turns) in [
            (Workload::SharedSystemPrompt, 1024, 1..=1),
            (Workload::PrefixRepetition, 640, 1..=1),
            (Workload::MultiTurn, 24, 12..=18),
            (Workload::NothingShared, 384, 1..=1),
            (Workload::ThinLeaves, 4008, 1..=1),
        ] {
            let conversations = workload.conversations(10.0, 32_000, 1);
            assert_eq!(conversations.len(), count, "{}", workload.name());
            assert_eq!(conversations, workload.conversations(10.0, 32_000, 1));
            assert!(conversations.is_sorted_by(|a, b| a.start <= b.start));
            let mean = conversations[count - 1].start.as_secs_f64() / count as f64;
            assert!((0.06..0.14).contains(&mean), "{} {mean}", workload.name());
            for conversation in &conversations {
                assert!(turns.contains(&conversation.turns.len()));
                let positions: usize = conversation
                    .turns
                    .iter()
                    .map(|turn| turn.tokens.len() + turn.output_tokens)
                    .sum();
                assert!(positions <= workload.positions_max(), "{}", workload.name());
                let length = |turns: &[Turn]| -> usize {
                    turns.iter().map(|turn| turn.tokens.len() + turn.output_tokens).sum()
                };
                let short = conversation.clone().truncated(2500);
                let rest = &conversation.turns[short.turns.len()..];
                assert_eq!(conversation.turns[..short.turns.len()], short.turns);
                assert!(length(&short.turns) <= 2500);
                assert!(rest.is_empty() || length(&short.turns) + length(&rest[..1]) > 2500);
            }
        }
    }
}
