//! The buffers a step computes in. They grow to the largest batch seen and are reused.

use crate::config::DecoderConfig;
use stolon_kernels::Operands;

/// Rows of f32 hold at least as many rows as the step has; packed ones are reset where they are made.
#[derive(Debug, Default)]
pub(super) struct Activations {
    /// The residual stream, `[rows, hidden_size]`.
    pub(super) x: Vec<f32>,
    /// The residual stream normed for the products that read it next, `hidden_size` wide.
    pub(super) normed: Operands,
    /// `[rows, num_heads, head_dim]`.
    pub(super) q: Vec<f32>,
    /// What attention gives, `[rows, num_heads, head_dim]`.
    pub(super) attended: Vec<f32>,
    /// The same, packed for the product after it.
    pub(super) attended_packed: Operands,
    /// What the gate gives, `intermediate_size` wide.
    pub(super) inner: Operands,
    /// What goes back into the residual stream, `[rows, hidden_size]`, where it is normed before.
    pub(super) projected: Vec<f32>,
}

impl Activations {
    /// Makes room for `rows` rows.
    pub(super) fn reserve(&mut self, config: &DecoderConfig, rows: usize) {
        let queries = rows * config.num_heads * config.head_dim;
        let projected = if config.sandwich_norms { rows * config.hidden_size } else { 0 };
        for (buffer, len) in [
            (&mut self.x, rows * config.hidden_size),
            (&mut self.projected, projected),
            (&mut self.q, queries),
            (&mut self.attended, queries),
        ] {
            if buffer.len() < len {
                buffer.resize(len, 0.0);
            }
        }
    }
}
