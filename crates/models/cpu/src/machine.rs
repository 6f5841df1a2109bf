//! What a machine offers to the backend, before a model is loaded.

use std::hint::black_box;
use std::time::Instant;

use stolon_checkpoint::ModelError;
use stolon_kernels::{Path, Threads};

use crate::backend::CpuOptions;

/// The processors and the memory that a model would have in this process.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Machine {
    /// Name of the instruction set that the kernels would use.
    pub kernels: &'static str,
    /// Names of all instruction sets that the processor supports, in ascending order.
    pub supported: Vec<&'static str>,
    /// Number of threads that would compute: one for each performance core of one socket, within
    /// the process's affinity mask and the quota of its control group.
    pub threads: usize,
    /// Bytes that the process can allocate without swapping, within the limits of its control group
    /// and its own; `None` if the system does not report it.
    pub free_memory: Option<u64>,
}

impl Machine {
    /// The machine of this process.
    ///
    /// # Errors
    /// [`ModelError::InvalidOption`] if the environment variable `STOLON_CPU_PATH` names an
    /// instruction set that is unknown or not supported.
    pub fn this() -> Result<Machine, ModelError> {
        Ok(Machine {
            kernels: CpuOptions::default().path()?.name(),
            supported: Path::supported().into_iter().map(Path::name).collect(),
            threads: Threads::default_count(),
            free_memory: Some(stolon_checkpoint::memory::free_memory()).filter(|bytes| *bytes > 0),
        })
    }

    /// Measures how many bytes of memory all threads together read in a second: the best of
    /// `passes` over a buffer of `bytes`, which should be several times larger than the caches. Each
    /// token of a single sequence reads all weights once, so this bounds the speed of decoding.
    #[must_use]
    pub fn read_rate(&self, bytes: usize, passes: usize) -> f64 {
        let threads = Threads::new(self.threads);
        let buffer = vec![1_u64; (bytes / size_of::<u64>()).max(1)];
        let part = buffer.len().div_ceil(self.threads);
        let parts: Vec<&[u64]> = buffer.chunks(part).collect();
        let seconds = (0..passes.max(1)).map(|_| {
            let began = Instant::now();
            threads.for_each(parts.len(), |index| {
                black_box(parts[index].iter().fold(0_u64, |sum, value| sum.wrapping_add(*value)));
            });
            began.elapsed().as_secs_f64()
        });
        size_of_val(buffer.as_slice()) as f64 / seconds.fold(f64::INFINITY, f64::min)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the instruction set is one of those that are supported, there is a thread, and reading
    /// memory takes time.
    #[test]
    fn this_machine_is_described() {
        let machine = Machine::this().expect("the environment names no other instruction set");
        assert!(machine.supported.contains(&machine.kernels), "{machine:?}");
        assert!(machine.threads >= 1, "{machine:?}");
        let rate = machine.read_rate(1 << 20, 2);
        assert!(rate.is_finite() && rate > 0.0, "{rate}");
    }
}
