//! `strftime_now`: dates for templates that tell the model what day it is. In UTC, since a server
//! has no other place of its own; names are English, as in Python's default locale.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// `now` by a format like C's `strftime`. A directive that is not known stays as it is.
pub(super) fn format_utc(now: SystemTime, format: &str) -> String {
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, second_of_day) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day, day_of_year) = date(days);
    let (hour, minute, second) =
        (second_of_day / 3600, second_of_day / 60 % 60, second_of_day % 60);
    let month_name = MONTHS[month as usize - 1];
    // The first of January 1970 was a Thursday.
    let weekday = (days + 4) % 7;
    let weekday_name = WEEKDAYS[weekday as usize];
    let hour_of_half = if hour % 12 == 0 { 12 } else { hour % 12 };
    let mut text = String::new();
    let mut rest = format.chars();
    while let Some(char) = rest.next() {
        if char != '%' {
            text.push(char);
            continue;
        }
        // `%-d` is `%d` without a leading zero.
        let mut directive = rest.next();
        let bare = directive == Some('-');
        if bare {
            directive = rest.next();
        }
        let two = |number: u64| if bare { number.to_string() } else { format!("{number:02}") };
        let part = match directive {
            Some('Y') => year.to_string(),
            Some('y') => two(year % 100),
            Some('m') => two(month),
            Some('d') => two(day),
            Some('e') => format!("{day:2}"),
            Some('j') if bare => day_of_year.to_string(),
            Some('j') => format!("{day_of_year:03}"),
            Some('H') => two(hour),
            Some('I') => two(hour_of_half),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => month_name[..3].to_owned(),
            Some('A') => weekday_name.to_owned(),
            Some('a') => weekday_name[..3].to_owned(),
            Some('w') => weekday.to_string(),
            Some('u') => (if weekday == 0 { 7 } else { weekday }).to_string(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('R') => format!("{hour:02}:{minute:02}"),
            Some('D') => format!("{month:02}/{day:02}/{:02}", year % 100),
            Some('s') => seconds.to_string(),
            Some('Z') => "UTC".to_owned(),
            Some('z') => "+0000".to_owned(),
            Some('n') => "\n".to_owned(),
            Some('t') => "\t".to_owned(),
            Some('%') => "%".to_owned(),
            Some(other) if bare => format!("%-{other}"),
            Some(other) => format!("%{other}"),
            None => "%".to_owned(),
        };
        text.push_str(&part);
    }
    text
}

/// Year, month and day of the month (both from 1) and day of the year (from 1) of a day counted
/// from the first of January 1970.
fn date(mut days: u64) -> (u64, u64, u64, u64) {
    let is_leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let day_of_year = days + 1;
    let lengths = [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in lengths {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1, day_of_year)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Goal: dates around leap days and year ends, and every directive templates use, come out as
    /// Python's `strftime` has them.
    #[test]
    fn formats_as_python_does() {
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
