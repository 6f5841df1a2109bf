//! Prompts with images in the tiers: after a restart, through an object store and through an
//! exported file, the KV of an image is used with the same bits, and the image is not encoded
//! again.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use stolon::{Engine, EngineBuilder, Error, PrefetchPolicy, Request, WritePolicy};
use support::{Directory, records};

use bits::bits;
use pictures::picture;
use questions::question;

use crate::support::{bits, pictures, questions, tiers as support};

/// Models whose image positions are numbered like text, and as grids, and one that also has
/// recurrent layers.
const MODELS: [&str; 3] = ["random:smolvlm-tiny", "random:qwen3-vl-tiny", RECURRENT];
const RECURRENT: &str = "random:qwen3.5-vl-tiny";

fn builder(model: &str) -> EngineBuilder {
    Engine::builder().model(model).num_blocks(8192).threads(1)
}

/// An engine that waits for all stored KV, however fast it computes.
async fn with_disk(model: &str, directory: &Path) -> Engine {
    let builder = builder(model).kv_cache_dir(directory, 1 << 30);
    builder.prefetch_policy(PrefetchPolicy::WaitComplete).build().await.expect("an engine")
}

/// The bits of an answer, and how many prompt tokens came from the cache or a tier.
async fn ask(engine: &Engine, request: Request) -> (Vec<(u32, u32)>, usize) {
    let answer = engine.complete(request).await.expect("an answer");
    (bits(&answer), answer.finish.usage.cached_tokens)
}

/// The bits of an answer of an engine that computes everything.
async fn cold(model: &str, request: Request) -> Vec<(u32, u32)> {
    let engine = builder(model).prefix_caching(false).build().await.expect("an engine");
    ask(&engine, request).await.0
}

async fn stop(engine: Engine) {
    engine.tiers().flush().await.expect("it runs");
    engine.audit().await.expect("a consistent accounting");
    engine.shutdown().await;
}

/// Asks a second question about images after another engine was asked about them, and checks that
/// only the part after the images is computed, and that nothing is encoded.
async fn ask_again(model: &str, engine: &Engine, pictures: &[&Arc<[u8]>]) {
    let next = question(pictures, "Which color has it?");
    let found = engine.tiers().query(&next).expect("a prompt");
    let estimate = engine.tokenized(next.clone()).await.expect("a prompt");
    let prompt = engine.prompt_tokens(&estimate).await.expect("a prompt");
    let images_end = 1 + prompt.iter().rposition(|&token| token >> 31 == 1).expect("an image");
    let stored = found.disk.max(found.object_store);
    // A record may also contain the beginning of the question.
    assert!(stored >= images_end && stored < prompt.len(), "{found:?} {images_end}");
    let expected = cold(model, next.clone()).await;
    let (answer, cached) = ask(engine, next).await;
    let stats = engine.stats();
    assert_eq!((cached, stats.loaded_tokens), (stored, stored as u64));
    assert_eq!((stats.images_encoded, stats.loads_failed), (0, 0));
    assert_eq!(answer, expected);
}

/// Goal: after a restart, a second question about an image reads the image from the disk.
#[tokio::test]
async fn a_restarted_engine_knows_the_images() {
    for model in MODELS {
        let directory = Directory::new("image-restart");
        let (one, other) = (picture(40, 30, 1), picture(90, 120, 2));
        let first = with_disk(model, &directory.0).await;
        ask(&first, question(&[&other], "Something else")).await;
        ask(&first, question(&[&one, &other], "What is this?")).await;
        stop(first).await;
        let again = with_disk(model, &directory.0).await;
        ask_again(model, &again, &[&one, &other]).await;
        let unknown = question(&[&picture(40, 30, 3)], "What is this?");
        let encoded = again.stats().images_encoded;
        assert_eq!(ask(&again, unknown.clone()).await.0, cold(model, unknown).await);
        assert!(again.stats().images_encoded > encoded, "another image is encoded");
        stop(again).await;
    }
}

/// Goal: records whose tokens or names of images were changed are refused, and their positions are
/// computed.
#[tokio::test]
async fn damaged_names_of_images_are_computed() {
    let directory = Directory::new("image-damaged");
    let image = picture(64, 64, 1);
    let first = with_disk(MODELS[0], &directory.0).await;
    ask(&first, question(&[&image], "What is this?")).await;
    stop(first).await;
    let header = 176;
    let mut changed = 0;
    for path in records(&directory.0) {
        let mut bytes = std::fs::read(&path).expect("readable");
        let [positions, names] = [32, 36].map(|at| bytes[at]);
        if names > 0 {
            bytes[header + 4 * usize::from(positions)] ^= 1;
            std::fs::write(&path, bytes).expect("written");
            changed += 1;
        }
    }
    assert!(changed > 0, "a record has an image");
    let again = with_disk(MODELS[0], &directory.0).await;
    let next = question(&[&image], "Which color has it?");
    let expected = cold(MODELS[0], next.clone()).await;
    assert_eq!(ask(&again, next).await.0, expected);
    let disk = again.tiers().disk_stats().expect("a disk tier");
    assert!(disk.records_refused > 0 && again.stats().images_encoded > 0, "{disk:?}");
    stop(again).await;
}

/// Goal: a process that shares the object store with another one reads the KV that the other one
/// has computed.
#[cfg(feature = "object-store")]
#[tokio::test]
async fn engines_share_images_through_an_object_store() {
    let directory = Directory::new("image-object");
    let store = directory.0.join("store");
    std::fs::create_dir_all(&store).expect("a directory");
    let url = format!("file://{}", store.display());
    let engine = |name: &str| {
        let builder = builder(MODELS[0]).kv_cache_dir(directory.0.join(name), 1 << 30);
        builder.kv_object_store(&url).prefetch_policy(PrefetchPolicy::WaitComplete).build()
    };
    let image = picture(64, 64, 1);
    let first = engine("first").await.expect("an engine");
    ask(&first, question(&[&image], "What is this?")).await;
    stop(first).await;
    let second = engine("second").await.expect("an engine");
    let known = question(&[&image], "What is this?");
    // The store is listed after the start. The test would hang if it were never listed.
    while second.tiers().query(&known).expect("a prompt").object_store == 0 {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    ask_again(MODELS[0], &second, &[&image]).await;
    stop(second).await;
}

/// Goal: a prefix with images can be exported, and imported by an engine that does not have the
/// pictures. It ends with the last image or with the question.
#[tokio::test]
async fn exported_images_are_imported_without_their_pixels() -> Result<(), Error> {
    for (model, block_size) in MODELS.into_iter().flat_map(|model| [(model, 1), (model, 16)]) {
        let engine = || builder(model).block_size(block_size).num_blocks(8192 / block_size);
        let (from, to) = (engine().build().await?, engine().build().await?);
        let image = picture(64, 64, 1);
        let document = question(&[&image], "What is this?");
        let bytes: Vec<u8> = from.cache().export(&document).await?.flatten().collect();
        let mut import = to.cache().import().await?;
        bytes.chunks(10_000).try_for_each(|piece| import.push(piece))?;
        let imported = import.finish().await?;
        let prompt = from.prompt_tokens(&document).await?.len();
        // A state is kept before the last position.
        let end = prompt - usize::from(from.model_info().state_bytes > 0);
        assert_eq!(imported, end / block_size * block_size, "{model}, {block_size}");
        // The cached logits of its end follow from the image, though its pixels are not known.
        let answer = ask(&to, document.clone()).await.0;
        assert_eq!(answer, cold(model, document).await, "{model}, blocks of {block_size}");
        assert!(block_size > 1 || to.stats().images_encoded == 0, "{model}");
        let next = question(&[&image], "What is this? Which color has it?");
        let expected = cold(model, next.clone()).await;
        let found = to.cache().query_resume(&next)?.resume;
        assert_eq!(ask(&to, next).await, (expected, found), "{block_size}");
        // The only exported state is after the end of the first question.
        if block_size == 1 && model != RECURRENT {
            assert_eq!(to.stats().images_encoded, 0);
            assert!(found > 0);
        }
        to.audit().await?;
    }
    Ok(())
}

/// Goal: with write-back, images are written when they leave the KV pool, and are read again without
/// being encoded, with the same bits.
#[tokio::test]
async fn images_that_leave_the_pool_are_read_back() {
    // Write-back stores no states.
    for model in MODELS.into_iter().filter(|model| *model != RECURRENT) {
        let directory = Directory::new("image-write-back");
        let pictures: Vec<_> = (1..=6).map(|seed| picture(160, 160, seed)).collect();
        let asked = |image| question(&[image], "What is this?");
        let cold = builder(model).prefix_caching(false).build().await.expect("an engine");
        let mut expected = Vec::new();
        for image in &pictures {
            expected.push(ask(&cold, asked(image)).await.0);
        }
        let len = cold.prompt_tokens(&asked(&pictures[0])).await.expect("a prompt").len();
        assert!(len > 64, "{model}: {len} positions, of which whole records are written");
        // The pool has room for two of the six prompts.
        let builder = builder(model).num_blocks(5 * len / 2).encoder_cache_bytes(0);
        let builder = builder.kv_cache_dir(&directory.0, 1 << 30);
        let builder = builder.write_policy(WritePolicy::WriteBack);
        let builder = builder.prefetch_policy(PrefetchPolicy::WaitComplete);
        let engine = builder.build().await.expect("an engine");
        let mut encoded = None;
        for round in 0..3 {
            for (image, expected) in pictures.iter().zip(&expected) {
                let (answer, cached) = ask(&engine, asked(image)).await;
                assert_eq!(&answer, expected, "{model}, round {round}");
                assert!(round == 0 || cached > 0, "{model}, round {round}");
                // Positions that are still being written would be computed instead.
                engine.tiers().flush().await.expect("it runs");
            }
            // Some models encode several tiles of a picture.
            let once = *encoded.get_or_insert(engine.stats().images_encoded);
            assert_eq!(engine.stats().images_encoded, once, "{model}, round {round}");
        }
        let stats = engine.stats();
        assert!(stats.loaded_tokens > 0, "{model}: {stats:?}");
        stop(engine).await;
    }
}

/// The name of the environment variable that tells the child process of the test below where to
/// write.
const CHILD: &str = "STOLON_IMAGE_TEST_DIRECTORY";

/// Goal: a process that is killed while it writes records with images leaves no wrong records
/// behind: the next one answers with the bits of a cold cache, and uses the records that were
/// written.
#[tokio::test]
async fn a_killed_process_leaves_no_wrong_image() {
    const PICTURES: u32 = 5;
    let asked = |seed, text: &str| question(&[&picture(64, 64, seed)], text);
    if let Some(directory) = std::env::var_os(CHILD) {
        let engine = with_disk(MODELS[1], Path::new(&directory)).await;
        for round in 0.. {
            let text = format!("What is in picture {round}?");
            ask(&engine, asked(1 + round % PICTURES, &text)).await;
        }
    }
    let mut expected = Vec::new();
    for seed in 1..=PICTURES {
        expected.push(cold(MODELS[1], asked(seed, "What is this?")).await);
    }
    let directory = Directory::new("image-killed");
    let mut found = 0;
    for round in 0..6 {
        let mut child = Command::new(std::env::current_exe().expect("a path"))
            .args(["image_tiers::a_killed_process_leaves_no_wrong_image", "--exact", "--nocapture"])
            .env(CHILD, &directory.0)
            .stdout(Stdio::null())
            .spawn()
            .expect("it starts");
        tokio::time::sleep(Duration::from_millis(400 + 130 * round)).await;
        child.kill().expect("it runs");
        child.wait().expect("it ends");
        let engine = with_disk(MODELS[1], &directory.0).await;
        for (seed, expected) in (1..).zip(&expected) {
            let (answer, cached) = ask(&engine, asked(seed, "What is this?")).await;
            assert_eq!(&answer, expected, "picture {seed} after {round}");
            found += usize::from(cached > 0);
        }
        let disk = engine.tiers().disk_stats().expect("a disk tier");
        assert_eq!(disk.records_refused, 0, "only complete files are found");
        // Not flushed: the records of this engine must not be found in place of the records of the
        // killed process.
        engine.shutdown().await;
    }
    assert!(found > 0, "something was written");
}
