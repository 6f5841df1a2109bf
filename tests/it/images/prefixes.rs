//! Properties of cached prefixes that contain images. Blocks have one position, pictures are
//! decoded and encoded, and the checks use counts that the engine reports.

use std::sync::Arc;
use std::time::Duration;

use stolon::{CacheStats, Completion, Engine, Error, Request, TokenStream};

use super::{bits, builder, picture};

/// An engine with a picture that all of its requests are about.
struct Album {
    engine: Engine,
    image: Arc<[u8]>,
}

impl Album {
    async fn new(blocks: usize) -> Result<Album, Error> {
        let engine = builder().num_blocks(blocks).build().await?;
        Ok(Album { engine, image: picture(64, 64, 3) })
    }

    /// A request with the picture in the place of `<image>`, for one token.
    fn request(&self, text: &str) -> Request {
        let request = Request::text(text).max_tokens(1).logprobs(0);
        let images = text.matches("<image>").count();
        (0..images).fold(request, |request, _| request.image(Arc::clone(&self.image)))
    }

    async fn ask(&self, text: &str) -> Result<Completion, Error> {
        self.engine.complete(self.request(text)).await
    }

    /// A stream that has begun. Its request runs until the stream is dropped, or has `tokens`
    /// tokens.
    async fn start(&self, text: &str, tokens: usize) -> Result<TokenStream, Error> {
        let request = self.request(text).max_tokens(tokens).ignore_eos(true);
        let mut stream = self.engine.generate(request).await?;
        while !matches!(stream.next().await, Some(Ok(stolon::Event::Token(_)))) {}
        Ok(stream)
    }

    /// Number of positions of a prompt.
    async fn len(&self, text: &str) -> Result<usize, Error> {
        Ok(self.engine.prompt_tokens(&self.request(text)).await?.len())
    }

    /// Number of images that the encoder makes of the picture.
    async fn tiles(&self) -> Result<u64, Error> {
        let engine = builder().build().await?;
        engine.complete(self.request("<image>")).await?;
        Ok(engine.stats().images_encoded)
    }

    fn cached(&self, text: &str) -> Result<usize, Error> {
        self.engine.cache().query_match_len(&self.request(text))
    }

    async fn stats(&self) -> Result<CacheStats, Error> {
        self.engine.cache().stats().await
    }

    /// Waits until no request runs, checks that every block is free or can be evicted from the
    /// tree, and returns how many are in the tree.
    async fn conserved(&self) -> Result<usize, Error> {
        for _ in 0..10_000 {
            let report = self.engine.audit().await?;
            if (report.running, report.waiting, report.blocks_reserved) != (0, 0, 0) {
                tokio::time::sleep(Duration::from_millis(1)).await;
                continue;
            }
            assert_eq!(report.blocks_free + report.blocks_committed, report.blocks_total);
            assert_eq!(report.blocks_evictable, report.blocks_committed, "nothing is locked");
            return Ok(report.blocks_committed);
        }
        panic!("requests have not ended within ten seconds");
    }
}

/// Goal: a prompt that differs from a cached one after the picture divides the node: one node up to
/// there, and one below it for each prompt.
#[tokio::test]
async fn a_prompt_that_parts_from_another_divides_its_node() -> Result<(), Error> {
    let album = Album::new(4096).await?;
    album.ask("<image>abcd").await?;
    assert_eq!(album.stats().await?.nodes, 1);
    album.ask("<image>abXY").await?;
    let shared = album.len("<image>ab").await?;
    let nodes = album.engine.cache().dump()?.nodes;
    let mut sizes: Vec<_> =
        nodes.iter().map(|node| (node.parent.is_some(), node.position_count)).collect();
    sizes.sort_unstable();
    assert_eq!(sizes, [(false, shared), (true, 2), (true, 2)]);
    Ok(())
}

/// Goal: all positions of a picture match, or none: a match ends before a different picture, and
/// the same picture matches as a whole.
#[tokio::test]
async fn a_picture_counts_as_all_its_positions_or_none() -> Result<(), Error> {
    let mut album = Album::new(4096).await?;
    let usage = album.ask("a <image> b").await?.finish.usage;
    let (before, after) = (album.len("a ").await?, album.len("a <image>").await?);
    assert!(after - before >= usage.image_tokens && usage.image_tokens >= 16);
    assert_eq!(album.cached("a <image> b")?, usage.prompt_tokens);
    assert_eq!(album.cached("a <image>")?, after);
    assert_eq!(album.cached("a <image> c")?, album.len("a <image> ").await?);
    album.image = picture(64, 64, 4);
    let matched = album.cached("a <image> b")?;
    // The tokens that a model puts before a picture are shared.
    assert!((before..after - usage.image_tokens + 1).contains(&matched), "{matched}");
    Ok(())
}

/// Goal: a running request locks its prefix, and its end unlocks it exactly once.
#[tokio::test]
async fn a_running_request_locks_its_prefix_once() -> Result<(), Error> {
    let album = Album::new(4096).await?;
    let (one, other) = (album.start("<image>a", 1900).await?, album.start("<image>b", 1900).await?);
    let nodes = album.engine.cache().dump()?.nodes;
    let positions = |locks| {
        nodes
            .iter()
            .filter(|node| node.locks == locks)
            .map(|node| node.position_count)
            .sum::<usize>()
    };
    assert_eq!(positions(2), album.len("<image>").await?, "both requests lock the picture");
    assert!(positions(1) >= 2, "and each of them its own end: {nodes:?}");
    assert_eq!(positions(0), 0, "{nodes:?}");
    drop(one);
    drop(other);
    album.conserved().await?;
    assert!(album.engine.cache().dump()?.nodes.iter().all(|node| node.locks == 0));
    Ok(())
}

/// Goal: after a miss, the tree owns all positions of the prompt until they are evicted.
#[tokio::test]
async fn after_a_miss_the_tree_owns_the_blocks() -> Result<(), Error> {
    let album = Album::new(4096).await?;
    let usage = album.ask("<image> what?").await?.finish.usage;
    assert_eq!((usage.cached_tokens, album.conserved().await?), (0, usage.prompt_tokens));
    album.engine.cache().flush().await?;
    assert_eq!(album.conserved().await?, 0);
    Ok(())
}

/// Goal: after a partial hit, the tree owns old and new positions, and only the positions after the
/// picture were added.
#[tokio::test]
async fn after_a_partial_hit_only_the_rest_is_added() -> Result<(), Error> {
    let album = Album::new(4096).await?;
    let first = album.ask("<image>what?").await?.finish.usage.prompt_tokens;
    let usage = album.ask("<image>0123456789").await?.finish.usage;
    let shared = album.len("<image>").await?;
    assert_eq!(usage.cached_tokens, shared);
    assert_eq!(usage.prompt_tokens, shared + 10);
    assert_eq!(album.conserved().await?, first + 10);
    Ok(())
}

/// Goal: a prompt that several requests compute is in the tree once.
#[tokio::test]
async fn the_same_prompt_is_stored_once() -> Result<(), Error> {
    let album = Album::new(4096).await?;
    let text = "<image>twice";
    let (one, other) = tokio::join!(album.ask(text), album.ask(text));
    assert_eq!(bits(&one?), bits(&other?));
    let len = album.len(text).await?;
    assert_eq!(album.conserved().await?, len);
    assert_eq!(album.stats().await?.blocks_committed, len as u64);
    album.ask(text).await?;
    assert_eq!(album.conserved().await?, len);
    Ok(())
}

/// Goal: a full match leaves the last position to a block of the request, which is free again
/// afterward, and generation can start.
#[tokio::test]
async fn a_full_match_computes_the_last_position() -> Result<(), Error> {
    let album = Album::new(4096).await?;
    // A longer answer, so that the cached logits of the prompt's end are not enough.
    let request = album.request("<image>again").max_tokens(3);
    let cold = album.engine.complete(request.clone()).await?;
    let before = album.conserved().await?;
    let warm = album.engine.complete(request).await?;
    let usage = warm.finish.usage;
    assert!(usage.cached_tokens + 1 >= usage.prompt_tokens, "{usage:?}");
    assert_eq!(bits(&warm), bits(&cold));
    assert_eq!(album.conserved().await?, before);
    Ok(())
}

/// Goal: requests that run at the same time read the same picture and do not disturb each other.
#[tokio::test]
async fn concurrent_requests_share_the_picture() -> Result<(), Error> {
    let album = Album::new(4096).await?;
    let texts = ["<image>one", "<image>two", "<image>one", "<image>three"];
    let long = |text: &str| album.request(text).max_tokens(10);
    let mut alone = Vec::new();
    for text in texts {
        let engine = builder().prefix_caching(false).build().await?;
        alone.push(bits(&engine.complete(long(text)).await?));
    }
    let together =
        futures::future::try_join_all(texts.map(|text| album.engine.complete(long(text))));
    for (answer, alone) in together.await?.iter().zip(&alone) {
        assert_eq!(bits(answer), *alone);
    }
    let tiles = album.tiles().await?;
    assert_eq!(album.engine.stats().images_encoded, tiles, "once for all");
    album.conserved().await?;
    Ok(())
}

/// Goal: a match of the first positions only loses no block.
#[tokio::test]
async fn a_tiny_hit_loses_no_block() -> Result<(), Error> {
    let album = Album::new(4096).await?;
    album.ask("a <image> long prompt").await?;
    let before = album.conserved().await?;
    let usage = album.ask("abc").await?.finish.usage;
    assert_eq!(usage.cached_tokens, album.len("a").await?);
    assert_eq!(album.conserved().await?, before + 2);
    album.engine.cache().flush().await?;
    assert_eq!(album.conserved().await?, 0);
    Ok(())
}

/// Goal: while a prefix is pinned, other pictures evict each other and not it; afterward it is
/// evicted like them.
#[tokio::test]
async fn under_pressure_a_pinned_picture_stays() -> Result<(), Error> {
    let engine = builder().num_blocks(600).pin_budget(100).build().await?;
    let mut album = Album { engine, image: picture(64, 64, 3) };
    let pinned = Arc::clone(&album.image);
    album.ask("<image>").await?;
    let pin = album.engine.cache().pin(&album.request("<image>"), None).await?;
    for unpinned in [false, true] {
        for seed in 10..30 {
            album.image = picture(64, 64, seed);
            album.ask("<image>").await?;
        }
        album.image = Arc::clone(&pinned);
        let (cached, len) = (album.cached("<image>")?, album.len("<image>").await?);
        assert_eq!(cached == len, !unpinned, "{cached} of {len}");
        if !unpinned {
            album.engine.cache().unpin(pin).await?;
        }
    }
    assert!(album.stats().await?.evicted_for_room > 0);
    album.conserved().await?;
    Ok(())
}

/// Goal: while pins leave too little room for a prompt, it is refused with an error that says what
/// was expected, and no block is lost. When some pins have ended, it is answered.
#[tokio::test]
async fn what_does_not_fit_next_to_pins_is_refused() -> Result<(), Error> {
    let engine = builder().num_blocks(600).pin_budget(599).build().await?;
    let mut album = Album { engine, image: picture(64, 64, 3) };
    let len = album.len("<image>").await?;
    let mut pins = Vec::new();
    for seed in 0..600_u32.div_ceil(len as u32) - 1 {
        album.image = picture(64, 64, 10 + seed);
        album.ask("<image>").await?;
        pins.push(album.engine.cache().pin(&album.request("<image>"), None).await?);
    }
    assert!(pins.len() > 2, "{len}");
    album.image = picture(64, 64, 3);
    let error = album.ask("<image> and <image>").await.expect_err("no room").to_string();
    assert!(error.contains("blocks"), "{error}");
    let audit = album.engine.audit().await?;
    assert_eq!(audit.blocks_free + audit.blocks_committed, audit.blocks_total);
    for pin in pins.drain(..2) {
        album.engine.cache().unpin(pin).await?;
    }
    album.ask("<image> and <image>").await?;
    for pin in pins {
        album.engine.cache().unpin(pin).await?;
    }
    album.conserved().await?;
    Ok(())
}

/// Goal: many requests about few pictures, with hits and misses of all kinds and some that are
/// canceled, lose no block and own none twice.
#[tokio::test]
async fn many_requests_lose_no_block() -> Result<(), Error> {
    let mut album = Album::new(600).await?;
    let pictures: Vec<_> = (0..5).map(|seed| picture(40 + 8 * seed, 64, seed)).collect();
    for round in 0..1000_usize {
        album.image = Arc::clone(&pictures[round * 7 % 5]);
        let text =
            ["<image>", "a<image>b", "<image> and <image>", "ab", "<image>bc"][round * 3 % 5];
        let text = format!("{text}{}", &"xyz"[..round % 4 % 3]);
        if round % 9 == 4 {
            drop(album.start(&text, 100).await?);
        } else {
            album.ask(&text).await?;
        }
        if round % 50 == 0 {
            album.conserved().await?;
        }
    }
    let blocks = album.conserved().await?;
    assert_eq!(album.stats().await?.blocks, blocks);
    album.engine.cache().flush().await?;
    assert_eq!(album.conserved().await?, 0);
    Ok(())
}

/// Goal: the namespaces of cache salts disappear with their last block and can be made again, and
/// queries make none.
#[tokio::test]
async fn empty_namespaces_are_pruned_and_queries_make_none() -> Result<(), Error> {
    let album = Album::new(4096).await?;
    let salted = |salt: usize| album.request("<image>").cache_salt(format!("salt {salt}"));
    for salt in 0..100 {
        assert_eq!(album.engine.cache().query_match_len(&salted(salt))?, 0);
    }
    assert_eq!(album.stats().await?.namespaces, 0);
    for salt in 0..10 {
        assert_eq!(album.engine.complete(salted(salt)).await?.finish.usage.cached_tokens, 0);
    }
    assert_eq!(album.stats().await?.namespaces, 10);
    let tiles = album.tiles().await?;
    let encoded = album.engine.stats().images_encoded;
    assert_eq!(encoded, 10 * tiles, "nobody can find out by timing what others have shown");
    album.engine.cache().flush().await?;
    assert_eq!((album.stats().await?.namespaces, album.conserved().await?), (0, 0));
    album.engine.complete(salted(0)).await?;
    assert_eq!(album.stats().await?.namespaces, 1);
    Ok(())
}
