//! Images in requests with an adapter.

use super::bits::bits;
use super::pictures::picture;
use super::questions::question;
use super::*;
use crate::support::adapter_writer::AdapterWriter;

/// Goal: an adapter of the decoder changes the answers about an image, also while requests to the
/// model itself run, and shares neither KV nor embeddings with the model itself. The second
/// question to the adapter finds both.
#[tokio::test]
async fn adapters_have_images_of_their_own() -> Result<(), Box<dyn std::error::Error>> {
    let mut adapter = AdapterWriter::new(4, 1);
    for layer in 0..2 {
        for (projection, out) in [("q_proj", 64), ("v_proj", 32), ("o_proj", 64)] {
            let module = format!("model.text_model.layers.{layer}.self_attn.{projection}");
            adapter.add(&module, [out, 64], "F32");
        }
    }
    let directory = tempfile::tempdir()?;
    adapter.write(directory.path());
    let image = picture(40, 30, 1);
    let ask = |text| question(&[&image], text);
    let requests = [
        ask("What is this?"),
        ask("What is this?").adapter("other"),
        ask("What is this thing?").adapter("other"),
    ];
    let mut cold = Vec::new();
    for request in &requests {
        let engine = builder().prefix_caching(false).build().await?;
        engine.load_adapter("other", directory.path()).await?;
        cold.push(bits(&engine.complete(request.clone()).await?));
        engine.shutdown().await;
    }
    assert_ne!(cold[0], cold[1], "the adapter changes the answer");
    for max_batched_tokens in [7, 512] {
        let engine = builder().max_batched_tokens(max_batched_tokens).build().await?;
        engine.load_adapter("other", directory.path()).await?;
        let mut encoded = 0;
        for (index, (request, cold)) in requests.iter().zip(&cold).enumerate() {
            let answer = engine.complete(request.clone()).await?;
            assert_eq!(bits(&answer), *cold, "request {index}");
            let usage = answer.finish.usage;
            match index {
                0 => encoded = engine.stats().images_encoded,
                1 => assert_eq!(usage.cached_tokens, 0, "KV of the model itself"),
                _ => assert!(usage.cached_tokens > usage.image_tokens, "{usage:?}"),
            }
        }
        assert_eq!(engine.stats().images_encoded, 2 * encoded);
        engine.cache().flush().await?;
        let all = requests.iter().map(|request| engine.complete(request.clone()));
        for (answer, cold) in futures::future::try_join_all(all).await?.iter().zip(&cold) {
            assert_eq!(bits(answer), *cold, "next to each other");
        }
        engine.audit().await?;
        engine.shutdown().await;
    }
    Ok(())
}
