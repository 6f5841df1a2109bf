//! Marks: pins that lock nothing.

use stolon_kvcache::{BlockId, Namespace, TreeBuilder, TreeWriter};

fn base() -> Namespace {
    Namespace::default()
}

/// Commits a prompt with blocks from `next` on.
fn commit(writer: &mut TreeWriter, prompt: &[u32], next: &mut u32) {
    let mut lease = writer.acquire(&base(), prompt);
    let missing = prompt.len() / 2 - lease.len() / 2;
    let blocks: Vec<_> = (*next..).take(missing).map(BlockId).collect();
    *next += missing as u32;
    let _ = writer.commit(&mut lease, prompt, &blocks).expect("blocks of this prompt");
}

/// Goal: in a tree whose pins lock their prefixes, a mark locks nothing and uses no budget; its
/// prefix is evicted last, and a pin of the same prefix stays.
#[test]
fn marks_lock_nothing() {
    let (mut writer, reader) = TreeBuilder::new(2).pin_budget(2).build().expect("a block size");
    let mut next = 0;
    commit(&mut writer, &[1, 2, 3, 4, 5, 6], &mut next);
    commit(&mut writer, &[7, 8, 9, 10], &mut next);
    assert_eq!(writer.mark(&base(), &[20, 21], 9), None, "it is not cached");
    assert_eq!(writer.mark(&base(), &[1, 2], 0), None, "no block is allowed");
    let mark = writer.mark(&base(), &[1, 2, 3, 4, 5, 6], 2).expect("cached");
    let info = writer.pins().pop().expect("a mark");
    assert_eq!((info.id, info.block_count, info.is_mark, info.demoted), (mark, 2, true, false));
    let counts = writer.counts();
    assert_eq!((counts.evictable, counts.locked, counts.pinned), (5, 0, 0));
    assert_eq!(writer.pin_count(), 0);
    let pin = writer.pin(&base(), &[1, 2, 3, 4]).expect("marks use no budget");
    writer.audit().expect("consistent");
    assert_eq!(writer.evict(9).len(), 3);
    assert_eq!(reader.query_match_len(&base(), &[1, 2, 3, 4, 5, 6]), 4);
    assert!(writer.unpin(pin));
    writer.audit().expect("consistent");
    commit(&mut writer, &[7, 8, 9, 10], &mut next);
    assert_eq!(writer.evict(3).len(), 3);
    assert_eq!(reader.query_match_len(&base(), &[7, 8]), 0);
    assert_eq!(reader.query_match_len(&base(), &[1, 2, 3, 4]), 2, "nothing else was left");
    assert!(writer.pins().pop().expect("a mark").demoted);
    commit(&mut writer, &[1, 2, 3, 4], &mut next);
    assert!(!writer.pins().pop().expect("a mark").demoted);
    assert!(writer.unpin(mark) && !writer.unpin(mark));
    writer.audit().expect("consistent");
}
