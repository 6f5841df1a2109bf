//! The handler of `POST /v1/completions`.

use axum::response::Response;
use futures::future::try_join_all;
use serde_json::json;
use stolon::{AnswerPart, Engine, Infill, Request, TokenLogprob};

use crate::api::completions::{Completion, CompletionChoice, CompletionRequest, Prompt};
use crate::api::logprobs::CompletionLogprobs;
use crate::api::options::MAX_CHOICES;
use crate::api::reply::{CutReason, FinishReason, Usage};
use crate::handlers::choices::{self, ChoiceEvent, Envelope, Names};
use crate::handlers::context::{Incoming, Purpose};
use crate::handlers::logprobs::{self, CompletionLists, LogprobForm, TextOffsets};
use crate::handlers::options::{ApiOptions, Call};
use crate::wire::error::ApiError;
use crate::wire::reply::{Dialect, Piece};

/// OpenAI's default for this endpoint.
const DEFAULT_MAX_TOKENS: usize = 16;

/// Maximum number of log-probabilities of repeated prompts in a reply: positions times choices
/// times tokens listed per position. They take about 50 bytes each in the reply.
const MAX_ECHOED_LOGPROBS: usize = 1 << 19;

/// A prompt that is repeated at the beginning of its choices.
struct Echo {
    text: String,
    /// Log-probabilities of its tokens; empty unless they were requested.
    lists: CompletionLists,
    /// Offset of the text of the first generated token.
    offsets: TextOffsets,
}

/// The names in replies.
const NAMES: Names = Names {
    id: "cmpl",
    whole: "text_completion",
    piece: "text_completion",
    has_prompt_logprobs: false,
};

/// The reply to one call.
struct Completions {
    engine: Engine,
    envelope: Envelope,
    choices_per_prompt: usize,
    /// Whether log-probabilities were requested.
    logprobs: bool,
    logprob_form: LogprobForm,
    /// One entry per prompt if prompts are repeated, empty otherwise.
    echoes: Vec<Echo>,
    /// [`Call::prompt_ids`].
    prompt_ids: Vec<Vec<u32>>,
    /// Offset of the text of the next token, for each choice.
    offsets: Vec<TextOffsets>,
    /// The whole choices, unless they are streamed.
    choices: Vec<CompletionChoice>,
}

/// The handler.
pub(crate) async fn create(
    Incoming { body: request, context }: Incoming<CompletionRequest>,
) -> Result<Response, ApiError> {
    let max_tokens = request.max_tokens.or(context.app.configured_max_tokens);
    let max_tokens = max_tokens.unwrap_or(DEFAULT_MAX_TOKENS);
    let own = ApiOptions {
        choices: request.choices,
        max_tokens: Some(max_tokens),
        logprobs: request.logprobs,
        ..ApiOptions::default()
    };
    let mut call = Call::new(context, request.options, own)?;
    let mut prompts = request.prompt.into_prompts();
    if prompts.is_empty() {
        return Err(ApiError::expected("prompt", "at least one prompt", &json!([])));
    }
    call.candidate_count = candidates(request.best_of, &call)?;
    let answers = prompts.len() * call.candidate_count.unwrap_or(call.choice_count);
    let param = if prompts.len() == 1 { "n" } else { "prompt" };
    call.context.app.check_answers(param, answers)?;
    let echo = request.echo.unwrap_or(false);
    if max_tokens == 0 && !echo {
        return Err(ApiError::expected("max_tokens", "at least 1 without `echo`", &json!(0)));
    }
    if max_tokens == 0 && call.prompt_logprobs.is_some() {
        let message = "`prompt_logprobs` is not possible with `max_tokens`: 0: `logprobs` with \
                       `echo` are those of the prompt";
        return Err(ApiError::invalid(Some("prompt_logprobs"), message));
    }
    if max_tokens == 0 && call.candidate_count.is_some() {
        let message = "`best_of` is not possible with `max_tokens`: 0, which generates nothing";
        return Err(ApiError::invalid(Some("best_of"), message));
    }
    for prompt in &mut prompts {
        truncate(&call, prompt).await?;
    }
    call.prompts = match request.suffix.filter(|suffix| !suffix.is_empty()) {
        None => prompts.iter().cloned().map(engine_request).collect(),
        Some(_) if echo || request.append_to_session == Some(true) || call.truncates() => {
            let message = "`suffix` is not possible with `echo`, `append_to_session` or \
                           `truncate_prompt_tokens`";
            return Err(ApiError::invalid(Some("suffix"), message));
        }
        Some(suffix) => {
            prompts.iter().map(|prompt| gap(prompt, &suffix)).collect::<Result<_, _>>()?
        }
    };
    if echo && call.has_session() {
        let message = "`echo` is not possible with `session_id`";
        return Err(ApiError::invalid(Some("echo"), message));
    }
    if request.append_to_session.unwrap_or(false) {
        if !call.has_session() {
            let message = "`append_to_session` needs a `session_id`";
            return Err(ApiError::invalid(Some("append_to_session"), message));
        }
        call.prompts = call.prompts.into_iter().map(Request::append).collect();
    }
    call.join_session()?;
    call.describe();
    if echo && call.context.purpose == Purpose::Answer {
        return respond_with_echo(call, prompts).await;
    }
    call.set_prompt_ids().await?;
    let completions = Completions::new(&call, Vec::new());
    call.respond(completions).await
}

/// Runs the prompts of a call and replies with choices that begin with their prompts.
async fn respond_with_echo(mut call: Call, prompts: Vec<Prompt>) -> Result<Response, ApiError> {
    let scored = prompts.into_iter().map(|prompt| score(&call, prompt));
    let scored = try_join_all(scored).await?;
    let usages: Vec<stolon::Usage> = scored.iter().map(|scored| scored.usage).collect();
    let mut echoes = Vec::with_capacity(scored.len());
    call.prompts.clear();
    for scored in scored {
        echoes.push(scored.echo);
        if call.return_token_ids {
            call.prompt_ids.push(scored.tokens.clone());
        }
        call.prompts.push(Request::tokens(scored.tokens));
    }
    // Without log-probabilities, the prompts have not been computed and count with their answers.
    if call.max_tokens == 0 || call.logprobs.is_some() {
        call.usage_sum = call.usage_sum.with_prompts(&usages);
    }
    let completions = Completions::new(&call, echoes);
    match call.max_tokens {
        0 => call.respond_without_answers(completions).await,
        _ => call.respond(completions).await,
    }
}

/// A prompt with its log-probabilities.
struct Scored {
    echo: Echo,
    tokens: Vec<u32>,
    usage: stolon::Usage,
}

/// Prepares a prompt that is repeated in the choices. A separate request computes its
/// log-probabilities, once for all choices, which then find the prompt in the cache.
async fn score(call: &Call, prompt: Prompt) -> Result<Scored, ApiError> {
    let engine = call.engine();
    let is_text = matches!(prompt, Prompt::Text(_));
    let text = match &prompt {
        Prompt::Text(text) => text.clone(),
        Prompt::Tokens(tokens) => engine.detokenize(tokens, false)?,
    };
    let tokens = match prompt {
        Prompt::Tokens(tokens) => tokens,
        text @ Prompt::Text(_) => {
            engine.prompt_tokens(&call.context.caller.sign(engine_request(text))).await?
        }
    };
    let mut usage = stolon::Usage { prompt_tokens: tokens.len(), ..stolon::Usage::default() };
    let mut lists = CompletionLists::new(call.logprob_form);
    let mut offsets = TextOffsets::of_prompt(!is_text);
    if let Some(top) = call.logprobs {
        check_echoed_logprobs(tokens.len(), call, top)?;
        let request = call.apply(Request::tokens(tokens.clone())).prompt_logprobs(top);
        let scored = engine.generate(request.max_tokens(1)).await?.collect_text().await?;
        usage.cached_tokens = scored.finish.usage.cached_tokens;
        for (&token, entry) in tokens.iter().zip(&scored.prompt_logprobs) {
            match entry {
                Some(entry) => lists.push(engine, entry, &mut offsets),
                None => lists.push_first(engine, token, &mut offsets),
            }
        }
    }
    offsets.continue_after(text.chars().count());
    Ok(Scored { echo: Echo { text, lists, offsets }, tokens, usage })
}

fn check_echoed_logprobs(positions: usize, call: &Call, top: usize) -> Result<(), ApiError> {
    let count = positions.saturating_mul(call.choice_count).saturating_mul(top + 1);
    if count <= MAX_ECHOED_LOGPROBS {
        return Ok(());
    }
    let message = format!(
        "expected at most {MAX_ECHOED_LOGPROBS} log-probabilities of repeated prompts (tokens x `n` \
         x (`logprobs` + 1)), got {count}"
    );
    Err(ApiError::invalid(Some("echo"), message))
}

/// Cuts a prompt that is longer than the request permits.
async fn truncate(call: &Call, prompt: &mut Prompt) -> Result<(), ApiError> {
    if !call.truncates() {
        return Ok(());
    }
    // The text may be longer than the engine takes.
    let tokens = match prompt {
        Prompt::Text(text) => {
            let client = call.context.caller.identity.clone();
            call.engine().tokenize_for(text.clone(), true, client).await?
        }
        Prompt::Tokens(tokens) => std::mem::take(tokens),
    };
    *prompt = Prompt::Tokens(call.kept_of(&tokens)?.unwrap_or(tokens));
    Ok(())
}

/// The number of candidates of `best_of`; `None` for 1, because there is nothing to choose from.
fn candidates(best_of: Option<usize>, call: &Call) -> Result<Option<usize>, ApiError> {
    let Some(count) = best_of else { return Ok(None) };
    if count < call.choice_count {
        let expected = format!("a whole number from {} (`n`) to {MAX_CHOICES}", call.choice_count);
        return Err(ApiError::expected("best_of", &expected, &json!(count)));
    }
    if count > 1 && call.stream {
        let message = "`best_of` is not possible with `stream`: true, because answers can only be \
                       compared when they are complete";
        return Err(ApiError::invalid(Some("best_of"), message));
    }
    Ok((count > 1).then_some(count))
}

pub(crate) fn engine_request(prompt: Prompt) -> Request {
    match prompt {
        Prompt::Text(text) => Request::text(text),
        Prompt::Tokens(tokens) => Request::tokens(tokens),
    }
}

/// A request for what is between a prompt and a suffix.
fn gap(prompt: &Prompt, suffix: &str) -> Result<Request, ApiError> {
    let Prompt::Text(prefix) = prompt else {
        let message = "`suffix` is only possible with a `prompt` that is text";
        return Err(ApiError::invalid(Some("suffix"), message));
    };
    let (prefix, suffix) = (prefix.clone(), suffix.to_owned());
    Ok(Request::infill(Infill { prefix, suffix, files: Vec::new() }))
}

impl Completions {
    /// The reply to a call. `echoes` has one entry per prompt if prompts are repeated.
    fn new(call: &Call, echoes: Vec<Echo>) -> Self {
        let mut reply = Self {
            engine: call.engine().clone(),
            envelope: Envelope::new(NAMES, call, None),
            choices_per_prompt: call.choice_count,
            logprobs: call.logprobs.is_some(),
            logprob_form: call.logprob_form,
            echoes,
            prompt_ids: call.prompt_ids.clone(),
            offsets: Vec::new(),
            choices: Vec::new(),
        };
        for index in 0..call.prompts.len() * call.choice_count {
            let offsets = reply.echo(index).map(|echo| echo.offsets.clone());
            reply.offsets.push(offsets.unwrap_or_default());
            let logprobs = reply.logprobs.then(CompletionLogprobs::default);
            let choice = reply.piece(index, String::new(), Vec::new());
            let prompt_logprobs = Some(None);
            reply.choices.push(CompletionChoice { logprobs, prompt_logprobs, ..choice });
        }
        reply
    }

    fn echo(&self, index: usize) -> Option<&Echo> {
        self.echoes.get(index / self.choices_per_prompt)
    }

    /// A piece of a choice without token ids of the prompt. `token_ids` are those that it adds.
    fn piece(&self, index: usize, text: String, token_ids: Vec<u32>) -> CompletionChoice {
        let token_ids = (!self.prompt_ids.is_empty()).then_some(token_ids);
        CompletionChoice {
            index,
            text,
            logprobs: None,
            finish_reason: None,
            stop_reason: None,
            prompt_logprobs: None,
            prompt_token_ids: None,
            token_ids,
        }
    }

    /// Sends a piece, or adds it to the whole choice.
    fn emit(&mut self, piece: CompletionChoice) -> Vec<ChoiceEvent<CompletionChoice>> {
        if self.envelope.stream {
            return vec![self.envelope.piece(piece.index, piece)];
        }
        add(&mut self.choices[piece.index], piece);
        Vec::new()
    }
}

/// Adds a piece to a choice.
fn add(choice: &mut CompletionChoice, piece: CompletionChoice) {
    choice.text.push_str(&piece.text);
    if let (Some(lists), Some(more)) = (&mut choice.logprobs, piece.logprobs) {
        lists.tokens.extend(more.tokens);
        lists.token_logprobs.extend(more.token_logprobs);
        lists.top_logprobs.extend(more.top_logprobs);
        lists.text_offset.extend(more.text_offset);
    }
    choice.finish_reason = piece.finish_reason.or(choice.finish_reason);
    choice.stop_reason = piece.stop_reason.or(choice.stop_reason);
    if let (Some(ids), Some(more)) = (&mut choice.token_ids, piece.token_ids) {
        ids.extend(more);
    }
    choice.prompt_token_ids = piece.prompt_token_ids.or(choice.prompt_token_ids.take());
}

impl Dialect for Completions {
    type Event = ChoiceEvent<CompletionChoice>;
    type Whole = Completion;

    const TERMINATOR: Option<&'static str> = choices::TERMINATOR;

    fn name(_: &Self::Event) -> Option<&'static str> {
        None
    }

    fn begin(&mut self, index: usize, usage: Usage) -> Vec<Self::Event> {
        self.envelope.begin(index, usage);
        let prompt_token_ids = self.prompt_ids.get(index / self.choices_per_prompt).cloned();
        let echo = self.echo(index);
        if echo.is_none() && prompt_token_ids.is_none() {
            return Vec::new();
        }
        let text = echo.map(|echo| echo.text.clone()).unwrap_or_default();
        let logprobs = echo.filter(|_| self.logprobs).map(|echo| echo.lists.clone().finish());
        let piece = self.piece(index, text, Vec::new());
        self.emit(CompletionChoice { logprobs, prompt_token_ids, ..piece })
    }

    fn prompt_logprobs(&mut self, index: usize, entries: &[Option<TokenLogprob>]) {
        let logprobs = logprobs::prompt(&self.engine, entries);
        let first = index - index % self.choices_per_prompt;
        for choice in &mut self.choices[first..first + self.choices_per_prompt] {
            choice.prompt_logprobs = Some(Some(logprobs.clone()));
        }
    }

    fn part(&mut self, index: usize, piece: Piece<'_>) -> Vec<Self::Event> {
        self.envelope.count(index, piece.id);
        let offsets = &mut self.offsets[index];
        let logprobs = piece.logprob.map(|entry| {
            let mut lists = CompletionLists::new(self.logprob_form);
            lists.push(&self.engine, entry, offsets);
            lists.finish()
        });
        let text: String = piece.parts.into_iter().filter_map(AnswerPart::into_text).collect();
        let ids: Vec<u32> = piece.id.into_iter().collect();
        let has_ids = !self.prompt_ids.is_empty() && !ids.is_empty();
        if text.is_empty() && logprobs.is_none() && !has_ids {
            return Vec::new();
        }
        self.emit(CompletionChoice { logprobs, ..self.piece(index, text, ids) })
    }

    fn end(&mut self, index: usize, reason: &stolon::FinishReason) -> Vec<Self::Event> {
        let finish_reason = Some(FinishReason::from(reason));
        let stop_reason = CutReason::of(reason);
        let piece = self.piece(index, String::new(), Vec::new());
        self.emit(CompletionChoice { finish_reason, stop_reason, ..piece })
    }

    fn finish(&mut self, usage: Usage) -> Vec<Self::Event> {
        self.envelope.finish(usage)
    }

    fn fail(&mut self, error: &ApiError) -> Self::Event {
        Envelope::fail(error)
    }

    fn whole(self) -> Completion {
        self.envelope.whole(self.choices)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::wire::advice::Ignored;
    use crate::wire::body::parse as parse_body;

    fn parse(prompt: &Value) -> Result<Vec<Prompt>, ApiError> {
        let body = json!({ "prompt": prompt }).to_string();
        let request =
            parse_body::<CompletionRequest>(body.as_bytes(), usize::MAX, &Ignored::default())?;
        Ok(request.prompt.into_prompts())
    }

    /// Goal: the four forms of a prompt are recognized, and nothing else is accepted as a prompt.
    #[test]
    fn a_prompt_has_four_forms() {
        let text = |text: &str| Prompt::Text(text.to_owned());
        assert_eq!(parse(&json!("a")), Ok(vec![text("a")]));
        assert_eq!(parse(&json!(["a", "b"])), Ok(vec![text("a"), text("b")]));
        assert_eq!(parse(&json!([1, 2])), Ok(vec![Prompt::Tokens(vec![1, 2])]));
        let lists = vec![Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])];
        assert_eq!(parse(&json!([[1], [2, 3]])), Ok(lists));
        for bad in [json!(7), json!({}), json!(["a", 1]), json!([1.5]), json!([[1], "a"])] {
            let error = parse(&bad).expect_err("not a prompt").reply().error;
            assert_eq!(error.param.as_deref(), Some("prompt"));
        }
        // The handler refuses an empty list.
        assert_eq!(parse(&json!([])), Ok(Vec::new()));
    }
}
