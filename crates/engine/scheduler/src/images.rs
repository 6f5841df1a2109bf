//! Images of prompts: where they are, which of them have to be encoded, and the cache of embeddings
//! that the encoder returned.
//!
//! An image takes an atomic token span of the prompt. Its positions can be computed when it has been
//! *encoded*, which is work of the executor like a step. An image whose positions are all in the
//! prefix cache is not encoded. A step encodes a part of one image, so that others do not wait for
//! the rest; the images of different tenants take turns.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use stolon_backend::{ImageEmbeddings, ImageInput, SliceImage, rotary_len};
use stolon_kvcache::Namespace;

/// Longest time for which a step encodes an image while no other request waits for the step.
pub(crate) const ENCODE_TIME_MAX: Duration = Duration::from_millis(500);

/// An image of a prompt.
#[derive(Clone, Debug)]
pub struct PromptImage {
    /// Its first position in the prompt.
    pub start: usize,
    /// What is encoded.
    pub input: Arc<ImageInput>,
}

/// The pixels of these images in bytes.
pub(crate) fn pixel_bytes(images: &[PromptImage]) -> usize {
    images.iter().map(|image| image.input.pixels.len()).sum()
}

impl PromptImage {
    /// Its positions in the prompt.
    #[must_use]
    pub fn positions(&self) -> Range<usize> {
        self.start..self.start.saturating_add(self.input.kv_len)
    }

    /// The same image without its pixels, which can be used as long as its KV is cached or stored.
    pub(crate) fn without_pixels(&self) -> PromptImage {
        let ImageInput { content_hash, kv_len, full_attention, columns, size, tiles, pixels: _ } =
            *self.input;
        let pixels = Vec::new();
        let input =
            ImageInput { content_hash, kv_len, full_attention, columns, size, tiles, pixels };
        PromptImage { start: self.start, input: Arc::new(input) }
    }
}

/// The images of a sequence, in order of position, and the embeddings of those that are needed next.
#[derive(Debug, Default)]
pub(crate) struct SequenceImages {
    all: Arc<[PromptImage]>,
    /// For each image its embeddings, from when it was encoded until it was computed. Empty, or as
    /// long as `all`.
    embeddings: Vec<Option<ImageEmbeddings>>,
}

impl SequenceImages {
    pub(crate) fn new(all: Arc<[PromptImage]>) -> SequenceImages {
        SequenceImages { embeddings: vec![None; all.len()], all }
    }

    /// All of them.
    pub(crate) fn all(&self) -> &Arc<[PromptImage]> {
        &self.all
    }

    /// Number of their positions.
    pub(crate) fn positions(&self) -> usize {
        self.all.iter().map(|image| image.input.kv_len).sum()
    }

    /// The position after the last image; 0 if there is none.
    pub(crate) fn end(&self) -> usize {
        self.all.last().map_or(0, |image| image.positions().end)
    }

    /// Whether no image has positions after the first `matched`.
    pub(crate) fn ends_within(&self, matched: usize) -> bool {
        self.done(matched) == self.all.len()
    }

    /// The images that have positions after the first `computed`.
    fn pending(&self, computed: usize) -> impl Iterator<Item = (usize, &PromptImage)> {
        self.all.iter().enumerate().skip(self.done(computed))
    }

    /// Number of images that end within the first `computed` positions.
    fn done(&self, computed: usize) -> usize {
        self.all.partition_point(|image| image.positions().end <= computed)
    }

    /// The first image after `computed` positions that has to be encoded.
    pub(crate) fn next_to_encode(&self, computed: usize) -> Option<&PromptImage> {
        let mut pending = self.pending(computed);
        pending.find(|(index, _)| self.embeddings[*index].is_none()).map(|(_, image)| image)
    }

    /// The first image after `computed` positions whose positions are computed in one step, because
    /// they attend to each other, and the start of the next such image.
    pub(crate) fn next_whole(&self, computed: usize) -> Option<(Range<usize>, Option<usize>)> {
        let mut whole = self.pending(computed).filter(|(_, image)| image.input.full_attention);
        let first = whole.next()?.1.positions();
        Some((first, whole.next().map(|(_, image)| image.start)))
    }

    /// Keeps the embeddings of all images with the content of `input` that have positions after the
    /// first `computed`.
    pub(crate) fn keep(
        &mut self,
        input: &ImageInput,
        embeddings: &ImageEmbeddings,
        computed: usize,
    ) {
        for (image, kept) in self.all.iter().zip(&mut self.embeddings) {
            if content(&image.input) == content(input) && image.positions().end > computed {
                *kept = Some(embeddings.clone());
            }
        }
    }

    /// Forgets the embeddings of the images that end within the first `computed` positions.
    pub(crate) fn forget(&mut self, computed: usize) {
        let done = self.done(computed);
        self.embeddings[..done].fill(None);
    }

    /// How many rotary positions the images that end within the first `computed` positions have
    /// skipped. It follows from the prefix alone.
    pub(crate) fn rotary_lag(&self, computed: usize) -> usize {
        let skipped = |image: &PromptImage| {
            let ImageInput { kv_len, columns, .. } = *image.input;
            kv_len - rotary_len(kv_len, columns)
        };
        self.all[..self.done(computed)].iter().map(skipped).sum()
    }

    /// The images with positions in `positions`, which are all encoded.
    pub(crate) fn within(&self, positions: &Range<usize>) -> Vec<SliceImage> {
        let begun = self.pending(positions.start);
        let begun = begun.take_while(|(_, image)| image.start < positions.end);
        let slice_image = |(index, image): (usize, &PromptImage)| {
            Some(SliceImage {
                start: image.start,
                len: image.input.kv_len,
                full_attention: image.input.full_attention,
                columns: image.input.columns,
                embeddings: self.embeddings[index].clone()?,
            })
        };
        begun.filter_map(slice_image).collect()
    }
}

/// The part of an image that its embeddings depend on: the hash of its content, and its length in
/// positions.
type Content = (u128, usize);

fn content(input: &ImageInput) -> Content {
    (input.content_hash, input.kv_len)
}

/// An image in a namespace. Namespaces do not share embeddings: nobody can find out by timing
/// whether somebody else has shown the same picture.
pub(crate) type ImageKey = (Namespace, Content);

/// The key of an image.
pub(crate) fn key(namespace: Namespace, input: &ImageInput) -> ImageKey {
    (namespace, content(input))
}

/// The images whose embeddings are in the encoder cache, for callers that estimate what a request
/// costs. The scheduler changes it together with the cache. An image that leaves the cache before it
/// is used is encoded nonetheless: a request is charged too little by at most the encoding of as many
/// images as the cache has room for.
#[derive(Debug, Default)]
pub(crate) struct EncodedImages(Mutex<HashSet<ImageKey>>);

impl EncodedImages {
    /// Whether the embeddings of the image are cached.
    pub(crate) fn contains(&self, image: &ImageKey) -> bool {
        self.keys().contains(image)
    }

    fn keys(&self) -> MutexGuard<'_, HashSet<ImageKey>> {
        // Each change is complete.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The embeddings of the images that were used last, for the same image behind another prefix.
#[derive(Debug)]
pub(crate) struct EncoderCache {
    entries: HashMap<ImageKey, Entry>,
    /// The keys of the entries.
    encoded: Arc<EncodedImages>,
    /// Size of all embeddings in bytes, and its maximum.
    bytes: usize,
    bytes_max: usize,
    uses: u64,
}

#[derive(Debug)]
struct Entry {
    embeddings: ImageEmbeddings,
    last_use: u64,
}

impl Entry {
    fn bytes(&self) -> usize {
        size_of_val(&*self.embeddings.values)
    }
}

impl EncoderCache {
    /// An empty cache of at most `bytes_max` bytes, whose images are in `encoded`.
    pub(crate) fn new(bytes_max: usize, encoded: Arc<EncodedImages>) -> EncoderCache {
        encoded.keys().clear();
        EncoderCache { entries: HashMap::new(), encoded, bytes: 0, bytes_max, uses: 0 }
    }

    pub(crate) fn get(&mut self, key: &ImageKey) -> Option<&ImageEmbeddings> {
        self.uses += 1;
        let entry = self.entries.get_mut(key)?;
        entry.last_use = self.uses;
        Some(&entry.embeddings)
    }

    pub(crate) fn insert(&mut self, key: ImageKey, embeddings: ImageEmbeddings) {
        self.uses += 1;
        let entry = Entry { embeddings, last_use: self.uses };
        if entry.bytes() > self.bytes_max {
            return;
        }
        self.bytes += entry.bytes();
        if let Some(before) = self.entries.insert(key, entry) {
            self.bytes -= before.bytes();
        }
        self.encoded.keys().insert(key);
        while self.bytes > self.bytes_max {
            let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.last_use);
            let Some(oldest) = oldest.map(|(key, _)| *key) else { return };
            self.bytes -= self.entries.remove(&oldest).map_or(0, |entry| entry.bytes());
            self.encoded.keys().remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(content_hash: u128, kv_len: usize, full_attention: bool) -> Arc<ImageInput> {
        Arc::new(crate::tests::image_input(content_hash, kv_len, full_attention))
    }

    fn embeddings(values: usize) -> ImageEmbeddings {
        ImageEmbeddings { values: vec![0.5; values].into() }
    }

    /// Goal: an image is to be encoded while it has positions that are not computed and no
    /// embeddings; the same image at two places is encoded once.
    #[test]
    fn images_are_encoded_when_they_are_needed() {
        let (one, other) = (input(1, 4, true), input(2, 2, false));
        let image =
            |start, input: &Arc<ImageInput>| PromptImage { start, input: Arc::clone(input) };
        let all = [image(1, &one), image(7, &other), image(12, &one)];
        let mut images = SequenceImages::new(all.into());
        let next = |images: &SequenceImages, computed| {
            images.next_to_encode(computed).map(|image| image.start)
        };
        assert_eq!(
            [0, 1, 4, 5, 8, 9, 16].map(|computed| next(&images, computed)),
            [Some(1), Some(1), Some(1), Some(7), Some(7), Some(12), None]
        );
        assert_eq!(images.next_whole(0), Some((1..5, Some(12))));
        assert_eq!(images.next_whole(5), Some((12..16, None)));
        assert_eq!(images.next_whole(16), None);
        images.keep(&one, &embeddings(4), 0);
        assert_eq!(next(&images, 0), Some(7));
        assert_eq!(images.within(&(0..5)).len(), 1);
        images.keep(&other, &embeddings(2), 0);
        let starts = |range| images.within(&range).iter().map(|i| i.start).collect::<Vec<_>>();
        assert_eq!(starts(0..20), [1, 7, 12]);
        assert_eq!(starts(8..12), [7]);
        assert_eq!(starts(5..7), []);
        images.forget(9);
        assert_eq!(next(&images, 0), Some(1));
        assert_eq!(next(&images, 9), None);
    }

    /// Goal: an image that is a grid takes as many rotary positions as its larger edge has, but
    /// only for the positions after it.
    #[test]
    fn grids_skip_rotary_positions() {
        let grid = |columns| ImageInput { columns, ..ImageInput::clone(&input(1, 12, false)) };
        let image = |start, columns| PromptImage { start, input: Arc::new(grid(columns)) };
        let images = SequenceImages::new([image(2, 4), image(20, 0), image(40, 1)].into());
        let lags = [0, 2, 13, 14, 32, 51, 52].map(|computed| images.rotary_lag(computed));
        assert_eq!(lags, [0, 0, 0, 8, 8, 8, 8]);
        assert_eq!([3, 2, 6].map(|columns| rotary_len(12, columns)), [4, 6, 6]);
    }

    /// Goal: the cache keeps the embeddings that were used last, within its bytes, and none that is
    /// larger than the cache.
    #[test]
    fn the_cache_of_embeddings_is_bounded() {
        let encoded = Arc::new(EncodedImages::default());
        let mut cache = EncoderCache::new(100, Arc::clone(&encoded));
        let own = |hash, len| key(Namespace::default(), &input(hash, len, true));
        let images = [1, 2, 3].map(|hash| own(hash, 1));
        for image in &images[..2] {
            cache.insert(*image, embeddings(10));
            cache.insert(*image, embeddings(10));
        }
        assert!(cache.get(&images[0]).is_some());
        cache.insert(images[2], embeddings(10));
        let found = [0, 1, 2].map(|index: usize| cache.get(&images[index]).is_some());
        assert_eq!(found, [true, false, true]);
        assert_eq!([0, 1, 2].map(|index: usize| encoded.contains(&images[index])), found);
        assert_eq!(cache.bytes, 80);
        cache.insert(images[1], embeddings(26));
        assert!(cache.get(&images[1]).is_none() && cache.bytes == 80);
        assert!(cache.get(&own(1, 2)).is_none(), "another length is another image");
        let salted = Namespace::builder().salt("salt").build();
        assert!(cache.get(&(salted, images[0].1)).is_none(), "another namespace shares nothing");
    }
}
