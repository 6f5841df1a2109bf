//! What clients say about the further use of their prompts, as marks for the engine: `cache_control`
//! of Anthropic's API, `prompt_cache_key` and `prompt_cache_retention` of OpenAI's, and `nvext` of
//! NVIDIA Dynamo's. They are advice: no value of them is an error.

use std::time::Duration;

use serde_json::Value;
use stolon::CacheMark;

use crate::api::options::GenerationOptions;
use crate::wire::advice::Ignored;

/// The time to live of a mark that gives none.
const DEFAULT_TTL: Duration = Duration::from_secs(5 * 60);
/// The longer time to live of Anthropic's API.
pub(crate) const HOUR: Duration = Duration::from_secs(3600);
/// The longer time to live of OpenAI's API.
const DAY: Duration = Duration::from_secs(24 * 3600);

/// The time to live that a `cache_control` requests; `None` if it requests nothing.
pub(crate) fn ttl(control: Option<&Value>) -> Option<Duration> {
    let control = control?;
    (control["type"] == "ephemeral").then(|| match control["ttl"] == "1h" {
        true => HOUR,
        false => DEFAULT_TTL,
    })
}

/// What the options of a call say about its prompt.
#[derive(Debug, Default)]
pub(crate) struct Hints {
    /// A mark of the whole prompt.
    pub(crate) mark: Option<CacheMark>,
    /// The priority, where larger ones come first.
    pub(crate) priority: Option<i32>,
}

impl Hints {
    /// Takes the hints from the options. Those without a meaning for one server are noted.
    pub(crate) fn take(options: &mut GenerationOptions, ignored: &Ignored) -> Self {
        let key = options.prompt_cache_key.take().filter(|key| !key.is_null());
        let retention = options.prompt_cache_retention.take().filter(|value| !value.is_null());
        let retained = retention.map(|value| if value == "24h" { DAY } else { DEFAULT_TTL });
        let mut ttl_max = retained.or(key.map(|_| DEFAULT_TTL));
        let mut priority = None;
        let nvext = options.nvext.take().unwrap_or_default();
        for (name, value) in nvext.as_object().into_iter().flatten() {
            match name.as_str() {
                "cache_control" => ttl_max = ttl_max.max(ttl(Some(value))),
                "agent_hints" => {
                    for (name, value) in value.as_object().into_iter().flatten() {
                        match (name.as_str(), value.as_f64()) {
                            // The conversion saturates.
                            ("priority", Some(number)) => priority = Some(number as i32),
                            _ => ignored.note(&format!("nvext.agent_hints.{name}")),
                        }
                    }
                }
                _ => ignored.note(&format!("nvext.{name}")),
            }
        }
        Self { mark: ttl_max.map(CacheMark::whole), priority }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Goal: each form of a hint has its time to live, and values of any other kind are no error.
    #[test]
    fn hints_of_all_apis_are_read() {
        for (options, seconds, priority) in [
            (json!({}), None, None),
            (json!({"prompt_cache_key": "a"}), Some(300), None),
            (json!({"prompt_cache_retention": "in_memory"}), Some(300), None),
            (json!({"prompt_cache_key": "a", "prompt_cache_retention": "24h"}), Some(86400), None),
            (json!({"prompt_cache_key": null, "prompt_cache_retention": null}), None, None),
            (json!({"nvext": {"agent_hints": {"priority": 7, "osl": 90}}}), None, Some(7)),
            (json!({"nvext": {"agent_hints": {"priority": -1e99}}}), None, Some(i32::MIN)),
            (
                json!({"nvext": {"cache_control": {"type": "ephemeral", "ttl": "1h"}}}),
                Some(3600),
                None,
            ),
            (json!({"nvext": {"agent_hints": [3], "cache_control": "x", "y": 1}}), None, None),
            (json!({"nvext": "x"}), None, None),
        ] {
            let text = options.to_string();
            let mut options: GenerationOptions = serde_json::from_value(options).expect("options");
            let hints = Hints::take(&mut options, &Ignored::default());
            let found = hints.mark.map(|mark| mark.ttl.as_secs());
            assert_eq!((found, hints.priority), (seconds, priority), "{text}");
        }
        for (control, seconds) in [
            (json!({"type": "ephemeral"}), Some(300)),
            (json!({"type": "ephemeral", "ttl": "5m"}), Some(300)),
            (json!({"type": "ephemeral", "ttl": "1h"}), Some(3600)),
            (json!({"type": "ephemeral", "ttl": 7}), Some(300)),
            (json!({"type": "none"}), None),
            (json!(null), None),
            (json!([1]), None),
        ] {
            assert_eq!(ttl(Some(&control)).map(|ttl| ttl.as_secs()), seconds, "{control}");
        }
    }
}
