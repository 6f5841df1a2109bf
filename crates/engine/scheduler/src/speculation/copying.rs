//! [`Copying`]: guesses that a sequence goes on as an earlier text did after the same few tokens.

/// Number of tokens that must be the same.
const GRAM: usize = 3;

/// Maximum number of positions that are added to the index in one call. The index of a long prompt
/// is made over the first steps.
const ADDED: usize = 2_048;

/// Maximum number of slots of an index, 4 bytes each. If a text has more positions, later ones
/// overwrite earlier ones.
const SLOTS_MAX: usize = 1 << 16;

/// Number of slots in which the same tokens may be.
const WAYS: usize = 4;

/// Finds the last place in a text after which a sequence may go on, in constant time per token.
///
/// The index has a few slots for each hash of [`GRAM`] tokens, with the end of their last occurrence.
/// A match is compared token by token, so a collision only hides an occurrence. While the sequence
/// follows the place that was found, nothing is looked up.
#[derive(Debug, Default)]
pub(super) struct Copying {
    /// The end of the last occurrence in the text of the tokens with this hash; 0 for none. Its
    /// length is a power of two.
    ends: Box<[u32]>,
    /// Number of positions of the text that are in the index.
    indexed: usize,
    /// Number of tokens of the sequence at the last call.
    seen: usize,
    /// Position in the text of the token that would be next.
    next: Option<usize>,
}

impl Copying {
    /// Begins at the start of the text when the sequence has `seen` tokens.
    pub(super) fn from_start(seen: usize) -> Copying {
        Copying { seen, next: Some(0), ..Copying::default() }
    }

    /// The tokens that follow in `text` after the last tokens of `sequence`, at most `limit`. The
    /// text is the same in each call, but may have grown. If it `is_own`, it is the sequence itself,
    /// and what is found may overlap with its end.
    pub(super) fn draft(
        &mut self,
        text: &[u32],
        sequence: &[u32],
        is_own: bool,
        limit: usize,
    ) -> Vec<u32> {
        self.follow(text, sequence);
        // The end of the sequence itself is not an earlier occurrence.
        self.index(text, if is_own { text.len() - 1 } else { text.len() });
        if self.next.is_none() {
            self.next = self.find(text, sequence);
        }
        let Some(next) = self.next.filter(|&next| next < text.len()) else { return Vec::new() };
        let rest = &text[next..];
        match is_own {
            // If the text ends, the sequence repeats the part since `next`.
            true => rest.iter().cycle().take(limit).copied().collect(),
            false => rest[..rest.len().min(limit)].to_vec(),
        }
    }

    /// Moves on by the tokens that the sequence has got since the last call.
    fn follow(&mut self, text: &[u32], sequence: &[u32]) {
        for token in &sequence[self.seen.min(sequence.len())..] {
            self.next =
                self.next.filter(|&next| text.get(next) == Some(token)).map(|next| next + 1);
        }
        self.seen = sequence.len();
    }

    /// Adds positions up to `end` to the index.
    fn index(&mut self, text: &[u32], end: usize) {
        let slots = text.len().next_power_of_two().clamp(64, SLOTS_MAX);
        if self.ends.len() < slots {
            // Twice as large, at least, so that all growth together is linear.
            self.ends = vec![0; (2 * slots).min(SLOTS_MAX)].into();
            self.indexed = 0;
        }
        let first = self.indexed.max(GRAM - 1);
        let last = end.min(self.indexed + ADDED);
        for position in first..last {
            let end = position + 1;
            let gram = &text[end - GRAM..end];
            let is_free = |&slot: &usize| {
                let other = self.ends[slot] as usize;
                other == 0 || text[other - GRAM..other] == *gram
            };
            let slots = self.slots(gram);
            let slot = slots.into_iter().find(is_free).unwrap_or(slots[0]);
            self.ends[slot] = end as u32;
        }
        self.indexed = last.max(self.indexed);
    }

    /// The position in the text after the last tokens of the sequence.
    fn find(&self, text: &[u32], sequence: &[u32]) -> Option<usize> {
        let gram = &sequence[sequence.len().checked_sub(GRAM)?..];
        let ends = self.slots(gram).map(|slot| self.ends[slot] as usize);
        ends.into_iter().find(|&end| end >= GRAM && text.get(end - GRAM..end) == Some(gram))
    }

    /// The slots in which the tokens may be. If all are taken by others, these lose the first one.
    fn slots(&self, gram: &[u32]) -> [usize; WAYS] {
        let mix = |hash: u64, &token: &u32| {
            (hash ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
        };
        let first = gram.iter().fold(0, mix) as usize;
        std::array::from_fn(|way| (first + way) & (self.ends.len() - 1))
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    /// Goal: a sequence that repeats a part of itself is predicted after three tokens of it, and the
    /// prediction ends where the repetition does. A loop is predicted beyond its end.
    #[test]
    fn repetitions_are_predicted() {
        let prompt: Vec<u32> = (0..100).collect();
        let mut copying = Copying::default();
        let mut sequence = prompt.clone();
        sequence.extend([500, 30, 31]);
        assert!(copying.draft(&sequence, &sequence, true, 4).is_empty());
        sequence.push(32);
        assert_eq!(copying.draft(&sequence, &sequence, true, 4), [33, 34, 35, 36]);
        sequence.extend([33, 34]);
        assert_eq!(copying.draft(&sequence, &sequence, true, 2), [35, 36]);
        sequence.push(7);
        assert!(copying.draft(&sequence, &sequence, true, 2).is_empty());
        sequence.extend([1, 2, 1, 2, 1]);
        assert_eq!(copying.draft(&sequence, &sequence, true, 5), [2, 1, 2, 1, 2]);
    }

    /// Goal: a prediction is followed from its start, and found again after a part that is not in
    /// it.
    #[test]
    fn a_text_of_its_own_is_followed_from_its_start() {
        let text: Vec<u32> = (200..260).collect();
        let mut sequence = vec![1, 2];
        let mut copying = Copying::from_start(2);
        assert_eq!(copying.draft(&text, &sequence, false, 3), [200, 201, 202]);
        sequence.extend([200, 201, 9, 9]);
        assert!(copying.draft(&text, &sequence, false, 3).is_empty());
        sequence.extend([256, 257, 258]);
        assert_eq!(copying.draft(&text, &sequence, false, 3), [259]);
        sequence.push(259);
        assert!(copying.draft(&text, &sequence, false, 3).is_empty());
    }

    /// Goal: on random texts, everything that is found really occurs, and what a slow search finds
    /// is found; the work of each call is bounded.
    #[test]
    fn what_is_found_occurs() {
        let mut random = SmallRng::seed_from_u64(2);
        let (mut found, mut missed) = (0, 0);
        for _ in 0..50 {
            let mut copying = Copying::default();
            let mut sequence: Vec<u32> = (0..300).map(|_| random.random_range(0..12)).collect();
            for _ in 0..100 {
                sequence.push(random.random_range(0..12));
                let draft = copying.draft(&sequence, &sequence, true, 1);
                let gram = &sequence[sequence.len() - GRAM..];
                let occurs = |window: &[u32]| window == gram;
                let expected = sequence[..sequence.len() - 1].windows(GRAM).any(occurs);
                match draft[..] {
                    [] => missed += usize::from(expected),
                    [_, ..] => found += 1,
                }
            }
        }
        assert!(found > 100 && missed < found, "{found} found, {missed} missed");
        let long: Vec<u32> = (0..100_000).collect();
        let mut copying = Copying::default();
        copying.draft(&long, &long, true, 1);
        assert!(copying.indexed <= ADDED && copying.ends.len() <= SLOTS_MAX);
    }
}
