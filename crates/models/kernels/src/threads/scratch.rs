//! Scratch memory for the tasks of a parallel loop, which is recycled from one call to the next.

use crate::buffer::{Buffer, Plain};
use crate::sync::{Mutex, lock};

/// Maximum number of buffers that are kept for later calls.
const COUNT_MAX: usize = 64;

/// The buffers that are not in use.
pub(super) struct ScratchPool {
    kept: Mutex<Vec<Buffer>>,
}

impl Default for ScratchPool {
    fn default() -> ScratchPool {
        ScratchPool { kept: Mutex::new(Vec::new()) }
    }
}

impl ScratchPool {
    /// A buffer of at least `bytes` bytes. It has the contents that its last user left.
    pub(super) fn take(&self, bytes: usize) -> Scratch<'_> {
        let mut kept = lock(&self.kept);
        // The smallest buffer that is large enough, so that small requests do not take the large
        // buffers.
        let fitting = (0..kept.len())
            .filter(|&index| kept[index].byte_len() >= bytes)
            .min_by_key(|&index| kept[index].byte_len());
        let buffer = match fitting {
            Some(index) => kept.swap_remove(index),
            None => {
                // If many buffers are kept, the new one replaces the smallest, which was too small.
                if kept.len() >= COUNT_MAX / 2
                    && let Some(index) = (0..kept.len()).min_by_key(|&index| kept[index].byte_len())
                {
                    kept.swap_remove(index);
                }
                drop(kept);
                Buffer::zeroed::<u8>(bytes.next_multiple_of(4096))
            }
        };
        Scratch { buffer: Some(buffer), pool: &self.kept }
    }
}

/// Scratch memory on loan from a pool.
pub(crate) struct Scratch<'a> {
    /// Always present until the loan is dropped.
    buffer: Option<Buffer>,
    pool: &'a Mutex<Vec<Buffer>>,
}

impl Scratch<'_> {
    /// The memory as a slice of at least as many elements as were requested, aligned to 64 bytes.
    pub(crate) fn slice_mut<T: Plain>(&mut self) -> &mut [T] {
        self.buffer.as_mut().map_or(&mut [], Buffer::slice_mut)
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        let mut kept = lock(self.pool);
        if kept.len() < COUNT_MAX {
            kept.extend(self.buffer.take());
        }
    }
}
