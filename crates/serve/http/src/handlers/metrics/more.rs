//! [`CounterSource`]: counters of a program around the server.

use std::fmt;
use std::sync::Arc;

/// A counter in `/metrics`, at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterValue {
    /// The name without the prefix `stolon:` and without `_total`, such as `kv_event_batches`. It
    /// must differ from the names of all other metrics.
    pub name: &'static str,
    /// Description of the counter, as a sentence.
    pub help: &'static str,
    /// The count since the program started. It never decreases.
    pub value: u64,
}

/// Counters of a program around the server, which `/metrics` adds to the engine's. They are read at
/// each scrape.
#[derive(Clone)]
pub struct CounterSource(Arc<dyn Fn() -> Vec<CounterValue> + Send + Sync>);

impl CounterSource {
    /// Counters that `read` returns. It must return the same names each time, and not block.
    pub fn new(read: impl Fn() -> Vec<CounterValue> + Send + Sync + 'static) -> Self {
        Self(Arc::new(read))
    }

    pub(super) fn read(&self) -> Vec<CounterValue> {
        (self.0)()
    }
}

impl fmt::Debug for CounterSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CounterSource").finish_non_exhaustive()
    }
}
