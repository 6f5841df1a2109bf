//! Workloads as plain data: a seed and a few numbers in, the list of requests with their arrival
//! times out. Nothing here touches an engine or a clock.

use std::str::FromStr;
use std::time::Duration;

use crate::random::SplitMix64;

/// How requests arrive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// Evenly spaced, so many a second, whether or not earlier ones have been answered.
    PerSecond(f64),
    /// All at once.
    AtOnce,
}

impl FromStr for Arrivals {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "inf" {
            return Ok(Self::AtOnce);
        }
        match text.parse::<f64>() {
            Ok(rate) if rate.is_finite() && rate > 0.0 => Ok(Self::PerSecond(rate)),
            _ => Err(format!("expected requests a second above 0, or `inf`, got `{text}`")),
        }
    }
}

impl std::fmt::Display for Arrivals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::PerSecond(rate) => write!(f, "{rate} a second"),
            Self::AtOnce => f.write_str("as fast as possible"),
        }
    }
}

/// The shared-prefix workload: every prompt is a long common beginning and a short end of its own.
#[derive(Clone, Debug, PartialEq)]
pub struct PrefixWorkload {
    /// How many requests.
    pub request_count: usize,
    /// Tokens of the common beginning.
    pub shared_tokens: usize,
    /// Fewest tokens of a request's own end.
    pub unique_min: usize,
    /// Most tokens of a request's own end.
    pub unique_max: usize,
    /// When requests arrive.
    pub arrivals: Arrivals,
    /// Give every request a beginning of its own, as long as the common one would be: the same
    /// lengths with nothing to share.
    pub distinct: bool,
    /// Token ids are drawn from `0..vocab_size` less the excluded ones.
    pub vocab_size: usize,
    /// Ids that must not appear in a prompt (the end-of-text ids, say).
    pub excluded: Vec<u32>,
    /// Determines everything that is drawn.
    pub seed: u64,
}

/// One request of a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedRequest {
    /// When to send it, from the run's start.
    pub send_at: Duration,
    /// Its prompt.
    pub tokens: Vec<u32>,
}

impl PrefixWorkload {
    /// The requests, in order of arrival. The first token of each own end differs between any
    /// two requests as long as the vocabulary allows it, so that exactly the common beginning is
    /// shared and no luck of the draw adds to it.
    #[must_use]
    pub fn plan(&self) -> Vec<PlannedRequest> {
        let ids: Vec<u32> =
            (0..self.vocab_size as u32).filter(|id| !self.excluded.contains(id)).collect();
        if ids.is_empty() {
            return Vec::new();
        }
        let mut rng = SplitMix64::new(self.seed);
        let draw = |rng: &mut SplitMix64, count: usize| -> Vec<u32> {
            (0..count).map(|_| ids[rng.in_range(0, ids.len() as u64 - 1) as usize]).collect()
        };
        let shared = draw(&mut rng, self.shared_tokens);
        (0..self.request_count)
            .map(|index| {
                let marker = ids[index % ids.len()];
                let own = rng.in_range(self.unique_min as u64, self.unique_max as u64) as usize;
                let mut tokens = shared.clone();
                if self.distinct && !tokens.is_empty() {
                    tokens = draw(&mut rng, self.shared_tokens);
                    tokens[0] = marker;
                }
                if own > 0 {
                    tokens.push(marker);
                    tokens.extend(draw(&mut rng, own - 1));
                }
                PlannedRequest { send_at: self.send_at(index), tokens }
            })
            .collect()
    }

    fn send_at(&self, index: usize) -> Duration {
        match self.arrivals {
            Arrivals::PerSecond(rate) => Duration::from_secs_f64(index as f64 / rate),
            Arrivals::AtOnce => Duration::ZERO,
        }
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
            arrivals: Arrivals::PerSecond(8.0),
            distinct: false,
            vocab_size: 512,
            excluded: vec![0, 2],
            seed: 0,
        }
    }

    fn common(a: &[u32], b: &[u32]) -> usize {
        a.iter().zip(b).take_while(|(x, y)| x == y).count()
    }

    /// Goal: the plan is a function of the seed and nothing else.
    #[test]
    fn the_seed_determines_the_plan() {
        assert_eq!(workload().plan(), workload().plan());
        let other = PrefixWorkload { seed: 1, ..workload() };
        assert_ne!(workload().plan(), other.plan());
    }

    /// Goal: lengths, arrival times and ids are what was asked for; exactly the beginning is shared.
    #[test]
    fn every_pair_shares_the_beginning_and_no_more() {
        let plan = workload().plan();
        assert_eq!(plan.len(), 48);
        for (index, request) in plan.iter().enumerate() {
            assert!((1_056..=1_152).contains(&request.tokens.len()));
            assert!(request.tokens.iter().all(|&id| id < 512 && id != 0 && id != 2));
            assert_eq!(request.send_at, Duration::from_millis(125 * index as u64));
        }
        for (index, a) in plan.iter().enumerate() {
            for b in &plan[..index] {
                assert_eq!(common(&a.tokens, &b.tokens), 1_024);
            }
        }
    }

    /// Goal: `distinct` keeps the lengths and shares nothing, `shared_tokens: 0` has short prompts.
    #[test]
    fn nothing_is_shared_when_asked_so() {
        for plan in [
            PrefixWorkload { distinct: true, ..workload() }.plan(),
            PrefixWorkload { shared_tokens: 0, ..workload() }.plan(),
        ] {
            for (index, a) in plan.iter().enumerate() {
                for b in &plan[..index] {
                    assert_eq!(common(&a.tokens, &b.tokens), 0);
                }
            }
        }
    }

    /// Goal: rates are parsed, and what is no rate is refused with what was expected.
    #[test]
    fn arrivals_parse() {
        assert_eq!("inf".parse(), Ok(Arrivals::AtOnce));
        assert_eq!("8".parse(), Ok(Arrivals::PerSecond(8.0)));
        for bad in ["0", "-1", "NaN", "fast", ""] {
            let message = bad.parse::<Arrivals>().expect_err("no rate");
            assert!(message.contains("expected") && message.contains(bad), "{message}");
        }
        let now = PrefixWorkload { arrivals: Arrivals::AtOnce, ..workload() }.plan();
        assert!(now.iter().all(|request| request.send_at == Duration::ZERO));
    }
}
