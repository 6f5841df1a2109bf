//! Names the parts of messages that cannot be shown to a model, such as audio. serde's errors do
//! not name them: a list of parts is one of several forms of content, and serde reports only that
//! none of the forms fits.

use serde_json::Value;

use crate::api::neutral::Scope;
use crate::wire::error::{ApiError, cut};

/// The error for the first part of a message whose type the API does not have. `value` is at `path`
/// in the body.
pub(super) fn refusal(scope: Scope, path: &str, value: &Value) -> Option<ApiError> {
    let types: &[&str] = match scope {
        Scope::Responses => &["input_text", "input_image", "output_text", "reasoning_text"],
        Scope::Messages => {
            &["text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking"]
        }
        _ => &["text", "image_url"],
    };
    let is_content = ["content", "output", "system"].iter().any(|name| path.ends_with(name));
    if let Value::Object(members) = value {
        let inner = ["content", "output"].into_iter().filter_map(|name| {
            let value = members.get(name)?;
            refusal(scope, &format!("{path}.{name}"), value)
        });
        return inner.into_iter().next();
    }
    value.as_array()?.iter().enumerate().find_map(|(index, part)| {
        let path = format!("{path}[{index}]");
        match part["type"].as_str().filter(|kind| is_content && !types.contains(kind)) {
            Some(kind) => Some(unsupported(&path, kind, types)),
            None => refusal(scope, &path, part),
        }
    })
}

fn unsupported(path: &str, kind: &str, types: &[&str]) -> ApiError {
    let what = match kind {
        "audio" | "input_audio" | "audio_url" => "audio is not supported: ",
        "video" | "input_video" | "video_url" => "video is not supported: ",
        "file" | "input_file" | "document" => "files are not supported: ",
        _ => "",
    };
    let types = match types.split_last() {
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
        None => String::new(),
    };
    let got = cut(kind.to_owned(), 80);
    let message = format!("`{path}`: {what}expected parts of type {types}, got {got}");
    ApiError::invalid(Some(path), message).code("invalid_value")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::api::cache::CacheRequest;
    use crate::api::chat::ChatRequest;
    use crate::api::responses::ResponsesRequest;
    use crate::wire::advice::Ignored;
    use crate::wire::body::{RequestBody, parse};

    fn error<T: RequestBody>(body: &Value) -> (String, String) {
        let parsed = parse::<T>(body.to_string().as_bytes(), usize::MAX, &Ignored::default());
        let error = parsed.err().expect("a part that is not supported").reply().error;
        (error.param.expect("the path of the part"), error.message)
    }

    /// Goal: a part of a type that the API does not have is refused by its place, with its type and
    /// those that are expected; for audio, video and files it says that they are not supported. Only the
    /// last message of the user is refused for one.
    #[test]
    fn unsupported_parts_are_named() {
        let text = json!({"type": "text", "text": "x"});
        for (kind, what) in [
            ("input_audio", "audio is not supported: "),
            ("video_url", "video is not supported: "),
            ("file", "files are not supported: "),
            ("hologram", ""),
        ] {
            let part = json!({"type": kind, (kind): {"data": "AA", "format": "wav"}});
            let chat = json!({"messages": [{"role": "user", "content": [text, part]}]});
            let path = "messages[0].content[1]".to_owned();
            let of = |path: &str, types: &str| {
                format!("`{path}`: {what}expected parts of type {types}, got {kind}")
            };
            let expected = (path.clone(), of(&path, "text or image_url"));
            assert_eq!(error::<ChatRequest>(&chat), expected);
            assert_eq!(error::<CacheRequest>(&chat), expected);
            let types = "input_text, input_image, output_text or reasoning_text";
            let text = json!({"role": "user", "content": "x"});
            let message = json!({"role": "user", "content": [part]});
            let path = "input[1].content[0]".to_owned();
            let error_of_input = error::<ResponsesRequest>(&json!({ "input": [text, message] }));
            assert_eq!(error_of_input, (path.clone(), of(&path, types)));
        }
    }

    /// Goal: errors in parts of known types are still reported.
    #[test]
    fn other_errors_stay() {
        let body = json!({"messages": [{"role": "user", "content": [{"type": "text"}]}]});
        let (path, message) = error::<ChatRequest>(&body);
        assert_eq!(path, "messages[0].content");
        assert!(message.contains("expected a string or a list of parts"), "{message}");
    }
}
