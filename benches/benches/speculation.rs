//! Tokens a second with and without proposed tokens, in one run by turns, for answers that copy and
//! for prose, with 1, 4 and 16 sequences. Run it with `cargo bench -p stolon-benches --bench
//! speculation`; `STOLON_BENCH_MODEL` sets another model (`random:PRESET`). With `-- drafts`, it measures
//! a draft model instead, and with `-- heads` a model's own head.
//!
//! The weights are random, so a processor that knows the answer chooses its tokens: a step takes the
//! time that it takes with real weights, and proposals are as often right as with a model that gives
//! this answer. Words are tokens, so that prose repeats itself as rarely as it does with a real
//! tokenizer.

#![allow(clippy::print_stdout, reason = "the figures are the benchmark's report")]

#[path = "speculation/drafts.rs"]
mod drafts;
#[path = "speculation/heads.rs"]
mod heads;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Instant;

use futures::future::join_all;
use stolon::{Engine, LogitsProcessor, Request, SamplingError, SamplingParams, Speculation};
use tokio::runtime::Runtime;

/// Number of turns of each engine.
const ROUNDS: usize = 5;

/// Length of an answer in tokens.
const ANSWER_LEN: usize = 192;

/// Prose: pages of the book.
const PROSE: [&str; 3] = [
    include_str!("../../docs/src/design/recurrent-layers.md"),
    include_str!("../../docs/src/design/tiers.md"),
    include_str!("../../docs/src/design/images.md"),
];

/// A file that is edited.
const FILE: &str = include_str!("../../crates/engine/scheduler/src/step_cost.rs");

/// Chooses the tokens of an answer that is known.
struct Script(Arc<[u32]>);

impl LogitsProcessor for Script {
    fn process(&self, output: &[u32], logits: &mut [f32]) -> Result<(), SamplingError> {
        let token = self.0.get(output.len()).copied().unwrap_or(0);
        logits[token as usize] = 1e4;
        Ok(())
    }

    fn is_ready(&self, _output: &[u32]) -> bool {
        true
    }
}

/// What is asked, by its kind.
struct Task {
    prompt: Vec<u32>,
    answer: Arc<[u32]>,
}

/// The tokens of a text: its words, signs and line ends.
fn words(text: &str, vocab_size: usize) -> Vec<u32> {
    let mut words = Vec::new();
    let mut word = String::new();
    for letter in text.chars().chain([' ']) {
        if letter.is_alphanumeric() {
            word.push(letter);
            continue;
        }
        words.extend((!word.is_empty()).then(|| std::mem::take(&mut word)));
        words.extend((letter != ' ').then(|| letter.to_string()));
    }
    let id = |word: &String| {
        let mut hasher = DefaultHasher::new();
        word.hash(&mut hasher);
        (hasher.finish() % vocab_size as u64) as u32
    };
    words.iter().map(id).collect()
}

/// The kinds of work. `number` makes those of several sequences different.
fn tasks(number: usize, vocab_size: usize) -> [(&'static str, Task); 4] {
    let words = |text: &str| words(text, vocab_size);
    let (file, prose) = (words(FILE), words(&PROSE.concat()));
    let file = &file[40 * number..40 * number + 500];
    // Every 30th token is changed.
    let mut edited = file[..ANSWER_LEN + 4].to_vec();
    edited.iter_mut().step_by(30).for_each(|token| *token = (*token + 7) % vocab_size as u32);
    let record = |n: usize| {
        format!(
            "{{\"id\": {n}, \"name\": \"item{}\", \"price\": {}, \"tags\": [\"a{}\"]}},\n",
            n * 7,
            n * 13,
            n % 5
        )
    };
    let json = |from: usize| words(&(from..from + 20).map(record).collect::<String>());
    let task = |prompt: Vec<u32>, answer: Vec<u32>| Task { prompt, answer: answer.into() };
    let own = [number as u32; 8];
    let prose_at = 1400 + 60 * number;
    [
        ("edit of a file", task([&own, file].concat(), edited)),
        ("list as JSON", task([&own[..], &json(1)[..60]].concat(), json(50 + number))),
        (
            "second attempt",
            task([&own[..], &prose[..300]].concat(), prose[700 + number..].to_vec()),
        ),
        ("prose", task([&own[..], &prose[1000..1300]].concat(), prose[prose_at..].to_vec())),
    ]
}

/// Tokens a second of one task for each of some sequences at the same time.
async fn rate(engine: &Engine, tasks: &[Task]) -> f64 {
    let sampling = |task: &Task| SamplingParams {
        processor: Some(stolon::SharedProcessor::new(Script(Arc::clone(&task.answer)))),
        ..SamplingParams::default()
    };
    let request = |task: &Task| {
        let request = Request::tokens(&task.prompt[..]).sampling(sampling(task));
        request.max_tokens(ANSWER_LEN).ignore_eos(true)
    };
    // The prompts are computed before.
    join_all(tasks.iter().map(|task| engine.complete(request(task).max_tokens(1)))).await;
    let begun = Instant::now();
    let answers = join_all(tasks.iter().map(|task| engine.complete(request(task)))).await;
    let time = begun.elapsed();
    for (answer, task) in answers.into_iter().zip(tasks) {
        let answer = answer.expect("an answer");
        assert_eq!(answer.token_ids, task.answer[..ANSWER_LEN]);
    }
    (tasks.len() * ANSWER_LEN) as f64 / time.as_secs_f64()
}

fn main() {
    let model = std::env::var("STOLON_BENCH_MODEL").unwrap_or_else(|_| "random:100m".to_owned());
    let runtime = Runtime::new().expect("a runtime");
    if std::env::args().any(|arg| arg == "drafts") {
        return runtime.block_on(drafts::run());
    }
    if std::env::args().any(|arg| arg == "heads") {
        return runtime.block_on(heads::run());
    }
    runtime.block_on(async {
        let start = |speculation| {
            let builder = Engine::builder().model(model.as_str()).speculation(speculation);
            builder.num_blocks(4096).build()
        };
        let plain = start(Speculation::off()).await.expect("an engine");
        let engine = start(Speculation::default()).await.expect("an engine");
        let vocab_size = plain.model_info().vocab_size;
        println!("{model}: tokens a second, median of {ROUNDS} (lowest, highest)");
        println!(
            "| work | sequences | plain | proposed | times | accepted |\n|---|---|---|---|---|---|"
        );
        for sequences in [1, 4, 16] {
            for kind in 0..4 {
                let of_kind = |number| tasks(number, vocab_size).into_iter().nth(kind);
                let of_all: Vec<_> = (0..sequences).filter_map(of_kind).collect();
                let name = of_all[0].0;
                let tasks: Vec<Task> = of_all.into_iter().map(|(_, task)| task).collect();
                let mut rates = [Vec::new(), Vec::new()];
                let before = engine.stats();
                for round in 0..=ROUNDS {
                    for (rates, engine) in rates.iter_mut().zip([&plain, &engine]) {
                        // Only a second attempt finds what the first one has left in the tree. The
                        // first round is its first attempt.
                        if name != "second attempt" {
                            engine.cache().flush().await.expect("it runs");
                        }
                        let rate = rate(engine, &tasks).await;
                        rates.extend((round > 0).then_some(rate));
                    }
                }
                rates.iter_mut().for_each(|rates| rates.sort_by(f64::total_cmp));
                let stats = engine.stats();
                let drafted = stats.drafted_tokens - before.drafted_tokens;
                let accepted = stats.accepted_tokens - before.accepted_tokens;
                let show = |rates: &[f64]| {
                    let (median, last) = (rates[rates.len() / 2], rates[rates.len() - 1]);
                    format!("{median:.1} ({:.1}, {last:.1})", rates[0])
                };
                let [plain, proposed] = &rates;
                let times = proposed[ROUNDS / 2] / plain[ROUNDS / 2];
                println!(
                    "| {name} | {sequences} | {} | {} | {times:.2} | {accepted} of {drafted} |",
                    show(plain),
                    show(proposed)
                );
            }
        }
    });
}
