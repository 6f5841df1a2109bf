//! Parses `generation_config.json`: the end-of-sequence tokens, the recommended sampling parameters
//! and the tokens that must not be generated.

use serde_json::Value;

use super::model::GenerationDefaults;
use super::suppressed::SuppressedTokens;
use crate::config::Keys;
use crate::config::ParsedConfig;
use crate::error::{ModelError, quoted};

/// Parses `generation_config.json` from `value`, which is `None` if the file does not exist. An
/// answer may end with its end-of-sequence tokens and with the ones of `config`, because users
/// often change only one of the files. `file` is the file's name in error messages. Also returns
/// notes for users about keys that are not applied.
pub(crate) fn parse(
    file: &str,
    value: Option<&Value>,
    config: &ParsedConfig,
) -> Result<(GenerationDefaults, Vec<String>), ModelError> {
    let mut defaults = GenerationDefaults {
        eos_token_ids: config.eos_token_ids.clone(),
        bos_token_id: config.bos_token_id,
        ..GenerationDefaults::default()
    };
    let mut notes = Vec::new();
    if let Some(value) = value {
        let keys = Keys::root(file, value)?;
        if let Some(ids) = keys.token_ids("eos_token_id")? {
            if config.default_eos {
                defaults.eos_token_ids.clear();
            }
            defaults.eos_token_ids.extend(ids);
        }
        if let Some(ids) = keys.token_ids("bos_token_id")? {
            defaults.bos_token_id = ids.first().copied();
        }
        sampling(&mut defaults, &keys)?;
        defaults.suppressed.read(&keys)?;
        notes.extend(not_applied(&keys));
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
    defaults.suppressed.tidy(vocab_size, &defaults.eos_token_ids);
    Ok((defaults, notes))
}

/// The supported sampling parameters of `generation_config.json`.
const SAMPLING_KEYS: [&str; 6] =
    ["do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"];

/// Keys of `generation_config.json` that would change answers and are not applied, each with the
/// value that has no effect. Users are told if one has another value.
const NOT_APPLIED: [(&str, f64); 28] = [
    ("constraints", 0.0),
    ("diversity_penalty", 0.0),
    ("dola_layers", 0.0),
    ("encoder_no_repeat_ngram_size", 0.0),
    ("encoder_repetition_penalty", 1.0),
    ("epsilon_cutoff", 0.0),
    ("eta_cutoff", 0.0),
    ("exponential_decay_length_penalty", 0.0),
    ("force_words_ids", 0.0),
    ("forced_bos_token_id", -1.0),
    ("forced_decoder_ids", 0.0),
    ("forced_eos_token_id", -1.0),
    ("frequency_penalty", 0.0),
    ("guidance_scale", 1.0),
    ("length_penalty", 1.0),
    ("min_length", 0.0),
    ("min_new_tokens", 0.0),
    ("num_beam_groups", 1.0),
    ("num_beams", 1.0),
    ("penalty_alpha", 0.0),
    ("presence_penalty", 0.0),
    ("sequence_bias", 0.0),
    ("stop_strings", 0.0),
    ("token_healing", 0.0),
    ("top_h", 1.0),
    ("typical_p", 1.0),
    ("use_mtp", 0.0),
    ("watermarking_config", 0.0),
];

/// Keys of `generation_config.json` that do not change the tokens of an answer. They limit its
/// length (requests have their own limit), say how it is computed or reported, or describe the
/// file.
const WITHOUT_EFFECT: [&str; 47] = [
    "_from_model_config",
    "_name_or_path",
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "assistant_lookbehind",
    "assistant_temperature",
    "assistant_tokenizer",
    "attn_implementation",
    "cache_config",
    "cache_implementation",
    "chat_format",
    "compile_config",
    "continuous_batching_config",
    "decoder_start_token_id",
    "disable_compile",
    "early_stopping",
    "generation_kwargs",
    "is_assistant",
    "low_memory",
    "max_cache_len",
    "max_length",
    "max_matching_ngram_size",
    "max_new_tokens",
    "max_time",
    "max_window_size",
    "model_type",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",
    "remove_invalid_values",
    "renormalize_logits",
    "return_dict_in_generate",
    "speculation_type",
    "target_lookbehind",
    "torch_dtype",
    "transformers_version",
    "transformers.js_config",
    "trust_remote_code",
    "use_cache",
];

/// Notes for users about keys that are not applied or not known.
fn not_applied(keys: &Keys<'_>) -> Vec<String> {
    let used = |key: &str| {
        ["eos_token_id", "bos_token_id"].contains(&key)
            || SAMPLING_KEYS.contains(&key)
            || SuppressedTokens::KEYS.contains(&key)
            || WITHOUT_EFFECT.contains(&key)
    };
    let note = |key: &str| {
        let value = keys.value(key).filter(|_| !used(key))?;
        let neutral = NOT_APPLIED.iter().find(|(name, _)| *name == key);
        let (known, neutral) = (neutral.is_some(), neutral.map(|(_, neutral)| *neutral));
        let is_neutral = match value {
            Value::Bool(on) => !on,
            Value::Array(list) => list.is_empty(),
            Value::Object(map) => map.is_empty(),
            number => number.as_f64().is_some_and(|number| Some(number) == neutral),
        };
        let what = if known { "is not applied" } else { "is not known and has no effect" };
        (!is_neutral || !known).then(|| quoted(&format!("{}: key `{key}` {what}", keys.file)))
    };
    keys.names().filter_map(note).take(NOTES_MAX).collect()
}

/// Maximum number of notes about keys.
const NOTES_MAX: usize = 20;

/// The entries of `config.json` that transformers applies to a model without a
/// `generation_config.json`. transformers before version 5 wrote them there.
pub(crate) fn of_config(config: &Value) -> Option<Value> {
    let samples = config.get("do_sample").and_then(Value::as_bool) == Some(true);
    let sampling = if samples { SAMPLING_KEYS.as_slice() } else { &["repetition_penalty"] };
    let mut members = serde_json::Map::new();
    for object in [config.get("text_config"), Some(config)].into_iter().flatten() {
        for key in sampling.iter().chain(&SuppressedTokens::KEYS) {
            if let Some(value) = object.get(*key).filter(|value| !value.is_null()) {
                members.insert((*key).to_owned(), value.clone());
            }
        }
    }
    (!members.is_empty()).then(|| members.into())
}

/// Replaces the sampling parameters that `value` has. Parameters that have an effect only on
/// sampling switch it on, unless `value` also has `do_sample`.
pub(super) fn replace(
    defaults: &mut GenerationDefaults,
    file: &str,
    value: &Value,
    vocab_size: usize,
) -> Result<(), ModelError> {
    let keys = Keys::root(file, value)?;
    let known = || SAMPLING_KEYS.iter().chain(&SuppressedTokens::KEYS);
    if let Some(key) = keys.names().find(|key| !known().any(|known| known == key)) {
        let expected = format!("only {}", known().copied().collect::<Vec<_>>().join(", "));
        return Err(keys.unsupported(key, &expected));
    }
    if keys.names().any(|key| key != "repetition_penalty" && SAMPLING_KEYS.contains(&key)) {
        defaults.do_sample = Some(true);
    }
    sampling(defaults, &keys)?;
    defaults.suppressed.read(&keys)?;
    defaults.suppressed.tidy(vocab_size, &defaults.eos_token_ids);
    Ok(())
}

/// Sets the sampling parameters that `keys` has.
fn sampling(defaults: &mut GenerationDefaults, keys: &Keys<'_>) -> Result<(), ModelError> {
    let share = |key: &str| match keys.number(key)? {
        Some(share) if !(0.0..=1.0).contains(&share) => {
            Err(keys.invalid(key, "a number from 0 to 1"))
        }
        other => Ok(other.map(|share| share as f32)),
    };
    // A temperature of 0 means greedy decoding here, although transformers uses `do_sample` for
    // that.
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

    /// Goal: an override replaces the parameters that it has, switches sampling on, and is checked.
    #[test]
    fn overrides_replace_what_they_name() {
        let mut defaults = GenerationDefaults {
            do_sample: Some(false),
            top_p: Some(0.9),
            ..GenerationDefaults::default()
        };
        let given = json!({"temperature": 0.5, "top_k": 20});
        replace(&mut defaults, "file", &given, 10).expect("valid");
        for (wrong, part) in [
            (json!({"temprature": 1}), "temprature"),
            (json!({"top_p": 2}), "from 0 to 1"),
            (json!([]), "file"),
        ] {
            let error = replace(&mut defaults, "file", &wrong, 10).expect_err(part).to_string();
            assert!(error.contains(part), "{error}");
        }
        let sampling = defaults.chat_sampling();
        assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p), (0.5, Some(20), 0.9));
        replace(&mut defaults, "file", &json!({"do_sample": false}), 10).expect("valid");
        assert_eq!(defaults.chat_sampling(), SamplingParams::default());
        let given = json!({"suppress_tokens": [3, 99]});
        replace(&mut defaults, "file", &given, 10).expect("valid");
        assert_eq!((defaults.do_sample, &*defaults.suppressed.always), (Some(false), &[3][..]));
        replace(&mut defaults, "file", &json!({"suppress_tokens": []}), 10).expect("valid");
        assert!(defaults.suppressed.is_empty());
    }

    /// Goal: each key is used, or named to users if it has an effect in transformers, or has no
    /// effect. Unknown keys are named, too.
    #[test]
    fn keys_that_are_not_applied_are_named() {
        let lists = NOT_APPLIED.iter().map(|(key, _)| *key).chain(WITHOUT_EFFECT);
        let used = SAMPLING_KEYS.into_iter().chain(SuppressedTokens::KEYS);
        let mut all: Vec<&str> =
            lists.chain(used).chain(["eos_token_id", "bos_token_id"]).collect();
        all.sort_unstable();
        assert!(all.windows(2).all(|pair| pair[0] != pair[1]), "a key is in two lists");
        // The file lists all keys of transformers 5.
        let published = include_str!("generation_keys.txt");
        let missing: Vec<_> = published.lines().filter(|key| !all.contains(key)).collect();
        assert!(missing.is_empty(), "{missing:?}");

        let notes = |value: Value| not_applied(&Keys::root("f", &value).expect("an object"));
        for (key, neutral) in NOT_APPLIED {
            assert!(notes(json!({ key: neutral })).is_empty(), "{key}");
            assert!(notes(json!({ key: null })).is_empty(), "{key}");
            assert_eq!(notes(json!({ key: 3 })), [format!("f: key `{key}` is not applied")]);
        }
        for key in WITHOUT_EFFECT.into_iter().chain(SAMPLING_KEYS) {
            assert!(notes(json!({ key: 3 })).is_empty(), "{key}");
        }
        assert!(notes(json!({"something_new": 1}))[0].contains("`something_new` is not known"));
        let many: serde_json::Map<_, _> = (0..99).map(|i| (i.to_string(), json!(1))).collect();
        assert_eq!(notes(many.into()).len(), NOTES_MAX);
    }

    /// Goal: without the file, the keys that older versions of transformers wrote to `config.json`
    /// apply. Sampling parameters apply only if sampling is on.
    #[test]
    fn config_json_replaces_a_missing_file() {
        let keys = json!({"top_k": 50, "suppress_tokens": [1], "bad_words_ids": null});
        assert_eq!(of_config(&keys), Some(json!({"suppress_tokens": [1]})));
        let keys = json!({"text_config": {"bad_words_ids": [[2]]}, "do_sample": true, "top_k": 5});
        assert_eq!(
            of_config(&keys),
            Some(json!({"bad_words_ids": [[2]], "do_sample": true, "top_k": 5}))
        );
        assert_eq!(of_config(&json!({"temperature": 1.0})), None);
    }
}
