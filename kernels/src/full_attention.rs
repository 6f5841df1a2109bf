//! Attention in both directions between all rows of an image, as in vision transformers.
//!
//! There is no cache and no mask, so a head is two GEMMs with a softmax between them. Keys and values
//! are packed like weights, and the queries are processed in blocks whose scores fit in the L2
//! cache. [`attention`](crate::attention()) is for decoders.
//!
//! **Invariant**: the bits of a row of the result depend only on its query and on the keys and
//! values, not on the number of threads.
#![allow(unsafe_code, reason = "tasks write disjoint blocks of one output")]

use crate::buffer::SharedMut;
use crate::elementwise::softmax::softmax;
use crate::matrix::Matrix;
use crate::path::Path;
use crate::tensor_type::TensorType;
use crate::threads::Threads;

/// Number of queries of a task.
const QUERIES: usize = 64;

/// The arguments of one call of [`full_attention`].
#[derive(Clone, Copy, Debug)]
pub struct FullAttention<'a> {
    /// Instruction set.
    pub path: Path,
    /// Queries, `[rows, heads, head_dim]`.
    pub q: &'a [f32],
    /// Keys, of the same shape.
    pub k: &'a [f32],
    /// Values, of the same shape.
    pub v: &'a [f32],
    /// Number of heads, at least 1.
    pub heads: usize,
    /// Length of a head, at least 1.
    pub head_dim: usize,
    /// Factor of the scores, above 0; usually `1 / sqrt(head_dim)`.
    pub scale: f32,
}

/// Keys and values of one head, packed.
struct Head {
    /// `[rows, head_dim]`.
    keys: Matrix,
    /// `[head_dim, rows]`.
    values: Matrix,
}

impl FullAttention<'_> {
    /// The rows of one head, `[rows, head_dim]`, as bytes.
    fn keys_of(&self, head: usize) -> Vec<u8> {
        let (width, dim) = (self.heads * self.head_dim, self.head_dim);
        let rows = self.k.chunks_exact(width).map(|row| &row[head * dim..(head + 1) * dim]);
        rows.flatten().flat_map(|value| value.to_le_bytes()).collect()
    }

    /// The values of one head, transposed: `[head_dim, rows]`, as bytes.
    fn values_of(&self, head: usize) -> Vec<u8> {
        let (width, dim) = (self.heads * self.head_dim, self.head_dim);
        let column = |i| self.v[head * dim + i..].iter().step_by(width);
        (0..dim).flat_map(column).flat_map(|value| value.to_le_bytes()).collect()
    }

    fn head(&self, head: usize) -> Head {
        let rows = self.q.len() / (self.heads * self.head_dim);
        let pack = |rows, columns, bytes: &[u8]| {
            Matrix::pack(TensorType::F32, rows, columns, bytes, self.path)
                .expect("the bytes have the size of the matrix")
        };
        Head {
            keys: pack(rows, self.head_dim, &self.keys_of(head)),
            values: pack(self.head_dim, rows, &self.values_of(head)),
        }
    }

    fn validate(&self, out: &[f32]) {
        let width = self.heads * self.head_dim;
        assert!(
            width > 0 && self.q.len().is_multiple_of(width),
            "full_attention: expected whole rows of {} heads of {} values, got {} values",
            self.heads,
            self.head_dim,
            self.q.len()
        );
        assert!(
            [self.k.len(), self.v.len(), out.len()] == [self.q.len(); 3],
            "full_attention: expected q, k, v and out to have the same length"
        );
    }
}

/// Computes `out = softmax(scale * q k^T) v` for each head. `out` is `[rows, heads, head_dim]`.
///
/// # Panics
/// If the slices do not have these shapes, or `scale` is not above 0.
pub fn full_attention(threads: &Threads, args: &FullAttention<'_>, out: &mut [f32]) {
    args.validate(out);
    let (dim, width) = (args.head_dim, args.heads * args.head_dim);
    let rows = args.q.len() / width;
    if rows == 0 {
        return;
    }
    let heads: Vec<std::sync::OnceLock<Head>> =
        (0..args.heads).map(|_| std::sync::OnceLock::new()).collect();
    threads.for_each(args.heads, |head| {
        let _ = heads[head].set(args.head(head));
    });
    let blocks = rows.div_ceil(QUERIES);
    let out = SharedMut::new(out);
    threads.for_each(args.heads * blocks, |task| {
        let (head, first) = (task / blocks, task % blocks * QUERIES);
        let count = QUERIES.min(rows - first);
        let packed = heads[head].get().expect("the first loop has packed all heads");
        let mut memory = threads.scratch::<f32>(count * (rows + 2 * dim));
        let memory = &mut memory.slice_mut::<f32>()[..count * (rows + 2 * dim)];
        let (scores, memory) = memory.split_at_mut(count * rows);
        let (queries, attended) = memory.split_at_mut(count * dim);
        let columns = head * dim..(head + 1) * dim;
        let own = args.q.chunks_exact(width).skip(first);
        for (query, row) in queries.chunks_exact_mut(dim).zip(own) {
            query.copy_from_slice(&row[columns.clone()]);
        }
        packed.keys.matmul(threads, queries, count, scores);
        softmax(args.path, scores, rows, args.scale);
        packed.values.matmul(threads, scores, count, attended);
        for (index, row) in attended.chunks_exact(dim).enumerate() {
            let to = out.get().wrapping_add((first + index) * width + columns.start);
            // SAFETY: `validate` has checked that `out` has all rows and heads, and only this task
            // writes this head of its rows.
            unsafe { std::ptr::copy_nonoverlapping(row.as_ptr(), to, dim) }
        }
    });
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::reference::{random, worst};

    fn reference(args: &FullAttention<'_>) -> Vec<f64> {
        let (dim, width) = (args.head_dim, args.heads * args.head_dim);
        let rows = args.q.len() / width;
        let mut out = vec![0.0; args.q.len()];
        for (row, head) in (0..rows).flat_map(|row| (0..args.heads).map(move |head| (row, head))) {
            let at = |values: &[f32], row: usize, i: usize| {
                f64::from(values[row * width + head * dim + i])
            };
            let score = |key: usize| -> f64 {
                let dot: f64 = (0..dim).map(|i| at(args.q, row, i) * at(args.k, key, i)).sum();
                (dot * f64::from(args.scale)).exp()
            };
            let powers: Vec<f64> = (0..rows).map(score).collect();
            let sum: f64 = powers.iter().sum();
            for i in 0..dim {
                let value = |key: usize| powers[key] / sum * at(args.v, key, i);
                out[row * width + head * dim + i] = (0..rows).map(value).sum();
            }
        }
        out
    }

    /// Goal: the result is the documented function on every instruction set, and its bits do not
    /// depend on the number of threads. The sizes are not multiples of vectors and blocks.
    #[test]
    fn full_attention_is_the_documented_function() {
        for (rows, heads, head_dim) in [(1, 1, 1), (5, 2, 8), (67, 3, 18), (144, 2, 72)] {
            let len = rows * heads * head_dim;
            let [q, k, v] = [1, 2, 3].map(|seed| random(seed, len));
            let scale = 4.0 / (head_dim as f32).sqrt();
            for path in Path::supported() {
                let args = FullAttention { path, q: &q, k: &k, v: &v, heads, head_dim, scale };
                let mut out = vec![0.0; len];
                full_attention(&Threads::new(1), &args, &mut out);
                let (difference, at) = worst(&out, &reference(&args));
                assert!(difference < 1e-5, "{path} {rows} {heads}: {difference} at {at}");
                let mut parallel = vec![0.0; len];
                full_attention(&Threads::new(3), &args, &mut parallel);
                assert_eq!(out, parallel, "{path} {rows} {heads}");
            }
        }
    }
}
