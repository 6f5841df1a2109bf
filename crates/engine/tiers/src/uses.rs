//! [`Uses`]: how often the records of prompts are used, for the policy that stores only records
//! that several requests need.

use std::collections::HashMap;

use crate::key::ChainKey;

/// How many requests have begun with each record: a bounded memory of recent ones.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    counts: HashMap<ChainKey, u32>,
}

impl Uses {
    /// Maximum number of records that are remembered: some 4 MB.
    const MOST: usize = 1 << 16;

    /// Notes a request that begins with these records.
    pub(crate) fn note(&mut self, records: impl Iterator<Item = ChainKey>) {
        for key in records {
            let count = self.counts.entry(key).or_default();
            *count = count.saturating_add(1);
        }
        if self.counts.len() > Uses::MOST {
            // Records that were used again are remembered longer, but not forever.
            self.counts.retain(|_, count| {
                *count /= 2;
                *count > 0
            });
        }
    }

    /// Whether at least `count` requests have begun with a record.
    pub(crate) fn at_least(&self, count: u32, record: &ChainKey) -> bool {
        self.counts.get(record).is_some_and(|&uses| uses >= count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uses_are_forgotten_when_there_are_too_many() {
        let key = |n: usize| {
            ChainKey::root(&[0; 32], &stolon_kvcache::Namespace::default()).then(&[n as u32])
        };
        let mut uses = Uses::default();
        for _ in 0..4 {
            uses.note([key(0)].into_iter());
        }
        assert!(uses.at_least(4, &key(0)) && !uses.at_least(5, &key(0)));
        uses.note((1..=Uses::MOST).map(key));
        assert!(uses.at_least(2, &key(0)) && !uses.at_least(1, &key(1)));
        assert!(uses.counts.len() <= Uses::MOST);
    }
}
