//! Memory of namespaces: what clients send as cache salts must not fill memory outside the KV
//! budget.

use stolon_kvcache::{BlockId, Namespace, TreeWriter, prefix_tree};

const SALT_COUNT: u32 = 80;
const SALT_LENGTH: usize = 1 << 20;

/// Commits one block in a new namespace for each of many long salts.
fn fill(writer: &mut TreeWriter) {
    let mut salt = vec![b's'; SALT_LENGTH];
    for number in 0..SALT_COUNT {
        salt[..4].copy_from_slice(&number.to_le_bytes());
        let namespace = Namespace::builder().salt(&salt).build();
        let mut lease = writer.acquire(&namespace, &[1]);
        let _ = writer.commit(&mut lease, &[1], &[BlockId(number)]).expect("a valid commit");
        assert_eq!(lease.len(), 1);
    }
}

/// Goal: a namespace takes the same memory for a salt of any length, and building one makes
/// no copy of the salt.
#[test]
fn long_salts_take_no_memory() {
    let (mut writer, _reader) = prefix_tree(1).expect("a block size");
    let used = allocation_counter::measure(|| fill(&mut writer));
    assert_eq!(writer.counts().namespaces, SALT_COUNT as usize);
    assert!(writer.index_bytes() < 1000 * SALT_COUNT as usize, "{} bytes", writer.index_bytes());
    let limit = SALT_LENGTH as u64 + 2000 * u64::from(SALT_COUNT);
    assert!(used.bytes_max < limit, "at most {limit} bytes at a time, got {}", used.bytes_max);
}
