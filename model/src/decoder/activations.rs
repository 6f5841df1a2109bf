//! The buffers a step computes in. They grow to the largest batch seen and are reused.

use crate::config::DecoderConfig;

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
    pub(super) fn reserve(&mut self, config: &DecoderConfig, rows: usize) {
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
    }
}
