//! Proposed tokens change no bit of an answer: for each kind of model, random requests with all
//! options get the tokens, texts and log-probabilities of plain decoding, whatever is proposed,
//! while others are canceled and prefixes are removed.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::future::join_all;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use stolon::{
    Completion, DraftContext, DraftSource, DraftSources, Engine, EngineBuilder, EngineError, Error,
    Grammar, LogitsProcessor, Request, SamplingError, SamplingParams, SessionError, SessionOptions,
    SharedProcessor, Speculation, WindowKv,
};

use crate::support::bits::bits;

/// Number of requests at the same time.
const CLIENTS: usize = 5;

/// Length of an answer in tokens, without another end.
const ANSWER_LEN: usize = 24;

/// The models: dense, with windows, with sinks and experts, with latent attention, with experts,
/// with short convolutions, with Mamba-2, with Gated DeltaNet and Kimi Delta Attention, and with
/// windows in states.
const MODELS: &[&str] = &[
    "llama",
    "gemma3",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_moe",
    "gemma4",
    "phi3",
    "cohere2",
    "lfm2",
    "falcon_h1",
    "granite_mamba_moe",
    "nemotron_h",
    "qwen3_5",
    "qwen3_next",
    "kimi_linear",
    "gemma3 in states",
    "gpt_oss in states",
];

/// Those with recurrent layers.
const HAVE_STATES: &[&str] =
    &["falcon_h1", "granite_mamba_moe", "nemotron_h", "qwen3_5", "qwen3_next", "kimi_linear"];

/// What is proposed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Guess {
    /// What the engine's own sources have, always.
    Own,
    /// What they have, where it pays.
    Adaptive,
    /// The tokens of the right answer, up to a wrong one.
    Mixed,
    /// Tokens that are hardly ever right.
    Garbage,
    /// What a draft model guesses, always: the model itself, unless it has states.
    Model,
    /// What a draft model guesses that is hardly ever right, and the engine's own sources, where it
    /// pays.
    OtherModel,
}

const GUESSES: &[Guess] =
    &[Guess::Own, Guess::Adaptive, Guess::Mixed, Guess::Garbage, Guess::Model, Guess::OtherModel];

/// The right answers: of each prompt, the tokens of all answers to it.
type Known = Arc<HashMap<Vec<u32>, Vec<Vec<u32>>>>;

impl Guess {
    fn speculation(self, known: &Known) -> Speculation {
        let known = Arc::clone(known);
        let make = move || -> Vec<Box<dyn DraftSource>> {
            vec![Box::new(Guesser { guess: self, known: Arc::clone(&known) })]
        };
        let sources = match self {
            Guess::Mixed | Guess::Garbage => Some(DraftSources::new(make)),
            Guess::Model => Some(DraftSources::new(Vec::new)),
            Guess::Own | Guess::Adaptive | Guess::OtherModel => None,
        };
        let adaptive = matches!(self, Guess::Adaptive | Guess::OtherModel);
        Speculation { adaptive, sources, ..Speculation::default() }
    }

    /// The draft model for a model, which must be without states; `None` if there is none.
    fn draft_model(self, model: &str) -> Option<PathBuf> {
        let is_possible = !HAVE_STATES.contains(&model) && !model.ends_with(" in states");
        match self {
            Guess::Model if is_possible => Some(fixture(model)),
            Guess::Model => Some(fixture("phi3")),
            Guess::OtherModel => Some(fixture("llama")),
            _ => None,
        }
    }
}

struct Guesser {
    guess: Guess,
    known: Known,
}

impl std::fmt::Debug for Guesser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.guess)
    }
}

impl DraftSource for Guesser {
    fn draft(&mut self, context: &DraftContext<'_>, limit: usize) -> Vec<u32> {
        let (prompt, answer) = context.tokens.split_at(context.prompt_len);
        let seed = context
            .tokens
            .iter()
            .fold(7_usize, |seed, &token| seed.wrapping_mul(31).wrapping_add(token as usize));
        if self.guess == Guess::Garbage {
            return (0..limit).map(|n| ((seed >> 3) + 11 * n) as u32 % 96).collect();
        }
        let answers = self.known.get(prompt).map(Vec::as_slice).unwrap_or_default();
        let Some(right) = answers.iter().find(|right| right.starts_with(answer)) else {
            return Vec::new();
        };
        let mut tokens: Vec<u32> = right[answer.len()..].iter().copied().take(limit).collect();
        if let Some(wrong) = tokens.get_mut(seed % 11) {
            *wrong = (*wrong + 1) % 96;
        }
        tokens
    }
}

/// A processor that excludes tokens by position, and is not ready for every other token.
struct Odd;

impl LogitsProcessor for Odd {
    fn process(&self, output: &[u32], logits: &mut [f32]) -> Result<(), SamplingError> {
        for token in (output.len() % 5..logits.len()).step_by(5) {
            logits[token] = f32::NEG_INFINITY;
        }
        Ok(())
    }

    fn is_ready(&self, output: &[u32]) -> bool {
        output.len().is_multiple_of(2)
    }
}

/// A request, in how many choices, with their answers by an engine without proposals.
#[derive(Clone)]
struct Question {
    request: Request,
    choices: usize,
    /// Whether it can be the turn of a session: one answer of the model itself.
    may_be_turn: bool,
    answers: Vec<Completion>,
}

/// Token ids of all fixtures.
fn tokens(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|n| (n * n * 31 + n * (seed + 3) + seed) % 96).collect()
}

/// The directory of a fixture of `stolon-checkpoint`.
fn fixture(name: &str) -> PathBuf {
    stolon_fixtures::path(name)
}

/// The directory of an adapter for a model; `None` if the fixtures have none.
fn adapter(model: &str) -> Option<PathBuf> {
    Some(fixture("lora").join(model)).filter(|path| path.is_dir())
}

/// An engine with the fixture of this name, whose windows are in states if the name says so.
fn builder(model: &str) -> EngineBuilder {
    let in_states = model.strip_suffix(" in states");
    let windows = if in_states.is_some() { WindowKv::States } else { WindowKv::Blocks };
    let builder = Engine::builder().threads(1).model(fixture(in_states.unwrap_or(model)));
    let builder = builder.window_kv(windows);
    match adapter(model) {
        Some(path) => builder.adapter("own", path),
        None => builder,
    }
}

/// The options of the `index`-th request, which repeat with different periods.
fn options(request: Request, index: u64) -> Request {
    let pick = |values: &[f32]| values[index as usize % values.len()];
    let sampling = SamplingParams {
        temperature: pick(&[0.0, 0.7, 0.0, 1.2, 0.4]),
        top_k: [None, None, Some(5)][index as usize % 3],
        top_p: pick(&[1.0, 0.9, 1.0, 0.5]),
        min_p: pick(&[0.0, 0.0, 0.05]),
        repetition_penalty: pick(&[1.0, 1.0, 1.3, 1.0, 1.1, 1.0, 1.0]),
        presence_penalty: pick(&[0.0, 0.0, 0.0, 0.8]),
        frequency_penalty: pick(&[0.0, 0.0, 0.0, 0.0, 0.4]),
        logit_bias: if index % 6 == 1 { [(7, 3.0), (9, -5.0)].into() } else { [].into() },
        seed: Some(index),
        logprobs: Some([0, 2, 5][index as usize % 3]),
        processor: (index % 8 == 3).then(|| SharedProcessor::new(Odd)),
        ..SamplingParams::default()
    };
    let request = request.sampling(sampling).max_tokens([ANSWER_LEN, 9, 1, 40][index as usize % 4]);
    let request = match index % 5 {
        0 => request.ignore_eos(true),
        1 => request.stop_ids([5, 17, 40]).min_tokens(6),
        _ => request.stop_ids([11]),
    };
    if index % 9 == 4 { request.prompt_logprobs(1) } else { request }
}

/// The questions to a model, with the answers of an engine without proposals and without a cache.
async fn questions(model: &str) -> Vec<Question> {
    let plain = builder(model).prefix_caching(false).speculation(Speculation::off());
    let plain = plain.build().await.expect("the engine starts");
    let mut questions = Vec::new();
    for index in 0..40 {
        let shared = tokens(index % 4, 20 + 31 * (index % 3));
        // Half of the prompts repeat a part of themselves.
        let own = if index % 2 == 0 { tokens(index % 4, 25) } else { tokens(index + 9, 12) };
        let request = options(Request::tokens([shared, own].concat()), index.into());
        let adapted = index % 6 == 5 && adapter(model).is_some();
        let request = if adapted { request.adapter("own") } else { request };
        let choices = if index % 7 == 2 { 3 } else { 1 };
        let answers = ask(&plain, request.clone(), choices).await;
        let may_be_turn = choices == 1 && !adapted;
        questions.push(Question { request, choices, may_be_turn, answers });
    }
    assert_eq!(plain.stats().drafts, 0);
    plain.shutdown().await;
    questions
}

/// The answers to a request; none if its session has been closed by a removal.
async fn ask(engine: &Engine, request: Request, choices: usize) -> Vec<Completion> {
    let streams = match engine.generate_choices(request, choices).await {
        Ok(streams) => streams,
        Err(Error::Engine(EngineError::Session(SessionError::Unknown { .. }))) => {
            return Vec::new();
        }
        Err(other) => panic!("{other}"),
    };
    let answers = streams.into_iter().map(|stream| stream.collect_text());
    join_all(answers).await.into_iter().map(|answer| answer.expect("an answer")).collect()
}

/// What must be equal of two answers.
fn essence(answer: &Completion) -> impl PartialEq + std::fmt::Debug {
    let prompt: Vec<_> = answer
        .prompt_logprobs
        .iter()
        .map(|row| row.as_ref().map(|row| row.logprob.to_bits()))
        .collect();
    let tops: Vec<_> = answer.logprobs.iter().map(|row| row.top.clone()).collect();
    (bits(answer), tops, answer.text.clone(), answer.finish.reason.clone(), prompt)
}

/// Asks questions until `enough` were answered, and compares each answer.
async fn client(
    engine: Engine,
    questions: Arc<Vec<Question>>,
    answered: Arc<AtomicUsize>,
    seed: u64,
    enough: usize,
) {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut sessions = 0;
    while answered.load(Ordering::Relaxed) < enough {
        let question = &questions[rng.random_range(0..questions.len())];
        if rng.random_range(0..6) == 0 {
            let mut stream = engine.generate(question.request.clone()).await.expect("it fits");
            for _ in 0..rng.random_range(0..ANSWER_LEN) {
                drop(stream.next().await);
            }
            continue;
        }
        let mut request = question.request.clone();
        let session = (question.may_be_turn && rng.random_range(0..4) == 0).then(|| {
            sessions += 1;
            let options = SessionOptions::new(format!("{seed}-{sessions}"));
            engine.sessions().open(options).expect("a free id").id
        });
        if let Some(id) = &session {
            request = request.session(id);
        }
        let answers = ask(&engine, request, question.choices).await;
        assert!(session.is_some() || answers.len() == question.choices);
        for (answer, expected) in answers.iter().zip(&question.answers) {
            assert_eq!(essence(answer), essence(expected));
            answered.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(id) = session {
            engine.sessions().close(&id);
        }
    }
}

/// Compares `answers` answers of a model for each guess. Returns the number of accepted tokens.
#[allow(clippy::print_stdout, reason = "the figures of a run are the test's report")]
async fn compare(model: &str, guesses: &[Guess], answers: usize) -> u64 {
    let questions = Arc::new(questions(model).await);
    let mut known: HashMap<Vec<u32>, Vec<Vec<u32>>> = HashMap::new();
    for Question { request, answers, .. } in questions.iter() {
        let stolon::Prompt::Tokens(prompt) = request.prompt() else { unreachable!("all are") };
        let of_prompt = known.entry(prompt.to_vec()).or_default();
        of_prompt.extend(answers.iter().map(|answer| answer.token_ids.clone()));
    }
    let (known, mut accepted) = (Arc::new(known), 0);
    for &guess in guesses {
        // The pool has room for about four requests.
        let builder = builder(model).num_blocks(60).max_batched_tokens(64).max_running(4);
        let builder = builder.speculation(guess.speculation(&known));
        let builder = match guess.draft_model(model) {
            Some(draft) => builder.draft_model(draft),
            None => builder,
        };
        let engine = builder.build().await.expect("the engine starts");
        let removing = tokio::spawn({
            let engine = engine.clone();
            async move {
                loop {
                    tokio::time::sleep(Duration::from_millis(40)).await;
                    engine.cache().flush().await.expect("it runs");
                }
            }
        });
        let answered = Arc::new(AtomicUsize::new(0));
        let clients = (0..CLIENTS).map(|index| {
            let (questions, answered) = (Arc::clone(&questions), Arc::clone(&answered));
            tokio::spawn(client(engine.clone(), questions, answered, index as u64, answers))
        });
        for client in clients.collect::<Vec<_>>() {
            client.await.expect("equal answers");
        }
        removing.abort();
        while engine.stats().running + engine.stats().waiting > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let stats = engine.stats();
        println!(
            "{model}, {guess:?}: {} answers, {} drafts, {} of {} tokens accepted, {} preemptions, {} \
             checkpoints",
            answered.load(Ordering::Relaxed),
            stats.drafts,
            stats.accepted_tokens,
            stats.drafted_tokens,
            stats.preemptions,
            stats.checkpoints,
        );
        accepted += stats.accepted_tokens;
        let audit = engine.audit().await.expect("consistent accounting");
        assert_eq!(audit.blocks_reserved, 0);
        engine.shutdown().await;
    }
    accepted
}

/// Goal: a few dozen answers of models with the kinds of layers that are most different have the
/// bits of plain decoding, with proposals of every kind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn proposals_change_no_bit() {
    for model in ["llama", "deepseek_v3", "gemma3", "qwen3_5", "falcon_h1", "gemma3 in states"] {
        let accepted = compare(model, GUESSES, 60).await;
        assert!(accepted > 100, "{model}: {accepted} accepted");
    }
}

/// The turns of a conversation, each of which continues the one before. Returns the answers, and
/// how many tokens of each prompt were not computed.
async fn converse(engine: &Engine) -> (Vec<Completion>, Vec<usize>) {
    let (mut prompt, mut answers, mut cached) = (tokens(1, 70), Vec::new(), Vec::new());
    for turn in 0..4 {
        let request = Request::tokens(prompt.clone()).max_tokens(45).logprobs(3).ignore_eos(true);
        let answer = engine.complete(request).await.expect("an answer");
        prompt.extend(&answer.token_ids);
        prompt.extend(tokens(turn + 2, 15));
        cached.push(answer.finish.usage.cached_tokens);
        answers.push(answer);
    }
    (answers, cached)
}

/// Goal: the states of rejected tokens are in no checkpoint, and no checkpoint is missing: each
/// turn of a conversation resumes where it does without proposals, and its answer has the same
/// bits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conversations_resume_where_they_would_without_proposals() {
    for model in ["qwen3_5", "granite_mamba_moe", "kimi_linear", "gemma3 in states"] {
        let start = |guess: Option<Guess>, block_size, known: &Known| {
            let speculation = guess.map_or_else(Speculation::off, |guess| guess.speculation(known));
            let builder = builder(model).block_size(block_size).num_blocks(2_000);
            builder.speculation(speculation).build()
        };
        for block_size in [4, 16] {
            let plain = start(None, block_size, &Known::default()).await.expect("it starts");
            let (expected, cached) = converse(&plain).await;
            assert!(cached[1..].iter().all(|cached| *cached > 0), "{model}: {cached:?}");
            let mut known = HashMap::new();
            let mut prompt = tokens(1, 70);
            for (turn, answer) in (0..).zip(&expected) {
                known.insert(prompt.clone(), vec![answer.token_ids.clone()]);
                prompt.extend(&answer.token_ids);
                prompt.extend(tokens(turn + 2, 15));
            }
            let known = Arc::new(known);
            for guess in [Guess::Own, Guess::Mixed, Guess::Garbage] {
                let engine = start(Some(guess), block_size, &known).await.expect("it starts");
                let (answers, resumed) = converse(&engine).await;
                for (answer, expected) in answers.iter().zip(&expected) {
                    assert_eq!(essence(answer), essence(expected), "{model}, {guess:?}");
                }
                assert_eq!(resumed, cached, "{model}, {guess:?}, blocks of {block_size}");
                let drafted = engine.stats().drafted_tokens;
                assert!(guess == Guess::Own || drafted > 100, "{guess:?}: {drafted} drafted");
                engine.shutdown().await;
            }
            plain.shutdown().await;
        }
    }
}

/// Goal: 170 answers of each model for each kind of proposals, 10,000 together, have the bits of
/// plain decoding. The variable `STOLON_EXACT_ANSWERS` sets another number.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes some minutes"]
async fn proposals_change_no_bit_of_any_model() {
    let answers = std::env::var("STOLON_EXACT_ANSWERS").ok();
    let answers = answers.map_or(170, |count| count.parse().expect("a number"));
    for model in MODELS {
        compare(model, GUESSES, answers).await;
    }
}

/// Goal: with grammars, stop strings and an expected answer, texts and log-probabilities are those of
/// plain decoding, and tokens are accepted.
#[cfg(feature = "grammar")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grammars_and_stop_strings_combine() {
    let start = |speculation| async {
        let builder = Engine::builder().model("random:tiny").threads(1).num_blocks(256);
        builder.speculation(speculation).build().await.expect("the engine starts")
    };
    let always = Speculation { adaptive: false, ..Speculation::default() };
    let (plain, engine) = (start(Speculation::off()).await, start(always).await);
    let schema = serde_json::json!({
        "type": "object", "additionalProperties": false, "required": ["first_name", "is_known"],
        "properties": {
            "first_name": {"type": "string", "maxLength": 4}, "is_known": {"type": "boolean"},
        },
    });
    let mut requests = Vec::new();
    for seed in 0..12 {
        let sampling = SamplingParams {
            temperature: [0.0, 1.0][seed as usize % 2],
            seed: Some(seed),
            logprobs: Some(1),
            ..SamplingParams::default()
        };
        let request = Request::text("A value: {\"first_name\": \"ab\"").sampling(sampling);
        let schema = Grammar::JsonSchema(schema.clone());
        requests.push(request.clone().max_tokens(80).stop_ids([300]).grammar(schema));
        let text = plain.complete(request.clone().max_tokens(50)).await.expect("an answer").text;
        let end = text.char_indices().nth(12).map_or(text.len(), |(end, _)| end);
        let start = text.char_indices().nth(9).map_or(0, |(start, _)| start);
        let stop = text[start..end].to_owned();
        requests.push(request.max_tokens(50).stop([stop]).prediction(text));
    }
    for request in requests.clone() {
        let expected = plain.complete(request.clone()).await.expect("an answer");
        let answer = engine.complete(request).await.expect("an answer");
        assert_eq!(essence(&answer), essence(&expected));
    }
    // And all at the same time.
    let together = join_all(requests.iter().map(|request| engine.complete(request.clone()))).await;
    for (request, answer) in requests.into_iter().zip(together) {
        let expected = plain.complete(request).await.expect("an answer");
        assert_eq!(essence(&answer.expect("an answer")), essence(&expected));
    }
    assert!(engine.stats().accepted_tokens > 200, "{:?}", engine.stats());
}
