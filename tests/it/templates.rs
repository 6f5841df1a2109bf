//! Chat templates whose work depends on a variable of the request.

use futures::FutureExt;
use futures::future::join_all;
use stolon::{ChatMessage, ChatOptions, Engine, Request};

/// The template of the demo model, after a loop whose length the client chooses.
const TEMPLATE: &str = "{% for i in range(work | default(0)) %}{% for j in range(1000) %}\
    {% set x = j %}{% endfor %}{% endfor %}\
    {% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + \
    '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}";

async fn engine() -> Engine {
    let path = format!("{}/crates/models/demo_model/text", env!("CARGO_MANIFEST_DIR"));
    let builder = Engine::builder().model(path).num_blocks(256).chat_template(TEMPLATE);
    builder.build().await.expect("the demo model loads")
}

/// A conversation of a client, for which the loop of the template runs `work` times.
fn conversation(client: &str, work: usize) -> Request {
    let variables = [("work".to_owned(), work.into())].into_iter().collect();
    let options = ChatOptions { variables, ..ChatOptions::default() };
    Request::chat(vec![ChatMessage::user("Hello")])
        .chat_options(options)
        .tenant(client)
        .max_tokens(4)
}

/// Goal: a slow template delays neither the caller's runtime nor the conversations of other
/// clients, whether these are quick or slow, although many slow ones of one client came first. All
/// of them are answered.
#[tokio::test]
async fn slow_templates_delay_their_own_client_only() {
    /// Work of about a tenth of a second.
    const SLOW: usize = 300;
    let engine = engine().await;
    let ask = async |request| engine.complete(request).await.expect("an answer").token_ids;
    let expected = ask(conversation("normal", 0)).await;
    let mut flood = Box::pin(join_all((0..30).map(|_| ask(conversation("hostile", SLOW)))).fuse());
    // This poll submits all of them, and the first one is rendered.
    assert!(flood.as_mut().now_or_never().is_none());
    for work in [0, 0, SLOW, 0, SLOW] {
        let answer = tokio::select! {
            answer = ask(conversation("normal", work)) => answer,
            _ = &mut flood => panic!("it waited for all the work of another client"),
        };
        assert_eq!(answer, expected);
    }
    assert_eq!(flood.await, vec![expected; 30]);
    engine.shutdown().await;
}
