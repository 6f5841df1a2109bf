//! The prompts of requests that wait or run. What one of them will have computed is not computed a
//! second time by another request, so estimates count it.

use std::sync::{Arc, Weak};

use arc_swap::ArcSwap;
use stolon_kvcache::Namespace;

use crate::sharing::{self, Leader};

/// Maximum number of prompts that are remembered. Of more, the latest are.
const MAX_PROMPTS: usize = 256;

/// The prompt of a request that has not ended. It is remembered as long as the request keeps this.
#[derive(Debug)]
pub(crate) struct PendingPrompt {
    namespace: Namespace,
    tokens: Arc<Vec<u32>>,
}

/// All prompts of requests that wait or run. Reading takes no lock.
#[derive(Debug, Default)]
pub(crate) struct PendingPrompts(ArcSwap<Vec<Weak<PendingPrompt>>>);

impl PendingPrompts {
    /// Remembers a prompt.
    pub(crate) fn add(&self, namespace: Namespace, tokens: Arc<Vec<u32>>) -> Arc<PendingPrompt> {
        let prompt = Arc::new(PendingPrompt { namespace, tokens });
        self.0.rcu(|prompts| {
            let alive = prompts.iter().filter(|prompt| prompt.strong_count() > 0);
            let mut alive: Vec<_> = alive.cloned().chain([Arc::downgrade(&prompt)]).collect();
            alive.drain(..alive.len().saturating_sub(MAX_PROMPTS));
            alive
        });
        prompt
    }

    /// Number of leading tokens of a prompt, in whole blocks, that are cached or in another prompt
    /// of its namespace. `cached` of them are cached.
    pub(crate) fn shared(
        &self,
        namespace: &Namespace,
        tokens: &[u32],
        cached: usize,
        block_size: usize,
    ) -> usize {
        let prompts: Vec<_> = self.0.load().iter().filter_map(Weak::upgrade).collect();
        let of_namespace = prompts.iter().filter(|prompt| prompt.namespace == *namespace);
        let leaders = of_namespace.map(|prompt| Leader {
            id: 0,
            tokens: &prompt.tokens,
            prompt_len: prompt.tokens.len(),
            committed: 0,
        });
        let best = sharing::choose(tokens, cached, block_size, leaders);
        best.map_or(cached, |follow| follow.shared)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the longest prefix in whole blocks counts, in its own namespace only, until its request
    /// ends.
    #[test]
    fn prompts_count_until_their_requests_end() {
        let (pending, space) = (PendingPrompts::default(), Namespace::default());
        let prompt = |len: u32| -> Vec<u32> { (0..len).chain([99; 3]).collect() };
        let shared = |cached| pending.shared(&space, &prompt(30), cached, 4);
        let kept: Vec<_> = [10, 21, 15].map(|len| pending.add(space, Arc::new(prompt(len)))).into();
        assert_eq!((shared(0), shared(16), shared(20), shared(24)), (20, 20, 20, 24));
        let other = Namespace::builder().salt("other").build();
        assert_eq!(pending.shared(&other, &prompt(30), 8, 4), 8);
        drop(kept);
        assert_eq!(shared(0), 0);
        let many: Vec<_> = (0..300).map(|_| pending.add(space, Arc::new(prompt(2)))).collect();
        assert_eq!((pending.0.load().len(), many.len()), (MAX_PROMPTS, 300));
    }
}
