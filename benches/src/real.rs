//! Runs conversations on a real engine, in real time, and notes what each request saw.

use std::time::{Duration, Instant};

use futures::StreamExt;
use stolon::{Engine, Error, Event, Request};

use crate::drive::{Record, Run};
use crate::workload::Conversation;

/// What became of a conversation.
#[derive(Debug, Default)]
struct Talked {
    /// The requests that were answered.
    records: Vec<Record>,
    /// Seconds that it took to refuse the one after them, if the door did.
    refusal: Option<f64>,
}

/// Open loop: each conversation begins at its time, whatever became of the others. One that is
/// refused at the door ends there.
///
/// # Errors
/// The first error of any request, other than that refusal.
pub async fn offer(engine: &Engine, conversations: &[Conversation]) -> anyhow::Result<Run> {
    let begun = Instant::now();
    let mut talks: futures::stream::FuturesUnordered<_> = conversations
        .iter()
        .map(|plan| tokio::spawn(talk(engine.clone(), plan.clone(), begun)))
        .collect();
    let mut run = Run::default();
    while let Some(talked) = talks.next().await {
        let talked = talked??;
        run.records.extend(talked.records);
        run.rejected += usize::from(talked.refusal.is_some());
        run.slowest_refusal = run.slowest_refusal.max(talked.refusal.unwrap_or(0.0) * 1e3);
    }
    run.records.sort_by(|a, b| a.last.total_cmp(&b.last));
    Ok(run)
}

/// Conversations a second that can be served: so many clients hold one after another, without a
/// pause. There must be room for all of them at the door.
///
/// # Errors
/// As [`offer`], and when the door refuses one.
pub async fn capacity(
    engine: &Engine,
    conversations: &[Conversation],
    clients: usize,
) -> anyhow::Result<f64> {
    let begun = Instant::now();
    let talks = conversations.iter().map(|plan| {
        let plan = Conversation { at: 0.0, think: 0.0, ..plan.clone() };
        talk(engine.clone(), plan, begun)
    });
    let mut talks = futures::stream::iter(talks).buffer_unordered(clients);
    while let Some(talked) = talks.next().await {
        anyhow::ensure!(talked?.refusal.is_none(), "{clients} clients are too many for the door");
    }
    Ok(conversations.len() as f64 / begun.elapsed().as_secs_f64())
}

async fn talk(engine: Engine, plan: Conversation, begun: Instant) -> anyhow::Result<Talked> {
    tokio::time::sleep_until((begun + Duration::from_secs_f64(plan.at)).into()).await;
    let mut tokens = Vec::new();
    let mut talked = Talked::default();
    for (index, turn) in plan.turns.iter().enumerate() {
        if index > 0 {
            tokio::time::sleep(Duration::from_secs_f64(plan.think)).await;
        }
        tokens.extend_from_slice(&turn.tokens);
        let request = Request::tokens(tokens.clone())
            .max_tokens(turn.output)
            .priority(plan.priority)
            .ignore_eos(true);
        let mut record = Record { sent: begun.elapsed().as_secs_f64(), ..Record::new() };
        let mut stream = match engine.generate(request) {
            Err(Error::Overloaded { .. }) => {
                talked.refusal = Some(begun.elapsed().as_secs_f64() - record.sent);
                break;
            }
            result => result?,
        };
        while let Some(event) = stream.next().await {
            match event? {
                Event::Token(token) => {
                    let Some(id) = token.id else { continue };
                    record.last = begun.elapsed().as_secs_f64();
                    if record.output == 0 {
                        record.first = record.last;
                    }
                    record.output += 1;
                    tokens.push(id);
                }
                Event::Finished(finish) => {
                    record.prompt = finish.usage.prompt_tokens;
                    record.cached = finish.usage.cached_tokens;
                }
                _ => {}
            }
        }
        talked.records.push(record);
    }
    Ok(talked)
}
