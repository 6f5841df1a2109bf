//! Applies the flags of single tokens in `tokenizer_config.json` to a `tokenizer.json`, as
//! transformers does: tools that add tokens or change their flags often write only one of the
//! files.

use std::collections::{BTreeMap, HashMap};

use serde_json::{Value, json};

use crate::text_model::SPECIAL_TOKENS;

/// A token of `tokenizer_config.json`.
struct Token<'a> {
    content: &'a str,
    special: bool,
    /// The id, if the file has one.
    id: Option<u64>,
    /// The object with the token's flags, if there is one.
    flags: &'a Value,
}

/// Marks tokens as special that `config`, the content of `tokenizer_config.json`, marks or names as
/// such, and adds those that `document`, the content of `tokenizer.json`, lacks. A token is special
/// if either file says so.
pub(super) fn apply(document: &mut Value, config: &Value) {
    let mut tokens = listed(config);
    tokens.extend(named(config));
    let Some(fields) = document.as_object_mut() else { return };
    let added = fields.entry("added_tokens").or_insert_with(|| json!([]));
    if added.is_null() {
        *added = json!([]);
    }
    let Some(added) = added.as_array_mut() else { return };
    let content = |entry: &Value| entry["content"].as_str().map(str::to_owned);
    let places = added.iter().enumerate();
    let mut places: HashMap<String, usize> =
        places.filter_map(|(place, entry)| Some((content(entry)?, place))).collect();
    let mut missing = Vec::new();
    for token in tokens {
        match places.get(token.content) {
            Some(&place) if token.special => added[place]["special"] = true.into(),
            Some(_) => {}
            None => missing.push(token),
        }
    }
    if missing.is_empty() {
        return;
    }
    let mut entries = std::mem::take(added);
    let vocabulary = vocabulary(fields.get("model").map_or(&Value::Null, |model| &model["vocab"]));
    let ids = entries.iter().filter_map(|entry| entry["id"].as_u64());
    let mut next = ids.chain(vocabulary.values().copied()).max().map_or(0, |id| id + 1);
    for token in missing {
        let id = match (vocabulary.get(token.content).copied(), token.id) {
            (Some(own), Some(id)) if own != id => continue,
            (Some(own), _) => own,
            // The library numbers further tokens from the end of the vocabulary on.
            (None, Some(id)) if id == next => id,
            (None, _) => continue,
        };
        if let Some(&place) = places.get(token.content) {
            entries[place]["special"] = (token.special || entries[place]["special"] == true).into();
            continue;
        }
        next = next.max(id + 1);
        places.insert(token.content.to_owned(), entries.len());
        let flag = |name: &str| token.flags[name].as_bool().unwrap_or(false);
        entries.push(json!({
            "id": id, "content": token.content, "special": token.special,
            "single_word": flag("single_word"), "lstrip": flag("lstrip"),
            "rstrip": flag("rstrip"), "normalized": flag("normalized"),
        }));
    }
    entries.sort_by_key(|entry| entry["id"].as_u64());
    fields["added_tokens"] = entries.into();
}

/// The tokens of `added_tokens_decoder`, by id.
fn listed(config: &Value) -> Vec<Token<'_>> {
    let object = config["added_tokens_decoder"].as_object();
    let tokens = object.into_iter().flatten().filter_map(|(id, flags)| {
        let id = id.parse().ok()?;
        let special = flags["special"].as_bool().unwrap_or(false);
        Some((id, Token { content: flags["content"].as_str()?, special, id: Some(id), flags }))
    });
    let by_id: BTreeMap<u64, _> = tokens.collect();
    by_id.into_values().collect()
}

/// The tokens that the file names as the end of a sequence, for example.
fn named(config: &Value) -> impl Iterator<Item = Token<'_>> {
    SPECIAL_TOKENS.iter().filter_map(|name| {
        let entry = &config[*name];
        let content = entry.as_str().or(entry["content"].as_str())?;
        // Some files name an ordinary word as the padding, which answers may contain.
        let is_markup = content.starts_with(['<', '[']);
        let is_used = is_markup || matches!(*name, "bos_token" | "eos_token");
        is_used.then_some(Token { content, special: true, id: None, flags: entry })
    })
}

/// The ids of the tokens in the vocabulary of a model.
fn vocabulary(vocab: &Value) -> HashMap<&str, u64> {
    match vocab {
        Value::Object(ids) => {
            ids.iter().filter_map(|(token, id)| Some((token.as_str(), id.as_u64()?))).collect()
        }
        Value::Array(pieces) => {
            let tokens = pieces.iter().map(|piece| piece[0].as_str().unwrap_or_default());
            tokens.zip(0..).collect()
        }
        _ => HashMap::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The added tokens after `apply`: id, content and whether each is special.
    fn added(config: &Value, document: &mut Value) -> Vec<(u64, String, bool)> {
        apply(document, config);
        let entry = |entry: &Value| {
            let content = entry["content"].as_str().unwrap().to_owned();
            (entry["id"].as_u64().unwrap(), content, entry["special"] == true)
        };
        document["added_tokens"].as_array().unwrap().iter().map(entry).collect()
    }

    fn document() -> Value {
        json!({
            "added_tokens": [{"id": 2, "content": "<c>", "special": false},
                {"id": 3, "content": "<d>", "special": true}],
            "model": {"vocab": {"a": 0, "<b>": 1, "<c>": 2, "<d>": 3}},
        })
    }

    /// Goal: a token is special if one of the files says so, and tokens of the other file are added
    /// if their ids fit.
    #[test]
    fn flags_of_both_files_count() {
        let token = |content: &str, special: bool| json!({"content": content, "special": special});
        let config = json!({"added_tokens_decoder": {
            "1": token("<b>", false), "2": token("<c>", true), "3": token("<d>", false),
            "4": token("<e>", true), "9": token("<f>", true), "0": token("<b>", true), "x": 1,
        }});
        let expected = [(1, "<b>", false), (2, "<c>", true), (3, "<d>", true), (4, "<e>", true)]
            .map(|(id, content, special)| (id, content.to_owned(), special));
        assert_eq!(added(&config, &mut document()), expected);
        let unigram = json!({"vocab": [["<unk>", 0.0], ["<b>", -1.0]]});
        let mut document = json!({"added_tokens": null, "model": unigram});
        let config = json!({"added_tokens_decoder": {"1": token("<b>", true)}});
        assert_eq!(added(&config, &mut document), [(1, "<b>".to_owned(), true)]);
    }

    /// Goal: named tokens are special; words that are named as padding are not.
    #[test]
    fn named_tokens_are_special() {
        let config = json!({"eos_token": {"content": "<c>"}, "pad_token": "a", "unk_token": "<b>",
            "sep_token": "<none>", "bos_token": null});
        let expected = [(1, "<b>", true), (2, "<c>", true), (3, "<d>", true)]
            .map(|(id, content, special)| (id, content.to_owned(), special));
        assert_eq!(added(&config, &mut document()), expected);
        let config = json!({"eos_token": "a"});
        assert!(added(&config, &mut document()).contains(&(0, "a".to_owned(), true)));
        for mut other in [json!({}), json!(1), json!({"added_tokens": 1, "model": 2})] {
            apply(&mut other, &config);
        }
    }
}
