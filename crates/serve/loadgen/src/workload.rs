//! Workloads as plain data: a seed and a few numbers determine the list of conversations and when
//! each of them starts. Nothing here touches an engine or a clock.

use std::str::FromStr;
use std::time::Duration;

use super::rng::SeededRng;

/// A conversation of one or more turns. The prompt of a turn is everything before it in the
/// conversation, answers included, followed by the turn's own tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conversation {
    /// When the first turn is sent, from the start of the run.
    pub start: Duration,
    /// Time between the end of an answer and the next turn.
    pub pause: Duration,
    /// The turns; at least one.
    pub turns: Vec<Turn>,
    /// Priority of its requests; larger is more urgent.
    pub priority: i32,
}

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Token ids that are appended to the conversation before the answer.
    pub tokens: Vec<u32>,
    /// Number of tokens to generate, 1 or above.
    pub output_tokens: usize,
}

impl Conversation {
    /// A conversation of a single turn that starts at `start`.
    #[must_use]
    pub fn single(start: Duration, tokens: Vec<u32>, output_tokens: usize) -> Self {
        Self { start, turns: vec![Turn { tokens, output_tokens }], ..Self::default() }
    }

    /// Drops the turns that would make the conversation longer than `positions` tokens.
    #[must_use]
    pub fn truncated(mut self, positions: usize) -> Self {
        let mut taken = 0;
        let fits = |turn: &&Turn| {
            taken += turn.tokens.len() + turn.output_tokens;
            taken <= positions
        };
        let count = self.turns.iter().take_while(fits).count();
        self.turns.truncate(count);
        self
    }
}

/// The token ids that random prompts consist of.
#[derive(Clone, Debug)]
pub struct Vocabulary(Vec<u32>);

impl Vocabulary {
    /// All ids of a vocabulary of `size` tokens but the excluded ones.
    #[must_use]
    pub fn new(size: usize, excluded: &[u32]) -> Vocabulary {
        Vocabulary((0..size as u32).filter(|id| !excluded.contains(id)).collect())
    }

    /// Random ids; the vocabulary must not be empty if there are any.
    pub fn draw(&self, rng: &mut SeededRng, count: usize) -> Vec<u32> {
        rng.tokens(count, self.0.len()).into_iter().map(|index| self.0[index as usize]).collect()
    }
}

/// How requests arrive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// Evenly spaced, this many per second, whether or not earlier ones have been answered.
    PerSecond(f64),
    /// At random, independently of each other, this many per second on average (a Poisson
    /// process).
    Poisson(f64),
    /// All at the start of the run.
    AtOnce,
}

/// Distinguishes the random numbers for arrivals from those for prompts, which have the same seed.
const ARRIVALS_STREAM: u64 = 0x6172_7269_7661_6c73;

impl Arrivals {
    /// When each of `count` requests arrives, from the start of the run, in order.
    fn starts(self, count: usize, seed: u64) -> Vec<Duration> {
        let mut rng = SeededRng::new(seed ^ ARRIVALS_STREAM);
        let mut at = 0.0;
        let start = |index: usize| match self {
            Self::PerSecond(rate) => Duration::from_secs_f64(index as f64 / rate),
            Self::Poisson(rate) => {
                at += rng.wait_seconds(rate);
                Duration::from_secs_f64(at)
            }
            Self::AtOnce => Duration::ZERO,
        };
        (0..count).map(start).collect()
    }
}

impl FromStr for Arrivals {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "inf" {
            return Ok(Self::AtOnce);
        }
        match text.parse::<f64>() {
            Ok(rate) if rate.is_finite() && rate > 0.0 => Ok(Self::PerSecond(rate)),
            _ => Err(format!("expected requests per second above 0, or `inf`, got `{text}`")),
        }
    }
}

impl std::fmt::Display for Arrivals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::PerSecond(rate) => write!(f, "{rate} requests per second"),
            Self::Poisson(rate) => write!(f, "{rate} requests per second on average"),
            Self::AtOnce => f.write_str("all at once"),
        }
    }
}

/// The shared-prefix workload: every prompt consists of a long shared prefix and a short unique
/// suffix.
#[derive(Clone, Debug, PartialEq)]
pub struct PrefixWorkload {
    /// Number of requests.
    pub request_count: usize,
    /// Tokens of the shared prefix.
    pub shared_tokens: usize,
    /// Smallest number of tokens of a request's own suffix.
    pub unique_min: usize,
    /// Largest number of tokens of a request's own suffix.
    pub unique_max: usize,
    /// Tokens to generate per request.
    pub output_tokens: usize,
    /// When requests arrive.
    pub arrivals: Arrivals,
    /// Give every request a different prefix instead of the shared one: the same lengths with
    /// nothing to share.
    pub distinct: bool,
    /// Token ids are drawn from `0..vocab_size` without the excluded ones.
    pub vocab_size: usize,
    /// Ids that must not occur in a prompt, such as the end-of-sequence tokens.
    pub excluded: Vec<u32>,
    /// Determines everything that is drawn.
    pub seed: u64,
}

impl PrefixWorkload {
    /// The requests, as conversations of one turn, in order of arrival.
    ///
    /// The first token of each suffix differs between any two requests, as far as the vocabulary
    /// allows, so that two prompts share exactly the prefix and no further token by chance.
    #[must_use]
    pub fn plan(&self) -> Vec<Conversation> {
        let vocabulary = Vocabulary::new(self.vocab_size, &self.excluded);
        let ids = &vocabulary.0;
        if ids.is_empty() {
            return Vec::new();
        }
        let mut rng = SeededRng::new(self.seed);
        let shared = vocabulary.draw(&mut rng, self.shared_tokens);
        let starts = self.arrivals.starts(self.request_count, self.seed);
        starts
            .into_iter()
            .enumerate()
            .map(|(index, start)| {
                let marker = ids[index % ids.len()];
                let suffix = rng.between(self.unique_min, self.unique_max);
                let mut tokens = shared.clone();
                if self.distinct && !tokens.is_empty() {
                    tokens = vocabulary.draw(&mut rng, self.shared_tokens);
                    tokens[0] = marker;
                }
                if suffix > 0 {
                    tokens.push(marker);
                    tokens.extend(vocabulary.draw(&mut rng, suffix - 1));
                }
                Conversation::single(start, tokens, self.output_tokens)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload() -> PrefixWorkload {
        PrefixWorkload {
            request_count: 48,
            shared_tokens: 1_024,
            unique_min: 32,
            unique_max: 128,
            output_tokens: 4,
            arrivals: Arrivals::PerSecond(8.0),
            distinct: false,
            vocab_size: 512,
            excluded: vec![0, 2],
            seed: 0,
        }
    }

    fn prompt(request: &Conversation) -> &[u32] {
        &request.turns[0].tokens
    }

    fn common(a: &Conversation, b: &Conversation) -> usize {
        prompt(a).iter().zip(prompt(b)).take_while(|(x, y)| x == y).count()
    }

    /// Goal: the plan is a function of the seed and nothing else.
    #[test]
    fn the_seed_determines_the_plan() {
        assert_eq!(workload().plan(), workload().plan());
        let other = PrefixWorkload { seed: 1, ..workload() };
        assert_ne!(workload().plan(), other.plan());
    }

    /// Goal: lengths, arrival times and ids are as requested, and every two prompts share exactly
    /// the prefix.
    #[test]
    fn every_pair_shares_the_prefix_and_no_more() {
        let plan = workload().plan();
        assert_eq!(plan.len(), 48);
        for (index, request) in plan.iter().enumerate() {
            assert_eq!((request.turns.len(), request.turns[0].output_tokens), (1, 4));
            assert!((1_056..=1_152).contains(&prompt(request).len()));
            assert!(prompt(request).iter().all(|&id| id < 512 && id != 0 && id != 2));
            assert_eq!(request.start, Duration::from_millis(125 * index as u64));
        }
        for (index, a) in plan.iter().enumerate() {
            for b in &plan[..index] {
                assert_eq!(common(a, b), 1_024);
            }
        }
    }

    /// Goal: with `distinct`, or without a shared prefix, no two prompts have anything in common.
    #[test]
    fn distinct_prompts_share_nothing() {
        for plan in [
            PrefixWorkload { distinct: true, ..workload() }.plan(),
            PrefixWorkload { shared_tokens: 0, ..workload() }.plan(),
        ] {
            for (index, a) in plan.iter().enumerate() {
                for b in &plan[..index] {
                    assert_eq!(common(a, b), 0);
                }
            }
        }
    }

    /// Goal: random arrivals are in order, have the rate on average and the deviation of a Poisson
    /// process, and depend on the seed alone.
    #[test]
    fn random_arrivals_have_the_rate() {
        let starts = |seed| Arrivals::Poisson(50.0).starts(10_000, seed);
        let (times, others) = (starts(3), starts(4));
        assert_eq!(times, starts(3));
        assert_ne!(times, others);
        assert!(times.is_sorted());
        let waits: Vec<f64> =
            times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
        let mean = waits.iter().sum::<f64>() / waits.len() as f64;
        let square = waits.iter().map(|wait| (wait - mean).powi(2)).sum::<f64>();
        let deviation = (square / waits.len() as f64).sqrt();
        assert!((mean - 0.02).abs() < 0.001 && (deviation - 0.02).abs() < 0.002, "{deviation}");
    }

    /// Goal: rates are parsed; anything else is refused with what was expected.
    #[test]
    fn arrivals_are_parsed() {
        assert_eq!("inf".parse(), Ok(Arrivals::AtOnce));
        assert_eq!("8".parse(), Ok(Arrivals::PerSecond(8.0)));
        for bad in ["0", "-1", "NaN", "fast", ""] {
            let message = bad.parse::<Arrivals>().expect_err("no rate");
            assert!(message.contains("expected") && message.contains(bad), "{message}");
        }
        let now = PrefixWorkload { arrivals: Arrivals::AtOnce, ..workload() }.plan();
        assert!(now.iter().all(|request| request.start == Duration::ZERO));
    }
}
