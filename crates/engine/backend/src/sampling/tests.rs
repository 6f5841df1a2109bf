//! Compares the sampler with a slow reference that follows the documentation in double precision
//! with a full sort.

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;

use super::*;

/// The probability of every token, `[vocab_size]`, computed in the simplest way.
fn reference(logits: &[f32], params: &SamplingParams, prompt: &[u32], output: &[u32]) -> Vec<f64> {
    let mut logits: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
    for &(token, bias) in params.logit_bias.iter() {
        logits[token as usize] += f64::from(bias);
    }
    for (index, logit) in logits.iter_mut().enumerate() {
        let token = index as u32;
        let count = output.iter().filter(|&&seen| seen == token).count();
        if count > 0 || prompt.contains(&token) {
            let penalty = f64::from(params.repetition_penalty);
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
        if count > 0 {
            *logit -= f64::from(params.frequency_penalty) * count as f64;
            *logit -= f64::from(params.presence_penalty);
        }
    }
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    let mut probabilities = vec![0.0; logits.len()];
    if params.is_greedy() {
        probabilities[order[0]] = 1.0;
        return probabilities;
    }
    let best = logits[order[0]];
    let weight = |index: usize| ((logits[index] - best) / f64::from(params.temperature)).exp();
    let mut kept = order;
    kept.truncate(params.top_k.unwrap_or(usize::MAX));
    let sum: f64 = kept.iter().map(|&index| weight(index)).sum();
    let mut so_far = 0.0;
    let nucleus = kept.iter().position(|&index| {
        so_far += weight(index);
        so_far >= f64::from(params.top_p) * sum
    });
    kept.truncate(nucleus.map_or(kept.len(), |index| index + 1));
    kept.retain(|&index| weight(index) >= f64::from(params.min_p));
    let sum: f64 = kept.iter().map(|&index| weight(index)).sum();
    for index in kept {
        probabilities[index] = weight(index) / sum;
    }
    probabilities
}

fn params_strategy(vocab_size: u32) -> impl Strategy<Value = SamplingParams> {
    let shape = (
        prop_oneof![Just(0.0_f32), 0.1_f32..3.0],
        prop_oneof![Just(None), (1_usize..80).prop_map(Some)],
        prop_oneof![Just(1.0_f32), 0.05_f32..1.0],
        prop_oneof![Just(0.0_f32), 0.0_f32..0.9],
    );
    let penalties = (
        prop_oneof![Just(1.0_f32), 0.5_f32..2.0],
        prop_oneof![Just(0.0_f32), -2.0_f32..2.0],
        prop_oneof![Just(0.0_f32), -2.0_f32..2.0],
    );
    (shape, penalties, btree_map(0..vocab_size, -10.0_f32..10.0, 0..4), any::<u64>()).prop_map(
        |((temperature, top_k, top_p, min_p), penalties, logit_bias, seed)| SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty: penalties.0,
            presence_penalty: penalties.1,
            frequency_penalty: penalties.2,
            logit_bias: logit_bias.into_iter().collect(),
            seed: Some(seed),
            logprobs: None,
            logprob_ids: Arc::default(),
            processor: None,
        },
    )
}

const VOCAB: u32 = 67;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(250))]

    /// Goal: for random parameters, each token has the probability that the reference computes. The
    /// probabilities are measured by drawing with a fine grid of uniform numbers.
    #[test]
    fn probabilities_match_the_reference(
        logits in vec(-8.0_f32..8.0, VOCAB as usize),
        params in params_strategy(VOCAB),
        prompt in vec(0..VOCAB, 0..10),
        output in vec(0..VOCAB, 0..10),
    ) {
        const GRID: usize = 1000;
        params.validate(VOCAB as usize).expect("the strategy generates valid values");
        let expected = reference(&logits, &params, &prompt, &output);
        let mut state = SamplerState::new(params.clone(), &prompt);
        for &token in &output {
            state.observe(token);
        }
        let mut changed = logits;
        state.transform(&mut changed).expect("there is no processor");
        let best = select::best(&changed).expect("all logits are finite");
        let mut counts = vec![0; VOCAB as usize];
        for step in 0..GRID {
            let uniform = (step as f64 + 0.5) / GRID as f64;
            let token = Draw::new(&params, uniform).of_valid(&changed, best);
            counts[token as usize] += 1;
        }
        // If a token is exactly at the limit of top-p or min-p, rounding decides whether it is
        // kept. Then every other probability differs by up to that token's probability.
        let smallest = expected.iter().copied().filter(|&p| p > 0.0).fold(1.0, f64::min);
        let slack = 1.5 / GRID as f64 + 1e-5;
        let fits = |slack: f64| {
            counts.iter().zip(&expected).all(|(&count, &expected)| {
                (count as f64 / GRID as f64 - expected).abs() <= slack
            })
        };
        let edges = edge_distance(&changed, &params);
        prop_assert!(
            fits(slack) || (edges < 1e-5 && fits(slack + 2.0 * smallest)),
            "expected {expected:?}, counted {counts:?} of {GRID}"
        );
    }

    /// Goal: `largest` returns the same as a full sort, for every count and with equal logits.
    #[test]
    fn largest_matches_a_full_sort(
        logits in vec(prop_oneof![
            (-4_i32..4).prop_map(|value| value as f32),
            -4.0_f32..4.0,
            Just(f32::NEG_INFINITY),
        ], 1..400),
        count in 0_usize..450,
    ) {
        let mut sorted: Vec<(f32, u32)> = (0..).zip(&logits).map(|(id, &l)| (l, id)).collect();
        sorted.retain(|(logit, _)| *logit > f32::NEG_INFINITY);
        sorted.sort_by(|a, b| b.0.partial_cmp(&a.0).expect("no NaN").then(a.1.cmp(&b.1)));
        sorted.truncate(count);
        prop_assert_eq!(select::largest(&logits, count), sorted);
    }

    /// Goal: log-probabilities are computed from the raw logits and do not depend on the other
    /// parameters.
    #[test]
    fn logprobs_are_computed_from_the_raw_logits(
        logits in vec(-30.0_f32..30.0, VOCAB as usize),
        params in params_strategy(VOCAB),
        top in 0_usize..10,
    ) {
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        let expected = |token: u32| f64::from(logits[token as usize]) - sum.ln();
        let params = SamplingParams { logprobs: Some(top), ..params };
        let sampled = SamplerState::new(params, &[1, 2]).sample(&mut logits.clone()).expect("the logits are valid");
        let logprob = sampled.logprob.expect("logprobs is set");
        prop_assert_eq!(logprob.token_id, sampled.token);
        prop_assert!((f64::from(logprob.logprob) - expected(sampled.token)).abs() < 1e-5);
        prop_assert_eq!(logprob.top.len(), top);
        for &(token, value) in &logprob.top {
            prop_assert!((f64::from(value) - expected(token)).abs() < 1e-5);
        }
        prop_assert!(logprob.top.is_sorted_by(|a, b| a.1 >= b.1));
        let own = logits[sampled.token as usize];
        let better = logits.iter().filter(|&&logit| logit > own).count();
        prop_assert_eq!(logprob.rank as usize, 1 + better);
        let alone = prompt_logprob(&logits, sampled.token, top).expect("the logits are valid");
        prop_assert_eq!(alone, logprob);
    }

    /// Goal: the log-probabilities of tokens that a request names are listed instead of those of the
    /// most likely ones, each once and the most likely one first.
    #[test]
    fn named_tokens_are_listed(
        logits in vec(-30.0_f32..30.0, VOCAB as usize),
        params in params_strategy(VOCAB),
        ids in vec(0..VOCAB, 1..10),
    ) {
        let all = SamplingParams { logprobs: Some(VOCAB as usize), ..params.clone() };
        let named = SamplingParams { logprobs: Some(3), logprob_ids: ids.clone().into(), ..params };
        let sample = |params| SamplerState::new(params, &[1, 2]).sample(&mut logits.clone());
        let [all, named] = [all, named].map(|params| {
            sample(params).expect("the logits are valid").logprob.expect("logprobs is set")
        });
        let expected = all.top.into_iter().filter(|(token, _)| ids.contains(token));
        prop_assert_eq!(named.top, expected.collect::<Vec<_>>());
        prop_assert_eq!((named.token_id, named.logprob), (all.token_id, all.logprob));
    }
}

/// The smallest change of top-p or min-p with which they would keep a different set of tokens.
fn edge_distance(logits: &[f32], params: &SamplingParams) -> f64 {
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let temperature = f64::from(params.temperature);
    let mut weights: Vec<f64> =
        logits.iter().map(|&logit| (f64::from(logit - best) / temperature).exp()).collect();
    weights.sort_by(|a, b| b.total_cmp(a));
    weights.truncate(params.top_k.unwrap_or(usize::MAX));
    let sum: f64 = weights.iter().sum();
    let mut so_far = 0.0;
    weights.iter().fold(f64::INFINITY, |nearest, weight| {
        so_far += weight;
        let to_top_p = (so_far / sum - f64::from(params.top_p)).abs();
        nearest.min(to_top_p).min((weight - f64::from(params.min_p)).abs())
    })
}

/// A row with a few likely tokens and very many unlikely ones, as from a real model.
fn wide_row(vocab_size: usize) -> Vec<f32> {
    (0..vocab_size).map(|index| 12.0 * random::uniform(7, index as u64).powi(20) as f32).collect()
}

fn frequencies(row: &[f32], params: &SamplingParams, draws: usize) -> Vec<usize> {
    let mut state = SamplerState::new(params.clone(), &[]);
    let mut counts = vec![0; row.len()];
    let mut logits = row.to_vec();
    for _ in 0..draws {
        logits.copy_from_slice(row);
        counts[state.sample(&mut logits).expect("the logits are valid").token as usize] += 1;
    }
    counts
}

/// Goal: parameters come back from JSON, those that are left out have their defaults, and unknown
/// names are refused.
#[test]
fn parameters_are_read_from_json() {
    let text = r#"{"temperature": 0.5, "logit_bias": [[3, -1.5]], "seed": 7}"#;
    let params: SamplingParams = serde_json::from_str(text).expect("parameters");
    let bias: Arc<[(u32, f32)]> = [(3, -1.5)].into();
    let expected = SamplingParams {
        temperature: 0.5,
        logit_bias: bias,
        seed: Some(7),
        ..SamplingParams::default()
    };
    assert_eq!(params, expected);
    let written = serde_json::to_string(&params).expect("JSON");
    assert_eq!(serde_json::from_str::<SamplingParams>(&written).expect("parameters"), params);
    let unknown = serde_json::from_str::<SamplingParams>(r#"{"temprature": 1}"#);
    assert!(unknown.expect_err("unknown").to_string().contains("temprature"));
}

/// Goal: many draws with one seed follow the distribution of the reference (chi-square test at a
/// level of about 1 in 10,000; the seed is fixed, so the result is deterministic).
#[test]
fn draws_follow_the_distribution_of_the_reference() {
    const DRAWS: usize = 20_000;
    let row: Vec<f32> = (0..40).map(|index| (index % 13) as f32 * 0.4 - 2.0).collect();
    let base = SamplingParams { temperature: 0.8, seed: Some(11), ..Default::default() };
    let cases = [
        base.clone(),
        SamplingParams { top_k: Some(12), ..base.clone() },
        SamplingParams { top_p: 0.7, ..base.clone() },
        SamplingParams { min_p: 0.1, ..base.clone() },
        SamplingParams { top_k: Some(20), top_p: 0.9, min_p: 0.05, ..base },
    ];
    for params in cases {
        let expected = reference(&row, &params, &[], &[]);
        let counts = frequencies(&row, &params, DRAWS);
        let (mut chi_square, mut kinds) = (0.0, 0.0_f64);
        for (&count, &probability) in counts.iter().zip(&expected) {
            if probability == 0.0 {
                assert_eq!(count, 0, "{params:?}: a token with probability 0 was drawn");
                continue;
            }
            let mean = probability * DRAWS as f64;
            chi_square += (count as f64 - mean).powi(2) / mean;
            kinds += 1.0;
        }
        // The mean of the chi-square distribution plus 4 standard deviations.
        let freedom = kinds - 1.0;
        let limit = freedom + 4.0 * (2.0 * freedom).sqrt();
        assert!(
            chi_square < limit,
            "{params:?}: chi-square is {chi_square}, expected less than {limit}"
        );
    }
}

/// Goal: with a vocabulary of many blocks, tokens from all parts of the row are drawn as often as
/// in the reference, and none that the reference excludes.
#[test]
fn draws_from_a_large_vocabulary_cover_the_whole_row() {
    let row = wide_row(20_000);
    for (temperature, top_p) in [(1.0, 1.0), (1.0, 0.9), (5.0, 0.999)] {
        let params = SamplingParams { temperature, top_p, seed: Some(3), ..Default::default() };
        let expected = reference(&row, &params, &[], &[]);
        let counts = frequencies(&row, &params, 600);
        let kept = |index: usize| expected[index] > 0.0;
        assert!(counts.iter().enumerate().all(|(index, &count)| count == 0 || kept(index)));
        // Ids of the lower half are drawn as often as their total probability says.
        let lower: f64 = expected[..10_000].iter().sum();
        let drawn = counts[..10_000].iter().sum::<usize>() as f64 / 600.0;
        assert!((lower - drawn).abs() < 0.05, "{params:?}: lower half {drawn}, expected {lower}");
    }
}

/// Goal: the n-th token depends only on the seed, on n and on the row. A new state that has
/// observed the output so far continues with the same tokens; other seeds lead to other tokens.
#[test]
fn draws_depend_only_on_the_seed_and_the_index() {
    let row = wide_row(500);
    let params = SamplingParams {
        temperature: 1.5,
        presence_penalty: 0.5,
        seed: Some(42),
        ..Default::default()
    };
    let run = |state: &mut SamplerState, count: usize| -> Vec<u32> {
        (0..count)
            .map(|_| state.sample(&mut row.clone()).expect("the logits are valid").token)
            .collect()
    };
    let whole = run(&mut SamplerState::new(params.clone(), &[]), 60);
    for cut in [0, 1, 17, 59] {
        let mut state = SamplerState::new(params.clone(), &[]);
        whole[..cut].iter().for_each(|&token| state.observe(token));
        assert_eq!(run(&mut state, 60 - cut), whole[cut..], "resumed after {cut}");
    }
    let free = SamplingParams { presence_penalty: 0.0, ..params.clone() };
    let best = select::best(&row).expect("the logits are valid");
    let drawn: Vec<u32> =
        (0..60).map(|n| Draw::new(&free, random::uniform(42, n)).of_valid(&row, best)).collect();
    assert_eq!(run(&mut SamplerState::new(free, &[]), 60), drawn, "one random number per token");
    let other = SamplingParams { seed: Some(43), ..params.clone() };
    assert_ne!(run(&mut SamplerState::new(other, &[]), 60), whole);
    let unseeded = SamplingParams { seed: None, ..params };
    let (a, b) = (SamplerState::new(unseeded.clone(), &[]), SamplerState::new(unseeded, &[]));
    assert_ne!(a.seed(), b.seed());
}

/// Goal: the random numbers of a seed never change between versions.
#[test]
fn random_numbers_of_a_seed_are_stable() {
    let drawn: Vec<u64> =
        (0..3).map(|n| (random::uniform(1, n) * (1_u64 << 53) as f64) as u64).collect();
    assert_eq!(drawn, PINNED);
}

const PINNED: [u64; 3] = [3_436_151_158_611_243, 2_121_443_954_071_855, 2_970_119_433_488_894];

/// Goal: greedy sampling returns the lowest id among equal logits, at any position in the row.
#[test]
fn greedy_returns_the_lowest_id_among_equal_logits() {
    for vocab_size in [1, 5, 16, 17, 1000] {
        for first in [0, vocab_size / 2, vocab_size - 1] {
            let mut row = vec![-1.0; vocab_size];
            row[first..].fill(2.5);
            let sampled = SamplerState::new(SamplingParams::default(), &[]).sample(&mut row);
            assert_eq!(sampled, Ok(Sampled { token: first as u32, logprob: None }));
        }
    }
}

/// Goal: with extreme but valid values a token with a probability above 0 is drawn.
#[test]
fn extreme_values_lead_to_a_possible_token() {
    let row = [-1e30, 3.0, f32::NEG_INFINITY, 2.9, 3.4e38, -3.4e38];
    let hot = SamplingParams { temperature: f32::MAX, seed: Some(1), ..Default::default() };
    let cold = SamplingParams { temperature: f32::MIN_POSITIVE / 8.0, ..hot.clone() };
    let narrow = SamplingParams { top_p: f32::MIN_POSITIVE, ..hot.clone() };
    let likely = SamplingParams { min_p: 1.0, temperature: 0.5, ..hot.clone() };
    for params in [cold, narrow, likely] {
        assert_eq!(params.validate(row.len()), Ok(()));
        let sampled = SamplerState::new(params, &[]).sample(&mut row.clone());
        assert_eq!(sampled.expect("the logits are valid").token, 4);
    }
    for _ in 0..100 {
        let token = SamplerState::new(hot.clone(), &[])
            .sample(&mut row.clone())
            .expect("the logits are valid");
        assert_ne!(token.token, 2, "a token with probability 0 was drawn");
    }
}

/// Goal: invalid logits are an error that names the token, and the state is usable afterward.
#[test]
fn invalid_logits_are_errors() {
    for params in [
        SamplingParams::default(),
        SamplingParams { temperature: 1.0, logprobs: Some(2), ..Default::default() },
    ] {
        let mut state = SamplerState::new(params, &[]);
        let mut row = vec![0.0; 40];
        row[33] = f32::INFINITY;
        let infinite = SamplingError::BadLogit { token: 33, value: f32::INFINITY };
        assert_eq!(state.sample(&mut row), Err(infinite));
        row[33] = f32::NAN;
        let error = state.sample(&mut row).expect_err("NaN is not a logit");
        assert_eq!(error.to_string(), "expected a finite logit for token 33, got NaN");
        let none = SamplingError::NoCandidate { vocab_size: 3 };
        assert_eq!(state.sample(&mut [f32::NEG_INFINITY; 3]), Err(none.clone()));
        assert_eq!(prompt_logprob(&[f32::NEG_INFINITY; 3], 0, 1), Err(none));
        assert_eq!(state.sample(&mut []), Err(SamplingError::NoCandidate { vocab_size: 0 }));
        assert!(state.sample(&mut [0.0; 40]).is_ok());
    }
}

/// Goal: a draw chooses the token, or returns the error, that the sampler does, if nothing else
/// takes part, and a request for which it does says so.
#[test]
fn a_draw_replaces_the_sampler() {
    let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3.0, 3.0, -0.0, 0.0];
    let mut valid = 0;
    for case in 0..2_000_usize {
        let value = |at: usize| special[(case * 31 + at * at * 7 + at * case) % special.len()];
        let usable = |at: usize| if value(at) < f32::INFINITY { value(at) } else { 1.0 };
        let len = case % 7;
        let row: Vec<f32> = match case % 3 {
            0 => (0..len).map(value).collect(),
            1 => (0..len).map(usable).collect(),
            _ => vec![f32::NEG_INFINITY; len],
        };
        let greedy = SamplingParams { seed: Some(case as u64), ..SamplingParams::default() };
        let random = SamplingParams { temperature: 0.7, ..greedy.clone() };
        for params in [
            greedy,
            SamplingParams { top_k: Some(3), top_p: 0.8, min_p: 0.1, ..random.clone() },
            SamplingParams { top_p: 0.6, ..random.clone() },
            random,
        ] {
            let mut sampler = SamplerState::new(params, &[]);
            sampler.observe(0);
            let draw = sampler.next_draw().expect("nothing else takes part");
            let expected = sampler.sample(&mut row.clone()).map(|sampled| sampled.token);
            // NaN is not equal to itself.
            assert_eq!(format!("{:?}", draw.of(&row)), format!("{expected:?}"), "{row:?}");
            valid += usize::from(expected.is_ok());
        }
    }
    assert!(valid > 2_000, "{valid}");
    let greedy = SamplingParams::default;
    for params in [
        SamplingParams { logprobs: Some(0), ..greedy() },
        SamplingParams { presence_penalty: 0.1, ..greedy() },
        SamplingParams { logit_bias: [(0, 1.0)].into(), ..greedy() },
    ] {
        assert_eq!(SamplerState::new(params, &[]).next_draw(), None);
    }
}

/// Goal: each parameter that is out of range is refused with its name, the accepted values and the
/// given value.
#[test]
fn values_out_of_range_are_refused() {
    let check = |name: &str, got: &str, change: fn(&mut SamplingParams)| {
        let mut params = SamplingParams::default();
        change(&mut params);
        let error = params.validate(100).expect_err(name).to_string();
        assert!(error.starts_with(&format!("invalid {name}: expected ")), "{error}");
        assert!(error.ends_with(&format!(", got {got}")), "{error}");
    };
    assert_eq!(SamplingParams::default().validate(100), Ok(()));
    check("temperature", "-0.1", |params| params.temperature = -0.1);
    check("temperature", "NaN", |params| params.temperature = f32::NAN);
    check("temperature", "inf", |params| params.temperature = f32::INFINITY);
    check("top_k", "0", |params| params.top_k = Some(0));
    check("top_p", "0", |params| params.top_p = 0.0);
    check("top_p", "1.1", |params| params.top_p = 1.1);
    check("top_p", "NaN", |params| params.top_p = f32::NAN);
    check("min_p", "-0.5", |params| params.min_p = -0.5);
    check("min_p", "1.5", |params| params.min_p = 1.5);
    check("repetition_penalty", "0", |params| params.repetition_penalty = 0.0);
    check("repetition_penalty", "0.000000000000000000000000000000000000000000001", |params| {
        params.repetition_penalty = 1e-45;
    });
    check("repetition_penalty", "inf", |params| params.repetition_penalty = f32::INFINITY);
    check("presence_penalty", "2.5", |params| params.presence_penalty = 2.5);
    check("frequency_penalty", "NaN", |params| params.frequency_penalty = f32::NAN);
    check("logit_bias", "100", |params| params.logit_bias = [(5, 1.0), (100, 0.0)].into());
    check("logit_bias", "token 5 more than once", |params| {
        params.logit_bias = [(5, 1.0), (6, 1.0), (5, 1.0)].into();
    });
    check("logit_bias", "101", |params| params.logit_bias = vec![(5, 1.0); 101].into());
    check("logit_bias", "101 for token 5", |params| params.logit_bias = [(5, 101.0)].into());
    check("logit_bias", "NaN for token 5", |params| params.logit_bias = [(5, f32::NAN)].into());
    check("logprobs", "101", |params| params.logprobs = Some(101));
    check("logprob_ids", "100", |params| params.logprob_ids = [5, 100].into());
}

/// Goal: the most extreme parameters and logits that are accepted yield a token. No transform turns
/// a finite logit into NaN or infinity.
#[test]
fn extreme_parameters_never_overflow() {
    let row = [f32::MAX, f32::MIN, f32::MIN_POSITIVE, 0.0, f32::NEG_INFINITY];
    for temperature in [0.0, f32::MIN_POSITIVE, 1e-45, 1.0, f32::MAX] {
        for repetition_penalty in [0.01, 1.0, 100.0] {
            for (penalty, bias) in [(-2.0, 100.0), (0.0, 0.0), (2.0, -100.0)] {
                let params = SamplingParams {
                    temperature,
                    top_k: Some(usize::MAX),
                    top_p: f32::MIN_POSITIVE,
                    min_p: 1.0,
                    repetition_penalty,
                    presence_penalty: penalty,
                    frequency_penalty: penalty,
                    logit_bias: [(0, bias), (1, bias), (4, bias)].into(),
                    seed: Some(u64::MAX),
                    logprobs: Some(5),
                    logprob_ids: Arc::default(),
                    processor: None,
                };
                params.validate(row.len()).expect("all values are in range");
                let mut state = SamplerState::new(params, &[0, 1, u32::MAX]).choice(u64::MAX);
                for _ in 0..3 {
                    let mut logits = row;
                    let sampled = state.sample(&mut logits).expect("the logits are finite");
                    assert_ne!(sampled.token, 4, "its probability is 0");
                    assert!(logits.iter().all(|&logit| logit < f32::INFINITY));
                }
            }
        }
    }
}
