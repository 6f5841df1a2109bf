//! Prompts of rerankers with a decoder: a query and a document in the template that the model was
//! trained with.
//!
//! ```text
//! before the query   query   between   document   after
//! ```
//!
//! The query comes first, so that the prompts of all documents for a query begin alike. The task that
//! the model is to judge by, its *instruction*, may be part of the text before the query.

use crate::spellings::Spellings;
use crate::{ChatMessage, ChatOptions, ChatTemplateError, TextModel, Tokenizer, TokenizerError};

/// The placeholder of the query in a template, as in llama.cpp.
const QUERY: &str = "{query}";
/// The placeholder of the document.
const DOCUMENT: &str = "{document}";

/// The placeholder of the instruction in a template, before the query.
const INSTRUCTION: &str = "{instruction}";
/// The instruction of Qwen3-Reranker's page, which is used if a request has none.
const TASK: &str = "Given a web search query, retrieve relevant passages that answer the query";

/// The token that begins a message of Qwen.
const MESSAGE: &str = "<|im_start|>";
/// The template of Qwen3-Reranker
/// (<https://huggingface.co/Qwen/Qwen3-Reranker-0.6B>).
const QWEN3: &str = "<|im_start|>system\nJudge whether the Document meets the requirements based on \
    the Query and the Instruct provided. Note that the answer can only be \"yes\" or \"no\".\
    <|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n\
    <Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";

/// Makes the prompts of pairs of texts.
#[derive(Clone, Debug)]
pub struct PairPrompts {
    tokenizer: Tokenizer,
    /// The text before the query, between the query and the document, and after the document.
    parts: [String; 3],
    /// The two parts of the first text around the instruction; `None` if the template has no place
    /// for one.
    instructed: Option<[String; 2]>,
    /// The spellings that a client's texts must not turn into control tokens.
    reserved: Option<Spellings>,
}

impl PairPrompts {
    /// The prompts of a model. `template` is a text with `{query}` and, after it, `{document}`, and
    /// maybe with `{instruction}` before both. Without it, the model's chat template is used if it has
    /// messages with the roles `query` and `document`, as in sentence-transformers and vLLM, and
    /// otherwise the template of Qwen3-Reranker, if the vocabulary has its tokens. A chat template has
    /// the instruction as a message with the role `system`, or as the variable `instruction`.
    ///
    /// # Errors
    /// [`ChatTemplateError::Malformed`] for a template without the query or the document, or with an
    /// instruction elsewhere. `None` if there is no template.
    pub fn new(
        model: &TextModel,
        template: Option<&str>,
    ) -> Result<Option<Self>, ChatTemplateError> {
        let tokenizer = model.tokenizer().clone();
        let Template { parts, instructed } = match template {
            Some(template) => divided(template).ok_or_else(|| ChatTemplateError::Malformed {
                name: "rerank".to_owned(),
                reason: format!(
                    "expected {QUERY} and, after it, {DOCUMENT}, once each, and at most one \
                         {INSTRUCTION} before them"
                ),
            })?,
            None => {
                let published = || tokenizer.token_id(MESSAGE).and_then(|_| divided(QWEN3));
                match of_roles(model).or_else(published) {
                    Some(template) => template,
                    None => return Ok(None),
                }
            }
        };
        let added = tokenizer.added_tokens().into_iter();
        let reserved = added.filter(|(spelling, is_special)| {
            *is_special || parts.iter().any(|part| part.contains(spelling))
        });
        let reserved = Spellings::new(reserved.map(|(spelling, _)| spelling));
        Ok(Some(Self { tokenizer, parts, instructed, reserved }))
    }

    /// Whether the template has a place for an instruction.
    #[must_use]
    pub fn takes_instruction(&self) -> bool {
        self.instructed.is_some()
    }

    /// The token ids of the prompt for a query and a document. Special tokens that are spelled out
    /// in them are ordinary text. An `instruction` replaces the template's own, if the template
    /// [has a place](Self::takes_instruction) for it. With `tokens_max`, tokens at the end of the document are left out
    /// until there are so many, and then tokens at the end of the query.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`], also if the template alone has more than `tokens_max` tokens.
    pub fn encode(
        &self,
        [query, document]: [&str; 2],
        instruction: Option<&str>,
        tokens_max: Option<usize>,
    ) -> Result<Vec<u32>, TokenizerError> {
        let [before, between, after] = &self.parts;
        let start = match (instruction, &self.instructed) {
            (Some(instruction), Some([before, rest])) => {
                let mut start = vec![before.clone()];
                self.append(instruction, &mut start);
                add(rest, &mut start);
                start
            }
            _ => vec![before.clone()],
        };
        let mut pieces = start.clone();
        self.append(query, &mut pieces);
        add(between, &mut pieces);
        self.append(document, &mut pieces);
        let mut whole = pieces.clone();
        add(after, &mut whole);
        let tokens = self.tokens(&whole)?;
        let Some(most) = tokens_max.filter(|most| tokens.len() > *most) else { return Ok(tokens) };
        let after = self.tokens(std::slice::from_ref(after))?;
        let least = self.tokens(&start)?.len() + after.len();
        if most < least {
            let reason = format!(
                "expected at least {least} tokens for the template of pairs of texts, got {most}"
            );
            return Err(TokenizerError::Encode(reason));
        }
        let mut tokens = self.tokens(&pieces)?;
        tokens.truncate(most - after.len());
        tokens.extend(after);
        Ok(tokens)
    }

    /// Appends a client's text. A new piece begins within each spelling that is reserved.
    fn append(&self, text: &str, pieces: &mut Vec<String>) {
        let own = match &self.reserved {
            Some(reserved) => reserved.cut(text),
            None => vec![text],
        };
        let mut own = own.into_iter();
        if let Some(first) = own.next() {
            add(first, pieces);
        }
        pieces.extend(own.map(str::to_owned));
    }

    /// The tokens of pieces that are encoded one by one.
    fn tokens(&self, pieces: &[String]) -> Result<Vec<u32>, TokenizerError> {
        let mut tokens = Vec::new();
        for piece in pieces {
            tokens.extend(self.tokenizer.encode(piece, false)?);
        }
        Ok(tokens)
    }
}

/// Adds `text` to the last piece.
fn add(text: &str, pieces: &mut [String]) {
    if let Some(last) = pieces.last_mut() {
        last.push_str(text);
    }
}

/// The texts of a template around the query and the document, and around the instruction.
struct Template {
    parts: [String; 3],
    instructed: Option<[String; 2]>,
}

/// The parts of a template with placeholders. `None` if they are not in their places.
fn divided(template: &str) -> Option<Template> {
    let [before, between, after] = parts(template)?;
    let instructed = around_instruction(&before);
    let before = before.replacen(INSTRUCTION, TASK, 1);
    let parts = [before, between, after];
    let again = parts.iter().any(|part| part.contains(INSTRUCTION));
    (!again).then_some(Template { parts, instructed })
}

/// The parts of the chat template, if it has messages for queries and documents.
fn of_roles(model: &TextModel) -> Option<Template> {
    let render = |messages: &[(&str, &str)], options: &ChatOptions| {
        let messages: Vec<_> =
            messages.iter().map(|(role, text)| ChatMessage::new(*role, *text)).collect();
        parts(&model.render_chat(&messages, options).ok()?)
    };
    let [query, document] = [("query", QUERY), ("document", DOCUMENT)];
    let parts = render(&[query, document], &ChatOptions::default())?;
    let mut options = ChatOptions::default();
    options.variables.insert("instruction".to_owned(), INSTRUCTION.into());
    let with = render(&[("system", INSTRUCTION), query, document], &options);
    let with = with.filter(|with| with[1..] == parts[1..]);
    let instructed = with.and_then(|[before, ..]| around_instruction(&before));
    Some(Template { parts, instructed })
}

/// The texts before and after the only instruction.
fn around_instruction(before: &str) -> Option<[String; 2]> {
    let (before, rest) = before.split_once(INSTRUCTION)?;
    (!rest.contains(INSTRUCTION)).then(|| [before, rest].map(str::to_owned))
}

/// The texts of a template around the query and the document, each of which it has once.
fn parts(template: &str) -> Option<[String; 3]> {
    let (before, rest) = template.split_once(QUERY)?;
    let (between, after) = rest.split_once(DOCUMENT)?;
    let parts = [before, between, after];
    let again = |part: &&str| part.contains(QUERY) || part.contains(DOCUMENT);
    (!parts.iter().any(again)).then(|| parts.map(str::to_owned))
}
