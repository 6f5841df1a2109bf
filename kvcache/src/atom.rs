//! Atoms: things other than text that stand in a prompt, an image for example. Their positions
//! are numbers above all token ids, and a match never ends inside one.

/// Set in every position of an atom; token ids stay below it.
pub(crate) const ATOM: u32 = 1 << 31;
/// Set in all positions of an atom but its last: more of it follows.
pub(crate) const MORE: u32 = 1 << 30;

/// Whether the sequence may be cut right after `position`.
#[inline(always)]
pub(crate) fn ends_atom(position: u32) -> bool {
    position & (ATOM | MORE) != ATOM | MORE
}

/// The longest whole-block prefix of `positions[..matched]` that does not end inside an atom.
#[inline(always)]
pub(crate) fn whole_atoms(positions: &[u32], matched: usize, block_size: usize) -> usize {
    let mut length = matched;
    while length > 0 && !ends_atom(positions[length - 1]) {
        length -= block_size;
    }
    length
}
