//! The tags `{% generation %}` .. `{% endgeneration %}`, which mark the assistant's text for
//! training. They have no output.

/// Replaces the tags by `{% if true %}` .. `{% endif %}`, which minijinja supports and which has
/// the same effect on the surrounding whitespace.
pub(super) fn replace_generation_tags(source: &str) -> String {
    let mut result = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        result.push_str(before);
        let inner = &tag[2..];
        let trimmed = inner.trim_start_matches(['-', '+']).trim_start();
        let word_len = trimmed.find(|c: char| !c.is_alphanumeric() && c != '_');
        let word = &trimmed[..word_len.unwrap_or(trimmed.len())];
        let replacement = match word {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        // Offset of the tag's name in the tag.
        let word_start = tag.len() - trimmed.len();
        let after = word_start + word.len();
        let closes = tag[after..].trim_start().trim_start_matches(['-', '+']).starts_with("%}");
        match replacement {
            Some(replacement) if closes => {
                result.push_str(&tag[..word_start]);
                result.push_str(replacement);
                rest = &tag[after..];
            }
            _ => {
                result.push_str("{%");
                rest = inner;
            }
        }
    }
    result.push_str(rest);
    result
}

#[cfg(test)]
mod tests {
    use super::replace_generation_tags;

    /// Goal: the tags are replaced in every notation, and nothing else changes.
    #[test]
    fn only_generation_tags_are_replaced() {
        let source = "{% if a %}{%- generation -%}x{%+endgeneration%}{% endif %}{% generation";
        let expected = "{% if a %}{%- if true -%}x{%+endif%}{% endif %}{% generation";
        assert_eq!(replace_generation_tags(source), expected);
        let untouched = "{% set generation = 1 %}{% generation_x %}{{ generation }} é{%";
        assert_eq!(replace_generation_tags(untouched), untouched);
    }
}
