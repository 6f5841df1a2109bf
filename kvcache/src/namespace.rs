//! Namespaces: what a prompt's KV depends on besides its positions. Two requests share KV only
//! within one namespace. Plain immutable values; cloning one copies a pointer.

use crate::hash;
use std::fmt;
use std::sync::Arc;

const TAG_MODEL: u8 = 1;
const TAG_ADAPTER: u8 = 2;
const TAG_SALT: u8 = 3;
const TAG_IMAGE: u8 = 4;

/// A separate part of the tree: prompts of different namespaces never share a block.
///
/// `Namespace::default()` is the base: no adapter, no salt. Others are made by
/// [`Namespace::builder`]. Each field is stored with a tag and its length, so two namespaces are
/// equal only if the same fields were given the same values, whatever bytes these hold.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct Namespace {
    /// The encoding; absent for the base. First word: the number of bytes that follow.
    words: Option<Arc<[u32]>>,
    /// Digest of `words`, 0 for the base.
    digest: u64,
}

impl Namespace {
    /// Starts a namespace with no field set, which would build the base namespace.
    pub fn builder() -> NamespaceBuilder {
        NamespaceBuilder::default()
    }

    /// Whether this is the base namespace.
    pub fn is_base(&self) -> bool {
        self.words.is_none()
    }

    pub(crate) fn words(&self) -> &[u32] {
        self.words.as_deref().unwrap_or_default()
    }

    pub(crate) fn from_words(words: &[u32]) -> Namespace {
        if words.is_empty() {
            return Namespace::default();
        }
        Namespace { words: Some(words.into()), digest: hash::digest(words) }
    }

    /// Where the hash chains of this namespace start in a tree with this seed.
    #[inline(always)]
    pub(crate) fn root_hash(&self, seed: u64) -> u64 {
        if self.words.is_none() { seed } else { hash::chain(seed, self.digest) }
    }
}

impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A salt may be a tenant's secret: only the digest is shown.
        match self.words {
            None => f.write_str("Namespace(base)"),
            Some(_) => write!(f, "Namespace({:016x})", self.digest),
        }
    }
}

/// Collects the fields of a [`Namespace`]. A field given twice keeps its last value.
#[derive(Clone, Debug, Default)]
pub struct NamespaceBuilder {
    model: Option<Vec<u8>>,
    adapter: Option<Vec<u8>>,
    salt: Option<Vec<u8>>,
    image: Option<Vec<u8>>,
}

impl NamespaceBuilder {
    /// The fingerprint of the weights, for a tree that serves several models.
    pub fn model(mut self, fingerprint: impl AsRef<[u8]>) -> Self {
        self.model = Some(fingerprint.as_ref().to_vec());
        self
    }

    /// An adapter by name, and which load of that name: new weights under an old name must count
    /// the generation up, or they would be served the old weights' KV.
    pub fn adapter(mut self, name: &str, generation: u64) -> Self {
        let mut bytes = generation.to_le_bytes().to_vec();
        bytes.extend_from_slice(name.as_bytes());
        self.adapter = Some(bytes);
        self
    }

    /// A cache salt: tenants with different salts cannot probe each other's prompts by timing.
    pub fn salt(mut self, salt: impl AsRef<[u8]>) -> Self {
        self.salt = Some(salt.as_ref().to_vec());
        self
    }

    /// The 128-bit content hash of an image on which all KV of the request depends.
    pub fn image(mut self, content_hash: u128) -> Self {
        self.image = Some(content_hash.to_le_bytes().to_vec());
        self
    }

    /// The namespace of the fields given; the base when none was.
    pub fn build(self) -> Namespace {
        let fields = [
            (TAG_MODEL, self.model),
            (TAG_ADAPTER, self.adapter),
            (TAG_SALT, self.salt),
            (TAG_IMAGE, self.image),
        ];
        let mut bytes = Vec::new();
        for (tag, value) in fields {
            let Some(value) = value else { continue };
            bytes.push(tag);
            bytes.extend_from_slice(&(value.len() as u64).to_le_bytes());
            bytes.extend_from_slice(&value);
        }
        if bytes.is_empty() {
            return Namespace::default();
        }
        let mut words = vec![bytes.len() as u32];
        for four in bytes.chunks(4) {
            let mut word = [0; 4];
            word[..four.len()].copy_from_slice(four);
            words.push(u32::from_le_bytes(word));
        }
        Namespace::from_words(&words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: no two different sets of fields make the same namespace, however their bytes run.
    #[test]
    fn fields_cannot_be_confused() {
        let b = Namespace::builder;
        let all = [
            b().build(),
            b().salt("").build(),
            b().model("").build(),
            b().salt("ab").build(),
            b().model("ab").build(),
            b().model("a").salt("b").build(),
            b().model("ab").salt("").build(),
            b().salt("ab\0").build(),
            b().salt("ab\0\0").build(),
            b().adapter("x", 1).build(),
            b().adapter("x", 2).build(),
            b().adapter("y", 1).build(),
            b().image(7).build(),
            b().salt(7u128.to_le_bytes()).build(),
        ];
        for (i, left) in all.iter().enumerate() {
            for (j, right) in all.iter().enumerate() {
                assert_eq!(left == right, i == j, "{i} and {j}");
            }
        }
        assert!(all[0].is_base());
        assert_eq!(b().model("a").salt("b").build(), b().salt("b").model("a").build());
    }
}
