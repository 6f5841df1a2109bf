//! [`Segments`]: bytes that arrive one after another.

/// Maximum size of a segment in bytes.
const SEGMENT_BYTES: usize = 256 << 10;

/// Bytes in segments of bounded size. A vector that grows copies everything that it holds, which
/// takes milliseconds for a body of some megabytes, on a thread that other requests wait for. Here
/// no call copies more than a segment plus the bytes that arrive.
#[derive(Debug, Default)]
pub(crate) struct Segments {
    /// Segments that are full.
    full: Vec<Vec<u8>>,
    last: Vec<u8>,
    len: usize,
}

impl Segments {
    /// Number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Adds bytes at the end.
    pub(crate) fn extend(&mut self, mut data: &[u8]) {
        self.len += data.len();
        while self.last.len() + data.len() > SEGMENT_BYTES {
            let (own, rest) = data.split_at(SEGMENT_BYTES - self.last.len());
            self.append(own);
            self.full.push(std::mem::replace(&mut self.last, Vec::with_capacity(SEGMENT_BYTES)));
            data = rest;
        }
        self.append(data);
    }

    /// Adds bytes to the last segment, which has room for them.
    fn append(&mut self, data: &[u8]) {
        let len = self.last.len() + data.len();
        if len > self.last.capacity() {
            let size = len.next_power_of_two().min(SEGMENT_BYTES);
            self.last.reserve_exact(size - self.last.len());
        }
        self.last.extend_from_slice(data);
    }

    /// All bytes in one piece. Copies them if there are several segments.
    pub(crate) fn join(self) -> Vec<u8> {
        if self.full.is_empty() {
            return self.last;
        }
        let mut bytes = Vec::with_capacity(self.len);
        for segment in self.full.into_iter().chain([self.last]) {
            bytes.extend_from_slice(&segment);
        }
        bytes
    }
}

impl From<Vec<u8>> for Segments {
    fn from(last: Vec<u8>) -> Self {
        Self { full: Vec::new(), len: last.len(), last }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the bytes are those that were added, in their order, whatever the sizes of the pieces,
    /// and no segment is larger than the maximum.
    #[test]
    fn segments_keep_all_bytes_in_order() {
        for piece in [1, 4096, SEGMENT_BYTES - 1, SEGMENT_BYTES, 3 * SEGMENT_BYTES + 5] {
            for len in [0, 1, SEGMENT_BYTES, SEGMENT_BYTES + 1, 7 * SEGMENT_BYTES / 2] {
                let bytes: Vec<u8> = (0..len).map(|index| (index * 31 / 7) as u8).collect();
                let mut segments = Segments::default();
                bytes.chunks(piece).for_each(|data| segments.extend(data));
                assert_eq!(segments.len(), len);
                let all = segments.full.iter().chain([&segments.last]);
                let largest = all.map(Vec::capacity).max();
                assert!(largest <= Some(SEGMENT_BYTES), "{piece} {len}");
                assert!(segments.join() == bytes, "{piece} {len}");
            }
        }
    }
}
