//! The history in the directory of the disk tier.

use std::fs;
use std::path::Path;

use stolon::{EngineBuilder, PrefetchPolicy};
use tempfile::TempDir;

use super::*;

async fn start(directory: &Path, history_bytes: usize) -> Engine {
    // By default, KV is read only if that is expected to be faster than computing it.
    let read = PrefetchPolicy::WaitComplete;
    let stored = |builder: EngineBuilder| {
        builder.kv_cache_dir(directory, 64 << 20).prefetch_policy(read).history_bytes(history_bytes)
    };
    engine(stored).await
}

/// A conversation, for a client, and the tokens of its last prompt with the answer to that.
struct Conversation {
    client: &'static str,
    messages: Vec<ChatMessage>,
    known: Vec<u32>,
}

impl Conversation {
    /// Asks a question in some turns.
    async fn new(engine: &Engine, client: &'static str, turns: u64) -> Conversation {
        let (mut messages, mut known) = (vec![user("Write three words.")], Vec::new());
        for turn in 0..turns {
            let request = request(&messages, turn).grammar(words()).tenant(client);
            let prompt = engine.prompt_tokens(&request).await.expect("it is rendered");
            let said = answer(engine, request).await;
            known = [&prompt, without_end(&said)].concat();
            messages.extend([ChatMessage::assistant(said.text), user("Three more.")]);
        }
        Conversation { client, messages, known }
    }

    async fn next_prompt(&self, engine: &Engine) -> Vec<u32> {
        let request = Request::chat(&self.messages[..]).tenant(self.client);
        engine.prompt_tokens(&request).await.expect("it is rendered")
    }

    async fn is_known(&self, engine: &Engine) -> bool {
        let prompt = self.next_prompt(engine).await;
        let text = engine.detokenize(&prompt, false).expect("it has a tokenizer");
        assert_eq!(text, engine.render_chat(&self.messages, None).expect("it is rendered"));
        prompt.starts_with(&self.known)
    }
}

fn lines(directory: &TempDir) -> Vec<String> {
    let text = fs::read_to_string(directory.path().join("history")).expect("there is a file");
    text.lines().map(str::to_owned).collect()
}

fn write(directory: &TempDir, lines: &[String]) {
    fs::write(directory.path().join("history"), lines.join("\n") + "\n").expect("written");
}

/// Goal: after a restart, a conversation goes on with the tokens that were sampled before it, whose
/// KV is on the disk, and its answer is that of an engine without a cache for the same tokens. It is
/// unknown to another client.
#[tokio::test]
async fn a_conversation_goes_on_after_a_restart() {
    let directory = tempfile::tempdir().expect("a directory");
    let first = start(directory.path(), 32 << 20).await;
    let conversation = Conversation::new(&first, "a", 5).await;
    first.shutdown().await;
    // The second restart reads what the first one has written anew.
    start(directory.path(), 32 << 20).await.shutdown().await;
    let second = start(directory.path(), 32 << 20).await;
    assert!(conversation.is_known(&second).await);
    let prompt = conversation.next_prompt(&second).await;
    let request = request(&conversation.messages, 9).grammar(words());
    let said = answer(&second, request.clone().tenant("a")).await;
    let (cached, known) = (said.finish.usage.cached_tokens, conversation.known.len());
    assert!(cached >= known / 64 * 64, "{cached} of {known}");
    let cold = engine(|builder| builder.prefix_caching(false).history_bytes(0)).await;
    let same = answer(&cold, request.with_tokens(prompt)).await;
    assert_eq!(said.token_ids, same.token_ids);
    let other = Conversation { client: "b", ..conversation };
    assert!(!other.is_known(&second).await);
    second.shutdown().await;
    cold.shutdown().await;
}

/// Goal: what is cleared from the disk is unknown after a restart, and what is asked after that is
/// known.
#[tokio::test]
async fn a_history_is_cleared_with_the_disk() {
    let directory = tempfile::tempdir().expect("a directory");
    let first = start(directory.path(), 32 << 20).await;
    let before = Conversation::new(&first, "a", 2).await;
    first.tiers().clear_disk().await.expect("it runs");
    assert_eq!(lines(&directory).len(), 1);
    let after = Conversation::new(&first, "b", 2).await;
    first.shutdown().await;
    let second = start(directory.path(), 32 << 20).await;
    assert!(!before.is_known(&second).await && after.is_known(&second).await);
    second.shutdown().await;
}

/// Goal: with a damaged file, the engine starts, uses lines that are whole, and never a token of one
/// that is not: a line with another byte, a cut one, one without the line that it
/// continues, and a file of another version or model, or with anything in it.
#[tokio::test]
async fn a_damaged_file_is_used_as_far_as_possible() {
    let directory = tempfile::tempdir().expect("a directory");
    let first = start(directory.path(), 32 << 20).await;
    let conversations =
        [Conversation::new(&first, "a", 1).await, Conversation::new(&first, "b", 2).await];
    first.shutdown().await;
    let good = lines(&directory);
    assert_eq!(good.len(), 1 + 1 + 2);
    let changed = |index: usize, at: usize| {
        let mut lines = good.clone();
        let old = lines[index].as_bytes()[at];
        lines[index].replace_range(at..=at, if old == b'1' { "2" } else { "1" });
        lines
    };
    let digit = |index: usize| good[index].rfind("\"answer\":[").expect("its tokens") + 11;
    let mut cut = good.clone();
    let half = cut[3].len() / 2;
    cut[3].truncate(half);
    let mut without = good.clone();
    without.remove(2);
    let mut long = good.clone();
    long.insert(1, "x".repeat(1 << 20));
    for (case, (lines, known)) in [
        (good.clone(), [true, true]),
        (changed(1, digit(1)), [false, true]),
        (changed(1, 3), [false, true]),
        (changed(3, digit(3)), [true, false]),
        (cut, [true, false]),
        (without, [true, false]),
        (changed(0, 15), [false, false]),
        (changed(0, 20), [false, false]),
        (vec!["\u{0}".repeat(100)], [false, false]),
        (long, [true, true]),
        (Vec::new(), [false, false]),
    ]
    .into_iter()
    .enumerate()
    {
        write(&directory, &lines);
        let second = start(directory.path(), 32 << 20).await;
        for (conversation, expected) in conversations.iter().zip(known) {
            assert_eq!(conversation.is_known(&second).await, expected, "{case}");
        }
        second.shutdown().await;
    }
}

/// Goal: the file is bounded: it is written anew without what the history has forgotten.
#[tokio::test]
async fn the_file_is_bounded() {
    let directory = tempfile::tempdir().expect("a directory");
    let first = start(directory.path(), 16 << 10).await;
    let mut largest = 0;
    let mut last = Conversation::new(&first, "a", 1).await;
    for _ in 0..12 {
        last = Conversation::new(&first, "a", 10).await;
        first.tiers().flush().await.expect("it runs");
        let size = fs::metadata(directory.path().join("history")).expect("there is a file").len();
        largest = largest.max(size);
    }
    first.shutdown().await;
    assert!((32 << 10..68 << 10).contains(&largest), "{largest}");
    let second = start(directory.path(), 16 << 10).await;
    assert!(last.is_known(&second).await);
    second.shutdown().await;
}
