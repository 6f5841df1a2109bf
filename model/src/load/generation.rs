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
        sampling(&mut defaults, &keys)?;
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

/// The members of `generation_config.json` about sampling that are used.
const SAMPLING_KEYS: [&str; 6] =
    ["do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"];

/// Replaces the sampling parameters that `value` names. A parameter that is of use for sampling only
/// switches sampling on, unless `do_sample` is among them.
pub(super) fn replace(
    defaults: &mut GenerationDefaults,
    file: &str,
    value: &Value,
) -> Result<(), ModelError> {
    let keys = Keys::root(file, value)?;
    if let Some(key) = keys.names().find(|key| !SAMPLING_KEYS.contains(key)) {
        let expected = format!("only {}", SAMPLING_KEYS.join(", "));
        return Err(keys.unsupported(key, &expected));
    }
    if keys.names().any(|key| key != "repetition_penalty") {
        defaults.do_sample = Some(true);
    }
    sampling(defaults, &keys)
}

/// Takes over the sampling parameters that are given.
fn sampling(defaults: &mut GenerationDefaults, keys: &Keys<'_>) -> Result<(), ModelError> {
    let share = |key: &str| match keys.number(key)? {
        Some(share) if !(0.0..=1.0).contains(&share) => {
            Err(keys.invalid(key, "a number from 0 to 1"))
        }
        other => Ok(other.map(|share| share as f32)),
    };
    // A temperature of 0 means greedy here, although transformers uses `do_sample` for that.
    let temperature = match keys.number("temperature")? {
        Some(0.0) => Some(0.0),
        _ => keys.positive_f32("temperature")?,
    };
    defaults.do_sample = keys.flag("do_sample")?.or(defaults.do_sample);
    defaults.temperature = temperature.or(defaults.temperature);
    defaults.top_k = keys.count("top_k")?.map(|k| k as u32).or(defaults.top_k);
    defaults.top_p = share("top_p")?.or(defaults.top_p);
    defaults.min_p = share("min_p")?.or(defaults.min_p);
    let penalty = keys.positive_f32("repetition_penalty")?;
    defaults.repetition_penalty = penalty.or(defaults.repetition_penalty);
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stolon_backend::SamplingParams;

    use super::*;

    /// Goal: an override replaces what it names, switches sampling on, and is checked.
    #[test]
    fn overrides_replace_what_they_name() {
        let mut defaults = GenerationDefaults {
            do_sample: Some(false),
            top_p: Some(0.9),
            ..GenerationDefaults::default()
        };
        let given = json!({"temperature": 0.5, "top_k": 20});
        replace(&mut defaults, "file", &given).expect("valid");
        for (wrong, part) in [
            (json!({"temprature": 1}), "temprature"),
            (json!({"top_p": 2}), "from 0 to 1"),
            (json!([]), "file"),
        ] {
            let error = replace(&mut defaults, "file", &wrong).expect_err(part).to_string();
            assert!(error.contains(part), "{error}");
        }
        let sampling = defaults.chat_sampling();
        assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p), (0.5, Some(20), 0.9));
        replace(&mut defaults, "file", &json!({"do_sample": false})).expect("valid");
        assert_eq!(defaults.chat_sampling(), SamplingParams::default());
    }
}
