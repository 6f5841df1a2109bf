//! Writes chunks of PNG files.

/// A chunk with its length and its checksum.
pub(crate) fn chunk(kind: &[u8; 4], data: &[u8]) -> Vec<u8> {
    let of_kind = [kind, data].concat();
    let length = (data.len() as u32).to_be_bytes();
    [&length[..], &of_kind, &crc32(&of_kind).to_be_bytes()].concat()
}

fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg())
        })
    };
    !bytes.iter().fold(!0, step)
}
