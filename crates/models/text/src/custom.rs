//! [`CustomTokenizer`]: the interface of a tokenizer that a program brings itself.

use std::error::Error;

/// A tokenizer of the program, for a model whose files have none that can be read.
///
/// The vocabulary is read once, when the tokenizer is created. Decoding, stop strings and grammars
/// use this copy, so only [`encode`](Self::encode) is called for requests, from several threads. A
/// panic in it becomes an error of the request.
///
/// ```
/// # #[cfg(feature = "tokenizer")] {
/// use std::error::Error;
/// use std::sync::Arc;
///
/// use stolon_text::{CustomTokenizer, TextModel, TextSource, TokenizerSource};
///
/// /// One token per letter from `a` to `z`, and one that ends a turn.
/// struct Letters;
///
/// impl CustomTokenizer for Letters {
///     fn tokens(&self) -> Vec<Vec<u8>> {
///         (b'a'..=b'z').map(|letter| vec![letter]).chain([Vec::new()]).collect()
///     }
///
///     fn special_tokens(&self) -> Vec<(u32, String)> {
///         vec![(26, "<end>".into())]
///     }
///
///     fn encode(&self, text: &str) -> Result<Vec<u32>, Box<dyn Error + Send + Sync>> {
///         let id = |byte| match byte {
///             b'a'..=b'z' => Ok(u32::from(byte - b'a')),
///             other => Err(format!("expected a letter from `a` to `z`, got {other:#x}").into()),
///         };
///         text.bytes().map(id).collect()
///     }
/// }
///
/// let source = TextSource {
///     tokenizer: TokenizerSource::Custom(Arc::new(Letters)),
///     tokenizer_config: None,
///     chat_template: Some("{% for m in messages %}{{ m.content }}<end>{% endfor %}".into()),
///     named_templates: Vec::new(),
/// };
/// let model = TextModel::new(&source, &[26]).expect("the vocabulary is valid");
/// let tokenizer = model.tokenizer();
/// assert_eq!(tokenizer.encode("hi<end>", false), Ok(vec![7, 8, 26]));
/// assert_eq!(tokenizer.decode(&[7, 8, 26], true), "hi");
/// # }
/// ```
///
/// `EngineBuilder::text_model` of the crate `stolon` takes such a `TextModel`.
pub trait CustomTokenizer: Send + Sync {
    /// The bytes of each token's text, by id; empty for ids without a text. They may be a part of a
    /// character. There may be 4,194,304 tokens at most; those that the model does not have are
    /// never sampled.
    fn tokens(&self) -> Vec<Vec<u8>>;

    /// The ids and spellings of special tokens, which mark structure such as the end of a turn. A
    /// template or a prompt that contains a spelling gets the id instead; what a client writes in a
    /// conversation does not. Answers do not show special tokens. Default: none.
    fn special_tokens(&self) -> Vec<(u32, String)> {
        Vec::new()
    }

    /// The token that begins every text that is not a rendered conversation. Default: none.
    fn begin_token(&self) -> Option<u32> {
        None
    }

    /// The token ids of `text`, which contains no spelling of a special token.
    ///
    /// # Errors
    /// If the vocabulary cannot represent the text. The request that has the text is refused.
    fn encode(&self, text: &str) -> Result<Vec<u32>, Box<dyn Error + Send + Sync>>;
}
