//! The engine on a real decoder with random weights: whatever the cache holds, the tokens are
//! the same.

use stolon::{Engine, Request};

/// Tokens that differ from seed to seed.
fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|n| (n * n * 31 + n * seed + seed) % 320).collect()
}

async fn run(engine: &Engine, tokens: &[u32]) -> (Vec<u32>, usize) {
    let request = Request::tokens(tokens.to_vec()).max_tokens(12).ignore_eos(true);
    let answer = engine.generate(request).expect("it fits").collect_text().await.expect("ends");
    (answer.token_ids, answer.finish.usage.cached_tokens)
}

/// Goal: caching off, cold, warm, full hit, after eviction, for several block and chunk sizes,
/// alone and among others: the same greedy tokens.
#[tokio::test]
async fn the_cache_changes_no_token() {
    let tokens = prompt(3, 64);
    let longer: Vec<u32> = tokens.iter().copied().chain(prompt(5, 30)).collect();
    let mut reference = None;
    for (block_size, chunk, caching) in [
        (16, 512, false),
        (16, 512, true),
        (1, 64, true),
        (4, 7, true),
        (32, 7, true),
        (16, 7, false),
    ] {
        let engine = Engine::builder()
            .model("random:tiny")
            .num_blocks(512 / block_size)
            .block_size(block_size)
            .max_batched_tokens(chunk)
            .prefix_caching(caching)
            .threads(1)
            .build()
            .await
            .expect("it loads");
        let (cold, cached) = run(&engine, &tokens).await;
        assert_eq!((cold.len(), cached), (12, 0));
        let (cold_long, cached) = run(&engine, &longer).await;
        assert_eq!(cached, if caching { 64 } else { 0 });
        let expected = reference.get_or_insert_with(|| (cold.clone(), cold_long.clone()));
        assert_eq!((&cold, &cold_long), (&expected.0, &expected.1), "{block_size} {chunk}");
        let (full_hit, cached) = run(&engine, &tokens).await;
        assert_eq!((&full_hit, cached), (&cold, if caching { 64 } else { 0 }));
        // Many others push it out, then it is computed again.
        for seed in 10..18 {
            run(&engine, &prompt(seed, 100)).await;
        }
        assert_eq!(engine.stats().evictions > 0, caching);
        let (again, others) = tokio::join!(
            run(&engine, &longer),
            futures::future::join_all((20..24).map(|seed| {
                let engine = engine.clone();
                async move { run(&engine, &prompt(seed, 50)).await }
            }))
        );
        assert_eq!(again.0, cold_long);
        assert_eq!(others.len(), 4);
        engine.audit().await.expect("clean books");
        engine.shutdown().await;
    }
}
