//! Ollama's `keep_alive`: how long a model stays loaded after a request.

use std::time::Duration;

use crate::wire::asked::Scalar;

/// The idle time that a request asks for: seconds, or a duration such as `5m` or `1h30m`. Below 0 is
/// no limit. `None` if the request asks for none.
pub(super) fn keep_alive(value: &Scalar) -> Option<Option<Duration>> {
    let seconds = match value {
        Scalar::Number(seconds) => *seconds,
        Scalar::Text(text) => seconds(text)?,
        Scalar::Switch(_) | Scalar::Other => return None,
    };
    match seconds {
        seconds if seconds < 0.0 => Some(None),
        seconds => Duration::try_from_secs_f64(seconds).ok().map(Some),
    }
}

/// The seconds of a duration in Go's form, or of a plain number.
fn seconds(text: &str) -> Option<f64> {
    let text = text.trim();
    if let Ok(seconds) = text.parse() {
        return Some(seconds);
    }
    let (sign, mut rest) = text.strip_prefix('-').map_or((1.0, text), |rest| (-1.0, rest));
    let mut sum = 0.0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, tail) = rest.split_at(digits);
        let end = tail.find(|c: char| c.is_ascii_digit()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(end);
        let unit = match unit {
            "h" => 3600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 1e-3,
            _ => return None,
        };
        sum += number.parse::<f64>().ok()? * unit;
        rest = tail;
    }
    Some(sign * sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: Ollama's forms are understood, and anything else asks for nothing.
    #[test]
    fn durations_are_parsed() {
        let text = |text: &str| keep_alive(&Scalar::Text(text.to_owned()));
        let seconds = |seconds| Some(Some(Duration::from_secs(seconds)));
        for (given, expected) in [
            ("5m", seconds(300)),
            ("1h30m", seconds(5400)),
            ("10", seconds(10)),
            ("0", seconds(0)),
            ("1.5s", Some(Some(Duration::from_millis(1500)))),
            ("200ms", Some(Some(Duration::from_millis(200)))),
            ("-1", Some(None)),
            ("-1m", Some(None)),
            ("5 minutes", None),
            ("NaN", None),
            ("1e300h", None),
            ("5", seconds(5)),
            ("m", None),
        ] {
            assert_eq!(text(given), expected, "{given}");
        }
        assert_eq!(keep_alive(&Scalar::Number(0.0)), seconds(0));
        assert_eq!(keep_alive(&Scalar::Number(-1.0)), Some(None));
        assert_eq!(keep_alive(&Scalar::Number(1e300)), None);
        assert_eq!(keep_alive(&Scalar::Other), None);
    }
}
