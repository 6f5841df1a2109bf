//! Decoding of images, which takes turns between clients.

use std::sync::{Arc, Mutex, mpsc};

use futures::stream::FuturesUnordered;
use futures::{StreamExt, poll};
use stolon::Error;

use super::pictures::picture;
use super::questions::question;
use super::{MODELS, builder};

/// The header of a picture, with a part of its pixels.
fn header(width: u32, height: u32) -> Arc<[u8]> {
    let mut file = picture(8, 8, 1).to_vec();
    file[18..22].copy_from_slice(&width.to_le_bytes());
    file[22..26].copy_from_slice(&height.to_le_bytes());
    file.into()
}

/// Goal: the pixels of all images of a request together are bounded, and a defect of a header is
/// reported, before the first image is decoded. No image of this test can be decoded.
#[tokio::test]
async fn headers_are_checked_before_images_are_decoded() -> Result<(), Error> {
    let large = header(8000, 8000);
    for model in MODELS {
        let engine = model.builder().build().await?;
        let refused = async |images: &[&Arc<[u8]>]| {
            let text = model.text(&"<image>".repeat(images.len()));
            let request = images.iter().fold(text, |text, image| text.image(Arc::clone(image)));
            // A look-up prepares the prompt on the calling thread.
            let here = engine.estimate(&request).expect_err("refused").to_string();
            assert_eq!(engine.complete(request).await.expect_err("refused").to_string(), here);
            here
        };
        let error = refused(&[&large; 5]).await;
        let expected = "image 5: expected at most 268435456 pixels in a request, got 320000000 up \
                        to this image";
        assert_eq!(error, expected);
        let error = refused(&[&large, &large, &header(20_000, 1)]).await;
        assert!(error.starts_with("image 3: the picture is too large"), "{error}");
        let error = refused(&[&large; 4]).await;
        assert!(error.starts_with("image 1: the picture cannot be decoded as BMP"), "{error}");
        engine.shutdown().await;
    }
    Ok(())
}

/// Goal: each image is a piece of work of its own: other work of the client that came later has its
/// turn before the last image of a request.
#[tokio::test]
async fn each_image_is_a_piece_of_work() -> Result<(), Error> {
    let engine = builder().build().await?;
    let image = picture(40, 30, 1);
    let client = || Some("one".into());
    // The client's work takes all slots that one client can get.
    let (end, ended) = mpsc::channel::<()>();
    let ended = Arc::new(Mutex::new(ended));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut busy: FuturesUnordered<_> = (0..cores)
        .map(|_| {
            let ended = Arc::clone(&ended);
            engine.long_work(client(), move || ended.lock().expect("no panic").recv().is_ok())
        })
        .collect();
    assert!(poll!(busy.next()).is_pending());
    let of_client = engine.clone();
    let request = question(&[&image; 3], "What?").tenant("one");
    let request = tokio::spawn(async move { of_client.tokenized(request).await });
    tokio::task::yield_now().await;
    let mut other = Box::pin(engine.long_work(client(), || ()));
    assert!(poll!(&mut other).is_pending());
    drop(end);
    while busy.next().await.is_some() {}
    other.await?;
    // The headers have been read, and the images follow.
    assert!(!request.is_finished(), "all images were one piece of work");
    request.await.expect("no panic")?;
    Ok(())
}
