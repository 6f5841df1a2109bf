//! What a prompt was made of, as digests, to tell where a later one differs.

use serde_json::Value;
use stolon_text::{Answer, ChatMessage, ChatOptions, MessageContent};

use super::{Digest, messages};
use crate::Request;

/// Everything that a prompt depends on.
#[derive(Debug)]
pub(crate) struct Outline {
    /// The tenant. Only prompts of the same tenant are compared.
    pub(super) tenant: Digest,
    pub(super) salt: Digest,
    pub(super) adapter: Digest,
    pub(super) tools: Digest,
    /// The variables and options of the chat template.
    pub(super) options: Digest,
    /// Whether it has images. Then the tokens are not those of the prompt, which has a position for each
    /// part of an image.
    pub(super) has_images: bool,
    /// Empty for a prompt that is not a conversation.
    pub(super) messages: Box<[Mark]>,
}

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    pub(super) role: Box<str>,
    /// The digest of the whole message.
    pub(super) digest: Digest,
    /// What a message of the assistant says, normalized, without the reasoning, as a digest.
    pub(super) said: Option<Digest>,
    /// The digest of its reasoning, without the spaces around it.
    pub(super) reasoning: Digest,
    /// Size in bytes of its text, without the reasoning.
    pub(super) bytes: usize,
}

impl Outline {
    /// The outline of the same request with these messages. `options` has the tools.
    pub(crate) fn with_chat(
        self,
        messages: &[ChatMessage],
        has_images: bool,
        options: &ChatOptions,
    ) -> Outline {
        let variables = Value::Object(options.variables.clone());
        let others = [variables, Value::Array(options.documents.clone())];
        let rules = (&options.template, options.tool_calls, options.special_tokens_in_messages);
        Outline {
            tools: digest(Value::Array(options.tools.clone()).to_string().as_bytes()),
            options: digest(format!("{others:?}{rules:?}").as_bytes()),
            has_images,
            messages: messages.iter().map(Mark::new).collect(),
            ..self
        }
    }

    /// The outline of a request whose prompt is not a conversation.
    pub(crate) fn of_tokens(request: &Request) -> Outline {
        let of = |part: Option<&str>| part.map_or([0; 32], |part| digest(part.as_bytes()));
        Outline {
            tenant: of(request.options.tenant.as_deref()),
            salt: of(request.cache_salt.as_deref()),
            adapter: of(request.adapter.as_deref()),
            tools: [0; 32],
            options: [0; 32],
            has_images: false,
            messages: Box::default(),
        }
    }

    /// The digest of the tenant, the salt and the adapter.
    pub(crate) fn scope(&self) -> Digest {
        digest(&[self.tenant, self.salt, self.adapter].concat())
    }

    /// Size in bytes.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.messages)
    }
}

impl Mark {
    fn new(message: &ChatMessage) -> Mark {
        let json = serde_json::to_vec(message);
        let json = json.expect("messages have string keys and cannot fail to serialize");
        let said = messages::said(message);
        let reasoning = said.as_ref().map_or("", |said| &said.reasoning);
        let reasoning = digest(reasoning.as_bytes());
        let said = said.map(|said| digest_of(&said));
        let bytes = match &message.content {
            None => 0,
            Some(MessageContent::Text(text)) => text.trim().len(),
            Some(MessageContent::Parts(parts)) => {
                parts.iter().filter_map(|part| part["text"].as_str()).map(str::len).sum()
            }
        };
        Mark { role: message.role.as_str().into(), digest: digest(&json), said, reasoning, bytes }
    }
}

/// The digest of what an answer says, without its reasoning.
pub(super) fn digest_of(said: &Answer) -> Digest {
    let mut hasher = blake3::Hasher::new();
    messages::digest_said(said, &mut hasher);
    *hasher.finalize().as_bytes()
}

/// The digest of bytes.
pub(super) fn digest(bytes: &[u8]) -> Digest {
    *blake3::hash(bytes).as_bytes()
}
