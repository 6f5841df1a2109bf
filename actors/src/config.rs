//! Settings of the core: sizes and limits, checked once when it starts.

use std::fmt;
use std::str::FromStr;

/// Which waiting request runs next. Under each, a request that later ones have overtaken by
/// more than [`CoreConfig::max_overtake_tokens`] goes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum AdmissionPolicy {
    /// In order of arrival.
    Fcfs,
    /// The longest cached prefix first.
    LongestPrefix,
    /// The fewest uncached prompt tokens first.
    #[default]
    Cost,
    /// The largest priority first, in order of arrival among equals.
    Priority,
}

impl fmt::Display for AdmissionPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AdmissionPolicy::Fcfs => "fcfs",
            AdmissionPolicy::LongestPrefix => "longest-prefix",
            AdmissionPolicy::Cost => "cost",
            AdmissionPolicy::Priority => "priority",
        })
    }
}

/// A name that is no policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("admission policy: expected fcfs, longest-prefix, cost or priority, got `{got}`")]
pub struct UnknownPolicy {
    /// The name.
    pub got: String,
}

impl FromStr for AdmissionPolicy {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<AdmissionPolicy, UnknownPolicy> {
        match text {
            "fcfs" => Ok(AdmissionPolicy::Fcfs),
            "longest-prefix" => Ok(AdmissionPolicy::LongestPrefix),
            "cost" => Ok(AdmissionPolicy::Cost),
            "priority" => Ok(AdmissionPolicy::Priority),
            other => Err(UnknownPolicy { got: other.to_owned() }),
        }
    }
}
