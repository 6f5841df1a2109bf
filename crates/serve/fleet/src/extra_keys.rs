//! The extra keys of vLLM, on which the hashes of blocks depend in addition to token ids: the
//! namespace, and the images of each block.

use std::collections::HashMap;
use std::sync::Arc;

use serde::Serialize;
use stolon::{CacheEvent, Engine, ImageSpan, Namespace, TokenSpan};

/// This prefix tells Dynamo that a key belongs to a namespace, whose blocks it keeps apart. To
/// other routers the whole key is opaque.
const NAMESPACE_PREFIX: &str = "dynamo-cache-salt:";
/// The name of an image that the engine has forgotten. No request can match its blocks any longer.
const FORGOTTEN: &str = "forgotten";

/// Resolves the numbers and namespaces in an engine's events.
pub(crate) trait Names {
    /// The name of the adapter that computes the KV of a namespace, if the namespace belongs to
    /// one.
    fn adapter(&self, namespace: &Namespace) -> Option<Arc<str>>;

    /// The image that a position is part of, if it is remembered.
    fn image(&self, position: u32) -> Option<ImageSpan>;

    /// The token that has the place of an image in the model's prompts.
    fn image_token(&self) -> u32;
}

impl Names for Engine {
    fn adapter(&self, namespace: &Namespace) -> Option<Arc<str>> {
        self.adapter_of(namespace)
    }

    fn image(&self, position: u32) -> Option<ImageSpan> {
        self.cache().image_at(position)
    }

    fn image_token(&self) -> u32 {
        self.model_info().image_token_id.unwrap_or_default()
    }
}

/// A key of a block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub(crate) enum ExtraKey {
    /// The hash of an image, and where the image begins, counted from the start of the block.
    Image(String, i64),
    /// A namespace other than the base one.
    Namespace(String),
}

/// The keys of each block; `None` for a block without any.
type Keys = Vec<Option<Vec<ExtraKey>>>;

/// Makes the keys of the events of a batch, in their order.
#[derive(Debug, Default)]
pub(crate) struct ExtraKeys {
    /// The blocks that end inside an image, by their hashes, each with the number of positions of
    /// the image in it and in the blocks before it.
    open: HashMap<u64, i64>,
}

impl ExtraKeys {
    /// The token ids of a run of blocks, with the model's token at the positions of images, and the
    /// keys of the blocks; `None` if no block has one.
    pub(crate) fn of(&mut self, event: &CacheEvent, names: &dyn Names) -> (Vec<u32>, Option<Keys>) {
        let CacheEvent::Stored { namespace, parent, hashes, positions } = event else {
            return (Vec::new(), None);
        };
        let block_size = (positions.len() / hashes.len().max(1)).max(1);
        let mut keys: Keys = vec![None; hashes.len()];
        let before = parent.and_then(|parent| self.open.get(&parent).copied());
        let mut begun = before.or_else(|| begun_before(positions, names));
        let mut start = None;
        for (at, &position) in positions.iter().enumerate() {
            if !TokenSpan::is_image(position) {
                continue;
            }
            let is_first = start.is_none();
            let start_at = *start.get_or_insert(at as i64 - begun.take().unwrap_or(0));
            let block = at / block_size;
            if (is_first || at.is_multiple_of(block_size))
                && let Some(block_keys) = keys.get_mut(block)
            {
                let hash =
                    names.image(position).map(|image| format!("{:032x}", image.content_hash));
                let offset = start_at - (block * block_size) as i64;
                let key = ExtraKey::Image(hash.unwrap_or_else(|| FORGOTTEN.to_owned()), offset);
                block_keys.get_or_insert_default().push(key);
            }
            if TokenSpan::may_end_after(position) {
                start = None;
            }
        }
        if let (Some(start), Some(&last)) = (start, hashes.last()) {
            self.open.insert(last, positions.len() as i64 - start);
        }
        if parent.is_none()
            && !namespace.is_base()
            && let Some(first) = keys.first_mut()
        {
            first.get_or_insert_default().push(namespace_key(namespace));
        }
        let token = |&position: &u32| match TokenSpan::is_image(position) {
            true => names.image_token(),
            false => position,
        };
        let has_keys = keys.iter().any(Option::is_some);
        (positions.iter().map(token).collect(), has_keys.then_some(keys))
    }
}

/// How many positions of an image are before a run that begins inside it, if the image ends within
/// the run.
fn begun_before(positions: &[u32], names: &dyn Names) -> Option<i64> {
    let image = names.image(*positions.first()?)?;
    let inner = positions.iter().take_while(|&&position| !TokenSpan::may_end_after(position));
    let inner = inner.count();
    let got = inner + 1;
    (inner < positions.len()).then(|| i64::from(image.kv_len) - got as i64)
}

/// The namespace, as a key of the first block. The other hashes follow from it.
fn namespace_key(namespace: &Namespace) -> ExtraKey {
    let digits = namespace.to_bytes().map(|byte| format!("{byte:02x}"));
    ExtraKey::Namespace(NAMESPACE_PREFIX.to_owned() + &digits.concat())
}

#[cfg(test)]
pub(crate) mod tests {
    use stolon_kvcache::TokenSpanInterner;

    use super::*;

    /// Names of tests: an adapter's name for one namespace, and images of an interner.
    pub(crate) struct TestNames {
        pub(crate) adapter: Option<(Namespace, &'static str)>,
        pub(crate) images: TokenSpanInterner,
    }

    impl TestNames {
        pub(crate) fn new() -> TestNames {
            TestNames { adapter: None, images: TokenSpanInterner::new(2) }
        }
    }

    impl Names for TestNames {
        fn adapter(&self, namespace: &Namespace) -> Option<Arc<str>> {
            let adapter = self.adapter.filter(|(of, _)| of == namespace);
            adapter.map(|(_, name)| name.into())
        }

        fn image(&self, position: u32) -> Option<ImageSpan> {
            self.images.image_at(position)
        }

        fn image_token(&self) -> u32 {
            99
        }
    }

    fn stored(parent: Option<u64>, first: u64, blocks: usize, positions: &[u32]) -> CacheEvent {
        CacheEvent::Stored {
            namespace: Namespace::default(),
            parent,
            hashes: (first..first + blocks as u64).collect(),
            positions: positions.to_vec(),
        }
    }

    /// The keys of each block, as hash and offset.
    fn keys(keys: Option<Keys>) -> Vec<Vec<(u128, i64)>> {
        let key = |key: ExtraKey| match key {
            ExtraKey::Image(hash, offset) => {
                (u128::from_str_radix(&hash, 16).expect("hexadecimal digits"), offset)
            }
            ExtraKey::Namespace(name) => panic!("{name}"),
        };
        let block =
            |block: Option<Vec<ExtraKey>>| block.unwrap_or_default().into_iter().map(key).collect();
        keys.expect("keys").into_iter().map(block).collect()
    }

    /// Goal: each block names the images in it, and where they begin, however the blocks are
    /// divided into events; text has the tokens that it had.
    #[test]
    fn blocks_name_their_images() {
        let names = TestNames::new();
        let mut prompt = vec![1, 2];
        for (content_hash, kv_len) in [(7, 9), (1 << 100, 3), (1 << 100, 3)] {
            let image = TokenSpan::Image { content_hash, kv_len, columns: 0 };
            names.images.append(image, &mut prompt).expect("in range");
        }
        prompt.extend([3, 4, 5]);
        let expected: [&[(u128, i64)]; 5] = [
            &[(7, 2)],
            &[(7, -2)],
            &[(7, -6), (1 << 100, 3)],
            &[(1 << 100, -1), (1 << 100, 2)],
            &[(1 << 100, -2)],
        ];
        let tokens: Vec<u32> = [1, 2].into_iter().chain([99; 15]).chain([3, 4, 5]).collect();
        let (got, whole) = ExtraKeys::default().of(&stored(None, 0, 5, &prompt), &names);
        assert_eq!((got, keys(whole)), (tokens, expected.map(<[_]>::to_vec).to_vec()));
        // The whole cache, with one event per block.
        let mut extra = ExtraKeys::default();
        for (block, positions) in prompt.chunks(4).enumerate() {
            let parent = block.checked_sub(1).map(|parent| parent as u64);
            let event = stored(parent, block as u64, 1, positions);
            assert_eq!(keys(extra.of(&event, &names).1), [expected[block].to_vec()], "{block}");
        }
        // The continuation of a prefix that was stored before: only the end of the image is new.
        let (_, rest) = ExtraKeys::default().of(&stored(Some(0), 1, 4, &prompt[4..]), &names);
        assert_eq!(keys(rest), expected[1..].iter().map(|keys| keys.to_vec()).collect::<Vec<_>>());
    }

    /// Goal: blocks without images have no keys, and an image that is not remembered has a name
    /// that no image has.
    #[test]
    fn forgotten_images_have_a_name_of_their_own() {
        let names = TestNames::new();
        assert_eq!(ExtraKeys::default().of(&stored(None, 1, 2, &[1; 8]), &names).1, None);
        let (mut prompt, other) = (Vec::new(), &mut Vec::new());
        let image = |content_hash| TokenSpan::Image { content_hash, kv_len: 4, columns: 0 };
        names.images.append(image(0), &mut prompt).expect("in range");
        for content_hash in 1..9 {
            names.images.append(image(content_hash), other).expect("in range");
        }
        let (tokens, keys) = ExtraKeys::default().of(&stored(None, 1, 1, &prompt), &names);
        assert_eq!(tokens, [99; 4]);
        assert_eq!(keys, Some(vec![Some(vec![ExtraKey::Image("forgotten".to_owned(), 0)])]));
    }
}
