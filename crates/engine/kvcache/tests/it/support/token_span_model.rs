//! Prompts of text and atomic token spans, on the tree and on a reference model that knows each
//! committed block: a match never ends inside a span, and is never shorter than necessary.

use std::collections::HashMap;
use stolon_kvcache::{BlockId, Namespace, TokenSpan, TokenSpanInterner, prefix_tree};

/// A part of a prompt. There are few different parts, so that prompts share prefixes.
#[derive(Clone, Debug)]
#[cfg_attr(fuzzing, derive(arbitrary::Arbitrary))]
pub(crate) enum Part {
    Text,
    Value(bool),
    Image { content: bool, kv_len: u8 },
}

/// One request: its prompt, whether its blocks are committed, and how many blocks are evicted after
/// it.
#[derive(Clone, Debug)]
#[cfg_attr(fuzzing, derive(arbitrary::Arbitrary))]
pub(crate) struct Round {
    pub(crate) prompt: Vec<Part>,
    pub(crate) store: bool,
    pub(crate) evict: u8,
}

/// Returns the positions of a prompt, and the lengths at which a match may end.
fn write(interner: &TokenSpanInterner, prompt: &[Part]) -> (Vec<u32>, Vec<usize>) {
    let (mut positions, mut boundaries) = (Vec::new(), vec![0]);
    for part in prompt {
        let span = match *part {
            Part::Text => None,
            Part::Value(value) => Some(TokenSpan::Value { kind: 1, value: value.into() }),
            Part::Image { content, kv_len } => Some(TokenSpan::Image {
                content_hash: content.into(),
                kv_len: u32::from(kv_len % 12) + 1,
                columns: 0,
            }),
        };
        match span {
            None => positions.push(7),
            Some(span) => interner.append(span, &mut positions).expect("in range"),
        }
        boundaries.push(positions.len());
    }
    (positions, boundaries)
}

/// Runs `rounds` on both, and panics if they differ.
pub(crate) fn run(block_size: usize, rounds: &[Round]) {
    let (mut writer, reader) = prefix_tree(block_size).expect("a block size");
    let interner = TokenSpanInterner::new(100);
    let base = Namespace::default();
    let mut cached: HashMap<Vec<u32>, BlockId> = HashMap::new();
    let mut next = 0;
    for Round { prompt, store, evict } in rounds {
        let (positions, boundaries) = write(&interner, prompt);
        let ends = (1..=positions.len() / block_size).map(|n| n * block_size);
        let known = ends.take_while(|&end| cached.contains_key(&positions[..end]));
        let expected = known.filter(|end| boundaries.contains(end)).last().unwrap_or(0);
        assert_eq!(reader.query_match_len(&base, &positions), expected);
        if let Ok(pin) = writer.pin(&base, &positions) {
            assert_eq!(writer.pins()[0].position_count, expected);
            assert!(writer.unpin(pin));
        }
        let mut lease = writer.acquire(&base, &positions);
        assert_eq!(lease.len(), expected);
        if *store {
            let count = positions.len() / block_size - lease.blocks().len();
            let offered: Vec<BlockId> = (next..).take(count).map(BlockId).collect();
            next += count as u32;
            let commit = writer.commit(&mut lease, &positions, &offered).expect("a valid commit");
            let whole =
                boundaries.iter().filter(|&&boundary| boundary % block_size == 0).max().copied();
            assert_eq!(lease.len(), whole.unwrap_or(0).max(expected));
            for (index, block) in lease.blocks().iter().enumerate() {
                let end = (index + 1) * block_size;
                let owner = *cached.entry(positions[..end].to_vec()).or_insert(*block);
                assert_eq!(owner, *block, "equal blocks are shared");
            }
            assert!(commit.duplicates.iter().all(|block| offered.contains(block)));
        }
        drop(lease);
        let gone = writer.evict(usize::from(evict % 8));
        cached.retain(|_, block| gone.iter().all(|gone| gone != block));
        assert_eq!(writer.counts().cached, cached.len());
        writer.audit().expect("consistent");
    }
}
