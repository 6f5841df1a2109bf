//! Images that requests name by URL.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;
use stolon::{ChatMessage, Engine, EngineError, Error, MessageContent, Request};
use stolon_backend::fake::{FakeBackend, FakeOptions};

use super::bits::bits;
use super::builder;
use super::pictures::picture;
use super::questions::question;

/// A question about the images at these URLs.
fn question_of_urls(urls: &[&str], text: &str) -> Request {
    let images = urls.iter().map(|url| json!({"type": "image_url", "image_url": {"url": url}}));
    let parts = images.chain([json!({"type": "text", "text": text})]).collect();
    let mut message = ChatMessage::user("");
    message.content = Some(MessageContent::Parts(parts));
    Request::chat(vec![message]).max_tokens(6).logprobs(0)
}

/// Goal: images that the program's function fetches are those of the same files, wherever the
/// request names them; what it refuses is reported with the number of the image, and without a
/// function all other URLs than data URLs are refused.
#[tokio::test]
async fn the_programs_function_fetches_images() -> Result<(), Error> {
    let (one, other) = (picture(40, 30, 1), picture(60, 50, 2));
    let fetched = Arc::new(AtomicUsize::new(0));
    let (files, calls) = ([Arc::clone(&one), Arc::clone(&other)], Arc::clone(&fetched));
    let engine = builder().image_urls(move |url| {
        calls.fetch_add(1, Ordering::Relaxed);
        let file = match &*url {
            "https://a.test/one" => Ok(files[0].to_vec()),
            "https://a.test/other" => Ok(files[1].to_vec()),
            url => Err(format!("expected one of two files, got {url}")),
        };
        async move { file }
    });
    let engine = engine.build().await?;
    let expected = bits(&engine.complete(question(&[&one, &other], "What differs?")).await?);
    assert_eq!(fetched.load(Ordering::Relaxed), 0);
    let urls = ["https://a.test/one", "https://a.test/other"];
    let answer = engine.complete(question_of_urls(&urls, "What differs?")).await?;
    assert_eq!(bits(&answer), expected);
    let usage = answer.finish.usage;
    assert!(usage.cached_tokens + 1 >= usage.prompt_tokens, "{usage:?}");
    assert_eq!(fetched.load(Ordering::Relaxed), 2);
    let request = Request::chat(vec![ChatMessage::user("What differs?")]);
    let request = request.image(Arc::clone(&one)).image_url(urls[1]).max_tokens(6).logprobs(0);
    assert_eq!(bits(&engine.complete(request).await?), expected);

    let missing = [urls[0], "https://a.test/missing"];
    let error = engine.complete(question_of_urls(&missing, "What?")).await.expect_err("no file");
    let expected = "image 2: expected one of two files, got https://a.test/missing";
    assert_eq!(error.to_string(), expected);
    engine.shutdown().await;

    let engine = builder().build().await?;
    let error = engine.complete(question_of_urls(&urls, "What?")).await.expect_err("no function");
    assert!(error.to_string().starts_with("image 1: expected a data URL in base64"), "{error}");
    engine.shutdown().await;
    Ok(())
}

/// Goal: a custom backend, for which no image is fetched, refuses the function.
#[tokio::test]
async fn a_custom_backend_fetches_no_images() {
    let backend = Box::new(FakeBackend::new(FakeOptions::default()));
    let builder = Engine::builder().backend("fake", backend);
    let builder = builder.image_urls(|_| async { Ok(Vec::new()) });
    match builder.build().await.expect_err("it has no effect") {
        Error::Engine(EngineError::InvalidParameter { name, .. }) => assert_eq!(name, "image_urls"),
        other => panic!("{other}"),
    }
}
