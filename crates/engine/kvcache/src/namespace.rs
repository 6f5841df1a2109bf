//! Namespaces: everything that a prompt's KV depends on besides its positions. Requests share KV
//! only within one namespace.

use crate::hash;
use hmac_sha256::{HMAC, Hash as Sha256};
use std::fmt;
use std::hash::BuildHasher;
use std::sync::OnceLock;

const TAG_MODEL: u8 = 1;
const TAG_ADAPTER: u8 = 2;
const TAG_SALT: u8 = 3;
const TAG_IMAGE: u8 = 4;

/// A separate part of the index. Prompts in different namespaces never share a block.
///
/// `Namespace::default()` is the base namespace, with no adapter and no salt. Others are built with
/// [`Namespace::builder`], which reduces its fields to a keyed digest of 256 bits (HMAC-SHA256). So
/// a namespace has 32 bytes, however long the salt is, and is cheap to copy and compare. It
/// needs no registration; the tree keeps it while something is cached in it.
///
/// Two namespaces are equal if their digests are: if the same fields were set to the same values
/// with the same key. Finding different values with one digest would take about 2^128 attempts. A
/// salt cannot be computed from the digest, and without the key it cannot be guessed from it
/// either. Each process has its own random key, unless the caller sets one with
/// [`NamespaceBuilder::key`].
///
/// ```
/// use stolon_kvcache::Namespace;
///
/// let tenant = Namespace::builder().adapter("summaries", 1).salt("tenant 7").build();
/// assert!(Namespace::builder().build().is_base());
/// assert_ne!(tenant, Namespace::builder().adapter("summaries", 2).salt("tenant 7").build());
/// assert_eq!(tenant, Namespace::from_bytes(tenant.to_bytes()));
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct Namespace {
    /// All zero for the base namespace. No other namespace has this digest, except with a
    /// probability of 2^-256.
    digest: [u8; 32],
}

impl Namespace {
    /// Returns a builder with no field set.
    pub fn builder() -> NamespaceBuilder {
        NamespaceBuilder::default()
    }

    /// Whether this is the base namespace.
    #[inline(always)]
    pub fn is_base(&self) -> bool {
        self.digest == [0; 32]
    }

    /// The digest, to send the namespace to another process. 32 zeros for the base namespace.
    pub fn to_bytes(self) -> [u8; 32] {
        self.digest
    }

    /// The namespace with the digest that [`to_bytes`](Namespace::to_bytes) returned.
    pub fn from_bytes(digest: [u8; 32]) -> Namespace {
        Namespace { digest }
    }

    /// The digest as the tree stores it.
    #[inline(always)]
    pub(crate) fn words(&self) -> [u32; 8] {
        let (fours, _) = self.digest.as_chunks::<4>();
        std::array::from_fn(|index| u32::from_le_bytes(fours[index]))
    }

    /// The reverse of [`words`](Namespace::words).
    pub(crate) fn from_words(words: &[u32]) -> Namespace {
        let mut digest = [0; 32];
        for (four, word) in digest.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *four = word.to_le_bytes();
        }
        Namespace { digest }
    }

    /// The hash before the first block of this namespace, in a tree with this hash seed.
    #[inline(always)]
    pub(crate) fn root_hash(&self, seed: u64) -> u64 {
        if self.is_base() { seed } else { hash::chain(seed, hash::digest(&self.words())) }
    }
}

impl fmt::Debug for Namespace {
    /// Shows the first 8 bytes of the digest.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_base() {
            return f.write_str("Namespace(base)");
        }
        let start = self.digest.first_chunk().map_or(0, |eight| u64::from_be_bytes(*eight));
        write!(f, "Namespace({start:016x})")
    }
}

/// Builds a [`Namespace`]. If a field is set twice, the last value counts. The builder keeps a
/// digest of each field and not the value itself, so its size does not depend on the values.
#[derive(Clone, Default)]
pub struct NamespaceBuilder {
    model: Option<[u8; 32]>,
    adapter: Option<[u8; 32]>,
    salt: Option<[u8; 32]>,
    image: Option<[u8; 32]>,
    key: Option<[u8; 32]>,
}

impl NamespaceBuilder {
    /// Sets a fingerprint of the model's weights, for a tree that serves several models.
    pub fn model(mut self, fingerprint: impl AsRef<[u8]>) -> Self {
        self.model = Some(Sha256::hash(fingerprint.as_ref()));
        self
    }

    /// Sets the adapter (LoRA, for example) by name and generation. When other weights are loaded
    /// under the same name, the caller must increase the generation; otherwise requests would be
    /// served KV that the old weights computed.
    pub fn adapter(mut self, name: &str, generation: u64) -> Self {
        let mut hasher = Sha256::new();
        hasher.update(generation.to_le_bytes());
        hasher.update(name);
        self.adapter = Some(hasher.finalize());
        self
    }

    /// Sets a cache salt, of any length. Tenants with different salts share no KV, so they cannot
    /// find out each other's prompts by timing.
    pub fn salt(mut self, salt: impl AsRef<[u8]>) -> Self {
        self.salt = Some(Sha256::hash(salt.as_ref()));
        self
    }

    /// Sets the 128-bit content hash of an image on which all KV of the request depends. (For an
    /// image at one place of the prompt, use [`TokenSpan::Image`](crate::TokenSpan::Image)
    /// instead.)
    pub fn image(mut self, content_hash: u128) -> Self {
        self.image = Some(Sha256::hash(&content_hash.to_le_bytes()));
        self
    }

    /// Sets the key of the digest. Replicas of a service, and a router in front of them, must use
    /// the same key, so that the same fields give the same namespace and the same block hashes in
    /// each process. Keep it secret: with it, a short salt can be found by trying all. Without
    /// this call, a key is used that was drawn at random when the process built its first
    /// namespace. The base namespace does not depend on the key.
    pub fn key(mut self, key: [u8; 32]) -> Self {
        self.key = Some(key);
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
        if fields.iter().all(|(_, value)| value.is_none()) {
            return Namespace::default();
        }
        let mut mac = HMAC::new(self.key.unwrap_or_else(process_key));
        // Each field has a tag and a fixed length, so none can be mistaken for another.
        for (tag, value) in fields {
            if let Some(value) = value {
                mac.update([tag]);
                mac.update(value);
            }
        }
        Namespace { digest: mac.finalize() }
    }
}

impl fmt::Debug for NamespaceBuilder {
    /// Shows which fields are set. Their digests have no key yet, so a salt could be guessed from
    /// them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NamespaceBuilder")
            .field("model", &self.model.is_some())
            .field("adapter", &self.adapter.is_some())
            .field("salt", &self.salt.is_some())
            .field("image", &self.image.is_some())
            .field("key", &self.key.is_some())
            .finish()
    }
}

/// The key of this process. It has the 128 bits of randomness with which the standard library
/// protects hash tables, so that no further dependency is needed.
fn process_key() -> [u8; 32] {
    static KEY: OnceLock<[u8; 32]> = OnceLock::new();
    *KEY.get_or_init(|| {
        let random = std::hash::RandomState::new();
        let mut hasher = Sha256::new();
        for word in 0u64..4 {
            hasher.update(random.hash_one(word).to_le_bytes());
        }
        hasher.finalize()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: different fields never build the same namespace, for any bytes that they hold.
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
    /// Goal: a key gives the same namespaces in each process, and other keys give others. The base
    /// namespace is the same for all keys.
    #[test]
    fn the_key_decides_the_digest() {
        let salted = |key| Namespace::builder().key([key; 32]).salt("a").build();
        assert_eq!(salted(1), salted(1));
        assert_ne!(salted(1), salted(2));
        assert_ne!(salted(1), Namespace::builder().salt("a").build());
        assert_eq!(Namespace::builder().key([1; 32]).build(), Namespace::default());
        // Computed with Python's hmac: HMAC-SHA256(key, tag 3, SHA-256(salt)).
        assert_eq!(salted(1).to_bytes()[..4], [0xba, 0x0f, 0xde, 0x21]);
    }

    /// Goal: a namespace is the same after it was stored in the tree or sent as bytes.
    #[test]
    fn namespaces_can_be_rebuilt() {
        for namespace in [Namespace::default(), Namespace::builder().salt("a").build()] {
            assert_eq!(Namespace::from_words(&namespace.words()), namespace);
            assert_eq!(Namespace::from_bytes(namespace.to_bytes()), namespace);
        }
    }

    /// Goal: neither a namespace nor its builder shows a salt.
    #[test]
    fn debug_output_shows_no_salt() {
        let builder = Namespace::builder().salt("hunter2");
        let shown = format!("{builder:?} {:?}", builder.clone().build());
        assert!(!shown.contains("hunter2"), "{shown}");
        let bytes = format!("{:?}", "hunter2".as_bytes());
        assert!(!shown.contains(bytes.trim_matches(['[', ']'])), "{shown}");
    }
}
