//! The standard workloads as plain data: conversations of one or more turns, with the times they
//! begin at. The seed determines everything.

use stolon_backend::BackendSpec;

use crate::random::Dice;

/// A conversation: each turn's prompt is all that was said before and the turn's own tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversation {
    /// Seconds from the start at which its first turn is sent.
    pub at: f64,
    /// Seconds between an answer's end and the next turn.
    pub think: f64,
    /// The turns; at least one.
    pub turns: Vec<Turn>,
    /// For the priority policy: larger is more urgent.
    pub priority: i32,
}

impl Conversation {
    /// Leaves out the turns that would take the conversation past so many positions.
    #[must_use]
    pub fn within(mut self, positions: usize) -> Conversation {
        let mut taken = 0;
        let fits = |turn: &&Turn| {
            taken += turn.tokens.len() + turn.output;
            taken <= positions
        };
        let count = self.turns.iter().take_while(fits).count();
        self.turns.truncate(count);
        self
    }
}

/// One turn.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// What is added to the conversation before the answer.
    pub tokens: Vec<u32>,
    /// Tokens of the answer.
    pub output: usize,
}

/// A workload by its shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// 64 groups of 16 prompts in random order; a group shares a system prompt of 2,048 tokens,
    /// each prompt adds 128 and generates 256.
    SharedSystemPrompt,
    /// 640 prompts, each of one of 10 prefixes of 256 tokens and 256 of its own; 128 generated.
    PrefixRepetition,
    /// 24 conversations of 12 to 18 turns; all share 500 tokens, a turn adds 120 to 160, an
    /// answer has 80 to 120.
    MultiTurn,
    /// 384 prompts of 512 to 1,024 tokens that share nothing; 128 generated.
    NothingShared,
    /// 4,000 prompts on 24 trunks of 512 tokens with leaves of 8 to 40 of their own; 16
    /// generated. Arrives at one and a half times what can be served.
    ThinLeaves,
}

impl Shape {
    /// All of them.
    pub const ALL: [Shape; 5] = [
        Shape::SharedSystemPrompt,
        Shape::PrefixRepetition,
        Shape::MultiTurn,
        Shape::NothingShared,
        Shape::ThinLeaves,
    ];

    /// Its name in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Shape::SharedSystemPrompt => "shared system prompt",
            Shape::PrefixRepetition => "prefix repetition",
            Shape::MultiTurn => "multi-turn",
            Shape::NothingShared => "nothing shared",
            Shape::ThinLeaves => "thin leaves",
        }
    }

    /// Positions of one request that shares nothing, the largest there is.
    #[must_use]
    pub fn positions_max(self) -> usize {
        match self {
            Shape::SharedSystemPrompt => 2048 + 128 + 256,
            Shape::PrefixRepetition => 256 + 256 + 128,
            Shape::MultiTurn => 500 + 18 * (160 + 120),
            Shape::NothingShared => 1024 + 128,
            Shape::ThinLeaves => 512 + 40 + 16,
        }
    }

    /// A backend whose pool holds `pool` requests that share nothing.
    #[must_use]
    pub fn spec(self, pool: usize, vocab_size: usize) -> BackendSpec {
        const BLOCK_SIZE: usize = 16;
        BackendSpec {
            vocab_size,
            max_positions: 8192,
            block_size: BLOCK_SIZE,
            block_count: pool * self.positions_max().div_ceil(BLOCK_SIZE),
            block_bytes: 1,
        }
    }

    /// Arrivals as a share of what can be served.
    #[must_use]
    pub fn load(self) -> f64 {
        match self {
            Shape::ThinLeaves => 1.5,
            _ => 0.9,
        }
    }

    /// The conversations, in order of arrival, `per_second` of them in the mean (Poisson).
    #[must_use]
    pub fn conversations(self, per_second: f64, vocab_size: usize, seed: u64) -> Vec<Conversation> {
        let mut dice = Dice::new(seed);
        let mut turns = self.turns(&mut dice, vocab_size);
        if self != Shape::MultiTurn {
            dice.shuffle(&mut turns);
        }
        let mut at = 0.0;
        turns
            .into_iter()
            .map(|turns| {
                at += dice.wait_seconds(per_second);
                let priority = dice.between(0, 3) as i32;
                Conversation { at, think: 1.0, turns, priority }
            })
            .collect()
    }

    fn turns(self, dice: &mut Dice, vocab_size: usize) -> Vec<Vec<Turn>> {
        match self {
            Shape::SharedSystemPrompt => grouped(dice, vocab_size, (64, 16), 2048, (128, 128), 256),
            Shape::PrefixRepetition => grouped(dice, vocab_size, (10, 64), 256, (256, 256), 128),
            Shape::ThinLeaves => grouped(dice, vocab_size, (24, 167), 512, (8, 40), 16),
            Shape::NothingShared => grouped(dice, vocab_size, (384, 1), 0, (512, 1024), 128),
            Shape::MultiTurn => {
                let common = dice.tokens(500, vocab_size);
                (0..24).map(|_| conversation(dice, vocab_size, &common)).collect()
            }
        }
    }
}

/// `groups.0` groups of `groups.1` prompts with a beginning of `shared` tokens each, `own` (least
/// and most) of their own, and `output` generated.
fn grouped(
    dice: &mut Dice,
    vocab_size: usize,
    groups: (usize, usize),
    shared: usize,
    own: (usize, usize),
    output: usize,
) -> Vec<Vec<Turn>> {
    let mut requests = Vec::with_capacity(groups.0 * groups.1);
    for _ in 0..groups.0 {
        let beginning = dice.tokens(shared, vocab_size);
        for _ in 0..groups.1 {
            let mut tokens = beginning.clone();
            let count = dice.between(own.0, own.1);
            tokens.extend(dice.tokens(count, vocab_size));
            requests.push(vec![Turn { tokens, output }]);
        }
    }
    requests
}

fn conversation(dice: &mut Dice, vocab_size: usize, common: &[u32]) -> Vec<Turn> {
    let count = dice.between(12, 18);
    let mut turns = Vec::with_capacity(count);
    for turn in 0..count {
        let mut tokens = if turn == 0 { common.to_vec() } else { Vec::new() };
        let own = dice.between(120, 160);
        tokens.extend(dice.tokens(own, vocab_size));
        turns.push(Turn { tokens, output: dice.between(80, 120) });
    }
    turns
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: shapes are what their documentation says, and the seed alone determines them.
    #[test]
    fn shapes_are_as_stated() {
        for (shape, count, turns) in [
            (Shape::SharedSystemPrompt, 1024, 1..=1),
            (Shape::PrefixRepetition, 640, 1..=1),
            (Shape::MultiTurn, 24, 12..=18),
            (Shape::NothingShared, 384, 1..=1),
            (Shape::ThinLeaves, 4008, 1..=1),
        ] {
            let conversations = shape.conversations(10.0, 32_000, 1);
            assert_eq!(conversations.len(), count, "{}", shape.name());
            assert_eq!(conversations, shape.conversations(10.0, 32_000, 1));
            assert!(conversations.is_sorted_by(|a, b| a.at <= b.at));
            let mean = conversations[count - 1].at / count as f64;
            assert!((0.06..0.14).contains(&mean), "{} {mean}", shape.name());
            for conversation in &conversations {
                assert!(turns.contains(&conversation.turns.len()));
                let positions: usize =
                    conversation.turns.iter().map(|turn| turn.tokens.len() + turn.output).sum();
                assert!(positions <= shape.positions_max(), "{}", shape.name());
                let said = |turns: &[Turn]| -> usize {
                    turns.iter().map(|turn| turn.tokens.len() + turn.output).sum()
                };
                let short = conversation.clone().within(2500);
                let rest = &conversation.turns[short.turns.len()..];
                assert_eq!(conversation.turns[..short.turns.len()], short.turns);
                assert!(said(&short.turns) <= 2500);
                assert!(rest.is_empty() || said(&short.turns) + said(&rest[..1]) > 2500);
            }
        }
    }
}
