//! What is cached after a prefix, as a guess of how another sequence goes on.

use stolon_kvcache::{BlockId, Namespace, TokenSpan, TokenSpanInterner, TreeWriter, prefix_tree};

fn insert(writer: &mut TreeWriter, namespace: &Namespace, positions: &[u32], next: &mut u32) {
    let mut lease = writer.acquire(namespace, positions);
    let count = (positions.len() - lease.len()) / 4;
    let blocks: Vec<BlockId> = (*next..).take(count).map(BlockId).collect();
    *next += count as u32;
    let _ = writer.commit(&mut lease, positions, &blocks).expect("a valid commit");
}

/// Goal: a prefix that ends anywhere, also inside of a block, continues as the cached sequence does,
/// up to the limit and beyond splits; after other tokens, nothing does.
#[test]
fn a_prefix_continues_as_a_cached_sequence() {
    let (mut writer, reader) = prefix_tree(4).expect("a block size");
    let (base, mut next) = (Namespace::default(), 0);
    let long: Vec<u32> = (0..40).collect();
    insert(&mut writer, &base, &long, &mut next);
    // Splits the long one after 20 positions.
    let other: Vec<u32> = (0..20).chain(100..108).collect();
    insert(&mut writer, &base, &other, &mut next);
    for end in 0..20 {
        let got = reader.continuation(&base, &long[..end], 6);
        assert_eq!(got[..(20 - end).min(6)], long[end..][..(20 - end).min(6)], "{end}");
        assert_eq!(got.len(), 6);
    }
    for end in 21..40 {
        assert_eq!(reader.continuation(&base, &long[..end], 100), long[end..], "{end}");
    }
    assert_eq!(reader.continuation(&base, &other[..22], 100), other[22..]);
    assert!(reader.continuation(&base, &long, 100).is_empty());
    assert!(reader.continuation(&base, &[0, 1, 2, 4], 100).is_empty());
    assert!(reader.continuation(&base, &[0, 1, 2, 4, 5], 100).is_empty());
    assert!(reader.continuation(&base, &[&long[..21], &[99]].concat(), 100).is_empty());
    assert!(reader.continuation(&base, &long[..8], 0).is_empty());
}

/// Goal: of two continuations, the one that was used last is found.
#[test]
fn the_continuation_that_was_used_last_is_found() {
    let (mut writer, reader) = prefix_tree(4).expect("a block size");
    let (base, mut next) = (Namespace::default(), 0);
    let branch = |own: u32| -> Vec<u32> { (0..4).chain([own; 8]).collect() };
    for own in 10..20 {
        insert(&mut writer, &base, &branch(own), &mut next);
    }
    for own in [12, 19, 10] {
        drop(writer.acquire(&base, &branch(own)));
        assert_eq!(reader.continuation(&base, &[0, 1, 2, 3], 2), [own; 2]);
    }
}

/// Goal: nothing of another namespace is found, and no position of an image.
#[test]
fn namespaces_and_images_are_kept_apart() {
    let (mut writer, reader) = prefix_tree(4).expect("a block size");
    let mut next = 0;
    let salted = |salt: &str| Namespace::builder().salt(salt.as_bytes()).build();
    let long: Vec<u32> = (0..40).collect();
    insert(&mut writer, &salted("a"), &long, &mut next);
    assert_eq!(reader.continuation(&salted("a"), &long[..9], 100), long[9..]);
    assert!(reader.continuation(&salted("b"), &long[..9], 100).is_empty());
    assert!(reader.continuation(&Namespace::default(), &long[..9], 100).is_empty());
    let mut positions = vec![1, 2, 3];
    let image = TokenSpan::Image { content_hash: 5, kv_len: 5, columns: 0 };
    TokenSpanInterner::new(8).append(image, &mut positions).expect("an id is free");
    insert(&mut writer, &salted("a"), &positions, &mut next);
    assert_eq!(reader.continuation(&salted("a"), &[1], 100), [2, 3]);
    assert!(reader.continuation(&salted("a"), &[1, 2, 3], 100).is_empty());
}

/// Goal: under random insertions and evictions, whatever is found is a continuation of what was
/// inserted, at every block boundary and between.
#[test]
fn what_is_found_was_inserted() {
    let mut state: u64 = 3;
    let mut below = |limit: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % limit
    };
    let (mut writer, reader) = prefix_tree(4).expect("a block size");
    let (base, mut inserted, mut next, mut found) = (Namespace::default(), Vec::new(), 0, 0);
    for _ in 0..400 {
        let len = 4 * (1 + below(7));
        let positions: Vec<u32> = (0..len).map(|_| below(2) as u32).collect();
        insert(&mut writer, &base, &positions, &mut next);
        inserted.push(positions);
        if below(4) == 0 {
            drop(writer.evict(below(12)));
        }
        let of: &Vec<u32> = &inserted[below(inserted.len())];
        let prefix = &of[..below(of.len())];
        let got = reader.continuation(&base, prefix, 50);
        let whole = [prefix, &got].concat();
        assert!(inserted.iter().any(|other| other.starts_with(&whole)), "{prefix:?} {got:?}");
        found += usize::from(!got.is_empty());
    }
    assert!(found > 100, "{found} were found");
}
