use stolon_kvcache::BlockId;

use super::super::{AttentionSequence, KvSlice, TILE, positions_read};
use super::*;
use crate::KvLayout;
use crate::Path;

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
        sliding_window,
    }
}

/// A table whose first blocks are everybody's, and whose others are its own.
fn table(number: u32, shared: u32) -> Vec<BlockId> {
    let own = |index| BlockId(1000 * (number + 1) + index);
    (0..600).map(|index| if index < shared { BlockId(index) } else { own(index) }).collect()
}

/// Goal: parts cover every head of every span of every task once, whether spans are shared or not,
/// each with a place of its own for its state where the task is cut.
#[test]
fn parts_cover_every_span_once() {
    let tables: Vec<Vec<BlockId>> =
        [0, 100, 70, 3, 100, 36, 100].into_iter().zip(0..).map(|(n, i)| table(i, n)).collect();
    let sequence = |table: usize, start, count| {
        let block_table = tables[table].as_slice();
        AttentionSequence { start, count, block_table }
    };
    let long = [sequence(0, 8191, 1), sequence(3, SPAN - 1, 1)];
    let mixed = [sequence(0, 100, 1), sequence(1, 0, 1088), sequence(2, 3 * SPAN, 9)];
    let alike = [1, 5, 2, 4, 3, 6, 0].map(|i| sequence(i, 1500 + 100 * i, 1));
    for sequences in [&long[..], &mixed, &alike, &[mixed[1], alike[0], alike[2], alike[3]]] {
        for window in [None, Some(600)] {
            let args = args(sequences, window);
            for (threads, tile) in [1, 2, 3, 16].into_iter().flat_map(|n| [(n, 64), (n, 128)]) {
                let plan = Plan::new(&args, threads, tile);
                assert!(threads < 3 || window.is_some() || plan.parts.len() >= threads);
                let mut parts_of = vec![vec![0; 20 * args.kv_heads]; plan.tasks.len()];
                for part in &plan.parts {
                    assert!(part.readers.len() == 1 || part.spans.len() == 1);
                    for reader in 0..part.readers.len() {
                        let task = plan.readers[part.readers.start + reader].task;
                        for span in part.spans.clone() {
                            for head in part.kv_heads.clone() {
                                parts_of[task][span * args.kv_heads + head] += 1;
                            }
                        }
                    }
                }
                let mut states = 0;
                for (task, parts_of) in plan.tasks.iter().zip(parts_of) {
                    let spans = task.spans();
                    for (place, parts) in parts_of.into_iter().enumerate() {
                        let seen = spans.contains(&(place / args.kv_heads));
                        assert_eq!(parts, usize::from(seen));
                    }
                    if let Some(at) = task.states {
                        assert_eq!(at, states);
                        let state_len = State::len(task.queries(&args), 32);
                        states += spans.len() * args.kv_heads * state_len;
                    }
                }
                assert_eq!(states, plan.state_len);
                let cut = plan.tasks.iter().filter(|task| task.states.is_some()).count();
                assert_eq!(plan.cut.len(), cut);
            }
        }
    }
}

/// Goal: decodes of one thread load what they share once: whole tiles, in whatever order the
/// sequences come.
#[test]
fn shared_tiles_are_loaded_once() {
    // Shared with the sequence before it, in blocks of 16: 100, 70 and 36, so that one third of a
    // tile and more is left over.
    let tables = [table(0, 100), table(1, 70), table(2, 36), table(3, 100)];
    let sequence = |table: usize, start| {
        let block_table = tables[table].as_slice();
        AttentionSequence { start, count: 1, block_table }
    };
    let end = 1700;
    for order in [[0, 3, 1, 2], [2, 0, 1, 3]] {
        let sequences = order.map(|table| sequence(table, end - 1));
        let saved = [100, 70, 36].map(|blocks| blocks * BLOCK_SIZE / TILE * TILE);
        let want = 4 * end - saved.iter().sum::<usize>();
        assert_eq!(positions_read(&sequences, BLOCK_SIZE), want);
        assert_eq!(loaded(&Plan::new(&args(&sequences, None), 1, TILE)), want);
        let apart: Vec<_> =
            sequences.iter().map(|&one| Plan::new(&args(&[one], None), 1, TILE)).collect();
        assert_eq!(apart.iter().map(loaded).sum::<usize>(), 4 * end);
    }
    // What lies beyond the shorter one's end is not shared, nor what a window hides from the longer.
    let sequences = [sequence(0, 999), sequence(3, 1299)];
    assert_eq!(loaded(&Plan::new(&args(&sequences, None), 1, TILE)), 1300 + 1000 - 960);
    assert_eq!(loaded(&Plan::new(&args(&sequences, Some(600)), 1, TILE)), 1200 - (960 - 704));
}

/// Positions that a plan for one thread loads, of each head.
fn loaded(plan: &Plan) -> usize {
    let mut positions = 0;
    for part in &plan.parts {
        assert_eq!(part.kv_heads.len(), 4);
        for begin in (part.spans.start * SPAN..part.spans.end * SPAN).step_by(TILE) {
            for (number, reader) in plan.readers[part.readers.clone()].iter().enumerate() {
                if number == 0 || !reader.shares(begin) {
                    positions += plan.tasks[reader.task].seen(begin..begin + TILE).len();
                }
            }
        }
    }
    positions
}
