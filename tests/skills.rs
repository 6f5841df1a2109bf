//! Questions about images and descriptions of them with a model that was trained for these tasks,
//! on small random models of the structure of Moondream 2 and 3.

#[path = "support/bits.rs"]
mod bits;
#[path = "support/pictures.rs"]
mod pictures;

use std::sync::Arc;

use bits::bits;
use pictures::picture;
use stolon::{CaptionLength, ChatMessage, Engine, EngineBuilder, Error, Request};

/// Number of positions of an image, with the token before it.
const ROWS: usize = 26;

const MODELS: [&str; 2] = ["random:moondream2-tiny", "random:moondream3-tiny"];

fn builder() -> EngineBuilder {
    builder_of(MODELS[0])
}

fn builder_of(model: &str) -> EngineBuilder {
    Engine::builder().model(model).num_blocks(8192).threads(1)
}

/// With log-probabilities, so that answers are compared bit by bit.
fn short(request: Request) -> Request {
    request.max_tokens(6).logprobs(0)
}

/// Goal: an answer about an image has the same bits with a warm and with a cold cache, at every
/// block size and size of steps, although an image of several tiles is larger than a step. Images
/// share nothing, not even the token that begins the prompt, because it attends to the image.
#[tokio::test]
async fn warm_answers_equal_cold_ones() -> Result<(), Error> {
    for model in MODELS {
        warm_equals_cold(model).await?;
    }
    Ok(())
}

async fn warm_equals_cold(model: &str) -> Result<(), Error> {
    let (one, other) = (picture(40, 30, 1), picture(190, 120, 2));
    let prompts = [
        short(Request::query("What is this?").image(Arc::clone(&one))),
        short(Request::query("What is this thing?").image(Arc::clone(&one))),
        short(Request::caption(CaptionLength::Short).image(Arc::clone(&one))),
        short(Request::query("What is this?").image(Arc::clone(&other))),
        short(Request::query("What is this?")),
    ];
    let mut cold = Vec::new();
    for prompt in &prompts {
        let engine = builder_of(model).prefix_caching(false).build().await?;
        cold.push(bits(&engine.complete(prompt.clone()).await?));
        engine.shutdown().await;
    }
    for pair in cold.windows(2) {
        assert_ne!(pair[0], pair[1], "the prompts lead to different logits");
    }
    for (block_size, step) in [(1, 512), (1, 5), (4, 33), (16, 7)] {
        let builder = builder_of(model).block_size(block_size).max_batched_tokens(step);
        let engine = builder.num_blocks(8192 / block_size).build().await?;
        for round in 0..2 {
            for (index, (prompt, cold)) in prompts.iter().zip(&cold).enumerate() {
                let answer = engine.complete(prompt.clone()).await?;
                assert_eq!(bits(&answer), *cold, "{model}, blocks of {block_size}, round {round}");
                let usage = answer.finish.usage;
                assert_eq!(usage.image_tokens, if index == 4 { 0 } else { ROWS });
                if block_size > 1 {
                    // The end of an image is mostly within a block.
                    continue;
                }
                if round == 0 {
                    let is_new = [0, 3, 4].contains(&index);
                    assert_eq!(usage.cached_tokens == 0, is_new, "{index}");
                } else {
                    assert!(usage.cached_tokens + 1 >= usage.prompt_tokens, "{usage:?}");
                }
            }
        }
        if block_size == 1 {
            assert_eq!(engine.stats().images_encoded, 2);
        }
        engine.audit().await?;
        engine.shutdown().await;
    }
    Ok(())
}

/// Goal: prompts have the tokens of the model's configuration around the words, and the image
/// before them; texts and token ids have it there, too, without a second token that begins a
/// sequence.
#[tokio::test]
async fn prompts_are_those_of_the_configuration() -> Result<(), Error> {
    let engine = builder().build().await?;
    assert_eq!(engine.model_info().skills, ["query", "caption", "point", "detect"]);
    let image = picture(9, 9, 1);
    let tokens = async |request: Request| engine.prompt_tokens(&request).await;
    let question = tokens(Request::query(" ab ")).await?;
    assert_eq!(question, [0, 1, 81, 2, 97, 98, 3, 3]);
    let question = tokens(Request::query("ab").image(Arc::clone(&image))).await?;
    assert_eq!((question.len(), &question[ROWS..]), (ROWS + 7, &[1, 81, 2, 97, 98, 3, 3][..]));
    assert!(question[..ROWS].iter().all(|id| *id >= 320));
    for (length, word) in
        [(CaptionLength::Short, 115), (CaptionLength::Normal, 110), (CaptionLength::Long, 108)]
    {
        let caption = tokens(Request::caption(length).image(Arc::clone(&image))).await?;
        assert_eq!((caption.len(), &caption[ROWS..]), (ROWS + 5, &[1, 67, 2, word, 3][..]));
    }
    for request in [Request::text("ab"), Request::tokens([97, 98]), Request::tokens([0, 97, 98])] {
        let tokens = tokens(request.image(Arc::clone(&image))).await?;
        assert_eq!((tokens.len(), &tokens[ROWS..]), (ROWS + 2, &[97, 98][..]));
    }
    Ok(())
}

/// Goal: points and boxes are found with the same bits warm and cold, whether the request runs
/// alone or with others, and cached logits of the vocabulary are not used for them.
#[tokio::test]
async fn points_and_boxes_are_found() -> Result<(), Error> {
    for model in MODELS {
        finds_points_and_boxes(model).await?;
    }
    Ok(())
}

async fn finds_points_and_boxes(model: &str) -> Result<(), Error> {
    let image = picture(120, 70, 1);
    let requests = [
        Request::point("cat").image(Arc::clone(&image)).max_tokens(9),
        Request::detect("cat").image(Arc::clone(&image)).max_tokens(10),
        Request::query("cat").image(Arc::clone(&image)).max_tokens(5),
    ];
    let mut cold = Vec::new();
    for request in &requests {
        let engine = builder_of(model).prefix_caching(false).build().await?;
        cold.push(engine.complete(request.clone()).await?);
        engine.shutdown().await;
    }
    for block_size in [1, 16] {
        let builder = builder_of(model).block_size(block_size);
        let engine = builder.num_blocks(4096 / block_size).build().await?;
        let info = engine.model_info();
        for _ in 0..2 {
            let all = requests.iter().map(|request| engine.complete(request.clone()));
            let all = futures::future::try_join_all(all).await?;
            for (answer, cold) in all.iter().zip(&cold) {
                assert_eq!(answer.token_ids, cold.token_ids, "{model}, blocks of {block_size}");
            }
            for (answer, found, tokens) in
                [(&all[0], all[0].points(info).len(), 2), (&all[1], all[1].boxes(info).len(), 3)]
            {
                // The rest are the end, or what was cut off.
                let rest = answer.token_ids.len() - tokens * found;
                assert!(found > 0 && rest < tokens, "{:?}", answer.token_ids);
            }
            assert!(all[0].boxes(info).is_empty());
            assert!(all[0].text.is_empty() && all[1].text.is_empty());
            for found in all[1].boxes(info) {
                assert!(found.x_min <= found.x_max && found.y_min <= found.y_max, "{found:?}");
            }
        }
        engine.audit().await?;
        engine.shutdown().await;
    }
    Ok(())
}

/// Goal: tokens that do not occur in answers are never chosen, and only in answers of skills.
#[tokio::test]
async fn answers_have_no_tokens_of_prompts() -> Result<(), Error> {
    let engine = builder().build().await?;
    let biased = stolon::SamplingParams {
        logit_bias: vec![(3, 100.0)].into(),
        ..stolon::SamplingParams::default()
    };
    let with_bias = |request: Request| short(request).sampling(biased.clone());
    let answer = engine.complete(with_bias(Request::query("a"))).await?;
    assert!(!answer.token_ids.contains(&3), "{:?}", answer.token_ids);
    let answer = engine.complete(with_bias(Request::text("a"))).await?;
    assert_eq!(answer.token_ids, [3; 6]);
    Ok(())
}

/// Goal: what cannot be done is refused with what was expected.
#[tokio::test]
async fn errors_say_what_was_expected() -> Result<(), Error> {
    let engine = builder().build().await?;
    let image = picture(9, 9, 1);
    let two = Request::query("a").image(Arc::clone(&image)).image(Arc::clone(&image));
    for (request, expected) in [
        (two, "images: expected one image, got 2"),
        (Request::query(" "), "question: expected a question, got an empty text"),
        (Request::caption(CaptionLength::Long), "images: expected an image, got 0"),
        (Request::point("a"), "images: expected an image, got 0"),
        (Request::detect("").image(Arc::clone(&image)), "object: expected the name of a thing"),
        (Request::query("a").image_url("http://a/b.png"), "expected a data URL in base64"),
        (Request::query("a").image_url("data:image/png;base64,a!"), "Invalid symbol"),
        (Request::chat(vec![ChatMessage::user("a")]), "chat template"),
    ] {
        let error = engine.complete(request).await.expect_err("a bad request").to_string();
        assert!(error.contains(expected), "{error}");
    }
    let other = Engine::builder().model("random:tiny").num_blocks(64).threads(1).build().await?;
    assert!(other.model_info().skills.is_empty());
    let error = other.complete(Request::query("a")).await.expect_err("no skill").to_string();
    assert!(error.contains("expected a model that was trained to answer questions"), "{error}");
    Ok(())
}
