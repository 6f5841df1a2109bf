//! Replacing placeholders of a text, one after the other.

/// Replaces the occurrences of `placeholder` in `text` (the placeholder of an image, for example)
/// by `texts` in order. Returns the number of occurrences. If there are more than `texts`, the last
/// ones stay.
#[must_use]
pub fn replace_in_order(text: &str, placeholder: &str, texts: &[String]) -> (String, usize) {
    if placeholder.is_empty() {
        return (text.to_owned(), 0);
    }
    let mut texts = texts.iter();
    let (mut replaced, mut count) = (String::with_capacity(text.len()), 0);
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(placeholder) {
        replaced.push_str(before);
        replaced.push_str(texts.next().map_or(placeholder, String::as_str));
        (rest, count) = (after, count + 1);
    }
    replaced.push_str(rest);
    (replaced, count)
}
