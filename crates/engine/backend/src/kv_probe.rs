//! A short prompt whose keys and values are a part of the format of a backend's KV.
//!
//! Names of weights, types and instruction set do not determine every bit: the approximate
//! reciprocal of AVX-512 is the maker's choice, sines come from the system's mathematics library,
//! and products on a GPU from a library of the driver's maker. KV that was computed elsewhere is
//! used only where the same prompt has the same keys and values.

use stolon_kvcache::BlockId;

use crate::{BackendSpec, KvFormat, LogitRows, SequenceSlice, SliceState, StepBatch};

/// Minimum number of tokens, unless the context or the KV store is smaller.
const TOKENS: usize = 16;

/// A step that writes all positions of the first blocks.
#[must_use]
pub fn step(spec: &BackendSpec) -> StepBatch {
    let blocks = TOKENS.div_ceil(spec.block_size).min(spec.block_count);
    let token_count = (blocks * spec.block_size).min(spec.max_positions);
    let token = |index: usize| (index * index * 31 + 7) % spec.vocab_size;
    StepBatch {
        tokens: (0..token_count).map(|index| token(index) as u32).collect(),
        sequences: vec![SequenceSlice {
            token_count,
            start: 0,
            write_from: 0,
            block_table: (0..blocks as u32).map(BlockId).collect(),
            logit_rows: LogitRows::None,
            state: spec.state.map(|_| SliceState::in_slot(0)),
            ..SequenceSlice::default()
        }],
    }
}

/// Makes the `bytes` of the blocks, and of the recurrent state, that [`step`] has written a part of
/// `format`.
pub fn add_to(format: &mut KvFormat, bytes: &[u8]) {
    let probe = blake3::hash(bytes);
    let description = format!("{}, probe {}", format.description(), &probe.to_hex()[..8]);
    let own = format.clone();
    *format = KvFormat::new(description, move || {
        const CONTEXT: &str = "stolon 2026 format of KV blocks, probed";
        let mut fingerprint = blake3::Hasher::new_derive_key(CONTEXT);
        fingerprint.update(&own.fingerprint()?).update(probe.as_bytes());
        Ok(*fingerprint.finalize().as_bytes())
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BatchChecker, StateSpec};

    /// Goal: whatever the sizes of a backend, the step is valid, and writes whole blocks if the
    /// context has room for them.
    #[test]
    fn the_step_is_valid() {
        let state = StateSpec { bytes: 100, slots: 1 };
        for (block_size, block_count, max_positions, expected) in [
            (16, 100, 4096, 16),
            (32, 100, 4096, 32),
            (1, 100, 4096, 16),
            (4, 2, 4096, 8),
            (256, 1, 4096, 256),
            (16, 1, 5, 5),
        ] {
            let spec = BackendSpec {
                vocab_size: 11,
                max_positions,
                block_size,
                block_count,
                block_bytes: 1,
                hidden_size: None,
                draws: false,
                state: (block_size > 1).then_some(state),
                ..BackendSpec::default()
            };
            let batch = step(&spec);
            BatchChecker::new(block_count).check(&batch, &spec).expect("a valid batch");
            assert_eq!(batch.tokens.len(), expected);
        }
    }

    /// Goal: other keys and values are another format.
    #[test]
    fn the_format_depends_on_the_bytes() {
        let plain = KvFormat::new("llama", || Ok([7; 32]));
        let [a, b, c] = [&[1, 2], &[1, 2], &[1, 3]].map(|bytes| {
            let mut format = plain.clone();
            add_to(&mut format, bytes);
            format
        });
        assert_eq!(a.fingerprint(), b.fingerprint());
        assert_ne!(a.fingerprint(), c.fingerprint());
        assert_ne!(a.fingerprint(), plain.fingerprint());
        assert_ne!(a.description(), c.description());
        assert!(a.description().starts_with("llama, probe "), "{a:?}");
        let mut failed = KvFormat::new("llama", || Err("changed".to_owned()));
        add_to(&mut failed, &[1]);
        assert_eq!(failed.fingerprint(), Err("changed".to_owned()));
    }
}
