use super::*;

/// Goal: different spans never have the same positions, and no span looks like tokens.
#[test]
fn different_spans_have_different_positions() {
    let interner = TokenSpanInterner::new(100);
    let spans = [
        TokenSpan::Value { kind: 1, value: 1 },
        TokenSpan::Value { kind: 1, value: 2 },
        TokenSpan::Value { kind: 2, value: 1 },
        TokenSpan::Value { kind: 2, value: 1 << 14 },
        TokenSpan::Image { content_hash: 1, kv_len: 1, columns: 0 },
        TokenSpan::Image { content_hash: 2, kv_len: 1, columns: 0 },
        TokenSpan::Image { content_hash: 1, kv_len: 729, columns: 0 },
        TokenSpan::Image { content_hash: 1 << 100, kv_len: 729, columns: 0 },
    ];
    let mut firsts = std::collections::HashSet::new();
    for span in spans {
        let mut positions = Vec::new();
        interner.append(span, &mut positions).expect("in range");
        let length = if let TokenSpan::Image { kv_len, .. } = span { kv_len as usize } else { 1 };
        assert_eq!(positions.len(), length);
        assert!(positions.iter().all(|&position| position >= SPAN));
        assert!(firsts.insert(positions[0] & !MORE), "any position identifies the span");
        let ends = (1..=length).filter(|&end| whole_spans(&positions, end, 1) == end);
        assert_eq!(ends.collect::<Vec<_>>(), [length]);
    }
}

/// Goal: every span that the interner writes is valid, also in a prompt that is cut anywhere.
/// Token ids with bit 31 set are not, unless they happen to be a whole span.
#[test]
fn invalid_positions_are_found() {
    let interner = TokenSpanInterner::new(10);
    let mut prompt = vec![1, SPAN - 1];
    for span in [
        TokenSpan::Image { content_hash: 1, kv_len: 5, columns: 0 },
        TokenSpan::Image { content_hash: 1, kv_len: 5, columns: 0 },
        TokenSpan::Image { content_hash: 2, kv_len: 1, columns: 0 },
        TokenSpan::Value { kind: 1, value: 7 },
        TokenSpan::Value { kind: 2, value: 8 },
    ] {
        interner.append(span, &mut prompt).expect("in range");
    }
    for end in 0..=prompt.len() {
        assert_eq!(first_invalid(&prompt[..end]), None, "cut at {end}");
    }
    assert_eq!(first_invalid(&[1, 2, u32::MAX]), Some(2), "an unknown kind");
    assert_eq!(first_invalid(&[1, prompt[2], 3]), Some(1), "an image without an end");
    assert_eq!(first_invalid(&[prompt[2], prompt[6] + 1]), Some(0), "the end of another image");
    assert_eq!(first_invalid(&[SPAN | MORE | KIND_VALUE_MAX << VALUE_BITS]), Some(0));
}

/// Goal: values are read back from their positions, which an interner writes in the same way, and
/// nothing else is one.
#[test]
fn values_are_read_back() {
    let interner = TokenSpanInterner::new(4);
    for span in [
        TokenSpan::Value { kind: 1, value: 0 },
        TokenSpan::Value { kind: 1, value: (1 << 28) - 1 },
        TokenSpan::Value { kind: 2, value: 3 },
        TokenSpan::Value { kind: 2, value: (1 << 28) - 1 },
    ] {
        let mut positions = Vec::new();
        interner.append(span, &mut positions).unwrap();
        assert_eq!(span.value_position(), positions.first().copied());
        assert_eq!(TokenSpan::of_value(positions[0]), Some(span));
    }
    let image = TokenSpan::Image { content_hash: 1, kv_len: 2, columns: 0 };
    let mut positions = vec![0, 7, (1 << 31) - 1];
    interner.append(image, &mut positions).unwrap();
    positions.extend(checkpoint(1));
    assert!(positions.iter().all(|position| TokenSpan::of_value(*position).is_none()));
    for span in [
        image,
        TokenSpan::Value { kind: 1, value: 1 << 28 },
        TokenSpan::Value { kind: 0, value: 1 },
        TokenSpan::Value { kind: 3, value: 1 },
    ] {
        assert_eq!(span.value_position(), None);
    }
}

/// Goal: a span with a value out of range is refused, and nothing is appended.
#[test]
fn values_out_of_range_are_refused() {
    let interner = TokenSpanInterner::new(1);
    let mut positions = vec![7];
    let mut append = |span| interner.append(span, &mut positions);
    for (kind, value) in [(1, 1 << 28), (0, 7), (3, 7), (5, 7)] {
        let error = TokenSpanError::OutOfRange { kind, value };
        assert_eq!(append(TokenSpan::Value { kind, value }), Err(error));
    }
    let image = |content_hash, kv_len| TokenSpan::Image { content_hash, kv_len, columns: 0 };
    assert_eq!(append(image(1, 0)), Err(TokenSpanError::EmptyImage));
    assert_eq!(positions, [7]);
}

/// Goal: memory is bounded. A forgotten image gets a new number when it is used again, and a
/// recently used one keeps its number.
#[test]
fn images_that_are_not_used_are_forgotten() {
    let interner = TokenSpanInterner::new(4);
    let image = |content_hash| ImageSpan { content_hash, kv_len: 9, columns: 0 };
    let number = |hash| interner.image_number(image(hash)).expect("numbers left");
    let found = |number| interner.image_at(SPAN | number);
    let first = number(0);
    for content_hash in 1..1000 {
        assert_eq!(number(content_hash), content_hash as u32, "a new number for a new image");
        assert_eq!(number(0), first, "in use all the time");
        assert_eq!([first, content_hash as u32].map(found), [0, content_hash].map(image).map(Some));
        let images = lock(&interner.images);
        let kept = [&images.recent, &images.earlier];
        assert!(kept.map(|kept| kept.numbers.len()).iter().sum::<usize>() <= 8);
        assert!(kept.iter().all(|kept| kept.numbers.len() == kept.images.len()));
    }
    assert_eq!((found(1), interner.image_at(5)), (None, None), "forgotten, and no image");
    assert_eq!(number(1), 1000, "forgotten, so new");
    assert_eq!(found(1000), Some(image(1)));
    for content_hash in [998, 999, 0] {
        assert_eq!(number(content_hash), content_hash as u32, "used recently");
    }
}

/// Goal: when all numbers are assigned, new images are refused and known ones are not.
#[test]
fn numbers_run_out_without_being_reused() {
    let interner = TokenSpanInterner::new(4);
    let number =
        |content_hash| interner.image_number(ImageSpan { content_hash, kv_len: 9, columns: 0 });
    lock(&interner.images).next = (1 << VALUE_BITS) - 1;
    let last = number(1);
    assert_eq!(last, Ok((1 << VALUE_BITS) - 1));
    assert_eq!(number(2), Err(TokenSpanError::Exhausted { limit: 1 << VALUE_BITS }));
    assert_eq!(number(1), last);
}
