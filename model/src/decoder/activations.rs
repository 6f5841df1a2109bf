//! The buffers a step computes in. They grow to the largest batch seen and are reused.

use crate::config::DecoderConfig;
use crate::kv_store::{KvRows, KvShape, KvType};

/// Each holds at least as many rows as the step has.
#[derive(Debug, Default)]
pub(super) struct Activations {
    /// The residual stream, `[rows, hidden_size]`.
    pub(super) x: Vec<f32>,
    /// The residual stream normed for what reads it next, `[rows, hidden_size]`.
    pub(super) normed: Vec<f32>,
    /// `[rows, num_heads, head_dim]`.
    pub(super) q: Vec<f32>,
    /// `[rows, num_kv_heads, head_dim]`.
    pub(super) k: Vec<f32>,
    /// `[rows, num_kv_heads, head_dim]`.
    pub(super) v: Vec<f32>,
    /// Keys rounded for a bf16 store; empty for an f32 one.
    pub(super) k16: Vec<u16>,
    /// Values rounded for a bf16 store; empty for an f32 one.
    pub(super) v16: Vec<u16>,
    /// What attention gives, `[rows, num_heads, head_dim]`.
    pub(super) attended: Vec<f32>,
    /// What goes back into the residual stream, `[rows, hidden_size]`.
    pub(super) projected: Vec<f32>,
    /// `[rows, intermediate_size]`.
    pub(super) gate: Vec<f32>,
    /// `[rows, intermediate_size]`.
    pub(super) up: Vec<f32>,
}

impl Activations {
    /// Makes room for `rows` rows.
    pub(super) fn reserve(&mut self, config: &DecoderConfig, rows: usize, kv_type: KvType) {
        let queries = rows * config.num_heads * config.head_dim;
        let keys = rows * config.num_kv_heads * config.head_dim;
        for (buffer, len) in [
            (&mut self.x, rows * config.hidden_size),
            (&mut self.normed, rows * config.hidden_size),
            (&mut self.projected, rows * config.hidden_size),
            (&mut self.q, queries),
            (&mut self.attended, queries),
            (&mut self.k, keys),
            (&mut self.v, keys),
            (&mut self.gate, rows * config.intermediate_size),
            (&mut self.up, rows * config.intermediate_size),
        ] {
            if buffer.len() < len {
                buffer.resize(len, 0.0);
            }
        }
        if kv_type == KvType::Bf16 && self.k16.len() < keys {
            self.k16.resize(keys, 0);
            self.v16.resize(keys, 0);
        }
    }

    /// Keys and values of `count` rows from `row` on, as the store takes them.
    pub(super) fn kv_rows(
        &self,
        shape: &KvShape,
        row: usize,
        count: usize,
    ) -> (KvRows<'_>, KvRows<'_>) {
        let range = row * shape.position_len()..(row + count) * shape.position_len();
        match shape.kv_type {
            KvType::F32 => (KvRows::F32(&self.k[range.clone()]), KvRows::F32(&self.v[range])),
            KvType::Bf16 => {
                (KvRows::Bf16(&self.k16[range.clone()]), KvRows::Bf16(&self.v16[range]))
            }
        }
    }
}
