//! The `{% generation %}` .. `{% endgeneration %}` marks, with which templates tell a trainer what
//! the assistant said. They print nothing.

/// The same template with the marks turned into an `if` that always holds, which keeps their
/// effect on the whitespace around them.
pub(super) fn without_marks(source: &str) -> String {
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
        // Where the word starts in the tag, and what stands before it.
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
    use super::without_marks;

    /// Goal: marks go, in every spelling; everything else stays as it is.
    #[test]
    fn only_marks_change() {
        let source = "{% if a %}{%- generation -%}x{%+endgeneration%}{% endif %}{% generation";
        let expected = "{% if a %}{%- if true -%}x{%+endif%}{% endif %}{% generation";
        assert_eq!(without_marks(source), expected);
        let untouched = "{% set generation = 1 %}{% generation_x %}{{ generation }} é{%";
        assert_eq!(without_marks(untouched), untouched);
    }
}
