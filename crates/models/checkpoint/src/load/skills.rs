//! The skills of a model: tasks for which it was trained with special prompts, given as token ids
//! (Moondream). They are in the object `tokenizer` of its configuration.

use std::collections::HashMap;

use crate::config::{Architecture, DecoderConfig, Dialect, Keys};
use crate::error::ModelError;

/// Maximum number of tokens of a part of a prompt.
const PART_MAX: usize = 256;

/// The prompts of a model's skills. All token ids are below the size of the vocabulary.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SkillPrompts {
    /// The token that begins a prompt without an image. An image already begins with it.
    pub first_token: u32,
    /// The prompt of a question; `None` if the model does not answer questions.
    pub query: Option<PromptParts>,
    /// The tokens for answers with reasoning; `None` if the model does not reason.
    pub reasoning: Option<ReasoningTokens>,
    /// The prompt of a description of each length, by its name: `short`, `normal` or `long`.
    pub captions: HashMap<String, Vec<u32>>,
    /// The prompt for the points of objects; `None` if the model does not find points.
    pub point: Option<PromptParts>,
    /// The prompt for the boxes around objects; `None` if the model does not find boxes.
    pub detect: Option<PromptParts>,
    /// The token that stands for a coordinate. A coordinate is chosen in its place.
    pub coordinate: u32,
    /// The token that ends a list of points or boxes.
    pub end: u32,
    /// Tokens that do not occur in answers and are never chosen for them.
    pub excluded: Vec<u32>,
}

/// The tokens around the words of a prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptParts {
    /// The tokens before the words.
    pub prefix: Vec<u32>,
    /// The tokens after them.
    pub suffix: Vec<u32>,
}

/// The tokens of a question for which the model reasons before it answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReasoningTokens {
    /// The tokens after the question. They replace the suffix of [`SkillPrompts::query`].
    pub suffix: Vec<u32>,
    /// The token that ends the reasoning. The answer follows it.
    pub end: u32,
    /// The tokens that begin and end a piece of text to which the points within it refer.
    pub grounding: [u32; 2],
    /// Tokens that do not occur in the reasoning and are never chosen for it.
    pub excluded: Vec<u32>,
}

/// The skills of the model with this `config.json`; `None` if it has none.
///
/// # Errors
/// [`ModelError::InvalidKey`] for a list of tokens that is malformed or too long, or for a token
/// that is not below the size of the vocabulary.
pub(crate) fn of_config(
    config: &Keys<'_>,
    decoder: &DecoderConfig,
) -> Result<Option<SkillPrompts>, ModelError> {
    if decoder.architecture.description().dialect != Dialect::Moondream {
        return Ok(None);
    }
    let tokenizer = match config.object("config")? {
        Some(parts) => parts.object("tokenizer")?,
        None => None,
    };
    let templates = match &tokenizer {
        Some(tokenizer) => tokenizer.object("templates")?,
        None => None,
    };
    let skills = match (&tokenizer, &templates) {
        (Some(tokenizer), Some(templates)) => given(tokenizer, templates, decoder.architecture)?,
        _ => published(decoder.architecture),
    };
    let is_known = |id: &u32| (*id as usize) < decoder.vocab_size;
    let is_usable = skills.tokens().all(|id| is_known(&id));
    match (is_usable, templates) {
        (true, _) => Ok(Some(skills)),
        (false, Some(_)) => {
            let expected = format!("ids below vocab_size, {}", decoder.vocab_size);
            Err(config.invalid("config", &expected))
        }
        (false, None) => {
            tracing::info!("the model has no skills: its vocabulary is not the published one");
            Ok(None)
        }
    }
}

/// The skills of the published models, whose configuration does not list them.
fn published(architecture: Architecture) -> SkillPrompts {
    let caption = |name: &str, word: u32| (name.to_owned(), vec![1, 32_708, 2, word, 3]);
    SkillPrompts {
        first_token: 0,
        query: Some(PromptParts {
            prefix: vec![1, 15_381, 2],
            suffix: match architecture {
                // In the training of Moondream 2, the last token of the prompt occurred twice.
                Architecture::Moondream2 => vec![3, 3],
                _ => vec![3],
            },
        }),
        // For Moondream 2, the published code and the maker's engine, Kestrel, disagree on the
        // tokens between reasoning and answer.
        reasoning: (architecture == Architecture::Moondream3).then(|| ReasoningTokens {
            suffix: vec![4],
            end: 3,
            grounding: [7, 9],
            excluded: vec![0, 6],
        }),
        captions: [("short", 12_492), ("normal", 6382), ("long", 4059)]
            .map(|(name, word)| caption(name, word))
            .into(),
        point: Some(PromptParts { prefix: vec![1, 2581, 2], suffix: vec![3] }),
        detect: Some(PromptParts { prefix: vec![1, 7235, 476, 2], suffix: vec![3] }),
        coordinate: 5,
        end: 0,
        excluded: vec![3],
    }
}

/// The token under this key, or a default.
fn id(tokenizer: &Keys<'_>, key: &str, default: u32) -> Result<u32, ModelError> {
    let ids = tokenizer.token_ids(key)?;
    Ok(ids.and_then(|ids| ids.first().copied()).unwrap_or(default))
}

/// The tokens for reasoning in a configuration, for questions with the keys `query`. Only Moondream
/// 3 has defaults for them.
fn given_reasoning(
    tokenizer: &Keys<'_>,
    query: &Keys<'_>,
    architecture: Architecture,
) -> Result<Option<ReasoningTokens>, ModelError> {
    let suffix = match list(query, "reasoning_prefix")? {
        Some(suffix) => suffix,
        None if architecture == Architecture::Moondream3 => vec![id(tokenizer, "thinking_id", 4)?],
        None => return Ok(None),
    };
    let after = list(query, "post_reasoning_prefix")?.unwrap_or_default();
    if !after.is_empty() {
        tracing::info!("the model does not reason: its answers would need tokens before them");
        return Ok(None);
    }
    let grounding = [("start_ground_points_id", 7), ("end_ground_id", 9)];
    let [begin, end] = grounding.map(|(key, default)| id(tokenizer, key, default));
    Ok(Some(ReasoningTokens {
        suffix,
        end: id(tokenizer, "answer_id", 3)?,
        grounding: [begin?, end?],
        excluded: vec![id(tokenizer, "eos_id", 0)?, id(tokenizer, "size_id", 6)?],
    }))
}

/// The skills in a configuration.
fn given(
    tokenizer: &Keys<'_>,
    templates: &Keys<'_>,
    architecture: Architecture,
) -> Result<SkillPrompts, ModelError> {
    let id = |key: &str, default: u32| id(tokenizer, key, default);
    let mut reasoning = None;
    let query = match templates.object("query")? {
        Some(query) => {
            reasoning = given_reasoning(tokenizer, &query, architecture)?;
            // Newer configurations have different suffixes with and without reasoning.
            let suffix = match list(&query, "answer_prefix")? {
                Some(suffix) => suffix,
                None => list(&query, "suffix")?.unwrap_or_default(),
            };
            Some(PromptParts { prefix: list(&query, "prefix")?.unwrap_or_default(), suffix })
        }
        None => None,
    };
    let mut captions = HashMap::new();
    if let Some(lengths) = templates.object("caption")? {
        for name in ["short", "normal", "long"] {
            captions.extend(list(&lengths, name)?.map(|tokens| (name.to_owned(), tokens)));
        }
    }
    let parts = |key: &str| match templates.object(key)? {
        Some(keys) => Ok::<_, ModelError>(Some(PromptParts {
            prefix: list(&keys, "prefix")?.unwrap_or_default(),
            suffix: list(&keys, "suffix")?.unwrap_or_default(),
        })),
        None => Ok(None),
    };
    Ok(SkillPrompts {
        first_token: id("bos_id", 0)?,
        query,
        reasoning,
        captions,
        point: parts("point")?,
        detect: parts("detect")?,
        coordinate: id("coord_id", 5)?,
        end: id("eos_id", 0)?,
        excluded: vec![id("answer_id", 3)?],
    })
}

/// A list of tokens, of limited length.
fn list(keys: &Keys<'_>, key: &str) -> Result<Option<Vec<u32>>, ModelError> {
    let ids = keys.token_ids(key)?;
    match ids.as_ref().is_some_and(|ids| ids.len() > PART_MAX) {
        true => Err(keys.invalid(key, &format!("at most {PART_MAX} token ids"))),
        false => Ok(ids),
    }
}

impl SkillPrompts {
    /// All tokens of the prompts.
    fn tokens(&self) -> impl Iterator<Item = u32> {
        let parts = [&self.query, &self.point, &self.detect].into_iter().flatten();
        let parts = parts.flat_map(|parts| parts.prefix.iter().chain(&parts.suffix));
        let captions = self.captions.values().flatten();
        let others = [&self.first_token, &self.coordinate, &self.end].into_iter();
        let reasoning = self.reasoning.iter().flat_map(|tokens| {
            let ReasoningTokens { suffix, end, grounding, excluded } = tokens;
            suffix.iter().chain([end]).chain(grounding).chain(excluded)
        });
        others.chain(&self.excluded).chain(parts).chain(captions).chain(reasoning).copied()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn skills(config: Value, vocab_size: usize) -> Result<Option<SkillPrompts>, String> {
        let value = json!({"model_type": "moondream1", "config": config});
        let decoder = DecoderConfig::from_json("c", &value).map_err(|error| error.to_string())?;
        let decoder = DecoderConfig { vocab_size, ..decoder };
        let keys = Keys::root("c", &value).expect("an object");
        of_config(&keys, &decoder).map_err(|error| error.to_string())
    }

    /// Goal: the published model has the published prompts, another vocabulary has none, and
    /// configurations may name others.
    #[test]
    fn prompts_are_those_of_the_configuration() {
        let found = skills(json!({}), 51_200).unwrap().unwrap();
        assert_eq!(found.captions["short"], [1, 32_708, 2, 12_492, 3]);
        assert_eq!((found.query.unwrap().suffix, found.reasoning), (vec![3, 3], None));
        assert_eq!(skills(json!({}), 500), Ok(None));
        let own = json!({"tokenizer": {"bos_id": 9, "answer_id": 4, "coord_id": 7, "templates": {
            "query": {"prefix": [5, 6], "suffix": [7]}, "caption": {"normal": [8]}, "detect": null,
            "point": {"prefix": [2], "suffix": [3]}
        }}});
        let found = skills(own, 10).unwrap().unwrap();
        let point = PromptParts { prefix: vec![2], suffix: vec![3] };
        assert_eq!((found.point, found.detect, found.coordinate), (Some(point), None, 7));
        let parts = PromptParts { prefix: vec![5, 6], suffix: vec![7] };
        assert_eq!((found.first_token, found.query, found.excluded), (9, Some(parts), vec![4]));
        assert_eq!(found.captions, HashMap::from([("normal".to_owned(), vec![8])]));
    }

    /// Goal: Moondream 3 reasons with the published tokens or the tokens of its configuration.
    /// Another model reasons only if its configuration has the tokens. No model reasons if tokens
    /// follow the reasoning.
    #[test]
    fn reasoning_is_that_of_the_configuration() {
        let published =
            ReasoningTokens { suffix: vec![4], end: 3, grounding: [7, 9], excluded: vec![0, 6] };
        assert_eq!(super::published(Architecture::Moondream3).reasoning, Some(published.clone()));
        let found = |architecture, query: Value| {
            let value = json!({"answer_id": 5, "size_id": 8, "templates": {"query": query}});
            let keys = Keys::root("c", &value).expect("an object");
            let templates = keys.object("templates").unwrap().expect("an object");
            given(&keys, &templates, architecture).unwrap().reasoning
        };
        let own = ReasoningTokens { end: 5, excluded: vec![0, 8], ..published };
        let of_3 = |query| found(Architecture::Moondream3, query);
        assert_eq!(of_3(json!({"prefix": [1]})), Some(own.clone()));
        assert_eq!(of_3(json!({"post_reasoning_prefix": [3]})), None);
        let of_2 = |query| found(Architecture::Moondream2, query);
        assert_eq!(of_2(json!({"prefix": [1]})), None);
        let own = ReasoningTokens { suffix: vec![3, 4], ..own };
        assert_eq!(
            of_2(json!({"reasoning_prefix": [3, 4], "post_reasoning_prefix": []})),
            Some(own)
        );
        let unknown = json!({"tokenizer": {"end_ground_id": 500, "templates": {
            "query": {"reasoning_prefix": [4]}
        }}});
        let error = skills(unknown, 500).unwrap_err();
        assert!(error.contains("ids below vocab_size, 500"), "{error}");
    }

    /// Goal: malformed prompts are refused, with the expected values.
    #[test]
    fn malformed_prompts_are_refused() {
        for (templates, expected) in [
            (json!({"query": {"prefix": [500]}}), "ids below vocab_size, 500"),
            (json!({"query": {"prefix": ["a"]}}), "a token id or a list of them"),
            (json!({"query": [1]}), "an object"),
            (json!({"caption": {"long": vec![1; 257]}}), "at most 256 token ids"),
        ] {
            let error = skills(json!({"tokenizer": {"templates": templates}}), 500).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
