//! Validation of requests and of the backend's sizes. A request that passes fits an empty pool.

use stolon_backend::BackendSpec;
use stolon_kvcache::{ConfigError, TokenSpan, TreeBuilder};

use super::PromptLimit;
use crate::config::EngineConfig;
use crate::error::{EngineError, LengthBound};
use crate::images::PromptImage;
use crate::request::{RequestOptions, SequenceRequest};

/// Minimum number of tokens that a request generates: 0 if it is for an embedding.
pub(super) fn answer_min(request: &SequenceRequest) -> usize {
    usize::from(request.options.pooling.is_none())
}

/// The maximum length of a prompt. `reserved` blocks are not available to requests, and the context
/// must also hold `answer_min` generated tokens.
pub(super) fn prompt_limit(spec: &BackendSpec, reserved: usize, answer_min: usize) -> PromptLimit {
    let (blocks, block_size) = (spec.block_count - reserved, spec.block_size);
    let (pool, context) = (blocks * block_size, spec.max_positions - answer_min);
    if context <= pool {
        PromptLimit { tokens: context, bound: LengthBound::Context(spec.max_positions) }
    } else {
        PromptLimit { tokens: pool, bound: LengthBound::Pool { blocks, block_size } }
    }
}

/// Validates a request against the backend's sizes and returns the number of tokens it can generate
/// at most: fewer than requested if the context length or the KV pool, without `reserved` blocks,
/// is exhausted first.
pub(super) fn check(
    request: &SequenceRequest,
    spec: &BackendSpec,
    config: &EngineConfig,
    reserved: usize,
) -> Result<usize, EngineError> {
    let (got, vocab_size) = (request.tokens.len(), spec.vocab_size);
    let limit = prompt_limit(spec, reserved, answer_min(request));
    check_len(&request.tokens, limit)?;
    check_ids(&request.tokens, &request.images, spec)?;
    check_images(request, spec)?;
    let pool = (spec.block_count - reserved) * spec.block_size;
    request.stored.as_ref().map_or(Ok(()), |stored| stored.check(spec))?;
    let options = &request.options;
    if options.skip_writing_prefix_cache && request.turn.is_some() {
        let expected = "false for the turn of a session, which keeps what is cached of it";
        return Err(EngineError::invalid("skip_writing_prefix_cache", expected, true));
    }
    if options.pooling.is_some() {
        if spec.hidden_size.is_none() {
            let expected = "a backend that returns hidden states";
            return Err(EngineError::invalid("pooling", expected, "one that returns logits only"));
        }
        if options.prompt_logprobs.is_some() {
            let expected = "none for an embedding";
            return Err(EngineError::invalid("prompt_logprobs", expected, "a number"));
        }
        // An embedding generates nothing, and ends when the prompt is computed.
        return Ok(1);
    }
    if spec.whole_prompts {
        let expected = "a way of pooling, because the backend returns hidden states only";
        return Err(EngineError::invalid("pooling", expected, "none"));
    }
    let is_text = |&token: &u32| (token as usize) < vocab_size;
    if options.prompt_logprobs.is_some() && !request.tokens.iter().all(is_text) {
        let expected = "none for a prompt with coordinates or sizes";
        return Err(EngineError::invalid("prompt_logprobs", expected, "a number"));
    }
    if options.regions && (spec.regions.is_none() || options.prompt_logprobs.is_some()) {
        let expected = "false without bins of the backend, and with `prompt_logprobs`";
        return Err(EngineError::invalid("regions", expected, true));
    }
    let max_tokens = options.max_tokens.or(config.default_max_tokens).unwrap_or(usize::MAX);
    if max_tokens == 0 {
        return Err(EngineError::invalid("max_tokens", "at least 1", 0));
    }
    let stop_ids = options.stop_ids.as_slice();
    if stop_ids.len() > RequestOptions::MAX_STOP_IDS {
        let expected = format!("at most {} different ids", RequestOptions::MAX_STOP_IDS);
        return Err(EngineError::invalid("stop_ids", expected, "more"));
    }
    if let Some(&got) = stop_ids.last().filter(|&&id| id as usize >= vocab_size) {
        let expected = format!("ids below the vocabulary size {vocab_size}");
        return Err(EngineError::invalid("stop_ids", expected, got));
    }
    let top_max = vocab_size.min(RequestOptions::MAX_PROMPT_LOGPROBS);
    if let Some(top) = options.prompt_logprobs.filter(|&top| top > top_max) {
        let expected = format!("at most {top_max}");
        return Err(EngineError::invalid("prompt_logprobs", expected, top));
    }
    options.sampling.validate(vocab_size)?;
    // The last generated token is never fed back, so it needs no position in the pool.
    Ok(max_tokens.min(spec.max_positions - got).min(pool - got + 1))
}

/// Validates the tokens of a prompt.
pub(super) fn check_tokens(
    tokens: &[u32],
    limit: PromptLimit,
    spec: &BackendSpec,
) -> Result<(), EngineError> {
    check_len(tokens, limit)?;
    check_ids(tokens, &[], spec)
}

fn check_len(tokens: &[u32], limit: PromptLimit) -> Result<(), EngineError> {
    if tokens.is_empty() {
        return Err(EngineError::EmptyPrompt);
    }
    if tokens.len() > limit.tokens {
        return Err(limit.error(tokens.len()));
    }
    Ok(())
}

/// Checks that all positions that no image has are ids of the vocabulary, or coordinates and sizes in
/// the backend's bins.
fn check_ids(
    tokens: &[u32],
    images: &[PromptImage],
    spec: &BackendSpec,
) -> Result<(), EngineError> {
    let ends = images.iter().map(|image| image.positions().end);
    let starts = images.iter().map(|image| image.start).chain([tokens.len()]);
    for (from, to) in std::iter::once(0).chain(ends).zip(starts) {
        let part = tokens.get(from..to).unwrap_or_default();
        if let Some(at) = part.iter().position(|&token| !spec.has_token(token)) {
            let (index, got, vocab_size) = (from + at, part[at], spec.vocab_size);
            return Err(EngineError::TokenOutOfRange { index, got, vocab_size });
        }
    }
    Ok(())
}

/// Checks where the images of a request are, and that its other options can be used with images.
fn check_images(request: &SequenceRequest, spec: &BackendSpec) -> Result<(), EngineError> {
    let (tokens, images) = (&request.tokens, &request.images);
    let invalid = |expected: &str, got: &dyn std::fmt::Display| {
        Err(EngineError::invalid("images", expected, got.to_string()))
    };
    if images.is_empty() {
        return Ok(());
    }
    if spec.image_width.is_none() {
        return invalid("none, because the model takes text only", &images.len());
    }
    if request.options.pooling.is_some() || request.options.prompt_logprobs.is_some() {
        return invalid("none with prompt_logprobs or for an embedding", &images.len());
    }
    let mut before = 0;
    for image in images.iter() {
        let positions = image.positions();
        let is_image = |position: &u32| position >> 31 == 1;
        let part = tokens.get(positions.clone()).unwrap_or_default();
        let is_whole = part.len() == image.input.kv_len && part.iter().all(is_image);
        // The last position of a span is told from the others by the key of the cache.
        let ends = positions.end.checked_sub(1).and_then(|last| tokens.get(last));
        if positions.start < before
            || !is_whole
            || !ends.is_some_and(|&l| TokenSpan::may_end_after(l))
        {
            let got = format!("one at {positions:?} of {} positions", tokens.len());
            return invalid("images at their positions of the prompt", &got);
        }
        before = positions.end;
    }
    if before >= tokens.len() {
        return invalid("a prompt that goes on after its last image", &"an image at its end");
    }
    Ok(())
}

/// Validates the backend's sizes, and the settings that depend on them.
pub(super) fn check_spec(spec: &BackendSpec, config: &EngineConfig) -> Result<(), EngineError> {
    let tree = TreeBuilder::new(spec.block_size).block_count(spec.block_count);
    tree.build().map_err(unsupported)?;
    if spec.block_count == 0 {
        return Err(EngineError::invalid("num_blocks", "at least 1", 0));
    }
    if let Some(got) = config.pin_budget.filter(|&budget| budget >= spec.block_count) {
        let expected = format!("fewer than the pool's {} blocks", spec.block_count);
        return Err(EngineError::invalid("pin_budget", expected, got));
    }
    if let Some(got) = config.namespace_quota.filter(|&quota| quota > spec.block_count) {
        let expected = format!("at most the pool's {} blocks", spec.block_count);
        return Err(EngineError::invalid("namespace_quota", expected, got));
    }
    if let Some(got) = config.session_budget.filter(|&budget| budget > spec.block_count) {
        let expected = format!("at most the pool's {} blocks", spec.block_count);
        return Err(EngineError::invalid("session_budget", expected, got));
    }
    if spec.max_positions < 2 {
        return Err(EngineError::invalid("max_positions", "at least 2", spec.max_positions));
    }
    if spec.vocab_size == 0 {
        return Err(EngineError::invalid("vocab_size", "at least 1", 0));
    }
    Ok(())
}

/// The error for sizes that the prefix cache does not support.
pub(super) fn unsupported(error: ConfigError) -> EngineError {
    match error {
        ConfigError::BlockSize { got } => {
            EngineError::invalid("block_size", "a power of two from 1 to 256", got)
        }
        ConfigError::BlockCount { got, max } => {
            EngineError::invalid("num_blocks", format!("at most {max}"), got)
        }
        other => EngineError::StartFailed { reason: other.to_string() },
    }
}
