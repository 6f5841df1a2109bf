//! Reads the files that `fixtures/make_fixtures.py` has written.

use std::path::PathBuf;

use safetensors::SafeTensors;

/// The path of a file of the fixtures.
pub(crate) fn path(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests/fixtures", name].iter().collect()
}

/// A safetensors file.
pub(crate) struct Fixture(Vec<u8>);

impl Fixture {
    /// Reads the file `name`.
    pub(crate) fn read(name: &str) -> Self {
        Self(std::fs::read(path(name)).expect("a fixture"))
    }

    /// The shape and the content of a tensor of bytes.
    pub(crate) fn bytes(&self, name: &str) -> (Vec<usize>, Vec<u8>) {
        let file = SafeTensors::deserialize(&self.0).expect("a safetensors file");
        let tensor = file.tensor(name).expect("a tensor of the script");
        (tensor.shape().to_vec(), tensor.data().to_vec())
    }
}
