//! Conversations about images: answers that come back are the tokens that were sampled, and marks
//! within the conversation have an effect.

use std::sync::Arc;
use std::time::Duration;

use stolon::{CacheMark, Completion, SamplingParams};

use super::*;

/// A message about a picture.
fn about(text: &str) -> ChatMessage {
    let mut message = ChatMessage::user("");
    let text = json!({"type": "text", "text": text});
    message.content = Some(MessageContent::Parts(vec![json!({"type": "image"}), text]));
    message
}

fn request(messages: &[ChatMessage], image: &Arc<[u8]>) -> Request {
    Request::chat(messages).image(Arc::clone(image))
}

/// Sampled at so high a temperature that words are spelled in unusual pieces.
async fn ask(engine: &Engine, messages: &[ChatMessage], image: &Arc<[u8]>) -> Completion {
    let sampling = SamplingParams { temperature: 50.0, seed: Some(3), ..Default::default() };
    let request = request(messages, image).sampling(sampling).max_tokens(16);
    engine.complete(request).await.expect("an answer")
}

async fn prompt(engine: &Engine, messages: &[ChatMessage], image: &Arc<[u8]>) -> Vec<u32> {
    engine.prompt_tokens(&request(messages, image)).await.expect("it is rendered")
}

/// The tokens after the last image.
fn tail(prompt: &[u32]) -> &[u32] {
    let end = prompt.iter().rposition(|token| token >> 31 == 1).expect("an image");
    &prompt[end + 1..]
}

fn common(left: &[u32], right: &[u32]) -> usize {
    left.iter().zip(right).take_while(|(left, right)| left == right).count()
}

/// Goal: the next turn of a conversation about a picture begins with what was computed, and its
/// answers are those without a prefix cache. A picture of the same size that is another one makes
/// another conversation.
#[tokio::test]
async fn answers_about_images_come_back_as_sampled() {
    for model in MODELS {
        let start = async |set: fn(EngineBuilder) -> EngineBuilder| {
            set(model.builder().block_size(1)).build().await.expect("the model loads")
        };
        let warm = start(|builder| builder).await;
        let cold = start(|builder| builder.prefix_caching(false)).await;
        let plain = start(|builder| builder.history_bytes(0)).await;
        let (image, other) = (picture(60, 60, 1), picture(60, 60, 2));
        let mut messages = vec![about("What is this?")];
        let mut differs = false;
        for turn in 0..3 {
            let before = prompt(&warm, &messages, &image).await;
            let said = ask(&warm, &messages, &image).await;
            assert_eq!(said.token_ids, ask(&cold, &messages, &image).await.token_ids);
            let known = [&before[..], &said.token_ids].concat();
            messages.extend([ChatMessage::assistant(said.text), ChatMessage::user("And now?")]);
            let next = prompt(&warm, &messages, &image).await;
            assert!(common(&known, &next) + 1 >= known.len(), "{} {turn}", model.name);
            let of_text = prompt(&plain, &messages, &image).await;
            differs |= tail(&next) != tail(&of_text);
            let of_other = prompt(&warm, &messages, &other).await;
            assert_eq!(tail(&of_other), tail(&of_text), "{} {turn}", model.name);
        }
        assert!(differs, "{}: nothing is tokenized otherwise", model.name);
        for engine in [warm, cold, plain] {
            engine.shutdown().await;
        }
    }
}

/// Goal: a mark within a conversation about a picture protects what precedes it, picture included:
/// all that it has in common with a conversation that goes on otherwise.
#[tokio::test]
async fn marks_within_conversations_with_images_have_an_effect() {
    let engine = QWEN3_VL.builder().block_size(4).build().await.expect("the model loads");
    let image = picture(60, 60, 1);
    let long = "It was painted in a small house at the harbor. ".repeat(3);
    let messages = [about(&long), ChatMessage::assistant("Yes."), ChatMessage::user("Why?")];
    let mark = |message, parts_left_out| CacheMark {
        message,
        parts_left_out,
        ttl: Duration::from_secs(300),
    };
    let whole = prompt(&engine, &messages, &image).await;
    let mut lens = Vec::new();
    for marks in [[mark(0, 1)], [mark(0, 0)], [mark(1, 0)], [mark(2, 0)]] {
        engine.cache().flush().await.expect("it runs");
        let asked = request(&messages, &image).marks(marks).max_tokens(2);
        engine.complete(asked).await.expect("an answer");
        let pins = engine.cache().pins().await.expect("it runs");
        assert!(pins.len() == 1 && pins[0].is_mark, "{marks:?}: {pins:?}");
        assert!(whole.starts_with(&pins[0].token_ids));
        lens.push(pins[0].token_ids.len());
    }
    let image_end = whole.len() - tail(&whole).len();
    assert!(
        lens[0] >= image_end / 4 * 4 && lens.is_sorted_by(|a, b| a < b),
        "{image_end} {lens:?}"
    );
    let others = [about(&long), ChatMessage::assistant("No.")];
    let shared = common(&whole, &prompt(&engine, &others, &image).await);
    assert!(lens[1] <= shared && shared < lens[1] + 16, "{lens:?} {shared}");
    engine.shutdown().await;
}
