//! The division of work: coverage, states and the sharing of prefixes.

use stolon_kvcache::BlockId;

use super::*;
use crate::attention::args::{AttentionSequence, KvSlice};
use crate::attention::prefix_sharing::positions_read;
use crate::attention::sizes::POSITIONS_PER_TILE;
use crate::kv_layout::KvLayout;
use crate::path::Path;

const BLOCK_SIZE: usize = 16;

fn args<'a>(
    sequences: &'a [AttentionSequence<'a>],
    sliding_window: Option<usize>,
) -> AttentionArgs<'a> {
    AttentionArgs {
        path: Path::PORTABLE,
        q: &[],
        sequences,
        keys: KvSlice::F32(&[]),
        key_layout: KvLayout::Rows,
        values: KvSlice::F32(&[]),
        block_size: BLOCK_SIZE,
        heads: 12,
        kv_heads: 4,
        head_dim: 20,
        scale: 1.0,
        softcap: None,
        sliding_window,
        window_after: None,
        bias: None,
        sinks: None,
    }
}

/// A block table whose first `shared` blocks are common to all tables, and whose others are its
/// own.
fn table(number: u32, shared: u32) -> Vec<BlockId> {
    let own = |index| BlockId(1000 * (number + 1) + index);
    (0..600).map(|index| if index < shared { BlockId(index) } else { own(index) }).collect()
}

/// Goal: work items cover every head of every span of every query chunk exactly once, whether spans
/// are shared or not, and spans of a divided context have separate memory for their states.
#[test]
fn work_items_cover_every_span_once() {
    let tables: Vec<Vec<BlockId>> =
        [0, 100, 70, 3, 100, 36, 100].into_iter().zip(0..).map(|(n, i)| table(i, n)).collect();
    let sequence = |table: usize, start, count| {
        let block_table = tables[table].as_slice();
        AttentionSequence { start, count, full: false, block_table }
    };
    let long = [sequence(0, 8191, 1), sequence(3, POSITIONS_PER_SPAN - 1, 1)];
    let mixed = [sequence(0, 100, 1), sequence(1, 0, 1088), sequence(2, 3 * POSITIONS_PER_SPAN, 9)];
    let alike = [1, 5, 2, 4, 3, 6, 0].map(|i| sequence(i, 1500 + 100 * i, 1));
    for sequences in [&long[..], &mixed, &alike, &[mixed[1], alike[0], alike[2], alike[3]]] {
        for window in [None, Some(600)] {
            let args = args(sequences, window);
            for (threads, tile) in [1, 2, 3, 16].into_iter().flat_map(|n| [(n, 64), (n, 128)]) {
                let plan = AttentionPlan::new(&args, threads, tile);
                assert!(threads < 3 || window.is_some() || plan.items.len() >= threads);
                let mut items_of = vec![vec![0; 20 * args.kv_heads]; plan.chunks.len()];
                for item in &plan.items {
                    assert!(item.readers.len() == 1 || item.spans.len() == 1);
                    for reader in 0..item.readers.len() {
                        let chunk = plan.readers[item.readers.start + reader].chunk;
                        for span in item.spans.clone() {
                            for head in item.kv_heads.clone() {
                                items_of[chunk][span * args.kv_heads + head] += 1;
                            }
                        }
                    }
                }
                let mut states = 0;
                for (chunk, items_of) in plan.chunks.iter().zip(items_of) {
                    let spans = chunk.spans();
                    for (place, items) in items_of.into_iter().enumerate() {
                        let seen = spans.contains(&(place / args.kv_heads));
                        assert_eq!(items, usize::from(seen));
                    }
                    if let Some(at) = chunk.states {
                        assert_eq!(at, states);
                        let state_len = SoftmaxState::len(chunk.queries(&args), 32);
                        states += spans.len() * args.kv_heads * state_len;
                    }
                }
                assert_eq!(states, plan.state_len);
                let split = plan.chunks.iter().filter(|chunk| chunk.states.is_some()).count();
                assert_eq!(plan.split_chunks.len(), split);
            }
        }
    }
}

/// Goal: with one thread, decoding sequences load the whole tiles that they share once, whatever
/// the order of the sequences, and `positions_read` predicts it.
#[test]
fn shared_tiles_are_loaded_once() {
    // Blocks of 16 positions shared with the sequence before: 100, 70 and 36. None of these is a
    // whole number of tiles.
    let tables = [table(0, 100), table(1, 70), table(2, 36), table(3, 100)];
    let sequence = |table: usize, start| {
        let block_table = tables[table].as_slice();
        AttentionSequence { start, count: 1, full: false, block_table }
    };
    let end = 1700;
    for order in [[0, 3, 1, 2], [2, 0, 1, 3]] {
        let sequences = order.map(|table| sequence(table, end - 1));
        let saved = [100, 70, 36]
            .map(|blocks| blocks * BLOCK_SIZE / POSITIONS_PER_TILE * POSITIONS_PER_TILE);
        let want = 4 * end - saved.iter().sum::<usize>();
        assert_eq!(positions_read(&sequences, BLOCK_SIZE), want);
        assert_eq!(
            loaded(&AttentionPlan::new(&args(&sequences, None), 1, POSITIONS_PER_TILE)),
            want
        );
        let apart: Vec<_> = sequences
            .iter()
            .map(|&one| AttentionPlan::new(&args(&[one], None), 1, POSITIONS_PER_TILE))
            .collect();
        assert_eq!(apart.iter().map(loaded).sum::<usize>(), 4 * end);
    }
    // Positions after the end of the shorter sequence are not shared, nor those that a sliding
    // window hides from the longer one.
    let sequences = [sequence(0, 999), sequence(3, 1299)];
    assert_eq!(
        loaded(&AttentionPlan::new(&args(&sequences, None), 1, POSITIONS_PER_TILE)),
        1300 + 1000 - 960
    );
    assert_eq!(
        loaded(&AttentionPlan::new(&args(&sequences, Some(600)), 1, POSITIONS_PER_TILE)),
        1200 - (960 - 704)
    );
}

/// Number of positions that a plan for one thread loads, per kv head.
fn loaded(plan: &AttentionPlan) -> usize {
    let mut positions = 0;
    for item in &plan.items {
        assert_eq!(item.kv_heads.len(), 4);
        for begin in (item.spans.start * POSITIONS_PER_SPAN..item.spans.end * POSITIONS_PER_SPAN)
            .step_by(POSITIONS_PER_TILE)
        {
            for (number, reader) in plan.readers[item.readers.clone()].iter().enumerate() {
                if number == 0 || !reader.shares(begin) {
                    positions +=
                        plan.chunks[reader.chunk].seen(begin..begin + POSITIONS_PER_TILE).len();
                }
            }
        }
    }
    positions
}
