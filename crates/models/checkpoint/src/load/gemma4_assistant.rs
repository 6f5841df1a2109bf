//! Loads an assistant of Gemma 4 for a model, from the assistant's own directory or repository.

use std::path::Path;

use serde_json::Value;

use super::draft_head::DraftHead;
use super::head::{EMBEDDING, HEAD};
use crate::config::gemma4_assistant::{fit, parse};
use crate::config::{AssistantConfig, DecoderConfig, DraftHeadKind};
use crate::error::ModelError;
use crate::weights::Weights;

/// The tensor with the tokens of each cluster in order.
pub(crate) const CLUSTERS: &str = "masked_embedding.token_ordering";

/// Loads the assistant in `directory` for a model with this configuration. `file` is the name of the
/// `config.json`, which has this value.
pub(super) fn load(
    directory: &Path,
    (file, value): (&str, &Value),
    model: &DecoderConfig,
) -> Result<DraftHead, ModelError> {
    let (decoder, config) = parse(file, value)?;
    let decoder = fit(file, decoder, &config, model)?;
    let mut weights = Weights::open_directory(directory)?;
    prepare(&mut weights);
    check(&weights, &decoder, &config)?;
    let cluster_tokens = match config.clusters {
        Some(_) => cluster_tokens(&weights, decoder.vocab_size)?,
        None => None,
    };
    let kind = DraftHeadKind::Gemma4(config);
    Ok(DraftHead { config: decoder, kind, weights, token_ids: None, cluster_tokens })
}

/// Makes the embedding the output matrix. The input has the embedding of the model.
pub(crate) fn prepare(weights: &mut Weights) {
    if weights.contains(HEAD) {
        weights.remove(EMBEDDING);
    } else {
        weights.rename(EMBEDDING, HEAD);
    }
}

/// Checks that an assistant has all tensors, and no other ones that would change what it computes.
pub(crate) fn check(
    weights: &Weights,
    decoder: &DecoderConfig,
    config: &AssistantConfig,
) -> Result<(), ModelError> {
    let tensors = DraftHeadKind::Gemma4(*config).tensors(decoder, |name| name == HEAD);
    let is_known = |name: &str| {
        name == CLUSTERS
            || name.ends_with(".rotary_emb.inv_freq")
            || tensors.iter().any(|spec| spec.name == name)
    };
    if let Some(name) = weights.names().filter(|name| !is_known(name)).min() {
        let reason = format!("expected an assistant without a tensor `{name}`");
        return Err(ModelError::malformed(weights.origin(), reason));
    }
    weights.check_all(tensors)?;
    if config.clusters.is_some() && !weights.contains(CLUSTERS) {
        let (file, tensor) = (weights.origin().to_owned(), CLUSTERS.to_owned());
        return Err(ModelError::MissingTensor { file, tensor, expected: vec![decoder.vocab_size] });
    }
    Ok(())
}

/// The tokens of each cluster in order.
fn cluster_tokens(weights: &Weights, vocab_size: usize) -> Result<Option<Vec<u32>>, ModelError> {
    let Some(tokens) = weights.integers(CLUSTERS, vocab_size)? else { return Ok(None) };
    let is_token = |token: &i64| usize::try_from(*token).is_ok_and(|token| token < vocab_size);
    if let Some((index, token)) = tokens.iter().enumerate().find(|(_, token)| !is_token(token)) {
        let reason = format!(
            "tensor `{CLUSTERS}`: expected ids below {vocab_size}, got {token} at index {index}"
        );
        return Err(ModelError::malformed(weights.origin(), reason));
    }
    Ok(Some(tokens.into_iter().map(|token| token as u32).collect()))
}
