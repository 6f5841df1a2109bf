//! Prompts of text and atoms on the tree, beside a model that knows each committed block prefix: a
//! match never ends inside an atom, and is never shorter than it must be.

use std::collections::HashMap;
use stolon_kvcache::{BlockId, Namespace, TokenSpan, TokenSpanInterner, prefix_tree};

/// A part of a prompt: few different ones, so that prompts share prefixes.
#[derive(Clone, Debug)]
#[cfg_attr(fuzzing, derive(arbitrary::Arbitrary))]
pub(crate) enum Part {
    Text,
    Coordinate(bool),
    Image { content: bool, kv_len: u8 },
}

/// One request: its prompt, whether its blocks are kept, and how many are evicted after it.
#[derive(Clone, Debug)]
#[cfg_attr(fuzzing, derive(arbitrary::Arbitrary))]
pub(crate) struct Round {
    pub(crate) prompt: Vec<Part>,
    pub(crate) store: bool,
    pub(crate) evict: u8,
}

/// The positions of a prompt, and after how many of them it may be cut.
fn write(interner: &TokenSpanInterner, prompt: &[Part]) -> (Vec<u32>, Vec<usize>) {
    let (mut positions, mut borders) = (Vec::new(), vec![0]);
    for part in prompt {
        let atom = match *part {
            Part::Text => None,
            Part::Coordinate(bin) => Some(TokenSpan::Coordinate { bin: bin.into() }),
            Part::Image { content, kv_len } => Some(TokenSpan::Image {
                content_hash: content.into(),
                kv_len: u32::from(kv_len % 12) + 1,
            }),
        };
        match atom {
            None => positions.push(7),
            Some(atom) => interner.append(atom, &mut positions).expect("in range"),
        }
        borders.push(positions.len());
    }
    (positions, borders)
}

/// Runs `rounds` on both; panics where they differ.
pub(crate) fn run(block_size: usize, rounds: &[Round]) {
    let (mut writer, reader) = prefix_tree(block_size).expect("a block size");
    let interner = TokenSpanInterner::new(100);
    let base = Namespace::default();
    let mut cached: HashMap<Vec<u32>, BlockId> = HashMap::new();
    let mut next = 0;
    for Round { prompt, store, evict } in rounds {
        let (positions, borders) = write(&interner, prompt);
        let ends = (1..=positions.len() / block_size).map(|n| n * block_size);
        let known = ends.take_while(|&end| cached.contains_key(&positions[..end]));
        let expected = known.filter(|end| borders.contains(end)).last().unwrap_or(0);
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
            let commit = writer.commit(&mut lease, &positions, &offered);
            let whole = borders.iter().filter(|&&border| border % block_size == 0).max().copied();
            assert_eq!(lease.len(), whole.unwrap_or(0).max(expected));
            for (index, block) in lease.blocks().iter().enumerate() {
                let end = (index + 1) * block_size;
                let owner = *cached.entry(positions[..end].to_vec()).or_insert(*block);
                assert_eq!(owner, *block, "what is the same is shared");
            }
            assert!(commit.duplicates.iter().all(|block| offered.contains(block)));
        }
        drop(lease);
        let gone = writer.evict(usize::from(evict % 8));
        cached.retain(|_, block| !gone.contains(block));
        assert_eq!(writer.counts().cached, cached.len());
        writer.audit().expect("the tree keeps its rules");
    }
}
