//! Answers: the tokens of an answer as they arrive, and the whole answer. Each becomes a `dict`, of
//! which the package makes a class of its own.

use pyo3::IntoPyObject;
use stolon::{
    Answer, AnswerParser, AnswerPart, Finish, FinishReason, Request, StopStrings, TokenEvent,
    TokenLogprob,
};

use crate::error::Failure;

/// `stolon.TokenLogprob`.
#[derive(Debug, IntoPyObject)]
pub(crate) struct Logprob {
    token_id: u32,
    logprob: f32,
    rank: u32,
    top: Vec<(u32, f32)>,
}

impl From<TokenLogprob> for Logprob {
    fn from(entry: TokenLogprob) -> Logprob {
        let TokenLogprob { token_id, logprob, rank, top, .. } = entry;
        Logprob { token_id, logprob, rank, top }
    }
}

/// `stolon.Token`.
#[derive(Debug, IntoPyObject)]
pub(crate) struct Token {
    text: String,
    reasoning: String,
    id: Option<u32>,
    logprob: Option<Logprob>,
}

/// `stolon.ToolCall`, whose arguments are JSON here.
#[derive(Debug, IntoPyObject)]
struct Call {
    name: String,
    arguments: String,
}

/// `stolon.Usage`.
#[derive(Debug, IntoPyObject)]
struct Usage {
    prompt_tokens: usize,
    cached_tokens: usize,
    image_tokens: usize,
    completion_tokens: usize,
}

/// `stolon.Timings`, in seconds.
#[derive(Debug, IntoPyObject)]
struct Timings {
    queue: f64,
    first_token: f64,
    total: f64,
}

/// What ended an answer before its end: a stop string or the id of a stop token.
#[derive(Debug, IntoPyObject)]
enum Stop {
    Text(String),
    Id(u32),
}

/// `stolon.Completion`.
#[derive(Debug, IntoPyObject)]
pub(crate) struct Completion {
    text: String,
    reasoning: String,
    tool_calls: Vec<Call>,
    token_ids: Vec<u32>,
    finish_reason: &'static str,
    stop: Option<Stop>,
    usage: Usage,
    timings: Timings,
    logprobs: Vec<Logprob>,
    prompt_logprobs: Vec<Option<Logprob>>,
}

impl From<stolon::Completion> for Completion {
    fn from(completion: stolon::Completion) -> Completion {
        let stolon::Completion { answer, token_ids, logprobs, prompt_logprobs, finish, .. } =
            completion;
        Completion::new(answer, token_ids, finish, (logprobs, prompt_logprobs))
    }
}

impl Completion {
    /// `logprobs` are those of the answer and of the prompt.
    fn new(
        answer: Answer,
        token_ids: Vec<u32>,
        finish: Finish,
        (logprobs, prompt_logprobs): (Vec<TokenLogprob>, Vec<Option<TokenLogprob>>),
    ) -> Completion {
        let (finish_reason, stop) = match finish.reason {
            FinishReason::Length => ("length", None),
            FinishReason::Repetition => ("repetition", None),
            FinishReason::StopString(text) => ("stop", Some(Stop::Text(text))),
            FinishReason::StopToken(id) => ("stop", Some(Stop::Id(id))),
            _ => ("stop", None),
        };
        let calls = answer.calls.into_iter();
        Completion {
            text: answer.text,
            reasoning: answer.reasoning,
            tool_calls: calls
                .map(|call| Call { name: call.name, arguments: call.arguments })
                .collect(),
            token_ids,
            finish_reason,
            stop,
            usage: Usage {
                prompt_tokens: finish.usage.prompt_tokens,
                cached_tokens: finish.usage.cached_tokens,
                image_tokens: finish.usage.image_tokens,
                completion_tokens: finish.usage.completion_tokens,
            },
            timings: Timings {
                queue: finish.timings.queue.as_secs_f64(),
                first_token: finish.timings.ttft.as_secs_f64(),
                total: finish.timings.total.as_secs_f64(),
            },
            logprobs: logprobs.into_iter().map(Logprob::from).collect(),
            prompt_logprobs: prompt_logprobs
                .into_iter()
                .map(|entry| entry.map(Logprob::from))
                .collect(),
        }
    }
}

/// Puts an answer together from the events of its stream.
#[derive(Debug)]
pub(crate) struct Assembler {
    /// `None` if the whole answer is text.
    parser: Option<AnswerParser>,
    /// Number of tokens before which stop strings are not looked for.
    min_tokens: usize,
    answer: Answer,
    token_ids: Vec<u32>,
    /// Only for the whole answer: a token that is read alone has its own.
    logprobs: Vec<TokenLogprob>,
    prompt_logprobs: Vec<Option<TokenLogprob>>,
}

impl Assembler {
    /// For an answer to this request.
    pub(crate) fn new(request: &Request) -> Result<Assembler, Failure> {
        let stops = StopStrings::new(request.get_stop(), false).map_err(stolon::Error::from)?;
        let format = request.get_answer_format().cloned();
        let parser = format.map(|format| AnswerParser::with_stops(format, stops));
        Ok(Assembler {
            parser,
            min_tokens: request.get_min_tokens(),
            answer: Answer::default(),
            token_ids: Vec::new(),
            logprobs: Vec::new(),
            prompt_logprobs: Vec::new(),
        })
    }

    pub(crate) fn set_prompt_logprobs(&mut self, entries: Vec<Option<TokenLogprob>>) {
        self.prompt_logprobs = entries;
    }

    /// Adds a token. Returns the part of it that belongs to the text or the reasoning.
    pub(crate) fn token(&mut self, event: TokenEvent) -> Token {
        self.token_ids.extend(event.id);
        let is_early = self.token_ids.len() < self.min_tokens;
        let parts = match &mut self.parser {
            Some(parser) if is_early => parser.push_before_stops(&event.text),
            Some(parser) => parser.push(&event.text),
            None => vec![AnswerPart::Text(event.text)],
        };
        let (text, reasoning) = self.add(parts);
        self.logprobs.extend(event.logprob.clone());
        Token { text, reasoning, id: event.id, logprob: event.logprob.map(Logprob::from) }
    }

    /// Adds what the parser has withheld, at the end of the answer. Returns a token without an id,
    /// and the whole answer.
    pub(crate) fn finish(mut self, finish: Finish) -> (Option<Token>, Completion) {
        let parts = match &mut self.parser {
            Some(parser) if finish.reason.is_cut() => parser.cut_off(),
            Some(parser) => parser.finish(),
            None => Vec::new(),
        };
        let (text, reasoning) = self.add(parts);
        let is_empty = text.is_empty() && reasoning.is_empty();
        let last = (!is_empty).then_some(Token { text, reasoning, id: None, logprob: None });
        let completion = Completion::new(
            self.answer,
            self.token_ids,
            finish,
            (self.logprobs, self.prompt_logprobs),
        );
        (last, completion)
    }

    /// The text and the reasoning of these parts, which are added to the answer.
    fn add(&mut self, parts: Vec<AnswerPart>) -> (String, String) {
        let (mut text, mut reasoning) = (String::new(), String::new());
        for part in parts {
            match &part {
                AnswerPart::Text(more) => text.push_str(more),
                AnswerPart::Reasoning(more) => reasoning.push_str(more),
                _ => {}
            }
            self.answer.add(part);
        }
        (text, reasoning)
    }
}
