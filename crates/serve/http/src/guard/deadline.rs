//! The time within which a client wants its answer, from the header `x-request-timeout`.
//!
//! OpenAI's and Anthropic's clients send their own timeouts in headers, too (`x-stainless-timeout`,
//! `x-stainless-read-timeout`). Those limit the wait for the next piece of a reply, not for all of
//! it, and a client whose timeout has passed disconnects. So they are not read here.

use std::time::{Duration, Instant};

use axum::http::{HeaderMap, HeaderName};

use crate::wire::error::ApiError;

/// The header: seconds, with or without a fraction.
pub(crate) const HEADER: HeaderName = HeaderName::from_static("x-request-timeout");

/// Times above this, a year, count as no limit.
const LONGEST_SECONDS: f64 = 31_536_000.0;

/// The time by which an answer has to be complete; `None` for no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    /// The deadline of a request that has just arrived.
    pub(crate) fn of(headers: &HeaderMap) -> Result<Self, ApiError> {
        let Some(value) = headers.get(HEADER) else { return Ok(Self(None)) };
        let seconds = value.to_str().ok().and_then(|text| text.trim().parse::<f64>().ok());
        match seconds {
            Some(seconds) if seconds > LONGEST_SECONDS => Ok(Self(None)),
            Some(seconds) if seconds > 0.0 => Ok(Self::in_time(Duration::from_secs_f64(seconds))),
            _ => {
                let got = String::from_utf8_lossy(value.as_bytes());
                let message = format!("the header {HEADER}: expected seconds above 0, got `{got}`");
                Err(ApiError::invalid(None, message))
            }
        }
    }

    /// A deadline that is this long from now.
    fn in_time(time: Duration) -> Self {
        Self(Instant::now().checked_add(time))
    }

    /// The earlier of this deadline and the end of `limit`, which begins now.
    pub(crate) fn within(self, limit: Option<Duration>) -> Self {
        let limit = limit.map_or(Self(None), Self::in_time);
        Self(self.0.into_iter().chain(limit.0).min())
    }

    /// The remaining time; `None` for no limit.
    pub(crate) fn left(self) -> Option<Duration> {
        self.0.map(|at| at.saturating_duration_since(Instant::now()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: seconds above 0 are a deadline, anything else is refused with what was received.
    #[test]
    fn the_header_has_seconds() {
        let of = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(HEADER, value.parse().expect("a value"));
            Deadline::of(&headers)
        };
        for (value, most) in [("30", 30.0), (" 0.5 ", 0.5), ("1e-9", 0.1), ("1e3", 1000.0)] {
            let left = of(value).expect(value).left().expect(value);
            assert!(left <= Duration::from_secs_f64(most), "{value}: {left:?}");
        }
        assert_eq!(of("1e300"), Ok(Deadline(None)));
        assert_eq!(of("inf"), Ok(Deadline(None)));
        for bad in ["0", "-1", "NaN", "soon", "10s", "", "-inf"] {
            let error = of(bad).expect_err(bad);
            assert!(error.message().contains(&format!("`{bad}`")), "{error:?}");
        }
    }

    /// Goal: the earlier of two limits holds.
    #[test]
    fn the_earlier_limit_holds() {
        let long = Deadline::in_time(Duration::from_secs(1000));
        let left = |deadline: Deadline| deadline.left().map(|left| left.as_secs() < 100);
        assert_eq!(left(long.within(Some(Duration::from_secs(10)))), Some(true));
        assert_eq!(left(long.within(None)), Some(false));
        assert_eq!(left(Deadline::default().within(Some(Duration::from_secs(10)))), Some(true));
        assert_eq!(left(Deadline::default().within(None)), None);
        assert_eq!(left(long.within(Some(Duration::MAX))), Some(false));
    }
}
