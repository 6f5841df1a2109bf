//! Linear recurrences over the tokens of a sequence: each head has a state `S`, a matrix `[key_dim,
//! value_dim]`, to which every token adds the product of its key and a correction of its value.
//!
//! The tokens are taken one after the other, in f32. So the state after a token depends on the
//! tokens before it only, bit for bit, and not on how a prompt was cut into chunks. That a
//! sequential recurrence is fast enough is due to the layout of the state: it is divided into slabs
//! of 16 columns, `[slabs, key_dim, 16]`. A slab with 128 keys takes 8 kB. It stays in the L1 cache
//! while the kernel goes through all tokens of a slice, and each token reads and writes it once.
#![allow(unsafe_code, reason = "runs on SIMD lanes, whose methods are unsafe")]

use crate::lanes::{LANES, Lanes, dispatch, load_some, store_some};
use crate::path::Path;

/// Number of independent sums over the keys. Key `i` belongs to sum `i % CHAINS`, so that the order
/// of the additions depends on the number of keys only.
const CHAINS: usize = 2;

/// Vectors of successive tokens, which are at equal distances in memory.
#[derive(Clone, Copy, Debug)]
pub struct StridedRows<'a> {
    /// The vector of token `t` begins at index `t * stride`.
    pub values: &'a [f32],
    /// Distance between the vectors of successive tokens.
    pub stride: usize,
}

impl StridedRows<'_> {
    /// Whether there are `count` vectors of `width` values.
    fn has(&self, count: usize, width: usize) -> bool {
        let needed = (count - 1).checked_mul(self.stride).and_then(|last| last.checked_add(width));
        needed.is_some_and(|needed| needed <= self.values.len())
    }

    /// The first value of a token's vector.
    ///
    /// # Safety
    /// The vector of the token exists.
    #[inline(always)]
    unsafe fn at(&self, token: usize) -> *const f32 {
        // SAFETY: the vector begins inside of `values` by the condition of this method.
        unsafe { self.values.as_ptr().add(token * self.stride) }
    }
}

/// The term that a token adds to the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// The delta rule: `key * strength * (value - memory)`, where `memory` is the product of the
    /// key and the state after its decay (Yang et al., 2024, Gated Delta Networks).
    Delta,
    /// The delta rule with a decay for each element of the keys (Kimi Team, 2025, Kimi Linear).
    DeltaByKey,
    /// The product `key * strength * value`, as in Mamba-2 (Dao and Gu, 2024).
    Additive,
}

impl Rule {
    /// Number of decays of a token: one for each row of the state, or one for all.
    #[must_use]
    pub fn decays(self, key_dim: usize) -> usize {
        match self {
            Self::DeltaByKey => key_dim,
            Self::Delta | Self::Additive => 1,
        }
    }
}

/// Successive tokens of one head.
#[derive(Clone, Copy, Debug)]
pub struct Recurrence<'a> {
    /// The instruction set.
    pub path: Path,
    /// The term that each token adds to the state.
    pub rule: Rule,
    /// Number of tokens, at least 1.
    pub tokens: usize,
    /// Number of values of a key and of a query, at least 1.
    pub key_dim: usize,
    /// Number of values of a value and of an output, at least 1.
    pub value_dim: usize,
    /// The query of each token, `[key_dim]`.
    pub queries: StridedRows<'a>,
    /// The key of each token, `[key_dim]`.
    pub keys: StridedRows<'a>,
    /// The value of each token, `[value_dim]`.
    pub values: StridedRows<'a>,
    /// The factors by which the state is multiplied before each token is added, `[decays]` per
    /// token: one for all rows of the state, or one for each row, as [`Rule::decays`] says.
    pub decays: StridedRows<'a>,
    /// The factor of the term that each token adds: one value per token.
    pub strengths: StridedRows<'a>,
}

impl Recurrence<'_> {
    /// Number of values of the state of a head: `[slabs, key_dim, 16]`, where the last slab may
    /// have columns that are not used, which stay zero.
    #[must_use]
    pub fn state_len(key_dim: usize, value_dim: usize) -> usize {
        value_dim.div_ceil(LANES) * key_dim * LANES
    }

    /// Computes all tokens: changes `state`, of [`Self::state_len`] values, from the one before the
    /// first token to the one after the last, and writes the product of each query with the state
    /// after its token to `out`, `[tokens, value_dim]`.
    ///
    /// Serial. The bits of state and outputs depend on the instruction set and on the sequence of
    /// tokens only: calls with parts of the tokens, one after the other, have the same results.
    ///
    /// # Panics
    /// If a size is 0, or a slice has not the documented length.
    pub fn run(&self, state: &mut [f32], out: &mut [f32]) {
        let Self { tokens, key_dim, value_dim, .. } = *self;
        assert!(tokens > 0 && key_dim > 0 && value_dim > 0, "recurrence: a size is 0");
        let state_len = Self::state_len(key_dim, value_dim);
        assert_eq!(state.len(), state_len, "recurrence: the state has another size");
        assert_eq!(out.len(), tokens * value_dim, "recurrence: one output for each token");
        let rows = [
            (self.queries, key_dim),
            (self.keys, key_dim),
            (self.values, value_dim),
            (self.decays, self.rule.decays(key_dim)),
            (self.strengths, 1),
        ];
        let complete = rows.iter().all(|(rows, width)| rows.has(tokens, *width));
        assert!(complete, "recurrence: expected the inputs of {tokens} tokens");
        // SAFETY: the lengths were checked above.
        unsafe {
            match self.rule {
                Rule::Delta => delta_dispatch(self.path, *self, state, out),
                Rule::DeltaByKey => delta_by_key_dispatch(self.path, *self, state, out),
                Rule::Additive => additive_dispatch(self.path, *self, state, out),
            }
        }
    }
}

/// # Safety
/// The conditions of [`head`].
#[inline(always)]
unsafe fn delta<L: Lanes>(args: Recurrence<'_>, state: &mut [f32], out: &mut [f32]) {
    // SAFETY: the conditions are the same.
    unsafe { head::<L, true, false>(&args, state, out) }
}
dispatch! {
    /// # Safety
    /// All slices have the lengths that [`Recurrence::run`] documents.
    unsafe fn delta_dispatch(args: Recurrence<'_>, state: &mut [f32], out: &mut [f32]) = delta
}

/// # Safety
/// The conditions of [`head`].
#[inline(always)]
unsafe fn delta_by_key<L: Lanes>(args: Recurrence<'_>, state: &mut [f32], out: &mut [f32]) {
    // SAFETY: the conditions are the same.
    unsafe { head::<L, true, true>(&args, state, out) }
}
dispatch! {
    /// # Safety
    /// All slices have the lengths that [`Recurrence::run`] documents.
    unsafe fn delta_by_key_dispatch(
        args: Recurrence<'_>,
        state: &mut [f32],
        out: &mut [f32],
    ) = delta_by_key
}

/// # Safety
/// The conditions of [`head`].
#[inline(always)]
unsafe fn additive<L: Lanes>(args: Recurrence<'_>, state: &mut [f32], out: &mut [f32]) {
    // SAFETY: the conditions are the same.
    unsafe { head::<L, false, false>(&args, state, out) }
}
dispatch! {
    /// # Safety
    /// All slices have the lengths that [`Recurrence::run`] documents.
    unsafe fn additive_dispatch(args: Recurrence<'_>, state: &mut [f32], out: &mut [f32]) = additive
}

/// Computes all tokens of a head, one slab after the other: by the delta rule if `DELTA`, and with
/// decays of each element of the keys if `BY_KEY`.
///
/// # Safety
/// The instruction set of `L` is available, and all slices have the lengths that
/// [`Recurrence::run`] documents.
#[inline(always)]
unsafe fn head<L: Lanes, const DELTA: bool, const BY_KEY: bool>(
    args: &Recurrence<'_>,
    state: &mut [f32],
    out: &mut [f32],
) {
    let slabs = state.chunks_exact_mut(args.key_dim * LANES);
    for (slab, state) in slabs.enumerate() {
        let first = slab * LANES;
        let left = args.value_dim - first;
        let slab = Slab::<BY_KEY> { state: state.as_mut_ptr(), key_dim: args.key_dim };
        // SAFETY: `slab` points to `key_dim` rows of 16 values. `token` is below the number of
        // tokens, of each of which all vectors exist; `left` values and outputs are at `first` and
        // after it, and no more are read or written.
        unsafe {
            let mut memory =
                if DELTA { slab.recall::<L>(Keys::of(args, 0)) } else { L::splat(0.0) };
            for token in 0..args.tokens {
                let strength = L::splat(*args.strengths.at(token));
                let mut value = load_some::<L>(args.values.at(token).add(first), left, 0.0);
                if DELTA {
                    value = value.sub(memory);
                }
                let keys = Keys::of(args, token);
                let step = Step {
                    keys,
                    query: args.queries.at(token),
                    decay: L::splat(*keys.decay),
                    update: value.mul(strength),
                };
                let output;
                if DELTA && token + 1 < args.tokens {
                    let next = Keys::of(args, token + 1);
                    (output, memory) = slab.advance::<L, true>(&step, next);
                } else {
                    (output, _) = slab.advance::<L, false>(&step, keys);
                }
                store_some(output, out.as_mut_ptr().add(token * args.value_dim + first), left);
            }
        }
    }
}

/// The key of a token, and its decays.
#[derive(Clone, Copy)]
struct Keys {
    /// `[key_dim]`.
    key: *const f32,
    /// `[decays]`.
    decay: *const f32,
}

impl Keys {
    /// The key and the decays of token `token`.
    ///
    /// # Safety
    /// The vectors of the token exist.
    #[inline(always)]
    unsafe fn of(args: &Recurrence<'_>, token: usize) -> Self {
        // SAFETY: the vectors exist by the condition of this function.
        unsafe { Self { key: args.keys.at(token), decay: args.decays.at(token) } }
    }
}

/// One token of a slab.
struct Step<L> {
    keys: Keys,
    /// `[key_dim]`.
    query: *const f32,
    /// The first decay. It applies to all rows unless each row has its own.
    decay: L,
    /// The vector whose product with the key is added to the state.
    update: L,
}

/// 16 columns of a head's state. Each of its rows has a decay of its own if `BY_KEY`.
#[derive(Clone, Copy)]
struct Slab<const BY_KEY: bool> {
    /// `[key_dim, 16]`.
    state: *mut f32,
    key_dim: usize,
}

impl<const BY_KEY: bool> Slab<BY_KEY> {
    /// The product of a key and the state after its decay: `sum of key[i] * decay * S[i]`.
    ///
    /// # Safety
    /// The instruction set of `L` is available, the state is readable for `key_dim * 16` values,
    /// and the key for `key_dim` values and its decays for theirs.
    #[inline(always)]
    unsafe fn recall<L: Lanes>(self, keys: Keys) -> L {
        // SAFETY: `i` is below `key_dim`, so key, decays and row `i` are readable.
        unsafe {
            let mut sums = [L::splat(0.0); CHAINS];
            for i in 0..self.key_dim {
                let row = L::load(self.state.add(i * LANES));
                let sum = &mut sums[i % CHAINS];
                *sum = row.mul_add(L::splat(Self::recalled(keys, i)), *sum);
            }
            Self::decayed(keys, sums[0].add(sums[1]))
        }
    }

    /// The factor of row `i` when a key is recalled. A decay of all rows is left to
    /// [`Slab::decayed`].
    ///
    /// # Safety
    /// The key and its decays are readable for `i + 1` values.
    #[inline(always)]
    unsafe fn recalled(keys: Keys, i: usize) -> f32 {
        // SAFETY: the conditions are those of this function.
        unsafe { if BY_KEY { *keys.key.add(i) * *keys.decay.add(i) } else { *keys.key.add(i) } }
    }

    /// The sum of the rows with the factors [`Slab::recalled`], after the decay of all rows.
    ///
    /// # Safety
    /// The instruction set of `L` is available, and the decays are readable.
    #[inline(always)]
    unsafe fn decayed<L: Lanes>(keys: Keys, sum: L) -> L {
        // SAFETY: there is at least one decay.
        unsafe { if BY_KEY { sum } else { L::splat(*keys.decay).mul(sum) } }
    }

    /// Changes the state by one token: `S[i] = decay * S[i] + key[i] * update`. Returns the product
    /// of the query with the new state and, if `RECALL`, the result of [`Slab::recall`] for the
    /// keys `next`, so that each token reads the state once.
    ///
    /// # Safety
    /// The instruction set of `L` is available, the state is readable and writable for `key_dim *
    /// 16` values, all keys and the query are readable for `key_dim` values, and decays for theirs.
    #[inline(always)]
    unsafe fn advance<L: Lanes, const RECALL: bool>(self, step: &Step<L>, next: Keys) -> (L, L) {
        // SAFETY: `i` is below `key_dim`.
        unsafe {
            let mut sums = [[L::splat(0.0); 2]; CHAINS];
            let mut i = 0;
            while i + CHAINS <= self.key_dim {
                self.advance_row::<L, RECALL>(i, step, next, &mut sums[0]);
                self.advance_row::<L, RECALL>(i + 1, step, next, &mut sums[1]);
                i += CHAINS;
            }
            if i < self.key_dim {
                self.advance_row::<L, RECALL>(i, step, next, &mut sums[0]);
            }
            let memory = sums[0][1].add(sums[1][1]);
            let memory = if RECALL { Self::decayed(next, memory) } else { memory };
            (sums[0][0].add(sums[1][0]), memory)
        }
    }

    /// Changes row `i` of the state and adds its part to `sums`: the sum of the output and the sum
    /// of the next recall. (A closure would be a function without the instruction set.)
    ///
    /// # Safety
    /// The conditions of [`Slab::advance`], and `i` is below `key_dim`.
    #[inline(always)]
    unsafe fn advance_row<L: Lanes, const RECALL: bool>(
        self,
        i: usize,
        step: &Step<L>,
        next: Keys,
        sums: &mut [L; 2],
    ) {
        // SAFETY: row `i` is readable and writable, and the values `i` of the keys and the query
        // are readable by the conditions of this method.
        unsafe {
            let at = self.state.add(i * LANES);
            let decay = if BY_KEY { L::splat(*step.keys.decay.add(i)) } else { step.decay };
            let decayed = L::load(at).mul(decay);
            let row = step.update.mul_add(L::splat(*step.keys.key.add(i)), decayed);
            row.store(at);
            sums[0] = row.mul_add(L::splat(*step.query.add(i)), sums[0]);
            if RECALL {
                sums[1] = row.mul_add(L::splat(Self::recalled(next, i)), sums[1]);
            }
        }
    }
}

#[cfg(test)]
mod tests;
