//! Parses `generation_config.json`: the end-of-sequence tokens and the recommended sampling
//! parameters.

use serde_json::Value;

use super::model::GenerationDefaults;
use crate::config::Keys;
use crate::config::ParsedConfig;
use crate::error::ModelError;

/// Parses `generation_config.json` from `value`, which is `None` if the file does not exist. Its
/// token ids take precedence over those of `config`. `file` is its name in error messages.
pub(crate) fn parse(
    file: &str,
    value: Option<&Value>,
    config: &ParsedConfig,
) -> Result<GenerationDefaults, ModelError> {
    let mut defaults = GenerationDefaults {
        eos_token_ids: config.eos_token_ids.clone(),
        bos_token_id: config.bos_token_id,
        ..GenerationDefaults::default()
    };
    if let Some(value) = value {
        let keys = Keys::root(file, value)?;
        if let Some(ids) = keys.token_ids("eos_token_id")? {
            defaults.eos_token_ids = ids;
        }
        if let Some(ids) = keys.token_ids("bos_token_id")? {
            defaults.bos_token_id = ids.first().copied();
        }
        let share = |key: &str| match keys.number(key)? {
            Some(share) if !(0.0..=1.0).contains(&share) => {
                Err(keys.invalid(key, "a number from 0 to 1"))
            }
            other => Ok(other.map(|share| share as f32)),
        };
        defaults.do_sample = keys.flag("do_sample")?;
        // A temperature of 0 means greedy here, although transformers uses `do_sample` for that.
        defaults.temperature = match keys.number("temperature")? {
            Some(0.0) => Some(0.0),
            _ => keys.positive_f32("temperature")?,
        };
        defaults.top_k = keys.count("top_k")?.map(|k| k as u32);
        defaults.top_p = share("top_p")?;
        defaults.min_p = share("min_p")?;
        defaults.repetition_penalty = keys.positive_f32("repetition_penalty")?;
    }
    let vocab_size = config.decoder.vocab_size;
    defaults.eos_token_ids.sort_unstable();
    defaults.eos_token_ids.dedup();
    let inside = defaults.eos_token_ids.partition_point(|id| (*id as usize) < vocab_size);
    if let Some(id) = defaults.eos_token_ids.get(inside) {
        tracing::warn!(id, vocab_size, "{file}: ignoring an eos_token_id not below vocab_size");
    }
    defaults.eos_token_ids.truncate(inside);
    defaults.bos_token_id = defaults.bos_token_id.filter(|id| (*id as usize) < vocab_size);
    Ok(defaults)
}
