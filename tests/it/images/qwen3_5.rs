//! Properties of prompts of Qwen3.5, which has images and recurrent layers: requests resume from
//! checkpoints, which are never inside an image.

use stolon::{Engine, Error};

use super::{QWEN3_5, bits, picture, question};

/// Goal: the second question about a picture resumes after it, with the bits of a cold cache, and the
/// picture is not encoded again.
#[tokio::test]
async fn a_second_question_resumes_after_the_image() -> Result<(), Error> {
    let (one, other) = (picture(90, 40, 1), picture(64, 64, 2));
    for images in [&[&one][..], &[&one, &other]] {
        let next = question(images, "Which color has it?");
        let cold = QWEN3_5.builder().prefix_caching(false).build().await?;
        let expected = bits(&cold.complete(next.clone()).await?);
        for step in [7, 512] {
            let engine: Engine = QWEN3_5.builder().max_batched_tokens(step).build().await?;
            engine.complete(question(images, "What is this?")).await?;
            let (encoded, found) =
                (engine.stats().images_encoded, engine.cache().query_resume(&next)?);
            let tokenized = engine.tokenized(next.clone()).await?;
            let prompt = engine.prompt_tokens(&tokenized).await?;
            let end = 1 + prompt.iter().rposition(|&token| token >> 31 == 1).expect("an image");
            assert_eq!(found.resume, end, "of {} in steps of {step}", prompt.len());
            assert!(found.cached > end, "the questions begin alike");
            let answer = engine.complete(next.clone()).await?;
            assert_eq!(answer.finish.usage.cached_tokens, end);
            assert_eq!(bits(&answer), expected, "in steps of {step}");
            assert_eq!(engine.stats().images_encoded, encoded);
            engine.audit().await?;
        }
    }
    Ok(())
}

/// Goal: with blocks that end inside images, no checkpoint is taken there, and answers have the
/// same bits.
#[tokio::test]
async fn no_checkpoint_is_taken_inside_an_image() -> Result<(), Error> {
    // The image has 64 tokens, and the prompt fewer than three blocks of 32.
    let asked = question(&[&picture(128, 128, 1)], "?").max_tokens(1);
    let cold = QWEN3_5.builder().prefix_caching(false).build().await?;
    let expected = bits(&cold.complete(asked.clone()).await?);
    for (block_size, taken) in [(1, 2), (32, 0)] {
        let builder = QWEN3_5.builder().block_size(block_size).num_blocks(8192 / block_size);
        let engine = builder.build().await?;
        for _ in 0..2 {
            let answer = engine.complete(asked.clone()).await?;
            assert_eq!(bits(&answer), expected, "blocks of {block_size}");
        }
        assert_eq!(engine.stats().checkpoints, taken, "blocks of {block_size}");
        engine.audit().await?;
    }
    Ok(())
}
