//! Adapters of the demo model.

use std::path::Path;

#[path = "../../../../../models/checkpoint/tests/it/support/adapter_writer.rs"]
mod adapter_writer;

use adapter_writer::AdapterWriter;

/// Writes a random adapter for the demo model.
pub(crate) fn write_adapter(dir: &Path, seed: u64) {
    let mut adapter = AdapterWriter::new(8, seed);
    for layer in 0..3 {
        for (module, shape) in [
            ("self_attn.q_proj", [256, 256]),
            ("self_attn.k_proj", [128, 256]),
            ("self_attn.v_proj", [128, 256]),
            ("self_attn.o_proj", [256, 256]),
            ("mlp.gate_proj", [384, 256]),
            ("mlp.up_proj", [384, 256]),
            ("mlp.down_proj", [256, 384]),
        ] {
            adapter.add(&format!("model.layers.{layer}.{module}"), shape, "BF16");
        }
    }
    adapter.write(dir);
}
