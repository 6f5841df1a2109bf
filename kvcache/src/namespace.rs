//! Namespaces: everything that a prompt's KV depends on besides its positions. Requests share KV
//! only within one namespace.

use crate::hash;
use std::fmt;
use std::sync::Arc;

const TAG_MODEL: u8 = 1;
const TAG_ADAPTER: u8 = 2;
const TAG_SALT: u8 = 3;
const TAG_IMAGE: u8 = 4;

/// A separate part of the index. Prompts in different namespaces never share a block.
///
/// `Namespace::default()` is the base namespace, with no adapter and no salt. Others are built with
/// [`Namespace::builder`]. Two namespaces are equal exactly if the same fields were set to the same
/// values: each field is encoded with a tag and its length, so the bytes of one field cannot be
/// mistaken for another.
///
/// Cloning copies a pointer. A namespace needs no registration; the tree keeps it while something
/// is cached in it. Its `Debug` output shows only a digest, because a salt may be secret.
///
/// ```
/// use stolon_kvcache::Namespace;
///
/// let tenant = Namespace::builder().adapter("summaries", 1).salt("tenant 7").build();
/// assert!(Namespace::builder().build().is_base());
/// assert_ne!(tenant, Namespace::builder().adapter("summaries", 2).salt("tenant 7").build());
/// ```
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct Namespace {
    /// The encoding, absent for the base namespace. The first word is the number of bytes that
    /// follow.
    words: Option<Arc<[u32]>>,
    /// Digest of `words`, 0 for the base namespace.
    digest: u64,
}

impl Namespace {
    /// Returns a builder with no field set.
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

    /// The hash before the first block of this namespace, in a tree with this hash seed.
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

/// Builds a [`Namespace`]. If a field is set twice, the last value counts.
#[derive(Clone, Debug, Default)]
pub struct NamespaceBuilder {
    model: Option<Vec<u8>>,
    adapter: Option<Vec<u8>>,
    salt: Option<Vec<u8>>,
    image: Option<Vec<u8>>,
}

impl NamespaceBuilder {
    /// Sets a fingerprint of the model's weights, for a tree that serves several models.
    pub fn model(mut self, fingerprint: impl AsRef<[u8]>) -> Self {
        self.model = Some(fingerprint.as_ref().to_vec());
        self
    }

    /// Sets the adapter (LoRA, for example) by name and generation. When other weights are loaded
    /// under the same name, the caller must increase the generation; otherwise requests would be
    /// served KV that the old weights computed.
    pub fn adapter(mut self, name: &str, generation: u64) -> Self {
        let mut bytes = generation.to_le_bytes().to_vec();
        bytes.extend_from_slice(name.as_bytes());
        self.adapter = Some(bytes);
        self
    }

    /// Sets a cache salt. Tenants with different salts share no KV, so they cannot find out each
    /// other's prompts by timing.
    pub fn salt(mut self, salt: impl AsRef<[u8]>) -> Self {
        self.salt = Some(salt.as_ref().to_vec());
        self
    }

    /// Sets the 128-bit content hash of an image on which all KV of the request depends. (For an
    /// image at one place of the prompt, use [`TokenSpan::Image`](crate::TokenSpan::Image)
    /// instead.)
    pub fn image(mut self, content_hash: u128) -> Self {
        self.image = Some(content_hash.to_le_bytes().to_vec());
        self
    }

    /// Returns the namespace; the base namespace if no field was set.
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

    /// Goal: different fields never build the same namespace, whatever bytes they hold.
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
