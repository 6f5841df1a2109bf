//! Computes what the next turn of a conversation begins with, while nothing else is to be computed.
//!
//! After an answer, a client runs a tool, or a user reads. The next prompt then begins with the
//! conversation, the answer, and the text that the chat template puts after it. The last token of
//! the answer and that text are not computed yet, and where the template strips the reasoning of
//! answers, nothing after the place of that reasoning is. All of it is known when the answer ends:
//!
//! 1. [`NextTurn::new`] keeps the conversation of a request whose answer is recorded.
//! 2. [`NextTurn::begin`] is called when the answer has ended. Once the engine is idle, the
//!    conversation with the answer and one more message is rendered and tokenized, as long work,
//!    with two texts of that message. The next turn begins with what both prompts have in common.
//! 3. That prefix is computed in the background (`scheduler/background.rs`), unless it is cached, or
//!    what came before the answer is not cached any longer.
//!
//! It is a guess: if the next turn is another one, KV was computed that nobody needs.

use std::future::poll_fn;
use std::sync::{Arc, Weak};
use std::time::Duration;

use serde_json::json;
use stolon_text::Answer;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::engine::Inner;
use crate::prompt::common_len;
use crate::request::Prompt;
use crate::{ChatMessage, Engine, Error, Request};

/// Maximum number of ended answers of an engine whose next turns wait. There is no work for further
/// ones.
const WAITING_MAX: usize = 16;

/// How long the next turn of an answer waits for the engine to be idle. Most clients have sent it by
/// then.
const IDLE_WAIT: Duration = Duration::from_secs(60);

/// The texts of the message after the answer. They have no beginning in common, not even a kind of
/// character.
const PROBES: [&str; 2] = ["The", "7"];

/// The id of the first call of an answer: nine letters and digits, which all templates accept.
const CALL_ID: usize = 100_000_000;

/// Bounds the work for next turns.
#[derive(Debug)]
pub(crate) struct NextTurns(Arc<Semaphore>);

impl NextTurns {
    pub(crate) fn new() -> NextTurns {
        NextTurns(Arc::new(Semaphore::new(WAITING_MAX)))
    }
}

/// A conversation whose answer is being read.
#[derive(Clone, Debug)]
pub(crate) struct NextTurn {
    engine: Weak<Inner>,
    conversation: Arc<Request>,
    /// The tokens of its prompt.
    tokens: Arc<Vec<u32>>,
}

impl NextTurn {
    /// The next turn of `conversation`, whose prompt is `tokens`. `None` if the engine computes no
    /// next turns, or if the conversation ends in a part of an answer.
    pub(crate) fn new(
        engine: &Engine,
        conversation: Arc<Request>,
        tokens: &Arc<Vec<u32>>,
    ) -> Option<NextTurn> {
        engine.inner.next_turns.as_ref()?;
        let Prompt::Chat(messages) = conversation.prompt() else { return None };
        messages.last().filter(|last| last.role != "assistant")?;
        let (engine, tokens) = (Arc::downgrade(&engine.inner), Arc::clone(tokens));
        Some(NextTurn { engine, conversation, tokens })
    }

    /// The answer has ended, and this is what it says.
    pub(crate) fn begin(self, said: Answer) {
        let Some(inner) = self.engine.upgrade() else { return };
        let permit = inner.next_turns.as_ref().map(|turns| Arc::clone(&turns.0));
        let Some(permit) = permit.and_then(|permits| permits.try_acquire_owned().ok()) else {
            return;
        };
        let gauges = Arc::clone(&inner.handle.context().gauges);
        inner.handle.runtime().spawn(async move {
            let _permit = permit;
            let idle = poll_fn(move |context| gauges.poll_idle(context));
            if timeout(IDLE_WAIT, idle).await.is_ok()
                && let Err(error) = self.compute(said).await
            {
                tracing::debug!(target: "stolon", %error, "the next turn is not prepared");
            }
        });
    }

    async fn compute(self, said: Answer) -> Result<(), Error> {
        let Some(inner) = self.engine.upgrade() else { return Ok(()) };
        let engine = Engine { inner };
        let NextTurn { conversation, tokens, .. } = self;
        let [first, second] = PROBES.map(|probe| continued(&conversation, &said, probe));
        let (next, common) = engine.inner.prompts.common(first, second).await?;
        let context = engine.inner.handle.context();
        let needed = context.resume_max(common_len(&tokens, &next[..common]));
        let namespace = engine.namespace(&conversation)?;
        let cached = engine.inner.handle.query_resume(&namespace, &next).cached;
        if cached < needed {
            return Ok(());
        }
        let ended = engine.compute_when_idle((*conversation).clone(), next, common).await?;
        // The engine may stop while it computes.
        drop(engine);
        ended.await;
        Ok(())
    }
}

/// The conversation after an answer that says this: with the answer, and the results of its calls or
/// a message of the user, each with the text `probe`.
fn continued(conversation: &Request, said: &Answer, probe: &str) -> Request {
    let messages = match conversation.prompt() {
        Prompt::Chat(messages) => messages.as_slice(),
        _ => &[],
    };
    let mut answer = ChatMessage::assistant(said.text.as_str());
    if !said.reasoning.is_empty() {
        answer.extra.insert("reasoning_content".to_owned(), said.reasoning.as_str().into());
    }
    let calls = said.calls.iter().zip(CALL_ID..).map(|(call, id)| {
        let function = json!({"name": call.name, "arguments": call.arguments});
        json!({"id": id.to_string(), "type": "function", "function": function})
    });
    let calls: Vec<_> = calls.collect();
    let mut after = vec![ChatMessage::user(probe)];
    if !calls.is_empty() {
        let result = |(call, id): (&stolon_text::ToolCall, usize)| {
            let mut result = ChatMessage::new("tool", probe);
            result.extra.insert("tool_call_id".to_owned(), id.to_string().into());
            result.extra.insert("name".to_owned(), call.name.as_str().into());
            result
        };
        after = said.calls.iter().zip(CALL_ID..).map(result).collect();
        answer.content = answer.content.filter(|_| !said.text.is_empty());
        answer.extra.insert("tool_calls".to_owned(), calls.into());
    }
    let messages = messages.iter().cloned().chain([answer]).chain(after).collect();
    Request { prompt: Arc::new(Prompt::Chat(messages)), ..conversation.clone() }
}
