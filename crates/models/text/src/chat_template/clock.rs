//! The template function `strftime_now`, which inserts the current date. The time is in UTC, and
//! names are English, as in Python's default locale.

use std::time::SystemTime;

use jiff::Timestamp;
use jiff::fmt::strtime::{BrokenDownTime, Config};
use jiff::tz::TimeZone;

/// Formats `now` as Python's `strftime` does. Unknown directives are copied unchanged, and so is
/// the whole format if the time is outside of the years -9999 to 9999.
pub(super) fn format_utc(now: SystemTime, format: &str) -> String {
    let Ok(timestamp) = Timestamp::try_from(now) else { return format.to_owned() };
    let time = BrokenDownTime::from(&timestamp.to_zoned(TimeZone::UTC));
    let config = Config::new().lenient(true);
    // `%Q` is the name of the time zone in jiff, but unknown to Python.
    let escaped = format.split("%%").map(|part| part.replace("%Q", "%%Q")).collect::<Vec<_>>();
    time.to_string_with_config(&config, escaped.join("%%")).unwrap_or_else(|_| format.to_owned())
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    /// Goal: dates around leap days and year ends, and every directive that templates use, are
    /// formatted as by Python's `strftime`.
    #[test]
    fn formats_like_python() {
        let check = |seconds: u64, format: &str, expected: &str| {
            let now = UNIX_EPOCH + Duration::from_secs(seconds);
            assert_eq!(format_utc(now, format), expected);
        };
        check(0, "%d %b %Y, %A", "01 Jan 1970, Thursday");
        check(951_782_400, "%Y-%m-%d %a %j", "2000-02-29 Tue 060");
        check(1_735_689_599, "%d %B %Y %H:%M:%S %p", "31 December 2024 23:59:59 PM");
        check(1_735_689_600, "%-d/%-m/%y %I %F %T", "1/1/25 12 2025-01-01 00:00:00");
        check(4_107_542_400, "%d %b %Y%%", "01 Mar 2100%");
        check(0, "%Q %", "%Q %");
    }
}
