//! The metrics of LoRA adapters.

use std::fmt;

use stolon::AdapterInfo;

use super::Output;

/// Writes the metrics of the adapters that are loaded, if there are any or have been.
pub(super) fn adapters(
    out: &mut Output<'_>,
    loaded: &[AdapterInfo],
    evictions: u64,
) -> fmt::Result {
    if loaded.is_empty() && evictions == 0 {
        return Ok(());
    }
    let values = |value: fn(&AdapterInfo) -> u64| -> Vec<(&str, u64)> {
        loaded.iter().map(|adapter| (adapter.name.as_str(), value(adapter))).collect()
    };
    let help = "Requests with the LoRA adapter, since it was loaded.";
    out.counters("lora_requests", help, "adapter", &values(|adapter| adapter.requests))?;
    let help = "Whether a request uses the LoRA adapter.";
    out.gauges("lora_in_use", help, "adapter", &values(|adapter| u64::from(adapter.in_use)))?;
    let help = "Bytes of memory that the weights of the LoRA adapter take now.";
    let bytes = |adapter: &AdapterInfo| if adapter.in_memory { adapter.bytes } else { 0 };
    out.gauges("lora_memory_bytes", help, "adapter", &values(bytes))?;
    let help = "Times that the weights of an idle LoRA adapter left the memory for others.";
    out.counter("lora_evictions", help, evictions)
}
