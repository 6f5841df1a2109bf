//! What happens between products: biases, norms, rope, gates and residuals, in passes over rows
//! that are shared out over the threads where there is enough to do.

use super::layer::Layer;
use super::rope::RopeTable;
use super::workers::Workers;
use crate::config::{Activation, DecoderConfig};
use crate::kernels::{self, AttentionArgs, AttentionSequence, Path};
use crate::kv_store::KvStore;

/// An RMS norm over rows of the residual stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct Norm<'a> {
    weight: &'a [f32],
    eps: f32,
    offset: f32,
    path: Path,
}

impl<'a> Norm<'a> {
    pub(super) fn of(config: &DecoderConfig, weight: &'a [f32], path: Path) -> Self {
        Self { weight, eps: config.rms_norm_eps, offset: config.norm_offset, path }
    }

    /// Norms rows of `x` into `out`.
    pub(super) fn apply(&self, x: &[f32], out: &mut [f32]) {
        kernels::rms_norm(self.path, x, self.weight, self.eps, self.offset, out);
    }

    fn apply_in_place(&self, x: &mut [f32]) {
        kernels::rms_norm_in_place(self.path, x, self.weight, self.eps, self.offset);
    }
}

/// What all heads of a layer have in common.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heads<'a> {
    pub(super) path: Path,
    pub(super) head_dim: usize,
    pub(super) eps: f32,
    pub(super) norm_offset: f32,
    pub(super) rope: &'a RopeTable,
}

impl Heads<'_> {
    /// Finishes rows of queries or keys: bias, norm of each head, rotation.
    fn finish(&self, bias: Option<&[f32]>, norm: Option<&[f32]>, positions: &[u32], x: &mut [f32]) {
        let width = x.len() / positions.len();
        add_bias(self.path, x, bias);
        if let Some(weight) = norm {
            kernels::rms_norm_in_place(self.path, x, weight, self.eps, self.norm_offset);
        }
        for (row, &position) in x.chunks_exact_mut(width).zip(positions) {
            let (cos, sin) = self.rope.at(position);
            kernels::rope(self.path, row, self.head_dim, cos, sin);
        }
    }
}

fn add_bias(path: Path, x: &mut [f32], bias: Option<&[f32]>) {
    if let Some(bias) = bias {
        kernels::add_bias(path, x, bias);
    }
}

/// Finishes queries, `[rows, num_heads, head_dim]`.
pub(super) fn queries(
    layer: &Layer,
    heads: &Heads<'_>,
    positions: &[u32],
    q: &mut [f32],
    workers: &Workers,
) {
    let width = q.len() / positions.len();
    let chunk = workers.chunk_rows(positions.len(), width);
    let parts = q.chunks_mut(chunk * width).zip(positions.chunks(chunk));
    workers.run(parts, |(q, positions)| {
        heads.finish(layer.q.bias(), layer.q_norm.as_deref(), positions, q);
    });
}

/// Finishes keys and values, `[rows, num_kv_heads, head_dim]`.
pub(super) fn keys_and_values(
    layer: &Layer,
    heads: &Heads<'_>,
    positions: &[u32],
    k: &mut [f32],
    v: &mut [f32],
    workers: &Workers,
) {
    let width = k.len() / positions.len();
    let chunk = workers.chunk_rows(positions.len(), 2 * width);
    let parts =
        k.chunks_mut(chunk * width).zip(v.chunks_mut(chunk * width)).zip(positions.chunks(chunk));
    workers.run(parts, |((k, v), positions)| {
        heads.finish(layer.k.bias(), layer.k_norm.as_deref(), positions, k);
        add_bias(heads.path, v, layer.v.bias());
    });
}

/// Paged attention of one layer: `q` and `out` are `[rows, num_heads, head_dim]`.
#[allow(clippy::too_many_arguments, reason = "all of them plain inputs of one kernel call")]
pub(super) fn attend(
    config: &DecoderConfig,
    index: usize,
    path: Path,
    kv: &KvStore,
    q: &[f32],
    sequences: &[AttentionSequence<'_>],
    out: &mut [f32],
    workers: &Workers,
) {
    let sliding_window = config.layers[index].sliding_window;
    let seen = |sequence: &AttentionSequence<'_>| {
        let context = sequence.start + sequence.count;
        sequence.count * sliding_window.map_or(context, |window| window.min(context))
    };
    let products = sequences.iter().map(seen).sum::<usize>() * config.num_heads * config.head_dim;
    let args = AttentionArgs {
        path,
        q,
        sequences,
        keys: kv.keys(index),
        values: kv.values(index),
        block_size: kv.shape().block_size,
        heads: config.num_heads,
        kv_heads: config.num_kv_heads,
        head_dim: config.head_dim,
        scale: config.attention_scale,
        sliding_window,
    };
    kernels::attention(workers.for_work(2 * products), &args, out);
}

/// Turns gate and up, `[rows, intermediate_size]`, into the MLP's inner rows, in place of gate.
pub(super) fn gate(
    config: &DecoderConfig,
    layer: &Layer,
    path: Path,
    gate: &mut [f32],
    up: &mut [f32],
    workers: &Workers,
) {
    let width = config.intermediate_size;
    // The gate function costs about as much as four other elements.
    let chunk = workers.chunk_rows(gate.len() / width, 4 * width);
    let parts = gate.chunks_mut(chunk * width).zip(up.chunks_mut(chunk * width));
    workers.run(parts, |(gate, up)| {
        add_bias(path, gate, layer.gate.bias());
        add_bias(path, up, layer.up.bias());
        match config.activation {
            Activation::Silu => kernels::silu_mul(path, gate, up),
            Activation::GeluTanh => kernels::gelu_tanh_mul(path, gate, up),
        }
    });
}

/// How a product goes back into the residual stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct Residual<'a> {
    /// Added to the product.
    pub(super) bias: Option<&'a [f32]>,
    /// Norm of the product before it is added.
    pub(super) own_norm: Option<&'a [f32]>,
    /// Norm of the residual stream for what reads it next.
    pub(super) next_norm: &'a [f32],
}

impl Residual<'_> {
    /// Adds `projected` to `x` and norms the sum into `normed`; all are `[rows, hidden_size]`.
    pub(super) fn add(
        &self,
        config: &DecoderConfig,
        path: Path,
        x: &mut [f32],
        projected: &mut [f32],
        normed: &mut [f32],
        workers: &Workers,
    ) {
        let width = config.hidden_size;
        let own = self.own_norm.map(|weight| Norm::of(config, weight, path));
        let next = Norm::of(config, self.next_norm, path);
        let chunk = workers.chunk_rows(x.len() / width, 2 * width);
        let parts = x
            .chunks_mut(chunk * width)
            .zip(projected.chunks_mut(chunk * width))
            .zip(normed.chunks_mut(chunk * width));
        workers.run(parts, |((x, projected), normed)| {
            add_bias(path, projected, self.bias);
            if let Some(own) = own {
                own.apply_in_place(projected);
            }
            kernels::add(path, x, projected);
            next.apply(x, normed);
        });
    }
}
