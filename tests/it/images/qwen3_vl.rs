//! Properties of prompts of Qwen3-VL, whose images are grids: positions after an image follow from
//! the prefix alone, however a prompt is divided, cached, preempted and continued.

use std::sync::Arc;

use futures::future::try_join_all;
use stolon::{Engine, Error, Request};

use super::{QWEN3_VL, bits, picture, question};

/// Goal: requests that are preempted within and after their images, and computed again, have the
/// answers of an engine with enough room.
#[tokio::test(flavor = "multi_thread")]
async fn preempted_answers_equal_undisturbed_ones() -> Result<(), Error> {
    let images = [picture(40, 120, 1), picture(120, 40, 2), picture(64, 64, 3)];
    let request = |index: usize| {
        let pair = [&images[index % 3], &images[(index + 1) % 3]];
        question(&pair, &format!("What is {index}?")).max_tokens(60).ignore_eos(true)
    };
    let mut alone = Vec::new();
    for index in 0..6 {
        let engine = QWEN3_VL.builder().prefix_caching(false).build().await?;
        alone.push(bits(&engine.complete(request(index)).await?));
    }
    for (block_size, step) in [(1, 64), (16, 7)] {
        let builder = QWEN3_VL.builder().block_size(block_size).max_batched_tokens(step);
        let engine = builder.num_blocks(320 / block_size).event_capacity(8).build().await?;
        // None can end before it is read, so all of them run at the same time.
        let streams = try_join_all((0..6).map(|index| engine.generate(request(index)))).await?;
        let answers = try_join_all(streams.into_iter().map(|stream| stream.collect_text())).await?;
        for (answer, alone) in answers.iter().zip(&alone) {
            assert_eq!(bits(answer), *alone, "blocks of {block_size}");
        }
        assert!(engine.stats().preemptions > 0, "the pool is too small for all");
        engine.audit().await?;
    }
    Ok(())
}

/// Goal: text without images is answered, and has the same bits in a batch with images.
#[tokio::test]
async fn text_is_answered_next_to_images() -> Result<(), Error> {
    let text = Request::text("Once upon a time").max_tokens(12).logprobs(0).ignore_eos(true);
    let alone = bits(&QWEN3_VL.builder().build().await?.complete(text.clone()).await?);
    let engine = QWEN3_VL.builder().build().await?;
    let image = picture(90, 30, 1);
    let both = [text, question(&[&image], "What is this?")];
    let answers = try_join_all(both.map(|request| engine.complete(request))).await?;
    assert_eq!(bits(&answers[0]), alone);
    Ok(())
}

/// Goal: a picture takes as many tokens as it has squares of patches, in its own shape and within
/// the bounds of the processor.
#[tokio::test]
async fn pictures_keep_their_shape() -> Result<(), Error> {
    let engine = QWEN3_VL.builder().build().await?;
    // Squares of 16 pixels, at least 4 of them and at most 64.
    for (size, tokens) in
        [([64, 64], 16), ([64, 32], 8), ([100, 37], 12), ([1, 1], 4), ([2000, 1000], 55)]
    {
        let image = picture(size[0], size[1], 1);
        let usage = engine.complete(question(&[&image], "?").max_tokens(1)).await?.finish.usage;
        assert_eq!(usage.image_tokens, tokens, "{size:?}");
    }
    Ok(())
}

/// Goal: pictures that the processor refuses are refused with an error that says what was expected,
/// and so is a prompt with the image token but without an image.
#[tokio::test]
async fn wrong_pictures_are_refused() -> Result<(), Error> {
    let engine = QWEN3_VL.builder().build().await?;
    for size in [[1, 10_000], [10_000, 1], [201, 1]] {
        let image = picture(size[0], size[1], 1);
        let error = engine.generate(question(&[&image], "?")).await.expect_err("too narrow");
        assert!(matches!(error, Error::Image { number: 1, .. }), "{error}");
        let expected = "edges of which one is at most 200 times the other";
        assert!(error.to_string().contains(expected), "{error}");
        assert!(error.to_string().contains(&format!("{} x {}", size[0], size[1])), "{error}");
    }
    let image: Arc<[u8]> = picture(200, 1, 1);
    engine.complete(question(&[&image], "?")).await?;
    let doubled = Request::text("<|image_pad|> and").image(image);
    let error = engine.generate(doubled).await.expect_err("two places for one image");
    assert!(error.to_string().contains("expected 1 image tokens"), "{error}");
    Ok(())
}

/// Goal: the estimate of a request counts the tokens of its images, and embeddings of images with
/// rows for several layers are kept within the bytes of the encoder cache.
#[tokio::test]
async fn embeddings_are_bounded_in_bytes() -> Result<(), Error> {
    // 16 rows of 64 values of 4 bytes, for each of three layers.
    let bytes = 16 * 64 * 4 * 3;
    for (room, encoded) in [(bytes, 1), (bytes - 1, 2)] {
        let builder = QWEN3_VL.builder().prefix_caching(false).encoder_cache_bytes(room);
        let engine: Engine = builder.build().await?;
        let image = picture(64, 64, 1);
        for _ in 0..2 {
            engine.complete(question(&[&image], "?")).await?;
        }
        assert_eq!(engine.stats().images_encoded, encoded, "{room} bytes");
    }
    Ok(())
}
