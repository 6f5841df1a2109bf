//! Which variables and members the source of a chat template reads.

/// Whether a template reads the variable `name`, and not only a member or a string of this name.
pub(super) fn reads_variable(source: &str, name: &str) -> bool {
    words(source).any(|word| word.text == name && word.kind == Kind::Variable)
}

/// Whether a template reads a member `name` of a value: `value.name`, or the name as a string.
pub(super) fn reads_member(source: &str, name: &str) -> bool {
    words(source).any(|word| word.text == name && word.kind != Kind::Variable)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Variable,
    Member,
    /// A string that is one word.
    Text,
}

#[derive(Clone, Copy, Debug)]
struct Word<'a> {
    text: &'a str,
    kind: Kind,
}

/// The words within the tags of a template. Words in longer strings are left out.
fn words(source: &str) -> impl Iterator<Item = Word<'_>> {
    tags(source).flat_map(words_in)
}

/// The insides of the tags `{{ .. }}` and `{% .. %}`.
fn tags(source: &str) -> impl Iterator<Item = &str> {
    let mut rest = source;
    std::iter::from_fn(move || {
        loop {
            let start = rest.find('{')?;
            let after = &rest[start + 1..];
            let end = match after.chars().next()? {
                '{' => "}}",
                '%' => "%}",
                '#' => {
                    let len = after.find("#}")?;
                    rest = &after[len..];
                    continue;
                }
                _ => {
                    rest = after;
                    continue;
                }
            };
            let len = after.find(end).unwrap_or(after.len());
            rest = &after[len..];
            return Some(&after[1..len.max(1)]);
        }
    })
}

fn words_in(tag: &str) -> impl Iterator<Item = Word<'_>> {
    let mut at = 0;
    let mut before = ' ';
    std::iter::from_fn(move || {
        while let Some(first) = tag[at..].chars().next() {
            let rest = &tag[at..];
            let is_part = |next: char| next.is_alphanumeric() || next == '_';
            if matches!(first, '"' | '\'') {
                let inner = &rest[1..];
                let len = inner.find(first).unwrap_or(inner.len());
                at += (len + 2).min(rest.len());
                before = first;
                return Some(Word { text: &inner[..len], kind: Kind::Text });
            }
            let len = rest.find(|next| !is_part(next)).unwrap_or(rest.len());
            if len > 0 {
                at += len;
                let kind = if before == '.' { Kind::Member } else { Kind::Variable };
                before = ' ';
                return Some(Word { text: &rest[..len], kind });
            }
            if !first.is_whitespace() {
                before = first;
            }
            at += first.len_utf8();
        }
        None
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: variables, members and strings of the same name are distinguished.
    #[test]
    fn variables_and_members_are_told_apart() {
        for (source, variable, member) in [
            ("{% if thinking is defined %}", true, false),
            ("{%- if not thinking -%}", true, false),
            ("{{ message.thinking }}", false, true),
            ("{{ message['thinking'] }}{{ message.get(\"thinking\") }}", false, true),
            ("{{ 'no thinking' }} thinking {# thinking #}", false, false),
            ("{{ enable_thinking }}{% set x = 'thinking", false, true),
            ("{{", false, false),
            ("{%", false, false),
        ] {
            assert_eq!(reads_variable(source, "thinking"), variable, "{source}");
            assert_eq!(reads_member(source, "thinking"), member, "{source}");
        }
    }
}
