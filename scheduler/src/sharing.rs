//! In-flight sharing: whether a waiting request should wait for one that is computing the same
//! prefix just now, instead of computing it a second time.

/// What is known of a running sequence that may lead.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leader<'a> {
    /// Which one.
    pub(crate) id: u64,
    /// Its tokens so far, from position 0.
    pub(crate) tokens: &'a [u32],
    /// How many of them are its prompt.
    pub(crate) prompt_len: usize,
    /// Positions of it that others can match already.
    pub(crate) committed: usize,
}

/// A waiting request's tie to its leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Follow {
    /// Whom it waits for.
    pub(crate) leader: u64,
    /// Positions it will share with the leader once those are committed.
    pub(crate) shared: usize,
    /// Positions the leader will have computed by then: `shared`, or its whole prompt where that
    /// is the follower's too, whose last row of logits is kept then.
    pub(crate) until: usize,
    /// The leader's progress when last looked at.
    pub(crate) seen: usize,
    /// Rounds without progress so far.
    pub(crate) idle_rounds: u32,
}

/// Rounds without any progress of its leader after which a follower computes for itself.
pub(crate) const PATIENCE_ROUNDS: u32 = 16;

/// The leader worth waiting for: the one that will commit the longest prefix of `tokens`, at
/// least a block longer than what is `matched` already. Leaders are of the same namespace.
pub(crate) fn choose<'a>(
    tokens: &[u32],
    matched: usize,
    block_size: usize,
    leaders: impl Iterator<Item = Leader<'a>>,
) -> Option<Follow> {
    let mut best: Option<Follow> = None;
    for leader in leaders {
        let floor = best.map_or(matched, |follow| follow.shared).max(leader.committed);
        // A leader that differs at the first place it would have to lead past is no use.
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

/// Whether to wait on: `progress` is what the leader has computed, `None` when it is gone.
/// `committed` is what others can match of it.
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

/// How many tokens two sequences have in common from the start. Compares in strides of 32 so
/// that the compiler can use wide registers.
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
        let follow = choose(&tokens, 0, 8, leaders()).expect("both lead");
        assert_eq!((follow.leader, follow.shared), (2, 40));
        assert_eq!(choose(&tokens, 40, 8, leaders()), None, "nothing more to gain");
    }

    #[test]
    fn what_is_committed_already_is_no_reason_to_wait() {
        let tokens: Vec<u32> = (0..50).collect();
        assert_eq!(choose(&tokens, 0, 8, [leader(1, &tokens, 48)].into_iter()), None);
        assert!(choose(&tokens, 0, 8, [leader(1, &tokens, 40)].into_iter()).is_some());
    }

    #[test]
    fn the_same_prompt_is_waited_for_to_its_last_token() {
        let tokens: Vec<u32> = (0..50).collect();
        let follow = |leader| choose(&tokens, 0, 8, [leader].into_iter()).expect("it leads");
        let mut same = follow(leader(1, &tokens, 0));
        assert_eq!((same.shared, same.until), (48, 50));
        assert!(keep_waiting(&mut same, Some((48, 48))));
        assert!(!keep_waiting(&mut same, Some((50, 48))));
        let longer: Vec<u32> = (0..60).collect();
        assert_eq!(follow(leader(1, &longer, 0)).until, 48);
    }

    #[test]
    fn a_follower_stops_when_served_when_led_by_nobody_and_when_nothing_moves() {
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
        fn common_prefix_equals_the_plain_loop(
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
