//! `stolon bench soak`: thousands of requests of mixed lengths, some with a shared prefix, some
//! canceled. At the end every KV block must be accounted for; resident memory is sampled.

use clap::Args;
use futures::StreamExt;
use serde_json::json;
use stolon::{AuditReport, Engine, Error, Event, Request};

use super::progress;
use crate::args::EngineArgs;
use crate::memory::{Resident, format_bytes, resident};
use crate::terminal;
use stolon_loadgen::rng::SeededRng;

/// Arguments of `stolon bench soak`.
#[derive(Debug, Args)]
pub struct SoakArgs {
    /// Number of requests
    #[arg(long, default_value_t = 2_000)]
    requests: usize,
    /// Number of requests in progress at a time
    #[arg(long, default_value_t = 16)]
    concurrency: usize,
    /// Largest prompt length, in tokens. Lengths are drawn uniformly from 1 to this
    #[arg(long, default_value_t = 512, value_name = "TOKENS")]
    max_prompt: usize,
    /// Largest number of tokens to generate per request. Numbers are drawn uniformly from 1 to this
    #[arg(long, default_value_t = 32, value_name = "TOKENS")]
    max_output: usize,
    /// Percentage of requests that are canceled before they end, 0 to 100
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u8).range(..=100))]
    #[arg(value_name = "PERCENT")]
    cancel_percent: u8,
    /// Seed of prompts, lengths and cancellations
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print one JSON object instead of lines
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    engine: EngineArgs,
}

/// One request. All are drawn before the first is sent, so that the seed alone determines them.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Draw {
    tokens: Vec<u32>,
    output: usize,
    /// Cancel the request after this many events.
    cancel_after: Option<usize>,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Finished,
    Canceled,
}

/// Resident memory after a number of requests.
struct Sample {
    requests_done: usize,
    resident: Resident,
}

impl SoakArgs {
    pub(super) async fn run(self) -> anyhow::Result<()> {
        anyhow::ensure!(
            self.max_prompt > 0 && self.max_output > 0 && self.concurrency > 0,
            "expected --max-prompt, --max-output and --concurrency of at least 1"
        );
        let before = resident().unwrap_or_default();
        let engine = self.engine.start().await?;
        let loaded = resident().unwrap_or_default();
        let (ends, samples) = self.soak(&engine).await?;
        let audit = settle(&engine).await?;
        anyhow::ensure!(
            audit.blocks_reserved == 0
                && audit.blocks_free + audit.blocks_committed == audit.blocks_total,
            "blocks are missing after the last request: {audit:?}"
        );
        self.report(&engine, before, loaded, &samples, &ends, audit)?;
        engine.shutdown().await;
        Ok(())
    }

    async fn soak(&self, engine: &Engine) -> anyhow::Result<(Vec<End>, Vec<Sample>)> {
        let vocab_size = engine.model_info().vocab_size;
        let mut rng = SeededRng::new(self.seed);
        let prefixes: Vec<Vec<u32>> =
            (0..8).map(|_| rng.tokens(self.max_prompt / 2, vocab_size)).collect();
        let draws: Vec<Draw> =
            (0..self.requests).map(|_| self.draw(&mut rng, &prefixes, vocab_size)).collect();
        let bar = progress::bar(draws.len(), "soak");
        let mut running = futures::stream::iter(draws)
            .map(|draw| one(engine.clone(), draw))
            .buffer_unordered(self.concurrency);
        let (mut ends, mut samples) = (Vec::new(), Vec::new());
        let interval = (self.requests / 10).max(1);
        while let Some(end) = running.next().await {
            ends.push(end?);
            bar.inc(1);
            if ends.len() % interval == 0
                && let Some(resident) = resident()
            {
                samples.push(Sample { requests_done: ends.len(), resident });
            }
        }
        bar.finish_and_clear();
        Ok((ends, samples))
    }

    /// Half of the requests begin with one of a few shared prefixes.
    fn draw(&self, rng: &mut SeededRng, prefixes: &[Vec<u32>], vocab_size: usize) -> Draw {
        let length = rng.between(1, self.max_prompt);
        let mut tokens = Vec::new();
        if rng.between(0, 1) == 0 {
            let prefix = &prefixes[rng.between(0, prefixes.len() - 1)];
            tokens.extend_from_slice(&prefix[..prefix.len().min(length - 1)]);
        }
        let missing = length - tokens.len();
        tokens.extend(rng.tokens(missing, vocab_size));
        let output = rng.between(1, self.max_output);
        let cancel = rng.between(0, 99) < usize::from(self.cancel_percent);
        let cancel_after = rng.between(0, output);
        Draw { tokens, output, cancel_after: cancel.then_some(cancel_after) }
    }

    fn report(
        &self,
        engine: &Engine,
        before: Resident,
        loaded: Resident,
        samples: &[Sample],
        ends: &[End],
        audit: AuditReport,
    ) -> anyhow::Result<()> {
        let info = engine.model_info();
        let canceled = ends.iter().filter(|&&end| end == End::Canceled).count();
        if self.json {
            let samples: Vec<_> = samples
                .iter()
                .map(|s| json!({"requests": s.requests_done, "resident": s.resident}))
                .collect();
            terminal::line(json!({
                "model": info.id,
                "requests": ends.len(),
                "canceled": canceled,
                "kv_bytes": info.kv_bytes,
                "resident_before": before,
                "resident_loaded": loaded,
                "samples": samples,
                "audit": audit,
                "stats": engine.stats(),
            }))?;
            return Ok(());
        }
        let size = |resident: Resident| {
            format!(
                "{} ({} file-backed, {} anonymous)",
                format_bytes(resident.total),
                format_bytes(resident.file),
                format_bytes(resident.anonymous)
            )
        };
        terminal::line(format!("KV budget             {}", format_bytes(info.kv_bytes as u64)))?;
        terminal::line(format!("resident before       {}", size(before)))?;
        terminal::line(format!("resident with model   {}", size(loaded)))?;
        for sample in samples {
            terminal::line(format!(
                "after {:>6} requests {}",
                sample.requests_done,
                size(sample.resident)
            ))?;
        }
        terminal::line(format!(
            "{} requests ended ({canceled} canceled); the audit passed: {} blocks = {} free + {} \
             cached, none reserved",
            ends.len(),
            audit.blocks_total,
            audit.blocks_free,
            audit.blocks_committed,
        ))?;
        Ok(())
    }
}

async fn one(engine: Engine, draw: Draw) -> Result<End, Error> {
    let request = Request::tokens(draw.tokens).max_tokens(draw.output).ignore_eos(true);
    let mut stream = engine.generate(request).await?;
    let mut seen = 0;
    loop {
        if draw.cancel_after == Some(seen) {
            return Ok(End::Canceled);
        }
        match stream.next().await.transpose()? {
            Some(Event::Finished(_)) | None => return Ok(End::Finished),
            Some(_) => seen += 1,
        }
    }
}

/// Audits the engine once the canceled requests have released their blocks, which takes a step
/// or two.
async fn settle(engine: &Engine) -> Result<AuditReport, Error> {
    for _ in 0..200 {
        let audit = engine.audit().await?;
        if audit.running + audit.waiting == 0 && audit.blocks_reserved == 0 {
            return Ok(audit);
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    engine.audit().await
}
