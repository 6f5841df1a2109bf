//! Goal: prompts with images are found in a directory by the content of the images, up to the end
//! of the last image that is the same.

use std::path::Path;
use std::sync::Arc;

use stolon_kvcache::{EvictionPolicy, Namespace, TokenSpan, TokenSpanInterner};
use stolon_scheduler::{KvSink, KvSource, PromptLookup};
use stolon_tiers::{
    NamedTokens, PrefetchPolicy, RecordShape, TierMatch, TierSettings, Tiers, WritePolicy,
};

const SHAPE: RecordShape = RecordShape { fingerprint: [5; 32], block_size: 1, block_bytes: 10 };

/// A process: its tiers, and the numbers that it gives to images.
struct Process {
    tiers: Tiers,
    interner: Arc<TokenSpanInterner>,
}

impl Process {
    /// Opens a directory. The process has numbered `before` other images before.
    fn open(directory: &Path, before: u128, write: WritePolicy) -> Process {
        let interner = Arc::new(TokenSpanInterner::new(1000));
        for other in 0..before {
            let span = TokenSpan::Image { content_hash: u128::MAX - other, kv_len: 1, columns: 0 };
            interner.append(span, &mut Vec::new()).expect("in range");
        }
        let tiers = Tiers::new(write, PrefetchPolicy::WaitComplete);
        let settings = TierSettings {
            directory: directory.to_owned(),
            budget_bytes: 1 << 20,
            eviction: EvictionPolicy::Lru.order(),
            read_memory: 1 << 20,
            object_store: None,
        };
        tiers.open(settings, SHAPE, Arc::clone(&interner)).expect("the directory is free");
        Process { tiers, interner }
    }

    /// A prompt: text as it is given, images by content and length.
    fn prompt(&self, parts: &[Part]) -> Arc<Vec<u32>> {
        let mut tokens = Vec::new();
        for part in parts {
            match *part {
                Part::Text(seed, len) => tokens.extend((0..len).map(|n| seed * 1000 + n)),
                Part::Image(content_hash, kv_len) => {
                    let span = TokenSpan::Image { content_hash, kv_len, columns: 0 };
                    self.interner.append(span, &mut tokens).expect("in range");
                }
            }
        }
        Arc::new(tokens)
    }

    /// Stores the KV that a request with this prompt has computed.
    fn compute(&self, parts: &[Part]) {
        let prompt = self.prompt(parts);
        self.tiers.prefetch(&lookup(&prompt));
        let wanted = self.tiers.wanted(&Namespace::default(), &prompt, 0..prompt.len(), 0);
        let Some(save) = wanted else { return };
        let bytes = save.blocks.flat_map(|block| [block as u8; 10]).collect();
        (save.done)(bytes);
        self.tiers.flush_disk();
    }

    /// Number of positions that are stored, and of those that a request would read, whose bytes are
    /// checked.
    fn stored(&self, parts: &[Part]) -> (usize, usize) {
        let prompt = self.prompt(parts);
        let TierMatch { disk, .. } =
            self.tiers.query(0, &Namespace::default(), Arc::clone(&prompt));
        let Some(load) = self.tiers.prefetch(&lookup(&prompt)).load else { return (disk, 0) };
        let kv = futures::executor::block_on(load.kv).expect("it is read");
        (disk, kv.range().len())
    }
}

#[derive(Clone, Copy)]
enum Part {
    /// Seed and length.
    Text(u32, u32),
    /// Content and length.
    Image(u128, u32),
}

use Part::{Image, Text};

fn lookup(prompt: &Arc<Vec<u32>>) -> PromptLookup {
    PromptLookup {
        namespace: Namespace::default(),
        tokens: Arc::clone(prompt),
        cached: 0,
        resume: 0,
        checkpoint_positions: 0,
        priority: 0,
        prefill_rate: None,
        is_repeated: false,
    }
}

/// Goal: another process, in which the images have other numbers, finds a prompt up to the end of
/// the last image that is the same, wherever records end, and nothing of another image.
#[test]
fn another_process_finds_images_by_their_content() {
    for (before, image, between, second) in
        [(3, 200, 5, 64), (0, 64, 64, 64), (63, 1, 1, 1), (10, 54, 0, 300), (1, 62, 2, 62)]
    {
        let directory = tempfile::tempdir().expect("a directory");
        let question = |other: u128, seed| {
            [
                Text(1, before),
                Image(7, image),
                Text(2, between),
                Image(other, second),
                Text(seed, 90),
            ]
        };
        let first = Process::open(directory.path(), 0, WritePolicy::WriteThrough);
        first.compute(&question(8, 3));
        first.tiers.close();
        let process = Process::open(directory.path(), 5, WritePolicy::WriteThrough);
        let len = (before + image + between + second) as usize;
        let whole = (len + 90) / 64 * 64;
        assert_eq!(process.stored(&question(8, 3)), (whole, whole));
        assert_eq!(process.stored(&question(8, 4)), (len, len), "{before} {image}");
        let (disk, read) = process.stored(&question(9, 4));
        assert!(disk <= (before + image + between) as usize && read == disk, "another image");
        assert_eq!(
            process.stored(&[Text(1, before), Image(6, image), Text(2, 200)]).1 / 64,
            before as usize / 64
        );
    }
}

/// Goal: neither a part of a prompt that ends inside an image nor a part that is in the pool
/// already is read.
#[test]
fn only_whole_images_are_read() {
    let directory = tempfile::tempdir().expect("a directory");
    let process = Process::open(directory.path(), 0, WritePolicy::WriteThrough);
    let longer = [Text(1, 10), Image(1, 300), Text(2, 60)];
    let prompt = process.prompt(&longer);
    // Only the first 320 positions were computed, and the tail is lost.
    let named = NamedTokens::new(Arc::clone(&prompt), &process.interner);
    let tail = SHAPE.stored_places(&Namespace::default(), &named, 319).last().expect("a tail");
    assert_eq!((tail.first, tail.positions), (256, 54));
    process.compute(&longer);
    assert_eq!(process.stored(&[Text(1, 10), Image(1, 300), Text(3, 60)]), (310, 310));
    let name = tail.key.to_hex();
    let path = directory.path().join("v1").join(&name[..2]).join(format!("{name}.kv"));
    std::fs::remove_file(path).expect("it is there");
    process.stored(&[Text(1, 10), Image(1, 300), Text(3, 60)]);
    assert_eq!(process.stored(&[Text(1, 10), Image(1, 300), Text(3, 60)]), (0, 0));
    assert_eq!(process.stored(&longer), (320, 320));
    let cached = |cached| {
        let load = process.tiers.prefetch(&PromptLookup { cached, ..lookup(&prompt) }).load;
        load.map(|load| futures::executor::block_on(load.kv).expect("it is read").range())
    };
    assert_eq!((cached(310), cached(320)), (Some(256..320), None));
}

/// Goal: with the policy that stores records that are used often, the end of an image that several
/// questions are about is stored, and the questions are not.
#[test]
fn images_that_are_used_often_are_stored() {
    let directory = tempfile::tempdir().expect("a directory");
    let hits = std::num::NonZero::<u32>::MIN;
    let policy = WritePolicy::WriteThroughSelective { hits };
    let process = Process::open(directory.path(), 0, policy);
    let question = |seed| [Text(1, 10), Image(1, 100), Text(seed, 90)];
    process.compute(&question(2));
    assert_eq!(process.stored(&question(3)).0, 0, "used once");
    process.compute(&question(4));
    assert_eq!(process.stored(&question(5)), (110, 110));
}
