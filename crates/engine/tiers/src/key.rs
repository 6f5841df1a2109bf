//! [`ChainKey`]: the key of a prefix.

use std::fmt;

use stolon_kvcache::{ImageSpan, Namespace, TokenSpan};

use crate::tokens::RecordTokens;

/// Identifies a prefix: its KV format, its namespace and all its tokens. Keys are chained: the key
/// of a longer prefix follows from the key of a shorter one and the tokens in between. Positions of
/// images count by the content of the images, so that all processes have the same keys.
///
/// A key has 256 bits of BLAKE3, so two prefixes with one key cannot be found.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChainKey([u8; 32]);

impl ChainKey {
    /// The key of the empty prefix of a namespace, for KV with this fingerprint.
    #[must_use]
    pub fn root(fingerprint: &[u8; 32], namespace: &Namespace) -> ChainKey {
        let mut hasher = blake3::Hasher::new_derive_key("stolon 2026 keys of stored KV: root");
        hasher.update(fingerprint).update(&namespace.to_bytes());
        ChainKey(*hasher.finalize().as_bytes())
    }

    /// The key of this prefix followed by `tokens`, which have no image.
    #[must_use]
    pub fn then(&self, tokens: &[u32]) -> ChainKey {
        self.then_named(tokens.iter().map(|&token| (token, None)))
    }

    /// The key of this prefix followed by the tokens of a record.
    pub(crate) fn then_record(&self, record: &RecordTokens) -> ChainKey {
        self.then_named(record.named())
    }

    /// The key of this prefix followed by positions. Each one of an image is followed by the image,
    /// which other positions are not, so no two sequences of positions are hashed as the same
    /// bytes.
    fn then_named(&self, positions: impl Iterator<Item = (u32, Option<ImageSpan>)>) -> ChainKey {
        let mut bytes = Vec::new();
        for (position, image) in positions {
            let Some(ImageSpan { content_hash, kv_len, columns }) = image else {
                bytes.extend(position.to_le_bytes());
                continue;
            };
            bytes.extend(TokenSpan::with_image_number(position, 0).to_le_bytes());
            bytes.extend(content_hash.to_le_bytes());
            bytes.extend(kv_len.to_le_bytes());
            bytes.extend(columns.to_le_bytes());
        }
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(&bytes);
        ChainKey(*hasher.finalize().as_bytes())
    }

    /// The 32 bytes of the key.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The key with these bytes.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 32]) -> ChainKey {
        ChainKey(bytes)
    }

    /// The key as 64 hexadecimal digits.
    #[must_use]
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The reverse of [`ChainKey::to_hex`]; `None` for any other string.
    #[must_use]
    pub fn from_hex(text: &str) -> Option<ChainKey> {
        let digits = text.as_bytes();
        if digits.len() != 64 || !digits.iter().all(|d| matches!(d, b'0'..=b'9' | b'a'..=b'f')) {
            return None;
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(ChainKey(bytes))
    }
}

impl fmt::Debug for ChainKey {
    /// Shows the first 8 bytes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChainKey({})", &self.to_hex()[..16])
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use stolon_kvcache::TokenSpanInterner;

    use super::*;
    use crate::tokens::NamedTokens;

    /// Goal: every part of a key's input changes the key, and it does not depend on how the tokens
    /// are cut, except where a record ends.
    #[test]
    fn keys_depend_on_format_namespace_and_all_tokens() {
        let base = Namespace::default();
        let salted = Namespace::builder().salt("x").build();
        let root = ChainKey::root(&[1; 32], &base);
        let keys = [
            root,
            ChainKey::root(&[2; 32], &base),
            ChainKey::root(&[1; 32], &salted),
            root.then(&[]),
            root.then(&[1]),
            root.then(&[2]),
            root.then(&[1, 2]),
            root.then(&[1]).then(&[2]),
            root.then(&[0x0201]),
        ];
        for (index, key) in keys.iter().enumerate() {
            assert!(!keys[..index].contains(key), "{index}");
            assert_eq!(ChainKey::from_hex(&key.to_hex()), Some(*key));
        }
        assert_eq!(root.then(&[1, 2]), ChainKey::root(&[1; 32], &base).then(&[1, 2]));
        for wrong in ["", "+1", &"G".repeat(64), &"ab".repeat(33), &"é".repeat(32)] {
            assert_eq!(ChainKey::from_hex(wrong), None);
        }
    }
    /// Goal: a key depends on the content and the length of an image and on where it ends, and not
    /// on the number that a process has given to it.
    #[test]
    fn keys_depend_on_the_content_of_images() {
        let root = ChainKey::root(&[1; 32], &Namespace::default());
        let key = |before: u128, content_hash: u128, kv_len: u32, len: usize| {
            let (interner, mut tokens) = (TokenSpanInterner::new(4), Vec::new());
            let image = |content_hash| TokenSpan::Image { content_hash, kv_len, columns: 0 };
            interner.append(image(before), &mut tokens).expect("in range");
            tokens = vec![7];
            interner.append(image(content_hash), &mut tokens).expect("in range");
            tokens.truncate(len);
            let named = NamedTokens::new(Arc::new(tokens.clone()), &interner);
            (root.then_record(&named.record(0..tokens.len()).expect("named")), tokens)
        };
        let (first, other) = (key(1, 2, 4, 5), key(2, 2, 4, 5));
        assert_eq!(first.0, other.0);
        assert_ne!(first.1, other.1, "the numbers differ");
        for different in
            [key(1, 3, 4, 5), key(1, 2 + (1 << 100), 4, 5), key(1, 2, 5, 5), key(1, 2, 4, 4)]
        {
            assert_ne!(first.0, different.0);
        }
    }
}
