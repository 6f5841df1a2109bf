//! Prompts with images: which images are encoded and shared, and how images are divided among
//! steps.

use stolon_backend::ImageInput;
use stolon_backend::fake::image_token;
use stolon_kvcache::Namespace;

use super::*;
use crate::transfer::SaveRequest;

/// A part of a prompt.
#[derive(Clone, Debug)]
pub(super) enum Part {
    Text(Vec<u32>),
    /// Content, number of positions, and whether they attend to each other.
    Image(u128, usize, bool),
}

use Part::{Image, Text};

/// An image of one pixel whose encoder returns `kv_len` rows.
pub(crate) fn image_input(content_hash: u128, kv_len: usize, full_attention: bool) -> ImageInput {
    let (columns, size, tiles, pixels) = (0, [1, 1], [0, 0], vec![0; 3]);
    ImageInput { content_hash, kv_len, full_attention, columns, size, tiles, pixels }
}

/// Few images, some of them longer than a step.
pub(super) fn image() -> impl Strategy<Value = Part> {
    let image = (0u128..3, prop::sample::select(vec![1usize, 7, 26]), any::<bool>());
    image.prop_map(|(content_hash, kv_len, full)| Image(content_hash, kv_len, full))
}

impl Harness {
    /// Submits a prompt of these parts, which is checked as any other: the fake backend computes
    /// images from their contents.
    pub(super) fn submit_parts(
        &mut self,
        parts: &[Part],
        max_tokens: usize,
        set: impl FnOnce(&mut SequenceRequest),
    ) {
        let (mut tokens, mut expected, mut images) = (Vec::new(), Vec::new(), Vec::new());
        for part in parts {
            match part {
                Text(text) => {
                    tokens.extend_from_slice(text);
                    expected.extend_from_slice(text);
                }
                &Image(content_hash, kv_len, full_attention) => {
                    let input = image_input(content_hash, kv_len, full_attention);
                    let placed = self.context.append_image(Arc::new(input), &mut tokens);
                    images.push(placed.expect("a short image"));
                    expected.extend((0..kv_len).map(|row| image_token(content_hash, row)));
                }
            }
        }
        let before = self.callers.len();
        self.submit_request(tokens, max_tokens, |request| {
            request.images = images.into();
            set(request);
        });
        if let Some(caller) = self.callers.get_mut(before) {
            caller.prompt = expected;
        }
    }

    fn run_parts(&mut self, parts: &[Part]) -> usize {
        self.submit_parts(parts, 3, |_| {});
        self.finish();
        self.callers.last().and_then(|caller| caller.cached).expect("it has run")
    }
}

fn harness(block_size: usize, max_batched_tokens: usize) -> Harness {
    let config = EngineConfig { max_batched_tokens, ..EngineConfig::default() };
    Harness::new(block_size, 4096 / block_size, config)
}

/// Goal: an image is encoded once, however many questions follow about it; with whole blocks after
/// it, or blocks of one position, nothing of it is computed again. An image behind another prefix is
/// computed, but not encoded.
#[test]
fn an_image_is_encoded_once_and_its_positions_are_shared() {
    for full in [false, true] {
        for block_size in [1, 4] {
            let mut harness = harness(block_size, 8);
            let question =
                |own| [Text(vec![1; 5]), Image(7, 30, full), Text(vec![2; 9]), Text(own)];
            assert_eq!(harness.run_parts(&question(vec![3; 4])), 0);
            let cached = 44 / block_size * block_size;
            assert_eq!(harness.run_parts(&question(vec![4; 6])), cached);
            let computed = harness.context.stats().computed_tokens;
            assert_eq!(harness.run_parts(&question(vec![5; 6])), cached);
            assert_eq!(harness.context.stats().computed_tokens - computed, 50 - cached as u64 + 2);
            assert_eq!(harness.context.stats().images_encoded, 1);
            let behind = [Text(vec![9; 7]), Image(7, 30, full), Text(vec![3])];
            assert_eq!(harness.run_parts(&behind), 0);
            assert_eq!(harness.context.stats().images_encoded, 1);
            // Another image in the same place, and the same content of another length.
            for other in [Image(8, 30, full), Image(7, 29, full)] {
                let parts = [Text(vec![1; 5]), other, Text(vec![2; 9])];
                assert_eq!(harness.run_parts(&parts), 5 / block_size * block_size);
            }
            assert_eq!(harness.context.stats().images_encoded, 3);
        }
    }
}

/// Goal: an image whose embeddings are kept costs nothing to encode, until it has left the cache.
#[test]
fn encoded_images_cost_nothing() {
    for (cache, is_kept) in [(1 << 20, true), (0, false)] {
        let config = EngineConfig { encoder_cache_bytes: cache, ..EngineConfig::default() };
        let mut harness = Harness::new(4, 256, config);
        harness.run_parts(&[Text(vec![1; 5]), Image(7, 30, true), Text(vec![2; 3])]);
        let work = |content_hash| {
            let (input, mut tokens) = (image_input(content_hash, 30, true), vec![3; 5]);
            harness.context.append_image(Arc::new(input), &mut tokens).expect("a short image");
            tokens.push(1);
            harness.context.uncached_work(&Namespace::default(), &tokens, 0)
        };
        assert_eq!(work(7) == 36, is_kept, "{}", work(7));
        assert!(work(8) > 36, "another image");
    }
}

/// Goal: images that a running request still has to encode count as its work, for the estimates of
/// others.
#[test]
fn encoding_of_running_requests_is_work() {
    let mut harness = harness(4, 8);
    harness.run_parts(&[Text(vec![1; 5]), Image(7, 30, true), Text(vec![2; 3])]);
    harness.submit_parts(&[Text(vec![9; 5]), Image(8, 30, true), Text(vec![2; 3])], 1, |_| {});
    let mut left = Vec::new();
    while harness.step(false) {
        left.extend(harness.context.limits.workload().running.iter().map(|work| work.pending));
        harness.read(true);
    }
    assert!(left[0] > 38, "{left:?}");
    assert!(left.is_sorted_by(|before, after| before >= after), "{left:?}");
    assert!(left.iter().any(|&left| left > 1 && left <= 33), "without the encoder: {left:?}");
}

/// Goal: requests whose images would take too much memory while they wait are refused, until others
/// have started.
#[test]
fn images_of_waiting_requests_are_bounded() {
    let config = EngineConfig { max_queued_pixel_bytes: 5, ..EngineConfig::default() };
    let harness = Harness::new(4, 64, config);
    let submit = |content_hash| {
        let (input, mut tokens) = (image_input(content_hash, 4, true), vec![3; 5]);
        let image = harness.context.append_image(Arc::new(input), &mut tokens);
        tokens.push(1);
        let mut request = SequenceRequest::new(tokens, 1);
        request.images = [image.expect("a short image")].into();
        harness.context.submit(0, request, 0, 0, harness.now)
    };
    let first = submit(1).expect("none waits");
    let refused = submit(2).map(|_| ()).expect_err("six bytes of pixels");
    assert!(matches!(refused, EngineError::ImagesOverloaded { queued_bytes: 3, bytes: 3, .. }));
    drop(first);
    assert!(submit(2).is_ok());
}

/// Goal: while an image is encoded and computed, others decode in every step, and a prompt of text
/// is computed. An image larger than a step is computed as a whole, and one at a time.
#[test]
fn others_go_on_while_images_are_encoded_and_computed() {
    let mut harness = harness(4, 16);
    harness.submit(vec![6; 5], 60, None);
    harness.step(false);
    for hash in 1..4 {
        let parts = [Text(vec![1; 3]), Image(hash, 40, true), Text(vec![2; 3])];
        harness.submit_parts(&parts, 2, |request| {
            request.options.tenant = Some(hash.to_string().into());
        });
    }
    harness.submit(vec![5; 40], 2, None);
    let mut whole = Vec::new();
    while let Some(plan) = &harness.in_flight {
        let counts: Vec<usize> = plan.batch.sequences.iter().map(|s| s.token_count).collect();
        if harness.callers[0].end.is_none() {
            assert!(plan.batch.sequences[0].token_count == 1, "the decode takes part: {counts:?}");
        }
        let images = plan.batch.sequences.iter().flat_map(|slice| &slice.images);
        whole.push(images.count());
        harness.step(false);
        harness.read(true);
    }
    assert_eq!(whole.iter().max(), Some(&1), "one large image in a step: {whole:?}");
    assert_eq!(whole.iter().sum::<usize>(), 3, "each in one step: {whole:?}");
    harness.finish();
    assert_eq!(harness.context.stats().images_encoded, 3);
    assert_eq!(harness.fake.encoding_count(), 9, "three calls for each");
}

/// Goal: if the encoder fails, the request that waits for this image fails, and no others: not even
/// one that has followed it, which encodes the image again.
#[test]
fn a_failed_encoding_ends_the_request_that_waits_for_it() {
    let mut harness = harness(4, 64);
    harness.fake.fail_encodings(1);
    for hash in [1, 1, 2] {
        harness.submit_parts(&[Image(hash, 10, false), Text(vec![1; 3])], 4, |_| {});
    }
    harness.submit(vec![6; 5], 6, None);
    harness.finish();
    let failed = harness.callers.iter().map(|caller| caller.end.clone().expect("ended").is_err());
    assert_eq!(failed.collect::<Vec<_>>(), [true, false, false, false]);
    assert_eq!(harness.context.stats().steps_failed, 0);
}

/// Goal: requests with images that no backend could compute are refused.
#[test]
fn malformed_images_are_refused() {
    let harness = harness(4, 64);
    let input = |kv_len| Arc::new(image_input(1, kv_len, false));
    let mut tokens = vec![1; 3];
    let image = harness.context.append_image(input(5), &mut tokens).expect("a short image");
    tokens.push(2);
    let moved = |start| crate::PromptImage { start, ..image.clone() };
    let longer = crate::PromptImage { input: input(6), ..image.clone() };
    let check = |tokens: &[u32], images: Vec<crate::PromptImage>| {
        let mut request = SequenceRequest::new(tokens.to_vec(), 1);
        request.images = images.into();
        harness.context.submit(0, request, 0, 0, harness.now).map(|_| ()).map_err(|e| e.to_string())
    };
    assert_eq!(check(&tokens, vec![image.clone()]), Ok(()));
    for (tokens, images, part) in [
        (&tokens[..], vec![], "token id"),
        (&tokens, vec![moved(2)], "token id"),
        (&tokens, vec![moved(4)], "token id"),
        (&tokens, vec![longer], "images at their positions"),
        (&tokens, vec![image.clone(), image.clone()], "images at their positions"),
        (&tokens[..8], vec![image.clone()], "goes on after its last image"),
        (&tokens[..6], vec![image.clone()], "images at their positions"),
    ] {
        let error = check(tokens, images).expect_err(part);
        assert!(error.contains(part), "expected {part:?} in {error:?}");
    }
    assert!(harness.context.append_image(input(0), &mut tokens.clone()).is_err());
    assert!(harness.context.append_image(input(usize::MAX), &mut tokens.clone()).is_err());
}

/// Goal: an image with stored KV is neither encoded nor computed. If stored KV ends inside an image
/// or cannot be loaded, the image is encoded and computed as a whole.
#[test]
fn stored_images_are_not_encoded() {
    for (full, block_size) in [(false, 1), (false, 4), (true, 1), (true, 4)] {
        let prompt = [Text(vec![1; 5]), Image(7, 30, full), Text(vec![2; 13])];
        let images = (0..30).map(|row| image_token(7, row));
        let tokens: Vec<u32> = [1; 5].into_iter().chain(images).chain([2; 13]).collect();
        for (stored, failing, loaded, encoded) in
            [(48, 0, 48, 0), (44, 0, 44, 0), (32, 0, 4, 1), (36, 0, 36, 0), (44, 1, 0, 1)]
        {
            // The text before the image has five positions.
            let loaded = if block_size == 1 && loaded == 4 { 5 } else { loaded };
            let mut harness = harness(block_size, 8);
            harness.fake.fail_copies(failing);
            let kv = transfers::stored_kv(&tokens[..stored], block_size, 0);
            harness.submit_parts(&prompt, 3, |request| request.stored = Some(kv));
            harness.finish();
            let gauges = &harness.context.gauges;
            let got = (gauges.loaded_tokens.get(), harness.context.stats().images_encoded);
            assert_eq!(got, (loaded, encoded), "{stored} of blocks of {block_size}");
        }
    }
}

/// Goal: a save of blocks that end inside an image yields all of them, though a lease ends with the
/// image.
#[test]
fn blocks_that_end_inside_an_image_are_saved() {
    for block_size in [1, 4] {
        let mut harness = harness(block_size, 64);
        harness.run_parts(&[Text(vec![1; 5]), Image(7, 30, true), Text(vec![2; 13])]);
        let mut tokens = vec![1; 5];
        let input = image_input(7, 30, true);
        harness.context.append_image(Arc::new(input), &mut tokens).expect("a short image");
        tokens.extend([2; 13]);
        let saved = Arc::new(std::sync::Mutex::new(Vec::new()));
        let own = Arc::clone(&saved);
        ready(harness.scheduler.save(SaveRequest {
            namespace: Namespace::default(),
            tokens: Arc::new(tokens),
            blocks: 0..16 / block_size,
            done: Box::new(move |bytes| *own.lock().expect("no panic") = bytes),
        }));
        harness.advance();
        harness.finish();
        let images = (0..11).map(|row| image_token(7, row));
        let expected: Vec<u32> = [1; 5].into_iter().chain(images).collect();
        let expected = transfers::block_bytes(&expected, block_size).concat();
        assert_eq!(*saved.lock().expect("no panic"), expected, "blocks of {block_size}");
    }
}

/// Goal: an image that is known only by its stored KV needs no pixels. If the KV cannot be loaded,
/// the request fails, and no other one with the same image.
#[test]
fn an_image_without_pixels_is_loaded_or_fails() {
    let parts = [Text(vec![1; 4]), Image(7, 8, true), Text(vec![2; 5])];
    let images = (0..8).map(|row| image_token(7, row));
    let tokens: Vec<u32> = [1; 4].into_iter().chain(images).chain([2; 5]).collect();
    for failing in [0, 1] {
        let mut harness = harness(4, 64);
        harness.fake.fail_copies(failing);
        let kv = transfers::stored_kv(&tokens, 4, 0);
        harness.submit_parts(&parts, 2, |request| {
            request.stored = Some(kv);
            let images = request.images.iter().map(|image| {
                let input = ImageInput { pixels: Vec::new(), ..ImageInput::clone(&image.input) };
                crate::PromptImage { input: Arc::new(input), ..image.clone() }
            });
            request.images = images.collect();
        });
        harness.submit_parts(&parts, 2, |_| {});
        harness.finish();
        let ends = harness.callers.iter().map(|caller| caller.end.clone().expect("ended"));
        let ends: Vec<_> = ends.map(|end| end.map_err(|error| error.to_string())).collect();
        assert_eq!(ends[0].is_err(), failing > 0, "{ends:?}");
        assert!(failing == 0 || format!("{:?}", ends[0]).contains("no pixels"), "{ends:?}");
        assert!(ends[1].is_ok(), "{ends:?}");
        assert_eq!(harness.context.stats().images_encoded, failing as u64);
    }
}

fn part() -> impl Strategy<Value = Part> {
    prop_oneof![
        proptest::collection::vec(0..4_u32, 1..12).prop_map(Text),
        (0..3_u128, 1..24_usize, any::<bool>())
            .prop_map(|(hash, len, full)| Image(hash, len, full)),
    ]
}

proptest! {
    /// Goal: whatever the prompts, sizes of steps and blocks, cancellations, failures of steps and
    /// memory are, every answer equals the answer of a request that runs alone, and no block is
    /// lost.
    #[test]
    fn answers_with_images_do_not_depend_on_schedules(
        prompts in proptest::collection::vec((proptest::collection::vec(part(), 1..5), 1..6_usize), 1..12),
        (block_size, max_batched_tokens) in (prop_oneof![Just(1), Just(4)], 1..40_usize),
        blocks in 40..120_usize,
        cache in prop_oneof![Just(0), Just(2000), Just(1 << 20)],
        actions in proptest::collection::vec((0..6_u8, any::<u8>()), 0..60),
    ) {
        let config = EngineConfig {
            max_batched_tokens,
            encoder_cache_bytes: cache,
            max_running: 5,
            ..EngineConfig::default()
        };
        let mut harness = Harness::new(block_size, blocks * 4 / block_size, config);
        let mut prompts = prompts.into_iter();
        for (action, which) in actions {
            match action {
                0 | 1 => if let Some((mut parts, max_tokens)) = prompts.next() {
                    parts.push(Text(vec![1]));
                    harness.submit_parts(&parts, max_tokens, |_| {});
                },
                2 if !harness.callers.is_empty() => {
                    let caller = usize::from(which) % harness.callers.len();
                    harness.cancel(caller);
                }
                3 if which < 20 => { harness.step(true); }
                4 if which < 20 => harness.fake.fail_encodings(1),
                _ => { harness.step(false); harness.read(false); }
            }
        }
        harness.finish();
    }
}
