//! The description of a mixture of experts.

use super::keys::SIZE_MAX;
use crate::error::ModelError;

/// Maximum number of experts of a layer. Known models have up to 512.
const EXPERTS_MAX: usize = 1024;

/// Maximum number of experts of all layers together. Known models have up to 25,000. It bounds what
/// is allocated for a malformed file.
const EXPERTS_TOTAL_MAX: usize = 1 << 15;

/// A mixture of experts, which replaces the MLP of layers with
/// [`LayerConfig::experts`](super::LayerConfig::experts). Each expert is an MLP. A router scores
/// all experts for each token, and the outputs of the experts with the highest scores are added,
/// weighted by the softmax of the scores. Among equal scores, the lower index wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertsConfig {
    /// Number of experts of a layer, at most 1024.
    pub count: usize,
    /// Number of experts that each token uses: from 1 to `count`.
    pub per_token: usize,
    /// Width of the MLP of an expert.
    pub width: usize,
    /// Whether the weights of a token's experts add up to 1: the softmax is taken over the scores
    /// of these experts. Otherwise it is taken over the scores of all experts.
    pub normalized: bool,
    /// Whether the router has a bias.
    pub router_bias: bool,
    /// Width of the MLP of the shared expert, which all tokens use in addition. Its weight is the
    /// sigmoid of a projection to one number. `None` if there is no shared expert.
    pub shared_width: Option<usize>,
}

/// An expert that a token uses.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ExpertChoice {
    /// Index of the expert.
    pub expert: u32,
    /// Factor of the expert's output.
    pub weight: f32,
}

impl ExpertsConfig {
    /// Chooses the experts with the highest of a token's `scores`, `[count]`; of equal scores the
    /// one with the lower index. `choices`, `[per_token]`, gets them with their weights, the
    /// highest score first. `order` is scratch memory.
    ///
    /// # Panics
    /// If `scores` is empty.
    pub fn choose(&self, scores: &[f32], order: &mut Vec<u32>, choices: &mut [ExpertChoice]) {
        let by_score =
            |a: &u32, b: &u32| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b));
        order.clear();
        order.extend(0..scores.len() as u32);
        if choices.len() < order.len() {
            order.select_nth_unstable_by(choices.len(), by_score);
            order.truncate(choices.len());
        }
        order.sort_unstable_by(by_score);
        let largest = scores[order[0] as usize];
        let weight = |expert: u32| (scores[expert as usize] - largest).exp();
        let sum: f32 = match self.normalized {
            true => order.iter().map(|expert| weight(*expert)).sum(),
            false => (0..scores.len() as u32).map(weight).sum(),
        };
        for (choice, &expert) in choices.iter_mut().zip(order.iter()) {
            *choice = ExpertChoice { expert, weight: weight(expert) / sum };
        }
    }

    /// Checks the documented ranges. `layers` is the number of layers with experts, and `file` the
    /// file's name in error messages.
    pub(super) fn check(&self, file: &str, layers: usize) -> Result<(), ModelError> {
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
        Ok(())
    }
}
