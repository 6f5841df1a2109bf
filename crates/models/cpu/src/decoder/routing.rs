//! The choice of experts for each row, and the groups of rows that use the same expert.

use stolon_checkpoint::config::{ExpertChoice, ExpertsConfig, sigmoid};

use crate::workers::Workers;

/// The experts that the rows of a step use in one layer. The buffers are reused.
#[derive(Debug, Default)]
pub(crate) struct Routing {
    /// The normalized residual stream, `[rows, hidden_size]`.
    pub(super) normed: Vec<f32>,
    /// The router's scores, `[rows, experts]`.
    pub(super) scores: Vec<f32>,
    /// The score of the shared expert, `[rows]`; empty if it has none.
    pub(super) shared_scores: Vec<f32>,
    /// The experts that each row uses, with their weights, `[rows, experts per token]`.
    choices: Vec<ExpertChoice>,
    /// The experts that at least one row uses, in ascending order. The shared expert is last; its
    /// index is the number of the other experts.
    pub(super) groups: Vec<ExpertGroup>,
    /// The rows of all groups, group by group, in ascending order within a group.
    rows: Vec<u32>,
    /// The weight of the expert's output for each entry of `rows`.
    weights: Vec<f32>,
}

/// The rows that use one expert.
#[derive(Clone, Debug)]
pub(super) struct ExpertGroup {
    /// Index of the expert.
    pub(super) expert: usize,
    /// Range in [`Routing::rows`].
    range: std::ops::Range<usize>,
}

impl Routing {
    /// Resizes the buffers to `rows` rows.
    pub(super) fn reset(&mut self, config: &ExpertsConfig, rows: usize, hidden_size: usize) {
        self.normed.resize(rows * hidden_size, 0.0);
        self.scores.resize(rows * config.count, 0.0);
        self.shared_scores.resize(if config.shared_gate { rows } else { 0 }, 0.0);
        self.choices.resize(rows * config.per_token, ExpertChoice::default());
    }

    /// Chooses the experts of each row by its scores, and groups the rows by expert. `bias` is
    /// added to the scores only to choose, and `factors` are multiplied with the weights of the
    /// experts.
    pub(super) fn choose(
        &mut self,
        config: &ExpertsConfig,
        [bias, factors]: [Option<&[f32]>; 2],
        workers: &Workers,
    ) {
        let rows = self.scores.len() / config.count;
        let chunk = workers.chunk_rows(rows, 8 * config.count);
        let scores = self.scores.chunks_mut(chunk * config.count);
        let parts = scores.zip(self.choices.chunks_mut(chunk * config.per_token));
        workers.run(parts, |(scores, choices)| {
            let mut order = Vec::new();
            let rows = scores.chunks_exact_mut(config.count);
            for (scores, choices) in rows.zip(choices.chunks_exact_mut(config.per_token)) {
                config.choose(scores, bias, &mut order, choices);
                if let Some(factors) = factors {
                    let scale = |choice: &mut ExpertChoice| {
                        choice.weight *= factors[choice.expert as usize];
                    };
                    choices.iter_mut().for_each(scale);
                }
            }
        });
        self.group(config.count, config.per_token);
        if config.shared_width.is_some() {
            let start = self.rows.len();
            self.rows.extend(0..rows as u32);
            self.weights.extend(self.shared_scores.iter().map(|score| sigmoid(*score)));
            self.weights.resize(start + rows, 1.0);
            self.groups.push(ExpertGroup { expert: config.count, range: start..start + rows });
        }
    }

    /// Groups the rows of `choices` by expert, with a counting sort.
    fn group(&mut self, count: usize, per_token: usize) {
        let mut ends = vec![0; count + 1];
        for choice in &self.choices {
            ends[choice.expert as usize + 1] += 1;
        }
        self.groups.clear();
        for expert in 0..count {
            let start = ends[expert];
            ends[expert + 1] += start;
            if ends[expert + 1] > start {
                self.groups.push(ExpertGroup { expert, range: start..ends[expert + 1] });
            }
        }
        self.rows.clear();
        self.rows.resize(self.choices.len(), 0);
        self.weights.clear();
        self.weights.resize(self.choices.len(), 0.0);
        for (index, choice) in self.choices.iter().enumerate() {
            // `ends[e]` is the index where the next row of expert `e` is written.
            let next = &mut ends[choice.expert as usize];
            self.rows[*next] = (index / per_token) as u32;
            self.weights[*next] = choice.weight;
            *next += 1;
        }
    }

    /// The rows of a group, in ascending order.
    pub(super) fn rows(&self, group: &ExpertGroup) -> &[u32] {
        &self.rows[group.range.clone()]
    }

    /// For each row of a group, the weight of the expert's output.
    pub(super) fn weights(&self, group: &ExpertGroup) -> &[f32] {
        &self.weights[group.range.clone()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stolon_checkpoint::config::{ExpertGroups, ExpertScores, GateFunction};

    fn config(per_token: usize, normalized: bool, shared: bool) -> ExpertsConfig {
        let shared_width = shared.then_some(8);
        ExpertsConfig {
            count: 5,
            per_token,
            width: 4,
            activation: GateFunction::Silu.into(),
            bias: false,
            scores: ExpertScores::Softmax,
            normalized,
            router_bias: false,
            groups: None,
            scale: 1.0,
            shared_width,
            shared_gate: shared,
            scaled_router: false,
            shifted: false,
        }
    }

    fn routing(config: &ExpertsConfig, scores: &[f32]) -> Routing {
        let mut routing = Routing::default();
        routing.reset(config, scores.len() / config.count, 1);
        routing.scores.copy_from_slice(scores);
        routing.shared_scores.fill(0.0);
        routing.choose(config, [None; 2], &Workers::new(1));
        routing
    }

    /// The groups as `(expert, rows)`.
    fn groups(routing: &Routing) -> Vec<(usize, Vec<u32>)> {
        let groups = routing.groups.iter();
        groups.map(|group| (group.expert, routing.rows(group).to_vec())).collect()
    }

    /// Goal: each row is in the groups of its best experts. Among equal experts, the one with the
    /// lower index is chosen. Groups and their rows are in ascending order. All rows use the shared
    /// expert.
    #[test]
    fn rows_are_grouped_by_their_best_experts() {
        let scores = [
            [0.0, 3.0, 1.0, 2.0, -1.0],
            [2.0, 2.0, 2.0, 2.0, 2.0],
            [f32::NAN, 1.0, 0.0, f32::NEG_INFINITY, 0.5],
            [-0.0, -5.0, -4.0, -3.0, 7.0],
        ];
        let got = routing(&config(2, true, true), scores.as_flattened());
        let expected = [
            (0, vec![1, 2, 3]),
            (1, vec![0, 1, 2]),
            (3, vec![0]),
            (4, vec![3]),
            (5, vec![0, 1, 2, 3]),
        ];
        assert_eq!(groups(&got), expected);
        let all = routing(&config(5, false, false), scores.as_flattened());
        assert_eq!(groups(&all), [0, 1, 2, 3, 4].map(|expert| (expert, vec![0, 1, 2, 3])));
    }

    /// Goal: with sigmoids, the bias changes which experts are chosen, but not their weights.
    #[test]
    fn a_bias_only_chooses() {
        for normalized in [true, false] {
            let scores = ExpertScores::Sigmoid { bias: true };
            let config = ExpertsConfig { scores, ..config(2, normalized, false) };
            let mut routing = Routing::default();
            routing.reset(&config, 1, 1);
            routing.scores.copy_from_slice(&[0.0, 2.0, 1.0, -1.0, 0.5]);
            routing.choose(&config, [Some(&[0.0, -1.0, 0.0, 0.7, 0.0]), None], &Workers::new(1));
            assert_eq!(groups(&routing), [(2, vec![0]), (3, vec![0])]);
            let chosen = [sigmoid(1.0), sigmoid(-1.0)];
            let sum = if normalized { chosen[0] + chosen[1] } else { 1.0 };
            for (weight, chosen) in routing.weights.iter().zip(chosen) {
                assert!((weight - chosen / sum).abs() < 1e-5, "{weight} {chosen} {sum}");
            }
        }
    }

    /// Goal: experts are chosen only from the group with the highest sum of weights. Among equal
    /// groups, the one with the lower index is used. Biases count for the choice of the group, but
    /// do not change the weights of experts.
    #[test]
    fn experts_are_chosen_within_groups() {
        let sigmoids = ExpertScores::Sigmoid { bias: true };
        let (even, first) = ([0.0, 3.0, 2.5, 2.25, 0.5, -1.0], [0.0, 3.0, 2.0, 1.75, 0.5, -1.0]);
        let bias = [0.0, 0.0, 0.0, 0.0, 1.0, 0.0];
        for (scores, best, logits, bias, expected) in [
            (ExpertScores::Softmax, 1, even, [0.0; 6], [1, 0]),
            (ExpertScores::Softmax, 2, even, [0.0; 6], [2, 3]),
            // The sum of these logits is less than the sum of the second group's logits.
            (ExpertScores::Softmax, 2, first, [0.0; 6], [1, 0]),
            (sigmoids, 2, even, [0.0; 6], [2, 3]),
            (sigmoids, 2, even, bias, [4, 5]),
            (sigmoids, 1, [1.0; 6], [0.0; 6], [0, 1]),
        ] {
            let groups = Some(ExpertGroups { count: 3, used: 1, best });
            let config = ExpertsConfig { count: 6, scores, groups, ..config(2, false, false) };
            let mut routing = Routing::default();
            routing.reset(&config, 1, 1);
            routing.scores.copy_from_slice(&logits);
            routing.choose(&config, [Some(&bias), None], &Workers::new(1));
            let experts = routing.choices.iter().map(|choice| choice.expert);
            assert_eq!(experts.collect::<Vec<_>>(), expected, "{scores:?} {best}");
            let sum: f32 = logits.iter().map(|logit| logit.exp()).sum();
            for choice in &routing.choices {
                let logit = logits[choice.expert as usize];
                let weight = match scores {
                    ExpertScores::Softmax => logit.exp() / sum,
                    ExpertScores::Sigmoid { .. } => sigmoid(logit),
                };
                assert!((choice.weight - weight).abs() < 1e-5, "{choice:?} {weight}");
            }
        }
    }

    /// Goal: weights are the softmax over the chosen experts, or over all experts, and the weight
    /// of the shared expert is the sigmoid of its score.
    #[test]
    fn weights_are_a_softmax() {
        let scores = [0.0, 2.0, 1.0, -1.0, 0.5_f32];
        let exp = |x: f32| f64::from(x).exp();
        for normalized in [true, false] {
            let config = config(2, normalized, true);
            let routing = routing(&config, &scores);
            let all: f64 = scores.iter().map(|x| exp(*x)).sum();
            let sum = if normalized { exp(2.0) + exp(1.0) } else { all };
            let expected = [exp(2.0) / sum, exp(1.0) / sum, 0.5];
            for (group, expected) in routing.groups.iter().zip(expected) {
                let [weight] = routing.weights(group) else { panic!("one row") };
                assert!((f64::from(*weight) - expected).abs() < 1e-6, "{weight} {expected}");
            }
        }
    }
}
