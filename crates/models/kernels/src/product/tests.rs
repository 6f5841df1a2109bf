//! Fused epilogues and sinks are compared with the same steps in separate passes.

use std::sync::Mutex;

use super::*;
use crate::matrix::tests::bytes_of;
use crate::reference::random;
use crate::{KvLayout, KvSliceMut, SlotMapping, TensorType, silu_mul};

const DTYPES: [TensorType; 4] =
    [TensorType::F32, TensorType::F16, TensorType::Bf16, TensorType::Q8_0];
const ROWS: [usize; 8] = [1, 2, 5, 13, 17, 48, 100, 300];

fn matrix(dtype: TensorType, seed: u64, out: usize, inner: usize, path: Path) -> Matrix {
    let bytes = bytes_of(dtype, &random(seed, out * inner));
    Matrix::pack(dtype, out, inner, &bytes, path).expect("a good shape")
}

fn alone(matrix: &Matrix, x: &[f32], rows: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; rows * matrix.out_features()];
    matrix.matmul(&Threads::new(1), x, rows, &mut out);
    out
}

#[track_caller]
fn same(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (index, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.to_bits(), want.to_bits(), "{what}: value {index}, {got} for {want}");
    }
}

/// Calls `each` for every path, type, number of rows and number of threads.
fn check(each: impl Fn(Path, TensorType, usize, &Threads, &str)) {
    for threads in [Threads::new(1), Threads::new(3)] {
        for path in Path::supported() {
            for dtype in DTYPES {
                for rows in ROWS {
                    let what = format!("{path} {dtype:?}, {rows} rows, {}", threads.count());
                    each(path, dtype, rows, &threads, &what);
                }
            }
        }
    }
}

/// Goal: several products in one call, written or added, with an epilogue that needs the features
/// of a head together, equal separate products followed by the same steps over whole rows.
#[test]
fn written_and_added_results_equal_separate_passes() {
    check(|path, dtype, rows, threads, what| {
        let (inner, head, heads) = (96, 20, 5);
        let first = matrix(dtype, 1, heads * head, inner, path);
        let second = matrix(dtype, 2, 70, inner, path);
        let x = random(3, rows * inner);
        let begin = random(4, rows * 70);

        let mut want = alone(&first, &x, rows);
        for (row, sums) in want.chunks_exact_mut(heads * head).enumerate() {
            for head in sums.chunks_exact_mut(head) {
                head.rotate_left(1);
                head[0] += row as f32;
            }
        }
        let mut want_added = begin.clone();
        elementwise::add(path, &mut want_added, &alone(&second, &x, rows));

        let mut operands = Operands::default();
        operands.reset(rows, &[&first, &second]);
        operands.pack(threads, &x);
        let (mut got, mut added) = (vec![f32::NAN; want.len()], begin);
        let epilogue = |sums: RowSums<'_>| {
            assert!(sums.feature.is_multiple_of(head) && sums.second.is_empty());
            for head in sums.first.chunks_exact_mut(head) {
                head.rotate_left(1);
                head[0] += sums.row as f32;
            }
        };
        let mut products = [
            Product {
                group: 0,
                matrices: &[&first],
                step: head,
                epilogue: Some(&epilogue),
                sink: Sink::Rows(&mut got),
            },
            Product {
                group: 0,
                matrices: &[&second],
                step: 1,
                epilogue: None,
                sink: Sink::Add(&mut added),
            },
        ];
        multiply(path, threads, &operands, &mut products);
        same(&got, &want, what);
        same(&added, &want_added, what);
    });
}

/// Goal: products that write parts of the columns of one buffer, with and without an epilogue, equal
/// separate products next to each other.
#[test]
fn columns_of_one_buffer_equal_separate_buffers() {
    check(|path, dtype, rows, threads, what| {
        let (inner, widths) = (64, [40, 7, 96]);
        let matrices = [0, 1, 2].map(|part| matrix(dtype, part as u64, widths[part], inner, path));
        let x = random(5, rows * inner);
        let alone = [0, 1, 2].map(|part| alone(&matrices[part], &x, rows));
        let mut operands = Operands::default();
        operands.reset(rows, &matrices.each_ref());
        operands.pack(threads, &x);
        let stride = widths.iter().sum::<usize>();
        let mut got = vec![f32::NAN; rows * stride];
        let negate = |sums: RowSums<'_>| sums.first.iter_mut().for_each(|sum| *sum = -*sum);
        let columns = ColumnsMut::divide(&mut got, rows, widths);
        let readers: [[&Matrix; 1]; 3] = matrices.each_ref().map(|matrix| [matrix]);
        let product = |(part, columns): (usize, _)| Product {
            group: 0,
            matrices: &readers[part],
            step: 1,
            epilogue: (part == 1).then_some(&negate as Epilogue<'_>),
            sink: Sink::Columns(columns),
        };
        let mut products: Vec<_> = columns.into_iter().enumerate().map(product).collect();
        multiply(path, threads, &operands, &mut products);
        drop(products);
        for (row, got) in got.chunks_exact(stride).enumerate() {
            let part = |part: usize| &alone[part][row * widths[part]..][..widths[part]];
            let negated: Vec<f32> = part(1).iter().map(|value| -value).collect();
            same(got, &[part(0), &negated, part(2)].concat(), what);
        }
    });
}

/// Goal: a buffer of another size panics instead of being written beyond its end.
#[test]
#[should_panic(expected = "the buffer must be [3, 9]")]
fn columns_of_a_smaller_buffer_panic() {
    ColumnsMut::divide(&mut [0.0; 26], 3, [4, 5]);
}

/// Goal: gate and up in one product, with the activation function as epilogue and the next
/// product's operands as sink, equal three products and the function over whole rows. The readers
/// of the operands may have different packings.
#[test]
fn gated_and_packed_results_equal_separate_passes() {
    check(|path, dtype, rows, threads, what| {
        let (hidden, inner) = (64, 608);
        let gate = matrix(dtype, 1, inner, hidden, path);
        let up = matrix(TensorType::F32, 2, inner, hidden, path);
        let down = matrix(dtype, 3, 40, inner, path);
        let other = matrix(TensorType::F32, 4, 33, inner, path);
        let x = random(5, rows * hidden);
        let mut gated = alone(&gate, &x, rows);
        silu_mul(path, &mut gated, &alone(&up, &x, rows));
        let want = [alone(&down, &gated, rows), alone(&other, &gated, rows)];

        let mut operands = Operands::default();
        operands.reset(rows, &[&gate, &up]);
        operands.fill(threads, |_, first, block| {
            block.copy_from_slice(&x[first * hidden..][..block.len()]);
        });
        let mut packed = Operands::default();
        packed.reset(rows, &[&down, &other]);
        let epilogue = |sums: RowSums<'_>| silu_mul(path, sums.first, sums.second);
        let product = Product {
            group: 0,
            matrices: &[&gate, &up],
            step: 1,
            epilogue: Some(&epilogue),
            sink: Sink::Operands(packed.only()),
        };
        multiply(path, threads, &operands, &mut [product]);
        for (matrix, want) in [&down, &other].into_iter().zip(&want) {
            let mut got = vec![f32::NAN; want.len()];
            let sink = Sink::Rows(&mut got);
            let product = Product { group: 0, matrices: &[matrix], step: 1, epilogue: None, sink };
            multiply(path, threads, &packed, &mut [product]);
            same(&got, want, what);
        }
    });
}

/// Goal: an epilogue can prepare for each block before its results are computed.
#[test]
fn blocks_are_prepared_before_they_are_finished() {
    #[derive(Default)]
    struct Blocks(Mutex<Vec<(Range<usize>, Range<usize>)>>);
    impl Finish for Blocks {
        fn prepare(&self, rows: Range<usize>, features: Range<usize>) {
            self.0.lock().unwrap().push((rows, features));
        }
        fn finish(&self, sums: RowSums<'_>) {
            let last = sums.feature + sums.first.len();
            let prepared = self.0.lock().unwrap();
            let is_there = prepared.iter().any(|(rows, features)| {
                rows.contains(&sums.row) && *features == (sums.feature..last)
            });
            assert!(is_there, "row {}, features {}..{last}", sums.row, sums.feature);
        }
    }
    check(|path, dtype, rows, threads, what| {
        let matrix = matrix(dtype, 1, 100, 64, path);
        let mut operands = Operands::default();
        operands.reset(rows, &[&matrix]);
        operands.pack(threads, &random(2, rows * 64));
        let (blocks, mut out) = (Blocks::default(), vec![0.0; rows * 100]);
        let (epilogue, sink) = (Some(&blocks as Epilogue<'_>), Sink::Rows(&mut out));
        let product = Product { group: 0, matrices: &[&matrix], step: 1, epilogue, sink };
        multiply(path, threads, &operands, &mut [product]);
        let accumulated = Blocks::default();
        let indices: Vec<u32> = (0..rows as u32).collect();
        let term = Term { matrix: &matrix, epilogue: &accumulated, rows: &indices };
        accumulate(path, threads, &operands, &[term], &mut out);
        for blocks in [blocks, accumulated] {
            let blocks = blocks.0.into_inner().unwrap();
            let count: usize =
                blocks.iter().map(|(rows, features)| rows.len() * features.len()).sum();
            assert_eq!(count, rows * 100, "{what}: each result is in one block");
        }
    });
}

/// Goal: an inner size that is not a multiple of a tile is padded with zeroes, also when the rows
/// are packed block by block as the sink of another product.
#[test]
fn padding_is_zeroed_when_packed_by_blocks() {
    check(|path, dtype, rows, threads, what| {
        if dtype.block_len() > 1 {
            return;
        }
        let (hidden, inner) = (40, 550);
        let first = matrix(dtype, 1, inner, hidden, path);
        let second = matrix(dtype, 2, 17, inner, path);
        let x = random(3, rows * hidden);
        let want = alone(&second, &alone(&first, &x, rows), rows);
        let (mut operands, mut packed) = (Operands::default(), Operands::default());
        // Leave NaN behind from a larger step, which must not be read.
        packed.reset(rows + 40, &[&second]);
        packed.pack(threads, &vec![f32::NAN; (rows + 40) * inner]);
        operands.reset(rows, &[&first]);
        operands.pack(threads, &x);
        packed.reset(rows, &[&second]);
        let sink = Sink::Operands(packed.only());
        let product = Product { group: 0, matrices: &[&first], step: 1, epilogue: None, sink };
        multiply(path, threads, &operands, &mut [product]);
        let mut got = vec![f32::NAN; want.len()];
        let sink = Sink::Rows(&mut got);
        let product = Product { group: 0, matrices: &[&second], step: 1, epilogue: None, sink };
        multiply(path, threads, &packed, &mut [product]);
        same(&got, &want, what);
    });
}

/// Goal: a product that writes to the KV cache stores the same values as writing its rows one by
/// one, and rows without a position are not stored.
#[test]
fn cache_sink_equals_writing_row_by_row() {
    check(|path, dtype, rows, threads, what| {
        let (inner, kv_heads, head_dim) = (32, 7, 24);
        let width = kv_heads * head_dim;
        let matrix = matrix(dtype, 1, width, inner, path);
        let x = random(2, rows * inner);
        let mut places = SlotMapping::default();
        places.fill((0..rows).map(|row| (row % 3 != 1).then_some((row * 7 + 5) % 1000)));
        let mut operands = Operands::default();
        operands.reset(rows, &[&matrix]);
        operands.pack(threads, &x);
        let sums = alone(&matrix, &x, rows);
        let together = |store: KvSliceMut<'_>, layout| {
            let sink = Sink::Cache(KvRows::new(path, store, layout, &places, kv_heads, head_dim));
            let product =
                Product { group: 0, matrices: &[&matrix], step: head_dim, epilogue: None, sink };
            multiply(path, threads, &operands, &mut [product]);
        };
        let apart = |store: KvSliceMut<'_>, layout| {
            let mut to = KvRows::new(path, store, layout, &places, kv_heads, head_dim);
            for (row, sums) in sums.chunks_exact(width).enumerate() {
                to.write_row(row, sums);
            }
        };
        let len = 1024 * width;
        for layout in [KvLayout::Rows, KvLayout::Transposed { block_size: 32 }] {
            let mut floats = [vec![0.0; len], vec![0.0; len]];
            together(KvSliceMut::F32(&mut floats[0]), layout);
            apart(KvSliceMut::F32(&mut floats[1]), layout);
            assert!(floats[0] == floats[1], "{what}");
            assert!(floats[0].iter().any(|value| *value != 0.0) || rows == 0, "{what}");
            let mut halves = [vec![0; len], vec![0; len]];
            together(KvSliceMut::Bf16(&mut halves[0]), layout);
            apart(KvSliceMut::Bf16(&mut halves[1]), layout);
            assert!(halves[0] == halves[1], "{what}");
            together(KvSliceMut::F16(&mut halves[0]), layout);
            apart(KvSliceMut::F16(&mut halves[1]), layout);
            assert!(halves[0] == halves[1], "{what}");
            let mut bytes = [vec![0; len], vec![0; len]];
            let mut scales = [vec![0.0; 1024 * kv_heads], vec![0.0; 1024 * kv_heads]];
            together(KvSliceMut::Int8 { values: &mut bytes[0], scales: &mut scales[0] }, layout);
            apart(KvSliceMut::Int8 { values: &mut bytes[1], scales: &mut scales[1] }, layout);
            assert!(bytes[0] == bytes[1] && scales[0] == scales[1], "{what}");
            let mut codes = [vec![0; len / 2], vec![0; len / 2]];
            together(KvSliceMut::Int4 { packed: &mut codes[0], scales: &mut scales[0] }, layout);
            apart(KvSliceMut::Int4 { packed: &mut codes[1], scales: &mut scales[1] }, layout);
            assert!(codes[0] == codes[1] && scales[0] == scales[1], "{what}");
        }
    });
}

/// Goal: groups of rows that are gated and added to rows of a common output by experts of different
/// widths equal the same steps row by row, in the order of the groups. Rows may be in no group, in
/// some or in all.
#[test]
fn groups_equal_their_rows_one_by_one() {
    check(|path, dtype, rows, threads, what| {
        let (hidden, out) = (64, 150);
        let widths = [96, 32, 96, 608];
        let experts: Vec<[Matrix; 3]> = (0..4)
            .map(|e| {
                let [gate, up] = [10 * e, 10 * e + 1]
                    .map(|seed| matrix(dtype, seed, widths[e as usize], hidden, path));
                [gate, up, matrix(TensorType::F32, 10 * e + 2, out, widths[e as usize], path)]
            })
            .collect();
        let chosen = |e: usize, row: usize| match e {
            2 => false,
            3 => true,
            _ => (row * 7 + e).is_multiple_of(3),
        };
        let x = random(5, rows * hidden);
        let begin = random(6, rows * out);
        let mut want = begin.clone();
        for (e, [gate, up, down]) in experts.iter().enumerate() {
            for row in (0..rows).filter(|row| chosen(e, *row)) {
                let x = &x[row * hidden..][..hidden];
                let mut gated = alone(gate, x, 1);
                silu_mul(path, &mut gated, &alone(up, x, 1));
                let mut sums = alone(down, &gated, 1);
                sums.iter_mut().for_each(|sum| *sum *= (row + e) as f32);
                elementwise::add(path, &mut want[row * out..][..out], &sums);
            }
        }

        let indices: Vec<Vec<u32>> = (0..experts.len())
            .map(|e| (0..rows).filter(|row| chosen(e, *row)).map(|row| row as u32).collect())
            .collect();
        let (mut operands, mut packed) = (Operands::default(), Operands::default());
        let groups = experts.iter().zip(&indices);
        operands.reset_groups(groups.clone().map(|([gate, up, _], rows)| (rows.len(), [gate, up])));
        packed.reset_groups(groups.map(|([_, _, down], rows)| (rows.len(), [down])));
        operands.fill(threads, |group, first, block| {
            for (row, block) in indices[group][first..].iter().zip(block.chunks_exact_mut(hidden)) {
                block.copy_from_slice(&x[*row as usize * hidden..][..hidden]);
            }
        });
        let gated = |sums: RowSums<'_>| silu_mul(path, sums.first, sums.second);
        let pairs: Vec<[&Matrix; 2]> = experts.iter().map(|[gate, up, _]| [gate, up]).collect();
        let sinks = packed.groups_mut().into_iter().zip(&pairs).enumerate();
        let mut products: Vec<Product<'_>> = sinks
            .map(|(group, (sink, matrices))| Product {
                group,
                matrices,
                step: 1,
                epilogue: Some(&gated),
                sink: Sink::Operands(sink),
            })
            .collect();
        multiply(path, threads, &operands, &mut products);
        drop(products);
        let scaled: Vec<_> = (0..experts.len())
            .map(|e| {
                let rows = &indices[e];
                move |sums: RowSums<'_>| {
                    let factor = (rows[sums.row] as usize + e) as f32;
                    sums.first.iter_mut().for_each(|sum| *sum *= factor);
                }
            })
            .collect();
        let terms: Vec<Term<'_>> = (0..experts.len())
            .map(|e| Term { matrix: &experts[e][2], epilogue: &scaled[e], rows: &indices[e] })
            .collect();
        let mut got = begin;
        accumulate(path, threads, &packed, &terms, &mut got);
        same(&got, &want, what);
    });
}
