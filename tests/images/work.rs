//! Decoding of images as work that clients share.

use std::sync::Arc;

use stolon::{Error, Request};

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

/// Goal: the pixels of all images of a request together are bounded, and what is wrong with a header
/// is reported, before the first image is decoded: here none can be.
#[tokio::test]
async fn headers_are_checked_before_images_are_decoded() -> Result<(), Error> {
    let large = header(8000, 8000);
    for model in MODELS {
        let engine = model.builder().build().await?;
        let refused = async |images: &[&Arc<[u8]>]| {
            let text = model.text(&"<image>".repeat(images.len()));
            let request = images.iter().fold(text, |text, image| text.image(Arc::clone(image)));
            // A look-up computes the prompt on the calling thread.
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

/// Goal: a client's request with one image is prepared while others have more images to decode than
/// there are threads for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_take_turns_at_each_image() -> Result<(), Error> {
    let engine = builder().build().await?;
    let large: Vec<_> = (0..24).map(|seed| picture(1200, 1200, seed)).collect();
    let large: Vec<_> = large.iter().collect();
    let prepare = |client: &'static str, request: Request| {
        let engine = engine.clone();
        tokio::spawn(async move { engine.tokenized(request.tenant(client)).await })
    };
    let others = ["one", "two"].map(|client| prepare(client, question(&large, "What?")));
    // They begin first: the runtime starts tasks in order, and their first pieces are short.
    tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    prepare("three", question(&[&picture(8, 8, 1)], "What?")).await.expect("no panic")?;
    for other in others {
        assert!(
            !other.is_finished(),
            "its images were decoded before the request of another client"
        );
        other.await.expect("no panic")?;
    }
    Ok(())
}
