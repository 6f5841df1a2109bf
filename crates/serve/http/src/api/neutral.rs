//! Parameters of OpenAI's, Anthropic's and vLLM's APIs that this server does not implement: which
//! of their values request nothing, and which are only advice. Clients and proxies send these
//! values by default.

use serde_json::{Value, json};

/// The object that a parameter belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// The body of a completion request.
    Completions,
    /// The body of a chat request.
    Chat,
    /// A message of a conversation.
    Message,
    /// The body of a request to `/v1/responses`.
    Responses,
    /// The body of a request to `/v1/messages`.
    Messages,
    /// The body of a request to `/completion` or `/infill`.
    LlamaCpp,
    /// The body of a request of Ollama's API.
    Ollama,
    /// The `options` of a request of Ollama's API.
    OllamaOptions,
    /// The body of a request for embeddings.
    Embeddings,
    /// The `reasoning` of a request to `/v1/responses`.
    Reasoning,
    /// A function in a request to `/v1/responses`.
    ResponsesTool,
    /// A function in a request to `/v1/messages`.
    MessagesTool,
    /// The `stream_options`.
    StreamOptions,
    /// The `structured_outputs`.
    StructuredOutputs,
    /// The body of a request to tokenize.
    Tokenize,
    /// The body of a request to open a session, and the `session_params`, in SGLang's form.
    SglangSession,
    /// An object of this server's own API.
    None,
}

/// The effect that a parameter would have if it were implemented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meaning {
    /// None: the answer is the same as if the parameter were implemented.
    Nothing,
    /// Advice: an answer that does not follow it is not wrong.
    Advice,
    /// Something that would change the answer.
    Unsupported,
    /// The parameter has no meaning in any of the APIs.
    Unknown,
}

/// The effect that this value of a parameter would have.
pub(crate) fn meaning(scope: Scope, name: &str, value: &Value) -> Meaning {
    match requests_nothing(scope, name, value) {
        Some(true) => Meaning::Nothing,
        _ if is_advice(scope, name) => Meaning::Advice,
        Some(false) => Meaning::Unsupported,
        None => Meaning::Unknown,
    }
}

/// Whether a parameter is only advice, with every value.
fn is_advice(scope: Scope, name: &str) -> bool {
    match scope {
        Scope::Completions => is_advice_of_generation(name),
        Scope::Chat => {
            matches!(name, "verbosity" | "web_search_options") || is_advice_of_generation(name)
        }
        Scope::Responses => {
            // A prompt that is too long is refused in any case.
            matches!(name, "truncation" | "prompt_cache_options" | "service_tier")
        }
        Scope::Messages => matches!(name, "context_management" | "mcp_servers" | "speed"),
        // The order of samplers, and times after which an answer may be cut at the end of a line.
        Scope::LlamaCpp => matches!(
            name,
            "samplers" | "n_indent" | "t_max_prompt_ms" | "t_max_predict_ms" | "n_keep"
        ),
        Scope::Ollama => matches!(name, "options" | "truncate" | "shift"),
        // They choose how a model is loaded, or how its tokens are drawn by an older sampler.
        Scope::OllamaOptions => true,
        Scope::Reasoning => matches!(name, "summary" | "generate_summary"),
        // These say when a tool is offered, and who may call it.
        Scope::MessagesTool => {
            matches!(name, "defer_loading" | "allowed_callers" | "input_examples")
        }
        Scope::ResponsesTool => matches!(name, "defer_loading" | "output_schema"),
        _ => false,
    }
}

fn is_advice_of_generation(name: &str) -> bool {
    matches!(name, "store" | "prediction" | "prompt_cache_options" | "service_tier")
}

/// Whether this value of a parameter requests nothing; `None` if the parameter is unknown.
fn requests_nothing(scope: Scope, name: &str, value: &Value) -> Option<bool> {
    match scope {
        Scope::Completions => match name {
            "add_special_tokens" => Some(value == true),
            _ => of_generation(name, value),
        },
        Scope::Chat => of_chat(name, value).or_else(|| of_generation(name, value)),
        Scope::Message => match name {
            "annotations" => Some(is_empty(value)),
            // Replies contain this member, and clients send the message of an earlier reply back
            // unchanged.
            "refusal" => Some(true),
            _ => None,
        },
        Scope::Responses => of_responses(name, value),
        Scope::Ollama => match name {
            "keep_alive" | "verbose" | "insecure" | "stream" => Some(true),
            "template" | "context" => Some(is_empty(value)),
            "logprobs" | "shift" => Some(value == false),
            "top_logprobs" => Some(value == 0),
            _ => None,
        },
        Scope::LlamaCpp => match name {
            // Every prompt is cached, and a request has no place of its own.
            "id_slot" | "cache_prompt" => Some(true),
            "n_probs" => Some(value == 0),
            "return_tokens" | "return_progress" | "timings_per_token" => Some(value == false),
            "lora" => Some(is_empty(value)),
            // Samplers with the values that switch them off.
            "typical_p" | "tfs_z" => Some(value.as_f64() == Some(1.0)),
            "mirostat" | "dynatemp_range" | "xtc_probability" | "dry_multiplier" | "min_keep" => {
                Some(value.as_f64() == Some(0.0))
            }
            // Penalties are for all tokens.
            "repeat_last_n" => Some(value == -1),
            _ => None,
        },
        Scope::Messages => match name {
            "metadata" | "service_tier" => Some(true),
            "container" | "mcp_servers" | "context_management" => Some(is_empty(value)),
            _ => None,
        },
        Scope::Embeddings => match name {
            "user" | "metadata" | "safety_identifier" | "request_id" => Some(true),
            "add_special_tokens" => Some(value == true),
            "truncate" => Some(value == false),
            "embed_dtype" => Some(value == "float32"),
            "endianness" => Some(value == "little"),
            _ => None,
        },
        Scope::StreamOptions => match name {
            "include_obfuscation" => Some(value == false),
            _ => None,
        },
        Scope::StructuredOutputs => match name {
            "disable_fallback" | "disable_any_whitespace" => Some(value == false),
            "whitespace_pattern" | "structural_tag" => Some(is_empty(value)),
            _ => None,
        },
        Scope::Tokenize => match name {
            "tools" | "mm_processor_kwargs" => Some(is_empty(value)),
            _ => None,
        },
        Scope::SglangSession => match name {
            "streaming" | "replace" | "drop_previous_output" => Some(value == false),
            "offset" => Some(value == 0),
            _ => None,
        },
        Scope::Reasoning
        | Scope::ResponsesTool
        | Scope::MessagesTool
        | Scope::OllamaOptions
        | Scope::None => None,
    }
}

fn of_chat(name: &str, value: &Value) -> Option<bool> {
    Some(match name {
        "functions" | "documents" | "mm_processor_kwargs" => is_empty(value),
        "function_call" => value == "none" || value == "auto",
        "modalities" => *value == json!(["text"]),
        "verbosity" => value == "medium",
        "best_of" => value == 1,
        "echo" | "add_special_tokens" => value == false,
        // SGLang's: reasoning has a separate field, also while it is streamed.
        "separate_reasoning" | "stream_reasoning" => value == true,
        _ => return None,
    })
}

fn of_generation(name: &str, value: &Value) -> Option<bool> {
    Some(match name {
        // Labels of hosted services. They do not change the answer.
        "user"
        | "metadata"
        | "safety_identifier"
        | "request_id" => true,
        "store"
        | "use_beam_search"
        | "include_stop_str_in_output"
        // SGLang's.
        | "no_stop_trim"
        | "return_hidden_states" => value == false,
        "skip_special_tokens" | "spaces_between_special_tokens" | "detokenize" => value == true,
        "service_tier" => value == "auto" || value == "default",
        "length_penalty" => value.as_f64() == Some(1.0),
        "bad_words" | "logits_processors" | "vllm_xargs" => is_empty(value),
        _ => return None,
    })
}

fn of_responses(name: &str, value: &Value) -> Option<bool> {
    Some(match name {
        "user" | "safety_identifier" | "client_metadata" => true,
        "background" => value == false,
        "truncation" => value == "disabled",
        "service_tier" => value == "auto" || value == "default",
        // Other things that could be included do not exist here.
        "stream_options" => value.get("include_obfuscation").is_none_or(|value| value == false),
        _ => return None,
    })
}

/// Whether a value is an empty list, object or string.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Array(list) => list.is_empty(),
        Value::Object(object) => object.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the fields that the router of the vLLM project adds to each request have no effect,
    /// and the other values of these parameters are not ignored.
    #[test]
    fn routers_may_add_their_defaults() {
        let of_both = [
            ("no_stop_trim", false),
            ("return_hidden_states", false),
            ("skip_special_tokens", true),
        ];
        let of_chat = [("separate_reasoning", true), ("stream_reasoning", true)];
        let both = of_both.map(|case| (Scope::Completions, case)).into_iter();
        let chat = of_both.into_iter().chain(of_chat).map(|case| (Scope::Chat, case));
        for (scope, (name, value)) in both.chain(chat) {
            assert_eq!(meaning(scope, name, &json!(value)), Meaning::Nothing, "{name}");
            assert_eq!(meaning(scope, name, &json!(!value)), Meaning::Unsupported, "{name}");
        }
    }
}
