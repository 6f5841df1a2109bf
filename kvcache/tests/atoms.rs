//! Random prompts of text and atoms, in blocks of every size, against a model that knows each
//! committed block prefix: a match never ends inside an atom, and is never shorter than it must be.

use proptest::prelude::*;
use std::collections::HashMap;
use stolon_kvcache::{Atom, AtomInterner, BlockId, Namespace, prefix_tree};

/// A prompt as its parts: few different ones, so that prompts share prefixes.
fn prompt() -> impl Strategy<Value = Vec<Option<Atom>>> {
    let part = prop_oneof![
        3 => Just(None),
        1 => (0u32..2).prop_map(|bin| Some(Atom::Coordinate { bin })),
        2 => (0u128..2, 1u32..12)
            .prop_map(|(content_hash, kv_len)| Some(Atom::Image { content_hash, kv_len })),
    ];
    proptest::collection::vec(part, 0..12)
}

/// The positions of a prompt, and after how many of them it may be cut.
fn write(interner: &AtomInterner, prompt: &[Option<Atom>]) -> (Vec<u32>, Vec<usize>) {
    let (mut positions, mut borders) = (Vec::new(), vec![0]);
    for part in prompt {
        match part {
            None => positions.push(7),
            Some(atom) => interner.append(*atom, &mut positions).expect("room"),
        }
        borders.push(positions.len());
    }
    (positions, borders)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn matches_end_between_atoms(
        log_block_size in 0u32..6,
        prompts in proptest::collection::vec((prompt(), any::<bool>(), 0usize..8), 1..20),
    ) {
        let block_size = 1usize << log_block_size;
        let (mut writer, reader) = prefix_tree(block_size).expect("a block size");
        let interner = AtomInterner::new(100);
        let base = Namespace::default();
        let mut cached: HashMap<Vec<u32>, BlockId> = HashMap::new();
        let mut next = 0;
        for (prompt, store, evict) in &prompts {
            let (positions, borders) = write(&interner, prompt);
            let ends = (1..=positions.len() / block_size).map(|n| n * block_size);
            let known = ends.take_while(|&end| cached.contains_key(&positions[..end]));
            let expected = known.filter(|end| borders.contains(end)).last().unwrap_or(0);
            prop_assert_eq!(reader.query_match_len(&base, &positions), expected);
            let mut lease = writer.acquire(&base, &positions);
            prop_assert_eq!(lease.len(), expected);
            if *store {
                let have = lease.blocks().len();
                let offered: Vec<BlockId> =
                    (have..positions.len() / block_size).map(|n| BlockId(next + n as u32)).collect();
                next += 1000;
                let commit = writer.commit(&mut lease, &positions, &offered);
                let whole = borders.iter().filter(|&&b| b % block_size == 0).max().copied();
                prop_assert_eq!(lease.len(), whole.unwrap_or(0).max(expected));
                for (index, block) in lease.blocks().iter().enumerate() {
                    let end = (index + 1) * block_size;
                    let owner = *cached.entry(positions[..end].to_vec()).or_insert(*block);
                    prop_assert_eq!(owner, *block, "what is the same is shared");
                }
                prop_assert!(commit.duplicates.iter().all(|block| offered.contains(block)));
            }
            drop(lease);
            let gone = writer.evict(*evict);
            cached.retain(|_, block| !gone.contains(block));
            prop_assert_eq!(writer.counts().cached, cached.len());
            prop_assert_eq!(writer.audit(), Ok(()));
        }
    }
}
