//! The report of `stolon bench tiers`, as tables and as JSON.

use serde::Serialize;
use serde_json::json;
use stolon_loadgen::metrics::{RequestRecord, Spread, median, share, throughputs};

use super::{Side, TiersArgs};
use crate::terminal;

/// Figures of the requests of one turn of all conversations, or of all turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
struct Figures {
    ttft_ms: Spread,
    /// Prompt tokens that were not computed, 0 to 1.
    cached_share: f64,
}

/// Times to first token of a prefix, in milliseconds: medians.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Restart {
    pub(super) cold_ms: f64,
    pub(super) warm_ms: f64,
    pub(super) restarted_ms: f64,
}

impl Side {
    fn throughput(&self) -> f64 {
        median(throughputs(&self.runs))
    }

    /// The requests of one turn of all conversations, or of all turns.
    fn figures(&self, rounds: usize, round: Option<usize>) -> Figures {
        let of_round = |index: usize| round.is_none_or(|round| index % rounds == round);
        let records: Vec<&RequestRecord> = (self.runs.iter())
            .flat_map(|run| run.iter().enumerate().filter(|(index, _)| of_round(*index)))
            .map(|(_, record)| record)
            .collect();
        Figures {
            ttft_ms: Spread::of_ms(records.iter().filter_map(|record| record.ttft_ms())),
            cached_share: share(
                records.iter().map(|record| record.cached_tokens).sum(),
                records.iter().map(|record| record.prompt_tokens).sum(),
            ),
        }
    }
}

impl TiersArgs {
    pub(super) fn report(
        &self,
        model: &str,
        sides: &[Side],
        restart: Option<Restart>,
    ) -> anyhow::Result<()> {
        if self.json {
            return self.report_json(model, sides, restart);
        }
        terminal::line(format!(
            "{model}: {} conversations of {} turns with {} tokens each, {} generated, {} requests \
             at a time; the KV of all is {} times the pool\n",
            self.clients,
            self.rounds,
            self.input_tokens,
            self.output_tokens,
            self.concurrency,
            self.working_set,
        ))?;
        let Some(first) = sides.first() else { return Ok(()) };
        terminal::stream(&terminal::table(&self.rows(first, sides)))?;
        for side in sides {
            let (speed, base) = (side.throughput(), first.throughput());
            terminal::line(format!(
                "throughput with {}: {speed:.0} tok/s, {:.2} times",
                side.tier.name(),
                ratio(speed, base)
            ))?;
        }
        if let Some(Restart { cold_ms, warm_ms, restarted_ms }) = restart {
            terminal::line(format!(
                "prefix of {} tokens: first token after {} cold, {} from the pool, {} after a restart",
                self.prefix,
                ms(cold_ms),
                ms(warm_ms),
                ms(restarted_ms),
            ))?;
        }
        Ok(())
    }

    fn report_json(
        &self,
        model: &str,
        sides: &[Side],
        restart: Option<Restart>,
    ) -> anyhow::Result<()> {
        let rounds = self.rounds as usize;
        let side = |side: &Side| {
            let figures = |round| side.figures(rounds, round);
            json!({
                "tier": side.tier.name(),
                "turns": (0..rounds).map(|round| figures(Some(round))).collect::<Vec<_>>(),
                "all": figures(None),
                "throughput_tok_s": side.throughput(),
            })
        };
        terminal::line(json!({
            "model": model,
            "clients": self.clients,
            "tiers": sides.iter().map(side).collect::<Vec<_>>(),
            "restart": restart,
        }))?;
        Ok(())
    }

    /// The rows of the table: each turn, then all turns, with each tier next to the first one.
    fn rows(&self, first: &Side, sides: &[Side]) -> Vec<Vec<String>> {
        let rounds = self.rounds as usize;
        let against = format!("of {}", first.tier.name());
        let heading = ["", "tier", "cached", "TTFT p50", "p99", &against];
        let mut rows = vec![heading.map(str::to_owned).to_vec()];
        for round in (0..rounds).map(Some).chain([None]) {
            let name = round.map_or("all turns".to_owned(), |round| format!("turn {}", round + 1));
            let base = first.figures(rounds, round).ttft_ms.p50;
            for side in sides {
                let Figures { ttft_ms, cached_share } = side.figures(rounds, round);
                rows.push(vec![
                    name.clone(),
                    side.tier.name().to_owned(),
                    format!("{:.1} %", cached_share * 100.0),
                    ms(ttft_ms.p50),
                    ms(ttft_ms.p99),
                    format!("{:.3}", ratio(ttft_ms.p50, base)),
                ]);
            }
        }
        rows
    }
}

fn ms(value: f64) -> String {
    format!("{value:.1} ms")
}

/// `a` as a multiple of `b`; 0 if `b` is 0.
fn ratio(a: f64, b: f64) -> f64 {
    if b > 0.0 { a / b } else { 0.0 }
}
