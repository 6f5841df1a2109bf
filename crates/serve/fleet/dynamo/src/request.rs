//! Requests of Dynamo's frontend, as the engine's.

use dynamo_backend_common::{
    DynamoError, GuidedDecodingOptions, PreprocessedRequest, SamplingOptions, StopConditions,
};
use stolon::{Grammar, Request, SamplingParams};

use crate::error::unsupported;

/// The request to the engine. Options that the frontend leaves out are as in `base`, the parameters
/// that the model's authors recommend. Without a maximum number of tokens, the answer may be
/// `longest` tokens long.
pub(crate) fn translate(
    request: &PreprocessedRequest,
    base: SamplingParams,
    longest: usize,
) -> Result<Request, DynamoError> {
    refuse_unsupported(request)?;
    let stop = &request.stop_conditions;
    let ignores_ends = stop.ignore_eos.unwrap_or(false);
    let max_tokens = stop.max_tokens.map_or(longest, |count| count as usize);
    let mut translated = Request::tokens(request.token_ids.to_vec())
        .sampling(sampling(&request.sampling_options, base)?)
        .max_tokens(max_tokens)
        .min_tokens(stop.min_tokens.unwrap_or(0) as usize)
        .stop_ids(stop_ids(stop, &request.eos_token_ids))
        .ignore_eos(ignores_ends);
    if let Some(top) = request.output_options.logprobs {
        translated = translated.logprobs(top as usize);
    }
    if let Some(guided) = &request.sampling_options.guided_decoding
        && let Some(grammar) = grammar(guided)?
    {
        translated = translated.grammar(grammar);
    }
    if let Some(hints) = &request.routing {
        translated = translated.priority(hints.priority.unwrap_or(0));
        if let Some(salt) = hints.cache_namespace.as_ref().filter(|salt| !salt.is_empty()) {
            translated = translated.cache_salt(salt.clone());
        }
    }
    Ok(translated)
}

/// Token ids that end the answer. The frontend hides those that are not to be seen.
fn stop_ids(stop: &StopConditions, ends: &[u32]) -> Vec<u32> {
    if stop.ignore_eos.unwrap_or(false) {
        return Vec::new();
    }
    let lists = [&stop.stop_token_ids, &stop.stop_token_ids_visible, &stop.stop_token_ids_hidden];
    let ids = lists.into_iter().flatten().flatten().chain(ends);
    ids.copied().collect()
}

fn sampling(
    options: &SamplingOptions,
    base: SamplingParams,
) -> Result<SamplingParams, DynamoError> {
    let top_k = match options.top_k {
        None => base.top_k,
        Some(-1 | 0) => None,
        Some(count) => match usize::try_from(count) {
            Ok(count) => Some(count),
            Err(_) => return Err(unsupported("top_k", "at least 1, or -1 for all tokens", count)),
        },
    };
    Ok(SamplingParams {
        temperature: options.temperature.unwrap_or(base.temperature),
        top_k,
        top_p: options.top_p.unwrap_or(base.top_p),
        min_p: options.min_p.unwrap_or(base.min_p),
        repetition_penalty: options.repetition_penalty.unwrap_or(base.repetition_penalty),
        presence_penalty: options.presence_penalty.unwrap_or(base.presence_penalty),
        frequency_penalty: options.frequency_penalty.unwrap_or(base.frequency_penalty),
        seed: options.seed.map(i64::cast_unsigned),
        ..base
    })
}

/// The grammar of the answer; `None` if it is free.
fn grammar(options: &GuidedDecodingOptions) -> Result<Option<Grammar>, DynamoError> {
    if let Some(tag) = &options.structural_tag {
        return Err(unsupported("guided_decoding.structural_tag", "none", tag));
    }
    let schema = match &options.json {
        // A schema may be given as a string.
        Some(serde_json::Value::String(text)) => {
            let schema = serde_json::from_str(text);
            let name = "guided_decoding.json";
            Some(schema.map_err(|error| unsupported(name, "a JSON schema", error))?)
        }
        json => json.clone(),
    };
    let grammars = [
        schema.map(Grammar::JsonSchema),
        options.regex.clone().map(Grammar::Regex),
        options.choice.clone().map(Grammar::Choice),
        options.grammar.clone().map(context_free),
    ];
    let mut given = grammars.into_iter().flatten();
    match (given.next(), given.next()) {
        (_, Some(_)) => Err(unsupported("guided_decoding", "one grammar", "several")),
        (grammar, None) => Ok(grammar),
    }
}

/// A grammar in GBNF, whose rules are defined with `::=`, or else in the syntax of Lark.
fn context_free(text: String) -> Grammar {
    if text.contains("::=") { Grammar::Gbnf(text) } else { Grammar::Lark(text) }
}

/// Refuses options that would change the answer and are not implemented.
fn refuse_unsupported(request: &PreprocessedRequest) -> Result<(), DynamoError> {
    let sampling = &request.sampling_options;
    let hints = request.routing.as_ref();
    let one = |count: Option<u8>| count.is_none_or(|count| count == 1);
    for (name, is_supported, expected) in [
        ("prompt_embeds", request.prompt_embeds.is_none(), "token ids"),
        ("multi_modal_data", request.multi_modal_data.is_none(), "text"),
        ("encoder_result", request.encoder_result.is_none(), "text"),
        ("prefill_result", request.prefill_result.is_none(), "a request for a whole answer"),
        ("n", one(sampling.n), "1"),
        ("best_of", one(sampling.best_of), "1"),
        ("use_beam_search", sampling.use_beam_search != Some(true), "false"),
        ("prompt_logprobs", request.output_options.prompt_logprobs.is_none(), "none"),
        ("max_thinking_tokens", request.stop_conditions.max_thinking_tokens.is_none(), "none"),
        ("lora_name", hints.is_none_or(|hints| hints.lora_name.is_none()), "none"),
    ] {
        if !is_supported {
            return Err(unsupported(name, expected, "something else"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A request as the frontend sends it, with these members changed.
    fn request(changes: Value) -> PreprocessedRequest {
        let mut request = json!({
            "model": "demo", "token_ids": [1, 2], "stop_conditions": {}, "sampling_options": {},
            "output_options": {}, "mdc_sum": null, "router_config_override": null,
        });
        for (name, value) in changes.as_object().expect("an object") {
            request[name] = value.clone();
        }
        serde_json::from_value(request).expect("a request")
    }

    fn translated(changes: Value) -> Result<Request, DynamoError> {
        translate(&request(changes), SamplingParams::default(), 100)
    }

    /// Goal: every option reaches the engine.
    #[test]
    fn options_reach_the_engine() {
        let plain = translated(json!({})).expect("a request");
        assert_eq!(plain.get_max_tokens(), Some(100));
        assert_eq!(*plain.get_sampling(), SamplingParams::default());
        let full = translated(json!({
            "stop_conditions":
                {"max_tokens": 7, "stop_token_ids": [4], "stop_token_ids_hidden": [9]},
            "eos_token_ids": [3],
            "sampling_options": {"temperature": 0.5, "top_k": 8, "top_p": 0.9, "min_p": 0.1,
                "seed": -1, "presence_penalty": 0.25, "frequency_penalty": 0.75,
                "repetition_penalty": 1.5, "guided_decoding": {"json": "{\"type\": \"object\"}"}},
            "routing": {"cache_salt": "tenant", "priority": 2},
        }));
        let full = full.expect("a request");
        assert_eq!((full.get_max_tokens(), full.get_stop_ids()), (Some(7), &[3, 4, 9][..]));
        let sampling = full.get_sampling();
        assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p), (0.5, Some(8), 0.9));
        assert_eq!((sampling.min_p, sampling.seed), (0.1, Some(u64::MAX)));
        assert_eq!((sampling.presence_penalty, sampling.frequency_penalty), (0.25, 0.75));
        assert_eq!(sampling.repetition_penalty, 1.5);
        assert_eq!(full.get_grammar(), Some(&Grammar::JsonSchema(json!({"type": "object"}))));
        assert_eq!(full.get_cache_salt(), Some("tenant"));
    }

    /// Goal: a request that ignores the end of the answer has no ids that end it.
    #[test]
    fn ends_can_be_ignored() {
        let stop = json!({"ignore_eos": true, "stop_token_ids_hidden": [9]});
        let request = translated(json!({"stop_conditions": stop, "eos_token_ids": [3]}));
        assert!(request.expect("a request").get_stop_ids().is_empty());
    }

    /// Goal: options that are not implemented are refused by name.
    #[test]
    fn unsupported_options_are_named() {
        for (changes, name) in [
            (json!({"sampling_options": {"n": 2}}), "`n`"),
            (json!({"sampling_options": {"best_of": 3}}), "`best_of`"),
            (json!({"sampling_options": {"top_k": -7}}), "`top_k`"),
            (json!({"sampling_options": {"use_beam_search": true}}), "`use_beam_search`"),
            (json!({"output_options": {"prompt_logprobs": 1}}), "`prompt_logprobs`"),
            (json!({"prompt_embeds": "AA=="}), "`prompt_embeds`"),
            (json!({"encoder_result": {}}), "`encoder_result`"),
            (json!({"routing": {"lora_name": "x"}}), "`lora_name`"),
            (
                json!({"sampling_options": {"guided_decoding": {"regex": "a", "choice": ["b"]}}}),
                "`guided_decoding`",
            ),
            (
                json!({"sampling_options": {"guided_decoding": {"json": "{"}}}),
                "`guided_decoding.json`",
            ),
        ] {
            let error = translated(changes.clone()).expect_err(&changes.to_string()).to_string();
            assert!(error.contains(name), "{changes}: {error}");
        }
    }
}
