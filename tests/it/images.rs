//! Prompts with images through the engine, on small random models of the structures of SmolVLM,
//! Qwen3-VL, Qwen3.5 and Gemma 3.

#[path = "images/adapters.rs"]
mod adapters;
#[path = "images/conversations.rs"]
mod conversations;
#[path = "images/gemma3.rs"]
mod gemma3;
#[path = "images/prefixes.rs"]
mod prefixes;
#[path = "images/qwen3_5.rs"]
mod qwen3_5;
#[path = "images/qwen3_vl.rs"]
mod qwen3_vl;
#[path = "images/restarts.rs"]
mod restarts;
#[path = "images/urls.rs"]
mod urls;
#[path = "images/work.rs"]
mod work;

use std::sync::Arc;

use bits::bits;
use pictures::picture;
use questions::question;
use serde_json::json;
use stolon::{
    ChatMessage, Engine, EngineBuilder, Error, MessageContent, PromptPart, Request, SessionOptions,
};

use crate::support::{bits, pictures, questions};

/// A model, and the string that takes the place of an image in its prompts.
#[derive(Clone, Copy)]
struct Model {
    name: &'static str,
    place: &'static str,
}

const SMOLVLM: Model = Model { name: "random:smolvlm-tiny", place: "<image>" };
const QWEN3_VL: Model =
    Model { name: "random:qwen3-vl-tiny", place: "<|vision_start|><|image_pad|><|vision_end|>" };
/// A model with recurrent layers and the same string.
const QWEN3_5: Model = Model { name: "random:qwen3.5-vl-tiny", ..QWEN3_VL };
const MODELS: [Model; 3] = [SMOLVLM, QWEN3_VL, QWEN3_5];

impl Model {
    fn builder(self) -> EngineBuilder {
        Engine::builder().model(self.name).num_blocks(8192).threads(1)
    }

    /// A text with `<image>` in each place of an image.
    fn text(self, text: &str) -> Request {
        Request::text(text.replace("<image>", self.place))
    }
}

fn builder() -> EngineBuilder {
    SMOLVLM.builder()
}

/// Goal: an answer about images has the same bits with a warm and with a cold cache, for one and
/// several images, at every block size and with steps that would cut the images. The part that a
/// question shares with another one is neither computed nor encoded again.
#[tokio::test]
async fn warm_answers_equal_cold_ones() -> Result<(), Error> {
    for model in MODELS {
        compare_warm_and_cold(model).await?;
    }
    Ok(())
}

async fn compare_warm_and_cold(model: Model) -> Result<(), Error> {
    let (one, other) = (picture(40, 30, 1), picture(90, 120, 2));
    let parts = [PromptPart::Tokens(vec![7]), PromptPart::Image, PromptPart::Image, "Why?".into()];
    let prompts = [
        question(&[&one], "What is this?"),
        question(&[&one], "What is this thing?"),
        question(&[&one, &other], "What differs?"),
        question(&[&other, &one], "What differs?"),
        [&other, &one].into_iter().fold(
            model.text("Hello <image> and <image>.").max_tokens(6).logprobs(0),
            |request, image| request.image(Arc::clone(image)),
        ),
        [&one, &other]
            .into_iter()
            .fold(Request::parts(parts).max_tokens(6).logprobs(0), |request, image| {
                request.image(Arc::clone(image))
            }),
    ];
    let mut cold = Vec::new();
    for prompt in &prompts {
        let engine = model.builder().prefix_caching(false).build().await?;
        cold.push(bits(&engine.complete(prompt.clone()).await?));
        engine.shutdown().await;
    }
    for (block_size, step) in [(1, 512), (1, 5), (4, 33), (16, 7), (64, 64)] {
        let builder = model.builder().block_size(block_size).max_batched_tokens(step);
        let engine = builder.num_blocks(8192 / block_size).build().await?;
        for round in 0..2 {
            for (prompt, cold) in prompts.iter().zip(&cold) {
                let answer = engine.complete(prompt.clone()).await?;
                assert_eq!(bits(&answer), *cold, "blocks of {block_size}, round {round}");
                let usage = answer.finish.usage;
                assert!(usage.image_tokens > 0 && usage.image_tokens < usage.prompt_tokens);
                if round == 1 && block_size == 1 {
                    assert!(usage.cached_tokens + 1 >= usage.prompt_tokens, "{usage:?}");
                }
            }
        }
        if block_size == 1 {
            assert!(engine.stats().images_encoded <= 12, "{}", engine.stats().images_encoded);
        }
        engine.audit().await?;
        engine.shutdown().await;
    }
    Ok(())
}

/// Goal: the second question about an image finds it in the cache, and lookups and estimates count
/// its positions.
#[tokio::test]
async fn a_second_question_finds_the_image() -> Result<(), Error> {
    let engine = builder().build().await?;
    let image = picture(64, 64, 3);
    let first = engine.complete(question(&[&image], "What is this?")).await?;
    let encoded = engine.stats().images_encoded;
    assert_eq!((first.finish.usage.cached_tokens, engine.model_info().block_size), (0, 1));
    let next = question(&[&image], "Which color has it?");
    let found = engine.cache().query_match_len(&next)?;
    assert!(found >= first.finish.usage.image_tokens, "{found}");
    let estimate = engine.estimate(&next)?;
    assert_eq!(estimate.cached_tokens, found);
    let second = engine.complete(engine.tokenized(next).await?).await?;
    assert_eq!(second.finish.usage.cached_tokens, found);
    assert_eq!(engine.stats().images_encoded, encoded, "nothing was encoded again");
    let other = question(&[&picture(64, 64, 4)], "What is this?");
    assert!(engine.cache().query_match_len(&other)? < first.finish.usage.image_tokens);
    Ok(())
}

/// The answers of a session to two turns with images and two without, and how many tokens of each
/// were cached and belong to images. Each turn sends only its new part. The cache is emptied before
/// the last one.
async fn turns(model: Model, engine: &Engine) -> Result<Vec<(Vec<(u32, u32)>, [usize; 2])>, Error> {
    let id = engine.sessions().open(SessionOptions::default())?.id;
    let (one, other) = (picture(40, 30, 1), picture(64, 64, 2));
    let turn = |text: &str| model.text(text).session(&id).append().max_tokens(4).logprobs(0);
    let mut answers = Vec::new();
    for request in [
        turn("Hello <image>, what is it?").image(one.clone()),
        turn(" And <image> or <image>?").image(other).image(one),
        turn(" Which was the first?"),
        turn(" And the last?"),
    ] {
        if answers.len() == 3 {
            engine.cache().flush().await?;
        }
        let answer = engine.complete(request.ignore_eos(true)).await?;
        let usage = answer.finish.usage;
        answers.push((bits(&answer), [usage.cached_tokens, usage.image_tokens]));
    }
    let mut refused = 0;
    for count in 0..60 {
        let fork = engine.sessions().fork(&id, format!("fork-{count}"), Some(count)).await;
        refused += usize::from(fork.is_err());
    }
    assert!(refused > 0 && refused < 50, "{refused} of the first 60 positions are inside an image");
    Ok(answers)
}

/// Goal: turns with images can be appended to a session, and turns without to a session with
/// images. Their answers have the bits of an engine without a cache, also after the cache was
/// emptied, and cached positions are not computed again.
#[tokio::test]
async fn images_are_appended_to_sessions() -> Result<(), Error> {
    for model in MODELS {
        compare_sessions(model).await?;
    }
    Ok(())
}

async fn compare_sessions(model: Model) -> Result<(), Error> {
    let cold = turns(model, &model.builder().prefix_caching(false).build().await?).await?;
    let engine = model.builder().build().await?;
    let warm = turns(model, &engine).await?;
    assert_eq!((warm.len(), cold.len()), (4, 4));
    for (warm, cold) in warm.iter().zip(&cold) {
        assert_eq!(warm.0, cold.0);
    }
    let images: Vec<usize> = warm.iter().map(|(_, [_, images])| *images).collect();
    assert!(0 < images[0] && images[0] < images[1], "{images:?}");
    assert_eq!(images[1..], [images[1]; 3], "the images of all turns count");
    let cached: Vec<usize> = warm.iter().map(|(_, [cached, _])| *cached).collect();
    assert!(cached[1] > images[0] && cached[2] > images[1], "{cached:?} {images:?}");
    assert_eq!((cached[0], cached[3]), (0, 0), "the cache was emptied");
    engine.audit().await?;
    Ok(())
}

/// Goal: images as message parts in OpenAI's form have the same effect as [`Request::image`].
#[tokio::test]
async fn parts_with_data_urls_are_images() -> Result<(), Error> {
    let engine = builder().build().await?;
    let image = picture(5, 8, 3);
    let url = format!("data:image/bmp;base64,{}", base64(&image));
    let parts = |image| {
        let mut message = ChatMessage::user("");
        let text = json!({"type": "text", "text": "What is this?"});
        message.content = Some(MessageContent::Parts(vec![image, text]));
        Request::chat(vec![message]).max_tokens(3)
    };
    let tokens = engine.prompt_tokens(&question(&[&image], "What is this?")).await?;
    for part in [
        json!({"type": "image_url", "image_url": {"url": url}}),
        json!({"type": "image_url", "image_url": url}),
    ] {
        assert_eq!(engine.prompt_tokens(&parts(part)).await?, tokens);
    }
    // Forms that clients write: lines of MIME, the alphabet for URLs, no padding, another case.
    let encoded = base64(&image);
    assert!(encoded.contains('=') && encoded.contains(['+', '/']), "{encoded}");
    let lines: Vec<&str> =
        encoded.as_bytes().chunks(76).filter_map(|line| str::from_utf8(line).ok()).collect();
    for url in [
        format!("data:image/bmp;base64,{}\r\n", lines.join("\r\n")),
        format!("data:image/bmp;base64,{}", encoded.replace('+', "-").replace('/', "_")),
        format!("data:image/bmp;base64,{}", encoded.trim_end_matches('=')),
        format!("DATA:image/BMP;charset=utf-8;BASE64,{encoded}"),
    ] {
        let part = json!({"type": "image_url", "image_url": {"url": url}});
        assert_eq!(engine.prompt_tokens(&parts(part)).await?, tokens, "{url}");
    }
    let placed = parts(json!({"type": "image"})).image(image);
    assert_eq!(engine.prompt_tokens(&placed).await?, tokens);
    for (url, expected) in [
        ("https://example.com/a.png", "expected a data URL in base64"),
        ("data:image/png;base64,!", "expected a data URL in base64"),
        ("data:image/png;base64,AAAA", "image 1: "),
    ] {
        let request = parts(json!({"type": "image_url", "image_url": {"url": url}}));
        let error = engine.generate(request).await.expect_err(url).to_string();
        assert!(error.contains(expected), "{url}: {error}");
    }
    Ok(())
}

/// Goal: requests that cannot be answered are refused with an error that says what was expected,
/// and disturb no other request.
#[tokio::test]
async fn wrong_images_are_refused() -> Result<(), Error> {
    let engine = builder().build().await?;
    let image = picture(8, 8, 3);
    let text = engine.generate(Request::text("no <image> but two <image>").image(image.clone()));
    let error = text.await.expect_err("one image for two places").to_string();
    assert!(error.contains("expected 2 images"), "{error}");
    let broken: Arc<[u8]> = image[..60].into();
    let error = engine.generate(question(&[&image, &broken], "?")).await.expect_err("broken");
    assert!(matches!(error, Error::Image { number: 2, .. }), "{error}");
    let error = engine.generate(question(&[&image], "?").prompt_logprobs(1)).await;
    assert!(error.expect_err("prompt logprobs").to_string().contains("images"));
    engine.complete(question(&[&image], "?")).await?;
    let engine = Engine::builder().model("random:tiny").num_blocks(64).threads(1).build().await?;
    let error = engine.generate(Request::text("hi").image(image)).await.expect_err("text only");
    assert!(error.to_string().contains("the model takes text only"), "{error}");
    Ok(())
}

fn base64(bytes: &[u8]) -> String {
    use ::base64::Engine as _;
    ::base64::engine::general_purpose::STANDARD.encode(bytes)
}
