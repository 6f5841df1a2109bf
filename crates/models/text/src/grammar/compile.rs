//! [`GrammarCompiler`]: from a [`Grammar`] to the parser of `llguidance`, for one vocabulary.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use llguidance::api::{GrammarWithLexer, ParserLimits, TopLevelGrammar};
use llguidance::earley::{Parser, SlicedBiasComputer};
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

use super::cache::Cache;
use super::mask::TokenMask;
use super::messages::{FAILED, message};
use super::state::{Spent, Start};
use super::workers::Workers;
use super::{
    FunctionSchema, Grammar, GrammarError, GrammarFailure, GrammarState, Otherwise,
    ToolCallGrammar, calls, gbnf, schema,
};
use crate::answer::Headers;
use crate::bounded::{Bounded, Client, MAX_WAIT, Stopped, on_stop};
use crate::processor_time::OwnTime;
use crate::{Busy, ReasoningFormat, Tokenizer};

/// A compiled grammar and its size in bytes.
type Compilation = Result<(Compiled, usize), GrammarFailure>;

/// Processor time that compiling a grammar may take. The limits below end most of them long before.
const MAX_WORK: Duration = Duration::from_secs(3);
/// Processor time from the beginning of a compilation after which no further schema is compiled to
/// find the one that is wrong, so that the error is there before the limit.
const SEARCH: Duration = Duration::from_secs(1);
const TOO_MUCH_WORK: &str = "the grammar is too large: expected one that is compiled within 3 s of \
                             processor time";
/// Whitespace in one place of a JSON value, as most texts have it. If more is allowed, some models
/// write it until their answer is cut off.
const WHITESPACE: &str = "( |\\n {0,16})";
/// Maximum number of compiled grammars in the cache of one model, and their maximum total size in
/// bytes.
const CACHED: (usize, usize) = (64, 32 << 20);

/// The limits of a grammar and of a mask. There are about four items for each optional property of
/// an object; 5,000 of them take about as long as a compilation may. A regular expression at the
/// limits takes up to half a second for a mask, most other grammars a few milliseconds, and an
/// ambiguous one up to seconds. The lexer takes up to 100 MB.
fn limits() -> ParserLimits {
    ParserLimits {
        initial_lexer_fuel: 500_000,
        step_lexer_fuel: 50_000,
        max_lexer_states: 50_000,
        max_grammar_size: 200_000,
        max_items_in_row: 24_000,
        step_max_items: 200_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// Compiles grammars for the vocabulary of one model. Cheap to clone; clones share the vocabulary's
/// trie, which [`GrammarCompiler::prepare`] makes and which takes about 100 bytes per token, and a
/// cache of 64 recent grammars of 32 MiB together.
#[derive(Clone)]
pub struct GrammarCompiler {
    tokenizer: Tokenizer,
    eos_token_ids: Arc<[u32]>,
    /// `None` until it is needed. It is locked while it is made, so that others wait for it.
    vocabulary: Arc<Mutex<Option<Arc<Vocabulary>>>>,
    cache: Arc<Cache<Compiled>>,
    bounded: Bounded,
}

/// A grammar as it is cached. Requests work on copies of its parser. The parser itself never
/// changes, so its size stays the same, and requests do not affect each other.
struct Compiled {
    matcher: Mutex<Matcher>,
    /// The mask of the first token.
    mask: Arc<TokenMask>,
    workers: Workers,
}

/// The data that all grammars of a model share.
struct Vocabulary {
    factory: ParserFactory,
    workers: Workers,
}

/// A grammar for the vocabulary of one model.
pub struct CompiledGrammar {
    start: Arc<Start>,
    workers: Workers,
}

impl GrammarCompiler {
    /// A compiler for a tokenizer, and for answers that end with one of `eos_token_ids`.
    #[must_use]
    pub fn new(tokenizer: Tokenizer, eos_token_ids: &[u32]) -> Self {
        let known = eos_token_ids.iter().copied();
        let eos_token_ids =
            known.filter(|&token| (token as usize) < tokenizer.vocab_size()).collect();
        let (vocabulary, bounded) = (Arc::default(), Bounded::default());
        let cache = Arc::new(Cache::new(CACHED.0, CACHED.1));
        Self { tokenizer, eos_token_ids, vocabulary, cache, bounded }
    }

    /// Makes the vocabulary's trie, and starts the threads that compute masks, unless that has been
    /// done. It takes up to two seconds for the largest vocabularies. The first grammar waits for it
    /// otherwise.
    ///
    /// # Errors
    /// [`GrammarFailure`] if the vocabulary cannot be used, or if no thread can be started.
    pub fn prepare(&self) -> Result<(), GrammarFailure> {
        self.vocabulary().map(drop)
    }

    /// As [`GrammarCompiler::compile_for`], for no named client.
    ///
    /// # Errors
    /// The errors of [`GrammarCompiler::compile_for`].
    pub fn compile(&self, grammar: &Grammar) -> Result<CompiledGrammar, GrammarFailure> {
        self.compile_for(grammar, None)
    }

    /// Compiles a grammar of a client, or copies it if it was compiled recently. JSON schemas take
    /// from one to some tens of milliseconds, and copies about a tenth of one. While the
    /// compilation of a client's grammar is overdue, its other new grammars are refused.
    ///
    /// # Errors
    /// [`GrammarFailure`] if the grammar is invalid, not supported, or too large, or if the machine
    /// is too busy.
    pub fn compile_for(
        &self,
        grammar: &Grammar,
        client: Option<Arc<str>>,
    ) -> Result<CompiledGrammar, GrammarFailure> {
        grammar.check()?;
        self.prepare()?;
        // Unlike equality of JSON, this text has the order of a schema's properties.
        let text = format!("{grammar:?}");
        let compiled = self.cache.get(text, || self.compile_anew(grammar, &client))?;
        Ok(compiled.copy())
    }

    /// Compiles a grammar. If schemas of best-effort functions cannot be compiled, these are left
    /// out: only the schemas at fault if they are found in time, and otherwise all schemas of such
    /// functions.
    fn compile_anew(&self, grammar: &Grammar, client: &Client) -> Compilation {
        let error = match self.compile_whole(grammar, client) {
            Err(GrammarFailure::Invalid(error)) => error,
            compiled => return compiled,
        };
        let mut free = match grammar.calls() {
            Some(calls) if error.reason != TOO_MUCH_WORK => {
                self.functions_at_fault(calls, client)?
            }
            _ => Vec::new(),
        };
        if !free.is_empty()
            && let Ok(compiled) = self.compile_whole(&grammar.with_free_arguments(&free), client)
        {
            return Ok(compiled);
        }
        free = grammar.calls().map(|calls| calls.best_effort.clone()).unwrap_or_default();
        match free.is_empty() {
            true => Err(error.into()),
            false => self.compile_whole(&grammar.with_free_arguments(&free), client),
        }
    }

    /// Compiles a grammar on a separate thread.
    fn compile_whole(&self, grammar: &Grammar, client: &Client) -> Compilation {
        let grammar = grammar.clone();
        self.run(client, move |this| {
            let clock = OwnTime::start();
            let compiled = this.compile_here(&grammar);
            compiled.map_err(|error| this.located(&grammar, error, clock))
        })?
        .map_err(GrammarFailure::from)
    }

    /// The names of the best-effort functions whose schemas cannot be compiled, as far as they are
    /// found in time.
    fn functions_at_fault(
        &self,
        calls: &ToolCallGrammar,
        client: &Client,
    ) -> Result<Vec<String>, GrammarFailure> {
        let of_best_effort =
            |function: &&FunctionSchema| calls.best_effort.contains(&function.name);
        let functions: Vec<_> = calls.functions.iter().filter(of_best_effort).cloned().collect();
        self.run(client, move |this| {
            let clock = OwnTime::start();
            let mut functions = functions;
            functions.retain(|function| {
                clock.spent() <= SEARCH && this.compile_here(&function.arguments()).is_err()
            });
            functions.into_iter().map(|function| function.name).collect()
        })
    }

    /// Runs a job of a client that compiles, within the limits of work.
    fn run<T: Send + 'static>(
        &self,
        client: &Client,
        job: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> Result<T, GrammarFailure> {
        let this = self.clone();
        self.bounded.run(client, MAX_WORK, MAX_WAIT, move || job(&this)).map_err(|stopped| {
            match stopped {
                Stopped::Busy(busy) => busy.into(),
                Stopped::TooMuchWork(_) => GrammarError::new(TOO_MUCH_WORK).into(),
                Stopped::Panicked(_) => GrammarError::new(FAILED).into(),
            }
        })
    }

    /// Compiles a grammar, and returns its size in bytes, too.
    fn compile_here(&self, grammar: &Grammar) -> Result<(Compiled, usize), GrammarError> {
        let failed = |error: GrammarFailure| GrammarError::new(error.to_string());
        let vocabulary = self.vocabulary().map_err(failed)?;
        let mut parts = Parts { tokenizer: &self.tokenizer, grammars: Vec::new() };
        parts.add("main".to_owned(), grammar)?;
        let whole = TopLevelGrammar { grammars: parts.grammars, max_tokens: None };
        let parser = vocabulary.factory.create_parser(whole);
        let bytes = parser.as_ref().map_or(0, |parser| parser_bytes(&parser.parser));
        let matcher = Matcher::new(parser);
        let mut first = matcher.deep_clone().into_cancellable();
        if let Some(handle) = first.cancellation_handle() {
            on_stop(move || handle.cancel());
        }
        let mask = Arc::new(next_mask(&mut first)?);
        let bytes = bytes + self.tokenizer.vocab_size() / 8;
        let workers = vocabulary.workers.clone();
        Ok((Compiled { matcher: Mutex::new(matcher), mask, workers }, bytes))
    }

    /// The error of a grammar whose compilation `clock` measures, with the path of the wrong part
    /// of a JSON schema, as far as it is found in time.
    fn located(&self, grammar: &Grammar, error: GrammarError, clock: OwnTime) -> GrammarError {
        let in_time = |schema: &Value| {
            if clock.spent() > SEARCH {
                return None;
            }
            self.compile_here(&Grammar::JsonSchema(schema.clone())).err()
        };
        match grammar {
            Grammar::JsonSchema(schema) if error.path.is_empty() => {
                schema::locate(schema, error, in_time)
            }
            Grammar::AfterReasoning { then, .. } => self.located(then, error, clock),
            Grammar::ToolCalls(calls) => {
                let of_function = calls.followed().find_map(|function| {
                    let Grammar::JsonSchema(arguments) = function.arguments() else { return None };
                    let error = schema::locate(&arguments, in_time(&arguments)?, in_time);
                    Some(GrammarError { function: Some(function.name.clone()), ..error })
                });
                of_function.unwrap_or(error)
            }
            _ => error,
        }
    }

    /// The vocabulary, which the first caller makes.
    fn vocabulary(&self) -> Result<Arc<Vocabulary>, GrammarFailure> {
        let mut vocabulary = self.vocabulary.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(vocabulary) = &*vocabulary {
            return Ok(Arc::clone(vocabulary));
        }
        let factory = factory(&self.tokenizer, &self.eos_token_ids)?;
        let workers = Workers::start().map_err(|error| Busy::new(format!("no thread: {error}")))?;
        Ok(Arc::clone(vocabulary.insert(Arc::new(Vocabulary { factory, workers }))))
    }
}

impl Compiled {
    fn copy(&self) -> CompiledGrammar {
        let matcher = self.matcher.lock().unwrap_or_else(PoisonError::into_inner).deep_clone();
        let start = Start { matcher: Mutex::new(matcher), mask: Arc::clone(&self.mask) };
        CompiledGrammar { start: Arc::new(start), workers: self.workers.clone() }
    }
}

/// The approximate size of a parser before its first token, in bytes.
fn parser_bytes(parser: &Parser) -> usize {
    let grammar = parser.grammar();
    let (mut seen, mut left) = (HashSet::from([grammar.start()]), vec![grammar.start()]);
    let mut bytes = parser.lexer_stats().num_bytes;
    while let Some(symbol) = left.pop() {
        let data = grammar.sym_data(symbol);
        bytes += size_of_val(data) + data.name.len() + size_of_val(&data.rules_cond[..]);
        for &rule in &data.rules {
            let (symbols, parameters, _) = grammar.rule_rhs(rule);
            // Each symbol of a rule has four tables.
            bytes += 2 * (size_of_val(symbols) + size_of_val(parameters));
            left.extend(symbols.iter().copied().filter(|&symbol| seen.insert(symbol)));
        }
    }
    bytes
}

impl CompiledGrammar {
    /// The state of a sequence that follows the grammar from its first token on.
    #[must_use]
    pub fn state(&self) -> GrammarState {
        self.state_for(None)
    }

    /// As [`CompiledGrammar::state`], for a request of this client. Clients share the threads that
    /// compute masks; requests without a name are of one client.
    #[must_use]
    pub fn state_for(&self, client: Option<Arc<str>>) -> GrammarState {
        GrammarState::new(Arc::clone(&self.start), Spent::of(client), self.workers.clone())
    }
}

impl fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarCompiler").finish_non_exhaustive()
    }
}

impl fmt::Debug for CompiledGrammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompiledGrammar").finish_non_exhaustive()
    }
}

/// The trie of a vocabulary, as `llguidance` needs it.
fn factory(tokenizer: &Tokenizer, eos_token_ids: &[u32]) -> Result<ParserFactory, GrammarError> {
    let size = u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
    let words: Vec<Vec<u8>> = (0..size)
        .map(|token| {
            let bytes = tokenizer.token_bytes(token).unwrap_or_default();
            if !tokenizer.is_special(token) {
                return bytes;
            }
            // Marked, so that no text is a special token.
            [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes.as_slice()].concat()
        })
        .collect();
    let none = llguidance::toktrie::INVALID_TOKEN;
    let eos = eos_token_ids.first().copied().unwrap_or(none);
    let mut trie = TokTrie::from(&TokRxInfo::new(size, eos), &words);
    if !eos_token_ids.is_empty() {
        trie = trie.with_eos_tokens(eos_token_ids);
    }
    let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let slices = SlicedBiasComputer::general_slices();
    let factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices);
    let mut factory = factory.map_err(|error| GrammarError::new(message(&error.to_string())))?;
    factory.quiet();
    *factory.limits_mut() = limits();
    Ok(factory)
}

/// The tokens that may come next.
pub(super) fn next_mask(matcher: &mut Matcher) -> Result<TokenMask, GrammarError> {
    let failed = |error: &dyn fmt::Display| GrammarError::new(message(&error.to_string()));
    if let Some(error) = matcher.get_error() {
        return Err(failed(&error));
    }
    let may_end = matcher.is_stopped() || matcher.is_accepting().map_err(|error| failed(&error))?;
    let allowed = matcher.compute_mask_or_eos().map_err(|error| failed(&error))?;
    Ok(TokenMask::new(allowed, may_end))
}

/// The grammars that a grammar consists of, by name. An answer follows the first one, which refers
/// to the others.
struct Parts<'a> {
    tokenizer: &'a Tokenizer,
    grammars: Vec<GrammarWithLexer>,
}

impl Parts<'_> {
    /// Adds a grammar, and then those that it refers to.
    fn add(&mut self, name: String, grammar: &Grammar) -> Result<(), GrammarError> {
        match grammar {
            Grammar::JsonObject => self.add_json(name, json!({"type": "object"})),
            Grammar::JsonSchema(schema) => self.add_json(name, schema::supported(schema)?),
            Grammar::Regex(regex) => {
                let regex = regex.strip_prefix('^').unwrap_or(regex);
                let unescaped = regex.strip_suffix('$').filter(|rest| {
                    let backslashes = rest.bytes().rev().take_while(|&byte| byte == b'\\').count();
                    backslashes % 2 == 0
                });
                let grammar = GrammarWithLexer::from_regex(unescaped.unwrap_or(regex));
                self.grammars.push(GrammarWithLexer { name: Some(name), ..grammar });
            }
            Grammar::Lark(lark) => self.add_lark(name, lark.clone()),
            Grammar::Gbnf(text) => self.add_lark(name, gbnf::to_lark(text)?),
            Grammar::Choice(texts) => {
                let texts: Vec<_> = texts.iter().map(|text| calls::literal(text)).collect();
                // One terminal is much faster than a rule with thousands of alternatives.
                self.add_lark(name, format!("start: CHOICE\nCHOICE: {}", texts.join(" | ")));
            }
            Grammar::ToolCalls(calls) => self.add_calls(&name, calls)?,
            Grammar::AfterReasoning { reasoning, is_open, then } => {
                let then_name = format!("{name}_then");
                let lark = match reasoning.headers() {
                    Some(headers) => self.after_message(headers, *is_open, then, &then_name),
                    None => self.after_tags(*reasoning, *is_open, &then_name),
                };
                self.add_lark(name, lark);
                self.add(then_name, then)?;
            }
        }
        Ok(())
    }

    /// The grammar `then` after reasoning between tags.
    fn after_tags(&self, reasoning: ReasoningFormat, is_open: bool, then: &str) -> String {
        let (open, close) = reasoning.tags();
        let reasoned = calls::text_until(self.tokenizer, "reasoned", close);
        // The text after a special token cannot contain one.
        let special = |token: &&&str| open.starts_with(**token);
        let split = reasoning.special_tokens().iter().find(special).map_or(0, |token| token.len());
        let (special, text) = open.split_at(split);
        let open = [calls::marker(self.tokenizer, special), calls::literal(text)].join(" ");
        let first = match is_open {
            true => "reasoned SPACE?".to_owned(),
            false => format!("({open} reasoned SPACE?)?"),
        };
        format!("start: {first} @{then}\n{reasoned}SPACE: / |\\n{{1,4}}/\n")
    }

    /// The grammar `then`, whose name is `name`, after a message that is reasoning. Calls have other
    /// headers.
    fn after_message(
        &self,
        headers: &Headers,
        is_open: bool,
        then: &Grammar,
        name: &str,
    ) -> String {
        let reasoning = calls::header(self.tokenizer, headers.reasoning);
        let reasoned = calls::text_until(self.tokenizer, "reasoned", headers.closes[0]);
        let next = calls::marker(self.tokenizer, "<|start|>");
        let header = match then {
            Grammar::ToolCalls(_) => String::new(),
            _ => calls::header(self.tokenizer, headers.text),
        };
        let first = match is_open {
            true => format!("reasoned {next} \"assistant\""),
            false => format!("({reasoning} reasoned {next} \"assistant\")?"),
        };
        format!("start: {first} {header} @{name}\n{reasoned}")
    }

    fn add_lark(&mut self, name: String, lark: String) {
        let grammar = GrammarWithLexer::from_lark(lark);
        self.grammars.push(GrammarWithLexer { name: Some(name), ..grammar });
    }

    /// Adds a schema that [`schema::supported`] has returned.
    fn add_json(&mut self, name: String, schema: Value) {
        let mut schema = if schema == true { json!({}) } else { schema };
        if let Some(members) = schema.as_object_mut() {
            members.insert("x-guidance".to_owned(), json!({"whitespace_pattern": WHITESPACE}));
        }
        let grammar = GrammarWithLexer::from_json_schema(schema);
        self.grammars.push(GrammarWithLexer { name: Some(name), ..grammar });
    }

    fn add_calls(&mut self, name: &str, calls: &ToolCallGrammar) -> Result<(), GrammarError> {
        let (arguments, content) = (format!("{name}_arguments"), format!("{name}_content"));
        self.add_lark(name.to_owned(), calls::lark(calls, self.tokenizer, &arguments, &content));
        for (index, function) in calls.functions.iter().enumerate() {
            self.add(format!("{arguments}{index}"), &function.arguments())?;
        }
        match &calls.otherwise {
            Otherwise::Grammar(grammar) => self.add(content, grammar),
            Otherwise::Nothing | Otherwise::Text => Ok(()),
        }
    }
}
