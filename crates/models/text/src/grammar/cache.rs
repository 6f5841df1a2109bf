//! [`Cache`]: recently compiled values, bounded by count and by bytes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::GrammarFailure;

/// Values by the text that they were made from. The least recently used ones are removed first.
///
/// The whole text is compared, not a hash of it, so that a request cannot be given the value of
/// another text. Callers that need the same missing value at the same time share one computation.
pub(super) struct Cache<T> {
    max_count: usize,
    max_bytes: usize,
    state: Mutex<State<T>>,
}

struct State<T> {
    entries: HashMap<Arc<str>, Entry<T>>,
    /// Bytes of all entries.
    bytes: usize,
    /// Number of uses so far.
    uses: u64,
    /// Values that are being made.
    flights: HashMap<Arc<str>, Flight<T>>,
}

struct Entry<T> {
    value: Arc<T>,
    bytes: usize,
    /// Value of `uses` at the last use.
    last_use: u64,
}

/// Set when the value has been made.
type Flight<T> = Arc<OnceLock<Result<(Arc<T>, usize), GrammarFailure>>>;

impl<T> Cache<T> {
    /// An empty cache of at most `max_count` values of at most `max_bytes` together.
    pub(super) fn new(max_count: usize, max_bytes: usize) -> Self {
        let (entries, flights) = (HashMap::new(), HashMap::new());
        let state = State { entries, bytes: 0, uses: 0, flights };
        Self { max_count, max_bytes, state: Mutex::new(state) }
    }

    /// The value of a text. `make` returns a missing one and its size in bytes; an error is
    /// returned to all callers that wait for it, and not kept.
    pub(super) fn get(
        &self,
        text: String,
        make: impl FnOnce() -> Result<(T, usize), GrammarFailure>,
    ) -> Result<Arc<T>, GrammarFailure> {
        let text: Arc<str> = text.into();
        let flight = {
            let mut state = self.lock();
            if let Some(value) = state.find(&text) {
                return Ok(value);
            }
            Arc::clone(state.flights.entry(Arc::clone(&text)).or_default())
        };
        // The first caller makes it, and the others wait.
        let made = flight.get_or_init(|| {
            let made = make().map(|(value, bytes)| (Arc::new(value), bytes));
            let mut state = self.lock();
            state.flights.remove(&text);
            if let Ok((value, bytes)) = &made {
                self.keep(&mut state, &text, value, bytes + text.len());
            }
            made
        });
        made.clone().map(|(value, _)| value)
    }

    /// Adds a value, unless it alone takes a large part of the cache.
    fn keep(&self, state: &mut State<T>, text: &Arc<str>, value: &Arc<T>, bytes: usize) {
        if bytes > self.max_bytes / 4 {
            return;
        }
        state.uses += 1;
        let entry = Entry { value: Arc::clone(value), bytes, last_use: state.uses };
        state.bytes += bytes;
        if let Some(replaced) = state.entries.insert(Arc::clone(text), entry) {
            state.bytes -= replaced.bytes;
        }
        while state.entries.len() > self.max_count || state.bytes > self.max_bytes {
            let oldest = state.entries.iter().min_by_key(|(_, entry)| entry.last_use);
            let Some(oldest) = oldest.map(|(text, _)| Arc::clone(text)) else { return };
            if let Some(removed) = state.entries.remove(&oldest) {
                state.bytes -= removed.bytes;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // Nothing panics while it is locked.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> State<T> {
    fn find(&mut self, text: &str) -> Option<Arc<T>> {
        self.uses += 1;
        let entry = self.entries.get_mut(text)?;
        entry.last_use = self.uses;
        Some(Arc::clone(&entry.value))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::GrammarError;

    /// Goal: random gets of a small cache agree with a plain list in order of use, so that the
    /// bounds hold and the least recently used values go first.
    #[test]
    fn bounds_hold_and_the_least_recently_used_go() {
        let cache = Cache::new(4, 1000);
        let mut list: Vec<(usize, usize)> = Vec::new();
        let mut random: u32 = 5;
        for _ in 0..5000 {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let number = (random >> 20) as usize % 9;
            // Some are too large to be kept.
            let bytes = [10, 240, 249, 260, 100, 120, 200, 230, 40][number];
            let text = number.to_string();
            let mut is_made = false;
            let value = cache.get(text, || {
                is_made = true;
                Ok((number, bytes))
            });
            assert_eq!(*value.expect("made"), number);
            let known = list.iter().position(|&(known, _)| known == number);
            assert_eq!(is_made, known.is_none(), "{number}: {list:?}");
            match known {
                Some(place) => {
                    let used = list.remove(place);
                    list.push(used);
                }
                None if bytes < 250 => list.push((number, bytes + 1)),
                None => {}
            }
            let sum = |list: &[(usize, usize)]| list.iter().map(|(_, bytes)| bytes).sum::<usize>();
            while list.len() > 4 || sum(&list) > 1000 {
                list.remove(0);
            }
            let state = cache.lock();
            assert_eq!((state.entries.len(), state.bytes), (list.len(), sum(&list)));
            assert!(state.flights.is_empty());
        }
    }

    /// Goal: callers that need a value while it is made wait for it, also if it fails; a failure
    /// is not kept.
    #[test]
    fn concurrent_callers_share_one_computation() {
        let cache = Cache::new(4, 1000);
        let made = AtomicUsize::new(0);
        let ask = |fails: bool| {
            cache.get("x".to_owned(), || {
                made.fetch_add(1, Ordering::Relaxed);
                // Wait until all eight have asked: each of them and the cache hold the flight.
                while Arc::strong_count(&cache.lock().flights["x"]) < 9 {
                    std::thread::yield_now();
                }
                if fails { Err(GrammarError::new("no").into()) } else { Ok((7, 1)) }
            })
        };
        for fails in [true, false] {
            std::thread::scope(|scope| {
                let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| ask(fails))).collect();
                for thread in threads {
                    assert_eq!(thread.join().expect("no panic").is_err(), fails);
                }
            });
        }
        assert_eq!(made.load(Ordering::Relaxed), 2);
        let again = cache.get("x".to_owned(), || Err(GrammarError::new("kept").into()));
        assert_eq!(again.map(|value| *value), Ok(7));
    }
}
