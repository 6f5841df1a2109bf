//! Images that requests name by URL.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::FutureExt;
use serde_json::json;
use stolon::{ChatMessage, Engine, EngineError, Error, MessageContent, Request};
use stolon_backend::fake::{FakeBackend, FakeOptions};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

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

/// Goal: images that the program's function fetches have the same effect as the same files,
/// wherever the request names them. URLs that it refuses are reported with the number of the image,
/// and without a function all URLs except data URLs are refused.
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

/// Goal: before the first image is fetched, it is checked whether the model takes images and how
/// many there are; equal URLs are fetched once; and the size of all files of a request is bounded.
#[tokio::test]
async fn little_is_fetched_for_a_request() -> Result<(), Error> {
    let file = picture(40, 30, 1);
    let fetched = Arc::new(AtomicUsize::new(0));
    let (small, calls) = (Arc::clone(&file), Arc::clone(&fetched));
    let fetch = move |url: Arc<str>| {
        calls.fetch_add(1, Ordering::Relaxed);
        let file = if url.contains("large") { vec![0; 33 << 20] } else { small.to_vec() };
        async move { Ok(file) }
    };
    let engine = builder().image_urls(fetch.clone()).build().await?;
    let many: Vec<_> = (0..257).map(|number| format!("https://a.test/{number}")).collect();
    let many: Vec<_> = many.iter().map(String::as_str).collect();
    let error = engine.complete(question_of_urls(&many, "What?")).await.expect_err("too many");
    assert_eq!(error.to_string(), "images: expected at most 256, got 257");
    assert_eq!(fetched.load(Ordering::Relaxed), 0);

    let expected = bits(&engine.complete(question(&[&file, &file], "What differs?")).await?);
    let twice = question_of_urls(&["https://a.test/one"; 2], "What differs?");
    assert_eq!(bits(&engine.complete(twice).await?), expected);
    assert_eq!(fetched.load(Ordering::Relaxed), 1);

    let large = ["https://a.test/large", "https://a.test/one", "https://a.test/large/other"];
    let error = engine.complete(question_of_urls(&large, "What?")).await.expect_err("too large");
    let bytes = 2 * (33 << 20) + file.len();
    let expected = format!(
        "image 3: expected at most 67108864 bytes of fetched files in a request, got {bytes} up to \
         this one"
    );
    assert_eq!(error.to_string(), expected);
    engine.shutdown().await;

    fetched.store(0, Ordering::Relaxed);
    let engine = Engine::builder().model("random:tiny").image_urls(fetch).build().await?;
    let error = engine.complete(question_of_urls(&many[..1], "What?")).await.expect_err("text");
    assert!(error.to_string().contains("the model takes text only"), "{error}");
    assert_eq!(fetched.load(Ordering::Relaxed), 0);
    engine.shutdown().await;
    Ok(())
}

/// Goal: only a few requests hold fetched files at the same time, and only some of these are of one
/// client, so that requests of others continue while the hosts of one client are slow. Requests
/// that wait are answered afterward, and a request that is given up makes room at once.
#[tokio::test]
async fn requests_with_fetched_files_are_bounded() -> Result<(), Error> {
    let (slow, fetching) = (Arc::new(Semaphore::new(0)), Arc::new(AtomicUsize::new(0)));
    let (file, gate, count) = (picture(40, 30, 1), Arc::clone(&slow), Arc::clone(&fetching));
    let fetch = move |url: Arc<str>| {
        let (file, gate, count) = (file.to_vec(), Arc::clone(&gate), Arc::clone(&count));
        async move {
            if url.contains("slow") {
                count.fetch_add(1, Ordering::Relaxed);
                let _passed = gate.acquire().await;
            }
            Ok(file)
        }
    };
    let engine = builder().image_urls(fetch).build().await?;
    let ask = |client: &'static str| {
        let (engine, request) = (engine.clone(), question_of_urls(&["https://slow.test"], "What?"));
        async move { engine.complete(request.tenant(client)).await }
    };
    let fetched = async |count| {
        while fetching.load(Ordering::Relaxed) < count {
            tokio::task::yield_now().await;
        }
    };
    let (mut requests, mut given_up) = (JoinSet::new(), JoinSet::new());
    for client in ["one", "two", "three"] {
        (0..10).for_each(|_| drop(requests.spawn(ask(client))));
        fetched(2 * requests.len() / 10).await;
    }
    let other = question_of_urls(&["https://a.test"], "What?").tenant("other");
    engine.complete(other.clone()).await?;
    assert_eq!(fetching.load(Ordering::Relaxed), 6);
    // All places are taken.
    (0..5).for_each(|_| drop(given_up.spawn(ask("four"))));
    fetched(8).await;
    let mut waiting = Box::pin(engine.complete(other));
    assert!((&mut waiting).now_or_never().is_none());
    given_up.abort_all();
    waiting.await?;
    assert_eq!(fetching.load(Ordering::Relaxed), 8);
    slow.add_permits(1);
    while let Some(answer) = requests.join_next().await {
        answer.expect("no panic")?;
    }
    assert_eq!(fetching.load(Ordering::Relaxed), 8 + 30 - 6);
    engine.shutdown().await;
    Ok(())
}
