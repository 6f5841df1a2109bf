//! [`Place`]: a record's place in a prompt.
//!
//! A *full* record of a prompt begins at a multiple of its positions. Another question about an
//! image differs soon after the image, mostly within a full record, and no match ends inside an
//! image. So the positions from the start of such a record to the end of the image are stored as a
//! record, too: a *tail*, next to the full record and with the same parent.

use bytes::Bytes;
use stolon_kvcache::{Namespace, TokenSpan};

use crate::key::ChainKey;
use crate::record::{Record, RecordShape};
use crate::tokens::{NamedTokens, RecordTokens};

/// A record of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its first position.
    pub first: usize,
    /// Number of its positions.
    pub positions: usize,
    /// Number of different images that have some of them.
    pub images: usize,
    /// The key of the prefix before it.
    pub parent: ChainKey,
    /// Its own key.
    pub key: ChainKey,
}

impl RecordShape {
    /// The full records of a prompt, in their order, stored or not. They end before an image whose
    /// name is not known.
    pub fn places<'a>(
        &self,
        namespace: &Namespace,
        tokens: &'a NamedTokens,
    ) -> impl Iterator<Item = Place> + use<'a> {
        self.places_after(self.root(namespace), 0, tokens)
    }

    /// The key of the empty prefix.
    pub(crate) fn root(&self, namespace: &Namespace) -> ChainKey {
        ChainKey::root(&self.fingerprint, namespace)
    }

    /// The full records of a prompt from position `first` on, where a record begins and before
    /// which the key is `parent`.
    pub(crate) fn places_after<'a>(
        &self,
        mut parent: ChainKey,
        first: usize,
        tokens: &'a NamedTokens,
    ) -> impl Iterator<Item = Place> + use<'a> {
        let (shape, positions) = (*self, self.record_positions());
        (first..).step_by(positions).map_while(move |first| {
            let place = shape.place(parent, first, first + positions, tokens)?;
            parent = place.key;
            Some(place)
        })
    }

    /// The records of a prompt that are stored when its first `end` positions are computed: the
    /// full ones, and tails, each after the full record that begins at the same position. Where an
    /// image follows within the full record, there is no tail, because the next image of the same
    /// picture mostly follows closely.
    pub fn stored_places<'a>(
        &self,
        namespace: &Namespace,
        tokens: &'a NamedTokens,
        end: usize,
    ) -> impl Iterator<Item = Place> + use<'a> {
        let (shape, positions) = (*self, self.record_positions());
        let mut parent = Some(self.root(namespace));
        let records = (0..end).step_by(positions).map_while(move |first| {
            let before = parent?;
            let full = shape.place(before, first, first + positions, tokens);
            parent = full.map(|place| place.key);
            let tail = shape.ends_of_images(first, tokens).next().and_then(|end| {
                let after = &tokens.tokens()[end..];
                let follows = after.iter().take(first + positions - end);
                let is_last = !follows.copied().any(TokenSpan::is_image);
                is_last.then(|| shape.place(before, first, end, tokens)).flatten()
            });
            Some([full, tail])
        });
        let is_computed = move |place: &Place| place.end() <= end;
        records.flatten().flatten().filter(is_computed)
    }

    /// The tails of a prompt that begin at position `first`, before which the key is `parent`. The
    /// longest one comes first.
    pub(crate) fn tails<'a>(
        &self,
        parent: ChainKey,
        first: usize,
        tokens: &'a NamedTokens,
    ) -> impl Iterator<Item = Place> + use<'a> {
        let shape = *self;
        let ends = self.ends_of_images(first, tokens);
        ends.filter_map(move |end| shape.place(parent, first, end, tokens))
    }

    /// The ends of images within the full record that begins at `first`, except at the end of the
    /// record itself, if a block ends there too. The last one comes first.
    fn ends_of_images<'a>(
        &self,
        first: usize,
        tokens: &'a NamedTokens,
    ) -> impl Iterator<Item = usize> + use<'a> {
        let block_size = self.block_size;
        let tokens = tokens.tokens();
        let last = tokens.len().min(first + self.record_positions() - 1);
        let ends = (first + 1..last + 1).rev().filter(move |end| end.is_multiple_of(block_size));
        ends.filter(|&end| ends_image(&tokens[end - 1]))
    }

    fn place(
        &self,
        parent: ChainKey,
        first: usize,
        end: usize,
        tokens: &NamedTokens,
    ) -> Option<Place> {
        let record = tokens.record(first..end)?;
        let (positions, images) = (record.tokens.len(), record.images.len());
        Some(Place { first, positions, images, parent, key: parent.then_record(&record) })
    }
}

/// Whether a position is the last one of an image.
pub(crate) fn ends_image(position: &u32) -> bool {
    TokenSpan::is_image(*position) && TokenSpan::may_end_after(*position)
}

impl Place {
    /// The position after the record's last one.
    #[must_use]
    pub fn end(&self) -> usize {
        self.first + self.positions
    }

    /// Its size in bytes; the largest number if it overflows.
    pub(crate) fn bytes(&self, shape: &RecordShape) -> usize {
        shape.record_bytes(self.positions, self.images).unwrap_or(usize::MAX)
    }

    /// Its tokens in a prompt that has it.
    pub(crate) fn content(&self, tokens: &NamedTokens) -> Option<RecordTokens> {
        tokens.record(self.first..self.end())
    }

    /// The record in `bytes`, if it is the one of this place in a prompt.
    ///
    /// # Errors
    /// `FormatError` for the first field that is not as expected.
    pub fn verify(
        &self,
        shape: &RecordShape,
        namespace: &Namespace,
        tokens: &NamedTokens,
        bytes: &Bytes,
    ) -> Result<Record, String> {
        let record = Record::parse(bytes, shape, namespace).map_err(|error| error.to_string())?;
        let is_it = record.header.key == self.key
            && record.header.parent == self.parent
            && record.header.first == self.first
            && self.content(tokens).as_ref() == Some(&record.content);
        if is_it { Ok(record) } else { Err("it is the record of another key".into()) }
    }
}
