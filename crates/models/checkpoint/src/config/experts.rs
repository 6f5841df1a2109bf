//! The description of a mixture of experts.

use super::Activation;
use super::keys::SIZE_MAX;
use crate::error::ModelError;

/// Maximum number of experts of a layer. Known models have up to 512.
const EXPERTS_MAX: usize = 1024;

/// Maximum number of experts of all layers together. Known models have up to 25,000. It bounds the
/// memory that is allocated for a malformed file.
const EXPERTS_TOTAL_MAX: usize = 1 << 15;

/// A mixture of experts. Each expert is an MLP. A router scores all experts for each token, and the
/// outputs of the experts with the highest scores are added, weighted as [`Self::scores`] says.
/// Among experts with equal scores, lower indices are preferred.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// Number of experts of a layer, at most 1024.
    pub count: usize,
    /// Number of experts that each token uses: from 1 to `count`.
    pub per_token: usize,
    /// Width of the MLP of an expert.
    pub width: usize,
    /// The activation of an expert's inner features.
    pub activation: Activation,
    /// Whether the projections of experts have biases.
    pub bias: bool,
    /// The function from scores to weights.
    pub scores: ExpertScores,
    /// Whether the weights of a token's experts add up to 1. A softmax is then taken over the
    /// scores of these experts only, and otherwise over the scores of all experts.
    pub normalized: bool,
    /// Whether the router has a bias.
    pub router_bias: bool,
    /// The groups from which a token's experts are chosen; `None` if they are chosen from all
    /// experts.
    pub groups: Option<ExpertGroups>,
    /// Factor of the weights of a token's experts, above 0.
    pub scale: f32,
    /// Width of the MLP of the shared expert, which all tokens use in addition; `None` if there is
    /// no shared expert.
    pub shared_width: Option<usize>,
    /// Whether the weight of the shared expert is the sigmoid of a projection to one number.
    /// Otherwise it is 1.
    pub shared_gate: bool,
    /// Whether the router reads the residual stream through an RMS norm of its own, and the weight
    /// of each expert has a learned factor (Gemma 4). Otherwise the router reads the same input as
    /// the experts.
    pub scaled_router: bool,
    /// Whether 1 is added to `up(x)`: `down(activation(gate(x)) * (up(x) + 1))` (Moondream 3).
    pub shifted: bool,
}

/// Groups of consecutive experts. A token uses only experts of the groups with the highest scores
/// (DeepSeek-V2 and V3). Among groups with equal scores, lower indices are preferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups, a divisor of the number of experts.
    pub count: usize,
    /// Number of groups that a token uses: from 1 to `count`.
    pub used: usize,
    /// Number of experts whose weights, including biases, are added up to the score of their group:
    /// the best ones of each group. From 1 to the number of experts in a group.
    pub best: usize,
}

/// The function from the scores of a router to the weights of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertScores {
    /// The softmax of the scores.
    Softmax,
    /// The sigmoid of each score. If `bias` is true, each expert has a bias that is added to its
    /// weight only to choose experts (LFM2, GLM-4.5).
    Sigmoid {
        /// Whether there are biases.
        bias: bool,
    },
}

/// The logistic function.
#[must_use]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// An expert that a token uses.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ExpertChoice {
    /// Index of the expert.
    pub expert: u32,
    /// Factor of the expert's output.
    pub weight: f32,
}

impl ExpertGroups {
    /// Adds the experts of the used groups to `experts`. All groups together have `count` experts,
    /// and `weight` returns the weight of an expert.
    fn add_experts(self, count: usize, weight: impl Fn(u32) -> f32, experts: &mut Vec<u32>) {
        let size = count / self.count;
        let members = |group: usize| (group * size) as u32..((group + 1) * size) as u32;
        let mut weights = Vec::with_capacity(size);
        let sum_of_best = |group: usize| {
            weights.clear();
            weights.extend(members(group).map(&weight));
            weights.sort_unstable_by(|a: &f32, b| b.total_cmp(a));
            (weights.iter().take(self.best).sum::<f32>(), group)
        };
        let mut groups: Vec<(f32, usize)> = (0..self.count).map(sum_of_best).collect();
        groups.sort_by(|a, b| b.0.total_cmp(&a.0));
        groups.iter().take(self.used).for_each(|(_, group)| experts.extend(members(*group)));
    }
}

impl ExpertsConfig {
    /// Chooses the experts of a token with the highest `scores`, `[count]`. Among equal scores, the
    /// lower index is chosen. `bias`, `[count]`, is the bias of [`ExpertScores::Sigmoid`]. The
    /// experts and their weights are written to `choices`, `[per_token]`, the highest score first.
    /// `order` is scratch memory, and `scores` are overwritten.
    ///
    /// # Panics
    /// If `scores` is empty, or `bias` is shorter.
    pub fn choose(
        &self,
        scores: &mut [f32],
        bias: Option<&[f32]>,
        order: &mut Vec<u32>,
        choices: &mut [ExpertChoice],
    ) {
        if let ExpertScores::Sigmoid { .. } = self.scores {
            scores.iter_mut().for_each(|score| *score = sigmoid(*score));
        }
        let scores = &*scores;
        let key =
            |expert: u32| scores[expert as usize] + bias.map_or(0.0, |bias| bias[expert as usize]);
        let by_score = |a: &u32, b: &u32| key(*b).total_cmp(&key(*a)).then(a.cmp(b));
        order.clear();
        match self.groups {
            None => order.extend(0..scores.len() as u32),
            Some(groups) => {
                let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let weight = |expert: u32| match self.scores {
                    ExpertScores::Softmax => (scores[expert as usize] - most).exp(),
                    ExpertScores::Sigmoid { .. } => key(expert),
                };
                groups.add_experts(scores.len(), weight, order);
            }
        }
        if choices.len() < order.len() {
            order.select_nth_unstable_by(choices.len(), by_score);
            order.truncate(choices.len());
        }
        order.sort_unstable_by(by_score);
        let largest = scores[order[0] as usize];
        let weight = |expert: u32| match self.scores {
            ExpertScores::Softmax => (scores[expert as usize] - largest).exp(),
            ExpertScores::Sigmoid { .. } => scores[expert as usize],
        };
        let chosen = || order.iter().map(|expert| weight(*expert)).sum::<f32>();
        let sum = match (self.scores, self.normalized) {
            (ExpertScores::Softmax, true) => chosen(),
            (ExpertScores::Softmax, false) => (0..scores.len() as u32).map(weight).sum(),
            // The addend is the same as in transformers. It keeps the sum from being 0.
            (ExpertScores::Sigmoid { .. }, true) => chosen() + 1e-6,
            (ExpertScores::Sigmoid { .. }, false) => 1.0,
        };
        for (choice, &expert) in choices.iter_mut().zip(order.iter()) {
            *choice = ExpertChoice { expert, weight: weight(expert) / sum * self.scale };
        }
    }

    /// Checks the documented ranges. `layers` is the number of layers with experts, and `file` the
    /// file's name in error messages.
    pub(crate) fn check(&self, file: &str, layers: usize) -> Result<(), ModelError> {
        let experts_max = EXPERTS_MAX.min(EXPERTS_TOTAL_MAX / layers.max(1));
        let ranges = [
            ("num_experts", self.count, experts_max),
            ("num_experts_per_tok", self.per_token, self.count),
            ("moe_intermediate_size", self.width, SIZE_MAX as usize),
            ("shared_expert_intermediate_size", self.shared_width.unwrap_or(1), SIZE_MAX as usize),
        ];
        for (key, got, most) in ranges {
            if !(1..=most).contains(&got) {
                return Err(ModelError::key(file, key, format!("1 to {most}"), got));
            }
        }
        if let Some(ExpertGroups { count, used, best }) = self.groups {
            let size = self.count / count.max(1);
            if !(1..=self.count).contains(&count) || !self.count.is_multiple_of(count) {
                let expected = format!("a divisor of the number of experts, {}", self.count);
                return Err(ModelError::key(file, "n_group", expected, count));
            }
            if !(1..=count).contains(&used) || used * size < self.per_token || best > size {
                let expected = format!("1 to {count} groups with enough experts");
                return Err(ModelError::key(file, "topk_group", expected, used));
            }
        }
        if !(self.scale.is_normal() && self.scale > 0.0) {
            let expected = "a finite number above 0";
            return Err(ModelError::key(file, "routed_scaling_factor", expected, self.scale));
        }
        self.activation.check(file)
    }
}
