//! Decides which matrix computes the logits if `config.json` and the weights disagree.

use crate::config::ParsedConfig;
use crate::weights::Weights;

/// The output matrix.
pub(super) const HEAD: &str = "lm_head.weight";
/// The embedding, which is the output matrix of models that tie the two.
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";

/// Makes the embedding the output matrix of a model without one, if the model may lack it.
/// Models for embeddings and scores (`has_no_output`) may lack it although the two matrices are not tied (Qwen3-Embedding-8B); their
/// logits then have no meaning. Returns whether the model generates text.
pub(crate) fn tie_missing(
    config: &mut ParsedConfig,
    weights: &mut Weights,
    has_no_output: bool,
) -> bool {
    let is_missing = !config.decoder.tie_word_embeddings && !weights.contains(HEAD);
    let generates = !is_missing || config.may_lack_head || !has_no_output;
    if is_missing && (config.may_lack_head || has_no_output) {
        config.decoder.tie_word_embeddings = true;
    }
    // Files of tied models have the matrix under one of the two names.
    if config.decoder.tie_word_embeddings && !weights.contains(EMBEDDING) {
        weights.rename(HEAD, EMBEDDING);
    }
    generates
}

/// Makes a model use the output matrix in its files if its configuration says that the embedding is
/// its output matrix, but the two matrices differ. Merging an adapter that changed one of them has
/// this result. transformers does the same. Returns a note for users.
pub(crate) fn untie_different(config: &mut ParsedConfig, weights: &Weights) -> Option<String> {
    if !config.decoder.tie_word_embeddings || !weights.contains(HEAD) {
        return None;
    }
    let says =
        "`tie_word_embeddings` of config.json is true, but the weights have an output matrix";
    match weights.have_equal_bytes(HEAD, (weights, EMBEDDING)) {
        Some(true) => None,
        Some(false) => {
            config.decoder.tie_word_embeddings = false;
            Some(format!("{says} (`{HEAD}`) that differs from the embedding; it is used"))
        }
        None => Some(format!("{says} (`{HEAD}`); it is used if it differs from the embedding")),
    }
}
