//! The findings of `stolon verify`, as a table and as JSON.

use std::fmt::Write;
use std::time::Duration;

use serde_json::{Value, json};
use stolon_loadgen::http::HttpTarget;

use super::checks::{Checks, Comparison, Difference, Leak, Tally};
use crate::terminal;

/// Characters of an answer that are shown before and after the first difference.
const SHOWN: usize = 32;

/// What a run has found.
#[derive(Debug)]
pub(super) struct Report<'a> {
    pub(super) target: &'a HttpTarget,
    pub(super) seed: u64,
    pub(super) elapsed: Duration,
    pub(super) checks: Checks,
}

/// The result of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// All answers were equal, and nothing leaked.
    Equal,
    /// An answer was different, or had a secret word of another prompt.
    Different,
    /// Nothing different was found, but not everything was answered.
    Incomplete,
}

impl Report<'_> {
    pub(super) fn verdict(&self) -> Verdict {
        let total = self.checks.total();
        match total {
            _ if total.equal < total.compared || total.leaks > 0 => Verdict::Different,
            _ if total.failures > 0 || total.compared == 0 || !self.checks.has_text => {
                Verdict::Incomplete
            }
            _ => Verdict::Equal,
        }
    }

    pub(super) fn json(&self) -> Value {
        let Checks { tallies, differences, leaks, unanswered, .. } = &self.checks;
        let scenarios = tallies.iter().map(|(scenario, tally)| {
            let mut figures = self.figures(tally);
            figures["name"] = json!(scenario.name());
            figures
        });
        let difference = |difference: &Difference| {
            let Comparison { token, character, logprob_difference, logprob } =
                difference.comparison;
            json!({
                "scenario": difference.scenario.name(),
                "prompt": difference.prompt,
                "reference_scenario": difference.reference_scenario.name(),
                "token": token,
                "character": character,
                "logprob": logprob,
                "logprob_difference": logprob_difference,
                "reference": difference.reference,
                "text": difference.text,
            })
        };
        let leak = |leak: &Leak| {
            json!({
                "scenario": leak.scenario.name(),
                "prompt": leak.prompt,
                "secret": leak.secret,
                "text": leak.text,
            })
        };
        json!({
            "url": self.target.url().to_string(),
            "model": self.target.model(),
            "seed": self.seed,
            "duration": self.elapsed.as_secs_f64(),
            "result": match self.verdict() {
                Verdict::Equal => "equal",
                Verdict::Different => "different",
                Verdict::Incomplete => "incomplete",
            },
            "token_ids_given": self.checks.has_token_ids,
            "total": self.figures(&self.checks.total()),
            "answers_with_own_secret": self.checks.own_secrets,
            "scenarios": scenarios.collect::<Vec<_>>(),
            "first_differences": differences.iter().map(difference).collect::<Vec<_>>(),
            "first_leaks": leaks.iter().map(leak).collect::<Vec<_>>(),
            "failures": unanswered.iter().map(|request| json!({
                "scenario": request.scenario.name(),
                "prompt": request.prompt,
                "message": request.message,
            })).collect::<Vec<_>>(),
        })
    }

    fn figures(&self, tally: &Tally) -> Value {
        let given = tally.with_logprobs > 0;
        json!({
            "answers": tally.answers,
            "compared": tally.compared,
            "equal": tally.equal,
            "text_flips": tally.flips,
            "logprobs_compared": tally.with_logprobs,
            "logprob_differences": given.then_some(tally.logprob_differences),
            "max_logprob_difference": given.then_some(tally.max_logprob_difference),
            "leaks": tally.leaks,
            "failed": tally.failures,
            "prompt_tokens": tally.prompt_tokens,
            "cached_tokens": self.checks.has_cached_tokens.then_some(tally.cached_tokens),
        })
    }

    pub(super) fn text(&self) -> String {
        let mut text = format!(
            "{}, model {}, seed {}, {:.0} s\n\n",
            self.target.url(),
            self.target.model(),
            self.seed,
            self.elapsed.as_secs_f64()
        );
        let heading = [
            "",
            "answers",
            "compared",
            "equal",
            "text flips",
            "logprobs differ",
            "by at most",
            "leaks",
            "failed",
            "cached",
        ];
        let mut rows = vec![heading.map(str::to_owned).to_vec()];
        let tallies = self.checks.tallies.iter();
        rows.extend(tallies.map(|(scenario, tally)| self.row(scenario.name(), tally)));
        rows.push(self.row("total", &self.checks.total()));
        text.push_str(&terminal::table(&rows));
        for line in self.findings().into_iter().chain(self.conclusions()) {
            text.push('\n');
            text.push_str(&line);
            text.push('\n');
        }
        text
    }

    fn row(&self, name: &str, tally: &Tally) -> Vec<String> {
        let (differ, by) = match (tally.compared, tally.with_logprobs) {
            (0, _) => ("-".to_owned(), "-".to_owned()),
            (_, 0) => ("not given".to_owned(), "-".to_owned()),
            _ => {
                let by = match tally.max_logprob_difference {
                    0.0 => "0".to_owned(),
                    by => format!("{by:.1e}"),
                };
                (tally.logprob_differences.to_string(), by)
            }
        };
        let cached = match self.checks.has_cached_tokens {
            true => {
                let share = tally.cached_tokens as f64 / tally.prompt_tokens.max(1) as f64;
                format!("{:.0} %", share * 100.0)
            }
            false => "not given".to_owned(),
        };
        let counts = [tally.answers, tally.compared, tally.equal, tally.flips];
        let mut row = vec![name.to_owned()];
        row.extend(counts.map(|count| count.to_string()));
        row.extend([differ, by, tally.leaks.to_string(), tally.failures.to_string(), cached]);
        row
    }

    /// The first difference, leak and failure of each scenario.
    fn findings(&self) -> Vec<String> {
        let differences = self.checks.differences.iter().map(described);
        let leaks = self.checks.leaks.iter().map(|leak| {
            let at = leak.text.find(leak.secret).map_or(0, |at| leak.text[..at].chars().count());
            format!(
                "{}: the answer to prompt {} has `{}`, the secret word of another prompt:\n  {}",
                leak.scenario.name(),
                leak.prompt,
                leak.secret,
                around(&leak.text, at)
            )
        });
        let failures = self.checks.unanswered.iter().map(|request| {
            let (name, prompt) = (request.scenario.name(), request.prompt);
            format!("{name}: prompt {prompt} was not answered: {}", request.message)
        });
        differences.chain(leaks).chain(failures).collect()
    }

    /// What follows from the figures.
    fn conclusions(&self) -> Vec<String> {
        let total = self.checks.total();
        let mut lines = Vec::new();
        let given = match (self.checks.has_token_ids, total.with_logprobs > 0) {
            (true, true) => "text, token ids and log-probabilities",
            (true, false) => "text and token ids; log-probabilities are not given",
            (false, true) => "text and log-probabilities; token ids are not given",
            (false, false) => "text; token ids and log-probabilities are not given",
        };
        let mut line =
            format!("{} of {} answers are equal ({given}).", total.equal, total.compared);
        let _ = match total.leaks {
            0 => write!(line, " No secret word leaked"),
            count => write!(line, " {count} answers leak the secret word of another prompt"),
        };
        let _ = write!(line, "; {} answers name their own.", self.checks.own_secrets);
        lines.push(line);
        if !self.checks.has_text {
            lines.push("All answers were empty, so that nothing was compared.".to_owned());
        }
        if total.failures > 0 {
            lines.push("Not everything was compared, because requests failed.".to_owned());
        }
        if self.checks.has_cached_tokens && total.cached_tokens == 0 {
            let line = "The server reports that no prompt came from a cache: this says nothing \
                        about one. Is prefix caching switched on?";
            lines.push(line.to_owned());
        }
        lines
    }
}

/// A difference with the text around it.
fn described(difference: &Difference) -> String {
    let Comparison { token, character, logprob_difference, logprob } = difference.comparison;
    let (name, prompt) = (difference.scenario.name(), difference.prompt);
    let place = match (token, character) {
        (Some(token), Some(character)) => {
            format!("after {token} equal tokens ({character} characters)")
        }
        (Some(token), None) => format!("after {token} equal tokens, with the same text"),
        (None, Some(character)) => format!("after {character} equal characters"),
        (None, None) => {
            let (tokens, by) = (logprob.unwrap_or(0), logprob_difference.unwrap_or(0.0));
            let shown = around(&difference.text, 0);
            return format!(
                "{name}: the answer to prompt {prompt} differs only in log-probabilities, after \
                 {tokens} equal ones, by at most {by:.1e}\n  {shown}"
            );
        }
    };
    let at = character.unwrap_or(0);
    format!(
        "{name}: the answer to prompt {prompt} differs {place}\n  at first ({}): {}\n  now: {}",
        difference.reference_scenario.name(),
        around(&difference.reference, at),
        around(&difference.text, at)
    )
}

/// The characters around a place of a text, on one line and in quotes.
fn around(text: &str, at: usize) -> String {
    let begin = at.saturating_sub(SHOWN);
    let shown: String = text.chars().skip(begin).take(at - begin + SHOWN).collect();
    let before = if begin > 0 { "..." } else { "" };
    let after = if text.chars().count() > at + SHOWN { "..." } else { "" };
    format!("{before}{shown:?}{after}")
}
