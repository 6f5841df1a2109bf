//! The adapters of the fake backend. An adapter is any file; its contents decide the first mark
//! that the marks of a sequence continue. So a position whose mark another adapter has computed
//! does not continue the one before, and a step that reads it fails.

use std::path::Path;

use super::marks::mix;
use crate::{Adapter, AdapterLoadError, AdapterLoader};

/// The weights of an adapter: the value that its marks start from.
struct Seed(u64);

/// An adapter of the fake backend, as the file with `contents` has it. Adapters with different
/// contents generate different tokens.
#[must_use]
pub fn fake_adapter(contents: &[u8]) -> Adapter {
    let fold = |hash, byte: &u8| mix(hash ^ u64::from(*byte));
    let seed = contents.iter().fold(mix(contents.len() as u64), fold) | 1;
    let mut fingerprint = [0; 32];
    fingerprint[..8].copy_from_slice(&seed.to_le_bytes());
    Adapter::new(fingerprint, contents.len() as u64, 1, Seed(seed))
}

/// The value that the marks of a sequence with this adapter start from; 0 without an adapter,
/// `None` for an adapter of another backend.
pub(super) fn seed(adapter: Option<&Adapter>) -> Option<u64> {
    adapter.map_or(Some(0), |adapter| adapter.weights::<Seed>().map(|seed| seed.0))
}

/// Reads adapters from files.
#[derive(Debug)]
pub(super) struct FakeLoader;

impl AdapterLoader for FakeLoader {
    fn load(&self, path: &Path, bytes_max: u64) -> Result<Adapter, AdapterLoadError> {
        let file = path.display().to_string();
        let not_found = |error| AdapterLoadError::NotFound(format!("{file}: {error}"));
        let contents = std::fs::read(path).map_err(not_found)?;
        if contents.len() as u64 > bytes_max {
            let reason = format!("{file}: expected at most {bytes_max} bytes, got more");
            return Err(AdapterLoadError::TooLarge(reason));
        }
        if contents.is_empty() {
            return Err(AdapterLoadError::Invalid(format!(
                "{file}: expected an adapter, got nothing"
            )));
        }
        Ok(fake_adapter(&contents))
    }
}
