//! In-flight prefill sharing: a waiting request (the follower) can wait for a running one (the
//! leader) that is computing the same prefix, instead of computing it a second time.

/// A running sequence that may become a leader.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leader<'a> {
    /// The sequence's id.
    pub(crate) id: u64,
    /// Its tokens so far, from position 0.
    pub(crate) tokens: &'a [u32],
    /// Number of prompt tokens at the start of `tokens`.
    pub(crate) prompt_len: usize,
    /// Number of its positions that other requests can match already.
    pub(crate) committed: usize,
}

/// Which leader a follower waits for, and until when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Follow {
    /// The leader's id.
    pub(crate) leader: u64,
    /// Number of positions that it will share with the leader once they are committed.
    pub(crate) shared: usize,
    /// Number of positions that the leader must have computed before the follower continues:
    /// `shared`, or the whole prompt if both prompts are equal, because then the logits of its last
    /// position are cached.
    pub(crate) until: usize,
    /// The leader's number of computed positions at the last check.
    pub(crate) seen: usize,
    /// Number of successive checks without progress of the leader.
    pub(crate) idle_rounds: u32,
}

/// Number of checks without any progress of its leader after which a follower stops waiting and
/// computes its prompt itself.
pub(crate) const PATIENCE_ROUNDS: u32 = 16;

/// Chooses the leader that will commit the longest prefix of `tokens`, in full blocks. The prefix
/// must be at least one block longer than the `matched` positions that are cached already. All
/// `leaders` must be in the namespace of `tokens`.
pub(crate) fn choose<'a>(
    tokens: &[u32],
    matched: usize,
    block_size: usize,
    leaders: impl Iterator<Item = Leader<'a>>,
) -> Option<Follow> {
    let mut best: Option<Follow> = None;
    for leader in leaders {
        let floor = best.map_or(matched, |follow| follow.shared).max(leader.committed);
        // If the tokens at `floor` differ, the leader shares at most `floor` positions. Comparing
        // them first avoids most of the comparisons of whole prefixes.
        let (Some(own), Some(its)) = (tokens.get(floor), leader.tokens.get(floor)) else {
            continue;
        };
        if own != its {
            continue;
        }
        let common = common_prefix(tokens, leader.tokens);
        let shared = common / block_size * block_size;
        let equal = common == tokens.len() && common == leader.prompt_len;
        if shared > floor {
            best = Some(Follow {
                leader: leader.id,
                shared,
                until: if equal { common } else { shared },
                seen: leader.committed,
                idle_rounds: 0,
            });
        }
    }
    best
}

/// Whether a follower continues to wait. `leader` is the leader's number of computed and of
/// committed positions, or `None` if it has ended.
pub(crate) fn keep_waiting(follow: &mut Follow, leader: Option<(usize, usize)>) -> bool {
    let Some((computed, committed)) = leader else { return false };
    if committed >= follow.shared && computed >= follow.until {
        return false;
    }
    if computed != follow.seen {
        follow.seen = computed;
        follow.idle_rounds = 0;
    } else {
        follow.idle_rounds += 1;
    }
    follow.idle_rounds < PATIENCE_ROUNDS
}

/// Length of the common prefix of two sequences. Compares in strides of 32 so that the compiler can
/// use vector registers.
pub(crate) fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    const STRIDE: usize = 32;
    let equal_strides =
        a.chunks_exact(STRIDE).zip(b.chunks_exact(STRIDE)).take_while(|(a, b)| a == b).count();
    let start = equal_strides * STRIDE;
    start + a[start..].iter().zip(&b[start..]).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn leader(id: u64, tokens: &[u32], committed: usize) -> Leader<'_> {
        Leader { id, tokens, prompt_len: tokens.len(), committed }
    }

    #[test]
    fn follows_the_longest_shared_prefix_in_whole_blocks() {
        let tokens: Vec<u32> = (0..50).collect();
        let short: Vec<u32> = (0..20).collect();
        let long: Vec<u32> = (0..43).chain([99; 10]).collect();
        let leaders = || [leader(1, &short, 0), leader(2, &long, 0)].into_iter();
        let follow = choose(&tokens, 0, 8, leaders()).expect("both are leaders");
        assert_eq!((follow.leader, follow.shared), (2, 40));
        assert_eq!(choose(&tokens, 40, 8, leaders()), None, "no leader has more to offer");
    }

    #[test]
    fn a_leader_is_not_followed_for_what_it_has_committed() {
        let tokens: Vec<u32> = (0..50).collect();
        assert_eq!(choose(&tokens, 0, 8, [leader(1, &tokens, 48)].into_iter()), None);
        assert!(choose(&tokens, 0, 8, [leader(1, &tokens, 40)].into_iter()).is_some());
    }

    #[test]
    fn a_follower_with_the_same_prompt_waits_until_its_last_token() {
        let tokens: Vec<u32> = (0..50).collect();
        let follow = |leader| choose(&tokens, 0, 8, [leader].into_iter()).expect("it is a leader");
        let mut same = follow(leader(1, &tokens, 0));
        assert_eq!((same.shared, same.until), (48, 50));
        assert!(keep_waiting(&mut same, Some((48, 48))));
        assert!(!keep_waiting(&mut same, Some((50, 48))));
        let longer: Vec<u32> = (0..60).collect();
        assert_eq!(follow(leader(1, &longer, 0)).until, 48);
    }

    #[test]
    fn a_follower_stops_waiting_when_served_when_its_leader_ends_and_without_progress() {
        let mut follow = Follow { leader: 1, shared: 32, until: 32, seen: 0, idle_rounds: 0 };
        assert!(keep_waiting(&mut follow, Some((16, 16))));
        assert!(!keep_waiting(&mut follow, Some((40, 32))));
        assert!(!keep_waiting(&mut follow, None));
        assert!(keep_waiting(&mut follow, Some((40, 16))), "progress");
        for _ in 1..PATIENCE_ROUNDS {
            assert!(keep_waiting(&mut follow, Some((40, 16))), "patience");
        }
        assert!(!keep_waiting(&mut follow, Some((40, 16))));
    }

    proptest! {
        #[test]
        fn common_prefix_equals_a_simple_loop(
            a in prop::collection::vec(0u32..2, 0..100),
            b in prop::collection::vec(0u32..2, 0..100),
            cut in 0usize..100,
        ) {
            let mut c = a.clone();
            if let Some(token) = c.get_mut(cut) {
                *token += 1;
            }
            for other in [&b, &c, &a] {
                let plain = a.iter().zip(other.iter()).take_while(|(x, y)| x == y).count();
                prop_assert_eq!(common_prefix(&a, other), plain);
            }
        }
    }
}
