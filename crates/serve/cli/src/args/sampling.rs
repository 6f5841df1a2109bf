//! Flags for sampling parameters and for the end of an answer.

use std::path::Path;

use clap::Args;
use stolon::{Grammar, Request, SamplingParams, SchemaOptions};

use crate::text_file;

/// Sampling parameters and stop conditions.
///
/// Sampling flags that are not given: both commands use what the model's authors recommend. If they
/// recommend nothing, `chat` samples with temperature 0.8, top-k 40, top-p 0.95 and min-p 0.05, and
/// `generate` is greedy.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Maximum number of tokens to generate per answer. Default: as many as the context and the KV
    /// cache can hold
    #[arg(long, value_name = "TOKENS")]
    pub max_tokens: Option<usize>,
    /// Softmax temperature, 0 or above. 0 is greedy: always the most likely token
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Sample from the K most likely tokens only
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Sample from the most likely tokens whose probabilities add up to P (nucleus sampling); above
    /// 0, at most 1
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Sample only tokens whose probability is at least P times that of the most likely token; 0
    /// to 1
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Make tokens less likely that occur in the prompt or the answer; above 0, and 1 is off
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true)]
    pub repetition_penalty: Option<f32>,
    /// Amount subtracted from the logit of each token that the answer contains; -2 to 2
    #[arg(long, value_name = "AMOUNT", allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,
    /// Amount subtracted from a token's logit for each time that the answer contains it; -2 to 2
    #[arg(long, value_name = "AMOUNT", allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,
    /// Add BIAS, -100 to 100, to the logit of the token with this id. Can be repeated
    #[arg(long, value_name = "ID=BIAS", value_parser = parse_bias)]
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the random draws: the same prompt and seed give the same answer
    #[arg(long)]
    pub seed: Option<u64>,
    /// End the answer before this text if it appears. Can be repeated
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// End the answer if the token with this id is generated. Can be repeated
    #[arg(long, value_name = "ID")]
    pub stop_id: Vec<u32>,
    /// Continue past the model's end-of-sequence tokens
    #[arg(long)]
    pub ignore_eos: bool,
    /// End an answer that repeats itself without end: the same sequence of at most 256 tokens, five
    /// times or more, over more than 256 tokens. Default: true for `chat` without --ignore-eos,
    /// false for `generate`
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub end_repetition: Option<bool>,
    /// Answer with JSON that is valid under this JSON schema: the schema itself, or a file with it
    #[arg(long, value_name = "SCHEMA", value_parser = parse_schema, group = "structure")]
    pub json_schema: Option<Grammar>,
    /// Answer with a text that this regular expression matches as a whole
    #[arg(long, value_name = "REGEX", value_parser = parse_regex, group = "structure")]
    pub regex: Option<Grammar>,
    /// Answer with a text of the grammar in this file, in the syntax of Lark or in GBNF
    #[arg(long, value_name = "FILE", value_parser = parse_grammar, group = "structure")]
    pub grammar: Option<Grammar>,
    /// Answer with this LoRA adapter, one of those given with --lora-modules
    #[arg(long, value_name = "NAME")]
    pub lora: Option<String>,
}

impl SamplingArgs {
    /// Applies these flags to a request; sampling parameters without a flag are as in `base`.
    #[must_use]
    pub fn apply(&self, request: Request, base: &SamplingParams) -> Request {
        let mut sampling = base.clone();
        let set = |value: &mut f32, flag: Option<f32>| *value = flag.unwrap_or(*value);
        set(&mut sampling.temperature, self.temperature);
        set(&mut sampling.top_p, self.top_p);
        set(&mut sampling.min_p, self.min_p);
        set(&mut sampling.repetition_penalty, self.repetition_penalty);
        set(&mut sampling.presence_penalty, self.presence_penalty);
        set(&mut sampling.frequency_penalty, self.frequency_penalty);
        sampling.top_k = self.top_k.or(sampling.top_k);
        sampling.logit_bias = sampling.logit_bias.iter().chain(&self.logit_bias).copied().collect();
        sampling.seed = self.seed.or(sampling.seed);
        let request = match self.max_tokens {
            Some(tokens) => request.max_tokens(tokens),
            None => request,
        };
        let request =
            match self.json_schema.as_ref().or(self.regex.as_ref()).or(self.grammar.as_ref()) {
                Some(grammar) => request.grammar(grammar.clone()),
                None => request,
            };
        let request = match &self.lora {
            Some(name) => request.adapter(name),
            None => request,
        };
        request
            .sampling(sampling)
            .stop(self.stop.iter().cloned())
            .stop_ids(self.stop_id.iter().copied())
            .ignore_eos(self.ignore_eos)
            .end_repetition(self.end_repetition.unwrap_or(false))
    }
}

fn parse_schema(text: &str) -> Result<Grammar, String> {
    let json = if text.trim_start().starts_with('{') { text.to_owned() } else { read(text)? };
    let schema = serde_json::from_str(&json);
    let schema = schema.map_err(|error| format!("expected a JSON schema, got {error}"))?;
    let options =
        SchemaOptions { strict: false, refuse_unsupported: true, additional_properties: false };
    checked(Grammar::JsonSchema(options.apply(schema)))
}

fn parse_regex(text: &str) -> Result<Grammar, String> {
    checked(Grammar::Regex(text.to_owned()))
}

fn parse_grammar(path: &str) -> Result<Grammar, String> {
    checked(Grammar::of_text(read(path)?))
}

fn read(path: &str) -> Result<String, String> {
    text_file::read(Path::new(path), text_file::MAX_BYTES).map_err(|error| format!("{error:#}"))
}

fn checked(grammar: Grammar) -> Result<Grammar, String> {
    grammar.check().map_err(|error| error.to_string())?;
    Ok(grammar)
}

fn parse_bias(text: &str) -> Result<(u32, f32), String> {
    let pair = text
        .split_once('=')
        .and_then(|(id, bias)| Some((id.trim().parse().ok()?, bias.trim().parse::<f32>().ok()?)));
    pair.ok_or_else(|| format!("expected TOKEN_ID=BIAS, for example 42=-1.5, got `{text}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a bias is a token id and a number; anything else is refused with what was expected.
    #[test]
    fn biases_are_parsed() {
        assert_eq!(parse_bias("42=-1.5"), Ok((42, -1.5)));
        for bad in ["42", "x=1", "42=", "-1=2"] {
            let message = parse_bias(bad).expect_err("not a bias");
            assert!(message.contains("expected") && message.contains(bad), "{message}");
        }
    }
}
