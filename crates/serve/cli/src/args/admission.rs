//! The value of `--admission`, which is also vLLM's `--scheduling-policy`.

use std::fmt;
use std::str::FromStr;

use stolon::AdmissionPolicy;

/// In which order queued requests are admitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Admission {
    /// The policy for requests of equal priority.
    pub policy: AdmissionPolicy,
    /// Whether requests with a smaller `priority` come first, as in vLLM.
    pub smaller_first: bool,
}

/// vLLM's name of a policy, with its meaning: the smallest `priority` first, then in order of
/// arrival.
const PRIORITY: &str = "priority";

impl fmt::Display for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.smaller_first {
            true => f.write_str(PRIORITY),
            false => self.policy.fmt(f),
        }
    }
}

impl FromStr for Admission {
    type Err = String;

    fn from_str(text: &str) -> Result<Admission, String> {
        if text == PRIORITY {
            return Ok(Admission { policy: AdmissionPolicy::Fcfs, smaller_first: true });
        }
        let policy = text.parse().map_err(|error| {
            format!(
                "{error}; or expected {PRIORITY}, with which smaller ones come first, as in vLLM"
            )
        })?;
        Ok(Admission { policy, smaller_first: false })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: each value is read as it is written, and `priority` has vLLM's meaning.
    #[test]
    fn values_are_read_as_they_are_written() {
        for text in ["fcfs", "longest-prefix", "cost", "priority"] {
            let admission: Admission = text.parse().expect(text);
            assert_eq!(admission.to_string(), text);
            assert_eq!(admission.smaller_first, text == "priority");
        }
        let refused = "dice".parse::<Admission>().expect_err("no policy");
        assert!(refused.contains("dice") && refused.contains("priority"), "{refused}");
    }
}
