//! Takes a stream of server-sent events apart, as the WHATWG HTML standard, section 9.2, says.

use super::Failure;
use super::request::failed;

/// Maximum number of bytes of the data of one event, and of one line.
const MAX_EVENT_BYTES: usize = 1 << 20;

/// Collects the data of events from pieces that end anywhere.
#[derive(Debug, Default)]
pub(super) struct EventData {
    /// The beginning of a line whose end has not arrived.
    line: Vec<u8>,
    /// Data of the current event.
    data: Vec<u8>,
    /// The current event has data.
    has_data: bool,
    /// The last byte was a carriage return, so that a line feed belongs to it.
    after_return: bool,
}

impl EventData {
    /// Adds bytes, and calls `on_event` with the data of each event that they complete.
    ///
    /// # Errors
    /// If an event is too long, and the first error of `on_event`.
    pub(super) fn push(
        &mut self,
        mut bytes: &[u8],
        mut on_event: impl FnMut(&[u8]) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        while !bytes.is_empty() {
            if std::mem::take(&mut self.after_return) && bytes[0] == b'\n' {
                bytes = &bytes[1..];
                continue;
            }
            let end = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
            let part = &bytes[..end.unwrap_or(bytes.len())];
            if self.line.len() + self.data.len() + part.len() > MAX_EVENT_BYTES {
                let message = format!("expected at most {MAX_EVENT_BYTES} bytes of an event");
                return Err(failed("malformed event", message));
            }
            self.line.extend_from_slice(part);
            let Some(end) = end else { break };
            self.after_return = bytes[end] == b'\r';
            bytes = &bytes[end + 1..];
            self.end_line(&mut on_event)?;
        }
        Ok(())
    }

    fn end_line(
        &mut self,
        on_event: &mut impl FnMut(&[u8]) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        if self.line.is_empty() {
            let has_data = std::mem::take(&mut self.has_data);
            let result = if has_data { on_event(&self.data) } else { Ok(()) };
            self.data.clear();
            return result;
        }
        if let Some(value) = self.line.strip_prefix(b"data") {
            // A field without a colon has an empty value. Other fields, and comments, are ignored.
            let value = value.strip_prefix(b":").or(value.is_empty().then_some(value));
            if let Some(value) = value {
                if std::mem::replace(&mut self.has_data, true) {
                    self.data.push(b'\n');
                }
                self.data.extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
            }
        }
        self.line.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The data of all events of a stream that arrives in pieces of this many bytes.
    fn events(stream: &str, piece: usize) -> Vec<String> {
        let mut data = EventData::default();
        let mut events = Vec::new();
        for bytes in stream.as_bytes().chunks(piece) {
            let pushed = data.push(bytes, |event| {
                events.push(String::from_utf8(event.to_vec()).expect("UTF-8"));
                Ok(())
            });
            pushed.expect("short events");
        }
        events
    }

    /// Goal: lines end as the standard allows, comments and other fields are ignored, data lines
    /// are joined, and an event that was cut off is dropped, wherever the pieces end.
    #[test]
    fn events_are_taken_apart_as_the_standard_says() {
        let cases: [(&str, &[&str]); 8] = [
            ("data: a\n\ndata: b\n\n", &["a", "b"]),
            ("data: a\r\n\r\ndata: b\r\rdata: c\n\n", &["a", "b", "c"]),
            (": ping\n\nevent: x\nid: 1\ndata:a\n\n", &["a"]),
            ("data:  a\ndata: b\ndata\n\n", &[" a\nb\n"]),
            ("data\n\n\n\ndatabase: x\n\n", &[""]),
            ("data: {\"text\": \"\u{e9}\u{1f980}\"}\n\n", &["{\"text\": \"\u{e9}\u{1f980}\"}"]),
            ("data: a\n\ndata: cut off\n", &["a"]),
            ("\n\r\n\n", &[]),
        ];
        for (stream, expected) in cases {
            for piece in 1..=stream.len() {
                assert_eq!(events(stream, piece), expected, "{stream:?} in pieces of {piece}");
            }
        }
    }

    /// Goal: the memory for an endless line or event is bounded.
    #[test]
    fn endless_events_are_refused() {
        for line in ["data: a", "data: a\n"] {
            let mut data = EventData::default();
            let endless = line.repeat(1_000);
            let result = (0..2_000).try_for_each(|_| data.push(endless.as_bytes(), |_| Ok(())));
            assert!(
                matches!(result, Err(Failure::Counted { kind, .. }) if kind == "malformed event")
            );
            assert!(data.line.len() + data.data.len() <= MAX_EVENT_BYTES);
        }
    }
}
