//! [`Place`]: a record's place in a prompt.

use bytes::Bytes;
use stolon_kvcache::{Namespace, TokenSpan};

use crate::key::ChainKey;
use crate::record::{Record, RecordShape};

/// A full record of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its first position.
    pub first: usize,
    /// The key of the prefix before it.
    pub parent: ChainKey,
    /// Its own key.
    pub key: ChainKey,
}

impl RecordShape {
    /// The full records of a prompt, in their order, stored or not: those before its first image,
    /// whose positions are numbers that only this process knows.
    pub fn places<'a>(
        &self,
        namespace: &Namespace,
        tokens: &'a [u32],
    ) -> impl Iterator<Item = Place> + use<'a> {
        self.places_after(ChainKey::root(&self.fingerprint, namespace), tokens)
    }

    /// The full records of the `tokens` that follow a prefix with the key `parent`, counted from the
    /// end of that prefix.
    pub(crate) fn places_after<'a>(
        &self,
        mut parent: ChainKey,
        tokens: &'a [u32],
    ) -> impl Iterator<Item = Place> + use<'a> {
        let positions = self.record_positions();
        let has_image = |tokens: &&[u32]| tokens.iter().any(|&token| TokenSpan::is_image(token));
        let records = tokens.chunks_exact(positions).take_while(move |record| !has_image(record));
        records.enumerate().map(move |(number, tokens)| {
            let key = parent.then(tokens);
            let place = Place { first: number * positions, parent, key };
            parent = key;
            place
        })
    }
}

impl Place {
    /// The record in `bytes`, if it is the one of this place in a prompt.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn verify(
        &self,
        shape: &RecordShape,
        namespace: &Namespace,
        tokens: &[u32],
        bytes: &Bytes,
    ) -> Result<Record, String> {
        let record = Record::parse(bytes, shape, namespace).map_err(|error| error.to_string())?;
        let end = self.first + record.tokens.len();
        let is_it = record.header.key == self.key
            && record.header.parent == self.parent
            && record.header.first == self.first
            && tokens.get(self.first..end) == Some(&record.tokens);
        if is_it { Ok(record) } else { Err("it is the record of another key".into()) }
    }
}
