//! Finds inputs that are token ids of another tokenizer.
//!
//! Clients of OpenAI's API, such as LangChain, send the ids of OpenAI's tokenizer unless they are
//! configured otherwise. Most of these ids are in the vocabularies of other models, too, with another
//! meaning, so that the vectors would be wrong without an error. The ids of the model's own
//! tokenizer have its special tokens around the text, without which a vector would be wrong as well.

use stolon::Error;

use crate::api::completions::Prompt;
use crate::handlers::app::App;
use crate::wire::error::ApiError;

/// A text that all tokenizers have tokens for.
const SAMPLE: &str = "a";

/// Refuses prompts of token ids without the special tokens that the model's tokenizer adds.
pub(super) async fn check(app: &App, prompts: &[Prompt], is_list: bool) -> Result<(), ApiError> {
    if !prompts.iter().any(|prompt| matches!(prompt, Prompt::Tokens(_))) {
        return Ok(());
    }
    let (plain, whole) =
        match (app.engine.tokenize(SAMPLE, false).await, app.engine.tokenize(SAMPLE, true).await) {
            (Ok(plain), Ok(whole)) => (plain, whole),
            (Err(Error::NoTokenizer), _) => return Ok(()),
            (Err(error), _) | (_, Err(error)) => return Err(error.into()),
        };
    let start = whole.windows(plain.len().max(1)).position(|window| window == plain);
    let Some(start) = start else { return Ok(()) };
    let (before, after) = (&whole[..start], &whole[start + plain.len()..]);
    for (index, prompt) in prompts.iter().enumerate() {
        let Prompt::Tokens(tokens) = prompt else { continue };
        // An empty input is refused later.
        if tokens.is_empty() || tokens.starts_with(before) && tokens.ends_with(after) {
            continue;
        }
        let name = if is_list { format!("input[{index}]") } else { "input".to_owned() };
        let ends = [("begin", before), ("end", after)].into_iter();
        let ends = ends.filter(|(_, special)| !special.is_empty());
        let ends: Vec<_> = ends.map(|(verb, special)| format!("{verb} with {special:?}")).collect();
        let message = format!(
            "`{name}`: expected a text, or token ids of the model's own tokenizer, which {}; got {} ids \
             that do not. Clients that send the ids of \
             OpenAI's tokenizer have a setting for texts, in LangChain \
             `OpenAIEmbeddings(check_embedding_ctx_length=False)`",
            ends.join(" and "),
            tokens.len()
        );
        return Err(ApiError::invalid(Some(&name), message).code("invalid_value"));
    }
    Ok(())
}
