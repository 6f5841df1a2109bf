//! Blocks as plain bytes, in the order of [`KvStore::read_blocks`]. Checkpoints of recurrent states
//! are stored this way. They are copied in parts, because the states of the layers become known one
//! after the other.

use std::ops::Range;

use stolon_kvcache::BlockId;

use super::KvStore;

impl KvStore {
    /// Copies `from` to the bytes of `blocks` that begin at `offset`. The bytes of all blocks are
    /// counted as one sequence.
    ///
    /// # Panics
    /// If there is no such block, or `from` is longer than the rest of the blocks.
    pub(crate) fn write_bytes(&mut self, blocks: &[BlockId], offset: usize, from: &[u8]) {
        let (block_bytes, count) = (self.shape().block_bytes(), self.block_count());
        assert!(offset + from.len() <= blocks.len() * block_bytes, "bytes beyond the blocks");
        let mut from = from;
        for (block, part) in pieces(blocks, offset, from.len(), block_bytes) {
            let (head, rest) = from.split_at(part.len());
            let mut start = 0;
            for plane in self.planes.iter_mut().flat_map(|plane| plane.block_mut(block, count)) {
                let end = start + plane.len();
                if let Some(both) = intersection(&part, &(start..end)) {
                    let head = &head[both.start - part.start..both.end - part.start];
                    plane[both.start - start..both.end - start].copy_from_slice(head);
                }
                start = end;
            }
            from = rest;
        }
    }

    /// Copies the bytes of `blocks` that begin at `offset` to `to`. It is the reverse of
    /// [`KvStore::write_bytes`].
    ///
    /// # Panics
    /// If there is no such block, or `to` is longer than the rest of the blocks.
    pub(crate) fn read_bytes(&self, blocks: &[BlockId], offset: usize, to: &mut [u8]) {
        let (block_bytes, count) = (self.shape().block_bytes(), self.block_count());
        assert!(offset + to.len() <= blocks.len() * block_bytes, "bytes beyond the blocks");
        let mut to = to;
        for (block, part) in pieces(blocks, offset, to.len(), block_bytes) {
            let (head, rest) = to.split_at_mut(part.len());
            let mut start = 0;
            for plane in self.planes.iter().flat_map(|plane| plane.block(block, count)) {
                let end = start + plane.len();
                if let Some(both) = intersection(&part, &(start..end)) {
                    let head = &mut head[both.start - part.start..both.end - part.start];
                    head.copy_from_slice(&plane[both.start - start..both.end - start]);
                }
                start = end;
            }
            to = rest;
        }
    }
}

/// Divides `len` bytes of `blocks` that begin at `offset` by block. Each item has a block and a
/// range of its bytes.
fn pieces(
    blocks: &[BlockId],
    offset: usize,
    len: usize,
    block_bytes: usize,
) -> impl Iterator<Item = (BlockId, Range<usize>)> {
    let end = offset + len;
    (offset / block_bytes..end.div_ceil(block_bytes)).map(move |index| {
        let start = index * block_bytes;
        let part = offset.max(start) - start..end.min(start + block_bytes) - start;
        (blocks[index], part)
    })
}

fn intersection(a: &Range<usize>, b: &Range<usize>) -> Option<Range<usize>> {
    let both = a.start.max(b.start)..a.end.min(b.end);
    (!both.is_empty()).then_some(both)
}

#[cfg(test)]
mod tests {
    use super::super::tests::shape;
    use super::*;
    use crate::workers::Workers;
    use stolon_checkpoint::kv::KvType;

    /// Goal: bytes that are written in parts of any size become the bytes of the blocks, and can be
    /// read in parts of any other size. Other blocks do not change.
    #[test]
    fn bytes_are_those_of_the_blocks() {
        for kv_type in KvType::ALL {
            let mut store = KvStore::new(shape(kv_type), 5).unwrap();
            let blocks = [BlockId(3), BlockId(0), BlockId(4)];
            let len = blocks.len() * store.shape().block_bytes();
            let bytes: Vec<u8> = (0..len).map(|i| (i * i % 251) as u8).collect();
            for part in [1, 7, 100, len] {
                store.write_bytes(&blocks, 0, &vec![0xff; len]);
                for (index, part_bytes) in bytes.chunks(part).enumerate() {
                    store.write_bytes(&blocks, index * part, part_bytes);
                }
                let mut got = vec![0; len];
                store.read_blocks(&blocks, &mut got, &Workers::new(1));
                assert_eq!(got, bytes, "{kv_type}, written in parts of {part}");
                let mut got = vec![0; len];
                for (index, got) in got.chunks_mut(13).enumerate() {
                    store.read_bytes(&blocks, index * 13, got);
                }
                assert_eq!(got, bytes, "{kv_type}, read in parts");
            }
            let mut others = vec![0xff; 2 * store.shape().block_bytes()];
            store.read_blocks(&[BlockId(1), BlockId(2)], &mut others, &Workers::new(1));
            assert!(others.iter().all(|byte| *byte == 0), "{kv_type}");
        }
    }

    /// Goal: bytes beyond the end of the blocks panic instead of being written elsewhere.
    #[test]
    #[should_panic(expected = "bytes beyond the blocks")]
    fn bytes_beyond_the_blocks_panic() {
        let mut store = KvStore::new(shape(KvType::F32), 2).unwrap();
        let block_bytes = store.shape().block_bytes();
        store.write_bytes(&[BlockId(0)], block_bytes, &[0]);
    }
}
