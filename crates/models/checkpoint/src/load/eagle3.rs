//! Loads an EAGLE-3 head for a model, from the head's own directory or repository.

use std::path::Path;

use serde_json::Value;

use super::draft_head::DraftHead;
use super::head::{EMBEDDING, HEAD};
use crate::config::eagle3::{fit, parse};
use crate::config::{DecoderConfig, DraftHeadKind, Eagle3Config};
use crate::error::ModelError;
use crate::weights::Weights;

/// The tensor with the differences between the model's ids of tokens that can be guessed and their
/// indices.
const TOKEN_IDS: &str = "d2t";

/// Loads the head in `directory` for a model with this configuration and these weights. `file` is the
/// name of the `config.json`, which has this value.
pub(super) fn load(
    directory: &Path,
    (file, value): (&str, &Value),
    (model, model_weights): (&DecoderConfig, &Weights),
) -> Result<DraftHead, ModelError> {
    let (decoder, config) = parse(file, value, model.layers.len())?;
    let decoder = fit(file, decoder, &config, model)?;
    let mut weights = Weights::open_directory(directory)?;
    prepare(&mut weights)?;
    check(&weights, &decoder, &config)?;
    let token_ids = token_ids(&weights, &config, model.vocab_size)?;
    // Files often have a copy of the model's embedding.
    if weights.have_equal_bytes(EMBEDDING, (model_weights, EMBEDDING)) == Some(true) {
        weights.remove(EMBEDDING);
    }
    let kind = DraftHeadKind::Eagle3(config);
    Ok(DraftHead { config: decoder, kind, weights, token_ids, cluster_tokens: None })
}

/// Gives the tensors of the layer the names that they have in a decoder.
pub(crate) fn prepare(weights: &mut Weights) -> Result<(), ModelError> {
    let names: Vec<String> = weights.names().map(str::to_owned).collect();
    for name in names {
        let inner = name.strip_prefix("model.").unwrap_or(&name);
        let Some(rest) = inner.strip_prefix("midlayer.") else { continue };
        let other = format!("model.layers.0.{rest}");
        if weights.contains(&other) {
            let reason = format!("the tensors `{name}` and `{other}` are the same");
            return Err(ModelError::malformed(weights.origin(), reason));
        }
        weights.rename(&name, &other);
    }
    Ok(())
}

/// Checks that a head has all tensors, and no other ones that would change what it computes.
pub(crate) fn check(
    weights: &Weights,
    decoder: &DecoderConfig,
    config: &Eagle3Config,
) -> Result<(), ModelError> {
    let is_partial = config.vocab_size != decoder.vocab_size;
    let kind = DraftHeadKind::Eagle3(config.clone());
    // The output matrix of the model has all tokens.
    let is_own = |name: &str| weights.contains(name) || (is_partial && name == HEAD);
    let tensors = kind.tensors(decoder, is_own);
    // A bias or a norm that other heads have would be ignored.
    let is_computed =
        |name: &&str| ["model.layers.", "fc"].iter().any(|part| name.starts_with(part));
    let is_unknown = |name: &&str| {
        !name.ends_with(".rotary_emb.inv_freq") && tensors.iter().all(|spec| spec.name != *name)
    };
    if let Some(name) = weights.names().filter(is_computed).filter(is_unknown).min() {
        let reason = format!("expected a head without a tensor `{name}`");
        return Err(ModelError::malformed(weights.origin(), reason));
    }
    weights.check_all(tensors)?;
    if is_partial && !weights.contains(TOKEN_IDS) {
        let expected = vec![config.vocab_size];
        let (file, tensor) = (weights.origin().to_owned(), TOKEN_IDS.to_owned());
        return Err(ModelError::MissingTensor { file, tensor, expected });
    }
    Ok(())
}

/// The model's ids of the tokens that can be guessed, if they are not the same.
fn token_ids(
    weights: &Weights,
    config: &Eagle3Config,
    vocab_size: usize,
) -> Result<Option<Vec<u32>>, ModelError> {
    let Some(steps) = weights.integers(TOKEN_IDS, config.vocab_size)? else { return Ok(None) };
    let mut is_used = vec![false; vocab_size];
    let mut ids = Vec::with_capacity(steps.len());
    for (index, step) in steps.into_iter().enumerate() {
        let id = (index as i64).checked_add(step).and_then(|id| usize::try_from(id).ok());
        match id.filter(|id| is_used.get(*id) == Some(&false)) {
            Some(id) => {
                is_used[id] = true;
                ids.push(id as u32);
            }
            None => {
                let expected = format!("different ids below {vocab_size}");
                let got = format!("{step} at index {index}");
                let reason = format!("tensor `{TOKEN_IDS}`: expected {expected}, got {got}");
                return Err(ModelError::malformed(weights.origin(), reason));
            }
        }
    }
    Ok(Some(ids))
}
